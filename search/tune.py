"""Which plan is tried next, and when is the best one known?  An Optuna study whose trials are real runs of plans.

No clock and no process is touched here: who runs the trials asks, starts what is proposed, and tells what came of it.
All that is known is in the study, so that another program goes on where one was killed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

import msgspec
import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoplan import __version__
from autoplan.search.belief import RUN_SPREAD, Belief, Measured, fit_chance, pooled
from autoplan.search.storage import fingerprint, join_study
from autoplan.spec.estimate import probability_above
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.tune_report import TrialEnd

TOLERANCE = 0.02  # a plan that is faster by less is no better: runs of one plan differ by as much
CHANCE = 0.05  # that any of some plans is better, below which they are not expected to be
FIRST_CHANCE = 0.5  # of fitting, from which on a plan may be the first one to finish
MOST_ALIKE = 3  # trials that fail for the same reason before any has finished: the fault is none of the plans'
# How much slower than the best a plan may be predicted and still be tried: beyond, the belief gives it no such chance
# unless it spends its step on other things altogether.
MARGIN = 0.3
MOST_RUNS = 3  # of a plan whose lead over another one is within what runs of one plan differ by
MOST_PLANS = 500  # of which more would not be told apart by a few trials

STATES: Mapping[TrialEnd, TrialState] = {
    "measured": TrialState.COMPLETE,
    "slower": TrialState.PRUNED,
    "oom": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    "timeout": TrialState.FAIL,
    "lost": TrialState.FAIL,
    "cancelled": TrialState.FAIL,
}
# How much of the two tries that a plan has each end takes: a job that is lost, once, says nothing of its plan.
_TRIES: Mapping[TrialEnd, int] = {"cancelled": 0, "lost": 1}
Stop = Literal["separated", "alike", "exhausted", "failing"]

_AXES = (
    "tp", "cp", "pp", "vp", "schedule", "ep", "etp", "dp_replicate", "dp_shard", "sharding", "micro_batch",
    "global_batch", "recompute",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What came of a trial; `step_s` is there where steps were timed, `spread` is that of its logarithm."""

    how: TrialEnd
    reason: str = ""
    step_s: float | None = None
    spread: float = RUN_SPREAD
    peak_bytes: float | None = None
    seconds: float = 0.0  # that it held the devices


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTrial:
    """A trial of the plan at index `at`; `result` is None as long as it is under way, as `job`."""

    number: int
    at: int
    job: str
    result: TrialResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What is known at one moment: the belief about all plans and the trials; `best` ran the fastest plan last."""

    belief: Belief
    trials: tuple[TunedTrial, ...]
    measured: tuple[Measured, ...]  # plans that were timed, the fastest first, each over all its runs
    best: TunedTrial | None
    best_s: float | None  # of a step of that plan, over all its runs
    ratio: float | None  # measured over predicted steps, their median
    left: tuple[int, ...]  # plans not tried that may still be better than the best
    next: int | None  # the plan to try: of these, or again of those that are too close to tell
    stop: Stop | None


class Tuning:
    """The study of `plans`, which one program drives at a time."""

    def __init__(self, study: optuna.Study, storage: BaseStorage, plans: Sequence[RankedPlan]) -> None:
        self.plans = tuple(plans[:MOST_PLANS])
        self._study, self._storage = study, storage
        words = {axis: sorted({getattr(one.plan, axis) for one in self.plans}) for axis in _AXES}
        self._distributions: dict[str, BaseDistribution] = {
            axis: CategoricalDistribution(values) for axis, values in words.items()
        }
        self._names = [_name(one.plan) for one in self.plans]

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
        """The study of that name in a storage, made if it is not there; refused if it is about something else.

        `about` says how plans are run; without a name the study is called after all that it is about.
        """
        same = {
            "version": __version__,
            "model": problem.model.name,
            "cluster": f"{problem.cluster.name} of {problem.cluster.num_devices}",
            **about,
            "plans": fingerprint((problem, [one.plan for one in plans])),
        }
        study, _ = join_study(storage, name or f"{problem.model.name}-tune-{fingerprint(same)}", same)
        return cls(study, storage, plans)

    def trials(self) -> tuple[TunedTrial, ...]:
        """All trials of these plans, in the order of their start."""
        return tuple(_tuned(one, self._names.index(one.user_attrs["plan"])) for one in self._study.get_trials(False))

    def begin(self, at: int) -> int:
        """Put up a trial of a plan; its number."""
        plan = self.plans[at].plan
        trial = create_trial(
            state=TrialState.RUNNING,
            params={axis: getattr(plan, axis) for axis in _AXES},
            distributions=self._distributions,
            user_attrs={"plan": self._names[at], "predicted_s": self.plans[at].step_s},
        )
        self._study.add_trial(trial)
        return max(one.number for one in self._study.get_trials(False))

    def started(self, number: int, job: str) -> None:
        """Say which job runs a trial."""
        self._storage.set_trial_user_attr(self._id(number), "job", job)

    def tell(self, number: int, result: TrialResult) -> None:
        """Say what came of a trial; a second word on it is not heard."""
        trial_id = self._id(number)
        with suppress(UpdateFinishedTrialError):
            for name, value in asdict(result).items():
                self._storage.set_trial_user_attr(trial_id, name, value)
            # Feasible at 0 or less: what a model of the constraint learns from, in place of a penalty.
            if result.how in ("measured", "slower", "oom"):
                optuna.Trial(self._study, trial_id).set_constraint("memory", float(result.how == "oom"))
            values = None
            if result.how == "measured":
                assert result.step_s is not None
                at = self._names.index(self._study.get_trials(False)[number].user_attrs["plan"])
                values = [result.step_s / self.plans[at].plan.global_batch]
            self._storage.set_trial_state_values(trial_id, STATES[result.how], values)

    def view(self) -> View:
        """What is known now, and what is best tried next."""
        return look(self.plans, self.trials())

    def _id(self, number: int) -> int:
        return self._study.get_trials(False)[number]._trial_id


def look(plans: Sequence[RankedPlan], trials: Sequence[TunedTrial]) -> View:
    """What trials tell of `plans`: a function of them alone."""
    ended = [(one, one.result) for one in trials if one.result is not None]
    timed = [
        Measured(at=one.at, step_s=result.step_s, spread=result.spread)
        for one, result in ended
        if result.step_s is not None and result.how in ("measured", "slower")
    ]
    measured = pooled(timed)
    measured.sort(key=lambda one: one.step_s / plans[one.at].plan.global_batch)
    belief = Belief.of(plans, measured)
    fits = fit_chance(plans, [one.at for one in measured], [one.at for one, result in ended if result.how == "oom"])
    finished = {one.at: one for one, result in ended if result.how == "measured"}
    best = next((one for one in measured if one.at in finished), None)
    tries: Counter[int] = Counter()
    for one in trials:
        tries[one.at] += _TRIES.get(one.result.how, 2) if one.result else 2
    untried = np.array([tries[at] < 2 for at in range(len(plans))], dtype=np.bool_)
    again: list[int] = []
    if best is None:
        likely = untried & (fits >= min(FIRST_CHANCE, fits[untried].max(initial=0.0))) & (fits > 0)
        left, worth = np.flatnonzero(untried & (fits > 0)), np.where(likely, -belief.mean, -np.inf)
    else:
        bar = float(belief.mean[best.at])
        chance = untried * fits * belief.chance_below(bar + math.log1p(-TOLERANCE))
        # The least likely are given up, as long as together they are.
        by_chance = np.argsort(chance)
        left = np.sort(by_chance[np.cumsum(chance[by_chance]) >= CHANCE])
        # What runs now is taken to come out as believed.
        running = [
            Measured(at=one.at, step_s=float(np.exp(belief.mean[one.at])) * plans[one.at].plan.global_batch)
            for one in trials
            if one.result is None
        ]
        believed = Belief.of(plans, pooled([*timed, *running])) if running else belief
        worth = fits * believed.improvement(min([bar, *(float(belief.mean[one.at]) for one in running)]))
        again = _too_close(belief, measured, best)
    runs = Counter(one.at for one in trials if one.result is None or one.result.how != "cancelled")
    under_way = {one.at for one in trials if one.result is None}
    repeatable = [at for at in again if runs[at] < MOST_RUNS and at not in under_way]
    following = int(left[np.argmax(worth[left])]) if len(left) else min(repeatable, key=runs.__getitem__, default=None)
    return View(
        belief=belief,
        trials=tuple(trials),
        measured=tuple(measured),
        best=finished[best.at] if best else None,
        best_s=best.step_s if best else None,
        ratio=float(np.median([one.step_s / plans[one.at].step_s for one in measured])) if measured else None,
        left=tuple(left.tolist()),
        next=following,
        stop=_stop(ended, has_best=best is not None, is_left=following is not None, is_close=bool(again)),
    )


def _too_close(belief: Belief, measured: Sequence[Measured], best: Measured) -> list[int]:
    """The best plan and those that may be faster, all measured: runs of one plan differ by as much as these do.

    Empty where the best is told from all others.
    """
    lead = belief.mean - belief.mean[best.at] - math.log1p(-TOLERANCE)
    spread = np.hypot(belief.spread, belief.spread[best.at])
    rivals = [
        one.at
        for one in measured
        if one is not best and probability_above(-float(lead[one.at] / spread[one.at])) >= CHANCE
    ]
    return [best.at, *rivals] if rivals else []


def _stop(
    ended: Sequence[tuple[TunedTrial, TrialResult]], *, has_best: bool, is_left: bool, is_close: bool
) -> Stop | None:
    if not is_left:
        return ("alike" if is_close else "separated") if has_best else "exhausted"
    last = [(result.how, re.sub(r"\d+", "", result.reason)) for _, result in ended[-MOST_ALIKE:]]  # but for numbers
    if not has_best and len(last) == MOST_ALIKE and len(set(last)) == 1 and last[0][0] != "oom":
        return "failing"
    return None


def _name(plan: ParallelPlan) -> str:
    """The plan as text, the same for the same plan."""
    return msgspec.json.encode(plan, order="sorted").decode()


def _tuned(trial: FrozenTrial, at: int) -> TunedTrial:
    told = trial.user_attrs
    result = None
    if trial.state.is_finished():
        result = TrialResult(
            how=told.get("how", "lost"),
            reason=told.get("reason", ""),
            step_s=told.get("step_s"),
            spread=told.get("spread", RUN_SPREAD),
            peak_bytes=told.get("peak_bytes"),
            seconds=told.get("seconds", 0.0),
        )
    return TunedTrial(number=trial.number, at=at, job=told.get("job", ""), result=result)
