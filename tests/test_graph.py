"""Is the folded graph that of all parts, and does it say what links can carry?"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.topology.cluster import (
    ClusterSpec,
    Fault,
    HostSpec,
    LinkLevel,
    NetworkSpec,
    NodeGroup,
    SwitchTier,
    WanSpec,
)
from autoplan.topology.components import node_graph
from autoplan.topology.graph import PlaceGroup, bisection_bytes_per_s, classes, min_cut_bytes_per_s, quotient
from autoplan.topology.levels import compile_topology
from benchmarks.expanded import expand


def lab(num_nodes: int, *, devices: int = 8, wan: WanSpec | None = None, **network: Any) -> ClusterSpec:
    spec: dict[str, Any] = {"kind": "infiniband", "nic_bytes_per_s": 50e9, "efficiency": 0.8, **network}
    base = load_cluster(f"h100-sxm:{num_nodes}x{devices}")
    return replace(base, network=NetworkSpec(**spec), wan=wan)


def allocation(*populations: tuple[int, str, str], site: str = "") -> tuple[NodeGroup, ...]:
    """Groups of this many nodes below a leaf and a pod."""
    return tuple(
        NodeGroup(names=tuple(f"{leaf}{pod}-{at}" for at in range(count)), switches=(leaf, pod), site=site)
        for count, leaf, pod in populations
    )


TREE = (SwitchTier(num_nodes=4, oversubscription=2.0), SwitchTier(name="pod", num_nodes=8, oversubscription=4.0))
SITES = WanSpec(nodes_per_site=16, bandwidth_bytes_per_s=12.5e9, latency_s=15e-3)


def full_cut(cluster: ClusterSpec, num_nodes: int) -> float:
    graph = expand(cluster)
    on_device = [at for at, part in graph.nodes(data="component") if part.kind == "device"]
    left = [at for at in on_device if at[0] < num_nodes]
    return min_cut_bytes_per_s(graph, left, [at for at in on_device if at[0] >= num_nodes])


def part_counts(graph: Any) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for _, data in graph.nodes(data=True):
        counts[data["component"].kind, data["component"].name] += data["count"]
    return counts


def link_counts(graph: Any) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for _, _, data in graph.edges(data=True):
        counts[data["link"]] += data["num_links"]
    return counts


PCIE_PAIR = replace(load_cluster("l40s").levels[0], name="pair", num_devices=2)

CLUSTERS = {
    "rails": lab(16),
    "one switch": lab(3, rail_optimised=False),
    "no tiers": lab(4, tiers=()),
    "two tiers": lab(24, tiers=TREE),
    "two tiers without rails": lab(22, tiers=TREE, rail_optimised=False, nics_per_device=0.25),
    "sites": lab(32, tiers=TREE, wan=SITES),
    "more NICs than devices": load_cluster("aws-p5:6x8"),
    "PCIe pairs": replace(load_cluster("l40s:5x8"), levels=(PCIE_PAIR, load_cluster("rtx-4090").levels[0])),
    "racks": load_cluster("gb200-nvl72:20x4"),
    "mesh": load_cluster("mi300x:4x8"),
    "pairs of dies": load_cluster("frontier:6x8"),
    "an odd node": lab(5, devices=6, nics_per_device=0.5),
    "faults": replace(
        lab(16, tiers=TREE),
        faults=(
            Fault(part="nic", node=3, index=2, rate_share=0.5),
            Fault(part="nic", node=9, index=5, rate_share=0.5),
            Fault(part="device", node=6, index=1, rate_share=0.9),
            Fault(part="link", node=8, rate_share=0.25),
            Fault(part="uplink", switch="leaf 3", rate_share=0.75),
        ),
    ),
    "a slow pod": replace(
        lab(24, tiers=TREE, rail_optimised=False),
        faults=(Fault(part="uplink", switch="pod 1", rate_share=0.5),),
    ),
    "a slow link in a mesh": replace(
        load_cluster("mi300x:3x8"), faults=(Fault(part="link", node=1, index=4, rate_share=0.5),)
    ),
    "a slow link into a rack": replace(
        load_cluster("gb200-nvl72:8x4"), faults=(Fault(part="link", node=1, index=2, rate_share=0.5),)
    ),
    "a mesh in a mesh": replace(
        load_cluster("mi300x:3x8"),
        levels=tuple(
            replace(load_cluster("mi300x").levels[0], num_devices=size, bandwidth_bytes_per_s=rate)
            for size, rate in ((2, 200e9), (8, 350e9))
        ),
    ),
    "fragments": replace(
        lab(10, tiers=TREE), nodes=allocation((4, "a", "p"), (2, "b", "p"), (2, "c", "q"), (1, "d", "q"), (1, "e", "r"))
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_classes_hold_as_many_parts_and_links_as_the_full_graph(name: str) -> None:
    folded, full = quotient(CLUSTERS[name]).graph, expand(CLUSTERS[name])
    assert part_counts(folded) == part_counts(full)
    assert link_counts(folded) == link_counts(full)
    assert len(folded) < len(full)


@pytest.mark.parametrize("name", CLUSTERS)
def test_classes_are_those_of_colour_refinement_of_the_full_graph(name: str) -> None:
    """The coarsest partition whose members see the same: nothing is folded too far, nothing alike is held twice."""
    coarsest = Counter(classes(expand(CLUSTERS[name])).values())
    assert sorted(coarsest.values()) == sorted(count for _, count in quotient(CLUSTERS[name]).graph.nodes(data="count"))


@pytest.mark.parametrize(
    ("name", "num_nodes"),
    [
        ("rails", 8),
        ("rails", 3),
        ("one switch", 1),
        ("no tiers", 2),
        ("two tiers", 12),
        ("two tiers", 4),
        ("two tiers", 7),
        ("two tiers without rails", 8),
        ("sites", 16),
        ("sites", 8),
        ("more NICs than devices", 2),
        ("PCIe pairs", 2),
        ("racks", 10),
        ("racks", 4),
        ("mesh", 2),
        ("pairs of dies", 3),
        ("an odd node", 2),
        ("faults", 8),
        ("faults", 6),
        ("a slow pod", 16),
        ("a slow pod", 12),
        ("a slow link in a mesh", 1),
        ("a slow link into a rack", 4),
        ("fragments", 6),
        ("fragments", 5),
    ],
)
def test_a_cut_of_the_classes_is_that_of_all_parts(name: str, num_nodes: int) -> None:
    cluster = CLUSTERS[name]
    assert bisection_bytes_per_s(cluster, num_nodes) == pytest.approx(full_cut(cluster, num_nodes))


@settings(max_examples=15, deadline=None)
@given(
    populations=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from("abc"), st.sampled_from("pq")),
        min_size=2,
        max_size=5,
        unique_by=lambda edge: edge[1:],
    ),
    devices=st.sampled_from([1, 2, 4]),
    leaf=st.sampled_from([1.0, 3.0]),
    pod=st.sampled_from([1.0, 4.0]),
    rails=st.booleans(),
    data=st.data(),
)
def test_cuts_of_any_allocation_agree(
    populations: list[tuple[int, str, str]], devices: int, leaf: float, pod: float, rails: bool, data: st.DataObject
) -> None:
    nodes = allocation(*populations)
    count = sum(len(group.names) for group in nodes)
    tiers = (SwitchTier(num_nodes=4, oversubscription=leaf), SwitchTier(name="pod", num_nodes=16, oversubscription=pod))
    cluster = replace(lab(count, devices=devices, tiers=tiers, rail_optimised=rails), nodes=nodes)
    split = data.draw(st.integers(1, count - 1))
    cut = bisection_bytes_per_s(cluster, split)
    assert cut == pytest.approx(full_cut(cluster, split))
    faster = replace(cluster, network=replace(cluster.network, nic_bytes_per_s=2 * cluster.network.nic_bytes_per_s))
    assert bisection_bytes_per_s(faster, split) >= cut * (1 - 1e-9)
    open_tiers = tuple(replace(tier, oversubscription=1.0) for tier in tiers)
    opened = replace(cluster, network=replace(cluster.network, tiers=open_tiers))
    assert bisection_bytes_per_s(opened, split) >= cut * (1 - 1e-9)


# -- what can be worked out by hand -----------------------------------------------------------------------------------


def test_half_of_a_fat_tree_sends_what_its_nics_send() -> None:
    assert bisection_bytes_per_s(lab(64), 32) == pytest.approx(32 * 8 * 50e9 * 0.8)


def test_oversubscription_divides_what_leaves_a_leaf() -> None:
    cluster = lab(16, tiers=(SwitchTier(num_nodes=4, oversubscription=4.0),))
    assert bisection_bytes_per_s(cluster, 8) == pytest.approx(8 * 8 * 50e9 * 0.8 / 4)


def test_part_of_a_leaf_still_reaches_the_rest_of_it_at_full_rate() -> None:
    """Four of nodes 0 to 5 fill a leaf; the other two send to their two neighbours and over their leaf's uplink."""
    cluster = lab(16, tiers=(SwitchTier(num_nodes=4, oversubscription=4.0),), rail_optimised=False)
    node = 8 * 50e9 * 0.8
    assert bisection_bytes_per_s(cluster, 6) == pytest.approx((1 + 2) * node)


