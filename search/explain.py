"""Explanation of a plan: what rules out its neighbours, and what faster plans would need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.units import format_bytes, format_percent
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, broken, legal
from autoplan.frameworks.registry import rules_for
from autoplan.search.axes import axes_of, differing, plan_of, words
from autoplan.search.choice import compared
from autoplan.search.nearest import neighbours
from autoplan.search.plan_changes import Difference, changes, prices
from autoplan.search.ranking import TIE, ranked, seconds_per_sequence
from autoplan.spec.axes import AXES, AXIS, DEFAULT_RECOMPUTE_MODULES, USUAL_SCHEDULES
from autoplan.spec.axis import Kind
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import StageCost
from autoplan.spec.explanation import AxisChange, Explanation, Neighbour, Versus
from autoplan.spec.plan import ParallelPlan, parse_recompute
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan

MAX_BETTER = 5
MAX_ALTERNATIVES = 3
MAX_RULES = 3
MAX_BATCH = 1.5  # times the requested batch: a larger batch is faster only because of its size
MIN_GAIN = 0.005  # a smaller gain is no reason to change a plan
# Axes that --versus may change: those with a separate change, and two that change together with others.
TYPED = tuple(
    axis for axis in AXES if axis.kind is not Kind.LIST and (axis.change is None or axis.name in ("vp", "dp_shard"))
)


def explain(problem: Problem, file: PlanFile, versus: Versus | None = None) -> Explanation:
    """Explain what limits the best plan of `file`, what the nearest better plans need, and why alternatives lost."""
    (best,) = prices(problem, [file.best.plan])
    stages = stage_costs(problem, best.plan)
    rules = rules_for(problem.framework, file.space.to if file.space else "")
    candidate = _priced(problem, best, 1, rules)
    several = [*candidate, *_priced(problem, best, 2, rules)]
    faster = [near for near in several if near.ratio < 1.0 - MIN_GAIN]
    return Explanation(
        command=file.command,
        plan=best,
        stages=stages,
        capacity_bytes=problem.capacity_bytes,
        binds=_binding(problem, best, stages, faster),
        changes=_by_axis(candidate),
        better=_nearest(faster),
        alternatives=file.alternatives[:MAX_ALTERNATIVES],
        certificate=file.certificate,
        versus=versus,
    )


def _priced(problem: Problem, best: RankedPlan, count: int, rules: tuple[Rule, ...]) -> list[Neighbour]:
    """Priceable plans with this many axes changed, fastest first; `rules` say which ones can start."""
    plan = best.plan
    requested = {
        _startable(replace(candidate, placement=plan.placement)): candidate
        for candidate in neighbours(problem, plan, count)
    }
    requested.pop(plan, None)
    max_batch = MAX_BATCH * plan.global_batch
    candidates = [candidate for candidate in requested if candidate.global_batch <= max_batch]
    if not candidates:
        return []
    workload = problem.workload
    batch = problem.batch(candidates)
    batch = replace(batch, placement=plan.placement)
    lawful = np.flatnonzero(legal(universal.PRICED_RULES, workload, batch))
    costs = estimate(problem, batch.take(lawful))
    order = np.argsort(seconds_per_sequence(costs), kind="stable")
    best_s = best.step_s / plan.global_batch
    admitted = legal(rules, workload, batch)[lawful]
    own = axes_of(problem.model, plan)
    result = []
    for at, near in zip(order.tolist(), ranked(problem, costs, order), strict=True):
        unrounded = requested[candidates[lawful[at]]]
        axes = axes_of(problem.model, near.plan) | {"global_batch": unrounded.global_batch}
        changes = tuple((axis, words(axis, own[axis]), words(axis, axes[axis])) for axis in differing(own, axes))
        keeps_batch = unrounded.global_batch == near.plan.global_batch
        asked = near.plan if keeps_batch else unrounded
        faults = () if admitted[at] and keeps_batch else broken(rules, workload, asked)
        needed, capacity, is_host = near.scarcest_memory(problem.capacity_bytes, problem.cluster.host.memory_bytes)
        result.append(
            Neighbour(
                changes=changes,
                plan=near,
                ratio=near.s_per_sequence / best_s,
                stage=int(costs.worst_stage[at]),
                needed_bytes=needed,
                capacity_bytes=capacity,
                is_host=is_host,
                broken=faults,
            )
        )
    return result


def _startable(plan: ParallelPlan) -> ParallelPlan:
    """Return the plan with the next global batch that its replicas divide."""
    step = plan.micro_batch * plan.dp
    return replace(plan, global_batch=-(-plan.global_batch // step) * step)


def _by_axis(neighbours: Sequence[Neighbour]) -> tuple[Neighbour, ...]:
    """Return the first startable plan of every axis, else the one nearest to being possible."""
    best: dict[str, Neighbour] = {}
    lacking = sorted((candidate for candidate in neighbours if not candidate.is_possible), key=_lacks)
    for near in (*(candidate for candidate in neighbours if candidate.is_possible), *lacking):
        if len(near.changes) == 1:
            best.setdefault(near.changes[0][0], near)
    return tuple(sorted(best.values(), key=lambda near: near.ratio))


def _excess(near: Neighbour) -> float:
    """Missing bytes on device or host; 0 if the plan fits apart from its OOM risk."""
    return max(near.needed_bytes - near.capacity_bytes, 0.0) if near.plan.verdict != "fits" else 0.0


def _lacks(near: Neighbour) -> tuple[int, float]:
    """Distance of a plan from being possible: broken rules, then missing bytes."""
    return len(near.broken), _excess(near)


def _nearest(faster: Sequence[Neighbour]) -> tuple[Neighbour, ...]:
    """Return the faster plans not dominated in speed, number of changes and distance."""

    unbeaten: list[Neighbour] = []
    for near in sorted(faster, key=lambda candidate: (*_lacks(candidate), len(candidate.changes), candidate.ratio)):
        if all(near.ratio < better.ratio * (1.0 - TIE) for better in unbeaten):
            unbeaten.append(near)
    return tuple(unbeaten[:MAX_BETTER])


def _binding(
    problem: Problem, best: RankedPlan, stages: Sequence[StageCost], faster: Sequence[Neighbour]
) -> tuple[str, ...]:
    """Name what limits the plan, or what by itself rules out faster ones: memory or rules."""
    limits = []
    if best.verdict != "fits":
        worst = max(stages, key=lambda stage: stage.memory_bytes)
        needed, capacity = format_bytes(worst.memory_bytes), format_bytes(problem.capacity_bytes)
        limits.append(f"memory of stage {worst.stage}: the plan itself needs {needed} of {capacity} there")
    heavy = [near for near in faster if near.plan.verdict != "fits" and not near.broken]
    if heavy:
        lightest = min(heavy, key=_excess)
        needed, capacity = format_bytes(lightest.needed_bytes), format_bytes(lightest.capacity_bytes)
        where = "the hosts" if lightest.is_host else f"stage {lightest.stage}"
        limits.append(f"memory of {where}: a faster plan needs {needed} of {capacity} there")
    rules = [near.broken[0] for near in faster if near.plan.verdict == "fits" and len(near.broken) == 1]
    limits += list(dict.fromkeys(rules))[:MAX_RULES]
    if limits:
        return tuple(limits)
    if any(near.is_possible for near in faster):
        return ("nothing: faster plans that fit are one or two changes away",)
    if faster:
        return ("several rules at once: faster plans with one or two changes break more than one",)
    return (f"neither memory nor a rule: no plan with one or two changes is {format_percent(MIN_GAIN)} faster",)


# -- another plan ------------------------------------------------------------------------------------------------------


def versus(problem: Problem, best: ParallelPlan, name: str, other_plan: ParallelPlan, other_problem: Problem) -> Versus:
    """Compare `other_plan`, a plan of the problem `other_problem`, with the `best` of `problem`."""
    (first,) = prices(problem, [best])
    if faults := broken(universal.RULES, other_problem.workload, other_plan):
        raise InputError(f"{name}: {faults[0]}")
    (second,) = prices(other_problem, [other_plan])
    rules = rules_for(other_problem.framework)
    axis_changes: tuple[AxisChange, ...] = ()
    if problem.workload == other_problem.workload and problem.cluster == other_problem.cluster:
        axis_changes = changes(Difference(problem=problem, rules=rules, before=best, after=other_plan))
    return Versus(
        name=name,
        plan=second,
        stages=stage_costs(other_problem, other_plan),
        gap=compared(second, first),
        broken=broken(rules, other_problem.workload, other_plan),
        changes=axis_changes,
    )


def changed(problem: Problem, plan: ParallelPlan, typed: str) -> ParallelPlan:
    """Return `plan` with the values of 'tp=4,pp=8'; dependent choices such as data parallelism follow."""
    axes = dict(axes_of(problem.model, plan))
    schedule, vp = axes.get("schedule", (Schedule.ONE_F_ONE_B, 1))
    typed_values = _typed_values(typed)
    for name, text in typed_values.items():
        if name not in (axis.name for axis in TYPED):
            raise InputError(f"--versus {name}: unknown axis; known: {', '.join(axis.name for axis in TYPED)}")
        if name == "recompute":
            fields = parse_recompute(text)
            modules = fields.get("recompute_modules", DEFAULT_RECOMPUTE_MODULES)
            axes[name] = (fields["recompute"], modules, fields.get("recompute_num_layers"))
            continue
        value = AXIS[name].parse(text, "--versus")
        match name:
            case "vp":
                vp = int(value)
                if "schedule" not in typed_values and schedule in USUAL_SCHEDULES:
                    schedule = Schedule.INTERLEAVED if vp > 1 else Schedule.ONE_F_ONE_B
            case "schedule":
                schedule = Schedule(str(value))
                if "vp" not in typed_values:
                    vp = 2 if schedule in ("zb-v", "dualpipe-v") else vp if schedule == "interleaved" else 1
            case "sharding":
                axes["sharding"] = (value, None)
            case "dp_shard":
                axes["sharding"] = (axes.get("sharding", (plan.sharding, None))[0], value)
            case _:
                axes[name] = value
    axes["schedule"] = (schedule, vp)
    try:
        changed_plan = plan_of(problem, axes)
    except AutoplanError as error:
        raise InputError(f"--versus {typed}: {error}") from None
    if not differing(axes_of(problem.model, plan), axes_of(problem.model, changed_plan)):
        raise InputError(f"--versus {typed} changes nothing: the plan is {plan.describe()}")
    return changed_plan


def _typed_values(typed: str) -> dict[str, str]:
    """Parse the value of each axis in 'tp=4,pp=8'; `sharding` is followed by its number of ranks."""
    values: dict[str, str] = {}
    for text in typed.split(","):
        axis, sign, value = (part.strip().lower().replace("-", "_") for part in text.partition("="))
        if not sign or not value:
            raise InputError(f"--versus {typed!r}: no such file; write a plan file, or changes such as tp=4,pp=8")
        if axis in values:
            raise InputError(f"--versus {typed}: {axis} is given twice: leave one of them out")
        values[axis] = value
    return dict(sorted(values.items(), key=lambda item: item[0] == "dp_shard"))
