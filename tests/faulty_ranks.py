"""Ranks that go wrong, for real: what `worker.prepare` is replaced by in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is loaded in the ranks only
    from multiprocessing.connection import Connection

    from autoplan.children import Place
    from profiler.maker import Run
    from profiler.protocol import Task
    from profiler.worker import Ranks

EXITS, DIES, HANGS, LIES, REFUSES, HANGS_INSIDE = range(101, 107)  # as m of a gemm, on rank 1


def answer_late(place: Place, line: Connection, *, after_s: float) -> None:
    """The whole work of a rank that has nothing to say for a while."""
    time.sleep(after_s)
    line.send("late")


def end_late(place: Place, line: Connection, *, after_s: float, told: Path) -> None:
    """The whole work of a rank that takes a while to end once nobody listens any more."""
    line.send("here")
    with contextlib.suppress(EOFError):
        line.recv()
    time.sleep(after_s)
    told.touch()


def prepare(task: Task, ranks: Ranks) -> Run | None:
    from profiler.worker import prepare

    vars(ranks).pop("gather", None)
    fault = task.shape[0] if ranks.rank == 1 else 0
    if fault == EXITS:
        os._exit(7)
    if fault == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == HANGS:
        time.sleep(3600)
    if fault == REFUSES:
        raise RuntimeError("no kernel image is available\nfor execution on the device")
    if fault == LIES:
        gather = ranks.gather
        vars(ranks)["gather"] = lambda mine: gather("garbage" if mine else mine)
    run = prepare(task, ranks)
    if fault == HANGS_INSIDE:
        return lambda: time.sleep(3600)
    return run
