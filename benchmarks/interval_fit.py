"""General spreads of the step time: fitted to the first errors of runs, and the intervals that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from accuracy_cases import Case
from scipy.optimize import minimize

from autoplan.base.arrays import Bools, Floats
from autoplan.cost.spreads import BOTH_SIDES, FACTORS, NORMAL_90, Familiarity, GeneralSpreads, Sides, kinds_of

Strings = npt.NDArray[np.str_]

COVER = 0.90  # share of the runs of a new source that shall be inside, on average
TAIL = (1 - COVER) / 2
MANY_RUNS = 10  # of a source: more of them count no more
SMOOTH = 0.005  # of a logarithm: over it the slope of the score changes at the end of an interval, for the minimiser
LEAST_SHARE = 1e-3  # beyond an end, however few sources are known
# Runs of the next round are harder than those fitted to: in order of time over rounds 2 to 12, spreads as fitted hold
# 88 % of them (mean of sources), and 1.1 times as wide 90 %, at the same interval score.
MARGIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Cases by what their intervals follow from: arrays have one element per case."""

    sources: Strings
    error: Floats  # log(measured / predicted)
    first_error: Floats  # the same, as first predicted; nan where it was in view
    own: Sides  # variances of devices and links that stand for unlike ones
    kinds: Floats  # exponents of `FACTORS`: shape (cases, factors)

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Unseen:
        """The cases."""
        own = []
        for case in cases:
            known = Familiarity.of(case.problem, case.cost.batch)
            own.append([float(side[0]) for side in known.equipment(case.cost.terms_s, case.cost.step_s)])
        return cls(
            sources=np.array([case.source for case in cases]),
            error=np.array([case.nearer_error for case in cases]),
            first_error=np.array([math.nan if case.first_error is None else case.first_error for case in cases]),
            own=Sides(*np.array(own).T),
            kinds=np.array([kinds_of(case.problem) for case in cases]),
        )

    def take(self, which: Bools) -> Unseen:
        """Return some of the cases."""
        own = Sides(*(side[which] for side in self.own))
        others = {field.name: getattr(self, field.name)[which] for field in fields(self) if field.name != "own"}
        return Unseen(own=own, **others)

    @property
    def as_first_predicted(self) -> Unseen:
        """The cases whose error was kept before anybody looked at their source."""
        return self.take(~np.isnan(self.first_error))

    def sides(self, fitted: GeneralSpreads) -> Sides:
        """Return the spreads of every case on both sides."""
        below, above = (np.sqrt(own + side**2) for own, side in zip(self.own, fitted.sides(self.kinds), strict=True))
        return Sides(below, above)

    def inside(self, error: Floats, fitted: GeneralSpreads) -> Bools:
        """Return which cases would lie in their intervals with these errors."""
        below, above = self.sides(fitted)
        return (-NORMAL_90 * below <= error) & (error <= NORMAL_90 * above)

    @property
    def weights(self) -> Floats:
        """Weights of the cases, of which those of a source add up to 1, or to less where it has few runs."""
        _, at, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        return np.asarray((np.minimum(counts, MANY_RUNS) / MANY_RUNS / counts)[at])


def interval_score(error: Floats, below: Floats, above: Floats) -> Floats:
    """Return the interval score at `COVER` (Gneiting and Raftery 2007, eq. 43) of errors in [-below, above].

    It is the width, and 20 times the distance by which an error lies outside: least for the true quantiles.
    """
    return below + above + (np.maximum(-below - error, 0.0) + np.maximum(error - above, 0.0)) / TAIL


