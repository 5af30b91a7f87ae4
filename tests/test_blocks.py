"""Do measured layers and heads take the place of the sums of their kernels, once, and only where they fit?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autoplan.api.timings import with_timings
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.cost.parameters import layer_parameters
from autoplan.cost.provenance import shares, term_shares
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store
from autoplan.spec.blocks import Experts
from autoplan.spec.framework import Framework
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from test_estimate import DENSE, MODELS, PLAIN, price, problem_of, single, terms_of
from test_measured_times import Times, batch_of, changes, with_times

# One layer of DENSE on one rank of 2,048 tokens, forward and backward, and on one of two.
ONE = (1, 2048, 1024, 4096, 16, 8, 64, 1)
LAYER: Times = {("layer", *ONE): 1.0, ("layer_backward", *ONE): 3.0}
HALF: Times = {(*shape[:-1], 2): seconds / 2 for shape, seconds in LAYER.items()}
HEAD: Times = {("head", 2048, 1024, 32000, 1): 5.0}
WORK = ("gemm", "attention", "memory_bound")


def eager(problem: Problem, times: Times) -> Problem:
    """The problem of a framework that runs the layers which were measured."""
    known = with_times(problem, times)
    return dataclasses.replace(known, timings=dataclasses.replace(known.timings, is_own=True))


def parameters_of_a_layer() -> float:
    return float(layer_parameters(problem_of(), batch_of(single()))[0])


def parameters_of_the_ends() -> float:
    return count_parameters(DENSE) - DENSE.num_layers * parameters_of_a_layer()


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
    slow = PLAIN.changed(host_s_per_block_forward=10.0, host_s_per_block_backward=20.0)
    for recompute in ("none", "full"):
        plan = single(recompute=recompute)
        assert terms_of(problem_of(framework=slow), plan)["launch"] > 0
        known = terms_of(eager(problem_of(framework=slow), LAYER), plan)
        assert known["launch"] == 0.0
        assert sum(known[name] for name in (*WORK, "recompute")) == pytest.approx(
            8 * (5.0 if recompute == "full" else 4)
        )


def test_a_layer_over_tensor_parallel_ranks_has_its_collectives_in_it() -> None:
    problem, plan = problem_of(), single(tp=2, sp=True)
    known = eager(problem, HALF)
    terms = terms_of(known, plan)
    ends = terms_of(problem_of(dataclasses.replace(DENSE, num_layers=1)), plan)["tp_communication"]
    ends -= (terms_of(problem, plan)["tp_communication"] - ends) / 7  # of its layer: those of embedding, head and loss
    assert work_s(known, plan) + terms["tp_communication"] == pytest.approx(8 * 2.0 + ends)
    assert set(changes(problem, known, plan)) == {*WORK, "tp_communication"}
    assert terms["tp_communication"] > 0


def test_gradients_are_added_up_in_a_measured_layer() -> None:
    framework = PLAIN.changed(bytes_moved_per_accumulated_grad=6.0)
    assert work_s(problem_of(framework=framework), single()) > work_s(problem_of(), single())
    without = work_s(eager(problem_of(), LAYER), single())
    assert work_s(eager(problem_of(framework=framework), LAYER), single()) == pytest.approx(without)


def test_sums_apart_from_products_read_a_gradient_and_read_and_write_its_buffer() -> None:
    fused, apart = single(), single(gradient_accumulation_fusion=False)
    ten_bytes = problem_of(framework=PLAIN.changed(bytes_moved_per_accumulated_grad=2.0 + 2 * 4.0))
    assert work_s(problem_of(), apart) == pytest.approx(work_s(ten_bytes, fused))
    assert work_s(ten_bytes, apart) == pytest.approx(work_s(ten_bytes, fused))  # no more where they are apart anyway


def test_recomputing_takes_what_it_was_measured_to_add() -> None:
    times: Times = LAYER | {("layer_backward_full", *ONE): 3.5, ("layer_backward_selective", *ONE): 3.25}
    known = eager(problem_of(), times)
    assert terms_of(known, single(recompute="full"))["recompute"] == pytest.approx(8 * 0.5)
    assert terms_of(known, single(recompute="selective"))["recompute"] == pytest.approx(8 * 0.25)
    # A table without it runs the layer's forward pass again.
    assert terms_of(eager(problem_of(), LAYER), single(recompute="full"))["recompute"] == pytest.approx(8 * 1.0)


def test_a_schedule_that_takes_the_backward_pass_apart_runs_its_measured_halves() -> None:
    plan = single(pp=2, global_batch=8, schedule="zb-h1")
    halves: Times = LAYER | {("layer_input_gradient", *ONE): 2.0, ("layer_weight_gradient", *ONE): 1.0}
    dearer: Times = LAYER | {("layer_input_gradient", *ONE): 3.0, ("layer_weight_gradient", *ONE): 1.0}
    alike, longer = (price(eager(problem_of(), table), plan).step_s[0] for table in (halves, dearer))
    # Four layers of each stage and eight micro-batches: each takes a second longer, the pipeline hides none of it.
    assert longer - alike >= 4 * 8 * 1.0
    whole = PLAIN.changed(torch_pipelines=True)
    # The gradient that the first stage owes nobody comes later: nothing is gained, and nothing split there.
    assert price(eager(problem_of(framework=whole), halves), plan).step_s[0] == pytest.approx(alike, rel=0.05)
    assert price(eager(problem_of(framework=whole), dearer), plan).step_s[0] < longer


def shared(replicas: int, none: float, kept: float, again: float) -> Times:
    shape = (*ONE, replicas, replicas)
    return {("replicated_layer", *shape): none, ("sharded_layer", *shape): kept, ("resharded_layer", *shape): again}


@pytest.mark.parametrize(
    ("sharding", "added"),  # by three micro-batches of eight layers beyond their passes of 4 s
    [
        ("none", 8 * 1.0),  # once a step
        ("zero1", 8 * 2.0),
        ("zero2", 8 * (0.5 + 3 * 1.5)),  # a gather of .5 once, the reduction in every micro-batch
        ("zero3", 8 * 3 * 2.5),
    ],
)
def test_shared_states_cost_what_was_measured_once_a_step_or_every_micro_batch(sharding: str, added: float) -> None:
    known = eager(problem_of(), LAYER | shared(2, 5.0, 6.0, 6.5))
    plan = single(dp_shard=2, sharding=sharding, global_batch=6)
    terms = terms_of(known, plan)
    of_layers = 8 * parameters_of_a_layer() / (8 * parameters_of_a_layer() + parameters_of_the_ends())
    found = terms["fsdp_communication"] + terms["data_parallel_reduce"]
    assert found == pytest.approx(added / of_layers, rel=1e-6)  # embedding and head cost as much by parameter
    assert terms["parameter_gather"] == 0.0


def test_one_replica_casts_and_sums_as_measured_and_a_pipeline_reduces_once() -> None:
    known = eager(problem_of(), LAYER | shared(1, 4.5, 4.5, 4.5) | shared(2, 5.0, 6.0, 6.5))
    assert terms_of(known, single(global_batch=3))["data_parallel_reduce"] == pytest.approx(
        8 * 0.5 * (1 + parameters_of_the_ends() / (8 * parameters_of_a_layer()))
    )
    piped = {sharding: single(pp=2, dp_shard=2, sharding=sharding, global_batch=8) for sharding in ("zero1", "zero3")}
    unpiped, three = (terms_of(known, plan) for plan in piped.values())
    assert unpiped["data_parallel_reduce"] == three["data_parallel_reduce"] > 0
    assert unpiped["fsdp_communication"] == three["fsdp_communication"] == 0.0


def test_shares_of_states_that_were_not_measured_keep_their_formulas() -> None:
    problem, plan = problem_of(), single(dp_shard=4, sharding="zero3", global_batch=8)
    known = eager(problem, LAYER | shared(2, 5.0, 6.0, 6.5))
    assert set(changes(problem, known, plan)) <= {*WORK, "fsdp_communication"}
    assert terms_of(known, plan)["data_parallel_reduce"] == terms_of(problem, plan)["data_parallel_reduce"]


def test_every_pass_of_a_pipeline_has_its_action_and_the_first_stage_its_embedding() -> None:
    problem, plan = problem_of(), single(pp=2, global_batch=8)
    actions: Times = {("pipeline_actions", m, 2, 2): 1.0 + 2 * m * 0.25 for m in (2, 8)}
    longer = price(eager(problem, actions), plan).step_s[0] - price(problem, plan).step_s[0]
    # Eight micro-batches and the fill, forward and backward; a share of what a step costs once with each.
    assert longer == pytest.approx(2 * (8 + 1) * (1.0 / 16 + 0.25), rel=0.01)
    # One micro-batch, which zb-h1 takes, has the actions of two: 1F1B, which is measured, takes no fewer.
    alone = single(pp=2, global_batch=1, schedule="zb-h1")
    assert terms_of(eager(problem, {("pipeline_actions", 2, 2, 2): 1.0}), alone)["launch"] == pytest.approx(
        terms_of(problem, alone)["launch"] + 2 / 4
    )
    embedding: Times = {("embedding", 2048, 1024, 32000, 1): 3.0}
    assert terms_of(eager(problem, embedding), single(global_batch=2))["head"] == pytest.approx(
        terms_of(problem, single(global_batch=2))["head"] + 2 * 3.0
    )


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
    problem = problem_of()
    assert changes(problem, eager(problem, LAYER), single(attention="unfused")) == {}


def test_a_framework_with_kernels_of_its_own_takes_no_other_units_of_the_trainer() -> None:
    problem = problem_of()
    ends: Times = HEAD | {("embedding", 2048, 1024, 32000, 1): 3.0, ("pipeline_actions", 8, 2, 2): 9.0}
    assert changes(problem, with_times(problem, ends), single()) == {}
    piped = single(pp=2, global_batch=8)
    assert changes(problem, with_times(problem, ends), piped) == {}
    assert set(changes(problem, eager(problem, ends), piped)) == {"head", "launch", "pipeline_bubble"}


def test_eager_kernels_are_taken_as_they_were_measured() -> None:
    heavy = problem_of(framework=PLAIN.changed(kernel_bytes_factor=2.0, fused_norm=False))
    slow = problem_of(framework=PLAIN.changed(flash_kernel="flash2"))
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


def test_what_the_terms_rest_on_adds_up_to_what_the_step_does() -> None:
    known, batch = eager(problem_of(), LAYER | HEAD), batch_of(single())
    costs, whole, terms = price(known, single()), shares(known, batch), term_shares(known, batch)
    assert terms["head"]["measured"][0] == pytest.approx(1.0)
    assert set(terms) == {name for name, value in costs.terms_s.items() if value[0] > 0}
    for name, share in whole.items():
        rests_s = sum(costs.terms_s[term][0] * found[name][0] for term, found in terms.items())
        assert rests_s == pytest.approx(share[0] * costs.step_s[0], rel=1e-6, abs=1e-6)


def test_dense_layers_of_a_mixture_of_experts_count_too() -> None:
    problem = problem_of("moe")
    shape = (1, 2048, 1024, MODELS["moe"].ffn_size, 16, 8, 64, 1)
    known = eager(problem, {("layer", *shape): 1.0, ("layer_backward", *shape): 3.0})
    assert work_s(known, single()) > 4.0


def test_a_measured_layer_of_experts_takes_the_place_of_its_kernels() -> None:
    moe = Experts(num_experts=8, experts_per_token=2, expert_ffn_size=512)
    problem = problem_of(dataclasses.replace(DENSE, moe=moe))
    shape = (1, 2048, 1024, 512, 16, 8, 64, 1, 8, 2)
    times: Times = {("moe_layer", *shape): 1.0, ("moe_layer_backward", *shape): 3.0}
    known, plan = eager(problem, times), single(global_batch=3)
    assert work_s(known, plan) == pytest.approx(8 * 3 * 4.0)
    assert terms_of(known, plan)["launch"] == 0.0
    full: Times = times | {("moe_layer_backward_full", *shape): 3.5}
    assert terms_of(eager(problem, full), single(recompute="full"))["recompute"] == pytest.approx(8 * 0.5)
    # Experts that tokens travel to, and those beside a shared expert, are no such unit.
    split = single(dp_shard=8, ep=8, global_batch=8)
    assert work_s(known, split) == pytest.approx(work_s(problem, split))
    beside = problem_of(dataclasses.replace(DENSE, moe=dataclasses.replace(moe, shared_expert_ffn_size=512)))
    assert work_s(eager(beside, times), plan) == pytest.approx(work_s(beside, plan))


def test_layers_of_the_database_price_the_framework_that_runs_them_and_kernels_those_that_do_not_fuse_them(
    tmp_path: Path,
) -> None:
    machine = Fingerprint(device="h100-sxm", torch="2.13.0")
    kernels: Times = {("rope", 2048, 24, 64): 1.0, ("norm", 2048, 1024): 1.0}
    megatron_layer = {kind: 2 * seconds for kind, seconds in LAYER.items()}
    records = [
        Record(
            fingerprint=machine, operation=kind[0], shape=kind[1:], dtype="bf16", samples_s=(seconds,), kernel=kernel
        )
        for kernel, times in (("", kernels), ("trainer", LAYER), ("megatron-core: layer", megatron_layer))
        for kind, seconds in times.items()
    ]
    place = str(tmp_path / "lab.db")
    with open_store(place) as store:
        store.add(records)
    torch, megatron, torchtitan = (
        with_timings(problem_of(framework=load_framework(name)), "db", place)
        for name in ("torch", "megatron-core", "torchtitan")
    )
    assert torch.timings.is_own
    assert torch.timings.holds("rope", "bf16")
    assert work_s(torch, single()) == pytest.approx(32.0)
    assert not megatron.timings.is_own
    assert not megatron.timings.holds("rope", "bf16")
    assert work_s(megatron, single()) == pytest.approx(64.0)
    # Nobody measured its layers: its norms alone, forward and backward, in its own kernels.
    assert not torchtitan.timings.holds("layer", "bf16")
    heavier = torchtitan.framework.kernels.kernel_bytes_factor
    assert work_s(torchtitan, single()) == pytest.approx(8 * 2 * 3.0 * heavier, rel=0.02)


def test_plain_torch_runs_what_is_measured_and_nobody_else_says_so() -> None:
    assert [name for name in preset_frameworks() if load_framework(name).is_trainer] == ["torch"]
    assert not Framework(name="mine").is_trainer
