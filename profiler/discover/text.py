"""Text of external tools, line by line, without artefacts of terminals and copying."""

from __future__ import annotations

import re

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned

# Terminal colours and underlines; copied text has often lost the escape character before them.
_STYLE = re.compile(r"\x1b?\[(?:\d{1,3}(?:;\d{1,3})*)?m")
_PCI = re.compile(r"(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<rest>[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])")

_SHOWN = 40  # characters of an invalid word quoted in a message
MAX_COLUMNS = 32_000  # maximum characters of a line; a row of the widest table has a few thousand


def plain(text: str) -> str:
    """Return `text` without control characters and styles; line ends and tabs stay, other blanks become spaces."""
    text = _STYLE.sub("", text)
    if text.replace("\n", " ").replace("\t", " ").isprintable():
        return text
    letters = (letter if letter in "\n\t" or not letter.isspace() else " " for letter in text)
    return "".join(letter for letter in letters if letter in "\n\t" or letter.isprintable())


def plain_lines(text: str) -> list[str]:
    """Return the lines of `plain(text)`; longer lines than any table row are truncated, which makes them invalid."""
    return [line[:MAX_COLUMNS] for line in plain(text).split("\n")]


def shown(word: str) -> str:
    """Return a word of the input for a message."""
    word = cleaned(word)
    return repr(word if len(word) <= _SHOWN else word[:_SHOWN] + "...")


def whole_number(word: str, where: str, *, at_most: int) -> int:
    """Return `word` as a number between 0 and `at_most`; `where` describes it and its place."""
    if not re.fullmatch(r"[0-9]{1,12}", word) or int(word) > at_most:
        raise InputError(f"{where} must be a whole number from 0 to {at_most:,}, got {shown(word)}")
    return int(word)


def pci_address(text: str) -> str:
    """Return a bus address in Linux format, "0000:1b:00.0", from NVML's or one without domain; blank if invalid."""
    match = _PCI.fullmatch(text.strip())
    if not match:
        return ""
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['rest'].lower()}"
