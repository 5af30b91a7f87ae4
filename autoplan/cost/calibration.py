"""Fit of the calibration's factors to measured steps, and the errors that remain.

A calibration has a few factors, each with a physical meaning (`modelling` G3).  A fit keeps them near their initial
values unless the runs say otherwise, and never uses more factors than the runs can distinguish.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.estimate import estimate
from autoplan.cost.spreads import NORMAL_90, exposed_shares, special_parts, spread_kinds, spread_range, width_of
from autoplan.spec.calibration import FACTORS, TIME_SPREADS, Calibration
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

RUNS_PER_FACTOR = 15
# Standard deviations of logarithms: of a measured step around the model with the right factors, beyond which a run is
# an outlier; and of a factor around its initial value.
RESIDUAL_SPREAD = 0.10
FACTOR_SPREAD = 0.20
MAX_FACTOR = 3.3  # e^1.2: a larger factor means something other than its name (findings, 1)
SOLVED = 0.01  # change of a factor's logarithm below which a fit is done
MAX_ROUNDS = 5
_NUDGE = 0.02  # step of a factor's logarithm to compute a slope

_MAX_STEPS = 60
_SETTLED = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPrior:
    """Prior knowledge of one cluster before it is measured, as standard deviations of logarithms."""

    factor_spread: float  # of the cluster's factors around the shipped ones
    run_spread: float  # of the runs around the model with the cluster's own factors, in a typical cluster
    scatter_spread: float  # of `run_spread` between clusters


# Fitted between the clusters of published runs (`benchmarks/few_runs.py`, which leaves out the source under test).
PRIOR = ClusterPrior(factor_spread=0.008, run_spread=0.035, scatter_spread=0.43)
# Degrees of freedom of Student's t, few for long tails: the model was developed on these clusters, so they say little
# about how far off others are. With 4, three runs that agree on 20 % count as scatter; with 2 they are believed.
CLUSTER_FREEDOM = 2.0
RUN_FREEDOM = 2.0
RUN_SHARE = 0.1  # extra scatter of runs, as a share of the spread of their kind
_SCATTERS = tuple(range(-3, 22, 3))  # scatters to average over, in units of their spread


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A finished run: its problem, its plan and the measured step time."""

    problem: Problem
    plan: ParallelPlan
    step_s: float


class Pricer:
    """Prices the same runs repeatedly under different calibrations; runs of one problem are priced together."""

    def __init__(self, runs: Sequence[MeasuredRun]) -> None:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        clusters: dict[int, str] = {}
        for at, run in enumerate(runs):
            problem = run.problem
            cluster = clusters.setdefault(id(problem.cluster), repr(problem.cluster))
            groups[(problem.model, problem.training, problem.framework, problem.timings, cluster)].append(at)
        self._size = len(runs)
        self._groups = []
        for indices in groups.values():
            problem = runs[indices[0]].problem
            batch = problem.batch([runs[at].plan for at in indices])
            self._groups.append((np.array(indices), problem, batch))

    def steps_s(self, change: Callable[[Problem], Problem]) -> Floats:
        """Return the step times of the runs, with `change` applied to each problem."""
        result = np.empty(self._size)
        for indices, problem, batch in self._groups:
            result[indices] = estimate(change(problem), batch).step_s
        return result

    def calibrated_s(self, calibration: Calibration) -> Floats:
        """Return the step times of the runs under one calibration."""
        return self.steps_s(lambda problem: replace(problem, calibration=calibration))


