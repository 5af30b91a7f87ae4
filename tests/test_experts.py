"""What mixtures of experts wait for: the host, and traffic that other micro-batches hide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.base.arrays import Floats
from autoplan.base.curves import GemmCurve
from autoplan.base.errors import InputError
from autoplan.cost.blocks import _experts_wait_s, block_costs
from autoplan.cost.collectives.expert_parallel import (
    expert_parallel,
    expert_parallel_s,
    shown_expert_parallel_s,
    unpaired_share,
)
from autoplan.cost.kernels.attention import NARROW_ATTENTION_TIME
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.launches import BIAS_PER_EXPERT
from autoplan.cost.kernels.memory_bound import (
    ATOMIC_SUMS_PER_UNIT,
    KERNEL_START_S,
    OP_BY_OP_SHARE,
    SUM_BYTES,
    memory_bound_s,
    traffic_of,
)
from autoplan.cost.kernels.products import gemm_pace, gemm_rate, matrices_s
from autoplan.cost.kernels.sizes import expert_imbalance, expert_tokens, norm_tokens, rank_expert_tokens, rank_tokens
from autoplan.cost.kernels.times import kernel_times
from autoplan.cost.memory.expert_buffers import held_expert_tokens
from autoplan.cost.network.links import Links
from autoplan.frameworks.common.header import header
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.megatron_lm.read import READER
from autoplan.frameworks.presets import load_framework
from autoplan.launch.targets import exported
from autoplan.readers.calibration import built_in_calibration
from autoplan.readers.cluster import load_cluster
from autoplan.report.answer import answer_lines
from autoplan.spec.blocks import Block, Experts
from autoplan.spec.calibration import Calibration
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import OWN_ROUTING_LOSS
from problems import problem_for

MODEL = ModelSpec(
    name="moe",
    num_layers=8,
    hidden_size=1024,
    vocab_size=32000,
    num_heads=8,
    moe=Experts(num_experts=32, experts_per_token=2, expert_ffn_size=512),
)
FRAMEWORK = load_framework("megatron-core").changed(
    moe_sync_s=1e-3, narrow_sync_s=0.5e-3, s_per_local_expert=1e-5, host_s_per_launch=50e-6
)
PROBLEM = problem_for(MODEL, "h100-sxm:1x8", FRAMEWORK, calibration=Calibration(host=2.0))


def batch_of(**changes: object) -> PlanBatch:
    values: dict[str, object] = {"global_batch": 32, "ep": 8, "dp_shard": 8, "sharding": "zero1"}
    return PlanBatch.of([ParallelPlan(**(values | changes))], MODEL.num_layers)  # type: ignore[arg-type]


def test_every_pass_waits_for_the_host_and_in_eight_bits_for_the_casts_of_each_local_expert() -> None:
    """Twice a wait of 1 ms, in eight bits with .5 ms and 10 us for each of 4 experts."""
    wait = _experts_wait_s(PROBLEM, batch_of(dispatcher="deepep"))
    assert wait.forward_s[0] == wait.backward_s[0] == pytest.approx(2.0 * 1e-3)
    narrow = _experts_wait_s(PROBLEM, batch_of(dispatcher="deepep", precision="fp8"))
    assert narrow.backward_s[0] == pytest.approx(2.0 * (1.5e-3 + 4 * 1e-5))


def test_an_all_to_all_counts_its_tokens_in_front_of_every_forward_pass_unless_a_graph_does() -> None:
    """14 kernels of 50 us each, of a host that takes twice as long."""
    wait = _experts_wait_s(PROBLEM, batch_of())
    assert (wait.forward_s - wait.backward_s)[0] == pytest.approx(2.0 * 14 * 50e-6)
    assert _experts_wait_s(PROBLEM, batch_of(cuda_graphs="router")).forward_s[0] == pytest.approx(2.0 * 1e-3)


@pytest.mark.parametrize(("ep", "waits"), [(8, True), (1, False)])
def test_torchs_grouped_products_wait_for_the_host_where_tokens_leave_the_device(ep: int, waits: bool) -> None:
    problem = replace(PROBLEM, framework=FRAMEWORK.changed(torch_grouped_products=True, host_s_per_launch=0.0))
    assert _experts_wait_s(problem, batch_of(ep=ep)).backward_s[0] == (2e-3 if waits else 0.0)


def test_a_graph_of_static_shapes_waits_for_nothing() -> None:
    static: dict[str, object] = {"dispatcher": "hybridep", "precision": "mxfp8"}
    for graphs in ("none", "attn", "layer"):
        assert _experts_wait_s(PROBLEM, batch_of(cuda_graphs=graphs, **static)).total_s[0] > 0.0
    assert _experts_wait_s(PROBLEM, batch_of(cuda_graphs="full_iteration", **static)).total_s[0] == 0.0


def test_experts_that_drop_tokens_wait_for_no_host_and_get_every_copy_of_a_token() -> None:
    assert _experts_wait_s(PROBLEM, batch_of(token_dropping=True)).total_s[0] == 0.0
    batches = batch_of(dispatcher="deepep"), batch_of(token_dropping=True)
    copies = [expert_parallel(PROBLEM, batch).dispatch.copies for batch in batches]
    assert copies == [2, 1]  # what one transfer stands for


@pytest.mark.parametrize(
    ("factor", "pads", "share"),
    [(1.0, True, 1.0), (2.0, True, 2.0), (1.0, False, 1.0), (1.2, False, 1.2), (2.0, False, 1.5), (0.5, False, 0.5)],
)
def test_experts_that_drop_tokens_have_their_capacity_or_what_comes_to_them(
    factor: float, pads: bool, share: float
) -> None:
    training = replace(PROBLEM.training, expert_imbalance=1.5, capacity_factor=factor, pads_experts=pads)
    uneven = replace(PROBLEM, training=training)
    mean = expert_tokens(PROBLEM, batch_of())[0]
    assert expert_tokens(uneven, batch_of(token_dropping=True))[0] == pytest.approx(share * mean)
    assert expert_tokens(uneven, batch_of())[0] == pytest.approx(1.5 * mean)
    assert (_experts_wait_s(uneven, batch_of(token_dropping=True)).total_s[0] == 0.0) == pads


@pytest.mark.parametrize(("dispatcher", "sorted_share"), [("alltoall", 1.25), ("deepep", 1.5)])
def test_the_busiest_rank_exchanges_sorts_and_activates_the_more_tokens(dispatcher: str, sorted_share: float) -> None:
    """Ranks that send sort as many as ever; where tokens are sent once, only those that receive sort."""
    uneven = replace(PROBLEM, training=replace(PROBLEM.training, expert_imbalance=1.5))
    batch, alone = batch_of(dispatcher=dispatcher), batch_of(ep=1)
    for plans, received, permuted in ((batch, 1.5, sorted_share), (alone, 1.0, 1.0)):
        exchanges, even_exchanges = expert_parallel(uneven, plans), expert_parallel(PROBLEM, plans)
        moved, even_moved = (traffic_of(problem, plans, Block.MOE) for problem in (uneven, PROBLEM))
        for name in ("dispatch", "combine", "gather", "reduce"):
            more, mean = getattr(exchanges, name), getattr(even_exchanges, name)
            assert more.buffer_bytes == pytest.approx(received * mean.buffer_bytes)
        for name, share in (("expert_activation", received), ("permute", permuted)):
            assert moved[name].backward_bytes == pytest.approx(share * even_moved[name].backward_bytes)


def test_torch_sorts_what_a_rank_receives_once_more_and_adds_up_element_by_element() -> None:
    """Two copies of 4,096 tokens of width 1,024: 8 and 18 bytes an element, two sums of .415e9 a second and unit."""
    framework = FRAMEWORK.changed(sorts_received=True, atomic_expert_sums=True)
    problem, elements = replace(PROBLEM, framework=framework), 2 * 4096 * 1024
    slower = problem.device.memory_efficiency / OP_BY_OP_SHARE["hopper"]
    moved = traffic_of(problem, batch_of(), Block.MOE)
    assert moved["sort_received"].forward_bytes == pytest.approx(8 * slower * elements)
    assert moved["sort_received"].backward_bytes == pytest.approx(18 * slower * elements)
    beyond_s = memory_bound_s(problem, moved["expert_sums"].backward_bytes + 2 * SUM_BYTES * elements)
    assert beyond_s == pytest.approx(2 * elements / (ATOMIC_SUMS_PER_UNIT * 132))
    assert moved["expert_sums"].forward_bytes == 0.0
    assert traffic_of(problem, batch_of(ep=1), Block.MOE)["sort_received"].forward_bytes == 0.0
    once = traffic_of(problem, batch_of(dispatcher="deepep"), Block.MOE)
    assert (once["sort_received"].backward_bytes == 0.0) & (once["expert_sums"].backward_bytes == 0.0)
    assert not {"sort_received", "expert_sums"} & traffic_of(PROBLEM, batch_of(), Block.MOE).keys()


def test_a_balancing_loss_says_how_uneven_ranks_are_the_more_ranks_there_are() -> None:
    """Loads of variance .25: ranks of 4 of 32 experts vary by .25 x sqrt(7 / 8), the busiest of 8 lies 1.43 above."""
    uneven = replace(PROBLEM, training=replace(PROBLEM.training, balancing_loss=1.25))
    batches = [batch_of(ep=ep) for ep in (1, 2, 8, 32)]
    alone, pair, eight, each = (float(expert_imbalance(uneven, batch)[0]) for batch in batches)
    assert alone == 1.0
    assert eight == pytest.approx(1 + 1.434 * 0.25 * (7 / 8) ** 0.5, rel=1e-3)
    assert alone < pair < eight < each
    collapsed = replace(PROBLEM, training=replace(PROBLEM.training, balancing_loss=16.0))
    assert expert_imbalance(collapsed, batches[2])[0] <= 8.0
    assert (expert_imbalance(PROBLEM, batches[2]) == 1.0).all()


def test_fine_tuning_and_torchtitan_have_the_routing_of_routers_alone_unless_told() -> None:
    place = {"cluster": "h100-sxm:1x8", "global_batch": 16, "seq_len": 1024, "plan": {"ep": 8, "recompute": "full"}}
    titan = {"framework": "torchtitan", "plan": {"ep": 8, "recompute": "full", "sharding": "zero3"}}

    def priced(**options: object) -> Any:
        return autoplan.estimate("gpt-oss-20b", **(place | options))  # type: ignore[arg-type]

    new, tuned, free, stated, even = (
        priced(**options).file.training
        for options in (
            {},
            {"finetune": "full"},
            titan,
            {"balancing_loss": 1.1},
            {"finetune": "full", "expert_imbalance": 1.0},
        )
    )
    losses = [training.balancing_loss for training in (new, tuned, free, stated, even)]
    assert losses == [1.0, OWN_ROUTING_LOSS, OWN_ROUTING_LOSS, 1.1, 1.0]
    assert [dict(answer_lines(priced(**options).file))["experts"] for options in ({}, titan)] == [
        "assumed to be used evenly; --balancing-loss changes it",
        "assumed to be used as unevenly as a balancing loss of 1.3 says; --balancing-loss changes it",
    ]
    assert priced(balancing_loss=1.1).best.step_s > priced().best.step_s
    with pytest.raises(InputError, match=r"--expert-imbalance 1\.2 and --balancing-loss 1\.3 both say"):
        priced(balancing_loss=1.3, expert_imbalance=1.2)
    with pytest.raises(InputError, match="balancing_loss must be between 1"):
        priced(balancing_loss=0.5)


def test_a_capacity_factor_is_said_by_a_flag_and_read_back() -> None:
    place = {"cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096, "plan": {"ep": 8, "recompute": "full"}}
    usual, more = (
        autoplan.estimate("mixtral-8x7b", capacity_factor=factor, **place)  # type: ignore[arg-type]
        for factor in (1.0, 1.25)
    )
    assert usual.best.plan.token_dropping
    assert more.best.step_s > usual.best.step_s
    (script,) = exported(more.file, "megatron-lm", "torchrun")
    launch = READER.read(script.text, LaunchContext())
    assert (launch.plan, launch.training) == (more.best.plan, more.file.training)
    with pytest.raises(InputError, match="--capacity-factor needs a model with experts, llama3-8b has none"):
        autoplan.estimate("llama3-8b", **place | {"plan": {}}, capacity_factor=1.25)  # type: ignore[arg-type]


def test_the_imbalance_of_experts_is_said_by_a_flag_that_search_and_estimate_take() -> None:
    place = {"cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096}
    plan = {"ep": 8, "recompute": "full"}
    even, uneven = (
        autoplan.estimate("mixtral-8x7b", plan=plan, expert_imbalance=ratio, **place)  # type: ignore[arg-type]
        for ratio in (None, 1.3)
    )
    assert uneven.best.step_s > even.best.step_s
    assert uneven.best.memory_bytes > even.best.memory_bytes
    found = autoplan.search("mixtral-8x7b", expert_imbalance=1.3, **place)  # type: ignore[arg-type]
    assert found.file.training.expert_imbalance == 1.3
    assert "Priced with 1.3 times the mean" in "\n".join(header(found.file, "Megatron-LM"))
    with pytest.raises(InputError, match="--expert-imbalance needs a model with experts, llama3-8b has none"):
        autoplan.estimate("llama3-8b", expert_imbalance=1.3, **place)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expert_imbalance must be between 1"):
        autoplan.estimate("mixtral-8x7b", expert_imbalance=0.5, **place)  # type: ignore[arg-type]


def test_permuting_tokens_by_capacity_moves_three_times_as_much() -> None:
    """Traffic of 2 copies of 4,096 tokens of width 1,024, 4 bytes each, in and out, times that of its own kernels."""
    shape = block_shapes(MODEL)[Block.MOE]
    apart, dropping = (
        kernel_times(PROBLEM, batch_of(token_dropping=drops), Block.MOE, shape) for drops in (False, True)
    )
    twice_s = memory_bound_s(
        PROBLEM, np.array([2 * FRAMEWORK.kernels.kernel_bytes_factor * 2 * 4.0 * 4096 * 2 * 1024])
    )[0]
    assert (dropping.memory.forward_s - apart.memory.forward_s)[0] == pytest.approx(twice_s)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1 / 4),  # four micro-batches: the first forward and the last backward are alone
        ({"pp": 2, "vp": 2, "schedule": "interleaved", "ep": 4, "dp_shard": 4, "global_batch": 32}, 5 / 16),
    ],
)
def test_warm_up_runs_beside_nothing(changes: dict[str, object], share: float) -> None:
    assert unpaired_share(batch_of(**changes))[0] == pytest.approx(share)


@pytest.mark.parametrize(("work_s", "hidden"), [(4.0, 1.0), (1.0, 0.5)])
def test_paired_traffic_costs_what_it_cannot_hide_and_the_units_it_takes(work_s: float, hidden: float) -> None:
    """1 s of traffic a pass: all of it, or half of it, hides, at 32 of the 132 units of an H100."""
    traffic, work = np.array([1.0]), np.array([work_s])
    assert shown_expert_parallel_s(PROBLEM, batch_of(dispatcher="hybridep"), traffic, work, 0.0 * work)[0] == 1.0
    shown = shown_expert_parallel_s(
        PROBLEM, batch_of(ep_overlap=True, dispatcher="hybridep"), traffic, work, 0.0 * work
    )[0]
    assert shown == pytest.approx(1 / 4 + 3 / 4 * (1.0 - hidden * (1 - 32 / 132)))


def test_deepep_moves_no_more_than_its_compute_units() -> None:
    """Combining 4,096 tokens of width 7,168 for 8 of 256 experts on 8 B200: 882 us (aiconfigurator-core 0.12.0)."""
    model = replace(MODEL, hidden_size=7168, moe=Experts(num_experts=256, experts_per_token=8, expert_ffn_size=512))
    problem = replace(PROBLEM, model=model, cluster=load_cluster("b200:1x8"), calibration=Calibration())
    links = Links.of(problem)
    batch = batch_of(dispatcher="deepep")
    both = expert_parallel_s(problem, batch, links)[0] - 2 * problem.framework.host.host_s_per_collective
    assert both / 2 == pytest.approx(882e-6, rel=0.08)
    combine = expert_parallel(problem, batch).combine.seconds(links)[0]
    assert combine < both / 2  # the links alone would be faster


def test_on_amd_deepep_has_units_enough_for_the_links() -> None:
    """Between 8 MI355X kernels reach 345 GB/s on the way there and 420 GB/s back (ROCm/mori README.md)."""
    model = replace(MODEL, hidden_size=7168, moe=Experts(num_experts=256, experts_per_token=8, expert_ffn_size=512))
    problem = replace(PROBLEM, model=model, cluster=load_cluster("mi355x:1x8"), calibration=Calibration())
    batch = batch_of(dispatcher="deepep")
    both = expert_parallel_s(problem, batch, Links.of(problem))[0] - 2 * problem.framework.host.host_s_per_collective
    sent_bytes = 4096 * 7168 * 2 * 7 * (1 - (7 / 8) ** 8)  # a token once to every rank that has experts of it
    assert sent_bytes / (both / 2) == pytest.approx(345e9, rel=0.05)


def test_traffic_hides_under_every_kernel_of_its_block_once() -> None:
    batch = batch_of()
    work_s = block_costs(PROBLEM, batch)[Block.MOE].work_s[0]
    assert kernel_times(PROBLEM, batch, Block.MOE, block_shapes(MODEL)[Block.MOE]).passes.total_s[0] == pytest.approx(
        work_s
    )


def test_a_short_k_costs_more_the_faster_the_type() -> None:
    curve = GemmCurve(half_m=0.0, half_n=0.0, half_k=128.0, half_output=0.0)
    size = np.array([1024.0])
    assert curve.slowdown(size, size, size)[0] == pytest.approx(1.125)
    assert curve.slowdown(size, size, size, 2.0)[0] == pytest.approx(1.25)


def test_eight_bits_run_at_less_than_twice_the_pace_of_sixteen() -> None:
    batch = batch_of(precision="fp8")
    assert gemm_pace(PROBLEM, batch, gemm_rate(PROBLEM, batch))[0] == pytest.approx(0.96 * 1978.9 / 989.4)
    wide = batch_of()
    assert gemm_pace(PROBLEM, wide, gemm_rate(PROBLEM, wide))[0] == 1.0


def test_a_device_may_have_a_rate_of_its_own_for_eight_bits() -> None:
    device = replace(PROBLEM.device, narrow_gemm_efficiency=0.5)
    problem = replace(PROBLEM, cluster=replace(PROBLEM.cluster, device=device))
    rates = {precision: gemm_rate(problem, batch_of(precision=precision))[0] for precision in ("fp8", "bf16")}
    assert rates["fp8"] == pytest.approx(0.5 * 1978.9e12)
    assert rates["bf16"] == gemm_rate(PROBLEM, batch_of())[0]


def test_products_with_scales_of_rows_reach_less_of_the_rate_in_eight_bits_alone() -> None:
    whole = {precision: gemm_rate(PROBLEM, batch_of(precision=precision))[0] for precision in ("fp8", "bf16")}
    for precision, scaling, share in (("fp8", "rowwise", 0.8), ("fp8", "tensorwise", 1.0), ("bf16", "rowwise", 1.0)):
        batch = batch_of(precision=precision, fp8_scaling=scaling)
        assert gemm_rate(PROBLEM, batch)[0] == pytest.approx(share * whole[precision])


def test_a_dispatcher_that_permutes_in_one_kernel_moves_every_copy_once() -> None:
    """Not `kernel_bytes_factor` times: in and out, each read and written in 16 bits."""
    batch, shape = batch_of(), block_shapes(MODEL)[Block.MOE]
    apart = kernel_times(PROBLEM, batch, Block.MOE, shape)
    fused = kernel_times(PROBLEM, batch_of(dispatcher="hybridep"), Block.MOE, shape)
    spared = FRAMEWORK.kernels.kernel_bytes_factor - 1
    once_s = memory_bound_s(PROBLEM, np.array([spared * 2 * 4.0 * 4096 * 2 * 1024]))[0]
    assert (apart.memory.forward_s - fused.memory.forward_s)[0] == pytest.approx(once_s)
    assert (apart.memory.backward_s - fused.memory.backward_s)[0] == pytest.approx(once_s)


def test_tokens_sorted_by_gathers_and_sums_move_more_than_by_a_kernel() -> None:
    """Unless the dispatcher's kernel does it; the factor multiplies that of all operations."""
    shape, slower = (
        block_shapes(MODEL)[Block.MOE],
        replace(PROBLEM, framework=FRAMEWORK.changed(permute_bytes_factor=3)),
    )
    usual, found = (kernel_times(problem, batch_of(), Block.MOE, shape) for problem in (PROBLEM, slower))
    moved = 2 * FRAMEWORK.kernels.kernel_bytes_factor * 2 * 4.0 * 4096 * 2 * 1024
    more_s = memory_bound_s(PROBLEM, np.array([moved]))[0]
    assert (found.memory.forward_s - usual.memory.forward_s)[0] == pytest.approx(more_s)
    assert (found.memory.backward_s - usual.memory.backward_s)[0] == pytest.approx(more_s)
    once = (kernel_times(problem, batch_of(dispatcher="hybridep"), Block.MOE, shape) for problem in (PROBLEM, slower))
    assert len({times.memory.forward_s[0] for times in once}) == 1


