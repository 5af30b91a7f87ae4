"""Measured timings behind each term of a step, and looked-up times that were not measured.

Pricing records the shapes that it looks up.  Each time in turn is made slightly longer; the terms that grow depend on
it.  Times hidden behind other work have no share (`cost.provenance`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.measured import find
from autoplan.cost.lookups import lookups
from autoplan.cost.network.links import Links
from autoplan.cost.provenance import term_shares
from autoplan.spec.measurement import Match
from autoplan.spec.needed_times import NeededTime, Served
from autoplan.spec.operations import COLLECTIVES, Operation
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import DISTURBED_SPREAD, INTERPOLATED_SPREAD, SCALED_SPREAD, TimeSource

_GROWTH = 1e-6
_MIN_SHARE = 1e-4  # of a term, below which a share is rounding of the derivative
# Growth that makes a further term count, relative to the growth of the term that a time enters itself; a bubble grows
# with all times.
_ENTERS = 0.5
_SERVED_SPREADS: dict[Served, float] = {
    "disturbed": DISTURBED_SPREAD,
    "interpolated": INTERPOLATED_SPREAD,
    "scaled": SCALED_SPREAD,
}
# Backward passes that are scaled by a measured forward pass if they were not measured.
FORWARD_OF: dict[Operation, Operation] = {
    "dgrad": "gemm",
    "wgrad": "gemm",
    "attention_backward": "attention",
    "latent_attention_backward": "latent_attention",
    "experts_backward": "experts",
    "norm_backward": "norm",
    "swiglu_backward": "swiglu",
}


def measured_shares(problem: Problem, plan: ParallelPlan) -> dict[str, float]:
    """Return the share of measured times in every non-zero term."""
    batch = problem.batch([plan])
    timed = ("measured", "disturbed", "interpolated", "scaled")
    return {
        name: float(sum(shares[kind][0] for kind in timed))  # type: ignore[index]
        for name, shares in term_shares(problem, batch).items()
    }


def needed_times(problem: Problem, plan: ParallelPlan) -> list[NeededTime]:
    """Return the times that pricing a plan looks up, with their sources, largest shares of the step first."""
    batch = problem.batch([plan])
    needed = [_needed(problem, batch, *need) for need in _needs(problem, batch)]
    return sorted(needed, key=lambda need: (-need.step_share, need.operation, need.shape))


def term_spreads(needed: Sequence[NeededTime], sample_spreads: Mapping[str, float], match: Match) -> dict[str, float]:
    """Return the uncertainty of the measured part of each term, as standard deviations of its logarithm.

    `sample_spreads` are the spreads of record samples, by key prefix.  Errors of shapes are independent and add in
    quadrature by their shares; the error of using another machine's records (`match`) is common to all.
    """
    variances: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for need in needed:
        sampled = sum((source.share * sample_spreads.get(source.source, 0.0)) ** 2 for source in need.sources)
        variance = sampled + _SERVED_SPREADS.get(need.served, 0.0) ** 2
        for name, share in need.terms.items():
            if share is not None:
                variances[name] += share**2 * variance
                measured[name] += share
    return {
        name: math.hypot(math.sqrt(variance) / measured[name], match.spread)
        for name, variance in variances.items()
        if measured[name] > _MIN_SHARE
    }


def _needs(problem: Problem, batch: PlanBatch) -> Iterator[tuple[Operation, tuple[str, ...], tuple[float, ...]]]:
    """Yield (operation, types in order of preference, shape), with each group of siblings once."""
    dtypes: dict[tuple[Operation, tuple[float, ...]], list[str]] = {}
    links = Links.of(problem)
    for (operation, dtype), shapes in lookups(problem, batch).items():
        for shape in sorted(shapes):
            dtypes.setdefault((operation, shape), []).append(dtype)
    for (operation, shape), names in dtypes.items():
        if (
            operation in COLLECTIVES
            and shape != (with_siblings := links.siblings(shape))
            and (operation, with_siblings) in dtypes
        ):
            continue  # the same group alone, which is used if it was not measured together with its siblings
        yield operation, tuple(names), shape


def _needed(
    problem: Problem, batch: PlanBatch, operation: Operation, dtypes: tuple[str, ...], shape: tuple[float, ...]
) -> NeededTime:
    served, dtype, seconds, sources = _served(problem, operation, dtypes, shape)
    terms: dict[str, float | None] = {}
    step_share = 0.0
    if seconds is not None:
        shares, step_share = _shares(problem, batch, operation, dtype, shape, seconds)
        terms.update(shares)
    else:
        terms.update(dict.fromkeys(_entered(problem, batch, operation, dtype, shape)))
    return NeededTime(
        operation=operation,
        dtype=dtype,
        shape=tuple(round(size) for size in shape),
        served=served,
        seconds=seconds,
        terms=terms,
        step_share=step_share,
        sources=tuple(sources),
    )


def _served(
    problem: Problem, operation: Operation, dtypes: tuple[str, ...], shape: tuple[float, ...]
) -> tuple[Served, str, float | None, list[TimeSource]]:
    """Return (how a time is obtained, its data type, seconds, its sources)."""
    timings = problem.timings
    shapes = [shape, (*shape[:2], 1.0, shape[3])] if operation in COLLECTIVES and shape[0] == shape[1] else [shape]
    for candidate in shapes:
        for dtype in dtypes:
            lookup = find(timings, operation, (dtype,), np.array([candidate]))
            if np.isnan(lookup.seconds[0]):
                continue
            served: Served = (
                "disturbed" if lookup.is_disturbed[0] else "measured" if lookup.is_exact[0] else "interpolated"
            )
            return served, dtype, float(lookup.seconds[0]), timings.sources_of(operation, dtype, candidate)
    if operation in COLLECTIVES:
        links = Links.of(problem)
        if scaled_shape := links.scaled_from(operation, shape):
            _, dtype, _, sources = _served(problem, operation, dtypes, scaled_shape)
            return "scaled", dtype, links.shape_s(operation, shape), sources
    if operation in FORWARD_OF:
        served, dtype, seconds, sources = _served(problem, FORWARD_OF[operation], dtypes, shape)
        if seconds is not None:  # its share of the step is contained in the forward pass's
            return "by its forward pass", dtype, None, sources
    return "not measured", dtypes[0], None, []


def _shares(
    problem: Problem, batch: PlanBatch, operation: Operation, dtype: str, shape: tuple[float, ...], seconds: float
) -> tuple[dict[str, float], float]:
    """Return the shares of the terms, and of the step, that depend on a time."""
    before, after = (
        estimate(replace(problem, timings=problem.timings.with_time(operation, dtype, shape, time_s)), batch)
        for time_s in (seconds, seconds * (1 + _GROWTH))
    )
    shares = {
        name: float((after.terms_s[name][0] - value[0]) / (value[0] * _GROWTH))
        for name, value in before.terms_s.items()
        if value[0] > 0
    }
    step = float((after.step_s[0] - before.step_s[0]) / (before.step_s[0] * _GROWTH))
    return {name: share for name, share in shares.items() if share > _MIN_SHARE}, max(step, 0.0)


def _entered(
    problem: Problem, batch: PlanBatch, operation: Operation, dtype: str, shape: tuple[float, ...]
) -> list[str]:
    """Return the terms that a measured time of a shape would enter; empty if it is used only together with others."""
    step_s = float(estimate(problem, batch).step_s[0])
    # Long enough not to be hidden behind other work.
    before, after = (
        estimate(replace(problem, timings=problem.timings.with_time(operation, dtype, shape, time_s)), batch).terms_s
        for time_s in (step_s, 2 * step_s)
    )
    growth = {name: float(after[name][0] - value[0]) for name, value in before.items()}
    max_growth = max(growth.values(), default=0.0)
    return [name for name, value in growth.items() if max_growth > 0 and value >= _ENTERS * max_growth]
