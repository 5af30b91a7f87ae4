"""Options of a launch file, with a record of which ones were understood.

They are a nested table (JSON, YAML, TOML, Python), or command-line words by argument name.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autoplan.base import files
from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.frameworks.common.launch import Silent, Unread

Word = TypeVar("Word")

MOST = 10**12  # of any count in a launch file
MAX_DIGITS = 40
MAX_LEAVES = 10_000  # of a table, which anchors of YAML can blow up
# Names in an expansion; of ${TP[$TASK]} only that of the place, which is what is not known.
_VARIABLES = re.compile(r"(?:\$\{?|\[)([A-Za-z0-9_]+)(?!\w*\[[A-Za-z_$])", re.ASCII)

NOT_KNOWN, COSTS_NOTHING = "not known here", "does not affect the time or memory of a step"


def parse_json(text: str, title: str) -> dict[str, Any]:
    """Parse the table in `text`; a duplicate key is an error, as in DeepSpeed."""
    return _table(files.parse_json(text, title), title)


def parse_yaml(text: str, title: str) -> dict[str, Any]:
    """Parse the table in `text`, which may contain only plain values: tags for other objects are an error."""
    return _table(files.parse_yaml(text, title), title)


def _table(value: Any, title: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{title}: must hold one table whose keys are text, not {show(value)}")
    return value


def show(value: Any) -> str:
    """Return a value of a file for a message: one short line of printable text."""
    try:
        text = reprlib.repr(value)  # bounds what anchors of YAML can blow up
    except ValueError:  # an integer too long to print
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def whole_names(*names: str) -> re.Pattern[str]:
    """Return a pattern for whole names of options, several in a text; `*` stands for any further words of a family."""
    words = " ".join(names).split()
    return re.compile("|".join(re.escape(word).replace(r"\*", r"[\w.]*") for word in words))


def typed(value: Any) -> Any:
    """Return words that are numbers as numbers, unless they have more digits than any option takes."""
    if isinstance(value, list):
        return [typed(word) for word in value]
    if not isinstance(value, str) or len(value) > MAX_DIGITS:
        return value
    if re.fullmatch(r"-?\d+", value, re.ASCII):
        return int(value)
    return float(value) if re.fullmatch(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", value, re.ASCII) else value


@dataclass(frozen=True, slots=True)
class Unknown:
    """Unevaluated text that only running the file would evaluate: an expression or a shell variable."""

    text: str
    is_name: bool = False  # a dotted name that the file imports, such as a member of an enumeration
    remedy: str = "write its value"


@dataclass(frozen=True, slots=True)
class Argument:
    """Option as a file has it (`option`, `text`), and its name and value in the framework."""

    option: str
    text: str
    name: str
    value: Any


def _leaves(argument: Argument) -> Iterator[tuple[str, str]]:
    """Yield the options of a table, and of those in it, as written."""
    todo = [(argument.option, argument.value)]
    while todo and len(todo) < MAX_LEAVES:
        name, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{name}.{key}", item) for key, item in reversed(value.items())]
        elif value is not None:
            yield name, _text(value)


def _text(value: Any) -> str:
    return value.text if isinstance(value, Unknown) else value if isinstance(value, str) else show(value)


class Options:
    """Options of a file or table, and what was asked of them; `defaults` where it is silent, shared `remarks`."""

    def __init__(
        self,
        arguments: Iterable[Argument],
        defaults: Mapping[str, Any] | None = None,
        *,
        place: str = "",
        remarks: list[Unread] | None = None,
        way_out: str = "add it",
    ) -> None:
        self.arguments: dict[str, Argument] = {argument.name: argument for argument in arguments}
        self.defaults: dict[str, Any] = dict(defaults or {})
        self.understood: set[str] = set()
        self.remarks: list[Unread] = [] if remarks is None else remarks
        self.is_partial: bool = False  # whether a program or file that was not read may set options too
        self._place = place
        self._way_out = way_out  # where an option is missing that has no default
        self._costless: set[str] = set()
        self._inside: dict[str, Options] = {}

    @classmethod
    def of_table(cls, table: Mapping[str, Any], place: str = "", remarks: list[Unread] | None = None) -> Options:
        """Return the options of a table; those inside it are called by dotted names."""
        arguments = (Argument(f"{place}{key}", _text(value), key, value) for key, value in table.items())
        return cls(arguments, place=place, remarks=remarks)

    def name(self, key: str) -> str:
        """Return the name of an option in the file."""
        return self.arguments[key].option if key in self.arguments else f"{self._place}{key}"

    def has(self, key: str) -> bool:
        """Return whether the file gives an option a value; null is none."""
        return key in self.arguments and self.arguments[key].value is not None

    def is_null(self, key: str) -> bool:
        """Return whether the file says that an option has no value, whatever a preset says."""
        return key in self.arguments and self.arguments[key].value is None

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of an option, or its default."""
        self.understood.add(key)
        if not self.has(key):
            return default if self.is_null(key) else self.defaults.get(key, default)
        value = self.arguments[key].value
        if isinstance(value, Unknown):
            written, names = cleaned(value.text)[:60], _VARIABLES.findall(value.text)
            if not names and value.text.startswith("$(("):
                names = re.findall(r"[A-Za-z_]\w*", value.text)
            if "$" in written or "`" in written:
                remedy = f"pass --set {names[0]}=VALUE" if names else "write its value"
                raise InputError(f"{self.name(key)} is {written}, which is only known in a running shell: {remedy}")
            raise InputError(f"{self.name(key)} = {written} cannot be read: {value.remedy}")
        return value

    def inside(self, key: str) -> Options:
        """Return the table under a key; an empty one where there is none."""
        if key not in self._inside:
            table = self.arguments[key].value if self.has(key) else {}
            if not isinstance(table, dict) or not all(isinstance(item, str) for item in table):
                raise InputError(f"{self.name(key)} must be a table, got {show(table)}")
            self._inside[key] = Options.of_table(table, f"{self.name(key)}.", self.remarks)
        return self._inside[key]

    def nest(self, key: str, table: Options) -> None:
        """Take `table`, which was read apart, for the one under a key."""
        self.understood.add(key)
        self._inside[key] = table

    def optional_count(self, key: str, default: int | None = None, *, least: int = 0) -> int | None:
        """Return a whole number of at least `least`, written as such or like 5e8, or the default."""
        value = self.value(key, default)
        if not self.has(key):
            return value
        is_whole = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value.is_integer())
        if isinstance(value, bool) or not is_whole or not least <= value <= MOST:
            given = show(value) if self.arguments[key].text else "no value"
            raise InputError(f"{self.name(key)} must be a whole number of at least {least}, got {given}")
        return int(value)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of at least `least`, which must be given where there is no default."""
        value = self.optional_count(key, default, least=least)
        return self._needed(key) if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number of at least 0."""
        value = self.value(key, default)
        if value is None:
            return self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise InputError(f"{self.name(key)} must be a finite number of at least 0, got {show(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return whether a switch is on."""
        value = self.value(key, default)
        if isinstance(value, str):
            value = {"true": True, "false": False, "": True}.get(value.casefold(), value)
        if value is not None and (not isinstance(value, int) or value not in (0, 1)):
            raise InputError(f"{self.name(key)} must be true or false, got {show(value)}")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a word."""
        value = self.value(key, default)
        return None if value is None else str(value)

    def word(self, key: str, meanings: Mapping[Any, Word], default: Any = None) -> Word:
        """Return what the word, or the number, of an option means."""
        value = self.value(key, default)
        if value is None and None not in meanings:
            return self._needed(key)
        if isinstance(value, list | dict) or value not in meanings:
            expected = " or ".join(str(word) for word in meanings if word is not None)
            raise InputError(f"{self.name(key)} must be {expected}, got {show(value)}")
        return meanings[value]

    def words(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the words of a list."""
        value = self.value(key, default)
        return tuple(map(str, value)) if isinstance(value, list | tuple) else tuple(str(value).split())

    def is_other(self, key: str, *priced: Any) -> bool:
        """Return whether the file sets an option to a value that is not priced."""
        return self.value(key) not in (None, *priced)

    def pass_over(self, *keys: str) -> None:
        """Mark options that affect neither time nor memory as understood."""
        self._costless.update(keys)

    def remark(self, key: str, why: str, *, matters: bool = True, default: str = "") -> None:
        """List an option that the plan does not fully represent; `default` is its value if the file does not set it."""
        self.understood.add(key)
        text = self.arguments[key].text if self.has(key) else f"{self.defaults.get(key, default)} (its default)"
        self.remarks.append(Unread(option=self.name(key), value=text, why=why, matters=matters))

    def options(self) -> tuple[tuple[str, str], ...]:
        """Return the options that were read, as written."""
        read: list[tuple[str, str]] = []
        for key, argument in self.arguments.items():
            if key in self._inside:
                read += self._inside[key].options()
            elif key in self.understood and argument.value is not None:
                read.append((argument.option, argument.text))
        return tuple(read)

    def unread(self, harmless: re.Pattern[str] | None = None) -> tuple[Unread, ...]:
        """Return the remarks and the unused options, those that may matter first."""
        options = [*self.remarks, *self._unread(harmless)]
        return tuple(sorted(options, key=lambda unread: not unread.matters))

    def _unread(self, harmless: re.Pattern[str] | None) -> Iterable[Unread]:
        for key, argument in self.arguments.items():
            if key in self._inside:
                yield from self._inside[key]._unread(harmless)
            elif key in self._costless - self.understood:
                for name, text in _leaves(argument):
                    yield Silent(option=name, value=text, why=COSTS_NOTHING)
            elif self.has(key) and key not in self.understood:
                costs = harmless is None or harmless.fullmatch(key) is None
                why = NOT_KNOWN if costs else COSTS_NOTHING
                yield Unread(option=argument.option, value=argument.text, why=why, matters=costs)

    def _needed(self, key: str) -> Any:
        raise InputError(f"{self.name(key)} is not in the file: {self._way_out}")
