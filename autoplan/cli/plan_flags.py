"""Flags that say a plan, one for each row of the table of axes that has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from autoplan.cli.options import whole_number
from autoplan.spec.axes import AXES, Axis, Kind, shown


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
