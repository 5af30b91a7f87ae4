"""Is the cost of a plan the sum of its parts, the same in any batch, and never worse on a better machine?"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.block_cost import BlockCost
from autoplan.cost.blocks import block_costs
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.kernels.attention import DROPOUT_ATTENTION_TIME
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.kernels.memory_bound import OP_BY_OP_SHARE
from autoplan.cost.kernels.products import gemm_rate, gemm_s
from autoplan.cost.kernels.times import kernel_times
from autoplan.cost.memory.stage_memory import MEMORY_TERMS
from autoplan.cost.network.algorithms import ProcessGroup, collective_s
from autoplan.cost.network.links import CONTENTION_SHARE, Links
from autoplan.cost.pipeline.closed_forms import gpipe_s, one_forward_one_backward_s
from autoplan.cost.spreads import NORMAL_90
from autoplan.cost.stages import RETRY_S
from autoplan.cost.step import STRAGGLER_SPREAD
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.readers.cluster import load_cluster
from autoplan.spec.blocks import Block, Experts, LatentAttention
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import ContextParallelKind, Fp8Scaling, Recompute, Sharding
from autoplan.spec.estimate import OOM_ABOVE, OOM_Z, RISKY_ABOVE, RISKY_Z, VERDICTS, CostEstimate, oom_probability
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import BLOCK_TERMS, STEP_TERMS
from autoplan.topology.cluster import ClusterSpec
from problems import problem_for

DENSE = ModelSpec(
    name="dense", num_layers=8, hidden_size=1024, vocab_size=32000, num_heads=16, num_kv_heads=8, ffn_size=4096
)
MODELS = {
    model.name: model
    for model in (
        DENSE,
        dataclasses.replace(DENSE, name="tied", tied_embeddings=True, num_mtp_layers=1),
        dataclasses.replace(
            DENSE,
            name="moe",
            ffn_size=2048,
            moe=Experts(
                num_experts=8,
                experts_per_token=2,
                expert_ffn_size=1024,
                shared_expert_ffn_size=512,
                num_dense_layers=1,
            ),
        ),
        dataclasses.replace(
            DENSE,
            name="mla",
            num_kv_heads=None,
            mla=LatentAttention(
                kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, q_lora_rank=256
            ),
        ),
    )
}
# Nothing is launched, overlapped in part or added by hand, so that each term stands alone.
PLAIN = Framework(name="plain").changed(
    host_s_per_block_forward=0.0,
    host_s_per_block_backward=0.0,
    host_s_per_collective=0.0,
    step_overhead_s=0.0,
    all_reduce_overlap_share=0.0,
    tp_reduce_overlap=False,
    sharded_reduce_overlap=False,
    param_gather_overlap=False,
)


def problem_of(
    model: str | ModelSpec = "dense",
    *,
    framework: Framework = PLAIN,
    cluster: ClusterSpec | str = "h100-sxm:64x8",
    seq_len: int = 2048,
    **changes: Any,
) -> Problem:
    return problem_for(
        MODELS[model] if isinstance(model, str) else model,
        load_cluster(cluster) if isinstance(cluster, str) else cluster,
        framework,
        seq_len=seq_len,
        **changes,
    )


def price(problem: Problem, *plans: ParallelPlan) -> CostEstimate:
    return estimate(problem, PlanBatch.of(plans, problem.model.num_layers))


def terms_of(problem: Problem, plan: ParallelPlan) -> dict[str, float]:
    return {name: float(value[0]) for name, value in price(problem, plan).terms_s.items()}


problems = st.builds(
    lambda model, framework, cluster: problem_of(model, framework=load_framework(framework), cluster=cluster),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(preset_frameworks()),
    st.sampled_from(["h100-sxm:64x8", "gb200-nvl72:128x4", "frontier:64x8", "aws-p4d:64x8"]),
)


@st.composite
def plans(draw: st.DrawFn, *, model: str = "dense", fills_pipeline: bool = False) -> ParallelPlan:
    """A plan that Megatron-like rules admit for one of MODELS."""
    tp, cp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    vp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    dp_replicate, dp_shard = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    micro_batch = draw(st.sampled_from([1, 2]))
    least = pp if fills_pipeline else 1
    microbatches = pp * draw(st.integers(1, 4)) if vp > 1 else draw(st.integers(least, least + 12))
    is_moe = model == "moe"
    ranks = tp * cp * dp_shard
    splits = [(ep, etp) for ep in (1, 2, 4, 8) for etp in (1, 2) if is_moe and ranks % (ep * etp) == 0] or [(1, 1)]
    ep, etp = draw(st.sampled_from(splits))
    return ParallelPlan(
        global_batch=micro_batch * dp_replicate * dp_shard * microbatches,
        micro_batch=micro_batch,
        tp=tp,
        sp=tp > 1 and (is_moe or draw(st.booleans())),
        cp=cp,
        cp_kind=draw(st.sampled_from(ContextParallelKind)),  # type: ignore[arg-type]
        pp=pp,
        vp=vp,
        schedule="interleaved" if vp > 1 else draw(st.sampled_from(["1f1b", "gpipe"])),  # type: ignore[arg-type]
        layers_per_chunk=draw(st.sampled_from([None, None, (3, 5), (5, 3)])) if (pp, vp) == (2, 1) else None,
        ep=ep,
        etp=etp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        sharding=draw(st.sampled_from(Sharding)),  # type: ignore[arg-type]
        recompute=draw(st.sampled_from(Recompute)),  # type: ignore[arg-type]
        precision=draw(st.sampled_from(["bf16", "fp8"])),  # type: ignore[arg-type]
        offload=draw(st.sampled_from(["none", "none", "optimizer"])),  # type: ignore[arg-type]
        tp_overlap=draw(st.booleans()),
        grad_reduce_overlap=draw(st.booleans()),
        param_gather_overlap=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, *, fills_pipeline: bool = False) -> tuple[Problem, ParallelPlan]:
    problem = draw(problems)
    return problem, draw(plans(model=problem.model.name, fills_pipeline=fills_pipeline))


# -- parts and whole --------------------------------------------------------------------------------------------------


@given(cases())
def test_terms_add_up_to_the_step(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    cost = price(problem, plan)
    assert tuple(cost.terms_s) == STEP_TERMS
    total = 0.0
    for value in cost.terms_s.values():
        total += float(value[0])
    assert total == cost.step_s[0]


@given(cases())
def test_every_term_is_finite_and_not_negative(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    cost = price(problem, plan)
    for name, value in cost.terms_s.items():
        assert math.isfinite(value[0]), name
        assert value[0] >= -1e-12 * cost.step_s[0], name
    assert cost.step_s[0] > 0
    assert cost.low_s[0] < cost.step_s[0] < cost.high_s[0]


@settings(max_examples=20, derandomize=True, phases=[Phase.generate])  # plans are read more easily than shrunk
@given(problems, st.data())
def test_a_batch_of_n_equals_n_batches_of_one_bit_for_bit(problem: Problem, data: st.DataObject) -> None:
    several = data.draw(st.lists(plans(model=problem.model.name), min_size=2, max_size=8))
    together = price(problem, *several)
    for at, plan in enumerate(several):
        alone = price(problem, plan)
        for name in ("step_s", "low_s", "high_s", "memory_bytes", "logged_memory_bytes", "worst_stage", "oom_z"):
            assert getattr(together, name)[at] == getattr(alone, name)[0], name
        for name in STEP_TERMS:
            assert together.terms_s[name][at] == alone.terms_s[name][0], name
        for name in MEMORY_TERMS:
            assert together.memory_terms_bytes[name][at] == alone.memory_terms_bytes[name][0], name


def test_an_empty_batch_costs_nothing() -> None:
    cost = price(problem_of())
    assert len(cost) == 0
    assert set(cost.terms_s) == set(STEP_TERMS)
    assert cost.verdict.tolist() == []


@given(cases())
def test_stages_agree_with_the_estimate(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    cost, stages = price(problem, plan), stage_costs(problem, plan)
    assert [stage.stage for stage in stages] == list(range(plan.pp))
    assert sum(stage.layers for stage in stages) == problem.model.num_layers
    for stage in stages:
        assert set(stage.terms_s) == {*BLOCK_TERMS, "head", "allocator_retries"}
        assert sum(stage.terms_s.values()) == pytest.approx(stage.forward_s + stage.backward_s)
        assert set(stage.memory_terms_bytes) == set(MEMORY_TERMS)
    forward, backward = (np.array([[getattr(s, name) for s in stages]]) for name in ("forward_s", "backward_s"))
    m = np.array([plan.num_microbatches])
    if plan.schedule == "gpipe":
        makespan = gpipe_s(forward, backward, m, np.zeros((1, plan.pp - 1)), overlaps=True)
    else:
        makespan = one_forward_one_backward_s(forward, backward, m, np.array([plan.vp]))
    work = sum(float(cost.terms_s[name][0]) for name in (*BLOCK_TERMS, "head", "allocator_retries", "pipeline_bubble"))
    assert work == pytest.approx(float(makespan.work_s[0]))
    assert cost.memory_bytes[0] == max(stage.memory_bytes for stage in stages)


# -- traits of frameworks, by hand -------------------------------------------------------------------------------------


def single(**changes: Any) -> ParallelPlan:
    """A micro-batch of one sequence on one device, except for the changes."""
    return ParallelPlan(**({"global_batch": 1, "micro_batch": 1, "sharding": "none"} | changes))


def test_gradients_added_up_outside_the_products_move_bytes_in_every_micro_batch() -> None:
    fused = problem_of(framework=PLAIN)
    eager = problem_of(framework=PLAIN.changed(bytes_moved_per_accumulated_grad=6.0))
    plan = single(tp=2, sp=True, global_batch=4)
    # A layer: q, k and v of 16 + 2 x 8 heads of 64, the output, the three matrices of the MLP, all halved; two norms.
    matrices = 1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096
    parameters = 8 * (matrices / 2 + 2 * 1024)
    added = terms_of(eager, plan)["memory_bound"] - terms_of(fused, plan)["memory_bound"]
    assert added == pytest.approx(moved_s(4 * 6.0 * parameters))


def test_norms_of_queries_and_keys_read_and_write_every_head_once_forward_and_twice_backward() -> None:
    plain = problem_of(framework=PLAIN)
    normed = dataclasses.replace(plain, model=dataclasses.replace(plain.model, qk_norm="head"))
    for tp in (1, 2):
        plan = single(tp=tp, sp=tp > 1)
        # 8 layers of 16 + 8 heads of 64, in 16 bits: 4 bytes an element forward, 8 backward.
        moved = 12.0 * plain.training.seq_len * 8 * (16 + 8) * 64 / tp
        added = terms_of(normed, plan)["memory_bound"] - terms_of(plain, plan)["memory_bound"]
        assert added == pytest.approx(moved_s(moved * plain.framework.kernels.kernel_bytes_factor), rel=1e-3)


def test_weight_gradients_of_megatron_lm_add_up_in_their_products_from_2022_on_and_in_hooks_before() -> None:
    # Four micro-batches through layers of q, k, v, output and three matrices of the MLP, and two norms: 10 bytes each.
    moved = 4 * 10.0 * 8 * (1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024)
    before, after = (
        problem_of(framework=load_framework(name), cluster="a100-sxm:1x1")
        for name in ("megatron-lm-2021", "megatron-lm-2022")
    )
    plan = single(global_batch=4)
    added = terms_of(before, plan)["memory_bound"] - terms_of(after, plan)["memory_bound"]
    assert added == pytest.approx(moved_s(moved, "a100-sxm:1x1"))


# Of a layer of the dense model: q, k and v, the output, the three matrices of the MLP; two norms.
LAYER_PARAMETERS = 1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024


@pytest.mark.parametrize(("pp", "passes", "reductions"), [(1, 2 * 4, 4), (2, 1, 1)])
def test_gathered_weights_and_gradients_to_reduce_are_copied_in_the_passes(
    pp: int, passes: int, reductions: int
) -> None:
    copying = PLAIN.changed(sharded_copies="units")
    plan = ParallelPlan(global_batch=32, dp_shard=8, pp=pp, sharding="zero3")
    plain, copied = (terms_of(problem_of(framework=framework), plan) for framework in (PLAIN, copying))
    moved = (4.0 * passes + 6.0 * reductions) * 8 / pp * LAYER_PARAMETERS
    assert copied["memory_bound"] - plain["memory_bound"] == pytest.approx(moved_s(moved))
    full = dataclasses.replace(plan, recompute="full")
    again = [terms_of(problem_of(framework=framework), full)["recompute"] for framework in (PLAIN, copying)]
    assert again[0] == pytest.approx(again[1])


def moved_s(num_bytes: float, cluster: str = "h100-sxm:64x8") -> float:
    """Time to move so many bytes through the memory of a cluster's device."""
    device = load_cluster(cluster).device
    return num_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def test_products_of_their_own_add_up_the_gradients_of_their_input() -> None:
    joined, separate = problem_of(), problem_of(framework=PLAIN.changed(separate_inputs=True))
    plan = single(tp=2, sp=True)
    before, after = terms_of(joined, plan), terms_of(separate, plan)
    # Three gradients of the attention's input and two of the MLP's are read and their sums written, on every rank.
    added = 8 * 2.0 * (4 + 3) * 2048 * 1024
    assert after["memory_bound"] - before["memory_bound"] == pytest.approx(moved_s(added))
    assert after["gemm"] > before["gemm"]
    latent = [
        price(dataclasses.replace(framework, model=MODELS["mla"]), plan).terms_s["gemm"][0]
        for framework in (joined, separate)
    ]
    assert latent[0] < latent[1]  # the MLP's alone


