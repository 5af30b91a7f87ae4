"""How long do the matrices of a layer communicate when they are cut over a grid of ranks, tensor parallelism in 3-D?

AxoNN (arXiv:2305.13525, arXiv:2502.08145): of the gx x gy x gz ranks that share a matrix, x and y cut its columns and
rows, z its parts and the tokens; gx = tp and gy = gz = 1 is what Megatron-LM calls tensor parallelism.  No launcher that
autoplan writes for runs such a plan, so that it prices grids but does not search them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.communication import all_gather_s, all_reduce_s
from autoplan.topology.levels import Topology

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ELEMENT_BYTES = 2.0


def tensor_grid_s(
    topology: Topology, grid: tuple[Ints, Ints, Ints, Ints], matrices: Sequence[tuple[int, int]], tokens: int
) -> Floats:
    """Seconds of the collectives of a layer in a step, one after another; shape (grids).

    `grid` is (gx, gy, gz, replicas), x with neighbouring ranks; `matrices` are (inputs, outputs) in the order in which
    `tokens` of all replicas pass through them.  Every other matrix has x and y exchanged, so that its inputs are where
    the outputs of the one before are.
    """
    x, y, z, replicas = grid
    groups = (np.ones_like(x), x), (x, y)
    depth, copies = (x * y, z), (x * y * z, replicas)
    own_tokens = tokens / (z * replicas)
    total = np.zeros(len(x))
    for number, (inputs, outputs) in enumerate(matrices):
        columns, rows = groups if number % 2 == 0 else groups[::-1]
        weights = ELEMENT_BYTES * inputs * outputs / (x * y)
        # Outputs are partial sums over the rows, and gradients of the inputs over the columns.
        total += all_reduce_s(topology, *rows, ELEMENT_BYTES * own_tokens * outputs / columns[1])
        total += all_reduce_s(topology, *columns, ELEMENT_BYTES * own_tokens * inputs / rows[1])
        # Weights are gathered over z before the forward pass, their gradients reduced over it and over the replicas.
        total += 2 * all_gather_s(topology, *depth, weights)
        total += all_reduce_s(topology, *copies, weights / z)
    return total
