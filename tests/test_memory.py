"""Does a rank need the bytes that a count by hand, the laws of sharding and published measurements say?"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.cost.memory.stage_memory import CACHED_SHARE, MEMORY_TERMS, PASS_TERMS, host_bytes, stage_memory
from autoplan.cost.parameters import stage_parameters
from autoplan.cost.pipeline.layout import stage_blocks
from autoplan.cost.pipeline.order import PipelineShape, rank_orders
from autoplan.cost.state_types import optimizer_bytes
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.spec.blocks import Experts, LatentAttention
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import Recompute, Sharding
from autoplan.spec.estimate import VERDICTS, CostEstimate, StageCost
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from model_specs import gpt
from pipeline_oracle import interleaved, most_alive
from problems import problem_for

GIB = 2**30
TOKENS = 128
# Two layers.  Per layer: qkv 64 x (64 + 2 x 32), out 64 x 64, MLP 3 x 64 x 128 and two norms; two tables of 512 x 64.
SMALL = ModelSpec(name="small", num_layers=2, hidden_size=64, vocab_size=512, num_heads=4, num_kv_heads=2, ffn_size=128)
NORMS = 2 * 64
LAYER = 64 * 128 + 64 * 64 + 3 * 64 * 128 + NORMS
TABLE = 512 * 64
TOTAL = 2 * LAYER + 2 * TABLE + 64
# What a layer keeps of a token: norms 8 h, q k v o 2 x 16 x (2 x 4 + 2 x 2), log-sum-exp 4 x 4, SwiGLU 6 f.
KEPT = TOKENS * (8 * 64 + 2 * 16 * 12 + 4 * 4 + 6 * 128)
# Four experts of width 32 instead of the MLP, no shared ones.
EXPERTS = dataclasses.replace(SMALL, ffn_size=0, moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=32))
EXPERT_WEIGHTS = 4 * 3 * 64 * 32  # of one layer
BARE = Framework(name="bare").changed(
    pads_vocab_to=1,
    fixed_bytes=0.0,
    communicator_bytes=0.0,
    reserved_factor=1.0,
    bytes_per_logit=2.0,
    zero2_reduces_every_microbatch=True,
)


def problem_of(model: ModelSpec = SMALL, framework: Framework = BARE, seq_len: int = TOKENS) -> Problem:
    return problem_for(model, "h100-sxm:64x8", framework, seq_len=seq_len)


def stages_of(problem: Problem | None = None, **plan: Any) -> tuple[StageCost, ...]:
    return stage_costs(problem or problem_of(), ParallelPlan(**{"global_batch": 64, **plan}))


def price(problem: Problem, *plans: ParallelPlan) -> CostEstimate:
    return estimate(problem, PlanBatch.of(plans, problem.model.num_layers))


def states(stage: StageCost) -> float:
    return sum(stage.memory_terms_bytes[name] for name in ("weights", "gradients", "optimizer"))


# -- states, by hand, on four devices ---------------------------------------------------------------------------------


def test_the_small_model_has_the_parameters_of_the_hand_count() -> None:
    assert count_parameters(SMALL) == TOTAL


def test_gradients_that_gather_over_micro_batches_before_they_are_reduced_are_whole() -> None:
    problem = problem_of(framework=BARE.changed(zero2_reduces_every_microbatch=False))
    (several,) = stages_of(problem, dp_shard=4, sharding="zero2")
    (single,) = stages_of(problem, dp_shard=4, sharding="zero2", micro_batch=16)
    assert several.memory_terms_bytes["gradients"] == 4 * single.memory_terms_bytes["gradients"]


@pytest.mark.parametrize(
    ("sharding", "per_parameter"), [("none", 18), ("zero1", 6 + 12 / 4), ("zero2", 2 + 16 / 4), ("zero3", 18 / 4)]
)
def test_states_take_their_bytes_a_parameter_under_every_sharding(sharding: Any, per_parameter: float) -> None:
    (stage,) = stages_of(dp_shard=4, sharding=sharding)
    assert states(stage) == pytest.approx(per_parameter * TOTAL)


def test_states_are_split_into_weights_gradients_and_optimizer() -> None:
    (stage,) = stages_of(dp_shard=4, sharding="zero1")
    terms = stage.memory_terms_bytes
    assert set(terms) == set(MEMORY_TERMS)
    assert terms["weights"] == pytest.approx(2 * TOTAL)
    assert terms["gradients"] == pytest.approx(4 * TOTAL)
    assert terms["optimizer"] == pytest.approx(12 / 4 * TOTAL)


def test_copies_of_a_shard_group_do_not_shard() -> None:
    (stage,) = stages_of(dp_replicate=2, dp_shard=2, sharding="zero1")
    assert states(stage) == pytest.approx((6 + 12 / 2) * TOTAL)


def test_context_parallel_ranks_share_the_shards_of_dense_states() -> None:
    (stage,) = stages_of(dp_shard=2, cp=2, sharding="zero1")
    assert states(stage) == pytest.approx((6 + 12 / 4) * TOTAL)


def test_tensor_parallelism_cuts_all_but_the_norms() -> None:
    (stage,) = stages_of(tp=2, dp_shard=2, sharding="none")
    norms = 2 * NORMS + 64
    assert states(stage) == pytest.approx(18 * ((TOTAL - norms) / 2 + norms))


def test_first_stage_holds_the_embedding_and_last_stage_the_head() -> None:
    first, last = stages_of(pp=2, dp_shard=2, sharding="none")
    assert states(first) == pytest.approx(18 * (LAYER + TABLE))
    assert states(last) == pytest.approx(18 * (LAYER + TABLE + 64))


def test_a_framework_with_16_bit_gradients_and_an_fp32_copy_beside_them_keeps_both() -> None:
    framework = BARE.changed(bytes_per_grad=2.0, bytes_per_bf16_grad_accumulator=4.0)
    (stage,) = stages_of(problem_of(framework=framework), dp_shard=4, sharding="zero1")
    assert states(stage) == pytest.approx((2 + 6 + 12 / 4) * TOTAL)


@pytest.mark.parametrize(("sharding", "per_parameter"), [("none", 18 + 2), ("zero1", 6 + 12 / 4)])
def test_buckets_hold_another_gradient_where_ranks_do_not_shard(sharding: Any, per_parameter: float) -> None:
    problem = problem_of(framework=BARE.changed(reduce_bucket_bytes=1e6))
    (stage,) = stages_of(problem, dp_shard=4, sharding=sharding)
    assert states(stage) == pytest.approx(per_parameter * TOTAL)
    (alone,) = stages_of(problem, sharding="none")
    assert states(alone) == pytest.approx(18 * TOTAL)


@pytest.mark.parametrize(
    ("cluster", "precision", "scaling", "copies"),
    [
        ("h100-sxm", "fp8", "tensorwise", 2),
        ("h100-sxm", "fp8", "blockwise", 2),
        ("b200", "fp8", "tensorwise", 1),
        ("b200", "fp8", "blockwise", 2 + 1 / 16),  # run as mxfp8
        ("b200", "mxfp8", "tensorwise", 2 + 1 / 16),
        ("b200", "nvfp4", "tensorwise", 1 + 1 / 8),
    ],
)
def test_narrow_gemms_keep_quantised_copies_of_their_weights(
    cluster: str, precision: Any, scaling: Any, copies: float
) -> None:
    training = TrainingSpec(seq_len=TOKENS, precision=precision)
    problem = dataclasses.replace(problem_of(), training=training, cluster=load_cluster(f"{cluster}:1x8"))
    for sharding, kept in (("zero1", copies), ("zero3", 0)):
        plan = {"dp_shard": 4, "sharding": sharding, "fp8_scaling": scaling}
        (wide,), (narrow,) = (stages_of(problem, precision=kind, **plan) for kind in ("bf16", precision))
        added = narrow.memory_terms_bytes["weights"] - wide.memory_terms_bytes["weights"]
        assert added == pytest.approx(kept * 2 * LAYER)


@pytest.mark.parametrize(("cluster", "copies"), [("h100-sxm", 1), ("b200", 0)])
def test_frozen_weights_of_8_bits_alone_may_have_no_transposed_copy(cluster: str, copies: int) -> None:
    lora = FineTuning(rank=4, targets=("all-linear",))
    training = TrainingSpec(seq_len=TOKENS, precision="fp8", finetuning=lora)
    weights_bytes = []
    for keeps in (True, False):
        framework = BARE.changed(keeps_frozen_transposes=keeps)
        problem = dataclasses.replace(
            problem_of(framework=framework), training=training, cluster=load_cluster(f"{cluster}:1x8")
        )
        (stage,) = stages_of(problem, dp_shard=4, sharding="zero1", precision="fp8", narrow_params=True)
        weights_bytes.append(stage.memory_terms_bytes["weights"])
    assert weights_bytes[0] - weights_bytes[1] == pytest.approx(copies * 2 * LAYER)


def test_an_offloaded_optimizer_takes_no_device_memory() -> None:
    (stage,) = stages_of(dp_shard=4, sharding="none", offload="optimizer")
    assert states(stage) == pytest.approx(6 * TOTAL)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=2).map(sorted))
def test_more_of_the_optimizer_on_the_host_is_less_on_the_device(percents: list[int]) -> None:
    """A share of the 12 bytes a parameter of weights and moments; the host also gets the 4 of as many gradients."""
    plan = {"global_batch": 64, "dp_shard": 4, "sharding": "zero1", "offload": "optimizer"}
    fewer, more = (states(stages_of(offload_percent=percent, **plan)[0]) for percent in percents)
    share = (percents[1] - percents[0]) / 100
    assert fewer - more == pytest.approx(share * 12 / 4 * TOTAL)
    costs = price(problem_of(), *(ParallelPlan(offload_percent=percent, **plan) for percent in percents))  # type: ignore[arg-type]
    assert np.diff(costs.host_memory_bytes)[0] == pytest.approx(4 * share * 16 / 4 * TOTAL)
    assert np.diff(costs.memory_bytes)[0] <= 0


@pytest.mark.parametrize("percent", [1, 50, 99])
def test_both_parts_of_an_optimizer_are_updated_side_by_side(percent: int) -> None:
    problem, plan = problem_of(), ParallelPlan(global_batch=64, dp_shard=4, sharding=Sharding.ZERO1)
    on_host = dataclasses.replace(plan, offload="optimizer")
    split = dataclasses.replace(on_host, offload_percent=percent)
    device_s, host_s, split_s = price(problem, plan, on_host, split).terms_s["optimizer"]
    assert split_s == pytest.approx(max(percent / 100 * host_s, (1 - percent / 100) * device_s))


@pytest.mark.parametrize(("main_weights", "per_parameter"), [("fp32", 4), ("remainders", 2)])
def test_an_offloaded_optimizer_keeps_no_more_on_the_device_than_it_has(
    main_weights: Any, per_parameter: float
) -> None:
    problem = problem_of(framework=BARE.changed(bytes_per_state_kept_on_device=4.0))
    problem = dataclasses.replace(problem, training=dataclasses.replace(problem.training, optimizer="sgd"))
    moments = {"moment_dtype": "bf16", "main_weights": main_weights}
    (stage,) = stages_of(problem, dp_shard=4, sharding="none", offload="optimizer", **moments)
    assert states(stage) == pytest.approx((6 + per_parameter) * TOTAL)


@pytest.mark.parametrize(("sharding", "per_parameter"), [("zero1", 2 + 4), ("zero3", 2 / 4)])
def test_an_optimizer_on_the_host_may_take_the_gradients_of_zero3_along(sharding: Any, per_parameter: float) -> None:
    problem = problem_of(framework=BARE.changed(offloads_grads=True))
    (stage,) = stages_of(problem, dp_shard=4, sharding=sharding, offload="optimizer")
    assert states(stage) == pytest.approx(per_parameter * TOTAL)
    (kept,) = stages_of(problem, dp_shard=4, sharding=sharding)
    assert kept.memory_terms_bytes["gradients"] > 0


@pytest.mark.parametrize(("ep", "group"), [(1, 4), (2, 2), (4, 1)])
def test_states_of_experts_are_sharded_over_the_ranks_that_hold_the_same_experts(ep: int, group: int) -> None:
    dense = count_parameters(EXPERTS) - 2 * EXPERT_WEIGHTS
    (stage,) = stages_of(problem_of(EXPERTS), dp_shard=4, ep=ep, sharding="zero1")
    expected = dense * (6 + 12 / 4) + 2 * EXPERT_WEIGHTS / ep * (6 + 12 / group)
    assert states(stage) == pytest.approx(expected)


def test_expert_parallelism_over_tensor_and_data_parallel_ranks_leaves_no_rank_to_shard_over() -> None:
    dense = 64 * 128 + 64 * 64  # of a layer, cut by tp; norms and router are not
    copied = NORMS + 64 * 4
    (stage,) = stages_of(problem_of(EXPERTS), tp=2, sp=True, dp_shard=2, ep=4, sharding="zero1")
    local = 2 * (dense / 2 + copied) + TABLE + 64
    assert states(stage) == pytest.approx(local * (6 + 12 / 2) + 2 * EXPERT_WEIGHTS / 4 * 18)


# -- the optimizer's step, by hand, on four devices --------------------------------------------------------------------


def step_bytes(stage: StageCost) -> float:
    """Bytes that the optimizer's step needs where that is more than the passes need."""
    terms = stage.memory_terms_bytes
    assert terms["update"] > 0
    return terms["update"] + sum(terms[name] for name in PASS_TERMS)