def test_layers_repeated_by_a_share_spare_their_last_matrix_where_recomputation_stops_early() -> None:
    share = PLAIN.changed(selective_recompute_share=0.5)
    early = share.changed(recompute_stops_early=True)
    partial, whole = single(recompute="selective"), single(recompute="full")
    for framework in (share, early):
        problem = problem_of(framework=framework)
        assert terms_of(problem, partial)["recompute"] == pytest.approx(0.5 * terms_of(problem, whole)["recompute"])


def test_heads_whose_rows_are_no_multiples_of_16_bytes_take_longer() -> None:
    unpadded = PLAIN.changed(pads_vocab_to=1)

    def head_s(vocab_size: int, framework: Framework = unpadded, **training: Any) -> float:
        model = dataclasses.replace(DENSE, vocab_size=vocab_size)
        problem = problem_of(model, framework=framework)
        problem = dataclasses.replace(problem, training=dataclasses.replace(problem.training, **training))
        return terms_of(problem, single())["head"]

    whole, narrow, odd = head_s(50304), head_s(50260), head_s(50257)
    assert 1.1 * whole < narrow < odd < 3 * whole
    assert head_s(50257, PLAIN.changed(pads_vocab_to=64)) == whole
    eager = dataclasses.replace(unpadded, rules="trainer")
    assert head_s(50257, eager, precision="fp32") == pytest.approx(head_s(50304, eager, precision="fp32"), rel=0.01)


def test_recomputation_that_stops_early_leaves_out_the_last_matrix_and_its_reduction() -> None:
    whole = problem_of()
    early = dataclasses.replace(whole, framework=PLAIN.changed(recompute_stops_early=True))
    plan = single(tp=2, sp=True, global_batch=4, recompute="full")
    saved = terms_of(whole, plan)["recompute"] - terms_of(early, plan)["recompute"]
    batch = PlanBatch.of([plan], 8)
    tokens, inputs, outputs = (np.full(1, size) for size in (2048.0, 2048.0, 1024.0))
    product = gemm_s(whole, gemm_rate(whole, batch), tokens, outputs, inputs)[0]
    reduce = Links.of(whole).seconds("reduce_scatter", tensor_pair(), np.full(1, 2.0 * 2048 * 1024))[0]
    assert saved == pytest.approx(4 * 8 * (product + reduce))
    none = dataclasses.replace(plan, recompute="none")
    assert terms_of(whole, none) == terms_of(early, none)


def test_recomputation_that_stops_early_leaves_out_the_way_back_from_the_experts() -> None:
    """The second exchange and the last product are left out where tokens are weighted before they are sent back.

    A latent width needs both for the matrix behind, and weights behind an all-to-all for their gradient.
    """
    assert MODELS["moe"].moe is not None
    moe = dataclasses.replace(MODELS["moe"], moe=dataclasses.replace(MODELS["moe"].moe, num_dense_layers=0))
    assert moe.moe is not None
    latent = dataclasses.replace(moe, moe=dataclasses.replace(moe.moe, latent_size=512))

    def saved_s(model: ModelSpec, **changes: Any) -> tuple[float, float, float]:
        """Return what stopping early saves; of both passes the last product and, without recomputation, exchanges."""
        late, early = (problem_of(model, framework=PLAIN.changed(recompute_stops_early=ends)) for ends in (False, True))
        plan = single(global_batch=4, recompute="full", dp_replicate=2, **changes)
        none = dataclasses.replace(plan, recompute="none")
        assert terms_of(late, none) == terms_of(early, none)
        saved = terms_of(late, plan)["recompute"] - terms_of(early, plan)["recompute"]
        batch = PlanBatch.of([plan], model.num_layers)
        kernels = kernel_times(late, batch, Block.MOE, layer_shapes(model)[Block.MOE])
        product = 2 * model.num_layers * kernels.matrix_forward_s["expert_fc2"][0]
        return saved, product, terms_of(late, none)["ep_communication"]

    saved, product, exchanges = saved_s(moe, ep=2, dispatcher="deepep")
    assert saved == pytest.approx(product + exchanges / 4)
    for in_vain in (saved_s(moe), saved_s(moe, ep=2), saved_s(latent, ep=2, dispatcher="deepep")):
        assert in_vain[0] == pytest.approx(0.0, abs=1e-9)


