"""SQLite exports of Nsight Systems: the activity of each device in a step, as from traces of torch's profiler.

They are written by `nsys export --type sqlite report.nsys-rep`.  Tables and columns follow NVIDIA's reference
(docs.nvidia.com/nsight-systems, "SQLite Schema Reference"): a table exists only if something of its kind was traced,
times are nanoseconds, names are ids in `StringIds`, and the process is in the second 24 bits of a serialised id.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import is_file
from autoplan.profiler.imports.kineto import MAX_OBJECTS, RankTrace, Span, activity_of, summed
from autoplan.profiler.imports.sqlite_file import check_number, columns_of, names_in, reading, span_of, table_names

NAMES, KERNELS, RANGES = "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"
_COPIES = {"CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "Memset"}
_PROCESS_BIT = 2**24
# Ranges that mark a step: the names in torch's profiler, and common names of users.
STEP = re.compile(r"(ProfilerStep|((train|training)[ _])?(step|iter|iteration|batch))\s*[#:_ ]?\s*\d+$", re.IGNORECASE)


def is_report(path: Path) -> bool:
    """Return whether a file is a SQLite export of Nsight Systems, or a report that is not exported yet."""
    return is_file(path) and (path.suffix == ".nsys-rep" or NAMES in names_in(path))


def read_report(path: Path) -> list[RankTrace]:
    """Return the activity of each device, from a SQLite export of Nsight Systems.

    NVTX ranges with names such as "step 7" or "iteration_7" mark the steps.

    Raises InputError if the file is no export, or no device kernels were traced.
    """
    if path.suffix == ".nsys-rep":
        raise InputError(f"{path}: export it first: nsys export --type sqlite {path.name}")
    with reading(path, what="export of Nsight Systems") as database:
        tables = table_names(database)
        spans = _device_spans(database, tables) if KERNELS in tables else {}
        marks = _marks(database) if RANGES in tables else {}
    check_number(path, sum(map(len, spans.values())))
    if not spans:
        raise InputError(f"{path}: no kernels of a device in it: trace with nsys profile --trace cuda,nvtx")
    return [
        summed(
            str(path) if len(spans) == 1 else f"{path}, device {device} of process {process}",
            [(span, activity_of(span.name)) for span in of_device],
            [(mark, False) for mark in marks.get(process, [])],
            has_devices=True,
        )
        for (process, device), of_device in sorted(spans.items())
    ]


def _device_spans(database: sqlite3.Connection, tables: set[str]) -> dict[tuple[int, int], list[Span]]:
    """Return kernels, copies and fills by (process, device)."""
    spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for table in (KERNELS, *(table for table in _COPIES if table in tables)):
        columns = columns_of(database, table)
        process = "globalPid" if "globalPid" in columns else "0"
        name = (
            f"'{_COPIES[table]}'" if table in _COPIES else "(SELECT value FROM StringIds WHERE id = of.demangledName)"
        )
        query = f'SELECT start, "end", {process}, deviceId, {name} FROM {table} AS of LIMIT {MAX_OBJECTS + 1}'
        for start_ns, end_ns, serialised, device, text in database.execute(query):
            span = span_of(start_ns, end_ns, text)
            if span.end_s > span.start_s:
                spans[_process(serialised), int(device)].append(span)
    return spans


def _marks(database: sqlite3.Connection) -> dict[int, list[Span]]:
    """Return the ranges that mark steps, by process."""
    columns = columns_of(database, RANGES)
    names = [
        *(["text"] if "text" in columns else []),
        *(["(SELECT value FROM StringIds WHERE id = of.textId)"] if "textId" in columns else []),
    ]
    marks: dict[int, list[Span]] = defaultdict(list)
    query = f'SELECT start, "end", globalTid, COALESCE({", ".join([*names, "NULL"])}) FROM {RANGES} AS of'
    for start_ns, end_ns, serialised, text in _ended(database, query):
        if isinstance(text, str) and STEP.match(text.strip()):
            mark = span_of(start_ns, end_ns, text.strip())
            if mark.end_s > mark.start_s:
                marks[_process(serialised)].append(mark)
    return marks


def _ended(database: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of ranges that have an end; instant marks have none."""
    yield from database.execute(f'{query} WHERE "end" IS NOT NULL LIMIT {MAX_OBJECTS}')


def _process(serialised: Any) -> int:
    return 0 if serialised is None else int(serialised) // _PROCESS_BIT % _PROCESS_BIT
