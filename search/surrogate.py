"""Surrogate model of the steps of plans that were not run, given those that were: Gaussians over their logarithms.

A measured step is the predicted one times four things: a factor that all plans of a cluster and framework share, a
factor for each component of the model, weighted by the share of the step that it takes, so that plans which spend their
steps on the same things are wrong alike (`search.choice`), one that plans of the same degrees share, and what is off
for each plan alone.  How far the last two go differs much between sweeps: trials that contradict each other widen the
surrogate, trials that agree narrow it.  One erratic run, slow whatever the factors, teaches little about the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.calibration import FACTOR_SPREAD
from autoplan.cost.spreads import component_shares
from autoplan.search.choice import OWN_SPREAD, pace
from autoplan.spec.estimate import probability_above
from autoplan.spec.search_result import RankedPlan

# Standard deviations of logarithms.
COMMON_SPREAD = 0.25  # of all plans of a cluster and framework: of a model without calibration
# What one plan is off by itself: `OWN_SPREAD` is that of a ratio, of two plans.
PLAN_SPREAD = OWN_SPREAD / math.sqrt(2.0)
# Of the logarithm of that from one sweep to another, and how much of it, as variance, plans of the same degrees share:
# the likeliest pair for measured sweeps (`benchmarks/surrogate_fit.py`).
SCATTER = 1.0
DEGREES_SHARE = 0.5
# Of the same plan run again, as long as none was; steps of one run say what they can of it, and no less than this.
RUN_SPREAD = 0.01

_SCATTERS = np.arange(-3.0, 4.0)  # over which to average, in `SCATTER`
_ROUNDS = 50  # of reweighting; ten are enough for any sweep seen
_SETTLED = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """The step of the plan at index `at`, and the standard deviation of its logarithm."""

    at: int
    step_s: float
    spread: float = RUN_SPREAD


def pool_runs(runs: Sequence[MeasuredPlan]) -> list[MeasuredPlan]:
    """Return a measurement for each plan: the geometric mean of its runs.

    How far runs of one plan lie apart, whichever plan it is, counts for all: with `RUN_SPREAD` as the first thing known
    of it, weighing as much as one repeated run.
    """
    by_plan: dict[int, list[MeasuredPlan]] = {}
    for run in runs:
        by_plan.setdefault(run.at, []).append(run)
    around = sum(float(np.var(np.log([run.step_s for run in own])) * len(own)) for own in by_plan.values())
    apart = (RUN_SPREAD**2 + around) / (1 + len(runs) - len(by_plan))
    measured_plans = []
    for at, own in by_plan.items():
        variance = float(np.mean([run.spread**2 for run in own])) - RUN_SPREAD**2
        step_s = float(np.exp(np.mean(np.log([run.step_s for run in own]))))
        spread = math.sqrt((max(variance, 0.0) + apart) / len(own))
        measured_plans.append(MeasuredPlan(at=at, step_s=step_s, spread=spread))
    return measured_plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Logarithms of seconds per sequence of every plan: a Gaussian for each scale of what plans are off by themselves.

    `means` and `spreads`, standard deviations, have the shape (scales, plans); `weights` are the scales' probabilities.
    `log_evidence` is the logarithm of how likely what was measured is, except for a constant.
    """

    means: Floats
    spreads: Floats
    weights: Floats
    log_evidence: float

    @classmethod
    def of(cls, plans: Sequence[RankedPlan], measured: Sequence[MeasuredPlan] = ()) -> Surrogate:
        """Fit the surrogate to `plans` once some of them were measured."""
        predicted = np.log([pace(plan) for plan in plans])
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
        for own in PLAN_SPREAD * np.exp(SCATTER * _SCATTERS):
            shared = factors + DEGREES_SHARE * own**2 * same
            alone = (1.0 - DEGREES_SHARE) * own**2
            fit = _robust(shared[np.ix_(rows, rows)], log_errors - predicted[rows], alone + runs**2)
            gain = shared[:, rows]
            shared_variances = np.diag(shared) - np.einsum("ij,jk,ik->i", gain, fit.inverse, gain)
            means.append(predicted + gain @ fit.weights)
            spreads.append(np.sqrt(np.maximum(shared_variances, 0.0) + alone))
            evidence.append(fit.log_evidence)
        mean, spread = np.array(means), np.array(spreads)
        # What was measured is known, however erratic.
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
        """Return how far the logarithm is expected to fall below `bar`, counting nothing where it does not."""
        z = (bar - self.means) / self.spreads
        below = self.spreads * (z * _normal_cdf(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
        return np.asarray(self.weights @ below)

    def chance_below(self, bar: float) -> Floats:
        """Return the probability that the logarithm is below `bar`."""
        return np.asarray(self.weights @ _normal_cdf((bar - self.means) / self.spreads))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Prediction from measured plans: by `weights` for the mean, by the `inverse` covariance for the spread."""

    weights: Floats
    inverse: Floats
    log_evidence: float  # except for a constant


def _robust(shared: Floats, off: Floats, variance: Floats) -> _Fit:
    """Fit measured plans that are `off` by so much, each with a variance of its own.

    A step may be slow for reasons that have nothing to do with its plan, but never fast: beyond a standard deviation
    own errors have the tail of Cauchy's distribution on the slow side, by reweighting from the prediction on.  Runs
    that are slow one by one are erratic, until enough of them agree.  The evidence is Laplace's approximation.
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
    # Of the two densities, which meet with one slope at one standard deviation.
    misfit = np.where(in_tail, np.log1p(squares) + 0.5 - math.log(2.0), squares / 2.0) + np.log(variance) / 2.0
    width = np.linalg.slogdet(np.eye(len(off)) + shared / (variance * tails))[1]
    log_evidence = -misfit.sum() - (weights @ expected + width) / 2.0
    return _Fit(weights=weights, inverse=inverse, log_evidence=float(log_evidence))


def _normal_cdf(z: Floats) -> Floats:
    """Return the distribution function of the standard normal distribution."""
    return np.array([probability_above(float(value)) for value in np.ravel(z)]).reshape(np.shape(z))


def fit_chance(plans: Sequence[RankedPlan], finished: Sequence[int], out_of_memory: Sequence[int]) -> Floats:
    """Return the probability that each plan fits, given which plans did and which ran out of memory.

    What is predicted to need no more than a plan that finished fits; what needs as much as one that ran out does not,
    unless a plan that needs even more has finished.
    """
    needed = np.array([plan.memory_bytes for plan in plans])
    fitting_bytes = needed[list(finished)].max(initial=0.0)
    failing_bytes = min((needed[at] for at in out_of_memory if needed[at] > fitting_bytes), default=math.inf)
    chance = np.array([1.0 - plan.oom_probability for plan in plans])
    return np.where(needed <= fitting_bytes, 1.0, np.where(needed >= failing_bytes, 0.0, chance))
