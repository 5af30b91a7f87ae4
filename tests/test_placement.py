"""How much of a group's traffic leaves the switches of an allocation, and does the price of a step follow it?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError, UnpricedError
from autoplan.cost.estimate import estimate
from autoplan.cost.network.process_groups import process_groups
from autoplan.readers.cluster import load_cluster
from autoplan.spec.enums import RankOrder
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.ranks import coordinates, hosts
from autoplan.topology.cluster import NodeGroup, SwitchTier, WanSpec
from autoplan.topology.levels import Gaps, compile_topology
from autoplan.topology.placement import Pattern, RankGroup, Seats, fills_evenly, leaving_share, spreads
from benchmarks.allocations import DEVICES, fat_tree, packed, problem_on, shuffled, step_s

PLAN = ParallelPlan(global_batch=64, tp=8, sp=True, pp=4, dp_shard=2)


def seats_of(leaves: list[int], devices_per_node: int = DEVICES, job_share: float = 1.0) -> Seats:
    switch = np.array(leaves)
    count = int(switch.max()) + 1
    return Seats(
        switch=switch,
        load=np.ones(count),
        job_share=np.full(count, job_share),
        devices_per_node=devices_per_node,
        is_even=fills_evenly(switch),
    )


def group(pattern: Pattern, stride: int, size: int) -> RankGroup:
    return RankGroup(pattern, stride, size, size, stride * size)


# -- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("per_leaf", [2, 4, 8])
def test_regular_allocations_have_the_members_of_regular_clusters(devices: int, per_leaf: int) -> None:
    leaves = np.repeat(np.arange(32 // per_leaf), per_leaf).tolist()
    seats, ranks = seats_of(leaves, devices), 32 * devices
    regular = compile_topology(
        replace(
            load_cluster(f"h100-sxm:32x{devices}"),
            network=replace(
                load_cluster("h100-sxm").network, tiers=(SwitchTier(num_nodes=per_leaf, oversubscription=2),)
            ),
        )
    )
    for stride in (1, 2, 4, 8, 16, 32):
        for size in (1, 2, 4, 8, 16, 32):
            if stride * size <= ranks:
                expected = regular.members(np.array([stride]), np.array([size]))[1, 0]
                for pattern in ("ring", "all_to_all"):
                    assert seats.members(group(pattern, stride, size)) == pytest.approx(expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), [(2, 2, 4, 16), (1, 2, 8, 16), (4, 4, 2, 8), (8, 2, 2, 8)])
def test_groups_with_gaps_have_the_members_that_a_count_rank_by_rank_gives(tp: int, cp: int, pp: int, dp: int) -> None:
    cluster = fat_tree(np.repeat(np.arange(8), 4).tolist(), nodes_per_leaf=4)
    topology = compile_topology(cluster)
    gaps = Gaps(np.array([cp]), np.array([tp * cp * pp]))
    found = topology.members(np.array([tp]), np.array([cp * dp]), gaps=gaps)[:, 0].tolist()
    ranks = np.add.outer(np.arange(dp) * tp * cp * pp, np.arange(cp) * tp).ravel()
    assert found[:2] == [int(np.bincount(ranks // domain).max()) for domain in (8, 32)]
    ring = RankGroup("ring", tp, cp * dp, cp, tp * cp * pp)
    assert seats_of(np.repeat(np.arange(8), 4).tolist()).members(ring) == found[1]


def counted_share(leaves: list[int], devices: int, ranks: list[list[int]], pattern: str) -> float:
    """The largest share of its ranks' traffic that leaves a switch, message by message."""
    sent: Counter[int] = Counter()
    left: Counter[int] = Counter()
    for members in ranks:
        below = [leaves[rank // devices] for rank in members]
        for at, leaf in enumerate(below):
            if pattern == "all_to_all":
                heard = below  # a rank keeps its own part
            elif pattern == "chain" and at == len(below) - 1:
                heard = [leaf]
            else:
                heard = [below[(at + 1) % len(below)]]
            sent[leaf] += 1
            left[leaf] += Fraction(sum(other != leaf for other in heard), len(heard))
    return float(max(left[leaf] / sent[leaf] for leaf in sent))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
    st.sampled_from([(1, 1, 4, 8), (2, 2, 2, 4), (4, 1, 2, 4), (1, 4, 4, 2), (8, 1, 4, 1)]),
    st.sampled_from(["ring", "all_to_all", "chain"]),
)
def test_shares_equal_a_count_message_by_message(
    leaves: list[int], degrees: tuple[int, int, int, int], pattern: Pattern
) -> None:
    tp, cp, pp, dp = degrees
    devices = tp * cp * pp * dp // 8
    seats, block = seats_of(leaves, devices), tp * cp
    every = np.arange(tp * cp * pp * dp).reshape(dp, pp, cp, tp)
    cases = {
        group(pattern, 1, tp): every.reshape(-1, tp),
        group(pattern, block, pp): every.transpose(0, 2, 3, 1).reshape(-1, pp),
        group(pattern, block * pp, dp): every.transpose(1, 2, 3, 0).reshape(-1, dp),
        RankGroup(pattern, tp, cp * dp, cp, block * pp): every.transpose(1, 3, 0, 2).reshape(-1, cp * dp),
    }
    for pattern_name, ranks in cases.items():
        found = leaving_share(seats, seats.switch[None], pattern_name).max()
        assert found == pytest.approx(counted_share(leaves, devices, ranks.tolist(), pattern)), pattern_name


def test_other_jobs_below_a_switch_dilute_what_a_lone_node_sends_out_of_it() -> None:
    # Three nodes below one leaf and one below another, a ring through all: 1 of 3 and 1 of 1 leave.
    ring = group("ring", 8, 4)
    assert leaving_share(seats_of([0, 0, 0, 1]), np.array([[0, 0, 0, 1]]), ring)[0].tolist() == pytest.approx(
        [1 / 3, 1]
    )
    # Of four nodes that have a quarter of their leaves, the rest sends as the mean: 2 of 4.
    shares = leaving_share(seats_of([0, 0, 0, 1], job_share=0.25), np.array([[0, 0, 0, 1]]), ring)[0]
    assert shares.tolist() == pytest.approx([0.25 / 3 + 0.75 / 2, 0.25 + 0.75 / 2])


def test_a_group_spreads_over_the_switches_of_its_widest_sibling() -> None:
    switch = np.array([[0, 0, 1, 1], [0, 1, 1, 0]])
    assert spreads(switch, group("ring", 8, 2), DEVICES).max(axis=1).tolist() == [1, 2]
    assert spreads(switch, group("ring", 16, 2), DEVICES).max(axis=1).tolist() == [2, 2]
    assert spreads(switch, group("ring", 8, 4), DEVICES).tolist() == [[2], [2]]


# -- clusters ---------------------------------------------------------------------------------------------------------


def test_nodes_that_fill_their_leaves_in_order_are_a_regular_cluster() -> None:
    listed = fat_tree(np.repeat(np.arange(4), 4).tolist(), nodes_per_leaf=4)
    stride, size = np.array([1, 8, 8, 16, 24]), np.array([8, 16, 4, 8, 3])
    for pattern in ("ring", "all_to_all", "chain"):
        seats_found, other = (
            compile_topology(c).members(stride, size, pattern=pattern) for c in (listed, replace(listed, nodes=()))
        )  # type: ignore[arg-type]
        assert seats_found.dtype == other.dtype == np.int64
        assert seats_found.tolist() == other.tolist()


def test_a_job_below_one_leaf_sees_no_oversubscription() -> None:
    assert len(compile_topology(fat_tree([3] * 8)).levels) == 2
    assert len(compile_topology(fat_tree([3] * 7 + [1])).levels) == 3


def test_leaves_of_one_name_in_different_pods_differ() -> None:
    tiers = (SwitchTier(num_nodes=2, oversubscription=2), SwitchTier(name="pod", num_nodes=4, oversubscription=2))
    nodes = tuple(NodeGroup(names=(f"n{at}",), switches=("a", f"pod{at // 2}")) for at in range(4))
    cluster = load_cluster("h100-sxm:4x8")
    cluster = replace(cluster, nodes=nodes, network=replace(cluster.network, tiers=tiers))
    assert [level.num_devices for level in compile_topology(cluster).levels] == [8, 16, 16, 32]


def test_a_larger_site_has_less_of_its_link_for_each_node() -> None:
    nodes = tuple(NodeGroup(names=(f"n{at}",), switches=("a",), site="xyyy"[at]) for at in range(4))
    wan = WanSpec(nodes_per_site=4, bandwidth_bytes_per_s=1e9, latency_s=1e-3)
    level = compile_topology(replace(load_cluster("h100-sxm:4x8"), nodes=nodes, wan=wan)).levels[-2]
    assert level.seats is not None
    # One ring message leaves each site: a third of those of the larger one, all of those of the smaller.
    assert level.seats.members(group("ring", 8, 4)) == pytest.approx(2)
    shares = leaving_share(level.seats, level.seats.switch[None], group("ring", 8, 4))[0]
    assert shares.tolist() == pytest.approx([1 / 3, 1 / 3])
    assert compile_topology(replace(load_cluster("h100-sxm:4x8"), nodes=nodes, wan=wan)).levels[-1].bytes_per_s == (
        pytest.approx(1e9 / 24)
    )


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (("n0", "n1", "n2"), "each of the 4 nodes .* once, it names 3; see 'n3'"),
        (("n0", "n1", "n2", "n9"), "it names 4; see 'n9'"),
        (("n0", "n1", "n2", "n2"), "it names 4; see 'n3'"),
    ],
)
def test_a_placement_names_every_node_once(placement: tuple[str, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        compile_topology(fat_tree([0, 0, 1, 1]), placement)


def test_a_placement_needs_listed_nodes_and_nodes_that_are_domains_of_their_own() -> None:
    with pytest.raises(InputError, match="lists none: add its"):
        compile_topology(load_cluster("h100-sxm:2x8"), ("a", "b"))
    racks = load_cluster("gb200-nvl72:2x4")
    nodes = (NodeGroup(names=("a", "b"), switches=("x",)),)
    with pytest.raises(UnpricedError, match="joins several nodes"):
        compile_topology(replace(racks, nodes=nodes), ("b", "a"))


# -- prices -----------------------------------------------------------------------------------------------------------

PROBLEM = problem_on(fat_tree([0, 1, 0, 2, 1, 0, 2, 0], nodes_per_leaf=8))
NODES = tuple(f"n{at}" for at in range(8))


@settings(max_examples=10, deadline=None)
@given(st.permutations(NODES), st.data())
def test_exchanging_nodes_below_one_switch_changes_nothing(order: list[str], data: st.DataObject) -> None:
    leaf = {name: node.switches[0] for node in PROBLEM.cluster.nodes for name in node.names}
    names = {kind: iter(data.draw(st.permutations([n for n in order if leaf[n] == kind]))) for kind in leaf.values()}
    other = tuple(next(names[leaf[name]]) for name in order)
    exchanged = replace(PLAN, pp=8, dp_shard=1, placement=tuple(order))
    assert step_s(PROBLEM, exchanged) == step_s(PROBLEM, replace(exchanged, placement=other))


def test_the_listed_order_is_the_placement_of_that_order() -> None:
    assert step_s(PROBLEM, PLAN) == step_s(PROBLEM, replace(PLAN, placement=NODES))


@settings(max_examples=10, deadline=None)
@given(st.permutations(NODES), st.sampled_from(RankOrder), st.floats(1, 4), st.floats(1, 3))
def test_more_bandwidth_never_hurts(order: list[str], rank_order: str, taper: float, faster: float) -> None:
    plan = replace(PLAN, placement=tuple(order), rank_order=rank_order)  # type: ignore[arg-type]
    times = []
    for rate, less in ((1.0, 4.0), (1.0, taper), (faster, taper)):
        network = PROBLEM.cluster.network
        tier = replace(network.tiers[0], oversubscription=less)
        network = replace(network, tiers=(tier,), nic_bytes_per_s=rate * network.nic_bytes_per_s)
        times.append(step_s(replace(PROBLEM, cluster=replace(PROBLEM.cluster, network=network)), plan))
    assert times[0] * (1 + 1e-12) >= times[1] >= times[2] * (1 - 1e-12)


def test_a_network_without_oversubscription_does_not_see_the_order() -> None:
    leaves = packed(0)
    plan = replace(PLAN, pp=8, dp_shard=8)
    free, mixed = (problem_on(fat_tree(order, taper=1)) for order in (leaves, shuffled(leaves, 0)))
    assert step_s(free, plan) == step_s(mixed, plan)


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_order", RankOrder)
@pytest.mark.parametrize("degrees", [(2, 1, 4, 1, 4), (2, 2, 2, 2, 2), (1, 4, 2, 1, 2), (4, 1, 2, 2, 2)])
def test_communicators_join_the_ranks_that_differ_along_their_axes(
    rank_order: str, degrees: tuple[int, int, int, int, int]
) -> None:
    tp, cp, pp, replicate, shard = degrees
    plan = ParallelPlan(
        global_batch=64,
        tp=tp,
        cp=cp,
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        rank_order=rank_order,  # type: ignore[arg-type]
    )
    at = coordinates(plan)
    at |= {"shard": at["dp"] % shard, "replicate": at["dp"] // shard}
    assert len({tuple(row) for row in np.stack(list(at.values())).T.tolist()}) == plan.num_devices
    groups = process_groups(PlanBatch.of([plan], 8))
    for name, axes in (
        ("tp", ["tp"]),
        ("cp", ["cp"]),
        ("pp", ["pp"]),
        ("shard", ["cp", "shard"]),
        ("replicate", ["replicate"]),
    ):
        rest = [axis for axis in ("tp", "cp", "pp", "shard", "replicate") if axis not in axes]
        expected = np.flatnonzero(np.all([at[axis] == 0 for axis in rest], axis=0)).tolist()
        group = getattr(groups, name)
        stride, size = int(group.stride[0]), int(group.size[0])
        run, step = (int(v[0]) for v in group.gaps) if group.gaps else (size, stride * size)
        assert [k // run * step + k % run * stride for k in range(size)] == expected, name


def test_plans_of_both_orders_in_one_batch_cost_what_they_cost_alone() -> None:
    problem = problem_on(load_cluster("h100-sxm:6x8"))
    megatron_order = ParallelPlan(global_batch=48, tp=2, sp=True, cp=3, pp=2, dp_shard=4, layers_per_chunk=None)
    both = [megatron_order, replace(megatron_order, rank_order="tp-cp-ep-pp-dp")]
    together = estimate(problem, PlanBatch.of(both, problem.model.num_layers)).step_s.tolist()
    assert together == [step_s(problem, plan) for plan in both]
    assert together[0] != together[1]


def test_every_rank_of_a_placed_plan_has_a_device() -> None:
    placed = hosts(PROBLEM.cluster, replace(PLAN, placement=NODES[::-1]))
    assert [host.node for host in placed] == list(NODES[::-1])
    assert [host.first_rank for host in placed] == list(range(0, 64, 8))
    assert [host.stages for host in placed] == [(stage,) for stage in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [host.replicas for host in placed] == [(0,), (1,)] * 4
    assert placed[0].switches == ("leaf0",)
    pipelines = hosts(PROBLEM.cluster, replace(PLAN, rank_order="tp-cp-ep-pp-dp"))
    assert [host.stages for host in pipelines] == [(0,), (1,), (2,), (3,)] * 2
    assert hosts(load_cluster("h100-sxm:8x8"), PLAN) == ()
