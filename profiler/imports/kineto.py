"""Traces of torch's profiler (Kineto): the activity of each rank in a step, and its hidden communication.

Every instant is attributed to one activity, so that times add up: to work if any of its kernels runs, otherwise to
communication, otherwise to copies, otherwise to idle time.  Exposed communication is defined as in Holistic Trace
Analysis: the time in which kernels of NCCL or RCCL run and no work does.  A trace without devices contains CPU
operators: the innermost one counts, and the communication of gloo, which runs in separate threads.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, is_folder
from autoplan.base.units import cleaned

MAX_BYTES = 2**32  # decompressed
MAX_OBJECTS = 2**25  # JSON objects: an event is two, and takes about 100 bytes of memory
MAX_S = 1e11  # maximum of a time and of a length: about 3,000 years
CHUNK_BYTES = 2**24
MAGIC = b"\x1f\x8b"
HEAD_BYTES = 2**20  # other programs put 25 KB of their own before the events

# Activities of a rank at an instant: the first one that runs counts, otherwise the rank is idle.
Activity = Literal["gemm", "attention", "optimizer", "kernels", "collectives", "messages", "copies"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
WORK: tuple[Activity, ...] = ("gemm", "attention", "optimizer", "kernels")
COMMUNICATION: tuple[Activity, ...] = ("collectives", "messages")

_NAMES: tuple[tuple[Activity, re.Pattern[str]], ...] = (
    ("messages", re.compile(r"^(n|r)ccl\w*(send_?recv|sendrecv)|^(gloo|nccl):(send|recv)", re.IGNORECASE)),
    (
        "collectives",
        re.compile(r"^(n|r)ccl|^gloo:|nvshmem|deep_?ep|oneccl|(multimem|one_shot|two_shot)_all_reduce", re.IGNORECASE),
    ),
    ("copies", re.compile(r"^(memcpy|memset|dma|copydevicetodevice|copyhosttodevice|copydevicetohost)", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa|_attn|\battn_", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor_apply|adam|fused_?sgd|lamb(?!da)|_foreach_", re.IGNORECASE)),
    (
        "gemm",
        re.compile(
            r"gemm|cutlass|xmma|nvjet|cijk|matmul|wgmma|hmma|tensile|splitk|gemv|dot_kernel|\bbmm_"
            r"|aten::(addmm|mm|bmm|baddbmm|_scaled_mm|_grouped_mm)$|conv\w{0,40}(fprop|dgrad|wgrad)",
            re.IGNORECASE,
        ),
    ),
)
NUM_MOMENTS = 200  # parts of a drawn step; in each part, the longest activity counts
_STEP = re.compile(r"ProfilerStep\s*#(\d+)")
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# Names of categories in older versions of Kineto.
_OLDER = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Operator": "cpu_op"}
_OPTIMIZER = "Optimizer.step#"
# Operators in which a thread waits for communication, which are no work that could hide it.
_WAITING = ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")
DecodedTrace = TypeVar("DecodedTrace")


class Event(msgspec.Struct):
    """Fields of an event that are read; others are ignored.  `ts` and `dur` are microseconds."""

    ph: str = ""
    name: Any = ""
    cat: Any = ""
    ts: float | str = ""
    dur: float | str = 0.0
    tid: int | str | None = None


AnyEvent = TypeVar("AnyEvent", bound=Event)


class _Distributed(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None


class _Trace(msgspec.Struct):
    traceEvents: list[Event]  # noqa: N815 - as the file calls it
    distributedInfo: _Distributed | None = None  # noqa: N815


class Piece(NamedTuple):
    """Part of a drawn step with one main activity of a rank; seconds since the start of the step."""

    activity: Activity | None  # None: nothing ran
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """Activity of one rank in a step, averaged over the traced steps; `seconds` and `idle_s` add up to `step_s`."""

    file: str
    rank: int | None = None  # None if the trace does not contain it
    world_size: int | None = None
    num_steps: int
    is_marked: bool  # whether steps are marked; otherwise the whole trace counts as one step
    has_devices: bool
    step_s: float
    marked_step_s: float | None  # mean length of the host's marks, after which work may still run
    seconds: dict[Activity, float]
    idle_s: float
    communication_s: float  # of collectives and messages, hidden or not
    exposed_s: float  # part of it without concurrent work
    longest: tuple[tuple[str, float], ...]  # kernels or operators by name, seconds per step
    drawn: tuple[Piece, ...]  # the last step traced

    @property
    def work_s(self) -> float:
        """Seconds in which any work runs."""
        return sum(self.seconds[name] for name in WORK)

    @property
    def hidden_s(self) -> float:
        """Communication with concurrent work, in seconds."""
        return self.communication_s - self.exposed_s


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran from one time to another."""

    start_s: float
    end_s: float
    name: str


def is_trace(path: Path) -> bool:
    """Return whether a file begins like the JSON of a trace, compressed or not."""
    return b'"traceEvents"' in json_head(path)


