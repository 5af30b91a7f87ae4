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
from autoplan.cost.communicators import groups
from autoplan.cost.compute import KERNEL_AXES, add_up, head_s
from autoplan.cost.estimate import message_s, straggler_share
from autoplan.cost.layer import block_costs, local_parameters
from autoplan.cost.layout import repeats_mtp
from autoplan.cost.memory import StageParameters, states, stored_bytes
from autoplan.cost.recompute import activation_parts, kept_bytes
from autoplan.cost.schedule import send_exposed_s
from autoplan.cost.tail import optimizer_s
from autoplan.model import Block, ModelSpec
from autoplan.plan import SCHEDULES, SHARDINGS, PlanBatch
from autoplan.problem import Problem
from search.space import Space

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ONE_FORWARD_ONE_BACKWARD = tuple(SCHEDULES.index(name) for name in ("1f1b", "interleaved"))


# -- where the layers lie ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How many layers of each sort lie on the ranks that decide, and how many of them are recomputed as a whole.

    Shape (layouts, sorts).  Of several layouts together each figure is the least.
    """

    first: Ints  # on the first rank
    kept_first: Ints  # of these, not recomputed as a whole
    last: Ints  # on the rank with the head
    heaviest: Ints  # on the rank with most layers but for the last one, the later of equal ones
    before: Ints  # on the ranks before that one
    repeated: Ints  # of the whole model
    repeated_first: Ints
    repeated_last: Ints
    repeated_heaviest: Ints
    rank: Ints  # which one is the heaviest, -1 where that is not known: shape (layouts)

    def take(self, which: Ints) -> Spread:
        """Those of the layouts at the given indices."""
        return Spread(**{name: getattr(self, name)[which] for name in self.__slots__})


@lru_cache(maxsize=64)
def sorts(model: ModelSpec) -> tuple[tuple[Block, ...], ...]:
    """The layers of a model that differ."""
    return tuple(dict.fromkeys(model.layers))


@lru_cache(maxsize=65536)
def _spread(model: ModelSpec, layout: tuple[int, ...], pp: int, num_repeated: int) -> tuple[Ints, int]:
    """((figures of `Spread` but the rank, sorts), rank) of one layout."""
    which = np.array([sorts(model).index(layer) for layer in model.layers])
    layers = np.array(layout)
    starts = np.cumsum(layers) - layers
    total = np.zeros((model.num_layers + 1, len(sorts(model))), dtype=np.int64)
    np.cumsum(which[:, None] == np.arange(total.shape[1]), axis=0, out=total[1:])
    held = (total[starts + layers] - total[starts]).reshape(-1, pp, total.shape[1]).sum(axis=0)
    again = total[starts + np.minimum(layers, num_repeated)] - total[starts]
    again = again.reshape(-1, pp, total.shape[1]).sum(axis=0)
    others = held[: max(pp - 1, 1)].sum(axis=1)
    rank = len(others) - 1 - int(np.argmax(others[::-1]))
    before = held[:rank].sum(axis=0)
    figures = [held[0], held[0] - again[0], held[-1], held[rank], before]
    return np.stack([*figures, again.sum(axis=0), again[0], again[-1], again[rank]]), rank


def spreads(model: ModelSpec, layouts: Sequence[tuple[tuple[int, ...], int, int]]) -> Spread:
    """The figures of some (layers of each chunk, ranks, layers of a chunk that are recomputed)."""
    found = [_spread(model, *one) for one in layouts]
    names = [name for name in Spread.__slots__ if name != "rank"]
    table = np.array([figures for figures, _ in found]).reshape(len(found), len(names), len(sorts(model)))
    columns = {name: table[:, at] for at, name in enumerate(names)}
    return Spread(**columns, rank=np.array([rank for _, rank in found], dtype=np.int64))


def spread_of(model: ModelSpec, batch: PlanBatch) -> Spread:
    """The figures of every plan of `batch`."""
    some, like = batch.distinct("layout", "recompute_num_layers", "pp")
    keys = zip(batch.layout[some], batch.pp[some], batch.recompute_num_layers[some], strict=True)
    return spreads(model, [(batch.layouts[at], int(pp), int(again)) for at, pp, again in keys]).take(like)


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
    fixed_bytes: Floats  # the embedding's states among them

    def of(self, plans: PlanBatch, kind: Ints) -> KindCosts:
        """Those of `plans`, each of the kind at an index."""
        names = [name for name in self.__slots__ if name != "batch"]
        return KindCosts(batch=plans, **{name: getattr(self, name)[kind] for name in names})

    def step_s(self, vp: Ints, spread: Spread, *, overlaps: bool) -> Floats:
        """A time that no plan of the kind with at most `vp` chunks a rank and such a spread of layers beats.

        The paths of the last and the heaviest rank through the closed form of 1F1B, and the mean work of all ranks,
        which no schedule beats.
        """
        pp, m = self.batch.pp, self.batch.num_microbatches
        total = self.model_s + (spread.repeated * self.repeat_s).sum(axis=-1)
        last = (spread.last * self.layer_s + spread.repeated_last * self.repeat_s).sum(axis=-1) + self.head_s
        heavy = (spread.heaviest * self.layer_s + spread.repeated_heaviest * self.repeat_s).sum(axis=-1)
        path = np.where(spread.rank < 0, 0.0, m * heavy + self._around(spread, total, heavy) / vp)
        path = np.maximum(m * last + (total - last) / vp, path)
        has_path = np.isin(self.batch.schedule, ONE_FORWARD_ONE_BACKWARD)
        mean = m * total / pp
        work = np.where(has_path, np.maximum(mean, path), mean)
        one, two = (
            send_exposed_s(self.message_s, pp, m, np.full_like(pp, count), self.message_s, overlaps=overlaps)
            for count in (1, 2)
        )
        sends = np.where(has_path, np.where(vp > 1, np.minimum(one, two), one), 0.0)
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
        """Memory that no plan of the kind with such a spread of layers does without, on its first rank."""
        live = np.minimum(self.batch.num_microbatches, self.batch.pp)
        states_bytes = (spread.first * self.state_bytes).sum(axis=-1)
        kept = (spread.kept_first * self.kept_bytes).sum(axis=-1)
        kept = kept + spread.repeated_first.sum(axis=-1) * self.stored_bytes
        return self.fixed_bytes + states_bytes + live * kept


def kind_costs(problem: Problem, batch: PlanBatch) -> KindCosts:
    """What the kinds of `batch` cost; their layouts are not looked at."""
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
    return KindCosts(
        batch=batch,
        model_s=(counts * layer_s).sum(axis=-1) + head,
        layer_s=layer_s,
        forward_s=_per_layer(model, forward),
        repeat_s=_per_layer(model, repeat),
        head_s=head,
        message_s=np.where(batch.pp > 1, message_s(problem, batch), 0.0),
        rest_s=framework.step_overhead_s + _update_s(problem, batch, *mean),
        factor=problem.calibration.overall * (1.0 + straggler_share(batch.num_devices)),
        state_bytes=per_dense[:, None] * dense + per_expert[:, None] * expert,
        kept_bytes=_kept_bytes(problem, batch),
        stored_bytes=framework.reserved_factor * stored_bytes(problem, batch) * len(model.layers[0]),
        fixed_bytes=framework.fixed_bytes + per_end * model.vocab_size * model.hidden_size / batch.tp,
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


def _update_s(problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats) -> Floats:
    """The optimizer's step of a rank with the mean of the parameters of all stages, which one of them exceeds."""
    if problem.timings.holds("optimizer", "bf16", "fp16", "fp32"):
        return np.zeros(len(batch))
    places, sharded = groups(batch), batch.sharding >= SHARDINGS.index("zero1")
    own = dense / np.where(sharded, places.shard[1], 1) + expert / np.where(sharded, places.expert_shard[1], 1)
    return optimizer_s(problem, batch, own, dense + expert)


