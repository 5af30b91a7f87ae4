"""Pricing of the plans that their bounds do not rule out, best bounds first."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.estimate import estimate, memory_oom_z
from autoplan.frameworks.common.rules import legal
from autoplan.search.blocks import Block, BlockOutcome, CellOutcome
from autoplan.search.bounds import first_layers, kind_bounds, kind_costs, plan_bounds
from autoplan.search.findings import Findings, Incumbents
from autoplan.search.frontier import Frontier, OpenKinds, best_first, limit_bytes
from autoplan.search.objectives import measure_bounds, measured
from autoplan.search.ranking import ordering, ranked
from autoplan.spec.estimate import OOM_Z, RISKY_Z, VERDICTS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.search_result import RankedPlan

FIRST_PRICED = 256  # plans per call, which may rule out others; then twice as many in every call
MAX_PRICED = 2048  # plans per call in the search for the plan nearest to fitting
CANDIDATE_GROUPS, FIRST_CANDIDATES = 1024, 64  # plans
CANDIDATES_OF_KIND = 64  # plans
ROOM = 0.9  # share of the memory, by its bound, that candidates to beat may need


# -- plans to beat -----------------------------------------------------------------------------------------------------


def price_candidates(frontier: Frontier, verdict: int, findings: Findings) -> None:
    """Price promising plans of the groups with the smallest bounds until one is as safe as `verdict`."""
    done, size = 0, CANDIDATE_GROUPS
    while not len(findings.winners) and len(groups := frontier.first(verdict, done + size)[done:]):
        plans = _promising(frontier, groups, ROOM * limit_bytes(frontier.problem, verdict))
        for at in range(0, len(plans), FIRST_CANDIDATES):
            costs = estimate(frontier.problem, plans.take(np.arange(at, min(at + FIRST_CANDIDATES, len(plans)))))
            good = np.flatnonzero(costs.verdict == verdict)
            if len(good):
                values, batch = measured(frontier.problem, frontier.measures, costs)[good], costs.batch.take(good)
                findings.winners.offer(values[:, 0], batch)
                findings.incumbents.offer(values, batch)
                break
        done, size = done + size, 2 * size


def _promising(frontier: Frontier, groups: Ints, room_bytes: float) -> PlanBatch:
    """Return the legal plan of smallest bound that leaves room, from every cell's fastest kind, smallest first."""
    problem, space = frontier.problem, frontier.space
    kinds, of_group = frontier.kinds_of(groups)
    costs = kind_costs(problem, kinds)
    lowest, _ = kind_bounds(problem, space, costs, room_bytes)
    finite = np.flatnonzero(np.isfinite(lowest))
    cell = frontier.owner[groups][of_group[finite]]
    costs = costs.take(finite[_first_of(cell, lowest[finite] / kinds.global_batch[finite])])
    parts, bounds = [costs.batch.take(np.empty(0, dtype=np.int64))], [np.empty(0)]
    for bounded in plan_bounds(problem, space, costs):
        step_s = np.where(bounded.memory_bytes <= room_bytes, bounded.step_s, np.inf)
        best = np.argsort(step_s, axis=1, kind="stable")[:, :CANDIDATES_OF_KIND]
        kind, rank = np.nonzero(np.isfinite(np.take_along_axis(step_s, best, axis=1)))
        plans = space.plans_of(costs.batch, bounded.inside, bounded.kinds[kind], best[kind, rank])
        lawful = np.flatnonzero(legal(space.rules, space.workload, plans))
        lawful = lawful[_first_of(kind[lawful], rank[lawful])]
        parts.append(plans.take(lawful))
        bounds.append(step_s[kind[lawful], best[kind[lawful], rank[lawful]]] / parts[-1].global_batch)
    return PlanBatch.concatenate(parts).take(np.argsort(np.concatenate(bounds), kind="stable"))


def _first_of(owner: Ints, value: Floats | Ints) -> Ints:
    order = np.lexsort((value, owner))
    return order[np.flatnonzero(np.diff(owner[order], prepend=-1))]


