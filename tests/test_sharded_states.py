"""Collectives of sharded states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoplan.cost.collectives.sharded_states import (
    compressed_states,
    copied_states_s,
    sharded_states,
    sharded_states_s,
)
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.network.links import Links
from autoplan.cost.parameters import UnitParameters, unit_parameters
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Block
from autoplan.spec.calibration import Calibration
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from problems import problem_for

FRAMEWORK = load_framework("deepspeed-zero")
PROBLEM = problem_for("llama3.1-8b", "a100-sxm:8x8", FRAMEWORK, calibration=Calibration())
BATCH = PlanBatch.of([ParallelPlan(global_batch=64, dp_shard=64, sharding="zero3")], PROBLEM.model.num_layers)
FP8_PLAN = ParallelPlan(global_batch=64, dp_shard=64, sharding="zero3", precision="fp8", fp8_scaling="delayed")
ELEMENTS, NONE = np.array([3e8]), np.array([0.0])


def seconds(problem: Problem) -> tuple[float, float]:
    passes = sharded_states_s(problem, BATCH, Links.of(problem), UnitParameters.all_trained(problem, ELEMENTS, NONE))
    return float(passes.forward_s[0]), float(passes.backward_s[0])


def test_weights_are_gathered_in_both_passes_and_gradients_reduced_in_one() -> None:
    unit = sharded_states(PROBLEM, BATCH, UnitParameters.all_trained(PROBLEM, ELEMENTS, NONE))
    assert (unit.gather.forward[0], unit.gather.backward[0], unit.reduce.backward[0]) == (1, 1, 1)
    assert (unit.gather.buffer_bytes[0], unit.reduce.buffer_bytes[0]) == (2 * 3e8, 2 * 3e8)
    forward_s, backward_s = seconds(PROBLEM)
    assert backward_s == pytest.approx(2 * forward_s)


def test_tensors_that_go_by_themselves_move_as_much_in_more_messages() -> None:
    apart = replace(PROBLEM, framework=FRAMEWORK.changed(messages_per_block=6.0))
    unit = sharded_states(apart, BATCH, UnitParameters.all_trained(apart, ELEMENTS, NONE))
    assert (unit.gather.forward[0], unit.reduce.backward[0]) == (6, 6)
    assert unit.gather.buffer_bytes[0] == pytest.approx(1e8)
    link_s = unit.gather.seconds(Links.of(apart))[0]
    assert seconds(apart)[0] == pytest.approx(6 * link_s)
    assert seconds(apart)[0] > seconds(PROBLEM)[0]


def test_zero_plus_plus_sends_8_bits_of_weights_4_of_gradients_and_gathers_a_second_copy_inside_nodes() -> None:
    """Collectives of 300 million weights on 8 nodes of 8; one of four micro-batches gathers from all ranks."""
    options: dict[str, Any] = {"quantized_gathers": True, "quantized_reductions": True, "secondary_shard": 4}
    plan = ParallelPlan(global_batch=256, dp_shard=64, sharding="zero3")
    plain, compressed = (
        PlanBatch.of([replace(plan, **changes)], PROBLEM.model.num_layers) for changes in ({}, options)
    )
    unit = UnitParameters.all_trained(PROBLEM, ELEMENTS, NONE)
    assert compressed_states(PROBLEM, plain, unit) == ()
    usual, (copy, inside, across) = (
        sharded_states(PROBLEM, compressed, unit),
        compressed_states(PROBLEM, compressed, unit),
    )
    assert usual.gather.buffer_bytes[0] == copy.buffer_bytes[0] == pytest.approx((1 + 4 / 8000) * 3e8)
    assert (usual.gather.forward[0], usual.gather.backward[0], usual.reduce.backward[0]) == (0.25, 0, 0)
    assert (copy.forward[0], copy.backward[0], copy.group.size[0]) == (0.75, 1, 4)
    assert (inside.buffer_bytes[0], inside.group.stride[0], inside.group.size[0]) == (0.5 * 3e8, 1, 8)
    assert (across.buffer_bytes[0], across.group.stride[0], across.group.size[0]) == (0.5 * 3e8 / 8, 8, 8)
    links = Links.of(PROBLEM)
    whole_s, copy_s, inside_s, across_s = (
        float(collective.seconds(links)[0]) for collective in (usual.gather, copy, inside, across)
    )
    passes = sharded_states_s(PROBLEM, compressed, links, unit)
    assert passes.forward_s[0] == pytest.approx(0.25 * whole_s + 0.75 * copy_s)
    assert passes.backward_s[0] == pytest.approx(copy_s + inside_s + across_s)
    copies = [copied_states_s(PROBLEM, batch, unit) for batch in (plain, compressed)]
    assert copies[1].forward_s[0] / copies[0].forward_s[0] == pytest.approx((4 + 3) / 4)
    weights_bytes = [estimate(PROBLEM, batch).memory_terms_bytes["weights"][0] for batch in (plain, compressed)]
    elements = weights_bytes[0] / 2 * 64  # a shard of 16-bit weights each
    assert weights_bytes[1] - weights_bytes[0] == pytest.approx(2 * elements / 4, rel=0.01)


@pytest.mark.parametrize(("framework", "held_bytes", "grad_bytes"), [("deepspeed-zero", 2, 2), ("pytorch-fsdp", 4, 4)])
def test_offloaded_weights_come_in_both_passes_as_they_are_held_and_gradients_go(
    framework: str, held_bytes: int, grad_bytes: int
) -> None:
    """A 64th of 300 million weights over the host's link; later gradients are added, 12 bytes each."""
    problem = replace(PROBLEM, framework=load_framework(framework))
    times = []
    for offload in ("none", "parameters"):
        plan = ParallelPlan(global_batch=128, dp_shard=64, sharding="zero3", offload=offload)
        batch = PlanBatch.of([plan], problem.model.num_layers)
        unit = UnitParameters.all_trained(problem, ELEMENTS, NONE)
        times.append(sharded_states_s(problem, batch, Links.of(problem), unit))
    own, link = 3e8 / 64, problem.cluster.device.host_link_bytes_per_s
    fetch_s, store_s = own * held_bytes / link, own * grad_bytes / link + own * 0.5 * 12 / 54e9
    device, host = times
    assert host.forward_s - device.forward_s == pytest.approx(fetch_s)
    assert host.backward_s - device.backward_s == pytest.approx(fetch_s + store_s)


