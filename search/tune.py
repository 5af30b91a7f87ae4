"""Tuning: an Optuna study whose trials are real runs of plans; it decides which plan to try next and when to stop.

This module uses no clock and no processes: the caller asks for a proposal, runs it, and reports the outcome.  All state
is in the study, so another program can continue after one was killed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Literal

import msgspec
import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoplan.base.version import __version__
from autoplan.search.storage import fingerprint, join_study
from autoplan.search.surrogate import RUN_SPREAD, MeasuredPlan, Surrogate, fit_chance, pool_runs
from autoplan.spec.estimate import probability_above
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.tune_report import TrialEnd

TOLERANCE = 0.02  # smaller gains do not count, as runs of one plan differ by as much
CHANCE = 0.05  # probability that any of some plans is better, below which they are given up
FIRST_CHANCE = 0.5  # minimum probability of fitting for the first plan to finish
MAX_ALIKE = 3  # trials that fail for the same reason before any has finished, so that the plans are not at fault
# Largest predicted slowdown relative to the best of plans to try: beyond it the surrogate gives a plan hardly any
# chance unless its step consists of entirely different components.
MARGIN = 0.3
MAX_RUNS = 3  # runs of a plan whose lead over another one is within the spread between runs
MAX_PLANS = 500  # more plans could not be distinguished by a few trials

STATES: Mapping[TrialEnd, TrialState] = {
    "measured": TrialState.COMPLETE,
    "slower": TrialState.PRUNED,
    "oom": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    "timeout": TrialState.FAIL,
    "lost": TrialState.FAIL,
    "cancelled": TrialState.FAIL,
}
# Attempts (of two per plan) used up by each outcome: a single lost job says nothing about its plan.
_TRIES: Mapping[TrialEnd, int] = {"cancelled": 0, "lost": 1}
Stop = Literal["separated", "alike", "exhausted", "failing"]

_AXES = (
    "tp", "cp", "pp", "vp", "schedule", "ep", "etp", "dp_replicate", "dp_shard", "sharding", "micro_batch",
    "global_batch", "recompute",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Outcome of a trial; `step_s` is set if steps were timed, `spread` is the standard deviation of its logarithm."""

    how: TrialEnd
    reason: str = ""
    step_s: float | None = None
    steps_s: tuple[float, ...] = ()  # of each step that counts, for those who look at the study
    spread: float = RUN_SPREAD
    peak_bytes: float | None = None
    other_load: float | None = None  # share of the machine used by others, if known
    clock_mhz: float | None = None  # of the slowest device, if known
    seconds: float = 0.0  # time for which it occupied the devices


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTrial:
    """A trial of the plan at index `at`; `result` is None while it is running as `job`."""

    number: int
    at: int
    job: str
    result: TrialResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningState:
    """State of a study: surrogate of all plans, and trials; `best` is the latest trial of the fastest plan."""

    surrogate: Surrogate
    trials: tuple[TunedTrial, ...]
    measured: tuple[MeasuredPlan, ...]  # timed plans over all their runs, the fastest first
    best: TunedTrial | None
    best_s: float | None  # step of that plan over all its runs
    ratio: float | None  # median of measured over predicted steps
    worth_trying: tuple[int, ...]  # untested plans that may still be better than the best
    next: int | None  # the next plan to try: one of these, or a repetition of one too close to the best
    stop: Stop | None


