"""Contents of the timing database: shown, copied, exchanged as files, checked, hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
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
from autoplan.profiler.store import ALL, Added, Beside, Finding, Mark, Store
from autoplan.profiler.store.exchange import write_exchange
from autoplan.spec.operations import SHAPES

# `db` is the path or URL of a database; None: AUTOPLAN_DB, else a file in the user's data folder.
OnBatch = Callable[[int], None] | None  # takes how many records have been taken in


def _reading(db: str | None) -> AbstractContextManager[Store]:
    return opened_store(db, writable=False)


def holdings(db: str | None = None) -> Held:
    """Return where the database is, and what it holds of which machine."""
    with _reading(db) as store:
        holdings, num_runs = store.holdings(), sum(1 for _ in store.runs(include_hidden=True))
        return Held(database=store.name, schema=store.schema, holdings=holdings, runs=num_runs)


def list_records(
    db: str | None = None,
    *,
    device: str | None = None,
    operation: str | None = None,
    trust: Collection[str] | None = None,
    hidden: bool = False,
    beside: Beside | None = None,
    limit: int,
) -> list[Listed]:
    """Return the first `limit` records, in the order in which they came in; hidden ones with `hidden` alone.

    `trust` names those whose measurements count.
    """
    if operation is not None and operation not in SHAPES:
        raise InputError(f"--operation {operation!r}: known are {', '.join(SHAPES)}")
    with _reading(db) as store:
        wanted = [operation] if operation else None
        records = store.records(
            device=device, operations=wanted, trust=trust or None, include_hidden=hidden, beside=beside or ALL
        )
        return [Listed(key=record.key, seconds=_seconds(record), record=record) for record in islice(records, limit)]


def list_runs(
    db: str | None = None,
    *,
    device: str | None = None,
    trust: Collection[str] | None = None,
    hidden: bool = False,
    beside: Beside | None = None,
    limit: int,
) -> list[ListedRun]:
    """Return the first `limit` training runs, in the order in which they came in; hidden ones with `hidden` alone."""
    with _reading(db) as store:
        runs = store.runs(device=device, trust=trust or None, include_hidden=hidden, beside=beside or ALL)
        return [ListedRun(key=run.key, seconds=run.seconds, run=run) for run in islice(runs, limit)]


def find(key: str, db: str | None = None) -> Shown | ShownRun:
    """Return the record or the training run whose key begins so, with the mark that hides it."""
    with _reading(db) as store:
        row, mark = store.find(key.lower())
    if isinstance(row, RunRecord):
        return ShownRun(key=row.key, seconds=row.seconds, run=row, hidden=mark)
    return Shown(key=row.key, seconds=_seconds(row), record=row, hidden=mark)


def _seconds(record: Record) -> float | None:
    return record.seconds if record.samples_s else None


def copy(
    source: str | None,
    target: str | None,
    *,
    trust: Collection[str] | None = None,
    on_batch: OnBatch = None,
) -> Added:
    """Add what one database holds to another, runs too, and hide and unhide there what was here."""
    with _reading(source) as store, opened_store(target, writable=True) as other:
        records, runs = store.records(trust=trust or None), store.runs(trust=trust or None)
        return other.add(chain(records, runs, store.marks()), on_batch=on_batch)


def export_file(
    path: Path,
    db: str | None = None,
    *,
    device: str | None = None,
    trust: Collection[str] | None = None,
    anonymous: bool = False,
    force: bool = False,
) -> Written:
    """Write the records and runs that are not hidden to a file, and what was hidden or taken back into use.

    `anonymous` leaves hosts and users out.
    """
    check_target(path, force=force)
    with _reading(db) as store:
        records = store.records(device=device, trust=trust or None)
        runs = tuple(store.runs(device=device, trust=trust or None))
        marks = tuple(store.marks())
        num_written = write_exchange(path, records, runs=runs, marks=marks, anonymous=anonymous, force=force)
    return Written(file=str(path), records=num_written - len(runs), runs=len(runs), marks=len(marks))


def read_records(
    source: str, *, device: str | None = None, operation: str | None = None
) -> tuple[Iterator[Record | RunRecord | Mark], Counter[str]]:
    """Return the records of a file or of aiconfigurator's tables, and how many of unknown operations it has besides."""
    unknown: Counter[str] = Counter()
    return read_source(source, device=device, operation=operation, unknown=unknown), unknown


def add(records: Iterable[Record | RunRecord | Mark], db: str | None = None, *, on_batch: OnBatch = None) -> Added:
    """Add records, runs and marks; implausible records are quarantined."""
    with opened_store(db, writable=True) as store:
        return store.add(records, on_batch=on_batch)


def check(db: str | None = None) -> list[Finding]:
    """Return the records that cannot be right: faster than the device, unsettled, changed since they were added."""
    with _reading(db) as store:
        return list(store.check())


def change(keys: Collection[str], reason: str, db: str | None = None, *, hides: bool) -> Changed:
    """Hide records and runs, or take them back into use; `keys` may be what their keys begin with."""
    with opened_store(db, writable=True, creates=False) as store:
        full_keys = [store.whole_key(key.lower()) for key in keys]
        num_new = store.change(full_keys, hides=hides, by=user_name(), reason=cleaned(reason))
    return Changed(changed=num_new, as_before=len(keys) - num_new)
