"""Errors of predicted ratios of plans, and the coverage of their interval.

Pairs of measured runs of one source, model, batch and number of devices: the logarithm of measured over predicted
ratio, against what part of their steps the two plans spend on different things.  Fits the figure of
`search.choice` by the 90 % quantile, every source with the same weight, and says which part of the pairs of each source
the interval holds when that source is left out of the fit, and with the figure as shipped.

Then come twins, plans that differ in how states are sharded alone, as a measure of noise: how far apart their measured
steps are, and what is lost by picking the plan whose twin was measured to be fastest, beside picking by the prediction.

usage: python benchmarks/choice.py [--runs RUNS.csv] [--report REPORT.md]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measured_runs import RUNS, source_of, with_answers
from reports import existing, make_parser, write_report

from autoplan.base.arrays import Floats
from autoplan.cost.estimate import estimate
from autoplan.cost.spreads import NORMAL_90, component_shares
from autoplan.runs.runs import read_runs
from autoplan.search.choice import OWN_SPREAD, apart, ratio_spreads
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

OWN_SPREADS = np.arange(0.01, 0.151, 0.005)
QUANTILE = 0.9
NEAR = 0.1  # ratios so near to 1 are those that a choice hangs on
MIN_TWINS = 4  # pairs of a group, for a pick

TimedRun = tuple[Problem, ParallelPlan, float]
Groups = dict[str, dict[object, list[TimedRun]]]  # by source, and by what runs have in common


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of runs of one source; arrays have an element per pair, each group of runs has a total weight of 1."""

    source: str
    error: Floats  # of the ratio's logarithm
    apart: Floats  # share of the step that is spent on different things
    variance: Floats  # of both plans, by their calibration
    predicted: Floats  # logarithm of the ratio
    weight: Floats

    def half_width(self, own: float) -> Floats:
        """Half of the 90 % interval of the ratio's logarithm."""
        return NORMAL_90 * ratio_spreads(self.apart, self.variance, own)

    def coverage(self, own: float, *, near: bool = False) -> float:
        """The weight of the pairs inside; NaN without any."""
        which = np.abs(self.predicted) < NEAR if near else np.full(len(self.error), True)
        inside = np.abs(self.error) <= self.half_width(own)
        total = self.weight[which].sum()
        return float(self.weight[which & inside].sum() / total) if total else float("nan")

    def loss(self, own: float) -> float:
        """Pinball loss of the half width as a quantile of the error, in spreads of the calibration."""
        beyond = (np.abs(self.error) - self.half_width(own)) / np.sqrt(self.variance)
        return float(np.average(np.where(beyond > 0, QUANTILE * beyond, (QUANTILE - 1) * beyond), weights=self.weight))