def test_a_step_copies_what_the_rank_updates() -> None:
    problem = problem_of(framework=BARE.changed(bytes_per_update_copy=1200.0))
    for sharding, ranks in (("none", 1), ("zero1", 4), ("zero3", 4)):
        (stage,) = stages_of(problem, dp_shard=4, sharding=sharding)
        assert step_bytes(stage) == pytest.approx(1200 / ranks * TOTAL)
    (offloaded,) = stages_of(problem, dp_shard=4, sharding="zero1", offload="optimizer")
    assert offloaded.memory_terms_bytes["update"] == 0


@pytest.mark.parametrize(
    ("frees", "precision", "per_parameter"), [(False, "bf16", 6), (True, "bf16", 4), (True, "fp16", 2)]
)
def test_an_accumulator_stands_beside_16_bit_gradients_or_in_their_place(
    frees: bool, precision: Any, per_parameter: float
) -> None:
    memory = {"bytes_per_grad": 2.0, "bytes_per_bf16_grad_accumulator": 4.0, "frees_accumulated_grads": frees}
    (stage,) = stages_of(problem_of(framework=BARE.changed(**memory)), precision=precision)
    assert stage.memory_terms_bytes["gradients"] == pytest.approx(per_parameter * TOTAL)


@pytest.mark.parametrize(
    ("copies", "kept_bytes", "freed_bytes"), [("none", 0.0, 0.0), ("kept", 4.0, 0.0), ("freed", 0.0, 4.0)]
)
def test_unscaled_gradients_of_fp16_are_kept_or_come_with_the_step(
    copies: str, kept_bytes: float, freed_bytes: float
) -> None:
    def terms_of(framework: Framework, precision: str) -> tuple[float, float]:
        problem = problem_of(framework=framework)
        batch = PlanBatch.of([ParallelPlan(global_batch=64, precision=precision)], 2)  # type: ignore[arg-type]
        blocks = stage_blocks(problem.model, batch, 1)
        memory = stage_memory(problem, batch, blocks, stage_parameters(problem, batch, blocks))
        return memory.terms["optimizer"][0, 0], memory.update_bytes[0, 0]

    plain, (optimizer, update) = terms_of(BARE, "fp16"), terms_of(BARE.changed(fp16_unscaled_grads=copies), "fp16")
    assert (optimizer - plain[0], update - plain[1]) == pytest.approx((kept_bytes * TOTAL, freed_bytes * TOTAL))
    assert terms_of(BARE.changed(fp16_unscaled_grads=copies), "bf16") == terms_of(BARE, "bf16")


