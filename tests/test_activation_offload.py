"""Activations in host memory: bytes and seconds counted by hand, and what comes back from launch files."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from autoplan.cost.block_cost import finish
from autoplan.cost.blocks import HOST_LINK_SHARE
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_bridge import export as bridge
from autoplan.frameworks.megatron_bridge import read as bridge_in
from autoplan.frameworks.megatron_lm import read as lm_in
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import OffloadLayers, OffloadModules
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from megatron_plans import MIXTRAL, plan_file_of
from problems import problem_for
from test_megatron_lm_export import words_of

TOKENS = 128
DENSE = ModelSpec(name="dense", num_layers=8, hidden_size=64, vocab_size=512, num_heads=4, num_kv_heads=2, ffn_size=128)
SPARSE = dataclasses.replace(DENSE, moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=32))
BARE = Framework(name="bare").changed(pads_vocab_to=1, fixed_bytes=0.0, communicator_bytes=0.0, reserved_factor=1.0)


def problem_of(model: ModelSpec) -> Problem:
    return problem_for(model, "h100-sxm:8x8", BARE, training=TrainingSpec(seq_len=TOKENS))


def memory_of(model: ModelSpec, **plan: Any) -> dict[str, float]:
    return stage_costs(problem_of(model), ParallelPlan(global_batch=8, **plan))[0].memory_terms_bytes


@pytest.mark.parametrize(
    ("modules", "per_token"),
    [
        ("core_attn", 2 * (64 + 2 * 32)),  # queries, two of four heads of keys and of values
        ("core_attn+attn_proj", 2 * (64 + 2 * 32) + 2 * 64),
        ("expert_fc1", 2 * 2 * 64),  # a token's hidden state for each of its two experts
        ("moe_act", 2 * 2 * 2 * 32),  # gate and up of both
        ("expert_fc1+moe_act", 2 * 2 * 64 + 2 * 2 * 2 * 32),
    ],
)
def test_inputs_of_parts_of_a_layer_leave_the_device_but_for_a_layer_on_its_way(modules: str, per_token: int) -> None:
    """The first of two stages has four layers and two micro-batches in flight."""
    here, there = memory_of(SPARSE, pp=2), memory_of(SPARSE, pp=2, offload_modules=modules)
    assert here["activations"] - there["activations"] == pytest.approx(8 * TOKENS * per_token)
    assert there["transients"] - here["transients"] == pytest.approx(TOKENS * per_token)


@pytest.mark.parametrize("share", OffloadLayers)
def test_a_share_of_the_layers_leaves_the_device_and_waits_on_the_host(share: OffloadLayers) -> None:
    problem, plan = problem_of(DENSE), ParallelPlan(global_batch=8)
    batch = PlanBatch.of([plan, dataclasses.replace(plan, offload_layers=share)], 8)
    here, there = estimate(problem, batch).host_memory_bytes
    whole = memory_of(DENSE)["activations"]
    assert memory_of(DENSE, offload_layers=share)["activations"] == pytest.approx((1 - share.share) * whole)
    assert there - here == pytest.approx(share.share * whole)


def test_copies_show_as_far_as_they_outlast_the_pass() -> None:
    """1 GB at 64 GB/s takes 15.6 ms: beside 10 ms of products 5.6 ms show, beside 20 ms none."""
    for gemm_s, shown_s in ((10e-3, 5.625e-3), (20e-3, 0.0)):
        terms, none = {"gemm": np.array([gemm_s])}, np.zeros(1)
        lag = finish(0.15, terms, none, none, none, np.array([1e9 / 64e9]))
        assert terms["activation_offload"][0] == pytest.approx(shown_s)
        assert lag[0] == pytest.approx(-gemm_s - shown_s)


def test_both_passes_of_a_layer_wait_for_a_slow_link() -> None:
    """Attention copies 2 (64 + 2 x 32 + 64) bytes a token each way, and nothing else of a layer may hide it."""
    problem = problem_of(SPARSE)
    device = dataclasses.replace(problem.cluster.device, host_link_bytes_per_s=1e3)
    problem = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, device=device))
    plan = ParallelPlan(global_batch=1, offload_modules=OffloadModules.ATTENTION)
    shown = stage_costs(problem, plan)[0].terms_s["activation_offload"]
    copied_s = 2 * 8 * TOKENS * 2 * (64 + 2 * 32 + 64) / (HOST_LINK_SHARE["pcie"] * 1e3)
    assert shown == pytest.approx(copied_s, rel=1e-3)
    assert shown < copied_s


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"offload_modules": "expert_fc1"}, "offload_modules expert_fc1 needs these parts in the model"),
        ({"offload_modules": "core_attn", "recompute": "full"}, "with parts that are recomputed"),
        ({"offload_layers": "1/2", "pp": 2}, "offload_layers 1/2 needs pp 1"),
        ({"offload_layers": "1/2", "recompute": "full"}, "needs recompute none"),
    ],
)
def test_what_megatron_refuses_is_refused(plan: dict[str, Any], says: str) -> None:
    problem = problem_of(DENSE)
    said = broken(RULES, problem.workload, ParallelPlan(global_batch=64, dp_shard=64 // plan.get("pp", 1), **plan))
    assert any(says in line for line in said)


@pytest.mark.parametrize(
    "plan",
    [
        *({"offload_modules": word} for word in OffloadModules),
        *({"offload_layers": word} for word in OffloadLayers),
        {"offload_modules": "core_attn+attn_proj", "recompute": "selective", "recompute_modules": ("moe_act",)},
    ],
)
def test_launch_files_bring_back_what_is_on_the_host(plan: dict[str, Any]) -> None:
    file = plan_file_of(MIXTRAL, ep=8, dp_shard=8, **plan)
    context = LaunchContext(num_devices=8)
    for text, reader in ((" ".join(words_of(file)), lm_in.READER), (bridge.recipe(file), bridge_in.READER)):
        launch = reader.read(text, context)
        assert launch.plan == file.best.plan
        assert not [unread for unread in launch.unread if unread.matters and "offload" in unread.option]
