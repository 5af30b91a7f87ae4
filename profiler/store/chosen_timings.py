"""Selection of the timings for a search: one per operation, shape and type, from the most similar machine."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, or_, select

from autoplan.base.arrays import Bools, Ints, distinct_rows
from autoplan.profiler.contention import BesideProducts
from autoplan.profiler.protocol import PRODUCTS_S
from autoplan.profiler.record import SLOWED
from autoplan.profiler.selection import DISTURBED, may_stand_in
from autoplan.profiler.store.marks import is_hidden
from autoplan.profiler.store.rows import shape_of
from autoplan.profiler.store.schema import records
from autoplan.profiler.store.time_columns import TIMED, Times, read_times, times_of_rows
from autoplan.spec.measurement import Match, MeasuredTimes, Measurements
from autoplan.spec.operations import COLLECTIVES, TRAINER_UNITS, Operation

_CHOSEN_BY = (*TIMED, *(records.c[name] for name in ("mode", "status", "kernel", "conditions", "host", "work_hash")))
HOSTS_APART = 1.10  # reported ratio of two hosts' times of one shape; equal devices differ by 5 % (`modelling` C1)
_PREFERRED_MODES = ("sustained", "burst", "imported")  # for one shape on equally similar machines
MAX_COMPARED = 5  # newest measurements of one shape, whose median counts


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsApart:
    """Two hosts whose times of the same shape differ by more than those of equal devices."""

    what: str
    fast: str
    slow: str
    ratio: float

    @classmethod
    def of(cls, fast: Any, slow: Any) -> HostsApart:
        """Return the hosts of two rows of one shape, and the ratio of their times."""
        words = f"{slow.operation} {slow.shape} {slow.dtype}"
        return cls(what=words, fast=fast.host, slow=slow.host, ratio=slow.seconds / fast.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTimings:
    """Timings for a search, with observations made during their selection."""

    measurements: Measurements
    hosts_apart: tuple[HostsApart, ...] = ()
    unread: frozenset[str] = frozenset()  # keys of records that this version does not understand


def choose_timings(
    connection: Connection,
    device: str,
    levels: Mapping[int, Match],
    operations: Collection[Operation] | None,
    layer_kernels: str = "",
) -> ChosenTimings:
    """Select from the records of machines with a device; `levels` rate their similarity to the target machine.

    `operations` narrow the choice; of units of a trainer only kernels count whose names begin with `layer_kernels`.

    The most similar machine wins, then the steadier mode of measurement.  Of its last `MAX_COMPARED` measurements the
    median counts, as machines have good and bad minutes; of imported ones the newest, then the fastest.  Only settled
    measurements without concurrent work count, unless most of the last ones were slow or unstable without other load:
    then this is the normal state of the machine, and all of them count.  Hidden ones never count.  If nothing settled,
    a disturbed record is used if it may be (`profiler.selection`).
    """
    unread: set[str] = set()
    apart: list[HostsApart] = []
    usable = [~is_hidden()]
    if operations is not None:
        usable.append(records.c.operation.in_(list(operations)))
    if layer_kernels:  # few rows, while the name of the kernel is in no index
        is_unit = (records.c.fingerprint_id.in_(levels), records.c.operation.in_(sorted(TRAINER_UNITS)))
        is_other = ~records.c.kernel.startswith(layer_kernels, autoescape=True)
        usable.append(records.c.id.not_in(select(records.c.id).where(*is_unit, is_other)))
    is_candidate = records.c.status.in_(("ok", *DISTURBED))
    found = read_times(connection, levels, (*usable, is_candidate), unread)
    usable.append(records.c.is_alone)
    times: Times = {}
    repeated_at: set[Match] = set()
    has_unsettled = False
    for kind, candidates in found.items():
        nearest, counts = _of_same_shape(candidates)
        times[kind] = candidates.take((candidates.matches == nearest) & (counts == 1))
        repeated_at |= set(map(Match, np.unique(nearest[counts > 1]).tolist()))
        has_unsettled |= bool((counts == 0).any())
    rows: list[Any] = []
    for level in sorted(repeated_at):
        conditions = _candidates(levels, level, (*usable, is_candidate))
        repeated = select(records.c.work_hash).where(*conditions).group_by(records.c.work_hash).having(func.count() > 1)
        rows += _median_rows(connection.execute(_compared(conditions, repeated)).all(), unread, apart)
    if has_unsettled:
        rows += _stand_ins(connection, levels, usable)
    for kind, compared in times_of_rows((row[: len(TIMED)] for row in rows), levels, unread).items():
        times[kind] = times[kind].with_more(compared) if kind in times else compared
    measurements = Measurements(device=device, times={kind: own for kind, own in times.items() if len(own.seconds)})
    return ChosenTimings(measurements=measurements, hosts_apart=tuple(apart), unread=frozenset(unread))


def _of_same_shape(times: MeasuredTimes) -> tuple[Ints, Ints]:
    """Return for every time the level of the nearest settled one of its shape, and how many of its shape are there.

    Where none of its shape has settled, the number is 0.
    """
    firsts, shape_of_time = distinct_rows(*times.shapes.T)
    nearest = np.full(len(firsts), len(Match))
    is_settled = ~times.is_disturbed
    np.minimum.at(nearest, shape_of_time[is_settled], times.matches[is_settled])
    own = nearest[shape_of_time]
    counts = np.bincount(shape_of_time[times.matches == own], minlength=len(nearest))
    return own, counts[shape_of_time]


def _candidates(
    levels: Mapping[int, Match], level: Match, usable: Sequence[ColumnElement[bool]]
) -> list[ColumnElement[bool]]:
    """Return the conditions on records of machines at a level, of work that no more similar machine has measured."""
    at_level = [number for number, level_of in levels.items() if level_of == level]
    nearer = [number for number, level_of in levels.items() if level_of < level]
    candidates = [records.c.fingerprint_id.in_(at_level), *usable]
    if nearer:
        is_served = (records.c.fingerprint_id.in_(nearer), *usable, records.c.status == "ok")
        candidates.append(records.c.work_hash.not_in(select(records.c.work_hash).where(*is_served)))
    return candidates


def _median_rows(rows: Sequence[Any], unread: set[str], apart: list[HostsApart]) -> list[Any]:
    """Select the median of each shape and type, among rows (best first) measured like the first one.

    Only settled rows count, unless more of them were slow or unstable.  Collectives with the user's own settings come
    last.  Each host contributes its median; of these the median counts, of two the slower one, because a step over both
    waits for it.  Damaged rows are added to `unread`, hosts that differ to `apart`.
    """
    rows = [row for row in rows if _counts(row, unread)]
    if not rows:
        return []
    columns = dict(zip((column.name for column in _CHOSEN_BY), zip(*rows, strict=True), strict=True))
    settings = list(map(_settings, columns["conditions"]))
    work, host = _numbered(columns["work_hash"]), _numbered(columns["host"])
    how = _numbered(zip(columns["mode"], columns["kernel"], settings, strict=True))
    seconds, is_settled = np.array(columns["seconds"]), np.array(columns["status"]) == "ok"
    has_settings = np.array(list(map(bool, settings)))
    is_plain = ~has_settings | ~_any(work, ~has_settings)
    best_first = np.lexsort((~is_settled, ~is_plain, work))
    is_same = is_plain & (how == how[best_first[_starts(work[best_first])]][work])
    num_same, num_settled = np.bincount(work[is_same]), np.bincount(work[is_same], is_settled[is_same])
    counts = is_same & (is_settled | (2 * num_settled < num_same)[work])
    of_hosts = np.flatnonzero(counts)[np.lexsort((seconds[counts], host[counts], work[counts]))]
    starts = _starts(work[of_hosts], host[of_hosts])
    of_hosts = of_hosts[starts + (np.diff(starts, append=len(of_hosts)) - 1) // 2]
    of_hosts = of_hosts[np.lexsort((seconds[of_hosts], work[of_hosts]))]
    starts = _starts(work[of_hosts])
    sizes = np.diff(starts, append=len(of_hosts))
    fast, slow = of_hosts[starts], of_hosts[starts + sizes - 1]
    differ = np.flatnonzero(seconds[slow] > HOSTS_APART * seconds[fast])
    apart += [HostsApart.of(rows[fast[at]], rows[slow[at]]) for at in differ]
    return [rows[at] for at in of_hosts[starts + sizes // 2]]


def _counts(row: Any, unread: set[str]) -> bool:
    operation, _, _, seconds, key, _, _, is_disturbed, _, status, _, conditions, *_ = row
    if not isinstance(seconds, int | float):  # damaged: text instead of a number
        unread.add(key)
        return False
    return not is_disturbed or may_stand_in(operation, status, json.loads(conditions))


def _numbered(values: Iterable[Hashable]) -> Ints:
    """Return a number for every value, equal ones alike, in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


