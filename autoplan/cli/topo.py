"""Command `autoplan topo`: shows how a cluster is connected, and how fast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError
from autoplan.cli.complete import clusters
from autoplan.cli.options import ForceOption

if TYPE_CHECKING:
    from autoplan.cost.collectives.traffic import StepTraffic
    from autoplan.topology.cluster import ClusterSpec


def topo(
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="As for search.", autocompletion=clusters)],
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Show what a step of this plan.json moves over the links.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the cluster into an SVG file.")] = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the graph as JSON instead of a tree.")] = False,
) -> None:
    """Show a cluster as a tree of switches, nodes and links with their rates, or draw it; or the traffic of a plan."""
    import msgspec

    from autoplan.api.problem import load_any_cluster
    from autoplan.base.files import write_text
    from autoplan.cli.inputs import check_output
    from autoplan.report.cluster import mixed_json, print_mixed_topology, print_topology, topology_json
    from autoplan.report.cluster_drawing import draw
    from autoplan.report.terminal import make_console
    from autoplan.report.traffic import print_traffic, traffic_json
    from autoplan.topology.graph import quotient
    from autoplan.topology.mixed_cluster import MixedCluster

    if svg is not None:
        check_output(svg, force=force)
    spec = load_any_cluster(cluster)
    if isinstance(spec, MixedCluster):
        if plan is not None or svg is not None:
            raise InputError(f"{cluster} has unlike parts: --plan and --svg show a cluster of equal nodes, name a part")
        if json:
            typer.echo(msgspec.json.encode(mixed_json(spec)).decode())
        else:
            print_mixed_topology(make_console(), spec)
        return
    step = _step_traffic(plan, spec) if plan is not None else None
    found = quotient(spec)
    if json:
        table = topology_json(spec, found) | ({"traffic": traffic_json(step)} if step else {})
        typer.echo(msgspec.json.encode(table).decode())
    else:
        print_topology(make_console(), spec, found)
        if step is not None:
            print_traffic(make_console(), step)
    if svg is not None:
        write_text(svg, draw(spec, found, step), force=force)
        typer.echo(f"drawn into {svg}", err=True)


def _step_traffic(path: Path, cluster: ClusterSpec) -> StepTraffic:
    """Return the traffic of a file's plan on `cluster`, which need not be the one that it was made for."""
    from autoplan.api.plan_files import load_plan_file, problem_of
    from autoplan.cost.collectives.traffic import step_traffic

    file = replace(load_plan_file(path), timings="")  # bytes rest on none
    problem, plan = problem_of(file), file.best.plan
    if plan.num_devices != cluster.num_devices:
        raise InputError(
            f"{path}: the plan is for {plan.num_devices} devices, {cluster.name} has {cluster.num_devices}: "
            "give the cluster that it was made for, or one of its size"
        )
    return step_traffic(replace(problem, cluster=cluster), plan)
