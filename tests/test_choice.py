"""Which plans can the model not tell from the best, and which one is best at a quantile?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autoplan.cost.estimate import estimate
from autoplan.cost.spreads import NORMAL_90, component_shares
from autoplan.search.choice import (
    OWN_SPREAD,
    apart,
    at_quantile,
    choice_of,
    distinct,
    kind_of,
    normal_z,
    ratio_spreads,
    robust_margin,
    robust_order,
)
from autoplan.search.ranking import ranked, seconds_per_sequence
from autoplan.search.study import search
from autoplan.spec.calibration import Calibration
from autoplan.spec.search_result import SearchResult
from autoplan.spec.terms import COMPONENTS, STEP_TERMS
from search_cases import LARGE, make

Z90 = 1.2815515655446004  # of a one-sided 90 % quantile


@pytest.fixture(scope="module")
def found() -> SearchResult:
    problem, space = make()
    return search(problem, space, margin=0.3)


def test_every_term_of_a_step_belongs_to_one_component_or_to_all() -> None:
    named = [name for names in COMPONENTS.values() for name in names]
    assert len(set(named)) == len(named)
    assert set(STEP_TERMS) - set(named) == {"stragglers", "uneven_lengths", "input", "encoder_ranks"}


def test_a_ratio_is_as_unsure_as_what_the_plans_spend_on_different_things() -> None:
    terms = {name: np.zeros(3) for name in STEP_TERMS}
    terms["gemm"] = np.array([8.0, 10.0, 0.8])
    terms["tp_communication"] = np.array([2.0, 0.0, 0.2])
    parts = component_shares(terms)
    assert apart(parts, parts[0]) == pytest.approx([0.0, 0.2, 0.0])
    variances = np.full(3, 2 * 0.25**2)
    expected = [OWN_SPREAD, math.hypot(OWN_SPREAD, math.sqrt(0.2 * 0.125)), OWN_SPREAD]
    assert ratio_spreads(apart(parts, parts[0]), variances) == pytest.approx(expected)


def test_slower_hardware_changes_no_ratio() -> None:
    rng = np.random.default_rng(0)
    terms = {name: rng.random(5) for name in STEP_TERMS}
    slower = {name: 1.7 * value for name, value in terms.items()}
    assert component_shares(slower) == pytest.approx(component_shares(terms))


def test_plans_that_share_nothing_are_independent() -> None:
    terms = {name: np.zeros(2) for name in STEP_TERMS} | {"gemm": np.array([1.0, 0.0]), "launch": np.array([0.0, 1.0])}
    parts = component_shares(terms)
    assert apart(parts[:1], parts[1]) == 1.0


def test_contenders_are_the_plans_of_other_kinds_in_the_interval(found: SearchResult) -> None:
    choice = choice_of(found)
    best, *others = distinct(found)
    assert best == found.rivals[0]
    assert choice.runner_up == others[0]
    assert choice.ratio == pytest.approx(others[0].s_per_sequence / best.s_per_sequence)
    kinds = [kind_of(best.plan), *(kind_of(contender.plan) for contender in choice.contenders)]
    assert len(set(kinds)) == len(kinds)
    assert all(contender.low <= 1 <= contender.ratio <= contender.high for contender in choice.contenders)
    assert [contender.ratio for contender in choice.contenders] == sorted(
        contender.ratio for contender in choice.contenders
    )
    assert 0 < choice.num_contenders < len(others)
    assert choice.is_close == (choice.width >= choice.ratio)


def test_less_spread_of_the_calibration_means_fewer_contenders(found: SearchResult) -> None:
    def sharper(spread: float) -> SearchResult:
        width = math.exp(NORMAL_90 * spread)
        plans = [
            tuple(replace(plan, low_s=plan.step_s / width, high_s=plan.step_s * width) for plan in ranking)
            for ranking in (found.ranked, found.rivals)
        ]
        return replace(found, ranked=plans[0], rivals=plans[1])

    counts = [choice_of(sharper(spread)).num_contenders for spread in (0.01, 0.1, 0.25, 0.5)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_an_only_plan_has_no_runner_up(found: SearchResult) -> None:
    choice = choice_of(replace(found, ranked=found.ranked[:1], rivals=found.rivals[:1]))
    assert choice.runner_up is None
    assert choice.num_contenders == 0
    assert not choice.is_close


@pytest.mark.parametrize("quantile", [0.5, 0.8, 0.99])
def test_the_robust_choice_is_that_of_a_plain_enumeration(quantile: float) -> None:
    # Pipelines are so unsure that plans without one win at high quantiles.
    unsure = Calibration(time_spread=0.02, pipeline_time_spread=0.4)
    problem, space = make(LARGE, "h100-sxm:4x8", fix=("cross_entropy_fusion=native",), calibration=unsure)
    margin = robust_margin(problem, quantile)
    result = robust_order(problem, search(problem, space, margin=margin), quantile)
    batch, _ = space.plans(space.cells())
    costs = estimate(problem, batch)
    spread = np.log(costs.high_s / costs.step_s) / NORMAL_90
    value = seconds_per_sequence(costs) * np.exp(normal_z(quantile) * spread)
    assert result.certificate.proven
    assert result.certificate.quantile == quantile
    best = result.rivals[0]
    assert at_quantile(best, normal_z(quantile)) == pytest.approx(value[costs.verdict == 0].min(), rel=1e-8)
    assert result.certificate.best_step_s == best.step_s
    assert (best.plan.pp == 1) == (quantile > 0.5)


def test_a_robust_choice_is_proven_only_where_no_plan_of_a_cell_may_be_surer() -> None:
    """Plans that expose more than calibrated ones have spreads of their own, and a cell holds many."""
    known = Calibration(time_spread=0.05, exposed_share=0.0)
    problem, space = make(LARGE, "h100-sxm:4x8", calibration=known)
    result = robust_order(problem, search(problem, space, margin=0.2), 0.9)
    batch, _ = space.plans(space.cells())
    costs = estimate(problem, batch)
    value = seconds_per_sequence(costs) * np.exp(Z90 * np.log(costs.high_s / costs.step_s) / NORMAL_90)
    best = at_quantile(result.rivals[0], Z90)
    assert not result.certificate.proven or best == pytest.approx(value[costs.verdict == 0].min(), rel=1e-8)
    familiar = replace(problem, calibration=Calibration(time_spread=0.05))
    assert robust_order(familiar, search(familiar, space, margin=0.2), 0.9).certificate.proven


def test_a_quantile_needs_a_margin_where_spreads_differ() -> None:
    alike, _ = make(calibration=Calibration(time_spread=0.1))
    assert robust_margin(alike, 0.9) == 0.0
    unlike, _ = make(calibration=Calibration(time_spread=0.1, pipeline_time_spread=0.3))
    assert robust_margin(unlike, 0.9) == pytest.approx(math.expm1(Z90 * 0.2))


def test_what_a_full_ranking_may_have_dropped_is_not_proven() -> None:
    problem, space = make(calibration=Calibration(time_spread=0.05, pipeline_time_spread=0.2))
    result = search(problem, space)
    certificate = replace(result.certificate, priced=10**6)
    near = tuple(rival for rival in result.rivals if rival.s_per_sequence < 1.05 * result.rivals[0].s_per_sequence)
    assert not robust_order(problem, replace(result, rivals=near, certificate=certificate), 0.9).certificate.proven


def test_figures_of_a_plan_are_those_that_the_spread_was_made_of() -> None:
    problem, space = make(calibration=Calibration(time_spread=0.07))
    batch, _ = space.plans(space.cells()[:1])
    ranked_plan = ranked(problem, estimate(problem, batch), [0])[0]
    assert at_quantile(ranked_plan, 1.0) == pytest.approx(ranked_plan.s_per_sequence * math.exp(0.07))
