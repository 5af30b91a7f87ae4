"""Reader of the XML of NCCL and RCCL (`NCCL_TOPO_DUMP_FILE`): the connections of devices and NICs in a node.

Its elements are those of src/graph/xml.cc in NCCL: <cpu> is a NUMA node, <pci> a switch or a device that contains a
<gpu> or <nic>; a <gpu> lists its links: an <nvlink> or <xgmi> to another device or to a switch of the fabric, a <c2c>
to its CPU.  Files that provide a topology to NCCL (`NCCL_TOPO_FILE`, as shipped by cloud providers for virtual
machines) may contain only <pci>; then the PCI classes identify devices.  Virtual machines also omit the link speed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from autoplan.base.errors import InputError
from autoplan.profiler.discover.elements import Element, read_elements
from autoplan.profiler.discover.observed import (
    MAX_DEVICES,
    MAX_LINKS,
    ObservedDevice,
    ObservedLink,
    ObservedNic,
    ObservedNode,
)
from autoplan.profiler.discover.pci import (
    Place,
    adapter_kind,
    device_called,
    is_accelerator,
    link_bytes_per_s,
    path_between,
)
from autoplan.profiler.discover.text import pci_address, shown

SOURCE = "NCCL topology XML"

_SWITCH_CLASS = "0x0680"  # an NVSwitch; 0x068001 is the NVLink bridge of a POWER CPU
_POWER_CLASS = "0x068001"
# Generation numbers that RCCL once wrote instead of the instruction set.
_GCN = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "940": "gfx940", "941": "gfx941", "942": "gfx942"}
_SPEED = re.compile(r"(\d{1,3}(?:\.\d)?) GT/s.*")
_MAX_MEGABITS_PER_S = 100_000_000  # 100 Tb/s
_MAX_MEGABYTES_PER_S = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A <gpu> or <net>, or a <pci> with nothing but its class, and its place in the tree."""

    element: Element
    pci: Element | None
    place: Place
    host: str
    bytes_per_s: float | None  # slowest PCIe link on the way to the host


def parse(text: str) -> ObservedNode:
    """Return the node of a topology file; of several hosts on one fabric, the first one and the size of the fabric."""
    root = read_elements(text, "system")
    leaves = [leaf for cpu in root.named("cpu") for leaf in _leaves(cpu)]
    if any(leaf.element.name == "gpu" for leaf in leaves):
        devices = [leaf for leaf in leaves if leaf.element.name == "gpu"]
    else:
        devices = [leaf for leaf in leaves if is_accelerator(*_class(leaf))]
    nics = [leaf for leaf in leaves if leaf.element.name == "net" or _class(leaf)[0].startswith("0x02")]
    if not devices and not nics:
        raise InputError("holds neither a device nor a network adapter: dump it from a running job")
    if len(leaves) > MAX_LINKS:
        raise InputError(f"holds more than {MAX_LINKS:,} devices and adapters")
    host = (devices or nics)[0].host
    host_devices = [leaf for leaf in devices if leaf.host == host]
    return _node(host_devices, [leaf for leaf in nics if leaf.host == host], num_joined=len(devices))


def _leaves(cpu: Element) -> Iterator[_Leaf]:
    host, numa = cpu.get("host_hash"), cpu.get("numaid")
    node = cpu.number("numaid", at_most=MAX_DEVICES) if numa not in ("", "-1") else None
    bridge = f"{host}/{numa}"
    waiting: list[tuple[Element, Element | None, tuple[str, ...], float | None]] = [(cpu, None, (), None)]
    while waiting:
        element, pci, switches, narrowest = waiting.pop()
        place = Place(bridge=bridge, numa=node, switches=switches)
        inner = list(element.named("pci"))
        above = (*switches, element.get("busid") or str(element.line)) if element.name == "pci" else switches
        for child in reversed(inner):
            waiting.append((child, child, above, _narrower(narrowest, _link(child))))
        ends = list(element.named("gpu")) + [net for nic in element.named("nic") for net in nic.named("net")]
        if element.name == "pci" and not inner and not ends:
            ends = [element]
        for end in ends:
            yield _Leaf(element=end, pci=pci, place=place, host=host, bytes_per_s=narrowest)


def _link(pci: Element) -> float | None:
    text = pci.get("link_speed")
    if not text or text.startswith("Unknown"):  # reported by the kernel in virtual machines
        return None
    if not (speed := _SPEED.fullmatch(text)):
        raise InputError(f"line {pci.line}: link_speed of pci must be like 16.0 GT/s, got {shown(text)}")
    return link_bytes_per_s(float(speed[1]), pci.number("link_width", at_most=255))


def _narrower(first: float | None, second: float | None) -> float | None:
    rates = [rate for rate in (first, second) if rate is not None]
    return min(rates) if rates else None


def _class(leaf: _Leaf) -> tuple[str, str]:
    """Return (PCI class, vendor) of a <pci> without content."""
    return (leaf.element.get("class"), leaf.element.get("vendor")) if leaf.element.name == "pci" else ("", "")


