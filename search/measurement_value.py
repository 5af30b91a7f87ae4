"""Value of measurements: which ones could change the best plan, and the resulting certainty.

The value of a measurement is its expected saving: the share of a step by which the plan chosen with its result beats
the plan chosen now (Howard, Information Value Theory, IEEE Trans.  SSC 2, 1966).  An operation has no value if the
plans spend the same share of their step on it, as their order does not depend on it, or if it has been measured.

The share of a group of operations comes from pricing the plans as if the group had been measured, so only times that
pricing would look up count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import NormalDist
from typing import Literal

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.estimate import estimate
from autoplan.search.choice import OWN_SPREAD, first_of_kinds
from autoplan.search.ranking import seconds_per_sequence
from autoplan.spec.estimate import probability_above
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import ATTENTIONS, COLLECTIVES, EXPERTS, HOST_COPIES, PRODUCTS, STREAMS, Operation
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.timing import Provenance
from autoplan.topology.cluster import LinkLevel

Family = Literal[
    "layers", "matrix products", "attention", "memory-bound kernels", "copies to and from hosts", "collectives"
]
_KERNELS: dict[Family, tuple[Operation, ...]] = {
    "matrix products": (*PRODUCTS, *EXPERTS),
    "attention": ATTENTIONS,
    "memory-bound kernels": STREAMS,
    "copies to and from hosts": HOST_COPIES,
    "collectives": COLLECTIVES,
}


def family_of(operation: Operation) -> Family:
    """Return the family of an operation, with similar errors; all operations measured as layers are one family."""
    return next((name for name, operations in _KERNELS.items() if operation in operations), "layers")


# Standard deviations of logarithms.  Interpolated times have a median error of 3 to 4 % (benchmarks/results,
# interpolation); a curve its `fit_error`, a mean |error|, or else .1; datasheet times .25, like shipped predictions
# without a calibration [judged].
INTERPOLATED_SPREAD = 0.05
SCALED_SPREAD = 0.15  # of unmeasured groups of devices, scaled from measured ones [judged]
CURVE_SPREAD = 0.10
DATASHEET_SPREAD = 0.25
_OF_MEAN_ERROR = 1.2533141373155003  # standard deviation over the mean |error| of a normal distribution
# Share of an operation's error variance common to all sizes: the level of the device, not the shape [judged].
COMMON_SHARE = 0.5

MAX_RIVALS = 8
_NUDGE = 0.02
MIN_GAIN = 1e-4  # share of a step; a smaller expected saving is not worth a measurement
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationGroup:
    """Operations of a family, measured together; `times_s` are rough, only their ratios count."""

    family: Family
    setting: str  # description of the plan or model with these sizes
    times_s: tuple[Measurement, ...]
    seconds: float  # to measure
    spread: float  # of the logarithm of the times currently used in prices
    provenance: Provenance  # the worst provenance of these times


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """The value of measuring a group after all groups before it."""

    group: OperationGroup
    share: float  # of the best plan's step
    rival_share: float  # of the rival's step
    gain: float  # expected saving, as a share of a step
    probability: float  # expected after the measurement: that the chosen plan is the faster one


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementAdvice:
    """The best plan, its strongest rival, and the value of measurements for choosing between them."""

    best: RankedPlan
    rival: RankedPlan | None  # None: no other plan can win
    probability: float  # that the best is the faster of the two
    groups: tuple[GroupValue, ...]  # the most valuable first

    @property
    def expected_probability(self) -> float:
        """Probability that the chosen plan is the faster one after all measurements."""
        return self.groups[-1].probability if self.groups else self.probability


def spread_of_price(
    problem: Problem, operation: Operation, dtype: str, shape: tuple[int, ...]
) -> tuple[float, Provenance]:
    """Return log spread and provenance of the time currently used in prices for an operation."""
    lookup = problem.timings.lookup(operation, dtype, np.array([shape]))
    if lookup.is_exact[0]:
        return 0.0, "measured"
    if np.isfinite(lookup.seconds[0]):
        return INTERPOLATED_SPREAD, "interpolated"
    device = problem.cluster.device
    if operation in ATTENTIONS:
        return _of_curve(device.attention.is_measured, device.attention.fit_error)
    if family_of(operation) == "collectives":
        per_domain = shape[1]
        timed_groups = problem.timings.groups(operation, "bf16", "fp16", "fp32")
        if any((number == number_inside) == (shape[0] == per_domain) for number, number_inside, _ in timed_groups):
            return SCALED_SPREAD, "scaled"
        level: LinkLevel | None = next(
            (level for level in problem.cluster.levels if level.num_devices >= per_domain), None
        )
        curve = level.collectives if level is not None and shape[0] == per_domain else None
        return _of_curve(curve is not None, curve.fit_error if curve else CURVE_SPREAD)
    if operation in HOST_COPIES:
        return DATASHEET_SPREAD, "datasheet"
    # Memory-bound kernels follow the products: both were measured on a device, or neither was.
    error = device.gemm.fit_error if operation in _KERNELS["matrix products"] else CURVE_SPREAD / _OF_MEAN_ERROR
    return _of_curve(device.gemm.is_measured, error)


def _of_curve(is_measured: bool, fit_error: float) -> tuple[float, Provenance]:
    return (_OF_MEAN_ERROR * fit_error, "reference") if is_measured else (DATASHEET_SPREAD, "datasheet")


def advise_measurements(
    problem: Problem,
    plans: Sequence[RankedPlan],
    groups: Sequence[OperationGroup],
    timed: Callable[[Sequence[Measurement]], Problem],
) -> MeasurementAdvice:
    """Value the measurement of `groups` for `plans`, one per kind; `timed` returns a problem with added timings."""
    best, *slower_plans = first_of_kinds(plans)
    if not slower_plans:
        return MeasurementAdvice(best=best, rival=None, probability=1.0, groups=())
    rivals = sorted(slower_plans, key=lambda plan: plan.s_per_sequence)[:MAX_RIVALS]
    shares = shares_of(problem, [best, *rivals], groups, timed)
    leads = np.log([rival.s_per_sequence / best.s_per_sequence for rival in rivals])
    return _advice((best, *rivals), leads, shares, groups)


def shares_of(
    problem: Problem,
    plans: Sequence[RankedPlan],
    groups: Sequence[OperationGroup],
    timed: Callable[[Sequence[Measurement]], Problem],
) -> Floats:
    """Return the share of each group in every plan's step: shape (plans, groups).

    First every group is scaled to the level at which prices are unchanged; then, with all of them in the table, the
    growth of a step with a group's times gives its share.  Times that pricing does not read, such as the kernels of a
    layer measured as a whole, have no share.
    """
    batch = problem.batch([ranked.plan for ranked in plans])

    def price(times: Sequence[Measurement]) -> Floats:
        return seconds_per_sequence(estimate(timed(times), batch))

    now = seconds_per_sequence(estimate(problem, batch))
    scaled = [_scaled(group, _level(partial(_priced, price, group), now)) for group in groups]
    shares = np.zeros((len(plans), len(groups)))
    if scaled:
        unchanged = price(list(chain(*scaled)))
        for at, group in enumerate(scaled):
            slower = [replace(time, seconds=(1.0 + _NUDGE) * time.seconds) for time in group]
            shares[:, at] = price([*chain(*scaled[:at]), *slower, *chain(*scaled[at + 1 :])]) / unchanged - 1.0
    return np.clip(shares / _NUDGE, 0.0, 1.0)


def _level(price: Callable[[float], Floats], now: Floats) -> float:
    """Return the factor on times that leaves prices as `now`: the median over plans that depend on them."""
    level = 1.0
    for growth in (2.0, 1.0 + _NUDGE):  # first from rough times, then near the currently used ones
        once, more = price(level), price(growth * level)
        slope = (more - once) / ((growth - 1.0) * level)
        if not (shows := slope > 1e-9 * now).any():
            break
        level = max(level + float(np.median((now - once)[shows] / slope[shows])), 1e-3 * level)
    return level


def _priced(price: Callable[[Sequence[Measurement]], Floats], group: OperationGroup, factor: float) -> Floats:
    return price(_scaled(group, factor))


def _scaled(group: OperationGroup, growth: float) -> list[Measurement]:
    return [replace(time, seconds=growth * time.seconds) for time in group.times_s]


# -- values -----------------------------------------------------------------------------------------------------------


def covariance(groups: Sequence[OperationGroup]) -> Floats:
    """Return the covariance of the groups' log times; groups of a family share the level of the device."""
    spreads = np.array([first.spread for first in groups])
    alike = np.array([[first.family == second.family for second in groups] for first in groups], dtype=np.float64)
    return np.asarray(np.outer(spreads, spreads) * (COMMON_SHARE * alike + (1 - COMMON_SHARE) * np.eye(len(groups))))


