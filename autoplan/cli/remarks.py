"""Remarks of commands on stderr: warnings of the library, and written files."""

from __future__ import annotations

import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autoplan.base.errors import AutoplanWarning, StoreWarning, readable


def say(text: str) -> None:
    """Print a remark at once, also into a pipe; a terminal gets whole words on every line."""
    remark = f"autoplan: {text}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        remark = textwrap.fill(remark, width, break_on_hyphens=False, break_long_words=False)
    print(remark, file=sys.stderr, flush=True)


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print warnings of the library on stderr, one line each; other warnings are unchanged."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: object) -> None:
            if issubclass(category, AutoplanWarning):
                say(f"warning: {message}")
            else:
                show_others(message, category, *place)  # type: ignore[arg-type]

        warnings.showwarning = show  # type: ignore[assignment]
        warnings.simplefilter("always", AutoplanWarning)
        yield


def hide_remarks(quiet: bool) -> bool:
    """Suppress warnings that are in no file, for --quiet."""
    if quiet:
        warnings.simplefilter("ignore", AutoplanWarning)
        warnings.simplefilter("always", StoreWarning)
    return quiet


def print_warnings(texts: Iterable[str], *, quiet: bool = False) -> None:
    """Print the warnings of a result."""
    for text in () if quiet else texts:
        say(f"warning: {text}")


def print_written(path: Path, *, quiet: bool = False, ending: str = "") -> None:
    """Report that a file was written, and its use."""
    if not quiet:
        print(readable(f"wrote {path}{ending}"), file=sys.stderr)
