"""Which plans does a framework admit?  Vectorised predicates, each with its place in the framework's source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.model import ModelSpec
from autoplan.plan import ParallelPlan, PlanBatch
from autoplan.training import TrainingSpec

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What rules look at beside the plan."""

    model: ModelSpec
    training: TrainingSpec
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One condition: `holds` tells for every plan of a batch; `says` is the rule with the values of one plan."""

    source: str  # file and line in the framework, at the commit that the module names
    holds: Callable[[Setting, PlanBatch], Bools]
    says: Callable[[Setting, ParallelPlan], str]


def all_true(batch: PlanBatch) -> Bools:
    """The answer of a rule that does not apply to a model: every plan obeys it."""
    return np.ones(len(batch), dtype=np.bool_)


def legal(rules: tuple[Rule, ...], setting: Setting, batch: PlanBatch) -> Bools:
    """Which plans obey every rule."""
    result = all_true(batch)
    for rule in rules:
        result &= rule.holds(setting, batch)
    return result


def broken(rules: tuple[Rule, ...], setting: Setting, plan: ParallelPlan) -> tuple[str, ...]:
    """What a plan breaks, one line a rule; empty where it is legal."""
    batch = PlanBatch.of([plan], setting.model.num_layers)
    return tuple(
        f"{rule.says(setting, plan)} ({rule.source})" for rule in rules if not bool(rule.holds(setting, batch)[0])
    )
