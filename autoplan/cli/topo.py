"""Command `autoplan topo`: shows how a cluster is connected, and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan import api
from autoplan.base.errors import InputError
from autoplan.base.files import encode_line, write_text
from autoplan.cli.complete import clusters
from autoplan.cli.inputs import check_outputs
from autoplan.cli.options import ForceOption
from autoplan.cli.remarks import print_written


def topo(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="As for search.", autocompletion=clusters)],
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Show the traffic of a step of this plan.json over the links.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the cluster as an SVG file.")] = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the graph as JSON instead of a tree.")] = False,
) -> None:
    """Show a cluster as a tree of switches, nodes and links with their rates, and the traffic of a plan on it."""
    from autoplan.report.cluster import mixed_json, print_mixed_topology, print_topology
    from autoplan.report.terminal import make_console
    from autoplan.report.traffic import print_traffic
    from autoplan.topology.mixed_cluster import MixedCluster

    check_outputs(svg, force=force)
    spec = api.problem.load_any_cluster(cluster)
    if isinstance(spec, MixedCluster):
        if plan is not None or svg is not None:
            raise InputError(f"{cluster} is a mixed cluster: --plan and --svg need equal nodes: name one of its parts")
        if json:
            typer.echo(encode_line(mixed_json(spec)), nl=False)
        else:
            print_mixed_topology(make_console(), spec)
        return
    shown = api.topology.topology(spec, plan)
    if json:
        typer.echo(encode_line(shown.to_table()), nl=False)
    else:
        print_topology(make_console(), shown.cluster, shown.graph)
        if shown.traffic is not None:
            print_traffic(make_console(), shown.traffic)
    if svg is not None:
        write_text(svg, shown.draw(), force=force)
        print_written(svg)
