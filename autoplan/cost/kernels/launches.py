"""Kernel launches of a block beyond those of a dense block, and their host time.

Counted in Megatron-LM d98e8a6 with Transformer Engine layers, a fused permutation and one product per local expert:
core/transformer/moe/router.py, moe_utils.py, token_dispatcher.py, fused_a2a.py, experts.py and shared_experts.py,
core/transformer/multi_latent_attention.py; for autograd one per node with a kernel.  This gives 132 kernels for a layer
of Qwen3-30B with 8 local experts, a fused router and HybridEP; Nsight Systems counted 463,348 for 3,072 layers, 151
each, including head and optimizer (Megatron-Bridge 067f987, skills/nemo-mbridge-perf-expert-parallel-overlap).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, add_up
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.kernels.sizes import pads_experts
from autoplan.cost.passes import Pass
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.enums import CudaGraphs, Dispatcher, Precision, RecomputeModule
from autoplan.spec.operations import NARROW_TYPES
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

NARROW = [Precision(name).code for name in NARROW_TYPES]


class Launches(NamedTuple):
    """Number of kernels that one part of a block launches in each pass."""

    forward: float
    backward: float


# Host time of a launch in a loop over experts, or of a plain tensor operation, relative to other launches, which are
# surrounded by modules and autograd functions [fitted, with `host_s_per_launch`, to 33 runs: Qwen3-30B with one
# sequence on B200, Nemotron 3 Super with 64 experts per device (nvbridge), Qwen3-235B (xtuner_moe), Moonlight
# (bridge_ab).  The fit is the same without any one of the three sources].
LIGHT = 0.3
# Scores, top-k, maps and balancing loss, unfused, or in four kernels besides the router's products.
ROUTER, FUSED_ROUTER = Launches(36, 24), Launches(8, 6)
# Token counts for the splits of an all-to-all, up to their copies to the host.
COUNT_TOKENS = Launches(14, 0)
# Permutation, exchange and sorting by expert, for dispatch and combine.
DISPATCH = {
    Dispatcher.ALL_TO_ALL: Launches(11, 9),
    Dispatcher.DEEPEP: Launches(10, 6),
    Dispatcher.HYBRIDEP: Launches(8, 5),
    Dispatcher.ALL_GATHER: Launches(18, 10),  # with the gathers of map and scores, and the choice of the local ones
}
AROUND_EXPERTS = Launches(4, 6)
PER_EXPERT = Launches(2, 4)  # in loops over the local experts
BIAS_PER_EXPERT = Launches(2, 7)  # a product and a sum; backward a cast, two products, and sums of both and of scores
CASTS_PER_EXPERT = Launches(2, 3)  # in 8 bits or fewer: the input of each product, and output gradients
SHARED_EXPERTS = Launches(6, 12)
# Latent attention has more products and norms, and copies for its kernels; unless fused, the rotary embeddings of
# queries and keys are plain products and concatenations.
LATENT_ATTENTION, LATENT_ROPE = Launches(6, 10), Launches(26, 36)
# An adapter: two products, a scale and a sum; backward four products, a scale and a sum.  Those of experts are grouped
# as the experts are, each with its products, and one scale and sum for all (Megatron-Bridge 067f987, peft/lora.py,
# num_local_experts; mcore-bridge, tuners/lora.py, is_grouped).  With magnitudes also a
# product of both weights, their sum and its norm, and the scale of both outputs.  Quantised weights: the scales, then
# the weights; if torch unpacks them: shift, cast, mask, difference and product of the weights, and shift, cast, mask
# and sum of the zero points (`UNPACKED_BYTES`).
ADAPTER, ADAPTER_DROPOUT, MAGNITUDES, DEQUANTISE = Launches(4, 6), Launches(1, 1), Launches(9, 6), Launches(2, 2)
ADAPTER_OF_NEXT_EXPERT = Launches(2, 4)
UNPACK = Launches(9, 0)
# A selectively recomputed part repeats its forward launches, and its checkpoint costs further host time: saving and
# restoring random generator states, and a separate autograd graph (core/tensor_parallel/random.py) [judged].
CHECKPOINT = 5
_REPEATED_ATTENTION: dict[RecomputeModule, int | float] = {RecomputeModule.CORE_ATTN: 4}
REPEATED: dict[Block, dict[RecomputeModule, int | float]] = {
    Block.ATTENTION: _REPEATED_ATTENTION,
    Block.WINDOW_ATTENTION: _REPEATED_ATTENTION,
    Block.CROSS_ATTENTION: _REPEATED_ATTENTION,
    Block.MLP: {RecomputeModule.MLP: 4},
    Block.MOE: {
        RecomputeModule.LAYERNORM: 1,
        RecomputeModule.MOE_ACT: 1,
        RecomputeModule.SHARED_EXPERTS: SHARED_EXPERTS.forward,
    },
}
UP_PROJECTIONS = 3
STORED_CAST = Launches(1, 1)  # to 8 bits and back


def extra_launches_s(problem: Problem, batch: PlanBatch, block: Block) -> Pass:
    """Host time for a block's launches beyond those of a dense one, outside of CUDA graphs."""
    parts: list[tuple[Launches, Floats]] = []
    if block is Block.MOE:
        parts = _expert_parts(problem, batch)
    elif block in ATTENTION_BLOCKS and problem.model.mla:
        unfused = np.where(batch.rope_fusion, 0.0, LIGHT)
        parts = [(LATENT_ATTENTION, np.ones(len(batch))), (LATENT_ROPE, unfused)]
    if problem.training.finetuning is not None:
        parts += _adapter_parts(problem, batch, block)
    if block in (Block.MLP, Block.MOE):
        parts.append((STORED_CAST, np.where(batch.fp8_activation_input, LIGHT, 0.0)))
    each_s = _each_s(problem, batch, block)
    return Pass(
        add_up(launches.forward * count * each_s for launches, count in parts) + 0.0 * each_s,
        add_up(launches.backward * count * each_s for launches, count in parts) + 0.0 * each_s,
    )