class Tuning:
    """Study of `plans`, driven by one program at a time."""

    def __init__(self, study: optuna.Study, storage: BaseStorage, plans: Sequence[RankedPlan]) -> None:
        self.plans: tuple[RankedPlan, ...] = tuple(plans[:MAX_PLANS])
        self._study, self._storage = study, storage
        words = {axis: sorted({getattr(plan.plan, axis) for plan in self.plans}) for axis in _AXES}
        self._distributions: dict[str, BaseDistribution] = {
            axis: CategoricalDistribution(values) for axis, values in words.items()
        }
        self._names = [_name(plan.plan) for plan in self.plans]

    @classmethod
    def joined(
        cls,
        storage: BaseStorage,
        problem: Problem,
        plans: Sequence[RankedPlan],
        *,
        name: str | None,
        about: Mapping[str, str],
    ) -> Tuning:
        """Join or create a study by name, or by `about` by default; raise InputError if it is about something else."""
        same = {
            "version": __version__,
            "model": problem.model.name,
            "cluster": f"{problem.cluster.name} of {problem.cluster.num_devices}",
            **about,
            "plans": fingerprint((problem, [plan.plan for plan in plans])),
        }
        name = name or f"{problem.model.name}-tune-{fingerprint(same)}"
        study, _ = join_study(storage, name, same, metric="seconds per sequence")
        return cls(study, storage, plans)

    def trials(self) -> tuple[TunedTrial, ...]:
        """Return all trials of these plans in starting order."""
        trials = self._study.get_trials(False)
        return tuple(_tuned(trial, self._names.index(trial.user_attrs["plan"])) for trial in trials)

    def begin(self, at: int) -> int:
        """Add a trial of a plan and return its number."""
        plan = self.plans[at].plan
        trial = create_trial(
            state=TrialState.RUNNING,
            params={axis: getattr(plan, axis) for axis in _AXES},
            distributions=self._distributions,
            user_attrs={"label": plan.describe(), "plan": self._names[at], "predicted_s": self.plans[at].step_s},
        )
        self._study.add_trial(trial)
        return max(trial.number for trial in self._study.get_trials(False))

    def started(self, number: int, job: str) -> None:
        """Record the job of a trial."""
        self._storage.set_trial_user_attr(self._id(number), "job", job)

    def tell(self, number: int, result: TrialResult) -> None:
        """Record the outcome of a trial; only the first report counts."""
        trial_id = self._id(number)
        at = self._names.index(self._study.get_trials(False)[number].user_attrs["plan"])
        global_batch = self.plans[at].plan.global_batch
        with suppress(UpdateFinishedTrialError):
            attributes = asdict(result)
            for step, step_s in enumerate(attributes.pop("steps_s"), start=1):
                self._storage.set_trial_intermediate_value(trial_id, step, step_s / global_batch)
            for name, value in attributes.items():
                self._storage.set_trial_user_attr(trial_id, name, value)
            # Feasible at 0 or less: a constraint that a model can learn, instead of a penalty.
            if result.how in ("measured", "slower", "oom"):
                optuna.Trial(self._study, trial_id).set_constraint("memory", float(result.how == "oom"))
            values = None
            if result.how == "measured":
                assert result.step_s is not None
                values = [result.step_s / global_batch]
            self._storage.set_trial_state_values(trial_id, STATES[result.how], values)

    def state(self) -> TuningState:
        """Return the current state and the best plan to try next."""
        return tuning_state(self.plans, self.trials())

    def _id(self, number: int) -> int:
        return self._study.get_trials(False)[number]._trial_id


