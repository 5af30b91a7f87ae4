"""Reader of launches of the Trainer of transformers: scripts and programs with its arguments, YAML or JSON of TRL's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.common.options import Options, parse_json, parse_yaml
from autoplan.frameworks.hf_trainer.launch import Program, launch_of
from autoplan.frameworks.hf_trainer.options import HELD_KEYS, holds_bf16, is_on, plain_values, read_loss
from autoplan.frameworks.hf_trainer.program import makes_arguments, options_of_program
from autoplan.frameworks.hf_trainer.script import NO_SCRIPTS, OTHER_LOSSES, has_batch, of_script, starts_program
from autoplan.readers.finetuning import OF_TRL, of_trl
from autoplan.readers.preference import OF_PREFERENCES, of_trl_program
from autoplan.spec.enums import Precision
from autoplan.spec.lengths import UNEVEN, Batching
from autoplan.spec.preference import Preference, what_several_models_need

_OTHER_SETTINGS = (
    "beta",
    "num_generations",
    "max_prompt_length",
    "max_completion_length",
    "reward_model_path",
    "rlhf_type",
)
_LENGTHS = (
    *("max_length", "max_seq_length", "max_seq_len", "model_max_length", "block_size", "cutoff_len"),
    *("seq_length", "seq_len", "sequence_length"),  # in users' own programs
)
_TABLE = re.compile(r"\A\s*\{|^per_device_train_batch_size\s*:", re.MULTILINE)
_PLAIN = ("block_size", "do_train")  # in programs other than TRL's
_OTHERS = re.compile(r"^\s*(finetuning_type|cutoff_len|base_model|micro_batch_size)\s*:", re.MULTILINE)
_OTHER_STARTERS = re.compile(
    r"\baccelerate\s+launch\b|\b(llamafactory-cli|swift|megatron)\s+\w+|swift/cli|--finetuning_type\b"
)


def recognises(name: str, text: str) -> bool:
    """Return whether a script, program or table has Trainer arguments and belongs to no other target."""
    if name.endswith((".py", ".ipynb")):
        return makes_arguments(text)
    if name.endswith((".yaml", ".yml")):
        return re.search(r"^per_device_train_batch_size\s*:", text, re.MULTILINE) is not None and not _OTHERS.search(
            text
        )
    if name.endswith(".json"):
        is_other = re.search(r'"(finetuning_type|cutoff_len)"\s*:', text) is not None
        return text.lstrip()[:1] == "{" and _holds_batch(text) and not is_other
    return not name.endswith(NO_SCRIPTS) and has_batch(text) and not _OTHER_STARTERS.search(text)


def _holds_batch(text: str) -> bool:
    """Return whether the table itself has the batch size, not one in it; a faulty one has it where its text does."""
    try:
        return "per_device_train_batch_size" in parse_json(text, "the file")
    except InputError:
        return '"per_device_train_batch_size"' in text


def name_in(option: str, in_file: Mapping[str, str]) -> str:
    """Return the name of an option of the command line in a program or a table, where it has no dashes."""
    is_of_command = any(name.startswith("--") for name in in_file)
    return option if is_of_command else option.removeprefix("--")


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a script, a Python program or a table of arguments."""
    devices = None
    if makes_arguments(text):
        options, name = options_of_program(text, context)
    elif text.startswith("#!") or not _TABLE.search(text):
        options, name, devices = of_script(text, context)
    else:
        parse = parse_json if text.lstrip().startswith("{") else parse_yaml
        options, name = Options.of_table(parse(text, "the file")), ""
    return launch_of(options, context, program_called(name, options), devices)


def program_called(name: str, options: Options) -> Program:
    """Return the program with this file name (blank if unknown), described by its arguments."""
    preference = preference_of(options, name)
    is_plain = any(options.has(key) for key in _PLAIN)
    is_trl = name == "sft.py" or preference is not None or not (name or is_plain)
    program = program_of(options, is_trl=is_trl)
    if preference is not None:
        batching = program.batching if program.batching in UNEVEN else "padded"
        program = replace(program, preference=preference, batching=batching)
    return program


