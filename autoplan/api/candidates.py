"""Plans that `tune` may try: those that a search kept or now finds, as far as they can be started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autoplan.api.plan_files import load_plan_file, make_plan_file, problem_of
from autoplan.api.plan_run import FRAMEWORK
from autoplan.api.problem import ProblemOptions, make_problem, make_space
from autoplan.base.errors import InputError, NoPlanError
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.trainer.rules import RULES, check_model
from autoplan.launch.targets import job_of
from autoplan.search.advice import check_result
from autoplan.search.choice import distinct
from autoplan.search.study import search
from autoplan.search.tune import MARGIN, MOST_PLANS
from autoplan.spec.plan_file import PlanFile, SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Plans of one problem, the best predicted first; `timings` says whose the problem's measured times are."""

    problem: Problem
    plans: tuple[RankedPlan, ...]
    timings: str = ""

    def trial_file(self, index: int) -> PlanFile:
        """Return the file that a trial of a plan is started from: it names no timings, which are not where it runs."""
        return make_plan_file(self.problem, [self.plans[index]], None)


def kept_candidates(path: Path, db: str | None) -> Candidates:
    """Return the plans that a search kept in a plan file."""
    file = load_plan_file(path)
    return Candidates(problem=problem_of(file, db), plans=(file.best, *file.alternatives), timings=file.timings)


def searched_candidates(
    model: str,
    cluster: str,
    seq_len: int,
    options: ProblemOptions,
    flags: SpaceFlags,
    progress: Callable[[int, int | None], None] | None = None,
) -> Candidates:
    """Search the best plan of each kind in the space that `flags` describe."""
    problem = make_problem(model, cluster=cluster, seq_len=seq_len, **options)
    space = make_space(problem, flags.global_batch, fix=flags.fix, at_most=flags.at_most, forbid=flags.forbid)
    result = search(problem, space, progress, margin=MARGIN)
    check_result(problem, space, result)
    return Candidates(problem=problem, plans=distinct(result)[:MOST_PLANS], timings=options.get("timings") or "")


def trainable(candidates: Candidates) -> Candidates:
    """Keep the plans that the built-in trainer runs."""
    problem, plans = candidates.problem, candidates.plans
    if problem.framework.name != FRAMEWORK:
        raise InputError(
            f"the plans are for {problem.framework.name}, trials of the built-in trainer are for {FRAMEWORK}: "
            "say what runs them with --command -- PROGRAM ARG..."
        )
    check_model(problem.model)
    reasons = [next(iter(broken(RULES, problem.workload, ranked.plan)), "") for ranked in plans]
    if all(reasons):
        raise NoPlanError(f"the built-in trainer runs none of the plans: {reasons[0]}")
    kept = tuple(ranked for ranked, reason in zip(plans, reasons, strict=True) if not reason)
    return replace(candidates, plans=kept)


def exportable(candidates: Candidates, target: str, version: str | None) -> Candidates:
    """Keep the plans that a target of export can be told."""
    file = candidates.trial_file(0)
    kept, refusals = [], []
    for ranked in candidates.plans:
        try:
            job_of(replace(file, best=ranked), target, version)
        except InputError as error:
            refusals.append(error)
        else:
            kept.append(ranked)
    if not kept:
        raise NoPlanError(f"{target} starts none of the plans: {refusals[0]}")
    return replace(candidates, plans=tuple(kept))
