"""Do measured modules and layers of a framework replace what they stand for, and nothing else?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from autoplan.cost.estimate import estimate
from autoplan.cost.served import needed_times
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.timing import TimingTable
from autoplan.spec.training import TrainingSpec
from problems import problem_for

PLAN = ParallelPlan(global_batch=8, dp_shard=8)
NUM_PASSES = 32  # layers, each once in a step of one micro-batch


def problem(model: str = "llama3-8b", framework: str = "megatron-core", precision: str = "bf16") -> Problem:
    training = TrainingSpec(seq_len=4096, precision=precision)
    return problem_for(model, "b200:1x8", framework, training=training)


def timed(problem: Problem, times: Mapping[tuple[Operation, tuple[int, ...]], float], dtype: str = "bf16") -> Problem:
    device = problem.cluster.device.name
    rows = [
        Measurement(operation=name, shape=shape, dtype=dtype, device=device, seconds=seconds, source="0123456789ab")
        for (name, shape), seconds in times.items()
    ]
    return replace(problem, timings=TimingTable.of(rows))


def step(problem: Problem, plan: ParallelPlan = PLAN) -> dict[str, float]:
    cost = estimate(problem, problem.batch([plan]))
    return {name: float(value[0]) for name, value in cost.terms_s.items()} | {"step": float(cost.step_s[0])}


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan"])
def test_a_whole_layer_prices_the_plans_of_its_framework(framework: str) -> None:
    shape = (1, 4096, 4096, 14336, 32, 8, 128, 1)
    own = problem(framework=framework)
    steps = [
        step(timed(own, {("layer", shape): seconds, ("layer_backward", shape): 2 * seconds}))["step"]
        for seconds in (0.05, 0.06)
    ]
    assert steps[1] - steps[0] == pytest.approx(NUM_PASSES * 0.03, rel=0.02)
    measured = timed(own, {("layer", shape): 0.05, ("layer_backward", shape): 0.1})
    (layer,) = (need for need in needed_times(measured, PLAN) if need.operation == "layer_backward")
    assert (layer.served, layer.seconds, layer.sources[0].source) == ("measured", 0.1, "0123456789ab")
    # Other sizes than the measured ones are priced as ever.
    halves = replace(PLAN, tp=2, sp=True, dp_shard=4)
    assert step(measured, halves)["step"] == pytest.approx(step(own, halves)["step"])


@pytest.mark.parametrize(
    ("operation", "shape"),
    [("mlp", (4096, 4096, 14336)), ("norm_linear", (4096, 28672, 4096)), ("linear", (4096, 4096, 14336))],
)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bf16"), ("fp8", "fp8_delayed"), ("mxfp8", "mxfp8")])
def test_a_module_stands_for_all_that_it_joins(
    operation: Operation, shape: tuple[int, ...], precision: str, dtype: str
) -> None:
    own, plan = problem(precision=precision), replace(PLAN, precision=precision, fp8_scaling="delayed")
    both: tuple[Operation, Operation] = (operation, f"{operation}_backward")  # type: ignore[assignment]
    steps = [
        step(timed(own, {(both[0], shape): seconds, (both[1], shape): 3 * seconds}, dtype), plan)["step"]
        for seconds in (0.02, 0.03)
    ]
    assert steps[1] - steps[0] == pytest.approx(NUM_PASSES * 0.04, rel=0.02)


def test_a_larger_module_wins_over_those_that_it_contains() -> None:
    own = problem()
    mlp: dict[tuple[Operation, tuple[int, ...]], float] = {
        ("mlp", (4096, 4096, 14336)): 0.02,
        ("mlp_backward", (4096, 4096, 14336)): 0.04,
    }
    parts: dict[tuple[Operation, tuple[int, ...]], float] = {
        ("norm_linear", (4096, 28672, 4096)): 0.5,
        ("linear", (4096, 4096, 14336)): 0.5,
    }
    assert step(timed(own, mlp | parts))["step"] == pytest.approx(step(timed(own, mlp))["step"], rel=1e-6)


def test_an_overlap_is_priced_as_it_was_measured() -> None:
    own, plan = problem(), replace(PLAN, tp=8, sp=True, dp_shard=1, tp_overlap=True)
    shape = (4096, 4096, 14336, 8, 8)
    measured = timed(own, {("overlapped_mlp", shape): 0.02, ("overlapped_mlp_backward", shape): 0.04})
    before, after = step(measured, plan), step(own, replace(plan, tp_overlap=False))
    assert before["step"] > after["step"]
    assert step(measured, replace(plan, tp_overlap=False)) == after  # only plans that overlap
    ring = replace(PLAN, cp=8, dp_shard=1, global_batch=1)
    shape = (1, 4096, 32, 8, 128, 8, 8)
    measured = timed(own, {("ring_attention", shape): 0.02, ("ring_attention_backward", shape): 0.05})
    terms = step(measured, ring)
    assert terms["attention"] + terms["cp_communication"] == pytest.approx(NUM_PASSES * 0.07, rel=0.02)


def test_routing_and_the_exchange_of_tokens_are_those_that_were_measured() -> None:
    own, plan = problem("mixtral-8x7b"), replace(PLAN, ep=8)
    assert own.model.moe is not None
    shape = (4096, 4096, 8, 2)
    steps = [
        step(timed(own, {("routing", shape): seconds, ("routing_backward", shape): 2 * seconds}), plan)["step"]
        for seconds in (0.02, 0.03)
    ]
    assert steps[1] - steps[0] == pytest.approx(own.model.num_layers * 0.03, rel=0.02)
    deepep = replace(plan, dispatcher="deepep")
    exchanged = timed(own, {("exchange", (*shape, 8, 8)): 0.02})
    assert step(exchanged, deepep)["ep_communication"] == pytest.approx(own.model.num_layers * 0.04, rel=0.02)
    assert step(exchanged, plan) == step(own, plan)  # of all-to-alls


def test_backward_passes_follow_the_forward_pass_where_they_were_not_measured() -> None:
    own = problem()
    both = step(timed(own, {("mlp", (4096, 4096, 14336)): 0.02}))["step"]
    assert np.isfinite(both)
    assert (
        both
        > step(timed(own, {("mlp", (4096, 4096, 14336)): 0.02, ("mlp_backward", (4096, 4096, 14336)): 1e-3}))["step"]
    )
