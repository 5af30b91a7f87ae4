"""Types of numpy arrays by element type, their sums and distinct rows, and records of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def add_up(terms: Iterable[Floats]) -> Floats:
    """Add arrays in their order, so that a plan's sum does not depend on its batch."""
    total: Floats = np.zeros(())
    for term in terms:
        total = total + term
    return total


def distinct_rows(*columns: Ints | Bools) -> tuple[Ints, Ints]:
    """Return (indices of distinct rows, index into these for every row); columns must not be negative."""
    code, num_codes = columns[0].astype(np.int64), int(columns[0].max(initial=0)) + 1
    for column in columns[1:]:
        span = int(column.max(initial=0)) + 1
        if num_codes * span >= 2**63:  # renumber the existing codes
            code, num_codes = np.unique(code, return_inverse=True)[1], len(code)
        code, num_codes = code * span + column, num_codes * span
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


class Rows:
    """Base of dataclasses of arrays with an element, or a row, per plan; other values apply to all plans."""

    __slots__ = ()

    def take(self, rows: Ints | Bools | slice) -> Self:
        """Return the record of the plans at the given indices, or where the mask is true."""
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)  # once for all columns
        kind: Any = type(self)
        return kind(**{name: _rows_of(getattr(self, name), rows) for name in _field_names(kind)})

    @classmethod
    def concatenate(cls, records: Iterable[Self]) -> Self:
        """Join records into one, in order; values that apply to all plans are those of the first."""
        parts = list(records)
        kind: Any = cls
        return kind(**{name: _joined([getattr(part, name) for part in parts]) for name in _field_names(kind)})


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _rows_of(value: Any, rows: Ints | Bools | slice) -> Any:
    if isinstance(value, np.ndarray):
        return value.take(rows, axis=0) if isinstance(rows, np.ndarray) else value[rows]
    if isinstance(value, dict):
        return {key: _rows_of(part, rows) for key, part in value.items()}
    return value.take(rows) if isinstance(value, Rows) else value


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    return type(first).concatenate(values) if isinstance(first, Rows) else first
