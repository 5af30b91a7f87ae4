"""`autoplan profile`: how long do the operations of a model take on this machine or allocation?"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError
from autoplan.cli.inputs import check_untyped, whole_url
from autoplan.cli.options import DbOption, FrameworkOption, QuietOption, whole_number

if TYPE_CHECKING:
    from rich.console import Console

    from autoplan.cli.profile_for import Deciding
    from autoplan.profiler.crew import Crew
    from autoplan.profiler.protocol import Hello
    from autoplan.profiler.record import Mode
    from autoplan.profiler.sweep import Progress, Store
    from autoplan.profiler.tasks import MeasurementScope, RankedTask
    from autoplan.topology.cluster import ClusterSpec

SAID_BY_A_PLAN = ("model", "seq_len", "tp", "micro_batches", "ep", "dtypes", "only", "cluster", "framework")


def profile(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Preset (llama3-70b), Hugging Face config.json or folder, or TOML file."),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--for",
            metavar="PLAN",
            help="In place of MODEL, a plan.json of a search: measure only what could make another plan win.",
        ),
    ] = None,
    url: DbOption = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Stop after this long: 90s, 10m, 1h.")] = "10m",
    seq_len: Annotated[int, whole_number("--seq-len", "TOKENS", "Sequence length.")] = 4096,
    tp: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Tensor-parallel degrees; powers of two in a node."),
    ] = None,
    micro_batches: Annotated[str, typer.Option(metavar="N,N,...", help="Sequences in a micro-batch.")] = "1,2",
    ep: Annotated[str, typer.Option(metavar="N,N,...", help="Expert-parallel degrees.")] = "8",
    dtypes: Annotated[
        str | None, typer.Option(metavar="TYPE,...", help="bf16, fp16, fp32 or fp8; what the device trains in.")
    ] = None,
    mode: Annotated[
        str, typer.Option(metavar="MODE,...", help="sustained, as training runs, or burst, as short benchmarks do.")
    ] = "sustained",
    only: Annotated[
        str | None, typer.Option(metavar="OPERATION,...", help="Only these, such as gemm,attention,all_reduce.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="What the job will run on: says what is extrapolated.")
    ] = None,
    framework: FrameworkOption = "megatron-core",
    ranks: Annotated[
        int, whole_number("--ranks", "N", "Ranks to start here; one a device, two on a machine without devices.")
    ] = 0,
    allowance: Annotated[str, typer.Option(metavar="TIME", help="How long one measurement may take to settle.")] = "3s",
    visits: Annotated[
        int,
        whole_number("--visits", "N", "How often to measure each, in rounds: the middle counts on uneasy machines."),
    ] = 1,
    limit: Annotated[str, typer.Option(metavar="TIME", help="After how long a rank is taken to hang.")] = "2m",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be measured.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON instead of tables.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Measure the kernels and collectives that plans for a model are made of, and store them.

    Run it on one node, or as the program of torchrun --no-python, srun or mpirun with one rank for each device.  What
    the database holds is not measured again: after an interrupt, or when the budget is spent, run it once more.
    With --for it says first how sure the order of the best plans is and what the measurements are expected to settle.
    """
    from autoplan.api.problem import load_cluster
    from autoplan.base.units import check_count
    from autoplan.base.values import parse_duration, parse_numbers, parse_words
    from autoplan.cli.process import check_torch, leave_on_sigterm
    from autoplan.frameworks.presets import load_framework
    from autoplan.read.model import load_model
    from autoplan.spec.timing import SHAPES

    check_torch()
    from autoplan.base.processes import place_from
    from autoplan.profiler.crew import Crew, default_num_ranks
    from autoplan.profiler.protocol import Job
    from autoplan.profiler.tasks import MeasurementScope

    place = place_from(os.environ)
    check_count("--ranks", ranks, least=0)
    check_count("--visits", visits)
    if place and ranks:
        raise InputError(f"--ranks is for ranks started here: {place.launcher} has started {place.num_ranks}")
    job_cluster, budget_s = load_cluster(cluster) if cluster else None, parse_duration(budget)
    modes: tuple[Mode, ...] = parse_words(mode, "--mode", ("sustained", "burst"))  # type: ignore[assignment]
    deciding, scope = None, None
    if plan_file is not None:
        from autoplan.cli.profile_for import Deciding

        check_untyped(context, SAID_BY_A_PLAN, "--for takes it from the plan file what to measure")
        deciding = Deciding(plan_file, whole_url(context, url), modes)
        job_cluster = deciding.file.cluster
    elif model is None:
        context.fail("give MODEL, or the plan file of a search: --for PLAN")
    else:
        scope = MeasurementScope(
            model=load_model(model),
            framework=load_framework(framework),
            seq_len=seq_len,
            tps=parse_numbers(tp, "--tp") if tp else (),
            micro_batches=parse_numbers(micro_batches, "--micro-batches"),
            eps=parse_numbers(ep, "--ep"),
            modes=modes,
            only=parse_words(only, "--only", SHAPES) if only else (),  # type: ignore[arg-type]
        )
    # As plans are made for the built-in trainer unless told otherwise, on every device.
    usual = ("bf16",) if scope is not None and scope.framework.kernels.eager_layers else ()
    job = Job(
        dtypes=parse_words(dtypes, "--dtypes", ("bf16", "fp16", "fp32", "fp8"))
        if dtypes
        else deciding.dtypes
        if deciding
        else usual,
        allowance_s=parse_duration(allowance),
        limit_s=parse_duration(limit),
    )
    num_ranks = place.num_ranks if place else ranks or default_num_ranks()
    if scope is not None and not scope.tps:
        most = job_cluster.devices_per_node if job_cluster else num_ranks
        scope = replace(scope, tps=tuple(degree for degree in scope.degrees() if degree <= most))
    leave_on_sigterm()
    with Crew(job, place, num_ranks) as crew:
        if not crew.leads:
            crew.start()
            crew.follow()
            return
        # The database first: what is wrong with it shall be known before any rank starts.
        from autoplan.profiler.store import open_store

        aim = deciding or scope
        assert aim is not None
        with open_store(whole_url(context, url)) as store:
            _lead(crew, store, aim, budget_s, visits, job_cluster, dry_run=dry_run, json=json, quiet=quiet)


