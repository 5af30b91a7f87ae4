"""Do collectives take the time of their volume over the links that their group crosses?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.network.algorithms import ProcessGroup, collective_s
from autoplan.readers.cluster import load_cluster
from autoplan.spec.operations import Operation
from autoplan.topology.cluster import ClusterSpec, LinkLevel, NetworkSpec, SwitchTier, WanSpec
from autoplan.topology.levels import Level, Topology, compile_topology

COLLECTIVES: tuple[Operation, ...] = ("all_reduce", "all_gather", "all_to_all", "send_recv")
GIB = 2**30


def level(num_devices: int, bytes_per_s: float, latency_s: float = 1e-12, half_rate_bytes: float = 1e-3) -> Level:
    """A level; unless given, its latency and ramp are too small to see."""
    return Level(
        name=str(num_devices),
        num_devices=num_devices,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        half_rate_bytes=half_rate_bytes,
    )


def seconds(
    operation: Operation, topology: Topology, stride: int, size: int, num_bytes: float, copies: int = 1
) -> float:
    group = ProcessGroup(np.array([stride]), np.array([size]))
    return float(collective_s(topology, operation, group, np.array([float(num_bytes)]), copies)[0])


def ideal(num_nodes: int, link_bytes_per_s: float, nic_bytes_per_s: float) -> ClusterSpec:
    """Nodes of eight whose links run at the given rates without latency or ramp."""
    return dataclasses.replace(
        load_cluster(f"h100-sxm:{num_nodes}x8"),
        levels=(
            LinkLevel(
                name="link",
                kind="nvlink",
                num_devices=8,
                bandwidth_bytes_per_s=link_bytes_per_s,
                latency_s=1e-12,
                efficiency=1.0,
                half_rate_bytes=1e-3,
            ),
        ),
        network=NetworkSpec(
            kind="infiniband", nic_bytes_per_s=nic_bytes_per_s, efficiency=1.0, latency_s=1e-12, half_rate_bytes=1e-3
        ),
    )


# -- one level --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8, 72])
def test_collectives_on_one_level_move_their_share_of_the_buffer(size: int) -> None:
    topology = Topology(levels=(level(size, 360e9),))
    share = (size - 1) / size * GIB / 360e9
    assert seconds("all_reduce", topology, 1, size, GIB) == pytest.approx(2 * share, rel=1e-6)
    assert seconds("all_gather", topology, 1, size, GIB) == pytest.approx(share, rel=1e-6)
    assert seconds("all_to_all", topology, 1, size, GIB) == pytest.approx(share, rel=1e-6)
    assert seconds("send_recv", topology, 1, size, GIB) == pytest.approx(GIB / 360e9, rel=1e-6)


def test_latency_is_paid_once_a_hop_of_the_ring() -> None:
    """2 x 7 x (4 us + 1 GiB / (8 x 360e9)) = 5.27558 ms, nccl-tests doc/PERFORMANCE.md."""
    topology = Topology(levels=(level(8, 360e9, latency_s=4e-6),))
    assert seconds("all_reduce", topology, 1, 8, GIB) == pytest.approx(5.27557831e-3, rel=1e-6)
    assert seconds("all_gather", topology, 1, 8, 1) == pytest.approx(7 * 4e-6, rel=1e-5)
    assert seconds("all_reduce", topology, 1, 8, 1) == pytest.approx(14 * 4e-6, rel=1e-5)


@pytest.mark.parametrize("size", [2, 8, 32])
def test_the_rate_is_half_of_the_plateau_where_the_part_of_a_device_has_the_half_rate_size(size: int) -> None:
    half = 2.0**20
    topology = Topology(levels=(level(size, 365e9, latency_s=1e-6, half_rate_bytes=half),))
    time = seconds("all_reduce", topology, 1, size, half * size)
    assert 2 * (size - 1) / size * (half * size) / time == pytest.approx(365e9 / 2, rel=1e-6)


def test_the_ramp_of_a_large_buffer_stays_a_constant() -> None:
    slow, bare = (Topology(levels=(level(8, 365e9, 1e-6, size),)) for size in (2.0**20, 1e-3))
    added = [
        seconds("all_reduce", slow, 1, 8, size) - seconds("all_reduce", bare, 1, 8, size) for size in (2**34, 2**38)
    ]
    assert added[0] > 0
    assert added[0] == pytest.approx(added[1], rel=1e-2)


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_group_of_one_costs_nothing(operation: Operation) -> None:
    topology = compile_topology(load_cluster("h100-sxm:4x8"))
    for stride in (1, 8, 32):
        assert seconds(operation, topology, stride, 1, GIB) == 0.0


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all"])
def test_an_empty_buffer_costs_nothing(operation: Operation) -> None:
    assert seconds(operation, compile_topology(load_cluster("h100-sxm:4x8")), 1, 32, 0) == 0.0


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("num_bytes", [1e4, 1e7, 1e9])
def test_a_measured_all_reduce_saves_one_start_over_its_two_halves(size: int, num_bytes: float) -> None:
    topology = compile_topology(load_cluster("b200:1x8"))
    curve = topology.levels[0].collectives
    assert curve is not None
    saved = curve.overhead_s(np.array(0.0), np.array(num_bytes))
    halves = 2 * seconds("all_gather", topology, 1, size, num_bytes)
    assert seconds("all_reduce", topology, 1, size, num_bytes) == pytest.approx(halves - saved, rel=1e-9)


# Busbw of nccl-tests on 8 H100 (NCCL 2.27-2.29, medians of aiconfigurator-core 0.12): seconds of 64 MiB and 512 MiB.
@pytest.mark.parametrize(
    ("operation", "num_bytes", "measured_s"),
    [
        ("all_reduce", 2**26, 324e-6),
        ("all_gather", 2**26, 209e-6),
        ("all_gather", 2**29, 1401e-6),
        ("all_gather", 2**20, 17e-6),
    ],
)
def test_collectives_on_eight_h100_take_what_nccl_tests_measured(
    operation: Operation, num_bytes: int, measured_s: float
) -> None:
    topology = compile_topology(load_cluster("h100-sxm:1x8"))
    assert seconds(operation, topology, 1, 8, num_bytes) == pytest.approx(measured_s, rel=0.2)


@given(st.integers(0, 5), st.integers(1, 5), st.floats(1e9, 1e12))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(stride: int, size: int, num_bytes: float) -> None:
    topology = compile_topology(load_cluster("a100-pcie:16x8"))
    once = seconds("all_gather", topology, 2**stride, 2**size, num_bytes)
    assert seconds("all_reduce", topology, 2**stride, 2**size, num_bytes) == pytest.approx(2 * once, rel=1e-9)


# -- laws -------------------------------------------------------------------------------------------------------------

clusters = st.sampled_from(["h100-sxm:16x8", "gb200-nvl72:36x4", "frontier:16x8", "aws-p4d:16x8", "l40s:16x8"])
groups = st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.integers(2, 16)).filter(lambda pair: pair[0] * pair[1] <= 128)
buffers = st.floats(1.0, 1e12)


@settings(max_examples=60)
@given(st.sampled_from(COLLECTIVES), clusters, groups, buffers, st.floats(1.0, 100.0), st.integers(0, 2))
def test_more_bandwidth_is_never_slower(
    operation: Operation, cluster: str, group: tuple[int, int], num_bytes: float, factor: float, which: int
) -> None:
    topology = compile_topology(load_cluster(cluster))
    levels = list(topology.levels)
    at = which % len(levels)
    levels[at] = dataclasses.replace(levels[at], bytes_per_s=levels[at].bytes_per_s * factor)
    faster = seconds(operation, Topology(levels=tuple(levels)), *group, num_bytes)
    assert faster <= seconds(operation, topology, *group, num_bytes) * (1 + 1e-12)


@pytest.mark.parametrize("operation", COLLECTIVES)
@pytest.mark.parametrize(("half", "most"), [("latency_s", 1.0), ("bytes_per_s", 2.0)])
def test_less_latency_is_never_slower_and_half_of_the_bandwidth_at_most_doubles_the_time(
    operation: Operation, half: str, most: float
) -> None:
    topology = compile_topology(load_cluster("h100-sxm:16x8"))
    levels = (dataclasses.replace(here, **{half: getattr(here, half) / 2}) for here in topology.levels)
    other = Topology(levels=tuple(levels))
    for num_bytes in 2.0 ** np.arange(8, 36, 2):
        for stride, size in ((1, 8), (8, 2), (8, 16), (1, 128)):
            time = seconds(operation, topology, stride, size, num_bytes)
            assert seconds(operation, other, stride, size, num_bytes) <= most * time * (1 + 1e-12)


@settings(max_examples=60)
@given(st.sampled_from(COLLECTIVES), clusters, groups, buffers, st.floats(1.0, 1000.0))
def test_a_larger_buffer_never_takes_less_time(
    operation: Operation, cluster: str, group: tuple[int, int], num_bytes: float, factor: float
) -> None:
    topology = compile_topology(load_cluster(cluster))
    small = seconds(operation, topology, *group, num_bytes)
    assert seconds(operation, topology, *group, num_bytes * factor) >= small * (1 - 1e-12)


@settings(max_examples=60)
@given(
    st.sampled_from(COLLECTIVES),
    st.sampled_from(["h100-sxm:16x8", "frontier:16x8", "aws-p4d:16x8"]),
    st.integers(0, 4),
    st.integers(1, 6),
    buffers,
)
def test_a_larger_group_never_takes_less_time(
    operation: Operation, cluster: str, stride: int, size: int, num_bytes: float
) -> None:
    """Doubling a group at the same stride and full buffer; powers of two in nodes of eight, so that none straddles."""
    if 2 ** (stride + size) > 128:
        return
    topology = compile_topology(load_cluster(cluster))
    small = seconds(operation, topology, 2**stride, 2 ** (size - 1), num_bytes)
    assert seconds(operation, topology, 2**stride, 2**size, num_bytes) >= small * (1 - 1e-12)


@settings(max_examples=40)
@given(st.lists(st.tuples(groups, buffers), min_size=1, max_size=6), st.sampled_from(COLLECTIVES))
def test_many_groups_at_once_cost_what_each_costs_alone(
    several: list[tuple[tuple[int, int], float]], operation: Operation
) -> None:
    topology = compile_topology(load_cluster("frontier:16x8"))
    stride, size = (np.array([group[at] for group, _ in several]) for at in (0, 1))
    buffers = np.array([num_bytes for _, num_bytes in several])
    together = collective_s(topology, operation, ProcessGroup(stride, size), buffers)
    alone = [seconds(operation, topology, *group, num_bytes) for group, num_bytes in several]
    assert together.tolist() == alone


# -- hierarchy --------------------------------------------------------------------------------------------------------


def test_a_group_with_one_member_a_node_sees_one_nic() -> None:
    """Gradients of Llama-3-8B under tp 8, fp32, reduce-scattered over 16 nodes at 48e9 B/s: 78.4 ms."""
    topology = compile_topology(ideal(16, 450e9, 48e9))
    time = seconds("all_gather", topology, 8, 16, 4 * 8.03e9 / 8)
    assert time == pytest.approx(78.418e-3, rel=1e-4)


@pytest.mark.parametrize(("stride", "size", "nics"), [(1, 32, 8), (2, 16, 4)])
def test_a_group_uses_the_nics_of_its_part_of_a_node(stride: int, size: int, nics: int) -> None:
    """Twice 3/4 of the 1 GiB per rank leaves each node over them."""
    topology = compile_topology(ideal(4, 1e30, 50e9))
    assert seconds("all_reduce", topology, stride, size, GIB) == pytest.approx(
        2 * 3 / 4 * GIB / (nics * 50e9), rel=1e-6
    )


def test_nic_time_of_a_step_does_not_depend_on_how_tensor_parallelism_cuts_the_gradients() -> None:
    topology = compile_topology(ideal(16, 1e30, 48e9))
    times = [seconds("all_gather", topology, tp, 128 // tp, 32e9 / tp) for tp in (1, 2, 4, 8)]
    assert times == pytest.approx([times[0]] * 4, rel=1e-6)


def test_an_all_to_all_sends_what_leaves_the_node_over_the_rank_own_nic() -> None:
    topology = compile_topology(ideal(4, 1e30, 50e9))
    assert seconds("all_to_all", topology, 1, 32, GIB) == pytest.approx(24 / 32 * GIB / 50e9, rel=1e-6)


def test_a_message_is_paid_at_the_slowest_hop_of_its_chain() -> None:
    topology = compile_topology(ideal(4, 450e9, 50e9))
    assert seconds("send_recv", topology, 8, 4, GIB) == pytest.approx(GIB / 50e9, rel=1e-6)
    assert seconds("send_recv", topology, 2, 4, GIB) == pytest.approx(GIB / 450e9, rel=1e-6)
    assert seconds("send_recv", topology, 4, 8, GIB) == pytest.approx(GIB / 50e9, rel=1e-6)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_staying_inside_the_node_is_never_slower_than_leaving_it(operation: Operation) -> None:
    topology = compile_topology(load_cluster("h100-sxm:16x8"))
    for num_bytes in (1e3, 1e6, 1e9):
        assert seconds(operation, topology, 1, 8, num_bytes) <= seconds(operation, topology, 8, 8, num_bytes)


# -- published measurements -------------------------------------------------------------------------------------------


def test_all_reduce_of_4_gib_on_32_b200_with_efa_takes_the_22_05_ms_measured() -> None:
    """P6-B200, 4 x 8 devices, 8 x 400 Gb/s a node: 10.15 ms inside one node, 22.05 ms over four (stas00)."""
    node_rate = 2 * 7 / 8 * 4 * GIB / 10.15e-3
    topology = compile_topology(ideal(4, node_rate, 50e9))
    assert seconds("all_reduce", topology, 1, 8, 4 * GIB) == pytest.approx(10.15e-3, rel=1e-3)
    assert seconds("all_reduce", topology, 1, 32, 4 * GIB) == pytest.approx(22.05e-3, rel=0.03)


@pytest.mark.parametrize(
    ("nodes", "mebibytes", "measured_s"),
    [
        (2, 64, 1.01e-3),
        (2, 512, 6.64e-3),
        (4, 64, 1.51e-3),
        (4, 512, 9.66e-3),
        (16, 512, 13.29e-3),
        (16, 2048, 48.2e-3),
    ],
)
def test_all_to_all_of_p5_over_efa_takes_what_nccl_tests_measured(
    nodes: int, mebibytes: int, measured_s: float
) -> None:
    """Tables of 2 to 32 p5.48xlarge (crazyguitar/aws-gpu-communication-benchmark, data/nccl_alltoall.csv)."""
    topology = compile_topology(load_cluster(f"aws-p5:{nodes}x8"))
    taken_s = seconds("all_to_all", topology, 1, 8 * nodes, mebibytes * 2**20)
    assert taken_s == pytest.approx(measured_s, rel=0.12)


@pytest.mark.parametrize(
    ("num_bytes", "bus_gb_per_s", "tolerance"), [(8 * 2**20, 186, 0.25), (64 * 2**20, 330, 0.2), (2**29, 365, 0.1)]
)
def test_all_reduce_on_eight_h100_follows_the_measured_ring_table(
    num_bytes: int, bus_gb_per_s: float, tolerance: float
) -> None:
    """nccl-tests with NVLS off reaches 365e9; aiconfigurator measures 186e9 at 8 MiB (ring) on H100 SXM."""
    time = seconds("all_reduce", compile_topology(load_cluster("h100-sxm:1x8")), 1, 8, num_bytes)
    assert 2 * 7 / 8 * num_bytes / time == pytest.approx(bus_gb_per_s * 1e9, rel=tolerance)


def test_small_all_reduce_on_eight_h100_takes_about_its_measured_latency() -> None:
    """512 bytes: 15.6 us (aiconfigurator, NCCL 2.27)."""
    time = seconds("all_reduce", compile_topology(load_cluster("h100-sxm:1x8")), 1, 8, 512)
    assert time == pytest.approx(15.6e-6, rel=0.1)


def test_a_pair_of_mi300x_has_one_link_of_its_mesh() -> None:
    """Eight devices reach 313 GB/s in a large all-reduce, two of them 47.7 (`modelling` D3)."""
    topology = compile_topology(load_cluster("mi300x:1x8"))
    size = 16.0 * GIB
    for members, measured in ((8, 313e9), (2, 47.7e9)):
        bus = 2 * (members - 1) / members * size / seconds("all_reduce", topology, 1, members, size)
        assert bus == pytest.approx(measured, rel=0.08)


def test_a_mesh_that_loses_devices_loses_their_links() -> None:
    (whole,), (half,) = (load_cluster(f"mi300x:1x{size}").levels for size in (8, 4))
    assert half.bandwidth_bytes_per_s == pytest.approx(3 / 7 * whole.bandwidth_bytes_per_s)


@pytest.mark.parametrize(("size", "share"), [(2, 1 / 6), (4, 4 / 6), (8, 1.0)])
def test_groups_on_a_cube_mesh_have_the_links_among_them(size: int, share: float) -> None:
    cluster = load_cluster("v100-dgx1:1x8")
    rate = share * 6 * 25e9 * cluster.levels[0].efficiency
    whole = seconds("all_gather", compile_topology(cluster), 1, size, GIB)
    assert whole == pytest.approx((size - 1) / size * GIB / rate, rel=0.02)
    part = seconds("all_gather", compile_topology(load_cluster(f"v100-dgx1:1x{size}")), 1, size, GIB)
    assert part == pytest.approx(whole, rel=0.01)


def test_rings_send_what_a_slow_nic_carries_of_every_member() -> None:
    """Two nodes of eight over one adapter of 12.5 GB/s each: 2 x 15/16 of the buffer cross it, not half as much."""
    nodes = ideal(2, 150e9, 12.5e9)
    nodes = dataclasses.replace(nodes, network=dataclasses.replace(nodes.network, nics_per_device=0.125))
    ring = 2 * 15 / 16 * GIB / 12.5e9
    assert seconds("all_reduce", compile_topology(nodes), 1, 16, GIB) == pytest.approx(ring, rel=1e-6)
    # With a NIC for every device the links inside take longer.
    fast = compile_topology(ideal(2, 150e9, 50e9))
    assert seconds("all_reduce", fast, 1, 16, GIB) > 2 * 15 / 16 * GIB / 8 / 50e9


@pytest.mark.parametrize(("stride", "senders"), [(8, 8), (4, 4), (2, 2), (1, 1)])
def test_a_nic_that_devices_share_is_for_those_that_send(stride: int, senders: int) -> None:
    """In a pipeline over two nodes the last stage of the first node sends, with as many devices as a stage has."""
    nodes = ideal(2, 150e9, 12.5e9)
    shared = dataclasses.replace(nodes, network=dataclasses.replace(nodes.network, nics_per_device=0.125))
    message = seconds("send_recv", compile_topology(shared), stride, 16 // stride, GIB)
    assert message == pytest.approx(GIB * senders / 12.5e9, rel=1e-6)
    assert seconds("send_recv", compile_topology(nodes), stride, 16 // stride, GIB) == pytest.approx(GIB / 12.5e9)


@pytest.mark.parametrize(("shares", "is_mesh"), [((0.5,), True), ((0.2, 0.6, 1.0), False), ((0.2, 1.6, 1.0), True)])
def test_shares_of_a_mesh_that_do_not_fit_it_are_refused(shares: tuple[float, ...], is_mesh: bool) -> None:
    with pytest.raises(InputError, match="mesh_shares must"):
        LinkLevel(
            name="link",
            kind="nvlink",
            num_devices=4,
            bandwidth_bytes_per_s=1e9,
            latency_s=1e-6,
            is_mesh=is_mesh,
            mesh_shares=shares,
        )


@pytest.mark.parametrize(("nodes", "touched"), [(2, 1.99), (4, 3.60), (8, 5.25)])
def test_a_dispatcher_that_knows_its_copies_sends_one_to_every_node_that_a_token_visits(
    nodes: int, touched: float
) -> None:
    """Eight experts a token visit 1.99, 3.60 and 5.25 of 2, 4 and 8 nodes (`modelling` D5), one of them its own."""
    topology = Topology(levels=(level(8, 1e15), level(8 * nodes, 1e9)))
    size, tokens = 8 * nodes, 8e9
    whole, once = (seconds("all_to_all", topology, 1, size, tokens, copies) for copies in (1, 8))
    assert whole == pytest.approx((nodes - 1) / nodes * 8, rel=1e-3)
    assert once == pytest.approx(touched * (nodes - 1) / nodes, rel=3e-3)


def test_a_dispatcher_that_knows_its_copies_sends_one_to_every_rank_of_its_node() -> None:
    """Two experts a token, four ranks: 3/4 of 2 copies, or 3 (1 - (3/4)^2) = 1.3125 of one, of 1e9 bytes each."""
    topology = Topology(levels=(level(4, 1e9),))
    whole, once = (seconds("all_to_all", topology, 1, 4, 2e9, copies) for copies in (1, 2))
    assert whole == pytest.approx(1.5, rel=1e-3)
    assert once == pytest.approx(1.3125, rel=1e-3)


# -- tiers of switches, sites and switches that reduce -----------------------------------------------------------------


def tiered(oversubscription: float, num_nodes: int = 8, **network: Any) -> Topology:
    """Nodes of eight under leaves of two, on ideal links of 450e9 and NICs of 50e9."""
    cluster = ideal(num_nodes, 450e9, 50e9)
    tier = SwitchTier(num_nodes=2, oversubscription=oversubscription)
    return compile_topology(
        dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, tiers=(tier,), **network))
    )


@pytest.mark.parametrize(("stride", "bytes_per_s"), [(16, 12.5e9), (8, 25e9), (4, 50e9), (2, 50e9)])
def test_links_out_of_a_switch_are_shared_by_those_who_send(stride: int, bytes_per_s: float) -> None:
    """`stride` of 16 devices under a leaf with 200e9 upwards send, none of them faster than its NIC."""
    assert seconds("send_recv", tiered(4.0), stride, 64 // stride, GIB) == pytest.approx(GIB / bytes_per_s, rel=1e-6)


def test_a_ring_over_leaves_takes_as_long_as_its_slowest_links() -> None:
    """A sixteenth of 2 x 63 / 64 x 1 GiB in eight rings passes each device's part of the uplinks, an eighth its NIC."""
    wire = 2 * 7 / 8 * GIB
    assert seconds("all_reduce", tiered(1.5), 8, 8, GIB) == pytest.approx(wire / 50e9, rel=1e-6)
    assert seconds("all_reduce", tiered(4.0), 8, 8, GIB) == pytest.approx(wire / 2 / 12.5e9, rel=1e-6)


