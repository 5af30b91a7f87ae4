"""Lookup of measured kernel times, and substitutes for kernels that were not measured.

First comes the time of this very shape, then one between measured shapes, then for a backward pass the reference times
what its forward pass takes over its own reference, then the reference: the device's fitted curve or, where there is
none, its datasheet.

The factors of a calibration on single components were fitted to what the reference rates leave unexplained, so they
multiply references alone: a time that was measured as training runs has that in it already.  `overall` and `host`
stand for what no timing of a kernel shows, and hold for all.  Bursts are brought to the level of the references before
they become a table (`autoplan.spec.calibration.burst_factors`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.passes import Pass
from autoplan.spec.enums import Precision
from autoplan.spec.operations import Operation
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import Lookup, TimingTable

Sizes = Floats | Ints | float

# The types in which a kernel may have been measured, by the precision of a plan: 16-bit kernels run alike in both.
_MEASURED_IN = {"bf16": ("bf16", "fp16"), "fp16": ("fp16", "bf16")}


def find(timings: TimingTable, operation: Operation, dtypes: Iterable[str], shapes: Floats) -> Lookup:
    """Times of `shapes` in the first of some types in which they were measured."""
    lookup = Lookup.refused(len(shapes))
    for dtype in dtypes:
        if timings.holds(operation, dtype):
            lookup = lookup.before(timings.lookup(operation, dtype, shapes))
    return lookup


def find_kernels(problem: Problem, batch: PlanBatch, operation: Operation, *sizes: Sizes) -> Lookup:
    """Times of kernels in each plan's precision; `sizes` as `SHAPES` has them, an element a plan or one for all."""
    columns = np.stack(np.broadcast_arrays(np.zeros(len(batch)), *sizes)[1:], axis=-1)
    lookup = Lookup.refused(columns.shape[:-1])
    for at in np.unique(batch.precision):
        name = tuple(Precision)[at]
        rows = np.flatnonzero(batch.precision == at)
        shapes = columns[..., rows, :]
        own = find(problem.timings, operation, _MEASURED_IN.get(name, (name,)), shapes.reshape(-1, shapes.shape[-1]))
        lookup.seconds[..., rows] = own.seconds.reshape(shapes.shape[:-1])
        lookup.is_exact[..., rows] = own.is_exact.reshape(shapes.shape[:-1])
        lookup.is_disturbed[..., rows] = own.is_disturbed.reshape(shapes.shape[:-1])
    return replace(lookup, source_factors=problem.timings.source_factors).scaled(1 / problem.device_share)


def passes_s(lookups: Sequence[Lookup], references: Sequence[Floats]) -> tuple[Floats, ...]:
    """Seconds of a forward pass and the passes that go with it, from what was found of each and their references."""
    forward = lookups[0]
    times, unmeasured = [forward.otherwise(references[0])], np.zeros_like(forward.is_exact)
    for own, reference in zip(lookups[1:], references[1:], strict=True):
        # A backward pass was not measured itself, even where it takes as long as the forward one.
        kin = replace(forward, seconds=forward.seconds * reference / references[0], is_exact=unmeasured)
        times.append(own.before(kin).otherwise(reference))
    return tuple(times)


def measured_pass(lookups: Sequence[Lookup], reference: Pass) -> Pass:
    """Both passes, from what was found of each and their reference."""
    return Pass(*passes_s(lookups, (reference.forward_s, reference.backward_s)))
