"""Do the closed forms of traffic equal what flows add up to, link by link, on a cluster with every link of its own?"""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.cost.network.algorithms import ProcessGroup, collective_s
from autoplan.readers.cluster import load_cluster
from autoplan.topology.cluster import ClusterSpec, LinkLevel, NetworkSpec, SwitchTier, WanSpec
from autoplan.topology.levels import compile_topology
from flows import ALGORITHMS, Algorithm, Expanded, RankGroups, sibling_groups, traffic

NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
BYTES = 720720.0


def cluster_of(
    nodes: int, inside: tuple[int, ...], tiers: tuple[int, ...] = (), nodes_per_site: int | None = None
) -> ClusterSpec:
    """Nodes whose links join so many devices, innermost first, and oversubscribed switches of this many nodes."""
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
    """Return whether every domain holds equal parts of every group."""
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
        is_shared = at in topology.tiers
        closed = (found.domain_bytes if is_shared else found.device_bytes)[at, 0]
        assert expanded.busiest(at) == pytest.approx(closed, rel=1e-9, abs=1e-6), (algorithm, at, shape)
        in_domain = [group for group in siblings if min(group) < below[at]]
        assert found.num_siblings[at, 0] == len(in_domain)


# -- against flows ----------------------------------------------------------------------------------------------------

shapes = st.sampled_from([(2,), (4,), (6,), (8,), (2, 4), (2, 8), (4, 8), (2, 4, 8), (3, 6)])


@settings(max_examples=40, deadline=None)
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


# -- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_is_where_its_rows_are() -> None:
    """Eight nodes of eight: context 2 beside data 4, with tp 2 first and the four stages between."""
    topology = compile_topology(cluster_of(8, (8,), (2,)))
    assert RankGroups.of(2, 2, 16, 4).members(topology)[:, 0].tolist() == [2, 2, 8]
    assert RankGroups.of(2, 2, 4, 4).members(topology)[:, 0].tolist() == [4, 8, 8]


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_rows_that_follow_one_another_are_one_row(stride: int, size: int, repeats: int) -> None:
    topology = compile_topology(cluster_of(64, (8,), (2, 4)))
    rows = RankGroups.of(2**stride, 2**size, 2 ** (stride + size), 2**repeats)
    assert (rows.members(topology) == RankGroups.of(2**stride, 2 ** (size + repeats)).members(topology)).all()


# -- laws -------------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from([(1, 16), (2, 8), (4, 8), (8, 2), (1, 4)]), st.permutations(range(8)))
def test_it_does_not_matter_which_of_equal_nodes_is_which(
    algorithm: Algorithm, kind: tuple[int, int], order: list[int]
) -> None:
    """Below one switch: every rank moves with its node, the links carry what they did before."""
    groups = sibling_groups(32, *kind)
    moved = [tuple(sorted(4 * order[rank // 4] + rank % 4 for rank in group)) for group in groups]
    loads = []
    for variant in (groups, moved):
        expanded = Expanded(cluster_of(8, (4,)))
        for group in variant:
            ALGORITHMS[algorithm](expanded, group, BYTES, 2.0)
        loads.append([expanded.busiest(level) for level in (0, 1)])
    assert loads[0] == pytest.approx(loads[1])


def test_a_collective_goes_over_every_link_of_a_domain_as_often_as_it_has_groups() -> None:
    """Eight groups of one device a node share the eight NICs of a node and the links out of its leaf."""
    topology = compile_topology(cluster_of(8, (8,), (2,)))
    found = traffic(topology, RankGroups.of(8, 8), "hierarchical", np.array([BYTES]))
    assert found.num_siblings[:, 0].tolist() == [1, 8, 8]
    assert found.domain_bytes[:, 0] == pytest.approx([0, 8 * 1.75 * BYTES, 8 * 1.75 * BYTES])


# -- 20B parameters on 48 nodes of Frontier, sharded in three ways (arXiv:2501.04266) ----------------------------------

# Members that share the weights in the forward and in the backward pass, and how much of 16 bits weights and gradients
# have on the wire (ZeRO++ sends 8 and 4 bits, arXiv:2306.10209).  Gradients are always reduced over all.
SHARDED = {
    "zero3": ((384, 384), (1.0, 1.0)),
    "zero++": ((384, 8), (0.5, 0.25)),
    "three levels": ((2, 2), (0.5, 0.25)),
}


def test_weights_that_stay_near_leave_the_network_to_gradients() -> None:
    """Bytes out of a node in units of all weights: 3, 2 and 1, of which 47 / 48 are not its own."""
    topology = compile_topology(load_cluster("frontier:48x8"))
    weights = np.array([2.0 * 20e9])
    out = {}
    for name, (gathers, _) in SHARDED.items():
        groups = [RankGroups.of(1, size) for size in (*gathers, 384)]
        moved = [traffic(topology, group, "hierarchical", weights, volume=1.0) for group in groups]
        out[name] = sum(flow.domain_bytes[topology.network[0], 0] for flow in moved) / weights[0]
    assert out == pytest.approx({"zero3": 3 * 47 / 48, "zero++": 2 * 47 / 48, "three levels": 47 / 48})


def test_sharding_near_by_is_faster_where_a_step_waits_for_its_traffic() -> None:
    """Each way saves at least the published 1.2 and 1.3 times; weights take 1 / 384, 1 / 8 and 1 / 2 of 40 GB."""
    cluster = load_cluster("frontier:48x8")
    topology = compile_topology(cluster)
    single, weights = np.array([1]), np.array([2.0 * 20e9])
    times, memory = [], []
    for gathers, (of_weights, of_gradients) in SHARDED.values():
        parts = [*((size, of_weights) for size in gathers), (384, of_gradients)]
        times.append(
            sum(
                float(collective_s(topology, "all_gather", ProcessGroup(single, size * single), share * weights)[0])
                for size, share in parts
            )
        )
        memory.append(float(weights[0]) / gathers[1])
    assert times[0] / times[1] >= 1.2
    assert times[1] / times[2] >= 1.3
    assert memory == pytest.approx([40e9 / 384, 40e9 / 8, 40e9 / 2])
    assert memory[-1] < cluster.device.visible_memory_bytes
