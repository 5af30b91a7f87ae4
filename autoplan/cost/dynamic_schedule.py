"""Schedule of samples under dynamic context parallelism, and the time that ranks wait for one another.

The scheduler of Megatron-Core (d98e8a6, core/pipeline_parallel/hybrid_cp_schedule.py, BalancedCPScheduler) takes the
samples of a step, longest first, and gives each to free ranks or to the least loaded group of its degree.  Loads are
squares of lengths over degrees.  All ranks meet when a round ends: as soon as loads are within 5 % after the first
change of degree, or when no sample finds a place.  Ranks that are still free then are added to the smallest groups.

Batches are drawn with a fixed seed, so that results are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.dynamic_cp import degrees_of
from autoplan.cost.kernels.sequences import cut_samples
from autoplan.spec.lengths import Lengths

SLACK = 0.05  # difference of loads at which a round is balanced
BUCKET_SLACK = 1.1  # how far a bucket of samples may exceed its share of the load
NUM_DRAWS = 8
MAX_SAMPLES = 512  # of a drawn batch; larger ones are scaled down together with the ranks


class Sample(NamedTuple):
    """Tokens and degree of a sample."""

    tokens: int
    degree: int

    @property
    def load(self) -> float:
        """Load of each of its ranks, as the scheduler estimates it."""
        return self.tokens**2 / self.degree


@dataclass(slots=True)
class Group:
    """Ranks that compute the same samples."""

    size: int
    samples: list[Sample] = field(default_factory=list)
    load: float = 0.0

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.samples.append(sample)
        self.load += sample.load

    @property
    def work(self) -> tuple[float, float, float]:
        """Passes of each rank, their tokens, and their squares of lengths."""
        tokens = [sample.tokens for sample in self.samples]
        return len(tokens), sum(tokens) / self.size, sum(length**2 for length in tokens) / self.size


class Rounds(NamedTuple):
    """Drawn batches: work of the groups of all rounds, where rounds start, and the mean rank's work in a batch."""

    work: Floats  # (groups, 3): passes, tokens and squares of lengths of a rank
    starts: Ints
    mean_work: Floats  # (3): with the degrees that samples have before free ranks are added


def rounds_of(samples: list[Sample], ranks: int) -> list[list[Group]]:
    """Return the groups of every round in which so many ranks compute the samples."""
    left, rounds = sorted(samples, reverse=True), []
    while left:
        groups, left = _round(left, ranks)
        rounds.append(groups)
    return rounds


def _round(samples: list[Sample], ranks: int) -> tuple[list[Group], list[Sample]]:
    """Return (groups of one round, samples that are left)."""
    buckets = _buckets(samples)
    groups: list[Group] = []
    heaps: dict[int, list[tuple[float, int]]] = {}  # (load, index) of groups by size
    free, is_checked = ranks, False
    while bucket := next(
        (bucket for bucket in buckets if bucket and (free >= bucket[-1].degree or bucket[-1].degree in heaps)), None
    ):
        sample = bucket.pop()
        heap = heaps.setdefault(sample.degree, [])
        if free >= sample.degree:
            free -= sample.degree
            groups.append(Group(sample.degree))
            index = len(groups) - 1
        else:
            index = heappop(heap)[1]
        groups[index].add(sample)
        heappush(heap, (groups[index].load, index))
        is_checked |= sample.degree < samples[0].degree
        if is_checked and not free and _is_balanced([group.load for group in groups]):
            break
    left = [sample for bucket in buckets for sample in reversed(bucket)]
    if not free:
        left += _trimmed(groups)
    _spread(groups, free, ranks)
    return groups, left


def _buckets(samples: list[Sample]) -> list[list[Sample]]:
    """Return samples in as many buckets of about equal load as they have degrees, each with its longest sample last."""
    num_buckets = len({sample.degree for sample in samples})
    share = sum(sample.load for sample in samples) / num_buckets
    buckets: list[list[Sample]] = [[]]
    load = 0.0
    for index, sample in enumerate(samples):
        is_full = load + sample.load > BUCKET_SLACK * share
        if buckets[-1] and (is_full or len(samples) - index <= num_buckets - 2 * (len(buckets) - 1)):
            buckets.append([])
            load = 0.0
        buckets[-1].append(sample)
        load += sample.load
    return [bucket[::-1] for bucket in buckets]


def _is_balanced(loads: list[float]) -> bool:
    return max(loads) - min(loads) <= SLACK * max(loads)


def _trimmed(groups: list[Group]) -> list[Sample]:
    """Remove the last samples of the most loaded groups while that balances the loads; return them."""
    removed = []
    loads = [group.load for group in groups]
    while not _is_balanced(loads):
        most = loads.index(max(loads))
        group, slack = groups[most], max(loads) - min(loads)
        loads[most] -= group.samples[-1].load
        if len(group.samples) == 1 or max(loads) - min(loads) >= slack:
            break
        group.load = loads[most]
        removed.append(group.samples.pop())
    return removed


def _spread(groups: list[Group], free: int, ranks: int) -> None:
    """Add free ranks to the smallest groups, which double as far as ranks are left."""
    while free:
        group = min(groups, key=lambda group: group.size)
        added = min(group.size, free, ranks - group.size)
        group.size += added
        free -= added


@lru_cache(maxsize=4096)
def drawn_rounds(lengths: Lengths, seq_len: int, samples: int, ranks: int, cp: int, least: int) -> Rounds:
    """Return the rounds of `NUM_DRAWS` batches of so many samples on so many ranks."""
    while samples > MAX_SAMPLES and ranks % (2 * cp) == 0:
        samples, ranks = -(-samples // 2), ranks // 2
    kinds = cut_samples(lengths, seq_len)
    below = np.cumsum(kinds.weights)
    generator = np.random.default_rng(0)
    work: list[tuple[float, float, float]] = []
    starts: list[int] = []
    mean = np.zeros(3)
    for _ in range(NUM_DRAWS):
        at = np.minimum(np.searchsorted(below, generator.random(min(samples, 4 * MAX_SAMPLES))), len(below) - 1)
        tokens = kinds.values[at]
        degrees = degrees_of(tokens, seq_len, cp, least)
        mean += np.array([degrees.sum(), tokens.sum(), (tokens**2).sum()]) / ranks / NUM_DRAWS
        drawn = [Sample(*pair) for pair in zip(tokens.astype(int).tolist(), degrees.tolist(), strict=True)]
        for groups in rounds_of(drawn, ranks):
            starts.append(len(work))
            work += [group.work for group in groups]
    return Rounds(np.array(work), np.array(starts), mean)


def idle_share(rounds: Rounds, parts_s: Floats) -> Floats:
    """Return the time that ranks wait, relative to the time that the mean rank computes.

    `parts_s`: seconds of the mean rank's passes that are constant, proportional to tokens, and to squares: shape (3,
    plans).
    """
    seconds = parts_s / rounds.mean_work[:, None]
    ends_s = np.maximum.reduceat(rounds.work @ seconds, rounds.starts, axis=0).sum(axis=0) / NUM_DRAWS
    return np.maximum(ends_s / parts_s.sum(axis=0) - 1.0, 0.0)
