"""Blocks of every pipeline rank, chunk by chunk, and the number of fully recomputed ones.

Arrays of stages and of chunks have the shape (plans, stages or chunks) in numpy's order F, so that inner loops run over
the plans, which are many, and not over the stages, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, distinct_rows
from autoplan.cost.pipeline.order import chunks_of_ranks
from autoplan.spec.axes import V_SHAPED
from autoplan.spec.blocks import ENCODER_BLOCKS, Block
from autoplan.spec.enums import Schedule
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ALL_LAYERS, PlanBatch

V_SCHEDULES = [schedule.code for schedule in V_SHAPED]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """Blocks of each kind on every pipeline rank, over all its chunks: arrays of shape (plans, stages).

    A stage is a pipeline rank; the first has the embedding, and `is_last` marks the one with the head.
    """

    count: dict[Block, Floats]  # whole numbers, stored as floats to be multiplied with floats
    repeated: dict[Block, Floats]  # fully recomputed ones among them
    repeats_chunk: Bools  # whether a chunk of the rank is recomputed down to its last layer
    chunks_alike: Bools  # whether all chunks of every rank have the same blocks: shape (plans)
    is_last: Bools  # whether the rank has the last chunk

    @property
    def num_stages(self) -> int:
        """Number of pipeline ranks."""
        return self.repeats_chunk.shape[1]

    def zeros(self) -> Floats:
        """Zeros of the shape (plans, stages)."""
        return np.zeros_like(self.is_last, dtype=np.float64)

    def at_all(self, values: Floats | Ints) -> Floats:
        """Broadcast `values` of the plans to all ranks: shape (plans, stages)."""
        return self.zeros() + values[:, None]

    def at_last(self, values: Floats) -> Floats:
        """Return `values` of the plans on the rank with the last chunk, and 0 elsewhere: shape (plans, stages)."""
        return self.is_last * values[:, None]


@lru_cache(maxsize=64)
def _cumulative_blocks(model: ModelSpec) -> dict[Block, Floats]:
    """Number of blocks of each kind in the first n layers, for n = 0 .. num_layers."""
    kinds = sorted({block for layer in model.layers for block in layer})
    return {
        kind: np.concatenate([[0], np.cumsum([layer.count(kind) for layer in model.layers])]).astype(np.float64)
        for kind in kinds
    }


def chunk_blocks(model: ModelSpec, layers: Ints, num_repeated: Ints) -> dict[Block, tuple[Floats, Floats]]:
    """Return (blocks, fully recomputed blocks) of each kind per chunk in model order, both of shape (layouts, chunks).

    Of a chunk's `layers`, shape (layouts, chunks), the first `num_repeated`, shape (layouts), are recomputed
    (Megatron-LM core/recompute.py, method block).  An encoder is in the first chunk; its costs already include its
    recomputation.
    """
    ends = np.cumsum(layers, axis=1)
    starts = ends - layers
    repeated = starts + np.minimum(layers, num_repeated[:, None])
    counts = {
        kind: (total[ends] - total[starts], total[repeated] - total[starts])
        for kind, total in _cumulative_blocks(model).items()
    }
    if model.encoder is not None:
        for kind, total in _cumulative_blocks(model.encoder.layers).items():
            at_first = np.zeros(layers.shape)
            at_first[:, 0] = total[-1]
            counts[ENCODER_BLOCKS[kind]] = at_first, np.zeros(layers.shape)
    return counts


def chunk_layers_of(batch: PlanBatch, rows: Ints) -> Ints:
    """Layers of every chunk, for plans with the same number of chunks: shape (plans, chunks)."""
    used, at = np.unique(batch.layout[rows], return_inverse=True)
    return np.take(np.array([batch.layouts[layout] for layout in used], dtype=np.int64).T, at, axis=1).T


def by_chunks(batch: PlanBatch, rows: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield (chunks per rank, rows with that number of chunks), for plans with one number of stages."""
    chunks = batch.vp[rows]
    for vp in sorted(set(chunks.tolist())):
        yield vp, rows[chunks == vp]


def stage_blocks(model: ModelSpec, batch: PlanBatch, stages: int) -> StageBlocks:
    """Return the blocks of plans with one number of stages, on the ranks to which their schedule assigns the chunks."""
    is_v = np.isin(batch.schedule, V_SCHEDULES)
    first, inverse = distinct_rows(batch.layout, batch.recompute_num_layers, is_v)
    shape, kinds = (stages, len(first)), [*_cumulative_blocks(model)]
    kinds += [ENCODER_BLOCKS[kind] for kind in _cumulative_blocks(model.encoder.layers)] if model.encoder else []
    count, repeated = ({kind: np.empty(shape) for kind in kinds} for _ in range(2))
    repeats_chunk, chunks_alike = np.empty(shape, dtype=np.bool_), np.ones(len(first), dtype=np.bool_)
    for vp, plans in by_chunks(batch, first):
        for has_v in set(is_v[plans].tolist()):
            alike_v = plans[is_v[plans] == has_v]
            rows = inverse[alike_v]
            of_ranks = chunks_of_ranks(Schedule.ZB_V if has_v else Schedule.INTERLEAVED, stages, vp)
            layers, num_repeated = chunk_layers_of(batch, alike_v), batch.recompute_num_layers[alike_v]
            repeats_chunk[:, rows] = ((layers <= num_repeated[:, None]) & (layers > 0)).T[of_ranks].any(axis=1)
            for kind, tables in chunk_blocks(model, layers, num_repeated).items():
                per_rank, again_per_rank = (table.T[of_ranks] for table in tables)  # (ranks, chunks of a rank, plans)
                count[kind][:, rows], repeated[kind][:, rows] = per_rank.sum(axis=1), again_per_rank.sum(axis=1)
                for counts in (per_rank, again_per_rank):
                    chunks_alike[rows] &= (counts == counts[:, :1]).all(axis=(0, 1))
    last = np.where(is_v, 0, stages - 1)
    return StageBlocks(
        count={kind: np.take(table, inverse, axis=1).T for kind, table in count.items()},
        repeated={kind: np.take(table, inverse, axis=1).T for kind, table in repeated.items()},
        repeats_chunk=np.take(repeats_chunk, inverse, axis=1).T,
        chunks_alike=chunks_alike[inverse],
        is_last=(np.arange(stages)[:, None] == last).T,
    )


def repeats_beside(batch: PlanBatch) -> Bools:
    """Return which plans recompute prediction layers and encoders, unlike method block (multi_token_prediction.py)."""
    return batch.recompute_num_layers == ALL_LAYERS
