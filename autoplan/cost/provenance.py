"""On what does the time of a step rest: measured kernels, interpolated ones, fitted curves or datasheets?

The share of a provenance is by how much, relatively, the step grows when all times of that provenance grow: what hides
behind other work has none, as nothing depends on it.  A step is made of sums and maxima of times, so that shares add up
to one (Euler's theorem on homogeneous functions).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import ClusterSpec
from autoplan.cost.estimate import estimate
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.timing import Provenance

Floats = NDArray[np.float64]

_GROWTH = 1e-6  # small enough that hardly any maximum changes sides, large enough for the digits of a step


def shares(problem: Problem, batch: PlanBatch) -> dict[Provenance, Floats]:
    """What share of every plan's step rests on each provenance.

    `reference` is what remains, the launches and overheads of frameworks in it, which were fitted to published runs.
    """
    none = np.zeros(len(batch))
    slower = {"measured": problem, "interpolated": problem, "datasheet": _slower_datasheet(problem)}
    if not problem.timings.is_empty:
        for name, nudge in (("measured", (1.0 + _GROWTH, 1.0)), ("interpolated", (1.0, 1.0 + _GROWTH))):
            slower[name] = replace(problem, timings=replace(problem.timings, nudge=nudge))
    step_s = estimate(problem, batch).step_s
    found = {
        name: none if other is problem else np.maximum(estimate(other, batch).step_s / step_s - 1, 0.0) / _GROWTH
        for name, other in slower.items()
    }
    # Where two of them tie for a maximum, either makes the step longer.
    whole = np.maximum(sum(found.values()), 1.0)
    measured, interpolated, datasheet = (found[name] / whole for name in ("measured", "interpolated", "datasheet"))
    reference = np.maximum(1.0 - measured - interpolated - datasheet, 0.0)
    return {"measured": measured, "interpolated": interpolated, "reference": reference, "datasheet": datasheet}


def _slower_datasheet(problem: Problem) -> Problem:
    """The problem with all times longer that only a datasheet tells: without a fitted curve of device or link."""
    growth, device, calibration = 1.0 + _GROWTH, problem.cluster.device, problem.calibration
    if not device.gemm.is_measured:
        # What streams through memory goes with the products: both were measured on a device, or neither was.
        calibration = replace(
            calibration, gemm=growth * calibration.gemm, memory_bound=growth * calibration.memory_bound
        )
    if not device.attention.is_measured:
        calibration = replace(calibration, attention=growth * calibration.attention)
    return replace(problem, cluster=_slower_links(problem.cluster, growth), calibration=calibration)


def _slower_links(cluster: ClusterSpec, growth: float) -> ClusterSpec:
    levels = tuple(
        link
        if link.collectives
        else replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / growth, latency_s=growth * link.latency_s)
        for link in cluster.levels
    )
    network = cluster.network
    network = replace(network, nic_bytes_per_s=network.nic_bytes_per_s / growth, latency_s=growth * network.latency_s)
    return replace(cluster, levels=levels, network=network)
