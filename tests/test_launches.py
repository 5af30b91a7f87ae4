"""Kernels that the host launches for blocks of experts and latent attention, and what of them shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoplan.cost.blocks import block_costs
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.launches import (
    ADAPTER,
    ADAPTER_OF_NEXT_EXPERT,
    AROUND_EXPERTS,
    BIAS_PER_EXPERT,
    CASTS_PER_EXPERT,
    CHECKPOINT,
    COUNT_TOKENS,
    DISPATCH,
    FUSED_ROUTER,
    LATENT_ATTENTION,
    LATENT_ROPE,
    LIGHT,
    PER_EXPERT,
    ROUTER,
    extra_launches_s,
    repeated_launches_s,
)
from autoplan.cost.kernels.memory_bound import OP_BY_OP_SHARE, traffic_of
from autoplan.frameworks.presets import load_framework
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Block
from autoplan.spec.enums import Dispatcher
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from problems import problem_for

QWEN = load_model("qwen3-30b-a3b")
DENSE_ATTENTION = 14 + 28  # `modelling` C6: 25-40 kernels of a dense layer forward, 50-80 backward
FRAMES = 2 + 3  # norm and residual of the block, counted as a dense block


def problem_of(model: Any = QWEN, **traits: Any) -> Problem:
    framework = load_framework("nemo").changed(host_s_per_launch=1.0, **traits)
    return problem_for(model, "h100-sxm:2x8", framework)


def batch_of(model: Any = QWEN, **changes: Any) -> PlanBatch:
    values: dict[str, Any] = {"global_batch": 16, "ep": 16, "dp_shard": 16, "dispatcher": "hybridep"}
    values |= {"router_fusion": True, "rope_fusion": model.mla is not None}
    return PlanBatch.of([ParallelPlan(**(values | changes))], model.num_layers)


def test_the_kernels_of_a_layer_are_as_many_as_nsight_counted() -> None:
    """151 in both passes, those of head and optimizer among them (Megatron-Bridge 067f987, its skills)."""
    parts = (FUSED_ROUTER, DISPATCH[Dispatcher.HYBRIDEP], AROUND_EXPERTS)
    counted = sum(map(sum, parts)) + 8 * sum(PER_EXPERT) + DENSE_ATTENTION + FRAMES
    assert counted == pytest.approx(463_348 / (64 * 48), rel=0.15)


def test_launches_of_a_block_of_experts_are_those_of_its_parts() -> None:
    problem = problem_of()
    forward = FUSED_ROUTER.forward + DISPATCH[Dispatcher.HYBRIDEP].forward + AROUND_EXPERTS.forward
    launched = extra_launches_s(problem, batch_of(), Block.MOE)
    assert launched.forward_s[0] == pytest.approx(forward + 8 * LIGHT * PER_EXPERT.forward)
    narrow = extra_launches_s(problem, batch_of(precision="fp8"), Block.MOE)
    assert (narrow.backward_s - launched.backward_s)[0] == pytest.approx(8 * LIGHT * CASTS_PER_EXPERT.backward)
    eager = extra_launches_s(problem, batch_of(dispatcher="alltoall", router_fusion=False), Block.MOE)
    router = ROUTER.forward - FUSED_ROUTER.forward
    dispatch = DISPATCH[Dispatcher.ALL_TO_ALL].forward - DISPATCH[Dispatcher.HYBRIDEP].forward
    assert (eager.forward_s - launched.forward_s)[0] == pytest.approx(router + dispatch + COUNT_TOKENS.forward)


def test_grouped_experts_launch_as_much_as_one() -> None:
    """Neither products nor casts and biases of each of 128 local experts."""
    odd = replace(QWEN, mlp_bias=True)
    grouped, looped = (problem_of(odd, are_grouped=is_grouped) for is_grouped in (True, False))
    batch = batch_of(ep=1, precision="fp8")
    launched = extra_launches_s(grouped, batch, Block.MOE)
    assert launched.forward_s[0] == FUSED_ROUTER.forward + AROUND_EXPERTS.forward
    more = extra_launches_s(looped, batch, Block.MOE).forward_s - launched.forward_s
    per_expert = PER_EXPERT.forward + BIAS_PER_EXPERT.forward + CASTS_PER_EXPERT.forward
    assert more[0] == pytest.approx(128 * LIGHT * per_expert)


def test_experts_with_biases_and_limits_move_more_unless_one_graph_fuses_them() -> None:
    """Traffic of a routed token: its width through the second bias and its expert's through the limits, and kernels."""
    plain, odd = problem_of(), problem_of(replace(QWEN, mlp_bias=True, clamped_activation=True))
    batch, graph = batch_of(), batch_of(cuda_graphs="full_iteration")
    routed = 4096 * 8
    limits, biases = routed * 768, routed * 2048
    moved = traffic_of(odd, batch, Block.MOE)
    slower = odd.device.memory_efficiency / OP_BY_OP_SHARE["hopper"]
    assert moved["expert_limits"].forward_bytes[0] == pytest.approx(16 * slower * limits)
    assert moved["expert_limits"].backward_bytes[0] == pytest.approx(20 * slower * limits)
    assert moved["expert_biases"].forward_bytes[0] == pytest.approx(28 * slower * biases)
    assert moved["expert_biases"].backward_bytes[0] == pytest.approx(40 * slower * biases)
    assert not {"expert_limits", "expert_biases"} & set(traffic_of(plain, batch, Block.MOE))
    assert traffic_of(odd, graph, Block.MOE)["expert_biases"].forward_bytes[0] == 0
    more = extra_launches_s(odd, batch, Block.MOE).backward_s - extra_launches_s(plain, batch, Block.MOE).backward_s
    assert more[0] == pytest.approx(8 * LIGHT * BIAS_PER_EXPERT.backward)


