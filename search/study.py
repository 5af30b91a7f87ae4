"""Best-first search for the fastest plan, or for the Pareto front in several measures.

Cells are priced in the order of their bounds, round by round, until the results rule out all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autoplan.base.errors import NoPlanError
from autoplan.cost.estimate import estimate
from autoplan.search.blocks import Block, BlockOutcome, BlockResult, LocalRounds
from autoplan.search.cells import DEGREES
from autoplan.search.findings import FITS, RISKY, Findings, Front, Incumbents, NearBest
from autoplan.search.frontier import Frontier, OpenKinds, best_first
from autoplan.search.objectives import Measure
from autoplan.search.pricing import closest, price_block, price_candidates
from autoplan.search.ranking import ranked
from autoplan.search.sampler import WARM_CELLS, Sampling
from autoplan.search.space import Space
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Certificate, RankedPlan, SearchResult

if TYPE_CHECKING:
    from autoplan.search.ledger import Ledger

MARGIN = 0.05  # all plans up to this much slower than the best are found, too
FIRST_KINDS, GROWTH = 128, 8  # few kinds until there is a plan to beat; next round relative to all before
BLOCK_KINDS = 8192  # kinds priced by one worker at a time
ROUND_BLOCKS = 8  # blocks per round, shared by workers; a block's results are used from the next round on
GRACE_S = 8.0  # without a heartbeat for this long a worker counts as dead

Progress = Callable[[int, int], None]  # cells done, cells in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A search that other workers may join, stored at `url` (see `search.storage.opened`)."""

    url: str
    name: str | None = None  # None: derived from the problem, so that identical searches join
    grace_s: float = GRACE_S


def search(
    problem: Problem,
    space: Space,
    progress: Progress | None = None,
    *,
    measures: Sequence[Measure] = ("time",),
    margin: float = MARGIN,
    shared: Shared | None = None,
    sampling: Sampling | None = None,
) -> SearchResult:
    """Find the proven best plans of `space` in the measures.

    With time as the only measure these are all plans within `margin` of the fastest; otherwise the Pareto front, sorted
    by the first measure.

    Plans that fit are ranked; if there are none, plans that may run out of memory; if there are none of these either,
    the result has the plan nearest to fitting.  An empty space gives an empty result.  Workers may join a `shared`
    search at any time and all get the same result.  With `sampling` the result is the best of the cells proposed by a
    sampler, with the gap that the bounds leave open.
    """
    frontier = Frontier.of(problem, space, measures)
    run = _Search(frontier, margin, progress)
    if sampling:
        with _joined(frontier, shared, margin=margin, sampler=sampling.name) as ledger:
            findings = run.sample(ledger, sampling)
        if not findings.counts[VERDICTS[FITS]]:
            raise NoPlanError(
                f"none of the {findings.counts['expanded']} cells that {sampling.name} proposed holds a plan that "
                "fits: give more --trials, or --sampler bound, which looks at all of them"
            )
    elif shared:
        with _joined(frontier, shared, margin=margin, sampler="bound") as ledger:
            findings = run.best_first(ledger)
    else:
        findings = run.best_first(LocalRounds())
    return _result(frontier, findings)


@contextmanager
def _joined(frontier: Frontier, shared: Shared | None, **about: object) -> Iterator[Ledger]:
    """Join the study of a problem, in memory if not `shared`; only identical searches can join."""
    from autoplan.search.ledger import Ledger
    from autoplan.search.storage import identity, join_study, opened

    problem, space = frontier.problem, frontier.space
    if frontier.measures != ("time",):
        about = {"measures": " ".join(frontier.measures)}
    with opened(shared.url if shared else None) as storage:
        attributes = identity(problem, space, **about) if shared else {}
        name = shared.name or f"{problem.model.name}-{attributes['problem']}" if shared else None
        study, made_here = join_study(storage, name, attributes)
        grace_s = shared.grace_s if shared else math.inf
        yield Ledger(study, storage, frontier.cells, made_here=made_here, grace_s=grace_s)