@pytest.mark.parametrize("operation", COLLECTIVES)
@pytest.mark.parametrize(("stride", "size"), [(1, 64), (4, 16), (8, 8), (16, 4), (32, 2)])
def test_a_tier_that_is_hardly_oversubscribed_costs_next_to_nothing(
    operation: Operation, stride: int, size: int
) -> None:
    for num_bytes in (1e4, 1e7, 1e10):
        plain, hardly = (seconds(operation, tiered(factor), stride, size, num_bytes) for factor in (1.0, 1.0 + 1e-9))
        assert hardly == pytest.approx(plain, rel=1e-6)


@settings(max_examples=40)
@given(
    st.sampled_from(COLLECTIVES),
    st.sampled_from([(1, 64), (4, 16), (8, 8), (16, 4), (32, 2)]),
    buffers,
    st.floats(1, 50),
    st.floats(1, 10),
    st.booleans(),
)
def test_less_oversubscription_is_never_slower(
    operation: Operation, group: tuple[int, int], num_bytes: float, factor: float, more: float, sharp: bool
) -> None:
    narrow, wide = (seconds(operation, tiered(by, sharp=sharp), *group, num_bytes) for by in (factor * more, factor))
    assert wide <= narrow * (1 + 1e-9)


@settings(max_examples=60)
@given(
    st.sampled_from(["all_reduce", "all_gather", "all_to_all"]),
    st.sampled_from([(1, 16), (1, 64), (2, 32), (4, 16), (8, 8)]),
    st.floats(1 / 0.6, 100),
    st.floats(1, 8),
)
def test_a_group_over_nodes_is_between_one_all_local_and_one_all_remote(
    operation: Operation, group: tuple[int, int], ratio: float, oversubscription: float
) -> None:
    """Bytes alone, on links inside nodes that are so much faster that what hides does not make up for the NICs."""
    cluster = ideal(64, ratio * 10e9, 10e9)
    tier = SwitchTier(num_nodes=4, oversubscription=oversubscription)
    cluster = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, tiers=(tier,)))
    size = group[1]
    local, remote = (
        Topology(levels=(level(size, ratio * 10e9),)),
        Topology(levels=(level(size, 10e9 / oversubscription),)),
    )
    time = seconds(operation, compile_topology(cluster), *group, 1e12)
    assert seconds(operation, local, 1, size, 1e12) <= time * (1 + 1e-6)
    assert time <= seconds(operation, remote, 1, size, 1e12) * (1 + 1e-6)


