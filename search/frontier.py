"""Lower bounds of a space on two levels: first groups, then the kinds in groups that are not ruled out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.search.bounds import first_layers, group_bounds, group_bytes, kind_bounds, kind_costs, plain_bounds
from autoplan.search.cells import Cell
from autoplan.search.findings import FITS, RISKY, Incumbents
from autoplan.search.objectives import Measure, measure_bounds
from autoplan.search.space import Space
from autoplan.spec.enums import Offload
from autoplan.spec.estimate import OOM_Z, RISKY_Z
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

SAFE_Z = {FITS: RISKY_Z, RISKY: OOM_Z}  # minimum distance to the capacity for a verdict
# Kinds bounded at once, including illegal ones: enough to amortise numpy's cost per call.
BOUNDED_KINDS = 32768
SHARP_GROUPS = 4096  # groups bounded sharply at once


def limit_bytes(problem: Problem, verdict: int) -> float:
    """Return the largest memory of a plan that is as safe as `verdict`."""
    return float(problem.capacity_bytes * np.exp(SAFE_Z[verdict] * problem.calibration.memory_spread))


def best_first(bounds: Floats) -> Ints:
    """Return an order that alternates between the smallest bounds of each measure; `bounds`: (elements, measures)."""
    rank = np.argsort(np.argsort(bounds, axis=0, kind="stable"), axis=0, kind="stable")
    return np.argsort(rank.min(axis=1), kind="stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Groups of a space with lower bounds on their plans' measures.

    If time is the only measure, groups start with plain bounds that are quick to compute and ignore memory; groups that
    these do not rule out get sharp bounds.
    """

    problem: Problem
    space: Space
    measures: tuple[Measure, ...]
    cells: tuple[Cell, ...]
    groups: PlanBatch
    owner: Ints  # the cell of each group
    bounds: Floats  # shape (groups, measures)
    least_bytes: Floats
    is_sharp: Bools
    kinds_per_group: Ints  # per cell

    @classmethod
    def of(cls, problem: Problem, space: Space, measures: Sequence[Measure] = ("time",)) -> Frontier:
        """Bound all groups of a space."""
        cells = space.cells()
        groups, owner = space.groups(cells)
        count = len(groups)
        frontier = cls(
            problem=problem,
            space=space,
            measures=tuple(measures),
            cells=cells,
            groups=groups,
            owner=owner,
            bounds=np.full((count, len(measures)), np.inf),
            least_bytes=group_bytes(problem, space, groups),
            is_sharp=np.zeros(count, dtype=np.bool_),
            kinds_per_group=np.array([space.kinds_of_group(cell) for cell in cells], dtype=np.int64),
        )
        # Groups that cannot fit need no bound on time.
        usable = np.flatnonzero(frontier.least_bytes <= limit_bytes(problem, RISKY))
        if frontier.measures == ("time",) and len(usable) > SHARP_GROUPS:
            usable_groups = groups.take(usable)
            frontier.bounds[usable, 0] = plain_bounds(problem, space, usable_groups) / usable_groups.global_batch
        else:
            frontier.sharpen(usable)
        return frontier

    def sharpen(self, groups: Ints) -> None:
        """Bound those of `groups` sharply that are not yet."""
        groups = groups[~self.is_sharp[groups]]
        if not len(groups):
            return
        batch = self.groups.take(groups)
        step_s, least_bytes = group_bounds(self.problem, self.space, batch, limit_bytes(self.problem, RISKY))
        self.bounds[groups] = measure_bounds(self.problem, self.measures, step_s / batch.global_batch, least_bytes)
        self.is_sharp[groups] = True

    def first(self, verdict: int, count: int) -> Ints:
        """Return the first `count` usable groups, best first, as if all bounds were sharp."""
        while True:
            usable = self._usable(verdict)
            if self.is_sharp[usable[:count]].all():
                return usable[:count]
            plain = usable[~self.is_sharp[usable]]
            self.sharpen(np.sort(plain[:SHARP_GROUPS]))

    def usable(self, verdict: int, incumbents: Incumbents | None = None) -> Ints:
        """Return the groups with plans that may be as safe as `verdict`, best first.

        Their bounds are sharp, except for groups that `incumbents` rule out.
        """
        groups = self._usable(verdict)
        self.sharpen(np.sort(groups[~incumbents.rules_out(self.bounds[groups])] if incumbents else groups))
        return self._usable(verdict)

    def _usable(self, verdict: int) -> Ints:
        groups = np.flatnonzero(self.least_bytes <= limit_bytes(self.problem, verdict))
        return groups[best_first(self.bounds[groups])]

    def cell_bounds(self, owner: Ints, bounds: Floats) -> Floats:
        """Return the smallest bounds of every cell, infinite without any: shape (cells, measures)."""
        least = np.full((len(self.cells), len(self.measures)), np.inf)
        np.minimum.at(least, owner, bounds)
        return least

    def kinds_of(self, groups: Ints) -> tuple[PlanBatch, Ints]:
        """Return the kinds of some groups, and each kind's index into `groups`."""
        return self.space.kinds(self.cells, self.groups.take(groups), self.owner[groups])

    def kind_bounds(self, kinds: PlanBatch, most_bytes: float, least_percent: int = 100) -> Floats:
        """Return the bounds of `kinds`, infinite if too large: shape (kinds, measures); see `kind_costs`."""
        first = first_layers(self.problem, self.space, kinds)
        costs = kind_costs(self.problem, kinds, first, least_percent=least_percent)
        step_s, least_bytes = kind_bounds(self.problem, self.space, costs, most_bytes)
        lowest = measure_bounds(self.problem, self.measures, step_s / kinds.global_batch, least_bytes)
        lowest[~np.isfinite(step_s)] = np.inf
        return lowest

    def blocks(self, groups: Ints) -> Iterator[Ints]:
        """Yield `groups` in order, about `BOUNDED_KINDS` kinds at a time."""
        if not len(groups):
            return
        total = np.cumsum(self.kinds_per_group[self.owner[groups]]) // BOUNDED_KINDS
        cuts = [0, *(np.flatnonzero(np.diff(total)) + 1), len(groups)]
        for start, end in pairwise(cuts):
            yield groups[start:end]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenKinds:
    """Kinds with plans that may be as safe as `verdict` and are not ruled out, best first."""

    verdict: int
    kinds: PlanBatch
    owner: Ints  # the cell of each kind
    bounds: Floats  # shape (kinds, measures)
    cell_bounds: Floats  # smallest bounds per cell: shape (cells, measures)
    least_skipped: float  # smallest bound in the first measure of all other kinds that are not too large

    @classmethod
    def of(cls, frontier: Frontier, verdict: int, groups: Ints, incumbents: Incumbents) -> OpenKinds:
        """Find the open kinds of some groups, which are given best first."""
        problem, space = frontier.problem, frontier.space
        most_bytes = limit_bytes(problem, verdict)
        is_out = incumbents.rules_out(frontier.bounds[groups])
        least_skipped = float(frontier.bounds[groups[is_out], 0].min(initial=np.inf))
        groups = groups[~is_out]
        parts = [frontier.groups.take(groups[:0])]
        owners, bounds = [groups[:0]], [frontier.bounds[:0]]
        for part in frontier.blocks(groups):
            kinds, of_group = frontier.kinds_of(part)
            lowest = frontier.kind_bounds(kinds, most_bytes, min(space.limits.offload_percents))
            is_out = incumbents.rules_out(lowest)
            least_skipped = min(least_skipped, float(lowest[is_out, 0].min(initial=np.inf)))
            open_rows = np.flatnonzero(~is_out)
            kinds, of_kind = space.shared(kinds.take(open_rows))
            lowest = lowest[open_rows][of_kind]
            offloads = np.flatnonzero(kinds.offload == Offload.OPTIMIZER.code)
            if len(offloads) and len(space.limits.offload_percents) > 1:
                lowest[offloads] = frontier.kind_bounds(kinds.take(offloads), most_bytes)
            is_out = incumbents.rules_out(lowest)
            least_skipped = min(least_skipped, float(lowest[is_out, 0].min(initial=np.inf)))
            still_open = np.flatnonzero(~is_out)
            parts.append(kinds.take(still_open))
            owners.append(frontier.owner[part][of_group[open_rows[of_kind[still_open]]]])
            bounds.append(lowest[still_open])
        bound, owner = np.concatenate(bounds), np.concatenate(owners)
        order = best_first(bound)
        return cls(
            verdict=verdict,
            kinds=PlanBatch.concatenate(parts).take(order),
            owner=owner[order],
            bounds=bound[order],
            cell_bounds=frontier.cell_bounds(owner, bound),
            least_skipped=least_skipped,
        )

    def count(self, rows: Ints | slice = slice(None)) -> Ints:
        """Return the number of kinds per cell among some rows."""
        return np.bincount(self.owner[rows], minlength=len(self.cell_bounds))
