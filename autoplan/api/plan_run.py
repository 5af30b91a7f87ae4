"""Real runs of a plan, with the built-in trainer or your own program, compared with the prediction."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoplan.api.plan_files import is_mixed_file, load_mixed_file, load_plan_file, mixed_problem_of, problem_of
from autoplan.api.program_run import Listeners, Progress, run_command
from autoplan.api.run_keeper import RunKeeper
from autoplan.api.timings import with_timings
from autoplan.base.errors import AutoplanError, AutoplanWarning, InputError
from autoplan.base.processes import RankPlace, check_torch, place_from
from autoplan.base.values import parse_duration
from autoplan.cost.estimate import estimate
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.trainer.log import line
from autoplan.frameworks.trainer.rules import check_training
from autoplan.readers.calibration import built_in_calibration
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.started_plan import started_plan
from autoplan.trainer.run import run_task, usual_data
from autoplan.trainer.task import Advance, Command, PredictedRun, RunFile, Task, TrainingReport

FRAMEWORK = "torch"  # what the trainer is priced as
EMULATION = "these cores have no bf16 units, and are many times as fast in fp32"


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
    traces: Path | None = None,
    db: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    hand_over: Callable[[RunFile], None] = lambda file: None,
) -> RunFile | None:
    """Train with the plan file `plan` for some steps, and return the measurements with the prediction.

    The built-in trainer runs it on this node or, under torchrun, srun or mpirun, with one rank per device.  With
    `program`, a command and its arguments, it runs that instead and reads its log.  `steps` are timed after `warmup`
    ones.  `check` first trains the same in a single process and compares.  `limit` is the time for a step, or without
    output of the program, after which it counts as hung.  `traces` is a folder for profiler traces of a few extra
    steps, one per rank.  The run is stored in the timing database `db`, if given; `hand_over` receives the result
    before that.

    Returns None on ranks other than the first.  Raises InputError if the plan cannot be run, CrewError if ranks are
    lost, ProgramError if the program fails, and AutoplanError if the plan trains incorrectly.
    """
    follow = Listeners(log=log, force=force, progress=progress or (lambda done, total: None), say=say)
    task_options = {"steps": steps, "warmup": warmup, "limit_s": parse_duration(limit), "data": data, "check": check}
    if is_mixed_file(Path(plan)):
        if program or db is not None:
            raise InputError(f"{plan} is for a mixed cluster: the built-in trainer runs it, without --command and --db")
        return _run_mixed(load_mixed_file(Path(plan)), task_options, traces, follow, hand_over)
    return _run_alike(Path(plan), program, task_options, traces, db, follow, hand_over)


def _run_alike(
    path: Path,
    program: Sequence[str],
    task_options: Mapping[str, Any],
    traces: Path | None,
    db: str | None,
    follow: Listeners,
    hand_over: Callable[[RunFile], None],
) -> RunFile | None:
    """Run a plan of equal nodes."""
    file, problem = plan_to_run(path, db)
    plan = file.best.plan
    place = None if program else place_from(os.environ)
    leads = place is None or place.rank == 0
    keeper = RunKeeper(db) if db is not None and leads else None
    if not program:
        problem = of_trainer(problem, file.timings, db)
        if leads:
            warn_of_emulation(problem)
    predicted = predicted_run(problem, plan)
    task: Task | Command
    report: TrainingReport | None
    with keeper.followed(problem, plan, predicted, is_own=not program) if keeper else nullcontext():
        if program:
            timed = {name: task_options[name] for name in ("steps", "warmup", "limit_s")}
            task, report = run_command(problem, plan, program, follow, **timed)
        else:
            task = _traced(_task(problem, plan, **task_options), traces)
            report = _train(task, place, follow)

    def keep(measured: RunFile) -> None:
        if keeper and (disturbance := keeper.keep(problem, measured)):
            follow.say(f"{disturbance}: stored as contaminated, so that no calibration uses this run")

    return _handed_over(task, predicted, report, hand_over, keep)


def _traced(task: Task, folder: Path | None) -> Task:
    if folder is None:
        return task
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes to stderr otherwise
    return replace(task, trace_folder=str(folder.absolute()))


def _task(
    problem: Problem | MixedProblem,
    plan: ParallelPlan,
    *,
    steps: int,
    warmup: int,
    limit_s: float,
    data: str | None,
    check: bool,
    micro_batches: tuple[tuple[int, int], ...] = (),
) -> Task:
    return Task(
        model=problem.model,
        plan=plan,
        seq_len=problem.training.seq_len,
        dtype=plan.precision,  # type: ignore[arg-type]  # `check_task` refuses others
        num_steps=steps,
        num_warmup=warmup,
        data="synthetic" if (data or usual_data(problem.model)) == "synthetic" else "text",
        checks=check,
        limit_s=limit_s,
        micro_batches=micro_batches,
    )


def _handed_over(
    task: Task | Command,
    predicted: PredictedRun,
    report: TrainingReport | None,
    hand_over: Callable[[RunFile], None],
    keep: Callable[[RunFile], None] = lambda run: None,
) -> RunFile | None:
    """Return the run of the first rank, once it was handed over and kept; refuse one that trained wrongly."""
    if report is None:
        return None
    measured = RunFile(task=task, predicted=predicted, measured=report)
    try:
        hand_over(measured)
    finally:  # a disk that is full for the one need not be for the other
        if report.check is None or report.check.holds:
            keep(measured)
    if report.check is not None and not report.check.holds:
        raise AutoplanError(
            f"the plan does not train like a single process: losses differ by {report.check.loss:.2g}, "
            f"gradients by {report.check.gradients:.2g}, weights by {report.check.weights:.2g} of their size"
        )
    return measured


def _mixed_run(file: MixedPlanFile, **task_options: Any) -> tuple[Task, PredictedRun]:
    problem = mixed_problem_of(file)
    check_training(problem.training)
    if problem.framework.name != FRAMEWORK:
        framework = load_framework(FRAMEWORK)
        calibrations = tuple(built_in_calibration(framework, part.device) for part in problem.cluster.parts)
        problem = replace(problem, framework=framework, calibrations=calibrations)
    started = started_plan(problem, file.best.plan, unequal_batches=True)
    (cost,) = estimate_mixed(problem, [file.best.plan])
    alike = [problem.as_if(at, problem.nodes_of(file.best.plan)) for at in file.best.plan.parts]
    batch = alike[0].batch([started.plan])
    predicted = PredictedRun(
        device=" and ".join(dict.fromkeys(problem.cluster.parts[at].device.name for at in started.node_parts)),
        step_s=cost.step_s,
        low_s=cost.low_s,
        high_s=cost.high_s,
        terms_s=cost.terms_s,
        peak_bytes=max(float(estimate(part, batch).logged_memory_bytes[0]) for part in alike),
    )
    return _task(problem, started.plan, micro_batches=started.micro_batches, **task_options), predicted


def _run_mixed(
    file: MixedPlanFile,
    task_options: Mapping[str, Any],
    traces: Path | None,
    follow: Listeners,
    hand_over: Callable[[RunFile], None],
) -> RunFile | None:
    task, predicted = _mixed_run(file, **task_options)
    report = _train(_traced(task, traces), place_from(os.environ), follow)
    return _handed_over(task, predicted, report, hand_over)


def plan_to_run(path: Path, url: str | None) -> tuple[PlanFile, Problem]:
    """Return a plan file and its problem, with times of the database at `url`, else of the user's own."""
    file = load_plan_file(path)
    try:
        return file, problem_of(file, url)
    except AutoplanError:
        if url is not None:
            with suppress(AutoplanError):
                return file, problem_of(file)
        raise


