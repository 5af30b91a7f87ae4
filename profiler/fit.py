"""Fits of few-parameter curves to measured times of kernels and collectives, with their error on held-out shapes.

A fit minimises the logarithm of predicted over measured time, robustly, over the logarithms of the parameters; a
fifth of the shapes is held out and gives the error that is reported.  Offline: no search comes here.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.base.curves import AttentionCurve, CollectiveCurve, GemmCurve
from autoplan.base.errors import InputError
from autoplan.spec.operations import Operation
from autoplan.spec.timing import Measurement
from autoplan.topology.cluster import DeviceSpec, LinkLevel

Curve = TypeVar("Curve")

RESIDUAL_SCALE = 0.1  # residuals beyond this weigh less and less: shapes whose kernel was chosen badly
TILE = 128  # queries of a thread block of flash attention
LEAST_POINTS = 30  # five for each parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Generic[Curve]):
    """A fitted curve, its plateau (share of the peak, or of the nominal link rate) and what it was judged on."""

    curve: Curve
    plateau: float
    num_points: int
    num_held_out: int
    error: float  # mean |predicted / measured - 1| over the held-out shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measured shapes of one operation: rows of numbers as `SHAPES` names them, and their times."""

    shapes: Floats
    seconds: Floats

    def where(self, chosen: Bools) -> Points:
        """The points that a mask chooses."""
        return Points(shapes=self.shapes[chosen], seconds=self.seconds[chosen])


def points_of(measurements: Iterable[Measurement]) -> Points:
    """Take the median over repeats and kernels as the point of each shape."""
    samples: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for measurement in measurements:
        samples[measurement.shape].append(measurement.seconds)
    medians = [float(np.median(seconds)) for seconds in samples.values()]
    return Points(shapes=np.array(list(samples), dtype=np.float64), seconds=np.array(medians))


def mean_error(predicted_s: Floats, measured_s: Floats) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(predicted_s / measured_s - 1)))


def _fit(
    points: Points,
    held_out: Bools,
    ranges: dict[str, tuple[float, float, float]],
    make: Callable[..., Curve],
    predict: Callable[[Curve, float, Floats], Floats],
) -> Fit[Curve]:
    """The curve that `make` gives of the fitted parameters, named as in `ranges`, and the error of its fit.

    `ranges` gives each parameter's start, least and most.  One called plateau is not of the curve, but what `predict`
    takes between it and the shapes; where there is none it is 1.
    """
    from scipy.optimize import least_squares  # half a second, which commands that fit nothing save

    if len(points.seconds) < LEAST_POINTS or not held_out.any() or held_out.all():
        raise InputError(f"a curve needs at least {LEAST_POINTS} measured shapes, got {len(points.seconds)}")
    seen, unseen = points.where(~held_out), points.where(held_out)
    start, lower, upper = np.log(np.array(list(ranges.values()))).T

    def fitted(x: Floats, error: float = 0.0) -> tuple[Curve, float]:
        values = {"plateau": 1.0, **dict(zip(ranges, np.exp(x).tolist(), strict=True))}
        return make(**values, fit_error=error), values["plateau"]

    def residuals(x: Floats) -> Floats:
        return np.log(predict(*fitted(x), seen.shapes) / seen.seconds)

    bounds = (lower, upper)
    best = least_squares(residuals, start, bounds=bounds, x_scale="jac", loss="soft_l1", f_scale=RESIDUAL_SCALE).x
    error = mean_error(predict(*fitted(best), unseen.shapes), unseen.seconds)
    curve, plateau = fitted(best, error)
    return Fit(curve=curve, plateau=plateau, num_points=len(held_out), num_held_out=int(held_out.sum()), error=error)


def _bf16_peak(device: DeviceSpec) -> float:
    return device.peak_flops_per_s.get("bf16", device.peak_flops_per_s.get("fp16", 0.0))


def _streamed_s(device: DeviceSpec, num_bytes: Floats) -> Floats:
    return num_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def training_gemms(points: Points) -> Points:
    """Products of the sizes that training has: at least 128 rows, 256 columns and a depth of 256."""
    return points.where(np.all(points.shapes >= (128, 256, 256), axis=1))


def held_out_gemms(points: Points) -> Bools:
    """A fifth of the weight matrices (n, k), with all their batches."""
    _, n, k = points.shapes.astype(np.int64).T
    return (n * 7919 + k * 104729) // 128 % 5 == 0


