"""What was measured: how long operations take by shape, and how far the model's rates are from whole runs?"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import DeviceSpec
from autoplan.errors import InputError
from autoplan.units import check_positive

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Operation = Literal[
    "gemm",
    "dgrad",
    "wgrad",
    "attention",
    "attention_backward",
    "experts",
    "experts_backward",
    "norm",
    "norm_backward",
    "rope",
    "swiglu",
    "swiglu_backward",
    "cross_entropy",
    "optimizer",
    "layer",
    "layer_backward",
    "sharded_layer",
    "head",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
]

_PRODUCT = ("m", "n", "k")
_ATTENTION = ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window")
_EXPERTS = ("tokens", "hidden_size", "ffn_size", "experts_per_token", "num_experts", "etp", "ep")
_LAYER = ("batch", "seq_len", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "tp")
_SHARDED_LAYER = (*_LAYER[:-1], "num_devices", "devices_per_domain")
_GROUP = ("num_devices", "devices_per_domain", "num_groups", "buffer_bytes")

# What the numbers of a shape are, by operation.  A matrix of k inputs and n outputs meets m tokens: `gemm` forward,
# `dgrad` and `wgrad` backward, the latter added to an fp32 buffer.  `attention` is causal, over `batch` sequences,
# with a window of 0 for none.  `experts` are all routed experts of one rank with their activation, where `tokens` are
# those of the whole expert-parallel group.  `rope`, `cross_entropy` and `head` (logits and loss) are both ways
# together, `optimizer` is one Adam step, `layer` is what one rank of `tp` computes for a whole gated transformer layer,
# without collectives, and `sharded_layer` the same both ways at tp 1 with all that sharding its weights over a group
# brings: gathers, the reduce-scatter, hooks and copies.  A group of a collective has `devices_per_domain` members in
# each scale-up domain that it touches, and `num_groups` such groups work at once; its buffer is the whole one: what an
# all-gather ends with, a reduce-scatter begins with.
SHAPES: dict[Operation, tuple[str, ...]] = {
    "gemm": _PRODUCT,
    "dgrad": _PRODUCT,
    "wgrad": _PRODUCT,
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    "experts": _EXPERTS,
    "experts_backward": _EXPERTS,
    "norm": ("tokens", "hidden_size"),
    "norm_backward": ("tokens", "hidden_size"),
    "rope": ("tokens", "num_heads", "head_dim"),
    "swiglu": ("tokens", "ffn_size"),
    "swiglu_backward": ("tokens", "ffn_size"),
    "cross_entropy": ("tokens", "vocab_size"),
    "optimizer": ("num_parameters",),
    "layer": _LAYER,
    "layer_backward": _LAYER,
    "sharded_layer": _SHARDED_LAYER,
    "head": ("tokens", "hidden_size", "vocab_size"),
    "all_reduce": _GROUP,
    "all_gather": _GROUP,
    "reduce_scatter": _GROUP,
    "all_to_all": _GROUP,
    "broadcast": _GROUP,
    "send_recv": _GROUP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How long one operation of one shape took on one device: the numbers of `shape` are those that `SHAPES` names."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    device: str
    seconds: float
    kernel: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        names = SHAPES[self.operation]
        if len(self.shape) != len(names) or any(size < 0 for size in self.shape):
            raise InputError(f"{self.operation} needs {', '.join(names)}, none negative, got {self.shape}")
        check_positive("seconds", self.seconds, most=1e6)


# Where a time comes from, best first: this very shape, between measured shapes, a curve fitted to published
# measurements, the peak rates of a datasheet.
Provenance = Literal["measured", "interpolated", "reference", "datasheet"]
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)

# Along which of its numbers an operation is interpolated.  Its line, the first of `_LINES` that it has, is the size
# that grows with the batch: it may be measured at other points for every combination of the rest, and beyond its
# largest point the rate stays what it was there (`modelling` C8).  The sizes in `_GRIDS` are interpolated where all
# neighbours were measured.  The rest must match: kernels and algorithms change with them.
_LINES = ("m", "tokens", "seq_len", "num_parameters", "buffer_bytes")
_GRIDS = {
    _PRODUCT: ("n", "k"),
    _ATTENTION: ("batch", "num_heads"),
    _EXPERTS: ("hidden_size", "ffn_size"),
    _LAYER: ("batch",),
    _SHARDED_LAYER: ("batch",),
    ("tokens", "hidden_size"): ("hidden_size",),
    ("tokens", "ffn_size"): ("ffn_size",),
    ("tokens", "vocab_size"): ("vocab_size",),
}
# Power with which the work of an operation grows along its line: attention computes seq_len squared.
_WORK_POWER: dict[Operation, float] = {"attention": 2.0, "attention_backward": 2.0}

_SPAN = 64.0  # between the keys of two lines: above the logarithm of any size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookup:
    """Times of some shapes in seconds, NaN where the table refuses, and whether each shape itself was measured."""

    seconds: Floats
    is_exact: NDArray[np.bool_]

    def otherwise(self, seconds: Floats, provenance: Provenance) -> tuple[Floats, Ints]:
        """(times, indices into `PROVENANCES`) with `seconds`, which come from `provenance`, where the table refused."""
        known = ~np.isnan(self.seconds)
        own = np.where(self.is_exact, PROVENANCES.index("measured"), PROVENANCES.index("interpolated"))
        return np.where(known, self.seconds, seconds), np.where(known, own, PROVENANCES.index(provenance))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lines:
    """The measured shapes of one operation and type: points along lines, one line for each cell of a grid."""

    operation: Operation
    matched: dict[tuple[float, ...], int]  # numbers that must match: index of their grid
    axes: tuple[Floats, ...]  # measured sizes along each side of the grid
    line_of: Ints  # (matched, *axes): which line, -1 where nothing was measured
    keys: Floats  # of every point: line x _SPAN + log size, ascending
    sizes: Floats
    log_seconds: Floats
    ends: Ints  # of every line: the index after its last point


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimingTable:
    """Measured times of one device or link, looked up by shape; immutable, and the same answer in any batch.

    A shape that was measured gives its time.  Between measured shapes the logarithm of the time (equally: of the time
    per operation or byte) is interpolated in the logarithms of the sizes; beyond the largest size along the line of an
    operation (m, seq_len, tokens, buffer_bytes) the rate of the last point is kept; any other shape is refused, and
    the caller takes its reference.
    """

    lines: Mapping[tuple[Operation, str], _Lines] = field(default_factory=dict)

    @classmethod
    def of(cls, measurements: Iterable[Measurement], *, slower: Mapping[Operation, float] | None = None) -> TimingTable:
        """The table of `measurements`, which are of one device; of repeats of a shape the median counts.

        Choose the kernels beforehand: those of one shape are repeats here.  `slower` multiplies the times of an
        operation, as `burst_factors` does for benchmarks too short to reach the clocks of training.
        """
        samples: dict[tuple[Operation, str], dict[tuple[int, ...], list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        devices = set()
        for one in measurements:
            devices.add(one.device)
            factor = (slower or {}).get(one.operation, 1.0)
            samples[one.operation, one.dtype][one.shape].append(one.seconds * factor)
        if len(devices) > 1:
            raise InputError(f"a table holds the times of one device, got {', '.join(sorted(devices))}: build one each")
        return cls(lines={kind: _lines(kind[0], points) for kind, points in samples.items()})

    def lookup(self, operation: Operation, dtype: str, shapes: Floats | Ints) -> Lookup:
        """Times of `shapes`, one row each with the numbers that `SHAPES` names."""
        shapes = np.asarray(shapes, dtype=np.float64)
        if shapes.ndim != 2 or shapes.shape[1] != len(SHAPES[operation]):
            raise InputError(f"{operation} needs rows of {', '.join(SHAPES[operation])}, got shape {shapes.shape}")
        lines = self.lines.get((operation, dtype))
        if lines is None:
            return Lookup(seconds=np.full(len(shapes), np.nan), is_exact=np.zeros(len(shapes), dtype=bool))
        return _look_up(lines, shapes)


def burst_factors(device: DeviceSpec) -> dict[Operation, float]:
    """How much longer operations take in training than in short benchmarks at burst clocks (`modelling` C2, C9)."""
    gemm = device.gemm.burst_efficiency / device.gemm_efficiency
    attention = device.attention.burst_efficiency / device.attention.efficiency
    products: tuple[Operation, ...] = ("gemm", "dgrad", "wgrad", "experts", "experts_backward")
    return {**dict.fromkeys(products, gemm), "attention": attention, "attention_backward": attention}


def line_of(operation: Operation) -> int:
    """Which number of an operation's shapes grows with the batch."""
    names = SHAPES[operation]
    return next(names.index(name) for name in _LINES if name in names)


