"""Marks that hide or approve records: appended, never taken away.  What no person has spoken of is proposed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, case, exists, func, select

from autoplan.base.errors import InputError
from autoplan.profiler.record import check_text, is_moment
from autoplan.profiler.store.schema import insert_new, marks, records, run_marks, runs

BY_CHECK = "check"
# Proposed: in use, and no person has said a word; approved: by a person; hidden: by a person, or by the check alone.
Review = Literal["proposed", "approved", "hidden"]
REVIEWS: tuple[Review, ...] = get_args(Review)


@dataclass(frozen=True, slots=True)
class Marked:
    """A table whose rows can be hidden, and that of its marks."""

    rows: Table
    marks: Table


OPERATIONS, RUNS = Marked(records, marks), Marked(runs, run_marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Decision to hide a record of an operation or a run, or to approve it: by whom, why and when."""

    key: str
    by: str
    reason: str
    at: str
    hides: bool = True

    def __post_init__(self) -> None:
        for text in (self.by, self.reason):
            check_text("a mark", text)
        if not re.fullmatch("[0-9a-f]{64}", self.key) or not is_moment(self.at):
            raise InputError(f"a mark of {self.key[:70]!r} at {self.at!r}: it needs a whole key, and ISO 8601 in UTC")


def hidden_ids(of: Marked = OPERATIONS) -> Select[Any]:
    """Ids of the rows that are out of use: the newest word of a person counts, the check's only where none spoke."""
    hidden_at, used_at = _moments(of)
    return _marked_ids(of).having(hidden_at >= func.coalesce(used_at, ""))


def approved_ids(of: Marked = OPERATIONS) -> Select[Any]:
    """Ids of the rows of which the newest word of a person is that they may be used."""
    hidden_at, used_at = _moments(of)
    return _marked_ids(of).having(used_at > func.coalesce(hidden_at, ""))


def _moments(of: Marked) -> tuple[ColumnElement[str], ColumnElement[str]]:
    """Return when a row was last hidden, and last approved."""
    hidden_at, used_at = (func.max(case((kind, _moment(of)))) for kind in (of.marks.c.hides, ~of.marks.c.hides))
    return hidden_at, used_at


def _marked_ids(of: Marked) -> Select[Any]:
    return select(of.marks.c.record_id).group_by(of.marks.c.record_id)


def is_reviewed(review: Review, of: Marked = OPERATIONS) -> ColumnElement[bool]:
    """Tell whether a row is proposed, approved or hidden."""
    of_id = of.rows.c.id
    if review == "proposed":
        return and_(of_id.not_in(hidden_ids(of)), of_id.not_in(approved_ids(of)))
    return of_id.in_(hidden_ids(of) if review == "hidden" else approved_ids(of))


def is_hidden(of: Marked = OPERATIONS) -> ColumnElement[bool]:
    """Tell whether a row is out of use."""
    return of.rows.c.id.in_(hidden_ids(of))


def marks_of(connection: Connection, of: Marked, row_id: int, key: str) -> list[Mark]:
    """All that was said of a row, the newest word first."""
    query = select(of.marks).where(of.marks.c.record_id == row_id).order_by(_moment(of).desc(), of.marks.c.hides.desc())
    return [
        Mark(key=key, by=row.by, reason=row.reason, at=row.at, hides=row.hides) for row in connection.execute(query)
    ]


def add_marks(connection: Connection, of: Marked, new: Sequence[Mark]) -> int:
    """Keep marks that are not held yet, and pass over those of rows that are not; how many are new."""
    ids: dict[str, int] = {}
    if keys := {mark.key for mark in new}:
        query = select(of.rows.c.key, of.rows.c.id).where(of.rows.c.key.in_(keys))
        ids = {row.key: row.id for row in connection.execute(query)}
    # In order of their rows, so that two writers never wait for each other.
    rows = [
        {"record_id": ids[mark.key], "hides": mark.hides, "by": mark.by, "reason": mark.reason, "at": mark.at}
        for mark in sorted(new, key=lambda mark: (ids.get(mark.key, 0), mark.at))
        if mark.key in ids
    ]
    return insert_new(connection, of.marks, rows) if rows else 0


def change(connection: Connection, of: Marked, keys: Collection[str], *, hides: bool, by: str, reason: str) -> int:
    """Hide rows, or approve them; how many were not so before."""
    was_otherwise = ~is_reviewed("hidden" if hides else "approved", of)
    changed_keys = connection.scalars(select(of.rows.c.key).where(of.rows.c.key.in_(keys), was_otherwise)).all()
    return add_marks(
        connection, of, [Mark(key=key, by=by, reason=reason, at=now(), hides=hides) for key in changed_keys]
    )


def quarantine(connection: Connection, reasons: dict[str, str]) -> set[str]:
    """Hide records for the reason of each key, unless somebody has spoken; keys of those that are hidden then."""
    if not reasons:
        return set()
    has_reason = records.c.key.in_(reasons)
    unmarked = select(records.c.key).where(has_reason, ~exists().where(marks.c.record_id == records.c.id))
    new = [Mark(key=key, by=BY_CHECK, reason=reasons[key], at=now()) for key in connection.scalars(unmarked).all()]
    add_marks(connection, OPERATIONS, new)
    return set(connection.scalars(select(records.c.key).where(has_reason, is_hidden())))


def now() -> str:
    """Return the time in UTC, fine enough to tell two marks of one second apart."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _moment(of: Marked) -> ColumnElement[str]:
    """Time from which a mark counts: the check's from the beginning, so that it never undoes what a person decided."""
    return case((of.marks.c.by == BY_CHECK, ""), else_=of.marks.c.at)
