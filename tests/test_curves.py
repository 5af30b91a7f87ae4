"""Do the curves fall with small sizes, reach their plateau, and match what was published?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.curves import AttentionCurve, CollectiveCurve, GemmCurve
from autoplan.base.errors import InputError
from autoplan.readers.cluster import load_cluster, preset_clusters

SIZES = st.floats(1, 1e6)
NCCL = CollectiveCurve(
    start_s=5e-6,
    step_s=1e-6,
    fill_s=24e-6,
    half_fill_bytes=4 * 2**20,
    pair_slowdown=0.3,
    fit_error=0.08,
    source="test",
)


def array(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array([value], dtype=float)


@given(SIZES, SIZES, SIZES, st.floats(1, 100))
def test_a_larger_product_runs_at_no_lower_rate(m: float, n: float, k: float, factor: float) -> None:
    curve = GemmCurve()
    small = curve.slowdown(array(m), array(n), array(k))
    for larger in ((m * factor, n, k), (m, n * factor, k), (m, n, k * factor)):
        assert 1 <= curve.slowdown(*map(array, larger)) <= small


@given(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(1, 100), st.floats(0, 100), st.floats(0, 100))
def test_a_larger_product_takes_no_less_time(m: float, n: float, factor: float, half_m: float, half_n: float) -> None:
    curve = GemmCurve(half_m=half_m, half_n=half_n)
    small = m * n * curve.slowdown(array(m), array(n), array(512))
    for rows, columns in ((m * factor, n), (m, n * factor)):
        larger = rows * columns * curve.slowdown(array(rows), array(columns), array(512))
        assert larger >= small * (1 - 1e-9)


def test_half_of_the_rate_is_left_at_each_half_size() -> None:
    curve = GemmCurve(half_m=0, half_n=0, half_k=100, half_output=0)
    assert curve.slowdown(array(1e9), array(1e9), array(100)) == pytest.approx(2)
    curve = GemmCurve(half_m=0, half_n=0, half_k=0, half_output=1e6)
    assert curve.slowdown(array(1e3), array(1e3), array(1e9)) == pytest.approx(2)


@given(st.floats(128, 1e6), st.floats(0.01, 1e4), st.floats(16, 512), st.floats(1, 10))
def test_longer_sequences_more_heads_and_wider_ones_run_at_no_lower_rate(
    seq_len: float, blocks: float, head_dim: float, factor: float
) -> None:
    curve = AttentionCurve()
    small = curve.slowdown(seq_len, array(blocks), head_dim)
    assert curve.slowdown(seq_len * factor, array(blocks), head_dim) <= small
    assert curve.slowdown(seq_len, array(blocks * factor), head_dim) <= small
    assert curve.slowdown(seq_len, array(blocks), head_dim * factor) <= small * (1 + 1e-12)


def test_heads_of_128_lose_nothing_and_wider_ones_gain_nothing() -> None:
    curve = AttentionCurve(half_seq_len=0, half_blocks=0)
    assert curve.slowdown(4096.0, array(1), 128) == pytest.approx(1)
    assert curve.slowdown(4096.0, array(1), 192) == pytest.approx(1)
    assert curve.slowdown(4096.0, array(1), 64) > 1.2


def test_attention_at_few_heads_falls_on_blackwell() -> None:
    """B200, 4,096 tokens, both passes: 8 heads reach .65 of the rate of 64 (SimuMax's kernels, `modelling` C3)."""
    device = load_cluster("b200:1x8").device
    at = {
        heads: float(device.attention.slowdown(4096, array(heads * 32 / device.compute_units), 128)[0])
        for heads in (8, 64)
    }
    assert at[8] / at[64] == pytest.approx(1 / 0.65, rel=0.1)


def test_a_collective_starts_steps_and_fills() -> None:
    assert NCCL.overhead_s(array(0), array(0)) == pytest.approx(5e-6)
    assert NCCL.overhead_s(array(7), array(4 * 2**20)) == pytest.approx(5e-6 + 7e-6 + 12e-6)
    assert NCCL.overhead_s(array(14), array(1e15)) == pytest.approx(5e-6 + 14e-6 + 24e-6)


def test_two_devices_get_a_smaller_part_of_their_links_to_work() -> None:
    assert NCCL.slowdown(array(2)) == pytest.approx(1.3)
    assert NCCL.slowdown(array(4)) == pytest.approx(1.1)


@pytest.mark.parametrize("field", ["half_m", "half_output", "start_s", "fit_error"])
def test_a_negative_number_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=field):
        dataclasses.replace(GemmCurve(), **{field: -1.0})


@pytest.mark.parametrize("field", ["efficiency", "burst_efficiency"])
def test_a_share_above_one_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=field):
        dataclasses.replace(AttentionCurve(), **{field: 1.1})


def test_a_fill_without_a_size_is_refused() -> None:
    with pytest.raises(InputError, match="half_fill_bytes"):
        dataclasses.replace(NCCL, half_fill_bytes=0.0)


def test_every_shipped_curve_says_where_it_is_from_and_how_far_off() -> None:
    for name in preset_clusters():
        cluster = load_cluster(name)
        curves = [cluster.device.attention, cluster.device.gemm]
        found = [level.collectives for level in cluster.levels if level.collectives]
        for curve in (*curves, *found):
            assert curve.source
            assert 0 < curve.fit_error < 0.5


def test_training_sustains_no_more_than_short_benchmarks_reach() -> None:
    for name in preset_clusters():
        device = load_cluster(name).device
        if "values" not in device.gemm.source and device.vendor == "nvidia":
            assert device.gemm_efficiency <= device.gemm.burst_efficiency * 1.01
            assert device.attention.efficiency <= device.attention.burst_efficiency * 1.01