# -- all layouts of a kind, and all kinds of a group ------------------------------------------------------------------


def kind_bounds(problem: Problem, space: Space, costs: KindCosts) -> tuple[Floats, Floats]:
    """(a time that no plan of each kind beats, memory that none does without)."""
    batch = costs.batch
    some, like = batch.distinct("pp", "recompute_num_layers")
    least = [_fewest(space, int(batch.pp[at]), int(batch.recompute_num_layers[at])) for at in some]
    table = np.array([figures for _, figures in least]).reshape(
        -1, len(Spread.__slots__) - 1, len(sorts(problem.model))
    )
    table, vp = table[like], np.array([vp for vp, _ in least], dtype=np.int64)[like]
    figures = {name: table[:, at] for at, name in enumerate(Spread.__slots__[:-1])}
    spread = Spread(**figures, rank=np.full(len(batch), -1))
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


@lru_cache(maxsize=4096)
def _fewest(space: Space, pp: int, num_repeated: int) -> tuple[int, Ints]:
    """(most chunks of a rank, least figures of `Spread` but the rank) of all layouts on so many stages."""
    model, layouts = space.setting.model, space.layouts_on(pp)
    found = [_spread(model, layout, pp, num_repeated)[0] for _, layout in layouts]
    figures = np.minimum.reduce(found) if found else np.zeros((len(Spread.__slots__) - 1, len(sorts(model))), np.int64)
    return max((vp for vp, _ in layouts), default=1), figures