def test_a_bf16_step_gathers_all_weights_into_a_copy_and_an_fp16_step_goes_through_buckets() -> None:
    framework = BARE.changed(bytes_per_bf16_gathered_weight=200.0, bucket_bytes=1e8)
    plan = {"dp_shard": 4, "sharding": "zero1"}
    (whole,) = stages_of(problem_of(framework=framework), **plan)
    assert step_bytes(whole) == pytest.approx(200 * TOTAL)
    (pieces,) = stages_of(problem_of(framework=framework), precision="fp16", **plan)
    assert step_bytes(pieces) == pytest.approx(1e8)
    (unsharded,) = stages_of(problem_of(framework=framework), dp_shard=4, sharding="none")
    assert unsharded.memory_terms_bytes["update"] == 0


@pytest.mark.parametrize(("sharding", "beside"), [("zero1", 0), ("zero2", 1000), ("zero3", 1000)])
def test_gradients_reduced_in_backward_passes_have_their_bucket_beside_activations(sharding: Any, beside: int) -> None:
    with_bucket, without = (
        stages_of(problem_of(framework=BARE.changed(bucket_bytes=size)), dp_shard=4, sharding=sharding)[0]
        for size in (1000.0, 0.0)
    )
    assert with_bucket.memory_terms_bytes["gathered"] - without.memory_terms_bytes["gathered"] == pytest.approx(beside)


@pytest.mark.parametrize(("per_parameter", "added"), [(1.0, 0), (1000.0, 1000 * TOTAL)])
def test_a_step_counts_where_it_needs_more_than_the_passes(per_parameter: float, added: int) -> None:
    plain = price(problem_of(), ParallelPlan(global_batch=1))
    passes = sum(float(plain.memory_terms_bytes[name][0]) for name in PASS_TERMS)
    assert TOTAL < passes < 1000 * TOTAL
    problem = problem_of(framework=BARE.changed(bytes_per_update_copy=per_parameter))
    stepped = price(problem, ParallelPlan(global_batch=1))
    assert stepped.memory_bytes[0] - plain.memory_bytes[0] == pytest.approx(max(added - passes, 0))


def test_a_device_shows_the_blocks_of_passes_and_step_until_it_is_full() -> None:
    device, full = (BARE.changed(logs_memory="device", bytes_per_update_copy=size) for size in (1.0, 1e9))
    cost = price(problem_of(framework=device), ParallelPlan(global_batch=1))
    assert cost.logged_memory_bytes[0] == pytest.approx(cost.memory_bytes[0] + TOTAL)
    cost = price(problem_of(framework=full), ParallelPlan(global_batch=1))
    assert cost.logged_memory_bytes[0] == cost.capacity_bytes < cost.memory_bytes[0]


# -- activations, by hand ---------------------------------------------------------------------------------------------


def activations(**plan: Any) -> list[float]:
    return [stage.memory_terms_bytes["activations"] for stage in stages_of(**plan)]


def test_one_micro_batch_of_a_stage_keeps_what_its_layers_keep() -> None:
    assert activations() == pytest.approx([2 * KEPT])
    assert activations(micro_batch=4) == pytest.approx([8 * KEPT])


def test_1f1b_keeps_as_many_micro_batches_as_stages_are_behind() -> None:
    assert activations(pp=2) == pytest.approx([2 * KEPT, KEPT])
    assert activations(pp=2, global_batch=1) == pytest.approx([KEPT, KEPT])


def test_gpipe_keeps_every_micro_batch() -> None:
    assert activations(pp=2, schedule="gpipe", global_batch=8) == pytest.approx([8 * KEPT, 8 * KEPT])


def test_interleaving_keeps_more_chunks_than_1f1b_keeps_stages() -> None:
    problem = problem_of(dataclasses.replace(SMALL, num_layers=8))
    plan = {"pp": 4, "vp": 2, "schedule": "interleaved", "global_batch": 8}
    assert activations(problem=problem, **plan) == pytest.approx([chunks * KEPT for chunks in (11, 9, 7, 5)])
    assert activations(problem=problem, **{**plan, "global_batch": 4}) == pytest.approx(
        [chunks * KEPT for chunks in (8, 8, 7, 5)]
    )


def test_sequence_parallelism_divides_what_the_norms_keep() -> None:
    inside = KEPT - TOKENS * 8 * 64
    assert activations(tp=2) == pytest.approx([2 * (TOKENS * 8 * 64 + inside / 2)])
    assert activations(tp=2, sp=True) == pytest.approx([2 * KEPT / 2])


def test_a_framework_that_does_not_gather_again_keeps_the_outputs_of_norms_whole() -> None:
    problem = problem_of(framework=BARE.changed(regathers_norm_output=False))
    whole, sliced = (activations(problem=variant, tp=2, sp=True)[0] for variant in (problem, problem_of()))
    assert whole - sliced == pytest.approx(2 * 2 * 2 * (TOKENS - TOKENS / 2) * 64)  # layers x norms x bytes
    assert activations(problem=problem, tp=2) == activations(tp=2)


def test_context_parallelism_divides_the_tokens() -> None:
    assert activations(cp=2) == pytest.approx([KEPT])


def test_full_recomputation_keeps_the_input_of_every_layer() -> None:
    (stage,) = stages_of(recompute="full")
    assert stage.memory_terms_bytes["activations"] == pytest.approx(2 * 2 * TOKENS * 64)
    (kept,) = stages_of()
    added = stage.memory_terms_bytes["transients"] - kept.memory_terms_bytes["transients"]
    assert added <= KEPT * (1 + 1e-9)


def test_selective_recomputation_saves_nothing_under_flash_attention() -> None:
    assert activations(recompute="selective") == activations()


def test_unfused_attention_keeps_its_scores_unless_they_are_recomputed() -> None:
    scores = activations(attention="unfused")[0] - activations(attention="unfused", recompute="selective")[0]
    assert scores > 0
    assert scores % (2 * TOKENS * TOKENS * 4) == 0  # layers x queries x keys x heads, a whole number of bytes each


def test_a_framework_with_a_softmax_kernel_runs_unfused_attention_with_it() -> None:
    framework = BARE.changed(fuses_softmax=True)
    unfused = activations(problem=problem_of(framework=framework), attention="unfused")
    assert unfused == activations(attention="megatron-fused")


def test_a_swiglu_that_works_in_place_needs_one_gradient_of_the_mlp_width_not_two() -> None:
    framework = BARE.changed(keeps_logits=True)
    (two,), (in_place,) = (
        stages_of(problem_of(framework=framework.changed(in_place_activation=is_in_place)))
        for is_in_place in (False, True)
    )
    assert two.memory_terms_bytes["transients"] - in_place.memory_terms_bytes["transients"] == pytest.approx(
        2 * TOKENS * 128
    )


def test_a_gelu_keeps_four_bytes_a_width_where_a_swiglu_keeps_six() -> None:
    gelu = dataclasses.replace(SMALL, gated_mlp=False)
    assert activations()[0] - activations(problem=problem_of(gelu))[0] == pytest.approx(2 * TOKENS * 2 * 128)


@given(st.sampled_from([(2, 2), (2, 3), (4, 2), (3, 2)]), st.integers(1, 4), st.randoms())
def test_chunks_of_different_size_count_by_what_is_alive_together(
    shape: tuple[int, int], rounds: int, random: Any
) -> None:
    """Against a count of every operation of the schedule, for layers spread at random."""
    p, v = shape
    layers = [1 + random.randrange(4) for _ in range(p * v)]
    problem = problem_of(dataclasses.replace(SMALL, num_layers=sum(layers)))
    plan = {"pp": p, "vp": v, "schedule": "interleaved", "global_batch": rounds * p}
    kept = activations(problem=problem, layers_per_chunk=tuple(layers), **plan)
    size = {chunk: KEPT * count for chunk, count in enumerate(layers)}
    assert kept == pytest.approx([most_alive(rank, size) for rank in interleaved(p, v, rounds * p)])


