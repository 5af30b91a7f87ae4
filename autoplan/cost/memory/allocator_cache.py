"""Memory that PyTorch's caching allocator reserves beyond the peak of the framework's tensors.

It keeps every freed block and reuses a block only for tensors that fit into it, so tensors that are never alive
together still add up if later ones are larger; and a block that a collective still reads is reusable only after the
communication stream.  When memory runs short all cached blocks are returned (c10/cuda/CUDACachingAllocator.cpp
`malloc`): they count in the reserved peak, but a run can do without them.

Arrays of stages have the shape (plans, stages); sizes are bytes.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.kernels.sizes import head_columns, padded_vocab, rank_tokens
from autoplan.cost.pipeline.closed_forms import in_flight_chunks
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.cost.state_types import HALF_BYTES
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

Kept = list[tuple[Floats, Floats]]  # (size of a stored tensor, how many are alive), both of shape (plans, stages)

MOMENT_BYTES = 8.0  # of Adam's moments per parameter, allocated at the end of the first step
FP32_LOGIT_BYTES = 4.0
UNREDUCED_BYTES = 4.0  # per token and hidden element of a layer: the outputs of attention and MLP in 16 bits


def cached_bytes(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: Floats, group: Ints
) -> tuple[Floats, Floats]:
    """Bytes in the allocator's cache at the reserved peak: (from the passes, from the end of a step).

    The latter can be returned without harm, as neither a pass nor another library needs memory at that time.  `group`
    is the number of ranks that share one copy of the states.
    """
    if not problem.framework.memory.counts_cached_blocks:
        return blocks.zeros(), blocks.zeros()
    passes = _layers(problem.model, blocks) * _in_flight(batch, blocks.num_stages)
    tensors = _kept_tensors(problem, batch, blocks, passes)
    gradients, table = _unfit_gradients(problem, batch, blocks, tensors)
    gathered = _unfit_gather(problem, batch, blocks, parameters, group, [*tensors, table])
    return gradients + _unreduced_bytes(problem, batch, passes), gathered


def _layers(model: ModelSpec, blocks: StageBlocks) -> Floats:
    return add_up(blocks.count.values()) / len(model.layers[0])


def _in_flight(batch: PlanBatch, stages: int) -> Floats:
    gpipe = batch.schedule == Schedule.GPIPE.code
    return in_flight_chunks(stages, batch.vp, batch.num_microbatches, gpipe=gpipe) / batch.vp[:, None]


def _unreduced_bytes(problem: Problem, batch: PlanBatch, passes: Floats) -> Floats:
    """Full-width outputs that tensor-parallel ranks have freed before the device has run their reduce-scatter.

    The host launches some layers ahead of the device: in the forward passes in flight (`passes`) and, with several
    micro-batches, in the preceding backward pass.  In a pipeline the host waits at every message, and its lead grows
    only with the tokens that the device has to process.
    """
    framework = problem.framework
    tokens = batch.num_microbatches * rank_tokens(problem, batch)
    in_pipeline = tokens / batch.tp / framework.memory.pipeline_lead_tokens_per_layer
    lead = np.where(batch.pp > 1, in_pipeline, tokens / framework.memory.host_lead_tokens_per_layer)
    lead = np.minimum(lead, framework.memory.host_lead_layers)
    has_backward = batch.num_microbatches[:, None] > _in_flight(batch, passes.shape[1])
    ahead = np.minimum(lead[:, None], passes * np.where(has_backward, 3, 1))
    width = UNREDUCED_BYTES * rank_tokens(problem, batch) * problem.model.hidden_size
    return (width * batch.sp)[:, None] * ahead


def _kept_tensors(problem: Problem, batch: PlanBatch, blocks: StageBlocks, passes: Floats) -> Kept:
    """Larger tensors that dense layers and the loss store for the backward pass, with their counts."""
    model = problem.model
    tokens = rank_tokens(problem, batch) / batch.tp
    activation = 2.0 * tokens * model.ffn_size
    kv = 4.0 * tokens * model.qk_head_dim * model.kv_heads
    per_layer = [(activation, 2.0), (kv, 1.0), (kv + 2.0 * tokens * model.qk_head_dim * model.num_heads, 1.0)]
    if model.gated_mlp:
        per_layer.append((2.0 * activation, 1.0))
    tensors = [(blocks.at_all(size), number * passes) for size, number in per_layer]
    logits = blocks.at_last(FP32_LOGIT_BYTES * tokens * head_columns(problem, batch))
    is_last = blocks.is_last.astype(np.float64)
    return [*tensors, (logits, 2.0 * is_last), (logits / 2.0, is_last)]


def _largest(tensors: Kept) -> Floats:
    return reduce(np.maximum, [size for size, _ in tensors])


def _unfit_gradients(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, tensors: Kept
) -> tuple[Floats, tuple[Floats, Floats]]:
    """Bytes of weight gradients that fit into no freed activation's block, and of the block added for a table."""
    ends, table, fc1 = _large_weights(problem, batch, blocks)
    is_large = HALF_BYTES * table > _largest(tensors)
    tables = np.where(is_large, HALF_BYTES * ends * table, 0.0)
    layers = _layers(problem.model, blocks)
    firsts = np.where(HALF_BYTES * fc1 > _largest(tensors), HALF_BYTES * layers * fc1, 0.0)
    block = np.where((ends > 0) & is_large, HALF_BYTES * table, 0.0)
    return tables + firsts, (block, (ends > 0).astype(np.float64))


def _large_weights(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> tuple[Floats, Floats, Floats]:
    """Return (number of embedding and head tables per stage, elements of a table, elements of the first MLP matrix)."""
    model = problem.model
    has_table = blocks.is_last[:, 0]
    ends = blocks.at_last(np.where(has_table & model.tied_embeddings, 0.0, 1.0))
    ends[:, 0] += 1
    table = (padded_vocab(problem, batch) * model.table_width / batch.tp)[:, None]
    fc1 = ((2.0 if model.gated_mlp else 1.0) * model.ffn_size * model.hidden_size / batch.tp)[:, None]
    return ends, table, fc1


def _unfit_gather(
    problem: Problem,
    batch: PlanBatch,
    blocks: StageBlocks,
    parameters: Floats,
    group: Ints,
    tensors: Kept,
) -> Floats:
    """Bytes for gathering weights at the end of a step, beyond the blocks that activations have freed.

    The pieces of all ranks are flattened, and then flattened again into one tensor.  Adam's moments, allocated before
    the first gather, also occupy such blocks, and later forward passes reuse those of the gather.
    """
    ranks = group[:, None].astype(np.float64)
    gathered_bytes = problem.training.element_bytes * parameters
    piece = gathered_bytes / ranks
    room = np.minimum(add_up(number * (size // np.maximum(piece, 1.0)) for size, number in tensors), ranks)
    missing = np.where(_largest(tensors) >= gathered_bytes, 0.0, gathered_bytes) + (ranks - room) * piece
    ends, table, fc1 = _large_weights(problem, batch, blocks)
    slice_bytes = MOMENT_BYTES / 2.0 / ranks
    fitting = parameters - np.where(slice_bytes * table > _largest(tensors), ends * table, 0.0)
    fitting = fitting - np.where(slice_bytes * fc1 > _largest(tensors), _layers(problem.model, blocks) * fc1, 0.0)
    gathers = (batch.sharding == Sharding.ZERO1.code)[:, None] & (ranks > 1)
    twice = problem.framework.memory.whole_gather_copies > 1
    return np.where(gathers & twice, np.maximum(missing - MOMENT_BYTES / ranks * fitting, 0.0), 0.0)
