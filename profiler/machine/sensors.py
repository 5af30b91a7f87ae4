"""Sensors for the conditions of a measurement: other load on the machine, clocks, power, slowdowns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from autoplan.profiler.machine.environment import amd_handle, nvml_handle
from autoplan.profiler.machine.readings import amd_slowdown, foreign_share, nvidia_slowdown

# A check: products of about half a millisecond, of which five scatter by 20 %, and operations that are nothing but
# what the host does for one, in which slow phases of small steps show best.
CHECK_SIZE, CHECK_PRODUCTS, CHECK_CALLS = 256, 20, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Readings of one rank on its host and device during one round of samples."""

    host: str
    wall_s: float
    busy_core_s: float = 0.0  # total of all cores of the host and all processes
    own_core_s: float = 0.0  # of this process
    num_cores: int = 1
    foreign_device: float = 0.0  # share of the device used by other processes
    slowdown: str = ""
    pace: float = 1.0  # result of `pace`
    clock_mhz: int = 0
    power_w: int = 0


def foreign_load(windows: Sequence[Window], *, on_cpu: bool) -> float:
    """Return the share of devices used by other processes on the worst host, from the windows of all ranks.

    If the cores are the devices, it is (busy - used by the host's ranks) / (wall x cores), `closed-loop` 2.2.
    """
    if not on_cpu:
        return max(window.foreign_device for window in windows)
    hosts: dict[str, list[Window]] = defaultdict(list)
    for window in windows:
        hosts[window.host].append(window)
    shares = []
    for on_host in hosts.values():
        busy = max(window.busy_core_s for window in on_host)
        longest = max(window.wall_s for window in on_host)
        ranks_core_s = sum(window.own_core_s for window in on_host)
        shares.append((busy - ranks_core_s) / (longest * on_host[0].num_cores))
    return max(0.0, *shares)


def pace(checks_s: Sequence[float]) -> float:
    """Return the time of a process's last check over the lower quartile of all its checks."""
    return checks_s[-1] / float(np.quantile(checks_s, 0.25))


class Sensors:
    """Reads the host and one device without changing settings."""

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._num_cores = psutil.cpu_count() or 1
        self._handle, self._amd_handle = nvml_handle(device), amd_handle(device)
        self._factor, self._number = torch.ones(CHECK_SIZE, CHECK_SIZE), torch.ones(())
        self._checks_s: list[float] = []
        self.start()

    def start(self) -> None:
        """Begin a window."""
        self._state = ("", 0, 0)
        self._check_s = self._checked_s()
        self._began_us = time.time_ns() // 1000
        self._began = (time.perf_counter(), _busy_core_s(), time.process_time())

    def sample(self) -> None:
        """Record clocks and power; to be called while the device works."""
        if self._device.type == "cpu":
            return
        self._state = (self._slowdown(), self._reading(torch.cuda.clock_rate), self._power_w())

    def _reading(self, ask: Callable[[torch.device], int]) -> int:
        """Return a sensor's value; 0 if the library, the permission or the sensor is missing."""
        with suppress(Exception):  # each library has its own errors
            return ask(self._device)
        return 0

    def _power_w(self) -> int:
        power = self._reading(torch.cuda.power_draw)  # milliwatts from NVML, watts from amdsmi
        return power if torch.version.hip else round(power / 1000)

    def stop(self) -> Window:
        """Return the window since `start`."""
        start_s, busy_s, process_s = self._began
        slowdown, clock_mhz, power_w = self._state
        end = (time.perf_counter(), _busy_core_s(), time.process_time())
        self._checks_s.append((self._check_s + self._checked_s()) / 2)
        return Window(
            host=self._host,
            wall_s=end[0] - start_s,
            busy_core_s=end[1] - busy_s,
            own_core_s=end[2] - process_s,
            num_cores=self._num_cores,
            foreign_device=foreign_share(self._handle, self._began_us) if self._handle is not None else 0.0,
            slowdown=slowdown,
            pace=pace(self._checks_s),
            clock_mhz=clock_mhz,
            power_w=power_w,
        )

    def _checked_s(self) -> float:
        """CPU time of products and calls: cores, different devices, say in no other way that their host slows them."""
        if self._device.type != "cpu":
            return 1.0
        began = time.process_time()
        for _ in range(CHECK_PRODUCTS):
            torch.mm(self._factor, self._factor)
        for _ in range(CHECK_CALLS):
            self._number.add(1)
        return time.process_time() - began

    def _slowdown(self) -> str:
        if self._amd_handle is not None:
            return amd_slowdown(self._amd_handle)
        return nvidia_slowdown(self._handle) if self._handle is not None else ""


def _busy_core_s() -> float:
    """Seconds that all cores of the host have been busy since it started; stolen ones count, waiting ones do not."""
    times = psutil.cpu_times()
    # Linux counts guests as users already.
    idle = times.idle + getattr(times, "iowait", 0.0)
    return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
