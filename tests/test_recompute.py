"""Does recomputation give back the bytes, and cost the time, that a count by hand says?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.memory.recompute import GIVEN_BACK_BY
from autoplan.cost.pipeline.layout import chunk_blocks
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm import rules as megatron_lm
from autoplan.readers.cluster import load_cluster
from autoplan.spec.blocks import Block, Experts, LatentAttention
from autoplan.spec.enums import RecomputeModule
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch, parse_recompute
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload
from problems import problem_for

TOKENS = 128
DENSE = ModelSpec(name="dense", num_layers=8, hidden_size=64, vocab_size=512, num_heads=4, ffn_size=128)
# Of a DeepSeek's parts in small: latent attention, one dense layer, routed and shared experts.
LATENT = ModelSpec(
    name="latent",
    num_layers=4,
    hidden_size=64,
    vocab_size=512,
    num_heads=4,
    ffn_size=128,
    mla=LatentAttention(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=48),
    moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=32, shared_expert_ffn_size=48, num_dense_layers=1),
)
BARE = Framework(name="bare").changed(pads_vocab_to=1, fixed_bytes=0.0, communicator_bytes=0.0, reserved_factor=1.0)


def problem_of(model: ModelSpec, **training: Any) -> Problem:
    return problem_for(model, "h100-sxm:8x8", BARE, training=TrainingSpec(seq_len=TOKENS, **training))


def activations(problem: Problem, recompute: str, **plan: Any) -> list[float]:
    stages = stage_costs(problem, plan_of(recompute, **plan))
    return [stage.memory_terms_bytes["activations"] for stage in stages]


def plan_of(recompute: str, **plan: Any) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 8, **parse_recompute(recompute), **plan})


# -- bytes, by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "per_token"),
    [
        # norm outputs before latent attention (4 layers) and before experts (3 layers), 2 h each
        ("layernorm", (4 + 3) * 2 * 64),
        # q and k 2 x 2 x 4 heads x 24, and keys without rope with values 2 x 4 heads x 32
        ("mla_up_proj", 4 * (2 * 2 * 4 * 24 + 2 * 4 * 32)),
        # one dense layer: gate, up and product, 6 f
        ("mlp", 6 * 128),
        # activation of two experts a token, 2 bytes x 32
        ("moe_act", 3 * 2 * 2 * 32),
        # gate, up and product of the shared expert
        ("shared_experts", 3 * 6 * 48),
        # router 12 E, two permuted inputs 2 h, and all of the experts' widths
        ("moe", 3 * (12 * 4 + 2 * (2 * 64 + 6 * 32) + 6 * 48)),
        ("core_attn", 0),  # a flash kernel keeps nothing that it would give back
    ],
)
def test_a_part_of_a_layer_gives_back_what_it_holds(module: str, per_token: int) -> None:
    problem = problem_of(LATENT)
    (whole,), (kept,) = activations(problem, "none"), activations(problem, module)
    assert whole - kept == pytest.approx(TOKENS * per_token)


@pytest.mark.parametrize(
    ("recompute", "per_token"),
    [
        # Input, q, k, v, attention's output with four logarithms, sum of residuals, gate and up.
        ("none", 2 * (1 + 3 + 1 + 1) * 64 + 4 * 4 + 2 * 2 * 128),
        ("core_attn+mlp", 2 * (1 + 3 + 1) * 64),
        ("core_attn+layernorm+mlp", 2 * (1 + 3) * 64),
        ("full", 2 * 64),
    ],
)
def test_programs_of_jax_keep_inputs_of_layers_and_outputs_of_products(recompute: str, per_token: int) -> None:
    problem = dataclasses.replace(problem_of(DENSE), framework=BARE.changed(is_jax=True))
    assert activations(problem, recompute) == [pytest.approx(8 * TOKENS * per_token)]


def test_a_sum_that_is_repeated_takes_the_product_before_it_and_an_mlp_may_leave_out_its_last() -> None:
    def again_s(recompute: str, **traits: bool) -> float:
        framework = BARE.changed(is_jax=True, **traits)
        problem = dataclasses.replace(problem_of(DENSE), framework=framework)
        return float(estimate(problem, PlanBatch.of([plan_of(recompute)], 8)).terms_s["recompute"][0])

    late, early = again_s("mlp"), again_s("mlp", recompute_stops_early=True)
    assert 0 < early < late
    assert again_s("mlp+layernorm") > late


def test_parts_add_up_and_the_whole_moe_layer_holds_its_parts_once() -> None:
    problem = problem_of(LATENT)
    (whole,) = activations(problem, "none")

    def given_back(text: str) -> float:
        return whole - activations(problem, text)[0]

    assert given_back("layernorm+mla_up_proj") == pytest.approx(given_back("layernorm") + given_back("mla_up_proj"))
    assert given_back("moe+moe_act+shared_experts") == pytest.approx(given_back("moe"))


def test_every_part_says_what_gives_it_back() -> None:
    assert set(GIVEN_BACK_BY) == set(RecomputeModule)
    assert all(module in GIVEN_BACK_BY[module] for module in GIVEN_BACK_BY)


def test_a_number_of_layers_is_repeated_at_the_head_of_every_chunk() -> None:
    """Two layers of four keep 2 h a token, the others all; stage 0 has two micro-batches in flight."""
    problem = problem_of(DENSE)
    layer = activations(problem, "none", pp=2)[1] / 4
    first, last = activations(problem, "full:2", pp=2)
    assert last == pytest.approx(2 * layer + 2 * 2 * TOKENS * 64)
    assert first == pytest.approx(2 * last)


def test_repeated_layers_follow_the_kinds_of_layers_in_a_chunk() -> None:
    """Chunks of two layers of a model whose first layer is dense: of chunk 0 the dense one is repeated."""
    blocks = chunk_blocks(LATENT, np.array([[2, 2]]), np.array([1]))
    assert {kind: (all_[0].tolist(), again[0].tolist()) for kind, (all_, again) in blocks.items()} == {
        Block.ATTENTION: ([2, 2], [1, 1]),
        Block.MLP: ([1, 0], [1, 0]),
        Block.MOE: ([1, 2], [0, 1]),
    }


def test_the_last_layer_of_a_chunk_is_alive_again_only_where_it_is_repeated() -> None:
    problem = problem_of(DENSE)

    def transients(recompute: str) -> float:
        return stage_costs(problem, plan_of(recompute, pp=2))[0].memory_terms_bytes["transients"]

    assert transients("full:3") == transients("none")
    assert transients("full:4") == transients("full") > transients("none")


def test_inputs_of_swiglu_in_8_bits_keep_half_but_where_a_checkpoint_keeps_them() -> None:
    """Gate and up of the dense layer (2 f), of two experts a token and of the shared one, a byte less each."""
    problem = problem_of(LATENT)

    def kept(recompute: str, *, in_8_bits: bool) -> float:
        plan = dataclasses.replace(plan_of(recompute), fp8_activation_input=in_8_bits)
        return stage_costs(problem, plan)[0].memory_terms_bytes["activations"]

    dense, experts, shared = 2 * 128, 3 * 2 * 2 * 32, 3 * 2 * 48
    for recompute, saved in (
        ("none", dense + experts + shared),
        ("moe_act", dense + shared),
        ("mlp", experts + shared),
    ):
        whole, narrow = (kept(recompute, in_8_bits=in_8_bits) for in_8_bits in (False, True))
        assert whole - narrow == pytest.approx(TOKENS * saved)


@pytest.mark.parametrize(("precision", "size"), [("fp8", 1.0), ("mxfp8", 33 / 32), ("nvfp4", 9 / 16)])
def test_narrow_gemms_keep_their_inputs_as_quantised(precision: Any, size: float) -> None:
    """Norm outputs 2 x 2 h and the MLP's activation 2 f in fewer bytes; a copy of the attention output 4 x 16 more."""
    problem = dataclasses.replace(problem_of(DENSE), cluster=load_cluster("b200:8x8"))
    (wide,), (narrow,) = (activations(problem, "none", precision=kind) for kind in ("bf16", precision))
    per_token = (2.0 - size) * (2 * 64 + 128) - size * 4 * 16
    assert wide - narrow == pytest.approx(8 * TOKENS * per_token)
    eager = dataclasses.replace(problem, framework=BARE.changed(keeps_narrow_copies=False))
    assert activations(eager, "none", precision=precision) == activations(eager, "none")


