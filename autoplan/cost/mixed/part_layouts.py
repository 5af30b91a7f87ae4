"""Costs of every stage of a mixed plan on its own part.

Kinds of replicas are laid out by `estimate`'s functions as if all of them sat on one part, a layout for each part; of
every layout the stages count that do sit there.  Arrays of a layout have the shape (rows, stages).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.collectives.end_of_step import end_of_step_s, optimizer_s
from autoplan.cost.collectives.pipeline_messages import message_s, tied_table
from autoplan.cost.estimate import Stages, lay_out
from autoplan.cost.memory.parameters import own_parameters
from autoplan.cost.mixed.collectives import Islands, links_between
from autoplan.cost.network.links import Links
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, ReplicaKind, as_parallel
from autoplan.spec.plan import PP_BEFORE_DP, PlanBatch
from autoplan.spec.problem import Problem

# What is known of every stage on its own part.
CELLS = (
    "forward_s",
    "backward_s",
    "reduce_s",
    "gather_s",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One kind of replica of one plan."""

    plan_at: int
    kind_at: int
    plan: MixedPlan
    kind: ReplicaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    """Kinds laid out as if on one part: a row for each of their tensor-parallel degrees there."""

    part: int
    problem: Problem
    laid: Stages
    member: Ints  # of every row
    on_part: Bools  # which stages sit on the part and have the row's degree: shape (rows, stages)

    def rows(self, stage: Ints) -> Ints:
        """The rows that hold the stage asked for of each member."""
        return np.flatnonzero(self.on_part[np.arange(len(self.member)), stage[self.member]])


def lay_out_kinds(
    problem: MixedProblem, used: frozenset[int], stages: int, members: Sequence[Member]
) -> Iterator[PartLayout]:
    """A layout for every part in use, of kinds that have as many stages."""
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
        on_part = [[(stage.part, stage.tp) == (part, tp) for stage in members[at].kind.stages] for at, tp in rows]
        yield PartLayout(
            part=part,
            problem=own,
            laid=lay_out(own, PlanBatch.of(plans, problem.model.num_layers), stages),
            member=np.array([at for at, _ in rows]),
            on_part=np.array(on_part),
        )


def _islands(problem: MixedProblem, used: frozenset[int], layout: PartLayout, members: Sequence[Member]) -> Islands:
    """The replicas that reduce every stage of a layout together: groups of shape (rows, stages)."""
    own, stages = layout.problem, layout.on_part.shape[1]
    is_apart = problem.is_apart(layout.part, used)
    members_of = [
        members[at].plan.num_inside(members[at].kind, stage) if is_apart else (members[at].plan.num_replicas, 1)
        for at in layout.member
        for stage in range(stages)
    ]
    level = problem.between(layout.part, used, problem.cluster.parts[layout.part].num_devices)
    # Ranks of a replica's stage, and those of other stages that stand before those of the next replica.
    batch = layout.laid.batch
    is_parted = (batch.rank_order == PP_BEFORE_DP) & (batch.cp == 1)
    step = batch.tp * batch.cp * np.where(is_parted, batch.pp, 1)
    return Islands(
        own=Links.of(own),
        between=links_between(level, own.calibration),
        span=step[:, None] * np.array([inside for inside, _ in members_of]).reshape(-1, stages),
        islands=np.array([islands for _, islands in members_of]).reshape(-1, stages),
    )


def _share_factors(layout: PartLayout, members: Sequence[Member]) -> Floats:
    """Sharded states that every row holds, relative to an even share."""
    shares = [(members[at].kind.state_share, members[at].plan.num_replicas) for at in layout.member]
    return np.array([1.0 if share is None else share * replicas for share, replicas in shares])


def _shared_terms(layout: PartLayout, member: Member) -> tuple[str, ...]:
    """The terms of memory that grow with a replica's share of states."""
    sharding = member.plan.common.sharding
    names = _SHARDED[sharding]
    accumulates = (
        not layout.problem.framework.network.zero2_reduces_every_microbatch and member.kind.num_microbatches > 1
    )
    return tuple(name for name in names if not (name == "gradients" and sharding == "zero2" and accumulates))


def _sharded_bytes(layout: PartLayout, members: Sequence[Member]) -> Floats:
    """Bytes of every stage that grow with the share of states, fragmentation included."""
    framework, terms = layout.problem.framework, layout.laid.memory.terms
    result = np.zeros_like(layout.laid.forward_s)
    for row, at in enumerate(layout.member):
        for name in _shared_terms(layout, members[at]):
            result[row] += framework.memory.reserved_factor * terms[name][row]
    return result


def memory_terms(layout: PartLayout, members: Sequence[Member], row: int) -> dict[str, Floats]:
    """The terms of memory of every stage of a row, with its share of states."""
    more, framework = float(_share_factors(layout, members)[row]) - 1.0, layout.problem.framework
    terms = {name: value[row] for name, value in layout.laid.memory.terms.items()}
    for name in _shared_terms(layout, members[layout.member[row]]):
        added = more * terms[name]
        terms |= {
            name: terms[name] + added,
            "fragmentation": terms["fragmentation"] + (framework.memory.reserved_factor - 1.0) * added,
        }
    return terms


