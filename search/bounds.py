"""What can a plan not beat?  Lower bounds on step time and memory, made of the same prices as the estimate.

A *kind* is a plan but for its layout: degrees, batch, micro-batch, states, recomputation.  What its layers, head and
messages cost is priced once; the bound of any of its layouts, or of all together, is then a few operations.  No bound
is ever above the estimate.

Layers are told apart by their blocks; arrays of them have a last axis with an element for each sort of layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.arithmetic import block_shapes
from autoplan.cost.communication import CONTENTION_SHARE, Links
from autoplan.cost.communicators import groups
from autoplan.cost.compute import KERNEL_AXES, add_up, head_s
from autoplan.cost.estimate import message_s, straggler_share
from autoplan.cost.layer import block_costs, local_parameters
from autoplan.cost.layout import StageBlocks, repeats_mtp
from autoplan.cost.memory import (
    StageParameters,
    boundary_bytes,
    communicator_bytes,
    states,
    stored_bytes,
    wgrad_buffer_bytes,
)
from autoplan.cost.order import V_SHAPED
from autoplan.cost.recompute import activation_parts, kept_bytes
from autoplan.cost.schedule import send_exposed_s
from autoplan.cost.tail import optimizer_s, reduction_s
from autoplan.model import Block, ModelSpec
from autoplan.plan import SCHEDULES, SHARDINGS, PlanBatch
from autoplan.problem import Problem
from search.space import Space

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ONE_FORWARD_ONE_BACKWARD = tuple(SCHEDULES.index(name) for name in ("1f1b", "interleaved"))
FOLDED = tuple(SCHEDULES.index(name) for name in V_SHAPED)


# -- where the layers lie ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How many layers of each sort lie on the ranks that decide, and how many of them are recomputed as a whole.

    Shape (layouts, sorts).  Of several layouts together each figure is the least.
    """

    first: Ints  # on the first rank
    kept_first: Ints  # of these, not recomputed as a whole
    second: Ints  # on the rank behind it, which has no embedding and often more layers
    kept_second: Ints
    last: Ints  # on the rank with the head
    heaviest: Ints  # on the rank with most layers but for the last one, the later of equal ones
    before: Ints  # on the ranks before that one
    repeated: Ints  # of the whole model
    repeated_first: Ints
    repeated_second: Ints
    repeated_last: Ints
    repeated_heaviest: Ints
    # Shape (layouts):
    rank: Ints  # which one is the heaviest, -1 where that is not known
    has_path: Bools  # whether the schedule is 1F1B, plain or interleaved, whose closed form holds
    is_folded: Bools  # whether the first rank has the last chunk too, so that fewer passes than stages may be alive

    def take(self, which: Ints) -> Spread:
        """Those of the layouts at the given indices."""
        return Spread(**{name: getattr(self, name)[which] for name in self.__slots__})


FIGURES = Spread.__slots__[: Spread.__slots__.index("rank")]


@lru_cache(maxsize=64)
def sorts(model: ModelSpec) -> tuple[tuple[Block, ...], ...]:
    """The layers of a model that differ."""
    return tuple(dict.fromkeys(model.layers))


@lru_cache(maxsize=16384)
def _spread(model: ModelSpec, layout: tuple[int, ...], pp: int, *, is_folded: bool) -> tuple[Ints, int]:
    """(`FIGURES` of one layout, heaviest rank): shape (layers of a chunk that are recomputed, figures, sorts)."""
    layers, total = np.array(layout), _layers_before(model)
    starts, numbers = np.cumsum(layers) - layers, np.arange(max(layout) + 1)
    held = _by_rank(total[starts + layers] - total[starts], pp, is_folded=is_folded)
    again = _by_rank(total[starts + np.minimum(layers, numbers[:, None])] - total[starts], pp, is_folded=is_folded)
    head, behind = 0 if is_folded else pp - 1, min(1, pp - 1)
    others = held[: max(pp - 1, 1)].sum(axis=1)
    rank = len(others) - 1 - int(np.argmax(others[::-1]))
    figures = {
        "first": held[0],
        "kept_first": held[0] - again[:, 0],
        "second": held[behind],
        "kept_second": held[behind] - again[:, behind],
        "last": held[head],
        "heaviest": held[rank],
        "before": held[:rank].sum(axis=0),
        "repeated": again.sum(axis=1),
        "repeated_first": again[:, 0],
        "repeated_second": again[:, behind],
        "repeated_last": again[:, head],
        "repeated_heaviest": again[:, rank],
    }
    table = np.empty((len(numbers), len(FIGURES), total.shape[1]), dtype=np.int64)
    for at, name in enumerate(FIGURES):
        table[:, at] = figures[name]
    return table, rank


