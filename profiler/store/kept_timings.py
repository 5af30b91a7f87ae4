"""Cache of the timings selected by searches, so that a large database is read only once."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import cast

import numpy as np
from sqlalchemy import Connection, func, select

from autoplan.base.errors import InputError
from autoplan.base.files import replacing
from autoplan.base.version import __version__
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.store.chosen_timings import ChosenTimings, HostsApart, choose_timings
from autoplan.profiler.store.schema import marks, records
from autoplan.spec.measurement import Match, MeasuredTimes, Measurements
from autoplan.spec.operations import Operation

MAX_READ = 5_000  # records from which a selection takes a tenth of a second
MAX_FILES = 20  # the newest are kept
_COLUMNS = tuple(column.name for column in fields(MeasuredTimes))


def serving_timings(
    connection: Connection, target: Fingerprint, levels: Mapping[int, Match], operations: Collection[Operation] | None
) -> ChosenTimings:
    """Return the result of `choose_timings`, for many records from the cache unless there are new records or marks."""
    of_machines = records.c.fingerprint_id.in_(levels)
    num_records, newest = connection.execute(select(func.count(), func.max(records.c.id)).where(of_machines)).one()
    if num_records <= MAX_READ:
        return choose_timings(connection, target.device, levels, operations)
    # A database is append-only, so equal numbers of records and marks mean equal content.  They are read before the
    # selection, so that additions in the meantime invalidate the cache next time.
    key = connection.execute(select(records.c.key).where(records.c.id == newest)).scalar()
    num_marks = connection.execute(select(func.count()).select_from(marks)).scalar()
    state = json.dumps([__version__, sorted(levels.items()), num_records, newest, key, num_marks])
    place = connection.engine.url.render_as_string(), astuple(target), operations and sorted(operations)
    path = _folder() / f"{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]}.npz"
    chosen = _kept(path, state, target.device)
    if chosen is None:
        chosen = choose_timings(connection, target.device, levels, operations)
        with suppress(OSError, InputError):  # an unwritable cache only costs time
            _keep(path, state, chosen)
    return chosen


def _folder() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("autoplan", appauthor=False) / "timings"


def _kept(path: Path, state: str, device: str) -> ChosenTimings | None:
    """Return the selection in the file; None if it is missing, damaged or for another state."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            if str(arrays["state"]) != state:
                return None
            times = {}
            for kind in arrays["kinds"].tolist():
                operation, _, dtype = kind.partition(" ")
                columns = {name: arrays[f"{kind} {name}"] for name in _COLUMNS}
                times[cast(Operation, operation), dtype] = MeasuredTimes(**columns)
            hosts = tuple(HostsApart(**pair) for pair in json.loads(str(arrays["hosts_apart"])))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return ChosenTimings(measurements=Measurements(device=device, times=times), hosts_apart=hosts)


def _keep(path: Path, state: str, chosen: ChosenTimings) -> None:
    """Write a selection that this version fully understands, and remove the least recently used files."""
    if chosen.unread:
        return
    arrays = {
        "state": np.array(state),
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
