"""Ranks that take few samples or go wrong, for real: what replaces `worker.prepare` in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is loaded in the ranks only
    from multiprocessing.connection import Connection

    from autoplan.base.processes import RankPlace
    from autoplan.profiler.operations.inputs import Run, StagedRun
    from autoplan.profiler.protocol import Rules, Task
    from autoplan.profiler.worker import Ranks

EXITS, DIES, HANGS, LIES, REFUSES, HANGS_INSIDE = range(101, 107)  # as m of a gemm, on rank 1


def answer_late(place: RankPlace, line: Connection, *, after_s: float) -> None:
    """The whole work of a rank that has nothing to say for a while."""
    time.sleep(after_s)
    line.send("late")


def end_late(place: RankPlace, line: Connection, *, after_s: float, mark: str) -> None:
    """The whole work of a rank that has things to do after its program has no more tasks."""
    line.send("here")
    with contextlib.suppress(EOFError):
        line.recv()
    time.sleep(after_s)
    Path(mark).touch()


def fill_or_abort(place: RankPlace, line: Connection) -> None:
    """The whole work of a rank that runs out of memory, and of others that are aborted as they miss it."""
    from autoplan.base.processes import Fault

    announced = Path(f"{place.meeting_point.removeprefix('file://')}-announced")
    if place.rank == 1:
        line.send(Fault(text="out of memory: 1 GiB", is_out_of_memory=True))
        announced.touch()
        os._exit(2)
    while not announced.exists():  # on a busy machine rank 1 may be the last to start
        time.sleep(0.01)
    os.abort()


def few_samples(task: Task, ranks: Ranks) -> Run | StagedRun | None:
    """As few and as short ones as there can be: what is asked here is whether, not how long."""
    from autoplan.profiler import worker
    from autoplan.profiler.protocol import rules_for

    def rules(*device_and_mode: Any, **more: float) -> Rules:
        return replace(rules_for(*device_and_mode, **more), num_samples=4, sample_s=1e-3)

    worker.rules_for = rules
    return worker.prepare(task, ranks)


def slow_link(task: Task, ranks: Ranks) -> Run | StagedRun | None:
    """Calls of a second, whatever was expected of them."""
    return lambda: time.sleep(1.0)


def prepare(task: Task, ranks: Ranks) -> Run | StagedRun | None:
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
    run = few_samples(task, ranks)
    if fault == HANGS_INSIDE:
        return lambda: time.sleep(3600)
    return run


def slow_device(task: Task, ranks: Ranks) -> Run | StagedRun | None:
    """Products that take twice as long on rank 1, which spins for as long again."""
    run = few_samples(task, ranks)
    if task.operation != "gemm" or ranks.rank != 1:
        return run
    assert callable(run)
    began = time.process_time()
    for _ in range(10):
        run()
    each_s = (time.process_time() - began) / 10

    def slowed() -> None:
        run()
        _spin(each_s)

    return slowed


def slow_messages(task: Task, ranks: Ranks) -> Run | StagedRun | None:
    """Messages of rank 1 to others take 60 ms more, there and back."""
    from autoplan.profiler.operations.inputs import ChainedRun

    run = few_samples(task, ranks)
    if not isinstance(run, ChainedRun) or ranks.rank != 1:
        return run

    def slowed() -> None:
        run.run()
        _spin(0.06)

    return replace(run, run=slowed)


def _spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
