"""The text of outside tools, line by line, without what terminals and hands add to it."""

from __future__ import annotations

import re

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned

# Colours and underlines of a terminal; pasted text has often lost the escape character before them.
_STYLE = re.compile(r"\x1b?\[(?:\d{1,3}(?:;\d{1,3})*)?m")
_PCI = re.compile(r"(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<rest>[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])")

_SHOWN = 40  # characters of a wrong word that a message repeats
MOST_COLUMNS = 32_000  # characters of a line; a row of the widest table has some thousand


def plain(text: str) -> str:
    """Return `text` without control characters and styles; line ends and tabs stay, other blanks become spaces."""
    text = _STYLE.sub("", text)
    if text.replace("\n", " ").replace("\t", " ").isprintable():
        return text
    letters = (letter if letter in "\n\t" or not letter.isspace() else " " for letter in text)
    return "".join(letter for letter in letters if letter in "\n\t" or letter.isprintable())


def plain_lines(text: str) -> list[str]:
    """The lines of `plain(text)`; what is longer than any row of a table is cut, and no row then."""
    return [line[:MOST_COLUMNS] for line in plain(text).split("\n")]


def shown(word: str) -> str:
    """A word of the input as a message may repeat it."""
    word = cleaned(word)
    return repr(word if len(word) <= _SHOWN else word[:_SHOWN] + "...")


def whole_number(word: str, where: str, *, at_most: int) -> int:
    """Return `word` as a number between 0 and `at_most`; `where` says what it is and its place."""
    if not re.fullmatch(r"[0-9]{1,12}", word) or int(word) > at_most:
        raise InputError(f"{where} must be a whole number from 0 to {at_most:,}, got {shown(word)}")
    return int(word)


def pci_address(text: str) -> str:
    """A bus address as Linux writes it, "0000:1b:00.0", from that of NVML or one without domain; blank for none."""
    match = _PCI.fullmatch(text.strip())
    if not match:
        return ""
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['rest'].lower()}"