class _Search:
    """Search of a space by a worker."""

    def __init__(self, frontier: Frontier, margin: float, progress: Progress | None) -> None:
        self._frontier, self._margin = frontier, margin
        self._progress = progress or (lambda done, total: None)
        self._candidates: dict[int, Findings] = {}
        self._open_kinds: dict[int, OpenKinds] = {}
        self._known: dict[tuple[int, int], Incumbents] = {}

    def best_first(self, rounds: LocalRounds | Ledger) -> Findings:
        """Price cells in the order of their bounds until the results rule out the others."""
        findings = Findings(self._no_incumbents())

        def next_round(results: list[BlockResult]) -> tuple[Block, ...]:
            nonlocal findings
            for verdict in (FITS, RISKY):
                priced = [result for result in results if result.block.verdict == verdict]
                findings, open_kinds = self._merged(verdict, priced), self._open(verdict)
                cells = {cell for result in priced for cell in result.block.cells}
                self._progress(len(cells), len(self._frontier.cells))
                number = 1 + max((result.block.round for result in priced), default=0)
                self._known[verdict, number] = findings.incumbents.emptied()
                if blocks := _next_round(open_kinds, findings.incumbents, cells, number):
                    return blocks
                self._skip_rest(open_kinds, findings.incumbents)
                if findings.counts[VERDICTS[verdict]]:
                    break
            self._progress(len(self._frontier.cells), len(self._frontier.cells))
            return ()

        def price(block: Block) -> BlockOutcome:
            incumbents = self._incumbents_before(block, rounds)
            return price_block(self._frontier, self._open(block.verdict), incumbents, block)

        rounds.run(next_round, price)
        return findings

    def sample(self, ledger: Ledger, sampling: Sampling) -> Findings:
        """Price the cells proposed by a sampler, each independently."""
        frontier = self._frontier
        usable = frontier.usable(FITS)
        bound_of_cell = frontier.cell_bounds(frontier.owner[usable], frontier.bounds[usable])[:, 0]

        def price(cell: int) -> BlockOutcome:
            nothing = self._no_incumbents()
            open_kinds = OpenKinds.of(frontier, FITS, usable[frontier.owner[usable] == cell], nothing)
            return price_block(frontier, open_kinds, nothing, Block(verdict=FITS, round=1, cells=(cell,)))

        first = np.argsort(bound_of_cell, kind="stable")[:WARM_CELLS].tolist() if sampling.warm else []
        packed = ledger.sample(sampling, first, price)
        findings = Findings(self._no_incumbents())
        for text in packed.values():
            findings.add_packed(text, frontier.space.placement)
        findings.incumbents.skip(np.delete(bound_of_cell, list(packed))[:, None])
        return findings

    def _no_incumbents(self) -> Incumbents:
        measures = self._frontier.measures
        return NearBest(self._margin) if measures == ("time",) else Front(len(measures))

    def _candidate_findings(self, verdict: int) -> Findings:
        """Return the candidates to beat; they may be the best of their cells, and are priced again there."""
        if verdict not in self._candidates:
            findings = Findings(self._no_incumbents())
            price_candidates(self._frontier, verdict, findings)
            findings.incumbents = findings.incumbents.emptied()
            self._candidates[verdict] = findings
        return self._candidates[verdict]

    def _open(self, verdict: int) -> OpenKinds:
        """Return the kinds that the candidates do not rule out."""
        if verdict not in self._open_kinds:
            incumbents = self._candidate_findings(verdict).incumbents
            groups = self._frontier.usable(verdict, incumbents)
            self._open_kinds[verdict] = OpenKinds.of(self._frontier, verdict, groups, incumbents)
        return self._open_kinds[verdict]

    def _merged(self, verdict: int, results: Sequence[BlockResult]) -> Findings:
        candidates = self._candidate_findings(verdict)
        findings = Findings(candidates.incumbents.emptied())
        if candidates.winners.batch is not None:
            findings.winners.offer(candidates.winners.objective, candidates.winners.batch)
        for result in results:
            findings.add_packed(result.findings, self._frontier.space.placement)
        return findings

    def _incumbents_before(self, block: Block, rounds: LocalRounds | Ledger) -> Incumbents:
        """Return the incumbents at the start of a block's round; a block must not depend on later results."""
        key = block.verdict, block.round
        if key not in self._known:
            before = [
                result
                for result in rounds.results()
                if result.block.verdict == block.verdict and result.block.round < block.round
            ]
            self._known[key] = self._merged(block.verdict, before).incumbents.emptied()
        return self._known[key].emptied()

    def _skip_rest(self, open_kinds: OpenKinds, incumbents: Incumbents) -> None:
        """Record the smallest bound of the kinds that were not priced."""
        incumbents.skip(open_kinds.bounds[incumbents.rules_out(open_kinds.bounds)])
        incumbents.skip(np.full((1, len(self._frontier.measures)), open_kinds.least_skipped))


