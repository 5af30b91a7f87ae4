"""Operations of the operators and kernels in Kineto's traces, with their shapes, types and groups.

Shapes are those of the operators that launched the kernels (`record_shapes=True`), groups and sizes those that Kineto
writes beside kernels of NCCL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from autoplan.profiler.imports.kineto import Event
from autoplan.spec.operations import Operation

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


class DetailedEvent(Event):
    """Event with the arguments that tell what it did."""

    args: _Arguments = msgspec.field(default_factory=_Arguments)


class _Group(msgspec.Struct):
    pg_name: str = ""
    ranks: list[int] = msgspec.field(default_factory=list)


class Distributed(msgspec.Struct):
    """Place of a rank in its run, and the groups of ranks."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    world_size: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] = 1
    nccl_version: str = ""
    backend: str = ""
    pg_config: list[_Group] = msgspec.field(default_factory=list)


class _Device(msgspec.Struct):
    name: str = ""


class DetailedTrace(msgspec.Struct):
    """Trace of a rank with what identifies its machine and run; blank if missing."""

    traceEvents: list[DetailedEvent]  # noqa: N815 - as the file calls it
    deviceProperties: list[_Device] = msgspec.field(default_factory=list)  # noqa: N815
    distributedInfo: Distributed = msgspec.field(default_factory=Distributed)  # noqa: N815
    cuda_runtime_version: int = 0
    hip_runtime_version: int = 0
    baseTimeNanoseconds: int = 0  # noqa: N815 - since 1970; of it moments count, in microseconds
    host_name: str = ""
    username: str = ""


Kind = tuple[Operation, tuple[int, ...], str, tuple[int, ...]]
TimedEvent = tuple[float, float, DetailedEvent]  # seconds, by the trace's clock


def operator_kinds(operators: Sequence[DetailedEvent]) -> dict[int, Kind]:
    """Return the kinds of operators, by their events, as far as they are known."""
    kinds: dict[int, Kind] = {}
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


def _in_backward(operators: Sequence[DetailedEvent]) -> Iterator[tuple[DetailedEvent, Any]]:
    """Yield the products that backward passes of products run, and the number that they share with these."""
    passes: dict[Any, tuple[float, Any]] = {}  # when the last one of a thread ends, and its number
    for start_s, end_s, event in timed_events(operators):
        if str(event.name) in ("MmBackward0", "AddmmBackward0"):
            passes[event.tid] = (end_s, event.args.sequence)
        elif event.name in _PRODUCTS and event.args.sequence is None and event.tid in passes:
            until_s, sequence = passes[event.tid]
            if start_s < until_s:
                yield event, sequence


def _matrices(event: DetailedEvent) -> tuple[int, int, int, str] | None:
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


def _of_attention(event: DetailedEvent, places: _Attention) -> Kind | None:
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


def nccl_kind(trace: DetailedTrace, event: DetailedEvent) -> Kind | None:
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


def gloo_kind(trace: DetailedTrace, event: DetailedEvent) -> Kind | None:
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


def _ranks(trace: DetailedTrace, about: _Arguments) -> tuple[int, ...] | None:
    """Return the ranks of a group, which Kineto shortens where they are many, but not in the list of groups."""
    ranks = next((group.ranks for group in trace.distributedInfo.pg_config if group.pg_name == about.group), None)
    text = str(about.ranks or "")
    if re.fullmatch(r"\[\d+(, ?\d+)*\]", text):
        return tuple(map(int, text[1:-1].split(",")))
    return tuple(ranks) if ranks else None


def timed_events(events: Iterable[DetailedEvent]) -> list[TimedEvent]:
    """Return starts and ends of events with a duration; of those that start together, outer ones first."""
    spans = []
    for event in events:
        start_s, length_s = float(event.ts) * 1e-6, float(event.dur) * 1e-6
        if not (math.isfinite(start_s) and math.isfinite(length_s)):
            raise ValueError
        if length_s > 0:
            spans.append((start_s, start_s + length_s, event))
    return sorted(spans, key=lambda span: (span[0], -span[1]))
