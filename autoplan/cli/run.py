"""`autoplan run`: does the plan train, and does the clock agree with the prediction?"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import AutoplanError, InputError, StoreError
from autoplan.cli.options import ForceOption, QuietOption

if TYPE_CHECKING:
    from rich.console import Console

    from autoplan.base.processes import RankPlace
    from autoplan.cli.runs import RunKeeper
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.problem import Problem
    from autoplan.trainer.task import Advance, Command, PredictedRun, RunFile, Task, TrainingReport

FRAMEWORK = "torch"  # what the trainer is priced as
EMULATION = "these cores have no bf16 units, and are many times as fast in fp32"


def run(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    program: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM ARG...", help="After --command --: what to run instead.")
    ] = None,
    command: Annotated[
        bool, typer.Option("--command", help="Run PROGRAM, and read step times from what it writes.")
    ] = False,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps that are timed.")] = 10,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Steps before them.")] = 2,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="text (bytes of a small one, the default where the vocabulary holds them) or synthetic.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="First train some steps by one process too, and compare.")
    ] = False,
    limit: Annotated[
        str, typer.Option(metavar="TIME", help="Of a step, or of PROGRAM's silence, after which it is taken to hang.")
    ] = "5m",
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what PROGRAM writes, or a line a step of the trainer.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what was measured as JSON.")] = None,
    db: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Keep the run in this timing database, out of memory or not; a plan's times come from it.",
        ),
    ] = None,
    force: ForceOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON instead of tables.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Train by a plan with torch's own parallelism, or by a program of yours, and compare with the prediction.

    Run it on one node, or as the program of torchrun --no-python, srun or mpirun with one rank for each device.  With
    --command -- PROGRAM ARG... it starts that, once; its log may be one of Megatron-LM, torchtitan, nanotron,
    DeepSpeed or HF Trainer, and it is ended after the steps.
    """
    from autoplan.base.processes import CrewError, place_from
    from autoplan.base.values import parse_duration
    from autoplan.cli.command import ProgramError, run_command
    from autoplan.cli.inputs import check_output, whole_url
    from autoplan.cli.runs import RunKeeper
    from autoplan.trainer.task import RunFile

    _check_words(program, data, command=command, check=check)
    if out is not None:
        check_output(out, force=force)
    limit_s = parse_duration(limit)
    url = whole_url(context, db)
    problem, wanted, timings = plan_to_run(plan, url)
    place = None if command else place_from(os.environ)
    leads = place is None or place.rank == 0
    keeper = RunKeeper(url) if db and leads else None
    if not program:
        problem = of_trainer(problem, timings, url)
        if leads and not quiet:
            warn_of_emulation(problem)
    predicted = _predicted(problem, wanted)
    task: Task | Command
    report: TrainingReport | None
    try:
        if program:
            words = [whole_url(context, one) or one for one in program]
            task, report = run_command(
                problem, wanted, words, steps=steps, warmup=warmup, limit_s=limit_s, log=log, force=force, quiet=quiet
            )
        else:
            task = _task(problem, wanted, steps=steps, warmup=warmup, data=data, checks=check, limit_s=limit_s)
            report = _train(task, place, log=log, force=force, quiet=quiet)
    except (ProgramError, CrewError) as error:
        try:
            if keeper:
                keeper.keep_failure(problem, wanted, predicted, error, is_own=not program)
        except StoreError as unkept:
            raise AutoplanError(f"{error}; and this was not stored: {unkept}") from None
        raise
    if report is not None:
        _hand_over(RunFile(task=task, predicted=predicted, measured=report), problem, keeper, out, force, as_json)


def _check_words(program: list[str] | None, data: str | None, *, command: bool, check: bool) -> None:
    """Refuse options that do not go together."""
    if bool(program) != command:
        raise InputError("--command and PROGRAM go together: autoplan run plan.json --command -- PROGRAM ARG...")
    if command and (check or data):
        raise InputError("--check and --data are of the built-in trainer: leave them out with --command")
    if data not in (None, "text", "synthetic"):
        raise InputError(f"no data {data!r}: text or synthetic")


def _hand_over(
    made: RunFile, problem: Problem, keeper: RunKeeper | None, out: Path | None, force: bool, as_json: bool
) -> None:
    """Print what was measured, store it and write it; then complain if the plan trains something else."""
    from autoplan.base.files import encode, write_text
    from autoplan.report.terminal import make_console

    text, check = encode(made), made.measured.check
    if as_json:
        typer.echo(text, nl=False)
    else:
        _print_run(make_console(), made)
    try:
        if keeper and (check is None or check.holds):
            log_of = getattr(made.task, "log_of", "")
            keeper.keep(problem, made.task.plan, made.predicted, made.measured, log_of=log_of)
    finally:  # a disk that is full for the one need not be for the other
        if out is not None:
            write_text(out, text, force=force)
    if check is not None and not check.holds:
        raise AutoplanError(
            f"the plan trains something else than one process does: losses differ by {check.loss:.2g}, "
            f"gradients by {check.gradients:.2g}, weights by {check.weights:.2g} of their size"
        )


def plan_to_run(path: Path, url: str | None) -> tuple[Problem, ParallelPlan, str]:
    """The plan of a file, with times of the database at `url`, or of the user's own where that is for the run alone."""
    from autoplan.api.plan_files import read_plan

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
    """What the built-in trainer is to do."""
    from autoplan.trainer.run import usual_data
    from autoplan.trainer.task import Task

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