def test_repeated_layers_of_different_chunks_count_by_what_is_alive_together() -> None:
    """Chunks of 1, 3, 2 and 2 layers on two ranks, of which the first two of each are repeated."""
    problem = problem_of(dataclasses.replace(SMALL, num_layers=8))
    layers, stored = (1, 3, 2, 2), 2 * TOKENS * 64
    size = {chunk: min(count, 2) * stored + max(count - 2, 0) * KEPT for chunk, count in enumerate(layers)}
    kept = activations(
        problem=problem,
        pp=2,
        vp=2,
        schedule="interleaved",
        layers_per_chunk=layers,
        global_batch=8,
        recompute="full",
        recompute_num_layers=2,
    )
    assert kept == pytest.approx([most_alive(rank, size) for rank in interleaved(2, 2, 8)])


def test_schedules_with_split_backwards_keep_what_their_orders_say() -> None:
    """On four ranks ZB-H1 keeps p stages on each until the weight gradients, ZB-V 2 p halves, DualPipe-V one more."""
    problem = problem_of(dataclasses.replace(SMALL, num_layers=8))
    plan = {"pp": 4, "global_batch": 16}
    assert activations(problem=problem, schedule="zb-h1", **plan) == pytest.approx([4 * 2 * KEPT] * 4)
    assert activations(problem=problem, schedule="zb-v", vp=2, **plan) == pytest.approx([8 * KEPT] * 4)
    assert max(activations(problem=problem, schedule="dualpipe-v", vp=2, **plan)) == pytest.approx(9 * KEPT)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_rank_that_begins_and_ends_a_v_holds_embedding_and_head(is_tied: bool) -> None:
    problem = problem_of(dataclasses.replace(SMALL, num_layers=4, tied_embeddings=is_tied))
    first, last = stages_of(problem, pp=2, vp=2, schedule="zb-v", dp_shard=2, sharding="none")
    tables = TABLE if is_tied else 2 * TABLE
    assert states(first) == pytest.approx(18 * (2 * LAYER + tables + 64))
    assert states(last) == pytest.approx(18 * 2 * LAYER)
    assert (first.memory_terms_bytes["logits"] > 0, last.memory_terms_bytes["logits"]) == (True, 0)
    assert (first.layers, last.layers) == (2, 2)


def logits(vocab_size: int, framework: Framework = BARE, **plan: Any) -> list[float]:
    problem = problem_of(dataclasses.replace(SMALL, vocab_size=vocab_size), framework)
    return [stage.memory_terms_bytes["logits"] for stage in stages_of(problem, **plan)]


def test_logits_are_kept_by_the_last_stage_and_cut_by_vocabulary_parallelism() -> None:
    first, last = (many - few for many, few in zip(logits(1024, pp=2, tp=2), logits(512, pp=2, tp=2), strict=True))
    assert first == 0
    assert last == pytest.approx(2 * TOKENS * 512 / 2)
    whole = BARE.changed(shards_logits=False)
    assert logits(1024, whole, tp=2)[0] - logits(512, whole, tp=2)[0] == pytest.approx(2 * TOKENS * 512)


def test_logits_that_are_gathered_whole_take_more_where_there_is_something_to_gather() -> None:
    whole = BARE.changed(shards_logits=False)
    gathered = whole.changed(bytes_per_parallel_logit=4.0)
    assert logits(512, gathered) == logits(512, whole)
    assert logits(512, gathered, tp=2)[0] - logits(512, whole, tp=2)[0] == pytest.approx(4 * TOKENS * 512)


def test_the_head_keeps_its_inputs_and_their_gradients_beside_the_logits() -> None:
    """Gathered: 2 + 2 bytes a hidden element of every token; as the ranks hold them between blocks: the same."""
    assert logits(512)[0] == pytest.approx(TOKENS * (2 * 512 + 8 * 64))
    assert logits(512, tp=2, sp=True)[0] == pytest.approx(TOKENS * (2 * 512 / 2 + 4 * 64 + 4 * 64 / 2))


def test_the_vocabulary_is_padded_to_a_multiple_of_the_tensor_parallel_degree() -> None:
    padded = BARE.changed(pads_vocab_to=384)
    assert logits(512, padded, tp=2) == logits(768, tp=2)
    (stage,) = stages_of(problem_of(framework=padded), tp=2)
    assert stage.memory_terms_bytes["weights"] == pytest.approx(
        2 * ((TOTAL - 2 * NORMS - 64 + 2 * 256 * 64) / 2 + 2 * NORMS + 64)
    )


def test_the_head_has_a_weight_gradient_buffer_on_the_last_stage() -> None:
    framework = BARE.changed(dummy_wgrad_buffers=True)
    with_buffers, without = (stages_of(problem_of(framework=buffered), pp=2) for buffered in (framework, BARE))
    first, last = (
        buffered.memory_terms_bytes["wgrad_buffers"] - other.memory_terms_bytes["wgrad_buffers"]
        for buffered, other in zip(with_buffers, without, strict=True)
    )
    assert first == pytest.approx(2 * (LAYER - NORMS))
    assert last - first == pytest.approx(2 * TABLE)


def test_zero3_gathers_embedding_and_head_and_layers_one_after_another() -> None:
    framework = BARE.changed(bytes_per_reduced_grad=4.0)
    plans = [{"dp_shard": 4, "sharding": sharding} for sharding in ("zero2", "zero3")]
    zero2, zero3 = (stages_of(problem_of(framework=framework), **plan)[0].memory_terms_bytes for plan in plans)
    assert zero3["gathered"] - zero2["gathered"] == pytest.approx((2 * 2 + 4) * LAYER + (2 + 4) * (2 * TABLE + 64))


@pytest.mark.parametrize("seq_len", [TOKENS, 64 * TOKENS])
def test_ends_that_are_gathered_in_turn_stand_beside_logits_or_the_layers_beside_what_they_need(seq_len: int) -> None:
    framework = BARE.changed(bytes_per_reduced_grad=4.0, is_jax=True)
    zero3 = {"dp_shard": 4, "sharding": "zero3"}
    terms = stages_of(problem_of(framework=framework, seq_len=seq_len), **zero3)[0].memory_terms_bytes
    head, layer = (2 + 4) * TABLE, (2 * 2 + 4) * LAYER
    needed = terms["logits"] + terms["transients"]
    assert terms["logits"] > 0 == terms["transients"]
    backward = seq_len * 2 * (2 * 128 + 4 * 64)  # gradients of the MLP's widths and four of the hidden size
    assert needed + terms["gathered"] == pytest.approx(max(terms["logits"] + head, backward + layer))


@pytest.mark.parametrize(
    ("vp", "chunks"),
    [
        (1, [4, 3, 2, 1]),
        (2, [11, 9, 7, 5]),
    ],
)
def test_a_framework_that_keeps_what_it_sends_keeps_it_for_every_chunk_in_flight(vp: int, chunks: list[int]) -> None:
    model = dataclasses.replace(SMALL, num_layers=8)
    plan = {"pp": 4, "vp": vp, "schedule": "interleaved", "global_batch": 8}
    kept, freed = (
        activations(problem=problem_of(model, BARE.changed(bytes_per_boundary_hidden=size)), **plan)
        for size in (2.0, 0.0)
    )
    assert np.subtract(kept, freed) == pytest.approx([2 * TOKENS * 64 * chunk for chunk in chunks])


def test_attention_in_8_bits_stores_what_it_has_quantised() -> None:
    (wide,), (narrow,) = (activations(fp8_attention=narrow) for narrow in (False, True))
    assert wide - narrow == 2 * TOKENS * 16 * (2 * 4 + 2 * 2)  # queries, keys, values and output of two layers


@pytest.mark.parametrize(("kv_heads", "again"), [(4, 2 * 2 * 64), (2, 0)])
def test_a_packed_qkv_output_stays_beside_copies_of_k_and_v(kv_heads: int, again: int) -> None:
    model = dataclasses.replace(SMALL, num_kv_heads=kv_heads)
    packed = BARE.changed(keeps_packed_qkv=True)
    (kept,), (freed,) = (activations(problem=problem_of(model, framework)) for framework in (packed, BARE))
    assert kept - freed == pytest.approx(2 * TOKENS * again)


