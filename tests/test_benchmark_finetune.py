"""Fine-tuning against published figures: memory of runs with adapters, and MLPerf's LoRA steps."""

from __future__ import annotations

import finetune


def test_memory_is_within_five_percent_of_published_figures_in_the_median() -> None:
    rows = list(finetune.compared_memory())
    assert len(rows) == 100
    assert finetune.median_error(rows) <= 0.05


def test_steps_of_mlperf_are_within_ten_percent_in_the_median() -> None:
    rows = list(finetune.compared_steps())
    assert len(rows) == 48
    assert finetune.median_error(rows) <= 0.10


def test_every_figure_says_where_it_is_from() -> None:
    for name in ("finetuning_runs.csv", "mlperf_lora_runs.csv"):
        assert all(row["source"] for row in finetune.read_rows(name))
