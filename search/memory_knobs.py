"""Single changes to a plan that free device memory, with the bytes freed and the cost in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoplan.base.errors import AutoplanError
from autoplan.base.units import counted
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.frameworks.common.rules import Rule, broken
from autoplan.frameworks.registry import book_of
from autoplan.search.ranking import ranked
from autoplan.spec.enums import Offload, RecomputeModule, Sharding
from autoplan.spec.plan import ParallelPlan, check_priced, chunk_layers, parse_recompute
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import MemoryKnob

DEGREES = ("tp", "cp", "pp", "ep")


def memory_knobs(problem: Problem, plan: ParallelPlan, rules: tuple[Rule, ...]) -> tuple[MemoryKnob, ...]:
    """Return legal plans one choice away from `plan` with less memory, most freed first; degrees take ranks from dp."""
    changes = [
        (says, changed_plan)
        for says, changed_plan in _neighbours(problem, plan)
        if not broken(rules, problem.workload, changed_plan)
    ]
    batch = problem.batch([plan, *(changed_plan for _, changed_plan in changes)])
    costs = estimate(problem, batch)
    freed = costs.memory_bytes[0] - costs.memory_bytes
    order = [at for at in (-freed).argsort(kind="stable") if freed[at] > 0]
    return tuple(
        MemoryKnob(change=changes[at - 1][0], freed_bytes=float(freed[at]), plan=changed_plan)
        for at, changed_plan in zip(order, ranked(problem, costs, order), strict=True)
    )


def _neighbours(problem: Problem, plan: ParallelPlan) -> Iterator[tuple[str, ParallelPlan]]:
    """Yield (the change, the changed plan) for every single choice, including illegal ones."""
    for says, changes in _changes(problem, plan):
        try:
            changed_plan = replace(plan, **changes)  # type: ignore[arg-type]
            check_priced(changed_plan)
            chunk_layers(changed_plan, problem.model.num_layers)
        except AutoplanError:
            continue  # the combination does not exist
        yield says, changed_plan


def _changes(problem: Problem, plan: ParallelPlan) -> Iterator[tuple[str, dict[str, object]]]:
    yield from _recompute(problem, plan)
    if plan.micro_batch > 1:
        less = max(size for size in range(1, plan.micro_batch) if plan.micro_batch % size == 0)
        yield f"micro-batch {plan.micro_batch} -> {less}", {"micro_batch": less}
    yield from _degrees(problem, plan)
    for sharding in tuple(Sharding)[Sharding(plan.sharding).code + 1 :]:
        yield sharding, {"sharding": sharding, "param_gather_overlap": True}
    if plan.dp_replicate > 1 and plan.sharding != "none":
        all_replicas = {"dp_replicate": 1, "dp_shard": plan.dp}
        yield f"states sharded over all {plan.dp * plan.cp} replicas", dict(all_replicas)
    for offload in (Offload.OPTIMIZER, Offload.PARAMETERS):
        if Offload(plan.offload).code < offload.code:
            yield f"{offload} on the host", {"offload": offload}
    if plan.tp > 1 and not plan.sp and problem.framework.network.sequence_parallel:
        yield "sequence parallelism", {"sp": True}
    if plan.vp > 1:
        yield f"interleave {plan.vp} -> none", {"vp": 1, "schedule": "1f1b", "layers_per_chunk": None}
    if plan.schedule == "gpipe" and plan.pp > 1:
        yield "schedule 1f1b", {"schedule": "1f1b"}
    if plan.pp > 1 and plan.vp == 1:
        yield from _moved_layer(problem, plan)


def _recompute(problem: Problem, plan: ParallelPlan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield plans with more recomputation: of parts of a layer, half of the layers or all layers."""
    if plan.recompute == "full" and plan.recompute_num_layers is None:
        return
    none: dict[str, object] = {"recompute": "none", "recompute_num_layers": None}
    none["recompute_modules"] = ParallelPlan(global_batch=1).recompute_modules
    half = max(max(chunk_layers(plan, problem.model.num_layers)) // 2, plan.recompute_num_layers or 1)
    names = _selective_names(problem) if plan.recompute == "none" else ()
    for text in (*names, f"full:{half}", "full"):
        fields = none | parse_recompute(text)
        partly = f"{counted(half, 'layer')} of a chunk"
        words = {"full": "all layers", f"full:{half}": partly, "selective": "selectively"}
        yield f"recompute {words.get(text, text)}", fields


def _selective_names(problem: Problem) -> tuple[str, ...]:
    return tuple(RecomputeModule) if book_of(problem.framework).repeats_parts else ("selective",)


def _degrees(problem: Problem, plan: ParallelPlan) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield plans with one degree doubled, taking ranks from dp_shard, then from dp_replicate."""
    for axis in DEGREES:
        doubled = 2 * getattr(plan, axis)
        changes: dict[str, object] = {axis: doubled}
        if axis == "ep":
            if problem.model.moe:
                yield f"ep {plan.ep} -> {doubled}", changes
            continue
        source = "dp_shard" if plan.dp_shard % 2 == 0 else "dp_replicate"
        if getattr(plan, source) % 2:
            continue
        changes[source] = getattr(plan, source) // 2
        if axis == "tp":
            changes["sp"] = plan.sp or (plan.tp == 1 and problem.framework.network.sequence_parallel)
            changes["etp"] = doubled if plan.etp == plan.tp and problem.model.moe else plan.etp
        if axis == "pp":
            split = book_of(problem.framework).split
            changes["layers_per_chunk"] = split(problem.model, doubled) if split else None
        yield f"{axis} {getattr(plan, axis)} -> {doubled}", changes


def _moved_layer(problem: Problem, plan: ParallelPlan) -> Iterator[tuple[str, dict[str, object]]]:
    """Move a layer from the stage with the most memory to the one with the least."""
    layers = list(chunk_layers(plan, problem.model.num_layers))
    memory = [stage.memory_bytes for stage in stage_costs(problem, plan)]
    full, empty = memory.index(max(memory)), memory.index(min(memory))
    if layers[full] > 1 and full != empty:
        layers[full] -= 1
        layers[empty] += 1
        yield f"one layer from stage {full} to stage {empty}", {"layers_per_chunk": tuple(layers)}
