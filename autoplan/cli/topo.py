"""`autoplan topo`: what hangs on what in a cluster, and how fast?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli.inputs import ForceOption


def topo(
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="Preset with a size (h100-sxm:16x8) or a cluster.toml.")
    ],
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the cluster into an SVG file.")] = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the graph as JSON instead of a tree.")] = False,
) -> None:
    """Show a cluster as a tree of switches, nodes and links with their rates, or draw it."""
    import msgspec

    from autoplan.cli.inputs import check_output
    from autoplan.files import write_text
    from autoplan.read.cluster import load_cluster
    from autoplan.report.drawing import draw
    from autoplan.report.terminal import make_console
    from autoplan.report.topology import print_topology, topology_json
    from autoplan.topology.graph import quotient

    if svg is not None:
        check_output(svg, force=force)
    spec = load_cluster(cluster)
    found = quotient(spec)
    if json:
        typer.echo(msgspec.json.encode(topology_json(spec, found)).decode())
    else:
        print_topology(make_console(), spec, found)
    if svg is not None:
        write_text(svg, draw(spec, found), force=force)
        typer.echo(f"drawn into {svg}", err=True)