def test_gathered_hidden_states_stay_on_every_stage_and_count_with_the_logits_on_the_last() -> None:
    gathers = problem_of(framework=BARE.changed(bytes_per_gathered_hidden=4.0))
    stages = zip(*(stages_of(problem, tp=2, sp=True, pp=2) for problem in (gathers, problem_of())), strict=True)
    more = [kept.memory_terms_bytes["transients"] - freed.memory_terms_bytes["transients"] for kept, freed in stages]
    assert more == pytest.approx([4 * TOKENS * 64, 0])


def test_eager_gradients_of_a_layer_take_what_it_keeps_beyond_its_input() -> None:
    first, _ = stages_of(problem_of(framework=BARE.changed(transient_layers=1.0)), pp=2)
    assert first.memory_terms_bytes["transients"] == pytest.approx(KEPT - 2 * TOKENS * 64)


def test_copies_of_the_weights_at_the_end_of_a_step_count_beyond_what_is_free_by_then() -> None:
    framework = BARE.changed(whole_gather_copies=2)
    (stage,) = stages_of(problem_of(framework=framework, seq_len=1), dp_shard=4, sharding="zero1")
    terms = stage.memory_terms_bytes
    freed = terms["activations"] + terms["logits"] + terms["transients"]
    assert terms["gathered"] == pytest.approx(2 * TOTAL * (2 + 1 / 4) - freed)
    (ample,) = stages_of(problem_of(framework=framework, seq_len=2 * TOKENS), dp_shard=4, sharding="zero1")
    assert ample.memory_terms_bytes["gathered"] == 0


# -- what the allocator caches ----------------------------------------------------------------------------------------

CACHES = BARE.changed(counts_cached_blocks=True)


def cached(problem: Problem, **plan: Any) -> list[float]:
    """Bytes that are cached, of which a part counts as needed."""
    return [stage.memory_terms_bytes["cached"] / CACHED_SHARE for stage in stages_of(problem, **plan)]


@pytest.mark.parametrize(
    ("seq_len", "first"),
    [
        (128, 0),  # the table's gradient, 2 x 512 x 64, fits into the output of fc1, 2 x 128 x 256
        (64, 2 * TABLE),
        (32, 2 * TABLE + 2 * 64 * 256),  # and fc1's gradient does not fit into its output either
    ],
)
def test_gradients_that_fit_into_no_freed_activation_are_cached(seq_len: int, first: int) -> None:
    # On the last stage they fit into the logits, 4 x 512 a token.
    assert cached(problem_of(framework=CACHES, seq_len=seq_len), pp=2) == [first, 0]
    assert cached(problem_of(seq_len=seq_len), pp=2) == [0, 0]


@pytest.mark.parametrize(
    ("plan", "ahead"),
    [
        ({}, 3),  # no more than the host can be ahead
        ({"global_batch": 1}, 1 / 16),  # 128 tokens of the 2048 that it takes to be a layer ahead
        ({"global_batch": 32}, 2),  # 2048 tokens of the step for every layer
        ({"pp": 2, "global_batch": 32}, 1),  # in a pipeline, divided by tp
        ({"sp": False}, 0),  # an all-reduce works in place
    ],
)
def test_outputs_wait_for_their_reduction_as_far_as_the_host_is_ahead(plan: dict[str, Any], ahead: float) -> None:
    framework = CACHES.changed(
        host_lead_layers=3.0,
        host_lead_tokens_per_layer=2048.0,
        pipeline_lead_tokens_per_layer=2048.0,
    )
    first, *_ = cached(problem_of(framework=framework), **{"tp": 2, "sp": True, **plan})
    assert first == pytest.approx(4 * TOKENS * 64 * ahead)


def test_no_more_outputs_wait_than_the_passes_in_flight_have() -> None:
    framework = CACHES.changed(host_lead_layers=100.0)
    for global_batch, passes in ((1, 2), (64, 6)):  # forward through two layers, and backward before that
        got = cached(problem_of(framework=framework), tp=2, sp=True, global_batch=global_batch)
        assert got == pytest.approx([4 * TOKENS * 64 * passes])


def at_step_end(problem: Problem, **plan: Any) -> list[float]:
    """Bytes that are cached when weights are gathered, none of which counts as needed."""
    batch = PlanBatch.of([ParallelPlan(**({"global_batch": 64} | plan))], problem.model.num_layers)
    blocks = stage_blocks(problem.model, batch, 1)
    assert cached(problem, **plan) == [0]
    return stage_memory(problem, batch, blocks, stage_parameters(problem, batch, blocks)).step_spare_bytes[0].tolist()


def test_a_gather_takes_new_blocks_where_activations_left_none_of_its_size() -> None:
    # All 8 pieces fit into freed logits, the whole of them into no block; the moments of Adam had taken as many bytes
    # as they have of the freed blocks, and forward passes take them back from the gather's.
    problem = problem_of(framework=CACHES.changed(whole_gather_copies=2))
    assert at_step_end(problem, dp_shard=8, sharding="zero1") == pytest.approx([2 * TOTAL - 8 * TOTAL / 8])
    assert at_step_end(problem, dp_shard=4, sharding="zero1") == [0]
    assert at_step_end(problem, dp_replicate=8, sharding="none") == [0]