def gemm_s(device: DeviceSpec, curve: GemmCurve, plateau: float, shapes: Floats) -> Floats:
    """Seconds of products with rows (m, n, k) at a plateau of that share of the bf16 peak."""
    m, n, k = shapes.T
    computing = 2 * m * n * k * curve.slowdown(m, n, k) / (plateau * _bf16_peak(device))
    return np.maximum(computing, _streamed_s(device, 2 * (m * k + k * n + m * n))) + curve.start_s


def fit_gemm(device: DeviceSpec, points: Points) -> Fit[GemmCurve]:
    """The curve of dense bf16 products on `device`; times of several libraries may be among the points."""
    points = training_gemms(points)
    ranges = {
        "plateau": (0.7, 0.2, 1.0),
        "half_m": (50.0, 0.5, 1000.0),
        "half_n": (50.0, 0.5, 1000.0),
        "half_k": (80.0, 0.5, 1000.0),
        "half_output": (1e5, 1.0, 1e8),
        "start_s": (4e-6, 1e-8, 3e-5),
    }

    def make(plateau: float, **values: float) -> GemmCurve:
        return GemmCurve(**values, burst_efficiency=plateau, source="")

    return _fit(points, held_out_gemms(points), ranges, make, functools.partial(gemm_s, device))


def training_attention(points: Points) -> Points:
    """Unwindowed attention of at least 512 tokens with heads of 64 or 128."""
    _, length, _, _, head_dim, window = points.shapes.T
    return points.where((window == 0) & (length >= 512) & np.isin(head_dim, (64, 128)))


def held_out_attention(points: Points) -> Bools:
    """A fifth of the combinations of heads and batch, with all their lengths."""
    batch, _, heads, kv_heads = points.shapes.astype(np.int64).T[:4]
    return (heads * 31 + kv_heads * 17 + batch) % 5 == 0


def attention_s(device: DeviceSpec, curve: AttentionCurve, plateau: float, shapes: Floats) -> Floats:
    """Seconds of causal forward attention, rows as `SHAPES` has them, at that share of the bf16 peak."""
    batch, length, heads, kv_heads, head_dim, _ = shapes.T
    blocks = batch * heads * length / TILE / device.compute_units
    operations = 2 * batch * length**2 * heads * head_dim
    computing = operations * curve.slowdown(length, blocks, head_dim) / (plateau * _bf16_peak(device))
    moved = 4 * batch * length * head_dim * (heads + kv_heads)
    return np.maximum(computing, _streamed_s(device, moved)) + curve.start_s


def fit_attention(device: DeviceSpec, points: Points) -> Fit[AttentionCurve]:
    """The curve of causal flash attention forward on `device`."""
    points = training_attention(points)
    ranges = {
        "plateau": (0.6, 0.05, 1.0),
        "half_seq_len": (400.0, 1.0, 1e4),
        "half_blocks": (1.0, 0.01, 100.0),
        "half_head_dim": (30.0, 0.5, 1000.0),
        "start_s": (5e-6, 1e-8, 1e-4),
    }

    def make(plateau: float, **values: float) -> AttentionCurve:
        return AttentionCurve(**values, burst_efficiency=plateau, source="")

    return _fit(points, held_out_attention(points), ranges, make, functools.partial(attention_s, device))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCurve:
    """Forward pass of routed experts at the plateau of dense products: what few tokens for each expert cost.

    Rate / (1 + half_tokens / tokens of an expert); the activation, the permutation and their ends move
    `traffic` x (12 hidden_size + 6 ffn_size) bytes for each routed token; `start_s` is once.
    """

    half_tokens: float
    traffic: float
    start_s: float


def training_experts(points: Points) -> Points:
    """Whole experts on every rank, at least 16 tokens for each and 256 wide."""
    tokens, _, ffn, per_token, experts, tp, ep = points.shapes.T
    each, local = tokens * per_token / experts, experts / ep
    return points.where((each >= 16) & (local >= 1) & (local % 1 == 0) & (each * local >= 256) & (ffn / tp >= 256))


