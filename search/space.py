"""Which plans are there?  The legal plans of a problem in two levels: cells of degrees, and the plans inside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.framework import RANK_ORDERS
from autoplan.plan import (
    ALL_LAYERS,
    CP_KINDS,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    ParallelPlan,
    PlanBatch,
    even_chunks,
    module_bits,
    parse_recompute,
    repeated_layers,
)
from autoplan.rules import Rule, Setting, legal
from search.limits import Limits, divisors

Ints = NDArray[np.int64]

# Columns of the table of plans inside a cell; words are indices into the tuples of `autoplan.plan`.
_COLUMNS = (
    "global_batch",
    "micro_batch",
    "vp",
    "layout",
    "cp_kind",
    "sharding",
    "recompute",
    "recompute_modules",
    "recompute_num_layers",
    "offload",
    "tp_overlap",
    "rank_order",
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """The degrees that decide who communicates with whom; everything else varies inside a cell."""

    pp: int
    tp: int
    cp: int
    ep: int
    etp: int
    dp_replicate: int
    dp_shard: int

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inside:
    """All combinations inside a kind of cell, before rules: one row of `_COLUMNS` each."""

    rows: Ints
    layouts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The plans of one setting that obey the limits and the rules; every plan uses all devices."""

    setting: Setting
    limits: Limits
    rules: tuple[Rule, ...]
    placement: tuple[str, ...] | None = None  # of all plans

    def describe(self) -> tuple[str, ...]:
        """What the space leaves out, in words, for the certificate: the limits and what is derived from them."""
        limits, parts = self.limits, []
        batches = limits.global_batches
        if len(batches) > 1:
            parts.append(f"global batch on a grid of {len(batches)} values from {batches[0]} to {batches[-1]}")
        parts += limits.describe()
        if self.setting.model.moe and not limits.fixes("etp"):
            parts.append("etp 1|tp")
        if not limits.fixes("dp_replicate", "dp_shard"):
            domains = ", ".join(str(size) for size in limits.shard_domains)
            parts.append("states sharded over all replicas" + (f" or a link domain of {domains}" if domains else ""))
        parts.append("sp wherever tp divides the tokens" if limits.sequence_parallel else "sp off")
        if not limits.fixes("vp"):
            parts.append("vp a divisor of the layers of a rank")
        parts.append("layers spread evenly, or with the head, and the embedding too, counted as a layer")
        return tuple(parts)

    def cells(self) -> tuple[Cell, ...]:
        """Every way to factor the devices into degrees, ordered by stages so that neighbours are priced together."""
        return tuple(sorted(self._cells()))

    def plans(self, cells: Sequence[Cell]) -> tuple[PlanBatch, Ints]:
        """(the legal plans of `cells`, for each the index of its cell); the plans of one cell stand together."""
        batch, owner = self._candidates(cells)
        lawful = legal(self.rules, self.setting, batch)
        return batch.take(lawful), owner[lawful]

    def blocks(self, cells: Iterable[Cell], most_plans: int) -> Iterator[tuple[Cell, ...]]:
        """`cells` in order, in groups of about `most_plans` candidates (a single cell may hold more)."""
        block: list[Cell] = []
        held = 0
        for cell in cells:
            size = len(self._inside(cell).rows)
            if block and held + size > most_plans:
                yield tuple(block)
                block, held = [], 0
            block.append(cell)
            held += size
        if block:
            yield tuple(block)

    def candidates(self, cells: Sequence[Cell]) -> PlanBatch:
        """The plans of `cells` before the framework's rules; for messages that explain why none is left."""
        return self._candidates(cells)[0]

    def _cells(self) -> Iterator[Cell]:
        limits, devices = self.limits, self.setting.num_devices
        batches = limits.global_batches
        for pp in divisors(devices):
            if pp > self.setting.model.num_layers or not limits.admits("pp", pp):
                continue
            for tp in divisors(devices // pp):
                if not limits.admits("tp", tp):
                    continue
                for cp in divisors(devices // pp // tp):
                    dp = devices // (pp * tp * cp)
                    if not limits.admits("cp", cp) or not limits.admits("dp", dp):
                        continue
                    if not any(batch % dp == 0 for batch in batches):
                        continue
                    for replicate in self._replicates(tp, cp, dp):
                        for ep, etp in self._expert_degrees(tp, devices // pp, replicate):
                            yield Cell(
                                pp=pp, tp=tp, cp=cp, ep=ep, etp=etp, dp_replicate=replicate, dp_shard=dp // replicate
                            )

    def _replicates(self, tp: int, cp: int, dp: int) -> Iterator[int]:
        """Copies of the shard group: one, or so many that a group fills a link domain, or what the user fixed."""
        limits = self.limits
        free = limits.fixes("dp_replicate", "dp_shard")
        for replicate in divisors(dp):
            group = tp * cp * (dp // replicate)
            natural = replicate == 1 or (cp * (dp // replicate) > 1 and group in limits.shard_domains)
            if (
                (free or natural)
                and limits.admits("dp_replicate", replicate)
                and limits.admits("dp_shard", dp // replicate)
            ):
                yield replicate

    def _expert_degrees(self, tp: int, stage: int, replicate: int) -> Iterator[tuple[int, int]]:
        """(ep, etp): experts divide over ep; each is whole or split like the other matrices unless etp is fixed."""
        limits, moe = self.limits, self.setting.model.moe
        if moe is None:
            if limits.admits("ep", 1) and limits.admits("etp", 1):
                yield 1, 1
            return
        etps = divisors(stage) if limits.fixes("etp") else sorted({1, tp})
        for ep in divisors(math.gcd(moe.num_experts, stage)):
            for etp in etps:
                # Copies of the shard group hold whole expert groups.
                lawful = stage % (ep * etp * replicate) == 0
                if lawful and limits.admits("ep", ep) and limits.admits("etp", etp):
                    yield ep, etp

    def _inside(self, cell: Cell) -> _Inside:
        limits, model = self.limits, self.setting.model
        stage = cell.tp * cell.cp * cell.dp
        copies = cell.cp * cell.dp > 1 or (model.moe is not None and stage > cell.ep * cell.etp)
        # Without copies of a parameter sharding changes nothing, but that the host takes sharded optimizers only;
        # without sharding the split of dp changes nothing.
        states = tuple(
            (sharding, place)
            for sharding in limits.shardings
            for place in limits.offloads
            if copies or sharding == limits.shardings[0] or (sharding == "zero1" and place == "optimizer")
        )
        if cell.dp_replicate > 1 and not limits.fixes("dp_replicate", "dp_shard"):
            states = tuple((sharding, place) for sharding, place in states if sharding != "none")
        cp_kinds = limits.cp_kinds if cell.cp > 1 else limits.cp_kinds[:1]
        overlaps = limits.tp_overlaps if cell.tp > 1 else limits.tp_overlaps[:1]
        orders = limits.rank_orders if cell.pp > 1 and cell.dp > 1 else limits.rank_orders[:1]
        others = (cp_kinds, overlaps, orders)
        return _inside(limits, model.num_layers, model.num_mtp_layers, cell.pp, cell.dp, states, others)

    def _sequence_parallel(self, tp: Ints, cp: Ints) -> NDArray[np.bool_]:
        """Where the tokens of a rank can be shared out over its tensor-parallel group; tp = 3 rarely divides them."""
        divides = self.setting.training.seq_len // cp % tp == 0
        return (tp > 1) & divides & self.limits.sequence_parallel

    def _candidates(self, cells: Sequence[Cell]) -> tuple[PlanBatch, Ints]:
        tables = [self._inside(cell) for cell in cells]
        owner = np.repeat(np.arange(len(cells)), [len(table.rows) for table in tables])
        layouts: dict[tuple[int, ...], int] = {}
        parts = []
        for table in tables:
            index = np.array([layouts.setdefault(layout, len(layouts)) for layout in table.layouts], dtype=np.int64)
            parts.append(index[table.rows[:, _COLUMNS.index("layout")]])
        rows = np.concatenate([table.rows for table in tables]) if tables else np.empty((0, len(_COLUMNS)), np.int64)
        column = {name: rows[:, at] for at, name in enumerate(_COLUMNS)}
        degrees = {
            field.name: np.array([getattr(cell, field.name) for cell in cells], dtype=np.int64)[owner]
            for field in fields(Cell)
        }
        size = len(owner)
        batch = PlanBatch(
            **degrees,
            global_batch=column["global_batch"],
            micro_batch=column["micro_batch"],
            vp=column["vp"],
            sp=self._sequence_parallel(degrees["tp"], degrees["cp"]),
            tp_overlap=column["tp_overlap"].astype(np.bool_),
            grad_reduce_overlap=np.ones(size, dtype=np.bool_),
            # Only sharded optimizers gather parameters.
            param_gather_overlap=column["sharding"] > SHARDINGS.index("none"),
            ep_overlap=np.zeros(size, dtype=np.bool_),
            cp_kind=column["cp_kind"],
            schedule=np.where(column["vp"] > 1, SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")),
            sharding=column["sharding"],
            recompute=column["recompute"],
            recompute_modules=column["recompute_modules"],
            recompute_num_layers=column["recompute_num_layers"],
            precision=np.full(size, PRECISIONS.index(self.limits.precision), dtype=np.int64),
            offload=column["offload"],
            rank_order=column["rank_order"],
            layout=np.concatenate(parts) if parts else np.empty(0, np.int64),
            layouts=tuple(layouts),
            placement=self.placement,
        )
        return batch, owner


@lru_cache(maxsize=4096)
def chunk_counts(num_layers: int, pp: int) -> tuple[int, ...]:
    """Interleaving degrees to consider: those that divide the layers of a rank.

    The layers of a rank are rounded up, and up once more with embedding and head counted as layers, as in Llama 3
    405B: 126 layers on 16 ranks are 8 a rank, and 8 chunks of which the first and the last have no layer.
    """
    if pp == 1:
        return (1,)
    per_rank = {-(-num_layers // pp), -(-(num_layers + 2) // pp)}
    return tuple(sorted({vp for layers in per_rank for vp in divisors(layers) if pp * vp <= num_layers + 2}))


@lru_cache(maxsize=4096)
def layouts(num_layers: int, pp: int, vp: int, num_mtp_layers: int = 0) -> tuple[tuple[int, ...], ...]:
    """Layers of every chunk: spread evenly, and with what stands beside them counted as layers.

    The head counts as one layer, or as one and the prediction layers before it; the embedding as none or one.  Only
    an end may be without a layer, and every rank has one.
    """
    chunks = pp * vp
    found = [even_chunks(num_layers, chunks)]
    if pp > 1:
        for behind in sorted({1, 1 + num_mtp_layers}):
            for before in (0, 1):
                whole = even_chunks(num_layers + before + behind, chunks)
                found.append((whole[0] - before, *whole[1:-1], whole[-1] - behind))

    def usable(layout: tuple[int, ...]) -> bool:
        ranks = (sum(layout[rank::pp]) for rank in range(pp))
        return min(layout) >= 0 and all(layout[1:-1]) and all(ranks)

    return tuple(dict.fromkeys(layout for layout in found if usable(layout)))


@lru_cache(maxsize=4096)
def _inside(
    limits: Limits,
    num_layers: int,
    num_mtp_layers: int,
    pp: int,
    dp: int,
    states: tuple[tuple[str, str], ...],
    others: tuple[tuple[str, ...], tuple[bool, ...], tuple[str, ...]],
) -> _Inside:
    cp_kinds, tp_overlaps, rank_orders = others
    batches = [
        (batch, micro)
        for batch in limits.global_batches
        if batch % dp == 0
        for micro in divisors(batch // dp)
        if limits.admits("micro_batch", micro)
    ]
    table: dict[tuple[int, ...], int] = {}
    chunks = [
        (vp, table.setdefault(layout, len(table)))
        for vp in chunk_counts(num_layers, pp)
        if limits.admits("vp", vp)
        for layout in layouts(num_layers, pp, vp, num_mtp_layers)
    ]
    rest = [
        (
            CP_KINDS.index(kind),
            SHARDINGS.index(sharding),
            *_recompute(recompute),
            OFFLOADS.index(place),
            overlap,
            RANK_ORDERS.index(order),
        )
        for kind in cp_kinds
        for sharding, place in states
        for recompute in limits.recomputes
        for overlap in tp_overlaps
        for order in rank_orders
    ]
    a = np.array(batches, dtype=np.int64).reshape(-1, 2)
    b = np.array(chunks, dtype=np.int64).reshape(-1, 2)
    c = np.array(rest, dtype=np.int64).reshape(-1, 8)
    rows = np.hstack(
        [
            np.repeat(a, len(b) * len(c), axis=0),
            np.tile(np.repeat(b, len(c), axis=0), (len(a), 1)),
            np.tile(c, (len(a) * len(b), 1)),
        ]
    )
    # A number of layers that is no less than those of a chunk is the same plan as all of them.
    number = rows[:, _COLUMNS.index("recompute_num_layers")]
    longest = np.array([max(layout) for layout in table], dtype=np.int64)
    distinct = (number == ALL_LAYERS) | (number < longest[rows[:, _COLUMNS.index("layout")]])
    return _Inside(rows=rows[distinct], layouts=tuple(table))


def _recompute(text: str) -> tuple[int, int, int]:
    """The three columns that hold a choice of recomputation."""
    plan = ParallelPlan(global_batch=1, **parse_recompute(text))  # type: ignore[arg-type]
    return RECOMPUTES.index(plan.recompute), module_bits(plan), repeated_layers(plan)