def _lead(
    crew: Crew,
    store: Store,
    aim: MeasurementScope | Deciding,
    budget_s: float,
    num_visits: int,
    cluster: ClusterSpec | None,
    *,
    dry_run: bool,
    json: bool,
    quiet: bool,
) -> None:
    """What the program beside rank 0 does."""
    from autoplan.cli.profile_for import Deciding, print_ranking, print_settling
    from autoplan.profiler.sweep import Progress
    from autoplan.profiler.tasks import ranked_tasks
    from autoplan.report.terminal import make_console

    hello = crew.start()
    assert hello is not None
    known = store.known(hello.fingerprint, num_visits)
    found = None
    if isinstance(aim, Deciding):
        found, planned = aim.planned(hello, known)
        scope = next(iter(aim.scopes.values()))
    else:
        planned, scope = ranked_tasks(aim, hello, known), aim
    if not quiet:
        _say_where(hello, scope, cluster)
    console = make_console()
    if json and (dry_run or not planned):
        _print_json(Progress(total=len(planned)))
        return
    if found is not None and not json:
        print_settling(console, found, planned)
        if dry_run or not planned:
            return
    if dry_run:
        _print_plan(console, planned, len(known), budget_s)
        return
    progress = _measured(crew, hello, store, planned, budget_s, num_visits, quiet=quiet)
    if json:
        _print_json(progress)
    else:
        _print_outcomes(console, progress)
        if found is not None and isinstance(aim, Deciding):
            aim.measured()
            after, _ = aim.planned(hello, store.known(hello.fingerprint))
            print_ranking(console, found, after, aim.ranking())
    if not quiet and not progress.num_left:
        _say("next: autoplan search MODEL --timings db ..., which takes these times before its own")
    if progress.num_left:
        _say(f"the budget is spent: {progress.num_left} of {progress.total} are left for the same command")


