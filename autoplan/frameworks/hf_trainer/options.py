"""Option table of the Trainer of transformers 5.24: TrainingArguments, for writing and reading.

`fsdp_config` is a nested table, whose keys may begin with "fsdp_" (transformers/training_args.py).
"""

from __future__ import annotations

from typing import Any

from autoplan.frameworks.common.option_table import Assumed, Option, Value, count, switch
from autoplan.frameworks.common.options import Options, parse_json, whole_names
from autoplan.readers.finetuning import OPTIM, OTHER_OPTIM
from autoplan.spec.enums import AttentionKernel, ChunkedLoss, Offload, Precision, Recompute
from autoplan.spec.lengths import Batching
from autoplan.spec.optimizers import OPTIMIZERS, OptimizerName
from autoplan.spec.plan import ParallelPlan

MICRO_BATCH = count("per_device_train_batch_size", "micro_batch", 8)
ACCUMULATION = count("gradient_accumulation_steps", "num_microbatches", 1)
RECOMPUTE = switch("gradient_checkpointing", "recompute", Recompute.NONE, on=Recompute.FULL, off=Recompute.NONE)
PRECISIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16}
CPU_OFFLOAD = switch("cpu_offload", "offload", Offload.NONE, on=Offload.PARAMETERS, off=Offload.NONE)
# Sequence arguments of TRL by batching (trl/trainer/sft_config.py).
BATCHINGS: dict[Batching, dict[str, Value]] = {
    "packed": {"packing": True, "packing_strategy": "bfd"},
    "joined": {"packing": True, "packing_strategy": "wrapped"},
    "padded": {"packing": False, "padding_free": False},
    "unpadded": {"padding_free": True},
}

# The first name of an optimizer is the one written on export.
WRITTEN_OPTIM = {
    name: next(word for word, optimizer in OPTIM.items() if optimizer == name)
    for name in OPTIMIZERS
    if name in OPTIM.values()
}

# Keys of section `fsdp_config`, without "fsdp_", that affect neither time nor memory of a step.
FSDP_COSTLESS = (
    *("transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading", "state_dict_type", "xla"),
    *("sync_module_states", "use_orig_params", "version", "final_state_dict_type"),
    *("xla_fsdp_settings", "limit_all_gathers"),
    *("backward_prefetch", "forward_prefetch"),
)
_UNITS = "units of one layer each are priced"
FSDP_ASSUMED = (
    Assumed("auto_wrap_policy", ("TRANSFORMER_BASED_WRAP", "transformer_based_wrap", 1, None), _UNITS),
    Assumed("min_num_params", (0, None), _UNITS),
)
# Why XLA's single program over all devices is listed (transformers/trainer.py, `tpu_spmd_dataloader`).
SPMD = "the batch of a device is shared by all devices under SPMD: priced as that of each"
OFFLOADS = (CPU_OFFLOAD.key, "offload_params")
# Data type in which a program loads its model (transformers/modeling_utils.py, from_pretrained).
HELD_KEYS = ("dtype", "torch_dtype")

