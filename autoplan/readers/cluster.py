"""Clusters, from a preset with a size such as `h100-sxm:16x8` or from a `cluster.toml`."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import decode, is_file, read_table, shipped, to_fields
from autoplan.base.hostlist import expand_hosts
from autoplan.base.json_schema import schema
from autoplan.base.names import suggestion
from autoplan.base.units import first_faults
from autoplan.base.values import parse_count
from autoplan.readers.device import DATASHEET, based_on, device_schema, device_table, preset_devices
from autoplan.topology.cluster import MAX_DEVICES, ClusterSpec, DeviceSpec, LinkLevel

_COMPLETED = ("levels", "network")  # keys of a file that may come from a similar cluster
_SIZED = re.compile(r"(?P<name>[A-Za-z0-9._ -]+)(?::(?P<nodes>-?\d{1,9})x(?P<devices>-?\d{1,9}))?")
# Common notations of sizes: 8xH100, 2x8xH100; H100x8, h100:8.
_COUNTED = (
    re.compile(r"(?:(?P<nodes>\d{1,9})x)?(?P<devices>\d{1,9}) ?x ?(?P<name>[A-Za-z0-9][A-Za-z0-9._ -]*)"),
    re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._ -]*?)(?P<nodes>(?!))? ?[:x] ?(?P<devices>\d{1,9})"),
)


@cache
def preset_clusters() -> tuple[str, ...]:
    """Return the ids of the shipped clusters: those with a file, and 8-device nodes of all other shipped devices."""
    with_file = shipped("clusters")
    placed = {read_table(path)["device"] for path in with_file.values()}
    return tuple(sorted({*with_file, *(name for name in preset_devices() if name not in placed)}))


def load_cluster(text: str) -> ClusterSpec:
    """Return the cluster for NAME, NAME:NODESxDEVICES, or the path of a TOML file."""
    path = Path(text)
    if path.suffix == ".toml" or is_file(path):
        return cluster_from_table(read_table(path), str(path))
    match = _SIZED.fullmatch(text)
    if not match:
        form = "is neither NAME:NODESxDEVICES, such as h100-sxm:16x8, nor a TOML file"
        raise InputError(_recounted(text) or f"cluster {text!r} {form}")
    cluster = _preset(_known_name(match["name"]))
    if match["nodes"] is None:
        return cluster
    nodes, devices = int(match["nodes"]), int(match["devices"])
    if nodes < 1 or devices < 1:
        raise InputError(f"cluster {text!r}: nodes and devices per node must be at least 1, got {nodes} and {devices}")
    if devices > cluster.devices_per_node and devices in {level.num_devices for level in cluster.levels}:
        # Whole racks, such as gb200-nvl72:4x72, of nodes with hosts of their own.
        nodes, devices = nodes * devices // cluster.devices_per_node, cluster.devices_per_node
    levels = _resized(cluster, devices)
    try:
        return replace(cluster, num_nodes=nodes, devices_per_node=devices, levels=levels)
    except InputError as error:
        raise InputError(f"cluster {text!r}: {error}") from None


def of_size(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """Return a similar cluster with this many devices: whole nodes, or part of one; node names are unknown."""
    if num_devices == cluster.num_devices:
        return cluster
    nodes, remainder = divmod(num_devices, cluster.devices_per_node)
    if nodes and remainder:
        raise InputError(
            f"{num_devices} devices do not fill whole nodes of {cluster.name!r}, which have "
            f"{cluster.devices_per_node} each: name a cluster with such nodes"
        )
    resized = replace(cluster, num_nodes=max(nodes, 1), nodes=(), faults=())
    return resized if nodes else replace(resized, devices_per_node=remainder, levels=_resized(cluster, remainder))


def _known_name(text: str) -> str:
    """Return the id of the shipped cluster named by `text`, in any common spelling."""
    if text in shipped("clusters") or text in preset_clusters():
        return text
    if name := cluster_called(text):
        return name
    listed = "autoplan list clusters shows the built-in ones;"
    own = "autoplan new cluster writes a template for your own"
    raise InputError(
        _recounted(text) or f"unknown cluster {text!r}: {suggestion(text, preset_clusters(), listed)} {own}"
    )


def cluster_called(text: str) -> str | None:
    """Return the id of the shipped cluster that people call `text`; None if there is none."""
    return _spellings().get(_plain(text))


def _recounted(text: str) -> str:
    """Return the correct spelling of a cluster whose size is in another notation; empty if it is not."""
    for pattern in _COUNTED:
        if (counted := pattern.fullmatch(text)) and (name := cluster_called(counted["name"])):
            devices, of_node = int(counted["devices"]), _preset(name).devices_per_node
            nodes = int(counted["nodes"] or 1)
            if not counted["nodes"] and devices % of_node == 0:
                nodes, devices = devices // of_node, of_node
            return f"cluster {text!r} is not NAME:NODESxDEVICES: write {name}:{nodes}x{devices}"
    return ""


@cache
def _spellings() -> dict[str, str]:
    """Return the ids of the shipped clusters by all their normalised names."""
    names = read_table(shipped()["cluster_names"])
    by_alias = {_plain(name): cluster for cluster, listed in names.items() for name in listed}
    return by_alias | {_plain(cluster): cluster for cluster in preset_clusters()}


def _plain(name: str) -> str:
    return re.sub(r"[ ._-]", "", name.casefold())


@lru_cache(maxsize=64)
def _preset(name: str) -> ClusterSpec:
    path = shipped("clusters").get(name)
    table = read_table(path) if path else {"name": name, "device": name, "devices_per_node": 8}
    return cluster_from_table(table, f"cluster {name}")


def _of_node(level: LinkLevel, devices: int) -> LinkLevel:
    """Return the link within a node, for a node of another size; a mesh loses the links to the missing devices."""
    shares = level.mesh_shares[: max(devices - 1, 1)]
    evenly = min(max(devices - 1, 1) / max(level.num_devices - 1, 1), 1.0) if level.is_mesh else 1.0
    share = shares[-1] if shares else evenly
    return replace(
        level,
        num_devices=devices,
        bandwidth_bytes_per_s=share * level.bandwidth_bytes_per_s,
        mesh_shares=tuple(part / share for part in shares) if devices > 1 else (),
    )


def _resized(cluster: ClusterSpec, devices: int) -> tuple[LinkLevel, ...]:
    """Return the levels of `cluster` for nodes of another size.

    The link within its node connects the node of this size, or the inner link does if the node shrinks to an inner
    domain; an inner link whose domain does not divide the node is left out; a rack-wide link connects as many whole
    nodes as fit into its rack.
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
    """Return the JSON Schema of a cluster file, whose device is a table or the id of a shipped device."""
    described = schema(ClusterSpec, human_units=True)
    described["$defs"]["DeviceSpec"] = device_schema()["$defs"]["DeviceSpec"]
    cluster = described["$defs"]["ClusterSpec"]
    cluster["properties"]["device"] = {"anyOf": [{"enum": list(preset_devices())}, cluster["properties"]["device"]]}
    cluster["properties"]["based_on"] = {"enum": list(preset_clusters())}
    cluster["required"] = [key for key in cluster["required"] if key not in _COMPLETED]
    return described


