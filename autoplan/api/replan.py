"""Replanning: the best plan on the rest of a cluster, and the cost of switching to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from autoplan.api.mixed import fastest_plans, result_of, usual_of
from autoplan.api.plan_files import make_mixed_file, make_plan_file
from autoplan.api.plan_result import PlanResult, load_any_plan
from autoplan.api.problem import space_of
from autoplan.api.results import MixedPlanResult, Progress, Result, Table
from autoplan.api.training_run import RunOptions, make_run, resized, search_run
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.files import decode, encode, read_table
from autoplan.base.units import check_positive, format_seconds
from autoplan.cost.estimate import estimate
from autoplan.cost.goodput import usable_share
from autoplan.cost.input_rate import with_input
from autoplan.cost.memory.stage_memory import checkpoint_bytes
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.frameworks.common.rules import legal
from autoplan.readers.lost_nodes import remaining
from autoplan.search.ranking import ranked
from autoplan.search.sizes import size_grid
from autoplan.spec.calibration import Calibration
from autoplan.spec.mixed_problem import MixedProblem, as_parallel
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.spec.replan_summary import PlanFigures, ReplanSummary
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.timing import TimingTable
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster
from autoplan.trainer.task import RunFile

# Some of the nodes that are left may stand idle: a batch divides well among few of the numbers of nodes.
FEWEST_SHARE = 0.5
# Axes by which ranks hold other parts of the weights, so that a checkpoint has to be cut again.
CUT_BY = ("tp", "pp", "vp", "schedule", "layers_per_chunk", "ep", "etp", "dp_shard", "sharding")


# Noise of measured speeds, for which no plan changes; splits by speeds that are 5 % off are at most this much slower.
DEAD_BAND = 0.1
COMMAND = "autoplan.replan() of Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanResult(Result):
    """The best plan on the rest of a cluster, compared with the previous one.

    `same_layout` is the previous one with fewer replicas, if there is such a plan on equal nodes.
    """

    plan: PlanResult | MixedPlanResult
    summary: ReplanSummary
    same_layout: RankedPlan | None = None

    @property
    def headline(self) -> str:
        """The new plan, and the share of the throughput that it keeps."""
        summary = self.summary
        step = format_seconds(summary.after.step_s)
        return (
            f"{summary.after.plan}: {step} per step on {summary.nodes_used} of {summary.nodes_left} nodes, "
            f"{100 * summary.kept_share:.1f} % of the tokens a second of {summary.nodes_before}"
        )

    def table(self) -> Table:
        """Return a row for the plan of before, that with the same layout and the best one: times in seconds."""
        summary = self.summary
        rows = {"before": summary.before, "same layout": summary.same_layout, "best": summary.after}
        return Table.of(
            {
                "which": which,
                "plan": figures.plan,
                "num_devices": figures.num_devices,
                "step_s": figures.step_s,
                "memory_bytes": figures.memory_bytes,
            }
            for which, figures in rows.items()
            if figures is not None
        )

    def to_json(self) -> str:
        """Return what changes as JSON; the plan itself is saved as a plan file."""
        return encode(self.summary)


def replan(
    plan: str | Path | PlanResult | MixedPlanResult,
    *,
    nodes: int | None = None,
    without: Iterable[str] = (),
    devices: int | None = None,
    measured: str | Path | RunFile | None = None,
    storage_bytes_per_s: float | None = None,
    run: RunOptions | None = None,
    db: str | None = None,
    progress: Progress | None = None,
) -> ReplanResult:
    """Return the best plan on the rest of a plan's cluster, with the same batch, and the cost of switching to it.

    `plan` is a result or the path of a plan file.  The rest is a number of `nodes` or `devices`, or the named nodes of
    the cluster file `without` some of them; of a mixed cluster `without` may name a part with a number of nodes
    ("a100-sxm:2").  The limits of the original search still apply.  A batch divides well over few node counts, so
    unnamed nodes may be left idle.  Instead, `measured` is a run of a plan of a mixed cluster (`autoplan run --out`):
    its parts get the speeds that were measured, and the plan changes if another one is faster by more than
    `DEAD_BAND`.  `storage_bytes_per_s` is the rate at which all ranks together read and write
    checkpoints; `run` has the failure rate of devices.

    Raises InputError for arguments that cannot be used, NoPlanError if the rest has no plan.
    """
    before = plan if isinstance(plan, PlanResult | MixedPlanResult) else load_any_plan(plan, db=db)
    if storage_bytes_per_s is not None:
        check_positive("storage_bytes_per_s", storage_bytes_per_s)
    if measured is not None:
        if nodes is not None or without or devices is not None:
            raise InputError("--measured replans what is still there: leave --nodes, --gpus and --without out")
        before = _remeasured(before, measured if isinstance(measured, RunFile) else _run_of(Path(measured)))
        clusters: tuple[ClusterSpec | MixedCluster, ...] = (before.problem.cluster,)
    else:
        clusters = remaining(before.problem.cluster, nodes=nodes, without=tuple(without), devices=devices)
    old = _Layout.of(before)
    batch = str(before.file.best.plan.global_batch)
    flags = replace(before.file.space or SpaceFlags(global_batch=""), global_batch=batch)
    after = _fastest(before, clusters, flags, run or {}, progress)
    if measured is not None and after.file.best.step_s > (1 - DEAD_BAND) * before.file.best.step_s:
        after = before
    new, rest = _Layout.of(after), clusters[0]
    equal = next((cluster for cluster in clusters if isinstance(cluster, ClusterSpec)), None)
    same = None
    if equal is not None and isinstance(before, PlanResult):
        same = _same_layout(replace(before.problem, cluster=equal), before.plan, flags)
    saved_bytes = checkpoint_bytes(old.problem, old.plan)
    load_s = None if storage_bytes_per_s is None else saved_bytes / storage_bytes_per_s
    cluster = before.problem.cluster
    summary = ReplanSummary(
        nodes_before=cluster.num_nodes,
        nodes_left=rest.num_nodes,
        nodes_used=new.num_nodes,
        before=old.figures,
        after=new.figures,
        same_layout=None if same is None else _figures(same),
        kept_share=old.figures.step_s / new.figures.step_s,
        usable_replicas=_usable(cluster, rest, old.replica_devices),
        usable_tensor_groups=_usable(cluster, rest, old.plan.tp),
        checkpoint_bytes=saved_bytes,
        cuts_anew=old.cut != new.cut,
        load_s=load_s,
        checkpoint_interval_s=_checkpoint_interval_s(run or {}, new.figures.num_devices, load_s),
    )
    return ReplanResult(plan=after, summary=summary, same_layout=same)


def _checkpoint_interval_s(run: RunOptions, num_devices: int, load_s: float | None) -> float | None:
    """Return the best time between checkpoints of `load_s`, or as `run` says; None if neither gives a time."""
    reliability = make_run(run).reliability
    if not run.get("checkpoint_time"):
        if load_s is None:
            return None
        reliability = replace(reliability, checkpoint_s=load_s)
    return reliability.interval_s(num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The best plan of a result, of equal nodes or as the first of its kinds of replicas has it, and its figures."""

    problem: Problem
    plan: ParallelPlan
    replica_devices: int
    num_nodes: int  # in use
    cut: object  # which part of weights and states every rank holds
    figures: PlanFigures

    @classmethod
    def of(cls, result: PlanResult | MixedPlanResult) -> _Layout:
        """Return the layout of the best plan."""
        if isinstance(result, PlanResult):
            plan = result.plan
            return cls(
                problem=result.problem,
                plan=plan,
                replica_devices=plan.num_devices // plan.dp,
                num_nodes=result.problem.cluster.num_nodes,
                cut=tuple(getattr(plan, axis) for axis in CUT_BY),
                figures=_figures(result.best),
            )
        problem, cost = result.problem, result.best
        (kind, *_), stages = cost.plan.kinds, [stage for kind in cost.kinds for stage in kind.stages]
        nodes = problem.nodes_of(cost.plan)
        axes = (cost.plan.common.ep, cost.plan.common.etp, cost.plan.common.sharding)
        return cls(
            problem=problem.as_if(kind.stages[0].part, nodes),
            plan=as_parallel(problem, cost.plan, kind, max(stage.tp for stage in kind.stages)),
            replica_devices=cost.plan.common.cp * sum(stage.tp for stage in kind.stages),
            num_nodes=sum(nodes),
            cut=([(kind.count, kind.stages, kind.state_share) for kind in cost.plan.kinds], axes),
            figures=PlanFigures(
                plan=result.described(cost),
                num_devices=cost.plan.num_devices,
                step_s=cost.step_s,
                memory_bytes=max(stage.memory_bytes for stage in stages),
            ),
        )


