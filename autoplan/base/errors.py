"""Errors that the user can mend; the command line prints them as one line and exits with 1."""

from __future__ import annotations

from collections.abc import Iterable


class AutoplanError(Exception):
    """The rule that was broken, the values that broke it, and the way out, in one line."""


class InputError(AutoplanError, ValueError):
    """A file, a flag or a value that cannot be used.

    It is a ValueError, so that msgspec adds the place in the file when a
    dataclass refuses its values while it is being decoded.
    """


class OutOfRangeError(InputError):
    """A quantity outside its range; it knows both, so that the reader of a file can name the key that was written."""

    def __init__(self, name: str, value: float, rule: str) -> None:
        super().__init__(f"{name} {rule}, got {value:g}")
        self.name, self.value, self.rule = name, value, rule


class NoPlanError(AutoplanError):
    """No legal plan exists, or none fits in memory."""


class UnpricedError(AutoplanError):
    """The model of costs does not cover what was asked for."""


class StoreError(AutoplanError):
    """The timing database cannot be read or written: not reachable, not allowed, full, damaged, too new."""


def refused(refusals: Iterable[tuple[bool, str]]) -> str:
    """Return the text of the first (is refused, text) that is refused; empty where none is."""
    return next((what for is_refused, what in refusals if is_refused), "")
