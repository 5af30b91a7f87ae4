"""Plans on a mixed cluster that frameworks can start: equal replicas with stages on different nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, islice

import numpy as np

from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.mixed.stages import mixed_stages
from autoplan.frameworks.common.job import Target
from autoplan.frameworks.common.rules import legal_on_own_devices
from autoplan.frameworks.registry import book_of, find_target
from autoplan.launch.start import NodeRange
from autoplan.search.ranking import ranked, training_flops_per_token
from autoplan.spec.estimate import datasheet_peak, oom_probability
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, as_parallel
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.plan import PlanBatch
from autoplan.spec.plan_file import PLAN_FILE_VERSION, MixedPlanFile, PartPlanFile
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.started_plan import StartedPlan, started_plan
from autoplan.topology.placement import node_names


def are_expressible(problem: MixedProblem, plans: Sequence[MixedPlan], target: Target) -> list[bool]:
    """Return which plans the framework of a target starts, as far as its rules say."""
    owner, parallel, result = [], [], np.zeros(len(plans), dtype=np.bool_)
    for at, plan in enumerate(plans):
        try:
            rank_order = _started(problem, plan, target).plan.rank_order
        except InputError:
            continue
        result[at] = rank_order in problem.framework.rank_orders
        for tp in {stage.tp for stage in plan.kinds[0].stages}:
            owner.append(at)
            parallel.append(replace(as_parallel(problem, plan, plan.kinds[0], tp), rank_order=rank_order))
    rules = book_of(problem.framework).rules + target.limits
    batch = PlanBatch.of(parallel, problem.model.num_layers)
    np.logical_and.at(result, owner, legal_on_own_devices(rules, problem.alone(0).workload, batch))
    return [bool(starts) for starts in result]


def _started(problem: MixedProblem, plan: MixedPlan, target: Target) -> StartedPlan:
    return started_plan(problem, plan, unequal_batches=target.unequal_batches, unequal_tp=target.takes_unequal_tp)


def node_ranges(problem: MixedProblem, file: MixedPlanFile, to: str) -> tuple[NodeRange, ...]:
    """Return the nodes of parts in use by rank, and their start; InputError where `to` does not start the plan."""
    cost, target = file.best, find_target(to)
    try:
        started = _started(problem, cost.plan, target)
    except InputError as error:
        raise InputError(
            f"{target.title} cannot start the plan: {error}; search with --to {to} for the fastest plan that it can"
        ) from None
    parts = problem.cluster.parts
    used = tuple(dict.fromkeys(started.node_parts))
    # Files that the job reads name the devices: they have to be the same on all of them.
    devices = _joined(parts[at].device.name for at in used)
    calibration = _joined(file.calibrations[at].name for at in used)
    best, costs = _ranked(problem, cost, started), tuple(placed.cost for placed in mixed_stages(problem, cost.plan))
    ranges, first = [], 0
    names = {at: iter(node_names(parts[at])) for at in used}
    for at, nodes in groupby(started.node_parts):
        as_if, num_nodes = problem.as_if(at, problem.nodes_of(cost.plan)), len(list(nodes))
        device = replace(parts[at].device, name=devices)
        plan_file = PartPlanFile(
            schema_version=PLAN_FILE_VERSION,
            versions=file.versions,
            command=file.command,
            model=file.model,
            training=file.training,
            cluster=replace(as_if.cluster, name=problem.cluster.name, device=device),
            framework=file.framework,
            calibration=replace(as_if.calibration, name=calibration),
            reserve_bytes=file.reserve_bytes,
            best=best,
            stages=costs,
            alternatives=(),
            certificate=None,
            mixed_file=file,
        )
        stages = (stage for kind in cost.kinds for stage in kind.stages if stage.part == at)
        ranges.append(
            NodeRange(
                part=parts[at].name,
                first=first,
                num_nodes=num_nodes,
                num_devices=parts[at].devices_per_node,
                memory_bytes=max(stage.memory_bytes for stage in stages),
                plan_file=plan_file,
                hosts=tuple(islice(names[at], num_nodes)),
            )
        )
        first += num_nodes
    return tuple(ranges)


def _joined(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _ranked(problem: MixedProblem, cost: MixedCost, started: StartedPlan) -> RankedPlan:
    """Return the figures of a plan: memory on the stage that is nearest to its capacity, MFU of all devices' peaks."""
    fullest = max((stage for kind in cost.kinds for stage in kind.stages), key=lambda stage: stage.oom_z)
    as_if = problem.as_if(fullest.part, problem.nodes_of(cost.plan))
    (plain,) = ranked(as_if, estimate(as_if, as_if.batch([started.plan])), [0])
    tokens_per_s = cost.sequences_per_s * problem.training.seq_len
    precision, parts = problem.training.precision, problem.cluster.parts
    nodes = [parts[at] for at in started.node_parts]
    peak = sum(node.devices_per_node * datasheet_peak(node.device, precision)[1] for node in nodes)
    return replace(
        plain,
        step_s=cost.step_s,
        low_s=cost.low_s,
        high_s=cost.high_s,
        tokens_per_s_per_device=tokens_per_s / cost.plan.num_devices,
        mfu=tokens_per_s * training_flops_per_token(problem.model, problem.training) / peak,
        memory_bytes=fullest.memory_bytes,
        memory_headroom_bytes=fullest.capacity_bytes - fullest.memory_bytes,
        oom_probability=oom_probability(cost.oom_z),
        verdict=cost.verdict,
        terms_s=cost.terms_s,
    )
