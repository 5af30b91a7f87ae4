"""Memory of experts beyond what layers store: buffers sized ahead, gradients on their way, and those of dispatchers.

Arrays have one element per plan; sizes are bytes.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.launches import holds_graphs
from autoplan.cost.kernels.sizes import mean_expert_tokens, norm_tokens, rank_expert_tokens
from autoplan.cost.state_types import WIDE_BYTES
from autoplan.spec.enums import CudaGraphs, Dispatcher
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Tokens of a rank's experts over their mean for which a single graph of the step has room, as it cannot ask the device
# how many there are (Megatron-LM d98e8a6 core/transformer/moe/token_dispatcher.py, moe_expert_rank_capacity_factor;
# Megatron-Bridge 067f987 perf_recipes/deepseek/common.py).  Stashing in pages packs them later, but the first step
# keeps them as they come (core/transformer/moe/paged_stash.py, paged_stash_reset).
GRAPHED_CAPACITY = 1.5


def held_expert_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens for which local experts of the busiest rank have memory."""
    tokens = rank_expert_tokens(problem, batch)
    is_static = holds_graphs(batch, CudaGraphs.FULL_ITERATION) & ~batch.token_dropping & (batch.ep > 1)
    room = GRAPHED_CAPACITY * mean_expert_tokens(problem, batch)
    return np.where(is_static, np.maximum(tokens, room), tokens)


def expert_gradient_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes at the peak of the backward pass of experts, beyond what is stored.

    Gradients of their outputs, in the order of ranks and of experts where tokens are exchanged, or beside those of the
    inputs of the last matrix; what comes after takes less, as stored inputs are freed on the way.
    """
    moe = problem.model.moe
    if moe is None:
        return np.zeros(len(batch))
    width = moe.latent_size or problem.model.hidden_size
    inner = moe.expert_ffn_size / batch.etp
    wide = width + np.maximum(inner, width * (batch.ep * batch.etp > 1))
    return problem.training.element_bytes * held_expert_tokens(problem, batch) * wide


def exchange_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of HybridEP's buffers outside of the allocator: tokens, and their probabilities, of all ranks of the group.

    Source: DeepEP, csrc/hybrid_ep/hybrid_ep.cu, allocate_buffer_for_dispatch (max_num_of_tokens_for_experts); its
    combination reuses them within a scale-up domain.
    """
    moe = problem.model.moe
    if moe is None:
        return np.zeros(len(batch))
    per_token = problem.training.element_bytes * (moe.latent_size or problem.model.hidden_size)
    per_token += WIDE_BYTES * moe.num_experts
    uses = (batch.ep > 1) & (batch.dispatcher == Dispatcher.HYBRIDEP.code)
    return uses * norm_tokens(problem, batch) * batch.ep * batch.etp * per_token
