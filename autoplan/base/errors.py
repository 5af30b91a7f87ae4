"""Errors that a user can fix, with a common base class, and warnings.

The command line prints an error in one line and exits with 1.  Messages name arguments by their flags: --global-batch
is the argument `global_batch` of a function.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MAX_ECHOED = 80  # characters of a value quoted in a message
MAX_MESSAGE = 2_000  # characters
_UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # categories of what is no letter, or ends a line
_QUOTED, _WORD = re.compile(rf"(?<!\w)'[^'\n]{{{MAX_ECHOED + 20},}}'"), re.compile(r"\S{400,}")


def readable(message: str) -> str:
    """Return a message that is safe for a terminal: long values truncated, control characters escaped."""
    message = _QUOTED.sub(lambda match: f"'{match[0][1 : 1 + MAX_ECHOED]}...'", message)
    message = _WORD.sub(lambda match: f"{match[0][:MAX_ECHOED]}...", message)
    if not message.isprintable():
        message = "".join(
            ascii(letter)[1:-1] if letter != "\n" and unicodedata.category(letter) in _UNSAFE else letter
            for letter in message
        )
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


class AutoplanError(Exception):
    """Base of all errors that a user can fix: the text contains the violated rule, the values and the way out.

    It is raised directly if no subclass fits, for example for a run that failed or was interrupted.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(readable(message))


class InputError(AutoplanError, ValueError):
    """A file, a flag or a value cannot be used: it is missing, malformed, out of range or contradicts another.

    It is a ValueError, so that msgspec adds the place in the file if a dataclass raises it during decoding.
    """


class OutOfRangeError(InputError):
    """A quantity is out of its range; both are stored, so that the reader of a file can name the key in it."""

    def __init__(self, name: str, value: float, rule: str) -> None:
        super().__init__(f"{name} {rule}, got {value:g}")
        self.name: str = name
        self.value: float = value
        self.rule: str = rule


class NoPlanError(AutoplanError):
    """There is no plan to return: none is legal, none fits in memory, or the given plan cannot be started."""


class UnpricedError(AutoplanError):
    """The cost model does not cover the request, for example a framework without known rules."""


class StoreError(AutoplanError):
    """The timing database cannot be read or written: unreachable, not permitted, full, damaged or too new."""


class NoStoreError(StoreError):
    """There is no timing database at the given place."""


class RunFailedError(AutoplanError):
    """Ranks or a program of the user failed; `is_out_of_memory` says whether for lack of memory."""

    def __init__(self, text: str, *, is_out_of_memory: bool = False) -> None:
        super().__init__(text)
        self.is_out_of_memory = is_out_of_memory


class AutoplanWarning(UserWarning):
    """A warning for the user; the command line prints it on stderr."""


class StoreWarning(AutoplanWarning):
    """The timing database contains rows that this version does not understand and ignores."""


def refuse(refusals: Iterable[tuple[object, str]], before: str = "", after: str = "") -> None:
    """Raise InputError with the text of the first (is refused, text) that is refused, between `before` and `after`."""
    for is_refused, text in refusals:
        if is_refused:
            raise InputError(f"{before}{text}{after}")
