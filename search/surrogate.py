"""Surrogate model of the steps of untested plans given measured ones: Gaussians over their logarithms.

A measured step is the prediction times four factors: one common to all plans of a cluster and framework; one per
component of the model, weighted by its share of the step, so that plans which spend their steps on the same components
have correlated errors (`search.choice`); one common to plans of the same degrees; and one of each plan alone.  The
scale of the last two differs much between sweeps: trials that contradict each other widen the surrogate, trials that
agree narrow it.  One erratic slow run that no factors explain has little influence on the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.calibration import FACTOR_SPREAD
from autoplan.cost.spreads import component_shares
from autoplan.search.choice import OWN_SPREAD
from autoplan.spec.estimate import probability_above
from autoplan.spec.search_result import RankedPlan

# Standard deviations of logarithms.
COMMON_SPREAD = 0.25  # common to all plans of a cluster and framework, for a model without calibration
# Error of a single plan; `OWN_SPREAD` is that of the ratio of two plans.
PLAN_SPREAD = OWN_SPREAD / math.sqrt(2.0)
# Spread of the logarithm of that error between sweeps, and the share of its variance common to plans of the same
# degrees: the maximum-likelihood pair for measured sweeps (`benchmarks/surrogate_fit.py`).
SCATTER = 1.0
DEGREES_SHARE = 0.5
# Spread between runs of the same plan until one is repeated, and the lower limit of what the steps of one run can show.
RUN_SPREAD = 0.01

_SCATTERS = np.arange(-3.0, 4.0)  # scales to average over, in units of `SCATTER`
_ROUNDS = 50  # iterations of reweighting; ten suffice for all known sweeps
_SETTLED = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """Measured step of the plan at index `at`, and the standard deviation of its logarithm."""

    at: int
    step_s: float
    spread: float = RUN_SPREAD


def pool_runs(runs: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """Return one measurement per plan: the geometric mean of its runs.

    The spread between runs of one plan is estimated over all plans, with `RUN_SPREAD` as a prior that weighs as much as
    one repeated run.
    """
    by_plan: dict[int, list[MeasuredPlan]] = {}
    for run in runs:
        by_plan.setdefault(run.at, []).append(run)
    around = sum(
        float(np.var(np.log([run.step_s for run in plan_runs])) * len(plan_runs)) for plan_runs in by_plan.values()
    )
    apart = (RUN_SPREAD**2 + around) / (1 + len(runs) - len(by_plan))
    measured_plans = []
    for at, plan_runs in by_plan.items():
        variance = float(np.mean([run.spread**2 for run in plan_runs])) - RUN_SPREAD**2
        step_s = float(np.exp(np.mean(np.log([run.step_s for run in plan_runs]))))
        spread = math.sqrt((max(variance, 0.0) + apart) / len(plan_runs))
        measured_plans.append(MeasuredPlan(at=at, step_s=step_s, spread=spread))
    return measured_plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Log seconds per sequence of every plan: a mixture of Gaussians over the scale of single plans' errors.

    `means` and `spreads`, standard deviations, have the shape (scales, plans); `weights` are the scales' probabilities.
    `log_evidence` is the log likelihood of the measurements, up to a constant.
    """

    means: Floats
    spreads: Floats
    weights: Floats
    log_evidence: float

    @classmethod
    def of(cls, plans: Sequence[RankedPlan], measured: Sequence[MeasuredPlan] = ()) -> Surrogate:
        """Fit the surrogate to `plans`, of which some were measured."""
        predicted = np.log([plan.s_per_sequence for plan in plans])
        parts = component_shares({name: np.array([plan.terms_s[name] for plan in plans]) for name in plans[0].terms_s})
        alike = np.minimum(parts[:, None, :], parts[None, :, :]).sum(axis=-1)
        factors = COMMON_SPREAD**2 + FACTOR_SPREAD**2 * alike
        degrees = np.array([(plan.plan.tp, plan.plan.cp, plan.plan.pp, plan.plan.ep) for plan in plans])
        same = (degrees[:, None, :] == degrees[None, :, :]).all(axis=-1)
        rows = np.array([run.at for run in measured], dtype=np.intp)
        batches = np.array([plans[run.at].plan.global_batch for run in measured])
        log_errors = np.log([run.step_s for run in measured]) - np.log(batches)
        runs = np.array([run.spread for run in measured])
        means, spreads, evidence = [], [], []
        for plan_spread in PLAN_SPREAD * np.exp(SCATTER * _SCATTERS):
            shared = factors + DEGREES_SHARE * plan_spread**2 * same
            alone = (1.0 - DEGREES_SHARE) * plan_spread**2
            fit = _robust(shared[np.ix_(rows, rows)], log_errors - predicted[rows], alone + runs**2)
            gain = shared[:, rows]
            shared_variances = np.diag(shared) - np.einsum("ij,jk,ik->i", gain, fit.inverse, gain)
            means.append(predicted + gain @ fit.weights)
            spreads.append(np.sqrt(np.maximum(shared_variances, 0.0) + alone))
            evidence.append(fit.log_evidence)
        mean, spread = np.array(means), np.array(spreads)
        # Measured plans are known, however erratic.
        mean[:, rows], spread[:, rows] = log_errors, runs
        prior = np.exp(-(_SCATTERS**2) / 2.0)
        weights = prior / prior.sum() * np.exp(np.array(evidence) - max(evidence))
        log_evidence = max(evidence) + math.log(weights.sum())
        return cls(means=mean, spreads=spread, weights=weights / weights.sum(), log_evidence=log_evidence)

    @property
    def mean(self) -> Floats:
        """Mean over all scales."""
        return np.asarray(self.weights @ self.means)

    @property
    def spread(self) -> Floats:
        """Standard deviation over all scales."""
        return np.sqrt(self.weights @ (self.spreads**2 + (self.means - self.mean) ** 2))

    def improvement(self, bar: float) -> Floats:
        """Return the expected improvement below `bar`, in logarithms."""
        z = (bar - self.means) / self.spreads
        below = self.spreads * (z * _normal_cdf(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
        return np.asarray(self.weights @ below)

    def chance_below(self, bar: float) -> Floats:
        """Return the probability that the logarithm is below `bar`."""
        return np.asarray(self.weights @ _normal_cdf((bar - self.means) / self.spreads))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Prediction from measured plans: `weights` give the mean, the `inverse` covariance gives the spread."""

    weights: Floats
    inverse: Floats
    log_evidence: float  # up to a constant


def _robust(shared: Floats, off: Floats, variance: Floats) -> _Fit:
    """Fit measured plans with errors `off`, each with its own variance.

    A step may be slow, but never fast, for reasons unrelated to its plan: beyond one standard deviation individual
    errors have a Cauchy tail on the slow side, fitted by reweighting starting from the prediction.  Single slow runs
    count as erratic until enough of them agree.  The evidence is Laplace's approximation.
    """
    expected: Floats = np.zeros_like(off)
    for _ in range(_ROUNDS):
        slower = np.maximum(off - expected, 0.0) ** 2 / variance
        tails = np.maximum(1.0, (1.0 + slower) / 2.0)
        inverse: Floats = np.asarray(np.linalg.inv(shared + np.diag(variance * tails)), dtype=np.float64)
        before, expected = expected, shared @ (inverse @ off)
        if np.abs(expected - before).max(initial=0.0) < _SETTLED:
            break
    weights, squares = inverse @ off, (off - expected) ** 2 / variance
    in_tail = (off > expected) & (squares > 1.0)
    # Log densities of both sides, which join smoothly at one standard deviation.
    misfit = np.where(in_tail, np.log1p(squares) + 0.5 - math.log(2.0), squares / 2.0) + np.log(variance) / 2.0
    width = np.linalg.slogdet(np.eye(len(off)) + shared / (variance * tails))[1]
    log_evidence = -misfit.sum() - (weights @ expected + width) / 2.0
    return _Fit(weights=weights, inverse=inverse, log_evidence=float(log_evidence))


def _normal_cdf(z: Floats) -> Floats:
    """Return the cumulative distribution function of the standard normal distribution."""
    return np.array([probability_above(float(value)) for value in np.ravel(z)]).reshape(np.shape(z))


def fit_chance(plans: Sequence[RankedPlan], finished: Sequence[int], out_of_memory: Sequence[int]) -> Floats:
    """Return the probability that each plan fits, given the plans that finished and those that ran out of memory.

    A plan predicted to need no more than a finished one fits; one that needs as much as a plan that ran out of memory
    does not, unless a plan that needs even more has finished.
    """
    needed = np.array([plan.memory_bytes for plan in plans])
    fitting_bytes = needed[list(finished)].max(initial=0.0)
    failing_bytes = min((needed[at] for at in out_of_memory if needed[at] > fitting_bytes), default=math.inf)
    chance = np.array([1.0 - plan.oom_probability for plan in plans])
    return np.where(needed <= fitting_bytes, 1.0, np.where(needed >= failing_bytes, 0.0, chance))
