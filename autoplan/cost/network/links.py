"""How long does a collective or a message take on given groups of ranks, all sibling groups at work at once?

The functions are references; `Links` puts what was measured before them.
Rates are those of one device: siblings on a node each use their own devices' links and NICs, so a group with one
member per node sees one NIC (`modelling` D4).  Sizes are full buffers in bytes, times are seconds; every array
argument has one element per plan, or groups have the shape (plans, 1) and buffers (plans, stages).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.kernels.measured import find
from autoplan.spec.plan import distinct_rows
from autoplan.spec.problem import Problem
from autoplan.spec.timing import NO_TIMINGS, Operation, TimingTable
from autoplan.topology.levels import Gaps, Topology
from autoplan.topology.placement import Pattern
from autoplan.topology.traffic import (
    Spans,
    all_to_all_bytes,
    chain_bytes,
    hierarchical_bytes,
    in_network_bytes,
    level_rate,
)

# Share of the faster levels' time that a hierarchical collective does not hide behind the slowest level: 4 GiB over
# 4 x 8 B200 with EFA took 22.05 ms where the node alone takes 10.15 ms and the NICs 16.1 ms (`modelling` D4).
UNHIDDEN_SHARE = 0.6

# Nodes below the leaf of a fat tree of 64-port switches: a tree of switches that add up grows with its logarithm.
SWITCH_DOWN_PORTS = 32

# Kernels that move data beside the computation take a part of the device from it: what an overlapped transfer costs,
# as a share of its own duration (`modelling` D6: .05-.20, judged).
CONTENTION_SHARE = 0.10

# An all-reduce of a few numbers goes up a tree and down again: its start, and one way over a link inside a domain and
# over the network (NCCL src/graph/tuning.cc, tree and LL protocol; `modelling` D2).
SHORT_START_S, SHORT_LINK_S, SHORT_NETWORK_S = 6.8e-6, 0.6e-6, 5.0e-6


def _collective_s(
    topology: Topology, spans: Spans, moved: Floats, steps: Floats, buffer_bytes: Floats, volume: float
) -> Floats:
    """Time of a collective that `moved` so many bytes over the links of each level, in `volume` x `steps` steps.

    `moved` and `steps` have shape (levels, groups).  A fabric waits for its slowest links, since what leaves a switch
    has come over the NICs and goes on while more of it comes; for the hops of every level it waits in turn.
    """
    times: list[Floats] = []  # of the fabrics
    wire = beyond = np.zeros_like(buffer_bytes)
    for at, level in enumerate(topology.levels):
        domains = spans.here[at] / spans.inner[at]
        rate = level_rate(level, domains)
        here_wire = moved[at] / rate
        if curve := level.collectives:
            here_wire = here_wire * curve.slowdown(domains)
            here_beyond = curve.overhead_s(volume * steps[at], buffer_bytes / spans.inner[at])
        else:
            # Where a device's part of the buffer is half_rate_bytes the measured rate is half of the plateau.  The time
            # beyond the wire's that this implies begins as latency, builds up with the message and then stays constant
            # (pipeline fill), as nccl-tests tables show.
            latency = volume * steps[at] * level.latency_s
            part = buffer_bytes / spans.reach[at]
            whole = volume * level.half_rate_bytes * steps[at] / rate
            fill = whole * np.minimum(2 * part / (part + level.half_rate_bytes), 1.0)
            here_beyond = np.maximum(latency, fill)
        if at in topology.tiers:
            wire, beyond = np.maximum(wire, here_wire), beyond + here_beyond
            times.pop()
        else:
            wire, beyond = here_wire, here_beyond
        times.append(np.where(spans.reach[at] > spans.base[at], wire + beyond, 0.0))
    slowest, total = reduce(np.maximum, times), reduce(np.add, times)
    moves = (spans.here[-1] > 1) & (buffer_bytes > 0)
    return np.where(moves, slowest + UNHIDDEN_SHARE * (total - slowest), 0.0)


def all_reduce_s(
    topology: Topology, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None
) -> Floats:
    """Time of an all-reduce of `buffer_bytes` per rank: 2 (n - 1) / n of the buffer over the slowest link.

    Source: nccl-tests doc/PERFORMANCE.md for the volumes; `modelling` D3, D4 for levels and ramp.
    """
    if not buffer_bytes.any():  # as of the experts of a dense model
        return np.zeros_like(buffer_bytes)
    spans = Spans.of(topology, topology.members(stride, size, gaps=gaps))
    return _all_reduce(topology, spans, buffer_bytes)[0]


def _all_reduce(topology: Topology, spans: Spans, buffer_bytes: Floats) -> tuple[Floats, Floats]:
    """(time, bytes over the links of every level) by rings, or by switches that add up where these are faster."""
    # NCCL's trees are left out: with them predictions of measured runs are worse (nanotron 3.95 % off instead of 3.87).
    moved = hierarchical_bytes(spans, buffer_bytes, 2.0)
    time = _collective_s(topology, spans, moved, spans.hops, buffer_bytes, 2.0)
    if not any(level.is_reducing for level in topology.levels):
        return time, moved
    sent = in_network_bytes(topology, spans, buffer_bytes)
    reduced = _collective_s(topology, spans, sent, _switch_steps(topology, spans), buffer_bytes, 2.0)
    plain = [at for at in topology.network if not topology.levels[at].is_reducing]
    is_reduced = (reduced < time) & ~spans.is_crossed[plain].any(axis=0)
    return np.where(is_reduced, reduced, time), np.where(is_reduced, sent, moved)


def _switch_steps(topology: Topology, spans: Spans) -> Floats:
    """Hops up through a tree of switches that add up, and rings inside nodes: shape (levels, groups)."""
    steps = spans.hops
    for at in topology.network:
        domains = spans.here[at] / spans.inner[at]
        steps[at] = np.where(domains > 1, np.maximum(np.log2(domains) / np.log2(SWITCH_DOWN_PORTS), 1.0), 0.0)
    return steps


def all_gather_s(
    topology: Topology, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None
) -> Floats:
    """Time of an all-gather that ends with `buffer_bytes` on every rank; a reduce-scatter from them costs the same."""
    if not buffer_bytes.any():
        return np.zeros_like(buffer_bytes)
    spans = Spans.of(topology, topology.members(stride, size, gaps=gaps))
    moved = hierarchical_bytes(spans, buffer_bytes, 1.0)
    return _collective_s(topology, spans, moved, spans.hops, buffer_bytes, 1.0)


def all_to_all_s(topology: Topology, stride: Ints, size: Ints, buffer_bytes: Floats, copies: int = 1) -> Floats:
    """Time of an all-to-all in which every rank holds `buffer_bytes` and keeps 1 / n of them.

    With `copies` > 1 the buffer holds each token that often, for experts of random members, and a dispatcher that knows
    it sends one copy to every node, which spreads it inside, and one to every rank, which hands it to its experts
    (DeepEP's `is_token_in_rank`; DeepSeek-V3, arXiv:2412.19437).
    """
    spans = Spans.of(topology, topology.members(stride, size, pattern="all_to_all"))
    moved = all_to_all_bytes(spans, buffer_bytes, copies)
    # The messages of an all-to-all are in flight together, where those of a ring follow one another.
    return _collective_s(topology, spans, moved, 2 * np.log2(spans.here / spans.inner), buffer_bytes, 1.0)


def send_s(topology: Topology, stride: Ints, size: Ints, message_bytes: Floats) -> Floats:
    """Time of one message between neighbours `stride` apart in a chain of `size`; the slowest hop decides."""
    spans = Spans.of(topology, topology.members(stride, size, pattern="chain"))
    moved = chain_bytes(topology, spans, message_bytes)
    pair = np.full(len(size), 2.0)
    time = wire = np.zeros(len(size))
    for at, level in enumerate(topology.levels):
        here_wire = moved[at] / level_rate(level, pair)
        wire = np.maximum(wire, here_wire) if at in topology.tiers else here_wire
        crosses = spans.here[at] > spans.inner[at]
        time = np.where(crosses, np.maximum(time, level.latency_s + wire), time)
    return time


def link_bytes(
    topology: Topology,
    operation: Operation,
    stride: Ints,
    size: Ints,
    buffer_bytes: Floats,
    *,
    gaps: Gaps | None = None,
    copies: int = 1,
) -> Floats:
    """What the functions above put on the links of every level, per device and direction: shape (levels, groups)."""
    if operation == "all_to_all":
        spans = Spans.of(topology, topology.members(stride, size, pattern="all_to_all"))
        return all_to_all_bytes(spans, buffer_bytes, copies)
    if operation == "send_recv":
        spans = Spans.of(topology, topology.members(stride, size, pattern="chain"))
        return chain_bytes(topology, spans, buffer_bytes)
    spans = Spans.of(topology, topology.members(stride, size, gaps=gaps))
    if operation == "all_reduce":
        return _all_reduce(topology, spans, buffer_bytes)[1]
    return hierarchical_bytes(spans, buffer_bytes, 1.0)


# The bytes decide how long a collective takes, not their type.
_DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a cluster: reference rates with a calibration's factors, and what was measured on them."""

    topology: Topology
    timings: TimingTable
    domain: int  # which level is the widest scale-up domain

    @classmethod
    def of(cls, problem: Problem) -> Links:
        """Those of a problem.  The network is the last level, if there is one."""
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

    def all_reduce_s(self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None) -> Floats:
        """Time of an all-reduce of `buffer_bytes` per rank."""
        reference = all_reduce_s(self.topology, stride, size, buffer_bytes, gaps)
        return self._or_measured(reference, "all_reduce", stride, size, buffer_bytes, gaps)

    def all_gather_s(self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None) -> Floats:
        """Time of an all-gather that ends with `buffer_bytes` on every rank."""
        reference = all_gather_s(self.topology, stride, size, buffer_bytes, gaps)
        return self._or_measured(reference, "all_gather", stride, size, buffer_bytes, gaps)

    def reduce_scatter_s(self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None) -> Floats:
        """Time of a reduce-scatter of `buffer_bytes` per rank."""
        reference = all_gather_s(self.topology, stride, size, buffer_bytes, gaps)
        return self._or_measured(reference, "reduce_scatter", stride, size, buffer_bytes, gaps)

    def short_all_reduce_s(self, stride: Ints, size: Ints) -> Floats:
        """Time of an all-reduce of a few numbers, which is latency alone: a chain inside domains, a tree of them."""
        inside = self._inside(stride, size)
        one_way = (inside - 1) * SHORT_LINK_S + np.log2(size / inside) * SHORT_NETWORK_S
        return np.where(size > 1, SHORT_START_S + 2 * one_way, 0.0)

    def all_to_all_s(self, stride: Ints, size: Ints, buffer_bytes: Floats, copies: int = 1) -> Floats:
        """Time of an all-to-all of buffers that hold every token `copies` times.

        Inside one domain a dispatcher that sends one copy to each rank moves as much as an exchange of smaller buffers;
        what it saves between domains no measured exchange shows.
        """
        reference = all_to_all_s(self.topology, stride, size, buffer_bytes, copies)
        if copies > 1:
            sent = size * (1 - (1 - 1 / size) ** copies) / copies
            buffer_bytes = np.where(self._inside(stride, size, pattern="all_to_all") == size, sent * buffer_bytes, 0.0)
        return self._or_measured(reference, "all_to_all", stride, size, buffer_bytes)

    def send_s(self, stride: Ints, size: Ints, message_bytes: Floats) -> Floats:
        """Time of one message between neighbours `stride` apart in a chain of `size`: over the network, if any is."""
        reference = send_s(self.topology, stride, size, message_bytes)
        inside = self._inside(stride, size, pattern="chain")
        far = np.where(inside == size, stride, self.topology.levels[self.domain].num_devices)
        return self._or_measured(reference, "send_recv", far, np.minimum(size, 2), message_bytes)

    def _inside(self, stride: Ints, size: Ints, *, gaps: Gaps | None = None, pattern: Pattern = "ring") -> Ints:
        """Members of each group in one scale-up domain."""
        return self.topology.members(stride, size, gaps=gaps, pattern=pattern)[self.domain].astype(np.int64)

    def _or_measured(
        self,
        reference_s: Floats,
        operation: Operation,
        stride: Ints,
        size: Ints,
        buffer_bytes: Floats,
        gaps: Gaps | None = None,
    ) -> Floats:
        """The measured times of a collective, and the reference of those that were not; an empty buffer has none.

        As siblings of a group, those that share its domains, work at once in training, they should have done so when
        it was measured; else the group alone counts, if it lies inside one domain, where links are its own.
        """
        if not self.timings.holds(operation, *_DTYPES):
            return reference_s
        shape = reference_s.shape

        def flat(values: NDArray[Any]) -> NDArray[Any]:
            return np.broadcast_to(values, shape).ravel()

        reference_s, stride, size, buffer_bytes = flat(reference_s), flat(stride), flat(size), flat(buffer_bytes)
        gaps = Gaps(flat(gaps.run), flat(gaps.step)) if gaps else None
        rows = np.flatnonzero((size > 1) & (buffer_bytes > 0))
        sizes, of_size = np.unique(buffer_bytes[rows], return_inverse=True)
        members, inside = size[rows], self._inside(stride, size, gaps=gaps)[rows]
        first, like = distinct_rows(members, inside, of_size)
        members, inside, moved = members[first], inside[first], sizes[of_size[first]]
        siblings = self.topology.levels[self.domain].num_devices // inside
        alone = np.where(members == inside, 1, siblings)
        shapes = [np.stack([members, inside, groups, moved], axis=1) for groups in (siblings, alone)]
        both = find(self.timings, operation, _DTYPES, np.concatenate(shapes))
        half = np.arange(len(first))
        found = both.take(half).before(both.take(half + len(first)))
        result = reference_s.copy()
        result[rows] = found.take(like).otherwise(reference_s[rows])
        return result.reshape(shape)
