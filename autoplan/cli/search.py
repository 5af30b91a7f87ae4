"""`autoplan search`: which plan trains this model on this cluster fastest?"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.inputs import (
    AttentionOption,
    CalibrationOption,
    ClusterOption,
    DbOption,
    ForceOption,
    FrameworkOption,
    JsonOption,
    ModelArgument,
    PrecisionOption,
    QuietOption,
    ReserveOption,
    SeqLenOption,
    TimingsOption,
    whole_number,
)
from autoplan.errors import AutoplanError, InputError

if TYPE_CHECKING:
    from autoplan.result import PlanFile
    from search.study import Shared


def search(
    context: typer.Context,
    model: ModelArgument,
    cluster: ClusterOption,
    global_batch: Annotated[
        str, typer.Option(metavar="N|LOW:HIGH", help="Sequences in a step; of a range, the best for the rate is taken.")
    ],
    seq_len: SeqLenOption,
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
        typer.Option(metavar="CHOICE", help="Also look at zero2, zero3, offload, partial_recompute or tp_overlap."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where workers meet and a search resumes: a path, sqlite:///, postgresql:// or grpc://host:port.",
        ),
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the search in the storage; from the problem if not given.")
    ] = None,
    workers: Annotated[int, whole_number("--workers", "N", "Processes on this machine that share the search.")] = 1,
    sampler: Annotated[
        str,
        typer.Option(metavar="NAME", help="bound proves; tpe, gp, nsga2, cmaes and random only try --trials cells."),
    ] = "bound",
    trials: Annotated[int, whole_number("--trials", "N", "Cells to try with such a sampler.")] = 100,
    seed: Annotated[int, whole_number("--seed", "N", "Of such a sampler.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan file is written.")] = Path("plan.json"),
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fastest plan that fits and write it to plan.json.

    Looks at every plan that Megatron-Core admits on the whole cluster.  Optimizer states are replicated or sharded
    (ZeRO-1), layers are recomputed as a whole or not at all, overlap of tensor-parallel traffic is off: --allow widens
    this.
    """
    from autoplan.cli.inputs import TrainingFlags, check_output, make_mixed_problem, make_problem, make_space, whole_url
    from autoplan.cli.planfile import encode, make_plan_file
    from autoplan.files import write_text
    from autoplan.parts import MixedCluster
    from autoplan.read.mixed import load_parts

    check_output(out, force=force)
    flags = TrainingFlags(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        precision=precision,
        attention=attention,
        framework=framework,
        reserve_memory=reserve_memory,
        calibration=calibration,
        timings=timings,
        db=whole_url(context, url),
    )
    bounds = [*(max_ or []), *([f"tp={max_tp}"] if max_tp is not None else [])]
    parts = load_parts(cluster)
    if isinstance(parts, MixedCluster):
        from autoplan.cli.mixed import search_parts

        if storage or study or workers != 1 or sampler != "bound":
            raise InputError("clusters of unlike devices are searched by one process: leave --storage and the like out")
        narrowed = bool(fix or bounds)
        mixed = make_mixed_problem(flags, parts)
        search_parts(
            mixed, global_batch, narrowed=narrowed, allow=allow or [], out=out, force=force, json=json, quiet=quiet
        )
        return
    problem = make_problem(flags)
    space = make_space(problem, global_batch, fix=fix or [], at_most=bounds, allow=allow or [])

    from autoplan.cli.progress import progress_bar
    from search.advice import check_result
    from search.placement import place_best
    from search.sampler import Sampling
    from search.study import search as run
    from search.workers import helped

    sampling = None if sampler == "bound" else Sampling(name=sampler, trials=trials, seed=seed)
    with _shared(whole_url(context, storage), study, workers) as shared:
        join = partial(run, problem, space, shared=shared, sampling=sampling)
        with helped(join, workers - 1), progress_bar(quiet=quiet) as advance:
            result = join(progress=advance)
    check_result(problem, space, result)
    result = place_best(problem, result)
    file = make_plan_file(problem, result.rivals, result.certificate, timings=timings or "")
    text = encode(file)
    write_text(out, text, force=force)
    if json:
        typer.echo(text, nl=False)
    else:
        from autoplan.report.terminal import make_console, print_search

        print_search(make_console(), file, _next_step(file, out))
    if quiet:
        return
    if file.best.verdict != "fits":
        print(
            f"autoplan: warning: no plan fits safely; this one has a risk of {100 * file.best.oom_probability:.0f} % "
            "of running out of memory",
            file=sys.stderr,
        )
    print(f"wrote {out}", file=sys.stderr)


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
    """What to type next, or why there is no launch script for the plan."""
    from autoplan.export.megatron_lm import export_megatron_lm

    try:
        export_megatron_lm(file, "torchrun")
    except AutoplanError as error:
        return "no launch script", str(error)
    return "next", f"autoplan export {shlex.quote(str(out))} --to megatron-lm --launcher torchrun"
