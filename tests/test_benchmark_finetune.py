"""Fine-tuning against published figures: memory of runs with adapters, and MLPerf's LoRA steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import finetune

    yield finetune
    for name in ("finetune", "reports"):
        sys.modules.pop(name, None)


def test_memory_is_within_ten_percent_of_published_figures_in_the_median(finetune: Any) -> None:
    rows = list(finetune.compared_memory())
    assert len(rows) >= 40
    assert finetune.median_error(rows) <= 0.10


def test_steps_of_mlperf_are_within_twelve_percent_in_the_median(finetune: Any) -> None:
    rows = list(finetune.compared_steps())
    assert len(rows) >= 40
    assert finetune.median_error(rows) <= 0.12


def test_every_figure_says_where_it_is_from(finetune: Any) -> None:
    for name in ("finetuning_runs.csv", "mlperf_lora_runs.csv"):
        assert all(row["source"] for row in finetune.read_rows(name))