def _train(task: Task, place: RankPlace | None, *, log: Path | None, force: bool, quiet: bool) -> TrainingReport | None:
    """What the built-in trainer reports; None where this is another rank than the first."""
    from autoplan.cli.command import opened_log
    from autoplan.cli.process import check_torch, leave_on_sigterm
    from autoplan.cli.progress import progress_bar
    from autoplan.frameworks.trainer.log import line
    from autoplan.trainer.run import run_task

    check_torch()
    leave_on_sigterm()
    num_done = 0
    with (
        progress_bar(quiet=quiet, doing="training", unit="steps") as show,
        opened_log(log, force=force) as keep,
    ):

        def advance(now: Advance) -> None:
            nonlocal num_done
            num_done = now.step + 1
            keep(line(num_done, now.step_s, now.loss).encode())
            if show:
                show(num_done, task.num_warmup + task.num_steps)

        try:
            return run_task(task, place, advance=advance)
        except KeyboardInterrupt:
            raise AutoplanError(f"interrupted after {num_done} steps: the ranks were ended") from None


def warn_of_emulation(problem: Problem) -> None:
    """Say it in a line where the trainer would run on cores that have no units for the plan's precision."""
    from autoplan.profiler.machine.hardware import emulates_bf16

    if problem.cluster.device.vendor == "cpu" and problem.training.precision == "bf16" and emulates_bf16():
        print(f"autoplan: warning: {EMULATION}: plan with --precision fp32", file=sys.stderr)


def of_trainer(problem: Problem, timings: str, url: str | None) -> Problem:
    """The problem as the built-in trainer runs it, whatever framework it was made for.

    Of the database whose times are in it, the trainer's own units count then too.
    """
    from autoplan.api.timings import with_timings
    from autoplan.frameworks.presets import load_framework
    from autoplan.read.calibration import built_in_calibration

    if problem.framework.name == FRAMEWORK:
        return problem
    framework = load_framework(FRAMEWORK)
    calibration = built_in_calibration(framework, problem.cluster.device.generation)
    problem = replace(problem, framework=framework, calibration=calibration)
    for source in dict.fromkeys((url, None)) if timings == "db" else ():  # as `plan_to_run` looked for them
        with suppress(AutoplanError):
            return with_timings(problem, timings, source)
    return problem


def _predicted(problem: Problem, plan: ParallelPlan) -> PredictedRun:
    """What the plan should take."""
    from autoplan.cost.estimate import estimate
    from autoplan.spec.plan import PlanBatch
    from autoplan.trainer.task import PredictedRun

    cost = estimate(problem, PlanBatch.of([plan], problem.model.num_layers))
    return PredictedRun(
        device=problem.cluster.device.name,
        step_s=float(cost.step_s[0]),
        low_s=float(cost.low_s[0]),
        high_s=float(cost.high_s[0]),
        terms_s={name: float(value[0]) for name, value in cost.terms_s.items()},
        peak_bytes=float(cost.logged_memory_bytes[0]),
    )


def _print_run(console: Console, run: RunFile) -> None:
    """The answer first: the step, then its parts, memory, and whether the plan computes what one process does."""
    from statistics import median

    from rich.table import Table

    from autoplan.base.units import format_seconds, format_volume

    measured, predicted = run.measured, run.predicted
    step_s = median(measured.step_s)
    tokens = run.task.plan.global_batch * run.task.seq_len
    console.print(
        f"{run.task.plan.describe()}: {format_seconds(step_s)} a step on {measured.device}, "
        f"{tokens / step_s:,.0f} tokens/s" + (f", loss {measured.losses[-1]:.3f}" if measured.losses else ""),
        highlight=False,
    )
    optimizer_s = predicted.terms_s.get("optimizer", 0.0)
    rows = [("step", predicted.step_s, step_s)]
    if measured.passes_s:
        rows += [
            ("forward and backward", predicted.step_s - optimizer_s, median(measured.passes_s)),
            ("optimizer", optimizer_s, median(measured.optimizer_s)),
        ]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "off by"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, expected, found in rows:
        table.add_row(name, format_seconds(expected), format_seconds(found), _off(expected, found))
    if measured.peak_bytes:
        peak = max(measured.peak_bytes)
        expected = predicted.peak_bytes
        table.add_row("memory, fullest rank", format_volume(expected), format_volume(peak), _off(expected, peak))
    console.print(table)
    console.print(
        f"predicted for {predicted.device}, 90 % interval {format_seconds(predicted.low_s)} to "
        f"{format_seconds(predicted.high_s)}; measured: median of {_times(run)}, fastest "
        f"{format_seconds(min(measured.step_s))}, slowest {format_seconds(max(measured.step_s))}",
        highlight=False,
    )
    if measured.check is not None and measured.check.holds:
        console.print("losses, gradients and weights of the first steps are those of one process")


def _times(run: RunFile) -> str:
    """What the median is of: '10 steps'; '3 times of 30 steps in the log of Megatron-LM'."""
    times = len(run.measured.step_s)
    if not hasattr(run.task, "log_of"):
        return f"{times} steps"
    return f"{times} times of {run.task.num_steps} steps in the log of {run.task.log_of}"


def _off(expected: float, found: float) -> str:
    from autoplan.base.units import format_percent

    sign = "+" if expected >= found else "-"
    return f"{sign}{format_percent(abs(expected / found - 1))}"
