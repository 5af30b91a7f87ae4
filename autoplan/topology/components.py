"""Components of a node, and the links inside and out of it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import networkx as nx

from autoplan.topology.cluster import ClusterSpec, LinkLevel
from autoplan.topology.levels import used_of_domain

ComponentKind = Literal["device", "nic", "pcie_switch", "socket", "fabric", "switch", "core", "wan"]

Faults = tuple[tuple[str, int, float], ...]  # in a node: component, index, remaining share of the rate

# Graphs are networkx graphs: a vertex has `component` and `count`, an edge has `link` and `num_links`.
Graph = Any  # nx.Graph, which is untyped


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Component of the cluster, or a representative of a class of identical components."""

    kind: ComponentKind
    name: str
    tier: int = 0  # for a switch: innermost 0
    side: int = 0  # for a device: 1 if its node is set apart by `split`
    share: float = 1.0  # remaining share of its rate under a fault


SOCKET = Component(kind="socket", name="CPU")
PCIE_SWITCH = Component(kind="pcie_switch", name="PCIe switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Edge of the graph; rates are per direction.  Latencies along a path add up to that of its level."""

    kind: str
    bytes_per_s: float  # nominal
    sustained_bytes_per_s: float
    latency_s: float = 0.0  # 0 if included in another link of the path, or unknown
    oversubscription: float = 1.0  # possible rate from below relative to this link's rate
    share: float = 1.0  # remaining share of the rates under a fault; included in the sustained rate
    sharp: bool = False  # towards a switch with in-network reduction

    def slowed(self, share: float) -> Link:
        """Return the link with its rate multiplied by `share`."""
        return replace(self, share=share, sustained_bytes_per_s=share * self.sustained_bytes_per_s)


def _nics_of_node(cluster: ClusterSpec) -> tuple[int, float]:
    """Return (number of NICs per node, nominal bytes/s of each); a fraction of a NIC counts as one with that rate."""
    nominal = cluster.network.nics_per_device * cluster.devices_per_node
    count = max(1, round(nominal))
    return count, cluster.network.nic_bytes_per_s * nominal / count


def add_component(graph: Graph, vertex: Hashable, component: Component) -> Hashable:
    """Add a vertex for one component."""
    graph.add_node(vertex, component=component, count=1)
    return vertex


def connect(graph: Graph, a: Hashable, b: Hashable, link: Link) -> None:
    """Add an edge for one link."""
    graph.add_edge(a, b, link=link, num_links=1)


def node_graph(cluster: ClusterSpec, faults: Faults = ()) -> Graph:
    """Graph of one node with a vertex (kind, index) per component; NICs lead out of it."""
    graph = nx.Graph()
    shares = {(part, at): share for part, at, share in faults}
    for at in range(cluster.devices_per_node):
        share = shares.get(("device", at), 1.0)
        add_component(graph, ("device", at), Component(kind="device", name=cluster.device.name, share=share))
    _add_fabrics(graph, cluster, [shares.get(("link", at), 1.0) for at in range(cluster.devices_per_node)])
    hubs = _add_host(graph, cluster)
    behind: list[Hashable] = (
        [("device", at) for at in range(cluster.devices_per_node)] if cluster.host.nics_on_devices else hubs
    )
    num_nics, rate = _nics_of_node(cluster)
    bus = Link(kind="pcie", bytes_per_s=rate, sustained_bytes_per_s=rate)  # as fast as the NIC
    for at in range(num_nics):
        nic = add_component(graph, ("nic", at), Component(kind="nic", name="NIC", share=shares.get(("nic", at), 1.0)))
        connect(graph, nic, behind[at * len(behind) // num_nics], bus)
    return graph


def _add_fabrics(graph: Graph, cluster: ClusterSpec, shares: list[float]) -> None:
    """Add the fabrics inside a node; levels over PCIe are links of the host.  `shares`: remaining rate per device.

    Two devices have at most one direct link, so of nested meshes the inner ones are represented by switches.
    """
    size = cluster.devices_per_node
    levels = [level for level in cluster.levels if level.num_devices <= size and level.kind != "pcie"]
    mesh = next((level for level in reversed(levels) if level.is_mesh and level.num_devices > 1), None)
    for level in levels:
        for first in range(0, size, level.num_devices):
            members = range(first, min(first + level.num_devices, size))
            if level is mesh:
                for a, b in combinations(members, 2):
                    link = fabric_link(level, peers=len(members) - 1, share=min(shares[a], shares[b]))
                    connect(graph, ("device", a), ("device", b), link)
                continue
            component = Component(kind="fabric", name=level.name)
            fabric = add_component(graph, (f"fabric of {level.num_devices}", first // level.num_devices), component)
            for at in members:
                connect(graph, ("device", at), fabric, fabric_link(level, share=shares[at]))


def _add_host(graph: Graph, cluster: ClusterSpec) -> list[Hashable]:
    """Add sockets and PCIe switches with their devices and NICs."""
    host, size = cluster.host, cluster.devices_per_node
    # A preset reduced to fewer devices than sockets or switches keeps those of the remaining devices.
    sockets = [add_component(graph, ("socket", at), SOCKET) for at in range(min(host.num_sockets, size))]
    between = Link(kind="socket", bytes_per_s=host.socket_bytes_per_s, sustained_bytes_per_s=host.socket_bytes_per_s)
    for near_socket, far_socket in combinations(sockets, 2):
        connect(graph, near_socket, far_socket, between)
    hubs = sockets
    if host.num_pcie_switches:
        hubs = [
            add_component(graph, ("pcie_switch", at), PCIE_SWITCH) for at in range(min(host.num_pcie_switches, size))
        ]
        # One uplink, as wide as the link of a device.
        upward = _host_link(cluster, "pcie", max(size // len(hubs), 1), cluster.device.host_link_bytes_per_s)
        for at, hub in enumerate(hubs):
            connect(graph, hub, sockets[at * len(sockets) // len(hubs)], upward)
    device_link = _host_link(cluster, host.device_link, 1)
    for at in range(size):
        connect(graph, ("device", at), hubs[at * len(hubs) // size], device_link)
    return hubs


def fabric_link(level: LinkLevel, *, peers: int = 0, share: float = 1.0) -> Link:
    """Link from a device to the switch of a fabric, or to one of its `peers` in a mesh."""
    link = Link(
        kind=level.kind,
        bytes_per_s=level.bandwidth_bytes_per_s / max(peers, 1),
        sustained_bytes_per_s=level.rate_bytes_per_s * level.efficiency / max(peers, 1),
        latency_s=level.latency_s if peers else level.latency_s / 2,
    )
    return link.slowed(share)


def _host_link(cluster: ClusterSpec, kind: str, below: int, most_bytes_per_s: float = math.inf) -> Link:
    """Host link shared by `below` devices, at the rate of a level over PCIe if the cluster has one."""
    levels = [
        level for level in cluster.levels if level.kind == "pcie" and level.num_devices <= cluster.devices_per_node
    ]
    link_bytes_per_s = levels[-1].bandwidth_bytes_per_s if levels else cluster.device.host_link_bytes_per_s
    sustained = link_bytes_per_s * levels[-1].efficiency if levels else link_bytes_per_s
    return Link(
        kind=kind,
        bytes_per_s=min(below * link_bytes_per_s, most_bytes_per_s),
        sustained_bytes_per_s=min(below * sustained, most_bytes_per_s),
        latency_s=levels[-1].latency_s / 2 if levels and below == 1 else 0.0,
    )


def num_rails(cluster: ClusterSpec) -> int:
    """Number of switches that the NICs of a node connect to: one per NIC in a rail-optimised fabric."""
    return _nics_of_node(cluster)[0] if cluster.network.rail_optimised and cluster.network.tiers else 1


def nic_link(cluster: ClusterSpec, share: float = 1.0) -> Link:
    """Link from a NIC to its switch, with half of the latency between two nodes."""
    network, (_, rate) = cluster.network, _nics_of_node(cluster)
    link = Link(
        kind=network.kind,
        bytes_per_s=rate,
        sustained_bytes_per_s=rate * network.efficiency,
        latency_s=network.latency_s / 2,
        sharp=network.sharp,
    )
    return link.slowed(share)


def uplink(cluster: ClusterSpec, tier: int, num_nodes: int, rails: int, share: float = 1.0) -> Link:
    """Uplink of a switch in a tier (innermost 0) with `num_nodes` below it: all its links to the next tier as one.

    On an oversubscribed switch the job's nodes get their share when all of its ports are busy.
    """
    network, (num_nics, rate) = cluster.network, _nics_of_node(cluster)
    over = math.prod(inner_tier.oversubscription for inner_tier in network.tiers[: tier + 1])
    total = num_nodes * num_nics * rate / rails / over
    link = Link(
        kind=network.kind,
        bytes_per_s=total,
        sustained_bytes_per_s=total * network.efficiency,
        oversubscription=network.tiers[tier].oversubscription,
        sharp=network.sharp,
    )
    return link.slowed(share)


def site_link(cluster: ClusterSpec) -> Link:
    """Link from a site to the WAN."""
    assert cluster.wan is not None
    wan = cluster.wan
    return Link(
        kind="wan",
        bytes_per_s=wan.bandwidth_bytes_per_s,
        sustained_bytes_per_s=wan.rate_bytes_per_s,
        latency_s=wan.latency_s / 2,
    )


def wide_levels(cluster: ClusterSpec) -> list[tuple[LinkLevel, int]]:
    """Fabrics that span several nodes, with the number of nodes per rack."""
    size, total = cluster.devices_per_node, cluster.num_devices
    return [
        (level, used_of_domain(level.num_devices, size, total) // size)
        for level in cluster.levels
        if level.num_devices > size
    ]


def node_faults(cluster: ClusterSpec) -> dict[int, Faults]:
    """Faults by node, numbered in the order of ranks."""
    names = [name for group in cluster.nodes for name in group.names]
    faults_by_node: dict[int, Faults] = {}
    for fault in cluster.faults:
        if fault.node is not None and fault.part != "uplink":
            node = names.index(str(fault.node)) if names else int(fault.node)
            faults_by_node[node] = (*faults_by_node.get(node, ()), (fault.part, fault.index, fault.rate_share))
    return {node: tuple(sorted(faults)) for node, faults in faults_by_node.items()}


def uplink_faults(cluster: ClusterSpec) -> dict[int, dict[int, float]]:
    """Slow uplinks above every node in the order of ranks: tiers (innermost 0) and remaining shares."""
    faults_by_leaf: dict[int, dict[int, float]] = {}
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
            faults_by_leaf.setdefault(node, {})[tier] = fault.rate_share
    return faults_by_leaf


def place_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """Names of the places above a node, outermost first."""
    tiers = tuple(tier.name for tier in reversed(cluster.network.tiers))
    return ("cluster", "site", *tiers) if cluster.wan else ("cluster", *tiers)


def named_paths(cluster: ClusterSpec) -> list[tuple[str, ...]]:
    """Path of every node of an allocation: its site if there are several, and its switches, outermost first."""
    return [
        ((group.site,) if cluster.wan else ()) + tuple(reversed(group.switches))
        for group in cluster.nodes
        for _ in group.names
    ]


def needs_no_core(cluster: ClusterSpec, num_switches: int) -> bool:
    """Return whether all nodes are below one switch, so that no core is needed."""
    num_tiers = len(cluster.network.tiers)
    rails = num_rails(cluster) if num_tiers == 1 else 1
    return cluster.wan is None and num_tiers > 0 and num_switches * rails == 1
