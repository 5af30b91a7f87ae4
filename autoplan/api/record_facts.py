"""Facts of the records behind a plan's price, from the database that holds them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from autoplan.api.results import PricedPlans
from autoplan.api.timings import is_at_hand, opened_store
from autoplan.base.errors import StoreError
from autoplan.cost.served import measured_shares, needed_times, term_spreads
from autoplan.profiler.record import Record
from autoplan.spec.needed_times import NeededTime, RecordFacts, StepSources

MIN_QUARTILES = 5  # samples
QUARTILES_APART = 1.349  # of a normal distribution, in standard deviations


def step_sources(result: PricedPlans, db: str | None = None) -> StepSources:
    """Return which records serve which terms of a plan's step, and what was not measured.

    `db` is the database that tells of the records; without one, the database that the plan was priced from, where it is
    a file that is at hand.
    """
    file, pinned = result.file, result.file.pinned
    usable = file.framework.profiled_operations
    needed = [
        need
        for need in needed_times(result.problem, result.plan)
        if need.served != "not measured" or need.operation in usable
    ]
    facts, unknown = _facts(needed, db, pinned.database if pinned else "", file.timings)
    return StepSources(
        timings=file.timings,
        database=pinned.database if pinned else "",
        machine=pinned.machine if pinned else "",
        terms_s=dict(file.best.terms_s),
        measured_shares=measured_shares(result.problem, result.plan),
        needed=tuple(needed),
        spreads=term_spreads(
            needed,
            {key: record.spread for key, record in facts.items() if record.spread},
            result.problem.timings.match,
        ),
        records=facts,
        unknown=unknown,
    )


def _facts(
    needed: Sequence[NeededTime], db: str | None, pinned_db: str, timings: str
) -> tuple[dict[str, RecordFacts], str]:
    """Return facts of the records by the beginnings of their keys, and why some are missing."""
    keys = {source.source for need in needed for source in need.sources}
    if not keys or timings != "db":
        return {}, ""
    url = db or (pinned_db if is_at_hand(pinned_db) else None)
    if url is None:
        return {}, f"the records are in {pinned_db or 'a database'}: name it with --db"
    try:
        with opened_store(url, writable=False) as store:
            records, name = store.by_beginnings(keys), store.name
    except StoreError as error:
        if db is not None:
            raise
        return {}, str(error)
    num_missing = len(keys - records.keys())
    unknown = f"{name} lacks {num_missing:,} of {len(keys):,} records" if num_missing else ""
    return {key: facts_of(record) for key, record in records.items()}, unknown


def facts_of(record: Record, now: datetime | None = None) -> RecordFacts:
    """Return who measured a record where and when, and how calm the machine was."""
    age = None
    if record.measured_at:
        age = ((now or datetime.now(UTC)) - datetime.fromisoformat(record.measured_at)).total_seconds() / 86_400
    return RecordFacts(
        key=record.key,
        kernel=", ".join(filter(None, (record.kernel, record.conditions.get("backend")))),
        device=record.fingerprint.device,
        host=record.host,
        measured_by=record.measured_by,
        measured_at=record.measured_at,
        age_days=age,
        driver=record.fingerprint.driver,
        torch=record.fingerprint.torch,
        collectives=record.fingerprint.collectives,
        other_load=record.conditions.get("other_load", ""),
        status=record.status,
        mode=record.mode,
        source=record.source,
        spread=sample_deviation(record.samples_s),
    )


def sample_deviation(samples_s: Sequence[float]) -> float | None:
    """Return the standard deviation of samples over their median, by quartiles where there are enough of them."""
    if len(samples_s) < 2:
        return None
    middle = statistics.median(samples_s)
    if len(samples_s) < MIN_QUARTILES:
        return statistics.stdev(samples_s) / middle
    low, _, high = statistics.quantiles(samples_s, n=4)
    return (high - low) / QUARTILES_APART / middle