def test_sites_send_what_their_flows_carry() -> None:
    wan = replace(SITES, num_flows=2, window_bytes=3e6)
    assert bisection_bytes_per_s(lab(32, wan=wan), 16) == pytest.approx(2 * 3e6 / 0.030)


def test_a_rack_that_spans_nodes_carries_more_than_the_nics() -> None:
    rack = load_cluster("gb200-nvl72:18x4")
    level = rack.levels[0]
    nvlink = 36 * level.bandwidth_bytes_per_s * level.efficiency
    assert bisection_bytes_per_s(rack, 9) == pytest.approx(nvlink + 36 * 50e9 * rack.network.efficiency)


@pytest.mark.parametrize(
    "name", sorted(set(preset_clusters()) - {"gb200-nvl72", "gb300-nvl72", "vera-rubin-nvl72", "helios"})
)
def test_a_node_sends_what_the_levels_say_that_its_devices_get(name: str) -> None:
    """No link on the way from the devices of a preset to its NICs is slower than these."""
    cluster = replace(load_cluster(name), num_nodes=2)
    expected = cluster.devices_per_node * compile_topology(cluster).levels[-1].bytes_per_s
    assert bisection_bytes_per_s(cluster, 1) == pytest.approx(expected)


def test_a_pcie_switch_narrower_than_its_nics_holds_them_back() -> None:
    """Two devices on a switch send 2 x 50 GB/s through it: the link of each takes 64; gen4 has 32."""
    wide = replace(lab(2), host=HostSpec(num_pcie_switches=4))
    narrow = replace(wide, device=replace(wide.device, host_link_bytes_per_s=32e9))
    assert bisection_bytes_per_s(wide, 1) == pytest.approx(8 * 40e9)
    assert bisection_bytes_per_s(narrow, 1) == pytest.approx(8 * 32e9)


