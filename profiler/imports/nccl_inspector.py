"""Records of collectives from the logs of NCCL Inspector, a profiler plugin of NCCL.

Every process writes a JSON object for each collective of each communicator (plugins/profiler/inspector of NCCL).  The
size is that of NCCL's call: for an all-gather and a reduce-scatter it is the part of one rank.  Types are not written;
bf16 is assumed, which moves as many bytes in the same time as others.  Nor is what ran beside a collective: its
times are used only where no others of the machine are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from autoplan.base.errors import InputError
from autoplan.base.files import is_folder, read_text
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.profiler.imports.kineto import json_head
from autoplan.profiler.imports.run_records import NOT_ALL_RANKS, Timed, run_records
from autoplan.profiler.record import Fingerprint, Record
from autoplan.spec.operations import Operation

SOURCE = "NCCL Inspector"
MAX_BYTES = 2**30  # of one process

_OPERATIONS: dict[str, Operation] = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
}
_OF_ONE_RANK = ("all_gather", "reduce_scatter")
# Communicator, collective and its number there: NCCL counts each kind by itself.
_Call = tuple[str, str, int]
_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class _Header(msgspec.Struct):
    id: str  # of the communicator
    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    n_ranks: _Count


class _Metadata(msgspec.Struct):
    hostname: str
    pid: int
    dump_timestamp_us: Annotated[int, msgspec.Meta(ge=0, lt=2**52)] = 0


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    coll_exec_time_us: Annotated[float, msgspec.Meta(ge=0)]


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None  # none for messages


def is_log(path: Path) -> bool:
    """Return whether a file, or the first file of a folder, begins like a log of NCCL Inspector."""
    head = json_head(next(iter(_files(path)), path))
    return b'"inspector_output_format_version"' in head


def read_inspector_records(path: Path, *, device: str | None = None) -> list[Record]:
    """Return the records of a log, or of a folder with the logs of all processes of a run.

    `device` is autoplan's id of the devices, which the logs do not name.

    Raises InputError if a line is none of a log, or no collective is of a known kind.
    """
    if not device:
        raise InputError(
            f"{path}: logs of NCCL Inspector do not name the devices: name their kind with --device h100-sxm"
        )
    lines = [line for file in _files(path) for line in _lines(file)]
    processes = sorted({(line.metadata.hostname, line.metadata.pid) for line in lines})
    number = {process: at for at, process in enumerate(processes)}
    on_host = Counter(host for host, _ in processes)
    by_call: dict[_Call, dict[int, _Line]] = defaultdict(dict)
    for line in lines:
        if (collective := line.coll_perf) is not None:
            by_call[line.header.id, collective.coll, collective.coll_sn][line.header.rank] = line
    machine = Fingerprint(
        device=device, devices_per_node=max(on_host.values(), default=0), num_hosts=len(on_host), collectives="nccl"
    )
    newest_us = max((line.metadata.dump_timestamp_us for line in lines), default=0)
    records = run_records(
        _timed(by_call, number),
        machine,
        source=SOURCE,
        mode="imported",
        conditions={"log": cleaned(path.name)},
        author=user_name(),
        host=cleaned(processes[0][0]) if len(on_host) == 1 else "",
        measured_at=datetime.fromtimestamp(1e-6 * newest_us, UTC).isoformat() if newest_us else "",
    )
    if not records:
        raise InputError(f"{path}: no collective of a known kind over the processes whose logs are here")
    return records


def _files(path: Path) -> list[Path]:
    return [item for item in sorted(path.rglob("*.log")) if item.is_file()] if is_folder(path) else [path]


def _lines(path: Path) -> Iterator[_Line]:
    for at, text in enumerate(read_text(path, most_bytes=MAX_BYTES).splitlines(), start=1):
        if text.strip():
            try:
                yield msgspec.json.decode(text, type=_Line, strict=False)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise InputError(f"{path}, line {at}: no line of NCCL Inspector: {cleaned(str(error))}") from None


def _timed(
    by_call: Mapping[_Call, Mapping[int, _Line]], number: Mapping[tuple[str, int], int]
) -> Iterator[tuple[Timed, str]]:
    """Yield the collectives as the rank saw them that came last, with the reason why a time is not clean."""
    members: dict[str, set[int]] = defaultdict(set)
    for (communicator, *_), by_rank in by_call.items():
        members[communicator] |= {number[line.metadata.hostname, line.metadata.pid] for line in by_rank.values()}
    for (communicator, *_), by_rank in by_call.items():
        first = next(iter(by_rank.values()))
        collective, num_ranks = first.coll_perf, first.header.n_ranks
        assert collective is not None
        operation = _OPERATIONS.get(collective.coll)
        group = tuple(sorted(members[communicator]))
        seconds = [1e-6 * line.coll_perf.coll_exec_time_us for line in by_rank.values() if line.coll_perf is not None]
        if operation is None or len(group) != num_ranks or not collective.coll_msg_size_bytes or min(seconds) <= 0:
            continue
        yield (
            Timed(
                operation=operation,
                sizes=(collective.coll_msg_size_bytes * (num_ranks if operation in _OF_ONE_RANK else 1),),
                dtype="bf16",
                seconds=min(seconds),
                is_alone=True,
                kernel="nccl",
                group=group,
            ),
            "" if len(by_rank) == num_ranks else NOT_ALL_RANKS,
        )
