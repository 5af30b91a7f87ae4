"""Measured outcome of a training run, and what was predicted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RunVerdict = Literal["fits", "risky", "oom", "invalid", "unpriced"]  # of a run: a verdict, or why there is none
Status = Literal["ok", "oom", "failed", "invalid", "?"]  # how a measured run ended; "?" where the table does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Line of a prediction table; no figures where the run could not be priced."""

    id: str
    verdict: RunVerdict
    note: str
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    peak_memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of one measured run; `decision` and `plan` are its cells in these columns of `runs.outcomes`."""

    id: str
    source: str  # the id without its number
    status: Status
    step_s: float | None
    peak_gib: float | None
    decision: tuple[str, ...]
    plan: tuple[str, ...]

    @property
    def is_finished(self) -> bool:
        """Return whether the run ended well and its step was timed."""
        return self.status == "ok" and self.step_s is not None
