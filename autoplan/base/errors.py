"""Errors that a user can mend, as one family, and warnings.

The command line prints an error in one line and exits with 1.  Messages call an argument by its flag: --global-batch is
`global_batch` of a function.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

MOST_ECHOED = 80  # characters of a value that a message repeats
MOST_MESSAGE = 2_000  # characters
_QUOTED, _WORD = re.compile(rf"'[^'\n]{{{MOST_ECHOED + 20},}}'"), re.compile(r"\S{400,}")


def readable(message: str) -> str:
    """Return a message that a terminal can show: long values cut, and characters that steer a terminal escaped."""
    message = _QUOTED.sub(lambda match: f"'{match[0][1 : 1 + MOST_ECHOED]}...'", message)
    message = _WORD.sub(lambda match: f"{match[0][:MOST_ECHOED]}...", message)
    if not message.isprintable():
        message = "".join(
            letter if letter == "\n" or unicodedata.category(letter)[0] != "C" else ascii(letter)[1:-1]
            for letter in message
        )
    return message if len(message) <= MOST_MESSAGE else f"{message[:MOST_MESSAGE]}..."


class AutoplanError(Exception):
    """The root of all errors that a user can mend: its text has the rule that was broken, the values and the way out.

    Raised itself where none of the classes below fits, such as for a run that failed or was interrupted.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(readable(message))


class InputError(AutoplanError, ValueError):
    """A file, a flag or a value cannot be used: it is not there, not well-formed, out of range or contradicts another.

    It is a ValueError, so that msgspec adds the place in the file when a dataclass refuses its values while it is being
    decoded.
    """


class OutOfRangeError(InputError):
    """A quantity lies outside its range; both are kept, so that the reader of a file can name the key in it."""

    def __init__(self, name: str, value: float, rule: str) -> None:
        super().__init__(f"{name} {rule}, got {value:g}")
        self.name: str = name
        self.value: float = value
        self.rule: str = rule


class NoPlanError(AutoplanError):
    """No plan is there to be returned: none is legal, none fits in memory, or the one given cannot be started."""


class UnpricedError(AutoplanError):
    """The cost model does not cover what was asked for, such as a framework whose rules are not known."""


class StoreError(AutoplanError):
    """The timing database cannot be read or written: not reachable, not allowed, full, damaged, too new."""


class NoStoreError(StoreError):
    """Absence of a timing database where one was looked for."""


class AutoplanWarning(UserWarning):
    """Something that a user should know without having asked; the command line prints it on stderr."""


class StoreWarning(AutoplanWarning):
    """The timing database holds rows that this version does not understand and passes over."""


def refused(refusals: Iterable[tuple[bool, str]]) -> str:
    """Return the text of the first (is refused, text) that is refused; empty where none is."""
    return next((text for is_refused, text in refusals if is_refused), "")
