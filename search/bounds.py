"""Lower bounds on the step time and memory of plans, derived from the same prices as the estimate.

A *kind* is a plan without its layout and its number of recomputed layers: degrees, batch, micro-batch, states,
recomputation.  The costs of its layers, head and messages are priced once; the layers per rank are counted once for all
kinds with the same number of stages; the bounds of all plans of these kinds are products of the two.  No bound is ever
above the estimate.

Layers are distinguished by their blocks; arrays of layers have a last axis with one element per sort of layer.
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
from autoplan.cost.dynamic_cp import over_degrees
from autoplan.cost.kernels.times import distinct_head_s
from autoplan.cost.network.links import Links
from autoplan.cost.parameters import StageParameters, updated_parameters
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import send_exposed_s
from autoplan.cost.pipeline.layout import StageBlocks, repeats_beside
from autoplan.cost.step import straggler_share
from autoplan.cost.uneven_lengths import least_waiting_s, varying_s
from autoplan.search.kind_memory import MEMORY_AXES, KindMemory, kind_memory, layer_parameters, per_layer
from autoplan.search.layer_spread import Spread, spread_of
from autoplan.search.space import Inside, Space
from autoplan.spec.axes import AXIS
from autoplan.spec.blocks import Block
from autoplan.spec.enums import Offload, Recompute, Sharding
from autoplan.spec.finetuning import EMBEDDING
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Number bounded at once: enough to amortise numpy's cost per call, few enough for the arrays to fit in cache.
BLOCK_GROUPS, MAX_BOUNDS = 8192, 1 << 16


# -- what plans of a kind cost -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes(Rows):
    """Times common to all plans of a kind: one element per kind, some with a last axis for sorts of layers."""

    pp: Ints
    num_microbatches: Ints
    model_s: Floats  # both passes of one micro-batch through the whole model, without full recomputation
    layer_s: Floats  # both passes of a layer: (kinds, sorts)
    forward_s: Floats  # forward pass of a layer
    repeat_s: Floats  # added by full recomputation of a layer
    head_s: Floats
    message_s: Floats
    rest_s: Floats  # once per step
    waiting_s: Floats  # lower bound on the wait for longer samples, for any sharding
    factor: Floats  # stragglers and calibration, applied to all times

    def step_s(self, spread: Spread, *, overlaps: bool) -> Floats:
        """Lower bound on the step time of each kind with each of the spreads: shape (kinds, spreads).

        The maximum over the critical paths of the last and of the heaviest rank in the closed form of 1F1B, and, for
        any schedule, over the work of these ranks and the mean work of all ranks.  It is monotone in the recomputed
        layers.
        """
        pp, m = _column(self.pp), _column(self.num_microbatches)
        total = _column(self.model_s) + self.repeat_s @ spread.repeated.T
        last = self.layer_s @ spread.last.T + self.repeat_s @ spread.repeated_last.T + _column(self.head_s)
        again = self.repeat_s @ spread.repeated_heaviest.T
        heavy = self.layer_s @ spread.heaviest.T + again
        around = np.where(spread.rank < 0, 0.0, self._around(spread, heavy, again) / spread.vp)
        path = np.maximum(m * last + (total - last) / spread.vp, m * heavy + around)
        # With any schedule the pipeline is filled before its last rank begins.
        any_path = np.maximum(m * last + self.forward_s @ spread.ahead.T, m * heavy)
        work = np.maximum(m * total / pp, np.where(spread.has_path, path, any_path))
        message = _column(self.message_s)
        sends = send_exposed_s(message, pp, m, spread.fewest_vp[None, :], Pass(message, message), overlaps=overlaps)
        return _column(self.factor) * (
            work + np.where(spread.has_path, sends, 0.0) + _column(self.rest_s + self.waiting_s)
        )

    def _around(self, spread: Spread, heavy: Floats, again: Floats) -> Floats:
        """Wait of the heaviest rank: for work before it, and for work after it that its own does not cover.

        Recomputation on other ranks is not counted, so that the path is monotone in recomputation.
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
    """Times and memory common to all plans of a kind."""

    batch: PlanBatch  # the kinds
    times: KindTimes
    memory: KindMemory


def _column(values: Floats | Ints) -> NDArray[Any]:
    """Return values of kinds as a column, to broadcast over spreads."""
    return values[:, None]


