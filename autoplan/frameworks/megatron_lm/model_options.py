"""Rows of the option table of Megatron-Core that describe the model."""

from __future__ import annotations

import re

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import (
    Assumed,
    Constant,
    Fields,
    Value,
    count,
    number,
    optional_count,
    switch,
    word,
)
from autoplan.frameworks.megatron_lm.notation import expert_pattern
from autoplan.frameworks.megatron_lm.table import BRIDGE, Line, Reading, Special, switches, valued
from autoplan.readers.model import find_preset
from autoplan.spec.blocks import Block
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile

# -- sizes of the model -----------------------------------------------------------------------------------------------


def _write_ffn(file: PlanFile) -> dict[str, Value]:
    model = file.model
    return {"ffn_hidden_size": model.ffn_size or (model.moe.expert_ffn_size if model.moe else 0)}


def is_gated(reading: Reading) -> bool:
    """Return whether MLPs have a gate."""
    gated = reading.arguments.flag("swiglu", reading.model.gated_mlp if reading.model else False)
    return gated or reading.arguments.flag("quick_geglu")


def _read_ffn(reading: Reading) -> Fields:
    model, hidden = reading.model, reading.fields["hidden_size"]
    size = reading.arguments.optional_count("ffn_hidden_size", model.ffn_size or None if model else None)
    if size is None and (model is None or model.moe is None):
        size = 4 * hidden if not is_gated(reading) else int(4 * hidden * 2 / 3 / 64) * 64
    return {"ffn_size": size or 0}


def _write_vocabulary(file: PlanFile) -> dict[str, Value]:
    return {"vocab_size": file.model.vocab_size}


def _write_positions(file: PlanFile) -> dict[str, Value]:
    return {"max_position_embeddings": max(file.training.seq_len, file.model.max_positions)}


def _read_positions(reading: Reading) -> Fields:
    positions = reading.model.max_positions or None if reading.model else None
    return {"max_positions": reading.arguments.optional_count("max_position_embeddings", positions) or reading.seq_len}


