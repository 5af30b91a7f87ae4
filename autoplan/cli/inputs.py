"""What the parser knows of flags: which ones were typed, database URLs with their passwords, where answers go."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from autoplan.base.errors import InputError

if TYPE_CHECKING:
    from autoplan.api.problem import ProblemOptions

# The flags of a problem that have a default, by the names of their parameters; what was not typed is left to the API.
PROBLEM_FLAGS = ("precision", "attention", "framework", "calibration", "timings", "reserve_memory")


def whole_url(context: typer.Context, url: str | None) -> str | None:
    """The database URL as it was typed: `main` lets every argument be parsed without the password in it."""
    whole: dict[str, str] = context.obj or {}
    return whole.get(url, url) if url else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """The flags of a search that say where its answer goes, as typed."""

    out: Path
    page: Path | None
    force: bool
    json: bool
    quiet: bool

    def check(self) -> None:
        """Refuse, before any work, files that exist or cannot be written."""
        for path in (self.out, self.page):
            if path is not None:
                check_output(path, force=self.force)


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def problem_options(context: typer.Context) -> ProblemOptions:
    """Return what was typed of a problem beside model, cluster and sequence length."""
    typed: dict[str, Any] = {name: context.params[name] for name in PROBLEM_FLAGS if is_typed(context, name)}
    return cast("ProblemOptions", typed | {"db": whole_url(context, context.params.get("url"))})


def check_untyped(context: typer.Context, said: Collection[str], says: str) -> None:
    """Refuse parameters on the command line that a file beside them says: they would be ignored."""
    typed = [one for one in context.command.params if one.name and one.name in said and is_typed(context, one.name)]
    if typed:
        flags = ", ".join(one.opts[0] if one.param_type_name == "option" else one.human_readable_name for one in typed)
        raise InputError(f"{says}, without {flags}: leave them out, or give a model in place of the file")


def check_output(path: Path, *, force: bool) -> None:
    """Refuse, before any work, an output that exists or a folder that cannot be written."""
    from autoplan.base.files import check_target

    check_target(path, force=force)
    try:
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
