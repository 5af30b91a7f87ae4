"""`autoplan search`: which plan trains this model on this cluster fastest?"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError
from autoplan.cli.complete import presets, words
from autoplan.cli.inputs import OutputFlags, is_typed, problem_options, whole_url
from autoplan.cli.objectives import (
    CheckpointOption,
    DeadlineOption,
    DeviceMtbfOption,
    GpuHoursOption,
    MaxNodesOption,
    NodesOption,
    ObjectiveOption,
    PriceOption,
    PueOption,
    RestartOption,
    RunFlags,
    TokensOption,
)
from autoplan.cli.options import (
    AsOption,
    AttentionOption,
    CalibrationOption,
    ClusterOption,
    DbOption,
    ForceOption,
    FrameworkOption,
    JsonOption,
    PrecisionOption,
    QuietOption,
    ReserveOption,
    SetOption,
    TimingsOption,
    whole_number,
)

if TYPE_CHECKING:
    from autoplan.spec.plan_file import PlanFile


def search(
    context: typer.Context,
    cluster: ClusterOption,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Preset (llama3-70b), Hugging Face config.json or folder, or TOML file.",
            autocompletion=presets("models"),
        ),
    ] = None,
    launch_file: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A launch file that runs today: says what is not typed, and is compared with the best plan.",
        ),
    ] = None,
    variables: SetOption = None,
    target: AsOption = None,
    global_batch: Annotated[
        str | None,
        typer.Option(metavar="N|LOW:HIGH", help="Sequences in a step; of a range, the best for the rate is taken."),
    ] = None,
    seq_len: Annotated[int | None, whole_number("--seq-len", "TOKENS", "Sequence length.")] = None,
    precision: PrecisionOption = "bf16",
    attention: AttentionOption = "flash",
    framework: FrameworkOption = "megatron-core",
    calibration: CalibrationOption = None,
    timings: TimingsOption = None,
    url: DbOption = None,
    reserve_memory: ReserveOption = "0",
    fix: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Look only at plans with this value (repeatable).")
    ] = None,
    max_: Annotated[
        list[str] | None,
        typer.Option("--max", metavar="AXIS=VALUE", help="Bound a degree, or raise its default bound (repeatable)."),
    ] = None,
    max_tp: Annotated[int | None, whole_number("--max-tp", "N", "Short for --max tp=N.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHOICE",
            help="Also look at zero2, zero3, offload, partial_recompute, uneven_stages, partial_sharding, tp_overlap "
            "or a schedule (schedule=zb-v).",
        ),
    ] = None,
    robust: Annotated[
        float | None,
        typer.Option(metavar="Q", help="Take the plan with the least Q-quantile of the step time, such as 0.9."),
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Also say what would change the answer, and why obvious plans lost.")
    ] = False,
    objective: ObjectiveOption = None,
    nodes: NodesOption = None,
    max_nodes: MaxNodesOption = None,
    tokens: TokensOption = None,
    deadline: DeadlineOption = None,
    gpu_hours: GpuHoursOption = None,
    price: PriceOption = None,
    device_mtbf: DeviceMtbfOption = None,
    checkpoint_time: CheckpointOption = None,
    restart_time: RestartOption = None,
    pue: PueOption = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where workers meet and a search resumes: a path, sqlite:///, postgresql:// or grpc://host:port. "
            "Watch it with optuna-dashboard.",
        ),
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the search in the storage; from the problem if not given.")
    ] = None,
    workers: Annotated[int, whole_number("--workers", "N", "Processes on this machine that share the search.")] = 1,
    sampler: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="bound proves; tpe, gp, nsga2, cmaes and random only try --trials cells.",
            autocompletion=words(("bound", "tpe", "gp", "nsga2", "cmaes", "random")),
        ),
    ] = "bound",
    trials: Annotated[int, whole_number("--trials", "N", "Cells to try with such a sampler.")] = 100,
    seed: Annotated[int, whole_number("--seed", "N", "Of such a sampler.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan file is written.")] = Path("plan.json"),
    page: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Also write the HTML page of `autoplan report`.")
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest plan that fits and write it to plan.json.

    Looks at every plan that the framework admits on the whole cluster.  States are sharded as its users would (in
    Megatron-Core not at all or by ZeRO-1), pipelines run 1F1B, plain or interleaved, layers are recomputed as a whole
    or not at all, overlap of tensor-parallel traffic is off: --allow widens this.
    With an objective, numbers of nodes or a run to plan for, the best in that is taken, over all these numbers.
    With a launch file it is said how good that is, and what each change on the way to the best plan brings.
    """
    from autoplan.api.problem import load_any_cluster, make_mixed_problem
    from autoplan.cli.searching import Asked, Sharing, check_for_parts, searched
    from autoplan.spec.plan_file import SpaceFlags
    from autoplan.topology.mixed_cluster import MixedCluster

    output = OutputFlags(out=out, page=page, force=force, json=json, quiet=quiet)
    output.check()
    if robust is not None and not 0.5 <= robust < 1:
        raise InputError(f"--robust {robust:g}: must be a quantile from 0.5 to below 1, such as 0.9")
    if sampler == "bound" and (idle := [f"--{name}" for name in ("trials", "seed") if is_typed(context, name)]):
        raise InputError(f"{' and '.join(idle)}: a search looks at all plans unless a --sampler is given: leave it out")
    if launch_file is None and (model is None or global_batch is None or seq_len is None):
        context.fail("give MODEL, --global-batch and --seq-len, or a launch file that has them: --from FILE")
    bounds = [*(max_ or []), *([f"tp={max_tp}"] if max_tp is not None else [])]
    parts = load_any_cluster(cluster)
    options = problem_options(context)
    run = RunFlags(
        objectives=objective or [],
        nodes=nodes,
        max_nodes=max_nodes,
        tokens=tokens,
        deadline=deadline,
        gpu_hours=gpu_hours,
        price=price,
        device_mtbf=device_mtbf,
        checkpoint_time=checkpoint_time,
        restart_time=restart_time,
        pue=pue,
    )
    space = SpaceFlags(
        global_batch=global_batch or "", fix=tuple(fix or ()), at_most=tuple(bounds), allow=tuple(allow or ())
    )
    sharing = Sharing(storage=storage, url=whole_url(context, storage), study=study, workers=workers)
    started, trained = None, model or ""
    if launch_file is not None:
        from autoplan.cli.today import start_from

        if isinstance(parts, MixedCluster) or run.are_given or robust is not None:
            raise InputError("--from is about the fastest step of equal nodes: leave objectives, runs and --robust out")
        started = start_from(
            launch_file,
            parts,
            options,
            model=model,
            seq_len=seq_len,
            global_batch=global_batch,
            variables=variables,
            target=target,
        )
        options, space = started.options, replace(space, global_batch=started.global_batch)
    elif variables or target:
        raise InputError("--set and --as are about a launch file: give --from FILE")
    if isinstance(parts, MixedCluster):
        from autoplan.cli.mixed import search_parts

        check_for_parts(run, sharing, sampler=sampler, robust=robust, why=why)
        search_parts(make_mixed_problem(trained, cluster=parts, seq_len=seq_len, **options), space, output)
        return
    asked = Asked(
        model=started.launch.model if started else trained,
        cluster=parts,
        seq_len=seq_len,
        options=options,
        quiet=quiet,
        space=space,
        run=run,
        sharing=sharing,
        sampler=sampler,
        trials=trials,
        seed=seed,
        robust=robust,
        why=why,
    )
    file = searched(asked, started)
    _hand_over(file, output, db=options.get("db"))


