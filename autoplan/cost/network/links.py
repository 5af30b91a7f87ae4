"""Time of collectives and messages in given process groups, with all sibling groups communicating at once.

`ALGORITHMS` lists the algorithms of each operation; `collective_s` is the reference, and `Links` prefers measured
times.  Rates are per device: siblings on a node each use their own devices' links and NICs, so a group with one member
per node sees one NIC (`modelling` D4).  Sizes are full buffers in bytes, times are in seconds; every array argument has
one element per plan, or groups have the shape (plans, 1) and buffers (plans, stages).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.base.arrays import Bools, Floats, Ints, distinct_rows
from autoplan.cost.kernels.measured import find
from autoplan.spec.operations import Operation
from autoplan.spec.problem import Problem
from autoplan.spec.timing import NO_TIMINGS, TimingTable
from autoplan.topology.levels import Gaps, Topology
from autoplan.topology.placement import Pattern
from autoplan.topology.traffic import (
    Spans,
    all_to_all_bytes,
    chain_bytes,
    hierarchical_bytes,
    in_network_bytes,
    level_rate,
    ring_bytes,
)

# Share of the faster levels' time that a hierarchical collective does not hide behind the slowest level: 4 GiB over
# 4 x 8 B200 with EFA took 22.05 ms where the node alone takes 10.15 ms and the NICs 16.1 ms (`modelling` D4).
UNHIDDEN_SHARE = 0.6

# Nodes below a leaf of a fat tree of 64-port switches; in-network reduction takes hops in proportion to the logarithm
# of nodes.
SWITCH_DOWN_PORTS = 32

# Slowdown of computation by overlapped communication kernels, as a share of the transfer's duration (`modelling` D6:
# .05-.20, judged).
CONTENTION_SHARE = 0.10


def contention_share(timings: TimingTable, *operations: Operation) -> float:
    """Return the cost of an overlapped transfer as a share of its duration, measured for these operations or judged."""
    measured = [timings.contention[operation] for operation in operations if operation in timings.contention]
    return float(np.mean(measured)) if measured else CONTENTION_SHARE


# An all-reduce of a few numbers goes up a tree and down again: start-up time, and latency of one link inside a domain
# and over the network (NCCL src/graph/tuning.cc, tree and LL protocol; `modelling` D2).
SHORT_START_S, SHORT_LINK_S, SHORT_NETWORK_S = 6.8e-6, 0.6e-6, 5.0e-6


class ProcessGroup(NamedTuple):
    """Communicating ranks at distance `stride`, one element per plan; `gaps` describes irregular distances."""

    stride: Ints
    size: Ints
    gaps: Gaps | None = None

    def take(self, rows: Ints) -> ProcessGroup:
        """Return the groups of the plans at the given indices."""
        gaps = Gaps(self.gaps.run[rows], self.gaps.step[rows]) if self.gaps else None
        return ProcessGroup(self.stride[rows], self.size[rows], gaps)

    def for_stages(self) -> ProcessGroup:
        """Return the groups in the shape (plans, 1), for buffers of the shape (plans, stages)."""
        gaps = Gaps(self.gaps.run[:, None], self.gaps.step[:, None]) if self.gaps else None
        return ProcessGroup(self.stride[:, None], self.size[:, None], gaps)


# -- algorithms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Algorithm of an operation: bytes on the links of every level, shape (levels, groups), and its time."""

    moved_bytes: Callable[
        [Topology, Spans, Floats, Ints | int], Floats
    ]  # for a buffer with this many copies of each token
    seconds: Callable[[Topology, Spans, Floats, Floats], Floats]  # from bytes moved and buffer size
    serves: Callable[[Topology, Spans], Bools] | None = None  # groups that may use it; None: all


