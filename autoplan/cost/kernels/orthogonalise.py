"""Time of the GEMMs with which Muon orthogonalises momenta (arXiv:2502.16982, section 2)."""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.products import gemm_rate
from autoplan.cost.kernels.sizes import local_sizes
from autoplan.spec.optimizers import NEWTON_SCHULZ_STEPS, TRAITS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


def orthogonalise_s(problem: Problem, batch: PlanBatch, num_parameters: Floats) -> Floats:
    """Time of a rank to orthogonalise its `num_parameters`, assuming the model's average share of matrices among them.

    Tensor-parallel ranks process their parts of a matrix (Megatron-Core's `blockwise`); data-parallel ranks with
    sharded states process the matrices in their shard.
    """
    if not TRAITS[problem.training.optimizer].orthogonalises:
        return np.zeros_like(num_parameters)
    model, finetuning = problem.model, problem.training.finetuning
    shapes = block_shapes(model, finetuning)
    operations, elements = np.zeros(len(batch)), np.zeros(len(batch))
    for layer in model.layers:
        for block in layer:
            for linear in shapes[block].linears:
                if linear.is_frozen or linear.is_shared:
                    continue
                inputs, outputs = local_sizes(linear, batch)
                short, long = np.minimum(inputs, outputs), np.maximum(inputs, outputs)
                steps = NEWTON_SCHULZ_STEPS * (4.0 * short**2 * long + 2.0 * short**3)
                operations = operations + linear.copies * steps
                elements = elements + linear.copies * inputs * outputs
    if finetuning is None or not finetuning.has_adapters:
        tables = 1.0 if model.tied_embeddings else 2.0
        elements = elements + tables * model.vocab_size * model.table_width / batch.tp
    return num_parameters * operations / np.maximum(elements, 1.0) / gemm_rate(problem, batch.unquantised())
