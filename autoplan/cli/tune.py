"""`autoplan tune`: which of the plans that the model cannot tell apart is really the fastest?"""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.values import parse_duration, parse_positive
from autoplan.cli.complete import clusters, presets
from autoplan.cli.inputs import check_output, check_untyped, problem_options, whole_url
from autoplan.cli.options import (
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoplan.cli.candidates import Candidates
    from autoplan.cli.runners import Runner, TrialFlags
    from autoplan.cli.trials import Budget
    from autoplan.search.tune import TunedTrial, Tuning, View
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.search_result import RankedPlan
    from autoplan.spec.tune_report import TriedPlan, TuneReport


SAID_BY_A_PLAN = (
    *("cluster", "global_batch", "seq_len", "precision", "attention", "framework", "calibration", "timings"),
    *("reserve_memory", "fix", "max_", "allow"),
)


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
        str | None, typer.Option(metavar="HOURS", help="Of all devices at most, earlier calls among them.")
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
    from autoplan.api.plan_files import is_plan_file
    from autoplan.cli.candidates import kept_candidates, searched_candidates
    from autoplan.cli.run import warn_of_emulation
    from autoplan.cli.runners import TrialFlags, runner_of
    from autoplan.cli.trials import Budget
    from autoplan.spec.plan_file import SpaceFlags

    if bool(program) != command:
        raise InputError("--command and PROGRAM go together: autoplan tune MODEL ... --command -- PROGRAM ARG...")
    if trials < 1:
        raise InputError(f"--trials {trials}: must be 1 or more")
    db = whole_url(context, url)
    asked = TrialFlags(
        program=tuple(program or ()),
        template=template,
        to=to,
        target_version=target_version,
        image=image,
        steps=steps,
        warmup=warmup,
        parallel=parallel,
        limit_s=parse_duration(limit),
        db=db,
    )
    spend = Budget(
        trials=trials,
        seconds=parse_duration(budget) if budget else math.inf,
        gpu_hours=parse_positive(gpu_hours, "--gpu-hours") if gpu_hours is not None else math.inf,
    )
    check_output(out, force=force)
    if is_plan_file(Path(model)):
        check_untyped(context, SAID_BY_A_PLAN, f"{model} says what is trained where, and by which plans")
        candidates = kept_candidates(Path(model), db)
    else:
        if cluster is None or global_batch is None or seq_len is None:
            context.fail("give MODEL with --cluster, --global-batch and --seq-len, or a plan.json")
        options = problem_options(context)
        options.setdefault("framework", "torch")
        space = SpaceFlags(
            global_batch=str(global_batch), fix=tuple(fix or ()), at_most=tuple(max_ or ()), allow=tuple(allow or ())
        )
        candidates = searched_candidates(model, cluster, seq_len, options, space, quiet=quiet)
    runner = runner_of(asked, candidates)
    if not (program or template or quiet):
        warn_of_emulation(candidates.problem)
    place = StudyFlags(folder=work, storage=storage, url=whole_url(context, storage), study=study)
    tuned = _tuned(asked, runner, spend, place, quiet=quiet)
    _hand_over(tuned, out, force=force, json=json, quiet=quiet)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFlags:
    """The flags that say where a study is kept, as typed."""

    folder: Path
    storage: str | None  # without its password
    url: str | None  # with it
    study: str | None

    @property
    def trials(self) -> Path:
        """Where trials are: those of another study in a folder of their own."""
        return self.folder / self.study if self.study else self.folder

    @property
    def name(self) -> str | None:
        """Of the study; None: from what is tuned."""
        return self.study or (None if self.storage else "tune")

    def made(self) -> str:
        """Where the study is, in a folder that is there."""
        if self.url:
            return self.url
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be written: {error.strerror or error}") from None
        return str(self.folder / "study.journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tuned:
    """What a tuning came to, and why it ended."""

    candidates: Candidates
    tuning: Tuning
    view: View
    ended: str
    is_interrupted: bool


def _tuned(asked: TrialFlags, runner: Runner, spend: Budget, place: StudyFlags, *, quiet: bool) -> _Tuned:
    """Run trials until there is a reason to stop."""
    from autoplan.base.files import encode
    from autoplan.cli.process import leave_on_sigterm
    from autoplan.cli.progress import live_line, say_how_to_watch
    from autoplan.cli.trials import Trials
    from autoplan.search.storage import opened
    from autoplan.search.tune import Tuning

    leave_on_sigterm()
    candidates, where = runner.candidates, place.made()
    if not quiet:
        say_how_to_watch(place.storage or where)
    with opened(where) as held, live_line(quiet=quiet) as (show, show_now):
        tuning = Tuning.joined(held, candidates.problem, candidates.plans, name=place.name, about=asked.about)
        trials = Trials(
            tuning=tuning,
            jobs=runner.jobs,
            problem=candidates.problem,
            folder=place.trials,
            prepare=lambda at: encode(candidates.trial_file(at)),
            budget=spend,
            parallel=asked.parallel,
            warmup=asked.warmup,
            limit_s=asked.limit_s,
            enough=runner.enough,
            show=show,
            show_now=show_now,
        )
        is_interrupted = False
        try:
            ended = trials.run()
        except KeyboardInterrupt:
            is_interrupted, ended = True, "interrupted; the same call goes on from here"
        if runner.keeper:
            runner.keeper.keep_trials(candidates.problem, tuning)
        # The study cannot be asked once its storage is closed.
        view = tuning.view()
    return _Tuned(candidates=candidates, tuning=tuning, view=view, ended=ended, is_interrupted=is_interrupted)


def _hand_over(tuned: _Tuned, out: Path, *, force: bool, json: bool, quiet: bool) -> None:
    """Write the best plan, and print what the trials told."""
    from autoplan.api.plan_files import make_plan_file
    from autoplan.base.files import encode, write_text

    report, candidates = _report(tuned), tuned.candidates
    if report.best is None:
        _print(report, json=json)
        raise NoPlanError(f"no trial has finished: {tuned.ended}")
    best = next(one for one in candidates.plans if one.plan == report.best.plan)
    timed = [tuned.tuning.plans[one.at].plan for one in tuned.view.measured]
    others = sorted((one for one in candidates.plans if one is not best), key=lambda one: _rank(timed, one))
    file = make_plan_file(candidates.problem, [best, *others], None, timings=candidates.timings)
    write_text(out, encode(file), force=force)
    _print(report, json=json)
    if not json:
        from autoplan.cli.starting import next_step
        from autoplan.report.terminal import make_console, print_next_steps

        step = ("next", _again()) if tuned.is_interrupted else next_step(file, out)
        print_next_steps(make_console(), step)
    if not quiet:
        print(f"wrote {out}", file=sys.stderr)


def _again() -> str:
    """The same call, which may write over what this one has written."""
    from autoplan.base.urls import redact_arguments

    command, *arguments = redact_arguments(sys.argv[1:])[0]
    force = [] if "--force" in arguments else ["--force"]
    return shlex.join(["autoplan", command, *force, *arguments])


def _rank(timed: Sequence[ParallelPlan], one: RankedPlan) -> tuple[int, float]:
    """Measured plans first, the fastest of them before the others."""
    return (timed.index(one.plan), 0.0) if one.plan in timed else (len(timed), one.step_s)


def _report(tuned: _Tuned) -> TuneReport:
    from autoplan.cli.trials import spent_hours
    from autoplan.spec.tune_report import TuneReport

    tuning, view = tuned.tuning, tuned.view
    return TuneReport(
        ended=tuned.ended,
        is_separated=view.stop == "separated",
        best=_tried(tuning, view.best) if view.best else None,
        best_s=view.best_s,
        trials=tuple(_tried(tuning, one) for one in view.trials if one.result),
        candidates=len(tuning.plans),
        left=len(view.left),
        ratio=view.ratio,
        gpu_hours=spent_hours(tuned.candidates.problem, view),
    )


def _tried(tuning: Tuning, trial: TunedTrial) -> TriedPlan:
    from autoplan.spec.tune_report import TriedPlan

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
    from autoplan.base.files import encode
    from autoplan.report.terminal import make_console
    from autoplan.report.tune import print_tuned

    if json:
        typer.echo(encode(report), nl=False)
    else:
        print_tuned(make_console(), report)
