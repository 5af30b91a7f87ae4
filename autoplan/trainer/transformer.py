"""Transformer built from torch modules, in full or as one chunk of its layers.

Parameters have the names of the whole model in every chunk, so that chunks can be compared with it.  Tensor parallelism
splits `torch.nn.Linear` and `torch.nn.Embedding` from outside (`parallel`); other weights are replicated on every rank
and used through `_local`.
"""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from autoplan.spec.blocks import Block, Experts
from autoplan.spec.model import ModelSpec


def _local(weight: Tensor, *, sums: bool) -> Tensor:
    """Return a weight replicated in a tensor-parallel group; with `sums` its gradient is summed over the ranks."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=[Partial()] if sums else None)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension; `sums` as in `_local`."""

    is_rms: bool
    sums: bool

    def __init__(self, model: ModelSpec, size: int) -> None:
        super().__init__()
        self.is_rms, self.sums = model.norm == "rmsnorm", False
        self.weight: nn.Parameter = nn.Parameter(torch.ones(size))
        self.bias: nn.Parameter | None = (
            nn.Parameter(torch.zeros(size)) if not self.is_rms and model.norm_bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` of any shape."""
        weight = _local(self.weight, sums=self.sums)
        if self.is_rms:
            return F.rms_norm(x, weight.shape, weight, eps=1e-5)
        bias = None if self.bias is None else _local(self.bias, sums=self.sums)
        return F.layer_norm(x, weight.shape, weight, bias)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys turned by their positions (rotary embedding)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention over whole sequences; with tensor parallelism over a part of the heads."""

    head_dim: int
    window: int | None

    def __init__(self, model: ModelSpec, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window = model.qk_head_dim, window
        hidden, bias = model.hidden_size, model.qkv_bias
        self.q: nn.Linear = nn.Linear(hidden, model.num_heads * self.head_dim, bias=bias)
        self.k: nn.Linear = nn.Linear(hidden, model.kv_heads * self.head_dim, bias=bias)
        self.v: nn.Linear = nn.Linear(hidden, model.kv_heads * self.head_dim, bias=bias)
        self.out: nn.Linear = nn.Linear(model.num_heads * self.head_dim, hidden, bias=model.attention_output_bias)
        has_norm = model.qk_norm == "head"
        self.q_norm: Norm | None = Norm(model, self.head_dim) if has_norm else None
        self.k_norm: Norm | None = Norm(model, self.head_dim) if has_norm else None
        self.core: _Core = _Core()

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """`x` is (sequences, tokens, hidden_size)."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            cos, sin = (part.to(q.dtype) for part in angles)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed: Tensor = self.core(q, k, v, self.window)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class _Core(nn.Module):
    """Attention without its weights, as a separate module so that it can be recomputed alone."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        groups = q.shape[1] != k.shape[1]
        if window is None or window >= q.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups)
        far = torch.arange(q.shape[2], device=q.device)
        distance = far[:, None] - far
        mask = (distance >= 0) & (distance < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups)


class Mlp(nn.Module):
    """SwiGLU if gated, otherwise GELU."""

    def __init__(self, model: ModelSpec, size: int) -> None:
        super().__init__()
        hidden, bias = model.hidden_size, model.mlp_bias
        self.gate: nn.Linear | None = nn.Linear(hidden, size, bias=bias) if model.gated_mlp else None
        self.up: nn.Linear = nn.Linear(hidden, size, bias=bias)
        self.down: nn.Linear = nn.Linear(size, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (sequences, tokens, hidden_size)."""
        wide = self.up(x)
        wide = F.silu(self.gate(x)) * wide if self.gate is not None else F.gelu(wide)
        result: Tensor = self.down(wide)
        return result


class MoE(nn.Module):
    """Routed experts without dropped tokens, whole on every rank, and a shared expert if the model has one."""

    num_chosen: int
    sums: bool

    def __init__(self, model: ModelSpec, moe: Experts) -> None:
        super().__init__()
        self.num_chosen, self.sums = moe.experts_per_token, False
        hidden, size = model.hidden_size, moe.expert_ffn_size
        self.router: nn.Parameter = nn.Parameter(torch.empty(moe.num_experts, hidden))
        self.router_bias: nn.Parameter | None = nn.Parameter(torch.zeros(moe.num_experts)) if moe.router_bias else None
        self.into: nn.Parameter = nn.Parameter(
            torch.empty(moe.num_experts, size * (2 if model.gated_mlp else 1), hidden)
        )
        self.back: nn.Parameter = nn.Parameter(torch.empty(moe.num_experts, hidden, size))
        self.is_gated: bool = model.gated_mlp
        shared = moe.shared_expert_ffn_size
        self.shared_into: nn.Parameter | None = (
            nn.Parameter(torch.empty(shared * (2 if model.gated_mlp else 1), hidden)) if shared else None
        )
        self.shared_back: nn.Parameter | None = nn.Parameter(torch.empty(hidden, shared)) if shared else None
        self.shared_gate: nn.Parameter | None = nn.Parameter(torch.empty(1, hidden)) if moe.shared_expert_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """Process `x`, (sequences, tokens, hidden_size), which has only the tokens of this rank."""
        tokens = x.flatten(0, -2)
        bias = None if self.router_bias is None else _local(self.router_bias, sums=self.sums)
        scores = F.linear(tokens, _local(self.router, sums=self.sums), bias).float().softmax(-1)
        weights, chosen = scores.topk(self.num_chosen, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        into, back = _local(self.into, sums=self.sums), _local(self.back, sums=self.sums)
        order = chosen.flatten().argsort(stable=True)  # by expert
        rows = order // self.num_chosen
        parts = torch.split(tokens[rows], self._counts(chosen))
        # Every expert takes part, even without tokens, so that its gradient is zero instead of missing.
        # Unbound at once: the gradient of a single indexed expert would be as large as that of all experts.
        results = [self._run(*expert) for expert in zip(parts, into.unbind(), back.unbind(), strict=True)]
        mixed = torch.cat(results) * weights.flatten()[order, None]
        total = torch.zeros_like(tokens).index_add(0, rows, mixed)
        if self.shared_into is not None and self.shared_back is not None:
            into, back = _local(self.shared_into, sums=self.sums), _local(self.shared_back, sums=self.sums)
            shared = self._run(tokens, into, back)
            if self.shared_gate is not None:
                shared = F.linear(tokens, _local(self.shared_gate, sums=self.sums)).sigmoid() * shared
            total = total + shared
        return total.view_as(x)

    def _counts(self, chosen: Tensor) -> list[int]:
        """Return the number of tokens of every expert; equal numbers if tensors have no data."""
        num_experts = len(self.router)
        if isinstance(chosen, FakeTensor):
            share, remainder = divmod(chosen.numel(), num_experts)
            return [share + (at < remainder) for at in range(num_experts)]
        counts: list[int] = chosen.flatten().bincount(minlength=num_experts).tolist()
        return counts

    def _run(self, x: Tensor, into: Tensor, back: Tensor) -> Tensor:
        wide = F.linear(x, into)
        if self.is_gated:
            gate, up = wide.chunk(2, dim=-1)
            return F.linear(F.silu(gate) * up, back)
        return F.linear(F.gelu(wide), back)


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    norm1: Norm
    norm2: Norm

    def __init__(self, model: ModelSpec, blocks: tuple[Block, ...]) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(model, model.hidden_size), Norm(model, model.hidden_size)
        self.attention: Attention = Attention(model, model.window if Block.WINDOW_ATTENTION in blocks else None)
        self.mlp: MoE | Mlp = MoE(model, model.moe) if model.moe and Block.MOE in blocks else Mlp(model, model.ffn_size)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Process `x`, (sequences, tokens, hidden_size), with this rank's tokens under sequence parallelism."""
        x = x + self.attention(self.norm1(x), angles)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Transformer(nn.Module):
    """A chunk of the model: layers `first` to `first + num_layers`, with embedding and head in the end chunks."""

    model: ModelSpec
    seq_len: int
    sums: bool
    start: int

    def __init__(self, model: ModelSpec, seq_len: int, first: int, num_layers: int, *, is_first: bool, is_last: bool):
        super().__init__()
        self.model, self.seq_len = model, seq_len
        self.sums, self.start = False, 0  # under sequence parallelism: as in `_local`, and the rank's first position
        hidden = model.hidden_size
        self.embedding: nn.Embedding | None = nn.Embedding(model.vocab_size, hidden) if is_first else None
        is_learned = model.position_embedding == "learned"
        self.positions: nn.Parameter | None = (
            nn.Parameter(torch.empty(seq_len, hidden)) if is_first and is_learned else None
        )
        layers = range(first, first + num_layers)
        self.layers: nn.ModuleDict = nn.ModuleDict({str(at): Layer(model, model.layers[at]) for at in layers})
        self.norm: Norm | None = Norm(model, hidden) if is_last else None
        self.head: nn.Linear | None = nn.Linear(hidden, model.vocab_size, bias=False) if is_last else None
        self.tie()

    def tie(self) -> None:
        """Share one table between embedding and head if the model does."""
        if self.model.tied_embeddings and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    def angles(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return (cosines, sines) of rotary positions, each (tokens, head_dim)."""
        if self.model.position_embedding != "rope":
            return None
        size = self.model.qk_head_dim
        rates = self.model.rope_base ** (-torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(self.seq_len, device=device), rates).repeat(1, 2)
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (sequences, tokens) or hidden states to hidden states or logits (sequences, tokens, vocab)."""
        if self.embedding is not None:
            x = self.embedding(x)
            if self.positions is not None:
                table = _local(self.positions, sums=self.sums)
                x = x + table[self.start : self.start + x.shape[1]].to(x.dtype)
        angles = self.angles(x.device)
        for layer in self.layers.values():
            x = layer(x, angles)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def initialise(module: nn.Module, device: torch.device, seed: int, prefix: str = "") -> None:
    """Draw weights from random streams by name, equal in any layout: every rank draws all and keeps its part."""
    for path, owner in module.named_modules(prefix=prefix):
        for key, weight in list(owner.named_parameters(recurse=False)):
            if not weight.is_meta:
                continue
            name = plain_name(f"{path}.{key}" if path else key)
            drawn, fresh = _drawn(name, weight.shape, device, seed), torch.empty_like(weight, device=device)
            if isinstance(fresh, DTensor):
                drawn = distribute_tensor(drawn, fresh.device_mesh, fresh.placements, src_data_rank=None)
            with torch.no_grad():
                fresh.copy_(drawn)
            owner.register_parameter(key, nn.Parameter(fresh))


def _drawn(name: str, shape: torch.Size, device: torch.device, seed: int) -> Tensor:
    if len(shape) == 1:  # norms are ones, biases zeros
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
    return torch.empty(shape, device=device).normal_(std=1 / math.sqrt(shape[-1]), generator=generator)


def plain_name(name: str) -> str:
    """Return the name of a parameter in the whole model, without the names inserted by recomputation wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "")
