"""Measuring ranks started by this program, each of them a `worker`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.processes import Children, RankPlace, check_torch, place_from
from autoplan.base.units import check_count
from autoplan.profiler.protocol import Hello, Job

PRELOAD = ("autoplan.profiler.worker",)


def default_num_ranks() -> int:
    """Return the number of devices, or of cores (at most two) on a machine without devices."""
    import torch

    return torch.cuda.device_count() or min(len(os.sched_getaffinity(0)), 2)


def place_with(ranks: int) -> tuple[RankPlace | None, int]:
    """Return this program's place from a launcher, and the number of ranks; without launcher `ranks` start here."""
    check_torch()
    place = place_from(os.environ)
    check_count("--ranks", ranks, at_least=0)
    if place and ranks:
        raise InputError(f"--ranks is for ranks started here: {place.launcher} has started {place.num_ranks}")
    return place, (place.num_ranks if place else ranks) or default_num_ranks()


class Crew(Children):
    """The measuring ranks: given a `Task`, they return an `Outcome`."""

    def __init__(
        self, job: Job, place: RankPlace | None, num_ranks: int, prepare: Callable[..., Any] | None = None
    ) -> None:
        work = functools.partial(_measure, job=job, prepare=prepare)
        super().__init__(work, place, num_ranks, limit_s=job.limit_s, preload=PRELOAD)

    def start(self) -> Hello | None:
        """Start the ranks and return their first message; None if rank 0 is not here."""
        hello = super().start()
        assert hello is None or isinstance(hello, Hello)
        return hello


def _measure(place: RankPlace, line: Connection, *, job: Job, prepare: Callable[..., Any] | None) -> None:
    from autoplan.profiler.worker import serve

    serve(place, job, line, prepare)
