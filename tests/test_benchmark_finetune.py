"""Fine-tuning against published runs: what is trained is read from the table, and the figures hold."""

from __future__ import annotations

import csv

import finetune
import pytest

from autoplan.runs.runs import read_runs


@pytest.fixture(scope="module")
def rows() -> list[finetune.Compared]:
    return list(finetune.compared())


def test_every_finished_run_has_a_price(rows: list[finetune.Compared]) -> None:
    assert len(rows) > 300
    assert [row.run.id for row in rows if row.prediction.step_time_s is None] == []


def test_memory_that_was_looked_at_is_within_seven_percent_in_the_median(rows: list[finetune.Compared]) -> None:
    learnt = [row.memory_error for row in rows if row.half != "blind"]
    assert finetune.median_error(learnt) <= 0.07


def test_steps_of_mlperf_are_within_eleven_percent_in_the_median(rows: list[finetune.Compared]) -> None:
    steps = [row.time_error for row in rows if row.source.startswith("mlperflora")]
    assert len(steps) == 71
    assert finetune.median_error(steps) <= 0.11


def test_every_run_says_where_it_is_from_and_what_it_trains() -> None:
    with finetune.RUNS.open(newline="", encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    assert len({row["id"] for row in cells}) == len(cells)
    assert all(row["source"] and row["locator"] and "finetune=" in row["options"] for row in cells)
    assert all(run.problem and run.problem.training.finetuning for run in read_runs(finetune.RUNS))
