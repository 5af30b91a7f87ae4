"""Is a Hugging Face config.json read as transformers reads it, and refused in one line where it cannot be?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.files import read_table, shipped
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.readers.config_keys import Keys, key_table
from autoplan.readers.huggingface import model_types, read_huggingface
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Block
from autoplan.spec.model import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 18,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 6,
}
MOE: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
DELTA: dict[str, Any] = {
    "head_dim": 20,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 5,
}
HYBRID: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp", "moe"],
    "head_dim": 24,
    "ssm_state_size": 20,
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "n_groups": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 52,
    "moe_shared_expert_intermediate_size": 104,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 24, "mamba_d_state": 20, "mamba_n_groups": 4}
ENCODERS = (
    *("camembert", "data2vec-text", "ernie", "ibert", "megatron-bert", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl"),
)

INDEXER: dict[str, Any] = {**DEEPSEEK, "index_head_dim": 14, "index_n_heads": 5}
DECODER: dict[str, Any] = {
    **{"d_model": 96, "decoder_layers": 5, "decoder_attention_heads": 6, "decoder_ffn_dim": 136},
    **{"decoder_layerdrop": 0.0, "max_position_embeddings": 72, "architectures": True},
}
DECODERS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "mvp",
    "pegasus",
    "plbart",
    "trocr",
)
WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
WINDOWED: dict[str, Any] = {
    **{"sliding_window": 32, "layer_types": WINDOWS, "num_hidden_layers": 5, "head_dim": 20},
    **{"mlp_layer_types": ["dense", *["sparse"] * 4], "num_experts": 6, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 40, "shared_expert_intermediate_size": 44},
}
# Heads of another width in the layers that see all, as transformers writes what differs between layers.
WIDER: dict[str, Any] = {
    "head_dim": 20,
    "global_head_dim": 28,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}

SHARED_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
BESIDE_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
HYBRID_LAYERS = ["linear_attention", "linear_attention", "full_attention"] * 2

# (name of the case, model_type, what differs from SIZES).  Odd sizes, so that no two terms can stand in for each other.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("llama, head_dim and biases", "llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    ("llama, tied", "llama", {"tie_word_embeddings": True, "num_key_value_heads": None}),
    ("internlm3", "internlm3", {"head_dim": 16}),
    ("mistral", "mistral", {"sliding_window": 64, "head_dim": 20}),
    ("mistral, no window", "mistral", {"sliding_window": None}),
    ("mixtral", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("phi3", "phi3", {"sliding_window": 47}),
    ("olmo2", "olmo2", {}),
    ("olmo2, biases", "olmo2", {"attention_bias": True}),
    ("olmoe", "olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    ("qwen2", "qwen2", {}),
    (
        "qwen2, tied, windowed",
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 0},
    ),
    (
        "qwen2_moe",
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 88,
        },
    ),
    (
        "qwen2_moe, sparse",
        "qwen2_moe",
        {"num_experts": 6, "moe_intermediate_size": 40, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1]},
    ),
    ("qwen3", "qwen3", {"head_dim": 28}),
    ("qwen3, biases", "qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    (
        "qwen3_moe",
        "qwen3_moe",
        {"head_dim": 28, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    (
        "qwen3_moe, sparse",
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 3, "attention_bias": True},
    ),
    ("deepseek_v2", "deepseek_v2", DEEPSEEK),
    ("deepseek_v2, full-rank queries", "deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek_v3", "deepseek_v3", DEEPSEEK),
    ("deepseek_v3, tied", "deepseek_v3", {**DEEPSEEK, "tie_word_embeddings": True, "n_shared_experts": 1}),
    ("glm4_moe", "glm4_moe", {**DEEPSEEK, "num_key_value_heads": 3, "head_dim": 20, "use_qk_norm": True}),
    ("glm4_moe, biases", "glm4_moe", {**DEEPSEEK, "attention_bias": True, "head_dim": 20}),
    ("sarvam_moe", "sarvam_moe", {**DEEPSEEK, "num_key_value_heads": 3, "head_dim": 20}),
    ("gpt_oss", "gpt_oss", {"num_local_experts": 6, "head_dim": 20, "sliding_window": 32}),
    ("gemma", "gemma", {"head_dim": 24}),
    ("gemma2", "gemma2", {"head_dim": 24, "sliding_window": 32}),
    ("gemma3_text", "gemma3_text", {"head_dim": 24, "sliding_window": 32}),
    ("nemotron", "nemotron", {"head_dim": 24}),
    ("nemotron, biases", "nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("nemotron_h", "nemotron_h", HYBRID),
    ("nemotron_h, latent experts", "nemotron_h", {**HYBRID, "moe_latent_size": 36, "use_bias": True}),
    ("nemotron_h, dense", "nemotron_h", {**HYBRID, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    ("llama4_text", "llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 152, "head_dim": 20}),
    ("llama4_text, every second layer", "llama4_text", {"num_local_experts": 4, "interleave_moe_layer_step": 2}),
    ("gpt2", "gpt2", {"n_positions": 72}),
    ("gpt2, n_inner", "gpt2", {"n_positions": 72, "n_inner": 200, "tie_word_embeddings": False}),
    ("gpt_neox", "gpt_neox", {}),
    ("gpt_neox, no attention bias", "gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("opt", "opt", {"ffn_dim": 136, "max_position_embeddings": 72}),
    ("opt, no biases", "opt", {"ffn_dim": 136, "max_position_embeddings": 72, "enable_bias": False}),
    ("bloom", "bloom", {}),
    ("mpt", "mpt", {}),
    ("arcee", "arcee", {"attention_bias": True}),
    ("dots1", "dots1", DEEPSEEK),
    ("ernie4_5", "ernie4_5", {"head_dim": 20, "use_bias": True}),
    (
        "ernie4_5_moe",
        "ernie4_5_moe",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 3},
            **{"moe_layer_start_index": 2, "moe_layer_end_index": 5},
        },
    ),
    ("exaone", "exaone", {"mlp_bias": True}),
    ("exaone4", "exaone4", {"sliding_window": 32}),
    (
        "exaone_moe",
        "exaone_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_shared_experts": 2},
    ),
    ("flex_olmo", "flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    ("glm", "glm", {"head_dim": 20}),
    ("glm4", "glm4", {"head_dim": 20}),
    ("glm4_moe_lite", "glm4_moe_lite", {**DEEPSEEK, "first_k_dense_replace": 1}),
    ("gpt_bigcode", "gpt_bigcode", {"n_positions": 72}),
    ("granite", "granite", {"attention_bias": True}),
    ("granitemoe", "granitemoe", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("granitemoeshared", "granitemoeshared", {"num_local_experts": 5, "shared_intermediate_size": 44}),
    ("hunyuan_v1_dense", "hunyuan_v1_dense", {"head_dim": 20}),
    ("hunyuan_v1_moe", "hunyuan_v1_moe", {"head_dim": 20, "num_experts": 5, "moe_topk": 2}),
    ("hyperclovax", "hyperclovax", {"head_dim": 20}),
    ("iquestcoder", "iquestcoder", {"head_dim": 20}),
    ("jais2", "jais2", {"head_dim": 20}),
    ("mellum", "mellum", {**MOE, "head_dim": 20, "moe_intermediate_size": 40}),
    ("minicpm3", "minicpm3", {key: DEEPSEEK[key] for key in DEEPSEEK if "_lora_" in key or "_head_dim" in key}),
    ("minimax_m2", "minimax_m2", {**MOE, "head_dim": 20}),
    ("ministral", "ministral", {"head_dim": 20, "sliding_window": 64}),
    ("ministral3", "ministral3", {"head_dim": 20}),
    ("olmo3", "olmo3", {"attention_bias": True, "sliding_window": 32, "num_hidden_layers": 8}),
    ("phimoe", "phimoe", {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True}),
    ("seed_oss", "seed_oss", {"head_dim": 20}),
    ("smollm3", "smollm3", {}),
    ("stablelm", "stablelm", {"use_qkv_bias": True}),
    ("vaultgemma", "vaultgemma", {"head_dim": 20}),
    ("youtu", "youtu", {key: DEEPSEEK[key] for key in DEEPSEEK if "_lora_" in key or "_head_dim" in key}),
    ("qwen3_next", "qwen3_next", {**MOE, **DELTA, "num_experts": 6, "shared_expert_intermediate_size": 44}),
    ("qwen3_next, biases", "qwen3_next", {**MOE, **DELTA, "num_experts": 6, "attention_bias": True}),
    ("qwen3_5_text", "qwen3_5_text", {**DELTA, "num_hidden_layers": 8}),
    ("qwen3_5_moe_text", "qwen3_5_moe_text", {**MOE, **DELTA, "num_experts": 6, "moe_intermediate_size": 40}),
    ("starcoder2", "starcoder2", {}),
    ("starcoder2, no biases", "starcoder2", {"use_bias": False, "tie_word_embeddings": False, "sliding_window": 16}),
    ("bert", "bert", {"max_position_embeddings": 72, "type_vocab_size": 3}),
    ("bert, decoder", "bert", {"is_decoder": True}),
    *((kind, kind, {"max_position_embeddings": 72}) for kind in ENCODERS),
    ("bert-generation", "bert-generation", {"max_position_embeddings": 72}),
    ("gptj", "gptj", {"n_inner": 200}),
    ("codegen", "codegen", {}),
    ("phi", "phi", {}),
    ("cohere", "cohere", {"attention_bias": True}),
    ("cohere2", "cohere2", {"num_hidden_layers": 8}),
    ("falcon", "falcon", {"bias": True}),
    ("apertus", "apertus", {"attention_bias": True}),
    ("aria_text", "aria_text", {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 3}),
    ("biogpt", "biogpt", {"max_position_embeddings": 72}),
    ("ctrl", "ctrl", {"dff": 136}),
    ("cwm", "cwm", {"head_dim": 20, "num_hidden_layers": 9}),
    ("gpt_neo", "gpt_neo", {"num_layers": 6, "attention_types": [[["global", "local"], 3]]}),
    ("granite_swa", "granite_swa", {"attention_bias": True}),
    ("granitemoe_swa", "granitemoe_swa", {"num_local_experts": 5}),
    ("helium", "helium", {"head_dim": 16}),
    ("hy_v3", "hy_v3", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 20}),
    ("kolibri1", "kolibri1", {**MOE, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 44}),
    ("nanochat", "nanochat", {}),
    ("olmo", "olmo", {"attention_bias": True}),
    ("openai-gpt", "openai-gpt", {"n_positions": 72}),
    ("persimmon", "persimmon", {}),
    ("solar_open", "solar_open", {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}),
    (
        "afmoe",
        "afmoe",
        {**MOE, "num_experts": 6, "moe_intermediate_size": 40, "num_shared_experts": 2, "head_dim": 20},
    ),
    ("xglm", "xglm", {"ffn_dim": 136}),
    ("glm4_moe, heads of another width", "glm4_moe", {**DEEPSEEK, "num_attention_heads": 9, "num_key_value_heads": 3}),
    ("mistral4", "mistral4", DEEPSEEK),
    ("sarvam_mla", "sarvam_mla", {**DEEPSEEK, "q_lora_rank": None}),
    ("mamba2", "mamba2", {"num_heads": 12, "head_dim": 16, "state_size": 20, "n_groups": 4, "use_bias": True}),
    ("bamba", "bamba", {**MAMBA, "attn_layer_indices": [1, 4]}),
    ("bamba, biases", "bamba", {**MAMBA, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
    ("granitemoehybrid", "granitemoehybrid", {**MAMBA, **MOE, "layer_types": HYBRID_LAYERS}),
    ("granitemoehybrid, no experts", "granitemoehybrid", {**MAMBA, "num_local_experts": 0}),
    ("cohere2_moe", "cohere2_moe", {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 20}),
    ("olmo_hybrid", "olmo_hybrid", {**{key: DELTA[key] for key in DELTA if key != "head_dim"}, "num_hidden_layers": 8}),
    ("apertus1p5_text", "apertus1p5_text", {}),
    ("distilbert", "distilbert", {"dim": 96, "n_heads": 6, "n_layers": 6, "hidden_dim": 136}),
    ("eurobert", "eurobert", {"head_dim": 16, "attention_bias": True}),
    ("nomic_bert", "nomic_bert", {"head_dim": 16, "pad_token_id": 0}),
    ("xlm", "xlm", {"emb_dim": 96, "n_heads": 6, "n_layers": 6}),
    ("flaubert", "flaubert", {"emb_dim": 96, "n_heads": 6, "n_layers": 6}),
    (
        "kimi_linear, in an irregular order",
        "kimi_linear",
        {
            **{key: DEEPSEEK[key] for key in DEEPSEEK if key not in ("q_lora_rank", "n_group", "topk_group")},
            **{"num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 2, "linear_head_dim": 20},
            **{"linear_num_heads": 3, "linear_conv_kernel_dim": 5},
            "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 3, "full_attention"],
            "mlp_layer_types": ["dense", *["sparse"] * 5],
        },
    ),
    (
        "flint",
        "flint",
        {
            **{"num_experts": 6, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 44, "head_dim": 20},
            "layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
        },
    ),
    ("electra", "electra", {"embedding_size": 40}),
    ("electra, as wide", "electra", {"embedding_size": 96}),
    ("albert", "albert", {"embedding_size": 40}),
    ("mamba", "mamba", {"state_size": 20, "time_step_rank": 14, "expand": 3, "use_bias": True}),
    ("falcon_mamba", "falcon_mamba", {"state_size": 20, "time_step_rank": 14}),
    ("lfm2", "lfm2", {"layer_types": ["conv", "conv", "full_attention"] * 2, "conv_L_cache": 5}),
    *((kind, kind, DECODER) for kind in DECODERS),
    ("deepseek_v32", "deepseek_v32", INDEXER),
    ("glm_moe_dsa", "glm_moe_dsa", INDEXER),
    ("axk1", "axk1", DEEPSEEK),
    ("axk2", "axk2", {**INDEXER, "gated_norm_rank": 7}),
    (
        "bailing_hybrid",
        "bailing_hybrid",
        {
            **{key: DEEPSEEK[key] for key in DEEPSEEK if key not in ("q_lora_rank", "topk_group")},
            **{"num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 2, "linear_head_dim": 20},
            **{"linear_num_heads": 3, "layer_group_size": 3, "num_expert_group": 2, "topk_group": 1},
        },
    ),
    ("beam", "beam", {**WINDOWED, "n_group": 1, "topk_group": 1}),
    ("big_bird", "big_bird", {"max_position_embeddings": 72}),
    ("bitnet", "bitnet", {}),
    ("cpmant", "cpmant", {"dim_head": 20, "dim_ff": 136, "prompt_types": 5, "prompt_length": 7, "segment_types": 6}),
    ("diffllama", "diffllama", {"head_dim": 16, "num_key_value_heads": 6}),
    ("doge", "doge", {}),
    (
        "dots3_note_text",
        "dots3_note_text",
        {
            **{**INDEXER, "head_dim": 32, "n_group": 1, "num_hidden_layers": 3},
            **{"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"]},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "num_attention_heads": 6},
            "per_layer_config": {1: {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 28}},
        },
    ),
    (
        "falcon_h1",
        "falcon_h1",
        {"mamba_d_ssm": 80, "mamba_n_heads": 8, "mamba_d_head": 10, "mamba_d_state": 20, "head_dim": 20},
    ),
    ("gemma4_text", "gemma4_text", {**WIDER, "vocab_size_per_layer_input": 77, "hidden_size_per_layer_input": 14}),
    ("gemma4_text-values", "gemma4_text", {**WIDER, "hidden_size_per_layer_input": 0, **SHARED_VALUES}),
    (
        "gemma4_text-experts",
        "gemma4_text",
        {**WIDER, "hidden_size_per_layer_input": 0, **SHARED_VALUES, **BESIDE_EXPERTS},
    ),
    ("gemma4_unified_text", "gemma4_unified_text", WIDER),
    (
        "inkling_text",
        "inkling_text",
        {
            **{"layer_types": ["hybrid_sliding", "hybrid"] * 3, "mlp_layer_types": ["sparse"] * 6, "head_dim": 20},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 14, "d_rel": 7},
            **{"sliding_window_size": 32, "rel_extent": 40, "moe_intermediate_size": 40, "n_routed_experts": 6},
            "n_shared_experts": 3,
        },
    ),
    ("jetmoe", "jetmoe", {"kv_channels": 20, "num_attention_heads": 4, **MOE}),
    ("laguna", "laguna", {**WINDOWED, "num_attention_heads_per_layer": [6] * 5}),
    (
        "lara_mini",
        "lara_mini",
        {**WINDOWED, **DELTA, "layer_types": ["linear_attention", *WINDOWS[1:]], "mlp_layer_types": None},
    ),
    ("lfm3", "lfm3", {**WINDOWED, "layer_types": ["conv", *WINDOWS[1:]], "conv_L_cache": 5}),
    (
        "longcat_flash",
        "longcat_flash",
        {
            **{key: DEEPSEEK[key] for key in DEEPSEEK if "_lora_" in key or "_head_dim" in key},
            **{"num_layers": 3, "ffn_hidden_size": 136, "expert_ffn_hidden_size": 44, "n_routed_experts": 8},
            **{"zero_expert_num": 4, "moe_topk": 3, "num_key_value_heads": 6},
        },
    ),
    ("mimo_v2_flash", "mimo_v2_flash", {**WINDOWED, "num_key_value_heads": 3, "n_routed_experts": 6, "v_head_dim": 14}),
    ("minimax", "minimax", {**MOE, "head_dim": 20}),
    ("minimax_m3_vl_text", "minimax_m3_vl_text", {**MOE, "head_dim": 20, "dense_intermediate_size": 88}),
    ("moshi", "moshi", {"ffn_dim": 272, "head_dim": 16, "num_key_value_heads": 6}),
    ("recurrent_gemma", "recurrent_gemma", {"num_hidden_layers": 7, "lru_width": 96, "head_dim": 16}),
    ("rembert", "rembert", {"input_embedding_size": 40, "output_embedding_size": 112}),
    ("roc_bert", "roc_bert", {"pronunciation_embed_dim": 50, "shape_embed_dim": 44, "shape_vocab_size": 70}),
    ("rwkv", "rwkv", {"attention_hidden_size": 96}),
    ("xlstm", "xlstm", {"num_heads": 4, "num_blocks": 6, "hidden_size": 128}),
    ("xmod", "xmod", {"languages": ["en_XX", "de_DE", "fr_XX"]}),
    ("deberta", "deberta", {"max_position_embeddings": 72, "type_vocab_size": 3}),
    (
        "deberta, by position",
        "deberta",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
    ),
    ("deberta-v2", "deberta-v2", {"max_position_embeddings": 72}),
    (
        "deberta-v2, by position",
        "deberta-v2",
        {
            **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
            **{"position_buckets": 20, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        },
    ),
    ("layoutlm", "layoutlm", {"max_2d_position_embeddings": 88}),
    ("luke", "luke", {"entity_vocab_size": 70, "entity_emb_size": 40}),
    ("jina_embeddings_v3", "jina_embeddings_v3", {"num_key_value_heads": 6}),
    ("tapas", "tapas", {"type_vocab_sizes": [3, 7, 5, 2, 9, 8, 4]}),
    ("esmc", "esmc", {"num_key_value_heads": 6}),
    ("ultrabert", "ultrabert", {"prediction_head_size": 40}),
    ("longformer", "longformer", {"attention_window": 32}),
    ("convbert", "convbert", {"embedding_size": 96, "conv_kernel_size": 7}),
    ("fnet", "fnet", {"max_position_embeddings": 72}),
    (
        "squeezebert",
        "squeezebert",
        {"embedding_size": 96, **dict.fromkeys(("q_groups", "k_groups", "v_groups"), 2)}
        | dict.fromkeys(("intermediate_groups", "output_groups"), 2),
    ),
    ("mra", "mra", {"max_position_embeddings": 72}),
    ("nystromformer", "nystromformer", {"num_landmarks": 16, "conv_kernel_size": 15}),
    ("yoso", "yoso", {"max_position_embeddings": 72}),
    (
        "zaya",
        "zaya",
        {
            **{"num_experts": 6, "moe_intermediate_size": 40, "router_hidden_size": 26, "head_dim": 20},
            **{"cca_time0": 2, "cca_time1": 3},
        },
    ),
    ("lfm2, as wide as said", "lfm2", {"full_attn_idxs": [1, 4], "block_auto_adjust_ff_dim": False}),
]
# Types of which a few parameters are not counted as they are, in sizes at which they do not count.
ROUNDED: list[tuple[str, dict[str, Any]]] = [
    ("modernbert", {}),
    ("modernbert-decoder", {}),
    ("gpt_neox_japanese", {}),
    ("roformer", {}),
    ("gte", {}),
    ("jamba", {}),
    ("xlnet", {}),
    ("mpnet", {}),
    ("esm", {"vocab_size": 33, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 32}),
]
# kimi_k2 has the keys and the classes of deepseek_v3 and no class of its own; text models of vision-language ones have
# no class that heads them for causal language modelling alone.
NOT_BUILT = {
    *("fsmt", "m2m_100", "mt5", "t5", "t5gemma", "umt5", "whisper", "led", "longt5", "pegasus_x", "mimo"),
    *("seamless_m4t", "seamless_m4t_v2", "t5gemma2", "florence2"),
    *(
        "switch_transformers",
        "nllb-moe",
        "encoder-decoder",
        "vision-encoder-decoder",
    ),  # which test_encoder_decoders.py compares
    *("kimi_k2", "emu3_text_model"),
    *("cosmos3_edge_text", "glm_ocr_text", "granite_docling_text", "molmo2_text", "paddleocr_vl_text"),
    *("qwen2_5_omni_text", "qwen3_omni_moe_text"),
    *("glm4v_text", "glm4v_moe_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
    *("qwen2_5_vl", "qwen2_vl", "kosmos_2_text_model", "step3p5", "ernie4_5_vl_moe_text", "muse_glimmer_text"),
    *("mllama_text_model", "kosmos_2_5_text_model", "blip_text_model", "idefics", "voxtral_realtime_text"),
    *("pix2struct", "pp_formulanet", "udop"),  # which test_encoder_decoders.py compares
    *("git", "mistral_large4_text", "unlimited_ocr_text"),  # which test_vision.py compares
}


def as_json(table: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(table, default=str))
    return result


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def transformers_config(transformers: Any, kind: str, changes: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})


@pytest.mark.parametrize(("kind", "changes"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_parameters_equal_those_of_the_transformers_model(
    transformers: Any, kind: str, changes: dict[str, Any]
) -> None:
    import torch

    names_class = changes.get("architectures", False)
    config = transformers_config(transformers, kind, {key: changes[key] for key in changes if key != "architectures"})
    with torch.device("meta"):
        model = class_of(transformers, config).from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    table = as_json(config.to_dict())
    spec = read_huggingface(table | ({"architectures": [type(model).__name__]} if names_class else {}), kind)
    assert count_parameters(spec) == expected


def class_of(transformers: Any, config: Any) -> Any:
    """Return the class that heads a configuration's model: for causal language modelling where it has one."""
    names = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageTextToText")
    classes = [getattr(transformers, name) for name in names]
    return next(auto_class for auto_class in classes if type(config) in auto_class._model_mapping)


