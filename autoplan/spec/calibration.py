"""Calibrations: factors on component times, fitted to whole runs, and the remaining spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.base.errors import InputError
from autoplan.base.units import check_count, check_positive
from autoplan.spec.operations import ATTENTIONS, COLLECTIVES, EXPERTS, NARROW_PRODUCTS, PRODUCTS, Operation
from autoplan.topology.cluster import DeviceSpec

# Factors that a calibration may change, in the order of the fit: first those that most runs determine.
FACTORS = ("overall", "memory_bound", "host", "scale_out", "scale_up", "attention", "gemm")

# Spreads of step times by kind of plan: a kind without its own spread uses the first one.
TIME_SPREADS = (
    "time_spread",
    "tensor_time_spread",
    "pipeline_time_spread",
    "spine_time_spread",
    "experts_time_spread",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConditions:
    """Conditions under which the runs of a calibration were priced; its factors are valid only under the same ones."""

    device: str
    autoplan: str  # version of autoplan, and thus of the cost model
    timings: str = ""  # digest of the measured times (`TimingTable.digest`); blank: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Multiplicative factors on the time of each component, and the residual spread that remains.

    A factor of 1 is the reference model.  Spreads are standard deviations of log(measured / predicted).  Plans that
    resemble the runs of the calibration get the spread of those runs, by kind of plan; all others get the general
    spreads of `cost.spreads`.  The 90 % interval of a step time is exp(+-1.645 spread) around the prediction, and the
    probability of running out of memory follows from `memory_spread` (`oom_probability`).
    """

    name: str = "reference"
    overall: float = 1.0  # applies to the whole step
    gemm: float = 1.0
    attention: float = 1.0
    memory_bound: float = 1.0
    host: float = 1.0
    scale_up: float = 1.0  # collectives inside the scale-up domain
    scale_out: float = 1.0  # collectives over the network
    time_spread: float | None = None  # None: no runs of its own, so the general spreads apply
    tensor_time_spread: float | None = None  # for plans whose tensor or context parallelism leaves the scale-up domain
    pipeline_time_spread: float | None = None  # for plans with several stages
    spine_time_spread: float | None = None  # for all plans on more nodes than one leaf switch connects
    experts_time_spread: float | None = None  # for all mixtures of experts
    # Properties of the runs; empty: nothing counts as new.
    blocks: tuple[str, ...] = ()  # what they have beside dense layers that are trained as a whole, and "dense"
    precisions: tuple[str, ...] = ()
    most_devices: int = 0  # 0: any number
    # Share of a step outside of kernels, without bubbles, up to which plans resemble the runs: their 95 % quantile.
    exposed_share: float = 1.0
    memory_spread: float = 0.08
    sources: tuple[str, ...] = ()
    fitted_with: FitConditions | None = None  # None: shipped, written by hand, or fitted before this was kept

    def __post_init__(self) -> None:
        for name in FACTORS:
            check_positive(name, getattr(self, name), at_most=100.0)
        if not 0 <= self.exposed_share <= 1:
            raise InputError(f"exposed_share must be in [0, 1], got {self.exposed_share:g}")
        check_count("most_devices", self.most_devices, at_least=0)
        for name in (*TIME_SPREADS, "memory_spread"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), at_most=5.0)

    def check_goes_with(self, timings: str, autoplan: str, device: str | None = None) -> None:
        """Reject timings other than those that the factors were fitted with, by digest: errors would count twice."""
        fitted = self.fitted_with
        if fitted is None:
            # Before conditions were kept all fits were without measured times; what was not fitted says what is wanted.
            if timings and self.sources and any(getattr(self, name) != 1.0 for name in FACTORS):
                raise InputError(
                    f"calibration {self.name!r} was fitted without measured times, beside them its factors would count "
                    "an error twice: use --calibration db, fit it again, or leave --timings out"
                )
            return
        if device is not None and fitted.device != device:
            raise InputError(
                f"calibration {self.name!r} was fitted on {fitted.device}, the cluster has {device}: "
                "use one for this device, or leave --calibration out"
            )
        if fitted.autoplan != autoplan:
            raise InputError(
                f"calibration {self.name!r} was fitted with autoplan {fitted.autoplan}, this is {autoplan}: "
                "fit it again, or use --calibration db"
            )
        if fitted.timings != timings:
            basis = f"with the measured times {fitted.timings}" if fitted.timings else "without measured times"
            measured = f"those here are {timings}" if timings else "there are none here"
            raise InputError(
                f"calibration {self.name!r} was fitted {basis}, {measured}: use --calibration db, which is fitted to "
                "the given timings, fit it again, or give the same --timings"
            )

    @property
    def time_spreads(self) -> Floats:
        """Spread of every kind in `TIME_SPREADS`; NaN if no run determines it."""
        spreads = (getattr(self, name) or self.time_spread for name in TIME_SPREADS)
        return np.array([math.nan if spread is None else spread for spread in spreads])


def burst_factors(
    device: DeviceSpec, calibration: Calibration | None = None
) -> dict[Operation | tuple[Operation, str], float]:
    """Return the time of operations in training over that in short benchmarks at burst clocks (`modelling` C2, C9).

    Bursts tell the shape, not the level: that stays the one of the reference, whose `calibration` thus holds for them.
    Products in 8 or 4 bits stand apart where the device sustains those at a rate of its own.
    """
    calibration = calibration or Calibration()
    gemm = device.gemm.burst_efficiency / device.gemm_efficiency * calibration.gemm
    attention = device.attention.burst_efficiency / device.attention.efficiency * calibration.attention
    factors: dict[Operation | tuple[Operation, str], float] = {
        **dict.fromkeys((*PRODUCTS, *EXPERTS), gemm),
        **dict.fromkeys(ATTENTIONS, attention),
        **dict.fromkeys(COLLECTIVES[:4], calibration.scale_up),
    }
    if device.narrow_gemm_efficiency is not None:
        narrow = device.gemm.burst_efficiency / device.narrow_gemm_efficiency * calibration.gemm
        factors |= {(product, dtype): narrow for product in (*PRODUCTS, *EXPERTS) for dtype in NARROW_PRODUCTS}
    return factors
