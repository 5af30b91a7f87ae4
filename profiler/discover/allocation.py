"""Nodes of this job, and the cluster described by all their reports."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.hostlist import expand_hosts
from autoplan.base.processes import START_S, RankPlace
from autoplan.profiler.discover.defects import defects_of
from autoplan.profiler.discover.describe import Description, describe, training_nics
from autoplan.profiler.discover.fabric import fabric_of
from autoplan.profiler.discover.merge import merge
from autoplan.profiler.discover.observed import ObservedNode
from autoplan.profiler.discover.report import Report, ReportFile, decode, encode
from autoplan.profiler.discover.slurm import SwitchTree
from autoplan.topology.cluster import Fault, NodeGroup, SwitchTier


def job_hosts(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that Slurm allocated to this job; empty outside of a job."""
    text = variables.get("SLURM_JOB_NODELIST", "")
    return tuple(expand_hosts(text)) if text else ()


def switches_above(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches of this node, innermost first, from Slurm's 'core.pod1.leaf3.gpu017' without the core."""
    pattern = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = variables.get("SLURM_TOPOLOGY_ADDR", "").split(".", maxsplit=len(pattern) - 1)
    if len(pattern) < 3 or len(names) != len(pattern) or {*pattern[:-1]} - {"switch", "block"}:
        return ()
    return tuple(reversed(names[1:-1]))


def gather(place: RankPlace, own_report: Report | None) -> list[Report] | None:
    """Return all node reports on rank 0, sent as text through the job's store without using devices; None elsewhere."""
    from torch.distributed.rendezvous import rendezvous

    limit = datetime.timedelta(seconds=START_S)
    try:
        store, rank, size = next(rendezvous(place.meeting_point, place.rank, place.num_ranks, timeout=limit))
        store.set(f"autoplan/discover/{rank}", encode(ReportFile(nodes=(own_report,) if own_report else ())))
        if rank:
            return None
        texts = [store.get(f"autoplan/discover/{node}") for node in range(size)]
    except (RuntimeError, OSError, ValueError) as error:
        raise AutoplanError(f"the ranks of {place.launcher} did not meet: {error}") from None
    return [report for text in texts for report in decode(text.decode(errors="replace")).nodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedReports:
    """Observed nodes, each merged from all its sources."""

    nodes: Mapping[str, ObservedNode]  # by host, in the order of their ranks
    switches: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]


def merge_all(reports: Sequence[Report]) -> MergedReports:
    """Merge `reports` by host; a report without a host applies to all."""
    by_host: dict[str, list[ObservedNode]] = {}
    warnings: list[str] = []
    for report in reports:
        for observed in report.seen:
            by_host.setdefault(report.host or observed.host, []).append(observed)
        warnings += [f"{report.host}: {trouble}" for trouble in report.troubles]
    general = by_host.pop("", []) if len(by_host) > 1 else []
    nodes = {}
    for host, observations in by_host.items():
        nodes[host], contradictions = merge([*observations, *general])
        warnings += [f"{host}: {text}" if host else text for text in contradictions]
    return MergedReports(
        nodes=nodes,
        switches={report.host: report.switches for report in reports if report.switches},
        warnings=tuple(warnings),
    )


def describe_all(
    reports: MergedReports,
    *,
    hosts: Sequence[str] = (),
    num_nodes: int = 0,
    tree: SwitchTree | None = None,
    name: str = "",
    device: str = "",
) -> Description:
    """Return the cluster of the observed nodes.

    If not all nodes were observed, `hosts` are the nodes of the job, or `num_nodes` is their number: they are assumed
    to be equal.  `tree` has the switches above them; if no node has a name, the cluster is the whole tree.
    """
    if not reports.nodes:
        raise InputError("no source tells of a node: add what nvidia-smi topo -m, NCCL or lstopo say of one")
    if len(reports.nodes) > 1 or tree is not None:
        hosts = hosts or tuple(host for host in reports.nodes if host)
    if tree is not None and not hosts:
        hosts = tuple(name for group in tree.groups for name in group.names)
    usual = _usual(reports.nodes)
    number = num_nodes or max(len(hosts), len(reports.nodes))
    description = describe(usual, num_nodes=number, name=name, device=device)
    if len(hosts) == number:
        description = _allocated(description, hosts, reports.switches, tree)
    elif tree is not None:
        description = _with_tree_tiers(description, number, tree)
    description = _with_defects(description, reports.nodes, usual)
    warnings = [*reports.warnings, *description.warnings]
    if number > len(reports.nodes):
        warnings.append(f"{len(reports.nodes)} of {number} nodes were seen; the others are assumed to be identical")
    return replace(description, warnings=tuple(warnings))


def _kind(node: ObservedNode) -> tuple[object, ...]:
    """Return the devices and adapters that define the type of a node."""
    names = tuple(sorted(device.name for device in node.devices))
    return (names, tuple(sorted((nic.kind, nic.bytes_per_s or 0.0) for nic in training_nics(node))))


def _usual(nodes: Mapping[str, ObservedNode]) -> ObservedNode:
    """Return a node of the most frequent type; of equally frequent types, the one with more devices."""
    counts = Counter(_kind(node) for node in nodes.values())
    return max(nodes.values(), key=lambda node: (counts[_kind(node)], len(node.devices), len(training_nics(node))))


def _with_defects(description: Description, nodes: Mapping[str, ObservedNode], usual: ObservedNode) -> Description:
    """Return the cluster with the defects of its nodes: all as warnings, and priced ones also as faults."""
    cluster, nics = description.cluster, training_nics(usual)
    host_names = {name for group in cluster.nodes for name in group.names}
    warnings, faults = list(description.warnings), []
    for at, (host, node) in enumerate(nodes.items()):
        for defect in defects_of(node, usual, fabric_of(node, cluster.device), nics, cluster.network):
            warnings.append(f"{host}: {defect.text}" if host else defect.text)
            if defect.part is not None and (host in host_names or not host_names):
                place = host if host_names else at
                faults.append(Fault(part=defect.part, rate_share=defect.rate_share, node=place, index=defect.index))
    try:
        cluster = replace(cluster, faults=tuple(faults))
    except InputError as error:
        warnings.append(f"faults are left out of the file: {error}")
    return replace(description, cluster=cluster, warnings=tuple(warnings))


def _allocated(
    description: Description,
    hosts: Sequence[str],
    switches: Mapping[str, tuple[str, ...]],
    tree: SwitchTree | None,
) -> Description:
    """Return the cluster with its nodes by name, on the switches that Slurm reports, if any."""
    cluster, warnings = description.cluster, list(description.warnings)
    if tree is not None:
        groups, tier_nodes, source = tree.of(hosts), tree.tier_nodes, "topology of Slurm"
    elif all(host in switches for host in hosts) and len({len(switches[host]) for host in hosts}) == 1:
        groups, source = _grouped(hosts, switches), "SLURM_TOPOLOGY_ADDR"
        tier_nodes = tuple(
            max(Counter(switches[host][at] for host in hosts).values()) for at in range(len(groups[0].switches))
        )
    else:
        groups, tier_nodes, source = (NodeGroup(names=tuple(hosts)),), (), ""
        if any(tier.oversubscription > 1 for tier in cluster.network.tiers):
            warnings.append("the switches of the nodes are unknown; nodes are assumed to fill them in order")
            return replace(description, warnings=tuple(warnings))
    remarks = _with_tiers(description.remarks, len(tier_nodes), source)
    remarks["nodes[0]"] = f"the allocation; switches: {source}" if source else "the allocation; switches unknown"
    network = replace(cluster.network, tiers=_tiers(tier_nodes))
    try:
        cluster = replace(cluster, network=network, nodes=groups)
    except InputError as error:
        warnings.append(f"the allocation is left out of the file: {error}")
        return replace(description, warnings=tuple(warnings))
    return Description(cluster=cluster, remarks=remarks, warnings=tuple(warnings))


def _with_tree_tiers(description: Description, number: int, tree: SwitchTree) -> Description:
    """Return the cluster with the tiers of Slurm's switches; which nodes below them it has is unknown."""
    tiers = _tiers(tree.tier_nodes)
    num_listed = sum(len(group.names) for group in tree.groups)
    warning = (
        f"it is unknown which of the {num_listed} nodes in Slurm's topology are meant; {number} are assumed to fill "
        "switches in order"
    )
    return Description(
        cluster=replace(description.cluster, network=replace(description.cluster.network, tiers=tiers)),
        remarks=_with_tiers(description.remarks, len(tiers), "topology of Slurm"),
        warnings=(*description.warnings, warning),
    )


def _with_tiers(remarks: Mapping[str, str], num_tiers: int, source: str) -> dict[str, str]:
    """Return `remarks` with those on tiers replaced."""
    remarks_kept = {place: text for place, text in remarks.items() if not place.startswith("network.tiers")}
    remarks_kept |= {f"network.tiers[{at}].num_nodes": source for at in range(num_tiers)}
    assumed = "assumed: Slurm does not say, correct it"
    return remarks_kept | {f"network.tiers[{at}].oversubscription": assumed for at in range(num_tiers)}


def _grouped(hosts: Sequence[str], switches: Mapping[str, tuple[str, ...]]) -> tuple[NodeGroup, ...]:
    groups: list[NodeGroup] = []
    for host in hosts:
        if groups and groups[-1].switches == switches[host]:
            groups[-1] = replace(groups[-1], names=(*groups[-1].names, host))
        else:
            groups.append(NodeGroup(names=(host,), switches=switches[host]))
    return tuple(groups)


def _tiers(tier_nodes: Sequence[int]) -> tuple[SwitchTier, ...]:
    """Return tiers with at most so many nodes; each contains several complete tiers of the level below."""
    tiers: list[SwitchTier] = []
    for at, number in enumerate(tier_nodes):
        below = tiers[-1].num_nodes if tiers else 1
        size = max(-(-number // below), 2 if tiers else 1) * below
        tiers.append(SwitchTier(name=f"tier {at + 1}" if at else "leaf", num_nodes=size))
    return tuple(tiers)
