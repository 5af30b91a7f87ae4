"""Options in a nested table of a launch file, with a record of those that were understood and those that were not."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Unread

Word = TypeVar("Word")

MOST = 10**12  # of any count in a launch file


def parse_json(text: str, what: str) -> dict[str, Any]:
    """The table in `text`; a key that is given twice is refused, as DeepSpeed does."""
    try:
        table = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise InputError(f"{what}: not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise InputError(f"{what}: nested too deeply") from None
    except ValueError as error:  # an integer too long to convert
        raise InputError(f"{what}: {_one_line(error)}") from None
    return _table(table, what)


def parse_yaml(text: str, what: str) -> dict[str, Any]:
    """The table in `text`, of plain values alone: a tag that would make another object is refused."""
    import yaml

    try:
        return _table(yaml.safe_load(text), what)  # in Python, which bounds the depth; libyaml does not
    except yaml.YAMLError as error:
        raise InputError(f"{what}: not valid YAML: {_one_line(error)}") from None
    except RecursionError:
        raise InputError(f"{what}: nested too deeply") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:  # such as the date 2026-99-99
        raise InputError(f"{what}: not valid YAML: {_one_line(error)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise InputError(f"key {show(next(key for key in keys if keys.count(key) > 1))} is given twice")
    return table


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{what}: must hold one table whose keys are text, not {show(value)}")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def show(value: Any) -> str:
    """A value of a file in a message: one short line of printable text."""
    try:
        text = reprlib.repr(value)  # bounds what anchors of YAML can blow up
    except ValueError:  # an integer too long to print
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


class Options:
    """One table of a launch file and the tables inside; knows by dotted name what was asked for and what was not."""

    def __init__(self, table: Mapping[str, Any], place: str = "", root: Options | None = None) -> None:
        self._values = table
        self._place = place
        self._root = root or self
        self._asked: set[str] = set()
        self._inside: dict[str, Options] = {}
        self.read: list[tuple[str, str]] = []  # what was asked for and stands there; of the root, all of it

    def name(self, key: str) -> str:
        """The dotted name of an option of this table."""
        return f"{self._place}{key}"

    def has(self, key: str) -> bool:
        """Return whether the option has a value; null is none."""
        return self._values.get(key) is not None

    def names(self) -> tuple[str, ...]:
        """Return the names of the options that stand there."""
        return tuple(self._values)

    def value(self, key: str) -> Any:
        """The value of an option as it stands there, None where it has none."""
        self._asked.add(key)
        found = self._values.get(key)
        if found is not None:
            self._root.read.append((self.name(key), self.shown(key)))
        return found

    def shown(self, key: str) -> str:
        """The value of an option as it stands in a message."""
        found = self._values.get(key)
        return found if isinstance(found, str) else show(found)

    def inside(self, key: str) -> Options:
        """The table under a key; an empty one where there is none."""
        if key in self._inside:
            return self._inside[key]
        self._asked.add(key)
        found = self._values.get(key)
        if found is None:
            found = {}
        if not isinstance(found, dict) or not all(isinstance(item, str) for item in found):
            raise InputError(f"{self.name(key)} must be a table, got {show(found)}")
        self._inside[key] = Options(found, f"{self.name(key)}.", self._root)
        return self._inside[key]

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`, written as such or like 5e8; needed where there is no default."""
        found = self.value(key)
        if found is None:
            return self._default(key, default)
        whole = isinstance(found, int) or (isinstance(found, float) and math.isfinite(found) and found.is_integer())
        if isinstance(found, bool) or not whole or not least <= found <= MOST:
            raise InputError(f"{self.name(key)} must be a whole number of at least {least}, got {show(found)}")
        return int(found)

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number of at least one, or the default where the option has no value."""
        return self.count(key) if self.has(key) else default

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        found = self.value(key)
        if found is None:
            return self._default(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e18:
            raise InputError(f"{self.name(key)} must be a positive finite number, got {show(found)}")
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise InputError(f"{self.name(key)} must be true or false, got {show(found)}")
        return found

    def word(self, key: str, meanings: Mapping[str, Word], default: str | None = None) -> Word:
        """Return the meaning of the word under a key."""
        found = self.value(key)
        if found is None:
            found = self._default(key, default)
        if not isinstance(found, str) or found not in meanings:
            raise InputError(f"{self.name(key)} must be {' or '.join(meanings)}, got {show(found)}")
        return meanings[found]

    def known(self, *keys: str) -> None:
        """Mark these options as understood: they change neither time nor memory."""
        self._asked.update(keys)

    def left(self, why: str) -> tuple[Unread, ...]:
        """Return the options that nobody asked for, in this table and those that were taken out of it."""
        here = [key for key, value in self._values.items() if value is not None and key not in self._asked]
        own = tuple(Unread(option=self.name(key), value=self.shown(key), why=why) for key in here)
        return own + tuple(item for inside in self._inside.values() for item in inside.left(why))

    def _default(self, key: str, default: Word | None) -> Word:
        if default is None:
            raise InputError(f"{self.name(key)} is missing")
        return default
