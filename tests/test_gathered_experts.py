"""Are experts that get all tokens by an all-gather priced, searched, written and read as Megatron-Core runs them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.api.problem import make_problem, make_space
from autoplan.cost.collectives.expert_parallel import expert_parallel, expert_parallel_s
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.memory_bound import traffic_of
from autoplan.cost.network.links import Links
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.launch.targets import exported
from autoplan.search.study import search
from autoplan.spec.blocks import Block
from autoplan.spec.enums import Dispatcher
from autoplan.spec.estimate import RISKY_Z
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

EXPERTS = "qwen3-30b-a3b"  # 128 experts of which a token visits 8, width 2,048
TOKENS = 4096


def problem_of(**options: Any) -> Problem:
    return make_problem(EXPERTS, **{"cluster": "h100-sxm:1x8", "seq_len": TOKENS} | options)


def plan_of(**axes: Any) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 16, "ep": 8, "dp_shard": 8, "dispatcher": "allgather"} | axes)


def traffic_s(problem: Problem, **axes: Any) -> float:
    batch = problem.batch([plan_of(**axes)])
    return float(expert_parallel_s(problem, batch, Links.of(problem))[0])


def test_all_tokens_are_gathered_and_all_outputs_reduced() -> None:
    problem = problem_of()
    described = expert_parallel(problem, problem.batch([plan_of()]))
    # Every token of 8 ranks in 16 bits each way and pass; per expert a byte of the routing map and a 16-bit score are
    # gathered in one of the two passes, and the gradient of the score is reduced in the other.
    for sent, routing_bytes in ((described.gather_all, 3 / 2), (described.reduce_all, 2 / 2)):
        assert sent.buffer_bytes.tolist() == [8 * TOKENS * (2 * 2048 + routing_bytes * 128)]
        assert sent.group.size.tolist() == [8]
        assert (sent.forward, sent.backward) == (1.0, 1.0)
    assert (described.dispatch.forward, described.combine.backward) == (0.0, 0.0)
    exchanged = expert_parallel(problem, problem.batch([plan_of(dispatcher="alltoall")]))
    assert (exchanged.dispatch.forward, exchanged.gather_all.forward) == (1.0, 0.0)


def test_few_ranks_and_many_experts_per_token_favour_the_all_gather() -> None:
    """Rank pairs exchange half of 8 copies of a token by all-to-all, or the token once; 64 ranks turn it round."""
    problem = problem_of(cluster="h100-sxm:8x8")
    few, many = ({"ep": ep, "dp_shard": 64} for ep in (2, 64))
    assert 2 * traffic_s(problem, **few) < traffic_s(problem, dispatcher="alltoall", **few)
    assert traffic_s(problem, **many) > 1.5 * traffic_s(problem, dispatcher="alltoall", **many)


def test_nodes_of_four_gained_by_it_what_is_predicted() -> None:
    """Qwen3-30B on 8 GH200, all else equal: 5,236 instead of 4,654 tokens/s per device.

    OpenEuroLLM/oellm-autoexp c6d0cc0, config/experiments/korbi/qwen3_30B_A3B_speed_comp/REPORT.md.
    """
    problem = problem_of(cluster="gh200:2x4")
    plan = {"global_batch": 64, "micro_batch": 4, "pp": 2, "ep": 4, "dp_shard": 4, "recompute": "full"}
    plans = [plan_of(dispatcher=word, **plan) for word in ("allgather", "alltoall")]
    gathered, exchanged = estimate(problem, problem.batch(plans)).step_s
    assert gathered / exchanged == pytest.approx(4654 / 5236, abs=0.05)


def test_tokens_of_an_expert_tensor_parallel_group_are_gathered_and_sorted_too() -> None:
    """Ranks of tp 2 and etp 2 have half of the tokens, gather 4 x 2 such halves, and sort as if they were 4 whole."""
    problem = problem_of()
    whole, halves = (problem.batch([plan_of(tp=tp, sp=tp > 1, etp=tp, ep=4, dp_shard=8 // tp)]) for tp in (1, 2))
    alone, split = (expert_parallel(problem, batch) for batch in (whole, halves))
    assert split.gather.buffer_bytes == alone.gather_all.buffer_bytes == 2 * split.gather_all.buffer_bytes
    assert split.reduce.buffer_bytes == alone.reduce_all.buffer_bytes == 2 * split.reduce_all.buffer_bytes
    sorted_bytes, as_many = (
        traffic_of(problem, batch, Block.MOE)["permute"].forward_bytes for batch in (whole, halves)
    )
    assert as_many == pytest.approx(sorted_bytes)


def test_gathered_tokens_take_memory_beside_one_layer() -> None:
    problem = problem_of()  # in a pipeline, whose first stage is the fullest and has no logits
    plans = [plan_of(dispatcher=word, pp=2, ep=4, dp_shard=4) for word in ("alltoall", "allgather")]
    plain, gathered = estimate(problem, problem.batch(plans)).memory_terms_bytes["transients"].tolist()
    assert gathered - plain == pytest.approx(2 * 2 * 4 * TOKENS * 2048)  # all tokens and the outputs of local experts


def test_tokens_are_not_overlapped_with_another_micro_batch() -> None:
    """Megatron-Core asserts an all-to-all or flexible dispatcher for overlap_moe_expert_parallel_comm."""
    problem = problem_of()
    rules = book_of(problem.framework).rules
    assert not list(broken(rules, problem.workload, plan_of()))
    [fault] = broken(rules, problem.workload, plan_of(ep_overlap=True))
    assert "another dispatcher than allgather" in fault
    [dropping] = broken(rules, problem.workload, plan_of(token_dropping=True))
    assert "token_dropping with dispatcher allgather is not priced" in dropping


def test_a_search_finds_the_best_of_all_plans() -> None:
    problem = problem_of(cluster="h100-sxm:2x8")
    fixed = ["tp=1", "pp=1", "cp=1", "offload=none", "cuda_graphs=none", "cross_entropy_fusion=native", "micro-batch=1"]
    space = make_space(problem, 16, fix=[*fixed, "sharding=zero1", "router_fusion=on", "recompute=full"])
    plans, _ = space.plans(space.cells())
    costs = estimate(problem, plans)
    fits = costs.oom_z <= RISKY_Z
    found = search(problem, space)
    assert found.certificate.proven
    assert Dispatcher.ALL_GATHER.code in plans.dispatcher
    assert found.ranked[0].step_s == costs.step_s[fits].min()
    assert np.isfinite(costs.step_s).all()


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-lm@0.12", "megatron-bridge", "primus"])
def test_the_dispatcher_is_written_and_read(tmp_path: Path, target: str) -> None:
    place: dict[str, Any] = {"cluster": "h100-sxm:1x8", "seq_len": TOKENS, "global_batch": 16}
    file = autoplan.estimate(EXPERTS, **place, plan={"ep": 8, "dispatcher": "allgather", "router_fusion": False}).file
    files = exported(file, target, "torchrun")
    for written in files:
        (tmp_path / written.name).write_text(written.text)
    launch = autoplan.read(tmp_path / files[-1].name, devices=8, seq_len=TOKENS).launch
    assert launch.plan.dispatcher == "allgather"
    assert launch.plan.ep == 8


def test_a_script_that_names_no_dispatcher_has_megatron_cores_default(tmp_path: Path) -> None:
    place: dict[str, Any] = {"cluster": "h100-sxm:1x8", "seq_len": TOKENS, "global_batch": 16}
    file = autoplan.estimate(EXPERTS, **place, plan={"ep": 8}).file
    text = exported(file, "megatron-lm", "torchrun")[0].text
    named = "--moe-token-dispatcher-type alltoall"
    assert named in text
    (tmp_path / "launch.sh").write_text(text.replace(named, ""))
    assert autoplan.read(tmp_path / "launch.sh").launch.plan.dispatcher == "allgather"
