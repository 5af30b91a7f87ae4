"""Do delayed weight gradients hide messages between passes that end together, and is the switch read and written?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import autoplan
from autoplan.api.problem import make_problem
from autoplan.cost.estimate import estimate
from autoplan.cost.pipeline.closed_forms import pipeline_s
from autoplan.cost.stages import lay_out
from autoplan.cost.step import LaidOutPipelines
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.spec.plan import ParallelPlan
from pipeline_oracle import Action, simulate
from test_megatron_read import read

PROBLEM = make_problem("deepseek-v3", cluster="h100-sxm:32x8", seq_len=4096, framework="megatron-core")
PLAN = ParallelPlan(
    global_batch=1024, pp=8, vp=2, schedule="interleaved", ep=32, dp_shard=32, ep_overlap=True, sharding="zero1"
)
DELAYED = dataclasses.replace(PLAN, delay_wgrad=True)


def terms_of(plan: ParallelPlan) -> dict[str, float]:
    return {name: float(value[0]) for name, value in estimate(PROBLEM, PROBLEM.batch([plan])).terms_s.items()}


def combined(p: int, v: int, m: int) -> list[list[Action]]:
    """Megatron-LM's passes that run together: one more forward to warm up than `interleaved`, then both as one."""
    turns = [(i, chunk) for start in range(0, m, p) for chunk in range(v) for i in range(start, start + p)]
    ranks = []
    for rank in range(p):
        warmup = min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v)
        forwards = [("F", i, chunk * p + rank) for i, chunk in turns]
        backwards = [("B", i, (v - 1 - chunk) * p + rank) for i, chunk in turns]
        together: list[Action] = [*zip(forwards[warmup:], backwards, strict=False)]
        alone: list[Action] = [(forward,) for forward in forwards[:warmup]]
        ranks.append([*alone, *together, *((backward,) for backward in backwards[len(together) :])])
    return ranks


@pytest.mark.parametrize(("p", "v", "m"), [(2, 8, 32), (4, 4, 32), (8, 2, 64)])
def test_every_pass_waits_for_a_message_that_nothing_hides(p: int, v: int, m: int) -> None:
    times, send_s = {"F": [1 / v] * (p * v), "B": [2 / v] * (p * v)}, 0.05 / v
    simulated_s = simulate(combined(p, v, m), times, send_s) - simulate(combined(p, v, m), times)

    def sends_s(beside_s: float) -> float:
        ones, stages = np.ones(1, dtype=np.int64), np.ones((1, p))
        made = pipeline_s(
            stages, 2 * stages, send_s * stages, m * ones, v * ones, overlaps=True, beside_gradients_s=beside_s
        )
        return float(made.send_s[0])

    assert simulated_s > 2 * sends_s(np.inf)
    assert sends_s(0.0) == pytest.approx(simulated_s, rel=0.25)
    assert sends_s(np.inf) < sends_s(send_s / 2) < sends_s(0.0)
    assert sends_s(send_s) == sends_s(np.inf)


def test_a_step_becomes_shorter_by_messages_alone() -> None:
    without, delayed = terms_of(PLAN), terms_of(DELAYED)
    assert {name for name in without if name != "stragglers" and without[name] != delayed[name]} == {"pipeline_send"}
    pipelines = LaidOutPipelines.plain(PROBLEM, lay_out(PROBLEM, PROBLEM.batch([PLAN]), PLAN.pp))
    passes = PLAN.num_microbatches * PLAN.vp - (PLAN.vp - 1) * PLAN.pp  # that overlap
    saved_s = without["pipeline_send"] - delayed["pipeline_send"]
    assert 0.0 < saved_s <= passes * pipelines.hop_s.max()


def test_without_stages_nothing_changes() -> None:
    plan = dataclasses.replace(PLAN, pp=1, vp=1, schedule="1f1b", ep=64, dp_shard=256)
    assert terms_of(plan) == terms_of(dataclasses.replace(plan, delay_wgrad=True))


@pytest.mark.parametrize(
    "changes", [{"ep_overlap": False}, {"cuda_graphs": "attn", "gradient_accumulation_fusion": False}]
)
def test_what_megatron_core_does_not_delay_is_refused(changes: dict[str, object]) -> None:
    assert not broken(RULES, PROBLEM.workload, dataclasses.replace(DELAYED, cuda_graphs="attn"))
    plan = dataclasses.replace(DELAYED, **changes)  # type: ignore[arg-type]
    [fault] = broken(RULES, PROBLEM.workload, plan)
    assert "delay_wgrad needs ep_overlap" in fault


def test_a_search_delays_them_where_it_can() -> None:
    place = {"cluster": "h100-sxm:32x8", "seq_len": 4096, "global_batch": 1024, "framework": "megatron-core"}
    found = autoplan.search("deepseek-v3", **place, fix=["ep_overlap=on", "pp=8", "cuda_graphs=attn"])  # type: ignore[arg-type]
    assert found.best.plan.delay_wgrad


def test_the_switch_is_read() -> None:
    experts = "--num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
    overlap = f"{experts} --overlap-moe-expert-parallel-comm"
    assert read(f"{overlap} --delay-wgrad-compute").plan.delay_wgrad
    assert not read(overlap).plan.delay_wgrad
