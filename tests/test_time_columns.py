"""Are times that a database joins into texts those of its records one by one, and damaged ones passed over?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, create_engine, select
from sqlalchemy.pool import StaticPool

from autoplan.profiler.store.schema import metadata, records
from autoplan.profiler.store.time_columns import TIMED, Times, read_times, times_of_rows
from autoplan.spec.measurement import Match, Measurement, Measurements
from autoplan.spec.operations import SHAPES

LEVELS = {3: Match.EXACT, 5: Match.DEVICE}
USABLE = [records.c.status.in_(("ok", "unstable"))]
NAMES = ("operation", "shape", "seconds", "key", "fingerprint_id", "mode", "status")
SOUND = ("gemm", "128x256x64", 1e-3, "a" * 64, 3, "sustained", "ok")

numbers = st.one_of(st.integers(-1, 3), st.integers(10**17, 10**19)).map(str)
rows = st.builds(
    lambda operation, sizes, seconds, number, mode, status: (operation, "x".join(sizes), seconds, number, mode, status),
    st.sampled_from(["gemm", "norm", "attention", "later"]),
    st.lists(numbers, min_size=1, max_size=6),
    st.one_of(st.sampled_from([0.0, 1e-40, 1e7, "text", None]), st.floats(1e-9, 1e5)),
    st.sampled_from(list(LEVELS)),
    st.sampled_from(["sustained", "burst"]),
    st.sampled_from(["ok", "unstable", "failed"]),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    metadata.create_all(engine)
    yield engine
    engine.dispose()


def stored(connection: Connection, *stored_rows: tuple[Any, ...]) -> None:
    """Add rows of the columns `NAMES`, whatever is in them."""
    blank = ("kernel", "reason", "conditions", "source", "measured_by", "host", "measured_at", "added_at")
    others = {"dtype": "bf16", "work_hash": 0, "is_alone": 1, "samples": b"", "protocol": 1, **dict.fromkeys(blank, "")}
    for row in stored_rows:
        values = {**others, **dict(zip(NAMES, row, strict=True))}
        places = ", ".join("?" * len(values))
        connection.exec_driver_sql(f"INSERT INTO records ({', '.join(values)}) VALUES ({places})", (*values.values(),))


def both_ways(connection: Connection) -> tuple[Times, Times, set[str]]:
    """Return the times by `read_times`, those of the rows one by one, and the keys that both left out."""
    unread: set[str] = set()
    unread_of_rows: set[str] = set()
    found = read_times(connection, LEVELS, USABLE, unread)
    one_by_one = times_of_rows(
        connection.execute(select(*TIMED).where(*USABLE, records.c.is_alone)), LEVELS, unread_of_rows
    )
    assert unread == unread_of_rows
    return found, one_by_one, unread


def words(times: Times) -> list[Measurement]:
    return sorted(Measurements(device="lab", times=times), key=str)


@given(new=st.lists(rows, max_size=6))
def test_columns_hold_what_the_rows_do_one_by_one(engine: Engine, new: list[tuple[Any, ...]]) -> None:
    with engine.connect() as connection:  # which nothing commits
        stored(connection, *((*row[:3], f"{at:064}", *row[3:]) for at, row in enumerate(new)))
        found, one_by_one, _ = both_ways(connection)
        assert words(found) == words(one_by_one)
        connection.rollback()


def test_rows_of_all_operations_are_converted(engine: Engine) -> None:
    with engine.connect() as connection:
        for at, (operation, names) in enumerate(SHAPES.items()):
            shape = "x".join("0" if name == "window" else "8" for name in names)
            stored(connection, (operation, shape, 1e-3, f"{at:064}", *SOUND[4:]))
        found, _, unread = both_ways(connection)
        connection.rollback()
    assert {operation for operation, _ in found} == set(SHAPES)
    assert not unread
    assert {times.shapes.dtype for times in found.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("place", "damage"),
    [
        *((1, "128x256"), (1, "128x256x64x1"), (1, "128x256x64\n8x8x8"), (1, "128x256x"), (1, "128x256x6.4")),
        *((2, "soon"), (2, -1.0), (2, 1e-320), (2, None)),
    ],
)
def test_a_damaged_row_leaves_the_others(engine: Engine, place: int, damage: object) -> None:
    damaged: list[Any] = [*SOUND]
    damaged[place], damaged[3] = damage, "b" * 64
    with engine.connect() as connection:
        stored(connection, SOUND, tuple(damaged))
        found, _, unread = both_ways(connection)
        connection.rollback()
    assert [measured.source for measured in words(found)] == ["a" * 12]
    assert unread == {"b" * 64}
