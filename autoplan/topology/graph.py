"""Which part of a cluster hangs on which, and over what?  The cluster as a graph, identical parts held once.

Vertices of `quotient` are classes of identical parts with their number; an edge stands for all equal links between two
classes.  It is the graph of `expand`, every part a vertex, folded along its symmetries: a flow between unions of
classes may be averaged over them, so that a minimum cut of one is that of the other.  It grows with the number of
different switches and nodes, not with the cluster.  (Racks of a scale-up fabric that straddle leaf switches break the
symmetry; they are folded all the same, and their cut is an upper bound.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx

from autoplan.cluster import ClusterSpec, LinkLevel
from autoplan.errors import InputError
from autoplan.topology.parts import (
    Graph,
    Link,
    Part,
    fabric_link,
    nic_link,
    node_graph,
    num_rails,
    site_link,
    uplink,
    wide_levels,
)

MOST_EXPANDED = 4096  # devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A place that holds `count` times the same: a site, a switch with what is below it, a node."""

    name: str
    count: int  # in each place around it
    num_nodes: int  # in one of them
    vertices: tuple[str, ...]  # of the quotient graph: its own switches, or the parts of a node
    inside: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGraph:
    """The quotient graph, and how its places lie in each other, outermost first."""

    graph: Graph
    root: Group


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """Nodes that are alike: the racks of each wide fabric that hold them are of the same class."""

    side: int = 0
    racks: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        return 1


@dataclass(frozen=True, slots=True, order=True)
class _Switch:
    """Switches with the same nodes and switches below them: those of a tier, a site, all."""

    num_nodes: int
    below: tuple[tuple[_Node | _Switch, int], ...]


Runs = tuple[tuple[_Node, int], ...]  # nodes in order: so many of this kind, then so many of that
Above = dict[int | None, str]  # the switches over a place, by the class of the NICs that go there; None: all do


def quotient(cluster: ClusterSpec, *, split: int = 0) -> ClusterGraph:
    """The graph of `cluster`'s classes; with `split` the first nodes are kept apart from the others."""
    runs = tuple((_Node(side=side), n) for side, n in ((1, split), (0, cluster.num_nodes - split)) if n)
    return _Folded(cluster).build(runs)


def bisection_bytes_per_s(cluster: ClusterSpec, num_nodes: int) -> float:
    """What the first `num_nodes` nodes can send to the others at most: sustained, one direction, all links together."""
    if not 0 < num_nodes < cluster.num_nodes:
        raise InputError(f"a part of the {cluster.num_nodes} nodes must be at least 1 and not all, got {num_nodes}")
    graph = quotient(cluster, split=num_nodes).graph
    return min_cut_bytes_per_s(graph, devices(graph, side=1), devices(graph, side=0))


def devices(graph: Graph, *, side: int) -> list[Hashable]:
    """The device vertices of one side."""
    return [at for at, part in graph.nodes(data="part") if part.kind == "device" and part.side == side]


def links_up(graph: Graph, vertex: Hashable) -> list[Link]:
    """The links of a switch, a NIC or a site to what is above it in the network."""
    order = {"nic": -1, "switch": 0, "core": 1, "wan": 2}
    part = graph.nodes[vertex]["part"]
    found = []
    for other, edge in graph[vertex].items():
        above = graph.nodes[other]["part"]
        if above.kind in order and (order[above.kind], above.tier) > (order[part.kind], part.tier):
            found.append(edge["link"])
    return found


def min_cut_bytes_per_s(graph: Graph, left: Iterable[Hashable], right: Iterable[Hashable]) -> float:
    """The least sustained rate, one direction, of links that part the vertices `left` from those of `right`."""
    flows = nx.Graph()
    for a, b, edge in graph.edges(data=True):
        if a != b:
            flows.add_edge(a, b, capacity=edge["num_links"] * edge["link"].sustained_bytes_per_s)
    source, sink = object(), object()
    flows.add_edges_from((source, vertex) for vertex in left)  # no capacity: without limit
    flows.add_edges_from((vertex, sink) for vertex in right)
    value: float = nx.minimum_cut_value(flows, source, sink)
    return value


