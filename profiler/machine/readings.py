"""Current state of devices from NVML and AMD SMI: throttle reasons, clocks, power, load of other processes.

It is read without torch and without changing settings.  Values that are unavailable or not permitted are blank or 0.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from autoplan.profiler.machine.hardware import amdsmi, nvml

# NVML's throttle reasons that are not part of sustained work within the power cap.
_NVIDIA_SLOWDOWNS = {0x08: "hardware", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
# The same for AMD SMI's violation status, since MI300; `ppt_pwr` is the power cap.
_AMD_SLOWDOWNS = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "socket thermal",
    "active_vr_thrm": "regulator thermal",
    "active_hbm_thrm": "memory thermal",
}
# Before MI300: bits 32 to 47 of the throttle status are temperatures (SMU_THROTTLER_TEMP_* in amdgpu).
_AMD_TEMPERATURES = 0xFFFF << 32


def nvidia_slowdown(handle: Any) -> str:
    """Describe why the clocks of a device are reduced, according to NVML."""
    library = nvml()
    bits = 0
    if library is not None:
        with suppress(library.NVMLError):  # unknown to drivers before 535
            bits = library.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return ", ".join(name for bit, name in _NVIDIA_SLOWDOWNS.items() if bits & bit)


def amd_slowdown(handle: Any) -> str:
    """Describe why the clocks of a device are reduced, according to AMD SMI."""
    library = amdsmi()
    if library is None:
        return ""
    with suppress(library.AmdSmiException):  # raised for features that older devices lack
        status = library.amdsmi_get_violation_status(handle)
        reasons = [name for key, name in _AMD_SLOWDOWNS.items() if status.get(key) in (True, 1)]  # else False or "N/A"
        if reasons or any(isinstance(status.get(key), bool | int) for key in _AMD_SLOWDOWNS):
            return ", ".join(reasons)
    with suppress(library.AmdSmiException):
        bits = library.amdsmi_get_gpu_metrics_info(handle).get("indep_throttle_status")
        return "thermal" if isinstance(bits, int) and bits != 2**64 - 1 and bits & _AMD_TEMPERATURES else ""
    return ""


def foreign_share(handle: Any, since_us: int) -> float:
    """Return the share of an NVIDIA device's time used by other processes since a time, in microseconds since 1970.

    Inside a container the driver's process ids differ from ours: then the busiest process is assumed to be this one.
    """
    library = nvml()
    if library is None:
        return 0.0
    used: dict[int, float] = defaultdict(float)
    with suppress(library.NVMLError):  # raised if nothing ran
        for sample in library.nvmlDeviceGetProcessUtilization(handle, since_us):
            used[sample.pid] = max(used[sample.pid], sample.smUtil / 100)
    own_pid = os.getpid() if os.getpid() in used else max(used, key=lambda pid: used[pid], default=0)
    return sum(share for pid, share in used.items() if pid != own_pid)


def nvidia_clock_and_power(handle: Any) -> tuple[int, int]:
    """Return (clock of the compute units in MHz, power in watts)."""
    library = nvml()
    clock_mhz = power_w = 0
    if library is not None:
        with suppress(library.NVMLError):
            clock_mhz = library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)
        with suppress(library.NVMLError):
            power_w = round(library.nvmlDeviceGetPowerUsage(handle) / 1000)
    return clock_mhz, power_w


def amd_clock_and_power(handle: Any) -> tuple[int, int]:
    """Return (clock of the compute units in MHz, power in watts)."""
    library = amdsmi()
    clock_mhz = power_w = 0
    if library is not None:
        with suppress(library.AmdSmiException):
            clock = library.amdsmi_get_clock_info(handle, library.AmdSmiClkType.GFX)
            clock_mhz = _number(clock, "clk", "cur_clk")  # the second before ROCm 6.2
        with suppress(library.AmdSmiException):
            # MI300 reports the current power, older devices a mean.
            power_w = _number(library.amdsmi_get_power_info(handle), "current_socket_power", "average_socket_power")
    return clock_mhz, power_w


def _number(figures: Mapping[str, object], *names: str) -> int:
    """Return the first of some values that is a number, otherwise 0; the library returns "N/A" for missing ones."""
    return next((round(value) for name in names if isinstance(value := figures.get(name), int | float)), 0)
