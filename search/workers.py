"""Worker processes on this machine, which join a shared search and exit with it, or with the first worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from threading import Thread

from autoplan.base.errors import AutoplanError, InputError

MAX_WORKERS = 256


@contextmanager
def worker_processes(join: Callable[[], object], count: int) -> Iterator[None]:
    """Start `count` further processes that call `join`, and wait for them; an error ends them, as does our own end."""
    if not 0 <= count < MAX_WORKERS:
        raise InputError(f"--workers must be from 1 to {MAX_WORKERS}, got {count + 1}")
    if count and "fork" not in multiprocessing.get_all_start_methods():
        raise InputError("--workers cannot start processes here: start this command several times with one --storage")
    processes = [multiprocessing.get_context("fork").Process(target=_run, args=(join,)) for _ in range(count)]
    # A signal that reaches a process right after the fork is lost to Python, so it waits until `_run` can take it.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        for process in processes:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    try:
        yield
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join()


def _run(join: Callable[[], object]) -> None:
    """Join, and exit quietly on errors, which also stop the first worker and are reported there."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # what is shared is left in order
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    Thread(target=_leave_with_the_first, daemon=True).start()
    try:
        join()
    except (AutoplanError, KeyboardInterrupt):
        sys.exit(1)


def _leave_with_the_first() -> None:
    """End this process when the one that started it has ended, for example killed."""
    if first := multiprocessing.parent_process():
        wait([first.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