def tensor_pair() -> ProcessGroup:
    """A tensor-parallel group of two."""
    return ProcessGroup(np.ones(1, dtype=np.int64), np.full(1, 2, dtype=np.int64))


def test_selective_recomputation_may_save_attention() -> None:
    half = PLAIN.changed(selective_recompute_share=0.5)
    saving = half.changed(selective_saves_attention=True)
    plan = single(recompute="selective")

    def again(framework: Framework, attention: float) -> float:
        return terms_of(problem_of(framework=framework, calibration=Calibration(attention=attention)), plan)[
            "recompute"
        ]

    assert again(half, 2.0) > again(half, 1.0)
    assert again(saving, 2.0) == again(saving, 1.0) > 0


def test_eight_bit_plans_may_gather_their_inputs_as_quantised() -> None:
    wide = problem_of()
    narrow = dataclasses.replace(wide, framework=PLAIN.changed(narrow_tp_gathers="tensors"))
    plan = single(tp=2, sp=True, precision="fp8")
    size, links = np.full(1, 2.0 * 2048 * 1024), Links.of(wide)
    gathers = [links.seconds("all_gather", tensor_pair(), sent)[0] for sent in (size, size / 2)]
    saved = gathers[0] - gathers[1]
    before, after = terms_of(wide, plan), terms_of(narrow, plan)
    assert before["tp_communication"] - after["tp_communication"] == pytest.approx(2 * 16 * saved)
    assert after["memory_bound"] < before["memory_bound"]  # slices are cast
    bf16 = single(tp=2, sp=True)
    assert terms_of(wide, bf16) == terms_of(narrow, bf16)


def test_a_scale_of_the_tensor_itself_takes_another_look_at_it() -> None:
    problem = problem_of()
    looking, plan = (single(precision="fp8", fp8_scaling=scaling) for scaling in ("tensorwise", "delayed"))
    more = terms_of(problem, looking)["memory_bound"] - terms_of(problem, plan)["memory_bound"]
    inputs, gradients = 3 * 1024 + 4096, 2048 + 1024 + 2 * 4096 + 1024
    assert more == pytest.approx(moved_s(2.0 * 8 * 2048 * (inputs + gradients)))


def test_scales_of_blocks_take_no_other_look_and_slower_products_on_hopper() -> None:
    """1.75 times the rate of bf16, where products of one scale reach 2 x .96 of it; a tile has its scale in a pass."""
    problem = problem_of()
    tiles, past, bf16 = (
        single(**kind)
        for kind in (
            {"precision": "fp8", "fp8_scaling": "blockwise"},
            {"precision": "fp8", "fp8_scaling": "delayed"},
            {},
        )
    )
    assert terms_of(problem, tiles)["memory_bound"] == pytest.approx(terms_of(problem, past)["memory_bound"])
    rates = [gemm_rate(problem, PlanBatch.of([plan], problem.model.num_layers))[0] for plan in (tiles, past, bf16)]
    assert rates[0] / rates[1] == pytest.approx(1.75 / 1.92)
    assert terms_of(problem, tiles)["gemm"] > terms_of(problem, past)["gemm"]


def test_expanded_keys_and_values_travel_once_per_query_head_and_hide_under_the_own_ones_alone() -> None:
    framework = PLAIN.changed(expands_kv=True)
    plan = single(cp=4, sharding="zero1")
    few, many = (
        terms_of(problem_of(dataclasses.replace(DENSE, num_kv_heads=heads), framework=framework), plan)
        for heads in (1, 16)
    )
    assert few["cp_communication"] == pytest.approx(many["cp_communication"])
    assert few["cp_communication"] > terms_of(problem_of(), plan)["cp_communication"]


def test_attention_piece_by_piece_takes_longer_for_the_keys_of_other_ranks() -> None:
    framework = PLAIN.changed(ring_attention_factor=1.5)
    for kind, factor in (("ring", 1 + 0.5 * 3 / 4), ("all_to_all", 1.0)):
        plan = single(cp=4, sharding="zero1", cp_kind=kind)
        plain, longer = (terms_of(problem_of(framework=variant), plan)["attention"] for variant in (PLAIN, framework))
        assert longer == pytest.approx(factor * plain)


def test_a_scattered_message_is_a_slice_and_its_gather_at_the_receiver() -> None:
    whole = problem_of(framework=PLAIN.changed(torch_pipelines=True))
    scattered = problem_of(framework=PLAIN)
    size = 2.0 * 2048 * 1024
    links = Links.of(whole).topology
    gather = float(collective_s(links, "all_gather", tensor_pair(), np.full(1, size))[0])
    # Two stages exchange m + 1 times; 8 devices lie between neighbours, so that messages take the network.
    plan = single(tp=2, pp=2, dp_shard=4, global_batch=12)
    saved = terms_of(whole, plan)["pipeline_send"] - terms_of(scattered, plan)["pipeline_send"]
    assert saved == pytest.approx(4 * (size / 2 / links.levels[-1].bytes_per_s - gather))


@pytest.mark.parametrize("changes", [{"tp": 2, "sp": True}, {"tp": 1}])
def test_a_message_that_is_a_slice_already_is_not_gathered(changes: dict[str, Any]) -> None:
    whole = problem_of(framework=PLAIN.changed(torch_pipelines=True))
    scattered = problem_of(framework=PLAIN)
    plan = single(pp=2, global_batch=4, **changes)
    assert terms_of(whole, plan) == terms_of(scattered, plan)


@pytest.mark.parametrize(
    ("cluster", "kernel", "rate"),
    [("h100-sxm:1x8", "cudnn", 1.3), ("h100-sxm:1x8", "flash2", 0.70), ("b200:1x8", "cudnn", 1.0)],
)
def test_kernels_of_attention_have_rates_of_their_own(cluster: str, kernel: Any, rate: float) -> None:
    # Without what a kernel takes to start: a long sequence of few heads.
    times = [
        terms_of(
            problem_of(framework=PLAIN.changed(flash_kernel=kernel_name), cluster=cluster, seq_len=65536),
            single(),
        )["attention"]
        for kernel_name in (kernel, "flash")
    ]
    assert times[1] / times[0] == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("kernel", ["flash2", "flash3", "cudnn"])
def test_kernel_of_attention_that_a_run_names_is_priced_whatever_its_framework_takes(kernel: Any) -> None:
    def attention_s(framework: Framework, attention: Any) -> float:
        problem = problem_of(framework=framework, cluster="h100-sxm:1x8", seq_len=65536)
        return terms_of(problem, single(attention=attention))["attention"]

    takes = PLAIN.changed(flash_kernel="flash" if kernel == "flash3" else kernel)
    other = PLAIN.changed(flash_kernel="triton")
    assert attention_s(other, kernel) == pytest.approx(attention_s(takes, "flash"), rel=1e-9)


def test_flash_attention_2_is_no_faster_on_blackwell_than_its_kernel_was_measured() -> None:
    problem = problem_of(framework=PLAIN, cluster="b200:1x8", seq_len=65536)
    model = problem.model
    # Causal: half of 4 s^2 n d forward, 2.5 times as much backward at .8 of its rate.
    flops = 2 * 65536**2 * model.num_heads * model.qk_head_dim * model.num_layers
    assert terms_of(problem, single(attention="flash2"))["attention"] == pytest.approx(
        flops * (1 + 2.5 / 0.8) / (2.4e12 * problem.device.compute_units), rel=0.05
    )


@pytest.mark.parametrize(
    ("cluster", "kv_heads", "time"),
    # Shares of the rate, forward and backward: (1 + 2.5 / .33) / .65 over 1 + 2.5 / .8.
    [("mi300x:1x8", 4, 3.205), ("mi300x:1x8", DENSE.num_heads, 1.0), ("h100-sxm:1x8", 4, 1 / 0.70)],
)
def test_torchs_own_attention_has_slower_kernels_for_grouped_heads_on_amd(
    cluster: str, kv_heads: int, time: float
) -> None:
    model = dataclasses.replace(DENSE, num_kv_heads=kv_heads)
    kernels: tuple[Any, ...] = ("sdpa", "flash")
    times = [
        terms_of(
            problem_of(model, framework=PLAIN.changed(flash_kernel=kernel), cluster=cluster, seq_len=65536), single()
        )["attention"]
        for kernel in kernels
    ]
    assert times[0] / times[1] == pytest.approx(time, rel=0.01)


