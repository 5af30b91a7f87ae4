"""Parts of a node as reported by tools and files, in a common format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Connection between two devices, or a device and a NIC, nearest first: NVLink or xGMI; a PCIe switch; several PCIe
# switches; a host bridge; the interconnect inside a NUMA node; between NUMA nodes or sockets.
Path = Literal["fabric", "switch", "switches", "host", "node", "system"]

NicKind = Literal["infiniband", "roce", "efa", "slingshot", "ethernet", ""]

# Far above the size of a node; larger numbers do not come from one of the tools.
MAX_DEVICES = 256
MAX_LINKS = 10_000

_KINDS: tuple[tuple[str, NicKind], ...] = (
    (r"rdmap\d+s\d+.*|efa_\d+.*", "efa"),
    (r"(cxi|hsn)\d+", "slingshot"),
    (r"mlx5_bond_\d+|bnxt_re\S*|irdma\S*|roce\S*|ionic_\S+", "roce"),
    (r"ib[ps\d]\S*", "infiniband"),  # interfaces of IP over InfiniBand
    (r"eth\d+|en[opsx]\S+|bond\d+", "ethernet"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedDevice:
    """An accelerator."""

    index: int
    name: str = ""  # as printed by the tool: "NVIDIA H100 80GB HBM3"
    architecture: str = ""  # "sm_90", "gfx942"
    pci: str = ""  # bus address, lower case: "0000:1b:00.0"
    numa: int | None = None
    memory_bytes: int | None = None  # visible
    host_bytes_per_s: float | None = None  # slowest link on the way to the host, per direction: PCIe or NVLink-C2C


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNic:
    """A network adapter."""

    name: str  # "mlx5_0"
    kind: NicKind = ""
    bytes_per_s: float | None = None  # per direction, total of all active ports
    pci: str = ""
    numa: int | None = None
    gpudirect: bool | None = None  # whether devices send directly from their memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLink:
    """Devices `a` and `b`, or device `a` and the NIC named `nic`, and the best path between them."""

    a: int
    b: int | None = None
    nic: str = ""
    path: Path
    num_links: int = 1  # parallel NVLinks or xGMI links, 1 if only their rate is known; 0: through other devices
    bytes_per_s: float | None = None  # total of all links per direction, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """Node as observed by one source.  Unknown values are empty or None."""

    source: str  # "nvidia-smi topo -m"
    host: str = ""
    devices: tuple[ObservedDevice, ...] = ()
    nics: tuple[ObservedNic, ...] = ()
    links: tuple[ObservedLink, ...] = ()
    num_sockets: int | None = None
    devices_per_domain: int | None = None  # size of the scale-up fabric if larger than the node (NVL72)


def nic_kind(name: str) -> NicKind:
    """Return the kind of an adapter by its name or its interface's name; blank for the ambiguous `mlx5_0`."""
    return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, name)), "")
