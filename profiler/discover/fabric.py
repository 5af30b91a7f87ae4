"""Fabric of a node: the devices connected by NVLink or xGMI, and devices that are connected differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mode

from autoplan.profiler.discover.observed import ObservedLink, ObservedNode
from autoplan.topology.cluster import DeviceSpec

# Rate per link and direction, and links per device: data sheets of V100, A100, H100, B200 (NVLink 2, 3, 4, 5).
NVLINK_BYTES_PER_S: Mapping[str, float] = {"volta": 25e9, "ampere": 25e9, "hopper": 25e9, "blackwell": 50e9}
MAX_NVLINKS: Mapping[str, int] = {"volta": 6, "ampere": 12, "hopper": 18, "blackwell": 18}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The scale-up fabric of a node, if its devices have one."""

    kind: str  # nvlink, xgmi
    num_devices: int  # connected devices: a node, or a part of it
    is_switched: bool  # all links of a device lead to switches
    is_mesh: bool  # a direct link between any two
    num_links: int  # links per device, 0 if unknown
    bytes_per_s: float | None  # rate per device and direction
    apart: tuple[tuple[int, ...], ...] = ()  # devices that are connected differently from the others
    fewer_links: Mapping[int, int] = field(default_factory=dict)  # link counts of devices with fewer than the others


def fabric_of(node: ObservedNode, device: DeviceSpec) -> Fabric | None:
    """Return the fabric; None if no link was observed, or if the links do not form equal parts of a node."""
    indices = [device.index for device in node.devices]
    direct = [link for link in node.links if link.path == "fabric" and {link.a, link.b} <= {*indices}]
    if not direct:
        return None
    parts = _parts(indices, direct)
    size = mode(len(part) for part in parts for _ in part)
    if len(indices) % size:
        if size <= len(indices) / 2:
            return None
        size = len(indices)
    apart = tuple(tuple(part) for part in parts if len(part) <= size / 2 and len(part) != size)
    max_links = MAX_NVLINKS.get(device.generation, 0)
    counts = {index: [link.num_links for link in direct if index in (link.a, link.b)] for index in indices}
    is_switched = bool(max_links) and any(sum(links) > max_links for links in counts.values())
    per_device = {index: (max(links) if is_switched else sum(links)) for index, links in counts.items() if links}
    num_links = mode(per_device.values()) if max_links else 0
    is_complete = len(direct) == sum(len(part) * (len(part) - 1) // 2 for part in parts)
    return Fabric(
        kind="nvlink" if max_links else "xgmi",
        num_devices=size,
        is_switched=is_switched,
        is_mesh=not is_switched and is_complete and size > 2 and len({link.num_links for link in direct}) == 1,
        num_links=num_links,
        bytes_per_s=_stated_rate(direct, is_switched=is_switched)
        or num_links * NVLINK_BYTES_PER_S.get(device.generation, 0.0)
        or None,
        apart=apart,
        fewer_links={} if apart else {index: links for index, links in per_device.items() if links < num_links},
    )


def _stated_rate(direct: Sequence[ObservedLink], *, is_switched: bool) -> float | None:
    """Return the rate from a device to all others, if the sources contain it for every link."""
    rates: Counter[int] = Counter()
    for link in direct:
        if link.bytes_per_s is None:
            return None
        for end in (link.a, link.b):
            assert end is not None
            rates[end] = (
                max(rates[end], round(link.bytes_per_s)) if is_switched else rates[end] + round(link.bytes_per_s)
            )
    return float(mode(rates.values()))


def _parts(indices: Sequence[int], links: Sequence[ObservedLink]) -> list[list[int]]:
    """Return the groups of devices connected by links."""
    part = {index: {index} for index in indices}
    for link in links:
        assert link.b is not None
        if part[link.a] is not part[link.b]:
            part[link.a] |= part[link.b]
            for index in part[link.b]:
                part[index] = part[link.a]
    return [sorted(members) for members in {id(members): members for members in part.values()}.values()]
