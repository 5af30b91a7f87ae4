"""Lower bounds on the step time and memory of plans, derived from the same prices as the estimate.

A *kind* is a plan except for its layout and the number of layers that it recomputes: degrees, batch, micro-batch,
states, recomputation.  What its layers, head and messages cost is priced once; how many layers lie where is counted
once for all kinds on this many stages; the bounds of all plans of all these kinds are then products of the two.  No
bound is ever above the estimate.

Layers are distinguished by their blocks; arrays of them have a last axis with an element for each sort of layer.
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

from autoplan.base.arrays import Floats, Ints, Rows
from autoplan.cost.block_cost import BlockCost
from autoplan.cost.blocks import ahead_s, block_costs
from autoplan.cost.collectives.end_of_step import end_of_step_s, least_shown_s, optimizer_s
from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.kernels.sizes import KERNEL_AXES
from autoplan.cost.kernels.times import head_s
from autoplan.cost.memory.parameters import StageParameters, own_parameters
from autoplan.cost.network.links import Links
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import send_exposed_s
from autoplan.cost.pipeline.layout import StageBlocks, repeats_beside
from autoplan.cost.step import straggler_share
from autoplan.cost.uneven_lengths import varying_s, waiting_s
from autoplan.search.kind_memory import MEMORY_AXES, KindMemory, kind_memory, layer_parameters, per_layer
from autoplan.search.layer_spread import Spread, spread_of
from autoplan.search.space import Inside, Space
from autoplan.spec.axes import AXIS
from autoplan.spec.enums import Recompute, Sharding
from autoplan.spec.finetuning import EMBEDDING
from autoplan.spec.model import Block, ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Bounded in one go: enough that numpy's cost per call is small, few enough that the arrays stay in the cache.
BLOCK_GROUPS, MOST_BOUNDS = 8192, 1 << 16


# -- what plans of a kind cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes(Rows):
    """Times that plans of a kind have in common: an element per kind, some with a last axis for sorts of layers."""

    pp: Ints
    num_microbatches: Ints
    model_s: Floats  # both passes of one micro-batch through the whole model, nothing recomputed as a whole
    layer_s: Floats  # both passes of a layer: (kinds, sorts)
    forward_s: Floats  # the forward pass in it
    repeat_s: Floats  # what recomputing the layer as a whole adds
    head_s: Floats
    message_s: Floats
    rest_s: Floats  # once a step
    waiting_s: Floats  # for longer samples, at least, whatever is sharded
    factor: Floats  # stragglers and calibration, on everything

    def step_s(self, spread: Spread, *, overlaps: bool) -> Floats:
        """Lower bound on the step time of each kind with each of the spreads: shape (kinds, spreads).

        The paths of the last and the heaviest rank through the closed form of 1F1B, and the work of each of them and
        the mean of all ranks, which no schedule beats.  It grows with what is recomputed.
        """
        pp, m = _column(self.pp), _column(self.num_microbatches)
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
        pp, m = _column(self.pp), _column(self.num_microbatches)
        before = self.layer_s @ spread.before.T
        behind = np.where(pp > 1, np.maximum(_column(self.model_s) - before - (heavy - again), 0.0), 0.0)
        forward = self.forward_s @ spread.heaviest.T
        warmup = pp - 1 - spread.rank
        covering = np.minimum(m - 1, warmup)
        filling = np.maximum(behind - covering * forward, 0.0)
        draining = np.maximum(behind - covering * (heavy - forward), 0.0)
        return before + np.where(covering < warmup, np.maximum(filling, draining), filling + draining)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCosts(Rows):
    """Times and memory that plans of a kind have in common."""

    batch: PlanBatch  # the kinds
    times: KindTimes
    memory: KindMemory


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
    times = kind_times(problem, batch)
    rest_s = times.rest_s + _end_of_step_s(problem.placed(batch.placement), batch, first)
    return KindCosts(batch=batch, times=replace(times, rest_s=rest_s), memory=kind_memory(problem, batch))


def kind_times(problem: Problem, batch: PlanBatch) -> KindTimes:
    """Price the passes of the kinds of `batch`; their layouts are not looked at, nor is the end of a step."""
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
    layer_s = per_layer(model, passes_s)
    return KindTimes(
        pp=batch.pp,
        num_microbatches=batch.num_microbatches,
        model_s=(_layer_counts(model) * layer_s).sum(axis=-1) + head,
        layer_s=layer_s,
        forward_s=per_layer(model, forward),
        repeat_s=per_layer(model, repeat),
        head_s=head,
        message_s=np.where(batch.pp > 1, message_s(problem, batch), 0.0),
        rest_s=np.full(len(batch), problem.framework.host.step_overhead_s),
        waiting_s=waiting_s(problem, batch, varying, at_least=True),
        factor=problem.calibration.overall * (1.0 + straggler_share(batch.num_devices)),
    )


def _layer_counts(model: ModelSpec) -> Ints:
    return np.array([model.layers.count(layer) for layer in model.layer_kinds])


def _end_of_step_s(problem: Problem, batch: PlanBatch, first: tuple[Ints, Ints] | None) -> Floats:
    """The optimizer's step, and the least of reductions and gathers where they count."""
    dense, expert = layer_parameters(problem, batch, trained=True)
    mean = ((_layer_counts(problem.model) * part).sum(axis=-1) / batch.pp for part in (dense, expert))
    end_s = _update_s(problem, batch, *mean)
    if first is not None and problem.timings.is_empty:
        end_s = end_s + _reductions_s(problem, batch, dense.min(axis=-1), expert.min(axis=-1), first)
    return end_s


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
    block, blocks_per_layer = model.layers[0][0], len(model.layers[0])
    blocks = StageBlocks(
        count={block: fewest_layers[:, None].astype(np.float64)},
        repeated={block: none.astype(np.float64)},
        repeats_chunk=none > 0,
        chunks_alike=none[:, 0] == 0,
        is_last=none > 0,
    )
    end = end_of_step_s(problem, batch, blocks, parameters, Links.of(problem))
    return least_shown_s(problem, batch, end.reduce_s[:, 0], end.gather_s[:, 0], most_layers * blocks_per_layer)


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
            yield PlanBounds(
                inside=inside,
                kinds=part,
                step_s=costs.times.take(part).step_s(spread, overlaps=problem.framework.overlap.p2p_overlap),
                memory_bytes=costs.memory.take(part).least_bytes(spread),
            )


