"""Which plans does no other one beat in every measure?  All of them, and the bounds that prove it.

A measure is seconds, joules or bytes that a plan takes (`search.objectives`).  What is not priced is ruled out by a
plan that was found and that is no worse than its bounds in every measure.  Of one measure the front is the best plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.energy import step_energy_j, waiting_power_w
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import legal
from autoplan.search.bounds import KindCosts, group_bounds, kind_bounds, kind_costs, plan_bounds
from autoplan.search.findings import FITS, RISKY, as_text, batch_of, from_text, rows_of
from autoplan.search.ledger import Block, BlockOutcome, CellOutcome, Told
from autoplan.search.objectives import Measure
from autoplan.search.pricing import limit_bytes
from autoplan.search.ranking import TIE, ordering, ranked, seconds_per_sequence
from autoplan.search.space import Cell, Space
from autoplan.search.study import Shared, joined, search
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Certificate, SearchResult

# Kinds bounded in one go; of the first round, and how many times those before are in the next one.
BLOCK_KINDS, FIRST_KINDS, GROWTH, ROUND_BLOCKS = 4096, 1024, 4, 8
FIRST_PRICED, MOST_PRICED = 32, 2048
SLACK = 2  # ties by which a bound may lie above an estimate, through rounding


class Front:
    """Plans that none of those offered beats; of plans with equal measures the plainest.

    Measures are compared by the logarithm, in steps of `TIE`.
    """

    def __init__(self, num_measures: int) -> None:
        self.batch: PlanBatch | None = None
        self._keys: Ints = np.empty((0, num_measures), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def rules_out(self, bounds: Floats) -> Bools:
        """Whether plans with these bounds, shape (plans, measures), cannot belong to the front."""
        keys = np.floor(np.log(bounds) / TIE).astype(np.int64) - SLACK
        left = np.arange(len(keys))
        # Plans that are good in all measures rule out most: they come first.
        for own in self._keys[np.argsort(self._keys.sum(axis=1))]:
            left = left[~(own <= keys[left]).all(axis=1)]
        out = np.ones(len(keys), dtype=np.bool_)
        out[left] = False
        return out

    def offer(self, measures: Floats, batch: PlanBatch) -> None:
        """Take in those of `batch` that belong to the front, and drop what they beat."""
        self._add(np.round(np.log(measures) / TIE).astype(np.int64), batch)

    def _add(self, keys: Ints, batch: PlanBatch) -> None:
        if self.batch is not None:
            keys, batch = np.concatenate([self._keys, keys]), PlanBatch.concatenate([self.batch, batch])
        plainness = np.empty(len(keys), dtype=np.int64)
        plainness[ordering(np.ones(len(keys)), batch)] = np.arange(len(keys))
        # The first of the rest in this order is beaten by none of the rest.
        rest, kept = np.lexsort([plainness, *keys.T[::-1]]), []
        while len(rest):
            kept.append(int(rest[0]))
            rest = rest[~(keys[rest[0]] <= keys[rest]).all(axis=1)]
        self._keys, self.batch = keys[kept], batch.take(np.array(kept, dtype=np.int64))

    def rows(self) -> dict[str, Any]:
        """The front as plain values."""
        return {} if self.batch is None else {**rows_of(self.batch), "keys": self._keys.tolist()}

    def add_rows(self, rows: dict[str, Any], placement: tuple[str, ...] | None) -> None:
        """Take in what `rows` made; the plans get the placement that all plans of a space have."""
        if rows:
            self._add(np.array(rows["keys"], dtype=np.int64), batch_of(rows, placement))


def search_front(
    problem: Problem,
    space: Space,
    measures: Sequence[Measure],
    *,
    shared: Shared | None = None,
) -> SearchResult:
    """The plans of `space` that no other one beats in every one of `measures`, the best in the first one first.

    They fit; where no plan does they may run out of memory.  A `shared` search is one of all workers that join it.
    """
    field = _Field.of(problem, space, measures)
    seen = _Seen(len(measures))

    def next_round(told: list[Told]) -> tuple[Block, ...]:
        nonlocal seen
        for wanted in (FITS, RISKY):
            mine = [one for one in told if one.block.wanted == wanted]
            seen = _together(mine, len(measures), space.placement)
            taken = [cell for one in mine for cell in one.block.cells]
            if blocks := field.next_round(seen.front, taken, wanted, max((one.block.round for one in mine), default=0)):
                return blocks
            if len(seen.front):
                break
        return ()

    def price(block: Block) -> BlockOutcome:
        # What was known when the block was put up: it must not depend on who was done with what since.
        before = [one for one in ledger.told() if one.block.wanted == block.wanted and one.block.round < block.round]
        return field.price(block, _together(before, len(measures), space.placement).front)

    with joined(problem, space, field.cells, shared, {"measures": " ".join(measures)}) as ledger:
        ledger.settle(next_round, price)
    if seen.front.batch is None:
        return search(problem, space)  # which tells the plan that is least too large
    costs = estimate(problem, seen.front.batch)
    plans = ranked(problem, costs, range(len(costs)))
    certificate = Certificate(
        cells=len(field.cells),
        expanded=seen.expanded,
        plans=space.size(field.cells),
        bounded=seen.bounded,
        priced=seen.priced,
        fitting=seen.found[FITS],
        risky=seen.found[RISKY],
        best_step_s=min(one.step_s for one in plans),
        least_left=None,
        proven=True,
        limits=space.describe(),
        best_in=tuple(measures),
    )
    return SearchResult(ranked=plans, rivals=plans, closest=None, certificate=certificate)


@dataclass(slots=True)
class _Seen:
    """What was seen in some blocks; `front` is of their plans alone."""

    num_measures: int
    front: Front = dataclass_field(init=False)
    expanded: int = 0  # cells
    bounded: int = 0
    priced: int = 0
    found: dict[int, int] = dataclass_field(default_factory=lambda: {FITS: 0, RISKY: 0})

    def __post_init__(self) -> None:
        self.front = Front(self.num_measures)

    def packed(self) -> str:
        """As text, for an attribute of a trial."""
        counts = [self.expanded, self.bounded, self.priced, self.found[FITS], self.found[RISKY]]
        return as_text({"counts": counts, "front": self.front.rows()})

    def add(self, text: str, placement: tuple[str, ...] | None) -> None:
        """Take in what `packed` made; the order does not matter."""
        table = from_text(text)
        expanded, bounded, priced, fitting, risky = table["counts"]
        self.expanded, self.bounded, self.priced = (
            self.expanded + expanded,
            self.bounded + bounded,
            self.priced + priced,
        )
        self.found[FITS] += fitting
        self.found[RISKY] += risky
        self.front.add_rows(table["front"], placement)


def _together(told: Iterable[Told], num_measures: int, placement: tuple[str, ...] | None) -> _Seen:
    seen = _Seen(num_measures)
    for one in told:
        seen.add(one.found, placement)
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """All groups of a space and what their plans cannot beat in any measure."""

    problem: Problem
    space: Space
    measures: Sequence[Measure]
    cells: tuple[Cell, ...]
    groups: PlanBatch
    owner: Ints  # the cell of each group
    bounds: Floats  # shape (groups, measures)
    least_bytes: Floats
    kinds: Ints  # in a group of each cell

    @classmethod
    def of(cls, problem: Problem, space: Space, measures: Sequence[Measure]) -> _Field:
        cells = space.cells()
        groups, owner = space.groups(cells)
        time, least_bytes = group_bounds(problem, space, groups)
        return cls(
            problem=problem,
            space=space,
            measures=measures,
            cells=cells,
            groups=groups,
            owner=owner,
            bounds=_bounds(problem, measures, time / groups.global_batch, least_bytes),
            least_bytes=least_bytes,
            kinds=np.array([space.kinds_of_group(cell) for cell in cells], dtype=np.int64),
        )

    def next_round(self, front: Front, taken: Sequence[int], wanted: int, last: int) -> tuple[Block, ...]:
        """The most promising cells that the front does not rule out: more with every round, in blocks."""
        is_taken = np.zeros(len(self.cells), dtype=np.bool_)
        is_taken[np.array(taken, dtype=np.int64)] = True
        left = np.flatnonzero((self.least_bytes <= limit_bytes(self.problem, wanted)) & ~is_taken[self.owner])
        left = left[~front.rules_out(self.bounds[left])]
        if not len(left):
            return ()
        # Cells in the order of their first groups.
        owner = self.owner[left[_taking_turns(self.bounds[left])]]
        _, first = np.unique(owner, return_index=True)
        cells = owner[np.sort(first)]
        upto = np.cumsum((self.kinds * np.bincount(self.owner[left], minlength=len(self.cells)))[cells])
        done = int((self.kinds * np.bincount(self.owner, minlength=len(self.cells)))[is_taken].sum())
        size = min(max(GROWTH * done, FIRST_KINDS), ROUND_BLOCKS * BLOCK_KINDS)
        cells = cells[: np.searchsorted(upto, size) + 1]
        cuts = np.flatnonzero(np.diff(upto[: len(cells)] // BLOCK_KINDS)) + 1
        parts = np.split(cells, cuts)
        return tuple(Block(wanted=wanted, best=np.inf, cells=tuple(part.tolist()), round=last + 1) for part in parts)

    def price(self, block: Block, front: Front) -> BlockOutcome:
        """Price what neither `front` nor the plans of the block itself rule out."""
        look = _Look(self, block, front)
        groups = np.flatnonzero(np.isin(self.owner, block.cells) & (self.least_bytes <= look.limit_bytes))
        groups = groups[_taking_turns(self.bounds[groups])]
        for some in _blocks(groups, self.kinds[self.owner]):
            look.price_groups(some[~look.front.rules_out(self.bounds[some])])
        told = {
            cell: CellOutcome(
                value=look.value.get(cell),
                constraints={},
                attributes={"bounds": self.bounds[self.owner == cell].min(axis=0).tolist()},
            )
            for cell in block.cells
        }
        return BlockOutcome(found=look.seen.packed(), cells=told)


def _bounds(problem: Problem, measures: Sequence[Measure], seconds: Floats, least_bytes: Floats) -> Floats:
    """By what a time per sequence and a memory bound every measure: shape (plans, measures)."""
    columns: dict[Measure, Callable[[], Floats]] = {
        "time": lambda: seconds,
        "energy": lambda: waiting_power_w(problem.cluster) * seconds,
        "memory": lambda: least_bytes,
    }
    return np.stack([columns[name]() for name in measures], axis=-1)


def _measured(problem: Problem, measures: Sequence[Measure], costs: CostEstimate) -> Floats:
    """Every measure of every plan: shape (plans, measures)."""
    columns: dict[Measure, Callable[[], Floats]] = {
        "time": lambda: seconds_per_sequence(costs),
        "energy": lambda: step_energy_j(problem.cluster, costs.terms_s, costs.step_s) / costs.batch.global_batch,
        "memory": lambda: costs.memory_bytes,
    }
    return np.stack([columns[name]() for name in measures], axis=-1)


class _Look:
    """Prices plans of one block, the most promising groups first, but for those that the front rules out."""

    def __init__(self, field: _Field, block: Block, front: Front) -> None:
        self.field, self.wanted, self.front = field, block.wanted, front
        self.limit_bytes = limit_bytes(field.problem, block.wanted)
        self.seen = _Seen(len(field.measures), expanded=len(block.cells))
        self.value: dict[int, float] = {}  # the least of the first measure, by cell

    def price_groups(self, which: Ints) -> None:
        """Price the kinds of some groups that have a chance."""
        if not len(which):
            return
        field, problem, space = self.field, self.field.problem, self.field.space
        kinds, of_group = space.kinds(field.cells, field.groups.take(which), field.owner[which])
        owner = field.owner[which][of_group]
        costs = kind_costs(problem, kinds)
        lowest, least_bytes = kind_bounds(problem, space, costs)
        bounds = _bounds(problem, field.measures, lowest / kinds.global_batch, least_bytes)
        left = np.flatnonzero(least_bytes <= self.limit_bytes)
        left = left[_taking_turns(bounds[left])]
        for part in _growing(left, MOST_PRICED):
            some = part[~self.front.rules_out(bounds[part])]
            if len(some):
                self._price_kinds(costs.take(some), owner[some])

    def _price_kinds(self, costs: KindCosts, owner: Ints) -> None:
        field, problem, space = self.field, self.field.problem, self.field.space
        for found in plan_bounds(problem, space, costs):
            self.seen.bounded += found.step_s.size
            kind, plan = np.nonzero(found.memory_bytes <= self.limit_bytes)
            plans = space.plans_of(costs.batch, found.inside, found.kinds[kind], plan)
            seconds = found.step_s[kind, plan] / plans.global_batch
            bounds = _bounds(problem, field.measures, seconds, found.memory_bytes[kind, plan])
            left = np.flatnonzero(~self.front.rules_out(bounds))
            left = left[legal(space.rules, space.workload, plans.take(left))]
            for part in _growing(left[_taking_turns(bounds[left])], MOST_PRICED):
                some = part[~self.front.rules_out(bounds[part])]
                if len(some):
                    self._price_plans(plans.take(some), owner[found.kinds[kind[some]]])

    def _price_plans(self, batch: PlanBatch, owner: Ints) -> None:
        field, problem = self.field, self.field.problem
        costs = estimate(problem, batch)
        verdict = costs.verdict
        self.seen.priced += len(batch)
        for kind in self.seen.found:
            self.seen.found[kind] += int((verdict == kind).sum())
        good = np.flatnonzero(verdict == self.wanted)
        if len(good):
            measured = _measured(problem, field.measures, costs)[good]
            for front in (self.front, self.seen.front):
                front.offer(measured, batch.take(good))
            for cell, value in zip(owner[good].tolist(), measured[:, 0].tolist(), strict=True):
                self.value[cell] = min(self.value.get(cell, np.inf), value)


def _taking_turns(bounds: Floats) -> Ints:
    """An order in which the least of every measure come first, in turns."""
    place = np.argsort(np.argsort(bounds, axis=0, kind="stable"), axis=0, kind="stable")
    return np.argsort(place.min(axis=1), kind="stable")


def _growing(rows: Ints, most: int) -> Iterator[Ints]:
    """`rows` in order, a few at first and then more at once: the first ones rule out many of the rest."""
    done, size = 0, FIRST_PRICED
    while done < len(rows):
        yield rows[done : done + size]
        done, size = done + size, min(2 * size, most)


def _blocks(groups: Ints, kinds: Ints) -> Iterator[Ints]:
    """`groups` in order, a few kinds at first, then about `BLOCK_KINDS` of them at once."""
    upto = np.cumsum(kinds[groups])
    done, size = 0, FIRST_PRICED
    while done < len(groups):
        before = upto[done - 1] if done else 0
        end = max(int(np.searchsorted(upto, before + size, side="right")), done + 1)
        yield groups[done:end]
        done, size = end, min(4 * size, BLOCK_KINDS)
