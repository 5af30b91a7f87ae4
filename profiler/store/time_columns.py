"""Rows of measured times as columns: hundreds of thousands are checked and converted at once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement

from autoplan.base.units import MOST, check_positive
from autoplan.profiler.store.rows import shape_of
from autoplan.profiler.store.schema import records
from autoplan.spec.measurement import Match, MeasuredTimes, Measurements, TimeRow
from autoplan.spec.operations import SHAPES, Operation, check_shape

# What is read of a record: flags instead of words, as for hundreds of thousands of rows every object counts.
TIMED: tuple[ColumnElement[Any], ...] = (
    *(records.c[name] for name in ("operation", "dtype", "shape", "seconds", "key", "fingerprint_id")),
    (records.c.mode != "sustained").label("is_burst"),
    (records.c.status != "ok").label("is_disturbed"),
)
LONGEST_S = 1e6
KEY_LENGTH = 12  # characters of a record's key, which are enough to find it


def measurements_of(device: str, rows: Iterable[Any], levels: Mapping[int, Match], unread: set[str]) -> Measurements:
    """Return the times in rows of the columns `TIMED`.

    `levels` rate the machines; keys of rows that this version does not understand become `unread`.
    """
    by_kind: dict[tuple[Any, Any], list[Any]] = defaultdict(list)
    for row in rows:
        by_kind[row[0], row[1]].append(row)
    times = {}
    for kind, of_kind in by_kind.items():
        columns = _columns(kind[0], of_kind, levels)
        if columns is None:
            columns = Measurements.of_rows(device, _read(of_kind, levels, unread)).times.get(kind)
        if columns is not None:
            times[kind] = columns
    return Measurements(device=device, times=times)


def _columns(operation: Operation, rows: Collection[Any], levels: Mapping[int, Match]) -> MeasuredTimes | None:
    """Return rows of one operation and type as columns; None if any of them may be damaged."""
    names = SHAPES.get(operation, ())
    # Of so many rows lists are made in a third of the time of `zip`.
    shapes, seconds, keys, numbers, bursts, disturbed = ([row[at] for row in rows] for at in range(2, len(TIMED)))
    try:
        text, lengths_s = "\n".join(shapes), np.array(seconds)
    except (TypeError, ValueError):
        return None
    # Up to 18 digits fit into 64 bits.
    line = rf"(?:[0-9]{{1,18}}x){{{len(names) - 1}}}[0-9]{{1,18}}"
    is_sound = re.fullmatch(rf"(?:{line}(?:\n|$))+", text) if names else None
    if not is_sound or lengths_s.dtype != np.float64:
        return None
    sizes = np.fromstring(text.replace("\n", "x"), dtype=np.int64, sep="x").reshape(-1, len(names))
    least = np.array([name != "window" for name in names], dtype=np.int64)
    if len(sizes) != len(lengths_s):  # a shape of several lines
        return None
    if not ((sizes >= least).all() and (lengths_s >= 1 / MOST).all() and (lengths_s <= LONGEST_S).all()):
        return None
    machines, of_machine = np.unique(numbers, return_inverse=True)
    return MeasuredTimes(
        shapes=sizes,
        seconds=lengths_s,
        sources=np.array(keys, dtype=f"<U{KEY_LENGTH}"),
        matches=np.array([int(levels[number]) for number in machines.tolist()], dtype=np.int64)[of_machine],
        is_burst=np.array(bursts, dtype=np.bool_),
        is_disturbed=np.array(disturbed, dtype=np.bool_),
    )


def _read(rows: Iterable[Any], levels: Mapping[int, Match], unread: set[str]) -> Iterator[TimeRow]:
    """Yield the times of rows one by one; keys of those that this version does not understand become `unread`."""
    for operation, dtype, shape, seconds, key, number, is_burst, is_disturbed in rows:
        try:
            sizes = shape_of(shape)
            check_shape(operation, sizes)
            check_positive("seconds", seconds, at_most=LONGEST_S)
        except (ValueError, TypeError):  # damaged: text instead of a number
            unread.add(key)
        else:
            yield (
                operation,
                dtype,
                sizes,
                seconds,
                key[:KEY_LENGTH],
                levels[number],
                bool(is_burst),
                bool(is_disturbed),
            )
