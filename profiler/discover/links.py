"""Rates of a cluster's links from measurements in the timing database, which take precedence over data sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.errors import InputError
from autoplan.base.units import MIB
from autoplan.profiler.fit import MIN_POINTS, VOLUMES, collective_points, fit_collectives
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation
from autoplan.topology.cluster import ClusterSpec, LinkLevel

MIN_BYTES = 16 * MIB  # minimum of the largest buffer: with less, no link reaches its plateau
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")  # the best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """Rate and latency of the links of a device, from buffers of growing size."""

    bytes_per_s: float  # bus bandwidth with the largest buffer
    latency_s: float  # latency per step, with the smallest buffer
    half_rate_bytes: float  # one device's part of the buffer at half the rate
    text: str  # description of the measurements


def with_measured(cluster: ClusterSpec, measured: Sequence[Measurement]) -> tuple[ClusterSpec, dict[str, str]]:
    """Return (the cluster with measured links, remarks on them by place)."""
    levels, remarks = [], {}
    for at, level in enumerate(cluster.levels):
        below = cluster.levels[at - 1].num_devices if at else 1
        inside = [measurement for measurement in measured if _is_inside(measurement, below, level.num_devices)]
        sustained_level = _measured_level(level, inside)
        levels.append(sustained_level[0] if sustained_level else level)
        if sustained_level:
            remarks[f"levels[{at}].efficiency"] = sustained_level[1]
    network = cluster.network
    if sustained := _sustained([measurement for measurement in measured if _is_between(measurement, cluster)]):
        nominal = network.nic_bytes_per_s * network.nics_per_device
        network = replace(
            network,
            nic_bytes_per_s=max(sustained.bytes_per_s, nominal) / network.nics_per_device,
            efficiency=min(sustained.bytes_per_s / nominal, 1.0),
            latency_s=sustained.latency_s,
            half_rate_bytes=sustained.half_rate_bytes,
        )
        remarks["network.efficiency"] = sustained.text
    return replace(cluster, levels=tuple(levels), network=network), remarks


def _is_inside(measurement: Measurement, more_than: int, at_most: int) -> bool:
    """Return whether the group is inside one domain and too large for the level below."""
    members, inside, *_ = measurement.shape
    return members == inside and more_than < members <= at_most


def _is_between(measurement: Measurement, cluster: ClusterSpec) -> bool:
    """Return whether NICs were measured: one member per node, with its siblings working if they share NICs."""
    members, inside, groups, _ = measurement.shape
    alone = cluster.network.nics_per_device >= 1
    return inside == 1 < members and (groups == cluster.devices_per_node or (alone and groups == 1))


def _measured_level(level: LinkLevel, measured: Sequence[Measurement]) -> tuple[LinkLevel, str] | None:
    """Return (the measured level, its source); None if the measurements are not sufficient."""
    points = collective_points(measurement for measurement in measured if measurement.operation in VOLUMES)
    if len(points.seconds) >= MIN_POINTS and not level.is_mesh:
        try:
            fit = fit_collectives(level, points)
        except InputError:  # too few sizes to check the fit
            pass
        else:
            text = f"measured: fitted to {fit.num_points} collectives, {100 * fit.error:.0f} % off on those held out"
            curve = replace(fit.curve, source=text)
            return replace(level, efficiency=fit.plateau, collectives=curve), text
    sustained = _sustained(measured, level)
    if sustained is None:
        return None
    nominal = level.bandwidth_bytes_per_s
    return replace(
        level,
        bandwidth_bytes_per_s=max(sustained.bytes_per_s, nominal),
        efficiency=min(sustained.bytes_per_s / nominal, 1.0),
        latency_s=sustained.latency_s,
        half_rate_bytes=sustained.half_rate_bytes,
        collectives=None,
    ), sustained.text


def _sustained(measured: Sequence[Measurement], mesh: LinkLevel | None = None) -> Sustained | None:
    """Return the rate of the largest groups, for the first of `OPERATIONS` measured with large buffers.

    In a mesh, a group only uses the links between its members.
    """
    for operation in OPERATIONS:
        timed = [measurement for measurement in measured if measurement.operation == operation]
        members = max((measurement.shape[0] for measurement in timed), default=0)
        largest = sorted(
            (measurement for measurement in timed if measurement.shape[0] == members),
            key=lambda measurement: measurement.shape[-1],
        )
        if len(largest) < 2 or largest[-1].shape[-1] < MIN_BYTES:
            continue
        volume = VOLUMES.get(operation, members / (members - 1))  # a message crosses the link once, completely
        buffers = np.array([float(measurement.shape[-1]) for measurement in largest])
        seconds = np.array([measurement.seconds for measurement in largest])
        rates = volume * buffers * (1 - 1 / members) / seconds
        share = (members - 1) / (mesh.num_devices - 1) if mesh and mesh.is_mesh else 1.0
        half = np.interp(0.5, np.maximum.accumulate(rates) / rates.max(), np.log(buffers))
        steps = volume * (members - 1) if operation in VOLUMES else 1.0
        return Sustained(
            bytes_per_s=float(rates.max()) / share,
            latency_s=float(seconds[0]) / steps,
            half_rate_bytes=float(np.exp(half)) / members,
            text=f"measured: {operation} of {members} devices, up to {buffers[-1] / MIB:,.0f} MiB",
        )
    return None
