"""Why did the obvious plans lose?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import legal
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import BOOKS
from autoplan.search.baselines import baseline_plans, families
from autoplan.search.flags import with_flags
from autoplan.search.study import search
from autoplan.spec.blocks import Experts
from search_cases import DENSE, LARGE, make

MOE = replace(
    DENSE, name="moe", moe=Experts(num_experts=16, experts_per_token=2, expert_ffn_size=2048, shared_expert_ffn_size=0)
)


def test_every_family_is_told_by_its_best_plan() -> None:
    problem, space = make()
    result = search(problem, space)
    by_family = {baseline.family: baseline for baseline in baseline_plans(problem, space, result)}
    assert "FSDP alone" in by_family
    assert by_family["FSDP alone"].plan.plan.sharding == "zero3"
    for name, limits in families(problem, space.limits):
        family = replace(space, limits=limits)
        costs = estimate(problem, family.plans(family.cells())[0])
        fits = costs.verdict == 0
        if name not in by_family or not fits.any():
            continue
        least = float(np.min((costs.step_s / costs.batch.global_batch)[fits]))
        assert by_family[name].plan.s_per_sequence == pytest.approx(least)
        assert by_family[name].ratio == pytest.approx(least / result.rivals[0].s_per_sequence)
        assert by_family[name].excess_bytes == 0
    assert result.rivals[0].plan not in [baseline.plan.plan for baseline in by_family.values()]


def test_a_family_that_does_not_fit_says_by_how_much() -> None:
    problem, space = make(LARGE)
    alone = next(
        baseline
        for baseline in baseline_plans(problem, space, search(problem, space))
        if baseline.family.startswith("data par")
    )
    assert alone.plan.verdict == "oom"
    assert alone.excess_bytes == pytest.approx(alone.plan.memory_bytes - problem.capacity_bytes)
    assert alone.excess_bytes > 0


def test_experts_have_a_family_of_their_own() -> None:
    problem, space = make(MOE)
    assert "data and expert parallelism alone" in dict(families(problem, space.limits))
    assert "data and expert parallelism alone" not in dict(families(make()[0], space.limits))


def test_a_family_against_the_users_wishes_is_left_out() -> None:
    problem, space = make(fix=("tp=2",))
    baselines = baseline_plans(problem, space, search(problem, space))
    assert all(baseline.plan.plan.tp == 2 for baseline in baselines)
    free = with_flags(space.limits, fix=(), at_most=("tp=8",), forbid=())
    assert dict(families(problem, free))["FSDP alone"].of("sharding") == ("zero3",)


def test_a_framework_without_fsdp_has_no_family_of_it() -> None:
    problem, space = make()
    nanotron = replace(problem, framework=load_framework("nanotron"))
    assert "FSDP alone" not in dict(families(nanotron, space.limits))


def test_nanotron_admits_none_of_no_plans() -> None:
    _, space = make()
    none = replace(space.candidates(space.cells()[:1]).take(np.empty(0, dtype=np.int64)), layouts=())
    assert legal(BOOKS["nanotron"].rules, space.workload, none).tolist() == []
