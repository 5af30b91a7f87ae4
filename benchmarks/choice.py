"""Errors of predicted ratios of plans, and the coverage of their interval.

Pairs of measured runs of one source, model, batch and number of devices: the logarithm of measured over predicted
ratio, against what part of their steps the two plans spend on different things.  Fits the figure of
`search.choice` by the 90 % quantile, every source with the same weight, and says which part of the pairs of each source
the interval holds when that source is left out of the fit, and with the figure as shipped.

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
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem

OWN_SPREADS = np.arange(0.01, 0.151, 0.005)
QUANTILE = 0.9
NEAR = 0.1  # ratios so near to 1 are those that a choice hangs on


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
    text = "\n".join(table(read_pairs(options.runs)))
    print(text)
    if options.report:
        write_report(options.report, "Ratios of plans on measured runs", "`python benchmarks/choice.py`", text)


def read_pairs(path: Path) -> list[Pairs]:
    """The pairs of every source with runs of different plans that share all else."""
    groups: dict[str, dict[object, list[tuple[Problem, ParallelPlan, float]]]] = defaultdict(lambda: defaultdict(list))
    for run, row in with_answers(path, read_runs(path)):
        if run.problem and run.plan and row["status"] == "ok" and row["step_time_s"]:
            alike = (run.problem.model, run.problem.training, run.problem.framework, repr(run.problem.cluster))
            timed_run = (run.problem, run.plan, float(row["step_time_s"]))
            groups[source_of(run)][*alike, run.plan.global_batch].append(timed_run)
    found = (_pairs(source, runs.values()) for source, runs in groups.items())
    return [pairs for pairs in found if len(pairs.error)]


def _pairs(source: str, groups: Iterable[list[tuple[Problem, ParallelPlan, float]]]) -> Pairs:
    columns: list[list[Floats]] = [[np.empty(0)] for _ in range(5)]
    for runs in groups:
        problem, plans = runs[0][0], [plan for _, plan, _ in runs]
        cost = estimate(problem, PlanBatch.of(plans, problem.model.num_layers))
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


if __name__ == "__main__":
    main()
