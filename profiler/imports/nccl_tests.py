"""Reader of the tables and JSON files of nccl-tests and rccl-tests.

Supported are `all_reduce_perf`, `all_gather_perf`, `reduce_scatter_perf`, `alltoall_perf`, `broadcast_perf` and
`sendrecv_perf`.  Their size is the whole buffer of a rank (doc/PERFORMANCE.md of nccl-tests: the output of an
all-gather, the input of a reduce-scatter), as in `SHAPES`; their time is the mean of the iterations, in microseconds.
The lines of the ranks define the groups; hosts are assumed to be scale-up domains, except for devices whose shipped
clusters connect several hosts by their fabric.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import read_text
from autoplan.base.units import cleaned
from autoplan.profiler.machine.device_names import device_named
from autoplan.profiler.record import MAX_SAMPLES, Fingerprint, Record
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.spec.operations import Operation

MAX_BYTES = 64 * 2**20
MAX_ROWS = 100_000

_OPERATIONS: dict[str, Operation] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
# Names in rccl-tests' own JSON.
_RCCL_NAMES = {name.replace("_", ""): operation for name, operation in _OPERATIONS.items()}
_DTYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "double": "fp64", "f8e4m3": "fp8", "fp8_e4m3": "fp8"}

_PREFIX = re.compile(r"^(?:\[\d+,\d+\]<std\w+>:|\s*\d+:)")  # of mpirun --tag-output, srun --label
_TEST = re.compile(r"(?<![a-z_])(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)_perf")
_RANK = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d+)\s+(?:Group\s+(?P<group>\d+)\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)"
    r"\s+device\s+\d+\s+\[[^\]]*\]\s+(?P<device>.+)"
)
_LIBRARY = re.compile(r"nccl-library=(?P<code>\d+)")
_VERSION = re.compile(
    r"(?P<name>[NR])CCL version\s*:?\s*(?P<version>\d+\.\d+\.\d+)(?:\+(?P<kind>cuda|hip)(?P<runtime>\d+\.\d+))?"
)
_COLUMNS = re.compile(r"#?\s*size\s+count\s+type\b.*")
_TIMES = ("time", "cputime")
# Older versions print the largest deviation instead of the number of wrong elements; their tolerance per device.
_MAX_DEVIATION = {"half": 1e-2, "float": 1e-5, "double": 1e-12}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    rank: int
    group: int
    host: str
    device: str


@dataclass(slots=True, kw_only=True)
class _Run:
    """State of a test while its output is read."""

    operation: Operation | None = None
    ranks: list[_Rank] = field(default_factory=list)
    collectives: str = ""
    runtime: str = ""
    is_rccl: bool = False
    columns: Sequence[str] = ()


def read_log(path: Path, *, device: str | None = None, operation: str | None = None) -> list[Record]:
    """Return the records of a log or JSON file of one or several tests.

    `device` is autoplan's id of the devices, for logs without or with another name; `operation` is for logs that do not
    contain it.  A failed test gives records marked as failed; anything ambiguous raises an error in one line.
    """
    operation_name = _OPERATIONS.get((operation or "").removesuffix("_perf"), operation)
    if operation_name is not None and operation_name not in _OPERATIONS.values():
        raise InputError(f"--operation {operation!r}: known are {', '.join(_OPERATIONS.values())}")
    text = read_text(path, most_bytes=MAX_BYTES)
    run = _Run(operation=operation_name)  # type: ignore[arg-type]  # one of the values above
    try:
        records = (_from_json if text.lstrip().startswith("{") else _from_table)(text, run, device)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if not records:
        raise InputError(f"{path}: holds no results of nccl-tests or rccl-tests, and is no export of autoplan")
    if len(records) > MAX_ROWS:
        raise InputError(f"{path}: more than {MAX_ROWS:,} results: split it")
    return records


def _from_table(text: str, run: _Run, device: str | None) -> list[Record]:
    records: list[Record] = []
    stated = run.operation
    for number, raw_line in enumerate(text.splitlines(), start=1):
        line = _PREFIX.sub("", cleaned(raw_line.expandtabs())).strip()
        if match := _TEST.search(line):
            run.operation = stated or _OPERATIONS[match[1]]
        run.is_rccl |= line.startswith(("rccl-tests", "RCCL version"))
        if match := _RANK.match(line):
            if run.columns:  # the next test in the same log
                run.columns, run.ranks = (), []
            group = int(match["group"] or 0)
            run.ranks.append(_Rank(rank=int(match["rank"]), group=group, host=match["host"], device=match["device"]))
        elif match := _LIBRARY.search(line):
            run.collectives = f"nccl {_number(int(match['code']))}"
        elif match := _VERSION.search(line):
            run.collectives = f"{match['name'].lower()}ccl {match['version']}"
            if match["runtime"]:
                run.runtime = f"{'rocm' if match['kind'] == 'hip' else 'cuda'} {match['runtime']}"
        elif _COLUMNS.match(line):
            run.columns = line.removeprefix("#").split()
            if lacking := [name for name in ("size", "type") if name not in run.columns]:
                raise InputError(f"line {number}: the table has no column {lacking[0]!r}")
        elif run.columns and line[:1].isdigit():
            try:
                records += _row(line.split(), run, device)
            except (ValueError, IndexError) as error:
                raise InputError(f"line {number}: {error}") from None
    return records


def _row(cells: Sequence[str], run: _Run, device: str | None) -> list[Record]:
    """Return the records of one table line: out of place and in place, if the line has both."""
    starts = [at for at, name in enumerate(run.columns) if name in _TIMES]
    if len(cells) < len(run.columns) - ("timestamp" in run.columns):
        raise InputError(f"{len(cells)} cells under {len(run.columns)} columns: the line is cut or mixed with another")
    head = dict(zip(run.columns[: starts[0]], cells, strict=False))
    if run.columns[starts[0]] == "cputime":
        raise InputError("times are those of the CPU (option -C): run the test without it")
    places = ("out of place", "in place") if len(starts) == 2 else ("in place",)
    records = []
    for place, start in zip(places, starts, strict=True):
        error = next((at for at in range(start, len(run.columns)) if run.columns[at] in ("#wrong", "error")), None)
        if error is None:
            raise InputError("no column says whether results were right (#wrong or error): give the whole output")
        num_wrong = _num_wrong(cells[error])
        if run.columns[error] == "error":
            num_wrong = float(num_wrong > _MAX_DEVIATION.get(head["type"], 0.0) * (len(run.ranks) - 1))
        records += _record(run, head, place, (float(cells[start]) * 1e-6,), num_wrong, device)
    return records


def _from_json(text: str, run: _Run, device: str | None) -> list[Record]:
    """Read a JSON file of nccl-tests, or rccl-tests' JSON lines, one per result."""
    try:
        if "\n{" in text.strip() or '"busBw"' in text:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            return [record for row in rows for record in _from_rccl_json(row, run, device)]
        return list(_from_nccl_json(json.loads(text), run, device))
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"not the JSON of nccl-tests or rccl-tests ({cleaned(repr(error))})") from None


