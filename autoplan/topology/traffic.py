"""How many bytes does a collective put on the links of every level, and how long do the busiest ones take for them?

The links of a level lead out of the domains of the level before it, those of the first level out of devices.  Inside
nodes and racks every level has links of its own, so that they carry what stays in its domains; what leaves for a tier
of switches has come over the NICs and over all tiers before it.

Arrays have one element per group in their last axis, and before it one per level where they describe levels.  Bytes
are those of one direction, per device: of the links that lead out of a domain each of its devices has an equal part.
All sibling groups are at work, so that the links of a domain carry that of all its devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import ClusterSpec
from autoplan.topology.levels import Gaps, Level, Topology

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Algorithm = Literal["ring", "tree", "hierarchical", "in_network", "all_to_all", "chain"]


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
        """One kind of group."""
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
class Spans:
    """Where the members of groups are: shape (levels, groups).

    A fabric is a level inside the node or rack, or the network with all its tiers.
    """

    inner: Floats  # members in a domain out of which the links of the level lead
    here: Floats  # members in a domain of the level
    base: Floats  # members in a domain out of which the links of the fabric lead
    reach: Floats  # members in a domain of the fabric

    @classmethod
    def of(cls, topology: Topology, members: NDArray[np.int64] | Floats) -> Spans:
        """Those of groups with so many `members` in one domain of each level."""
        here = members.astype(np.float64)
        inner = np.concatenate([np.ones((1, *here.shape[1:])), here[:-1]])
        base, reach = inner.copy(), here.copy()
        for at in topology.tiers:
            base[at] = base[at - 1]
        for at in reversed(topology.tiers):
            reach[at - 1] = reach[at]
        return cls(inner=inner, here=here, base=base, reach=reach)

    @property
    def is_crossed(self) -> NDArray[np.bool_]:
        """Whether the groups use the links of the level."""
        return self.reach > self.inner

    @property
    def hops(self) -> Floats:
        """How many hops a ring of the domains of a fabric has over each of its levels, the last one to close it aside.

        NCCL's rings know no tiers of switches, nodes follow one another as their ranks do.
        """
        return self.reach / self.inner - self.reach / self.here


def hierarchical_bytes(spans: Spans, buffer_bytes: Floats, volume: float) -> Floats:
    """Bytes of a collective that goes through one fabric after another, each with what is left of the buffer.

    `volume` is 1 for a reduce-scatter or an all-gather, 2 for an all-reduce; members at the same place of their nodes
    form the rings of the network, whose every hop carries the same (`modelling` D4).
    """
    ring = volume * buffer_bytes * (1 - 1 / (spans.reach / spans.base)) / spans.base
    return np.where(spans.is_crossed, ring * (spans.base / spans.inner), 0.0)


def ring_bytes(spans: Spans, buffer_bytes: Floats, volume: float) -> Floats:
    """Bytes of flat rings in the order of ranks, as many as a node has members, each with a part of the buffer.

    Every ring enters and leaves each domain once, over the links of another member.
    """
    num_ranks = spans.here[-1]
    hop = volume * buffer_bytes * (1 - 1 / num_ranks)
    leaving = np.where(spans.reach < num_ranks, 1 / spans.reach, 0.0)
    return np.where(spans.is_crossed, hop * (1 / spans.inner - leaving), 0.0)


def tree_bytes(topology: Topology, spans: Spans, buffer_bytes: Floats) -> Floats:
    """Bytes of an all-reduce up and down NCCL's double binary tree of the nodes, and a chain of members in every node.

    A chain begins at each member in turn, so that all NICs are used alike; the busiest switch decides.
    """
    chain = np.where(spans.is_crossed, 2.0 * buffer_bytes * (1 / spans.inner - 1 / spans.reach), 0.0)
    for at in topology.network:
        nodes, below = (spans.reach / spans.base)[at], (spans.inner / spans.base)[at]
        pairs, like = np.unique(np.stack([nodes, below]), axis=1, return_inverse=True)
        crossing = np.array([_crossing_edges(round(n), max(round(b), 1)) for n, b in pairs.T])[like.reshape(-1)]
        chain[at] = np.where(spans.is_crossed[at], buffer_bytes / 2 * crossing / spans.inner[at], 0.0)
    return chain


def in_network_bytes(topology: Topology, spans: Spans, buffer_bytes: Floats) -> Floats:
    """Bytes of an all-reduce whose sums the switches of the network form: what every node, and then every switch, has
    goes up once, and the sum comes down once.
    """
    moved = hierarchical_bytes(spans, buffer_bytes, 2.0)
    for at in topology.network:
        moved[at] = np.where(spans.is_crossed[at], buffer_bytes / spans.inner[at], 0.0)
    return moved


def all_to_all_bytes(spans: Spans, buffer_bytes: Floats, copies: int = 1) -> Floats:
    """Bytes of an all-to-all in which every rank holds `buffer_bytes` and keeps 1 / n of them.

    Of a buffer that holds every token `copies` times, for as many random members, another rank, node or rack gets one
    and spreads it inside.
    """
    num_ranks = spans.here[-1]
    if copies == 1:
        return buffer_bytes * (spans.reach - spans.inner) / num_ranks
    domains = spans.reach / spans.base - spans.inner / spans.base
    touched = domains * (1 - (1 - spans.base / num_ranks) ** copies)
    return buffer_bytes / copies * touched


def chain_bytes(topology: Topology, spans: Spans, message_bytes: Floats) -> Floats:
    """Bytes of a message from each member to the next one: each has its own links, those out of a switch are shared by
    the senders alone.
    """
    own = np.ones((len(topology.levels), 1), dtype=np.bool_)
    own[list(topology.tiers)] = False
    return np.where(spans.is_crossed, message_bytes / np.where(own, 1.0, spans.inner), 0.0)


@lru_cache(maxsize=4096)
def _crossing_edges(num_nodes: int, num_below: int) -> int:
    """How many edges of the two trees lead out of one of the switches with `num_below` nodes, of the worst one.

    NCCL src/graph/trees.cc: the parent of a node has its lowest set bit moved up by one place; the second tree is the
    mirror image of the first one, or with an odd number of nodes that tree shifted by one.
    """
    child = np.arange(1, num_nodes)
    bit = child & -child
    parent = (child ^ bit) | (bit << 1)
    parent = np.where(parent >= num_nodes, child ^ bit, parent)
    edges = np.stack([child, parent])
    other = (edges + 1) % num_nodes if num_nodes % 2 else num_nodes - 1 - edges
    ends = np.concatenate([edges, other], axis=1) // num_below
    crossing = ends[:, ends[0] != ends[1]]
    return int(np.bincount(crossing.ravel(), minlength=1).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a collective of groups and all their siblings puts on the links: shape (levels, groups)."""

    spans: Spans
    device_bytes: Floats  # over the links of one device, or its part of those out of its domain, one direction
    domain_bytes: Floats  # of all siblings out of one domain of the level before, one direction
    num_siblings: Floats  # groups that share the links out of that domain

    def wire_s(self, topology: Topology) -> Floats:
        """Time in which the busiest links move their bytes, without latency: shape (groups)."""
        times = [
            moved / level_rate(level, here / inner)
            for level, moved, here, inner in zip(
                topology.levels, self.device_bytes, self.spans.here, self.spans.inner, strict=True
            )
        ]
        return np.max(times, axis=0)


