"""Input of commands: typed flags, database URLs with passwords, and outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from autoplan.base.errors import InputError
from autoplan.base.files import check_target, refused_writes
from autoplan.cli.flags import PROBLEM, RUN

if TYPE_CHECKING:
    from autoplan.api.options import ProblemOptions
    from autoplan.api.training_run import RunOptions


def url_with_password(context: typer.Context, url: str | None) -> str | None:
    """Return the database URL as typed, as `main` removes passwords from arguments before parsing."""
    urls: dict[str, str] = context.obj or {}
    return urls.get(url, url) if url else None


def is_typed(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_options(context: typer.Context, names: Collection[str]) -> dict[str, Any]:
    """Return the values of those parameters given on the command line; others are left to the API."""
    return {name: context.params[name] for name in names if name in context.params and is_typed(context, name)}


def problem_options(context: typer.Context) -> ProblemOptions:
    """Return the typed options of a problem besides model, cluster and sequence length."""
    typed = typed_options(context, PROBLEM)
    typed["db"] = url_with_password(context, typed.pop("url", None))
    return cast("ProblemOptions", typed)


def run_options(context: typer.Context) -> RunOptions:
    """Return the typed options of a run to plan for."""
    typed = typed_options(context, RUN)
    if (objectives := typed.pop("objective", None)) is not None:
        typed["objectives"] = objectives
    if (max_nodes := typed.pop("max_nodes", None)) is not None:
        if "nodes" in typed:
            raise InputError("--nodes and --max-nodes set the same limit: leave one of them out")
        typed["nodes"] = f"1:{max_nodes}"
    return cast("RunOptions", typed)


def check_untyped(
    context: typer.Context, names: Collection[str], why: str, *, or_else: str = ", or give a model instead of the file"
) -> None:
    """Raise InputError for parameters that a given file already defines, as they would be ignored."""
    parameters = [
        parameter
        for parameter in context.command.params
        if parameter.name and parameter.name in names and is_typed(context, parameter.name)
    ]
    if parameters:
        flags = ", ".join(
            parameter.opts[0] if parameter.param_type_name == "option" else parameter.human_readable_name
            for parameter in parameters
        )
        raise InputError(f"{why}, without {flags}: leave them out{or_else}")


def check_outputs(*paths: Path | None, force: bool) -> None:
    """Raise InputError, before any work, for outputs that exist or cannot be written."""
    for path in paths:
        if path is not None:
            check_output(path, force=force)


def check_output(path: Path, *, force: bool) -> None:
    """Raise InputError, before any work, for an output that exists or a folder that cannot be written."""
    check_target(path, force=force)
    with refused_writes(path), tempfile.TemporaryFile(dir=path.resolve().parent):
        pass
