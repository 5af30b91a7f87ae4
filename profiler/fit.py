"""Fits of few-parameter curves to measured times, including those of collectives, with errors on held-out shapes.

A fit robustly minimises the logarithm of predicted over measured time, over the logarithms of the parameters; a fifth
of the shapes is held out for the reported error.  Fits run offline, never in a search.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.base.curves import CollectiveCurve
from autoplan.base.errors import InputError
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation
from autoplan.topology.cluster import LinkLevel

Curve = TypeVar("Curve")

RESIDUAL_SCALE = 0.1  # larger residuals, from poorly chosen kernels, have less and less weight
MIN_POINTS = 30  # five per parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Generic[Curve]):
    """A fitted curve, its plateau (share of the peak, or of the nominal link rate) and its quality."""

    curve: Curve
    plateau: float
    num_points: int
    num_held_out: int
    error: float  # mean |predicted / measured - 1| over the held-out shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measured shapes of one operation: rows of numbers in the order of `SHAPES`, and their times."""

    shapes: Floats
    seconds: Floats

    def where(self, chosen: Bools) -> Points:
        """Return the points selected by a mask."""
        return Points(shapes=self.shapes[chosen], seconds=self.seconds[chosen])


def points_of(measurements: Iterable[Measurement]) -> Points:
    """Return one point per shape, with the median time over repeats and kernels."""
    samples: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for measurement in measurements:
        samples[measurement.shape].append(measurement.seconds)
    medians = [float(np.median(seconds)) for seconds in samples.values()]
    return Points(shapes=np.array(list(samples), dtype=np.float64), seconds=np.array(medians))


def mean_error(predicted_s: Floats, measured_s: Floats) -> float:
    """Return the mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(predicted_s / measured_s - 1)))


def fit_curve(
    points: Points,
    held_out: Bools,
    ranges: dict[str, tuple[float, float, float]],
    make: Callable[..., Curve],
    predict: Callable[[Curve, float, Floats], Floats],
) -> Fit[Curve]:
    """Return the curve made by `make` from the fitted parameters, named as in `ranges`, and the error of the fit.

    `ranges` gives the start, minimum and maximum of each parameter.  A parameter called plateau is passed to `predict`,
    not to the curve; without one it is 1.
    """
    from scipy.optimize import least_squares  # takes half a second, only needed by commands that fit

    if len(points.seconds) < MIN_POINTS or not held_out.any() or held_out.all():
        raise InputError(f"a curve needs at least {MIN_POINTS} measured shapes, got {len(points.seconds)}")
    fit_points, test_points = points.where(~held_out), points.where(held_out)
    start, lower, upper = np.log(np.array(list(ranges.values()))).T

    def fitted(x: Floats, error: float = 0.0) -> tuple[Curve, float]:
        values = {"plateau": 1.0, **dict(zip(ranges, np.exp(x).tolist(), strict=True))}
        return make(**values, fit_error=error), values["plateau"]

    def residuals(x: Floats) -> Floats:
        return np.log(predict(*fitted(x), fit_points.shapes) / fit_points.seconds)

    bounds = (lower, upper)
    best = least_squares(residuals, start, bounds=bounds, x_scale="jac", loss="soft_l1", f_scale=RESIDUAL_SCALE).x
    error = mean_error(predict(*fitted(best), test_points.shapes), test_points.seconds)
    curve, plateau = fitted(best, error)
    return Fit(curve=curve, plateau=plateau, num_points=len(held_out), num_held_out=int(held_out.sum()), error=error)


# Share of the buffer that crosses a link of a device: twice for an all-reduce (nccl-tests doc/PERFORMANCE.md).
VOLUMES: dict[Operation, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def collective_s(link: LinkLevel, curve: CollectiveCurve, plateau: float, rows: Floats) -> Floats:
    """Return seconds of collectives with rows (volume, is all-to-all, num_devices, buffer_bytes) on `link`."""
    volume, exchanges, members, buffer_bytes = rows.T
    steps = volume * np.where(exchanges > 0, 2 * np.log2(members), members - 1)
    moved = volume * buffer_bytes * (1 - 1 / members)
    wire = moved / (plateau * link.bandwidth_bytes_per_s) * curve.slowdown(members)
    return wire + curve.overhead_s(steps, buffer_bytes)


def collective_points(measurements: Iterable[Measurement]) -> Points:
    """Return the points of all collectives together, as rows for `collective_s`."""
    by_operation: dict[Operation, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_operation[measurement.operation].append(measurement)
    rows, seconds = [], []
    for operation, volume in VOLUMES.items():
        if operation not in by_operation:
            continue
        points = points_of(by_operation[operation])
        kind = np.tile((volume, float(operation == "all_to_all")), (len(points.seconds), 1))
        rows.append(np.hstack([kind, points.shapes[:, [0, -1]]]))  # group size and bytes
        seconds.append(points.seconds)
    if not rows:
        return Points(shapes=np.zeros((0, 4)), seconds=np.zeros(0))
    return Points(shapes=np.concatenate(rows), seconds=np.concatenate(seconds))


def held_out_collectives(points: Points) -> Bools:
    """Return a mask of every third message size."""
    return np.round(np.log2(np.maximum(points.shapes[:, 3], 1))) % 3 == 0


def fit_collectives(link: LinkLevel, points: Points) -> Fit[CollectiveCurve]:
    """Return the curve of all collectives inside the domain of `link`."""
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

    return fit_curve(points, held_out_collectives(points), ranges, make, functools.partial(collective_s, link))
