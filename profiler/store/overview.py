"""Queries over all records: contents by machine, and comparison of hosts and days.

Rows of a damaged file, or written by another program, may contain anything: unreadable values are blank or left out.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from sqlalchemy import Connection, Select, case, func, select

from autoplan.base.units import cleaned
from autoplan.profiler.record import LONGEST_S, SLOWED, Fingerprint, is_timestamp
from autoplan.profiler.store.marks import OPERATIONS, approved_ids, hidden_ids, is_hidden
from autoplan.profiler.store.schema import records, runs
from autoplan.spec.team_overview import ComparedTimes, FoundSlow, MachineRecords, OperationRecords, TeamOverview

MAX_COMPARED = 10_000  # records whose times are compared, in less than a second
HASH_LIMIT = 2**63  # hashes of shapes are uniform between +- this limit

_DAY = func.substr(records.c.measured_at, 1, 10)


@lru_cache(maxsize=4096)  # thousands of rows have the same few hosts and days
def _text(value: object) -> str:
    return cleaned(value) if isinstance(value, str) else ""


@lru_cache(maxsize=4096)
def _day(value: object) -> str:
    return value if isinstance(value, str) and is_timestamp(f"{value}T00:00Z") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Mean of the settled times of one shape on one host and day."""

    machine: int
    work: tuple[object, ...]  # shape, kernel and mode of measurement
    what: str  # the shape, in words as the row has them
    operation: str
    host: str
    day: str
    seconds: float


def compared_share(num_records: int) -> float:
    """Return the share of all shapes to compare, which has about `MAX_COMPARED` records."""
    return min(MAX_COMPARED / max(num_records, 1), 1.0)


def cells(connection: Connection, share: float = 1.0) -> list[Cell]:
    """Return the means of settled times without concurrent work that are not hidden; imported times have no host.

    They cover a share of all shapes, the same on every machine: those with low hashes.
    """
    of = records.c
    chosen = [of.work_hash < round((2 * share - 1) * HASH_LIMIT)] if share < 1 else []
    work = (of.fingerprint_id, of.operation, of.shape, of.dtype, of.kernel, of.mode)
    query = (
        select(*work, of.host, _DAY.label("day"), func.avg(of.seconds).label("seconds"))
        .where(of.status == "ok", of.is_alone, of.mode != "imported", ~is_hidden(), *chosen)
        .where(of.seconds > 0, of.seconds < LONGEST_S)  # SQLite orders text, which would count as 0, above all numbers
        .group_by(*work, of.host, _DAY)
    )
    return [
        Cell(
            machine=row.fingerprint_id,
            work=tuple(row[1:6]),
            what=f"{row.operation} {row.shape} {row.dtype}",
            operation=row.operation,
            host=_text(row.host),
            day=_day(row.day),
            seconds=row.seconds,
        )
        for row in connection.execute(query)
    ]


def team_overview(connection: Connection, machines: Mapping[int, Fingerprint], name: str, day: str) -> TeamOverview:
    """Return the contents of the database `name` by machine, and the comparison of hosts and days, as of a day."""
    share = compared_share(connection.execute(select(func.count()).select_from(records)).scalar_one())
    means = cells(connection, share)
    machine_rows, slow_rows = machine_records(connection, machines, means), found_slow(connection, machines)
    return TeamOverview(
        database=name,
        day=day,
        compared_share=share,
        machines=tuple(machine_rows),
        hosts=tuple(sorted(compared(means, machines, "host"), key=lambda host: (host.device, -host.ratio))),
        days=tuple(sorted(compared(means, machines, "day"), key=lambda day: (day.device, day.name), reverse=True)),
        slow=tuple(slow_rows),
    )


