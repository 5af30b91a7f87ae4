"""Overview of a team's timing database: of which machine, how old, how spread, by whom, and what a plan lacks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecords:
    """Records of one operation on one machine; days as 2026-11-24, blank where nobody wrote when."""

    operation: str
    shapes: int
    records: int
    settled: int
    failed: int
    approved: int
    hidden: int
    first_day: str
    last_day: str
    spread: float | None  # of a shape over hosts and days, slowest over fastest less 1: the median; None: nothing twice


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecords:
    """Records of one machine."""

    machine: str  # its device, software and power cap, in words
    hosts: tuple[str, ...]
    authors: tuple[str, ...]
    runs: int  # of training
    operations: tuple[OperationRecords, ...]

    @property
    def last_day(self) -> str:
        """Day of the last measurement."""
        return max((operation.last_day for operation in self.operations), default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTimes:
    """Times on one host, or of one day, over the median of those that measured the same shapes in the same way."""

    device: str
    name: str  # of the host, or the day
    shapes: int  # that others measured too
    ratio: float  # median over these
    worst: float
    worst_what: str  # the operation and shape of it


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSlow:
    """Part of a host that `autoplan profile --health` found slow."""

    device: str
    host: str
    index: str  # of the device in its node
    reason: str
    day: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNeeds:
    """Times that the price of a plan looks up, by how this database serves them."""

    path: str
    plan: str
    machine: str  # whose times serve it; blank: none
    served: dict[str, int]  # number of shapes
    missing: dict[str, int]  # number of shapes that were not measured, by operation and type


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamOverview:
    """Contents of a timing database."""

    database: str
    day: str  # of this overview
    compared_share: float  # of all shapes, that `spread`, hosts and days rest on
    machines: tuple[MachineRecords, ...]
    hosts: tuple[ComparedTimes, ...]  # the slowest first
    days: tuple[ComparedTimes, ...]  # the newest first
    slow: tuple[FoundSlow, ...]
    plans: tuple[PlanNeeds, ...] = ()
