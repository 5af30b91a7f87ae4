"""Does a setting, or a program, tell of a model that reads or makes images, video or sound?

What tells of them is one table, presets/media.toml.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache

from autoplan.base.files import read_table, shipped
from autoplan.frameworks.common.literals import dotted
from autoplan.readers.model import find_preset, left_out

OF_MEDIA = "of images, video or sound"  # why a part of a program is listed
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Options that name runs, results, templates and containers, and conditions of scripts, whatever is trained.
_OF_RUNS = re.compile(
    r"save|output|wandb|swanlab|comet|mlflow|run_name|exp\w*_name|project(?!or)|log|hub_model_id|cache|template|system"
    r"|prompt|eval|container|docker|slurm|skypilot|grouped_mm|\s",
    re.IGNORECASE,
)
_PAIR = re.compile(r"'([\w.-]+)': '?([^',{}]+)")
_OFF = ("", "false", "0", "none", "null", "no", "off", "[]", "{}")


def _settings(option: str, table: str) -> Iterator[tuple[str, str]]:
    """Return the settings in a table, named with the option that has it."""
    return ((f"{option}.{key}", value) for key, value in _PAIR.findall(table))


def tells_of_media(option: str, value: str) -> bool:
    """Return whether an option, or the name in its value, tells of images, video or sound."""
    if value.startswith("{"):  # a table, of which its name and its own settings tell
        return any(tells_of_media(*pair) for pair in [(option, "set"), *_settings(option, value)])
    is_off = value.strip().casefold() in _OFF and "freeze" not in option
    if is_off or _OF_RUNS.search(option):
        return False
    table = _table()
    name = option.rpartition(".")[2].lstrip("-").replace("-", "_")
    if name in table["limits"]:
        return False
    if _words(option) & table["option_words"] or name in table["options"]:
        return True
    shown = "/".join(value.strip("/").split("/")[-2:]) if value.startswith(("/", "~", ".", "$")) else value
    if (preset := find_preset(value)) is not None:
        return bool(left_out(preset))
    text = re.sub("|".join(map(re.escape, table["text_alone"])), "", shown, flags=re.IGNORECASE)
    return bool(_words(text) & table["value_words"]) or _types().search(text) is not None


def media_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables of an environment that the loaders of images, video or sound read."""
    return sorted(_table()["variables"] & environment.keys())


def media_in(node: ast.AST) -> Iterator[str]:
    """Yield the names in one part of a program that tell of images, video or sound."""
    table = _table()
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        modules = [module] if module else [alias.name for alias in node.names]
        yield from (name for name in modules if name.partition(".")[0] in table["packages"])
    elif isinstance(node, ast.Call):
        yield from {dotted(node.func).rpartition(".")[2], *dotted(node.func).split(".")[-2:]} & table["names"]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in table["names"]:
        yield node.value


def _words(text: str) -> set[str]:
    """Return the words of a name: whole runs of letters, and those between capital letters."""
    whole = {word.casefold() for word in re.findall(r"[A-Za-z]+", text)}
    return whole | {word.casefold() for word in _CAMEL.findall(text)}


@cache
def _table() -> dict[str, frozenset[str]]:
    return {key: frozenset(names) for key, names in read_table(shipped()["media"]).items()}


@cache
def _types() -> re.Pattern[str]:
    """Return a pattern for the types of models in names such as Qwen2.5-VL-7B, whatever stands between their parts."""
    types = sorted(_table()["types"], key=len, reverse=True)
    parts = (re.findall(r"[a-z]+|\d", name) for name in types)
    return re.compile(r"(?<![a-z])(" + "|".join("[-_. ]?".join(part) for part in parts) + r")(?![a-z])", re.IGNORECASE)