@pytest.mark.parametrize(("width", "fits"), [(4.0, True), (1e8, False)])
def test_a_log_of_what_is_reserved_shows_the_cache_until_the_device_is_full(
    width: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoplan.cost.memory.allocator_cache.UNREDUCED_BYTES", width)
    framework = CACHES.changed(logs_memory="reserved", host_lead_layers=2.0)
    cost = price(problem_of(framework=framework), ParallelPlan(global_batch=64, tp=2, sp=True))
    cache = width * TOKENS * 64 * 2
    rest = cost.memory_bytes[0] - CACHED_SHARE * cache
    assert cost.memory_terms_bytes["cached"][0] == pytest.approx(CACHED_SHARE * cache)
    assert cost.logged_memory_bytes[0] == pytest.approx(rest + cache if fits else cost.capacity_bytes)


def test_experts_keep_the_tokens_that_are_routed_to_them() -> None:
    routed = TOKENS * 2 * (2 * 64 + 6 * 32)
    block = TOKENS * (4 * 64 + 12 * 4) + routed
    attention = TOKENS * (4 * 64 + 2 * 16 * 12 + 4 * 4)
    for ep in (1, 2, 4):
        (kept,) = activations(problem=problem_of(EXPERTS), dp_shard=4, ep=ep)
        assert kept == pytest.approx(2 * (attention + block))


def test_norms_of_queries_and_keys_store_their_inputs() -> None:
    normed = dataclasses.replace(SMALL, qk_norm="head")
    (kept,) = activations(problem=problem_of(normed))
    assert kept == pytest.approx(2 * (KEPT + TOKENS * 2 * 16 * (4 + 2)))


@pytest.mark.parametrize(("offset", "steps"), [(False, 1), (True, 2)])
def test_a_gated_activation_that_is_not_fused_stores_its_steps(offset: bool, steps: int) -> None:
    unfused = BARE.changed(fused_activation=False, glu_offset=offset)
    (kept,) = activations(problem=problem_of(SMALL, unfused))
    assert kept == pytest.approx(2 * (KEPT + TOKENS * steps * 2 * 128))
    plans = {}, {"recompute": "selective", "recompute_modules": ("moe_act",)}
    (plain,), (recomputed,) = (activations(problem=problem_of(EXPERTS, unfused), dp_shard=4, **plan) for plan in plans)
    # The input of fc2, the steps, and their product, which probabilities weight.
    assert plain - recomputed == pytest.approx(2 * TOKENS * 2 * 2 * 32 * (1 + steps + 1))


def graphed(framework: Framework = BARE, **plan: Any) -> tuple[CostEstimate, CostEstimate]:
    """Price four expert-parallel ranks with HybridEP, without graphs and with a single one."""
    shared = {"global_batch": 64, "dp_shard": 4, "ep": 4, "dispatcher": "hybridep", **plan}
    problem = problem_of(EXPERTS, framework)
    return tuple(  # type: ignore[return-value]
        price(problem, ParallelPlan(**shared, cuda_graphs=graphs)) for graphs in ("none", "full_iteration")
    )


def test_a_single_graph_has_room_for_more_tokens_than_experts_get_in_the_mean() -> None:
    plain, static = (cost.memory_terms_bytes["activations"][0] for cost in graphed())
    assert static - plain == pytest.approx(2 * 0.5 * TOKENS * 2 * (2 * 64 + 6 * 32))
    dropping = (cost.memory_terms_bytes["activations"][0] for cost in graphed(token_dropping=True))
    assert len(set(dropping)) == 1


def test_hybridep_holds_the_tokens_and_probabilities_of_all_ranks_of_the_group() -> None:
    (plain, _), (other, _) = graphed(), graphed(dispatcher="alltoall")
    added = plain.memory_terms_bytes["communicators"][0] - other.memory_terms_bytes["communicators"][0]
    assert added == pytest.approx(4 * TOKENS * (2 * 64 + 4 * 4))


@pytest.mark.parametrize(("ep", "width"), [(1, 64 + 32), (4, 2 * 64)])
def test_gradients_of_experts_are_as_wide_as_their_tokens(ep: int, width: int) -> None:
    problem = problem_of(EXPERTS, BARE.changed(keeps_logits=True))
    (cost,) = price(problem, ParallelPlan(global_batch=64, dp_shard=4, ep=ep)).memory_terms_bytes["transients"]
    assert cost == pytest.approx(TOKENS * (2 * 2 * width + 4 * 2 * 64))


def test_prediction_layers_keep_activations_on_the_last_stage() -> None:
    first, last = activations(problem=problem_of(dataclasses.replace(SMALL, num_mtp_layers=1)), pp=2)
    assert first == pytest.approx(2 * KEPT)
    assert last == pytest.approx(2 * KEPT)


def test_every_active_group_costs_a_communicator() -> None:
    framework = BARE.changed(fixed_bytes=100.0, communicator_bytes=10.0)
    problem = problem_of(framework=framework)
    for plan, buffers in (({}, 0), ({"tp": 2}, 10), ({"tp": 2, "pp": 2, "dp_shard": 2}, 30)):
        for stage in stages_of(problem, **plan):
            assert stage.memory_terms_bytes["communicators"] == buffers
            assert stage.memory_terms_bytes["context"] == 100


def test_fragmentation_grows_all_but_the_fixed_part() -> None:
    framework = BARE.changed(fixed_bytes=1000.0, reserved_factor=1.25)
    tight, loose = (price(problem_of(framework=variant), ParallelPlan(global_batch=8)) for variant in (BARE, framework))
    assert loose.memory_bytes[0] == pytest.approx(1.25 * tight.memory_bytes[0] + 1000)


def test_gaps_in_blocks_of_the_passes_grow_with_the_passes_alone() -> None:
    whole, broken = (stages_of(problem_of(framework=BARE.changed(broken_pass_share=share)))[0] for share in (0.0, 0.2))
    passes = sum(whole.memory_terms_bytes[name] for name in PASS_TERMS)
    assert broken.memory_bytes - whole.memory_bytes == pytest.approx(0.2 * passes)


@pytest.mark.parametrize("trait", ["is_planned_ahead", "drops_grads"])
@pytest.mark.parametrize(("micro_batch", "shares"), [(64, True), (32, False)])
def test_gradients_that_no_step_begins_with_take_what_its_only_micro_batch_gives_back(
    micro_batch: int, shares: bool, trait: str
) -> None:
    problems = (problem_of(framework=BARE.changed(**{trait: dropped})) for dropped in (False, True))
    usual, planned = (stages_of(problem, micro_batch=micro_batch)[0] for problem in problems)
    passes = sum(usual.memory_terms_bytes[name] for name in PASS_TERMS)
    assert passes > usual.memory_terms_bytes["gradients"] > 0
    saved = usual.memory_terms_bytes["gradients"] if shares else 0.0
    assert usual.memory_bytes - planned.memory_bytes == pytest.approx(saved)


@pytest.mark.parametrize("trait", ["is_planned_ahead", "drops_grads"])
@pytest.mark.parametrize("micro_batch", [1, 4, 16, 64])
def test_an_update_finds_all_gradients_in_the_memory_of_the_passes(micro_batch: int, trait: str) -> None:
    framework = BARE.changed(bytes_per_update_copy=40.0, **{trait: True})
    plan = {"micro_batch": micro_batch, "global_batch": micro_batch}
    usual, planned = (stages_of(problem_of(framework=traits), **plan)[0] for traits in (BARE, framework))
    passes = sum(usual.memory_terms_bytes[name] for name in PASS_TERMS)
    gradients = usual.memory_terms_bytes["gradients"]
    kept = states(usual) - gradients
    assert planned.memory_bytes == pytest.approx(kept + max(passes, gradients + 40 * TOTAL))


@pytest.mark.parametrize(("sharding", "dp", "layers"), [("zero3", 2, 2), ("zero2", 2, 0), ("none", 1, 0)])
def test_fsdp1_keeps_hidden_states_of_all_layers_beside_frozen_weights(sharding: str, dp: int, layers: int) -> None:
    def transients(*, keeps: bool, finetuning: FineTuning | None) -> float:
        problem = problem_of(framework=BARE.changed(keeps_hidden_gradients=keeps, keeps_logits=True))
        problem = dataclasses.replace(problem, training=dataclasses.replace(problem.training, finetuning=finetuning))
        (stage,) = stages_of(problem, sharding=sharding, dp_shard=dp, micro_batch=4)
        return stage.memory_terms_bytes["transients"]

    adapters = FineTuning(rank=8, targets=("q_proj",))
    more = transients(keeps=True, finetuning=adapters) - transients(keeps=False, finetuning=adapters)
    assert more == layers * 2 * 4 * TOKENS * SMALL.hidden_size
    assert transients(keeps=True, finetuning=None) == transients(keeps=False, finetuning=None)


def test_a_context_is_smaller_on_volta_than_on_ampere() -> None:
    framework, sizes = load_framework("megatron-lm-2021"), []
    for name in ("v100:1x1", "a100-sxm:1x1"):
        problem = Problem(
            model=SMALL,
            training=TrainingSpec(seq_len=TOKENS, precision="fp16"),
            cluster=load_cluster(name),
            framework=framework,
        )
        sizes.append(stages_of(problem, precision="fp16")[0].memory_terms_bytes["context"] / GIB)
    assert sizes == pytest.approx([1.54 - 565 / 1024, 1.54])


def test_megatron_lm_of_2021_needs_what_nvidia_smi_showed_on_v100() -> None:
    """Compare with DLPerf's GPT of 16 layers of 1536 on eight V100, all layers repeated: 14,938 MiB."""
    problem = Problem(
        model=gpt(16, 1536, 16, vocab_size=50304),
        training=TrainingSpec(seq_len=2048, precision="fp16"),
        cluster=load_cluster("v100:1x8"),
        framework=load_framework("megatron-lm-2021"),
    )
    plan: dict[str, Any] = {"dp_replicate": 8, "micro_batch": 2, "sharding": "none", "recompute": "full"}
    plan["attention"] = "megatron-fused"
    (stage,) = stages_of(problem, global_batch=16, precision="fp16", dropout=True, **plan)
    assert stage.memory_bytes / 2**20 == pytest.approx(14938, rel=0.05)


def test_a_batch_reports_the_stage_that_needs_most() -> None:
    problem = problem_of(dataclasses.replace(SMALL, num_layers=8))
    plan = ParallelPlan(global_batch=8, pp=4)
    cost, stages = price(problem, plan), stage_costs(problem, plan)
    most = max(stages, key=lambda stage: stage.memory_bytes)
    assert cost.worst_stage[0] == most.stage
    assert cost.memory_bytes[0] == most.memory_bytes
    assert sum(float(term[0]) for term in cost.memory_terms_bytes.values()) == pytest.approx(most.memory_bytes)


# -- the host, by hand ------------------------------------------------------------------------------------------------

PROCESS = 4 * GIB  # of one rank


@pytest.mark.parametrize(
    ("plan", "per_parameter"),
    [
        ({"dp_shard": 4, "sharding": "zero1"}, 14 / 4),  # a checkpoint of weights and optimizer, each rank its part
        ({"dp_shard": 4, "sharding": "none"}, 14 / 4),
        ({"dp_shard": 2, "dp_replicate": 2}, 14 / 4),
        ({"dp_shard": 4, "offload": "optimizer"}, (14 + 12 + 4) / 4),  # states and the gradients that they read
        ({"dp_shard": 4, "offload": "optimizer", "sharding": "none"}, 14 / 4 + 16),
    ],
)
def test_the_host_holds_processes_checkpoints_and_what_is_offloaded(plan: dict[str, Any], per_parameter: float) -> None:
    cost = price(problem_of(), ParallelPlan(global_batch=64, **plan))
    assert cost.host_memory_bytes[0] == pytest.approx(4 * (PROCESS + per_parameter * TOTAL))


def test_a_plan_whose_host_runs_out_of_memory_does_not_fit() -> None:
    problem = problem_of()
    host = dataclasses.replace(problem.cluster.host, memory_bytes=30 * GIB)
    starved = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, host=host))
    plan = ParallelPlan(global_batch=512, dp_shard=512)
    roomy, full = price(problem, plan), price(starved, plan)
    assert roomy.verdict[0] == VERDICTS.index("fits")
    assert full.memory_bytes[0] == roomy.memory_bytes[0]
    assert full.host_memory_bytes[0] > 30 * GIB
    assert full.verdict[0] == VERDICTS.index("oom")


