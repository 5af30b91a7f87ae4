"""Description of an observed cluster: observations, completed by the shipped cluster with the same type of node."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import get_args

from autoplan.base.hostlist import compress_hosts
from autoplan.profiler.discover.defects import SAME_RATE
from autoplan.profiler.discover.fabric import Fabric, fabric_of
from autoplan.profiler.discover.identify import identify
from autoplan.profiler.discover.observed import ObservedNic, ObservedNode, Path
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.topology.cluster import ClusterSpec, DeviceSpec, LinkLevel, NetworkSpec

# Clusters whose network efficiency and latency are used if a node has another network than the shipped one.
_NETWORKS = {
    "infiniband": "h100-sxm",
    "roce": "mi300x",
    "efa": "aws-p5",
    "slingshot": "frontier",
    "ethernet": "cpu",
}
_PCIE = "a100-pcie"  # source of the efficiency and latency of PCIe between devices
_NEAR = ("switch", "switches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A cluster, with the source of each value (by the place of the field), and warnings for the user."""

    cluster: ClusterSpec
    remarks: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def describe(node: ObservedNode, *, num_nodes: int = 1, name: str = "", device: str = "") -> Description:
    """Describe a cluster of `num_nodes` such nodes; `device` is a shipped id for nodes without a known device."""
    identified = identify(node, device)
    spec, base = identified.device, _nearest(identified.shipped_id, node)
    size = len(node.devices) or base.devices_per_node
    cluster = replace(load_cluster(f"{base.name}:{num_nodes}x{size}"), device=spec)
    shipped = _shipped(base)
    remarks = {
        "device": "from --device" if device else node.source,
        "devices_per_node": node.source if node.devices else shipped,
    }
    warnings = []
    if identified.assumed:
        warnings.append(
            f"{spec.name!r} is not built in: figures of {identified.shipped_id} are used, correct [device] in the file"
        )
        remarks |= {f"device.{name}": f"of {identified.shipped_id}: correct it" for name in identified.assumed}
        remarks["device"] = "not built in"
    odd = Counter(device.name for device in node.devices)
    if len(odd) > 1:
        warnings.append(f"devices differ: {', '.join(f'{number} {name!r}' for name, number in odd.items())}")
    levels, level_remarks, level_warnings = _levels(cluster, spec, node, base)
    domain = node.devices_per_domain or 0
    if domain > size and domain % size == 0 and levels[-1].kind in ("nvlink", "xgmi"):
        levels = (*levels[:-1], replace(levels[-1], num_devices=domain))
        level_remarks[f"levels[{len(levels) - 1}].num_devices"] = node.source
    level_remarks = {f"levels[{at}].efficiency": shipped for at in range(len(levels))} | level_remarks
    network, network_remarks, network_warnings = _network(cluster, node, size, shipped)
    if node.num_sockets:
        cluster = replace(cluster, host=replace(cluster.host, num_sockets=node.num_sockets))
        remarks["host.num_sockets"] = node.source
    sources = (f"seen: {node.source}", f"what was not seen: {shipped}", *base.sources)
    cluster = replace(cluster, name=name or base.name, levels=levels, network=network, sources=sources)
    return Description(
        cluster=cluster,
        remarks=remarks | level_remarks | network_remarks,
        warnings=(*warnings, *level_warnings, *network_warnings),
    )


def _nearest(device: str, node: ObservedNode) -> ClusterSpec:
    """Return the shipped cluster with that device whose nodes are most similar to this one."""
    kinds = {nic.kind for nic in node.nics}
    shipped = [cluster for cluster in map(load_cluster, preset_clusters()) if cluster.device.name == device]
    return max(
        shipped,
        key=lambda cluster: (
            cluster.network.kind in kinds,
            cluster.devices_per_node == len(node.devices),
            cluster.name == device,
        ),
    )


