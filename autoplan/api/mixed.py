"""Searches and estimates on mixed clusters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from autoplan.api.launch_files import LaunchStart, start_from
from autoplan.api.options import SearchOptions, split_options
from autoplan.api.plan_files import load_mixed_plan, make_mixed_file
from autoplan.api.problem import (
    batches_of,
    load_any_cluster,
    make_mixed_problem,
    priced_target,
    quantile_of,
    space_flags,
    space_of,
)
from autoplan.api.results import MixedPlanResult, Progress
from autoplan.api.training_run import RunOptions, make_run, objectives_of, priced_parts
from autoplan.api.unlike_nodes import are_expressible
from autoplan.base.errors import AutoplanError, InputError, NoPlanError
from autoplan.cost.mixed.estimate import estimate_mixed as price_mixed
from autoplan.frameworks.common.job import Target
from autoplan.frameworks.registry import find_target
from autoplan.launch.targets import refused_training, usual_start
from autoplan.search import mixed_search
from autoplan.search.advice import needed_text
from autoplan.search.mixed_refinement import Accepts, accept_all
from autoplan.search.mixed_run import search_parts
from autoplan.search.sensitivity import mixed_sensitivity
from autoplan.search.simple import MAX_SLOWER
from autoplan.search.structures import NOTHING_EQUAL, Equal
from autoplan.spec.estimate import oom_probability
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.mixed_result import MixedResult, MixedToday
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import SpaceFlags
from autoplan.spec.started_plan import plan_over
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster


def search_mixed(
    model: str | Path | ModelSpec | None = None,
    *,
    cluster: str | Path | MixedCluster,
    global_batch: int | str | None = None,
    seq_len: int | None = None,
    launch_file: str | Path | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
    target: str | None = None,
    to: str | None = None,
    fix: Iterable[str] | Mapping[str, Any] = (),
    at_most: Iterable[str] | Mapping[str, Any] = (),
    forbid: Iterable[str] = (),
    allow: Iterable[str] = (),
    prefer: str = "simple",
    robust: float | None = None,
    why: bool = False,
    progress: Progress | None = None,
    **options: Unpack[SearchOptions],
) -> MixedPlanResult:
    """Return the fastest plans that fit on a mixed cluster and that an export target can start, best first.

    `cluster` is several clusters joined by + ("h100-sxm:4x8+a100-sxm:4x8"), a file of parts, or a loaded object.  The
    other arguments are those of `search`; without `to`, plans are for the usual target of the framework.  For a run,
    the set of parts that serves it best is found, too.

    Raises InputError for arguments that cannot be used, NoPlanError if no plan is legal or fits.
    """
    problem_options, run = split_options(options, "search_mixed")
    parts = load_any_cluster(cluster)
    if isinstance(parts, ClusterSpec):
        raise InputError(f"{cluster} has equal nodes: use autoplan.search")
    to, quantile, started = priced_target(to, problem_options), quantile_of(prefer, robust), None
    if run and (launch_file is not None or quantile is not None or why):
        raise InputError("objectives and runs are for a search without --from, --robust and --why: leave these out")
    if launch_file is not None:
        stated: dict[str, Any] = {"model": model, "seq_len": seq_len, "global_batch": global_batch}
        started = start_from(launch_file, parts.as_equal, problem_options, variables=variables, target=target, **stated)
        problem = make_mixed_problem(started.launch.model, cluster=parts, **started.options)
        problem = replace(problem, framework=problem.framework.choosing(started.plan))
        global_batch, to = started.global_batch, to or usual_of(problem, started.launch.target)
    elif model is None or seq_len is None or global_batch is None:
        raise InputError("give model, global_batch and seq_len, or a launch_file that has them")
    else:
        problem = make_mixed_problem(model, cluster=parts, seq_len=seq_len, **problem_options)
    flags = space_flags(global_batch, fix=fix, at_most=at_most, forbid=forbid, allow=allow, to=to or usual_of(problem))
    timings, command = options.get("timings") or "", "autoplan.search_mixed() of Python"
    if run:
        return _best_parts(problem, flags, run, timings, command, progress)
    margin = MAX_SLOWER if prefer == "simple" and quantile is None else 0.0
    result = fastest_plans(problem, flags, margin=margin, progress=progress)
    if quantile is not None:
        result = mixed_search.robust_order(result, quantile)
    answer = result_of(problem, result, flags, timings, command)
    if why:
        answer = replace(answer, file=replace(answer.file, sensitivity=mixed_sensitivity(problem, result)))
    return replace(answer, file=replace(answer.file, today=_today(problem, started))) if started else answer


def _best_parts(
    problem: MixedProblem,
    flags: SpaceFlags,
    options: RunOptions,
    timings: str,
    command: str,
    progress: Progress | None,
) -> MixedPlanResult:
    """Return the plan and the parts that serve a run best."""
    if options.get("nodes"):
        raise InputError("--nodes counts equal nodes: write how many there are of each part in --cluster")
    run = make_run(options)
    objectives = objectives_of(options, run, problem.training)
    if any(objective.measure == "memory" for objective in objectives):
        raise InputError("--objective memory-headroom is of equal devices: parts have unlike memory, leave it out")
    problem, target = priced_parts(problem, options.get("price")), _target_of(problem, flags)
    found = search_parts(problem, partial(_plans, flags=flags, target=target), objectives, run, progress)
    if isinstance(found, MixedResult):
        raise _no_plan(problem, found, target)
    answer = result_of(found.problem, found.result, flags, timings, command)
    return replace(answer, file=replace(answer.file, run=found.report))


def _today(problem: MixedProblem, started: LaunchStart) -> MixedToday:
    """Return the plan of the launch file, with its price if it has one."""
    try:
        (cost,) = price_mixed(problem, [plan_over(problem, started.plan)])
    except AutoplanError as error:
        return MixedToday(path=str(started.path), cost=None, why=str(error))
    return MixedToday(path=str(started.path), cost=cost)


def fastest_plans(
    problem: MixedProblem,
    flags: SpaceFlags,
    *,
    margin: float = 0.0,
    progress: Progress | None = None,
) -> MixedResult:
    """Return the fastest plans of the space that fit and that its target starts, led by a simple one.

    That is slower than the fastest by a share of `margin` at most.  NoPlanError if no plan is legal or fits.
    """
    target = _target_of(problem, flags)
    result = _plans(problem, flags=flags, target=target, margin=margin, progress=progress)
    if not result.ranked:
        raise _no_plan(problem, result, target)
    return result


def _target_of(problem: MixedProblem, flags: SpaceFlags) -> Target | None:
    target = find_target(flags.to, problem.framework) if flags.to else None
    if target is not None and (why := refused_training(target, problem.training)):
        raise InputError(why)
    return target


def _plans(
    problem: MixedProblem,
    *,
    flags: SpaceFlags,
    target: Target | None,
    margin: float = 0.0,
    progress: Progress | None = None,
) -> MixedResult:
    batches, found = batches_of(flags.global_batch, problem.cluster.num_devices), []
    for at, batch in enumerate(batches):
        space = partial(space_of, flags=replace(flags, global_batch=str(batch)))
        found.append(mixed_search.search_mixed(problem, batch, space, *_started_by(problem, target), margin=margin))
        if progress:
            progress(at + 1, len(batches))
    return mixed_search.best_of(found)


def result_of(
    problem: MixedProblem, result: MixedResult, flags: SpaceFlags, timings: str, command: str
) -> MixedPlanResult:
    """Return the answer of a search."""
    file = make_mixed_file(problem, result.ranked, result.certificate, timings=timings, space=flags, command=command)
    return MixedPlanResult(file=file, problem=problem)


def usual_of(problem: MixedProblem, *first: str) -> str:
    """Return the target that starts plans of the framework, one of `first` if it does; blank where none does."""
    try:
        return usual_start(problem.framework, problem.training, *first)
    except NoPlanError:
        return ""


def _started_by(problem: MixedProblem, target: Target | None) -> tuple[Accepts, Equal]:
    """Return which plans a target starts, and what is equal in all of them."""
    if target is None:
        return accept_all, NOTHING_EQUAL

    def accepts(plans: Sequence[MixedPlan]) -> Sequence[bool]:
        return are_expressible(problem, plans, target)

    return accepts, Equal(tp=not target.takes_unequal_tp, replicas=True, batches=not target.unequal_batches)


def estimate_mixed(plan: MixedPlanResult | str | Path) -> MixedPlanResult:
    """Price the plan of a result or plan file of a mixed cluster again, unchanged."""
    saved = plan if isinstance(plan, MixedPlanResult) else load_mixed_plan(plan)
    costs = price_mixed(saved.problem, [saved.best.plan])
    timings, command = saved.file.timings, "autoplan.estimate_mixed() of Python"
    file = make_mixed_file(saved.problem, costs, None, timings=timings, command=command)
    return MixedPlanResult(file=file, problem=saved.problem)


def _no_plan(problem: MixedProblem, result: MixedResult, target: Target | None) -> NoPlanError:
    """Return why a result has no plan."""
    if result.closest is None:
        if target is not None:
            return NoPlanError(
                f"no plan that was found is one that {target.title} starts on different nodes: name another target "
                "with --to"
            )
        return NoPlanError(
            "no plan: the global batch leaves no replica a micro-batch, the limits no degrees that divide, or "
            "cross_vendor_collectives = false no way to share out the layers; change one of them"
        )
    stages = [stage for kind in result.closest.kinds for stage in kind.stages]
    worst = max(stages, key=lambda stage: stage.oom_z)
    where = f" on {problem.cluster.parts[worst.part].name}"
    needed = needed_text(worst.memory_bytes, worst.capacity_bytes, oom_probability(worst.oom_z), where)
    return NoPlanError(f"no plan fits: the closest needs {needed}: use more devices or a shorter sequence")