def explained_variance(unlike: Floats, spread: Floats, measured: Sequence[int]) -> float:
    """Return the part of the variance of two plans' log ratio that measuring some groups removes.

    `unlike` are the differences between the two plans' shares, `spread` is the `covariance` of the groups.
    """
    if not measured:
        return 0.0
    both_measured = np.ix_(measured, measured)
    covariance = spread[measured] @ unlike
    return float(covariance @ np.linalg.pinv(spread[both_measured], hermitian=True) @ covariance)


def expected_gain(lead: float, variance: float) -> float:
    """Return the expected saving of choosing again once `variance` of the best's log `lead` has been resolved."""
    if variance <= 0:
        return 0.0
    scale = float(np.sqrt(variance))
    return scale * _STANDARD.pdf(lead / scale) - lead * probability_above(-lead / scale)


def expected_probability(lead: float, explained: float, unexplained: float) -> float:
    """Return the expected probability that the plan then chosen is faster, from explained and unexplained variance."""
    if explained <= 0:
        return probability_above(lead / np.sqrt(unexplained))
    # Possible leads after measuring, from 8 standard deviations below to 8 above, and their probabilities.
    steps = np.linspace(-8.0, 8.0, 401)
    weights = np.exp(-(steps**2) / 2.0)
    leads = lead + np.sqrt(explained) * steps
    probability = np.array([probability_above(abs(ratio)) for ratio in (leads / np.sqrt(unexplained)).tolist()])
    return float(weights @ probability / weights.sum())