@lru_cache(maxsize=64)
def _layers_before(model: ModelSpec) -> Ints:
    """How many of the first n layers are of each sort: shape (layers + 1, sorts)."""
    which = np.array([sorts(model).index(layer) for layer in model.layers])
    total = np.zeros((model.num_layers + 1, len(sorts(model))), dtype=np.int64)
    np.cumsum(which[:, None] == np.arange(total.shape[1]), axis=0, out=total[1:])
    return total


def _by_rank(chunks: Ints, pp: int, *, is_folded: bool) -> Ints:
    """Sums over the chunks of every rank: chunk i is on rank i mod pp, or comes back from the last rank."""
    rounds = chunks.reshape(*chunks.shape[:-2], -1, pp, chunks.shape[-1])
    return rounds[..., 0, :, :] + rounds[..., 1, ::-1, :] if is_folded else rounds.sum(axis=-3)


def spreads(model: ModelSpec, layouts: Sequence[tuple[tuple[int, ...], int, int, int]]) -> Spread:
    """The figures of some (layers of each chunk, ranks, layers of a chunk that are recomputed, schedule)."""
    schedule = np.array([one[-1] for one in layouts], dtype=np.int64)
    is_folded = np.isin(schedule, FOLDED)
    found = [
        _spread(model, one[0], one[1], is_folded=bool(folds)) for one, folds in zip(layouts, is_folded, strict=True)
    ]
    chosen = [table[min(again, len(table) - 1)] for (table, _), (_, _, again, _) in zip(found, layouts, strict=True)]
    table = np.array(chosen).reshape(len(found), len(FIGURES), len(sorts(model)))
    return Spread(
        **{name: table[:, at] for at, name in enumerate(FIGURES)},
        rank=np.array([rank for _, rank in found], dtype=np.int64),
        has_path=np.isin(schedule, ONE_FORWARD_ONE_BACKWARD),
        is_folded=is_folded,
    )


def spread_of(model: ModelSpec, batch: PlanBatch) -> Spread:
    """The figures of every plan of `batch`."""
    some, like = batch.distinct("layout", "recompute_num_layers", "pp", "schedule")
    columns = (column[some].tolist() for column in (batch.layout, batch.pp, batch.recompute_num_layers, batch.schedule))
    keys = zip(*columns, strict=True)
    return spreads(model, [(batch.layouts[at], *rest) for at, *rest in keys]).take(like)


