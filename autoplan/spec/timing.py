"""Measured times of operations, looked up by shape."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows
from autoplan.base.errors import InputError
from autoplan.base.interpolation import Scattered
from autoplan.base.lazily import Lazily
from autoplan.spec.measurement import Match, MeasuredTimes, Measurement, Measurements
from autoplan.spec.operations import (
    ATTENTION_SIZES,
    COPY_SIZES,
    END_SIZES,
    EXCHANGE_SIZES,
    EXPERTS_SIZES,
    GROUP_SIZES,
    LATENT_SIZES,
    LAYER_SIZES,
    MLP_SIZES,
    MOE_LAYER_SIZES,
    OVERLAPPED_SIZES,
    PIPELINE_SIZES,
    PRODUCT_SIZES,
    RING_SIZES,
    ROUTING_SIZES,
    SHAPES,
    SHARED_LAYER_SIZES,
    SHARED_MOE_LAYER_SIZES,
    Operation,
)

# Of a step that rests on times which were measured beside other load, by the share of such times in a table.
DISTURBED_SPREAD = 0.15

# Standard deviation of the logarithm of a time that was not measured itself.  Of 60,448 products hidden from tables
# whose nearest shape is less than 1.5 times as large, 95 % lie within 17 % (benchmarks/results, interpolation); a group
# that is scaled from another one is off by some 15 % (judged).
INTERPOLATED_SPREAD = 0.08
SCALED_SPREAD = 0.15


# Where a time comes from, best first: this very shape, this shape beside other load, between measured shapes, another
# group of devices scaled to this one by the reference, a curve fitted to published measurements, the peak rates of a
# datasheet.
Provenance = Literal["measured", "disturbed", "interpolated", "scaled", "reference", "datasheet"]
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)

# The sizes between which times are interpolated, first the one that grows with the batch; where none are listed, all.
# The other numbers of a shape must match: kernels and algorithms change with them.
_BETWEEN: dict[tuple[str, ...], tuple[str, ...]] = {
    PRODUCT_SIZES: PRODUCT_SIZES,
    ATTENTION_SIZES: ("seq_len", "batch", "num_heads"),
    LATENT_SIZES: ("seq_len", "batch", "num_heads"),
    EXPERTS_SIZES: ("tokens", "hidden_size", "ffn_size"),
    **dict.fromkeys((LAYER_SIZES, SHARED_LAYER_SIZES), ("batch", "seq_len")),
    **dict.fromkeys((MOE_LAYER_SIZES, SHARED_MOE_LAYER_SIZES), ("batch", "seq_len")),
    OVERLAPPED_SIZES: MLP_SIZES,
    RING_SIZES: ("seq_len", "batch", "num_heads"),
    **dict.fromkeys((ROUTING_SIZES, EXCHANGE_SIZES), ("tokens", "hidden_size")),
    END_SIZES: ("tokens", "hidden_size", "vocab_size"),
    PIPELINE_SIZES: ("num_micro_batches",),
    GROUP_SIZES: ("buffer_bytes",),
    ("tokens", "num_heads", "head_dim"): ("tokens", "num_heads"),
}
# Collectives of shorter messages take their start-up times, 10 us to 1 ms, rather than what the links carry (judged).
_RATE_FROM: dict[tuple[str, ...], float] = dict.fromkeys((GROUP_SIZES, COPY_SIZES), 2.0**20)
_SQUARED = ("seq_len",)  # the work of attention grows with its square, but within a window


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFactors:
    """Factors on times by their source: how much a step grows with them tells what rests on that source."""

    measured: float = 1.0
    interpolated: float = 1.0
    scaled: float = 1.0
    disturbed: float = 1.0


AS_MEASURED = SourceFactors()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookup(Rows):
    """Times of some shapes in seconds, NaN where the table refuses, and whether each itself was measured, and how."""

    seconds: Floats
    is_exact: Bools
    is_disturbed: Bools  # measured beside other load or not settled, or between measured shapes of which some were
    source_factors: SourceFactors = AS_MEASURED

    @classmethod
    def refused(cls, size: int | tuple[int, ...]) -> Lookup:
        """Result of a table that holds none of this many shapes."""
        none = np.zeros(size, dtype=np.bool_)
        return cls(seconds=np.full(size, np.nan), is_exact=none, is_disturbed=none.copy())

    def scaled(self, factor: Floats | float) -> Lookup:
        """Times of kin that take `factor` times as long; none of them was measured itself, unless they take as long."""
        return replace(self, seconds=self.seconds * factor, is_exact=self.is_exact & (factor == 1.0))

    def before(self, fallback: Lookup) -> Lookup:
        """Return these times, and those of `fallback` where the table refused these."""
        is_known = ~np.isnan(self.seconds)
        return replace(
            fallback,
            seconds=np.where(is_known, self.seconds, fallback.seconds),
            is_exact=np.where(is_known, self.is_exact, fallback.is_exact),
            is_disturbed=np.where(is_known, self.is_disturbed, fallback.is_disturbed),
        )

    def otherwise(self, seconds: Floats) -> Floats:
        """The times, and `seconds` where the table refused."""
        factors = self.source_factors
        own = self.seconds * np.select(
            [self.is_disturbed, self.is_exact], [factors.disturbed, factors.measured], factors.interpolated
        )
        return np.where(np.isnan(own), seconds, own)


_SHIFT = 1e-3  # of disturbed times, to see what between measured shapes rests on them
_DISTURBED_SHARE = 0.1  # of a time: as much resting on disturbed ones makes it one


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSource:
    """A measured time that serves a shape, itself or as a neighbour, with its share of what is interpolated."""

    shape: tuple[int, ...]
    source: str  # the beginning of its record's key, or where it was published
    share: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Times:
    """Measured times of one operation in one type."""

    exact: Mapping[tuple[int, ...], float]  # seconds of each shape
    sources: Mapping[
        tuple[int, ...], str
    ]  # of each shape: the beginning of its record's key, or where it was published
    disturbed: frozenset[tuple[int, ...]]  # of them, those that stand in for clean ones
    between: Mapping[tuple[int, ...], Scattered]  # by the numbers that must match
    shifted: Mapping[tuple[int, ...], Scattered]  # the same with disturbed times `_SHIFT` longer, where there are some
    # (seconds, whether disturbed) of shapes that were asked for: a search asks for the same ones again and again.
    answered: dict[tuple[float, ...], tuple[float, bool]] = field(default_factory=dict, compare=False)

    def at(self, operation: Operation, shapes: Floats) -> Lookup:
        """The time of each shape."""
        keys = [tuple(shape) for shape in shapes.tolist()]
        if new := [at for at, key in enumerate(keys) if key not in self.answered]:
            seconds, is_disturbed = self._looked_up(operation, shapes[new])
            cells = zip(seconds.tolist(), is_disturbed.tolist(), strict=True)
            self.answered.update(zip([keys[at] for at in new], cells, strict=True))
        return Lookup(
            seconds=np.array([self.answered[key][0] for key in keys], dtype=np.float64),
            is_exact=np.array([key in self.exact for key in keys], dtype=np.bool_),
            is_disturbed=np.array([self.answered[key][1] for key in keys], dtype=np.bool_),
        )

    def looked_up_kinds(self, operation: Operation) -> set[tuple[float, ...]]:
        """Return the numbers that must match of all shapes that were asked for."""
        return {matched_numbers(operation, shape) for shape in self.answered}

    def sources_of(self, operation: Operation, shape: tuple[float, ...]) -> list[TimeSource]:
        """Return the measured times that the time of a shape is made of; none where there is no time of it."""
        own = tuple(map(int, shape))
        if shape in self.exact:
            return [TimeSource(shape=own, source=self.sources[own], share=1.0)]
        kind = tuple(map(int, matched_numbers(operation, shape)))
        if kind not in self.between:
            return []
        # In the order in which they became the points between which is interpolated.
        points = [at for at in self.exact if matched_numbers(operation, at) == kind]
        shares = self.between[kind].shares(np.array(shape)[_columns(operation)[0]])
        parts = [TimeSource(shape=points[at], source=self.sources[points[at]], share=own) for at, own in shares.items()]
        return sorted(parts, key=lambda source: -abs(source.share))

    def _looked_up(self, operation: Operation, shapes: Floats) -> tuple[Floats, Bools]:
        """Return (times, whether they rest on disturbed ones)."""
        seconds = np.array([self.exact.get(tuple(shape), np.nan) for shape in shapes.tolist()])
        is_disturbed = np.array([tuple(shape) in self.disturbed for shape in shapes.tolist()], dtype=np.bool_)
        is_between = np.isnan(seconds)
        between, matched = _columns(operation)
        kinds, kind_of = np.unique(shapes[:, matched], axis=0, return_inverse=True)
        for at, kind in enumerate(kinds.tolist()):
            if tuple(kind) in self.between:
                own = is_between & (kind_of.ravel() == at)
                seconds[own] = self.between[tuple(kind)].at(shapes[own][:, between])
                if tuple(kind) in self.shifted:
                    longer = self.shifted[tuple(kind)].at(shapes[own][:, between])
                    # NaN, where the table refuses, is no more.
                    is_disturbed[own] = np.abs(longer / seconds[own] - 1) > _SHIFT * _DISTURBED_SHARE
        return seconds, is_disturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOrigin:
    """Origin of the times of a table."""

    database: str = ""  # without password
    machine: str = ""  # that they were read for, in words
    digest: str = ""  # of the whole table, where only a part of it is here


NOWHERE = TimingOrigin()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimingTable:
    """Measured times of one device or link, looked up by shape; immutable, and the same answer in any batch.

    A shape that was measured gives its time.  Near measured shapes, and beyond the greatest size that grows with the
    batch (m, batch, seq_len, tokens, buffer_bytes), it is interpolated (`autoplan.base.interpolation`); any other shape
    is refused, and the caller takes its reference.
    """

    times: Lazily[tuple[Operation, str], _Times] = field(default_factory=lambda: Lazily({}))
    measured: Mapping[tuple[Operation, str], MeasuredTimes] = field(default_factory=dict)  # what `times` are made of
    disturbed_share: float = 0.0  # of its times
    source_factors: SourceFactors = AS_MEASURED
    slower: Mapping[Operation, float] = field(default_factory=dict)  # what times of an operation are multiplied by
    contention: Mapping[Operation, float] = field(default_factory=dict)  # share of overlapped time that overlap costs
    match: Match = Match.EXACT  # the farthest among the machines of the measurements
    origin: TimingOrigin = NOWHERE
    is_own: bool = False  # the framework runs these very kernels and layers; else the best that the device has
    lookups: dict[tuple[Operation, str], set[tuple[float, ...]]] | None = (
        None  # of one that only notes what it is asked
    )

    @classmethod
    def noting(cls, *, is_own: bool = False) -> TimingTable:
        """Return a table that holds nothing and notes in `lookups` which shapes a price looks up."""
        return cls(lookups=defaultdict(set), is_own=is_own)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was measured, and nothing is to be noted."""
        return not self.times and self.lookups is None

    @property
    def num_times(self) -> int:
        """Number of shapes that were measured."""
        return sum(len(times.seconds) for times in self.measured.values())

    @property
    def has_kernels(self) -> bool:
        """Return whether anything that a device computes was measured."""
        return any(SHAPES[operation] not in (COPY_SIZES, GROUP_SIZES, PIPELINE_SIZES) for operation, _ in self.times)

    @property
    def has_collectives(self) -> bool:
        """Return whether any collective of several devices was measured."""
        return any(SHAPES[operation] == GROUP_SIZES for operation, _ in self.times)

    @property
    def spread(self) -> float:
        """Share of the standard deviation of a step's logarithm that its measurements add, in quadrature."""
        return math.hypot(self.match.spread, DISTURBED_SPREAD * self.disturbed_share)

    @property
    def digest(self) -> str:
        """SHA-256 of its times in 16 hexadecimal digits, the same in whatever order they came; blank where empty."""
        if not self.measured or self.origin.digest:
            return self.origin.digest
        hashed = hashlib.sha256()
        for (operation, dtype), times in sorted(self.measured.items()):
            hashed.update(f"{operation} {dtype} {len(times.seconds)}\n".encode())
            for column, width in ((times.shapes, "<i8"), (times.seconds, "<f8"), (times.is_disturbed, "?")):
                hashed.update(column.astype(width).tobytes())
        for operation, share in sorted(self.contention.items()):
            hashed.update(f"{operation} beside products {share!r}\n".encode())
        return hashed.hexdigest()[:16]

    def holds(self, operation: Operation, *dtypes: str) -> bool:
        """Return whether the operation was measured in one of these types at all."""
        return self.lookups is not None or any((operation, dtype) in self.times for dtype in dtypes)

    def groups(self, operation: Operation, *dtypes: str) -> list[tuple[int, ...]]:
        """Return (num_devices, devices_per_domain, num_groups) of the groups in which a collective was measured."""
        measured = (self.times[operation, dtype].between for dtype in dtypes if (operation, dtype) in self.times)
        return sorted({kind for kinds in measured for kind in kinds})

    def slowed(self, operations: Iterable[Operation], growth: float) -> TimingTable:
        """The table with times of some operations so many times as long."""
        if self.is_empty:
            return self
        return replace(self, slower={**self.slower, **dict.fromkeys(operations, growth)})

    def sources_of(self, operation: Operation, dtype: str, shape: tuple[float, ...]) -> list[TimeSource]:
        """Return the measured times that the time of a shape is made of, those that count most first."""
        times = self.times.get((operation, dtype))
        return times.sources_of(operation, shape) if times else []

    def with_time(self, operation: Operation, dtype: str, shape: tuple[float, ...], seconds: float) -> TimingTable:
        """Return the table as if one shape took so many seconds, and no other shape longer or shorter for it.

        Its digest stays that of what was measured.
        """
        times = self.times.get((operation, dtype)) or _Times(
            exact={}, sources={}, disturbed=frozenset(), between={}, shifted={}
        )
        measured_s = seconds / self.slower.get(operation, 1.0)
        changed = replace(times, exact={**times.exact, shape: measured_s}, answered={})  # type: ignore[dict-item]
        return replace(self, times=self.times.but((operation, dtype), changed))

    @classmethod
    def of(
        cls,
        measurements: Measurements | Iterable[Measurement],
        *,
        slower: Mapping[Operation | tuple[Operation, str], float] | None = None,
        is_own: bool = False,
        contention: Mapping[Operation, float] | None = None,
        origin: TimingOrigin = NOWHERE,
    ) -> TimingTable:
        """The table of `measurements`, which are of one device; of repeats of a shape the median counts.

        Choose the kernels beforehand: those of one shape are repeats here.  `slower` multiplies the bursts of an
        operation, or of one in a type, so that they reach what training sustains (`burst_factors`).
        """
        measured = measurements if isinstance(measurements, Measurements) else Measurements.of(measurements)
        times = {kind: _middles(_slowed(kind, times, slower or {})) for kind, times in measured.times.items()}
        counts = [(np.count_nonzero(own.is_disturbed), len(own.seconds)) for own in times.values()]
        num_disturbed, num_times = map(sum, zip(*counts, strict=True)) if counts else (0, 1)
        return cls(
            times=Lazily({kind: partial(_times, kind[0], own) for kind, own in times.items()}),
            measured=times,
            disturbed_share=num_disturbed / num_times,
            contention=contention or {},
            match=Match(max((own.matches.max() for own in times.values()), default=Match.EXACT)),
            is_own=is_own,
            origin=origin,
        )

    def lookup(self, operation: Operation, dtype: str, shapes: Floats | Ints) -> Lookup:
        """Times of `shapes`, one row each with the numbers that `SHAPES` names."""
        shapes = np.asarray(shapes, dtype=np.float64)
        if shapes.ndim != 2 or shapes.shape[1] != len(SHAPES[operation]):
            raise InputError(f"{operation} needs rows of {', '.join(SHAPES[operation])}, got shape {shapes.shape}")
        if self.lookups is not None:
            self.lookups[operation, dtype] |= {tuple(shape) for shape in shapes.tolist()}
        times = self.times.get((operation, dtype))
        if times is None:
            return Lookup.refused(len(shapes))
        rows, inverse = np.unique(shapes, axis=0, return_inverse=True)
        lookup = times.at(operation, rows)
        seconds = lookup.seconds * self.slower.get(operation, 1.0)
        return replace(lookup, seconds=seconds, source_factors=self.source_factors).take(inverse.ravel())


