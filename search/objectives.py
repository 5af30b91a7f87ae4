"""Objectives of a run, all minimised, and the figures from which they are computed.

On a fixed number of nodes every objective except `devices` is monotone in one of three *measures* of a plan: seconds
per sequence, joules per sequence, or memory.  A proof for a measure therefore holds for its objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.base.errors import InputError
from autoplan.base.names import suggestion
from autoplan.base.units import check_positive
from autoplan.cost.energy import step_energy_j, waiting_power_w
from autoplan.cost.goodput import Reliability
from autoplan.cost.input_rate import slowest_input
from autoplan.cost.kernels.sequences import useful
from autoplan.search.ranking import seconds_per_sequence
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.problem import Problem
from autoplan.spec.run_report import RunFigures
from autoplan.spec.search_result import RankedPlan
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import MixedCluster

Measure = Literal["time", "energy", "memory"]


def measure_bounds(problem: Problem, measures: Sequence[Measure], pace: Floats, least_bytes: Floats) -> Floats:
    """Return lower bounds on all measures from bounds on seconds per sequence and memory: shape (plans, measures)."""
    bounds: dict[Measure, Callable[[], Floats]] = {
        "time": lambda: pace,
        "energy": lambda: waiting_power_w(problem.cluster) * pace,
        "memory": lambda: least_bytes,
    }
    return np.stack([bounds[name]() for name in measures], axis=-1)


def measured(problem: Problem, measures: Sequence[Measure], costs: CostEstimate) -> Floats:
    """Return every measure of every plan: shape (plans, measures)."""
    values: dict[Measure, Callable[[], Floats]] = {
        "time": lambda: seconds_per_sequence(costs),
        "energy": lambda: step_energy_j(problem.cluster, costs.terms_s, costs.step_s) / costs.batch.global_batch,
        "memory": lambda: costs.memory_bytes,
    }
    return np.stack([values[name]() for name in measures], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Facts and limits of a run in addition to its problem."""

    reliability: Reliability = field(default_factory=Reliability)
    tokens: float | None = None  # tokens to train
    deadline_s: float | None = None  # for these tokens, or for the use of the device hours
    device_hours: float | None = None  # at most
    power_usage_effectiveness: float = 1.0  # power of the building relative to its nodes

    def __post_init__(self) -> None:
        for name in ("tokens", "deadline_s", "device_hours", "power_usage_effectiveness"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        if self.power_usage_effectiveness < 1:
            raise InputError(
                f"power usage effectiveness (--pue) is the building's power over that of its nodes, at least 1, got "
                f"{self.power_usage_effectiveness:g}"
            )
        if self.deadline_s is not None and self.tokens is None and self.device_hours is None:
            raise InputError("a deadline needs tokens to train, or device hours")

    @property
    def is_bounded(self) -> bool:
        """Return whether the run has limits that some plans may exceed."""
        return self.deadline_s is not None or (self.device_hours is not None and self.tokens is not None)

    def admits(self, figures: RunFigures) -> bool:
        """Return whether the figures meet the deadline and the device hours."""
        if self.deadline_s is not None:
            takes_s = figures.run_s if figures.run_s is not None else figures.budget_s
            if takes_s is None or takes_s > self.deadline_s:
                return False
        hours = figures.device_hours
        return self.device_hours is None or hours is None or hours <= self.device_hours


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective to minimise; on a fixed number of nodes it is non-decreasing in its measure."""

    name: str
    measure: Measure
    cost: Callable[[RunFigures], float | None]  # positive; None if an input is missing
    needs: str = ""  # the missing input


OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective(name="step-time", measure="time", cost=lambda run: run.seconds_per_sequence),
        Objective(name="tokens-per-device", measure="time", cost=lambda run: run.num_devices / run.tokens_per_s),
        Objective(
            name="cost-per-token",
            measure="time",
            cost=lambda run: run.cost_per_token,
            needs="price_per_device_hour: give --price, or set it in the cluster file",
        ),
        Objective(
            name="energy-per-token",
            measure="energy",
            cost=lambda run: run.energy_per_token_j,
            needs="power_w, the power of a node without its devices: set it under [host] in the cluster file",
        ),
        Objective(
            name="time-to-tokens",
            measure="time",
            cost=lambda run: run.run_s,
            needs="the number of tokens to train: give --tokens",
        ),
        Objective(name="devices", measure="time", cost=lambda run: run.num_devices),
        Objective(
            name="tokens",
            measure="time",
            cost=lambda run: None if run.tokens_in_budget is None else 1.0 / run.tokens_in_budget,
            needs="the budget of device hours: give --gpu-hours",
        ),
        Objective(name="memory-headroom", measure="memory", cost=lambda run: run.memory_bytes),
    )
}


def find_objectives(names: Iterable[str]) -> tuple[Objective, ...]:
    """Return the objectives with these names, without duplicates."""
    objectives = {}
    for name in names:
        key = name.strip().lower().replace("_", "-")
        if key not in OBJECTIVES:
            raise InputError(f"--objective {name!r} is unknown; {suggestion(key, OBJECTIVES)}")
        objectives[key] = OBJECTIVES[key]
    return tuple(objectives.values())


def default_objective(run: Run) -> str:
    """Return the default objective of a run description without objectives."""
    if run.tokens is not None:
        return "devices" if run.deadline_s is not None else "time-to-tokens"
    return "tokens" if run.device_hours is not None else "step-time"


def measures_of(objectives: Iterable[Objective], run: Run) -> tuple[Measure, ...]:
    """Return the measures of the objectives without duplicates, plus time if plans may be too slow for the run."""
    measures: list[Measure] = [objective.measure for objective in objectives]
    return tuple(dict.fromkeys([*measures, "time"] if run.is_bounded else measures))


def costs_of(objectives: Iterable[Objective], figures: RunFigures) -> tuple[float, ...]:
    """Return the value of every objective, to be minimised."""
    costs = []
    for objective in objectives:
        cost = objective.cost(figures)
        if cost is None:
            raise InputError(f"--objective {objective.name} needs {objective.needs}")
        costs.append(cost)
    return tuple(costs)


def figures_at(
    problem: Problem | MixedProblem,
    run: Run,
    *,
    seconds_per_sequence: float,
    joules_per_sequence: float | None,
    memory_bytes: float,
) -> RunFigures:
    """Return the figures of a plan with these measures, or bounds on figures from bounds on measures."""
    cluster, seq_len = problem.cluster, useful(problem.training).tokens
    devices = cluster.num_devices
    goodput = run.reliability.goodput(devices)
    delivered_s, _ = slowest_input(problem.training, cluster.num_nodes)
    if delivered_s > seconds_per_sequence:
        if joules_per_sequence is not None:
            joules_per_sequence += waiting_power_w(cluster) * (delivered_s - seconds_per_sequence)
        seconds_per_sequence = delivered_s
    tokens_per_s = seq_len / seconds_per_sequence
    hours_per_token = devices / 3600.0 / (tokens_per_s * goodput)
    price = cluster.price_per_device_hour
    joules = None
    if joules_per_sequence is not None:
        joules = run.power_usage_effectiveness * joules_per_sequence / seq_len / goodput
    tokens = run.tokens
    return RunFigures(
        num_devices=devices,
        seconds_per_sequence=seconds_per_sequence,
        memory_bytes=memory_bytes,
        goodput=goodput,
        mtbf_s=run.reliability.mtbf_s(devices),
        checkpoint_interval_s=run.reliability.interval_s(devices),
        tokens_per_s=tokens_per_s,
        cost_per_token=None if price is None else price * hours_per_token,
        energy_per_token_j=joules,
        run_s=None if tokens is None else tokens * hours_per_token * 3600.0 / devices,
        device_hours=None if tokens is None else tokens * hours_per_token,
        cost=None if tokens is None or price is None else tokens * price * hours_per_token,
        energy_j=None if tokens is None or joules is None else tokens * joules,
        tokens_in_budget=None if run.device_hours is None else run.device_hours / hours_per_token,
        budget_s=None if run.device_hours is None else run.device_hours / devices * 3600.0,
    )


def measures_of_plan(problem: Problem, measures: Sequence[Measure], plan: RankedPlan) -> tuple[float, ...]:
    """Return every measure of a plan."""
    values: dict[Measure, Callable[[], float]] = {
        "time": lambda: plan.s_per_sequence,
        "energy": lambda: _joules_per_sequence(problem, plan),
        "memory": lambda: plan.memory_bytes,
    }
    return tuple(values[name]() for name in measures)


def _joules_per_sequence(problem: Problem | MixedProblem, plan: RankedPlan | MixedCost) -> float:
    terms = {name: np.array(value) for name, value in plan.terms_s.items()}
    return float(step_energy_j(problem.cluster, terms, np.array(plan.step_s))) / plan.plan.global_batch


def figures(problem: Problem | MixedProblem, run: Run, plan: RankedPlan | MixedCost) -> RunFigures:
    """Return the figures of a run with a plan."""
    return figures_at(
        problem,
        run,
        seconds_per_sequence=plan.s_per_sequence,
        joules_per_sequence=_joules_per_sequence(problem, plan) if _has_power(problem.cluster) else None,
        memory_bytes=plan.memory_bytes,
    )


def least_figures(
    problem: Problem | MixedProblem, run: Run, *, seconds_per_sequence: float, memory_bytes: float
) -> RunFigures:
    """Return lower bounds on figures from bounds on time and memory, with at least the power of waiting devices."""
    joules = waiting_power_w(problem.cluster) * seconds_per_sequence if _has_power(problem.cluster) else None
    return figures_at(
        problem,
        run,
        seconds_per_sequence=seconds_per_sequence,
        joules_per_sequence=joules,
        memory_bytes=memory_bytes,
    )


def _has_power(cluster: ClusterSpec | MixedCluster) -> bool:
    """Return whether the power of all parts is known, and therefore the energy."""
    return all(part.host.power_w is not None for part in cluster.parts)