def _from_nccl_json(table: Mapping[str, Any], run: _Run, device: str | None) -> Iterator[Record]:
    match = _TEST.search(str(table["args"][0]))
    ranks = [
        _Rank(rank=int(entry["rank"]), group=int(entry["group"]), host=entry["hostname"], device=entry["device_info"])
        for entry in table["config"]["devices"]
    ]
    run = replace(
        run,
        operation=run.operation or (_OPERATIONS[match[1]] if match else None),
        ranks=ranks,
        collectives=f"nccl {_number(int(table['nccl_version']))}",
    )
    for row in table["results"]:
        for key, place in (("out_of_place", "out of place"), ("in_place", "in place")):
            if (result := row.get(key)) is None:
                continue
            if "cpu_time" in result:
                raise InputError("times are those of the CPU (option -C): run the test without it")
            runs = row.get(f"{key}_per_iter")
            times_us = runs["times_us"][runs["skipped_iterations"] :][:MAX_SAMPLES] if runs else [result["time"]]
            samples_s = tuple(float(time) * 1e-6 for time in times_us)
            yield from _record(run, row, place, samples_s, _num_wrong(result["nwrong"]), device)


def _from_rccl_json(row: Mapping[str, Any], run: _Run, device: str | None) -> list[Record]:
    # A build without MPI, with the devices of one host; a build with MPI has other keys and is refused.
    ranks = [_Rank(rank=at, group=0, host="", device="") for at in range(int(row["gpus"]))]
    run = replace(run, operation=run.operation or _RCCL_NAMES[row["name"].lower()], ranks=ranks, is_rccl=True)
    place = "in place" if int(row["inPlace"]) else "out of place"
    return _record(run, row, place, (float(row["time"]) * 1e-6,), _num_wrong(row["#wrong"]), device)


