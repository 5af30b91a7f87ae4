"""Rules on the plans that nanotron accepts, and its division of a model into pipeline stages.

Places are files and lines of nanotron 2411b02 (2026-04), below src/nanotron/.  The vocabulary is padded to a
multiple of tp (helpers.py:52), and embeddings may be tied across stages.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common import shared_rules as shared
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords, all_true
from autoplan.frameworks.common.widths import has_dense_mlp
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch, chunk_layers
from autoplan.spec.workload import Workload

_LLAMA = "models/llama.py"
_LINEAR = "parallel/tensor_parallel/nn.py"
_ENGINE = "parallel/pipeline_parallel/engine.py"

ONE_FORWARD_ONE_BACKWARD = Schedule.ONE_F_ONE_B.code
NONE = Sharding.NONE.code


@lru_cache(maxsize=4096)
def layers_per_stage(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Return the decoder layers of every stage: nanotron balances matrix products, including the head.

    A block goes to the current stage; once the cost up to and including it reaches the stage's even share of the
    total, the next block opens the next stage.  The source requires more than the share; but the memory peaks of most
    1B runs with 2 and 4 stages show that a block which ends exactly at the share closes the stage.
    models/base.py:224, models/llama.py get_block_compute_costs; the same at 01de8d9.
    """
    width = model.num_heads * model.qk_head_dim
    layer = 4 * width * model.hidden_size + 3 * model.ffn_size * model.hidden_size
    total = model.num_layers * layer + model.vocab_size * model.hidden_size
    stages = [0] * pp
    stage = 0
    for at in range(1, model.num_layers + 1):
        stages[stage] += 1
        # In integers: at * layer >= total * (stage + 1) / pp.
        if at * layer * pp >= total * (stage + 1) and stage < pp - 1:
            stage += 1
    return tuple(stages)


# -- pipelines --------------------------------------------------------------------------------------------------------


def _own_split(workload: Workload, batch: PlanBatch) -> Bools:
    matches = [layers_per_stage(workload.model, len(layout)) == layout for layout in batch.layouts]
    return np.array(matches, dtype=np.bool_)[batch.layout]


# -- experts, sharding ------------------------------------------------------------------------------------------------


def _split_text(workload: Workload, plan: ParallelPlan) -> str:
    cut = ",".join(map(str, layers_per_stage(workload.model, plan.pp * plan.vp)))
    layers = ",".join(map(str, chunk_layers(plan, workload.model.num_layers)))
    return f"stages of {layers} layers: it splits by cost into {cut}: set that"


SUPPORTED = (
    SupportedWords(axis="schedule", words=("1f1b", "gpipe"), source="config/utils_config.py:104"),
    SupportedWords(axis="sharding", words=("none", "zero1"), source="helpers.py:409"),
    SupportedWords(axis="recompute", words=("none", "full"), source=f"{_LLAMA}:774"),
    SupportedWords(axis="offload", words=("none",), source="config/config.py:409"),
    SupportedWords(axis="precision", words=("bf16", "fp16"), source="config/utils_config.py:70"),
)

RULES: tuple[Rule, ...] = (
    *universal.RULES,
    *universal.options_of_others("ep_overlap"),
    universal.ALL_OR_NONE,
    *(words.rule() for words in SUPPORTED),
    shared.no_interleaving(f"{_ENGINE}:270"),
    Rule(
        source=f"{_ENGINE}:175",
        holds=lambda s, b: (b.schedule == ONE_FORWARD_ONE_BACKWARD) | (b.pp > 1),
        text=lambda s, p: f"schedule {p.schedule!r} needs pp > 1, pp is {p.pp}: use 1f1b",
    ),
    Rule(
        source=f"{_ENGINE}:253",
        holds=lambda s, b: (b.schedule != ONE_FORWARD_ONE_BACKWARD) | (b.num_microbatches >= b.pp - 1),
        text=lambda s, p: (
            f"1f1b needs at least pp - 1 = {p.pp - 1} micro-batches, there are {p.num_microbatches}: lower pp or "
            "micro_batch, or use gpipe"
        ),
    ),
    Rule(source="models/base.py:224", holds=_own_split, text=_split_text),
    shared.whole_kv_heads(f"{_LLAMA}:351"),
    Rule(
        source=f"{_LINEAR}:128",
        holds=lambda s, b: s.model.ffn_size % b.tp == 0 if has_dense_mlp(s.model) else all_true(b),
        text=lambda s, p: f"ffn_size {s.model.ffn_size} must be divisible by tp {p.tp}: lower tp",
    ),
    shared.sp_needs_tp("config/parallelism_config.py:46"),
    Rule(
        source="parallel/tensor_parallel/distributed_differentiable_primitives.py:106",
        holds=lambda s, b: ~b.sp | (s.training.seq_len % b.tp == 0),
        text=lambda s, p: f"with sp, seq_len {s.training.seq_len} must be divisible by tp {p.tp}: lower tp",
    ),
    Rule(
        source=f"{_LINEAR}:145",
        holds=lambda s, b: ~b.tp_overlap | b.sp | (b.tp == 1),
        text=lambda s, p: "tp_overlap needs sp: leave it out or use both",
    ),
    # One attention class supports it (models/qwen.py:777), but only runs that start from a checkpoint work with it.
    shared.only("cp", 1, why="runs with context parallelism do not start, set cp 1", source="trainer.py:1053"),
    # The group sizes must multiply to the world size without ep, but ranks are numbered with ep.
    shared.only("ep", 1, why="runs with expert parallelism do not start, set ep 1", source="parallel/context.py:26"),
    shared.whole_experts("nn/moe.py:71"),
    Rule(
        source="optim/zero.py:184",
        holds=lambda s, b: (b.sharding == NONE) | (b.dp_replicate == 1),
        text=lambda s, p: f"zero1 shards over all replicas, dp_replicate is {p.dp_replicate}: set it to 1",
    ),
)

BOOK = Rulebook(rules=RULES, supported=SUPPORTED, shards_over_part=False, split=layers_per_stage)
