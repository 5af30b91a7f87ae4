"""Fingerprint of this machine: the properties that determine the speed of operations.

It is read from torch, NVML (NVIDIA) and sysfs, without changing settings.  Everything that varies between boots or over
time is left out: process ids, the numbering of buses, devices and NICs, temperatures, current clocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from autoplan.base.units import GIB
from autoplan.profiler.machine.hardware import (
    SYS,
    Gpu,
    Links,
    Nic,
    amd_gpus,
    amdsmi,
    cpu_model,
    device_id,
    nics,
    numa_nodes,
    nvidia_gpus,
    nvml,
    pci_relation,
    read,
)
from autoplan.profiler.record import Fingerprint


def nvml_handle(device: torch.device) -> Any | None:
    """Return NVML's handle of a CUDA device, found by its UUID, because CUDA_VISIBLE_DEVICES may renumber devices."""
    library = nvml()
    if library is None or device.type != "cuda" or torch.version.hip:
        return None
    with suppress(library.NVMLError, AttributeError):
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return None


def amd_handle(device: torch.device) -> Any | None:
    """Return AMD SMI's handle of a ROCm device, found by its place on the PCI bus."""
    library = amdsmi()
    if library is None or device.type != "cuda" or not torch.version.hip:
        return None
    with suppress(library.AmdSmiException, AttributeError):
        return library.amdsmi_get_processor_handle_from_bdf(_pci_address(device))
    return None


def _pci_address(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def collectives_version(device: torch.device) -> str:
    """Return the library that moves data between devices, with its version: 'nccl 2.28.3', 'gloo'."""
    if device.type == "cpu":
        return "gloo"
    number = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return f"{'rccl' if torch.version.hip else 'nccl'} {number}"


def fingerprint(device: torch.device, *, num_hosts: int = 1, devices_here: int = 1, sys: Path = SYS) -> Fingerprint:
    """Return the fingerprint of this node with `device`, in an allocation of `num_hosts` with `devices_here` of it."""
    cpu, torch_version = cpu_model(), str(torch.__version__)
    ports = [nic for nic in nics(sys) if nic.is_up]
    names = tuple(sorted(str(nic) for nic in ports))
    if device.type == "cpu":
        num_cores = psutil.cpu_count() or 1
        return Fingerprint(
            device="cpu",
            memory_bytes=round(psutil.virtual_memory().total / GIB) * GIB,  # kernels reserve varying amounts
            devices_per_node=num_cores,
            num_hosts=num_hosts,
            runtime="cpu",
            torch=torch_version,
            collectives=collectives_version(device),
            cpu=cpu,
            nics=names,
            topology=canonical_hash([*names, *numa_nodes(sys)], {}),
        )
    properties = torch.cuda.get_device_properties(device)
    gpus, links = amd_gpus(sys) if torch.version.hip else nvidia_gpus()
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
        topology=_node_topology(sys, gpus, links, ports) if gpus else "",
        clock_mhz=getattr(properties, "clock_rate", 0) // 1000,
        power_cap_w=_power_cap_w(device, sys),
    )


def own_fingerprint() -> Fingerprint:
    """Return the fingerprint of this single node, with its first device."""
    return fingerprint(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def canonical_hash(labels: Sequence[str], links: Mapping[tuple[int, int], str]) -> str:
    """Hash nodes with `labels` and the links between them to 16 hexadecimal digits, independent of their order.

    By colour refinement: in each round a node's colour combines those of its neighbours and of the links to them.
    """
    colours = list(labels)
    for _ in range(4):  # a node's links have few kinds: their pattern shows after two rounds
        around: list[list[str]] = [[] for _ in colours]
        for (first, second), link in links.items():
            around[first].append(f"{link}>{colours[second]}")
            around[second].append(f"{link}>{colours[first]}")
        colours = [_digest([colour, *sorted(near)]) for colour, near in zip(colours, around, strict=True)]
    return _digest(sorted(colours))[:16]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _node_topology(sys: Path, gpus: Sequence[Gpu], links: Links, ports: Sequence[Nic]) -> str:
    """Return a hash of the connections between GPUs, NICs and sockets of a node."""
    paths = [(sys / "bus/pci/devices" / gpu.pci).resolve() for gpu in gpus] + [nic.path for nic in ports]
    labels = ["gpu"] * len(gpus) + [str(nic) for nic in ports]
    near = {
        (first, second): f"{links.get((first, second), '')} {pci_relation(paths[first], paths[second])}"
        for first in range(len(paths))
        for second in range(first + 1, len(paths))
    }
    # Links to switches are links of a device to itself here.
    near |= {(first, second): str(link) for (first, second), link in links.items() if first == second}
    return canonical_hash([*labels, *numa_nodes(sys)], near)


def _driver(sys: Path) -> str:
    if torch.version.hip:
        return read(sys / "module/amdgpu/version")
    library = nvml()
    return str(library.nvmlSystemGetDriverVersion()) if library else ""


def _power_cap_w(device: torch.device, sys: Path) -> int:
    """Return the power limit in force in watts; 0 if it cannot be read."""
    if (handle := nvml_handle(device)) is not None:
        library = nvml()
        assert library is not None
        with suppress(library.NVMLError):
            return round(library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    with suppress(AttributeError, ValueError):
        for cap in (sys / "bus/pci/devices" / _pci_address(device) / "hwmon").glob("*/power1_cap"):
            return round(int(read(cap)) / 1e6)  # microwatts
    return 0