def machine_records(
    connection: Connection, machines: Mapping[int, Fingerprint], measured: Sequence[Cell]
) -> list[MachineRecords]:
    """Return counts and days of the records of each machine, those with most records first."""
    of = records.c
    by_operation = (of.fingerprint_id, of.operation)
    # Both read only the index, which is a fraction of the rows; in one, PostgreSQL would sort them all.
    distinct = select(*by_operation, func.count(of.work_hash.distinct())).group_by(*by_operation)
    num_shapes = {(row[0], row[1]): row[2] for row in connection.execute(distinct)}
    query = (
        select(
            *by_operation,
            func.count().label("records"),
            func.sum(case((of.status == "ok", 1), else_=0)).label("settled"),
            func.sum(case((of.status == "failed", 1), else_=0)).label("failed"),
            func.substr(func.min(of.measured_at), 1, 10).label("first_day"),
            func.substr(func.max(of.measured_at), 1, 10).label("last_day"),
        )
        .group_by(*by_operation)
        .order_by(of.operation)
    )
    marked = {"approved": _marked(connection, approved_ids()), "hidden": _marked(connection, hidden_ids())}
    names = ("records", "settled", "failed")
    spreads = _spreads(measured)
    operations: dict[int, list[OperationRecords]] = defaultdict(list)
    for row in connection.execute(query):
        spread = spreads.get((row.fingerprint_id, row.operation))
        values: dict[str, Any] = {name: getattr(row, name) for name in names}
        values |= {name: counts[row.fingerprint_id, row.operation] for name, counts in marked.items()}
        operations[row.fingerprint_id].append(
            OperationRecords(
                operation=_text(row.operation),
                shapes=num_shapes.get((row.fingerprint_id, row.operation), 0),
                first_day=_day(row.first_day),
                last_day=_day(row.last_day),
                spread=spread,
                **values,
            )
        )
    # Both in one query over the rows; host first, or SQLite would use the order of an index by machine.
    people = connection.execute(select(of.host, of.measured_by, of.fingerprint_id).distinct()).all()
    hosts = _by_machine((row.fingerprint_id, row.host) for row in people)
    authors = _by_machine((row.fingerprint_id, row.measured_by) for row in people)
    counted = select(runs.c.fingerprint_id, func.count()).group_by(runs.c.fingerprint_id)
    num_runs: dict[int, int] = {row[0]: row[1] for row in connection.execute(counted)}
    of_machines = [
        MachineRecords(
            machine=machines[number].words,
            hosts=hosts.get(number, ()),
            authors=authors.get(number, ()),
            runs=num_runs.get(number, 0),
            operations=tuple(operations[number]),
        )
        for number in sorted(operations.keys() | num_runs.keys())
    ]
    return sorted(of_machines, key=lambda machine: -sum(operation.records for operation in machine.operations))


def _marked(connection: Connection, ids: Select[Any]) -> Counter[tuple[int, str]]:
    """Return the number of records in `ids` by machine and operation."""
    of = records.c
    query = select(of.fingerprint_id, of.operation, func.count()).where(of.id.in_(ids))
    rows = connection.execute(query.group_by(of.fingerprint_id, of.operation))
    return Counter({(row[0], row[1]): row[2] for row in rows})


def _by_machine(rows: Iterable[Any]) -> dict[int, tuple[str, ...]]:
    names: dict[int, set[str]] = defaultdict(set)
    for number, value in rows:
        if name := _text(value):
            names[number].add(name)
    return {number: tuple(sorted(found)) for number, found in names.items()}


def _spreads(measured: Iterable[Cell]) -> dict[tuple[int, str], float]:
    """Return the median spread of shapes over hosts and days, by machine and operation."""
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for cell in measured:
        times[cell.machine, cell.operation, cell.work].append(cell.seconds)
    spreads: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (machine, operation, _), seconds in times.items():
        if len(seconds) > 1:
            spreads[machine, operation].append(max(seconds) / min(seconds) - 1)
    return {key: statistics.median(values) for key, values in spreads.items()}


def compared(
    measured: Iterable[Cell], machines: Mapping[int, Fingerprint], by: Literal["host", "day"]
) -> list[ComparedTimes]:
    """Return the times of each host, or day, relative to the median of the others that measured the same shapes.

    Machines with the same device are compared across drivers, so that days show the effect of a new one.
    """
    by_shape: dict[tuple[Any, ...], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in measured:
        if name := getattr(cell, by):
            by_shape[machines[cell.machine].device, cell.work][name].append(cell)
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for (device, _), by_name in by_shape.items():
        if len(by_name) < 2:
            continue
        means = {name: statistics.fmean(cell.seconds for cell in group) for name, group in by_name.items()}
        for name, group in by_name.items():
            others_s = statistics.median(seconds for label, seconds in means.items() if label != name)
            ratios[device, name].append((means[name] / others_s, group[0].what))
    return [
        ComparedTimes(
            device=device,
            name=name,
            shapes=len(rated),
            ratio=statistics.median(ratio for ratio, _ in rated),
            worst=max(rated)[0],
            worst_what=cleaned(max(rated)[1]),
        )
        for (device, name), rated in ratios.items()
    ]


def found_slow(connection: Connection, machines: Mapping[int, Fingerprint]) -> list[FoundSlow]:
    """Return the parts that the last health check found slow, the newest first."""
    of = records.c
    query = select(of.fingerprint_id, of.host, of.conditions, of.status, of.reason, _DAY.label("day")).where(
        of.conditions.contains('"checked"'), ~is_hidden(OPERATIONS)
    )
    last: dict[tuple[Any, ...], Any] = {}
    for row in connection.execute(query.order_by(of.measured_at, of.id)):
        try:
            conditions = json.loads(row.conditions)
            index, part = _text(conditions["device"]), _text(conditions["checked"])
        except (ValueError, TypeError, KeyError):  # damaged, or not a record of a check
            continue
        last[row.host, index, part] = (row, index)
    return [
        FoundSlow(
            device=machines[row.fingerprint_id].device,
            host=_text(row.host),
            index=index,
            reason=_text(row.reason).removeprefix(f"{SLOWED}: "),
            day=_day(row.day),
        )
        for row, index in reversed(last.values())
        if row.status == "contaminated"
    ]
