"""Jobs on a cluster, submitted to its scheduler and followed through its answers.

Every trial has a job with a unique name, which is stored in its folder before submission.  A job whose submission got
no answer is therefore found again instead of submitted twice, and the next program continues where one ended.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import decode, encode, is_file, read_table, replacing, write_text
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.frameworks.common.job import File
from autoplan.jobs.job import LOG, MESSAGES, OUTCOME, PLAN, JobStatus, SilentError
from autoplan.jobs.template import JobTemplate, Meaning, Row
from autoplan.launch.start import node_shape
from autoplan.launch.targets import exported
from autoplan.spec.plan_file import PlanFile

JOB = "job.json"  # in the folder of a trial: the job and its progress
ANSWER_S = 60.0  # time limit of a scheduler command
CANCEL_S = 60.0  # how long cancellation is retried on a scheduler that does not answer
HISTORY_S = 60.0  # maximum delay of the accounting behind its scheduler
_MAX_PAUSE_S = 120.0
_TRAINER = "autoplan"  # the target for the built-in trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job: its name, the scheduler's id if known, its launch file, and its progress."""

    job: str
    id: str = ""
    script: str = ""
    began: float | None = None  # when it was first seen running, in seconds of `time.time`
    num_lost: int = 0  # times that the scheduler accepted it and later did not know it
    stage: Literal["new", "submitted", "cancelled"] = "new"


class NoAnswerError(AutoplanError):
    """The scheduler gave no answer, so the state of jobs is unknown; `is_silent` if it wrote nothing at all."""

    def __init__(self, text: str, *, is_silent: bool = False) -> None:
        super().__init__(text)
        self.is_silent = is_silent


