"""Host lists in Slurm's notation: 'node[001-016,020],login1'."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from autoplan.base.errors import InputError

MAX_HOSTS = 100_000

_TEXT = re.compile(r"[^\s\[\],]+")
_RANGE = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<number>\d{1,9})(?P<suffix>\D*)")


def expand_hosts(text: str) -> list[str]:
    """Return the names in the order of the text; numbers keep their leading zeros."""
    names: list[str] = []
    for column, part in _parts(text):
        axes = [_axis(word, column + at) for at, word in _pieces(part, column)]
        size = 1
        for axis in axes:
            size *= len(axis)
        if len(names) + size > MAX_HOSTS:
            raise InputError(f"column {column}: names more than {MAX_HOSTS:,} hosts")
        names += ["".join(pieces) for pieces in product(*axes)]
    if not names:
        raise InputError("names no host")
    return names


def _parts(text: str) -> list[tuple[int, str]]:
    """Return the comma-separated parts without splitting brackets, each with its starting column."""
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
    """Split a part into text inside and outside of brackets, each with its starting column."""
    pieces = [(match.start(), match[0]) for match in re.finditer(r"\[[^\]]*\]|[^\[\]]+", part)]
    for at, piece in pieces:
        if not piece.startswith("[") and not _TEXT.fullmatch(piece):
            raise InputError(f"column {column + at}: {_shown(piece)} is no part of a host name")
    return pieces


def _axis(piece: str, column: int) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    values: list[str] = []
    for word in piece[1:-1].split(","):
        match = _RANGE.fullmatch(word.strip())
        first = int(match["first"]) if match else 0
        last = int(match["last"] or first) if match else -1
        if not match or last < first:
            raise InputError(f"column {column}: {_shown(word)} is no range such as 001-016")
        if len(values) + last - first >= MAX_HOSTS:
            raise InputError(f"column {column}: names more than {MAX_HOSTS:,} hosts")
        width = len(match["first"])
        values += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return values


def _shown(word: str) -> str:
    return repr(word if len(word) <= 40 else word[:40] + "...")


def compress_hosts(names: Iterable[str]) -> str:
    """Return a host list of `names`, in their order: consecutive numbers become a range."""
    runs: list[tuple[str, str, list[str]]] = []  # prefix, suffix, numbers as written
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, number, suffix = (match["prefix"], match["number"], match["suffix"]) if match else (name, "", "")
        if runs and number and (last := runs[-1])[:2] == (prefix, suffix) and last[2] and _follows(last[2][-1], number):
            last[2].append(number)
        else:
            runs.append((prefix, suffix, [number] if number else []))
    groups: list[tuple[str, str, list[str]]] = []  # prefix, suffix, ranges
    for prefix, suffix, numbers in runs:
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(numbers)
        if groups and span and groups[-1][:2] == (prefix, suffix) and groups[-1][2]:
            groups[-1][2].append(span)
        else:
            groups.append((prefix, suffix, [span] if span else []))
    return ",".join(
        f"{prefix}[{','.join(spans)}]{suffix}"
        if len(spans) > 1 or "-" in "".join(spans)
        else f"{prefix}{''.join(spans)}{suffix}"
        for prefix, suffix, spans in groups
    )


def _follows(first: str, second: str) -> bool:
    return len(first) == len(second) and int(second) == int(first) + 1
