"""Measured times of operations: one by one, or hundreds of thousands as columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.base.arrays import Bools, Floats, Ints, Rows
from autoplan.base.errors import InputError
from autoplan.base.units import check_positive
from autoplan.spec.operations import Operation, check_shape


class Match(IntEnum):
    """Similarity between the machine of a measurement and the planned one, most similar first."""

    EXACT = 0  # device, torch, library of collectives and links
    RUNTIME = 1  # device and major version of CUDA or ROCm
    DEVICE = 2
    POWER = 3  # device under another power cap or with other clocks

    @property
    def spread(self) -> float:
        """Share of the standard deviation of a step's logarithm that it adds, in quadrature."""
        return _MATCH_SPREADS[self]


# The same configuration published again with another release differs by 2 % (dgxc) to 6 % (nvbridge).  Power grows with
# about the cube of the clock, as the voltage rises with it: half of the power costs a fifth of the clock.
_MATCH_SPREADS = (0.0, 0.02, 0.06, 0.20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Time of one operation of one shape on one device: the numbers of `shape` are those that `SHAPES` names."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    device: str
    seconds: float
    kernel: str = ""
    source: str = ""
    match: Match = Match.EXACT  # of its machine; the interval is wider where it is not exact
    is_burst: bool = False  # measured too shortly to reach the clocks of training
    is_disturbed: bool = False  # measured beside other load, or not settled: it stands in for a clean one

    def __post_init__(self) -> None:
        check_shape(self.operation, self.shape)
        check_positive("seconds", self.seconds, at_most=1e6)


# (operation, dtype, shape, seconds, source, match, is_burst, is_disturbed) of a measurement
TimeRow = tuple[Operation, str, tuple[int, ...], float, str, Match, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredTimes(Rows):
    """Times of one operation in one type, an element each."""

    shapes: Ints  # (times, sizes)
    seconds: Floats
    sources: NDArray[np.str_] | NDArray[np.bytes_]  # keys of records are ASCII, which takes a quarter of the memory
    matches: Ints
    is_burst: Bools
    is_disturbed: Bools

    def with_more(self, *others: MeasuredTimes) -> MeasuredTimes:
        """Return these times and others of the same operation and type."""
        if not others:
            return self
        parts, names = (self, *others), [column.name for column in fields(self)]
        return MeasuredTimes(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measurements:
    """Measured times of one device by operation and type; a loop over them has them one by one, without kernels."""

    device: str
    times: Mapping[tuple[Operation, str], MeasuredTimes]

    @classmethod
    def of(cls, measurements: Iterable[Measurement]) -> Measurements:
        """Return the measurements, which are of one device, as columns; none of them: of no device."""
        measurements = list(measurements)
        devices = {measured.device for measured in measurements}
        if len(devices) > 1:
            raise InputError(f"a table holds the times of one device, got {', '.join(sorted(devices))}: build one each")
        names = ("operation", "dtype", "shape", "seconds", "source", "match", "is_burst", "is_disturbed")
        return cls.of_rows("".join(devices), map(attrgetter(*names), measurements))

    @classmethod
    def of_rows(cls, device: str, rows: Iterable[TimeRow]) -> Measurements:
        """Return rows that were checked as columns."""
        columns: dict[tuple[Operation, str], list[tuple[Any, ...]]] = defaultdict(list)
        for operation, dtype, *row in rows:
            columns[operation, dtype].append(tuple(row))
        return cls(device=device, times={kind: _times(rows) for kind, rows in columns.items()})

    def of_operations(self, operations: Collection[Operation]) -> Measurements:
        """Return the times of some operations."""
        chosen = {kind: times for kind, times in self.times.items() if kind[0] in operations}
        return Measurements(device=self.device, times=chosen)

    def __len__(self) -> int:
        return sum(len(times.seconds) for times in self.times.values())

    def __iter__(self) -> Iterator[Measurement]:
        for (operation, dtype), times in self.times.items():
            flags = times.is_burst.tolist(), times.is_disturbed.tolist()
            sources = times.sources.astype(np.str_).tolist()
            columns = times.shapes.tolist(), times.seconds.tolist(), sources, times.matches.tolist()
            for shape, seconds, source, match, is_burst, is_disturbed in zip(*columns, *flags, strict=True):
                yield Measurement(
                    operation=operation,
                    shape=tuple(shape),
                    dtype=dtype,
                    device=self.device,
                    seconds=seconds,
                    source=source,
                    match=Match(match),
                    is_burst=is_burst,
                    is_disturbed=is_disturbed,
                )


def _times(rows: Iterable[tuple[Any, ...]]) -> MeasuredTimes:
    shapes, seconds, sources, matches, is_burst, is_disturbed = zip(*rows, strict=True)
    return MeasuredTimes(
        shapes=np.array(shapes, dtype=np.int64),
        seconds=np.array(seconds, dtype=np.float64),
        sources=np.array(sources, dtype=np.str_),
        matches=np.array(matches, dtype=np.int64),
        is_burst=np.array(is_burst, dtype=np.bool_),
        is_disturbed=np.array(is_disturbed, dtype=np.bool_),
    )
