"""Places of Megatron-Core's options among the settings of verl 1dda039 (2026-08), as written and read.

The table of options is that of Megatron-LM.  Settings are those of verl/trainer/config: sft_trainer_engine.yaml with
engine/megatron.yaml and optim/megatron.yaml; fields of Megatron-Core's own classes stand in `override_` tables.
"""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Value
from autoplan.frameworks.megatron_lm.options import BRIDGE_FIELDS

TRANSFORMER = "engine.override_transformer_config"
DDP = "engine.override_ddp_config"
OPTIMIZER = "optim.override_optimizer_config"
DTYPE, DYNAMIC, MOST_TOKENS, LENGTH = (
    *("engine.dtype", "data.use_dynamic_bsz"),
    *("data.max_token_len_per_gpu", "data.max_length"),
)
# By the name of an argument of Megatron-LM, the setting that is not a field of its transformer.
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
# Settings of the words that the plan's part of Megatron-LM's options has and verl says otherwise, or not at all.
ELSEWHERE = ("bf16", "fp16", "ckpt_format", "init_model_with_meta_device", "grad_reduce_in_bf16", "te_rng_tracker")
ARGUMENTS = {place: name for name, place in PLACES.items()}
# Where the trainer's defaults differ from Megatron-LM's; dropout is that of checkpoints.
DEFAULTS: dict[str, Value] = {
    "micro_batch_size": 4,
    "global_batch_size": 256,
    "use_distributed_optimizer": True,
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "apply_rope_fusion": True,
}
DEFAULT_LENGTH, DEFAULT_TOKENS = 1024, 8192
# Places of an actor's settings (config/actor/megatron_actor.yaml), by what they are called in the SFT trainer's.
OF_ACTOR = {
    "actor_rollout_ref.actor.megatron.": "engine.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "data.micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "data.train_batch_size",
    "actor_rollout_ref.actor.use_dynamic_bsz": DYNAMIC,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": MOST_TOKENS,
}


def place_of(argument: str) -> str:
    """Return the setting that an argument of Megatron-LM is."""
    if argument in PLACES:
        return PLACES[argument]
    return f"{TRANSFORMER}.{BRIDGE_FIELDS.get(argument, argument).rpartition('.')[2]}"
