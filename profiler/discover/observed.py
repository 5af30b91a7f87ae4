"""Parts of a node as tools and files report them, in one vocabulary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# How two devices, or a device and a NIC, reach each other, nearest first: NVLink or xGMI; a PCIe switch; several of
# them; a host bridge; the interconnect inside a NUMA node; between NUMA nodes or sockets.
Path = Literal["fabric", "switch", "switches", "host", "node", "system"]

NicKind = Literal["infiniband", "roce", "efa", "slingshot", "ethernet", ""]

# Far above what a node holds; what is larger was not written by one of the tools.
MOST_DEVICES = 256
MOST_LINKS = 10_000

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
    name: str = ""  # as the tool prints it: "NVIDIA H100 80GB HBM3"
    architecture: str = ""  # "sm_90", "gfx942"
    pci: str = ""  # bus address, lower case: "0000:1b:00.0"
    numa: int | None = None
    memory_bytes: int | None = None  # visible
    host_bytes_per_s: float | None = None  # narrowest link on its way to the host, one direction: PCIe or NVLink-C2C


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNic:
    """A network adapter."""

    name: str  # "mlx5_0"
    kind: NicKind = ""
    bytes_per_s: float | None = None  # one direction, of all its ports that are up
    pci: str = ""
    numa: int | None = None
    gpudirect: bool | None = None  # whether devices send from their own memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLink:
    """Devices `a` and `b`, or device `a` and the NIC named `nic`, and the best path between them."""

    a: int
    b: int | None = None
    nic: str = ""
    path: Path
    num_links: int = 1  # NVLinks or xGMI links side by side, 1 also where only their rate is known; 0: by other devices
    bytes_per_s: float | None = None  # of all of them, one direction, where the source says


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """Node as one source shows it.  What the source does not say is empty or None."""

    source: str  # "nvidia-smi topo -m"
    host: str = ""
    devices: tuple[ObservedDevice, ...] = ()
    nics: tuple[ObservedNic, ...] = ()
    links: tuple[ObservedLink, ...] = ()
    num_sockets: int | None = None
    devices_per_domain: int | None = None  # of the scale-up fabric where it is wider than the node (NVL72)


def nic_kind(name: str) -> NicKind:
    """Kind of an adapter by its name or that of its interface; blank for `mlx5_0`, which may be either of two."""
    return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, name)), "")
