"""Bytes that two layers of transformers' models keep for their backward pass, and those that are said to be kept.

With adapters, of the models that PEFT makes of them.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from saved_bytes import saved_sizes

from autoplan.api.problem import make_problem
from autoplan.cost.memory.activations import block_bytes, layer_parts
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.blocks import ENCODER_BLOCKS
from autoplan.spec.enums import AttentionKernel
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch

SEQ_LEN = 64
SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 96, "intermediate_size": 136, "num_attention_heads": 6, "head_dim": 16},
    **{"num_key_value_heads": 2, "pad_token_id": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "conv_L_cache": 3,
}
# Norms of each make, of queries and keys too; layer norms, of torch and written out; one norm for both blocks; gates
# and none; trained activations; queries of which a part turns; convolutions; one bidirectional.
KINDS = (
    *("llama", "qwen2", "qwen3", "gemma", "olmo2", "glm4", "ernie4_5", "smollm3", "granite"),
    *("hunyuan_v1_dense", "arcee", "jais2", "starcoder2", "gpt_bigcode", "bert", "lfm2", "gemma3_text"),
    *("cohere", "cohere2", "apertus", "persimmon", "helium", "nemotron", "stablelm", "olmo", "phi", "phi3", "glm"),
)
# A cache would copy the values, which stay in what one matrix makes, for the norms of queries and keys.
OPTIONS = {"persimmon": {"use_cache": False}}
SOURCE_LEN = 96  # of encoder-decoders, whose attention is written out
_STACKS: dict[str, Any] = {
    **{"vocab_size": 128, "d_model": 96, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
    **{"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 136, "decoder_ffn_dim": 136},
    **{"max_position_embeddings": SOURCE_LEN, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
_T5: dict[str, Any] = {
    **{"vocab_size": 128, "d_model": 96, "d_kv": 16, "num_heads": 6, "d_ff": 136, "dropout_rate": 0.0},
}
PAIRS: dict[str, dict[str, Any]] = {
    "bart": _STACKS,
    "m2m_100": _STACKS,
    "t5": _T5,
    "umt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "whisper": {
        **{**_STACKS, "max_source_positions": SOURCE_LEN, "num_mel_bins": 16, "pad_token_id": 0},
        **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    },
}
ADAPTERS = FineTuning(rank=8, targets=(ALL_LINEAR,))


def kept_bytes(spec: ModelSpec, attention: str, finetuning: FineTuning | None = None) -> float:
    """Bytes that all layers are said to keep of two sequences, by the kind of attention."""
    source: dict[str, Any] = {"encoder_len": SOURCE_LEN} if spec.encoder and not spec.encoder.patches else {}
    problem = make_problem(
        *(spec,), cluster="cpu:1x1", seq_len=SEQ_LEN, framework="transformers",
        finetune=finetuning, **source,
    )  # fmt: skip
    plan = ParallelPlan(global_batch=2, micro_batch=2, attention=AttentionKernel(attention))
    batch = PlanBatch.of([plan], spec.num_layers)
    of_block = block_bytes(problem, batch, layer_parts(problem, batch))
    encoded = spec.encoder.layers.layers if spec.encoder else ()
    blocks = [block for layer in spec.layers for block in layer]
    blocks += [ENCODER_BLOCKS[block] for layer in encoded for block in layer]
    return sum(float(of_block[block][0]) for block in blocks)


def excess(kind: str, finetuning: FineTuning | None = None) -> float:
    """Relative excess of what two layers more are said to keep, of two sequences in bf16, over what torch keeps.

    Norms are those of torch.  Attention has a kernel, but in encoder-decoders, which have two layers more in each
    stack: torch has no kernel on the host for attention with a bias that is trained (T5).
    """
    import torch

    ours, theirs = [], []
    for num_layers in (2, 4):
        model, table = _pair(kind, num_layers) if kind in PAIRS else _decoder(kind, num_layers)
        model = model.to(torch.bfloat16)
        if finetuning is not None:
            model = _adapted(model, finetuning)
        known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        with saved_sizes(known) as sizes:
            model.train()(**_inputs(kind))
        theirs.append(sum(sizes.values()))
        attention = "unfused" if kind in PAIRS else "flash"
        ours.append(kept_bytes(read_huggingface(table, kind), attention, finetuning))
    return (ours[1] - ours[0]) / (theirs[1] - theirs[0]) - 1


def _decoder(kind: str, num_layers: int) -> tuple[Any, dict[str, Any]]:
    """Return a model of one stack and its config."""
    import transformers

    layers = {"layer_types": ["conv", "full_attention"] * (num_layers // 2)} if kind == "lfm2" else {}
    config = transformers.AutoConfig.for_model(kind, **SIZES, **layers, num_hidden_layers=num_layers)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = config.attention_dropout = 0.0
    config.embedding_dropout = config.residual_dropout = 0.0
    auto: Any = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="sdpa"), _table(config)


def _pair(kind: str, num_layers: int) -> tuple[Any, dict[str, Any]]:
    """Return an encoder-decoder and its config."""
    import transformers

    names = ("num_layers", "num_decoder_layers") if "d_kv" in PAIRS[kind] else ("encoder_layers", "decoder_layers")
    config = transformers.AutoConfig.for_model(kind, **PAIRS[kind], **dict.fromkeys(names, num_layers))
    is_speech = kind == "whisper"
    auto: Any = transformers.AutoModelForSpeechSeq2Seq if is_speech else transformers.AutoModelForSeq2SeqLM
    return auto.from_config(config, attn_implementation="eager"), _table(config)


def _table(config: Any) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return table


def _adapted(model: Any, finetuning: FineTuning) -> Any:
    """Return the model with PEFT's adapters, in 16 bits."""
    import peft

    targets = ALL_LINEAR if finetuning.targets == (ALL_LINEAR,) else list(finetuning.targets)
    options: dict[str, Any] = {"r": finetuning.rank, "lora_dropout": finetuning.dropout, "use_dora": finetuning.dora}
    config = peft.LoraConfig(target_modules=targets, **options)
    with warnings.catch_warnings(action="ignore"):  # PEFT asks transformers by names that it will drop
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def _inputs(kind: str) -> dict[str, Any]:
    """Return two sequences, or two pairs of them, without a cache."""
    import torch

    target = torch.randint(3, 99, (2, SEQ_LEN))
    if kind not in PAIRS:
        return {"input_ids": target, **OPTIONS.get(kind, {})}
    if kind == "whisper":
        source = {"input_features": torch.randn(2, 16, 2 * SOURCE_LEN, dtype=torch.bfloat16)}
    else:
        source = {"input_ids": torch.randint(3, 99, (2, SOURCE_LEN))}
    return {**source, "decoder_input_ids": target, "use_cache": False}