def main() -> None:
    """Fit, print and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    options = parser.parse_args()
    groups = read_groups(options.runs)
    text = "\n".join([*table(read_pairs(groups)), "", *twin_table(groups)])
    print(text)
    if options.report:
        write_report(options.report, "Ratios of plans on measured runs", "`python benchmarks/choice.py`", text)


def read_groups(path: Path) -> Groups:
    """The finished runs of every source, those together that may differ in their plans alone."""
    groups: Groups = defaultdict(lambda: defaultdict(list))
    for run, row in with_answers(path, read_runs(path)):
        if run.problem and run.plan and row["status"] == "ok" and row["step_time_s"]:
            alike = (run.problem.model, run.problem.training, run.problem.framework, repr(run.problem.cluster))
            timed_run = (run.problem, run.plan, float(row["step_time_s"]))
            groups[source_of(run)][*alike, run.plan.global_batch].append(timed_run)
    return groups


def read_pairs(groups: Groups) -> list[Pairs]:
    """The pairs of every source with runs of different plans that share all else."""
    found = (_pairs(source, runs.values()) for source, runs in groups.items())
    return [pairs for pairs in found if len(pairs.error)]


def _pairs(source: str, groups: Iterable[list[TimedRun]]) -> Pairs:
    columns: list[list[Floats]] = [[np.empty(0)] for _ in range(5)]
    for runs in groups:
        problem, plans = runs[0][0], [plan for _, plan, _ in runs]
        cost = estimate(problem, problem.batch(plans))
        predicted = np.log(cost.step_s)
        error = np.log([step_s for _, _, step_s in runs]) - predicted
        spread = np.log(cost.high_s / cost.low_s) / (2 * NORMAL_90)
        first, other = np.triu_indices(len(runs), 1)
        differ = np.array([plans[a] != plans[b] for a, b in zip(first, other, strict=True)], dtype=np.bool_)
        first, other = first[differ], other[differ]
        if not len(first):
            continue
        parts = component_shares(cost.terms_s)
        values = (
            error[first] - error[other],
            apart(parts[first], parts[other]),
            spread[first] ** 2 + spread[other] ** 2,
            predicted[first] - predicted[other],
            np.full(len(first), 1.0 / len(first)),
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    error, differing, variance, predicted, weight = (np.concatenate(column) for column in columns)
    return Pairs(source=source, error=error, apart=differing, variance=variance, predicted=predicted, weight=weight)


def fit(sources: list[Pairs]) -> float:
    """The spread of any two plans with the least loss, in the mean of sources."""
    return min(map(float, OWN_SPREADS), key=lambda own: sum(pairs.loss(own) for pairs in sources))


def table(sources: list[Pairs]) -> Iterator[str]:
    """Lines: the fit, and how much of every source it holds."""
    yield f"spread of any two plans: {fit(sources):.3f} fitted to all sources, {OWN_SPREAD:.3f} shipped\n"
    yield "part of the pairs inside the 90 % interval of their ratio; near: predicted within 10 % of each other"
    yield "source         pairs  median error  left out: spread  inside  near  shipped: inside  near  half width"
    inside = []
    for pairs in sources:
        own = fit([pairs_of_source for pairs_of_source in sources if pairs_of_source is not pairs])
        inside.append((pairs.coverage(own), pairs.coverage(OWN_SPREAD)))
        width = float(np.median(np.expm1(pairs.half_width(OWN_SPREAD))))
        yield (
            f"{pairs.source:12} {len(pairs.error):7} {100 * np.median(np.abs(pairs.error)):12.1f}% {own:17.3f} "
            f"{inside[-1][0]:7.2f} {pairs.coverage(own, near=True):5.2f} "
            f"{inside[-1][1]:16.2f} {pairs.coverage(OWN_SPREAD, near=True):5.2f} {100 * width:10.1f}%"
        )
    left_out, as_shipped = np.mean(inside, axis=0)
    yield f"{'mean':12} {left_out:47.2f} {as_shipped:22.2f}"


def twin_table(groups: Groups) -> Iterator[str]:
    """Lines: how unlike the steps of twins are, and what picks by twin and by prediction lose."""
    yield "twins: plans that differ in the sharding of states alone"
    yield "source        twins  ratio of steps  groups  lost by picking the fastest twin's twin  by the prediction"
    for source, runs in groups.items():
        ratios: list[float] = []
        lost: list[tuple[float, float]] = []
        for group in runs.values():
            twins = list(_twins(group))
            ratios += [max(run[1] / twin[1], twin[1] / run[1]) for run, twin in twins]
            if len(twins) >= MIN_TWINS:
                # What is said of a plan by its twin and by the prediction, and its step.
                said = [(twin[1], *own) for pair in twins for own, twin in (pair, pair[::-1])]
                best_s = min(step_s for *_, step_s in said)
                lost.append((1 - best_s / min(said)[2], 1 - best_s / min(said, key=lambda plan: plan[1])[2]))
        if lost:
            by_twin, by_prediction = 100 * np.mean(lost, axis=0)
            yield (
                f"{source:12} {len(ratios):6} {np.median(ratios):15.2f} {len(lost):7} {by_twin:39.1f}% "
                f"{by_prediction:17.1f}%"
            )


def _twins(group: list[TimedRun]) -> Iterator[list[tuple[float, float]]]:
    """Pairs of (predicted, measured) steps of plans that differ in the sharding of states alone."""
    problem, plans = group[0][0], [plan for _, plan, _ in group]
    predicted = estimate(problem, problem.batch(plans)).step_s
    alike: dict[object, dict[str, tuple[float, float]]] = defaultdict(dict)
    for (_, plan, step_s), predicted_s in zip(group, predicted, strict=True):
        key = (plan.tp, plan.cp, plan.pp, plan.vp, plan.ep, plan.dp, plan.micro_batch, plan.recompute)
        alike[key][plan.sharding] = (float(predicted_s), step_s)
    return (list(steps.values()) for steps in alike.values() if len(steps) == 2)


if __name__ == "__main__":
    main()
