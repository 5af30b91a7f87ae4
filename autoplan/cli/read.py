"""Command `autoplan read`: shows what a launch file starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import autoplan
from autoplan import api, report
from autoplan.base.errors import InputError
from autoplan.base.files import exists, is_file, is_folder, write_text
from autoplan.base.units import counted, format_percent, format_seconds
from autoplan.cli.inputs import check_outputs, is_typed, url_with_password
from autoplan.cli.options import AsOption, DbOption, ForceOption, OptionalSeqLenOption, SetOption, whole_number
from autoplan.cli.remarks import print_written, say

if TYPE_CHECKING:
    from autoplan.api.launch_files import ReadResult
    from autoplan.api.traces import LogResult, TraceResult

EXPORTED = "launch.sh"  # in the folder of an export, beside the files that it starts
OF_A_LAUNCH_FILE = ("model", "devices", "devices_per_node", "seq_len", "variables", "target")


FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="A launch script or configuration of any export target, or the folder of an export; or traces of torch's "
        "profiler, one per rank, or a folder of them; or SQLite exports of Nsight Systems, or databases or JSON of "
        "rocprofv3; or logs of a run.",
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="PLAN", help="With traces or logs: the plan file that ran, to compare with its prediction."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With traces: write an HTML page with predicted and measured steps on one axis."),
]
ModelOption = Annotated[str | None, typer.Option(metavar="MODEL", help="As for search, instead of what the file says.")]
DevicesOption = Annotated[int | None, whole_number("--devices", "N", "Total number of devices.")]
DevicesPerNodeOption = Annotated[int | None, whole_number("--devices-per-node", "N", "Devices per node.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def read(
    context: typer.Context,
    files: FilesArgument,
    plan: PlanOption = None,
    url: DbOption = None,
    model: ModelOption = None,
    devices: DevicesOption = None,
    devices_per_node: DevicesPerNodeOption = None,
    seq_len: OptionalSeqLenOption = None,
    variables: SetOption = None,
    target: AsOption = None,
    out: OutOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Show the model, training and plan in a launch file, or the steps in traces and logs of a run.

    Launch files are never executed; what was not understood is listed.  Traces of torch's profiler (Kineto) show what
    each rank did in a step: work by kind, hidden and exposed communication, and gaps.  Logs show step times, and with
    Megatron's timers the parts of a step.
    """
    from autoplan.frameworks.logs import is_log
    from autoplan.profiler.imports.traces import is_trace

    if is_folder(files[0]) and is_file(files[0] / EXPORTED):
        files = [files[0] / EXPORTED, *files[1:]]
    is_traced = is_folder(files[0]) or is_trace(files[0])
    kind = "traces" if is_traced else "logs" if out is None and is_log(files[0]) else None
    if kind and any(is_typed(context, name) for name in OF_A_LAUNCH_FILE):
        accepted = "--plan, --db, --out" if kind == "traces" else "--plan, --db"
        raise InputError(
            f"{files[0]}: {kind} go with {accepted} and --json only: the other options are for launch files"
        )
    if kind == "traces":
        check_outputs(out, force=force)
        traces = api.traces.read_traces(files, plan=plan, db=url_with_password(context, url))
        if out is not None:
            write_text(out, traces.page(), force=force)
            print_written(out)
        _print_traces(traces, json=json)
        return
    if kind == "logs":
        _print_log(api.traces.read_log(files, plan=plan, db=url_with_password(context, url)), json=json)
        return
    if exists(files[0]) and (len(files) > 1 or plan is not None or out is not None):
        raise InputError(
            f"{files[0]}: neither a trace of torch's profiler nor a log: give one launch file, without --plan and --out"
        )
    result = autoplan.read(
        files[0],
        model=model,
        devices=devices,
        devices_per_node=devices_per_node,
        seq_len=seq_len,
        variables=variables or (),
        target=target,
    )
    _print_launch(result, json=json)


def _print_launch(result: ReadResult, *, json: bool) -> None:
    if json:
        typer.echo(result.to_json(), nl=False)
        return
    unread: dict[bool, list[tuple[str, str, str]]] = {True: [], False: []}
    for option in result.launch.unread:
        unread[option.matters].append((option.option, option.value, option.why))
    spec = (result.launch.model, result.launch.training, result.launch.plan)
    console = report.terminal.make_console()
    report.launch_file.print_launch(console, result.headline, spec, matters=unread[True], harmless=unread[False])


def _print_log(result: LogResult, *, json: bool) -> None:
    if json:
        typer.echo(result.to_json(), nl=False)
        return
    console, run = report.terminal.make_console(), result.run
    low_s, high_s = run.interval_s
    headline = (
        f"{run.framework}: {format_seconds(run.median_s)} per step, median of {run.num_steps:,} "
        f"({format_seconds(low_s)} to {format_seconds(high_s)})"
    )
    report.run_trace.print_timers(console, headline, run.timers_s, run.median_s)
    if result.predicted_step_s is not None:
        terms = [(term.what, term.predicted_s, term.measured_s) for term in result.terms]
        report.run_trace.print_compared(console, terms, result.predicted_step_s, run.median_s)


def _print_traces(result: TraceResult, *, json: bool) -> None:
    if json:
        typer.echo(result.to_json(), nl=False)
        return
    console = report.terminal.make_console()
    ranks = result.ranks
    headline = (
        f"{counted(len(ranks), 'rank')}, {counted(ranks[0].num_steps, 'step')} each: "
        f"{format_seconds(result.step_s)} per step"
    )
    rows = [(name, [rank.seconds[name] for rank in ranks]) for name in ranks[0].seconds]
    idle = ("idle", [rank.idle_s for rank in ranks])
    report.run_trace.print_ranks(console, headline, [*rows, idle], [rank.step_s for rank in ranks])
    if communication_s := sum(rank.communication_s for rank in ranks):
        hidden = format_percent(sum(rank.hidden_s for rank in ranks) / communication_s)
        mean = format_seconds(communication_s / len(ranks))
        report.terminal.print_part(
            console, f"\ncommunication takes {mean} per step, {hidden} of it hidden behind other work"
        )
    if result.predicted_step_s is not None:
        terms = [(term.what, term.predicted_s, term.measured_s) for term in result.terms]
        report.run_trace.print_compared(console, terms, result.predicted_step_s, result.step_s)
    for remark in result.remarks:
        say(remark)
