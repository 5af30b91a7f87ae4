"""Models, from a preset such as `llama3-70b`, a Hugging Face config.json or its folder, or a TOML file."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import decode, is_file, is_folder, read_table, shipped
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.model import ModelSpec


def preset_models() -> tuple[str, ...]:
    """Ids of the shipped models."""
    return tuple(shipped("models"))


def load_model(text: str) -> ModelSpec:
    """The model that `text` names: a preset or one of its aliases, in any case, or else a path."""
    presets = shipped("models")
    name = text.strip().casefold()
    if name in presets:
        return _preset(name, presets[name])
    path = Path(text)
    if path.suffix in (".toml", ".json") or _exists(path):
        return _from_path(path)
    aliases: dict[str, str] = {}
    for preset, place in presets.items():
        for alias in read_table(place).get("aliases", ()):
            aliases[alias.casefold()] = preset
    spelled = {plain_name(known): preset for known, preset in (*zip(presets, presets, strict=True), *aliases.items())}
    if path_of_name := aliases.get(name) or spelled.get(plain_name(name)):
        return _preset(path_of_name, presets[path_of_name])
    close = difflib.get_close_matches(name, [*presets, *aliases], n=3, cutoff=0.4)
    names = list(dict.fromkeys(aliases.get(alias, alias) for alias in close)) or sorted(presets)
    hint = f"did you mean {', '.join(names)}?" if close else f"known: {', '.join(names)}"
    raise InputError(f"unknown model {text!r}: neither a preset nor a path; {hint}")


def plain_name(name: str) -> str:
    """A name without what spellings differ in: who published it, blanks and dashes, and how it was tuned."""
    short = re.sub(r"[\s_-]", "", name.casefold().rpartition("/")[2])
    return re.sub(r"(instruct|base|chat|hf|it|pt|v0\.[0-9])+$", "", short) or short


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than a name may be, or with a null byte
        return False


def _preset(name: str, path: Path) -> ModelSpec:
    return decode(ModelSpec, {"name": name, **read_table(path)}, f"model {name}")


def _from_path(path: Path) -> ModelSpec:
    if is_folder(path):
        path = path / "config.json"
        if not is_file(path):
            raise InputError(f"{path.parent}: a folder without config.json")
    table = read_table(path)
    if path.suffix == ".toml":
        return decode(ModelSpec, table, str(path))
    # A config.json is named by its folder; the path stands in messages.
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return replace(read_huggingface(table, str(path)), name=name or "config")
