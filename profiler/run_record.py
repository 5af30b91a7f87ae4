"""Record of a measured training run: its plan, its machine and its step times.

A run is identified by its content, like a measurement (`profiler.record`).
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args

import msgspec

from autoplan.base.errors import InputError
from autoplan.base.units import check_positive
from autoplan.profiler.record import MAX_SAMPLES, NOT_CONTENT, Fingerprint, check_text, is_timestamp
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

# `contaminated`: other load or slow devices interfered; `oom`: out of memory; `failed`: `reason` says how.
RunStatus = Literal["ok", "contaminated", "oom", "failed"]
TIMED = ("ok", "contaminated")  # statuses with step times


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Run of a plan; times are seconds per step, or means over several steps, after the warm-up."""

    fingerprint: Fingerprint
    framework: str  # autoplan's name
    model: ModelSpec
    training: TrainingSpec
    plan: ParallelPlan
    step_s: tuple[float, ...] = ()
    peak_bytes: float | None = None  # as in the framework's log, of the reporting rank with the highest peak
    predicted_s: float | None = None  # predicted step time, before the run
    status: RunStatus = "ok"
    reason: str = ""  # why a run is not ok
    # Other observations: other load, and clocks, power and slowdowns of the devices.
    conditions: Mapping[str, str] = field(default_factory=dict)
    source: str = ""  # how it was measured: the built-in trainer, the log of Megatron-LM
    measured_by: str = ""
    host: str = ""
    measured_at: str = ""  # ISO 8601, UTC

    def __post_init__(self) -> None:
        if self.status not in get_args(RunStatus):
            raise InputError(f"a run's status {self.status!r} is unknown: known are {', '.join(get_args(RunStatus))}")
        if (is_timed := self.status in TIMED) != bool(self.step_s):
            raise InputError(f"a run that is {self.status} {'needs' if is_timed else 'has no'} step times")
        if len(self.step_s) > MAX_SAMPLES:
            raise InputError(f"a run has {len(self.step_s)} step times, at most {MAX_SAMPLES} are kept")
        if not all(math.isfinite(time) and 0 < time < 1e6 for time in self.step_s):
            raise InputError("a run has a step time that is no time in seconds")
        for name in ("peak_bytes", "predicted_s"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        texts = (self.framework, self.reason, self.source, self.measured_by, self.host, self.measured_at)
        for text in (*texts, *self.conditions, *self.conditions.values()):
            check_text("a run", text)
        if self.measured_at and not is_timestamp(self.measured_at):
            raise InputError(f"a run was measured at {self.measured_at!r}: not ISO 8601 in UTC")

    @property
    def key(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        # A placement contains host names, so it can be removed too.
        content = _content(replace(self, plan=replace(self.plan, placement=None)))
        content = {name: value for name, value in content.items() if name not in NOT_CONTENT}
        return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    @property
    def seconds(self) -> float | None:
        """Median step time; None if the run went out of memory or failed."""
        return float(statistics.median(self.step_s)) if self.step_s else None


def _content(value: Any) -> Any:
    """Return a value as JSON without default fields, so that a field added later does not change keys."""
    if not is_dataclass(value) or isinstance(value, type):
        return [_content(part) for part in value] if isinstance(value, tuple) else msgspec.to_builtins(value)
    content = {}
    for item in fields(value):
        part = getattr(value, item.name)
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        if part != default:
            content[item.name] = _content(part)
    return content
