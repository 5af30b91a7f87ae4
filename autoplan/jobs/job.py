"""Jobs that can be started, watched and ended by name, also by the next program after this one was killed."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from autoplan.base.errors import AutoplanError
from autoplan.base.files import refused_writes
from autoplan.jobs.program import GRACE_S, Program, end_programs, start_program

PLAN = "plan.json"  # in the folder of a trial: the plan to run
OUTCOME = "outcome.json"  # the measurements, as written by `autoplan run --out`; missing if the trial failed
LOG = "log.txt"  # log of the training
MESSAGES = "messages.txt"  # output of the program that ran it

# Not -m, which would import a search.py in the user's working folder.
AUTOPLAN = (sys.executable, "-P", "-c", "from autoplan.cli import main; main()")


# Reasons for a premature end of a job, if the scheduler reports one.
Cause = Literal["out of memory", "node failure", "preempted", "time limit", "cancelled", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a job; `status` is its exit status if known (negative: the signal that ended it).

    A lost job is unknown to the scheduler: only its folder may show what it did.  `began` is the time when it was first
    seen running, in seconds of `time.time`, if that is stored beyond this program.
    """

    state: Literal["waiting", "running", "ended", "lost"]
    reason: str = ""
    status: int | None = None
    cause: Cause | None = None
    began: float | None = field(default=None, compare=False)


class SilentError(AutoplanError):
    """The state of jobs was unavailable for too long: they are left running for the next program."""


class Jobs(Protocol):
    """Interface that starts and follows trials.  Names outlive this program: another one may poll and cancel them."""

    def start(self, folder: Path) -> str:
        """Start the trial prepared in `folder` and return its job name; raises InputError if it cannot start."""

    def find(self, folder: Path) -> str:
        """Return the name of the job that an earlier program started in `folder`; blank if unknown."""

    def poll(self, names: Sequence[str]) -> dict[str, JobStatus]:
        """Return the states of jobs without long blocking; raises SilentError after too long without an answer."""

    def cancel(self, names: Sequence[str]) -> None:
        """End these jobs and everything that they started; finished jobs are not affected."""


class LocalJobs:
    """Runs each trial on this machine with its own `autoplan run`.

    `options` are those of `autoplan run` after the plan and its files, such as --steps 10 or --command -- PROGRAM;
    {plan} and {folder} in them are replaced by the plan file and the folder of a trial.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = tuple(options)
        self._mine: dict[str, Program] = {}

    def start(self, folder: Path) -> str:
        """Start `autoplan run` on the plan in the folder; the job name contains machine, process and mark."""
        folder = folder.resolve()
        program = (*AUTOPLAN, "run", str(folder / PLAN), "--quiet")
        files = ("--out", str(folder / OUTCOME), "--log", str(folder / LOG), "--force")
        options = (
            option.replace("{plan}", str(folder / PLAN)).replace("{folder}", str(folder)) for option in self._options
        )
        with refused_writes(folder / MESSAGES), (folder / MESSAGES).open("wb") as messages:
            started = start_program((*program, *files, *options), messages)
        name = f"{socket.gethostname()}:{started.pid}:{started.mark}"
        self._mine[name] = started
        return name

    def find(self, folder: Path) -> str:
        """Return a blank name: a local job has a name only after it has started."""
        return ""

    def poll(self, names: Sequence[str]) -> dict[str, JobStatus]:
        """Return the states of jobs, with the exit status of those that this program started."""
        return {name: self._status(name) for name in names}

    def _status(self, name: str) -> JobStatus:
        host, program = self._find(name)
        if program is None:
            return JobStatus(state="lost", reason=f"it was started on {host}, this is {socket.gethostname()}")
        if program.process is None:
            return JobStatus(state="running" if program.is_running() else "ended")
        status = program.process.poll()
        return JobStatus(state="running") if status is None else JobStatus(state="ended", status=status)

    def cancel(self, names: Sequence[str]) -> None:
        """End these jobs: `autoplan run` ends its program first, so it gets twice the grace period of programs."""
        programs = [program for _, program in map(self._find, names) if program is not None]
        end_programs([program for program in programs if program.is_running()], grace_s=2 * GRACE_S)

    def _find(self, name: str) -> tuple[str, Program | None]:
        """Return (machine, the program if it runs on this machine)."""
        host, _, text = name.partition(":")
        pid, _, mark = text.partition(":")
        if name in self._mine:
            return host, self._mine[name]
        return host, Program(pid=int(pid), mark=mark) if host == socket.gethostname() and pid.isdigit() else None