def held_out_experts(points: Points) -> Bools:
    """A fifth of the experts' sizes and numbers."""
    _, hidden, ffn, _, experts, tp, _ = points.shapes.T
    return (hidden // 128 * 31 + ffn // tp // 64 * 17 + experts * 7).astype(np.int64) % 5 == 0


def experts_s(device: DeviceSpec, curve: ExpertsCurve, share: float, shapes: Floats) -> Floats:
    """Seconds of gated experts, rows as `SHAPES` has them, at that share of the plateau of dense products."""
    tokens, hidden, ffn, per_token, experts, tp, ep = shapes.T
    width, each, local = ffn / tp, tokens * per_token / experts, experts / ep
    gemm = device.gemm
    into = 2 * hidden * 2 * width * (1 + gemm.half_k / hidden) * (1 + gemm.half_n / (2 * width))
    back = 2 * width * hidden * (1 + gemm.half_k / width) * (1 + gemm.half_n / hidden)
    rate = share * gemm.burst_efficiency * _bf16_peak(device)
    computing = each * local * (into + back) * (1 + curve.half_tokens / each) / rate
    moved = curve.traffic * each * local * (12 * hidden + 6 * width)
    return np.maximum(computing, _streamed_s(device, 6 * local * hidden * width)) + (
        _streamed_s(device, moved) + curve.start_s
    )


def fit_experts(device: DeviceSpec, points: Points) -> Fit[ExpertsCurve]:
    """The curve of routed experts, balanced, at the dense plateau of `device`."""
    points = training_experts(points)
    ranges = {"half_tokens": (150.0, 1.0, 5000.0), "traffic": (1.0, 0.01, 10.0), "start_s": (3e-5, 1e-7, 3e-3)}

    def make(plateau: float, fit_error: float, **values: float) -> ExpertsCurve:
        return ExpertsCurve(**values)

    found = _fit(points, held_out_experts(points), ranges, make, functools.partial(experts_s, device))
    return replace(found, plateau=device.gemm.burst_efficiency)


# Share of the buffer that crosses a link of a device: twice for an all-reduce (nccl-tests doc/PERFORMANCE.md).
VOLUMES: dict[Operation, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def collective_s(link: LinkLevel, curve: CollectiveCurve, plateau: float, rows: Floats) -> Floats:
    """Seconds of collectives with rows (volume, is all-to-all, num_devices, buffer_bytes) at that share of the link."""
    volume, exchanges, members, buffer_bytes = rows.T
    steps = volume * np.where(exchanges > 0, 2 * np.log2(members), members - 1)
    moved = volume * buffer_bytes * (1 - 1 / members)
    wire = moved / (plateau * link.bandwidth_bytes_per_s) * curve.slowdown(members)
    return wire + curve.overhead_s(steps, buffer_bytes)


def collective_points(measurements: Iterable[Measurement]) -> Points:
    """The points of all collectives together, as rows for `collective_s`."""
    by_operation: dict[Operation, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_operation[measurement.operation].append(measurement)
    rows, seconds = [], []
    for operation, volume in VOLUMES.items():
        if operation not in by_operation:
            continue
        points = points_of(by_operation[operation])
        kind = np.tile((volume, float(operation == "all_to_all")), (len(points.seconds), 1))
        rows.append(np.hstack([kind, points.shapes[:, [0, -1]]]))  # members and bytes
        seconds.append(points.seconds)
    if not rows:
        return Points(shapes=np.zeros((0, 4)), seconds=np.zeros(0))
    return Points(shapes=np.concatenate(rows), seconds=np.concatenate(seconds))


def held_out_collectives(points: Points) -> Bools:
    """Choose every third message size."""
    return np.round(np.log2(np.maximum(points.shapes[:, 3], 1))) % 3 == 0


def fit_collectives(link: LinkLevel, points: Points) -> Fit[CollectiveCurve]:
    """The curve of all collectives inside the domain of `link`."""
    ranges = {
        "plateau": (0.7, 0.02, 1.0),
        "start_s": (7e-6, 1e-7, 1e-4),
        "step_s": (1e-6, 1e-8, 1e-4),
        "fill_s": (30e-6, 1e-7, 1e-2),
        "half_fill_bytes": (5e6, 1e3, 1e9),
        "pair_slowdown": (0.3, 1e-3, 1.0),
    }

    def make(plateau: float, **values: float) -> CollectiveCurve:
        return CollectiveCurve(**values, source="")

    return _fit(points, held_out_collectives(points), ranges, make, functools.partial(collective_s, link))
