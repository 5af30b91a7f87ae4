"""Command `autoplan schema`: prints schemas of the files that autoplan reads and writes, and of its JSON output."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan import api
from autoplan.cli.complete import words

KINDS = api.schemas.KINDS


def schema(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help=f"Kind of file: {', '.join(KINDS)}.", autocompletion=words(KINDS)),
    ],
) -> None:
    """Print the JSON Schema of a file, or of the --json output of a command.

    search and estimate print a plan (mixed-plan on a mixed cluster).
    """
    import json

    typer.echo(json.dumps(api.schemas.schema(kind), indent=2))