NO_TIMINGS = TimingTable()  # one for all, so that problems without measured times are alike


def batch_index(operation: Operation) -> int:
    """Index of the number in an operation's shapes that grows with the batch."""
    return _columns(operation)[0][0]


def matched_numbers(operation: Operation, shape: tuple[float, ...]) -> tuple[float, ...]:
    """Return the numbers of a shape between which nothing is interpolated."""
    return tuple(shape[at] for at in _columns(operation)[1])


def _columns(operation: Operation) -> tuple[list[int], list[int]]:
    """(interpolated, matched) columns of the shapes of an operation."""
    names = SHAPES[operation]
    between = [names.index(name) for name in _BETWEEN.get(names, names)]
    return between, [at for at in range(len(names)) if at not in between]


def _slowed(
    kind: tuple[Operation, str], times: MeasuredTimes, slower: Mapping[Operation | tuple[Operation, str], float]
) -> MeasuredTimes:
    """Return the times with bursts as long as what training sustains."""
    factor = slower.get(kind, slower.get(kind[0], 1.0))
    return replace(times, seconds=np.where(times.is_burst, times.seconds * factor, times.seconds))


def _middles(times: MeasuredTimes) -> MeasuredTimes:
    """Return a time of each shape, by shape: the same table in whatever order its measurements come.

    Of repeats it is the median, with the source of the time next to it, disturbed if any of them is.
    """
    times = times.take(np.lexsort(times.shapes.T[::-1]))
    starts = np.flatnonzero(np.append(True, (times.shapes[1:] != times.shapes[:-1]).any(axis=1)))
    if len(starts) == len(times.seconds):
        return times
    seconds, nearest = [], []
    for start, end in zip(starts, np.append(starts[1:], len(times.seconds)), strict=True):
        middle_s = np.median(times.seconds[start:end])
        seconds.append(middle_s)
        nearest.append(start + np.argmin(np.abs(times.seconds[start:end] - middle_s)))
    is_disturbed = np.logical_or.reduceat(times.is_disturbed, starts)
    return replace(times.take(np.array(nearest)), seconds=np.array(seconds), is_disturbed=is_disturbed)


