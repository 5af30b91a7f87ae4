"""Optimizer's curse: whether the plan that a search picks is predicted too fast more than others are.

Who picks the fastest of many predictions picks where the model errs low, if its errors have nothing to do with what it
predicts.  Runs of one decision (`autoplan.runs.outcomes`) are what a search chooses among: the pick is the plan that is
predicted to be fastest of those that fit, or of the risky ones if none does.  By source, errors being logarithms of
measured over predicted step:

  groups    decisions of which so many finished plans are known
  pick      mean error of the picks: above 0 they were slower than predicted
  all       mean over groups of the median error of all plans
  curse     pick less all: what picking adds
  slope     of measured over predicted logarithms inside groups, by the median of pairs (Theil and Sen): below 1 a plan
            that is predicted to be faster than another by some share is faster by less
  in pick   share of picks inside their 90 % interval
  in all    share of all runs inside theirs, each group with the same weight

A correction is worth stating if that of the other sources brings the picks of a source closer; the last lines say so.

usage: python benchmarks/curse.py [--runs RUNS.csv] [--report REPORT.md]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measured_runs import RUNS
from reports import existing, make_parser, write_report

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.estimate import estimate
from autoplan.runs.outcomes import read_outcomes
from autoplan.runs.runs import read_runs

MIN_PLANS = 4  # finished ones of a decision
MIN_APART = 0.02  # of two predictions' logarithms, for a slope
DRAWS = 2000  # of sources, for the interval of a mean over them


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The finished plans of one decision: arrays have an element per plan, repeats of one are averaged."""

    source: str
    predicted: Floats  # logarithms of seconds
    error: Floats  # logarithms of measured over predicted
    inside: Bools  # whether all its runs are inside their interval
    verdict: Ints  # index into `VERDICTS`

    @property
    def picked(self) -> int:
        """Index of the plan that a search would pick."""
        least = int(self.verdict.min())
        fitting = np.flatnonzero(self.verdict == least)
        return int(fitting[np.argmin(self.predicted[fitting])])

    @property
    def curse(self) -> float:
        """Error of the pick beyond that of all."""
        return float(self.error[self.picked] - np.median(self.error))

    @property
    def slopes(self) -> Floats:
        """Slope of every pair of plans that are predicted to differ."""
        first, other = np.triu_indices(len(self.predicted), 1)
        predicted = self.predicted[first] - self.predicted[other]
        measured = predicted + self.error[first] - self.error[other]
        apart = np.abs(predicted) >= MIN_APART
        return np.asarray(measured[apart] / predicted[apart])


def main() -> None:
    """Print the tables and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    options = parser.parse_args()
    text = "\n".join(table(read_choices(options.runs)))
    print(text)
    if options.report:
        what = (__doc__ or "").partition("usage:")[0].strip()
        write_report(options.report, "Optimizer's curse on measured runs", "`python benchmarks/curse.py`", what, text)


def read_choices(path: Path) -> list[Choice]:
    """The decisions of a table with enough finished plans."""
    decisions: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float, bool, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run, outcome in zip(read_runs(path), read_outcomes(path), strict=True):
        if run.problem is None or run.plan is None or outcome.status != "ok" or outcome.step_s is None:
            continue
        cost = estimate(run.problem, run.problem.batch([run.plan]))
        inside = bool(cost.low_s[0] <= outcome.step_s <= cost.high_s[0])
        predicted = float(np.log(cost.step_s[0]))
        priced = (predicted, float(np.log(outcome.step_s)) - predicted, inside, int(cost.verdict[0]))
        decisions[outcome.decision][outcome.plan].append(priced)
    return [
        _choice(decision[0], list(plans.values())) for decision, plans in decisions.items() if len(plans) >= MIN_PLANS
    ]


def _choice(source: str, plans: Sequence[Sequence[tuple[float, float, bool, int]]]) -> Choice:
    return Choice(
        source=source,
        predicted=np.array([np.mean([run[0] for run in runs]) for runs in plans]),
        error=np.array([np.mean([run[1] for run in runs]) for runs in plans]),
        inside=np.array([all(run[2] for run in runs) for runs in plans]),
        verdict=np.array([runs[0][3] for runs in plans]),
    )


def by_source(choices: Sequence[Choice]) -> dict[str, list[Choice]]:
    """The decisions of every source."""
    found: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        found[choice.source].append(choice)
    return dict(sorted(found.items()))


def correction(sources: dict[str, list[Choice]], without: str = "") -> float:
    """The median over sources of their mean curse: what to add to the logarithm of a pick's prediction."""
    means = [np.mean([choice.curse for choice in own]) for source, own in sources.items() if source != without]
    return float(np.median(means)) if means else 0.0


def figures(own: Sequence[Choice]) -> Floats:
    """Figures of the decisions of a source, in the order of the columns of the table."""
    picks = [choice.picked for choice in own]
    return np.array(
        [
            np.mean([choice.error[at] for choice, at in zip(own, picks, strict=True)]),
            np.mean([np.median(choice.error) for choice in own]),
            np.mean([choice.curse for choice in own]),
            np.median(np.concatenate([choice.slopes for choice in own])),
            np.mean([choice.inside[at] for choice, at in zip(own, picks, strict=True)]),
            np.mean([choice.inside.mean() for choice in own]),
        ]
    )


def _line(name: str, count: int, row: Floats) -> str:
    return (
        f"{name:16}{count:7}"
        + "".join(f"{value:+8.3f}" for value in row[:3])
        + "".join(f"{value:9.2f}" for value in row[3:])
    )


def table(choices: Sequence[Choice]) -> Iterator[str]:
    """Lines: the sources, their mean and median, and whether a correction would help."""
    sources = by_source(choices)
    rows = np.array([figures(own) for own in sources.values()])
    yield f"{'source':16}{'groups':>7}{'pick':>8}{'all':>8}{'curse':>8}{'slope':>9}{'in pick':>9}{'in all':>9}"
    for (source, own), row in zip(sources.items(), rows, strict=True):
        yield _line(source, len(own), row)
    yield _line("mean", len(choices), rows.mean(axis=0))
    yield _line("median", len(choices), np.median(rows, axis=0))
    curses = rows[:, 2]
    drawn = np.median(np.random.default_rng(0).choice(curses, (DRAWS, len(curses))), axis=1)
    low, high = np.quantile(drawn, (0.05, 0.95))
    yield (
        f"\nmedian curse of a source {float(np.median(curses)):+.3f}, "
        f"with sources drawn again {low:+.3f} to {high:+.3f} (90 %)"
    )
    corrected = {source: correction(sources, without=source) for source in sources}
    before, after = (
        np.array(
            [
                np.mean([abs(choice.error[choice.picked] - off.get(source, 0.0)) for choice in own])
                for source, own in sources.items()
            ]
        )
        for off in ({}, corrected)
    )
    yield (
        f"with the correction of the other sources picks are off by {float(np.median(after)):.3f} in the median of "
        f"sources, {float(np.median(before)):.3f} without; closer in {(after < before).sum()} of {len(before)}"
    )


if __name__ == "__main__":
    main()
