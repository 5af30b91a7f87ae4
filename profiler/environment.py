"""What machine is this, as far as it decides how long things take?

Read from torch, NVML (NVIDIA) and sysfs; nothing is set.  What changes from boot to boot or from second to second is
left out: process ids, the order in which buses, devices and NICs are counted, temperatures, present clocks.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from autoplan.read.cluster import load_device
from autoplan.units import GIB
from profiler.devices import devices_named
from profiler.record import Fingerprint, cleaned

SYS = Path("/sys")

# ROCm may name every device "AMD Radeon Graphics": then the architecture says which it can be.
_ARCHITECTURES = {"gfx90a": ("mi250x-gcd",), "gfx942": ("mi300x", "mi325x"), "gfx950": ("mi355x",)}
_MEMORY_TOLERANCE = 0.04  # drivers keep different amounts for themselves; the nearest two products differ by a tenth

_KFD_LINKS = {"2": "pcie", "11": "xgmi"}  # io_link types of the kernel's amdkfd topology
_GPU_TO_GPU, _GPU_TO_SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_GPU and _SWITCH


def device_id(name: str, memory_bytes: int, *, architecture: str = "", compute_units: int = 0) -> str:
    """autoplan's id of the device that the driver calls `name`, else that name.

    The name must match a rule and the visible memory that of a shipped device within 4 %; a device that ROCm names in
    general only is known by its architecture, memory and number of compute units.
    """
    ids = devices_named(name)
    by_architecture = not ids and "Instinct" not in name
    if by_architecture:
        ids = _ARCHITECTURES.get(architecture.partition(":")[0], ())
    for known in ids:
        spec = load_device(known)
        assert spec is not None, known
        if abs(memory_bytes / spec.visible_memory_bytes - 1) > _MEMORY_TOLERANCE:
            continue
        if not by_architecture or compute_units == spec.compute_units:
            return known
    return cleaned(name) or "unknown"


@lru_cache(maxsize=1)
def nvml() -> Any | None:
    """NVIDIA's management library (nvidia-ml-py), started; None where it or a driver for it is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def nvml_handle(device: torch.device) -> Any | None:
    """NVML's handle of a CUDA device: found by its UUID, since CUDA_VISIBLE_DEVICES may count differently."""
    library = nvml()
    if library is None or device.type != "cuda" or torch.version.hip:
        return None
    with suppress(library.NVMLError, AttributeError):
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return None


def collectives_version(device: torch.device) -> str:
    """The library that moves data between devices, with its version: 'nccl 2.28.3', 'gloo'."""
    if device.type == "cpu":
        return "gloo"
    number = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return f"{'rccl' if torch.version.hip else 'nccl'} {number}"


def fingerprint(device: torch.device, *, num_hosts: int = 1, devices_here: int = 1, sys: Path = SYS) -> Fingerprint:
    """The fingerprint of this node with `device`, in an allocation of `num_hosts` that uses `devices_here` of it."""
    cpu, torch_version = _cpu_model(), str(torch.__version__)
    nics = _nics(sys)
    names = tuple(sorted(label for label, _ in nics))
    if device.type == "cpu":
        num_cores = psutil.cpu_count() or 1
        return Fingerprint(
            device="cpu",
            memory_bytes=round(psutil.virtual_memory().total / GIB) * GIB,  # kernels keep varying amounts
            devices_per_node=num_cores,
            num_hosts=num_hosts,
            runtime="cpu",
            torch=torch_version,
            collectives=collectives_version(device),
            cpu=cpu,
            nics=names,
            topology=canonical_hash([*names, *_numa_nodes(sys)], {}),
        )
    properties = torch.cuda.get_device_properties(device)
    gpus, links = _amd_links(sys) if torch.version.hip else _nvidia_links()
    return Fingerprint(
        device=device_id(
            properties.name,
            properties.total_memory,
            architecture=getattr(properties, "gcnArchName", ""),
            compute_units=properties.multi_processor_count,
        ),
        memory_bytes=properties.total_memory,
        devices_per_node=max(len(gpus), devices_here, torch.cuda.device_count()),
        num_hosts=num_hosts,
        driver=_driver(sys),
        runtime=f"rocm {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}",
        torch=torch_version,
        collectives=collectives_version(device),
        cpu=cpu,
        nics=names,
        topology=_node_topology(sys, gpus, links, nics) if gpus else "",
        clock_mhz=getattr(properties, "clock_rate", 0) // 1000,
        power_cap_w=_power_cap_w(device, sys),
    )


