"""Do measured times take the place of the references, each in its own term, and does a step say what it rests on?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.api.problem import make_problem
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.memory_bound import KERNEL_START_S, KERNELS_BACKWARD, KERNELS_FORWARD, memory_bound_s
from autoplan.cost.kernels.products import gemm_rate, gemm_s
from autoplan.cost.kernels.sizes import expert_tokens
from autoplan.cost.kernels.times import kernel_times
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.algorithms import collective_s as unmeasured_s
from autoplan.cost.network.links import Links
from autoplan.cost.provenance import shares, term_shares
from autoplan.spec.blocks import Block
from autoplan.spec.calibration import Calibration, burst_factors
from autoplan.spec.enums import Sharding
from autoplan.spec.framework import Framework
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import STEP_TERMS
from autoplan.spec.timing import PROVENANCES, TimingTable
from test_estimate import DENSE, MODELS, PLAIN, cases, plans, price, problem_of, problems, single, terms_of

Times = dict[tuple[Any, ...], float]  # (operation, sizes ...) -> seconds


def table(times: Times, dtype: str = "bf16") -> TimingTable:
    return TimingTable.of(
        Measurement(operation=kind[0], shape=kind[1:], dtype=dtype, device="lab", seconds=seconds)
        for kind, seconds in times.items()
    )


def with_times(problem: Problem, times: Times, dtype: str = "bf16") -> Problem:
    return dataclasses.replace(problem, timings=table(times, dtype))


def batch_of(*plans: ParallelPlan) -> PlanBatch:
    return PlanBatch.of(plans, DENSE.num_layers)


def changes(problem: Problem, other: Problem, plan: ParallelPlan) -> dict[str, float]:
    """Terms that differ by more than rounding, by how much."""
    before, after = terms_of(problem, plan), terms_of(other, plan)
    least = 1e-12 * sum(after.values())
    return {name: after[name] - before[name] for name in STEP_TERMS if abs(after[name] - before[name]) > least}


def reference_s(problem: Problem, m: int, n: int, k: int, *, accumulates: bool = False) -> float:
    """Reference of one product in 16 bits."""
    rate = gemm_rate(problem, batch_of(single()))
    return float(gemm_s(problem, rate, *(np.array([float(size)]) for size in (m, n, k)), accumulates=accumulates)[0])


# The products of a layer of DENSE on one rank of 2,048 tokens, by (m, n, k): 16 heads of 64, 8 of them for keys.
QKV, OUT, FC1, FC2 = (2048, 2048, 1024), (2048, 1024, 1024), (2048, 8192, 1024), (2048, 1024, 4096)
HEAD = (2048, 32000, 1024)


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_a_known_product_changes_its_own_term_alone() -> None:
    problem, plan = problem_of(), single(global_batch=3)
    m, n, k = FC1
    known = with_times(problem, {("gemm", *FC1): 1e-3, ("dgrad", *FC1): 2e-3, ("wgrad", *FC1): 4e-3})
    references = (
        reference_s(problem, m, n, k) + reference_s(problem, m, k, n) + reference_s(problem, n, k, m, accumulates=True)
    )
    # 8 layers, 3 micro-batches.
    assert changes(problem, known, plan) == {"gemm": pytest.approx(8 * 3 * (7e-3 - references))}


def test_backward_products_that_were_not_measured_are_off_by_as_much_as_the_forward_one() -> None:
    problem, plan = problem_of(), single()
    products = (QKV, OUT, FC1, FC2)
    known = with_times(problem, {("gemm", *shape): 2 * reference_s(problem, *shape) for shape in products})
    assert changes(problem, known, plan) == {"gemm": pytest.approx(terms_of(problem, plan)["gemm"])}
    found = shares(known, batch_of(plan))
    forward = 8 * 2 * sum(reference_s(problem, *shape) for shape in products)
    step = price(known, plan).step_s[0]
    assert found["measured"][0] == pytest.approx(forward / step, rel=1e-6)
    assert found["interpolated"][0] == pytest.approx((terms_of(known, plan)["gemm"] - forward) / step, rel=1e-6)


def test_products_are_looked_up_in_the_precision_of_the_plan_and_the_head_in_16_bits() -> None:
    problem, wide, narrow = problem_of(), single(), single(precision="fp8")
    times: Times = {("gemm", *FC1): 1.0, ("gemm", *HEAD): 2.0}
    assert changes(problem, with_times(problem, times, "fp8"), wide) == {}
    assert set(changes(problem, with_times(problem, times, "fp8"), narrow)) == {"gemm"}
    assert set(changes(problem, with_times(problem, times), narrow)) == {"head"}
    half = single(precision="fp16")
    assert set(changes(problem, with_times(problem, times), half)) == {"gemm", "head"}


def test_products_with_scales_of_blocks_are_looked_up_as_such() -> None:
    problem, tensorwise, tiles = problem_of(), single(precision="fp8"), single(precision="fp8", fp8_scaling="blockwise")
    for plan, dtype, other in ((tensorwise, "fp8", "fp8_block"), (tiles, "fp8_block", "fp8")):
        assert set(changes(problem, with_times(problem, {("gemm", *QKV): 1e-3}, dtype), plan)) == {"gemm"}
        assert not changes(problem, with_times(problem, {("gemm", *QKV): 1e-3}, other), plan)


def test_attention_of_a_ring_is_its_part_and_of_an_exchange_has_fewer_heads() -> None:
    problem = problem_of()
    times: Times = {
        ("attention", 1, 2048, 16, 8, 64, 0): 0.8,
        ("attention_backward", 1, 2048, 16, 8, 64, 0): 1.6,
        ("attention", 1, 2048, 4, 2, 64, 0): 0.1,
        ("attention_backward", 1, 2048, 4, 2, 64, 0): 0.3,
    }
    known = with_times(problem, times)
    assert terms_of(known, single())["attention"] == pytest.approx(8 * 2.4)
    assert terms_of(known, single(cp=4))["attention"] == pytest.approx(8 * 2.4 / 4)
    assert terms_of(known, single(cp=4, cp_kind="all_to_all"))["attention"] == pytest.approx(8 * 0.4)
    assert terms_of(known, single(tp=4))["attention"] == pytest.approx(8 * 0.4)


def test_attention_within_a_window_is_looked_up_as_such() -> None:
    """Every fourth of 8 layers sees all: two of them."""
    mixed = dataclasses.replace(DENSE, window=512, full_attention_interval=4)
    problem = problem_of(mixed)
    whole: Times = {
        ("attention", 1, 2048, 16, 8, 64, 0): 0.8,
        ("attention_backward", 1, 2048, 16, 8, 64, 0): 1.6,
    }
    windowed: Times = {
        ("attention", 1, 2048, 16, 8, 64, 512): 0.1,
        ("attention_backward", 1, 2048, 16, 8, 64, 512): 0.3,
    }
    references = terms_of(problem, single())["attention"]
    of_whole = terms_of(with_times(problem, whole), single())["attention"]
    of_windowed = terms_of(with_times(problem, windowed), single())["attention"]
    both = terms_of(with_times(problem, whole | windowed), single())["attention"]
    assert both == pytest.approx(2 * 2.4 + 6 * 0.4)
    assert of_whole - 2 * 2.4 + of_windowed - 6 * 0.4 == pytest.approx(references)
    # A window as long as the sequence is none.
    short = problem_of(mixed, seq_len=512)
    assert changes(short, with_times(short, {("attention", 1, 512, 16, 8, 64, 512): 9.0}), single()) == {}
    assert set(changes(short, with_times(short, {("attention", 1, 512, 16, 8, 64, 0): 9.0}), single())) == {"attention"}


def test_latent_attention_is_looked_up_by_the_widths_of_its_keys_and_values() -> None:
    problem = problem_of("mla")
    times: Times = {
        ("latent_attention", 1, 2048, 16, 96, 64): 0.8,
        ("latent_attention_backward", 1, 2048, 16, 96, 64): 1.6,
        ("latent_attention", 1, 2048, 4, 96, 64): 0.1,
        ("latent_attention_backward", 1, 2048, 4, 96, 64): 0.3,
        ("attention", 1, 2048, 16, 16, 96, 0): 9.0,
    }
    known = with_times(problem, times)
    assert terms_of(known, single())["attention"] == pytest.approx(8 * 2.4)
    assert terms_of(known, single(cp=4))["attention"] == pytest.approx(8 * 2.4 / 4)
    assert terms_of(known, single(tp=4))["attention"] == pytest.approx(8 * 0.4)
    windowed = dataclasses.replace(MODELS["mla"], window=512)  # nothing was measured of both at once
    assert changes(problem_of(windowed), with_times(problem_of(windowed), times), single()) == {}


def test_a_slower_flash_kernel_takes_longer_than_the_measured_one_by_its_share() -> None:
    plain = problem_of(framework=PLAIN.changed(flash_kernel="flash2"))  # on H100: .70 of the rate
    known = with_times(
        plain, {("attention", 1, 2048, 16, 8, 64, 0): 0.70, ("attention_backward", 1, 2048, 16, 8, 64, 0): 1.40}
    )
    assert terms_of(known, single())["attention"] == pytest.approx(8 * 3.0)
    assert shares(known, batch_of(single()))["measured"][0] == 0.0


def test_attention_that_is_no_flash_kernel_is_not_looked_up() -> None:
    problem, times = problem_of(), {("attention", 1, 2048, 16, 8, 64, 0): 9.0}
    assert changes(problem, with_times(problem, times), single(attention="unfused")) == {}


def test_memory_bound_kernels_bring_their_own_starts() -> None:
    problem, plan = problem_of(), single()
    hidden, wide, roped = 2048 * 1024, 2048 * 4096, 2048 * 24 * 64
    times: Times = {
        ("norm", 2048, 1024): 1e-3,
        ("norm_backward", 2048, 1024): 2e-3,
        ("swiglu", 2048, 4096): 3e-3,
        ("swiglu_backward", 2048, 4096): 5e-3,
        ("rope", 2048, 24, 64): 7e-3,
        ("cross_entropy", 2048, 32000): 11e-3,
        ("optimizer", 100): 1.0,
    }
    moved = 2 * (4 + 8) * hidden + (6 + 10) * wide + (4 + 4) * roped  # two norms in a layer
    references = float(memory_bound_s(problem, np.array(float(moved)))) + 4 * 3 * KERNEL_START_S
    expected = 8 * (2 * (1e-3 + 2e-3) + 3e-3 + 5e-3 + 7e-3 - references)
    found = changes(problem, with_times(problem, times), plan)
    assert found["memory_bound"] == pytest.approx(expected)
    loss = 2 * float(memory_bound_s(problem, np.array(1.25 * PLAIN.memory.bytes_per_logit * 2048 * 32000)))
    assert found["head"] == pytest.approx(11e-3 - loss)
    assert set(found) == {"memory_bound", "head", "optimizer"}  # far beyond 100 parameters the rate stays


def test_a_framework_with_heavier_kernels_takes_longer_than_the_measured_fused_ones() -> None:
    heavy = problem_of(framework=PLAIN.changed(kernel_bytes_factor=2.0))
    times: Times = {("swiglu", 2048, 4096): 1.0, ("swiglu_backward", 2048, 4096): 2.0}
    added = terms_of(with_times(heavy, times), single())["memory_bound"] - terms_of(heavy, single())["memory_bound"]
    assert added == pytest.approx(8 * 2 * 3.0, rel=1e-3)


def test_experts_are_measured_with_the_activation_between_their_products() -> None:
    problem = problem_of("moe")
    plan = single(ep=4, dp_shard=4, global_batch=4)
    # 4 ranks bring 2,048 tokens each to 8 experts; layer 0 is dense.
    shape = (4 * 2048, 1024, 1024, 2, 8, 1, 4)
    known = with_times(problem, {("experts", *shape): 1.0, ("experts_backward", *shape): 2.0})
    batch, block = batch_of(plan), block_shapes(problem.model)[Block.MOE]
    assert expert_tokens(problem, batch)[0] * 2 == 4 * 2048 * 2 / 4
    plain, found = (kernel_times(variant, batch, Block.MOE, block) for variant in (problem, known))
    experts = [linear for linear in block.linears if linear.is_expert]
    assert len(experts) == 2
    activation = memory_bound_s(problem, np.array(6.0 * 2048 * 2 * 1024))
    dense = sum(plain.matrix_forward_s[name] for name in plain.matrix_forward_s if "expert" not in name)
    rest = plain.memory.forward_s - activation
    assert found.gemm.forward_s + found.memory.forward_s == pytest.approx(1.0 + dense + rest)
    # Under kernels that take longer the host launches more of the next ones in time.
    assert set(changes(problem, known, plan)) == {"gemm", "memory_bound", "launch"}


def test_the_optimizer_on_the_host_is_not_that_of_the_device() -> None:
    problem = problem_of()
    known = with_times(problem, {("optimizer", 1000): 1.0})
    assert set(changes(problem, known, single())) == {"optimizer"}
    assert changes(problem, known, single(offload="optimizer")) == {}


# -- collectives ------------------------------------------------------------------------------------------------------

ONE = np.ones(1, dtype=np.int64)


def collective_s(
    problem: Problem, operation: Operation, stride: int, size: int, num_bytes: float, copies: int = 1
) -> float:
    group = ProcessGroup(stride * ONE, size * ONE)
    return float(Links.of(problem).seconds(operation, group, np.array([float(num_bytes)]), copies)[0])


def test_siblings_at_once_count_before_a_group_alone() -> None:
    problem = problem_of()  # nodes of 8
    alone: Times = {("all_reduce", 2, 2, 1, 2**20): 1.0, ("all_reduce", 4, 4, 1, 2**20): 2.0}
    both = alone | {("all_reduce", 2, 2, 4, 2**20): 5.0}
    assert collective_s(with_times(problem, alone), "all_reduce", 1, 2, 2**20) == pytest.approx(1.0)
    assert collective_s(with_times(problem, both), "all_reduce", 1, 2, 2**20) == pytest.approx(5.0)
    assert collective_s(with_times(problem, both), "all_reduce", 1, 4, 2**20) == pytest.approx(2.0)


def test_groups_over_the_network_count_only_with_the_siblings_that_share_it() -> None:
    problem = problem_of()
    reference = float(
        unmeasured_s(problem.topology, "all_reduce", ProcessGroup(8 * ONE, 4 * ONE), np.array([2.0**20]))[0]
    )
    alone = with_times(problem, {("all_reduce", 4, 1, 1, 2**20): 1.0})
    assert collective_s(alone, "all_reduce", 8, 4, 2**20) == reference
    together = with_times(problem, {("all_reduce", 4, 1, 8, 2**20): 1.0})
    assert collective_s(together, "all_reduce", 8, 4, 2**20) == pytest.approx(1.0)
    assert collective_s(together, "all_reduce", 8, 4, 0) == 0.0
    assert collective_s(together, "all_reduce", 8, 1, 2**20) == 0.0


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"])
def test_every_collective_has_its_own_measurements(operation: Operation) -> None:
    problem = problem_of()
    known = with_times(problem, {(operation, 2, 2, 1, 2**20): 3.0}, "fp16")
    assert collective_s(known, operation, 1, 2, 2**20) == pytest.approx(3.0)
    pair, whole = (
        float(unmeasured_s(problem.topology, operation, ProcessGroup(ONE, size * ONE), np.array([2.0**20]))[0])
        for size in (2, 8)
    )
    # A group that was not measured takes as much longer than by the reference.
    expected = 3.0 if operation == "send_recv" else 3.0 * whole / pair
    assert collective_s(known, operation, 1, 8, 2**20) == pytest.approx(expected)


def test_groups_that_were_not_measured_are_scaled_from_the_nearest_that_were() -> None:
    problem = make_problem("llama3-8b", cluster="h100-sxm:16x8", seq_len=4096)
    size = 2**24

    def usual_s(stride: int, members: int) -> float:
        group = ProcessGroup(stride * ONE, members * ONE)
        return float(unmeasured_s(problem.topology, "reduce_scatter", group, np.array([float(size)]))[0])

    within, four_nodes, strided = usual_s(1, 8), usual_s(8, 4), usual_s(4, 8)
    known = with_times(
        problem,
        {
            ("reduce_scatter", 8, 8, 1, size): 1.5 * within,
            ("reduce_scatter", 4, 1, 8, size): 2.0 * four_nodes,
            ("reduce_scatter", 8, 2, 4, size): 3.0 * strided,
            ("reduce_scatter", 16, 4, 1, size): 9.0,  # without its siblings
        },
    )
    for stride, members, factor in ((1, 8, 1.5), (1, 4, 1.5), (8, 16, 2.0), (4, 32, 3.0), (2, 64, 3.0)):
        found = collective_s(known, "reduce_scatter", stride, members, size)
        assert found == pytest.approx(factor * usual_s(stride, members)), (stride, members)
    assert collective_s(known, "all_gather", 8, 16, size) == pytest.approx(
        float(unmeasured_s(problem.topology, "all_gather", ProcessGroup(8 * ONE, 16 * ONE), np.array([size * 1.0]))[0])
    )
    plan = ParallelPlan(global_batch=128, tp=8, dp_shard=16, sharding=Sharding.ZERO1)
    rests = term_shares(known, batch_of(plan))["data_parallel_reduce"]
    assert rests["scaled"][0] > 0.9


def test_a_message_leaves_the_node_where_any_hop_of_its_chain_does() -> None:
    known = with_times(problem_of(), {("send_recv", 2, 2, 1, 2**20): 1.0, ("send_recv", 2, 1, 8, 2**20): 2.0})
    assert collective_s(known, "send_recv", 2, 4, 2**20) == pytest.approx(1.0)
    assert collective_s(known, "send_recv", 2, 8, 2**20) == pytest.approx(2.0)
    assert collective_s(known, "send_recv", 8, 2, 2**20) == pytest.approx(2.0)


def test_a_dispatcher_that_sends_one_copy_to_each_rank_moves_a_smaller_buffer() -> None:
    # 8 copies for 2 random ranks: one of them, a rank, goes without with a probability of 1 / 256.
    known = with_times(problem_of(), {("all_to_all", 2, 2, 1, 2**20): 1.0, ("all_to_all", 2, 2, 1, 2**21): 2.0})
    sent = 2 * (1 - 0.5**8) / 8
    assert collective_s(known, "all_to_all", 1, 2, 2**20 / sent, 8) == pytest.approx(1.0)


# -- calibration ------------------------------------------------------------------------------------------------------

LAYER: Times = {
    **{(passed, *shape): 1e-3 for passed in ("gemm", "dgrad", "wgrad") for shape in (QKV, OUT, FC1, FC2, HEAD)},
    **{(passed, 1, 2048, 16, 8, 64, 0): 1e-3 for passed in ("attention", "attention_backward")},
}


def test_factors_of_components_multiply_references_and_not_measured_times() -> None:
    known, plan = with_times(problem_of(), LAYER), single()
    before = terms_of(known, plan)
    moved = terms_of(dataclasses.replace(known, calibration=Calibration(gemm=2.0, attention=3.0)), plan)
    assert moved == before
    slower = terms_of(dataclasses.replace(known, calibration=Calibration(memory_bound=2.0)), plan)
    assert slower["gemm"] == before["gemm"]
    assert slower["memory_bound"] == pytest.approx(2 * before["memory_bound"])
    gather: Times = {("all_gather", 2, 2, 1, 2**20): 3.0, ("all_gather", 8, 1, 8, 2**20): 4.0}
    links = dataclasses.replace(with_times(problem_of(), gather), calibration=Calibration(scale_up=2.0, scale_out=2.0))
    assert collective_s(links, "all_gather", 1, 2, 2**20) == pytest.approx(3.0)
    assert collective_s(links, "all_gather", 8, 8, 2**20) == pytest.approx(4.0)


def test_the_whole_step_and_the_host_are_calibrated_with_measured_times_too() -> None:
    framework = PLAIN.changed(host_s_per_block_forward=1.0, host_s_per_block_backward=2.0)
    known, plan = with_times(problem_of(framework=framework), LAYER), single()
    before = terms_of(known, plan)
    doubled = terms_of(dataclasses.replace(known, calibration=Calibration(overall=2.0)), plan)
    assert doubled == {name: 2 * value for name, value in before.items()}
    hosted = terms_of(dataclasses.replace(known, calibration=Calibration(host=2.0)), plan)
    assert hosted["launch"] > 1.9 * before["launch"] > 0


def test_bursts_stay_at_the_level_of_the_calibrated_reference() -> None:
    device = problem_of().cluster.device
    plain = burst_factors(device)
    calibrated = burst_factors(device, Calibration(gemm=2.0, attention=3.0, scale_up=5.0, overall=7.0))
    assert plain["all_reduce"] == 1.0
    assert calibrated["gemm"] == 2 * plain["gemm"] == calibrated["wgrad"]
    assert calibrated["attention_backward"] == 3 * plain["attention"]
    assert calibrated["all_to_all"] == 5.0


# -- laws -------------------------------------------------------------------------------------------------------------


def times_of(problem: Problem, plan: ParallelPlan) -> Times:
    """The reference's own times of every kernel of DENSE on one rank, of one sequence."""
    batch = batch_of(plan)
    times: Times = {}
    for m, n, k in (QKV, OUT, FC1, FC2, HEAD):
        times["gemm", m, n, k] = reference_s(problem, m, n, k)
        times["dgrad", m, n, k] = reference_s(problem, m, k, n)
        times["wgrad", m, n, k] = reference_s(problem, n, k, m, accumulates=True)
    attention = kernel_times(problem, batch, Block.ATTENTION, block_shapes(problem.model)[Block.ATTENTION])
    times["attention", 1, 2048, 16, 8, 64, 0] = float(attention.attention.forward_s[0])
    times["attention_backward", 1, 2048, 16, 8, 64, 0] = float(attention.attention.backward_s[0])

    def moving_s(num_bytes: float) -> float:
        return float(memory_bound_s(problem, np.array(num_bytes)))

    for name, shape, each in (("norm", (2048, 1024), (4, 8)), ("swiglu", (2048, 4096), (6, 10))):
        size = 2048.0 * shape[1]
        times[name, *shape] = moving_s(each[0] * size) + KERNEL_START_S
        times[f"{name}_backward", *shape] = moving_s(each[1] * size) + 2 * KERNEL_START_S
    times["rope", 2048, 24, 64] = moving_s(8.0 * 2048 * 24 * 64) + 3 * KERNEL_START_S
    times["cross_entropy", 2048, 32000] = moving_s(2.5 * PLAIN.memory.bytes_per_logit * 2048 * 32000)
    parameters = problem.model.num_layers * (1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024)
    parameters += 2 * 32000 * 1024 + 1024
    times["optimizer", parameters] = moving_s(PLAIN.kernels.bytes_moved_per_update * parameters)
    return times


