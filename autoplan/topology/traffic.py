"""Bytes of a collective on the links of every level, and the rates of the links.

The links of a level lead out of the domains of the previous level, those of the first level out of devices.  Inside
nodes and racks every level has its own links, which carry the traffic that stays in its domains; traffic to a switch
tier also crosses the NICs and all tiers before it.

Arrays have one element per group in their last axis, preceded by one per level if they describe levels.  Bytes are per
device and direction: each device has an equal part of the links out of its domain.  All sibling groups communicate at
once, so the links of a domain carry the traffic of all its devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.topology.levels import Level, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Members of groups by level, shape (levels, groups); a fabric is one level, or the network with all its tiers."""

    inner: Floats  # members in a domain below the links of the level
    outer: Floats  # members in a domain of the level
    base: Floats  # members in a domain below the links of the fabric
    reach: Floats  # members in a domain of the fabric

    @classmethod
    def of(cls, topology: Topology, members: Ints | Floats) -> Spans:
        """Return the spans of groups with this many `members` in one domain of each level."""
        in_domain = members.astype(np.float64)
        inner = np.concatenate([np.ones((1, *in_domain.shape[1:])), in_domain[:-1]])
        base, reach = inner.copy(), in_domain.copy()
        for at in topology.tiers:
            base[at] = base[at - 1]
        for at in reversed(topology.tiers):
            reach[at - 1] = reach[at]
        return cls(inner=inner, outer=in_domain, base=base, reach=reach)

    @property
    def is_crossed(self) -> Bools:
        """Return whether the groups use the links of the level."""
        return self.reach > self.inner

    @property
    def hops(self) -> Floats:
        """Hops of a ring over each level of a fabric, without the last; NCCL's rings follow ranks, not switches."""
        return self.reach / self.inner - self.reach / self.outer


def hierarchical_bytes(spans: Spans, buffer_bytes: Floats, volume: float) -> Floats:
    """Bytes of a collective that uses one fabric after another, each with the remaining part of the buffer.

    `volume` is 1 for a reduce-scatter or an all-gather, 2 for an all-reduce; members with the same index in their nodes
    form the rings of the network, with equal traffic on every hop (`modelling` D4).
    """
    ring = volume * buffer_bytes * (1 - 1 / (spans.reach / spans.base)) / spans.base
    return np.where(spans.is_crossed, ring * (spans.base / spans.inner), 0.0)


def ring_bytes(topology: Topology, spans: Spans, buffer_bytes: Floats, volume: float) -> Floats:
    """Bytes of rings through all members of a node that enter it over one NIC and leave it over another.

    Each of n members forwards 1 - 1 / n of the buffer, and a NIC carries one member's traffic (NCCL
    doc/PERFORMANCE.md).  Only network links are counted.
    """
    ring = volume * buffer_bytes * (1 - 1 / spans.reach) / spans.base
    moved = np.zeros_like(ring)
    for at in topology.network:
        moved[at] = np.where(spans.is_crossed[at], ring[at] * (spans.base[at] / spans.inner[at]), 0.0)
    return moved


def in_network_bytes(topology: Topology, spans: Spans, buffer_bytes: Floats) -> Floats:
    """Bytes of an in-network all-reduce: every node and switch sends its sum up, and the total returns."""
    moved = hierarchical_bytes(spans, buffer_bytes, 2.0)
    for at in topology.network:
        moved[at] = np.where(spans.is_crossed[at], buffer_bytes / spans.inner[at], 0.0)
    return moved


def all_to_all_bytes(spans: Spans, buffer_bytes: Floats, copies: Ints | int = 1) -> Floats:
    """Bytes of an all-to-all in which every rank has `buffer_bytes` and keeps 1 / n of them.

    If the buffer contains every token `copies` times, for random members, each other rank, node or rack receives it
    once and distributes it inside.
    """
    num_ranks = spans.outer[-1]
    all_bytes = buffer_bytes * (spans.reach - spans.inner) / num_ranks
    if np.all(copies == 1):
        return all_bytes
    domains = spans.reach / spans.base - spans.inner / spans.base
    touched = domains * (1 - (1 - spans.base / num_ranks) ** copies)
    return np.where(copies == 1, all_bytes, buffer_bytes / copies * touched)


def chain_bytes(topology: Topology, spans: Spans, message_bytes: Floats) -> Floats:
    """Bytes of a message from each member to the next; only the senders share a NIC and the links out of a switch.

    Of the members in a node the last one sends; those of as many siblings, which share its NIC, do not.
    """
    max_sharing = np.array([level.devices_per_nic for level in topology.levels])
    max_sharing[list(topology.tiers)] = np.inf
    parts = np.minimum(spans.inner, max_sharing.reshape(-1, *[1] * (spans.inner.ndim - 1)))
    return np.where(spans.is_crossed, message_bytes / parts, 0.0)


def level_rate(level: Level, domains: Floats) -> Floats:
    """Bytes per second of one device on a level if this many of its domains communicate with each other."""
    if level.mesh_shares:
        return level.bytes_per_s * np.interp(domains, np.arange(2, level.num_devices + 1), level.mesh_shares)
    if level.is_mesh and level.num_devices > 1:
        return level.bytes_per_s * np.clip((domains - 1) / (level.num_devices - 1), 1 / (level.num_devices - 1), 1.0)
    return np.full(domains.shape, level.bytes_per_s)