@pytest.mark.parametrize(("kind", "changes"), ROUNDED, ids=[kind for kind, _ in ROUNDED])
def test_parameters_of_default_sizes_are_within_a_thousandth(
    transformers: Any, kind: str, changes: dict[str, Any]
) -> None:
    import torch

    config = transformers.AutoConfig.for_model(kind, **changes)
    with torch.device("meta"):
        model = class_of(transformers, config).from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    spec = read_huggingface(as_json(config.to_dict()), kind)
    assert count_parameters(spec) == pytest.approx(expected, rel=1e-3)


def test_every_model_type_is_compared_with_transformers() -> None:
    assert {case[1] for case in CASES} | {kind for kind, _ in ROUNDED} | NOT_BUILT == set(model_types())


def test_refusals_name_the_part_that_is_not_covered() -> None:
    for kind, part in (("dory", "scales"), ("funnel", "shorten the sequence"), ("zamba2", "share their weights")):
        with pytest.raises(InputError, match=f"{kind}.*{part}.*not covered"):
            read_huggingface({"model_type": kind, "hidden_size": 64}, "model")
    for kind, part in (
        ("pop2piano", "relative attention bias"),
        ("prophetnet", "predicts ahead"),
        ("new", "cross attention"),
    ):
        with pytest.raises(InputError, match=f"{kind} has .*{part}.*not covered"):
            read_huggingface({"model_type": kind, "is_encoder_decoder": True}, "model")


