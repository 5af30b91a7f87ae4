"""The curse that `benchmarks/curse.py` finds where there is one, and where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.curse import Choice, correction


def choice_of(source: str, predicted: list[float], error: list[float], verdict: list[int] | None = None) -> Choice:
    return Choice(
        source=source,
        predicted=np.array(predicted),
        error=np.array(error),
        inside=np.full(len(predicted), True),
        verdict=np.array(verdict or [0] * len(predicted)),
    )


def test_the_pick_is_the_fastest_of_those_that_fit() -> None:
    risky = choice_of("a", [0.0, 0.1, 0.2], [0.5, 0.3, 0.1], [1, 0, 0])
    assert risky.picked == 1
    assert risky.curse == pytest.approx(0.3 - 0.3)
    assert choice_of("a", [0.0, 0.1], [0.5, 0.1], [1, 2]).picked == 0


def test_errors_that_have_nothing_to_do_with_the_steps_make_picks_too_fast() -> None:
    """Where 16 plans take as long, the one that is predicted fastest errs by the least of 16 normal variables."""
    random = np.random.default_rng(1)
    errors = 0.1 * random.standard_normal((400, 16))
    alike = [choice_of("a", (-error).tolist(), error.tolist()) for error in errors]
    assert np.mean([choice.curse for choice in alike]) == pytest.approx(0.1 * 1.766, rel=0.05)
    assert np.median(np.concatenate([choice.slopes for choice in alike])) == pytest.approx(0.0, abs=1e-9)
    apart = [choice_of("b", random.standard_normal(16).tolist(), error.tolist()) for error in errors]
    assert abs(np.mean([choice.curse for choice in apart])) < 0.02
    assert correction({"a": alike, "b": apart}, without="b") == pytest.approx(0.1 * 1.766, rel=0.05)
