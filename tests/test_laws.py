"""Laws of prices, on plans whose waits once made them slower on a better machine (`benchmarks/metamorphic.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoplan.api.problem import make_problem
from autoplan.cost.estimate import estimate
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem

SPEEDUPS = (1.01, 1.1, 1.5, 2.0, 4.0)


def with_faster_kernels(problem: Problem, speedup: float) -> Problem:
    return replace(problem, cluster=replace(problem.cluster, device=problem.cluster.device.slowed(speedup)))


def with_faster_messages(problem: Problem, speedup: float) -> Problem:
    cluster = problem.cluster
    levels = tuple(replace(level, latency_s=level.latency_s / speedup) for level in cluster.levels)
    network = replace(cluster.network, latency_s=cluster.network.latency_s / speedup)
    return replace(problem, cluster=replace(cluster, levels=levels, network=network))


def with_faster_links(problem: Problem, speedup: float) -> Problem:
    cluster = problem.cluster
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=speedup * level.bandwidth_bytes_per_s) for level in cluster.levels
    )
    return replace(problem, cluster=replace(cluster, levels=levels))


def never_slower(change: Any, parts: dict[str, Any], **plan: Any) -> None:
    problem = make_problem(**parts)
    batch = PlanBatch.of([ParallelPlan(**plan)], problem.model.num_layers)
    steps = [float(estimate(change(problem, speedup), batch).step_s[0]) for speedup in (1.0, *SPEEDUPS)]
    assert (np.diff(steps) <= 1e-12 * steps[0]).all(), steps


@pytest.mark.parametrize("pp", [1, 6])
def test_expert_traffic_hides_under_no_more_than_every_layer_has(pp: int) -> None:
    # Of four layers one has softmax attention, which takes far longer at this length than the linear one.
    parts = {"model": "qwen3-next-80b-a3b", "cluster": "a10g:768x8", "framework": "primus", "precision": "fp16"}
    states = {"ep": 64, "etp": 2, "ep_overlap": True, "sharding": "none", "router_fusion": True}
    pipeline = {"pp": 6, "vp": 2, "schedule": "interleaved"} if pp > 1 else {}
    never_slower(
        with_faster_kernels,
        {**parts, "seq_len": 32768},
        global_batch=49152,
        micro_batch=1,
        tp=2,
        dp_shard=3072 // pp,
        precision="fp16",
        **states,
        **pipeline,
    )


def test_expert_traffic_hides_while_attention_waits_for_its_weights() -> None:
    parts = {"model": "dbrx", "cluster": "mi355x:32x8", "framework": "megatron-core-te", "precision": "bf16"}
    never_slower(
        with_faster_kernels,
        {**parts, "seq_len": 4096},
        global_batch=768,
        micro_batch=2,
        tp=4,
        sp=True,
        ep=8,
        etp=4,
        dp_shard=64,
        ep_overlap=True,
        router_fusion=True,
        sharding="zero3",
        recompute="selective",
        recompute_modules=("moe_act",),
    )


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_each_half_of_a_backward_pass_hides_its_own_traffic_and_launches(sharding: str) -> None:
    parts = {"model": "qwen3-next-80b-a3b", "cluster": "rtx-pro-6000:6x4", "framework": "llm-foundry"}
    never_slower(
        with_faster_kernels,
        {**parts, "precision": "fp16", "seq_len": 1024},
        global_batch=48,
        micro_batch=2,
        pp=12,
        dp_shard=2,
        schedule="zb-h1",
        sharding=sharding,
        precision="fp16",
    )


def test_gradients_hide_under_the_half_of_a_backward_pass_that_has_no_traffic() -> None:
    never_slower(
        with_faster_links,
        {"model": "deepseek-v2-lite", "cluster": "aws-p4d:8x8", "framework": "primus", "seq_len": 4096},
        global_batch=256,
        micro_batch=2,
        tp=4,
        sp=True,
        pp=4,
        ep=4,
        dp_replicate=4,
        schedule="zb-h1",
        layers_per_chunk=(8, 7, 8, 4),
        rank_order="tp-cp-ep-pp-dp",
        router_fusion=True,
    )


def test_states_travel_beside_the_layers_and_not_beside_the_head() -> None:
    parts = {"model": "mpt-7b", "cluster": "mi350x:48x8", "framework": "primus", "precision": "fp8", "seq_len": 1024}
    never_slower(
        with_faster_kernels,
        parts,
        global_batch=1152,
        micro_batch=1,
        dp_shard=384,
        sharding="zero1",
        offload="optimizer",
        recompute="selective",
        recompute_modules=("mlp",),
        fp8_scaling="delayed",
        precision="fp8",
    )


def test_layers_that_are_recomputed_are_late_by_themselves() -> None:
    parts = {"model": "moonlight-16b", "cluster": "h800:96x8", "framework": "megatron-core-0.8", "precision": "fp8"}
    never_slower(
        with_faster_messages,
        {**parts, "seq_len": 1024},
        global_batch=768,
        micro_batch=1,
        tp=2,
        sp=True,
        ep=64,
        dp_shard=384,
        sharding="none",
        recompute="full",
        recompute_num_layers=24,
        grad_dtype="bf16",
        precision="fp8",
    )