class SchedulerJobs:
    """Runs trials with the commands of a template.

    If the template has a launcher, each trial is started by the files that `autoplan export --to` writes for it, with
    `num_steps` if the target supports it.  `options` are those of `autoplan run`, after the plan and its files, for
    trials of the built-in trainer: those without another `to`, if the template takes {options}.  `files` writes the
    launch files for a plan file and a job name if something else than the training is started.  A scheduler that does
    not answer is asked again after increasing pauses, for the template's `patience_s`; until then the states of its
    jobs are kept.
    """

    def __init__(
        self,
        template: JobTemplate,
        *,
        time_limit_s: float,
        num_steps: int,
        options: Sequence[str] = (),
        to: str = _TRAINER,
        image: str | None = None,
        files: Callable[[PlanFile, str], tuple[File, ...]] | None = None,
    ) -> None:
        self._template, self._time_limit_s, self._num_steps = template, time_limit_s, num_steps
        self._to, self._image = to, image
        self._files = files
        self.runs_trainer: bool = to == _TRAINER and template.takes_options and files is None
        self._output = MESSAGES if self.runs_trainer else LOG  # the trainer writes its log itself
        self._options = tuple(options)
        if files is not None and not template.launcher:
            raise InputError(f"{template.name} has no launcher, which starts the ranks: add one to the template")
        if template.launcher and to == _TRAINER and not self.runs_trainer and files is None:
            raise InputError(
                f"submit of {template.name} has no {{options}}, which tell the built-in trainer where to write its "
                "measurements: choose another trainer with --to"
            )
        if to != _TRAINER and not template.launcher:
            raise InputError(f"{template.name} has no launcher, which would start what --to {to} writes: leave it out")
        for program in dict.fromkeys((template.submit[0], template.poll[0], template.cancel[0])):
            if not shutil.which(program):
                raise InputError(
                    f"{template.name}: {program!r} is not installed here: use a machine that can submit jobs"
                )
        self._status: dict[str, JobStatus] = {}
        self._shapes: dict[Path, tuple[int, int]] = {}  # (nodes, devices per node) by folder
        self._answered: set[str] = set()  # programs that have worked before
        self._unknown_since_s: dict[str, float] = {}  # jobs that were unknown at the last poll
        self._next_s = time.monotonic()  # time of the next poll
        self._pause_s = template.poll_every_s
        self._silent_since_s: float | None = None

    def start(self, folder: Path) -> str:
        """Submit the trial in `folder`, which is also its name, or let `poll` do so if busy; raises InputError."""
        folder = folder.resolve()
        name = str(folder)
        if is_file(folder / JOB):  # from an abandoned study
            self._sweep(folder, _read(folder))
        job = JobFile(job=f"autoplan-{uuid.uuid4().hex[:12]}")
        if self._template.launcher:
            job = replace(job, script=self._export(folder, job.job))
        _keep(folder, job)
        try:
            self._status[name] = self._submit(folder, job)
        except BaseException:
            (folder / JOB).unlink(missing_ok=True)
            raise
        return name

    def find(self, folder: Path) -> str:
        """Return the job submitted, or about to be submitted, in `folder`; it may not be in the study yet."""
        return str(folder.resolve()) if is_file(folder / JOB) else ""

    def poll(self, names: Sequence[str]) -> dict[str, JobStatus]:
        """Return the states of jobs, at most `poll_every_s` old."""
        unknown = JobStatus(state="waiting")
        unfinished = [name for name in names if self._status.get(name, unknown).state not in ("ended", "lost")]
        if unfinished and time.monotonic() >= self._next_s:
            try:
                self._ask(unfinished)
            except NoAnswerError as error:
                self._wait(unfinished, error)
        return {name: self._status.get(name, unknown) for name in names}

    def cancel(self, names: Sequence[str]) -> None:
        """Ask the scheduler to end these jobs, known or not; retried for `CANCEL_S`."""
        until = time.monotonic() + CANCEL_S
        failed = []
        for folder in map(Path, reversed(names)):  # waiting jobs first, as they would start when others end
            job = _read(folder)
            if not (job.id or self._template.finds_by_name):
                continue  # never submitted
            with contextlib.suppress(InputError):  # cancel even if the disk is full
                _keep(folder, replace(job, stage="cancelled"))
            command = self._template.command("cancel", self._values(folder, job))
            pause_s = 1.0
            while True:
                try:
                    self._run(command)
                except NoAnswerError as error:
                    if (left_s := until - time.monotonic()) > 0:
                        time.sleep(min(pause_s, left_s))
                        pause_s *= 2
                        continue
                    failed.append(f"{shlex.join(command)} ({error})")
                except InputError as error:
                    if self._status.get(str(folder), JobStatus(state="waiting")).state in ("waiting", "running"):
                        failed.append(f"{shlex.join(command)} ({error})")
                break
        if failed:
            raise AutoplanError(f"jobs of {self._template.name} may still run; to end them: {'; '.join(failed)}")

    def _export(self, folder: Path, name: str) -> str:
        """Write the launch files of the trial, and return the name of the file to start."""
        files = self._files(_plan_file(folder), name) if self._files else self._exported(_plan_file(folder), name)
        for file in files:
            write_text(folder / file.name, file.text, executable=file.executable, force=True)
        return files[0].name

    def _exported(self, plan_file: PlanFile, name: str) -> tuple[File, ...]:
        return exported(
            plan_file,
            self._to,
            self._template.launcher,
            self._image,
            name=name,
            num_steps=self._num_steps,
        )

    def _submit(self, folder: Path, job: JobFile) -> JobStatus:
        words: tuple[str, ...] = ()
        if self.runs_trainer:
            files = ("--out", str(folder / OUTCOME), "--log", str(folder / LOG))
            words = (*files, "--force", "--quiet", *self._options)
        try:
            answer = self._run(self._template.submission(self._values(folder, job), words))
            _keep(folder, replace(job, id=self._template.read_id(answer), stage="submitted"))
        except NoAnswerError as error:
            if error.is_silent and not self._template.finds_by_name:
                raise InputError(
                    f"{error}, and rows name no (?P<job>...): check whether the job was accepted"
                ) from None
            return JobStatus(state="waiting", reason=f"not submitted yet: {error}")
        except BaseException:  # refused; or accepted without our knowledge
            self._sweep(folder, job)
            raise
        return JobStatus(state="waiting")

    def _sweep(self, folder: Path, job: JobFile) -> None:
        """End remains of a job: a second job with its name, or objects of Kubernetes."""
        with contextlib.suppress(AutoplanError):
            self._run(self._template.command("cancel", self._values(folder, job)))

    def _ask(self, names: Sequence[str]) -> None:
        """Update the states of jobs, and submit those that the scheduler does not have."""
        jobs = {}
        for name in names:
            try:
                jobs[name] = _read(Path(name))
                self._values(Path(name), jobs[name])
            except InputError as error:  # the folder is missing or damaged
                jobs.pop(name, None)
                self._status[name] = JobStatus(state="lost", reason=str(error))
        rows = self._rows(self._answers("poll", jobs), jobs)
        self._silent_since_s, self._pause_s = None, self._template.poll_every_s
        missing = {name: job for name, job in jobs.items() if name not in rows and job.stage != "new"}
        answered, answers_within_s = self._remembered(missing)
        rows |= answered
        now_s = time.monotonic()
        self._unknown_since_s = {name: self._unknown_since_s.get(name, now_s) for name in missing.keys() - rows.keys()}
        for name, job in jobs.items():
            if name in rows:
                self._learn(Path(name), job, rows[name])
            elif name in self._unknown_since_s and (end := _known_end(Path(name), job)):
                self._status[name] = end
            elif now_s - self._unknown_since_s.get(name, -math.inf) < answers_within_s:
                continue  # the state is kept
            elif job.stage == "new" or self._never_ran(Path(name), job):
                try:
                    self._status[name] = self._submit(Path(name), replace(job, num_lost=job.num_lost + bool(job.id)))
                except InputError as error:
                    self._status[name] = JobStatus(state="ended", reason=f"not submitted: {error}", cause="failed")
            else:
                reason = f"{self._template.name} does not know job {job.id or job.job} any more"
                self._status[name] = JobStatus(state="lost", reason=reason)
        self._next_s = time.monotonic() + self._pause_s

    def _never_ran(self, folder: Path, job: JobFile) -> bool:
        """Return whether the scheduler lost a job before its start, as a killed slurmctld can; accepted once."""
        if self._template.log or job.stage != "submitted" or job.num_lost:
            return False
        return not (folder / self._output).exists()  # every job writes this file first

    def _remembered(self, jobs: Mapping[str, JobFile]) -> tuple[dict[str, list[Row]], float]:
        """Return (answers of the accounting on these jobs, by name; seconds in which others may still appear)."""
        if not jobs or not self._template.history:
            return {}, 0.0
        try:
            answers = self._answers("history", jobs)
        except NoAnswerError:
            return {}, self._template.patience_s
        except InputError:  # not every Slurm has accounting
            return {}, 0.0
        return self._rows(answers, jobs), HISTORY_S

    def _answers(self, question: Literal["poll", "history"], jobs: Mapping[str, JobFile]) -> list[tuple[str, str]]:
        """Return (program, its output) for every command that asks about these jobs."""
        values = [self._values(Path(name), job) for name, job in jobs.items()]
        return [(command[0], self._run(command)) for command in self._template.questions(question, values)]

    def _rows(self, answers: Iterable[tuple[str, str]], jobs: Mapping[str, JobFile]) -> dict[str, list[Row]]:
        """Ask the scheduler about these jobs, and return the rows of known ones by name."""
        answered = [row for program, text in answers for row in self._template.read_rows(program, text)]
        by_name = self._template.finds_by_name
        rows_by_name = {
            name: [row for row in answered if (row.job == job.job if by_name else row.id == job.id)]
            for name, job in jobs.items()
        }
        return {name: rows for name, rows in rows_by_name.items() if rows}

    def _learn(self, folder: Path, job: JobFile, rows: Sequence[Row]) -> None:
        # If it was submitted twice after all, the first one counts; the second one waits until it is cancelled.
        first = job.id or min((row.id for row in rows), key=lambda number: (len(number), number))
        meaning, words = self._template.meaning([row for row in rows if row.id in (first, "")] or rows)
        began = time.time() if job.began is None and meaning not in ("waiting", "cancelled") else job.began
        updated = replace(job, id=first, began=began, stage="submitted" if job.stage == "new" else job.stage)
        if updated != job:
            with contextlib.suppress(InputError):  # with a full disk its name is enough to find it again
                _keep(folder, job := updated)
        status = _status(meaning, words, began)
        if self._template.log and status.state != "waiting":
            self._fetch_log(folder, job)
        if status.state == "ended":
            self._sweep(folder, job)
            if is_file(folder / OUTCOME):  # counts more than the answer of a restarted scheduler
                status = JobStatus(state="ended", status=0, began=began)
        self._status[str(folder)] = status

    def _fetch_log(self, folder: Path, job: JobFile) -> None:
        with contextlib.suppress(NoAnswerError, InputError), replacing(folder / LOG, force=True) as stream:
            self._run(self._template.command("log", self._values(folder, job)), stream)

    def _wait(self, names: Iterable[str], error: NoAnswerError) -> None:
        """Schedule the next poll; raises SilentError if the scheduler has been silent for too long."""
        if self._silent_since_s is None:
            self._silent_since_s = time.monotonic()
        silent_s = time.monotonic() - self._silent_since_s
        name = self._template.name
        if silent_s > self._template.patience_s:
            raise SilentError(
                f"{name} has not answered for {silent_s:.0f} s ({error}): its jobs were left running, and the same "
                "command continues with them"
            ) from None
        for name in names:
            status = self._status.get(name, JobStatus(state="waiting"))
            self._status[name] = replace(status, reason=f"{name} does not answer: {error}")
        self._pause_s = min(2 * self._pause_s, max(_MAX_PAUSE_S, self._template.poll_every_s))
        self._next_s = time.monotonic() + self._pause_s

    def _run(self, command: Sequence[str], output: IO[bytes] | int = subprocess.PIPE) -> str:
        """Run a command and return its stdout.

        Raises NoAnswerError if it should be run again: its message says so, it is silent for too long, or it is a
        query that worked before.  Raises InputError with its message for other failures.
        """
        program = command[0]
        try:
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=ANSWER_S,
                start_new_session=True,  # Ctrl-C only reaches this program
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoAnswerError(f"{program} has not ended within {ANSWER_S:.0f} s", is_silent=True) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(f"{program!r} cannot be started: {reason}") from None
        text = (process.stdout or b"").decode("utf-8", errors="replace")
        if process.returncode == 0:
            self._answered.add(program)
            return text
        reason = process.stderr.decode("utf-8", errors="replace").strip() or text.strip() or "it said nothing"
        # kubectl writes the message twice.
        message = f"{program} failed ({process.returncode}): {cleaned(reason.splitlines()[-1])}"
        asks = program in (self._template.poll[0], *self._template.history[:1])
        if self._template.is_busy(reason) or (asks and program in self._answered):
            raise NoAnswerError(message)
        raise InputError(message)

    def _values(self, folder: Path, job: JobFile) -> dict[str, str]:
        if folder not in self._shapes:
            file = _plan_file(folder)
            self._shapes[folder] = node_shape(file.cluster, file.best.plan.num_devices)
        nodes, per_node = self._shapes[folder]
        limit_s = math.ceil(self._time_limit_s)
        return {
            "folder": str(folder),
            "plan": str(folder / PLAN),
            "log": str(folder / self._output),
            "outcome": str(folder / OUTCOME),
            "script": str(folder / job.script),
            "nodes": str(nodes),
            "gpus_per_node": str(per_node),
            "gpus": str(nodes * per_node),
            "steps": str(self._num_steps),
            "time_limit": f"{limit_s // 3600}:{limit_s // 60 % 60:02}:{limit_s % 60:02}",
            "time_limit_s": str(limit_s),
            "user": user_name(),
            "job": job.job,
            "id": job.id,
        }


def _status(meaning: Meaning, words: str, began: float | None) -> JobStatus:
    if meaning == "waiting" or meaning == "running":
        return JobStatus(state=meaning, reason=words, began=began)
    if meaning == "done":
        return JobStatus(state="ended", status=0, began=began)
    return JobStatus(state="ended", reason=f"{meaning} ({words})", cause=meaning, began=began)


def _known_end(folder: Path, job: JobFile) -> JobStatus | None:
    """Read from its folder how a job ended that the scheduler no longer knows."""
    if is_file(folder / OUTCOME):
        return JobStatus(state="ended", status=0, began=job.began)
    if job.stage == "cancelled":
        return JobStatus(state="ended", reason="cancelled", cause="cancelled", began=job.began)
    return None


def _plan_file(folder: Path) -> PlanFile:
    path = folder / PLAN
    return decode(PlanFile, read_table(path), str(path))


def _read(folder: Path) -> JobFile:
    path = folder / JOB
    return decode(JobFile, read_table(path), str(path))


def _keep(folder: Path, job: JobFile) -> None:
    write_text(folder / JOB, encode(job), force=True)
