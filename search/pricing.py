"""Which plans of a space are worth a price?  Those that their bounds leave a chance, the least bound first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import legal
from autoplan.search.bounds import first_layers, group_bounds, kind_bounds, kind_costs, plan_bounds
from autoplan.search.findings import FITS, RISKY, Findings
from autoplan.search.ledger import Block, BlockOutcome, CellOutcome
from autoplan.search.ranking import ordering, ranked, seconds_per_sequence
from autoplan.search.space import Cell, Space
from autoplan.spec.estimate import OOM_Z, RISKY_Z, VERDICTS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan

SAFE_Z = {FITS: RISKY_Z, RISKY: OOM_Z}  # a plan of the verdict is no nearer to the capacity
# Kinds bounded in one go: enough that numpy's cost per call is small, few enough that the arrays stay in the cache.
BLOCK_KINDS = 8192
FIRST_PRICED, MOST_PRICED = 256, 2048  # few plans at first, which may rule out others
DIVED_GROUPS, FIRST_DIVED = 1024, 64  # plans
DIVED_PLANS = 64  # of a kind
ROOM = 0.9  # of the memory, by its bound, for a plan that is priced to have something to beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """All groups of a space and what their plans cannot beat; what is inside is expanded when it is their turn."""

    cells: tuple[Cell, ...]
    groups: PlanBatch
    owner: Ints  # the cell of each group
    bound: Floats  # seconds per sequence
    least_bytes: Floats
    size: Ints  # kinds in a group of each cell

    @classmethod
    def of(cls, problem: Problem, space: Space) -> Frontier:
        """Of all cells."""
        cells = space.cells()
        groups, owner = space.groups(cells)
        time, least_bytes = group_bounds(problem, space, groups, limit_bytes(problem, RISKY))
        return cls(
            cells=cells,
            groups=groups,
            owner=owner,
            bound=time / groups.global_batch,
            least_bytes=least_bytes,
            size=np.array([space.kinds_of_group(cell) for cell in cells], dtype=np.int64),
        )

    def usable(self, problem: Problem, wanted: int) -> Ints:
        """The groups of which a plan may be as safe as `wanted`, the least bound first."""
        groups = np.flatnonzero(self.least_bytes <= limit_bytes(problem, wanted))
        return groups[np.argsort(self.bound[groups], kind="stable")]

    def cell_bound(self, groups: Ints) -> Floats:
        """The least bound of every cell in `groups`, infinite where a cell has none."""
        bound = np.full(len(self.cells), np.inf)
        np.minimum.at(bound, self.owner[groups], self.bound[groups])
        return bound


def limit_bytes(problem: Problem, wanted: int) -> float:
    """What a plan that is as safe as `wanted` needs at most."""
    return float(problem.capacity_bytes * np.exp(SAFE_Z[wanted] * problem.calibration.memory_spread))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The kinds whose plans may be as safe as `wanted` and no slower than a bar, the least bound first."""

    wanted: int
    kinds: PlanBatch
    owner: Ints  # the cell of each kind
    bound: Floats  # seconds per sequence
    cell_bound: Floats  # the least of them, infinite where a cell has none
    left: float  # the least bound of what does not belong to them, but for what is too large

    @classmethod
    def of(cls, problem: Problem, space: Space, frontier: Frontier, wanted: int, groups: Ints, bar: float) -> Reach:
        """Those of some groups, which stand in the order of their bounds."""
        most_bytes = limit_bytes(problem, wanted)
        below = groups[: np.searchsorted(frontier.bound[groups], bar)]
        left = float(frontier.bound[groups[len(below) :]].min(initial=np.inf))
        parts = [frontier.groups.take(below[:0])]
        owners, bounds = [below[:0]], [frontier.bound[:0]]
        for some in _blocks(below, frontier):
            kinds, of_group = space.kinds(frontier.cells, frontier.groups.take(some), frontier.owner[some])
            costs = kind_costs(problem, kinds, first_layers(problem, space, kinds))
            lowest, _ = kind_bounds(problem, space, costs, most_bytes)
            lowest = lowest / kinds.global_batch
            left = min(left, float(lowest[lowest >= bar].min(initial=np.inf)))
            kept = np.flatnonzero(lowest < bar)
            parts.append(kinds.take(kept))
            owners.append(frontier.owner[some][of_group[kept]])
            bounds.append(lowest[kept])
        bound, owner = np.concatenate(bounds), np.concatenate(owners)
        order = np.argsort(bound, kind="stable")
        cell_bound = np.full(len(frontier.cells), np.inf)
        np.minimum.at(cell_bound, owner, bound)
        return cls(
            wanted=wanted,
            kinds=PlanBatch.concatenate(parts).take(order),
            owner=owner[order],
            bound=bound[order],
            cell_bound=cell_bound,
            left=left,
        )

    def size(self, bar: float) -> Ints:
        """How many kinds below the bar each cell holds."""
        return np.bincount(self.owner[self.bound < bar], minlength=len(self.cell_bound))


def dive(problem: Problem, space: Space, frontier: Frontier, wanted: int, margin: float) -> Findings:
    """Price one plan of some cells, so that there is something to beat: the one that its bounds like best.

    Of the groups with the least bounds, and of more of them until something is as safe as `wanted`.
    """
    seen = Findings(wanted=wanted, margin=margin)
    groups = frontier.usable(problem, wanted)
    done, size = 0, DIVED_GROUPS
    while done < len(groups) and not np.isfinite(seen.best):
        some = groups[done : done + size]
        plans = _promising(problem, space, frontier, some, ROOM * limit_bytes(problem, wanted))
        for at in range(0, len(plans), FIRST_DIVED):
            priced = estimate(problem, plans.take(np.arange(at, min(at + FIRST_DIVED, len(plans)))))
            good = np.flatnonzero(priced.verdict == wanted)
            if len(good):
                objective = seconds_per_sequence(priced)[good]
                seen.winners.offer(objective, priced.batch.take(good))
                seen.best = float(objective.min())
                break
        done, size = done + size, 4 * size
    return seen


def _promising(problem: Problem, space: Space, frontier: Frontier, groups: Ints, room_bytes: float) -> PlanBatch:
    """Of the best kind of every cell the best plan, by their bounds, that leaves room and is legal.

    The least bound comes first.
    """
    kinds, of_group = space.kinds(frontier.cells, frontier.groups.take(groups), frontier.owner[groups])
    costs = kind_costs(problem, kinds)
    lowest, _ = kind_bounds(problem, space, costs, room_bytes)
    some = np.flatnonzero(np.isfinite(lowest))
    cell = frontier.owner[groups][of_group[some]]
    costs = costs.take(some[_first_of(cell, lowest[some] / kinds.global_batch[some])])
    parts, bounds = [costs.batch.take(np.empty(0, dtype=np.int64))], [np.empty(0)]
    for found in plan_bounds(problem, space, costs):
        time = np.where(found.memory_bytes <= room_bytes, found.step_s, np.inf)
        best = np.argsort(time, axis=1, kind="stable")[:, :DIVED_PLANS]
        kind, rank = np.nonzero(np.isfinite(np.take_along_axis(time, best, axis=1)))
        plans = space.plans_of(costs.batch, found.inside, found.kinds[kind], best[kind, rank])
        lawful = np.flatnonzero(legal(space.rules, space.workload, plans))
        lawful = lawful[_first_of(kind[lawful], rank[lawful])]
        parts.append(plans.take(lawful))
        bounds.append(time[kind[lawful], best[kind[lawful], rank[lawful]]] / parts[-1].global_batch)
    return PlanBatch.concatenate(parts).take(np.argsort(np.concatenate(bounds), kind="stable"))


def _first_of(owner: Ints, value: Floats | Ints) -> Ints:
    """For every owner the element of least value."""
    order = np.lexsort((value, owner))
    return order[np.flatnonzero(np.diff(owner[order], prepend=-1))]


def _blocks(groups: Ints, frontier: Frontier) -> Iterator[Ints]:
    """`groups` in order, about `BLOCK_KINDS` kinds at a time."""
    if not len(groups):
        return
    upto = np.cumsum(frontier.size[frontier.owner[groups]]) // BLOCK_KINDS
    cuts = [0, *(np.flatnonzero(np.diff(upto)) + 1), len(groups)]
    for start, end in pairwise(cuts):
        yield groups[start:end]


def price_block(problem: Problem, space: Space, reach: Reach, block: Block, margin: float) -> BlockOutcome:
    """Price what no bound rules out in the cells of a block."""
    seen = Findings(wanted=block.wanted, margin=margin, best=block.best, expanded=len(block.cells))
    outcome = _Outcome(len(reach.cell_bound))
    is_mine = np.zeros(len(reach.cell_bound), dtype=np.bool_)
    is_mine[list(block.cells)] = True
    mine = np.flatnonzero(is_mine[reach.owner])
    done, size = 0, FIRST_PRICED
    while done < len(mine) and reach.bound[mine[done]] < seen.bar:
        part = mine[done : done + size]
        part = part[reach.bound[part] < seen.bar]
        _price_kinds(problem, space, seen, outcome, reach.kinds.take(part), reach.owner[part])
        done, size = done + len(part), min(4 * size, BLOCK_KINDS)
    seen.skip(reach.bound[mine[done:]])
    return BlockOutcome(found=seen.packed(), cells={at: outcome.of(at, reach.cell_bound[at]) for at in block.cells})


class _Outcome:
    """The best plan of each cell: its verdict, objective and where it stands, and how near to fitting the cell came."""

    def __init__(self, num_cells: int) -> None:
        self.verdict = np.full(num_cells, len(VERDICTS))
        self.objective = np.full(num_cells, np.inf)
        self.nearest_z = np.full(num_cells, np.inf)
        self.plan: dict[int, object] = {}

    def of(self, cell: int, bound: float) -> CellOutcome:
        """What the trial of a cell says; one of which no plan had a chance is pruned."""
        attributes: dict[str, object] = {"bound": float(bound)}
        if cell not in self.plan:
            return CellOutcome(value=None, constraints={}, attributes=attributes)
        # At most zero means feasible: how far the plan that needs least memory is from a safe fit.
        constraints = {"memory": float(self.nearest_z[cell] - RISKY_Z)}
        attributes["plan"] = self.plan[cell]
        return CellOutcome(value=float(self.objective[cell]), constraints=constraints, attributes=attributes)


def _price_kinds(
    problem: Problem, space: Space, seen: Findings, outcome: _Outcome, kinds: PlanBatch, owner: Ints
) -> None:
    """Price those plans of some kinds whose bounds leave them a chance, the least bound first."""
    most_bytes = limit_bytes(problem, seen.wanted)
    parts, bounds, owners = [kinds.take(owner[:0])], [np.empty(0)], [owner[:0]]
    for found in plan_bounds(problem, space, kind_costs(problem, kinds, first_layers(problem, space, kinds))):
        bound = found.step_s / kinds.global_batch[found.kinds, None]
        fitting = found.memory_bytes <= most_bytes
        seen.bounded += bound.size
        seen.skip(bound[fitting])
        kind, plan = np.nonzero(fitting & (bound < seen.bar))
        if len(kind):
            parts.append(space.plans_of(kinds, found.inside, found.kinds[kind], plan))
            bounds.append(bound[kind, plan])
            owners.append(owner[found.kinds[kind]])
    plans, bound, of_cell = PlanBatch.concatenate(parts), np.concatenate(bounds), np.concatenate(owners)
    some = np.flatnonzero(legal(space.rules, space.workload, plans))
    some = some[np.argsort(bound[some], kind="stable")]
    done, size = 0, FIRST_PRICED
    while done < len(some) and bound[some[done]] < seen.bar:
        part = some[done : done + size]
        part = part[bound[part] < seen.bar]
        _price(problem, seen, outcome, plans.take(part), of_cell[part])
        done, size = done + len(part), min(2 * size, MOST_PRICED)
    seen.skip(bound[some[done:]])


def _price(problem: Problem, seen: Findings, outcome: _Outcome, batch: PlanBatch, owner: Ints) -> None:
    """Price plans and keep the best of all and of each cell."""
    costs = estimate(problem, batch)
    objective, verdict = seconds_per_sequence(costs), costs.verdict
    order = ordering(objective, batch)
    # Rows of each cell from its best plan to its worst, those of the better verdict first.
    order = order[np.lexsort((verdict[order], owner[order]))]
    winners = order[np.flatnonzero(np.diff(owner[order], prepend=-1))]
    np.minimum.at(outcome.nearest_z, owner, costs.oom_z)
    for winner in winners:
        cell, key = owner[winner], (verdict[winner], objective[winner])
        if key < (outcome.verdict[cell], outcome.objective[cell]):
            outcome.verdict[cell], outcome.objective[cell] = key
            outcome.plan[int(cell)] = msgspec.to_builtins(batch.plan(int(winner)))
    for pool, rows in ((seen.plans, np.arange(len(batch))), (seen.winners, winners)):
        rows = rows[verdict[rows] == seen.wanted]
        pool.offer(objective[rows], batch.take(rows))
        seen.best = min(seen.best, float(objective[rows].min(initial=np.inf)))
    for kind in seen.found:
        seen.found[kind] += int((verdict == kind).sum())
    seen.priced += len(batch)


def closest(problem: Problem, space: Space, frontier: Frontier) -> RankedPlan | None:
    """The legal plan that needs least memory."""
    found: RankedPlan | None = None
    groups = np.argsort(frontier.least_bytes, kind="stable")
    for some in _blocks(groups, frontier):
        if found and frontier.least_bytes[some].min() >= found.memory_bytes:
            break
        kinds, _ = space.kinds(frontier.cells, frontier.groups.take(some), frontier.owner[some])
        for bounds in plan_bounds(problem, space, kind_costs(problem, kinds)):
            least = bounds.memory_bytes.ravel()
            order = np.argsort(least, kind="stable")
            for at in range(0, len(order), MOST_PRICED):
                part = order[at : at + MOST_PRICED]
                if found and least[part[0]] >= found.memory_bytes:
                    break
                kind, plan = np.divmod(part, len(bounds.inside))
                plans = space.plans_of(kinds, bounds.inside, bounds.kinds[kind], plan)
                plans = plans.take(legal(space.rules, space.workload, plans))
                if not len(plans):
                    continue
                costs = estimate(problem, plans)
                nearest = int(np.argmin(costs.memory_bytes))
                if found is None or costs.memory_bytes[nearest] < found.memory_bytes:
                    found = ranked(problem, costs, [nearest])[0]
    return found
