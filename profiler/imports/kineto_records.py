"""Records of kernel timings from traces of torch's profiler (Kineto), measured by the training run itself.

Taken are forward products and their gradients by the input, causal attention, and collectives.  Shapes are those of
the operators that launched the kernels (`record_shapes=True`), groups and sizes those that Kineto writes beside kernels
of NCCL.  Left out are gradients by the weight, which torch does not add to an fp32 buffer as a `wgrad` does; messages,
which run for as long as they wait; and operators whose shape or kind the trace does not tell.

A kernel of a collective runs from when its own rank arrives: the rank that arrived last tells how long it takes, and
only where all ranks of the group have traces.  Those, and kernels beside which no other ran, are measured; others are
kept as contaminated, and say why.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.profiler.imports.kineto import DEVICE_CATEGORIES, Event, decoded, trace_files
from autoplan.profiler.imports.nccl_tests import rack_devices
from autoplan.profiler.machine.device_names import device_named
from autoplan.profiler.record import MAX_SAMPLES, Fingerprint, Record, Status
from autoplan.profiler.store.plausible import MAX_SPREAD, sample_spread
from autoplan.spec.operations import Operation

SOURCE = "trace of torch's profiler"

# Kineto's names of data types for operators (c10's names) and for kernels of NCCL.
_DTYPES = {
    **{"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"},
    **{"Float": "fp32", "BFloat16": "bf16", "Half": "fp16"},
}
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1}  # and the place of the left matrix among the inputs


@dataclass(frozen=True, slots=True)
class _Attention:
    """Places among an operator's inputs, as torch's schema has them, and whether heads come before tokens."""

    operation: Operation
    query: int
    is_causal: int
    heads_first: bool


_ATTENTIONS = {
    "aten::_flash_attention_forward": _Attention("attention", 0, 8, False),
    "aten::_flash_attention_backward": _Attention("attention_backward", 1, 11, False),
    "aten::_scaled_dot_product_cudnn_attention": _Attention("attention", 0, 6, True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention("attention_backward", 1, 14, True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Attention("attention", 0, 4, True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Attention("attention_backward", 1, 7, True),
}
# Names of NCCL's kernels and gloo's annotations, and whether the buffer is a rank's output.
_COLLECTIVES: tuple[tuple[re.Pattern[str], Operation, bool], ...] = (
    (re.compile(r"_?all_?reduce(_coalesced)?"), "all_reduce", False),
    (re.compile(r"_?all_?gather(_base|_into_tensor)?(_coalesced)?"), "all_gather", True),
    (re.compile(r"_?reduce_?scatter(_base|_tensor)?(_coalesced)?"), "reduce_scatter", False),
    (re.compile(r"all_?to_?all(v|_base|_single)?"), "all_to_all", False),
    (re.compile(r"broadcast"), "broadcast", False),
)


class _Arguments(msgspec.Struct):
    """Arguments that Kineto writes for an event; blank if missing."""

    operator: Any = msgspec.field(name="External id", default=None)
    correlation: Any = None
    sequence: Any = msgspec.field(name="Sequence number", default=None)
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    values: Any = msgspec.field(name="Concrete Inputs", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    num_in: Any = msgspec.field(name="In msg nelems", default=None)
    num_out: Any = msgspec.field(name="Out msg nelems", default=None)
    in_split: Any = msgspec.field(name="In split size", default=None)
    dtype: Any = None
    group: Any = msgspec.field(name="Process Group Name", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)


class _DetailedEvent(Event):
    args: _Arguments = msgspec.field(default_factory=_Arguments)


class _Group(msgspec.Struct):
    pg_name: str = ""
    ranks: list[int] = msgspec.field(default_factory=list)


class _Distributed(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    nccl_version: str = ""
    backend: str = ""
    pg_config: list[_Group] = msgspec.field(default_factory=list)


class _Device(msgspec.Struct):
    name: str = ""


class _Trace(msgspec.Struct):
    traceEvents: list[_DetailedEvent]  # noqa: N815 - as the file calls it
    deviceProperties: list[_Device] = msgspec.field(default_factory=list)  # noqa: N815
    distributedInfo: _Distributed = msgspec.field(default_factory=_Distributed)  # noqa: N815
    cuda_runtime_version: int = 0
    baseTimeNanoseconds: int = 0  # noqa: N815 - since 1970; of it moments count, in microseconds
    host_name: str = ""
    username: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """Operation that ran once, in the order of starts on its rank."""

    operation: Operation
    sizes: tuple[int, ...]  # for a collective: bytes of its buffer
    dtype: str
    seconds: float
    is_alone: bool
    kernel: str
    group: tuple[int, ...] = ()  # ranks of a collective


_Kind = tuple[Operation, tuple[int, ...], str, tuple[int, ...]]
_Span = tuple[float, float, _DetailedEvent]  # seconds, by the trace's clock


def read_trace_records(path: Path, *, device: str | None = None) -> list[Record]:
    """Return the records of a trace, or of a folder with the traces of one run's ranks.

    `device` is autoplan's id of the devices, for traces without or with another name.

    Raises InputError if a file is no trace, several files belong to one rank, or no kernel has a shape.
    """
    traces: dict[int, _Trace] = {}
    for file in trace_files([path]):
        trace = decoded(file, _Trace)
        if (rank := trace.distributedInfo.rank) in traces:
            raise InputError(f"{file}: a second trace of rank {rank}: give a folder of one run")
        traces[rank] = trace
    first = next(iter(traces.values()))
    if not (
        name := device or (device_named(cleaned(first.deviceProperties[0].name)) if first.deviceProperties else "")
    ):
        name = "" if any(event.cat in DEVICE_CATEGORIES for event in first.traceEvents) else "cpu"
    if not name:
        raise InputError(f"{path}: does not name its devices: name their kind with --device h100-sxm")
    try:
        timed = {rank: list(_timed(trace)) for rank, trace in traces.items()}
        measured_at = _moment(first)
    except (ValueError, TypeError, LookupError, OverflowError, OSError):
        raise InputError(f"{path}: an event has a time, size or rank that is no number") from None
    per_node = _devices_per_node(traces)
    machine = Fingerprint(
        device=name,
        devices_per_node=per_node or 0,
        num_hosts=max(first.distributedInfo.world_size // per_node, 1) if per_node else 1,
        runtime=_runtime(first.cuda_runtime_version),
        collectives=_library(first.distributedInfo),
    )
    by_record: dict[tuple[Operation, tuple[int, ...], str], list[tuple[_Timed, str]]] = defaultdict(list)
    for item, why_not in (*_alone(timed), *_together(timed)):
        shape = (*layout, *item.sizes) if (layout := _layout(item.group, per_node, name)) is not None else None
        if shape is not None:
            by_record[item.operation, shape, item.dtype].append((item, why_not))
    if not by_record:
        raise InputError(
            f"{path}: no kernel of a product, of attention or of a collective whose shape the trace tells: "
            "profile with record_shapes=True"
        )
    author = cleaned(first.username) or user_name()
    return [
        replace(
            _record(machine, *kind, times),
            conditions={"trace": cleaned(path.name)},
            measured_by=author,
            host=cleaned(first.host_name),
            measured_at=measured_at,
        )
        for kind, times in by_record.items()
    ]


def _record(
    machine: Fingerprint,
    operation: Operation,
    shape: tuple[int, ...],
    dtype: str,
    times: Sequence[tuple[_Timed, str]],
) -> Record:
    """Return the record of all times of one shape, only of the clean ones if there are any."""
    clean = [item for item, why_not in times if not why_not]
    samples = (clean or [item for item, _ in times])[:MAX_SAMPLES]
    samples_s = tuple(item.seconds for item in samples)
    status: Status = "ok"
    reason = ""
    if not clean:
        status, reason = "contaminated", times[0][1]
    elif (spread := sample_spread(samples_s)) > MAX_SPREAD:
        status, reason = "unstable", f"the times of the run spread by {100 * spread:.0f} %"
    return Record(
        fingerprint=machine,
        operation=operation,
        shape=shape,
        dtype=dtype,
        samples_s=samples_s,
        kernel=samples[0].kernel,
        mode="sustained",  # at the clocks of training, unlike benchmarks
        status=status,
        reason=reason,
        source=SOURCE,
    )


def _alone(timed: Mapping[int, Sequence[_Timed]]) -> Iterator[tuple[_Timed, str]]:
    """Yield single-rank operations, each with the reason why its time is not clean (blank if it is)."""
    for items in timed.values():
        yield from (
            (item, "" if item.is_alone else "other kernels ran concurrently") for item in items if not item.group
        )


def _together(timed: Mapping[int, Sequence[_Timed]]) -> Iterator[tuple[_Timed, str]]:
    """Yield collectives as timed by the rank that arrived last, each with the reason why its time is not clean."""
    by_kind: dict[_Kind, dict[int, list[_Timed]]] = defaultdict(lambda: defaultdict(list))
    for rank, items in timed.items():
        for item in items:
            if item.group:
                by_kind[item.operation, item.sizes, item.dtype, item.group][rank].append(item)
    for (*_, group), by_rank in by_kind.items():
        counts = {len(by_rank.get(rank, ())) for rank in group}
        if len(counts) > 1:  # also if the trace of a rank is missing
            yield from (
                (item, "not all ranks of its group have it in a trace: its time may include waiting for them")
                for items in by_rank.values()
                for item in items
            )
            continue
        for items in zip(*by_rank.values(), strict=True):
            last = min(items, key=lambda item: item.seconds)
            yield last, "" if last.is_alone else "other kernels ran concurrently"


def _layout(group: tuple[int, ...], per_node: int | None, device: str) -> tuple[int, ...] | None:
    """Return what stands before the bytes in a shape; nothing for one device alone, None where nodes are not known.

    Every rank runs the same program, so that all groups of these nodes work at once.
    """
    if not group:
        return ()
    if per_node is None or len(group) < 2:
        return None
    fabric = max(per_node, rack_devices(device))
    on_domain = Counter(rank // fabric for rank in group)
    if len(set(on_domain.values())) > 1:
        return None
    in_domain = next(iter(on_domain.values()))
    return (len(group), in_domain, max(fabric // in_domain, 1))


def _devices_per_node(traces: Mapping[int, _Trace]) -> int | None:
    """Return how many ranks share a node: by the hosts where all ranks name theirs, else by the devices in view."""
    first = next(iter(traces.values()))
    world_size = first.distributedInfo.world_size
    hosts = Counter(trace.host_name for trace in traces.values())
    if len(traces) == world_size and all(hosts):
        return max(hosts.values())
    visible = len(first.deviceProperties)
    return min(visible, world_size) if visible > 1 or world_size == 1 else None


def _timed(trace: _Trace) -> Iterator[_Timed]:
    """Yield the operations of a rank whose shapes are in the trace, in the order of their starts."""
    complete = [event for event in trace.traceEvents if event.ph == "X" and isinstance(event.name, str)]
    operators = [event for event in complete if event.cat == "cpu_op"]
    shapes = _shapes(operators)
    if kernels := _spans(event for event in complete if event.cat in DEVICE_CATEGORIES):
        spans, places = kernels, _launched(trace, kernels, operators, shapes)
    else:
        spans = _spans(event for event in complete if id(event) in shapes or str(event.name).startswith("gloo:"))
        places = [
            (kind, [at])
            for at, (_, _, event) in enumerate(spans)
            if (kind := shapes.get(id(event)) or _of_gloo(trace, event))
        ]
    is_alone = _are_alone(spans)
    for (operation, sizes, dtype, group), ats in sorted(places, key=lambda place: place[1]):
        longest = max((spans[at] for at in ats), key=lambda span: span[1] - span[0])
        yield _Timed(
            operation=operation,
            sizes=sizes,
            dtype=dtype,
            seconds=sum(spans[at][1] - spans[at][0] for at in ats),
            is_alone=all(is_alone[at] for at in ats),
            kernel=cleaned(str(longest[2].name))[:80],
            group=group,
        )


def _launched(
    trace: _Trace, kernels: Sequence[_Span], operators: Sequence[_DetailedEvent], shapes: Mapping[int, _Kind]
) -> list[tuple[_Kind, list[int]]]:
    """Return what kernels do, and the places of those that do it together: launched by one operator."""
    by_operator: dict[Any, list[int]] = defaultdict(list)
    places: list[tuple[_Kind, list[int]]] = []
    for at, (_, _, event) in enumerate(kernels):
        if event.args.collective is not None:
            if kind := _of_nccl(trace, event):
                places.append((kind, [at]))
        # Older Kineto writes the number of the launch instead of that of the operator.
        elif event.args.operator is not None and event.args.operator != event.args.correlation:
            by_operator[event.args.operator].append(at)
    places += [
        (kind, ats)
        for event in operators
        if (kind := shapes.get(id(event))) and (ats := by_operator.get(event.args.operator))
    ]
    return places


def _shapes(operators: Sequence[_DetailedEvent]) -> dict[int, _Kind]:
    """Return the kinds of operators, by their events, as far as they are known."""
    kinds: dict[int, _Kind] = {}
    forward: dict[Any, tuple[int, int, int]] = {}  # m, n, k by the number that its backward pass has too
    for event in operators:
        if (place := _ATTENTIONS.get(str(event.name))) and (attention := _of_attention(event, place)):
            kinds[id(event)] = attention
        elif event.name in _PRODUCTS and event.args.sequence is not None and (product := _matrices(event)):
            m, k, n, dtype = product
            forward[event.args.sequence] = (m, n, k)
            kinds[id(event)] = ("gemm", (m, n, k), dtype, ())
    for event, sequence in _in_backward(operators):
        if (product := _matrices(event)) and sequence in forward:
            m, n, k = forward[sequence]
            rows, inner, columns, dtype = product
            if inner == n != m and (rows, columns) in ((m, k), (k, m)):
                kinds[id(event)] = ("dgrad", (m, n, k), dtype, ())
    return kinds


def _in_backward(operators: Sequence[_DetailedEvent]) -> Iterator[tuple[_DetailedEvent, Any]]:
    """Yield the products that backward passes of products run, and the number that they share with these."""
    passes: dict[Any, tuple[float, Any]] = {}  # when the last one of a thread ends, and its number
    for start_s, end_s, event in _spans(operators):
        if str(event.name) in ("MmBackward0", "AddmmBackward0"):
            passes[event.tid] = (end_s, event.args.sequence)
        elif event.name in _PRODUCTS and event.args.sequence is None and event.tid in passes:
            until_s, sequence = passes[event.tid]
            if start_s < until_s:
                yield event, sequence


def _matrices(event: _DetailedEvent) -> tuple[int, int, int, str] | None:
    """Return rows, inner size and columns of a product, and its type."""
    first = _PRODUCTS[str(event.name)]
    dims, types = event.args.dims or (), event.args.types or ()
    if len(dims) < first + 2 or len(types) < first + 2 or types[first] != types[first + 1]:
        return None
    left, right = dims[first], dims[first + 1]
    dtype = _DTYPES.get(types[first])
    if dtype is None or len(left) != 2 or len(right) != 2 or min(*left, *right) < 1:
        return None
    return int(left[0]), int(left[1]), int(right[1]), dtype


def _of_attention(event: _DetailedEvent, places: _Attention) -> _Kind | None:
    dims, types, values = event.args.dims or (), event.args.types or (), event.args.values or ()
    at = places.query
    if len(dims) <= at + 2 or len(values) <= places.is_causal or str(values[places.is_causal]) != "True":
        return None
    query, key, value = dims[at : at + 3]
    dtype = _DTYPES.get(types[at])
    if dtype is None or len(query) != 4 or len(key) != 4 or key != value or query[-1] != key[-1]:
        return None
    tokens, heads = (2, 1) if places.heads_first else (1, 2)
    if query[tokens] != key[tokens] or min(*query, *key) < 1:
        return None
    return places.operation, (query[0], query[tokens], query[heads], key[heads], query[3], 0), dtype, ()


def _of_nccl(trace: _Trace, event: _DetailedEvent) -> _Kind | None:
    """Return the kind of an NCCL kernel, from the arguments that Kineto writes for it."""
    about = event.args
    is_uneven = about.in_split not in (None, "", "[]", [])
    ranks = _ranks(trace, about)
    dtype = _DTYPES.get(str(about.dtype))
    kind = _collective(str(about.collective))
    if kind is None or dtype is None or ranks is None or is_uneven:
        return None
    operation, is_end = kind
    num_items = int((about.num_out if is_end else about.num_in) or 0)
    return (operation, (num_items * _ITEM_BYTES[dtype],), dtype, ranks) if num_items else None


def _of_gloo(trace: _Trace, event: _DetailedEvent) -> _Kind | None:
    """Return what an annotation of gloo stands for, which does not tell its group: where there is only one."""
    groups = {tuple(group.ranks) for group in trace.distributedInfo.pg_config if len(group.ranks) > 1}
    kind = _collective(str(event.name).removeprefix("gloo:"))
    dims, types = event.args.dims, event.args.types
    if kind is None or len(groups) != 1 or not dims or not types or (dtype := _DTYPES.get(types[0])) is None:
        return None
    operation, is_end = kind
    (ranks,) = groups
    num_items = math.prod(map(int, dims[0])) * (len(ranks) if is_end else 1)
    return (operation, (num_items * _ITEM_BYTES[dtype],), dtype, ranks) if num_items else None


def _collective(name: str) -> tuple[Operation, bool] | None:
    return next(((operation, is_end) for pattern, operation, is_end in _COLLECTIVES if pattern.fullmatch(name)), None)


def _ranks(trace: _Trace, about: _Arguments) -> tuple[int, ...] | None:
    """Return the ranks of a group, which Kineto shortens where they are many, but not in the list of groups."""
    ranks = next((group.ranks for group in trace.distributedInfo.pg_config if group.pg_name == about.group), None)
    text = str(about.ranks or "")
    if re.fullmatch(r"\[\d+(, ?\d+)*\]", text):
        return tuple(map(int, text[1:-1].split(",")))
    return tuple(ranks) if ranks else None


def _spans(events: Iterable[_DetailedEvent]) -> list[_Span]:
    """Return starts and ends of events with a duration; of those that start together, outer ones first."""
    spans = []
    for event in events:
        start_s, length_s = float(event.ts) * 1e-6, float(event.dur) * 1e-6
        if not (math.isfinite(start_s) and math.isfinite(length_s)):
            raise ValueError
        if length_s > 0:
            spans.append((start_s, start_s + length_s, event))
    return sorted(spans, key=lambda span: (span[0], -span[1]))


def _are_alone(spans: Sequence[_Span]) -> list[bool]:
    """Return whether each span, in the order of starts, runs without any other at the same time."""
    alone, until_s = [], -math.inf
    for at, (start_s, end_s, _) in enumerate(spans):
        following = spans[at + 1][0] if at + 1 < len(spans) else math.inf
        alone.append(until_s <= start_s and end_s <= following)
        until_s = max(until_s, end_s)
    return alone


def _runtime(code: int) -> str:
    """Return 'cuda 12.4' for 12040."""
    return f"cuda {code // 1000}.{code % 1000 // 10}" if code else ""


def _library(distributed: _Distributed) -> str:
    return f"nccl {cleaned(distributed.nccl_version)}" if distributed.nccl_version else cleaned(distributed.backend)


def _moment(trace: _Trace) -> str:
    """Return the start time of the trace; blank if unknown."""
    starts_us = [float(event.ts) for event in trace.traceEvents if event.ph == "X" and event.ts != ""]
    if not trace.baseTimeNanoseconds or not starts_us:
        return ""
    return datetime.fromtimestamp(trace.baseTimeNanoseconds * 1e-9 + min(starts_us) * 1e-6, UTC).isoformat()
