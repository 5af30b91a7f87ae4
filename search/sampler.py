"""Optuna samplers over the degrees of a cell, for searches that are not ordered by bounds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from autoplan.base.errors import InputError
from autoplan.search.cells import Cell

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

SAMPLERS = ("tpe", "gp", "nsga2", "cmaes", "random")
_NEEDS = {"gp": "torch", "cmaes": "cmaes"}  # packages that Optuna imports for them
FREE_AXES = ("pp", "tp", "cp", "ep", "etp", "dp_replicate")  # dp_shard follows from the remaining devices
WARM_CELLS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Search of `trials` cells proposed by one of `SAMPLERS`; if `warm`, cells with the smallest bounds come first."""

    name: str
    trials: int
    seed: int = 0
    warm: bool = True

    def __post_init__(self) -> None:
        if self.name not in SAMPLERS:
            raise InputError(f"sampler {self.name!r} is unknown: use bound, {', '.join(SAMPLERS)}")
        if self.trials < 1:
            raise InputError(f"trials must be at least 1, got {self.trials}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed must be from 0 to {2**32 - 1}, got {self.seed}")
        needed = _NEEDS.get(self.name)
        if needed and find_spec(needed) is None:
            raise InputError(f"sampler {self.name} needs {needed}: pip install 'autoplan[samplers]'")


def make_sampler(name: str, seed: int | None) -> BaseSampler:
    """Return Optuna's sampler of that name with its default settings."""
    import optuna

    samplers = optuna.samplers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "tpe":
            return samplers.TPESampler(seed=seed)
        if name == "gp":
            return samplers.GPSampler(seed=seed)
        if name == "nsga2":
            return samplers.NSGAIISampler(seed=seed)
        if name == "cmaes":
            return samplers.CmaEsSampler(seed=seed)
        assert name == "random", name
        return samplers.RandomSampler(seed=seed)


class Axes:
    """Mapping between proposals and cells: per axis a number from 0 to 1 selects among the values still possible.

    Values are ordered, so samplers can exploit proximity.  Degrees themselves are unsuitable parameters: they have to
    divide the devices together, which nearly all combinations do not.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        from optuna.distributions import FloatDistribution

        self._cells = cells
        self.distributions: dict[str, BaseDistribution] = {axis: FloatDistribution(0.0, 1.0) for axis in FREE_AXES}

    def cell(self, params: Mapping[str, float]) -> int:
        """Return the index of the proposed cell."""
        matching: Sequence[int] = range(len(self._cells))
        for axis in FREE_AXES:
            values = self._values(matching, axis)
            chosen = values[min(int(params[axis] * len(values)), len(values) - 1)]
            matching = [at for at in matching if getattr(self._cells[at], axis) == chosen]
        return matching[0]

    def params(self, cell: int) -> dict[str, float]:
        """Return a proposal that selects a cell."""
        matching: Sequence[int] = range(len(self._cells))
        params = {}
        for axis in FREE_AXES:
            value, values = getattr(self._cells[cell], axis), self._values(matching, axis)
            params[axis] = (values.index(value) + 0.5) / len(values)
            matching = [at for at in matching if getattr(self._cells[at], axis) == value]
        return params

    def _values(self, cells: Sequence[int], axis: str) -> list[int]:
        return sorted({getattr(self._cells[at], axis) for at in cells})