def _chain(layout: PartLayout, members: Sequence[Member]) -> PlanBatch:
    """The stages of every row on its part as a pipeline of its own, so that strides are those of its replicas."""
    batch = layout.laid.batch
    kinds = [members[at].kind for at in layout.member]
    run = np.array([sum(stage.part == layout.part for stage in kind.stages) for kind in kinds])
    return replace(batch, dp_replicate=np.ones_like(run), dp_shard=np.array([kind.count for kind in kinds]), pp=run)


def stage_cells(
    problem: MixedProblem, used: frozenset[int], layout: PartLayout, members: Sequence[Member]
) -> dict[str, Floats]:
    """`CELLS` of every row and stage, but those of hops, as if all stages sat on the part of the layout."""
    own, laid, batch = layout.problem, layout.laid, layout.laid.batch
    overall, shape = own.calibration.overall, layout.on_part.shape
    end = end_of_step_s(own, batch, laid.blocks, laid.parameters, _islands(problem, used, layout, members))
    factor = _share_factors(layout, members)[:, None]
    sharded = _sharded_bytes(layout, members)
    memory = laid.memory.reserved_bytes + (factor - 1.0) * sharded
    return {
        "forward_s": overall * laid.forward_s,
        "backward_s": overall * laid.backward_s,
        "reduce_s": overall * end.reduce_s,
        "gather_s": overall * end.gather_s,
        "message_s": np.repeat(overall * message_s(own, _chain(layout, members))[:, None], shape[1], axis=1),
        "memory_bytes": memory,
        "sharded_bytes": factor * sharded,
        "oom_z": np.log(memory / own.capacity_bytes) / own.calibration.memory_spread,
    }


def update_s(layout: PartLayout, members: Sequence[Member]) -> Floats:
    """Time of the optimizer on the part, of every row."""
    laid, on_part = layout.laid, layout.on_part
    trained = laid.parameters.trained
    updated = _share_factors(layout, members)[:, None] * own_parameters(laid.batch, laid.parameters)
    most_updated, most_trained = (
        np.where(on_part, of, 0.0).max(axis=1) for of in (updated, trained.dense + trained.expert)
    )
    time = optimizer_s(layout.problem, laid.batch, most_updated, most_trained)
    return layout.problem.calibration.overall * time


def _crossings(plan: MixedPlan) -> dict[frozenset[int], int]:
    """Number of devices that send at once over the link that joins every two parts."""
    senders: dict[frozenset[int], int] = defaultdict(int)
    for kind in plan.kinds:
        hops = itertools.pairwise((*kind.stages, kind.stages[0]) if kind.vp > 1 else kind.stages)
        for stage, behind in hops:
            if stage.part != behind.part:
                ranks = kind.count * plan.common.cp * max(stage.tp, behind.tp)
                senders[frozenset((stage.part, behind.part))] += ranks
    return senders


def hops_s(
    problem: MixedProblem, layouts: Sequence[PartLayout], members: Sequence[Member], cells: dict[str, Floats]
) -> Floats:
    """One message from every stage to the next, as the slower of both ends sees it: shape (kinds, stages).

    The last one sends where stages have several chunks, to the first.
    """
    parts = np.array([[stage.part for stage in member.kind.stages] for member in members])
    behind = np.roll(np.arange(parts.shape[1]), -1)
    sends = np.array([[True] * (parts.shape[1] - 1) + [member.kind.vp > 1] for member in members])
    crosses = sends & (parts[:, behind] != parts)
    hops = np.where(sends & ~crosses, np.maximum(cells["message_s"][:, behind], cells["message_s"]), 0.0)
    senders = [_crossings(member.plan) for member in members]
    for layout in layouts:
        alike: dict[tuple[frozenset[int], int], list[tuple[int, int]]] = defaultdict(list)
        ends = crosses[layout.member] & (layout.on_part[:, behind] | layout.on_part)
        for row, hop in zip(*np.nonzero(ends), strict=True):
            at = layout.member[row]
            pair = frozenset((int(parts[at, hop]), int(parts[at, behind[hop]])))
            alike[pair, senders[at][pair]].append((row, hop))
        for (pair, count), stages in alike.items():
            rows, columns = np.array(stages).T
            calibration = layout.problem.calibration
            links = links_between(problem.between(layout.part, pair, count), calibration)
            message = calibration.overall * message_s(layout.problem, layout.laid.batch.take(rows), links)
            np.maximum.at(hops, (layout.member[rows], columns), message)
    return hops


def tied_s(problem: MixedProblem, layouts: Sequence[PartLayout], members: Sequence[Member]) -> Floats:
    """Reduction of the embedding's gradients between the first and the last stage of every kind."""
    result = np.zeros(len(members))
    stages = layouts[0].on_part.shape[1]
    if not problem.model.tied_embeddings or stages == 1:
        return result
    for layout in layouts:
        batch = _chain(layout, members)
        for row in np.flatnonzero(layout.on_part[:, 0] | layout.on_part[:, -1]):
            member, chain = members[layout.member[row]], batch.take(np.array([row]))
            ends = frozenset((member.kind.stages[0].part, member.kind.stages[-1].part))
            links = Links.of(layout.problem)
            if len(ends) > 1:
                level = problem.between(layout.part, ends, member.kind.count * int(chain.cp[0] * chain.tp[0]))
                links = links_between(level, layout.problem.calibration)
            time = tied_table(layout.problem, chain, stages).seconds(links)
            at = layout.member[row]
            result[at] = max(result[at], layout.problem.calibration.overall * float(time[0]))
    return result
