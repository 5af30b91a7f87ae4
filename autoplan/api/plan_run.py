"""Run of a plan for real, by the built-in trainer or a program of the user, beside its prediction."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.api.plan_files import read_plan
from autoplan.api.program_run import opened_log, run_command
from autoplan.api.timings import with_timings
from autoplan.base.errors import AutoplanError, AutoplanWarning, StoreError
from autoplan.base.processes import CrewError, RankPlace, check_torch, place_from
from autoplan.base.values import parse_duration
from autoplan.cost.estimate import estimate
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.trainer.log import line
from autoplan.jobs.program import ProgramError
from autoplan.read.calibration import built_in_calibration
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.trainer.run import run_task, usual_data
from autoplan.trainer.task import Advance, Command, PredictedRun, RunFile, Task, TrainingReport

if TYPE_CHECKING:  # SQLAlchemy, which a run that is not stored does not need
    from autoplan.api.run_keeper import RunKeeper

FRAMEWORK = "torch"  # what the trainer is priced as
EMULATION = "these cores have no bf16 units, and are many times as fast in fp32"

Progress = Callable[[int, int], None]  # (steps done, all of them)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Run that ended well: what was run, predicted and measured."""

    file: RunFile
    problem: Problem
    keeper: RunKeeper | None = None  # where it is to be stored

    @property
    def is_right(self) -> bool:
        """Tell whether the plan trains what one process does, as far as that was checked."""
        return self.file.measured.check is None or self.file.measured.check.holds

    def store(self) -> None:
        """Keep the run in the timing database, if one was named and the plan trains what it should."""
        if self.keeper and self.is_right:
            log_of = getattr(self.file.task, "log_of", "")
            self.keeper.keep(self.problem, self.file.task.plan, self.file.predicted, self.file.measured, log_of=log_of)

    def check(self) -> None:
        """Refuse a plan that trains something else than one process does."""
        check = self.file.measured.check
        if check is not None and not check.holds:
            raise AutoplanError(
                f"the plan trains something else than one process does: losses differ by {check.loss:.2g}, "
                f"gradients by {check.gradients:.2g}, weights by {check.weights:.2g} of their size"
            )