def canonical_hash(labels: Sequence[str], links: Mapping[tuple[int, int], str]) -> str:
    """16 hexadecimal digits for nodes with `labels` and the links between them, the same in whatever order they come.

    Colour refinement: each round a node's colour takes in those of its neighbours and of the links to them.
    """
    colours = list(labels)
    for _ in range(4):  # a node's links have few kinds: their pattern shows after two rounds
        around: list[list[str]] = [[] for _ in colours]
        for (one, other), link in links.items():
            around[one].append(f"{link}>{colours[other]}")
            around[other].append(f"{link}>{colours[one]}")
        colours = [_digest([colour, *sorted(near)]) for colour, near in zip(colours, around, strict=True)]
    return _digest(sorted(colours))[:16]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _node_topology(
    sys: Path, gpus: Sequence[str], links: Mapping[tuple[int, int], str], nics: Sequence[tuple[str, Path]]
) -> str:
    """Hash of how GPUs (their PCI addresses), NICs and sockets of a node hang together."""
    paths = [(sys / "bus/pci/devices" / address).resolve() for address in gpus] + [path for _, path in nics]
    labels = ["gpu"] * len(gpus) + [label for label, _ in nics]
    near = {
        (one, other): f"{links.get((one, other), '')} {_pci_relation(paths[one], paths[other])}"
        for one in range(len(paths))
        for other in range(one + 1, len(paths))
    }
    # Links to switches are links of a device to itself here.
    near |= {(one, other): link for (one, other), link in links.items() if one == other}
    return canonical_hash([*labels, *_numa_nodes(sys)], near)


def _pci_relation(one: Path, other: Path) -> str:
    """How close two PCI devices are: below one switch, one root complex, one socket, or none of them."""
    common = os.path.commonpath([one, other])
    roots = [part for part in Path(common).parts if part.startswith("pci")]
    if roots:
        return "switch" if Path(common).name != roots[-1] else "root"
    return "socket" if _read(one / "numa_node") == _read(other / "numa_node") else "far"


def _numa_nodes(sys: Path) -> list[str]:
    """The distances of every NUMA node to the others, as firmware tells them."""
    return [
        "numa " + " ".join(sorted(_read(node / "distance").split()))
        for node in (sys / "devices/system/node").glob("node[0-9]*")
    ]


def _nics(sys: Path) -> list[tuple[str, Path]]:
    """(kind and rate, place on the PCI bus) of every NIC whose link is up; virtual ones are left out."""
    found = []
    for port in (sys / "class/infiniband").glob("*/ports/*"):
        device = (port.parents[1] / "device").resolve()
        if "ACTIVE" not in _read(port / "state"):
            continue
        fabric = "infiniband" if _read(port / "link_layer") == "InfiniBand" else "roce"
        kind = "efa" if (device / "driver").resolve().name == "efa" else fabric
        rate = _read(port / "rate").partition(" ")[0]
        found.append((f"{kind} {rate} Gb/s" if rate else kind, device))
    for net in (sys / "class/net").glob("*"):
        device = (net / "device").resolve()
        if not device.exists() or (device / "infiniband").exists() or _read(net / "operstate") == "down":
            continue
        kind = "slingshot" if (device / "driver").resolve().name.startswith("cxi") else "ethernet"
        speed = _read(net / "speed")  # Mb/s; -1 where the driver does not know
        known = speed.isdigit() and int(speed) > 0
        found.append((f"{kind} {int(speed) / 1000:g} Gb/s" if known else kind, device))
    return found


