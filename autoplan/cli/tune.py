"""`autoplan tune`: which of the plans that the model cannot tell apart is really the fastest?"""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.complete import clusters, presets
from autoplan.cli.inputs import (
    AttentionOption,
    CalibrationOption,
    DbOption,
    ForceOption,
    PrecisionOption,
    QuietOption,
    ReserveOption,
    TimingsOption,
    whole_number,
)
from autoplan.errors import InputError, NoPlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoplan.jobs import Jobs
    from autoplan.plan import ParallelPlan
    from autoplan.problem import Problem
    from autoplan.result import PlanFile, RankedPlan, TriedPlan, TuneReport
    from search.tune import TunedTrial, Tuning, View


def tune(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PLAN",
            help="As for search, or a plan.json, whose plans are tried.",
            autocompletion=presets("models"),
        ),
    ],
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM ARG...",
            help="After --command --: what trains by a plan; {plan} and {folder} stand for its file and folder.",
        ),
    ] = None,
    command: Annotated[
        bool, typer.Option("--command", help="Run PROGRAM, and read step times from what it writes.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="As for search.", autocompletion=clusters)
    ] = None,
    global_batch: Annotated[int | None, whole_number("--global-batch", "N", "Sequences in a step.")] = None,
    seq_len: Annotated[int | None, whole_number("--seq-len", "TOKENS", "Sequence length.")] = None,
    precision: PrecisionOption = "bf16",
    attention: AttentionOption = "flash",
    framework: Annotated[
        str | None, typer.Option(metavar="NAME", help="Framework preset or TOML file; torch, which is built in.")
    ] = None,
    calibration: CalibrationOption = None,
    timings: TimingsOption = None,
    url: DbOption = None,
    reserve_memory: ReserveOption = "0",
    fix: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Look only at plans with this value (repeatable).")
    ] = None,
    max_: Annotated[
        list[str] | None, typer.Option("--max", metavar="AXIS=VALUE", help="Bound a degree (repeatable).")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="CHOICE", help="Also look at what search leaves out (repeatable).")
    ] = None,
    trials: Annotated[int, whole_number("--trials", "N", "Runs at most, those of earlier calls among them.")] = 10,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Of this call at most, such as 30m.")] = None,
    gpu_hours: Annotated[
        float | None, typer.Option(metavar="H", help="Of all devices at most, earlier calls among them.")
    ] = None,
    parallel: Annotated[int, whole_number("--parallel", "N", "Trials at once, where they do not share devices.")] = 1,
    steps: Annotated[int, whole_number("--steps", "N", "Steps of a trial that are timed.")] = 10,
    warmup: Annotated[int, whole_number("--warmup", "N", "Steps before them.")] = 2,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Submit trials as jobs: slurm, kubernetes, or a TOML file of your own.",
            autocompletion=presets("jobs"),
        ),
    ] = None,
    to: Annotated[
        str, typer.Option(metavar="TARGET", help="With --template: what trains, as for export; autoplan is built in.")
    ] = "autoplan",
    target_version: Annotated[str | None, typer.Option(metavar="VERSION", help="With --to: as for export.")] = None,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Of the containers, on Kubernetes.")] = None,
    limit: Annotated[str, typer.Option(metavar="TIME", help="Of a trial, after which it is taken to hang.")] = "15m",
    work: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Of the trials and the study; the same call again goes on there.")
    ] = Path("tune"),
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of the study, if not in FOLDER: a path, sqlite:/// or postgresql://."),
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the study in the storage; from the plans if not given.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the best plan is written.")] = Path("plan.json"),
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the trials as JSON instead of a table.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Run the plans that may be the fastest for some steps each, most promising first, and keep the best.

    Every run tells of the others too: the next one is chosen by what is expected to be gained by it, until none is
    likely to be faster than the best, or the budget is spent.  A run that fails, for want of memory or otherwise,
    is told with its reason.  Interrupted, or killed, the same call goes on where it was.
    """
    from autoplan.cli.inputs import check_output, parse_duration, whole_url
    from autoplan.cli.planfile import make_plan_file
    from autoplan.cli.profile import _on_terminate
    from autoplan.cli.progress import live_line, say_how_to_watch
    from autoplan.cli.run import warn_of_emulation
    from autoplan.cli.runs import RunKeeper
    from autoplan.cli.trials import Budget, Trials
    from autoplan.files import encode, write_text
    from autoplan.jobs import LocalJobs
    from search.storage import opened
    from search.tune import Tuning

    if bool(program) != command:
        raise InputError("--command and PROGRAM go together: autoplan tune MODEL ... --command -- PROGRAM ARG...")
    for flag, number, least in (("--trials", trials, 1), ("--parallel", parallel, 1), ("--steps", steps, 1)):
        if number < least:
            raise InputError(f"{flag} {number}: must be {least} or more")
    if template and command:
        raise InputError("--command runs on this machine: what submit of --template starts is written there")
    if not template and (to != "autoplan" or target_version or image):
        raise InputError("--to, --target-version and --image are of the jobs of a --template")
    if parallel > 1 and not template:
        raise InputError("--parallel: trials on this machine share its devices and would slow each other down")
    if gpu_hours is not None and gpu_hours <= 0:
        raise InputError(f"--gpu-hours {gpu_hours:g}: must be positive")
    limit_s = parse_duration(limit)
    spend = Budget(
        trials=trials,
        seconds=parse_duration(budget) if budget else float("inf"),
        gpu_hours=gpu_hours if gpu_hours is not None else float("inf"),
    )
    check_output(out, force=force)
    db = whole_url(context, url)
    if Path(model).suffix == ".json" and _is_plan(Path(model)):
        if cluster or global_batch is not None or seq_len is not None:
            raise InputError(f"{model} says what is trained where: leave --cluster, --global-batch and --seq-len out")
        problem, plans, timings = _plans_of(Path(model), db)
    else:
        if cluster is None or global_batch is None or seq_len is None:
            context.fail("give MODEL with --cluster, --global-batch and --seq-len, or a plan.json")
        from autoplan.cli.inputs import TrainingFlags, make_problem

        flags = TrainingFlags(
            model=model,
            cluster=cluster,
            seq_len=seq_len,
            precision=precision,
            attention=attention,
            framework=framework or "torch",
            reserve_memory=reserve_memory,
            calibration=calibration,
            timings=timings,
            db=db,
            quiet=quiet,
        )
        problem = make_problem(flags)
        plans = _searched(problem, global_batch, fix=fix or [], at_most=max_ or [], allow=allow or [], quiet=quiet)
    options = ("--steps", str(steps), "--warmup", str(warmup), *(("--db", db) if db else ()))
    about = {"steps": str(steps), "warmup": str(warmup), "program": shlex.join(program or [])}
    enough = None
    keeper = None  # of trials that do not keep themselves
    jobs: Jobs
    if template:
        from autoplan.job_template import load_job_template
        from autoplan.scheduler_jobs import SchedulerJobs

        scheduler = load_job_template(template)
        jobs = SchedulerJobs(
            scheduler,
            time_limit_s=limit_s,
            num_steps=steps + warmup,
            options=options,
            to=to,
            version=target_version,
            image=image,
        )
        about |= {"template": template, "to": " ".join(filter(None, (to, target_version)))}
        if jobs.runs_own:
            plans = _runnable(problem, plans)
        else:
            enough = steps
            keeper = RunKeeper(db) if db else None
            if scheduler.launcher:
                plans = _exportable(make_plan_file(problem, plans[:1], None), plans, to, target_version)
    else:
        jobs = LocalJobs([*options, *(("--command", "--", *program) if program else ())])
        if not command:
            plans = _runnable(problem, plans)
            if not quiet:
                warn_of_emulation(problem)

    def prepare(at: int) -> str:
        return encode(make_plan_file(problem, [plans[at]], None))

    signal.signal(signal.SIGTERM, _on_terminate)
    # Of another study the trials are in a folder of their own.
    folder = work / study if study else work
    where = whole_url(context, storage) or str(_made(work) / "study.journal")
    name = study or (None if storage else "tune")
    if not quiet:
        say_how_to_watch(storage or where)
    with opened(where) as held, live_line(quiet=quiet) as (show, show_now):
        tuning = Tuning.joined(held, problem, plans, name=name, about=about)
        runs = Trials(
            tuning=tuning,
            jobs=jobs,
            problem=problem,
            folder=folder,
            prepare=prepare,
            budget=spend,
            parallel=parallel,
            warmup=warmup,
            limit_s=limit_s,
            enough=enough,
            show=show,
            show_now=show_now,
        )
        is_interrupted = False
        try:
            ended = runs.run()
        except KeyboardInterrupt:
            is_interrupted, ended = True, "interrupted; the same call goes on from here"
        if keeper:
            keeper.keep_trials(problem, tuning)
        view = tuning.view()
        report = _report(problem, tuning, view, ended)
    if report.best is None:
        _print(report, json=json)
        raise NoPlanError(f"no trial has finished: {ended}")
    best = next(one for one in plans if one.plan == report.best.plan)
    timed = [tuning.plans[one.at].plan for one in view.measured]
    others = sorted((one for one in plans if one is not best), key=lambda one: _rank(timed, one))
    file = make_plan_file(problem, [best, *others], None, timings=timings or "")
    write_text(out, encode(file), force=force)
    _print(report, json=json)
    if not json:
        from autoplan.cli.search import _next_step
        from autoplan.report.terminal import make_console, print_next_steps

        step = ("next", _again()) if is_interrupted else _next_step(file, out)
        print_next_steps(make_console(), step)
    if not quiet:
        print(f"wrote {out}", file=sys.stderr)


def _again() -> str:
    """The same call, which may write over what this one has written."""
    from autoplan.urls import redact_arguments

    command, *arguments = redact_arguments(sys.argv[1:])[0]
    force = [] if "--force" in arguments else ["--force"]
    return shlex.join(["autoplan", command, *force, *arguments])


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return folder


def _is_plan(path: Path) -> bool:
    from autoplan.cli.planfile import is_plan_file

    return is_plan_file(path)


def _plans_of(path: Path, db: str | None) -> tuple[Problem, tuple[RankedPlan, ...], str]:
    """The plans that a search kept, and what timings they rest on."""
    from autoplan.cli.planfile import problem_of
    from autoplan.files import decode, read_table
    from autoplan.result import PlanFile

    file = decode(PlanFile, read_table(path), str(path))
    return problem_of(file, db), (file.best, *file.alternatives), file.timings


def _searched(
    problem: Problem, global_batch: int, *, fix: list[str], at_most: list[str], allow: list[str], quiet: bool
) -> tuple[RankedPlan, ...]:
    """The best plan of each kind, the best predicted first."""
    from autoplan.cli.inputs import make_space
    from autoplan.cli.progress import progress_bar
    from search.advice import check_result
    from search.choice import distinct
    from search.study import search
    from search.tune import MARGIN, MOST_PLANS

    space = make_space(problem, str(global_batch), fix=fix, at_most=at_most, allow=allow)
    with progress_bar(quiet=quiet) as advance:
        result = search(problem, space, advance, margin=MARGIN)
    check_result(problem, space, result)
    return distinct(result)[:MOST_PLANS]


def _runnable(problem: Problem, plans: Sequence[RankedPlan]) -> tuple[RankedPlan, ...]:
    """The plans that the built-in trainer runs."""
    from autoplan.cli.run import FRAMEWORK
    from autoplan.rules import Setting, broken
    from autoplan.rules.trainer import RULES, check_model

    if problem.framework.name != FRAMEWORK:
        raise InputError(
            f"the plans are for {problem.framework.name}, trials of the built-in trainer are for {FRAMEWORK}: "
            "say what runs them with --command -- PROGRAM ARG..."
        )
    check_model(problem.model)
    setting = Setting(model=problem.model, training=problem.training, num_devices=problem.cluster.num_devices)
    reasons = [next(iter(broken(RULES, setting, one.plan)), "") for one in plans]
    if all(reasons):
        raise NoPlanError(f"the built-in trainer runs none of the plans: {reasons[0]}")
    return tuple(one for one, reason in zip(plans, reasons, strict=True) if not reason)


def _exportable(file: PlanFile, plans: Sequence[RankedPlan], to: str, version: str | None) -> tuple[RankedPlan, ...]:
    """Those of the plans that the target can be told; `file` is of any of them."""
    from autoplan.export.targets import job_of

    kept, refusals = [], []
    for one in plans:
        try:
            job_of(replace(file, best=one), to, version)
        except InputError as error:
            refusals.append(error)
        else:
            kept.append(one)
    if not kept:
        raise NoPlanError(f"{to} starts none of the plans: {refusals[0]}")
    return tuple(kept)


def _rank(timed: Sequence[ParallelPlan], one: RankedPlan) -> tuple[int, float]:
    """Measured plans first, the fastest of them before the others."""
    return (timed.index(one.plan), 0.0) if one.plan in timed else (len(timed), one.step_s)


def _report(problem: Problem, tuning: Tuning, view: View, ended: str) -> TuneReport:
    from autoplan.cli.trials import spent_hours
    from autoplan.result import TuneReport

    return TuneReport(
        ended=ended,
        is_separated=view.stop == "separated",
        best=_tried(tuning, view.best) if view.best else None,
        best_s=view.best_s,
        trials=tuple(_tried(tuning, one) for one in view.trials if one.result),
        candidates=len(tuning.plans),
        left=len(view.left),
        ratio=view.ratio,
        gpu_hours=spent_hours(problem, view),
    )


def _tried(tuning: Tuning, trial: TunedTrial) -> TriedPlan:
    from autoplan.result import TriedPlan

    assert trial.result is not None
    return TriedPlan(
        number=trial.number,
        plan=tuning.plans[trial.at].plan,
        predicted_s=tuning.plans[trial.at].step_s,
        measured_s=trial.result.step_s,
        spread=None if trial.result.step_s is None else trial.result.spread,
        end=trial.result.how,
        reason=trial.result.reason,
        seconds=trial.result.seconds,
    )


def _print(report: TuneReport, *, json: bool) -> None:
    from autoplan.files import encode
    from autoplan.report.terminal import make_console
    from autoplan.report.tune import print_tuned

    if json:
        typer.echo(encode(report), nl=False)
    else:
        print_tuned(make_console(), report)
