"""Provenance of a step's time: measured kernels, disturbed, interpolated or scaled ones, fitted curves, datasheets.

The share of a provenance is by how much, relatively, the step grows when all times of that provenance grow: what hides
behind other work has none, as nothing depends on it.  A step is made of sums and maxima of times, so that shares add up
to one (Euler's theorem on homogeneous functions).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.estimate import estimate
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import PROVENANCES, Provenance, SourceFactors
from autoplan.topology.cluster import ClusterSpec

_GROWTH = 1e-6  # small enough that hardly any maximum changes sides, large enough for the digits of a step


def shares(problem: Problem, batch: PlanBatch) -> dict[Provenance, Floats]:
    """Share of every plan's step by provenance; `reference` is the rest, with launches fitted to published runs."""
    grown = {name: None if cost is None else cost.step_s for name, cost in _grown(problem, batch).items()}
    return _shares(estimate(problem, batch).step_s, grown)


def term_shares(problem: Problem, batch: PlanBatch) -> dict[str, dict[Provenance, Floats]]:
    """Share of every term of the step that rests on each provenance, for terms that are not zero in all plans."""
    grown = _grown(problem, batch)
    return {
        name: _shares(value, {kind: None if cost is None else cost.terms_s[name] for kind, cost in grown.items()})
        for name, value in estimate(problem, batch).terms_s.items()
        if value.any()
    }


def _grown(problem: Problem, batch: PlanBatch) -> dict[Provenance, CostEstimate | None]:
    """Costs of the plans where all times of one provenance are longer; None where the problem has no such times."""
    slower: dict[Provenance, Problem | None] = dict.fromkeys(("measured", "interpolated", "scaled", "disturbed"))
    if not problem.timings.is_empty:
        for name in slower:
            factors = SourceFactors(**{name: 1.0 + _GROWTH})
            slower[name] = replace(problem, timings=replace(problem.timings, source_factors=factors))
    slower["datasheet"] = _slower_datasheet(problem)
    return {name: None if grown is None else estimate(grown, batch) for name, grown in slower.items()}


def _shares(value: Floats, grown: dict[Provenance, Floats | None]) -> dict[Provenance, Floats]:
    """Shares of `value`, from what it is where the times of each provenance but `reference` are longer."""
    none, divisor = np.zeros(len(value)), np.where(value > 0, value, 1.0)
    shares = {
        name: none if longer is None else np.maximum((longer - value) / divisor, 0.0) / _GROWTH
        for name, longer in grown.items()
    }
    # Where two of them tie for a maximum, either makes the step longer.
    total = np.maximum(sum(shares.values()), 1.0)
    shares = {name: share / total for name, share in shares.items()}
    shares["reference"] = np.maximum(1.0 - sum(shares.values()), 0.0)
    return {name: shares[name] for name in PROVENANCES}


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