@pytest.mark.parametrize("graphs", ["router", "layer", "full_iteration"])
def test_a_cuda_graph_takes_its_launches_away(graphs: str) -> None:
    problem = problem_of()
    before, after = (
        extra_launches_s(problem, batch_of(dispatcher="alltoall", cuda_graphs=word), Block.MOE).forward_s[0]
        for word in ("none", graphs)
    )
    router = FUSED_ROUTER.forward + COUNT_TOKENS.forward
    assert before - after == pytest.approx(before if graphs == "full_iteration" else router)


def test_latent_attention_launches_more_and_most_without_a_kernel_for_its_rotary_embeddings() -> None:
    deepseek = load_model("deepseek-v3")
    assert extra_launches_s(problem_of(), batch_of(), Block.ATTENTION).total_s[0] == 0.0
    fused, unfused = (
        extra_launches_s(problem_of(deepseek), batch_of(deepseek, rope_fusion=fuses), Block.ATTENTION)
        for fuses in (True, False)
    )
    assert fused.total_s[0] == sum(LATENT_ATTENTION)
    assert unfused.total_s[0] == pytest.approx(sum(LATENT_ATTENTION) + LIGHT * sum(LATENT_ROPE))


def test_what_is_recomputed_by_name_is_launched_again_with_its_checkpoint() -> None:
    again = batch_of(recompute="selective", recompute_modules=("moe_act",))
    assert repeated_launches_s(problem_of(), again, Block.MOE)[0] == CHECKPOINT + 1
    assert repeated_launches_s(problem_of(), again, Block.ATTENTION)[0] == 0.0
    whole = batch_of(recompute="selective", recompute_modules=("moe",))
    launched = extra_launches_s(problem_of(), whole, Block.MOE).forward_s[0]
    assert repeated_launches_s(problem_of(), whole, Block.MOE)[0] == pytest.approx(CHECKPOINT + launched)


