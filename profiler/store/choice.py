"""Filters for records and runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import cast, get_args

from sqlalchemy import ColumnElement

from autoplan.base.errors import InputError
from autoplan.profiler.record import Fingerprint, Status, is_timestamp
from autoplan.profiler.run_record import RunStatus
from autoplan.profiler.store.marks import REVIEWS, Marked, Review, is_reviewed
from autoplan.spec.operations import SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Filter for records or runs; None means all."""

    device: str | None = None
    driver: str | None = None  # version of the driver, or its beginning: 580 is any 580.65.06
    operation: str | None = None  # only for records
    trust: Collection[str] | None = None  # authors whose measurements count
    host: str | None = None
    status: str | None = None
    since: str | None = None  # a day or time in UTC, in ISO 8601 format
    until: str | None = None  # the same: only measurements before it
    review: str | None = None

    def __post_init__(self) -> None:
        statuses = dict.fromkeys((*get_args(Status), *get_args(RunStatus)))
        if self.status is not None and self.status not in statuses:
            raise InputError(f"status {self.status!r}: known are {', '.join(statuses)}")
        if self.review not in (None, *REVIEWS):
            raise InputError(f"review {self.review!r}: known are {', '.join(REVIEWS)}")
        for name in ("since", "until"):
            moment = getattr(self, name)
            if moment is not None and not is_timestamp(_full_timestamp(moment)):
                raise InputError(
                    f"{name} {moment!r}: write a day or a moment in UTC, as 2026-11-24 or 2026-11-24T16:00Z"
                )
        if self.operation is not None and self.operation not in SHAPES:
            raise InputError(f"--operation {self.operation!r}: known are {', '.join(SHAPES)}")

    def takes(self, machine: Fingerprint) -> bool:
        """Return whether records of a machine can be among the chosen ones."""
        has_driver = self.driver is None or f"{machine.driver}.".startswith(f"{self.driver}.")
        return has_driver and self.device in (None, machine.device)

    def conditions(self, kind: Marked) -> list[ColumnElement[bool]]:
        """Return the conditions on rows of a table."""
        columns = kind.rows.c
        names = ("operation", "host", "status")
        conditions = [columns[name] == getattr(self, name) for name in names if getattr(self, name) is not None]
        if self.trust:
            conditions.append(columns.measured_by.in_(list(self.trust)))
        if self.since is not None:
            conditions.append(columns.measured_at >= _beginning(self.since))
        if self.until is not None:
            # Blank means an unknown time of measurement.
            conditions += [columns.measured_at < _beginning(self.until), columns.measured_at != ""]
        if self.review is not None:
            conditions.append(is_reviewed(cast(Review, self.review), kind))
        return conditions


def _full_timestamp(text: str) -> str:
    return text if "T" in text else f"{text}T00:00Z"


def _beginning(text: str) -> str:
    """Return the common prefix of all times in a minute or second, because times are compared as text."""
    return datetime.fromisoformat(_full_timestamp(text)).replace(tzinfo=None).isoformat().removesuffix(":00")


ALL = Choice()
