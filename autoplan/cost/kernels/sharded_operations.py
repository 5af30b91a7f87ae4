"""Host time of operations on DTensors, by which torch's own tensor parallelism runs layers that are not compiled.

Each of them passes Python on the host: its sharding is looked up, its local tensors are unwrapped and wrapped again,
and where a placement changes, collectives are called (torch/distributed/tensor/_dispatch.py).  Compiled layers hold
only the local operations.

Counted with torch 2.13 in a layer of Llama with torchtitan's plan (sequence-parallel norms, parallel matrices,
prepared inputs) on a process group that sends nothing: 46 forward, 108 backward, and 92 more under a checkpoint of the
whole layer, 89 under one by operation.  On a slow processor they added 68 and, with a checkpoint, 79 us each, where an
operation on plain tensors took 27.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.launches import Launches
from autoplan.cost.passes import Pass
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# An RMSNorm as torch decomposes it: two casts, a square, mean, sum, root, two products and what it saves; a matrix: its
# transposed view, the input's, the product and its view.  Backward also the sum of the gradients of a shared input.
NORM, MATRIX, SHARED_INPUT = Launches(9, 21), Launches(4, 9), Launches(0, 1)
# A checkpoint detaches as many tensors as it repeats operations.
PER_REPEATED_OPERATION = 2


def _count(problem: Problem, block: Block) -> Launches:
    """Operations on DTensors of one block; queries, keys and values, gate and up are matrices of their own."""
    model = problem.model
    if block in ATTENTION_BLOCKS:
        norms, matrices, shared_inputs = 1 + 2 * (model.qk_norm != "none"), 4, 2
    elif block is Block.MLP:
        norms, matrices, shared_inputs = 1, 2 + model.gated_mlp, int(model.gated_mlp)
    elif block is Block.MOE:  # the router; experts take local tensors
        norms, matrices, shared_inputs = 1, 1, 0
    else:
        norms, matrices, shared_inputs = 0, 0, 0
    return Launches(
        norms * NORM.forward + matrices * MATRIX.forward + shared_inputs * SHARED_INPUT.forward,
        norms * NORM.backward + matrices * MATRIX.backward + shared_inputs * SHARED_INPUT.backward,
    )


def sharded_operations_s(problem: Problem, batch: PlanBatch, block: Block) -> Pass:
    """Return the host time of one block's operations on DTensors."""
    count, each_s = _count(problem, block), _each_s(problem, batch)
    return Pass(count.forward * each_s, count.backward * each_s)


def repeated_operations_s(problem: Problem, batch: PlanBatch, block: Block) -> Floats:
    """Return the host time of a block's operations on DTensors in a forward pass under a checkpoint, run again."""
    return PER_REPEATED_OPERATION * _count(problem, block).forward * _each_s(problem, batch)


def _each_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Host time per operation; 0 without a tensor group, and where compiled kernels fuse norms and activation."""
    is_compiled = problem.fuses_norms and problem.framework.kernels.fused_activation
    each_s = 0.0 if is_compiled else problem.framework.host.host_s_per_dtensor_operation
    return np.where(batch.tp > 1, each_s, 0.0)
