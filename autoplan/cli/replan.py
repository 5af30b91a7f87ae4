"""Command `autoplan replan`: the best plan on what is left of a cluster that lost nodes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

import autoplan
from autoplan import api, report
from autoplan.base.urls import command_line
from autoplan.base.values import parse_amount
from autoplan.cli.flags import shared_flags
from autoplan.cli.inputs import check_outputs, run_options, url_with_password
from autoplan.cli.options import DbOption, ForceOption, QuietOption, whole_number
from autoplan.cli.progress import progress_bar
from autoplan.cli.remarks import print_warnings, print_written


@shared_flags(("device_mtbf", "checkpoint_time"), after="checkpoint_rate")
def replan(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan.json from before.")],
    num_nodes: Annotated[
        int | None, whole_number("--nodes", "N", "Number of nodes left, if the cluster file does not name them.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODE[,...]",
            help="Names of the lost nodes, or PART:N for N nodes of a part of a mixed cluster (repeatable).",
        ),
    ] = None,
    num_devices: Annotated[
        int | None, whole_number("--gpus", "N", "Number of devices left: whole nodes, or a part of one.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of losses: a run of the plan of a mixed cluster, for the speeds of its parts.",
        ),
    ] = None,
    checkpoint_rate: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-gbytes-per-s",
            metavar="GB/S",
            help="Rate at which all ranks together read and write checkpoints; determines the checkpoint interval.",
        ),
    ] = None,
    url: DbOption = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="New plan file.")] = Path("replan.json"),
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    quiet: QuietOption = False,
    **_: Any,
) -> None:
    """Find the best plan on the rest of a cluster, with the same batch, and the cost of switching to it."""
    check_outputs(out, force=force)
    storage_bytes_per_s = (
        None
        if checkpoint_rate is None
        else parse_amount(checkpoint_rate, "--checkpoint-gbytes-per-s", "checkpoint_bytes_per_s", 1e9)
    )
    run = run_options(context)
    run.pop("nodes", None)
    with progress_bar(quiet=quiet, doing="searching", unit="sizes") as advance:
        result = autoplan.replan(
            plan,
            nodes=num_nodes,
            without=[name.strip() for names in without or () for name in names.split(",") if name.strip()],
            devices=num_devices,
            measured=measured,
            storage_bytes_per_s=storage_bytes_per_s,
            run=run,
            db=url_with_password(context, url),
            progress=advance,
        )
    result.plan.with_command(command_line()).save(out, force=force)
    if json:
        typer.echo(result.to_json(), nl=False)
    else:
        console = report.terminal.make_console()
        report.replan.print_replan(console, result.summary)
        why = ("why", f"autoplan explain {shlex.quote(str(out))}")
        report.terminal.print_next_steps(console, api.export.next_step(result.plan.file, out), why)
    print_warnings(result.plan.warnings, quiet=quiet)
    print_written(out, quiet=quiet)