def _in_steps_s(
    topology: Topology,
    spans: Spans,
    moved: Floats,
    buffer_bytes: Floats,
    *,
    steps_of: Callable[[Topology, Spans], Floats],
    volume: float,
) -> Floats:
    """Time of a collective that moves `moved` bytes over the links of each level in `volume` x steps.

    `moved` and the steps have shape (levels, groups).  A fabric is as fast as its slowest links, since data is
    forwarded by switches while more arrives over the NICs; latencies of the levels add up.
    """
    steps = steps_of(topology, spans)
    times: list[Floats] = []  # per fabric
    wire = beyond = np.zeros_like(buffer_bytes)
    for at, level in enumerate(topology.levels):
        domains = spans.outer[at] / spans.inner[at]
        rate = level_rate(level, domains)
        level_wire = moved[at] / rate
        if curve := level.collectives:
            level_wire = level_wire * curve.slowdown(domains)
            level_beyond = curve.overhead_s(volume * steps[at], buffer_bytes / spans.inner[at])
        else:
            # If a device's part of the buffer is half_rate_bytes, the measured rate is half of the plateau.  The
            # implied time beyond the wire time starts at the latency, grows with the message and then stays constant
            # (pipeline fill), as nccl-tests tables show.
            latency = volume * steps[at] * level.latency_s
            part = buffer_bytes / spans.reach[at]
            max_fill_s = volume * level.half_rate_bytes * steps[at] / rate
            fill = max_fill_s * np.minimum(2 * part / (part + level.half_rate_bytes), 1.0)
            level_beyond = np.maximum(latency, fill)
        if at in topology.tiers:
            wire, beyond = np.maximum(wire, level_wire), beyond + level_beyond
            times.pop()
        else:
            wire, beyond = level_wire, level_beyond
        times.append(np.where(spans.reach[at] > spans.base[at], wire + beyond, 0.0))
    slowest, total = reduce(np.maximum, times), reduce(np.add, times)
    moves = (spans.outer[-1] > 1) & (buffer_bytes > 0)
    return np.where(moves, slowest + UNHIDDEN_SHARE * (total - slowest), 0.0)


def _message_s(topology: Topology, spans: Spans, moved: Floats, message_bytes: Floats) -> Floats:
    """Time of one message between neighbours of a chain, by the slowest hop."""
    pair = np.full(len(message_bytes), 2.0)
    time = wire = np.zeros(len(message_bytes))
    for at, level in enumerate(topology.levels):
        level_wire = moved[at] / level_rate(level, pair)
        wire = np.maximum(wire, level_wire) if at in topology.tiers else level_wire
        crosses = spans.outer[at] > spans.inner[at]
        time = np.where(crosses, np.maximum(time, level.latency_s + wire), time)
    return time


def _ring_steps(_: Topology, spans: Spans) -> Floats:
    return spans.hops


def _switch_steps(topology: Topology, spans: Spans) -> Floats:
    """Steps of in-network reduction over a switch tree, with rings inside nodes: shape (levels, groups)."""
    steps = spans.hops
    for at in topology.network:
        domains = spans.outer[at] / spans.inner[at]
        steps[at] = np.where(domains > 1, np.maximum(np.log2(domains) / np.log2(SWITCH_DOWN_PORTS), 1.0), 0.0)
    return steps


def _exchange_steps(_: Topology, spans: Spans) -> Floats:
    """Steps of an all-to-all, whose messages are in flight concurrently, unlike those of a ring."""
    return 2 * np.log2(spans.outer / spans.inner)


def _switches_add_up(topology: Topology, spans: Spans) -> Bools:
    """Return whether all switches that a group crosses support in-network reduction."""
    if not any(level.is_reducing for level in topology.levels):
        return np.zeros(spans.outer.shape[1:], dtype=np.bool_)
    plain = [at for at in topology.network if not topology.levels[at].is_reducing]
    return np.asarray(~spans.is_crossed[plain].any(axis=0))


def _rings_s(topology: Topology, spans: Spans, moved: Floats, buffer_bytes: Floats, *, volume: float) -> Floats:
    """Time of rings inside every domain and between domains; the faster levels are partly hidden.

    If devices share a NIC, all rings go through it and take at least the wire time of one ring through all devices;
    with one NIC per device, alternating rings of nodes and of devices match the measured times (`modelling` D4).
    """
    in_steps = _in_steps_s(topology, spans, moved, buffer_bytes, steps_of=_ring_steps, volume=volume)
    shared = [at for at in topology.network if topology.levels[at].devices_per_nic > 1.0]
    if not shared:
        return in_steps
    sent_bytes = ring_bytes(topology, spans, buffer_bytes, volume)
    return np.maximum(in_steps, reduce(np.maximum, [sent_bytes[at] / topology.levels[at].bytes_per_s for at in shared]))


