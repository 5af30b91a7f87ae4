"""Queries over all records at once: what is held of which machine, and how hosts and days compare."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, case, func, select

from autoplan.profiler.record import SLOWED, Fingerprint
from autoplan.profiler.store.marks import OPERATIONS, approved_ids, hidden_ids, is_hidden
from autoplan.profiler.store.schema import records, runs
from autoplan.spec.team_overview import ComparedTimes, FoundSlow, HeldMachine, HeldOperation

_DAY = func.substr(records.c.measured_at, 1, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Mean of the settled times of one shape on one host and day."""

    machine: int
    work: tuple[object, ...]  # shape, kernel and way of measuring
    what: str  # the shape, in words
    operation: str
    host: str
    day: str
    seconds: float


def cells(connection: Connection) -> list[Cell]:
    """Return the means of what was measured alone, settled and is not hidden: imported times have no host."""
    of = records.c
    work = (of.fingerprint_id, of.operation, of.shape, of.dtype, of.kernel, of.mode)
    query = (
        select(*work, of.host, _DAY.label("day"), func.avg(of.seconds).label("seconds"))
        .where(of.status == "ok", of.is_alone, of.mode != "imported", ~is_hidden())
        .group_by(*work, of.host, _DAY)
    )
    return [
        Cell(
            machine=row.fingerprint_id,
            work=tuple(row[1:6]),
            what=f"{row.operation} {row.shape} {row.dtype}",
            operation=row.operation,
            host=row.host,
            day=row.day,
            seconds=row.seconds,
        )
        for row in connection.execute(query)
        if isinstance(row.seconds, int | float)  # else damaged
    ]


def held_machines(
    connection: Connection, machines: Mapping[int, Fingerprint], known: Sequence[Cell]
) -> list[HeldMachine]:
    """Return what is held of each machine, those with most records first."""
    of, hidden, approved = records.c, hidden_ids().subquery(), approved_ids().subquery()
    query = (
        select(
            of.fingerprint_id,
            of.operation,
            func.count().label("records"),
            func.count(of.work_hash.distinct()).label("shapes"),
            func.sum(case((of.status == "ok", 1), else_=0)).label("settled"),
            func.sum(case((of.status == "failed", 1), else_=0)).label("failed"),
            func.count(approved.c.record_id).label("approved"),
            func.count(hidden.c.record_id).label("hidden"),
            func.min(_DAY).label("first_day"),
            func.max(_DAY).label("last_day"),
        )
        .outerjoin(hidden, hidden.c.record_id == of.id)
        .outerjoin(approved, approved.c.record_id == of.id)
        .group_by(of.fingerprint_id, of.operation)
        .order_by(of.operation)
    )
    names = ("operation", "shapes", "records", "settled", "failed", "approved", "hidden", "first_day", "last_day")
    spreads = _spreads(known)
    operations: dict[int, list[HeldOperation]] = defaultdict(list)
    for row in connection.execute(query):
        spread = spreads.get((row.fingerprint_id, row.operation))
        values: dict[str, Any] = {name: getattr(row, name) for name in names}
        operations[row.fingerprint_id].append(HeldOperation(spread=spread, **values))
    people = {
        column.name: _by_machine(connection.execute(select(of.fingerprint_id, column).distinct()).all())
        for column in (of.host, of.measured_by)
    }
    counted = select(runs.c.fingerprint_id, func.count()).group_by(runs.c.fingerprint_id)
    num_runs: dict[int, int] = {row[0]: row[1] for row in connection.execute(counted)}
    held = [
        HeldMachine(
            machine=machines[number].words,
            hosts=people["host"].get(number, ()),
            authors=people["measured_by"].get(number, ()),
            runs=num_runs.get(number, 0),
            operations=tuple(operations[number]),
        )
        for number in sorted(operations.keys() | num_runs.keys())
    ]
    return sorted(held, key=lambda machine: -sum(operation.records for operation in machine.operations))


def _by_machine(rows: Iterable[Any]) -> dict[int, tuple[str, ...]]:
    names: dict[int, set[str]] = defaultdict(set)
    for number, name in rows:
        if name:
            names[number].add(name)
    return {number: tuple(sorted(of_it)) for number, of_it in names.items()}


def _spreads(known: Iterable[Cell]) -> dict[tuple[int, str], float]:
    """Return the median spread of shapes over hosts and days, by machine and operation."""
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for cell in known:
        times[cell.machine, cell.operation, cell.work].append(cell.seconds)
    spreads: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (machine, operation, _), seconds in times.items():
        if len(seconds) > 1:
            spreads[machine, operation].append(max(seconds) / min(seconds) - 1)
    return {key: statistics.median(values) for key, values in spreads.items()}


def compared(
    known: Iterable[Cell], machines: Mapping[int, Fingerprint], by: Literal["host", "day"]
) -> list[ComparedTimes]:
    """Return how the times of each host, or day, stand to the median of the others that measured the same shapes.

    Machines of one device are compared whatever their drivers: a new one is what days shall show.
    """
    by_shape: dict[tuple[Any, ...], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in known:
        if name := getattr(cell, by):
            by_shape[machines[cell.machine].device, cell.work][name].append(cell)
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for (device, _), by_name in by_shape.items():
        if len(by_name) < 2:
            continue
        means = {name: statistics.mean(cell.seconds for cell in own) for name, own in by_name.items()}
        for name, own in by_name.items():
            others = statistics.median(seconds for other, seconds in means.items() if other != name)
            ratios[device, name].append((means[name] / others, own[0].what))
    return [
        ComparedTimes(
            device=device,
            name=name,
            shapes=len(own),
            ratio=statistics.median(ratio for ratio, _ in own),
            worst=max(own)[0],
            worst_what=max(own)[1],
        )
        for (device, name), own in ratios.items()
    ]


def found_slow(connection: Connection, machines: Mapping[int, Fingerprint]) -> list[FoundSlow]:
    """Return parts that the last check of health found slow, the newest first."""
    of = records.c
    query = select(of.fingerprint_id, of.host, of.conditions, of.status, of.reason, _DAY.label("day")).where(
        of.conditions.contains('"checked"'), ~is_hidden(OPERATIONS)
    )
    last: dict[tuple[Any, ...], Any] = {}
    for row in connection.execute(query.order_by(of.measured_at, of.id)):
        conditions = json.loads(row.conditions)
        last[row.host, conditions.get("device", ""), conditions.get("checked")] = (row, conditions)
    return [
        FoundSlow(
            device=machines[row.fingerprint_id].device,
            host=row.host,
            index=conditions.get("device", ""),
            reason=row.reason.removeprefix(f"{SLOWED}: "),
            day=row.day,
        )
        for row, conditions in reversed(last.values())
        if row.status == "contaminated"
    ]
