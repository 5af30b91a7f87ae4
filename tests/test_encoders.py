"""Encoders: attention to both sides, and the parts of their heads; parts that programs for decoders do not know."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import autoplan
from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import attention_context, count_parameters, model_flops_per_token
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.common.universal_rules import RULES
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.blocks import Block
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec

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


ALBERT_XXLARGE: dict[str, Any] = {  # huggingface.co/albert/albert-xxlarge-v2/blob/main/config.json
    **{"architectures": ["AlbertForMaskedLM"], "model_type": "albert", "embedding_size": 128, "vocab_size": 30000},
    **{"hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 64, "num_hidden_layers": 12},
    **{"num_hidden_groups": 1, "inner_group_num": 1, "max_position_embeddings": 512, "type_vocab_size": 2},
}


def test_layers_that_share_their_weights_work_like_others_and_are_held_once() -> None:
    albert = read_huggingface(ALBERT_XXLARGE, "albert-xxlarge")
    # A table of 128, a layer of 12 h^2 and its way in and out; 206 million in the model card's "xxlarge".
    assert count_parameters(albert) == pytest.approx(206e6, rel=0.01)
    apart = replace(albert, shared_layers=False)
    assert model_flops_per_token(albert, 512) == model_flops_per_token(apart, 512)
    one_layer = count_parameters(apart) - count_parameters(albert)
    plan = PlanBatch.of([ParallelPlan(global_batch=16, micro_batch=1, dp_shard=8)], 12)  # gradients add up
    shared, own = (
        estimate(make_problem(model, cluster="h100-sxm:1x8", seq_len=512, framework="transformers"), plan)
        for model in (albert, apart)
    )
    for name in ("weights", "gradients", "optimizer"):
        per_parameter = float(own.memory_terms_bytes[name][0]) / count_parameters(apart)
        saved = float(own.memory_terms_bytes[name][0] - shared.memory_terms_bytes[name][0])
        assert saved == pytest.approx(per_parameter * one_layer, rel=0.01)
    assert shared.terms_s["gemm"][0] == own.terms_s["gemm"][0]


def test_what_layers_that_share_their_weights_are_not_priced_with_is_refused() -> None:
    albert = read_huggingface(ALBERT_XXLARGE, "albert-xxlarge")
    with pytest.raises(InputError, match="layers that share their weights with pp 2: only pp 1 is priced"):
        check_legal(RULES, albert, TrainingSpec(seq_len=512), ParallelPlan(global_batch=8, micro_batch=1, pp=2), "any")
    with pytest.raises(InputError, match="adapters beside the shared layers of albert-xxlarge are not priced"):
        make_problem(albert, cluster="h100-sxm:1x8", seq_len=512, finetune=FineTuning(rank=8))
    with pytest.raises(InputError, match="embedding_size needs head_transform"):
        replace(albert, tied_embeddings=False)


@pytest.mark.parametrize("kind", ["electra", "albert"])
def test_operations_of_narrow_tables_are_those_that_torch_counts(kind: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"hidden_size": 96, "intermediate_size": 300, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        kind, attn_implementation="eager", embedding_size=40, vocab_size=512, **sizes
    )
    model = transformers.AutoModelForMaskedLM.from_config(config).train()
    tokens = torch.randint(3, 99, (1, 160))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), kind)
    assert 160 * model_flops_per_token(spec, 160) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_two_streams_of_attention_double_what_attention_works_and_keeps() -> None:
    """S30: of the blocks of attention alone, beside one matrix for the keys of distances."""
    usual, doubled = (replace(ENCODER, attention_streams=streams) for streams in (1, 2))
    scores = 24 * 3 * 2 * 512 * 2 * 1024
    more = model_flops_per_token(doubled, 512) - model_flops_per_token(usual, 512)
    assert more == pytest.approx(scores + 24 * 3 * 2 * 1024**2)
    plan = PlanBatch.of([ParallelPlan(global_batch=8, micro_batch=1, dp_shard=8)], 24)
    priced = [
        estimate(make_problem(model, cluster="h100-sxm:1x8", seq_len=512, framework="transformers"), plan)
        for model in (usual, doubled)
    ]
    assert priced[1].terms_s["attention"][0] == pytest.approx(2 * priced[0].terms_s["attention"][0])
    kept = [float(each.memory_terms_bytes["activations"][0]) for each in priced]
    attention = 24 * 512 * (2 * 4 * 1024 + 4 * 16)  # queries, keys, values and outputs, and logarithms of 16 heads
    assert kept[1] - kept[0] == pytest.approx(attention, rel=0.01)


@pytest.mark.parametrize("part", ["pooler", "ForSequenceClassification", "pattern"])
def test_what_an_encoder_is_not_is_refused(part: str) -> None:
    if part == "pattern":
        with pytest.raises(InputError, match="bidirectional attention goes with neither linear_attention"):
            replace(ENCODER, layer_pattern="M-")
        return
    heads = {"pooler": "BertModel", "ForSequenceClassification": "BertForSequenceClassification"}
    with pytest.raises(InputError, match=r"names no language model with a masked or causal loss \(...ForMaskedLM\)"):
        read_huggingface({**BERT_LARGE, "architectures": [heads[part]]}, "bert")


UNUSUAL = [
    ({"head_bias": True}, "a bias of the head"),
    ({"norm_weights": False}, "norms without weights"),
    ({"shared_norm": True}, "parallel attention and MLP after one norm"),
    ({"final_norm": False}, "no norm after the last layer"),
    ({"bidirectional": True}, "bidirectional attention"),
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
