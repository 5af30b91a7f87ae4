"""Hardware of this node from NVML, the kernel's amdkfd and sysfs, read without torch and without changing settings."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from autoplan.base.units import cleaned
from autoplan.profiler.machine.device_names import devices_named
from autoplan.readers.device import load_device

SYS = Path("/sys")
CPUINFO = Path("/proc/cpuinfo")
_BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}  # the kernel's names on x86 and (the last one) on Arm

# ROCm may name every device "AMD Radeon Graphics": then the architecture limits the possible devices.
_ARCHITECTURES = {
    "gfx90a": ("mi210", "mi250x-gcd"),
    "gfx942": ("mi300a", "mi300x", "mi325x"),
    "gfx950": ("mi350x", "mi355x"),
}
_MEMORY_TOLERANCE = 0.04  # drivers reserve different amounts; the closest two products differ by 10 %

_KFD_LINKS = {"2": "pcie", "11": "xgmi"}  # io_link types of the kernel's amdkfd topology
_GPU_TO_GPU, _GPU_TO_SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_GPU and _SWITCH

# Distance of two PCI devices: below one switch, one root complex, one socket, or none of them.
PciRelation = Literal["switch", "root", "socket", "far"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An accelerator of the node; unreadable values are blank or 0."""

    pci: str  # in the format of sysfs: 0000:17:00.0
    name: str = ""
    memory_bytes: int = 0
    architecture: str = ""  # gfx942
    compute_units: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLink:
    """Links between two GPUs, or between a GPU and the switches of the fabric."""

    kind: str  # nvlink, xgmi, pcie
    num_links: int = 1  # parallel links
    weight: str = ""  # amdkfd's measure of the distance
    bytes_per_s: float | None = None  # total of all links, per direction

    def __str__(self) -> str:
        return f"{self.kind} {self.weight}" if self.weight else f"{self.kind} x{self.num_links}"


Links = dict[tuple[int, int], GpuLink]  # by the indices of two GPUs; twice the same index: to switches


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A port of a network adapter."""

    name: str
    kind: Literal["infiniband", "roce", "efa", "slingshot", "ethernet"]
    gbit_per_s: float | None
    is_up: bool
    path: Path  # its place on the PCI bus

    def __str__(self) -> str:
        return f"{self.kind} {self.gbit_per_s:g} Gb/s" if self.gbit_per_s else self.kind


def device_id(name: str, memory_bytes: int, *, architecture: str = "", compute_units: int = 0) -> str:
    """Return autoplan's id of the device that the driver calls `name`, or else that name.

    The name must match a rule, and the visible memory that of a shipped device within 4 %; a device with a generic name
    in ROCm is identified by its architecture, memory and number of compute units.
    """
    ids = devices_named(name)
    by_architecture = not ids and "Instinct" not in name
    if by_architecture:
        ids = _ARCHITECTURES.get(architecture.partition(":")[0], ())
    for candidate in ids:
        spec = load_device(candidate)
        assert spec is not None, candidate
        if abs(memory_bytes / spec.visible_memory_bytes - 1) > _MEMORY_TOLERANCE:
            continue
        if not by_architecture or compute_units == spec.compute_units:
            return candidate
    return cleaned(name) or "unknown"


@lru_cache(maxsize=1)
def nvml() -> Any | None:
    """Return NVIDIA's management library (nvidia-ml-py), initialised; None if it or its driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


@lru_cache(maxsize=1)
def amdsmi() -> Any | None:
    """Return AMD's management library, which is part of ROCm, initialised; None if it or its driver is missing."""
    try:
        import amdsmi as library
    except (ImportError, OSError, KeyError):  # its package loads the driver's library on import
        return None
    try:
        library.amdsmi_init()
    except library.AmdSmiException:
        return None
    return library


