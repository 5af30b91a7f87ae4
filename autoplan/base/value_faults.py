"""Values of a table that a dataclass refuses, with their places in the file as messages name them."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from enum import StrEnum
from functools import cache
from typing import Any

from autoplan.base.errors import InputError, OutOfRangeError
from autoplan.base.units import bare_key
from autoplan.base.values import has_unit, parse_amount, parse_count

type_hints = cache(typing.get_type_hints)  # evaluates every annotation anew


def value_faults(
    kind: type, fields: dict[str, Any], root: type, path: str, written: dict[str, tuple[str, float]]
) -> list[str]:
    """Describe all wrong values of the table at `path`, each with its place; if all are right, how they disagree."""
    faults = []
    for name, value in fields.items():
        hint, place = type_hints(kind)[name], f"{path}.{name}"
        inner, is_sequence = dataclass_inside(hint)
        if inner and isinstance(value, dict):
            faults += value_faults(inner, value, root, place, written)
        elif inner and is_sequence and isinstance(value, list) and all(isinstance(part, dict) for part in value):
            for at, part in enumerate(value):
                faults += value_faults(inner, part, root, f"{place}[{at}]", written)
        else:
            faults += _fault(value, hint, root, place, written)
    return faults or _fault(fields, kind, root, path, written)


def _fault(value: Any, hint: Any, root: type, path: str, written: dict[str, tuple[str, float]]) -> list[str]:
    """Describe what is wrong with the value at `path`; an empty list if nothing is."""
    import msgspec

    if fault := fault_of_text(value, hint, path, written):
        return [fault]
    try:
        msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError as error:
        text, _, inside = str(error).partition(" - at `")
        path += inside.removesuffix("`").removeprefix("$")
        if isinstance(error.__cause__, OutOfRangeError):
            text = _as_written(error.__cause__, path, written)
        elif text.startswith("Invalid enum value") and (words := _words_at(root, path)):
            given = text.removeprefix("Invalid enum value ")
            return [f"{path.removeprefix('$.')} must be one of {', '.join(words)}, got {given}"]
        table, dot, name = path.rpartition(".")
        return [f"{text}{place_text(f'{table}{dot}{written[path][0] if path in written else name}')}"]
    return []


def fault_of_text(value: Any, hint: Any, path: str, written: dict[str, tuple[str, float]]) -> str:
    """Describe what is wrong with the text of a number; blank if it is none."""
    if (number := number_inside(hint)) is None:
        return ""
    table, _, name = path.rpartition(".")
    key, _ = written.get(path, (name, 1.0))
    bare_unit = None if key == bare_key(name) else 1.0
    for part, text in value.items() if isinstance(value, dict) else [("", value)]:
        if isinstance(text, str):
            try:
                typed_number(text, f"{key}.{part}" if part else key, name, number, bare_unit)
            except InputError as error:
                return f"{error}{place_text(table)}"
    return ""


def typed_number(text: str, key: str, field: str, number: type, bare_unit: float | None) -> float:
    """Return the number that a file has as text: '80GB', '8k'; a number without a unit is in `bare_unit`."""
    if number is int and not has_unit(field):
        return parse_count(text, key)
    return parse_amount(text, key, field, bare_unit)


@cache
def number_inside(annotation: Any) -> type | None:
    """Return int or float for a number, one that may be left out, or a table of numbers; None for anything else."""
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType) and len(parts) == 1:
        return number_inside(parts[0])
    if origin is dict:
        return number_inside(parts[1])
    return annotation if annotation in (int, float) else None


def place_text(path: str) -> str:
    """Return the words for a place such as $.levels[0] behind a message; blank for the file as such."""
    return f" in {path.removeprefix('$.')}" if path != "$" else ""


def _words_at(kind: type, path: str) -> tuple[str, ...]:
    """Return the allowed words at a place such as $.levels[0].kind; empty if unknown."""
    annotation: Any = kind
    for name in re.sub(r"\[.*?\]", "", path).split(".")[1:]:
        inner, _ = dataclass_inside(annotation)
        annotation = type_hints(inner).get(name) if inner else None
    while annotation is not None and typing.get_origin(annotation) is not typing.Literal:
        if isinstance(annotation, type) and issubclass(annotation, StrEnum):
            return tuple(annotation)
        parts = [part for part in typing.get_args(annotation) if part not in (type(None), ...)]
        annotation = parts[0] if len(parts) == 1 else None
    return typing.get_args(annotation)


def _as_written(error: OutOfRangeError, path: str, written: dict[str, tuple[str, float]]) -> str:
    """Return the text of `error` with the key and the unit of the file."""
    field, dot, part = error.name.partition(".")
    key, factor = written.get(f"{path}.{field}", (field, 1.0))
    return str(OutOfRangeError(f"{key}{dot}{part}", error.value / factor, error.rule))


@cache
def dataclass_inside(annotation: Any) -> tuple[type | None, bool]:
    """Return (dataclass in an annotation such as X, X | None or tuple[X, ...], whether it is a sequence)."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return annotation, False
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            inside = dataclass_inside(part)
            if inside[0]:
                return inside
    if origin is tuple:
        return dataclass_inside(typing.get_args(annotation)[0])[0], True
    return None, False
