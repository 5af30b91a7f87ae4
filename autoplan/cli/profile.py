"""Command `autoplan profile`: measures the operations of a model on this machine or allocation."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError, refuse
from autoplan.base.files import encode
from autoplan.base.units import counted, format_seconds
from autoplan.cli.inputs import check_output, check_untyped, is_typed, url_with_password
from autoplan.cli.options import (
    DbOption,
    ForceOption,
    FrameworkOption,
    OptionalModelArgument,
    QuietOption,
    SeqLenOption,
    whole_number,
)
from autoplan.cli.remarks import print_warnings, print_written, say

if TYPE_CHECKING:
    from rich.console import Console

    from autoplan.api.profiling import PlannedProfile, Profile, ProfileOptions
    from autoplan.profiler.health import Health
    from autoplan.profiler.sweep import Progress
    from autoplan.profiler.tasks import RankedTask

# What a check of health has no use for.
NOT_OF_HEALTH = (
    *("model", "plan_file", "seq_len", "tp", "micro_batches", "ep", "dtypes", "mode", "only", "framework", "visits"),
    *("kernels", "dry_run", "nodes", "template", "image", "work"),
)
STATED_BY_PLAN = ("model", "seq_len", "tp", "micro_batches", "ep", "dtypes", "only", "cluster", "framework")


PlanFileOption = Annotated[
    Path | None,
    typer.Option(
        "--for",
        metavar="PLAN",
        help="Instead of MODEL, the plan.json of a search: measure only what could make another plan win.",
    ),
]
BudgetOption = Annotated[str, typer.Option(metavar="TIME", help="Stop after this long: 90s, 10m, 1h.")]
TpOption = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Tensor-parallel degrees.", show_default="powers of two within a node"),
]
MicroBatchesOption = Annotated[str, typer.Option(metavar="N,N,...", help="Sequences per micro-batch.")]
EpOption = Annotated[str, typer.Option(metavar="N,N,...", help="Expert-parallel degrees.")]
DtypesOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE,...",
        help="bf16, fp16, fp32, fp8, mxfp8, nvfp4, fp8_block, fp8_delayed.",
        show_default="the device's training type",
    ),
]
ModeOption = Annotated[
    str, typer.Option(metavar="MODE,...", help="sustained, like training, or burst, like short benchmarks.")
]
OnlyOption = Annotated[
    str | None, typer.Option(metavar="OPERATION,...", help="Only these operations, such as gemm,attention,all_reduce.")
]
ClusterOption = Annotated[
    str | None, typer.Option(metavar="CLUSTER", help="Cluster that the job will run on: reports what is extrapolated.")
]
RanksOption = Annotated[
    int,
    whole_number("--ranks", "N", "Ranks to start here.", show_default="one per device, two without devices"),
]
AllowanceOption = Annotated[str, typer.Option(metavar="TIME", help="Time limit for one measurement to settle.")]
VisitsOption = Annotated[
    int,
    whole_number("--visits", "N", "Repetitions of each measurement, in rounds; the median counts on noisy machines."),
]
KernelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="LIBRARY|OPERATION=...",
        help="Measure kernels of a library (transformer-engine, flash-attn-3), or a class or function, instead of "
        "torch's (repeatable): attention=flash-attn, gemm=mine.py:Linear, norm=torch.nn:RMSNorm:compiled.",
    ),
]
LimitOption = Annotated[str, typer.Option(metavar="TIME", help="Time after which a rank counts as hung.")]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Show what would be measured; needs no device with --for or --cluster."),
]
NodesOption = Annotated[
    int,
    whole_number("--nodes", "N", "With --dry-run: number of nodes to measure on.", show_default="all"),
]
HealthOption = Annotated[
    bool,
    typer.Option(
        "--health",
        help="Instead of MODEL: time every device and all pairs of them, and report slow parts.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With --health: write the cluster file with slow parts as [[faults]]."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the measurements as JSON instead of tables.")]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Submit the profile of --for as a job and follow it: slurm, kubernetes, or your own TOML file.",
    ),
]
ImageOption = Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image, on Kubernetes.")]
WorkOption = Annotated[
    Path, typer.Option(metavar="FOLDER", help="With --template: folder of the job, shared with its nodes.")
]


def profile(
    context: typer.Context,
    model: OptionalModelArgument = None,
    plan_file: PlanFileOption = None,
    url: DbOption = None,
    budget: BudgetOption = "10m",
    seq_len: SeqLenOption = 4096,
    tp: TpOption = None,
    micro_batches: MicroBatchesOption = "1,2",
    ep: EpOption = "8",
    dtypes: DtypesOption = None,
    mode: ModeOption = "sustained",
    only: OnlyOption = None,
    cluster: ClusterOption = None,
    framework: FrameworkOption = "megatron-core",
    ranks: RanksOption = 0,
    allowance: AllowanceOption = "3s",
    visits: VisitsOption = 1,
    limit: LimitOption = "2m",
    kernels: KernelsOption = None,
    dry_run: DryRunOption = False,
    nodes: NodesOption = 0,
    template: TemplateOption = None,
    image: ImageOption = None,
    work: WorkOption = Path("profile-job"),
    health: HealthOption = False,
    out: OutOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure the kernels and collectives that plans for a model consist of, and store them.

    Run it on one node, or as the program of torchrun --no-python, srun or mpirun with one rank per device.  What the
    database already has is not measured again: after an interrupt or a spent budget, run the same command again.
    With --for, it first says how certain the order of the best plans is and what the measurements should settle.
    """
    if health:
        _check_health(context, out, force=force)
        return
    if out is not None or force:
        raise InputError("--out and --force go with --health, for the cluster file that it writes")
    from autoplan.api.profiling import ProfileOptions, planned_profile, started_profile
    from autoplan.cli.process import leave_on_sigterm

    is_elsewhere = dry_run and (plan_file is not None or cluster is not None)
    _check_together(context, is_elsewhere=is_elsewhere)
    given = {option.name: context.params[option.name] for option in fields(ProfileOptions) if option.name != "db"}
    options = ProfileOptions(db=url_with_password(context, url), **given | {"kernels": tuple(kernels or ())})
    if is_elsewhere:
        planned = planned_profile(model, plan_file=plan_file, options=options, num_nodes=nodes)
        _print_planned(planned, json=json, quiet=quiet)
        return
    leave_on_sigterm()
    if template is not None and plan_file is not None:
        _submit(context, plan_file, options)
        return
    with started_profile(model, plan_file=plan_file, options=options) as started:
        if started is not None:
            _lead(started, dry_run=dry_run, json=json, quiet=quiet)


