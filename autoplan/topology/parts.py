"""What is a node made of, and how fast are the links in it and out of it?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import networkx as nx

from autoplan.cluster import ClusterSpec, LinkLevel
from autoplan.topology.levels import used_of_domain

PartKind = Literal["device", "nic", "pcie_switch", "socket", "fabric", "switch", "core", "wan"]

Faults = tuple[tuple[str, int, float], ...]  # in a node: part, index, share of the rate that is left

# Graphs are networkx's: a vertex has `part` and `count`, an edge `link` and `num_links`.
Graph = Any  # nx.Graph, which has no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One vertex of the expanded graph, or each of a class of the quotient graph."""

    kind: PartKind
    name: str
    tier: int = 0  # of a switch: innermost 0
    side: int = 0  # of a device: 1 where `split` sets its node apart
    share: float = 1.0  # of its rate that a fault leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One edge; rates are for each direction.  Latencies of a path add up to that of its level."""

    kind: str
    bytes_per_s: float  # nominal
    sustained_bytes_per_s: float
    latency_s: float = 0.0  # where it is that of another link of the path, or not known
    oversubscription: float = 1.0  # what may come from below over this link's rate
    share: float = 1.0  # of the rates that a fault leaves; it is in the sustained one
    sharp: bool = False  # towards a switch that adds up what is reduced

    def left(self, share: float) -> Link:
        """The link where a fault leaves so much of its rate."""
        return replace(self, share=share, sustained_bytes_per_s=share * self.sustained_bytes_per_s)


def nics_of_node(cluster: ClusterSpec) -> tuple[int, float]:
    """(how many NICs a node has, nominal bytes/s of each); a node that has part of one has one of that rate."""
    wanted = cluster.network.nics_per_device * cluster.devices_per_node
    count = max(1, round(wanted))
    return count, cluster.network.nic_bytes_per_s * wanted / count


