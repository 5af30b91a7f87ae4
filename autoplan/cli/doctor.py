"""Command `autoplan doctor`: says what is installed, visible and reachable, and what mends what is not."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan import api
from autoplan.base.files import encode
from autoplan.base.units import counted
from autoplan.cli.inputs import url_with_password
from autoplan.cli.options import DbOption


def doctor(
    context: typer.Context,
    url: DbOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a list.")] = False,
) -> None:
    """Check what is installed, visible and reachable: libraries, devices, database, Slurm, frameworks.

    It changes nothing and shows no passwords.  Every problem comes with its remedy and does not count as a failure.
    """
    checkup = api.doctor.check_up(url_with_password(context, url))
    if json:
        typer.echo(encode(checkup), nl=False)
        return
    from rich.text import Text

    from autoplan.report.terminal import Cell, bold, make_console, print_lines

    styles = {"ok": "green", "absent": "dim", "problem": "bold red"}
    console = make_console()
    lines: list[tuple[Cell, ...]] = []
    for check in checkup.checks:
        lines.append((check.part, Text(check.state, style=styles[check.state]), check.says))
        if check.remedy:
            lines.append(("", "", bold(f"-> {check.remedy}")))
    print_lines(console, lines)
    problems = checkup.num_problems
    console.print(f"\n{counted(problems, 'problem')}" if problems else "\nno problems")