# -- blocks of cells ---------------------------------------------------------------------------------------------------


def price_block(frontier: Frontier, open_kinds: OpenKinds, incumbents: Incumbents, block: Block) -> BlockOutcome:
    """Price the plans in a block's cells that are ruled out neither by `incumbents` nor by each other."""
    pricer = _BlockPricer(frontier, block, incumbents)
    is_of_block = np.zeros(len(frontier.cells), dtype=np.bool_)
    is_of_block[list(block.cells)] = True
    rows = np.flatnonzero(is_of_block[open_kinds.owner])
    for part in pricer.not_ruled_out(open_kinds.bounds[rows]):
        pricer.price_kinds(open_kinds.kinds.take(rows[part]), open_kinds.owner[rows[part]])
    cells = {cell: pricer.outcome(cell, float(open_kinds.cell_bounds[cell, 0])) for cell in block.cells}
    return BlockOutcome(findings=pricer.findings.packed(), cells=cells)


class _BlockPricer:
    """Prices the plans of one block and keeps the best overall and per cell."""

    def __init__(self, frontier: Frontier, block: Block, incumbents: Incumbents) -> None:
        num_cells = len(frontier.cells)
        self.frontier, self.verdict = frontier, block.verdict
        self.findings = Findings(incumbents)
        self.findings.counts["expanded"] = len(block.cells)
        # Per cell: verdict, first measure, best plan, and distance from fitting.
        self.verdict_of = np.full(num_cells, len(VERDICTS))
        self.value_of = np.full(num_cells, np.inf)
        self.nearest_z = np.full(num_cells, np.inf)
        self.plan_of: dict[int, object] = {}

    def outcome(self, cell: int, bound: float) -> CellOutcome:
        """Return the outcome of a cell; it is pruned if all its plans were ruled out."""
        attributes: dict[str, object] = {"bound": bound}
        if cell not in self.plan_of:
            return CellOutcome(value=None, constraints={}, attributes=attributes)
        # Feasible at zero or less: distance of the plan with the least memory from a safe fit.
        constraints = {"memory": float(self.nearest_z[cell] - RISKY_Z)}
        attributes["plan"] = self.plan_of[cell]
        return CellOutcome(value=float(self.value_of[cell]), constraints=constraints, attributes=attributes)

    def not_ruled_out(self, bounds: Floats) -> Iterator[Ints]:
        """Yield rows of `bounds` in order and in growing batches, without those ruled out."""
        incumbents, done, size = self.findings.incumbents, 0, FIRST_PRICED
        while done < len(bounds):
            part = np.arange(done, min(done + size, len(bounds)))
            is_out = incumbents.rules_out(bounds[part])
            incumbents.skip(bounds[part[is_out]])
            if not is_out.all():
                yield part[~is_out]
            done, size = done + size, 2 * size

    def price_kinds(self, kinds: PlanBatch, owner: Ints) -> None:
        """Price the plans of some kinds that their bounds do not rule out, best bounds first."""
        frontier, incumbents = self.frontier, self.findings.incumbents
        problem, space = frontier.problem, frontier.space
        most_bytes = limit_bytes(problem, self.verdict)
        parts, owners = [kinds.take(owner[:0])], [owner[:0]]
        bounds = [np.empty((0, len(frontier.measures)))]
        for bounded in plan_bounds(problem, space, kind_costs(problem, kinds, first_layers(problem, space, kinds))):
            self.findings.counts["bounded"] += bounded.step_s.size
            pace = bounded.step_s / kinds.global_batch[bounded.kinds, None]
            bound = measure_bounds(problem, frontier.measures, pace.ravel(), bounded.memory_bytes.ravel())
            bound[(bounded.memory_bytes > most_bytes).ravel()] = np.inf
            is_out = incumbents.rules_out(bound)
            incumbents.skip(bound[is_out])
            if not is_out.all():
                kind, plan = np.divmod(np.flatnonzero(~is_out), len(bounded.inside))
                parts.append(space.plans_of(kinds, bounded.inside, bounded.kinds[kind], plan))
                bounds.append(bound[~is_out])
                owners.append(owner[bounded.kinds[kind]])
        plans, bound, of_cell = PlanBatch.concatenate(parts), np.concatenate(bounds), np.concatenate(owners)
        lawful = np.flatnonzero(legal(space.rules, space.workload, plans))
        lawful = lawful[best_first(bound[lawful])]
        for part in self.not_ruled_out(bound[lawful]):
            self._price(plans.take(lawful[part]), of_cell[lawful[part]])

    def _price(self, batch: PlanBatch, owner: Ints) -> None:
        """Price plans and keep the best; schedules that are simulated pass by pass only for plans that may fit."""
        findings, frontier = self.findings, self.frontier
        if len(slow := np.flatnonzero(batch.splits_backward)):
            oom_z = np.full(len(batch), -np.inf)
            oom_z[slow] = memory_oom_z(frontier.problem, batch.take(slow))
            np.minimum.at(self.nearest_z, owner[slow], oom_z[slow])
            may_fit = np.flatnonzero(oom_z <= OOM_Z)
            batch, owner = batch.take(may_fit), owner[may_fit]
        costs = estimate(frontier.problem, batch)
        values, verdict = measured(frontier.problem, frontier.measures, costs), costs.verdict
        value = values[:, 0]
        order = ordering(value, batch)
        # Rows of each cell from best to worst, better verdicts first.
        order = order[np.lexsort((verdict[order], owner[order]))]
        winners = order[np.flatnonzero(np.diff(owner[order], prepend=-1))]
        np.minimum.at(self.nearest_z, owner, costs.oom_z)
        for winner in winners:
            cell, key = owner[winner], (verdict[winner], value[winner])
            if key < (self.verdict_of[cell], self.value_of[cell]):
                self.verdict_of[cell], self.value_of[cell] = key
                self.plan_of[int(cell)] = msgspec.to_builtins(batch.plan(int(winner)))
        good = np.flatnonzero(verdict == self.verdict)
        winners = winners[verdict[winners] == self.verdict]
        if len(good):
            findings.incumbents.offer(values[good], batch.take(good))
        findings.winners.offer(value[winners], batch.take(winners))
        findings.counts["priced"] += len(batch)
        for name, count in zip(VERDICTS, np.bincount(verdict, minlength=len(VERDICTS)).tolist(), strict=True):
            findings.counts[name] += count