def _figures(ranked: RankedPlan) -> PlanFigures:
    return PlanFigures(
        plan=ranked.plan.describe(),
        num_devices=ranked.plan.num_devices,
        step_s=ranked.step_s,
        memory_bytes=ranked.memory_bytes,
    )


def _run_of(path: Path) -> RunFile:
    return decode(RunFile, read_table(path), str(path))


def _remeasured(before: PlanResult | MixedPlanResult, run: RunFile) -> MixedPlanResult:
    """Return the plan with the speeds of its parts as measured, of those that it uses."""
    if not isinstance(before, MixedPlanResult):
        raise InputError("--measured is for the speeds of unlike parts: search on a cluster with slow nodes as a part")
    problem, cost = before.problem, before.best
    seconds = iter(run.measured.microbatch_s)
    if len(run.measured.microbatch_s) != cost.plan.num_devices:
        raise InputError(
            f"--measured: the run has times of micro-batches of {len(run.measured.microbatch_s)} ranks, the plan "
            f"{cost.plan.num_devices}: run it with autoplan run, with two or more micro-batches and no pipeline"
        )
    factors = dict.fromkeys(range(len(problem.calibrations)), 1.0)
    for kind, price in zip(cost.plan.kinds, cost.kinds, strict=True):
        (stage,) = price.stages
        slowest = max(islice(seconds, kind.count * stage.tp * cost.plan.common.cp))
        factors[stage.part] = slowest / (stage.forward_s + stage.backward_s)
    problem = replace(
        problem,
        calibrations=tuple(
            replace(calibration, overall=factors[part] * calibration.overall)
            for part, calibration in enumerate(problem.calibrations)
        ),
    )
    file = make_mixed_file(
        problem,
        estimate_mixed(problem, [cost.plan]),
        None,
        timings=before.file.timings,
        space=before.file.space,
        command=COMMAND,
    )
    return MixedPlanResult(file=file, problem=problem)


