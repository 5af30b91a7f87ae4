"""Cache of the timings selected by searches, so that a large database is read only once."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from sqlalchemy import Connection, func, select

from autoplan.base.errors import InputError
from autoplan.base.files import replacing
from autoplan.base.version import __version__
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.store.chosen_timings import ChosenTimings, HostsApart, choose_timings
from autoplan.profiler.store.rows import shape_of
from autoplan.profiler.store.schema import marks, records
from autoplan.spec.measurement import Match, MeasuredTimes, Measurements
from autoplan.spec.operations import Operation

MAX_READ = 5_000  # records from which a selection takes a tenth of a second
MAX_NEWS = 200  # shapes chosen anew in every search, before the file is written again
MAX_FILES = 20  # the newest are kept
_COLUMNS = tuple(column.name for column in fields(MeasuredTimes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Contents of a database as far as a selection depends on them.

    A database is append-only: what has equal numbers of records and marks up to the newest ones has equal content.
    """

    version: str
    levels: list[tuple[int, int]]
    num_records: int  # of the machines in `levels`
    newest: int
    key: str  # of the newest record
    num_marks: int
    newest_mark: int


def serving_timings(
    connection: Connection, target: Fingerprint, levels: Mapping[int, Match], operations: Collection[Operation] | None
) -> ChosenTimings:
    """Return the result of `choose_timings`, for many records from the cache, except for work with news."""
    of_machines = records.c.fingerprint_id.in_(levels)
    num_records, newest = connection.execute(select(func.count(), func.max(records.c.id)).where(of_machines)).one()
    if num_records <= MAX_READ:
        return choose_timings(connection, target.device, levels, operations)
    # Read before the selection, so that additions in the meantime are news next time.
    num_marks, newest_mark = connection.execute(select(func.count(), func.max(marks.c.id))).one()
    state = _State(
        version=__version__,
        levels=sorted((number, int(level)) for number, level in levels.items()),
        num_records=num_records,
        newest=newest,
        key=_key_of(connection, newest),
        num_marks=num_marks,
        newest_mark=newest_mark or 0,
    )
    place = connection.engine.url.render_as_string(), astuple(target), operations and sorted(operations)
    path = _folder() / f"{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]}.npz"
    before, chosen = _kept(path, target.device) or (None, None)
    work = _new_work(connection, before, state, operations) if before else None
    if chosen is None or work is None:
        chosen = choose_timings(connection, target.device, levels, operations)
    elif work:
        chosen = _replaced(chosen, work, choose_timings(connection, target.device, levels, operations, work))
    if work is None or len(work) > MAX_NEWS:
        with suppress(OSError, InputError):  # an unwritable cache only costs time
            _keep(path, state, chosen)
    return chosen


def _new_work(
    connection: Connection, before: _State, state: _State, operations: Collection[Operation] | None
) -> list[Any] | None:
    """Return (operation, shape, dtype, work_hash) of records and marks added since a state; None: choose from all."""
    if before == state:
        return []
    columns = [records.c[name] for name in ("fingerprint_id", "operation", "shape", "dtype", "work_hash")]
    added = connection.execute(select(*columns).where(records.c.id > before.newest).limit(MAX_READ + 1)).all()
    is_new_mark = marks.c.id > before.newest_mark
    marked = connection.execute(select(*columns).join(marks).where(is_new_mark).limit(MAX_READ + 1)).all()
    numbers = {number for number, _ in state.levels}
    of_machines = [row for row in added if row.fingerprint_id in numbers]
    # Numbers are given out before transactions end, so older ones may be new: then the counts disagree.
    if (
        before.version != state.version
        or not {*before.levels} <= {*state.levels}
        or before.num_records + len(of_machines) != state.num_records
        or before.num_marks + len(marked) != state.num_marks
        or before.key != _key_of(connection, before.newest)
        or len(added) + len(marked) > MAX_READ
    ):
        return None
    work = {row[1:]: row for row in (*of_machines, *marked)}
    return [row for row in work.values() if operations is None or row.operation in operations]


def _key_of(connection: Connection, number: int) -> str:
    return str(connection.execute(select(records.c.key).where(records.c.id == number)).scalar())


def _replaced(chosen: ChosenTimings, work: Iterable[Any], new: ChosenTimings) -> ChosenTimings:
    """Return a selection in which that of some work is new."""
    words, shapes = set(), defaultdict(set)
    for row in work:
        words.add(f"{row.operation} {row.shape} {row.dtype}")
        with suppress(ValueError):  # damaged: it was never chosen
            shapes[row.operation, row.dtype].add(shape_of(row.shape))
    times = dict(chosen.measurements.times)
    for kind, changed in shapes.items():
        if kind in times:
            rest = np.array([tuple(shape) not in changed for shape in times[kind].shapes.tolist()])
            times[kind] = times[kind].take(rest)
    for kind, added in new.measurements.times.items():
        times[kind] = times[kind].with_more(added) if kind in times else added
    apart = [pair for pair in chosen.hosts_apart if pair.what not in words]
    return ChosenTimings(
        measurements=replace(
            chosen.measurements, times={kind: rows for kind, rows in times.items() if len(rows.seconds)}
        ),
        hosts_apart=(*apart, *new.hosts_apart),
        unread=new.unread,
    )


def _folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("autoplan", appauthor=False) / "timings"


def _kept(path: Path, device: str) -> tuple[_State, ChosenTimings] | None:
    """Return the selection in the file, and of which state it is; None if it is missing or damaged."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            state = msgspec.json.decode(str(arrays["state"]), type=_State)
            times = {}
            for kind in arrays["kinds"].tolist():
                operation, _, dtype = kind.partition(" ")
                columns = {name: arrays[f"{kind} {name}"] for name in _COLUMNS}
                times[cast(Operation, operation), dtype] = MeasuredTimes(**columns)
            hosts = tuple(HostsApart(**pair) for pair in json.loads(str(arrays["hosts_apart"])))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return state, ChosenTimings(measurements=Measurements(device=device, times=times), hosts_apart=hosts)


def _keep(path: Path, state: _State, chosen: ChosenTimings) -> None:
    """Write a selection that this version fully understands, and remove the least recently used files."""
    if chosen.unread:
        return
    arrays = {
        "state": np.array(msgspec.json.encode(state).decode()),
        "hosts_apart": np.array(json.dumps([asdict(pair) for pair in chosen.hosts_apart])),
    }
    kinds = chosen.measurements.times
    arrays["kinds"] = np.array([" ".join(kind) for kind in kinds], dtype=np.str_)
    for kind, times in kinds.items():
        arrays |= {f"{' '.join(kind)} {name}": getattr(times, name) for name in _COLUMNS}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, force=True) as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    for old in sorted(path.parent.glob("*.npz"), key=lambda file: -file.stat().st_mtime)[MAX_FILES:]:
        old.unlink(missing_ok=True)