def _starts(*columns: Ints) -> Ints:
    """Return where the values of ordered columns change."""
    changes = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(np.append(True, changes))


def _any(groups: Ints, is_so: Bools) -> Bools:
    """Return for every row whether any row of its group is so."""
    return (np.bincount(groups, is_so) > 0)[groups]


def _compared(candidates: Sequence[ColumnElement[bool]], repeated: Select[Any]) -> Select[Any]:
    """Return the query of the records among which `_median_rows` selects, those first that count first.

    `candidates` are conditions on records, `repeated` is the work that several of these measured.
    """
    is_settled = records.c.status == "ok"
    measured = select(records.c.work_hash).where(*candidates, is_settled, records.c.mode != "imported")
    slowed = and_(records.c.status == "contaminated", records.c.reason.startswith(SLOWED))
    restless = and_(
        or_(records.c.status == "unstable", slowed),
        records.c.mode != "imported",
        records.c.work_hash.in_(measured),
    )
    order: tuple[ColumnElement[Any], ...] = (
        case({mode: at for at, mode in enumerate(_PREFERRED_MODES)}, value=records.c.mode),
        records.c.measured_at.desc(),
        records.c.seconds,
        records.c.id,
    )
    place = func.row_number().over(partition_by=records.c.work_hash, order_by=order).label("place")
    query = select(records.c.id, place).where(*candidates, or_(is_settled, restless), records.c.work_hash.in_(repeated))
    chosen = query.subquery()
    is_compared = or_(chosen.c.place == 1, and_(chosen.c.place <= MAX_COMPARED, records.c.mode != "imported"))
    return select(*_CHOSEN_BY).join(chosen, and_(records.c.id == chosen.c.id, is_compared)).order_by(chosen.c.place)