def _rings(volume: float) -> Algorithm:
    """Return the algorithm of rings in and between domains, `volume` x the buffer (nccl-tests doc/PERFORMANCE.md)."""
    return Algorithm(
        moved_bytes=lambda _, spans, buffer_bytes, copies: hierarchical_bytes(spans, buffer_bytes, volume),
        seconds=partial(_rings_s, volume=volume),
    )


_SWITCHES = Algorithm(
    moved_bytes=lambda topology, spans, buffer_bytes, copies: in_network_bytes(topology, spans, buffer_bytes),
    seconds=partial(_in_steps_s, steps_of=_switch_steps, volume=2.0),
    serves=_switches_add_up,
)
# With copies > 1 the buffer of an all-to-all contains each token that often, for experts on random members.  A
# dispatcher that exploits this sends one copy per node, which distributes it inside, and one per rank, which passes it
# to its experts (DeepEP's `is_token_in_rank`; DeepSeek-V3, arXiv:2412.19437).
_EXCHANGE = Algorithm(
    moved_bytes=lambda _, spans, buffer_bytes, copies: all_to_all_bytes(spans, buffer_bytes, copies),
    seconds=partial(_in_steps_s, steps_of=_exchange_steps, volume=1.0),
)
_CHAIN = Algorithm(
    moved_bytes=lambda topology, spans, message_bytes, copies: chain_bytes(topology, spans, message_bytes),
    seconds=_message_s,
)

# Algorithms of each operation: the first supports every group; later ones are used if supported and faster.
# NCCL's trees are omitted, as predictions of measured runs are worse with them (nanotron 3.95 % off instead of 3.87).
ALGORITHMS: dict[Operation, tuple[Algorithm, ...]] = {
    "all_reduce": (_rings(2.0), _SWITCHES),
    "all_gather": (_rings(1.0),),
    "reduce_scatter": (_rings(1.0),),
    "all_to_all": (_EXCHANGE,),
    "send_recv": (_CHAIN,),
}
# Communication patterns of operations that are not rings.
PATTERNS: dict[Operation, Pattern] = {"all_to_all": "all_to_all", "send_recv": "chain"}


def _members(topology: Topology, operation: Operation, group: ProcessGroup) -> Ints | Floats:
    pattern = PATTERNS.get(operation, "ring")
    return topology.members(group.stride, group.size, gaps=group.gaps, pattern=pattern)


def _fastest(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int
) -> tuple[Floats, Floats]:
    """Return (time, bytes over the links of every level) of the fastest algorithm for each group."""
    spans = Spans.of(topology, _members(topology, operation, group))
    first, *further = ALGORITHMS[operation]
    moved = first.moved_bytes(topology, spans, buffer_bytes, copies)
    time = first.seconds(topology, spans, moved, buffer_bytes)
    for algorithm in further:
        may_use = np.True_ if algorithm.serves is None else algorithm.serves(topology, spans)
        if may_use.any():
            other_moved = algorithm.moved_bytes(topology, spans, buffer_bytes, copies)
            other_time = algorithm.seconds(topology, spans, other_moved, buffer_bytes)
            is_faster = (other_time < time) & may_use
            time, moved = np.where(is_faster, other_time, time), np.where(is_faster, other_moved, moved)
    return time, moved


def collective_s(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
) -> Floats:
    """Time of a collective; `buffer_bytes` is what every rank reduces, gathers, or exchanges."""
    if not buffer_bytes.any():  # e.g. experts of a dense model
        return np.zeros_like(buffer_bytes)
    return _fastest(topology, operation, group, buffer_bytes, copies)[0]


def link_bytes(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
) -> Floats:
    """Bytes of a collective on the links of every level, per device and direction: shape (levels, groups)."""
    return _fastest(topology, operation, group, buffer_bytes, copies)[1]


# -- links of a cluster -----------------------------------------------------------------------------------------------

# The time of a collective depends on its bytes, not their type.
_DTYPES = ("bf16", "fp16", "fp32")


