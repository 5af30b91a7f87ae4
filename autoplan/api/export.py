"""Export of launch files."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from autoplan.api.plan_files import load_any_plan_file, mixed_problem_of, problem_of
from autoplan.api.results import MixedPlanResult, PricedPlans, Result, Table
from autoplan.base.errors import AutoplanError, InputError, NoPlanError
from autoplan.base.files import encode, write_folder
from autoplan.base.units import format_bytes, format_percent, format_seconds
from autoplan.frameworks.common.job import File
from autoplan.frameworks.registry import find_target
from autoplan.frameworks.trainer.rules import check_model, check_training
from autoplan.launch.names import DEFAULT_LAUNCHER
from autoplan.launch.targets import exported, job_of, usual_start
from autoplan.search.nearest import Near
from autoplan.search.nearest import nearest as nearest_plan
from autoplan.spec.axes import LABELS
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Output of `export`: the files, with their texts if they were not written."""

    plan: str  # in words
    files: dict[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult(Result):
    """The launch files of a plan, the one to start first; `plan` describes the plan."""

    plan: str
    files: tuple[File, ...]
    warnings: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The plan, and the names of the files."""
        return f"{self.plan}: {', '.join(file.name for file in self.files)}"

    @property
    def texts(self) -> dict[str, str]:
        """The texts of the files, by name."""
        return {file.name: file.text for file in self.files}

    def table(self) -> Table:
        """Return one row for each file."""
        rows = tuple((file.name, len(file.text.splitlines()), file.executable) for file in self.files)
        return Table(columns=("file", "lines", "executable"), rows=rows)

    def to_json(self) -> str:
        """Return the files with their texts as JSON."""
        return encode(Exported(plan=self.plan, files=dict(self.texts)))

    def save(self, folder: str | Path, *, force: bool = False) -> tuple[Path, ...]:
        """Write the files to a folder; InputError if one exists without `force`, or cannot be written."""
        write_folder(Path(folder), {file.name: (file.text, file.executable) for file in self.files}, force=force)
        return tuple(Path(folder) / file.name for file in self.files)


def export(
    plan: PricedPlans | MixedPlanResult | str | Path,
    *,
    to: str,
    launcher: str = DEFAULT_LAUNCHER,
    image: str | None = None,
    nearest: bool = False,
) -> ExportResult:
    """Return the launch files of a plan, from a result or a plan file, for the target `to`.

    `to` is a target or TARGET@VERSION, `launcher` the launcher, and `image` the container image on Kubernetes or with
    skypilot.  If the target cannot express the plan, `nearest` exports the nearest one that it can; `warnings` say
    which.

    On a mixed cluster, the plan must have equal replicas with one tensor-parallel degree.

    Raises InputError if the target cannot express the plan, NoPlanError if the plan does not fit in memory.
    """
    find_target(to)
    file = load_any_plan_file(Path(plan)) if isinstance(plan, str | Path) else plan.file
    where = f"{plan}: " if isinstance(plan, str | Path) else ""
    if isinstance(file, MixedPlanFile):
        return _export_unlike(file, where, to, launcher, image)
    if file.best.verdict == "oom":
        raise NoPlanError(
            f"{where}the plan needs {format_bytes(file.best.memory_bytes)} and would run out of memory: "
            "search for one that fits"
        )
    problem = plan.problem if isinstance(plan, PricedPlans) else None
    file, warnings = _startable(file, to, problem, or_nearest=nearest)
    files = exported(file, to, launcher, image)
    return ExportResult(plan=file.best.plan.describe(), files=files, warnings=warnings)


def _export_unlike(file: MixedPlanFile, where: str, to: str, launcher: str, image: str | None) -> ExportResult:
    """Return the files that start the plan of a mixed cluster on its different nodes."""
    from autoplan.api.unlike_nodes import node_ranges  # brings the prices of mixed clusters

    if file.best.verdict == "oom":
        raise NoPlanError(f"{where}the plan would run out of memory: search for one that fits")
    try:
        nodes = node_ranges(mixed_problem_of(file), file, to)
    except InputError as error:
        raise InputError(f"{where}{error}") from None
    first = nodes[0].plan_file
    files = exported(first, to, launcher, image, unlike_nodes=nodes)
    return ExportResult(plan=first.best.plan.describe(), files=files)


def _startable(
    file: PlanFile, to: str, problem: Problem | None, *, or_nearest: bool
) -> tuple[PlanFile, tuple[str, ...]]:
    """Return `file`, or with `or_nearest` the nearest plan that `to` can express, and a warning.

    Without `or_nearest`, the error names the single change that would fix it.
    """
    find_target(to, file.framework)  # where this refuses, no other plan would do
    try:
        job_of(file, to)
    except InputError as error:
        try:
            near = _nearest(file, to, problem, most_changes=2 if or_nearest else 1)
        except AutoplanError:  # such as timings that cannot be read here
            near = None
        if near is None:
            tried = "; no legal plan near it that fits was found that it can express" if or_nearest else ""
            raise InputError(f"{error}{tried}") from None
        if not or_nearest:
            raise InputError(f"{error}; or pass --nearest: {_difference(file.best, near)}") from None
        warning = (
            f"{' '.join(str(error).split())}; wrote the nearest plan that it can start: {_difference(file.best, near)}"
        )
        return replace(file, best=near.plan), (warning,)
    return file, ()


def _nearest(file: PlanFile, to: str, problem: Problem | None, *, most_changes: int) -> Near | None:
    def accepts(plan: RankedPlan) -> bool:
        try:
            job_of(replace(file, best=plan), to)
        except InputError:
            return False
        return True

    alternatives = [alternative.plan for alternative in file.alternatives] if most_changes > 1 else []
    return nearest_plan(problem or problem_of(file), file.best.plan, accepts, alternatives, most_changes=most_changes)


def _difference(best: RankedPlan, near: Near) -> str:
    """Return what changes, and what that costs."""
    changes = ", ".join(f"{LABELS.get(axis, axis)} {value} instead of {old}" for axis, value, old in near.changes)
    ratio = near.plan.step_s / best.step_s - 1.0
    step = f"{format_seconds(near.plan.step_s)} per step instead of {format_seconds(best.step_s)}"
    return f"{changes}; {step}, {format_percent(abs(ratio))} {'slower' if ratio >= 0 else 'faster'}"


# -- what to type -----------------------------------------------------------------------------------------------------


def start_of(file: PlanFile | MixedPlanFile, path: Path, launcher: str = DEFAULT_LAUNCHER) -> str:
    """Return the command that exports the plan at `path`; an `AutoplanError` says why there is none."""
    # What runs today, what was searched for, what the facts are of and what bears the name of the rules come first.
    today = file.today.target if isinstance(file, PlanFile) and file.today else ""
    searched = file.space.to if file.space else ""
    searched_name = searched.partition("@")[0]
    target = usual_start(file.framework, file.training, today, searched_name)
    target = searched if target == searched_name else target  # in the version that was searched for
    by = "" if launcher == DEFAULT_LAUNCHER else f" --launcher {launcher}"
    command = f"autoplan export {shlex.quote(str(path))} --to {target}{by} --out launch"
    if isinstance(file, MixedPlanFile):
        _export_unlike(file, "", target, launcher, None)
        return command
    try:
        job_of(file, target)
    except InputError:
        _startable(file, target, None, or_nearest=True)
        return f"{command} --nearest"
    return command


def measurement(file: PlanFile, path: Path) -> str:
    """Return the command that tunes over the plans close to the one at `path`."""
    command = f"autoplan tune {shlex.quote(str(path))}"
    try:
        check_training(file.training)
        check_model(file.model)
    except InputError:
        is_built_in = False
    else:
        is_built_in = file.framework.rules == "trainer"
    return command if is_built_in else f"{command} --command -- PROGRAM"


def next_step(file: PlanFile | MixedPlanFile, path: Path) -> tuple[str, str]:
    """Return (label, next command), or why the plan at `path` has no launch files."""
    try:
        return "next", start_of(file, path)
    except AutoplanError as error:
        return "no launch script", str(error)