def _check_together(context: typer.Context, *, is_elsewhere: bool) -> None:
    """Raise InputError for flags that have no effect without, or together with, others."""
    typed = context.params
    if typed["plan_file"] is not None:
        check_untyped(context, STATED_BY_PLAN, "--for takes the measurements from the plan file")
    elif typed["model"] is None:
        context.fail("give MODEL, or the plan file of a search: --for PLAN")
    is_job, prints_json = typed["template"] is not None, typed["json"] and not typed["dry_run"]
    refuse(
        (
            (typed["nodes"] and not is_elsewhere, "--nodes goes with --dry-run, and with --for PLAN or --cluster"),
            (typed["kernels"] and is_elsewhere, "--kernel is tried on a device: leave --dry-run out"),
            (typed["ranks"] and (is_job or is_elsewhere), "--ranks needs ranks that are started here: leave it out"),
            (
                not is_job and (typed["image"] is not None or is_typed(context, "work")),
                "--image and --work go with --template, which submits a job",
            ),
            (
                is_job and typed["plan_file"] is None,
                "--template submits the profile of a plan file: give --for PLAN",
            ),
            (is_job and prints_json, "--template prints the output of its job: leave --json out"),
        )
    )


def _check_health(context: typer.Context, out: Path | None, *, force: bool) -> None:
    """Measure devices and links, print their rates, and optionally write the cluster with its slow parts."""
    from autoplan.api.health import HealthOptions, check_health
    from autoplan.cli.health_answer import print_health, warnings_of
    from autoplan.cli.process import leave_on_sigterm
    from autoplan.cli.progress import progress_bar
    from autoplan.report.terminal import make_console

    check_untyped(context, NOT_OF_HEALTH, "--health measures without a model", or_else="")
    if out is not None:
        check_output(out, force=force)
    elif force:
        raise InputError("--force overwrites the file of --out: give --out FILE")
    params = context.params
    given = {name: params[name] for name in ("budget", "cluster", "ranks", "allowance", "limit")}
    options = HealthOptions(db=url_with_password(context, params["url"]), out=out, force=force, **given)
    leave_on_sigterm()
    with progress_bar(quiet=params["quiet"], doing="measuring", unit="rounds of messages") as show:

        def advance(health: Health) -> None:
            if show:
                show(health.num_rounds - health.num_left, health.num_rounds)

        health = check_health(options, advance)
    if health is None:
        return
    if params["json"]:
        typer.echo(encode(health), nl=False)
    else:
        print_health(make_console(), health)
    print_warnings(warnings_of(health), quiet=params["quiet"])
    if out is not None:
        print_written(out, quiet=params["quiet"], ending=", with slow parts as faults")


def _submit(context: typer.Context, plan_file: Path, options: ProfileOptions) -> None:
    """Run the profile as a job, print its output, and the certainty of the plans' order with the new records."""
    from autoplan.api.profile_job import ProfileJob, run_job
    from autoplan.api.profiling import planned_profile

    planned = planned_profile(plan_file=plan_file, options=options)  # errors show before a job is queued
    params = context.params
    if not params["quiet"]:
        _say_where(planned)
    handed = tuple(
        word
        for name in ("allowance", "visits", "limit", "mode", "dtypes")
        if is_typed(context, name)
        for word in (f"--{name}", str(params[name]))
    ) + tuple(word for kernel in options.kernels for word in ("--kernel", kernel))
    job = ProfileJob(
        plan_file=plan_file,
        template=params["template"],
        options=handed,
        budget=options.budget,
        db=options.db,
        image=params["image"],
        folder=Path(params["work"]),
    )
    log = run_job(job) if params["quiet"] else run_job(job, show=say)
    typer.echo(log, nl=False)
    advice = planned_profile(plan_file=plan_file, options=options).advice
    if advice is not None:
        say(f"now {100 * advice.probability:.0f} % certain that the fastest is {advice.best.plan.describe()}")


