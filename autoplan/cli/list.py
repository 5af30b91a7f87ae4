"""Command `autoplan list`: the names of built-in presets."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from autoplan import api, report
from autoplan.cli.complete import words

KINDS = ("models", "clusters", "devices", "frameworks", "targets")


def list(  # named as the command is
    kind: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="What to list.", autocompletion=words(KINDS))],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the built-in models, clusters, devices, frameworks or export targets."""
    listed = api.listing.known(kind)
    if json:
        typer.echo(json_module.dumps([*listed], indent=2))
        return
    columns = [(name, name in api.listing.NUMBERS) for name in listed.columns]
    rows = [[str(cell) for cell in row] for row in listed.rows]
    report.terminal.print_table(report.terminal.make_console(), columns, rows)
