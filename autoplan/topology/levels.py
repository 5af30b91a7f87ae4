"""Which links does a group of ranks cross, and at what rate?  The cluster compiled to nested levels.

Ranks fill nodes in order, so the members of a group are an arithmetic sequence: `size` ranks, `stride` apart.  A
level joins domains of `num_devices` devices: a pair of dies, a node, a rack, the nodes under one leaf switch, a
site, all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import ClusterSpec
from autoplan.curves import CollectiveCurve

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One kind of link; the rate is per device, one direction, sustained."""

    name: str
    num_devices: int
    bytes_per_s: float
    latency_s: float
    half_rate_bytes: float
    is_mesh: bool = False  # the rate is that of all direct links together
    is_network: bool = False  # reached over NICs
    is_reducing: bool = False  # its switches add up what is reduced (SHARP)
    collectives: CollectiveCurve | None = None  # where measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Levels from the innermost outwards; the last one joins all devices."""

    levels: tuple[Level, ...]

    @property
    def network(self) -> tuple[int, ...]:
        """Indices of the levels that NICs lead to."""
        return tuple(at for at, level in enumerate(self.levels) if level.is_network)

    @property
    def tiers(self) -> tuple[int, ...]:
        """Indices of the further tiers of the network, and its sites: their traffic comes over the NICs as well."""
        return self.network[1:]

    def members(self, stride: Ints, size: Ints) -> Ints:
        """How many members of each group share one domain of each level: shape (levels, groups).

        A group whose span does not divide the domain straddles two domains for some of its siblings; the step waits
        for those, so they decide.
        """
        result = np.empty((len(self.levels), len(size)), dtype=np.int64)
        for at, level in enumerate(self.levels[:-1]):
            inside = np.clip(level.num_devices // stride, 1, size)
            span = stride * size
            straddles = (inside >= size) & (level.num_devices % span != 0) & (span > 1)
            result[at] = np.where(straddles, np.maximum((size + 1) // 2, 1), inside)
            if at:
                result[at] = np.maximum(result[at], result[at - 1])
        result[-1] = size
        return result


def used_of_domain(num_devices: int, devices_per_node: int, total: int) -> int:
    """Devices of one domain that a job of `total` devices uses: racks wider than a node are filled evenly.

    256 devices in racks of 72 are 4 x 64, not 3 x 72 + 40: schedulers place jobs in equal segments so that no group
    straddles two racks.
    """
    if num_devices <= devices_per_node or num_devices >= total:
        return min(num_devices, total)
    least, nodes = -(-total // num_devices), total // devices_per_node
    even = (domains for domains in range(least, 2 * least + 1) if nodes % domains == 0)
    domains = next(even, 0)
    return total // domains if domains else num_devices


def compile_topology(cluster: ClusterSpec) -> Topology:
    """The levels of `cluster` that its devices need, with sustained rates."""
    total = cluster.num_devices
    slow_link = cluster.slowest_share("link")
    levels = []
    for link in cluster.levels:
        levels.append(
            Level(
                name=link.name,
                num_devices=used_of_domain(link.num_devices, cluster.devices_per_node, total),
                bytes_per_s=link.rate_bytes_per_s * link.efficiency * slow_link,
                latency_s=link.latency_s,
                half_rate_bytes=link.half_rate_bytes,
                is_mesh=link.is_mesh,
                collectives=link.collectives,
            )
        )
        if levels[-1].num_devices >= total:
            return Topology(levels=tuple(levels))
    network = cluster.network
    rate = network.nic_bytes_per_s * network.nics_per_device * network.efficiency
    fabric = Level(
        name=network.kind,
        num_devices=total,
        bytes_per_s=rate,
        latency_s=network.latency_s,
        half_rate_bytes=network.half_rate_bytes,
        is_network=True,
        is_reducing=network.sharp,
    )
    site = cluster.wan.nodes_per_site * cluster.devices_per_node if cluster.wan else total
    oversubscription = 1.0
    for at, tier in enumerate(network.tiers):
        num_devices = tier.num_nodes * cluster.devices_per_node
        if num_devices >= min(site, total):
            break
        narrowed = tier.oversubscription / cluster.slowest_share("uplink", at)
        if narrowed > 1:
            name = f"{network.kind} {tier.name}"
            levels.append(replace(fabric, name=name, num_devices=num_devices, bytes_per_s=rate / oversubscription))
            oversubscription *= narrowed
    fabric = replace(fabric, bytes_per_s=rate / oversubscription)
    if cluster.wan and site < total:
        share = min(cluster.wan.rate_bytes_per_s / site, fabric.bytes_per_s)
        levels.append(replace(fabric, num_devices=site))
        fabric = replace(fabric, name="wan", bytes_per_s=share, latency_s=cluster.wan.latency_s, is_reducing=False)
    levels.append(fabric)
    # Ranks wait for those behind the slowest NIC; what shares the links out of a switch does not.
    first = next(at for at, level in enumerate(levels) if level.is_network)
    slow_nic = replace(levels[first], bytes_per_s=levels[first].bytes_per_s * cluster.slowest_share("nic"))
    return Topology(levels=(*levels[:first], slow_nic, *levels[first + 1 :]))
