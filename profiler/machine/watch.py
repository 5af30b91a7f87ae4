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

LOOK_S = 1.0  # between two looks
MAX_SLOWED = 0.1  # share of looks at which clocks were down, up to which a run is as it should be


class Look(NamedTuple):
    """State of a device at a moment."""

    slowdown: str
    clock_mhz: int
    power_w: int
    foreign: float | None  # share of the device that other processes used since the last look; None: not told


class Watch:
    """Looks at the devices of this host while a block runs, in a thread of its own."""

    def __init__(self) -> None:
        self._nvidia: list[Any] = visible_nvidia_handles()
        self._amd: list[Any] = amd_handles()
        self._looks: list[Look] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    @property
    def looks(self) -> Sequence[Look]:
        """Looks at devices that were working: idle ones show nothing of the run."""
        busy = [look for look in self._looks if look.clock_mhz or look.power_w]
        max_power_w = max((look.power_w for look in busy), default=0)
        return [look for look in busy if 2 * look.power_w >= max_power_w]

    def _look(self) -> None:
        since_us = time.time_ns() // 1000
        while (self._nvidia or self._amd) and not self._end.wait(LOOK_S):
            now_us = time.time_ns() // 1000
            for handle in self._amd:  # whose library does not tell how much of a device each process takes
                self._looks.append(Look(amd_slowdown(handle), *amd_clock_and_power(handle), None))
            for handle in self._nvidia:
                clock_mhz, power_w = nvidia_clock_and_power(handle)
                foreign = foreign_share(handle, since_us)
                self._looks.append(Look(nvidia_slowdown(handle), clock_mhz, power_w, foreign))
            since_us = now_us


def conditions(looks: Sequence[Look], load: float | None) -> tuple[dict[str, str], str]:
    """Return what is kept of a watch, and what disturbed the run; `load` is others' use of cores, else by `looks`."""
    values: dict[str, str] = {}
    disturbances: list[str] = []
    if looks and load is None:
        shares = [look.foreign for look in looks if look.foreign is not None]
        load = float(np.mean(shares)) if shares else None
        values |= {
            name: f"{np.median([getattr(look, name) for look in looks]):.0f}" for name in ("clock_mhz", "power_w")
        }
        slowed = Counter(look.slowdown for look in looks if look.slowdown)
        if slowed:
            share = slowed.total() / len(looks)
            values["slowdown"] = f"{slowed.most_common(1)[0][0]} at {100 * share:.0f} % of {len(looks)} looks"
            disturbances += [f"devices slowed down: {values['slowdown']}"] if share > MAX_SLOWED else []
    if load is not None:
        values["other_load"] = f"{100 * load:.1f} %"
        if load > Rules().most_foreign:
            disturbances.insert(0, f"other load took {100 * load:.0f} % of the machine")
    return values, "; ".join(disturbances)
