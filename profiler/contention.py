"""Cost of overlap, from collectives that were measured beside products."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.spec.timing import Measurement, Operation

# Products and collective should last about as long as each other: what the shorter one costs shows in nothing else.
MOST_UNLIKE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideProducts:
    """Collective of one shape that took `seconds` beside products, which take `products_s` alone."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    products_s: float


def contention_shares(beside: Iterable[BesideProducts], alone: Iterable[Measurement]) -> dict[Operation, float]:
    """Return what overlapping costs, as a share of the time that is overlapped, by operation: the middle of its shapes.

    The longer of the two would be all there is to wait for, if neither slowed the other down (`modelling` D6).
    """
    alone_s: Mapping[tuple[Operation, tuple[int, ...], str], float] = {
        (one.operation, one.shape, one.dtype): one.seconds for one in alone
    }
    shares: dict[Operation, list[float]] = defaultdict(list)
    for one in beside:
        own_s = alone_s.get((one.operation, one.shape, one.dtype))
        if own_s is None or max(own_s, one.products_s) > MOST_UNLIKE * min(own_s, one.products_s):
            continue
        share = (one.seconds - max(own_s, one.products_s)) / min(own_s, one.products_s)
        shares[one.operation].append(min(max(share, 0.0), 1.0))
    return {operation: statistics.median(found) for operation, found in sorted(shares.items())}
