"""Command `autoplan discover`: describes this machine, this allocation or that of saved files as a cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.inputs import url_with_password
from autoplan.cli.options import DbOption, ForceOption, QuietOption, whole_number
from autoplan.cli.remarks import print_warnings, print_written

if TYPE_CHECKING:
    from autoplan.profiler.discover.describe import Description


SourcesOption = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="FILE", help="Saved output of a tool on another machine (repeatable)."),
]
KindOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Format of the files: nccl-xml, nvidia-smi, rocm-smi, hwloc, adapters, slurm, autoplan; auto detects it.",
    ),
]
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")]
NameOption = Annotated[str, typer.Option(metavar="NAME", help="Name of the cluster.")]
NodesOption = Annotated[int, whole_number("--nodes", "N", "Number of such nodes.", show_default="the nodes of the job")]
DeviceOption = Annotated[
    str, typer.Option(metavar="ID", help="Built-in device, if the sources do not say which one it is.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the observations, as a file for --from.")]


def discover(
    context: typer.Context,
    sources: SourcesOption = None,
    kind: KindOption = "auto",
    out: OutOption = None,
    force: ForceOption = False,
    name: NameOption = "",
    nodes: NodesOption = 0,
    device: DeviceOption = "",
    url: DbOption = None,
    json_: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a cluster.toml for this machine, for the nodes of a job, or from saved output of tools.

    Run it on one node, or as the program of torchrun --no-python, srun or mpirun to describe every node.
    With --db, measured link rates from the timing database take precedence over datasheets.
    """
    from autoplan.api.discovery import discover as find_cluster
    from autoplan.api.discovery import observe
    from autoplan.base.files import write_text
    from autoplan.cli.inputs import check_output
    from autoplan.profiler.discover.report import ReportFile, encode
    from autoplan.profiler.discover.write import cluster_toml

    if out is not None:
        check_output(out, force=force)
    if json_:
        observed = observe(sources or (), kind=kind, nodes=nodes)
        if observed is None:  # rank 0 writes
            return
        text = encode(ReportFile(nodes=tuple(observed[0])))
    else:
        description = find_cluster(
            sources or (),
            kind=kind,
            nodes=nodes,
            name=name,
            device=device,
            measured_links=url is not None,
            db=url_with_password(context, url),
        )
        if description is None:
            return
        heading = ("Found by `autoplan discover`: correct what is assumed.",)
        text = cluster_toml(description.cluster, description.remarks, heading)
        if not quiet:
            _print_findings(description)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text, force=force)
        print_written(out)
        if not quiet and not json_:
            typer.echo(f"next: autoplan topo {shlex.quote(str(out))}", err=True)


def _print_findings(description: Description) -> None:
    """Print the findings and their sources in a few lines."""
    from autoplan.base.units import format_percent

    cluster, remarks = description.cluster, description.remarks
    rows = [("device", f"{cluster.devices_per_node} x {cluster.device.name}", remarks.get("device", ""))]
    for at, level in enumerate(cluster.levels):
        rate = f"{level.bandwidth_bytes_per_s / 1e9:g} GB/s x {format_percent(level.efficiency)}"
        measured, nominal = (
            remarks.get(f"levels[{at}].{name}", "") for name in ("efficiency", "bandwidth_bytes_per_s")
        )
        remark = measured if measured.startswith("measured") else nominal
        rows.append((level.name, f"{level.num_devices} devices, {rate}", remark))
    network = cluster.network
    rate = (
        f"{network.nics_per_device:g} x {network.nic_bytes_per_s / 1e9:g} GB/s x {format_percent(network.efficiency)}"
    )
    rows.append((network.kind, f"for each device {rate}", remarks.get("network.nic_bytes_per_s", "")))
    switches = len({group.switches for group in cluster.nodes if group.switches})
    rows.append(("nodes", str(cluster.num_nodes) + (f" on {switches} switches" if switches else ""), ""))
    widths = [max(len(row[at]) for row in rows) for at in range(2)]
    for title, text, remark in rows:
        print(f"{title:<{widths[0]}}  {text:<{widths[1]}}  {remark}".rstrip(), file=sys.stderr)
    print_warnings(description.warnings)