def _fastest(
    before: PlanResult | MixedPlanResult,
    clusters: Sequence[ClusterSpec | MixedCluster],
    flags: SpaceFlags,
    run: RunOptions,
    progress: Progress | None,
) -> PlanResult | MixedPlanResult:
    """Return the fastest of the best plans on several clusters; the NoPlanError of the first if none has one."""
    results, refusals = list[PlanResult | MixedPlanResult](), []
    for cluster in clusters:
        try:
            if isinstance(cluster, MixedCluster):
                problem = _unlike_problem(before.problem, cluster)
                started = replace(flags, to=flags.to or usual_of(problem))
                found = fastest_plans(problem, started)
                results.append(result_of(problem, found, started, before.file.timings, COMMAND))
            else:
                assert isinstance(before, PlanResult)
                results.append(_searched(before, cluster, flags, run, progress))
        except NoPlanError as error:
            refusals.append(error)
    if not results:
        raise refusals[0]
    return min(results, key=lambda result: result.file.best.step_s)


def _searched(
    before: PlanResult,
    cluster: ClusterSpec,
    flags: SpaceFlags,
    run: RunOptions,
    progress: Progress | None,
) -> PlanResult:
    """Return the best plan on equal nodes."""
    options: RunOptions = {**run, "objectives": ["step-time"], "nodes": _sizes(cluster)}
    problem = replace(before.problem, cluster=cluster)
    outcome = search_run(problem, options, partial(space_of, flags=flags), progress)
    file = make_plan_file(
        outcome.problem,
        outcome.plans,
        outcome.certificate,
        timings=before.file.timings,
        space=flags,
        command=COMMAND,
    )
    return PlanResult(file=file, problem=outcome.problem)


def _unlike_problem(problem: Problem | MixedProblem, cluster: MixedCluster) -> MixedProblem:
    """Return the problem on parts of its cluster, which have kept their names or are of a single one."""
    if isinstance(problem, Problem):
        at = [0] * len(cluster.parts)
        calibrations: tuple[Calibration, ...] = (problem.calibration,)
        timings: tuple[TimingTable, ...] = (problem.timings,)
    else:
        known = [(part.name, part.device, part.devices_per_node) for part in problem.cluster.parts]
        at = [known.index((part.name, part.device, part.devices_per_node)) for part in cluster.parts]
        calibrations, timings = problem.calibrations, problem.timings
    return MixedProblem(
        model=problem.model,
        training=problem.training,
        cluster=cluster,
        framework=problem.framework,
        calibrations=tuple(calibrations[part] for part in at),
        timings=tuple(timings[part] for part in at) if timings else (),
        reserve_bytes=problem.reserve_bytes,
    )


def _usable(before: ClusterSpec | MixedCluster, left: ClusterSpec | MixedCluster, group: int) -> float:
    """Return the share of devices in groups of this size, or in nodes if these are larger and lost, without a loss."""
    lost_devices, lost_nodes = before.num_devices - left.num_devices, before.num_nodes - left.num_nodes
    units = max(lost_nodes or lost_devices, 1)
    return usable_share(before.num_devices, units, max(group, lost_devices // units)) if lost_devices else 1.0


def _sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the numbers of nodes to look at: all that are left, or those not far below that divide well."""
    if cluster.nodes or cluster.faults:
        return (cluster.num_nodes,)
    return size_grid(max(1, round(FEWEST_SHARE * cluster.num_nodes)), cluster.num_nodes)


def _same_layout(problem: Problem, plan: ParallelPlan, flags: SpaceFlags) -> RankedPlan | None:
    """Return the plan with as many replicas as are left and divide the batch; None if none is legal and fits."""
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
        batch = problem.batch([fewer])
        if legal(space_of(sized, flags).rules, sized.workload, batch)[0]:
            same = with_input(sized, ranked(sized, estimate(sized, batch), [0])[0])
            return same if same.verdict == "fits" else None
    return None
