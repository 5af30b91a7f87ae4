"""Values of the keys of a Hugging Face config.json, and evaluation of expressions of keys."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import read_table, shipped
from autoplan.spec.model import (
    Encoder,
    Experts,
    LatentAttention,
    LinearAttention,
    Mamba,
    ModelSpec,
    WindowAttention,
)

MOST = 10**9  # limit of any count in a config.json
ABSENT: Any = object()
_PARTS: dict[str, type] = {
    "": ModelSpec,
    "mla": LatentAttention,
    "moe": Experts,
    "mamba": Mamba,
    "linear_attention": LinearAttention,
    "encoder": Encoder,
    "window_attention": WindowAttention,
    "window_attention.mla": LatentAttention,
}


@functools.cache
def key_table() -> dict[str, Any]:
    """Return the meaning of the keys, by model_type."""
    return read_table(shipped()["huggingface"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Content of a config.json, with the meaning of its keys for the model_type."""

    config: dict[str, Any]
    kind: str
    rules: dict[str, Any]

    def get(self, key: str) -> Any:
        """Return the value of a key in the file; dots in the key enter tables."""
        value: Any = self.config
        for step in key.split("."):
            if value is ABSENT or value is None:
                return ABSENT
            if step == "#" and isinstance(value, list):
                return len(value)
            if step.isdigit():
                value = value[int(step)] if isinstance(value, list) and int(step) < len(value) else ABSENT
                continue
            if not isinstance(value, dict):
                raise InputError(f"{key.rpartition('.')[0]} must be a table, got {show(value)}")
            value = value.get(step, ABSENT)
        return value

    def assumed(self, key: str) -> Any:
        """Return the value in the file, or the default of the transformers class."""
        value = self.get(key)
        return self.rules.get("absent", {}).get(key, ABSENT) if value is ABSENT else value

    def sizes(self, text: str) -> tuple[int, int]:
        """Return inputs and outputs of a matrix, from two expressions with an x between them."""
        inputs, outputs = map(self.number, text.split(" x "))
        return inputs, outputs

    def count(self, key: str) -> int:
        """Return the integer under a key that the attention windows need."""
        value = typed(key, self.assumed(key), int)
        if value is ABSENT:
            raise InputError(f"{key} is null: {self.kind} models with a window need it")
        return int(value)

    def number(self, expression: str) -> int:
        """Evaluate an expression of keys and numbers; true counts as 1."""
        for look_up in (self.get, self.assumed):
            for text in expression.split("|"):
                value = computed(text.split(), int, lambda key, look_up=look_up: _as_number(look_up(key)))  # type: ignore[misc]
                if value is not ABSENT:
                    return int(value)
        raise InputError(f"{expression} is missing: {self.kind} models need it")

    def value(self, part: str, inner: str, expression: str) -> Any:
        """Return the value of a field, or `ABSENT` for its default; the file takes precedence over class defaults."""
        field = next(inner_field for inner_field in fields(_PARTS[part]) if inner_field.name == inner)
        hint = typing.get_type_hints(_PARTS[part])[inner]
        choices = self.rules.get("choices", {}).get(inner)
        if isinstance(choices, dict):
            return self.chosen(expression, choices)
        kind = bool if choices else typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
        alternatives = [text.split() for text in expression.split("|")]
        for look_up in (self.get, self.assumed):
            for terms in alternatives:
                if (value := computed(terms, kind, look_up)) is not ABSENT:
                    return choices[value] if choices else value
        if field.default is MISSING or inner == "ffn_size":
            key = next(term for term in alternatives[0] if not term.isdigit())
            raise InputError(f"{key} is {'null' if self.get(key) is None else 'missing'}: {self.kind} models need it")
        return ABSENT

    def chosen(self, key: str, choices: dict[str, Any]) -> Any:
        """Return the meaning of a word under a key."""
        word = typed(key, self.assumed(key), str)
        if word not in choices:
            raise InputError(f"{key} = {show(word)} is not covered for {self.kind}, only {', '.join(choices)}")
        return choices[word]

    def kinds(self, key: str, allowed: tuple[str, ...]) -> list[str]:
        """Return a list with one word per layer."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise InputError(f"{key} must be a list with one word a layer, got {show(value)}")
        for item in value:
            if not isinstance(item, str) or item not in allowed:
                raise InputError(f"{key} holds {show(item)}; known: {', '.join(allowed)}")
        return value


def show(value: Any) -> str:
    """Return a value for a message, truncated."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def computed(terms: list[str], kind: type, look_up: Callable[[str], Any]) -> Any:
    """Evaluate a key, or sums of products and quotients of keys and numbers; `ABSENT` if a key has no value."""
    values = [_summed(term.split("+"), kind, look_up) for term in terms[::2]]
    if any(value is ABSENT for value in values):
        return ABSENT
    total, product = 0, values[0]
    for operator, value in zip(terms[1::2], values[1:], strict=True):
        if operator == "*":
            product *= value
        elif operator == "//":
            product = product // value if value else 0
        else:
            total, product = total + product, value if operator == "+" else -value
    return total + product if len(values) > 1 else product


def _summed(keys: list[str], kind: type, look_up: Callable[[str], Any]) -> Any:
    """Return the value of a key or number, or the sum of several."""
    values = [int(key) if key.isdigit() else typed(key, look_up(key), kind) for key in keys]
    if len(values) == 1 or any(value is ABSENT for value in values):
        return values[0] if len(values) == 1 else ABSENT
    return sum(values)


def typed(key: str, value: Any, kind: type) -> Any:
    """Return `value` if it has the type of the field; null means no value."""
    if value is ABSENT or value is None:
        return ABSENT
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool and not isinstance(value, bool):
        raise InputError(f"{key} must be true or false, got {show(value)}")
    if kind is str and not isinstance(value, str):
        raise InputError(f"{key} must be text, got {show(value)}")
    if kind is int and not (is_number and isinstance(value, int) and 0 <= value <= MOST):
        raise InputError(f"{key} must be a whole number from 0 to {MOST}, got {show(value)}")
    if kind is float and not (is_number and 0 < value <= 1e18):
        raise InputError(f"{key} must be a positive finite number, got {show(value)}")
    return value