# -- what plans of a kind cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCosts:
    """What plans of a kind have in common: an element per kind, some with a last axis for sorts of layers."""

    batch: PlanBatch
    model_s: Floats  # both passes of one micro-batch through the whole model, nothing recomputed as a whole
    layer_s: Floats  # both passes of a layer: (kinds, sorts)
    forward_s: Floats  # the forward pass in it
    repeat_s: Floats  # what recomputing the layer as a whole adds
    head_s: Floats
    message_s: Floats
    rest_s: Floats  # once a step
    factor: Floats  # stragglers and calibration, on everything
    state_bytes: Floats  # of a layer: (kinds, sorts)
    kept_bytes: Floats  # of a layer and micro-batch: (kinds, sorts)
    stored_bytes: Floats  # of a layer that is recomputed as a whole
    boundary_bytes: Floats  # of a chunk in flight
    embedding_bytes: Floats  # its states
    fixed_bytes: Floats  # whatever the layout

    def of(self, plans: PlanBatch, kind: Ints) -> KindCosts:
        """Those of `plans`, each of the kind at an index."""
        names = [name for name in self.__slots__ if name != "batch"]
        return KindCosts(batch=plans, **{name: getattr(self, name)[kind] for name in names})

    def step_s(self, vp: Ints, spread: Spread, *, overlaps: bool) -> Floats:
        """A time that no plan of the kind with at most `vp` chunks a rank and such a spread of layers beats.

        The paths of the last and the heaviest rank through the closed form of 1F1B, and the work of each of them and
        the mean of all ranks, which no schedule beats.
        """
        pp, m = self.batch.pp, self.batch.num_microbatches
        total = self.model_s + (spread.repeated * self.repeat_s).sum(axis=-1)
        last = (spread.last * self.layer_s + spread.repeated_last * self.repeat_s).sum(axis=-1) + self.head_s
        heavy = (spread.heaviest * self.layer_s + spread.repeated_heaviest * self.repeat_s).sum(axis=-1)
        path = np.where(spread.rank < 0, 0.0, m * heavy + self._around(spread, total, heavy) / vp)
        path = np.maximum(m * last + (total - last) / vp, path)
        work = np.maximum(m * total / pp, np.where(spread.has_path, path, m * np.maximum(last, heavy)))
        one, two = (
            send_exposed_s(self.message_s, pp, m, np.full_like(pp, count), self.message_s, overlaps=overlaps)
            for count in (1, 2)
        )
        sends = np.where(spread.has_path, np.where(vp > 1, np.minimum(one, two), one), 0.0)
        return self.factor * (work + sends + self.rest_s)

    def _around(self, spread: Spread, total: Floats, heavy: Floats) -> Floats:
        """What the heaviest rank waits for: the work before it, and behind it as far as its own does not cover that."""
        before = (spread.before * self.layer_s).sum(axis=-1)
        behind = np.where(
            self.batch.pp > 1,
            np.maximum(total - before - (spread.repeated * self.repeat_s).sum(axis=-1) - heavy, 0.0),
            0.0,
        )
        forward = (spread.heaviest * self.forward_s).sum(axis=-1)
        warmup = self.batch.pp - 1 - spread.rank
        covering = np.minimum(self.batch.num_microbatches - 1, warmup)
        filling = np.maximum(behind - covering * forward, 0.0)
        draining = np.maximum(behind - covering * (heavy - forward), 0.0)
        return before + np.where(covering < warmup, np.maximum(filling, draining), filling + draining)

    def memory_bytes(self, spread: Spread) -> Floats:
        """Memory that no plan of the kind with such a spread of layers does without, on its first or second rank."""
        m, pp = self.batch.num_microbatches, self.batch.pp

        def rank_bytes(layers: Ints, kept: Ints, repeated: Ints, live: Ints) -> Floats:
            passes = (kept * self.kept_bytes).sum(axis=-1) + repeated.sum(axis=-1) * self.stored_bytes
            passes = passes + self.boundary_bytes
            return (layers * self.state_bytes).sum(axis=-1) + np.where(spread.is_folded, 1, live) * passes

        first = rank_bytes(spread.first, spread.kept_first, spread.repeated_first, np.minimum(m, pp))
        ahead = np.minimum(m, np.maximum(pp - 1, 1))
        second = rank_bytes(spread.second, spread.kept_second, spread.repeated_second, ahead)
        return self.fixed_bytes + np.maximum(first + self.embedding_bytes, second)