def _advice(
    plans: Sequence[RankedPlan], leads: Floats, shares: Floats, groups: Sequence[OperationGroup]
) -> MeasurementAdvice:
    """Choose the most valuable group repeatedly, until no remaining group could swap any two plans."""
    spread = covariance(groups)
    unlike = shares[1:] - shares[0]
    variance = np.array([OWN_SPREAD**2 + difference @ spread @ difference for difference in unlike])
    rival = int(np.argmin(leads / np.sqrt(variance)))
    chosen: list[int] = []
    values: list[GroupValue] = []
    gain = 0.0

    def gain_of(measured: list[int]) -> float:
        return max(
            expected_gain(lead, explained_variance(difference, spread, measured))
            for lead, difference in zip(leads, unlike, strict=True)
        )

    while unmeasured := [at for at in range(len(groups)) if at not in chosen]:
        gains = {at: gain_of([*chosen, at]) - gain for at in unmeasured}
        at = max(unmeasured, key=lambda group: gains[group] / groups[group].seconds)
        if max(gains.values()) < MIN_GAIN:
            break
        chosen.append(at)
        gain += gains[at]
        explained = explained_variance(unlike[rival], spread, chosen)
        values.append(
            GroupValue(
                group=groups[at],
                share=float(shares[0, at]),
                rival_share=float(shares[1 + rival, at]),
                gain=gains[at],
                probability=expected_probability(float(leads[rival]), explained, float(variance[rival]) - explained),
            )
        )
    return MeasurementAdvice(
        best=plans[0],
        rival=plans[1 + rival],
        probability=probability_above(float(leads[rival]) / float(np.sqrt(variance[rival]))),
        groups=tuple(values),
    )