def _columns(operation: Operation) -> tuple[int, tuple[int, ...], list[int]]:
    """(line, grid, matched) columns of the shapes of an operation."""
    names, line = SHAPES[operation], line_of(operation)
    grid = tuple(names.index(name) for name in _GRIDS.get(names, ()))
    return line, grid, [at for at in range(len(SHAPES[operation])) if at != line and at not in grid]


def _lines(operation: Operation, points: Mapping[tuple[int, ...], list[float]]) -> _Lines:
    line, grid, matched = _columns(operation)
    shapes = np.array(list(points), dtype=np.float64)
    seconds = np.array([float(np.median(repeats)) for repeats in points.values()])
    keys_of: dict[tuple[float, ...], int] = {}
    cells = [[keys_of.setdefault(tuple(row), len(keys_of)) for row in shapes[:, matched].tolist()]]
    axes: list[Floats] = []
    for column in grid:
        axis, at = np.unique(shapes[:, column], return_inverse=True)
        axes.append(axis)
        cells.append(at.tolist())
    # Lines are numbered as they appear; a cell without one keeps -1.
    line_of = np.full((len(keys_of), *map(len, axes)), -1, dtype=np.int64)
    used, line_at = np.unique(np.array(cells).T, axis=0, return_inverse=True)
    line_of[tuple(used.T)] = np.arange(len(used))
    keys = np.asarray(line_at.ravel() * _SPAN + np.log(shapes[:, line]), dtype=np.float64)
    order = np.argsort(keys)
    return _Lines(
        operation=operation,
        matched=keys_of,
        axes=tuple(axes),
        line_of=line_of,
        keys=keys[order],
        sizes=shapes[order, line],
        log_seconds=np.log(seconds[order]),
        ends=np.cumsum(np.bincount(line_at.ravel())),
    )


