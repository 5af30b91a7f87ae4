"""Libraries whose kernels can be named by the library alone, and what is called of each.

Signatures: TransformerEngine d0067d0 transformer_engine/pytorch/{module,attention,optimizers}, flash-attention 0251105
flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and flash_attn/cute/interface.py, torchtitan 0.3.0
models/common/{moe,attention}.py.
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
    },
    "flash-attn": {"attention": "flash_attn:flash_attn_func"},
    "flash-attn-3": dict.fromkeys(("attention", "latent_attention"), "flash_attn_interface:flash_attn_func"),
    "flash-attn-4": dict.fromkeys(("attention", "latent_attention"), "flash_attn.cute:flash_attn_func"),
    "torchtitan": {
        "attention": "torchtitan.models.common.attention:ScaledDotProductAttention",
        "experts": "torchtitan.models.common.moe:GroupedExperts",
    },
    "apex": {"optimizer": "apex.optimizers:FusedAdam"},
    "bitsandbytes": {"optimizer": "bitsandbytes.optim:AdamW8bit"},
}
COMPILED = ":compiled"  # suffix of a name: run through torch.compile
