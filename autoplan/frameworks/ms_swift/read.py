"""Reader of ms-swift scripts (3602360): `megatron sft` takes arguments of Megatron-Core, `swift sft` the Trainer's.

Places are below swift/.  The model is `--model`, a name on a hub.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, priced_as_even
from autoplan.frameworks.common.options import Argument, Options, parse_json, show
from autoplan.frameworks.common.shell import script_of
from autoplan.frameworks.hf_trainer.launch import Program, launch_of, model_of, stage_table
from autoplan.frameworks.hf_trainer.options import HARMLESS, is_on
from autoplan.frameworks.hf_trainer.script import devices_of, has_batch, of_script
from autoplan.frameworks.megatron_bridge.tuning import FUSED
from autoplan.frameworks.megatron_lm import launch as megatron
from autoplan.frameworks.megatron_lm.read import Entry, given_arguments, started
from autoplan.frameworks.ms_swift.options import (
    COSTLESS,
    FSDP2,
    MAX_SEQUENCES,
    MEGATRON_DEFAULTS,
    MEGATRON_NAMES,
    OF_TUNER,
    SHARDED,
    STAGES,
    TRAINER_DEFAULTS,
)
from autoplan.readers.finetuning import PEFT_RANK
from autoplan.spec.enums import Precision
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning
from autoplan.spec.lengths import UNEVEN, Batching
from autoplan.spec.model import ModelSpec

_MODULE = "swift.cli._megatron."  # started by `megatron` on every device (swift/cli/main.py)
_COMMAND = re.compile(rf"^[^#\n]*?\b(?:(megatron|swift)\s+|{re.escape(_MODULE)})(?:sft|pt)\b", re.MULTILINE)
_OTHER_LOSSES = ("rlhf_type", "num_generations", "beta")
_OTHER_TASKS = ("embedding", "seq_cls", "reranker", "generative_reranker")
DROPOUT = 0.05


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a script that trains with `sft` or `pt` of `megatron` or `swift`."""
    return name.endswith((".sh", ".slurm", ".sbatch", ".txt")) and _COMMAND.search(text) is not None


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of the last command of a script; raises InputError if it is incomplete."""
    commands = _COMMAND.findall(text)
    if not commands:
        raise InputError("no command of the script is megatron sft, swift sft, or pt of one of them")
    return _with_trainer(text, context) if commands[-1] == "swift" else _with_megatron(text, context)


def _check(options: Options) -> None:
    """Raise an error for tasks whose step is not priced."""
    for key in _OTHER_LOSSES:
        if options.has(key):
            raise InputError(f"{key}: only training on the next token is priced, no preferences or rewards")
    if (task := options.text("task_type", "causal_lm")) in _OTHER_TASKS:
        raise InputError(f"task_type {task}: only training on the next token is priced")


def _finetuning(options: Options, default: str) -> FineTuning | None:
    """Return the adapters (arguments/tuner_args.py), or None if all weights are trained."""
    kind = options.text("tuner_type") or options.text("train_type") or default
    options.understood.update(key for key in OF_TUNER if options.has(key))
    if kind == "full":
        return None
    if kind != "lora":
        raise InputError(f"tuner_type {kind[:20]!r} is not priced: only lora and full are")
    targets = options.words("target_modules", (ALL_LINEAR,))
    bits = options.optional_count("quant_bits")
    if bits not in (None, 4, 8):
        raise InputError(f"quant_bits {bits} is not priced: only 4 and 8 are")
    if options.is_other("quant_method", "bnb"):
        options.remark("quant_method", "priced as bitsandbytes")
    four = "nf4-dq" if options.flag("bnb_4bit_use_double_quant", True) else "nf4"
    return FineTuning(
        rank=options.count("lora_rank", PEFT_RANK),
        alpha=options.count("lora_alpha", 32),
        targets=tuple(targets),
        dropout=options.number("lora_dropout", DROPOUT),
        dora=options.flag("use_dora"),
        quantization="none" if bits is None else "int8" if bits == 8 else four,  # type: ignore[arg-type]
        saved_modules=options.words("modules_to_save"),
    )


# -- megatron ----------------------------------------------------------------------------------------------------------


def _with_megatron(text: str, context: LaunchContext) -> Launch:
    script = script_of(text, context)

    def position(words: Sequence[str]) -> int | None:
        pairs = [(first, name) for name in ("sft", "pt") for first in ("megatron", "-m")]
        pairs = [(first, name if first == "megatron" else f"{_MODULE}{name}") for first, name in pairs]
        return next((at + 1 for at, pair in enumerate(pairwise(words)) if pair in pairs), None)

    before, words = started(script, Entry(position, lambda inner: "megatron" in inner), context)
    if words is None:
        raise InputError("no command of the script is megatron sft or megatron pt")
    arguments = Options(
        _renamed(given_arguments(words)), MEGATRON_DEFAULTS, way_out="pass --model", remarks=script.unread()
    )
    _check(arguments)
    if arguments.text("attn_impl") == "eager":
        arguments.remark("attn_impl", "priced as flash attention")
    model = model_of(arguments, "model", context)
    if (num_mtp_layers := arguments.optional_count("mtp_num_layers", 0) or 0) != model.num_mtp_layers:
        model = replace(model, num_mtp_layers=num_mtp_layers)  # not taken from the checkpoint
    arguments.arguments.pop("mtp_num_layers", None)
    if model.attention_sinks and arguments.text("attention_backend") == "fused":  # it has no other kernel for them
        arguments.arguments.pop("attention_backend")
    finetuning = _fused(_finetuning(arguments, "full"), model)
    arguments.pass_over(*COSTLESS)
    for key in [key for key in arguments.arguments if HARMLESS.fullmatch(key)]:
        arguments.pass_over(key)
    if arguments.text("recompute_granularity") == "none":
        arguments.arguments.pop("recompute_granularity", None)
        arguments.defaults.pop("recompute_granularity")
    batching = _batching(arguments)
    if arguments.has("seq_length") and (why := priced_as_even(batching, context)):
        arguments.remark("seq_length", why, matters=batching in UNEVEN)
    launch = megatron.launch_of(
        arguments,
        replace(context, model=model),
        target="ms-swift",
        framework="megatron-core",
        num_devices=devices_of(before, script, text),
    )
    return replace(launch, training=replace(launch.training, finetuning=finetuning, batching=batching))


def _fused(finetuning: FineTuning | None, model: ModelSpec) -> FineTuning | None:
    """Return adapters on the matrices of Megatron-Core, which fuses q, k and v, and the inputs of a gated MLP."""
    if finetuning is None or model.mla is not None or ALL_LINEAR not in finetuning.targets:
        return finetuning
    return replace(finetuning, targets=FUSED)


def _batching(options: Options) -> Batching:
    """Return how samples form sequences (swift/arguments/sft_args.py)."""
    if is_on(options, "packing"):
        return "packed"
    return "unpadded" if is_on(options, "padding_free") else "padded"


def _renamed(arguments: list[Argument]) -> list[Argument]:
    """Return the arguments by the names of Megatron-LM; switches have explicit values in ms-swift."""
    values: Mapping[str, bool] = {"true": True, "false": False}
    return [_with_value(argument, values.get(str(argument.value).casefold(), argument.value)) for argument in arguments]


def _with_value(argument: Argument, value: Any) -> Argument:
    """Return the argument by Megatron-LM's name, with another value."""
    name = MEGATRON_NAMES.get(argument.name, argument.name)
    return Argument(argument.option, argument.text, name, value)


