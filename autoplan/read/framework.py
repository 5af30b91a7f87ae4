"""Which framework is meant?  A preset, a TOML file of one's own, or the name that a table of measured runs uses."""

from __future__ import annotations

import difflib
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from autoplan.errors import InputError
from autoplan.files import decode, read_table, schema
from autoplan.framework import Framework


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    folder = resources.files("autoplan.presets") / "frameworks"
    paths = sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {path.stem: read_table(path) for path in paths}


@lru_cache(maxsize=1)
def _presets() -> dict[str, Framework]:
    return {name: _decoded(table, f"framework {name}") for name, table in _tables().items()}


def _decoded(table: dict[str, Any], where: str) -> Framework:
    """The framework in `table`; what it leaves out is as in the preset that it `extends`, calibrations too."""
    if "extends" in table:
        whole = {name: preset for name, preset in _tables().items() if "extends" not in preset}
        table = dict(table)
        name = table.pop("extends")
        if name not in tuple(whole):  # which may hold anything
            raise InputError(f"{where}: extends {name!r}, which must be one of {', '.join(whole)}")
        table = {"calibrated_as": name, **whole[name], "aliases": [], **table}
    return decode(Framework, table, where)


def preset_frameworks() -> tuple[str, ...]:
    """Ids of the shipped frameworks."""
    return tuple(_presets())


def load_framework(text: str) -> Framework:
    """The framework that `text` names: a preset's id or the path of a TOML file."""
    if text in (presets := _presets()):
        return presets[text]
    path = Path(text)
    if path.suffix == ".toml":
        return _decoded(read_table(path), str(path))
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


def framework_schema() -> dict[str, Any]:
    """JSON Schema of a framework file: it may extend a shipped one."""
    described = schema(Framework, human_units=True)
    whole = [name for name, table in _tables().items() if "extends" not in table]
    described["$defs"]["Framework"]["properties"]["extends"] = {"enum": whole}
    return described
