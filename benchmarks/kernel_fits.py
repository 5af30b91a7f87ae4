"""Fits of the curves of kernels that presets of devices hold: dense products, attention, routed experts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.base.curves import AttentionCurve, GemmCurve
from autoplan.cost.kernels.products import GROUPED_STREAMS
from autoplan.profiler.fit import Fit, Points, fit_curve
from autoplan.topology.cluster import DeviceSpec

TILE = 128  # queries of a thread block of flash attention


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

    return fit_curve(points, held_out_gemms(points), ranges, make, functools.partial(gemm_s, device))


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

    return fit_curve(points, held_out_attention(points), ranges, make, functools.partial(attention_s, device))


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


def dense_experts_s(device: DeviceSpec, start_s: float, shapes: Floats) -> Floats:
    """Seconds of gated experts as the cost model has them: dense products of the tokens of each, some at a time."""
    tokens, hidden, ffn, per_token, experts, tp, ep = shapes.T
    width, each, local = ffn / tp, tokens * per_token / experts, experts / ep
    beside = np.clip(local, 1.0, GROUPED_STREAMS)
    into = 2 * hidden * 2 * width * device.gemm.slowdown(each, 2 * width, hidden, side_by_side=beside)
    back = 2 * width * hidden * device.gemm.slowdown(each, hidden, width, side_by_side=beside)
    computing = each * local * (into + back) / (device.gemm.burst_efficiency * _bf16_peak(device))
    return computing + _streamed_s(device, each * local * (12 * hidden + 6 * width)) + start_s


def fit_experts(device: DeviceSpec, points: Points) -> Fit[ExpertsCurve]:
    """The curve of routed experts, balanced, at the dense plateau of `device`."""
    points = training_experts(points)
    ranges = {"half_tokens": (150.0, 1.0, 5000.0), "traffic": (1.0, 0.01, 10.0), "start_s": (3e-5, 1e-7, 3e-3)}

    def make(plateau: float, fit_error: float, **values: float) -> ExpertsCurve:
        return ExpertsCurve(**values)

    found = fit_curve(points, held_out_experts(points), ranges, make, functools.partial(experts_s, device))
    return replace(found, plateau=device.gemm.burst_efficiency)
