"""A collective of a step: what is sent between which ranks, and how often.

The modules of this folder describe the collectives of each parallelism once, with the part of their time that
computation does not hide. Prices, traffic reports, lower bounds and mixed clusters all use these descriptions.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol, Self

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.spec.operations import Operation


class LinkTimes(Protocol):
    """Links that price collectives."""

    def seconds(
        self, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1, /
    ) -> Floats:
        """Return the time of one collective of every plan."""
        ...

    def take(self, rows: Ints) -> Self:
        """Return the links of the plans at the given indices."""
        ...


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective or point-to-point message of every plan, and how often it runs.

    Arrays have one element per plan; for collectives at the end of a step buffers and counts have the shape (plans,
    stages), and groups (plans, 1).
    """

    communicator: str
    operation: Operation
    group: ProcessGroup
    buffer_bytes: Floats
    _: KW_ONLY
    # Number of runs per pass of its block, end or hop, or after all passes of a step.
    forward: Floats | float = 0.0
    backward: Floats | float = 0.0
    at_end: Floats | float = 0.0
    is_repeated: bool = True  # whether a recomputed forward pass runs it again
    copies: Ints | int = 1  # of each token in the buffer

    @property
    def _runs(self) -> Bools:
        """Return which plans have the collective: shape (plans)."""
        runs = (self.forward + self.backward + self.at_end > 0) & (self.group.size > 1)
        return np.asarray(runs if runs.ndim == 1 else runs.any(axis=1))

    def seconds(self, links: LinkTimes) -> Floats:
        """Return the time of one run, 0 for plans without the collective."""
        if not self.buffer_bytes.any():  # e.g. experts of a dense model
            return np.zeros_like(self.buffer_bytes)
        runs = self._runs
        if runs.all():
            return links.seconds(self.operation, self.group, self.buffer_bytes, self.copies)
        times, rows = np.zeros_like(self.buffer_bytes), np.flatnonzero(runs)
        if len(rows):
            group, buffer_bytes = self.group.take(rows), self.buffer_bytes[rows]
            copies = self.copies if isinstance(self.copies, int) else self.copies[rows]
            times[rows] = links.take(rows).seconds(self.operation, group, buffer_bytes, copies)
        return times
