"""Flags that commands share, put into their signatures: those of a problem, a run, a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from autoplan.cli import objectives, options
from autoplan.spec.axes import AXES, Axis, Kind, shown

Command = Callable[..., None]
# By the name of its parameter, a flag and its default.  What is typed is read by `inputs`, not by the command.
SHARED: dict[str, tuple[Any, Any]] = {
    "precision": (options.PrecisionOption, "bf16"),
    "attention": (options.AttentionOption, "flash"),
    "framework": (options.FrameworkOption, "megatron-core"),
    "calibration": (options.CalibrationOption, None),
    "timings": (options.TimingsOption, None),
    "url": (options.DbOption, None),
    "reserve_memory": (options.ReserveOption, "0"),
    "objective": (objectives.ObjectiveOption, None),
    "nodes": (objectives.NodesOption, None),
    "max_nodes": (objectives.MaxNodesOption, None),
    "tokens": (objectives.TokensOption, None),
    "deadline": (objectives.DeadlineOption, None),
    "gpu_hours": (objectives.GpuHoursOption, None),
    "price": (objectives.PriceOption, None),
    "device_mtbf": (objectives.DeviceMtbfOption, None),
    "checkpoint_time": (objectives.CheckpointOption, None),
    "restart_time": (objectives.RestartOption, None),
    "pue": (objectives.PueOption, None),
}
_names = tuple(SHARED)
PROBLEM = _names[: _names.index("objective")]
RUN = _names[_names.index("objective") :]


def shared_flags(names: Iterable[str], *, after: str) -> Callable[[Command], Command]:
    """Return what gives a command flags of `SHARED` in place of its keyword arguments, behind the parameter `after`."""
    added = []
    for name in names:
        annotation, default = SHARED[name]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        added.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return _adding(added, after)


def plan_flags(*, after: str) -> Callable[[Command], Command]:
    """Return what gives a command the flags of a plan, one for each row of the table of axes that has one."""
    return _adding([_parameter(axis) for axis in AXES if axis.spelled], after)


def _adding(added: Iterable[inspect.Parameter], after: str) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [known for known in signature.parameters.values() if known.kind is not known.VAR_KEYWORD]
        place = [known.name for known in parameters].index(after) + 1
        parameters[place:place] = added
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(axis: Axis) -> inspect.Parameter:
    default = axis.default if axis.flag_default is ... else axis.flag_default
    kind: Any = str
    option = typer.Option(axis.spelled, metavar=axis.metavar, help=axis.help)
    if axis.kind is Kind.COUNT:
        kind, option = int, options.whole_number(axis.spelled, axis.metavar or "N", axis.help)
    elif axis.kind is Kind.FLAG:
        kind = bool
    elif default is not None:
        default = shown(default)
    type_: Any = kind if default is not None else kind | None
    annotation = Annotated[type_, option]
    return inspect.Parameter(axis.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