def _address(leaf: _Leaf) -> str:
    return pci_address(leaf.pci.get("busid")) if leaf.pci else ""


def _node(devices: Sequence[_Leaf], nics: Sequence[_Leaf], *, num_joined: int) -> ObservedNode:
    if len(devices) > MAX_DEVICES or len(nics) > MAX_DEVICES:
        raise InputError(f"one host holds more than {MAX_DEVICES:,} devices or adapters")
    indices = _indices(devices)
    observed = [_device(leaf, index) for leaf, index in zip(devices, indices, strict=True)]
    names = _names(nics)
    fabric = _fabric(devices)
    links = []
    by_index = sorted(zip(indices, devices, strict=True), key=lambda pair: pair[0])
    for (a, device_a), (b, device_b) in combinations(by_index, 2):
        num_links = fabric.get(frozenset((_address(device_a), _address(device_b))), 0)
        path = "fabric" if num_links else path_between(device_a.place, device_b.place)
        links.append(ObservedLink(a=a, b=b, path=path, num_links=num_links or 1))
    for index, device in zip(indices, devices, strict=True):
        for name, nic in names.items():
            links.append(ObservedLink(a=index, nic=name, path=path_between(device.place, nic.place)))
    return ObservedNode(
        source=SOURCE,
        devices=tuple(sorted(observed, key=lambda device: device.index)),
        nics=tuple(_nic(leaf, name) for name, leaf in names.items()),
        links=tuple(links),
        devices_per_domain=num_joined if num_joined > len(devices) else None,
    )


def _indices(devices: Sequence[_Leaf]) -> list[int]:
    """Return the devices' numbers, which the file contains for all of them or none."""
    numbers = [leaf.element.number("dev", at_most=MAX_DEVICES, default=-1) for leaf in devices]
    if -1 in numbers:
        return list(range(len(devices)))
    for at, (index, leaf) in enumerate(zip(numbers, devices, strict=True)):
        if index in numbers[:at]:
            raise InputError(f"line {leaf.element.line}: two devices of one host have dev {index}")
    return numbers


def _names(nics: Sequence[_Leaf]) -> dict[str, _Leaf]:
    names: dict[str, _Leaf] = {}
    for leaf in nics:
        name = leaf.element.get("name") or _address(leaf)
        if not name or name in names:
            raise InputError(f"line {leaf.element.line}: the adapter's name {shown(name)} is blank or a second one's")
        names[name] = leaf
    return names


def _device(leaf: _Leaf, index: int) -> ObservedDevice:
    pci, gpu = leaf.pci, leaf.element
    rate = leaf.bytes_per_s
    for c2c in gpu.named("c2c"):
        megabytes_per_s = c2c.number("bw", at_most=_MAX_MEGABYTES_PER_S) * c2c.number("count", at_most=100)
        rate = megabytes_per_s * 1e6 or rate
    return ObservedDevice(
        index=index,
        name=device_called(pci.get("vendor"), pci.get("device")) if pci else "",
        architecture=_architecture(gpu),
        pci=_address(leaf),
        numa=leaf.place.numa,
        host_bytes_per_s=rate,
    )


def _architecture(gpu: Element) -> str:
    if gcn := gpu.get("gcn"):
        return _GCN.get(gcn, gcn)
    return f"sm_{gpu.get('sm')}" if gpu.get("sm") else ""


def _nic(leaf: _Leaf, name: str) -> ObservedNic:
    net = leaf.element
    speed = net.number("speed", at_most=_MAX_MEGABITS_PER_S)
    ids = {"pci_class": "", "vendor": "", "device": ""}
    if leaf.pci:
        ids = {"pci_class": leaf.pci.get("class"), "vendor": leaf.pci.get("vendor"), "device": leaf.pci.get("device")}
    return ObservedNic(
        name=name,
        kind=adapter_kind(name, **ids),
        bytes_per_s=speed * 1e6 / 8 if speed else None,
        pci=_address(leaf),
        numa=leaf.place.numa,
        gpudirect=bool(net.number("gdr", at_most=1)) if net.get("gdr") else None,
    )


def _fabric(devices: Sequence[_Leaf]) -> Mapping[frozenset[str], int]:
    """Return the number of links between two devices: direct ones, and those of both to switches."""
    addresses = {_address(leaf) for leaf in devices}
    direct: Counter[frozenset[str]] = Counter()
    switched: Counter[str] = Counter()
    for leaf in devices:
        address = _address(leaf)
        for link in leaf.element.named("nvlink", "xgmi"):
            count = link.number("count", at_most=1000)
            target, kind = pci_address(link.get("target")), link.get("tclass")
            if target in addresses and target != address:
                pair = frozenset((address, target))
                direct[pair] = max(direct[pair], count)  # each end reports it
            elif kind.startswith(_SWITCH_CLASS) and kind != _POWER_CLASS:
                switched[address] += count
    for device, peer in combinations(switched, 2):
        direct[frozenset((device, peer))] += min(switched[device], switched[peer])
    return direct
