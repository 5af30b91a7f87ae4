"""Time of collectives whose members are in several parts of a mixed cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Ints, Rows
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.links import Links
from autoplan.spec.calibration import Calibration
from autoplan.spec.operations import Operation
from autoplan.spec.timing import NO_TIMINGS
from autoplan.topology.levels import Level, Topology


def links_between(level: Level, calibration: Calibration) -> Links:
    """Links of one level between two parts."""
    slower = Level(
        name=level.name,
        num_devices=level.num_devices,
        bytes_per_s=level.bytes_per_s / calibration.scale_out,
        latency_s=level.latency_s,
        half_rate_bytes=level.half_rate_bytes,
    )
    return Links(topology=Topology(levels=(slower,)), timings=NO_TIMINGS, domain=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands(Rows):
    """Hierarchical collectives from the view of one part: first inside the part, then each member's slice across parts.

    Members in this part are among `span` neighbouring ranks, and a group that extends beyond these has members in
    `islands` parts; both have one element per buffer.
    """

    own: Links
    between: Links
    span: Ints
    islands: Ints

    def seconds(
        self, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, copies: Ints | int = 1
    ) -> Floats:
        """Time of one collective."""
        inside = np.clip(self.span // group.stride, 1, group.size)
        islands = np.where(inside < group.size, self.islands, 1)
        across = ProcessGroup(np.ones_like(group.stride), islands)
        return self.own.seconds(operation, group._replace(size=inside), buffer_bytes, copies) + self.between.seconds(
            operation, across, buffer_bytes / inside, copies
        )
