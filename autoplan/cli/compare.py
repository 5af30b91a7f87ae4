"""`autoplan compare`: which cluster, of which size, trains this model fastest, cheapest, with least energy?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError, NoPlanError
from autoplan.cli.complete import clusters
from autoplan.cli.objectives import (
    CheckpointOption,
    DeviceMtbfOption,
    NodesOption,
    PueOption,
    RestartOption,
    RunFlags,
    TokensOption,
)
from autoplan.cli.options import (
    AttentionOption,
    DbOption,
    ForceOption,
    FrameworkOption,
    ModelArgument,
    PrecisionOption,
    QuietOption,
    ReserveOption,
    SeqLenOption,
    TimingsOption,
)

if TYPE_CHECKING:
    from autoplan.search.objectives import Run
    from autoplan.search.space import Space
    from autoplan.spec.problem import Problem
    from autoplan.spec.run_report import SizeOutcome


def compare(
    context: typer.Context,
    model: ModelArgument,
    cluster: Annotated[
        list[str],
        typer.Option(
            metavar="CLUSTER",
            help="As for search (repeatable); the size may come from --nodes.",
            autocompletion=clusters,
        ),
    ],
    global_batch: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Sequences in a step, as for search.")],
    seq_len: SeqLenOption,
    nodes: NodesOption = None,
    tokens: TokensOption = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CLUSTER=]PRICE", help="Of a device and hour, of all or of one of the clusters (repeatable)."
        ),
    ] = None,
    device_mtbf: DeviceMtbfOption = None,
    checkpoint_time: CheckpointOption = None,
    restart_time: RestartOption = None,
    pue: PueOption = None,
    precision: PrecisionOption = "bf16",
    attention: AttentionOption = "flash",
    framework: FrameworkOption = "megatron-core",
    timings: TimingsOption = None,
    url: DbOption = None,
    reserve_memory: ReserveOption = "0",
    fix: Annotated[list[str] | None, typer.Option(metavar="AXIS=VALUE", help="As for search.")] = None,
    max_: Annotated[list[str] | None, typer.Option("--max", metavar="AXIS=VALUE", help="As for search.")] = None,
    allow: Annotated[list[str] | None, typer.Option(metavar="CHOICE", help="As for search.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw rates by size into an SVG file.")] = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Put the best plans of clusters and of numbers of their nodes side by side: time, rate, cost, energy, goodput.

    Every plan is the fastest one of its cluster and size, proven as by search.
    """
    import msgspec

    from autoplan.api.problem import make_problem, make_space
    from autoplan.base.files import write_text
    from autoplan.cli.inputs import check_output, problem_options
    from autoplan.cli.objectives import make_run, parse_sizes, priced
    from autoplan.cli.progress import progress_bar
    from autoplan.report.compare import Compared, draw_rates, print_compared
    from autoplan.report.terminal import make_console

    if svg is not None:
        check_output(svg, force=force)
    run = make_run(
        RunFlags(
            tokens=tokens,
            device_mtbf=device_mtbf,
            checkpoint_time=checkpoint_time,
            restart_time=restart_time,
            pue=pue,
        )
    )
    if repeated := next((one for one in cluster if cluster.count(one) > 1), None):
        raise InputError(f"--cluster {repeated} is given twice")
    prices = _prices(price or [], cluster)

    def space_of(one: Problem) -> Space:
        return make_space(one, global_batch, fix=fix or [], at_most=max_ or [], allow=allow or [])

    options = problem_options(context)
    problems = {
        name: priced(
            make_problem(model, cluster=name, seq_len=seq_len, **options),
            prices.get(name, prices.get("")),
        )
        for name in cluster
    }
    places = [
        (name, size)
        for name, problem in problems.items()
        for size in (parse_sizes(nodes) if nodes is not None else (problem.cluster.num_nodes,))
    ]
    found = []
    with progress_bar(quiet=quiet, doing="searching", unit="sizes") as advance:
        for done, (name, size) in enumerate(places, 1):
            found.append(Compared(cluster=name, outcome=fastest(problems[name], size, space_of, run)))
            if advance:
                advance(done, len(places))
    if all(one.outcome.best is None for one in found):
        raise NoPlanError(f"none of these clusters and sizes has a plan; {found[-1].cluster}: {found[-1].outcome.why}")
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print_compared(make_console(), found)
    if svg is not None:
        write_text(svg, draw_rates(found), force=force)
        typer.echo(f"drawn into {svg}", err=True)


def _prices(texts: list[str], clusters: list[str]) -> dict[str, str]:
    """Price by cluster, '' for all others."""
    found = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        if name and name not in clusters:
            raise InputError(f"--price {text}: {name} is not one of the clusters ({', '.join(clusters)})")
        if name in found:
            raise InputError(f"--price is given twice for {name or 'all clusters'}")
        found[name] = price
    return found


def fastest(problem: Problem, num_nodes: int, space_of: Callable[[Problem], Space], run: Run) -> SizeOutcome:
    """The fastest plan on so many nodes, or why there is none."""
    from autoplan.cli.objectives import resized
    from autoplan.search.objectives import find_objectives
    from autoplan.search.sizes import search_sizes
    from autoplan.spec.run_report import SizeOutcome

    mine = resized(problem, num_nodes)
    try:
        chosen = search_sizes((num_nodes,), lambda _: (mine, space_of(mine)), find_objectives(["step-time"]), run)
    except NoPlanError as error:
        return SizeOutcome(num_nodes=num_nodes, best=None, least=None, why=str(error).partition(";")[0])
    return chosen.report.sizes[0]