def test_switches_that_reduce_take_each_buffer_up_and_down_once() -> None:
    plain, reducing = (tiered(1.0, sharp=sharp) for sharp in (False, True))
    once = GIB / 50e9
    assert seconds("all_reduce", plain, 8, 8, GIB) == pytest.approx(2 * 7 / 8 * once, rel=1e-6)
    assert seconds("all_reduce", reducing, 8, 8, GIB) == pytest.approx(once, rel=1e-6)
    for operation in ("all_gather", "all_to_all", "send_recv"):
        assert seconds(operation, reducing, 8, 8, GIB) == seconds(operation, plain, 8, 8, GIB)
    # Inside a node no switch of the network is asked.
    assert seconds("all_reduce", reducing, 1, 8, GIB) == seconds("all_reduce", plain, 1, 8, GIB)


def test_small_buffers_wait_for_a_few_switches_where_these_reduce() -> None:
    """64 nodes are two switches high: 4 hops, where a ring has 2 x 63."""
    cluster = load_cluster("h100-sxm:64x8")
    sharp = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, sharp=True))
    hop = cluster.network.latency_s
    plain, reducing = (seconds("all_reduce", compile_topology(variant), 8, 64, 1024) for variant in (cluster, sharp))
    assert plain == pytest.approx(126 * hop, rel=1e-2)
    assert 2 * hop <= reducing <= 4 * hop