# Vocabulary sizes of tokenizers by name, from the published models that they come from.
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def _read_vocabulary(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    size = arguments.optional_count("vocab_size")
    padded = arguments.optional_count("padded_vocab_size")
    if size or padded or base:  # then the tokenizer does not matter
        return {"vocab_size": size or padded or (base.vocab_size if base else 0)}
    model_option = arguments.arguments.get("tokenizer_model")
    tokenizer_model = model_option.value if model_option else arguments.defaults.get("tokenizer_model")
    if preset := find_preset(str(tokenizer_model)):
        arguments.remark("tokenizer_model", f"its vocabulary is assumed to be that of {preset.name}", matters=False)
        return {"vocab_size": preset.vocab_size}
    tokenizer = arguments.text("tokenizer_type")
    if tokenizer is None and "vocab_file" in arguments.arguments and "merge_file" in arguments.arguments:
        tokenizer = "GPT2BPETokenizer"
    if tokenizer in _VOCABULARIES:
        size = _VOCABULARIES[tokenizer]
        key = "tokenizer_type" if "tokenizer_type" in arguments.arguments else "vocab_file"
        arguments.remark(key, f"its vocabulary is taken as {size:,} tokens: pass --model if it differs")
        return {"vocab_size": size}
    raise InputError("the size of the vocabulary is not in the file: pass --model")


# fmt: off
SIZES: tuple[Line, ...] = (
    (count("num_layers", "model.num_layers"), count("hidden_size", "model.hidden_size")),
    (Special("ffn_hidden_size", _write_ffn, _read_ffn), count("num_attention_heads", "model.num_heads")),
    (
        Constant("seq_length", lambda file: file.training.seq_len, names={BRIDGE: "dataset."}),
        Special("max_position_embeddings", _write_positions, _read_positions),
    ),
    (
        Special("vocab_size", _write_vocabulary, _read_vocabulary, names={BRIDGE: "tokenizer."},
                companions=valued("padded_vocab_size", "tokenizer_type", "tokenizer_model")),
        Assumed("make_vocab_size_divisible_by", (128,), "priced with a vocabulary padded to multiples of 128",
                lambda file: file.framework.memory.pads_vocab_to),
    ),
)
# fmt: on

# -- attention --------------------------------------------------------------------------------------------------------


def _write_groups(file: PlanFile) -> dict[str, Value]:
    model = file.model
    grouped = model.kv_heads != model.num_heads
    return {"group_query_attention": True, "num_query_groups": model.kv_heads} if grouped else {}


def _read_groups(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    if reading.fields["mla"]:
        return {"num_kv_heads": None}
    if arguments.text("attention_head_type") == "multiquery":  # of bigcode-project/Megatron-LM 182df0c
        return {"num_kv_heads": 1}
    groups = arguments.optional_count("num_query_groups", base.num_kv_heads if base else None)
    # The number counts only if the switch is on; only the command line has a separate option for the switch.
    grouped = arguments.flag("group_query_attention", groups is not None and bool(base or arguments.defaults))
    return {"num_kv_heads": groups if grouped and groups != reading.fields["num_heads"] else None}


def _read_head_dim(reading: Reading) -> Fields:
    head_dim = reading.arguments.optional_count("kv_channels", reading.model.head_dim if reading.model else None)
    usual = (head_dim or 0) * reading.fields["num_heads"] == reading.fields["hidden_size"]
    return {"head_dim": None if reading.fields["mla"] or usual else head_dim}


def _read_qk_norm(reading: Reading) -> Fields:
    normed = reading.arguments.flag("qk_layernorm", bool(reading.model and reading.model.qk_norm != "none"))
    return {"qk_norm": "head" if normed and not reading.fields["mla"] else "none"}


# fmt: off
ATTENTION: tuple[Line, ...] = (
    (Special("group_query_attention", _write_groups, _read_groups, is_switch=True,
             companions=valued("num_query_groups")),),
    (Special("kv_channels", lambda file: {"kv_channels": file.model.head_dim}, _read_head_dim),),
    (Special("qk_layernorm", lambda file: {"qk_layernorm": file.model.qk_norm == "head"}, _read_qk_norm,
             is_switch=True),),
)
# fmt: on


def _write_latent(file: PlanFile) -> dict[str, Value]:
    """Write that latents are normalised; kv_channels is unused, but must not be derived from hidden_size."""
    return {"multi_latent_attention": True, "qk_layernorm": True, "kv_channels": file.model.v_head_dim}


def _write_plain_rope(file: PlanFile) -> dict[str, Value]:
    """Write YaRN as the rotation: it is the only fused one for latent attention."""
    return {"rope_type": "yarn", "rotary_scaling_factor": "1.0"} if file.model.position_embedding == "rope" else {}


# fmt: off
LATENT: tuple[Line, ...] = (
    (Special("multi_latent_attention", _write_latent, is_switch=True),),
    (optional_count("q_lora_rank", "model.mla.q_lora_rank"),),
    (count("kv_lora_rank", "model.mla.kv_lora_rank", 32), count("qk_head_dim", "model.mla.qk_nope_head_dim", 128)),
    (count("qk_pos_emb_head_dim", "model.mla.qk_rope_head_dim", 64), count("v_head_dim", "model.mla.v_head_dim", 128)),
)
# fmt: on
LATENT_ROPE: Line = (Special("rope_type", _write_plain_rope),)


def _read_window(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    value = arguments.value("window_size")
    numbers = [int(number) for number in re.findall(r"-?\d{1,9}", str(value))] if value is not None else []
    window = base.window if base and value is None else None
    if numbers:
        window = numbers[0] + 1 if numbers[0] >= 0 else None
    interval = arguments.value("window_attn_skip_freq", base.full_attention_interval if base and window else 0)
    if window is None or interval is None:
        return {"window": window, "full_attention_interval": 0}
    if not isinstance(interval, int) and not (isinstance(interval, str) and interval.isdigit()):
        raise InputError(f"{arguments.name('window_attn_skip_freq')} is a pattern: pass --model")
    return {"window": window, "full_attention_interval": int(interval)}


def _write_window(file: PlanFile) -> dict[str, Value]:
    """Write the number of tokens to the left of a token, without the token itself."""
    return {"window_size": f"{file.model.window - 1},0"} if file.model.window is not None else {}


def _write_full_attention(file: PlanFile) -> dict[str, Value]:
    interval = file.model.full_attention_interval
    return {"window_attn_skip_freq": interval} if file.model.window is not None and interval else {}


# fmt: off
WINDOW: tuple[Line, ...] = (
    (Special("window_size", _write_window, _read_window),),
    (Special("window_attn_skip_freq", _write_full_attention),),
    (word("softmax_type", "model.attention_sinks", False,
          meanings={"learnable": True, "off-by-one": True, "vanilla": False},
          when=lambda file: file.model.attention_sinks),),
)
# fmt: on

# -- form of the blocks -----------------------------------------------------------------------------------------------

_POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none", "alibi": "none"}


def _write_clamp(file: PlanFile) -> dict[str, Value]:
    """Write the activation of GPT-OSS, gated quick GELU with an offset, the only one that Megatron-LM clamps."""
    if not file.model.clamped_activation:
        return {}
    return {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}


def _read_clamp(reading: Reading) -> Fields:
    clamp = reading.arguments.value("activation_func_clamp_value")
    return {"clamped_activation": bool(reading.model and reading.model.clamped_activation) or clamp is not None}


def _has_rope(file: PlanFile) -> bool:
    return file.model.position_embedding == "rope"


def _write_position_kind(file: PlanFile) -> dict[str, Value]:
    return {"position_embedding_type": _POSITIONS[file.model.position_embedding]}


def _read_position_kind(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    kind = arguments.text(
        "position_embedding_type", _POSITIONS[base.position_embedding] if base else "learned_absolute"
    )
    if arguments.flag("use_rotary_position_embeddings"):
        kind = "rope"
    rotary = dict.fromkeys(("rope", "yarn", "rotary"), "rope")  # "rotary" and "alibi": forks that use DeepSpeed
    kinds = rotary | {"learned_absolute": "learned", "absolute": "learned", "alibi": "alibi", "none": "none"}
    if kind not in kinds:
        option = arguments.name("position_embedding_type")
        raise InputError(f"{option} {str(kind)[:30]!r} is not known: pass --model")
    return {"position_embedding": kinds[kind]}


def has_bias(model: ModelSpec) -> bool | None:
    """Return whether the linear layers have biases: one switch in Megatron-LM, with an exception only for qkv."""
    if model.mlp_bias and model.attention_output_bias and model.qkv_bias:
        return True
    return None if model.mlp_bias or model.attention_output_bias else False


def _write_bias(file: PlanFile) -> dict[str, Value]:
    return {} if has_bias(file.model) else {"disable_bias_linear": True, "add_qkv_bias": file.model.qkv_bias}


def _read_bias(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    bias = arguments.flag("add_bias_linear", base.mlp_bias if base else True)
    qkv_bias = bias or arguments.flag("add_qkv_bias", base.qkv_bias if base else False)
    return {"mlp_bias": bias, "attention_output_bias": bias, "qkv_bias": qkv_bias}


# fmt: off
FORM: tuple[Line, ...] = (
    (
        Special("position_embedding_type", _write_position_kind, _read_position_kind,
                companions=switches("use_rotary_position_embeddings")),
        number("rotary_base", "model.rope_base", 10000.0, when=_has_rope),
    ),
    (word("normalization", "model.norm", "layernorm", meanings={"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}),),
    (
        # Without the switch an MLP uses GELU; the activation does not change any shape.
        Special("swiglu", lambda file: {"swiglu": file.model.gated_mlp and not file.model.clamped_activation},
                lambda reading: {"gated_mlp": is_gated(reading)}, names={BRIDGE: "model.gated_linear_unit"},
                companions=switches("quick_geglu", "openai_gelu"), is_switch=True),
        Special("activation_func_clamp_value", _write_clamp, _read_clamp, companions=valued("glu_linear_offset")),
        switch("squared_relu", "model.squared_relu"),
    ),
    (Special("add_bias_linear", _write_bias, _read_bias, companions=switches("add_qkv_bias")),),
    (switch("untie_embeddings_and_output_weights", "model.tied_embeddings", True, on=False, off=True),),
    (count("mtp_num_layers", "model.num_mtp_layers", 0, when=lambda file: file.model.num_mtp_layers > 0),),
)
# fmt: on


_DROPOUTS = ("hidden_dropout", "attention_dropout")
_DROPOUT = 0.1  # training/arguments.py, default of both


def _write_dropout(file: PlanFile) -> dict[str, Value]:
    return dict.fromkeys(_DROPOUTS[::-1], str(_DROPOUT if file.best.plan.dropout else 0.0))


def _read_dropout(reading: Reading) -> Fields:
    rates = {key: reading.arguments.number(key, _DROPOUT) for key in _DROPOUTS}
    kept = [key for key, rate in rates.items() if rate == 0]
    if len(kept) == 1:
        reading.arguments.remark(kept[0], "priced with dropout of scores and hidden states: keep it", matters=False)
    return {"dropout": len(kept) < len(rates)}


DROPOUT: Line = (Special("hidden_dropout", _write_dropout, _read_dropout, companions=valued("attention_dropout")),)

# -- experts ----------------------------------------------------------------------------------------------------------


def _write_places(file: PlanFile) -> dict[str, Value]:
    has_experts_everywhere = all(Block.MOE in layer for layer in file.model.layers)
    return {} if has_experts_everywhere else {"moe_layer_freq": expert_pattern(file.model)}


def _has_shared_expert(file: PlanFile) -> bool:
    return file.model.moe is not None and file.model.moe.shared_expert_ffn_size > 0


def _pads_tokens(file: PlanFile) -> bool:
    """Return whether the counts of tokens per expert must be padded for products in a narrow format."""
    return file.best.plan.precision in ("fp8", "mxfp8", "nvfp4")


def _chooses_one(file: PlanFile) -> bool:
    """Return whether a token has a single expert, which core/transformer/transformer_config.py:2669 checks."""
    return file.model.moe is not None and file.model.moe.experts_per_token == 1


GROUPED = Assumed("moe_grouped_gemm", (True,), "priced with grouped products of the experts", True, is_switch=True)
FUSED_PERMUTE = Assumed("moe_permute_fusion", (True,), "priced with a fused permutation", True, is_switch=True)
# fmt: off
EXPERTS: tuple[Line, ...] = (
    (
        count("num_experts", "model.moe.num_experts", names={BRIDGE: "model.num_moe_experts"}),
        count("moe_router_topk", "model.moe.experts_per_token", 2),
    ),
    (optional_count("moe_ffn_hidden_size", "model.moe.expert_ffn_size"),),
    (Special("moe_layer_freq", _write_places),),
    (
        count("moe_shared_expert_intermediate_size", "model.moe.shared_expert_ffn_size", 0, when=_has_shared_expert),
        switch("moe_shared_expert_gate", "model.moe.shared_expert_gate", when=_has_shared_expert),
    ),
    (optional_count("moe_latent_size", "model.moe.latent_size"),),
    (GROUPED, FUSED_PERMUTE),
    (Constant("moe_router_load_balancing_type", "aux_loss"), Constant("moe_aux_loss_coeff", "1e-2")),
    (
        Constant("moe_router_dtype", "fp32"),
        Constant("moe_router_pre_softmax", _chooses_one),
        Assumed("moe_router_padding_for_quantization", write=_pads_tokens),
    ),
)
# fmt: on

ARCHITECTURE: tuple[Line, ...] = (*SIZES, *ATTENTION, *LATENT, *WINDOW, *FORM, *EXPERTS)
