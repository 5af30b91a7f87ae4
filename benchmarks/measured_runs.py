"""Which measured runs are predictions judged by, and what was measured of them?"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from autoplan.read.runs import Run

SHARED = Path(__file__).resolve().parents[2] / "shared"
RUNS = SHARED / "data" / "measured_runs.csv"


# What is called ground truth and was computed.  Rows of vTrain's table of one node that differ in data-parallel ranks
# alone differ by what its simulator's table of all-reduces says, to the microsecond and whatever the micro-batches.
# For more than 1 GiB of gradients more ranks take less time, as its formula has it and no ring does.
# Source: VIA-Research/vTrain f8dda84: data/ground_truth_single.csv, src/predictor.py compute_comm_time, trace/a100.
NOT_MEASURED = ("vTrain (MICRO 2024) single-node ground truth",)


def with_answers(path: Path, runs: Iterable[Run]) -> Iterator[tuple[Run, dict[str, str]]]:
    """The runs of the table at `path` that were measured, each with its row, where the measured columns stand."""
    with path.open(newline="", encoding="utf-8") as stream:
        rows = {row["id"]: row for row in csv.DictReader(stream)}
    for run in runs:
        if rows[run.id].get("source") not in NOT_MEASURED:
            yield run, rows[run.id]


def write_measured(path: Path, to: Path) -> None:
    """Write the table at `path` without the rows that were not measured."""
    with path.open(newline="", encoding="utf-8") as stream, to.open("w", newline="", encoding="utf-8") as copy:
        reader = csv.DictReader(stream)
        writer = csv.DictWriter(copy, reader.fieldnames or ())
        writer.writeheader()
        writer.writerows(row for row in reader if row.get("source") not in NOT_MEASURED)


def source_of(run: Run) -> str:
    """Who published a run: its identifier without its number."""
    return re.sub(r"-\d+$", "", run.id)
