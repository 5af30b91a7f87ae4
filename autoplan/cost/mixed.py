"""What does a step cost whose replicas and stages sit on unlike devices?

Every stage is priced by `estimate`'s own functions in the problem in which all devices were those of its part
(`MixedProblem.as_if`); here the stages of a pipeline are put together, and the replicas of a step.  On one part the
answer is that of `estimate`.  Arrays of stages have the shape (kinds of replicas, stages).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.communication import Links
from autoplan.cost.compute import add_up
from autoplan.cost.estimate import NORMAL_90, STEP_TERMS, Stages, lay_out, message_s, spread_kinds, straggler_share
from autoplan.cost.estimate import work_terms as terms_of_work
from autoplan.cost.islands import Islands, links_between
from autoplan.cost.layer import groups
from autoplan.cost.memory import StageParameters, host_bytes
from autoplan.cost.schedule import hop_sends_exposed_s, one_forward_one_backward_s
from autoplan.cost.tail import (
    first_layers,
    own_parameters,
    reduction_s,
    shown_gather_s,
    shown_reduce_s,
    tied_table_bytes,
    update_s,
)
from autoplan.mixed import MixedPlan, MixedProblem, ReplicaKind, as_parallel, check_mixed
from autoplan.model import Block, ModelSpec
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.result import MixedCost, MixedKindCost, MixedStageCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# What is known of every stage on its own part.
_CELLS = (
    "forward_s",
    "backward_s",
    "reduce_s",
    "gather_s",
    "update_s",
    "message_s",
    "send_s",
    "memory_bytes",
    "sharded_bytes",
    "oom_z",
)
_SHARDED = {
    "none": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "weights"),
}
END = ("data_parallel_reduce", "optimizer", "parameter_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One kind of replica of one plan."""

    plan_at: int
    kind_at: int
    plan: MixedPlan
    kind: ReplicaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sheet:
    """Kinds laid out as if on one part: a row for each of their tensor-parallel degrees there."""

    part: int
    problem: Problem
    laid: Stages
    member: Ints  # of every row
    here: Bools  # which stages sit on the part and have the row's degree: shape (rows, stages)

    def rows(self, stage: Ints) -> Ints:
        """The rows that hold the stage asked for of each member."""
        return np.flatnonzero(self.here[np.arange(len(self.member)), stage[self.member]])


def layer_kinds(model: ModelSpec) -> tuple[tuple[Block, ...], ...]:
    """The different layers of a model, in the order in which they first appear."""
    return tuple(dict.fromkeys(model.layers))


def pipeline_s(
    forward_s: Floats, backward_s: Floats, send_s: Floats, num_microbatches: Ints
) -> tuple[Floats, Floats, Ints]:
    """(makespan without messages, exposed messages, critical stage) of 1F1B over stages and hops that differ.

    `send_s` is one message over every hop, shape (kinds, stages - 1).
    """
    ones = np.ones_like(num_microbatches)
    makespan, critical = one_forward_one_backward_s(forward_s, backward_s, num_microbatches, ones)
    return makespan, hop_sends_exposed_s(send_s, num_microbatches), critical


def estimate_mixed(problem: MixedProblem, plans: Sequence[MixedPlan]) -> tuple[MixedCost, ...]:
    """Step time and memory of every plan; one that does not fit is a result like any other.

    Raises InputError for a plan that does not belong to the problem, UnpricedError for one that is not priced.
    """
    alike: dict[tuple[frozenset[int], int], list[_Member]] = defaultdict(list)
    for plan_at, plan in enumerate(plans):
        check_mixed(problem, plan)
        for kind_at, kind in enumerate(plan.kinds):
            member = _Member(plan_at=plan_at, kind_at=kind_at, plan=plan, kind=kind)
            alike[plan.parts, len(kind.stages)].append(member)
    priced: dict[tuple[int, int], _KindPrice] = {}
    for (used, stages), members in alike.items():
        for member, price in zip(members, _price_kinds(problem, used, stages, members), strict=True):
            priced[member.plan_at, member.kind_at] = price
    return tuple(
        _step(problem, plan, [priced[at, kind] for kind in range(len(plan.kinds))]) for at, plan in enumerate(plans)
    )


# -- stages on their parts --------------------------------------------------------------------------------------------


