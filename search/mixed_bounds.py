"""Structures of a mixed cluster that the plain spaces of its parts admit, and times that no plan of them beats.

What a layer costs and keeps on a part are the prices of `bounds`; a bound chooses how many layers lie where.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows
from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import send_exposed_s
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

FIRST_CHUNKS = 6  # virtual stages of interleaved pipelines at most, at first
BISECTIONS = 12
WIDEST = 64.0  # times the work of stages that are all as long, in which any layers are done
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
    # The same in groups beside others, which share the sharded states: sequences that all replicas do in a second.
    most_rate: Floats


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
        none = np.zeros(len(form))
        ways = Ways(parts=tuple(parts), forms=tuple(forms), form=form, kinds=kinds, least_s=none, most_rate=none)
        return self._bounded(ways, limits)

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
        etp = min((plan.etp for plan in plans if plan.etp < plan.tp), default=MAX_DEGREE)
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

    def _bounded(self, ways: Ways, limits: Limits) -> Ways:
        """The ways with their bounds: alone, and beside other groups, whose replicas share the sharded states."""
        num_parts, replicas = len(self.spaces), np.full(len(ways.form), self.problem.cluster.num_devices)
        alone, beside = (self._costs(ways, limits, number) for number in (ways.kinds.dp_shard, replicas))
        least_s, most_rate = np.full(len(ways.form), np.inf), np.zeros(len(ways.form))
        overall = min(self.problem.calibrations[part].overall for part in ways.parts)
        for (at, form), is_plain in itertools.product(enumerate(ways.forms), (True, False)):
            rows = np.flatnonzero((ways.form == at) & ((ways.kinds.vp == 1) == is_plain))
            if not len(rows):
                continue
            chunks = 1 if is_plain else max(self.chunks(ways.parts, len(form.places)))
            size = form.count * ways.kinds.micro_batch[rows]
            m = -(-self.global_batch // size)
            num_devices = form.count * int(ways.kinds.cp[rows[0]]) * sum(tp for _, tp in form.places)
            slower = 1.0 + straggler_share(np.array([num_devices]))
            costs = {part: cost.take(rows) for part, cost in alone.items()}
            if len(ways.parts) > 1:  # plans of one part alone are those of its own space
                rest_s = overall * np.min([cost.rest_s for cost in costs.values()], axis=0)
                time_s = slower * (rest_s + _Pipeline.of(self.problem, form, costs, costs, chunks).least_s(m))
                # Interleaved pipelines work in whole rounds of micro-batches.
                in_rounds = self.global_batch % (ways.kinds.micro_batch[rows] * len(form.places)) == 0
                least_s[rows] = np.where(is_plain | in_rounds, time_s, np.inf)
            if len(ways.parts) < num_parts:
                shared = {part: cost.take(rows) for part, cost in beside.items()}
                most_rate[rows] = (
                    m * size / (slower * _Pipeline.of(self.problem, form, costs, shared, chunks).least_s(m))
                )
        return replace(ways, least_s=least_s, most_rate=most_rate)

    def _costs(self, ways: Ways, limits: Limits, replicas: Ints) -> dict[int, KindCosts]:
        """Return the prices of all ways on every part, if so many replicas share the states."""
        problem, kinds, costs = self.problem, ways.kinds, {}
        for part in ways.parts:
            tp = np.array([dict(form.places)[part] for form in ways.forms])[ways.form]
            divides = (tp > 1) & (problem.training.seq_len // kinds.cp % tp == 0)
            etp = np.where(kinds.etp == kinds.tp, tp, kinds.etp)
            batch = replace(kinds, tp=tp, sp=divides & limits.sequence_parallel, etp=etp, dp_shard=replicas)
            batch = replace(batch, global_batch=kinds.global_batch // kinds.dp_shard * replicas)
            as_if, overall = problem.as_if(part, frozenset(ways.parts)), problem.calibrations[part].overall
            # Of a pipeline, neighbours on one part at best.
            sent_s = overall * message_s(as_if, replace(batch, pp=np.minimum(batch.pp, 2)))
            costs[part] = replace(kind_costs(as_if, batch), message_s=sent_s)
        return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline(Rows):
    """Pipelines of one form: times of the layers on every stage, by sort of layer: shape (ways, stages, sorts)."""

    layer_s: Floats
    most_layers: Floats  # that a stage holds: shape (ways, stages)
    head_s: Floats  # on the last stage
    message_s: Floats
    counts: tuple[int, ...]  # layers of each sort
    chunks: int  # of a stage at most: one, or several
    overlaps: bool  # messages of interleaved pipelines

    @classmethod
    def of(
        cls,
        problem: MixedProblem,
        form: Pipelines,
        costs: dict[int, KindCosts],
        states: dict[int, KindCosts],
        chunks: int,
    ) -> _Pipeline:
        """Return the pipelines of all ways with one form, with the states of `states`."""
        overall = [calibration.overall for calibration in problem.calibrations]
        passes = {
            part: overall[part]
            * (cost.layer_s + (cost.batch.recompute_num_layers == ALL_LAYERS)[:, None] * cost.repeat_s)
            for part, cost in costs.items()
        }
        last, model = form.places[-1][0], problem.model
        return cls(
            layer_s=np.stack([passes[part] for part, _ in form.places], axis=1),
            most_layers=_most_layers(problem, form, states),
            head_s=overall[last] * costs[last].head_s,
            message_s=np.min([cost.message_s for cost in costs.values()], axis=0),
            counts=tuple(model.layers.count(layer) for layer in model.layer_kinds),
            chunks=chunks,
            overlaps=problem.framework.overlap.p2p_overlap,
        )

    def least_s(self, m: Ints) -> Floats:
        """Time that `m` micro-batches take at least, whichever stage has which layers; infinite where none fit."""
        stages, num_layers = self.layer_s.shape[1], sum(self.counts)
        columns = np.column_stack([m, self.head_s, self.most_layers, self.layer_s.reshape(len(m), -1)])
        _, first, alike = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        distinct = self.take(first)
        work_s = distinct._work_s(m[first])[alike.reshape(-1)]
        # Several chunks are two at least.
        pp, chunks = np.full_like(m, stages), np.full_like(m, min(self.chunks, 2))
        passes = Pass(self.message_s, self.message_s)
        sends_s = send_exposed_s(self.message_s, pp, m, chunks, passes, overlaps=self.overlaps)
        fits = (self.most_layers.sum(axis=1) >= num_layers) & (self.most_layers.min(axis=1) >= 1)
        return np.where(fits, work_s + sends_s, np.inf)

    def _work_s(self, m: Ints) -> Floats:
        """Time in which no stage has more whole layers than its path (`one_forward_one_backward_s`) and memory allow.

        The path of a stage is its own work, all before it, and what its warm-up and its cool-down leave of the work
        behind it: the work of all stages once at least, which is least where those that are fast have what they can.
        """
        leanest_s = self.layer_s.min(axis=2)
        stages, num_layers = leanest_s.shape[1], sum(self.counts)
        order = np.argsort(leanest_s[0], kind="stable")
        warmup = np.arange(stages)[::-1]
        covering = np.minimum(m[:, None] - 1, warmup)
        # With fewer micro-batches than warm up there is one gap, at least the mean of both.
        factor = m[:, None] - (1.0 + np.where(covering < warmup, 0.5, 1.0) * covering) / self.chunks
        head_s = np.where(np.arange(stages) == stages - 1, self.head_s[:, None], 0.0)

        def layers_within(free_s: Floats) -> Floats:
            return np.minimum(np.floor(np.maximum(free_s - head_s, 0.0) / leanest_s + ROUNDING), self.most_layers)

        low = m * num_layers / (1.0 / leanest_s).sum(axis=1)
        high = WIDEST * (low + m * self.head_s)
        for _ in range(BISECTIONS):
            middle = np.sqrt(low * high)
            most_layers = layers_within(middle[:, None] / m[:, None])[:, order]
            placed = np.diff(np.minimum(np.cumsum(most_layers, axis=1), num_layers), axis=1, prepend=0.0)
            once_s = ((placed * leanest_s[:, order]).sum(axis=1) + self.head_s) / self.chunks
            layers = layers_within((middle - once_s)[:, None] / np.maximum(factor, LEAST_FACTOR))
            enough = (most_layers.sum(axis=1) >= num_layers) & (layers.sum(axis=1) >= num_layers)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return low


def _with_chunks(kinds: PlanBatch, vp: int) -> PlanBatch:
    """Kinds with so many chunks a stage."""
    schedule = Schedule.INTERLEAVED if vp > 1 else Schedule.ONE_F_ONE_B
    return replace(kinds, vp=np.full_like(kinds.vp, vp), schedule=np.full_like(kinds.schedule, schedule.code))


def _most_layers(problem: MixedProblem, form: Pipelines, costs: dict[int, KindCosts]) -> Floats:
    """Layers that every stage holds at most: shape (ways, stages)."""
    columns = []
    for stage, (part, _) in enumerate(form.places):
        cost, spread = costs[part], problem.calibrations[part].memory_spread
        safe = problem.as_if(part, frozenset((part,))).capacity_bytes * np.exp(RISKY_Z * spread)
        live = np.minimum(cost.batch.num_microbatches, len(form.places) - stage)
        stored = np.minimum(cost.stored_bytes[:, None], cost.kept_bytes)
        activation_bytes = np.where(cost.batch.recompute_num_layers[:, None] > 0, stored, cost.kept_bytes)
        of_layer = (cost.state_bytes + live[:, None] * activation_bytes).min(axis=1)
        free = safe - cost.fixed_bytes - live * cost.boundary_bytes - (stage == 0) * cost.embedding_bytes
        columns.append(np.floor(free / of_layer))
    return np.clip(np.stack(columns, axis=1), 0, problem.model.num_layers)