def run(
    plan: str | Path,
    *,
    program: Sequence[str] = (),
    steps: int = 10,
    warmup: int = 2,
    data: str | None = None,
    check: bool = False,
    limit: str = "5m",
    log: Path | None = None,
    db: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RunFile | None:
    """Train by the plan file `plan` for some steps, and return what was measured beside what was predicted.

    The built-in trainer runs it, on this node or, under torchrun, srun or mpirun, with one rank for each device; or
    `program`, a command with its arguments, whose log is read.  `steps` are timed after `warmup` ones; with `check`
    one process trains the same first and is compared.  `limit` is the time of a step, or of the program's silence,
    after which it is taken to hang.  The run is kept in the timing database `db` if that is given.

    Returns None on other ranks than the first.  Raises InputError where the plan cannot be run, CrewError where ranks
    are lost, ProgramError where the program fails, and AutoplanError where the plan trains something else.
    """
    measured = measure(
        plan,
        program=program,
        steps=steps,
        warmup=warmup,
        data=data,
        check=check,
        limit=limit,
        log=log,
        db=db,
        stores=db is not None,
        force=force,
        progress=progress,
        say=say,
    )
    if measured is None:
        return None
    measured.store()
    measured.check()
    return measured.file


def measure(
    plan: str | Path,
    *,
    program: Sequence[str] = (),
    steps: int = 10,
    warmup: int = 2,
    data: str | None = None,
    check: bool = False,
    limit: str = "5m",
    log: Path | None = None,
    db: str | None = None,
    stores: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> MeasuredRun | None:
    """Run a plan as `run` does, and return what was measured before it is stored; a run that fails is stored here."""
    limit_s = parse_duration(limit)
    problem, wanted, timings = plan_to_run(Path(plan), db)
    place = None if program else place_from(os.environ)
    leads = place is None or place.rank == 0
    keeper = _keeper(db) if stores and leads else None
    if not program:
        problem = of_trainer(problem, timings, db)
        if leads:
            warn_of_emulation(problem)
    predicted = _predicted(problem, wanted)
    task: Task | Command
    report: TrainingReport | None
    try:
        if program:
            task, report = run_command(
                problem,
                wanted,
                program,
                steps=steps,
                warmup=warmup,
                limit_s=limit_s,
                log=log,
                force=force,
                progress=progress,
                say=say,
            )
        else:
            task = _task(problem, wanted, steps=steps, warmup=warmup, data=data, checks=check, limit_s=limit_s)
            report = _train(task, place, log=log, force=force, progress=progress)
    except (ProgramError, CrewError) as error:
        try:
            if keeper:
                keeper.keep_failure(problem, wanted, predicted, error, is_own=not program)
        except StoreError as unkept:
            raise AutoplanError(f"{error}; and this was not stored: {unkept}") from None
        raise
    if report is None:
        return None
    return MeasuredRun(file=RunFile(task=task, predicted=predicted, measured=report), problem=problem, keeper=keeper)


def _keeper(url: str | None) -> RunKeeper:
    from autoplan.api.run_keeper import RunKeeper  # brings SQLAlchemy

    return RunKeeper(url)


def plan_to_run(path: Path, url: str | None) -> tuple[Problem, ParallelPlan, str]:
    """Return the plan of a file, with times of the database at `url`, or of the user's own if that is for the run."""
    try:
        return read_plan(path, url)
    except AutoplanError:
        if url is not None:
            with suppress(AutoplanError):
                return read_plan(path)
        raise


def _task(
    problem: Problem, plan: ParallelPlan, *, steps: int, warmup: int, data: str | None, checks: bool, limit_s: float
) -> Task:
    """Return the task of the built-in trainer."""
    return Task(
        model=problem.model,
        plan=plan,
        seq_len=problem.training.seq_len,
        dtype=plan.precision,  # type: ignore[arg-type]  # `check_task` refuses others
        num_steps=steps,
        num_warmup=warmup,
        data="synthetic" if (data or usual_data(problem.model)) == "synthetic" else "text",
        checks=checks,
        limit_s=limit_s,
    )


def _train(
    task: Task, place: RankPlace | None, *, log: Path | None, force: bool, progress: Progress | None
) -> TrainingReport | None:
    """Return the report of the built-in trainer; None where this is another rank than the first."""
    check_torch()
    num_done = 0
    with opened_log(log, force=force) as keep:

        def advance(now: Advance) -> None:
            nonlocal num_done
            num_done = now.step + 1
            keep(line(num_done, now.step_s, now.loss).encode())
            if progress:
                progress(num_done, task.num_warmup + task.num_steps)

        try:
            return run_task(task, place, advance=advance)
        except KeyboardInterrupt:
            raise AutoplanError(f"interrupted after {num_done} steps: the ranks were ended") from None


def warn_of_emulation(problem: Problem) -> None:
    """Warn where the trainer would run on cores that have no units for the plan's precision."""
    from autoplan.profiler.machine.hardware import emulates_bf16  # looks at hardware, for this alone

    if problem.cluster.device.vendor == "cpu" and problem.training.precision == "bf16" and emulates_bf16():
        warnings.warn(f"{EMULATION}: plan with --precision fp32", AutoplanWarning, stacklevel=2)


def of_trainer(problem: Problem, timings: str, url: str | None) -> Problem:
    """Return the problem as the built-in trainer runs it, whatever framework it was made for.

    Of the database whose times are in it, the trainer's own units count then too.
    """
    if problem.framework.name == FRAMEWORK:
        return problem
    framework = load_framework(FRAMEWORK)
    calibration = built_in_calibration(framework, problem.cluster.device)
    problem = replace(problem, framework=framework, calibration=calibration)
    for source in dict.fromkeys((url, None)) if timings == "db" else ():  # as `plan_to_run` looked for them
        with suppress(AutoplanError):
            return with_timings(problem, timings, source)
    return problem


def _predicted(problem: Problem, plan: ParallelPlan) -> PredictedRun:
    cost = estimate(problem, PlanBatch.of([plan], problem.model.num_layers))
    return PredictedRun(
        device=problem.cluster.device.name,
        step_s=float(cost.step_s[0]),
        low_s=float(cost.low_s[0]),
        high_s=float(cost.high_s[0]),
        terms_s={name: float(value[0]) for name, value in cost.terms_s.items()},
        peak_bytes=float(cost.logged_memory_bytes[0]),
    )
