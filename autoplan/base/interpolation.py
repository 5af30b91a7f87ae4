"""Time of an operation at sizes between the measured ones.

There are two steps.  First, a sum of products of the sizes, with non-negative weights, is fitted to all points: for a
matrix product it includes the start-up, the bytes of the matrices and the operations, and thus the cost of half-filled
tiles and short loops.  It extrapolates well, but is off by several percent for single kernels.  Second, the residuals
are interpolated between the nearest points by ordinary kriging with a linear variogram (Matheron, Economic Geology
1963): one small system of equations per shape, which is linear interpolation along a line of points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Ints

# Results with other values are in benchmarks/results.
NEIGHBOURS = 12
FAR = math.log(4)  # distance to the nearest point: beyond it, one in twenty would be off by 40 % or more
TILE = 128  # rows or columns that a kernel computes at once
# Full tiles and a last tile with a single row are as far apart as sizes of ratio 1.35, since their kernels differ.
PADDING = 0.3
UNSEEN = 0.01  # initial weight of a product relative to the work: a single point only determines the rate

_STEPS = 300  # steps of the fit
_LEAF = 16  # maximum points in a cell
_NEAREST_CELLS = 6  # cells whose points are searched
_AT_ONCE = 256  # shapes per batch, to bound memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scattered:
    """Times of one operation at scattered points, prepared for interpolation."""

    powers: tuple[int, ...]  # power of each size in the work
    low: Floats  # minimum and maximum of each size
    high: Floats
    weights: Floats  # weights of the products of sizes
    points: Floats  # (points, coordinates)
    residuals: Floats  # (points,): logarithm of measured over fitted time
    cells: Ints  # (cells, _LEAF): points that are close together, padded with -1
    cell_low: Floats  # (cells, coordinates): bounding box of the points
    cell_high: Floats
    farthest: float  # greatest first size that is answered

    @classmethod
    def of(cls, sizes: Floats, seconds: Floats, powers: Sequence[int], *, rate_from: float = 0.0) -> Scattered:
        """Prepare the times of points (points, sizes), distinct and positive; the first size grows with the batch.

        Points whose first size is below `rate_from` tell start-up times rather than a rate: from these alone nothing is
        extrapolated farther than they are apart, or than `FAR`.
        """
        low, high = sizes.min(axis=0), sizes.max(axis=0)
        products = _products(sizes, powers)
        weights = _fitted(products, seconds)
        points = _coordinates(sizes)
        leaves = _leaves(points, np.arange(len(points)))
        return cls(
            powers=tuple(powers),
            low=low,
            high=high,
            farthest=math.inf if high[0] >= rate_from else high[0] * max(high[0] / low[0], math.exp(FAR)),
            weights=weights,
            points=points,
            residuals=np.log(seconds / (products @ weights)),
            cells=np.array([np.pad(leaf, (0, _LEAF - len(leaf)), constant_values=-1) for leaf in leaves]),
            cell_low=np.array([points[leaf].min(axis=0) for leaf in leaves]),
            cell_high=np.array([points[leaf].max(axis=0) for leaf in leaves]),
        )

    def at(self, sizes: Floats) -> Floats:
        """Return seconds at (shapes, sizes): NaN outside the range of a size, or farther than `FAR` from every point.

        Beyond the maximum of the first size the fitted sum is extrapolated, with the residual at the maximum.
        """
        nearer = np.column_stack([np.minimum(sizes[:, 0], self.high[0]), sizes[:, 1:]])
        inside = np.all((nearer >= self.low) & (nearer <= self.high), axis=1) & (sizes[:, 0] <= self.farthest)
        # No matrix product, because its rounding would depend on the number of shapes in a call.
        fitted = np.sum(_products(sizes[inside], self.powers) * self.weights, axis=1)
        seconds = np.full(len(sizes), np.nan)
        seconds[inside] = fitted * np.exp(self._residuals(_coordinates(nearer[inside])))
        return seconds

    def shares(self, sizes: Floats) -> dict[int, float]:
        """Return the points whose residuals an estimate at a shape (sizes,) combines, with their shares."""
        if np.isnan(self.at(sizes[None])[0]):
            return {}
        coordinates = _coordinates(np.minimum(sizes, np.append(self.high[0], sizes[1:]))[None])
        near, distances = self._neighbours(coordinates)
        weights = _shares(self.points[near], distances)[0]
        return dict(zip(near[0].tolist(), weights.tolist(), strict=True))

    def _residuals(self, places: Floats) -> Floats:
        result = np.empty(len(places))
        for start in range(0, len(places), _AT_ONCE):
            chunk = slice(start, start + _AT_ONCE)
            near, distances = self._neighbours(places[chunk])
            residuals = self.residuals[near]
            kriged = np.sum(_shares(self.points[near], distances) * residuals, axis=1)
            # Shares may be negative, so the result is clipped to the range of the nearby measurements.
            kriged = np.clip(kriged, residuals.min(axis=1), residuals.max(axis=1))
            result[chunk] = np.where(distances.min(axis=1) <= FAR, kriged, np.nan)
        return result

    def _neighbours(self, places: Floats) -> tuple[Ints, Floats]:
        """Return (points, distances), each (places, neighbours): the nearest points of the nearest cells."""
        outside = np.zeros((len(places), len(self.cells)))
        for low, high, place in zip(self.cell_low.T, self.cell_high.T, places.T[:, :, None], strict=True):
            outside += np.maximum(np.maximum(low - place, place - high), 0) ** 2
        near = self.cells[_least(outside, _NEAREST_CELLS)].reshape(len(places), -1)
        distances = np.where(near < 0, np.inf, _distances(self.points[near], places[:, None]))
        least = _least(distances, min(NEIGHBOURS, len(self.points)))
        return np.take_along_axis(near, least, axis=1), np.take_along_axis(distances, least, axis=1)


def _products(sizes: Floats, powers: Sequence[int]) -> Floats:
    """Return (shapes, products): powers of each size up to its own, times those of the others; the last is the work."""
    products = np.ones((len(sizes), 1))
    for size, power in zip(sizes.T, powers, strict=True):
        products = np.concatenate([products * size[:, None] ** lower for lower in range(power + 1)], axis=1)
    return products


def _fitted(products: Floats, seconds: Floats) -> Floats:
    """Return non-negative weights with the least squared relative error (steps of Lee and Seung, NIPS 2000)."""
    relative = products / seconds[:, None]
    scale = relative.mean(axis=0)
    relative = relative / scale
    normal, target = relative.T @ relative, relative.sum(axis=0)
    weights = np.append(np.full(len(scale) - 1, UNSEEN), 1.0)
    for _ in range(_STEPS):
        weights = weights * target / (normal @ weights)
    return weights / scale


def _coordinates(sizes: Floats) -> Floats:
    """Return coordinates of shapes: the logarithm of each size, and the emptiness of the emptiest last tile."""
    return np.column_stack([np.log(sizes), PADDING * np.max(-sizes % TILE / TILE, axis=1)])


def _leaves(points: Floats, members: Ints) -> list[Ints]:
    """Return groups of up to `_LEAF` close members, by repeated halving along the widest coordinate."""
    if len(members) <= _LEAF:
        return [members]
    coordinates = points[members]
    order = members[np.argsort(coordinates[:, np.argmax(np.ptp(coordinates, axis=0))], kind="stable")]
    half = len(order) // 2
    return _leaves(points, order[:half]) + _leaves(points, order[half:])


def _least(values: Floats, count: int) -> Ints:
    """Return (rows, count): the columns of the smallest values in each row; all columns if there are no more."""
    if count >= values.shape[1]:
        return np.tile(np.arange(values.shape[1]), (len(values), 1))
    return np.argpartition(values, count - 1, axis=1)[:, :count]


def _distances(first: Floats, second: Floats) -> Floats:
    return np.sqrt(np.sum((first - second) ** 2, axis=-1))


def _shares(points: Floats, distances: Floats) -> Floats:
    """Return (shapes, neighbours): each point's share in the ordinary kriging estimate; the shares add up to 1."""
    count = points.shape[1]
    system = np.ones((len(points), count + 1, count + 1))
    system[:, :count, :count] = _distances(points[:, :, None], points[:, None])
    system[:, count, count] = 0
    right_side = np.concatenate([distances, np.ones((len(points), 1))], axis=1)
    return np.linalg.solve(system, right_side[:, :, None])[:, :count, 0]
