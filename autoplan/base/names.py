"""Names that are near to a word which none of them is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.76  # ratio of difflib from which two names are spelled alike: one letter of five differs


def close_names(word: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Return the names that `word` may stand for: it is a part of them, or spelled nearly as they, or as their family.

    The family of a name is what stands before its first dash: of h100-sxm it is h100.
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


def suggestion(word: str, names: Iterable[str], others: str = "") -> str:
    """Return what `word` may have meant, else the `others`: the names there are, or where they are listed."""
    names = tuple(names)
    close = close_names(word, names)
    return f"did you mean {', '.join(close)}?" if close else others or f"known: {', '.join(names)}"


def _ratio(word: str, name: str) -> float:
    return difflib.SequenceMatcher(a=word, b=name, autojunk=False).ratio()
