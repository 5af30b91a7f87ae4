"""Cost of overlap, from collectives that were measured beside products."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation

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
    """Return the cost of overlap as a share of the overlapped time, by operation: the median over its shapes.

    If neither slowed the other down, both would take as long as the longer of them (`modelling` D6).
    """
    alone_s: Mapping[tuple[Operation, tuple[int, ...], str], float] = {
        (call.operation, call.shape, call.dtype): call.seconds for call in alone
    }
    shares: dict[Operation, list[float]] = defaultdict(list)
    for measured in beside:
        call_s = alone_s.get((measured.operation, measured.shape, measured.dtype))
        if call_s is None or max(call_s, measured.products_s) > MOST_UNLIKE * min(call_s, measured.products_s):
            continue
        share = (measured.seconds - max(call_s, measured.products_s)) / min(call_s, measured.products_s)
        shares[measured.operation].append(min(max(share, 0.0), 1.0))
    return {operation: statistics.median(values) for operation, values in sorted(shares.items())}
