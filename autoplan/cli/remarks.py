"""Warnings of the library, as the command line prints them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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