def _levels(
    cluster: ClusterSpec, device: DeviceSpec, node: ObservedNode, base: ClusterSpec
) -> tuple[tuple[LinkLevel, ...], dict[str, str], list[str]]:
    """Return (levels of a node, remarks on them, warnings)."""
    fabric = fabric_of(node, device)
    size = cluster.devices_per_node
    shipped = [level for level in cluster.levels if level.kind in ("nvlink", "xgmi")]
    if size == 1 or device.vendor == "cpu" or not node.links:
        remark = f"nominal, {_shipped(base)}: links between devices were not seen"
        return cluster.levels, _remarks_on(cluster.levels, remark), []
    if fabric is None and not shipped:
        return cluster.levels, _remarks_on(cluster.levels, f"nominal, {_shipped(base)}"), []
    if fabric is not None and shipped and fabric.num_devices == min(shipped[-1].num_devices, size):
        rate = fabric.bytes_per_s
        nominal = shipped[-1].bandwidth_bytes_per_s
        is_mesh = fabric.is_mesh or (shipped[-1].is_mesh and not fabric.is_switched)
        is_alike = rate is None or abs(rate / nominal - 1) <= SAME_RATE
        if len(shipped) > 1 or (is_alike and is_mesh == shipped[-1].is_mesh):
            return cluster.levels, _remarks_on(cluster.levels, f"nominal{_links(fabric, node)}"), []
        level = replace(shipped[-1], bandwidth_bytes_per_s=rate or nominal, is_mesh=is_mesh)
        unlike = f"{_rate(level)} where the built-in {base.name} has {_rate(shipped[-1])}"
        remarks = _remarks_on((level,), f"nominal{_links(fabric, node)}")
        return (level,), remarks, [f"{unlike}: efficiency and latency are the built-in values"]
    if fabric is None and not _shows_fabrics(node):
        assumed = f"assumed, {_shipped(base)}"
        warning = f"{node.source} shows no {shipped[-1].name}: it is {assumed}"
        return cluster.levels, _remarks_on(cluster.levels, assumed), [warning]
    return _own_levels(cluster, device, node, fabric)


def _rate(level: LinkLevel) -> str:
    mesh = " of a mesh" if level.is_mesh else ""
    return f"{level.bandwidth_bytes_per_s / 1e9:g} GB/s{mesh} for each device"


def _shows_fabrics(node: ObservedNode) -> bool:
    """Return whether any source would report NVLink or xGMI; lists of PCI devices do not."""
    tools = ("NVML", "amdkfd", "nvidia-smi", "rocm-smi")
    return any(tool in node.source for tool in tools) or any(device.architecture for device in node.devices)


def _shipped(base: ClusterSpec) -> str:
    return f"built-in value for {base.name}"


def _own_levels(
    cluster: ClusterSpec, device: DeviceSpec, node: ObservedNode, fabric: Fabric | None
) -> tuple[tuple[LinkLevel, ...], dict[str, str], list[str]]:
    """Return levels that no shipped cluster has: a fabric with another size, and PCIe between the rest."""
    levels: list[LinkLevel] = []
    remarks: dict[str, str] = {}
    size = cluster.devices_per_node
    if fabric is not None:
        shipped_fabric = _fabric_of(cluster, device)
        rate = fabric.bytes_per_s or shipped_fabric.bandwidth_bytes_per_s
        joined = replace(
            shipped_fabric,
            num_devices=fabric.num_devices,
            bandwidth_bytes_per_s=rate,
            is_mesh=fabric.is_mesh,
            collectives=None,
        )
        levels.append(joined)
        remarks |= _remarks_on((joined,), f"nominal{_links(fabric, node)}") | {"levels[0].efficiency": "assumed"}
    if not levels or levels[-1].num_devices < size:
        host = min((device.host_bytes_per_s for device in node.devices if device.host_bytes_per_s), default=None)
        pcie = replace(
            load_cluster(_PCIE).levels[-1],
            num_devices=size,
            bandwidth_bytes_per_s=host or device.host_link_bytes_per_s,
        )
        levels.append(pcie)
        of = f"links to the host: {node.source}" if host else "links to the host, by data sheet"
        remarks[f"levels[{len(levels) - 1}].bandwidth_bytes_per_s"] = f"nominal: {of}"
        remarks[f"levels[{len(levels) - 1}].efficiency"] = "assumed"
    warnings = [
        "devices are connected differently from the built-in "
        f"{cluster.name}: efficiency and latency of {' and '.join(level.name for level in levels)} are assumed",
    ]
    return tuple(levels), remarks, warnings