def factors_for(num_runs: int) -> tuple[str, ...]:
    """Return the factors that this number of runs may fit: one, plus one for every `RUNS_PER_FACTOR`."""
    return FACTORS[: max(1, min(num_runs // RUNS_PER_FACTOR, len(FACTORS)))]


class Linearised:
    """Model linearised in the log factors around a calibration: priced once per factor, then fitted to any runs."""

    def __init__(self, runs: Sequence[MeasuredRun], names: Sequence[str], at: Calibration) -> None:
        self.names: tuple[str, ...] = tuple(names)
        self._at = np.log([getattr(at, name) for name in self.names])
        pricer = Pricer(runs)
        log_steps = np.log(pricer.calibrated_s(at))
        self._errors = log_steps - np.log([run.step_s for run in runs])
        moved = [
            _with_factors(at, [name], log + _NUDGE) for name, log in zip(self.names, self._at[:, None], strict=True)
        ]
        slopes = [(np.log(pricer.calibrated_s(nudged)) - log_steps) / _NUDGE for nudged in moved]
        self._slopes = np.stack(slopes, axis=1)

    def log_errors(self, calibration: Calibration, rows: Sequence[int] | slice = slice(None)) -> Floats:
        """Return log(predicted / measured) of the runs at `rows` with the factors of another calibration."""
        logs = np.log([getattr(calibration, name) for name in self.names])
        return self._errors[rows] + self._slopes[rows] @ (logs - self._at)

    def only(self, names: Sequence[str]) -> Linearised:
        """Return the model restricted to these factors; the others stay fixed."""
        model = copy(self)
        columns = [self.names.index(name) for name in names]
        model.names, model._at, model._slopes = tuple(names), self._at[columns], self._slopes[:, columns]
        return model

    def fit(self, base: Calibration, rows: Sequence[int] | slice = slice(None)) -> Calibration:
        """Return `base` with the likeliest factors for the runs at `rows`, by iteratively reweighted least squares.

        Errors of log step times follow a Cauchy distribution, so an erratic run that no factors explain has hardly any
        influence.
        """
        prior = np.log([getattr(base, name) for name in self.names])
        slopes = self._slopes[rows]
        errors = self._errors[rows] + slopes @ (prior - self._at)
        change, ridge = np.zeros(len(prior)), np.eye(len(prior)) * (RESIDUAL_SPREAD / FACTOR_SPREAD) ** 2
        for _ in range(_MAX_STEPS):
            weights = 1.0 / (1.0 + ((errors + slopes @ change) / RESIDUAL_SPREAD) ** 2)
            curvature = slopes.T @ (weights[:, None] * slopes) + ridge
            before, change = change, -np.linalg.solve(curvature, slopes.T @ (weights * errors))
            if np.abs(change - before).max() < _SETTLED:
                break
        return _with_factors(base, self.names, np.clip(prior + change, -np.log(MAX_FACTOR), np.log(MAX_FACTOR)))

    def near(
        self,
        base: Calibration,
        spreads: Floats,
        prior: ClusterPrior = PRIOR,
        rows: Sequence[int] | slice = slice(None),
    ) -> Calibration:
        """Return `base` with one cluster's expected factors given the runs at `rows`, predicted with `spreads`.

        The first factor must be `overall`.  The scatter of runs on the cluster is unknown, so the factors are averaged
        over it: runs that agree move the level, runs that contradict each other do not.
        """
        logs = np.log([getattr(base, name) for name in self.names])
        slopes = self._slopes[rows]
        errors = self._errors[rows] + slopes @ (logs - self._at)
        spread = np.hypot(prior.run_spread, RUN_SHARE * spreads[rows])
        evidence, changes = [], []
        for scatter in _SCATTERS:
            log_evidence, change = _likelier(errors, slopes, spread * np.exp(prior.scatter_spread * scatter), prior)
            evidence.append(log_evidence + _log_student(scatter, CLUSTER_FREEDOM))
            changes.append(change)
        weights = np.exp(np.array(evidence) - max(evidence))
        logs += weights @ np.array(changes) / weights.sum()
        return _with_factors(base, self.names, np.clip(logs, -np.log(MAX_FACTOR), np.log(MAX_FACTOR)))


def _likelier(errors: Floats, slopes: Floats, spread: Floats, prior: ClusterPrior) -> tuple[float, Floats]:
    """Return (log evidence, changes of the factors' logarithms) if runs scatter by `spread`.

    The posterior may have two peaks, near no change and at the level of the runs: the one with more evidence counts.
    """
    starts = np.zeros((2, slopes.shape[1]))
    starts[1, 0] = -np.median(errors)
    return max((_peak(errors, slopes, spread, prior, start) for start in starts), key=lambda peak: peak[0])


def _peak(errors: Floats, slopes: Floats, spread: Floats, prior: ClusterPrior, start: Floats) -> tuple[float, Floats]:
    """Return the peak of the posterior found from `start`, by iteratively reweighted least squares for Student's t.

    The evidence is that of a Gaussian with the same height and width (Laplace's approximation).
    """
    position: Floats = start
    ridge = np.full(len(position), prior.factor_spread**-2.0)
    for _ in range(_MAX_STEPS):
        weights = (RUN_FREEDOM + 1.0) / (RUN_FREEDOM * spread**2 + (errors + slopes @ position) ** 2)
        ridge[0] = (CLUSTER_FREEDOM + 1.0) / (CLUSTER_FREEDOM * prior.factor_spread**2 + position[0] ** 2)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(ridge)
        before = position
        position = -np.asarray(np.linalg.solve(curvature, slopes.T @ (weights * errors)), dtype=np.float64)
        if np.abs(position - before).max() < _SETTLED:
            break
    log_height = (
        _log_student((errors + slopes @ position) / spread, RUN_FREEDOM).sum()
        - np.log(spread).sum()
        + _log_student(position[0] / prior.factor_spread, CLUSTER_FREEDOM)
        - (position[1:] ** 2).sum() / (2.0 * prior.factor_spread**2)
    )
    return float(log_height - np.linalg.slogdet(curvature)[1] / 2.0), position


def _log_student(scaled: Floats | float, freedom: float) -> Floats:
    """Log density of Student's t, up to a constant."""
    return np.asarray(-(freedom + 1.0) / 2.0 * np.log1p(np.square(scaled) / freedom))


def fit(runs: Sequence[MeasuredRun], base: Calibration, factors: Sequence[str] | None = None) -> Calibration:
    """Return `base` with the maximum-likelihood factors for `runs`; its spreads are unchanged.

    Robust least squares on log step times with a ridge towards the factors of `base`, solved by Gauss-Newton steps; by
    default with as many factors as the number of runs allows.
    """
    names = factors_for(len(runs)) if factors is None else tuple(factors)
    return _solved(base, names, lambda fitted: Linearised(runs, names, fitted).fit(base))


def _solved(base: Calibration, names: Sequence[str], improve: Callable[[Calibration], Calibration]) -> Calibration:
    """Return `base` after applying `improve` until the named factors converge."""
    fitted = base
    for _ in range(MAX_ROUNDS):
        before, fitted = fitted, improve(fitted)
        if max(abs(np.log(getattr(fitted, name) / getattr(before, name))) for name in names) < SOLVED:
            break
    return fitted


def _with_factors(base: Calibration, names: Sequence[str], logs: Floats) -> Calibration:
    """Return `base` with the named factors set from their logarithms."""
    factors = {name: float(np.exp(value)) for name, value in zip(names, logs, strict=True)}
    return replace(base, **factors)  # type: ignore[arg-type]


def conformal_spread(errors: Floats) -> float:
    """Standard deviation with which the 90 % interval contains nine tenths of such runs (split-conformal).

    `errors` are log(measured / predicted) of runs not used by the fit; the quantile is taken for one run more (Vovk et
    al., Algorithmic Learning in a Random World).
    """
    rank = min(math.ceil(0.9 * (len(errors) + 1)), len(errors))
    return float(np.sort(np.abs(errors))[rank - 1]) / NORMAL_90


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A calibration and the median errors of its runs: before the fit, and after it with each run left out."""

    calibration: Calibration
    median_error_before: float
    median_error: float


# Weight of a calibration's initial spread, as a number of runs.
PRIOR_RUNS = 10


def fit_cluster(runs: Sequence[MeasuredRun], prior: ClusterPrior = PRIOR) -> Calibration:
    """Fit the calibration of one cluster to `runs` of one framework, starting from the calibration of their problems.

    Every factor may move, but no further from its shipped value than the runs support: three runs that scatter change
    nothing, three that agree change the level.
    """
    base, spreads = runs[0].problem.calibration, _spreads(runs)
    return _solved(base, FACTORS, lambda fitted: Linearised(runs, FACTORS, fitted).near(base, spreads, prior))


def calibrated(runs: Sequence[MeasuredRun], *, name: str, prior: ClusterPrior = PRIOR) -> Fitted:
    """Fit as `fit_cluster`, with intervals from the leave-one-out errors of the runs.

    For kinds with few runs the initial interval of the kind counts as well; without runs it is kept.
    """
    base = runs[0].problem.calibration
    before = np.log(Pricer(runs).calibrated_s(base) / [run.step_s for run in runs])
    fitted_to_all, spreads, kinds = fit_cluster(runs, prior), _spreads(runs), _kinds(runs)
    model = Linearised(runs, FACTORS, fitted_to_all)
    training_sets = [[at for at in range(len(runs)) if at != out] for out in range(len(runs))]
    left_out = np.array(
        [
            model.log_errors(model.near(base, spreads, prior, training_set), [at])[0]
            for at, training_set in enumerate(training_sets)
        ]
    )
    changed: dict[str, Any] = dict(zip(TIME_SPREADS, _started_spreads(runs[0].problem), strict=True))
    for at, kind in enumerate(TIME_SPREADS):
        if len(errors := left_out[kinds == at]):
            weight = len(errors) / (len(errors) + PRIOR_RUNS)
            started = float(np.mean(spreads[kinds == at] ** 2))
            changed[kind] = float(np.sqrt(weight * conformal_spread(errors) ** 2 + (1 - weight) * started))
    sources = (*base.sources, f"{len(runs)} runs of one's own")
    return Fitted(
        calibration=replace(fitted_to_all, name=name, sources=sources, **(changed | _likeness(runs, base))),
        median_error_before=float(np.median(np.abs(np.expm1(before)))),
        median_error=float(np.median(np.abs(np.expm1(left_out)))),
    )


def _started_spreads(problem: Problem) -> list[float]:
    """Spread of every kind of plan before any run: that of the calibration, or else the general spread."""
    base = problem.calibration
    fitted = base.time_spreads
    return [float(spread) for spread in np.where(np.isnan(fitted), spread_range(problem)[1], fitted)]


def _likeness(runs: Sequence[MeasuredRun], base: Calibration) -> dict[str, Any]:
    """Fields of a calibration that describe its runs, including those of `base`."""
    fields = likeness([run.problem for run in runs], [_cost(run) for run in runs])
    if base.time_spread is not None:
        fields["exposed_share"] = max(base.exposed_share, fields["exposed_share"])
        limited = [name for name in ("blocks", "precisions", "most_devices") if getattr(base, name)]
        fields = {name: value for name, value in fields.items() if name in (*limited, "exposed_share")}
    for name in ("blocks", "precisions"):
        if name in fields:
            fields[name] = tuple(sorted({*fields[name], *getattr(base, name)}))
    if "most_devices" in fields:
        fields["most_devices"] = max(fields["most_devices"], base.most_devices)
    return fields


def likeness(problems: Sequence[Problem], costs: Sequence[CostEstimate]) -> dict[str, Any]:
    """Fields of a calibration that describe runs; the exposed share is the largest of them."""
    exposed = max(float(exposed_shares(cost.terms_s, cost.step_s)[0]) for cost in costs)
    return {
        "blocks": tuple(sorted({"dense"}.union(*map(special_parts, problems)))),
        "precisions": tuple(sorted({width_of(problem.training.precision) for problem in problems})),
        "most_devices": max(int(cost.batch.num_devices[0]) for cost in costs),
        "exposed_share": min(max(exposed, 0.0), 1.0),
    }


def _cost(run: MeasuredRun) -> CostEstimate:
    return estimate(run.problem, run.problem.batch([run.plan]))


def _kinds(runs: Sequence[MeasuredRun]) -> Ints:
    """Return the index into `TIME_SPREADS` of every run's spread."""
    batches = [run.problem.batch([run.plan]) for run in runs]
    apart = runs[0].problem.calibration.experts_time_spread is not None
    kinds = [spread_kinds(run.problem, batch, experts_apart=apart)[0] for run, batch in zip(runs, batches, strict=True)]
    return np.array(kinds, dtype=np.int64)


def _spreads(runs: Sequence[MeasuredRun]) -> Floats:
    """Return the spread with which every run is predicted, the mean of both sides."""
    costs = [_cost(run) for run in runs]
    return np.array([float(np.log(cost.high_s / cost.low_s)[0]) / (2 * NORMAL_90) for cost in costs])
