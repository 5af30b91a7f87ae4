"""Do prices keep to the laws of `benchmarks/metamorphic.py`, and would it notice where they did not?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoplan.spec.problem import Problem

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def metamorphic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import metamorphic

    yield metamorphic
    for name in ("metamorphic", "certificate", "reports"):
        sys.modules.pop(name, None)


def test_half_a_dozen_random_problems_break_no_law(metamorphic: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert metamorphic.main(["--problems", "6", "--plans", "20", "--seed", "3"]) == 0
    assert "6 problems" in capsys.readouterr().out


def with_slower_kernels(problem: Problem) -> Problem:
    return replace(problem, cluster=replace(problem.cluster, device=problem.cluster.device.slowed(0.5)))


def test_a_broken_law_is_told_with_its_plan(metamorphic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    law = metamorphic.never_slower("slower kernels", with_slower_kernels)
    monkeypatch.setattr(metamorphic, "LAWS", (law,))
    tally = metamorphic.Tally()
    ((case, plans),) = metamorphic.cases(np.random.default_rng(3), 1, 5)
    metamorphic.check(tally, case, plans)
    assert tally.broken["slower kernels: no plan is slower"] == len(plans)
    (example,) = tally.examples
    assert "micro-batch" in example
    assert case.command in example
