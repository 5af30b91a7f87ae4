"""Lookup of measured kernel times, and estimates for kernels that were not measured.

In order of preference: the measured time of the shape; interpolation between measured shapes; for a backward pass its
reference, scaled by the measured forward pass relative to the forward reference; the reference, which is the device's
fitted curve or else its datasheet.

A calibration's factors on single components were fitted to what the reference rates leave unexplained, so they multiply
only references: a time measured under training conditions already contains these effects.  `overall` and `host` stand
for effects that no kernel timing shows, and apply to all times.  Burst timings are scaled to the level of the
references before they become a table (`autoplan.spec.calibration.burst_factors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.kernels.sizes import scales_by_past, scales_tiles
from autoplan.cost.passes import Pass
from autoplan.spec.enums import Precision
from autoplan.spec.operations import QUANTISING, Operation
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import Lookup, TimingTable

Sizes = Floats | Ints | float

# Data types in which a kernel may have been measured, by precision of the plan, and last for 8 bits with blockwise
# scales and for modules with delayed ones; both 16-bit types are equally fast.
_HALVES = {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}
_MEASURED_IN = (
    *(_HALVES.get(name, (str(name),)) for name in Precision),
    ("fp8_block",),
    ("fp8_delayed", "fp8"),
)
_TILES, _PAST = len(Precision), len(Precision) + 1
_WIDE = ("bf16", "fp16", "fp32")  # of what depends on the bytes, not on their type


def find(timings: TimingTable, operation: Operation, dtypes: Iterable[str], shapes: Floats) -> Lookup:
    """Return times of `shapes` in the first of `dtypes` in which each was measured."""
    lookup = Lookup.refused(len(shapes))
    for dtype in dtypes:
        if timings.holds(operation, dtype):
            lookup = lookup.before(timings.lookup(operation, dtype, shapes))
    return lookup


def find_kernels(problem: Problem, batch: PlanBatch, operation: Operation, *sizes: Sizes) -> Lookup:
    """Return kernel times in each plan's precision; `sizes` as in `SHAPES`, one element per plan or one for all."""
    columns = np.stack(np.broadcast_arrays(np.zeros(len(batch)), *sizes)[1:], axis=-1)
    lookup = Lookup.refused(columns.shape[:-1])
    types = np.where(scales_tiles(batch), _TILES, batch.precision)
    if operation in QUANTISING:
        types = np.where(scales_by_past(batch), _PAST, types)
    for at in np.unique(types):
        rows = np.flatnonzero(types == at)
        shapes = columns[..., rows, :]
        found = find(problem.timings, operation, _MEASURED_IN[at], shapes.reshape(-1, shapes.shape[-1]))
        lookup.seconds[..., rows] = found.seconds.reshape(shapes.shape[:-1])
        lookup.is_exact[..., rows] = found.is_exact.reshape(shapes.shape[:-1])
        lookup.is_disturbed[..., rows] = found.is_disturbed.reshape(shapes.shape[:-1])
    return replace(lookup, source_factors=problem.timings.source_factors).scaled(1 / problem.device_share)


def is_measured(problem: Problem, operation: Operation) -> bool:
    """Return whether an operation was measured at all, of any shape in any type of a plan."""
    return problem.timings.holds(operation, *(dtype for dtypes in _MEASURED_IN for dtype in dtypes))


def host_copy_s(problem: Problem, operation: Operation, num_bytes: Floats, reference_s: Floats) -> Floats:
    """Return the time to copy so many bytes between the device and its host: measured, or else the reference."""
    rows = np.flatnonzero(num_bytes > 0)
    if not len(rows) or not problem.timings.holds(operation, *_WIDE):
        return reference_s
    seconds = reference_s.ravel().copy()
    lookup = find(problem.timings, operation, _WIDE, np.ceil(num_bytes.ravel()[rows, None]))
    seconds[rows] = lookup.otherwise(seconds[rows])
    return seconds.reshape(reference_s.shape)


def passes_s(lookups: Sequence[Lookup], references: Sequence[Floats]) -> tuple[Floats, ...]:
    """Seconds of a forward pass and its backward passes, from their lookups and references."""
    forward = lookups[0]
    times, unmeasured = [forward.otherwise(references[0])], np.zeros_like(forward.is_exact)
    for backward, reference in zip(lookups[1:], references[1:], strict=True):
        # Backward passes that were not measured are scaled by the forward pass.
        kin = replace(forward, seconds=forward.seconds * reference / references[0], is_exact=unmeasured)
        times.append(backward.before(kin).otherwise(reference))
    return tuple(times)


def measured_pass(lookups: Sequence[Lookup], reference: Pass) -> Pass:
    """Return both passes from their lookups and their reference."""
    return Pass(*passes_s(lookups, (reference.forward_s, reference.backward_s)))