@pytest.mark.parametrize(("cluster", "share"), [("b200:1x8", NARROW_ATTENTION_TIME), ("h100-sxm:1x8", 1.0)])
def test_attention_in_eight_bits_is_faster_on_blackwell(cluster: str, share: float) -> None:
    shape, problem = block_shapes(MODEL)[Block.ATTENTION], replace(PROBLEM, cluster=load_cluster(cluster))
    wide, found = (
        kernel_times(problem, batch_of(precision="fp8", fp8_attention=narrow), Block.ATTENTION, shape)
        for narrow in (False, True)
    )
    assert found.attention.forward_s[0] == pytest.approx(share * wide.attention.forward_s[0])
    assert found.attention.backward_s[0] == pytest.approx(share * wide.attention.backward_s[0])


@pytest.mark.parametrize(("cluster", "share"), [("b200:1x8", 0.77), ("h100-sxm:1x8", 1.0)])
def test_torchs_grouped_products_are_slower_on_blackwell(cluster: str, share: float) -> None:
    linear = next(linear for linear in block_shapes(MODEL)[Block.MOE].linears if linear.name == "expert_fc2")
    problem, batch = replace(PROBLEM, cluster=load_cluster(cluster)), batch_of()
    starts_s = problem.device.gemm.start_s * 32 / 8 / 4  # of four products side by side
    one_by_one, grouped = (
        matrices_s(changed, batch, (linear,), gemm_rate(changed, batch))["expert_fc2"].forward_s[0] - starts_s
        for changed in (problem, replace(problem, framework=FRAMEWORK.changed(torch_grouped_products=True)))
    )
    assert one_by_one / grouped == pytest.approx(share)