def _say_where(hello: Hello, scope: MeasurementScope, cluster: ClusterSpec | None) -> None:
    """Say on what is measured, and warn of what stands in the way or is left out."""
    from autoplan.cli.run import EMULATION
    from autoplan.profiler.machine.hardware import emulates_bf16
    from autoplan.profiler.sweep import extrapolations, outliers
    from autoplan.profiler.tasks import unmeasurable_parts

    ranks, nodes = len(hello.hosts), hello.num_nodes
    counts = f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"
    _say(f"{hello.fingerprint.device}: {counts}")
    remarks = [*outliers(hello), *(extrapolations(hello, cluster) if cluster else [])]
    if hello.device_type == "cpu" and "bf16" in hello.dtypes and emulates_bf16():
        remarks.append(f"{EMULATION}: measure with --dtypes fp32, and plan with --precision fp32")
    for remark in [*remarks, *(f"not measured: {what}" for what in unmeasurable_parts(scope))]:
        _say(f"warning: {remark}")


def _measured(
    crew: Crew, hello: Hello, store: Store, planned: list[RankedTask], budget_s: float, num_visits: int, *, quiet: bool
) -> Progress:
    """What came of measuring what is planned, within the budget."""
    from autoplan.base.user import user_name
    from autoplan.cli.progress import measuring_bar
    from autoplan.profiler.sweep import Progress, run

    progress = Progress(total=len(planned))
    try:
        with measuring_bar(quiet=quiet, total=num_visits * len(planned)) as show:

            def advance(now: Progress) -> None:
                task, outcome = next(reversed(now.outcomes.items()))
                if outcome.status == "failed" and not quiet:
                    _say(f"{task}: {outcome.reason}")
                if show:
                    show(min(now.num_visits, num_visits * now.total), str(task), now.left_s)

            run(
                crew,
                hello,
                store,
                planned,
                budget_s=budget_s,
                progress=progress,
                advance=advance,
                measured_by=user_name(),
                num_visits=num_visits,
            )
    except (KeyboardInterrupt, SystemExit) as left:
        _say(f"interrupted: {_tally(progress)} stored; the same command measures the rest")
        raise typer.Exit(left.code if isinstance(left, SystemExit) else 130) from None  # type: ignore[arg-type]
    return progress


def _say(text: str) -> None:
    print(f"autoplan: {text}", file=sys.stderr)


def _tally(progress: Progress) -> str:
    return f"{len(progress.outcomes)} of {progress.total} measurements"


def _print_plan(console: Console, planned: list[RankedTask], num_known: int, budget_s: float) -> None:
    """What would be measured: one row for each operation and kernel, in the order in which they begin."""
    from autoplan.base.units import format_seconds
    from autoplan.report.terminal import print_part, print_table

    rows: dict[tuple[str, ...], list[RankedTask]] = {}
    for one in planned:
        task = one.task
        rows.setdefault((task.operation, task.dtype, task.kernel, task.mode), []).append(one)
    columns = [(name, False) for name in ("operation", "type", "kernel", "mode")]
    columns += [("shapes", True), ("takes", True), ("first", False)]
    cells = [
        (
            *names,
            str(len(ones)),
            format_seconds(sum(one.expected_s for one in ones)),
            "x".join(str(size) for size in ones[0].task.shape),
        )
        for names, ones in rows.items()
    ]
    print_table(console, columns, cells, keep=6)
    expected_s = sum(one.expected_s for one in planned)
    print_part(
        console,
        f"{len(planned)} measurements in about {format_seconds(expected_s)} on a quiet machine; "
        f"the budget is {format_seconds(budget_s)}; {num_known} are in the database",
    )


def _print_json(progress: Progress) -> None:
    from autoplan.base.files import encode
    from autoplan.cli.outputs import Profiled

    outcomes = {str(operation): dict(counts) for operation, counts in progress.counts().items()}
    made = Profiled(planned=progress.total, outcomes=outcomes, elapsed_s=progress.elapsed_s, left=progress.num_left)
    typer.echo(encode(made), nl=False)


def _print_outcomes(console: Console, progress: Progress) -> None:
    """How many measurements of each operation ended how."""
    from autoplan.report.terminal import print_table

    statuses = ("ok", "unstable", "contaminated", "failed")
    cells = [
        (operation, *(str(counts[status] or "") for status in statuses))
        for operation, counts in sorted(progress.counts().items())
    ]
    print_table(console, [("operation", False), *((status, True) for status in statuses)], cells, keep=5)
    console.print(f"{_tally(progress)} in {progress.elapsed_s:.0f} s")
