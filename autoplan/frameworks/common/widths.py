"""Widths of the matrices that a rank multiplies."""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Ints
from autoplan.spec.blocks import Block
from autoplan.spec.model import ModelSpec


def kv_groups(model: ModelSpec) -> int:
    """Heads of keys and values that tensor parallelism spreads; latent attention has one of its own for every query."""
    return model.num_heads if model.mla else model.kv_heads


def has_dense_mlp(model: ModelSpec) -> bool:
    """Return whether a layer has an MLP that is no expert."""
    return any(Block.MLP in layer for layer in model.layers)


def gemm_widths(model: ModelSpec, tp: Ints, etp: Ints) -> list[Ints]:
    """Inner and outer sizes of the matrix products of one rank; the head stays in 16 bits."""
    hidden = np.full_like(tp, model.hidden_size)
    widths = [hidden, model.num_heads * model.v_head_dim // tp]
    if mla := model.mla:
        latents = [mla.kv_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim, mla.q_lora_rank or mla.kv_lora_rank]
        widths += [np.full_like(tp, latent) for latent in latents]
        widths += [model.num_heads * model.qk_head_dim // tp]
        widths += [model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) // tp]
    else:
        widths += [(model.num_heads + 2 * model.kv_heads) * model.qk_head_dim // tp]
    if has_dense_mlp(model):
        widths += [model.ffn_size // tp]
    if model.moe:
        widths += [model.moe.shared_expert_ffn_size // tp, model.moe.expert_ffn_size // etp]
        widths += [np.full_like(tp, model.moe.latent_size or model.hidden_size)]
    return widths