def test_products_of_experts_are_dense_ones_of_the_tokens_of_each() -> None:
    """Products for gradients of weights also move the buffer of gradients: fp32 is read and written, half shown."""
    linear = next(linear for linear in block_shapes(MODEL)[Block.MOE].linears if linear.name == "expert_fc2")
    batch = batch_of()
    rate, tokens = gemm_rate(PROBLEM, batch), expert_tokens(PROBLEM, batch)
    found = matrices_s(PROBLEM, batch, (linear,), rate)["expert_fc2"]
    inputs, outputs, local = np.array([512.0]), np.array([1024.0]), 32 / 8
    curve = PROBLEM.device.gemm

    def computing_s(m: Floats, n: Floats, k: Floats) -> float:
        return (local * 2 * m * n * k * curve.slowdown(m, n, k, side_by_side=4) / rate).item() + curve.start_s

    assert found.forward_s[0] == pytest.approx(computing_s(tokens, outputs, inputs))
    assert found.input_gradient_s[0] == pytest.approx(computing_s(tokens, inputs, outputs))
    added_s = 0.53 * memory_bound_s(PROBLEM, 8 * local * inputs * outputs).item()
    assert found.weight_gradient_s[0] == pytest.approx(computing_s(outputs, inputs, tokens) + added_s)
    halves = matrices_s(PROBLEM, batch_of(grad_dtype="bf16"), (linear,), rate)["expert_fc2"]
    assert (found.weight_gradient_s - halves.weight_gradient_s)[0] == pytest.approx(added_s / 2)


