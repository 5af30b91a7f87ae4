"""SQLite files that other profilers write: how they are opened, what is in them, and times in nanoseconds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from autoplan.base.errors import InputError
from autoplan.base.files import is_file
from autoplan.base.units import cleaned
from autoplan.profiler.imports.kineto import MAX_OBJECTS, MAX_S, Span

MAGIC = b"SQLite format 3\0"


def names_in(path: Path) -> set[str]:
    """Return the names of tables and views in a file; none if it is no SQLite file, or cannot be read."""
    if not is_file(path):
        return set()
    try:
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                return set()
        with closing(_opened(path)) as database:
            return table_names(database)
    except (OSError, sqlite3.Error, UnicodeDecodeError):  # the last where a message quotes a damaged file
        return set()


@contextmanager
def reading(path: Path, *, what: str) -> Iterator[sqlite3.Connection]:
    """Open a file for reading; its errors become one line, which says `what` it should be."""
    try:
        with closing(_opened(path)) as database:
            yield database
    except sqlite3.Error as error:
        raise InputError(f"{path}: no {what}: {cleaned(str(error))}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: no {what}: the file is damaged") from None
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{path}: an event has no time in nanoseconds, or none that can be") from None


def table_names(database: sqlite3.Connection) -> set[str]:
    """Return the names of tables and views."""
    query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
    return {str(name) for (name,) in database.execute(query)}


def columns_of(database: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of the columns of a table or view."""
    return {str(row[1]) for row in database.execute(f"PRAGMA table_info({table})")}


def span_of(start_ns: Any, end_ns: Any, name: Any) -> Span:
    """Return what ran between two times; raises ValueError or TypeError if these are none."""
    start_s, end_s = float(start_ns) * 1e-9, float(end_ns) * 1e-9
    if not abs(start_s) < MAX_S or not abs(end_s) < MAX_S:  # also true for NaN
        raise ValueError
    return Span(start_s, end_s, name if isinstance(name, str) else "")


def check_number(path: Path, num_spans: int) -> None:
    """Refuse a file with too many kernels and copies to keep in memory."""
    if num_spans > MAX_OBJECTS:
        raise InputError(f"{path}: more than {MAX_OBJECTS:,} kernels and copies: trace fewer steps")


def _opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    database.text_factory = partial(str, encoding="utf-8", errors="replace")  # a damaged name is one more unknown name
    return database
