"""The fit of the intervals (`benchmarks/interval_fit.py`)."""

from __future__ import annotations

import numpy as np
import pytest
from interval_fit import Unseen, fitted_spreads

from autoplan.cost.spreads import GENERAL_PARTS, NORMAL_90, Sides


def test_plain_runs_have_a_symmetric_interval_of_their_own_beside_runs_that_err_upwards() -> None:
    random, num_sources, num_runs = np.random.default_rng(7), 40, 50
    is_other_code = np.repeat(np.arange(num_sources) % 2 == 1, num_runs)
    error = np.where(is_other_code, np.abs(random.normal(0.0, 0.5, len(is_other_code))), 0.0)
    error = np.where(is_other_code, error, random.normal(0.0, 0.1, len(is_other_code)))
    parts = np.zeros((len(error), len(GENERAL_PARTS)))
    parts[:, GENERAL_PARTS.index("any_step")] = 1.0
    parts[:, GENERAL_PARTS.index("own_layers")] = is_other_code
    none = np.zeros(len(error))
    sources = np.repeat([f"source {at}" for at in range(num_sources)], num_runs)
    unseen = Unseen(sources=sources, error=error, first_error=error, own=Sides(none, none), parts=parts)
    fitted = fitted_spreads(unseen)
    below, above = unseen.plain.sides(fitted)
    assert set(unseen.plain.sources) == {f"source {at}" for at in range(0, num_sources, 2)}
    assert below == pytest.approx(above)
    assert above == pytest.approx(0.1, rel=0.1)
    # Of 20 plain sources and the next, which is half outside, a tenth is.
    assert unseen.plain.inside(unseen.plain.error, fitted).mean() == pytest.approx(1 - (0.1 * 21 - 0.5) / 20, abs=0.01)
    assert fitted.below < 0.5
    beyond = error[is_other_code] > 1.645 * unseen.sides(fitted).above[is_other_code]
    assert beyond.mean() == pytest.approx(0.05, abs=0.03)


def test_intervals_are_the_wider_the_fewer_sources_are_known() -> None:
    random = np.random.default_rng(7)
    parts = np.zeros((1, len(GENERAL_PARTS)))
    parts[0, GENERAL_PARTS.index("any_step")] = 1.0
    spreads = []
    for num_sources in (8, 32, 256):
        error = np.repeat(random.permutation(np.linspace(-0.2, 0.2, num_sources)), 10)
        none = np.zeros(len(error))
        sources = np.repeat([f"source {at}" for at in range(num_sources)], 10)
        own, same = Sides(none, none), np.repeat(parts, len(error), axis=0)
        unseen = Unseen(sources=sources, error=error, first_error=error, own=own, parts=same)
        spreads.append(unseen.sides(fitted_spreads(unseen)).above[0] * NORMAL_90)
    assert spreads[0] > spreads[1] > spreads[2]
    assert spreads[2] == pytest.approx(0.9 * 0.2, rel=0.01)
