"""Places in the PCIe tree of a node: the path between two devices, and the rate of the path to the host."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

from autoplan.profiler.discover.observed import NicKind, Path, nic_kind

# Bytes per lane and transfer: 8b/10b up to generation 2, 128b/130b up to 5, then 242 of a flit's 256 bytes.
# Source: PCI Express Base Specification 6.0, sections 4.2.2 and 4.2.3.
_BYTES_PER_TRANSFER = {2.5: 0.1, 5.0: 0.1, 8.0: 16 / 130, 16.0: 16 / 130, 32.0: 16 / 130, 64.0: 242 / 256 / 8}

# Driver names of devices known only by PCI identifiers.  Source: pci.ids of the PCI ID project.
_NAMES = {
    "10de:1db1": "Tesla V100-SXM2-16GB",
    "10de:1db4": "Tesla V100-PCIE-16GB",
    "10de:1db5": "Tesla V100-SXM2-32GB",
    "10de:1db6": "Tesla V100-PCIE-32GB",
    "10de:1db8": "Tesla V100-SXM3-32GB",
    "10de:20b0": "NVIDIA A100-SXM4-40GB",
    "10de:20b2": "NVIDIA A100-SXM4-80GB",
    "10de:20b5": "NVIDIA A100 80GB PCIe",
    "10de:20f1": "NVIDIA A100-PCIE-40GB",
    "10de:20f3": "NVIDIA A800-SXM4-80GB",
    "10de:2237": "NVIDIA A10G",
    "10de:2324": "NVIDIA H800",
    "10de:2329": "NVIDIA H20",
    "10de:2330": "NVIDIA H100 80GB HBM3",
    "10de:2331": "NVIDIA H100 PCIe",
    "10de:2335": "NVIDIA H200",
    "10de:2342": "NVIDIA GH200 480GB",
    "10de:2348": "NVIDIA GH200 144G HBM3e",
    "10de:2684": "NVIDIA GeForce RTX 4090",
    "10de:26b9": "NVIDIA L40S",
    "10de:2901": "NVIDIA B200",
    "10de:2941": "NVIDIA GB200",
    "10de:3182": "NVIDIA B300 SXM6 AC",
    "10de:31c2": "NVIDIA GB300",
    "10de:31c3": "NVIDIA GB300",
    "1002:7408": "AMD Instinct MI250X",
    "1002:740c": "AMD Instinct MI250X/MI250",
    "1002:740f": "AMD Instinct MI210",
    "1002:74a1": "AMD Instinct MI300X",
    "1002:74a5": "AMD Instinct MI325X",
    "1002:75a3": "AMD Instinct MI355X",
}

_MELLANOX = re.compile(r"mlx\d+_\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a device in the PCIe tree."""

    bridge: str  # host bridge; blank if the source does not show it
    numa: int | None
    switches: tuple[str, ...]  # PCIe switches on the path, the one next to the host first


def path_between(first: Place, second: Place) -> Path:
    """Return the kind of path between two devices, in the words of `nvidia-smi topo -m`."""
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first.switches, second.switches, strict=False))
    )
    if shared:
        crossed = len(first.switches) + len(second.switches) - 2 * shared + 1
        return "switch" if crossed == 1 else "switches"
    if first.bridge and first.bridge == second.bridge:
        return "host"
    return "node" if first.numa is not None and first.numa == second.numa else "system"


def link_bytes_per_s(gigatransfers: float, width: int) -> float | None:
    """Return the rate of `width` lanes per direction, before packet headers; None for unknown values such as 255."""
    per_transfer = _BYTES_PER_TRANSFER.get(gigatransfers)
    return gigatransfers * 1e9 * per_transfer * width if per_transfer and 0 < width <= 32 else None


def device_called(vendor: str, device: str) -> str:
    """Return the driver's name for PCI identifiers ("0x10de", "0x2330"); blank if unknown."""
    return _NAMES.get(f"{vendor.removeprefix('0x').lower()}:{device.removeprefix('0x').lower()}", "")


def is_accelerator(pci_class: str, vendor: str) -> bool:
    """Return whether a PCI class ("0x030200", "0302") and its vendor are those of a training accelerator."""
    code = pci_class.removeprefix("0x")[:2]
    return code in ("03", "12") and vendor.removeprefix("0x").lower() in ("10de", "1002")


def adapter_kind(name: str, *, pci_class: str, vendor: str, device: str) -> NicKind:
    """Return the kind of an adapter by its name and PCI identifiers; blank if they are ambiguous."""
    ids = (vendor.removeprefix("0x").lower(), device.removeprefix("0x").lower())
    if ids[0] == "1d0f" and ids[1].startswith("efa"):
        return "efa"
    if ids == ("17db", "0501"):  # Cassini
        return "slingshot"
    if pci_class.removeprefix("0x").startswith("0207"):
        return "infiniband"
    is_ethernet = pci_class.removeprefix("0x").startswith("0200")
    return nic_kind(name) or ("roce" if is_ethernet and _MELLANOX.fullmatch(name) else "")
