"""Models: presets such as `llama3-70b`, names on the Hugging Face hub, config.json files or folders, TOML files."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import decode, exists, is_file, is_folder, read_table, shipped
from autoplan.base.names import close_names
from autoplan.readers.hub import HUB_NAME, cached_config, config_url, kept_config
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.model import ModelSpec


def preset_models() -> tuple[str, ...]:
    """Return the ids of the shipped models."""
    return tuple(shipped("models"))


def load_model(text: str) -> ModelSpec:
    """Return the model for `text`: a preset or one of its aliases, in any spelling, or a path."""
    name = text.strip().casefold()
    if name in shipped("models"):
        return _preset(name)
    path = Path(text)
    if path.suffix in (".toml", ".json") or exists(path):
        return _from_path(path)
    if preset := find_preset(text):
        return preset
    if HUB_NAME.fullmatch(text):
        return _from_hub(text)
    aliases = _aliases()
    close = close_names(name, [*preset_models(), *aliases], most=9)
    names = list(dict.fromkeys(aliases.get(alias, alias) for alias in close))[:3]
    meant = f"did you mean {', '.join(names)}? " * bool(names)
    raise InputError(
        f"unknown model {text!r}: neither a preset nor a path; {meant}autoplan list models shows the presets; "
        "a Hugging Face config.json works as well"
    )


def find_preset(*names: str) -> ModelSpec | None:
    """Return the preset of the first known name, ignoring separators, publisher, brackets and suffixes (-Instruct)."""
    for name in names:
        for spelling in _spellings(name):
            if preset := _presets_by_spelling().get(spelling):
                model = _preset(preset)
                return replace(model, checkpoint=name) if HUB_NAME.fullmatch(name) else model
    return None


def hub_name(model: ModelSpec) -> str | None:
    """Return the Hugging Face hub name of a shipped model, as it was called, or of one read by that name, if any."""
    if (path := shipped("models").get(model.name)) is None:
        return model.checkpoint or None
    if find_preset(model.name) != model:
        return None
    return model.checkpoint or next(filter(HUB_NAME.fullmatch, read_table(path).get("aliases", ())), None)


# A model in the Hugging Face cache: the hub name, and a folder named by the snapshot's hash.
_CACHED = re.compile(r"models--(?P<publisher>[\w.-]+?)--(?P<name>[\w.-]+)(/snapshots(/\w+)?)?/?$")

_LEFT_OUT = "left_out"  # key of a preset: what its checkpoint on the hub has too
# Suffixes of fine-tuned or repackaged models with the same architecture.
_TUNED = re.compile(
    r"([\s_-]*(instruct|base|chat|it|pt|hf|v0\.1)|[\s_-](thinking|bf16|fp8|nvfp4|fp8dynamic|\d{4}|v[1-9]\.\d))+$"
)


def _spellings(name: str) -> list[str]:
    """Return the letters and digits of a name, then without its publisher, its suffix, and a vendor prefix."""
    cached = _CACHED.search(name)
    full = re.sub(r"\(.*?\)", "", cached["name"] if cached else name).strip().casefold()
    last = full.rpartition("/")[2]
    untuned = _TUNED.sub("", last) or last
    return [re.sub(r"[^a-z0-9]", "", text) for text in (full, last, untuned, untuned.removeprefix("meta-"))]


@cache
def _presets_by_spelling() -> dict[str, str]:
    names = [*zip(preset_models(), preset_models(), strict=True), *_aliases().items()]
    return {spelling: preset for name, preset in names for spelling in reversed(_spellings(name)) if spelling}


@cache
def _aliases() -> dict[str, str]:
    """Return the presets by their aliases, in lower case."""
    tables = {preset: read_table(path) for preset, path in shipped("models").items()}
    return {alias.casefold(): preset for preset, table in tables.items() for alias in table.get("aliases", ())}


@cache
def _preset(name: str) -> ModelSpec:
    table = read_table(shipped("models")[name])
    table.pop(_LEFT_OUT, None)
    return decode(ModelSpec, {"name": name, **table}, f"model {name}")


def left_out(model: ModelSpec) -> str:
    """Return what a preset called by its name on the hub leaves out of that checkpoint; blank if nothing."""
    path = shipped("models").get(model.name) if model.checkpoint else None
    return str(read_table(path).get(_LEFT_OUT, "")) if path else ""


def _from_hub(name: str) -> ModelSpec:
    """Return the model ORG/NAME of the hub; what is downloaded, now or earlier, names its address as its source."""
    if path := cached_config(name):
        return _named(path, name)
    return replace(_named(kept_config(name), name), sources=(config_url(name),))


def _named(path: Path, name: str) -> ModelSpec:
    return replace(read_huggingface(read_table(path), str(path)), name=name.partition("/")[2], checkpoint=name)


def _from_path(path: Path) -> ModelSpec:
    if is_folder(path):
        path = path / "config.json"
        if not is_file(path):
            raise InputError(f"{path.parent}: a folder without config.json")
    table = read_table(path)
    if path.suffix == ".toml":
        return decode(ModelSpec, table, str(path))
    # The model is named after the folder of its config.json; messages contain the path.
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return replace(read_huggingface(table, str(path)), name=name or "config")
