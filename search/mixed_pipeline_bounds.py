"""Lower bounds on pipelines whose stages are on unlike parts of a mixed cluster, before layers are assigned."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows, distinct_rows
from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.mixed.collectives import links_between
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import gpipe_sends_s, hop_sends_exposed_s, send_exposed_s
from autoplan.cost.pipeline.order import PipelineShape, live_chunks
from autoplan.search.bounds import KindCosts
from autoplan.search.structures import Pipelines
from autoplan.spec.axes import USUAL_SCHEDULES, V_SHAPED
from autoplan.spec.enums import Schedule
from autoplan.spec.mixed_problem import MixedProblem, Nodes, only_on
from autoplan.spec.plan import ALL_LAYERS, SPLIT_SCHEDULES, PlanBatch, even_chunks

if TYPE_CHECKING:
    from autoplan.search.mixed_bounds import MixedSpace

BISECTIONS = 12
PATH_ROUNDS = 2  # in which paths limit layers, and layers lengthen paths
WIDEST = 4.0  # times the work with equal stages; longer steps are not considered
ROUNDING = 1e-6  # of a layer
MIN_FACTOR = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways(Rows):
    """Ways of a group of parts to form equal pipelines, each with the axes of its plans: one element per way."""

    parts: tuple[int, ...]
    forms: tuple[Pipelines, ...]
    form: Ints  # index into `forms`
    kinds: PlanBatch  # with the first stage's tp on all stages, plain or interleaved
    least_s: Floats  # lower bound on plans of the group alone; infinite if none fits
    nodes: Ints  # in use of every part of the cluster: shape (ways, parts)
    num_devices: Ints
    # For groups combined with others, which share the sharded states: upper bound on sequences per second over all
    # replicas, without waits for the slowest device.
    most_rate: Floats


class Prices(NamedTuple):
    """Prices of ways on every part: lower bounds on their times, and the memory and end of a step of the whole plan."""

    costs: dict[int, KindCosts]
    states: dict[int, KindCosts]

    def take(self, rows: Ints) -> Prices:
        """Return the prices of the ways at the given indices."""
        costs = {part: cost.take(rows) for part, cost in self.costs.items()}
        is_alike = self.costs is self.states
        return Prices(costs, costs if is_alike else {part: cost.take(rows) for part, cost in self.states.items()})


def both_passes_s(cost: KindCosts) -> Floats:
    """Return both passes of a layer, with full recomputation: shape (kinds, sorts of layers)."""
    repeats = cost.batch.recompute_num_layers == ALL_LAYERS
    return cost.times.layer_s + repeats[:, None] * cost.times.repeat_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBounds(Rows):
    """Pipelines with one number of stages, before layers are assigned: arrays of shape (ways, stages)."""

    prices: Ints  # index of each set of prices
    leanest_s: Floats  # both passes of the cheapest sort of layer
    forward_share: Floats  # upper bound on the forward pass's share of a layer
    least_forward: Floats  # lower bound on it, on any stage
    most_layers: Ints  # per stage
    hop_s: Floats  # lower bound on a message from every stage to the next
    head_s: Floats  # on the last stage
    chunks: Ints  # of a stage
    schedule: Schedule
    num_layers: int
    overlaps: bool  # messages of interleaved pipelines and of GPipe

    @classmethod
    def of(
        cls,
        space: MixedSpace,
        ways: Ways,
        prices: Prices,
        counts: Sequence[int],
        microbatches: Ints | None = None,
    ) -> PipelineBounds:
        """Return the bounds of ways with one number of stages, for each number of chunks.

        Stages hold as many micro-batches as they would of `microbatches`; by default, of those of the group alone.
        """
        if microbatches is None:
            microbatches = next(iter(prices.states.values())).batch.num_microbatches
        costs, problem, places = prices.costs, space.problem, _Places.of(ways)
        schedule = tuple(Schedule)[ways.kinds.schedule[0]]
        passes, shares, least, heads = {}, {}, {}, {}
        for part, cost in costs.items():
            overall, layer_s = problem.calibrations[part].overall, both_passes_s(cost)
            passes[part] = overall * layer_s.min(axis=1)
            shares[part] = (cost.times.forward_s / layer_s).max(axis=1)
            least[part] = (cost.times.forward_s / layer_s).min(axis=1)
            heads[part] = overall * cost.times.head_s
        head_s = places.spread(heads)[:, 0 if schedule in V_SHAPED else -1]
        is_ring = schedule == Schedule.INTERLEAVED
        nodes = tuple(ways.nodes.min(axis=0).tolist())  # links of fewer nodes are no slower
        across = _across_s(problem, nodes, places, costs, is_ring=is_ring)
        messages = [cost.times.message_s for cost in costs.values()]
        times = (*passes.values(), *shares.values(), *least.values(), *across.values(), *messages, head_s)
        _, alike = distinct_rows(ways.form, *(np.unique(seconds, return_inverse=True)[1] for seconds in times))
        pipelines = cls(
            prices=alike,
            leanest_s=places.spread(passes),
            forward_share=places.spread(shares),
            least_forward=np.min([*least.values()], axis=0),
            most_layers=np.zeros_like(places.parts),
            hop_s=places.hops(costs, across, is_ring=is_ring),
            head_s=head_s,
            chunks=np.ones_like(alike),
            schedule=schedule,
            num_layers=problem.model.num_layers,
            overlaps=problem.framework.overlap.p2p_overlap,
        )
        return replace(
            pipelines.take(np.tile(np.arange(len(alike)), len(counts))),
            most_layers=_most_layers(space, places, prices.states, schedule, counts, microbatches),
            chunks=np.repeat(counts, len(alike)),
        )

    def least_s(self, m: Ints) -> Floats:
        """Lower bound on the time of `m` micro-batches for any assignment of layers; infinite if none fits."""
        fits = (self.most_layers.sum(axis=1) >= self.num_layers) & (self.most_layers.min(axis=1) >= 1)
        rows, result = np.flatnonzero(fits), np.full(len(m), np.inf)
        first, alike = distinct_rows(*(column[rows] for column in (self.prices, m, self.chunks, *self.most_layers.T)))
        result[rows] = self.take(rows[first])._bisected_s(m[rows[first]])[alike]
        return result

    def _bisected_s(self, m: Ints) -> Floats:
        """Smallest time in which the stages can take all layers."""
        layers_within, _ = self._capacity(m)
        low = m * self.num_layers / (1.0 / self.leanest_s).sum(axis=1)
        high = WIDEST * (low + m * self.head_s) + self.sends_s(m)
        for _ in range(BISECTIONS):
            middle = np.sqrt(low * high)
            enough = layers_within(middle).sum(axis=1) >= self.num_layers
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return low

    def layers_within(self, m: Ints, time_s: Floats) -> Ints:
        """Upper bound on the layers of every stage in plans of `m` micro-batches that take `time_s` or less."""
        layers_within, order = self._capacity(m)
        layers = np.take_along_axis(layers_within(time_s), np.argsort(order, axis=1), axis=1)
        return np.maximum(layers, 0).astype(np.int64)

    def _capacity(self, m: Ints) -> tuple[Callable[[Floats], Floats], Ints]:
        """Return (the most whole layers of every stage in a time, by its path and memory; the order of the stages).

        The path of a stage (`one_forward_one_backward_s`) is its own work, all work before it, and the work after it
        that its warm-up and cool-down do not cover.  With c covered passes the uncovered work is at least the work
        after it minus c times the shorter of the stage's two passes; on the first stage, if there are enough
        micro-batches for its warm-up, twice the work after it minus c times both passes.  The work of all stages for
        one micro-batch is smallest if the fast stages have as many layers as possible, which their paths limit again.

        In GPipe only its own pass is covered.  Where the backward pass is split, a stage waits before its first
        backward for the forward passes of all stages, except while it runs the forwards that come first in its order.
        """
        sends_s, pp, m = self.sends_s(m), self.hop_s.shape[1], m[:, None]
        warmup, chunks = np.arange(pp)[::-1], self.chunks[:, None]
        order = np.argsort(self.leanest_s, axis=1, kind="stable")
        head_s = np.where(warmup == (pp - 1 if self.schedule in V_SHAPED else 0), self.head_s[:, None], 0.0)
        once, twice, slack_s = 1.0 / chunks, np.zeros(self.hop_s.shape), 0.0 * head_s
        if self.schedule.code in SPLIT_SCHEDULES:
            first, second = _first_forwards(self.schedule, m, pp)
            once, covered = self.least_forward[:, None], (first + second) / 2 * self.forward_share
            # The first chunk may have a layer more; the forward pass of the head is less than both of its passes.
            slack_s = (first - second) / 2 * self.forward_share * self.leanest_s + head_s
        else:
            covering = np.minimum(m - 1, warmup) * (self.schedule != Schedule.GPIPE)
            covered = (1.0 + covering * np.minimum(self.forward_share, 0.5)) / chunks
            twice = m - (2.0 + covering) / chunks
            twice = np.where((warmup == pp - 1) & (covering == warmup) & (twice > 0), twice, 0.0)
        factor = np.maximum(m - covered, MIN_FACTOR)
        ends_s = 0.0 if self.schedule.code in SPLIT_SCHEDULES else self.head_s[:, None]
        head_s, leanest_s, most_layers, factor, twice, slack_s = (
            np.take_along_axis(values, order, axis=1)
            for values in (head_s, self.leanest_s, self.most_layers, factor, twice, slack_s)
        )

        def fitting(free_s: Floats) -> Floats:
            return np.minimum(np.floor(np.maximum(free_s - head_s, 0.0) / leanest_s + ROUNDING), most_layers)

        def layers_within(time_s: Floats) -> Floats:
            work_s = (time_s - sends_s)[:, None]
            layers = fitting(work_s / m)
            for _ in range(PATH_ROUNDS):
                fastest = np.diff(np.minimum(np.cumsum(layers, axis=1), self.num_layers), axis=1, prepend=0.0)
                once_s = once * ((fastest * leanest_s).sum(axis=1, keepdims=True) + ends_s)
                free_s = (work_s - once_s + slack_s) / factor
                of_first_s = np.divide(work_s - 2 * once_s, twice, out=np.full_like(free_s, np.inf), where=twice > 0)
                layers = np.minimum(layers, fitting(np.minimum(free_s, of_first_s)))
            return layers

        return layers_within, order

    def sends_s(self, m: Ints) -> Floats:
        """Lower bound on the time added by messages; 0 where the order of the passes decides."""
        if self.schedule == Schedule.GPIPE:
            return gpipe_sends_s(self.hop_s[:, :-1], m, overlaps=self.overlaps)
        if self.schedule not in USUAL_SCHEDULES:
            return np.zeros(len(m))
        slowest_s = self.hop_s.max(axis=1)
        passes, pp = Pass(slowest_s, slowest_s), np.full_like(m, self.hop_s.shape[1])
        several = send_exposed_s(slowest_s, pp, m, self.chunks, passes, overlaps=self.overlaps)
        return np.where(self.chunks > 1, several, hop_sends_exposed_s(self.hop_s[:, :-1], m))


def _first_forwards(schedule: Schedule, m: Ints, pp: int) -> tuple[Ints, Ints]:
    """Forward passes that each stage runs before its first backward, through its first chunk and its last (`order`)."""
    warmup = np.arange(pp)[::-1]
    if schedule in V_SHAPED:
        return np.minimum(m, pp + warmup), np.minimum(m, pp - warmup)
    return (np.minimum(m, 1 + warmup),) * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Parts and tensor-parallel degrees of stages, for ways with one number of stages: shape (ways, stages)."""

    parts: Ints
    tp: Ints
    count: Ints  # number of equal pipelines: shape (ways)

    @classmethod
    def of(cls, ways: Ways) -> _Places:
        used, form = np.unique(ways.form, return_inverse=True)
        places = np.array([ways.forms[at].places for at in used])[form]
        return cls(parts=places[..., 0], tp=places[..., 1], count=np.array([ways.forms[at].count for at in used])[form])

    def spread(self, values: Mapping[int, Floats]) -> Floats:
        """Return for every stage the value of its part; `values` are per way."""
        result = np.zeros(self.parts.shape)
        for part, value in values.items():
            result = np.where(self.parts == part, value[:, None], result)
        return result

    def crossings(self, pair: frozenset[int], *, is_ring: bool) -> Bools:
        """Return the stages that send from one part of a pair to the other; in rings the last sends to the first."""
        behind = np.roll(self.parts, -1, axis=1)
        crosses = (self.parts != behind) & np.isin(self.parts, list(pair)) & np.isin(behind, list(pair))
        crosses[:, -1] &= is_ring
        return crosses

    def hops(self, costs: dict[int, KindCosts], across: dict[frozenset[int], Floats], *, is_ring: bool) -> Floats:
        """Return a lower bound on a message from every stage to the next; in rings the last sends to the first."""
        hop_s = self.spread({part: cost.times.message_s for part, cost in costs.items()})
        for pair, message in across.items():
            hop_s = np.where(self.crossings(pair, is_ring=is_ring), message[:, None], hop_s)
        hop_s[:, -1] *= is_ring
        return hop_s