def _hand_over(file: PlanFile, output: OutputFlags, *, db: str | None) -> None:
    """Write the plan file and its page, and print what it says."""
    from autoplan.base.files import encode, write_text

    text = encode(file)
    write_text(output.out, text, force=output.force)
    if output.json:
        typer.echo(text, nl=False)
    else:
        _print(file, output.out)
    if output.page is not None:
        from autoplan.cli.report import write_page

        write_page(file, output.out, output.page, url=db, force=output.force, quiet=output.quiet)
    if output.quiet:
        return
    if file.best.verdict != "fits":
        print(
            f"autoplan: warning: no plan fits safely; this one has a risk of {100 * file.best.oom_probability:.0f} % "
            "of running out of memory",
            file=sys.stderr,
        )
    print(f"wrote {output.out}", file=sys.stderr)


def _print(file: PlanFile, path: Path) -> None:
    from autoplan.cli.starting import next_step
    from autoplan.report.terminal import make_console, print_next_steps, print_search

    console = make_console()
    print_search(console, file)
    if file.run:
        from autoplan.report.run_report import print_run

        print_run(console, file.run)
    if file.today:
        from autoplan.report.launch_file import print_today
        from autoplan.spec.axes import LABELS

        print_today(console, file.today, LABELS)
    print_next_steps(console, ("why", f" autoplan explain {shlex.quote(str(path))}"), next_step(file, path))
