"""Does every rule of Megatron-LM refuse the plan it is about, and only that one?"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import ANY_FRAMEWORK, broken, legal
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.spec.blocks import Experts, LatentAttention, LinearAttention
from autoplan.spec.lengths import Lengths
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload

DENSE = ModelSpec(
    name="dense", num_layers=24, hidden_size=4096, vocab_size=32000, num_heads=32, num_kv_heads=8, ffn_size=14336
)
MOE = replace(DENSE, name="moe", moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=1536))
LATENT = replace(
    MOE,
    name="latent",
    num_kv_heads=None,
    mla=LatentAttention(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)
TWELVE_HEADS = replace(DENSE, num_heads=12, num_kv_heads=4, head_dim=128)
SIX_GROUPS = replace(DENSE, num_heads=12, num_kv_heads=6, head_dim=128)
BIASED = replace(MOE, mlp_bias=True, qkv_bias=True, attention_output_bias=True)
DENSE_FIRST = replace(MOE, moe=replace(MOE.moe, num_dense_layers=1))  # type: ignore[type-var]
ODD_EXPERTS = replace(MOE, moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=1535))


SAMPLES = Lengths(histogram=((1024, 3), (4096, 1)))


def workload_of(model: ModelSpec, plan: ParallelPlan, seq_len: int = 4096, num_devices: int | None = None) -> Workload:
    training = TrainingSpec(seq_len=seq_len, lengths=SAMPLES if plan.dynamic_cp else None)
    return Workload(model=model, training=training, num_devices=num_devices or plan.num_devices)


def plan_of(**changes: Any) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 64, **changes})


LINEAR = replace(
    DENSE, linear_attention=LinearAttention(num_key_heads=4, num_value_heads=8, key_head_dim=64, value_head_dim=64)
)

# what a rule is about -> (model, plan, sequence length): legal except for that rule
BREAKING: dict[str, tuple[ModelSpec, ParallelPlan, int]] = {
    "no fp32": (DENSE, plan_of(precision="fp32"), 4096),
    "expert grid": (MOE, plan_of(ep=8, dp_shard=4), 4096),
    "instances": (MOE, plan_of(ep=8, dp_shard=4, dp_replicate=2), 4096),
    "pipelines first": (DENSE, plan_of(cp=2, pp=2, rank_order="tp-cp-ep-pp-dp"), 4096),
    "chunk count": (replace(DENSE, num_layers=2), plan_of(pp=8), 4096),
    "global batch": (DENSE, plan_of(dp_shard=8, global_batch=63), 4096),
    "heads": (TWELVE_HEADS, plan_of(tp=8, sp=True), 4096),
    "kv heads": (SIX_GROUPS, plan_of(tp=4, sp=True), 4096),
    "linear attention": (LINEAR, plan_of(cp=2), 4096),
    "mlp width": (replace(DENSE, ffn_size=4098), plan_of(tp=4, sp=True), 4096),
    "expert width": (ODD_EXPERTS, plan_of(etp=2, dp_shard=2), 4096),
    "cp sequence": (DENSE, plan_of(cp=8), 4104),
    "cp hierarchy": (DENSE, plan_of(cp=4, cp_kind="a2a+p2p:4"), 4096),
    "cp heads of a hierarchy": (DENSE, plan_of(tp=4, sp=True, cp=8, cp_kind="a2a+p2p:4"), 4096),
    "cp heads": (DENSE, plan_of(tp=4, sp=True, cp=4, cp_kind="all_to_all"), 4096),
    "cp latent": (LATENT, plan_of(cp=2, cp_kind="all_to_all"), 4096),
    "cp window": (replace(DENSE, window=1024), plan_of(cp=2), 4096),
    "dynamic cp": (DENSE, plan_of(cp=4, micro_batch=2, dynamic_cp=True), 4096),
    "dynamic cp in FSDP": (DENSE, plan_of(cp=4, dynamic_cp=True, sharding="zero3"), 4096),
    "sp needs tp": (DENSE, plan_of(sp=True), 4096),
    "sp sequence": (DENSE, plan_of(tp=4, sp=True), 4098),
    "tp overlap": (DENSE, plan_of(tp=2, tp_overlap=True), 4096),
    "shared experts": (MOE, plan_of(ep=2, dp_shard=2, shared_expert_overlap=True), 4096),
    "ep overlap": (MOE, plan_of(pp=2, ep=2, dp_shard=2, ep_overlap=True), 4096),
    "delayed weight gradients": (MOE, plan_of(ep=2, dp_shard=2, delay_wgrad=True), 4096),
    "a schedule": (DENSE, plan_of(pp=2, schedule="gpipe"), 4096),
    "chunks": (DENSE, plan_of(pp=2, schedule="interleaved"), 4096),
    "interleaving needs pp": (DENSE, plan_of(vp=2, schedule="interleaved"), 4096),
    "interleaved microbatches": (DENSE, plan_of(pp=4, vp=2, schedule="interleaved", global_batch=6), 4096),
    "experts exist": (DENSE, plan_of(ep=2, dp_shard=2), 4096),
    "experts": (MOE, plan_of(ep=3, dp_shard=3, global_batch=6), 4096),
    "experts need sp": (MOE, plan_of(tp=2), 4096),
    "expert bias": (BIASED, plan_of(tp=2, sp=True, etp=2), 4096),
    "fsdp needs one stage": (DENSE, plan_of(pp=2, dp_shard=4, sharding="zero3"), 4096),
    "fsdp experts": (MOE, plan_of(dp_shard=4, dp_replicate=2, sharding="zero2"), 4096),
    "fsdp overlap": (
        DENSE,
        plan_of(dp_shard=8, sharding="zero2", grad_reduce_overlap=False, param_gather_overlap=False),
        4096,
    ),
    "gather overlap": (DENSE, plan_of(dp_shard=8, grad_reduce_overlap=False), 4096),
    "offload": (DENSE, plan_of(dp_shard=8, sharding="none", offload="optimizer"), 4096),
    "graphs of routers": (DENSE, plan_of(cuda_graphs="router"), 4096),
    "graphs and fully sharded": (DENSE, plan_of(dp_shard=8, sharding="zero3", cuda_graphs="attn"), 4096),
    "graphs and recompute": (DENSE, plan_of(cuda_graphs="layer", recompute="full"), 4096),
    "graphs and ep overlap": (DENSE_FIRST, plan_of(ep=2, dp_shard=2, ep_overlap=True, cuda_graphs="layer"), 4096),
    "narrow params": (DENSE, plan_of(dp_shard=8, narrow_params=True), 4096),
    "narrow params of FSDP": (
        DENSE,
        plan_of(dp_shard=8, sharding="zero2", precision="nvfp4", narrow_params=True),
        4096,
    ),
    "8-bit attention": (DENSE, plan_of(fp8_attention=True), 4096),
    "8-bit inputs of SwiGLU": (replace(DENSE, gated_mlp=False), plan_of(fp8_activation_input=True), 4096),
    "a part of nothing offloaded": (DENSE, plan_of(offload_percent=57), 4096),
    "offloaded experts": (DENSE, plan_of(offload_modules="expert_fc1"), 4096),
    "offloaded and recomputed": (DENSE, plan_of(offload_modules="core_attn", recompute="full"), 4096),
    "offloaded layers of stages": (DENSE, plan_of(pp=2, offload_layers="1/2"), 4096),
    "offloaded and recomputed layers": (DENSE, plan_of(offload_layers="1/2", recompute="full"), 4096),
    "dropped tokens": (DENSE, plan_of(token_dropping=True), 4096),
    "dropped tokens and dispatcher": (
        MOE,
        plan_of(ep=2, dp_shard=2, token_dropping=True, dispatcher="deepep"),
        4096,
    ),
    "fused RoPE": (DENSE, plan_of(rope_fusion=True), 4096),
    "parameters on the host": (DENSE, plan_of(dp_shard=8, sharding="zero3", offload="parameters"), 4096),
    "narrow states": (DENSE, plan_of(dp_shard=8, sharding="zero3", main_weights="remainders"), 4096),
    "main weights": (DENSE, plan_of(dp_shard=8, main_weights="bf16"), 4096),
    "adapters": (DENSE, plan_of(dp_shard=8, wide_adapters=True), 4096),
    "scales of rows": (DENSE, plan_of(dp_shard=8, precision="fp8", fp8_scaling="rowwise"), 4096),
    "scales of 16 bits": (DENSE, plan_of(dp_shard=8, fp8_scaling="delayed"), 4096),
    "reduction": (DENSE, plan_of(dp_shard=8, reduce_dtype="half"), 4096),
    "remainders": (DENSE, plan_of(dp_shard=8, precision="fp8", main_weights="remainders"), 4096),
    "modules exist": (DENSE, plan_of(recompute="selective", recompute_modules=("moe_act",)), 4096),
    "aligned widths": (replace(DENSE, ffn_size=4104), plan_of(precision="fp8"), 4096),
    "aligned tokens": (DENSE, plan_of(precision="mxfp8"), 4104),
    "gathers in 8 bits": (DENSE, plan_of(dp_shard=8, sharding="zero3", quantized_gathers=True), 4096),
    "reductions in 4 bits": (DENSE, plan_of(dp_shard=8, sharding="zero3", quantized_reductions=True), 4096),
    "loss in pieces": (DENSE, plan_of(chunked_loss="chunks"), 4096),
    "a second copy": (DENSE, plan_of(dp_shard=8, sharding="zero3", secondary_shard=2), 4096),
}


def test_every_rule_has_a_plan_that_breaks_it() -> None:
    cases = [(workload_of(*case), PlanBatch.of([case[1]], case[0].num_layers)) for case in BREAKING.values()]
    never = [rule for rule in RULES if all(rule.holds(*case)[0] for case in cases)]
    plan = plan_of()
    says = [rule.text(workload_of(DENSE, plan), plan) for rule in never]
    # Those of other optimizers than Adam are broken in `test_optimizers`; the number of devices has a test of its own
    # below, and encoders and layers of other kinds have theirs elsewhere; parameters on the host and the last two, of
    # schedules, another rule turns down.
    words = (
        "cannot skip other documents",  # broken in `test_lengths`
        "needs Adam",
        "offload 'parameters' with",
        "muon with",
        "devices",
        "an encoder of",
        "an encoder on ranks of its own",
        "layers that share",
        "matrices of low rank",
        "scans of Mamba-1",
        "convolutions",
        "heads of two sizes",
        "dualpipe-v",
        "passes that",
        "dynamic_cp needs the lengths",  # broken in `test_dynamic_cp`
    )
    assert len(says) == len(words), says
    for rule, word in zip(says, words, strict=True):
        assert word in rule


@pytest.mark.parametrize(
    ("model", "changes", "is_legal"),
    [
        (MOE, {}, True),
        (MOE, {"precision": "fp8"}, False),
        (MOE, {"tp": 2, "sp": True, "etp": 2}, False),
        (replace(MOE, gated_mlp=False, squared_relu=True), {}, False),
    ],
)
def test_one_graph_needs_the_fused_experts_of_mxfp8(model: ModelSpec, changes: dict[str, Any], is_legal: bool) -> None:
    plan = {"ep": 2, "dp_shard": 2, "precision": "mxfp8", "dispatcher": "hybridep", "cuda_graphs": "full_iteration"}
    says = broken(RULES, workload_of(model, plan_of(**plan | changes), 4096), plan_of(**plan | changes))
    assert (says == ()) is is_legal, says


@pytest.mark.parametrize("name", BREAKING)
def test_a_plan_breaks_exactly_the_rule_it_is_about(name: str) -> None:
    model, plan, seq_len = BREAKING[name]
    says = broken(RULES, workload_of(model, plan, seq_len), plan)
    assert len(says) == 1, says
    assert re.search(r"\((core|training|TransformerEngine|any framework)[^ ]*( .*)?\)$", says[0]), says[0]
    assert "\n" not in says[0]


def test_a_plan_for_another_number_of_devices_breaks_the_world_rule_alone() -> None:
    plan = plan_of(tp=2, sp=True, dp_shard=4)
    says = broken(RULES, workload_of(DENSE, plan, num_devices=16), plan)
    assert len(says) == 1
    assert "needs 8 devices, there are 16" in says[0]


LEGAL = {
    "one device": (DENSE, plan_of()),
    "three axes": (DENSE, plan_of(tp=4, sp=True, pp=4, dp_shard=4)),
    "three data ranks": (DENSE, plan_of(dp_shard=3, global_batch=9)),
    "tensor ranks beyond the groups": (DENSE, plan_of(tp=16, sp=True)),
    "interleaved": (DENSE, plan_of(pp=3, vp=4, schedule="interleaved", global_batch=6)),
    "uneven layers": (DENSE, plan_of(pp=3, layers_per_chunk=(7, 9, 8))),
    "an empty chunk": (DENSE, plan_of(pp=3, layers_per_chunk=(12, 0, 12))),
    "all-to-all context": (DENSE, plan_of(tp=2, sp=True, cp=4, cp_kind="all_to_all")),
    "windows with all-to-all": (replace(DENSE, window=1024), plan_of(cp=2, cp_kind="all_to_all")),
    "latent attention in a ring": (LATENT, plan_of(cp=2)),
    "experts over all axes": (MOE, plan_of(tp=2, sp=True, cp=2, ep=8, dp_shard=2)),
    "expert tensor ranks": (MOE, plan_of(tp=1, etp=2, ep=4, dp_shard=8)),
    "plain data parallelism": (DENSE, plan_of(dp_shard=8, sharding="none", grad_reduce_overlap=False)),
    "optimizer copies": (DENSE, plan_of(dp_replicate=2, dp_shard=4)),
    "fsdp": (DENSE, plan_of(tp=2, sp=True, dp_shard=8, sharding="zero3")),
    "hybrid fsdp": (DENSE, plan_of(dp_replicate=2, dp_shard=8, sharding="zero3")),
    "fsdp with experts": (MOE, plan_of(ep=8, dp_shard=8, sharding="zero3")),
    "offload": (DENSE, plan_of(dp_shard=8, offload="optimizer")),
    "fp8": (DENSE, plan_of(tp=8, sp=True, precision="fp8")),
    "mxfp8 latent": (LATENT, plan_of(ep=8, dp_shard=8, precision="mxfp8")),
    "nvfp4": (DENSE, plan_of(tp=8, sp=True, precision="nvfp4")),
}


@pytest.mark.parametrize("case", LEGAL)
def test_an_ordinary_plan_is_legal(case: str) -> None:
    model, plan = LEGAL[case]
    assert broken(RULES, workload_of(model, plan), plan) == ()


degrees = st.sampled_from([1, 1, 2, 3, 4, 8])


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    vp = draw(st.sampled_from([1, 1, 2, 3]))
    return ParallelPlan(
        global_batch=draw(st.integers(1, 128)),
        micro_batch=draw(st.sampled_from([1, 2])),
        tp=draw(degrees),
        sp=draw(st.booleans()),
        cp=draw(degrees),
        cp_kind=draw(st.sampled_from(["ring", "all_to_all"])),
        pp=draw(degrees),
        vp=vp,
        schedule="interleaved" if vp > 1 else draw(st.sampled_from(["1f1b", "gpipe", "interleaved"])),
        ep=draw(degrees),
        etp=draw(st.sampled_from([1, 1, 2])),
        dp_replicate=draw(st.sampled_from([1, 1, 2])),
        dp_shard=draw(degrees),
        sharding=draw(st.sampled_from(["none", "zero1", "zero2", "zero3"])),
        precision=draw(st.sampled_from(["bf16", "fp8", "mxfp8", "nvfp4"])),
        offload=draw(st.sampled_from(["none", "none", "optimizer"])),
        tp_overlap=draw(st.booleans()),
        grad_reduce_overlap=draw(st.booleans()),
        param_gather_overlap=draw(st.booleans()),
    )


@given(
    model=st.sampled_from([DENSE, MOE, LATENT, BIASED, SIX_GROUPS, ODD_EXPERTS]),
    batch=st.lists(plans(), min_size=1, max_size=8),
    seq_len=st.sampled_from([4096, 4098, 4104, 1]),
)
def test_a_batch_is_judged_as_its_plans_one_by_one(model: ModelSpec, batch: list[ParallelPlan], seq_len: int) -> None:
    workload = workload_of(model, batch[0], seq_len)
    together = legal(RULES, workload, PlanBatch.of(batch, model.num_layers))
    assert together.dtype == np.bool_
    assert together.tolist() == [broken(RULES, workload, plan) == () for plan in batch]


def test_the_rules_name_their_places() -> None:
    assert RULES[: len(universal.RULES)] == universal.RULES
    # Options of other frameworks, and fp32, are refused by no line of Megatron-LM.
    for rule in (rule for rule in RULES[len(universal.RULES) :] if rule.source != ANY_FRAMEWORK):
        assert rule.source.startswith("TransformerEngine ") or re.fullmatch(r"[\w/]+\.py(:\d+| --[\w-]+)", rule.source)
