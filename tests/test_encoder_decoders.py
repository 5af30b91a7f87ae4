"""Are encoder-decoders read, counted and priced as an encoder run before a decoder with one more attention a layer?"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_bytes import saved_sizes

import autoplan
from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.collectives.traffic import transfers
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import count_parameters, count_trained_parameters, model_flops_per_token
from autoplan.cost.kernels.block_shapes import block_shapes, layer_shapes
from autoplan.cost.memory.recompute import activation_parts, whole_bytes
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.common.universal_rules import RULES
from autoplan.readers.finetuning import load_finetuning
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.blocks import Block
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

T5_LARGE: dict[str, Any] = {  # huggingface.co/google/flan-t5-large/blob/main/config.json
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 2816,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 16,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False,
    "vocab_size": 32128,
}
TRANSFORMER: dict[str, Any] = {  # Vaswani et al., arXiv:1706.03762, table 3: base; 37,000 tokens, one table for all
    "model_type": "m2m_100",
    "is_encoder_decoder": True,
    "vocab_size": 37000,
    "d_model": 512,
    **{"encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048},
    **{"decoder_layers": 6, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048},
}
BIG: dict[str, Any] = {
    **{"d_model": 1024, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096},
    **{"decoder_attention_heads": 16, "decoder_ffn_dim": 4096},
}
SMALL_BART: dict[str, Any] = {
    **{"d_model": 384, "vocab_size": 512, "dropout": 0.0, "max_position_embeddings": 600},
    **{"encoder_layers": 3, "encoder_attention_heads": 6, "encoder_ffn_dim": 1600, "encoder_layerdrop": 0.0},
    **{"decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 1280, "decoder_layerdrop": 0.0},
}
_GEMMA: dict[str, Any] = {
    **{"hidden_size": 384, "intermediate_size": 1280, "num_hidden_layers": 1, "vocab_size": 512},
    **{"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64},
}
SMALL_T5GEMMA2: dict[str, Any] = {
    "encoder": {
        "text_config": _GEMMA | {"num_hidden_layers": 2},
        "vision_config": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3},
    },
    "decoder": _GEMMA,
}
SMALL_T5: dict[str, Any] = {
    **{"d_model": 64, "d_kv": 24, "d_ff": 160, "num_heads": 4, "vocab_size": 512},
    **{"num_layers": 3, "num_decoder_layers": 2, "feed_forward_proj": "gated-silu"},
}
ZERO3 = ParallelPlan(global_batch=64, micro_batch=8, dp_shard=8, sharding="zero3")


@pytest.fixture(scope="module")
def flan() -> ModelSpec:
    return read_huggingface(T5_LARGE, "flan-t5-large")


def test_a_published_config_has_the_parameters_of_its_checkpoint(flan: ModelSpec) -> None:
    assert count_parameters(flan) == 783_150_080  # of google/flan-t5-large
    assert flan.layers[0] == (Block.ATTENTION, Block.CROSS_ATTENTION, Block.MLP)


KINDS = (
    *("bart", "mbart", "plbart", "mvp", "blenderbot", "blenderbot-small", "pegasus", "marian", "m2m_100", "fsmt"),
    *("t5", "mt5", "umt5", "t5gemma", "whisper", "bigbird_pegasus", "led", "longt5", "pegasus_x"),
    *("seamless_m4t", "seamless_m4t_v2", "t5gemma2", "florence2"),
    *(
        "switch_transformers",
        "nllb-moe",
        "encoder-decoder",
        "vision-encoder-decoder",
        "pix2struct",
        "pp_formulanet",
        "udop",
    ),
)
# Of which transformers' classes have experts of their own; and two BERTs.
SMALL_MIXTURES: dict[str, dict[str, Any]] = {
    "switch_transformers": {"num_experts": 3, "num_sparse_encoder_layers": 4},
    "nllb-moe": {"num_experts": 3, "encoder_sparse_step": 3},
}


def _built(kind: str, sizes: dict[str, Any]) -> tuple[Any, ModelSpec]:
    """A transformers model, and what its config is read as."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, attn_implementation="eager", **sizes)
    config.decoder_start_token_id = 0
    names = dict.fromkeys(
        ("vision-encoder-decoder", "pix2struct", "pp_formulanet", "udop", "florence2"), "ImageTextToText"
    ) | {"whisper": "SpeechSeq2Seq"}
    auto = getattr(transformers, f"AutoModelFor{names.get(kind, 'Seq2SeqLM')}")
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), kind)
    return auto.from_config(config), spec


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model, spec = _built(kind, SMALL_MIXTURES.get(kind, {}))
    # Whisper's keys have no bias, unlike queries and values.
    rel = 2e-4 if kind == "whisper" else 0.0
    assert count_parameters(spec) == pytest.approx(sum(own.numel() for own in model.parameters()), rel=rel)


