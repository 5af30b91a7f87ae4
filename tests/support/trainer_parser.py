"""What do transformers and TRL themselves make of the words behind a program?  A process of its own: it imports torch.

Reads [{program: "sft", words: [...], ranks: N}, ...] and writes for each either {error: ...} or {values: {...}, others:
[...]}.  What TRL_FIRST names, where it is set, holds TRL, whose classes take all words; else those of the Trainer alone
take theirs, and `others` are the names that they do not know.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from framework_parsers import answer

FIELDS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "gradient_checkpointing"),
    *("fsdp", "fsdp_config", "optim", "max_length", "packing", "packing_strategy", "padding_free", "loss_type"),
    *("precompute_ref_log_probs", "max_steps", "use_peft", "lora_r", "lora_target_modules", "load_in_4bit", "dtype"),
)


def check(case: dict[str, Any], classes: Callable[[str], tuple[type, ...]]) -> dict[str, Any]:
    from transformers import HfArgumentParser, TrainingArguments

    TrainingArguments.world_size = property(lambda self: case["ranks"])
    parser = HfArgumentParser(classes(case["program"]))
    *parsed, others = parser.parse_args_into_dataclasses(args=[*case["words"]], return_remaining_strings=True)
    values = {name: getattr(item, name) for item in parsed for name in FIELDS if hasattr(item, name)}
    arguments = next(item for item in parsed if hasattr(item, "fsdp_plugin_args"))
    if arguments.fsdp:
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
        values["reshards"] = plugin.reshard_after_forward
        values["checkpoints"] = plugin.activation_checkpointing
        values["offloads"] = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    if arguments.deepspeed:
        values["deepspeed"] = arguments.hf_deepspeed_config.config
        values["mismatches"] = arguments.hf_deepspeed_config.mismatches  # between the file and the words
    return {"values": values, "others": [word for word in others if word.startswith("--")]}


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    import torch
    from transformers import TrainingArguments

    # Nothing is run here: no device is asked for what it can.
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *_: True
    TrainingArguments._setup_devices = property(lambda self: torch.device("cpu"))
    TrainingArguments.n_gpu = property(lambda self: 1)
    TrainingArguments.distributed_state = types.SimpleNamespace(distributed_type="DEEPSPEED")
    if first := os.environ.get("TRL_FIRST"):
        sys.path.insert(0, first)
        import trl

        configs = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "reward": trl.RewardConfig}
        return lambda case: check(case, lambda name: (trl.ScriptArguments, configs[name], trl.ModelConfig))
    return lambda case: check(case, lambda name: (TrainingArguments,))


if __name__ == "__main__":
    answer(prepare)
