"""Is traffic of experts hidden behind shared experts as far as these take, and is the switch read and written?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autoplan.api.problem import make_problem
from autoplan.cost.collectives.expert_parallel import shown_expert_parallel_s
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.spec.plan import ParallelPlan, PlanBatch
from test_megatron_read import read

PROBLEM = make_problem("deepseek-v3", cluster="h100-sxm:8x8", seq_len=4096)
PLAN = ParallelPlan(global_batch=64, ep=64, dp_shard=64)
OVERLAPPED = dataclasses.replace(PLAN, shared_expert_overlap=True)


def batch_of(*plans: ParallelPlan) -> PlanBatch:
    return PlanBatch.of(plans, PROBLEM.model.num_layers)


def test_shared_experts_hide_no_more_traffic_than_they_take() -> None:
    batch, traffic_s = batch_of(PLAN, OVERLAPPED), np.full(2, 3e-3)
    short, long = (shown_expert_parallel_s(PROBLEM, batch, traffic_s, traffic_s, np.full(2, s)) for s in (1e-3, 9e-3))
    assert short[0] == long[0] == 3e-3
    assert long[1] < short[1] < 3e-3
    assert (3e-3 - long[1]) / (3e-3 - short[1]) == pytest.approx(3.0)


def test_a_step_becomes_shorter_and_needs_no_more_memory() -> None:
    costs = estimate(PROBLEM, batch_of(PLAN, OVERLAPPED))
    assert costs.step_s[1] < costs.step_s[0]
    assert costs.memory_bytes[1] == costs.memory_bytes[0]


@pytest.mark.parametrize(
    "changes",
    [{"ep": 1}, {"dispatcher": "deepep"}, {"recompute": "selective", "recompute_modules": ("shared_experts",)}],
)
def test_what_megatron_core_does_not_overlap_is_refused(changes: dict[str, object]) -> None:
    assert not broken(RULES, PROBLEM.workload, OVERLAPPED)
    plan = dataclasses.replace(OVERLAPPED, **changes)  # type: ignore[arg-type]
    assert any("shared_expert_overlap needs shared experts" in text for text in broken(RULES, PROBLEM.workload, plan))


def test_the_switch_is_read() -> None:
    experts = "--num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
    assert read(f"{experts} --moe-shared-expert-overlap").plan.shared_expert_overlap
    assert not read(experts).plan.shared_expert_overlap
