"""Driver of trials: starts them, monitors their training, ends losing ones, and reports to the study."""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import refused_writes
from autoplan.base.units import counted, format_percent, format_seconds
from autoplan.frameworks.logs import Batch, LoggedRun, LogReader
from autoplan.jobs.job import LOG, MESSAGES, OUTCOME, PLAN, Jobs, JobStatus, SilentError
from autoplan.search.trial_results import make_result, read_result
from autoplan.search.tune import TOLERANCE, TrialResult, Tuning, TuningState
from autoplan.spec.problem import Problem

POLL_S = 0.5
MIN_STEPS = 3  # before a trial may be ended because it loses
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Budget of a tuning: trials and total device hours over the whole study, seconds of this call."""

    trials: int
    seconds: float = math.inf
    gpu_hours: float = math.inf


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A running trial."""

    number: int
    at: int
    job: str
    reader: LogReader
    read: int = 0  # bytes read of its log
    since_s: float | None = None  # when it began to run; None while it is queued


@dataclass(slots=True, kw_only=True)
class Trials:
    """Runs trials of a study in a folder until nothing is worth trying or the budget is spent."""

    tuning: Tuning
    jobs: Jobs
    problem: Problem
    folder: Path
    prepare: Callable[[int], str]  # returns the text of a plan file for the index of a plan
    budget: Budget
    parallel: int
    warmup: int
    limit_s: float
    enough: int | None = None  # steps after which a trial is ended if it does not end by itself
    show: Callable[[str], None] = lambda line: None  # prints a permanent line
    show_now: Callable[[str], None] = lambda line: None  # prints the current state, replaced by the next one
    _running: dict[int, _Watched] = field(default_factory=dict)

    def run(self) -> str:
        """Run trials and return the reason for stopping; always cancels its jobs on exit."""
        until_s = time.monotonic() + self.budget.seconds
        with _alone(self.folder):
            self._adopt()
            try:
                while True:
                    view = self.tuning.state()
                    reason = self._why_stop(view, until_s)
                    while reason is None and view.next is not None and len(self._running) < self.parallel:
                        self._start(view.next)
                        view = self.tuning.state()
                        reason = self._why_stop(view, until_s)
                    if reason is not None and (not self._running or time.monotonic() >= until_s):
                        return reason
                    self._watch(view)
            except SilentError:
                self._running = {}
                raise
            finally:
                self._cancel_all()

    def _why_stop(self, view: TuningState, until_s: float) -> str | None:
        """Return why no further trial is started; None if one may be."""
        spent = spent_hours(self.problem, view)
        num_trials = sum(trial.result is None or trial.result.how != "cancelled" for trial in view.trials)
        if view.stop == "separated":
            return "the best plan is clearly faster than the rest"
        if view.stop == "alike" and not self._running:
            return "the fastest plans differ by no more than repeated runs of one plan"
        if view.stop == "failing":
            last = next(trial.result for trial in reversed(view.trials) if trial.result)
            return f"all trials fail in the same way, so the plans are not the cause: {last.reason}"
        if view.stop == "exhausted" and not self._running:
            return "no plan is left that could finish"
        if time.monotonic() >= until_s:
            return "the time budget is spent (--budget)"
        if num_trials >= self.budget.trials:
            return f"the maximum number of trials was reached (--trials {self.budget.trials})"
        if spent >= self.budget.gpu_hours:
            return f"{spent:.2g} GPU-hours are spent (--gpu-hours)"
        return None

    # -- one trial ----------------------------------------------------------------------------------------------------

    def _folder(self, number: int) -> Path:
        return self.folder / f"{number:04d}"

    def _start(self, at: int) -> None:
        number = self.tuning.begin(at)
        folder = self._folder(number)
        try:
            with refused_writes(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for name in (PLAN, OUTCOME, LOG, MESSAGES):
                    (folder / name).unlink(missing_ok=True)
                (folder / PLAN).write_text(self.prepare(at), encoding="utf-8")
            job = self.jobs.start(folder)
        except AutoplanError as error:
            self._tell(number, at, make_result("failed", f"not started: {error}"))
            return
        # Kept here first: if its name cannot be recorded, it must be ended.
        self._running[number] = self._watched(number, at, job)
        self.tuning.started(number, job)

    def _watched(self, number: int, at: int, job: str) -> _Watched:
        plan = self.tuning.plans[at].plan
        batch = Batch(
            num_sequences=plan.global_batch, seq_len=self.problem.training.seq_len, num_devices=plan.num_devices
        )
        return _Watched(number=number, at=at, job=job, reader=LogReader(batch, warmup=self.warmup))

    def _adopt(self) -> None:
        """Adopt the trials that an earlier program left running."""
        for trial in self.tuning.trials():
            if trial.result is not None:
                continue
            job = trial.job or self.jobs.find(self._folder(trial.number))
            if not job:
                self._tell(trial.number, trial.at, make_result("lost", "the program ended during its start"))
                continue
            self._running[trial.number] = watched = self._watched(trial.number, trial.at, job)
            if not trial.job:
                self.tuning.started(trial.number, job)
            with suppress(OSError):  # by the file system's clock
                age_s = time.time() - (self._folder(trial.number) / PLAN).stat().st_mtime
                watched.since_s = time.monotonic() - max(age_s, 0.0)
            self.show(f"following trial {trial.number} again: {self._name(trial.at)}")

    def _watch(self, view: TuningState) -> None:
        """Check all running trials once, and wait a moment."""
        statuses = self.jobs.poll([watched.job for watched in self._running.values()])
        for watched in list(self._running.values()):
            status = statuses[watched.job]
            if status.state in ("ended", "lost"):
                del self._running[watched.number]
                self._tell(watched.number, watched.at, self._result_of(watched, status))
                continue
            if status.state == "waiting":
                watched.since_s = None
                continue
            if status.began is not None:
                watched.since_s = time.monotonic() - max(time.time() - status.began, 0.0)
            elif watched.since_s is None:
                watched.since_s = time.monotonic()
            logged = self._read_on(watched)
            verdict = self._has_enough(logged) or self._loses(watched, logged, view) or self._hangs(watched)
            if verdict:
                try:
                    self.jobs.cancel([watched.job])
                except AutoplanError:  # the scheduler does not answer: ask again later, or the trial ends by itself
                    continue
                del self._running[watched.number]
                self._tell(watched.number, watched.at, make_result(*verdict, logged=logged, seconds=_since(watched)))
        if self._running:
            self.show_now("; ".join(self._doing(watched, statuses) for watched in self._running.values()))
            time.sleep(POLL_S)

    def _read_on(self, watched: _Watched) -> LoggedRun | None:
        with suppress(OSError), (self._folder(watched.number) / LOG).open("rb") as stream:
            stream.seek(watched.read)
            while data := stream.read(_CHUNK):
                watched.read += len(data)
                watched.reader.feed(data)
        return watched.reader.so_far()

    def _loses(self, watched: _Watched, logged: LoggedRun | None, view: TuningState) -> tuple[str, str] | None:
        """Return a verdict if the first steps already show that a trial is slower than the best."""
        is_again = any(run.at == watched.at for run in view.measured)  # a repeated run needs all its steps
        if view.best is None or view.best_s is None or logged is None or is_again:
            return None
        batches = [self.tuning.plans[at].plan.global_batch for at in (watched.at, view.best.at)]
        bar_s = view.best_s * batches[0] / batches[1]
        fastest_s = logged.interval_s[0]
        if len(logged.step_s) < MIN_STEPS or fastest_s <= bar_s * (1 + TOLERANCE):
            return None
        return "slower", (
            f"its first {len(logged.step_s)} times are {format_seconds(fastest_s)} or more, the best plan's is "
            f"{format_seconds(bar_s)}"
        )

    def _has_enough(self, logged: LoggedRun | None) -> tuple[str, str] | None:
        enough = self.enough is not None and logged is not None and logged.num_steps >= self.enough
        return ("measured", "") if enough else None

    def _hangs(self, watched: _Watched) -> tuple[str, str] | None:
        if _since(watched) < self.limit_s:
            return None
        return "timeout", f"it had not ended after {self.limit_s:.0f} s (--limit)"

    def _result_of(self, watched: _Watched, status: JobStatus) -> TrialResult:
        # Read from the beginning, as a fetched log may have grown in the middle.
        reread = self._watched(watched.number, watched.at, watched.job)
        self._read_on(reread)
        seconds = min(_since(watched), self.limit_s)  # its end may have been noticed late
        return read_result(self._folder(watched.number), reread.reader, status, seconds=seconds)

    def _tell(self, number: int, at: int, result: TrialResult) -> None:
        self.tuning.tell(number, result)
        self.show(self._described(number, at, result))

    def _cancel_all(self) -> None:
        """Cancel running trials; the study may try these plans again later."""
        running, self._running = list(self._running.values()), {}
        if not running:
            return
        try:
            self.show_now(f"ending {counted(len(running), 'trial')}")
            self.jobs.cancel([watched.job for watched in running])
        except AutoplanError:  # the next program adopts them again
            running = []
            raise
        finally:
            for watched in running:
                self._tell(
                    watched.number,
                    watched.at,
                    make_result("cancelled", "the tuning was ended", seconds=_since(watched)),
                )

    # -- messages ------------------------------------------------------------------------------------------------------

    def _name(self, at: int) -> str:
        return self.tuning.plans[at].plan.describe()

    def _described(self, number: int, at: int, result: TrialResult) -> str:
        parts = [f"trial {number}: {self._name(at)}: {result.how}"]
        if result.step_s is not None:
            predicted = format_seconds(self.tuning.plans[at].step_s)
            parts[0] += f" {format_seconds(result.step_s)} per step, predicted {predicted}"
            if result.other_load is not None:
                parts[0] += f", other load {format_percent(result.other_load)}"
            if result.clock_mhz is not None:
                parts[0] += f", {result.clock_mhz:,.0f} MHz"
        elif result.reason:
            parts[0] += f": {result.reason}"
        view = self.tuning.state()
        if view.ratio is not None:
            parts.append(_described_ratio(view.ratio))
        if view.best is not None:
            parts.append(f"{len(view.worth_trying)} of {len(self.tuning.plans)} left that could be faster")
        return "; ".join(parts)

    def _doing(self, watched: _Watched, statuses: dict[str, JobStatus]) -> str:
        if statuses[watched.job].state == "waiting":
            return f"trial {watched.number} is queued: {self._name(watched.at)}"
        logged = watched.reader.so_far()
        steps = f", {logged.num_steps} steps of {format_seconds(logged.median_s)}" if logged else ""
        return f"trial {watched.number}: {self._name(watched.at)}: {_since(watched):.0f} s{steps}"


def _described_ratio(ratio: float) -> str:
    """Describe the ratio of measured to predicted steps."""
    return f"steps take {ratio:.2f} times as long as predicted"


def spent_hours(problem: Problem, view: TuningState) -> float:
    """Total device hours of finished trials."""
    seconds = sum(trial.result.seconds for trial in view.trials if trial.result)
    return seconds / 3600 * problem.cluster.num_devices


def _since(watched: _Watched) -> float:
    return 0.0 if watched.since_s is None else time.monotonic() - watched.since_s


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the trials of a folder against a second program; the lock is released when its process ends."""
    with refused_writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / "lock").open("w")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another autoplan tune is using it") from None
        yield