def test_a_table_of_the_references_own_times_gives_the_reference_and_says_that_all_was_measured() -> None:
    problem, plan = problem_of(), single()
    known = with_times(problem, times_of(problem, plan))
    assert price(known, plan).step_s[0] == pytest.approx(price(problem, plan).step_s[0], rel=1e-9)
    # What no kernel of its own stands for: the residuals, the starts of the kernels between, and zeroing gradients.
    residuals = 8 * 2 * 12.0 * 2048 * 1024
    between = 8 * (2 * (KERNELS_FORWARD + KERNELS_BACKWARD) - 4 * 3) * KERNEL_START_S
    parameters = next(kind[1] for kind in times_of(problem, plan) if kind[0] == "optimizer")
    left = float(memory_bound_s(problem, np.array(residuals + PLAIN.memory.bytes_per_grad * parameters))) + between
    found = shares(known, batch_of(plan))
    assert found["reference"][0] == pytest.approx(left / price(known, plan).step_s[0], rel=1e-4)
    assert found["measured"][0] == pytest.approx(1 - found["reference"][0], rel=1e-6)
    assert found["interpolated"][0] == found["datasheet"][0] == 0.0


# Times that fit no reference, over the shapes of all plans: nearly everything is interpolated or measured.
SIZES = (64, 512, 1024, 4096, 32768)
SCATTERED: Times = {
    **{("gemm", m, n, k): 1e-14 * m * n * k + 1e-5 for m in SIZES for n in SIZES for k in SIZES},
    **{("wgrad", m, n, 1024): 3e-14 * m * n * 1024 for m in SIZES for n in SIZES},
    **{("attention", b, s, h, h, 64, 0): 1e-12 * b * h * s**2 for b in (1, 2) for s in SIZES for h in (2, 4, 8, 16)},
    **{("norm", m, n): 1e-11 * m * n for m in SIZES for n in SIZES},
    **{("all_gather", n, n, 1, 2**p): 1e-11 * 2**p for n in (2, 4, 8) for p in range(10, 31, 4)},
    **{("all_reduce", n, 1, 8, 2**p): 2e-11 * 2**p for n in (2, 4, 8) for p in range(10, 31, 4)},
    **{("send_recv", 2, 1, 8, 2**p): 2e-11 * 2**p for p in range(10, 31, 4)},
    **{("optimizer", 10**p): 1e-12 * 10**p for p in (3, 6, 9)},
}
TABLE = table(SCATTERED)


