"""Which plans does `autoplan tune` try?  Those that a search kept or now finds, as far as they can be started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.base.errors import InputError, NoPlanError

if TYPE_CHECKING:
    from autoplan.api.problem import ProblemOptions
    from autoplan.spec.plan_file import PlanFile, SpaceFlags
    from autoplan.spec.problem import Problem
    from autoplan.spec.search_result import RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Plans of one problem, the best predicted first; `timings` says whose the problem's measured times are."""

    problem: Problem
    plans: tuple[RankedPlan, ...]
    timings: str = ""

    def trial_file(self, at: int) -> PlanFile:
        """What a trial of one of them is started from: it names no timings, which are not where it runs."""
        from autoplan.api.plan_files import make_plan_file

        return make_plan_file(self.problem, [self.plans[at]], None)


def kept_candidates(path: Path, db: str | None) -> Candidates:
    """The plans that a search kept in a plan file."""
    from autoplan.api.plan_files import load_plan_file, problem_of

    file = load_plan_file(path)
    return Candidates(problem=problem_of(file, db), plans=(file.best, *file.alternatives), timings=file.timings)


def searched_candidates(
    model: str, cluster: str, seq_len: int, options: ProblemOptions, asked: SpaceFlags, *, quiet: bool
) -> Candidates:
    """The best plan of each kind in the space that is asked for."""
    from autoplan.api.problem import make_problem, make_space
    from autoplan.cli.progress import progress_bar
    from autoplan.search.advice import check_result
    from autoplan.search.choice import distinct
    from autoplan.search.study import search
    from autoplan.search.tune import MARGIN, MOST_PLANS

    problem = make_problem(model, cluster=cluster, seq_len=seq_len, **options)
    space = make_space(problem, asked.global_batch, fix=asked.fix, at_most=asked.at_most, allow=asked.allow)
    with progress_bar(quiet=quiet) as advance:
        result = search(problem, space, advance, margin=MARGIN)
    check_result(problem, space, result)
    return Candidates(problem=problem, plans=distinct(result)[:MOST_PLANS], timings=options.get("timings") or "")


def trainable(candidates: Candidates) -> Candidates:
    """Those that the built-in trainer runs."""
    from autoplan.cli.run import FRAMEWORK
    from autoplan.frameworks.common.rules import broken
    from autoplan.frameworks.trainer.rules import RULES, check_model

    problem, plans = candidates.problem, candidates.plans
    if problem.framework.name != FRAMEWORK:
        raise InputError(
            f"the plans are for {problem.framework.name}, trials of the built-in trainer are for {FRAMEWORK}: "
            "say what runs them with --command -- PROGRAM ARG..."
        )
    check_model(problem.model)
    reasons = [next(iter(broken(RULES, problem.workload, one.plan)), "") for one in plans]
    if all(reasons):
        raise NoPlanError(f"the built-in trainer runs none of the plans: {reasons[0]}")
    kept = tuple(one for one, reason in zip(plans, reasons, strict=True) if not reason)
    return replace(candidates, plans=kept)


def exportable(candidates: Candidates, target: str, version: str | None) -> Candidates:
    """Those that a target of export can be told."""
    from autoplan.launch.targets import job_of

    file = candidates.trial_file(0)
    kept, refusals = [], []
    for one in candidates.plans:
        try:
            job_of(replace(file, best=one), target, version)
        except InputError as error:
            refusals.append(error)
        else:
            kept.append(one)
    if not kept:
        raise NoPlanError(f"{target} starts none of the plans: {refusals[0]}")
    return replace(candidates, plans=tuple(kept))
