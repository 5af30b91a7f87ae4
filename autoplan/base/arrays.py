"""Types of numpy arrays by element type, and their sum."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def add_up(terms: Iterable[Floats]) -> Floats:
    """Sum of arrays in their order, so that a plan's sum does not depend on the batch that it stands in."""
    total: Floats = np.zeros(())
    for term in terms:
        total = total + term
    return total
