"""The part of a problem that the rules of frameworks look at beside the plan."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.spec.model import ModelSpec
from autoplan.spec.training import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What rules look at beside the plan."""

    model: ModelSpec
    training: TrainingSpec
    num_devices: int