# -- laws -------------------------------------------------------------------------------------------------------------

WIDE = ModelSpec(
    name="wide", num_layers=8, hidden_size=512, vocab_size=32000, num_heads=16, num_kv_heads=4, ffn_size=1536
)
MIXED = dataclasses.replace(
    WIDE, moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=512, shared_expert_ffn_size=256)
)
# The fixed part is left out: a group of two needs a communicator that a group of one does not.
MEGATRON = load_framework("megatron-core").changed(fixed_bytes=0.0, communicator_bytes=0.0)
PROBLEMS = {model.name: problem_of(model, MEGATRON, 1024) for model in (WIDE, dataclasses.replace(MIXED, name="moe"))}


@st.composite
def plans(draw: st.DrawFn) -> tuple[Problem, ParallelPlan]:
    """A plan that Megatron-like rules admit, and its problem."""
    problem = PROBLEMS[draw(st.sampled_from(sorted(PROBLEMS)))]
    tp, cp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    vp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    dp_replicate, dp_shard = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    micro_batch = draw(st.sampled_from([1, 2]))
    microbatches = pp * draw(st.integers(1, 4)) if vp > 1 else draw(st.integers(1, 12))
    experts = [ep for ep in (1, 2, 4, 8) if (tp * cp * dp_shard) % ep == 0] if problem.model.moe else [1]
    return problem, ParallelPlan(
        global_batch=micro_batch * dp_replicate * dp_shard * microbatches,
        micro_batch=micro_batch,
        tp=tp,
        sp=tp > 1 and (problem.model.moe is not None or draw(st.booleans())),
        cp=cp,
        pp=pp,
        vp=vp,
        schedule="interleaved" if vp > 1 else draw(st.sampled_from(["1f1b", "gpipe"])),  # type: ignore[arg-type]
        ep=draw(st.sampled_from(experts)),
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        sharding=draw(st.sampled_from(Sharding)),  # type: ignore[arg-type]
        recompute=draw(st.sampled_from(Recompute)),  # type: ignore[arg-type]
    )


