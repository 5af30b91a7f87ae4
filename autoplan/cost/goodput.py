"""Goodput: the share of a long run that makes progress, with failures, checkpoints and restarts (`modelling` F)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoplan.base.errors import InputError
from autoplan.base.units import check_positive

# 419 unexpected interruptions of Llama 3 405B in 54 days on 16,384 H100 (arXiv:2407.21783, table 5).
DEVICE_MTBF_S = 54 * 86400 * 16384 / 419
CHECKPOINT_S = 60.0  # judged: a synchronous checkpoint; one that only stalls for a copy takes 1 to 5 s
RESTART_S = 600.0  # judged: detection, rescheduling and loading, 5 to 30 minutes without spare nodes
MAX_EXPONENT = 700.0  # of exp(), within the range of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Reliability of one device with its share of host and network: MTBF, checkpoint and restart times."""

    device_mtbf_s: float = DEVICE_MTBF_S
    checkpoint_s: float = CHECKPOINT_S  # during which training stops
    restart_s: float = RESTART_S  # from a failure to the first new step

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_positive(name, getattr(self, name))

    def mtbf_s(self, num_devices: int) -> float:
        """Mean time between failures of a job, whose devices fail independently."""
        return self.device_mtbf_s / num_devices

    def interval_s(self, num_devices: int) -> float:
        """Optimal time between the end of a checkpoint and the start of the next (Daly)."""
        return daly_interval_s(self.mtbf_s(num_devices), self.checkpoint_s)

    def goodput(self, num_devices: int) -> float:
        """Share of a run's wall time spent in useful steps; InputError if failures leave no progress."""
        mtbf_s, interval_s = self.mtbf_s(num_devices), self.interval_s(num_devices)
        wall_s = expected_wall_s(1.0, interval_s, mtbf_s, self.checkpoint_s, self.restart_s)
        if math.isinf(wall_s):
            raise InputError(
                f"{num_devices:,} devices fail every {mtbf_s:.3g} s, a checkpoint takes {self.checkpoint_s:g} s and a "
                f"restart {self.restart_s:g} s: such a run makes no progress"
            )
        return 1.0 / wall_s


def usable_share(num_devices: int, lost: int, radius: int) -> float:
    """Share of devices that train on after `lost` failures in different groups of `radius` devices, which stop whole.

    Source: arXiv:2504.06095 (non-uniform tensor parallelism).
    """
    return max(0.0, 1.0 - lost * radius / num_devices)


def young_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """First-order optimal interval between checkpoints (Young 1974, doi:10.1145/361147.361115)."""
    return math.sqrt(2.0 * checkpoint_s * mtbf_s)


def daly_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Higher-order optimal interval; the MTBF if a checkpoint takes more than twice that.

    Source: Daly 2006, doi:10.1016/j.future.2004.11.016.
    """
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2.0 * mtbf_s)
    return young_interval_s(mtbf_s, checkpoint_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - checkpoint_s


def expected_wall_s(work_s: float, interval_s: float, mtbf_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Expected wall time of `work_s` of steps with exponential failures, also during restarts (Daly 2006)."""
    exponents = restart_s / mtbf_s, (interval_s + checkpoint_s) / mtbf_s
    if sum(exponents) > MAX_EXPONENT:
        return math.inf
    return mtbf_s * math.exp(exponents[0]) * math.expm1(exponents[1]) * work_s / interval_s
