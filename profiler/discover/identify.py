"""Which device that autoplan ships are these, and what stands in for one that it does not ship?"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from autoplan.cluster import DeviceSpec
from autoplan.errors import InputError
from autoplan.read.cluster import load_device, preset_devices
from profiler.devices import devices_named
from profiler.discover.seen import SeenDevice, SeenNode

_GENERATIONS = (
    ("volta", r"sm_7[02]", r"V100"),
    ("ampere", r"sm_8[067]", r"A(10|16|30|40|100|800)G?|RTX A\d+|RTX 30\d\d.*"),
    ("ada", r"sm_89", r"L(4|20|40)S?|RTX 40\d\d.*|RTX \d+ Ada.*"),
    ("hopper", r"sm_90", r"G?H(100|20|200|800)"),
    ("blackwell", r"sm_1[0-2]\d", r"G?B(100|200|300)|RTX 50\d\d.*"),
    ("cdna2", r"gfx90a", r"MI2\d\dX?"),
    ("cdna3", r"gfx94\d", r"MI3[012]\dX?"),
    ("cdna4", r"gfx950", r"MI35\dX?"),
)

# Figures of a device that a stand-in takes from another.
STAND_IN_FIGURES = (
    "memory_bandwidth_bytes_per_s",
    "compute_units",
    "tdp_w",
    "gemm_efficiency",
    "memory_efficiency",
    "peak_flops_per_s",
)


def identify(node: SeenNode, wanted: str = "") -> tuple[DeviceSpec, str]:
    """(the devices of `node`, the shipped one whose figures stand in for theirs, blank where it is this one).

    `wanted` is the id of a shipped device, where a person knows better than the sources.
    """
    if wanted:
        known = load_device(wanted)
        if known is None:
            raise InputError(f"--device {wanted!r} is not shipped: known are {', '.join(preset_devices())}")
        return known, ""
    if not node.devices:
        raise InputError(f"{node.source}: names no device: give a source that does, or pass --device")
    seen = _usual(node)
    ids = _ids(seen)
    if len(ids) == 1:
        found = load_device(ids[0])
        assert found is not None
        return found, ""
    if ids:
        raise InputError(f"{node.source}: {seen.name or 'the device'} may be {' or '.join(ids)}: pass --device")
    generation = _generation(seen)
    alike = [device for device in map(load_device, preset_devices()) if device and device.generation == generation]
    if not seen.name:
        hint = " or ".join(one.name for one in alike) or "h100-sxm"
        raise InputError(f"{node.source} does not say which devices these are: pass --device, such as {hint}")
    if not alike:
        raise InputError(f"{node.source}: nothing is known about {seen.name!r}: pass --device with the one like it")
    return _stand_in(seen, alike)


def _stand_in(seen: SeenDevice, alike: list[DeviceSpec]) -> tuple[DeviceSpec, str]:
    memory = float(seen.memory_bytes or 0)
    nearest = min(alike, key=lambda one: (abs(memory - one.visible_memory_bytes) if memory else 0.0, one.name))
    return replace(
        nearest,
        name=seen.name,
        memory_bytes=memory or nearest.memory_bytes,
        visible_memory_bytes=memory or nearest.visible_memory_bytes,
        host_link_bytes_per_s=seen.host_bytes_per_s or nearest.host_link_bytes_per_s,
        sources=(f"not shipped: figures of {nearest.name} stand in where they were not seen",),
    ), nearest.name


def _usual(node: SeenNode) -> SeenDevice:
    """One of the devices of which there are most."""
    name = Counter(device.name for device in node.devices).most_common(1)[0][0]
    return next(device for device in node.devices if device.name == name)


def _ids(device: SeenDevice) -> tuple[str, ...]:
    """Ids of the shipped devices that it may be."""
    return (device.name,) if device.name in preset_devices() else devices_named(device.name)


def _generation(device: SeenDevice) -> str:
    for generation, architecture, names in _GENERATIONS:
        if re.fullmatch(architecture, device.architecture) or re.search(rf"\b({names})\b", device.name):
            return generation
    return ""
