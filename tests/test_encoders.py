"""Encoders: attention to both sides, and the parts of their heads; parts that programs for decoders do not know."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autoplan
from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import attention_context, count_parameters, model_flops_per_token
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.model import Block, ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch

BERT_LARGE: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
ENCODER = read_huggingface(BERT_LARGE, "bert-large")
DECODER = replace(ENCODER, bidirectional=False)


def test_bert_large_has_its_parameters() -> None:
    """S28: 340 million in the paper, of which this is without the pooler; 24 layers, their embedding and head."""
    layer = 12 * 1024**2 + (4 * 1024 + 4096 + 1024) + 2 * 2 * 1024
    embedding = (30522 + 512 + 2) * 1024 + 2 * 1024
    head = 1024**2 + 1024 + 2 * 1024 + 30522
    assert count_parameters(ENCODER) == 24 * layer + embedding + head
    assert 334e6 < count_parameters(ENCODER) < 345e6


def test_attention_to_both_sides_is_not_halved() -> None:
    """S28: no causal halving of the operations of attention."""
    assert attention_context(ENCODER, Block.ATTENTION, 512) == 512
    assert attention_context(DECODER, Block.ATTENTION, 512) == 256
    more = model_flops_per_token(ENCODER, 512) - model_flops_per_token(DECODER, 512)
    assert more == 3 * 24 * 2 * 256 * 16 * 2 * 64


def test_its_attention_takes_twice_as_long() -> None:
    batch = PlanBatch.of([ParallelPlan(micro_batch=16, global_batch=16)], 24)
    encoder, decoder = (
        estimate(make_problem(model, cluster="h100-sxm:1x1", seq_len=512, framework="transformers"), batch)
        for model in (ENCODER, DECODER)
    )
    assert encoder.terms_s["attention"][0] == pytest.approx(2 * decoder.terms_s["attention"][0], rel=0.05)
    assert encoder.terms_s["gemm"][0] == decoder.terms_s["gemm"][0]
    assert encoder.memory_bytes[0] == decoder.memory_bytes[0]


def test_bert_needs_no_model_parallelism() -> None:
    """S28: on eight devices the plan is data-parallel alone."""
    found = autoplan.search(
        ENCODER, cluster="v100-dgx1:1x8", global_batch=256, seq_len=512, precision="fp16", framework="transformers"
    )
    plan = found.file.best.plan
    assert (plan.dp, plan.tp, plan.pp, plan.cp) == (8, 1, 1, 1)


@pytest.mark.parametrize("part", ["pooler", "ForSequenceClassification", "pattern"])
def test_what_an_encoder_is_not_is_refused(part: str) -> None:
    if part == "pattern":
        with pytest.raises(InputError, match="bidirectional attention goes with neither linear_attention"):
            replace(ENCODER, layer_pattern="*-")
        return
    heads = {"pooler": "BertModel", "ForSequenceClassification": "BertForSequenceClassification"}
    with pytest.raises(InputError, match=r"names no language model with a masked or causal loss \(...ForMaskedLM\)"):
        read_huggingface({**BERT_LARGE, "architectures": [heads[part]]}, "bert")


UNUSUAL = [
    ({"head_bias": True}, "head_bias"),
    ({"norm_weights": False}, "norm_weights = false"),
    ({"shared_norm": True}, "shared_norm"),
    ({"final_norm": False}, "final_norm = false"),
    ({"bidirectional": True}, "bidirectional"),
]


@pytest.mark.parametrize(("changes", "says"), UNUSUAL)
@pytest.mark.parametrize(
    ("framework", "target"), [("megatron-core", "megatron-lm"), ("nanotron", "nanotron"), ("torchtitan", "torchtitan")]
)
def test_programs_for_decoders_refuse_what_they_do_not_know(
    framework: str, target: str, changes: dict[str, Any], says: str
) -> None:
    model = replace(_llama(), **changes)
    found = autoplan.estimate(model, cluster="h100-sxm:1x8", global_batch=64, seq_len=512, framework=framework)
    with pytest.raises(InputError, match=says if target != "torchtitan" else "builds no model with the blocks"):
        autoplan.export(found, to=target)


def _llama() -> ModelSpec:
    return ModelSpec(name="small", num_layers=8, hidden_size=1024, vocab_size=32000, num_heads=16, ffn_size=4096)
