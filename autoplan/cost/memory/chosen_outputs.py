"""Bytes that blocks keep where the operations are chosen whose outputs stay: selective checkpointing of torchtitan.

Kept are a layer's input, the outputs of attention, of every second matrix product of a layer from the first on, and of
reduce-scatters; everything else is repeated (torchtitan/distributed/activation_checkpoint.py).  Products with a bias
are another operation (aten.addmm), which does not count among these.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.kernels.linears import Linear
from autoplan.cost.kernels.sizes import linear_tokens, local_sizes, matrix_pieces, norm_tokens, rank_tokens
from autoplan.cost.memory.expert_buffers import held_expert_tokens
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.plan import SELECTIVE, PlanBatch
from autoplan.spec.problem import Problem

SUM_BYTES = 4.0  # of the logarithm of a head's softmax sum, per token
LAST = ("fc2", "shared_fc2")  # the last product of a layer, whose output no gradient needs


def chooses_outputs(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans keep chosen outputs of every layer."""
    return (batch.recompute == SELECTIVE) & problem.framework.kernels.selective_saves_attention


def chosen_bytes(problem: Problem, batch: PlanBatch) -> dict[Block, Floats]:
    """Bytes beside the layer's input that attention and feed-forward blocks keep per micro-batch, by kind of block.

    Where parts of a layer are compiled on their own inside of the checkpoint, as those of mixtures, products are not
    seen, and all of them are repeated; the kernel of attention is called by name, and seen.
    """
    model, kernels, element = problem.model, problem.framework.kernels, problem.training.element_bytes
    sees_products = model.moe is None or not kernels.compiles_mixtures_in_parts
    kept: dict[Block, Floats] = {}
    shapes = layer_shapes(model, problem.training.finetuning)
    for layer in model.layer_kinds:
        num_products = 0
        for block in layer:
            size = np.zeros(len(batch))
            for linear in _products(problem, shapes[block].linears):
                num_products += not linear.has_bias
                is_kept = kernels.keeps_biased_and_exchanged if linear.has_bias else num_products % 2
                is_needed = linear.name not in LAST or not kernels.fused_activation
                if sees_products and is_kept and is_needed:
                    outputs = local_sizes(linear, batch)[1]
                    size = size + element * linear_tokens(problem, batch, linear) * outputs
            if block in ATTENTION_BLOCKS:
                heads = rank_tokens(problem, batch) * model.num_heads / batch.tp * model.attention_streams
                size = size + (element * model.v_head_dim + SUM_BYTES) * heads
                size = size + element * norm_tokens(problem, batch) * model.hidden_size * (batch.tp > 1)
            elif block is Block.MOE and kernels.keeps_biased_and_exchanged and model.moe is not None:
                width = model.moe.latent_size or model.hidden_size
                size = size + 2 * element * held_expert_tokens(problem, batch) * width * (batch.ep > 1)
            if block in (*ATTENTION_BLOCKS, Block.MLP, Block.MOE):
                kept.setdefault(block, size)
    return kept


def _products(problem: Problem, linears: tuple[Linear, ...]) -> list[Linear]:
    """Return the products that count, in their order: routers are left out, and experts are multiplied in groups."""
    products = []
    for linear in linears:
        if linear.name == "shared_fc1" and problem.model.gated_mlp:
            products += 2 * [replace(linear, out_size=linear.out_size // 2)]
        elif not linear.is_expert and linear.name not in ("router", "shared_gate"):
            products += matrix_pieces(problem, linear)
    return products
