"""Layouts of mixed pipelines, with every stage on its own part.

Every part gets a layout of the replica kinds as if all their stages were there, of which only the stages on that part
are used.  Arrays of a layout have the shape (rows, stages).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, add_up
from autoplan.cost.collectives.pipeline_messages import message_s, tied_table
from autoplan.cost.memory.stage_memory import StageMemory
from autoplan.cost.mixed.collectives import Islands, links_between
from autoplan.cost.network.links import Links
from autoplan.cost.stages import lay_out
from autoplan.cost.step import LaidOutPipelines, PartLayout, over_stages
from autoplan.spec.enums import Sharding
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, Nodes, ReplicaKind, as_parallel, only_on
from autoplan.spec.plan import PP_BEFORE_DP, PlanBatch
from autoplan.spec.problem import Problem

# Memory terms that replicas share, and the lowest sharding that shares each.
_SHARED = {"optimizer": Sharding.ZERO1, "gradients": Sharding.ZERO2, "weights": Sharding.ZERO3}


class Member(NamedTuple):
    """A replica kind of a plan."""

    plan: MixedPlan
    kind: ReplicaKind


def lay_out_kinds(problem: MixedProblem, nodes: Nodes, members: Sequence[Member]) -> LaidOutPipelines:
    """Lay out kinds with the same number of stages, of plans on these nodes."""
    layouts = {}
    for part in range(len(nodes)):
        rows = [
            (at, tp)
            for at, member in enumerate(members)
            for tp in sorted({stage.tp for stage in member.kind.stages if stage.part == part})
        ]
        if rows:
            layouts[part] = _lay_out(problem, nodes, part, rows, members)
    firsts = [(layout, np.flatnonzero(_on_part(layout)[:, 0])) for layout in layouts.values()]
    batch = PlanBatch.concatenate(layout.laid.batch.take(rows) for layout, rows in firsts)
    batch = batch.take(np.argsort(np.concatenate([layout.pipeline[rows] for layout, rows in firsts])))
    hop_s, tied_s = _hops_s(problem, nodes, layouts, members), _tied_s(problem, nodes, layouts, members)
    return LaidOutPipelines.of(list(layouts.values()), batch, hop_s, tied_s)


def _lay_out(
    problem: MixedProblem, nodes: Nodes, part: int, rows: Sequence[tuple[int, int]], members: Sequence[Member]
) -> PartLayout:
    """Lay out kinds on a part; `rows` are (index of the kind, tensor-parallel degree)."""
    own = problem.as_if(part, nodes)
    plans = [as_parallel(problem, members[at].plan, members[at].kind, tp) for at, tp in rows]
    on_part = np.array([[(stage.part, stage.tp) == (part, tp) for stage in members[at].kind.stages] for at, tp in rows])
    laid = lay_out(own, own.batch(plans), on_part.shape[1])
    shares = [(members[at].kind.state_share, members[at].plan.num_replicas) for at, _ in rows]
    factor = np.array([1.0 if share is None else share * replicas for share, replicas in shares])
    shared = _shared_bytes(own, laid.batch, laid.memory)
    more = {name: (factor - 1.0)[:, None] * value for name, value in shared.items()}
    return PartLayout(
        problem=own,
        laid=replace(laid, memory=_with_more(laid.memory, more, own.framework.memory.reserved_factor)),
        links=_islands(problem, nodes, part, laid.batch, [members[at] for at, _ in rows]),
        pipeline=np.array([at for at, _ in rows]),
        on_part=on_part,
        share_factor=factor,
    )


def _islands(problem: MixedProblem, nodes: Nodes, part: int, batch: PlanBatch, members: Sequence[Member]) -> Islands:
    """Return collectives between the replicas that reduce each stage together: groups of shape (rows, stages)."""
    is_apart, own = problem.is_apart(part, nodes), problem.as_if(part, nodes)
    groups = np.array(
        [plan.num_inside(kind) if is_apart else [(plan.num_replicas, 1)] * len(kind.stages) for plan, kind in members]
    )
    level = problem.between(part, nodes, nodes[part] * problem.cluster.parts[part].devices_per_node)
    # Number of ranks between the same stages of neighbouring replicas: those of the stage, and of other stages in
    # between.
    is_parted = (batch.rank_order == PP_BEFORE_DP) & (batch.cp == 1)
    step = batch.tp * batch.cp * np.where(is_parted, batch.pp, 1)
    return Islands(
        own=Links.of(own),
        between=links_between(level, own.calibration),
        span=step[:, None] * groups[:, :, 0],
        islands=groups[:, :, 1],
    )


# -- shares of states -------------------------------------------------------------------------------------------------


def _shared_bytes(problem: Problem, batch: PlanBatch, memory: StageMemory) -> dict[str, Floats]:
    """Bytes of every stage by the memory terms that replicas share; 0 if not shared."""
    reduces = problem.framework.network.zero2_reduces_every_microbatch | (batch.num_microbatches == 1)
    is_shared = {name: batch.sharding >= sharding.code for name, sharding in _SHARED.items()}
    is_shared["gradients"] &= (batch.sharding == Sharding.ZERO3.code) | reduces
    return {name: np.where(rows[:, None], memory.terms[name], 0.0) for name, rows in is_shared.items()}


def _with_more(memory: StageMemory, more: dict[str, Floats], reserved_factor: float) -> StageMemory:
    """Return the memory with `more` bytes of some terms, plus their fragmentation, throughout a step."""
    terms = memory.terms | {name: memory.terms[name] + added for name, added in more.items()}
    terms["fragmentation"] = terms["fragmentation"] + (reserved_factor - 1.0) * add_up(more.values())
    snapshots = {
        phase: tuple(snapshot | {"gradients": snapshot["gradients"] + more["gradients"]} for snapshot in snapshots)
        for phase, snapshots in memory.snapshots.items()
    }
    return replace(memory, terms=terms, reserved_bytes=add_up(terms.values()), snapshots=snapshots)


def sharded_bytes(pipelines: LaidOutPipelines) -> Floats:
    """Bytes of every stage that other replicas could store instead, including fragmentation."""
    values = [
        layout.problem.framework.memory.reserved_factor
        * add_up(_shared_bytes(layout.problem, layout.laid.batch, layout.laid.memory).values())
        for layout in pipelines.layouts
    ]
    return over_stages(pipelines.layouts, values, len(pipelines.batch))


# -- between stages ---------------------------------------------------------------------------------------------------


def _on_part(layout: PartLayout) -> Bools:
    assert layout.on_part is not None
    return layout.on_part


def _chain(part: int, layout: PartLayout, members: Sequence[Member]) -> PlanBatch:
    """Return the stages of every row on its part as a separate pipeline, so that strides match its replicas."""
    kinds = [members[at].kind for at in layout.pipeline]
    run = np.array([sum(stage.part == part for stage in kind.stages) for kind in kinds])
    counts = np.array([kind.count for kind in kinds])
    return replace(layout.laid.batch, dp_replicate=np.ones_like(run), dp_shard=counts, pp=run)


def _crossings(plan: MixedPlan) -> dict[frozenset[int], int]:
    """Number of devices that send at once over the link between each pair of parts."""
    senders: dict[frozenset[int], int] = defaultdict(int)
    for kind in plan.kinds:
        for stage, behind in plan.hops_of(kind):
            if stage.part != behind.part:
                ranks = kind.count * plan.common.cp * max(stage.tp, behind.tp)
                senders[frozenset((stage.part, behind.part))] += ranks
    return senders


def _hops_s(
    problem: MixedProblem, nodes: Nodes, layouts: Mapping[int, PartLayout], members: Sequence[Member]
) -> Floats:
    """Message time from every stage to the next, by the slower end: shape (kinds, stages).

    In an interleaved pipeline the last stage sends to the first.
    """
    parts = np.array([[stage.part for stage in member.kind.stages] for member in members])
    behind = np.roll(np.arange(parts.shape[1]), -1)
    sends = np.array([np.arange(parts.shape[1]) < len(plan.hops_of(kind)) for plan, kind in members])
    crosses = sends & (parts[:, behind] != parts)
    messages = [
        np.broadcast_to(layout.overall * message_s(layout.problem, _chain(part, layout, members))[:, None], shape)
        for part, layout in layouts.items()
        for shape in [_on_part(layout).shape]
    ]
    inside_s = over_stages(list(layouts.values()), messages, len(members))
    hops = np.where(sends & ~crosses, np.maximum(inside_s[:, behind], inside_s), 0.0)
    senders = [_crossings(member.plan) for member in members]
    for part, layout in layouts.items():
        alike: dict[tuple[frozenset[int], int], list[tuple[int, int]]] = defaultdict(list)
        owners, on_part = layout.pipeline, _on_part(layout)
        for row, hop in zip(*np.nonzero(crosses[owners] & (on_part[:, behind] | on_part)), strict=True):
            at = owners[row]
            pair = frozenset((int(parts[at, hop]), int(parts[at, behind[hop]])))
            alike[pair, senders[at][pair]].append((row, hop))
        for (pair, count), stages in alike.items():
            rows, columns = np.array(stages).T
            links = links_between(problem.between(part, only_on(nodes, pair), count), layout.problem.calibration)
            message = layout.overall * message_s(layout.problem, layout.laid.batch.take(rows), links)
            np.maximum.at(hops, (owners[rows], columns), message)
    return hops


def _tied_s(
    problem: MixedProblem, nodes: Nodes, layouts: Mapping[int, PartLayout], members: Sequence[Member]
) -> Floats:
    """Time of the tied embedding's gradient reduction between first and last stage of every kind."""
    result = np.zeros(len(members))
    stages = len(members[0].kind.stages)
    if not problem.model.tied_embeddings or stages == 1:
        return result
    for part, layout in layouts.items():
        batch, on_part = _chain(part, layout, members), _on_part(layout)
        alike: dict[tuple[frozenset[int], int], list[int]] = defaultdict(list)
        for row in np.flatnonzero(on_part[:, 0] | on_part[:, -1]).tolist():
            kind = members[layout.pipeline[row]].kind
            ends = frozenset((kind.stages[0].part, kind.stages[-1].part))
            senders = kind.count * int(batch.cp[row] * batch.tp[row]) if len(ends) > 1 else 0
            alike[ends, senders].append(row)
        for (ends, senders), rows in alike.items():
            links = Links.of(layout.problem)
            if len(ends) > 1:
                links = links_between(problem.between(part, only_on(nodes, ends), senders), layout.problem.calibration)
            seconds = tied_table(layout.problem, batch.take(np.array(rows)), stages).seconds(links)
            np.maximum.at(result, layout.pipeline[rows], layout.overall * seconds)
    return result
