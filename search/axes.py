"""Changes to a plan, one axis at a time.

Data parallelism uses the devices that remain after the other degrees.  An axis without effect, such as interleaving on
a single stage, has no value; if a change gives it an effect, it takes the value of the other plan or its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoplan.base.units import repetitions
from autoplan.frameworks.registry import book_of
from autoplan.spec.axes import AXES, AXIS, shown
from autoplan.spec.axis import Axis
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, check_priced, chunk_layers, even_chunks
from autoplan.spec.problem import Problem

Axes = Mapping[str, Any]

WITH_TP = "tp"  # value of etp: equal to tp
# Axes named in changes, in display order: first those that always have an effect.
_CHANGEABLE = sorted(
    (axis for axis in AXES if axis.change in (None, "layers", "nodes")), key=lambda axis: axis.needs.order
)


def axes_of(model: ModelSpec, plan: ParallelPlan) -> dict[str, Any]:
    """Return the value of every axis that has an effect in `plan`.

    `sharding` is (kind, number of ranks; None: all), `schedule` is (name, chunks per rank), and `layers` has candidate
    layouts, of which the first with the plan's number of chunks applies.
    """
    axes: dict[str, Any] = {}
    for axis in _CHANGEABLE:
        has_meaning = axis.needs.are_met(plan, **parts_of(model))
        if axis.name == "sharding":
            has_meaning = has_meaning or plan.offload != "none"
        if axis.name == "offload_percent":
            has_meaning = plan.offload == "optimizer"
        if axis.name == "delay_wgrad":
            has_meaning = plan.ep_overlap
        if axis.name == "param_gather_overlap":
            has_meaning = has_meaning and plan.sharding != "none"
        if has_meaning:
            axes[axis.changed_as] = _value(axis, model, plan)
    return axes


def parts_of(model: ModelSpec) -> dict[str, bool]:
    """Return which of the parts required by some axes a model has (`Needs.are_met`)."""
    return {"has_experts": model.moe is not None, "has_latents": model.mla is not None}


def _value(axis: Axis, model: ModelSpec, plan: ParallelPlan) -> Any:
    """Return a plan's value of an axis, including fields that change with it."""
    match axis.name:
        case "recompute":
            return plan.recompute, plan.recompute_modules, plan.recompute_num_layers
        case "etp":
            return WITH_TP if plan.etp == plan.tp else plan.etp
        case "schedule":
            return plan.schedule, plan.vp
        case "layers_per_chunk":
            return (chunk_layers(plan, model.num_layers),)
        case "sharding":
            goes_over_all = plan.dp_replicate == 1 or plan.sharding == "none"
            return plan.sharding, None if goes_over_all else plan.dp_shard
        case name:
            return getattr(plan, name)


def plan_of(problem: Problem, axes: Axes) -> ParallelPlan:
    """Return the plan with these `axes` on all devices, without checking rules; InputError if there is none."""
    model, book, has_experts = problem.model, book_of(problem.framework), problem.model.moe is not None
    tp, cp, pp = (axes[axis] for axis in ("tp", "cp", "pp"))
    sharding, group = axes.get("sharding", (book.words("sharding")[0], None))
    schedule, vp = axes.get("schedule", ("1f1b", 1)) if pp > 1 else ("1f1b", 1)
    recompute, modules, repeated = axes["recompute"]
    etp = axes.get("etp", WITH_TP) if has_experts else WITH_TP
    fits_sp = problem.framework.network.sequence_parallel and problem.training.seq_len // cp % tp == 0
    plain = {"sp": fits_sp, "cp_kind": book.words("cp_kind")[0], "rank_order": problem.framework.rank_orders[0]}
    plain |= problem.framework.choices
    plan = ParallelPlan.derived(
        num_devices=problem.cluster.num_devices,
        **parts_of(model),
        **plain
        | {axis.name: axes[axis.changed_as] for axis in _CHANGEABLE if axis.changed_as in axes}
        | {
            "etp": None if etp == WITH_TP else etp,
            "dp_shard": group,
            "schedule": schedule,
            "vp": vp,
            "layers_per_chunk": _layout(problem, axes.get("layers", ()), pp * vp),
            "sharding": sharding,
            "recompute": recompute,
            "recompute_modules": modules,
            "recompute_num_layers": repeated,
            "precision": problem.training.precision,
        },
    )
    plan = _without_idle(problem, plan, axes)
    check_priced(plan)
    chunk_layers(plan, model.num_layers)
    return plan


def _without_idle(problem: Problem, plan: ParallelPlan, axes: Axes) -> ParallelPlan:
    """Reset flags, a sharding and a share on the host without effect in the plan to their plain values."""
    parts = parts_of(problem.model)
    changes: dict[str, Any] = {
        axis.name: False
        for axis in _CHANGEABLE
        if axis.default is False and getattr(plan, axis.name) and not axis.needs.are_met(plan, **parts)
    }
    if not plan.ep_overlap:
        changes["delay_wgrad"] = False
    if plan.offload != "optimizer":
        changes["offload_percent"] = AXIS["offload_percent"].default
    if plan.offload == "none" and not AXIS["sharding"].needs.are_met(plan, **parts):
        sharding = book_of(problem.framework).words("sharding")[0]
        gathers = sharding != "none" and axes.get("param_gather_overlap", True)
        changes |= {"sharding": sharding, "param_gather_overlap": gathers}
    return replace(plan, **changes) if changes else plan


def _layout(problem: Problem, layouts: tuple[tuple[int, ...], ...], chunks: int) -> tuple[int, ...] | None:
    """Return the first layout with this many chunks, else the framework's own; None if layers are spread evenly."""
    model, split = problem.model, book_of(problem.framework).split
    layers = next((layout for layout in layouts if len(layout) == chunks), None)
    if layers is None and split:
        layers = split(model, chunks)
    return None if layers == even_chunks(model.num_layers, chunks) else layers


def differing(before: Axes, after: Axes) -> tuple[str, ...]:
    """Return the axes in which two plans differ, in the first's order, without layers that follow from chunks."""
    axes = []
    for axis, value in before.items():
        if axis not in after or after[axis] == value:
            continue
        if axis == "layers" and len(value[0]) != len(after[axis][0]):
            continue
        axes.append(axis)
    return tuple(axes)


def mixed(before: Axes, after: Axes, changed: tuple[str, ...]) -> Axes:
    """Return `before` with the `changed` axes of `after`; an axis missing in one is taken from the other."""
    result = {**after, **before, **{axis: after[axis] for axis in changed}}
    if "layers" in before and "layers" in after and "layers" not in changed:
        result["layers"] = (*before["layers"], *after["layers"])
    return result


def words(axis: str, value: Any) -> str:
    """Return the value of an axis for display."""
    if axis == "nodes":
        return "as listed" if value is None else " ".join(value)
    if axis == "sharding":
        kind, group = value
        return f"{kind} over {group}" if group else str(kind)
    if axis == "schedule":
        name, chunks = value
        return f"{name} {chunks}" if name == "interleaved" else str(name)
    if axis == "recompute":
        kind, modules, repeated = value
        if repeated is not None:
            return f"{kind} of {repeated} a chunk"
        return "+".join(modules) if kind == "selective" and modules != ("core_attn",) else str(kind)
    if axis == "layers":
        return repetitions(value[0])
    return shown(value)
