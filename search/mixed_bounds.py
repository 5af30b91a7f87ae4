"""Structures on a mixed cluster within the plain spaces of its parts, and lower bounds on their plans' times.

Costs and memory of a layer on a part come from `bounds`; the bounds here choose how many layers go where.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows, distinct_rows
from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.memory.stage_memory import transient_bytes
from autoplan.cost.mixed.collectives import links_between
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import hop_sends_exposed_s, send_exposed_s
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.cost.pipeline.order import PipelineShape, live_chunks
from autoplan.cost.step import straggler_share
from autoplan.frameworks.common.rules import legal
from autoplan.search.bounds import KindCosts, kind_costs
from autoplan.search.layouts import chunk_counts
from autoplan.search.limits import COUNTS, Limits, divisors
from autoplan.search.space import Cell, Space
from autoplan.search.structures import Pipelines, Structure, pipelines
from autoplan.spec.axes import MAX_DEGREE, SEARCHED
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, as_parallel
from autoplan.spec.plan import ALL_LAYERS, PlanBatch, even_chunks
from autoplan.spec.problem import Problem

FIRST_CHUNKS = 6  # limit on virtual stages of interleaved pipelines in the first round
BISECTIONS = 12
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
    num_devices: Ints
    # For groups combined with others, which share the sharded states: upper bound on sequences per second over all
    # replicas, without waits for the slowest device.
    most_rate: Floats


class Rates(NamedTuple):
    """Rates of ways combined with other groups, without waits for the slowest device."""

    most: Floats  # upper bound on sequences per second of all replicas
    chunks: Ints  # virtual stages with which they do
    end_s: Floats  # lower bound on the end of a step


class Candidate(NamedTuple):
    """Combination of groups of parts, each forming pipelines in one of its ways, with a lower bound on its plans."""

    least_s: float
    groups: tuple[Ways, ...]
    rows: tuple[int, ...]

    @property
    def form_rows(self) -> tuple[tuple[tuple[int, ...], int, int, int], ...]:
        """Numbers that identify `form`: for every group its parts, form, virtual stages and micro-batch."""
        return tuple(
            (ways.parts, int(ways.form[at]), int(ways.kinds.vp[at]), int(ways.kinds.micro_batch[at]))
            for ways, at in zip(self.groups, self.rows, strict=True)
        )

    @property
    def form(self) -> tuple[tuple[Pipelines, int], ...]:
        """Pipelines and micro-batch size of every group."""
        return tuple(
            (replace(ways.forms[form], vp=vp), micro_batch)
            for ways, (_, form, vp, micro_batch) in zip(self.groups, self.form_rows, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSpace:
    """Plans of a mixed cluster that are in the plain spaces of all of its parts, within the limits of `structures`."""

    problem: MixedProblem
    spaces: tuple[Space, ...]  # of every part alone
    global_batch: int
    has_one_tp: bool  # the same tensor-parallel degree on all stages
    most_z: float  # how near to its memory capacity a device may be (`CostEstimates.oom_z`)
    _limits: dict[tuple[int, ...], Limits] = field(init=False, default_factory=dict, repr=False)

    def limits_of(self, parts: Sequence[int]) -> Limits:
        """Return the choices that all parts have; numbers of recomputed layers are only for plans of one part."""
        if (key := tuple(parts)) not in self._limits:
            self._limits[key] = self._common_limits(parts)
        return self._limits[key]

    def _common_limits(self, parts: Sequence[int]) -> Limits:
        first, *other_limits = (self.spaces[part].limits for part in parts)
        words = {
            axis.name: tuple(
                value for value in first.of(axis.name) if all(value in limits.of(axis.name) for limits in other_limits)
            )
            for axis in SEARCHED
        }
        recomputes = tuple(choice for choice in first.recomputes if not choice.startswith("full:"))
        return replace(first.where(**words), recomputes=recomputes or first.recomputes[:1])

    def ways(self, parts: Sequence[int]) -> Ways | None:
        """Return the ways of a group of parts to form equal pipelines, with their axes; None if there are none."""
        problem, limits, first = self.problem, self.limits_of(parts), self.spaces[parts[0]]
        degrees = {
            part: [
                tp
                for tp in divisors(problem.cluster.parts[part].levels[-1].num_devices)
                if self.spaces[part].limits.admits("tp", tp)
            ]
            for part in parts
        }
        by_shape: dict[tuple[int, int], list[tuple[Pipelines, Cell]]] = defaultdict(list)
        for cp in filter(lambda cp: limits.admits("cp", cp), divisors(problem.training.seq_len)):
            for way in pipelines(problem, parts, self.global_batch, degrees, cp):
                if not limits.admits("pp", len(way.places)) or (self.has_one_tp and not way.has_one_tp):
                    continue
                tp = way.places[0][1]
                for ep, etp in first.expert_degrees(tp, way.count * cp * tp, 1):
                    if all(way.count * cp * degree % (ep * min(etp, degree)) == 0 for _, degree in way.places):
                        degrees_of = {"pp": len(way.places), "tp": tp, "cp": cp, "ep": ep, "etp": etp}
                        cell = Cell(**degrees_of, dp_replicate=1, dp_shard=way.count)
                        # Replicas may have different numbers of micro-batches if these do not divide evenly.
                        share, remainder = divmod(self.global_batch, way.count)
                        batch = way.count * 2 ** (share.bit_length() - 1) if remainder else self.global_batch
                        by_shape[batch, cell.pp * tp * cp * way.count].append((way, cell))
        forms: list[Pipelines] = []
        batches, owners = [], []
        for (batch, num_devices), pairs in by_shape.items():
            workload = replace(first.workload, num_devices=num_devices)
            space = replace(first, workload=workload, limits=replace(limits, global_batches=(batch,)))
            cells = [cell for _, cell in pairs]
            kinds, of_group = space.kinds(cells, *(groups := space.groups(cells)))
            for rows, vp in self._chunked(space, parts, kinds):
                owners.append((groups[1][of_group] + len(forms))[rows])
                batches.append(_with_chunks(kinds.take(rows), vp))
            forms += [way for way, _ in pairs]
        if not owners:
            return None
        form, kinds = np.concatenate(owners), PlanBatch.concatenate(batches)
        # Sharded weights and gradients are exchanged only between replicas on whole parts (`check_mixed`).
        is_whole = np.array([self._is_whole(way) for way in forms])[form] & (kinds.cp == 1)
        rows = np.flatnonzero((kinds.sharding <= Sharding.ZERO1.code) | is_whole)
        if not len(rows):
            return None
        form, kinds = form[rows], kinds.take(rows)
        none, stages = np.zeros(len(form)), np.array([sum(tp for _, tp in way.places) * way.count for way in forms])
        ways = Ways(
            parts=tuple(parts),
            forms=tuple(forms),
            form=form,
            kinds=kinds,
            least_s=none,
            num_devices=stages[form] * kinds.cp,
            most_rate=none,
        )
        return self._bounded(ways)

    def _is_whole(self, way: Pipelines) -> bool:
        (part, tp), *deeper = way.places
        return not deeper and way.count * tp == self.problem.cluster.parts[part].num_devices

    def describe(self) -> tuple[str, ...]:
        """Describe the limits of the parts, the common ones first."""
        of_parts = [space.limits.describe(self.problem.model) for space in self.spaces]
        return tuple(dict.fromkeys(limit for limits in of_parts for limit in limits))

    def structure(self, candidate: Candidate) -> Structure:
        """Return the structure of combined groups, all with the same axes."""
        plans = [ways.kinds.plan(at) for ways, at in zip(candidate.groups, candidate.rows, strict=True)]
        whole = MAX_DEGREE if self.problem.model.moe else 1
        etp = min((plan.etp for plan in plans if plan.etp < plan.tp), default=whole)
        forms, micro_batches = zip(*candidate.form, strict=True)
        common = replace(plans[0], sp=self.spaces[0].limits.sequence_parallel, etp=etp)
        return Structure(kinds=forms, micro_batches=micro_batches, common=common)

    def _chunked(self, space: Space, parts: Sequence[int], kinds: PlanBatch) -> Iterator[tuple[Ints, int]]:
        """Yield the kinds that are legal with one virtual stage, and the legal numbers for those with several."""
        for pp in np.unique(kinds.pp).tolist():
            chunks = self.chunks(parts, pp)
            several = [vp for vp in chunks if vp > 1]
            usual = [vp for vp in several if vp <= FIRST_CHUNKS] or several[:1]
            for vp in (*chunks[: chunks[:1] == (1,)], *usual[-1:]):
                rows = np.flatnonzero(kinds.pp == pp)
                plans = _with_chunks(kinds.take(rows), vp)
                rounds = -(-plans.num_microbatches // pp) * pp if vp > 1 else plans.num_microbatches
                layouts = (even_chunks(self.problem.model.num_layers, pp * vp),)
                plans = replace(plans, global_batch=rounds * plans.micro_batch * plans.dp, layouts=layouts)
                yield rows[legal(space.rules, space.workload, plans)], vp

    def admits(self, plans: Sequence[MixedPlan]) -> Bools:
        """Return which plans obey the limits and their framework's rules, stage by stage."""
        if not plans:
            return np.empty(0, dtype=np.bool_)
        stages = [
            (at, kind.stages[stage].part, as_parallel(self.problem, plan, kind, kind.stages[stage].tp))
            for at, plan in enumerate(plans)
            for kind in plan.kinds
            for stage in {(stage.part, stage.tp): place for place, stage in enumerate(kind.stages)}.values()
        ]
        owner, parts, parallel = zip(*stages, strict=True)
        batch, space = PlanBatch.of(parallel, self.problem.model.num_layers), self.spaces[0]
        lawful = np.ones(len(plans), dtype=np.bool_)
        for num_devices in np.unique(batch.num_devices).tolist():
            rows = np.flatnonzero(batch.num_devices == num_devices)
            workload = replace(space.workload, num_devices=num_devices)
            np.logical_and.at(lawful, np.array(owner)[rows], legal(space.rules, workload, batch.take(rows)))
        for at, part, plan in zip(owner, parts, parallel, strict=True):
            lawful[at] &= all(self.spaces[part].limits.admits(axis, getattr(plan, axis)) for axis in COUNTS)
        return lawful

    def chunks(self, parts: Sequence[int], pp: int) -> tuple[int, ...]:
        """Return the possible numbers of virtual stages on this many stages, ascending."""
        limits = self.limits_of(parts)
        words, counts = limits.of("schedule"), chunk_counts(self.problem.model.num_layers, pp)
        return tuple(
            vp
            for vp in counts
            if pp * vp <= self.problem.model.num_layers
            and limits.admits("vp", vp)
            and (Schedule.INTERLEAVED if vp > 1 else Schedule.ONE_F_ONE_B) in words
        )

    def _bounded(self, ways: Ways) -> Ways:
        """Add bounds to the ways: alone, and combined with other groups, whose replicas share the sharded states.

        Interleaved ways get the number of virtual stages with the smallest bound.
        """
        kinds, num_parts = ways.kinds, len(self.spaces)
        if len(ways.parts) > 1:  # plans of a single part come from its own space
            costs = self._costs(ways, kinds.dp_shard)
            passes_s, chunks = self._passes_s(
                ways, -(-self.global_batch // (kinds.dp_shard * kinds.micro_batch)), costs, costs
            )
            # Interleaved pipelines run whole rounds of micro-batches.
            comes_out = (kinds.vp == 1) | (self.global_batch % (kinds.micro_batch * kinds.pp) == 0)
            least_s = np.where(
                comes_out, (1.0 + straggler_share(ways.num_devices)) * (self._rest_s(ways, costs) + passes_s), np.inf
            )
            ways = replace(ways, kinds=replace(kinds, vp=chunks), least_s=least_s)
        if len(ways.parts) < num_parts:
            rates = self.rates(ways, np.full(len(ways.form), self.problem.cluster.num_devices))
            chunks = rates.chunks if len(ways.parts) == 1 else ways.kinds.vp
            ways = replace(ways, kinds=replace(ways.kinds, vp=chunks), most_rate=rates.most)
        return ways

    def rates(self, ways: Ways, num_replicas: Ints, within_s: float = np.inf) -> Rates:
        """Return rates of every way in combined steps of `within_s` or less, with states shared evenly by all replicas.

        Rates grow with the micro-batches, whose number is bounded by `most_rate` in that time.
        """
        costs, states = (self._costs(ways, number) for number in (ways.kinds.dp_shard, num_replicas))
        size = ways.kinds.dp_shard * ways.kinds.micro_batch
        m = -(-self.global_batch // size)
        if within_s < np.inf:
            m = np.clip((ways.most_rate * within_s / size + ROUNDING).astype(np.int64), 1, m)
        passes_s, chunks = self._passes_s(ways, m, costs, states)
        return Rates(most=m * size / passes_s, chunks=chunks, end_s=self._rest_s(ways, states))

    def _rest_s(self, ways: Ways, costs: dict[int, KindCosts]) -> Floats:
        """Time of the end of a step on the fastest part."""
        overall = min(self.problem.calibrations[part].overall for part in ways.parts)
        return overall * np.min([cost.times.rest_s for cost in costs.values()], axis=0)

    def _passes_s(
        self, ways: Ways, num_microbatches: Ints, costs: dict[int, KindCosts], states: dict[int, KindCosts]
    ) -> tuple[Floats, Ints]:
        """Return (lower bound on the passes of this many micro-batches, the virtual stages that attain it)."""
        time_s, chunks = np.full(len(ways.form), np.inf), ways.kinds.vp.copy()
        stages = np.array([len(form.places) for form in ways.forms])[ways.form]
        for pp, is_plain in itertools.product(np.unique(stages).tolist(), (True, False)):
            rows = np.flatnonzero((stages == pp) & ((ways.kinds.vp == 1) == is_plain))
            if not len(rows):
                continue
            counts = [vp for vp in self.chunks(ways.parts, pp) if (vp == 1) == is_plain]
            prices, state_prices = (
                {part: cost.take(rows) for part, cost in table.items()} for table in (costs, states)
            )
            of_counts = _PipelineBounds.of(self, ways.take(rows), prices, state_prices, counts).least_s(
                np.tile(num_microbatches[rows], len(counts))
            )
            of_counts = of_counts.reshape(len(counts), -1)
            time_s[rows], chunks[rows] = of_counts.min(axis=0), np.array(counts)[of_counts.argmin(axis=0)]
        return time_s, chunks

    def _costs(self, ways: Ways, replicas: Ints) -> dict[int, KindCosts]:
        """Return the prices of all ways on every part, if this many replicas share the states."""
        problem, kinds, costs, limits = self.problem, ways.kinds, {}, self.limits_of(ways.parts)
        for part in ways.parts:
            tp = np.array([dict(form.places)[part] for form in ways.forms])[ways.form]
            divides = (tp > 1) & (problem.training.seq_len // kinds.cp % tp == 0)
            etp = np.where(kinds.etp == kinds.tp, tp, kinds.etp)
            batch = replace(kinds, tp=tp, sp=divides & limits.sequence_parallel, etp=etp, dp_shard=replicas)
            batch = replace(batch, global_batch=kinds.global_batch // kinds.dp_shard * replicas)
            as_if, overall = problem.as_if(part, frozenset(ways.parts)), problem.calibrations[part].overall
            # Messages between neighbours on one part, for the fewest replicas.
            near = replace(batch, pp=np.minimum(batch.pp, 2), dp_shard=np.ones_like(batch.pp))
            sent_s = overall * message_s(as_if, near)
            own = kind_costs(as_if, batch)
            fixed_bytes = own.memory.fixed_bytes + _transient_bytes(as_if, batch)
            costs[part] = replace(
                own,
                times=replace(own.times, message_s=sent_s),
                memory=replace(own.memory, fixed_bytes=fixed_bytes),
            )
        return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class _PipelineBounds(Rows):
    """Pipelines with one number of stages, before layers are assigned: arrays of shape (ways, stages)."""

    prices: Ints  # index of each set of prices
    leanest_s: Floats  # both passes of the cheapest sort of layer
    forward_share: Floats  # upper bound on the forward pass's share of a layer
    most_layers: Ints  # per stage
    hop_s: Floats  # lower bound on a message from every stage to the next
    head_s: Floats  # on the last stage
    chunks: Ints  # of a stage
    num_layers: int
    overlaps: bool  # messages of interleaved pipelines

    @classmethod
    def of(
        cls,
        space: MixedSpace,
        ways: Ways,
        costs: dict[int, KindCosts],
        states: dict[int, KindCosts],
        counts: Sequence[int],
    ) -> _PipelineBounds:
        """Return the bounds of ways with one number of stages and the states of `states`, for each number of chunks."""
        problem, places = space.problem, _Places.of(ways)
        passes, shares, heads = {}, {}, {}
        for part, cost in costs.items():
            overall = problem.calibrations[part].overall
            layer_s = (
                cost.times.layer_s + (cost.batch.recompute_num_layers == ALL_LAYERS)[:, None] * cost.times.repeat_s
            )
            passes[part] = overall * layer_s.min(axis=1)
            shares[part] = (cost.times.forward_s / layer_s).max(axis=1)
            heads[part] = overall * cost.times.head_s
        head_s = places.spread(heads)[:, -1]
        across = _across_s(problem, places, costs, is_ring=counts[0] > 1)
        messages = [cost.times.message_s for cost in costs.values()]
        prices = (*passes.values(), *shares.values(), *across.values(), *messages, head_s)
        _, alike = distinct_rows(ways.form, *(np.unique(price, return_inverse=True)[1] for price in prices))
        pipelines = cls(
            prices=alike,
            leanest_s=places.spread(passes),
            forward_share=places.spread(shares),
            most_layers=np.zeros_like(places.parts),
            hop_s=places.hops(costs, across, is_ring=counts[0] > 1),
            head_s=head_s,
            chunks=np.ones_like(alike),
            num_layers=problem.model.num_layers,
            overlaps=problem.framework.overlap.p2p_overlap,
        )
        return replace(
            pipelines.take(np.tile(np.arange(len(alike)), len(counts))),
            most_layers=_most_layers(space, places, states, counts),
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
        """Smallest time in which the stages can take all layers, each as many whole ones as its path and memory allow.

        The path of a stage (`one_forward_one_backward_s`) is its own work, all work before it, and the work after it
        that its warm-up and cool-down do not cover.  With c covered passes the uncovered work is at least the work
        after it minus c times the shorter of the stage's two passes.  The work of all stages for one micro-batch is
        smallest if the fast stages have as many layers as possible.
        """
        sends_s, pp = self.sends_s(m), self.hop_s.shape[1]
        warmup = np.arange(pp)[::-1]
        covering = np.minimum(m[:, None] - 1, warmup)
        factor = m[:, None] - (1.0 + covering * np.minimum(self.forward_share, 0.5)) / self.chunks[:, None]
        factor = np.maximum(factor, MIN_FACTOR)
        order = np.argsort(self.leanest_s, axis=1, kind="stable")
        head_s = np.where(warmup == 0, self.head_s[:, None], 0.0)
        head_s, leanest_s, most_layers, factor = (
            np.take_along_axis(values, order, axis=1) for values in (head_s, self.leanest_s, self.most_layers, factor)
        )

        def layers_within(free_s: Floats) -> Floats:
            return np.minimum(np.floor(np.maximum(free_s - head_s, 0.0) / leanest_s + ROUNDING), most_layers)

        low = m * self.num_layers / (1.0 / self.leanest_s).sum(axis=1)
        high = WIDEST * (low + m * self.head_s) + sends_s
        for _ in range(BISECTIONS):
            middle = np.sqrt(low * high)
            work_s = middle - sends_s
            placed = np.cumsum(layers_within((work_s / m)[:, None]), axis=1)
            fastest = np.diff(np.minimum(placed, self.num_layers), axis=1, prepend=0.0)
            once_s = ((fastest * leanest_s).sum(axis=1) + self.head_s) / self.chunks
            layers = layers_within((work_s - once_s)[:, None] / factor)
            enough = (placed[:, -1] >= self.num_layers) & (layers.sum(axis=1) >= self.num_layers)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return low

    def sends_s(self, m: Ints) -> Floats:
        """Lower bound on the time added by messages."""
        slowest_s = self.hop_s.max(axis=1)
        passes, pp = Pass(slowest_s, slowest_s), np.full_like(m, self.hop_s.shape[1])
        several = send_exposed_s(slowest_s, pp, m, self.chunks, passes, overlaps=self.overlaps)
        return np.where(self.chunks > 1, several, hop_sends_exposed_s(self.hop_s[:, :-1], m))


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
    problem: MixedProblem, places: _Places, costs: dict[int, KindCosts], *, is_ring: bool
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
                by_level[problem.between(part, pair, number)].append(number)
            for level, numbers in by_level.items():
                rows = np.flatnonzero(np.isin(senders, numbers))
                as_if = problem.as_if(part, frozenset(costs))
                message = message_s(as_if, batch.take(rows), links_between(level, calibration))
                seconds[rows] = np.maximum(seconds[rows], calibration.overall * message)
        result[pair] = seconds
    return result


def _with_chunks(kinds: PlanBatch, vp: int) -> PlanBatch:
    """Return kinds with this many chunks per stage."""
    schedule = Schedule.INTERLEAVED if vp > 1 else Schedule.ONE_F_ONE_B
    return replace(kinds, vp=np.full_like(kinds.vp, vp), schedule=np.full_like(kinds.schedule, schedule.code))


def _transient_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Lower bound on any stage's backward transients: those of the last stage, where logits may cover them."""
    memory, last = problem.framework.memory, np.ones((len(batch), 1), dtype=np.bool_)
    if memory.fsdp2_states:
        return np.zeros(len(batch))
    blocks = StageBlocks(count={}, repeated={}, repeats_chunk=~last, chunks_alike=last[:, 0], is_last=last)
    return memory.reserved_factor * transient_bytes(problem, batch, blocks, np.zeros(len(batch)))[:, 0]


def _most_layers(space: MixedSpace, places: _Places, costs: dict[int, KindCosts], counts: Sequence[int]) -> Ints:
    """Largest number of layers per stage, for each count of chunks: shape (counts x ways, stages)."""
    problem, split = space.problem, space.spaces[0].limits.split
    num_layers, (ways, pp) = problem.model.num_layers, places.parts.shape
    microbatches = next(iter(costs.values())).batch.num_microbatches
    live = np.minimum(microbatches[:, None], np.arange(pp, 0, -1))
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
        alive = np.stack([_alive_layers(num_layers, pp, chunks, m) for m in numbers.tolist()])
        low, high = np.zeros((ways, pp), dtype=np.int64), np.full((ways, pp), num_layers)
        for _ in range(num_layers.bit_length()):  # the memory need grows with the layers
            middle = (low + high + 1) // 2
            alive_layers = alive[of_number[:, None], np.arange(pp), middle]
            needed = np.min([middle * state + alive_layers * kept for state, kept in of_sorts], axis=0)
            low, high = np.where(needed <= free, middle, low), np.where(needed <= free, high, middle - 1)
        result.append(np.minimum(low, split(problem.model, pp)) if split else low)
    return np.concatenate(result)


@lru_cache(maxsize=1024)
def _alive_layers(num_layers: int, pp: int, chunks: int, num_microbatches: int) -> Floats:
    """Layers times live micro-batches, for stages with 0, 1, ... layers: shape (stages, numbers).

    Layers are spread evenly over the chunks of a stage (`MixedStage.with_layers`).
    """
    if chunks == 1 or num_microbatches % pp:
        return np.minimum(num_microbatches, np.arange(pp, 0, -1))[:, None] * np.arange(num_layers + 1.0)
    live = live_chunks(PipelineShape(Schedule.INTERLEAVED, pp, chunks, num_microbatches))
    sizes = np.array([even_chunks(number, chunks) for number in range(num_layers + 1)], dtype=np.float64)
    return np.asarray((live @ sizes.T).max(axis=1))
