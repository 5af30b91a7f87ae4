"""Placement: the order in which a plan numbers the nodes allocated by a scheduler.

Nodes below the same switches are interchangeable, so an order is a sequence of switches.  The step is linear in the
shares of traffic that leave switches as long as overlaps do not change: this linear model scores many orders at once,
and only the few best are priced exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.estimate import estimate
from autoplan.cost.network.process_groups import process_groups
from autoplan.search.limits import divisors
from autoplan.search.ranking import TIE, ranked
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan, SearchResult
from autoplan.topology.levels import Topology
from autoplan.topology.placement import (
    RankGroup,
    Seats,
    effective_members,
    leaving_share,
    node_names,
    spreads,
    switches_of_nodes,
)

PLACED_PLANS = 3  # best plans of a search that are placed
STARTS = 4  # orders improved by local search
MAX_TRIALS = 60  # largest number of blocks of swaps per order
BLOCK_NODES = 2**15  # orders x nodes scored at once
# Tie-breakers between orders with equal time, as shares of the step: the number of switches that groups span, and the
# traffic leaving all switches.
SPREAD_WEIGHT = 1e-6
MEAN_WEIGHT = 1e-3  # weight of the mean over switches or siblings, relative to the worst

# By level and group: seconds per share of the group's traffic that leaves a switch.
Slopes = dict[tuple[int, RankGroup], float]


def is_fragmented(problem: Problem) -> bool:
    """Return whether the order of nodes matters: they fill switches unevenly and inter-switch links are slower."""
    if problem.cluster.levels[-1].num_devices > problem.cluster.devices_per_node:
        return False  # not priced yet
    return any(level.seats is not None and not level.seats.is_even for level in problem.topology.levels)


def place_best(problem: Problem, result: SearchResult) -> SearchResult:
    """Return the result with the best node order found for its best plans; the others keep theirs."""
    if not is_fragmented(problem) or not result.rivals:
        return result
    placed = {}
    for rival in result.rivals[:PLACED_PLANS]:
        placed[rival.plan] = _priced(problem, best_placement(problem, rival.plan))

    def replaced(plans: Sequence[RankedPlan]) -> tuple[RankedPlan, ...]:
        better = [placed.get(plan.plan, plan) for plan in plans]
        return tuple(sorted(better, key=lambda plan: plan.s_per_sequence))

    rivals = replaced(result.rivals)
    limits = (
        *result.certificate.limits,
        f"nodes grouped by switch, and for the best {len(placed)} plans in their own order",
    )
    certificate = replace(result.certificate, limits=limits, best_step_s=rivals[0].step_s)
    return replace(result, ranked=replaced(result.ranked), rivals=rivals, certificate=certificate)


def _priced(problem: Problem, plan: ParallelPlan) -> RankedPlan:
    return ranked(problem, estimate(problem, problem.batch([plan])), [0])[0]


def best_placement(problem: Problem, plan: ParallelPlan) -> ParallelPlan:
    """Return `plan` with the best node order found, at least as good as its own, the listed one, and switch by switch.

    Deterministic.  Candidates fill the pipeline x replica grid of nodes in bands, by switches in descending or
    ascending size, with or without keeping blocks whole; the best are improved by swapping two nodes at a time.
    """
    search = _OrderSearch.of(problem, replace(plan, placement=None))
    listed = search.listed
    plain = (listed, np.sort(listed), search.order(plan.placement))
    best, best_key = min(((order, search.key(order)) for order in plain), key=lambda pair: pair[1])
    starts = np.unique(np.array([*plain, *search.starts()]), axis=0)
    for _ in range(2):  # the second time linearised at the best order of the first
        base, slopes = best, search.slopes(best)
        scores = search.score(slopes, starts)
        chosen = starts[np.argsort(scores, kind="stable")[:STARTS]]
        improved = [search.improve(slopes, order) for order in chosen]
        for order in np.unique(np.array([*chosen[:1], *improved]), axis=0):
            if (key := search.key(order)) < best_key:
                best, best_key = order, key
        if best is base or not slopes:
            break
        starts = np.unique(np.array([best, *improved]), axis=0)
    return replace(plan, placement=None if (best == listed).all() else search.names(best))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OrderSearch:
    """Search for an order of one plan's nodes, by their classes: nodes of a class share all switches."""

    problem: Problem
    batch: PlanBatch
    listed: Ints  # order in the cluster's list
    above: tuple[Ints, ...]  # switch of every class by tier, and lastly by site
    seats: dict[int, Seats]  # for the levels at which they matter
    widths: tuple[int, ...]  # distances in nodes between a group's first two members
    spans: tuple[RankGroup, ...]  # groups that should span few switches
    listed_s: float

    @classmethod
    def of(cls, problem: Problem, plan: ParallelPlan) -> _OrderSearch:
        """Prepare a search for the groups used in pricing."""
        by_tier = np.array(switches_of_nodes(problem.cluster, None))
        # Sorted by site first, then from the outermost tier inwards.
        classes, listed = np.unique(by_tier[::-1], axis=1, return_inverse=True)
        batch = problem.batch([plan])
        levels = [
            level
            if level.seats is None
            else replace(level, seats=replace(level.seats, is_even=False, group_members={}))
            for level in problem.topology.levels
        ]
        seats = {at: level.seats for at, level in enumerate(levels) if level.seats is not None}
        step_s = float(estimate(problem.on(Topology(levels=tuple(levels))), batch).step_s[0])
        groups, size = process_groups(batch), problem.cluster.devices_per_node
        pairs = [(int(group.stride[0]), int(group.size[0])) for group in (groups.pp, groups.shard, groups.replicate)]
        spans = [RankGroup("ring", stride, count, count, stride * count) for stride, count in pairs]
        if groups.shard.gaps:
            run, step = (int(value[0]) for value in groups.shard.gaps)
            spans[1] = spans[1]._replace(run=run, step=step)
        return cls(
            problem=problem,
            batch=batch,
            listed=listed.reshape(-1),
            above=tuple(classes[::-1]),
            seats=seats,
            widths=tuple(sorted({max(stride // size, 1) for stride, count in pairs if count > 1})),
            spans=tuple(group for group in spans if group.size > 1),
            listed_s=step_s,
        )

    def names(self, order: Ints) -> tuple[str, ...]:
        """Return the nodes in that order; within a class in the cluster's order."""
        names = node_names(self.problem.cluster)
        of_class = {number: iter(np.flatnonzero(self.listed == number)) for number in np.unique(self.listed).tolist()}
        return tuple(names[next(of_class[number])] for number in order.tolist())

    def order(self, placement: tuple[str, ...] | None) -> Ints:
        """Return the classes of the nodes in that order."""
        class_of = dict(zip(node_names(self.problem.cluster), self.listed.tolist(), strict=True))
        return np.array([class_of[name] for name in placement or class_of], dtype=np.int64)

    def key(self, order: Ints) -> tuple[float, float]:
        """Return the sort key of an order: the step rounded to the relevant precision, then the spread of groups."""
        placement = None if (order == self.listed).all() else self.names(order)
        step_s = float(estimate(self.problem, replace(self.batch, placement=placement)).step_s[0])
        return round(np.log(step_s) / TIE), float(self._spread(order[None])[0])

    # -- many orders at once ------------------------------------------------------------------------------------------

    def slopes(self, order: Ints) -> Slopes:
        """Return the slope of the step in each share at `order`, between no share and that of alternating classes."""
        turns = np.argsort([np.sum(order[:at] == number) for at, number in enumerate(order)], kind="stable")
        now, spread = (self._shares(nodes[None]) for nodes in (order, order[turns]))
        slopes = {}
        for where, share in spread.items():
            max_share = float(max(share.max(), now[where].max()))
            if max_share > 0:
                longest, shortest = (self._step_with(now, where, leaving) for leaving in (max_share, 0.0))
                slopes[where] = max(longest - shortest, 0.0) / max_share
        return slopes

    def score(self, slopes: Slopes, orders: Ints) -> Floats:
        """Return the linearised times of orders in seconds, up to a constant."""
        score = SPREAD_WEIGHT * self.listed_s * self._spread(orders)
        for (level, group), slope in slopes.items():
            if slope:
                share = leaving_share(self.seats[level], self._switch(level, orders), group)
                score += slope * (share.max(axis=1) + MEAN_WEIGHT * share.mean(axis=1))
        return score

    def improve(self, slopes: Slopes, order: Ints) -> Ints:
        """Return `order` improved by swapping two nodes, the best swap of a block at a time, until none helps."""
        size = max(BLOCK_NODES // len(order), 1)
        first, second = _pairs(len(order), MAX_TRIALS * size)
        blocks = -(-len(first) // size)
        score, idle = float(self.score(slopes, order[None])[0]), 0
        for trial in range(MAX_TRIALS):
            if idle >= blocks:
                break
            pair = slice(trial % blocks * size, (trial % blocks + 1) * size)
            a, b = first[pair], second[pair]
            differ = order[a] != order[b]
            a, b = a[differ], b[differ]
            idle += 1
            if not len(a):
                continue
            orders = np.tile(order, (len(a), 1))
            row = np.arange(len(a))
            orders[row, a], orders[row, b] = order[b], order[a]
            scores = self.score(slopes, orders)
            best = int(np.argmin(scores))
            if scores[best] < score - TIE * self.listed_s * SPREAD_WEIGHT:
                order, score, idle = orders[best], float(scores[best]), 0
        return order

    def starts(self) -> Iterator[Ints]:
        """Yield orders that keep nodes of a class together along either direction of the grid."""
        count = np.bincount(self.listed)
        by_size = np.argsort(count, kind="stable")
        num = len(self.listed)
        for width in self.widths:
            if num % width:
                continue
            grid = np.arange(num).reshape(-1, width)
            for height in divisors(len(grid)):
                # Bands of `height` rows, filled column by column.
                cells = grid.reshape(-1, height, width).transpose(0, 2, 1).ravel()
                for kinds in (np.arange(len(count)), by_size, by_size[::-1]):
                    for block_size in {1, height, width, height * width}:
                        order = np.empty(num, dtype=np.int64)
                        order[cells] = _in_blocks(kinds, count, block_size)
                        yield order

    def _switch(self, level: int, orders: Ints) -> Ints:
        """Return the switch of every node of each order: shape (orders, nodes)."""
        of_class = np.empty(int(self.listed.max()) + 1, dtype=np.int64)
        of_class[self.listed] = self.seats[level].switch
        return of_class[orders]

    def _shares(self, orders: Ints) -> dict[tuple[int, RankGroup], Floats]:
        """Return, for each level and group, the share that leaves every switch: shape (orders, switches)."""
        return {
            (level, group): leaving_share(seats, self._switch(level, orders), group)
            for level, seats in self.seats.items()
            for group in seats.group_members
        }

    def _spread(self, orders: Ints) -> Floats:
        """Return the number of leaf switches of the widest group, plus a small weight of the mean: shape (orders)."""
        leaf = self.above[0][orders]
        spread_of_groups = [spreads(leaf, group, self.problem.cluster.devices_per_node) for group in self.spans]
        if not spread_of_groups:
            return np.zeros(len(orders))
        worst = np.max([counts.max(axis=1) for counts in spread_of_groups], axis=0)
        return worst + MEAN_WEIGHT * np.sum([counts.mean(axis=1) for counts in spread_of_groups], axis=0)

    def _step_with(
        self, shares: dict[tuple[int, RankGroup], Floats], where: tuple[int, RankGroup], leaving: float
    ) -> float:
        """Return the step with these shares, except one changed share."""
        levels = list(self.problem.topology.levels)
        for at, seats in self.seats.items():
            members = {group: effective_members(group, float(shares[at, group].max())) for group in seats.group_members}
            if at == where[0]:
                members[where[1]] = effective_members(where[1], leaving)
            levels[at] = replace(levels[at], seats=replace(seats, group_members=members))
        return float(estimate(self.problem.on(Topology(levels=tuple(levels))), self.batch).step_s[0])


def _pairs(num: int, max_pairs: int) -> tuple[Ints, Ints]:
    """Return all pairs of `num` items in random order, or `max_pairs` random ones if there are more."""
    random = np.random.default_rng(0)
    if num * (num - 1) // 2 <= max_pairs:
        first, second = np.triu_indices(num, 1)
        mixed = random.permutation(len(first))
        return first[mixed], second[mixed]
    return random.integers(num, size=max_pairs), random.integers(num, size=max_pairs)


def _in_blocks(kinds: Sequence[int] | Ints, count: Ints, size: int) -> Ints:
    """Return classes in turn, each `count` times: first nodes that fill blocks of `size`, then the rest."""
    full = [np.full(count[kind] // size * size, kind) for kind in kinds]
    remainders = [np.full(count[kind] % size, kind) for kind in kinds]
    return np.concatenate([*full, *remainders])
