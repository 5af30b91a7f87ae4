"""Which devices of a node does NVLink or xGMI join, how, and are all of them joined alike?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mode

from autoplan.cluster import DeviceSpec
from profiler.discover.seen import SeenLink, SeenNode

# Of one link, one direction, and how many a device has: data sheets of V100, A100, H100, B200 (NVLink 2, 3, 4, 5).
NVLINK_BYTES_PER_S: Mapping[str, float] = {"volta": 25e9, "ampere": 25e9, "ada": 0.0, "hopper": 25e9, "blackwell": 50e9}
MOST_NVLINKS: Mapping[str, int] = {"volta": 6, "ampere": 12, "ada": 0, "hopper": 18, "blackwell": 18}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The scale-up fabric of a node, as far as its devices have one."""

    num_devices: int  # that it joins: a node, or a part of it
    is_mesh: bool  # direct links between all of them, without switches
    num_links: int  # of each device, 0 where it is not known
    bytes_per_s: float | None  # of each device, one direction


def fabric_of(node: SeenNode, device: DeviceSpec) -> tuple[Fabric | None, list[str]]:
    """(the fabric, what is irregular about it); None where no link of it was seen."""
    direct = [link for link in node.links if link.b is not None and link.path == "fabric"]
    if not direct:
        return None, []
    indices = [one.index for one in node.devices]
    parts = _parts(indices, direct)
    size = mode(len(part) for part in parts for _ in part)
    remarks = [
        f"device{'s' * (len(part) > 1)} {_listed(part)} {'are' if len(part) > 1 else 'is'} not joined to the others "
        f"as {size} of {len(indices)} are: is a link down?"
        for part in parts
        if len(part) != size
    ]
    if remarks and len(indices) % size:
        size = len(indices)
    most = MOST_NVLINKS.get(device.generation, 0)
    counts = {index: [link.num_links for link in direct if index in (link.a, link.b)] for index in indices}
    switched = bool(most) and any(sum(each) > most for each in counts.values())
    per_device = {index: (max(each) if switched else sum(each)) for index, each in counts.items() if each}
    usual = mode(per_device.values())
    remarks += [
        f"device {index} has {number} links, others {usual}: is a link down?"
        for index, number in per_device.items()
        if number < usual and not remarks
    ]
    complete = len(direct) == sum(len(part) * (len(part) - 1) // 2 for part in parts)
    is_mesh = not switched and complete and size > 2 and len({link.num_links for link in direct}) == 1
    return Fabric(
        num_devices=size,
        is_mesh=is_mesh,
        num_links=usual if most else 0,
        bytes_per_s=_rate(device, direct, usual if most else 0, switched=switched),
    ), remarks


def _rate(device: DeviceSpec, direct: Sequence[SeenLink], num_links: int, *, switched: bool) -> float | None:
    """Of one device to all others: as sources say of its links, else by their number and the data sheet."""
    told: Counter[int] = Counter()
    for link in direct:
        if link.bytes_per_s is None:
            return num_links * NVLINK_BYTES_PER_S.get(device.generation, 0.0) or None
        for end in (link.a, link.b):
            assert end is not None
            told[end] = max(told[end], round(link.bytes_per_s)) if switched else told[end] + round(link.bytes_per_s)
    return float(mode(told.values()))


def _parts(indices: Sequence[int], links: Sequence[SeenLink]) -> list[list[int]]:
    """Devices by what the links join."""
    part = {index: {index} for index in indices}
    for link in links:
        assert link.b is not None
        if link.a in part and link.b in part and part[link.a] is not part[link.b]:
            part[link.a] |= part[link.b]
            for index in part[link.b]:
                part[index] = part[link.a]
    return [sorted(one) for one in {id(one): one for one in part.values()}.values()]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
