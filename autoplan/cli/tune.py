"""Command `autoplan tune`: runs the plans that the model cannot tell apart, and keeps the fastest."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan import api
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.urls import redact_arguments
from autoplan.cli.complete import presets, targets
from autoplan.cli.flags import PROBLEM, shared_flags
from autoplan.cli.inputs import check_output, check_untyped, problem_options, typed_options, url_with_password
from autoplan.cli.options import (
    CommandOption,
    FixOption,
    ForbidOption,
    ForceOption,
    GlobalBatchOption,
    LogToOption,
    MaxOption,
    OptionalSeqLenOption,
    OtherClusterOption,
    QuietOption,
    whole_number,
)
from autoplan.cli.remarks import print_written

if TYPE_CHECKING:
    from autoplan.api.tuning import TuneResult
    from autoplan.spec.tune_report import TuneReport


# Parameters with the same meaning as in `autoplan.tune`.
TUNE_FLAGS = (
    *("model", "cluster", "global_batch", "seq_len"),
    *("fix", "at_most", "forbid", "program", "trials", "budget", "gpu_hours", "parallel", "steps", "warmup"),
    *("template", "to", "image", "limit", "work", "study"),
)
STATED_BY_PLAN = (
    *("cluster", "global_batch", "seq_len", "precision", "attention", "framework", "calibration", "timings"),
    *("reserve_memory", "fix", "at_most", "forbid"),
)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|PLAN",
        help="As for search, or a plan.json with the plans to try.",
        autocompletion=presets("models"),
    ),
]
ProgramArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROGRAM ARG...",
        help="After --command --: your training program; {plan} and {folder} are replaced by its file and folder.",
    ),
]
FrameworkOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Framework preset or TOML file.", show_default="torch, the built-in trainer"),
]
TrialsOption = Annotated[int, whole_number("--trials", "N", "Maximum number of runs, including earlier calls.")]
BudgetOption = Annotated[str | None, typer.Option(metavar="TIME", help="Time limit of this call, such as 30m.")]
GpuHoursOption = Annotated[
    str | None,
    typer.Option(metavar="HOURS", help="Maximum device hours of all trials, including earlier calls."),
]
ParallelOption = Annotated[int, whole_number("--parallel", "N", "Concurrent trials, if they do not share devices.")]
StepsOption = Annotated[int, whole_number("--steps", "N", "Timed steps per trial.")]
WarmupOption = Annotated[int, whole_number("--warmup", "N", "Warm-up steps before them.")]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Submit trials as jobs: slurm, kubernetes, or your own TOML file.",
        autocompletion=presets("jobs"),
    ),
]
ToOption = Annotated[
    str,
    typer.Option(
        metavar="TARGET",
        help="With --template: the target that trains, as for export; autoplan is the built-in trainer.",
        autocompletion=targets,
    ),
]
ImageOption = Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image, on Kubernetes.")]
LimitOption = Annotated[str, typer.Option(metavar="TIME", help="Time after which a trial counts as hung.")]
WorkOption = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Folder of the trials and the study; the same command continues there."),
]
StorageOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Storage of the study, if not in FOLDER: a path, sqlite:/// or postgresql://."),
]
StudyOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the study in the storage.", show_default="derived from the plans"),
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File for the best plan: plan.json, or tuned.json if MODEL is a plan.json."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the trials as JSON instead of a table.")]


@shared_flags(PROBLEM[PROBLEM.index("calibration") :], after="framework")
@shared_flags(("precision", "attention"), after="seq_len")
def tune(
    context: typer.Context,
    model: ModelArgument,
    program: ProgramArgument = None,
    command: CommandOption = False,
    cluster: OtherClusterOption = None,
    global_batch: GlobalBatchOption = None,
    seq_len: OptionalSeqLenOption = None,
    framework: FrameworkOption = None,
    fix: FixOption = None,
    at_most: MaxOption = None,
    forbid: ForbidOption = None,
    trials: TrialsOption = 10,
    budget: BudgetOption = None,
    gpu_hours: GpuHoursOption = None,
    parallel: ParallelOption = 1,
    steps: StepsOption = 10,
    warmup: WarmupOption = 2,
    template: TemplateOption = None,
    to: ToOption = "autoplan",
    image: ImageOption = None,
    limit: LimitOption = "15m",
    work: WorkOption = Path("tune"),
    storage: StorageOption = None,
    study: StudyOption = None,
    out: OutOption = None,
    log_to: LogToOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    **_: Any,
) -> None:
    """Run the plans that may be fastest for a few steps each, most promising first, and keep the best.

    Every run improves the predictions for the others.  The next plan is the one with the highest expected gain, until
    none is likely to beat the best or the budget is spent.  Failed runs, including out of memory, are reported with the
    reason.  After an interruption, the same command continues where it stopped.
    """
    from autoplan.api.tuning import prepare
    from autoplan.cli.process import leave_on_sigterm
    from autoplan.cli.progress import live_line, progress_bar, say_how_to_watch

    out = _checked_output(context)
    with progress_bar(quiet=quiet) as advance:
        url, given_options = url_with_password(context, storage), typed_options(context, TUNE_FLAGS)
        prepared = prepare(progress=advance, storage=url, **given_options, **problem_options(context))
    leave_on_sigterm()
    made_storage = prepared.made_storage()
    if not quiet:
        say_how_to_watch(storage or made_storage)
    with live_line(quiet=quiet) as (show, show_now):
        tuned = prepared.run(show=show, show_now=show_now)
    try:
        _hand_over(tuned, out, force=force, json=json, quiet=quiet)
    finally:
        if log_to is not None:
            api.tracking.track_tuning(tuned.report, tuned.file.model.name if tuned.file else model, log_to)


def _checked_output(context: typer.Context) -> Path:
    """Return the path of the best plan; InputError if it cannot be written, or for contradicting flags."""
    from autoplan.api.plan_files import is_plan_file

    typed = context.params
    if bool(typed["program"]) != typed["command"]:
        raise InputError("--command and PROGRAM go together: autoplan tune MODEL ... --command -- PROGRAM ARG...")
    is_plan = is_plan_file(Path(typed["model"]))
    out = Path(typed["out"] or ("tuned.json" if is_plan else "plan.json"))
    check_output(out, force=typed["force"])
    if typed["log_to"] is not None:
        api.tracking.check_tracker(typed["log_to"])
    if is_plan:
        check_untyped(context, STATED_BY_PLAN, f"{typed['model']} already defines the problem and the plans")
    elif None in (typed["cluster"], typed["global_batch"], typed["seq_len"]):
        context.fail("give MODEL with --cluster, --global-batch and --seq-len, or a plan.json")
    return out


def _hand_over(tuned: TuneResult, out: Path, *, force: bool, json: bool, quiet: bool) -> None:
    """Write the best plan, and print the trials."""
    from autoplan.base.files import encode, write_text
    from autoplan.report.terminal import make_console, print_next_steps

    if tuned.file is None:
        _print(tuned.report, json=json)
        raise NoPlanError(f"no trial finished: {tuned.report.ended}")
    write_text(out, encode(tuned.file), force=force)
    _print(tuned.report, json=json)
    if not json:
        from autoplan.api.export import next_step

        step = ("next", _again()) if tuned.is_interrupted else next_step(tuned.file, out)
        print_next_steps(make_console(), step)
    print_written(out, quiet=quiet)


def _again() -> str:
    """Return the same command, which may overwrite this one's output."""
    command, *arguments = redact_arguments(sys.argv[1:])[0]
    force = [] if "--force" in arguments else ["--force"]
    return shlex.join(["autoplan", command, *force, *arguments])


def _print(report: TuneReport, *, json: bool) -> None:
    from autoplan.base.files import encode
    from autoplan.report.terminal import make_console
    from autoplan.report.tune import print_tuned

    if json:
        typer.echo(encode(report), nl=False)
    else:
        print_tuned(make_console(), report)
