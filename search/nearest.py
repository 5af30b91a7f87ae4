"""Search for the plan nearest to one that a target cannot start, among those that it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from autoplan.base.errors import AutoplanError
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import legal
from autoplan.frameworks.registry import book_of
from autoplan.search.axes import WITH_TP, axes_of, differing, plan_of, words
from autoplan.search.layouts import chunk_counts
from autoplan.search.limits import default_limits, divisors
from autoplan.search.ranking import ranked, seconds_per_sequence
from autoplan.spec.axes import AXES, AXIS, DEFAULT_RECOMPUTE_MODULES, SEARCHED
from autoplan.spec.axis import Axis, Kind
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan

MAX_ASKED = 400  # plans checked with the target


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A plan, and (axis, its value, value in the original plan) of every difference."""

    plan: RankedPlan
    changes: tuple[tuple[str, str, str], ...]


def nearest(
    problem: Problem,
    plan: ParallelPlan,
    accepts: Callable[[RankedPlan], bool],
    extra_plans: Sequence[ParallelPlan] = (),
    *,
    most_changes: int = 2,
) -> Near | None:
    """Return the fastest legal or extra plan that `accepts` takes with the fewest axes changed; None: none found."""
    axes = axes_of(problem.model, plan)
    num_changes = {
        candidate: len(differing(axes, axes_of(problem.model, candidate)))
        for candidate in extra_plans
        if candidate.placement is None
    }
    for count in range(1, most_changes + 1):
        for candidate in neighbours(problem, plan, count):
            num_changes.setdefault(candidate, count)
    num_changes.pop(plan, None)
    candidates = [candidate for candidate in num_changes if candidate.global_batch == plan.global_batch]
    if not candidates:
        return None
    batch = problem.batch(candidates)
    lawful = np.flatnonzero(legal(book_of(problem.framework).rules, problem.workload, batch))
    costs = estimate(problem, batch.take(lawful))
    fitting = np.flatnonzero(costs.verdict == VERDICTS.index("fits"))
    changed = np.array([num_changes[candidates[at]] for at in lawful], dtype=np.int64)[fitting]
    order = fitting[np.lexsort((seconds_per_sequence(costs)[fitting], changed))]
    for near in ranked(problem, costs, order[:MAX_ASKED]):
        if accepts(near):
            found = axes_of(problem.model, near.plan)
            changes = ((axis, words(axis, found[axis]), words(axis, axes[axis])) for axis in differing(axes, found))
            return Near(plan=near, changes=tuple(changes))
    return None


def neighbours(problem: Problem, plan: ParallelPlan, count: int) -> Iterator[ParallelPlan]:
    """Yield the plans with this many axes changed, without changes of the node order."""
    axes = axes_of(problem.model, plan) | {"nodes": None}
    values = _values(problem, plan)
    for names in combinations(values, count):
        for choice in product(*(values[name] for name in names)):
            try:
                yield plan_of(problem, axes | dict(zip(names, choice, strict=True)))
            except AutoplanError:
                continue


def _is_switched(axis: Axis) -> bool:
    return axis.kind is Kind.FLAG and axis.exact is None


def _values(problem: Problem, plan: ParallelPlan) -> dict[str, list[Any]]:
    """Return the other values of every axis that are worth trying."""
    model, book, devices = problem.model, book_of(problem.framework), problem.cluster.num_devices
    axes, limits = axes_of(model, plan), default_limits(problem, (plan.global_batch,))
    values: dict[str, list[Any]] = {axis: [*divisors(devices)] for axis in ("tp", "cp", "pp")}
    values["micro_batch"] = [*divisors(plan.global_batch)]
    if model.moe:
        values["ep"] = [*divisors(model.moe.num_experts)]
    values = {axis: [count for count in counts if limits.admits(axis, count)] for axis, counts in values.items()}
    if "etp" in axes:
        values["etp"] = [1, WITH_TP]
    if plan.pp > 1:
        chunks = [vp for vp in chunk_counts(model.num_layers, plan.pp) if vp > 1]
        values["schedule"] = [("1f1b", 1), *(("interleaved", vp) for vp in chunks), ("gpipe", 1), ("zb-h1", 1)]
        values["schedule"] += [("zb-v", 2), ("dualpipe-v", 2)]
        values["layers"] = [()]
    if "sharding" in axes:
        values["sharding"] = [(kind, None) for kind in book.words("sharding")]
    values["recompute"] = [(kind, DEFAULT_RECOMPUTE_MODULES, None) for kind in book.words("recompute")]
    values["offload"] = [*AXIS["offload"].searched]
    if "offload_percent" in axes:
        values["offload_percent"] = [*limits.offload_percents]
    values |= {axis.name: [not axes[axis.name]] for axis in AXES if _is_switched(axis) and axis.name in axes}
    # Only values that do not change the numerics of training.
    values |= {axis.name: [*limits.of(axis.name)] for axis in SEARCHED if axis.exact is not None and axis.name in axes}
    values["cp_kind"] = [*book.words("cp_kind")] if plan.cp > 1 else []
    values["rank_order"] = [*problem.framework.rank_orders] if "rank_order" in axes else []
    return {axis: [value for value in choices if value != axes.get(axis)] for axis, choices in values.items()}
