"""Command `autoplan compare`: ranks clusters and sizes by how fast, cheaply and frugally they train a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import autoplan
from autoplan import report
from autoplan.base.errors import InputError
from autoplan.cli.complete import clusters
from autoplan.cli.flags import PROBLEM, shared_flags
from autoplan.cli.inputs import check_outputs, problem_options, run_options
from autoplan.cli.options import (
    FixOption,
    ForbidOption,
    ForceOption,
    JsonOption,
    MaxOption,
    ModelArgument,
    QuietOption,
    SeqLenOption,
)
from autoplan.cli.progress import progress_bar
from autoplan.cli.remarks import print_warnings, print_written

ClusterOption = Annotated[
    list[str],
    typer.Option(
        metavar="CLUSTER",
        help="As for search (repeatable); --nodes can give the size.",
        autocompletion=clusters,
    ),
]
GlobalBatchOption = Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Sequences per step, as for search.")]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[CLUSTER=]PRICE", help="Price of a device per hour, for all clusters or one of them (repeatable)."
    ),
]
SvgOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw throughput over size into an SVG file.")]


@shared_flags(("device_mtbf", "checkpoint_time", "restart_time", "pue"), after="price")
@shared_flags((name for name in PROBLEM if name != "calibration"), after="price")
@shared_flags(("nodes", "tokens"), after="seq_len")
def compare(
    context: typer.Context,
    model: ModelArgument,
    cluster: ClusterOption,
    global_batch: GlobalBatchOption,
    seq_len: SeqLenOption,
    price: PriceOption = None,
    fix: FixOption = None,
    max_: MaxOption = None,
    forbid: ForbidOption = None,
    svg: SvgOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    **_: Any,
) -> None:
    """Compare the best plans of several clusters and node counts: time, throughput, cost, energy, goodput.

    Every plan is the fastest one of its cluster and size, with the same proof as in search.
    """
    from autoplan.base.files import write_text

    check_outputs(svg, force=force)
    run = run_options(context)
    run.pop("price", None)  # several, one per cluster
    with progress_bar(quiet=quiet, doing="searching", unit="sizes") as advance:
        compared = autoplan.compare(
            model,
            clusters=cluster,
            global_batch=global_batch,
            seq_len=seq_len,
            prices=_prices(price or [], cluster),
            fix=fix or (),
            at_most=max_ or (),
            forbid=forbid or (),
            progress=advance,
            **problem_options(context),
            **run,
        )
    if json:
        typer.echo(compared.to_json(), nl=False)
    else:
        report.compare.print_compared(report.terminal.make_console(), compared.outcomes)
    print_warnings(compared.warnings, quiet=quiet)
    if svg is not None:
        write_text(svg, compared.draw(), force=force)
        print_written(svg, quiet=quiet)


def _prices(texts: list[str], clusters: list[str]) -> dict[str, str]:
    prices = {}
    for text in (item.strip() for listed in texts for item in listed.split(",")):
        name, _, price = text.rpartition("=")
        if name and name not in clusters:
            raise InputError(f"--price {text}: {name} is not one of the clusters ({', '.join(clusters)})")
        if name in prices:
            raise InputError(f"--price is given twice for {name or 'all clusters'}")
        prices[name] = price
    return prices
