"""How long does a collective take whose members sit in several parts of a mixed cluster?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.network.links import Links
from autoplan.spec.timing import NO_TIMINGS, Calibration
from autoplan.topology.levels import Gaps, Level, Topology


def links_between(level: Level, calibration: Calibration) -> Links:
    """What joins two parts, as links of one level."""
    slower = Level(
        name=level.name,
        num_devices=level.num_devices,
        bytes_per_s=level.bytes_per_s / calibration.scale_out,
        latency_s=level.latency_s,
        half_rate_bytes=level.half_rate_bytes,
    )
    return Links(topology=Topology(levels=(slower,)), timings=NO_TIMINGS, domain=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """Hierarchical collectives as one part sees them: inside the part first, then every member its slice across.

    Of a group of more than one rank `inside` members are in this part, and `islands` parts have members; both have one
    element per buffer.
    """

    own: Links
    between: Links
    inside: Ints
    islands: Ints

    def all_reduce_s(self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None) -> Floats:
        """Time of an all-reduce of `buffer_bytes` per rank."""
        inside, islands = self._members(size)
        across = self.between.all_reduce_s(np.ones_like(stride), islands, buffer_bytes / inside)
        return self.own.all_reduce_s(stride, inside, buffer_bytes, gaps) + across

    def all_gather_s(self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None) -> Floats:
        """Time of an all-gather that ends with `buffer_bytes` on every rank."""
        inside, islands = self._members(size)
        across = self.between.all_gather_s(np.ones_like(stride), islands, buffer_bytes / inside)
        return self.own.all_gather_s(stride, inside, buffer_bytes, gaps) + across

    def reduce_scatter_s(self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None) -> Floats:
        """Time of a reduce-scatter of `buffer_bytes` per rank."""
        inside, islands = self._members(size)
        across = self.between.reduce_scatter_s(np.ones_like(stride), islands, buffer_bytes / inside)
        return self.own.reduce_scatter_s(stride, inside, buffer_bytes, gaps) + across

    def _members(self, size: Ints) -> tuple[Ints, Ints]:
        return np.where(size > 1, self.inside, 1), np.where(size > 1, self.islands, 1)
