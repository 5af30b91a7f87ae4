"""Sequences made of samples of different lengths: their tokens, their padding, and their work for attention.

Two numbers determine the time of a micro-batch: its tokens, and the sum of the squared lengths over which attention
works (`modelling` A2: the sum of L_i^2 instead of b s^2).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.spec.lengths import Batching, Lengths
from autoplan.spec.training import TrainingSpec

# Number of packs to build; a smaller data set is repeated to represent a long run.
MIN_PACKS = 10**6


class Packs(NamedTuple):
    """Packed sequences by kind: arrays with one element per kind of pack."""

    share: Floats  # among all packs
    tokens: Floats  # of the samples; the rest is padding
    squares: Floats  # sum of the samples' squared lengths
    samples: Floats


class Kinds(NamedTuple):
    """Distinct values and their weights."""

    values: Floats
    weights: Floats

    @property
    def mean(self) -> float:
        """Mean value."""
        return float(self.values @ self.weights)


class Useful(NamedTuple):
    """Useful tokens per sample of the batch, which may be a pack of several: means."""

    tokens: float  # without padding
    attended_len: float  # length of the sample that a token belongs to, as attention sees it
    samples: float


@lru_cache(maxsize=64)
def cut_samples(lengths: Lengths, seq_len: int) -> Kinds:
    """Return the tokens of samples, truncated to the sequence length."""
    tokens, samples = np.array(lengths.histogram, dtype=np.float64).T
    return Kinds(np.minimum(tokens, seq_len), samples / samples.sum())


@lru_cache(maxsize=64)
def packs_of(lengths: Lengths, seq_len: int) -> Packs:
    """Pack samples, longest first, each into the fullest sequence with room for it.

    Best fit decreasing, as in TRL (trl/data_utils.py, pack_dataset "bfd"); axolotl's and Megatron-Bridge's first fit
    decreasing (axolotl/utils/samplers/multipack.py, megatron/bridge/data/datasets/packing_utils.py) and
    LLaMA-Factory's knapsack fill sequences about as well.
    """
    repeat = -(-MIN_PACKS * seq_len // sum(min(length, seq_len) * samples for length, samples in lengths.histogram))
    packs: dict[tuple[int, int, int], int] = {}  # (tokens, squares, samples) to the number of such packs

    def add(kind: tuple[int, int, int], tokens: int, number: int, count: int) -> None:
        """Add `count` packs of a kind, each extended by `number` samples of this many tokens."""
        more = (kind[0] + number * tokens, kind[1] + number * tokens**2, kind[2] + number)
        packs[more] = packs.get(more, 0) + count
        if not packs[more]:
            del packs[more]

    for length, samples in reversed(lengths.histogram):
        tokens, unpacked = min(length, seq_len), samples * repeat
        while unpacked:
            kind = max((kind for kind in packs if kind[0] + tokens <= seq_len), default=(0, 0, 0))
            samples_per_pack = (seq_len - kind[0]) // tokens
            count = min(packs.get(kind, unpacked), -(-unpacked // samples_per_pack))
            full_packs, remainder = divmod(min(unpacked, count * samples_per_pack), samples_per_pack)
            add(kind, tokens, 0, -count if kind in packs else 0)
            add(kind, tokens, samples_per_pack, full_packs)
            add(kind, tokens, remainder, 1 if remainder else 0)
            unpacked -= full_packs * samples_per_pack + remainder
    share, *columns = np.array([(count, *kind) for kind, count in packs.items()], dtype=np.float64).T
    return Packs(share / share.sum(), *columns)


@lru_cache(maxsize=1024)
def longest_of(lengths: Lengths, seq_len: int, samples: int) -> Kinds:
    """Distribution of the longest of this many samples: the cumulative distribution of one to that power."""
    tokens, shares = cut_samples(lengths, seq_len)
    below = np.minimum(np.cumsum(shares), 1.0) ** samples
    return Kinds(tokens, np.diff(below / below[-1], prepend=0.0))


@lru_cache(maxsize=4096)
def means_of(lengths: Lengths, batching: Batching, seq_len: int, micro_batch: int) -> tuple[float, float]:
    """Return the mean (tokens, squares of attended lengths) of a sequence, including padding."""
    if batching in ("joined", "full"):
        return float(seq_len), float(seq_len) ** 2
    if batching == "packed":
        packs = packs_of(lengths, seq_len)
        return float(seq_len), float(packs.share @ packs.squares)
    drawn = cut_samples(lengths, seq_len)
    if batching == "padded":
        drawn = longest_of(lengths, seq_len, micro_batch)
    return drawn.mean, float(drawn.values**2 @ drawn.weights)


def tokens_per_sample(training: TrainingSpec, micro_batch: Ints) -> Floats | int:
    """Mean tokens computed per sample of the batch, in micro-batches of this many samples."""
    tokens = training.seq_len if training.lengths is None else _means(training, micro_batch)[0]
    return training.sequences_per_sample * tokens


def attended_len(training: TrainingSpec, micro_batch: Ints) -> Floats | int:
    """Mean length, over tokens, that attention sees as one sequence."""
    if training.lengths is None:
        return training.document_len or training.seq_len
    tokens, squares = _means(training, micro_batch)
    return squares / tokens


def _means(training: TrainingSpec, micro_batch: Ints) -> Floats:
    """Return `means_of` the sequences of each micro-batch: shape (2, plans)."""
    assert training.lengths is not None
    sizes, row_of = np.unique(training.sequences_per_sample * micro_batch, return_inverse=True)
    table = [means_of(training.lengths, training.batching, training.seq_len, size) for size in sizes.tolist()]
    return np.array(table, dtype=np.float64).reshape(-1, 2).T[:, row_of.reshape(-1)]


def useful(training: TrainingSpec) -> Useful:
    """Tokens of a sample of the batch without padding; all of them if lengths are equal."""
    pairs = training.sequences_per_sample
    if training.lengths is None:
        return Useful(pairs * training.seq_len, training.document_len or training.seq_len, 1.0)
    samples = cut_samples(training.lengths, training.seq_len)
    attended = float(samples.values**2 @ samples.weights) / samples.mean
    if training.batching == "packed":
        packs = packs_of(training.lengths, training.seq_len)
        tokens, number = (float(packs.share @ of) for of in (packs.tokens, packs.samples))
        return Useful(tokens, attended, number)
    if training.batching == "joined":
        return Useful(training.seq_len, training.seq_len, training.seq_len / training.lengths.mean)
    return Useful(pairs * samples.mean, attended, 1.0)
