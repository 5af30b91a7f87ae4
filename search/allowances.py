"""Gains of options that were not allowed because they change the numerics of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoplan.base.errors import AutoplanError
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.search.plan_changes import prices
from autoplan.search.space import Space
from autoplan.spec.axes import SEARCHED, shown
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Allowance, RankedPlan

MIN_GAIN, MIN_FREED = 0.005, 0.01  # shares of the step and of a device's memory


def allowances(problem: Problem, space: Space, best: RankedPlan) -> tuple[Allowance, ...]:
    """Return the gain over `best` of each option that was not allowed, with the fastest value of each axis first.

    An option is also tried together with options that may depend on it.  The best plan with it may be a different and
    faster one.
    """
    lawful = {
        choice: plan
        for choice, plans in _excluded_choices(problem, space, best.plan)
        if (plan := next((plan for plan in plans if not broken(space.rules, problem.workload, plan)), None))
    }
    rows = []
    for choice, changed in zip(lawful, prices(problem, tuple(lawful.values())), strict=True):
        ratio, freed = changed.s_per_sequence / best.s_per_sequence, best.memory_bytes - changed.memory_bytes
        if ratio < 1.0 - MIN_GAIN or (ratio < 1.0 + MIN_GAIN and freed > MIN_FREED * problem.capacity_bytes):
            rows.append(Allowance(choice=choice, plan=changed, ratio=ratio, freed_bytes=freed))
    rows.sort(key=lambda allowance: (allowance.ratio, -allowance.freed_bytes))
    of_axis = {allowance.choice.partition("=")[0]: allowance for allowance in reversed(rows)}
    return tuple(allowance for allowance in rows if allowance in of_axis.values())


def _excluded_choices(problem: Problem, space: Space, plan: ParallelPlan) -> Iterator[tuple[str, list[ParallelPlan]]]:
    """Yield (an excluded choice, plans that have it: first alone, then with options that may depend on it)."""
    book = book_of(problem.framework)
    for axis in SEARCHED:
        for value in axis.searched if axis.exact is not None else ():
            if value in space.limits.of(axis.name) or not book.offers(axis, value):
                continue
            strongest = {
                monotone.name: space.limits.of(monotone.name)[-1]
                for monotone in SEARCHED
                if monotone.is_monotone and monotone is not axis
            }
            plans = []
            for changes in ({axis.name: value}, {axis.name: value, **strongest}):
                try:
                    plans.append(replace(plan, **changes))  # type: ignore[arg-type]
                except AutoplanError:
                    continue
            yield f"{axis.name}={shown(value)}", plans
