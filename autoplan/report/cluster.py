"""Cluster on a terminal: its components as a tree, link speeds, and rates per device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from autoplan.base.units import format_rate, format_seconds
from autoplan.report.terminal import print_table
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.components import Component, Link
from autoplan.topology.graph import ClusterGraph, PlaceGroup, bisection_bytes_per_s, links_up, quotient
from autoplan.topology.levels import compile_topology
from autoplan.topology.mixed_cluster import BetweenSpec, MixedCluster

KIND_NAMES = {
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "nvlink-c2c": "NVLink-C2C",
    "xgmi": "xGMI",
    "infiniband": "InfiniBand",
}
KIND_NAMES |= {"roce": "RoCE", "efa": "EFA", "slingshot": "Slingshot", "ethernet": "Ethernet", "wan": "WAN"}
KIND_NAMES |= {"shared_memory": "shared memory", "socket": "between sockets"}
SHOWN = (
    "nic",
    "socket",
    "pcie_switch",
    "device",
)  # components of a node, in this order; fabrics are listed with the devices


def cluster_line(cluster: ClusterSpec) -> str:
    """Return name and size of a cluster."""
    return (
        f"{cluster.name}: {cluster.num_nodes:,} x {cluster.devices_per_node} {cluster.device.name} "
        f"= {cluster.num_devices:,} devices"
    )


def rates_text(link: Link) -> str:
    """Return kind and rates of a link, one direction: 'InfiniBand 47.0 of 50.0 GB/s'."""
    name = KIND_NAMES.get(link.kind, link.kind)
    nominal, sustained = format_rate(link.bytes_per_s), format_rate(link.sustained_bytes_per_s)
    if nominal == sustained:
        return f"{name} {nominal}"
    if nominal.split()[1] == sustained.split()[1]:
        sustained = sustained.split()[0]
    return f"{name} {sustained} of {nominal}"


def fault_text(share: float) -> str:
    """Return the remaining share under a fault as text; empty without a fault."""
    return "" if share == 1 else f"{100 * share:.3g} % because of a fault"


def _link_text(link: Link, more: str = "") -> str:
    fault = fault_text(link.share)
    return f"{rates_text(link)}{more}; {fault}" if fault else f"{rates_text(link)}{more}"


def nodes_text(count: int) -> str:
    """'1 node', '1,024 nodes'."""
    return "1 node" if count == 1 else f"{count:,} nodes"


def place_name(group: PlaceGroup) -> str:
    """'2 x leaf of 32 nodes', '32 x node'."""
    name = f"{group.count:,} x {group.name}" if group.count > 1 else group.name
    size = f" of {nodes_text(group.num_nodes)}" if group.inside else ""
    return f"{name}{size}{' with faults' * group.has_faults}"


def halves_bytes_per_s(cluster: ClusterSpec) -> float | None:
    """Return the rate from the first half of the nodes to the second; None for a single node."""
    return bisection_bytes_per_s(cluster, cluster.num_nodes // 2) if cluster.num_nodes > 1 else None


def component_text(component: Component, count: int) -> str:
    """Return the number of components of a kind in words: '8 NICs', '1 leaf switch'."""
    name = f"{component.name} switch" if component.kind == "switch" else component.name
    if count == 1 or component.kind in ("device", "fabric"):
        return f"{count:,} {name}"
    return f"{count:,} {name}{'es' if name.endswith('switch') else 's'}"


def _ways(cluster_graph: ClusterGraph, vertex: str) -> Iterator[str]:
    """Yield the links of one component of a node."""
    graph = cluster_graph.graph
    component, count = graph.nodes[vertex]["component"], graph.nodes[vertex]["count"]
    for neighbour, edge in graph[vertex].items():
        to, link = graph.nodes[neighbour]["component"], edge["link"]
        match component.kind, to.kind:
            case "device", "device":
                num_parallel = edge["num_links"] * (2 if neighbour == vertex else 1) // count
                yield _link_text(link, f" to each of {num_parallel} others")
            case "socket", "socket":
                yield _link_text(link)
            case "device", "fabric":
                fabric = graph.nodes[neighbour]
                joined = sum(num_parallel["num_links"] for num_parallel in graph[neighbour].values()) / fabric["count"]
                yield f"{to.name}: {_link_text(link, f', {joined:g} joined, {format_seconds(2 * link.latency_s)}')}"
            case "device", "nic":
                yield "a NIC on it"
            case "nic", "switch" | "core":
                yield _link_text(link, f", {format_seconds(2 * link.latency_s)} from node to node")
            case ("device", "pcie_switch" | "socket") | ("pcie_switch", "socket"):
                yield _link_text(link, f" to the {to.name}")


def _way_up(link: Link) -> str:
    blocking = f", {link.oversubscription:g}:1 oversubscribed" if link.oversubscription > 1 else ""
    far = f", {format_seconds(2 * link.latency_s)} from site to site" if link.latency_s else ""
    sharp = ", reduces on the way (SHARP)" if link.sharp else ""
    return _link_text(link, f" up{blocking}{far}{sharp}")


def _switch_lines(cluster_graph: ClusterGraph, group: PlaceGroup, places: int) -> Iterator[Tree]:
    """Describe the switches of a place, grouped by equal links."""
    counts: Counter[tuple[Component, str]] = Counter()
    for vertex in group.vertices:
        ways = ", ".join(_way_up(link) for link in links_up(cluster_graph.graph, vertex))
        counts[cluster_graph.graph.nodes[vertex]["component"], ways] += (
            cluster_graph.graph.nodes[vertex]["count"] // places
        )
    for (component, ways), count in counts.items():
        yield _tree(": ".join(text for text in (component_text(component, count), ways) if text))


def _line(cluster_graph: ClusterGraph, vertex: str, places: int) -> Tree:
    """Describe a class of components and its links, in one line if possible."""
    component: Component = cluster_graph.graph.nodes[vertex]["component"]
    text = component_text(component, cluster_graph.graph.nodes[vertex]["count"] // places)
    if component.kind == "device" and component.share < 1:
        text += f"; {fault_text(component.share)}"
    ways = list(_ways(cluster_graph, vertex))
    if len(ways) < 2:
        return _tree(": ".join([text, *ways]))
    line = _tree(text)
    line.children += [_tree(branch) for branch in ways]
    return line


def _has_fault(cluster_graph: ClusterGraph, vertex: str) -> bool:
    edges = cluster_graph.graph[vertex].values()
    return cluster_graph.graph.nodes[vertex]["component"].share < 1 or any(edge["link"].share < 1 for edge in edges)


def _tree(text: str, style: str = "") -> Tree:
    return Tree(Text(text, style=style))


def _place(cluster_graph: ClusterGraph, group: PlaceGroup, places: int, *, is_known: bool = False) -> Tree:
    """Describe a place with its contents, of which the cluster has `places`; a node's components are listed once."""
    name = place_name(group)
    if not group.inside:
        tree = _tree(f"{name}, as above" if is_known else name, "bold")
        kinds = {vertex: cluster_graph.graph.nodes[vertex]["component"].kind for vertex in group.vertices}
        shown = [
            vertex for vertex in kinds if kinds[vertex] in SHOWN and (not is_known or _has_fault(cluster_graph, vertex))
        ]
        shown.sort(key=lambda vertex: SHOWN.index(kinds[vertex]))
        tree.children += [_line(cluster_graph, vertex, places) for vertex in shown]
        return tree
    tree = _tree(name, "bold")
    tree.children += _switch_lines(cluster_graph, group, places)
    for at, inner in enumerate(group.inside):
        tree.children.append(_place(cluster_graph, inner, places * inner.count, is_known=is_known or at > 0))
    return tree


