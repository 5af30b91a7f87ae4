"""Price of a step whose replicas and stages sit on unlike devices.

Every stage is priced by `estimate`'s own functions in the problem in which all devices were those of its part
(`MixedProblem.as_if`); here the stages of a pipeline are put together, and the replicas of a step.  On one part the
answer is that of `estimate`.  Arrays of stages have the shape (kinds of replicas, stages).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.collectives.end_of_step import FirstStage, shown_gather_s, shown_reduce_s
from autoplan.cost.estimate import NORMAL_90, Stages, straggler_share, work_terms
from autoplan.cost.memory.stage_memory import host_bytes
from autoplan.cost.mixed.part_layouts import (
    CELLS,
    Member,
    PartLayout,
    hops_s,
    lay_out_kinds,
    stage_cells,
    tied_s,
    update_s,
)
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import (
    Makespan,
    hop_sends_exposed_s,
    one_forward_one_backward_s,
    send_exposed_s,
)
from autoplan.cost.spreads import Familiarity
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, ReplicaKind, check_mixed
from autoplan.spec.mixed_result import MixedCost, MixedKindCost, MixedStageCost
from autoplan.spec.problem import Problem
from autoplan.spec.terms import STEP_TERMS, UPDATE_TERMS

SHOWN = ("forward_s", "backward_s", "send_s", "memory_bytes", "sharded_bytes", "oom_z")  # of every stage, in a result


class StageTimes(NamedTuple):
    """One micro-batch on the stages of replicas, and a message from each to the next: shape (kinds, stages)."""

    forward_s: Floats
    backward_s: Floats
    send_s: Floats

    @classmethod
    def of(cls, price: MixedKindCost) -> StageTimes:
        """Return the times of the stages of one kind of replica."""
        return cls(*(np.array([[getattr(stage, name) for stage in price.stages]]) for name in cls._fields))


def pipeline_s(times: StageTimes, num_microbatches: Ints, vp: Ints, *, overlaps: bool) -> Makespan:
    """Makespan of 1F1B, plain or interleaved, over stages and hops that differ.

    In interleaved pipelines all messages count as the slowest, which holds up the others.
    """
    forward_s, backward_s, send_s = (np.broadcast_to(times_s, (len(vp), times_s.shape[1])) for times_s in times)
    m, chunks = num_microbatches[:, None], vp[:, None]
    interleaved = send_exposed_s(
        send_s.max(axis=1, keepdims=True),
        np.full_like(chunks, forward_s.shape[1]),
        m,
        chunks,
        Pass(forward_s / chunks, backward_s / chunks),
        overlaps=overlaps,
    )
    by_stage = np.where(chunks > 1, interleaved, hop_sends_exposed_s(send_s[:, :-1], num_microbatches)[:, None])
    return one_forward_one_backward_s(forward_s, backward_s, num_microbatches, vp, by_stage)


def estimate_mixed(problem: MixedProblem, plans: Sequence[MixedPlan]) -> tuple[MixedCost, ...]:
    """Step time and memory of every plan; one that does not fit is a result like any other.

    Raises InputError for a plan that does not belong to the problem, UnpricedError for one that is not priced.
    """
    alike: dict[tuple[frozenset[int], int], list[Member]] = defaultdict(list)
    for plan_at, plan in enumerate(plans):
        check_mixed(problem, plan)
        for kind_at, kind in enumerate(plan.kinds):
            member = Member(plan_at=plan_at, kind_at=kind_at, plan=plan, kind=kind)
            alike[plan.parts, len(kind.stages)].append(member)
    priced: dict[tuple[int, int], _KindPrice] = {}
    for (used, stages), members in alike.items():
        for member, price in zip(members, _price_kinds(problem, used, stages, members), strict=True):
            priced[member.plan_at, member.kind_at] = price
    return tuple(
        _step(problem, plan, [priced[at, kind] for kind in range(len(plan.kinds))]) for at, plan in enumerate(plans)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _KindPrice:
    """One kind of replica: its stages, its time by term up to the last backward pass, and what the end adds."""

    cost: MixedKindCost
    terms_s: dict[str, float]
    end_s: dict[str, float]
    familiarity: Familiarity  # of its least known stages
    oom_z: float


def _price_kinds(
    problem: MixedProblem, used: frozenset[int], stages: int, members: Sequence[Member]
) -> list[_KindPrice]:
    layouts = list(lay_out_kinds(problem, used, stages, members))
    cells = {name: np.zeros((len(members), stages)) for name in CELLS}
    for layout in layouts:
        rows, columns = np.nonzero(layout.on_part)
        for name, value in stage_cells(problem, used, layout, members).items():
            cells[name][layout.member[rows], columns] = value[rows, columns]
    cells["send_s"] = hops_s(problem, layouts, members, cells)
    counts, vp = np.array([(member.kind.num_microbatches, member.kind.vp) for member in members]).T
    times, overlaps = StageTimes(*(cells[name] for name in StageTimes._fields)), problem.framework.overlap.p2p_overlap
    makespan, sends, critical = pipeline_s(times, counts, vp, overlaps=overlaps)

    # What needs the laid-out batch of a part rather than one number for every stage.
    terms = {name: np.zeros(len(members)) for name in STEP_TERMS}
    layer_s = np.zeros((len(members), stages, len(problem.model.layer_kinds)))
    host_z = np.full(len(members), -np.inf)
    familiarity = Familiarity.full(len(members))
    for layout in layouts:
        own = layout.problem
        for priced in (_work_terms(layout, critical), _shown_terms(layout, cells)):
            for name, (who, value) in priced.items():
                terms[name][who] = value
        rows, columns = np.nonzero(layout.on_part)
        layer_s[layout.member[rows], columns] = own.calibration.overall * _layer_s(own, layout.laid)[rows]
        familiarity.lessen(layout.member, Familiarity.of(own, layout.laid.batch))
        np.maximum.at(host_z, layout.member, _host_z(layout))
        np.maximum.at(terms["optimizer"], layout.member, update_s(layout, members))
    work = add_up(value for name, value in terms.items() if name not in UPDATE_TERMS)
    terms["pipeline_bubble"] = np.maximum(makespan - work, 0.0)
    terms["pipeline_send"] = sends
    terms["data_parallel_reduce"] += tied_s(problem, layouts, members)
    oom_z = np.maximum(cells["oom_z"].max(axis=1), host_z)
    return [
        _KindPrice(
            cost=MixedKindCost(
                stages=_stage_costs(problem, member.kind, {name: cells[name][at] for name in SHOWN}, layer_s[at]),
                pipeline_s=float(makespan[at] + sends[at]),
            ),
            terms_s={name: float(value[at]) for name, value in terms.items() if name not in UPDATE_TERMS},
            end_s={name: float(terms[name][at]) for name in UPDATE_TERMS},
            familiarity=familiarity.take(slice(at, at + 1)),
            oom_z=float(oom_z[at]),
        )
        for at, member in enumerate(members)
    ]


# Of some members, by term: (which, seconds).
_SomeTerms = dict[str, tuple[Ints, Floats]]


def _work_terms(layout: PartLayout, critical: Ints) -> _SomeTerms:
    """The work of the critical stage, of members that have it on this part."""
    rows, overall = layout.rows(critical), layout.problem.calibration.overall
    terms = work_terms(layout.laid, critical[layout.member])
    return {name: (layout.member[rows], overall * value[rows]) for name, value in terms.items()}


def _shown_terms(layout: PartLayout, cells: dict[str, Floats]) -> _SomeTerms:
    """Exposed reductions and gathers of members whose first stage, which hides least, is on this part."""
    own, rows = layout.problem, layout.rows(np.zeros(len(cells["forward_s"]), dtype=np.int64))
    who, batch = layout.member[rows], layout.laid.batch.take(rows)
    first = FirstStage.of(layout.laid.blocks, layout.laid.parameters).take(rows)
    return {
        "data_parallel_reduce": (
            who,
            shown_reduce_s(own, batch, cells["backward_s"][who], first, cells["reduce_s"][who]),
        ),
        "parameter_gather": (
            who,
            shown_gather_s(own, batch, cells["forward_s"][who], first, cells["gather_s"][who]),
        ),
    }


def _layer_s(problem: Problem, laid: Stages) -> Floats:
    """Both passes of one layer of each kind: shape (plans, 1, kinds of layers)."""
    repeats = laid.batch.recompute_num_layers > 0
    of_block = {
        block: cost.total_forward_s + cost.total_backward_s + np.where(repeats, cost.total_repeat_s, 0.0)
        for block, cost in laid.costs.blocks.items()
    }
    return np.stack([add_up(of_block[block] for block in layer) for layer in problem.model.layer_kinds], axis=1)


def _host_z(layout: PartLayout) -> Floats:
    """Standard score of the host memory that the stages on the part need, against its capacity."""
    own = layout.problem
    needed = host_bytes(own, layout.laid.batch, layout.laid.parameters.of(layout.on_part))
    return np.log(needed / own.cluster.host.memory_bytes) / own.calibration.memory_spread


def _stage_costs(
    problem: MixedProblem, kind: ReplicaKind, cells: dict[str, Floats], layer_s: Floats
) -> tuple[MixedStageCost, ...]:
    return tuple(
        MixedStageCost(
            part=stage.part,
            tp=stage.tp,
            layers=stage.layers,
            layer_s=tuple(layer_s[at].tolist()),
            capacity_bytes=problem.as_if(stage.part, frozenset((stage.part,))).capacity_bytes,
            **{name: float(value[at]) for name, value in cells.items()},
        )
        for at, stage in enumerate(kind.stages)
    )


# -- from pipelines to a step -----------------------------------------------------------------------------------------


def _step(problem: MixedProblem, plan: MixedPlan, kinds: Sequence[_KindPrice]) -> MixedCost:
    """All replicas wait for the last pipeline, and for the slowest reduction, update and gather of any."""
    last = max(kinds, key=lambda kind: kind.cost.pipeline_s)
    terms = dict(last.terms_s)
    terms |= {name: max(kind.end_s[name] for kind in kinds) for name in UPDATE_TERMS}
    overall = max(problem.calibrations[part].overall for part in plan.parts)
    terms["overhead"] = overall * problem.framework.host.step_overhead_s
    slower = float(straggler_share(np.array([plan.num_devices]))[0])
    terms["stragglers"] = slower * sum(value for name, value in terms.items() if name != "stragglers")
    terms = {name: terms[name] for name in STEP_TERMS}
    step_s = sum(terms.values())
    familiarity = Familiarity.full(1)
    for kind in kinds:
        familiarity.lessen(np.zeros(1, dtype=np.int64), kind.familiarity)
    arrays = {name: np.array([value]) for name, value in terms.items()}
    spread = familiarity.sides(arrays, np.array([step_s]))
    return MixedCost(
        plan=plan,
        step_s=step_s,
        low_s=step_s * float(np.exp(-NORMAL_90 * spread.below[0])),
        high_s=step_s * float(np.exp(NORMAL_90 * spread.above[0])),
        terms_s=terms,
        kinds=tuple(kind.cost for kind in kinds),
        oom_z=max(kind.oom_z for kind in kinds),
    )
