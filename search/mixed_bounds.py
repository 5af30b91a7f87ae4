"""Structures on a mixed cluster within the plain spaces of its parts, and lower bounds on their plans' times.

Costs and memory of a layer on a part come from `bounds`; the bounds here choose how many layers go where.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, distinct_rows
from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.kernels.arithmetic import count_parameters, count_trained_parameters
from autoplan.cost.memory.stage_memory import transient_bytes
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.cost.step import straggler_share
from autoplan.frameworks.common.rules import legal
from autoplan.search.bounds import KindCosts, kind_costs
from autoplan.search.cells import Cell, expert_degrees
from autoplan.search.layouts import chunk_counts, schedules_of
from autoplan.search.limits import Limits, divisors
from autoplan.search.mixed_pipeline_bounds import ROUNDING, PipelineBounds, Prices, Ways, both_passes_s
from autoplan.search.space import Space
from autoplan.search.structures import Equal, Pipelines, Structure, common_schedule, first_layers, lawful, pipelines
from autoplan.spec.axes import SEARCHED
from autoplan.spec.axis import MAX_DEGREE
from autoplan.spec.enums import NARROW_PRECISIONS, Schedule, Sharding
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.plan import PlanBatch, batch_arrays
from autoplan.spec.problem import Problem
from autoplan.topology.levels import Level

HALF_BYTES = 2  # of gradients and weights that are exchanged, unless these are quantised
QUANTIZED = ("quantized_gathers", "quantized_reductions")
SCHEDULES = tuple(Schedule)  # by their codes
FIRST_CHUNKS = 6  # limit on virtual stages of interleaved pipelines in the first round


class Rates(NamedTuple):
    """Rates of ways combined with other groups, without waits for the slowest device."""

    most: Floats  # upper bound on sequences per second of all replicas
    chunks: Ints  # virtual stages with which they do
    end_s: Floats  # lower bound on the end of a step


class Form(NamedTuple):
    """Equal pipelines and the degrees of their axes."""

    way: Pipelines
    cell: Cell


class Candidate(NamedTuple):
    """Combination of groups of parts, each forming pipelines in one of its ways, with a lower bound on its plans."""

    least_s: float
    groups: tuple[Ways, ...]
    rows: tuple[int, ...]

    @property
    def form_rows(self) -> tuple[tuple[tuple[int, ...], int, int, int, int], ...]:
        """Numbers that identify `form`: for every group its parts, form, virtual stages, schedule and micro-batch."""
        return tuple(
            (ways.parts, int(ways.form[at]), int(kinds.vp[at]), int(kinds.schedule[at]), int(kinds.micro_batch[at]))
            for ways, at in zip(self.groups, self.rows, strict=True)
            for kinds in [ways.kinds]
        )

    @property
    def schedule(self) -> Schedule:
        """Schedule of all pipelines (`MixedPlan.schedule`)."""
        rows = zip(self.groups, self.rows, strict=True)
        return common_schedule(SCHEDULES[ways.kinds.schedule[at]] for ways, at in rows)

    @property
    def form(self) -> tuple[tuple[Pipelines, int], ...]:
        """Pipelines and micro-batch size of every group."""
        return tuple(
            (replace(ways.forms[form], vp=vp, schedule=SCHEDULES[schedule]), micro_batch)
            for ways, (_, form, vp, schedule, micro_batch) in zip(self.groups, self.form_rows, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSpace:
    """Plans of a mixed cluster that are in the plain spaces of all of its parts, within the limits of `structures`."""

    problem: MixedProblem
    spaces: tuple[Space, ...]  # of every part alone
    global_batch: int
    equal: Equal
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
        words["sp"] = words["sp"][:1]  # all pipelines have it, or none
        if other_limits:  # the scheduler of samples takes all ranks for equally fast
            words["dynamic_cp"] = tuple(value for value in words["dynamic_cp"] if not value)
        recomputes = tuple(choice for choice in first.recomputes if not choice.startswith("full:"))
        return replace(first.where(**words), recomputes=recomputes or first.recomputes[:1])

    def forms(self, parts: Sequence[int]) -> list[Form]:
        """Return the forms of equal pipelines on a group of parts, with the degrees of their axes."""
        problem, limits, first, forms = self.problem, self.limits_of(parts), self.spaces[parts[0]], list[Form]()
        degrees = {
            part: [
                tp
                for tp in divisors(problem.cluster.parts[part].levels[-1].num_devices)
                if self.spaces[part].limits.admits("tp", tp)
            ]
            for part in parts
        }
        for cp in filter(lambda cp: limits.admits("cp", cp), divisors(problem.training.seq_len)):
            for way in pipelines(problem, parts, self.global_batch, degrees, cp):
                if not limits.admits("pp", len(way.places)) or (self.equal.tp and not way.has_one_tp):
                    continue
                tp = way.places[0][1]
                for ep, etp in expert_degrees(problem.model, first.limits, tp, way.count * cp * tp, 1):
                    if all(way.count * cp * degree % (ep * min(etp, degree)) == 0 for _, degree in way.places):
                        degrees_of = {"pp": len(way.places), "tp": tp, "cp": cp, "ep": ep, "etp": etp}
                        forms.append(Form(way, Cell(**degrees_of, dp_replicate=1, dp_shard=way.count)))
        return forms

    def ways(self, parts: Sequence[int], of_parts: Sequence[Form]) -> Ways | None:
        """Return the ways of a group of parts to form these pipelines, with their axes; None if there are none."""
        limits, first = self.limits_of(parts), self.spaces[parts[0]]
        by_shape: dict[tuple[int, int], list[Form]] = defaultdict(list)
        for way, cell in of_parts:
            # Replicas may have different numbers of micro-batches if these do not divide evenly.
            share, remainder = divmod(self.global_batch, way.count)
            batch = way.count * 2 ** (share.bit_length() - 1) if remainder else self.global_batch
            by_shape[batch, cell.pp * cell.tp * cell.cp * way.count].append(Form(way, cell))
        forms: list[Pipelines] = []
        batches, owners = [], []
        for (batch, num_devices), alike in by_shape.items():
            workload = replace(first.workload, num_devices=num_devices)
            space = replace(first, workload=workload, limits=replace(limits, global_batches=(batch,)))
            cells = [cell for _, cell in alike]
            kinds, of_group = space.kinds(cells, *(groups := space.groups(cells)))
            for rows, scheduled in self._scheduled(space, parts, kinds):
                owners.append((groups[1][of_group] + len(forms))[rows])
                batches.append(scheduled)
            forms += [way for way, _ in alike]
        if not owners:
            return None
        form, kinds = np.concatenate(owners), PlanBatch.concatenate(batches)
        # Sharded weights and gradients are exchanged only between replicas on whole parts (`check_mixed`).
        fills_one_part = np.array([self._fills_one_part(way) for way in forms])[form] & (kinds.cp == 1)
        rows = np.flatnonzero((kinds.sharding <= Sharding.ZERO1.code) | fills_one_part)
        if not len(rows):
            return None
        form, kinds = form[rows], kinds.take(rows)
        none, all_parts = np.zeros(len(form)), self.problem.cluster.parts
        on_parts = [[way.count * way.tp_on(part) for part in range(len(all_parts))] for way in forms]
        devices_on = np.array(on_parts)[form] * kinds.cp[:, None]
        return Ways(
            parts=tuple(parts),
            forms=tuple(forms),
            form=form,
            kinds=kinds,
            least_s=none,
            nodes=-(-devices_on // np.array([part.devices_per_node for part in all_parts])),
            num_devices=devices_on.sum(axis=1),
            most_rate=none,
        )

    def _fills_one_part(self, way: Pipelines) -> bool:
        (part, tp), *deeper = way.places
        return not deeper and way.count * tp == self.problem.cluster.parts[part].num_devices

    def describe(self) -> tuple[str, ...]:
        """Describe the limits of the parts, the common ones first."""
        of_parts = [space.limits.describe(self.problem.model) for space in self.spaces]
        return tuple(dict.fromkeys(limit for limits in of_parts for limit in limits))

    def structure(self, candidate: Candidate) -> Structure:
        """Return the structure of combined groups, all with the same axes."""
        plans = [ways.kinds.plan(at) for ways, at in zip(candidate.groups, candidate.rows, strict=True)]
        unbounded = MAX_DEGREE if self.problem.model.moe else 1
        etp = min((plan.etp for plan in plans if plan.etp < plan.tp), default=unbounded)
        forms, micro_batches = zip(*candidate.form, strict=True)
        if self.equal.replicas:
            forms = tuple(replace(form, vp=forms[0].vp, schedule=forms[0].schedule) for form in forms)
        common = replace(plans[0], sp=bool(self.spaces[0].limits.of("sp")[0]), etp=etp)
        return Structure(kinds=forms, micro_batches=micro_batches, common=common)

    def _scheduled(self, space: Space, parts: Sequence[int], kinds: PlanBatch) -> Iterator[tuple[Ints, PlanBatch]]:
        """Yield (indices of kinds, these with a schedule and virtual stages) for every schedule that is legal."""
        for pp, schedule in itertools.product(np.unique(kinds.pp).tolist(), Schedule):
            chunks = self.chunks(parts, pp, schedule)
            usual = [vp for vp in chunks if vp <= FIRST_CHUNKS] or chunks[:1]
            for vp in usual[-1:]:
                rows = np.flatnonzero(kinds.pp == pp)
                plans = _with_schedule(kinds.take(rows), schedule, vp, self.spaces[0].limits)
                rounds = plans.num_microbatches
                rounds = -(-rounds // pp) * pp if schedule == Schedule.INTERLEAVED else rounds
                layouts = (first_layers(self.problem, pp * vp),)
                tried = replace(plans, global_batch=rounds * plans.micro_batch * plans.dp, layouts=layouts)
                lawful = np.flatnonzero(legal(space.rules, space.workload, tried))
                yield rows[lawful], plans.take(lawful)

    def admits(self, plans: Sequence[MixedPlan]) -> Bools:
        """Return which plans obey the limits and their framework's rules, stage by stage."""
        return lawful(self.problem, self.spaces[0].rules, plans, [space.limits for space in self.spaces])

    def chunks(self, parts: Sequence[int], pp: int, schedule: Schedule) -> tuple[int, ...]:
        """Return the possible numbers of virtual stages of a schedule on this many stages, ascending."""
        limits, num_layers = self.limits_of(parts), self.problem.model.num_layers
        return tuple(
            vp
            for vp in chunk_counts(num_layers, pp)
            if pp * vp <= num_layers and limits.admits("vp", vp) and schedule in schedules_of(limits, pp, vp)
        )

    def bounded(self, ways: Ways, within_s: float = np.inf) -> Ways:
        """Return the ways whose plans may take less than `within_s`, with these bounds.

        Interleaved ways get the number of virtual stages with the smallest bound.
        """
        kinds, costs = ways.kinds, self._costs(ways, ways.kinds.dp_shard)
        prices, slower = Prices(costs, costs), 1.0 + straggler_share(ways.num_devices)
        rest_s = self.rest_s(ways, prices)
        # Interleaved pipelines run whole rounds of micro-batches.
        rounds = np.where(kinds.schedule == Schedule.INTERLEAVED.code, kinds.pp, 1)
        most_s = np.where(self.global_batch % (kinds.micro_batch * rounds) == 0, within_s / slower - rest_s, 0.0)
        m = -(-self.global_batch // (kinds.dp_shard * kinds.micro_batch))
        passes_s, chunks = self._passes_s(ways, m, prices, most_s)
        ways = replace(ways, kinds=replace(kinds, vp=chunks), least_s=slower * (rest_s + passes_s))
        return ways.take(np.flatnonzero(np.isfinite(passes_s)))

    def prices(self, ways: Ways, replicas: Ints) -> Prices:
        """Return lower bounds on the prices of ways in plans of this many replicas, which share the states evenly."""
        states = self._costs(ways, replicas)
        # Replicas with parameters in host memory read less each if they are more, all that gathers takes longer.
        rows = np.flatnonzero((ways.kinds.sharding > Sharding.ZERO1.code) | (ways.kinds.offload > 0))
        if not len(rows):
            return Prices(states, states)
        few = self._costs(ways.take(rows), ways.kinds.dp_shard[rows])
        return Prices({part: _shorter(few[part], cost, rows) for part, cost in states.items()}, states)

    def floor_s(self, ways: Ways, prices: Prices) -> Floats:
        """Return the time of a micro-batch if the stages of a pipeline shared its layers by their speed."""
        per_s, num_layers = np.zeros(len(ways.form)), self.problem.model.num_layers
        for part, cost in prices.costs.items():
            stages = np.array([sum(at == part for at, _ in form.places) for form in ways.forms])[ways.form]
            layer_s = self.problem.calibrations[part].overall * both_passes_s(cost).min(axis=1)
            per_s += stages / layer_s
        return num_layers / per_s

    def rates(self, ways: Ways, prices: Prices, within_s: float = np.inf, least: float = 0.0) -> Rates:
        """Return rates of every way in combined steps of `within_s` or less, 0 where they are below `least`.

        Rates grow with the micro-batches, whose number is bounded by `most_rate` in that time.
        """
        size = ways.kinds.dp_shard * ways.kinds.micro_batch
        m = -(-self.global_batch // size)
        if within_s < np.inf:
            m = np.clip((ways.most_rate * within_s / size + ROUNDING).astype(np.int64), 1, m)
        most_s = m * size / least if least > 0 else np.full(len(m), np.inf)
        passes_s, chunks = self._passes_s(ways, m, prices, most_s)
        return Rates(most=m * size / passes_s, chunks=chunks, end_s=self.rest_s(ways, prices))

    def exchange_s(self, groups: Sequence[Ways]) -> float:
        """Lower bound on the exchange of gradients and updated weights between groups on parts that are far apart."""
        problem, used = self.problem, frozenset(itertools.chain(*(ways.parts for ways in groups)))
        nodes = tuple(np.sum([ways.nodes.min(axis=0) for ways in groups], axis=0).tolist())
        is_quantized = any(own.limits.of(axis) != (False,) for own in self.spaces for axis in QUANTIZED)
        if is_quantized or len(used) > len(groups) or not all(problem.is_apart(part, nodes) for part in used):
            return 0.0
        model, training = problem.model, problem.training
        trained = count_parameters(model)
        if training.finetuning is not None:
            trained = count_trained_parameters(model, training.finetuning)
        element_bytes = HALF_BYTES + (1 if training.precision in NARROW_PRECISIONS else HALF_BYTES)
        sent_bytes = trained * element_bytes * (1 - 1 / len(groups))
        seconds = []
        for part in used:
            count, calibration = problem.cluster.parts[part].num_devices, problem.calibrations[part]
            rate = count * problem.between(part, nodes, count).bytes_per_s / calibration.scale_out
            seconds.append(min(calibration.overall, 1.0) * sent_bytes / rate)
        return max(seconds)

    def rest_s(self, ways: Ways, prices: Prices) -> Floats:
        """Time of the end of a step on the fastest part."""
        overall = min(self.problem.calibrations[part].overall for part in ways.parts)
        return overall * np.min([cost.times.rest_s for cost in prices.states.values()], axis=0)

    def _passes_s(self, ways: Ways, num_microbatches: Ints, prices: Prices, most_s: Floats) -> tuple[Floats, Ints]:
        """Return (lower bound on the passes of this many micro-batches, the virtual stages that attain it).

        It is infinite if it is above `most_s`.
        """
        time_s, chunks = np.full(len(ways.form), np.inf), ways.kinds.vp.copy()
        stages = np.array([len(form.places) for form in ways.forms])[ways.form]
        is_open = num_microbatches * self.floor_s(ways, prices) <= most_s
        for pp, code in itertools.product(np.unique(stages).tolist(), np.unique(ways.kinds.schedule).tolist()):
            rows = np.flatnonzero(is_open & (stages == pp) & (ways.kinds.schedule == code))
            if not len(rows):
                continue
            counts = self.chunks(ways.parts, pp, SCHEDULES[code])
            of_counts = PipelineBounds.of(self, ways.take(rows), prices.take(rows), counts).least_s(
                np.tile(num_microbatches[rows], len(counts))
            )
            of_counts = of_counts.reshape(len(counts), -1)
            time_s[rows], chunks[rows] = of_counts.min(axis=0), np.array(counts)[of_counts.argmin(axis=0)]
        return np.where(time_s <= most_s, time_s, np.inf), chunks

    def _costs(self, ways: Ways, replicas: Ints) -> dict[int, KindCosts]:
        """Return the prices of all ways on every part, if this many replicas share the states."""
        problem, kinds, costs, limits = self.problem, ways.kinds, {}, self.limits_of(ways.parts)
        for part in ways.parts:
            tp = np.array([dict(form.places)[part] for form in ways.forms])[ways.form]
            divides = (tp > 1) & (problem.training.seq_len // kinds.cp % tp == 0)
            etp = np.where(kinds.etp == kinds.tp, tp, kinds.etp)
            batch = replace(kinds, tp=tp, sp=divides & bool(limits.of("sp")[0]), etp=etp, dp_shard=replicas)
            batch = replace(batch, global_batch=kinds.global_batch // kinds.dp_shard * replicas)
            batch = _with_schedule(batch, Schedule.ONE_F_ONE_B, 1, limits)  # bounds of layers hold for all schedules
            columns = (getattr(batch, name) for name in batch_arrays())
            first, of_way = distinct_rows(*columns, *ways.nodes.T)
            batch = batch.take(first)
            costs[part] = self._costs_on(part, batch, ways.nodes[first]).take(of_way)
        return costs

    def _costs_on(self, part: int, batch: PlanBatch, nodes: Ints) -> KindCosts:
        """Return the prices of kinds on a part, of plans on these nodes."""
        by_levels: dict[tuple[Level, ...], tuple[Problem, list[Ints]]] = {}
        used, of_kind = np.unique(nodes, axis=0, return_inverse=True)
        for at, of_plan in enumerate(used.tolist()):
            as_if = self.problem.as_if(part, tuple(of_plan))
            *inner, last = as_if.topology.levels
            levels = (*inner, replace(last, num_devices=0))  # which joins all devices, however many
            by_levels.setdefault(levels, (as_if, []))[1].append(np.flatnonzero(of_kind.ravel() == at))
        overall, priced, order = self.problem.calibrations[part].overall, [], []
        for as_if, rows in by_levels.values():
            order.append(np.concatenate(rows))
            own = batch.take(order[-1])
            # Messages between neighbours on one part, for the fewest replicas.
            near = replace(own, pp=np.minimum(own.pp, 2), dp_shard=np.ones_like(own.pp))
            costs = kind_costs(as_if, own)
            times = replace(costs.times, message_s=overall * message_s(as_if, near))
            fixed_bytes = costs.memory.fixed_bytes + _transient_bytes(as_if, own)
            priced.append(replace(costs, times=times, memory=replace(costs.memory, fixed_bytes=fixed_bytes)))
        return KindCosts.concatenate(priced).take(np.argsort(np.concatenate(order)))


def _shorter(few: KindCosts, many: KindCosts, rows: Ints) -> KindCosts:
    """Return the prices of `many` replicas, at some rows with the layers' times of `few` where these are shorter."""
    layer_s, forward_s, of_rows = many.times.layer_s.copy(), many.times.forward_s.copy(), many.times.take(rows)
    layer_s[rows] = np.minimum(few.times.layer_s, of_rows.layer_s)
    share = np.maximum(few.times.forward_s / few.times.layer_s, of_rows.forward_s / of_rows.layer_s)
    forward_s[rows] = share * layer_s[rows]
    return replace(many, times=replace(many.times, layer_s=layer_s, forward_s=forward_s))


def _with_schedule(kinds: PlanBatch, schedule: Schedule, vp: int, limits: Limits) -> PlanBatch:
    """Return kinds with a schedule and this many chunks per stage."""
    schedules = np.full_like(kinds.schedule, schedule.code)
    return limits.without_overlap(replace(kinds, vp=np.full_like(kinds.vp, vp), schedule=schedules))


def _transient_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Lower bound on any stage's backward transients: those of the last stage, where logits may cover them."""
    memory, last = problem.framework.memory, np.ones((len(batch), 1), dtype=np.bool_)
    if memory.fsdp2_states:
        return np.zeros(len(batch))
    blocks = StageBlocks(count={}, repeated={}, repeats_chunk=~last, chunks_alike=last[:, 0], is_last=last)
    return memory.reserved_factor * transient_bytes(problem, batch, blocks, np.zeros(len(batch)))[:, 0]
