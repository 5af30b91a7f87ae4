"""Rows of an option table: the name of an option in a launch file, and how its value is written and read.

A row names the field that the option sets: "tp" is a field of the plan, "model.num_layers" one of the model.  Exporter
and reader of a framework share the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.options import Options
from autoplan.spec.plan_file import PlanFile

Value = Any  # of an option: bool, int, float, str, a list of them; None: the option is left out
Fields = dict[str, Any]  # of a plan or a model, by their names


@dataclass(frozen=True, slots=True)
class Option:
    """An option by its `key`; `names` has its names in other versions or notations."""

    key: str
    _: KW_ONLY
    names: Mapping[str, str] = field(default_factory=dict)
    is_switch: bool = False
    is_on: bool = False  # a switch that is on unless a file turns it off

    def name(self, notation: str) -> str:
        """Return the name in a version or notation; a name that ends in a dot is the section that holds the key."""
        name = self.names.get(notation, self.key)
        return f"{name}{self.key}" if name.endswith(".") else name


@dataclass(frozen=True, slots=True)
class Row(Option):
    """An option that means one `field`: its default, when it is written, and how a value is written and read."""

    field: str
    default: Any = None
    _: KW_ONLY
    when: Callable[[PlanFile], bool] | None = None
    encode: Callable[[Any], Value] | None = None
    decode: Callable[[Options, str, Any], Any]  # the value of the field under a key, which has this default

    def value(self, plan_file: PlanFile) -> Value:
        """Return the value to write."""
        if self.when is not None and not self.when(plan_file):
            return None
        value = attrgetter(self.field)(plan_file if "." in self.field else plan_file.best.plan)
        return value if self.encode is None else self.encode(value)

    def of(self, source: Options) -> Any:
        """Return the value of the field that a file gives, else the default."""
        return self.decode(source, self.key, self.default)

    def read(self, source: Options, base: object | None = None) -> Fields:
        """Return the field with the value that a file gives, that of `base` where the file is silent."""
        name = self.field.rpartition(".")[2]
        is_silent = base is not None and not source.is_null(self.key)
        return {name: self.decode(source, self.key, getattr(base, name) if is_silent else self.default)}


@dataclass(frozen=True, slots=True)
class Constant(Option):
    """An option that is written but affects neither time nor memory when read."""

    write: Value | Callable[[PlanFile], Value] = None


@dataclass(frozen=True, slots=True)
class Assumed(Option):
    """An option that no plan has: priced as if it had one of `values` (any, where there are none), else `why`."""

    values: tuple[Value, ...] = ()
    why: str = ""
    write: Value | Callable[[PlanFile], Value] = None


def count(key: str, field: str, default: int | None = None, **extra: Any) -> Row:
    """Return a row for a whole number, required unless it has a default."""
    least = 0 if default == 0 else 1
    return Row(key, field, default, decode=lambda source, name, base: source.count(name, base, least=least), **extra)


def optional_count(key: str, field: str, **extra: Any) -> Row:
    """Return a row for an optional whole number."""
    return Row(key, field, decode=lambda source, name, base: source.optional_count(name, base), **extra)


def number(key: str, field: str, default: float | None = None, **extra: Any) -> Row:
    """Return a row of a number, which is written without a point where it is whole."""

    def encoded(value: float) -> float:
        return int(value) if float(value).is_integer() else value

    extra = {"encode": encoded} | extra
    return Row(key, field, default, decode=lambda source, name, base: source.number(name, base), **extra)


def switch(key: str, field: str, default: Any = False, *, on: Any = True, off: Any = False, **extra: Any) -> Row:
    """Return a row of a switch that turns a field from `off` to `on`."""

    def decoded(source: Options, name: str, base: Any) -> Any:
        return on if source.flag(name, base == on) else off

    extra = {"is_switch": True, "is_on": default == on, "encode": lambda value: value == on} | extra
    return Row(key, field, default, decode=decoded, **extra)


def word(key: str, field: str, default: Any, meanings: Mapping[Any, Any], **extra: Any) -> Row:
    """Return a row of one word, or number, of several; the first word of a meaning is the one that is written."""
    words = {meaning: text for text, meaning in reversed(list(meanings.items()))}

    def decoded(source: Options, name: str, base: Any) -> Any:
        return source.word(name, meanings, words.get(base))

    return Row(key, field, default, encode=words.__getitem__, decode=decoded, **extra)


def read_percent(source: Options, key: str) -> int:
    """Return a fraction, by default 1, in whole percent; others are rounded, with a remark."""
    fraction = source.number(key, 1.0)
    if fraction > 1.0:
        raise InputError(f"{source.name(key)} must be between 0 and 1, got {fraction:g}")
    percent = round(100.0 * fraction)
    if abs(100.0 * fraction - percent) > 1e-9:
        source.remark(key, f"priced as {percent} %")
    return percent


def written(options: Iterable[Option], plan_file: PlanFile) -> dict[str, Value]:
    """Return the table written by options, without those that have no value."""
    values: dict[str, Value] = {}
    for option in options:
        if isinstance(option, Row):
            values[option.key] = option.value(plan_file)
        elif isinstance(option, Constant | Assumed):
            values[option.key] = option.write(plan_file) if callable(option.write) else option.write
    return {key: value for key, value in values.items() if value is not None}


def read_fields(rows: Iterable[Row], source: Options, base: object | None = None) -> Fields:
    """Return the fields set by some rows."""
    return {name: value for row in rows for name, value in row.read(source, base).items()}


def remark_assumed(table: Iterable[Option], options: Options) -> None:
    """Remark options that no plan has where the cost model does not know what their value does."""
    for option in table:
        if isinstance(option, Assumed) and options.has(option.key):
            is_told = any(remark.option == options.name(option.key) for remark in options.remarks)
            if option.values and options.arguments[option.key].value not in option.values and not is_told:
                options.remark(option.key, option.why)
            options.understood.add(option.key)