def _nvidia_links() -> tuple[list[str], dict[tuple[int, int], str]]:
    """(PCI address of each GPU of the node, NVLinks between them and, as links to oneself, to switches)."""
    library = nvml()
    if library is None:
        return [], {}
    handles = [library.nvmlDeviceGetHandleByIndex(at) for at in range(library.nvmlDeviceGetCount())]
    addresses = [_pci_address(library.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    counts: dict[tuple[int, int], int] = {}
    for at, handle in enumerate(handles):
        for link in range(library.NVML_NVLINK_MAX_LINKS):
            with suppress(library.NVMLError):  # a link that this product does not have
                if library.nvmlDeviceGetNvLinkState(handle, link) != library.NVML_FEATURE_ENABLED:
                    continue
                kind = library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
                other = at
                if kind == _GPU_TO_GPU:
                    remote = _pci_address(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
                    other = addresses.index(remote) if remote in addresses else at
                if kind in (_GPU_TO_GPU, _GPU_TO_SWITCH) and at <= other:
                    counts[at, other] = counts.get((at, other), 0) + 1
    return addresses, {pair: f"nvlink x{count}" for pair, count in counts.items()}


def _pci_address(bus_id: str | bytes) -> str:
    """NVML's '00000000:17:00.0' as sysfs writes it: '0000:17:00.0'."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    return text.lower()[-12:]


def _amd_links(sys: Path) -> tuple[list[str], dict[tuple[int, int], str]]:
    """(PCI address of each GPU of the node, links between them), from the kernel's amdkfd topology."""
    nodes = {}
    for node in sorted((sys / "class/kfd/kfd/topology/nodes").glob("*"), key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if int(properties.get("simd_count", 0)) > 0:
            nodes[node.name] = (node, properties)
    order = {name: at for at, name in enumerate(nodes)}
    addresses, links = [], {}
    for name, (node, properties) in nodes.items():
        place = int(properties.get("location_id", 0))
        domain = int(properties.get("domain", 0))
        addresses.append(f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}")
        for link in (node / "io_links").glob("*"):
            about = _properties(link / "properties")
            other = order.get(about.get("node_to", ""), -1)
            if order[name] < other:
                links[order[name], other] = f"{_KFD_LINKS.get(about.get('type', ''), 'link')} {about.get('weight')}"
    return addresses, links


def _properties(path: Path) -> dict[str, str]:
    pairs = (line.split(maxsplit=1) for line in _read(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _driver(sys: Path) -> str:
    if torch.version.hip:
        return _read(sys / "module/amdgpu/version")
    library = nvml()
    return str(library.nvmlSystemGetDriverVersion()) if library else ""


def _power_cap_w(device: torch.device, sys: Path) -> int:
    """The limit in force in watts; 0 where it cannot be read."""
    if (handle := nvml_handle(device)) is not None:
        library = nvml()
        assert library is not None
        with suppress(library.NVMLError):
            return round(library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    properties: Any = torch.cuda.get_device_properties(device)
    with suppress(AttributeError, ValueError):
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        for cap in (sys / "bus/pci/devices" / address / "hwmon").glob("*/power1_cap"):
            return round(int(_read(cap)) / 1e6)  # microwatts
    return 0


def _cpu_model() -> str:
    """The processor's name; its architecture where /proc does not tell one, as on Arm."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return cleaned(" ".join(found[1].split()))
    return cleaned(platform.processor() or platform.machine())


def _read(path: Path) -> str:
    """The text of a file of sysfs; empty where it is missing or refuses, as `speed` of a link that is down does."""
    try:
        return _cleaned_lines(path.read_text())
    except (OSError, UnicodeDecodeError):
        return ""


def _cleaned_lines(text: str) -> str:
    """`text` line by line without control characters."""
    return "\n".join(cleaned(line) for line in text.strip().splitlines())
