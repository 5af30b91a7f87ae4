"""Bytes of gradients and optimizer states, by the data types chosen in plans: shape (plans).

The defaults are traits of the framework; the savings of each choice are those of Megatron-Core (d98e8a6):
core/optimizer/optimizer_config.py, use_precision_aware_optimizer, store_param_remainders and the data types next to
them, core/distributed/param_and_grad_buffer.py, whose buffer is reduced, and core/optimizer/distrib_optimizer.py,
_copy_model_grads_to_main_grads, which makes an fp32 copy of the rank's shard.  DeepSpeed's bf16 states follow
runtime/zero/stage_1_and_2.py and stage3.py with bf16_master_weights_and_grads.  If the model weights are the main
weights, as in torch, gradients and moments have their type (torch/optim/adam.py, zeros_like), also for models stored in
16 bits.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.spec.enums import GradType, MainWeights, MomentType, Offload, Precision, ReduceType, Sharding
from autoplan.spec.optimizers import ADAM_MOMENT_BYTES, TRAITS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

HALF_BYTES, WIDE_BYTES = 2.0, 4.0  # per element in 16 bits and in fp32
# Bytes that each choice saves of the 12 bytes of fp32 weights and moments; and of the traffic of an update, which reads
# and writes each of them.  With remainders the update also reads the 16-bit weights.
_SAVED_WEIGHTS, _UNMOVED_WEIGHTS = (
    np.array([saved[word] for word in MainWeights])
    for saved in (
        {MainWeights.FP32: 0.0, MainWeights.REMAINDERS: 2.0, MainWeights.FP16: 2.0, MainWeights.BF16: 2.0},
        {MainWeights.FP32: 0.0, MainWeights.REMAINDERS: 2.0, MainWeights.FP16: 4.0, MainWeights.BF16: 4.0},
    )
)
_MOMENT_BYTES = {MomentType.FP32: 4.0, MomentType.BF16: 2.0, MomentType.FP8: 1.0}
_SAVED_MOMENTS = np.array([2.0 * (WIDE_BYTES - _MOMENT_BYTES[word]) for word in MomentType])


def share_on_host(batch: PlanBatch) -> Floats:
    """Return the share of the optimizer states that plans keep and update in host memory."""
    part = np.where(batch.offload == Offload.OPTIMIZER.code, batch.offload_percent / 100, 0.0)
    return np.where(parameters_on_host(batch), 1.0, part)


def parameters_on_host(batch: PlanBatch) -> Bools:
    """Return which plans keep all training states in host memory and fetch weights for every pass."""
    return batch.offload == Offload.PARAMETERS.code


def is_16_bit_throughout(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans store main weights and gradients in 16 bits only."""
    is_narrow = (batch.main_weights == MainWeights.BF16.code) & problem.framework.memory.keeps_main_weights
    return np.asarray(is_narrow)


def weight_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the stored bytes of a trained weight."""
    return np.where(is_16_bit_throughout(problem, batch), HALF_BYTES, problem.framework.memory.bytes_per_weight)


def accumulator_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of an fp32 accumulator beside, or instead of, a 16-bit gradient; 0 where there is none."""
    accumulates = (batch.grad_dtype == GradType.FP32.code) & (batch.precision != Precision.FP16.code)
    return np.where(accumulates, problem.framework.memory.bytes_per_bf16_grad_accumulator, 0.0)


