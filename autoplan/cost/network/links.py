"""Time of collectives and messages on given groups of ranks, all sibling groups at work at once.

`ALGORITHMS` says how each operation may run; `collective_s` is the reference, and `Links` puts what was measured before
it.  Rates are those of one device: siblings on a node each use their own devices' links and NICs, so a group with one
member per node sees one NIC (`modelling` D4).  Sizes are full buffers in bytes, times are seconds; every array
argument has one element per plan, or groups have the shape (plans, 1) and buffers (plans, stages).
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

# Nodes below the leaf of a fat tree of 64-port switches: a tree of switches that add up grows with its logarithm.
SWITCH_DOWN_PORTS = 32

# Kernels that move data beside the computation take a part of the device from it: what an overlapped transfer costs,
# as a share of its own duration (`modelling` D6: .05-.20, judged).
CONTENTION_SHARE = 0.10


def contention_share(timings: TimingTable, *operations: Operation) -> float:
    """Return what an overlapped transfer costs as a share of its duration: measured of these operations, or judged."""
    measured = [timings.contention[operation] for operation in operations if operation in timings.contention]
    return float(np.mean(measured)) if measured else CONTENTION_SHARE


# An all-reduce of a few numbers goes up a tree and down again: its start, and one way over a link inside a domain and
# over the network (NCCL src/graph/tuning.cc, tree and LL protocol; `modelling` D2).
SHORT_START_S, SHORT_LINK_S, SHORT_NETWORK_S = 6.8e-6, 0.6e-6, 5.0e-6


class ProcessGroup(NamedTuple):
    """Ranks that communicate, `stride` apart, an element per plan; `gaps` tells where others come between them."""

    stride: Ints
    size: Ints
    gaps: Gaps | None = None

    def take(self, rows: Ints) -> ProcessGroup:
        """Groups of the plans at the given indices."""
        gaps = Gaps(self.gaps.run[rows], self.gaps.step[rows]) if self.gaps else None
        return ProcessGroup(self.stride[rows], self.size[rows], gaps)

    def for_stages(self) -> ProcessGroup:
        """The groups beside buffers of the shape (plans, stages)."""
        gaps = Gaps(self.gaps.run[:, None], self.gaps.step[:, None]) if self.gaps else None
        return ProcessGroup(self.stride[:, None], self.size[:, None], gaps)


# -- algorithms -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Algorithm of an operation: bytes on the links of every level, and their time; shape (levels, groups)."""

    moved_bytes: Callable[
        [Topology, Spans, Floats, Ints | int], Floats
    ]  # of a buffer with this many copies of each token
    seconds: Callable[[Topology, Spans, Floats, Floats], Floats]  # of this many bytes moved, of a buffer
    serves: Callable[[Topology, Spans], Bools] | None = None  # which groups may use it; None: all


def _in_steps_s(
    topology: Topology,
    spans: Spans,
    moved: Floats,
    buffer_bytes: Floats,
    *,
    steps_of: Callable[[Topology, Spans], Floats],
    volume: float,
) -> Floats:
    """Time of a collective that `moved` so many bytes over the links of each level, in `volume` x steps.

    `moved` and the steps have shape (levels, groups).  A fabric waits for its slowest links, since what leaves a switch
    has come over the NICs and goes on while more of it comes; for the hops of every level it waits in turn.
    """
    steps = steps_of(topology, spans)
    times: list[Floats] = []  # of the fabrics
    wire = beyond = np.zeros_like(buffer_bytes)
    for at, level in enumerate(topology.levels):
        domains = spans.outer[at] / spans.inner[at]
        rate = level_rate(level, domains)
        level_wire = moved[at] / rate
        if curve := level.collectives:
            level_wire = level_wire * curve.slowdown(domains)
            level_beyond = curve.overhead_s(volume * steps[at], buffer_bytes / spans.inner[at])
        else:
            # Where a device's part of the buffer is half_rate_bytes the measured rate is half of the plateau.  The time
            # beyond the wire's that this implies begins as latency, builds up with the message and then stays constant
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
    """Time of one message between neighbours of a chain; the slowest hop decides."""
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
    """Hops up through a tree of switches that add up, and rings inside nodes: shape (levels, groups)."""
    steps = spans.hops
    for at in topology.network:
        domains = spans.outer[at] / spans.inner[at]
        steps[at] = np.where(domains > 1, np.maximum(np.log2(domains) / np.log2(SWITCH_DOWN_PORTS), 1.0), 0.0)
    return steps


def _exchange_steps(_: Topology, spans: Spans) -> Floats:
    """Steps of an all-to-all, whose messages are in flight together, where those of a ring follow one another."""
    return 2 * np.log2(spans.outer / spans.inner)


def _switches_add_up(topology: Topology, spans: Spans) -> Bools:
    """Return whether all switches that a group crosses add up what is reduced."""
    if not any(level.is_reducing for level in topology.levels):
        return np.zeros(spans.outer.shape[1:], dtype=np.bool_)
    plain = [at for at in topology.network if not topology.levels[at].is_reducing]
    return np.asarray(~spans.is_crossed[plain].any(axis=0))


