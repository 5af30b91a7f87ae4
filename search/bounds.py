"""Lower bounds on the step time and memory of plans, made of the same prices as the estimate.

A *kind* is a plan but for its layout and the number of layers that it recomputes: degrees, batch, micro-batch, states,
recomputation.  What its layers, head and messages cost is priced once; how many layers lie where is counted once for
all kinds on so many stages; the bounds of all plans of all these kinds are then products of the two.  No bound is ever
above the estimate.

Layers are told apart by their blocks; arrays of them have a last axis with an element for each sort of layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.base.arrays import Bools, Floats, Ints, Rows, add_up, distinct_rows
from autoplan.cost.blocks import BlockCost, ahead_s, block_costs
from autoplan.cost.collectives.end_of_step import end_of_step_s, least_shown_s, optimizer_s
from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.kernels.arithmetic import block_shapes
from autoplan.cost.kernels.sizes import KERNEL_AXES
from autoplan.cost.kernels.times import head_s
from autoplan.cost.memory.activations import block_bytes, boundary_bytes, layer_parts, stored_bytes
from autoplan.cost.memory.parameters import (
    DenseAndExpert,
    StageParameters,
    frozen_bytes,
    local_parameters,
    own_parameters,
)
from autoplan.cost.memory.stage_memory import states, wgrad_buffer_bytes
from autoplan.cost.network.links import Links
from autoplan.cost.network.process_groups import process_groups
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import send_exposed_s
from autoplan.cost.pipeline.layout import StageBlocks, repeats_beside
from autoplan.cost.pipeline.order import V_SHAPED
from autoplan.cost.step import straggler_share
from autoplan.cost.uneven_lengths import varying_s, waiting_s
from autoplan.search.space import Inside, Space
from autoplan.spec.axes import AXIS
from autoplan.spec.enums import Recompute, Schedule, Sharding
from autoplan.spec.finetuning import EMBEDDING
from autoplan.spec.model import Block, ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

ONE_FORWARD_ONE_BACKWARD = tuple(Schedule(name).code for name in ("1f1b", "interleaved"))
FOLDED = tuple(Schedule(name).code for name in V_SHAPED)
PARTS = 8  # of the plans of a kind, by what they recompute
# Bounded in one go, so that the arrays stay in the cache.
BLOCK_GROUPS, MOST_BOUNDS = 2048, 1 << 16


# -- where the layers lie ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """Layers of each sort on the ranks that decide, and the number of them that are recomputed as a whole.

    Shape (plans of a kind, sorts).  Of several plans together each figure is the least.
    """

    first: Floats  # on the first rank
    kept_first: Floats  # of these, not recomputed as a whole
    second: Floats  # on the rank behind it, which has no embedding and often more layers
    kept_second: Floats
    last: Floats  # on the rank with the head
    heaviest: Floats  # on the rank with most layers but for the last one, the later of equal ones
    before: Floats  # on the ranks before that one
    ahead: Floats  # on the ranks before the one with the head, which has the last of them; none where ranks are folded
    repeated: Floats  # of the whole model
    repeated_first: Floats
    repeated_second: Floats
    repeated_last: Floats
    repeated_heaviest: Floats
    # Shape (plans of a kind):
    rank: Ints  # which one is the heaviest, -1 where that is not known
    vp: Ints  # most chunks of a rank
    fewest_vp: Ints
    has_path: Bools  # whether the schedule is 1F1B, plain or interleaved, whose closed form holds
    is_folded: Bools  # whether the first rank has the last chunk too, so that fewer passes than stages may be alive

    def parted(self) -> Spread:
        """Return bounds on all plans of a part: a row for each part, of plans alike in chunks and recomputation."""
        log_chunks = np.ceil(np.log2(self.vp)).astype(np.int64)
        share = np.ceil(PARTS * self.repeated.sum(axis=1) / np.maximum(self.repeated.sum(axis=1).max(), 1))
        _, part = distinct_rows(log_chunks, share.astype(np.int64))
        order = np.argsort(part, kind="stable")
        starts = np.flatnonzero(np.diff(part[order], prepend=-1))

        def least(name: str) -> Any:
            return np.minimum.reduceat(getattr(self, name)[order], starts)

        return Spread(
            **{name: least(name) for name in FIGURES},
            rank=np.full(len(starts), -1),
            vp=np.maximum.reduceat(self.vp[order], starts),
            fewest_vp=least("vp"),
            has_path=least("has_path"),
            is_folded=np.maximum.reduceat(self.is_folded[order], starts),
        )


FIGURES: tuple[str, ...] = Spread.__slots__[: Spread.__slots__.index("rank")]


@lru_cache(maxsize=4096)
def spread_of(model: ModelSpec, inside: Inside) -> Spread:
    """The figures of all plans that some kinds hold."""
    is_folded = np.isin(inside.schedule, FOLDED)
    table = np.empty((len(FIGURES), len(inside), len(model.layer_kinds)))
    rank = np.empty(len(inside), dtype=np.int64)
    first, layout_of = distinct_rows(inside.layout, is_folded)
    of_layout = np.argsort(layout_of, kind="stable")
    for example, plans in zip(first, np.split(of_layout, np.cumsum(np.bincount(layout_of))[:-1]), strict=True):
        layers = inside.layouts[inside.layout[example]]
        figures, rank[plans] = _figures(model, layers, inside.pp, is_folded=bool(is_folded[example]))
        table[:, plans] = figures[:, np.minimum(inside.recompute_num_layers[plans], max(layers))]
    return Spread(
        **dict(zip(FIGURES, table, strict=True)),
        rank=rank,
        vp=inside.vp,
        fewest_vp=inside.vp,
        has_path=np.isin(inside.schedule, ONE_FORWARD_ONE_BACKWARD),
        is_folded=is_folded,
    )


@lru_cache(maxsize=16384)
def _figures(model: ModelSpec, layout: tuple[int, ...], pp: int, *, is_folded: bool) -> tuple[Floats, int]:
    """(`FIGURES` of a layout, its heaviest rank): shape (figures, layers of a chunk that are recomputed, sorts)."""
    layers, total, numbers = np.array(layout), _layers_before(model), np.arange(max(layout) + 1)
    starts = np.cumsum(layers) - layers
    on_rank = _by_rank(total[starts + layers] - total[starts], pp, is_folded=is_folded)
    again = _by_rank(total[starts + np.minimum(layers, numbers[:, None])] - total[starts], pp, is_folded=is_folded)
    head, behind = 0 if is_folded else pp - 1, min(1, pp - 1)
    not_last = on_rank[: max(pp - 1, 1)].sum(axis=1)
    rank = len(not_last) - 1 - int(np.argmax(not_last[::-1]))
    figures = {
        "first": on_rank[0],
        "kept_first": on_rank[0] - again[:, 0],
        "second": on_rank[behind],
        "kept_second": on_rank[behind] - again[:, behind],
        "last": on_rank[head],
        "heaviest": on_rank[rank],
        "before": on_rank[:rank].sum(axis=0),
        "ahead": 0 * on_rank[0] if is_folded else (total[starts + layers] - total[starts])[: pp - 1].sum(axis=0),
        "repeated": again.sum(axis=1),
        "repeated_first": again[:, 0],
        "repeated_second": again[:, behind],
        "repeated_last": again[:, head],
        "repeated_heaviest": again[:, rank],
    }
    table = np.empty((len(FIGURES), len(numbers), total.shape[1]))
    for at, name in enumerate(FIGURES):
        table[at] = figures[name]
    return table, rank


@lru_cache(maxsize=64)
def _layers_before(model: ModelSpec) -> Ints:
    """Number of layers of each sort among the first n: shape (layers + 1, sorts)."""
    kind_of_layer = np.array([model.layer_kinds.index(layer) for layer in model.layers])
    total = np.zeros((model.num_layers + 1, len(model.layer_kinds)), dtype=np.int64)
    np.cumsum(kind_of_layer[:, None] == np.arange(total.shape[1]), axis=0, out=total[1:])
    return total


def _by_rank(chunks: Ints, pp: int, *, is_folded: bool) -> Ints:
    """Sums over the chunks of every rank: chunk i is on rank i mod pp, or comes back from the last rank."""
    rounds = chunks.reshape(*chunks.shape[:-2], -1, pp, chunks.shape[-1])
    return rounds[..., 0, :, :] + rounds[..., 1, ::-1, :] if is_folded else rounds.sum(axis=-3)


# -- what plans of a kind cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCosts(Rows):
    """Costs that plans of a kind have in common: an element per kind, some with a last axis for sorts of layers."""

    batch: PlanBatch
    model_s: Floats  # both passes of one micro-batch through the whole model, nothing recomputed as a whole
    layer_s: Floats  # both passes of a layer: (kinds, sorts)
    forward_s: Floats  # the forward pass in it
    repeat_s: Floats  # what recomputing the layer as a whole adds
    head_s: Floats
    message_s: Floats
    rest_s: Floats  # once a step
    waiting_s: Floats  # for longer samples, at least, whatever is sharded
    factor: Floats  # stragglers and calibration, on everything
    state_bytes: Floats  # of a layer: (kinds, sorts)
    kept_bytes: Floats  # of a layer and micro-batch: (kinds, sorts)
    stored_bytes: Floats  # of a layer that is recomputed as a whole
    boundary_bytes: Floats  # of a chunk in flight
    embedding_bytes: Floats  # its states
    fixed_bytes: Floats  # whatever the layout

    def step_s(self, spread: Spread, *, overlaps: bool) -> Floats:
        """A time that no plan beats of each kind with each of the spreads: shape (kinds, spreads).

        The paths of the last and the heaviest rank through the closed form of 1F1B, and the work of each of them and
        the mean of all ranks, which no schedule beats.  It grows with what is recomputed.
        """
        pp, m = _column(self.batch.pp), _column(self.batch.num_microbatches)
        total = _column(self.model_s) + self.repeat_s @ spread.repeated.T
        last = self.layer_s @ spread.last.T + self.repeat_s @ spread.repeated_last.T + _column(self.head_s)
        again = self.repeat_s @ spread.repeated_heaviest.T
        heavy = self.layer_s @ spread.heaviest.T + again
        around = np.where(spread.rank < 0, 0.0, self._around(spread, heavy, again) / spread.vp)
        path = np.maximum(m * last + (total - last) / spread.vp, m * heavy + around)
        # Any schedule fills the pipeline before its last rank begins.
        any_path = np.maximum(m * last + self.forward_s @ spread.ahead.T, m * heavy)
        work = np.maximum(m * total / pp, np.where(spread.has_path, path, any_path))
        message = _column(self.message_s)
        sends = send_exposed_s(message, pp, m, spread.fewest_vp[None, :], Pass(message, message), overlaps=overlaps)
        return _column(self.factor) * (
            work + np.where(spread.has_path, sends, 0.0) + _column(self.rest_s + self.waiting_s)
        )

    def _around(self, spread: Spread, heavy: Floats, again: Floats) -> Floats:
        """Time that the heaviest rank waits: for work before it, and behind it as far as its own does not cover that.

        What is recomputed there does not count, so that the path grows with it.
        """
        pp, m = _column(self.batch.pp), _column(self.batch.num_microbatches)
        before = self.layer_s @ spread.before.T
        behind = np.where(pp > 1, np.maximum(_column(self.model_s) - before - (heavy - again), 0.0), 0.0)
        forward = self.forward_s @ spread.heaviest.T
        warmup = pp - 1 - spread.rank
        covering = np.minimum(m - 1, warmup)
        filling = np.maximum(behind - covering * forward, 0.0)
        draining = np.maximum(behind - covering * (heavy - forward), 0.0)
        return before + np.where(covering < warmup, np.maximum(filling, draining), filling + draining)

    def memory_bytes(self, spread: Spread) -> Floats:
        """Least memory of each kind on its first or second rank, for each of the spreads: (kinds, spreads)."""
        m, pp = _column(self.batch.num_microbatches), _column(self.batch.pp)
        stored = np.minimum(_column(self.stored_bytes), self.kept_bytes)

        def rank_bytes(layers: Floats, not_repeated: Floats, repeated: Floats, live: Ints) -> Floats:
            passes = self.kept_bytes @ not_repeated.T + stored @ repeated.T + _column(self.boundary_bytes)
            return self.state_bytes @ layers.T + np.where(spread.is_folded, 1, live) * passes

        first = rank_bytes(spread.first, spread.kept_first, spread.repeated_first, np.minimum(m, pp))
        ahead = np.minimum(m, np.maximum(pp - 1, 1))
        second = rank_bytes(spread.second, spread.kept_second, spread.repeated_second, ahead)
        return _column(self.fixed_bytes) + np.maximum(first + _column(self.embedding_bytes), second)


def _column(values: Floats | Ints) -> NDArray[Any]:
    """Return values of kinds as a column, beside the spreads."""
    return values[:, None]


def _hidden_launches_s(problem: Problem, batch: PlanBatch, costs: dict[Block, BlockCost], head_s: Floats) -> Floats:
    """Launches of all layers that hide under the head at most, however many layers are recomputed."""
    launches = np.zeros(len(batch))
    for block, count in Counter(chain.from_iterable(problem.model.layers)).items():
        cost = costs[block]
        once = cost.forward_s["launch"] + cost.backward_s["launch"]
        launches = launches + count * (once + np.maximum(cost.repeat_s["launch"], 0.0))
    return np.minimum(ahead_s(problem, batch, head_s), launches)


def kind_costs(problem: Problem, batch: PlanBatch, first: tuple[Ints, Ints] | None = None) -> KindCosts:
    """Price the kinds of `batch`; their layouts are not looked at.

    `first` are the fewest and the most layers that the first rank may have; without them the reductions of gradients
    count as none.  Nor do they where times were measured, which need not grow with the buffer as a bound takes it.
    """
    problem, model = problem.placed(batch.placement), problem.model
    # The more chunks, the more of a step's expert traffic has another micro-batch beside it.
    costs = block_costs(problem, replace(batch, vp=np.full_like(batch.vp, model.num_layers + 2)))
    forward = {block: cost.total_forward_s for block, cost in costs.items()}
    passes_s = {block: forward[block] + cost.total_backward_s for block, cost in costs.items()}
    repeat = {block: cost.total_repeat_s for block, cost in costs.items()}
    first_of, of_kernels = batch.distinct(*KERNEL_AXES)
    head = head_s(problem, batch.take(first_of)).take(of_kernels).passes.total_s
    none = np.zeros(len(batch))
    count = {block: none + number for block, number in Counter(chain.from_iterable(model.layers)).items()}
    varying = varying_s(problem, costs, count, dict.fromkeys(count, none), head)
    head = head - _hidden_launches_s(problem, batch, costs, head)
    for block in model.mtp_layer if model.num_mtp_layers else ():
        head = head + model.num_mtp_layers * (passes_s[block] + repeat[block] * repeats_beside(batch))
    layer_s = _per_layer(model, passes_s)
    dense, expert = _parameters(problem, batch, trained=True)
    framework, longest = problem.framework, problem.at_longest
    counts = np.array([model.layers.count(layer) for layer in model.layer_kinds])
    mean = ((counts * part).sum(axis=-1) / batch.pp for part in (dense, expert))
    rest_s = framework.host.step_overhead_s + _update_s(problem, batch, *mean)
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
        waiting_s=waiting_s(problem, batch, varying, at_least=True),
        factor=problem.calibration.overall * (1.0 + straggler_share(batch.num_devices)),
        kept_bytes=_kept_bytes(longest, batch),
        stored_bytes=framework.memory.reserved_factor * stored_bytes(longest, batch) * len(model.layers[0]),
        boundary_bytes=framework.memory.reserved_factor * boundary_bytes(longest, batch),
        fixed_bytes=_fixed_bytes(longest, batch),
        **_held_bytes(problem, batch),
    )


def _held_bytes(problem: Problem, batch: PlanBatch) -> dict[str, Any]:
    """Return the fields of `KindCosts` that the states decide."""
    dense, expert = _parameters(problem, batch)
    if problem.training.finetuning is not None:
        return _held_beside_frozen(problem, batch, dense, expert)
    per_dense, per_expert, per_end = (
        _state_bytes(problem, batch, *numbers) for numbers in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0))
    )
    return {
        "state_bytes": per_dense[:, None] * dense + per_expert[:, None] * expert,
        "embedding_bytes": per_end * problem.model.vocab_size * problem.model.hidden_size / batch.tp,
    }


def _held_beside_frozen(problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats) -> dict[str, Any]:
    """Return the fields of `KindCosts` that the states decide, where a part of the weights is frozen."""
    model, finetuning, element = problem.model, problem.training.finetuning, problem.training.element_bytes
    assert finetuning is not None
    none = np.zeros_like(dense)
    trained = _parameters(problem, batch, trained=True)
    frozen = _layers_of(
        model,
        {name: frozen_bytes(problem, batch, shape) for name, shape in block_shapes(model, finetuning).items()},
    )
    layers = StageParameters(
        dense=dense,
        expert=expert,
        ends=none,
        only_trained=StageParameters(dense=trained.dense, expert=trained.expert, ends=none),
        frozen_bytes=StageParameters(dense=frozen.dense, expert=frozen.expert, ends=none),
    )
    table = (model.vocab_size * model.hidden_size / batch.tp)[:, None]
    nothing, learns = np.zeros_like(table), finetuning.trains(EMBEDDING)
    fixed = element * table * (finetuning.has_adapters or not learns)
    embedding = StageParameters(
        dense=table,
        expert=nothing,
        ends=table,
        only_trained=StageParameters(dense=table * learns, expert=nothing, ends=table * learns),
        frozen_bytes=StageParameters(dense=fixed, expert=nothing, ends=fixed),
    )
    return {
        "state_bytes": _kept_state_bytes(problem, batch, layers),
        "embedding_bytes": _kept_state_bytes(problem, batch, embedding)[:, 0],
    }


def _parameters(problem: Problem, batch: PlanBatch, *, trained: bool = False) -> DenseAndExpert:
    """Parameters of a layer that a rank holds, those with gradients alone: shape (kinds, sorts)."""
    shapes = block_shapes(problem.model, problem.training.finetuning)
    of_block = {block: local_parameters(batch, shape, trained=trained) for block, shape in shapes.items()}
    return _layers_of(problem.model, of_block)


def _layers_of(model: ModelSpec, of_block: dict[Block, DenseAndExpert]) -> DenseAndExpert:
    """The numbers of every sort of layer: shape (kinds, sorts)."""
    return DenseAndExpert(
        dense=_per_layer(model, {block: numbers.dense for block, numbers in of_block.items()}),
        expert=_per_layer(model, {block: numbers.expert for block, numbers in of_block.items()}),
    )


def _per_layer(model: ModelSpec, per_block: dict[Block, Floats]) -> Floats:
    return np.stack([add_up(per_block[block] for block in layer) for layer in model.layer_kinds], axis=-1)


def _state_bytes(problem: Problem, batch: PlanBatch, dense: float, expert: float, ends: float) -> Floats:
    """Bytes of weights, gradients and optimizer on a rank with so many dense and expert parameters of its own.

    No gradients where they live in a part of the step alone: there need not be any when most activations are alive.
    """
    column = np.ones((len(batch), 1))
    parameters = StageParameters(dense=dense * column, expert=expert * column, ends=ends * column)
    return _kept_state_bytes(problem, batch, parameters)[:, 0]


def _kept_state_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters) -> Floats:
    """Bytes of weights, gradients and optimizer of parameters in columns: shape (plans, columns)."""
    weights, gradients, optimizer = states(problem, batch, parameters, process_groups(batch))
    state_bytes = weights + optimizer + (0.0 if problem.framework.memory.fsdp2_states else gradients)
    return problem.framework.memory.reserved_factor * state_bytes


def _kept_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes that a layer keeps of one micro-batch, under what the plans recompute by name."""
    per_block = block_bytes(problem, batch, layer_parts(problem, batch))
    return problem.framework.memory.reserved_factor * _per_layer(problem.model, per_block)


