"""Nested levels of a cluster: the links that a group of ranks crosses, and their rates.

Ranks fill nodes in order, so the members of a group are an arithmetic sequence: `size` ranks, `stride` apart, or a
sequence of such runs.  A level joins domains of `num_devices` devices: a pair of dies, a node, a rack, the nodes under
one leaf switch, a site, all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints, distinct_rows
from autoplan.base.curves import CollectiveCurve
from autoplan.base.errors import UnpricedError
from autoplan.topology.cluster import ClusterSpec, LinkLevel
from autoplan.topology.placement import Pattern, RankGroup, Seats, fills_evenly, switches_of_nodes


class Gaps(NamedTuple):
    """Gaps in a group, which consists of runs of `run` ranks that begin `step` ranks apart."""

    run: Ints
    step: Ints

    def repeat(self, times: int) -> Gaps:
        """Repeat each element `times` times."""
        return Gaps(np.repeat(self.run, times), np.repeat(self.step, times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Kind of link; the rate is per device, one direction, sustained."""

    name: str
    num_devices: int
    bytes_per_s: float
    latency_s: float
    half_rate_bytes: float
    is_mesh: bool = False  # the rate is the sum over all direct links
    mesh_shares: tuple[float, ...] = ()  # share of it usable among 2, 3, ... devices; empty: evenly
    devices_per_nic: float = 1.0  # number sharing one NIC, which divides its rate
    is_network: bool = False  # reached over NICs
    is_reducing: bool = False  # its switches perform in-network reduction (SHARP)
    collectives: CollectiveCurve | None = None  # where measured
    seats: Seats | None = None  # if nodes are listed; `num_devices` is then that of the fullest switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Levels from the innermost outwards; the last one joins all devices."""

    levels: tuple[Level, ...]
    network: tuple[int, ...] = field(init=False)  # indices of the levels reached over NICs

    def __post_init__(self) -> None:
        network = tuple(at for at, level in enumerate(self.levels) if level.is_network)
        object.__setattr__(self, "network", network)

    @property
    def tiers(self) -> tuple[int, ...]:
        """Indices of outer network tiers and sites, whose traffic also crosses the NICs."""
        return self.network[1:]

    def members(
        self, stride: Ints, size: Ints, *, gaps: Gaps | None = None, pattern: Pattern = "ring"
    ) -> Ints | Floats:
        """Members of each group that share one domain of each level: shape (levels, *groups).

        If a group's span does not divide the domain, some of its siblings straddle two domains; the step waits for
        those, so they determine the result.  If nodes fill switches unevenly, the numbers are effective ones for the
        pattern.
        """
        shape = (len(self.levels), *size.shape)
        is_even = all(level.seats is None or level.seats.is_even for level in self.levels)
        result: Ints | Floats = np.empty(shape, dtype=np.int64) if is_even else np.empty(shape)
        for at, level in enumerate(self.levels[:-1]):
            if level.seats is None or level.seats.is_even:
                result[at] = _inside(level.num_devices, stride, size, gaps)
            else:
                result[at] = _seated(level.seats, stride, size, gaps, pattern)
            if at:
                result[at] = np.maximum(result[at], result[at - 1])
        result[-1] = size
        return result


