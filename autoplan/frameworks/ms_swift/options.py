"""Arguments of ms-swift (3602360) whose name or default differs from Megatron-LM's or the Trainer's.

The option table is that of Megatron-LM.
"""

from __future__ import annotations

import re

from autoplan.frameworks.common.option_table import Value
from autoplan.spec.lengths import Batching

# Defaults in swift/megatron/arguments/megatron_args.py that differ from Megatron-LM's.
MEGATRON_DEFAULTS: dict[str, Value] = {
    "padding_free": True,  # swift/megatron/arguments/megatron_args.py:524
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "recompute_granularity": "selective",
    "use_distributed_optimizer": True,
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": True,
}
# Names of Megatron-LM's arguments by the names in ms-swift.
MEGATRON_NAMES = {
    "max_length": "seq_length",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
# Arguments whose parsed name differs from their option.
WRITTEN_NAMES = {"fp8": "fp8_format", "fp4": "fp4_format"}
# Arguments of Megatron-LM that ms-swift lacks: the first two cost nothing; `moe_enable_deepep` and `main_grads_dtype`
# imply the others (swift/megatron/arguments/megatron_args.py:1115).
NOT_ITS = ("ckpt_format", "init_model_with_meta_device", "moe_flex_dispatcher_backend", "grad_reduce_in_bf16")
# Sequence arguments by batching (swift/megatron/arguments/megatron_base_args.py).
BATCHINGS: dict[Batching, dict[str, Value]] = {
    "packed": {"packing": True},
    "unpadded": {"packing": False, "padding_free": True},
    "padded": {"packing": False, "padding_free": False},
}
# Defaults in swift/arguments that differ from the Trainer's.
TRAINER_DEFAULTS: dict[str, Value] = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
MAX_SEQUENCES = 16  # sequences per step that the default gradient accumulation aims for
# Its own FSDP configuration, and the name of that (swift/config/fsdp2.json).
SHARDED = "fsdp2"
FSDP2: dict[str, Value] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True},
}
STAGES = re.compile(r"zero([0-3])(_offload)?")  # names of DeepSpeed configurations in its package

OF_TUNER = (
    *("tuner_type", "train_type", "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save"),
    *("use_rslora", "use_dora", "quant_bits", "quant_method", "bnb_4bit_use_double_quant", "bnb_4bit_quant_type"),
    *("bnb_4bit_compute_dtype", "lora_dtype", "lora_bias"),
)
COSTLESS = (
    *("torch_dtype", "load_from_cache_file", "split_dataset_ratio", "loss_scale", "model_author", "model_name"),
    *("merge_lora", "save_safetensors", "use_hf", "finetune", "lr", "min_lr", "lr_warmup_fraction", "num_train_epochs"),
    *("cached_dataset", "cached_val_dataset", "to_cached_dataset", "use_chat_template", "agent_template", "adapters"),
    *("truncation_strategy", "label_names", "columns", "model_type", "model_kwargs", "create_checkpoint_symlink"),
    *("add_version", "max_epochs", "lazy_tokenize", "packing_cache", "strict", "mcore_model", "val_dataset"),
    *("add_non_thinking_prefix", "response_prefix", "custom_register_path", "ignore_args_error", "streaming"),
)
