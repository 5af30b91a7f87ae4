"""Remarks of commands on stderr: warnings of the library, and what was written."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autoplan.base.errors import AutoplanWarning, StoreWarning


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print the warnings of the library on stderr, each in one line; others stay as they are."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: object) -> None:
            if issubclass(category, AutoplanWarning):
                print(f"autoplan: warning: {message}", file=sys.stderr)
            else:
                show_others(message, category, *place)  # type: ignore[arg-type]

        warnings.showwarning = show  # type: ignore[assignment]
        warnings.simplefilter("always", AutoplanWarning)
        yield


def hide_remarks(quiet: bool) -> bool:
    """Leave out warnings that stand in no file, as --quiet demands."""
    if quiet:
        warnings.simplefilter("ignore", AutoplanWarning)
        warnings.simplefilter("always", StoreWarning)
    return quiet


def print_warnings(texts: Iterable[str], *, quiet: bool = False) -> None:
    """Print the warnings of a result."""
    for text in () if quiet else texts:
        print(f"autoplan: warning: {text}", file=sys.stderr)


def print_written(path: Path, *, quiet: bool, ending: str = "") -> None:
    """Say that a file was written, and what can be done with it."""
    if not quiet:
        print(f"wrote {path}{ending}", file=sys.stderr)
