"""Append-only store of a team's timings: added once, read everywhere, never overwritten or deleted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Row, Select, func, or_, select

from autoplan.base.errors import InputError, StoreError
from autoplan.profiler.contention import BesideProducts
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store.choice import ALL, Choice
from autoplan.profiler.store.chosen_timings import HostsApart, beside_products, choose_timings
from autoplan.profiler.store.database import Database
from autoplan.profiler.store.machines import Machines, match, numbers_of, read_machines
from autoplan.profiler.store.marks import (
    OPERATIONS,
    RUNS,
    Mark,
    Marked,
    Review,
    add_marks,
    change,
    hidden_ids,
    is_hidden,
    is_reviewed,
    marks_of,
    quarantine,
)
from autoplan.profiler.store.overview import team_overview
from autoplan.profiler.store.plausible import Finding, finding_of, findings_in
from autoplan.profiler.store.rows import record_of, record_row, run_of, run_row, shape_of
from autoplan.profiler.store.schema import DAMAGED, insert_new, records, runs
from autoplan.profiler.tasks import TaskKey
from autoplan.spec.measurement import Match, Measurements
from autoplan.spec.operations import Operation, devices_together
from autoplan.spec.team_overview import TeamOverview

T = TypeVar("T")

BATCH = 1_000  # records per transaction: limits the loss of a killed writer, and the wait of others
MIN_PREFIX = 6
MAX_AT_ONCE = 100  # keys per query
MARKED = (OPERATIONS, RUNS)  # tables whose rows can be hidden
MAX_FAILURES = 2  # failures after which an operation counts as impossible on a machine; one may be transient


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Outcome of adding records.  Quarantined ones, new or known, stay in the store, hidden."""

    new: int = 0
    present: int = 0  # already stored
    marks: int = 0  # new marks, which hide records or revert this
    quarantined: int = 0
    left_out: int = 0  # hidden in the database that they were copied from
    first: Finding | None = None  # first finding of the quarantined records


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Summary of the records of one machine."""

    fingerprint: Fingerprint
    num_records: int
    num_hidden: int
    newest: str  # time of its last measurement


class Store:
    """A timing database; opened by `open_store`, closed by `close` or at the end of a `with` block."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._fingerprint_ids: dict[Fingerprint, int] = {}
        self._unread: set[str] = set()
        self.hosts_apart: list[HostsApart] = []  # found during the selection of timings

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._database.engine.dispose()

    @property
    def name(self) -> str:
        """Location of the database, safe to show."""
        return self._database.name

    @property
    def num_unread(self) -> int:
        """Number of records and runs skipped because this version does not understand them; `check` says why."""
        return len(self._unread)

    @property
    def schema(self) -> int:
        """The schema of the database."""
        return self._database.schema

    def add(self, new: Iterable[Record | RunRecord | Mark], *, on_batch: Callable[[int], None] | None = None) -> Added:
        """Add new records, runs and marks; implausible records are hidden immediately (quarantined).

        Marks must follow the records that they refer to; marks of unknown records are skipped.

        Every batch is one transaction: after an interrupt the same call adds the rest, without duplicates.
        `on_batch` receives the number of records processed so far.
        """
        total = Added()
        done = 0
        for batch in _batches(new, BATCH):
            by_key = {record.key: record for record in batch if isinstance(record, Record)}
            runs_by_key = {record.key: record for record in batch if isinstance(record, RunRecord)}
            new_marks = [record for record in batch if isinstance(record, Mark)]
            findings = [finding for key in sorted(by_key) if (finding := finding_of(key, by_key[key]))]
            with self._database.writing() as connection:
                machines = {record.fingerprint for record in batch if not isinstance(record, Mark)}
                ids = numbers_of(connection, machines, self._fingerprint_ids)
                # In the order of keys, so that two writers of the same records never deadlock.
                rows = [record_row(key, by_key[key], ids[by_key[key].fingerprint]) for key in sorted(by_key)]
                num_new = insert_new(connection, records, rows) if rows else 0
                run_rows = [run_row(key, run, ids[run.fingerprint]) for key, run in sorted(runs_by_key.items())]
                num_new += insert_new(connection, runs, run_rows) if run_rows else 0
                kept_out = quarantine(connection, {finding.key: finding.reason for finding in findings})
                findings = [finding for finding in findings if finding.key in kept_out]
                num_marks = sum(add_marks(connection, kind, new_marks) for kind in MARKED) if new_marks else 0
            self._fingerprint_ids.update(ids)
            done += len(batch)
            total = Added(
                new=total.new + num_new,
                present=total.present + len(batch) - len(new_marks) - num_new,
                marks=total.marks + num_marks,
                quarantined=total.quarantined + len(findings),
                first=total.first or next(iter(findings), None),
            )
            if on_batch:
                on_batch(done)
        return total

    def records(self, choice: Choice = ALL, *, include_hidden: bool = False) -> Iterator[Record]:
        """Yield records in the order in which they were added."""
        query = self._chosen(OPERATIONS, select(records), choice)
        if not include_hidden:
            query = query.where(~is_hidden())
        for row, machine in self._rows_with_machines(query, records.c.id):
            if record := self._read(record_of, row, machine):
                yield record

    def runs(self, choice: Choice = ALL, *, include_hidden: bool = False) -> Iterator[RunRecord]:
        """Yield training runs in the order in which they were added."""
        query = self._chosen(RUNS, select(runs), choice)
        if not include_hidden:
            query = query.where(~is_hidden(RUNS))
        for row, machine in self._rows_with_machines(query, runs.c.id):
            if run := self._read(run_of, row, machine):
                yield run

    def num_hidden(self, choice: Choice = ALL) -> int:
        """Return the number of hidden records and training runs."""
        with self._database.reading() as connection:
            return sum(
                connection.execute(
                    self._chosen(kind, select(func.count(kind.rows.c.id)).where(is_hidden(kind)), choice)
                ).scalar_one()
                for kind in MARKED
            )

    def keys(self, kind: Marked = OPERATIONS, choice: Choice = ALL) -> list[str]:
        """Return keys of records or runs in the order in which they were added, including hidden ones."""
        query = self._chosen(kind, select(kind.rows.c.id, kind.rows.c.key), choice)
        return [row.key for row in self._rows(query, kind.rows.c.id)]

    def _chosen(self, kind: Marked, query: Select[Any], choice: Choice) -> Select[Any]:
        """Return a query of records or runs restricted to a choice."""
        if choice.device is not None or choice.driver is not None:
            numbers = [number for number, machine in self._machines(choice.device).items() if choice.takes(machine)]
            query = query.where(kind.rows.c.fingerprint_id.in_(numbers))
        return query.where(*choice.conditions(kind))

    def reviews(self, keys: Collection[str], kind: Marked = OPERATIONS) -> dict[str, Review]:
        """Return the review of these keys: proposed, approved or hidden."""
        reviews: dict[str, Review] = dict.fromkeys(keys, "proposed")
        for batch in _batches(keys, MAX_AT_ONCE):
            with self._database.reading() as connection:
                for review in ("approved", "hidden"):
                    query = select(kind.rows.c.key).where(kind.rows.c.key.in_(batch), is_reviewed(review, kind))
                    reviews |= dict.fromkeys(connection.scalars(query), review)
        return reviews

    def measured_keys(self, fingerprint: Fingerprint, num_visits: int = 1) -> set[TaskKey]:
        """Return the keys of tasks that settled so often on this machine, or keep failing.

        Single-device work may come from any machine that is equal with respect to this device: a NIC that is down does
        not matter.  Failed tasks are repeated until they have failed `MAX_FAILURES` times.
        """
        columns = [records.c[name] for name in ("operation", "shape", "dtype", "kernel", "mode")]
        machines = self._machines(fingerprint.device)
        alike = [number for number, machine in machines.items() if machine.of_one_device == fingerprint.of_one_device]
        query = (
            select(*columns, records.c.fingerprint_id, records.c.status, func.count().label("num"))
            .where(records.c.fingerprint_id.in_(alike), records.c.status.in_(("ok", "failed")), ~is_hidden())
            .group_by(*columns, records.c.fingerprint_id, records.c.status)
        )
        counts: dict[TaskKey, Counter[str]] = defaultdict(Counter)
        with self._database.reading() as connection:
            rows: Sequence[Any] = connection.execute(query).all()
        for row in rows:
            with suppress(ValueError, KeyError):  # damaged, or from a later version: it is measured again
                shape = shape_of(row.shape)
                if devices_together(row.operation, shape) == 1 or machines[row.fingerprint_id] == fingerprint:
                    counts[row.operation, shape, row.dtype, row.kernel, row.mode][row.status] += row.num
        return {
            key
            for key, statuses in counts.items()
            if statuses["ok"] >= num_visits or statuses["failed"] >= MAX_FAILURES
        }

    def latest(self, device: str) -> Fingerprint | None:
        """Return the machine with that device measured last, without imported, failed or hidden records.

        The time of measurement counts, not the time of adding; of equal times, the one added last counts.
        """
        machines = self._machines(device)
        newest, last_in = func.max(records.c.measured_at), func.max(records.c.id)
        query = (
            select(records.c.fingerprint_id)
            .where(
                records.c.fingerprint_id.in_(machines),
                records.c.status != "failed",
                records.c.mode != "imported",
                ~is_hidden(),
            )
            .group_by(records.c.fingerprint_id)
            .order_by(newest.desc(), last_in.desc())
            .limit(1)
        )
        with self._database.reading() as connection:
            number = connection.execute(query).scalar()
        return None if number is None else machines[number]

    def timings(
        self, target: Fingerprint, *, operations: Collection[Operation] | None = None, layer_kernels: str = ""
    ) -> Measurements:
        """Return the measurements for a search on `target`: one per operation, shape and type.

        They are selected by `choose_timings`, whose observations are counted here.
        """
        with self._database.reading() as connection:
            chosen = choose_timings(connection, target.device, self._levels(target), operations, layer_kernels)
        self._unread |= chosen.unread
        self.hosts_apart += chosen.hosts_apart
        return chosen.measurements

    def beside_products(self, target: Fingerprint) -> list[BesideProducts]:
        """Return the collectives measured together with GEMMs on the most similar machines that have any."""
        with self._database.reading() as connection:
            return beside_products(connection, self._levels(target))

    def _levels(self, target: Fingerprint) -> dict[int, Match]:
        """Return the similarity of suitable machines for a search on `target`, by their row numbers."""
        levels = {number: match(machine, target) for number, machine in self._machines(target.device).items()}
        return {number: level for number, level in levels.items() if level is not None}

    def find(self, key: str) -> tuple[Record | RunRecord, Mark | None]:
        """Return the record or run whose key begins with `key`, and the mark that hides it."""
        kind, row = self._row_of_key(key)
        machine = self._machines()[row.fingerprint_id]
        found = record_of(row, machine) if kind is OPERATIONS else run_of(row, machine)
        newest = next(iter(self.words(key)), None)
        return found, newest if newest and newest.hides else None

    def words(self, key: str) -> list[Mark]:
        """Return the marks of the record or run whose key begins with `key`: the one that counts, then the others."""
        kind, row = self._row_of_key(key)
        with self._database.reading() as connection:
            return marks_of(connection, kind, row.id, row.key)

    def by_beginnings(self, keys: Collection[str]) -> dict[str, Record]:
        """Return the records by prefixes of their keys, including hidden ones; prefixes of no key are left out."""
        starts = sorted({key for key in keys if len(key) >= MIN_PREFIX and not set(key) - set("0123456789abcdef")})
        machines, by_beginning = self._machines(), dict[str, Record]()
        with self._database.reading() as connection:
            for batch in _batches(starts, MAX_AT_ONCE):
                begins = or_(*(records.c.key.between(key, key + "g") for key in batch))
                for row in connection.execute(select(records).where(begins)):
                    if record := self._read(record_of, row, machines[row.fingerprint_id]):
                        by_beginning |= {key: record for key in batch if row.key.startswith(key)}
        return by_beginning

    def full_key(self, key: str) -> str:
        """Return the key of the only record or run that begins with `key`, even if it is unreadable."""
        _, row = self._row_of_key(key)
        return str(row.key)

    def _row_of_key(self, key: str) -> tuple[Marked, Row[Any]]:
        if len(key) < MIN_PREFIX or set(key) - set("0123456789abcdef"):
            raise InputError(f"key {key[:70]!r}: write at least {MIN_PREFIX} of its hexadecimal digits, as shown")
        rows: list[tuple[Marked, Row[Any]]] = []
        with self._database.reading() as connection:
            for kind in (OPERATIONS, RUNS):
                begins = kind.rows.c.key.between(key, key + "g")
                rows += [(kind, row) for row in connection.execute(select(kind.rows).where(begins).limit(2))]
        if len(rows) != 1:
            raise InputError(f"key {key}: {'several records match' if rows else f'{self.name} holds no such record'}")
        return rows[0]

    def change(self, keys: Iterable[str], *, hides: bool, by: str, reason: str) -> int:
        """Hide or approve records and runs with these complete keys; return how many changed."""
        num_changed = 0
        for batch in _batches(keys, BATCH):
            with self._database.writing() as connection:
                num_changed += sum(
                    change(connection, kind, batch, hides=hides, by=by, reason=reason) for kind in MARKED
                )
        return num_changed

    def marks(self) -> Iterator[Mark]:
        """Yield the marks in the order in which they were added: those of operations, then those of runs."""
        for kind in MARKED:
            query = select(kind.marks, kind.rows.c.key).join_from(kind.marks, kind.rows)
            for row in self._rows(query, kind.marks.c.id):
                try:
                    mark = Mark(key=row.key, by=row.by, reason=row.reason, at=row.at, hides=row.hides)
                except InputError:  # damaged, so the mark is ignored
                    self._unread.add(row.key)
                    continue
                yield mark

    def holdings(self) -> list[Holding]:
        """Summarise the records machine by machine, the largest first."""
        hidden = hidden_ids().subquery()
        query = (
            select(
                records.c.fingerprint_id,
                func.count(),
                func.count(hidden.c.record_id),
                func.max(records.c.measured_at),
            )
            .outerjoin(hidden, hidden.c.record_id == records.c.id)
            .group_by(records.c.fingerprint_id)
        )
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        machines = self._machines()
        return sorted(
            (
                Holding(fingerprint=machines[number], num_records=num, num_hidden=num_hidden, newest=newest)
                for number, num, num_hidden, newest in rows
            ),
            key=lambda holding: -holding.num_records,
        )

    def overview(self, day: str) -> TeamOverview:
        """Return the contents by machine, and the comparison of hosts and days, as of a day."""
        machines = self._machines()
        with self._database.reading() as connection:
            return team_overview(connection, machines, self.name, day)

    def check(self) -> Iterator[Finding]:
        """Yield the visible records that are implausible, unreadable or do not match their key."""
        with self._database.reading() as connection:
            if connection.dialect.name == "sqlite":
                verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
                if verdict != "ok":
                    problem = " ".join(str(verdict).split())
                    raise StoreError(f"{self.name} {DAMAGED} ({problem})")
        for row, machine in self._rows_with_machines(select(records).where(~is_hidden()), records.c.id):
            yield from findings_in(row, machine, record_of, f"{row.operation} {row.shape}")
        query = select(runs).where(~is_hidden(RUNS))
        for row, machine in self._rows_with_machines(query, runs.c.id):
            yield from findings_in(row, machine, run_of, f"run of {row.model}")

    def _machines(self, device: str | None = None) -> Machines:
        with self._database.reading() as connection:
            return read_machines(connection, self.name, device)

    def _read(self, read: Callable[[Row[Any], Fingerprint], T], row: Row[Any], machine: Fingerprint) -> T | None:
        """Decode a row; None if this version does not understand it, which counts as unread."""
        try:
            return read(row, machine)
        except InputError:
            self._unread.add(row.key)
            return None

    def _rows(self, query: Select[Any], number: ColumnElement[int]) -> Iterator[Row[Any]]:
        """Yield rows by ascending `number`, page by page, without an open transaction while the caller works."""
        query = query.order_by(number).limit(BATCH)
        last = 0
        while True:
            with self._database.reading() as connection:
                rows = connection.execute(query.where(number > last)).all()
            if not rows:
                return
            yield from rows
            last = rows[-1].id

    def _rows_with_machines(
        self, query: Select[Any], number: ColumnElement[int]
    ) -> Iterator[tuple[Row[Any], Fingerprint]]:
        machines = self._machines()
        for row in self._rows(query, number):
            if row.fingerprint_id not in machines:  # another process has added a machine since
                machines = self._machines()
            yield row, machines[row.fingerprint_id]


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