def _fabric_of(cluster: ClusterSpec, device: DeviceSpec) -> LinkLevel:
    """Return the fabric of a shipped cluster: this one, or one of the same generation, or of the same vendor."""
    clusters = [cluster, *map(load_cluster, preset_clusters())]
    for part in ("generation", "vendor"):
        for shipped in clusters:
            for level in shipped.levels:
                if level.kind in ("nvlink", "xgmi") and getattr(shipped.device, part) == getattr(device, part):
                    return level
    raise AssertionError(device.vendor)  # no other vendor's device has a fabric


def _links(fabric: Fabric, node: ObservedNode) -> str:
    if not fabric.num_links:
        return f" ({node.source})"
    return f": {fabric.num_links} links for each device ({node.source})"


def _remarks_on(levels: tuple[LinkLevel, ...], text: str) -> dict[str, str]:
    return {f"levels[{at}].bandwidth_bytes_per_s": text for at in range(len(levels))}


def training_nics(node: ObservedNode) -> tuple[ObservedNic, ...]:
    """Return the adapters that a job will use, without those for storage and logins.

    Ethernet is left out if there is another kind; of the rest, those next to a device are used if there are any, as
    libraries do; of these, the fast ones.
    """
    up = [nic for nic in node.nics if nic.bytes_per_s != 0]
    fast = [nic for nic in up if nic.kind != "ethernet"] or up
    best: dict[str, Path | None] = {nic.name: None for nic in fast}
    order = get_args(Path)
    for link in node.links:
        if link.nic in best and order.index(link.path) < order.index(best[link.nic] or "system"):
            best[link.nic] = link.path
    near = [nic for nic in fast if best[nic.name] in _NEAR]
    fastest = max((nic.bytes_per_s or 0.0 for nic in near or fast), default=0.0)
    # An adapter next to a device may have come up at a lower rate.
    least = fastest / (4 if near else 1.5)
    return tuple(nic for nic in near or fast if nic.bytes_per_s is None or nic.bytes_per_s >= least)


def _network(
    cluster: ClusterSpec, node: ObservedNode, size: int, shipped: str
) -> tuple[NetworkSpec, dict[str, str], list[str]]:
    """Return (network of a node, remarks on it, warnings)."""
    network, nics = cluster.network, training_nics(node)
    warnings: list[str] = []
    tiers = {
        f"network.tiers[{at}].{name}": f"assumed, {shipped}"
        for at, _ in enumerate(network.tiers)
        for name in ("num_nodes", "oversubscription")
    }
    if not nics:
        unseen = f"assumed, {shipped}: no adapter was seen"
        return network, {"network.nic_bytes_per_s": unseen, "network.nics_per_device": unseen, **tiers}, warnings
    kinds = Counter(nic.kind for nic in nics if nic.kind)
    kind = kinds.most_common(1)[0][0] if kinds else network.kind
    remarks = {"network.kind": node.source if kinds else f"assumed, {shipped}", "network.efficiency": shipped}
    if kind and kind != network.kind:
        shipped_cluster = load_cluster(_NETWORKS[kind])
        network = replace(shipped_cluster.network, tiers=network.tiers)
        remarks["network.efficiency"] = f"assumed, built-in value for {shipped_cluster.name}"
    names = compress_hosts(nic.name for nic in nics)
    remarks["network.nics_per_device"] = f"{len(nics)} for {size} devices: {names}"
    rates = [nic.bytes_per_s for nic in nics if nic.bytes_per_s]
    if rates:
        rate = Counter(rates).most_common(1)[0][0]
        network = replace(network, nic_bytes_per_s=rate)
        remarks["network.nic_bytes_per_s"] = f"nominal: {node.source}"
    else:
        remarks["network.nic_bytes_per_s"] = f"assumed, {shipped}: the rate is unknown"
        warnings.append(f"the rate of the adapters is unknown; nic_gb_per_s is assumed, {shipped}")
    return replace(network, nics_per_device=len(nics) / size), remarks | tiers, warnings
