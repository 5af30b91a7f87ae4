"""Devices, from a shipped file or a user's table that may leave values to a similar device.

A datasheet gives memory, its bandwidth and a peak.  The other values that the cost model needs (the sustained fractions
of both rates, the kernel curves) come from the shipped device named in `based_on`, or from the most similar one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, get_args

from autoplan.base.curves import AttentionCurve, GemmCurve
from autoplan.base.errors import InputError
from autoplan.base.files import decode, read_table, shipped, to_fields
from autoplan.base.json_schema import schema
from autoplan.base.names import suggestion
from autoplan.base.units import file_keys, first_faults
from autoplan.base.value_faults import fault_of_text, type_hints
from autoplan.topology.cluster import DeviceSpec

# Standard deviation of the log step time of a device without measured rates: that of the sustained fraction of peak
# among the shipped accelerators (.46 to .96).
UNMEASURED_SPREAD = 0.2
LISTED = "autoplan list devices shows all"
DATASHEET = ("name", "memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s")  # required for any device
PRECISIONS: tuple[str, ...] = get_args(get_args(type_hints(DeviceSpec)["peak_flops_per_s"])[0])
_KIN = ("vendor", "generation")  # optional in a file; the similar device must then match
_TAKEN = (
    "vendor",
    "generation",
    "compute_units",
    "tdp_w",
    "host_link_bytes_per_s",
    "gemm_efficiency",
    "narrow_gemm_efficiency",
    "memory_efficiency",
)


def preset_devices() -> tuple[str, ...]:
    """Return the ids of the shipped devices."""
    return tuple(shipped("devices"))


@lru_cache(maxsize=128)
def load_device(name: str) -> DeviceSpec | None:
    """Return the shipped device with this id, or None."""
    path = shipped("devices").get(name)
    return decode(DeviceSpec, completed(read_table(path), f"device {name}"), f"device {name}") if path else None


def device_table(device: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Return the complete table of a shipped device or of a partial table; InputError if values cannot be completed."""
    if isinstance(device, dict):
        return completed(device, where)
    path = shipped("devices").get(device)
    if path is None:
        raise InputError(f"{where}: unknown device {device!r}: {suggestion(device, preset_devices(), LISTED)}")
    return completed(read_table(path), where)


def based_on(device: str | dict[str, Any], where: str) -> str:
    """Return the id of the shipped device that provides missing values; for a complete device, its own name."""
    table = device if isinstance(device, dict) else read_table(shipped("devices")[device])
    if "based_on" in table or _is_partial(table):
        return _base(table, where)
    return str(table.get("name", ""))


