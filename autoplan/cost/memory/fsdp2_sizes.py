"""Sizes on an FSDP2 rank during a step: weights and their copies, gradients, activations.

Arrays have the shape (plans) or (plans, stages); sizes are bytes.  `fsdp2_peaks` combines them, moment by moment.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, add_up
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.sizes import (
    head_columns,
    local_logits,
    local_sizes,
    norm_tokens,
    padded_vocab,
    rank_expert_tokens,
    rank_tokens,
    widest_mlp,
)
from autoplan.cost.memory.activations import ChunkEnds, activation_bytes, layer_bytes, logit_bytes, stored_bytes
from autoplan.cost.memory.chosen_outputs import chooses_outputs
from autoplan.cost.memory.fsdp2_peaks import PassSizes, PipelineSizes
from autoplan.cost.memory.recompute import casts_norms, eager_norm_bytes
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.process_groups import ProcessGroups
from autoplan.cost.parameters import StageParameters, frozen_bytes, local_parameters, spread_bytes
from autoplan.cost.pipeline.closed_forms import in_flight_chunks
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.cost.state_types import WIDE_BYTES, grad_bytes, parameters_on_host
from autoplan.spec.blocks import Block
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.finetuning import EMBEDDING, HEAD
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


def dealt_experts(groups: ProcessGroups, num_experts: int, ep: Ints) -> ProcessGroups:
    """Shard experts as FSDP2 does: whole experts on the first ranks, priced as an even share over fewer ranks."""
    stride, size, _ = groups.shard
    size = np.where(ep > 1, groups.expert_shard.size, size)
    num_local = np.maximum(num_experts // ep, 1)
    return replace(groups, expert_shard=ProcessGroup(stride, num_local // -(-num_local // size)))


def pass_sizes(
    problem: Problem,
    batch: PlanBatch,
    blocks: StageBlocks,
    parameters: StageParameters,
    groups: ProcessGroups,
    per_block: dict[Block, Floats],
    repeat: Floats,
) -> PassSizes:
    """Sizes for an FSDP2 step; `repeat` are the bytes that a recomputed layer stores again."""
    model, finetuning = problem.model, problem.training.finetuning
    shapes, parameters = block_shapes(model, finetuning), parameters.trained
    in_each = (batch.sharding >= Sharding.ZERO2.code) & (batch.pp == 1)
    sharded = batch.sharding >= Sharding.ZERO1.code
    has_before, stays = batch.num_microbatches > 1, ~parameters_on_host(batch)[:, None]
    unit = np.zeros(len(batch))
    for layer in set(model.layers):
        layer_parameters = (local_parameters(batch, shapes[block], trained=True) for block in layer)
        unit = np.maximum(unit, add_up(add_up(pair) for pair in layer_parameters))
    tokens = rank_tokens(problem, batch)
    ends = _chunk_ends(problem, batch) if blocks.num_stages > 1 else None
    live = activation_bytes(problem, batch, blocks, per_block, ends)
    per_microbatch = layer_bytes(blocks, per_block, stored_bytes(problem, batch))
    if ends is not None:
        per_microbatch = per_microbatch + blocks.at_last(ends.head)
    num_parameters = parameters.dense + parameters.expert
    table = padded_vocab(problem, batch) * model.table_width
    head = head_columns(problem, batch) / batch.tp
    summed = np.zeros_like(num_parameters)
    summed[:, 0] = table * (1.0 - 1.0 / batch.tp) * (finetuning is None or finetuning.trains(EMBEDDING))
    gate = 2 if model.gated_mlp else 1
    element = problem.training.element_bytes
    transients = element * tokens * ((gate + 1) * widest_mlp(model) / batch.tp + model.hidden_size)
    repeats = blocks.repeats_chunk | chooses_outputs(problem, batch)[:, None]
    per_gradient = grad_bytes(problem, batch)
    # Weights that are neither cast nor gathered are read in place.
    has_copies = (batch.dp > 1) | (problem.training.precision != "fp32")
    return PassSizes(
        element_bytes=element,
        reduced_bytes=per_gradient[:, None],
        copy_bytes=np.where(has_copies, element, 0.0)[:, None],
        parameters=num_parameters,
        ends=parameters.ends,
        head=blocks.at_last(head * model.hidden_size * (finetuning is None or finetuning.trains(HEAD))),
        unit=blocks.at_all(unit),
        kept=spread_bytes(parameters, groups, 1.0, sharded) * stays,
        kept_ends=parameters.ends / np.where(sharded, groups.shard.size, 1)[:, None] * stays,
        summed=summed,
        accumulated=(spread_bytes(parameters, groups, per_gradient, in_each) + WIDE_BYTES * summed * ~in_each[:, None])
        * (has_before[:, None] & stays),
        reduces_every=(in_each & has_before & (groups.shard.size > 1))[:, None] & (num_parameters > 0),
        frees_weights=((batch.sharding == Sharding.ZERO3.code) & (batch.pp == 1))[:, None] & (num_parameters > 0),
        live=live,
        later_live=np.maximum(live - per_microbatch / batch.vp[:, None], 0.0),
        logits=blocks.at_last(logit_bytes(problem, batch) + _last_norm_bytes(problem, batch)),
        transients=transients[:, None] + np.where(repeats, repeat[:, None], 0.0),
    )


def frozen_copies(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: StageParameters, groups: ProcessGroups
) -> Floats:
    """Bytes of gathered frozen weights during the passes of FSDP2; unsharded ones are read in place."""
    shapes, frozen = block_shapes(problem.model, problem.training.finetuning), parameters.frozen_bytes
    assert frozen is not None
    unit = np.zeros(len(batch))
    for layer in set(problem.model.layers):
        unit = np.maximum(unit, add_up(add_up(frozen_bytes(problem, batch, shapes[block])) for block in layer))
    in_turn = frozen.ends + 2.0 * blocks.at_all(unit)
    frees = ((batch.sharding == Sharding.ZERO3.code) & (batch.pp == 1))[:, None]
    is_sharded = ((batch.sharding >= Sharding.ZERO1.code) & (groups.shard.size > 1))[:, None]
    return np.where(is_sharded, np.where(frees, in_turn, frozen.dense + frozen.expert), 0.0)


def pipeline_sizes(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, passes: PassSizes, per_block: dict[Block, Floats]
) -> PipelineSizes:
    """Sizes for a pipeline's step (torch/distributed/pipelining/stage.py)."""
    model = problem.model
    element = problem.training.element_bytes
    sliced = element * norm_tokens(problem, batch) * model.hidden_size
    logits, norm = local_logits(problem, batch), _last_norm_bytes(problem, batch)
    inputs = blocks.at_all(batch.vp)
    inputs[:, 0] -= 1
    outputs = batch.vp[:, None] - blocks.is_last
    in_flight = in_flight_chunks(
        blocks.num_stages, batch.vp, batch.num_microbatches, gpipe=batch.schedule == Schedule.GPIPE.code
    )
    least = np.min([add_up(per_block[block] for block in layer) for layer in set(model.layers)], axis=0)
    stored = stored_bytes(problem, batch) * len(model.layers[0])
    # In the backward pass of an MLP its last input is freed, and the gradient of its output is the layer's.
    gone = element * rank_tokens(problem, batch) * (widest_mlp(model) / batch.tp + model.hidden_size)
    return PipelineSizes(
        passes=passes,
        # One for every micro-batch, alive or not, plus the gradient being sent.
        buffers=sliced[:, None] * (batch.num_microbatches[:, None] * (inputs + outputs) + (inputs > 0)),
        logits=passes.logits - blocks.at_last(WIDE_BYTES * logits + norm),
        # The output stays alive; the gradient of the last layer's output is a separate tensor.
        behind=blocks.at_last((WIDE_BYTES * logits + norm - sliced) * (batch.vp == 1)),
        transients=passes.transients - gone[:, None],
        matrix=blocks.at_all(_last_matrix(problem, batch)),
        layer=np.where(blocks.repeats_chunk, stored[:, None], least[:, None]),
        refills=_refills(batch, in_flight),
    )