@settings(max_examples=20)
@given(cases(), st.booleans())
def test_shares_add_up_to_one(case: tuple[Problem, ParallelPlan], has_table: bool) -> None:
    problem, plan = case
    problem = dataclasses.replace(problem, timings=TABLE if has_table else TimingTable())
    found = shares(problem, batch_of(plan))
    assert tuple(found) == PROVENANCES
    values = [float(found[name][0]) for name in PROVENANCES]
    assert sum(values) == pytest.approx(1.0, abs=1e-9)
    assert all(-1e-9 <= value <= 1 + 1e-9 for value in values)
    if not has_table:
        assert values[:2] == [0.0, 0.0]


@settings(max_examples=30)
@given(problems, st.data())
def test_a_plan_takes_as_long_in_any_batch(problem: Problem, data: st.DataObject) -> None:
    problem = dataclasses.replace(problem, timings=TABLE)
    several = data.draw(st.lists(plans(model=problem.model.name), min_size=2, max_size=6))
    together = price(problem, *several)
    for at, plan in enumerate(several):
        assert together.step_s[at] == price(problem, plan).step_s[0]


@settings(max_examples=20)
@given(cases(), st.floats(0.1, 1.0))
def test_faster_kernels_never_make_a_plan_slower(case: tuple[Problem, ParallelPlan], factor: float) -> None:
    problem, plan = case
    slow = dataclasses.replace(problem, timings=TABLE)
    fast = dataclasses.replace(problem, timings=table({kind: factor * time for kind, time in SCATTERED.items()}))
    assert price(fast, plan).step_s[0] <= price(slow, plan).step_s[0] * (1 + 1e-12)