def node_graph(cluster: ClusterSpec, faults: Faults = ()) -> Graph:
    """Every part of one node a vertex, (kind, index); NICs are its way out."""
    shares = {(part, at): share for part, at, share in faults}
    host, size = cluster.host, cluster.devices_per_node
    num_nics, nic_bytes_per_s = nics_of_node(cluster)
    graph = nx.Graph()

    def add(kind: PartKind, name: str, at: int) -> tuple[str, int]:
        vertex = (f"fabric {name}" if kind == "fabric" else kind, at)
        graph.add_node(vertex, part=Part(kind=kind, name=name, share=shares.get((kind, at), 1.0)), count=1)
        return vertex

    def connect(a: tuple[str, int], b: tuple[str, int], link: Link) -> None:
        graph.add_edge(a, b, link=link, num_links=1)

    on_device = [add("device", cluster.device.name, at) for at in range(size)]
    for level in cluster.levels:
        if level.num_devices > size or level.kind == "pcie":  # racks are outside, PCIe comes with the host
            continue
        for first in range(0, size, level.num_devices):
            members = on_device[first : first + level.num_devices]
            if level.is_mesh and len(members) > 1:
                for at, one in enumerate(members):
                    for other in members[at + 1 :]:
                        share = min(shares.get(("link", end[1]), 1.0) for end in (one, other))
                        connect(one, other, fabric_link(level, peers=len(members) - 1, share=share))
            else:
                fabric = add("fabric", level.name, first // level.num_devices)
                for one in members:
                    connect(one, fabric, fabric_link(level, share=shares.get(("link", one[1]), 1.0)))

    sockets = [add("socket", "CPU", at) for at in range(min(host.num_sockets, size))]
    between = Link(kind="socket", bytes_per_s=host.socket_bytes_per_s, sustained_bytes_per_s=host.socket_bytes_per_s)
    for at, one in enumerate(sockets):
        for other in sockets[at + 1 :]:
            connect(one, other, between)
    hubs = sockets
    if host.num_pcie_switches:
        # A preset cut down to fewer devices than it has switches keeps the switch of each device that is left.
        hubs = [add("pcie_switch", "PCIe switch", at) for at in range(min(host.num_pcie_switches, size))]
        # One uplink, as wide as the link of a device.
        upward = _host_link(cluster, "pcie", max(size // len(hubs), 1), cluster.device.host_link_bytes_per_s)
        for at, hub in enumerate(hubs):
            connect(hub, sockets[at * len(sockets) // len(hubs)], upward)
    own = _host_link(cluster, host.device_link, 1)
    for at, one in enumerate(on_device):
        connect(one, hubs[at * len(hubs) // size], own)
    behind = on_device if host.nics_on_devices else hubs
    for at in range(num_nics):
        nic = add("nic", "NIC", at)
        bus = Link(kind="pcie", bytes_per_s=nic_bytes_per_s, sustained_bytes_per_s=nic_bytes_per_s)
        connect(nic, behind[at * len(behind) // num_nics], bus)
    return graph


def fabric_link(level: LinkLevel, *, peers: int = 0, share: float = 1.0) -> Link:
    """From a device to the switch of a fabric, or to one of its `peers` in a mesh."""
    link = Link(
        kind=level.kind,
        bytes_per_s=level.bandwidth_bytes_per_s / max(peers, 1),
        sustained_bytes_per_s=level.rate_bytes_per_s * level.efficiency / max(peers, 1),
        latency_s=level.latency_s if peers else level.latency_s / 2,
    )
    return link.left(share)


def _host_link(cluster: ClusterSpec, kind: str, below: int, most_bytes_per_s: float = math.inf) -> Link:
    """A link of the host that `below` devices share.

    A level over PCIe is these very links, so that it says what they sustain; without one that is their own rate.
    """
    levels = [one for one in cluster.levels if one.kind == "pcie" and one.num_devices <= cluster.devices_per_node]
    own = levels[-1].bandwidth_bytes_per_s if levels else cluster.device.host_link_bytes_per_s
    sustained = own * levels[-1].efficiency if levels else own
    return Link(
        kind=kind,
        bytes_per_s=min(below * own, most_bytes_per_s),
        sustained_bytes_per_s=min(below * sustained, most_bytes_per_s),
        latency_s=levels[-1].latency_s / 2 if levels and below == 1 else 0.0,
    )


def num_rails(cluster: ClusterSpec) -> int:
    """Into how many switches the NICs of a node go: one for each where the fabric is rail-optimised."""
    return nics_of_node(cluster)[0] if cluster.network.rail_optimised and cluster.network.tiers else 1


def nic_link(cluster: ClusterSpec, share: float = 1.0) -> Link:
    """From a NIC to its switch: half of the latency between two nodes."""
    network, (_, rate) = cluster.network, nics_of_node(cluster)
    link = Link(
        kind=network.kind,
        bytes_per_s=rate,
        sustained_bytes_per_s=rate * network.efficiency,
        latency_s=network.latency_s / 2,
        sharp=network.sharp,
    )
    return link.left(share)


def uplink(cluster: ClusterSpec, tier: int, num_nodes: int, rails: int, share: float = 1.0) -> Link:
    """Out of a switch of a tier (innermost 0) with `num_nodes` below it; all its links to the next tier as one.

    Of an oversubscribed switch the nodes of the job have the share that is theirs when all of its ports are busy.
    """
    network, (num_nics, rate) = cluster.network, nics_of_node(cluster)
    over = math.prod(one.oversubscription for one in network.tiers[: tier + 1])
    total = num_nodes * num_nics * rate / rails / over
    link = Link(
        kind=network.kind,
        bytes_per_s=total,
        sustained_bytes_per_s=total * network.efficiency,
        oversubscription=network.tiers[tier].oversubscription,
        sharp=network.sharp,
    )
    return link.left(share)


def site_link(cluster: ClusterSpec) -> Link:
    """From a site to what joins all sites."""
    assert cluster.wan is not None
    wan = cluster.wan
    return Link(
        kind="wan",
        bytes_per_s=wan.bandwidth_bytes_per_s,
        sustained_bytes_per_s=wan.rate_bytes_per_s,
        latency_s=wan.latency_s / 2,
    )


def wide_levels(cluster: ClusterSpec) -> list[tuple[LinkLevel, int]]:
    """Fabrics that join several nodes, and how many each rack of theirs joins."""
    size, total = cluster.devices_per_node, cluster.num_devices
    return [
        (level, used_of_domain(level.num_devices, size, total) // size)
        for level in cluster.levels
        if level.num_devices > size
    ]


def node_faults(cluster: ClusterSpec) -> dict[int, Faults]:
    """The faults in each node that has some, by its place in the order of ranks."""
    names = [name for group in cluster.nodes for name in group.names]
    found: dict[int, Faults] = {}
    for fault in cluster.faults:
        if fault.node is not None and fault.part != "uplink":
            node = names.index(str(fault.node)) if names else int(fault.node)
            found[node] = (*found.get(node, ()), (fault.part, fault.index, fault.rate_share))
    return {node: tuple(sorted(faults)) for node, faults in found.items()}


def uplink_faults(cluster: ClusterSpec) -> dict[int, dict[int, float]]:
    """Of every node below a switch with slow uplinks, by its place: tiers (innermost 0) and the share that is left."""
    found: dict[int, dict[int, float]] = {}
    for fault in cluster.faults:
        if fault.part != "uplink" or fault.switch is None:
            continue
        tier = cluster.tier_of(fault.switch)
        if cluster.nodes:
            below = [fault.switch == group.switches[tier] for group in cluster.nodes for _ in group.names]
            nodes = [node for node, is_below in enumerate(below) if is_below]
        else:
            size = cluster.network.tiers[tier].num_nodes
            first = int(fault.switch.rpartition(" ")[2]) * size
            nodes = list(range(first, min(first + size, cluster.num_nodes)))
        for node in nodes:
            found.setdefault(node, {})[tier] = fault.rate_share
    return found


def place_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """Names of the places above a node, outermost first."""
    tiers = tuple(tier.name for tier in reversed(cluster.network.tiers))
    return ("cluster", "site", *tiers) if cluster.wan else ("cluster", *tiers)


def named_paths(cluster: ClusterSpec) -> list[tuple[str, ...]]:
    """Of every node of an allocation: its site where there are several, and its switches, outermost first."""
    return [
        ((group.site,) if cluster.wan else ()) + tuple(reversed(group.switches))
        for group in cluster.nodes
        for _ in group.names
    ]


def needs_no_core(cluster: ClusterSpec, num_switches: int) -> bool:
    """Whether one switch holds all nodes, so that nothing is to be joined."""
    num_tiers = len(cluster.network.tiers)
    rails = num_rails(cluster) if num_tiers == 1 else 1
    return cluster.wan is None and num_tiers > 0 and num_switches * rails == 1
