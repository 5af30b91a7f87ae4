"""Time of an operation at sizes between the measured ones.

Two steps.  A sum of products of the sizes, with weights that are not negative, is fitted to all points: of a matrix
product it holds the start, the bytes of the matrices and the operations, and with them what half-filled tiles and short
loops cost.  It follows the sizes far, and misses single kernels by several percent.  What it misses is interpolated
among the nearest points, by ordinary kriging with a linear variogram (Matheron, Economic Geology 1963): one small
system of equations for each shape, and linear interpolation along a line of points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Ints

# What other values are worth stands in benchmarks/results.
NEIGHBOURS = 12
FAR = math.log(4)  # of the nearest point: of what is farther, a twentieth would be off by 40 % and more
TILE = 128  # rows or columns that a kernel computes at once
# Full tiles and a last one with a single row lie as far apart as sizes of ratio 1.35: other kernels serve them.
PADDING = 0.3
UNSEEN = 0.01  # first weight of a product beside that of the work: what a single point tells is its rate

_STEPS = 300  # of the fit
_LEAF = 16  # most points of a cell
_NEAREST_CELLS = 6  # whose points are looked through
_AT_ONCE = 256  # shapes, to bound memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scattered:
    """Times of one operation at scattered points, ready to be asked for those in between."""

    powers: tuple[int, ...]  # with which the work grows with each size
    low: Floats  # least and greatest of each size
    high: Floats
    weights: Floats  # of the products of sizes
    points: Floats  # (points, coordinates)
    residuals: Floats  # (points,): logarithm of measured over fitted time
    cells: Ints  # (cells, _LEAF): points that lie together, -1 where there are fewer
    cell_low: Floats  # (cells, coordinates): the box around them
    cell_high: Floats

    @classmethod
    def of(cls, sizes: Floats, seconds: Floats, powers: Sequence[int]) -> Scattered:
        """The times of points (points, sizes), no two the same, all positive; the first size grows with the batch."""
        products = _products(sizes, powers)
        weights = _fitted(products, seconds)
        points = _coordinates(sizes)
        leaves = _leaves(points, np.arange(len(points)))
        return cls(
            powers=tuple(powers),
            low=sizes.min(axis=0),
            high=sizes.max(axis=0),
            weights=weights,
            points=points,
            residuals=np.log(seconds / (products @ weights)),
            cells=np.array([np.pad(leaf, (0, _LEAF - len(leaf)), constant_values=-1) for leaf in leaves]),
            cell_low=np.array([points[leaf].min(axis=0) for leaf in leaves]),
            cell_high=np.array([points[leaf].max(axis=0) for leaf in leaves]),
        )

    def at(self, sizes: Floats) -> Floats:
        """Seconds at (shapes, sizes): NaN outside the range of a size, and farther than `FAR` from every point.

        Beyond the greatest first size the fitted sum goes on, with what it misses there.
        """
        nearer = np.column_stack([np.minimum(sizes[:, 0], self.high[0]), sizes[:, 1:]])
        inside = np.all((nearer >= self.low) & (nearer <= self.high), axis=1)
        # No matrix product: its rounding would depend on how many shapes are asked for together.
        fitted = np.sum(_products(sizes[inside], self.powers) * self.weights, axis=1)
        seconds = np.full(len(sizes), np.nan)
        seconds[inside] = fitted * np.exp(self._residuals(_coordinates(nearer[inside])))
        return seconds

    def shares(self, sizes: Floats) -> dict[int, float]:
        """Return the points, with shares, whose misses of the fitted sum an estimate at a shape (sizes,) mixes."""
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
            # Some shares may be negative: none leads beyond what was measured nearby.
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
    """Return (shapes, products): each size's powers up to its own, times those of the others; the last is the work."""
    products = np.ones((len(sizes), 1))
    for size, power in zip(sizes.T, powers, strict=True):
        products = np.concatenate([products * size[:, None] ** lower for lower in range(power + 1)], axis=1)
    return products


def _fitted(products: Floats, seconds: Floats) -> Floats:
    """The weights, none negative, of least squared relative error (the steps of Lee and Seung, NIPS 2000)."""
    relative = products / seconds[:, None]
    scale = relative.mean(axis=0)
    relative = relative / scale
    normal, target = relative.T @ relative, relative.sum(axis=0)
    weights = np.append(np.full(len(scale) - 1, UNSEEN), 1.0)
    for _ in range(_STEPS):
        weights = weights * target / (normal @ weights)
    return weights / scale


def _coordinates(sizes: Floats) -> Floats:
    """Coordinates of shapes: the logarithm of each size, and how empty the emptiest of their last tiles is."""
    return np.column_stack([np.log(sizes), PADDING * np.max(-sizes % TILE / TILE, axis=1)])


def _leaves(points: Floats, members: Ints) -> list[Ints]:
    """Members that lie together, up to `_LEAF`: halved along their widest coordinate, again and again."""
    if len(members) <= _LEAF:
        return [members]
    coordinates = points[members]
    order = members[np.argsort(coordinates[:, np.argmax(np.ptp(coordinates, axis=0))], kind="stable")]
    half = len(order) // 2
    return _leaves(points, order[:half]) + _leaves(points, order[half:])


def _least(values: Floats, count: int) -> Ints:
    """Return (rows, count): the columns of the least values of each row; all of them where there are no more."""
    if count >= values.shape[1]:
        return np.tile(np.arange(values.shape[1]), (len(values), 1))
    return np.argpartition(values, count - 1, axis=1)[:, :count]


def _distances(first: Floats, second: Floats) -> Floats:
    return np.sqrt(np.sum((first - second) ** 2, axis=-1))


def _shares(points: Floats, distances: Floats) -> Floats:
    """Return (shapes, neighbours): each point's share in the estimate of ordinary kriging, together 1."""
    count = points.shape[1]
    system = np.ones((len(points), count + 1, count + 1))
    system[:, :count, :count] = _distances(points[:, :, None], points[:, None])
    system[:, count, count] = 0
    right_side = np.concatenate([distances, np.ones((len(points), 1))], axis=1)
    return np.linalg.solve(system, right_side[:, :, None])[:, :count, 0]
