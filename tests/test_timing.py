"""Does the timing table give measured times back, interpolate between them, and refuse what it cannot know?"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import InputError
from autoplan.read.cluster import load_cluster
from autoplan.timing import Measurement, Operation, TimingTable, burst_factors


def measured(operation: Operation, shape: tuple[int, ...], seconds: float, dtype: str = "bf16") -> Measurement:
    return Measurement(operation=operation, shape=shape, dtype=dtype, device="lab", seconds=seconds)


def power_law(m: float, n: float, k: float) -> float:
    return 1e-12 * m**0.9 * n**0.95 * k**1.05


SIZES = (256, 512, 1024, 4096)
GRID = TimingTable.of(
    measured("gemm", (m, n, k), power_law(m, n, k)) for m in SIZES for n in SIZES for k in SIZES if m != n or n != k
)


def seconds(table: TimingTable, operation: Operation, *shape: float) -> float:
    return float(table.lookup(operation, "bf16", np.array([shape], dtype=float)).seconds[0])


def test_a_measured_shape_gives_its_time_back() -> None:
    found = GRID.lookup("gemm", "bf16", np.array([[256, 512, 4096]]))
    assert found.seconds[0] == pytest.approx(power_law(256, 512, 4096), rel=1e-12)
    assert found.is_exact[0]


@given(st.integers(513, 4095), st.integers(257, 511), st.integers(1025, 4095))
def test_times_that_follow_a_power_law_are_interpolated_exactly(m: int, n: int, k: int) -> None:
    found = GRID.lookup("gemm", "bf16", np.array([[m, n, k]]))
    assert found.seconds[0] == pytest.approx(power_law(m, n, k), rel=1e-9)
    assert not found.is_exact[0]


def test_an_interpolated_time_lies_between_its_neighbours() -> None:
    table = TimingTable.of([measured("gemm", (256, 512, 512), 1.0), measured("gemm", (1024, 512, 512), 2.0)])
    assert seconds(table, "gemm", 512, 512, 512) == pytest.approx(2**0.5)
    assert 1 < seconds(table, "gemm", 300, 512, 512) < seconds(table, "gemm", 900, 512, 512) < 2


@pytest.mark.parametrize("shape", [(512, 128, 512), (512, 512, 8192), (128, 512, 512), (0, 512, 512)])
def test_a_shape_outside_what_was_measured_is_refused(shape: tuple[int, ...]) -> None:
    assert np.isnan(seconds(GRID, "gemm", *shape))


def test_beyond_the_largest_batch_the_rate_stays() -> None:
    assert seconds(GRID, "gemm", 16384, 512, 512) == pytest.approx(4 * power_law(4096, 512, 512))
    table = TimingTable.of([measured("attention", (1, 4096, 32, 8, 128, 0), 1.0)])
    assert seconds(table, "attention", 1, 8192, 32, 8, 128, 0) == pytest.approx(4.0)  # seq_len squared
    table = TimingTable.of([measured("all_reduce", (8, 8, 1, 2**29), 1.0)])
    assert seconds(table, "all_reduce", 8, 8, 1, 2**31) == pytest.approx(4.0)


def test_a_missing_neighbour_refuses_only_what_needs_it() -> None:
    corners = [(256, 256), (256, 512), (512, 256)]
    table = TimingTable.of(measured("gemm", (m, n, k), power_law(m, n, k)) for n, k in corners for m in (128, 256))
    assert np.isnan(seconds(table, "gemm", 200, 300, 300))
    assert seconds(table, "gemm", 200, 300, 256) == pytest.approx(power_law(200, 300, 256))


def test_lines_may_be_measured_at_different_batches() -> None:
    points = [(64, 256), (1024, 256), (128, 512), (2048, 512)]
    table = TimingTable.of(measured("gemm", (m, n, 512), power_law(m, n, 512)) for m, n in points)
    assert seconds(table, "gemm", 500, 400, 512) == pytest.approx(power_law(500, 400, 512))
    assert np.isnan(seconds(table, "gemm", 100, 400, 512))  # below the first point of one of the two lines


@pytest.mark.parametrize("shape", [(1, 4096, 32, 8, 64, 0), (1, 4096, 32, 4, 128, 0), (1, 4096, 32, 8, 128, 1024)])
def test_head_sizes_and_windows_must_match(shape: tuple[int, ...]) -> None:
    table = TimingTable.of(measured("attention", (1, length, 32, 8, 128, 0), 1.0) for length in (2048, 8192))
    assert seconds(table, "attention", 1, 4096, 32, 8, 128, 0) == pytest.approx(1.0)
    assert np.isnan(seconds(table, "attention", *shape))


def test_group_sizes_of_collectives_must_match() -> None:
    table = TimingTable.of(measured("all_gather", (size, size, 1, 2**20), 1.0) for size in (2, 8))
    assert np.isnan(seconds(table, "all_gather", 4, 4, 1, 2**20))
    assert np.isnan(seconds(table, "all_gather", 8, 1, 1, 2**20))


def test_other_types_and_operations_are_refused() -> None:
    shapes = np.array([[256, 512, 1024]])
    assert np.isnan(GRID.lookup("gemm", "fp8", shapes).seconds).all()
    assert np.isnan(seconds(GRID, "all_reduce", 8, 8, 1, 2**20))


def test_the_median_of_repeats_counts() -> None:
    table = TimingTable.of(measured("gemm", (64, 64, 64), value) for value in (1.0, 2.0, 9.0))
    assert seconds(table, "gemm", 64, 64, 64) == pytest.approx(2.0)


def test_a_refused_shape_takes_the_reference() -> None:
    found = GRID.lookup("gemm", "bf16", np.array([[256, 512, 4096], [300, 512, 4096], [8, 8, 8]]))
    times = found.otherwise(np.array([7.0, 7.0, 7.0]))
    assert times[2] == 7.0
    assert (times[:2] < 7.0).all()


def test_another_lookup_fills_what_the_first_refused() -> None:
    shapes = np.array([[256, 512, 4096], [300, 512, 4096], [8, 8, 8]])
    small = TimingTable.of([measured("gemm", (8, 8, 8), 5.0), measured("gemm", (256, 512, 4096), 6.0)])
    both = GRID.lookup("gemm", "bf16", shapes).before(small.lookup("gemm", "bf16", shapes))
    assert both.seconds[0] == pytest.approx(power_law(256, 512, 4096))
    assert both.seconds[2] == pytest.approx(5.0)
    assert both.is_exact.tolist() == [True, False, True]


def test_kin_that_take_another_time_were_not_measured() -> None:
    found = GRID.lookup("gemm", "bf16", np.array([[256, 512, 4096], [256, 512, 1024]]))
    kin = found.scaled(np.array([1.0, 2.0]))
    assert kin.is_exact.tolist() == [True, False]
    assert kin.seconds[1] == 2 * found.seconds[1]


def test_a_nudge_multiplies_measured_and_interpolated_times_apart() -> None:
    table = dataclasses.replace(GRID, nudge=(2.0, 3.0))
    shapes = np.array([[256, 512, 4096], [300, 512, 4096], [8, 8, 8]])
    plain, nudged = (one.lookup("gemm", "bf16", shapes).otherwise(np.full(3, 7.0)) for one in (GRID, table))
    assert nudged == pytest.approx(plain * [2.0, 3.0, 1.0])


def test_burst_benchmarks_are_slowed_down_to_what_training_sustains() -> None:
    device = load_cluster("b200:1x8").device
    factors = burst_factors(device)
    assert factors["gemm"] == pytest.approx(device.gemm.burst_efficiency / device.gemm_efficiency)
    table = TimingTable.of([measured("gemm", (64, 64, 64), 1.0)], slower=factors)
    assert seconds(table, "gemm", 64, 64, 64) == pytest.approx(factors["gemm"])
    assert factors["gemm"] > 1.3  # `modelling` C2: ratio about .70


def test_a_shape_costs_the_same_in_any_batch() -> None:
    random = np.random.default_rng(0)
    shapes = random.integers(100, 6000, size=(500, 3))
    together = GRID.lookup("gemm", "bf16", shapes).seconds
    alone = [GRID.lookup("gemm", "bf16", row[None]).seconds[0] for row in shapes]
    np.testing.assert_array_equal(together, alone)


def test_a_hundred_thousand_shapes_take_well_under_a_second() -> None:
    sizes = [2**power for power in range(6, 17)]
    many = [*range(64, 20_000, 397)]
    table = TimingTable.of(measured("gemm", (m, n, k), power_law(m, n, k)) for n in sizes for k in sizes for m in many)
    shapes = np.random.default_rng(0).integers(64, 30_000, size=(100_000, 3))
    start = time.process_time()
    table.lookup("gemm", "bf16", shapes)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("shape", [(1, 2), (1, 2, -3)])
def test_a_measurement_must_have_the_numbers_of_its_operation(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="gemm needs m, n, k"):
        measured("gemm", shape, 1.0)


def test_a_table_is_of_one_device() -> None:
    other = Measurement(operation="gemm", shape=(1, 1, 1), dtype="bf16", device="other", seconds=1.0)
    with pytest.raises(InputError, match="one device"):
        TimingTable.of([measured("gemm", (1, 1, 1), 1.0), other])


def test_rows_of_the_wrong_width_are_refused() -> None:
    with pytest.raises(InputError, match="rows of m, n, k"):
        GRID.lookup("gemm", "bf16", np.array([[1, 2]]))
