"""Typed cells of one row in a table of runs."""

from __future__ import annotations

import math

from autoplan.base.errors import InputError, UnpricedError
from autoplan.base.values import parse_count
from autoplan.runs.table import BLANKS

MAX_DEGREE = 10**6
SHORT = tuple("kKmM")  # 8k is 8,192


class Row:
    """Typed access to the cells of one row; records which defaults were used."""

    def __init__(self, cells: dict[str, str]) -> None:
        self._cells = cells
        self.filled: list[str] = []

    def text(self, column: str, default: str | None = None) -> str:
        """Return a cell, or the default if it is blank; UnpricedError if there is no default."""
        value = self._cells.get(column, "").strip()
        if value not in BLANKS:
            return value
        if default is None:
            raise UnpricedError(f"{column} is blank")
        self.filled.append(f"{column}={default}")
        return default

    def options(self) -> dict[str, str]:
        """Options of the row's recipe by name: "ep_overlap=1; dispatcher=deepep"."""
        pairs = (part.partition("=") for part in self._cells.get("options", "").split(";"))
        return {name.strip(): value.strip() for name, sign, value in pairs if sign}

    def option(self, name: str, default: bool) -> bool:
        """Return an option of the recipe that is 0 or 1."""
        value = self.options().get(name, str(int(default)))
        if value not in ("0", "1"):
            raise UnpricedError(f"option {name} is neither 0 nor 1: {value[:40]!r}")
        return value == "1"

    def has(self, column: str) -> bool:
        """Return whether a cell is not blank."""
        return self._cells.get(column, "").strip() not in BLANKS

    def integer(self, column: str, default: int | None = None, *, at_least: int = 0, at_most: int = 10**9) -> int:
        """Return a cell that is a whole number in these bounds."""
        text = self.text(column, None if default is None else str(default))
        try:
            number = float(parse_count(text, column) if text[-1:] in SHORT else text)
        except (ValueError, InputError):
            raise UnpricedError(f"{column} is not a number: {text[:40]!r}") from None
        if not math.isfinite(number) or number != int(number) or number < 0:
            raise UnpricedError(f"{column} is not a count: {text[:40]}")
        if not at_least <= number <= at_most:
            raise UnpricedError(f"{column} must be between {at_least} and {at_most}, got {text[:40]}")
        return int(number)

    def degree(self, column: str, default: int | None = None) -> int:
        """Return a cell that is a parallel degree."""
        return self.integer(column, default, at_least=1, at_most=MAX_DEGREE)

    def flag(self, column: str, default: bool) -> bool:
        """Return a cell that is 0 or 1."""
        return self.integer(column, int(default), at_most=1) == 1

    def number(self, column: str) -> float:
        """Return a cell that is a positive number."""
        try:
            value = float(self.text(column))
        except ValueError:
            raise UnpricedError(f"{column} is not a number: {self.text(column)[:40]!r}") from None
        if not (math.isfinite(value) and value > 0):
            raise UnpricedError(f"{column} is not a positive number: {self.text(column)[:40]}")
        return value

    def word(self, column: str, allowed: tuple[str, ...], default: str) -> str:
        """Return a cell that is one of the allowed words."""
        text = self.text(column, default)
        if text not in allowed:
            raise UnpricedError(f"{column} {text[:40]!r} is not one of {', '.join(allowed)}")
        return text