def cluster_from_table(table: dict[str, Any], where: str) -> ClusterSpec:
    """Decode a cluster whose `device` is the id of a shipped device or a table.

    Links and network missing in a file come from the shipped cluster in its `based_on`, otherwise from the cluster with
    its device, otherwise from the cluster with the device that completes its own device.
    """
    device = table.get("device")
    if isinstance(device, dict):
        _check_keys(table, device, where)
    if isinstance(device, str | dict):
        table = {**table, "device": device_table(device, where)}
        if "based_on" in table or any(key not in table for key in _COMPLETED):
            table = _completed(table, device, where)
    if isinstance(table.get("nodes"), list):
        table = {**table, "nodes": [_expanded(group, where) for group in table["nodes"]]}
    return decode(ClusterSpec, table, where)


def _check_keys(table: dict[str, Any], device: dict[str, Any], where: str) -> None:
    """Raise an error with all unknown and missing keys of a cluster and of its device, which need not be complete."""
    faults: list[str] = []
    rest = {key: value for key, value in table.items() if key not in ("device", "based_on")}
    stated = {key: value for key, value in device.items() if key != "based_on"}
    try:
        to_fields(ClusterSpec, rest, needed=("name", "devices_per_node"), faults=faults)
        to_fields(DeviceSpec, stated, "$.device", needed=DATASHEET, faults=faults)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if faults:
        raise InputError(f"{where}: {first_faults(faults)}")


def _completed(table: dict[str, Any], device: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Return the table of a cluster completed with missing links, network and host."""
    name = table.get("based_on")
    if name is not None and name not in preset_clusters():
        meant = suggestion(str(name), preset_clusters(), "autoplan list clusters shows all")
        raise InputError(f"{where}: based_on names no built-in cluster: {meant}")
    base, size = _preset(name or _cluster_of(device, where)), table.get("devices_per_node")
    if isinstance(size, str):
        size = parse_count(size, f"{where}: devices_per_node")
    if not isinstance(size, int) or not 1 <= size <= MAX_DEVICES:
        return table  # the decoder reports the error
    spec = decode(DeviceSpec, table["device"], where)
    levels = [
        replace(level, bandwidth_bytes_per_s=spec.host_link_bytes_per_s) if level.kind == "pcie" else level
        for level in _resized(base, size)
    ]
    inherited = {
        "levels": [asdict(level) for level in levels],
        "network": asdict(base.network),
        "host": asdict(base.host),
    }
    missing = {key: value for key, value in inherited.items() if key not in table}
    note = f"{', '.join(missing)} of {base.name}" if missing else ""
    stated = {key: value for key, value in table.items() if key != "based_on"}
    return {**stated, **missing, "sources": [*table.get("sources", ()), *([note] if note else [])]}


def _cluster_of(device: str | dict[str, Any], where: str) -> str:
    """Return the id of the shipped cluster of a device, or of the device that provides its missing values."""
    clusters = _clusters_by_device()
    own = clusters.get(device) if isinstance(device, str) else None
    return own or clusters[based_on(device, where)]


@cache
def _clusters_by_device() -> dict[str, str]:
    """Return the ids of shipped clusters with a file by their devices, of several the one named like the device."""
    with_file = shipped("clusters")
    placed = {str(read_table(path)["device"]): name for name, path in with_file.items()}
    return placed | {name: name for name in placed if name in with_file}


def _expanded(group: Any, where: str) -> Any:
    """Return a group of nodes with expanded host lists in `names`, 'gpu[001-016]'; other errors are the decoder's."""
    names = group.get("names") if isinstance(group, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return group
    try:
        return {**group, "names": [host for name in names for host in expand_hosts(name)]}
    except InputError as error:
        raise InputError(f"{where}: nodes: {error}") from None
