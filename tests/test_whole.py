"""Do measured layers and heads take the place of the sums of their kernels, once, and only where they fit?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autoplan.cli.inputs import with_timings
from autoplan.cost.provenance import shares
from autoplan.framework import Framework
from autoplan.plan import ParallelPlan
from autoplan.problem import Problem
from autoplan.read.framework import load_framework, preset_frameworks
from profiler.record import Fingerprint, Record
from profiler.store import open_store
from test_estimate import DENSE, MODELS, PLAIN, price, problem_of, single, terms_of
from test_measured import Times, batch_of, changes, with_times

# One layer of DENSE on one rank of 2,048 tokens, forward and backward, and on one of two.
LAYER: Times = {
    ("layer", 1, 2048, 1024, 4096, 16, 8, 64, 1): 1.0,
    ("layer_backward", 1, 2048, 1024, 4096, 16, 8, 64, 1): 3.0,
}
HALF: Times = {(*shape[:-1], 2): seconds / 2 for shape, seconds in LAYER.items()}
HEAD: Times = {("head", 2048, 1024, 32000): 5.0}
WORK = ("gemm", "attention", "memory_bound")


def eager(problem: Problem, times: Times) -> Problem:
    """The problem of a framework that runs the layers which were measured."""
    known = with_times(problem, times)
    return dataclasses.replace(known, timings=dataclasses.replace(known.timings, is_own=True))


def work_s(problem: Problem, plan: ParallelPlan) -> float:
    terms = terms_of(problem, plan)
    return sum(terms[name] for name in WORK)


def test_a_measured_layer_takes_the_place_of_its_kernels() -> None:
    problem, plan = problem_of(), single(global_batch=3)
    known = eager(problem, LAYER)
    assert work_s(known, plan) == pytest.approx(8 * 3 * 4.0)
    assert set(changes(problem, known, plan)) == set(WORK)
    # Its kernels count no second time.
    both = eager(problem, LAYER | {("gemm", 2048, 8192, 1024): 7.0, ("norm", 2048, 1024): 9.0})
    assert work_s(both, plan) == pytest.approx(8 * 3 * 4.0)


def test_launches_are_in_a_measured_layer() -> None:
    slow = dataclasses.replace(PLAIN, host_s_per_block_forward=10.0, host_s_per_block_backward=20.0)
    for recompute in ("none", "full"):
        plan = single(recompute=recompute)
        assert terms_of(problem_of(framework=slow), plan)["launch"] > 0
        known = terms_of(eager(problem_of(framework=slow), LAYER), plan)
        assert known["launch"] == 0.0
        assert sum(known[name] for name in (*WORK, "recompute")) == pytest.approx(
            8 * (5.0 if recompute == "full" else 4)
        )


def test_a_layer_of_a_tensor_parallel_rank_leaves_its_collectives_as_they_are() -> None:
    problem, plan = problem_of(), single(tp=2, sp=True)
    known = eager(problem, HALF)
    assert work_s(known, plan) == pytest.approx(8 * 2.0)
    assert set(changes(problem, known, plan)) == set(WORK)
    assert terms_of(known, plan)["tp_communication"] > 0


def test_gradients_are_added_up_beside_a_measured_layer() -> None:
    framework = dataclasses.replace(PLAIN, bytes_moved_per_accumulated_grad=6.0)
    without = work_s(eager(problem_of(), LAYER), single())
    added = work_s(problem_of(framework=framework), single()) - work_s(problem_of(), single())
    assert added > 0
    assert work_s(eager(problem_of(framework=framework), LAYER), single()) == pytest.approx(without + added)


def test_a_measured_head_takes_the_place_of_its_product_and_loss() -> None:
    problem, plan = problem_of(), single(global_batch=2)
    assert terms_of(eager(problem, HEAD), plan)["head"] == pytest.approx(2 * 5.0)
    assert set(changes(problem, eager(problem, HEAD), plan)) == {"head"}


@pytest.mark.parametrize(
    ("times", "model", "plan"),
    [
        ({kind: time for kind, time in LAYER.items() if kind[0] == "layer"}, "dense", {}),  # one pass alone
        (LAYER, "dense", {"cp": 2}),
        (HALF, "dense", {"tp": 2, "sp": False}),
        (LAYER, "mla", {}),
        (LAYER, dataclasses.replace(DENSE, norms_per_block=2), {}),
        (LAYER, dataclasses.replace(DENSE, qk_norm="head"), {}),
        (LAYER, dataclasses.replace(DENSE, position_embedding="none"), {}),
        (LAYER, dataclasses.replace(DENSE, qkv_bias=True), {}),
        (LAYER, "dense", {"precision": "fp8"}),
    ],
)
def test_what_is_no_such_layer_keeps_its_kernels(times: Times, model: Any, plan: dict[str, Any]) -> None:
    problem = problem_of(model)
    assert changes(problem, eager(problem, times), single(**plan)) == {}


def test_unfused_attention_is_not_in_the_measured_layer() -> None:
    plain = problem_of()
    problem = dataclasses.replace(plain, training=dataclasses.replace(plain.training, attention="unfused"))
    assert changes(problem, eager(problem, LAYER), single()) == {}


def test_a_framework_with_kernels_of_its_own_takes_no_whole_layers() -> None:
    problem = problem_of()
    assert changes(problem, with_times(problem, LAYER | HEAD), single()) == {}


def test_eager_kernels_are_taken_as_they_were_measured() -> None:
    heavy = problem_of(framework=dataclasses.replace(PLAIN, kernel_bytes_factor=2.0, fused_norm=False))
    slow = problem_of(framework=dataclasses.replace(PLAIN, flash_kernel="flash2"))
    swiglu: Times = {("swiglu", 2048, 4096): 1.0, ("swiglu_backward", 2048, 4096): 2.0}
    norm: Times = {("norm", 2048, 1024): 1.0, ("norm_backward", 2048, 1024): 2.0}
    assert changes(heavy, eager(heavy, swiglu), single())["memory_bound"] == pytest.approx(8 * 3.0, rel=1e-2)
    assert changes(heavy, eager(heavy, norm), single())["memory_bound"] == pytest.approx(8 * 2 * 3.0, rel=1e-2)
    attention: Times = {
        ("attention", 1, 2048, 16, 8, 64, 0): 1.0,
        ("attention_backward", 1, 2048, 16, 8, 64, 0): 2.0,
    }
    assert terms_of(eager(slow, attention), single())["attention"] == pytest.approx(8 * 3.0)


def test_a_step_rests_on_the_layers_and_heads_that_were_measured() -> None:
    known = eager(problem_of(), LAYER | HEAD)
    step_s = price(known, single()).step_s[0]
    found = shares(known, batch_of(single()))
    assert found["measured"][0] == pytest.approx((8 * 4.0 + 5.0) / step_s, rel=1e-6)
    assert found["interpolated"][0] == 0.0
    # Of a micro-batch between two that were measured, what only the layers rest on is interpolated.
    four: Times = {(kind[0], 4, *kind[2:]): 4 * time for kind, time in LAYER.items()}
    between = eager(problem_of(), LAYER | four)
    plan = single(micro_batch=2, global_batch=2)
    assert work_s(between, plan) == pytest.approx(8 * 8.0, rel=0.02)
    assert shares(between, batch_of(plan))["interpolated"][0] > 0.99


def test_dense_layers_of_a_mixture_of_experts_count_too() -> None:
    problem = problem_of("moe")
    shape = (1, 2048, 1024, MODELS["moe"].ffn_size, 16, 8, 64, 1)
    known = eager(problem, {("layer", *shape): 1.0, ("layer_backward", *shape): 3.0})
    assert work_s(known, single()) > 4.0


def test_timings_of_the_database_are_plain_torchs_own_and_others_leave_what_they_fuse(tmp_path: Path) -> None:
    machine = Fingerprint(device="h100-sxm", torch="2.13.0")
    times: Times = LAYER | {("rope", 2048, 24, 64): 1.0, ("norm", 2048, 1024): 1.0}
    records = [
        Record(fingerprint=machine, operation=kind[0], shape=kind[1:], dtype="bf16", samples_s=(seconds,))
        for kind, seconds in times.items()
    ]
    place = str(tmp_path / "lab.db")
    with open_store(place) as store:
        store.add(records)
    torch, megatron = (
        with_timings(problem_of(framework=load_framework(name)), "db", place) for name in ("torch", "megatron-core")
    )
    assert torch.timings.is_own
    assert torch.timings.holds("rope", "bf16")
    assert 32.0 < work_s(torch, single()) < 32.1  # and gradients are added up
    assert not megatron.timings.is_own
    assert not megatron.timings.holds("rope", "bf16")
    # Its norms alone, forward and backward, in its own kernels.
    heavier = megatron.framework.kernel_bytes_factor
    assert work_s(megatron, single()) == pytest.approx(8 * 2 * 3.0 * heavier, rel=0.02)


def test_plain_torch_runs_what_is_measured_and_nobody_else_says_so() -> None:
    assert [name for name in preset_frameworks() if load_framework(name).eager_layers] == ["torch"]
    assert not Framework(name="mine").eager_layers