def _sheets(problem: MixedProblem, used: frozenset[int], stages: int, members: Sequence[_Member]) -> Iterator[_Sheet]:
    for part in sorted(used):
        rows = [
            (at, tp)
            for at, member in enumerate(members)
            for tp in sorted({stage.tp for stage in member.kind.stages if stage.part == part})
        ]
        if not rows:
            continue
        own = problem.as_if(part, used)
        plans = [as_parallel(problem, members[at].plan, members[at].kind, tp) for at, tp in rows]
        here = [[(stage.part, stage.tp) == (part, tp) for stage in members[at].kind.stages] for at, tp in rows]
        yield _Sheet(
            part=part,
            problem=own,
            laid=lay_out(own, PlanBatch.of(plans, problem.model.num_layers), stages),
            member=np.array([at for at, _ in rows]),
            here=np.array(here),
        )


def _islands(problem: MixedProblem, used: frozenset[int], sheet: _Sheet, members: Sequence[_Member]) -> Islands:
    """The replicas that reduce every stage of a sheet together, one group for every row and stage."""
    own, stages = sheet.problem, sheet.here.shape[1]
    is_apart = problem.is_apart(sheet.part, used)
    held = [
        members[at].plan.num_inside(members[at].kind, stage) if is_apart else (members[at].plan.num_replicas, 1)
        for at in sheet.member
        for stage in range(stages)
    ]
    level = problem.between(sheet.part, used, problem.cluster.parts[sheet.part].num_devices)
    return Islands(
        own=Links.of(own),
        between=links_between(level, own.calibration),
        inside=np.array([inside for inside, _ in held]),
        islands=np.array([islands for _, islands in held]),
    )


def _share_factors(sheet: _Sheet, members: Sequence[_Member]) -> Floats:
    """By how much more of the sharded states than an even share every row holds."""
    shares = [(members[at].kind.state_share, members[at].plan.num_replicas) for at in sheet.member]
    return np.array([1.0 if share is None else share * replicas for share, replicas in shares])


def _sharded_bytes(sheet: _Sheet, members: Sequence[_Member]) -> Floats:
    """Of the memory of every stage, what grows with the share of states, fragmentation included."""
    framework, terms = sheet.problem.framework, sheet.laid.memory.terms
    result = np.zeros_like(sheet.laid.forward_s)
    for row, at in enumerate(sheet.member):
        for name in _SHARDED[members[at].plan.sharding]:
            keeps = name == "gradients" and members[at].plan.sharding == "zero2"
            if keeps and not framework.zero2_reduces_every_microbatch and members[at].kind.num_microbatches > 1:
                continue
            result[row] += framework.reserved_factor * terms[name][row]
    return result


def _chain(sheet: _Sheet, members: Sequence[_Member]) -> PlanBatch:
    """The stages of every row on its part as a pipeline of its own, so that strides are those of its replicas."""
    batch = sheet.laid.batch
    kinds = [members[at].kind for at in sheet.member]
    run = np.array([sum(stage.part == sheet.part for stage in kind.stages) for kind in kinds])
    return replace(batch, dp_shard=np.array([kind.count for kind in kinds]), pp=run)


def _stage_cells(
    problem: MixedProblem, used: frozenset[int], sheet: _Sheet, members: Sequence[_Member]
) -> dict[str, Floats]:
    """`_CELLS` of every row and stage, but those of hops, as if all stages sat on the part of the sheet."""
    own, laid, batch = sheet.problem, sheet.laid, sheet.laid.batch
    overall, shape = own.calibration.overall, sheet.here.shape
    reduce, gather = reduction_s(own, batch, laid.blocks, laid.parameters, _islands(problem, used, sheet, members))
    factor = _share_factors(sheet, members)[:, None]
    held = laid.parameters.dense + laid.parameters.expert
    sharded = _sharded_bytes(sheet, members)
    memory = laid.memory.reserved_bytes + (factor - 1.0) * sharded
    update = update_s(own, (factor * own_parameters(batch, laid.parameters)).ravel(), held.ravel()).reshape(shape)
    return {
        "forward_s": overall * laid.forward_s,
        "backward_s": overall * laid.backward_s,
        "reduce_s": overall * reduce,
        "gather_s": overall * gather,
        "update_s": overall * update,
        "message_s": np.repeat(overall * message_s(own, _chain(sheet, members))[:, None], shape[1], axis=1),
        "memory_bytes": memory,
        "sharded_bytes": factor * sharded,
        "oom_z": np.log(memory / own.capacity_bytes) / own.calibration.memory_spread,
    }


# -- from stages to pipelines -----------------------------------------------------------------------------------------


def _crossings(plan: MixedPlan) -> dict[frozenset[int], int]:
    """How many devices send at once over what joins every two parts."""
    senders: dict[frozenset[int], int] = defaultdict(int)
    for kind in plan.kinds:
        for stage, behind in zip(kind.stages, kind.stages[1:], strict=False):
            if stage.part != behind.part:
                senders[frozenset((stage.part, behind.part))] += kind.count * max(stage.tp, behind.tp)
    return senders


