"""Progress bars on stderr, if it is a terminal and the work takes long enough."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autoplan.cli.remarks import say


def say_how_to_watch(storage: str) -> None:
    """Print the command that shows a growing study."""
    say(f"watch it: optuna-dashboard {shlex.quote(storage)}")


@contextmanager
def progress_bar(
    *, quiet: bool, doing: str = "pricing plans", unit: str = "cells"
) -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield a function of (done, total if known), or None if nothing is to be shown."""
    with _bar(quiet, doing) as show:
        yield show and (lambda done, total: show(done, total, unit))


@contextmanager
def measuring_bar(*, quiet: bool, total: int) -> Iterator[Callable[[int, str, float], None] | None]:
    """Yield a function of (done, last item, seconds left), or None if nothing is to be shown."""
    with _bar(quiet, "measuring", total) as show:
        yield show and (
            lambda done, last, left_s: show(done, total, f"{left_s // 60:.0f}:{left_s % 60:02.0f} left  {last}")
        )


@contextmanager
def _bar(quiet: bool, doing: str, total: int | None = None) -> Iterator[Callable[[int, int | None, str], None] | None]:
    """Yield a function of (done, total if known, text after them), or None."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=total)

    def show(done: int, total: int | None, text: str) -> None:
        bar.start()  # only once there is something to show, as the work may start its own processes first
        bar.update(task, completed=done, total=total, description=text)

    try:
        yield show
    finally:
        bar.stop()


@contextmanager
def live_line(*, quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield two functions: one prints a permanent line, the other the current state if stderr is a terminal."""
    if quiet:
        yield (lambda line: None), (lambda line: None)
        return
    if not sys.stderr.isatty():
        yield say, (lambda line: None)
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status("starting") as status:
        yield (lambda line: console.print(escape(line), soft_wrap=True)), (lambda line: status.update(escape(line)))
