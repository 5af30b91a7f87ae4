"""What are the same settings called in Megatron-LM, Primus and Megatron-Bridge?

Megatron-LM (d98e8a6) has options, which its parser turns into arguments; Primus takes the arguments by name;
Megatron-Bridge (067f987) has a container of configurations whose fields are those of Megatron-Core.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Value = Any  # bool, int, float, str, None, or a list of them

# Options whose argument is not called like them.
_ARGUMENTS = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "layernorm_epsilon": "norm_epsilon",
    "rope_fusion": "apply_rope_fusion",
    "overlap_p2p_communication": "overlap_p2p_comm",
    "bias_linear": "add_bias_linear",
    "position_embedding": "add_position_embedding",
    "use_custom_fsdp": "use_megatron_fsdp",
    "use_nccl_ub": "nccl_ub",
}
# Options that begin with "no" and are arguments of that name.
_ARE_NO = ("no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng", "no_persist_layer_norm")


def argument_of(option: str, values: Sequence[str]) -> tuple[str, Value]:
    """(name, value) of the argument that an option with these words sets: a switch is on, or off behind "no-"."""
    name = option.removeprefix("--").replace("-", "_")
    on = True
    if name.startswith(("no_", "disable_")) and name not in _ARE_NO and not values:
        name, on = name.partition("_")[2], False
    name = _ARGUMENTS.get(name, name)
    if not values:
        return name, on
    return name, values[0] if len(values) == 1 else list(values)


def is_number(word: str) -> bool:
    """Whether a word is a whole or broken number."""
    return re.fullmatch(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", word, re.ASCII) is not None


MOST_DIGITS = 40


def typed(value: Value) -> Value:
    """Words that are numbers as numbers, but for such as no option has."""
    if isinstance(value, list):
        return [typed(one) for one in value]
    if not isinstance(value, str) or len(value) > MOST_DIGITS or not is_number(value):
        return value
    return int(value) if re.fullmatch(r"-?\d+", value, re.ASCII) else float(value)


def arguments_of(words: Sequence[str]) -> dict[str, Value]:
    """The arguments of options that are written out, numbers as numbers."""
    result: dict[str, Value] = {}
    at = 0
    while at < len(words):
        option, start = words[at], at + 1
        at = start
        while at < len(words) and not words[at].startswith("--"):
            at += 1
        name, value = argument_of(option, words[start:at])
        result[name] = typed(value)
    return result


# Arguments that Megatron-Bridge keeps elsewhere than in `model` under the same name.
BRIDGE_FIELDS = {
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "seq_length": "dataset.seq_length",
    "num_experts": "model.num_moe_experts",
    "swiglu": "model.gated_linear_unit",
    "norm_epsilon": "model.layernorm_epsilon",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
    "align_param_gather": "ddp.align_param_gather",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "data_parallel_sharding_strategy": "ddp.data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy": "ddp.outer_dp_sharding_strategy",
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "nccl_ub": "ddp.nccl_ub",
    "use_torch_fsdp2": "dist.use_torch_fsdp2",
    "use_tp_pp_dp_mapping": "dist.use_tp_pp_dp_mapping",
    "tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "optimizer": "optimizer.optimizer",
    "optimizer_cpu_offload": "optimizer.optimizer_cpu_offload",
    "optimizer_offload_fraction": "optimizer.optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d": "optimizer.overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer": "optimizer.use_precision_aware_optimizer",
    "main_grads_dtype": "optimizer.main_grads_dtype",
    "main_params_dtype": "optimizer.main_params_dtype",
    "exp_avg_dtype": "optimizer.exp_avg_dtype",
    "exp_avg_sq_dtype": "optimizer.exp_avg_sq_dtype",
    "ckpt_format": "checkpoint.ckpt_format",
    "fp8_param_gather": "mixed_precision.fp8_param_gather",
    "train_iters": "train.train_iters",
}