def visible_nvidia_handles() -> list[Any]:
    """Return NVML's handles of the GPUs in CUDA_VISIBLE_DEVICES; of all GPUs if it names parts of them."""
    library = nvml()
    if library is None:
        return []
    handles, _ = _nvidia_handles(library)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return handles
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names or names[0] == "-1":
        return []
    visible = []
    for name in names:
        with suppress(library.NVMLError):
            if name.isdigit() and int(name) < len(handles):
                visible.append(handles[int(name)])
            elif name.startswith("GPU-"):
                visible.append(library.nvmlDeviceGetHandleByUUID(name))
    return visible or handles


def _nvidia_handles(library: Any) -> tuple[list[Any], int]:
    """Return (the GPUs that respond, the number of GPUs that do not, such as one that fell off the bus)."""
    handles, count = [], library.nvmlDeviceGetCount()
    for at in range(count):
        with suppress(library.NVMLError):
            handle = library.nvmlDeviceGetHandleByIndex(at)
            library.nvmlDeviceGetPciInfo(handle)
            handles.append(handle)
    return handles, count - len(handles)


def amd_handles() -> list[Any]:
    """Return AMD SMI's handles of all GPUs of this node."""
    library = amdsmi()
    if library is None:
        return []
    with suppress(library.AmdSmiException):
        return list(library.amdsmi_get_processor_handles())
    return []


def num_lost_gpus() -> int:
    """Return the number of NVIDIA GPUs that are known to the driver and do not respond."""
    library = nvml()
    return _nvidia_handles(library)[1] if library else 0


