"""Which cell is looked at next?  An Optuna sampler that proposes the cells it is given, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from search.space import Cell

AXES = tuple(field.name for field in fields(Cell))


class CellSampler(BaseSampler):
    """Proposes queued cells, first in, first out; what is queued and when to stop is the caller's decision."""

    def __init__(self, num_devices: int) -> None:
        self.distributions: dict[str, BaseDistribution] = {axis: IntDistribution(1, num_devices) for axis in AXES}
        self._queue: deque[Cell] = deque()

    def queue(self, cells: Iterable[Cell]) -> None:
        """Propose `cells` after those that wait already."""
        self._queue.extend(cells)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every axis of a cell: they are proposed together, never one by one."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The degrees of the next cell."""
        return asdict(self._queue.popleft())

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Not a case that a cell admits: its axes only make sense together."""
        raise NotImplementedError(f"{param_name} is an axis of a cell and is not sampled on its own")