def _lead(started: Profile, *, dry_run: bool, json: bool, quiet: bool) -> None:
    """Print the planned measurements, run them, and print the outcomes."""
    from autoplan.api.profiling import progress_output
    from autoplan.cli.measurement_advice import print_advice, print_ranking
    from autoplan.report.terminal import make_console

    if dry_run:
        _print_planned(started, json=json, quiet=quiet)
        return
    if not quiet:
        _say_where(started)
    console, tasks = make_console(), started.tasks
    if json and not tasks:
        typer.echo(encode(progress_output(started.progress)), nl=False)
        return
    if started.advice is not None and not json:
        print_advice(console, started.advice, tasks)
        if not tasks:
            return
    progress = _measured(started, quiet=quiet)
    if json:
        typer.echo(encode(progress_output(progress)), nl=False)
    else:
        _print_outcomes(console, progress)
        if started.advice is not None and (settled := started.settled()):
            print_ranking(console, started.advice, *settled)
    if not quiet and not progress.num_left:
        say("next: autoplan search MODEL --timings db ..., which uses these times")
    if progress.num_left:
        say(
            f"the budget is spent: run the same command again for the remaining {progress.num_left} of {progress.total}"
        )


def _print_planned(planned: PlannedProfile, *, json: bool, quiet: bool) -> None:
    """Print the planned measurements, their duration, and their expected value."""
    from autoplan.cli.measurement_advice import print_advice
    from autoplan.report.terminal import make_console

    if not quiet:
        _say_where(planned)
    if json:
        typer.echo(encode(planned.output()), nl=False)
        return
    console = make_console()
    if planned.advice is not None:
        print_advice(console, planned.advice, planned.tasks)
        console.print()
    if planned.tasks or planned.advice is None:
        _print_plan(console, planned)


def _say_where(started: PlannedProfile) -> None:
    """Print the device under test, and warn of obstacles and omissions."""
    hello = started.hello
    counts = f"{counted(len(hello.hosts), 'rank')} on {counted(hello.num_nodes, 'node')}"
    say(f"{hello.fingerprint.device}: {counts}")
    print_warnings(started.remarks)


def _measured(started: Profile, *, quiet: bool) -> Progress:
    """Measure with a progress bar; when interrupted, report what is stored."""
    from autoplan.cli.progress import measuring_bar

    num_visits = started.num_visits
    try:
        with measuring_bar(quiet=quiet, total=num_visits * len(started.tasks)) as show:

            def advance(progress: Progress) -> None:
                task, outcome = next(reversed(progress.outcomes.items()))
                if outcome.status == "failed" and not quiet:
                    say(f"{task}: {outcome.reason}")
                if show:
                    show(min(progress.num_visits, num_visits * progress.total), str(task), progress.left_s)

            return started.measure(advance)
    except (KeyboardInterrupt, SystemExit) as left:
        say(f"interrupted: {_tally(started.progress)} stored; run the same command again for the rest")
        raise typer.Exit(left.code if isinstance(left, SystemExit) else 130) from None  # type: ignore[arg-type]


def _tally(progress: Progress) -> str:
    return f"{len(progress.outcomes)} of {progress.total} measurements"


def _print_plan(console: Console, started: PlannedProfile) -> None:
    """Print the planned measurements: one row per operation and kernel, in starting order."""
    from autoplan.report.terminal import print_part, print_table

    rows: dict[tuple[str, ...], list[RankedTask]] = {}
    for ranked in started.tasks:
        task = ranked.task
        rows.setdefault((task.operation, task.dtype, task.kernel, task.mode), []).append(ranked)
    columns = [(name, False) for name in ("operation", "type", "kernel", "mode")]
    columns += [("shapes", True), ("takes", True), ("first", False)]
    cells = [
        (
            *names,
            str(len(tasks)),
            format_seconds(started.num_visits * sum(ranked.expected_s for ranked in tasks)),
            "x".join(str(size) for size in tasks[0].task.shape),
        )
        for names, tasks in rows.items()
    ]
    print_table(console, columns, cells, keep=6)
    print_part(
        console,
        f"{len(started.tasks)} measurements in about {format_seconds(started.expected_s)} on a quiet machine; "
        f"the budget is {format_seconds(started.budget_s)}; {started.num_known} are already in the database",
    )


def _print_outcomes(console: Console, progress: Progress) -> None:
    from autoplan.report.terminal import print_table

    statuses = ("ok", "unstable", "contaminated", "failed")
    cells = [
        (operation, *(str(counts[status] or "") for status in statuses))
        for operation, counts in sorted(progress.counts().items())
    ]
    print_table(console, [("operation", False), *((status, True) for status in statuses)], cells, keep=5)
    console.print(f"{_tally(progress)} in {progress.elapsed_s:.0f} s")
