"""Time of selective recomputation in the backward pass of a block; arrays have one element per plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autoplan.base.arrays import Floats, add_up
from autoplan.cost.kernels.memory_bound import STORED_CAST_BYTES, memory_bound_s
from autoplan.cost.kernels.sizes import norm_tokens, rank_expert_tokens
from autoplan.cost.kernels.times import KernelTimes
from autoplan.cost.memory.recompute import bytes_per_width, has_norm_module
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.enums import RecomputeModule
from autoplan.spec.plan import SELECTIVE, PlanBatch
from autoplan.spec.problem import Problem

# Matrix names of each part.
_LINEARS_OF: Mapping[RecomputeModule, tuple[str, ...]] = {
    RecomputeModule.MLA_UP_PROJ: ("q_up", "kv_up"),
    RecomputeModule.SHARED_EXPERTS: ("shared_fc1", "shared_fc2"),
}


def selective_s(
    problem: Problem,
    batch: PlanBatch,
    block: Block,
    kernels: KernelTimes,
    forward_s: Floats,
    inputs_s: Floats,
    never_repeated_s: Floats,
) -> Floats:
    """Time that selective recomputation adds to a block's backward pass; its forward pass takes `forward_s`.

    A framework that recomputes a share of all layers pays that share of a layer's recomputation.  By named part: the
    attention core, although a flash kernel saves no memory (megatron/core/transformer/attention.py:1555; 3.9 % of a
    step of Moonlight, row bridge_ab-002); the MLP or MoE with its communication, except `never_repeated_s`; other parts
    by their matrices or the bytes that they move.
    """
    zeros = np.zeros(len(batch))
    selective = batch.recompute == SELECTIVE
    if share := problem.framework.kernels.selective_recompute_share:
        again = share * (forward_s - never_repeated_s)
        if problem.framework.kernels.selective_saves_attention:
            again = share * kernels.gemm.forward_s + kernels.memory.forward_s + inputs_s
        return np.where(selective, again, 0.0)
    if not batch.recompute_modules.any():
        return zeros
    times = {
        module: np.where(repeats, _module_s(problem, batch, module, kernels, forward_s - never_repeated_s), 0.0)
        for module in _parts_of(problem, block)
        if (repeats := batch.repeats(module)).any()
    }
    # A separate norm precedes the other named parts (core/transformer/transformer_layer.py, _forward_mlp); the MoE
    # layer and parts of it may both be named.
    norm = times.pop(RecomputeModule.LAYERNORM, zeros)
    if problem.framework.memory.is_jax and block in ATTENTION_BLOCKS and not problem.model.mla:
        norm = np.where(batch.repeats(RecomputeModule.LAYERNORM), kernels.matrix_forward_s["out"], 0.0)
    own = _norm_s(problem, batch) if has_norm_module(problem, block) else zeros
    return norm + np.minimum(add_up(times.values()) + zeros, forward_s - own)


def resent_share(problem: Problem, batch: PlanBatch, block: Block) -> Floats:
    """Share of the blocks of a kind that selective recomputation repeats including their collectives."""
    share = problem.framework.kernels.selective_recompute_share
    modules = {Block.MLP: RecomputeModule.MLP, Block.MOE: RecomputeModule.MOE}
    by_name = 1.0 * batch.repeats(modules[block]) if block in modules else np.zeros(len(batch))
    return np.where((batch.recompute == SELECTIVE) & (share > 0), share, by_name)


def _parts_of(problem: Problem, block: Block) -> tuple[RecomputeModule, ...]:
    norm: tuple[RecomputeModule, ...] = (RecomputeModule.LAYERNORM,) if has_norm_module(problem, block) else ()
    if block in ATTENTION_BLOCKS:
        latent = (RecomputeModule.MLA_UP_PROJ,) if problem.model.mla else ()
        return (*norm, RecomputeModule.CORE_ATTN, *latent)
    if block is Block.MOE:
        return (*norm, RecomputeModule.MOE, RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS)
    return (RecomputeModule.MLP,) if block is Block.MLP else ()


def _norm_s(problem: Problem, batch: PlanBatch) -> Floats:
    moved = 4.0 * norm_tokens(problem, batch) * problem.model.hidden_size
    return memory_bound_s(problem, problem.framework.kernels.kernel_bytes_factor * moved)


def _module_s(
    problem: Problem,
    batch: PlanBatch,
    module: RecomputeModule,
    kernels: KernelTimes,
    forward_s: Floats,
) -> Floats:
    if module == "core_attn":
        return kernels.attention.forward_s
    if module in ("mlp", "moe"):
        return forward_s
    if module == "layernorm":
        return _norm_s(problem, batch)
    if module == "moe_act" and problem.model.moe:
        moe = problem.model.moe
        routed = rank_expert_tokens(problem, batch)
        width = routed * moe.expert_ffn_size / batch.etp
        moved = problem.framework.kernels.kernel_bytes_factor * bytes_per_width(problem, batch, is_checkpointed=True)
        return memory_bound_s(problem, (moved + STORED_CAST_BYTES * batch.fp8_activation_input) * width)
    return add_up(time for name, time in kernels.matrix_forward_s.items() if name in _LINEARS_OF[module])
