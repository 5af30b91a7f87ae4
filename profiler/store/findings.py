"""Rows of the timing database that cannot be right, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from autoplan.base.errors import InputError
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store.plausible import implausible


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A record that cannot be right, and why."""

    key: str
    what: str
    reason: str


def findings_in(
    row: Row[Any], machine: Fingerprint, read: Callable[[Row[Any], Fingerprint], Record | RunRecord], what: str
) -> Iterator[Finding]:
    """Yield what is wrong with a row: it cannot be read, is not what its key says, or is implausible."""
    try:
        entry = read(row, machine)
    except InputError as error:
        yield Finding(key=row.key, what=what, reason=str(error))
        return
    if entry.key != row.key:
        yield Finding(key=row.key, what=what, reason="was changed in the database: its content has another key")
    elif isinstance(entry, Record) and (finding := finding_of(row.key, entry)):
        yield finding


def finding_of(key: str, record: Record) -> Finding | None:
    """Return why a record is implausible; None where it is not."""
    reason = implausible(record)
    words = f"{record.operation} {'x'.join(map(str, record.shape))} {record.dtype}"
    return Finding(key=key, what=words, reason=reason) if reason else None
