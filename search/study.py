"""What is the fastest plan?  An Optuna study whose trials are cells; all plans inside a cell are priced at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import optuna
from numpy.typing import NDArray

from autoplan.cost.estimate import estimate
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.result import RISKY_Z, VERDICTS, Certificate, RankedPlan, SearchResult
from search.ranking import Leaders, ordering, ranked, seconds_per_sequence
from search.sampler import CellSampler
from search.space import Cell, Space

Ints = NDArray[np.int64]

FITS, RISKY = VERDICTS.index("fits"), VERDICTS.index("risky")
USABLE = (FITS, RISKY)
KEPT = 1000  # plans that a result ranks
# Plans priced in one go: enough that numpy's cost per call is small, few enough that the arrays stay in the cache.
BLOCK_PLANS = 8192

Progress = Callable[[int, int], None]  # cells done, cells in all


def open_study(sampler: CellSampler) -> optuna.Study:
    """An empty study in memory that makes seconds per sequence small; Optuna's own messages are kept quiet."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=sampler, direction="minimize")


@dataclass(slots=True)
class _Findings:
    """What a search has seen so far."""

    plans: dict[int, Leaders]  # by verdict
    winners: dict[int, Leaders]  # of the cells, by verdict
    found: dict[int, int]
    closest: RankedPlan | None = None
    cells: int = 0
    priced: int = 0


def search(problem: Problem, space: Space, progress: Progress | None = None) -> SearchResult:
    """The best plans of `space`, all of which are priced.

    Plans that fit are ranked; where none does, those that may run out of memory; where there are none of these either
    the plan that is least too large is told.  An empty space gives an empty result.
    """
    cells = space.cells()
    sampler = CellSampler(space.setting.num_devices)
    study = open_study(sampler)
    seen = _Findings(
        plans={kind: Leaders(KEPT) for kind in USABLE},
        winners={kind: Leaders(KEPT) for kind in USABLE},
        found=dict.fromkeys(USABLE, 0),
    )
    done = 0
    for block in space.blocks(cells, BLOCK_PLANS):
        batch, owner = space.plans(block)
        if len(batch):
            _price_block(problem, study, sampler, seen, block, batch, owner)
        done += len(block)
        if progress:
            progress(done, len(cells))
    kind = FITS if seen.found[FITS] else RISKY
    ranking, rivals = (_ranked_leaders(problem, pools[kind]) for pools in (seen.plans, seen.winners))
    certificate = Certificate(
        cells=seen.cells,
        plans=seen.priced,
        fitting=seen.found[FITS],
        risky=seen.found[RISKY],
        best_step_s=ranking[0].step_s if ranking else None,
        proven=bool(ranking),
        limits=space.describe(),
    )
    closest = None if ranking else seen.closest
    return SearchResult(ranked=ranking, rivals=rivals, closest=closest, certificate=certificate)


def _price_block(
    problem: Problem,
    study: optuna.Study,
    sampler: CellSampler,
    seen: _Findings,
    block: Sequence[Cell],
    batch: PlanBatch,
    owner: Ints,
) -> None:
    """Price the plans of some cells, tell the study of each cell, and keep the best."""
    costs = estimate(problem, batch)
    objective, verdict = seconds_per_sequence(costs), costs.verdict
    order = ordering(objective, batch)
    # Rows of each cell from its best plan to its worst, those of the better verdict first.
    order = order[np.lexsort((verdict[order], owner[order]))]
    winners = order[np.flatnonzero(np.diff(owner[order], prepend=-1))]
    nearest_z = np.full(len(block), np.inf)
    np.minimum.at(nearest_z, owner, costs.oom_z)

    sampler.queue(block[int(owner[winner])] for winner in winners)
    for winner in winners:
        trial = study.ask(fixed_distributions=sampler.distributions)
        # At most zero means feasible: how far the plan that needs least memory is from a safe fit.
        trial.set_constraint("memory", float(nearest_z[owner[winner]] - RISKY_Z))
        trial.set_user_attr("plan", msgspec.to_builtins(batch.plan(int(winner))))
        study.tell(trial, float(objective[winner]))

    for kind in USABLE:
        for pool, rows in ((seen.plans[kind], np.arange(len(batch))), (seen.winners[kind], winners)):
            rows = rows[verdict[rows] == kind]
            pool.offer(objective[rows], batch.take(rows))
        seen.found[kind] += int((verdict == kind).sum())
    seen.cells += len(winners)
    seen.priced += len(batch)
    nearest = int(np.argmin(costs.memory_bytes))
    if seen.closest is None or costs.memory_bytes[nearest] < seen.closest.memory_bytes:
        seen.closest = ranked(problem, costs, [nearest])[0]


def _ranked_leaders(problem: Problem, leaders: Leaders) -> tuple[RankedPlan, ...]:
    if leaders.batch is None:
        return ()
    return ranked(problem, estimate(problem, leaders.batch), range(len(leaders)))
