"""A cluster with every device, NIC and switch of its own, and the flows of collectives put on it one by one."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import networkx as nx
import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.levels import Gaps, Topology
from autoplan.topology.traffic import Spans, all_to_all_bytes, chain_bytes, hierarchical_bytes, in_network_bytes

Algorithm = Literal["hierarchical", "in_network", "all_to_all", "chain"]
Group = tuple[int, ...]
Edge = tuple[Any, Any]
Flow = tuple[int, int, float]  # sender, receiver, bytes


class Expanded:
    """Devices and switches of a cluster.  An edge out of a domain has the index of the level that it leads to."""

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
        paths = [[*itertools.pairwise(self.path(("device", device), self.top))] for device in group]
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


def in_network(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Reduced inside the nodes, then by the switches, member by member of a node."""
    nodes = expanded.parts(group, expanded.node)
    for node in nodes:
        hierarchical(expanded, node, buffer_bytes, 2.0)
    if len(nodes) > 1:
        for rail in zip(*nodes, strict=True):
            expanded.gather(rail, buffer_bytes / len(nodes[0]))


def all_to_all(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Messages of members that send an equal part to every other one."""
    expanded.send((a, b, buffer_bytes / len(group)) for a, b in itertools.permutations(group, 2))


def chain(expanded: Expanded, group: Sequence[int], buffer_bytes: float, volume: float) -> None:
    """Every member sends to the next one."""
    expanded.send((a, b, buffer_bytes) for a, b in itertools.pairwise(group))


ALGORITHMS: dict[Algorithm, Callable[[Expanded, Group, float, float], None]] = {
    "hierarchical": hierarchical,
    "in_network": in_network,
    "all_to_all": all_to_all,
    "chain": chain,
}


def sibling_groups(total: int, stride: int, size: int, repeat_stride: int = 1, repeats: int = 1) -> list[Group]:
    """Groups of a kind: every rank is in one."""
    left = set(range(total))
    groups = []
    while left:
        first = min(left)
        members = tuple(sorted(first + stride * i + repeat_stride * j for i in range(size) for j in range(repeats)))
        groups.append(members)
        left -= set(members)
    return groups


# -- the same by the closed forms --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Groups of `size` ranks, `stride` apart, and `repeats` such rows, `repeat_stride` apart: context x data parallel
    ranks with the stages of a pipeline between them, say.  Shape (groups).
    """

    stride: Ints
    size: Ints
    repeat_stride: Ints
    repeats: Ints

    @classmethod
    def of(cls, stride: int, size: int, repeat_stride: int = 1, repeats: int = 1) -> RankGroups:
        """Traffic of a kind of group."""
        return cls(
            stride=np.array([stride]),
            size=np.array([size]),
            repeat_stride=np.array([repeat_stride]),
            repeats=np.array([repeats]),
        )

    @property
    def num_ranks(self) -> Ints:
        """Members of a group."""
        return self.size * self.repeats

    def members(self, topology: Topology) -> Ints | Floats:
        """How many members of each group share one domain of each level: shape (levels, groups)."""
        is_row = (self.repeat_stride == self.stride * self.size) | (self.repeats == 1)
        gaps = Gaps(np.where(is_row, self.num_ranks, self.size), self.repeat_stride)
        return topology.members(self.stride, self.num_ranks, gaps=gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic that a collective of groups and all their siblings puts on the links: shape (levels, groups)."""

    device_bytes: Floats  # over the links of one device, or its part of those out of its domain, one direction
    domain_bytes: Floats  # of all siblings out of one domain of the level before, one direction
    num_siblings: Floats  # groups that share the links out of that domain


def traffic(
    topology: Topology, groups: RankGroups, algorithm: Algorithm, buffer_bytes: Floats, volume: float = 2.0
) -> Traffic:
    """The traffic of one collective; `volume` is 2 for an all-reduce, 1 for a half of it (hierarchical)."""
    spans = Spans.of(topology, groups.members(topology))
    match algorithm:
        case "hierarchical":
            moved = hierarchical_bytes(spans, buffer_bytes, volume)
        case "in_network":
            moved = in_network_bytes(topology, spans, buffer_bytes)
        case "all_to_all":
            moved = all_to_all_bytes(spans, buffer_bytes)
        case "chain":
            moved = chain_bytes(topology, spans, buffer_bytes)
    domains = np.array([1, *(level.num_devices for level in topology.levels[:-1])], dtype=np.float64)[:, None]
    siblings = domains / spans.inner
    whole = np.where(spans.is_crossed, buffer_bytes * siblings, 0.0) if algorithm == "chain" else moved * domains
    return Traffic(device_bytes=moved, domain_bytes=whole, num_siblings=siblings)
