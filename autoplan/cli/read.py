"""`autoplan read`: what does a launch file start?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.options import AsOption, SetOption, whole_number

if TYPE_CHECKING:
    from autoplan.frameworks.common.launch import Given


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
    seq_len: Annotated[int | None, whole_number("--seq-len", "TOKENS", "Sequence length.")] = None,
    variables: SetOption = None,
    target: AsOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
) -> None:
    """Read a launch file into model, training and plan, and list what was not understood.

    Nothing in the file is run.
    """
    from autoplan.frameworks.launch_files import read_launch

    launch = read_launch(file, make_given(model, devices, devices_per_node, seq_len, variables), target)
    if json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(launch), indent=2).decode())
    else:
        from autoplan.report.launch_file import print_launch
        from autoplan.report.terminal import make_console

        unread: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
        for one in launch.unread:
            unread[one.matters].append((one.option, one.value, one.why))
        headline = f"{file}: a file of {launch.target}, priced as {launch.framework}"
        spec = (launch.model, launch.training, launch.plan)
        print_launch(make_console(), headline, spec, matters=unread[True], rest=unread[False])


def make_given(
    model: str | None,
    devices: int | None,
    devices_per_node: int | None,
    seq_len: int | None,
    variables: list[str] | None,
) -> Given:
    """What the flags say beside a launch file."""
    import re

    from autoplan.base.errors import InputError
    from autoplan.base.units import check_count
    from autoplan.frameworks.common.launch import Given
    from autoplan.read.model import load_model

    for flag, value in (("--devices", devices), ("--devices-per-node", devices_per_node), ("--seq-len", seq_len)):
        if value is not None:
            check_count(flag, value, most=10**8)
    pairs = []
    for text in variables or []:
        name, sign, value_of = text.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(f"--set {text[:60]!r}: write NAME=VALUE with the name of a variable of the shell")
        pairs.append((name, value_of))
    return Given(
        model=load_model(model) if model is not None else None,
        num_devices=devices,
        devices_per_node=devices_per_node,
        seq_len=seq_len,
        variables=tuple(pairs),
    )
