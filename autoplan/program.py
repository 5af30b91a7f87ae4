"""How does a program of the user run under watch, and end with all that it started?"""

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
from typing import Literal

from autoplan.errors import InputError

GRACE_S = 5.0  # between asking a program to end and ending it
_MARK = "AUTOPLAN_PROGRAM"  # environment variable by which all that a program starts is known
_CHUNK = 2**16
_POLL_S = 0.1
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a program ended: by itself, or stopped here because enough was heard or nothing for too long."""

    kind: Literal["by itself", "enough", "silent"]
    status: int = 0  # that it exited with; negative: the signal that ended it


def run_program(arguments: Sequence[str], hear: Callable[[bytes, float], bool], *, limit_s: float) -> Ending:
    """Run a program until it ends, has said enough, or says nothing for `limit_s`.

    `hear` takes what it writes, to stdout or stderr, and the moment (monotonic, seconds); it answers whether that is
    enough.  However this function is left, nothing that the program started is left behind on this machine: its
    process group is asked to end, and after `GRACE_S` ended, with those of its children that made themselves
    independent (Linux).
    """
    mark = uuid.uuid4().hex
    # Python would keep lines back for a while where nobody seems to look.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", _MARK: mark}
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{arguments[0]!r} cannot be started: {said}") from None
    try:
        return _follow(process, hear, limit_s)
    finally:
        _end(process, mark)


def _follow(process: subprocess.Popen[bytes], hear: Callable[[bytes, float], bool], limit_s: float) -> Ending:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        heard = time.monotonic()
        while True:
            if selector.select(_POLL_S):
                data = os.read(process.stdout.fileno(), _CHUNK)
                heard = time.monotonic()
                if data and hear(data, heard):
                    return Ending(kind="enough")
                if not data:  # nobody can write any more
                    return _wait(process, limit_s)
            elif process.poll() is not None:  # only children of it could still write
                return Ending(kind="by itself", status=process.returncode)
            elif time.monotonic() - heard >= limit_s:
                return Ending(kind="silent")


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> Ending:
    try:
        return Ending(kind="by itself", status=process.wait(limit_s))
    except subprocess.TimeoutExpired:
        return Ending(kind="silent")


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the program and all that it started; it is known by its process group and by its mark."""
    try:
        _signal_group(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while _is_running(process, mark) and time.monotonic() < until:
            time.sleep(_POLL_S / 2)
    finally:  # impatience is answered too
        until = time.monotonic() + GRACE_S
        while _is_running(process, mark) and time.monotonic() < until:
            _signal_group(process, signal.SIGKILL)
            for pid in _marked(mark):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S / 10)
        process.poll()
        if process.stdout:
            process.stdout.close()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _is_running(process: subprocess.Popen[bytes], mark: str) -> bool:
    if process.poll() is None or _marked(mark):
        return True
    if _PROC.is_dir():
        return False  # what is left of the group has ended, and waits for its parent
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _marked(mark: str) -> list[int]:
    """Processes whose environment bears the mark; none where the system does not tell."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours, or gone
            if wanted in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
