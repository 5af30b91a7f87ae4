"""`autoplan search`: which plan trains this model on this cluster fastest?"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.complete import presets, words
from autoplan.cli.inputs import (
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
    is_typed,
    whole_number,
)
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
from autoplan.errors import AutoplanError, InputError

if TYPE_CHECKING:
    from autoplan.problem import Problem
    from autoplan.result import Choice, PlanFile, SearchResult
    from search.space import Space
    from search.study import Shared


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
    from autoplan.cli.inputs import (
        TrainingFlags,
        check_output,
        make_mixed_problem,
        make_problem,
        make_space,
        named_cluster,
        whole_url,
    )
    from autoplan.cli.objectives import search_run
    from autoplan.cli.planfile import make_plan_file
    from autoplan.files import encode, write_text
    from autoplan.parts import MixedCluster
    from autoplan.result import SpaceFlags

    check_output(out, force=force)
    if page is not None:
        check_output(page, force=force)
    if robust is not None and not 0.5 <= robust < 1:
        raise InputError(f"--robust {robust:g}: must be a quantile from 0.5 to below 1, such as 0.9")
    if launch_file is None and (model is None or global_batch is None or seq_len is None):
        context.fail("give MODEL, --global-batch and --seq-len, or a launch file that has them: --from FILE")
    flags = TrainingFlags(
        model=model or "",
        cluster=cluster,
        seq_len=seq_len or 0,
        precision=precision,
        attention=attention,
        framework=framework,
        reserve_memory=reserve_memory,
        calibration=calibration,
        timings=timings,
        db=whole_url(context, url),
        quiet=quiet,
    )
    run_flags = RunFlags(
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
    bounds = [*(max_ or []), *([f"tp={max_tp}"] if max_tp is not None else [])]
    is_shared = bool(storage or study or workers != 1 or sampler != "bound")
    parts = named_cluster(cluster, quiet=quiet)
    started = None
    if launch_file is not None:
        from autoplan.cli.today import start_from

        if isinstance(parts, MixedCluster) or run_flags.are_given or robust is not None:
            raise InputError("--from is about the fastest step of equal nodes: leave objectives, runs and --robust out")
        typed = {name for name in context.params if is_typed(context, name)}
        started = start_from(launch_file, flags, global_batch, parts, typed=typed, variables=variables, target=target)
        flags, global_batch = started.flags, started.global_batch
    elif variables or target:
        raise InputError("--set and --as are about a launch file: give --from FILE")
    assert global_batch is not None
    if isinstance(parts, MixedCluster):
        from autoplan.cli.mixed import search_parts

        if robust is not None or why:
            raise InputError(f"{'--why' if why else '--robust'} is not there for mixed clusters yet: leave it out")
        if is_shared:
            raise InputError("mixed clusters are searched by one process: leave --storage and the like out")
        if run_flags.are_given:
            raise InputError("objectives and runs are not searched on mixed clusters yet: leave their flags out")
        search_parts(
            make_mixed_problem(flags, parts),
            global_batch,
            narrowed=bool(fix or bounds),
            allow=allow or [],
            out=out,
            page=page,
            force=force,
            json=json,
            quiet=quiet,
        )
        return
    if storage and not storage.startswith("grpc:") and not quiet:
        from autoplan.cli.progress import say_how_to_watch

        say_how_to_watch(storage)
    problem = make_problem(flags)
    wishes = allow or []
    if started and not (fix or bounds):
        from autoplan.cli.today import allowed_for

        wishes = [*wishes, *allowed_for(problem, started.plan)]

    asked = SpaceFlags(global_batch=global_batch, fix=tuple(fix or ()), at_most=tuple(bounds), allow=tuple(wishes))

    def space_of(one: Problem) -> Space:
        return make_space(one, asked.global_batch, fix=asked.fix, at_most=asked.at_most, allow=asked.allow)

    from autoplan.cli.progress import progress_bar
    from search.advice import check_result
    from search.choice import choice_of, robust_margin, robust_order
    from search.placement import place_best
    from search.sampler import Sampling
    from search.study import MARGIN
    from search.study import search as run
    from search.workers import helped

    if run_flags.are_given:
        if robust is not None or why:
            raise InputError(f"{'--why' if why else '--robust'} is about step times: leave objectives and runs out")
        if sampler != "bound":
            raise InputError(f"--sampler {sampler} is for step times on one cluster: leave objectives and runs out")
        with _shared(whole_url(context, storage), study, workers) as shared:
            help_out = partial(search_run, problem, run_flags, space_of, shared=shared)
            with helped(help_out, workers - 1), progress_bar(quiet=quiet, unit="sizes") as advance:
                chosen = help_out(progress=advance)
        file = make_plan_file(
            chosen.problem, chosen.plans, chosen.certificate, timings=timings or "", run=chosen.report, space=asked
        )
    else:
        space = space_of(problem)
        margin = MARGIN if robust is None else max(MARGIN, robust_margin(problem, robust))
        sampling = None if sampler == "bound" else Sampling(name=sampler, trials=trials, seed=seed)
        with _shared(whole_url(context, storage), study, workers) as shared:
            join = partial(run, problem, space, margin=margin, shared=shared, sampling=sampling)
            with helped(join, workers - 1), progress_bar(quiet=quiet) as advance:
                result = join(progress=advance)
        check_result(problem, space, result)
        result = place_best(problem, result)
        if started and not (fix or bounds):
            from autoplan.cli.today import nearest_result

            result = nearest_result(problem, space, result, started.plan)
        if robust is not None:
            result = robust_order(problem, result, robust)
        choice = choice_of(result)
        if why:
            choice = _explained(choice, problem, space, result, margin)
        file = make_plan_file(
            problem, result.rivals, result.certificate, timings=timings or "", choice=choice, space=asked
        )
        if started:
            from autoplan.cli.today import today_of

            file = replace(file, today=today_of(problem, started, file, result))
    text = encode(file)
    write_text(out, text, force=force)
    if json:
        typer.echo(text, nl=False)
    else:
        from autoplan.report.terminal import make_console, print_next_steps, print_search

        console = make_console()
        print_search(console, file)
        if file.run:
            from autoplan.report.runs import print_run

            print_run(console, file.run)
        if file.today:
            from autoplan.report.launch import print_today
            from search.axes import NAMES

            print_today(console, file.today, NAMES)
        print_next_steps(console, ("why", f" autoplan explain {shlex.quote(str(out))}"), _next_step(file, out))
    if page is not None:
        from autoplan.cli.report import write_page

        write_page(file, out, page, url=flags.db, force=force, quiet=quiet)
    if quiet:
        return
    if file.best.verdict != "fits":
        print(
            f"autoplan: warning: no plan fits safely; this one has a risk of {100 * file.best.oom_probability:.0f} % "
            "of running out of memory",
            file=sys.stderr,
        )
    print(f"wrote {out}", file=sys.stderr)


def _explained(choice: Choice, problem: Problem, space: Space, result: SearchResult, margin: float) -> Choice:
    """With what would change the answer, and why obvious plans lost."""
    from search.obvious import obvious
    from search.sensitivity import sensitivity

    return replace(
        choice, sensitivity=sensitivity(problem, space, result, margin), obvious=obvious(problem, space, result)
    )


@contextmanager
def _shared(storage: str | None, study: str | None, workers: int) -> Iterator[Shared | None]:
    """Where workers meet: in a storage, in a journal file that is gone afterwards, or nowhere where there is one."""
    from search.study import Shared

    if storage:
        yield Shared(url=storage, name=study)
    elif study:
        raise InputError(f"--study {study} needs --storage: say where it is kept")
    elif workers == 1:
        yield None
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Shared(url=str(Path(folder) / "journal"))


def _next_step(file: PlanFile, out: Path) -> tuple[str, str]:
    """What to type next, or why no file starts the plan."""
    from autoplan.cli.starting import start_of

    try:
        return "next", start_of(file, out)
    except AutoplanError as error:
        return "no launch script", str(error)