def _rings_s(topology: Topology, spans: Spans, moved: Floats, buffer_bytes: Floats, *, volume: float) -> Floats:
    """Time of rings inside every domain and between them, whose faster levels hide in part.

    Where devices share a NIC all rings go through it, and take at least what the wire of a ring through all of them
    does; where each has one, rings of nodes in turn with those of devices take what was measured (`modelling` D4).
    """
    in_steps = _in_steps_s(topology, spans, moved, buffer_bytes, steps_of=_ring_steps, volume=volume)
    shared = [at for at in topology.network if topology.levels[at].devices_per_nic > 1.0]
    if not shared:
        return in_steps
    sent_bytes = ring_bytes(topology, spans, buffer_bytes, volume)
    return np.maximum(in_steps, reduce(np.maximum, [sent_bytes[at] / topology.levels[at].bytes_per_s for at in shared]))


def _rings(volume: float) -> Algorithm:
    """Rings inside every domain and between them, over `volume` times the buffer (nccl-tests doc/PERFORMANCE.md)."""
    return Algorithm(
        moved_bytes=lambda _, spans, buffer_bytes, copies: hierarchical_bytes(spans, buffer_bytes, volume),
        seconds=partial(_rings_s, volume=volume),
    )


_SWITCHES = Algorithm(
    moved_bytes=lambda topology, spans, buffer_bytes, copies: in_network_bytes(topology, spans, buffer_bytes),
    seconds=partial(_in_steps_s, steps_of=_switch_steps, volume=2.0),
    serves=_switches_add_up,
)
# With copies > 1 the buffer of an all-to-all holds each token that often, for experts of random members, and a
# dispatcher that knows it sends one copy to every node, which spreads it inside, and one to every rank, which hands it
# to its experts (DeepEP's `is_token_in_rank`; DeepSeek-V3, arXiv:2412.19437).
_EXCHANGE = Algorithm(
    moved_bytes=lambda _, spans, buffer_bytes, copies: all_to_all_bytes(spans, buffer_bytes, copies),
    seconds=partial(_in_steps_s, steps_of=_exchange_steps, volume=1.0),
)
_CHAIN = Algorithm(
    moved_bytes=lambda topology, spans, message_bytes, copies: chain_bytes(topology, spans, message_bytes),
    seconds=_message_s,
)

# The algorithms of each operation: the first serves every group, a later one where it may and is faster.
# NCCL's trees are left out: with them predictions of measured runs are worse (nanotron 3.95 % off instead of 3.87).
ALGORITHMS: dict[Operation, tuple[Algorithm, ...]] = {
    "all_reduce": (_rings(2.0), _SWITCHES),
    "all_gather": (_rings(1.0),),
    "reduce_scatter": (_rings(1.0),),
    "all_to_all": (_EXCHANGE,),
    "send_recv": (_CHAIN,),
}
# How members of a group meet, where it is not around a ring.
PATTERNS: dict[Operation, Pattern] = {"all_to_all": "all_to_all", "send_recv": "chain"}


def _members(topology: Topology, operation: Operation, group: ProcessGroup) -> Ints | Floats:
    pattern = PATTERNS.get(operation, "ring")
    return topology.members(group.stride, group.size, gaps=group.gaps, pattern=pattern)


def _fastest(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int
) -> tuple[Floats, Floats]:
    """(time, bytes over the links of every level) by the algorithm that is fastest for each group."""
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
    """Time of a collective: what every rank reduces, ends with, or holds and sends on is `buffer_bytes`."""
    if not buffer_bytes.any():  # as of the experts of a dense model
        return np.zeros_like(buffer_bytes)
    return _fastest(topology, operation, group, buffer_bytes, copies)[0]


def link_bytes(
    topology: Topology, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
) -> Floats:
    """Bytes of a collective on the links of every level, per device and direction: shape (levels, groups)."""
    return _fastest(topology, operation, group, buffer_bytes, copies)[1]


# -- links of a cluster -----------------------------------------------------------------------------------------------

# The bytes decide how long a collective takes, not their type.
_DTYPES = ("bf16", "fp16", "fp32")