def test_what_a_class_assumes_is_refused_where_a_file_leaves_it_out() -> None:
    """ESM's class assumes learned positions, and only rotary ones are described."""
    esm = {
        **{"model_type": "esm", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6},
        **{"intermediate_size": 136, "vocab_size": 33},
    }
    assert read_huggingface({**esm, "position_embedding_type": "rotary"}, "esm").bidirectional
    with pytest.raises(InputError, match="position_embedding_type = 'absolute' is not covered"):
        read_huggingface(esm, "esm")


def test_every_entry_takes_over_from_entries_that_there_are() -> None:
    table = key_table()
    for section in ("types", "encoder_types", "families"):
        for kind, entry in table[section].items():
            bases = entry.get("like", "").split()
            assert set(bases) <= {*table[section], *table["families"]}, kind


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("missing | width", 8),
        ("2 * (width + missing) | 3", 3),
        ("width // 3 * 2 - 1", 3),
        ("width // none", 0),
        ("sizes[1] * len(sizes) + outer.width", 17),
        ("width if switch else 2 * width", 16),
    ],
)
def test_expressions_of_keys_are_evaluated(expression: str, expected: int) -> None:
    config = {"width": 8, "none": 0, "sizes": [3, 4, 5], "outer": {"width": 5}, "switch": False}
    assert Keys(config=config, kind="test", rules={}).value("", "ffn_size", expression) == expected