def _fixed_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes on every rank whatever its layers are: context, buffers of communicators and of weight gradients."""
    traits, shape = problem.framework.memory, (len(batch), 1)
    none = np.zeros(shape, dtype=np.int64)
    blocks = StageBlocks(count={}, repeated={}, repeats_chunk=none > 0, chunks_alike=none[:, 0] == 0, is_last=none > 0)
    buffers = wgrad_buffer_bytes(problem, batch, blocks)[:, 0]
    communicators = traits.communicator_bytes * process_groups(batch).num_communicators
    return traits.fixed_bytes + traits.reserved_factor * buffers + communicators


def _update_s(problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats) -> Floats:
    """The optimizer's step of a rank with the mean of the parameters of all stages, which one of them exceeds."""
    if problem.timings.holds("optimizer", "bf16", "fp16", "fp32"):
        return np.zeros(len(batch))
    parameters = StageParameters(dense=dense[:, None], expert=expert[:, None], ends=np.zeros((len(batch), 1)))
    return optimizer_s(problem, batch, own_parameters(batch, parameters)[:, 0], dense + expert)


def _reductions_s(
    problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats, first: tuple[Ints, Ints]
) -> Floats:
    """Least exposed reductions and gathers of the first rank (`end_of_step`), of its leanest layer's parameters."""
    fewest_layers, most_layers = first
    model = problem.model
    table = model.vocab_size * model.hidden_size / batch.tp
    if (finetuning := problem.training.finetuning) is not None:
        table = table * finetuning.trains(EMBEDDING)
    parameters = StageParameters(
        dense=(fewest_layers * dense + table)[:, None], expert=(fewest_layers * expert)[:, None], ends=table[:, None]
    )
    none = np.zeros((len(batch), 1), dtype=np.int64)
    block, per_layer = model.layers[0][0], len(model.layers[0])
    blocks = StageBlocks(
        count={block: fewest_layers[:, None].astype(np.float64)},
        repeated={block: none.astype(np.float64)},
        repeats_chunk=none > 0,
        chunks_alike=none[:, 0] == 0,
        is_last=none > 0,
    )
    end = end_of_step_s(problem, batch, blocks, parameters, Links.of(problem))
    return least_shown_s(problem, batch, end.reduce_s[:, 0], end.gather_s[:, 0], most_layers * per_layer)