def json_head(path: Path) -> bytes:
    """Return the beginning of a JSON object, decompressed; blank if a file is none or cannot be read, or is a pipe."""
    if not is_file(path):
        return b""
    try:
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        if head.startswith(MAGIC):
            head = zlib.decompressobj(31).decompress(head, HEAD_BYTES)
    except (OSError, zlib.error):
        return b""
    return head if head.lstrip()[:1] == b"{" else b""


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return trace files, including those in folders."""
    traces: list[Path] = []
    for path in map(Path, paths):
        if not is_folder(path):
            traces.append(path)
            continue
        inside = [item for item in sorted(path.rglob("*.json*")) if is_trace(item)]
        if not inside:
            raise InputError(f"{path}: no traces of torch's profiler in it (*.json, *.json.gz)")
        traces += inside
    return traces


def read_trace(path: Path) -> RankTrace:
    """Return the activity of a rank, from a trace file of torch's profiler, possibly compressed with gzip.

    Events without a length are ignored.

    Raises InputError if the file is no trace, or has no kernels or operators (in the marked steps).
    """
    trace = decoded(path, _Trace)
    complete = complete_events(trace.traceEvents)
    try:
        on_device = [_span(event) for event in complete if event.cat in DEVICE_CATEGORIES]
        marks = [mark for mark in _marks(complete, has_devices=bool(on_device)) if mark[0].end_s > mark[0].start_s]
        spans = [(span, activity_of(span.name)) for span in on_device] or list(_on_host(complete))
    except ValueError:
        raise InputError(f"{path}: an event has no time in microseconds, or none that can be") from None
    spans = [(span, activity) for span, activity in spans if span.end_s > span.start_s]
    if not spans:
        raise InputError(f"{path}: a trace without kernels of a device and without CPU operators: profile a step again")
    distributed = trace.distributedInfo or _Distributed()
    summary = summed(str(path), spans, marks, has_devices=bool(on_device))
    return replace(summary, rank=distributed.rank, world_size=distributed.world_size)


@lru_cache(maxsize=2**14)
def activity_of(name: str) -> Activity:
    """Return the activity of a kernel or operator by its name."""
    return next((activity for activity, pattern in _NAMES if pattern.search(name)), "kernels")


def decoded(path: Path, kind: type[DecodedTrace], *, what: str = "trace of torch's profiler") -> DecodedTrace:
    """Return a trace decoded as `kind`, from a file possibly compressed with gzip; `what` it should be."""
    try:
        with path.open("rb") as stream:
            is_packed = stream.read(2) == MAGIC
        content = bytearray()  # in chunks: a single read of the maximum would allocate it for any file
        with gzip.open(path, "rb") if is_packed else path.open("rb") as stream:
            while len(content) <= MAX_BYTES and (chunk := stream.read(CHUNK_BYTES)):
                content += chunk
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {cleaned(str(error))}") from None
    if len(content) > MAX_BYTES or content.count(b"{") > MAX_OBJECTS:
        raise InputError(
            f"{path}: unpacked, it has more than {MAX_BYTES:,} bytes or {MAX_OBJECTS:,} objects: trace fewer steps"
        )
    try:
        return msgspec.json.decode(content, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: no {what}: {cleaned(str(error))}") from None


def complete_events(events: Iterable[AnyEvent]) -> list[AnyEvent]:
    """Return events that have a name and a length, with today's names of their categories."""
    complete = [event for event in events if event.ph == "X" and isinstance(event.name, str)]
    for event in complete:
        if isinstance(event.cat, str):
            event.cat = _OLDER.get(event.cat, event.cat)
    return complete


def _span(event: Event) -> Span:
    start_s, length_s = float(event.ts) * 1e-6, float(event.dur) * 1e-6
    if not abs(start_s) < MAX_S or not abs(length_s) < MAX_S:  # also true for NaN
        raise ValueError
    return Span(start_s, start_s + length_s, str(event.name))


def _marks(events: Iterable[Event], *, has_devices: bool) -> Iterator[tuple[Span, bool]]:
    """Yield the marks of steps, and whether each is on the device: the host's marks run ahead of the kernels."""
    for event in events:
        if event.cat in ("user_annotation", "gpu_user_annotation", "cpu_op") and _STEP.match(str(event.name)):
            yield _span(event), has_devices and event.cat == "gpu_user_annotation"


def _on_host(events: Sequence[Event]) -> Iterator[tuple[Span, Activity]]:
    """Yield the activity of threads on a rank without devices: the innermost operators, and communication."""
    by_thread: dict[Any, list[Span]] = {}
    for event in events:
        span = _span(event)
        if event.cat == "user_annotation" and span.name.startswith(("gloo:", "nccl:")):
            yield span, activity_of(span.name)
        elif event.cat == "cpu_op" or span.name.startswith(_OPTIMIZER):
            by_thread.setdefault(event.tid, []).append(span)
    for spans in by_thread.values():
        yield from _innermost(spans)