@pytest.mark.parametrize(("kind", "sizes"), [("bart", SMALL_BART), ("t5", SMALL_T5), ("t5gemma2", SMALL_T5GEMMA2)])
def test_operations_are_those_that_torch_counts(kind: str, sizes: dict[str, Any]) -> None:
    """160 tokens of a source, 48 of a target."""
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    model, spec = _built(kind, sizes)
    source, target = torch.randint(3, 99, (1, 160)), torch.randint(3, 99, (1, 48))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=source, labels=target).loss.backward()
    assert spec.encoder is not None
    spec = replace(spec, encoder=replace(spec.encoder, patches=160))
    # Eager attention computes both halves of the decoder's causal square.
    causal = 3 * 2 * (48 / 2) * 2 * spec.num_heads * spec.qk_head_dim * spec.num_layers
    assert 48 * (model_flops_per_token(spec, 48) + causal) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def _kept_bytes(spec: ModelSpec) -> float:
    """Predicted bytes that a decoder layer keeps of two pairs of 512 and 256 tokens."""
    problem = make_problem(spec, cluster="h100-sxm:1x1", seq_len=256, encoder_len=512, framework="transformers")
    batch = PlanBatch.of([ParallelPlan(global_batch=2, micro_batch=2)], spec.num_layers)
    return sum(
        float(whole_bytes(activation_parts(problem, batch, block, shape))[0])
        for block, shape in layer_shapes(spec).items()
    )


def test_bytes_kept_by_a_decoder_layer_are_those_of_torch() -> None:
    """Two pairs of 512 and 256 tokens, all but the scores."""
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, spec = _built("bart", SMALL_BART)
    layer = model.to(torch.bfloat16).train().model.decoder.layers[0]
    hidden = torch.randn(2, 256, 384, dtype=torch.bfloat16, requires_grad=True)
    source = torch.randn(2, 512, 384, dtype=torch.bfloat16, requires_grad=True)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), source)}
    scores = ((256, 256), (256, 512))
    with saved_sizes(known, counts=lambda tensor: tensor.shape[-2:] not in scores) as sizes:
        layer(hidden, encoder_hidden_states=source)
    assert _kept_bytes(spec) == pytest.approx(sum(sizes.values()), rel=0.01)


def test_bytes_kept_by_a_layer_of_merged_attention_are_those_of_torch() -> None:
    """Two pairs of 512 and 256 tokens, all but the scores."""
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, spec = _built("t5gemma2", SMALL_T5GEMMA2)
    layer = model.to(torch.bfloat16).train().model.decoder.layers[0]
    hidden = torch.randn(2, 256, 384, dtype=torch.bfloat16, requires_grad=True)
    source = torch.randn(2, 512, 384, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(2, 1, 256, 64, dtype=torch.bfloat16)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), source, *angles)}
    with saved_sizes(known, counts=lambda tensor: tensor.shape[-2:] != (256, 768)) as sizes:
        layer(hidden, position_embeddings=tuple(angles), encoder_hidden_states=source)
    assert _kept_bytes(spec) == pytest.approx(sum(sizes.values()), rel=0.01)


