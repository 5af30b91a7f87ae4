"""Cost of overlap, from collectives measured together with GEMMs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation

# GEMMs and collective should take about the same time, because only then the cost of overlap is visible.
MAX_UNLIKE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideProducts:
    """Collective of one shape that took `seconds` next to GEMMs, which take `products_s` alone."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    products_s: float


def contention_shares(
    beside_products: Iterable[BesideProducts], alone: Iterable[Measurement]
) -> dict[Operation, float]:
    """Return the cost of overlap as a share of the overlapped time, by operation: the median over its shapes.

    Without interference, both together would take as long as the longer one (`modelling` D6).
    """
    alone_s: Mapping[tuple[Operation, tuple[int, ...], str], float] = {
        (call.operation, call.shape, call.dtype): call.seconds for call in alone
    }
    shares: dict[Operation, list[float]] = defaultdict(list)
    for measured in beside_products:
        call_s = alone_s.get((measured.operation, measured.shape, measured.dtype))
        if call_s is None or max(call_s, measured.products_s) > MAX_UNLIKE * min(call_s, measured.products_s):
            continue
        share = (measured.seconds - max(call_s, measured.products_s)) / min(call_s, measured.products_s)
        shares[measured.operation].append(min(max(share, 0.0), 1.0))
    return {operation: statistics.median(values) for operation, values in sorted(shares.items())}
