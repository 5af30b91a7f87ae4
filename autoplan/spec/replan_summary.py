"""Summary of a replan after a cluster lost nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """A plan in words, and its costs."""

    plan: str
    num_devices: int
    step_s: float
    memory_bytes: float  # on the device with the most


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanSummary:
    """The plan before and after nodes were lost, and the cost of switching."""

    nodes_before: int
    nodes_left: int
    nodes_used: int  # by the new plan
    before: PlanFigures
    after: PlanFigures
    same_layout: PlanFigures | None  # the plan of before with fewer replicas; None where there is no such plan
    kept_share: float  # of the tokens a second of before
    # Of the devices, if the plan stays and the lost nodes, in different groups, stop their replicas, or with unequal
    # tensor-parallel degrees their tensor-parallel groups alone.
    usable_replicas: float
    usable_tensor_groups: float
    checkpoint_bytes: float
    cuts_anew: bool  # ranks hold other parts of weights and states than before
    load_s: float | None  # of the checkpoint; None where the rate of the storage was not given
    checkpoint_interval_s: float | None  # that loses least, by failures and the time that a checkpoint takes