@pytest.mark.parametrize(
    ("cluster", "kernel", "time"),
    # Shares of the rate; Triton's kernels have widths of 256 and 128 for keys of 192 and values of 128.
    [
        ("b200:1x8", "flex", 1.2 / 0.5),
        ("h100-sxm:1x8", "flex", 1.2 / (0.70 * 0.87)),
        ("h100-sxm:1x8", "efficient", 1 / (0.70 * 0.43)),
    ],
)
def test_torchs_own_attention_has_slower_kernels_for_values_narrower_than_keys(
    cluster: str, kernel: Any, time: float
) -> None:
    latent = LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    own = PLAIN.changed(flash_kernel="sdpa" if kernel == "efficient" else kernel)
    model = dataclasses.replace(DENSE, mla=latent, num_kv_heads=None)
    times = [
        terms_of(problem_of(model, framework=framework, cluster=cluster, seq_len=65536), single())["attention"]
        for framework in (own, PLAIN.changed(flash_kernel="flash"))
    ]
    assert times[0] / times[1] == pytest.approx(time, rel=0.01)


@pytest.mark.parametrize(("kernel", "width"), [("flash1", 128), ("flash2", 96), ("flash", 96), ("cudnn", 80)])
def test_heads_of_80_take_as_long_as_the_width_that_the_kernel_has_for_them(kernel: Any, width: int) -> None:
    times = [
        terms_of(
            problem_of(dataclasses.replace(DENSE, head_dim=head_dim), framework=PLAIN.changed(flash_kernel=kernel)),
            single(),
        )["attention"]
        for head_dim in (80, width)
    ]
    assert times[0] == times[1]


@pytest.mark.parametrize(("cluster", "time"), [("h100-sxm:1x8", 1.0), ("b200:1x8", 0.65), ("mi300x:1x8", 1.0)])
def test_attention_in_8_bits_is_faster_where_runs_say_so(cluster: str, time: float) -> None:
    wide, narrow = (
        terms_of(problem_of(framework=PLAIN, cluster=cluster), dataclasses.replace(single(), fp8_attention=in_8_bits))
        for in_8_bits in (False, True)
    )
    assert narrow["attention"] / wide["attention"] == pytest.approx(time)


def test_a_wide_softmax_output_is_kept_written_cast_and_read_once_more() -> None:
    narrow = problem_of(framework=PLAIN)
    plan = single(attention="megatron-fused")
    wide = dataclasses.replace(narrow, framework=PLAIN.changed(bytes_per_fused_score=6.0))
    scores = 2048**2 * 16 * 8  # of all heads and layers
    added = terms_of(wide, plan)["attention"] - terms_of(narrow, plan)["attention"]
    assert added == pytest.approx(moved_s(3 * 4 * scores))
    kept = [price(problem, plan).memory_terms_bytes["activations"][0] for problem in (narrow, wide)]
    assert kept[1] - kept[0] == pytest.approx(4 * scores)


@pytest.mark.parametrize("width", [1.0, 17.0, float("nan")])
def test_a_softmax_output_has_a_width(width: float) -> None:
    with pytest.raises(InputError, match="bytes_per_fused_score"):
        PLAIN.changed(bytes_per_fused_score=width)


# -- what is not there costs nothing ----------------------------------------------------------------------------------


@given(cases())
def test_an_axis_of_degree_one_has_no_communication(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    terms = terms_of(problem, plan)
    if plan.tp == 1:
        assert terms["tp_communication"] == 0
    if plan.cp == 1:
        assert terms["cp_communication"] == 0
    if problem.model.moe is None or plan.ep * plan.etp == 1:
        assert terms["ep_communication"] == 0
    if plan.pp == 1:
        assert terms["pipeline_send"] == 0
        assert abs(terms["pipeline_bubble"]) <= 1e-12 * sum(terms.values())
    if plan.sharding in ("none", "zero1"):
        assert terms["fsdp_communication"] == 0
    if plan.sharding in ("none", "zero3"):
        assert terms["parameter_gather"] == 0
    if plan.recompute == "none":
        assert terms["recompute"] == 0


def test_experts_that_are_whole_need_no_tensor_parallel_collectives() -> None:
    """Megatron-Core dispatches the slices of sequence parallelism; only attention gathers and reduces, and the ends."""
    experts = Experts(num_experts=8, experts_per_token=2, expert_ffn_size=1024)
    plan = ParallelPlan(global_batch=8, tp=4, sp=True, dp_shard=2, ep=8)
    mixed = terms_of(problem_of(dataclasses.replace(DENSE, ffn_size=0, moe=experts)), plan)
    half = terms_of(problem_of(dataclasses.replace(DENSE, num_layers=4)), dataclasses.replace(plan, ep=1))
    assert mixed["tp_communication"] == pytest.approx(half["tp_communication"])


def test_one_device_only_computes() -> None:
    terms = terms_of(problem_of(), ParallelPlan(global_batch=4))
    busy = {name for name, value in terms.items() if value}
    assert busy - {"pipeline_bubble"} == {"gemm", "attention", "memory_bound", "head", "optimizer"}


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero3"])
def test_one_replica_of_a_pipeline_has_nothing_to_reduce_or_gather(sharding: Any) -> None:
    terms = terms_of(problem_of(), ParallelPlan(global_batch=8, pp=2, tp=2, sp=True, sharding=sharding))
    assert terms["data_parallel_reduce"] == terms["parameter_gather"] == terms["fsdp_communication"] == 0


def test_a_tied_embedding_is_reduced_between_first_and_last_stage() -> None:
    assert terms_of(problem_of("tied"), ParallelPlan(global_batch=8, pp=2))["data_parallel_reduce"] > 0
    assert terms_of(problem_of("tied"), ParallelPlan(global_batch=8))["data_parallel_reduce"] == 0


def test_overlap_hides_a_reduction_under_the_backward_pass_of_a_large_batch() -> None:
    framework = PLAIN.changed(all_reduce_overlap_share=1.0, sharded_reduce_overlap=True, param_gather_overlap=True)
    plan = ParallelPlan(global_batch=64, micro_batch=8, dp_shard=8)
    shown = terms_of(problem_of(framework=framework), plan)
    whole = terms_of(problem_of(), plan)
    for name in ("data_parallel_reduce", "parameter_gather"):
        assert 0 < shown[name] < whole[name]
    switched_off = dataclasses.replace(plan, grad_reduce_overlap=False, param_gather_overlap=False)
    assert terms_of(problem_of(framework=framework), switched_off) == whole


# -- a better machine is never slower ---------------------------------------------------------------------------------


def faster(cluster: ClusterSpec, part: str, factor: float) -> ClusterSpec:
    device, network = cluster.device, cluster.network
    if part == "link":
        levels = tuple(
            dataclasses.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor)
            for level in cluster.levels
        )
        return dataclasses.replace(cluster, levels=levels)
    if part == "network":
        return dataclasses.replace(
            cluster, network=dataclasses.replace(network, nic_bytes_per_s=network.nic_bytes_per_s * factor)
        )
    if part == "memory":
        rate = device.memory_bandwidth_bytes_per_s * factor
        return dataclasses.replace(cluster, device=dataclasses.replace(device, memory_bandwidth_bytes_per_s=rate))
    if part == "efficiency":
        share = min(device.gemm_efficiency * factor, 1.0)
        return dataclasses.replace(cluster, device=dataclasses.replace(device, gemm_efficiency=share))
    if part == "host link":
        rate = device.host_link_bytes_per_s * factor
        return dataclasses.replace(cluster, device=dataclasses.replace(device, host_link_bytes_per_s=rate))
    peak = {name: rate * factor for name, rate in device.peak_flops_per_s.items()}
    return dataclasses.replace(cluster, device=dataclasses.replace(device, peak_flops_per_s=peak))


def test_the_launches_of_the_first_forward_pass_hide_under_no_head() -> None:
    """So that faster products shorten a step of one micro-batch, and do not only take time away to hide under."""
    problem = problem_of("dense", framework=load_framework("aa-scaling"), cluster="aws-p4d:64x8")
    few, many = (ParallelPlan(global_batch=3 * m, cp=2, dp_shard=3, sharding="none") for m in (1, 100))
    better = dataclasses.replace(problem, cluster=faster(problem.cluster, "efficiency", 1.1))
    assert price(better, few).step_s[0] < price(problem, few).step_s[0]
    shown = [terms_of(problem, plan)["launch"] / plan.num_microbatches for plan in (few, many)]
    assert shown[0] > shown[1]


@pytest.mark.parametrize("part", ["link", "network", "memory", "efficiency", "host link", "peak"])
@settings(max_examples=20)
@given(case=cases(fills_pipeline=True), factor=st.floats(1.0, 20.0))
def test_a_faster_part_never_slows_a_step(part: str, case: tuple[Problem, ParallelPlan], factor: float) -> None:
    problem, plan = case
    better = dataclasses.replace(problem, cluster=faster(problem.cluster, part, factor))
    before = price(problem, plan).step_s[0]
    assert price(better, plan).step_s[0] <= before * (1 + 1e-9)


