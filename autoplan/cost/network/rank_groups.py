"""Which ranks of a plan exchange data, and how large are their buffers?

Every array has one element per plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.kernels.arithmetic import BlockShape
from autoplan.cost.kernels.times import expert_tokens, norm_tokens, padded_vocab, rank_tokens
from autoplan.spec.enums import Precision, Sharding
from autoplan.spec.model import Block
from autoplan.spec.plan import PP_BEFORE_DP, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.levels import Gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Stride and size of every communicator of a plan."""

    tp: tuple[Ints, Ints]
    cp: tuple[Ints, Ints]
    shard: tuple[Ints, Ints]  # dense states: dp_shard x cp
    replicate: tuple[Ints, Ints]  # copies of a shard group
    ep: tuple[Ints, Ints]
    expert_shard: tuple[Ints, Ints]  # expert states
    pp: tuple[Ints, Ints]
    gaps: Gaps | None  # in `shard` and all that hold it, where pipelines come between the context-parallel groups

    @property
    def dense_copies(self) -> tuple[Ints, Ints]:
        """All ranks with the same dense parameters."""
        return self.shard[0], self.shard[1] * self.replicate[1]

    @property
    def expert_copies(self) -> tuple[Ints, Ints]:
        """All ranks with the same expert parameters."""
        return self.expert_shard[0], self.expert_shard[1] * self.replicate[1]


@lru_cache(maxsize=4)
def groups(batch: PlanBatch) -> Groups:
    """The communicators of every plan, worked out once for all that asks of a batch.

    Expert groups re-use the ranks of a stage: etp fastest, then ep.
    Where pipelines come before data parallelism, replicas are whole pipelines and their ranks so much further apart.
    Without sharding all replicas are one group, however they are split.
    Source: Megatron-LM core/parallel_state.py, RankGenerator.
    """
    ones = np.ones(len(batch), dtype=np.int64)
    stage = batch.tp * batch.cp * batch.dp
    replicas = np.where(batch.sharding == Sharding.NONE.code, 1, batch.dp_replicate)
    shard = batch.cp * batch.dp // replicas
    expert = batch.ep * batch.etp
    expert_shard = np.maximum(stage // expert // replicas, 1)
    block, parted = batch.tp * batch.cp, (batch.rank_order == PP_BEFORE_DP) & (batch.pp > 1)
    apart = np.where(parted, batch.pp, 1)
    in_runs = parted & (batch.cp > 1)
    return Groups(
        tp=(ones, batch.tp),
        cp=(batch.tp, batch.cp),
        shard=(np.where(in_runs, batch.tp, batch.tp * apart), shard),
        replicate=(batch.tp * shard * apart, replicas),
        ep=(batch.etp, batch.ep),
        expert_shard=(expert * apart, expert_shard),
        pp=(np.where(parted, block, stage), batch.pp),
        gaps=Gaps(np.where(in_runs, batch.cp, batch.num_devices), block * apart) if in_runs.any() else None,
    )


def has_tp_traffic(block: Block, shape: BlockShape) -> bool:
    """Whether a block has tensor-parallel collectives: routed experts take tokens from the ranks that hold them."""
    return block is not Block.MOE or any(linear.split == "column" for linear in shape.linears)


def tp_buffer_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """The hidden state of a micro-batch that tensor-parallel ranks gather, or add up."""
    return problem.training.element_bytes * rank_tokens(problem, batch) * problem.model.hidden_size


def tp_gathered_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """The same where it, or its gradient, enters a block's matrices: as quantised, if the framework gathers it so."""
    is_narrow = problem.framework.network.narrow_tp_gathers & (batch.precision == Precision.FP8.code)
    return np.where(is_narrow, 0.5, 1.0) * tp_buffer_bytes(problem, batch)


def cp_buffer_bytes(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """(keys and values, queries and outputs) of one attention block that a context-parallel rank holds."""
    model, tokens = problem.model, rank_tokens(problem, batch)
    # Beyond its key/value heads tensor parallelism copies them.
    kv = 2.0 * tokens * model.kv_heads * (model.qk_head_dim + model.v_head_dim) / np.minimum(batch.tp, model.kv_heads)
    return kv, 2.0 * tokens * model.num_heads * (model.qk_head_dim + model.v_head_dim) / batch.tp


def ep_buffer_bytes(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats, Floats]:
    """(dispatched, combined, gathered by expert tensor parallelism) of one MoE block in one pass.

    The first two hold every token once for each of its experts.
    """
    moe = problem.model.moe
    assert moe is not None
    width = moe.latent_size or problem.model.hidden_size
    routed = norm_tokens(problem, batch) * moe.experts_per_token * width
    gathered = 2.0 * expert_tokens(problem, batch) * moe.num_experts / batch.ep * width
    return problem.framework.experts.bytes_per_dispatched * routed, 2.0 * routed, gathered


def dispatched_copies(problem: Problem) -> int:
    """How often a buffer of experts holds each token, as its dispatcher knows."""
    assert problem.model.moe is not None
    return problem.model.moe.experts_per_token if problem.framework.experts.sends_tokens_once else 1


def message_bytes(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """(what a rank sends to the next stage, what tensor-parallel ranks gather of such slices, 0 for whole states)."""
    tokens = norm_tokens(problem, batch)
    scatters = problem.framework.network.scatter_gather_p2p & ~batch.sp
    sent = np.where(scatters, rank_tokens(problem, batch) / batch.tp, tokens)
    hidden = problem.model.hidden_size
    element = problem.training.element_bytes
    return element * sent * hidden, np.where(scatters, element * tokens * hidden, 0.0)


def tied_table_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Gradients of the embedding that the first and the last stage reduce where it is the head's matrix too."""
    wire = problem.bytes_per_reduced_grad
    return wire * padded_vocab(problem, batch) * problem.model.hidden_size / batch.tp
