"""Which hosts does a host list of Slurm name?  `node[001-016,020],login1`, with several brackets in one name too."""

from __future__ import annotations

import re
from itertools import product

from autoplan.errors import InputError
from profiler.discover.text import shown

MOST_HOSTS = 100_000

_TEXT = re.compile(r"[^\s\[\],]+")
_RANGE = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")


def expand(text: str) -> list[str]:
    """The names in the order in which they are written; a number keeps the zeros before it."""
    names: list[str] = []
    for column, part in _parts(text):
        axes = [_axis(word, column + at) for at, word in _pieces(part, column)]
        size = 1
        for axis in axes:
            size *= len(axis)
        if len(names) + size > MOST_HOSTS:
            raise InputError(f"column {column}: names more than {MOST_HOSTS:,} hosts")
        names += ["".join(pieces) for pieces in product(*axes)]
    if not names:
        raise InputError("names no host")
    return names


def _parts(text: str) -> list[tuple[int, str]]:
    """The comma-separated parts, brackets left whole, and the column at which each begins."""
    parts, start, inside = [], 0, False
    for at, letter in enumerate(text + ","):
        if letter in "[]":
            if inside == (letter == "["):
                raise InputError(f"column {at + 1}: a bracket that does not match")
            inside = letter == "["
        elif letter == "," and not inside:
            if text[start:at].strip():
                parts.append((start + 1, text[start:at]))
            start = at + 1
    if inside:
        raise InputError(f"column {len(text)}: a bracket is not closed")
    return parts


def _pieces(part: str, column: int) -> list[tuple[int, str]]:
    """What is inside and outside of brackets, and where it begins in the part."""
    pieces = [(match.start(), match[0]) for match in re.finditer(r"\[[^\]]*\]|[^\[\]]+", part)]
    for at, piece in pieces:
        if not piece.startswith("[") and not _TEXT.fullmatch(piece):
            raise InputError(f"column {column + at}: {shown(piece)} is no part of a host name")
    return pieces


def _axis(piece: str, column: int) -> list[str]:
    """All values of one piece."""
    if not piece.startswith("["):
        return [piece]
    values: list[str] = []
    for word in piece[1:-1].split(","):
        match = _RANGE.fullmatch(word.strip())
        first = int(match["first"]) if match else 0
        last = int(match["last"] or first) if match else -1
        if not match or last < first:
            raise InputError(f"column {column}: {shown(word)} is no range such as 001-016")
        if len(values) + last - first >= MOST_HOSTS:
            raise InputError(f"column {column}: names more than {MOST_HOSTS:,} hosts")
        width = len(match["first"])
        values += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return values
