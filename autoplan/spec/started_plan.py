"""A plan of a mixed cluster as frameworks start it: one set of degrees, and the part of the cluster of every node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoplan.base.errors import InputError
from autoplan.spec.enums import RankOrder
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, as_parallel
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.ranks import coordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedPlan:
    """Plan of a mixed cluster as started: common degrees, parts of nodes, micro-batches if replicas differ in them."""

    plan: ParallelPlan
    node_parts: tuple[int, ...]  # in the order of the ranks
    micro_batches: tuple[tuple[int, int], ...] = ()  # (sequences, number) of each replica's


def started_plan(
    problem: MixedProblem, plan: MixedPlan, *, unequal_batches: bool = False, unequal_tp: bool = False
) -> StartedPlan:
    """Return the plan as frameworks start it.

    Replicas may have unlike micro-batches with `unequal_batches`, and stages of equal replicas unlike tensor-parallel
    degrees with `unequal_tp`; the plan has the largest of these.  Of equal replicas the ranks of a stage stand together
    where the plan has that order, else those of a replica.  Raises InputError where replicas or degrees are too
    different, or where a node would hold ranks of two parts.
    """
    counts, sizes = ({getattr(kind, name) for kind in plan.kinds} for name in ("num_microbatches", "micro_batch"))
    if len(counts) > 1 and not unequal_batches:
        raise InputError(f"its replicas take {_listed(counts)} micro-batches per step")
    if len(sizes) > 1 and not unequal_batches:
        raise InputError(f"its micro-batches hold {_listed(sizes)} sequences")
    if len({plan.layers_per_chunk(kind) for kind in plan.kinds}) > 1 or len({kind.vp for kind in plan.kinds}) > 1:
        raise InputError("its replicas split the layers differently")
    degrees = {stage.tp for kind in plan.kinds for stage in kind.stages}
    if len(degrees) > 1 and not (unequal_tp and len(plan.kinds) == 1):
        raise InputError(f"its stages have the tensor-parallel degrees {_listed(degrees)}")
    if len({kind.state_share for kind in plan.kinds}) > 1:
        raise InputError("its replicas hold different shares of the optimizer states")
    tp = max(degrees)
    parallel = as_parallel(problem, plan, plan.kinds[0], tp)
    if len(plan.kinds) == 1 and parallel.rank_order == RankOrder.DP_BEFORE_PP:
        places = [stage for stage in plan.kinds[0].stages for _ in range(plan.num_replicas)]
    else:
        places = [stage for kind in plan.kinds for _ in range(kind.count) for stage in kind.stages]
        parallel = replace(parallel, rank_order=RankOrder.PP_BEFORE_DP) if parallel.pp > 1 else parallel
    return StartedPlan(
        plan=parallel,
        node_parts=_parts_of_nodes(problem, [stage.part for stage in places for _ in range(stage.tp * parallel.cp)]),
        micro_batches=tuple((kind.micro_batch, kind.num_microbatches) for kind in plan.kinds for _ in range(kind.count))
        if max(len(counts), len(sizes)) > 1
        else (),
    )


def plan_over(problem: MixedProblem, plan: ParallelPlan) -> MixedPlan:
    """Return a plan of equal nodes with its ranks on the parts of a cluster, in their order.

    Raises InputError if a stage of a replica would be on two parts.
    """
    parts = [at for at, part in enumerate(problem.cluster.parts) for _ in range(part.num_devices)]
    places: dict[tuple[int, int], set[int]] = {}
    ranks = coordinates(plan)
    for part, replica, stage in zip(parts, ranks["dp"].tolist(), ranks["pp"].tolist(), strict=True):
        places.setdefault((replica, stage), set()).add(part)
    if any(len(on_parts) > 1 for on_parts in places.values()):
        raise InputError("ranks that share a layer are on two parts")
    (equal,) = MixedPlan.of(plan, 0, problem.model.num_layers).kinds
    kinds = [
        replace(
            equal,
            count=1,
            stages=tuple(replace(stage, part=min(places[replica, at])) for at, stage in enumerate(equal.stages)),
        )
        for replica in range(plan.dp)
    ]
    return MixedPlan(kinds=tuple(kinds), common=plan, schedule=plan.schedule)


def _parts_of_nodes(problem: MixedProblem, parts: Sequence[int]) -> tuple[int, ...]:
    """Return the part of every node, from the part of every rank; nodes of two parts may have unlike sizes."""
    nodes: list[int] = []
    first = 0
    while first < len(parts):
        size = problem.cluster.parts[parts[first]].devices_per_node
        if parts[first : first + size] != [parts[first]] * size:
            raise InputError(f"its ranks do not fill nodes of {size} devices of one part each")
        nodes.append(parts[first])
        first += size
    return tuple(nodes)


def _listed(values: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(values)))