def _distance(group: tuple[int, ...], members: int, inside: int) -> float:
    """Return how unlike a measured group of (members, inside a domain, siblings) is to one with this many members."""
    group_members, beside, siblings = group
    domains = np.log((group_members / beside) / (members / inside))
    return float(2 * abs(np.log(beside / inside)) + abs(domains) - 0.01 * np.log(siblings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster: reference rates with a calibration's factors, and what was measured on them."""

    topology: Topology
    timings: TimingTable
    domain: int  # which level is the widest scale-up domain

    @classmethod
    def of(cls, problem: Problem) -> Links:
        """The links of a problem's cluster.  The network is the last level, if there is one."""
        calibration, cluster = problem.calibration, problem.cluster
        levels = []
        for level in problem.topology.levels:
            factor = calibration.scale_out if level.is_network else calibration.scale_up
            levels.append(replace(level, bytes_per_s=level.bytes_per_s / factor))
        domain = min(len(cluster.levels), len(levels)) - 1
        # What was measured was measured on links without faults.
        is_sound = all(fault.part == "device" for fault in cluster.faults)
        timings = problem.timings if is_sound else NO_TIMINGS
        return cls(topology=Topology(levels=tuple(levels)), timings=timings, domain=domain)

    def take(self, rows: Ints) -> Links:
        """The links for the plans at the given indices: all plans have the same."""
        return self

    def seconds(
        self, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
    ) -> Floats:
        """Time of a collective (`collective_s`), measured where it was; an empty buffer takes none."""
        reference = collective_s(self.topology, operation, group, buffer_bytes, copies)
        if not self.timings.holds(operation, *_DTYPES):
            return reference
        return self._or_measured(reference, operation, *self._as_measured(operation, group, buffer_bytes, copies))

    def short_all_reduce_s(self, group: ProcessGroup) -> Floats:
        """Time of an all-reduce of a few numbers, which is latency alone: a chain inside domains, a tree of them."""
        inside = self._inside("all_reduce", group)
        one_way = (inside - 1) * SHORT_LINK_S + np.log2(group.size / inside) * SHORT_NETWORK_S
        return np.where(group.size > 1, SHORT_START_S + 2 * one_way, 0.0)

    def _inside(self, operation: Operation, group: ProcessGroup) -> Ints:
        """Members of each group in one scale-up domain."""
        return _members(self.topology, operation, group)[self.domain].astype(np.int64)

    def _as_measured(
        self, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int
    ) -> tuple[ProcessGroup, Floats]:
        """The group and the buffer with which as much is measured.

        Inside one domain a dispatcher that sends one copy to each rank moves as much as an exchange of smaller buffers;
        what it saves between domains no measured exchange shows.  A message goes over the network, if any of its chain
        does.
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
        """The measured times of a collective, and the reference of those that were not.

        As siblings of a group, those that share its domains, work at once in training, they should have done so when
        it was measured; else the group alone counts, if it lies inside one domain, where links are its own.  Groups
        that were not measured take as much longer than by the reference as the nearest ones that were.
        """
        shape = reference_s.shape

        def flat(values: NDArray[Any]) -> NDArray[Any]:
            return np.broadcast_to(values, shape).ravel()

        reference_s, size, buffer_bytes = flat(reference_s), flat(group.size), flat(buffer_bytes)
        gaps = Gaps(flat(group.gaps.run), flat(group.gaps.step)) if group.gaps else None
        group = ProcessGroup(flat(group.stride), size, gaps)
        rows = np.flatnonzero((size > 1) & (buffer_bytes > 0))
        sizes, of_size = np.unique(buffer_bytes[rows], return_inverse=True)
        # Of a message or an exchange as well, the members of a ring.
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
        """Measured over reference time of the groups nearest to these that were measured; NaN where there are none.

        Groups inside a domain tell nothing of those that leave it, nor the other way round; of the latter only those
        count that shared the network with all siblings.  The nearest have as many members in a domain, then as many
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
        """Return (members, inside, siblings) of the measured groups that others are scaled from, the nearest first."""
        groups = [
            (number, beside, siblings)
            for number, beside, siblings in self.timings.groups(operation, *_DTYPES)
            if (number == beside) == (members == inside)
            and (number == beside or siblings == self._domain_size // beside)
        ]
        return sorted(groups, key=lambda group: _distance(group, members, inside))

    def scaled_from(self, operation: Operation, shape: tuple[float, ...]) -> tuple[float, ...] | None:
        """Return the shape of the measured group from which the time of one is scaled; None where there is none."""
        members, inside, _, buffer_bytes = shape
        for group in self._nearest_groups(operation, int(members), int(inside)):
            measured_shape = (*map(float, group), buffer_bytes)
            if not np.isnan(find(self.timings, operation, _DTYPES, np.array([measured_shape])).seconds[0]):
                return measured_shape
        return None

    def siblings(self, shape: tuple[float, ...]) -> tuple[float, ...]:
        """Return the shape of a group with as many beside it at once as its domains hold."""
        members, inside, _, buffer_bytes = shape
        return members, inside, float(self._domain_size // inside), buffer_bytes

    def shape_s(self, operation: Operation, shape: tuple[float, ...]) -> float:
        """Return the time of a group of a shape of `SHAPES`, whose members lie next to each other in their domains."""
        members, inside = int(shape[0]), int(shape[1])
        stride = 1 if members == inside else self._domain_size // inside
        group = ProcessGroup(np.array([stride]), np.array([members]))
        return float(self.seconds(operation, group, np.array([shape[3]]))[0])

    def _measured_over_reference(self, operation: Operation, measured_group: tuple[int, ...], moved: Floats) -> Floats:
        """Return how much longer than by the reference a group takes that was measured, with buffers of these sizes."""
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
