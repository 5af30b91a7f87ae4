"""Searches and estimates on mixed clusters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from autoplan.api.plan_files import load_mixed_plan, make_mixed_file
from autoplan.api.problem import (
    ProblemOptions,
    check_names,
    load_any_cluster,
    make_mixed_problem,
    priced_target,
    space_flags,
    space_of,
)
from autoplan.api.results import MixedPlanResult
from autoplan.api.unlike_nodes import is_expressible
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.values import parse_batches
from autoplan.cost.mixed.estimate import estimate_mixed as price_mixed
from autoplan.frameworks.common.job import Target
from autoplan.frameworks.registry import find_target
from autoplan.launch.targets import refused_training
from autoplan.search import mixed_search
from autoplan.search.advice import needed_text
from autoplan.spec.estimate import probability_above
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.mixed_result import MixedResult
from autoplan.spec.model import ModelSpec
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster


def search_mixed(
    model: str | Path | ModelSpec,
    *,
    cluster: str | Path | MixedCluster,
    global_batch: int | str,
    seq_len: int,
    to: str | None = None,
    fix: Iterable[str] | Mapping[str, Any] = (),
    at_most: Iterable[str] | Mapping[str, Any] = (),
    forbid: Iterable[str] = (),
    allow: Iterable[str] = (),
    **options: Unpack[ProblemOptions],
) -> MixedPlanResult:
    """Return the fastest plans that fit on a mixed cluster, best first.

    `cluster` is several clusters joined by + ("h100-sxm:4x8+a100-sxm:4x8"), a file of parts, or a loaded object;
    `global_batch` is in sequences, `seq_len` in tokens.  `fix`, `at_most`, `forbid` and `allow` work as in `search`.
    `to` restricts the search to plans that an export target can start, for most equal replicas with one tensor-parallel
    degree, priced as the framework of the target unless the options name another one.

    Raises InputError for arguments that cannot be used, NoPlanError if no plan is legal or fits.
    """
    check_names(options, ProblemOptions, "search_mixed")
    parts = load_any_cluster(cluster)
    if isinstance(parts, ClusterSpec):
        raise InputError(f"{cluster} has equal nodes: use autoplan.search")
    to = priced_target(to, options)
    problem = make_mixed_problem(model, cluster=parts, seq_len=seq_len, **options)
    accepts, target = None, find_target(to, problem.framework) if to is not None else None
    if target is not None:
        if why := refused_training(target, problem.training):
            raise InputError(why)

        def accepts(plans: Sequence[MixedPlan]) -> Sequence[bool]:
            return [is_expressible(problem, plan, target) for plan in plans]

    low, high = parse_batches(str(global_batch))
    if low != high:
        raise InputError(f"--global-batch {global_batch}: a mixed cluster takes one number, not a range")
    flags = space_flags(low, fix=fix, at_most=at_most, forbid=forbid, allow=allow, to=to)
    has_one_tp = target is not None and not target.takes_unequal_tp
    result = mixed_search.search_mixed(problem, low, partial(space_of, flags=flags), accepts, has_one_tp=has_one_tp)
    _check(problem, result, target)
    command = "autoplan.search_mixed() of Python"
    timings = options.get("timings") or ""
    file = make_mixed_file(problem, result.ranked, result.certificate, timings=timings, command=command)
    return MixedPlanResult(file=replace(file, to=flags.to), problem=problem)


def estimate_mixed(plan: MixedPlanResult | str | Path) -> MixedPlanResult:
    """Price the plan of a result or plan file of a mixed cluster again, unchanged."""
    saved = plan if isinstance(plan, MixedPlanResult) else load_mixed_plan(plan)
    costs = price_mixed(saved.problem, [saved.best.plan])
    timings, command = saved.file.timings, "autoplan.estimate_mixed() of Python"
    file = make_mixed_file(saved.problem, costs, None, timings=timings, command=command)
    return MixedPlanResult(file=file, problem=saved.problem)


def _check(problem: MixedProblem, result: MixedResult, target: Target | None) -> None:
    """Refuse a result without a plan, with the reason."""
    if result.ranked:
        return
    if result.closest is None:
        if target is not None:
            raise NoPlanError(
                f"no plan that was found is one that {target.title} starts on different nodes: leave --to out, or name "
                "another target"
            )
        raise NoPlanError(
            "no plan: the global batch leaves no replica a micro-batch, the limits no degrees that divide, or "
            "cross_vendor_collectives = false no way to share out the layers; change one of them"
        )
    stages = [stage for kind in result.closest.kinds for stage in kind.stages]
    worst = max(stages, key=lambda stage: stage.oom_z)
    where = f" on {problem.cluster.parts[worst.part].name}"
    needed = needed_text(worst.memory_bytes, worst.capacity_bytes, probability_above(worst.oom_z), where)
    raise NoPlanError(f"no plan fits: the closest needs {needed}: use more devices or a shorter sequence")