def kind_bounds(problem: Problem, space: Space, costs: KindCosts, most_bytes: float = np.inf) -> tuple[Floats, Floats]:
    """(a time that no plan of each kind beats that needs `most_bytes` or less, memory that none does without).

    Plans that are alike are looked at together.  Both are infinite for kinds without plans.
    """
    time, least_bytes = np.full(len(costs.batch), np.inf), np.full(len(costs.batch), np.inf)
    for inside, kinds in space.alike(costs.batch):
        if len(inside):
            parts, overlaps = _parts(problem.model, inside), problem.framework.overlap.p2p_overlap
            needed = costs.memory.take(kinds).least_bytes(parts)
            step_s = costs.times.take(kinds).step_s(parts, overlaps=overlaps)
            time[kinds] = np.where(needed <= most_bytes, step_s, np.inf).min(axis=1)
            least_bytes[kinds] = needed.min(axis=1)
    return time, least_bytes


def plain_bounds(problem: Problem, space: Space, groups: PlanBatch) -> Floats:
    """Return a time that no plan of each group beats, however much memory it needs.

    Nothing that is recomputed makes a step shorter, except for the launches that hide under the head.  Infinite for
    groups without plans.
    """
    time = np.full(len(groups), np.inf)
    for rows in _blocks(len(groups)):
        part = groups.take(rows)
        times = kind_times(problem, replace(part, recompute=np.full_like(part.recompute, Recompute.FULL.code)))
        times = replace(times, repeat_s=np.zeros_like(times.repeat_s))
        for inside, kinds in space.alike(part):
            if len(inside):
                parts, overlaps = _parts(problem.model, inside), problem.framework.overlap.p2p_overlap
                time[rows[kinds]] = times.take(kinds).step_s(parts, overlaps=overlaps).min(axis=1)
    return time


def group_bytes(problem: Problem, space: Space, groups: PlanBatch) -> Floats:
    """Return memory that no plan of each group does without: of every choice of recomputation, the leanest states."""
    first, of_memory = groups.distinct(*MEMORY_AXES)
    least_bytes = np.full(len(first), np.inf)
    for rows in _blocks(len(first)):
        plain, lean, of_group = space.extremes(groups.take(first[rows]))
        memory = kind_memory(problem, plain, lean)
        for inside, kinds in space.alike(plain):
            if len(inside):
                needed = memory.take(kinds).least_bytes(_parts(problem.model, inside)).min(axis=1)
                np.minimum.at(least_bytes, rows[of_group[kinds]], needed)
    return least_bytes[of_memory]


def group_bounds(
    problem: Problem, space: Space, groups: PlanBatch, most_bytes: float = np.inf
) -> tuple[Floats, Floats]:
    """(a time that no plan of each group beats that needs `most_bytes` or less, memory that none does without).

    Of every choice of recomputation: the time is that of the plainest states, the memory that of the leanest.
    """
    time, least_bytes = np.full(len(groups), np.inf), np.full(len(groups), np.inf)
    for rows in _blocks(len(groups)):
        plain, lean, of_group = space.extremes(groups.take(rows))
        times = kind_times(problem, plain)
        times = replace(times, repeat_s=_least_repeat_s(problem, space, plain, times.repeat_s))
        costs = KindCosts(batch=plain, times=times, memory=kind_memory(problem, plain, lean))
        step_s, needed = kind_bounds(problem, space, costs, most_bytes)
        np.minimum.at(time, rows[of_group], step_s)
        np.minimum.at(least_bytes, rows[of_group], needed)
    return time, least_bytes


def _blocks(count: int) -> Iterator[Ints]:
    """Yield the indices of this many groups in order, those together that are bounded in one go."""
    for start in range(0, count, BLOCK_GROUPS):
        yield np.arange(start, min(start + BLOCK_GROUPS, count))


def _least_repeat_s(problem: Problem, space: Space, plain: PlanBatch, repeat_s: Floats) -> Floats:
    """Least time that recomputing a layer adds, whatever the sharding; `repeat_s` is that of the plainest states.

    A rank with unlike layers that waits for its host hides launches of some of them under others; where traffic of
    sharded states takes their place in one sort of layer, another one shows less of its own.  All layers together take
    longer for it, a few that are recomputed need not.  In pipelines no layer makes up for one of another sort, so that
    each takes longer alone.
    """
    model = problem.model
    sorts = {*model.layers, *([model.mtp_layer] if model.num_mtp_layers else [])}
    repeating = np.flatnonzero((plain.pp == 1) & (plain.recompute == Recompute.FULL.code))
    if len(sorts) == 1 or not len(repeating):
        return repeat_s
    batch, least_s = plain.take(repeating), repeat_s.copy()
    for sharding in space.limits.of("sharding"):
        code = np.full_like(batch.sharding, AXIS["sharding"].code(sharding))
        sharded = replace(batch, sharding=code, param_gather_overlap=code > Sharding.NONE.code)
        least_s[repeating] = np.minimum(least_s[repeating], kind_times(problem, sharded).repeat_s)
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
