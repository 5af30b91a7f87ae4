"""Timeline of a step as Chrome trace events, for ui.perfetto.dev and other viewers.

Each pipeline stage, whose ranks all do the same, is a process, each of its streams a thread; a counter shows the
memory.  Format: Chrome's "Trace Event Format", JSON object form, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from autoplan.base.version import __version__
from autoplan.report.terminal import number_ranges
from autoplan.spec.terms import STREAMS
from autoplan.spec.timeline import Event, RankTimeline, Timeline


def trace_json(line: Timeline, plan: str) -> str:
    """Return the trace of one step as the text of a file; `plan` is the description of the plan."""
    return msgspec.json.encode(
        {
            "traceEvents": [event for at, rank in enumerate(line.ranks) for event in _process(at, rank)],
            "displayTimeUnit": "ms",
            "otherData": {
                "made by": f"autoplan {__version__}",
                "plan": plan,
                "step_s": line.step_s,
                "memory_capacity_bytes": {rank.place.name: rank.place.capacity_bytes for rank in line.ranks},
            },
        }
    ).decode()


def _process(at: int, rank: RankTimeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a stage: names first, then slices by thread, then the counter."""
    pid = at + 1  # 0 is the idle process of a machine
    ranks = f"rank{'s' * (len(rank.ranks) > 1)} {number_ranges(rank.ranks)}"
    yield _metadata_event(pid, 0, "process_name", f"{rank.place.words}: {ranks}")
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": at}}
    by_stream: dict[str, list[Event]] = {}
    for event in rank.events():
        by_stream.setdefault(event.stream, []).append(event)
    tid = 0
    for stream in STREAMS:
        for lane, events in enumerate(_lanes(by_stream.get(stream, ()))):
            tid += 1
            yield _metadata_event(pid, tid, "thread_name", stream if lane == 0 else f"{stream} ({lane + 1})")
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            yield from (_slice(pid, tid, event, start, end) for event, start, end in events)
    for time, memory_bytes in zip(rank.memory_time_s.tolist(), rank.memory_bytes.tolist(), strict=True):
        counted = {"ph": "C", "pid": pid, "name": "reserved memory", "args": {"bytes": round(memory_bytes)}}
        yield counted | {"ts": _microseconds(_nanoseconds(time))}


def _metadata_event(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _lanes(events: Iterable[Event]) -> list[list[tuple[Event, int, int]]]:
    """Return (event, start, end in nanoseconds) in the fewest lanes without overlap: slices of a thread must nest."""
    lanes: list[list[tuple[Event, int, int]]] = []
    for event in sorted(events, key=lambda item: item.start_s):
        start, end = _nanoseconds(event.start_s), _nanoseconds(event.start_s + event.duration_s)
        lane = next((lane for lane in lanes if lane[-1][2] <= start), None)
        if lane is None:
            lane = []
            lanes.append(lane)
        lane.append((event, start, end))
    return lanes


def _slice(pid: int, tid: int, event: Event, start: int, end: int) -> dict[str, Any]:
    arguments = {"microbatch": event.microbatch, "chunk": event.chunk}
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": event.name,
        "cat": event.kind,
        "ts": _microseconds(start),
        "dur": _microseconds(end - start),
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _nanoseconds(seconds: float) -> int:
    """Round as trace readers do, so that neighbours keep a common border."""
    return round(seconds * 1e9)


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000