@pytest.mark.parametrize("kind", ["led", "bigbird_pegasus", "pegasus_x", "nllb-moe", "bart"])
def test_an_encoder_has_sizes_that_differ_from_the_decoder(transformers: Any, kind: str) -> None:
    sizes = {"encoder_layers": 4, "decoder_layers": 8, "encoder_attention_heads": 8, "encoder_ffn_dim": 512}
    table = json.loads(json.dumps(transformers.AutoConfig.for_model(kind, **sizes).to_dict(), default=str))
    if kind == "led":
        table["attention_window"] = 256
    encoder = read_huggingface(table, "config.json").encoder
    assert encoder is not None
    assert (encoder.layers.num_layers, encoder.layers.num_heads, encoder.layers.ffn_size) == (4, 8, 512)


def test_mimo_is_qwen_2_with_a_prediction_layer() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36, "vocab_size": 151680}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_nextn_predict_layers": 1}
    spec = read_huggingface({"model_type": "mimo", **sizes, **heads}, "config.json")
    layer = 2 * 4096 * 4096 + 4096 + 2 * (4096 + 1) * 1024 + 3 * 4096 * 11008 + 2 * 4096
    assert count_parameters(spec) == 36 * layer + 2 * 151680 * 4096 + 4096
    assert spec.num_mtp_layers == 1