def _hidden_launches_s(problem: Problem, batch: PlanBatch, costs: dict[Block, BlockCost], head_s: Floats) -> Floats:
    """Upper bound on the launches hidden under the head, for any number of recomputed layers."""
    launches = np.zeros(len(batch))
    for block, count in Counter(chain.from_iterable(problem.model.layers)).items():
        cost = costs[block]
        once = cost.forward_s["launch"] + cost.backward_s["launch"]
        launches = launches + count * (once + np.maximum(cost.repeat_s["launch"], 0.0))
    return np.minimum(ahead_s(problem, batch, head_s), launches)


def kind_costs(
    problem: Problem, batch: PlanBatch, first: tuple[Ints, Ints] | None = None, *, least_percent: int = 100
) -> KindCosts:
    """Price the kinds of `batch`, independently of their layouts.

    With a `least_percent` below 100, bounds of kinds with the whole optimizer on the host hold for any larger share.
    `first` is (fewest, most) layers of the first rank; without it gradient reductions count as zero.  They also do with
    measured times, which need not grow with the buffer as the bound requires.
    """
    times = _kind_times(problem, batch)
    rest_s = times.rest_s + _end_of_step_s(problem.placed(batch.placement), batch, first, least_percent)
    return KindCosts(batch=batch, times=replace(times, rest_s=rest_s), memory=kind_memory(problem, batch))


def _kind_times(problem: Problem, batch: PlanBatch) -> KindTimes:
    """Price the passes of the kinds of `batch`, without the end of a step, independently of layouts."""
    problem, model = problem.placed(batch.placement), problem.model
    # With more chunks, more of a step's expert traffic overlaps with another micro-batch.
    costs = over_degrees(problem, replace(batch, vp=np.full_like(batch.vp, model.num_layers + 2)), block_costs)
    forward = {block: cost.total_forward_s for block, cost in costs.items()}
    passes_s = {block: forward[block] + cost.total_backward_s for block, cost in costs.items()}
    repeat = {block: cost.total_repeat_s for block, cost in costs.items()}
    head = over_degrees(problem, batch, distinct_head_s).passes.total_s
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
        waiting_s=least_waiting_s(problem, batch, varying),
        factor=problem.calibration.overall * (1.0 + straggler_share(batch.num_devices)),
    )


def _layer_counts(model: ModelSpec) -> Ints:
    return np.array([model.layers.count(layer) for layer in model.layer_kinds])


def _end_of_step_s(problem: Problem, batch: PlanBatch, first: tuple[Ints, Ints] | None, least_percent: int) -> Floats:
    """Lower bound on optimizer step, and on reductions and gathers where they count."""
    dense, expert = layer_parameters(problem, batch, trained=True)
    mean = ((_layer_counts(problem.model) * part).sum(axis=-1) / batch.pp for part in (dense, expert))
    # The host updates its share, however long the device takes for the rest.
    share = np.where(batch.offload == Offload.OPTIMIZER.code, least_percent / 100, 1.0)
    end_s = share * _update_s(problem, batch, *mean)
    if first is not None and problem.timings.is_empty:
        end_s = end_s + _reductions_s(problem, batch, dense.min(axis=-1), expert.min(axis=-1), first)
    return end_s


def _update_s(problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats) -> Floats:
    """Optimizer step for the mean parameters of all stages, which at least one stage reaches or exceeds."""
    if problem.timings.holds("optimizer", "bf16", "fp16", "fp32"):
        return np.zeros(len(batch))
    parameters = StageParameters(dense=dense[:, None], expert=expert[:, None], ends=np.zeros((len(batch), 1)))
    return optimizer_s(problem, batch, updated_parameters(batch, parameters)[:, 0], dense + expert)


def _reductions_s(
    problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats, first: tuple[Ints, Ints]
) -> Floats:
    """Lower bound on the first rank's exposed reductions and gathers (`end_of_step`), from its smallest layer."""
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
    """Bounds of all plans of kinds with the same contents: arrays of shape (kinds, plans per kind)."""

    inside: Inside
    kinds: Ints  # indices of the kinds
    step_s: Floats
    memory_bytes: Floats


