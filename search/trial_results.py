"""Results of trials, read from their folders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median, stdev

from autoplan.base.errors import InputError
from autoplan.base.files import decode, read_table
from autoplan.frameworks.logs import LoggedRun, LogReader
from autoplan.jobs.job import LOG, MESSAGES, OUTCOME, Cause, JobStatus
from autoplan.runs.failure import LogEnd
from autoplan.search.surrogate import RUN_SPREAD
from autoplan.search.tune import TrialResult
from autoplan.trainer.task import TrainingReport

_MAX_REASON = 300  # characters
# Actions of the scheduler on a job say nothing about its plan.
_ENDS: Mapping[Cause, str] = {
    "out of memory": "oom",
    "time limit": "timeout",
    "failed": "failed",
    "node failure": "lost",
    "preempted": "lost",
    "cancelled": "lost",
}


def read_result(folder: Path, log: LogReader, status: JobStatus, *, seconds: float) -> TrialResult:
    """Return the result of a finished trial from its folder; `log` has parsed its log."""
    outcome = folder / OUTCOME
    if outcome.is_file():
        try:
            report = decode(TrainingReport, read_table(outcome).get("measured") or {}, str(outcome))
            if not report.step_s:
                raise InputError(f"{outcome}: holds no step times")
        except InputError as error:
            return make_result("failed", str(error), seconds=seconds)
        peak_bytes = max(report.peak_bytes, default=None)
        result = _timed("measured", report.step_s, peak_bytes=peak_bytes, seconds=seconds)
        return replace(result, other_load=report.other_load, clock_mhz=report.clock_mhz)
    words, refusal = LogEnd(), ""
    for name in (LOG, MESSAGES):
        for line in _lines(folder / name):
            words.read(line)
            if name == MESSAGES and line.startswith("autoplan: "):
                refusal = line  # from `autoplan run`, which measured nothing
    if words.out_of_memory:
        return make_result("oom", words.out_of_memory, seconds=seconds)
    if status.cause is not None:
        last_words = "" if words.reason == "it wrote nothing" else f"; its last words: {refusal or words.reason}"
        return make_result(_ENDS[status.cause], status.reason + last_words, seconds=seconds)
    if any(phrase in words.reason for phrase in ("no answer within", "(--limit)")):  # of `autoplan run`
        return make_result("timeout", words.reason, seconds=seconds)
    if status.status not in (0, None):
        ending = f"ended by signal {-status.status}" if status.status < 0 else f"failed ({status.status})"
        return make_result("failed", refusal or f"{ending}: {words.reason}", seconds=seconds)
    if refusal:
        return make_result("failed", refusal, seconds=seconds)
    try:  # a job with the user's own program only has a log
        logged = log.finish()
    except InputError as error:
        if status.state == "lost":
            return make_result("lost", status.reason or words.reason, seconds=seconds)
        last_words = "" if words.reason == "it wrote nothing" else f"; its last words: {words.reason}"
        return make_result("failed", f"{error}{last_words}", seconds=seconds)
    return make_result("measured", logged=logged, seconds=seconds)


def make_result(how: str, reason: str = "", *, logged: LoggedRun | None = None, seconds: float = 0.0) -> TrialResult:
    """Return the result of a trial, with the logged steps if they count."""
    reason = " ".join(reason.removeprefix("autoplan: ").split())[:_MAX_REASON]
    if logged is not None and how in ("measured", "slower"):
        peak_bytes = logged.reserved_bytes or logged.allocated_bytes
        return _timed(how, logged.step_s, reason=reason, peak_bytes=peak_bytes, seconds=seconds)
    return TrialResult(how=how, reason=reason, seconds=seconds)  # type: ignore[arg-type]


def _timed(
    how: str, step_s: tuple[float, ...], *, reason: str = "", peak_bytes: float | None, seconds: float
) -> TrialResult:
    """Return the result of a trial with step times: their median and its spread, as for independent steps."""
    logs = [math.log(sample_s) for sample_s in step_s]
    # The median of n normal values has the standard deviation of one value times sqrt(pi / 2n).
    spread_of_median = stdev(logs) * math.sqrt(math.pi / 2 / len(logs)) if len(logs) > 1 else 0.0
    return TrialResult(
        how=how,  # type: ignore[arg-type]
        reason=reason,
        step_s=median(step_s),
        steps_s=step_s,
        spread=math.hypot(RUN_SPREAD, spread_of_median),
        peak_bytes=peak_bytes,
        seconds=seconds,
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            yield from stream
    except OSError:
        return