def _times(operation: Operation, times: MeasuredTimes) -> _Times:
    own = list(map(tuple, times.shapes.tolist()))
    between, matched = _columns(operation)
    shapes, seconds, is_disturbed = times.shapes.astype(np.float64), times.seconds, times.is_disturbed
    kinds, kind_of = np.unique(times.shapes[:, matched], axis=0, return_inverse=True)
    order = np.argsort(kind_of.ravel(), kind="stable")
    ends = np.cumsum(np.bincount(kind_of.ravel(), minlength=len(kinds)))[:-1]
    members = dict(zip(map(tuple, kinds.tolist()), np.split(order, ends), strict=True))
    names = SHAPES[operation]
    windows = [at for at, column in enumerate(matched) if names[column] == "window"]

    def interpolation(times_s: Floats, kind: tuple[int, ...]) -> Scattered:
        is_windowed = any(kind[at] for at in windows)
        powers = [1 + (names[at] in _SQUARED and not is_windowed) for at in between]
        rows = members[kind]
        rate_from = _RATE_FROM.get(names, 0.0)
        return Scattered.of(shapes[rows][:, between], times_s[rows], powers, rate_from=rate_from)

    longer = seconds * np.where(is_disturbed, 1 + _SHIFT, 1.0)
    return _Times(
        exact=dict(zip(own, seconds.tolist(), strict=True)),
        sources=dict(zip(own, times.sources.astype(np.str_).tolist(), strict=True)),
        disturbed=frozenset(own[at] for at in np.flatnonzero(is_disturbed)),
        between=Lazily({kind: partial(interpolation, seconds, kind) for kind in members}),
        shifted=Lazily(
            {kind: partial(interpolation, longer, kind) for kind, rows in members.items() if is_disturbed[rows].any()}
        ),
    )
