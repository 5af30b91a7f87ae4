"""Blocks that every pipeline rank holds, chunk by chunk, and the number of them that are recomputed as a whole.

Arrays of stages have the shape (plans, stages) and lie stage by stage in memory (numpy's order F), as do those of
chunks: plans are many and stages few, so that loops over memory run over the plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, distinct_rows
from autoplan.cost.pipeline.order import V_SHAPED, chunks_of_ranks
from autoplan.spec.enums import Schedule
from autoplan.spec.model import ENCODER_BLOCKS, Block, ModelSpec
from autoplan.spec.plan import ALL_LAYERS, PlanBatch

V_SCHEDULES = [Schedule(name).code for name in V_SHAPED]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """Blocks of each kind on every pipeline rank, all its chunks together: arrays of shape (plans, stages).

    A stage is a pipeline rank; the first holds the embedding, and `is_last` says which one the head.
    """

    count: dict[Block, Floats]  # whole numbers, as those they are multiplied with are floats
    repeated: dict[Block, Floats]  # of them, those that full recomputation runs again
    repeats_chunk: Bools  # whether a chunk of the rank is recomputed down to its last layer
    chunks_alike: Bools  # whether all chunks of every rank have the same blocks: shape (plans)
    is_last: Bools  # whether the rank holds the last chunk

    @property
    def num_stages(self) -> int:
        """Pipeline ranks."""
        return self.repeats_chunk.shape[1]

    def zeros(self) -> Floats:
        """Zeros of the shape (plans, stages)."""
        return np.zeros_like(self.is_last, dtype=np.float64)

    def at_all(self, values: Floats | Ints) -> Floats:
        """`values` of the plans on all ranks: shape (plans, stages)."""
        return self.zeros() + values[:, None]

    def at_last(self, values: Floats) -> Floats:
        """`values` of the plans on the rank with the last chunk, and 0 elsewhere: shape (plans, stages)."""
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
    """(blocks, blocks recomputed as a whole) of each kind in every chunk in model order: shape (layouts, chunks) both.

    Of `layers`, shape (layouts, chunks), the first `num_repeated`, shape (layouts), of a chunk are recomputed
    (Megatron-LM core/recompute.py, method block).  An encoder stands in the first chunk, and whether it is recomputed
    its costs say.
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
    """Layers of every chunk of some plans that have as many chunks: shape (plans, chunks)."""
    used, at = np.unique(batch.layout[rows], return_inverse=True)
    return np.take(np.array([batch.layouts[layout] for layout in used], dtype=np.int64).T, at, axis=1).T


def by_chunks(batch: PlanBatch, rows: Ints) -> Iterator[tuple[int, Ints]]:
    """(chunks of a rank, those of some plans of one number of stages that have as many)."""
    chunks = batch.vp[rows]
    for vp in sorted(set(chunks.tolist())):
        yield vp, rows[chunks == vp]


def stage_blocks(model: ModelSpec, batch: PlanBatch, stages: int) -> StageBlocks:
    """The blocks of plans that share one number of stages, on the ranks where their schedule puts the chunks."""
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
    """Return which plans recompute predictions and encoders: not under method block (multi_token_prediction.py)."""
    return batch.recompute_num_layers == ALL_LAYERS
