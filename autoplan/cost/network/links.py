"""Links of a cluster: times of collectives and messages, measured ones first, else those of `network.algorithms`.

Sizes are full buffers in bytes, times are in seconds; every array argument has one element per plan, or groups have the
shape (plans, 1) and buffers (plans, stages).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.base.arrays import Floats, Ints, distinct_rows
from autoplan.cost.kernels.measured import find
from autoplan.cost.network.algorithms import (
    SHORT_LINK_S,
    SHORT_NETWORK_S,
    SHORT_START_S,
    ProcessGroup,
    collective_s,
    members_by_level,
)
from autoplan.spec.operations import Operation
from autoplan.spec.problem import Problem
from autoplan.spec.timing import NO_TIMINGS, TimingTable
from autoplan.topology.levels import Gaps, Topology

# Slowdown of computation by overlapped communication kernels, as a share of the transfer's duration (`modelling` D6:
# .05-.20, judged).
CONTENTION_SHARE = 0.10
# The same by vendor where it was measured.  RCCL's kernels take compute units that products want: on MI300X, both at
# once gain 42 % of what perfect overlap would if priorities and compute units are shared out well, 21 % by default
# (arXiv:2412.14335).  Steps on 2, 4 and 8 MI355X differ by .44 to .55 of what their traffic takes alone (amdchen and
# primuschen, round 11); with gradients reduced in 16 bits, gpt-oss-20b took a tenth less there, all that they save.
CONTENTION_SHARES = {"amd": 1 - 0.42}


def usual_contention_share(problem: Problem) -> float:
    """Return the cost of an overlapped collective as a share of its duration, where nothing was measured."""
    return CONTENTION_SHARES.get(problem.device.vendor, CONTENTION_SHARE)


def contention_share(problem: Problem, *operations: Operation) -> float:
    """Return the cost of an overlapped collective as a share of its duration, measured for it or usual."""
    contention = problem.timings.contention
    measured = [contention[operation] for operation in operations if operation in contention]
    return float(np.mean(measured)) if measured else usual_contention_share(problem)


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
        return members_by_level(self.topology, operation, group)[self.domain].astype(np.int64)

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