def tuning_state(plans: Sequence[RankedPlan], trials: Sequence[TunedTrial]) -> TuningState:
    """Return the state of `plans` as a pure function of the trials."""
    ended = [(trial, trial.result) for trial in trials if trial.result is not None]
    timed = [
        MeasuredPlan(at=trial.at, step_s=result.step_s, spread=result.spread)
        for trial, result in ended
        if result.step_s is not None and result.how in ("measured", "slower")
    ]
    measured = pool_runs(timed)
    measured.sort(key=lambda plan: plan.step_s / plans[plan.at].plan.global_batch)
    surrogate = Surrogate.of(plans, measured)
    out_of_memory = [trial.at for trial, result in ended if result.how == "oom"]
    fits = fit_chance(plans, [plan.at for plan in measured], out_of_memory)
    finished = {trial.at: trial for trial, result in ended if result.how == "measured"}
    best = next((plan for plan in measured if plan.at in finished), None)
    tries: Counter[int] = Counter()
    for trial in trials:
        tries[trial.at] += _TRIES.get(trial.result.how, 2) if trial.result else 2
    untried = np.array([tries[at] < 2 for at in range(len(plans))], dtype=np.bool_)
    again: list[int] = []
    if best is None:
        likely = untried & (fits >= min(FIRST_CHANCE, fits[untried].max(initial=0.0))) & (fits > 0)
        candidates, worth = np.flatnonzero(untried & (fits > 0)), np.where(likely, -surrogate.mean, -np.inf)
    else:
        bar = float(surrogate.mean[best.at])
        chance = untried * fits * surrogate.chance_below(bar + math.log1p(-TOLERANCE))
        # The least likely plans are given up while their joint probability is below `CHANCE`.
        by_chance = np.argsort(chance)
        candidates = np.sort(by_chance[np.cumsum(chance[by_chance]) >= CHANCE])
        # Running trials are assumed to end as predicted.
        running = [
            MeasuredPlan(
                at=trial.at, step_s=float(np.exp(surrogate.mean[trial.at])) * plans[trial.at].plan.global_batch
            )
            for trial in trials
            if trial.result is None
        ]
        believed = Surrogate.of(plans, pool_runs([*timed, *running])) if running else surrogate
        worth = fits * believed.improvement(min([bar, *(float(surrogate.mean[plan.at]) for plan in running)]))
        again = _too_close(surrogate, measured, best)
    runs = Counter(trial.at for trial in trials if trial.result is None or trial.result.how != "cancelled")
    unfinished = {trial.at for trial in trials if trial.result is None}
    repeatable = [at for at in again if runs[at] < MAX_RUNS and at not in unfinished]
    following = (
        int(candidates[np.argmax(worth[candidates])])
        if len(candidates)
        else min(repeatable, key=runs.__getitem__, default=None)
    )
    return TuningState(
        surrogate=surrogate,
        trials=tuple(trials),
        measured=tuple(measured),
        best=finished[best.at] if best else None,
        best_s=best.step_s if best else None,
        ratio=float(np.median([plan.step_s / plans[plan.at].step_s for plan in measured])) if measured else None,
        worth_trying=tuple(candidates.tolist()),
        next=following,
        stop=_stop(ended, has_best=best is not None, is_left=following is not None, is_close=bool(again)),
    )


def _too_close(surrogate: Surrogate, measured: Sequence[MeasuredPlan], best: MeasuredPlan) -> list[int]:
    """Return the best plan and measured ones that may be faster given the spread of runs; empty if there are none."""
    lead = surrogate.mean - surrogate.mean[best.at] - math.log1p(-TOLERANCE)
    spread = np.hypot(surrogate.spread, surrogate.spread[best.at])
    rivals = [
        plan.at
        for plan in measured
        if plan is not best and probability_above(-float(lead[plan.at] / spread[plan.at])) >= CHANCE
    ]
    return [best.at, *rivals] if rivals else []


def _stop(
    ended: Sequence[tuple[TunedTrial, TrialResult]], *, has_best: bool, is_left: bool, is_close: bool
) -> Stop | None:
    if not is_left:
        return ("alike" if is_close else "separated") if has_best else "exhausted"
    last = [(result.how, re.sub(r"\d+", "", result.reason)) for _, result in ended[-MAX_ALIKE:]]  # except for numbers
    if not has_best and len(last) == MAX_ALIKE and len(set(last)) == 1 and last[0][0] != "oom":
        return "failing"
    return None


def _name(plan: ParallelPlan) -> str:
    return msgspec.json.encode(plan, order="sorted").decode()


def _tuned(trial: FrozenTrial, at: int) -> TunedTrial:
    attributes = trial.user_attrs
    result = None
    if trial.state.is_finished():
        names = [field.name for field in fields(TrialResult) if field.name in attributes]
        result = TrialResult(**{"how": "lost"} | {name: attributes[name] for name in names})
    return TunedTrial(number=trial.number, at=at, job=attributes.get("job", ""), result=result)