def kind_costs(problem: Problem, batch: PlanBatch, first: tuple[Ints, Ints] | None = None) -> KindCosts:
    """What the kinds of `batch` cost; their layouts are not looked at.

    `first` are the fewest and the most layers that the first rank may have; without them the reductions of gradients
    count as none.  Nor do they where times were measured, which need not grow with the buffer as a bound takes it.
    """
    problem, model = problem.placed(batch.placement), problem.model
    costs = block_costs(problem, batch)
    forward = {block: cost.total_forward_s for block, cost in costs.items()}
    both = {block: forward[block] + cost.total_backward_s for block, cost in costs.items()}
    repeat = {block: cost.total_repeat_s for block, cost in costs.items()}
    some, like = batch.distinct(*KERNEL_AXES)
    head = add_up(times[like] for times in head_s(problem, batch.take(some))[:2])
    for block in model.mtp_layer if model.num_mtp_layers else ():
        head = head + model.num_mtp_layers * (both[block] + repeat[block] * repeats_mtp(batch))
    layer_s = _per_layer(model, both)
    held = {block: local_parameters(batch, shape) for block, shape in block_shapes(model).items()}
    dense, expert = (_per_layer(model, {block: pair[part] for block, pair in held.items()}) for part in (0, 1))
    per_dense, per_expert, per_end = (
        _state_bytes(problem, batch, *one) for one in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0))
    )
    framework = problem.framework
    counts = np.array([model.layers.count(layer) for layer in sorts(model)])
    mean = ((counts * part).sum(axis=-1) / batch.pp for part in (dense, expert))
    rest_s = framework.step_overhead_s + _update_s(problem, batch, *mean)
    if first is not None and problem.timings.is_empty:
        rest_s = rest_s + _reductions_s(problem, batch, dense.min(axis=-1), expert.min(axis=-1), first)
    return KindCosts(
        batch=batch,
        model_s=(counts * layer_s).sum(axis=-1) + head,
        layer_s=layer_s,
        forward_s=_per_layer(model, forward),
        repeat_s=_per_layer(model, repeat),
        head_s=head,
        message_s=np.where(batch.pp > 1, message_s(problem, batch), 0.0),
        rest_s=rest_s,
        factor=problem.calibration.overall * (1.0 + straggler_share(batch.num_devices)),
        state_bytes=per_dense[:, None] * dense + per_expert[:, None] * expert,
        kept_bytes=_kept_bytes(problem, batch),
        stored_bytes=framework.reserved_factor * stored_bytes(problem, batch) * len(model.layers[0]),
        boundary_bytes=framework.reserved_factor * boundary_bytes(problem, batch),
        embedding_bytes=per_end * model.vocab_size * model.hidden_size / batch.tp,
        fixed_bytes=_fixed_bytes(problem, batch),
    )


def _per_layer(model: ModelSpec, per_block: dict[Block, Floats]) -> Floats:
    return np.stack([add_up(per_block[block] for block in layer) for layer in sorts(model)], axis=-1)


def _state_bytes(problem: Problem, batch: PlanBatch, dense: float, expert: float, ends: float) -> Floats:
    """What a rank holds of weights, gradients and optimizer for so many dense and expert parameters of its own."""
    column = np.ones((len(batch), 1))
    one = StageParameters(dense=dense * column, expert=expert * column, ends=ends * column)
    return problem.framework.reserved_factor * add_up(states(problem, batch, one, groups(batch)))[:, 0]


def _kept_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """What a layer keeps of one micro-batch, under what the plans recompute by name."""
    kept = {
        block: kept_bytes(problem, batch, activation_parts(problem, batch, block, shape))
        for block, shape in block_shapes(problem.model).items()
    }
    return problem.framework.reserved_factor * _per_layer(problem.model, kept)


def _fixed_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """What every rank holds whatever its layers are: context, buffers of communicators and of weight gradients."""
    framework, shape = problem.framework, (len(batch), 1)
    none = np.zeros(shape, dtype=np.int64)
    blocks = StageBlocks(count={}, repeated={}, repeats_chunk=none > 0, chunks_alike=none[:, 0] == 0, is_last=none > 0)
    buffers = wgrad_buffer_bytes(problem, batch, blocks)[:, 0]
    return framework.fixed_bytes + framework.reserved_factor * buffers + communicator_bytes(problem, groups(batch))


def _update_s(problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats) -> Floats:
    """The optimizer's step of a rank with the mean of the parameters of all stages, which one of them exceeds."""
    if problem.timings.holds("optimizer", "bf16", "fp16", "fp32"):
        return np.zeros(len(batch))
    places, sharded = groups(batch), batch.sharding >= SHARDINGS.index("zero1")
    own = dense / np.where(sharded, places.shard[1], 1) + expert / np.where(sharded, places.expert_shard[1], 1)
    return optimizer_s(problem, batch, own, dense + expert)


