"""Matched pairs of measured runs that differ in one choice: the ratio of their steps, measured and predicted.

Two rows of a source make a pair where they are alike in every column that describes the machine, the model, the batch
and the degrees of parallelism, and differ in one of `CHOICES` or in one name of the column `options`.  A choice that
one of the two does not state is no difference.  A ratio is that of the later row over the earlier one.  Its direction
is right where both ratios lie on the same side of 1, or within `SAME` of it; a pair is inside where the measured steps
of both lie in their 90 % intervals.

usage: python benchmarks/pairs.py [--runs RUNS.csv] [--report REPORT.md]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from measured_runs import RUNS, source_of, with_answers
from reports import existing, make_parser, write_report

from autoplan.cost.estimate import estimate
from autoplan.runs.runs import Run, read_runs
from autoplan.runs.table import BLANKS

# Columns that hold a choice, beside `options`; those behind them say which run it is, or what came out.
CHOICES = ("precision", "sp", "vp", "sharding", "micro_batch", "recompute", "attention", "fused_norm")
NOT_COMPARED = (
    "id", "source", "locator", "notes", "options", "status", "dp", "tokens_per_s_per_gpu", "peak_memory_gib",
    "step_time_s", "step_time_origin", "intra_node_gbytes_per_s", "inter_node_gbytes_per_s",
)  # fmt: skip
SAME = 0.01  # change of a step that repeats on one machine do not tell from none


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Run of a pair: what it chose, and how long its step took and was said to take, in seconds."""

    id: str
    choices: Mapping[str, str]
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def is_inside(self) -> bool:
        """Return whether the measured step lies in the 90 % interval."""
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs that differ in one choice."""

    source: str
    choice: str
    first: Side
    other: Side

    @property
    def measured(self) -> float:
        """The other's measured step over the first one's."""
        return self.other.measured_s / self.first.measured_s

    @property
    def predicted(self) -> float:
        """The other's predicted step over the first one's."""
        return self.other.predicted_s / self.first.predicted_s

    @property
    def is_right_way(self) -> bool:
        """Return whether the prediction says which of the two is faster, where one is."""
        return is_right_way(self.measured, self.predicted)

    @property
    def is_inside(self) -> bool:
        """Return whether both measured steps lie in their intervals."""
        return self.first.is_inside and self.other.is_inside


def is_right_way(measured: float, predicted: float) -> bool:
    """Return whether two ratios lie on the same side of 1, or neither of them far from it."""
    changes = measured - 1.0, predicted - 1.0
    return max(map(abs, changes)) <= SAME or changes[0] * changes[1] > 0


def choices_of(row: Mapping[str, str]) -> dict[str, str]:
    """Choices that a row states.  Modules to recompute say more than the kind of recomputation does."""
    pairs = (part.partition("=") for part in row.get("options", "").split(";"))
    stated = {name.strip(): value.strip() for name, sign, value in pairs if sign}
    stated |= {name: row[name] for name in CHOICES if row.get(name, "").strip() not in BLANKS}
    if "recompute_modules" in stated:
        stated.pop("recompute", None)
    return stated


def difference(first: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the one choice in which two differ; None where they differ in none, or in several."""
    differing = [name for name in first if other.get(name, first[name]) != first[name]]
    return differing[0] if len(differing) == 1 else None


def pairs_of(timed: Iterable[tuple[str, Mapping[str, str], Side]]) -> Iterator[Pair]:
    """Return all pairs among (source, row, side) of finished runs."""
    groups: dict[tuple[str, ...], list[Side]] = defaultdict(list)
    for source, row, side in timed:
        alike = (row[name] for name in row if name not in (*CHOICES, *NOT_COMPARED))
        groups[(source, *alike)].append(side)
    for (source, *_), sides in groups.items():
        for first, other in combinations(sides, 2):
            if choice := difference(first.choices, other.choices):
                yield Pair(source=source, choice=choice, first=first, other=other)


def sides(runs: Path) -> Iterator[tuple[str, Mapping[str, str], Side]]:
    """Return (source, row, side) of the finished runs of a table that are priced."""
    for run, row in with_answers(runs, read_runs(runs)):
        if row["status"] == "ok" and row["step_time_s"] and run.plan is not None:
            yield source_of(run), row, _side(run, row)


def _side(run: Run, row: Mapping[str, str]) -> Side:
    assert run.problem is not None
    assert run.plan is not None
    cost = estimate(run.problem, run.problem.batch([run.plan]))
    return Side(
        id=run.id,
        choices=choices_of(row),
        measured_s=float(row["step_time_s"]),
        predicted_s=float(cost.step_s[0]),
        low_s=float(cost.low_s[0]),
        high_s=float(cost.high_s[0]),
    )


def summary(pairs: Iterable[Pair]) -> Iterator[str]:
    """Lines: how the pairs of each source and choice change, in the median, and how often that was said."""
    yield "source         choice                 pairs  measured  predicted  error of ratio  right way  inside"
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.source, pair.choice].append(pair)
    for (source, choice), own in sorted(groups.items()):
        measured, predicted = (np.array([getattr(pair, name) for pair in own]) for name in ("measured", "predicted"))
        # Which of two is the first one is a matter of the table: changes count as they are, up or down.
        sizes = [100 * float(np.median(np.expm1(np.abs(np.log(ratios))))) for ratios in (measured, predicted)]
        error = 100 * float(np.median(np.abs(predicted / measured - 1.0)))
        shares = [float(np.mean([getattr(pair, name) for pair in own])) for name in ("is_right_way", "is_inside")]
        yield (
            f"{source:14} {choice:22} {len(own):5} {sizes[0]:8.1f}% {sizes[1]:9.1f}% {error:14.1f}% "
            f"{shares[0]:10.2f} {shares[1]:7.2f}"
        )


def listing(pairs: Iterable[Pair]) -> Iterator[str]:
    """Lines: every pair with its two ratios."""
    for pair in sorted(pairs, key=lambda pair: (pair.source, pair.choice, pair.first.id, pair.other.id)):
        values = [side.choices[pair.choice] for side in (pair.first, pair.other)]
        remark = f"{'' if pair.is_right_way else ' wrong way'}{'' if pair.is_inside else ' outside'}"
        ratios = f"{100 * (pair.measured - 1):+6.1f}% {100 * (pair.predicted - 1):+6.1f}%"
        runs = f"{pair.first.id} {pair.other.id}"
        yield f"{ratios}  {runs:28} {pair.choice}: {values[0]} -> {values[1]}{remark}"


def main() -> None:
    """Print all pairs of choices that the column `options` tells, and how all pairs of every source fare."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=RUNS, help="table of measured runs")
    arguments = parser.parse_args()
    pairs = list(pairs_of(sides(arguments.runs)))
    options = [pair for pair in pairs if pair.choice not in CHOICES]
    right, inside = sum(pair.is_right_way for pair in options), sum(pair.is_inside for pair in options)
    lines = ["change of the step: measured, predicted", *listing(options)]
    lines.append(f"\n{len(options)} pairs: {right} the right way, {inside} with both runs inside their 90 % intervals")
    blocks = ["\n".join(lines), "\n".join(summary(pairs))]
    print("\n\n".join(blocks))
    if arguments.report:
        write_report(arguments.report, "Matched pairs", f"by `benchmarks/pairs.py` on {len(pairs)} pairs", *blocks)


if __name__ == "__main__":
    main()
