"""Rows of an option table: what an option of a launch file is called, and how its value is written and read.

A row names the field that the option means.  "tp" is a field of the plan, "model.num_layers" one of the model; exporter
and reader of a framework both go through its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from autoplan.spec.plan_file import PlanFile

Value = Any  # of an option: bool, int, float, str, a list of them; None: the option is left out
Fields = dict[str, Any]  # of a plan or a model, by their names


class Source(Protocol):
    """The options that a launch file gives; each method refuses a value that is not of its kind."""

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number, which must be given where there is no default."""

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number, or the default where none is given."""

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""

    def flag(self, key: str, default: bool = False) -> bool:
        """Return whether a switch is on."""

    def word(self, key: str, meanings: Mapping[str, Any], default: str | None = None) -> Any:
        """Return what the word of an option means."""


def always(plan_file: PlanFile) -> bool:
    """Return that an option is written for every plan."""
    return True


@dataclass(frozen=True, slots=True)
class Option:
    """An option by its `key`; `names` has what it is called in other versions or notations."""

    key: str
    _: KW_ONLY
    names: Mapping[str, str] = field(default_factory=dict)
    is_switch: bool = False

    def name(self, notation: str) -> str:
        """Return the name in a version or notation; a name that ends in a dot is the section that holds the key."""
        name = self.names.get(notation, self.key)
        return f"{name}{self.key}" if name.endswith(".") else name


@dataclass(frozen=True, slots=True)
class Row(Option):
    """An option that means one `field`, written where `when` holds; and its default."""

    field: str
    default: Any = None
    _: KW_ONLY
    when: Callable[[PlanFile], bool] = always

    def held(self, plan_file: PlanFile) -> Any:
        """Return the value of the field."""
        holder = plan_file if "." in self.field else plan_file.best.plan
        return attrgetter(self.field)(holder)

    def default_of(self, known: object | None) -> Any:
        """Return what holds where a file is silent: the field of what is `known` of the model, else the default."""
        return self.default if known is None else getattr(known, self.field.rpartition(".")[2])

    def value(self, plan_file: PlanFile) -> Value:
        """Return the value to write."""
        return self.encoded(self.held(plan_file)) if self.when(plan_file) else None

    def encoded(self, value: Any) -> Value:
        """Return the value of the field as the file has it."""
        return value

    def decoded(self, source: Source, key: str, known: object | None) -> Any:
        """Return the value of the field that the file gives under a key."""
        raise NotImplementedError

    def read(self, source: Source, known: object | None = None, notation: str = "") -> Fields:
        """Return the field with the value that the file gives."""
        return {self.field.rpartition(".")[2]: self.decoded(source, self.name(notation), known)}


@dataclass(frozen=True, slots=True)
class Count(Row):
    """A whole number; without a default it must be given."""

    def decoded(self, source: Source, key: str, known: object | None) -> Any:
        """Return the number."""
        return source.count(key, self.default_of(known))


@dataclass(frozen=True, slots=True)
class OptionalCount(Row):
    """A whole number that need not be given."""

    def decoded(self, source: Source, key: str, known: object | None) -> Any:
        """Return the number or None."""
        return source.optional_count(key, self.default_of(known))


@dataclass(frozen=True, slots=True)
class Number(Row):
    """A number, written without a point where it is whole."""

    def encoded(self, value: Any) -> Value:
        """Return the number."""
        return int(value) if float(value).is_integer() else value

    def decoded(self, source: Source, key: str, known: object | None) -> Any:
        """Return the number."""
        return source.number(key, self.default_of(known))


@dataclass(frozen=True, slots=True)
class Switch(Row):
    """A switch that turns a field from `off` to `on`; `default` is the value of the field where a file is silent."""

    default: Any = False
    _: KW_ONLY
    on: Any = True
    off: Any = False
    is_switch: bool = True

    def encoded(self, value: Any) -> Value:
        """Return whether the switch is on."""
        return value == self.on

    def decoded(self, source: Source, key: str, known: object | None) -> Any:
        """Return the value of the field."""
        return self.on if source.flag(key, self.default_of(known) == self.on) else self.off


@dataclass(frozen=True, slots=True)
class Word(Row):
    """One word of several; the first word of a meaning is the one that is written."""

    meanings: Mapping[str, Any] = field(default_factory=dict)

    def encoded(self, value: Any) -> Value:
        """Return the word."""
        return next(word for word, meaning in self.meanings.items() if meaning == value)

    def decoded(self, source: Source, key: str, known: object | None) -> Any:
        """Return the meaning of the word."""
        return source.word(key, self.meanings, self.encoded(self.default_of(known)))


def read_fields(rows: Iterable[Row], source: Source, known: object | None = None, notation: str = "") -> Fields:
    """Return the fields that some rows mean."""
    fields: Fields = {}
    for row in rows:
        fields |= row.read(source, known, notation)
    return fields
