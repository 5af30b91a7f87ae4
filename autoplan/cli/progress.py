"""How far is it?  A progress bar on stderr, where that is a terminal and the work takes long enough to see it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say_how_to_watch(storage: str) -> None:
    """Name the command that shows a study while it grows."""
    print(f"autoplan: watch it: optuna-dashboard {shlex.quote(storage)}", file=sys.stderr)


@contextmanager
def measuring_bar(*, quiet: bool, total: int) -> Iterator[Callable[[int, str, float], None] | None]:
    """A function that takes (done, what was done last, seconds left), or None where nothing shall be shown."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(done: int, last: str, left_s: float) -> None:
            bar.update(task, completed=done, description=f"{left_s // 60:.0f}:{left_s % 60:02.0f} left  {last}")

        yield advance


@contextmanager
def progress_bar(
    *, quiet: bool, doing: str = "pricing plans", unit: str = "cells"
) -> Iterator[Callable[[int, int | None], None] | None]:
    """A function that takes (done, total if known), or None where nothing shall be shown."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def live_line(*, quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Two functions: one says a line that stays, the other what goes on now, where stderr is a terminal."""
    if quiet:
        yield (lambda line: None), (lambda line: None)
        return
    if not sys.stderr.isatty():
        yield (lambda line: print(f"autoplan: {line}", file=sys.stderr, flush=True)), (lambda line: None)
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status("starting") as status:
        yield (lambda line: console.print(escape(line), soft_wrap=True)), (lambda line: status.update(escape(line)))