def _inside(num_devices: int, stride: Ints, size: Ints, gaps: Gaps | None) -> Ints:
    """Members in one domain of `num_devices`, with domains filled in rank order."""
    inside = np.clip(num_devices // stride, 1, size)
    span = stride * size
    if gaps is not None:
        run, step = gaps
        parted = run < size
        inside = np.where(parted, np.minimum(inside, run) * np.clip(num_devices // step, 1, size // run), inside)
        span = np.where(parted, step * (size // run), span)
    straddles = (inside >= size) & (num_devices % span != 0) & (span > 1)
    return np.where(straddles, np.maximum((size + 1) // 2, 1), inside)


def _seated(seats: Seats, stride: Ints, size: Ints, gaps: Gaps | None, pattern: Pattern) -> Floats:
    """Effective members below one switch, computed once per distinct group."""
    run = size if gaps is None else np.minimum(gaps.run, size)
    step = stride * size if gaps is None else np.where(run < size, gaps.step, stride * size)
    rows = np.stack([column.ravel() for column in np.broadcast_arrays(stride, size, run, step)])
    first, inverse = distinct_rows(*rows)
    members = [seats.members(RankGroup(pattern, *row)) for row in rows.T[first].tolist()]
    return np.array(members, dtype=np.float64)[inverse].reshape(size.shape)


def used_of_domain(num_devices: int, devices_per_node: int, total: int) -> int:
    """Devices per domain used by a job of `total` devices; racks larger than a node are filled evenly.

    256 devices in racks of 72 are 4 x 64, not 3 x 72 + 40: schedulers place jobs in equal segments so that no group
    straddles two racks.
    """
    if num_devices <= devices_per_node or num_devices >= total:
        return min(num_devices, total)
    least, nodes = -(-total // num_devices), total // devices_per_node
    even = (domains for domains in range(least, 2 * least + 1) if nodes % domains == 0)
    domains = next(even, 0)
    return total // domains if domains else num_devices


def _domains(cluster: ClusterSpec, placement: Sequence[str] | None) -> list[tuple[int, Seats | None]]:
    """Return devices on the fullest switch of each tier and lastly of the fullest site, and every node's switch."""
    sites = cluster.wan.nodes_per_site if cluster.wan else cluster.num_nodes
    if not cluster.nodes and placement is None:
        nodes = [*(tier.num_nodes for tier in cluster.network.tiers), sites]
        return [(num_nodes * cluster.devices_per_node, None) for num_nodes in nodes]
    domains: list[tuple[int, Seats | None]] = []
    tiers = [tier.num_nodes for tier in cluster.network.tiers]
    for switch, below in zip(switches_of_nodes(cluster, placement), (*tiers, None), strict=True):
        count = np.bincount(switch)
        seats = Seats(
            switch=switch,
            # Links out of a switch scale with the nodes below it; all sites have the same links.
            load=np.ones(len(count)) if below else count / count.max(),
            job_share=np.minimum(count / below, 1.0) if below else np.ones(len(count)),
            devices_per_node=cluster.devices_per_node,
            is_even=fills_evenly(switch),
        )
        domains.append((int(count.max()) * cluster.devices_per_node, seats))
    return domains


def compile_topology(
    cluster: ClusterSpec, placement: Sequence[str] | None = None, *, every_tier: bool = False
) -> Topology:
    """Compile the levels between the devices of `cluster`, with sustained rates.

    Ranks fill the nodes in the order of `placement` (node names) or of the cluster's list.  Oversubscribed switch tiers
    are levels; with `every_tier` all of them are.
    """
    total = cluster.num_devices
    if placement is not None and cluster.levels[-1].num_devices > cluster.devices_per_node:
        raise UnpricedError(
            f"placement is not priced yet where {cluster.levels[-1].name} joins several nodes: leave it out"
        )
    inner: list[Level] = []
    for link in cluster.levels:
        inner.append(_inner_level(cluster, link))
        if inner[-1].num_devices >= total:
            return Topology(levels=tuple(inner))
    return Topology(levels=(*inner, *_network_levels(cluster, _domains(cluster, placement), every_tier=every_tier)))


def _inner_level(cluster: ClusterSpec, link: LinkLevel) -> Level:
    return Level(
        name=link.name,
        num_devices=used_of_domain(link.num_devices, cluster.devices_per_node, cluster.num_devices),
        bytes_per_s=link.rate_bytes_per_s * link.efficiency * cluster.slowest_share("link"),
        latency_s=link.latency_s,
        half_rate_bytes=link.half_rate_bytes,
        is_mesh=link.is_mesh,
        mesh_shares=link.mesh_shares[: link.num_devices - 1],
        collectives=link.collectives,
    )


def _network_levels(
    cluster: ClusterSpec, domains: Sequence[tuple[int, Seats | None]], *, every_tier: bool
) -> list[Level]:
    """Levels reached over NICs: switch tiers, the fabric that joins them, links between sites."""
    *switches, (site, seats_of_site) = domains
    network, total = cluster.network, cluster.num_devices
    rate = network.nic_bytes_per_s * network.nics_per_device * network.efficiency
    fabric = Level(
        name=network.kind,
        num_devices=total,
        bytes_per_s=rate,
        latency_s=network.latency_s,
        half_rate_bytes=network.half_rate_bytes,
        is_network=True,
        is_reducing=network.sharp,
        devices_per_nic=max(1.0 / network.nics_per_device, 1.0),
    )
    levels: list[Level] = []
    oversubscription = 1.0
    for at, (tier, (num_devices, seats)) in enumerate(zip(network.tiers, switches, strict=True)):
        if num_devices >= min(site, total):
            break
        narrowed = tier.oversubscription / cluster.slowest_share("uplink", at)
        if narrowed > 1 or every_tier:
            below = replace(fabric, num_devices=num_devices, bytes_per_s=rate / oversubscription, seats=seats)
            levels.append(replace(below, name=f"{network.kind} {tier.name}"))
            oversubscription *= narrowed
    fabric = replace(fabric, bytes_per_s=rate / oversubscription)
    if cluster.wan and site < total:
        share = min(cluster.wan.rate_bytes_per_s / site, fabric.bytes_per_s)
        levels.append(replace(fabric, num_devices=site, seats=seats_of_site))
        fabric = replace(fabric, name="wan", bytes_per_s=share, latency_s=cluster.wan.latency_s, is_reducing=False)
    # Ranks wait for those with the slowest NIC; links out of a switch are shared and not limited by one NIC.
    first, *higher = (*levels, fabric)
    return [replace(first, bytes_per_s=first.bytes_per_s * cluster.slowest_share("nic")), *higher]
