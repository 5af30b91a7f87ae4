"""Libraries whose kernels can be named by the library alone, and what is called of each.

Signatures: TransformerEngine d0067d0 transformer_engine/pytorch/{module,attention,optimizers,permutation,router}, and
common/recipe; flash-attention 0251105 flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and
flash_attn/cute/interface.py; torchtitan 0.3.0 models/common/{moe,attention}.py and models/llama3; Megatron-LM d98e8a6
core/models/gpt/gpt_layer_specs.py and core/transformer/transformer_layer.py; DeepEP dd758ca deep_ep/buffers/legacy.py.
"""

from __future__ import annotations

from autoplan.spec.operations import Operation

_TE_ATTENTION = "transformer_engine.pytorch:DotProductAttention"
SHIPPED: dict[str, dict[Operation, str]] = {
    "transformer-engine": {
        "gemm": "transformer_engine.pytorch:Linear",
        "attention": _TE_ATTENTION,
        "latent_attention": _TE_ATTENTION,
        "experts": "transformer_engine.pytorch:GroupedLinear",
        "norm": "transformer_engine.pytorch:RMSNorm",
        "optimizer": "transformer_engine.pytorch.optimizers:FusedAdam",
        "linear": "transformer_engine.pytorch:Linear",
        "norm_linear": "transformer_engine.pytorch:LayerNormLinear",
        "mlp": "transformer_engine.pytorch:LayerNormMLP",
        "overlapped_mlp": "transformer_engine.pytorch.module:LayerNormMLP",
        "ring_attention": "transformer_engine.pytorch.attention:DotProductAttention",
        "routing": "transformer_engine.pytorch:moe_permute_with_probs",
    },
    "torch": {
        "ring_attention": "autoplan.profiler.operations.torch_modules:ring_attention",
        "routing": "autoplan.profiler.operations.torch_modules:Routing",
    },
    "megatron-core": dict.fromkeys(
        ("layer", "moe_layer"), "megatron.core.transformer.transformer_layer:TransformerLayer"
    ),
    "deep-ep": {"exchange": "deep_ep:Buffer"},
    "flash-attn": {"attention": "flash_attn:flash_attn_func"},
    "flash-attn-3": dict.fromkeys(("attention", "latent_attention"), "flash_attn_interface:flash_attn_func"),
    "flash-attn-4": dict.fromkeys(("attention", "latent_attention"), "flash_attn.cute:flash_attn_func"),
    "torchtitan": {
        "attention": "torchtitan.models.common.attention:ScaledDotProductAttention",
        "experts": "torchtitan.models.common.moe:GroupedExperts",
        "layer": "torchtitan.models.llama3.model:Llama3TransformerBlock",
    },
    "apex": {"optimizer": "apex.optimizers:FusedAdam"},
    "bitsandbytes": {"optimizer": "bitsandbytes.optim:AdamW8bit"},
}
COMPILED = ":compiled"  # suffix of a name: run through torch.compile
