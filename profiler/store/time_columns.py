"""Measured times as columns: the database joins those of hundreds of thousands of records into a few long texts.

An object of Python for every value of every record takes several times as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import BigInteger, ColumnElement, Connection, Select, Text, cast, func, select

from autoplan.base.arrays import Ints
from autoplan.base.units import MOST, check_positive
from autoplan.profiler.store.rows import shape_of
from autoplan.profiler.store.schema import records
from autoplan.spec.measurement import Match, MeasuredTimes, Measurements, TimeRow
from autoplan.spec.operations import SHAPES, Operation, check_shape

# What is read of a single record.
TIMED: tuple[ColumnElement[Any], ...] = (
    *(records.c[name] for name in ("operation", "dtype", "shape", "seconds", "key", "fingerprint_id")),
    (records.c.mode != "sustained").label("is_burst"),
    (records.c.status != "ok").label("is_disturbed"),
)
# In the order of the index.  Asked for a single value of one of them, such as is_alone, SQLite would sort all rows.
_ALIKE = [records.c[name] for name in ("operation", "dtype", "is_alone", "status", "mode")]
LONGEST_S = 1e6
FS_PER_S = 1e15  # times in a text are femtoseconds, far below what any clock tells apart
LONGEST_IN_TEXT_S = 9e3  # whole femtoseconds of more do not fit into 64 bits
KEY_LENGTH = 12  # characters of a record's key, which are enough to find it

Times = dict[tuple[Operation, str], MeasuredTimes]  # by operation and type


def read_times(
    connection: Connection, levels: Mapping[int, Match], usable: Sequence[ColumnElement[bool]], unread: set[str]
) -> Times:
    """Return the times of all usable records without concurrent work of machines, which `levels` rate.

    Keys of records that this version does not understand become `unread`.
    """
    found: dict[tuple[Operation, str], list[MeasuredTimes]] = defaultdict(list)
    for number, level in levels.items():  # machine by machine, as the index has them
        of_machine = (records.c.fingerprint_id == number, *usable)
        for operation, dtype, is_alone, status, mode, *columns in connection.execute(_joined(connection, of_machine)):
            if not is_alone:
                continue
            is_burst, is_disturbed = mode != "sustained", status != "ok"
            times = _of_texts(operation, *columns, level=level, is_burst=is_burst, is_disturbed=is_disturbed)
            if times is None:
                values = (operation, dtype, is_alone, status, mode)
                alike = [column == value for column, value in zip(_ALIKE, values, strict=True)]
                rows = connection.execute(select(*TIMED).where(*of_machine, *alike))
                times = times_of_rows(rows, levels, unread).get((operation, dtype))
            if times is not None:
                found[operation, dtype].append(times)
    return {kind: first.with_more(*others) for kind, (first, *others) in found.items()}


def _joined(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """Return the query of records under some conditions: a row for all that are alike, a text for each column."""
    lengths_fs = records.c.seconds * FS_PER_S
    # SQLite writes whole numbers several times as fast as others, and those with 15 digits; it cuts, hence the half.
    written = cast(lengths_fs + 0.5, BigInteger) if connection.dialect.name == "sqlite" else lengths_fs
    texts = (
        func.aggregate_strings(records.c.shape, "\n"),
        func.aggregate_strings(cast(written, Text), " "),
        func.aggregate_strings(func.substr(records.c.key, 1, KEY_LENGTH), ""),
    )
    return select(*_ALIKE, func.count(), *texts).where(*conditions).group_by(*_ALIKE)


def _of_texts(
    operation: Operation,
    size: int,
    shapes: str,
    lengths_fs: str,
    keys: str,
    *,
    level: Match,
    is_burst: bool,
    is_disturbed: bool,
) -> MeasuredTimes | None:
    """Return the times of as many records as `size` says; None if any of them may be damaged."""
    try:
        sizes = _sizes(operation, size, shapes)
        lengths_s = np.fromstring(lengths_fs, dtype=np.float64, sep=" ") / FS_PER_S
        sources = np.frombuffer(keys.encode("ascii"), dtype=f"S{KEY_LENGTH}")
    except (ValueError, TypeError, AttributeError, DeprecationWarning):
        return None
    if sizes is None or not len(sizes) == len(lengths_s) == len(sources):
        return None
    least = [name != "window" for name in SHAPES[operation]]
    if not ((sizes >= least).all() and (lengths_s >= 1 / MOST).all() and (lengths_s <= LONGEST_IN_TEXT_S).all()):
        return None
    return MeasuredTimes(
        shapes=sizes,
        seconds=lengths_s,
        sources=sources,
        matches=np.full(size, int(level)),
        is_burst=np.full(size, is_burst),
        is_disturbed=np.full(size, is_disturbed),
    )


def _sizes(operation: Operation, num_lines: int, lines: str) -> Ints | None:
    """Return the numbers in lines such as 4096x4096x64; None if there is anything else in them."""
    num_sizes = len(SHAPES.get(operation, ()))
    text = np.frombuffer(lines.encode(), dtype=np.uint8)
    ends = np.flatnonzero((text < ord("0")) | (text > ord("9")))
    lengths = np.diff(ends, prepend=-1, append=len(text)) - 1
    if not num_sizes or len(lengths) != num_lines * num_sizes or lengths.min() < 1 or lengths.max() > 18:
        return None  # up to 18 digits fit into 64 bits
    between = np.append(text[ends], ord("\n")).reshape(num_lines, num_sizes)
    if not (between == [*[ord("x")] * (num_sizes - 1), ord("\n")]).all():
        return None
    return np.fromstring(lines.replace("\n", "x"), dtype=np.int64, sep="x").reshape(num_lines, num_sizes)


def times_of_rows(rows: Iterable[Any], levels: Mapping[int, Match], unread: set[str]) -> Times:
    """Return the times in rows of the columns `TIMED`, each checked.

    `levels` rate the machines; keys of rows that this version does not understand become `unread`.
    """
    return dict(Measurements.of_rows("", _read(rows, levels, unread)).times)


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
