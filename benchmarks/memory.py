"""How true is the memory model on measured runs?  Errors and out-of-memory verdicts by source, worst rows, ablation.

usage: python benchmarks/memory.py [--runs RUNS.csv] [--worst N]

Nothing is fitted here: the presets are judged as they ship.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from autoplan.cost.estimate import estimate
from autoplan.cost.memory import MEMORY_TERMS
from autoplan.plan import PlanBatch
from autoplan.read.runs import Run, read_runs
from autoplan.result import VERDICTS, CostEstimate
from autoplan.units import GIB

RUNS = Path(__file__).resolve().parents[2] / "shared" / "data" / "measured_runs.csv"
OOM = VERDICTS.index("oom")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--worst", type=int, default=3, help="rows with the largest errors to show of every source")
    options = parser.parse_args()
    if not options.runs.is_file():
        print(f"{options.runs} is not there: name a table with --runs", file=sys.stderr)
        return 1
    with options.runs.open(newline="", encoding="utf-8") as stream:
        answers = {row["id"]: row for row in csv.DictReader(stream)}
    by_source: dict[str, list[tuple[Run, CostEstimate, dict[str, str]]]] = defaultdict(list)
    for run in read_runs(options.runs):
        if run.problem and run.plan:
            cost = estimate(run.problem, PlanBatch.of([run.plan], run.problem.model.num_layers))
            by_source[re.sub(r"-\d+$", "", run.id)].append((run, cost, answers[run.id]))
    for source, entries in sorted(by_source.items()):
        show_source(source, entries, options.worst)
    return 0


def show_source(source: str, entries: list[tuple[Run, CostEstimate, dict[str, str]]], worst: int) -> None:
    """Errors of the peak, of the peak without each term, verdicts, and the worst rows of one source."""
    measured = [(run, cost, float(row["peak_memory_gib"])) for run, cost, row in entries if finished(row)]
    judged = [(int(cost.verdict[0]) == OOM, row["status"] == "oom") for _, cost, row in entries]
    hits = sum(said and true for said, true in judged)
    wrong = sum(said != true for (said, true), (_, _, row) in zip(judged, entries, strict=True) if row["status"] != "?")
    failed = sum(true for _, true in judged)
    if not measured and not failed:
        return
    print(f"\n{source}")
    if failed:
        print(f"  out of memory: {failed} runs, {hits} found, F1 {2 * hits / (2 * hits + wrong):.3f}")
    if not measured:
        return
    errors = [float(cost.logged_memory_bytes[0]) / GIB / peak - 1 for _, cost, peak in measured]
    print(f"  peak of {len(errors)} runs: median error {100 * np.median(np.abs(errors)):.2f} %, ", end="")
    print(
        f"90th percentile {100 * np.quantile(np.abs(errors), 0.9):.1f} %, median bias {100 * np.median(errors):+.1f} %"
    )
    on_device = measured[0][0].problem is not None and measured[0][0].problem.framework.logs_memory == "device"
    for name in MEMORY_TERMS:
        if name == "fixed" and not on_device:
            continue  # not a part of what this framework logs
        without = [
            (float(cost.logged_memory_bytes[0]) - float(cost.memory_terms_bytes[name][0])) / GIB / peak - 1
            for _, cost, peak in measured
        ]
        print(f"    without {name:12} {100 * np.median(np.abs(without)):6.2f} %")
    for at in np.argsort(-np.abs(errors))[:worst]:
        run, cost, peak = measured[at]
        terms = ", ".join(f"{name} {float(value[0]) / GIB:.1f}" for name, value in cost.memory_terms_bytes.items())
        plan = run.plan.describe() if run.plan else ""
        print(f"  {run.id}: {peak:.1f} GiB measured, {100 * errors[at]:+.0f} %: {plan} ({terms})")


def finished(row: dict[str, str]) -> bool:
    """Whether a row holds the measured peak of a run that ended well."""
    return row["status"] == "ok" and bool(row["peak_memory_gib"])


if __name__ == "__main__":
    sys.exit(main())
