"""Option table of nanotron 2411b02 (2026-04): the sections of its configuration, for writing and reading."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Constant, Row, count, number, switch, word
from autoplan.spec.enums import Precision, Recompute, Schedule, Sharding

# Section `parallelism`.
MESH = (count("dp", "dp"), count("tp", "tp"), count("pp", "pp"))
GROUPS = (count("context_parallel_size", "cp", 1), count("expert_parallel_size", "ep", 1))
PASSES = (
    word("pp_engine", "schedule", Schedule.GPIPE, {"1f1b": Schedule.ONE_F_ONE_B, "afab": Schedule.GPIPE}),
    word(
        "tp_mode",
        "sp",
        False,
        {"REDUCE_SCATTER": True, "reduce_scatter": True, "ALL_REDUCE": False, "all_reduce": False},
    ),
    switch("tp_linear_async_communication", "tp_overlap"),
)
RECOMPUTE = switch("recompute_layer", "recompute", Recompute.NONE, on=Recompute.FULL, off=Recompute.NONE)
PARALLELISM: tuple[Row | Constant, ...] = (
    *MESH,
    *GROUPS,
    *PASSES,
    Constant("tp_recompute_allgather", True),
    RECOMPUTE,
)

# Sections `tokens`, `optimizer` and `model`.
MICRO_BATCH = count("micro_batch_size", "micro_batch")
ACCUMULATION = count("batch_accumulation_per_replica", "num_microbatches")
ZERO_STAGES = {Sharding.NONE: 0, Sharding.ZERO1: 1}
DTYPE = word("dtype", "precision", Precision.BF16, {"bfloat16": Precision.BF16, "float16": Precision.FP16})

# Section `model.model_config`, with the defaults of its Llama.
NUM_LAYERS = count("num_hidden_layers", "model.num_layers", 32)
NUM_HEADS = count("num_attention_heads", "model.num_heads", 32)
HIDDEN_SIZE = count("hidden_size", "model.hidden_size", 4096)
VOCAB_SIZE = count("vocab_size", "model.vocab_size", 32000)
ROPE_BASE = number("rope_theta", "model.rope_base", 10000.0, encode=float)
TIED = switch("tie_word_embeddings", "model.tied_embeddings")
EXPERTS = (
    count("num_experts", "model.moe.num_experts", 8),
    count("top_k", "model.moe.experts_per_token", 2),
    count("moe_intermediate_size", "model.moe.expert_ffn_size", 1408),
)
SHARED_EXPERT = count("shared_expert_intermediate_size", "model.moe.shared_expert_ffn_size", 5632)
