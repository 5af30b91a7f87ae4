"""Does every plan of two ranks train what one process trains?"""

from __future__ import annotations

import itertools

import pytest

from autoplan.base.errors import InputError
from autoplan.spec.plan import ParallelPlan

pytest.importorskip("torch")

from autoplan.trainer.run import check_task
from autoplan.trainer.task import Task
from trained import assert_alike, task


def legal(tasks: list[Task]) -> list[Task]:
    kept = []
    for candidate in tasks:
        try:
            check_task(candidate)
        except InputError:
            continue
        kept.append(candidate)
    return kept


def plans_of_two() -> list[ParallelPlan]:
    """Ways to use two ranks, with the most micro-batches and with half as many, and with layers recomputed."""
    pipelines = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]
    shared = [{"dp_shard": 2, "sharding": sharding} for sharding in ("none", "zero1", "zero2", "zero3")]
    cut = [{"tp": 2, "sp": sp} for sp in (False, True)]
    piped = [{"pp": 2, "schedule": schedule, "vp": vp} for schedule, vp in pipelines]
    found = []
    turns = [(1, "none"), (2, "none"), (1, "full")]
    for place, (micro_batch, recompute) in itertools.product([*shared, *cut, *piped], turns):
        plan = {"global_batch": 4, "micro_batch": micro_batch, "recompute": recompute, **place}
        try:
            found.append(ParallelPlan(**plan))  # type: ignore[arg-type]
        except InputError:
            continue
    return found


def test_every_plan_of_two_ranks_trains_what_one_process_does() -> None:
    tasks = legal([task(plan) for plan in plans_of_two()])
    assert len(tasks) >= 35
    assert_alike(tasks)