def test_attention_within_a_window_has_short_rows_and_in_eight_bits_no_window_backward() -> None:
    """The kernel runs at the pace of a sequence as long as the window; in 8 bits it visits all of it backward."""
    windowed = replace(MODEL, window=128, full_attention_interval=2)
    problem = replace(PROBLEM, model=windowed, cluster=load_cluster("b200:1x8"))
    shape, start_s = block_shapes(windowed)[Block.ATTENTION], problem.device.attention.start_s

    def times_of(block: Block, **changes: object) -> tuple[float, float]:
        core = kernel_times(problem, batch_of(**changes), block, shape).attention
        return core.forward_s.item(), core.backward_s.item()

    full, short = times_of(Block.ATTENTION), times_of(Block.WINDOW_ATTENTION)
    half = problem.device.attention.half_seq_len
    context, slower = (128 - 128**2 / 8192) / 2048, (1 + half / 128) / (1 + half / 4096)
    assert (short[0] - start_s) / (full[0] - start_s) == pytest.approx(context * slower)
    assert short[1] < full[1]
    narrow, whole = (
        times_of(block, precision="mxfp8", fp8_attention=True) for block in (Block.WINDOW_ATTENTION, Block.ATTENTION)
    )
    assert narrow[0] < whole[0]
    assert narrow[1] == pytest.approx(whole[1])


