"""Options that spaces leave out since they rarely bring anything, tried on the best plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from autoplan.base.errors import AutoplanError
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.search.choice import is_as_safe, pace
from autoplan.search.ranking import TIE
from autoplan.search.space import Space
from autoplan.search.walk import prices
from autoplan.spec.enums import CudaGraphs, Schedule
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan, SearchResult


def with_left_out(problem: Problem, space: Space, result: SearchResult, fixed: Collection[str]) -> SearchResult:
    """Return `result` with its best plan under another order of the ranks, or other options that are rarely better.

    They are sequence parallelism switched, GPipe, and CUDA graphs of more.

    Each is taken where it is faster and as safe, and the axis is not among those `fixed` by the user.
    """
    best = first = result.rivals[0]
    while better := _better(problem, space, best, fixed):
        best = better
    return result if best is first else result.led_by(best)


def _better(problem: Problem, space: Space, best: RankedPlan, fixed: Collection[str]) -> RankedPlan | None:
    """Return the best plan with the one change that makes it fastest; None where none does."""
    changed = [plan for plan in _changed(problem, best.plan, fixed) if not broken(space.rules, problem.workload, plan)]
    faster = [
        candidate
        for candidate in prices(problem, changed)
        if pace(candidate) < pace(best) * (1 - TIE) and is_as_safe(candidate, best)
    ]
    return min(faster, key=pace, default=None)


def _changed(problem: Problem, plan: ParallelPlan, fixed: Collection[str]) -> Iterator[ParallelPlan]:
    changes: list[dict[str, object]] = []
    if plan.pp > 1 and plan.dp > 1 and "rank_order" not in fixed:
        changes += [{"rank_order": order} for order in problem.framework.rank_orders if order != plan.rank_order]
    if plan.tp > 1 and "sp" not in fixed and problem.training.seq_len // plan.cp % plan.tp == 0:
        changes.append({"sp": not plan.sp})
    if plan.schedule == Schedule.ONE_F_ONE_B and plan.pp > 1 and "schedule" not in fixed:
        changes += [{"schedule": Schedule.GPIPE}] * ("gpipe" in book_of(problem.framework).words("schedule"))
    if "cuda_graphs" not in fixed and plan.cuda_graphs != CudaGraphs.NONE:
        changes += [{"cuda_graphs": graphs} for graphs in CudaGraphs if graphs.code > plan.cuda_graphs.code]
    for change in changes:
        try:
            yield replace(plan, **change)  # type: ignore[arg-type]
        except AutoplanError:
            continue
