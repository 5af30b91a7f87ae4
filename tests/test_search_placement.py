"""Does the search find the order of nodes that a fragmented allocation needs?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autoplan.api.problem import make_space
from autoplan.base.arrays import Floats
from autoplan.cost.estimate import estimate
from autoplan.search.placement import best_placement, is_fragmented, place_best
from autoplan.search.study import search
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.cluster import WanSpec
from autoplan.topology.levels import Topology
from autoplan.topology.placement import effective_members, leaving_share, switches_of_nodes
from benchmarks.allocations import BIG, fat_tree, packed, problem_on, shuffled, step_s, widest


def orders_of(labels: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Distinct orders of `labels`."""
    if not labels:
        yield ()
    for first in sorted(set(labels)):
        rest = list(labels)
        rest.remove(first)
        for others in orders_of(tuple(rest)):
            yield (first, *others)


def least_rows(rows: Floats) -> Floats:
    """Rows that no other is below in some share and above in none: traffic that stays is never slower."""
    below = (rows[:, None] <= rows).all(axis=2) & (rows[:, None] < rows).any(axis=2)
    return rows[~below.any(axis=0)]


def least_step_s(problem: Problem, plan: ParallelPlan, leaves: list[int]) -> float:
    """Least step of all orders of the nodes; those with the same members in every group are priced once."""
    levels = [
        level if level.seats is None else replace(level, seats=replace(level.seats, is_even=False, group_members={}))
        for level in problem.topology.levels
    ]
    batch = PlanBatch.of([plan], problem.model.num_layers)
    estimate(problem.on(Topology(levels=tuple(levels))), batch)  # says which groups there are
    at, seats = next((at, level.seats) for at, level in enumerate(levels) if level.seats is not None)
    number = np.unique(leaves, return_inverse=True)[1]
    orders = np.array(list(orders_of(tuple(number.tolist()))))
    # Leaves have their numbers in the order of the list.
    renumbered = np.empty(int(number.max()) + 1, dtype=np.int64)
    renumbered[number] = seats.switch
    shares = {members: leaving_share(seats, renumbered[orders], members).max(axis=1) for members in seats.group_members}
    best = np.inf
    for row in least_rows(np.unique(np.round(np.stack(list(shares.values()), axis=1), 12), axis=0)):
        known = {count: effective_members(count, float(share)) for count, share in zip(shares, row, strict=True)}
        levels[at] = replace(levels[at], seats=replace(seats, group_members=known))
        best = min(best, float(estimate(problem.on(Topology(levels=tuple(levels))), batch).step_s[0]))
    return best


@pytest.mark.parametrize(
    ("leaves", "plan"),
    [
        ([0, 1, 0, 1, 0, 1, 0, 1], replace(BIG, pp=1, tp=8, dp_shard=8)),
        ([0, 1, 2, 0, 1, 2, 0, 1], replace(BIG, pp=2, dp_shard=4)),
        ([0, 1, 2, 0, 0, 2, 0, 1], replace(BIG, pp=4, dp_shard=2)),
        ([0, 1, 1, 0, 2, 1, 1, 0], replace(BIG, pp=2, dp_shard=2, dp_replicate=2)),
        ([0, 0, 1, 1, 0, 1, 0, 0], replace(BIG, pp=4, dp_shard=2, rank_order="tp-cp-ep-pp-dp")),
        ([2, 0, 1, 2, 0, 1, 2, 1], replace(BIG, tp=4, pp=4, dp_shard=4)),
    ],
)
def test_on_eight_nodes_the_placed_plan_is_as_fast_as_any_order(leaves: list[int], plan: ParallelPlan) -> None:
    problem = problem_on(fat_tree(leaves, nodes_per_leaf=8))
    best = step_s(problem, best_placement(problem, plan))
    assert best <= 1.01 * least_step_s(problem, plan, leaves)
    assert best <= step_s(problem, plan)


def test_groups_spread_over_fewer_leaves_than_after_bin_packing() -> None:
    """Arnold (arXiv:2509.15940): 8 leaves x 16 nodes of which 40 % are taken, a job of 64 nodes; 1.67 times fewer."""
    ratios = []
    for seed in range(8):
        problem = problem_on(fat_tree(packed(seed), taper=1))
        ratios.append(widest(problem, BIG) / widest(problem, best_placement(problem, BIG)))
    assert min(ratios) >= 1
    assert max(ratios) >= 1.5


@pytest.mark.parametrize("seed", range(3))
def test_a_tapered_tree_gains_from_placement_over_the_order_that_was_handed_out(seed: int) -> None:
    problem = problem_on(fat_tree(shuffled(packed(seed), seed)))
    placed = best_placement(problem, BIG)
    assert is_fragmented(problem)
    assert step_s(problem, BIG) >= 1.3 * step_s(problem, placed)
    level = replace(problem, cluster=fat_tree(shuffled(packed(seed), seed), taper=1))
    assert step_s(level, placed) == pytest.approx(step_s(level, BIG), rel=0.005)


def test_gradients_stay_inside_sites_and_pipelines_go_between_them() -> None:
    cluster = fat_tree([0] * 8, taper=1)
    nodes = tuple(replace(node, site="xyxxyyxy"[at]) for at, node in enumerate(cluster.nodes))
    wan = WanSpec(nodes_per_site=4, bandwidth_bytes_per_s=5e9, latency_s=5e-3)
    problem = problem_on(replace(cluster, nodes=nodes, wan=wan))
    plan = replace(BIG, pp=2, dp_shard=4)
    placed = best_placement(problem, plan)
    site = switches_of_nodes(problem.cluster, placed.placement)[-1]
    assert sorted({tuple(site[:4].tolist()), tuple(site[4:].tolist())}) == [(0,) * 4, (1,) * 4]
    assert step_s(problem, plan) > 2 * step_s(problem, placed)


def test_a_placement_is_found_again() -> None:
    problem, plan = problem_on(fat_tree([0, 1, 2, 0, 1, 2, 0, 1], nodes_per_leaf=8)), replace(BIG, pp=2, dp_shard=4)
    assert best_placement(problem, plan) == best_placement(problem, plan)


def test_nodes_that_fill_their_leaves_in_order_stay_as_they_are() -> None:
    problem = problem_on(fat_tree(np.repeat(np.arange(4), 4).tolist(), nodes_per_leaf=4))
    assert not is_fragmented(problem)
    plan = replace(BIG, pp=4, dp_shard=4)
    assert best_placement(problem, plan).placement is None


def test_the_best_plans_of_a_search_are_placed_and_ranked_again() -> None:
    problem = problem_on(fat_tree([0, 1, 2, 0, 1, 0, 1, 2], nodes_per_leaf=8), model="llama3-8b")
    space = make_space(problem, "64", fix=["tp=8", "micro_batch=1", "recompute=none"], at_most=[], forbid=[])
    assert space.placement == ("n0", "n3", "n5", "n1", "n4", "n6", "n2", "n7")
    found = search(problem, space)
    placed = place_best(problem, found)
    assert placed.rivals[0].step_s <= found.rivals[0].step_s
    assert placed.rivals[0] == placed.ranked[0]
    assert placed.certificate.best_step_s == placed.rivals[0].step_s
    times = [rival.step_s for rival in placed.rivals]
    assert times == sorted(times)
    for ranked_plan in placed.rivals[:4]:
        assert step_s(problem, ranked_plan.plan) == pytest.approx(ranked_plan.step_s)
    regular = problem_on(replace(problem.cluster, nodes=()), model="llama3-8b")
    assert place_best(regular, found) is found
