"""Command `autoplan estimate`: prices one plan, and shows where time and memory go."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import autoplan
from autoplan import api, report
from autoplan.base.errors import InputError
from autoplan.base.urls import command_line
from autoplan.cli.complete import presets
from autoplan.cli.files import write_trace
from autoplan.cli.flags import PROBLEM, plan_flags, shared_flags
from autoplan.cli.inputs import check_outputs, check_untyped, is_typed, problem_options, typed_options
from autoplan.cli.options import (
    AsOption,
    ForceOption,
    GlobalBatchOption,
    OptionalSeqLenOption,
    OtherClusterOption,
    PlanJsonOption,
    QuietOption,
    SetOption,
    TraceOption,
)
from autoplan.cli.remarks import print_warnings, say

if TYPE_CHECKING:
    from autoplan.api.plan_result import PlanResult
    from autoplan.api.results import MixedPlanResult

# Parameters with the same meaning as in `autoplan.estimate`.
ESTIMATE_FLAGS = ("model", "launch_file", "variables", "target", "cluster", "global_batch", "seq_len")
BESIDE_A_PLAN_FILE = {"model", "memory", "verify_memory", "trace", "out", "force", "json", "quiet", "url", "timings"}
BESIDE_A_LAUNCH_FILE = {
    *BESIDE_A_PLAN_FILE,
    *("launch_file", "variables", "target", "cluster", "global_batch", "seq_len", "precision"),
    *("framework", "calibration", "reserve_memory"),
}


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|PLAN",
        help="As for search; or a plan.json, priced with its own timings or, with --timings db, current ones.",
        autocompletion=presets("models"),
    ),
]
LaunchFileOption = Annotated[
    Path | None, typer.Option("--from", metavar="FILE", help="A launch file, to price its plan unchanged.")
]
MemoryOption = Annotated[
    bool,
    typer.Option("--memory", help="Show memory by term and stage, and how much each change would free."),
]
VerifyMemoryOption = Annotated[
    bool,
    typer.Option("--verify-memory", help="Compare with the size of torch's tensors; needs torch but no device."),
]
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a plan file.")]


@plan_flags(after="seq_len")
@shared_flags(PROBLEM, after="seq_len")
def estimate(
    context: typer.Context,
    model: ModelArgument = None,
    launch_file: LaunchFileOption = None,
    variables: SetOption = None,
    target: AsOption = None,
    cluster: OtherClusterOption = None,
    global_batch: GlobalBatchOption = None,
    seq_len: OptionalSeqLenOption = None,
    memory: MemoryOption = False,
    verify_memory: VerifyMemoryOption = False,
    trace: TraceOption = None,
    out: OutOption = None,
    force: ForceOption = False,
    json: PlanJsonOption = False,
    quiet: QuietOption = False,
    **flags: Any,
) -> None:
    """Price one plan: time and memory by term and by pipeline stage.

    Data parallelism uses the devices that the other degrees leave.
    """
    if verify_memory and json:
        raise InputError("--verify-memory prints a table: leave out --json")
    check_outputs(out, trace, force=force)
    if model is not None and api.plan_files.is_mixed_file(Path(model)):
        mixed = _mixed(context, model)
        _write(mixed, out, trace, force=force, quiet=quiet)
        if json:
            typer.echo(mixed.to_json(), nl=False)
        else:
            _print_mixed(mixed, memory=memory)
        return
    if launch_file is not None:
        why = "the plan of a launch file is priced unchanged"
        check_untyped(context, context.params.keys() - BESIDE_A_LAUNCH_FILE, why)
    elif model is None and not (variables or target):
        context.fail("give MODEL or a plan.json, or a launch file: --from FILE")
    elif model is not None and api.plan_files.is_plan_file(Path(model)):
        check_untyped(context, context.params.keys() - BESIDE_A_PLAN_FILE, "a plan file is priced unchanged")
    result = autoplan.estimate(
        **typed_options(context, ESTIMATE_FLAGS),
        plan={name: value for name, value in flags.items() if name not in PROBLEM and is_typed(context, name)},
        memory_knobs=memory,
        **problem_options(context),
    ).with_command(command_line())
    if verify_memory:
        api.estimate.check_oracle(result)
    _write(result, out, trace, force=force, quiet=quiet)
    if json:
        typer.echo(result.to_json(), nl=False)
    else:
        _print(result, memory=memory, verify_memory=verify_memory, quiet=quiet)
        if out is not None:
            step = ("next", f"autoplan explain {shlex.quote(str(out))}")
            report.terminal.print_next_steps(report.terminal.make_console(), step)
    print_warnings(result.warnings, quiet=quiet)


def _mixed(context: typer.Context, plan_file: str) -> MixedPlanResult:
    ignored = context.params.keys() - BESIDE_A_PLAN_FILE | {"timings"}
    check_untyped(context, ignored, "a plan file is priced unchanged")
    if context.params["verify_memory"]:
        raise InputError("--verify-memory does not support mixed clusters: leave it out")
    return api.mixed.estimate_mixed(plan_file).with_command(command_line())


def _write(
    result: PlanResult | MixedPlanResult, out: Path | None, trace: Path | None, *, force: bool, quiet: bool
) -> None:
    if out is not None:
        result.save(out, force=force)
    if trace is not None:
        write_trace(result, trace, force=force, quiet=quiet)


def _print(result: PlanResult, *, memory: bool, verify_memory: bool, quiet: bool) -> None:
    terminal = report.terminal
    show = report.estimate.print_memory if memory else report.estimate.print_estimate
    show(terminal.make_console(), result.file)
    if verify_memory:
        if not quiet:
            say("counting tensors with torch, which takes up to a minute")
        report.verified.print_verified(terminal.make_console(), result.file, api.estimate.ask_oracle(result))


def _print_mixed(result: MixedPlanResult, *, memory: bool) -> None:
    console = report.terminal.make_console()
    if memory:
        report.mixed_search.print_mixed_answer(console, result.file)
        report.estimate.print_waterfall(console, result.stages())
    else:
        report.mixed_search.print_mixed(console, result.file, details=True)
