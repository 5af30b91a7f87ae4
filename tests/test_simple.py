"""The simplest plan that is about as fast as the fastest one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autoplan
from autoplan.frameworks.common.rules import broken
from autoplan.search.plan_changes import prices
from autoplan.search.simple import MAX_SLOWER, _parts, simplest_first, simplified
from autoplan.search.space import Space
from autoplan.search.study import search
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan, SearchResult
from search_cases import DENSE, LARGE, make


def searched(**changes: Any) -> tuple[Problem, Space, SearchResult]:
    problem, space = make(forbid=(), **changes)
    return problem, space, search(problem, space, margin=0.05)


def priced(problem: Problem, **values: Any) -> RankedPlan:
    return prices(problem, [ParallelPlan(global_batch=64, **values)])[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": LARGE, "cluster": "h100-sxm:8x8", "batches": (256,)},
        {"model": LARGE, "cluster": "a100-sxm:4x8", "batches": (64, 128)},
        {"model": LARGE, "cluster": "h100-sxm:8x8", "batches": (256,), "fix": ("cp=2",)},
    ],
)
def test_the_simplest_plan_is_legal_as_safe_and_hardly_slower(changes: dict[str, Any]) -> None:
    problem, space, result = searched(**changes)
    fastest, named = result.rivals[0], simplest_first(problem, space, result)
    best = named.rivals[0]
    assert fastest.s_per_sequence <= best.s_per_sequence <= fastest.s_per_sequence * (1 + MAX_SLOWER)
    assert VERDICTS.index(best.verdict) <= VERDICTS.index(fastest.verdict)
    assert not broken(space.rules, problem.workload, best.plan)
    assert prices(problem, [best.plan])[0] == best
    assert named.ranked[0] == best
    if best == fastest:
        assert named == result
    else:
        assert named.certificate.slower_than_fastest == pytest.approx(best.s_per_sequence / fastest.s_per_sequence - 1)
        assert named.certificate.best_step_s == result.certificate.best_step_s
        assert fastest in named.rivals
    assert not changes.get("fix") or best.plan.cp == 2


def test_options_that_bring_next_to_nothing_go() -> None:
    """Layers of 24 over 2 stages of 5 chunks: 4 or 6 chunks of 3 or 2 layers are as fast."""
    problem, space = make(forbid=())
    start = priced(
        problem, pp=2, vp=5, schedule="interleaved", dp_shard=8, layers_per_chunk=(2, 2, 2, 3, 3, 3, 3, 2, 2, 2)
    )
    left, found = simplified(problem, space, start, start.s_per_sequence * (1 + MAX_SLOWER))
    assert found.plan.layers_per_chunk is None
    assert found.plan.vp in (4, 6)
    assert left == 1  # the interleaving
    offloaded = priced(problem, tp=2, sp=True, dp_shard=8, offload="optimizer")
    _, found = simplified(problem, space, offloaded, offloaded.s_per_sequence * (1 + MAX_SLOWER))
    assert found.plan.offload == "none"
    assert found.plan.tp == 2


def test_options_that_memory_needs_or_that_bring_much_stay() -> None:
    problem, space = make(model=LARGE, forbid=())
    needed = priced(problem, tp=8, sp=True, dp_shard=2, micro_batch=16, recompute="full")
    _, found = simplified(problem, space, needed, needed.s_per_sequence * (1 + MAX_SLOWER))
    assert (needed.verdict, found.plan.recompute) == ("fits", "full")
    interleaved = priced(problem, tp=4, sp=True, pp=4, vp=4, schedule="interleaved")
    _, found = simplified(problem, space, interleaved, interleaved.s_per_sequence * (1 + MAX_SLOWER))
    assert found.plan.schedule == "interleaved"


def test_of_equally_many_options_the_plan_with_contexts_wins_over_one_that_may_run_out_of_memory() -> None:
    problem, _ = make(forbid=())
    contexts, plain = priced(problem, cp=2, dp_shard=8), priced(problem, pp=2, dp_shard=8)
    assert _parts(1, plain) < _parts(1, contexts)
    risky = replace(plain, oom_probability=0.04)
    assert _parts(1, contexts) < _parts(1, risky) < _parts(2, contexts)


def test_limits_of_the_user_stay() -> None:
    problem, space = make(model=DENSE, forbid=(), fix=("offload=optimizer",))
    offloaded = priced(problem, tp=2, sp=True, dp_shard=8, offload="optimizer")
    _, found = simplified(problem, space, offloaded, offloaded.s_per_sequence * (1 + MAX_SLOWER))
    assert found.plan.offload == "optimizer"


def test_a_comparison_names_the_plan_that_a_search_does() -> None:
    """Where the fastest plan has more options than the simplest that is about as fast."""
    place: dict[str, Any] = {"global_batch": 128, "seq_len": 4096}
    fastest, found = (
        autoplan.search("llama3-8b", cluster="h100-sxm:3x8", **place, prefer=preference)
        for preference in ("fastest", "simple")
    )
    [row] = autoplan.compare("llama3-8b", clusters=["h100-sxm:3x8"], **place).outcomes
    assert row.outcome.best
    assert row.outcome.best.plan.plan == found.best.plan != fastest.best.plan
