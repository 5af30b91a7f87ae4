"""Merging of observations of a node from several sources, with their contradictions.

The first source with a value wins: callers pass sources in their order of precedence, which is the kernel and NVML of
the machine itself, then NCCL's topology, `nvidia-smi` and `rocm-smi`, hwloc, and the lists of adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from autoplan.profiler.discover.observed import ObservedDevice, ObservedLink, ObservedNic, ObservedNode

Part = TypeVar("Part", ObservedDevice, ObservedNic, ObservedLink)


def merge(observations: Sequence[ObservedNode]) -> tuple[ObservedNode, list[str]]:
    """Return (the node, contradictions between later and earlier sources)."""
    node, contradictions = observations[0], []
    for later in observations[1:]:
        node, more = _merged(node, later)
        contradictions += more
    return node, contradictions


def _merged(node: ObservedNode, later: ObservedNode) -> tuple[ObservedNode, list[str]]:
    later = _counted_as(node, later)
    contradictions: list[str] = []
    devices = _joined(node.devices, later.devices, lambda device: device.index, contradictions)
    if node.devices and later.devices and len(node.devices) != len(later.devices):
        devices = devices[: len(node.devices)]
        contradictions.insert(0, f"{len(later.devices)} devices, not {len(node.devices)}")
    indices = {device.index for device in devices}
    links = _joined(node.links, later.links, lambda link: (link.a, link.b, link.nic), contradictions)
    source = ", ".join(dict.fromkeys((*node.source.split(", "), later.source)))
    believed = node.source.partition(", ")[0]
    for name in ("num_sockets", "devices_per_domain"):
        first, second = getattr(node, name), getattr(later, name)
        if None not in (first, second) and first != second:
            contradictions.append(f"{name} {second}, not {first}")
    merged = replace(
        node,
        source=source,
        host=node.host or later.host,
        devices=devices,
        nics=_joined(node.nics, later.nics, lambda nic: nic.name, contradictions),
        links=tuple(link for link in links if link.a in indices and (link.b is None or link.b in indices)),
        num_sockets=node.num_sockets if node.num_sockets is not None else later.num_sockets,
        devices_per_domain=node.devices_per_domain or later.devices_per_domain,
    )
    if not contradictions:
        return merged, []
    more = f" and {len(contradictions) - 1} more" if len(contradictions) > 1 else ""
    return merged, [f"{later.source} says {contradictions[0]}{more}: {believed} is used"]


def _counted_as(node: ObservedNode, later: ObservedNode) -> ObservedNode:
    """Return `later` with the indices and names of `node` for devices and NICs at the same PCI addresses."""
    index_at = {device.pci: device.index for device in node.devices if device.pci}
    name_at = {nic.pci: nic.name for nic in node.nics if nic.pci}
    if not all(device.pci in index_at for device in later.devices):
        index_at = {}
    index = {device.index: index_at.get(device.pci, device.index) for device in later.devices}
    name = {nic.name: name_at.get(nic.pci, nic.name) for nic in later.nics}
    return replace(
        later,
        devices=tuple(
            sorted(
                (replace(device, index=index[device.index]) for device in later.devices),
                key=lambda device: device.index,
            )
        ),
        nics=tuple(replace(nic, name=name[nic.name]) for nic in later.nics),
        links=tuple(_link(link, index, name) for link in later.links),
    )


def _link(link: ObservedLink, index: dict[int, int], name: dict[str, str]) -> ObservedLink:
    a = index.get(link.a, link.a)
    if link.b is None:
        return replace(link, a=a, nic=name.get(link.nic, link.nic))
    a, b = sorted((a, index.get(link.b, link.b)))
    return replace(link, a=a, b=b)


def _joined(
    first: Iterable[Part], second: Iterable[Part], key: Callable[[Part], object], contradictions: list[str]
) -> tuple[Part, ...]:
    """Complete the first parts by the second and append those only there; `contradictions` collects differences."""
    parts_by_key = {key(part): part for part in first}
    for part in second:
        known = parts_by_key.get(key(part))
        if known is None:
            parts_by_key[key(part)] = part
            continue
        blank = {name: getattr(part, name) for name in part.__slots__ if getattr(known, name) in (None, "")}
        if remark := _contradiction(known, part):
            contradictions.append(remark)
        parts_by_key[key(part)] = replace(known, **blank)
    return tuple(parts_by_key.values())


def _contradiction(earlier: Part, later: Part) -> str:
    """Describe how `later` contradicts `earlier`; blank if it does not."""
    if not isinstance(earlier, ObservedLink):
        part_name, names = f"device {getattr(earlier, 'index', '')}", ("pci", "numa", "architecture")
        if isinstance(earlier, ObservedNic):
            part_name, names = earlier.name, ("kind", "bytes_per_s", "numa")
        for name in names:
            first, second = getattr(earlier, name), getattr(later, name)
            if first not in (None, "") and second not in (None, "") and first != second:
                return f"{part_name} has {name} {second}, not {first}"
    if isinstance(earlier, ObservedLink) and isinstance(later, ObservedLink):
        counts = earlier.num_links != later.num_links and min(earlier.num_links, later.num_links) > 1
        if counts or (earlier.path == "fabric") != (later.path == "fabric"):
            ends = f"{earlier.a} and {earlier.nic or earlier.b}"
            return f"{ends} are joined by {_way(later)}, not {_way(earlier)}"
    return ""


def _way(link: ObservedLink) -> str:
    return f"{link.num_links} links of a fabric" if link.path == "fabric" else f"PCIe ({link.path})"
