"""Models and configurations that several test files use."""

from __future__ import annotations

from typing import Any

from autoplan.spec.blocks import Experts, LatentAttention
from autoplan.spec.model import ModelSpec

# Models that a CPU trains, as files.
SMALL_TOML = """
name = "small"
num_layers = 4
hidden_size = 64
vocab_size = 256
num_heads = 4
ffn_size = 128
"""
TINY_TOML = SMALL_TOML.replace("small", "tiny").replace("num_layers = 4", "num_layers = 2")

# What all GPT models have, unlike Llama.
GPT: dict[str, Any] = {
    "gated_mlp": False,
    "mlp_bias": True,
    "qkv_bias": True,
    "attention_output_bias": True,
    "norm": "layernorm",
    "position_embedding": "learned",
    "max_positions": 2048,
    "tied_embeddings": True,
}
# A configuration of the hub, of Llama 3.2 1B but for its embeddings.
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def gpt(num_layers: int, hidden_size: int, num_heads: int, *, vocab_size: int = 51200, name: str = "gpt") -> ModelSpec:
    """Return a GPT model with the usual width of its MLP."""
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=num_heads,
        ffn_size=4 * hidden_size,
        **GPT,
    )


# What Qwen/Qwen2.5-VL-7B-Instruct publishes, whose card says 8.29B parameters.
QWEN_VL = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}

DEEPSEEK3 = ModelSpec(
    name="deepseek-v3",
    num_layers=61,
    hidden_size=7168,
    vocab_size=129280,
    num_heads=128,
    ffn_size=18432,
    mla=LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536),
    moe=Experts(
        num_experts=256,
        experts_per_token=8,
        expert_ffn_size=2048,
        shared_expert_ffn_size=2048,
        num_dense_layers=3,
    ),
)