@pytest.mark.parametrize(
    ("norm", "gated", "more"),
    [("layernorm", False, 0), ("layernorm", True, 2 * 128), ("rmsnorm", True, 8 * 64 + 2 * 128)],
)
def test_eager_code_keeps_more_where_it_is_made_of_parts(norm: Any, gated: bool, more: int) -> None:
    """Two RMSNorms keep 4 h more each, SwiGLU 2 f; a layer norm and GELU are one kernel of torch each."""
    problem = problem_of(dataclasses.replace(DENSE, norm=norm, gated_mlp=gated))
    parts = dataclasses.replace(problem, framework=BARE.changed(fused_norm=False, fused_activation=False))
    (eager,), (fused,) = (activations(variant, "none") for variant in (parts, problem))
    assert eager - fused == pytest.approx(8 * TOKENS * more)


def test_a_busier_rank_of_experts_keeps_the_more_tokens() -> None:
    even, uneven = problem_of(LATENT), problem_of(LATENT, expert_imbalance=1.5)
    routed = 3 * TOKENS * 2 * (2 * 64 + 6 * 32)
    more = activations(uneven, "none", ep=2)[0] - activations(even, "none", ep=2)[0]
    assert more == pytest.approx(0.5 * routed)
    assert activations(uneven, "none") == activations(even, "none")  # a rank with all experts has its own tokens