def test_a_layer_takes_as_long_as_its_host_where_that_is_longer() -> None:
    """Ever slower hosts: first they hide under the device, then each second of theirs is a second of the layer."""
    problem, batch = problem_of(moe_sync_s=0.0), batch_of(precision="bf16")
    waits = []
    for scale in (1e-6, 1e-3, 2e-3):
        slow = replace(problem, framework=problem.framework.changed(host_s_per_launch=scale))
        costs = block_costs(slow, batch)
        waits.append(sum(cost.forward_s["launch"][0] for cost in costs.values()))
    launched = extra_launches_s(problem, batch, Block.MOE).forward_s[0]
    assert waits[0] == 0.0
    assert waits[2] - waits[1] == pytest.approx(1e-3 * launched)


def test_blocks_of_unlike_layers_on_one_rank_make_up_for_each_other() -> None:
    """Layers of Mamba leave the host time for those of experts, but not in a pipeline, whose stages may have few."""
    nemotron = load_model("nemotron3-nano")
    problem = problem_of(nemotron).framework.changed(host_s_per_launch=60e-6, moe_sync_s=0.0)
    slow = replace(problem_of(nemotron), framework=problem)
    together = block_costs(slow, batch_of(nemotron, ep=8))
    apart = block_costs(slow, batch_of(nemotron, ep=8, pp=2, dp_shard=8, global_batch=8))
    shown = [costs[Block.MOE].forward_s["launch"][0] for costs in (together, apart)]
    assert shown[0] <= shown[1]
    assert np.isfinite(shown).all()


def test_faster_kernels_make_experts_that_overlap_no_slower() -> None:
    """What of their traffic shows is shared evenly by both passes, which two micro-batches run at once."""
    problem = problem_for("hy3", "mi350x:32x8", "primus", seq_len=1024)
    device = problem.cluster.device.slowed(1.5)
    faster = replace(problem, cluster=replace(problem.cluster, device=device))
    plan = {"tp": 4, "sp": True, "ep": 16, "etp": 4, "dp_replicate": 2, "dp_shard": 32, "cuda_graphs": "attn"}
    plans = [
        ParallelPlan.derived(global_batch=1024, sharding="zero1", ep_overlap=overlap, has_experts=True, **plan)
        for overlap in (False, True)
    ]
    batch = PlanBatch.of(plans, problem.model.num_layers)
    assert (estimate(faster, batch).step_s <= estimate(problem, batch).step_s).all()


def test_a_longer_sequence_is_no_faster_where_the_only_micro_batch_overlaps_with_none() -> None:
    training = TrainingSpec(seq_len=1024, precision="fp16")
    problem = problem_for("qwen3-next-80b-a3b", "v100-pcie:6x8", "primus", training=training)
    longer = replace(problem, training=replace(training, seq_len=2048))
    plan = ParallelPlan(
        global_batch=48, ep=2, dp_shard=4, dp_replicate=12, sharding="zero1", ep_overlap=True, cuda_graphs="attn"
    )
    times = [float(estimate(each, each.batch([plan])).step_s[0]) for each in (problem, longer)]
    assert times[0] <= times[1]


def test_adapters_of_experts_are_grouped_as_the_experts_are() -> None:
    """Qwen3-30B has 8 experts on each of 16 ranks: their products are further ones, a scale and a sum are for all."""
    problem = problem_of()
    tuned = replace(problem.training, finetuning=FineTuning(rank=32, targets=("linear_fc1", "linear_fc2")))
    plain = extra_launches_s(problem, batch_of(), Block.MOE)
    adapted = extra_launches_s(replace(problem, training=tuned), batch_of(), Block.MOE)
    forward, backward = (
        first + 7 * LIGHT * next_one for first, next_one in zip(ADAPTER, ADAPTER_OF_NEXT_EXPERT, strict=True)
    )
    assert adapted.forward_s[0] - plain.forward_s[0] == pytest.approx(2 * forward)
    assert adapted.backward_s[0] - plain.backward_s[0] == pytest.approx(2 * backward)
