"""Time, cost and energy of a whole training run, and the best plans for these objectives."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.spec.search_result import RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of training with a plan beside its step; None where they need something that was not given."""

    num_devices: int
    seconds_per_sequence: float
    memory_bytes: float
    goodput: float  # the share of a run's time that its steps take
    mtbf_s: float  # of the whole job
    checkpoint_interval_s: float
    tokens_per_s: float  # of all devices, while they run
    cost_per_token: float | None  # in the currency of price_per_device_hour, like all costs; goodput counts
    energy_per_token_j: float | None  # goodput counts
    run_s: float | None  # until all tokens are trained, failures included
    device_hours: float | None  # of that run
    cost: float | None
    energy_j: float | None
    tokens_in_budget: float | None  # trained in the device hours that there are
    budget_s: float | None  # for which these last


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A plan for a node count, and the figures of a run with it."""

    num_nodes: int
    plan: RankedPlan
    figures: RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOutcome:
    """Result for a node count: its best plan, or the bound that excluded it."""

    num_nodes: int
    best: RunPlan | None  # in the first objective
    least: RunFigures | None  # what no plan on this many nodes beats
    why: str = ""  # there is no best plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Result of a search for objectives other than the step time."""

    objectives: tuple[str, ...]
    best: RunPlan
    front: tuple[RunPlan, ...]  # all that no plan beats in every objective, the best of the first objective first
    sizes: tuple[SizeOutcome, ...]
