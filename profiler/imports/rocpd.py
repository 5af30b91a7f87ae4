"""SQLite databases of AMD's profilers: the activity of each device in a step, as from traces of torch's profiler.

Two programs write one.  rocprofv3 does by default since ROCm 7 (`*_results.db`): tables and columns follow the schemas
3 and 4 in ROCm/rocm-systems, projects/rocprofiler-sdk/source/share/rocprofiler-sdk-rocpd, of which the latter puts the
device of a kernel in `rocpd_track`; names of roctx ranges are the messages of their events (generateRocpd.cpp there).
The older rocmProfileData (`*.rpd`) has one table of everything on a device (ROCm/rocmProfileData, rocpd_python/rocpd,
schema_data).  Times are nanoseconds in both.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.profiler.imports.kineto import MAX_OBJECTS, RankTrace, Span, activity_of, summed
from autoplan.profiler.imports.nsight import STEP
from autoplan.profiler.imports.sqlite_file import check_number, columns_of, names_in, reading, span_of, table_names

KERNELS, COPIES, RANGES, TRACKS = "rocpd_kernel_dispatch", "rocpd_memory_copy", "rocpd_region", "rocpd_track"
OPERATIONS, CALLS = "rocpd_op", "rocpd_api"  # of rocmProfileData
_COPIED = {"FillBuffer": "Memset"}  # types of its operations that have no name of their own
_MARKER = "UserMarker"  # its name of a call for the beginning and end of a roctx range


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """Kernels and copies by process and device, and ranges that mark steps by process."""

    spans: dict[tuple[Hashable, int], list[Span]] = field(default_factory=lambda: defaultdict(list))
    marks: dict[Hashable, list[Span]] = field(default_factory=lambda: defaultdict(list))

    def add(self, process: Hashable, device: int, span: Span) -> None:
        if span.end_s > span.start_s:
            self.spans[process, device].append(span)

    def add_mark(self, process: Hashable, mark: Span) -> None:
        if STEP.match(mark.name) and mark.end_s > mark.start_s:
            self.marks[process].append(mark)


def is_database(path: Path) -> bool:
    """Return whether a file is a database of rocprofv3 or rocmProfileData."""
    return bool({KERNELS, OPERATIONS} & names_in(path))


def read_database(path: Path) -> list[RankTrace]:
    """Return the activity of each device; roctx ranges with names such as "step 7" mark the steps.

    Raises InputError if the file is no such database, or has no kernels.
    """
    with reading(path, what="database of rocprofv3 or rocmProfileData") as database:
        names = table_names(database)
        traced = _dispatches(database, names) if KERNELS in names else _operations(database, names)
    check_number(path, sum(map(len, traced.spans.values())))
    if not traced.spans:
        raise InputError(f"{path}: no kernels of a device in it: trace with rocprofv3 --kernel-trace")
    places = sorted(traced.spans, key=lambda place: (str(place[0]), place[1]))
    processes = list(dict.fromkeys(process for process, _ in places))
    return [
        summed(
            str(path) if len(places) == 1 else f"{path}, device {device} of process {processes.index(process)}",
            [(span, activity_of(span.name)) for span in traced.spans[process, device]],
            [(mark, False) for mark in traced.marks.get(process, [])],
            has_devices=True,
        )
        for process, device in places
    ]


def _dispatches(database: sqlite3.Connection, tables: set[str]) -> _Traced:
    """Return what a database of rocprofv3 holds; a number means something else under every `guid`."""
    traced = _Traced()
    symbols = _named(database, "rocpd_info_kernel_symbol", "display_name")
    place: dict[tuple[Any, Any], int] = {}
    num_devices: Counter[Any] = Counter()
    for guid, agent in database.execute("SELECT guid, id FROM rocpd_info_agent WHERE type = 'GPU' ORDER BY id"):
        place[guid, agent] = num_devices[guid]
        num_devices[guid] += 1
    device, process = _owner(database, KERNELS, "agent_id"), _owner(database, KERNELS, "pid")
    query = f'SELECT guid, start, "end", {process}, {device}, kernel_id FROM {KERNELS} AS of'
    for guid, start_ns, end_ns, pid, agent, kernel in _limited(database, query):
        span = span_of(start_ns, end_ns, symbols.get((guid, kernel)))
        traced.add((guid, pid), place.get((guid, agent), -1), span)
    if COPIES in tables:
        process = _owner(database, COPIES, "pid")
        query = f'SELECT guid, start, "end", {process}, src_agent_id, dst_agent_id FROM {COPIES} AS of'
        for guid, start_ns, end_ns, pid, *ends in _limited(database, query):
            for agent in {(guid, end) for end in ends} & place.keys():
                traced.add((guid, pid), place[agent], span_of(start_ns, end_ns, "Memcpy"))
    if RANGES in tables:
        for guid, start_ns, end_ns, pid, name in _ranges(database, tables):
            traced.add_mark((guid, pid), span_of(start_ns, end_ns, name))
    return traced


def _owner(database: sqlite3.Connection, table: str, column: str) -> str:
    """Return the expression of a row's process or device, which schema 4 has in the row's track."""
    if column in columns_of(database, table):
        return f"of.{column}"
    return f"(SELECT {column} FROM {TRACKS} AS track WHERE track.id = of.track_id AND track.guid = of.guid)"


def _named(database: sqlite3.Connection, table: str, column: str) -> dict[tuple[Any, Any], str]:
    query = f"SELECT guid, id, {column} FROM {table}"
    return {(guid, number): text.strip() for guid, number, text in database.execute(query) if isinstance(text, str)}


def _ranges(database: sqlite3.Connection, tables: set[str]) -> Iterator[tuple[Any, ...]]:
    """Yield (guid, start, end, process, name) of ranges whose name marks a step, or whose event has a message.

    rocprofv3 names every range after the function that made it, and keeps the user's text as the event's message;
    rocprof-sys names ranges by that text.
    """
    process = _owner(database, RANGES, "pid")
    steps = {key: text for key, text in _named(database, "rocpd_string", "string").items() if STEP.match(text)}
    query = f'SELECT guid, start, "end", {process}, name_id FROM {RANGES} AS of'
    numbers = ", ".join(str(int(number)) for _, number in steps)
    for guid, start_ns, end_ns, pid, name in _limited(database, f"{query} WHERE name_id IN ({numbers})"):
        yield guid, start_ns, end_ns, pid, steps.get((guid, name))
    if "rocpd_event" not in tables or "event_id" not in columns_of(database, RANGES):
        return
    query = (
        f'SELECT of.guid, of.start, of."end", {process}, event.extdata FROM {RANGES} AS of '
        "JOIN rocpd_event AS event ON event.id = of.event_id AND event.guid = of.guid "
        "WHERE event.extdata LIKE '%\"message\"%'"
    )
    for guid, start_ns, end_ns, pid, text in _limited(database, query):
        yield guid, start_ns, end_ns, pid, _message(text)


def _message(text: Any) -> str:
    try:
        return str(json.loads(text)["message"]).strip()
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _operations(database: sqlite3.Connection, tables: set[str]) -> _Traced:
    """Return what a database of rocmProfileData holds; it does not tell which process uses a device."""
    traced = _Traced()
    strings = dict(database.execute("SELECT id, string FROM rocpd_string").fetchall())
    query = f'SELECT gpuId, start, "end", description_id, opType_id FROM {OPERATIONS}'
    for device, start_ns, end_ns, name, kind in _limited(database, query):
        word = strings.get(kind)
        traced.add(None, int(device), span_of(start_ns, end_ns, strings.get(name) or _COPIED.get(str(word), word)))
    texts = "rocpd_ustring" if "rocpd_ustring" in tables else "rocpd_string"
    markers = [number for number, text in strings.items() if text == _MARKER]
    if CALLS in tables and markers:
        query = f'SELECT start, "end", string FROM {CALLS} AS of JOIN {texts} AS text ON text.id = of.args_id'
        for start_ns, end_ns, text in _limited(database, f"{query} WHERE apiName_id = {int(markers[0])}"):
            traced.add_mark(None, span_of(start_ns, end_ns, str(text).strip()))
    return traced


def _limited(database: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    yield from database.execute(f"{query} LIMIT {MAX_OBJECTS + 1}")