def _look_up(lines: _Lines, shapes: Floats) -> Lookup:
    line, grid, matched = _columns(lines.operation)
    rows, inverse = np.unique(shapes[:, matched], axis=0, return_inverse=True)
    which = np.array([lines.matched.get(tuple(row), -1) for row in rows.tolist()], dtype=np.int64)[inverse.ravel()]
    sides = [_neighbours(axis, shapes[:, column]) for axis, column in zip(lines.axes, grid, strict=True)]
    log_seconds = np.zeros(len(shapes))
    refused = which < 0
    is_exact = ~refused
    for corner in itertools.product((0, 1), repeat=len(sides)):
        weight = np.ones(len(shapes))
        cell = [which]
        for (low, high, share), upper in zip(sides, corner, strict=True):
            cell.append(high if upper else low)
            weight = weight * (share if upper else 1 - share)
        number = lines.line_of[tuple(cell)]
        number = np.where(refused | np.any(np.array(cell) < 0, axis=0), -1, number)
        at_corner, hit = _along(lines, number, shapes[:, line])
        counts = weight > 0
        refused = refused | (counts & np.isnan(at_corner))
        is_exact = is_exact & (hit | ~counts) & ((weight == 1) | ~counts)
        log_seconds = log_seconds + np.where(counts, weight * np.nan_to_num(at_corner), 0.0)
    return Lookup(seconds=np.where(refused, np.nan, np.exp(log_seconds)), is_exact=is_exact & ~refused)