def test_latencies_of_a_path_add_up_to_that_of_its_level() -> None:
    graph, levels = expand(lab(2, rail_optimised=False)), compile_topology(lab(2)).levels
    paths = (
        [(0, "device", 3), (0, "fabric of 8", 0), (0, "device", 5)],
        [(0, "nic", 3), ("leaf", (0,), 0), (1, "nic", 5)],
    )
    for path, level in zip(paths, levels, strict=True):
        assert sum(graph.edges[hop]["link"].latency_s for hop in pairwise(path)) == pytest.approx(level.latency_s)


def test_a_slow_nic_holds_back_its_node_alone() -> None:
    slow = replace(lab(8), faults=(Fault(part="nic", node=3, index=2, rate_share=0.5),))
    assert bisection_bytes_per_s(slow, 4) == pytest.approx((4 * 8 - 0.5) * 50e9 * 0.8)
    assert bisection_bytes_per_s(slow, 2) == bisection_bytes_per_s(lab(8), 2)


def test_slow_uplinks_hold_back_their_leaf_alone() -> None:
    tiers = (SwitchTier(num_nodes=4, oversubscription=2.0),)
    slow = replace(lab(16, tiers=tiers), faults=(Fault(part="uplink", switch="leaf 1", rate_share=0.5),))
    leaf = 4 * 8 * 50e9 * 0.8 / 2
    assert bisection_bytes_per_s(slow, 8) == pytest.approx(1.5 * leaf)
    assert bisection_bytes_per_s(slow, 4) == pytest.approx(leaf)


# -- inside a node ----------------------------------------------------------------------------------------------------


def neighbours(graph: Any, vertex: tuple[str, int], kind: str) -> list[int]:
    return sorted(at for name, at in graph[vertex] if name == kind)