# -- provenance -------------------------------------------------------------------------------------------------------


def test_what_no_curve_was_fitted_to_rests_on_datasheets() -> None:
    # Neither Frontier's devices nor its links were measured by anybody whose tables are fitted.
    plan = single(tp=8, sp=True, dp_shard=4, global_batch=4)
    assert shares(problem_of(cluster="frontier:64x8"), batch_of(plan))["datasheet"][0] == pytest.approx(1.0)
    inside = shares(problem_of(), batch_of(single(tp=8, sp=True)))
    assert inside["reference"][0] == pytest.approx(1.0)
    across = problem_of()
    terms = terms_of(across, plan)
    work_s = sum(terms.values()) - terms["stragglers"]  # the slowest rank is late by a share of all that it does
    network_s = terms["data_parallel_reduce"] + terms["parameter_gather"]
    assert shares(across, batch_of(plan))["datasheet"][0] == pytest.approx(network_s / work_s, rel=1e-5)


def test_curves_of_a_similar_device_rest_on_datasheets() -> None:
    # The launches of these kernels were fitted to published runs; their rates are those of another device.
    for cluster in ("gaudi3:1x8", "rtx-4090:1x8"):
        known = problem_of(cluster=cluster)
        assert known.device.rate_spread > 0
        assert shares(known, batch_of(single(tp=8, sp=True)))["datasheet"][0] > 0.98


def test_what_hides_behind_other_work_has_no_share() -> None:
    host = Framework(name="host").changed(
        host_s_per_block_forward=1.0, host_s_per_block_backward=2.0, step_overhead_s=0.0
    )
    known = with_times(problem_of(framework=host), LAYER)
    found = shares(known, batch_of(single()))
    # Every layer waits for the host: of the kernels only the head shows.
    assert found["measured"][0] == pytest.approx(3e-3 / price(known, single()).step_s[0], rel=1e-3)


def test_shares_of_many_plans_are_those_of_each() -> None:
    known = dataclasses.replace(problem_of(), timings=TABLE)
    several = [single(), single(tp=4, sp=True), single(pp=2, global_batch=4), single(dp_shard=16, global_batch=16)]
    together = shares(known, batch_of(*several))
    for at, plan in enumerate(several):
        for name, share in shares(known, batch_of(plan)).items():
            assert together[name][at] == share[0], name


def test_every_kind_of_model_takes_a_table() -> None:
    for name in MODELS:
        problem = dataclasses.replace(problem_of(name), timings=TABLE)
        assert 0 < price(problem, single()).step_s[0] < price(problem, single(global_batch=2)).step_s[0]
