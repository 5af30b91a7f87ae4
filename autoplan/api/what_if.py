"""Interactive changes to a plan: the available controls, the new price, and the page that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from autoplan.api.estimate import make_plan, price
from autoplan.api.page import shown_content
from autoplan.api.plan_result import PlanResult
from autoplan.api.training_run import resized
from autoplan.base.errors import InputError
from autoplan.base.units import format_bytes, format_seconds
from autoplan.base.values import parse_count
from autoplan.frameworks.registry import book_of
from autoplan.report.page.content import Control
from autoplan.report.page.page import page, parts
from autoplan.spec.axes import AXES, AXIS, DEFAULT_RECOMPUTE_MODULES, shown
from autoplan.spec.axis import Axis, Kind
from autoplan.spec.enums import Recompute
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

# Beside the axes of a plan: what it is for.
SIZES = {
    "nodes": ("nodes", "Nodes of the cluster."),
    "global_batch": ("global batch", "Sequences per step."),
    "seq_len": ("sequence length", "Tokens per sequence."),
}
FIRST_CHOICES = ("sharding", "recompute", "schedule")  # which people change as often as degrees
MAX_NODES = 100_000
# Flags that follow from others unless they are changed by hand: plans keep theirs.
CARRIED = tuple(axis.name for axis in AXES if axis.kind is Kind.FLAG and not axis.spelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Values whose price a page requests, and those of the plans pinned on it, as texts by name."""

    values: dict[str, str]
    pinned: tuple[dict[str, str], ...] = ()


def controls_of(start: PlanResult) -> tuple[Control, ...]:
    """Return the controls that change a plan, set to its values."""
    problem, plan = start.problem, start.plan
    sizes_now = (problem.cluster.num_nodes, plan.global_batch, problem.training.seq_len)
    sizes = [
        Control(name=name, label=label, value=str(value), help=text)
        for (name, (label, text)), value in zip(SIZES.items(), sizes_now, strict=True)
    ]
    controls = (*sizes, *(control for axis in AXES if (control := _control(axis, problem, plan))))
    # An axis that follows from others is left to them where that makes the same plan.
    values = {control.name: control.value for control in controls}
    for axis in AXES:
        if axis.name in values and _follows(axis) and _plan(start, problem, values | {axis.name: ""}) == plan:
            values[axis.name] = ""
    return tuple(replace(control, value=values[control.name]) for control in controls)


def _control(axis: Axis, problem: Problem, plan: ParallelPlan) -> Control | None:
    """Return the control of an axis; None where the framework or the model leaves no choice."""
    model, book = problem.model, book_of(problem.framework)
    has = {"has_experts": model.moe is not None, "has_latents": model.mla is not None}
    if not axis.spelled or axis.name == "placement" or not axis.needs.can_be_met(**has):
        return None
    value = _text(axis, plan)
    if not axis.needs.are_met(plan, **has):  # as it is where other degrees give the axis a meaning
        usual = "" if _follows(axis) else shown(_usual(axis, problem))
        value = usual if axis.kind is not Kind.WORD or usual in ("", *book.words(axis.name)) else value
    choices: tuple[str, ...] = ()
    if axis.kind is Kind.FLAG:
        choices = tuple(shown(flag) for flag in (False, True) if shown(flag) == value or book.offers(axis, flag))
    elif axis.name == "recompute":
        choices = tuple(dict.fromkeys((*Recompute, value)))
    elif axis.kind is Kind.WORD:
        choices = tuple(word for word in book.words(axis.name) if word == value or book.offers(axis, axis.word(word)))
        choices = ("", *choices) if _follows(axis) else choices
    if axis.kind in (Kind.FLAG, Kind.WORD) and len(choices) < 2:
        return None
    return Control(
        name=axis.name,
        label=axis.label or axis.name.replace("_", " "),
        value=value,
        choices=choices,
        help=axis.help,
        is_option=bool(choices) and axis.name not in FIRST_CHOICES,
    )


def _follows(axis: Axis) -> bool:
    """Return whether an axis that is not given follows from the others."""
    return (axis.flag_default is None and not axis.offered_by) or axis.kind is Kind.LIST


def _usual(axis: Axis, problem: Problem) -> object:
    """Return the value of an axis in plans that leave it out."""
    return problem.framework.choice(axis.name) if axis.offered_by or axis.flag_default is ... else axis.flag_default


