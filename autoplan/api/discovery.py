"""Cluster discovery: this machine, the nodes of this job, or the saved output of tools."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from autoplan.api.timings import stored_timings
from autoplan.base.errors import AutoplanWarning, InputError
from autoplan.base.processes import place_from
from autoplan.profiler.discover.allocation import describe_all, gather, job_hosts, merge_all, switches_above
from autoplan.profiler.discover.describe import Description
from autoplan.profiler.discover.links import OPERATIONS, with_measured
from autoplan.profiler.discover.local import host_name, see, switch_tree
from autoplan.profiler.discover.report import FORMATS, Report, ReportFile, read_source
from autoplan.profiler.discover.slurm import SwitchTree
from autoplan.topology.cluster import ClusterSpec, MachineSpec


@lru_cache(maxsize=1)
def local_cluster() -> ClusterSpec:
    """Return what `autoplan discover` finds on this machine, or for the nodes of this job."""
    place = place_from(os.environ)
    if place is not None and place.num_ranks > 1:
        raise InputError(
            f"cluster local is for one program, {place.launcher} has started {place.num_ranks} ranks: let them run "
            "autoplan discover --out cluster.toml, and give that file"
        )
    observed = observed_here()
    assert observed is not None  # no other rank has it
    try:
        description = described(*observed, is_here=True)
    except InputError as error:
        raise InputError(f"cluster local: {error} to autoplan discover --out FILE, and give that file") from None
    cores = "no accelerator was found here: cluster local uses CPU cores as devices"
    remarks = (*((cores,) if description.cluster.device.vendor == "cpu" else ()), *description.warnings)
    for remark in remarks:
        warnings.warn(remark, AutoplanWarning, stacklevel=2)
    return description.cluster


def discover(
    sources: Sequence[str | Path] = (),
    *,
    kind: str = "auto",
    nodes: int = 0,
    name: str = "",
    device: str = "",
    measured_links: bool = False,
    db: str | None = None,
) -> Description | None:
    """Return the cluster of this machine, of the nodes of this job, or of saved output of tools (`sources`).

    The result says where each figure comes from.  `kind` is the format of the files, `nodes` the number of such
    nodes, `name` the name of the cluster, and `device` the built-in device if the sources do not say which one it is.
    With `measured_links`, link rates measured in the timing database `db` take precedence over datasheets.

    Returns None on ranks other than the first.  Raises InputError if the sources do not describe a node.
    """
    observed = observe(sources, kind=kind, nodes=nodes)
    if observed is None:
        return None
    description = described(*observed, is_here=not sources, nodes=nodes, name=name, device=device)
    return _with_measured_links(description, db) if measured_links else description


def observe(
    sources: Sequence[str | Path] = (), *, kind: str = "auto", nodes: int = 0
) -> tuple[list[Report], SwitchTree | None] | None:
    """Return what saved files, this machine or all nodes of the job report; None on ranks other than the first."""
    if nodes < 0:
        raise InputError(f"--nodes must be at least 1, got {nodes}")
    return _read_files([Path(source) for source in sources], kind) if sources else observed_here()


def described(
    reports: list[Report], tree: SwitchTree | None, *, is_here: bool, nodes: int = 0, name: str = "", device: str = ""
) -> Description:
    """Return the cluster of the nodes in `reports`; `is_here`: this machine is one of them."""
    hosts = () if not is_here or nodes or place_from(os.environ) else job_hosts(os.environ)
    description = describe_all(merge_all(reports), hosts=hosts, num_nodes=nodes, tree=tree, name=name, device=device)
    machine = _machine() if is_here else None
    if machine is None:
        return description
    remarks = description.remarks | {"machine": "identifies such nodes in the timing database"}
    return replace(description, cluster=replace(description.cluster, machine=machine), remarks=remarks)


def _read_files(sources: list[Path], kind: str) -> tuple[list[Report], SwitchTree | None]:
    """Return the contents of saved files; those about one node in the order of how reliable their formats are."""
    order = list(FORMATS)
    parsed = sorted((read_source(path, kind) for path in sources), key=lambda source: order.index(source[0]))
    reports: list[Report] = []
    trees = []
    for _, content in parsed:
        if isinstance(content, SwitchTree):
            trees.append(content)
        elif isinstance(content, ReportFile):
            reports += content.nodes
        else:
            reports.append(Report(host=content.host, seen=(content,)))
    if not reports:
        raise InputError("--from: no file tells of a node: add what nvidia-smi topo -m, NCCL or lstopo say of one")
    if len(trees) > 1:
        raise InputError("--from: give one file of Slurm's topology")
    return reports, trees[0] if trees else None


def observed_here() -> tuple[list[Report], SwitchTree | None] | None:
    """Return the reports of this machine or of all nodes of the job; None on ranks other than 0."""
    place, own_report = place_from(os.environ), None
    if place is None or place.local_rank == 0:
        devices, troubles = see()
        own_report = Report(
            host=host_name(), switches=switches_above(os.environ), seen=tuple(devices), troubles=tuple(troubles)
        )
    if place is None or place.num_ranks == 1:
        return ([own_report], switch_tree(os.environ)) if own_report else None
    _check_torch(place.launcher)
    gathered = gather(place, own_report)
    return None if gathered is None else (gathered, switch_tree(os.environ))


def _check_torch(launcher: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"nodes of {launcher} meet through torch, which is not installed: run autoplan discover --json --out FILE "
            "on each node, and give the files with --from"
        )


def _machine() -> MachineSpec | None:
    """Return this machine as the timing database stores it; None if measurements are not possible here."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "psutil")):
        return None
    from autoplan.profiler.machine.environment import own_fingerprint  # brings torch

    fingerprint = own_fingerprint()
    return MachineSpec(
        runtime=fingerprint.runtime,
        torch=fingerprint.torch,
        collectives=fingerprint.collectives,
        topology=fingerprint.topology,
        power_cap_w=fingerprint.power_cap_w,
    )


def _with_measured_links(description: Description, url: str | None) -> Description:
    """Return the cluster with the links that were measured on it, or on others with its device."""
    timings = stored_timings(description.cluster, url, (*OPERATIONS, "all_to_all")).measurements
    cluster, remarks = with_measured(description.cluster, list(timings))
    notes = description.warnings
    if not remarks:
        notes = (*notes, f"the database has no test of links of {cluster.device.name}: rates are nominal")
    return replace(description, cluster=cluster, remarks=description.remarks | remarks, warnings=notes)