def print_topology(console: Console, cluster: ClusterSpec, cluster_graph: ClusterGraph) -> None:
    """Print the cluster as a tree, then the rates per device on every level."""
    console.print(Text(cluster_line(cluster), style="bold"), soft_wrap=True)
    if (rate := halves_bytes_per_s(cluster)) is not None:
        console.print(f"{format_rate(rate)} between its halves, one direction", soft_wrap=True)
    console.print()
    console.print(_place(cluster_graph, cluster_graph.root, 1))
    console.print()
    columns = (("within a group", False), ("devices", True), ("per device", True), ("latency", True))
    rows = [
        (level.name, f"{level.num_devices:,}", format_rate(level.bytes_per_s), format_seconds(level.latency_s))
        for level in compile_topology(cluster).levels
    ]
    print_table(console, columns, rows)


def topology_json(cluster: ClusterSpec, cluster_graph: ClusterGraph) -> dict[str, Any]:
    """Return the quotient graph and its places in SI units."""
    graph = cluster_graph.graph
    return {
        "cluster": cluster.name,
        "num_nodes": cluster.num_nodes,
        "num_devices": cluster.num_devices,
        "bisection_bytes_per_s": halves_bytes_per_s(cluster),
        "vertices": [
            {"id": vertex, "count": data["count"], **msgspec.to_builtins(data["component"])}
            for vertex, data in graph.nodes(data=True)
        ],
        "edges": [
            {"between": [a, b], "num_links": data["num_links"], **msgspec.to_builtins(data["link"])}
            for a, b, data in graph.edges(data=True)
        ],
        "places": msgspec.to_builtins(cluster_graph.root),
    }


def print_mixed_topology(console: Console, cluster: MixedCluster) -> None:
    """Print the parts as trees, then the links between them."""
    for part in cluster.parts:
        print_topology(console, part, quotient(part))
        console.print()
    console.print(between_text(cluster.between), soft_wrap=True)


def between_text(between: BetweenSpec) -> str:
    """Describe the links between the parts of a mixed cluster, one direction."""
    words = []
    if between.device_bytes_per_s is not None:
        words.append(f"{format_rate(between.device_bytes_per_s)} for each device")
    if between.bandwidth_bytes_per_s is not None:
        words.append(f"{format_rate(between.bandwidth_bytes_per_s)} that all devices of a part share")
    words = words or ["the slower of their networks"]
    if between.latency_s is not None:
        words.append(format_seconds(between.latency_s))
    if not between.cross_vendor_collectives:
        words.append("no collectives across vendors")
    return f"between parts: {', '.join(words)}"


def mixed_json(cluster: MixedCluster) -> dict[str, Any]:
    """Return the graphs of all parts and the links between them."""
    return {
        "cluster": cluster.name,
        "parts": [topology_json(part, quotient(part)) for part in cluster.parts],
        "between": msgspec.to_builtins(cluster.between),
    }
