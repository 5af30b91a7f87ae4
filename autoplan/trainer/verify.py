"""Queries to the memory oracle in separate processes, with large plans extrapolated from small ones.

Two small layer counts are enough: at every moment that may be the peak of a step, bytes are linear in the layers.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from autoplan.base.errors import InputError
from autoplan.base.processes import Children, CrewError, RankPlace
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.trainer.rules import RULES
from autoplan.spec.chunk_order import chunks_of_stages
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.spec.training import TrainingSpec
from autoplan.trainer.question import Moment, Question

BUDGET_S = 45.0  # no further stage is started after this time
_LIMIT_S = 300.0  # limit of one small plan
_MIN_TORCH = (2, 13)  # the oracle replaces the shape exchange of its pipelines
_FEW, _MORE = 2, 4  # layers per chunk
_FILLED = 3  # groups of micro-batches that bring a pipeline to its steady state


def ask(question: Question, *, budget_s: float = BUDGET_S) -> dict[int, float]:
    """Return peak bytes of tensors by pipeline rank, without fragmentation, context and communicators.

    The first and last stage are computed first; stages not started within `budget_s` are missing.  Raises CrewError if
    torch fails.
    """
    check(question.model, question.plan, question.seq_len)
    began, last = time.monotonic(), question.plan.pp - 1
    peaks: dict[int, float] = {}
    for stage in sorted(range(question.plan.pp), key=lambda stage: (stage not in (0, last), stage)):
        if peaks and time.monotonic() - began > budget_s:
            break
        peaks[stage] = peak_bytes(replace(question, stage=stage))
    return peaks


def check(model: ModelSpec, plan: ParallelPlan, seq_len: int) -> None:
    """Raise an error for plans that the built-in trainer does not run."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("the memory oracle is torch itself, which is not installed: pip install 'autoplan[profile]'")
    installed = importlib.metadata.version("torch")
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < _MIN_TORCH:
        least = ".".join(map(str, _MIN_TORCH))
        raise InputError(
            f"the memory oracle needs torch {least} or later, here is {installed}: pip install --upgrade torch"
        )
    reason = "the memory oracle is the built-in trainer, which does not run the plan"
    check_legal(RULES, model, TrainingSpec(seq_len=seq_len), plan, reason)


def peak_bytes(question: Question) -> float:
    """Return the peak of one pipeline rank, extrapolated from small plans if its chunks have many equal layers."""
    model, plan = question.model, question.plan
    counts = chunk_layers(plan, model.num_layers)
    chunks = chunks_of_stages(counts, plan.pp, plan.schedule)[question.stage]
    count = plan.num_microbatches
    filled = _filled(plan)
    base = _with_microbatches(question, filled)
    if max(counts) <= _MORE or len(set(model.layers)) > 1 or plan.recompute_num_layers is not None:
        questions, layers = [base], 0.0
    else:
        questions = [_with_layers(base, _FEW), _with_layers(base, _MORE)]
        layers = (sum(chunks) / len(chunks) - _FEW) / (_MORE - _FEW)  # unequal chunks count as their mean
    if plan.pp > 1 and filled < count:
        questions.append(_with_microbatches(questions[0], filled + plan.pp))
    answers = _answer(questions)
    more, longer = answers[min(1, len(questions) - 1)] if layers else answers[0], answers[-1]
    # A pipeline stage has a buffer for every micro-batch, even if only few of them are live.
    times = (count - filled) / plan.pp if plan.pp > 1 and filled < count else 0.0
    return max(
        few + layers * (more[moment] - few) + times * (longer[moment] - few) for moment, few in answers[0].items()
    )


def _filled(plan: ParallelPlan) -> int:
    """Return the smallest number of micro-batches with the same number alive at once."""
    count = plan.num_microbatches
    if plan.pp == 1:
        return min(count, 2)
    return min(count, _FILLED * plan.pp) if count % plan.pp == 0 else count


def _with_microbatches(question: Question, count: int) -> Question:
    plan = question.plan
    return replace(question, plan=replace(plan, global_batch=count * plan.micro_batch * plan.dp))


def _with_layers(question: Question, num_layers: int) -> Question:
    plan = question.plan
    model = replace(question.model, num_layers=num_layers * plan.pp * plan.vp)
    return replace(question, model=model, plan=replace(plan, layers_per_chunk=None))


def _answer(questions: list[Question]) -> list[dict[Moment, int]]:
    work = functools.partial(_serve, questions=questions)
    with Children(work, None, 1, limit_s=_LIMIT_S, preload=("autoplan.trainer.oracle",)) as child:
        answer = child.start()
    if not isinstance(answer, list):
        raise CrewError(f"the memory oracle answered {type(answer).__name__}")
    return answer


def _serve(place: RankPlace, line: Connection, *, questions: list[Question]) -> None:
    from autoplan.trainer.oracle import serve

    serve(line, questions)
