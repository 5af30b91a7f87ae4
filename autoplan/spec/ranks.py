"""Device and work of every rank of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Ints
from autoplan.spec.plan import ParallelPlan
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.placement import node_names


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """Node of a placed plan: rank `first_rank` + i runs on its device i."""

    node: str
    switches: tuple[str, ...]  # one of each tier, innermost first
    site: str
    first_rank: int
    num_ranks: int
    stages: tuple[int, ...]  # of the pipeline
    replicas: tuple[int, ...]  # of the data


def host_order(cluster: ClusterSpec, plan: ParallelPlan) -> tuple[str, ...]:
    """The nodes in the order of the ranks; none where the cluster does not list them."""
    return plan.placement or node_names(cluster)


def coordinates(plan: ParallelPlan) -> dict[str, Ints]:
    """Index of every rank along each of tp, cp, dp and pp: shape (ranks)."""
    axes = [axis for axis in plan.rank_order.split("-") if axis != "ep"]  # experts re-use the ranks of the others
    below = 1
    result = {}
    for axis in axes:
        result[axis] = np.arange(plan.num_devices) // below % getattr(plan, axis)
        below *= getattr(plan, axis)
    return result


def hosts(cluster: ClusterSpec, plan: ParallelPlan) -> tuple[HostRanks, ...]:
    """The nodes in the order of the ranks and what each holds; none where the cluster does not list them."""
    at, size = coordinates(plan), cluster.devices_per_node
    above = {name: group for group in cluster.nodes for name in group.names}
    result = []
    for number, node in enumerate(host_order(cluster, plan)):
        ranks = slice(number * size, (number + 1) * size)
        result.append(
            HostRanks(
                node=node,
                switches=above[node].switches,
                site=above[node].site,
                first_rank=ranks.start,
                num_ranks=size,
                stages=tuple(np.unique(at["pp"][ranks]).tolist()),
                replicas=tuple(np.unique(at["dp"][ranks]).tolist()),
            )
        )
    return tuple(result)
