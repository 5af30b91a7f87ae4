"""Messages between pipeline stages, and the reduction of tied embeddings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.collectives.collective import Collective, LinkTimes
from autoplan.cost.kernels.sizes import norm_tokens, padded_vocab, rank_tokens
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.links import Links
from autoplan.cost.network.process_groups import process_groups
from autoplan.cost.pipeline.layout import V_SCHEDULES
from autoplan.cost.state_types import reduced_grad_bytes
from autoplan.spec.finetuning import EMBEDDING
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


class Message(NamedTuple):
    """Message between neighbouring chunks: activations forward, their gradients backward."""

    send: Collective
    gather: Collective  # of slices, on the receiving ranks


def message(problem: Problem, batch: PlanBatch) -> Message:
    """Describe the message between two neighbouring chunks.

    Without sequence parallelism every tensor-parallel rank has the whole hidden state: it sends all of it, or 1 / tp,
    and the receivers gather the slices (arXiv:2104.04473, 4.1; DeepSpeed runtime/pipe/engine.py, PartitionedTensor).
    """
    groups, tokens = process_groups(batch), norm_tokens(problem, batch)
    scatters = (not problem.framework.network.torch_pipelines) & ~batch.sp
    sent = np.where(scatters, rank_tokens(problem, batch) / batch.tp, tokens)
    hidden, element = problem.model.hidden_size, problem.training.element_bytes
    return Message(
        send=Collective(
            "pp", "send_recv", groups.pp, element * sent * hidden, forward=1.0, backward=1.0, is_repeated=False
        ),
        gather=Collective(
            "pp",
            "all_gather",
            groups.tp,
            element * tokens * hidden,
            forward=scatters.astype(np.float64),
            backward=scatters.astype(np.float64),
            is_repeated=False,
        ),
    )


def message_s(problem: Problem, batch: PlanBatch, across: LinkTimes | None = None) -> Floats:
    """Time of one message between neighbouring stages; `across` replaces the problem's own links."""
    links, described, framework = Links.of(problem), message(problem, batch), problem.framework
    sent = described.send.seconds(across or links)
    polls = np.where(batch.pp > 1, framework.network.message_poll_s, 0.0)
    return sent + polls + described.gather.seconds(links)


def tied_table(problem: Problem, batch: PlanBatch, stages: int) -> Collective:
    """Describe the gradient reduction of an embedding tied across `stages`; a V schedule has both ends on one rank."""
    finetuning = problem.training.finetuning
    is_trained = finetuning is None or finetuning.trains(EMBEDDING)
    has_copies = problem.model.tied_embeddings and stages > 1 and is_trained
    vocab = padded_vocab(problem, batch)
    return Collective(
        "tied embedding",
        "all_reduce",
        ProcessGroup(process_groups(batch).pp.stride * (stages - 1), np.full(len(batch), 2, dtype=np.int64)),
        reduced_grad_bytes(problem, batch) * vocab * problem.model.hidden_size / batch.tp,
        at_end=np.where(np.isin(batch.schedule, V_SCHEDULES), 0.0, 1.0) * has_copies,
    )
