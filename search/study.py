"""What is the fastest plan?  An Optuna study whose trials are cells, taken by their bounds until none can be better."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np

from autoplan.base.errors import NoPlanError
from autoplan.cost.estimate import estimate
from autoplan.search.findings import FITS, RISKY, Findings, together
from autoplan.search.ledger import AXES, GRACE_S, Block, BlockOutcome, Ledger, Told
from autoplan.search.pricing import BLOCK_KINDS, Frontier, Reach, closest, dive, price_block
from autoplan.search.ranking import Leaders, ranked
from autoplan.search.sampler import WARM_CELLS, Sampling
from autoplan.search.space import Cell, Space
from autoplan.search.storage import identity, join_study, opened
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Certificate, RankedPlan, SearchResult

MARGIN = 0.05  # plans so much slower than the best are found too, all of them
FIRST_KINDS = 128  # of the first round; few of them until there is a plan to beat
ROUND_BLOCKS = 8  # of a round, which workers share: what one block finds helps the next round, not the next block

Progress = Callable[[int, int], None]  # cells done, cells in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Where a search is kept that others may join: `url` as `search.storage.opened` reads it."""

    url: str
    name: str | None = None  # None: after the problem, so that all who ask the same join
    grace_s: float = GRACE_S


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
    frontier = Frontier.of(problem, space)
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
    problem: Problem, space: Space, frontier: Frontier, ledger: Ledger, margin: float, progress: Progress | None
) -> Findings:
    """Price cells in the order of their bounds until none is below the bar."""
    seen = Findings(wanted=FITS, margin=margin)
    dived = cache(lambda wanted: dive(problem, space, frontier, wanted, margin))

    @cache
    def reach_of(wanted: int) -> Reach:
        return Reach.of(problem, space, frontier, wanted, frontier.usable(problem, wanted), dived(wanted).bar)

    def next_round(told: list[Told]) -> tuple[Block, ...]:
        nonlocal seen
        for wanted in (FITS, RISKY):
            mine = [one for one in told if one.block.wanted == wanted]
            parts = (Findings.unpacked(one.found, wanted, margin, space.placement) for one in mine)
            seen, reach = together((dived(wanted), *parts), wanted, margin), reach_of(wanted)
            taken = {cell for one in mine for cell in one.block.cells}
            if progress:
                progress(len(taken), len(frontier.cells))
            if blocks := _next_round(reach, seen, taken):
                return blocks
            seen.skip(np.append(reach.bound, reach.left))
            if seen.found[wanted]:
                break
        if progress:
            progress(len(frontier.cells), len(frontier.cells))
        return ()

    def price(block: Block) -> BlockOutcome:
        return price_block(problem, space, reach_of(block.wanted), block, margin)

    ledger.settle(next_round, price)
    return seen


def _sample(
    problem: Problem, space: Space, frontier: Frontier, ledger: Ledger, sampling: Sampling, margin: float
) -> Findings:
    """Price the cells that a sampler proposes, each for itself."""
    usable = frontier.usable(problem, FITS)
    cell_bound = frontier.cell_bound(usable)

    def price(cell: int) -> BlockOutcome:
        block = Block(wanted=FITS, best=np.inf, cells=(cell,))
        groups = usable[frontier.owner[usable] == cell]
        return price_block(problem, space, Reach.of(problem, space, frontier, FITS, groups, np.inf), block, margin)

    first = np.argsort(cell_bound, kind="stable")[:WARM_CELLS].tolist() if sampling.warm else []
    found = ledger.sample(sampling, first, price)
    seen = together((Findings.unpacked(one, FITS, margin, space.placement) for one in found.values()), FITS, margin)
    seen.left = min(seen.left, float(np.delete(cell_bound, list(found)).min(initial=np.inf)))
    return seen


def _next_round(reach: Reach, seen: Findings, taken: Collection[int]) -> tuple[Block, ...]:
    """The cells below the bar with the least bounds: more with every round, in blocks of about `BLOCK_KINDS` kinds."""
    is_left = reach.cell_bound < seen.bar
    is_left[list(taken)] = False
    cells = np.argsort(reach.cell_bound, kind="stable")
    cells = cells[is_left[cells]]
    if not len(cells):
        return ()
    done = int(reach.size(np.inf)[list(taken)].sum())
    upto = np.cumsum(reach.size(seen.bar)[cells])
    size = min(max(8 * done, FIRST_KINDS), ROUND_BLOCKS * BLOCK_KINDS)
    cells = cells[: np.searchsorted(upto, size) + 1]
    cuts = np.flatnonzero(np.diff(upto[: len(cells)] // BLOCK_KINDS)) + 1
    parts = np.split(cells, cuts)
    return tuple(Block(wanted=reach.wanted, best=seen.best, cells=tuple(part.tolist())) for part in parts)


def _result(problem: Problem, space: Space, frontier: Frontier, seen: Findings) -> SearchResult:
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
    nearest = None if ranking else closest(problem, space, frontier)
    return SearchResult(ranked=ranking, rivals=rivals, closest=nearest, certificate=certificate)


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