def test_a_dgx_h100_has_a_nic_and_a_pcie_switch_for_every_device() -> None:
    graph = node_graph(load_cluster("h100-sxm:1x8"))
    assert part_counts(graph)["pcie_switch", "PCIe switch"] == 8
    for at in range(8):
        assert neighbours(graph, ("pcie_switch", at), "device") == [at]
        assert neighbours(graph, ("pcie_switch", at), "nic") == [at]
        assert neighbours(graph, ("pcie_switch", at), "socket") == [at // 4]


def test_a_dgx_a100_shares_a_pcie_switch_between_two() -> None:
    graph = node_graph(load_cluster("a100-sxm:1x8"))
    assert [neighbours(graph, ("pcie_switch", at), "device") for at in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [neighbours(graph, ("pcie_switch", at), "nic") for at in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_four_nics_of_a_p5_hang_beside_every_device() -> None:
    graph = node_graph(load_cluster("aws-p5:1x8"))
    assert part_counts(graph)["nic", "NIC"] == 32
    assert neighbours(graph, ("pcie_switch", 1), "nic") == [4, 5, 6, 7]


def test_a_mesh_has_a_link_between_every_two_devices() -> None:
    graph = node_graph(load_cluster("mi300x:1x8"))
    assert neighbours(graph, ("device", 0), "device") == [1, 2, 3, 4, 5, 6, 7]
    assert graph.edges[("device", 0), ("device", 1)]["link"].bytes_per_s == pytest.approx(64e9)


def test_a_part_of_a_nic_is_a_slower_one() -> None:
    cluster = lab(2, devices=2, nics_per_device=0.25, rail_optimised=False)
    assert bisection_bytes_per_s(cluster, 1) == pytest.approx(2 * 0.25 * 50e9 * 0.8)


def test_colours_are_refined_until_equal_vertices_see_equal_ones() -> None:
    path = nx.path_graph(5)
    nx.set_node_attributes(path, "x", "component")
    nx.set_edge_attributes(path, "x", "link")
    found = classes(path)
    assert (found[0], found[1]) == (found[4], found[3])
    assert len({found[0], found[1], found[2]}) == 3
    marked = classes(path, {0: 1})
    assert len(set(marked.values())) == 5


# -- places -----------------------------------------------------------------------------------------------------------


def shape(group: PlaceGroup) -> Any:
    return (group.name, group.count, group.num_nodes, tuple(shape(inner) for inner in group.inside))


def test_places_lie_in_each_other() -> None:
    node = ("node", 4, 1, ())
    pods = (("pod", 3, 8, (("leaf", 2, 4, (node,)),)),)
    assert shape(quotient(lab(24, tiers=TREE)).root) == ("cluster", 1, 24, pods)


def test_leaves_with_different_numbers_of_nodes_are_told_apart() -> None:
    root = quotient(CLUSTERS["fragments"]).root
    populations = [
        [(leaf.num_nodes, leaf.count) for leaf in pod.inside] for pod in root.inside for _ in range(pod.count)
    ]
    assert populations == [[(4, 1), (2, 1)], [(2, 1), (1, 1)], [(1, 1)]]


def test_equal_leaves_of_an_allocation_are_held_once() -> None:
    nodes = allocation(*[(2, f"l{at}", "p") for at in range(6)])
    graph = quotient(replace(lab(12, tiers=TREE), nodes=nodes)).graph
    assert graph.nodes["leaf"]["count"] == 6 * 8
    assert "leaf 2" not in graph


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_names_and_the_order_of_nodes_change_nothing(rng: random.Random) -> None:
    """The expanded graphs are isomorphic, by the nodes' new places, and the folded ones are the same."""
    cluster = CLUSTERS["fragments"]
    pairs = [(name, group.switches) for group in cluster.nodes for name in group.names]
    order = list(range(len(pairs)))
    rng.shuffle(order)
    renamed = {switch: f"s{at}" for at, switch in enumerate(rng.sample("abcdepqr", 8))}
    nodes = tuple(
        NodeGroup(names=(f"n{at}",), switches=tuple(renamed[pair] for pair in pairs[old][1]))
        for at, old in enumerate(order)
    )
    shuffled = replace(cluster, nodes=nodes)
    place = {old: new for new, old in enumerate(order)}

    def moved(vertex: tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(vertex[0], int):
            return (place[vertex[0]], *vertex[1:])
        return (vertex[0], tuple(renamed[node] for node in vertex[1]), vertex[2])

    assert nx.utils.graphs_equal(nx.relabel_nodes(expand(cluster), moved), expand(shuffled))
    assert nx.utils.graphs_equal(quotient(cluster).graph, quotient(shuffled).graph)


def test_the_graph_of_a_hundred_thousand_devices_is_as_small_as_that_of_a_hundred() -> None:
    assert len(quotient(load_cluster("h100-sxm:12500x8")).graph) < 20
    assert len(quotient(lab(12_500, tiers=TREE, wan=SITES)).graph) < 30


def test_a_rack_wide_fabric_counts_its_racks() -> None:
    graph = quotient(load_cluster("gb200-nvl72:64x4")).graph
    assert graph.nodes["nvlink"]["count"] == 4
    assert sum(edge["num_links"] for edge in graph["nvlink"].values()) == 256


@pytest.mark.parametrize("num_nodes", [0, 4])
def test_a_cut_needs_nodes_on_both_sides(num_nodes: int) -> None:
    with pytest.raises(InputError, match="must be at least 1 and not all"):
        bisection_bytes_per_s(lab(4), num_nodes)


def test_a_level_over_pcie_is_the_links_of_the_host() -> None:
    level = LinkLevel(
        name="pcie", kind="pcie", num_devices=8, bandwidth_bytes_per_s=32e9, latency_s=2e-6, efficiency=0.5
    )
    graph = node_graph(replace(lab(1), levels=(level,), host=HostSpec()))
    link = graph.edges[("device", 0), ("socket", 0)]["link"]
    assert (link.bytes_per_s, link.sustained_bytes_per_s) == (32e9, 16e9)
    assert not [at for at in graph if at[0].startswith("fabric")]