def _step(problem: Problem, plan: ParallelPlan) -> tuple[float, float]:
    result = estimate(problem, PlanBatch.of([plan], problem.model.num_layers))
    return float(result.step_s[0]), float(result.memory_bytes[0])


def test_a_longer_source_costs_time_and_memory(flan: ModelSpec) -> None:
    short, alike, long = (
        _step(make_problem(flan, cluster="h100-sxm:1x8", seq_len=512, encoder_len=length), ZERO3)
        for length in (128, None, 2048)
    )
    assert short[0] < alike[0] < long[0]
    assert short[1] < alike[1] < long[1]
    said = _step(make_problem(flan, cluster="h100-sxm:1x8", seq_len=512, encoder_len=512), ZERO3)
    assert said == alike


def test_keys_and_values_of_the_source_are_a_decoders_work(flan: ModelSpec) -> None:
    """A source of one token leaves little of cross attention but its queries and its output."""
    shape = block_shapes(flan)[Block.CROSS_ATTENTION]
    assert {linear.name: linear.num_weights for linear in shape.linears} == {"q": 2**20, "kv": 2**21, "out": 2**20}
    assert flan.encoder is not None
    encoder = replace(flan.encoder, patches=512)
    more = model_flops_per_token(replace(flan, encoder=encoder), 256) - model_flops_per_token(flan, 256)
    # Twice the tokens of everything that is encoded, and in the encoder each looks at twice as many.
    layer, scores = 2**20 * 4 + 3 * 1024 * 2816, 2 * 1024
    encoder_ops = 2 * 24 * (2 * (layer + 512 * scores) - (layer + 256 * scores))
    cross_ops = 2 * 24 * (2**21 + 256 * scores)
    assert more == pytest.approx(3 * (encoder_ops + cross_ops))


def test_tensor_parallel_ranks_sum_the_gradients_of_what_is_encoded(flan: ModelSpec) -> None:
    plan = ParallelPlan(global_batch=64, micro_batch=8, tp=2, dp_shard=4)
    problem = make_problem(flan, cluster="h100-sxm:1x8", seq_len=256, encoder_len=1024)
    sums = sum(
        float(np.sum(row.times))
        for row in transfers(problem, plan)
        if row.collective.operation == "all_reduce" and np.all(row.collective.buffer_bytes == 2 * 8 * 1024 * 1024)
    )
    # Of a decoder's 24 layers backward, of 48 blocks of the encoder in both passes, in each of two micro-batches.
    assert sums == 2 * (24 + 2 * 48)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        *(("t5", targets) for targets in (("q", "v"), ("k", "o", "wi", "wo"), ("all-linear",))),
        *(("bart", targets) for targets in (("q_proj", "v_proj"), ("out_proj", "fc1", "fc2"), ("all-linear",))),
        *(("whisper", targets) for targets in (("q_proj", "v_proj"), ("all-linear",))),
        *(("t5gemma", ("all-linear",)), ("florence2", ("q_proj", "v_proj"))),
    ],
)
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_both_stacks_have_the_parameters_of_peft(kind: str, targets: tuple[str, ...], dora: bool) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    names = targets[0] if targets == ("all-linear",) else list(targets)
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model, spec = _built(kind, {})
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=names, use_dora=dora))
    trained = sum(own.numel() for own in model.parameters() if own.requires_grad)
    assert count_trained_parameters(spec, FineTuning(rank=8, targets=targets, dora=dora)) == trained


