"""Identification of devices: the matching shipped device, or the most similar one to complete missing values."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.names import suggestion
from autoplan.profiler.discover.observed import ObservedDevice, ObservedNode
from autoplan.profiler.machine.device_names import devices_named
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.device import load_device, preset_devices
from autoplan.topology.cluster import DeviceSpec

_FIGURES = (
    "memory_bytes",
    "visible_memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "compute_units",
    "tdp_w",
    "host_link_bytes_per_s",
    "gemm_efficiency",
    "memory_efficiency",
    "peak_flops_per_s",
)

_FASTEST_PCIE = 128e9  # generation 6, 16 lanes

_GENERATIONS = (
    ("volta", r"sm_7[02]", r"V100"),
    ("turing", r"sm_75", r"T4|RTX 20\d\d.*"),
    ("ampere", r"sm_8[067]", r"A(10|16|30|40|100|800)G?|RTX A\d+|RTX 30\d\d.*"),
    ("ada", r"sm_89", r"L(4|20|40)S?|RTX 40\d\d.*|RTX \d+ Ada.*"),
    ("hopper", r"sm_90", r"G?H(100|20|200|800)"),
    ("blackwell", r"sm_1[0-2]\d", r"G?B(100|200|300)|RTX 50\d\d.*|RTX PRO \d+ Blackwell.*"),
    ("cdna2", r"gfx90a", r"MI2\d\dX?"),
    ("cdna3", r"gfx94\d", r"MI3[012]\dX?"),
    ("cdna4", r"gfx950", r"MI35\dX?"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """Identified devices of a node."""

    device: DeviceSpec
    shipped_id: str  # the matching shipped device, or the one that provides missing values
    assumed: tuple[str, ...] = ()  # fields with such values


def identify(node: ObservedNode, device_id: str = "") -> Identified:
    """Return the shipped device that matches the devices of `node`, or the most similar one with observed values.

    `device_id` is the id of a shipped device, if the user knows better than the sources.
    """
    if device_id:
        device = load_device(device_id)
        if device is None:
            raise InputError(f"--device {device_id!r} is not built in: {suggestion(device_id, preset_devices())}")
        return Identified(device=device, shipped_id=device_id)
    if not node.devices:
        raise InputError(f"{node.source}: names no device: give a source that does, or pass --device")
    observed = _usual(node)
    ids = (observed.name,) if observed.name in preset_devices() else devices_named(observed.name)
    if len(ids) == 1:
        spec = load_device(ids[0])
        assert spec is not None
        return Identified(device=spec, shipped_id=spec.name)
    if ids:
        raise InputError(f"{node.source}: {observed.name or 'the device'} may be {' or '.join(ids)}: pass --device")
    generation = _generation(observed)
    alike = [device for device in map(load_device, preset_devices()) if device and device.generation == generation]
    if not observed.name:
        hint = " or ".join(device.name for device in alike) or "h100-sxm"
        raise InputError(f"{node.source} does not say which devices these are: pass --device, such as {hint}")
    if not alike:
        raise InputError(
            f"{node.source}: nothing is known about {observed.name!r}: pass --device with the most similar one"
        )
    return _stand_in(node, observed, alike)


def _stand_in(node: ObservedNode, observed: ObservedDevice, alike: list[DeviceSpec]) -> Identified:
    """Return the device with observed values, completed by the most similar shipped device."""
    has_fabric = any(link.b is not None and link.path == "fabric" for link in node.links)
    memory = float(observed.memory_bytes or 0)
    clusters = [load_cluster(name) for name in preset_clusters()]
    joined = {cluster.device.name for cluster in clusters if cluster.levels[-1].kind in ("nvlink", "xgmi")}

    words = re.findall(r"\w+", observed.name.lower())

    def unlike(device: DeviceSpec) -> tuple[bool, bool, bool, float, bool, bool, float]:
        chip, *form = device.name.split("-")
        is_coupled = device.host_link_bytes_per_s > _FASTEST_PCIE  # to its own CPU, as in a GH200
        return (
            (device.name in joined) != has_fabric,
            # A different chip, such as an H20 instead of an H100 with the same memory.
            chip not in words,
            is_coupled != ((observed.host_bytes_per_s or 0) > _FASTEST_PCIE),
            abs(memory - device.visible_memory_bytes) if memory else 0.0,
            not {*form} <= {*words},  # such as pcie
            device.name not in preset_clusters(),  # a variant
            device.visible_memory_bytes,  # what is not known to fit, is not taken to
        )

    nearest = min(alike, key=unlike)
    figures: dict[str, Any] = {"name": observed.name}
    if memory:
        figures |= {"memory_bytes": memory, "visible_memory_bytes": memory}
    if observed.host_bytes_per_s:
        figures["host_link_bytes_per_s"] = observed.host_bytes_per_s
    sources = (f"not built in: figures of {nearest.name} are used where none were seen",)
    return Identified(
        device=replace(nearest, sources=sources, **figures),
        shipped_id=nearest.name,
        assumed=tuple(name for name in _FIGURES if name not in figures),
    )


def _usual(node: ObservedNode) -> ObservedDevice:
    """Return a device of the most frequent kind."""
    name = Counter(device.name for device in node.devices).most_common(1)[0][0]
    return next(device for device in node.devices if device.name == name)


def _generation(device: ObservedDevice) -> str:
    for generation, architecture, names in _GENERATIONS:
        if re.fullmatch(architecture, device.architecture) or re.search(rf"\b({names})\b", device.name):
            return generation
    return ""
