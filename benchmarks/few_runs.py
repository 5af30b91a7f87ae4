"""Gain in accuracy from a few measured runs of a new cluster.

Every source of a table of runs is left out in turn.  Its clusters, one for each framework and generation of devices in
it, start with spreads that were fitted to the other sources.  How far clusters lie from where they start
and how much their runs scatter (`ClusterPrior`), is taken from the clusters of other sources too.  Then a few runs of a
cluster, drawn at random and several times, calibrate it as `autoplan calibrate` does, and all its other runs are
predicted.

  before    median error of the other runs before the calibration, in %
  after     the same after it: the median over the draws
  full      median error of each run under a fit to all others of the cluster; in brackets with all of them in the fit
  apart     median error of each run under a fit to those of the cluster with another model or, where all have one, size
  ratio     of after to full: at most 1.3 is asked for
  worse     share of the draws that made the error more than 1 point worse, in %, and by how many points the worst did
  cover     share of the other runs inside their 90 % interval, in %
  level     ratio of the median error with the one best level for all runs of the cluster, in hindsight, to full
  oracle    ratio of after to full for the level that these draws tell who knows how the cluster's errors are spread

`level` and `oracle` are bounds: below them is only who learns more than the level, or is lucky with the start.
Traits of frameworks that presets list as fitted stay as they ship, with all runs in view.

usage: python benchmarks/few_runs.py [--runs RUNS.csv] [--count N] [--draws N] [--report REPORT.md]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from accuracy_cases import Case, calibrations, read_cases
from measured_runs import RUNS
from reports import existing, make_parser, write_report
from scipy.stats import t as student

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.calibration import (
    CLUSTER_FREEDOM,
    RUN_FREEDOM,
    ClusterPrior,
    Linearised,
    Pricer,
    calibrated,
    factors_for,
    fit,
)
from autoplan.cost.estimate import estimate
from autoplan.readers.calibration import calibration_among
from autoplan.runs.runs import read_runs
from autoplan.spec.calibration import Calibration
from autoplan.spec.estimate import CostEstimate

MIN_OTHERS = 5  # runs of a cluster to judge on
MAX_RATIO = 1.3
MAX_WORSE = 1.0  # points

# Medians of what Student's t leaves unsigned, for a spread of 1.
MEDIAN_CLUSTER = float(student.ppf(0.75, CLUSTER_FREEDOM))
MEDIAN_RUN = float(student.ppf(0.75, RUN_FREEDOM))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Runs of one framework on one generation of devices in one source, and the calibration from other sources."""

    source: str
    name: str
    cases: list[Case]
    folds: list[str]  # of each run, what is left out with it
    base: Calibration

    @property
    def size(self) -> int:
        """Number of its runs."""
        return len(self.cases)

    def draws(self, count: int, number: int, seed: int) -> Iterator[tuple[Ints, Ints]]:
        """(runs that calibrate, all others), drawn at random."""
        random = np.random.default_rng(seed)
        for _ in range(number):
            drawn = random.choice(self.size, count, replace=False)
            yield drawn, np.setdiff1d(np.arange(self.size), drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Errors on one cluster in percent, one for each draw where there are several."""

    name: str
    num_runs: int
    before: Floats
    after: Floats
    cover: Floats
    full: float
    full_in_fit: float
    apart: float | None  # where all runs are of one model and size
    level: float
    oracle: Floats

    @property
    def ratio(self) -> float:
        """Ratio of the median error after to that of the full fit."""
        return float(np.median(self.after)) / self.full

    @property
    def worse(self) -> float:
        """Points by which the median over the draws is worse than before."""
        return float(np.median(self.after) - np.median(self.before))

    def __str__(self) -> str:
        gain = self.after - self.before
        return (
            f"{self.name:44}{self.num_runs:5}{np.median(self.before):8.1f}{np.median(self.after):8.1f}"
            f"{self.full:8.1f} ({self.full_in_fit:.1f}){'-' if self.apart is None else f'{self.apart:.1f}':>7}"
            f"{self.ratio:8.2f}{'*' if self.ratio > MAX_RATIO else ' '}"
            f"{100 * np.mean(gain > MAX_WORSE):6.0f}{gain.max():+7.1f}{100 * np.mean(self.cover):7.0f}"
            f"{self.level / self.full:7.2f}{np.median(self.oracle) / self.full:8.2f}"
        )


HEADER = (
    f"{'cluster':44}{'runs':>5}{'before':>8}{'after':>8}{'full':>14}{'apart':>7}{'ratio':>8} "
    f"{'worse':>6}{'most':>7}{'cover':>7}{'level':>7}{'oracle':>8}"
)


def main() -> None:
    """Leave sources out, calibrate and print; write the report if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    parser.add_argument("--count", type=int, default=3, help="runs that calibrate a cluster")
    parser.add_argument("--draws", type=int, default=20, help="of these runs, for every cluster")
    options = parser.parse_args()
    clusters = [
        cluster
        for cluster in read_clusters(read_cases(options.runs, list(read_runs(options.runs))))
        if cluster.size >= options.count + MIN_OTHERS
    ]
    lines = [f"all clusters: {prior_text(prior_of(clusters))}"]
    print(lines[0])
    lines += ["", HEADER]
    print(f"\n{HEADER}")
    rows = []
    for cluster in clusters:
        prior = prior_of([other for other in clusters if other.source != cluster.source])
        row = judge(cluster, prior, options.count, options.draws)
        rows.append(row)
        lines.append(str(row))
        print(row, flush=True)
    ratios = np.array([row.ratio for row in rows])
    gains = np.concatenate([row.after - row.before for row in rows])
    lines.append(
        f"\n{int((ratios <= MAX_RATIO).sum())} of {len(rows)} clusters within {MAX_RATIO} times a full fit, "
        f"geometric mean {np.exp(np.log(ratios).mean()):.2f}; the median draw makes "
        f"{sum(row.worse > MAX_WORSE for row in rows)} of them worse by more than {MAX_WORSE:g} point, "
        f"{100 * np.mean(gains > MAX_WORSE):.0f} % of all draws do"
    )
    print(lines[-1])
    if options.report:
        title = f"{options.count} runs of a cluster that was left out"
        made_by = f"{options.draws} draws; `python benchmarks/few_runs.py`"
        what = (__doc__ or "").partition("usage:")[0].strip()
        write_report(options.report, title, made_by, what, "\n".join(lines))


def read_clusters(cases: Sequence[Case]) -> list[Cluster]:
    """Clusters, with what other sources tell of them."""
    groups: dict[tuple[str, tuple[str, str]], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.source, case.key].append(case)
    known = {
        source: calibrations([case for case in cases if case.source != source])
        for source in {case.source for case in cases}
    }
    folds = folds_of(cases)
    clusters = []
    for (source, key), own in sorted(groups.items()):
        base = calibration_among(known[source], *key, is_similar=own[0].is_similar)
        name = f"{source}: {' on '.join(key)}"
        own_folds = [folds[case.run.id] for case in own]
        own = [under(case, base) for case in own]
        clusters.append(Cluster(source=source, name=name, cases=own, folds=own_folds, base=base))
    return clusters


def folds_of(cases: Sequence[Case]) -> dict[str, str]:
    """Folds by the ids of runs: models where a source has several, else numbers of devices, else lengths."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_source[case.source].append(case)
    folds: dict[str, str] = {}
    for own in by_source.values():
        models = [case.problem.model.name for case in own]
        sizes = [str(case.problem.cluster.num_devices) for case in own]
        lengths = [str(case.problem.training.seq_len) for case in own]
        names = next((names for names in (models, sizes) if len(set(names)) > 1), lengths)
        folds.update(zip((case.run.id for case in own), names, strict=True))
    return folds


def log_errors(cases: Sequence[Case], calibration: Calibration) -> Floats:
    """log(measured / predicted) of every case."""
    runs = [case.measured for case in cases]
    return np.log([run.step_s for run in runs] / Pricer(runs).calibrated_s(calibration))


# -- the prior --------------------------------------------------------------------------------------------------------


def prior_of(clusters: Sequence[Cluster]) -> ClusterPrior:
    """Prior of how clusters differ: by medians, so that none of them decides."""
    errors = [log_errors(cluster.cases, cluster.base) for cluster in clusters]
    levels = np.array([np.median(cluster_errors) for cluster_errors in errors])
    scatter = [np.median(np.abs(cluster_errors - level)) for cluster_errors, level in zip(errors, levels, strict=True)]
    logs = np.log(np.array(scatter) / MEDIAN_RUN)
    return ClusterPrior(
        factor_spread=float(np.median(np.abs(levels))) / MEDIAN_CLUSTER,
        run_spread=float(np.exp(np.median(logs))),
        scatter_spread=float(np.median(np.abs(logs - np.median(logs)))) / MEDIAN_CLUSTER,
    )


def prior_text(prior: ClusterPrior) -> str:
    """The prior in words."""
    return (
        f"factors lie {prior.factor_spread:.3f} from where they start, runs scatter by {prior.run_spread:.3f}, "
        f"that by {prior.scatter_spread:.2f}"
    )


# -- one cluster ------------------------------------------------------------------------------------------------------


def under(case: Case, base: Calibration) -> Case:
    """The case under another calibration."""
    measured = replace(case.measured, problem=replace(case.measured.problem, calibration=base))
    return replace(case, measured=measured)


def cost_under(case: Case, calibration: Calibration) -> CostEstimate:
    """Return the estimate of a case with another calibration."""
    return estimate(replace(case.problem, calibration=calibration), case.cost.batch)


def judge(cluster: Cluster, prior: ClusterPrior, count: int, draws: int) -> Row:
    """Judge a fit to a few of its runs beside the fit to all."""
    cases, base = cluster.cases, cluster.base
    runs = [case.measured for case in cases]
    plain = -log_errors(cases, base)
    oracle = Oracle.of(plain)
    found: dict[str, list[float]] = defaultdict(list)
    for drawn, others in cluster.draws(count, draws, seed=0):
        own = calibrated([runs[at] for at in drawn], name=cluster.name, prior=prior).calibration
        costs = [cost_under(cases[at], own) for at in others]
        errors = np.log([runs[at].step_s / cost.step_s[0] for at, cost in zip(others, costs, strict=True)])
        inside = [cost.low_s[0] <= runs[at].step_s <= cost.high_s[0] for at, cost in zip(others, costs, strict=True)]
        found["before"].append(_median(plain[others]))
        found["after"].append(_median(-errors))
        found["cover"].append(float(np.mean(inside)))
        found["oracle"].append(_median(plain[others] + oracle.level(plain[drawn])))
    names = factors_for(len(runs))
    full = fit(runs, base, names)
    model = Linearised(runs, names, full)
    rest = [[at for at in range(len(runs)) if at != out] for out in range(len(runs))]
    unseen = np.array([model.log_errors(model.fit(base, kept), [out])[0] for out, kept in enumerate(rest)])
    folds = np.array(cluster.folds)
    apart = [
        model.log_errors(model.fit(base, np.flatnonzero(~inside).tolist()), np.flatnonzero(inside).tolist())
        for inside in (folds == name for name in np.unique(folds))
        if not inside.all()
    ]
    return Row(
        name=cluster.name,
        num_runs=len(runs),
        before=np.array(found["before"]),
        after=np.array(found["after"]),
        cover=np.array(found["cover"]),
        full=_median(unseen),
        full_in_fit=_median(-log_errors(cases, full)),
        apart=_median(np.concatenate(apart)) if apart else None,
        level=_median(plain + oracle.best),
        oracle=np.array(found["oracle"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Estimates the level of a cluster from some of its runs, and knows how the errors of all lie around the best one.

    No estimate that moves with the level of the runs has less variance (Pitman, Biometrika 1939).
    """

    best: float  # to add to all errors
    points: Floats
    log_density: Floats  # of errors around the best level, there

    @classmethod
    def of(cls, errors: Floats) -> Oracle:
        """Distribution of a cluster with these errors, smoothed by half their median."""
        levels = np.linspace(-0.3, 0.3, 1201)
        best = float(levels[np.argmin([_median(errors + level) for level in levels])])
        around = errors + best
        width = 0.5 * float(np.median(np.abs(around)))
        points = np.linspace(-5.0, 5.0, 10_001)
        density = np.mean([np.exp(-((points - error) ** 2) / (2 * width**2)) for error in around], axis=0)
        return cls(best=best, points=points, log_density=np.log(density + 1e-12))

    def level(self, errors: Floats) -> float:
        """Level to add to all errors, given a few of them: the median of the posterior from a flat prior."""
        levels = np.linspace(-1.5, 1.5, 3001)
        log_posterior = sum(np.interp(error + levels, self.points, self.log_density) for error in errors)
        below = np.cumsum(np.exp(log_posterior - np.max(log_posterior)))
        return float(np.interp(0.5 * below[-1], below, levels))


def _median(log_ratios: Floats) -> float:
    """Median error in percent of the measured time, from log(predicted / measured)."""
    return 100 * float(np.median(np.abs(np.expm1(log_ratios))))


if __name__ == "__main__":
    main()
