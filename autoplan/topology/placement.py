"""Placement of a job's nodes below switches, and the share of a group's traffic that leaves a switch.

A scheduler allocates free nodes, so a job may have different numbers of nodes below each switch, in any order.  For a
collective what matters is the share of its members' traffic that leaves a switch, over all siblings together, as they
share the uplinks, and at the switch where it is largest.  The inverse of that share is the number of members below each
switch of a regular network with the same traffic; here it need not be a whole number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.base.errors import InputError
from autoplan.topology.cluster import ClusterSpec

Pattern = Literal["ring", "all_to_all", "chain"]


class RankGroup(NamedTuple):
    """Groups of `size` ranks, `stride` apart, in runs of `run` ranks that begin `step` ranks apart."""

    pattern: Pattern
    stride: int
    size: int
    run: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seats:
    """Switch of one tier above every node of a job, with nodes in rank order.

    `load` weights the traffic out of a switch: 1, or for switches with equal uplinks, such as sites, its nodes relative
    to the fullest one.  `job_share` is the job's share of the nodes below a switch; the same share of the other jobs'
    traffic is assumed to leave the switch as of this job's on average [judged].  If nodes fill the switches evenly and
    in order (`is_even`), whole numbers of members are exact; `group_members` caches the effective numbers otherwise.
    """

    switch: Ints  # shape (nodes), numbered from 0
    load: Floats  # shape (switches)
    job_share: Floats  # shape (switches)
    devices_per_node: int
    is_even: bool
    group_members: dict[RankGroup, float] = field(default_factory=dict)

    def members(self, group: RankGroup) -> float:
        """Effective number of members of `group` below one switch; all if none communicates beyond it."""
        if group not in self.group_members:
            leaving = leaving_share(self, self.switch[None], group).max()
            self.group_members[group] = effective_members(group, float(leaving))
        return self.group_members[group]


def effective_members(group: RankGroup, leaving: float) -> float:
    """Members below each switch of a regular network in which this share of a member's traffic leaves it.

    At most half of a ring that leaves a switch is assumed to be below it, as in regular networks: the two parts
    exchange the same traffic, whatever their sizes.
    """
    if leaving <= 0:
        return float(group.size)
    if group.pattern == "all_to_all":
        return group.size * (1 - leaving)
    return min(1 / leaving, float((group.size + 1) // 2))


def leaving_share(seats: Seats, switch: Ints, group: RankGroup) -> Floats:
    """Share of the traffic below each switch that leaves it, over all siblings of `group`.

    `switch` has shape (orders, nodes), one row for every order of the nodes; the result (orders, switches).  In a ring
    or chain a rank sends to the next one, in an all-to-all equally to all.
    """
    ranks, unit = _ranks(group, switch.shape[1], seats.devices_per_node)
    below = switch[:, ranks // unit]  # shape (orders, siblings, size)
    orders, num = len(switch), len(seats.load)
    if group.pattern == "all_to_all":
        siblings = np.arange(orders * len(ranks)).reshape(orders, -1, 1)
        cell, count = np.unique(siblings * num + below, return_counts=True)
        cell = cell // (len(ranks) * num) * num + cell % num
        sent = np.bincount(cell, count, orders * num).reshape(orders, num)
        leaving = np.bincount(cell, count * (1 - count / group.size), orders * num).reshape(orders, num)
    else:
        leaves = below != np.roll(below, -1, axis=2)
        if group.pattern == "chain":
            leaves[:, :, -1] = False
        cell = np.arange(orders)[:, None, None] * num + below
        sent = np.bincount(cell.ravel(), minlength=orders * num).reshape(orders, num)
        leaving = np.bincount(cell[leaves], minlength=orders * num).reshape(orders, num)
    mean = leaving.sum(axis=1, keepdims=True) / np.maximum(sent.sum(axis=1, keepdims=True), 1)
    return seats.load * (seats.job_share * leaving / np.maximum(sent, 1) + (1 - seats.job_share) * mean)


def _ranks(group: RankGroup, num_nodes: int, devices_per_node: int) -> tuple[Ints, int]:
    """Return (ranks of siblings (siblings, size), ranks per node); neighbours on the same nodes count once."""
    _, stride, size, run, step = group
    same = math.gcd(stride, devices_per_node, step if size > run else 0)
    stride, step, unit = stride // same, step // same, devices_per_node // same
    total = num_nodes * unit
    span = step * (size // run) if size > run else stride * size
    inner = stride * run
    first = np.arange(0, total, span)[:, None]
    between = np.arange(0, step if size > run else inner, inner)
    first = (first[:, :, None] + between[:, None] + np.arange(stride)).reshape(-1, 1)
    at = np.arange(size)
    ranks = first + at // run * step + at % run * stride
    return ranks[ranks[:, -1] < total], unit


def spreads(switch: Ints, group: RankGroup, devices_per_node: int) -> Ints:
    """Number of switches that each sibling of `group` spans, for every order of the nodes: shape (orders, siblings).

    Source: He et al. (Arnold), arXiv:2509.15940, the spread of a communication group.
    """
    ranks, unit = _ranks(group, switch.shape[1], devices_per_node)
    below = np.sort(switch[:, ranks // unit], axis=2)
    return 1 + (np.diff(below, axis=2) != 0).sum(axis=2)


# -- what a cluster file says of it -----------------------------------------------------------------------------------


def node_names(cluster: ClusterSpec) -> tuple[str, ...]:
    """Node names in the cluster's order; empty if it lists none."""
    return tuple(name for group in cluster.nodes for name in group.names)


def switches_of_nodes(cluster: ClusterSpec, placement: Sequence[str] | None) -> tuple[Ints, ...]:
    """Return the number of every node's switch in each network tier, and lastly of its site.

    Nodes are in the order of `placement`, or as listed.  Switches with the same name in different pods or sites differ.
    """
    switches_of = {
        name: tuple((group.site, *group.switches[tier:]) for tier in range(len(cluster.network.tiers) + 1))
        for group in cluster.nodes
        for name in group.names
    }
    order = tuple(switches_of) if placement is None else tuple(placement)
    if sorted(order) != sorted(switches_of):
        raise InputError(_misplaced(cluster, order))
    result = []
    for tier in range(len(cluster.network.tiers) + 1):
        # Numbered in the listed order, so that numbers do not depend on the order of nodes.
        number = {switch: at for at, switch in enumerate(dict.fromkeys(above[tier] for above in switches_of.values()))}
        result.append(np.array([number[switches_of[name][tier]] for name in order], dtype=np.int64))
    return tuple(result)


def by_switch(cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the nodes grouped by switch: by site, then from the outermost tier inwards."""
    order = np.lexsort(switches_of_nodes(cluster, None))
    names = node_names(cluster)
    return tuple(names[at] for at in order)


def _misplaced(cluster: ClusterSpec, order: tuple[str, ...]) -> str:
    names = node_names(cluster)
    if not names:
        return f"placement names nodes, cluster {cluster.name!r} lists none: add its [[nodes]] or leave placement out"
    differing = [name for name in order if name not in set(names)] or [name for name in names if name not in set(order)]
    return (
        f"placement must name each of the {len(names)} nodes of cluster {cluster.name!r} once, it names {len(order)}"
        + (f"; see {differing[0]!r}" if differing else "")
    )


def fills_evenly(switch: Ints) -> bool:
    """Return whether all switches have equal numbers of consecutive nodes."""
    starts = np.flatnonzero(np.diff(switch, prepend=-1))
    lengths = np.diff(np.append(starts, len(switch)))
    return len(np.unique(switch)) == len(starts) and bool((lengths == lengths[0]).all())
