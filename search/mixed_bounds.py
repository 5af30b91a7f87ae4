"""Structures of a mixed cluster that the plain spaces of its parts admit, and times that no plan of them beats.

What a layer costs and keeps on a part are the prices of `bounds`; a bound chooses how many layers lie where.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows
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
from autoplan.search.limits import COUNTS, Limits, divisors
from autoplan.search.space import Cell, Space, chunk_counts
from autoplan.search.structures import Pipelines, Structure, pipelines
from autoplan.spec.axes import MAX_DEGREE, SEARCHED
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.estimate import RISKY_Z
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, as_parallel
from autoplan.spec.plan import ALL_LAYERS, PlanBatch, even_chunks
from autoplan.spec.problem import Problem

FIRST_CHUNKS = 6  # virtual stages of interleaved pipelines at most, at first
BISECTIONS = 12
WIDEST = 4.0  # times the work of stages that are all as long: what takes longer is no answer
ROUNDING = 1e-6  # of a layer
LEAST_FACTOR = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways(Rows):
    """Ways of a group of parts to form equal pipelines, each with axes of its plans: an element each."""

    parts: tuple[int, ...]
    forms: tuple[Pipelines, ...]
    form: Ints  # index into `forms`
    kinds: PlanBatch  # as if all stages had the first one's tp, plain or interleaved
    least_s: Floats  # no plan of them alone is faster; infinite where none fits
    num_devices: Ints
    # In groups beside others, which share the sharded states: sequences that all replicas do in a second, at most and
    # but for what they wait for the slowest device of all.
    most_rate: Floats


class Rates(NamedTuple):
    """Rates of ways beside others, but for what they wait for the slowest device of all."""

    most: Floats  # sequences that all replicas do in a second at most
    chunks: Ints  # virtual stages with which they do
    end_s: Floats  # end of a step at least


class Candidate(NamedTuple):
    """Groups of parts that form pipelines beside each other, each in one of its ways; no plan of it is faster."""

    least_s: float
    groups: tuple[Ways, ...]
    rows: tuple[int, ...]

    @property
    def form(self) -> tuple[tuple[Pipelines, int], ...]:
        """The pipelines of every group, and the sequences of their micro-batches."""
        pairs = zip(self.groups, self.rows, strict=True)
        return tuple(
            (replace(ways.forms[ways.form[at]], vp=int(ways.kinds.vp[at])), int(ways.kinds.micro_batch[at]))
            for ways, at in pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSpace:
    """Plans of a mixed cluster: what the plain spaces of all of its parts admit, in the limits of `structures`."""

    problem: MixedProblem
    spaces: tuple[Space, ...]  # of every part by itself
    global_batch: int
    has_one_tp: bool  # the same tensor-parallel degree on all stages

    def limits_of(self, parts: Sequence[int]) -> Limits:
        """Choices that all of the parts have; numbers of recomputed layers are left to plans of one part."""
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
        """Ways of a group of parts to form equal pipelines, with the axes of each; None where there are none."""
        problem, limits, first = self.problem, self.limits_of(parts), self.spaces[parts[0]]
        degrees = {
            part: [
                tp
                for tp in divisors(problem.cluster.parts[part].levels[-1].num_devices)
                if self.spaces[part].limits.admits("tp", tp)
            ]
            for part in parts
        }
        by_shape: dict[tuple[int, int], list[tuple[Pipelines, Cell]]] = {}
        for cp in filter(lambda cp: limits.admits("cp", cp), divisors(problem.training.seq_len)):
            for way in pipelines(problem, parts, self.global_batch, degrees, cp):
                if not limits.admits("pp", len(way.places)) or (self.has_one_tp and not way.has_one_tp):
                    continue
                tp = way.places[0][1]
                for ep, etp in first.expert_degrees(tp, way.count * cp * tp, 1):
                    if all(way.count * cp * degree % (ep * min(etp, degree)) == 0 for _, degree in way.places):
                        degrees_of = {"pp": len(way.places), "tp": tp, "cp": cp, "ep": ep, "etp": etp}
                        cell = Cell(**degrees_of, dp_replicate=1, dp_shard=way.count)
                        num_devices = cell.pp * tp * cp * way.count
                        by_shape.setdefault((way.count, num_devices), []).append((way, cell))
        forms: list[Pipelines] = []
        batches, owners = [], []
        for (count, num_devices), pairs in by_shape.items():
            # Replicas share out what does not divide.
            share = self.global_batch // count
            is_divisible = self.global_batch % count == 0
            batch = self.global_batch if is_divisible else count * 2 ** (share.bit_length() - 1)
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
        # Weights and gradients in shards travel between replicas of whole parts only (`check_mixed`).
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
        """The limits of the parts in words, those of all first."""
        of_parts = [space.limits.describe(self.problem.model) for space in self.spaces]
        return tuple(dict.fromkeys(limit for limits in of_parts for limit in limits))

    def structure(self, candidate: Candidate) -> Structure:
        """The structure of groups beside each other, all with the same axes."""
        plans = [ways.kinds.plan(at) for ways, at in zip(candidate.groups, candidate.rows, strict=True)]
        whole = MAX_DEGREE if self.problem.model.moe else 1
        etp = min((plan.etp for plan in plans if plan.etp < plan.tp), default=whole)
        forms, micro_batches = zip(*candidate.form, strict=True)
        common = replace(plans[0], sp=self.spaces[0].limits.sequence_parallel, etp=etp)
        return Structure(kinds=forms, micro_batches=micro_batches, common=common)

    def _chunked(self, space: Space, parts: Sequence[int], kinds: PlanBatch) -> Iterator[tuple[Ints, int]]:
        """Yield which kinds are lawful with one virtual stage, and with how many those that are with several."""
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
        """Return which plans obey the limits and the rules of their framework, stage by stage."""
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
        """Numbers of virtual stages that so many stages may have, ascending."""
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
        """The ways with their bounds: alone, and beside other groups, whose replicas share the sharded states.

        Those that are interleaved have the number of virtual stages with the least bound.
        """
        kinds, num_parts = ways.kinds, len(self.spaces)
        if len(ways.parts) > 1:  # plans of one part alone are those of its own space
            costs = self._costs(ways, kinds.dp_shard)
            passes_s, chunks = self._passes_s(
                ways, -(-self.global_batch // (kinds.dp_shard * kinds.micro_batch)), costs, costs
            )
            # Interleaved pipelines work in whole rounds of micro-batches.
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
        """Rates of every way beside others in a step that takes no longer, if so many replicas share the states evenly.

        They grow with the micro-batches, of which there are no more than `most_rate` has in that time.
        """
        costs, states = (self._costs(ways, number) for number in (ways.kinds.dp_shard, num_replicas))
        size = ways.kinds.dp_shard * ways.kinds.micro_batch
        m = -(-self.global_batch // size)
        if within_s < np.inf:
            m = np.clip((ways.most_rate * within_s / size + ROUNDING).astype(np.int64), 1, m)
        passes_s, chunks = self._passes_s(ways, m, costs, states)
        return Rates(most=m * size / passes_s, chunks=chunks, end_s=self._rest_s(ways, states))

    def _rest_s(self, ways: Ways, costs: dict[int, KindCosts]) -> Floats:
        """Time of the end of a step, on the part where it takes least."""
        overall = min(self.problem.calibrations[part].overall for part in ways.parts)
        return overall * np.min([cost.rest_s for cost in costs.values()], axis=0)

    def _passes_s(
        self, ways: Ways, num_microbatches: Ints, costs: dict[int, KindCosts], states: dict[int, KindCosts]
    ) -> tuple[Floats, Ints]:
        """(time that all passes of so many micro-batches take at least, the virtual stages with which they do)."""
        time_s, chunks = np.full(len(ways.form), np.inf), ways.kinds.vp.copy()
        for (at, form), is_plain in itertools.product(enumerate(ways.forms), (True, False)):
            rows = np.flatnonzero((ways.form == at) & ((ways.kinds.vp == 1) == is_plain))
            if not len(rows):
                continue
            counts = [vp for vp in self.chunks(ways.parts, len(form.places)) if (vp == 1) == is_plain]
            m = num_microbatches[rows]
            own, held = ({part: cost.take(rows) for part, cost in table.items()} for table in (costs, states))
            of_counts = np.array([_Pipelines.of(self, form, own, held, vp).least_s(m) for vp in counts])
            time_s[rows], chunks[rows] = of_counts.min(axis=0), np.array(counts)[of_counts.argmin(axis=0)]
        return time_s, chunks

    def _costs(self, ways: Ways, replicas: Ints) -> dict[int, KindCosts]:
        """Return the prices of all ways on every part, if so many replicas share the states."""
        problem, kinds, costs, limits = self.problem, ways.kinds, {}, self.limits_of(ways.parts)
        for part in ways.parts:
            tp = np.array([dict(form.places)[part] for form in ways.forms])[ways.form]
            divides = (tp > 1) & (problem.training.seq_len // kinds.cp % tp == 0)
            etp = np.where(kinds.etp == kinds.tp, tp, kinds.etp)
            batch = replace(kinds, tp=tp, sp=divides & limits.sequence_parallel, etp=etp, dp_shard=replicas)
            batch = replace(batch, global_batch=kinds.global_batch // kinds.dp_shard * replicas)
            as_if, overall = problem.as_if(part, frozenset(ways.parts)), problem.calibrations[part].overall
            # Between neighbours on one part, of as few replicas as any number of micro-batches may have.
            near = replace(batch, pp=np.minimum(batch.pp, 2), dp_shard=np.ones_like(batch.pp))
            sent_s = overall * message_s(as_if, near)
            own = kind_costs(as_if, batch)
            fixed_bytes = own.fixed_bytes + _transient_bytes(as_if, batch)
            costs[part] = replace(own, message_s=sent_s, fixed_bytes=fixed_bytes)
        return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipelines(Rows):
    """Pipelines of one number of stages whose layers are not placed yet: arrays of shape (ways, stages)."""

    leanest_s: Floats  # both passes of the cheapest sort of layer
    forward_share: Floats  # of the forward pass in a layer, at most
    most_layers: Floats  # that a stage holds
    hop_s: Floats  # a message from every stage to the next, at least
    head_s: Floats  # on the last stage
    pp: Ints
    chunks: Ints  # of a stage
    num_layers: int
    overlaps: bool  # messages of interleaved pipelines

    @classmethod
    def of(
        cls,
        space: MixedSpace,
        form: Pipelines,
        costs: dict[int, KindCosts],
        states: dict[int, KindCosts],
        chunks: int,
    ) -> _Pipelines:
        """Return the pipelines of all ways with one form, with the states of `states`."""
        problem, places = space.problem, form.places
        overall = [calibration.overall for calibration in problem.calibrations]
        passes, shares = {}, {}
        for part, cost in costs.items():
            layer_s = cost.layer_s + (cost.batch.recompute_num_layers == ALL_LAYERS)[:, None] * cost.repeat_s
            passes[part] = overall[part] * layer_s.min(axis=1)
            shares[part] = (cost.forward_s / layer_s).max(axis=1)
        ways, last = len(passes[places[0][0]]), places[-1][0]
        return cls(
            leanest_s=np.stack([passes[part] for part, _ in places], axis=1),
            forward_share=np.stack([shares[part] for part, _ in places], axis=1),
            most_layers=_most_layers(problem, form, states, chunks),
            hop_s=_hops_s(problem, form, costs, is_ring=chunks > 1),
            head_s=overall[last] * costs[last].head_s,
            pp=np.full(ways, len(places)),
            chunks=np.full(ways, chunks),
            num_layers=problem.model.num_layers,
            overlaps=problem.framework.overlap.p2p_overlap,
        )

    def least_s(self, m: Ints) -> Floats:
        """Time that `m` micro-batches take at least, whichever stage has which layers; infinite where none fit."""
        columns = np.column_stack([m, self.head_s, self.most_layers, self.leanest_s, self.hop_s])
        _, first, alike = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        ways, m = self.take(first), m[first]
        low = m * ways.num_layers / (1.0 / ways.leanest_s).sum(axis=1)
        high = WIDEST * (low + m * ways.head_s) + ways.sends_s(m)
        for _ in range(BISECTIONS):
            middle = np.sqrt(low * high)
            enough = ways.suffices(middle, m)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        fits = (ways.most_layers.sum(axis=1) >= ways.num_layers) & (ways.most_layers.min(axis=1) >= 1)
        return np.where(fits, low, np.inf)[alike.reshape(-1)]

    def sends_s(self, m: Ints) -> Floats:
        """Time that messages add at least."""
        slowest_s = self.hop_s.max(axis=1)
        passes = Pass(slowest_s, slowest_s)
        several = send_exposed_s(slowest_s, self.pp, m, self.chunks, passes, overlaps=self.overlaps)
        return np.where(self.chunks > 1, several, hop_sends_exposed_s(self.hop_s[:, :-1], m))

    def suffices(self, time_s: Floats, m: Ints) -> Bools:
        """Return where stages have all layers if none has more whole ones than its path and memory allow in a time.

        The path of a stage (`one_forward_one_backward_s`) is its own work, all before it, and what its warm-up and its
        cool-down leave of the work behind it.  Of c covered passes they leave, whatever is behind, no less than that
        without c times the shorter one of its own two passes.  The work of all stages once is least where those that
        are fast have what they can.
        """
        work_s = time_s - self.sends_s(m)
        warmup = np.maximum(self.pp[:, None] - 1 - np.arange(self.hop_s.shape[1]), 0)
        covering = np.minimum(m[:, None] - 1, warmup)
        factor = m[:, None] - (1.0 + covering * np.minimum(self.forward_share, 0.5)) / self.chunks[:, None]
        is_last = np.arange(self.hop_s.shape[1]) == self.pp[:, None] - 1
        head_s = np.where(is_last, self.head_s[:, None], 0.0)

        def layers_within(free_s: Floats) -> Floats:
            return np.minimum(np.floor(np.maximum(free_s - head_s, 0.0) / self.leanest_s + ROUNDING), self.most_layers)

        order = np.argsort(self.leanest_s, axis=1, kind="stable")
        most_layers = np.take_along_axis(layers_within((work_s / m)[:, None]), order, axis=1)
        placed = np.diff(np.minimum(np.cumsum(most_layers, axis=1), self.num_layers), axis=1, prepend=0.0)
        layers_s = (placed * np.take_along_axis(self.leanest_s, order, axis=1)).sum(axis=1)
        once_s = (layers_s + self.head_s) / self.chunks
        layers = layers_within((work_s - once_s)[:, None] / np.maximum(factor, LEAST_FACTOR))
        return (most_layers.sum(axis=1) >= self.num_layers) & (layers.sum(axis=1) >= self.num_layers)


def _hops_s(problem: MixedProblem, form: Pipelines, costs: dict[int, KindCosts], *, is_ring: bool) -> Floats:
    """A message from every stage to the next at least, of rings from the last one to the first: (ways, stages)."""
    places, cp = form.places, int(next(iter(costs.values())).batch.cp[0])
    hops = list(zip(places, (*places[1:], places[0]), strict=True))[: None if is_ring else -1]
    senders: dict[frozenset[int], int] = defaultdict(int)
    for (part, tp), (behind, tp_behind) in hops:
        senders[frozenset((part, behind))] += form.count * cp * max(tp, tp_behind)

    def across_s(part: int, pair: frozenset[int]) -> Floats:
        links = links_between(problem.between(part, pair, senders[pair]), problem.calibrations[part])
        as_if = problem.as_if(part, frozenset(costs))
        return problem.calibrations[part].overall * message_s(as_if, costs[part].batch, links)

    pairs = {pair: np.max([across_s(part, pair) for part in pair], axis=0) for pair in senders if len(pair) > 1}
    columns = [
        costs[part].message_s if part == behind else pairs[frozenset((part, behind))] for (part, _), (behind, _) in hops
    ]
    none = np.zeros_like(costs[places[0][0]].message_s)
    return np.stack(columns if is_ring else [*columns, none], axis=1)


def _with_chunks(kinds: PlanBatch, vp: int) -> PlanBatch:
    """Kinds with so many chunks a stage."""
    schedule = Schedule.INTERLEAVED if vp > 1 else Schedule.ONE_F_ONE_B
    return replace(kinds, vp=np.full_like(kinds.vp, vp), schedule=np.full_like(kinds.schedule, schedule.code))


def _transient_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Transients of a backward pass that no stage does without, as on the last one, where logits may hide them."""
    memory, last = problem.framework.memory, np.ones((len(batch), 1), dtype=np.bool_)
    if memory.fsdp2_states:
        return np.zeros(len(batch))
    blocks = StageBlocks(count={}, repeated={}, repeats_chunk=~last, chunks_alike=last[:, 0], is_last=last)
    return memory.reserved_factor * transient_bytes(problem, batch, blocks, np.zeros(len(batch)))[:, 0]