def _adapter_parts(problem: Problem, batch: PlanBatch, block: Block) -> list[tuple[Launches, Floats]]:
    """Return (kernels, how often each plan launches them) for the adapters and quantised matrices of a block."""
    finetuning = problem.training.finetuning
    assert finetuning is not None
    linears = layer_shapes(problem.model, finetuning)[block].linears
    once, local = np.ones(len(batch)), 1.0 / batch.ep
    adapters = [linear for linear in linears if linear.name.endswith("lora_a")]
    further = add_up(local * linear.copies - 1.0 for linear in adapters if linear.is_expert) + 0.0 * once
    quantised = add_up(
        local * linear.copies if linear.is_expert else once for linear in linears if linear.weight_bytes is not None
    )
    return [
        (ADAPTER, once * len(adapters)),
        (ADAPTER_OF_NEXT_EXPERT, LIGHT * further),
        (ADAPTER_DROPOUT, once * len(adapters) * (finetuning.dropout > 0)),
        (MAGNITUDES, once * len(adapters) * finetuning.dora),
        (UNPACK if unpacks_eagerly(problem) else DEQUANTISE, quantised + 0.0 * once),
    ]


def unpacks_eagerly(problem: Problem) -> bool:
    """Return whether torch kernels unpack frozen 4-bit integer weights, which happens in the forward pass only."""
    finetuning = problem.training.finetuning
    is_packed = finetuning is not None and finetuning.quantization == "int4"
    return is_packed and not problem.framework.kernels.fuses_unpacking