def test_a_faster_device_never_slows_a_pipeline_of_few_micro_batches() -> None:
    """The head makes the last stage long; with one micro-batch the time is the sum of all stages."""
    problem = problem_of()
    plan = ParallelPlan(global_batch=1, pp=8)
    work = sum(stage.forward_s + stage.backward_s for stage in stage_costs(problem, plan))
    terms = terms_of(problem, plan)
    assert sum(terms[name] for name in (*BLOCK_TERMS, "head", "allocator_retries", "pipeline_bubble")) == pytest.approx(
        work
    )


# Messages that hide behind forward passes, which alone become longer.
HIDING = ParallelPlan(
    global_batch=8, micro_batch=2, cp=4, cp_kind="ring", pp=4, vp=2, schedule="interleaved", sharding="none",
    grad_reduce_overlap=False, param_gather_overlap=False,
)  # fmt: skip


@settings(max_examples=20)
@example((problem_of("dense", framework=load_framework("deepspeed-zero"), cluster="aws-p4d:64x8"), HIDING), 1.5)
@given(cases(fills_pipeline=True), st.floats(1.0, 10.0))
def test_lower_efficiency_of_every_component_never_speeds_a_step_up(
    case: tuple[Problem, ParallelPlan], factor: float
) -> None:
    problem, plan = case
    before = price(problem, plan).step_s[0]
    for name in ("gemm", "attention", "memory_bound", "host", "scale_up", "scale_out"):
        slower = dataclasses.replace(problem, calibration=Calibration(**{name: factor}))  # type: ignore[arg-type]
        assert price(slower, plan).step_s[0] >= before * (1 - 1e-9), name


# -- size of the batch ------------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from(Sharding), st.integers(1, 6))
def test_doubling_the_global_batch_doubles_the_work_of_one_stage(tp: int, dp: int, sharding: Any, m: int) -> None:
    once = ParallelPlan(global_batch=m * dp, tp=tp, sp=tp > 1, dp_shard=dp, sharding=sharding)
    once_terms, twice_terms = (
        terms_of(problem_of(), plan) for plan in (once, dataclasses.replace(once, global_batch=2 * m * dp))
    )
    for name in (*BLOCK_TERMS, "head"):
        assert twice_terms[name] == pytest.approx(2 * once_terms[name])
    for name in ("data_parallel_reduce", "optimizer", "parameter_gather", "overhead"):
        assert twice_terms[name] == once_terms[name]


@given(cases())
def test_every_further_microbatch_of_a_pipeline_costs_the_slowest_stage_at_most(
    case: tuple[Problem, ParallelPlan],
) -> None:
    problem, plan = case
    if plan.sharding == "zero3":
        return  # a pipeline may gather once a step
    stages = stage_costs(problem, plan)
    slowest = max(stage.forward_s + stage.backward_s for stage in stages)
    sequences = plan.micro_batch * plan.dp
    many = dataclasses.replace(plan, global_batch=sequences * 8 * plan.pp)
    more = dataclasses.replace(plan, global_batch=sequences * 9 * plan.pp)
    terms, more_terms = (terms_of(problem, each) for each in (many, more))
    changes = {name: more_terms[name] - terms[name] for name in terms if name not in ("pipeline_send", "stragglers")}
    growth = sum(changes.values())
    gpipe_most = max(s.forward_s for s in stages) + max(s.backward_s for s in stages)
    assert growth <= plan.pp * (gpipe_most if plan.schedule == "gpipe" else slowest) * (1 + 1e-9)
    assert growth > 0


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_longer_step_amortises_the_bubble(pp: int) -> None:
    problem = problem_of()
    per_sequence = [
        float(price(problem, ParallelPlan(global_batch=batch, pp=pp)).step_s[0]) / batch for batch in (8, 16, 64)
    ]
    assert per_sequence == sorted(per_sequence, reverse=True)


def test_doubling_tensor_parallelism_halves_the_time_of_large_matrices_at_most() -> None:
    """Smaller pieces are never more efficient."""
    problem = problem_of(seq_len=8192)
    gemm = [terms_of(problem, ParallelPlan(global_batch=4, tp=tp, sp=tp > 1))["gemm"] for tp in (1, 2, 4, 8)]
    for whole, half in itertools.pairwise(gemm):
        assert whole / 2 <= half < whole


@pytest.mark.parametrize("vp", [2, 4])
def test_interleaving_divides_the_bubble_of_equal_stages(vp: int) -> None:
    problem = problem_of(dataclasses.replace(DENSE, num_layers=16, vocab_size=2))
    plain = ParallelPlan(global_batch=16, pp=4)
    chunked = dataclasses.replace(plain, vp=vp, schedule="interleaved")
    bubbles = [terms_of(problem, plan)["pipeline_bubble"] for plan in (plain, chunked)]
    assert bubbles[1] == pytest.approx(bubbles[0] / vp, rel=0.05)


def test_full_recomputation_costs_another_forward_pass() -> None:
    problem = problem_of()
    none, full = (terms_of(problem, ParallelPlan(global_batch=4, tp=2, recompute=kind)) for kind in ("none", "full"))
    layers = ("gemm", "attention", "memory_bound", "tp_communication")
    assert {name: full[name] for name in layers} == {name: none[name] for name in layers}
    assert 0.25 < full["recompute"] / sum(none[name] for name in layers) < 0.5


# -- calibration ------------------------------------------------------------------------------------------------------


SUMS = ("pipeline_bubble", "stragglers")  # change with what they are made of


def changed_by(factor: str, plan: ParallelPlan, model: str = "dense") -> dict[str, float]:
    """Terms that a factor of 2 changes of themselves, and by how much."""
    problem = problem_of(model)
    slower = dataclasses.replace(problem, calibration=Calibration(**{factor: 2.0}))  # type: ignore[arg-type]
    before, after = terms_of(problem, plan), terms_of(slower, plan)
    return {
        name: after[name] / before[name]
        for name in STEP_TERMS
        if name not in SUMS and before[name] and not math.isclose(after[name], before[name], rel_tol=1e-9)
    }


SPREAD = ParallelPlan(global_batch=128, tp=8, sp=True, dp_shard=32)


def test_a_factor_on_matrix_products_scales_them_and_the_head_only() -> None:
    changed = changed_by("gemm", ParallelPlan(global_batch=8))
    assert set(changed) == {"gemm", "head"}
    assert changed["gemm"] == pytest.approx(2.0, rel=0.02)


def test_a_factor_on_attention_scales_it_only() -> None:
    assert changed_by("attention", SPREAD) == pytest.approx({"attention": 2.0})


def test_a_factor_on_memory_bound_operations_scales_them_the_loss_and_the_optimizer() -> None:
    changed = changed_by("memory_bound", ParallelPlan(global_batch=8))
    assert {"memory_bound", "optimizer"} <= set(changed) <= {"memory_bound", "optimizer", "head", "gemm"}
    assert changed["memory_bound"] == pytest.approx(2.0)
    assert changed["optimizer"] == pytest.approx(2.0)


def test_a_factor_on_scale_up_links_slows_collectives_inside_the_node_only() -> None:
    changed = changed_by("scale_up", SPREAD)
    assert set(changed) == {"tp_communication"}
    assert changed["tp_communication"] > 1


def test_a_factor_on_the_network_slows_collectives_between_nodes_only() -> None:
    changed = changed_by("scale_out", SPREAD)
    assert set(changed) == {"data_parallel_reduce", "parameter_gather"}
    assert min(changed.values()) > 1


def test_a_factor_on_the_host_changes_only_what_waits_for_launches() -> None:
    assert changed_by("host", SPREAD) == {}
    slow_host = PLAIN.changed(host_s_per_block_forward=1.0, host_s_per_block_backward=1.0)
    problem = problem_of(framework=slow_host)
    slower = dataclasses.replace(problem, calibration=Calibration(host=2.0))
    plan = ParallelPlan(global_batch=8)
    before, after = terms_of(problem, plan), terms_of(slower, plan)
    assert {name for name in STEP_TERMS if not math.isclose(before[name], after[name], abs_tol=1e-9)} == {"launch"}
    assert after["launch"] / before["launch"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("sharding", "passes"), [("zero2", 0), ("zero3", 2)])
