"""Access to the timing database: show, copy, exchange, check and hide records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from autoplan.api.outputs import Changed, Held, Listed, ListedRun, Shown, ShownRun, Written
from autoplan.api.timings import opened_store
from autoplan.base.errors import InputError
from autoplan.base.files import check_target
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.profiler.imports import read_source
from autoplan.profiler.record import Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store import ALL, Added, Choice, Finding, Mark, Store
from autoplan.profiler.store.exchange import write_exchange
from autoplan.profiler.store.marks import OPERATIONS, RUNS

# `db` is the path or URL of a database; None: AUTOPLAN_DB, else a file in the user's data folder.
OnBatch = Callable[[int], None] | None  # takes how many records have been taken in


def _reading(db: str | None) -> AbstractContextManager[Store]:
    return opened_store(db, writable=False)


def holdings(db: str | None = None) -> Held:
    """Return where the database is, and how many records it has for each machine."""
    with _reading(db) as store:
        holdings, num_runs = store.holdings(), sum(1 for _ in store.runs(include_hidden=True))
        return Held(database=store.name, schema=store.schema, holdings=holdings, runs=num_runs)


def list_records(db: str | None = None, choice: Choice = ALL, *, hidden: bool = False, limit: int) -> list[Listed]:
    """Return the first `limit` records of a choice, oldest first, including hidden ones if `hidden`."""
    with _reading(db) as store:
        records = store.records(choice, include_hidden=hidden)
        by_key = {record.key: record for record in islice(records, limit)}
        reviews = store.reviews(by_key)
    return [
        Listed(key=key, seconds=_seconds(record), review=reviews[key], record=record) for key, record in by_key.items()
    ]


def list_runs(db: str | None = None, choice: Choice = ALL, *, hidden: bool = False, limit: int) -> list[ListedRun]:
    """Return the first `limit` training runs of a choice, oldest first, including hidden ones if `hidden`."""
    with _reading(db) as store:
        by_key = {run.key: run for run in islice(store.runs(choice, include_hidden=hidden), limit)}
        reviews = store.reviews(by_key, RUNS)
    return [ListedRun(key=key, seconds=run.seconds, review=reviews[key], run=run) for key, run in by_key.items()]


def find(key: str, db: str | None = None) -> Shown | ShownRun:
    """Return the record or training run whose key has this prefix, with the mark that hides it."""
    with _reading(db) as store:
        (row, mark), words = store.find(key.lower()), store.words(key.lower())
    if isinstance(row, RunRecord):
        return ShownRun(key=row.key, seconds=row.seconds, run=row, hidden=mark, words=words)
    return Shown(key=row.key, seconds=_seconds(row), record=row, hidden=mark, words=words)


def _seconds(record: Record) -> float | None:
    return record.seconds if record.samples_s else None


def copy(
    source: str | None,
    target: str | None,
    *,
    trust: Collection[str] | None = None,
    on_batch: OnBatch = None,
) -> Added:
    """Copy records and runs that are not hidden, and all reviews, from one database to another."""
    with _reading(source) as store, opened_store(target, writable=True) as target_store:
        choice = Choice(trust=trust)
        copied: Iterable[Record | RunRecord | Mark] = chain(store.records(choice), store.runs(choice), store.marks())
        return replace(target_store.add(copied, on_batch=on_batch), left_out=store.num_hidden(choice))


def export_file(
    path: Path,
    db: str | None = None,
    *,
    device: str | None = None,
    trust: Collection[str] | None = None,
    anonymous: bool = False,
    force: bool = False,
) -> Written:
    """Write visible records and runs, and all reviews, to a file; `anonymous` removes hosts and users."""
    check_target(path, force=force)
    with _reading(db) as store:
        choice = Choice(device=device, trust=trust)
        records, runs = store.records(choice), tuple(store.runs(choice))
        marks = tuple(store.marks())
        num_written = write_exchange(path, records, runs=runs, marks=marks, anonymous=anonymous, force=force)
    return Written(file=str(path), records=num_written - len(runs), runs=len(runs), marks=len(marks))


def read_records(
    source: str, *, device: str | None = None, operation: str | None = None
) -> tuple[Iterator[Record | RunRecord | Mark], Counter[str]]:
    """Return the records of a file or of aiconfigurator's tables, and the counts of unknown operations."""
    unknown: Counter[str] = Counter()
    return read_source(source, device=device, operation=operation, unknown=unknown), unknown


def add(records: Iterable[Record | RunRecord | Mark], db: str | None = None, *, on_batch: OnBatch = None) -> Added:
    """Add records, runs and marks; implausible records are quarantined."""
    with opened_store(db, writable=True) as store:
        return store.add(records, on_batch=on_batch)


def check(db: str | None = None) -> list[Finding]:
    """Return the records that cannot be right: faster than the device, unsettled, or changed since they were added."""
    with _reading(db) as store:
        return list(store.check())


def change_chosen(choice: Choice, reason: str, db: str | None = None, *, hides: bool, runs: bool = False) -> Changed:
    """Hide or approve all records of a choice, or all runs of it with `runs`."""
    with opened_store(db, writable=True, creates=False) as store:
        keys = store.keys(RUNS if runs else OPERATIONS, choice)
        num_new = store.change(keys, hides=hides, by=user_name(), reason=_reason(reason))
    return Changed(changed=num_new, as_before=len(keys) - num_new)


def change(keys: Collection[str], reason: str, db: str | None = None, *, hides: bool) -> Changed:
    """Hide or approve records and runs; `keys` can be prefixes."""
    with opened_store(db, writable=True, creates=False) as store:
        full_keys = {store.full_key(key.lower()) for key in keys}
        num_new = store.change(full_keys, hides=hides, by=user_name(), reason=_reason(reason))
    return Changed(changed=num_new, as_before=len(full_keys) - num_new)


def _reason(text: str) -> str:
    if reason := cleaned(text).strip():
        return reason
    raise InputError("the reason is empty: give one, for others to read")