def beside_products(connection: Connection, levels: Mapping[int, Match]) -> list[BesideProducts]:
    """Return the collectives measured together with GEMMs on the most similar machines that have any."""
    for level in sorted(set(levels.values())):
        query = select(records).where(
            records.c.fingerprint_id.in_([number for number, level_of in levels.items() if level_of == level]),
            records.c.operation.in_(sorted(COLLECTIVES)),
            records.c.status == "ok",
            ~records.c.is_alone,
            ~is_hidden(),
        )
        rows = connection.execute(query.order_by(records.c.id))
        if measurements := [measured for row in rows if (measured := _beside(row))]:
            return measurements
    return []


def _beside(row: Any) -> BesideProducts | None:
    """Return the overlap measured in a row; None for older rows without the time of the GEMMs."""
    try:
        return BesideProducts(
            operation=row.operation,
            shape=shape_of(row.shape),
            dtype=row.dtype,
            seconds=float(row.seconds),
            products_s=float(json.loads(row.conditions)[PRODUCTS_S]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def _settings(conditions: str) -> tuple[tuple[str, str], ...]:
    """Return the user's settings of the collective library in the conditions of a measurement."""
    if "NCCL_" not in conditions:
        return ()
    return tuple(sorted((name, value) for name, value in json.loads(conditions).items() if name.startswith("NCCL_")))


def _middle(rows: Iterable[Any]) -> Any:
    """Return the median row by seconds; of two, the faster one."""
    ordered = sorted(rows, key=lambda row: row.seconds)
    return ordered[(len(ordered) - 1) // 2]


def _stand_ins(connection: Connection, levels: Mapping[int, Match], usable: Sequence[ColumnElement[bool]]) -> list[Any]:
    """Return rows of disturbed records for work without a clean record on any machine of `levels`."""
    served = select(records.c.work_hash).where(records.c.fingerprint_id.in_(levels), records.c.status == "ok", *usable)
    query = select(*_CHOSEN_BY).where(
        records.c.fingerprint_id.in_(levels),
        records.c.status.in_(DISTURBED),
        records.c.work_hash.not_in(served),
        *usable,
    )
    stand_ins: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for row in connection.execute(query.order_by(records.c.id)):
        if may_stand_in(row.operation, row.status, json.loads(row.conditions)):
            stand_ins[row.operation, row.shape, row.dtype].append(row)
    chosen = []
    for alike in stand_ins.values():
        nearest = min(levels[row.fingerprint_id] for row in alike)
        middle = _middle(row for row in alike if levels[row.fingerprint_id] == nearest)
        chosen.append(middle)
    return chosen
