"""Samples of different lengths or numbers of images, and how they become sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from autoplan.base.errors import InputError
from autoplan.base.units import check_count

# packed: whole samples share a sequence, and attention keeps to each of them.  joined: all samples behind one another,
# cut into sequences, to all of which attention looks.  padded: to the longest sample of a micro-batch.  full: each
# sample to the whole length.  unpadded: the samples of a micro-batch behind one another, of whatever length that is.
Batching = Literal["packed", "joined", "padded", "full", "unpadded"]
BATCHINGS: tuple[Batching, ...] = get_args(Batching)
UNEVEN: tuple[Batching, ...] = ("padded", "unpadded")  # sequences of unlike lengths
MAX_TOKENS = 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of the samples of a data set, whose micro-batches are drawn from it at random."""

    histogram: tuple[tuple[int, int], ...]  # (tokens of a sample, number of such samples), shortest first
    source: str = ""  # the file, or what was typed

    def __post_init__(self) -> None:
        if not self.histogram:
            raise InputError("lengths.histogram has no samples: give the tokens of some")
        counts: dict[int, int] = {}
        for tokens, samples in sorted(self.histogram):
            check_count("lengths.histogram: tokens", tokens, at_most=MAX_TOKENS)
            check_count("lengths.histogram: samples", samples, at_most=10**15)
            counts[tokens] = counts.get(tokens, 0) + samples
        object.__setattr__(self, "histogram", tuple(counts.items()))

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return sum(samples for _, samples in self.histogram)

    @property
    def mean(self) -> float:
        """Mean tokens of a sample."""
        return sum(tokens * samples for tokens, samples in self.histogram) / self.num_samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.histogram[-1][0]

    def share_above(self, seq_len: int) -> float:
        """Share of the samples that are longer than a sequence, which cuts them."""
        return sum(samples for tokens, samples in self.histogram if tokens > seq_len) / self.num_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCounts:
    """Numbers of images of the samples of a data set, whose micro-batches are drawn from it at random.

    Tiles of a large image count as images, as the encoder sees them.
    """

    histogram: tuple[tuple[int, int], ...]  # (images of a sample, number of such samples), fewest first
    source: str = ""  # the file, or what was typed

    def __post_init__(self) -> None:
        counts: dict[int, int] = {}
        for images, samples in sorted(self.histogram):
            check_count("images.histogram: images", images, at_least=0, at_most=10**5)
            check_count("images.histogram: samples", samples, at_most=10**15)
            counts[images] = counts.get(images, 0) + samples
        if not any(counts):
            raise InputError("images.histogram has no images: give samples that have some, or the text model alone")
        object.__setattr__(self, "histogram", tuple(counts.items()))

    @property
    def mean(self) -> float:
        """Mean images of a sample."""
        images, samples = zip(*self.histogram, strict=True)
        return sum(map(int.__mul__, images, samples)) / sum(samples)

    @property
    def most(self) -> int:
        """Images of the sample that has most."""
        return self.histogram[-1][0]
