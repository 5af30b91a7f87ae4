"""Clusters that lost nodes or devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.readers.cluster import of_size
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster
from autoplan.topology.placement import node_names

SHOWN_NAMES = 8


def remaining(
    cluster: ClusterSpec | MixedCluster,
    *,
    nodes: int | None = None,
    without: Sequence[str] = (),
    devices: int | None = None,
) -> tuple[ClusterSpec | MixedCluster, ...]:
    """Return what is left by one of three descriptions; several clusters where devices of a node may be left idle.

    `nodes` and `devices` are numbers that are left, `without` names lost nodes, or as PART:N those of a part of a mixed
    cluster.  InputError for what does not describe a part of the cluster.
    """
    if (num_given := (nodes is not None) + bool(without) + (devices is not None)) != 1:
        remedy = "give one of them" if not num_given else "leave all but one of them out"
        raise InputError(f"--nodes and --gpus say how many are left, --without which nodes are lost: {remedy}")
    for flag, left, total in (("--nodes", nodes, cluster.num_nodes), ("--gpus", devices, cluster.num_devices)):
        if left is not None and not 1 <= left < total:
            rule = f"must be from 1 to {total - 1}" if total > 1 else "give the number of its devices left with --gpus"
            raise InputError(f"{flag} {left}: the plan runs on {total}: {rule}")
    if without:
        return (_without(cluster, without),)
    flag = "--nodes" if nodes is not None else "--gpus"
    if isinstance(cluster, MixedCluster):
        parts = ", ".join(cluster.part_names)
        raise InputError(f"{flag} does not say of which part ({parts}): name lost nodes with --without PART:NUMBER")
    if cluster.nodes:
        raise InputError(f"{cluster.name} names its nodes: list the lost ones with --without")
    if devices is not None:
        return tuple(_of_devices(cluster, devices))
    return (replace(cluster, num_nodes=nodes or 1),)


def _of_devices(cluster: ClusterSpec, devices: int) -> Iterator[ClusterSpec | MixedCluster]:
    """Yield whole nodes with the rest of a node, all of it or as many devices as divide well, and whole nodes alone."""
    nodes, beside = divmod(devices, cluster.devices_per_node)
    full = of_size(cluster, nodes * cluster.devices_per_node if nodes else beside)
    for count in sorted({beside, 1 << beside.bit_length() - 1}, reverse=True) if nodes and beside else ():
        yield MixedCluster(name=cluster.name, parts=(full, of_size(cluster, count)))
    yield full


def _without(cluster: ClusterSpec | MixedCluster, lost: Sequence[str]) -> ClusterSpec | MixedCluster:
    """Return the cluster without named nodes, or numbers of nodes of its parts."""
    parts = cluster.parts if isinstance(cluster, MixedCluster) else (cluster,)
    part_names = cluster.part_names if isinstance(cluster, MixedCluster) else (cluster.name,)
    names, counts = [], dict.fromkeys(part_names, 0)
    for text in lost:
        part, sign, number = text.rpartition(":")
        if sign and part in counts and number.isdigit():
            counts[part] += int(number)
        else:
            names.append(text)
    known = [name for part in parts for name in node_names(part)]
    if names and not known:
        remedy = "--without PART:NUMBER" if len(parts) > 1 else "--nodes"
        raise InputError(f"{cluster.name} does not name its nodes: give the number with {remedy}")
    if unknown := [name for name in names if name not in known]:
        raise InputError(
            f"--without {unknown[0]}: {cluster.name} has no such node ({', '.join(known[:SHOWN_NAMES])}, ...)"
        )
    left = [_smaller(part, counts[part_name], names) for part, part_name in zip(parts, part_names, strict=True)]
    kept = tuple(part for part in left if part is not None)
    if not kept:
        raise InputError("no node is left")
    return replace(cluster, parts=kept) if isinstance(cluster, MixedCluster) else kept[0]


def _smaller(part: ClusterSpec, num_lost: int, lost: Sequence[str]) -> ClusterSpec | None:
    """Return a part without some of its nodes; None if none is left."""
    if num_lost:
        if part.nodes:
            raise InputError(f"{part.name} names its nodes: name the lost ones, not their number")
        if num_lost > part.num_nodes:
            raise InputError(f"--without {part.name}:{num_lost}: it has {part.num_nodes} nodes")
        return replace(part, num_nodes=part.num_nodes - num_lost) if num_lost < part.num_nodes else None
    if not part.nodes:
        return part
    groups = [
        replace(group, names=names)
        for group in part.nodes
        if (names := tuple(name for name in group.names if name not in lost))
    ]
    if not groups:
        return None
    faults = tuple(fault for fault in part.faults if fault.node not in lost)
    return replace(part, num_nodes=sum(len(group.names) for group in groups), nodes=tuple(groups), faults=faults)
