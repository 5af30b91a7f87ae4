"""How many members of a group share each link domain?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.readers.cluster import load_cluster
from autoplan.topology.cluster import ClusterSpec, LinkLevel, NetworkSpec, SwitchTier, WanSpec
from autoplan.topology.levels import Level, Topology, compile_topology


def topology_of(*sizes: int) -> Topology:
    """Levels of the given sizes, whose rates do not matter here."""
    return Topology(
        levels=tuple(
            Level(name=str(size), num_devices=size, bytes_per_s=1e9, latency_s=1e-6, half_rate_bytes=1.0)
            for size in sizes
        )
    )


def members(topology: Topology, stride: int, size: int) -> list[int]:
    return topology.members(np.array([stride]), np.array([size]))[:, 0].tolist()


def worst_members(domain: int, stride: int, size: int, total: int) -> int:
    """The fewest members that the fullest domain of any sibling group holds, counted rank by rank."""
    fewest = size
    for start in range(total):
        block, offset = divmod(start, stride * size)
        if offset < stride and (block + 1) * stride * size <= total:
            ranks = start + stride * np.arange(size)
            fewest = min(fewest, int(np.bincount(ranks // domain).max()))
    return fewest


def lab(num_nodes: int, **network: Any) -> ClusterSpec:
    base = load_cluster(f"h100-sxm:{num_nodes}x8")
    spec: dict[str, Any] = {"kind": "infiniband", "nic_bytes_per_s": 50e9, "efficiency": 0.8, **network}
    return dataclasses.replace(base, network=NetworkSpec(**spec))


# -- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_group_inside_a_node_has_all_its_members_there(size: int) -> None:
    assert members(topology_of(8, 64), 1, size) == [size, size]


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [(8, 8, [1, 8]), (4, 16, [2, 16]), (1, 64, [8, 64]), (2, 8, [4, 8]), (16, 4, [1, 4]), (1, 16, [8, 16])],
)
def test_a_group_over_nodes_has_as_many_members_a_node_as_its_stride_leaves(
    stride: int, size: int, expected: list[int]
) -> None:
    assert members(topology_of(8, 64), stride, size) == expected


@pytest.mark.parametrize(("stride", "size", "inside"), [(1, 3, 2), (1, 5, 3), (3, 2, 1), (2, 3, 2)])
def test_a_group_whose_span_does_not_divide_the_node_straddles_two(stride: int, size: int, inside: int) -> None:
    assert members(topology_of(8, 120), stride, size) == [inside, size]
    assert worst_members(8, stride, size, 120) == inside


def test_a_straddling_group_is_taken_to_be_cut_in_halves_where_it_is_cut_less_evenly() -> None:
    assert members(topology_of(8, 120), 1, 6) == [3, 6]
    assert worst_members(8, 1, 6, 120) == 4


@given(
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([2, 4, 8, 16, 64]),
)
def test_members_of_aligned_groups_equal_a_count_rank_by_rank(stride: int, size: int, domain: int) -> None:
    total = max(1024, stride * size)
    assert members(topology_of(domain, total), stride, size)[0] == worst_members(domain, stride, size, total)


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([4, 8, 12, 72]))
def test_members_of_contained_groups_are_never_above_the_fullest_domain(stride: int, size: int, domain: int) -> None:
    """Where a group fits in a domain, the estimate is all of it, or half of it where siblings straddle."""
    if stride * size > domain:
        return
    total = stride * size * domain
    here = members(topology_of(domain, total), stride, size)[0]
    assert here == size if domain % (stride * size) == 0 else here == max((size + 1) // 2, 1)
    assert here <= worst_members(domain, stride, size, total)


@given(st.integers(1, 64), st.integers(1, 64), st.lists(st.integers(1, 128), min_size=1, max_size=4, unique=True))
def test_members_grow_outwards_and_never_exceed_the_group(stride: int, size: int, sizes: list[int]) -> None:
    counts = members(topology_of(*sorted(sizes), 10**6), stride, size)
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == size


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 7), st.integers(1, 3))
def test_more_devices_in_a_domain_never_have_fewer_members(stride: int, size: int, domain: int, more: int) -> None:
    """For degrees that are powers of two; others may straddle a larger domain where they divided the smaller one."""
    small = members(topology_of(2**domain, 2**20), 2**stride, 2**size)[0]
    large = members(topology_of(2 ** (domain + more), 2**20), 2**stride, 2**size)[0]
    assert small <= large


def test_members_of_several_groups_are_counted_at_once() -> None:
    counts = topology_of(8, 64).members(np.array([1, 8, 4]), np.array([8, 8, 16]))
    assert counts.tolist() == [[8, 1, 2], [8, 8, 16]]


# -- clusters ---------------------------------------------------------------------------------------------------------


def test_one_node_has_no_network_level() -> None:
    assert [level.name for level in compile_topology(lab(1)).levels] == ["nvlink"]


def test_the_network_joins_all_nodes_at_the_rate_of_a_device() -> None:
    levels = compile_topology(lab(4, nics_per_device=0.5)).levels
    assert [level.num_devices for level in levels] == [8, 32]
    assert levels[1].bytes_per_s == pytest.approx(50e9 * 0.5 * 0.8)


def test_links_run_at_their_sustained_rate() -> None:
    cluster = lab(2)
    link, level = cluster.levels[0], compile_topology(cluster).levels[0]
    assert level.bytes_per_s == link.bandwidth_bytes_per_s * link.efficiency
    assert level.latency_s == link.latency_s


def test_a_group_of_72_devices_never_leaves_an_nvl72_rack() -> None:
    topology = compile_topology(load_cluster("gb200-nvl72:36x4"))
    assert [level.num_devices for level in topology.levels] == [72, 144]
    assert members(topology, 1, 72) == [72, 72]
    assert members(topology, 8, 9) == [9, 9]
    assert members(topology, 72, 2) == [1, 2]
    assert members(topology, 1, 144) == [72, 144]


def test_a_prime_number_of_trays_still_shares_racks() -> None:
    """19 trays of four are 10 and 9 in two racks of 72, not 19 domains of one tray."""
    assert compile_topology(load_cluster("gb200-nvl72:19x4")).levels[0].num_devices >= 36


def test_a_single_rack_needs_no_network() -> None:
    assert [level.num_devices for level in compile_topology(load_cluster("gb200-nvl72:18x4")).levels] == [72]


def test_a_part_of_a_rack_is_one_domain() -> None:
    assert [level.num_devices for level in compile_topology(load_cluster("gb200-nvl72:2x4")).levels] == [8]


def test_a_group_of_16_straddles_racks_of_72() -> None:
    assert members(compile_topology(load_cluster("gb200-nvl72:36x4")), 1, 16) == [8, 16]


def test_a_pair_of_dies_is_a_level_inside_the_node() -> None:
    topology = compile_topology(load_cluster("frontier:4x8"))
    assert [level.num_devices for level in topology.levels] == [2, 8, 32]
    assert topology.levels[0].bytes_per_s > topology.levels[1].bytes_per_s
    assert members(topology, 1, 2) == [2, 2, 2]
    assert members(topology, 1, 8) == [2, 8, 8]
    assert members(topology, 2, 4) == [1, 4, 4]
    assert members(topology, 8, 4) == [1, 1, 4]
    assert members(topology, 1, 32) == [2, 8, 32]


def test_an_oversubscribed_network_is_slower_above_the_leaf() -> None:
    levels = compile_topology(lab(16, tiers=(SwitchTier(num_nodes=4, oversubscription=4.0),))).levels
    assert [level.num_devices for level in levels] == [8, 32, 128]
    assert levels[2].bytes_per_s == pytest.approx(levels[1].bytes_per_s / 4)


def test_oversubscription_multiplies_from_tier_to_tier() -> None:
    tiers = (SwitchTier(num_nodes=4, oversubscription=2.0), SwitchTier(name="pod", num_nodes=16, oversubscription=3.5))
    levels = compile_topology(lab(64, tiers=tiers)).levels
    assert [level.num_devices for level in levels] == [8, 32, 128, 512]
    assert levels[1].bytes_per_s / levels[3].bytes_per_s == pytest.approx(7.0)


def test_devices_of_a_site_share_what_leads_out_of_it() -> None:
    wan = WanSpec(nodes_per_site=2, bandwidth_bytes_per_s=1.25e9, latency_s=15e-3)
    levels = compile_topology(dataclasses.replace(lab(4), wan=wan)).levels
    assert [level.num_devices for level in levels] == [8, 16, 32]
    assert levels[-1].bytes_per_s == pytest.approx(1.25e9 / 16)
    assert levels[-1].latency_s == 15e-3


def test_a_flow_moves_a_window_in_a_round_trip() -> None:
    wan = WanSpec(nodes_per_site=2, bandwidth_bytes_per_s=1e12, latency_s=15e-3, num_flows=2, window_bytes=3e6)
    assert wan.rate_bytes_per_s == pytest.approx(2 * 3e6 / 0.030)


def test_nodes_under_one_leaf_see_no_oversubscription() -> None:
    levels = compile_topology(lab(4, tiers=(SwitchTier(num_nodes=4, oversubscription=4.0),))).levels
    assert levels[0].num_devices == 8
    assert levels[-1].bytes_per_s == pytest.approx(50e9 * 0.8)


def test_a_network_without_oversubscription_has_one_level() -> None:
    assert len(compile_topology(lab(64, tiers=(SwitchTier(num_nodes=4, oversubscription=1.0),))).levels) == 2


def test_a_link_wider_than_the_cluster_joins_what_there_is() -> None:
    link = LinkLevel(name="wide", kind="nvlink", num_devices=64, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    cluster = dataclasses.replace(lab(2), levels=(link,))
    assert [level.num_devices for level in compile_topology(cluster).levels] == [16]
