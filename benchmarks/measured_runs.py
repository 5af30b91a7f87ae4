"""Measured runs by which predictions are judged."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from autoplan.runs.runs import Run

SHARED = Path(__file__).resolve().parents[2] / "shared"
RUNS = SHARED / "data" / "measured_runs.csv"


def with_answers(path: Path, runs: Iterable[Run]) -> Iterator[tuple[Run, dict[str, str]]]:
    """The runs of the table at `path`, each with its row, where the measured columns stand."""
    with path.open(newline="", encoding="utf-8") as stream:
        rows = {row["id"]: row for row in csv.DictReader(stream)}
    for run in runs:
        yield run, rows[run.id]


def source_of(run: Run) -> str:
    """Publisher of a run: its identifier without its number."""
    return re.sub(r"-\d+$", "", run.id)
