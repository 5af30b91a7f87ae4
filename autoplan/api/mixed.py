"""Searches and estimates on clusters with unlike parts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Unpack

from autoplan.api.plan_files import load_mixed_plan, make_mixed_file
from autoplan.api.problem import ProblemOptions, load_any_cluster, make_mixed_problem
from autoplan.api.results import MixedPlanResult
from autoplan.api.unlike_nodes import is_expressible
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.units import format_bytes
from autoplan.base.values import parse_batches
from autoplan.cost.mixed.estimate import estimate_mixed as price_mixed
from autoplan.frameworks.common.job import Target
from autoplan.frameworks.registry import facts_of, find_target
from autoplan.launch.targets import refused_training
from autoplan.search import mixed_search
from autoplan.spec.enums import Sharding
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.mixed_result import MixedResult
from autoplan.spec.model import ModelSpec
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster

SHARDINGS = ("zero2", "zero3")  # that may be forbidden


def search_mixed(
    model: str | Path | ModelSpec,
    *,
    cluster: str | Path | MixedCluster,
    global_batch: int | str,
    seq_len: int,
    forbid: Iterable[str] = (),
    to: str | None = None,
    **options: Unpack[ProblemOptions],
) -> MixedPlanResult:
    """Return the fastest plans that fit on a cluster with unlike parts, best first.

    `cluster` names clusters joined by + ("h100-sxm:4x8+a100-sxm:4x8"), a file of parts, or is a loaded one;
    `global_batch` is in sequences, `seq_len` in tokens; `forbid` leaves out "zero2" or "zero3".  `to` is the target of
    export that has to be able to start the plans: equal replicas, whose stages have one tensor-parallel degree; they
    are priced as those of its framework, unless the options name one.

    Raises InputError where something that was given cannot be used, NoPlanError where no plan is legal or fits.
    """
    parts = load_any_cluster(cluster)
    if isinstance(parts, ClusterSpec):
        raise InputError(f"{cluster} has equal nodes: use autoplan.search")
    if to is not None:
        options.setdefault("framework", facts_of(find_target(to).name))
    problem = make_mixed_problem(model, cluster=parts, seq_len=seq_len, **options)
    accepts, target = None, find_target(to, problem.framework) if to is not None else None
    if target is not None:
        if why := refused_training(target, problem.training):
            raise InputError(why)
        accepts = partial(is_expressible, problem, target=target)
    low, high = parse_batches(str(global_batch))
    if low != high:
        raise InputError(f"--global-batch {global_batch}: a mixed cluster takes one number, not a range")
    result = mixed_search.search_mixed(problem, low, _shardings(tuple(forbid)), accepts)
    _check(problem, result, target)
    command = "autoplan.search_mixed() of Python"
    file = make_mixed_file(problem, result.ranked, result.certificate, command=command)
    warnings = tuple(
        f"{part.name} alone is faster, {plan.step_s:.3g} s ({plan.plan.describe()}): search on that part for its plan"
        for part, plan in zip(problem.cluster.parts, result.alone, strict=True)
        if plan and plan.step_s < file.best.step_s
    )
    return MixedPlanResult(file=file, problem=problem, warnings=warnings)


def estimate_mixed(plan: MixedPlanResult | str | Path) -> MixedPlanResult:
    """Price the plan of a result, or of a plan file of a mixed cluster, again as it is."""
    saved = plan if isinstance(plan, MixedPlanResult) else load_mixed_plan(plan)
    costs = price_mixed(saved.problem, [saved.best.plan])
    file = make_mixed_file(saved.problem, costs, None, command="autoplan.estimate_mixed() of Python")
    return MixedPlanResult(file=file, problem=saved.problem)


def _shardings(forbid: tuple[str, ...]) -> tuple[Sharding, ...]:
    words = tuple(choice.removeprefix("sharding=") for choice in forbid)
    for choice in words:
        if choice not in SHARDINGS:
            raise InputError(f"--forbid {choice}: on a mixed cluster only {' and '.join(SHARDINGS)} may be forbidden")
    return tuple(sharding for sharding in Sharding if sharding not in words)


def _check(problem: MixedProblem, result: MixedResult, target: Target | None) -> None:
    """Refuse a result without a plan, with the reason."""
    if result.ranked:
        return
    if result.closest is None:
        if target is not None:
            raise NoPlanError(
                f"no plan that was found is one that {target.title} starts on unlike nodes: leave --to out, or name "
                "another target"
            )
        raise NoPlanError(
            "no plan: the global batch leaves no replica a micro-batch, or cross_vendor_collectives = false leaves no "
            "way to share out the layers; change one of them"
        )
    stages = [stage for kind in result.closest.kinds for stage in kind.stages]
    worst = max(stages, key=lambda stage: stage.oom_z)
    needed = f"{format_bytes(worst.memory_bytes)} of {format_bytes(worst.capacity_bytes)}"
    raise NoPlanError(
        f"no plan fits: the closest needs {needed} on {problem.cluster.parts[worst.part].name}: "
        "use more devices or a shorter sequence"
    )
