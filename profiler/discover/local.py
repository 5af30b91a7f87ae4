"""Observation of this machine from the kernel, NVML and installed tools, each queried once."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import MAX_BYTES, read_text
from autoplan.base.units import cleaned
from autoplan.profiler.discover import hwloc, nvidia_smi, rocm_smi, slurm
from autoplan.profiler.discover.observed import ObservedDevice, ObservedLink, ObservedNic, ObservedNode
from autoplan.profiler.discover.pci import Place, link_bytes_per_s, path_between
from autoplan.profiler.discover.slurm import SwitchTree
from autoplan.profiler.machine.hardware import SYS, Gpu, Links, Nic, amd_gpus, device_id, nics, nvidia_gpus, read

TOOL_S = 20.0  # time limit, since a tool may hang on a faulty device

Tool = tuple[str, ...]
TOOLS: Mapping[Tool, Callable[[str], ObservedNode]] = {
    ("nvidia-smi", "topo", "-m"): nvidia_smi.parse,
    ("rocm-smi", "--showtopo"): rocm_smi.parse,
    ("lstopo", "--whole-io", "--of", "xml"): hwloc.parse,
}


def host_name() -> str:
    """Return the name of this node in Slurm, or else its host name."""
    return cleaned(os.environ.get("SLURMD_NODENAME") or socket.gethostname())


def switch_tree(variables: Mapping[str, str]) -> SwitchTree | None:
    """Return the switches of the cluster as reported by Slurm; None outside of a job or without switches."""
    if "SLURM_JOB_ID" not in variables:
        return None
    folder = Path(variables.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    sources: tuple[Callable[[], str | None], ...] = (
        lambda: _output(("scontrol", "show", "topology")),
        lambda: read_text(folder / "topology.yaml"),  # which Slurm reads before the other
        lambda: read_text(folder / "topology.conf"),
    )
    for read_source in sources:
        with suppress(InputError):  # unreadable, or for a plugin without switches
            if text := read_source():
                return slurm.parse(text)
    return None


def see(
    sys: Path = SYS, tools: Mapping[Tool, Callable[[str], ObservedNode]] = TOOLS
) -> tuple[list[ObservedNode], list[str]]:
    """Return (observations of this machine by source, the kernel and NVML first; problems with tools)."""
    gpus, links = nvidia_gpus()
    source = "NVML and sysfs"
    if not gpus:
        gpus, links = amd_gpus(sys)
        source = "amdkfd and sysfs" if gpus else "sysfs"
    nodes, troubles = [observe(sys, gpus, links, source)], []
    for tool, parse in tools.items():
        try:
            if (text := _output(tool)) is not None:
                nodes.append(parse(text))
        except InputError as error:
            troubles.append(f"`{' '.join(tool)}` is left out: {error}")
    if not gpus and any(node.devices for node in nodes[1:] if node.source == nvidia_smi.SOURCE):
        nodes[0] = replace(nodes[0], devices=())  # the CPU cores are not used for training
        troubles.append("NVML was not asked, which names the devices: pip install nvidia-ml-py")
    return nodes, troubles


def _output(tool: Tool) -> str | None:
    try:
        process = subprocess.run(
            tool,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TOOL_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"it cannot be started: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise InputError(f"it did not end within {TOOL_S:.0f} s") from None
    if process.returncode:
        words = cleaned(" ".join(process.stderr.decode(errors="replace").split()))[:120]
        raise InputError(f"it ended with status {process.returncode} {words}".rstrip())
    return process.stdout[:MAX_BYTES].decode(errors="replace")


def observe(sys: Path, gpus: Sequence[Gpu], links: Links, source: str) -> ObservedNode:
    """Return the node as seen by the kernel; on a machine without accelerators its cores are the devices."""
    if not gpus:
        cores = len(os.sched_getaffinity(0))
        return ObservedNode(
            source=source,
            host=host_name(),
            devices=tuple(ObservedDevice(index=at, name="cpu") for at in range(cores)),
            nics=_adapters(nics(sys)),
            num_sockets=_num_sockets(sys),
        )
    paths = [(sys / "bus/pci/devices" / gpu.pci).resolve() for gpu in gpus]
    ports = nics(sys)
    near = {port.name: _place(port.path) for port in ports}
    places = [_place(path) for path in paths]
    pairs = [
        _pair(links, first, second) or ObservedLink(a=first, b=second, path=path_between(places[first], places[second]))
        for first, second in combinations(range(len(gpus)), 2)
    ]
    to_nics = [
        ObservedLink(a=at, nic=name, path=path_between(place, nic_place))
        for at, place in enumerate(places)
        for name, nic_place in near.items()
    ]
    return ObservedNode(
        source=source,
        host=host_name(),
        devices=tuple(_device(at, gpu, path) for at, (gpu, path) in enumerate(zip(gpus, paths, strict=True))),
        nics=_adapters(ports),
        links=(*pairs, *to_nics),
        num_sockets=_num_sockets(sys),
    )


def _pair(links: Links, first: int, second: int) -> ObservedLink | None:
    """Return the links between two devices beyond PCIe: direct ones, or those of both to the switches of a fabric."""
    direct = links.get((first, second))
    if direct is not None and direct.kind != "pcie":
        return ObservedLink(
            a=first, b=second, path="fabric", num_links=direct.num_links, bytes_per_s=direct.bytes_per_s
        )
    if (first, first) in links and (second, second) in links:
        num_links = min(links[first, first].num_links, links[second, second].num_links)
        return ObservedLink(a=first, b=second, path="fabric", num_links=num_links)
    return None


def _device(index: int, gpu: Gpu, path: Path) -> ObservedDevice:
    return ObservedDevice(
        index=index,
        name=device_id(gpu.name, gpu.memory_bytes, architecture=gpu.architecture, compute_units=gpu.compute_units),
        architecture=gpu.architecture,
        pci=gpu.pci,
        numa=_numa(path),
        memory_bytes=gpu.memory_bytes or None,
        host_bytes_per_s=_host_bytes_per_s(path),
    )


def _adapters(ports: Sequence[Nic]) -> tuple[ObservedNic, ...]:
    """Return one adapter per name; a rate of 0 means that the link is down."""
    adapters: dict[str, ObservedNic] = {}
    for port in ports:
        before = adapters[port.name].bytes_per_s if port.name in adapters else None
        rate = (port.gbit_per_s * 1e9 / 8 if port.gbit_per_s else None) if port.is_up else 0.0
        adapters[port.name] = ObservedNic(
            name=cleaned(port.name),
            kind=port.kind,
            bytes_per_s=rate if before is None else before + (rate or 0.0),
            pci=port.path.name if re.fullmatch(r"[0-9a-f:.]{12,16}", port.path.name) else "",
            numa=_numa(port.path),
        )
    return tuple(adapters.values())


def _place(path: Path) -> Place:
    """Return the place of a device from its path: host bridge, root port, two ports per switch, device."""
    parts = path.parts
    roots = [at for at, part in enumerate(parts) if part.startswith("pci")]
    if not roots:
        return Place(bridge="", numa=_numa(path), switches=())
    below = parts[roots[-1] + 1 : -1]
    return Place(bridge=parts[roots[-1]], numa=_numa(path), switches=tuple(below[1::2]))


def _numa(path: Path) -> int | None:
    text = read(path / "numa_node")  # -1 if unknown to the firmware
    return int(text) if text.isdigit() else None


def _host_bytes_per_s(path: Path) -> float | None:
    """Return the maximum rate of the slowest link from a device to its root; idle links run slower than that."""
    rates = []
    for place in (path, *path.parents):
        if place.name.startswith("pci") or not place.name:
            break
        speed, width = read(place / "max_link_speed").partition(" ")[0], read(place / "current_link_width")
        if re.fullmatch(r"\d{1,3}\.\d", speed) and width.isdigit() and int(width) > 0:
            rates.append(link_bytes_per_s(float(speed), int(width)))
    return min((rate for rate in rates if rate), default=None)


def _num_sockets(sys: Path) -> int | None:
    packages = {read(path) for path in (sys / "devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")}
    return len(packages - {""}) or None
