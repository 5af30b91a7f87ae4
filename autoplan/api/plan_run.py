"""Run of a plan for real, by the built-in trainer or a program of the user, beside its prediction."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autoplan.api.calibrations import described_machine
from autoplan.api.plan_files import is_mixed_file, load_mixed_file, load_plan_file, mixed_problem_of, problem_of
from autoplan.api.timings import with_timings
from autoplan.base.errors import AutoplanError, AutoplanWarning, InputError, StoreError
from autoplan.base.files import check_target, refused_writes
from autoplan.base.processes import CrewError, RankPlace, check_torch, place_from, signal_name
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.base.values import parse_duration
from autoplan.cost.estimate import estimate
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.frameworks.logs import Batch, LoggedRun, LogReader
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.trainer.log import line
from autoplan.frameworks.trainer.rules import check_training
from autoplan.jobs.program import Ending, ProgramError, run_program
from autoplan.profiler.record import MOST_SAMPLES, Fingerprint
from autoplan.profiler.run_record import RunRecord
from autoplan.readers.calibration import built_in_calibration
from autoplan.runs.failure import LogEnd
from autoplan.spec.mixed_problem import MixedProblem, started_plan
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.problem import Problem
from autoplan.trainer.run import run_task, usual_data
from autoplan.trainer.task import Advance, Command, PredictedRun, RunFile, Task, TrainingReport

if TYPE_CHECKING:  # Optuna, which a run does not need
    from autoplan.profiler.machine.watch import Look
    from autoplan.search.tune import Tuning

FRAMEWORK = "torch"  # what the trainer is priced as
EMULATION = "these cores have no bf16 units, and are many times as fast in fp32"

Progress = Callable[[int, int], None]  # (steps done, all of them)


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
    """Train by the plan file `plan` for some steps, and return what was measured beside what was predicted.

    The built-in trainer runs it, on this node or, under torchrun, srun or mpirun, with one rank for each device; or
    `program`, a command with its arguments, whose log is read.  `steps` are timed after `warmup` ones; with `check`
    one process trains the same first and is compared.  `limit` is the time of a step, or of the program's silence,
    after which it is taken to hang; `traces` is a folder for what torch's profiler sees of some more steps, by rank.
    The run is kept in the timing database `db` if that is given; `hand_over` gets the result before.

    Returns None on other ranks than the first.  Raises InputError where the plan cannot be run, CrewError where ranks
    are lost, ProgramError where the program fails, and AutoplanError where the plan trains something else.
    """
    limit_s = parse_duration(limit)
    follow = _Follow(log=log, force=force, progress=progress or (lambda done, total: None), say=say)
    task_options: dict[str, Any] = {"steps": steps, "warmup": warmup, "limit_s": limit_s, "data": data, "check": check}
    if is_mixed_file(Path(plan)):
        if program or db is not None:
            raise InputError(f"{plan} is for a mixed cluster: the built-in trainer runs it, without --command and --db")
        return _run_mixed(load_mixed_file(Path(plan)), task_options, traces, follow, hand_over)
    file, problem = plan_to_run(Path(plan), db)
    file_plan = file.best.plan
    place = None if program else place_from(os.environ)
    leads = place is None or place.rank == 0
    keeper = RunKeeper(db) if db is not None and leads else None
    if not program:
        problem = of_trainer(problem, file.timings, db)
        if leads:
            warn_of_emulation(problem)
    predicted = predicted_run(problem, file_plan)
    task: Task | Command
    report: TrainingReport | None
    with keeper.followed(problem, file_plan, predicted, is_own=not program) if keeper else nullcontext():
        if program:
            task, report = _run_command(
                problem, file_plan, program, follow, steps=steps, warmup=warmup, limit_s=limit_s
            )
        else:
            task = _traced(_task(problem, file_plan, **task_options), traces)
            report = _train(task, place, follow)

    def keep(measured: RunFile) -> None:
        if keeper and (disturbance := keeper.keep(problem, measured)):
            say(f"{disturbance}: kept as contaminated, no calibration learns from this run")

    return _handed_over(task, predicted, report, hand_over, keep)


def _traced(task: Task, folder: Path | None) -> Task:
    """Return the task with traces of its ranks in a folder, if one is given."""
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
    num_microbatches: tuple[int, ...] = (),
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
        num_microbatches=num_microbatches,
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
            f"the plan trains something else than one process does: losses differ by {report.check.loss:.2g}, "
            f"gradients by {report.check.gradients:.2g}, weights by {report.check.weights:.2g} of their size"
        )
    return measured


def _mixed_run(file: MixedPlanFile, **task_options: Any) -> tuple[Task, PredictedRun]:
    """Return the task of a plan of a mixed cluster, and the prediction for it."""
    problem = mixed_problem_of(file)
    check_training(problem.training)
    if problem.framework.name != FRAMEWORK:
        framework = load_framework(FRAMEWORK)
        calibrations = tuple(built_in_calibration(framework, part.device) for part in problem.cluster.parts)
        problem = replace(problem, framework=framework, calibrations=calibrations)
    started = started_plan(problem, file.best.plan, unequal_batches=True)
    (cost,) = estimate_mixed(problem, [file.best.plan])
    alike = [problem.as_if(at, file.best.plan.parts) for at in file.best.plan.parts]
    batch = PlanBatch.of([started.plan], problem.model.num_layers)
    predicted = PredictedRun(
        device=" and ".join(dict.fromkeys(problem.cluster.parts[at].device.name for at in started.node_parts)),
        step_s=cost.step_s,
        low_s=cost.low_s,
        high_s=cost.high_s,
        terms_s=cost.terms_s,
        peak_bytes=max(float(estimate(part, batch).logged_memory_bytes[0]) for part in alike),
    )
    return _task(problem, started.plan, num_microbatches=started.num_microbatches, **task_options), predicted


def _run_mixed(
    file: MixedPlanFile,
    task_options: Mapping[str, Any],
    traces: Path | None,
    follow: _Follow,
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


class _Follow(NamedTuple):
    """Listeners of a run while it goes on: a log, its progress by steps, and words."""

    log: Path | None
    force: bool
    progress: Progress
    say: Callable[[str], None]

    @contextmanager
    def opened_log(self) -> Iterator[Callable[[bytes], None]]:
        """Yield a function that adds to the log, if there is one; an existing one is replaced only with `force`."""
        if self.log is None:
            yield lambda data: None
            return
        check_target(self.log, force=self.force)
        with refused_writes(self.log):
            stream = self.log.open("wb", buffering=0)

        def keep(data: bytes) -> None:
            with refused_writes(self.log):
                stream.write(data)

        with stream:
            yield keep


def _train(task: Task, place: RankPlace | None, follow: _Follow) -> TrainingReport | None:
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
    cost = estimate(problem, PlanBatch.of([plan], problem.model.num_layers))
    return PredictedRun(
        device=problem.cluster.device.name,
        step_s=float(cost.step_s[0]),
        low_s=float(cost.low_s[0]),
        high_s=float(cost.high_s[0]),
        terms_s={name: float(value[0]) for name, value in cost.terms_s.items()},
        peak_bytes=float(cost.logged_memory_bytes[0]),
    )


# -- a program of the user ---------------------------------------------------------------------------------------------


def _run_command(
    problem: Problem,
    plan: ParallelPlan,
    program: Sequence[str],
    follow: _Follow,
    *,
    steps: int,
    warmup: int,
    limit_s: float,
) -> tuple[Command, TrainingReport]:
    """Run `program`, which trains by `plan`, until it has logged `steps` step times after `warmup` ones, and end it.

    `follow` hears what it writes, the timed steps and all of them, and what is odd about its log.  A `ProgramError`
    says how it failed, in words of its own.
    """
    place = place_from(os.environ)
    if place and place.num_ranks > 1:
        raise InputError(f"--command starts the job itself: run it once, not as every rank of {place.launcher}")
    batch = Batch(num_sequences=plan.global_batch, seq_len=problem.training.seq_len, num_devices=plan.num_devices)
    reader, words = LogReader(batch, warmup=warmup), LogEnd()
    has_said = False
    with follow.opened_log() as keep:

        def hear(data: bytes, now_s: float) -> bool:
            nonlocal has_said
            keep(data)
            for line in reader.feed(data, now_s):
                words.read(line)
            if not (has_said or reader.num_steps) and (other_batch := reader.other_batch):
                has_said = True
                follow.say(f"{other_batch}: such steps do not count")
            follow.progress(min(reader.num_steps, steps), steps)
            return reader.num_steps >= steps

        began_s = time.monotonic()
        try:
            ending = run_program(program, hear, limit_s=limit_s)
        except KeyboardInterrupt:
            raise AutoplanError(
                f"interrupted after {time.monotonic() - began_s:.0f} s: {program[0]} was ended"
            ) from None
    _check(ending, words, program[0], reader.num_steps, limit_s)
    logged = reader.finish()
    if logged.num_steps < steps:
        follow.say(f"{program[0]} ended after {logged.num_steps} of {steps} steps to time")
    return _as_command(problem, plan, program, logged), _as_report(problem, logged)


def _check(ending: Ending, words: LogEnd, name: str, num_steps: int, limit_s: float) -> None:
    """Refuse a program that did not end well."""
    after = f"after {num_steps} timed steps"
    if ending.kind == "silent":
        raise ProgramError(
            f"{name} wrote nothing for {limit_s:.0f} s {after} and was ended (--limit); its last words: {words.reason}"
        )
    if ending.kind == "enough" or ending.status == 0:
        return
    if words.out_of_memory:
        raise ProgramError(f"{name} ran out of memory {after}: {words.out_of_memory}", is_out_of_memory=True)
    number = -ending.status if ending.status < 0 else ending.status - 128  # as shells report the signal of a child
    if number == signal.SIGKILL:
        raise ProgramError(f"{name} was killed {after}, as systems do where the host's memory runs out: {words.reason}")
    how = f"was ended by {signal_name(-ending.status)}" if ending.status < 0 else f"failed ({ending.status})"
    raise ProgramError(f"{name} {how} {after}: {words.reason}")


def _as_command(problem: Problem, plan: ParallelPlan, program: Sequence[str], logged: LoggedRun) -> Command:
    return Command(
        model=problem.model,
        plan=plan,
        seq_len=problem.training.seq_len,
        arguments=tuple(program),
        log_of=logged.framework,
        times_from=logged.source,
        num_steps=logged.num_steps,
    )


def _as_report(problem: Problem, logged: LoggedRun) -> TrainingReport:
    """Return what the log says as the trainer reports it; memory only where it tells the peak that was predicted."""
    peak = logged.allocated_bytes if problem.framework.memory.logs_memory == "allocated" else logged.reserved_bytes
    return TrainingReport(
        losses=logged.losses,
        step_s=logged.step_s,
        peak_bytes=() if peak is None else (peak,),
        device=problem.cluster.device.name,
    )


# -- the timing database -----------------------------------------------------------------------------------------------


class RunKeeper:
    """Adds runs to the database at `url`, which is opened, and made, before anything runs."""

    def __init__(self, url: str | None) -> None:
        from autoplan.profiler.store import (
            open_store,
        )  # brings SQLAlchemy, which a run that is not stored does not need

        self._open = partial(open_store, url)
        self._open().close()
        self._looks: Sequence[Look] = ()

    @contextmanager
    def followed(
        self, problem: Problem, plan: ParallelPlan, predicted: PredictedRun, *, is_own: bool
    ) -> Iterator[None]:
        """Look at the devices of this host during a run, the trainer's (`is_own`) or not, and add one that fails."""
        from autoplan.profiler.machine.watch import Watch

        try:
            with Watch() as watch:
                yield
        except (ProgramError, CrewError) as error:
            try:
                self._keep_failure(problem, plan, predicted, error, is_own=is_own)
            except StoreError as unkept:
                raise AutoplanError(f"{error}; and this was not stored: {unkept}") from None
            raise
        self._looks = watch.looks

    def keep(self, problem: Problem, run: RunFile) -> str:
        """Add a run that ended well; return what disturbed it, so that no calibration learns from it."""
        from autoplan.profiler.machine.watch import conditions

        seen_conditions, disturbance = conditions(self._looks, run.measured.other_load)
        log_of = run.task.log_of if isinstance(run.task, Command) else ""
        self._add(
            problem,
            run.task.plan,
            _on_cluster(problem) if log_of else _own_machine(problem),
            step_s=run.measured.step_s[-MOST_SAMPLES:],
            peak_bytes=max(run.measured.peak_bytes, default=None),
            predicted_s=run.predicted.step_s,
            status="contaminated" if disturbance else "ok",
            reason=disturbance,
            conditions=seen_conditions,
            source=f"log of {log_of}" if log_of else "built-in trainer",
        )
        return disturbance

    def keep_trials(self, problem: Problem, tuning: Tuning) -> None:
        """Add the trials whose jobs left a log alone, where it told their steps or that memory ran out."""
        for trial in tuning.trials():
            if trial.result is None or trial.result.how not in ("measured", "oom"):
                continue
            ran_out = trial.result.how == "oom"
            self._add(
                problem,
                tuning.plans[trial.at].plan,
                _on_cluster(problem),
                step_s=() if ran_out else (trial.result.step_s,),
                peak_bytes=trial.result.peak_bytes,
                predicted_s=tuning.plans[trial.at].step_s,
                status="oom" if ran_out else "ok",
                reason=cleaned(trial.result.reason) if ran_out else "",
                source="log of a trial",
            )

    def _keep_failure(
        self,
        problem: Problem,
        plan: ParallelPlan,
        predicted: PredictedRun,
        error: CrewError | ProgramError,
        *,
        is_own: bool,
    ) -> None:
        self._add(
            problem,
            plan,
            _own_machine(problem) if is_own else _on_cluster(problem),
            status="oom" if error.is_out_of_memory else "failed",
            reason=cleaned(str(error)),
            predicted_s=predicted.step_s,
            source="built-in trainer" if is_own else "log",
        )

    def _add(self, problem: Problem, plan: ParallelPlan, machine: Fingerprint, **measured_fields: Any) -> None:
        run = RunRecord(
            fingerprint=machine,
            framework=problem.framework.name,
            model=problem.model,
            training=problem.training,
            plan=plan,
            measured_by=user_name(),
            host=cleaned(socket.gethostname()),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **measured_fields,
        )
        with self._open() as store:
            store.add([run])


def _own_machine(problem: Problem) -> Fingerprint:
    """Return the machine of the built-in trainer, whose ranks run beside this program."""
    from autoplan.profiler.machine.environment import own_fingerprint  # brings torch

    return replace(own_fingerprint(), num_hosts=problem.cluster.num_nodes)


def _on_cluster(problem: Problem) -> Fingerprint:
    """Return the machine of a program that may run elsewhere: this one if it has the plan's device, else as told."""
    if find_spec("torch") and find_spec("psutil"):
        own = _own_machine(problem)
        if own.device == problem.cluster.device.name:
            return own
    return described_machine(problem.cluster)
