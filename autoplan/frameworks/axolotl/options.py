"""Axolotl's names for arguments of the Trainer, and its mesh (067b021, src/axolotl/utils/schemas/config.py)."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Row, Value, count, optional_count
from autoplan.frameworks.hf_trainer.options import WRITTEN_OPTIM
from autoplan.spec.enums import AttentionKernel, ChunkedLoss
from autoplan.spec.lengths import Batching
from autoplan.spec.optimizers import OptimizerName

LENGTH = "sequence_len"
KEEPS = "peft_autocast_adapter_dtype"  # false: adapters have the data type of the model (loaders/adapter.py:368)
# Axolotl's names by the Trainer's names.
NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}
MESH: tuple[Row, ...] = (
    count("dp_replicate_size", "dp_replicate", 1),
    optional_count("dp_shard_size", "dp_shard"),
    count("tensor_parallel_size", "tp", 1),
    count("context_parallel_size", "cp", 1),
)
# Sequence settings by batching; "joined" occurs only with pretraining_dataset.
BATCHINGS: dict[Batching, dict[str, Value]] = {
    "packed": {"sample_packing": True, "pad_to_sequence_len": True},
    "full": {"sample_packing": False, "pad_to_sequence_len": True},
    "padded": {"sample_packing": False, "pad_to_sequence_len": False},
}
OPTIMIZER_WORDS: dict[OptimizerName, str] = WRITTEN_OPTIM | {"muon": "muon"}  # utils/schemas/enums.py:95
# Switches of kernels of attention (utils/schemas/config.py).
KERNELS = {
    "flash_attention": AttentionKernel.FLASH2,
    "sdp_attention": AttentionKernel.FLASH,
    "flex_attention": AttentionKernel.FLEX,
    "eager_attention": AttentionKernel.UNFUSED,
}
# Plugin and kind of a loss in pieces by the switch of it (integrations/liger/args.py, cut_cross_entropy/args.py).
LOSSES = {
    "liger_fused_linear_cross_entropy": ("axolotl.integrations.liger.LigerPlugin", ChunkedLoss.LIGER),
    "cut_cross_entropy": ("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin", ChunkedLoss.CUT),
}
# On by default for adapters (utils/schemas/config.py:1975).
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
COSTLESS = (
    *("xformers_attention", "strict", "special_tokens", "tokens", "val_set_size"),
    *("test_datasets", "pretraining_dataset", "shuffle_merged_datasets", "evals_per_epoch", "saves_per_epoch"),
    *("auto_resume_from_checkpoints", "num_epochs", "train_on_inputs", "base_model_config", "model_type"),
    *("pad_to_sequence_len", "eval_sample_packing", "is_llama_derived_model", "chat_template"),
    *("early_stopping_patience", "loss_watchdog_threshold", "loss_watchdog_patience"),
    *("save_safetensors", "cosine_min_lr_ratio", "cosine_constant_lr_ratio", "torchao_quantization", "weight_decay"),
    *("roles_to_train", "default_system_message", "loraplus_lr_ratio", "processor_type", "skip_prepare_dataset"),
)
