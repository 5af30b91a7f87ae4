"""Command `autoplan tune`: runs the plans that the model cannot tell apart, and keeps the fastest."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.base.errors import InputError, NoPlanError
from autoplan.cli.complete import clusters, presets
from autoplan.cli.flags import PROBLEM, shared_flags
from autoplan.cli.inputs import check_output, check_untyped, problem_options, whole_url
from autoplan.cli.options import (
    ForceOption,
    QuietOption,
    whole_number,
)

if TYPE_CHECKING:
    from autoplan.api.tuning import TuneResult
    from autoplan.spec.tune_report import TuneReport


SAID_BY_A_PLAN = (
    *("cluster", "global_batch", "seq_len", "precision", "attention", "framework", "calibration", "timings"),
    *("reserve_memory", "fix", "at_most", "forbid"),
)


@shared_flags(PROBLEM[PROBLEM.index("calibration") :], after="framework")
@shared_flags(("precision", "attention"), after="seq_len")
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
    seq_len: Annotated[int | None, whole_number("--seq-len", "TOKENS", "Sequence length; 8k is 8,192.")] = None,
    framework: Annotated[
        str | None, typer.Option(metavar="NAME", help="Framework preset or TOML file; torch, which is built in.")
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Look only at plans with this value (repeatable).")
    ] = None,
    at_most: Annotated[
        list[str] | None, typer.Option("--max", metavar="AXIS=VALUE", help="Bound a degree (repeatable).")
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(metavar="CHOICE", help="Leave out a choice, as for search (repeatable).")
    ] = None,
    trials: Annotated[int, whole_number("--trials", "N", "Runs at most, those of earlier calls among them.")] = 10,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time that this call may take, such as 30m.")
    ] = None,
    gpu_hours: Annotated[
        str | None,
        typer.Option(metavar="HOURS", help="Device hours of all trials at most, those of earlier calls among them."),
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
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Image of the containers, on Kubernetes.")] = None,
    limit: Annotated[str, typer.Option(metavar="TIME", help="Time after which a trial is taken to hang.")] = "15m",
    work: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder of the trials and the study; the same call again goes on there."),
    ] = Path("tune"),
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where the study is kept, if not in FOLDER: a path, sqlite:/// or postgresql://."
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the study in the storage; made from the plans if not given."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the best plan is written: plan.json, or tuned.json if MODEL is a plan.json."
        ),
    ] = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the trials as JSON instead of a table.")] = False,
    quiet: QuietOption = False,
    **_: Any,
) -> None:
    """Run the plans that may be the fastest for some steps each, most promising first, and keep the best.

    Every run tells of the others too: the next one is chosen by what is expected to be gained by it, until none is
    likely to be faster than the best, or the budget is spent.  A run that fails, for want of memory or otherwise,
    is told with its reason.  Interrupted, or killed, the same call goes on where it was.
    """
    from autoplan.api.plan_files import is_plan_file
    from autoplan.api.problem import ProblemOptions
    from autoplan.api.tuning import TuneOptions, prepare
    from autoplan.cli.process import leave_on_sigterm
    from autoplan.cli.progress import live_line, progress_bar, say_how_to_watch

    if bool(program) != command:
        raise InputError("--command and PROGRAM go together: autoplan tune MODEL ... --command -- PROGRAM ARG...")
    is_plan = is_plan_file(Path(model))
    out = out or Path("tuned.json" if is_plan else "plan.json")
    check_output(out, force=force)
    if is_plan:
        check_untyped(context, SAID_BY_A_PLAN, f"{model} says what is trained where, and by which plans")
    elif cluster is None or global_batch is None or seq_len is None:
        context.fail("give MODEL with --cluster, --global-batch and --seq-len, or a plan.json")
    named = {name: context.params[name] for name in TuneOptions.__annotations__ if name in context.params}
    named = {name: value for name, value in named.items() if name not in ProblemOptions.__annotations__}
    with progress_bar(quiet=quiet) as advance:
        prepared = prepare(
            model,
            cluster=cluster,
            global_batch=global_batch,
            seq_len=seq_len,
            progress=advance,
            **named | {"storage": whole_url(context, storage)},
            **problem_options(context),
        )
    leave_on_sigterm()
    made = prepared.made_storage()
    if not quiet:
        say_how_to_watch(storage or made)
    with live_line(quiet=quiet) as (show, show_now):
        tuned = prepared.run(show=show, show_now=show_now)
    _hand_over(tuned, out, force=force, json=json, quiet=quiet)


def _hand_over(tuned: TuneResult, out: Path, *, force: bool, json: bool, quiet: bool) -> None:
    """Write the best plan, and print what the trials told."""
    from autoplan.base.files import encode, write_text
    from autoplan.report.terminal import make_console, print_next_steps

    if tuned.file is None:
        _print(tuned.report, json=json)
        raise NoPlanError(f"no trial has finished: {tuned.report.ended}")
    write_text(out, encode(tuned.file), force=force)
    _print(tuned.report, json=json)
    if not json:
        from autoplan.api.export import next_step

        step = ("next", _again()) if tuned.is_interrupted else next_step(tuned.file, out)
        print_next_steps(make_console(), step)
    if not quiet:
        print(f"wrote {out}", file=sys.stderr)


def _again() -> str:
    """Return the same call, which may write over what this one has written."""
    from autoplan.base.urls import redact_arguments

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