def test_what_flattening_and_padding_cost_is_a_factor_on_the_wire() -> None:
    dearer = replace(PROBLEM, framework=FRAMEWORK.changed(sharded_wire_factor=2.0))
    assert seconds(dearer) == pytest.approx([2 * each for each in seconds(PROBLEM)])


def test_stage_three_of_2021_loses_to_pipelines_on_many_devices() -> None:
    """GPT-3 on 1,536 A100: 44 TFLOP/s under ZeRO-3, 141 under tensor and pipeline parallelism (arXiv:2104.04473)."""
    problem = replace(
        PROBLEM,
        model=load_model("gpt3-175b"),
        training=TrainingSpec(seq_len=2048, precision="fp16"),
        cluster=load_cluster("a100-sxm:192x8"),
    )
    plans: dict[str, dict[str, Any]] = {
        "deepspeed-2021": {"dp_shard": 1536, "sharding": "zero3"},
        "megatron-lm-2021": {"tp": 8, "pp": 12, "dp_replicate": 16, "sharding": "none"},
    }
    common: dict[str, Any] = {"global_batch": 1536, "recompute": "full", "precision": "fp16", "dropout": True}
    common["attention"] = "megatron-fused"
    step_s = {
        name: estimate(
            replace(problem, framework=load_framework(name)), PlanBatch.of([ParallelPlan(**common | axes)], 96)
        ).step_s[0]
        for name, axes in plans.items()
    }
    # Of 4.43e18 operations with those repeated: 65.6 and 20.5 s.
    assert step_s["deepspeed-2021"] == pytest.approx(65.6, rel=0.25)
    assert step_s["megatron-lm-2021"] == pytest.approx(20.5, rel=0.1)


def test_xla_gathers_weights_of_8_bit_products_as_quantised() -> None:
    """Scales of past steps are known before the gather: a byte a weight; other code and types have two."""
    plans = [ParallelPlan(global_batch=64, dp_shard=64, sharding="zero3"), FP8_PLAN]
    for name, byte_counts in (("xla", (2, 1)), ("torchtitan-0.2", (2, 2))):
        problem = replace(PROBLEM, framework=load_framework(name))
        batch = PlanBatch.of(plans, problem.model.num_layers)
        unit = unit_parameters(problem, batch, block_shapes(problem.model)[Block.MLP])
        assert unit.dense_bytes == pytest.approx(np.array(byte_counts) * unit.dense)
        assert sharded_states(problem, batch, unit).gather.buffer_bytes == pytest.approx(unit.dense_bytes)
