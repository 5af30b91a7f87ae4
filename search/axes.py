"""Which axes make a plan, so that one of them can change alone?

The data-parallel degree is what the others leave of the devices.  A plan does not tell an axis that means nothing in
it, such as how stages are interleaved where there is one: where such an axis comes to mean something it has the value
of the other plan, or a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.rulebooks import book_of
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, check_priced, chunk_layers, even_chunks
from autoplan.spec.problem import Problem

Axes = Mapping[str, Any]

WITH_TP = "tp"  # value of etp: whatever tp is
FLAGS = ("sp", "tp_overlap", "ep_overlap", "grad_reduce_overlap", "param_gather_overlap")
# How axes are called on screen.
NAMES = {
    "global_batch": "global batch",
    "micro_batch": "micro-batch",
    "sp": "sequence parallelism",
    "cp_kind": "kind of context parallelism",
    "layers": "layers of the chunks",
    "rank_order": "order of the ranks",
    "nodes": "order of the nodes",
    "tp_overlap": "overlap of tensor-parallel traffic",
    "ep_overlap": "overlap of expert traffic",
    "grad_reduce_overlap": "overlap of the gradient reduction",
    "param_gather_overlap": "overlap of the parameter gather",
}


def axes_of(model: ModelSpec, plan: ParallelPlan) -> dict[str, Any]:
    """What `plan` says of every axis that means something in it.

    `sharding` is (kind, ranks it goes over; None: all), `schedule` (name, chunks of a rank), `layers` holds the layouts
    that may be meant: the first one with as many chunks as the plan has.
    """
    has_copies = _has_copies(model, plan.tp, plan.cp, plan.dp, plan.ep * plan.etp)
    axes: dict[str, Any] = {name: getattr(plan, name) for name in ("tp", "cp", "pp", "micro_batch")}
    axes["global_batch"] = plan.global_batch
    axes["recompute"] = (plan.recompute, plan.recompute_modules, plan.recompute_num_layers)
    axes["offload"] = plan.offload
    axes["nodes"] = plan.placement
    if model.moe:
        axes["ep"] = plan.ep
        if plan.tp > 1 or plan.etp > 1:
            axes["etp"] = WITH_TP if plan.etp == plan.tp else plan.etp
        if plan.ep > 1:
            axes["ep_overlap"] = plan.ep_overlap
    if plan.tp > 1:
        axes |= {"sp": plan.sp, "tp_overlap": plan.tp_overlap}
    if plan.cp > 1:
        axes["cp_kind"] = plan.cp_kind
    if plan.pp > 1:
        axes |= {"schedule": (plan.schedule, plan.vp), "layers": (chunk_layers(plan, model.num_layers),)}
        if plan.dp > 1:
            axes["rank_order"] = plan.rank_order
    if has_copies or plan.offload != "none":
        whole = plan.dp_replicate == 1 or plan.sharding == "none"
        axes["sharding"] = (plan.sharding, None if whole else plan.dp_shard)
    if has_copies:
        axes["grad_reduce_overlap"] = plan.grad_reduce_overlap
        if plan.sharding != "none":
            axes["param_gather_overlap"] = plan.param_gather_overlap
    return axes


def plan_of(problem: Problem, axes: Axes) -> ParallelPlan:
    """The plan that `axes` make on all devices; an `InputError` says why there is none, rules of frameworks aside."""
    model, book = problem.model, book_of(problem.framework)
    value = dict(axes)
    degrees = {axis: value[axis] for axis in ("tp", "cp", "pp")}
    tp, cp, pp = degrees.values()
    dp, rest = divmod(problem.cluster.num_devices, math.prod(degrees.values()))
    if rest or not dp:
        shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        raise InputError(f"{shown} does not divide the {problem.cluster.num_devices} devices")
    sharding, group = value.get("sharding", (book.usual_shardings[0], None))
    if group is not None and dp % group:
        raise InputError(f"dp {dp} is no multiple of the {group} ranks that states are sharded over")
    etp = value.get("etp", WITH_TP) if model.moe else 1
    etp = tp if etp == WITH_TP else etp
    if value["offload"] == "none" and not _has_copies(model, tp, cp, dp, value.get("ep", 1) * etp):
        sharding, group = book.usual_shardings[0], None  # means nothing: the plain one
    schedule, vp = value.get("schedule", ("1f1b", 1)) if pp > 1 else ("1f1b", 1)
    recompute, modules, repeated = value["recompute"]
    fits_sp = problem.framework.network.sequence_parallel and problem.training.seq_len // cp % tp == 0
    table = {
        **degrees,
        "micro_batch": value["micro_batch"],
        "global_batch": value["global_batch"],
        "ep": value.get("ep", 1),
        "etp": etp,
        "dp_shard": group or dp,
        "dp_replicate": dp // (group or dp),
        "sp": tp > 1 and bool(value.get("sp", fits_sp)),
        "cp_kind": value.get("cp_kind", book.words("cp_kind")[0]),
        "schedule": schedule,
        "vp": vp,
        "layers_per_chunk": _layout(problem, value.get("layers", ()), pp * vp),
        "sharding": sharding,
        "recompute": recompute,
        "recompute_modules": modules,
        "recompute_num_layers": repeated,
        "precision": problem.training.precision,
        "offload": value["offload"],
        "tp_overlap": tp > 1 and bool(value.get("tp_overlap", False)),
        "ep_overlap": bool(value.get("ep_overlap", False)) and value.get("ep", 1) != 1,
        "grad_reduce_overlap": bool(value.get("grad_reduce_overlap", True)),
        "param_gather_overlap": sharding != "none" and bool(value.get("param_gather_overlap", True)),
        "rank_order": value.get("rank_order", problem.framework.rank_orders[0]),
        "placement": value.get("nodes"),
    }
    plan = ParallelPlan(**table)
    check_priced(plan)
    chunk_layers(plan, model.num_layers)
    return plan


def _has_copies(model: ModelSpec, tp: int, cp: int, dp: int, expert_ranks: int) -> bool:
    """Whether some parameters are held by several ranks, which may share their states."""
    return dp * cp > 1 or (model.moe is not None and tp > expert_ranks)


def _layout(problem: Problem, layouts: tuple[tuple[int, ...], ...], chunks: int) -> tuple[int, ...] | None:
    """The first layout of so many chunks, else the framework's own; None where layers are spread evenly."""
    model, split = problem.model, book_of(problem.framework).split
    layers = next((layout for layout in layouts if len(layout) == chunks), None)
    if layers is None and split:
        layers = split(model, chunks)
    return None if layers == even_chunks(model.num_layers, chunks) else layers


def differing(before: Axes, after: Axes) -> tuple[str, ...]:
    """The axes in which two plans differ, in the order in which the first tells them.

    Layers of other numbers of chunks do not differ by themselves: they follow those numbers.
    """
    axes = []
    for axis, value in before.items():
        if axis not in after or after[axis] == value:
            continue
        if axis == "layers" and len(value[0]) != len(after[axis][0]):
            continue
        axes.append(axis)
    return tuple(axes)


def mixed(before: Axes, after: Axes, changed: tuple[str, ...]) -> Axes:
    """`before` with the `changed` axes of `after`; what one of both does not tell is as in the other."""
    result = {**after, **before, **{axis: after[axis] for axis in changed}}
    if "layers" in before and "layers" in after and "layers" not in changed:
        result["layers"] = (*before["layers"], *after["layers"])
    return result


def words(axis: str, value: Any) -> str:
    """The value of an axis as a person reads it."""
    if isinstance(value, bool):
        return "on" if value else "off"
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
        return "+".join(modules) if kind == "selective" else str(kind)
    if axis == "layers":
        counts = [(count, len(list(same))) for count, same in groupby(value[0])]
        return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in counts)
    return str(value)
