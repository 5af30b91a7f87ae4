"""What would change the answer?  By how much each number of the hardware must move, alone, until another plan wins.

Every plan that the search has kept is priced again under the moved number, so that what hides or shows behind other
work is as it would be then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import ClusterSpec
from autoplan.cost.estimate import estimate
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.result import RISKY_Z, Flip, RankedPlan, SearchResult, Sensitivity
from autoplan.timing import Calibration, Operation
from search.choice import kind_of, pace
from search.ranking import TIE, seconds_per_sequence
from search.space import Space
from search.study import KEPT, MARGIN, search

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_CHANGE = 2.0  # a number that is off by more is another machine
MOST_PLANS = 128  # that are priced again
LEAST_SLOPE = 1e-4  # of the logarithm of the step: what changes it less cannot change the answer
CLOSE = 1e-4  # of two steps at a flip, as a share
MOST_ROUNDS = 12
_NUDGE = 1e-4

PRODUCTS: tuple[Operation, ...] = ("gemm", "dgrad", "wgrad", "experts", "experts_backward")
ATTENTIONS: tuple[Operation, ...] = (
    "attention",
    "attention_backward",
    "latent_attention",
    "latent_attention_backward",
)
STREAMS: tuple[Operation, ...] = (
    "norm",
    "norm_backward",
    "rope",
    "swiglu",
    "swiglu_backward",
    "cross_entropy",
    "optimizer",
)
COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number of the hardware; `slower(problem, growth)` makes what rests on it take so many times as long."""

    name: str
    slower: Callable[[Problem, float], Problem]
    is_rate: bool = True  # else a time
    measure: tuple[Operation, ...] = ()


def _factor(name: str, operations: tuple[Operation, ...]) -> Callable[[Problem, float], Problem]:
    """Growth of a factor of the calibration, and of what was measured in its place."""

    def slower(problem: Problem, growth: float) -> Problem:
        calibration: Calibration = problem.calibration
        calibration = replace(calibration, **{name: growth * getattr(calibration, name)})
        return replace(problem, calibration=calibration, timings=problem.timings.slowed(operations, growth))

    return slower


def _of_cluster(
    change: Callable[[ClusterSpec, float], ClusterSpec], operations: tuple[Operation, ...] = ()
) -> Callable[[Problem, float], Problem]:
    def slower(problem: Problem, growth: float) -> Problem:
        timings = problem.timings.slowed(operations, growth)
        return replace(problem, cluster=change(problem.cluster, growth), timings=timings)

    return slower


def _narrower_links(cluster: ClusterSpec, growth: float) -> ClusterSpec:
    def narrower(bridge: float | None) -> float | None:
        return None if bridge is None else bridge / growth

    levels = tuple(
        replace(
            level,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / growth,
            host_bridge_bytes_per_s=narrower(level.host_bridge_bytes_per_s),
        )
        for level in cluster.levels
    )
    return replace(cluster, levels=levels)


def _later_links(cluster: ClusterSpec, growth: float) -> ClusterSpec:
    levels = []
    for level in cluster.levels:
        curve = level.collectives and replace(
            level.collectives, start_s=growth * level.collectives.start_s, step_s=growth * level.collectives.step_s
        )
        levels.append(replace(level, latency_s=growth * level.latency_s, collectives=curve))
    return replace(cluster, levels=tuple(levels))


def _narrower_network(cluster: ClusterSpec, growth: float) -> ClusterSpec:
    return replace(cluster, network=replace(cluster.network, nic_bytes_per_s=cluster.network.nic_bytes_per_s / growth))


def _later_network(cluster: ClusterSpec, growth: float) -> ClusterSpec:
    return replace(cluster, network=replace(cluster.network, latency_s=growth * cluster.network.latency_s))


def quantities(problem: Problem) -> tuple[Quantity, ...]:
    """The numbers that times rest on, by what a person calls them on this cluster."""
    cluster = problem.cluster
    link = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe", "shared_memory": "shared-memory"}[
        cluster.levels[-1].kind
    ]
    return (
        Quantity(name="matrix-product rate", slower=_factor("gemm", PRODUCTS), measure=PRODUCTS[:3]),
        Quantity(name="attention rate", slower=_factor("attention", ATTENTIONS), measure=ATTENTIONS[:2]),
        Quantity(name="memory bandwidth", slower=_factor("memory_bound", STREAMS), measure=("norm", "optimizer")),
        Quantity(name="launch time", slower=_factor("host", ()), is_rate=False),
        # What was measured of collectives has latency in it; it moves with the bandwidth.
        Quantity(name=f"{link} bandwidth", slower=_of_cluster(_narrower_links, COLLECTIVES), measure=COLLECTIVES[:3]),
        Quantity(name=f"{link} latency", slower=_of_cluster(_later_links), is_rate=False, measure=COLLECTIVES[:3]),
        Quantity(name="network bandwidth", slower=_of_cluster(_narrower_network), measure=COLLECTIVES),
        Quantity(name="network latency", slower=_of_cluster(_later_network), is_rate=False, measure=COLLECTIVES),
    )