def test_nomic_files_of_both_spellings_are_read_alike() -> None:
    new = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 136}
    old = {"n_embd": 96, "n_layer": 2, "n_head": 6, "n_inner": 136, "qkv_proj_bias": False}
    new_spec, old_spec = (
        read_huggingface({"model_type": "nomic_bert", "vocab_size": 1000, **table}, "nomic") for table in (new, old)
    )
    assert new_spec == old_spec


@pytest.mark.parametrize(
    ("activation", "tensors"),
    [("relu", 0), ("gelu", 1), ("gelu_new", 4), ("mine", 1), ({"name": "relu"}, 1), (None, 1)],
)
def test_activations_keep_what_their_word_stands_for(activation: Any, tensors: int) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 6, "vocab_size": 128, "n_positions": 64}
    assert read_huggingface({**gpt2, "activation_function": activation}, "gpt2").activation_tensors == tensors
    assert read_huggingface(gpt2, "gpt2").activation_tensors == 4  # as the class assumes


def test_no_type_is_both_read_and_refused_for_a_part() -> None:
    assert not set(model_types()) & set(read_table(shipped()["huggingface"])["uncovered"])


def test_layers_in_an_irregular_order_are_a_pattern() -> None:
    """Kimi Linear's last layer sees all beside every fourth; its file counts layers from one."""
    config: dict[str, Any] = {  # huggingface.co/moonshotai/Kimi-Linear-48B-A3B-Instruct/blob/main/config.json
        **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304},
        **{"num_hidden_layers": 27, "num_attention_heads": 32, "intermediate_size": 9216, "vocab_size": 163840},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024},
        **{"first_k_dense_replace": 1, "tie_word_embeddings": False},
        "linear_attn_config": {
            **{"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32},
            "short_conv_kernel_size": 4,
        },
    }
    model = read_huggingface(config, "kimi-linear")
    assert model.layer_pattern == "L-LELE*E" + "LELELE*E" * 5 + "LELE*E"
    assert count_parameters(model) == pytest.approx(49.1e9, rel=0.002)
    assert count_parameters(model, active=True) == pytest.approx(3e9, rel=0.2)
    wrong = {**config["linear_attn_config"], "full_attn_layers": "all"}
    with pytest.raises(InputError, match=r"full_attn_layers must be a list of layer numbers, got 'all'"):
        read_huggingface({**config, "linear_attn_config": wrong}, "kimi-linear")


