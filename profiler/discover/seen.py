"""What a tool or file says about one node, in one vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How two devices, or a device and a NIC, reach each other, nearest first: NVLink or xGMI; a PCIe switch; several of
# them; a host bridge; the interconnect inside a NUMA node; between NUMA nodes or sockets.
Path = Literal["fabric", "switch", "switches", "host", "node", "system"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevice:
    """An accelerator."""

    index: int
    name: str = ""  # as the tool prints it: "NVIDIA H100 80GB HBM3"
    pci: str = ""  # bus address, lower case: "0000:1b:00.0"
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNic:
    """A network adapter."""

    name: str  # "mlx5_0"
    kind: Literal["infiniband", "roce", "efa", "slingshot", "ethernet", ""] = ""
    bytes_per_s: float | None = None  # one direction
    pci: str = ""
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLink:
    """Devices `a` and `b`, or device `a` and the NIC named `nic`, and the best path between them."""

    a: int
    b: int | None = None
    nic: str = ""
    path: Path
    num_links: int = 1  # NVLinks or xGMI links side by side
    bytes_per_s: float | None = None  # of all of them, one direction, where the source says


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """One node.  What a source does not say is empty or None."""

    source: str  # "nvidia-smi topo -m"
    host: str = ""
    devices: tuple[SeenDevice, ...] = ()
    nics: tuple[SeenNic, ...] = ()
    links: tuple[SeenLink, ...] = ()
    num_sockets: int | None = None
    devices_per_domain: int | None = None  # of the scale-up fabric where it is wider than the node (NVL72)