def nvidia_gpus() -> tuple[list[Gpu], Links]:
    """Return the GPUs that respond to NVML, and the NVLinks between them."""
    library = nvml()
    if library is None:
        return [], {}
    handles, _ = _nvidia_handles(library)
    gpus = [_nvidia_gpu(library, handle) for handle in handles]
    addresses = [gpu.pci for gpu in gpus]
    counts: dict[tuple[int, int], int] = {}
    for at, handle in enumerate(handles):
        for link in range(library.NVML_NVLINK_MAX_LINKS):
            with suppress(library.NVMLError):  # a link that this product does not have
                if library.nvmlDeviceGetNvLinkState(handle, link) != library.NVML_FEATURE_ENABLED:
                    continue
                kind = library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
                peer = at
                if kind == _GPU_TO_GPU:
                    remote = _pci_address(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
                    peer = addresses.index(remote) if remote in addresses else at
                if kind in (_GPU_TO_GPU, _GPU_TO_SWITCH) and at <= peer:
                    counts[at, peer] = counts.get((at, peer), 0) + 1
    return gpus, {pair: GpuLink(kind="nvlink", num_links=count) for pair, count in counts.items()}


def _nvidia_gpu(library: Any, handle: Any) -> Gpu:
    name, memory_bytes = "", 0
    with suppress(library.NVMLError):
        name = cleaned(_text(library.nvmlDeviceGetName(handle)))
        memory_bytes = int(library.nvmlDeviceGetMemoryInfo(handle).total)
    return Gpu(pci=_pci_address(library.nvmlDeviceGetPciInfo(handle).busId), name=name, memory_bytes=memory_bytes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pci_address(bus_id: str | bytes) -> str:
    """Return NVML's '00000000:17:00.0' in the format of sysfs: '0000:17:00.0'."""
    return _text(bus_id).lower()[-12:]


def amd_gpus(sys: Path) -> tuple[list[Gpu], Links]:
    """Return the GPUs of the kernel's amdkfd topology, and the links between them."""
    nodes = {}
    for node in sorted((sys / "class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if int(properties.get("simd_count", 0)) > 0:
            nodes[node.name] = (node, properties)
    order = {name: at for at, name in enumerate(nodes)}
    gpus: list[Gpu] = []
    links: Links = {}
    for name, (node, properties) in nodes.items():
        gpus.append(_amd_gpu(sys, properties))
        for link in (node / "io_links").glob("*"):
            link_properties = _properties(link / "properties")
            peer = order.get(link_properties.get("node_to", ""), -1)
            if order[name] < peer:
                links[order[name], peer] = GpuLink(
                    kind=_KFD_LINKS.get(link_properties.get("type", ""), "link"),
                    weight=str(link_properties.get("weight")),
                    bytes_per_s=int(link_properties.get("max_bandwidth", 0)) * 1e6 or None,  # MB/s
                )
    return gpus, links


def _amd_gpu(sys: Path, properties: dict[str, str]) -> Gpu:
    place, domain = int(properties.get("location_id", 0)), int(properties.get("domain", 0))
    address = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    version = int(properties.get("gfx_target_version", 0))  # 90402 is gfx942, 90010 is gfx90a
    memory = read(sys / "bus/pci/devices" / address / "mem_info_vram_total")
    return Gpu(
        pci=address,
        name=read(sys / "bus/pci/devices" / address / "product_name"),
        memory_bytes=int(memory) if memory.isdigit() else 0,
        architecture=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else "",
        compute_units=int(properties["simd_count"]) // max(int(properties.get("simd_per_cu", 0)), 1),
    )


def nics(sys: Path) -> list[Nic]:
    """List every port of every NIC; virtual ones are left out."""
    adapters = []
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        device = (port.parents[1] / "device").resolve()
        fabric: Literal["infiniband", "roce"] = "infiniband" if read(port / "link_layer") == "InfiniBand" else "roce"
        adapters.append(
            Nic(
                name=port.parents[1].name,
                kind="efa" if (device / "driver").resolve().name == "efa" else fabric,
                gbit_per_s=_number(read(port / "rate").partition(" ")[0]),
                is_up="ACTIVE" in read(port / "state"),
                path=device,
            )
        )
    for net in sorted((sys / "class/net").glob("*")):
        device = (net / "device").resolve()
        if not device.exists() or (device / "infiniband").exists():
            continue
        mbit_per_s = _number(read(net / "speed"))  # -1 if unknown to the driver
        adapters.append(
            Nic(
                name=net.name,
                kind="slingshot" if (device / "driver").resolve().name.startswith("cxi") else "ethernet",
                gbit_per_s=mbit_per_s / 1000 if mbit_per_s else None,
                is_up=read(net / "operstate") != "down",
                path=device,
            )
        )
    return adapters


def _number(text: str) -> float | None:
    """Return a positive number; None for anything else."""
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d{1,3})?", text) and float(text) > 0 else None


def pci_relation(first: Path, second: Path) -> PciRelation:
    """Return the distance of two devices, given their places on the PCI bus."""
    common = os.path.commonpath([first, second])
    roots = [part for part in Path(common).parts if part.startswith("pci")]
    if roots:
        return "switch" if Path(common).name != roots[-1] else "root"
    return "socket" if read(first / "numa_node") == read(second / "numa_node") else "far"


def numa_nodes(sys: Path) -> list[str]:
    """Return the distances of every NUMA node to the others, as reported by the firmware."""
    return [
        "numa " + " ".join(sorted(read(node / "distance").split()))
        for node in (sys / "devices/system/node").glob("node[0-9]*")
    ]


def cpu_model() -> str:
    """Return the processor's name; its architecture if /proc does not contain the name, as on Arm."""
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE):
            return cleaned(" ".join(match[1].split()))
    return cleaned(platform.processor() or platform.machine())


def emulates_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the cores are known to lack bf16 units, so that bf16 GEMMs are many times slower than fp32."""
    with suppress(OSError):
        if match := re.search(r"^(?:flags|Features)\s*:(.+)$", cpuinfo.read_text(), re.MULTILINE):
            return _BF16_UNITS.isdisjoint(match[1].split())
    return False


def read(path: Path) -> str:
    """Return the text of a sysfs file; empty if it is missing or unreadable, such as `speed` of a link that is down."""
    try:
        lines = path.read_text().strip().splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return "\n".join(cleaned(line) for line in lines)


def _properties(path: Path) -> dict[str, str]:
    pairs = (line.split(maxsplit=1) for line in read(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
