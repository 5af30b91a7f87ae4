"""What does the model say of runs that were measured?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.cost.estimate import estimate
from autoplan.errors import AutoplanError
from autoplan.plan import PlanBatch
from autoplan.read.runs import Run
from autoplan.result import VERDICTS, Verdict
from autoplan.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One line of a prediction table; no figures where the run could not be priced."""

    id: str
    verdict: Verdict | Literal["invalid", "unpriced"]
    note: str
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    peak_memory_gib: float | None = None


def predict(run: Run) -> Prediction:
    """What the model says of one run."""
    filled = f"filled: {', '.join(run.filled)}" if run.filled else ""
    note = "; ".join(part for part in (run.refusal, filled) if part)
    if run.problem is None or run.plan is None:
        return Prediction(id=run.id, verdict="invalid" if run.is_invalid else "unpriced", note=note)
    try:
        batch = PlanBatch.of([run.plan], run.problem.model.num_layers)
    except AutoplanError as error:
        return Prediction(id=run.id, verdict="unpriced", note="; ".join(part for part in (str(error), filled) if part))
    cost = estimate(run.problem, batch)
    return Prediction(
        id=run.id,
        step_time_s=float(cost.step_s[0]),
        step_time_low_s=float(cost.low_s[0]),
        step_time_high_s=float(cost.high_s[0]),
        peak_memory_gib=float(cost.logged_memory_bytes[0]) / GIB,
        verdict=VERDICTS[int(cost.verdict[0])],
        note=note,
    )
