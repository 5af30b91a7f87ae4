"""Activations stored by every pipeline rank for its backward passes: shape (plans, stages), in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up, distinct_rows
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.kernels.cross_entropy import held_bytes_per_logit
from autoplan.cost.kernels.sizes import local_logits, norm_tokens
from autoplan.cost.memory.chosen_outputs import chooses_outputs, chosen_bytes
from autoplan.cost.memory.recompute import Offloaded, Parts, activation_parts, kept_bytes, offloaded
from autoplan.cost.pipeline.closed_forms import in_flight_chunks
from autoplan.cost.pipeline.layout import StageBlocks, by_chunks, chunk_blocks, chunk_layers_of, repeats_beside
from autoplan.cost.pipeline.order import PipelineShape, chunks_of_ranks, live_chunks
from autoplan.spec.blocks import ENCODER_BLOCKS, Block
from autoplan.spec.enums import Schedule
from autoplan.spec.plan import SPLIT_SCHEDULES, PlanBatch
from autoplan.spec.problem import Problem

_FILLED = 3  # `order.live_chunks` saturates after so many groups of micro-batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEnds:
    """Bytes that a chunk in flight stores per micro-batch outside of its layers: shape (plans)."""

    received: Floats  # every chunk but the first
    sent: Floats  # every chunk but the last
    head: Floats  # the last chunk
    # Between the two gradients of a split backward pass: additional bytes per block, and bytes freed on the last chunk.
    waiting: dict[Block, Floats]
    spent: Floats

    def waiting_bytes(self, counts: dict[Block, tuple[Floats, Floats]], rows: Ints) -> Floats:
        """Bytes that chunks add between the two gradients, except the first, which does not split: (rows, chunks)."""
        size = add_up(count * self.waiting[block][rows, None] for block, (count, _) in counts.items())
        size[:, -1] -= self.spent[rows]
        size[:, 0] = 0.0
        return size


def activation_bytes(
    problem: Problem,
    batch: PlanBatch,
    blocks: StageBlocks,
    per_block: dict[Block, Floats],
    ends: ChunkEnds | None = None,
) -> Floats:
    """Bytes stored for the backward passes of all micro-batches in flight: shape (plans, stages)."""
    stored, boundary = stored_bytes(problem, batch), boundary_bytes(problem, batch)
    depths = _prediction_bytes(problem, batch, per_block)
    per_microbatch = layer_bytes(blocks, per_block, stored) + blocks.at_last(depths)
    microbatches, is_gpipe = batch.num_microbatches, batch.schedule == Schedule.GPIPE.code
    live = in_flight_chunks(blocks.num_stages, batch.vp, microbatches, gpipe=is_gpipe)
    result = (per_microbatch / batch.vp[:, None] + boundary[:, None]) * live
    # Micro-batches beyond three times the pipeline's depth are not alive at the same time, except where all are.
    fills = (microbatches % blocks.num_stages == 0) & ~is_gpipe
    microbatches = np.where(fills, np.minimum(microbatches, _FILLED * blocks.num_stages), microbatches)
    # If the chunks of a rank differ, it matters which of them are alive together.
    split = batch.splits_backward
    unlike = np.flatnonzero(split | ((batch.vp > 1) & (~blocks.chunks_alike | (depths > 0))) | (ends is not None))
    for _, rows in by_chunks(batch, unlike):
        counts = chunk_blocks(problem.model, chunk_layers_of(batch, rows), batch.recompute_num_layers[rows])
        size = _chunk_bytes(counts, rows, per_block, stored, boundary, depths)
        waiting = None
        if ends is not None:
            size[:, 1:] += ends.received[rows, None]
            size[:, :-1] += ends.sent[rows, None]
            size[:, -1] += ends.head[rows]
            waiting = ends.waiting_bytes(counts, rows)
        result[rows] = _most_alive(batch.schedule[rows], microbatches[rows], blocks.num_stages, size, waiting)
    return result


def layer_bytes(blocks: StageBlocks, per_block: dict[Block, Floats], stored: Floats) -> Floats:
    """Bytes that the layers of all chunks of a rank store per micro-batch: shape (plans, stages)."""
    return add_up(
        (count - blocks.repeated[block]) * per_block[block][:, None] + blocks.repeated[block] * stored[:, None]
        for block, count in blocks.count.items()
    )


def _prediction_bytes(problem: Problem, batch: PlanBatch, per_block: dict[Block, Floats]) -> Floats:
    """Bytes stored by the multi-token prediction layers after the last chunk: shape (plans)."""
    model, stored = problem.model, stored_bytes(problem, batch)
    depths = np.zeros(len(batch))
    for block in model.mtp_layer if model.num_mtp_layers else ():
        depths += model.num_mtp_layers * np.where(repeats_beside(batch), stored, per_block[block])
    return depths


def _chunk_bytes(
    counts: dict[Block, tuple[Floats, Floats]],
    rows: Ints,
    per_block: dict[Block, Floats],
    stored: Floats,
    boundary: Floats,
    depths: Floats,
) -> Floats:
    """Bytes stored per micro-batch in every chunk, for plans with the same number of chunks: shape (rows, chunks).

    `counts` are the blocks of their chunks, as from `chunk_blocks`; the other arrays are for all plans.
    """
    size = np.zeros_like(next(count for count, _ in counts.values())) + boundary[rows, None]
    for block, (count, again) in counts.items():
        size += (count - again) * per_block[block][rows, None] + again * stored[rows, None]
    size[:, -1] += depths[rows]
    return size


def layer_parts(problem: Problem, batch: PlanBatch) -> dict[Block, Parts]:
    """Bytes that every kind of block in the layers stores, by part."""
    shapes = layer_shapes(problem.model, problem.training.finetuning)
    return {block: activation_parts(problem, batch, block, shape) for block, shape in shapes.items()}


def offloaded_blocks(problem: Problem, batch: PlanBatch, parts: dict[Block, Parts]) -> dict[Block, Offloaded]:
    """Bytes that every kind of block in the layers offloads per micro-batch; `parts` covers the layers."""
    shapes = layer_shapes(problem.model, problem.training.finetuning)
    return {block: offloaded(problem, batch, block, shapes[block], own) for block, own in parts.items()}


def block_bytes(problem: Problem, batch: PlanBatch, parts: dict[Block, Parts]) -> dict[Block, Floats]:
    """Bytes that every kind of block stores per micro-batch under each plan's selective recomputation.

    `parts` covers the layers.  A frozen encoder stores nothing, a recomputed one stores less.
    """
    freed = offloaded_blocks(problem, batch, parts)
    kept = {block: kept_bytes(problem, batch, own) - freed[block].freed_bytes for block, own in parts.items()}
    if (chooses := chooses_outputs(problem, batch)).any():
        inputs = stored_bytes(problem, batch)
        for block, size in chosen_bytes(problem, batch).items():
            kept[block] = np.where(chooses, inputs + size, kept[block])
    encoding = problem.of_encoder
    if encoding is None:
        return kept
    is_trained = float(problem.trains_encoder)
    for block, own in block_bytes(encoding, batch, layer_parts(encoding, batch)).items():
        size = np.where(repeats_beside(batch), stored_bytes(encoding, batch), own)
        kept[ENCODER_BLOCKS[block]] = is_trained * size
    return kept


def chunk_activation_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Activations stored per micro-batch in every chunk, for plans with the same number of chunks: (plans, chunks)."""
    problem = problem.at_longest
    per_block = block_bytes(problem, batch, layer_parts(problem, batch))
    rows = np.arange(len(batch))
    counts = chunk_blocks(problem.model, chunk_layers_of(batch, rows), batch.recompute_num_layers)
    stored, boundary = stored_bytes(problem, batch), boundary_bytes(problem, batch)
    return _chunk_bytes(counts, rows, per_block, stored, boundary, _prediction_bytes(problem, batch, per_block))