def test_layers_of_a_hybrid_with_a_feed_forward_block_each_are_two() -> None:
    config = {
        **{"model_type": "granitemoehybrid", "vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 6, "num_local_experts": 0, "shared_intermediate_size": 40},
        **{"mamba_n_heads": 8, "mamba_d_head": 24, "layer_types": ["mamba", "attention", "mamba"]},
    }
    assert read_huggingface(config, "small").layer_pattern == "M-*-M-"
    with pytest.raises(InputError, match="layer_types has 3 entries, the model has 4 layers"):
        read_huggingface({**config, "num_hidden_layers": 4}, "small")
    bamba = {**config, "model_type": "bamba", "attn_layer_indices": "all", "intermediate_size": 40}
    with pytest.raises(InputError, match="attn_layer_indices must be a list of layer numbers"):
        read_huggingface(bamba, "small")


@pytest.mark.parametrize(
    "kind",
    [
        "cohere2",
        "cwm",
        "exaone4",
        "gpt_oss",
        "granite_swa",
        "gemma2",
        "gemma3_text",
        "llama4_text",
        "mistral",
        "olmo3",
        "qwen3",
        "vaultgemma",
    ],
)
def test_windowed_layers_are_those_of_transformers(transformers: Any, kind: str) -> None:
    changes = {"num_hidden_layers": 13, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
    config = transformers_config(transformers, kind, changes)
    table = as_json(config.to_dict())
    layer_types = table.get("layer_types") or ["sliding_attention"] * 13
    expected = [
        Block.ATTENTION if layer_type == "full_attention" else Block.WINDOW_ATTENTION for layer_type in layer_types
    ]
    # As transformers writes it, and as older files leave the list out.
    for config_json in (table, {key: value for key, value in table.items() if key != "layer_types"}):
        spec = read_huggingface(config_json, kind)
        assert [layer[0] for layer in spec.layers] == expected


CHECKPOINTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data/checkpoints.json").read_text())[
    "checkpoints"
]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=[checkpoint["name"] for checkpoint in CHECKPOINTS])
def test_parameters_of_published_checkpoints(checkpoint: dict[str, Any]) -> None:
    spec = read_huggingface(checkpoint["config"], checkpoint["name"])
    with_mtp = checkpoint.get("with_mtp", False)
    # A prediction layer is published with copies of both embeddings.
    copies = 2 * spec.vocab_size * spec.hidden_size * with_mtp
    rel = 0.01 if checkpoint["source"] == "card" else 1e-4  # cards round
    assert count_parameters(spec, with_mtp=with_mtp) + copies == pytest.approx(checkpoint["parameters"], rel=rel)
    assert not spec.left_out


