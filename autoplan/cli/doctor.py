"""Command `autoplan doctor`: says what is installed, visible and reachable, and what mends what is not."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan import api
from autoplan.base.files import encode
from autoplan.cli.inputs import whole_url
from autoplan.cli.options import DbOption


def doctor(
    context: typer.Context,
    url: DbOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a list.")] = False,
) -> None:
    """Check what is installed, visible and reachable: libraries, devices, database, Slurm, frameworks.

    It changes nothing and shows no passwords.  Every problem comes with its remedy and does not count as a failure.
    """
    checkup = api.doctor.check_up(whole_url(context, url))
    if json:
        typer.echo(encode(checkup), nl=False)
        return
    from rich.markup import escape

    from autoplan.report.terminal import labelled, make_console, print_part

    styles = {"ok": "green", "absent": "dim", "problem": "bold red"}
    console = make_console()
    grid = labelled(columns=3)
    for check in checkup.checks:
        grid.add_row(check.part, f"[{styles[check.state]}]{check.state}[/]", escape(check.says))
        if check.remedy:
            grid.add_row("", "", f"[bold]-> {escape(check.remedy)}[/]")
    print_part(console, grid)
    problems = checkup.num_problems
    console.print(f"\n{problems} problem{'s' * (problems != 1)}" if problems else "\nno problems")