def test_what_crosses_to_another_site_is_not_reduced_by_switches() -> None:
    wan = WanSpec(nodes_per_site=4, bandwidth_bytes_per_s=10e9, latency_s=1e-3)
    cluster = dataclasses.replace(ideal(8, 450e9, 50e9), wan=wan)
    sharp = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, sharp=True))
    plain, reducing = (compile_topology(variant) for variant in (cluster, sharp))
    assert seconds("all_reduce", reducing, 8, 8, GIB) == seconds("all_reduce", plain, 8, 8, GIB)
    assert seconds("all_reduce", reducing, 8, 4, GIB) < seconds("all_reduce", plain, 8, 4, GIB)


def test_devices_without_peer_access_share_the_bridge_to_host_memory() -> None:
    """Eight L40S on PCIe gen4 reach 1.45e9 bytes/s in an all-reduce of 512 MiB, 0.649 s (`modelling` D3)."""
    link = LinkLevel(
        name="host",
        kind="pcie",
        num_devices=8,
        bandwidth_bytes_per_s=32e9,
        latency_s=1e-12,
        efficiency=1.0,
        half_rate_bytes=1e-3,
        host_bridge_bytes_per_s=8 * 1.45e9,
    )
    cluster = dataclasses.replace(load_cluster("l40s:1x8"), levels=(link,))
    assert seconds("all_reduce", compile_topology(cluster), 1, 8, 2**29) == pytest.approx(0.649, rel=5e-3)
    wide = dataclasses.replace(link, host_bridge_bytes_per_s=1e12)
    assert wide.rate_bytes_per_s == 32e9
