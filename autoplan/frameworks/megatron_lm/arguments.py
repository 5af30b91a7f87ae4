"""Arguments of Megatron-LM that a launch file gives, by their parsed names (d98e8a6).

Primus takes the arguments by these names; readers of other formats translate into them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.frameworks.common.launch import Unread
from autoplan.frameworks.common.option_table import Value
from autoplan.frameworks.common.shell import is_open

MOST_DIGITS = 40


def is_number(word: str) -> bool:
    """Return whether a word is a number."""
    return re.fullmatch(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", word, re.ASCII) is not None


def typed(value: Value) -> Value:
    """Return words that are numbers as numbers, unless they have more digits than any option takes."""
    if isinstance(value, list):
        return [typed(word) for word in value]
    if not isinstance(value, str) or len(value) > MOST_DIGITS or not is_number(value):
        return value
    return int(value) if re.fullmatch(r"-?\d+", value, re.ASCII) else float(value)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its option and value as a file has them, its name and its value in Megatron-LM."""

    option: str
    text: str
    name: str
    value: Value


class Arguments:
    """The arguments of a file by name; they remember which were read.  `defaults` hold where the file is silent."""

    def __init__(self, given: Iterable[Argument], defaults: Mapping[str, Value] | None = None) -> None:
        self.given: dict[str, Argument] = {argument.name: argument for argument in given}
        self.defaults: dict[str, Value] = dict(defaults or {})
        self.understood: set[str] = set()
        self.remarks: list[Unread] = []

    def value(self, key: str, default: Value = None) -> Value:
        """Return the value of an argument, or what holds where the file is silent."""
        self.understood.add(key)
        argument = self.given.get(key)
        if argument is None:
            return self.defaults.get(key, default)
        if isinstance(argument.value, str) and is_open(argument.value):
            names = re.findall(r"\$\{?([A-Za-z0-9_]+)", argument.value)
            way = f"pass --set {names[0]}=VALUE" if names else "write its value"
            value = cleaned(argument.value)[:60]
            raise InputError(f"{argument.option} is {value}, which only a running shell knows: {way}")
        return argument.value

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number, or the default."""
        value = self.value(key, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, str) and re.fullmatch(r"\d{1,12}", value.strip(), re.ASCII):
            return int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 10**12:
            return int(value)
        raise InputError(f"{self.option_of(key)} must be a whole number, got {str(value)[:60]!r}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number, which must be given where there is no default."""
        value = self.optional_count(key, default)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{self.option_of(key)} is not in the file: pass --model")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of any size."""
        value = self.value(key, default)
        if isinstance(value, str) and is_number(value):
            return float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise InputError(f"{self.option_of(key)} must be a number, got {str(value)[:60]!r}")

    def flag(self, key: str, default: bool = False) -> bool:
        """Return whether a switch is on; a word behind one is not its value."""
        value = self.value(key, default)
        if isinstance(value, str) and value.casefold() in ("true", "false", "1", "0", ""):
            return value.casefold() in ("true", "1", "")
        if value is None or isinstance(value, (bool, int)):
            return bool(value)
        raise InputError(f"{self.option_of(key)} is a switch, got {str(value)[:60]!r}")

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a word."""
        value = self.value(key, default)
        return None if value is None else str(value)

    def word(self, key: str, meanings: Mapping[str, Any], default: str | None = None) -> Any:
        """Return what a word means; one that is not known means what the default does."""
        return meanings.get(self.text(key, default) or "", meanings.get(default or ""))

    def words(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the words of a list."""
        value = self.value(key, default)
        if value is None:
            return default
        return tuple(str(word) for word in value) if isinstance(value, (list, tuple)) else tuple(str(value).split())

    def option_of(self, key: str) -> str:
        """Return the name that the file has for an argument."""
        return self.given[key].option if key in self.given else key

    def remark(self, key: str, why: str, *, matters: bool = True, default: str = "") -> None:
        """List an option that the plan does not hold in full."""
        argument = self.given.get(key)
        self.understood.add(key)
        text = argument.text if argument else f"{self.defaults.get(key, default)} (its default)"
        self.remarks.append(Unread(option=argument.option if argument else key, value=text, why=why, matters=matters))

    def options(self) -> tuple[tuple[str, str], ...]:
        """Return the options that were read, as written."""
        return tuple((argument.option, argument.text) for key, argument in self.given.items() if key in self.understood)

    def unread(self, harmless: re.Pattern[str]) -> tuple[Unread, ...]:
        """Return the remarks and the options that nobody read, those that may cost something first."""
        rest = []
        for key, argument in self.given.items():
            if key not in self.understood:
                costs = harmless.match(key) is None
                why = "not known here" if costs else "costs neither time nor memory of a step"
                rest.append(Unread(option=argument.option, value=argument.text, why=why, matters=costs))
        return tuple(sorted([*self.remarks, *rest], key=lambda unread: not unread.matters))