def _most_layers(problem: MixedProblem, form: Pipelines, costs: dict[int, KindCosts], chunks: int) -> Floats:
    """Layers that every stage holds at most, in so many chunks: shape (ways, stages)."""
    batch = next(iter(costs.values())).batch
    alive, num_layers = np.empty((len(batch), len(form.places), problem.model.num_layers + 1)), problem.model.num_layers
    for m in np.unique(batch.num_microbatches).tolist():
        alive[batch.num_microbatches == m] = _alive_layers(num_layers, len(form.places), chunks, m)
    columns = []
    for stage, (part, _) in enumerate(form.places):
        cost, spread = costs[part], problem.calibrations[part].memory_spread
        safe = problem.as_if(part, frozenset((part,))).capacity_bytes * np.exp(RISKY_Z * spread)
        stored = np.minimum(cost.stored_bytes[:, None], cost.kept_bytes)
        activation_bytes = np.where(cost.batch.recompute_num_layers[:, None] > 0, stored, cost.kept_bytes)
        live = np.minimum(batch.num_microbatches, len(form.places) - stage)
        free = safe - cost.fixed_bytes - live * cost.boundary_bytes - (stage == 0) * cost.embedding_bytes
        states = cost.state_bytes[:, None] * np.arange(num_layers + 1)[:, None]
        needed = (states + alive[:, stage, :, None] * activation_bytes[:, None]).min(axis=2)
        columns.append(np.maximum((needed <= free[:, None]).sum(axis=1) - 1, 0))
    return np.stack(columns, axis=1).astype(np.float64)


@lru_cache(maxsize=1024)
def _alive_layers(num_layers: int, pp: int, chunks: int, num_microbatches: int) -> Floats:
    """Layers, each once for every micro-batch alive in it, of stages that have 0, 1 and so on: shape (stages, numbers).

    Layers are spread evenly over the chunks of a stage (`MixedStage.with_layers`).
    """
    if chunks == 1 or num_microbatches % pp:
        return np.minimum(num_microbatches, np.arange(pp, 0, -1))[:, None] * np.arange(num_layers + 1.0)
    live = live_chunks(PipelineShape(Schedule.INTERLEAVED, pp, chunks, num_microbatches))
    sizes = np.array([even_chunks(number, chunks) for number in range(num_layers + 1)], dtype=np.float64)
    return np.asarray((live @ sizes.T).max(axis=1))
