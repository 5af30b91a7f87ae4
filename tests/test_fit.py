"""Does a fit find the curve that made the data, and report the error on shapes that it has not seen?"""

from __future__ import annotations

from dataclasses import replace

import kernel_fits
import numpy as np
import pytest

from autoplan.base.curves import AttentionCurve, CollectiveCurve, GemmCurve
from autoplan.base.errors import InputError
from autoplan.profiler import fit
from autoplan.readers.cluster import load_cluster
from autoplan.spec.measurement import Measurement

CLUSTER = load_cluster("h100-sxm:1x8")
DEVICE, LINK = CLUSTER.device, CLUSTER.levels[0]
SIZES = (256, 512, 1024, 2048, 4096, 8192)


def gemm_shapes() -> fit.Floats:
    wide = (256, 384, 512, 640, 1024, 2048, 2560, 4096, 8192)
    return np.array([(m, n, k) for m in SIZES for n in wide for k in wide], dtype=float)


def test_a_fit_finds_the_gemm_curve_that_made_the_times() -> None:
    curve = GemmCurve(half_m=60, half_n=20, half_k=120, half_output=2e5, start_s=4e-6, source="")
    shapes = gemm_shapes()
    found = kernel_fits.fit_gemm(
        DEVICE, fit.Points(shapes=shapes, seconds=kernel_fits.gemm_s(DEVICE, curve, 0.75, shapes))
    )
    assert found.plateau == pytest.approx(0.75, rel=0.01)
    assert found.curve.half_k == pytest.approx(120, rel=0.05)
    assert found.curve.start_s == pytest.approx(4e-6, rel=0.02)
    assert found.error < 0.005
    assert 0 < found.num_held_out < found.num_points == len(shapes)


def test_the_error_is_that_of_the_noise_on_shapes_not_seen() -> None:
    shapes = gemm_shapes()
    noise = np.exp(np.random.default_rng(0).normal(0, 0.1, len(shapes)))
    seconds = kernel_fits.gemm_s(DEVICE, GemmCurve(), 0.75, shapes) * noise
    found = kernel_fits.fit_gemm(DEVICE, fit.Points(shapes=shapes, seconds=seconds))
    assert 0.06 < found.error < 0.11  # the mean of |error| is .08 where the deviation is .10


def test_a_few_kernels_chosen_badly_do_not_move_the_fit() -> None:
    shapes = gemm_shapes()
    seconds = kernel_fits.gemm_s(DEVICE, GemmCurve(), 0.75, shapes)
    seconds[::25] *= 3
    assert kernel_fits.fit_gemm(DEVICE, fit.Points(shapes=shapes, seconds=seconds)).plateau == pytest.approx(
        0.75, rel=0.03
    )


def test_a_fit_finds_the_attention_curve_that_made_the_times() -> None:
    curve = AttentionCurve(half_seq_len=500, half_blocks=1.2, half_head_dim=60, start_s=8e-6, source="")
    shapes = np.array(
        [
            (batch, length, heads, 8, head_dim, 0)
            for batch in (1, 4)
            for length in (512, 1024, 2048, 4096, 8192)
            for heads in (8, 16, 32, 40)
            for head_dim in (64, 128)
        ],
        dtype=float,
    )
    points = fit.Points(shapes=shapes, seconds=kernel_fits.attention_s(DEVICE, curve, 0.6, shapes))
    found = kernel_fits.fit_attention(DEVICE, points)
    assert found.plateau == pytest.approx(0.6, rel=0.02)
    assert found.curve.half_seq_len == pytest.approx(500, rel=0.05)
    assert found.error < 0.01


def test_a_fit_finds_what_few_tokens_for_each_expert_cost() -> None:
    curve = kernel_fits.ExpertsCurve(half_tokens=120, traffic=1.2, start_s=40e-6)
    shapes = np.array(
        [
            (tokens, hidden, ffn, 8, experts, 1, ep)
            for tokens in (512, 2048, 8192, 32768)
            for hidden, ffn in ((2048, 768), (4096, 1536), (7168, 2048), (5120, 1024))
            for experts in (64, 128, 256)
            for ep in (1, 8)
        ],
        dtype=float,
    )
    seconds = kernel_fits.experts_s(DEVICE, curve, 1.0, shapes)
    found = kernel_fits.fit_experts(DEVICE, fit.Points(shapes=shapes, seconds=seconds))
    assert found.curve.half_tokens == pytest.approx(120, rel=0.03)
    assert found.curve.start_s == pytest.approx(40e-6, rel=0.03)


def test_a_fit_finds_the_curve_of_collectives_that_made_the_times() -> None:
    curve = CollectiveCurve(
        start_s=6e-6,
        step_s=1e-6,
        fill_s=30e-6,
        half_fill_bytes=4e6,
        pair_slowdown=0.3,
        fit_error=0.0,
        source="",
    )
    rows = np.array(
        [(2.0, 0.0, n, 2.0**power) for n in (2, 4, 8) for power in range(9, 30)]
        + [(1.0, float(exchange), n, 2.0**power) for exchange in (0, 1) for n in (2, 4, 8) for power in range(9, 30)]
    )
    points = fit.Points(shapes=rows, seconds=fit.collective_s(LINK, curve, 0.8, rows))
    found = fit.fit_collectives(LINK, points)
    assert found.plateau == pytest.approx(0.8, rel=0.01)
    assert found.curve.pair_slowdown == pytest.approx(0.3, rel=0.05)
    assert found.curve.fit_error == found.error < 0.005


def test_too_few_shapes_are_refused() -> None:
    shapes = gemm_shapes()[:10]
    with pytest.raises(InputError, match="at least 30"):
        kernel_fits.fit_gemm(DEVICE, fit.Points(shapes=shapes, seconds=np.ones(10)))


def test_repeats_of_a_shape_are_one_point() -> None:
    measurement = Measurement(operation="gemm", shape=(1, 2, 3), dtype="bf16", device="lab", seconds=1.0)
    points = fit.points_of([measurement, replace(measurement, seconds=3.0), replace(measurement, seconds=9.0)])
    assert points.shapes.tolist() == [[1, 2, 3]]
    assert points.seconds.tolist() == [3.0]


def test_all_collectives_are_points_of_one_curve() -> None:
    def measured(operation: str, size: int) -> Measurement:
        return Measurement(operation=operation, shape=(8, 8, 1, size), dtype="fp16", device="lab", seconds=1.0)  # type: ignore[arg-type]

    points = fit.collective_points([measured("all_to_all", 64), measured("all_reduce", 32)])
    assert points.shapes.tolist() == [[2, 0, 8, 32], [1, 1, 8, 64]]
    assert len(fit.collective_points([]).seconds) == 0