@given(plans())
def test_every_term_is_a_finite_number_of_bytes(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    cost = price(problem, plan)
    assert set(cost.memory_terms_bytes) == set(MEMORY_TERMS)
    for name, term in cost.memory_terms_bytes.items():
        assert np.isfinite(term).all(), name
        assert (term >= 0).all(), name


@given(plans())
def test_more_sharding_never_takes_more_state(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    least_states = [
        [states(stage) for stage in stage_costs(problem, dataclasses.replace(plan, sharding=sharding))]  # type: ignore[arg-type]
        for sharding in Sharding
    ]
    for less, more in itertools.pairwise(least_states):
        assert np.all(np.array(more) <= np.array(less) * (1 + 1e-12))


@given(plans())
def test_sharding_of_optimizer_and_gradients_never_takes_more_memory(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    cost = price(problem, *(dataclasses.replace(plan, sharding=s) for s in ("none", "zero1", "zero2")))  # type: ignore[arg-type]
    assert np.all(np.diff(cost.memory_bytes) <= 1e-6)


@pytest.mark.parametrize("model", sorted(PROBLEMS))
def test_sharding_over_one_rank_gathers_nothing(model: str) -> None:
    plans = [ParallelPlan(global_batch=8, sharding=sharding) for sharding in Sharding]  # type: ignore[arg-type]
    memory = price(PROBLEMS[model], *plans).memory_bytes
    assert memory.tolist() == pytest.approx([memory[0]] * 4)


@given(plans())
def test_more_recomputation_never_keeps_more_activations(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    kept = [
        [
            stage.memory_terms_bytes["activations"]
            for stage in stage_costs(problem, dataclasses.replace(plan, recompute=recompute))  # type: ignore[arg-type]
        ]
        for recompute in Recompute
    ]
    for less, more in itertools.pairwise(kept):
        assert np.all(np.array(more) <= np.array(less) * (1 + 1e-12))


@given(plans())
def test_more_recomputation_never_takes_more_memory(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    cost = price(problem, *(dataclasses.replace(plan, recompute=recompute) for recompute in Recompute))  # type: ignore[arg-type]
    # A stage of one layer and one micro-batch in flight has nothing to save: then no more than a layer's input.
    stored = 2 * plan.micro_batch * 1024 / plan.cp * 512
    assert np.all(np.diff(cost.memory_bytes) <= stored * problem.framework.memory.reserved_factor * (1 + 1e-9))


@pytest.mark.parametrize("model", sorted(PROBLEMS))
def test_recomputing_the_only_layer_of_a_stage_takes_no_more_memory(model: str) -> None:
    """Its stored input is also the first thing that the repeated forward pass keeps: it is there once."""
    plans = [ParallelPlan(global_batch=1, pp=8, recompute=recompute) for recompute in ("none", "full")]
    none, full = (stage_costs(PROBLEMS[model], plan)[-2] for plan in plans)
    assert full.memory_bytes <= none.memory_bytes * (1 + 1e-12)


@given(plans())
def test_more_tensor_parallelism_never_takes_more_memory(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    wider = dataclasses.replace(plan, tp=plan.tp * 2, sp=plan.sp or problem.model.moe is not None)
    cost = price(problem, plan, wider)
    assert cost.memory_bytes[1] <= cost.memory_bytes[0] * (1 + 1e-12)


@given(plans())
def test_a_larger_micro_batch_takes_more_memory(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    twice = dataclasses.replace(plan, micro_batch=2 * plan.micro_batch, global_batch=2 * plan.global_batch)
    cost = price(problem, plan, twice)
    assert cost.memory_bytes[1] > cost.memory_bytes[0]


@given(plans())
def test_more_micro_batches_take_no_more_memory_beyond_the_pipeline(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    if plan.schedule == "gpipe":
        return
    many = dataclasses.replace(plan, global_batch=plan.global_batch * 8 * plan.pp)
    cost = price(problem, many, dataclasses.replace(many, global_batch=2 * many.global_batch))
    assert cost.memory_bytes[1] == cost.memory_bytes[0]


@settings(max_examples=20)
@given(plans(), st.booleans())
def test_weights_of_all_stages_and_shards_are_two_bytes_a_parameter(
    case: tuple[Problem, ParallelPlan], is_tied: bool
) -> None:
    problem, plan = case
    model = dataclasses.replace(problem.model, tied_embeddings=is_tied)
    problem = problem_of(model, MEGATRON.changed(pads_vocab_to=1), 1024)
    plan = dataclasses.replace(plan, tp=1, sp=False, ep=1, sharding="none")
    weights = sum(stage.memory_terms_bytes["weights"] for stage in stage_costs(problem, plan))
    second_table = 32000 * 512 if is_tied and plan.pp > 1 else 0
    assert weights == pytest.approx(2 * (count_parameters(model) + second_table))


# -- published measurements -------------------------------------------------------------------------------------------

# SimuMax, docs/b200/b200_release_v1.2_summary.md: `max allocated` of Megatron-LM on one node of B200, sequences of
# 4,096, micro-batch 1, fused cross entropy.  Allocated bytes exclude context and communicators.
SIMUMAX = load_framework("megatron-core").changed(
    bytes_per_logit=2.0, fixed_bytes=0.0, communicator_bytes=0.0, reserved_factor=1.0
)
LLAMA_70B = ModelSpec(
    name="70b", num_layers=12, hidden_size=8192, vocab_size=128256, num_heads=64, num_kv_heads=8, ffn_size=28672
)
LLAMA_405B = ModelSpec(
    name="405b", num_layers=4, hidden_size=16384, vocab_size=128256, num_heads=128, num_kv_heads=8, ffn_size=53248
)
DEEPSEEK_2 = ModelSpec(
    name="deepseek-v2",
    num_layers=4,
    hidden_size=5120,
    vocab_size=102400,
    num_heads=128,
    ffn_size=12288,
    mla=LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536),
    moe=Experts(
        num_experts=160, experts_per_token=6, expert_ffn_size=1536, shared_expert_ffn_size=3072, num_dense_layers=1
    ),
)
DEEPSEEK_3 = dataclasses.replace(
    DEEPSEEK_2,
    name="deepseek-v3",
    hidden_size=7168,
    vocab_size=129280,
    ffn_size=18432,
    moe=Experts(
        num_experts=256, experts_per_token=8, expert_ffn_size=2048, shared_expert_ffn_size=2048, num_dense_layers=1
    ),
)


@pytest.mark.parametrize(
    ("model", "tp", "pp", "ep", "dp", "gib"),
    [
        (LLAMA_70B, 1, 2, 1, 4, 66.55),
        (LLAMA_70B, 2, 1, 1, 4, 60.68),
        (LLAMA_70B, 4, 1, 1, 2, 39.07),
        (LLAMA_70B, 8, 1, 1, 1, 28.29),
        (LLAMA_405B, 1, 2, 1, 4, 87.08),
        (LLAMA_405B, 2, 1, 1, 4, 81.59),
        (LLAMA_405B, 4, 1, 1, 2, 52.89),
        (LLAMA_405B, 8, 1, 1, 1, 38.57),
        (DEEPSEEK_2, 1, 1, 8, 8, 45.63),
        (DEEPSEEK_2, 1, 2, 4, 4, 44.70),
        (DEEPSEEK_3, 1, 1, 8, 8, 104.30),
        (DEEPSEEK_3, 1, 2, 4, 4, 114.00),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_allocated_memory_of_megatron_on_b200_is_within_1_5_percent_of_simumax_measurements(
    model: ModelSpec, tp: int, pp: int, ep: int, dp: int, gib: float
) -> None:
    problem = problem_for(model, "b200:1x8", SIMUMAX)
    plan = ParallelPlan(global_batch=8 * dp, tp=tp, sp=tp > 1, pp=pp, ep=ep, dp_shard=dp, sharding="zero1")
    found = float(price(problem, plan).logged_memory_bytes[0]) / GIB
    print(f"{model.name} tp {tp} pp {pp} ep {ep} dp {dp}: {found:.2f} GiB, measured {gib:.2f} ({found / gib - 1:+.1%})")
    assert found == pytest.approx(gib, rel=0.015)


def test_stage_0_of_gpt3_keeps_the_9_56_gib_of_activations_of_korthikanti_less_dropout() -> None:
    """arXiv:2205.05198 keeps 34 s b h / t a layer with dropout masks, 32 without: 9.5625 x 32 / 34 GiB with flash."""
    model = ModelSpec(
        name="gpt3", num_layers=96, hidden_size=12288, vocab_size=51200, num_heads=96, ffn_size=49152, gated_mlp=False
    )
    problem = problem_of(model, BARE, 2048)
    first = stages_of(problem, tp=8, sp=True, pp=8)[0].memory_terms_bytes["activations"]
    log_sum_exp = 96 * 4 * 96 * 2048 / 8
    assert (first - log_sum_exp) / GIB == pytest.approx(9.5625 * 32 / 34)
    chunked = stages_of(problem, tp=8, sp=True, pp=8, vp=3, schedule="interleaved")[0]
    assert chunked.memory_terms_bytes["activations"] / first == pytest.approx(1 + 7 / 24)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5, 8])
def test_forwards_of_zb_h1_follow_on_gradients_of_weights_beyond_as_many_as_ranks(
    stages: int, num_microbatches: int
) -> None:
    for order in rank_orders(PipelineShape("zb-h1", stages, 1, num_microbatches)):
        kinds = "".join(operation.kind for operation in order)
        assert ("F" in kinds[kinds.index("W") :]) == (num_microbatches > stages)


@pytest.mark.parametrize(("micro_batch", "tracked_mib"), [(1, 238.2), (2, 271.7), (4, 278.0), (8, 310.0)])
def test_zb_h1_of_torch_needs_what_was_tracked(micro_batch: int, tracked_mib: float) -> None:
    # The fuller of two gloo ranks in an untimed step of autoplan's own trainer, torch 2.13, 2026-11-22.
    model = ModelSpec(name="medium", num_layers=4, hidden_size=512, vocab_size=8192, num_heads=8, ffn_size=1408)
    problem = problem_for(model, "cpu:1x2", "torch", training=TrainingSpec(seq_len=128, precision="bf16"))
    plan = ParallelPlan(global_batch=8, micro_batch=micro_batch, pp=2, schedule="zb-h1", sharding="none")
    cost = estimate(problem, PlanBatch.of([plan], model.num_layers))
    assert cost.logged_memory_bytes[0] / 2**20 == pytest.approx(tracked_mib, rel=0.09)


@pytest.mark.parametrize("framework", ["deepspeed-zero", "pytorch-fsdp"])
def test_all_states_on_the_host_leave_none_on_the_device_but_what_is_gathered(framework: str) -> None:
    problem = problem_for("llama3-8b", "rtx-4090:1x8", framework, seq_len=2048, calibration=Calibration())
    plans = [
        ParallelPlan(global_batch=8, dp_shard=8, sharding="zero3", recompute="full", offload=offload)
        for offload in ("none", "parameters")
    ]
    batch = PlanBatch.of(plans, problem.model.num_layers)
    blocks = stage_blocks(problem.model, batch, 1)
    parameters = stage_parameters(problem, batch, blocks)
    memory = stage_memory(problem, batch, blocks, parameters)
    terms = memory.terms
    states = sum(terms[name][:, 0] for name in ("weights", "gradients", "optimizer"))
    own = 8.03e9 / 8
    assert states[0] >= 15.9 * own
    # Of gradients no more than those of a layer and the head before they are reduced.
    assert states[1] < 2 * 4 * 0.53e9
    assert terms["weights"][1, 0] == terms["optimizer"][1, 0] == 0.0
    on_host = host_bytes(problem, batch, parameters, memory.offloaded_bytes)
    per_parameter = problem.framework.memory.bytes_per_weight + problem.framework.memory.bytes_per_grad
    per_parameter += optimizer_bytes(problem, batch)[0]
    assert on_host[1] - on_host[0] == pytest.approx(8 * own * per_parameter, rel=1e-3)