def _reductions_s(
    problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats, first: tuple[Ints, Ints]
) -> Floats:
    """What shows at least of reducing gradients and gathering parameters on the first rank (`cost.tail`).

    `dense` and `expert` are the parameters of its leanest layer.  However much of the reduction the last backward pass
    hides, its last bucket shows, and the contention with what it hides under.
    """
    fewest, most = first
    model, framework = problem.model, problem.framework
    table = model.vocab_size * model.hidden_size / batch.tp
    held = StageParameters(
        dense=(fewest * dense + table)[:, None], expert=(fewest * expert)[:, None], ends=table[:, None]
    )
    none = np.zeros((len(batch), 1), dtype=np.int64)
    block, per_layer = model.layers[0][0], len(model.layers[0])
    blocks = StageBlocks(
        count={block: fewest[:, None]},
        repeated={block: none},
        repeats_chunk=none > 0,
        chunks_alike=none[:, 0] == 0,
        is_last=none > 0,
    )
    reduce, gather = (times[:, 0] for times in reduction_s(problem, batch, blocks, held, Links.of(problem)))
    last_bucket = 1.0 / np.maximum(most * per_layer, 1)
    may_hide = np.where(batch.sharding == 0, framework.grad_reduce_overlap, framework.sharded_reduce_overlap)
    hidden = reduce * (last_bucket + CONTENTION_SHARE * (1.0 - last_bucket))
    gathers_early = batch.param_gather_overlap & framework.param_gather_overlap
    return np.where(may_hide, hidden, reduce) + gather * np.where(gathers_early, last_bucket, 1.0)


# -- all layouts of a kind, and all kinds of a group ------------------------------------------------------------------


def kind_bounds(problem: Problem, space: Space, costs: KindCosts) -> tuple[Floats, Floats]:
    """(a time that no plan of each kind beats, memory that none does without)."""
    batch = costs.batch
    if not len(batch):
        return np.zeros(0), np.zeros(0)
    some, like = batch.distinct("pp", "recompute_num_layers")
    least = [_fewest(space, int(batch.pp[at]), int(batch.recompute_num_layers[at])) for at in some]
    vp = np.array([vp for vp, _ in least], dtype=np.int64)[like]
    joined = Spread(**{name: np.stack([getattr(one, name) for _, one in least]) for name in Spread.__slots__})
    spread = joined.take(like)
    time = costs.step_s(vp, spread, overlaps=problem.framework.p2p_overlap)
    return time, costs.memory_bytes(spread)


def group_bounds(problem: Problem, space: Space, groups: PlanBatch) -> tuple[Floats, Floats]:
    """(a time that no plan of each group beats, memory that none does without)."""
    costs = kind_costs(problem, groups)
    overhead_s = np.full(len(groups), problem.framework.step_overhead_s)
    time, _ = kind_bounds(problem, space, replace(costs, rest_s=overhead_s))
    lean = kind_costs(problem, space.leanest(groups))
    if space.limits.repeats_layers:
        lean = replace(lean, kept_bytes=np.minimum(lean.kept_bytes, lean.stored_bytes[:, None]))
    return time, kind_bounds(problem, space, lean)[1]


def first_layers(space: Space, kinds: PlanBatch) -> tuple[Ints, Ints]:
    """(fewest, most) layers of the first rank in all layouts of each kind."""
    stages, at = np.unique(kinds.pp, return_inverse=True)
    ends = np.array([_first_layers(space, int(pp)) for pp in stages], dtype=np.int64).reshape(-1, 2)[at]
    return ends[:, 0], ends[:, 1]


@lru_cache(maxsize=4096)
def _first_layers(space: Space, pp: int) -> tuple[int, int]:
    held = [
        int(_spread(space.setting.model, layers, pp, is_folded=schedule in FOLDED)[0][0, 0].sum())
        for _, schedule, layers in space.layouts_on(pp)
    ]
    return min(held, default=0), max(held, default=0)


@lru_cache(maxsize=4096)
def _fewest(space: Space, pp: int, num_repeated: int) -> tuple[int, Spread]:
    """(most chunks of a rank, least figures) of all layouts on so many stages."""
    found = space.layouts_on(pp)
    spread = spreads(space.setting.model, [(layout, pp, num_repeated, schedule) for _, schedule, layout in found])
    none = np.zeros(len(sorts(space.setting.model)), dtype=np.int64)
    least = {name: getattr(spread, name).min(axis=0) if found else none for name in FIGURES}
    return max((vp for vp, _, _ in found), default=1), Spread(
        **least, rank=np.array(-1), has_path=np.array(spread.has_path.all()), is_folded=np.array(spread.is_folded.any())
    )
