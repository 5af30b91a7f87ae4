"""Clusters, from a preset with a size such as `h100-sxm:16x8` or from a `cluster.toml`."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import decode, is_file, read_table, schema, shipped
from autoplan.base.hostlist import expand_hosts
from autoplan.topology.cluster import ClusterSpec, DeviceSpec, LinkLevel

_SIZED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?::(?P<nodes>-?\d{1,9})x(?P<devices>-?\d{1,9}))?")


def preset_clusters() -> tuple[str, ...]:
    """Ids of the shipped clusters."""
    return tuple(shipped("clusters"))


def preset_devices() -> tuple[str, ...]:
    """Ids of the shipped devices."""
    return tuple(shipped("devices"))


def load_device(name: str) -> DeviceSpec | None:
    """The shipped device of that id; None where there is none."""
    path = shipped("devices").get(name)
    return decode(DeviceSpec, read_table(path), f"device {name}") if path else None


def _closest(word: str, known: tuple[str, ...]) -> str:
    longer = [name for name in known if word and word.lower() in name]
    close = longer[:3] or difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.4)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(known)}"


def load_cluster(text: str) -> ClusterSpec:
    """The cluster that `text` names: NAME, NAME:NODESxDEVICES, or the path of a TOML file."""
    path = Path(text)
    if path.suffix == ".toml" or is_file(path):
        return cluster_from_table(read_table(path), str(path))
    match = _SIZED.fullmatch(text)
    if not match:
        raise InputError(f"cluster {text!r} is neither NAME:NODESxDEVICES, such as h100-sxm:16x8, nor a TOML file")
    presets = shipped("clusters")
    name = match["name"]
    if name not in presets:
        raise InputError(f"unknown cluster {name!r}: {_closest(name, tuple(presets))}")
    cluster = _preset(name)
    if match["nodes"] is None:
        return cluster
    nodes, devices = int(match["nodes"]), int(match["devices"])
    if nodes < 1 or devices < 1:
        raise InputError(f"cluster {text!r}: nodes and devices per node must be at least 1, got {nodes} and {devices}")
    levels = _resized(cluster, devices)
    try:
        return replace(cluster, num_nodes=nodes, devices_per_node=devices, levels=levels)
    except InputError as error:
        raise InputError(f"cluster {text!r}: {error}") from None


def of_size(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """So many devices of a cluster like this one: whole nodes, or part of one; which nodes these are is not known."""
    if num_devices == cluster.num_devices:
        return cluster
    nodes, rest = divmod(num_devices, cluster.devices_per_node)
    if nodes and rest:
        raise InputError(
            f"{num_devices} devices fill no whole number of nodes of {cluster.name!r}, which have "
            f"{cluster.devices_per_node} each: name the cluster that has such nodes"
        )
    resized = replace(cluster, num_nodes=max(nodes, 1), nodes=(), faults=())
    return resized if nodes else replace(resized, devices_per_node=rest, levels=_resized(cluster, rest))


@lru_cache(maxsize=64)
def _preset(name: str) -> ClusterSpec:
    return cluster_from_table(read_table(shipped("clusters")[name]), f"cluster {name}")


def _of_node(level: LinkLevel, devices: int) -> LinkLevel:
    """The link that joins a node, for a node of another size; a mesh loses the links to the devices that are gone."""
    share = min(max(devices - 1, 1) / max(level.num_devices - 1, 1), 1.0) if level.is_mesh else 1.0
    return replace(level, num_devices=devices, bandwidth_bytes_per_s=share * level.bandwidth_bytes_per_s)


def _resized(cluster: ClusterSpec, devices: int) -> tuple[LinkLevel, ...]:
    """The levels of `cluster` for nodes of another size.

    The link that joins its node joins the node of this size, or where that shrinks to an inner domain the inner link
    does; an inner link whose domain does not divide the node is left out; a rack-wide one joins as many whole nodes as
    its rack holds.
    """
    size = cluster.devices_per_node
    usable = []
    for level in cluster.levels:
        if level.num_devices > size:
            joined = level.num_devices // devices * devices or level.num_devices
            usable.append(replace(level, num_devices=joined))
        elif level.num_devices == size:
            usable.append(_of_node(level, devices))
        elif devices % level.num_devices == 0:
            usable.append(level)
    return tuple({level.num_devices: level for level in reversed(usable)}.values())[::-1]


def cluster_schema() -> dict[str, Any]:
    """JSON Schema of a cluster file: its device is a table or the id of a shipped one."""
    described = schema(ClusterSpec, human_units=True)
    properties = described["$defs"]["ClusterSpec"]["properties"]
    properties["device"] = {"anyOf": [{"enum": list(preset_devices())}, properties["device"]]}
    return described


def cluster_from_table(table: dict[str, Any], where: str) -> ClusterSpec:
    """Decode a cluster whose `device` is the id of a shipped device or a table of its own."""
    device = table.get("device")
    if isinstance(device, str):
        presets = shipped("devices")
        if device not in presets:
            raise InputError(f"{where}: unknown device {device!r}: {_closest(device, tuple(presets))}")
        table = {**table, "device": read_table(presets[device])}
    if isinstance(table.get("nodes"), list):
        table = {**table, "nodes": [_expanded(group, where) for group in table["nodes"]]}
    return decode(ClusterSpec, table, where)


def _expanded(group: Any, where: str) -> Any:
    """A group of nodes whose `names` may be host lists, 'gpu[001-016]'; the decoder says what else is wrong with it."""
    names = group.get("names") if isinstance(group, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return group
    try:
        return {**group, "names": [host for name in names for host in expand_hosts(name)]}
    except InputError as error:
        raise InputError(f"{where}: nodes: {error}") from None
