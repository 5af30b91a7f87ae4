"""Command line `autoplan`: every subcommand in a file of its own, loaded when it runs."""

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
from autoplan.cli.remarks import shown_warnings

# In the order of the help: each is a function, or an app of its own, of the module with its name.
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
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of a file that standard output goes to
WITHOUT_ARGUMENTS = ("discover", "doctor")  # do something where nothing is given


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
    """The command line with these commands."""
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
    """The message on one line; of a file's control characters, which a terminal would obey, as what they are."""
    text = " ".join(str(error).split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _interrupted() -> int:
    print("autoplan: interrupted: files are whole or not there, what a database took is kept", file=sys.stderr)
    return 130


def main() -> None:
    """Run the command line: a user's error is one line on stderr and exit 1, any other is a bug with its traceback."""
    # What imports make lives as long as the program: to look for garbage among it takes a twentieth of a start.
    gc.set_threshold(100_000, 50, 50)
    try:
        arguments, whole_urls = redact_arguments(sys.argv[1:])
        # One that is called is all that has to be loaded; whatever else stands first is told of all of them.
        called = tuple(name for name in COMMANDS if name in arguments[:1])
        make_app(called or COMMANDS)(arguments, prog_name="autoplan", obj=whole_urls)
    except AutoplanError as error:
        sys.stdout.flush()
        print(f"autoplan: {_one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # before the command has begun
        sys.exit(_interrupted())
    except SystemExit as left:
        # The parser makes an exit of Ctrl-C; a command that says itself what became of it is not spoken for.
        if isinstance(getattr(left.__context__, "__cause__", None), KeyboardInterrupt):
            _interrupted()
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in NO_ROOM:
            raise
        # What is left in the buffer would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"autoplan: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)