def classes(graph: Graph, first: dict[Any, int] | None = None) -> dict[Any, int]:
    """The class of every vertex of the coarsest partition whose members see equal classes over equal links.

    `first` are classes to start from.  Colour refinement, as in Berkholz, Bonsma and Grohe, arXiv:1509.08251.
    """
    colour: dict[Any, Any] = {v: (part, (first or {}).get(v)) for v, part in graph.nodes(data="part")}
    count = 0
    while True:
        numbers: dict[Any, int] = {}
        new = {v: numbers.setdefault(seen, len(numbers)) for v, seen in colour.items()}
        if len(numbers) == count:
            return new
        count = len(numbers)
        colour = {
            v: (new[v], frozenset(Counter((edge["link"], new[other]) for other, edge in graph[v].items()).items()))
            for v in graph
        }


def _tiers(cluster: ClusterSpec) -> tuple[str, ...]:
    """Names of the places above a node, outermost first."""
    tiers = tuple(tier.name for tier in reversed(cluster.network.tiers))
    return ("cluster", "site", *tiers) if cluster.wan else ("cluster", *tiers)


def _switch(below: Iterable[tuple[_Node | _Switch, int]]) -> _Switch:
    counts: Counter[Any] = Counter()
    for child, count in below:
        counts[child] += count
    ordered = tuple(sorted(counts.items(), key=lambda item: item[0], reverse=True))
    return _Switch(sum(child.num_nodes * count for child, count in ordered), ordered)


def _blocks(runs: Runs, size: int) -> Iterator[tuple[Runs, int]]:
    """The nodes in blocks of `size` in order, the last one smaller; equal whole blocks in a row are held once."""
    partial: list[tuple[_Node, int]] = []
    room = size
    for node, count in runs:
        if partial:
            taken = min(room, count)
            partial.append((node, taken))
            room, count = room - taken, count - taken
            if not room:
                yield tuple(partial), 1
                partial, room = [], size
        whole, rest = divmod(count, size)
        if whole:
            yield ((node, size),), whole
        if rest:
            partial, room = [(node, rest)], size - rest
    if partial:
        yield tuple(partial), 1


def _in_order(runs: Runs, sizes: Sequence[int]) -> _Switch:
    """Switches, outermost first, of the given sizes, filled with nodes in order."""
    if not sizes:
        return _switch(runs)
    return _switch((_in_order(block, sizes[1:]), count) for block, count in _blocks(runs, sizes[0]))


def _as_named(nodes: Iterable[tuple[tuple[str, ...], _Node]], depth: int) -> _Switch:
    """The switches on the path of each node, outermost first; `depth` names of it are done."""
    places: dict[str, list[tuple[tuple[str, ...], _Node]]] = defaultdict(list)
    here: list[_Node] = []
    for path, node in nodes:
        if depth < len(path):
            places[path[depth]].append((path, node))
        else:
            here.append(node)
    return _switch([(node, 1) for node in here] + [(_as_named(some, depth + 1), 1) for some in places.values()])


def _named_paths(cluster: ClusterSpec) -> list[tuple[str, ...]]:
    """Of every node of an allocation: its site where there are several, and its switches, outermost first."""
    return [
        ((group.site,) if cluster.wan else ()) + tuple(reversed(group.switches))
        for group in cluster.nodes
        for _ in group.names
    ]


