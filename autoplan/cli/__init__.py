"""Command line `autoplan`: every subcommand has its own file, loaded when it runs."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from autoplan.base.errors import AutoplanError
from autoplan.base.urls import redact_arguments
from autoplan.base.version import __version__
from autoplan.cli.process import Terminated
from autoplan.cli.remarks import shown_warnings

# In the order of the help: each is a function, or an app, in the module of the same name.
COMMANDS = (
    "search",
    "estimate",
    "explain",
    "compare",
    "replan",
    "report",
    "export",
    "read",
    "predict",
    "score",
    "calibrate",
    "list",
    "new",
    "discover",
    "profile",
    "topo",
    "run",
    "tune",
    "schema",
    "doctor",
    "db",
)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a full file system behind standard output
WITHOUT_ARGUMENTS = ("discover", "doctor")  # useful without arguments


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"autoplan {__version__}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    context.with_resource(shown_warnings())


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the command line with these commands."""
    app = typer.Typer(
        help="Find the fastest parallel configuration for training a large model on a cluster.",
        epilog="Example: autoplan search llama3-70b --cluster h100-sxm:16x8 --global-batch 512 --seq-len 8192",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in names:
        command = getattr(import_module(f"autoplan.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(no_args_is_help=name not in WITHOUT_ARGUMENTS)(command)
    return app


def _one_line(error: AutoplanError) -> str:
    """Return the message on one line, with control characters escaped so that a terminal does not obey them."""
    text = " ".join(str(error).split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _interrupted() -> int:
    print("autoplan: interrupted: files are whole or not there, what a database took is kept", file=sys.stderr)
    return 130


def main() -> None:
    """Run the command line: a user's error is one line on stderr and exit 1, any other is a bug with its traceback."""
    # Objects created by imports live as long as the program; collecting among them takes a twentieth of the start-up
    # time.
    gc.set_threshold(100_000, 50, 50)
    try:
        arguments, urls = redact_arguments(sys.argv[1:])
        # Only the called command has to be loaded; anything else as first argument needs all of them.
        called = tuple(name for name in COMMANDS if name in arguments[:1])
        make_app(called or COMMANDS)(arguments, prog_name="autoplan", obj=urls)
    except AutoplanError as error:
        sys.stdout.flush()
        print(f"autoplan: {_one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # before the command has started
        sys.exit(_interrupted())
    except SystemExit as left:
        # The parser turns Ctrl-C into an exit; commands that report an interrupt themselves are not reported again.
        if isinstance(left, Terminated) or isinstance(getattr(left.__context__, "__cause__", None), KeyboardInterrupt):
            _interrupted()
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in NO_ROOM:
            raise
        # Flushing the rest of the buffer would fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"autoplan: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
