"""The user's program, run under supervision and ended together with everything that it started."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from autoplan.base.errors import InputError, RunFailedError

GRACE_S = 5.0  # between asking a program to end and ending it
_MARK = "AUTOPLAN_PROGRAM"  # environment variable that marks everything started by a program
_CHUNK = 2**16
_POLL_S = 0.1
_PROC = Path("/proc")


class ProgramError(RunFailedError):
    """The user's program failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """End of a program: by itself, or stopped after enough output or after a long silence."""

    kind: Literal["by itself", "enough", "silent"]
    status: int = 0  # exit status; negative: the signal that ended it


def run_program(arguments: Sequence[str], on_output: Callable[[bytes, float], bool], *, limit_s: float) -> Ending:
    """Run a program until it ends, has written enough, or writes nothing for `limit_s`.

    `on_output` receives the output (stdout and stderr) and its time (monotonic, seconds); it returns whether to stop.
    However this function ends, the program leaves nothing running on this machine: its process group is asked to
    terminate, and killed after `GRACE_S`, including children that left the group (Linux).
    """
    program = start_program(arguments, subprocess.PIPE)
    assert program.process is not None
    try:
        return _follow(program.process, on_output, limit_s)
    finally:
        end_programs([program])
        if program.process.stdout:
            program.process.stdout.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A marked process group of a program; only its starter has `process`, others find it by pid and mark."""

    pid: int
    mark: str
    process: subprocess.Popen[bytes] | None = None

    def is_running(self) -> bool:
        """Return whether any part of it still runs on this machine."""
        if (self.process and self.process.poll() is None) or _marked(self.mark):
            return True
        if _PROC.is_dir():
            return False  # only zombies are left of the group
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the process group, and processes that left it."""
        self.signal(signal.SIGKILL)
        for pid in _marked(self.mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def start_program(arguments: Sequence[str], output: IO[bytes] | int) -> Program:
    """Start a program, with stdout and stderr written to `output`."""
    # The mark contains that of the surrounding program, so that the latter finds all its descendants.
    mark = "/".join((*filter(None, [os.environ.get(_MARK)]), uuid.uuid4().hex))
    # Python buffers its output unless it is a terminal.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", _MARK: mark}
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{arguments[0]!r} cannot be started: {reason}") from None
    return Program(pid=process.pid, mark=mark, process=process)


def end_programs(programs: Sequence[Program], *, grace_s: float | None = None) -> None:
    """Ask programs to terminate, and kill those still running after `grace_s` (by default `GRACE_S`)."""
    try:
        for program in programs:
            program.signal(signal.SIGTERM)
        until = time.monotonic() + (GRACE_S if grace_s is None else grace_s)
        while any(program.is_running() for program in programs) and time.monotonic() < until:
            time.sleep(_POLL_S / 2)
    finally:  # also after Ctrl-C while waiting
        until = time.monotonic() + GRACE_S
        while (running := [program for program in programs if program.is_running()]) and time.monotonic() < until:
            for program in running:
                program.kill()
            time.sleep(_POLL_S / 10)
        for program in programs:
            if program.process:
                program.process.poll()


def _follow(process: subprocess.Popen[bytes], on_output: Callable[[bytes, float], bool], limit_s: float) -> Ending:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        last_output_s = time.monotonic()
        while True:
            has_ended = process.poll() is not None  # checked before reading, so that all its output is available
            if selector.select(_POLL_S):
                data = os.read(process.stdout.fileno(), _CHUNK)
                last_output_s = time.monotonic()
                if data and on_output(data, last_output_s):
                    return Ending(kind="enough")
                if not data:  # all writers are closed
                    return _wait(process, limit_s)
            elif has_ended:  # only its children could still write
                return Ending(kind="by itself", status=process.returncode)
            elif time.monotonic() - last_output_s >= limit_s:
                return Ending(kind="silent")


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> Ending:
    try:
        return Ending(kind="by itself", status=process.wait(limit_s))
    except subprocess.TimeoutExpired:
        return Ending(kind="silent")


def _marked(mark: str) -> list[int]:
    """Return the processes with the mark in their environment; empty if the system does not show it."""
    variable = f"{_MARK}={mark}".encode()
    pids = []
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours, or gone
            if variable in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids
