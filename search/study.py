"""What is the fastest plan?  An Optuna study whose trials are cells, taken by their bounds until none can be better."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from autoplan.cost.estimate import estimate
from autoplan.errors import NoPlanError
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.result import OOM_Z, RISKY_Z, VERDICTS, Certificate, RankedPlan, SearchResult
from autoplan.rules import legal
from search.bounds import KindCosts, first_layers, group_bounds, kind_bounds, kind_costs, spread_of
from search.findings import FITS, RISKY, Findings, together
from search.ledger import AXES, GRACE_S, Block, BlockOutcome, CellOutcome, Ledger, Told
from search.ranking import Leaders, ordering, ranked, seconds_per_sequence
from search.sampler import WARM_CELLS, Sampling
from search.space import Cell, Space
from search.storage import identity, join_study, opened

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SAFE_Z = {FITS: RISKY_Z, RISKY: OOM_Z}  # a plan of the verdict is no nearer to the capacity
MARGIN = 0.05  # plans so much slower than the best are found too, all of them
# Kinds bounded in one go: enough that numpy's cost per call is small, few enough that the arrays stay in the cache.
# Few of them, and few prices, until there is a plan to beat.
FIRST_KINDS, BLOCK_KINDS = 128, 8192
ROUND_BLOCKS = 8  # of a round, which workers share: what one block finds helps the next round, not the next block
FIRST_PRICED, MOST_PRICED = 32, 2048
ROOM = 0.9  # of the memory, by its bound, for a plan that is priced to have something to beat

Progress = Callable[[int, int], None]  # cells done, cells in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Where a search is kept that others may join: `url` as `search.storage.opened` reads it."""

    url: str
    name: str | None = None  # None: after the problem, so that all who ask the same join
    grace_s: float = GRACE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frontier:
    """All groups of a space and what their plans cannot beat; plans of a group are expanded when it is their turn."""

    cells: tuple[Cell, ...]
    groups: PlanBatch
    owner: Ints  # the cell of each group
    bound: Floats  # seconds per sequence
    least_bytes: Floats
    kinds: Ints  # in a group of each cell

    @classmethod
    def of(cls, problem: Problem, space: Space) -> _Frontier:
        cells = space.cells()
        groups, owner = space.groups(cells)
        time, least_bytes = group_bounds(problem, space, groups)
        kinds = np.array([space.kinds_of_group(cell) for cell in cells], dtype=np.int64)
        bound = time / groups.global_batch
        return cls(cells=cells, groups=groups, owner=owner, bound=bound, least_bytes=least_bytes, kinds=kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """What of a frontier may be as safe as `wanted`, and in which order."""

    wanted: int
    limit_bytes: float
    groups: Ints  # those that may be
    cell_bound: Floats  # the least of their bounds, inf where a cell has none
    order: Ints  # cells by it

    @classmethod
    def of(cls, problem: Problem, frontier: _Frontier, wanted: int) -> _Reach:
        limit_bytes = problem.capacity_bytes * np.exp(SAFE_Z[wanted] * problem.calibration.memory_spread)
        groups = np.flatnonzero(frontier.least_bytes <= limit_bytes)
        cell_bound = np.full(len(frontier.cells), np.inf)
        np.minimum.at(cell_bound, frontier.owner[groups], frontier.bound[groups])
        order = np.argsort(cell_bound, kind="stable")
        return cls(wanted=wanted, limit_bytes=limit_bytes, groups=groups, cell_bound=cell_bound, order=order)

    def kinds(self, frontier: _Frontier, bar: float) -> Ints:
        """How many kinds each cell holds in groups below the bar."""
        below = self.groups[frontier.bound[self.groups] < bar]
        owner = frontier.owner[below]
        return np.bincount(owner, frontier.kinds[owner], len(frontier.cells)).astype(np.int64)


def search(
    problem: Problem,
    space: Space,
    progress: Progress | None = None,
    *,
    margin: float = MARGIN,
    shared: Shared | None = None,
    sampling: Sampling | None = None,
) -> SearchResult:
    """The best plans of `space`: all those within `margin` of the best, which is proven to be the best.

    Plans that fit are ranked; where none does, those that may run out of memory; where there are none of these either
    the plan that is least too large is told.  An empty space gives an empty result.  A `shared` search is one of all
    workers that join it, at whatever time, and has the same result for each of them.  With `sampling` the best of the
    cells that a sampler proposed is told, and what the bounds leave open.
    """
    frontier = _Frontier.of(problem, space)
    about = {"margin": margin, "sampler": sampling.name if sampling else "bound"}
    with joined(problem, space, frontier.cells, shared, about) as ledger:
        if sampling:
            seen = _sample(problem, space, frontier, ledger, sampling, margin)
            if not seen.found[FITS]:
                raise NoPlanError(
                    f"none of the {seen.expanded} cells that {sampling.name} proposed holds a plan that fits: "
                    "give more --trials, or --sampler bound, which looks at all of them"
                )
        else:
            seen = _settle(problem, space, frontier, ledger, margin, progress)
    return _result(problem, space, frontier, seen)


@contextmanager
def joined(
    problem: Problem, space: Space, cells: Sequence[Cell], shared: Shared | None, about: Mapping[str, object]
) -> Iterator[Ledger]:
    """A hand in the study of a problem, which only those join who ask for the same; in memory where not `shared`."""
    with opened(shared.url if shared else None) as storage:
        same = identity(problem, space, **about) if shared else {}
        name = shared.name or f"{problem.model.name}-{same['problem']}" if shared else None
        study, made_here = join_study(storage, name, same)
        yield Ledger(study, storage, cells, made_here=made_here, grace_s=shared.grace_s if shared else math.inf)


def _settle(
    problem: Problem, space: Space, frontier: _Frontier, ledger: Ledger, margin: float, progress: Progress | None
) -> Findings:
    """Price cells in the order of their bounds until none is below the bar."""
    reaches = {wanted: _Reach.of(problem, frontier, wanted) for wanted in (FITS, RISKY)}
    seen = Findings(wanted=FITS, margin=margin)
    dive = cache(lambda wanted: _dive(problem, space, frontier, reaches[wanted], margin))

    def next_round(told: list[Told]) -> tuple[Block, ...]:
        nonlocal seen
        for wanted, reach in reaches.items():
            mine = [one for one in told if one.block.wanted == wanted]
            parts = (Findings.unpacked(one.found, wanted, margin, space.placement) for one in mine)
            seen = together((dive(wanted), *parts), wanted, margin)
            taken = {cell for one in mine for cell in one.block.cells}
            if progress:
                progress(len(taken), len(frontier.cells))
            if blocks := _next_round(frontier, reach, seen, taken):
                return blocks
            seen.skip(frontier.bound[reach.groups])
            if seen.found[wanted]:
                break
        if progress:
            progress(len(frontier.cells), len(frontier.cells))
        return ()

    def price(block: Block) -> BlockOutcome:
        return _price_block(problem, space, frontier, reaches[block.wanted], block, margin)

    ledger.settle(next_round, price)
    return seen


def _sample(
    problem: Problem, space: Space, frontier: _Frontier, ledger: Ledger, sampling: Sampling, margin: float
) -> Findings:
    """Price the cells that a sampler proposes, each for itself."""
    reach = _Reach.of(problem, frontier, FITS)

    def price(cell: int) -> BlockOutcome:
        block = Block(wanted=FITS, best=np.inf, cells=(cell,))
        return _price_block(problem, space, frontier, reach, block, margin)

    first = reach.order[:WARM_CELLS].tolist() if sampling.warm else []
    found = ledger.sample(sampling, first, price)
    seen = together((Findings.unpacked(one, FITS, margin, space.placement) for one in found.values()), FITS, margin)
    unseen = np.delete(reach.cell_bound, list(found))
    seen.left = min(seen.left, float(unseen.min(initial=np.inf)))
    return seen


def _next_round(frontier: _Frontier, reach: _Reach, seen: Findings, taken: Collection[int]) -> tuple[Block, ...]:
    """The cells below the bar with the least bounds: more with every round, in blocks of about `BLOCK_KINDS` kinds."""
    is_left = reach.cell_bound < seen.bar
    is_left[list(taken)] = False
    cells = reach.order[is_left[reach.order]]
    if not len(cells):
        return ()
    done = int(reach.kinds(frontier, np.inf)[list(taken)].sum())
    upto = np.cumsum(reach.kinds(frontier, seen.bar)[cells])
    size = min(max(8 * done, FIRST_KINDS), ROUND_BLOCKS * BLOCK_KINDS)
    cells = cells[: np.searchsorted(upto, size) + 1]
    cuts = np.flatnonzero(np.diff(upto[: len(cells)] // BLOCK_KINDS)) + 1
    parts = np.split(cells, cuts)
    return tuple(Block(wanted=reach.wanted, best=seen.best, cells=tuple(part.tolist())) for part in parts)


def _price_block(
    problem: Problem, space: Space, frontier: _Frontier, reach: _Reach, block: Block, margin: float
) -> BlockOutcome:
    """Price what no bound rules out in the cells of a block."""
    seen = Findings(wanted=block.wanted, margin=margin, best=block.best, expanded=len(block.cells))
    outcome = _Outcome(len(frontier.cells))
    groups = reach.groups[np.isin(frontier.owner[reach.groups], block.cells)]
    groups = groups[frontier.bound[groups] < seen.bar]
    for some in _blocks(groups[np.argsort(frontier.bound[groups], kind="stable")], frontier):
        some = some[frontier.bound[some] < seen.bar]
        _price_groups(problem, space, frontier, seen, outcome, some, reach.limit_bytes)
    return BlockOutcome(found=seen.packed(), cells={at: outcome.of(at, reach.cell_bound[at]) for at in block.cells})


def _result(problem: Problem, space: Space, frontier: _Frontier, seen: Findings) -> SearchResult:
    ranking = _within(seen, _ranked_leaders(problem, seen.plans))
    certificate = Certificate(
        cells=len(frontier.cells),
        expanded=seen.expanded,
        plans=space.size(frontier.cells),
        bounded=seen.bounded,
        priced=seen.priced,
        fitting=seen.found[FITS],
        risky=seen.found[RISKY],
        best_step_s=ranking[0].step_s if ranking else None,
        least_left=seen.left / seen.best if ranking and np.isfinite(seen.left) else None,
        proven=bool(ranking) and seen.left >= seen.best,
        limits=space.describe(),
    )
    rivals = _first_of_cells(problem, seen.winners)
    closest = None if ranking else _closest(problem, space, frontier)
    return SearchResult(ranked=ranking, rivals=rivals, closest=closest, certificate=certificate)


def _dive(problem: Problem, space: Space, frontier: _Frontier, reach: _Reach, margin: float) -> Findings:
    """Price one plan of every cell, so that there is something to beat: the one that its bounds like best."""
    seen, limit_bytes = Findings(wanted=reach.wanted, margin=margin), reach.limit_bytes
    groups = reach.groups[np.argsort(frontier.bound[reach.groups], kind="stable")]
    _, first = np.unique(frontier.owner[groups], return_index=True)
    which = groups[first]
    kinds, of_group = space.kinds(frontier.cells, frontier.groups.take(which), frontier.owner[which])
    costs = kind_costs(problem, kinds)
    lowest, least_bytes = kind_bounds(problem, space, costs)
    best = _first_of(of_group, lowest, least_bytes <= ROOM * limit_bytes)
    plans, of_kind = space.layouts_of(kinds.take(best))
    spread = spread_of(problem.model, plans)
    of_plan = costs.of(plans, best[of_kind])
    bound = of_plan.step_s(plans.vp, spread, overlaps=problem.framework.p2p_overlap)
    lawful = legal(space.rules, space.setting, plans)
    chosen = _first_of(of_kind, bound, lawful & (of_plan.memory_bytes(spread) <= ROOM * limit_bytes))
    for at in range(0, len(chosen), MOST_PRICED):
        priced = estimate(problem, plans.take(chosen[at : at + MOST_PRICED]))
        fitting = np.flatnonzero(priced.verdict == seen.wanted)
        objective = seconds_per_sequence(priced)[fitting]
        seen.winners.offer(objective, priced.batch.take(fitting))
        seen.best = min(seen.best, float(objective.min(initial=np.inf)))
    return seen


def _first_of(owner: Ints, value: Floats, usable: NDArray[np.bool_]) -> Ints:
    """For every owner the usable element of least value, if it has one."""
    some = np.flatnonzero(usable)
    some = some[np.lexsort((value[some], owner[some]))]
    return some[np.flatnonzero(np.diff(owner[some], prepend=-1))]


def _blocks(groups: Ints, frontier: _Frontier) -> Iterator[Ints]:
    """`groups` in order, about `BLOCK_KINDS` kinds at a time."""
    if not len(groups):
        return
    upto = np.cumsum(frontier.kinds[frontier.owner[groups]]) // BLOCK_KINDS
    cuts = [0, *(np.flatnonzero(np.diff(upto)) + 1), len(groups)]
    for start, end in pairwise(cuts):
        yield groups[start:end]


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


def _price_groups(
    problem: Problem,
    space: Space,
    frontier: _Frontier,
    seen: Findings,
    outcome: _Outcome,
    which: Ints,
    limit_bytes: float,
) -> None:
    """Price those plans of some groups whose bounds leave them a chance, the least bound first."""
    owner = frontier.owner[which]
    kinds, of_group = space.kinds(frontier.cells, frontier.groups.take(which), owner)
    costs = kind_costs(problem, kinds, first_layers(space, kinds))
    lowest, least_bytes = kind_bounds(problem, space, costs)
    lowest = lowest / kinds.global_batch
    fitting = least_bytes <= limit_bytes
    seen.skip(lowest[fitting])
    chances = np.flatnonzero(fitting)
    chances = chances[np.argsort(lowest[chances], kind="stable")]
    done, size = 0, FIRST_PRICED
    while done < len(chances) and lowest[chances[done]] < seen.bar:
        part = chances[done : done + size]
        part = part[lowest[part] < seen.bar]
        _price_kinds(
            problem, space, seen, outcome, costs.of(kinds.take(part), part), owner[of_group][part], limit_bytes
        )
        done, size = done + len(part), min(4 * size, BLOCK_KINDS)


def _price_kinds(
    problem: Problem,
    space: Space,
    seen: Findings,
    outcome: _Outcome,
    kinds: KindCosts,
    owner: Ints,
    limit_bytes: float,
) -> None:
    """Price those plans of some kinds whose bounds leave them a chance, the least bound first."""
    plans, of_kind = space.layouts_of(kinds.batch)
    costs, spread = kinds.of(plans, of_kind), spread_of(problem.model, plans)
    bound = costs.step_s(plans.vp, spread, overlaps=problem.framework.p2p_overlap) / plans.global_batch
    fitting = costs.memory_bytes(spread) <= limit_bytes
    seen.bounded += len(plans)
    seen.skip(bound[fitting])
    some = np.flatnonzero(fitting & (bound < seen.bar))
    some = some[legal(space.rules, space.setting, plans.take(some))]
    some = some[np.argsort(bound[some], kind="stable")]
    done, size = 0, FIRST_PRICED
    while done < len(some) and bound[some[done]] < seen.bar:
        part = some[done : done + size]
        part = part[bound[part] < seen.bar]
        _price(problem, seen, outcome, plans.take(part), owner[of_kind[part]])
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


def _closest(problem: Problem, space: Space, frontier: _Frontier) -> RankedPlan | None:
    """The legal plan that needs least memory."""
    found: RankedPlan | None = None
    groups = np.argsort(frontier.least_bytes, kind="stable")
    for some in _blocks(groups, frontier):
        if found and frontier.least_bytes[some].min() >= found.memory_bytes:
            break
        kinds, _ = space.kinds(frontier.cells, frontier.groups.take(some), frontier.owner[some])
        plans, of_kind = space.layouts_of(kinds)
        least = kind_costs(problem, kinds).of(plans, of_kind).memory_bytes(spread_of(problem.model, plans))
        lawful = np.flatnonzero(legal(space.rules, space.setting, plans))
        lawful = lawful[np.argsort(least[lawful], kind="stable")]
        for at in range(0, len(lawful), MOST_PRICED):
            part = lawful[at : at + MOST_PRICED]
            if found and least[part[0]] >= found.memory_bytes:
                break
            costs = estimate(problem, plans.take(part))
            nearest = int(np.argmin(costs.memory_bytes))
            if found is None or costs.memory_bytes[nearest] < found.memory_bytes:
                found = ranked(problem, costs, [nearest])[0]
    return found


def _within(seen: Findings, plans: tuple[RankedPlan, ...]) -> tuple[RankedPlan, ...]:
    """Those that the bounds leave none out of."""
    return tuple(one for one in plans if one.step_s / one.plan.global_batch <= seen.bar)


def _ranked_leaders(problem: Problem, leaders: Leaders) -> tuple[RankedPlan, ...]:
    if leaders.batch is None:
        return ()
    return ranked(problem, estimate(problem, leaders.batch), range(len(leaders)))


def _first_of_cells(problem: Problem, leaders: Leaders) -> tuple[RankedPlan, ...]:
    """The first plan of each cell."""
    if leaders.batch is None:
        return ()
    first, _ = leaders.batch.distinct(*AXES)
    batch = leaders.batch.take(np.sort(first))
    return ranked(problem, estimate(problem, batch), range(len(batch)))
