"""How much do a few measured runs of a new cluster teach?

Every source of a table of runs is left out of the calibrations in turn: its clusters, one for each framework and
generation of devices in it, start with factors and spreads that were fitted to the other sources.  Then a few of a
cluster's runs, drawn at random and several times, calibrate it as `autoplan calibrate` does, and all its other runs
are predicted.

  before    median error of the other runs before the calibration, in %
  after     the same after it: the median over the draws
  full      median error of each run under a fit to all others of the cluster; in brackets with all of them in the fit
  ratio     of after to full: at most 1.3 is asked for
  worse     share of the draws that made the error more than 1 point worse, in %, and by how many points the worst did
  cover     share of the other runs inside their 90 % interval, in %

Traits of frameworks that presets list as fitted stay as they ship, with all runs in view.

usage: python benchmarks/few_runs.py [--runs RUNS.csv] [--count N] [--draws N] [--report REPORT.md]
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from accuracy import SHARED, Case, Fits, left_out, log_errors, read_cases
from numpy.typing import NDArray

import autoplan
from autoplan.cost.calibration import Linearised, calibrated, factors_for, fit
from autoplan.cost.estimate import NORMAL_90
from autoplan.files import write_text
from autoplan.read.runs import read_runs
from autoplan.timing import TIME_SPREADS, Calibration

Floats = NDArray[np.float64]

LEAST_OTHERS = 5  # runs of a cluster to judge on
MOST_RATIO = 1.3
MOST_WORSE = 1.0  # points


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was seen of one cluster; errors in percent, one for each draw where there are several."""

    name: str
    num_runs: int
    before: Floats
    after: Floats
    cover: Floats
    full: float
    full_in_fit: float

    @property
    def ratio(self) -> float:
        """Of the median error after to that of the full fit."""
        return float(np.median(self.after)) / self.full

    @property
    def worse(self) -> float:
        """By how many points the median over the draws is worse than before."""
        return float(np.median(self.after) - np.median(self.before))

    def __str__(self) -> str:
        gain = self.after - self.before
        return (
            f"{self.name:44}{self.num_runs:5}{np.median(self.before):8.1f}{np.median(self.after):8.1f}"
            f"{self.full:8.1f} ({self.full_in_fit:.1f}){self.ratio:8.2f}{'*' if self.ratio > MOST_RATIO else ' '}"
            f"{100 * np.mean(gain > MOST_WORSE):6.0f}{gain.max():+7.1f}{100 * np.mean(self.cover):7.0f}"
        )


HEADER = (
    f"{'cluster':44}{'runs':>5}{'before':>8}{'after':>8}{'full':>14}{'ratio':>8} {'worse':>6}{'most':>7}{'cover':>7}"
)


def main() -> int:
    """Leave sources out, calibrate and print; write the report if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--runs", type=Path, default=SHARED / "data" / "measured_runs.csv")
    parser.add_argument("--count", type=int, default=3, help="runs that calibrate a cluster")
    parser.add_argument("--draws", type=int, default=20, help="of these runs, for every cluster")
    parser.add_argument("--report", type=Path, help="write the table to this Markdown file as well")
    options = parser.parse_args()
    if not options.runs.is_file():
        print(f"{options.runs} is not there: name it with --runs", file=sys.stderr)
        return 1
    lines = [HEADER]
    print(HEADER)
    rows = []
    for row in judge(read_cases(options.runs, list(read_runs(options.runs))), options.count, options.draws):
        rows.append(row)
        lines.append(str(row))
        print(row, flush=True)
    ratios = np.array([row.ratio for row in rows])
    lines.append(
        f"\n{int((ratios <= MOST_RATIO).sum())} of {len(rows)} clusters within {MOST_RATIO} times a full fit, "
        f"geometric mean {np.exp(np.log(ratios).mean()):.2f}; the median draw makes "
        f"{sum(row.worse > MOST_WORSE for row in rows)} of them worse by more than {MOST_WORSE:g} point"
    )
    print(lines[-1])
    if options.report:
        head = (
            f"# {options.count} runs of a cluster that was left out, {datetime.date.today().isoformat()}\n\n"
            f"autoplan {autoplan.__version__}, Python {platform.python_version()}; {options.draws} draws; "
            "`python benchmarks/few_runs.py`.\n"
        )
        what = (__doc__ or "").partition("usage:")[0].strip()
        text = "\n".join(lines)
        write_text(options.report, f"{head}\n```\n{what}\n```\n\n```\n{text}\n```\n", force=True)
    return 0


def judge(cases: Sequence[Case], count: int, draws: int) -> Iterator[Row]:
    """Every cluster with enough runs."""
    fits = Fits(cases)
    spreads = {name: spread for name, (_, spread) in left_out(cases, fits, lambda case: case.source).items()}
    clusters: dict[tuple[str, tuple[str, str]], list[Case]] = defaultdict(list)
    for case in cases:
        clusters[case.source, case.key].append(case)
    for (source, key), some in sorted(clusters.items()):
        if len(some) < count + LEAST_OTHERS:
            continue
        unseen = frozenset(case.run.id for case in cases if case.source == source)
        base = with_spreads(fits.without(key, unseen), some, spreads)
        yield _judge(f"{source}: {' on '.join(key)}", [under(case, base) for case in some], base, count, draws)


def with_spreads(base: Calibration, cases: Sequence[Case], spreads: dict[str, float]) -> Calibration:
    """`base` with the spreads that other sources gave runs of these kinds, as shipped calibrations have them."""
    known = {case.spread: spreads[case.run.id] for case in cases}
    known.setdefault(TIME_SPREADS[0], max(known.values()))
    return replace(base, **known)  # type: ignore[arg-type]


def under(case: Case, base: Calibration) -> Case:
    """The case under another calibration."""
    measured = replace(case.measured, problem=replace(case.measured.problem, calibration=base))
    return replace(case, measured=measured)


def _judge(name: str, cases: Sequence[Case], base: Calibration, count: int, draws: int) -> Row:
    random = np.random.default_rng(0)
    runs = [case.measured for case in cases]
    plain = log_errors(cases, base)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(draws):
        drawn = random.choice(len(cases), count, replace=False)
        others = np.setdiff1d(np.arange(len(cases)), drawn)
        own = calibrated([runs[at] for at in drawn], name=name).calibration
        errors = log_errors([cases[at] for at in others], own)
        spread = np.array([getattr(own, cases[at].spread) or own.time_spread for at in others])
        found["before"].append(_median(-plain[others]))
        found["after"].append(_median(-errors))
        found["cover"].append(float(np.mean(np.abs(errors) <= NORMAL_90 * spread)))
    names = factors_for(len(runs))
    whole = fit(runs, base, names)
    model = Linearised(runs, names, whole)
    rest = [[at for at in range(len(runs)) if at != out] for out in range(len(runs))]
    unseen = np.array([model.log_errors(model.fit(base, some), [out])[0] for out, some in enumerate(rest)])
    return Row(
        name=name,
        num_runs=len(runs),
        before=np.array(found["before"]),
        after=np.array(found["after"]),
        cover=np.array(found["cover"]),
        full=_median(unseen),
        full_in_fit=_median(-log_errors(cases, whole)),
    )


def _median(log_ratios: Floats) -> float:
    """Median error in percent of the measured time, from log(predicted / measured)."""
    return 100 * float(np.median(np.abs(np.expm1(log_ratios))))


if __name__ == "__main__":
    sys.exit(main())
