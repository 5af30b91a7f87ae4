"""Suggestions of similar names for an unknown word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.76  # difflib ratio of similar names: one letter of five differs


def close_names(word: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Return the names that `word` may mean: it is part of a name, or similar to a name or its family.

    The family of a name is the part before its first dash: h100 for h100-sxm.
    """
    typed = word.strip().casefold()
    if not typed:
        return []

    def likeness(name: str) -> float:
        plain = name.casefold()
        family = plain.partition("-")[0]
        return max(_ratio(typed, plain), _ratio(typed, family), _ratio(typed.partition("-")[0], family) * ALIKE)

    def is_near(name: str) -> bool:
        return (len(typed) > 1 and typed in name.casefold()) or likeness(name) >= ALIKE

    return sorted(filter(is_near, names), key=lambda name: (-likeness(name), len(name)))[:most]


def suggestion(word: str, names: Iterable[str], fallback: str = "") -> str:
    """Return suggestions for `word`, or else the `fallback`: the valid names, or where they are listed."""
    names = tuple(names)
    close = close_names(word, names)
    return f"did you mean {', '.join(close)}?" if close else fallback or f"known: {', '.join(names)}"


def _ratio(word: str, name: str) -> float:
    return difflib.SequenceMatcher(a=word, b=name, autojunk=False).ratio()