def _distance(group: tuple[int, ...], members: int, inside: int) -> float:
    """Return the distance of a measured group (members, inside a domain, siblings) from one with these members."""
    group_members, group_inside, siblings = group
    domains = np.log((group_members / group_inside) / (members / inside))
    return float(2 * abs(np.log(group_inside / inside)) + abs(domains) - 0.01 * np.log(siblings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links of a cluster: reference rates with a calibration's factors, and measured times."""

    topology: Topology
    timings: TimingTable
    domain: int  # level of the widest scale-up domain

    @classmethod
    def of(cls, problem: Problem) -> Links:
        """Return the links of a problem's cluster; the network, if any, is the last level."""
        calibration, cluster = problem.calibration, problem.cluster
        levels = []
        for level in problem.topology.levels:
            factor = calibration.scale_out if level.is_network else calibration.scale_up
            levels.append(replace(level, bytes_per_s=level.bytes_per_s / factor))
        domain = min(len(cluster.levels), len(levels)) - 1
        # Links were measured without faults.
        is_sound = all(fault.part == "device" for fault in cluster.faults)
        timings = problem.timings if is_sound else NO_TIMINGS
        return cls(topology=Topology(levels=tuple(levels)), timings=timings, domain=domain)

    def take(self, rows: Ints) -> Links:
        """Return the links of the plans at the given indices; all plans share the same links."""
        return self

    def seconds(
        self, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
    ) -> Floats:
        """Time of a collective, measured or else `collective_s`; 0 for an empty buffer."""
        reference = collective_s(self.topology, operation, group, buffer_bytes, copies)
        if not self.timings.holds(operation, *_DTYPES):
            return reference
        return self._or_measured(reference, operation, *self._as_measured(operation, group, buffer_bytes, copies))

    def short_all_reduce_s(self, group: ProcessGroup) -> Floats:
        """Latency of an all-reduce of a few numbers: a chain inside domains, a tree between them."""
        inside = self._inside("all_reduce", group)
        one_way = (inside - 1) * SHORT_LINK_S + np.log2(group.size / inside) * SHORT_NETWORK_S
        return np.where(group.size > 1, SHORT_START_S + 2 * one_way, 0.0)

    def _inside(self, operation: Operation, group: ProcessGroup) -> Ints:
        """Number of members of each group in one scale-up domain."""
        return _members(self.topology, operation, group)[self.domain].astype(np.int64)

    def _as_measured(
        self, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int
    ) -> tuple[ProcessGroup, Floats]:
        """Return the equivalent group and buffer to look up among the measured ones.

        Inside one domain a dispatcher that sends one copy per rank moves as much as an exchange of smaller buffers; its
        savings between domains match no measured exchange.  A message counts as crossing the network if any message of
        its chain does.
        """
        if operation == "all_to_all" and np.any(copies > 1):
            sent = group.size * (1 - (1 - 1 / group.size) ** copies) / copies
            once = np.where(self._inside(operation, group) == group.size, sent * buffer_bytes, 0.0)
            buffer_bytes = np.where(copies > 1, once, buffer_bytes)
        if operation == "send_recv":
            is_near = self._inside(operation, group) == group.size
            stride = np.where(is_near, group.stride, self.topology.levels[self.domain].num_devices)
            group = ProcessGroup(stride, np.minimum(group.size, 2))
        return group, buffer_bytes

    def _or_measured(
        self, reference_s: Floats, operation: Operation, group: ProcessGroup, buffer_bytes: Floats
    ) -> Floats:
        """Return measured times of a collective, and reference times of groups that were not measured.

        Siblings of a group, which share its domains, communicate at once in training, so timings with all siblings are
        preferred; a timing of the group alone counts if it is inside one domain, where it has its own links.  The
        reference of an unmeasured group is scaled like that of the nearest measured groups.
        """
        shape = reference_s.shape

        def flat(values: NDArray[Any]) -> NDArray[Any]:
            return np.broadcast_to(values, shape).ravel()

        reference_s, size, buffer_bytes = flat(reference_s), flat(group.size), flat(buffer_bytes)
        gaps = Gaps(flat(group.gaps.run), flat(group.gaps.step)) if group.gaps else None
        group = ProcessGroup(flat(group.stride), size, gaps)
        rows = np.flatnonzero((size > 1) & (buffer_bytes > 0))
        sizes, of_size = np.unique(buffer_bytes[rows], return_inverse=True)
        # Members as in a ring, also for a message or an exchange.
        members, inside = size[rows], self._inside("all_reduce", group)[rows]
        first, of_shape = distinct_rows(members, inside, of_size)
        members, inside, moved = members[first], inside[first], sizes[of_size[first]]
        siblings = self._domain_size // inside
        alone = np.where(members == inside, 1, siblings)
        shapes = [np.stack([members, inside, groups, moved], axis=1) for groups in (siblings, alone)]
        lookups = find(self.timings, operation, _DTYPES, np.concatenate(shapes))
        half = np.arange(len(first))
        lookup = lookups.take(half).before(lookups.take(half + len(first)))
        measured_s, ratio = lookup.otherwise(np.full(len(first), np.nan)), np.ones(len(first))
        missing = np.flatnonzero(np.isnan(measured_s))
        ratio[missing] = self._ratio_of_others(operation, members[missing], inside[missing], moved[missing])
        own_s = reference_s[rows]
        scaled_s = own_s * np.where(np.isnan(ratio), 1.0, ratio)[of_shape]
        result = reference_s.copy()
        result[rows] = np.where(np.isnan(measured_s)[of_shape], scaled_s, measured_s[of_shape])
        return result.reshape(shape)

    def _ratio_of_others(self, operation: Operation, members: Ints, inside: Ints, moved: Floats) -> Floats:
        """Measured over reference time of the measured groups nearest to these; NaN if there are none.

        Groups inside a domain say nothing about groups across domains, and vice versa; of the latter only timings with
        all siblings count.  The nearest groups have the same number of members in a domain, then the same number of
        domains.
        """
        ratio = np.full(len(members), np.nan)
        for own_members, own_inside in set(zip(members.tolist(), inside.tolist(), strict=True)):
            rows = np.flatnonzero((members == own_members) & (inside == own_inside))
            for measured_group in self._nearest_groups(operation, own_members, own_inside):
                unserved = rows[np.isnan(ratio[rows])]
                if not len(unserved):
                    break
                ratio[unserved] = self._measured_over_reference(operation, measured_group, moved[unserved])
        return ratio * self.timings.source_factors.scaled

    def _nearest_groups(self, operation: Operation, members: int, inside: int) -> list[tuple[int, ...]]:
        """Return (members, inside, siblings) of measured groups to scale from, the nearest first."""
        groups = [
            (number, number_inside, siblings)
            for number, number_inside, siblings in self.timings.groups(operation, *_DTYPES)
            if (number == number_inside) == (members == inside)
            and (number == number_inside or siblings == self._domain_size // number_inside)
        ]
        return sorted(groups, key=lambda group: _distance(group, members, inside))

    def scaled_from(self, operation: Operation, shape: tuple[float, ...]) -> tuple[float, ...] | None:
        """Return the shape of the measured group from which a group's time is scaled; None if there is none."""
        members, inside, _, buffer_bytes = shape
        for group in self._nearest_groups(operation, int(members), int(inside)):
            measured_shape = (*map(float, group), buffer_bytes)
            if not np.isnan(find(self.timings, operation, _DTYPES, np.array([measured_shape])).seconds[0]):
                return measured_shape
        return None

    def siblings(self, shape: tuple[float, ...]) -> tuple[float, ...]:
        """Return the shape of a group measured together with all its siblings."""
        members, inside, _, buffer_bytes = shape
        return members, inside, float(self._domain_size // inside), buffer_bytes

    def shape_s(self, operation: Operation, shape: tuple[float, ...]) -> float:
        """Return the time of a group of a shape in `SHAPES`, whose members are consecutive in their domains."""
        members, inside = int(shape[0]), int(shape[1])
        stride = 1 if members == inside else self._domain_size // inside
        group = ProcessGroup(np.array([stride]), np.array([members]))
        return float(self.seconds(operation, group, np.array([shape[3]]))[0])

    def _measured_over_reference(self, operation: Operation, measured_group: tuple[int, ...], moved: Floats) -> Floats:
        """Return the measured time of a group relative to its reference, for buffers of these sizes."""
        members, inside, siblings = measured_group
        size = np.full(len(moved), members)
        stride = np.ones_like(size) if members == inside else np.full_like(size, self._domain_size // inside)
        reference_s = collective_s(self.topology, operation, ProcessGroup(stride, size), moved)
        sizes, of_size = np.unique(moved, return_inverse=True)
        shapes = np.stack([np.full(len(sizes), float(number)) for number in (members, inside, siblings)], axis=1)
        lookup = find(self.timings, operation, _DTYPES, np.column_stack([shapes, sizes]))
        return lookup.seconds[of_size] / reference_s

    @property
    def _domain_size(self) -> int:
        return self.topology.levels[self.domain].num_devices
