"""Jobs started, watched and ended by name, by one program or by the next after it was killed."""

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

PLAN = "plan.json"  # in the folder of a trial: what it runs
OUTCOME = "outcome.json"  # what it measured, as `autoplan run --out` writes it; not there where it failed
LOG = "log.txt"  # of the training
MESSAGES = "messages.txt"  # of the program that ran it

# Not -m: a search.py where the user stands would be taken for ours.
AUTOPLAN = (sys.executable, "-P", "-c", "from autoplan.cli import main; main()")


# Why a job ended before its time, where a scheduler tells.
Cause = Literal["out of memory", "node failure", "preempted", "time limit", "cancelled", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """State of a job; `status` is what it exited with, where that is known (negative: the signal that ended it).

    A lost one cannot be asked for any more: what it did is known from its folder alone, if at all.  `began` is when it
    was first seen to run, in seconds of `time.time`, where that outlives this program.
    """

    state: Literal["waiting", "running", "ended", "lost"]
    reason: str = ""
    status: int | None = None
    cause: Cause | None = None
    began: float | None = field(default=None, compare=False)


class SilentError(AutoplanError):
    """State of jobs could not be learnt for too long: they are left as they are, for the next program."""


class Jobs(Protocol):
    """Starts trials and follows them.  Names survive this program: another one may poll and cancel them."""

    def start(self, folder: Path) -> str:
        """Start the trial that was prepared in `folder`; the name of its job.  An `InputError` says why it cannot."""

    def find(self, folder: Path) -> str:
        """The name of the job that a program which is gone started in `folder`; blank where nothing tells."""

    def poll(self, names: Sequence[str]) -> dict[str, JobStatus]:
        """Return the states of jobs; never blocks for long.  A `SilentError` where nobody has answered for too long."""

    def cancel(self, names: Sequence[str]) -> None:
        """End these jobs with all that they started; those that have ended stay as they are."""


class LocalJobs:
    """Runs trials on this machine, each by an `autoplan run` of its own.

    `options` are those of `autoplan run` after the plan and its files, such as --steps 10 or --command -- PROGRAM;
    {plan} and {folder} in them stand for the plan file and the folder of a trial.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = tuple(options)
        self._mine: dict[str, Program] = {}

    def start(self, folder: Path) -> str:
        """Start `autoplan run` on the plan of the folder; its name tells the machine, the process and its mark."""
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
        """Do nothing: the name of a job is known once it has started."""
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
        """End these jobs: `autoplan run` is asked to end what it runs, which may take as long as that is given."""
        programs = [program for _, program in map(self._find, names) if program is not None]
        end_programs([program for program in programs if program.is_running()], grace_s=2 * GRACE_S)

    def _find(self, name: str) -> tuple[str, Program | None]:
        """Return (the machine, the program if it is this machine)."""
        host, _, text = name.partition(":")
        pid, _, mark = text.partition(":")
        if name in self._mine:
            return host, self._mine[name]
        return host, Program(pid=int(pid), mark=mark) if host == socket.gethostname() and pid.isdigit() else None
