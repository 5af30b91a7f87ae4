"""Options that spaces leave out since they rarely bring anything, tried on the best plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from autoplan.base.errors import AutoplanError
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.search.choice import is_as_safe, pace
from autoplan.search.limits import MAX_MICRO_BATCH
from autoplan.search.placement import place_best
from autoplan.search.ranking import TIE
from autoplan.search.space import Space
from autoplan.search.study import search
from autoplan.search.walk import prices
from autoplan.spec.axes import shown
from autoplan.spec.enums import CudaGraphs, Schedule
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan, SearchResult

_WORDS = ("schedule", "cuda_graphs")  # axes of which words are left out


def with_left_out(
    problem: Problem, space: Space, result: SearchResult, barred: Collection[str]
) -> tuple[Space, SearchResult]:
    """Return space and `result`, or those of a search which also looks at an option that makes its best plan faster.

    The options are sequence parallelism switched, GPipe, CUDA graphs of more, and micro-batches twice as large as the
    space goes.  What is best with one of them may differ in more than that, so that all plans which have it are
    searched, until none of the options helps.  `barred` are the axes that the user fixed or bounded, and the values,
    such as "schedule=gpipe", that the user forbade.
    """
    while better := _better(problem, space, result.rivals[0], barred):
        wider = with_options_of(space, better.plan)
        wider_result = place_best(problem, search(problem, wider))
        if not is_as_safe(wider_result.rivals[0], better) or pace(wider_result.rivals[0]) > pace(better):
            return wider, result.led_by(better)
        space, result = wider, wider_result
    return space, result


def with_options_of(space: Space, plan: ParallelPlan) -> Space:
    """Return the space that also holds plans with the options of one which it leaves out."""
    limits = space.limits
    if _can_choose_sp(plan, space.workload.training.seq_len):
        limits = replace(limits, sequence_parallel=plan.sp)
    wider = {axis: tuple(dict.fromkeys((*limits.of(axis), getattr(plan, axis)))) for axis in _WORDS}
    most = tuple((axis, max(most, getattr(plan, axis))) for axis, most in limits.most)
    return replace(space, limits=replace(limits.where(**wider), most=most))


def _can_choose_sp(plan: ParallelPlan, seq_len: int) -> bool:
    """Return whether the tokens of a rank are divided by tp, so that a plan may have sequence parallelism or not."""
    return plan.tp > 1 and seq_len // plan.cp % plan.tp == 0


def _better(problem: Problem, space: Space, best: RankedPlan, barred: Collection[str]) -> RankedPlan | None:
    """Return the best plan with the one change that makes it fastest; None where none does."""
    changed = [plan for plan in switched(problem, best.plan, barred) if not broken(space.rules, problem.workload, plan)]
    faster = [
        candidate
        for candidate in prices(problem, changed)
        if pace(candidate) < pace(best) * (1 - TIE) and is_as_safe(candidate, best)
    ]
    return min(faster, key=pace, default=None)


def switched(problem: Problem, plan: ParallelPlan, barred: Collection[str]) -> Iterator[ParallelPlan]:
    """Yield `plan` with each of the options that spaces leave out, but for those that are `barred`."""
    changes: list[dict[str, object]] = [{"micro_batch": 2 * plan.micro_batch}] * (plan.micro_batch >= MAX_MICRO_BATCH)
    if _can_choose_sp(plan, problem.training.seq_len):
        changes.append({"sp": not plan.sp})
    if plan.schedule == Schedule.ONE_F_ONE_B and plan.pp > 1:
        changes += [{"schedule": Schedule.GPIPE}] * ("gpipe" in book_of(problem.framework).words("schedule"))
    if plan.cuda_graphs != CudaGraphs.NONE:
        changes += [{"cuda_graphs": graphs} for graphs in CudaGraphs if graphs.code > plan.cuda_graphs.code]
    for change in changes:
        ((axis, value),) = change.items()
        if axis in barred or f"{axis}={shown(value)}" in barred:
            continue
        try:
            yield replace(plan, **change)  # type: ignore[arg-type]
        except AutoplanError:
            continue
