"""Kernels of fine-tuning: products beside frozen matrices, what adapters move, and undoing the quantisation of weights.

Arrays have one element per plan; times are seconds.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.arithmetic import BlockShape, Linear
from autoplan.cost.kernels.memory_bound import Traffic
from autoplan.cost.kernels.products import gemm_rate, matrices_s
from autoplan.cost.kernels.sizes import expert_tokens, local_sizes, norm_tokens, rank_tokens
from autoplan.cost.passes import SplitPass
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Rate of the kernels that undo a quantisation over that of a long stream: NF4 of bitsandbytes 0.41 on A100 adds 35 to
# 191 ms to both passes of models of 3 to 13 billion weights, read in 4 bits and written in 16 [fitted:
# Lightning-AI/litgpt 4839345, tutorials/resource-tables.md].
DEQUANTISE_SHARE = 0.25


def tuned_matrices_s(problem: Problem, batch: PlanBatch, shape: BlockShape) -> dict[str, SplitPass]:
    """Passes of the matrices of a block by name: frozen ones have no weight gradient, adapters stay in 16 bits."""
    rate = gemm_rate(problem, batch)
    if not shape.is_frozen:
        return matrices_s(problem, batch, shape.linears, rate)
    base = tuple(linear for linear in shape.linears if not linear.adapts)
    adapters = tuple(linear for linear in shape.linears if linear.adapts)
    times = matrices_s(problem, batch, base, rate)
    for linear in base:
        if linear.is_frozen:
            passes = times[linear.name]
            times[linear.name] = passes._replace(weight_gradient_s=0.0 * passes.weight_gradient_s)
    wide = batch.unquantised()
    return times | matrices_s(problem, wide, adapters, gemm_rate(problem, wide))


def tuning_traffic(problem: Problem, batch: PlanBatch, shape: BlockShape) -> dict[str, Traffic]:
    """Traffic of the adapters and of undoing the quantisation of a block's weights, by operation."""
    moved: dict[str, Traffic] = {}
    if any(linear.adapts for linear in shape.linears):
        moved["adapters"] = _adapter_traffic(problem, batch, shape)
    if any(linear.weight_bytes is not None for linear in shape.linears):
        once = _dequantised_bytes(problem, batch, shape)
        moved["dequantise"] = Traffic(once, once)
    return moved


def linear_tokens(problem: Problem, batch: PlanBatch, linear: Linear) -> Floats:
    """Tokens of a micro-batch that a rank's part of a matrix meets, of experts all local copies together."""
    if linear.is_expert:
        return expert_tokens(problem, batch) * linear.copies / batch.ep
    return norm_tokens(problem, batch) if linear.split == "replicated" else rank_tokens(problem, batch)


def _dequantised_bytes(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Floats:
    """Bytes that undoing the quantisation of frozen weights takes in every pass, as of a long stream."""
    element, moved = problem.training.element_bytes, np.zeros(len(batch))
    for linear in shape.linears:
        if linear.weight_bytes is not None:
            inputs, outputs = local_sizes(linear, batch)
            copies = linear.copies / batch.ep if linear.is_expert else 1.0
            moved = moved + (linear.weight_bytes + element) * inputs * outputs * copies
    return moved / DEQUANTISE_SHARE


def _adapter_traffic(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Traffic:
    """Bytes that adapters move beside their products.

    Forward their outputs are scaled and added to those of the frozen matrix; backward the gradients are scaled, and
    those of the inputs added up.  Dropout reads the inputs and writes what is left, and reads and writes gradients.
    Every operation of them is counted, so that the factor of a framework's other kernels does not apply.
    Magnitudes scale both outputs, and are found anew in every pass: weights of both are added up and their norms taken.
    """
    finetuning, element = problem.training.finetuning, problem.training.element_bytes
    assert finetuning is not None
    forward, backward = np.zeros(len(batch)), np.zeros(len(batch))
    for linear in shape.linears:
        if not linear.adapts:
            continue
        tokens = linear_tokens(problem, batch, linear)
        inputs, outputs = local_sizes(linear, batch)
        if linear.name.endswith("lora_a"):
            dropped = 2.5 if finetuning.dropout else 0.0
            forward = forward + dropped * tokens * inputs
            backward = backward + (3.0 + dropped) * tokens * inputs
            continue
        forward = forward + 5.0 * tokens * outputs
        backward = backward + 2.0 * tokens * outputs
        if finetuning.dora:
            base = next(entry for entry in shape.linears if entry.name == linear.adapts)
            weights = local_sizes(base, batch)[0] * outputs * (linear.copies / batch.ep if linear.is_expert else 1.0)
            forward = forward + 6.0 * weights + 5.0 * tokens * outputs
            backward = backward + 8.0 * tokens * outputs
    return Traffic(element * forward, element * backward)
