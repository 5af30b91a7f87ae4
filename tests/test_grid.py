"""Does the time of a grid of tensor-parallel ranks find what its flows over the links of a cluster say is best?"""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from autoplan.cluster import ClusterSpec, LinkLevel, NetworkSpec
from autoplan.cost.communication import all_reduce_s
from autoplan.cost.grid import tensor_grid_s
from autoplan.read.cluster import load_cluster
from autoplan.topology.levels import compile_topology
from flows import Expanded, ring, sibling_groups

DEVICES, RATIO, NIC = 64, 25, 12e9
HIDDEN = 7168  # GPT-20B of arXiv:2502.08145 has 32 such layers
BATCHES = [sequences * 2048 for sequences in (16, 64, 256, 4096)]  # tokens
MATRICES = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)]
DIVISORS = [2**power for power in range(7)]
GRIDS = [
    (x, y, z, DEVICES // (x * y * z)) for x in DIVISORS for y in DIVISORS for z in DIVISORS if x * y * z <= DEVICES
]


def cluster() -> ClusterSpec:
    """16 nodes of four devices, whose links have 25 times the rate of their NICs; nothing but bandwidth counts."""
    ideal = {"latency_s": 1e-12, "half_rate_bytes": 1e-3, "efficiency": 1.0}
    link = LinkLevel(name="link", kind="nvlink", num_devices=4, bandwidth_bytes_per_s=RATIO * NIC, **ideal)
    network = NetworkSpec(kind="infiniband", nic_bytes_per_s=NIC, **ideal)
    return dataclasses.replace(load_cluster("h100-sxm:16x4"), levels=(link,), network=network)


def predicted(tokens: int) -> dict[tuple[int, ...], float]:
    x, y, z, copies = (np.array([grid[axis] for grid in GRIDS]) for axis in range(4))
    times = tensor_grid_s(compile_topology(cluster()), (x, y, z, copies), MATRICES, tokens)
    return dict(zip(GRIDS, times.tolist(), strict=True))


@cache
def ring_s_per_byte(stride: int, size: int) -> float:
    """Time of all rings of an all-reduce at once, flow by flow over the links of every device."""
    expanded = Expanded(cluster())
    for group in sibling_groups(DEVICES, stride, size):
        ring(expanded, group, 1.0, 2.0)
    return max(expanded.busiest(0) / (RATIO * NIC), expanded.busiest(1) / NIC) if size > 1 else 0.0


def flowing_s(grid: tuple[int, ...], num_tokens: int) -> float:
    """The collectives of arXiv:2502.08145, section V, in bytes: gathers and reductions over z, sums over y and x."""
    x, y, z, copies = grid
    across, down, deep, data = (1, x), (x, y), (x * y, z), (x * y * z, copies)
    tokens, total = num_tokens / (z * copies), 0.0
    for number, (inputs, outputs) in enumerate(MATRICES):
        columns, rows = (across, down) if number % 2 == 0 else (down, across)
        total += ring_s_per_byte(*rows) * 2 * tokens * outputs / columns[1]
        total += ring_s_per_byte(*columns) * 2 * tokens * inputs / rows[1]
        weights = 2 * inputs * outputs / (x * y)
        total += 2 * ring_s_per_byte(*deep) / 2 * weights + ring_s_per_byte(*data) * weights / z
    return total


@pytest.mark.parametrize("tokens", BATCHES)
def test_the_best_of_all_grids_of_64_devices_is_among_the_ten_predicted_first(tokens: int) -> None:
    """Of those on which weights, gradients and Adam's states, 18 bytes for each of 20e9 parameters, fit in 40 GB."""
    times = predicted(tokens)
    assert len(times) == 84
    fitting = sorted((grid for grid in GRIDS if 18 * 20e9 / np.prod(grid[:3]) < 40e9), key=times.__getitem__)
    assert len(fitting) == 64
    assert min(fitting, key=lambda grid: flowing_s(grid, tokens)) in fitting[:10]


@pytest.mark.parametrize("tokens", BATCHES)
def test_tensor_parallelism_of_64_in_one_dimension_is_never_in_the_better_half(tokens: int) -> None:
    for times in (predicted(tokens), {grid: flowing_s(grid, tokens) for grid in GRIDS}):
        order = sorted(GRIDS, key=times.__getitem__)
        assert all(order.index(grid) >= len(order) // 2 for grid in ((64, 1, 1, 1), (1, 64, 1, 1)))


def test_a_grid_of_one_dimension_moves_what_megatron_does() -> None:
    """Four all-reduces of the hidden state a layer in both passes, and that of the gradients over the replicas."""
    topology = compile_topology(cluster())
    one = np.array([1])
    found = tensor_grid_s(topology, (4 * one, one, one, 16 * one), MATRICES, BATCHES[0])
    state = all_reduce_s(topology, one, 4 * one, np.array([2.0 * BATCHES[0] / 16 * HIDDEN]))
    weights = sum(2.0 * inputs * outputs / 4 for inputs, outputs in MATRICES)
    gradients = all_reduce_s(topology, 4 * one, 16 * one, np.array([weights]))
    assert found == pytest.approx(4 * state + gradients, rel=1e-6)