def _neighbours(axis: Floats, sizes: Floats) -> tuple[Ints, Ints, Floats]:
    """(index below, index above, share of the one above) on an axis; -1 beyond its ends."""
    high = np.searchsorted(axis, sizes)
    inside = np.minimum(high, len(axis) - 1)
    hit = axis[inside] == sizes
    outside = (high == len(axis)) | ((high == 0) & ~hit)
    low = np.where(hit, inside, inside - 1)
    below = axis[np.maximum(low, 0)]
    width = np.where(hit | outside, 1.0, np.log(axis[inside] / below))
    share = np.where(hit | outside, 0.0, np.log(np.maximum(sizes, 1e-300) / below) / width)
    return np.where(outside, -1, low), np.where(outside, -1, inside), share


def _along(lines: _Lines, number: Ints, sizes: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """(log seconds, whether measured) of sizes on lines; NaN on no line and below its first point."""
    known = (number >= 0) & (sizes > 0)
    own = np.maximum(number, 0)
    first, last = np.where(own > 0, lines.ends[own - 1], 0), lines.ends[own] - 1
    log_sizes = np.log(np.where(known, sizes, 1.0))
    at = np.clip(np.searchsorted(lines.keys, own * _SPAN + log_sizes), first, last)
    # Rounding may put a measured size just beside its own key.
    at = np.where((at > first) & (lines.sizes[at - 1] == sizes), at - 1, at)
    hit = known & (lines.sizes[at] == sizes)
    beyond = sizes > lines.sizes[last]
    below = np.maximum(at - 1, first)
    log_low, log_high = np.log(lines.sizes[below]), np.log(lines.sizes[at])
    share = np.where(log_high > log_low, (log_sizes - log_low) / np.where(log_high > log_low, log_high - log_low, 1), 1)
    between = lines.log_seconds[below] + share * (lines.log_seconds[at] - lines.log_seconds[below])
    power = _WORK_POWER.get(lines.operation, 1.0)
    after = lines.log_seconds[last] + power * (log_sizes - np.log(lines.sizes[last]))
    result = np.where(hit, lines.log_seconds[at], np.where(beyond, after, between))
    return np.where(known & (hit | beyond | (sizes > lines.sizes[first])), result, np.nan), hit


# What a calibration may move, in the order in which a fit takes them up: what most runs tell apart first.
FACTORS = ("overall", "memory_bound", "host", "scale_out", "scale_up", "attention", "gemm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Multiplicative factors on the time of each component, and the residual spread that remains.

    A factor of 1 is the reference model.  The spreads are standard deviations of log(measured / predicted); the 90 %
    interval of a step time is exp(+-1.645 time_spread) around the prediction (`pipeline_time_spread` for plans with
    several stages), and the probability of running out of memory follows from `memory_spread`.
    """

    name: str = "reference"
    overall: float = 1.0  # on the whole step
    gemm: float = 1.0
    attention: float = 1.0
    memory_bound: float = 1.0
    host: float = 1.0
    scale_up: float = 1.0  # collectives inside the scale-up domain
    scale_out: float = 1.0  # collectives over the network
    # Without calibration: covers nine tenths of the runs of a published source, in the mean over sources
    # (benchmarks/results); and between the .02 of a known framework and the .08 of an unknown one (`modelling` G3).
    time_spread: float = 0.25
    pipeline_time_spread: float | None = None  # of plans with several stages, where those differ
    memory_spread: float = 0.06
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in FACTORS:
            check_positive(name, getattr(self, name), most=100.0)
        for name in ("time_spread", "memory_spread"):
            check_positive(name, getattr(self, name), most=5.0)
        if self.pipeline_time_spread is not None:
            check_positive("pipeline_time_spread", self.pipeline_time_spread, most=5.0)
