"""Predicted cost of plans: time, memory, and the probability of running out of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from autoplan.base.arrays import Floats, Ints, Rows
from autoplan.base.units import check_not_negative
from autoplan.spec.enums import Precision
from autoplan.spec.plan import PlanBatch
from autoplan.topology.cluster import DeviceSpec

Verdict = Literal["fits", "risky", "oom"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
RISKY_ABOVE, OOM_ABOVE = 0.05, 0.50  # probabilities of running out of memory
# Of all runs, the share whose memory holds something that nobody tells of (gaps of an allocator, a router that favours
# some ranks, an option left out), and how many times as wide theirs is spread.  Of runs of sources that publish
# failures 1.9 % of those below 5 % ran out of memory, of all sources, which mostly leave failures out, .3 %.
SURPRISE_SHARE, SURPRISE_SPREAD = 0.02, 6.0
RISKY_Z, OOM_Z = -1.7156503012238586, 0.0  # the distances at which `oom_probability` is as above


def probability_above(z: float) -> float:
    """Return the probability that a normal variable exceeds a bound that is `z` standard deviations below its mean."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def oom_probability(z: float) -> float:
    """Return the probability of running out of memory, `z` of the calibration's spreads above the capacity."""
    return (1.0 - SURPRISE_SHARE) * probability_above(z) + SURPRISE_SHARE * probability_above(z / SURPRISE_SPREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate(Rows):
    """Predicted cost of every plan of a batch; arrays have one element per plan.

    `terms_s` add up to `step_s` exactly.  `memory_bytes` is what the allocator reserves on the worst pipeline stage,
    context and communication buffers included; `memory_terms_bytes` describe that stage before fragmentation.
    """

    batch: PlanBatch
    step_s: Floats
    low_s: Floats
    high_s: Floats
    terms_s: dict[str, Floats]
    memory_bytes: Floats
    logged_memory_bytes: Floats  # the peak in the framework's own log
    memory_terms_bytes: dict[str, Floats]
    worst_stage: Ints
    capacity_bytes: float
    host_memory_bytes: Floats  # per node
    oom_z: Floats  # distance to the capacity of device or host in standard deviations of log memory

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def verdict(self) -> Ints:
        """Index into VERDICTS: fits below 5 % probability of running out of memory, oom above 50 %."""
        return (self.oom_z > RISKY_Z).astype(np.int64) + (self.oom_z > OOM_Z)

    def oom_probability(self, at: int) -> float:
        """Probability that the plan at an index runs out of memory."""
        return oom_probability(float(self.oom_z[at]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Pipeline rank: its layers, its time per micro-batch and its memory, by term."""

    stage: int
    layers: int
    forward_s: float
    backward_s: float
    terms_s: dict[str, float]
    memory_bytes: float
    memory_terms_bytes: dict[str, float]
    oom_probability: float

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "memory_bytes"):
            check_not_negative(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Location of a pipeline stage, in every replica of its kind."""

    kind: str = ""  # kind of replica: a letter if there are several kinds
    stage: int
    part: str = ""  # name of the part of a mixed cluster
    num_microbatches: int  # micro-batches per step in this stage
    capacity_bytes: float  # usable memory of one of its devices

    @property
    def name(self) -> str:
        """Name of the stage."""
        return f"{self.kind}{self.stage}"

    @property
    def words(self) -> str:
        """Description of the stage and its location."""
        return f"stage {self.name} on {self.part}" if self.part else f"stage {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage with its location."""

    place: StagePlace
    cost: StageCost

    @property
    def fill(self) -> float:
        """Memory over the capacity of its devices."""
        return self.cost.memory_bytes / self.place.capacity_bytes

    @property
    def busy_s(self) -> float:
        """Busy time in a step."""
        return self.place.num_microbatches * sum(self.cost.terms_s.values())


def placed(stages: Iterable[StageCost], num_microbatches: int, capacity_bytes: float) -> tuple[PlacedStage, ...]:
    """Return the stages of a plan on equal devices."""
    return tuple(
        PlacedStage(
            place=StagePlace(stage=stage.stage, num_microbatches=num_microbatches, capacity_bytes=capacity_bytes),
            cost=stage,
        )
        for stage in stages
    )


def datasheet_peak(device: DeviceSpec, precision: Precision) -> tuple[str, float]:
    """(name, operations per second) of the datasheet figure that an MFU in `precision` refers to.

    MXFP8 runs at the rate of fp8; a precision that the device lacks is counted against its 16-bit rate.
    """
    peak = device.peaks
    for name in ("fp8" if precision == "mxfp8" else precision, "bf16"):
        if name in peak:
            return name, peak[name]
    return "fp16", peak["fp16"]