def _innermost(spans: list[Span]) -> Iterator[tuple[Span, Activity]]:
    """Yield the parts of nested operators of one thread in which each of them was the innermost."""
    stack: list[tuple[Span, bool]] = []  # with whether it is part of an optimizer update
    at_s = 0.0

    def piece(until_s: float) -> Iterator[tuple[Span, Activity]]:
        if stack and until_s > at_s:
            span, updates = stack[-1]
            if span.name in _WAITING:
                return
            yield Span(at_s, until_s, span.name), "optimizer" if updates else activity_of(span.name)

    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        while stack and stack[-1][0].end_s <= span.start_s:
            yield from piece(stack[-1][0].end_s)
            at_s = max(at_s, stack.pop()[0].end_s)
        yield from piece(span.start_s)
        at_s = span.start_s
        stack.append((span, span.name.startswith(_OPTIMIZER) or (bool(stack) and stack[-1][1])))
    while stack:
        yield from piece(stack[-1][0].end_s)
        at_s = max(at_s, stack.pop()[0].end_s)


def summed(
    file: str,
    spans: Sequence[tuple[Span, Activity]],
    marks: Sequence[tuple[Span, bool]],
    *,
    has_devices: bool,
) -> RankTrace:
    """Attribute every instant of the steps to one activity; `marks` contain whether each is on the device."""
    by_device = [span for span, is_device in marks if is_device]
    by_host = [span for span, is_device in marks if not is_device]
    steps = by_device or by_host
    start_s, end_s = min(span.start_s for span, _ in spans), max(span.end_s for span, _ in spans)
    if steps and (by_device or not has_devices):
        start_s, end_s = min(step.start_s for step in steps), max(step.end_s for step in steps)
    num_steps = max(len({step.name for step in steps}), 1)
    clipped = [
        (max(span.start_s, start_s), min(span.end_s, end_s), ACTIVITIES.index(activity))
        for span, activity in spans
        if span.end_s > start_s and span.start_s < end_s
    ]
    if not clipped:
        raise InputError(f"{file}: no kernel or operator runs in the marked steps: profile a step again")
    rows = np.asarray(clipped, dtype=np.float64)
    lengths_s, running = _instants(rows)
    chosen = _chosen(running)
    seconds = {name: float(lengths_s[chosen == at].sum()) / num_steps for at, name in enumerate(ACTIVITIES)}
    communicates = running[:, [ACTIVITIES.index(name) for name in COMMUNICATION]].any(axis=1)
    step_s = (end_s - start_s) / num_steps
    totals: dict[str, float] = {}
    for span, activity in spans:
        if activity not in COMMUNICATION:
            totals[span.name] = totals.get(span.name, 0.0) + (span.end_s - span.start_s) / num_steps
    longest = sorted(totals.items(), key=lambda item: -item[1])[:10]
    return RankTrace(
        file=file,
        num_steps=num_steps,
        is_marked=bool(steps),
        has_devices=has_devices,
        step_s=step_s,
        marked_step_s=float(np.mean([span.end_s - span.start_s for span in by_host])) if by_host else None,
        seconds=seconds,
        idle_s=step_s - sum(seconds.values()),
        communication_s=float(lengths_s[communicates].sum()) / num_steps,
        exposed_s=sum(seconds[name] for name in COMMUNICATION),
        longest=tuple((cleaned(name)[:80], time_s) for name, time_s in longest),
        drawn=draw(rows, end_s - step_s, end_s),
    )


def draw(spans: np.ndarray[Any, np.dtype[np.float64]], start_s: float, end_s: float) -> tuple[Piece, ...]:
    """Return the main activity of each of `NUM_MOMENTS`, equal ones joined; `spans` are (start, end, activity)."""
    lengths_s, running = _instants(spans)
    chosen = _chosen(running)
    borders_s, edges_s = np.unique(spans[:, :2]), np.linspace(start_s, end_s, NUM_MOMENTS + 1)
    took_s = np.array(
        [
            np.diff(np.interp(edges_s, borders_s, np.concatenate([[0.0], np.cumsum(lengths_s * (chosen == at))])))
            for at in range(len(ACTIVITIES))
        ]
    )
    idle_s = np.diff(edges_s) - took_s.sum(axis=0)
    mostly = np.where(idle_s > took_s.max(axis=0), -1, took_s.argmax(axis=0))
    begins = np.flatnonzero(np.diff(mostly, prepend=-2))
    ends = np.append(begins[1:], NUM_MOMENTS)
    return tuple(
        Piece(
            activity=None if mostly[begin] < 0 else ACTIVITIES[mostly[begin]],
            start_s=float(edges_s[begin] - start_s),
            end_s=float(edges_s[end] - start_s),
        )
        for begin, end in zip(begins, ends, strict=True)
    )


def _chosen(running: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the activity that counts in each piece; -1 if nothing runs."""
    return np.where(running.any(axis=1), running.argmax(axis=1), -1)


def _instants(spans: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return lengths between all borders of `spans` (start, end, activity), and whether each activity runs there."""
    borders = np.unique(spans[:, :2])
    changes = np.zeros((len(borders), len(ACTIVITIES)), dtype=np.int64)
    activities = spans[:, 2].astype(np.int64)
    np.add.at(changes, (np.searchsorted(borders, spans[:, 0]), activities), 1)
    np.add.at(changes, (np.searchsorted(borders, spans[:, 1]), activities), -1)
    return np.diff(borders), np.cumsum(changes, axis=0)[:-1] > 0
