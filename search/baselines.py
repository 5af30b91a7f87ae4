"""Baselines: the best plan of each family that practitioners usually try first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoplan.frameworks.registry import book_of
from autoplan.search.limits import Limits
from autoplan.search.space import Space
from autoplan.search.study import search
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import ObviousPlan, SearchResult


def _narrowed(limits: Limits, **degrees: int) -> Limits:
    """Return `limits` with some degrees fixed, overriding their bounds."""
    fixed = tuple((axis, value) for axis, value in degrees.items() if (axis, value) not in limits.fixed)
    return replace(
        limits,
        fixed=(*limits.fixed, *fixed),
        upper_bounds=tuple((axis, value) for axis, value in limits.upper_bounds if axis not in degrees),
    )


def families(problem: Problem, limits: Limits) -> Iterator[tuple[str, Limits]]:
    """Yield names and limits of the usual first choices, within the user's limits except for FSDP's sharding."""
    cluster, has_experts = problem.cluster, problem.model.moe is not None
    domain = min(cluster.levels[-1].num_devices, cluster.num_devices)
    node = min(cluster.devices_per_node, domain)
    alone = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
    yield "data parallelism alone", _narrowed(limits, **alone)
    if "zero3" in book_of(problem.framework).words("sharding"):
        yield "FSDP alone", _narrowed(limits, **alone).where(sharding=("zero3",))
    if has_experts:
        yield "data and expert parallelism alone", _narrowed(limits, tp=1, pp=1, cp=1)
    if node > 1:
        yield f"tp {node} and data parallelism", _narrowed(limits, tp=node, pp=1, cp=1)
        yield f"tp {node} and a pipeline without interleaving", _narrowed(limits, tp=node, cp=1, vp=1)
    yield "a pipeline without tensor parallelism", _narrowed(limits, tp=1, cp=1)


def baseline_plans(problem: Problem, space: Space, result: SearchResult) -> tuple[ObviousPlan, ...]:
    """Return the best legal plan of every family, unless it equals the answer or an earlier family's plan."""
    best = result.rivals[0]
    plans_shown, rows = {best.plan}, []
    for name, limits in families(problem, space.limits):
        outcome = search(problem, replace(space, limits=limits), margin=0.0)
        plan = outcome.rivals[0] if outcome.rivals else outcome.closest
        if plan is None or plan.plan in plans_shown:
            continue
        plans_shown.add(plan.plan)
        excess = 0.0 if outcome.rivals else max(plan.memory_bytes - problem.capacity_bytes, 0.0)
        rows.append(
            ObviousPlan(family=name, plan=plan, ratio=plan.s_per_sequence / best.s_per_sequence, excess_bytes=excess)
        )
    return tuple(rows)