def _text(axis: Axis, plan: ParallelPlan) -> str:
    """Return the value of an axis as a user types it."""
    value = getattr(plan, axis.name)
    if axis.name == "layers_per_chunk":
        return "" if value is None else ",".join(map(str, value))
    if axis.name == "recompute" and plan.recompute_num_layers is not None:
        return f"full:{plan.recompute_num_layers}"
    if axis.name == "recompute" and plan.recompute_modules != DEFAULT_RECOMPUTE_MODULES:
        return "+".join(plan.recompute_modules)
    return shown(value)


# -- changed values ---------------------------------------------------------------------------------------------------


def changed(start: PlanResult, values: Mapping[str, str]) -> PlanResult:
    """Return the price of a plan with these values, or `start` if they are its own; raises like `estimate`."""
    if unknown := values.keys() - {control.name for control in controls_of(start)}:
        raise InputError(f"{min(unknown)} cannot be changed here: leave it out")
    problem, nodes = start.problem, _count(values, "nodes")
    seq_len = _count(values, "seq_len")
    if nodes > MAX_NODES:
        raise InputError(f"nodes {nodes:,}: must be at most {MAX_NODES:,}")
    if nodes != problem.cluster.num_nodes:
        problem = resized(problem, nodes)
    if seq_len != problem.training.seq_len:
        problem = replace(problem, training=replace(problem.training, seq_len=seq_len))
    plan = _plan(start, problem, values)
    if problem is start.problem and plan == start.plan:
        return start
    return price(problem, plan, timings=start.file.timings)


def _count(values: Mapping[str, str], name: str) -> int:
    count = parse_count(values.get(name, ""), SIZES[name][0])
    if count < 1:
        raise InputError(f"{SIZES[name][0]} {count}: must be at least 1")
    return count


def _plan(start: PlanResult, problem: Problem, values: Mapping[str, str]) -> ParallelPlan:
    """Return the plan with these values; options without a control keep their values in the initial plan."""
    axis_values = {
        name: text if AXIS[name].kind is Kind.LIST or name == "recompute" else AXIS[name].parse(text, "the value")
        for name, text in values.items()
        if name not in SIZES and text.strip()
    }
    for axis in AXES:  # of which no control leaves a choice
        if axis.spelled and axis.kind in (Kind.FLAG, Kind.WORD) and axis.name not in values:
            axis_values[axis.name] = getattr(start.plan, axis.name)
    layers = start.plan.layers_per_chunk
    if layers and values.get("layers_per_chunk") == _text(AXIS["layers_per_chunk"], start.plan):
        degrees = (axis_values.get(name, getattr(start.plan, name)) for name in ("pp", "vp"))
        if prod(map(int, degrees)) != len(layers):
            del axis_values["layers_per_chunk"]  # of the other number of chunks that the plan had
    plan = make_plan(problem, _count(values, "global_batch"), axis_values)
    carried = {name: getattr(start.plan, name) for name in CARRIED}
    carried["param_gather_overlap"] &= plan.sharding != "none"
    if problem.cluster == start.problem.cluster:
        carried["placement"] = start.plan.placement
    return replace(plan, **carried)


# -- the page ---------------------------------------------------------------------------------------------------------


def live_page(start: PlanResult) -> str:
    """Return the page of a plan with controls, which a server has to answer."""
    return page(shown_content(start, controls=controls_of(start)))


def moved(start: PlanResult, changes: Changes) -> tuple[str, dict[str, str]]:
    """Return the parts of the page for changed values: a sentence about the change, and the sections by name."""
    result, pinned = changed(start, changes.values), _pinned(start, changes.pinned)
    return _sentence(result, start), dict(parts(shown_content(result, controls=controls_of(start), pinned=pinned)))


def pinned_page(start: PlanResult, changes: Changes) -> str:
    """Return a page without controls that loads nothing: the plan of the changed values, and those that are pinned."""
    return page(shown_content(changed(start, changes.values), pinned=_pinned(start, changes.pinned)))


def _pinned(start: PlanResult, pinned: Iterable[Mapping[str, str]]) -> tuple[PlanResult, ...]:
    return tuple(changed(start, values) for values in pinned)


def _sentence(result: PlanResult, start: PlanResult) -> str:
    best = result.best
    faster = best.tokens_per_s_per_device / start.best.tokens_per_s_per_device - 1.0
    memory = f"{format_bytes(best.memory_bytes)} of {format_bytes(result.file.capacity_bytes)}"
    fit = {"fits": "", "risky": ", which may run out", "oom": ", which does not fit"}[best.verdict]
    return (
        f"{format_seconds(best.step_s)} per step ({format_seconds(best.low_s)} to {format_seconds(best.high_s)}), "
        f"{best.tokens_per_s_per_device:,.0f} tokens/s per device ({100 * faster:+.1f} % compared with the plan file), "
        f"{memory}{fit}"
    )
