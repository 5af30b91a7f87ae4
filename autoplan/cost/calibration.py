"""Which factors bring the model closest to measured steps, and how far is it off then?

A calibration has few factors with a physical meaning each (`modelling` G3); a fit holds them near those it starts from
unless the runs say otherwise, and never has more of them than the runs can tell apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.estimate import NORMAL_90, estimate
from autoplan.plan import ParallelPlan, PlanBatch
from autoplan.problem import Problem
from autoplan.timing import FACTORS, Calibration

Floats = NDArray[np.float64]

RUNS_PER_FACTOR = 15
# Standard deviations of logarithms: of a measured step around the model with the right factors, beyond which a run
# counts as an outlier; and of a factor around the one that the fit starts from.
RESIDUAL_SPREAD = 0.05
FACTOR_SPREAD = 0.35
MOST_FACTOR = 3.3  # e^1.2: beyond it a factor stands for something else than its name (findings, 1)
SOLVED = 1e-3  # change of a factor's logarithm below which a fit is done
MOST_TRIALS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run that finished: what was asked, what was run, and the time of a step."""

    problem: Problem
    plan: ParallelPlan
    step_s: float


class Pricer:
    """Prices the same runs again and again under other calibrations: those of one problem together."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        clusters: dict[int, str] = {}
        for at, run in enumerate(runs):
            problem = run.problem
            cluster = clusters.setdefault(id(problem.cluster), repr(problem.cluster))
            groups[(problem.model, problem.training, problem.framework, cluster)].append(at)
        self._size = len(runs)
        self._groups = []
        for indices in groups.values():
            problem = runs[indices[0]].problem
            batch = PlanBatch.of([runs[at].plan for at in indices], problem.model.num_layers)
            self._groups.append((np.array(indices), problem, batch))

    def steps_s(self, change: Callable[[Problem], Problem]) -> Floats:
        """Step times of the runs, each in its problem as changed."""
        result = np.empty(self._size)
        for indices, problem, batch in self._groups:
            result[indices] = estimate(change(problem), batch).step_s
        return result

    def calibrated_s(self, calibration: Calibration) -> Floats:
        """Step times of the runs under one calibration."""
        return self.steps_s(lambda problem: replace(problem, calibration=calibration))


def factors_for(num_runs: int) -> tuple[str, ...]:
    """The factors that so many runs may fit: one, and another one for every `RUNS_PER_FACTOR`."""
    return FACTORS[: max(1, min(num_runs // RUNS_PER_FACTOR, len(FACTORS)))]


def fit(
    runs: Sequence[MeasuredRun],
    base: Calibration,
    factors: Sequence[str] | None = None,
    *,
    near: Calibration | None = None,
) -> Calibration:
    """`base` with the factors under which `runs` are likeliest; its spreads are left as they are.

    Robust least squares on the logarithms of the steps, with a ridge towards the factors of `base`; by default as many
    factors as the number of runs allows.  `near` is a guess to begin with, which changes the time of the fit only.
    """
    from scipy.optimize import least_squares

    names = factors_for(len(runs)) if factors is None else tuple(factors)
    pricer = Pricer(runs)
    measured = np.log([run.step_s for run in runs])
    prior = np.log([getattr(base, name) for name in names])
    guess = np.log([getattr(near or base, name) for name in names])

    def residuals(logs: Floats) -> Floats:
        calibration = with_factors(base, names, logs)
        errors = (np.log(pricer.calibrated_s(calibration)) - measured) / RESIDUAL_SPREAD
        # Soft: an erratic run, many spreads away, pulls less than one that is near.
        return np.concatenate([_softened(errors), (logs - prior) / FACTOR_SPREAD])

    most = np.log(MOST_FACTOR)
    found = least_squares(
        residuals,
        np.clip(guess, -0.99 * most, 0.99 * most),
        bounds=(np.full(len(names), -most), np.full(len(names), most)),
        diff_step=np.full(len(names), 0.01),
        x_scale=np.full(len(names), 0.1),
        xtol=SOLVED,
        ftol=1e-4,
        max_nfev=MOST_TRIALS,
    )
    return with_factors(base, names, found.x)


def _softened(errors: Floats) -> Floats:
    """Residuals whose squares are ln(1 + e^2), the likelihood of a Cauchy distribution."""
    return np.sign(errors) * np.sqrt(np.log1p(errors**2))


def with_factors(base: Calibration, names: Sequence[str], logs: Floats) -> Calibration:
    """`base` with the factors of these names, given by their logarithms."""
    factors = {name: float(np.exp(value)) for name, value in zip(names, logs, strict=True)}
    return replace(base, **factors)  # type: ignore[arg-type]


def conformal_spread(errors: Floats) -> float:
    """Standard deviation that makes the 90 % interval hold nine tenths of runs like these: split-conformal.

    `errors` are log(measured / predicted) of runs that the fit has not seen; the quantile is that of one run more
    (Vovk et al., Algorithmic Learning in a Random World).
    """
    rank = min(np.ceil(0.9 * (len(errors) + 1)) / len(errors), 1.0)
    return float(np.quantile(np.abs(errors), rank, method="higher")) / NORMAL_90


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A calibration and the median errors of its runs: before, and after with each run left out."""

    calibration: Calibration
    median_error_before: float
    median_error: float


# The spread that a calibration starts with counts as much as that of so many runs.
PRIOR_RUNS = 10


def calibrated(runs: Sequence[MeasuredRun], *, name: str) -> Fitted:
    """The calibration of `runs` of one framework on one kind of device, from the one that their problems have.

    Its interval comes from the errors of each run under a fit without it, and, where runs are few, from the interval
    that it starts with.
    """
    base = runs[0].problem.calibration
    before = _log_errors(runs, base)
    whole = fit(runs, base)
    left_out = np.array(
        [_log_errors([run], fit([*runs[:at], *runs[at + 1 :]], base, near=whole))[0] for at, run in enumerate(runs)]
    )
    weight = len(runs) / (len(runs) + PRIOR_RUNS)
    spread = np.sqrt(weight * conformal_spread(left_out) ** 2 + (1 - weight) * base.time_spread**2)
    sources = (*base.sources, f"{len(runs)} runs of one's own")
    return Fitted(
        calibration=replace(whole, name=name, time_spread=float(spread), sources=sources),
        median_error_before=float(np.median(np.abs(np.expm1(before)))),
        median_error=float(np.median(np.abs(np.expm1(left_out)))),
    )


def _log_errors(runs: Sequence[MeasuredRun], calibration: Calibration) -> Floats:
    """log(predicted / measured) of every run."""
    return np.log(Pricer(runs).calibrated_s(calibration) / [run.step_s for run in runs])
