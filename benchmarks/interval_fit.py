"""General spreads of the step time: fitted to the first errors of runs, and the intervals that they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
from accuracy_cases import Case, without_source
from scipy.optimize import minimize

from autoplan.base.arrays import Bools, Floats
from autoplan.cost.spreads import (
    GENERAL_PARTS,
    HARD,
    KINDS,
    NORMAL_90,
    NOVELTIES,
    SYMMETRIC,
    Familiarity,
    Sides,
    faster_squares,
)
from autoplan.spec.calibration import Calibration

Strings = npt.NDArray[np.str_]

MIN_ERROR = 1e-3  # of a logarithm: below it runs scatter
# Where spreads start, and how far their logarithms may lie from that [judged]: of what is new, and of components.
PRIOR_SPREAD, PRIOR_WIDTH = 0.1, 0.7
HARD_SPREAD, HARD_WIDTH = 0.2, 1.0
COVER = 0.90  # share of the runs of a new source that shall be inside, on average
TAIL = (1 - COVER) / 2
MANY_RUNS = 10  # of a source: more of them count no more
SAID_SHARE = 0.25  # of a run's variance, from which a part counts as resting on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """General variances of runs that are slower than predicted, and the factor on their spreads for faster ones."""

    squares: Floats
    below: float  # of all parts but the symmetric ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Cases beside calibrations that have not seen their source: arrays have one element per case."""

    sources: Strings
    error: Floats  # log(measured / predicted)
    first_error: Floats  # the same, as first predicted; nan where it was in view
    own: Sides  # variances of devices and links that stand for unlike ones
    parts: Floats  # of the general variance, to be multiplied by `GeneralSpreads.squares`: shape (cases, parts)

    @classmethod
    def of(cls, cases: Sequence[Case], made_by: Sequence[Calibration]) -> Unseen:
        """The cases, each under its calibration."""
        own, parts = [], []
        for case, calibration in zip(cases, made_by, strict=True):
            known = Familiarity.of(replace(case.problem, calibration=calibration), case.cost.batch)
            _, general = known.own_parts(case.cost.terms_s, case.cost.step_s)
            own.append([float(side[0]) for side in known.equipment(case.cost.terms_s, case.cost.step_s)])
            parts.append(general[0])
        return cls(
            sources=np.array([case.source for case in cases]),
            error=np.array([case.nearer_error for case in cases]),
            first_error=np.array([math.nan if case.first_error is None else case.first_error for case in cases]),
            own=Sides(*np.array(own).T),
            parts=np.array(parts),
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

    def spread(self, squares: Floats) -> Floats:
        """Return the spread of every case that is slower than predicted, with these general variances."""
        return np.sqrt(self.own.above + self.parts @ squares)

    def sides(self, fitted: Fitted) -> Sides:
        """Return the spreads of every case on both sides."""
        below = np.sqrt(self.own.below + self.parts @ faster_squares(fitted.squares, fitted.below))
        return Sides(below, self.spread(fitted.squares))

    @property
    def plain(self) -> Unseen:
        """The cases with nothing new but their size: dense models under Megatron-LM's layers."""
        names = {*KINDS, *NOVELTIES} - {"narrow", "power", "size"}
        is_new = np.any(self.parts[:, [name in names for name in GENERAL_PARTS]] > 0, axis=1)
        return self.take(~is_new)

    def inside(self, error: Floats, fitted: Fitted) -> Bools:
        """Return which cases would lie in their intervals with these errors."""
        below, above = self.sides(fitted)
        return (-NORMAL_90 * below <= error) & (error <= NORMAL_90 * above)

    @property
    def weights(self) -> Floats:
        """Weights of the cases, of which those of a source add up to 1, or to less where it has few runs."""
        _, at, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        return np.asarray((np.minimum(counts, MANY_RUNS) / MANY_RUNS / counts)[at])


def fitted_spreads(unseen: Unseen) -> Fitted:
    """General spreads under which first errors are likeliest, times what the cover of plain and of all runs needs.

    Errors are spread by Laplace's distribution, whose tails are long, and spreads start near `PRIOR_SPREAD` and
    `HARD_SPREAD`: a part of which no run tells stays there.  Every source of ten runs counts the same, since its runs
    share a machine and recipes and err alike; one of fewer counts less, as a single run may err for reasons of its own.
    """
    unseen = unseen.as_first_predicted
    weights, error = unseen.weights, np.maximum(np.abs(unseen.first_error), MIN_ERROR)
    counts = (1, len(HARD), len(GENERAL_PARTS) - 1 - len(HARD))
    prior = np.repeat(np.log([PRIOR_SPREAD, HARD_SPREAD, PRIOR_SPREAD]), counts)
    width = np.repeat([math.inf, HARD_WIDTH, PRIOR_WIDTH], counts)  # what every step has needs no prior

    def surprise(logs: Floats) -> tuple[float, Floats]:
        squares = np.exp(2 * logs)
        spread = unseen.spread(squares)
        scale = spread * NORMAL_90 / math.log(10)  # a tenth of a Laplace distribution lies beyond log(10) scales
        off = (logs - prior) / width
        value = (weights * (np.log(scale) + error / scale)).sum() + (off**2).sum() / 2
        slope = weights * (1 - error / scale) / (2 * spread**2)
        return float(value), slope @ unseen.parts * 2 * squares + off / width

    found = minimize(surprise, prior, jac=True, method="L-BFGS-B", bounds=[(math.log(1e-3), 1.0)] * len(prior))
    squares = np.exp(2 * np.asarray(found.x, dtype=np.float64))
    plain = unseen.plain
    if len(plain.sources):
        squares *= _factor(np.abs(plain.first_error), plain.own.above, plain.parts @ squares, plain.weights, 2 * TAIL)
    symmetric, others = np.where(SYMMETRIC, squares, 0.0), np.where(SYMMETRIC, 0.0, squares)
    above, below = (
        _factor(sign * unseen.first_error, own + unseen.parts @ symmetric, unseen.parts @ others, unseen.weights, TAIL)
        for sign, own in ((1.0, unseen.own.above), (-1.0, unseen.own.below))
    )
    return Fitted(squares=symmetric + others * above, below=math.sqrt(below / above))


def _factor(error: Floats, fixed: Floats, variance: Floats, weights: Floats, share: float) -> float:
    """Return the least factor on `variance`, beside a `fixed` one, with which at most this share of errors is beyond.

    That is above the upper end of the interval; shares are means of sources.  Runs of a source err alike, so that the
    next source counts as one more, half of it beyond: intervals are the wider the fewer sources are known (conformal
    prediction of groups, Dunn, Wasserman and Ramdas, arXiv:1809.07441, smoothed as by Vovk et al.).
    """
    allowed = max(share * (weights.sum() + 1) - 0.5, 0.0)

    def excess(log_factor: float) -> float:
        is_beyond = error > NORMAL_90 * np.sqrt(fixed + variance * math.exp(log_factor))
        return float(weights @ is_beyond) - allowed

    low, high = -6.0, 6.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the general spreads, and the unseen runs of whose variance it is `SAID_SHARE` or more."""

    name: str
    spread: float
    num_runs: int
    num_sources: int
    factor: float  # within which nine tenths of them are
    inside: float  # share of them inside their interval

    @property
    def evidence(self) -> str:
        """Evidence that it rests on."""
        if not self.num_runs:
            return "no run: where the fit starts, times what the cover of all asks for"
        return (
            f"{self.num_runs} runs of {self.num_sources} new sources, of whose variance it is a quarter or more: "
            f"nine tenths within a factor of {self.factor:.2f}, {100 * self.inside:.0f} % inside the interval"
        )


def general_parts(fitted: Fitted, unseen: Unseen) -> Iterator[Part]:
    """Yield the general spreads with what each rests on."""
    unseen = unseen.as_first_predicted
    spread, error = unseen.spread(fitted.squares), unseen.first_error
    inside = unseen.inside(error, fitted)
    for at, name in enumerate(GENERAL_PARTS):
        which = unseen.parts[:, at] * fitted.squares[at] >= SAID_SHARE * spread**2
        yield Part(
            name=name,
            spread=float(np.sqrt(fitted.squares[at])),
            num_runs=int(which.sum()),
            num_sources=len(set(unseen.sources[which])),
            factor=math.exp(float(np.quantile(np.abs(error[which]), 0.9))) if which.any() else math.nan,
            inside=float(np.mean(inside[which])) if which.any() else math.nan,
        )


def general_text(fitted: Fitted, unseen: Unseen) -> str:
    """The general spreads as the file that ships."""
    parts = list(general_parts(fitted, unseen))
    first = unseen.as_first_predicted
    order = np.argsort(first.first_error)
    shares = np.cumsum(first.weights[order]) / first.weights.sum()
    low, high = np.exp(first.first_error[order][np.searchsorted(shares, [TAIL, 1 - TAIL])])
    evidence = {part.name: part.evidence for part in parts} | {
        "below": f"of new sources' runs, each source as much, a twentieth take less than {low:.2f} times the predicted "
        f"step, and a twentieth more than {high:.2f} times"
    }
    lines = [f"{part.name} = {part.spread:.3g}" for part in parts] + [f"below = {fitted.below:.3g}"]
    return "\n".join([*lines, "", "[evidence]", *(f'{name} = "{text}"' for name, text in evidence.items())]) + "\n"


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
    """Steps of all cases, with spreads from calibrations and general spreads that have not seen their source.

    What is new about runs of other sources is judged beside all of them but their own.
    """
    unseen = Unseen.of(cases, without_source(cases))
    sides = Sides(np.empty(len(cases)), np.empty(len(cases)))
    for source in np.unique(unseen.sources):
        own = unseen.sources == source
        for spread, left_out in zip(sides, unseen.take(own).sides(fitted_spreads(unseen.take(~own))), strict=True):
            spread[own] = left_out
    return steps_of(cases, sides)
