"""Replanning: the best plan on the rest of a cluster, and the cost of switching to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autoplan.api.plan_files import is_mixed_file, make_plan_file
from autoplan.api.plan_result import PlanResult, load_plan
from autoplan.api.problem import space_of
from autoplan.api.results import Result, Table
from autoplan.api.training_run import RunOptions, make_run, resized, search_run
from autoplan.base.errors import InputError
from autoplan.base.files import encode
from autoplan.base.units import check_positive, format_seconds
from autoplan.cost.estimate import estimate
from autoplan.cost.goodput import usable_share
from autoplan.cost.input_rate import with_input
from autoplan.cost.memory.stage_memory import checkpoint_bytes
from autoplan.frameworks.common.rules import legal
from autoplan.readers.cluster import of_size
from autoplan.search.ranking import ranked
from autoplan.search.sizes import size_grid
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.spec.replan_summary import ReplanSummary
from autoplan.spec.search_result import RankedPlan
from autoplan.topology.cluster import ClusterSpec

# Some of the nodes that are left may stand idle: a batch divides well among few of the numbers of nodes.
FEWEST_SHARE = 0.5
# Axes by which ranks hold other parts of the weights, so that a checkpoint has to be cut again.
CUT_BY = ("tp", "tp_grid", "pp", "vp", "schedule", "layers_per_chunk", "ep", "etp", "dp_shard", "sharding")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanResult(Result):
    """The best plan on the rest of a cluster, compared with the previous one."""

    plan: PlanResult
    summary: ReplanSummary

    @property
    def headline(self) -> str:
        """The new plan, and the share of the throughput that it keeps."""
        summary = self.summary
        step = format_seconds(summary.after.step_s)
        return (
            f"{summary.after.plan.describe()}: {step} per step on {summary.nodes_used} of {summary.nodes_left} nodes, "
            f"{100 * summary.kept_share:.1f} % of the tokens a second of {summary.nodes_before}"
        )

    def table(self) -> Table:
        """Return a row for the plan of before, that with the same layout and the best one: times in seconds."""
        summary = self.summary
        rows = {"before": summary.before, "same layout": summary.same_layout, "best": summary.after}
        return Table.of(
            {
                "which": labels,
                "plan": plan.plan.describe(),
                "num_devices": plan.plan.num_devices,
                "step_s": plan.step_s,
                "memory_bytes": plan.memory_bytes,
            }
            for labels, plan in rows.items()
            if plan is not None
        )

    def to_json(self) -> str:
        """Return what changes as JSON; the plan itself is saved as a plan file."""
        return encode(self.summary)


def replan(
    plan: str | Path | PlanResult,
    *,
    nodes: int | None = None,
    without: Iterable[str] = (),
    devices: int | None = None,
    storage_bytes_per_s: float | None = None,
    run: RunOptions | None = None,
    db: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> ReplanResult:
    """Return the best plan on the rest of a plan's cluster, with the same batch, and the cost of switching to it.

    `plan` is a result or the path of a plan file.  The rest is a number of `nodes` or `devices`, or the named nodes of
    the cluster file `without` some of them.  The limits of the original search still apply.  A batch divides well over
    few node counts, so unnamed nodes may be left idle.  `storage_bytes_per_s` is the rate at which all ranks together
    read and write checkpoints; `run` has the failure rate of devices.

    Raises InputError for arguments that cannot be used, NoPlanError if the rest has no plan.
    """
    if not isinstance(plan, PlanResult) and is_mixed_file(Path(plan)):
        raise InputError(f"{plan} is for a mixed cluster: search again, with --cluster naming the parts that are left")
    before = plan if isinstance(plan, PlanResult) else load_plan(plan, db=db)
    if storage_bytes_per_s is not None:
        check_positive("storage_bytes_per_s", storage_bytes_per_s)
    problem = replace(before.problem, cluster=_rest(before.problem.cluster, nodes, tuple(without), devices))
    best = before.file.best
    flags = replace(before.file.space or SpaceFlags(global_batch=""), global_batch=str(best.plan.global_batch))
    options: RunOptions = {**(run or {}), "objectives": ["step-time"], "nodes": _sizes(problem.cluster)}
    outcome = search_run(problem, options, partial(space_of, flags=flags), progress)
    file = make_plan_file(
        outcome.problem,
        outcome.plans,
        outcome.certificate,
        timings=before.file.timings,
        space=flags,
        command="autoplan.replan() of Python",
    )
    after = file.best
    saved_bytes = checkpoint_bytes(before.problem, best.plan)
    load_s = None if storage_bytes_per_s is None else saved_bytes / storage_bytes_per_s
    reliability, knows_pause = make_run(run or {}).reliability, bool((run or {}).get("checkpoint_time"))
    if load_s is not None and not knows_pause:
        reliability, knows_pause = replace(reliability, checkpoint_s=load_s), True
    return ReplanResult(
        plan=PlanResult(file=file, problem=outcome.problem),
        summary=ReplanSummary(
            nodes_before=before.problem.cluster.num_nodes,
            nodes_left=problem.cluster.num_nodes,
            nodes_used=outcome.problem.cluster.num_nodes,
            before=best,
            after=after,
            same_layout=_same_layout(problem, best.plan, flags),
            kept_share=best.step_s / after.step_s,
            usable_replicas=_usable(before.problem.cluster, problem.cluster, best.plan.num_devices // best.plan.dp),
            usable_tensor_groups=_usable(before.problem.cluster, problem.cluster, best.plan.tp),
            checkpoint_bytes=saved_bytes,
            cuts_anew=any(getattr(best.plan, axis) != getattr(after.plan, axis) for axis in CUT_BY),
            load_s=load_s,
            checkpoint_interval_s=reliability.interval_s(after.plan.num_devices) if knows_pause else None,
        ),
    )


def _usable(before: ClusterSpec, left: ClusterSpec, group: int) -> float:
    """Return the share of devices in groups of this size, or in nodes if these are larger and lost, without a loss."""
    lost_devices = before.num_devices - left.num_devices
    unit = 1 if lost_devices % before.devices_per_node else before.devices_per_node
    return usable_share(before.num_devices, lost_devices // unit, max(group, unit))


def _rest(cluster: ClusterSpec, nodes: int | None, without: tuple[str, ...], devices: int | None) -> ClusterSpec:
    """Return what is left of a cluster, by one of three descriptions."""
    if (num_given := (nodes is not None) + bool(without) + (devices is not None)) != 1:
        way_out = "give one of them" if not num_given else "leave all but one of them out"
        raise InputError(f"--nodes and --gpus say how many are left, --without which nodes are lost: {way_out}")
    for flag, left, total in (("--nodes", nodes, cluster.num_nodes), ("--gpus", devices, cluster.num_devices)):
        if left is not None and not 1 <= left < total:
            raise InputError(f"{flag} {left}: the plan runs on {total}: must be from 1 to {total - 1}")
    if not without and cluster.nodes:
        raise InputError(f"{cluster.name} names its nodes: list the lost ones with --without")
    if nodes is not None:
        return replace(cluster, num_nodes=nodes)
    if devices is not None:
        return of_size(cluster, devices)
    host_names = [name for group in cluster.nodes for name in group.names]
    if not host_names:
        raise InputError(f"{cluster.name} does not name its nodes: give the number of nodes left with --nodes")
    if unknown := [name for name in without if name not in host_names]:
        raise InputError(f"--without {unknown[0]}: {cluster.name} has no such node ({', '.join(host_names[:8])}, ...)")
    if len(set(without)) == len(host_names):
        raise InputError("no node is left")
    groups = [replace(group, names=names) for group in cluster.nodes if (names := _without(group.names, without))]
    faults = tuple(fault for fault in cluster.faults if fault.node not in without)
    return replace(cluster, num_nodes=sum(len(group.names) for group in groups), nodes=tuple(groups), faults=faults)


def _without(names: tuple[str, ...], gone: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in gone)


def _sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the numbers of nodes to look at: all that are left, or those not far below that divide well."""
    if cluster.nodes or cluster.faults:
        return (cluster.num_nodes,)
    return size_grid(max(1, round(FEWEST_SHARE * cluster.num_nodes)), cluster.num_nodes)


def _same_layout(problem: Problem, plan: ParallelPlan, flags: SpaceFlags) -> RankedPlan | None:
    """Return the plan with as many replicas as are left and divide the batch; None where there is no legal one."""
    per_node, replica = problem.cluster.devices_per_node, plan.num_devices // plan.dp
    for dp in range(min(problem.cluster.num_devices // replica, plan.dp), 0, -1):
        devices = dp * replica
        if plan.global_batch % (dp * plan.micro_batch) or devices % per_node:
            continue
        shard = dp if plan.dp_shard == plan.dp else plan.dp_shard
        if dp % shard:
            continue
        try:
            fewer = replace(plan, dp_replicate=dp // shard, dp_shard=shard, placement=None)
            sized = resized(problem, devices // per_node)
        except InputError:  # experts do not divide among so many, or the nodes are listed
            continue
        batch = PlanBatch.of([fewer], problem.model.num_layers)
        if legal(space_of(sized, flags).rules, sized.workload, batch)[0]:
            return with_input(sized, ranked(sized, estimate(sized, batch), [0])[0])
    return None
