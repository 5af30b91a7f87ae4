"""How long does a collective or a message take on given groups of ranks, all sibling groups at work at once?

The functions are references; `Links` puts what was measured before them.
Rates are those of one device: siblings on a node each use their own devices' links and NICs, so a group with one
member per node sees one NIC (`modelling` D4).  Sizes are full buffers in bytes, times are seconds; every array
argument has one element per plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.measured import find
from autoplan.plan import distinct_rows
from autoplan.problem import Problem
from autoplan.timing import Operation, TimingTable
from autoplan.topology.levels import Gaps, Level, Topology
from autoplan.topology.placement import Pattern

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Share of the faster levels' time that a hierarchical collective does not hide behind the slowest level: 4 GiB over
# 4 x 8 B200 with EFA took 22.05 ms where the node alone takes 10.15 ms and the NICs 16.1 ms (`modelling` D4).
UNHIDDEN_SHARE = 0.6

# Kernels that move data beside the computation take a part of the device from it: what an overlapped transfer costs,
# as a share of its own duration (`modelling` D6: .05-.20, judged).
CONTENTION_SHARE = 0.10


def _rate(level: Level, members: Floats) -> Floats:
    """Bytes per second of one device on a level when `members` of a domain talk to each other."""
    if level.is_mesh and level.num_devices > 1:
        return level.bytes_per_s * np.clip((members - 1) / (level.num_devices - 1), 1 / (level.num_devices - 1), 1.0)
    return np.full(len(members), level.bytes_per_s)


def _levels_s(
    topology: Topology,
    stride: Ints,
    size: Ints,
    buffer_bytes: Floats,
    volume: float,
    *,
    ring: bool,
    copies: int = 1,
    gaps: Gaps | None = None,
) -> Floats:
    """Time of a collective in which each level moves `volume` x (k - 1) / k of the buffer between its k domains.

    `ring` divides the bytes that enter a domain among its members (each has its own links); otherwise, for an
    all-to-all, every member sends its own share of the buffer beyond the domain.  Of a buffer that holds every token
    `copies` times, for as many random members, another rank, node or rack gets one and spreads it inside.
    """
    members = topology.members(stride, size, gaps=gaps, pattern="ring" if ring else "all_to_all")
    slowest = np.zeros(len(size))
    total = np.zeros(len(size))
    inner = np.ones(len(size), dtype=np.int64)
    for level, here in zip(topology.levels, members, strict=True):
        domains = here / inner
        rate = _rate(level, domains)
        if ring:
            moved = volume * buffer_bytes * (1 - 1 / domains) / inner
        else:
            moved = volume * buffer_bytes * (here - inner) / size
            if copies > 1:
                touched = (domains - 1) * (1 - (1 - inner / size) ** copies)
                moved = volume * buffer_bytes / copies * touched
        # A ring takes domains - 1 steps one after another; an all-to-all has them in flight together.
        steps = domains - 1 if ring else 2 * np.log2(domains)
        if curve := level.collectives:
            beyond = curve.overhead_s(volume * steps, buffer_bytes / inner)
            time = np.where(domains > 1, moved / rate * curve.slowdown(domains) + beyond, 0.0)
            slowest, total, inner = np.maximum(slowest, time), total + time, here
            continue
        # Where a device's part of the buffer is half_rate_bytes the measured rate is half of the plateau.  The time
        # beyond the wire's that this implies begins as latency, builds up with the message and then stays constant
        # (pipeline fill), as nccl-tests tables show.
        latency = volume * steps * level.latency_s
        part = buffer_bytes / here
        wire = volume * level.half_rate_bytes * steps / rate
        fill = wire * np.minimum(2 * part / (part + level.half_rate_bytes), 1.0)
        time = np.where(domains > 1, moved / rate + np.maximum(latency, fill), 0.0)
        slowest = np.maximum(slowest, time)
        total += time
        inner = here
    return np.where((size > 1) & (buffer_bytes > 0), slowest + UNHIDDEN_SHARE * (total - slowest), 0.0)


def all_reduce_s(
    topology: Topology, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None
) -> Floats:
    """Time of an all-reduce of `buffer_bytes` per rank: 2 (n - 1) / n of the buffer over the slowest link.

    Source: nccl-tests doc/PERFORMANCE.md for the volumes; `modelling` D3, D4 for levels and ramp.
    """
    return _levels_s(topology, stride, size, buffer_bytes, 2.0, ring=True, gaps=gaps)


def all_gather_s(
    topology: Topology, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None
) -> Floats:
    """Time of an all-gather that ends with `buffer_bytes` on every rank; a reduce-scatter from them costs the same."""
    return _levels_s(topology, stride, size, buffer_bytes, 1.0, ring=True, gaps=gaps)


def all_to_all_s(topology: Topology, stride: Ints, size: Ints, buffer_bytes: Floats, copies: int = 1) -> Floats:
    """Time of an all-to-all in which every rank holds `buffer_bytes` and keeps 1 / n of them.

    With `copies` > 1 the buffer holds each token that often, for experts of random members, and a dispatcher that knows
    it sends one copy to every node, which spreads it inside, and one to every rank, which hands it to its experts
    (DeepEP's `is_token_in_rank`; DeepSeek-V3, arXiv:2412.19437).
    """
    return _levels_s(topology, stride, size, buffer_bytes, 1.0, ring=False, copies=copies)


def send_s(topology: Topology, stride: Ints, size: Ints, message_bytes: Floats) -> Floats:
    """Time of one message between neighbours `stride` apart in a chain of `size`; the slowest hop decides."""
    members = topology.members(stride, size, pattern="chain")
    time = np.zeros(len(size))
    inner = np.ones(len(size), dtype=np.int64)
    pair = np.full(len(size), 2.0)
    for level, here in zip(topology.levels, members, strict=True):
        crosses = here > inner
        time = np.where(crosses, np.maximum(time, level.latency_s + message_bytes / _rate(level, pair)), time)
        inner = here
    return np.where(size > 1, time, 0.0)


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
        for at, level in enumerate(problem.topology.levels):
            factor = calibration.scale_out if at >= len(cluster.levels) else calibration.scale_up
            levels.append(replace(level, bytes_per_s=level.bytes_per_s / factor))
        domain = min(len(cluster.levels), len(levels)) - 1
        return cls(topology=Topology(levels=tuple(levels)), timings=problem.timings, domain=domain)

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
        return result
