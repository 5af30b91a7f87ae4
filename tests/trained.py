"""Plans that are trained by one crew of ranks, one after the other: starting ranks takes longer than the steps."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

from autoplan.children import Children, Fault, Place
from autoplan.trainer.run import PRELOAD
from autoplan.trainer.task import Check, Task


def checks(tasks: Sequence[Task]) -> list[Check]:
    """How far each of the plans, all of them for as many ranks, is from one process."""
    work = functools.partial(_compare, tasks=tuple(tasks))
    with Children(work, None, tasks[0].plan.num_devices, limit_s=120.0, preload=PRELOAD) as ranks:
        return [ranks.start(), *(ranks.answer() for _ in tasks[1:])]


def _compare(place: Place, line: Connection, *, tasks: tuple[Task, ...]) -> None:
    import logging

    from autoplan.trainer.rank import compared, describe, join

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        device = join(place, 60.0)
        for task in tasks:
            found = compared(task, place.rank, device)
            if place.rank == 0:
                line.send(found)
    except Exception as error:
        line.send(Fault(text=f"{task.plan.describe()}: {describe(error)}"))
    os._exit(0)