class _Folded:
    """Builds the quotient graph of one cluster."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.graph = nx.Graph()
        self.tiers = _tiers(cluster)
        self.node = node_graph(cluster)
        self.class_of = classes(self.node)
        self.names: Counter[str] = Counter()
        self.racks: dict[tuple[int, int], str] = {}  # (wide level, class) -> vertex

    def build(self, runs: Runs) -> ClusterGraph:
        cluster = self.cluster
        for level, num_nodes in wide_levels(cluster):
            runs = self._into_racks(runs, level, num_nodes)
        if cluster.nodes:
            nodes = (node for node, count in runs for _ in range(count))
            tree = _as_named(zip(_named_paths(cluster), nodes, strict=True), 0)
        else:
            sites = (cluster.wan.nodes_per_site,) if cluster.wan else ()
            tree = _in_order(runs, (*sites, *(tier.num_nodes for tier in reversed(cluster.network.tiers))))
        return ClusterGraph(graph=self.graph, root=self._place(tree, 1, 1, 0, {}))

    def _add(self, part: Part, count: int) -> str:
        vertex = part.name
        while vertex in self.graph:
            self.names[part.name] += 1
            vertex = f"{part.name} {self.names[part.name] + 1}"
        self.graph.add_node(vertex, part=part, count=count)
        return vertex

    def _connect(self, a: str, b: str, link: Link, count: int) -> None:
        if self.graph.has_edge(a, b):
            assert self.graph[a][b]["link"] == link
            count += self.graph[a][b]["num_links"]
        self.graph.add_edge(a, b, link=link, num_links=count)

    def _into_racks(self, runs: Runs, level: LinkLevel, num_nodes: int) -> Runs:
        """The nodes, told apart by the racks that they are in; every class of racks becomes a vertex."""
        known: dict[_Switch, int] = {}
        result = []
        for block, count in _blocks(runs, num_nodes):
            rack = known.setdefault(_switch(block), len(known))
            key = (len(block[0][0].racks), rack)
            if key not in self.racks:
                self.racks[key] = self._add(Part(kind="fabric", name=level.name), 0)
            self.graph.nodes[self.racks[key]]["count"] += count
            result += [(replace(node, racks=(*node.racks, rack)), many * count) for node, many in block]
        return tuple(result)

    def _place(self, child: _Node | _Switch, count: int, total: int, depth: int, above: Above) -> Group:
        """Vertices of `total` equal places, `count` in each around it."""
        if isinstance(child, _Node):
            vertices = self._place_node(child, total, above)
            return Group(name="node", count=count, num_nodes=1, vertices=vertices)
        here = self._place_switches(child, total, depth, above)
        inside = tuple(self._place(one, n, n * total, depth + 1, here) for one, n in child.below)
        vertices = tuple(dict.fromkeys(here.values()))
        return Group(name=self.tiers[depth], count=count, num_nodes=child.num_nodes, vertices=vertices, inside=inside)

    def _place_switches(self, switch: _Switch, total: int, depth: int, above: Above) -> Above:
        cluster = self.cluster
        tier, num_tiers = len(self.tiers) - 1 - depth, len(cluster.network.tiers)  # innermost 0
        if tier > num_tiers:
            return {None: self._add(Part(kind="wan", name="WAN"), total)}
        if tier == num_tiers:
            if _needs_no_core(cluster, sum(count for _, count in switch.below)):
                return {}
            core = self._add(Part(kind="core", name="core"), total)
            if above:
                self._connect(core, above[None], site_link(cluster), total)
            return {None: core}
        rails = num_rails(cluster) if tier == 0 else 1
        # NICs of one class go into switches of one class: one for each NIC of a node.
        sizes = Counter(self.class_of[at] for at in self.node if at[0] == "nic") if rails > 1 else {None: 1}
        here: Above = {}
        for rail, count in sizes.items():
            here[rail] = self._add(Part(kind="switch", name=self.tiers[depth], tier=tier), total * count)
            if above:
                link = uplink(cluster, tier, switch.num_nodes, rails)
                self._connect(here[rail], above[None], link, total * count)
        return here

    def _place_node(self, node: _Node, total: int, above: Above) -> tuple[str, ...]:
        sizes = Counter(self.class_of.values())
        vertices: dict[int, str] = {}
        for at, part in self.node.nodes(data="part"):
            here = self.class_of[at]
            if here not in vertices:
                own = replace(part, side=node.side) if part.kind == "device" else part
                vertices[here] = self._add(own, sizes[here] * total)
            if part.kind == "nic" and above:
                up = above[None] if None in above else above[here]
                self._connect(vertices[here], up, nic_link(self.cluster), total)
            elif part.kind == "device":
                for (level, _), key in zip(wide_levels(self.cluster), enumerate(node.racks), strict=True):
                    self._connect(vertices[here], self.racks[key], fabric_link(level), total)
        for a, b, link in self.node.edges(data="link"):
            self._connect(vertices[self.class_of[a]], vertices[self.class_of[b]], link, total)
        return tuple(vertices.values())


def _needs_no_core(cluster: ClusterSpec, num_switches: int) -> bool:
    """Whether one switch holds all nodes, so that nothing is to be joined."""
    num_tiers = len(cluster.network.tiers)
    rails = num_rails(cluster) if num_tiers == 1 else 1
    return cluster.wan is None and num_tiers > 0 and num_switches * rails == 1


# -- every part a vertex ----------------------------------------------------------------------------------------------


def expand(cluster: ClusterSpec) -> Graph:
    """The graph with every part a vertex: (node, kind, index) inside the nodes, (name, place, rail) above them."""
    if cluster.num_devices > MOST_EXPANDED:
        raise InputError(
            f"a graph of {cluster.num_devices:,} devices is too large to hold every part: at most {MOST_EXPANDED:,}"
        )
    graph, inside = nx.Graph(), node_graph(cluster)
    names, rails = _tiers(cluster), num_rails(cluster)
    paths = _paths(cluster)
    below = Counter(path[:depth] for path in paths for depth in range(len(path) + 1))
    num_tiers = len(cluster.network.tiers)
    is_flat = _needs_no_core(cluster, len({path[:1] for path in paths}))
    for place, num_nodes in below.items():
        tier = len(names) - 1 - len(place)
        if tier == num_tiers and is_flat:
            continue
        for rail in range(rails if tier == 0 else 1):
            vertex = (names[len(place)], place, rail)
            above = (names[len(place) - 1], place[:-1], 0)
            if tier > num_tiers:
                _add(graph, vertex, Part(kind="wan", name="WAN"))
            elif tier == num_tiers:
                _add(graph, vertex, Part(kind="core", name="core"))
                if cluster.wan:
                    _connect(graph, vertex, above, site_link(cluster))
            else:
                _add(graph, vertex, Part(kind="switch", name=names[len(place)], tier=tier))
                if tier + 1 < num_tiers or not is_flat:
                    _connect(graph, vertex, above, uplink(cluster, tier, num_nodes, rails if tier == 0 else 1))
    for node, path in enumerate(paths):
        for at, part in inside.nodes(data="part"):
            vertex = (node, *at)
            _add(graph, vertex, part)
            if part.kind == "nic":
                _connect(graph, vertex, (names[-1], path, at[1] % rails), nic_link(cluster))
            elif part.kind == "device":
                for level, num_nodes in wide_levels(cluster):
                    rack = ("rack", level.name, node // num_nodes)
                    _add(graph, rack, Part(kind="fabric", name=level.name))
                    _connect(graph, vertex, rack, fabric_link(level))
        for a, b, link in inside.edges(data="link"):
            _connect(graph, (node, *a), (node, *b), link)
    return graph


def _add(graph: Graph, vertex: Hashable, part: Part) -> None:
    graph.add_node(vertex, part=part, count=1)


def _connect(graph: Graph, a: Hashable, b: Hashable, link: Link) -> None:
    graph.add_edge(a, b, link=link, num_links=1)


def _paths(cluster: ClusterSpec) -> list[tuple[Hashable, ...]]:
    """Of every node the site, where there are several, and the switches above it, outermost first."""
    if cluster.nodes:
        return list(_named_paths(cluster))
    paths: list[tuple[Hashable, ...]] = []
    for node in range(cluster.num_nodes):
        site, within = divmod(node, cluster.wan.nodes_per_site) if cluster.wan else (0, node)
        switches = (within // tier.num_nodes for tier in reversed(cluster.network.tiers))
        paths.append(((site,) if cluster.wan else ()) + tuple(switches))
    return paths
