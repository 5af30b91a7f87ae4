"""Costs of plans that choose the degree of context parallelism for every sample (dynamic context parallelism).

A plan with cp ranks for its longest sample gives every sample the smallest power of two of ranks at which no rank has
more than seq_len / cp tokens, and every sample is a micro-batch of its own (Megatron-Core d98e8a6,
core/pipeline_parallel/hybrid_cp_schedule.py).  It is priced as a mixture of static plans, one for each degree, with the
samples of that degree.  `dynamic_schedule` says how long ranks wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows
from autoplan.cost.kernels.sequences import cut_samples, useful
from autoplan.spec.lengths import Lengths
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

Priced = TypeVar("Priced")


class DegreeClass(NamedTuple):
    """Samples of one degree."""

    degree: int
    share: float  # among all samples
    lengths: Lengths


class Part(NamedTuple):
    """Static plans in the place of plans of a batch, for the samples of one degree."""

    rows: Ints
    weight: float  # micro-batches of these samples, relative to those of the static plan
    problem: Problem
    plans: PlanBatch


def chooses_degrees(training: TrainingSpec, batch: PlanBatch) -> Bools:
    """Return which plans split samples by their lengths; without lengths all samples have the same degree."""
    return batch.dynamic_cp & (batch.cp > 1) & (training.lengths is not None)


def degrees_of(tokens: Floats, seq_len: int, cp: int, least: int) -> Ints:
    """Return the degree of samples with these tokens, from `least` to cp."""
    parts = np.maximum(tokens * cp / seq_len, 1.0)
    powers = 2 ** np.ceil(np.log2(parts)).astype(np.int64)
    return np.clip(powers, least, cp)


def num_samples(training: TrainingSpec, batch: PlanBatch) -> Ints:
    """Samples of a step."""
    return np.maximum(np.rint(batch.global_batch * useful(training).samples), 1).astype(np.int64)


@lru_cache(maxsize=4096)
def least_degree(lengths: Lengths, seq_len: int, cp: int, samples: int, ranks: int) -> int:
    """Return the smallest degree with which so many samples of a step occupy all of so many ranks."""
    drawn, least = cut_samples(lengths, seq_len), 1
    while least < cp and samples * float(drawn.weights @ degrees_of(drawn.values, seq_len, cp, least)) < ranks:
        least *= 2
    return least


@lru_cache(maxsize=1024)
def degree_classes(lengths: Lengths, seq_len: int, cp: int, least: int) -> tuple[DegreeClass, ...]:
    """Return the samples of every degree, the smallest degree first."""
    tokens, counts = np.array(lengths.histogram, dtype=np.int64).T
    tokens = np.minimum(tokens, seq_len)
    degrees = degrees_of(tokens.astype(np.float64), seq_len, cp, least)
    classes = []
    for degree in np.unique(degrees).tolist():
        rows = np.flatnonzero(degrees == degree)
        histogram = tuple(zip(tokens[rows].tolist(), counts[rows].tolist(), strict=True))
        share = float(counts[rows].sum() / counts.sum())
        classes.append(DegreeClass(degree, share, Lengths(histogram=histogram, source=lengths.source)))
    return tuple(classes)


def parts_of(problem: Problem, batch: PlanBatch) -> Iterator[Part]:
    """Yield the plans that do not choose degrees, and for those that do a static plan for each degree.

    Of the B samples of a step a rank runs degree / (cp dp) of each degree's, in B / dp micro-batches of a static plan.
    """
    training = problem.training
    chooses = chooses_degrees(training, batch)
    if len(static := np.flatnonzero(~chooses)) or not len(batch):
        yield Part(static, 1.0, problem, batch.take(static) if chooses.any() else batch)
    if training.lengths is None or not chooses.any():
        return
    keys = np.stack([batch.cp, num_samples(training, batch), batch.cp * batch.dp])
    distinct, key_of = np.unique(keys, axis=1, return_inverse=True)
    sizes = [(cp, least_degree(training.lengths, training.seq_len, cp, *step)) for cp, *step in distinct.T.tolist()]
    for cp, least in dict.fromkeys(sizes):
        is_alike = np.array([size == (cp, least) for size in sizes])
        if not len(rows := np.flatnonzero(chooses & is_alike[key_of.reshape(-1)])):
            continue
        plans = batch.take(rows)
        for degree, share, lengths in degree_classes(training.lengths, training.seq_len, cp, least):
            times = cp // degree
            split = replace(  # with as many ranks and micro-batches
                plans,
                cp=plans.cp // times,
                dp_shard=plans.dp_shard * times,
                global_batch=plans.global_batch * times,
                dynamic_cp=np.zeros_like(plans.dynamic_cp),
            )
            weight = share * useful(training).samples * degree / cp
            yield Part(rows, weight, problem.of_samples(lengths), split)


def over_degrees(problem: Problem, batch: PlanBatch, price: Callable[[Problem, PlanBatch], Priced]) -> Priced:
    """Return `price` of every plan; of one that chooses degrees, the mean rank's in a micro-batch of the static plan.

    `price` returns seconds: arrays, or records and dictionaries of them.
    """
    if not chooses_degrees(problem.training, batch).any():
        return price(problem, batch)
    parts = list(parts_of(problem, batch))
    priced = [(part.rows, part.weight, price(part.problem, part.plans)) for part in parts]
    return _joined(priced, len(batch))


def _joined(priced: Sequence[tuple[Ints, float, Any]], size: int) -> Any:
    """Return the weighted sums of prices, given as (rows, weight, price), for each of `size` plans."""
    first = priced[0][2]
    if isinstance(first, np.ndarray):
        total = np.zeros((size, *first.shape[1:]), dtype=first.dtype)
        for rows, weight, values in priced:
            total[rows] = total[rows] | values if first.dtype == np.bool_ else total[rows] + weight * values
        return total
    if isinstance(first, dict):
        return {key: _joined([(rows, weight, values[key]) for rows, weight, values in priced], size) for key in first}
    if not isinstance(first, Rows):
        return first
    names = [field.name for field in fields(first)]  # type: ignore[arg-type]
    columns = {
        name: _joined([(rows, weight, getattr(values, name)) for rows, weight, values in priced], size)
        for name in names
    }
    return type(first)(**columns)