def sensitivity(problem: Problem, space: Space, result: SearchResult, margin: float) -> Sensitivity:
    """Elasticities of the best plan's step, and the numbers that would let a plan of another kind win, nearest first.

    The winners looked at are the plans of `result`; `margin` is what the search left none out of.
    """
    rows, kinds, margin = _rows(result, margin)
    batch = PlanBatch.of([one.plan for one in rows], problem.model.num_layers)
    now = seconds_per_sequence(estimate(problem, batch))
    slopes, flips = {}, [*_less_memory(problem, rows, kinds, margin), *_more_memory(problem, space, rows[0])]
    for quantity in quantities(problem):

        def times(growth: float, quantity: Quantity = quantity) -> Floats:
            return seconds_per_sequence(estimate(quantity.slower(problem, growth), batch))

        nudged = times(1.0 + _NUDGE)
        sign = -1.0 if quantity.is_rate else 1.0
        slopes[quantity.name] = sign * float(nudged[0] / now[0] - 1.0) / _NUDGE
        if kinds.max() == 0 or np.ptp(nudged / now) < _NUDGE * LEAST_SLOPE:
            continue
        least = _of_kinds(now, kinds)
        slope = (_of_kinds(nudged, kinds) - least) / _NUDGE
        for end in (MOST_CHANGE, 1.0 / MOST_CHANGE):
            found = first_crossing(lambda growth: _of_kinds(times(growth), kinds), least, slope, end)
            if found is None:
                continue
            growth, kind = found
            then = times(growth)
            winner = min(np.flatnonzero(kinds == kind), key=lambda at: float(then[at]))
            # What is left out takes at least `1 + margin` times as long as the best one now, more where the number is
            # worse, and where it is better no less than in proportion.
            is_proven = float(then[kinds == 0].min()) <= float(now[0]) * (1.0 + margin) * min(growth, 1.0)
            flips.append(
                Flip(
                    quantity=quantity.name,
                    factor=growth**sign,
                    plan=rows[winner].plan,
                    is_proven=is_proven,
                    measure=quantity.measure,
                )
            )
    return Sensitivity(elasticities=slopes, flips=tuple(sorted(flips, key=lambda flip: abs(math.log(flip.factor)))))


def _rows(result: SearchResult, margin: float) -> tuple[tuple[RankedPlan, ...], Ints, float]:
    """(plans to price again, best first, the kind of each, what they leave none out of); the best is of kind 0."""
    best = result.rivals[0]
    others = {one.plan: one for one in sorted((*result.ranked, *result.rivals), key=pace) if one.plan != best.plan}
    if len(others) >= MOST_PLANS:
        margin = min(margin, pace(list(others.values())[MOST_PLANS - 1]) / pace(best) - 1.0)
    rows = (best, *islice(others.values(), MOST_PLANS - 1))
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(kind_of(one.plan), len(numbers)) for one in rows]
    return rows, np.array(kinds, dtype=np.int64), margin


def _of_kinds(times: Floats, kinds: Ints) -> Floats:
    """The least time of each kind."""
    least = np.full(int(kinds.max()) + 1, np.inf)
    np.minimum.at(least, kinds, times)
    return least


def first_crossing(
    times: Callable[[float], Floats], now: Floats, slope: Floats, end: float
) -> tuple[float, int] | None:
    """(growth, row): the first growth between 1 and `end` at which another row takes no longer than row 0.

    `now` are the times at growth 1 and `slope` their growth there.  Times are sums and maxima of times that grow in
    proportion, so that they are lines with bends: follow the lines to where the first one crosses, price there, and go
    on from there if a bend was in between.
    """
    at, here, beyond = 1.0, now, end
    toward = math.copysign(1.0, end - 1.0)
    is_crossed = False
    for _ in range(MOST_ROUNDS):
        closing = (slope[0] - slope) * toward
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = np.where(closing > 0, np.maximum(here - here[0], 0.0) / closing, np.inf)
        target = at + toward * min(float(reach.min()), abs(beyond - at))
        there = times(target)
        # Rows that come no nearer are none that cross here, however near they are.
        behind = np.where((closing > 0) | (there < there[0]), there / there[0] - 1.0, np.inf)
        behind[0] = np.inf
        rival = int(np.argmin(behind))
        if abs(behind[rival]) <= CLOSE and (target != end or behind[rival] <= TIE):
            return target, rival
        if target == end and behind[rival] > 0:
            return None
        slope = (there - here) / (target - at)
        if behind[rival] < 0:
            beyond, is_crossed = target, True
        else:
            at, here = target, there
    return (at, rival) if is_crossed else None


# -- memory -----------------------------------------------------------------------------------------------------------


def _room(problem: Problem) -> float:
    """What part of a device's memory a plan may need that fits safely."""
    return math.exp(RISKY_Z * problem.calibration.memory_spread)


def _less_memory(problem: Problem, rows: Sequence[RankedPlan], kinds: Ints, margin: float) -> Iterator[Flip]:
    """Where no plan of the best one's kind that is faster than the next kind's fits."""
    if rows[0].verdict != "fits":
        return
    least = math.inf
    for one, kind in zip(rows, kinds, strict=True):
        if kind == 0:
            least = min(least, one.memory_bytes)
        elif one.memory_bytes < least:
            factor = least / _room(problem) / problem.capacity_bytes
            is_proven = pace(one) <= pace(rows[0]) * (1.0 + margin)
            yield Flip(quantity="device memory", factor=factor, plan=one.plan, is_proven=is_proven)
            return


def _more_memory(problem: Problem, space: Space, best: RankedPlan) -> Iterator[Flip]:
    """The plan that would win with the least more memory, if any would."""
    device = problem.cluster.device
    roomy = replace(device, visible_memory_bytes=MOST_CHANGE * device.visible_memory_bytes)
    found = search(replace(problem, cluster=replace(problem.cluster, device=roomy)), space)
    faster = [one for one in found.ranked if pace(one) < pace(best) * (1.0 - TIE)]
    if not faster:
        return
    first = min(faster, key=lambda one: (one.memory_bytes, pace(one)))
    # A search tells all plans within its margin, and keeps so many.
    is_proven = pace(best) <= pace(faster[0]) * (1.0 + MARGIN) and len(found.ranked) < KEPT
    factor = first.memory_bytes / _room(problem) / problem.capacity_bytes
    yield Flip(quantity="device memory", factor=factor, plan=first.plan, is_proven=is_proven)
