"""Why this plan?  What stops the plans beside it, and what those that are faster would need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.units import format_bytes
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import broken, legal
from autoplan.frameworks.rulebooks import book_of
from autoplan.search.axes import FLAGS, axes_of, differing, plan_of, words
from autoplan.search.choice import compared
from autoplan.search.nearest import neighbours
from autoplan.search.ranking import TIE, ranked, seconds_per_sequence
from autoplan.search.walk import Way, changes, prices
from autoplan.spec.enums import CodedEnum, ContextParallelKind, Offload, Schedule, Sharding
from autoplan.spec.estimate import StageCost
from autoplan.spec.explanation import AxisChange, Explanation, Neighbour, Versus
from autoplan.spec.plan import ParallelPlan, PlanBatch, parse_recompute
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan

MOST_BETTER = 5
MOST_ALTERNATIVES = 3
MOST_RULES = 3
MOST_BATCH = 1.5  # of the batch asked for: a larger one is faster for its size alone
LEAST_GAIN = 0.005  # less is no reason to change anything
COUNTS = ("tp", "cp", "pp", "ep", "etp", "micro_batch", "global_batch")
WORDS: dict[str, tuple[CodedEnum, ...]] = {"offload": tuple(Offload), "cp_kind": tuple(ContextParallelKind)}


def explain(problem: Problem, file: PlanFile, versus: Versus | None = None) -> Explanation:
    """What binds the best plan of `file`, what the nearest better ones would need, and why the alternatives lost."""
    (best,) = prices(problem, [file.best.plan])
    stages = stage_costs(problem, best.plan)
    one = _priced(problem, best, 1)
    several = [*one, *_priced(problem, best, 2)]
    faster = [near for near in several if near.ratio < 1.0 - LEAST_GAIN]
    return Explanation(
        command=file.command,
        plan=best,
        stages=stages,
        capacity_bytes=problem.capacity_bytes,
        binds=_binding(problem, best, stages, faster),
        changes=_by_axis(one),
        better=_nearest(faster),
        alternatives=file.alternatives[:MOST_ALTERNATIVES],
        certificate=file.certificate,
        versus=versus,
    )


def _priced(problem: Problem, best: RankedPlan, count: int) -> list[Neighbour]:
    """The plans with so many axes changed that can be priced at all, fastest first."""
    plan = best.plan
    asked = {_startable(replace(one, placement=plan.placement)): one for one in neighbours(problem, plan, count)}
    asked.pop(plan, None)
    most = MOST_BATCH * plan.global_batch
    candidates = [one for one in asked if one.global_batch <= most]
    if not candidates:
        return []
    workload = problem.workload
    batch = PlanBatch.of(candidates, problem.model.num_layers)
    batch = replace(batch, placement=plan.placement)
    lawful = np.flatnonzero(legal(universal.RULES, workload, batch))
    costs = estimate(problem, batch.take(lawful))
    order = np.argsort(seconds_per_sequence(costs), kind="stable")
    pace = best.step_s / plan.global_batch
    admitted = legal(book_of(problem.framework).rules, workload, batch)[lawful]
    mine = axes_of(problem.model, plan)
    result = []
    for at, near in zip(order.tolist(), ranked(problem, costs, order), strict=True):
        wanted = asked[candidates[lawful[at]]]
        axes = axes_of(problem.model, near.plan) | {"global_batch": wanted.global_batch}
        told = tuple((axis, words(axis, mine[axis]), words(axis, axes[axis])) for axis in differing(mine, axes))
        rules = book_of(problem.framework).rules
        is_whole = wanted.global_batch == near.plan.global_batch
        says = () if admitted[at] and is_whole else broken(rules, workload, near.plan if is_whole else wanted)
        result.append(
            Neighbour(
                changes=told,
                plan=near,
                ratio=near.step_s / near.plan.global_batch / pace,
                stage=int(costs.worst_stage[at]),
                broken=says,
            )
        )
    return result


def _startable(plan: ParallelPlan) -> ParallelPlan:
    """The plan with the next global batch that its replicas divide."""
    step = plan.micro_batch * plan.dp
    return replace(plan, global_batch=-(-plan.global_batch // step) * step)


def _by_axis(found: Sequence[Neighbour]) -> tuple[Neighbour, ...]:
    """The first of every axis that could be started, else the one that lacks least."""
    best: dict[str, Neighbour] = {}
    lacking = sorted((one for one in found if not one.is_possible), key=_lacks)
    for near in (*(one for one in found if one.is_possible), *lacking):
        if len(near.changes) == 1:
            best.setdefault(near.changes[0][0], near)
    return tuple(sorted(best.values(), key=lambda near: near.ratio))


def _excess(near: Neighbour) -> float:
    """Bytes that a device has too few; 0 where it fits but for its risk."""
    return max(-near.plan.memory_headroom_bytes, 0.0) if near.plan.verdict != "fits" else 0.0


def _lacks(near: Neighbour) -> tuple[int, float]:
    """How far it is from being possible: rules that it breaks, then bytes."""
    return len(near.broken), _excess(near)


def _nearest(faster: Sequence[Neighbour]) -> tuple[Neighbour, ...]:
    """Of faster plans those that no other one beats with as few changes and as little lacking."""

    kept: list[Neighbour] = []
    for near in sorted(faster, key=lambda one: (*_lacks(one), len(one.changes), one.ratio)):
        if all(near.ratio < other.ratio * (1.0 - TIE) for other in kept):
            kept.append(near)
    return tuple(kept[:MOST_BETTER])


def _binding(
    problem: Problem, best: RankedPlan, stages: Sequence[StageCost], faster: Sequence[Neighbour]
) -> tuple[str, ...]:
    """What stops the plan, or alone stops faster ones: memory, and rules in the way of plans that fit."""
    says = []
    if best.verdict != "fits":
        worst = max(stages, key=lambda stage: stage.memory_bytes)
        needed, there = format_bytes(worst.memory_bytes), format_bytes(problem.capacity_bytes)
        says.append(f"memory of stage {worst.stage}: the plan itself needs {needed} of {there} there")
    heavy = [near for near in faster if near.plan.verdict != "fits" and not near.broken]
    if heavy:
        least = min(heavy, key=_excess)
        needed, there = format_bytes(least.plan.memory_bytes), format_bytes(problem.capacity_bytes)
        says.append(f"memory of stage {least.stage}: a faster plan needs {needed} of {there} there")
    rules = [near.broken[0] for near in faster if near.plan.verdict == "fits" and len(near.broken) == 1]
    return (*says, *list(dict.fromkeys(rules))[:MOST_RULES])


# -- another plan ------------------------------------------------------------------------------------------------------


def versus(problem: Problem, best: ParallelPlan, name: str, other: ParallelPlan, theirs: Problem) -> Versus:
    """`other`, a plan of the problem `theirs`, beside the `best` of `problem`."""
    (first,) = prices(problem, [best])
    if faults := broken(universal.RULES, theirs.workload, other):
        raise InputError(f"{name}: {faults[0]}")
    (second,) = prices(theirs, [other])
    rules = book_of(theirs.framework).rules
    found: tuple[AxisChange, ...] = ()
    if problem.workload == theirs.workload and problem.cluster == theirs.cluster:
        found = changes(Way(problem=problem, rules=rules, before=best, after=other))
    return Versus(
        name=name,
        plan=second,
        stages=stage_costs(theirs, other),
        gap=compared(second, first),
        broken=broken(rules, theirs.workload, other),
        changes=found,
    )


def changed(problem: Problem, plan: ParallelPlan, wishes: str) -> ParallelPlan:
    """`plan` with the values of 'tp=4,pp=8'; what depends on them follows, as data parallelism does."""
    axes = dict(axes_of(problem.model, plan))
    schedule, vp = axes.get("schedule", ("1f1b", 1))
    wanted = _wanted(wishes)
    for axis, value in wanted.items():
        match axis:
            case "vp":
                vp = _number(axis, value)
                if "schedule" not in wanted and schedule in ("1f1b", "interleaved"):
                    schedule = "interleaved" if vp > 1 else "1f1b"
            case "schedule":
                schedule = _word(axis, value.replace("_", "-"), tuple(Schedule))
                if "vp" not in wanted:
                    vp = 2 if schedule in ("zb-v", "dualpipe-v") else vp if schedule == "interleaved" else 1
            case "sharding":
                axes["sharding"] = (_word(axis, value, tuple(Sharding)), None)
            case "dp_shard":
                axes["sharding"] = (axes.get("sharding", (plan.sharding, None))[0], _number(axis, value))
            case "recompute":
                fields = parse_recompute(value)
                modules = fields.get("recompute_modules", ParallelPlan(global_batch=1).recompute_modules)
                axes["recompute"] = (fields["recompute"], modules, fields.get("recompute_num_layers"))
            case _ if axis in COUNTS:
                axes[axis] = _number(axis, value)
            case _ if axis in WORDS:
                axes[axis] = _word(axis, value, WORDS[axis])
            case _ if axis in FLAGS:
                axes[axis] = _word(axis, value, ("on", "off")) == "on"
            case _:
                known = (*COUNTS, "vp", "dp_shard", "recompute", "schedule", "sharding", *WORDS, *FLAGS)
                raise InputError(f"--versus {axis}: unknown axis; known: {', '.join(known)}")
    axes["schedule"] = (schedule, vp)
    try:
        other = plan_of(problem, axes)
    except AutoplanError as error:
        raise InputError(f"--versus {wishes}: {error}") from None
    if not differing(axes_of(problem.model, plan), axes_of(problem.model, other)):
        raise InputError(f"--versus {wishes} changes nothing: the plan is {plan.describe()}")
    return other


def _wanted(wishes: str) -> dict[str, str]:
    """The value of each axis in 'tp=4,pp=8'; `sharding` stands before the number of ranks over which it is."""
    wanted: dict[str, str] = {}
    for wish in wishes.split(","):
        axis, sign, value = (part.strip().lower().replace("-", "_") for part in wish.partition("="))
        if not sign or not value:
            raise InputError(f"--versus {wishes!r}: no such file; write a plan file, or changes such as tp=4,pp=8")
        if axis in wanted:
            raise InputError(f"--versus {wishes}: {axis} is given twice: leave one of them out")
        wanted[axis] = value
    return dict(sorted(wanted.items(), key=lambda one: one[0] == "dp_shard"))


def _number(axis: str, value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,6}", value):
        raise InputError(f"--versus {axis}={value}: must be a whole number from 1 to 9999999")
    return int(value)


def _word(axis: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise InputError(f"--versus {axis}={value}: must be one of {', '.join(known)}")
    return value
