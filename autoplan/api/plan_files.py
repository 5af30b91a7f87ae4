"""Plan files: reading, writing, and recovery of their problem."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autoplan.api.calibrations import check_fitted
from autoplan.api.results import MixedPlanResult, PricedPlans
from autoplan.api.timings import pinned_problem, with_timings
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import decode, is_file, read_table
from autoplan.base.urls import command_line
from autoplan.base.version import __version__
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.input_rate import with_input
from autoplan.cost.provenance import shares
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.mixed_result import MixedCertificate, MixedCost
from autoplan.spec.pinned_timings import PinnedTimings
from autoplan.spec.plan_file import MIXED_FILE_VERSION, PLAN_FILE_VERSION, MixedPlanFile, PlanFile, SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.spec.ranks import hosts
from autoplan.spec.run_report import RunReport
from autoplan.spec.search_result import Certificate, Confidence, RankedPlan

KEPT_ALTERNATIVES = 19  # twenty plans with the best


def is_plan_file(path: Path) -> bool:
    """Return whether a path names a plan file of a cluster of equal nodes."""
    return path.suffix == ".json" and is_file(path) and "schema_version" in read_table(path)


def is_mixed_file(path: Path) -> bool:
    """Return whether a path names a plan file of a mixed cluster."""
    return path.suffix == ".json" and is_file(path) and "mixed_schema_version" in read_table(path)


def read_plans(path: str | Path, *, db: str | None = None) -> PricedPlans:
    """Return the plans of a plan file for equal nodes; see `load_plan`."""
    file = load_plan_file(Path(path))
    return PricedPlans(file=file, problem=problem_of(file, db))


def load_mixed_plan(path: str | Path) -> MixedPlanResult:
    """Return the plans of a plan file of a mixed cluster; raises InputError as `read_plans` does."""
    file = load_mixed_file(Path(path))
    return MixedPlanResult(file=file, problem=mixed_problem_of(file))


def load_plan_file(path: Path) -> PlanFile:
    """The plan file at `path`, of a cluster of equal nodes."""
    return _plan_file(read_table(path), path)


def _plan_file(table: dict[str, Any], path: Path) -> PlanFile:
    if "schema_version" not in table:
        remedy = (
            "plans of mixed clusters are not read here"
            if "mixed_schema_version" in table
            else "pass the output of autoplan search"
        )
        raise InputError(f"{path} is no plan file of a cluster of equal nodes: {remedy}")
    return decode(PlanFile, table, str(path))


def load_mixed_file(path: Path) -> MixedPlanFile:
    """The plan file at `path`, of a mixed cluster."""
    return decode(MixedPlanFile, read_table(path), str(path))


def load_any_plan_file(path: Path) -> PlanFile | MixedPlanFile:
    """The plan file at `path`, of whatever cluster; it is read once, as a pipe can be."""
    table = read_table(path)
    return decode(MixedPlanFile, table, str(path)) if "mixed_schema_version" in table else _plan_file(table, path)


def holds_answer(path: Path, result: PricedPlans | MixedPlanResult) -> bool:
    """Return whether the plan file at `path` has the same answer as `result`, whatever command wrote it."""
    try:
        if not is_plan_file(path) and not is_mixed_file(path):
            return False
        before = read_table(path)
    except InputError:  # cannot be read
        return False
    asking_keys = {"command", "versions"}
    now = json.loads(result.to_json())
    return {key: before.get(key) for key in before.keys() - asking_keys} == {
        key: now[key] for key in now.keys() - asking_keys
    }


def problem_of(file: PlanFile, url: str | None = None) -> Problem:
    """Return the problem of a plan file, with the timings that it names."""
    problem = Problem(**_stated(file), calibration=file.calibration)
    return _timed(problem, file, file.pinned, url) if file.timings else problem


def _timed(problem: Problem, file: PlanFile | MixedPlanFile, pinned: PinnedTimings | None, url: str | None) -> Problem:
    """Return the problem with the timings that a plan file names."""
    if pinned is not None:
        return pinned_problem(problem, file.timings, pinned, url)
    try:  # a file of before the times travelled with it
        return with_timings(problem, file.timings, url)
    except AutoplanError as error:
        if file.timings != "db" or url is not None:
            raise
        where = "name the database that it was made with: --db or AUTOPLAN_DB"
        raise InputError(f"the plan is based on measured times that are not here: {where} ({error})") from None


def retimed_problem(file: PlanFile, source: str, url: str | None) -> Problem:
    """Return the problem of a plan file, with current timings instead of its own."""
    problem = with_timings(problem_of(replace(file, timings="", pinned=None)), source, url)
    check_fitted(problem.calibration, problem)
    return problem


def make_plan_file(
    problem: Problem,
    plans: Sequence[RankedPlan],
    certificate: Certificate | None,
    *,
    timings: str = "",
    choice: Confidence | None = None,
    run: RunReport | None = None,
    space: SpaceFlags | None = None,
    command: str | None = None,
) -> PlanFile:
    """Return the plan file of `plans`, best first; `timings` names the source of the measured timings."""
    plans = [with_input(problem, plan) for plan in plans[: 1 + KEPT_ALTERNATIVES]]
    best = problem.batch([plans[0].plan])
    listed = replace(best, placement=None)
    return PlanFile(
        schema_version=PLAN_FILE_VERSION,
        versions=_versions(searched=certificate is not None),
        command=command_line() if command is None else command,
        **_stated(problem),
        calibration=problem.calibration,
        best=plans[0],
        stages=stage_costs(problem, plans[0].plan),
        alternatives=tuple(plans[1:]),
        certificate=certificate,
        timings=timings,
        pinned=PinnedTimings.of(problem.timings, with_times=timings == "db") if timings else None,
        rests_on={name: float(share[0]) for name, share in shares(problem, best).items()},
        hosts=hosts(problem.cluster, plans[0].plan),
        listed_step_s=float(estimate(problem, listed).step_s[0]) if best.placement else None,
        choice=None if plans[0].terms_s["input"] else choice,  # plans that wait for samples are equally fast
        run=run,
        space=space,
    )


def mixed_problem_of(file: MixedPlanFile) -> MixedProblem:
    """Return the problem of the plan file of a mixed cluster."""
    problem = MixedProblem(**_stated(file), calibrations=file.calibrations)
    if not file.timings:
        return problem
    alone = [_timed(problem.alone(part), file, pinned, None) for part, pinned in enumerate(file.pinned)]
    return replace(problem, timings=tuple(part.timings for part in alone))


def make_mixed_file(
    problem: MixedProblem,
    plans: Sequence[MixedCost],
    certificate: MixedCertificate | None,
    *,
    timings: str = "",
    space: SpaceFlags | None = None,
    command: str | None = None,
) -> MixedPlanFile:
    """The plan file of `plans` of a mixed cluster, best first; `timings` as in `make_plan_file`."""
    tables = problem.timings if timings else ()
    return MixedPlanFile(
        mixed_schema_version=MIXED_FILE_VERSION,
        versions=_versions(searched=certificate is not None),
        command=command_line() if command is None else command,
        **_stated(problem),
        calibrations=problem.calibrations,
        best=plans[0],
        alternatives=tuple(plans[1 : 1 + KEPT_ALTERNATIVES]),
        certificate=certificate,
        space=space,
        timings=timings,
        pinned=tuple(PinnedTimings.of(table, with_times=timings == "db") for table in tables),
    )


def _stated(source: Problem | MixedProblem | PlanFile | MixedPlanFile) -> dict[str, Any]:
    """Return what a problem and its plan file have in common."""
    names = ("model", "training", "cluster", "framework", "reserve_bytes")
    return {name: getattr(source, name) for name in names}


def _versions(*, searched: bool) -> dict[str, str]:
    """Return the versions of the software behind the numbers of a file."""
    libraries = ("msgspec", "numpy", *(("optuna",) if searched else ()))
    library_versions = {name: version(name) for name in libraries}
    return {"autoplan": __version__, "python": platform.python_version(), **library_versions}
