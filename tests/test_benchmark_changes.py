"""Does nothing that is named beside a proven answer beat it, and would `benchmarks/changes.py` notice if it did?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoplan

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import changes

    yield changes
    for name in ("changes", "certificate", "drawn_problems", "reports"):
        sys.modules.pop(name, None)


def test_nothing_that_is_named_beside_an_answer_is_faster(changes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert changes.main(["--problems", "3", "--seed", "2"]) == 0
    assert "3 problems (" in capsys.readouterr().out


def test_a_slower_answer_is_told_with_the_change_that_beats_it(changes: Any) -> None:
    place = {"cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096}
    best = autoplan.search("llama3-8b", **place)
    assert best.file.certificate
    slow = replace(best.file.certificate, slower_than_fastest=None)
    worst = autoplan.search("llama3-8b", **place, fix=["recompute=full", "micro_batch=1"])
    file = replace(worst.file, certificate=slow)
    answer = replace(worst, file=file)
    case = changes.Case(command="a problem", batch="64", space_flags={}, problem=worst.problem, space=None)
    tally = changes.Tally()
    changes.compare(tally, case, answer, changes.explained(answer))
    assert tally.outcomes["explain"]["faster"] >= 1
    assert any("a problem: explain names" in wrong and "recompute" in wrong for wrong in tally.wrong), tally.wrong


def test_numerics_and_stated_limits_are_told_apart(changes: Any) -> None:
    """What `explain` looks at beyond the space is left out by a limit, which the certificate has."""
    answer = autoplan.search("llama3-8b", cluster="h100-sxm:2x8", global_batch=64, seq_len=4096, prefer="fastest")
    problem, best = answer.problem, answer.plan
    space, certificate = changes.make_space(problem, 64), answer.file.certificate
    assert changes.is_in(space, best)
    assert changes.left_out(problem, space, certificate, best, best) == ""
    narrow = replace(best, moment_dtype="bf16")
    assert (
        changes.left_out(problem, space, certificate, best, narrow) == "moment_dtype changes the numerics of training"
    )
    waiting = replace(best, grad_reduce_overlap=False)
    assert not changes.is_in(space, waiting)
    assert changes.left_out(problem, space, certificate, best, waiting) == ""
    large = replace(best, micro_batch=32, tp=8, sp=True, pp=1, vp=1, schedule="1f1b", dp_shard=2, layers_per_chunk=None)
    assert "micro_batch is limited" in changes.left_out(
        problem, space, certificate, replace(large, micro_batch=4), large
    )
