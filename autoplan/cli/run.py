"""Command `autoplan run`: trains by a plan, and compares the clock with the prediction."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import autoplan
from autoplan import api
from autoplan.base.errors import InputError
from autoplan.base.files import exists
from autoplan.cli.inputs import check_output, url_with_password
from autoplan.cli.options import CommandOption, ForceOption, LogToOption, PlanArgument, QuietOption, whole_number
from autoplan.cli.remarks import say

if TYPE_CHECKING:
    from rich.console import Console

    from autoplan.trainer.task import RunFile


ProgramArgument = Annotated[
    list[str] | None, typer.Argument(metavar="PROGRAM ARG...", help="After --command --: the program to run instead.")
]
StepsOption = Annotated[int, whole_number("--steps", "N", "Timed steps.", at_least=1)]
WarmupOption = Annotated[int, whole_number("--warmup", "N", "Warm-up steps before them.", at_least=0)]
DataOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="text (bytes of a small text; default if the vocabulary is large enough) or synthetic.",
        show_default=False,
    ),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="First train some steps in a single process too, and compare.")
]
LimitOption = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Time limit for a step, or without output of PROGRAM, after which it counts as hung."
    ),
]
LogOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Save the output of PROGRAM, or one line per step of the trainer.")
]
TracesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Trace a few extra steps with torch's profiler, one file per rank, for autoplan read.",
    ),
]
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the measurements as JSON.")]
DbOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Timing database that stores the run, even if out of memory; also the source of the plan's timings.",
    ),
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print the measurements as JSON instead of tables.")]


def run(
    context: typer.Context,
    plan: PlanArgument,
    program: ProgramArgument = None,
    command: CommandOption = False,
    steps: StepsOption = 10,
    warmup: WarmupOption = 2,
    data: DataOption = None,
    check: CheckOption = False,
    limit: LimitOption = "5m",
    log: LogOption = None,
    traces: TracesOption = None,
    out: OutOption = None,
    log_to: LogToOption = None,
    db: DbOption = None,
    force: ForceOption = False,
    as_json: AsJsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train with a plan, using torch's own parallelism or your own program, and compare with the prediction.

    Run it on one node, or as the program of torchrun --no-python, srun or mpirun with one rank per device.  With
    --command -- PROGRAM ARG... it starts PROGRAM once, reads its log (Megatron-LM, torchtitan, nanotron, DeepSpeed or
    HF Trainer) and ends it after the steps.
    """
    from autoplan.cli.process import leave_on_sigterm
    from autoplan.cli.progress import progress_bar

    _check_words(program, data, command=command, uses_trainer=check or traces is not None)
    _check_outputs(traces, out, log_to, force=force)
    leave_on_sigterm()
    with ExitStack() as bar:
        unit = "timed steps" if program else "steps"
        show = bar.enter_context(progress_bar(quiet=quiet, doing="training", unit=unit))

        def hand_over(measured: RunFile) -> None:
            bar.close()
            _hand_over(measured, out, force=force, as_json=as_json)
            if log_to is not None:
                api.tracking.track_run(measured, log_to)

        autoplan.run(
            plan,
            program=[url_with_password(context, word) or word for word in program or ()],
            steps=steps,
            warmup=warmup,
            data=data,
            check=check,
            limit=limit,
            log=log,
            traces=traces,
            db=url_with_password(context, db),
            force=force,
            progress=show,
            say=(lambda text: None) if quiet else say,
            hand_over=hand_over,
        )


def _check_words(program: list[str] | None, data: str | None, *, command: bool, uses_trainer: bool) -> None:
    """Raise InputError for options that exclude each other."""
    if bool(program) != command:
        raise InputError("--command and PROGRAM go together: autoplan run plan.json --command -- PROGRAM ARG...")
    if command and (uses_trainer or data):
        raise InputError("--check, --data and --traces need the built-in trainer: leave them out with --command")
    if data not in (None, "text", "synthetic"):
        raise InputError(f"no data {data!r}: text or synthetic")


def _check_outputs(traces: Path | None, out: Path | None, log_to: str | None, *, force: bool) -> None:
    """Raise InputError for outputs that cannot be written."""
    if traces is not None and exists(traces) and not force:
        raise InputError(f"{traces} exists: name another folder, or pass --force")
    if out is not None:
        check_output(out, force=force)
    if log_to is not None:
        api.tracking.check_tracker(log_to)


def _hand_over(measured: RunFile, out: Path | None, *, force: bool, as_json: bool) -> None:
    from autoplan.base.files import encode, write_text
    from autoplan.report.terminal import make_console

    text = encode(measured)
    if as_json:
        typer.echo(text, nl=False)
    else:
        _print_run(make_console(), measured)
    if out is not None:
        write_text(out, text, force=force)


def _print_run(console: Console, run: RunFile) -> None:
    """Print the step first, then its parts, memory, and whether the plan matches the results of a single process."""
    from statistics import median

    from autoplan.base.units import format_seconds, format_volume
    from autoplan.report.terminal import print_table

    measured, predicted = run.measured, run.predicted
    step_s = median(measured.step_s)
    tokens = run.task.global_batch * run.task.seq_len
    console.print(
        f"{run.task.plan.describe()}: {format_seconds(step_s)} per step on {measured.device}, "
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
    cells = [
        (name, format_seconds(expected), format_seconds(seconds), _off(expected, seconds))
        for name, expected, seconds in rows
    ]
    if measured.peak_bytes:
        peak, expected = max(measured.peak_bytes), predicted.peak_bytes
        cells.append(("memory, fullest rank", format_volume(expected), format_volume(peak), _off(expected, peak)))
    print_table(console, [("", False), ("predicted", True), ("measured", True), ("off by", True)], cells, keep=4)
    console.print(
        f"predicted for {predicted.device}, 90 % interval {format_seconds(predicted.low_s)} to "
        f"{format_seconds(predicted.high_s)}; measured: median of {_times(run)}, fastest "
        f"{format_seconds(min(measured.step_s))}, slowest {format_seconds(max(measured.step_s))}",
        highlight=False,
    )
    if measured.check is not None and measured.check.holds:
        console.print("losses, gradients and weights of the first steps match those of a single process")


def _times(run: RunFile) -> str:
    """Describe the values behind the median: '10 steps'; '3 times of 30 steps in the log of Megatron-LM'."""
    times = len(run.measured.step_s)
    if not hasattr(run.task, "log_of"):
        return f"{times} steps"
    return f"{times} times of {run.task.num_steps} steps in the log of {run.task.log_of}"


def _off(expected: float, actual: float) -> str:
    from autoplan.base.units import format_percent

    sign = "+" if expected >= actual else "-"
    return f"{sign}{format_percent(abs(expected / actual - 1))}"
