"""What do people have already?  Exchange files, logs of nccl-tests and rccl-tests, the tables of aiconfigurator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autoplan.errors import InputError
from profiler.record import Record

AICONFIGURATOR = "aiconfigurator"


def read_source(source: str, *, device: str | None = None, operation: str | None = None) -> Iterator[Record]:
    """The records of a file, or of the installed wheel's tables where `source` is the word aiconfigurator.

    A file is read to its end before its first record comes, so that a bad one adds nothing.  `device` names the device
    of a log, or chooses one of the tables; `operation` is what a log measured that does not say it.
    """
    from profiler.imports.aiconfigurator import read_records
    from profiler.imports.nccl_tests import read_log
    from profiler.store.exchange import is_exchange, read_exchange

    path = Path(source)
    if source == AICONFIGURATOR:
        yield from read_records(devices=[device] if device else None)
    elif is_exchange(path):
        if device or operation:
            raise InputError(f"{path}: an export says its devices and operations: leave --device and --operation out")
        for _ in read_exchange(path):
            pass
        yield from read_exchange(path)
    else:
        yield from read_log(path, device=device, operation=operation)
