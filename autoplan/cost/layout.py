"""Which blocks does every pipeline rank hold, chunk by chunk, and how many of them are recomputed as a whole?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.order import V_SHAPED, chunks_of_ranks
from autoplan.model import Block, ModelSpec
from autoplan.plan import ALL_LAYERS, SCHEDULES, PlanBatch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


V_SCHEDULES = [SCHEDULES.index(name) for name in V_SHAPED]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """Blocks of each kind on every pipeline rank, all its chunks together: arrays of shape (plans, stages).

    A stage is a pipeline rank; the first holds the embedding, and `is_last` says which one the head.
    """

    count: dict[Block, Ints]
    repeated: dict[Block, Ints]  # of them, those that full recomputation runs again
    repeats_chunk: Bools  # whether a chunk of the rank is recomputed down to its last layer
    chunks_alike: Bools  # whether all chunks of every rank have the same blocks: shape (plans)
    is_last: Bools  # whether the rank holds the last chunk

    @property
    def num_stages(self) -> int:
        """Pipeline ranks."""
        return self.repeats_chunk.shape[1]

    def at_last(self, values: Floats) -> Floats:
        """`values` of the plans on the rank with the last chunk, and 0 elsewhere: shape (plans, stages)."""
        return np.where(self.is_last, values[:, None], 0.0)


@lru_cache(maxsize=64)
def _cumulative_blocks(model: ModelSpec) -> dict[Block, Ints]:
    """How many blocks of each kind the first n layers have, for n = 0 .. num_layers."""
    kinds = sorted({block for layer in model.layers for block in layer})
    return {
        kind: np.concatenate([[0], np.cumsum([layer.count(kind) for layer in model.layers])]).astype(np.int64)
        for kind in kinds
    }


def chunk_blocks(model: ModelSpec, layout: tuple[int, ...], num_repeated: int) -> dict[Block, tuple[Ints, Ints]]:
    """(blocks, blocks recomputed as a whole) of each kind in every chunk in model order.

    The first `num_repeated` layers of a chunk are recomputed (Megatron-LM core/recompute.py, method block).
    """
    layers = np.array(layout, dtype=np.int64)
    starts = np.cumsum(layers) - layers
    repeated = starts + np.minimum(layers, num_repeated)
    return {
        kind: (total[starts + layers] - total[starts], total[repeated] - total[starts])
        for kind, total in _cumulative_blocks(model).items()
    }


def stage_blocks(model: ModelSpec, batch: PlanBatch, stages: int) -> StageBlocks:
    """The blocks of plans that share one number of stages, on the ranks where their schedule puts the chunks."""
    is_v = np.isin(batch.schedule, V_SCHEDULES)
    keys = np.stack([batch.layout, batch.recompute_num_layers, is_v])
    found, inverse = np.unique(keys, axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    kinds = _cumulative_blocks(model)
    count = {kind: np.empty((found.shape[1], stages), dtype=np.int64) for kind in kinds}
    repeated = {kind: np.empty((found.shape[1], stages), dtype=np.int64) for kind in kinds}
    whole = np.empty((found.shape[1], stages), dtype=np.bool_)
    alike = np.ones(found.shape[1], dtype=np.bool_)
    for row, (at, num_repeated, has_v) in enumerate(found.T.tolist()):
        layers = np.array(batch.layouts[at])
        held = chunks_of_ranks("zb-v" if has_v else "interleaved", stages, len(layers) // stages)
        whole[row] = ((layers <= num_repeated) & (layers > 0))[held].any(axis=1)
        for kind, (blocks, again) in chunk_blocks(model, batch.layouts[at], num_repeated).items():
            per_rank, again_per_rank = blocks[held], again[held]
            count[kind][row], repeated[kind][row] = per_rank.sum(axis=1), again_per_rank.sum(axis=1)
            alike[row] &= bool(((per_rank == per_rank[:, :1]) & (again_per_rank == again_per_rank[:, :1])).all())
    last = np.where(is_v, 0, stages - 1)
    return StageBlocks(
        count={kind: table[inverse] for kind, table in count.items()},
        repeated={kind: table[inverse] for kind, table in repeated.items()},
        repeats_chunk=whole[inverse],
        chunks_alike=alike[inverse],
        is_last=np.arange(stages) == last[:, None],
    )


def repeats_mtp(batch: PlanBatch) -> Bools:
    """Which plans recompute prediction layers: those that recompute all layers, not a number of them.

    Megatron-LM core/transformer/multi_token_prediction.py skips them under the method block.
    """
    return batch.recompute_num_layers == ALL_LAYERS
