"""Run of a plan: starts and follows its ranks, and collects their measurements."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.connection import Connection

from autoplan.base.errors import InputError
from autoplan.base.processes import Children, CrewError, RankPlace
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.trainer.rules import DECLINES, RULES, check_model
from autoplan.spec.model import ModelSpec
from autoplan.spec.training import TrainingSpec
from autoplan.trainer.task import Advance, Data, Task, TrainingReport

PRELOAD = ("autoplan.trainer.rank",)
NUM_BYTES = 256  # vocabulary of a text in bytes


def usual_data(model: ModelSpec) -> Data:
    """Return the text if the model's vocabulary has a token for every byte, otherwise random tokens."""
    return "text" if model.vocab_size >= NUM_BYTES else "synthetic"


def check_task(task: Task) -> None:
    """Raise an error for tasks that torch's own parallelism cannot run, or trains incorrectly."""
    check_model(task.model)
    if task.data == "text" and usual_data(task.model) != "text":
        raise InputError(
            f"a text needs vocab_size {NUM_BYTES} or more, one token a byte; {task.model.name!r} has "
            f"{task.model.vocab_size}: use --data synthetic"
        )
    check_legal(RULES, task.model, TrainingSpec(seq_len=task.seq_len), task.plan, DECLINES)


def run_task(
    task: Task, place: RankPlace | None = None, *, advance: Callable[[Advance], None] = lambda advance: None
) -> TrainingReport | None:
    """Train with a plan at a `place`, or on ranks started here; return the report on rank 0, None elsewhere."""
    check_task(task)
    if place and place.num_ranks != task.plan.num_devices:
        raise InputError(
            f"the plan is for {task.plan.num_devices} devices, {place.launcher} has started {place.num_ranks} ranks"
        )
    work = functools.partial(_train, task=task)
    with Children(work, place, task.plan.num_devices, limit_s=task.limit_s, preload=PRELOAD) as ranks:
        if not ranks.leads:
            ranks.start()
            ranks.follow()
            return None
        answer = ranks.start()
        while isinstance(answer, Advance):
            advance(answer)
            answer = ranks.answer()
        if not isinstance(answer, TrainingReport):
            raise CrewError(f"rank 0 answered {type(answer).__name__} instead of a report")
        return answer


def _train(place: RankPlace, line: Connection, *, task: Task) -> None:
    from autoplan.trainer.rank import serve

    serve(place, line, task=task)
