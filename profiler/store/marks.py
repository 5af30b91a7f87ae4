"""Reviews that hide or approve records: append-only.  Records without a review by a person are proposed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, case, exists, func, select

from autoplan.base.errors import InputError
from autoplan.profiler.record import check_text, is_timestamp
from autoplan.profiler.store.schema import insert_new, marks, records, run_marks, runs

BY_CHECK = "check"
# Proposed: in use without a review by a person; approved: by a person; hidden: by a person, or only by the check.
Review = Literal["proposed", "approved", "hidden"]
REVIEWS: tuple[Review, ...] = get_args(Review)


@dataclass(frozen=True, slots=True)
class Marked:
    """A table whose rows can be hidden, and the table of its marks."""

    rows: Table
    marks: Table


OPERATIONS, RUNS = Marked(records, marks), Marked(runs, run_marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Decision to hide or approve a record or run, with author, reason and time."""

    key: str
    by: str
    reason: str
    at: str
    hides: bool = True

    def __post_init__(self) -> None:
        for text in (self.by, self.reason):
            check_text("a mark", text)
        if not re.fullmatch("[0-9a-f]{64}", self.key) or not is_timestamp(self.at):
            raise InputError(f"a mark of {self.key[:70]!r} at {self.at!r}: it needs a whole key, and ISO 8601 in UTC")


def hidden_ids(kind: Marked = OPERATIONS) -> Select[Any]:
    """Select the ids of hidden rows: the newest mark of a person counts, or else the automatic check's."""
    hidden_at, used_at = _mark_times(kind)
    return _marked_ids(kind).having(hidden_at >= func.coalesce(used_at, ""))


def approved_ids(kind: Marked = OPERATIONS) -> Select[Any]:
    """Select the ids of rows approved by the newest mark of a person."""
    hidden_at, used_at = _mark_times(kind)
    return _marked_ids(kind).having(used_at > func.coalesce(hidden_at, ""))


def _mark_times(kind: Marked) -> tuple[ColumnElement[str], ColumnElement[str]]:
    """Return the times when a row was last hidden, and last approved."""
    hides = kind.marks.c.hides
    hidden_at, used_at = (func.max(case((is_so, _mark_time(kind)))) for is_so in (hides, ~hides))
    return hidden_at, used_at


def _marked_ids(kind: Marked) -> Select[Any]:
    return select(kind.marks.c.record_id).group_by(kind.marks.c.record_id)


def is_reviewed(review: Review, kind: Marked = OPERATIONS) -> ColumnElement[bool]:
    """Return whether a row is proposed, approved or hidden."""
    of_id = kind.rows.c.id
    if review == "proposed":
        return and_(of_id.not_in(hidden_ids(kind)), of_id.not_in(approved_ids(kind)))
    return of_id.in_(hidden_ids(kind) if review == "hidden" else approved_ids(kind))


def is_hidden(kind: Marked = OPERATIONS) -> ColumnElement[bool]:
    """Return whether a row is hidden."""
    return kind.rows.c.id.in_(hidden_ids(kind))


def marks_of(connection: Connection, kind: Marked, row_id: int, key: str) -> list[Mark]:
    """Return the marks of a row, the newest first."""
    table = kind.marks
    query = select(table).where(table.c.record_id == row_id).order_by(_mark_time(kind).desc(), table.c.hides.desc())
    return [
        Mark(key=key, by=row.by, reason=row.reason, at=row.at, hides=row.hides) for row in connection.execute(query)
    ]


def add_marks(connection: Connection, kind: Marked, new: Sequence[Mark]) -> int:
    """Add the marks that are missing, except for those on unknown rows; return how many were added."""
    ids: dict[str, int] = {}
    if keys := {mark.key for mark in new}:
        query = select(kind.rows.c.key, kind.rows.c.id).where(kind.rows.c.key.in_(keys))
        ids = {row.key: row.id for row in connection.execute(query)}
    # In the order of rows, so that two writers never deadlock.
    rows = [
        {"record_id": ids[mark.key], "hides": mark.hides, "by": mark.by, "reason": mark.reason, "at": mark.at}
        for mark in sorted(new, key=lambda mark: (ids.get(mark.key, 0), mark.at))
        if mark.key in ids
    ]
    return insert_new(connection, kind.marks, rows) if rows else 0


def change(connection: Connection, kind: Marked, keys: Collection[str], *, hides: bool, by: str, reason: str) -> int:
    """Hide or approve rows; return how many changed."""
    was_otherwise = ~is_reviewed("hidden" if hides else "approved", kind)
    changed_keys = connection.scalars(select(kind.rows.c.key).where(kind.rows.c.key.in_(keys), was_otherwise)).all()
    return add_marks(
        connection, kind, [Mark(key=key, by=by, reason=reason, at=now(), hides=hides) for key in changed_keys]
    )


def quarantine(connection: Connection, reasons: dict[str, str]) -> set[str]:
    """Hide records without a mark, with the reason of each key; return the keys of all hidden ones."""
    if not reasons:
        return set()
    has_reason = records.c.key.in_(reasons)
    unmarked = select(records.c.key).where(has_reason, ~exists().where(marks.c.record_id == records.c.id))
    new = [Mark(key=key, by=BY_CHECK, reason=reasons[key], at=now()) for key in connection.scalars(unmarked).all()]
    add_marks(connection, OPERATIONS, new)
    return set(connection.scalars(select(records.c.key).where(has_reason, is_hidden())))


def now() -> str:
    """Return the time in UTC, fine enough to distinguish two marks in the same second."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _mark_time(kind: Marked) -> ColumnElement[str]:
    """Return the time from which a mark counts: for the check the beginning, so that it never overrides a person."""
    return case((kind.marks.c.by == BY_CHECK, ""), else_=kind.marks.c.at)
