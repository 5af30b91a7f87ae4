"""Measured trials of plans and their outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.spec.plan import ParallelPlan

# How a trial ended: its step was measured; its first steps were too slow to go on; memory ran out; it failed; it took
# too long; nobody can say what became of its job; it was ended because the tuning was.
TrialEnd = Literal["measured", "slower", "oom", "failed", "timeout", "lost", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPlan:
    """A plan that was run: what was predicted of its step, what was measured, and how the run ended."""

    number: int
    plan: ParallelPlan
    predicted_s: float
    measured_s: float | None  # of the steps that were timed, also of a run that was ended after the first of them
    spread: float | None  # standard deviation of that time's logarithm
    end: TrialEnd
    reason: str
    seconds: float  # that it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """Result of measured trials."""

    ended: str  # why there were no more of them, in words
    is_separated: bool  # no plan is left that is likely to be faster
    best: TriedPlan | None  # the last run of the fastest plan
    best_s: float | None  # of a step of that plan: the geometric mean of its runs
    trials: tuple[TriedPlan, ...]
    candidates: int
    left: int  # of them, plans that were not run and may still be faster
    ratio: float | None  # of measured to predicted steps, the median of the trials
    gpu_hours: float
