"""How do trials run?  Started, watched while they train, ended when they lose, and told to the study."""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, stdev
from typing import TYPE_CHECKING

from autoplan.base.errors import AutoplanError, InputError
from autoplan.frameworks.logs import Batch, LoggedRun, LogReader
from autoplan.jobs.job import LOG, MESSAGES, OUTCOME, PLAN, Cause, Jobs, JobStatus, SilentError
from autoplan.runs.failure import LogEnd

if TYPE_CHECKING:
    from autoplan.search.tune import TrialResult, Tuning, View
    from autoplan.spec.problem import Problem

POLL_S = 0.5
LEAST_STEPS = 3  # of a trial that is ended because it loses
_CHUNK = 2**20
_MOST_REASON = 300  # characters
# What the scheduler did to a job says nothing of its plan.
_ENDS: Mapping[Cause, str] = {
    "out of memory": "oom",
    "time limit": "timeout",
    "failed": "failed",
    "node failure": "lost",
    "preempted": "lost",
    "cancelled": "lost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What may be spent: trials and hours of all devices over the whole study, seconds of this call."""

    trials: int
    seconds: float = math.inf
    gpu_hours: float = math.inf


@dataclass(slots=True, kw_only=True)
class _Watched:
    """A trial under way."""

    number: int
    at: int
    job: str
    reader: LogReader
    read: int = 0  # bytes of its log
    since_s: float | None = None  # when it began to run; None while it waits for its turn


@dataclass(slots=True, kw_only=True)
class Trials:
    """Runs trials of a study in a folder until nothing is left to learn or to spend."""

    tuning: Tuning
    jobs: Jobs
    problem: Problem
    folder: Path
    prepare: Callable[[int], str]  # the text of a plan file, by the index of the plan
    budget: Budget
    parallel: int
    warmup: int
    limit_s: float
    enough: int | None = None  # steps after which a trial is ended that does not end by itself
    show: Callable[[str], None] = lambda line: None  # a line that stays
    show_now: Callable[[str], None] = lambda line: None  # what is going on, until the next one
    _running: dict[int, _Watched] = field(default_factory=dict)

    def run(self) -> str:
        """Run trials until there is a reason to stop, which is returned in words; ends its jobs however it is left."""
        until_s = time.monotonic() + self.budget.seconds
        with _alone(self.folder):
            self._adopt()
            try:
                while True:
                    view = self.tuning.view()
                    reason = self._why_stop(view, until_s)
                    while reason is None and view.next is not None and len(self._running) < self.parallel:
                        self._start(view.next)
                        view = self.tuning.view()
                        reason = self._why_stop(view, until_s)
                    if reason is not None and (not self._running or time.monotonic() >= until_s):
                        return reason
                    self._watch(view)
            except SilentError:
                self._running = {}
                raise
            finally:
                self._cancel_all()

    def _why_stop(self, view: View, until_s: float) -> str | None:
        """Why no other trial is started; None where one may be."""
        spent = spent_hours(self.problem, view)
        num_trials = sum(one.result is None or one.result.how != "cancelled" for one in view.trials)
        if view.stop == "separated":
            return "the best plan is separated from the rest"
        if view.stop == "alike" and not self._running:
            return "the fastest plans differ by no more than runs of one plan do"
        if view.stop == "failing":
            last = next(one.result for one in reversed(view.trials) if one.result)
            return f"trials fail alike, which is not for the plans: {last.reason}"
        if view.stop == "exhausted" and not self._running:
            return "no plan is left that may finish"
        if time.monotonic() >= until_s:
            return "the time (--budget) is over"
        if num_trials >= self.budget.trials:
            return f"as many trials as may be were made (--trials {self.budget.trials})"
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
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for name in (PLAN, OUTCOME, LOG, MESSAGES):
                    (folder / name).unlink(missing_ok=True)
                (folder / PLAN).write_text(self.prepare(at), encoding="utf-8")
            except OSError as error:
                raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None
            job = self.jobs.start(folder)
        except AutoplanError as error:
            self._tell(number, at, _result("failed", f"not started: {error}"))
            return
        # First here: should its name not be kept, it must be ended.
        self._running[number] = self._watched(number, at, job)
        self.tuning.started(number, job)

    def _watched(self, number: int, at: int, job: str) -> _Watched:
        plan = self.tuning.plans[at].plan
        batch = Batch(
            num_sequences=plan.global_batch, seq_len=self.problem.training.seq_len, num_devices=plan.num_devices
        )
        return _Watched(number=number, at=at, job=job, reader=LogReader(batch, warmup=self.warmup))

    def _adopt(self) -> None:
        """Go on with the trials that an earlier program left under way."""
        for one in self.tuning.trials():
            if one.result is not None:
                continue
            job = one.job or self.jobs.find(self._folder(one.number))
            if not job:
                self._tell(one.number, one.at, _result("lost", "the program ended while it was being started"))
                continue
            self._running[one.number] = watched = self._watched(one.number, one.at, job)
            if not one.job:
                self.tuning.started(one.number, job)
            with suppress(OSError):  # by the clock of the file system
                age_s = time.time() - (self._folder(one.number) / PLAN).stat().st_mtime
                watched.since_s = time.monotonic() - max(age_s, 0.0)
            self.show(f"trial {one.number} is followed again: {self._name(one.at)}")

    def _watch(self, view: View) -> None:
        """Look after all that runs, once, and wait a moment."""
        statuses = self.jobs.poll([one.job for one in self._running.values()])
        for one in list(self._running.values()):
            status = statuses[one.job]
            if status.state in ("ended", "lost"):
                del self._running[one.number]
                self._tell(one.number, one.at, self._result_of(one, status))
                continue
            if status.state == "waiting":
                one.since_s = None
                continue
            if status.began is not None:
                one.since_s = time.monotonic() - max(time.time() - status.began, 0.0)
            elif one.since_s is None:
                one.since_s = time.monotonic()
            logged = self._read_on(one)
            verdict = self._has_told(logged) or self._loses(one, logged, view) or self._hangs(one)
            if verdict:
                try:
                    self.jobs.cancel([one.job])
                except AutoplanError:  # the scheduler does not answer: it is asked again, or the trial ends by itself
                    continue
                del self._running[one.number]
                self._tell(one.number, one.at, _result(*verdict, logged=logged, seconds=_since(one)))
        if self._running:
            self.show_now("; ".join(self._now(one, statuses) for one in self._running.values()))
            time.sleep(POLL_S)

    def _read_on(self, one: _Watched) -> LoggedRun | None:
        """What the log of a trial says by now."""
        with suppress(OSError), (self._folder(one.number) / LOG).open("rb") as stream:
            stream.seek(one.read)
            while data := stream.read(_CHUNK):
                one.read += len(data)
                one.reader.feed(data)
        return one.reader.so_far()

    def _loses(self, one: _Watched, logged: LoggedRun | None, view: View) -> tuple[str, str] | None:
        """Whether its first steps already say that it is slower than the best."""
        from autoplan.base.units import format_seconds
        from autoplan.search.tune import TOLERANCE

        is_again = any(run.at == one.at for run in view.measured)  # all its steps are wanted
        if view.best is None or view.best_s is None or logged is None or is_again:
            return None
        batches = [self.tuning.plans[at].plan.global_batch for at in (one.at, view.best.at)]
        bar_s = view.best_s * batches[0] / batches[1]
        fastest_s = logged.interval_s[0]
        if len(logged.step_s) < LEAST_STEPS or fastest_s <= bar_s * (1 + TOLERANCE):
            return None
        return "slower", (
            f"its first {len(logged.step_s)} times are {format_seconds(fastest_s)} or more, the best plan's is "
            f"{format_seconds(bar_s)}"
        )

    def _has_told(self, logged: LoggedRun | None) -> tuple[str, str] | None:
        enough = self.enough is not None and logged is not None and logged.num_steps >= self.enough
        return ("measured", "") if enough else None

    def _hangs(self, one: _Watched) -> tuple[str, str] | None:
        if _since(one) < self.limit_s:
            return None
        return "timeout", f"it had not ended after {self.limit_s:.0f} s (--limit)"

    def _result_of(self, one: _Watched, status: JobStatus) -> TrialResult:
        whole = self._watched(one.number, one.at, one.job)  # a log that was fetched may have grown in its middle
        self._read_on(whole)
        seconds = min(_since(one), self.limit_s)  # nobody may have looked when it ended
        return read_result(self._folder(one.number), whole.reader, status, seconds=seconds)

    def _tell(self, number: int, at: int, result: TrialResult) -> None:
        self.tuning.tell(number, result)
        self.show(self._told(number, at, result))

    def _cancel_all(self) -> None:
        """End what runs; the study may go on with these plans another time."""
        left, self._running = list(self._running.values()), {}
        if not left:
            return
        try:
            self.show_now(f"ending {len(left)} trial{'s' * (len(left) > 1)}")
            self.jobs.cancel([one.job for one in left])
        except AutoplanError:  # the next program follows them again
            left = []
            raise
        finally:
            for one in left:
                self._tell(one.number, one.at, _result("cancelled", "the tuning was ended", seconds=_since(one)))

    # -- what is said of it -------------------------------------------------------------------------------------------

    def _name(self, at: int) -> str:
        return self.tuning.plans[at].plan.describe()

    def _told(self, number: int, at: int, result: TrialResult) -> str:
        from autoplan.base.units import format_seconds

        said = [f"trial {number}: {self._name(at)}: {result.how}"]
        if result.step_s is not None:
            predicted = format_seconds(self.tuning.plans[at].step_s)
            said[0] += f" {format_seconds(result.step_s)} a step, predicted {predicted}"
        elif result.reason:
            said[0] += f": {result.reason}"
        view = self.tuning.view()
        if view.ratio is not None:
            said.append(described_ratio(view.ratio))
        if view.best is not None:
            said.append(f"{len(view.left)} of {len(self.tuning.plans)} left that may be faster")
        return "; ".join(said)

    def _now(self, one: _Watched, statuses: dict[str, JobStatus]) -> str:
        from autoplan.base.units import format_seconds

        if statuses[one.job].state == "waiting":
            return f"trial {one.number} waits for its turn: {self._name(one.at)}"
        logged = one.reader.so_far()
        steps = f", {logged.num_steps} steps of {format_seconds(logged.median_s)}" if logged else ""
        return f"trial {one.number}: {self._name(one.at)}: {_since(one):.0f} s{steps}"


def described_ratio(ratio: float) -> str:
    """How far off predictions are, in words."""
    return f"steps take {ratio:.2f} times as long as predicted"


def spent_hours(problem: Problem, view: View) -> float:
    """Hours of all devices that ended trials took."""
    seconds = sum(one.result.seconds for one in view.trials if one.result)
    return seconds / 3600 * problem.cluster.num_devices


def read_result(folder: Path, log: LogReader, status: JobStatus, *, seconds: float) -> TrialResult:
    """What came of a trial that ended, from what it left in its folder; `log` has read its log."""
    from autoplan.base.files import decode, read_table
    from autoplan.trainer.task import TrainingReport

    outcome = folder / OUTCOME
    if outcome.is_file():
        try:
            report = decode(TrainingReport, read_table(outcome).get("measured") or {}, str(outcome))
            if not report.step_s:
                raise InputError(f"{outcome}: holds no step times")
        except InputError as error:
            return _result("failed", str(error), seconds=seconds)
        return _timed("measured", report.step_s, peak_bytes=max(report.peak_bytes, default=None), seconds=seconds)
    words, refusal = LogEnd(), ""
    for name in (LOG, MESSAGES):
        for line in _lines(folder / name):
            words.read(line)
            if name == MESSAGES and line.startswith("autoplan: "):
                refusal = line  # of an `autoplan run`, which measured nothing
    if words.out_of_memory:
        return _result("oom", words.out_of_memory, seconds=seconds)
    if status.cause is not None:
        said = "" if words.reason == "it wrote nothing" else f"; its last words: {refusal or words.reason}"
        return _result(_ENDS[status.cause], status.reason + said, seconds=seconds)
    if any(said in words.reason for said in ("no answer within", "(--limit)")):  # of `autoplan run`
        return _result("timeout", words.reason, seconds=seconds)
    if status.status not in (0, None):
        how = f"ended by signal {-status.status}" if status.status < 0 else f"failed ({status.status})"
        return _result("failed", refusal or f"{how}: {words.reason}", seconds=seconds)
    if refusal:
        return _result("failed", refusal, seconds=seconds)
    try:  # a job that runs a program of the user leaves a log alone
        logged = log.finish()
    except InputError as error:
        if status.state == "lost":
            return _result("lost", status.reason or words.reason, seconds=seconds)
        said = "" if words.reason == "it wrote nothing" else f"; its last words: {words.reason}"
        return _result("failed", f"{error}{said}", seconds=seconds)
    return _result("measured", logged=logged, seconds=seconds)


def _result(how: str, reason: str = "", *, logged: LoggedRun | None = None, seconds: float = 0.0) -> TrialResult:
    """What came of a trial, with what its log said where its steps count."""
    from autoplan.search.tune import TrialResult

    reason = " ".join(reason.removeprefix("autoplan: ").split())[:_MOST_REASON]
    if logged is not None and how in ("measured", "slower"):
        peak_bytes = logged.reserved_bytes or logged.allocated_bytes
        return _timed(how, logged.step_s, reason=reason, peak_bytes=peak_bytes, seconds=seconds)
    return TrialResult(how=how, reason=reason, seconds=seconds)  # type: ignore[arg-type]


def _timed(
    how: str, step_s: tuple[float, ...], *, reason: str = "", peak_bytes: float | None, seconds: float
) -> TrialResult:
    """A trial with step times: their median, and how sure that is, as of independent ones."""
    from autoplan.search.belief import RUN_SPREAD
    from autoplan.search.tune import TrialResult

    logs = [math.log(one) for one in step_s]
    # The median of n normal values has the standard deviation of one of them times sqrt(pi / 2n).
    own = stdev(logs) * math.sqrt(math.pi / 2 / len(logs)) if len(logs) > 1 else 0.0
    return TrialResult(
        how=how,  # type: ignore[arg-type]
        reason=reason,
        step_s=median(step_s),
        spread=math.hypot(RUN_SPREAD, own),
        peak_bytes=peak_bytes,
        seconds=seconds,
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            yield from stream
    except OSError:
        return


def _since(one: _Watched) -> float:
    return 0.0 if one.since_s is None else time.monotonic() - one.since_s


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse a second program beside the one that drives the trials of a folder; it is free when that one is gone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / "lock").open("w")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another autoplan tune is at work there") from None
        yield
