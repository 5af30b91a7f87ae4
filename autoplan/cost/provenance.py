"""Provenance of a step's time: measured, disturbed, interpolated or scaled kernel times, fitted curves, datasheets.

The share of a provenance is the relative growth of the step per relative growth of all times of that provenance; times
hidden behind other work have none.  A step consists of sums and maxima of times, so the shares add up to one (Euler's
theorem on homogeneous functions).
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

_GROWTH = 1e-6  # small enough to hardly ever switch a maximum, large enough for floating-point precision


def shares(problem: Problem, batch: PlanBatch) -> dict[Provenance, Floats]:
    """Share of every plan's step by provenance; `reference` is the rest, with launches fitted to published runs."""
    grown = {name: None if cost is None else cost.step_s for name, cost in _grown(problem, batch).items()}
    return _shares(estimate(problem, batch).step_s, grown)


def term_shares(problem: Problem, batch: PlanBatch) -> dict[str, dict[Provenance, Floats]]:
    """Share of each provenance in every term of the step, for terms that are not zero in all plans."""
    grown = _grown(problem, batch)
    return {
        name: _shares(value, {kind: None if cost is None else cost.terms_s[name] for kind, cost in grown.items()})
        for name, value in estimate(problem, batch).terms_s.items()
        if value.any()
    }


def _grown(problem: Problem, batch: PlanBatch) -> dict[Provenance, CostEstimate | None]:
    """Costs of the plans with longer times of each single provenance; None if the problem has no such times."""
    slower: dict[Provenance, Problem | None] = dict.fromkeys(("measured", "interpolated", "scaled", "disturbed"))
    if not problem.timings.is_empty:
        for name in slower:
            factors = SourceFactors(**{name: 1.0 + _GROWTH})
            slower[name] = replace(problem, timings=replace(problem.timings, source_factors=factors))
    slower["datasheet"] = _slower_datasheet(problem)
    return {name: None if grown is None else estimate(grown, batch) for name, grown in slower.items()}


def _shares(value: Floats, grown: dict[Provenance, Floats | None]) -> dict[Provenance, Floats]:
    """Shares in `value`, from its values with longer times of each provenance except `reference`."""
    none, divisor = np.zeros(len(value)), np.where(value > 0, value, 1.0)
    shares = {
        name: none if longer is None else np.maximum((longer - value) / divisor, 0.0) / _GROWTH
        for name, longer in grown.items()
    }
    # If two provenances tie for a maximum, either one makes the step longer.
    total = np.maximum(sum(shares.values()), 1.0)
    shares = {name: share / total for name, share in shares.items()}
    shares["reference"] = np.maximum(1.0 - sum(shares.values()), 0.0)
    return {name: shares[name] for name in PROVENANCES}


def _slower_datasheet(problem: Problem) -> Problem:
    """Return the problem with longer times for everything priced by a datasheet, without a curve fitted to the device.

    A device with a `rate_spread` has the curves of a similar one.
    """
    growth, device, calibration = 1.0 + _GROWTH, problem.cluster.device, problem.calibration
    if not device.gemm.is_measured or device.rate_spread:
        # Memory-bound kernels follow the products: both were measured on a device, or neither was.
        calibration = replace(
            calibration, gemm=growth * calibration.gemm, memory_bound=growth * calibration.memory_bound
        )
    if not device.attention.is_measured or device.rate_spread:
        calibration = replace(calibration, attention=growth * calibration.attention)
    cluster = _slower_links(problem.cluster, growth)
    if device.rate_spread:
        device = replace(device, host_link_bytes_per_s=device.host_link_bytes_per_s / growth)
    return replace(problem, cluster=replace(cluster, device=device), calibration=calibration)


def _slower_links(cluster: ClusterSpec, growth: float) -> ClusterSpec:
    levels = tuple(
        link
        if link.collectives
        else replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / growth,
            host_bridge_bytes_per_s=link.host_bridge_bytes_per_s and link.host_bridge_bytes_per_s / growth,
            latency_s=growth * link.latency_s,
        )
        for link in cluster.levels
    )
    network = cluster.network
    network = replace(network, nic_bytes_per_s=network.nic_bytes_per_s / growth, latency_s=growth * network.latency_s)
    return replace(cluster, levels=levels, network=network)
