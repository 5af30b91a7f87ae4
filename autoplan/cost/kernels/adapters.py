"""Kernels of fine-tuning: products of adapters, their memory traffic, and dequantisation of frozen weights.

Arrays have one element per plan; times are seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.launches import unpacks_eagerly
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.memory_bound import Traffic
from autoplan.cost.kernels.products import gemm_rate, matrices_s
from autoplan.cost.kernels.sizes import linear_tokens, local_sizes
from autoplan.cost.passes import SplitPass
from autoplan.cost.state_types import is_16_bit_throughout
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Rate of dequantisation kernels relative to a long stream: NF4 of bitsandbytes 0.41 on A100 adds 35 to
# 191 ms to both passes of models of 3 to 13 billion weights, read in 4 bits and written in 16 [fitted:
# Lightning-AI/litgpt 4839345, tutorials/resource-tables.md].
DEQUANTISE_SHARE = 0.25
# GPTQ's integers are unpacked by kernels of torch one after the other (AutoGPTQ 0.5.1, nn_modules/qlinear/
# qlinear_cuda_old.py, forward): half a byte is shifted to 4, these become 1, which is masked, gets its zero point taken
# off, and is scaled to 2: 16.5 bytes read and written per weight.  The product keeps the weights, so that the backward
# pass unpacks none.  The shift of a matrix that is spread out reaches but a part of a long stream's rate.
UNPACKED_BYTES = 16.5
UNPACK_SHARE = 0.5  # [fitted: Qwen README, int4 of 256 to 1,024 tokens on A100]


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
        moved["dequantise"] = _dequantising(problem, batch, shape)
    return moved


def _dequantising(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Traffic:
    """Bytes that undoing the quantisation of frozen weights takes in each pass, as of a long stream."""
    element, weights, packed_bytes = problem.training.element_bytes, np.zeros(len(batch)), 0.0
    for linear in shape.linears:
        if linear.weight_bytes is not None:
            inputs, outputs = local_sizes(linear, batch)
            copies = linear.copies / batch.ep if linear.is_expert else 1.0
            weights, packed_bytes = weights + inputs * outputs * copies, linear.weight_bytes
    if unpacks_eagerly(problem):
        return Traffic(weights * UNPACKED_BYTES / UNPACK_SHARE, 0.0 * weights)
    once = weights * (packed_bytes + element) / DEQUANTISE_SHARE
    return Traffic(once, once)


class _AdapterBytes(NamedTuple):
    """Bytes that an adapter moves beside its products, per token and element of its inputs or outputs, in each pass."""

    forward_input: Floats
    forward_dropout: Floats  # per element of the inputs, where there is dropout
    forward_output: Floats
    backward_input: Floats
    backward_dropout: Floats
    backward_output: Floats


# Adapters in 16 bits, in fp32 under torch.autocast, and in fp32 without it, in this order.
# Forward outputs are scaled and added to those of the frozen matrix; backward gradients are scaled, and those of the
# inputs added up.  Dropout reads the inputs and writes what is left with a mask, and reads and writes gradients.
# In fp32 (peft 0.13, tuners/lora/layer.py, Linear.forward) inputs are cast first, and torch.autocast casts them back
# for the products; without it these read and write fp32, and the sum with the frozen outputs is cast to 16 bits.
_ADAPTER_BYTES = _AdapterBytes(
    forward_input=np.array([0.0, 12.0, 8.0]),
    forward_dropout=np.array([5.0, 9.0, 9.0]),
    forward_output=np.array([10.0, 10.0, 26.0]),
    backward_input=np.array([6.0, 18.0, 16.0]),
    backward_dropout=np.array([5.0, 9.0, 9.0]),
    backward_output=np.array([4.0, 4.0, 24.0]),
)


def _adapter_bytes(problem: Problem, batch: PlanBatch) -> _AdapterBytes:
    """Return the bytes that the adapters of every plan move."""
    is_wide = problem.framework.kernels.casts_for_adapters & ~is_16_bit_throughout(problem, batch)
    kind = np.where(is_wide, 1 + batch.wide_adapters, 0)
    return _AdapterBytes(*(moved[kind] for moved in _ADAPTER_BYTES))


def _adapter_traffic(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Traffic:
    """Bytes that adapters move beside their products.

    Every operation of them is counted, so that the factor of a framework's other kernels does not apply. Magnitudes
    scale both outputs, and are found again in every pass: weights of both are added up and their norms taken.
    """
    finetuning, element = problem.training.finetuning, problem.training.element_bytes
    assert finetuning is not None
    moved, has_dropout = _adapter_bytes(problem, batch), finetuning.dropout > 0
    forward, backward = np.zeros(len(batch)), np.zeros(len(batch))
    for linear in shape.linears:
        if not linear.adapts:
            continue
        tokens = linear_tokens(problem, batch, linear)
        inputs, outputs = local_sizes(linear, batch)
        if linear.name.endswith("lora_a"):
            forward = forward + (moved.forward_input + has_dropout * moved.forward_dropout) * tokens * inputs
            backward = backward + (moved.backward_input + has_dropout * moved.backward_dropout) * tokens * inputs
            continue
        forward = forward + moved.forward_output * tokens * outputs
        backward = backward + moved.backward_output * tokens * outputs
        if finetuning.dora:
            base = next(entry for entry in shape.linears if entry.name == linear.adapts)
            weights = local_sizes(base, batch)[0] * outputs * (linear.copies / batch.ep if linear.is_expert else 1.0)
            forward = forward + element * (6.0 * weights + 5.0 * tokens * outputs)
            backward = backward + element * 8.0 * tokens * outputs
    return Traffic(forward, backward)