def test_hooks_around_modules_take_the_host_a_time_in_every_pass_under_zero3(sharding: Any, passes: int) -> None:
    plan = ParallelPlan(global_batch=16, micro_batch=1, dp_shard=8, sharding=sharding)
    slow_host = {"host_s_per_block_forward": 1.0, "host_s_per_block_backward": 1.0}
    launches = [
        terms_of(problem_of(cluster="h100-sxm:1x8", framework=PLAIN.changed(**traits)), plan)["launch"]
        for traits in (slow_host, slow_host | {"host_s_per_hooked_block": 0.5})
    ]
    # 8 layers of two blocks, in each of two micro-batches; the device waits for a host as slow as this in all of them.
    assert launches[1] - launches[0] == pytest.approx(0.5 * passes * 8 * 2 * 2)


def test_a_factor_of_one_changes_nothing() -> None:
    problem = problem_of("moe", framework=load_framework("megatron-core"))
    same = dataclasses.replace(problem, calibration=Calibration(name="same", gemm=1.0, scale_out=1.0))
    assert terms_of(problem, SPREAD) == terms_of(same, SPREAD)


def test_the_interval_is_that_of_a_lognormal_residual() -> None:
    cost = price(problem_of(calibration=Calibration(time_spread=0.1)), SPREAD)
    assert cost.high_s[0] / cost.step_s[0] == pytest.approx(math.exp(NORMAL_90 * 0.1))
    assert cost.step_s[0] / cost.low_s[0] == pytest.approx(math.exp(NORMAL_90 * 0.1))


@pytest.mark.parametrize(
    ("cluster", "plan", "spread"),
    [
        ("h100-sxm:2x8", ParallelPlan(global_batch=16, dp_shard=16), 0.1),
        ("h100-sxm:2x8", ParallelPlan(global_batch=1, tp=16), 0.2),
        ("h100-sxm:2x8", ParallelPlan(global_batch=2, tp=8, cp=2), 0.2),
        ("h100-sxm:2x8", ParallelPlan(global_batch=2, tp=8, pp=2), 0.3),
        ("h100-sxm:32x8", ParallelPlan(global_batch=256, dp_shard=256), 0.1),  # one leaf switch
        ("h100-sxm:33x8", ParallelPlan(global_batch=264, dp_shard=264), 0.4),
        ("h100-sxm:64x8", ParallelPlan(global_batch=2, tp=256, pp=2), 0.4),
    ],
)
def test_the_interval_is_that_of_the_plans_kind(cluster: str, plan: ParallelPlan, spread: float) -> None:
    kinds = Calibration(time_spread=0.1, tensor_time_spread=0.2, pipeline_time_spread=0.3, spine_time_spread=0.4)
    cost = price(problem_of(cluster=cluster, calibration=kinds), plan)
    assert cost.high_s[0] / cost.step_s[0] == pytest.approx(math.exp(NORMAL_90 * spread))
    plain = price(problem_of(cluster=cluster, calibration=Calibration(time_spread=0.15)), plan)
    assert plain.high_s[0] / plain.step_s[0] == pytest.approx(math.exp(NORMAL_90 * 0.15))


# -- memory verdict ---------------------------------------------------------------------------------------------------


def verdict_at(share: float, spread: float = 0.06) -> tuple[str, float]:
    """(verdict, probability of running out of memory) of a plan that needs `share` of the capacity."""
    problem = problem_of(calibration=Calibration(memory_spread=spread))
    needed = float(price(problem, SPREAD).memory_bytes[0])
    device = dataclasses.replace(problem.cluster.device, visible_memory_bytes=needed / share)
    cost = price(dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, device=device)), SPREAD)
    assert cost.capacity_bytes == pytest.approx(needed / share)
    return VERDICTS[cost.verdict[0]], cost.oom_probability(0)


def test_a_plan_that_needs_exactly_the_capacity_runs_out_of_memory_half_the_time() -> None:
    _, probability = verdict_at(1.0)
    assert probability == pytest.approx(0.5, abs=1e-6)


def test_verdicts_begin_at_their_probabilities() -> None:
    assert oom_probability(RISKY_Z) == pytest.approx(RISKY_ABOVE, rel=1e-12)
    assert oom_probability(OOM_Z) == pytest.approx(OOM_ABOVE, rel=1e-12)


@pytest.mark.parametrize(
    ("z", "verdict"), [(-3.0, "fits"), (-1.75, "fits"), (-1.68, "risky"), (-0.01, "risky"), (0.01, "oom"), (3, "oom")]
)
def test_verdicts_change_at_5_and_50_percent(z: float, verdict: str) -> None:
    found, probability = verdict_at(math.exp(0.06 * z))
    assert found == verdict
    # One run in fifty has a spread six times as wide.
    usual, surprising = (0.5 * (1 + math.erf(z / spread / math.sqrt(2))) for spread in (1, 6))
    assert probability == pytest.approx(0.98 * usual + 0.02 * surprising, abs=1e-6)
    assert (probability > 0.05, probability > 0.5) == (verdict != "fits", verdict == "oom")
    assert (probability > RISKY_ABOVE) + (probability > OOM_ABOVE) == VERDICTS.index(verdict)


@given(st.floats(0.2, 3.0), st.floats(1.001, 2.0))
def test_more_memory_needed_is_never_less_likely_to_run_out(share: float, factor: float) -> None:
    assert verdict_at(share)[1] <= verdict_at(share * factor)[1]


def test_reserved_memory_lowers_the_capacity() -> None:
    problem = problem_of(reserve_bytes=8e9)
    assert price(problem, SPREAD).capacity_bytes == problem.cluster.device.visible_memory_bytes - 8e9
    for reserve in (-1.0, math.nan, 1e12):
        with pytest.raises(InputError, match="reserved memory"):
            problem_of(reserve_bytes=reserve)


def test_a_sequence_beyond_the_learned_positions_is_refused() -> None:
    model = dataclasses.replace(DENSE, position_embedding="learned", max_positions=1024)
    with pytest.raises(InputError, match="2048 exceeds the 1024"):
        problem_of(model)


# -- what the ends of the model and copied heads cost -----------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2])
def test_a_larger_vocabulary_costs_more_gathers_under_zero3(pp: int) -> None:
    plan = ParallelPlan(global_batch=64, dp_shard=16, pp=pp, sharding="zero3")
    framework = PLAIN.changed(zero3_regathers_in_pipeline=True)
    small, large = (
        price(problem_of(dataclasses.replace(DENSE, vocab_size=size), framework=framework), plan).terms_s
        for size in (32000, 320000)
    )
    assert large["fsdp_communication"][0] > 1.2 * small["fsdp_communication"][0]


def test_key_value_heads_that_tensor_parallelism_copies_travel_whole() -> None:
    plan = ParallelPlan(global_batch=64, tp=8, sp=True, cp=4, dp_shard=2, sharding="zero1")
    traffic = [
        price(problem_of(dataclasses.replace(DENSE, num_kv_heads=heads)), plan).terms_s["cp_communication"][0]
        for heads in (1, 8)
    ]
    assert traffic[0] == traffic[1] > 0


# -- schedules that split the backward pass ---------------------------------------------------------------------------


def bubbles(schedules: dict[str, int], microbatches: int = 16) -> dict[str, float]:
    """Bubbles of 8 equal layers on four ranks by schedule and its chunks, of models without a head to speak of."""
    model = dataclasses.replace(DENSE, num_layers=8, vocab_size=128)
    problem = dataclasses.replace(problem_of(), model=model)
    plans = [
        ParallelPlan(global_batch=microbatches, pp=4, vp=vp, schedule=schedule)  # type: ignore[arg-type]
        for schedule, vp in schedules.items()
    ]
    cost = estimate(problem, PlanBatch.of(plans, 8))
    total = sum(cost.terms_s.values())
    np.testing.assert_allclose(total, cost.step_s)
    return dict(zip(schedules, cost.terms_s["pipeline_bubble"].tolist(), strict=True))


