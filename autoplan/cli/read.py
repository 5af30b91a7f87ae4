"""Command `autoplan read`: shows what a launch file starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import autoplan
from autoplan import report
from autoplan.cli.options import AsOption, SetOption, whole_number


def read(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A script or configuration that starts training today, of any target of export."
        ),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="As for search, in place of what the file says.")
    ] = None,
    devices: Annotated[int | None, whole_number("--devices", "N", "On which it runs, all together.")] = None,
    devices_per_node: Annotated[int | None, whole_number("--devices-per-node", "N", "Of them, in one node.")] = None,
    seq_len: Annotated[int | None, whole_number("--seq-len", "TOKENS", "Sequence length; 8k is 8,192.")] = None,
    variables: SetOption = None,
    target: AsOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
) -> None:
    """Read a launch file into model, training and plan, and list what was not understood.

    Nothing in the file is run.
    """
    found = autoplan.read(
        file,
        model=model,
        devices=devices,
        devices_per_node=devices_per_node,
        seq_len=seq_len,
        variables=variables or (),
        target=target,
    )
    if json:
        typer.echo(found.to_json(), nl=False)
        return
    unread: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    for option in found.launch.unread:
        unread[option.matters].append((option.option, option.value, option.why))
    spec = (found.launch.model, found.launch.training, found.launch.plan)
    console = report.terminal.make_console()
    report.launch_file.print_launch(console, found.headline, spec, matters=unread[True], rest=unread[False])