# Arguments that a plan does not represent, and the values that the cost model assumes.
ASSUMED: tuple[Option, ...] = (
    Assumed("torch_compile", (False, None), "priced as not compiled"),
    Assumed("auto_find_batch_size", (False, None), "the batch may be halved until it fits"),
    Assumed("group_by_length", (False, None), "sequences are priced at one length"),
    Assumed("train_sampling_strategy", ("random", "sequential", None), "sequences are priced at one length"),
    Assumed("torch_empty_cache_steps", (None, 0), "priced without it"),
    Assumed("ddp_find_unused_parameters", (False, None), "priced without it"),
    Assumed("ddp_bucket_cap_mb", (25, None), "priced as 25"),
    Assumed("spmd_2d_sharding", (None, 0), SPMD),
    Assumed("activation_offloading", (False, None), "activations are priced on the device"),
    Assumed("full_determinism", (False, None), "a host that waits for every kernel, in a fixed order, is not priced"),
    Assumed("use_cpu", (False, None), "priced on the device"),
    Assumed("no_cuda", (False, None), "priced on the device"),
    Assumed("use_mps_device", (False, None), "priced on the device"),
)
# Kernels of attention (transformers/modeling_utils.py, attn_implementation; kernels-community on the hub): sdpa is what
# torch has.
KERNELS = {
    "sdpa": AttentionKernel.FLASH,
    "flash_attention_2": AttentionKernel.FLASH2,
    "flash_attention_3": AttentionKernel.FLASH3,
    "flex_attention": AttentionKernel.FLEX,
    "eager": AttentionKernel.UNFUSED,
}
_KERNEL_KEYS = ("attn_implementation", "flash_attn", "attn_impl")
_OTHER_KERNELS = {
    **dict.fromkeys(("auto", "true", ""), AttentionKernel.FLASH),
    **dict.fromkeys(("fa2", "flash_attn", "kernels-community/flash-attn2"), AttentionKernel.FLASH2),
    **dict.fromkeys(("fa3", "kernels-community/flash-attn3"), AttentionKernel.FLASH3),
    **dict.fromkeys(("disabled", "false"), AttentionKernel.UNFUSED),
}
SKIPS = (AttentionKernel.FLASH2, AttentionKernel.FLASH3)  # what packs samples into a sequence needs one of them
LIGER = "use_liger_kernel"
# What `liger_kernel_config` may turn off (Liger-Kernel, transformers/monkey_patch.py): the loss alone is an option.
_LOSS = "fused_linear_cross_entropy"
LIGERS_LOSS_ALONE: dict[str, Value] = {
    **dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy"), False),
    _LOSS: True,
}
# Arguments that affect neither time nor memory of a step: whole names, or families of them.
HARMLESS = whole_names(
    # learning rate, update and loss
    "learning_rate lr lr_* warmup_* weight_decay adam_beta1 adam_beta2 adam_epsilon adam_eps max_grad_norm optim_args",
    "label_smoothing_factor neftune_noise_alpha router_aux_loss_coef num_train_epochs max_steps do_train tf32",
    "average_tokens_across_devices completion_only_loss assistant_only_loss gradient_checkpointing_kwargs",
    # results and logs
    "output_dir overwrite_output_dir save save_* saves_per_epoch push_to_hub hub_* load_best_model_at_end plot_loss",
    "metric_for_best_model greater_is_better resume_from_checkpoint adapter_name_or_path logging_* log log_level",
    "log_level_replica log_on_each_node log_dir log_completions log_config log_history report_to run_name project",
    "trackio_* wandb* swanlab* comet_* mlflow_* skip_memory_metrics disable_tqdm debug include_for_metrics",
    "include_num_input_tokens_seen include_tokens_per_second include_effective_tokens_per_second",
    "include_inputs_for_metrics",
    # evaluation
    "do_eval do_predict eval eval_* evals_per_epoch evaluation evaluation_strategy per_device_eval_batch_size",
    "bf16_full_eval fp16_full_eval prediction_loss_only",
    # data and tokens
    "data_path data_paths data_dir data_file data_files data_root data_seed data_name data_config data_mix*",
    "data_num_* data_ratio* data_split* data_cache* data_version seed dataloader_* remove_unused_columns train_file",
    "validation_file dataset dataset_name dataset_names dataset_id dataset_path dataset_dir dataset_root dataset_list",
    "dataset_config dataset_configs dataset_config_name dataset_mixer dataset_mixture dataset_module dataset_split",
    "dataset_splits dataset_train_split dataset_test_split dataset_version dataset_meta* dataset_num_proc",
    "dataset_sample* dataset_shuffle dataset_type dataset_use dataset_attr dataset_validation dataset_text_field",
    "dataset_kwargs dataset_prompt_column dataset_prepared_path dataset_exact_deduplication dataset_revision",
    "dataset_weights dataset_ratio* dataset_prob* dataset_start_index dataset_end_index shuffle_dataset datasets",
    "preprocessing_num_workers max_samples max_train_samples max_eval_samples max_predict_samples cache_dir",
    "overwrite_cache trust_remote_code model_revision use_fast_tokenizer tokenizer* token tokens special_tokens",
    "pad_token eos_token template chat_template* system system_* ignore_data_skip length_column_name truncation_mode",
    "packing_strategy",
    # the process
    "ddp_timeout ddp_backend ddp_broadcast_buffers local_rank fsdp_transformer_layer_cls_to_wrap",
)


def read_optimizer(options: Options) -> OptimizerName:
    """Return the optimizer in a file; an optimizer that is not priced is remarked on and read as Adam."""
    word = options.text("optim") or "adamw_torch"
    if (optimizer := (OPTIM | OTHER_OPTIM).get(word)) is None:
        options.remark("optim", "priced as Adam")
        return "adam"
    return optimizer


def read_attention(options: Options) -> AttentionKernel:
    """Return the kernel of attention; others are remarked on and priced as torch's."""
    for key in _KERNEL_KEYS:
        if (word := options.text(key)) is not None:
            if (kernel := (KERNELS | _OTHER_KERNELS).get(word.casefold())) is None:
                options.remark(key, "priced as the kernel of torch")
            return kernel or AttentionKernel.FLASH
    return AttentionKernel.FLASH


def written_attention(plan: ParallelPlan) -> str:
    """Return the name of the kernel of attention."""
    return next(word for word, kernel in KERNELS.items() if kernel == plan.attention)


def read_loss(options: Options) -> ChunkedLoss:
    """Return whether a micro-batch goes through head and loss in Liger's pieces; its other kernels are remarked on."""
    if not options.flag(LIGER):
        return ChunkedLoss.NONE
    config = options.value(f"{LIGER.removeprefix('use_')}_config") or {}
    table = parse_json(config, "liger_kernel_config") if isinstance(config, str) else config
    kept = {name: table.get(name, name != "cross_entropy") for name in LIGERS_LOSS_ALONE}
    if any(on for name, on in kept.items() if name != _LOSS):
        options.remark(LIGER, "norms, rotary embedding and activation are priced as those of transformers")
    return ChunkedLoss.LIGER if kept[_LOSS] else ChunkedLoss.NONE


def holds_bf16(options: Options) -> bool:
    """Return whether the arguments make a program load its model in bf16."""
    return any(options.text(key) in ("bfloat16", "torch.bfloat16") for key in HELD_KEYS)


def plain_values(options: Options) -> dict[str, Any]:
    """Return the arguments with words for true and false converted to booleans, as in parsed tables."""
    values = {key: argument.value for key, argument in options.arguments.items()}
    truth = {"true": True, "false": False}
    return {
        key: truth.get(value.casefold(), value) if isinstance(value, str) else value for key, value in values.items()
    }


def is_on(options: Options, key: str) -> bool:
    """Return whether a switch is on, including words that mean on, such as axolotl's "full" and "auto"."""
    value = options.value(key)
    return value in (True, "") or (isinstance(value, str) and value.casefold() in ("true", "1", "full", "auto"))