def accumulates_full_gradients(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which ZeRO-1 plans reduce accumulators beside gradients, all of them after the last pass.

    Source: DeepSpeed runtime/bf16_optimizer.py, which an optimizer on the host does not take (runtime/engine.py).
    """
    is_zero1 = (batch.sharding == Sharding.ZERO1.code) & (share_on_host(batch) == 0.0)
    beside = (accumulator_bytes(problem, batch) > 0.0) & (not problem.framework.memory.frees_accumulated_grads)
    return np.asarray(is_zero1 & beside)


def _of_gradients(batch: PlanBatch, usual: Floats | float) -> Floats:
    return np.where(batch.grad_dtype == GradType.FP32.code, usual, np.minimum(usual, HALF_BYTES))


def _of_reduction(batch: PlanBatch, usual: Floats | float) -> Floats:
    by_choice = np.array([WIDE_BYTES if word == ReduceType.FP32 else HALF_BYTES for word in ReduceType])
    is_usual = batch.reduce_dtype == ReduceType.USUAL.code
    return np.where(is_usual, _of_gradients(batch, usual), by_choice[batch.reduce_dtype])


def grad_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of a gradient in its buffer."""
    usual = problem.framework.memory.bytes_per_grad
    return np.where(is_16_bit_throughout(problem, batch), min(usual, HALF_BYTES), _of_gradients(batch, usual))


def reduced_grad_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of a gradient on the wire."""
    network = problem.framework.network
    accumulated = accumulator_bytes(problem, batch) * network.reduces_accumulators
    usual = _of_reduction(batch, np.maximum(network.bytes_per_reduced_grad, accumulated))
    are_as_stored = (batch.sharding == Sharding.NONE.code) & network.copies_reduce_as_stored
    return np.where(are_as_stored, grad_bytes(problem, batch), usual)


def full_grad_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of an unsharded gradient before its reduction."""
    return _of_reduction(batch, problem.framework.network.bytes_per_reduced_grad)


def update_copy_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of temporary copies in the optimizer step, per parameter that the rank updates."""
    usual = problem.framework.memory.bytes_per_update_copy
    copy_bytes = np.where(is_16_bit_throughout(problem, batch), usual / 2.0, usual)
    is_copied = (batch.grad_dtype == GradType.BF16.code) & (problem.framework.memory.bytes_per_grad > HALF_BYTES)
    return copy_bytes + np.where(is_copied, WIDE_BYTES, 0.0)


def optimizer_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of main weight and moments per parameter that the rank updates."""
    usual = problem.framework.memory.bytes_per_optimizer_state
    saved = (
        _SAVED_WEIGHTS[batch.main_weights] + _SAVED_MOMENTS[batch.moment_dtype] + _saved_by_optimizer(problem, usual)
    )
    narrow = usual / 2.0
    narrow -= _saved_by_optimizer(problem, narrow)
    return np.where(is_16_bit_throughout(problem, batch), narrow, usual - saved)


def _saved_by_optimizer(problem: Problem, state_bytes: float) -> float:
    """Bytes per layer parameter that the optimizer saves relative to Adam's `state_bytes`."""
    kind, hidden = TRAITS[problem.training.optimizer], problem.model.hidden_size
    # For a square matrix of the hidden size.
    return max(min(ADAM_MOMENT_BYTES, state_bytes) - kind.moment_bytes - 2.0 * kind.factored_bytes / hidden, 0.0)


def more_bytes_of_ends(problem: Problem) -> float:
    """Additional optimizer bytes per parameter of embedding, head and last norm, relative to layers."""
    kind = TRAITS[problem.training.optimizer]
    return ADAM_MOMENT_BYTES - kind.moment_bytes if kind.orthogonalises else 0.0


def update_moved_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes that the update of a parameter reads and writes.

    An update entirely in 16 bits is priced like the framework's own: torch's runs of such models were as slow (full
    fine-tuning of fms-acceleration, PEFT and torchtune fits better this way than with half the bytes, .138 to .143).
    """
    usual, is_narrow = problem.framework.memory.bytes_per_optimizer_state, is_16_bit_throughout(problem, batch)
    unmoved = _UNMOVED_WEIGHTS[batch.main_weights] + 2.0 * _SAVED_MOMENTS[batch.moment_dtype]
    saved = np.where(is_narrow, _saved_by_optimizer(problem, usual / 2.0), _saved_by_optimizer(problem, usual))
    return problem.framework.kernels.bytes_moved_per_update - np.where(is_narrow, 0.0, unmoved) - 2.0 * saved
