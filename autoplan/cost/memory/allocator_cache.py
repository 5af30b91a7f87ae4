"""Memory that PyTorch's caching allocator holds beyond what the framework's tensors take at their peak.

It keeps every block that was freed and gives a block only to tensors that fit into it, so that tensors which are never
alive together still add up where the later ones are larger; and a block that a collective still reads waits for the
communication stream.  All of this goes back when memory runs short (c10/cuda/CUDACachingAllocator.cpp `malloc`): it
shows in the peak that is reserved, but a run can do without it.

Arrays of stages have the shape (plans, stages); sizes are bytes.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.kernels.sizes import head_columns, padded_vocab, rank_tokens
from autoplan.cost.pipeline.closed_forms import in_flight_chunks
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

Kept = list[tuple[Floats, Floats]]  # size of a kept tensor, and how many of them are alive: (plans, stages) both

GRAD_BYTES = 2.0  # of a gradient as the backward pass produces it
MOMENT_BYTES = 8.0  # of Adam's moments, allocated at the end of the first step
FP32_LOGIT_BYTES = 4.0


def cached_bytes(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: Floats, group: Ints
) -> tuple[Floats, Floats]:
    """Blocks in the allocator's cache when it reserves most: (those of the passes, those of the end of a step).

    The latter go back without harm: nothing lives then that another library or a pass would miss.  `group` is how many
    ranks share a copy of the states.
    """
    if not problem.framework.memory.counts_cached_blocks:
        return blocks.zeros(), blocks.zeros()
    passes = _layers(problem.model, blocks) * _in_flight(batch, blocks.num_stages)
    tensors = _kept_tensors(problem, batch, blocks, passes)
    gradients, table = _unfit_gradients(problem, batch, blocks, tensors)
    gathered = _unfit_gather(problem, batch, blocks, parameters, group, [*tensors, table])
    return gradients + unreduced_bytes(problem, batch, passes), gathered


def _layers(model: ModelSpec, blocks: StageBlocks) -> Floats:
    return add_up(blocks.count.values()) / len(model.layers[0])


def _in_flight(batch: PlanBatch, stages: int) -> Floats:
    gpipe = batch.schedule == Schedule.GPIPE.code
    return in_flight_chunks(stages, batch.vp, batch.num_microbatches, gpipe=gpipe) / batch.vp[:, None]


def unreduced_bytes(problem: Problem, batch: PlanBatch, passes: Floats) -> Floats:
    """Outputs of whole width that tensor-parallel ranks have freed, but whose reduce-scatter the device has not done.

    The host launches ahead of the device by some layers: of the forward passes in flight (`passes`) and, once
    micro-batches go backward in turn, of the backward pass before them.  In a pipeline it waits at every message, and
    its lead only grows with the tokens that the device has to work through.
    """
    framework = problem.framework
    tokens = batch.num_microbatches * rank_tokens(problem, batch)
    in_pipeline = tokens / batch.tp / framework.memory.pipeline_lead_tokens_per_layer
    lead = np.where(batch.pp > 1, in_pipeline, tokens / framework.memory.host_lead_tokens_per_layer)
    lead = np.minimum(lead, framework.memory.host_lead_layers)
    has_backward = batch.num_microbatches[:, None] > _in_flight(batch, passes.shape[1])
    ahead = np.minimum(lead[:, None], passes * np.where(has_backward, 3, 1))
    width = framework.memory.bytes_per_unreduced_hidden * rank_tokens(problem, batch) * problem.model.hidden_size
    return (width * batch.sp)[:, None] * ahead


def _kept_tensors(problem: Problem, batch: PlanBatch, blocks: StageBlocks, passes: Floats) -> Kept:
    """The larger tensors that dense layers and the loss keep for their backward pass, and how many there are."""
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
    """Gradients of weights that fit into no block of a freed activation, and the block that this adds for a table."""
    ends, table, fc1 = _large_weights(problem, batch, blocks)
    is_large = GRAD_BYTES * table > _largest(tensors)
    tables = np.where(is_large, GRAD_BYTES * ends * table, 0.0)
    layers = _layers(problem.model, blocks)
    firsts = np.where(GRAD_BYTES * fc1 > _largest(tensors), GRAD_BYTES * layers * fc1, 0.0)
    block = np.where((ends > 0) & is_large, GRAD_BYTES * table, 0.0)
    return tables + firsts, (block, (ends > 0).astype(np.float64))


def _large_weights(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> tuple[Floats, Floats, Floats]:
    """(tables of embedding and head on each stage, elements of a table, elements of a layer's first MLP matrix)."""
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
    """Bytes that gathering the weights at the end of a step takes beyond the blocks that the activations left.

    The pieces of all ranks are flattened, and flattened again into one tensor of all of them.  Adam's moments, which
    are allocated before the first gather, take such blocks as well, and forward passes then use those of the gather.
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
