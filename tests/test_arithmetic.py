"""Are parameters and operations those of the published models?"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.kernels.arithmetic import (
    attention_context,
    count_parameters,
    embedding_parameters,
    mamba_scan_flops_per_token,
    model_flops_per_token,
)
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.common.universal_rules import RULES
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Block, Experts, Mamba
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec
from model_specs import DEEPSEEK3, gpt
from problems import problem_for

GPT3 = gpt(96, 12288, 96, name="gpt3")
MIXTRAL = ModelSpec(
    name="mixtral",
    num_layers=32,
    hidden_size=4096,
    vocab_size=32000,
    num_heads=32,
    num_kv_heads=8,
    moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=14336),
)
TINY = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=256,
    vocab_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=32,
    ffn_size=640,
)
BARE = Framework(name="bare").changed(
    pads_vocab_to=1, fixed_bytes=0.0, communicator_bytes=0.0, reserved_factor=1.0, bytes_per_logit=2.0
)


def llama(layers: int, hidden: int, ffn: int, vocab: int, heads: int, kv_heads: int) -> ModelSpec:
    return ModelSpec(
        name="llama",
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=ffn,
    )


LLAMA3_8B = llama(32, 4096, 14336, 128256, 32, 8)


@functools.cache
def stage_parameters(model: ModelSpec, **plan: Any) -> tuple[float, ...]:
    """Parameters that one rank of every stage holds under `plan`, nothing sharded over data parallelism."""
    problem = problem_for(model, "h100-sxm:64x8", BARE, seq_len=512)
    stages = stage_costs(problem, ParallelPlan(global_batch=64, sharding="none", **plan))
    return tuple(stage.memory_terms_bytes["weights"] / BARE.memory.bytes_per_weight for stage in stages)


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (GPT3, 174_615_846_912),
        (llama(32, 4096, 11008, 32000, 32, 32), 6_738_415_616),
        (LLAMA3_8B, 8_030_261_248),
        (llama(80, 8192, 28672, 128256, 64, 8), 70_553_706_496),
        (llama(126, 16384, 53248, 128256, 128, 8), 405_853_388_800),
        (MIXTRAL, 46_702_792_704),
        (DEEPSEEK3, 671_026_404_352),
    ],
    ids=["gpt3-175b", "llama2-7b", "llama3-8b", "llama3-70b", "llama3.1-405b", "mixtral-8x7b", "deepseek-v3"],
)
def test_parameters_of_published_models_are_counted_to_the_last_one(model: ModelSpec, parameters: int) -> None:
    assert count_parameters(model) == parameters


@pytest.mark.parametrize(("model", "active"), [(MIXTRAL, 12_879_925_248), (DEEPSEEK3, 37_552_282_624)])
def test_active_parameters_count_the_experts_that_one_token_visits(model: ModelSpec, active: int) -> None:
    assert count_parameters(model, active=True) == active


def test_a_dense_model_is_active_as_a_whole() -> None:
    assert count_parameters(LLAMA3_8B, active=True) == count_parameters(LLAMA3_8B)


def test_latent_attention_of_deepseek_v3_has_187_million_parameters_and_the_norm_before_it() -> None:
    assert block_shapes(DEEPSEEK3)[Block.ATTENTION].num_parameters == 187_107_328 + 7168


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", 175),
        ("llama3-8b", 8.03),
        ("llama3.1-405b", 405.9),
        ("deepseek-v2", 236),
        ("mixtral-8x22b", 141),
        ("qwen3-235b-a22b", 235),
        ("gpt-oss-120b", 116.8),
        ("nemotron4-340b", 341),
        ("gemma2-9b", 9.24),
    ],
)
def test_shipped_models_have_about_the_parameters_of_their_name(name: str, billions: float) -> None:
    assert count_parameters(load_model(name)) / 1e9 == pytest.approx(billions, rel=0.015)


def test_a_multi_token_prediction_layer_is_a_layer_a_projection_and_three_norms() -> None:
    model = dataclasses.replace(DEEPSEEK3, num_mtp_layers=1)
    layer = sum(block_shapes(model)[block].num_parameters for block in model.layers[-1])
    assert count_parameters(model, with_mtp=True) - count_parameters(model) == layer + 2 * 7168**2 + 3 * 7168


def test_tying_embeddings_saves_one_table() -> None:
    tied = dataclasses.replace(LLAMA3_8B, tied_embeddings=True)
    assert count_parameters(LLAMA3_8B) - count_parameters(tied) == 128256 * 4096


def test_grouped_queries_need_one_key_and_value_projection_a_group() -> None:
    full = dataclasses.replace(TINY, num_kv_heads=None)
    assert count_parameters(full) - count_parameters(TINY) == 4 * 2 * (16 - 4) * 32 * 256


def test_layer_norms_have_a_bias_unless_it_is_switched_off() -> None:
    with_bias = dataclasses.replace(TINY, norm="layernorm")
    without = dataclasses.replace(TINY, norm="layernorm", norm_bias=False)
    assert count_parameters(without) == count_parameters(TINY)
    assert count_parameters(with_bias) - count_parameters(TINY) == (2 * 4 + 1) * 256


def test_learned_positions_are_part_of_the_embedding() -> None:
    assert embedding_parameters(GPT3) == (51200 + 2048) * 12288


def test_a_mamba_block_counts_projections_convolution_and_per_head_vectors() -> None:
    model = ModelSpec(
        name="hybrid",
        num_layers=3,
        hidden_size=64,
        vocab_size=256,
        num_heads=4,
        ffn_size=128,
        layer_pattern="M*-",
        mamba=Mamba(num_heads=8, head_dim=16, state_size=32, num_groups=2),
    )
    inner, conv = 8 * 16, 8 * 16 + 2 * 2 * 32
    expected = 64 * (inner + conv + 8) + inner * 64 + conv * 5 + 3 * 8 + inner + 64
    assert block_shapes(model)[Block.MAMBA].num_parameters == expected
    assert mamba_scan_flops_per_token(model) == 7 * inner * 32 + 2 * conv * 4


# -- how plans cut them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("model", [TINY, dataclasses.replace(TINY, norm="layernorm")], ids=["rmsnorm", "layernorm"])
def test_parameters_of_the_stages_add_up_to_the_model(model: ModelSpec, pp: int) -> None:
    assert sum(stage_parameters(model, pp=pp)) == count_parameters(model)


@pytest.mark.parametrize("layout", [(4, 0), (1, 3), (0, 4)])
def test_parameters_of_uneven_stages_add_up_to_the_model(layout: tuple[int, int]) -> None:
    assert sum(stage_parameters(TINY, pp=2, layers_per_chunk=layout)) == count_parameters(TINY)


def test_a_stage_holds_the_layers_of_all_its_chunks() -> None:
    layer = sum(block_shapes(TINY)[block].num_parameters for block in TINY.layers[0])
    first, last = stage_parameters(TINY, pp=2, vp=2, schedule="interleaved", layers_per_chunk=(2, 1, 1, 0))
    assert first == 3 * layer + 1024 * 256
    assert last == layer + 1024 * 256 + 256


def test_a_tied_embedding_is_held_twice_where_first_and_last_stage_differ() -> None:
    tied = dataclasses.replace(TINY, tied_embeddings=True)
    assert sum(stage_parameters(tied, pp=1)) == count_parameters(tied)
    assert sum(stage_parameters(tied, pp=2)) == count_parameters(tied) + 1024 * 256


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
def test_tensor_parallel_shards_add_up_to_the_model_and_copies_of_its_norms(tp: int, pp: int) -> None:
    norms = (2 * 4 + 1) * 256
    assert tp * sum(stage_parameters(TINY, tp=tp, pp=pp)) == count_parameters(TINY) + (tp - 1) * norms


def test_beyond_the_key_value_heads_tensor_parallelism_copies_them() -> None:
    norms, kv = (2 * 4 + 1) * 256, 4 * 2 * 4 * 32 * 256
    assert 8 * sum(stage_parameters(TINY, tp=8)) == count_parameters(TINY) + 7 * norms + kv
    assert 16 * sum(stage_parameters(TINY, tp=16)) == count_parameters(TINY) + 15 * norms + 3 * kv


def test_biases_of_row_parallel_matrices_are_held_by_every_rank() -> None:
    model = dataclasses.replace(TINY, mlp_bias=True, qkv_bias=True, attention_output_bias=True, num_kv_heads=None)
    copied = (2 * 4 + 1) * 256 + 4 * 2 * 256
    assert 4 * sum(stage_parameters(model, tp=4)) == count_parameters(model) + 3 * copied


EXPERTS = dataclasses.replace(
    TINY, ffn_size=0, moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=128, shared_expert_ffn_size=64)
)


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (8, 1), (4, 2), (1, 2)])
def test_expert_shards_add_up_to_the_model(ep: int, etp: int) -> None:
    experts = 4 * 8 * 3 * 256 * 128
    dense = count_parameters(EXPERTS) - experts
    assert sum(stage_parameters(EXPERTS, dp_shard=8, ep=ep, etp=etp)) == dense + experts / (ep * etp)


def test_the_prediction_layers_sit_on_the_last_stage() -> None:
    model = dataclasses.replace(TINY, num_mtp_layers=1)
    with_mtp, without = stage_parameters(model, pp=2), stage_parameters(TINY, pp=2)
    assert with_mtp[0] == without[0]
    extra = count_parameters(model, with_mtp=True) - count_parameters(model)
    table = model.vocab_size * model.hidden_size  # predictions embed their tokens again, beside the head
    assert with_mtp[1] - without[1] == pytest.approx(extra + table)


def test_the_prediction_layer_of_a_hybrid_has_attention_and_experts() -> None:
    model = dataclasses.replace(
        EXPERTS,
        layer_pattern="M*ME",
        num_mtp_layers=1,
        mamba=Mamba(num_heads=8, head_dim=16, state_size=32, num_groups=2),
    )
    extra = count_parameters(model, with_mtp=True) - count_parameters(model)
    without = stage_parameters(dataclasses.replace(model, num_mtp_layers=0), pp=2)
    assert stage_parameters(model, pp=2)[1] - without[1] == pytest.approx(extra + model.vocab_size * model.hidden_size)


# -- operations -------------------------------------------------------------------------------------------------------


def test_gpt3_step_of_1536_sequences_takes_3_3406e18_operations_in_megatron_count() -> None:
    assert 1536 * 2048 * model_flops_per_token(GPT3, 2048) == pytest.approx(3.3406e18, rel=1e-4)


def test_llama3_8b_at_8192_takes_5_1470e10_operations_a_token() -> None:
    linear = 6 * (32 * (4096 * 128 * (32 + 16) + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256)
    assert linear == pytest.approx(4.5028e10, rel=1e-4)
    flops = model_flops_per_token(LLAMA3_8B, 8192)
    assert flops == pytest.approx(5.1470e10, rel=1e-4)
    assert flops - linear == pytest.approx(6.4425e9, rel=1e-4)


def test_operations_of_experts_count_those_that_are_visited() -> None:
    visited = dataclasses.replace(
        MIXTRAL, moe=None, ffn_size=2 * 14336
    )  # two experts of a token are one MLP of twice the width
    router = 6 * 32 * 4096 * 8
    assert model_flops_per_token(MIXTRAL, 4096) == pytest.approx(model_flops_per_token(visited, 4096) + router)


def test_a_prediction_layer_adds_a_layer_a_projection_and_a_head() -> None:
    model = dataclasses.replace(TINY, num_mtp_layers=1)
    deeper = dataclasses.replace(TINY, num_layers=5)
    head, projection = 6 * 256 * 1024, 6 * 2 * 256**2
    assert model_flops_per_token(model, 512) == model_flops_per_token(deeper, 512) + head + projection


@pytest.mark.parametrize(
    ("window", "seq_len", "context"),
    [(None, 4096, 2048), (4096, 4096, 2048), (8192, 4096, 2048), (1024, 4096, 1024 - 1024**2 / 8192), (1, 4, 0.875)],
)
def test_mean_context_under_a_causal_window(window: int | None, seq_len: int, context: float) -> None:
    model = dataclasses.replace(TINY, window=window)
    kind = Block.ATTENTION if window is None else Block.WINDOW_ATTENTION
    assert attention_context(model, kind, seq_len) == context


@given(st.integers(1, 64), st.integers(1, 64))
def test_mean_context_under_a_window_is_that_of_the_mask(window: int, seq_len: int) -> None:
    """Counting half of the diagonal, as the causal s / 2 does: w (w / 2) / s + w (s - w) / s."""
    model = dataclasses.replace(TINY, window=window)
    seen = sum(min(query + 0.5, window) for query in range(seq_len))
    assert attention_context(model, Block.WINDOW_ATTENTION, seq_len) == pytest.approx(seen / seq_len)


def test_only_windowed_layers_are_shortened() -> None:
    mixed = dataclasses.replace(TINY, window=128, full_attention_interval=2)
    kinds = [layer[0] for layer in mixed.layers]
    assert kinds == [Block.WINDOW_ATTENTION, Block.ATTENTION] * 2
    core = 6 * 16 * 64 * 4  # three passes, two operations, heads, both widths
    short = attention_context(mixed, Block.WINDOW_ATTENTION, 1024)
    full = model_flops_per_token(TINY, 1024)
    assert model_flops_per_token(mixed, 1024) == pytest.approx(full - core / 2 * (512 - short))


def test_latent_attention_computes_expanded_heads() -> None:
    flops = model_flops_per_token(DEEPSEEK3, 4096) - model_flops_per_token(DEEPSEEK3, 2048)
    assert flops == pytest.approx(3 * 61 * 2 * 1024 * 128 * (192 + 128))


@settings(max_examples=40)
@given(st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6), st.integers(1, 4096))
def test_operations_are_six_a_matrix_parameter_and_the_core(layers: int, kv: int, width: int, seq_len: int) -> None:
    model = ModelSpec(
        name="any",
        num_layers=layers,
        hidden_size=64 * width,
        vocab_size=512,
        num_heads=8,
        num_kv_heads=kv,
        ffn_size=96 * width,
    )
    norms = (2 * layers + 1) * 64 * width
    matrices = count_parameters(model) - norms - 512 * 64 * width  # the embedding is looked up, not multiplied
    core = 6 * layers * seq_len * 64 * width
    assert model_flops_per_token(model, seq_len) == pytest.approx(6 * matrices + core)


def test_matrices_of_low_rank_take_as_much_less() -> None:
    """S17, FinGPT-HPC: h x h by h x r and r x h with r = h / 8 is a quarter of it, with r = h / 2 the same."""
    hidden = 4096
    square = ModelSpec(
        name="square", num_layers=8, hidden_size=hidden, vocab_size=64, num_heads=32, ffn_size=hidden, gated_mlp=False
    )
    plan = PlanBatch.of([ParallelPlan(global_batch=4, micro_batch=4)], 8)
    whole, quarter, same = (dataclasses.replace(square, low_rank=rank) for rank in (0, 512, 2048))
    scores = 3 * 8 * 2 * 1024 * 2 * hidden  # of attention, over half of 2,048 tokens
    ends = count_parameters(dataclasses.replace(square, num_layers=1)) - 6 * hidden**2
    norms = 7 * 2 * hidden
    for model, share in ((quarter, 0.25), (same, 1.0)):
        assert count_parameters(model) == 8 * share * 6 * hidden**2 + ends + norms
        less = model_flops_per_token(whole, 2048) - model_flops_per_token(model, 2048)
        assert less == pytest.approx((1 - share) * (model_flops_per_token(whole, 2048) - scores - 6 * 64 * hidden))
    costs = [
        estimate(make_problem(model, cluster="h100-sxm:1x1", seq_len=2048), plan) for model in (whole, quarter, same)
    ]
    states = [sum(float(cost.memory_terms_bytes[name][0]) for name in ("weights", "optimizer")) for cost in costs]
    assert states[1] / states[0] == pytest.approx(0.25, rel=0.01)
    assert states[2] == states[0]
    assert costs[1].terms_s["gemm"][0] / costs[0].terms_s["gemm"][0] == pytest.approx(0.25, rel=0.3)
    assert costs[1].step_s[0] < 0.6 * costs[0].step_s[0]
    assert costs[2].terms_s["gemm"][0] == pytest.approx(costs[0].terms_s["gemm"][0], rel=0.1)
    with pytest.raises(InputError, match="low_rank goes with plain attention and dense MLPs alone"):
        dataclasses.replace(MIXTRAL, low_rank=8)
    with pytest.raises(InputError, match="matrices of low rank with tp 2: only tp 1 is priced"):
        check_legal(
            RULES,
            quarter,
            TrainingSpec(seq_len=2048),
            ParallelPlan(global_batch=8, micro_batch=1, tp=2),
            "megatron-core",
        )
