"""Marks that hide records or take them back into use: appended, never taken away."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, exists, func, select

from autoplan.profiler.store.schema import insert_new, marks, records

BY_CHECK = "check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Decision to hide a record, or to take it back into use: by whom, why and when."""

    key: str
    by: str
    reason: str
    at: str
    hides: bool = True


def hidden_ids() -> Select[Any]:
    """Ids of the records that are out of use: the newest word of a person counts, the check's only where none spoke."""
    hidden_at, used_at = (func.max(case((kind, _moment()))) for kind in (marks.c.hides, ~marks.c.hides))
    return select(marks.c.record_id).group_by(marks.c.record_id).having(hidden_at >= func.coalesce(used_at, ""))


def is_hidden() -> ColumnElement[bool]:
    """Tell whether a row of `records` is out of use."""
    return records.c.id.in_(hidden_ids())


def hiding_mark(connection: Connection, record_id: int, key: str) -> Mark | None:
    """The mark that hides a record."""
    found = connection.execute(
        select(marks)
        .where(marks.c.record_id == record_id, marks.c.hides, marks.c.record_id.in_(hidden_ids()))
        .order_by(_moment().desc(), marks.c.id)
        .limit(1)
    ).first()
    return Mark(key=key, by=found.by, reason=found.reason, at=found.at) if found else None


def add_marks(connection: Connection, new: Sequence[Mark]) -> int:
    """Keep marks that are not held yet, and pass over those of records that are not; how many are new."""
    ids: dict[str, int] = {}
    if keys := {mark.key for mark in new}:
        query = select(records.c.key, records.c.id).where(records.c.key.in_(keys))
        ids = {row.key: row.id for row in connection.execute(query)}
    # In order of their records, so that two writers never wait for each other.
    rows = [
        {"record_id": ids[mark.key], "hides": mark.hides, "by": mark.by, "reason": mark.reason, "at": mark.at}
        for mark in sorted(new, key=lambda mark: (ids.get(mark.key, 0), mark.at))
        if mark.key in ids
    ]
    return insert_new(connection, marks, rows) if rows else 0


def change(connection: Connection, keys: Collection[str], *, hides: bool, by: str, reason: str) -> int:
    """Hide records, or take them back into use; how many were not so before."""
    was_otherwise = ~is_hidden() if hides else is_hidden()
    found = connection.scalars(select(records.c.key).where(records.c.key.in_(keys), was_otherwise)).all()
    return add_marks(connection, [Mark(key=key, by=by, reason=reason, at=now(), hides=hides) for key in found])


def quarantine(connection: Connection, reasons: dict[str, str]) -> set[str]:
    """Hide records for the reason of each key, unless somebody has spoken; keys of those that are hidden then."""
    if not reasons:
        return set()
    own = records.c.key.in_(reasons)
    unmarked = select(records.c.key).where(own, ~exists().where(marks.c.record_id == records.c.id))
    new = [Mark(key=key, by=BY_CHECK, reason=reasons[key], at=now()) for key in connection.scalars(unmarked).all()]
    add_marks(connection, new)
    return set(connection.scalars(select(records.c.key).where(own, is_hidden())))


def now() -> str:
    """Return the time in UTC, fine enough to tell two marks of one second apart."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _moment() -> ColumnElement[str]:
    """Time from which a mark counts: the check's from the beginning, so that it never undoes what a person decided."""
    return case((marks.c.by == BY_CHECK, ""), else_=marks.c.at)
