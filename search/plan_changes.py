"""Gains of the changes between two plans, each alone and after the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from autoplan.base.errors import AutoplanError
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import Rule, broken, legal
from autoplan.search.axes import axes_of, differing, mixed, plan_of, words
from autoplan.search.choice import is_as_safe
from autoplan.search.ranking import TIE, ranked
from autoplan.spec.explanation import AxisChange, WalkStep
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan

MAX_AT_ONCE = 3  # changes per step, unless all remaining ones are needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two plans of one problem, and all mixtures of their axes; `rules` say which of these are legal."""

    problem: Problem
    rules: tuple[Rule, ...]
    before: ParallelPlan
    after: ParallelPlan

    def axes(self) -> tuple[str, ...]:
        """Axes in which the plans differ."""
        model = self.problem.model
        return differing(axes_of(model, self.before), axes_of(model, self.after))

    def mix(self, changed: Sequence[str]) -> ParallelPlan:
        """Return the plan with the `changed` axes of `after`; InputError if there is none."""
        if set(changed) == set(self.axes()):
            return self.after
        if not changed:
            return self.before
        model = self.problem.model
        return plan_of(self.problem, mixed(axes_of(model, self.before), axes_of(model, self.after), tuple(changed)))

    def legal(self, choices: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ParallelPlan]]:
        """Return the `choices` of changed axes with a legal plan, and their plans."""
        legal_plans = []
        for changed in choices:
            try:
                legal_plans.append((changed, self.mix(changed)))
            except AutoplanError:
                continue
        keep: list[tuple[tuple[str, ...], ParallelPlan]] = []
        for places, batch in _by_placement(self.problem, [plan for _, plan in legal_plans]):
            lawful = legal(self.rules, self.problem.workload, batch)
            keep += [legal_plans[at] for at in np.asarray(places)[lawful]]
        return keep


def _by_placement(problem: Problem, plans: Sequence[ParallelPlan]) -> Iterator[tuple[list[int], PlanBatch]]:
    """Yield (the indices of plans with one placement, their batch)."""
    for placement in dict.fromkeys(plan.placement for plan in plans):
        places = [at for at, plan in enumerate(plans) if plan.placement == placement]
        yield places, problem.batch([plans[at] for at in places])


def prices(problem: Problem, plans: Sequence[ParallelPlan]) -> list[RankedPlan]:
    """Price every plan, in the order given; their placements may differ."""
    result: dict[int, RankedPlan] = {}
    for places, batch in _by_placement(problem, plans):
        result |= zip(places, ranked(problem, estimate(problem, batch), range(len(batch))), strict=True)
    return [result[at] for at in range(len(plans))]


def changes(difference: Difference) -> tuple[AxisChange, ...]:
    """Return every change, with the first plan with only that change."""
    model = difference.problem.model
    before, after = axes_of(model, difference.before), axes_of(model, difference.after)
    result = []
    for axis in difference.axes():
        alone, why_not = None, ""
        try:
            plan = difference.mix((axis,))
            if faults := broken(difference.rules, difference.problem.workload, plan):
                why_not = faults[0]
            else:
                alone = prices(difference.problem, [plan])[0]
        except AutoplanError as error:
            why_not = str(error)
        texts = words(axis, before[axis]), words(axis, after[axis])
        result.append(AxisChange(axis=axis, before=texts[0], after=texts[1], alone=alone, why_not=why_not))
    return tuple(result)


def fastest_path(difference: Difference) -> tuple[WalkStep, ...]:
    """Return a greedy path to `after`; every step takes the change with the smallest time per sequence.

    Every plan is legal and as safe as `after`.  If no single change leads to such a plan, or none is faster than the
    previous plan, two are made at once, then three, finally all remaining ones.
    """
    axes, last = difference.axes(), prices(difference.problem, [difference.after])[0]
    before_s = min(
        (candidate.s_per_sequence for candidate in safe_mixes(difference, [()], last).values()), default=math.inf
    )
    done: tuple[str, ...] = ()
    steps: list[WalkStep] = []
    while len(done) < len(axes):
        remaining = [axis for axis in axes if axis not in done]
        added, plan = _next(difference, done, remaining, last, before_s)
        steps.append(WalkStep(axes=added, plan=plan))
        done, before_s = (*done, *added), plan.s_per_sequence
    return tuple(steps)


def _next(
    difference: Difference, done: tuple[str, ...], remaining: Sequence[str], last: RankedPlan, before_s: float
) -> tuple[tuple[str, ...], RankedPlan]:
    """Return the next changes and the resulting plan; `before_s` is the current time per sequence."""
    slower = None
    for size in range(1, min(MAX_AT_ONCE, len(remaining)) + 1):
        mixes = safe_mixes(difference, [(*done, *more) for more in combinations(remaining, size)], last)
        if mixes:
            best = min(mixes, key=lambda changed: mixes[changed].s_per_sequence)
            step = best[len(done) :], mixes[best]
            if mixes[best].s_per_sequence < before_s:
                return step
            slower = slower or step
    return slower or (tuple(remaining), last)


def safe_mixes(
    difference: Difference, choices: Sequence[tuple[str, ...]], last: RankedPlan
) -> dict[tuple[str, ...], RankedPlan]:
    """Return the plans that are legal and as safe as `last`, by their changed axes."""
    legal_plans = difference.legal(choices)
    costs = prices(difference.problem, [plan for _, plan in legal_plans])
    return {
        changed: candidate
        for (changed, _), candidate in zip(legal_plans, costs, strict=True)
        if is_as_safe(candidate, last)
    }


def nearest_equal(problem: Problem, rules: tuple[Rule, ...], before: ParallelPlan, best: RankedPlan) -> RankedPlan:
    """Return `best` with the axes of `before` that make it no slower and no less safe: the smallest equal change.

    Values outside of the space may even make it faster.  Every step has fewer changes than the last: an axis may be
    reverted together with another one, or changed again with it.
    """
    while True:
        difference = Difference(problem=problem, rules=rules, before=before, after=best.plan)
        axes = difference.axes()
        choices = [tuple(axis for axis in axes if axis != dropped) for dropped in axes]
        mixes = safe_mixes(difference, [*choices, ()] if axes else [], best)
        equal = [
            candidate
            for candidate in mixes.values()
            if candidate.s_per_sequence <= best.s_per_sequence * (1 + TIE)
            and len(replace(difference, after=candidate.plan).axes()) < len(axes)
        ]
        if not equal:
            return best
        best = min(equal, key=lambda plan: plan.s_per_sequence)
