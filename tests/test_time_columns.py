"""Are rows of measured times converted at once as they are one by one, and damaged ones passed over?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.profiler.store.time_columns import _read, measurements_of
from autoplan.spec.measurement import Match, Measurement, Measurements
from autoplan.spec.operations import SHAPES

LEVELS = {3: Match.EXACT, 5: Match.DEVICE}
SOUND = ("gemm", "bf16", "128x256x64", 1e-3, "a" * 64, 3, False, False)

numbers = st.one_of(st.integers(-1, 3), st.integers(10**17, 10**19)).map(str)
rows = st.builds(
    lambda operation, sizes, seconds, number, is_burst, is_disturbed: (
        *(operation, "bf16", "x".join(sizes), seconds, f"{number}{len(sizes)}" * 32, number, is_burst, is_disturbed),
    ),
    st.sampled_from(["gemm", "norm", "attention", "later"]),
    st.lists(numbers, min_size=1, max_size=6),
    st.sampled_from([1e-3, 2.0, 0.0, 1e-40, 1e7, float("nan"), "text", None]),
    st.sampled_from(list(LEVELS)),
    st.booleans(),
    st.booleans(),
)


def words(times: Measurements) -> list[Measurement]:
    return sorted(times, key=str)


@given(stored=st.lists(rows, max_size=6))
def test_columns_hold_what_the_rows_do_one_by_one(stored: list[tuple[Any, ...]]) -> None:
    unread: set[str] = set()
    expected: set[str] = set()
    found = measurements_of("lab", stored, LEVELS, unread)
    one_by_one = Measurements.of_rows("lab", _read(stored, LEVELS, expected))
    assert words(found) == words(one_by_one)
    assert unread == expected


def test_rows_of_all_operations_are_converted() -> None:
    of_all = [
        (operation, "bf16", "x".join("0" if name == "window" else "8" for name in names), *SOUND[3:])
        for operation, names in SHAPES.items()
    ]
    unread: set[str] = set()
    found = measurements_of("lab", of_all, LEVELS, unread)
    assert {measured.operation for measured in found} == set(SHAPES)
    assert not unread
    assert {times.shapes.dtype for times in found.times.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("place", "damage"),
    [
        *((2, "128x256"), (2, "128x256x64x1"), (2, b"128x256x64"), (2, "128x256x64\n8x8x8")),
        *((3, "soon"), (3, -1.0)),
    ],
)
def test_a_damaged_row_leaves_the_others(place: int, damage: object) -> None:
    damaged = [*SOUND]
    damaged[place], damaged[4] = damage, "b" * 64
    unread: set[str] = set()
    found = measurements_of("lab", [SOUND, tuple(damaged)], LEVELS, unread)
    assert [measured.source for measured in found] == ["a" * 12]
    assert unread == {"b" * 64}
