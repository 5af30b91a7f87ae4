"""Speed of kernels and collectives by size, as curves with a few parameters that are part of a device's data.

The shapes are fitted to public measurements by `benchmarks/kernel_fits.py` and `profiler.fit` (tables of
aiconfigurator-core, our own on an H200, see `benchmarks/results`); a device or link without measurements has the curves
of the most similar one.  The level is separate from the shape, because short benchmarks run at clocks that training
does not sustain (`modelling` C2).  If neither the device nor a similar one was measured, the source of a curve begins
with "not measured".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.base.units import check_fraction, check_not_negative, check_positive

FULL_HEAD_DIM = 128  # kernels are tuned for it; wider heads are not faster


def _check(curve: Any, *, fractions: tuple[str, ...] = (), not_negative: tuple[str, ...] = ()) -> None:
    for name in fractions:
        check_fraction(name, getattr(curve, name))
    for name in (*not_negative, "fit_error"):
        check_not_negative(name, getattr(curve, name))


class _Sourced:
    """Curve or figure with a source."""

    __slots__ = ()
    source: str

    @property
    def is_measured(self) -> bool:
        """Return whether the curve is based on a measurement of the device or of a similar one."""
        return not self.source.startswith("not measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve(_Sourced):
    """Rate of an m x n x k product relative to an infinitely large one, and the start-up time of its kernel.

    The rate is divided by (1 + half_m / m) (1 + half_n / n) (1 + half_k / k) (1 + half_output / (m n)): too few rows or
    columns waste part of a tile, a short k does not amortise a tile's prologue, and a small output has fewer tiles than
    the device has units.  `burst_efficiency` is the plateau of the short benchmarks used for the fit, over the peak;
    the rate that training sustains is the device's `gemm_efficiency`.  `fit_error` is the mean |error| on held-out
    shapes.

    The defaults are those of H100.
    """

    half_m: float = 72.0
    half_n: float = 0.0
    half_k: float = 151.0
    half_output: float = 1.97e5  # elements
    start_s: float = 3.0e-6
    burst_efficiency: float = 0.84
    fit_error: float = 0.07
    source: str = "not measured: H100 values"

    def __post_init__(self) -> None:
        halves = ("half_m", "half_n", "half_k", "half_output", "start_s")
        _check(self, fractions=("burst_efficiency",), not_negative=halves)

    def slowdown(
        self, m: Floats, n: Floats, k: Floats, pace: Floats | float = 1.0, side_by_side: Floats | float = 1.0
    ) -> Floats:
        """Return the time of the m x n x k product over its time at the plateau's rate, without start-up; at least 1.

        `pace` is the plateau's rate for the type of the inputs over that for 16 bits, to which the curve was fitted: a
        tile's prologue and epilogue take the same time, while its loop is shorter by this factor.  The tiles of
        products that run `side_by_side` fill the device together.  A product is never slower than a padded one with
        more rows or columns, so all sizes below the fastest one take the same time.
        """
        output = self.half_output / side_by_side
        # The fastest number of columns together with the fastest number of rows.
        fewest = np.cbrt(self.half_n**2 * output / self.half_m) if self.half_m else 0.0
        rows = np.maximum(m, np.sqrt(self.half_m * output / np.maximum(n, fewest)))
        columns = np.maximum(n, np.sqrt(self.half_n * output / rows))
        tiles = (rows + self.half_m) / m * (columns + self.half_n) / n
        return tiles * (1 + self.half_k * pace / k) * (1 + output / (rows * columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve(_Sourced):
    """Rate of causal flash attention (forward) as a share of the device's bf16 peak, and its kernel's start-up time.

    `efficiency` is that of long sequences with heads of at least 128, as sustained in training.  It is halved at
    `half_seq_len` tokens (half-filled tiles on the diagonal, short inner loops), and at `half_blocks` thread blocks of
    128 queries per compute unit; heads of `half_head_dim` reach half the rate of infinitely wide ones.
    `burst_efficiency` is the plateau of the short benchmarks used for the fit.  The defaults are those of H100.
    """

    efficiency: float = 0.53
    half_seq_len: float = 700.0
    half_blocks: float = 0.3
    half_head_dim: float = 55.0
    start_s: float = 13e-6
    burst_efficiency: float = 0.64
    fit_error: float = 0.10
    source: str = "not measured: H100 values"

    def __post_init__(self) -> None:
        _check(
            self,
            fractions=("efficiency", "burst_efficiency"),
            not_negative=("half_seq_len", "half_blocks", "half_head_dim", "start_s"),
        )

    def slowdown(self, seq_len: Floats | float, blocks_per_unit: Floats, head_dim: Floats | float) -> Floats:
        """Return the time of the kernel over its time at the plateau's rate, without start-up; at least 1.

        `blocks_per_unit` is the number of thread blocks of 128 queries per compute unit of the device.
        """
        narrow = 1 + self.half_head_dim / np.minimum(head_dim, FULL_HEAD_DIM)
        heads = narrow / (1 + self.half_head_dim / FULL_HEAD_DIM)
        return (1 + self.half_seq_len / seq_len) * (1 + self.half_blocks / blocks_per_unit) * heads


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """Time of NCCL's collectives inside one scale-up domain, in addition to the time of their bytes at the plateau.

    It is start_s, + step_s for every step of the ring, + fill_s x S / (S + half_fill) while the pipeline of a buffer of
    S bytes fills; small groups use only a part of their links: rate / (1 + pair_slowdown / (n - 1)).
    """

    start_s: float
    step_s: float
    fill_s: float
    half_fill_bytes: float
    pair_slowdown: float
    fit_error: float
    source: str

    def __post_init__(self) -> None:
        _check(self, fractions=("pair_slowdown",), not_negative=("start_s", "step_s", "fill_s"))
        check_positive("half_fill_bytes", self.half_fill_bytes)

    def slowdown(self, members: Floats) -> Floats:
        """Return the time of the bytes among `members` devices (2 or more) over their time at the plateau's rate."""
        return 1 + self.pair_slowdown / np.maximum(members - 1, 1)

    def overhead_s(self, steps: Floats, buffer_bytes: Floats) -> Floats:
        """Return the time in addition to the bytes, for a collective of this many steps over a whole buffer."""
        return self.start_s + steps * self.step_s + self.fill_s * buffer_bytes / (buffer_bytes + self.half_fill_bytes)
