"""Import of existing timings: exchange files, logs of nccl-tests and of runs, traces, aiconfigurator's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import is_folder
from autoplan.profiler.record import Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store.marks import Mark

AICONFIGURATOR = "aiconfigurator"


def read_source(
    source: str, *, device: str | None = None, operation: str | None = None, unknown: Counter[str] | None = None
) -> Iterator[Record | RunRecord | Mark]:
    """Return the records, runs and marks of a file, or of the installed wheel's tables (`AICONFIGURATOR`).

    A file, or a folder of traces, is read completely before this returns, so that an invalid one adds nothing.
    `device` names the device of a log or trace, or selects a table; `operation` is the operation of a log that does not
    contain it.  Records of an exchange file with an operation unknown to this version are skipped, and counted by
    operation in `unknown`.
    """
    from autoplan.profiler.imports.aiconfigurator import read_records
    from autoplan.profiler.imports.kineto import is_trace
    from autoplan.profiler.imports.kineto_records import read_trace_records
    from autoplan.profiler.imports.nccl_inspector import is_log, read_inspector_records
    from autoplan.profiler.imports.nccl_tests import read_log
    from autoplan.profiler.imports.nsight import is_report
    from autoplan.profiler.imports.rocpd import is_database
    from autoplan.profiler.imports.rocprof import is_output
    from autoplan.profiler.store.exchange import is_exchange, read_exchange

    path = Path(source)
    if source == AICONFIGURATOR:
        return read_records(devices=[device] if device else None)
    if is_report(path) or is_database(path) or is_output(path):
        raise InputError(
            f"{path}: traces of Nsight Systems, rocprofv3 and rocmProfileData have no kernel shapes: import a trace of "
            "torch's profiler made with record_shapes=True; `autoplan read` shows what ran"
        )
    is_inspected = is_log(path)
    if is_inspected or is_folder(path) or is_trace(path):
        if operation:
            raise InputError(f"{path}: contains its operations: leave --operation out")
        return iter((read_inspector_records if is_inspected else read_trace_records)(path, device=device))
    if not is_exchange(path):
        return iter(read_log(path, device=device, operation=operation))
    if device or operation:
        raise InputError(f"{path}: an export contains its devices and operations: leave --device and --operation out")
    unknown = Counter() if unknown is None else unknown
    num_known = sum(1 for _ in read_exchange(path, unknown))
    if unknown and not num_known:
        raise InputError(f"{path}: this autoplan knows none of its operations ({', '.join(unknown)}): update autoplan")
    return read_exchange(path)
