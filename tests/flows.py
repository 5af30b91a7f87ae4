"""A cluster with every device, NIC and switch of its own, and the flows of collectives put on it one by one."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import networkx as nx

from autoplan.cluster import ClusterSpec

Group = tuple[int, ...]
Edge = tuple[Any, Any]
Flow = tuple[int, int, float]  # sender, receiver, bytes


class Expanded:
    """Every device and switch of a cluster.  An edge out of a domain has the index of the level that it leads to."""

    def __init__(self, cluster: ClusterSpec) -> None:
        total, node = cluster.num_devices, cluster.devices_per_node
        self.graph = nx.DiGraph()
        inside = [level.num_devices for level in cluster.levels]
        for level, (size, device) in enumerate(itertools.product(inside, range(total))):
            at = level // total
            # Inner fabrics are preferred, and the network comes last.
            self._join(("device", device), ("fabric", at, device // size), at, weight=1 + at)
        tiers = [tier.num_nodes * node for tier in cluster.network.tiers if tier.num_nodes * node < total]
        if cluster.wan:
            site = cluster.wan.nodes_per_site * node
            tiers = [*(size for size in tiers if size < site), site]
        sizes = [1, *tiers, total]
        for at, (below, size) in enumerate(itertools.pairwise(sizes)):
            for number in range(total // below):
                lower = ("device", number) if at == 0 else ("switch", at, number)
                upper = ("switch", at + 1, number * below // size)
                if at == 0:
                    self._join(lower, ("nic", number), None, weight=100)
                    lower = ("nic", number)
                self._join(lower, upper, len(inside) + at, weight=100)
        self.top = ("switch", len(sizes) - 1, 0)
        self.inside, self.node = inside, inside[-1]
        self.carried: Counter[Edge] = Counter()
        self.path = cache(lambda a, b: nx.shortest_path(self.graph, a, b, weight="weight"))

    def _join(self, lower: Any, upper: Any, level: int | None, weight: float) -> None:
        self.graph.add_edge(lower, upper, level=level, weight=weight)
        self.graph.add_edge(upper, lower, level=None, weight=weight)

    def send(self, flows: Iterable[Flow]) -> None:
        """Put flows on the shortest paths between devices."""
        for sender, receiver, num_bytes in flows:
            for edge in itertools.pairwise(self.path(("device", sender), ("device", receiver))):
                self.carried[edge] += num_bytes

    def gather(self, group: Sequence[int], num_bytes: float) -> None:
        """Put on the edges from devices to the switch above all of them what is added up on the way."""
        paths = [[*itertools.pairwise(self.path(("device", one), self.top))] for one in group]
        common = set(paths[0]).intersection(*paths[1:])
        for edge in set().union(*paths) - common:
            self.carried[edge] += num_bytes

    def busiest(self, level: int) -> float:
        """Bytes over the busiest edge that leads out of a domain to links of `level`."""
        return max(self.carried[edge] for edge in self.graph.edges if self.graph.edges[edge]["level"] == level)

    def parts(self, group: Sequence[int], size: int) -> list[list[int]]:
        """The members of a group by the domain of `size` devices that they are in."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank in group:
            found[rank // size].append(rank)
        return list(found.values())

    def order(self, group: Sequence[int], turn: int, domains: Sequence[int]) -> list[int]:
        """Members of a node, begun `turn` places later: each of them once is the last one of its domain."""
        if not domains:
            return list(group)
        parts = self.parts(group, domains[-1])
        start, inner_turn = divmod(turn, len(parts[0]))
        ordered = [self.order(part, inner_turn, domains[:-1]) for part in parts]
        return [one for part in ordered[start:] + ordered[:start] for one in part]

    def channels(self, group: Sequence[int]) -> Iterator[list[list[int]]]:
        """The members of every node in order, for as many rings as a node has members."""
        nodes = self.parts(group, self.node)
        for turn in range(len(nodes[0])):
            yield [self.order(node, turn, [1, *self.inside]) for node in nodes]


def ring(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Rings through all members, each with its part of the buffer."""
    channels = list(expanded.channels(group))
    hop = volume * buffer_bytes / len(channels) * (len(group) - 1) / len(group)
    for nodes in channels:
        members = [one for node in nodes for one in node]
        expanded.send((a, b, hop) for a, b in zip(members, members[1:] + members[:1], strict=True))


def hierarchical(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Rings inside one fabric after another among those at the same place, each with what is left of the buffer."""
    inner = 1
    for below, size in itertools.pairwise([1, *expanded.inside, 10**9]):
        for part in expanded.parts(group, size):
            for peers in zip(*expanded.parts(part, below), strict=True):
                if len(peers) > 1:
                    hop = volume * buffer_bytes / inner * (len(peers) - 1) / len(peers)
                    expanded.send((a, b, hop) for a, b in zip(peers, peers[1:] + peers[:1], strict=True))
        inner = len(expanded.parts(group, size)[0])


def _tree(low: int, high: int) -> Iterator[tuple[int, int]]:
    """(child, parent) below the nodes between `low` and `high`, of which the widest power of two is the parent."""
    middle = max(range(low + 1, high), key=lambda rank: rank & -rank)
    for a, b in ((low, middle), (middle, high)):
        if b - a > 1:
            yield max(range(a + 1, b), key=lambda rank: rank & -rank), middle
            yield from _tree(a, b)


def double_tree(num_nodes: int) -> list[tuple[int, int]]:
    """(child, parent) in both trees of NCCL: node 0 is the root of a search tree over the others, then its mirror."""
    if num_nodes == 1:
        return []
    top = max(range(1, num_nodes), key=lambda rank: rank & -rank)
    one = [(top, 0), *_tree(0, num_nodes)]
    if num_nodes % 2:
        return one + [((a + 1) % num_nodes, (b + 1) % num_nodes) for a, b in one]
    return one + [(num_nodes - 1 - a, num_nodes - 1 - b) for a, b in one]


def tree(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Up and down chains in the nodes and two trees of nodes, each tree with half of a channel's bytes."""
    channels = list(expanded.channels(group))
    part = buffer_bytes / len(channels)
    for nodes in channels:
        for node in nodes:
            for a, b in itertools.pairwise(node):
                expanded.send([(a, b, part), (b, a, part)])
        for child, parent in double_tree(len(nodes)):
            a, b = nodes[child][0], nodes[parent][0]
            expanded.send([(a, b, part / 2), (b, a, part / 2)])


def in_network(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Reduced inside the nodes, then by the switches, member by member of a node."""
    nodes = expanded.parts(group, expanded.node)
    for node in nodes:
        hierarchical(expanded, node, buffer_bytes, 2.0)
    if len(nodes) > 1:
        for rail in zip(*nodes, strict=True):
            expanded.gather(rail, buffer_bytes / len(nodes[0]))


def all_to_all(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Every member sends an equal part to every other one."""
    expanded.send((a, b, buffer_bytes / len(group)) for a, b in itertools.permutations(group, 2))


def chain(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Every member sends to the next one."""
    expanded.send((a, b, buffer_bytes) for a, b in itertools.pairwise(group))


ALGORITHMS = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "in_network": in_network,
    "all_to_all": all_to_all,
    "chain": chain,
}


def sibling_groups(total: int, stride: int, size: int, repeat_stride: int = 1, repeats: int = 1) -> list[Group]:
    """All groups of a kind: every rank is in one."""
    left = set(range(total))
    groups = []
    while left:
        first = min(left)
        members = tuple(sorted(first + stride * i + repeat_stride * j for i in range(size) for j in range(repeats)))
        groups.append(members)
        left -= set(members)
    return groups