def test_sixty_checkpoints_are_compared() -> None:
    assert len({checkpoint["name"] for checkpoint in CHECKPOINTS}) >= 60


# ---- published files --------------------------------------------------------------------------------------------

LLAMA3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_theta": 150000,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "vocab_size": 163840,
}
# Only what the published text_config says: the class knows the rest.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
NEMOTRON_3_NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mlp_bias": False,
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
PUBLISHED = {
    "llama3-70b": LLAMA3_70B,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss-20b": GPT_OSS_20B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "kimi-k2": KIMI_K2,
    "gemma3-4b": GEMMA3_4B,
    "nemotron3-nano": NEMOTRON_3_NANO,
}


def architecture(spec: ModelSpec) -> ModelSpec:
    """The spec without what is not architecture, and with defaults spelled out."""
    head_dim = None if spec.mla else spec.qk_head_dim
    return replace(spec, name="x", left_out="", aliases=(), sources=(), num_kv_heads=spec.kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_is_read_as_the_preset(preset: str) -> None:
    assert architecture(read_huggingface(PUBLISHED[preset], preset)) == architecture(load_model(preset))


def test_the_two_spellings_of_a_hybrid_are_one_model() -> None:
    words = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    listed = {key: value for key, value in NEMOTRON_3_NANO.items() if key != "hybrid_override_pattern"}
    listed["layers_block_type"] = [words[symbol] for symbol in NEMOTRON_3_NANO["hybrid_override_pattern"]]
    assert read_huggingface(listed, "x") == read_huggingface(NEMOTRON_3_NANO, "x")


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "parts"),
    [
        (LLAMA3_70B, {"hidden_size": True}, ["hidden_size", "True"]),
        (LLAMA3_70B, {"hidden_size": "8192"}, ["hidden_size", "'8192'"]),
        (LLAMA3_70B, {"hidden_size": -8192}, ["hidden_size", "-8192"]),
        (LLAMA3_70B, {"hidden_size": 8192.0}, ["hidden_size", "8192.0"]),
        (LLAMA3_70B, {"hidden_size": float("nan")}, ["hidden_size", "nan"]),
        (LLAMA3_70B, {"hidden_size": 1e30}, ["hidden_size", "1e+30"]),
        (LLAMA3_70B, {"hidden_size": 10**30}, ["hidden_size", "1000000000"]),
        (LLAMA3_70B, {"hidden_size": None}, ["hidden_size", "null"]),
        (LLAMA3_70B, {"hidden_size": [8192] * 1000}, ["hidden_size", "..."]),
        (LLAMA3_70B, {"num_hidden_layers": 0}, ["num_layers", "0"]),
        (LLAMA3_70B, {"num_key_value_heads": 7}, ["num_heads (64)", "num_kv_heads (7)"]),
        (LLAMA3_70B, {"num_attention_heads": 60}, ["num_kv_heads (8)", "num_heads (60)"]),
        (LLAMA3_70B, {"rope_theta": float("inf")}, ["rope_theta", "inf"]),
        (LLAMA3_70B, {"rope_theta": None, "rope_parameters": 5}, ["rope_parameters", "5"]),
        (LLAMA3_70B, {"tie_word_embeddings": 0}, ["tie_word_embeddings", "0"]),
        (LLAMA3_70B, {"model_type": None}, ["model_type", "missing"]),
        (LLAMA3_70B, {"model_type": ["llama"]}, ["model_type", "['llama']"]),
        (
            LLAMA3_70B,
            {"model_type": "mamba9"},
            ["'mamba9' is not known; ", "autoplan new model"],
        ),
        (LLAMA3_70B, {"model_type": "grok", "auto_map": {}}, ["'grok'", "auto_map"]),
        (LLAMA3_70B, {"model_type": "clip", "text_config": {"model_type": "clip_text"}}, ["'clip_text' is not known"]),
        (LLAMA3_70B, {"architectures": ["LlamaForSequenceClassification"]}, ["architectures", "CausalLM"]),
        (LLAMA3_70B, {"architectures": "LlamaForCausalLM"}, ["architectures must be a list of names"]),
        (LLAMA3_70B, {"is_encoder_decoder": True}, ["is_encoder_decoder", "True"]),
        (
            LLAMA3_70B,
            {"is_encoder_decoder": True, "model_type": "t5"},
            ["['LlamaForCausalLM']", "no encoder-decoder"],
        ),
        (DEEPSEEK_V3, {"attention_bias": True}, ["attention_bias", "True", "deepseek_v3"]),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        (DEEPSEEK_V3, {"num_experts_per_tok": 300}, ["experts_per_token", "300"]),
        (GPT_OSS_20B, {"layer_types": ["full_attention"] * 3}, ["layer_types", "3", "24"]),
        (GPT_OSS_20B, {"layer_types": ["linear_attention"] * 24}, ["layer_types", "'linear_attention'"]),
        (QWEN3_30B_A3B, {"mlp_only_layers": [5]}, ["mlp_only_layers", "[5]"]),
        (QWEN3_30B_A3B, {"mlp_only_layers": "0"}, ["mlp_only_layers", "'0'"]),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, ["interval", "0"]),
        (GEMMA3_4B, {"text_config": None}, ["text_config", "None"]),
        (
            {**GEMMA3_4B["text_config"], "architectures": ["Gemma3ForCausalLM"]},
            {"sliding_window_pattern": None, "layer_types": None},
            ["sliding_window_pattern is null"],
        ),
        (
            {**LLAMA3_70B, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            {"use_sliding_window": True, "max_window_layers": None},
            ["max_window_layers is null"],
        ),
        (GEMMA3_4B, {"text_config": {"model_type": "gemma3"}}, ["'gemma3'"]),
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": "MX*"}, ["layer_pattern", "X"]),
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": None}, ["hybrid_override_pattern"]),
        (NEMOTRON_3_NANO, {"layers_block_type": ["mamba", 3]}, ["layers_block_type", "3"]),
        (NEMOTRON_3_NANO, {"hybrid_override_pattern": "M-*"}, []),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_file_key_and_value(
    base: dict[str, Any], changes: dict[str, Any], parts: list[str]
) -> None:
    if not parts:
        assert read_huggingface({**base, **changes}, "x").moe is None
        return
    with pytest.raises(InputError) as caught:
        read_huggingface({**base, **changes}, "some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("key", ["num_key_value_heads", "tie_word_embeddings"])
def test_a_misspelled_key_is_no_default(key: str) -> None:
    table = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    table |= {"intermediate_size": 2048, "vocab_size": 32000}
    with pytest.raises(InputError, match=f"x: {key[:-1]} is not a key of llama models: did you mean {key}"):
        read_huggingface(table | {key[:-1]: 4}, "x")
    assert read_huggingface(table | {f"_{key[:-1]}": 4, "name_of_the_run": "a"}, "x").num_kv_heads in (None, 8)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "model_type"]
)
def test_a_missing_key_is_named(key: str) -> None:
    table = {name: value for name, value in LLAMA3_70B.items() if name != key}
    with pytest.raises(InputError, match=f"x: {key} is missing"):
        read_huggingface(table, "x")


