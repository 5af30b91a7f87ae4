"""Sensitivity of the answer: how far each hardware number must change, alone, until another plan wins.

Every plan kept by the search is priced again with the changed number, so that overlaps are computed correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.estimate import estimate
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.search.choice import at_quantile, kind_of, normal_z
from autoplan.search.findings import KEPT
from autoplan.search.ranking import TIE, seconds_per_sequence
from autoplan.search.simple import MAX_SLOWER
from autoplan.search.space import Space
from autoplan.search.study import MARGIN, search
from autoplan.spec.calibration import Calibration
from autoplan.spec.estimate import RISKY_Z
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.mixed_result import MixedResult
from autoplan.spec.operations import ATTENTIONS, COLLECTIVES, EXPERTS, PRODUCTS, STREAMS, Operation
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Flip, Plan, RankedPlan, SearchResult, Sensitivity
from autoplan.topology.cluster import ClusterSpec

MAX_CHANGE = 2.0  # a larger change would be a different machine
MAX_PLANS, MAX_MIXED_PLANS = 256, 8  # plans priced again
MIN_SLOPE = 1e-4  # of the log step; a number with a smaller effect cannot change the answer
CLOSE = 1e-4  # relative difference of two steps at a flip
MAX_ROUNDS = 12
_NUDGE = 1e-4
AnyProblem = TypeVar("AnyProblem", Problem, MixedProblem)
_TIMED = tuple(name for name in COLLECTIVES if name != "broadcast")  # collectives in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity(Generic[AnyProblem]):
    """A hardware number; `slower(problem, growth)` multiplies the times that depend on it by `growth`."""

    name: str
    slower: Callable[[AnyProblem, float], AnyProblem]
    is_rate: bool = True  # else a time
    measure: tuple[Operation, ...] = ()


def _factor(name: str, operations: tuple[Operation, ...]) -> Callable[[Problem, float], Problem]:
    """Scale a factor of the calibration, and the measured times used in its place."""

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


def quantities(problem: Problem) -> tuple[Quantity[Problem], ...]:
    """Return the numbers that times depend on, by their names on this cluster."""
    cluster = problem.cluster
    link = {
        "nvlink": "NVLink",
        "xgmi": "xGMI",
        "ethernet": "Ethernet",
        "pcie": "PCIe",
        "shared_memory": "shared-memory",
    }[cluster.levels[-1].kind]
    return (
        Quantity(name="matrix-product rate", slower=_factor("gemm", (*PRODUCTS, *EXPERTS)), measure=PRODUCTS),
        Quantity(name="attention rate", slower=_factor("attention", ATTENTIONS), measure=ATTENTIONS[:2]),
        Quantity(name="memory bandwidth", slower=_factor("memory_bound", STREAMS), measure=("norm", "optimizer")),
        Quantity(name="launch time", slower=_factor("host", ()), is_rate=False),
        # Measured collectives include latency; they are scaled with the bandwidth.
        Quantity(name=f"{link} bandwidth", slower=_of_cluster(_narrower_links, _TIMED), measure=COLLECTIVES[:3]),
        Quantity(name=f"{link} latency", slower=_of_cluster(_later_links), is_rate=False, measure=COLLECTIVES[:3]),
        Quantity(name="network bandwidth", slower=_of_cluster(_narrower_network), measure=_TIMED),
        Quantity(name="network latency", slower=_of_cluster(_later_network), is_rate=False, measure=_TIMED),
    )


def part_quantities(problem: MixedProblem) -> tuple[Quantity[MixedProblem], ...]:
    """Return the numbers that times depend on, of every part of a mixed cluster."""
    return tuple(
        Quantity(
            name=f"{own.name} of {name}",
            slower=partial(_slower_part, part, own),
            is_rate=own.is_rate,
            measure=own.measure,
        )
        for part, name in enumerate(problem.cluster.part_names)
        for own in quantities(problem.alone(part))
    )


def _slower_part(part: int, quantity: Quantity[Problem], problem: MixedProblem, growth: float) -> MixedProblem:
    """Return the problem with the times that depend on a quantity of one part multiplied by `growth`."""
    own = quantity.slower(problem.alone(part), growth)
    parts, calibrations, timings = list(problem.cluster.parts), list(problem.calibrations), list(problem.timings)
    parts[part], calibrations[part] = own.cluster, own.calibration
    if timings:
        timings[part] = own.timings
    cluster = replace(problem.cluster, parts=tuple(parts))
    return replace(problem, cluster=cluster, calibrations=tuple(calibrations), timings=tuple(timings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contenders(Generic[AnyProblem, Plan]):
    """Plans that may win, best first; those of the best plan's kind have kind 0."""

    plans: Sequence[Plan]
    kinds: Ints
    times: Callable[[AnyProblem], Floats]  # the objective of the search for every plan
    margin: float  # the search excluded no plan nearer to the best; negative if unknown

    @classmethod
    def of(
        cls,
        plans: Sequence[Plan],
        kind_of_plan: Callable[[Plan], Hashable],
        times: Callable[[AnyProblem], Floats],
        margin: float = -1.0,
    ) -> _Contenders[AnyProblem, Plan]:
        """Return the plans with their kinds numbered."""
        numbers: dict[Hashable, int] = {}
        kinds = [numbers.setdefault(kind_of_plan(plan), len(numbers)) for plan in plans]
        return cls(plans=plans, kinds=np.array(kinds, dtype=np.int64), times=times, margin=margin)

    def least(self, times: Floats) -> Floats:
        """Return the smallest time of each kind."""
        least_s = np.full(int(self.kinds.max()) + 1, np.inf)
        np.minimum.at(least_s, self.kinds, times)
        return least_s


