"""Models and plans to train, and plans that one crew of ranks trains one after the other.

Starting ranks takes longer than the steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from autoplan.base.processes import Children, Fault, RankPlace
from autoplan.spec.blocks import Experts
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.trainer.run import PRELOAD
from autoplan.trainer.task import Deviation, Task
from model_specs import GPT

DENSE = ModelSpec(
    name="dense", num_layers=4, hidden_size=32, vocab_size=256, num_heads=4, num_kv_heads=2, ffn_size=64, qk_norm="head"
)
MOE = replace(
    DENSE,
    name="experts",
    moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=32, num_dense_layers=1, shared_expert_ffn_size=16),
)
OLD = replace(DENSE, name="old", num_kv_heads=None, qk_norm="none", **GPT | {"max_positions": 16})
SLIDING = replace(DENSE, name="sliding", window=4, full_attention_interval=2)


def task(plan: ParallelPlan, model: ModelSpec = DENSE) -> Task:
    return Task(model=model, plan=plan, seq_len=16, dtype="bf16", tracks_memory=False)


def plan_of(**axes: object) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 8, "micro_batch": 1, **axes})  # type: ignore[arg-type]


def assert_alike(tasks: list[Task]) -> None:
    tasks = [replace(task, model=replace(task.model, num_layers=_enough_layers(task.plan))) for task in tasks]
    for run, check in zip(tasks, checks(tasks), strict=True):
        assert isinstance(check, Deviation)
        assert check.holds, (run.plan.describe(), check)


def _enough_layers(plan: ParallelPlan) -> int:
    """One layer a chunk; two where there is one chunk, or as many as are shared out unevenly."""
    return sum(plan.layers_per_chunk or ()) or max(plan.pp * plan.vp, 2)


def checks(tasks: Sequence[Task]) -> list[Deviation]:
    """How far each of the plans, all of them for as many ranks, is from one process."""
    work = functools.partial(_compare, tasks=tuple(tasks))
    with Children(work, None, tasks[0].plan.num_devices, limit_s=120.0, preload=PRELOAD) as ranks:
        return [ranks.start(), *(ranks.answer() for _ in tasks[1:])]


def peaks_of_building(task: Task) -> int:
    """Most bytes that the tensors of rank 0 hold at once before its first step."""
    with Children(functools.partial(_build, task=task), None, task.plan.num_devices, limit_s=60.0) as ranks:
        peak = ranks.start()
    assert isinstance(peak, int)
    return peak


def _build(place: RankPlace, line: Connection, *, task: Task) -> None:
    import torch.distributed as dist

    from autoplan.trainer.device import join
    from autoplan.trainer.step import Training
    from autoplan.trainer.tensor_memory import StorageTracker

    device = join(place, 60.0)
    with StorageTracker() as tracker:
        Training(task.model, task.plan, seq_len=task.seq_len, device=device, dtype=task.dtype)
    if place.rank == 0:
        line.send(tracker.peak_bytes)
    dist.barrier()  # nobody leaves before rank 0 has told


def _compare(place: RankPlace, line: Connection, *, tasks: tuple[Task, ...]) -> None:
    import logging

    from torch.distributed import barrier

    from autoplan.trainer import rank
    from autoplan.trainer.device import join
    from autoplan.trainer.rank import collected, differences, error_cause, task_on_one_rank, trained_state

    rank.CHECKED_STEPS = 2  # the second begins with what the first has left; a third would not tell more
    by_one = functools.cache(trained_state)  # the same for many plans
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        device = join(place, 60.0)
        for task in tasks:
            spread = collected(trained_state(task, device), place.rank)
            if place.rank == 0:
                line.send(differences(spread, by_one(task_on_one_rank(task), device)))
        barrier()  # a rank that has ended counts as lost
    except Exception as error:
        line.send(Fault(text=f"{task.plan.describe()}: {error_cause(error).text}"))
    os._exit(0)
