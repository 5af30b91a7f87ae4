"""Bytes of gradients and of the optimizer's states, by the data types that plans choose for them: shape (plans).

What a framework keeps where nothing is chosen are traits of it; what a choice saves of that is Megatron-Core's
(d98e8a6): core/optimizer/optimizer_config.py, use_precision_aware_optimizer, store_param_remainders and the data types
beside them, core/distributed/param_and_grad_buffer.py, whose buffer is what is reduced, and
core/optimizer/distrib_optimizer.py, _copy_model_grads_to_main_grads, which makes an fp32 copy of the own shard.
DeepSpeed's bf16 states are its runtime/zero/stage_1_and_2.py and stage3.py with bf16_master_weights_and_grads.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.spec.enums import GradType, MainWeights, MomentType, Offload, ReduceType
from autoplan.spec.optimizers import ADAM_MOMENT_BYTES, TRAITS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

HALF_BYTES, WIDE_BYTES = 2.0, 4.0  # of an element in 16 bits, and in fp32
# Of the 12 bytes of fp32 weights and moments, what each choice leaves out; and of what the update moves, which reads
# and writes each of them.  With remainders it reads the 16-bit weights as well.
_SAVED_WEIGHTS, _UNMOVED_WEIGHTS = (
    np.array([saved[word] for word in MainWeights])
    for saved in (
        {MainWeights.FP32: 0.0, MainWeights.REMAINDERS: 2.0, MainWeights.FP16: 2.0, MainWeights.BF16: 2.0},
        {MainWeights.FP32: 0.0, MainWeights.REMAINDERS: 2.0, MainWeights.FP16: 4.0, MainWeights.BF16: 4.0},
    )
)
_MOMENT_BYTES = {MomentType.FP32: 4.0, MomentType.BF16: 2.0, MomentType.FP8: 1.0}
_SAVED_MOMENTS = np.array([2.0 * (WIDE_BYTES - _MOMENT_BYTES[word]) for word in MomentType])


def optimizer_on_host(batch: PlanBatch) -> Bools:
    """Return which plans keep the optimizer's states in the host's memory, and update there."""
    return (batch.offload == Offload.OPTIMIZER.code) | parameters_on_host(batch)


def parameters_on_host(batch: PlanBatch) -> Bools:
    """Return which plans keep all states of training in the host's memory, and fetch weights for every pass."""
    return batch.offload == Offload.PARAMETERS.code


def _of_gradients(batch: PlanBatch, usual: float) -> Floats:
    return np.where(batch.grad_dtype == GradType.FP32.code, usual, min(usual, HALF_BYTES))


def _of_reduction(batch: PlanBatch, usual: float) -> Floats:
    by_choice = np.array([{ReduceType.FP32: WIDE_BYTES, ReduceType.HALF: HALF_BYTES}.get(w, usual) for w in ReduceType])
    is_usual = batch.reduce_dtype == ReduceType.USUAL.code
    return np.where(is_usual, _of_gradients(batch, usual), by_choice[batch.reduce_dtype])


def grad_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of a gradient in the buffer that keeps it."""
    return _of_gradients(batch, problem.framework.memory.bytes_per_grad)


def reduced_grad_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of a gradient on the wire."""
    return _of_reduction(batch, problem.bytes_per_reduced_grad)


def whole_grad_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of a gradient of a unit before its shards are reduced."""
    return _of_reduction(batch, problem.framework.network.bytes_per_reduced_grad)


def update_copy_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes that the optimizer's step makes for each parameter that the rank updates."""
    usual = problem.framework.memory.bytes_per_update_copy
    return usual + np.where(batch.grad_dtype == GradType.BF16.code, WIDE_BYTES, 0.0)


def optimizer_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes of main weights and moments of a parameter that the rank updates."""
    saved = _SAVED_WEIGHTS[batch.main_weights] + _SAVED_MOMENTS[batch.moment_dtype]
    return problem.framework.memory.bytes_per_optimizer_state - saved - _saved_by_optimizer(problem)


def _saved_by_optimizer(problem: Problem) -> float:
    """Bytes of a parameter of the layers that the optimizer keeps less than Adam does."""
    kind, hidden = TRAITS[problem.training.optimizer], problem.model.hidden_size
    usual = min(ADAM_MOMENT_BYTES, problem.framework.memory.bytes_per_optimizer_state)
    # Of a matrix as wide as the hidden size on both sides.
    return max(usual - kind.moment_bytes - 2.0 * kind.factored_bytes / hidden, 0.0)


def more_bytes_of_ends(problem: Problem) -> float:
    """Bytes that the optimizer keeps more of a parameter of embedding, head and last norm than of the layers."""
    kind = TRAITS[problem.training.optimizer]
    return ADAM_MOMENT_BYTES - kind.moment_bytes if kind.orthogonalises else 0.0


def update_moved_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Return the bytes that the update of a parameter reads and writes."""
    unmoved = _UNMOVED_WEIGHTS[batch.main_weights] + 2.0 * _SAVED_MOMENTS[batch.moment_dtype]
    return problem.framework.kernels.bytes_moved_per_update - unmoved - 2.0 * _saved_by_optimizer(problem)
