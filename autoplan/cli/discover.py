"""`autoplan discover`: what is this machine, this allocation or that of saved files made of?"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError
from autoplan.cli.inputs import whole_url
from autoplan.cli.options import DbOption, ForceOption, QuietOption, whole_number

if TYPE_CHECKING:
    from autoplan.profiler.discover.describe import Description
    from autoplan.profiler.discover.report import Report
    from autoplan.profiler.discover.slurm import SwitchTree
    from autoplan.topology.cluster import ClusterSpec, MachineSpec


def discover(
    context: typer.Context,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="What a tool printed on another machine; may be repeated."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Of the files: nccl-xml, nvidia-smi, rocm-smi, hwloc, adapters, slurm, autoplan; auto looks inside.",
        ),
    ] = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to stdout.")] = None,
    force: ForceOption = False,
    name: Annotated[str, typer.Option(metavar="NAME", help="Of the cluster.")] = "",
    nodes: Annotated[int, whole_number("--nodes", "N", "How many such nodes there are; 0: those of the job.")] = 0,
    device: Annotated[
        str, typer.Option(metavar="ID", help="The shipped device, where the sources do not say which it is.")
    ] = "",
    url: DbOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was seen, as a file for --from.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Write a cluster.toml of this machine, of the nodes of a job, or of saved output of tools.

    Run it on one node, or as the program of torchrun --no-python, srun or mpirun: then every node says what it has.
    With --db the links that the timing database has measured count before those of data sheets.
    """
    from autoplan.base.files import write_text
    from autoplan.cli.inputs import check_output
    from autoplan.profiler.discover.report import ReportFile, encode
    from autoplan.profiler.discover.write import cluster_toml

    if nodes < 0:
        raise InputError(f"--nodes must be at least 1, got {nodes}")
    if out is not None:
        check_output(out, force=force)
    gathered = _read(sources, kind) if sources else _look()
    if gathered is None:  # rank 0 writes
        return
    reports, tree = gathered
    if json_:
        text = encode(ReportFile(nodes=tuple(reports)))
    else:
        description = _described(reports, tree, is_here=not sources, nodes=nodes, name=name, device=device)
        if url is not None:
            description = _measured(description, whole_url(context, url))
        heading = ("Found by `autoplan discover`: correct what is assumed.",)
        text = cluster_toml(description.cluster, description.remarks, heading)
        if not quiet:
            _tell(description)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text, force=force)
        typer.echo(f"wrote {out}", err=True)
        if not quiet and not json_:
            typer.echo(f"next: autoplan topo {shlex.quote(str(out))}", err=True)


@lru_cache(maxsize=1)
def local_cluster(*, quiet: bool) -> ClusterSpec:
    """What `autoplan discover` finds on this machine, or for the nodes of this job; warnings go to stderr."""
    from autoplan.base.processes import place_from

    place = place_from(os.environ)
    if place is not None and place.num_ranks > 1:
        raise InputError(
            f"cluster local is for one program, {place.launcher} has started {place.num_ranks} ranks: let them run "
            "autoplan discover --out cluster.toml, and give that file"
        )
    seen = _look()
    assert seen is not None  # no other rank has it
    try:
        description = _described(*seen, is_here=True)
    except InputError as error:
        raise InputError(f"cluster local: {error} to autoplan discover --out FILE, and give that file") from None
    cores = "no accelerator was found here: the devices of cluster local are CPU cores"
    warnings = (*((cores,) if description.cluster.device.vendor == "cpu" else ()), *description.warnings)
    for warning in () if quiet else warnings:
        print(f"autoplan: warning: {warning}", file=sys.stderr)
    return description.cluster


def _described(
    reports: list[Report], tree: SwitchTree | None, *, is_here: bool, nodes: int = 0, name: str = "", device: str = ""
) -> Description:
    """The cluster of the nodes that `reports` tell of; `is_here`: this machine is one of them."""
    from autoplan.base.processes import place_from
    from autoplan.profiler.discover.allocation import describe_all, found_in, job_hosts

    hosts = () if not is_here or nodes or place_from(os.environ) else job_hosts(os.environ)
    description = describe_all(found_in(reports), hosts=hosts, num_nodes=nodes, tree=tree, name=name, device=device)
    machine = _machine() if is_here else None
    if machine is None:
        return description
    remarks = description.remarks | {"machine": "by this the timing database knows such nodes"}
    return replace(description, cluster=replace(description.cluster, machine=machine), remarks=remarks)