def repeated_launches_s(problem: Problem, batch: PlanBatch, block: Block) -> Floats:
    """Host time for the repeated launches of selectively recomputed parts of a block in a backward pass."""
    modules: dict[RecomputeModule, float | Floats] = {}
    modules |= REPEATED.get(block, {})
    if block in ATTENTION_BLOCKS and problem.model.mla:
        rope = np.where(batch.rope_fusion, 1.0, LIGHT * LATENT_ROPE.forward)
        modules |= {RecomputeModule.MLA_UP_PROJ: UP_PROJECTIONS + rope, RecomputeModule.LAYERNORM: 1.0}
    if block is Block.MOE:
        parts = _expert_parts(problem, batch)
        modules[RecomputeModule.MOE] = add_up(launches.forward * count for launches, count in parts)
    each_s = _each_s(problem, batch, block)
    again = (np.where(batch.repeats(module), CHECKPOINT + count, 0.0) * each_s for module, count in modules.items())
    return add_up(again) + 0.0 * each_s


def _each_s(problem: Problem, batch: PlanBatch, block: Block) -> Floats:
    """Host time per launch of a block; 0 if a CUDA graph contains them."""
    graphed = is_one_graph(problem, batch) | is_graphed(batch, block)
    return np.where(graphed, 0.0, problem.framework.host.host_s_per_launch)


def _expert_parts(problem: Problem, batch: PlanBatch) -> list[tuple[Launches, Floats]]:
    """Return (part of a block of experts, how often each plan launches it)."""
    moe = problem.model.moe
    assert moe is not None
    once = np.ones(len(batch))
    sends = batch.ep > 1
    looped = 0.0 if problem.framework.experts.are_grouped else LIGHT * moe.num_experts / batch.ep
    routes = once * ~holds_graphs(batch, CudaGraphs.ROUTER)
    return [
        (FUSED_ROUTER, routes * batch.router_fusion),
        (ROUTER, routes * ~batch.router_fusion),
        (SHARED_EXPERTS, routes * (moe.shared_expert_ffn_size > 0)),
        (COUNT_TOKENS, once * counts_tokens(batch)),
        *((launches, once * sends * (batch.dispatcher == kind.code)) for kind, launches in DISPATCH.items()),
        (AROUND_EXPERTS, once),
        (PER_EXPERT, once * looped),
        (BIAS_PER_EXPERT, once * looped * problem.model.mlp_bias),
        (CASTS_PER_EXPERT, once * looped * np.isin(batch.precision, NARROW)),
    ]


def counts_tokens(batch: PlanBatch) -> Bools:
    """Return which plans compute the splits of an all-to-all with separate kernels, outside of a CUDA graph."""
    is_free = ~holds_graphs(batch, CudaGraphs.ROUTER)
    return np.asarray((batch.ep > 1) & (batch.dispatcher == Dispatcher.ALL_TO_ALL.code) & is_free)


# The smallest set of graphs that contains all launches of each kind of block.
GRAPHED_IN: dict[Block, CudaGraphs] = {
    Block.ATTENTION: CudaGraphs.ATTENTION,
    Block.WINDOW_ATTENTION: CudaGraphs.ATTENTION,
    Block.CROSS_ATTENTION: CudaGraphs.LAYER,
    Block.LINEAR_ATTENTION: CudaGraphs.ATTENTION,
    Block.MAMBA: CudaGraphs.LAYER,
    Block.CONVOLUTION: CudaGraphs.LAYER,
    Block.MLP: CudaGraphs.LAYER,
}


def holds_graphs(batch: PlanBatch, graphs: CudaGraphs) -> Bools:
    """Return which plans launch at least these graphs as CUDA graphs."""
    return batch.cuda_graphs >= graphs.code


def is_graphed(batch: PlanBatch, block: Block) -> Bools:
    """Return which plans have CUDA graphs with all launches of a kind of block."""
    return holds_graphs(batch, GRAPHED_IN.get(block, CudaGraphs.FULL_ITERATION))


def is_one_graph(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans of MoE models have static shapes and launch a whole pass as one CUDA graph: (plans)."""
    return np.asarray(pads_experts(problem, batch) | has_fused_experts(problem, batch))


def has_fused_experts(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans run experts in kernels that need no token counts on the host: shape (plans)."""
    return np.asarray(holds_graphs(batch, CudaGraphs.FULL_ITERATION))
