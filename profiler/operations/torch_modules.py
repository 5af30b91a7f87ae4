"""Modules of torch's own parts that join several kernels, and may be named like those of libraries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental._context_parallel import _attention as rings

_FLASH, _ON_CPU = (getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{name}") for name in ("", "_for_cpu"))
_FLASH_BACKWARD, _ON_CPU_BACKWARD = (
    getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{name}_backward") for name in ("", "_for_cpu")
)
# What the backward pass on a GPU wants of the results of the forward pass, behind the output and its sums.
_KEPT = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")


class Routing(nn.Module):
    """Router of tokens to their best experts, the sorting of tokens by expert, and their weighted sum, by torch."""

    def __init__(self, *, hidden_size: int, num_experts: int, experts_per_token: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts_per_token = experts_per_token

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the same order, as experts that return what they get would."""
        scores, experts = self.gate(x).float().softmax(-1).topk(self.experts_per_token)
        order = experts.flatten().argsort(stable=True)
        source = order // self.experts_per_token
        sorted_tokens = x[source]
        weighted = sorted_tokens * scores.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, source, weighted)


class _Ring(torch.autograd.Function):
    """Causal attention over the ranks of a group, of queries, keys and values with heads before tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        kernel = _ON_CPU if q.device.type == "cpu" else _FLASH
        output, sums, *rest = rings._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0)
        tensors = (q, k, v, output, sums)
        ctx.save_for_backward(*tensors)
        ctx.group, ctx.rest = group, dict(zip(_KEPT, rest, strict=False))  # behind these only what is for debugging
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kernel = _ON_CPU_BACKWARD if gradient.device.type == "cpu" else _FLASH_BACKWARD
        q, k, v, output, sums = ctx.saved_tensors
        inputs = {"query": q, "key": k, "value": v, "out": output, "logsumexp": sums}
        gradients = rings._templated_ring_attention_backward(
            ctx.group, 2, kernel, gradient, "grad_out", **inputs, is_causal=True, dropout_p=0.0, **ctx.rest
        )
        return (*gradients[:3], None)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: ProcessGroup) -> Tensor:
    """Attention of the ranks of a group, each with its tokens of the sequences, by torch's context parallelism.

    Each has a piece from either end of the sequence, so that all have as much to do.
    """
    assert causal
    copies = q.shape[2] // k.shape[2]
    k, v = (heads.repeat_interleave(copies, dim=2) for heads in (k, v))  # as torch does before it passes them around
    output: Tensor = _Ring.apply(*(heads.transpose(1, 2) for heads in (q, k, v)), group)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)
