"""Placement of a job's nodes below switches, and the share of a group's traffic that leaves them.

A scheduler hands out what is free, so that switches hold unequal numbers of a job's nodes, in any order.  A collective
sees this as the share of what its members send that leaves a switch: of all siblings together, as they share the links
that lead out of it, and at the switch where it is largest.  One over that share is how many members a switch of a
regular network would have to hold for the same traffic, a whole number there and any number here.
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
    """Groups of `size` ranks, `stride` apart; after each `run` of them the next begins `step` further on."""

    pattern: Pattern
    stride: int
    size: int
    run: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seats:
    """Switch of one tier above every node of a job, nodes in the order of their ranks.

    `load` weighs what leaves a switch: 1, or where all switches have equal links, such as sites, its share of the nodes
    of the fullest.  `job_share` is the part of the nodes below a switch that the job has: of the others' traffic
    as large a share is taken to leave the switch as of the job's on average [judged].  Where nodes fill the switches
    evenly and in order, which `is_even` says, whole numbers of members tell it all; `group_members` holds the effective
    ones of the groups that were asked for elsewhere.
    """

    switch: Ints  # shape (nodes), numbered from 0
    load: Floats  # shape (switches)
    job_share: Floats  # shape (switches)
    devices_per_node: int
    is_even: bool
    group_members: dict[RankGroup, float] = field(default_factory=dict)

    def members(self, group: RankGroup) -> float:
        """Effective number of members of `group` below one switch; all of them where none talks beyond it."""
        if group not in self.group_members:
            leaving = leaving_share(self, self.switch[None], group).max()
            self.group_members[group] = effective_members(group, float(leaving))
        return self.group_members[group]


def effective_members(group: RankGroup, leaving: float) -> float:
    """Members below a switch of a regular network where this share of a member's traffic leaves it.

    Of a ring that leaves a switch no more than half is taken to be below it, as in regular networks: the two parts have
    as much to tell each other whatever their sizes are.
    """
    if leaving <= 0:
        return float(group.size)
    if group.pattern == "all_to_all":
        return group.size * (1 - leaving)
    return min(1 / leaving, float((group.size + 1) // 2))


def leaving_share(seats: Seats, switch: Ints, group: RankGroup) -> Floats:
    """Share of the traffic below each switch that leaves it, of all siblings of `group` together.

    `switch` has shape (orders, nodes), one row for every order of the nodes; the result (orders, switches).  In a ring
    or chain a rank sends to the next one, in an all-to-all as much to each.
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
    """(ranks of siblings (siblings, size), how many make a node); neighbours on the same nodes count once."""
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
    """The nodes as the cluster lists them; none where it does not."""
    return tuple(name for group in cluster.nodes for name in group.names)


def switches_of_nodes(cluster: ClusterSpec, placement: Sequence[str] | None) -> tuple[Ints, ...]:
    """Number of every node's switch in each tier of the network, and last of its site.

    Nodes stand in the order of `placement`, or as listed.  Switches of one name in different pods or sites differ.
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
        # Numbered as listed, so that another order of the nodes has the same numbers.
        number = {switch: at for at, switch in enumerate(dict.fromkeys(above[tier] for above in switches_of.values()))}
        result.append(np.array([number[switches_of[name][tier]] for name in order], dtype=np.int64))
    return tuple(result)


def by_switch(cluster: ClusterSpec) -> tuple[str, ...]:
    """The nodes with those below the same switches together: by site, then from the outermost tier inwards."""
    order = np.lexsort(switches_of_nodes(cluster, None))
    names = node_names(cluster)
    return tuple(names[at] for at in order)


def _misplaced(cluster: ClusterSpec, order: tuple[str, ...]) -> str:
    names = node_names(cluster)
    if not names:
        return f"placement names nodes, cluster {cluster.name!r} lists none: add its [[nodes]] or leave placement out"
    strange = [name for name in order if name not in set(names)] or [name for name in names if name not in set(order)]
    return (
        f"placement must name each of the {len(names)} nodes of cluster {cluster.name!r} once, it names {len(order)}"
        + (f"; see {strange[0]!r}" if strange else "")
    )


def fills_evenly(switch: Ints) -> bool:
    """Return whether all switches hold as many nodes, each of them in a row."""
    starts = np.flatnonzero(np.diff(switch, prepend=-1))
    lengths = np.diff(np.append(starts, len(switch)))
    return len(np.unique(switch)) == len(starts) and bool((lengths == lengths[0]).all())
