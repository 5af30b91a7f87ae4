"""Do the closed forms of traffic equal what flows add up to, link by link, on a cluster with every link of its own?"""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.cluster import ClusterSpec, LinkLevel, NetworkSpec, SwitchTier, WanSpec
from autoplan.read.cluster import load_cluster
from autoplan.topology.levels import compile_topology
from autoplan.topology.traffic import Algorithm, RankGroups, traffic
from flows import ALGORITHMS, Expanded, double_tree, sibling_groups

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
BYTES = 720720.0


def cluster_of(
    nodes: int, inside: tuple[int, ...], tiers: tuple[int, ...] = (), nodes_per_site: int | None = None
) -> ClusterSpec:
    """Nodes whose links join so many devices, innermost first, and oversubscribed switches of so many nodes."""
    base = load_cluster(f"h100-sxm:{nodes}x{inside[-1]}")
    link = {"kind": "pcie", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6}
    wan = WanSpec(nodes_per_site=nodes_per_site, bandwidth_bytes_per_s=1e9, latency_s=1e-2) if nodes_per_site else None
    return dataclasses.replace(
        base,
        levels=tuple(LinkLevel(name=f"of {size}", num_devices=size, **link) for size in inside),
        network=NetworkSpec(
            kind="infiniband",
            nic_bytes_per_s=1e9,
            tiers=tuple(SwitchTier(name=f"of {size}", num_nodes=size, oversubscription=2.0) for size in tiers),
        ),
        wan=wan,
    )


def is_regular(domains: list[int], stride: int, size: int) -> bool:
    """Whether every domain holds equal parts of every group."""
    return all(
        domain % (stride * size) == 0
        or (domain % stride == 0 and size % (domain // stride) == 0)
        or stride % domain == 0
        for domain in domains
    )


def check(cluster: ClusterSpec, algorithm: Algorithm, groups: RankGroups) -> None:
    """Compare the busiest links of every level."""
    topology = compile_topology(cluster)
    found = traffic(topology, groups, algorithm, np.array([BYTES]))
    expanded = Expanded(cluster)
    shape = [int(part[0]) for part in (groups.stride, groups.size, groups.repeat_stride, groups.repeats)]
    siblings = sibling_groups(cluster.num_devices, *shape)
    for group in siblings:
        ALGORITHMS[algorithm](expanded, group, BYTES, 2.0)
    below = [1, *(level.num_devices for level in topology.levels)]
    for at in range(len(topology.levels)):
        is_shared = at in topology.network[1:]
        closed = (found.domain_bytes if is_shared else found.device_bytes)[at, 0]
        assert expanded.busiest(at) == pytest.approx(closed, rel=1e-9, abs=1e-6), (algorithm, at, shape)
        in_domain = [group for group in siblings if min(group) < below[at]]
        assert found.num_siblings[at, 0] == len(in_domain)


# -- against flows ----------------------------------------------------------------------------------------------------

shapes = st.sampled_from([(2,), (4,), (6,), (8,), (2, 4), (2, 8), (4, 8), (2, 4, 8), (3, 6)])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES),
    shapes,
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([(), (2,), (3,), (4,), (2, 4)]),
    st.sampled_from([None, 2, 4]),
    st.data(),
)
def test_busiest_links_carry_what_flows_add_up_to(
    algorithm: Algorithm,
    inside: tuple[int, ...],
    nodes: int,
    tiers: tuple[int, ...],
    nodes_per_site: int | None,
    data: st.DataObject,
) -> None:
    """For the groups of every axis under tp-cp-ep-dp-pp, and for context x data parallel ones under tp-cp-ep-pp-dp."""
    assume(all(nodes % size == 0 for size in tiers) and (nodes_per_site is None or nodes % nodes_per_site == 0))
    assume(not (nodes_per_site and tiers and nodes_per_site % tiers[-1]))
    cluster = cluster_of(nodes, inside, tiers, nodes_per_site)
    total = cluster.num_devices
    degrees = []
    for _ in range(3):
        left = total // int(np.prod(degrees, dtype=int))
        degrees.append(data.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
    tp, cp, dp = degrees
    pp = total // (tp * cp * dp)
    kinds = [(1, tp), (tp, cp), (tp, cp * dp), (tp * cp, dp), (tp * cp * dp, pp), (tp, cp, tp * cp * pp, dp)]
    kind = data.draw(st.sampled_from([kind for kind in kinds if np.prod(kind[1::2]) > 1] or [(1, total)]))
    domains = [level.num_devices for level in compile_topology(cluster).levels]
    assume(is_regular(domains, *kind[:2]) and is_regular(domains, *(kind[2:] or (1, 1))))
    assume(kind[1] * (kind[3] if len(kind) > 2 else 1) > 1)
    check(cluster, algorithm, RankGroups.of(*kind))


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize(("stride", "size"), [(1, 32), (2, 16), (4, 8), (8, 4), (16, 2), (1, 8), (1, 4), (2, 2)])
def test_eight_nodes_under_leaves_and_pods_carry_what_flows_add_up_to(
    algorithm: Algorithm, stride: int, size: int
) -> None:
    check(cluster_of(8, (2, 4), (2, 4)), algorithm, RankGroups.of(stride, size))


@pytest.mark.parametrize("algorithm", NAMES)
def test_groups_of_two_parts_carry_what_flows_add_up_to(algorithm: Algorithm) -> None:
    """Context 2 x data 4 under tp-cp-ep-pp-dp, with tp 2 and pp 4."""
    check(cluster_of(8, (8,), (2,)), algorithm, RankGroups.of(2, 2, 16, 4))


@pytest.mark.parametrize("nodes", range(2, 20))
def test_both_trees_have_every_node_and_no_node_branches_in_both(nodes: int) -> None:
    edges = double_tree(nodes)
    for half in (edges[: nodes - 1], edges[nodes - 1 :]):
        assert len({child for child, _ in half}) == nodes - 1
    if nodes % 2 == 0:
        parents = [{parent for _, parent in half} for half in (edges[: nodes - 1], edges[nodes - 1 :])]
        assert not parents[0] & parents[1]
