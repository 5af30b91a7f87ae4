"""Timing database: a SQLite file of the user or a PostgreSQL database of the team."""

from __future__ import annotations

from autoplan.profiler.store.choice import ALL, Choice
from autoplan.profiler.store.chosen_timings import HostsApart
from autoplan.profiler.store.database import default_path, open_database
from autoplan.profiler.store.machines import match
from autoplan.profiler.store.marks import Mark
from autoplan.profiler.store.plausible import Finding
from autoplan.profiler.store.store import Added, Holding, Store

__all__ = [
    "ALL",
    "Added",
    "Choice",
    "Finding",
    "Holding",
    "HostsApart",
    "Mark",
    "Store",
    "default_path",
    "match",
    "open_store",
]


def open_store(url: str | None = None, *, writable: bool = True, creates: bool = True) -> Store:
    """Open the timing database at `url`: the path of a SQLite file, sqlite:///..., or postgresql://user@host/name.

    None means the environment variable AUTOPLAN_DB, or a file in the user's data folder.  A writable database is
    migrated if needed and, with `creates`, created if it is missing; otherwise it is never changed, so that a read-only
    role is enough.
    Raises an error in one line, without passwords, if the database cannot be reached, read or understood.
    """
    return Store(open_database(url, writable=writable, creates=creates))