def plan_bounds(problem: Problem, space: Space, costs: KindCosts) -> Iterator[PlanBounds]:
    """Yield the bounds of all plans of all kinds, some kinds at a time."""
    for inside, kinds in space.alike(costs.batch):
        if not len(inside):
            continue
        spread = spread_of(problem.model, inside)
        count = max(MAX_BOUNDS // len(inside), 1)
        for at in range(0, len(kinds), count):
            part = kinds[at : at + count]
            yield PlanBounds(
                inside=inside,
                kinds=part,
                step_s=costs.times.take(part).step_s(spread, overlaps=problem.framework.overlap.p2p_overlap),
                memory_bytes=costs.memory.take(part).least_bytes(spread),
            )


def kind_bounds(problem: Problem, space: Space, costs: KindCosts, most_bytes: float = np.inf) -> tuple[Floats, Floats]:
    """Return (lower bound on time among plans within `most_bytes`, lower bound on memory) of each kind.

    Similar plans are bounded together.  Both bounds are infinite for kinds without plans.
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
    """Return a lower bound on the time of each group's plans, for any memory.

    Recomputation never shortens a step, except through launches hidden under the head.  Infinite for groups without
    plans.
    """
    time = np.full(len(groups), np.inf)
    for rows in _blocks(len(groups)):
        part = groups.take(rows)
        times = _kind_times(problem, replace(part, recompute=np.full_like(part.recompute, Recompute.FULL.code)))
        times = replace(times, repeat_s=np.zeros_like(times.repeat_s))
        for inside, kinds in space.alike(part):
            if len(inside):
                parts, overlaps = _parts(problem.model, inside), problem.framework.overlap.p2p_overlap
                time[rows[kinds]] = times.take(kinds).step_s(parts, overlaps=overlaps).min(axis=1)
    return time


def group_bytes(problem: Problem, space: Space, groups: PlanBatch) -> Floats:
    """Return a lower bound on the memory of each group's plans: the leanest states over all recomputation choices."""
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
    """Return (lower bound on time among plans within `most_bytes`, lower bound on memory) of each group.

    For every choice of recomputation, time is bounded with the plainest states and memory with the leanest.
    """
    time, least_bytes = np.full(len(groups), np.inf), np.full(len(groups), np.inf)
    for rows in _blocks(len(groups)):
        plain, lean, of_group = space.extremes(groups.take(rows))
        times = _kind_times(problem, plain)
        times = replace(times, repeat_s=_least_repeat_s(problem, space, plain, times.repeat_s))
        costs = KindCosts(batch=plain, times=times, memory=kind_memory(problem, plain, lean))
        step_s, needed = kind_bounds(problem, space, costs, most_bytes)
        np.minimum.at(time, rows[of_group], step_s)
        np.minimum.at(least_bytes, rows[of_group], needed)
    return time, least_bytes


def _blocks(count: int) -> Iterator[Ints]:
    """Yield the indices of this many groups in order, in blocks that are bounded at once."""
    for start in range(0, count, BLOCK_GROUPS):
        yield np.arange(start, min(start + BLOCK_GROUPS, count))


def _least_repeat_s(problem: Problem, space: Space, plain: PlanBatch, repeat_s: Floats) -> Floats:
    """Lower bound on the time added by recomputing a layer, for any sharding; `repeat_s` is for the plainest states.

    On a rank with different layers that waits for its host, some layers hide the launches of others; if sharded-state
    traffic replaces such a wait in one sort of layer, another sort may expose fewer launches.  Sharding lengthens all
    layers together, but not necessarily a few recomputed ones.  In pipelines layers of one sort do not compensate for
    another sort, so each takes longer by itself.
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
        least_s[repeating] = np.minimum(least_s[repeating], _kind_times(problem, sharded).repeat_s)
    return least_s


def first_layers(problem: Problem, space: Space, kinds: PlanBatch) -> tuple[Ints, Ints]:
    """Return (fewest, most) layers of the first rank over all layouts of each kind."""
    fewest_layers, most_layers = np.zeros(len(kinds), dtype=np.int64), np.zeros(len(kinds), dtype=np.int64)
    for inside, kinds_alike in space.alike(kinds):
        if len(inside):
            layers = spread_of(problem.model, inside).first.sum(axis=1)
            fewest_layers[kinds_alike], most_layers[kinds_alike] = layers.min(), layers.max()
    return fewest_layers, most_layers


@lru_cache(maxsize=4096)
def _parts(model: ModelSpec, inside: Inside) -> Spread:
    return spread_of(model, inside).parted()