def test_putting_off_weight_gradients_shrinks_the_bubble_as_published() -> None:
    """(p - 1)(F + B) of 1F1B, (p - 1)(F + B - 2 W) of ZB-H1, and less of ZB-V (arXiv:2401.10241, table 2)."""
    found = bubbles({"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2})
    assert found["zb-v"] < found["zb-h1"] < found["1f1b"]
    assert found["interleaved"] < found["1f1b"]
    assert found["dualpipe-v"] < found["1f1b"]


@pytest.mark.parametrize(("schedule", "vp"), [("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)])
def test_a_split_schedule_is_priced_alike_alone_and_among_others(schedule: str, vp: int) -> None:
    problem = problem_of()
    layers = problem.model.num_layers
    split = ParallelPlan(global_batch=32, pp=2, vp=vp, schedule=schedule, dp_shard=2)  # type: ignore[arg-type]
    others = [ParallelPlan(global_batch=32, pp=2, dp_shard=2), split, ParallelPlan(global_batch=32, tp=4, sp=True)]
    alone, among = estimate(problem, PlanBatch.of([split], layers)), estimate(problem, PlanBatch.of(others, layers))
    assert among.step_s[1] == alone.step_s[0]
    assert among.memory_bytes[1] == alone.memory_bytes[0]
    assert sum(stage.layers for stage in stage_costs(problem, split)) == layers


# -- what tensor-parallel ranks wait for, and what hides ---------------------------------------------------------------


def test_a_share_of_the_collectives_hides_under_the_same_share_of_the_products_at_most() -> None:
    plan = ParallelPlan(global_batch=8, tp=8, sp=True, tp_overlap=True)
    plain = priced(plan)
    # Without recomputation the term holds all products but the head's.
    bare, quarter = (priced(plan, tp_overlap_share=share)["tp_communication"] for share in (0.0, 0.25))
    assert bare == plain["tp_communication"]
    assert bare - quarter == pytest.approx(0.25 * min(bare, plain["gemm"]), rel=0.2)
    assert bare - quarter <= 0.25 * min(bare, plain["gemm"])
    assert priced(dataclasses.replace(plan, tp_overlap=False), tp_overlap_share=0.25)["tp_communication"] == bare


def test_products_in_pieces_show_a_piece_of_the_reductions_and_are_slower_the_fewer_their_rows() -> None:
    wide = dataclasses.replace(DENSE, hidden_size=8192, ffn_size=32768, vocab_size=128)
    plan = ParallelPlan(global_batch=8, micro_batch=4, tp=2, sp=True, tp_overlap=True)

    def shown_s(plan: ParallelPlan, seq_len: int = 2048, **traits: Any) -> float:
        problem = problem_of(wide, framework=PLAIN.changed(**traits), seq_len=seq_len)
        return terms_of(problem, plan)["tp_communication"]

    userbuffers = {"tp_overlap_share": 0.75, "tp_overlap_pieces": 4}
    plain = shown_s(plan)
    # Of a gather and a reduction in either pass, one is backward, which nothing hides here; a quarter of one is shown.
    assert plain / 4 < shown_s(plan, **userbuffers) < plain / 2
    assert shown_s(dataclasses.replace(plan, tp_overlap=False), **userbuffers) == plain
    few = dataclasses.replace(plan, micro_batch=1)  # the same bytes in all, less than a quarter of the rows at a time
    assert shown_s(few, 1024, **userbuffers) / shown_s(few, 1024) > shown_s(plan, **userbuffers) / plain


def test_weights_kept_in_8_bits_of_one_scale_are_gathered_so() -> None:
    plan = dataclasses.replace(TWO_NODES, sharding="zero1", precision="fp8")
    wide = priced(plan)["parameter_gather"]
    narrow = priced(dataclasses.replace(plan, narrow_params=True))["parameter_gather"]
    assert wide / 2 < narrow < 0.8 * wide  # embedding and head stay wide
    blocks = dataclasses.replace(plan, precision="mxfp8")
    assert priced(dataclasses.replace(blocks, narrow_params=True)) == priced(blocks)


def test_dropout_draws_numbers_in_attention_and_moves_masks() -> None:
    gpt = dataclasses.replace(DENSE, gated_mlp=False, position_embedding="learned", max_positions=2048)
    without, kept = (
        terms_of(problem_of(gpt, framework=PLAIN), dataclasses.replace(single(), dropout=drops))
        for drops in (False, True)
    )
    assert kept["attention"] == pytest.approx(DROPOUT_ATTENTION_TIME * without["attention"])
    assert kept["memory_bound"] - without["memory_bound"] == pytest.approx(moved_s(2 * 2 * 3.0 * 8 * 2048 * 1024))


def test_a_squared_relu_without_a_kernel_of_its_own_moves_more() -> None:
    model = dataclasses.replace(DENSE, gated_mlp=False, squared_relu=True)
    eager = PLAIN.changed(fused_squared_relu=False)
    fused_s, eager_s = (
        terms_of(problem_of(model, framework=variant), single())["memory_bound"] for variant in (PLAIN, eager)
    )
    assert eager_s - fused_s == pytest.approx(moved_s(18.0 * 8 * 2048 * 4096))


def test_a_gelu_of_many_operations_moves_what_each_reads_and_writes() -> None:
    gelu = dataclasses.replace(DENSE, gated_mlp=False)
    eager = PLAIN.changed(fused_activation=False)
    once_s, more_s = (
        terms_of(problem_of(model, framework=eager), single())["memory_bound"]
        for model in (gelu, dataclasses.replace(gelu, activation_tensors=4))
    )
    device = problem_of().cluster.device
    slower = device.memory_efficiency / OP_BY_OP_SHARE.get(device.generation, device.memory_efficiency)
    assert more_s - once_s == pytest.approx(slower * moved_s((36 + 56 - 4 - 6) * 8 * 2048 * 4096))


@pytest.mark.parametrize("sp", [False, True])
def test_the_reduction_of_input_gradients_hides_beside_weight_gradients(sp: bool) -> None:
    def shown_s(hidden_size: int, **traits: Any) -> float:
        model = dataclasses.replace(DENSE, hidden_size=hidden_size, ffn_size=4 * hidden_size, vocab_size=128)
        problem = problem_of(model, framework=PLAIN.changed(**traits))
        return terms_of(problem, ParallelPlan(global_batch=8, tp=2, sp=sp))["tp_communication"]

    whole = shown_s(8192)
    # Of the two all-reduces of a block one hides, of two gathers and two reduce-scatters one; the embedding has more.
    gain = whole - shown_s(8192, tp_reduce_overlap=True)
    assert gain == pytest.approx((1 - CONTENTION_SHARE) * whole / (4 if sp else 2), rel=0.1)
    # Products of small matrices are too short for that.
    small = shown_s(512)
    assert small - shown_s(512, tp_reduce_overlap=True) < 0.7 * gain * small / whole


def test_a_block_that_takes_the_device_long_makes_up_for_one_that_is_launched_late() -> None:
    batch = PlanBatch.of([ParallelPlan(global_batch=1)], MODELS["dense"].num_layers)

    def costs(host_s: float) -> list[BlockCost]:
        framework = PLAIN.changed(host_s_per_block_forward=host_s)
        return list(block_costs(problem_of(framework=framework), batch).values())

    busy = [cost.total_forward_s[0] for cost in costs(0.0)]
    assert max(busy) > 1.1 * min(busy)
    # Launches of a layer take as long as the layer: each block's as long as the mean of the two.
    assert sum(cost.forward_s["launch"][0] for cost in costs(sum(busy) / 2)) == pytest.approx(0.0, abs=1e-12)
    assert sum(cost.total_forward_s[0] for cost in costs(sum(busy))) == pytest.approx(2 * sum(busy))


def test_every_rank_of_a_tensor_group_delays_the_collectives_of_a_pipeline_across_nodes() -> None:
    late = {"cross_node_pipeline_s_per_tp": 1.0}
    # 16 blocks on two stages, a micro-batch, five collectives a block, and a second for each of two ranks; the device
    # works meanwhile.  Two collectives more for the embedding, and five for head and loss on the other stage.
    plan = ParallelPlan(global_batch=8, tp=2, sp=True, pp=2, dp_shard=8)
    before, after = priced(plan), priced(plan, **late)
    assert after["launch"] == pytest.approx(8 * 5 * 2.0, rel=0.01)
    assert after["tp_communication"] - before["tp_communication"] == pytest.approx(2 * 2.0)
    assert after["pipeline_bubble"] - before["pipeline_bubble"] == pytest.approx(8 * 5 * 2.0 + 5 * 2.0, rel=0.01)
    # An all-reduce a pass in a block.
    whole = dataclasses.replace(plan, sp=False)
    assert priced(whole, **late)["launch"] == pytest.approx(8 * 2 * 2.0, rel=0.01)
    slow = {"host_s_per_block_forward": 0.5, "host_s_per_block_backward": 1.0}
    assert priced(plan, **late, **slow)["launch"] == pytest.approx(8 * (5 * 2.0 + 1.5), rel=0.01)
    inside = dataclasses.replace(plan, dp_shard=2, global_batch=2)
    without_group = dataclasses.replace(plan, tp=1, sp=False)
    flat = dataclasses.replace(plan, pp=1)
    for other in (inside, without_group, flat):
        assert priced(other, **late) == priced(other)


def test_ranks_on_another_node_delay_the_launches_of_a_pipeline_once_more() -> None:
    far = {"cross_node_pipeline_s_per_tp": 1.0, "cross_node_pipeline_s_per_far_tp": 0.5}
    # 16 blocks on two stages: a second for each of 16 ranks, half a second for each of 8 on another node, five times.
    across = ParallelPlan(global_batch=1, tp=16, sp=True, pp=2)
    assert priced(across, **far)["launch"] == pytest.approx(8 * 5 * (16 + 4), rel=0.01)
    inside = dataclasses.replace(across, tp=8, global_batch=2, dp_shard=2)
    assert priced(inside, **far)["launch"] == pytest.approx(8 * 5 * 8, rel=0.01)


def test_messages_that_are_polled_take_so_much_longer() -> None:
    polls = {"message_poll_s": 10.0}
    # Two stages and two micro-batches: three exchanges (`modelling` E3).
    plan = ParallelPlan(global_batch=16, pp=2, dp_shard=8, sharding="none")
    more = priced(plan, **polls)["pipeline_send"] - priced(plan)["pipeline_send"]
    assert more == pytest.approx(3 * 10.0)
    assert priced(TWO_NODES, **polls) == priced(TWO_NODES)


def test_an_all_reduce_hides_only_where_the_network_is_free_of_tensor_parallelism() -> None:
    traits = {"all_reduce_overlap_share": 1.0}
    inside = ParallelPlan(global_batch=16, micro_batch=4, tp=8, dp_shard=4, sharding="none")
    across = dataclasses.replace(inside, tp=16)
    for plan, hides in ((inside, True), (across, False)):
        shown, hidden = priced(plan)["data_parallel_reduce"], priced(plan, **traits)["data_parallel_reduce"]
        assert (hidden < 0.9 * shown) == hides


# -- the end of a step, and a full device ------------------------------------------------------------------------------

TWO_NODES = ParallelPlan(global_batch=32, dp_shard=16, sharding="none")  # 2 micro-batches


def priced(plan: ParallelPlan, **traits: Any) -> dict[str, float]:
    """Terms of a step on two nodes of eight under the plain framework with other traits."""
    return terms_of(dataclasses.replace(problem_of(), framework=PLAIN.changed(**traits)), plan)


def test_a_zero1_that_all_reduces_moves_twice_what_a_reduce_scatter_does() -> None:
    plan = dataclasses.replace(TWO_NODES, sharding="zero1")
    scattered = priced(plan)["data_parallel_reduce"]
    assert priced(plan, zero1_grad_all_reduce=True)["data_parallel_reduce"] == pytest.approx(2 * scattered, rel=0.02)


def test_gathering_slice_by_slice_takes_the_host_a_time_per_tensor_and_rank() -> None:
    plan = dataclasses.replace(TWO_NODES, sharding="zero1")
    # 8 layers of 2 norms and 4 matrices, embedding, final norm and head: 51 tensors in 16 slices.
    more = priced(plan, host_s_per_gathered_piece=1e-5)["parameter_gather"] - priced(plan)["parameter_gather"]
    assert more == pytest.approx(1e-5 * 51 * 16)
    alone = dataclasses.replace(plan, dp_shard=1, tp=8)
    assert priced(alone, host_s_per_gathered_piece=1e-5)["parameter_gather"] == 0.0


def test_a_bucket_that_holds_all_gradients_changes_nothing_and_smaller_ones_cost_more() -> None:
    whole = priced(TWO_NODES)["data_parallel_reduce"]
    assert priced(TWO_NODES, reduce_bucket_bytes=1e12)["data_parallel_reduce"] == whole
    half, quarter = (priced(TWO_NODES, reduce_bucket_bytes=size)["data_parallel_reduce"] for size in (2e6, 1e6))
    assert whole < half < quarter


def test_members_of_a_data_parallel_group_delay_its_collectives_in_a_pipeline_across_nodes() -> None:
    plan = ParallelPlan(global_batch=16, pp=2, dp_shard=8, sharding="none")
    late = {"cross_node_pipeline_s_per_dp": 1e-3}
    # Eight members, one bucket; the slower stage decides, and nothing overlaps on the first.  Or one reduction and one
    # gather.
    sharded = dataclasses.replace(plan, sharding="zero1")
    for base_plan, terms in ((plan, ["data_parallel_reduce"]), (sharded, ["data_parallel_reduce", "parameter_gather"])):
        before = priced(base_plan, reduce_bucket_bytes=1e12)
        after = priced(base_plan, reduce_bucket_bytes=1e12, **late)
        for term in terms:
            assert after[term] - before[term] == pytest.approx(8e-3)
    assert priced(TWO_NODES, **late) == priced(TWO_NODES)


def test_an_interleaved_pipeline_reduces_and_gathers_its_chunks_beside_the_passes_of_others() -> None:
    overlaps = {"all_reduce_overlap_share": 1.0, "sharded_reduce_overlap": True, "param_gather_overlap": True}
    shares = []
    for vp in (2, 4):
        plan = ParallelPlan(global_batch=128, micro_batch=4, pp=2, vp=vp, schedule="interleaved", dp_shard=8)
        whole, shown = priced(plan), priced(plan, **overlaps)
        assert 0 < shown["parameter_gather"] < 0.2 * whole["parameter_gather"]
        # Contention costs a tenth of what may overlap: all but the last of the eight blocks of a stage.
        shares.append(shown["data_parallel_reduce"] / whole["data_parallel_reduce"] - 0.1 * 7 / 8)
    # The first chunk shows: embedding and head, and a part of the layers.
    embedding = 2 * shares[0] - 1
    assert 0 < embedding < 0.5
    assert shares[1] == pytest.approx(embedding + (1 - embedding) / 4)


def test_scales_of_past_steps_are_agreed_on_at_the_end_of_every_pass_by_all_ranks_of_a_stage() -> None:
    later, at_once = (
        priced(dataclasses.replace(TWO_NODES, precision="fp8", fp8_scaling=scaling))["launch"]
        for scaling in (Fp8Scaling.DELAYED, Fp8Scaling.TENSORWISE)
    )
    # 7 links to the last of a node, one step up to the other node, and back; two passes of two micro-batches.
    assert later - at_once == pytest.approx(4 * (6.8e-6 + 2 * (7 * 0.6e-6 + 5e-6)))


def test_half_an_overlap_leaves_half_of_the_backward_pass_uncovered() -> None:
    plan = dataclasses.replace(TWO_NODES, micro_batch=2)  # one of them
    traits = {"reduce_bucket_bytes": 2e5}
    whole, half, none = (
        priced(plan, **traits, all_reduce_overlap_share=share)["data_parallel_reduce"] for share in (1.0, 0.5, 0.0)
    )
    # Contention apart, which costs a tenth of what overlaps.
    assert (none - half) / 0.9 == pytest.approx((none - whole) / 1.8)
    assert none > half > whole


def test_the_allocator_retries_once_a_layer_where_a_full_device_leaves_no_room_for_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = dataclasses.replace(TWO_NODES, global_batch=48)
    assert priced(plan, counts_cached_blocks=True)["allocator_retries"] == 0.0
    monkeypatch.setattr("autoplan.cost.stages.RETRY_SHARE", 1e-6)
    full = priced(plan, counts_cached_blocks=True)
    assert full["allocator_retries"] == pytest.approx(RETRY_S * 8 * 3)
    assert priced(plan)["allocator_retries"] == 0.0
    piped = ParallelPlan(global_batch=24, pp=2, dp_shard=8, sharding="none")
    assert priced(piped, counts_cached_blocks=True)["allocator_retries"] == 0.0


@pytest.mark.parametrize(
    "traits",
    [
        {"reduce_bucket_bytes": -1.0},
        {"host_s_per_gathered_piece": -1e-6},
        {"cross_node_pipeline_s_per_tp": -1e-6},
        {"cross_node_pipeline_s_per_dp": -1e-6},
        {"message_poll_s": -0.1},
        {"all_reduce_overlap_share": 1.5},
    ],
)
def test_traits_of_a_steps_end_are_refused_outside_their_range(traits: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(traits))):
        Framework(name="wrong").changed(**traits)


@pytest.mark.parametrize(("num_devices", "beyond"), [(1, 0.0), (8, 0.0), (64, 2.34 - 1.43), (512, 3.03 - 1.43)])
def test_a_step_takes_as_long_as_its_slowest_rank(num_devices: int, beyond: float) -> None:
    # Expected largest of N normal deviates (`modelling` E6), beyond that of the 8 that device rates were measured with.
    plan = ParallelPlan(global_batch=num_devices, dp_shard=num_devices)
    terms = terms_of(problem_of(), plan)
    waiting = terms.pop("stragglers")
    assert waiting == pytest.approx(STRAGGLER_SPREAD * beyond * sum(terms.values()), rel=0.01)


@pytest.mark.parametrize(("model", "ep"), [("dense", 1), ("moe", 8)])
def test_without_sharding_the_split_of_replicas_changes_nothing(model: str, ep: int) -> None:
    problem = problem_of(model)
    splits = [single(global_batch=32, ep=ep, sharding="none", dp_replicate=n, dp_shard=16 // n) for n in (1, 2, 4, 16)]
    costs = [price(problem, plan) for plan in splits]
    for name in ("step_s", "memory_bytes", "host_memory_bytes"):
        assert len({float(getattr(cost, name)[0]) for cost in costs}) == 1, name