def _next_round(
    open_kinds: OpenKinds, incumbents: Incumbents, priced: Collection[int], number: int
) -> tuple[Block, ...]:
    """Return the best open cells, more in every round, in blocks of about `BLOCK_KINDS` kinds."""
    num_left = open_kinds.count(np.flatnonzero(~incumbents.rules_out(open_kinds.bounds)))
    done = int(open_kinds.count()[list(priced)].sum())
    num_left[list(priced)] = 0
    cells = best_first(open_kinds.cell_bounds)
    cells = cells[num_left[cells] > 0]
    if not len(cells):
        return ()
    total = np.cumsum(num_left[cells])
    size = min(max(GROWTH * done, FIRST_KINDS), ROUND_BLOCKS * BLOCK_KINDS)
    cells = cells[: np.searchsorted(total, size) + 1]
    cuts = np.flatnonzero(np.diff(total[: len(cells)] // BLOCK_KINDS)) + 1
    return tuple(
        Block(verdict=open_kinds.verdict, round=number, cells=tuple(part.tolist())) for part in np.split(cells, cuts)
    )


# -- the answer --------------------------------------------------------------------------------------------------------


def _result(frontier: Frontier, findings: Findings) -> SearchResult:
    problem, incumbents, counts = frontier.problem, findings.incumbents, findings.counts
    plans = _ranked(problem, incumbents.batch)
    is_front = not isinstance(incumbents, NearBest)
    least_left, proven = None, bool(plans)
    if isinstance(incumbents, NearBest):
        # All cells whose plans are completely known by the bounds.
        plans = tuple(plan for plan in plans if plan.s_per_sequence <= incumbents.bar)
        skipped = incumbents.least_skipped
        least_left = skipped / incumbents.best if plans and math.isfinite(skipped) else None
        proven = bool(plans) and skipped >= incumbents.best
    certificate = Certificate(
        cells=len(frontier.cells),
        expanded=counts["expanded"],
        plans=frontier.space.size(frontier.cells),
        bounded=counts["bounded"],
        priced=counts["priced"],
        fitting=counts[VERDICTS[FITS]],
        risky=counts[VERDICTS[RISKY]],
        best_step_s=min((plan.step_s for plan in (plans if is_front else plans[:1])), default=None),
        least_left=least_left,
        proven=proven,
        limits=frontier.space.describe(),
        best_in=tuple(frontier.measures) if is_front else (),
    )
    rivals = plans if is_front else _ranked(problem, _first_of_cells(findings.winners.batch))
    return SearchResult(
        ranked=plans, rivals=rivals, closest=None if plans else closest(frontier), certificate=certificate
    )


def _ranked(problem: Problem, batch: PlanBatch | None) -> tuple[RankedPlan, ...]:
    return () if batch is None else ranked(problem, estimate(problem, batch), range(len(batch)))


def _first_of_cells(batch: PlanBatch | None) -> PlanBatch | None:
    if batch is None:
        return None
    first, _ = batch.distinct(*DEGREES)
    return batch.take(np.sort(first))
