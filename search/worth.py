"""Which measurements could change the answer, and by how much would they settle it?

The value of a measurement is what it is expected to save: the share of a step by which the plan that one would choose
knowing its result beats the plan that one would choose now (Howard, Information Value Theory, IEEE Trans. SSC 2, 1966).
Plans that spend the same share of their steps on an operation keep their order whatever it takes, and what was measured
is known: neither is worth anything.

What a group of operations takes is found by pricing the plans as if it had been measured, so that only what the price
would read counts.
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
from autoplan.search.choice import OWN_SPREAD, first_of_kinds, pace
from autoplan.search.ranking import seconds_per_sequence
from autoplan.search.sensitivity import ATTENTIONS, COLLECTIVES, PRODUCTS, STREAMS
from autoplan.spec.estimate import probability_above
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.timing import Measurement, Operation, Provenance
from autoplan.topology.cluster import LinkLevel

Family = Literal["layers", "matrix products", "attention", "memory-bound kernels", "collectives"]
_KERNELS: dict[Family, tuple[Operation, ...]] = {
    "matrix products": PRODUCTS,
    "attention": ATTENTIONS,
    "memory-bound kernels": STREAMS,
    "collectives": (*COLLECTIVES, "broadcast"),
}


def family_of(operation: Operation) -> Family:
    """Whose errors are alike; layers and all else that is measured whole are one."""
    return next((name for name, operations in _KERNELS.items() if operation in operations), "layers")


# Standard deviations of logarithms.  Interpolated times are off by 3 to 4 % in the median (benchmarks/results,
# interpolation); a curve by its `fit_error`, a mean |error|, and where it has none by .1; what only a datasheet tells
# by .25, as shipped predictions without a calibration are [judged].
INTERPOLATED_SPREAD = 0.05
CURVE_SPREAD = 0.10
DATASHEET_SPREAD = 0.25
_OF_MEAN_ERROR = 1.2533141373155003  # standard deviation over the mean |error| of a normal distribution
# Of the variance of an operation's error what its other sizes share: the level of the device, not the shape [judged].
COMMON_SHARE = 0.5

MOST_RIVALS = 8
_NUDGE = 0.02
LEAST_GAIN = 1e-4  # share of a step: what is expected to save less could as well not be known
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Operations of one family that are measured together, and what that takes.

    `times_s` are rough: only what they are to each other counts.
    """

    family: Family
    setting: str  # whose sizes these are, in words
    times_s: tuple[Measurement, ...]
    seconds: float  # to measure
    spread: float  # of the logarithm of the times that the price takes now
    rests_on: Provenance  # the worst of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """A group that is worth measuring, after all that come before it."""

    group: Group
    share: float  # of the step of the best plan
    rival_share: float  # of that of the plan that may win
    gain: float  # expected saving, as a share of a step
    sure: float  # expected probability, once it is measured, that the plan chosen is the faster one


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """What is not settled between the best plan and its rival, the one that may win most, and what would settle it."""

    best: RankedPlan
    rival: RankedPlan | None  # None: no other plan may win
    sure: float  # probability that the best is the faster of the two
    worth: tuple[Worth, ...]  # in the order in which they pay

    @property
    def expected_sure(self) -> float:
        """That probability once all is measured."""
        return self.worth[-1].sure if self.worth else self.sure


def spread_of_price(
    problem: Problem, operation: Operation, dtype: str, shape: tuple[int, ...]
) -> tuple[float, Provenance]:
    """(standard deviation of the logarithm, provenance) of the time that the price of plans takes for an operation."""
    found = problem.timings.lookup(operation, dtype, np.array([shape]))
    if found.is_exact[0]:
        return 0.0, "measured"
    if np.isfinite(found.seconds[0]):
        return INTERPOLATED_SPREAD, "interpolated"
    device = problem.cluster.device
    if operation in ATTENTIONS:
        return _of_curve(device.attention.is_measured, device.attention.fit_error)
    if family_of(operation) == "collectives":
        per_domain = shape[1]
        level: LinkLevel | None = next((one for one in problem.cluster.levels if one.num_devices >= per_domain), None)
        curve = level.collectives if level is not None and shape[0] == per_domain else None
        return _of_curve(curve is not None, curve.fit_error if curve else CURVE_SPREAD)
    # What streams through memory goes with the products: both were measured on a device, or neither was.
    error = device.gemm.fit_error if operation in PRODUCTS else CURVE_SPREAD / _OF_MEAN_ERROR
    return _of_curve(device.gemm.is_measured, error)


def _of_curve(is_measured: bool, fit_error: float) -> tuple[float, Provenance]:
    return (_OF_MEAN_ERROR * fit_error, "reference") if is_measured else (DATASHEET_SPREAD, "datasheet")


def settling(
    problem: Problem,
    plans: Sequence[RankedPlan],
    groups: Sequence[Group],
    timed: Callable[[Sequence[Measurement]], Problem],
) -> Settling:
    """What measuring `groups` would settle between `plans`, best first, of which one a kind is looked at.

    `timed` gives the problem with more measured times in its table.
    """
    best, *others = first_of_kinds(plans)
    if not others:
        return Settling(best=best, rival=None, sure=1.0, worth=())
    rivals = sorted(others, key=pace)[:MOST_RIVALS]
    shares = shares_of(problem, [best, *rivals], groups, timed)
    leads = np.log([pace(one) / pace(best) for one in rivals])
    return _settled((best, *rivals), leads, shares, groups)


