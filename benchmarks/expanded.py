"""The cluster as a graph with every component a vertex, which the folded graph is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import networkx as nx

from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.components import (
    Component,
    Graph,
    add_component,
    connect,
    fabric_link,
    named_paths,
    needs_no_core,
    nic_link,
    node_faults,
    node_graph,
    num_rails,
    place_names,
    site_link,
    uplink,
    uplink_faults,
    wide_levels,
)


def expand(cluster: ClusterSpec) -> Graph:
    """The graph with every component a vertex: (node, kind, index) inside the nodes, (name, place, rail) above them."""
    graph = nx.Graph()
    faults, slow_uplinks = node_faults(cluster), uplink_faults(cluster)
    names, rails = place_names(cluster), num_rails(cluster)
    paths = _paths(cluster)
    below = Counter(path[:depth] for path in paths for depth in range(len(path) + 1))
    first = {path[:depth]: node for node, path in reversed(list(enumerate(paths))) for depth in range(len(path) + 1)}
    num_tiers = len(cluster.network.tiers)
    is_flat = needs_no_core(cluster, len({path[:1] for path in paths}))
    for place, num_nodes in below.items():
        tier = len(names) - 1 - len(place)
        if tier == num_tiers and is_flat:
            continue
        for rail in range(rails if tier == 0 else 1):
            vertex = (names[len(place)], place, rail)
            above = (names[len(place) - 1], place[:-1], 0)
            if tier > num_tiers:
                add_component(graph, vertex, Component(kind="wan", name="WAN"))
            elif tier == num_tiers:
                add_component(graph, vertex, Component(kind="core", name="core"))
                if cluster.wan:
                    connect(graph, vertex, above, site_link(cluster))
            else:
                add_component(graph, vertex, Component(kind="switch", name=names[len(place)], tier=tier))
                if tier + 1 < num_tiers or not is_flat:
                    share = slow_uplinks.get(first[place], {}).get(tier, 1.0)
                    link = uplink(cluster, tier, num_nodes, rails if tier == 0 else 1, share)
                    connect(graph, vertex, above, link)
    for node, path in enumerate(paths):
        inside = node_graph(cluster, faults.get(node, ()))
        slow = {at: share for part, at, share in faults.get(node, ()) if part == "link"}
        for at, component in inside.nodes(data="component"):
            vertex = (node, *at)
            add_component(graph, vertex, component)
            if component.kind == "nic":
                connect(graph, vertex, (names[-1], path, at[1] % rails), nic_link(cluster, component.share))
            elif component.kind == "device":
                for level, num_nodes in wide_levels(cluster):
                    rack = ("rack", level.num_devices, node // num_nodes)
                    add_component(graph, rack, Component(kind="fabric", name=level.name))
                    connect(graph, vertex, rack, fabric_link(level, share=slow.get(at[1], 1.0)))
        for a, b, link in inside.edges(data="link"):
            connect(graph, (node, *a), (node, *b), link)
    return graph


def _paths(cluster: ClusterSpec) -> list[tuple[Hashable, ...]]:
    """Path of every node: its site, where there are several, and the switches above it, outermost first."""
    if cluster.nodes:
        return list(named_paths(cluster))
    paths: list[tuple[Hashable, ...]] = []
    for node in range(cluster.num_nodes):
        site, within = divmod(node, cluster.wan.nodes_per_site) if cluster.wan else (0, node)
        switches = (within // tier.num_nodes for tier in reversed(cluster.network.tiers))
        paths.append(((site,) if cluster.wan else ()) + tuple(switches))
    return paths