def _refills(batch: PlanBatch, in_flight: Ints) -> Bools:
    """Return whether forward passes follow the first weight gradients: shape (plans, stages).

    Rank r of ZB-H1 defers r weight gradients: all ranks begin with as many forward passes as there are ranks, per
    chunk.
    """
    waits = batch.schedule == Schedule.ZB_H1.code
    begins: Floats = np.where(waits, batch.pp, in_flight.T / batch.vp)
    return np.asarray(batch.num_microbatches[:, None] > begins.T)


def _chunk_ends(problem: Problem, batch: PlanBatch) -> ChunkEnds:
    """Bytes that torch's PipelineStage stores per micro-batch in flight: sent tensors, on the last the loss's inputs.

    A chunk's receive buffer is also the input stored by its first norm, unless that stores an fp32 copy.
    """
    element = problem.training.element_bytes
    sliced = element * norm_tokens(problem, batch) * problem.model.hidden_size
    is_copied = (batch.recompute_num_layers == 0) & casts_norms(problem)
    logits, shapes = local_logits(problem, batch), block_shapes(problem.model, problem.training.finetuning)
    return ChunkEnds(
        received=np.where(is_copied, 0.0, -sliced),
        sent=sliced,
        head=(element + WIDE_BYTES) * logits + _last_norm_bytes(problem, batch),
        waiting={block: _output_gradient_bytes(problem, batch, shape) for block, shape in shapes.items()},
        spent=WIDE_BYTES * logits,  # logits and log probabilities are freed, the gradient of the logits is allocated
    )


def _output_gradient_bytes(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Floats:
    """Bytes of the output gradients of a block's weights; that of its norm in fp32 if it computes in fp32."""
    model = problem.model
    wide = add_up(local_sizes(linear, batch)[1] for linear in shape.linears if not linear.split.startswith("expert"))
    element = problem.training.element_bytes
    size = element * rank_tokens(problem, batch) * wide
    if model.moe:
        routed = rank_expert_tokens(problem, batch)
        experts = [local_sizes(linear, batch)[1] for linear in shape.linears if linear.split.startswith("expert")]
        size = size + element * routed * add_up(experts) if experts else size
    per_norm = 2 * WIDE_BYTES if casts_norms(problem) else element
    return size + per_norm * model.norms_per_block * norm_tokens(problem, batch) * model.hidden_size


def _last_norm_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes that the norm before the head stores per micro-batch."""
    sliced, tokens, element = norm_tokens(problem, batch), rank_tokens(problem, batch), problem.training.element_bytes
    return ((element + eager_norm_bytes(problem)) * sliced + element * tokens) * problem.model.hidden_size


def _last_matrix(problem: Problem, batch: PlanBatch) -> Floats:
    """Elements of the last matrix of an MLP, or of all experts together."""
    model, moe = problem.model, problem.model.moe
    wide = moe.num_experts * moe.expert_ffn_size / (batch.ep * batch.etp) if moe else model.ffn_size / batch.tp
    return np.asarray(wide * model.hidden_size, dtype=np.float64)
