"""Measured times that travel with a plan, so that it is priced alike whatever becomes of the database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from autoplan.base.errors import InputError
from autoplan.spec.measurement import Match, Measurement
from autoplan.spec.operations import Operation
from autoplan.spec.timing import TimingOrigin, TimingTable, matched_numbers

# Times that a plan file holds at most, some 70 bytes each.  Of larger tables travel the lines that were looked up.
MAX_PINNED = 20_000


class PinnedTime(NamedTuple):
    """Time of one shape in seconds, as it counts in the price."""

    shape: tuple[int, ...]
    seconds: float
    source: str  # the beginning of its record's key, or where it was published
    is_disturbed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTimings:
    """Measured times that the plans of a file were priced with, and where they were read."""

    digest: str  # of all times that were there (`TimingTable.digest`)
    num_times: int  # that were there
    database: str = ""  # without password
    machine: str = ""  # that they were read for, in words
    match: int = 0  # of that machine and the farthest one that serves it (`Match`)
    is_own: bool = False
    times: dict[str, tuple[PinnedTime, ...]] = field(default_factory=dict)  # by operation and type: "gemm bf16"

    contention: dict[Operation, float] = field(default_factory=dict)  # share of overlapped time that overlap costs

    def __post_init__(self) -> None:
        if self.match not in tuple(Match):
            raise InputError(f"match must be one of {', '.join(map(str, map(int, Match)))}, got {self.match}")

    @classmethod
    def of(cls, table: TimingTable, *, with_times: bool) -> PinnedTimings:
        """Return what travels of a table: all of it, or of a large one what was asked for; without times its digest."""
        return cls(
            digest=table.digest,
            num_times=table.num_times,
            database=table.origin.database,
            machine=table.origin.machine,
            match=int(table.match),
            is_own=table.is_own,
            contention=dict(table.contention),
            times=_pinned(table, looked_up_only=table.num_times > MAX_PINNED) if with_times else {},
        )

    @property
    def num_pinned(self) -> int:
        """Number of times that travel."""
        return sum(map(len, self.times.values()))

    def table(self, device: str) -> TimingTable:
        """Return the table that the plans were priced with."""
        origin = TimingOrigin(database=self.database, machine=self.machine, digest=self.digest)
        return TimingTable.of(self._measurements(device), is_own=self.is_own, contention=self.contention, origin=origin)

    def _measurements(self, device: str) -> Iterator[Measurement]:
        for name, times in self.times.items():
            operation, _, dtype = name.partition(" ")
            for time in times:
                yield Measurement(
                    operation=cast(Operation, operation),
                    shape=time.shape,
                    dtype=dtype,
                    device=device,
                    seconds=time.seconds,
                    source=time.source,
                    match=Match(self.match),
                    is_disturbed=time.is_disturbed,
                )


def _pinned(table: TimingTable, *, looked_up_only: bool) -> dict[str, tuple[PinnedTime, ...]]:
    pinned = {}
    for (operation, dtype), times in sorted((table.times.made if looked_up_only else table.times).items()):
        kinds = times.looked_up_kinds(operation) if looked_up_only else set()
        pinned_times = tuple(
            PinnedTime(shape, seconds, times.sources[shape], shape in times.disturbed)
            for shape, seconds in times.exact.items()
            if not looked_up_only or matched_numbers(operation, shape) in kinds
        )
        if pinned_times:
            pinned[f"{operation} {dtype}"] = pinned_times
    return pinned
