"""What is the fastest plan?  An Optuna study whose trials are cells, taken by their bounds until none can be better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState

from autoplan.cost.estimate import estimate
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.result import OOM_Z, RISKY_Z, VERDICTS, Certificate, RankedPlan, SearchResult
from autoplan.rules import legal
from search.bounds import KindCosts, first_layers, group_bounds, kind_bounds, kind_costs, spread_of
from search.ranking import TIE, Leaders, ordering, ranked, seconds_per_sequence
from search.sampler import AXES as CELL_AXES
from search.sampler import CellSampler
from search.space import Cell, Space

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FITS, RISKY = VERDICTS.index("fits"), VERDICTS.index("risky")
SAFE_Z = {FITS: RISKY_Z, RISKY: OOM_Z}  # a plan of the verdict is no nearer to the capacity
KEPT = 1000  # plans that a result ranks
KEPT_WINNERS = 20_000  # best plans of cells, of which a result tells one a cell
MARGIN = 0.05  # plans so much slower than the best are found too, all of them
# Kinds bounded in one go: enough that numpy's cost per call is small, few enough that the arrays stay in the cache.
# Few of them, and few prices, until there is a plan to beat.
FIRST_KINDS, BLOCK_KINDS = 128, 8192
FIRST_PRICED, MOST_PRICED = 32, 2048
ROOM = 0.9  # of the memory, by its bound, for a plan that is priced to have something to beat

Progress = Callable[[int, int], None]  # cells done, cells in all


def open_study(sampler: CellSampler) -> optuna.Study:
    """An empty study in memory that makes seconds per sequence small; Optuna's own messages are kept quiet."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler, direction="minimize")


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


@dataclass(slots=True)
class _Findings:
    """What a search has seen so far of plans that are as safe as `wanted`."""

    wanted: int
    margin: float
    plans: Leaders = field(default_factory=lambda: Leaders(KEPT))
    winners: Leaders = field(default_factory=lambda: Leaders(KEPT_WINNERS))  # of the cells, block by block
    best: float = np.inf  # seconds per sequence
    left: float = np.inf  # the least bound of what was not priced for it
    bounded: int = 0
    priced: int = 0
    found: dict[int, int] = field(default_factory=lambda: {FITS: 0, RISKY: 0})
    expanded: int = 0

    @property
    def bar(self) -> float:
        """What a bound has to be below to be worth a price."""
        # A plan whose bound is its price is below it, too.
        return self.best * (1.0 + self.margin) * (1.0 + 2 * TIE)

    def skip(self, bound: Floats) -> None:
        """Remember the least of those bounds that are not below the bar."""
        self.left = min(self.left, float(bound[bound >= self.bar].min(initial=np.inf)))


def search(problem: Problem, space: Space, progress: Progress | None = None, *, margin: float = MARGIN) -> SearchResult:
    """The best plans of `space`: all those within `margin` of the best, which is proven to be the best.

    Plans that fit are ranked; where none does, those that may run out of memory; where there are none of these either
    the plan that is least too large is told.  An empty space gives an empty result.
    """
    frontier = _Frontier.of(problem, space)
    for wanted in (FITS, RISKY):
        seen = _Findings(wanted=wanted, margin=margin)
        _explore(problem, space, frontier, seen, progress)
        if seen.found[wanted]:
            break
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
        proven=bool(ranking),
        limits=space.describe(),
    )
    rivals = _first_of_cells(problem, seen.winners)
    closest = None if ranking else _closest(problem, space, frontier)
    return SearchResult(ranked=ranking, rivals=rivals, closest=closest, certificate=certificate)


def _explore(problem: Problem, space: Space, frontier: _Frontier, seen: _Findings, progress: Progress | None) -> None:
    """Price cells in the order of their bounds until none is below the bar."""
    limit_bytes = problem.capacity_bytes * np.exp(SAFE_Z[seen.wanted] * problem.calibration.memory_spread)
    usable = np.flatnonzero(frontier.least_bytes <= limit_bytes)
    cell_bound = np.full(len(frontier.cells), np.inf)
    np.minimum.at(cell_bound, frontier.owner[usable], frontier.bound[usable])
    sampler = CellSampler(space.setting.num_devices)
    study = open_study(sampler)
    order = np.argsort(cell_bound, kind="stable")
    order = order[np.isfinite(cell_bound[order])]
    groups = usable[np.lexsort((frontier.bound[usable], cell_bound[frontier.owner[usable]]))]
    place = np.empty(len(frontier.cells), dtype=np.int64)
    place[order] = np.arange(len(order))
    _dive(problem, space, frontier, seen, groups, limit_bytes)
    done, size = 0, FIRST_KINDS
    while done < len(order) and cell_bound[order[done]] < seen.bar:
        # As many cells as have a block of kinds below the bar.
        waiting = groups[(place[frontier.owner[groups]] >= done) & (frontier.bound[groups] < seen.bar)]
        waiting = waiting[np.argsort(place[frontier.owner[waiting]], kind="stable")]
        reached = np.searchsorted(np.cumsum(frontier.kinds[frontier.owner[waiting]]), size)
        last = int(place[frontier.owner[waiting[min(int(reached), len(waiting) - 1)]]])
        block = order[done : last + 1]
        outcome = _Outcome(len(frontier.cells))
        mine = waiting[place[frontier.owner[waiting]] <= last]
        for some in _blocks(mine[np.argsort(frontier.bound[mine], kind="stable")], frontier):
            _price_groups(problem, space, frontier, seen, outcome, some[frontier.bound[some] < seen.bar], limit_bytes)
        _tell(study, sampler, frontier, block, cell_bound, outcome)
        seen.expanded += len(block)
        done, size = done + len(block), min(8 * size, BLOCK_KINDS)
        if progress:
            progress(done, len(frontier.cells))
    seen.skip(frontier.bound[usable])
    if progress:
        progress(len(frontier.cells), len(frontier.cells))


def _dive(
    problem: Problem, space: Space, frontier: _Frontier, seen: _Findings, groups: Ints, limit_bytes: float
) -> None:
    """Price one plan of every cell, so that there is something to beat: the one that its bounds like best."""
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


def _price_groups(
    problem: Problem,
    space: Space,
    frontier: _Frontier,
    seen: _Findings,
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
    seen: _Findings,
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


def _price(problem: Problem, seen: _Findings, outcome: _Outcome, batch: PlanBatch, owner: Ints) -> None:
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


def _tell(
    study: optuna.Study,
    sampler: CellSampler,
    frontier: _Frontier,
    block: Ints,
    cell_bound: Floats,
    outcome: _Outcome,
) -> None:
    """A trial for every cell of a block; one of which no plan had a chance is pruned."""
    sampler.queue(frontier.cells[cell] for cell in block)
    for cell in block:
        trial = study.ask(fixed_distributions=sampler.distributions)
        trial.set_user_attr("bound", float(cell_bound[cell]))
        if int(cell) not in outcome.plan:
            study.tell(trial, state=TrialState.PRUNED)
            continue
        # At most zero means feasible: how far the plan that needs least memory is from a safe fit.
        trial.set_constraint("memory", float(outcome.nearest_z[cell] - RISKY_Z))
        trial.set_user_attr("plan", outcome.plan[int(cell)])
        study.tell(trial, float(outcome.objective[cell]))


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


def _within(seen: _Findings, plans: tuple[RankedPlan, ...]) -> tuple[RankedPlan, ...]:
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
    first, _ = leaders.batch.distinct(*CELL_AXES)
    batch = leaders.batch.take(np.sort(first))
    return ranked(problem, estimate(problem, batch), range(len(batch)))
