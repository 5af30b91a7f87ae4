"""Choice of the simplest plan that is about as fast as the fastest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoplan.base.errors import InputError
from autoplan.frameworks.common.rules import legal
from autoplan.search.axes import axes_of, plan_of
from autoplan.search.choice import is_as_safe
from autoplan.search.limits import Limits, divisors
from autoplan.search.plan_changes import Difference, prices, safe_mixes
from autoplan.search.space import Space
from autoplan.spec.axes import DEFAULT_RECOMPUTE_MODULES, SEARCHED
from autoplan.spec.axis import Kind
from autoplan.spec.enums import Recompute, Schedule, Sharding
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan, SearchResult

# How much slower a plan with fewer options may be: far less than the interval of any ratio of two plans.
MAX_SLOWER = 0.01
SMALL_RISK = 0.01  # of running out of memory
MAX_RIVALS = 4  # best plans of other degrees that are simplified in addition to the fastest


def simplest_first(problem: Problem, space: Space, result: SearchResult) -> SearchResult:
    """Return `result` led by the plan with the fewest options that is as safe and at most `MAX_SLOWER` slower."""
    fastest, *slower_plans = result.rivals
    slowest = fastest.s_per_sequence * (1 + MAX_SLOWER)
    near = [
        candidate
        for candidate in slower_plans[:MAX_RIVALS]
        if candidate.s_per_sequence <= slowest and is_as_safe(candidate, fastest)
    ]
    simplified_plans = [simplified(problem, space, candidate, slowest) for candidate in (fastest, *near)]
    _, simplest = min(simplified_plans, key=lambda counted: (_parts(*counted), counted[1].s_per_sequence))
    if simplest.plan == fastest.plan:
        return result
    rivals = (simplest, *(candidate for candidate in result.rivals if candidate.plan != simplest.plan))
    ranked = (simplest, *(candidate for candidate in result.ranked if candidate.plan != simplest.plan))
    certificate = replace(
        result.certificate, slower_than_fastest=simplest.s_per_sequence / fastest.s_per_sequence - 1.0
    )
    return replace(result, ranked=ranked, rivals=rivals, certificate=certificate)


def _parts(num_options: int, candidate: RankedPlan) -> tuple[int, bool, bool, int]:
    """Return what a colleague has to accept: options with unequal layers, a risk, contexts, kinds of parallelism."""
    plan = candidate.plan
    degrees = (plan.tp, plan.cp, plan.pp, plan.ep, plan.dp)
    is_risky = candidate.oom_probability > SMALL_RISK
    num_options += plan.layers_per_chunk is not None
    return num_options, is_risky, plan.cp > 1, sum(degree > 1 for degree in degrees)


def simplified(problem: Problem, space: Space, start: RankedPlan, slowest: float) -> tuple[int, RankedPlan]:
    """Set options to plain values, the cheapest first, up to `slowest` seconds per sequence: (options left, plan)."""
    even = [candidate for candidate in _evened(problem, space, start) if candidate.s_per_sequence <= slowest]
    simplest = min(even, key=lambda plan: plan.s_per_sequence, default=start)
    for keeps_cp in (False, True):
        try:
            plain = _plain(problem, space.limits, simplest.plan, keeps_cp=keeps_cp)
            break
        except InputError:
            continue
    else:
        return len(axes_of(problem.model, simplest.plan)), simplest
    difference = Difference(problem=problem, rules=space.rules, before=plain, after=simplest.plan)
    axes = difference.axes()
    while axes:
        fewer = safe_mixes(difference, [tuple(axis for axis in axes if axis != left_axis) for left_axis in axes], start)
        near = {axes: candidate for axes, candidate in fewer.items() if candidate.s_per_sequence <= slowest}
        if not near:
            break
        axes = min(near, key=lambda subset: near[subset].s_per_sequence)
        simplest = near[axes]
    return len(axes), simplest


def _evened(problem: Problem, space: Space, start: RankedPlan) -> Sequence[RankedPlan]:
    """Return plans as safe as `start` with equal layers in all chunks, if its chunks are unequal."""
    plan, num_layers = start.plan, problem.model.num_layers
    if plan.layers_per_chunk is None or plan.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
        return ()
    if space.limits.split or num_layers % plan.pp:
        return ()
    schedules = {1: Schedule.ONE_F_ONE_B}
    plans = [
        replace(plan, vp=vp, schedule=schedules.get(vp, Schedule.INTERLEAVED), layers_per_chunk=None)
        for vp in divisors(num_layers // plan.pp)
        if space.limits.admits("vp", vp) and schedules.get(vp, Schedule.INTERLEAVED) in space.limits.of("schedule")
    ]
    if not plans:
        return ()
    lawful = legal(space.rules, problem.workload, PlanBatch.of(plans, num_layers))
    legal_plans = [plans[at] for at in np.flatnonzero(lawful)]
    return (
        [candidate for candidate in prices(problem, legal_plans) if is_as_safe(candidate, start)] if legal_plans else ()
    )


def _plain(problem: Problem, limits: Limits, plan: ParallelPlan, *, keeps_cp: bool) -> ParallelPlan:
    """Return the plan with the same degrees and batch and plain values of its options, where the limits have them."""
    axes = dict(axes_of(problem.model, plan))
    plain: dict[str, Any] = {
        axis.name: problem.framework.choice(axis.name)
        for axis in SEARCHED
        if (axis.kind is Kind.FLAG or axis.exact is not None or axis.name in ("offload", "dispatcher"))
        and not (axis.is_monotone and axis.exact is None)  # which a search never excludes
        and problem.framework.choice(axis.name) in limits.of(axis.name)
    }
    if "none" in limits.recomputes:
        plain["recompute"] = (Recompute.NONE, DEFAULT_RECOMPUTE_MODULES, None)
    if limits.admits("vp", 1) and Schedule.ONE_F_ONE_B in limits.of("schedule"):
        plain["schedule"] = (Schedule.ONE_F_ONE_B, 1)
    if not limits.fixes("dp_replicate", "dp_shard"):
        is_usual = plan.sharding in (Sharding.NONE, Sharding.ZERO1) or Sharding.ZERO1 not in limits.of("sharding")
        plain["sharding"] = (plan.sharding if is_usual else Sharding.ZERO1, None)
    if not keeps_cp and limits.admits("cp", 1) and not limits.fixes("dp_replicate", "dp_shard"):
        plain["cp"] = 1
    axes |= {name: value for name, value in plain.items() if name in axes}
    axes.pop("layers", None)  # spread evenly, or as in the framework
    return plan_of(problem, axes)
