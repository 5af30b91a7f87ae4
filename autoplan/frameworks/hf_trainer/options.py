"""Option table of the Trainer of transformers 5.24: TrainingArguments, for writing and reading.

`fsdp_config` is a nested table, whose keys may begin with "fsdp_" (transformers/training_args.py).
"""

from __future__ import annotations

import re
from typing import Any

from autoplan.frameworks.common.option_table import Assumed, Option, Value, count, switch
from autoplan.frameworks.common.options import Options, parse_json
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
# Arguments that affect neither time nor memory of a step.
HARMLESS = re.compile(
    r"(output_dir|overwrite_output_dir|do_(train|eval|predict)|num_train_epochs|max_steps|learning_rate|lr_\w+|lr"
    r"|warmup_\w+|optim_args|weight_decay|adam_\w+|max_grad_norm|label_smoothing_factor|tf32|seed|data_seed"
    r"|logging_\w+|log_\w+|log|report_to|run_name|project|trackio_\w+|wandb\w*|swanlab\w*|comet_\w+|mlflow_\w+|eval\w*"
    r"|evaluation_strategy|save\w*|push_to_hub|hub_\w+|load_best_model_at_end|metric_for_best_model|greater_is_better"
    r"|resume_from_checkpoint|dataloader_\w+|remove_unused_columns|ddp_(timeout|backend|broadcast_buffers)|local_rank"
    r"|skip_memory_metrics|disable_tqdm|(shuffle_)?dataset\w*|train_file|validation_file|prediction_loss_only"
    r"|data_(paths?|dir|files?|root|seed|name|config|mix\w*|num_\w+|ratio\w*|split\w*|cache\w*|version)"
    r"|preprocessing_num_workers|max_(train|eval|predict)?_?samples|cache_dir|trust_remote_code|model_revision"
    r"|use_fast_tokenizer|tokenizer\w*|template|chat_template\w*|system\w*|plot_loss|include_\w+"
    r"|per_device_eval_batch_size|(bf|fp)16_full_eval|neftune_noise_alpha|gradient_checkpointing_kwargs|ignore_data_skip|length_column_name"
    r"|average_tokens_across_devices|debug|truncation_mode|router_aux_loss_coef|overwrite_cache|adapter_name_or_path|token"
    r"|fsdp_transformer_layer_cls_to_wrap|packing_strategy|pad_token|eos_token|special_tokens|tokens|completion_only_loss|assistant_only_loss)$"
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
