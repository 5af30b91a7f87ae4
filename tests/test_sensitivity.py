"""Which number would change the answer?  Checked by searches with that number moved."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.api.problem import make_space
from autoplan.base.arrays import Floats
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.search.choice import kind_of
from autoplan.search.mixed_search import search_mixed
from autoplan.search.sensitivity import (
    MAX_CHANGE,
    first_crossing,
    mixed_sensitivity,
    part_quantities,
    quantities,
    sensitivity,
)
from autoplan.search.simple import MAX_SLOWER
from autoplan.search.space import Space
from autoplan.search.study import MARGIN, search
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Sensitivity
from mixed_cases import problem_of, scaled
from search_cases import DENSE, LARGE, make

SMALL = ModelSpec(name="small", num_layers=8, hidden_size=2048, vocab_size=32000, num_heads=16, ffn_size=8192)


def crossing(constant: list[float], growing: list[float], end: float) -> tuple[float, int] | None:
    """Crossing of plans whose times are lines: parts that do not change and parts that grow."""
    still, moving = np.array(constant), np.array(growing)
    return first_crossing(lambda growth: still + growth * moving, still + moving, moving, end)


def test_lines_cross_where_they_do() -> None:
    assert crossing([1.0, 2.1], [1.0, 0.5], MAX_CHANGE) is None
    found = crossing([1.0, 1.6], [1.0, 0.5], MAX_CHANGE)
    assert found is not None
    assert found[0] == pytest.approx(1.2)
    assert found[1] == 1
    assert crossing([1.0, 1.6], [1.0, 0.5], 1 / MAX_CHANGE) is None
    found = crossing([1.0, 0.5, 0.9], [1.0, 1.6, 1.2], 1 / MAX_CHANGE)
    assert found is not None
    assert found[0] == pytest.approx(5 / 6, rel=1e-3)
    assert found[1] == 1


def test_what_hides_at_first_shows_later() -> None:
    # Row 0 hides what grows until 1.5; on from there it grows like it.
    def times(growth: float) -> Floats:
        return np.array([max(1.5, growth), 1.7])

    found = first_crossing(times, times(1.0), np.zeros(2), MAX_CHANGE)
    assert found is not None
    assert found[0] == pytest.approx(1.7, rel=1e-3)


def test_what_shows_at_first_hides_later() -> None:
    # Row 1 gains on row 0 until 1.2, and never reaches it.
    def times(growth: float) -> Floats:
        return np.array([1.0, max(1.05, 1.15 - (growth - 1.0) / 2)])

    assert first_crossing(times, times(1.0), np.array([0.0, -0.5]), MAX_CHANGE) is None


lines = st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)), min_size=2, max_size=5)


@given(lines, st.sampled_from([MAX_CHANGE, 1 / MAX_CHANGE]))
@settings(max_examples=20, deadline=None)
def test_the_first_of_several_lines_is_found(rows: list[tuple[float, float]], end: float) -> None:
    still, moving = np.array(rows).T + 0.01
    still[1:] += np.maximum(1.001 * (still[0] + moving[0]) - still[1:] - moving[1:], 0.0)  # row 0 is the best now
    found = first_crossing(lambda growth: still + growth * moving, still + moving, moving, end)
    grid = np.linspace(1.0, end, 4001)
    ahead = (still[1:, None] + grid * moving[1:, None] <= still[0] + grid * moving[0]).any(axis=0)
    if found is None:
        assert not ahead[:-1].any()
    else:
        first = grid[int(ahead.argmax())] if ahead.any() else end
        assert still[found[1]] + found[0] * moving[found[1]] == pytest.approx(still[0] + found[0] * moving[0], rel=2e-4)
        # A line that crosses at a shallow angle is close for a while.
        level = still[:, None] + np.array([found[0], first]) * moving[:, None]
        assert level[0, 1] == pytest.approx(level[1:, 1].min(), rel=2e-3)


def winner(problem: Problem, space: Space) -> ParallelPlan:
    return search(problem, space).rivals[0].plan


@pytest.fixture(
    scope="module", params=[(DENSE, "h100-sxm:2x8", (64,)), (LARGE, "a100-sxm:2x8", (48,))], ids=["16 H100", "16 A100"]
)
def answered(request: pytest.FixtureRequest) -> tuple[Problem, Space, ParallelPlan, Sensitivity[ParallelPlan]]:
    problem, space = make(*request.param)
    result = search(problem, space)
    return problem, space, result.rivals[0].plan, sensitivity(problem, space, result, MARGIN)


@pytest.mark.filterwarnings("error")
def test_a_simpler_plan_that_is_not_the_fastest_wins_until_its_limit() -> None:
    problem, space = make(LARGE, "a100-sxm:2x8", (48,))
    result = search(problem, space)
    fastest, *slower_plans = result.rivals
    simpler = next(plan for plan in slower_plans if kind_of(plan.plan) != kind_of(fastest.plan))
    rivals = (simpler, *(plan for plan in result.rivals if plan is not simpler))
    share = simpler.s_per_sequence / fastest.s_per_sequence - 1.0
    assert 0.0 < share < MAX_SLOWER
    certificate = replace(result.certificate, slower_than_fastest=share)
    found = sensitivity(problem, space, replace(result, rivals=rivals, certificate=certificate), MARGIN)
    assert found.flips
    assert all(abs(flip.factor - 1.0) > 1e-3 for flip in found.flips)


def test_flips_are_where_searches_flip(
    answered: tuple[Problem, Space, ParallelPlan, Sensitivity[ParallelPlan]],
) -> None:
    problem, space, best, found = answered
    by_name = {quantity.name: quantity for quantity in quantities(problem)}
    flips = [flip for flip in found.flips if flip.is_proven and flip.quantity in by_name]
    assert flips or problem.model is not LARGE
    for flip in flips:
        quantity = by_name[flip.quantity]
        growth = 1.0 / flip.factor if quantity.is_rate else flip.factor
        before = winner(quantity.slower(problem, 1 + (growth - 1) * 0.98), space)
        after = winner(quantity.slower(problem, 1 + (growth - 1) * 1.02), space)
        assert kind_of(before) == kind_of(best)
        assert kind_of(after) == kind_of(flip.plan)


def test_no_search_flips_before_the_first_flip_that_is_told(
    answered: tuple[Problem, Space, ParallelPlan, Sensitivity[ParallelPlan]],
) -> None:
    problem, space, best, found = answered
    for quantity in quantities(problem):
        factors = [flip.factor for flip in found.flips if flip.quantity == quantity.name and flip.factor < 1]
        least = 1.02 * max(factors, default=1 / 1.04)  # that the margin covers
        growth = 1.0 / least if quantity.is_rate else least
        assert kind_of(winner(quantity.slower(problem, growth), space)) == kind_of(best)


def test_memory_flips_are_where_searches_flip(
    answered: tuple[Problem, Space, ParallelPlan, Sensitivity[ParallelPlan]],
) -> None:
    problem, space, best, found = answered
    device = problem.cluster.device
    flips = [flip for flip in found.flips if flip.quantity == "device memory" and flip.is_proven]
    assert flips
    for flip in flips:

        def with_memory(share: float) -> Problem:
            size = share * device.visible_memory_bytes
            return replace(problem, cluster=replace(problem.cluster, device=replace(device, visible_memory_bytes=size)))

        nearer = math.copysign(1e-6, 1.0 - flip.factor)
        assert kind_of(winner(with_memory(flip.factor * (1 + nearer)), space)) == kind_of(best)
        assert kind_of(winner(with_memory(flip.factor * (1 - nearer)), space)) == kind_of(flip.plan)


def test_elasticities_add_up_to_what_rests_on_hardware() -> None:
    problem, space = make(SMALL, "h100-sxm:1x1", batches=(4,))
    result = search(problem, space)
    best = result.rivals[0]
    found = sensitivity(problem, space, result, MARGIN).elasticities
    fixed = best.terms_s["overhead"] / best.step_s
    grown = sum(
        -value if quantity.is_rate else value for quantity in quantities(problem) for value in [found[quantity.name]]
    )
    assert grown == pytest.approx(1 - fixed, abs=2e-3)
    assert found["NVLink bandwidth"] == found["network latency"] == 0.0
    assert found["matrix-product rate"] < -0.5


def test_an_only_kind_of_plan_stays() -> None:
    problem, space = make(SMALL, "h100-sxm:1x1", batches=(1,), fix=("recompute=none", "sharding=none"))
    result = search(problem, space)
    assert sensitivity(problem, space, result, MARGIN).flips == ()


def test_flips_of_a_mixed_cluster_are_where_another_structure_wins() -> None:
    problem = problem_of(scaled("a100-sxm:1x2", "one"), scaled("a100-sxm:1x2", "two", speed=0.5))
    result = search_mixed(problem, 16, partial(make_space, global_batch=16))
    found = mixed_sensitivity(problem, result)
    by_name = {quantity.name: quantity for quantity in part_quantities(problem)}
    assert found.elasticities.keys() == by_name.keys()
    assert found.elasticities["matrix-product rate of one"] < -0.1
    assert found.flips
    for flip in found.flips:
        quantity = by_name[flip.quantity]
        growth = 1 / flip.factor if quantity.is_rate else flip.factor
        plans = [result.ranked[0].plan, flip.plan]
        before, beyond = (
            estimate_mixed(quantity.slower(problem, growth ** (1 + step)), plans) for step in (-0.02, 0.02)
        )
        assert before[0].s_per_sequence < before[1].s_per_sequence * (1 + 1e-4)
        assert beyond[1].s_per_sequence < beyond[0].s_per_sequence * (1 + 1e-4)
        assert not flip.is_proven
