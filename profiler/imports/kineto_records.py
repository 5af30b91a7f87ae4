"""Records of kernel timings from traces of torch's profiler (Kineto), measured by the training run itself.

Taken are forward products and their gradients by the input, causal attention, and collectives.  Left out are gradients
by the weight, which torch does not add to an fp32 buffer as a `wgrad` does; messages, which run for as long as they
wait; and operators whose shape or kind the trace does not tell.

Collectives that all ranks of their group have in a trace, and kernels beside which no other ran, are measured; others
are kept as contaminated, and say why.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.profiler.imports.kineto import DEVICE_CATEGORIES, complete_events, decoded, trace_files
from autoplan.profiler.imports.kineto_shapes import (
    DetailedEvent,
    DetailedTrace,
    Distributed,
    Kind,
    TimedEvent,
    gloo_kind,
    nccl_kind,
    operator_kinds,
    timed_events,
)
from autoplan.profiler.imports.run_records import NOT_ALL_RANKS, Timed, run_records
from autoplan.profiler.machine.device_names import device_named
from autoplan.profiler.record import Fingerprint, Record

SOURCE = "trace of torch's profiler"


def read_trace_records(path: Path, *, device: str | None = None) -> list[Record]:
    """Return the records of a trace, or of a folder with the traces of one run's ranks.

    `device` is autoplan's id of the devices, for traces without or with another name.

    Raises InputError if a file is no trace, several files belong to one rank, or no kernel has a shape.
    """
    traces: dict[int, DetailedTrace] = {}
    for file in trace_files([path]):
        trace = decoded(file, DetailedTrace)
        if (rank := trace.distributedInfo.rank) in traces:
            raise InputError(f"{file}: a second trace of rank {rank}: give a folder of one run")
        traces[rank] = trace
        trace.traceEvents = complete_events(trace.traceEvents)
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
        runtime=_runtime(first),
        collectives=_library(first.distributedInfo),
    )
    records = run_records(
        (*_alone(timed), *_together(timed)),
        machine,
        source=SOURCE,
        mode="sustained",  # at the clocks of training, unlike benchmarks
        conditions={"trace": cleaned(path.name)},
        author=cleaned(first.username) or user_name(),
        host=cleaned(first.host_name),
        measured_at=measured_at,
    )
    if not records:
        raise InputError(
            f"{path}: no kernel of a product, of attention or of a collective whose shape the trace tells: "
            "profile with record_shapes=True"
        )
    return records


def _devices_per_node(traces: Mapping[int, DetailedTrace]) -> int | None:
    """Return how many ranks share a node: by the hosts where all ranks name theirs, else by the devices in view."""
    first = next(iter(traces.values()))
    world_size = first.distributedInfo.world_size
    hosts = Counter(trace.host_name for trace in traces.values())
    if len(traces) == world_size and all(hosts):
        return max(hosts.values())
    visible = len(first.deviceProperties)
    return min(visible, world_size) if visible > 1 or world_size == 1 else None


def _timed(trace: DetailedTrace) -> Iterator[Timed]:
    """Yield the operations of a rank whose shapes are in the trace, in the order of their starts."""
    complete = trace.traceEvents
    operators = [event for event in complete if event.cat == "cpu_op"]
    shapes = operator_kinds(operators)
    if kernels := timed_events(event for event in complete if event.cat in DEVICE_CATEGORIES):
        spans, places = kernels, _launched(trace, kernels, operators, shapes)
    else:
        spans = timed_events(event for event in complete if id(event) in shapes or str(event.name).startswith("gloo:"))
        places = [
            (kind, [at])
            for at, (_, _, event) in enumerate(spans)
            if (kind := shapes.get(id(event)) or gloo_kind(trace, event))
        ]
    is_alone = _are_alone(spans)
    for (operation, sizes, dtype, group), ats in sorted(places, key=lambda place: place[1]):
        longest = max((spans[at] for at in ats), key=lambda span: span[1] - span[0])
        yield Timed(
            operation=operation,
            sizes=sizes,
            dtype=dtype,
            seconds=sum(spans[at][1] - spans[at][0] for at in ats),
            is_alone=all(is_alone[at] for at in ats),
            kernel=cleaned(str(longest[2].name))[:80],
            group=group,
        )


def _launched(
    trace: DetailedTrace, kernels: Sequence[TimedEvent], operators: Sequence[DetailedEvent], shapes: Mapping[int, Kind]
) -> list[tuple[Kind, list[int]]]:
    """Return what kernels do, and the places of those that do it together: launched by one operator."""
    by_operator: dict[Any, list[int]] = defaultdict(list)
    places: list[tuple[Kind, list[int]]] = []
    for at, (_, _, event) in enumerate(kernels):
        if event.args.collective is not None:
            if kind := nccl_kind(trace, event):
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


def _alone(timed: Mapping[int, Sequence[Timed]]) -> Iterator[tuple[Timed, str]]:
    """Yield single-rank operations, each with the reason why its time is not clean (blank if it is)."""
    for items in timed.values():
        yield from (
            (item, "" if item.is_alone else "other kernels ran concurrently") for item in items if not item.group
        )


def _together(timed: Mapping[int, Sequence[Timed]]) -> Iterator[tuple[Timed, str]]:
    """Yield collectives as timed by the rank that arrived last, each with the reason why its time is not clean."""
    by_kind: dict[Kind, dict[int, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for rank, items in timed.items():
        for item in items:
            if item.group:
                by_kind[item.operation, item.sizes, item.dtype, item.group][rank].append(item)
    for (*_, group), by_rank in by_kind.items():
        counts = {len(by_rank.get(rank, ())) for rank in group}
        if len(counts) > 1:  # also if the trace of a rank is missing
            yield from ((item, NOT_ALL_RANKS) for items in by_rank.values() for item in items)
            continue
        for items in zip(*by_rank.values(), strict=True):
            last = min(items, key=lambda item: item.seconds)
            yield last, "" if last.is_alone else "other kernels ran concurrently"


def _are_alone(spans: Sequence[TimedEvent]) -> list[bool]:
    """Return whether each span, in the order of starts, runs without any other at the same time."""
    alone, until_s = [], -math.inf
    for at, (start_s, end_s, _) in enumerate(spans):
        following = spans[at + 1][0] if at + 1 < len(spans) else math.inf
        alone.append(until_s <= start_s and end_s <= following)
        until_s = max(until_s, end_s)
    return alone


def _runtime(trace: DetailedTrace) -> str:
    """Return 'cuda 12.4' for 12040, 'rocm 6.4' for HIP's 60443483; blank if neither is known."""
    if code := trace.cuda_runtime_version:
        return f"cuda {code // 1000}.{code % 1000 // 10}"
    code = trace.hip_runtime_version
    return f"rocm {code // 10_000_000}.{code // 100_000 % 100}" if code else ""


def _library(distributed: Distributed) -> str:
    return f"nccl {cleaned(distributed.nccl_version)}" if distributed.nccl_version else cleaned(distributed.backend)


def _moment(trace: DetailedTrace) -> str:
    """Return the start time of the trace; blank if unknown."""
    starts_us = [float(event.ts) for event in trace.traceEvents if event.ts != ""]
    if not trace.baseTimeNanoseconds or not starts_us:
        return ""
    return datetime.fromtimestamp(trace.baseTimeNanoseconds * 1e-9 + min(starts_us) * 1e-6, UTC).isoformat()