def _record(
    run: _Run,
    row: Mapping[str, Any],
    place: str,
    samples_s: tuple[float, ...],
    num_wrong: float,
    device: str | None,
) -> list[Record]:
    """Return the record of one result; empty for an empty message, as in the smallest sizes of some tests."""
    if run.operation is None:
        raise InputError("does not say which collective was run: name it with --operation all_reduce")
    if (size := int(row["size"])) == 0:
        return []
    layout, machine = _layout(run, device)
    redop = str(row.get("redop", "none"))
    return [
        Record(
            fingerprint=machine,
            operation=run.operation,
            shape=(*layout, size),
            dtype=_DTYPES.get(row["type"], cleaned(row["type"])),
            samples_s=() if num_wrong else samples_s,
            kernel=place,
            mode="imported",
            status="failed" if num_wrong else "ok",
            reason="the test found wrong elements" if num_wrong else "",
            conditions={} if redop in ("none", "sum") else {"reduction": cleaned(redop)},
            source="rccl-tests" if run.is_rccl else "nccl-tests",
        )
    ]


def _layout(run: _Run, device: str | None) -> tuple[tuple[int, int, int], Fingerprint]:
    """Return ((devices per group, devices per group and scale-up domain, concurrent groups), machine)."""
    if not run.ranks:
        raise InputError("lacks the lines that say which rank ran where: give the whole output of the test")
    if len({rank.rank for rank in run.ranks}) < len(run.ranks):
        raise InputError("several ranks have the same number: each process ran alone, as nccl-tests do without MPI=1")
    names = {rank.device for rank in run.ranks}
    if device is None and (len(names) > 1 or not all(names)):
        shown = ", ".join(sorted(cleaned(name) for name in names if name)) or "none"
        raise InputError(f"devices named are {shown}: name the one kind with --device h100-sxm")
    name = device or device_named(cleaned(min(names)))
    hosts = Counter(rank.host for rank in run.ranks)
    groups = Counter(rank.group for rank in run.ranks)
    inside = Counter((rank.group, rank.host) for rank in run.ranks)
    for title, counts in (("groups", groups), ("hosts of a group", inside)):
        if len(set(counts.values())) > 1:
            raise InputError(f"{title} have {min(counts.values())} to {max(counts.values())} ranks: they must be equal")
    if (num_devices := next(iter(groups.values()))) == 1:
        raise InputError("groups of one device: nothing is sent in them")
    machine = Fingerprint(
        device=name,
        devices_per_node=max(hosts.values()),
        num_hosts=len(hosts),
        runtime=run.runtime,
        collectives=run.collectives,
    )
    in_domain = max(next(iter(inside.values())), min(num_devices, rack_devices(name)))
    return (num_devices, in_domain, len(groups)), machine


def rack_devices(device: str) -> int:
    """Return the number of devices that a fabric connects across hosts in the shipped clusters; 0 without one."""
    clusters = [cluster for cluster in map(load_cluster, preset_clusters()) if cluster.device.name == device]
    sizes = [
        cluster.levels[-1].num_devices
        for cluster in clusters
        if cluster.levels[-1].num_devices > cluster.devices_per_node
    ]
    return max(sizes, default=0)


def _number(code: int) -> str:
    """Return '2.28.9' for NCCL's number 22809."""
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"


def _num_wrong(text: Any) -> float:
    """Return the number of wrong elements; 0 if they were not counted."""
    return 0.0 if text in (None, "N/A") else float(text)