def _hops(
    problem: MixedProblem, sheets: Sequence[_Sheet], members: Sequence[_Member], cells: dict[str, Floats]
) -> Floats:
    """One message over every hop, as the slower of both ends sees it: shape (kinds, stages - 1)."""
    parts = np.array([[stage.part for stage in member.kind.stages] for member in members])
    crosses = parts[:, 1:] != parts[:, :-1]
    hops = np.where(crosses, 0.0, np.maximum(cells["message_s"][:, 1:], cells["message_s"][:, :-1]))
    senders = [_crossings(member.plan) for member in members]
    for sheet in sheets:
        alike: dict[tuple[frozenset[int], int], list[tuple[int, int]]] = defaultdict(list)
        ends = crosses[sheet.member] & (sheet.here[:, 1:] | sheet.here[:, :-1])
        for row, hop in zip(*np.nonzero(ends), strict=True):
            at = sheet.member[row]
            pair = frozenset(parts[at, hop : hop + 2].tolist())
            alike[pair, senders[at][pair]].append((row, hop))
        for (pair, count), found in alike.items():
            rows, columns = np.array(found).T
            calibration = sheet.problem.calibration
            links = links_between(problem.between(sheet.part, pair, count), calibration)
            message = calibration.overall * message_s(sheet.problem, sheet.laid.batch.take(rows), links)
            np.maximum.at(hops, (sheet.member[rows], columns), message)
    return hops


def _tied_s(problem: MixedProblem, sheets: Sequence[_Sheet], members: Sequence[_Member]) -> Floats:
    """Reduction of the embedding's gradients between the first and the last stage of every kind."""
    result = np.zeros(len(members))
    stages = sheets[0].here.shape[1]
    if not problem.model.tied_embeddings or stages == 1:
        return result
    for sheet in sheets:
        batch = _chain(sheet, members)
        for row in np.flatnonzero(sheet.here[:, 0] | sheet.here[:, -1]):
            member, one = members[sheet.member[row]], batch.take(np.array([row]))
            ends = frozenset((member.kind.stages[0].part, member.kind.stages[-1].part))
            stride, links = groups(one).pp[0] * (stages - 1), Links.of(sheet.problem)
            if len(ends) > 1:
                level = problem.between(sheet.part, ends, member.kind.count * int(one.tp[0]))
                links = links_between(level, sheet.problem.calibration)
            time = links.all_reduce_s(stride, np.array([2]), tied_table_bytes(sheet.problem, one))
            at = sheet.member[row]
            result[at] = max(result[at], sheet.problem.calibration.overall * float(time[0]))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _KindPrice:
    """One kind of replica: its stages, its time by term up to the last backward pass, and what the end adds."""

    cost: MixedKindCost
    terms_s: dict[str, float]
    end_s: dict[str, float]
    spread: float  # of log time
    oom_z: float


def _price_kinds(
    problem: MixedProblem, used: frozenset[int], stages: int, members: Sequence[_Member]
) -> list[_KindPrice]:
    sheets = list(_sheets(problem, used, stages, members))
    cells = {name: np.zeros((len(members), stages)) for name in _CELLS}
    for sheet in sheets:
        rows, columns = np.nonzero(sheet.here)
        for name, value in _stage_cells(problem, used, sheet, members).items():
            cells[name][sheet.member[rows], columns] = value[rows, columns]
    cells["send_s"][:, :-1] = _hops(problem, sheets, members, cells)
    counts = np.array([member.kind.num_microbatches for member in members])
    makespan, sends, critical = pipeline_s(cells["forward_s"], cells["backward_s"], cells["send_s"][:, :-1], counts)

    size = len(members)
    terms = {name: np.zeros(size) for name in STEP_TERMS}
    layer_s = np.zeros((size, stages, len(layer_kinds(problem.model))))
    spread, host_z = np.zeros(size), np.full(size, -np.inf)
    for sheet in sheets:
        own, laid, batch = sheet.problem, sheet.laid, sheet.laid.batch
        overall = own.calibration.overall
        at = sheet.rows(critical)
        for name, value in terms_of_work(laid, critical[sheet.member]).items():
            terms[name][sheet.member[at]] = overall * value[at]
        at = sheet.rows(np.zeros(size, dtype=np.int64))
        if len(at):
            first, who, layers = batch.take(at), sheet.member[at], first_layers(laid.blocks)[at]
            shown = shown_reduce_s(own, first, cells["backward_s"][who], layers, cells["reduce_s"][who])
            terms["data_parallel_reduce"][who] = shown
            shown = shown_gather_s(own, first, cells["forward_s"][who], layers, cells["gather_s"][who])
            terms["parameter_gather"][who] = shown
        rows, columns = np.nonzero(sheet.here)
        layer_s[sheet.member[rows], columns] = overall * _layer_s(own, laid)[rows]
        spreads = np.hypot(own.calibration.time_spreads, own.timings.match.spread)[spread_kinds(own, batch)]
        np.maximum.at(spread, sheet.member, spreads)
        np.maximum.at(host_z, sheet.member, _host_z(sheet))
    work = add_up(value for name, value in terms.items() if name not in END)
    terms["pipeline_bubble"] = np.maximum(makespan - work, 0.0)
    terms["pipeline_send"] = sends
    terms["data_parallel_reduce"] += _tied_s(problem, sheets, members)
    terms["optimizer"] = cells["update_s"].max(axis=1)
    oom_z = np.maximum(cells["oom_z"].max(axis=1), host_z)
    return [
        _KindPrice(
            cost=MixedKindCost(
                stages=_stage_costs(
                    problem, member.kind, {name: value[at] for name, value in cells.items()}, layer_s[at]
                ),
                pipeline_s=float(makespan[at] + sends[at]),
            ),
            terms_s={name: float(value[at]) for name, value in terms.items() if name not in END},
            end_s={name: float(terms[name][at]) for name in END},
            spread=float(spread[at]),
            oom_z=float(oom_z[at]),
        )
        for at, member in enumerate(members)
    ]


