"""Exact distribution of layers, micro-batches and states over different stages and replicas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoplan.base.arrays import Floats, Ints

SAME = 1e-12  # share by which times may differ by rounding


def min_max_layers(layer_s: Floats, extra_s: Floats, most_layers: Ints) -> tuple[int, ...] | None:
    """Return the layers of every stage that make the slowest stage fastest; None if none fits.

    `layer_s` is every layer on every stage, shape (stages, layers); `extra_s` what a stage does beside them.  Every
    stage gets at least one layer and at most `most_layers`.  Of the best cuts it is the one with the least sum of
    squared times, so that stages without influence on the slowest are alike.
    """
    stages, num_layers = layer_s.shape
    if stages > num_layers:
        return None
    before = np.concatenate([np.zeros((stages, 1)), np.cumsum(layer_s, axis=1)], axis=1)
    # As every stage has a layer, stage i begins at layer i + a and ends behind layer i + b, 0 <= a <= b <= spare.
    spare = np.arange(num_layers - stages + 1)
    begins = np.arange(stages)[:, None] + spare
    start_s, end_s = np.take_along_axis(before, begins, 1), np.take_along_axis(before, begins + 1, 1)
    times = extra_s[:, None, None] + end_s[:, None, :] - start_s[:, :, None]  # (stages, a, b)
    layers = 1 + spare[None, :] - spare[:, None]
    times = np.where((layers >= 1) & (layers <= most_layers[:, None, None]), times, np.inf)
    slowest, _ = _cheapest_cut(times, np.maximum)
    if not np.isfinite(slowest):
        return None
    return _cheapest_cut(np.where(times <= slowest * (1 + SAME), times**2, np.inf), np.add)[1]


def _cheapest_cut(costs: Floats, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """Return the cost and the layers of the cut whose stages' costs, joined, are least: dynamic programming."""
    best = np.where(np.arange(costs.shape[1]) == 0, 0.0, np.inf)
    froms = []
    for stage in costs:
        joined = join(best[:, None], stage)
        froms.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    end, layers = costs.shape[1] - 1, []
    for begins in reversed(froms):
        layers.append(1 + end - int(begins[end]))
        end = int(begins[end])
    return float(best[-1]), tuple(reversed(layers))


def split_microbatches(
    time_s: Sequence[Floats], counts: Sequence[int], sizes: Sequence[int], global_batch: int
) -> tuple[int, ...] | None:
    """Return micro-batches of all replicas of every kind such that the slowest replica is as fast as possible.

    `time_s[k][m - 1]` is a replica of kind k with m micro-batches of `sizes[k]` sequences, not falling; its `counts[k]`
    replicas share the kind's micro-batches as evenly as whole numbers allow, and each gets at least one.  None where
    no numbers give `global_batch`.
    """
    bars = np.unique(np.concatenate(list(time_s)))
    low, high = 0, len(bars)
    while low < high:
        middle = (low + high) // 2
        if _share_out(time_s, counts, sizes, global_batch, bars[middle]):
            high = middle
        else:
            low = middle + 1
    return _share_out(time_s, counts, sizes, global_batch, bars[low]) if low < len(bars) else None


def _share_out(
    time_s: Sequence[Floats], counts: Sequence[int], sizes: Sequence[int], global_batch: int, bar: float
) -> tuple[int, ...] | None:
    """Return micro-batches of every kind with no replica slower than `bar`: sums that the kinds reach, bit by bit."""
    spare = [
        count * (int(np.searchsorted(times, bar, side="right")) - 1)
        for times, count in zip(time_s, counts, strict=True)
    ]
    unplaced = global_batch - sum(count * size for count, size in zip(counts, sizes, strict=True))
    if unplaced < 0 or min(spare) < 0:
        return None
    reached = [1]  # bit i: whether i sequences beyond one micro-batch a replica can be placed on the kinds so far
    for spare_rounds, size in zip(spare, sizes, strict=True):
        reached.append(_multiples(reached[-1], size, spare_rounds) & ((2 << unplaced) - 1))
    if not reached[-1] >> unplaced & 1:
        return None
    result = []
    for before, spare_rounds, size in zip(reversed(reached[:-1]), reversed(spare), reversed(sizes), strict=True):
        num_taken = next(
            n for n in range(min(spare_rounds, unplaced // size), -1, -1) if before >> (unplaced - n * size) & 1
        )
        unplaced -= num_taken * size
        result.append(num_taken)
    return tuple(count + num_taken for count, num_taken in zip(counts, reversed(result), strict=True))


def _multiples(sums: int, size: int, max_times: int) -> int:
    """Return the bits of `sums`, each with 0 to `max_times` times `size` added."""
    step = 1
    while max_times > 0:
        step_taken = min(step, max_times)
        sums |= sums << step_taken * size
        max_times -= step_taken
        step *= 2
    return sums


def even_shares(bounds: Sequence[float], counts: Sequence[int]) -> tuple[float, ...] | None:
    """Return shares of a replica of every kind, equal within `bounds`; None where bounds leave some over."""
    if min(bounds) < 0 or sum(count * bound for count, bound in zip(counts, bounds, strict=True)) < 1:
        return None
    unshared, replicas = 1.0, sum(counts)
    level = 1.0
    for bound, count in sorted(zip(bounds, counts, strict=True)):
        level = unshared / replicas
        if bound >= level:
            break
        unshared -= count * bound
        replicas -= count
    return tuple(min(bound, level) for bound in bounds)