def sensitivity(problem: Problem, space: Space, result: SearchResult, margin: float) -> Sensitivity[ParallelPlan]:
    """Return elasticities of the best step, and changes after which another plan of `result` within `margin` wins."""
    z, best = normal_z(result.certificate.quantile), result.rivals[0]
    ordered = sorted((*result.ranked, *result.rivals), key=lambda plan: at_quantile(plan, z))
    slower_plans = [plan for plan in {plan.plan: plan for plan in ordered}.values() if plan.plan != best.plan]
    if len(slower_plans) >= MAX_PLANS:
        margin = min(margin, slower_plans[MAX_PLANS - 1].s_per_sequence / best.s_per_sequence - 1.0)
    ranked = (best, *slower_plans[: MAX_PLANS - 1])
    batch = problem.batch([plan.plan for plan in ranked])
    scale = np.array(
        [at_quantile(plan, z) / plan.s_per_sequence for plan in ranked]
    )  # to the quantile that is minimised
    scale[0] /= 1.0 + _lead(result)

    def times(changed: Problem) -> Floats:
        return scale * seconds_per_sequence(estimate(changed, batch))

    margin = margin if result.certificate.quantile is None else -1.0
    contenders = _Contenders.of([plan.plan for plan in ranked], kind_of, times, margin)
    flips = (*_less_memory(problem, ranked, contenders), *_more_memory(problem, space, result))
    return _sensitivity(problem, contenders, quantities(problem), flips)


def _lead(result: SearchResult) -> float:
    """Return by how much another plan must be faster to win: a simpler one is the answer up to a limit."""
    return 0.0 if result.certificate.slower_than_fastest is None else MAX_SLOWER


def mixed_sensitivity(problem: MixedProblem, result: MixedResult) -> Sensitivity[MixedPlan]:
    """Return elasticities of the best step, and changes after which plans of another structure found win."""
    plans = [cost.plan for cost in result.ranked[:MAX_MIXED_PLANS]]

    def times(changed: MixedProblem) -> Floats:
        return np.array([cost.s_per_sequence for cost in estimate_mixed(changed, plans)])

    return _sensitivity(problem, _Contenders.of(plans, _structure_of, times), part_quantities(problem), ())


def _structure_of(plan: MixedPlan) -> Hashable:
    return plan.common, tuple((kind.count, *((stage.part, stage.tp) for stage in kind.stages)) for kind in plan.kinds)


def _sensitivity(
    problem: AnyProblem,
    contenders: _Contenders[AnyProblem, Plan],
    numbers: Sequence[Quantity[AnyProblem]],
    flips: Sequence[Flip[Plan]],
) -> Sensitivity[Plan]:
    """Return elasticities of the first plan, and all flips, nearest first."""
    now, slopes, found = contenders.times(problem), {}, list(flips)
    for quantity in numbers:
        nudged = contenders.times(quantity.slower(problem, 1.0 + _NUDGE))
        sign = -1.0 if quantity.is_rate else 1.0
        slopes[quantity.name] = sign * float(nudged[0] / now[0] - 1.0) / _NUDGE
        if np.ptp(nudged / now) >= _NUDGE * MIN_SLOPE:
            found.extend(_flips(problem, contenders, quantity, now, nudged))
    return Sensitivity(elasticities=slopes, flips=tuple(sorted(found, key=lambda flip: abs(math.log(flip.factor)))))


