"""How are the names of many hosts written short?  As Slurm does: 'gpu[001-003,007],login1'."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from autoplan.errors import InputError

MOST_HOSTS = 10**6

_RANGE = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")
_NUMBERED = re.compile(r"(?P<head>.*?)(?P<number>\d{1,9})(?P<tail>\D*)")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names that a host list stands for, in its order."""
    names: list[str] = []
    for part in _parts(text):
        for name in _expanded(part, text):
            names.append(name)
            if len(names) > MOST_HOSTS:
                raise InputError(f"host list {text[:60]!r} names more than {MOST_HOSTS:,} hosts")
    return tuple(names)


def _parts(text: str) -> Iterator[str]:
    """What stands between the commas outside brackets."""
    part, inside = "", False
    for letter in text.strip():
        if letter in "[]":
            if inside == (letter == "["):
                raise InputError(f"host list {text[:60]!r}: brackets do not match")
            inside = letter == "["
        if letter == "," and not inside:
            yield part
            part = ""
        else:
            part += letter
    if inside:
        raise InputError(f"host list {text[:60]!r}: brackets do not match")
    if part:
        yield part


def _expanded(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        if not part.strip():
            raise InputError(f"host list {text[:60]!r} has an empty name")
        yield part.strip()
        return
    ranges, _, tail = rest.partition("]")
    for span in ranges.split(","):
        match = _RANGE.fullmatch(span.strip())
        first = match["first"] if match else ""
        last = (match["last"] or first) if match else ""
        if not first or int(last) < int(first):
            raise InputError(f"host list {text[:60]!r}: {span!r} is no number or range such as 001-016")
        for number in range(int(first), int(last) + 1):
            for end in _expanded(tail, text) if tail else ("",):
                yield f"{head.strip()}{number:0{len(first)}d}{end}"


def compress_hosts(names: Iterable[str]) -> str:
    """A host list of `names`, in their order: neighbours that count up by one become a range."""
    runs: list[tuple[str, str, list[str]]] = []  # head, tail, numbers as written
    for name in names:
        match = _NUMBERED.fullmatch(name)
        head, number, tail = (match["head"], match["number"], match["tail"]) if match else (name, "", "")
        if runs and number and (last := runs[-1])[:2] == (head, tail) and last[2] and _follows(last[2][-1], number):
            last[2].append(number)
        else:
            runs.append((head, tail, [number] if number else []))
    groups: list[tuple[str, str, list[str]]] = []  # head, tail, ranges
    for head, tail, numbers in runs:
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(numbers)
        if groups and span and groups[-1][:2] == (head, tail) and groups[-1][2]:
            groups[-1][2].append(span)
        else:
            groups.append((head, tail, [span] if span else []))
    return ",".join(
        f"{head}[{','.join(spans)}]{tail}"
        if len(spans) > 1 or "-" in "".join(spans)
        else f"{head}{''.join(spans)}{tail}"
        for head, tail, spans in groups
    )


def _follows(one: str, other: str) -> bool:
    return len(one) == len(other) and int(other) == int(one) + 1
