"""Shipped models by the names and sizes under which recipes and presets of Megatron-Core mean them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from autoplan.readers.model import load_model, preset_models
from autoplan.spec.model import ModelSpec


@lru_cache(maxsize=1)
def _presets() -> tuple[ModelSpec, ...]:
    return tuple(load_model(name) for name in preset_models())


@lru_cache(maxsize=1)
def _by_name() -> dict[str, ModelSpec]:
    names: dict[str, ModelSpec] = {}
    for model in _presets():
        for name in (model.name, *model.aliases):
            names.setdefault(_letters(name), model)
            names.setdefault(_letters(name.rpartition("/")[2]), model)
    return names


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


# Endings under which a model of the same architecture is trained further, or published by others.
_FURTHER = re.compile(
    r"([_-](instruct|chat|base|thinking|it|pt|hf|bf16|fp8|nvfp4|fp8dynamic|\d{4}|v\d\.\d))+$", re.IGNORECASE
)


def preset_of(*names: str) -> ModelSpec | None:
    """Return the shipped model that the first known of these names means: dots and dashes count for nothing.

    A name that ends like that of a fine-tuned version, such as "-Instruct", means the model that it was made from.
    """
    for name in names:
        last = name.rpartition("/")[2]
        plain = _FURTHER.sub("", last)
        for spelling in (name, last, re.sub(r"[_-]?v0\.1$", "", name), plain, plain.removeprefix("Meta-")):
            if _letters(spelling) in _by_name():
                return _by_name()[_letters(spelling)]
    return None


def named(model: ModelSpec, base: ModelSpec | None) -> ModelSpec:
    """Return the shipped model of just this architecture, preferably the one that a file starts from."""
    for known in ([base] if base else []) + list(_presets()):
        if replace(known, name=model.name, aliases=(), sources=()) == model:
            return known
    return replace(model, name=base.name if base else "megatron")
