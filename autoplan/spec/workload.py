"""Model, training and number of devices, by which the rules of frameworks judge a plan."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.spec.model import ModelSpec
from autoplan.spec.training import TrainingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Input of the rules of frameworks beside the plan."""

    model: ModelSpec
    training: TrainingSpec
    num_devices: int