# -- time -------------------------------------------------------------------------------------------------------------


def recompute_s(problem: Problem, recompute: str, **plan: Any) -> float:
    batch = PlanBatch.of([plan_of(recompute, **plan)], problem.model.num_layers)
    return float(estimate(problem, batch).terms_s["recompute"][0])


def test_a_number_of_layers_costs_its_share_of_all_of_them() -> None:
    problem = problem_of(DENSE)
    assert recompute_s(problem, "full:2") == pytest.approx(recompute_s(problem, "full") * 2 / 8)


def test_repeating_a_part_costs_less_than_repeating_the_layer() -> None:
    problem = problem_of(LATENT)
    whole = recompute_s(problem, "full")
    for module in RecomputeModule:
        spent = recompute_s(problem, module)
        assert 0 < spent < whole


def test_repeating_the_attention_core_costs_its_forward_pass() -> None:
    problem = problem_of(DENSE)
    unfused = PlanBatch.of([plan_of("none", attention="unfused")], 8)
    core_s = recompute_s(problem, "core_attn", attention="unfused")
    assert core_s == pytest.approx(estimate(problem, unfused).terms_s["attention"][0] / 3)  # a third of it is forward


@given(st.sets(st.sampled_from(RecomputeModule), min_size=1), st.sampled_from(RecomputeModule))
def test_another_part_gives_back_more_and_costs_more(listed: set[str], another: str) -> None:
    problem = problem_of(LATENT)
    less, more = ("+".join(sorted(modules)) for modules in (listed, listed | {another}))
    assert activations(problem, more)[0] <= activations(problem, less)[0]
    assert recompute_s(problem, more) >= recompute_s(problem, less)


@given(st.integers(1, 12), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_another_layer_gives_back_more_and_costs_more(layers: int, pp: int, vp: int) -> None:
    plan = {"pp": pp, "vp": vp, "schedule": "interleaved"} if pp > 1 else {}
    problem = problem_of(DENSE)
    pairs = [
        (activations(problem, text, **plan), recompute_s(problem, text, **plan))
        for text in (f"full:{layers}", f"full:{layers + 1}")
    ]
    assert np.all(np.array(pairs[1][0]) <= np.array(pairs[0][0]))
    assert pairs[1][1] >= pairs[0][1]


# -- words and rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["none", "selective", "full", "full:3", "moe_act", "layernorm+moe_act"])
def test_a_batch_holds_what_is_recomputed(text: str) -> None:
    plan = plan_of(text)
    assert PlanBatch.of([plan], 8).plan(0) == plan


@pytest.mark.parametrize("text", ["", "some", "full:", "full:0", "full:-1", "full:x", "moe+moe", "mlp,moe", "none:1"])
def test_what_is_no_recomputation_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="write none, selective, full") as caught:
        parse_recompute(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"recompute": "none", "recompute_num_layers": 2}, "recompute_num_layers needs recompute = 'full'"),
        ({"recompute": "full", "recompute_num_layers": 0}, "recompute_num_layers"),
        ({"recompute": "full", "recompute_modules": ("mlp",)}, "recompute_modules need recompute = 'selective'"),
        ({"recompute": "selective", "recompute_modules": ()}, "at least one part"),
        ({"recompute": "selective", "recompute_modules": ("mlp", "mlp")}, "each once"),
    ],
)
def test_fields_that_contradict_one_another_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ParallelPlan(global_batch=8, **fields)


@pytest.mark.parametrize(
    ("model", "missing"),
    [(DENSE, {"layernorm", "mla_up_proj", "moe", "moe_act", "shared_experts"}), (LATENT, set())],
    ids=["dense", "latent"],
)
def test_parts_that_a_model_lacks_are_refused(model: ModelSpec, missing: set[str]) -> None:
    workload = Workload(model=model, training=TrainingSpec(seq_len=TOKENS), num_devices=8)
    for module in RecomputeModule:
        faults = broken(megatron_lm.RULES, workload, plan_of(module, dp_shard=8))
        assert bool(faults) is (module in missing)
        assert all(f"has no {module} to recompute" in fault for fault in faults)


def test_parts_by_name_are_known_of_megatron_alone() -> None:
    workload = Workload(model=LATENT, training=TrainingSpec(seq_len=TOKENS), num_devices=8)
    rules = (universal.NO_PARTS,)
    assert not broken(rules, workload, plan_of("selective", dp_shard=8))
    (fault,) = broken(rules, workload, plan_of("moe_act", dp_shard=8))
    assert "known of Megatron-LM only" in fault
