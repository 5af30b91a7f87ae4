"""Rows of a CSV table, every cell under its column."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import read_text

MAX_BYTES = 2**30  # per table: some millions of rows
BLANKS = ("", "?")


def read_rows(path: Path, kind: str, needed: Sequence[str]) -> Iterator[dict[str, str]]:
    """Read the rows of a table of `kind` in order, with all columns, which must include the `needed` ones, `id` first.

    A row with more or fewer cells than columns is an error, as a missing quote or an incomplete copy makes the columns
    of cells unknown.  So is a duplicate id, as tables are joined by it.
    """
    text = read_text(path, most_bytes=MAX_BYTES).removeprefix("\ufeff")  # the byte order mark of spreadsheets
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        columns = next(reader, [])
        if missing := [name for name in needed if name not in columns]:
            raise InputError(
                f"{path}: not a table of {kind}: it needs the columns {', '.join(needed)} in its first line, separated "
                f"by commas; it lacks {', '.join(missing)}"
            )
        if len(set(columns)) < len(columns):
            double = next(name for name in columns if columns.count(name) > 1)
            raise InputError(f"{path}: column {double[:40]!r} stands twice in its first line")
        ids = set[str]()
        for cells in filter(None, reader):  # blank lines have no cells
            if len(cells) != len(columns):
                raise InputError(
                    f"{path}: the row that ends in line {reader.line_num} has {len(cells)} cells, the first line has "
                    f"{len(columns)} columns: a quote is missing, or the file was not copied whole"
                )
            row = dict(zip(columns, cells, strict=True))
            if row["id"] in ids:
                raise InputError(f"{path}: id {row['id'][:40]!r} stands twice: give every run one of its own")
            ids.add(row["id"])
            yield row
    except csv.Error as error:
        raise InputError(f"{path}: not a CSV table: {error} (line {reader.line_num + 1})") from None


def positive(path: Path, row: dict[str, str], column: str) -> float | None:
    """Return the positive number in a cell of a row; None if it is blank or there is no such column."""
    text = row.get(column, "").strip()
    if text in BLANKS:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{path}: {column} of {row['id'][:40]} is no positive number: {text[:40]!r}")
    return value
