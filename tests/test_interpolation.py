"""Do times between scattered points follow their sizes, stay within what was measured, and end where nothing was?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.arrays import Floats
from autoplan.base.interpolation import Scattered

# Multiples of a tile: padding plays no part.
LINE = np.array([[512.0], [1024.0], [4096.0], [8192.0]])


def scattered(random: np.random.Generator, count: int) -> Floats:
    """Points spread evenly in the logarithm of three sizes, from 128 to 16,384."""
    return np.unique(np.round(np.exp(random.uniform(np.log(128), np.log(16384), (count, 3)))), axis=0)


def product_s(sizes: Floats) -> Floats:
    """A start of 3 us, operations at 700 TFLOP/s and bytes at 3 TB/s, one after the other."""
    m, n, k = sizes.T
    return 3e-6 + 2 * m * n * k / 700e12 + 2 * (m * k + k * n + m * n) / 3e12


def fitted_alone(table: Scattered) -> Scattered:
    return replace(table, residuals=np.zeros_like(table.residuals))


@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4), st.floats(1.0, 2.0))
def test_along_a_line_what_the_fit_misses_is_interpolated_linearly(noise: list[float], shift: float) -> None:
    table = Scattered.of(LINE, np.array(noise) * LINE[:, 0] * 1e-9, (1,))
    places = np.array([[1024.0], [2048.0], [4096.0]])  # the middle one halfway between measured ones
    missed = np.log(table.at(places) / fitted_alone(table).at(places))
    assert missed[1] == pytest.approx((missed[0] + missed[2]) / 2, abs=1e-9)


def test_a_point_gives_its_time_back() -> None:
    sizes = scattered(np.random.default_rng(0), 500)
    seconds = np.random.default_rng(1).lognormal(size=len(sizes))
    np.testing.assert_allclose(Scattered.of(sizes, seconds, (1, 1, 1)).at(sizes), seconds, rtol=1e-9)


def test_starts_bytes_and_operations_are_found_from_scattered_points() -> None:
    random = np.random.default_rng(0)
    sizes = scattered(random, 300)
    table = Scattered.of(sizes, product_s(sizes), (1, 1, 1))
    places = random.uniform(sizes.min(axis=0), sizes.max(axis=0), (500, 3))
    found = table.at(places)
    known = ~np.isnan(found)
    assert known.mean() > 0.9
    np.testing.assert_allclose(found[known], product_s(places[known]), rtol=0.02)


def test_beyond_the_greatest_first_size_the_fit_grows_on() -> None:
    sizes = scattered(np.random.default_rng(0), 300)
    table = Scattered.of(sizes, 1.3 * product_s(sizes), (1, 1, 1))
    place = np.array([[1e6, 4096, 4096]])
    np.testing.assert_allclose(table.at(place), 1.3 * product_s(place), rtol=0.02)


def test_a_single_point_tells_the_rate_of_its_work() -> None:
    table = Scattered.of(np.array([[4096.0, 2.0]]), np.array([1.0]), (2, 1))
    assert table.at(np.array([[8192.0, 2.0]]))[0] == pytest.approx(4.0, rel=0.05)


def test_points_below_the_size_that_tells_a_rate_answer_as_far_as_they_are_apart() -> None:
    """One message of 1 KiB took a gloo pair 1 ms: a MiB does not take a second."""
    short = Scattered.of(np.array([[1024.0], [16384.0]]), np.array([1.0e-3, 1.1e-3]), (1,), rate_from=2.0**20)
    assert np.isnan(short.at(np.array([[16384.0 * 16], [16384.0 * 16 + 1]]))).tolist() == [False, True]
    alone = Scattered.of(np.array([[1024.0]]), np.array([1.0e-3]), (1,), rate_from=2.0**20)
    assert np.isnan(alone.at(np.array([[4096.0], [2.0**20]]))).tolist() == [False, True]
    long = Scattered.of(np.array([[2.0**20]]), np.array([2.0e-3]), (1,), rate_from=2.0**20)
    assert long.at(np.array([[2.0**30]]))[0] == pytest.approx(2.048, rel=0.011)  # `UNSEEN` of it is a start-up


def test_no_answer_leads_beyond_what_was_measured_nearby() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        sizes = scattered(random, 12)  # all of them neighbours of every place
        table = Scattered.of(sizes, product_s(sizes) * random.lognormal(size=len(sizes)), (1, 1, 1))
        places = random.uniform(sizes.min(axis=0), sizes.max(axis=0), (100, 3))
        missed = np.log(table.at(places) / fitted_alone(table).at(places))
        known = missed[~np.isnan(missed)]
        assert known.min() >= table.residuals.min() - 1e-9
        assert known.max() <= table.residuals.max() + 1e-9


def test_what_the_fit_misses_everywhere_alike_is_missed_between_too() -> None:
    random = np.random.default_rng(0)
    sizes = scattered(random, 100)
    table = Scattered.of(sizes, product_s(sizes) * random.lognormal(sigma=0.1, size=len(sizes)), (1, 1, 1))
    twice = replace(table, residuals=table.residuals + np.log(2))
    places = scattered(random, 100)
    np.testing.assert_allclose(twice.at(places), 2 * table.at(places), rtol=1e-9)


def test_another_unit_of_time_changes_nothing_else() -> None:
    random = np.random.default_rng(0)
    sizes = scattered(random, 200)
    seconds = product_s(sizes) * random.lognormal(sigma=0.1, size=len(sizes))
    places = scattered(random, 200)
    in_us = Scattered.of(sizes, 1e6 * seconds, (1, 1, 1)).at(places)
    np.testing.assert_allclose(in_us, 1e6 * Scattered.of(sizes, seconds, (1, 1, 1)).at(places), rtol=1e-9)


def test_kernels_of_full_tiles_are_told_from_those_of_a_row_more() -> None:
    rows = np.array([512, 513, 1024, 1025, 2048, 2049, 4096, 4097], dtype=float)
    sizes = np.column_stack([rows, np.full(8, 4096.0), np.full(8, 4096.0)])
    seconds = product_s(sizes) * np.where(rows % 2 == 1, 1.2, 1.0)
    hidden = np.array([2, 3])
    found = Scattered.of(np.delete(sizes, hidden, axis=0), np.delete(seconds, hidden), (1, 1, 1)).at(sizes[hidden])
    to_own, to_other = np.abs(np.log(found / seconds[hidden])), np.abs(np.log(found / seconds[hidden][::-1]))
    assert (to_own < to_other / 2).all()


@pytest.mark.parametrize(("ratio", "known"), [(3.9, True), (4.1, False), (8.0, False), (15.5, False), (17.0, True)])
def test_far_from_every_point_there_is_no_answer(ratio: float, known: bool) -> None:
    table = Scattered.of(np.array([[128.0, 128.0], [128.0, 128.0 * 64]]), np.array([1.0, 2.0]), (1, 1))
    assert np.isnan(table.at(np.array([[128.0, 128.0 * ratio]]))[0]) != known


@pytest.mark.parametrize("place", [(127.0, 4096.0), (4096.0, 127.0), (4096.0, 9000.0), (np.nan, 4096.0), (0.0, 4096.0)])
def test_outside_the_range_of_a_size_there_is_no_answer(place: tuple[float, float]) -> None:
    sizes = np.array([(m, n) for m in (128.0, 1024.0, 8192.0) for n in (128.0, 1024.0, 8192.0)])
    table = Scattered.of(sizes, sizes[:, 0] * sizes[:, 1], (1, 1))
    assert np.isnan(table.at(np.array([place]))[0])