def _most_alive(
    schedules: Ints, microbatches: Ints, stages: int, chunk_bytes: Floats, waiting_bytes: Floats | None = None
) -> Floats:
    """Largest sum of `chunk_bytes` alive at once on every rank: shape (plans, stages).

    All plans have the same number of chunks.  `chunk_bytes` is stored by each chunk, shape (plans, chunks);
    `waiting_bytes` is stored in addition between the two gradients of a split backward pass.
    """
    result = np.empty((len(schedules), stages), order="F")
    vp = chunk_bytes.shape[1] // stages
    first, inverse = distinct_rows(schedules, microbatches)
    for at, plan in enumerate(first):
        rows, schedule = np.flatnonzero(inverse == at), tuple(Schedule)[schedules[plan]]
        waits = waiting_bytes is not None and schedules[plan] in SPLIT_SCHEDULES
        # Whole numbers stored as floats, as they are multiplied with floats.
        shape = PipelineShape(schedule, stages, vp, int(microbatches[plan]))
        alive = live_chunks(shape, waiting=waits).astype(np.float64)
        chunks = chunks_of_ranks(schedule, stages, vp)
        sizes = np.take(chunk_bytes.T, rows, axis=1)[chunks]  # (ranks, chunks of a rank, rows)
        if waiting_bytes is not None and waits:
            sizes = np.concatenate([sizes, np.take(waiting_bytes.T, rows, axis=1)[chunks]], axis=1)
        result[rows] = np.einsum("pvr,pkv->pkr", sizes, alive).max(axis=1).T
    return result


def logit_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of a micro-batch's logits at the peak of head and loss on a rank with the head (`modelling` B3)."""
    return held_bytes_per_logit(problem, batch) * local_logits(problem, batch)


def boundary_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Tensors at the ends of every chunk in flight."""
    per_hidden = problem.framework.memory.bytes_per_boundary_hidden
    return per_hidden * norm_tokens(problem, batch) * problem.model.hidden_size * (batch.pp > 1)


def stored_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """A block's share of its layer's input, which is all that a fully recomputed layer stores."""
    element = problem.training.element_bytes
    return element * norm_tokens(problem, batch) * problem.model.hidden_size / len(problem.model.layers[0])
