"""The largest of several random values."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from autoplan.base.arrays import Floats, Ints


def largest_of(counts: Ints) -> Floats:
    """Return the mean of the largest of `counts` normal values, in standard deviations above theirs: 0 for one.

    Blom's approximation (`modelling` E6).
    """
    distinct, at = np.unique(counts, return_inverse=True)
    largest = np.array([NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) for count in distinct.tolist()])
    return largest[at]
