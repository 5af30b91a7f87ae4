"""The fit of the intervals (`benchmarks/interval_fit.py`)."""

from __future__ import annotations

import numpy as np
import pytest
from interval_fit import MARGIN, Unseen, fitted_spreads, interval_score

from autoplan.base.arrays import Floats
from autoplan.cost.spreads import FACTORS, NORMAL_90, Sides


def unseen_of(error: Floats, num_runs: int, **kinds: Floats) -> Unseen:
    """Runs in sources of `num_runs`, with these exponents of factors."""
    none = np.zeros(len(error))
    sources = np.repeat([f"source {at}" for at in range(len(error) // num_runs)], num_runs)
    exponents = np.column_stack([kinds.get(name, none) for name in FACTORS])
    return Unseen(sources=sources, error=error, first_error=error, own=Sides(none, none), kinds=exponents)


def test_the_interval_score_is_the_width_and_twenty_times_what_is_beyond() -> None:
    score = interval_score(np.array([0.0, 0.3, -0.4]), np.full(3, 0.2), np.full(3, 0.1))
    assert score == pytest.approx([0.3, 0.3 + 20 * 0.2, 0.3 + 20 * 0.2])


def test_other_code_that_errs_upwards_has_a_longer_upper_side_and_the_lower_one_of_plain_runs() -> None:
    random, num_sources, num_runs = np.random.default_rng(7), 60, 50
    is_own = np.repeat(np.arange(num_sources) % 2 == 1, num_runs)
    plain = random.normal(0.0, 0.1, len(is_own))
    error = np.where(is_own & (plain > 0), 4 * plain, plain)
    fitted = fitted_spreads(unseen_of(error, num_runs, own_layers=is_own.astype(np.float64)))
    below, above = fitted.sides(np.eye(len(FACTORS))[[FACTORS.index("own_layers")]])
    # Of 60 sources and the next, a quarter of which is beyond either end, a twentieth is.
    assert fitted.plain == pytest.approx(MARGIN * 0.1, rel=0.06)
    assert (below[0], above[0]) == pytest.approx((fitted.plain, MARGIN * 0.4), rel=0.06)
    assert (fitted.halving, fitted.mixture) == pytest.approx((1.0, 1.0))  # of which no run tells


def test_intervals_are_the_wider_the_fewer_sources_are_known() -> None:
    random = np.random.default_rng(7)
    ends = []
    for num_sources in (8, 32, 256):
        error = np.repeat(random.permutation(np.linspace(-0.2, 0.2, num_sources)), 10)
        ends.append(fitted_spreads(unseen_of(error, 10)).plain * NORMAL_90)
    assert ends[0] > ends[1] > ends[2]
    assert ends[2] == pytest.approx(MARGIN * 0.9 * 0.2, rel=0.05)
