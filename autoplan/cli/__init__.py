"""What can be typed?  The `autoplan` command: every subcommand in a file of its own, loaded when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autoplan import __version__
from autoplan.cli.calibrate import calibrate
from autoplan.cli.compare import compare
from autoplan.cli.db import db
from autoplan.cli.discover import discover
from autoplan.cli.estimate import estimate
from autoplan.cli.export import export
from autoplan.cli.predict import predict
from autoplan.cli.profile import profile
from autoplan.cli.read import read
from autoplan.cli.schema import schema
from autoplan.cli.score import score
from autoplan.cli.search import search
from autoplan.cli.topo import topo
from autoplan.errors import AutoplanError
from autoplan.urls import redact_arguments

app = typer.Typer(
    help="Chooses how to train a large model on a cluster: the fastest parallel configuration that fits.",
    epilog="Example: autoplan search llama3-70b --cluster h100-sxm:16x8 --global-batch 512 --seq-len 8192",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(no_args_is_help=True)(search)
app.command(no_args_is_help=True)(estimate)
app.command(no_args_is_help=True)(compare)
app.command(no_args_is_help=True)(export)
app.command(no_args_is_help=True)(read)
app.command(no_args_is_help=True)(predict)
app.command(no_args_is_help=True)(score)
app.command(no_args_is_help=True)(calibrate)
app.command()(discover)
app.command(no_args_is_help=True)(profile)
app.command(no_args_is_help=True)(topo)
app.command(no_args_is_help=True)(schema)
app.add_typer(db, name="db")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"autoplan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line: a user's error is one line on stderr and exit 1, any other is a bug with its traceback."""
    try:
        arguments, whole_urls = redact_arguments(sys.argv[1:])
        app(arguments, prog_name="autoplan", obj=whole_urls)
    except AutoplanError as error:
        sys.stdout.flush()
        print(f"autoplan: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
