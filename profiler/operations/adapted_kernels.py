"""Kernels of libraries that are called in another way than `given_kernels` calls them, made alike."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Adapter = Callable[[Any], Callable[..., Any]]


def _transformer_engine_attention(core: Any) -> Callable[..., Tensor]:
    """Return a function of queries, keys and values by Transformer Engine's module, which is made for their sizes."""

    @functools.cache
    def made(num_heads: int, num_kv_heads: int, key_width: int, value_width: int) -> nn.Module:
        widths = key_width if key_width == value_width else (key_width, value_width)
        module = core(num_heads, widths, num_gqa_groups=num_kv_heads, qkv_format="bshd", attn_mask_type="causal")
        assert isinstance(module, nn.Module)
        return module

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int] | None = None) -> Tensor:
        assert causal
        module = made(q.shape[2], k.shape[2], k.shape[3], v.shape[3])
        output: Tensor = module(q, k, v, window_size=window_size)  # heads side by side
        return output.view(*q.shape[:3], v.shape[3])

    return attend


def _transformer_engine_backend() -> str:
    """Return the backend of the last call of Transformer Engine's attention, as the library notes it."""
    place = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen = getattr(place, "_attention_backends", {})
    for name in ("flash", "fused"):
        if chosen.get(f"use_{name}_attention"):
            return f"{name} {chosen.get(f'{name}_attention_backend') or ''}".strip()
    return "unfused" if chosen.get("use_unfused_attention") else ""


def _torchtitan_attention(core: Any) -> Callable[..., Tensor]:
    """Return a function of queries, keys and values by one of torchtitan's modules, which have a configuration."""
    module = core(core.Config())

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        output: Tensor = module(q, k, v, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
        return output

    return attend


class WholeExperts(nn.Module):
    """All products of experts and what is between them, in one module; called like a grouped product."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        for weight in experts.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the outputs for inputs sorted by expert."""
        output: Tensor = self.experts(x, torch.tensor(rows, device=x.device))
        return output


def _torchtitan_experts(core: Any) -> Callable[..., WholeExperts]:
    def made(num_experts: int, hidden_size: int, width: int) -> WholeExperts:
        return WholeExperts(core(core.Config(dim=hidden_size, hidden_dim=width, num_experts=num_experts)))

    made.is_whole = True  # type: ignore[attr-defined]
    return made


ADAPTERS: dict[str, Adapter] = {
    "transformer_engine.pytorch:DotProductAttention": _transformer_engine_attention,
    "torchtitan.models.common.attention:ScaledDotProductAttention": _torchtitan_attention,
    "torchtitan.models.common.moe:GroupedExperts": _torchtitan_experts,
}
# What a library says of the kernel that its last call ran.
BACKENDS: dict[str, Callable[[], str]] = {"transformer_engine.pytorch:DotProductAttention": _transformer_engine_backend}
