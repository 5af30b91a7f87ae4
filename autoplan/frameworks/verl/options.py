"""Megatron-Core's options in the settings of verl 1dda039 (2026-08), for writing and reading.

The option table is that of Megatron-LM.  Settings are those of verl/trainer/config: sft_trainer_engine.yaml with
engine/megatron.yaml and optim/megatron.yaml; fields of Megatron-Core's own classes are in `override_` tables.
"""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Value
from autoplan.frameworks.megatron_lm.options import BRIDGE_FIELDS

TRANSFORMER = "engine.override_transformer_config"
DDP = "engine.override_ddp_config"
OPTIMIZER = "optim.override_optimizer_config"
DTYPE, DYNAMIC, MAX_TOKENS, LENGTH = (
    *("engine.dtype", "data.use_dynamic_bsz"),
    *("data.max_token_len_per_gpu", "data.max_length"),
)
# Settings by the name of Megatron-LM's argument, for arguments that are not fields of its TransformerConfig.
PLACES = {
    **{
        name: f"engine.{name}"
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
            *("use_distributed_optimizer", "use_megatron_fsdp"),
        )
    },
    "num_virtual_stages_per_pipeline_rank": "engine.virtual_pipeline_model_parallel_size",
    "micro_batch_size": "data.micro_batch_size_per_gpu",
    "global_batch_size": "data.train_batch_size",
    "seq_length": LENGTH,
    **{name: f"{DDP}.{name}" for name in ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_bf16")},
    "use_precision_aware_optimizer": "optim.use_precision_aware_optimizer",
    **{name: f"optim.{name}" for name in ("optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")},
    **{
        name: f"{OPTIMIZER}.{name}"
        for name in (
            *("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"),
            *("main_params_dtype", "store_param_remainders"),
        )
    },
}
# Arguments in the plan part of Megatron-LM's options that verl expresses differently or not at all.
ELSEWHERE = ("bf16", "fp16", "ckpt_format", "init_model_with_meta_device", "grad_reduce_in_bf16", "te_rng_tracker")
ARGUMENTS = {place: name for name, place in PLACES.items()}
# Defaults that differ from Megatron-LM's; dropout comes from the checkpoint.
DEFAULTS: dict[str, Value] = {
    "micro_batch_size": 4,
    "global_batch_size": 256,
    "use_distributed_optimizer": True,
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "optimizer_offload_fraction": 0.0,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "apply_rope_fusion": True,
    "gradient_accumulation_fusion": False,  # core/model_parallel_config.py
}
DEFAULT_LENGTH = 1024
# Whether a micro-batch is as many tokens, and how many, in the trainers of SFT and of actors (actor/actor.yaml).
SFT_TOKENS, ACTOR_TOKENS = (True, 8192), (False, 16384)
# Settings of an actor (config/actor/megatron_actor.yaml) by their names in the SFT trainer.
OF_ACTOR = {
    "actor_rollout_ref.actor.megatron.": "engine.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "data.micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "data.train_batch_size",
    "actor_rollout_ref.actor.use_dynamic_bsz": DYNAMIC,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": MAX_TOKENS,
}


def place_of(argument: str) -> str:
    """Return the setting for an argument of Megatron-LM."""
    if argument in PLACES:
        return PLACES[argument]
    return f"{TRANSFORMER}.{BRIDGE_FIELDS.get(argument, argument).rpartition('.')[2]}"
