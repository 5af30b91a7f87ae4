"""Time that a step waits for samples with more images than others: the expected makespan minus that of equal samples.

Only the ranks with the encoder work longer for them, which are the first stage of a pipeline.  Distributions are those
of `uneven_lengths`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, distinct_rows
from autoplan.cost.kernels.sequences import Kinds
from autoplan.cost.uneven_lengths import Distribution, Meeting
from autoplan.spec.lengths import ImageCounts

PACES = 32  # paces of the other stages for which a wait is computed; between them it is interpolated


class Encoding(NamedTuple):
    """Place and time of encoding images, an element per plan; times are of both passes of a mean micro-batch."""

    encoder_s: Floats
    beside_s: Floats  # the rest of the stage with the encoder
    others_s: Floats  # of the slowest other stage; 0 without any
    samples: Ints  # of a micro-batch of one replica of the encoder
    microbatches: Ints
    stages: Ints
    is_gpipe: Bools
    in_turn: Ints  # replicas of the encoder that synchronise in every micro-batch
    at_end: Ints  # groups of them


@lru_cache(maxsize=1024)
def _relative(counts: ImageCounts, samples: int) -> Distribution:
    """Distribution of the images of a micro-batch relative to their mean."""
    images, weights = np.array(counts.histogram, dtype=np.float64).T
    weights = weights / weights.sum()
    return Distribution.of(Kinds(images / (samples * counts.mean), weights)).sum(samples)


@lru_cache(maxsize=65536)
def expected_encodings(counts: ImageCounts, samples: int, pace: float, meeting: Meeting) -> float:
    """Expected time of a step's micro-batches through the slowest stage, in mean times of the encoder for one of them.

    `pace` is what the slowest other stage takes longer for a micro-batch than the first one beside its encoder, in the
    same unit.  A stage runs ahead of the last one by as many micro-batches as are in flight (by all of them in GPipe),
    so long and short ones even out within so many, and a run of them takes as long as the encoder or the other stage
    needs, whichever is slower.
    """
    count, stages = meeting.microbatches, meeting.stages
    run = count if stages == 1 or meeting.is_gpipe else min(stages, count)
    runs = -(-count // run)
    work = _relative(counts, samples).largest(meeting.in_turn).sum(run)
    work = Distribution.of(Kinds(np.maximum(work.values, run * pace), work.mass))
    return work.sum(runs).scaled(count / (run * runs)).largest(meeting.at_end).mean


def images_waiting_s(counts: ImageCounts, encoding: Encoding) -> Floats:
    """Time per step that ranks wait because samples have unlike numbers of images: shape (plans)."""
    most = counts.most / counts.mean
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = (encoding.others_s - encoding.beside_s) / encoding.encoder_s
    # No micro-batch has more than the most, beyond which nothing waits; a stage that is faster waits for all.
    pace = np.where(encoding.stages == 1, 0.0, np.nan_to_num(pace))
    place = np.clip(pace / most, 0.0, 1.0) * PACES
    low = place.astype(np.int64)
    keys = (
        encoding.samples,
        encoding.microbatches,
        encoding.stages,
        encoding.is_gpipe,
        encoding.in_turn,
        encoding.at_end,
    )
    first, row_of = distinct_rows(low, *keys)
    expected = np.zeros((2, len(first)))
    for at, (cell, samples, *meeting) in enumerate(zip(*(key[first].tolist() for key in (low, *keys)), strict=True)):
        for above in (0, 1):
            expected[above, at] = expected_encodings(counts, samples, (cell + above) * most / PACES, Meeting(*meeting))
    lower, upper = expected[:, row_of.reshape(-1)]
    of_equal = encoding.microbatches * np.maximum(pace, 1.0)
    return np.maximum(lower + (place - low) * (upper - lower) - of_equal, 0.0) * encoding.encoder_s