def _layer_s(problem: Problem, laid: Stages) -> Floats:
    """Both passes of one layer of each kind: shape (plans, 1, kinds of layers)."""
    repeats = laid.batch.recompute_num_layers > 0
    one = {
        block: cost.total_forward_s + cost.total_backward_s + np.where(repeats, cost.total_repeat_s, 0.0)
        for block, cost in laid.costs.items()
    }
    return np.stack([add_up(one[block] for block in layer) for layer in layer_kinds(problem.model)], axis=1)


def _host_z(sheet: _Sheet) -> Floats:
    """Of the hosts of the stages that sit on the part: how near they are to their capacity."""
    own, parameters = sheet.problem, sheet.laid.parameters
    here = StageParameters(
        dense=np.where(sheet.here, parameters.dense, 0.0),
        expert=np.where(sheet.here, parameters.expert, 0.0),
        ends=np.where(sheet.here, parameters.ends, 0.0),
    )
    needed = host_bytes(own, sheet.laid.batch, here)
    return np.log(needed / own.cluster.host.memory_bytes) / own.calibration.memory_spread


def _stage_costs(
    problem: MixedProblem, kind: ReplicaKind, cells: dict[str, Floats], layer_s: Floats
) -> tuple[MixedStageCost, ...]:
    shown = ("forward_s", "backward_s", "send_s", "memory_bytes", "sharded_bytes", "oom_z")
    return tuple(
        MixedStageCost(
            part=stage.part,
            tp=stage.tp,
            layers=stage.layers,
            layer_s=tuple(layer_s[at].tolist()),
            capacity_bytes=problem.as_if(stage.part, frozenset((stage.part,))).capacity_bytes,
            **{name: float(cells[name][at]) for name in shown},
        )
        for at, stage in enumerate(kind.stages)
    )


# -- from pipelines to a step -----------------------------------------------------------------------------------------


def _step(problem: MixedProblem, plan: MixedPlan, kinds: Sequence[_KindPrice]) -> MixedCost:
    """All replicas wait for the last pipeline, and for the slowest reduction, update and gather of any."""
    last = max(kinds, key=lambda kind: kind.cost.pipeline_s)
    terms = dict(last.terms_s)
    terms |= {name: max(kind.end_s[name] for kind in kinds) for name in END}
    overall = max(problem.calibrations[part].overall for part in plan.parts)
    terms["overhead"] = overall * problem.framework.step_overhead_s
    slower = float(straggler_share(np.array([plan.num_devices]))[0])
    terms["stragglers"] = slower * sum(value for name, value in terms.items() if name != "stragglers")
    terms = {name: terms[name] for name in STEP_TERMS}
    step_s = sum(terms.values())
    spread = float(np.exp(NORMAL_90 * max(kind.spread for kind in kinds)))
    return MixedCost(
        plan=plan,
        step_s=step_s,
        low_s=step_s / spread,
        high_s=step_s * spread,
        terms_s=terms,
        kinds=tuple(kind.cost for kind in kinds),
        oom_z=max(kind.oom_z for kind in kinds),
    )
