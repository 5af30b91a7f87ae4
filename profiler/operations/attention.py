"""Attention that can be run and timed: causal, within a window, or with values narrower than keys."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.profiler.operations.inputs import InputFactory

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of queries, keys and values: batch, heads, seq_len, width each

_BACKENDS = {
    "sdpa flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "sdpa cudnn": [SDPBackend.CUDNN_ATTENTION],
}


OPERATIONS = ("attention", "attention_backward", "latent_attention", "latent_attention_backward")
_ENTRY = re.compile(r"_scaled_dot_product_(\w+?)_attention(?:_for_(cpu))?|_(flash)_attention|_(varlen)_attn")


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the backends of attention that calls reach."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backends: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if entry := _ENTRY.search(str(function)):
            self.backends.append(" ".join(filter(None, entry.groups())))
        return function(*args, **kwargs or {})


def backend_of(run: Callable[[], object]) -> str:
    """Name torch's choice for a call: flash (on CUDA with its implementation), cudnn, efficient; math for parts."""
    with _Dispatched() as dispatched:
        run()
    backend = dispatched.backends[0] if dispatched.backends else "math"
    version = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    if backend == "flash" and version and not torch.version.hip:
        return f"flash {version() or 'FA2'}"
    return backend


def _heads(factory: InputFactory, batch: int, seq_len: int, *sizes: tuple[int, int]) -> list[Tensor]:
    """Tensors of this many heads of a width each, as projections leave them: heads behind tokens in memory."""
    return [factory.normal(batch, seq_len, heads, width).transpose(1, 2).requires_grad_() for heads, width in sizes]


def attend(q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "sdpa", mask: Tensor | None = None) -> Tensor:
    """Causal attention through torch's one entry, or under a mask; heads of queries may share keys and values."""
    with sdpa_kernel(_BACKENDS[kernel]) if kernel in _BACKENDS else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


def _core(factory: InputFactory, batch: int, seq_len: int, window: int = 0) -> Attend:
    """Causal attention as `factory.kernel` names it, over the last `window` tokens where there is one."""
    if not window:
        return functools.partial(attend, kernel=factory.kernel)
    if factory.kernel == "varlen flash":
        from torch.nn.attention.varlen import varlen_attn  # the newest place: older versions have none

        starts = torch.arange(0, (batch + 1) * seq_len, seq_len, dtype=torch.int32, device=factory.device)

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v))
            grouped, last = q.shape[1] != k.shape[1], (window - 1, 0)
            out = varlen_attn(q, k, v, starts, starts, seq_len, seq_len, window_size=last, enable_gqa=grouped)
            assert isinstance(out, Tensor)
            return out

        return packed
    band = torch.ones(seq_len, seq_len, dtype=torch.bool, device=factory.device).tril().triu(1 - window)
    return functools.partial(attend, mask=band)


def attention(
    factory: InputFactory, batch: int, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int
) -> tuple[Attend, list[Tensor]]:
    """Return (attention, its queries, keys and values) of an `attention` shape."""
    grouped = (num_kv_heads, head_dim)
    return _core(factory, batch, seq_len, window), _heads(
        factory, batch, seq_len, (num_heads, head_dim), grouped, grouped
    )


def latent_attention(
    factory: InputFactory, batch: int, seq_len: int, num_heads: int, qk_head_dim: int, v_head_dim: int
) -> tuple[Attend, list[Tensor]]:
    """Return (attention, its queries, keys and values) of a `latent_attention` shape."""
    wide, narrow = (num_heads, qk_head_dim), (num_heads, v_head_dim)
    return _core(factory, batch, seq_len), _heads(factory, batch, seq_len, wide, wide, narrow)