def _train(task: Task, place: RankPlace | None, follow: Listeners) -> TrainingReport | None:
    """Return the report of the built-in trainer; None where this is another rank than the first."""
    check_torch()
    num_done = 0
    with follow.opened_log() as keep:

        def advance(now: Advance) -> None:
            nonlocal num_done
            num_done = now.step + 1
            keep(line(num_done, now.step_s, now.loss).encode())
            follow.progress(num_done, task.num_warmup + task.num_steps)

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
    """Return the problem as the built-in trainer runs it, with its own units from the database of its times."""
    check_training(problem.training)
    if problem.framework.name == FRAMEWORK:
        return problem
    framework = load_framework(FRAMEWORK)
    calibration = built_in_calibration(framework, problem.cluster.device)
    problem = replace(problem, framework=framework, calibration=calibration)
    for source in dict.fromkeys((url, None)) if timings == "db" else ():  # as `plan_to_run` looked for them
        with suppress(AutoplanError):
            return with_timings(problem, timings, source)
    return problem


def predicted_run(problem: Problem, plan: ParallelPlan) -> PredictedRun:
    """Return what is predicted of a run by `plan`."""
    cost = estimate(problem, problem.batch([plan]))
    return PredictedRun(
        device=problem.cluster.device.name,
        step_s=float(cost.step_s[0]),
        low_s=float(cost.low_s[0]),
        high_s=float(cost.high_s[0]),
        terms_s={name: float(value[0]) for name, value in cost.terms_s.items()},
        peak_bytes=float(cost.logged_memory_bytes[0]),
    )
