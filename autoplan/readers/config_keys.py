"""Values of the keys of a Hugging Face config.json, and evaluation of expressions of keys."""

from __future__ import annotations

import ast
import difflib
import functools
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import read_table, shipped
from autoplan.spec.blocks import Experts, LatentAttention, LinearAttention, Mamba, WindowAttention
from autoplan.spec.model import Encoder, ModelSpec

MOST = 10**9  # limit of any count in a config.json
MISSPELLED = 0.92  # difflib ratio of a key and its misspelling: one letter of seven is missing
MIN_SPELLED = 5  # letters of keys that are looked for
ABSENT: Any = object()
PARTS: dict[str, type] = {
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
    table = read_table(shipped()["huggingface"])
    also = {kind: {"like": base} for base, kinds in table.pop("same_as").items() for kind in kinds}
    return {**table, "types": {**table["types"], **also}}


def rules_of(section: str, kind: str) -> dict[str, Any]:
    """Return what the keys of a type of `types` or `encoder_types` mean, with what it takes over from others."""
    table = key_table()
    own = table[section].get(kind) or table["families"].get(kind, {})
    rules: dict[str, Any] = {}
    for base in own.get("like", "").split():
        rules = merged(rules, rules_of(section, base))
    return merged(rules, {name: entry for name, entry in own.items() if name not in _NO_RULES})


_NO_RULES = ("like", "in", "type", "within_text")


def merged(rules: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return rules with others in place of theirs, table by table."""
    both = {
        name: merged(rules[name], entry)
        for name, entry in own.items()
        if isinstance(entry, dict) and isinstance(rules.get(name), dict)
    }
    return {**rules, **own, **both}


def field_entries(rules: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of ModelSpec, with dots where nested, and what gives them."""
    for name, entry in rules.items():
        if not isinstance(entry, dict):
            yield prefix + name, entry
        elif prefix + name in PARTS:
            yield from field_entries(entry, f"{prefix}{name}.")


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
            if step.isdigit() and not isinstance(value, dict):
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

    def sized(self, expression: str) -> Any:
        """Return the value of an expression of keys and class defaults; `ABSENT` if a key has none."""
        return computed(expression, int, self.assumed)

    def number(self, expression: str) -> int:
        """Evaluate an expression of keys and numbers; true counts as 1."""
        for look_up in (self.get, self.assumed):
            value = computed(expression, int, lambda key, look_up=look_up: _as_number(look_up(key)))  # type: ignore[misc]
            if value is not ABSENT:
                return int(value)
        fault = "null" if self.get(expression) is None else "missing"
        raise InputError(f"{expression} is {fault}: {self.kind} models need it")

    def value(self, part: str, inner: str, entry: Any) -> Any:
        """Return the value of a field, or `ABSENT` for its default; the file takes precedence over class defaults.

        `entry` is the value itself, or an expression of keys.
        """
        hint, has_default = _hints(PARTS[part])[inner]
        if not isinstance(entry, str) or entry in typing.get_args(hint):
            return entry
        if choices := self.rules.get("choices", {}).get(inner):
            return self.chosen(entry, choices)
        words = key_table()["words"].get(inner)
        kind = object if words else typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
        for look_up in (self.get, self.assumed):
            if (value := computed(entry, kind, look_up)) is not ABSENT:
                return words.get(str(value), ABSENT) if words else value
        if not has_default or inner == "ffn_size":
            names = [re.findall(r"[a-z_][\w.]*", alternative)[0] for alternative in entry.split("|")]
            lacks = "null" if any(self.get(name) is None for name in names) else "missing"
            raise InputError(f"{' or '.join(dict.fromkeys(names))} is {lacks}: {self.kind} models need it")
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


def check_spelling(keys: Keys) -> None:
    """Raise an error for a key that nothing reads but that is nearly one that the file lacks, as typing errors are."""
    rules = (keys.rules, key_table()["common"])
    lacking = [name for name in _names(rules) if len(name) >= MIN_SPELLED and name not in keys.config]
    unread = (key for key in keys.config if key not in _all_names() and not key.startswith("_"))
    for key in unread:
        for name in difflib.get_close_matches(key, lacking, n=1, cutoff=MISSPELLED):
            raise InputError(f"{key} is not a key of {keys.kind} models: did you mean {name}? Correct or remove it")


@functools.cache
def _all_names() -> frozenset[str]:
    return frozenset(_names(key_table()))


def _names(rules: Any) -> set[str]:
    """Return the words in rules, of which most are keys."""
    if isinstance(rules, str):
        return set(re.findall(r"[a-z_]\w*", rules))
    if isinstance(rules, dict):
        return {name for name in rules if isinstance(name, str)} | _names(tuple(rules.values()))
    return {name for entry in rules for name in _names(entry)} if isinstance(rules, list | tuple) else set()


@functools.cache
def _hints(part: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(part)
    return {field.name: (hints[field.name], field.default is not MISSING) for field in fields(part)}


def show(value: Any) -> str:
    """Return a value for a message, truncated."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


@functools.cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression.strip(), mode="eval").body


def computed(expression: str, kind: type, look_up: Callable[[str], Any]) -> Any:
    """Evaluate an expression of keys in the syntax of Python; `ABSENT` if a key has no value."""
    return _evaluated(_parsed(expression), kind, look_up)


def _evaluated(node: ast.expr, kind: type, look_up: Callable[[str], Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.BinOp(op=ast.BitOr()):  # the first that is given
            first = _evaluated(node.left, kind, look_up)
            return _evaluated(node.right, kind, look_up) if first is ABSENT else first
        case ast.BinOp():
            left, right = (_evaluated(side, kind, look_up) for side in (node.left, node.right))
            return ABSENT if left is ABSENT or right is ABSENT else _OPERATORS[type(node.op)](left, right)
        case ast.UnaryOp(op=ast.Not()):
            value = _evaluated(node.operand, bool, look_up)
            return ABSENT if value is ABSENT else not value
        case ast.IfExp():
            test = _evaluated(node.test, bool, look_up)
            return ABSENT if test is ABSENT else _evaluated(node.body if test else node.orelse, kind, look_up)
        case ast.Call():
            return typed(ast.unparse(node), look_up(f"{_key(node.args[0])}.#"), kind)
        case _:
            return typed(_key(node), look_up(_key(node)), kind)


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda value, divisor: value // divisor if divisor else 0,
}


def _key(node: ast.expr) -> str:
    """Return the key that a name, an attribute or an entry of a list stands for."""
    return ast.unparse(node).replace("[", ".").replace("]", "")


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