# -- transformers ------------------------------------------------------------------------------------------------------


def _with_trainer(text: str, context: LaunchContext) -> Launch:
    if not has_batch(text):
        raise InputError("per_device_train_batch_size is not in the file: add it")
    options, _, devices = of_script(text, context, ("swift",))
    _check(options)
    options.defaults |= TRAINER_DEFAULTS
    devices = context.num_devices or devices
    micro = options.count("per_device_train_batch_size")
    if not options.has("gradient_accumulation_steps") and devices:
        options.defaults["gradient_accumulation_steps"] = max(1, math.ceil(MAX_SEQUENCES / micro / devices))
    if options.optional_count("sequence_parallel_size", 1, least=1) not in (None, 1):
        raise InputError("sequence_parallel_size > 1 of swift is not read: read its DeepSpeed file with --as deepspeed")
    if stage := STAGES.fullmatch(str(options.value("deepspeed"))):
        table = stage_table(int(stage[1]), offload=bool(stage[2]))
        table["zero_optimization"]["overlap_comm"] = False  # swift/config/zero*.json
        argument = options.arguments["deepspeed"]
        options.arguments["deepspeed"] = Argument(argument.option, argument.text, "deepspeed", table)
    _take_fsdp(options, context)
    options.pass_over(*COSTLESS)
    program = Program(
        target="ms-swift",
        model_key="model",
        length_key="max_length",
        batching=_batching(options),
        finetuning=_finetuning(options, "lora"),
        precision=Precision.BF16 if options.text("torch_dtype", "bfloat16") == "bfloat16" else Precision.FP16,
    )
    return launch_of(options, context, program, devices)


def _take_fsdp(options: Options, context: LaunchContext) -> None:
    """Replace `fsdp`, the name of a file, by what the file has (arguments/sft_args.py, `_init_fsdp`)."""
    file = options.text("fsdp")
    if file is None or not (file == SHARDED or file.endswith(".json")):
        return
    if file == SHARDED:
        table = FSDP2
    elif (content := read_beside(file, context.folder)) is None:
        raise InputError(f"the plan is in {show(file)}, which is not at hand: put it beside this file")
    else:
        table = {"fsdp": "full_shard auto_wrap"} | parse_json(*content)
    argument = options.arguments["fsdp"]
    for key in ("fsdp", "fsdp_config"):
        options.arguments[key] = Argument(argument.option, argument.text, key, table.get(key))


READER = Reader(target="ms-swift", recognises=recognises, read=read)