def test_the_wrapper_says_whether_embeddings_are_tied_where_its_text_config_does_not() -> None:
    inner = {key: value for key, value in LLAMA3_70B.items() if key not in ("architectures", "tie_word_embeddings")}
    wrapper = {"model_type": "mistral3", "tie_word_embeddings": True, "text_config": inner}
    assert read_huggingface(wrapper, "x").tied_embeddings
    assert not read_huggingface({"model_type": "mistral3", "text_config": inner}, "x").tied_embeddings


def test_a_vision_language_model_is_its_text_model_and_says_what_is_left_out() -> None:
    inner = {key: value for key, value in LLAMA3_70B.items() if key != "architectures"}
    head = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {"depth": 24}}
    nested = read_huggingface({**head, "text_config": inner}, "x")
    assert (nested.hidden_size, nested.left_out) == (8192, "vision_config")
    # Older files of Qwen2-VL hold the sizes of the text model beside the table of the encoder.
    flat = {**LLAMA3_70B, **head, "model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    assert read_huggingface(flat, "x").left_out == "vision_config"
    assert read_huggingface(LLAMA3_70B, "x").left_out == ""


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-2, max_value=600)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["full_attention", "sliding_attention", "mamba", "moe", "M*E-", "llama", "head_dim"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["rope_theta", "model_type", "alibi"]), inner)
    ),
    max_leaves=6,
)
BASES = [
    *PUBLISHED.values(),
    {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_inner": None},
    {"model_type": "mpt", "d_model": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 50257, "attn_config": {}},
    {
        **{"model_type": "llama4_text", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"num_key_value_heads": 4, "intermediate_size": 9, "moe_layers": [1, 3, 5, 7, 9, 11], "vocab_size": 999},
    },
]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_junk_raises_nothing_but_input_errors(data: st.DataObject) -> None:
    table = dict(data.draw(st.sampled_from(BASES)))
    extra = [
        "layer_types",
        "mlp_only_layers",
        "moe_layers",
        "sliding_window",
        "text_config",
        "rope_parameters",
        "head_dim",
    ]
    keys = st.sampled_from(sorted([*table, *extra]))
    for key in data.draw(st.lists(keys, min_size=1, max_size=3, unique=True)):
        table[key] = data.draw(JUNK)
    message = ""
    try:
        assert count_parameters(read_huggingface(table, "x")) > 0
    except InputError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("key", ["schema_version", "mixed_schema_version"])
def test_a_plan_file_in_place_of_a_model_is_called_one(key: str) -> None:
    with pytest.raises(InputError, match=r"^plan\.json: a plan file, not a model: profile takes it as --for"):
        read_huggingface({key: 12, "model": {"name": "llama3-8b"}}, "plan.json")