def test_storing_inputs_of_swiglu_in_8_bits_casts_them_in_both_passes() -> None:
    """16 bits of gate and up and 8 bits of both, per token of an expert and element of its width."""
    moe, batch = PROBLEM.model.moe, batch_of(fp8_activation_input=True)
    assert moe is not None
    whole, narrow = (traffic_of(PROBLEM, case, Block.MOE) for case in (batch_of(), batch))
    for name, traffic in narrow.items():
        share = PROBLEM.device.memory_efficiency / OP_BY_OP_SHARE["hopper"]
        width = norm_tokens(PROBLEM, batch)[0] * moe.experts_per_token * moe.expert_ffn_size
        width += rank_tokens(PROBLEM, batch)[0] * moe.shared_expert_ffn_size / batch.tp[0]
        cast = share * 2 * (2 + 1) * width if name == "stored_cast" else 0.0
        for before, after in zip(whole[name], traffic, strict=True):
            assert after[0] - before[0] == pytest.approx(cast)


def test_biases_of_experts_are_kernels_of_each() -> None:
    plain, odd = PROBLEM, replace(PROBLEM, model=replace(MODEL, mlp_bias=True))
    few, many = (
        [
            kernel_times(problem, batch_of(ep=ep), Block.MOE, block_shapes(problem.model)[Block.MOE]).memory
            for problem in (plain, odd)
        ]
        for ep in (8, 4)
    )
    more = (many[1].forward_s - many[0].forward_s) - (few[1].forward_s - few[0].forward_s)
    assert more[0] == pytest.approx(4 * BIAS_PER_EXPERT.forward * KERNEL_START_S)