def fitted_spreads(unseen: Unseen) -> GeneralSpreads:
    """General spreads with the least interval score on first errors, widened by `MARGIN`.

    Every source of ten runs counts the same, since its runs share a machine and recipes and err alike; one of fewer
    counts less, as a single run may err for reasons of its own.  For the same reason the next source counts as one
    more, half of it outside: intervals are the wider the fewer sources are known (conformal prediction of groups, Dunn,
    Wasserman and Ramdas, arXiv:1809.07441, smoothed as by Vovk et al.).
    """
    unseen = unseen.as_first_predicted
    weights, total = unseen.weights, float(unseen.weights.sum())
    share = max(TAIL * (total + 1) / total - 0.25 / total, LEAST_SHARE)  # beyond either end, a quarter of the next one
    exponents = np.column_stack([np.ones(len(weights)), unseen.kinds])
    sides = [
        (-unseen.first_error, unseen.own.below, exponents * [True, *BOTH_SIDES]),
        (unseen.first_error, unseen.own.above, exponents),
    ]

    def score(logs: Floats) -> tuple[float, Floats]:
        value, slope = 0.0, np.zeros(len(logs))
        for error, own, powers in sides:
            general = np.exp(2 * powers @ logs)
            reach = NORMAL_90 * np.sqrt(own + general)
            beyond = (error - reach) / SMOOTH
            value += float(weights @ (share * reach + SMOOTH * np.logaddexp(0.0, beyond)))
            by_reach = weights * (share - 1 / (1 + np.exp(-np.clip(beyond, -500, 500))))
            slope += (by_reach * NORMAL_90**2 * general / reach) @ powers
        return value, slope

    start = np.log([0.1, *np.ones(len(FACTORS))])
    bounds = [(math.log(1e-2), math.log(2.0))] + [(0.0, math.log(10.0))] * len(FACTORS)  # no factor is below 1
    found = minimize(score, start, jac=True, method="L-BFGS-B", bounds=bounds)
    plain, *factors = np.exp(found.x).tolist()
    return GeneralSpreads(plain=MARGIN * plain, **dict(zip(FACTORS, factors, strict=True)), evidence={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A general spread, and first errors of the runs that have it: publications equally weighted."""

    name: str
    value: float
    num_runs: int
    num_sources: int
    ends: tuple[float, float]  # measured over predicted, of which a twentieth is below, and above
    inside: float  # share of them inside their interval

    @property
    def evidence(self) -> str:
        """Evidence that it rests on."""
        low, high = self.ends
        return (
            f"{self.num_runs} runs of {self.num_sources} new sources: a twentieth take less than {low:.2f} times the "
            f"predicted step, a twentieth more than {high:.2f} times, {100 * self.inside:.0f} % are inside the interval"
        )


def general_parts(fitted: GeneralSpreads, unseen: Unseen) -> Iterator[Part]:
    """Yield the general spreads with what each rests on."""
    unseen = unseen.as_first_predicted
    inside = unseen.inside(unseen.first_error, fitted)
    for name, which in zip(("plain", *FACTORS), (~unseen.kinds.any(axis=1), *(unseen.kinds.T > 0)), strict=True):
        own = unseen.take(which)
        order = np.argsort(own.first_error)
        shares = np.cumsum(own.weights[order]) / own.weights.sum()
        low, high = np.exp(own.first_error[order][np.searchsorted(shares, [TAIL, 1 - TAIL])]).tolist()
        yield Part(
            name=name,
            value=getattr(fitted, name),
            num_runs=int(which.sum()),
            num_sources=len(set(own.sources)),
            ends=(low, high),
            inside=float(np.average(inside[which], weights=own.weights)),
        )


def general_text(fitted: GeneralSpreads, unseen: Unseen) -> str:
    """The general spreads as the file that ships."""
    parts = list(general_parts(fitted, unseen))
    lines = [f"{part.name} = {part.value:.3g}" for part in parts]
    return "\n".join([*lines, "", "[evidence]", *(f'{part.name} = "{part.evidence}"' for part in parts)]) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Predicted step, and spreads of its logarithm on both sides."""

    step_s: float
    spread: Sides
    log_doubt: float


Steps = dict[str, Step]  # by the id of a run


def steps_of(cases: Sequence[Case], sides: Sides) -> Steps:
    """Predicted steps of cases with these spreads."""
    return {
        case.run.id: Step(
            step_s=float(case.cost.step_s[0]), spread=Sides(sides.below[at], sides.above[at]), log_doubt=case.doubt
        )
        for at, case in enumerate(cases)
    }


def source_left_out(cases: Sequence[Case]) -> Steps:
    """Steps of all cases, with general spreads that have not seen their source."""
    unseen = Unseen.of(cases)
    sides = Sides(np.empty(len(cases)), np.empty(len(cases)))
    for source in np.unique(unseen.sources):
        own = unseen.sources == source
        for spread, left_out in zip(sides, unseen.take(own).sides(fitted_spreads(unseen.take(~own))), strict=True):
            spread[own] = left_out
    return steps_of(cases, sides)