def preference_of(options: Options, program: str) -> Preference | None:
    """Return the preference loss of a program; raise an error for objectives other than the next token."""
    table = {key: argument.value for key, argument in options.arguments.items()}
    if preference := of_trl_program(program, table, program):
        options.understood.update(key for key in OF_PREFERENCES if key in options.arguments)
        return preference
    losses = [key for key in _OTHER_SETTINGS if options.has(key)]
    if losses or OTHER_LOSSES.search(program):
        raise InputError(
            f"{losses[0] if losses else program}: only training on the next token, on pairs (dpo) and of reward models "
            f"is priced{what_several_models_need(program)}"
        )
    return None


def program_of(options: Options, *, is_trl: bool) -> Program:
    """Return model, length and fine-tuning of a plain program, or of one of TRL's, from its arguments.

    By default TRL trains in bf16, recomputes, and truncates at 1,024 tokens (trl/trainer/sft_config.py).
    """
    # Transformers 5 has this name and still accepts the former one (training_args.py).
    if (switch := options.arguments.pop("activation_checkpointing", None)) is not None:
        options.arguments.setdefault("gradient_checkpointing", switch)
    if is_trl:
        options.defaults.setdefault("gradient_checkpointing", True)
        for key, others in (("gradient_checkpointing", ()), ("bf16", ("fp16", *HELD_KEYS))):
            if not any(map(options.has, (key, *others))):
                options.remark(key, "the default of TRL from 0.20 on; other programs have others", default="True")
    raw = plain_values(options)
    finetuning = of_trl(raw, "the arguments")
    options.understood.update(key for key in OF_TRL if key in options.arguments)
    if is_trl:
        _remark_kernels(options)
    # Without TRL's `use_peft` it is unknown whether a program has adapters, and on which modules.
    is_stated = options.has("use_peft")
    adapter_keys = () if is_stated or finetuning.has_adapters else ("lora_r", "load_in_4bit", "load_in_8bit")
    if finetuning.has_adapters and not is_trl and options.name("use_peft").startswith("--"):
        options.remark("use_peft", "read with the defaults of TRL; a program of its own may have others")
    for key in ("use_lora", "lora_rank", *adapter_keys):
        if options.has(key):
            options.remark(key, "adapters of a program's own are not read: pass --finetune")
    in_bf16, is_mixed = holds_bf16(options), is_trl and "bf16" not in options.arguments
    is_mixed = is_mixed or is_on(options, "bf16") or is_on(options, "fp16")
    length_key = next((key for key in _LENGTHS if options.has(key)), _LENGTHS[0])
    return Program(
        target="hf-trainer",
        model_key="model" if options.has("model") and not options.has("model_name_or_path") else "model_name_or_path",
        length_key=length_key,
        length=1024 if is_trl and length_key == "max_length" else None,
        batching=_batching(options, length_key, is_trl=is_trl),
        finetuning=finetuning if finetuning.has_adapters else None,
        precision=Precision.BF16 if is_trl or in_bf16 else None,
        holds_bf16=in_bf16,
        chunked_loss=read_loss(options),
        autocasts=is_mixed or not in_bf16,
    )


def _remark_kernels(options: Options) -> None:
    """Remark on data types and kernels of TRL that are not modelled (trl/trainer/model_config.py, sft_config.py)."""
    options.pass_over("bnb_4bit_quant_storage", "bnb_4bit_compute_dtype")
    if options.text("loss_type") == "chunked_nll":
        options.remark("loss_type", "priced with whole logits")
    elif options.text("loss_type") == "nll":
        options.pass_over("loss_type")


def _batching(options: Options, length_key: str, *, is_trl: bool) -> Batching:
    """Return how samples form sequences (trl/trainer/sft_config.py; run_clm.py joins them into blocks)."""
    if is_on(options, "packing"):
        return "joined" if options.value("packing_strategy") == "wrapped" else "packed"
    if length_key == "block_size" and not is_trl:
        return "joined"
    return "unpadded" if is_on(options, "padding_free") else "padded"


READER = Reader(target="hf-trainer", recognises=recognises, read=read, starts=starts_program, name_in=name_in)