def _across_s(
    problem: MixedProblem, nodes: Nodes, places: _Places, costs: dict[int, KindCosts], *, is_ring: bool
) -> dict[frozenset[int], Floats]:
    """Return the time of a message between every two parts by the slower one, 0 if none crosses."""
    result, degrees = {}, np.maximum(places.tp, np.roll(places.tp, -1, axis=1))
    for pair in map(frozenset, itertools.combinations(costs, 2)):
        crossing = (degrees * places.crossings(pair, is_ring=is_ring)).sum(axis=1)
        seconds = np.zeros(len(crossing))
        for part in pair:
            batch, calibration = costs[part].batch, problem.calibrations[part]
            senders, by_level = places.count * batch.cp * crossing, defaultdict(list)
            for number in np.unique(senders[senders > 0]).tolist():
                by_level[problem.between(part, only_on(nodes, pair), number)].append(number)
            for level, numbers in by_level.items():
                rows = np.flatnonzero(np.isin(senders, numbers))
                message = message_s(problem.alone(part), batch.take(rows), links_between(level, calibration))
                seconds[rows] = np.maximum(seconds[rows], calibration.overall * message)
        result[pair] = seconds
    return result


def _most_layers(
    space: MixedSpace,
    places: _Places,
    costs: dict[int, KindCosts],
    schedule: Schedule,
    counts: Sequence[int],
    microbatches: Ints,
) -> Ints:
    """Largest number of layers per stage, for each count of chunks: shape (counts x ways, stages)."""
    problem, split = space.problem, space.spaces[0].limits.split
    num_layers, (ways, pp) = problem.model.num_layers, places.parts.shape
    of_rank = np.full(pp, 1) if schedule in V_SHAPED else np.arange(pp, 0, -1)
    live = microbatches[:, None] if schedule == Schedule.GPIPE else np.minimum(microbatches[:, None], of_rank)
    fixed, states, passes = {}, {}, {}
    for part, cost in costs.items():
        safe, memory = problem.alone(part).capacity_bytes, cost.memory
        fixed[part] = safe * np.exp(space.most_z * problem.calibrations[part].memory_spread) - memory.fixed_bytes
        stored = np.minimum(memory.stored_bytes[:, None], memory.kept_bytes)
        passes[part] = np.where(cost.batch.recompute_num_layers[:, None] > 0, stored, memory.kept_bytes)
        states[part] = memory.state_bytes
    boundary, embedding = (
        places.spread({part: getattr(cost.memory, name) for part, cost in costs.items()})
        for name in ("boundary_bytes", "embedding_bytes")
    )
    free = places.spread(fixed) - live * boundary - (np.arange(pp) == 0) * embedding
    of_sorts = [
        [places.spread({part: value[:, sort] for part, value in table.items()}) for table in (states, passes)]
        for sort in range(len(problem.model.layer_kinds))
    ]
    numbers, of_number = np.unique(microbatches, return_inverse=True)
    result = []
    for chunks in counts:
        alive = np.stack([_alive_layers(num_layers, PipelineShape(schedule, pp, chunks, m)) for m in numbers.tolist()])
        low, high = np.zeros((ways, pp), dtype=np.int64), np.full((ways, pp), num_layers)
        for _ in range(num_layers.bit_length()):  # the memory need grows with the layers
            middle = (low + high + 1) // 2
            alive_layers = alive[of_number[:, None], np.arange(pp), middle]
            needed = np.min([middle * state + alive_layers * kept for state, kept in of_sorts], axis=0)
            low, high = np.where(needed <= free, middle, low), np.where(needed <= free, high, middle - 1)
        result.append(np.minimum(low, split(problem.model, pp)) if split else low)
    return np.concatenate(result)


@lru_cache(maxsize=1024)
def _alive_layers(num_layers: int, shape: PipelineShape) -> Floats:
    """Layers times live micro-batches, for stages with 0, 1, ... layers: shape (stages, numbers).

    Layers are spread evenly over the chunks of a stage (`MixedStage.with_layers`).
    """
    if shape.schedule == Schedule.INTERLEAVED and shape.num_microbatches % shape.stages:
        shape = shape._replace(schedule=Schedule.ONE_F_ONE_B, chunks=1)
    live = live_chunks(shape)
    sizes = np.array([even_chunks(number, shape.chunks) for number in range(num_layers + 1)], dtype=np.float64)
    return np.asarray((live @ sizes.T).max(axis=1))
