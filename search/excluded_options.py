"""Options that spaces exclude because they rarely help, tried on the best plans."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from autoplan.base.errors import AutoplanError
from autoplan.frameworks.common.rules import broken
from autoplan.search.axes import axes_of, plan_of
from autoplan.search.choice import is_as_safe
from autoplan.search.limits import FURTHER_PERCENTS
from autoplan.search.objectives import Measure, measures_of_plan
from autoplan.search.placement import place_best
from autoplan.search.plan_changes import prices
from autoplan.search.ranking import TIE
from autoplan.search.space import Space
from autoplan.search.study import MARGIN, search
from autoplan.spec.axes import shown
from autoplan.spec.enums import CudaGraphs, Offload
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan, SearchResult

_WORDS = ("cuda_graphs",)  # axes with excluded values


def with_excluded_options(
    problem: Problem,
    space: Space,
    result: SearchResult,
    barred: Collection[str],
    *,
    measures: Sequence[Measure] = ("time",),
    margin: float = MARGIN,
) -> tuple[Space, SearchResult]:
    """Return space and `result`, widened by excluded options for as long as they improve the best plans.

    The options are: CUDA graphs of more modules; other shares of the optimizer on the host; gradient reduction after
    the last backward pass; and micro-batches and degrees of tp and cp twice as large as in the space.  The best plan
    with an option may also differ in other choices, so all plans with the option are searched, until no option helps.
    `barred` has the axes that the user fixed or bounded, and forbidden values such as "cuda_graphs=layer".  With
    several `measures` the options of all candidates that the front does not dominate are searched together; the
    reduction, which overlaps in the whole space, stays unchanged.
    """
    if tuple(measures) != ("time",):
        while better := _better(problem, space, result.ranked, {*barred, "grad_reduce_overlap"}, measures):
            wider = reduce(with_options_of, (candidate.plan for candidate in better), space)
            if wider == space:
                break
            space, result = wider, search(problem, wider, measures=measures)
        return space, result
    while better := _better(problem, space, result.rivals[:1], barred, measures):
        wider = with_options_of(space, better[0].plan)
        if wider == space:
            return space, result.led_by(better[0])
        wider_result = place_best(problem, search(problem, wider, margin=margin))
        if not _is_beaten(problem, measures, wider_result.rivals[:1], better[0]):
            return wider, result.led_by(better[0])
        space, result = wider, wider_result
    return space, result


def with_options_of(space: Space, plan: ParallelPlan) -> Space:
    """Return the space extended by the options of a plan outside of it."""
    limits = space.limits
    wider = {axis: tuple(dict.fromkeys((*limits.of(axis), getattr(plan, axis)))) for axis in _WORDS}
    bounds = tuple((axis, max(bound, getattr(plan, axis))) for axis, bound in limits.upper_bounds)
    percents = tuple(dict.fromkeys((*limits.offload_percents, plan.offload_percent)))
    return replace(space, limits=replace(limits.where(**wider), upper_bounds=bounds, offload_percents=percents))


def _better(
    problem: Problem, space: Space, best: Sequence[RankedPlan], barred: Collection[str], measures: Sequence[Measure]
) -> list[RankedPlan]:
    """Return plans with one change from one of the `best` that none of these beats, sorted by the first measure."""
    changed = {plan: None for ranked_plan in best for plan in switched(problem, space, ranked_plan.plan, barred)}
    lawful = [plan for plan in changed if not broken(space.rules, problem.workload, plan)]
    better = [
        candidate
        for candidate in prices(problem, lawful)
        if is_as_safe(candidate, best[0]) and not _is_beaten(problem, measures, best, candidate)
    ]
    return sorted(better, key=lambda candidate: measures_of_plan(problem, measures, candidate))


def _is_beaten(
    problem: Problem, measures: Sequence[Measure], plans: Sequence[RankedPlan], candidate: RankedPlan
) -> bool:
    """Return whether one of the plans is at least as good as a candidate in every measure, and as safe."""
    least = np.array(measures_of_plan(problem, measures, candidate)) * (1 + TIE)
    return any(
        is_as_safe(plan, candidate) and bool((np.array(measures_of_plan(problem, measures, plan)) <= least).all())
        for plan in plans
    )


def switched(problem: Problem, space: Space, plan: ParallelPlan, barred: Collection[str]) -> Iterator[ParallelPlan]:
    """Yield `plan` with each option that the space excludes, except those in `barred`."""
    changes: list[dict[str, Any]] = [
        {axis: 2 * getattr(plan, axis)} for axis, bound in space.limits.upper_bounds if 2 * getattr(plan, axis) > bound
    ]
    if plan.grad_reduce_overlap:
        changes.append({"grad_reduce_overlap": False})
    if plan.cuda_graphs != CudaGraphs.NONE:
        changes += [{"cuda_graphs": graphs} for graphs in CudaGraphs if graphs.code > plan.cuda_graphs.code]
    if plan.offload == Offload.OPTIMIZER and len(space.limits.offload_percents) > 1:
        changes += [{"offload_percent": percent} for percent in FURTHER_PERCENTS]
    axes = axes_of(problem.model, plan)
    for change in changes:
        words = {axis: value[0] if isinstance(value, tuple) else value for axis, value in change.items()}
        if any(axis in barred or f"{axis}={shown(word)}" in barred for axis, word in words.items()):
            continue
        try:
            yield plan_of(problem, axes | change)
        except AutoplanError:
            continue