def traffic(
    topology: Topology, groups: RankGroups, algorithm: Algorithm, buffer_bytes: Floats, volume: float = 2.0
) -> Traffic:
    """The traffic of one collective; `volume` is 2 for an all-reduce, 1 for a half of it (ring and hierarchical)."""
    spans = Spans.of(topology, groups.members(topology))
    match algorithm:
        case "ring":
            moved = ring_bytes(spans, buffer_bytes, volume)
        case "tree":
            moved = tree_bytes(topology, spans, buffer_bytes)
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
    return Traffic(spans=spans, device_bytes=moved, domain_bytes=whole, num_siblings=siblings)


def level_rate(level: Level, domains: Floats) -> Floats:
    """Bytes per second of one device on a level when so many of its parts talk to each other."""
    if level.is_mesh and level.num_devices > 1:
        return level.bytes_per_s * np.clip((domains - 1) / (level.num_devices - 1), 1 / (level.num_devices - 1), 1.0)
    return np.full(domains.shape, level.bytes_per_s)


def num_nics(cluster: ClusterSpec, topology: Topology, groups: RankGroups) -> Ints:
    """NICs of a node, or rack, that each group may use: those of its members there; none for what does not leave."""
    if not topology.network:
        return np.zeros(len(groups.size), dtype=np.int64)
    at = topology.network[0]
    spans = Spans.of(topology, groups.members(topology))
    own = np.ceil(spans.inner[at] * cluster.network.nics_per_device)
    return np.where(spans.is_crossed[at], own, 0).astype(np.int64)