# -- the plan nearest to fitting ---------------------------------------------------------------------------------------


def closest(frontier: Frontier) -> RankedPlan | None:
    """Return the legal plan with the least memory."""
    problem, space = frontier.problem, frontier.space
    best: RankedPlan | None = None
    for groups in frontier.blocks(np.argsort(frontier.least_bytes, kind="stable")):
        if best and frontier.least_bytes[groups].min() >= best.memory_bytes:
            break
        kinds, _ = frontier.kinds_of(groups)
        for bounds in plan_bounds(problem, space, kind_costs(problem, kinds)):
            least = bounds.memory_bytes.ravel()
            order = np.argsort(least, kind="stable")
            for at in range(0, len(order), MAX_PRICED):
                part = order[at : at + MAX_PRICED]
                if best and least[part[0]] >= best.memory_bytes:
                    break
                kind, plan = np.divmod(part, len(bounds.inside))
                plans = space.plans_of(kinds, bounds.inside, bounds.kinds[kind], plan)
                plans = plans.take(legal(space.rules, space.workload, plans))
                if not len(plans):
                    continue
                costs = estimate(problem, plans)
                nearest = int(np.argmin(costs.memory_bytes))
                if best is None or costs.memory_bytes[nearest] < best.memory_bytes:
                    best = ranked(problem, costs, [nearest])[0]
    return best
