"""Exact distribution of layers, micro-batches and states over different stages and replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoplan.base.arrays import Floats, Ints

SAME = 1e-12  # relative difference of times due to rounding


def min_max_layers(layer_s: Floats, extra_s: Floats, most_layers: Ints) -> tuple[int, ...] | None:
    """Return the layers per stage that minimise the time of the slowest stage; None if nothing fits.

    `layer_s` is the time of every layer on every stage, shape (stages, layers); `extra_s` the other work of a stage.
    Every stage gets at least one layer and at most `most_layers`.  Among the optimal cuts the one with the smallest sum
    of squared times is chosen, which balances the stages that are not the slowest.
    """
    stages, num_layers = layer_s.shape
    if stages > num_layers:
        return None
    before = np.concatenate([np.zeros((stages, 1)), np.cumsum(layer_s, axis=1)], axis=1)
    # As every stage has a layer, stage i begins at layer i + a and ends after layer i + b, 0 <= a <= b <= spare.
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
    """Return cost and layers of the cut with the smallest joined cost of its stages, by dynamic programming."""
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


def spread_layers(num_layers: int, least: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to spread layers over stages of `least` to `most` layers each."""
    if not most:
        yield from [()] if num_layers == 0 else []
        return
    first, *others = most
    for layers in range(max(least, num_layers - sum(others)), min(first, num_layers - least * len(others)) + 1):
        yield from ((layers, *after) for after in spread_layers(num_layers - layers, least, others))


def split_microbatches(
    time_s: Sequence[Floats], counts: Sequence[int], sizes: Sequence[int], global_batch: int
) -> tuple[int, ...] | None:
    """Return micro-batches per replica kind (over all its replicas) that minimise the time of the slowest replica.

    `time_s[k][m - 1]` is the time of a replica of kind k with m micro-batches of `sizes[k]` sequences, non-decreasing
    in m; the kind's `counts[k]` replicas share its micro-batches as evenly as possible, at least one each.  None if no
    numbers add up to `global_batch`.
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


def splits(
    most: Sequence[int], counts: Sequence[int], sizes: Sequence[int], global_batch: int
) -> Iterator[tuple[int, ...]]:
    """Yield micro-batches per replica kind, as in `split_microbatches`, that add up to the batch.

    No replica of kind k has more than `most[k]`.  Of splits with the same largest numbers of a replica of all kinds but
    the last, only the one that leaves the fewest for later kinds.
    """
    (size, *later_sizes), (count, *later_counts), (largest, *later_most) = sizes, counts, most
    if not later_sizes:
        total, remainder = divmod(global_batch, size)
        yield from [(total,)] if not remainder and count <= total <= largest * count else []
        return
    room = sum(map(math.prod, zip(later_most, later_counts, later_sizes, strict=True)))
    for number in range(1, largest + 1):
        if global_batch - number * count * size > room:
            continue
        for total in range(number * count, max((number - 1) * count, count - 1), -1):
            if later := list(splits(later_most, later_counts, later_sizes, global_batch - total * size)):
                yield from ((total, *others) for others in later)
                break


def _share_out(
    time_s: Sequence[Floats], counts: Sequence[int], sizes: Sequence[int], global_batch: int, bar: float
) -> tuple[int, ...] | None:
    """Return micro-batches per kind with no replica slower than `bar`, by bit sets of reachable sums."""
    spare = [
        count * (int(np.searchsorted(times, bar, side="right")) - 1)
        for times, count in zip(time_s, counts, strict=True)
    ]
    unplaced = global_batch - sum(count * size for count, size in zip(counts, sizes, strict=True))
    if unplaced < 0 or min(spare) < 0:
        return None
    reached = [1]  # bit i: whether the kinds so far can take i sequences beyond one micro-batch per replica
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
    """Return the share per replica of every kind, as equal as `bounds` allow; None if the bounds are too small."""
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