def test_a_later_version_shares_the_calibration_of_its_framework() -> None:
    later, earlier = load_framework("nemo-26.06"), load_framework("nemo")
    device = load_cluster("gb200-nvl72").device
    assert built_in_calibration(later, device) == built_in_calibration(earlier, device)


def test_predictions_that_share_a_layer_hold_it_once() -> None:
    apart = replace(MODEL, num_mtp_layers=2)
    assert apart.num_held_mtp_layers == 2
    assert replace(apart, shares_mtp_layer=True).num_held_mtp_layers == 1
    assert replace(MODEL, shares_mtp_layer=True).num_held_mtp_layers == 0


def test_torchtitans_ranks_that_share_experts_route_the_tokens_of_their_group_each() -> None:
    """Two tensor-parallel ranks send all 4,096 tokens each, twice, where Megatron-Core's send half and gather.

    The group's tokens, as they are, are gathered before the router and reduced after the weighted sum.
    """
    sharded = batch_of(tp=2, sp=True, ep=4, etp=2, dp_shard=4)
    megatron, titan = (
        replace(PROBLEM, framework=FRAMEWORK.changed(routes_group_tokens=routes)) for routes in (False, True)
    )
    sent = [expert_parallel(problem, sharded) for problem in (megatron, titan)]
    assert [one_way.dispatch.buffer_bytes[0] for one_way in sent] == [2 * 2048 * 2 * 1024, 2 * 4096 * 2 * 1024]
    assert [one_way.gather.buffer_bytes[0] for one_way in sent] == [2 * 4096 * 2 * 1024, 2 * 4096 * 1024]
    assert rank_expert_tokens(megatron, sharded) == rank_expert_tokens(titan, sharded) == 4096 * 2
    graphed = batch_of(tp=2, sp=True, ep=4, etp=2, dp_shard=4, cuda_graphs="full_iteration")
    assert held_expert_tokens(megatron, graphed) == held_expert_tokens(titan, graphed) == 1.5 * 4096 * 2
    moved = [traffic_of(problem, sharded, Block.MOE)["permute"].forward_bytes[0] for problem in (megatron, titan)]
    assert moved[1] == pytest.approx(2 * moved[0])
    whole = batch_of(tp=2, sp=True, ep=8, etp=1, dp_shard=4)
    assert expert_parallel(titan, whole).dispatch.buffer_bytes == expert_parallel(megatron, whole).dispatch.buffer_bytes
