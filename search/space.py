"""Legal plans of a problem on two levels: cells of degrees, and the plans inside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from autoplan.base.arrays import Bools, Ints
from autoplan.frameworks.common.rules import Rule, legal, legal_so_far
from autoplan.search.axes import parts_of
from autoplan.search.cells import DEGREES, Cell, cells_of
from autoplan.search.layouts import searched_layouts
from autoplan.search.limits import Limits, divisors
from autoplan.spec.axes import AXIS, COLUMNS, SEARCHED
from autoplan.spec.axis import Value
from autoplan.spec.enums import ContextParallelKind, Offload, Recompute, Sharding
from autoplan.spec.plan import (
    ALL_LAYERS,
    ParallelPlan,
    PlanBatch,
    column_type,
    module_bits,
    parse_recompute,
    repeated_layers,
)
from autoplan.spec.workload import Workload

# Axes that vary inside a cell, level by level.
_MONOTONE = tuple(axis for axis in SEARCHED if axis.is_monotone)
_GROUP_WORDS = tuple(
    axis for axis in SEARCHED if axis.name not in ("sharding", "offload", "schedule") and not axis.is_monotone
)
_GROUP = ("global_batch", "micro_batch", *(axis.name for axis in _GROUP_WORDS))
_REPEATS = ("recompute", "recompute_modules", "recompute_num_layers")
_KIND = ("sharding", *_REPEATS, "offload")
_INSIDE = ("vp", "schedule", "layout", "recompute_num_layers")
# Axes known for a group and for a kind, so that rules that depend only on these can be evaluated.  Overlap switches may
# depend on the schedule.
_KNOWN_OF_CELL = frozenset((*DEGREES, "precision", "attention"))
_KNOWN_OF_GROUP = frozenset((*DEGREES, *_GROUP, "precision", "attention"))
_CELLS_AT_ONCE = 128  # whose groups are held together, lawful or not: some have thousands
_STATES = frozenset(("sharding", "offload", "offload_percent"))
# Offload choices for states without replicas; zero3 also keeps gradients where the optimizer is.
_ALONE = (("zero1", "optimizer"), ("zero3", "optimizer"), ("zero3", "parameters"))
_KNOWN_OF_STATES = _STATES | {*DEGREES, "sp", "precision", "attention"}
# Axes that decide which values of the monotone ones are legal.
_DECIDING = (
    *("sharding", "offload", "grad_dtype", "ep", "dispatcher", "ep_overlap", "cuda_graphs", "recompute_modules"),
)
_KNOWN_OF_MONOTONE = _STATES | {"precision", "attention", *_DECIDING, *(axis.name for axis in _MONOTONE)}
_KNOWN_OF_KIND = (
    _KNOWN_OF_GROUP | _STATES | {*(axis.name for axis in _MONOTONE)} | {"recompute", "recompute_modules", "ep_overlap"}
)

_PLAIN = tuple(axis for axis in COLUMNS if axis.name not in (*DEGREES, *_GROUP))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inside:
    """Plans inside a kind: every layout and, if the kind recomputes some layers, every number of them.

    One element per plan.  Kinds on the same number of stages that recompute no, some or all layers share their
    `Inside`.
    """

    layouts: tuple[tuple[int, ...], ...]
    pp: int
    vp: Ints
    schedule: Ints
    layout: Ints  # index into `layouts`
    recompute_num_layers: Ints

    def __len__(self) -> int:
        return len(self.vp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Plans of one workload that obey the limits and the rules; every plan uses all devices.

    A cell contains *groups*, plans with one batch and micro-batch; a group contains *kinds*, plans with one sharding
    and recomputation; a kind contains a plan for every layout and every number of recomputed layers.  Kinds with the
    optimizer on the host stand for those with a part of it there, too, until `shared` tells them apart.
    """

    workload: Workload
    limits: Limits
    rules: tuple[Rule, ...]
    placement: tuple[str, ...] | None = None  # of all plans
    # Cached results.
    _insides: dict[tuple[int, int], Inside] = field(default_factory=dict, init=False, compare=False, repr=False)
    _choices: dict[int, Ints] = field(default_factory=dict, init=False, compare=False, repr=False)

    def describe(self) -> tuple[str, ...]:
        """Describe the exclusions of the space for the certificate: the limits and their consequences."""
        limits, parts = self.limits, []
        batches = limits.global_batches
        if len(batches) > 1:
            parts.append(f"global batch on a grid of {len(batches)} values from {batches[0]} to {batches[-1]}")
        parts += limits.describe(self.workload.model)
        if self.workload.model.moe and not limits.fixes("etp"):
            parts.append("etp 1|tp")
        if not limits.fixes("dp_replicate", "dp_shard"):
            domains = ", ".join(str(size) for size in limits.shard_domains)
            parts.append("states sharded over all replicas" + (f" or a link domain of {domains}" if domains else ""))
        if limits.split:
            parts.append("layers as the framework splits the model")
        else:
            if not limits.fixes("vp") and limits.fewer_at_ends == 1:
                parts.append("vp a divisor of the layers of a rank")
            counted = "a layer" if limits.fewer_at_ends == 1 else f"1 to {limits.fewer_at_ends} layers"
            parts.append(f"layers spread evenly, or with the head, and the embedding too, counted as {counted}")
        return tuple(parts)

    def cells(self) -> tuple[Cell, ...]:
        """Factorisations of the devices into degrees, ordered by stages so that neighbours are priced together."""
        return tuple(sorted(cells_of(self.workload, self.limits)))

    def size(self, cells: Iterable[Cell]) -> int:
        """Number of plans in `cells`, before the framework's rules."""
        return sum(self._size(cell) for cell in cells)

    def kinds_of_group(self, cell: Cell) -> int:
        """Number of kinds in each group of a cell."""
        return len(self._states(cell)) * len(self._repeats(cell.pp))

    def groups(self, cells: Sequence[Cell]) -> tuple[PlanBatch, Ints]:
        """Return (groups of `cells` that may be legal, the index of each one's cell).

        Axes that vary inside a group have their plain values.
        """
        # What degrees alone decide is asked once for each cell, which may have thousands of groups.
        plain = np.zeros((len(_GROUP), len(cells)), dtype=np.int64)
        degrees_only = self._group_batch(cells, np.arange(len(cells)), plain)
        kept = np.flatnonzero(legal_so_far(self.rules, self.workload, degrees_only, _KNOWN_OF_CELL))
        owners, tables = [np.empty(0, dtype=np.int64)], [np.empty((len(_GROUP), 0), dtype=np.int64)]
        for start in range(0, len(kept), _CELLS_AT_ONCE):
            block = kept[start : start + _CELLS_AT_ONCE]
            inside, values = self._group_values([cells[at] for at in block.tolist()])
            groups = self._group_batch(cells, block[inside], values)
            lawful = np.flatnonzero(legal_so_far(self.rules, self.workload, groups, _KNOWN_OF_GROUP))
            owners.append(block[inside[lawful]])
            tables.append(values[:, lawful])
        owner = np.concatenate(owners)
        return self._group_batch(cells, owner, np.concatenate(tables, axis=1)), owner

    def kinds(self, cells: Sequence[Cell], groups: PlanBatch, owner: Ints) -> tuple[PlanBatch, Ints]:
        """Return (kinds of `groups` that may be legal, each one's group), with the fewest recomputed layers.

        All of an optimizer is on the host, or nothing.
        """
        kinds, of_group = self._kinds(cells, groups, owner)
        lawful = legal_so_far(self.rules, self.workload, kinds, _KNOWN_OF_KIND)
        return kinds.take(lawful), of_group[lawful]

    def shared(self, kinds: PlanBatch) -> tuple[PlanBatch, Ints]:
        """Return (`kinds` with every share of the optimizer on the host that may be legal, the index of each one)."""
        every, index = self._shared(kinds)
        lawful = legal_so_far(self.rules, self.workload, every, _KNOWN_OF_KIND)
        return every.take(lawful), index[lawful]

    def _shared(self, kinds: PlanBatch) -> tuple[PlanBatch, Ints]:
        offloads = np.flatnonzero(kinds.offload == Offload.OPTIMIZER.code)
        _, *parts = self.limits.offload_percents
        index = np.concatenate([np.arange(len(kinds)), *(offloads for _ in parts)])
        percent = np.repeat([100, *parts], [len(kinds), *(len(offloads) for _ in parts)])
        order = np.argsort(index, kind="stable")
        return replace(kinds.take(index[order]), offload_percent=percent[order]), index[order]

    def inside(self, pp: int, number: int) -> Inside:
        """Return the contents of kinds on this many stages whose `recompute_num_layers` is `number`."""
        if (pp, number) not in self._insides:
            layouts_here = self.layouts_on(pp)
            layouts = tuple(dict.fromkeys(layers for *_, layers in layouts_here))
            index = {layers: at for at, layers in enumerate(layouts)}
            columns = np.array([(vp, schedule, index[layers]) for vp, schedule, layers in layouts_here], dtype=np.int64)
            longest = np.array([max(layers) for *_, layers in layouts_here], dtype=np.int64)
            numbers = np.array(self.limits.repeat_numbers if 0 < number < ALL_LAYERS else (number,), dtype=np.int64)
            # Recomputing at least as many layers as a chunk has is the same plan as recomputing all.
            row, column = np.nonzero((numbers == ALL_LAYERS) | (numbers < longest[:, None]))
            vp, schedule, layout = columns.reshape(-1, 3)[row].T
            self._insides[pp, number] = Inside(
                layouts=layouts, pp=pp, vp=vp, schedule=schedule, layout=layout, recompute_num_layers=numbers[column]
            )
        return self._insides[pp, number]

    def plans_of(self, kinds: PlanBatch, inside: Inside, kind: Ints, plan: Ints) -> PlanBatch:
        """Return the plans at the indices `plan` inside the kinds at the indices `kind`, without checking rules."""
        columns = {name: getattr(inside, name)[plan] for name in _INSIDE}
        return self.limits.without_overlap(replace(replace(kinds, layouts=inside.layouts).take(kind), **columns))

    def alike(self, kinds: PlanBatch) -> Iterator[tuple[Inside, Ints]]:
        """Yield (contents, indices of the kinds with these contents) for all kinds."""
        first, group_of = kinds.distinct("pp", "recompute_num_layers")
        for at, example in enumerate(first):
            yield (
                self.inside(int(kinds.pp[example]), int(kinds.recompute_num_layers[example])),
                np.flatnonzero(group_of == at),
            )

    def plans_in(self, kinds: PlanBatch) -> tuple[PlanBatch, Ints]:
        """Return (all plans of all kinds, the index of each one's kind), without checking rules."""
        parts, owners = [kinds.take(np.empty(0, dtype=np.int64))], [np.empty(0, dtype=np.int64)]
        for inside, kinds_alike in self.alike(kinds):
            owner = np.repeat(kinds_alike, len(inside))
            parts.append(self.plans_of(kinds, inside, owner, np.tile(np.arange(len(inside)), len(kinds_alike))))
            owners.append(owner)
        batch, owner = PlanBatch.concatenate(parts), np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        return batch.take(order), owner[order]

    def _group_values(self, cells: Sequence[Cell]) -> tuple[Ints, Ints]:
        """Return (index of the cell of each group, values of `_GROUP` in their rows) of all groups."""
        tables = [self._group_rows(cell) for cell in cells]
        owner = np.repeat(np.arange(len(cells)), [len(table) for table in tables])
        values = np.concatenate([table.T for table in tables] or [np.empty((len(_GROUP), 0), np.int64)], axis=1)
        return owner, values

    def _group_batch(self, cells: Sequence[Cell], owner: Ints, values: Ints) -> PlanBatch:
        """Return the groups with these values of `_GROUP` in their rows, each of the cell at its index in `owner`."""
        degrees = {axis: np.array([getattr(cell, axis) for cell in cells], dtype=np.int64)[owner] for axis in DEGREES}
        chosen = dict(zip(_GROUP, values, strict=True))

        def same(code: int, kind: type = np.int64) -> Any:  # a view of one number, as there may be millions of groups
            return np.broadcast_to(np.array(code, dtype=kind), len(owner))

        # Monotone axes have the value with the smallest costs, so that bounds of groups hold.
        least = {axis.name: self.limits.of(axis.name)[-1] for axis in _MONOTONE}
        plain = {axis.name: same(axis.code(least.get(axis.name, axis.default)), column_type(axis)) for axis in _PLAIN}
        chosen |= {axis.name: chosen[axis.name].astype(column_type(axis)) for axis in _GROUP_WORDS}
        columns = {
            **plain,
            **degrees,
            **chosen,
            "sharding": same(Sharding.NONE.code),
            "param_gather_overlap": same(0, np.bool_),  # unsharded, no parameters are gathered
            "precision": same(self.limits.precision.code),
            "attention": same(self.limits.attention.code),
        }
        return PlanBatch(
            **columns,
            recompute_modules=same(0),
            recompute_num_layers=same(0),
            layout=same(0),
            layouts=((self.workload.model.num_layers,),),
            placement=self.placement,
        )

    def _kinds(self, cells: Sequence[Cell], groups: PlanBatch, owner: Ints) -> tuple[PlanBatch, Ints]:
        present, at = np.unique(owner, return_inverse=True)
        group, values = _expanded(at, [self._kind_rows(cells[cell]) for cell in present], len(_KIND))
        column = dict(zip(_KIND, values.T, strict=True))
        # Only sharded optimizers gather parameters.
        gathers = column["sharding"] > Sharding.NONE.code
        kinds = replace(groups.take(group), **column, param_gather_overlap=gathers)
        return self._at_least(kinds), group

    def _at_least(self, kinds: PlanBatch) -> PlanBatch:
        """Return the kinds with the last legal value of every monotone axis, or its first value."""
        free = [axis for axis in _MONOTONE if len(self.limits.of(axis.name)) > 1]
        if not free or not len(kinds):
            return kinds
        first, kind_of = kinds.distinct(*_DECIDING)
        states = kinds.take(first)
        # All axes begin with their first values, so that a dependency on another axis does not exclude a value.
        chosen: dict[str, Any] = {
            axis.name: np.full(len(states), axis.code(self.limits.of(axis.name)[0]), dtype=column_type(axis))
            for axis in free
        }
        for axis in free:
            for word in self.limits.of(axis.name):
                code = np.full_like(chosen[axis.name], axis.code(word))
                tried = _with_columns(states, chosen | {axis.name: code})
                lawful = legal_so_far(self.rules, self.workload, tried, _KNOWN_OF_MONOTONE)
                chosen[axis.name] = np.where(lawful, code, chosen[axis.name])
        # Values that depend on each other are accepted only together.
        last: dict[str, Any] = {
            axis.name: np.full_like(chosen[axis.name], axis.code(self.limits.of(axis.name)[-1])) for axis in free
        }
        tried = _with_columns(states, last)
        lawful = legal_so_far(self.rules, self.workload, tried, _KNOWN_OF_MONOTONE)
        chosen = {name: np.where(lawful, last[name], values) for name, values in chosen.items()}
        return _with_columns(kinds, {name: values[kind_of] for name, values in chosen.items()})

    def extremes(self, groups: PlanBatch) -> tuple[PlanBatch, PlanBatch, Ints]:
        """Return (plainest kinds, leanest states, index of each one's group) for every choice of recomputation."""
        stages, at = np.unique(groups.pp, return_inverse=True)
        group, values = _expanded(at, [self._repeats(int(pp)) for pp in stages], len(_REPEATS))
        plain = replace(groups.take(group), **dict(zip(_REPEATS, values.T, strict=True)))
        sharding, offload = self._leanest_states(groups)
        return plain, replace(plain, sharding=sharding[group], offload=offload[group]), group

    def _leanest_states(self, groups: PlanBatch) -> tuple[Ints, Ints]:
        """Return (sharding, offload) with the least memory for each group, among those that may be legal."""
        first, degrees_of = groups.distinct(*DEGREES)
        distinct = groups.take(first)
        sharding, offload = np.zeros_like(first), np.zeros_like(first)
        for kind, offloaded in product(self.limits.of("sharding"), self.limits.of("offload")):
            states = (
                np.full_like(first, AXIS["sharding"].code(kind)),
                np.full_like(first, AXIS["offload"].code(offloaded)),
            )
            priced = replace(distinct, sharding=states[0], offload=states[1], param_gather_overlap=states[0] > 0)
            lawful = legal_so_far(self.rules, self.workload, priced, _KNOWN_OF_STATES)
            sharding, offload = np.maximum(sharding, states[0] * lawful), np.maximum(offload, states[1] * lawful)
        return sharding[degrees_of], offload[degrees_of]

    def plans(self, cells: Sequence[Cell]) -> tuple[PlanBatch, Ints]:
        """Return (legal plans of `cells`, the index of each one's cell); plans of one cell are consecutive."""
        batch, owner = self._candidates(cells)
        lawful = legal(self.rules, self.workload, batch)
        return batch.take(lawful), owner[lawful]

    def blocks(self, cells: Iterable[Cell], most_plans: int) -> Iterator[tuple[Cell, ...]]:
        """Yield `cells` in order, in groups of about `most_plans` candidates (a single cell may have more)."""
        block: list[Cell] = []
        num_plans = 0
        for cell in cells:
            size = self._size(cell)
            if block and num_plans + size > most_plans:
                yield tuple(block)
                block, num_plans = [], 0
            block.append(cell)
            num_plans += size
        if block:
            yield tuple(block)

    def candidates(self, cells: Sequence[Cell]) -> PlanBatch:
        """Return the plans of `cells` before the framework's rules, to explain why none is legal."""
        return self._candidates(cells)[0]

    def _group_rows(self, cell: Cell) -> Ints:
        parts, values_of = parts_of(self.workload.model), dict(self.limits.values)
        choices = []
        for axis in _GROUP_WORDS:
            values = values_of[axis.name]
            if axis.name == "cp_kind":
                values = tuple(kind for kind in values if ContextParallelKind(str(kind)).fits(cell.cp)) or values[:1]
            has_choice = len(values) > 1 and axis.needs.are_met(cell, **parts)
            if axis.name == "sp":
                values = self._sequence_parallel(cell)
            choices.append(values if has_choice else values[:1])
        return _group_rows(self.limits, cell.dp, tuple(choices))

    def _sequence_parallel(self, cell: Cell) -> tuple[Value, ...]:
        """Choices of sequence parallelism, which divides the tokens of a tensor-parallel group over its ranks."""
        divides = self.workload.training.seq_len // cell.cp % cell.tp == 0
        return self.limits.of("sp") if cell.tp > 1 and divides else (False,)

    def _states(self, cell: Cell) -> Ints:
        """Choices of sharding and offload: shape (choices, 2)."""
        limits = self.limits
        copies = AXIS["sharding"].needs.are_met(cell, **parts_of(self.workload.model))
        replicates = cell.dp_replicate > 1 and not limits.fixes("dp_replicate", "dp_shard")
        shardings, offloads = limits.of("sharding"), limits.of("offload")
        # Without replicas of a parameter sharding has no effect, except that offload requires a sharded optimizer;
        # without sharding the split of dp has no effect.
        rows = [
            (AXIS["sharding"].code(sharding), AXIS["offload"].code(offload))
            for sharding in shardings
            for offload in offloads
            if copies or sharding == shardings[0] or (sharding, offload) in _ALONE
            if not (replicates and sharding == "none")
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    def _repeats(self, pp: int) -> Ints:
        """Choices of recomputation without the number of layers: shape (choices, 3).

        Choices with a number of layers have the smallest number.
        """
        if pp not in self._choices:
            longest = max((max(layers) for *_, layers in self.layouts_on(pp)), default=0)
            kinds: dict[tuple[int, int, bool], tuple[int, int, int]] = {}
            for choice in sorted(map(_recompute, self.limits.recomputes), key=lambda fields: fields[2]):
                # As many layers as the longest chunk has are all layers.
                if choice[2] == ALL_LAYERS or choice[2] < longest:
                    kinds.setdefault((choice[0], choice[1], choice[2] == ALL_LAYERS), choice)
            self._choices[pp] = np.array(list(kinds.values()), dtype=np.int64).reshape(-1, 3)
        return self._choices[pp]

    def _kind_rows(self, cell: Cell) -> Ints:
        states, repeats = self._states(cell), self._repeats(cell.pp)
        rows = np.repeat(states, len(repeats), axis=0)
        return np.column_stack([rows[:, 0], np.tile(repeats, (len(states), 1)), rows[:, 1]])

    def layouts_on(self, pp: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Return (chunks per rank, schedule, layers of every chunk) of the layouts on this many stages."""
        return searched_layouts(self.limits, self.workload.model, pp)

    def _size(self, cell: Cell) -> int:
        """Number of plans in a cell, without those whose number of recomputed layers covers whole chunks."""
        of_states = sum(len(self.inside(cell.pp, number)) for *_, number in self._repeats(cell.pp).tolist())
        states = self._states(cell)
        shares = np.where(states[:, 1] == Offload.OPTIMIZER.code, len(self.limits.offload_percents), 1)
        return len(self._group_rows(cell)) * int(shares.sum()) * of_states

    def _candidates(self, cells: Sequence[Cell]) -> tuple[PlanBatch, Ints]:
        owner, values = self._group_values(cells)
        kinds, of_group = self._kinds(cells, self._group_batch(cells, owner, values), owner)
        kinds, of_share = self._shared(kinds)
        batch, of_kind = self.plans_in(kinds)
        return batch, owner[of_group][of_share][of_kind]


def _with_columns(batch: PlanBatch, columns: Mapping[str, Ints | Bools]) -> PlanBatch:
    """Return the batch with other values of some axes."""
    return replace(batch, **columns)  # type: ignore[arg-type]


def _expanded(columns: Ints, tables: Sequence[Ints], width: int) -> tuple[Ints, Ints]:
    """Return (index into `columns` of each row, rows of its table); every element of `columns` refers to a table."""
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    rows = np.concatenate([np.reshape(table, (-1, width)) for table in tables] or [np.empty((0, width), np.int64)])
    table_sizes = sizes[columns]
    owner = np.repeat(np.arange(len(columns)), table_sizes)
    inside = np.arange(len(owner)) - np.repeat(np.cumsum(table_sizes) - table_sizes, table_sizes)
    return owner, rows[starts[columns][owner] + inside]


@lru_cache(maxsize=4096)
def _group_rows(limits: Limits, dp: int, choices: tuple[tuple[Value, ...], ...]) -> Ints:
    codes = [[axis.code(value) for value in values] for axis, values in zip(_GROUP_WORDS, choices, strict=True)]
    rows = [
        (batch, micro, *words)
        for batch in limits.global_batches
        if batch % dp == 0
        for micro in divisors(batch // dp)
        if limits.admits("micro_batch", micro)
        for words in product(*codes)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, len(_GROUP))


def _recompute(text: str) -> tuple[int, int, int]:
    """Return the three columns of a choice of recomputation."""
    plan = ParallelPlan(global_batch=1, **parse_recompute(text))  # type: ignore[arg-type]
    return Recompute(plan.recompute).code, module_bits(plan), repeated_layers(plan)
