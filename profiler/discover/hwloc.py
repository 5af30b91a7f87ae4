"""Reader of the XML of hwloc (`lstopo --of xml`), versions 1 to 3: the connections of devices and NICs in a node.

I/O objects are below the nearest package or NUMA node: a <Bridge> "0-1" is the host bridge, those below are root ports
and PCIe switches, with an upstream and a downstream port each (hwloc/hwloc2.dtd).  Rates of NVLink and xGMI are
matrices over devices, and over NVSwitches if there are any, in megabytes per second and direction.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from autoplan.base.errors import InputError
from autoplan.profiler.discover.elements import Element, read_elements
from autoplan.profiler.discover.observed import (
    MAX_DEVICES,
    ObservedDevice,
    ObservedLink,
    ObservedNic,
    ObservedNode,
    nic_kind,
)
from autoplan.profiler.discover.pci import Place, adapter_kind, device_called, is_accelerator, path_between
from autoplan.profiler.discover.text import pci_address, shown, whole_number

SOURCE = "hwloc XML"

_FABRICS = ("NVLinkBandwidth", "XGMIBandwidth")
_MAX_OBJECTS = 2 * MAX_DEVICES  # maximum in a matrix: devices and switches of the fabric
_MAX_MEGABYTES_PER_S = 100_000_000
_IDS = re.compile(r"(?P<kind>[0-9a-f]{4}) \[(?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\].*")
_NUMBERED = re.compile(r"(nvml|rsmi|cuda)(\d{1,4})")
_VERBS = re.compile(r"mlx\d+_\S+|hfi\d+_\d+|qedr\d+")  # names of RDMA devices unknown to `nic_kind`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """A PCI function of a device or a NIC."""

    element: Element
    kind: str  # PCI class, such as "0302"
    vendor: str
    device: str
    place: Place
    bytes_per_s: float | None  # slowest link on the way to the host
    systems: Sequence[Element] = field(default_factory=tuple)  # its devices in the operating system

    @property
    def address(self) -> str:
        return pci_address(self.element.get("pci_busid"))


def parse(text: str) -> ObservedNode:
    """Return the node of an XML export; NICs are those with a name in the operating system."""
    root = read_elements(text, "topology")
    functions = list(_functions(root))
    gpus = [function for function in functions if is_accelerator(function.kind, function.vendor)]
    nics = {
        name: function for function in functions if function.kind.startswith("02") and (name := _nic_name(function))
    }
    if not gpus and not nics:
        raise InputError("holds neither a device nor a network adapter: export it with `lstopo --whole-io --of xml`")
    if len(gpus) > MAX_DEVICES or len(nics) > MAX_DEVICES:
        raise InputError(f"holds more than {MAX_DEVICES:,} devices or adapters")
    indexed = dict(sorted(zip(_indices(gpus), gpus, strict=True), key=lambda pair: pair[0]))
    return ObservedNode(
        source=SOURCE,
        devices=tuple(_device(function, index) for index, function in indexed.items()),
        nics=tuple(_nic(function, name) for name, function in nics.items()),
        links=tuple(_links(indexed, nics, _rates(root, indexed))),
        num_sockets=sum(1 for element in root.walk() if element.get("type") in ("Package", "Socket")) or None,
    )


def _functions(root: Element) -> Iterator[_Function]:
    waiting: list[tuple[Element, Place, tuple[str, ...], float | None]] = [
        (root, Place(bridge="", numa=None, switches=()), (), None)
    ]
    while waiting:
        element, place, bridges, narrowest = waiting.pop()
        kind = element.get("type")
        if element.get("nodeset"):
            place = Place(bridge="", numa=_only_bit(element.get("nodeset")), switches=())
        elif kind == "Bridge" and element.get("bridge_type").startswith("0-"):
            place = Place(bridge=element.get("bridge_pci") or str(element.line), numa=place.numa, switches=())
            bridges = ()
        elif kind in ("Bridge", "PCIDev"):
            rate = _link(element)
            narrowest = rate if narrowest is None else min(narrowest, rate or math.inf)
            if kind == "Bridge":
                bridges = (*bridges, element.get("pci_busid"))
                # The first is a root port, followed by an upstream and a downstream port per switch.
                place = Place(bridge=place.bridge, numa=place.numa, switches=bridges[1::2])
            elif ids := _IDS.fullmatch(element.get("pci_type").lower()):
                systems = tuple(inner for inner in element.walk() if inner.get("type") == "OSDev")
                yield _Function(element=element, place=place, bytes_per_s=narrowest, systems=systems, **ids.groupdict())
        waiting.extend((child, place, bridges, narrowest) for child in reversed(list(element.named("object"))))


def _only_bit(nodeset: str) -> int | None:
    """Return the only NUMA node of a set such as "0x00000002" or "0x1,0x00000000"; None if there are several."""
    digits = "".join(word.removeprefix("0x").rjust(8, "0") for word in nodeset.split(","))
    if not re.fullmatch(r"[0-9a-f]{1,512}", digits):
        return None
    bits = int(digits, 16)
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _link(element: Element) -> float | None:
    text = element.get("pci_link_speed") or "0"
    if not re.fullmatch(r"\d{1,4}(\.\d{1,9})?", text):
        raise InputError(f"line {element.line}: pci_link_speed must be in GB/s, such as 15.753846, got {shown(text)}")
    return float(text) * 1e9 or None


def _infos(function: _Function) -> dict[str, str]:
    return {info.get("name"): info.get("value") for system in function.systems for info in system.named("info")}


def _indices(gpus: Sequence[_Function]) -> list[int]:
    """Return indices in NVML, ROCm SMI or CUDA if all devices have one, otherwise the order on the bus, as in NVML."""
    for tool in ("nvml", "rsmi", "cuda"):
        numbers = [
            int(match[2])
            for function in gpus
            for system in function.systems
            if (match := _NUMBERED.fullmatch(system.get("name"))) and match[1] == tool
        ]
        if len(numbers) == len(set(numbers)) == len(gpus):
            return numbers
    order = sorted(range(len(gpus)), key=lambda at: gpus[at].address)
    return [order.index(at) for at in range(len(gpus))]


def _device(function: _Function, index: int) -> ObservedDevice:
    return ObservedDevice(
        index=index,
        name=_infos(function).get("GPUModel", "") or device_called(function.vendor, function.device),
        pci=function.address,
        numa=function.place.numa,
        host_bytes_per_s=function.bytes_per_s,
    )


def _nic_name(function: _Function) -> str:
    names = [system.get("name") for system in function.systems]
    names.sort(key=lambda name: not _VERBS.fullmatch(name) and nic_kind(name) in ("", "ethernet", "infiniband"))
    return names[0] if names else ""


def _nic(function: _Function, name: str) -> ObservedNic:
    kind = adapter_kind(name, pci_class=function.kind, vendor=function.vendor, device=function.device)
    return ObservedNic(name=name, kind=kind, pci=function.address, numa=function.place.numa)


def _rates(root: Element, gpus: Mapping[int, _Function]) -> Mapping[frozenset[int], float]:
    owner = {
        element.get("gp_index"): index
        for index, function in gpus.items()
        for element in (function.element, *function.systems)
        if element.get("gp_index")
    }
    switches = {element.get("gp_index") for element in root.walk() if element.get("subtype") == "NVSwitch"}
    rates: Counter[frozenset[int]] = Counter()
    for matrix in root.named("distances2", "distances2hetero"):
        if matrix.get("name") not in _FABRICS:
            continue
        objects, values = _matrix(matrix)
        devices = [owner.get(gp_index) for gp_index in objects]
        switched: Counter[int] = Counter()
        for row, a in enumerate(devices):
            if a is None:
                continue
            for column, b in enumerate(devices):
                rate = values[row * len(objects) + column]
                if b is not None and a < b:
                    rates[frozenset((a, b))] += rate
                elif objects[column] in switches:
                    switched[a] += rate
        for a, b in combinations(sorted(switched), 2):
            rates[frozenset((a, b))] += min(switched[a], switched[b])
    return {pair: rate * 1e6 for pair, rate in rates.items()}


def _matrix(element: Element) -> tuple[list[str], list[int]]:
    """Return (gp_index of the objects, values row by row)."""
    place = f"line {element.line}: the matrix {element.get('name')}"
    count = element.number("nbobjs", at_most=_MAX_OBJECTS)
    objects = [word.rpartition(":")[2] for part in element.named("indexes") for word in part.text.split()]
    words = [word for part in element.named("u64values") for word in part.text.split()]
    if len(objects) != count or len(words) != count**2:
        raise InputError(f"{place} must have {count} indexes and {count**2} values, got {len(objects)}, {len(words)}")
    return objects, [whole_number(word, f"{place}: a value", at_most=_MAX_MEGABYTES_PER_S) for word in words]


def _links(
    gpus: Mapping[int, _Function], nics: Mapping[str, _Function], rates: Mapping[frozenset[int], float]
) -> Iterator[ObservedLink]:
    for a, b in combinations(gpus, 2):
        if rate := rates.get(frozenset((a, b))):
            yield ObservedLink(a=a, b=b, path="fabric", bytes_per_s=rate)
        else:
            yield ObservedLink(a=a, b=b, path=path_between(gpus[a].place, gpus[b].place))
    for a, function in gpus.items():
        for name, nic in nics.items():
            yield ObservedLink(a=a, nic=name, path=path_between(function.place, nic.place))