def test_adapters_cost_less_than_all_weights_in_both_stacks(flan: ModelSpec) -> None:
    """Frozen matrices have no weight gradients, states and gradients, but a backward pass."""
    adapters = FineTuning(rank=8, targets=("q", "v"))
    full, adapted, four_bits = (
        make_problem(flan, cluster="a100-sxm:1x8", seq_len=512, framework="transformers", finetune=tuning)
        for tuning in (None, adapters, replace(adapters, quantization="nf4"))
    )
    assert _step(adapted, ZERO3)[1] < _step(full, ZERO3)[1]
    assert _step(adapted, ZERO3)[0] < _step(full, ZERO3)[0]
    assert _step(adapted, ZERO3)[0] < _step(four_bits, ZERO3)[0]
    flops, of_full = model_flops_per_token(flan, 512, adapters), model_flops_per_token(flan, 512)
    assert 0.66 < flops / of_full < 0.78
    with pytest.raises(InputError, match=r"has no module in_proj: its linear layers are .*wi"):
        make_problem(flan, cluster="h100-sxm:1x8", seq_len=512, finetune=FineTuning(rank=8, targets=("in_proj",)))


def test_adapters_of_an_encoder_decoder_are_exported_as_peft_has_them(flan: ModelSpec, tmp_path: Path) -> None:
    speech = {**SMALL_BART, "model_type": "whisper", "is_encoder_decoder": True, "max_source_positions": 1500}
    whisper = read_huggingface({**speech, "num_mel_bins": 80}, "whisper")
    for model, targets, task, written in (
        (flan, ("q", "wi_0"), "SEQ_2_SEQ_LM", ["q", "wi_0"]),
        (flan, ("q_proj", "v_proj"), "SEQ_2_SEQ_LM", None),
        (whisper, ("q_proj", "v_proj"), None, ["q_proj", "v_proj"]),
    ):
        tuned = FineTuning(rank=8, targets=targets)
        found = autoplan.estimate(
            *(model,), cluster="h100-sxm:1x8", global_batch=64, seq_len=256, framework="transformers", finetune=tuned,
            plan={"sharding": "zero3"},
        )  # fmt: skip
        text = autoplan.export(found, to="accelerate").texts["adapter_config.json"]
        table = json.loads(text)
        assert (table["task_type"], table["target_modules"], table["exclude_modules"]) == (task, written, None)
        (tmp_path / "adapter_config.json").write_text(text)
        assert load_finetuning(str(tmp_path)) == tuned


def test_what_is_not_priced_is_refused(flan: ModelSpec) -> None:
    with pytest.raises(InputError, match="cross attention with pp 2, cp 1 and tp 1: only pp 1 and cp 1 are priced"):
        check_legal(
            RULES,
            flan,
            TrainingSpec(seq_len=512),
            ParallelPlan(global_batch=64, micro_batch=8, pp=2, dp_shard=4),
            "any",
        )
    with pytest.raises(InputError, match="--images, --image-tokens and --encoder-ranks need a model with images"):
        make_problem(flan, cluster="h100-sxm:1x8", seq_len=512, images=1)
    with pytest.raises(InputError, match="--encoder-len needs a model with cross attention"):
        make_problem("llama3-8b", cluster="h100-sxm:1x8", seq_len=512, encoder_len=512)
    with pytest.raises(
        InputError, match="which has an encoder, are priced one to a sequence, not packed: pass --batching padded"
    ):
        make_problem(flan, cluster="h100-sxm:1x8", seq_len=512, lengths="256:3,512:1")
    speech = {"model_type": "seamless_m4t", "is_encoder_decoder": True, "architectures": ["SeamlessM4TModel"]}
    with pytest.raises(InputError, match=r"names no encoder-decoder .*ForTextToText"):
        read_huggingface(speech, "seamless")
    with pytest.raises(InputError, match="a decoder of t5 without its encoder is not covered"):
        read_huggingface({**T5_LARGE, "is_encoder_decoder": False}, "t5")
    with pytest.raises(InputError, match="feed_forward_proj = 'swish' is not covered for t5, only relu, gelu"):
        read_huggingface({**T5_LARGE, "feed_forward_proj": "swish"}, "t5")
    whisper = read_huggingface({**SMALL_BART, "model_type": "whisper", "is_encoder_decoder": True}, "whisper")
    with pytest.raises(InputError, match="the encoder of whisper has 1500 learned positions, not 3000"):
        make_problem(whisper, cluster="h100-sxm:1x8", seq_len=448, encoder_len=3000)