def completed(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the table of a device completed with missing values, in SI; a complete table is unchanged."""
    if "based_on" not in table and not _is_partial(table):
        return table
    base = load_device(_base(table, where))
    assert base is not None
    stated = {key: value for key, value in table.items() if key != "based_on"}
    datasheet = _datasheet_of(stated, where)
    inherited = {name: getattr(base, name) for name in _TAKEN if name not in datasheet}
    if "visible_memory_bytes" not in datasheet:
        inherited["visible_memory_bytes"] = datasheet["memory_bytes"] * base.visible_memory_bytes / base.memory_bytes
    if "gemm_efficiency" in datasheet or base.narrow_gemm_efficiency is None:
        inherited.pop("narrow_gemm_efficiency", None)
    # Curves keep their shape, and the ratio of burst to sustained efficiency.
    pace = datasheet.get("gemm_efficiency", base.gemm_efficiency) / base.gemm_efficiency
    if "gemm" not in datasheet:
        inherited["gemm"] = _curve(base.gemm, base.name, pace, "burst_efficiency")
    if "attention" not in datasheet:
        inherited["attention"] = _curve(base.attention, base.name, pace, "efficiency", "burst_efficiency")
    peaks = datasheet["peak_flops_per_s"]
    if len(peaks) == 1:
        (precision, rate), shares = next(iter(peaks.items())), base.peak_flops_per_s
        if precision in shares:
            stated = {key: value for key, value in stated.items() if key not in file_keys("peak_flops_per_s")}
            inherited["peak_flops_per_s"] = {
                name: rate * peak / shares[precision] for name, peak in shares.items()
            } | peaks
    names = sorted(file_keys(name)[0] for name in inherited.keys() - {"vendor", "generation"})
    note = f"figures of {base.name} are used for {', '.join(names)}"
    return {"rate_spread": UNMEASURED_SPREAD, **stated, **inherited, "sources": [*datasheet.get("sources", ()), note]}


def _datasheet_of(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values in a device's table, in SI; unknown keys and an incomplete datasheet are errors."""
    written: dict[str, tuple[str, float]] = {}
    try:
        datasheet = to_fields(DeviceSpec, table, written=written, needed=DATASHEET)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    faults = []
    for name in DATASHEET[1:]:
        key, value = written[f"$.{name}"][0], datasheet[name]
        if fault := fault_of_text(value, type_hints(DeviceSpec)[name], f"$.{name}", written):
            faults.append(fault)
        elif name == "peak_flops_per_s":
            if not isinstance(value, dict) or not value or not all(map(_is_number, value.values())):
                faults.append(f"{key} must be a table of positive numbers such as {{ bf16 = 312 }}, got {table[key]!r}")
            elif unknown := value.keys() - set(PRECISIONS):
                faults.append(f"{key} must be of {', '.join(PRECISIONS)}, got {', '.join(sorted(unknown))}")
        elif not _is_number(value):
            faults.append(f"{key} must be a positive number, got {table[key]!r}")
    if faults:
        raise InputError(f"{where}: {first_faults(faults)}")
    return datasheet


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_partial(table: dict[str, Any]) -> bool:
    """Return whether a table lacks a value that has no default in `DeviceSpec`."""
    keys = [file_keys(field.name) for field in fields(DeviceSpec) if field.name in (*_TAKEN, "visible_memory_bytes")]
    return any(not set(names) & table.keys() for names in keys if names[-1] != "narrow_gemm_efficiency")


def _base(table: dict[str, Any], where: str) -> str:
    """Return the id of the shipped device in `based_on`, or of the one with the most similar datasheet."""
    name = table.get("based_on")
    if name is not None:
        if name not in preset_devices():
            raise InputError(
                f"{where}: based_on names no built-in device: {suggestion(str(name), preset_devices(), LISTED)}"
            )
        return str(name)
    datasheet = _datasheet_of(table, where)
    peaks, memory_rate = datasheet["peak_flops_per_s"], datasheet["memory_bandwidth_bytes_per_s"]
    precision = next(name for name in ("bf16", "fp16", *peaks) if name in peaks)

    def distance(device: DeviceSpec) -> float:
        if precision not in device.peak_flops_per_s:
            return math.inf
        rates = (
            peaks[precision] / device.peak_flops_per_s[precision],
            memory_rate / device.memory_bandwidth_bytes_per_s,
        )
        return sum(abs(math.log(ratio)) for ratio in rates)

    devices = [device for device in map(load_device, preset_devices()) if device and device.vendor != "cpu"]
    similar = [
        device
        for device in devices
        if not device.is_announced and all(datasheet.get(key) in (None, getattr(device, key)) for key in _KIN)
    ]
    nearest = min(similar, key=distance, default=None)
    if nearest is None or math.isinf(distance(nearest)):
        kin = ", ".join(f"{key} {datasheet[key]}" for key in _KIN if key in datasheet)
        raise InputError(
            f"{where}: no shipped device is of {kin or 'these precisions'}, whose figures could stand in for "
            f"missing ones: {'leave that out, or ' if kin else ''}name one with based_on"
        )
    return nearest.name


def _curve(curve: GemmCurve | AttentionCurve, name: str, pace: float, *levels: str) -> dict[str, Any]:
    """Return the curve of another device with its efficiencies scaled, as a table."""
    scaled = {level: min(pace * getattr(curve, level), 1.0) for level in levels}
    return {**asdict(curve), **scaled, "source": f"{name} values"}


def device_schema() -> dict[str, Any]:
    """Return the JSON Schema of a device's table, in which only the datasheet values are required."""
    described = schema(DeviceSpec, human_units=True)
    device, datasheet = described["$defs"]["DeviceSpec"], {key for name in DATASHEET for key in file_keys(name)}
    device["properties"]["based_on"] = {"enum": list(preset_devices())}
    device["required"] = [key for key in device["required"] if key in datasheet]
    device["allOf"] = [
        choice
        for choice in device["allOf"]
        if {key for part in choice["oneOf"] for key in part["required"]} <= datasheet
    ]
    return described
