"""Which framework is meant?  A preset, a TOML file of one's own, or the name that a table of measured runs uses."""

from __future__ import annotations

import difflib
from functools import lru_cache
from importlib import resources
from pathlib import Path

from autoplan.errors import InputError
from autoplan.files import decode, read_table
from autoplan.framework import Framework


@lru_cache(maxsize=1)
def _presets() -> dict[str, Framework]:
    folder = resources.files("autoplan.presets") / "frameworks"
    paths = sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {path.stem: decode(Framework, read_table(path), f"framework {path.stem}") for path in paths}


def preset_frameworks() -> tuple[str, ...]:
    """Ids of the shipped frameworks."""
    return tuple(_presets())


def load_framework(text: str) -> Framework:
    """The framework that `text` names: a preset's id or the path of a TOML file."""
    if text in (presets := _presets()):
        return presets[text]
    path = Path(text)
    if path.suffix == ".toml":
        return decode(Framework, read_table(path), str(path))
    close = difflib.get_close_matches(text, presets, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(presets)}, or give a TOML file"
    raise InputError(f"unknown framework {text!r}: {hint}")


def framework_called(name: str, year: str) -> Framework | None:
    """The preset that answers to `name` in a table of runs: the longest alias that begins it, of that year if it says.

    An alias may end in "@2021": then it means the software of that year only.
    """
    best: tuple[int, Framework] | None = None
    for framework in _presets().values():
        for alias in framework.aliases:
            beginning, _, era = alias.partition("@")
            if name.casefold().startswith(beginning.casefold()) and year.startswith(era):
                length = len(beginning) + len(era)
                if best is None or length > best[0]:
                    best = (length, framework)
    return best[1] if best else None