@pytest.mark.parametrize(("changes", "published", "rel"), [({}, 65e6, 0.03), (BIG, 213e6, 0.02)])
def test_attention_is_all_you_need(changes: dict[str, Any], published: float, rel: float) -> None:
    """S27: both models of the paper, which need no model parallelism on eight devices of 16 GB.

    Its 65 million of the base are 63.1 by its own sizes and some 37,000 words.
    """
    model = read_huggingface({**TRANSFORMER, **changes}, "transformer")
    assert count_parameters(model) == pytest.approx(published, rel=rel)
    found = autoplan.search(
        model, cluster="v100-dgx1:1x8", global_batch=512, seq_len=64, precision="fp16", framework="transformers"
    )
    plan = found.file.best.plan
    assert (plan.dp, plan.tp, plan.pp, plan.cp) == (8, 1, 1, 1)
    assert any("as many tokens per sample as its decoder, 64: --encoder-len" in text for text in found.warnings)


# Of google/mt5-base, -large, -xl and -xxl.
MT5 = {
    580e6: {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12},
    1.2e9: {"d_model": 1024, "d_ff": 2816, "num_heads": 16},
    3.7e9: {"d_model": 2048, "d_ff": 5120, "num_heads": 32},
    12.9e9: {"d_model": 4096, "d_ff": 10240, "num_heads": 64},
}
STAGES = [("none", 16.0), ("zero1", 4 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8)]


def _stage_of_zero(sizes: dict[str, int], sharding: Any, vocab_size: int) -> tuple[float, float, str]:
    """Return (parameters, bytes of states a device, verdict) of eight devices of 40 GB."""
    table = {**T5_LARGE, **sizes, "vocab_size": vocab_size, "model_type": "mt5"}
    model = read_huggingface(table, "mt5")
    problem = make_problem(model, cluster="a100-sxm-40:1x8", seq_len=512, framework="deepspeed")
    plan = ParallelPlan(
        global_batch=8, micro_batch=1, dp_shard=8, sharding=sharding, recompute="full", grad_dtype="bf16"
    )
    priced = estimate(problem, PlanBatch.of([plan], model.num_layers))
    states = sum(float(priced.memory_terms_bytes[name][0]) for name in ("weights", "gradients", "optimizer"))
    return count_parameters(model), states, VERDICTS[int(priced.verdict[0])]


@pytest.mark.parametrize(("sharding", "per_parameter"), STAGES)
@pytest.mark.parametrize("published", MT5)
def test_stages_of_zero_hold_their_shares_of_mt5(published: float, sharding: Any, per_parameter: float) -> None:
    """S09: sizes and stages of arXiv:2310.05350."""
    parameters, states, verdict = _stage_of_zero(MT5[published], sharding, 250112)
    assert parameters == pytest.approx(published, rel=0.03)
    assert states == pytest.approx(per_parameter * parameters, rel=0.02)
    assert verdict == "fits" or published > 2e9


@pytest.mark.parametrize(
    ("sharding", "needed"), [("none", 208e9), ("zero1", 71.5e9), ("zero2", 48.75e9), ("zero3", 26e9)]
)
def test_thirteen_billion_parameters_need_sharded_weights(sharding: Any, needed: float) -> None:
    """S09: with T5's 32,128 words, stage 3 fits; what is gathered of mT5's 250,112 leaves too little of the 40 GB."""
    parameters, states, verdict = _stage_of_zero(MT5[12.9e9] | {"d_ff": 13400}, sharding, 32128)
    assert parameters == pytest.approx(13e9, rel=0.01)
    assert states == pytest.approx(needed, rel=0.03)
    assert verdict == ("fits" if sharding == "zero3" else "oom")
    assert _stage_of_zero(MT5[12.9e9], "zero3", 250112)[2] == "risky"
