"""Options of Megatron-DeepSpeed (4efb479d), a fork of Megatron-LM for DeepSpeed, translated to Megatron-LM's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.options import Argument, Options
from autoplan.frameworks.megatron_lm.state_options import STRATEGIES
from autoplan.spec.enums import Sharding

FRAMEWORK = "megatron-deepspeed"
_TELLING = ("deepspeed", "deepspeed_config", "zero_stage", "ds_sequence_parallel_size")
_STAGES = (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
_FLASH = ("use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")
_COSTLESS = (
    *("deepspeed_activation_checkpointing", "expert_interval", "checkpoint_num_layers", "force_ds_sequence_parallel"),
    *("train_tokens", "universal_checkpoint"),
)
_UNPRICED = (
    *("cpu_optimizer", "ds_sequence_parallel_fpdt", "partition_activations", "mlp_type", "use_tutel"),
    *("checkpoint_in_cpu", "remote_device"),
    *("embed_layernorm", "sync_tp_duplicated_parameters"),  # of bigscience-workshop/Megatron-DeepSpeed
)


def is_with_deepspeed(arguments: Options) -> bool:
    """Return whether the options belong to Megatron-DeepSpeed."""
    return any(map(arguments.has, _TELLING))


def translate(arguments: Options, *, has_model: bool) -> None:
    """Translate the options of Megatron-DeepSpeed to options of Megatron-LM, and add these."""
    sharding = arguments.word("zero_stage", dict(enumerate(_STAGES)), 1)
    # Its pipeline engine wraps bf16 weights in BF16_Optimizer, whose states are sharded (runtime/engine.py:2315).
    if sharding == Sharding.NONE and arguments.flag("bf16") and arguments.flag("pipeline_parallel", True):
        sharding = Sharding.ZERO1
    means = _means(arguments, "zero_stage")
    means("use_distributed_optimizer", sharding != Sharding.NONE)
    if sharding in (Sharding.ZERO2, Sharding.ZERO3):
        strategy = next(word for word, kind in STRATEGIES.items() if kind == sharding)
        means("use_megatron_fsdp", True)
        means("data_parallel_sharding_strategy", strategy)
    # Attention is its own (megatron/model/transformer.py) unless an option takes a flash kernel.
    means("transformer_impl", "local")
    for kernel in [key for key in _FLASH if arguments.flag(key)]:
        _means(arguments, kernel)("use_flash_attn", True)
    for overlap in ("overlap_grad_reduce", "overlap_param_gather"):  # only stage 3 gathers and reduces ahead
        means(overlap, sharding == Sharding.ZERO3)
    if arguments.flag("checkpoint_activations"):
        _means(arguments, "checkpoint_activations")("recompute_granularity", "full")
        if arguments.optional_count("checkpoint_num_layers", 1) != 1:
            arguments.remark("checkpoint_num_layers", "units of several layers keep less than is priced")
    if (degree := arguments.count("ds_sequence_parallel_size", 1)) > 1:
        means = _means(arguments, "ds_sequence_parallel_size")
        means("context_parallel_size", degree)
        means("cp_comm_type", "a2a")
    if not arguments.flag("pipeline_parallel", True):
        _means(arguments, "pipeline_parallel")("pipeline_model_parallel_size", 1)
    if arguments.has("num_key_value_heads"):
        means = _means(arguments, "num_key_value_heads")
        means("group_query_attention", True)
        means("num_query_groups", arguments.count("num_key_value_heads"))
    if arguments.has("normalization"):
        norms = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
        _means(arguments, "normalization")("normalization", arguments.word("normalization", norms))
    if arguments.has("pad_vocab_size_to"):
        _means(arguments, "pad_vocab_size_to")("padded_vocab_size", arguments.count("pad_vocab_size_to"))
    if arguments.text("glu_activation") == "swiglu":
        _means(arguments, "glu_activation")("swiglu", True)
    if arguments.has("num_experts") and arguments.value("num_experts") not in (1, [1]) and not has_model:
        raise InputError("the experts of Megatron-DeepSpeed are not read from their options: pass --model")
    if arguments.value("num_experts") in (1, [1]):  # a dense model, of which no option of experts tells anything
        _means(arguments, "num_experts")("num_experts", 0)
        arguments.pass_over("create_moe_param_group", *(key for key in arguments.arguments if key.startswith("moe_")))
    arguments.value("deepspeed")
    if arguments.has("deepspeed_config"):
        arguments.remark("deepspeed_config", "read from the options alone, not from this file")
    for key in _UNPRICED:
        if arguments.has(key):
            arguments.remark(key, "not priced")
    arguments.pass_over(*_COSTLESS)


def _means(arguments: Options, key: str) -> Callable[[str, Any], None]:
    """Return a function that sets another option to the value meant by option `key`."""
    option = arguments.name(key)
    text = arguments.arguments[key].text if arguments.has(key) else "its default"

    def means(name: str, value: Any) -> None:
        arguments.arguments[name] = Argument(option, text, name, value)

    return means