# -- plans, kinds and groups ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanBounds:
    """The bounds of all plans of some kinds that hold the same: arrays of shape (kinds, plans of a kind)."""

    inside: Inside
    kinds: Ints  # indices of the kinds
    step_s: Floats
    memory_bytes: Floats


def plan_bounds(problem: Problem, space: Space, costs: KindCosts) -> Iterator[PlanBounds]:
    """The bounds of all plans of all kinds, some kinds at a time."""
    for inside, kinds in space.alike(costs.batch):
        if not len(inside):
            continue
        spread = spread_of(problem.model, inside)
        count = max(MOST_BOUNDS // len(inside), 1)
        for at in range(0, len(kinds), count):
            part = kinds[at : at + count]
            own = costs.take(part)
            yield PlanBounds(
                inside=inside,
                kinds=part,
                step_s=own.step_s(spread, overlaps=problem.framework.overlap.p2p_overlap),
                memory_bytes=own.memory_bytes(spread),
            )


def kind_bounds(problem: Problem, space: Space, costs: KindCosts, most_bytes: float = np.inf) -> tuple[Floats, Floats]:
    """(a time that no plan of each kind beats that needs `most_bytes` or less, memory that none does without).

    Plans that are alike are looked at together.  Both are infinite for kinds without plans.
    """
    time, least_bytes = np.full(len(costs.batch), np.inf), np.full(len(costs.batch), np.inf)
    for inside, kinds in space.alike(costs.batch):
        if len(inside):
            own, parts = costs.take(kinds), _parts(problem.model, inside)
            needed = own.memory_bytes(parts)
            step_s = own.step_s(parts, overlaps=problem.framework.overlap.p2p_overlap)
            time[kinds] = np.where(needed <= most_bytes, step_s, np.inf).min(axis=1)
            least_bytes[kinds] = needed.min(axis=1)
    return time, least_bytes


def plain_bounds(problem: Problem, space: Space, groups: PlanBatch) -> Floats:
    """Return a time that no plan of each group beats, however much memory it needs.

    Nothing that is recomputed makes a step shorter, but for the launches that hide under the head.  Infinite for
    groups without plans.
    """
    time = np.empty(len(groups))
    for start in range(0, len(groups), BLOCK_GROUPS):
        part = groups.take(np.arange(start, min(start + BLOCK_GROUPS, len(groups))))
        repeating = np.full_like(part.recompute, Recompute.FULL.code)
        costs = kind_costs(problem, replace(part, recompute=repeating))
        overhead_s = np.full(len(part), problem.framework.host.step_overhead_s)
        costs = replace(costs, batch=part, repeat_s=np.zeros_like(costs.repeat_s), rest_s=overhead_s)
        time[start : start + len(part)], _ = kind_bounds(problem, space, costs)
    return time


def group_bounds(
    problem: Problem, space: Space, groups: PlanBatch, most_bytes: float = np.inf
) -> tuple[Floats, Floats]:
    """(a time that no plan of each group beats that needs `most_bytes` or less, memory that none does without).

    Of every choice of recomputation: the time is that of the plainest states, the memory that of the leanest.
    """
    time, least_bytes = np.full(len(groups), np.inf), np.full(len(groups), np.inf)
    for start in range(0, len(groups), BLOCK_GROUPS):
        plain, lean, of_group = space.extremes(groups.take(np.arange(start, min(start + BLOCK_GROUPS, len(groups)))))
        overhead_s = np.full(len(plain), problem.framework.host.step_overhead_s)
        costs = replace(kind_costs(problem, plain), rest_s=overhead_s, **_held_bytes(problem, lean))
        costs = replace(costs, repeat_s=_least_repeat_s(problem, space, costs))
        step_s, needed = kind_bounds(problem, space, costs, most_bytes)
        np.minimum.at(time, start + of_group, step_s)
        np.minimum.at(least_bytes, start + of_group, needed)
    return time, least_bytes


def _least_repeat_s(problem: Problem, space: Space, plain: KindCosts) -> Floats:
    """Least time that recomputing a layer adds, whatever the sharding.

    A rank with unlike layers that waits for its host hides launches of some of them under others; where traffic of
    sharded states takes their place in one sort of layer, another one shows less of its own.  All layers together take
    longer for it, a few that are recomputed need not.  In pipelines no layer makes up for one of another sort, so that
    each takes longer alone.
    """
    model = problem.model
    sorts = {*model.layers, *([model.mtp_layer] if model.num_mtp_layers else [])}
    repeating = np.flatnonzero((plain.batch.pp == 1) & (plain.batch.recompute == Recompute.FULL.code))
    if len(sorts) == 1 or not len(repeating):
        return plain.repeat_s
    batch, least_s = plain.batch.take(repeating), plain.repeat_s.copy()
    for sharding in space.limits.of("sharding"):
        code = np.full_like(batch.sharding, AXIS["sharding"].code(sharding))
        sharded = replace(batch, sharding=code, param_gather_overlap=code > Sharding.NONE.code)
        least_s[repeating] = np.minimum(least_s[repeating], kind_costs(problem, sharded).repeat_s)
    return least_s


def first_layers(problem: Problem, space: Space, kinds: PlanBatch) -> tuple[Ints, Ints]:
    """(fewest, most) layers of the first rank in all layouts of each kind."""
    fewest_layers, most_layers = np.zeros(len(kinds), dtype=np.int64), np.zeros(len(kinds), dtype=np.int64)
    for inside, kinds_alike in space.alike(kinds):
        if len(inside):
            layers = spread_of(problem.model, inside).first.sum(axis=1)
            fewest_layers[kinds_alike], most_layers[kinds_alike] = layers.min(), layers.max()
    return fewest_layers, most_layers


@lru_cache(maxsize=4096)
def _parts(model: ModelSpec, inside: Inside) -> Spread:
    return spread_of(model, inside).parted()
