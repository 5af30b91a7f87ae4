"""How is a model cut so that its pipeline stages hold about the same parameters?"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from autoplan.model import ModelSpec
from autoplan.plan import even_chunks


@lru_cache(maxsize=4096)
def balanced_layers(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Decoder layers of every stage, so that the most parameters of a stage are as few as can be.

    Embedding and head count too, and stages are filled one after another.  Where a stage would get nothing, which the
    source refuses, layers are spread evenly.  Source: Aleph-Alpha/scaling 737f855 core/nn/parallel_module,
    pipeline_partitioning.py, pipe_partition_balanced, from DeepSpeed.
    """
    width = 2 * (model.num_heads + model.kv_heads) * model.qk_head_dim + (2 + model.gated_mlp) * model.ffn_size
    table = model.vocab_size * model.hidden_size
    units = (table, *[width * model.hidden_size] * model.num_layers, table)
    most = bisect_left(range(sum(units)), True, lo=max(units), key=lambda least: len(_filled(units, least)) <= pp)
    stages = _filled(units, most)
    if len(stages) < pp:
        return even_chunks(model.num_layers, pp)
    stages[0] -= 1
    stages[-1] -= 1
    return tuple(stages)


def _filled(units: tuple[int, ...], most: int) -> list[int]:
    """How many units every stage gets if it takes what comes next up to `most` parameters."""
    stages: list[int] = []
    free = 0
    for unit in units:
        if not stages or unit > free:
            stages.append(0)
            free = most
        stages[-1] += 1
        free -= unit
    return stages
