"""Which plans does no other one beat in every measure?  All of them, and the bounds that prove it.

A measure is seconds, joules or bytes that a plan takes (`search.objectives`).  What is not priced is ruled out by a
plan that was found and that is no worse than its bounds in every measure.  Of one measure the front is the best plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.energy import step_energy_j, waiting_power_w
from autoplan.cost.estimate import estimate
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.result import Certificate, CostEstimate, SearchResult
from autoplan.rules import legal
from search.bounds import KindCosts, group_bounds, kind_bounds, kind_costs, plan_bounds
from search.findings import FITS, RISKY
from search.objectives import Measure
from search.pricing import limit_bytes
from search.ranking import TIE, ordering, ranked, seconds_per_sequence
from search.space import Space
from search.study import Progress, search

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK_KINDS = 4096  # bounded in one go
FIRST_PRICED, MOST_PRICED = 32, 2048
SLACK = 2  # ties by which a bound may lie above an estimate, through rounding


class Front:
    """Plans that none of those offered beats; of plans with equal measures the plainest.

    Measures are compared by the logarithm, in steps of `TIE`.
    """

    def __init__(self, num_measures: int) -> None:
        self.batch: PlanBatch | None = None
        self._keys: Ints = np.empty((0, num_measures), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def rules_out(self, bounds: Floats) -> NDArray[np.bool_]:
        """Whether plans with these bounds, shape (plans, measures), cannot belong to the front."""
        keys = np.floor(np.log(bounds) / TIE).astype(np.int64) - SLACK
        left = np.arange(len(keys))
        # Plans that are good in all measures rule out most: they come first.
        for own in self._keys[np.argsort(self._keys.sum(axis=1))]:
            left = left[~(own <= keys[left]).all(axis=1)]
        out = np.ones(len(keys), dtype=np.bool_)
        out[left] = False
        return out

    def offer(self, measures: Floats, batch: PlanBatch) -> None:
        """Take in those of `batch` that belong to the front, and drop what they beat."""
        keys = np.round(np.log(measures) / TIE).astype(np.int64)
        if self.batch is not None:
            keys, batch = np.concatenate([self._keys, keys]), PlanBatch.concatenate([self.batch, batch])
        plainness = np.empty(len(keys), dtype=np.int64)
        plainness[ordering(np.ones(len(keys)), batch)] = np.arange(len(keys))
        # The first of the rest in this order is beaten by none of the rest.
        rest, kept = np.lexsort([plainness, *keys.T[::-1]]), []
        while len(rest):
            kept.append(int(rest[0]))
            rest = rest[~(keys[rest[0]] <= keys[rest]).all(axis=1)]
        self._keys, self.batch = keys[kept], batch.take(np.array(kept, dtype=np.int64))


def search_front(
    problem: Problem, space: Space, measures: Sequence[Measure], progress: Progress | None = None
) -> SearchResult:
    """The plans of `space` that no other one beats in every one of `measures`, the best in the first one first.

    They fit; where no plan does they may run out of memory.
    """
    for wanted in (FITS, RISKY):
        explored = _Explorer(problem, space, measures, wanted)
        explored.run(progress)
        if explored.front.batch is not None:
            break
    else:
        return search(problem, space)  # which tells the plan that is least too large
    costs = estimate(problem, explored.front.batch)
    plans = ranked(problem, costs, range(len(costs)))
    certificate = Certificate(
        cells=len(explored.cells),
        expanded=explored.expanded,
        plans=space.size(explored.cells),
        bounded=explored.bounded,
        priced=explored.priced,
        fitting=explored.found[FITS],
        risky=explored.found[RISKY],
        best_step_s=min(one.step_s for one in plans),
        least_left=None,
        proven=True,
        limits=space.describe(),
        best_in=tuple(measures),
    )
    return SearchResult(ranked=plans, rivals=plans, closest=None, certificate=certificate)


class _Explorer:
    """Prices the plans of a space, the most promising groups first, but for those that the front rules out."""

    def __init__(self, problem: Problem, space: Space, measures: Sequence[Measure], wanted: int) -> None:
        self.problem, self.space, self.measures, self.wanted = problem, space, measures, wanted
        self.front = Front(len(measures))
        self.cells = space.cells()
        self.expanded = self.bounded = self.priced = 0
        self.found = {FITS: 0, RISKY: 0}
        self._limit_bytes = limit_bytes(problem, wanted)

    def run(self, progress: Progress | None) -> None:
        """Look at all groups; progress counts them."""
        groups, owner = self.space.groups(self.cells)
        time, least_bytes = group_bounds(self.problem, self.space, groups)
        bounds = self._bounds(time / groups.global_batch, least_bytes)
        usable = np.flatnonzero(least_bytes <= self._limit_bytes)
        order = usable[_taking_turns(bounds[usable])]
        sizes = np.array([self.space.kinds_of_group(cell) for cell in self.cells], dtype=np.int64)[owner]
        looked_at = np.zeros(len(self.cells), dtype=np.bool_)
        done = 0
        for some in _blocks(order, sizes):
            left = some[~self.front.rules_out(bounds[some])]
            self._price_groups(groups.take(left), owner[left])
            looked_at[owner[left]] = True
            done += len(some)
            if progress:
                progress(done, len(order))
        self.expanded = int(looked_at.sum())

    def _bounds(self, seconds: Floats, least_bytes: Floats) -> Floats:
        """By what a time per sequence and a memory bound every measure: shape (plans, measures)."""
        columns: dict[Measure, Callable[[], Floats]] = {
            "time": lambda: seconds,
            "energy": lambda: waiting_power_w(self.problem.cluster) * seconds,
            "memory": lambda: least_bytes,
        }
        return np.stack([columns[name]() for name in self.measures], axis=-1)

    def _measured(self, costs: CostEstimate) -> Floats:
        """Every measure of every plan: shape (plans, measures)."""
        columns: dict[Measure, Callable[[], Floats]] = {
            "time": lambda: seconds_per_sequence(costs),
            "energy": lambda: (
                step_energy_j(self.problem.cluster, costs.terms_s, costs.step_s) / costs.batch.global_batch
            ),
            "memory": lambda: costs.memory_bytes,
        }
        return np.stack([columns[name]() for name in self.measures], axis=-1)

    def _price_groups(self, groups: PlanBatch, owner: Ints) -> None:
        if not len(groups):
            return
        kinds, _ = self.space.kinds(self.cells, groups, owner)
        costs = kind_costs(self.problem, kinds)
        lowest, least_bytes = kind_bounds(self.problem, self.space, costs)
        bounds = self._bounds(lowest / kinds.global_batch, least_bytes)
        left = np.flatnonzero(least_bytes <= self._limit_bytes)
        left = left[_taking_turns(bounds[left])]
        for part in _growing(left, MOST_PRICED):
            some = part[~self.front.rules_out(bounds[part])]
            if len(some):
                self._price_kinds(costs.take(some))

    def _price_kinds(self, costs: KindCosts) -> None:
        kinds = costs.batch
        for found in plan_bounds(self.problem, self.space, costs):
            self.bounded += found.step_s.size
            kind, plan = np.nonzero(found.memory_bytes <= self._limit_bytes)
            plans = self.space.plans_of(kinds, found.inside, found.kinds[kind], plan)
            bounds = self._bounds(found.step_s[kind, plan] / plans.global_batch, found.memory_bytes[kind, plan])
            left = np.flatnonzero(~self.front.rules_out(bounds))
            left = left[legal(self.space.rules, self.space.setting, plans.take(left))]
            for part in _growing(left[_taking_turns(bounds[left])], MOST_PRICED):
                some = part[~self.front.rules_out(bounds[part])]
                if len(some):
                    self._price_plans(plans.take(some))

    def _price_plans(self, batch: PlanBatch) -> None:
        costs = estimate(self.problem, batch)
        verdict = costs.verdict
        self.priced += len(batch)
        for kind in self.found:
            self.found[kind] += int((verdict == kind).sum())
        good = np.flatnonzero(verdict == self.wanted)
        if len(good):
            self.front.offer(self._measured(costs)[good], batch.take(good))


def _taking_turns(bounds: Floats) -> Ints:
    """An order in which the least of every measure come first, in turns."""
    place = np.argsort(np.argsort(bounds, axis=0, kind="stable"), axis=0, kind="stable")
    return np.argsort(place.min(axis=1), kind="stable")


def _growing(rows: Ints, most: int) -> Iterator[Ints]:
    """`rows` in order, a few at first and then more at once: the first ones rule out many of the rest."""
    done, size = 0, FIRST_PRICED
    while done < len(rows):
        yield rows[done : done + size]
        done, size = done + size, min(2 * size, most)


def _blocks(groups: Ints, kinds: Ints) -> Iterator[Ints]:
    """`groups` in order, a few kinds at first, then about `BLOCK_KINDS` of them at once."""
    upto = np.cumsum(kinds[groups])
    done, size = 0, FIRST_PRICED
    while done < len(groups):
        before = upto[done - 1] if done else 0
        end = max(int(np.searchsorted(upto, before + size, side="right")), done + 1)
        yield groups[done:end]
        done, size = end, min(4 * size, BLOCK_KINDS)
