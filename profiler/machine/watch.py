"""Watch over a training run: what other load its host had, and how the devices' clocks and power were."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from autoplan.profiler.machine.hardware import amd_handles, visible_nvidia_handles
from autoplan.profiler.machine.readings import (
    amd_clock_and_power,
    amd_slowdown,
    foreign_share,
    nvidia_clock_and_power,
    nvidia_slowdown,
)
from autoplan.profiler.protocol import Rules

SAMPLE_S = 1.0  # between two samples
MAX_SLOWED = 0.1  # share of samples at which clocks were down, up to which a run is as it should be


class DeviceSample(NamedTuple):
    """State of a device at a moment."""

    slowdown: str
    clock_mhz: int
    power_w: int
    foreign: float | None  # share of the device that other processes used since the last sample; None: unknown


class Watch:
    """Samples the state of the devices of this host while a block runs, in a thread of its own."""

    def __init__(self) -> None:
        self._nvidia: list[Any] = visible_nvidia_handles()
        self._amd: list[Any] = amd_handles()
        self._samples: list[DeviceSample] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    @property
    def samples(self) -> Sequence[DeviceSample]:
        """Samples of devices that were working: idle ones show nothing of the run."""
        busy = [sample for sample in self._samples if sample.clock_mhz or sample.power_w]
        max_power_w = max((sample.power_w for sample in busy), default=0)
        return [sample for sample in busy if 2 * sample.power_w >= max_power_w]

    def _sample(self) -> None:
        since_us = time.time_ns() // 1000
        while (self._nvidia or self._amd) and not self._end.wait(SAMPLE_S):
            now_us = time.time_ns() // 1000
            for handle in self._amd:  # whose library does not tell how much of a device each process takes
                self._samples.append(DeviceSample(amd_slowdown(handle), *amd_clock_and_power(handle), None))
            for handle in self._nvidia:
                clock_mhz, power_w = nvidia_clock_and_power(handle)
                foreign = foreign_share(handle, since_us)
                self._samples.append(DeviceSample(nvidia_slowdown(handle), clock_mhz, power_w, foreign))
            since_us = now_us


def conditions(samples: Sequence[DeviceSample], load: float | None) -> tuple[dict[str, str], str]:
    """Return what is kept of a watch, and what disturbed the run; `load` is others' use of cores, else by `samples`."""
    values: dict[str, str] = {}
    disturbances: list[str] = []
    if samples and load is None:
        shares = [sample.foreign for sample in samples if sample.foreign is not None]
        load = float(np.mean(shares)) if shares else None
        values |= {
            name: f"{np.median([getattr(sample, name) for sample in samples]):.0f}" for name in ("clock_mhz", "power_w")
        }
        slowed = Counter(sample.slowdown for sample in samples if sample.slowdown)
        if slowed:
            share = slowed.total() / len(samples)
            values["slowdown"] = f"{slowed.most_common(1)[0][0]} at {100 * share:.0f} % of {len(samples)} looks"
            disturbances += [f"devices slowed down: {values['slowdown']}"] if share > MAX_SLOWED else []
    if load is not None:
        values["other_load"] = f"{100 * load:.1f} %"
        if load > Rules().most_foreign:
            disturbances.insert(0, f"other load took {100 * load:.0f} % of the machine")
    return values, "; ".join(disturbances)