def _read(sources: list[Path], kind: str) -> tuple[list[Report], SwitchTree | None]:
    """What saved files say; those about one node in the order in which their formats are believed."""
    from autoplan.profiler.discover.report import FORMATS, Report, ReportFile, read_source
    from autoplan.profiler.discover.slurm import SwitchTree

    order = list(FORMATS)
    parsed = sorted((read_source(path, kind) for path in sources), key=lambda one: order.index(one[0]))
    reports: list[Report] = []
    trees = []
    for _, found in parsed:
        if isinstance(found, SwitchTree):
            trees.append(found)
        elif isinstance(found, ReportFile):
            reports += found.nodes
        else:
            reports.append(Report(host=found.host, seen=(found,)))
    if not reports:
        raise InputError("--from: no file tells of a node: add what nvidia-smi topo -m, NCCL or lstopo say of one")
    if len(trees) > 1:
        raise InputError("--from: give one file of Slurm's topology")
    return reports, trees[0] if trees else None


def _look() -> tuple[list[Report], SwitchTree | None] | None:
    """What this machine says, or all nodes of the job: on rank 0, None on others."""
    from autoplan.base.processes import place_from
    from autoplan.profiler.discover.allocation import gather, switches_above
    from autoplan.profiler.discover.local import host_name, see, switch_tree
    from autoplan.profiler.discover.report import Report

    place, mine = place_from(os.environ), None
    if place is None or place.local_rank == 0:
        seen, troubles = see()
        mine = Report(host=host_name(), switches=switches_above(os.environ), seen=tuple(seen), troubles=tuple(troubles))
    if place is None or place.num_ranks == 1:
        return ([mine], switch_tree(os.environ)) if mine else None
    _check_torch(place.launcher)
    gathered = gather(place, mine)
    return None if gathered is None else (gathered, switch_tree(os.environ))


def _check_torch(launcher: str) -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"nodes of {launcher} meet through torch, which is not installed: run autoplan discover --json --out FILE "
            "on each node, and give the files with --from"
        )


def _machine() -> MachineSpec | None:
    """By what the timing database knows this machine; None where it cannot measure."""
    import importlib.util

    if any(importlib.util.find_spec(name) is None for name in ("torch", "psutil")):
        return None
    from autoplan.profiler.machine.environment import own_fingerprint
    from autoplan.topology.cluster import MachineSpec

    own = own_fingerprint()
    return MachineSpec(runtime=own.runtime, torch=own.torch, collectives=own.collectives, topology=own.topology)


def _measured(description: Description, url: str | None) -> Description:
    """The cluster with the links that were measured on it, or on others with its device."""
    from autoplan.cli.inputs import stored_timings
    from autoplan.profiler.discover.links import OPERATIONS, with_measured

    timings = stored_timings(description.cluster, url, (*OPERATIONS, "all_to_all"))
    cluster, remarks = with_measured(description.cluster, timings)
    warnings = description.warnings
    if not remarks:
        warnings = (*warnings, f"the database has no test of links of {cluster.device.name}: rates are nominal")
    return replace(description, cluster=cluster, remarks=description.remarks | remarks, warnings=warnings)


def _tell(description: Description) -> None:
    """What was found, and from where: a few lines for the person at the terminal."""
    from autoplan.base.units import format_percent

    cluster, remarks = description.cluster, description.remarks
    rows = [("device", f"{cluster.devices_per_node} x {cluster.device.name}", remarks.get("device", ""))]
    for at, level in enumerate(cluster.levels):
        rate = f"{level.bandwidth_bytes_per_s / 1e9:g} GB/s x {format_percent(level.efficiency)}"
        measured, nominal = (remarks.get(f"levels[{at}].{one}", "") for one in ("efficiency", "bandwidth_bytes_per_s"))
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
    for what, text, remark in rows:
        print(f"{what:<{widths[0]}}  {text:<{widths[1]}}  {remark}".rstrip(), file=sys.stderr)
    for warning in description.warnings:
        print(f"autoplan: warning: {warning}", file=sys.stderr)