def _flips(
    problem: AnyProblem,
    contenders: _Contenders[AnyProblem, Plan],
    quantity: Quantity[AnyProblem],
    now: Floats,
    nudged: Floats,
) -> Iterator[Flip[Plan]]:
    """Yield the first flip in either direction."""

    def times(growth: float) -> Floats:
        return contenders.times(quantity.slower(problem, growth))

    least = contenders.least(now)
    slope = (contenders.least(nudged) - least) / _NUDGE
    for end in (MAX_CHANGE, 1.0 / MAX_CHANGE):
        crossing = first_crossing(lambda growth: contenders.least(times(growth)), least, slope, end)
        if crossing is None:
            continue
        growth, kind = crossing
        flip_times = times(growth)
        winner = min(map(int, np.flatnonzero(contenders.kinds == kind)), key=lambda at: float(flip_times[at]))
        # Excluded plans take at least `1 + margin` times as long as the current best; more if the number is worse, and
        # if it is better, they shorten at most in proportion.
        best = float(flip_times[contenders.kinds == 0].min())
        yield Flip(
            quantity=quantity.name,
            factor=growth if not quantity.is_rate else 1.0 / growth,
            plan=contenders.plans[winner],
            is_proven=best <= float(now[0]) * (1.0 + contenders.margin) * min(growth, 1.0),
            measure=quantity.measure,
        )


def first_crossing(
    times: Callable[[float], Floats], now: Floats, slope: Floats, end: float
) -> tuple[float, int] | None:
    """Return (growth, row): the first growth between 1 and `end` at which another row takes no longer than row 0.

    `now` are the times at growth 1 and `slope` their derivatives there.  Times are sums and maxima of terms
    proportional to the growth, so they are piecewise linear: follow the lines to the first crossing, price there, and
    continue if a bend was in between.
    """
    at, times_at, beyond = 1.0, now, end
    toward = math.copysign(1.0, end - 1.0)
    is_crossed = False
    for _ in range(MAX_ROUNDS):
        closing = (slope[0] - slope) * toward
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = np.where(closing > 0, np.maximum(times_at - times_at[0], 0.0) / closing, np.inf)
        target = at + toward * min(float(reach.min()), abs(beyond - at))
        at_target = times(target)
        # Rows that do not approach row 0 cannot cross it here, however close they are.
        behind = np.where((closing > 0) | (at_target < at_target[0]), at_target / at_target[0] - 1.0, np.inf)
        behind[0] = np.inf
        rival = int(np.argmin(behind))
        if abs(behind[rival]) <= CLOSE and (target != end or behind[rival] <= TIE):
            return target, rival
        if target == end and behind[rival] > 0:
            return None
        slope = (at_target - times_at) / (target - at)
        if behind[rival] < 0:
            beyond, is_crossed = target, True
        else:
            at, times_at = target, at_target
    return (at, rival) if is_crossed else None


# -- memory -----------------------------------------------------------------------------------------------------------


def _safe_share(problem: Problem) -> float:
    """Return the share of a device's memory up to which a plan fits safely."""
    return math.exp(RISKY_Z * problem.calibration.memory_spread)


def _less_memory(
    problem: Problem, plans: Sequence[RankedPlan], contenders: _Contenders[Problem, ParallelPlan]
) -> Iterator[Flip[ParallelPlan]]:
    """Yield the memory below which no plan of the best kind fits that is still faster than the next kind."""
    best = plans[0]
    if best.verdict != "fits":
        return
    least = math.inf
    for plan, kind in zip(plans, contenders.kinds, strict=True):
        if kind == 0:
            least = min(least, plan.memory_bytes)
        elif plan.memory_bytes < least:
            factor = least / _safe_share(problem) / problem.capacity_bytes
            is_proven = plan.s_per_sequence <= best.s_per_sequence * (1.0 + contenders.margin)
            yield Flip(quantity="device memory", factor=factor, plan=plan.plan, is_proven=is_proven)
            return


def _more_memory(problem: Problem, space: Space, result: SearchResult) -> Iterator[Flip[ParallelPlan]]:
    """Yield the plan that would win with the least additional memory, if any."""
    best, z = result.rivals[0], normal_z(result.certificate.quantile)
    device = problem.cluster.device
    roomy = replace(device, visible_memory_bytes=MAX_CHANGE * device.visible_memory_bytes)
    with_room = search(replace(problem, cluster=replace(problem.cluster, device=roomy)), space)
    bar = at_quantile(best, z) / (1.0 + max(_lead(result), TIE))
    better = [plan for plan in (*with_room.ranked, *with_room.rivals) if at_quantile(plan, z) < bar]
    better = [plan for plan in better if kind_of(plan.plan) != kind_of(best.plan)]
    if not better:
        return
    first = min(better, key=lambda plan: (plan.memory_bytes, plan.s_per_sequence))
    # A search finds all plans within its margin, and keeps a limited number.
    is_complete = (
        best.s_per_sequence <= with_room.rivals[0].s_per_sequence * (1.0 + MARGIN) and len(with_room.ranked) < KEPT
    )
    factor = first.memory_bytes / _safe_share(problem) / problem.capacity_bytes
    is_proven = is_complete and result.certificate.quantile is None
    yield Flip(quantity="device memory", factor=factor, plan=first.plan, is_proven=is_proven)
