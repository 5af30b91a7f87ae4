"""Content of `plan.json`, for equal nodes and for mixed clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.base.errors import InputError
from autoplan.spec.axes import AXIS, shown
from autoplan.spec.calibration import Calibration
from autoplan.spec.estimate import StageCost
from autoplan.spec.explanation import CurrentPlan
from autoplan.spec.framework import Framework
from autoplan.spec.mixed_problem import MixedPlan
from autoplan.spec.mixed_result import MixedCertificate, MixedCost, MixedRun, MixedToday
from autoplan.spec.model import ModelSpec
from autoplan.spec.pinned_timings import PinnedTimings
from autoplan.spec.ranks import HostRanks
from autoplan.spec.run_report import RunReport
from autoplan.spec.search_result import Allowance, Certificate, Confidence, MemoryKnob, RankedPlan, Sensitivity
from autoplan.spec.timing import Provenance
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFlags:
    """Flags of the search space, as typed; together with the problem they recreate the space."""

    global_batch: str
    fix: tuple[str, ...] = ()
    at_most: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()  # options that change the numerics of training
    to: str = ""  # target of export that has to be able to express the plans

    @property
    def barred(self) -> tuple[str, ...]:
        """Axes fixed or bounded, and values that are forbidden, such as "schedule=gpipe", as plans spell them."""
        axes = (text.partition("=")[0].strip().lower().replace("-", "_") for text in (*self.fix, *self.at_most))
        return (*axes, *map(_spelled, self.forbid))

    @property
    def narrows(self) -> bool:
        """Return whether plans were left out that are usually looked at."""
        return bool(self.fix or self.at_most or self.forbid or self.to)


def _spelled(text: str) -> str:
    """Return what --forbid was given as plans spell it: an axis, or AXIS=VALUE."""
    name, sign, value = text.strip().lower().partition("=")
    name = name.replace("-", "_")
    return f"{name}={shown(AXIS[name].parse(value, '--forbid'))}" if sign and name in AXIS else f"{name}{sign}{value}"


PLAN_FILE_VERSION = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """Content of `plan.json`: the problem, the plan, its costs and their reasons, and alternatives."""

    schema_version: int
    versions: dict[str, str]  # autoplan and the libraries that the numbers rest on
    command: str
    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    framework: Framework
    calibration: Calibration
    reserve_bytes: float
    best: RankedPlan
    stages: tuple[StageCost, ...]
    alternatives: tuple[RankedPlan, ...]  # of other degrees, best first
    certificate: Certificate | None  # None where one plan was priced, not searched
    allowances: tuple[Allowance, ...] = ()  # what options would bring that the search left out
    memory_knobs: tuple[MemoryKnob, ...] = ()  # most freed first, where they were asked for
    timings: str = ""  # whose measured times were taken before the reference curves
    pinned: PinnedTimings | None = (
        None  # these times, where there are some and the file is not of before they travelled
    )
    rests_on: dict[Provenance, float] = field(default_factory=dict)  # share of the best plan's step
    hosts: tuple[HostRanks, ...] = ()  # of the best plan, in the order of its ranks, where the cluster lists its nodes
    listed_step_s: float | None = None  # of the best plan on the nodes as listed, where it has a placement
    choice: Confidence | None = None  # where plans were searched
    run: RunReport | None = None  # where objectives, numbers of nodes or a run were given
    today: CurrentPlan | None = None  # where the search began with a launch file
    space: SpaceFlags | None = None  # where plans were searched

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device that a plan may use."""
        return self.cluster.device.visible_memory_bytes - self.reserve_bytes

    @property
    def num_devices(self) -> int:
        """Devices in use, with those of an encoder on ranks of its own."""
        apart = self.model.encoder_apart
        return self.best.plan.num_devices + (apart.num_devices if apart else 0)

    @staticmethod
    def check_table(table: Mapping[str, Any]) -> None:
        """Refuse the table of a file of another version."""
        _check_version(table, "schema_version", PLAN_FILE_VERSION)

    def __post_init__(self) -> None:
        for name, checked in (
            ("best", self.best),
            *((f"alternatives[{at}]", ranked) for at, ranked in enumerate(self.alternatives)),
        ):
            if checked.plan.precision != self.training.precision:
                raise InputError(
                    f"{name}.plan.precision is {checked.plan.precision}, training.precision {self.training.precision}: "
                    "make them the same"
                )


def _check_version(table: Mapping[str, Any], key: str, version: int) -> None:
    """Refuse a file of another version before its keys, which may be unlike those of today, are looked at."""
    if table.get(key, version) != version:
        command = f": make the file again with {table['command']}" if table.get("command") else ""
        raise InputError(f"{key} is {table[key]}, this autoplan reads {version}{command}")


MIXED_FILE_VERSION = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlanFile:
    """The content of the plan file of a mixed cluster."""

    mixed_schema_version: int
    versions: dict[str, str]
    command: str
    model: ModelSpec
    training: TrainingSpec
    cluster: MixedCluster
    framework: Framework
    calibrations: tuple[Calibration, ...]
    reserve_bytes: float
    best: MixedCost
    alternatives: tuple[MixedCost, ...]
    certificate: MixedCertificate | None
    space: SpaceFlags | None = None  # of the search; None: the plan was priced alone
    sensitivity: Sensitivity[MixedPlan] | None = None  # where it was asked for
    run: MixedRun | None = None  # where objectives or a run were given
    today: MixedToday | None = None  # of the launch file from which the search started
    timings: str = ""  # source of the measured times of all parts
    pinned: tuple[PinnedTimings, ...] = ()  # times of the parts

    @staticmethod
    def check_table(table: Mapping[str, Any]) -> None:
        """Refuse the table of a file of another version."""
        _check_version(table, "mixed_schema_version", MIXED_FILE_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlanFile(PlanFile):
    """Plan of `mixed_file` as if all nodes of its cluster were those of one part, as frameworks start it."""

    mixed_file: MixedPlanFile

    @property
    def num_devices(self) -> int:
        """Devices of all parts in use."""
        return self.mixed_file.best.plan.num_devices