def shares_of(
    problem: Problem,
    plans: Sequence[RankedPlan],
    groups: Sequence[Group],
    timed: Callable[[Sequence[Measurement]], Problem],
) -> Floats:
    """What part of every plan's step each group takes: shape (plans, groups).

    First every group gets the level at which the price stays what it is now; then, with all of them in the table, a
    step grows with the times of a group as far as these show.  What the price does not read, such as the kernels of a
    layer that was measured whole, has no share.
    """
    batch = PlanBatch.of([one.plan for one in plans], problem.model.num_layers)

    def price(times: Sequence[Measurement]) -> Floats:
        return seconds_per_sequence(estimate(timed(times), batch))

    now = seconds_per_sequence(estimate(problem, batch))
    scaled = [_scaled(group, _level(partial(_priced, price, group), now)) for group in groups]
    found = np.zeros((len(plans), len(groups)))
    if scaled:
        whole = price(list(chain(*scaled)))
        for at, group in enumerate(scaled):
            slower = [replace(one, seconds=(1.0 + _NUDGE) * one.seconds) for one in group]
            found[:, at] = price([*chain(*scaled[:at]), *slower, *chain(*scaled[at + 1 :])]) / whole - 1.0
    return np.clip(found / _NUDGE, 0.0, 1.0)


def _level(price: Callable[[float], Floats], now: Floats) -> float:
    """By what to multiply times so that prices stay what they are `now`: the median of the plans that they show in."""
    level = 1.0
    for growth in (2.0, 1.0 + _NUDGE):  # of times as rough as they come, then near those that the price takes now
        once, more = price(level), price(growth * level)
        slope = (more - once) / ((growth - 1.0) * level)
        if not (shows := slope > 1e-9 * now).any():
            break
        level = max(level + float(np.median((now - once)[shows] / slope[shows])), 1e-3 * level)
    return level


def _priced(price: Callable[[Sequence[Measurement]], Floats], group: Group, factor: float) -> Floats:
    return price(_scaled(group, factor))


def _scaled(group: Group, growth: float) -> list[Measurement]:
    return [replace(one, seconds=growth * one.seconds) for one in group.times_s]


# -- values -----------------------------------------------------------------------------------------------------------


def covariance(groups: Sequence[Group]) -> Floats:
    """Of the logarithms of what the groups take: those of one family have the level of the device in common."""
    spreads = np.array([group.spread for group in groups])
    alike = np.array([[one.family == other.family for other in groups] for one in groups], dtype=np.float64)
    return np.asarray(np.outer(spreads, spreads) * (COMMON_SHARE * alike + (1 - COMMON_SHARE) * np.eye(len(groups))))


def learnt(unlike: Floats, spread: Floats, measured: Sequence[int]) -> float:
    """What part of the variance of a ratio of two plans measuring some groups takes away.

    `unlike` are differences of shares of the two plans, `spread` is the `covariance` of the groups.
    """
    if not measured:
        return 0.0
    seen = np.ix_(measured, measured)
    known = spread[measured] @ unlike
    return float(known @ np.linalg.pinv(spread[seen], hermitian=True) @ known)


def expected_gain(lead: float, variance: float) -> float:
    """What choosing anew saves on average when the lead of the best, a logarithm, is known better by `variance`."""
    if variance <= 0:
        return 0.0
    scale = float(np.sqrt(variance))
    return scale * _STANDARD.pdf(lead / scale) - lead * probability_above(-lead / scale)


def expected_sure(lead: float, learns: float, stays: float) -> float:
    """How probable it will be that the plan then chosen is the faster one; `learns` and `stays` are variances."""
    if learns <= 0:
        return probability_above(lead / np.sqrt(stays))
    # What it will look like, from 8 standard deviations below to 8 above, and how sure one will be then.
    steps = np.linspace(-8.0, 8.0, 401)
    weights = np.exp(-(steps**2) / 2.0)
    leads = lead + np.sqrt(learns) * steps
    sure = np.array([probability_above(abs(one)) for one in (leads / np.sqrt(stays)).tolist()])
    return float(weights @ sure / weights.sum())


def _settled(plans: Sequence[RankedPlan], leads: Floats, shares: Floats, groups: Sequence[Group]) -> Settling:
    """The groups in the order in which they pay, until none of the rest could swap any two plans."""
    spread = covariance(groups)
    unlike = shares[1:] - shares[0]
    whole = np.array([OWN_SPREAD**2 + one @ spread @ one for one in unlike])
    rival = int(np.argmin(leads / np.sqrt(whole)))
    chosen: list[int] = []
    worth: list[Worth] = []
    gain = 0.0

    def gain_of(measured: list[int]) -> float:
        return max(expected_gain(lead, learnt(one, spread, measured)) for lead, one in zip(leads, unlike, strict=True))

    while rest := [at for at in range(len(groups)) if at not in chosen]:
        gains = {at: gain_of([*chosen, at]) - gain for at in rest}
        at = max(rest, key=lambda one: gains[one] / groups[one].seconds)
        if max(gains.values()) < LEAST_GAIN:
            break
        chosen.append(at)
        gain += gains[at]
        learns = learnt(unlike[rival], spread, chosen)
        worth.append(
            Worth(
                group=groups[at],
                share=float(shares[0, at]),
                rival_share=float(shares[1 + rival, at]),
                gain=gains[at],
                sure=expected_sure(float(leads[rival]), learns, float(whole[rival]) - learns),
            )
        )
    return Settling(
        best=plans[0],
        rival=plans[1 + rival],
        sure=probability_above(float(leads[rival]) / float(np.sqrt(whole[rival]))),
        worth=tuple(worth),
    )
