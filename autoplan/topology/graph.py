"""Graph of a cluster's components and links, with identical components merged.

Vertices of `quotient` are classes of identical components with their number; an edge represents all equal links between
two classes.  It is the full graph folded along its symmetries: a flow between unions of classes can be averaged over
each class, so both graphs have the same minimum cut.  Its size grows with the number of different switches and nodes,
not with the cluster. (Racks of a scale-up fabric that straddle leaf switches break the symmetry; they are folded
nevertheless, and their cut is an upper bound.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import networkx as nx

from autoplan.base.errors import InputError
from autoplan.topology.cluster import ClusterSpec, LinkLevel
from autoplan.topology.components import (
    Component,
    Faults,
    Graph,
    Link,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceGroup:
    """`count` identical places: sites, switches with everything below them, or nodes."""

    name: str
    count: int  # per enclosing place
    num_nodes: int  # per place
    vertices: tuple[str, ...]  # vertices of the quotient graph: its own switches, or the components of a node
    inside: tuple[PlaceGroup, ...] = ()
    has_faults: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGraph:
    """The quotient graph, and its nested places, outermost first."""

    graph: Graph
    root: PlaceGroup


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """Nodes with the same faults in them, the same faults above them, and the same classes of racks."""

    side: int = 0
    faults: Faults = ()
    uplinks: tuple[tuple[int, float], ...] = ()  # tiers with slow uplinks above it, and their remaining shares
    racks: tuple[int, ...] = ()  # class of its rack in each wide fabric

    @property
    def num_nodes(self) -> int:
        return 1

    @property
    def num_faults(self) -> int:
        return len(self.faults)


@dataclass(frozen=True, slots=True, order=True)
class _Switch:
    """Switches with the same nodes and switches below them: of a tier, a site, or all."""

    num_nodes: int
    below: tuple[tuple[_Node | _Switch, int], ...]

    @property
    def nodes(self) -> set[_Node]:
        """Kinds of nodes below."""
        return {node for child, _ in self.below for node in ({child} if isinstance(child, _Node) else child.nodes)}

    @property
    def num_faults(self) -> int:
        return sum(len(node.faults) + len(node.uplinks) for node in self.nodes)

    def share(self, tier: int) -> float:
        """Remaining share of the uplinks of a switch of that tier under faults."""
        return dict(next(iter(self.nodes)).uplinks).get(tier, 1.0)


Runs = tuple[tuple[_Node, int], ...]  # nodes in order, run-length encoded by kind


def quotient(cluster: ClusterSpec, *, split: int = 0) -> ClusterGraph:
    """Graph of the classes in `cluster`; the first `split` nodes are kept separate from the others."""
    inside, above = node_faults(cluster), uplink_faults(cluster)
    marked = inside.keys() | above.keys()
    bounds = sorted({0, split, cluster.num_nodes, *marked, *(node + 1 for node in marked)})
    runs = []
    for first, end in pairwise(bounds):
        uplinks = tuple(sorted(above.get(first, {}).items()))
        runs.append((_Node(side=int(first < split), faults=inside.get(first, ()), uplinks=uplinks), end - first))
    return _Folded(cluster).build(_merged(runs))


def _merged(runs: Iterable[tuple[_Node, int]]) -> Runs:
    return tuple((node, sum(count for _, count in same)) for node, same in groupby(runs, key=lambda run: run[0]))


def bisection_bytes_per_s(cluster: ClusterSpec, num_nodes: int) -> float:
    """Largest sustained rate from the first `num_nodes` nodes to the others: one direction, all links together."""
    if not 0 < num_nodes < cluster.num_nodes:
        raise InputError(f"a part of the {cluster.num_nodes} nodes must be at least 1 and not all, got {num_nodes}")
    graph = quotient(cluster, split=num_nodes).graph
    return min_cut_bytes_per_s(graph, devices(graph, side=1), devices(graph, side=0))


def devices(graph: Graph, *, side: int) -> list[Hashable]:
    """Device vertices of one side."""
    return [
        at for at, component in graph.nodes(data="component") if component.kind == "device" and component.side == side
    ]


def links_up(graph: Graph, vertex: Hashable) -> list[Link]:
    """Links of a switch, a NIC or a site to the next level of the network."""
    order = {"nic": -1, "switch": 0, "core": 1, "wan": 2}
    component = graph.nodes[vertex]["component"]
    links = []
    for peer, edge in graph[vertex].items():
        above = graph.nodes[peer]["component"]
        if above.kind in order and (order[above.kind], above.tier) > (order[component.kind], component.tier):
            links.append(edge["link"])
    return links


def min_cut_bytes_per_s(graph: Graph, sources: Iterable[Hashable], sinks: Iterable[Hashable]) -> float:
    """Minimum cut between the vertices `sources` and `sinks`: sustained rate in one direction."""
    flows = nx.Graph()
    for a, b, edge in graph.edges(data=True):
        if a != b:
            flows.add_edge(a, b, capacity=edge["num_links"] * edge["link"].sustained_bytes_per_s)
    source, sink = object(), object()
    flows.add_edges_from((source, vertex) for vertex in sources)  # no capacity means unlimited
    flows.add_edges_from((vertex, sink) for vertex in sinks)
    value: float = nx.minimum_cut_value(flows, source, sink)
    return value


def classes(graph: Graph, first: dict[Any, Any] | None = None) -> dict[Any, int]:
    """Return every vertex's class in the coarsest partition whose members see equal classes over equal links.

    `first` are the initial classes.  Colour refinement, as in Berkholz, Bonsma and Grohe, arXiv:1509.08251.
    """
    colour: dict[Any, Any] = {v: (component, (first or {}).get(v)) for v, component in graph.nodes(data="component")}
    count = 0
    while True:
        numbers: dict[Any, int] = {}
        new = {v: numbers.setdefault(signature, len(numbers)) for v, signature in colour.items()}
        if len(numbers) == count:
            return new
        count = len(numbers)
        colour = {
            v: (
                new[v],
                frozenset(Counter((edge["link"], new[peer]) for peer, edge in graph[v].items()).items()),
            )
            for v in graph
        }


def _switch(below: Iterable[tuple[_Node | _Switch, int]]) -> _Switch:
    """Return a switch with sorted children, the largest and least faulty first."""
    counts: Counter[Any] = Counter()
    for child, count in below:
        counts[child] += count
    ordered = sorted(counts, key=lambda child: (child.num_nodes, -child.num_faults, child), reverse=True)
    num_nodes = sum(child.num_nodes * counts[child] for child in ordered)
    return _Switch(num_nodes, tuple((child, counts[child]) for child in ordered))


def _blocks(runs: Runs, size: int) -> Iterator[tuple[Runs, int]]:
    """Divide nodes into consecutive blocks of `size`, the last one smaller; runs of equal whole blocks are merged."""
    partial: list[tuple[_Node, int]] = []
    room = size
    for node, count in runs:
        if partial:
            num_taken = min(room, count)
            partial.append((node, num_taken))
            room, count = room - num_taken, count - num_taken
            if not room:
                yield tuple(partial), 1
                partial, room = [], size
        full, num_partial = divmod(count, size)
        if full:
            yield ((node, size),), full
        if num_partial:
            partial, room = [(node, num_partial)], size - num_partial
    if partial:
        yield tuple(partial), 1


def _in_order(runs: Runs, sizes: Sequence[int]) -> _Switch:
    """Return switches of the given sizes, outermost first, filled with nodes in order."""
    if not sizes:
        return _switch(runs)
    return _switch((_in_order(block, sizes[1:]), count) for block, count in _blocks(runs, sizes[0]))


def _as_named(nodes: Sequence[tuple[tuple[str, ...], _Node]], depth: int = 0) -> _Switch:
    """Return the switches on the path of each node, outermost first, starting at `depth` names."""
    if depth == len(nodes[0][0]):
        return _switch((node, 1) for _, node in nodes)
    places: dict[str, list[tuple[tuple[str, ...], _Node]]] = defaultdict(list)
    for path, node in nodes:
        places[path[depth]].append((path, node))
    return _switch((_as_named(group, depth + 1), 1) for group in places.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Above:
    """Switches above a place: one, or one per rail with the classes of the rails."""

    vertices: tuple[str, ...] = ()
    rails: tuple[int, ...] = ()


class _Folded:
    """Builds the quotient graph of one cluster."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.graph = nx.Graph()
        self.tiers = place_names(cluster)
        self.names: Counter[str] = Counter()
        self.racks: dict[tuple[int, int], str] = {}  # (wide level, class) -> vertex
        self.nodes: dict[Faults, Graph] = {}
        self.refined: dict[tuple[Faults, tuple[int, ...]], dict[Any, int]] = {}

    def build(self, runs: Runs) -> ClusterGraph:
        cluster = self.cluster
        for level, num_nodes in wide_levels(cluster):
            runs = self._into_racks(runs, level, num_nodes)
        if cluster.nodes:
            nodes = (node for node, count in runs for _ in range(count))
            tree = _as_named(list(zip(named_paths(cluster), nodes, strict=True)))
        else:
            sites = (cluster.wan.nodes_per_site,) if cluster.wan else ()
            tree = _in_order(runs, (*sites, *(tier.num_nodes for tier in reversed(cluster.network.tiers))))
        return ClusterGraph(graph=self.graph, root=self._place(tree, 1, 1, 0, _Above()))

    def _add(self, component: Component, count: int) -> str:
        vertex = component.name
        while vertex in self.graph:
            self.names[component.name] += 1
            vertex = f"{component.name} {self.names[component.name] + 1}"
        self.graph.add_node(vertex, component=component, count=count)
        return vertex

    def _connect(self, a: str, b: str, link: Link, count: int) -> None:
        if self.graph.has_edge(a, b):
            assert self.graph[a][b]["link"] == link
            count += self.graph[a][b]["num_links"]
        self.graph.add_edge(a, b, link=link, num_links=count)

    def _into_racks(self, runs: Runs, level: LinkLevel, num_nodes: int) -> Runs:
        """Distinguish nodes by the racks that they fill in order; every class of racks becomes a vertex."""
        rack_ids: dict[_Switch, int] = {}
        result = []
        for block, count in _blocks(runs, num_nodes):
            rack = rack_ids.setdefault(_switch(block), len(rack_ids))
            key = (len(block[0][0].racks), rack)
            if key not in self.racks:
                self.racks[key] = self._add(Component(kind="fabric", name=level.name), 0)
            self.graph.nodes[self.racks[key]]["count"] += count
            result += [(replace(node, racks=(*node.racks, rack)), repeats * count) for node, repeats in block]
        return tuple(result)

    def _inside(self, faults: Faults, rails: tuple[int, ...]) -> tuple[Graph, dict[Any, int]]:
        """Return the components of a node and their classes, with its NICs on rails of these classes."""
        if faults not in self.nodes:
            self.nodes[faults] = node_graph(self.cluster, faults)
        node, key = self.nodes[faults], (faults, rails)
        if key not in self.refined:
            outside: dict[Any, Any] = {("nic", at): rail for at, rail in enumerate(rails)}
            outside |= {("device", at): share for part, at, share in faults if part == "link"}  # into a rack
            self.refined[key] = classes(node, outside)
        return node, self.refined[key]

    def _rails(self, switch: _Switch) -> tuple[int, ...]:
        """Return the class of every rail of a set of leaf switches; two differ if a node distinguishes their NICs."""
        rails = (0,) * num_rails(self.cluster)
        while True:
            rails_of_nodes = [
                self._inside(faults, rails)[1] for faults in sorted({node.faults for node in switch.nodes})
            ]
            numbers: dict[Any, int] = {}
            signatures = [tuple(class_of["nic", at] for class_of in rails_of_nodes) for at in range(len(rails))]
            refined = tuple(numbers.setdefault(classes, len(numbers)) for classes in signatures)
            if refined == rails:
                return rails
            rails = refined

    def _place(self, child: _Node | _Switch, count: int, total: int, depth: int, above: _Above) -> PlaceGroup:
        """Add the vertices of `total` equal places, `count` per enclosing place."""
        if isinstance(child, _Node):
            name, vertices = "node", self._place_node(child, total, above)
            inside: tuple[PlaceGroup, ...] = ()
        else:
            switches = self._place_switches(child, total, depth, above)
            name, vertices = self.tiers[depth], tuple(dict.fromkeys(switches.vertices))
            inside = tuple(self._place(inner, n, n * total, depth + 1, switches) for inner, n in child.below)
        return PlaceGroup(
            name=name,
            count=count,
            num_nodes=child.num_nodes,
            vertices=vertices,
            inside=inside,
            has_faults=child.num_faults > 0,
        )

    def _place_switches(self, switch: _Switch, total: int, depth: int, above: _Above) -> _Above:
        cluster = self.cluster
        tier, num_tiers = len(self.tiers) - 1 - depth, len(cluster.network.tiers)  # innermost 0
        if tier > num_tiers:
            return _Above(vertices=(self._add(Component(kind="wan", name="WAN"), total),))
        if tier == num_tiers:
            if needs_no_core(cluster, sum(count for _, count in switch.below)):
                return _Above()
            core = self._add(Component(kind="core", name="core"), total)
            for up in above.vertices:
                self._connect(core, up, site_link(cluster), total)
            return _Above(vertices=(core,))
        rails = self._rails(switch) if tier == 0 and num_rails(cluster) > 1 else (0,)
        link = uplink(cluster, tier, switch.num_nodes, len(rails), switch.share(tier))
        vertices: dict[int, str] = {}
        for rail, count in Counter(rails).items():
            vertices[rail] = self._add(Component(kind="switch", name=self.tiers[depth], tier=tier), total * count)
            for up in above.vertices:
                self._connect(vertices[rail], up, link, total * count)
        return _Above(vertices=tuple(vertices[rail] for rail in rails), rails=rails if len(rails) > 1 else ())

    def _place_node(self, node: _Node, total: int, above: _Above) -> tuple[str, ...]:
        inside, class_of = self._inside(node.faults, above.rails)
        slow = {at: share for part, at, share in node.faults if part == "link"}
        sizes = Counter(class_of.values())
        vertices: dict[int, str] = {}
        for at, component in inside.nodes(data="component"):
            class_number = class_of[at]
            if class_number not in vertices:
                sided = replace(component, side=node.side) if component.kind == "device" else component
                vertices[class_number] = self._add(sided, sizes[class_number] * total)
            if component.kind == "nic" and above.vertices:
                up = above.vertices[at[1] % len(above.vertices)]
                self._connect(vertices[class_number], up, nic_link(self.cluster, component.share), total)
            elif component.kind == "device":
                for (level, _), key in zip(wide_levels(self.cluster), enumerate(node.racks), strict=True):
                    link = fabric_link(level, share=slow.get(at[1], 1.0))
                    self._connect(vertices[class_number], self.racks[key], link, total)
        for a, b, link in inside.edges(data="link"):
            self._connect(vertices[class_of[a]], vertices[class_of[b]], link, total)
        return tuple(vertices.values())
