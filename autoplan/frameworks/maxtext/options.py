"""Option table of MaxText e591f30 (2026-08), for writing and reading; places are below src/maxtext/.

Keys and defaults are those of configs/base.yml, which configs/types.py validates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import Constant, count, number, switch, word
from autoplan.spec.enums import ContextParallelKind, Precision, Recompute, RecomputeModule, Sharding
from autoplan.spec.plan import ParallelPlan

# Axes of the mesh, outermost first: pipeline stages come before "data" (configs/types.py:3636).
AXES = ("pipeline", "data", "fsdp", "context", "tensor", "tensor_sequence", "expert")
# Axes that plans do not have.
OTHER_AXES = (
    *("diloco", "fsdp_transpose", "sequence", "context_usp_ulysses"),
    *("context_autoregressive", "autoregressive"),
)


def mesh(plan: ParallelPlan) -> dict[str, int]:
    """Return the degrees of `AXES`: weights are sharded over "fsdp" and "expert", whose ranks are replicas too."""
    is_sharded = plan.sharding == Sharding.ZERO3
    return {
        "pipeline": plan.pp,
        "data": plan.dp_replicate if is_sharded else plan.dp,
        "fsdp": plan.dp_shard // plan.ep if is_sharded else 1,
        "context": plan.cp,
        "tensor": 1 if plan.sp else plan.tp,
        "tensor_sequence": plan.tp if plan.sp else 1,
        "expert": plan.ep,
    }


# Batch: `per_device_batch_size` times the devices is the batch of one pass, which includes all pipeline micro-batches.
PER_DEVICE, ACCUMULATION, PIPELINED = (
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "num_pipeline_microbatches",
)


def per_device_batch(num_sequences: int, num_devices: int) -> float:
    """Return the sequences of a pass per device; MaxText truncates its product with the devices to an integer."""
    share = num_sequences / num_devices
    while int(num_devices * share) < num_sequences:
        share = math.nextafter(share, math.inf)
    return share


LENGTH = count("max_target_length", "training.seq_len", 2048)
STATES = switch("shard_optimizer_over_data", "sharding", Sharding.NONE, on=Sharding.ZERO1, off=Sharding.NONE)
CP_KIND = word("context_parallel_strategy", "cp_kind", ContextParallelKind.RING, {"ring": ContextParallelKind.RING})
ATTENTION = word("attention", "attention", "flash", {"cudnn_flash_te": "flash", "dot_product": "unfused"})
# (precision, scales) by `quantization`.
QUANTIZATION = {
    "fp8": (Precision.FP8, "delayed"),  # flax's Fp8Ops
    "te_fp8_delayedscaling": (Precision.FP8, "delayed"),
    "te_fp8_currentscaling": (Precision.FP8, "tensorwise"),
    "te_mxfp8": (Precision.MXFP8, "tensorwise"),
}
WRITTEN: tuple[Constant, ...] = (
    Constant("dtype", "bfloat16"),
    Constant("weight_dtype", "float32"),
    Constant("grad_dtype", "float32"),
    Constant("opt_type", "adamw"),
    Constant("enable_dropout", False),
    Constant("dataset_type", "synthetic"),
    Constant("enable_checkpointing", False),
)

# Recomputation: groups of tensors that policies keep (layers/decoders.py:327), and the part that recomputes each group.
# The outputs of the last products, mlpwo and moe_mlpwo, are not needed by any gradient.
GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("query_proj", "key_proj", "value_proj"),
    "context": ("context",),
    "out": ("out_proj",),
    "mlp": ("mlpwi_0", "mlpwi_1"),
    "moe": ("moe_mlpwi_0", "moe_mlpwi_1"),
    "mla": ("query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv"),
}
PARTS = {
    "context": RecomputeModule.CORE_ATTN,
    "out": RecomputeModule.LAYERNORM,
    "mlp": RecomputeModule.MLP,
    "moe": RecomputeModule.MOE,
}
DENSE = ("qkv", "context", "out", "mlp")
POLICIES: dict[str, tuple[str, ...]] = {  # of policies that keep the same, the first one is written
    "minimal_with_context": DENSE,
    "minimal": ("qkv", "out", "mlp"),
    "save_dot_with_context_except_mlp": ("qkv", "context", "out"),
    "save_dot_except_mlp": ("qkv", "out"),
    "save_dot_except_mlpwi": ("qkv", "out"),
    "save_qkv_proj": ("qkv",),
    "full": (),
    "minimal_flash": DENSE,
    "save_out_proj": ("out",),
}
OTHER_TENSORS = ("mlpwi", "mlpwo", "moe_mlpwo", "kv_proj", "qkv_proj", "attention_out", "decoder_layer_input", "engram")


def repeated(saved: Iterable[str], groups: Iterable[str]) -> tuple[RecomputeModule, ...]:
    """Return the parts of a layer, among those of `groups`, that are recomputed if a policy keeps `saved` ones."""
    return tuple(PARTS[group] for group in groups if group in PARTS and group not in saved)


NAMED = {frozenset(repeated(kept, DENSE)): name for name, kept in reversed(POLICIES.items()) if "qkv" in kept}


def policy(plan: ParallelPlan, *, is_plain: bool) -> dict[str, str]:
    """Return the `remat_policy` of a plan, with the tensors to keep for models other than plain Llama (`is_plain`)."""
    if plan.recompute == Recompute.FULL:
        return {"remat_policy": "full"}
    if is_plain:
        modules = plan.recompute_modules if plan.recompute == Recompute.SELECTIVE else ()
        return {"remat_policy": NAMED[frozenset(modules)]}
    return {"remat_policy": "custom"} | {name: "device" for names in GROUPS.values() for name in names}


# Model sizes, for models that MaxText does not ship.
SIZES = (
    count("base_num_decoder_layers", "model.num_layers", 16),
    count("base_emb_dim", "model.hidden_size", 2048),
    count("base_num_query_heads", "model.num_heads", 16),
    count("vocab_size", "model.vocab_size", 32000),
    number("rope_max_timescale", "model.rope_base", 10000.0),
    switch("logits_via_embedding", "model.tied_embeddings"),
)
KV_HEADS = count("base_num_kv_heads", "model.kv_heads", 16)
HEAD_DIM = count("head_dim", "model.qk_head_dim", 128)
FFN_SIZE = count("base_mlp_dim", "model.ffn_size", 7168)
EXPERTS = (
    count("num_experts", "model.moe.num_experts", 1),
    count("num_experts_per_tok", "model.moe.experts_per_token", 1),
    count("base_moe_mlp_dim", "model.moe.expert_ffn_size", 7168),
)
SCALE = "global_parameter_scale"


def scaled(factor: int) -> tuple[int, int, int]:
    """Return the factors of heads and MLP, of the hidden size and of the layers (pyconfig.py get_individual_scales).

    A doubling of the parameters widens heads and MLP, the next one the hidden size, the third one adds layers.
    """
    if factor & (factor - 1):
        raise InputError(f"{SCALE} must be a power of 2, got {factor}")
    rounds, rest = divmod(factor.bit_length() - 1, 3)
    return 2 ** (rounds + (rest > 0)), 2 ** (rounds + (rest > 1)), 2**rounds


# Layer kinds that can be written in a model file: (biases of queries, keys and values; norms of queries and keys).
BLOCKS = {
    "llama2": (False, "none"),
    "mistral": (False, "none"),
    "qwen2": (True, "none"),
    "qwen3": (False, "head"),
    "mixtral": (False, "none"),
    "qwen3_moe": (False, "head"),
}
OF_EXPERTS = ("mixtral", "qwen3_moe")
# MaxText's names (configs/models/) for models that have a different name here.
MODELS = {
    "deepseek-v2-lite": "deepseek2-16b",
    "deepseek-v2": "deepseek2-236b",
    "deepseek-v3": "deepseek3-671b",
    "kimi-k2": "kimi-k2-1t",
}
SAME_NAMES = (
    *("llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b"),
    *("llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "mistral-7b", "mixtral-8x7b", "mixtral-8x22b"),
    *("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b"),
    *("qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"),
)
COSTLESS = (
    *("base_config", "run_name", "base_output_directory", "hardware", "steps", "log_period", "learning_rate"),
    *("dataset_path", "dataset_name", "hf_path", "hf_name", "tokenizer_path", "tokenizer_type", "enable_checkpointing"),
    *("async_checkpointing", "checkpoint_period", "reuse_example_batch", "eval_interval", "profiler", "metrics_file"),
    *("gcs_metrics", "save_config_to_gcs", "enable_goodput_recording", "monitor_goodput", "logits_dot_in_fp32"),
    *("max_segments_per_seq", "sharding_tolerance", "normalization_layer_epsilon", "scan_layers"),
    *("gradient_clipping_threshold", "attention_type", "skip_first_n_steps_for_profiler", "profiler_steps"),
    *("warmup_steps_fraction", "learning_rate_schedule_steps", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay"),
    *("override_model_config", "num_layers_per_pipeline_stage", "scan_pipeline_iterations", "scan_layers_per_stage"),
    *("attention_bias", "use_qk_norm", "normalize_embedding_logits", "norm_topk_prob", "dataset_type", "num_slices"),
    *("sparse_matmul", "megablox", "enable_dropout", "context_parallel_load_balance"),
)
