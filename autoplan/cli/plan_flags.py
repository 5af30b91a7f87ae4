"""Flags that say a plan, one for each row of the table of axes that has one, and the plan that they say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.base.errors import InputError
from autoplan.cli.options import whole_number
from autoplan.spec.axes import AXES, Axis, Kind, shown

if TYPE_CHECKING:
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.problem import Problem


def plan_flags(after: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what gives a command the flags of a plan in place of its `**axes`, behind the parameter `after`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        place = [one.name for one in parameters].index(after) + 1
        parameters[place:place] = [_parameter(axis) for axis in AXES if axis.spelled]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(axis: Axis) -> inspect.Parameter:
    default = axis.default if axis.flag_default is ... else axis.flag_default
    kind: Any = str
    option = typer.Option(axis.spelled, metavar=axis.metavar, help=axis.help)
    if axis.kind is Kind.COUNT:
        kind, option = int, whole_number(axis.spelled, axis.metavar or "N", axis.help)
    elif axis.kind is Kind.FLAG:
        kind = bool
    elif default is not None:
        default = shown(default)
    type_: Any = kind if default is not None else kind | None
    annotation = Annotated[type_, option]
    return inspect.Parameter(axis.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def plan_of_flags(problem: Problem, typed: Mapping[str, Any]) -> ParallelPlan:
    """Return the plan on the whole cluster: data parallelism takes what the other degrees leave of it."""
    from autoplan.base.files import decode
    from autoplan.frameworks.registry import book_of
    from autoplan.spec.plan import ParallelPlan, derived_values, parse_recompute

    split = book_of(problem.framework).split
    layers = _layers(typed["layers_per_chunk"])
    values = {
        **typed,
        **parse_recompute(typed["recompute"]),
        "layers_per_chunk": layers or (split(problem.model, typed["pp"] * typed["vp"]) if split else None),
        "placement": typed["placement"].split(",") if typed["placement"] else None,
        "sp": typed["sp"] and problem.framework.network.sequence_parallel,
        "precision": problem.training.precision,
    }
    table = derived_values(
        num_devices=problem.cluster.num_devices,
        has_experts=problem.model.moe is not None,
        hint=": change one degree or the size of the cluster",
        **values,
    )
    return decode(ParallelPlan, table, "plan")


def _layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise InputError(f"--layers {text!r}: write the layers of every chunk, such as 19,21,21,19")
    return [int(part) for part in parts]
