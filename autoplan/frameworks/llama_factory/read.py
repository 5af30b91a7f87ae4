"""Reader of LLaMA-Factory (ff6d4d1): YAML, JSON, or arguments of `llamafactory-cli train`.

Places are below src/llamafactory/: hparams/{model,data,finetuning}_args.py in addition to the Trainer's arguments.
"""

from __future__ import annotations

import re

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.common.options import Options, parse_json, parse_yaml
from autoplan.frameworks.hf_trainer.launch import Program, launch_of
from autoplan.frameworks.hf_trainer.options import is_on, plain_values
from autoplan.frameworks.hf_trainer.script import NO_SCRIPTS, has_batch, of_script
from autoplan.frameworks.llama_factory.options import COSTLESS, FREEZES, LENGTH, NO_RECOMPUTE, PURE
from autoplan.readers.finetuning import OF_LLAMA_FACTORY, of_llama_factory
from autoplan.readers.preference import OF_PREFERENCES, of_stage
from autoplan.spec.enums import ChunkedLoss, Precision
from autoplan.spec.lengths import Batching

COMMANDS = ("llamafactory-cli", "train.py", "train_bash.py")
DEFAULT_LENGTH = 2048
_YAML = re.compile(r"^(finetuning_type|cutoff_len)\s*:", re.MULTILINE)
_JSON = re.compile(r'"(finetuning_type|cutoff_len)"\s*:')
_SCRIPT = re.compile(r"\bllamafactory-cli\s+train\b|--finetuning_type\b")
_STARTS_FILE = re.compile(r"^[^#\n]*\bllamafactory-cli\s+train\s+\S+\.(ya?ml|json)\b", re.MULTILINE)
_MEGATRON = re.compile(r"(tensor|pipeline|expert)_model_parallel_size$")
# LLaMA-Factory's own optimizers, which replace the Trainer's (train/trainer_utils.py).
_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a configuration of LLaMA-Factory, or a script that starts it with arguments."""
    if name.endswith((".yaml", ".yml")):
        return (
            _YAML.search(text) is not None
            and re.search(r"^\s*per_device_train_batch_size\s*:", text, re.MULTILINE) is not None
        )
    if name.endswith(".json"):
        return _JSON.search(text) is not None and '"per_device_train_batch_size"' in text
    if name.endswith(NO_SCRIPTS) or re.search(r"\baccelerate\s+launch\b", text):
        return False
    return _SCRIPT.search(text) is not None and (has_batch(text) or _STARTS_FILE.search(text) is not None)


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a configuration, which never contains the number of devices."""
    devices = None
    if has_batch(text) or not (_YAML.search(text) or text.lstrip().startswith("{")):
        options, _, devices = of_script(text, context, COMMANDS)
    else:
        parse = parse_json if text.lstrip().startswith("{") else parse_yaml
        options = Options.of_table(parse(text, "the file"))
    return launch_of(options, context, program_of(options), devices)


def program_of(options: Options) -> Program:
    """Return the program from LLaMA-Factory's own arguments; raises InputError if its step is not priced."""
    if any(_MEGATRON.search(key) for key in options.arguments):
        raise InputError(
            "trains with Megatron-Core (USE_MCA or USE_MEGATRON_BRIDGE), whose arguments are not read from this file"
        )
    raw = plain_values(options)
    finetuning = of_llama_factory(raw, "the file")
    options.understood.update(key for key in OF_LLAMA_FACTORY if key in options.arguments)
    preference = of_stage(raw, "the file")
    options.understood.update(key for key in OF_PREFERENCES if key in options.arguments)
    options.pass_over(*COSTLESS)
    options.understood.add("gradient_checkpointing")
    options.arguments.pop("gradient_checkpointing", None)
    options.defaults["gradient_checkpointing"] = not is_on(options, NO_RECOMPUTE.key)
    for key in _OPTIMIZERS:
        if is_on(options, key):
            options.remark(key, "priced as the Trainer's optimizer")
    for key in (
        "use_unsloth",
        "use_unsloth_gc",
        "mixture_of_depths",
        "use_kt",
        "shift_attn",
        "use_llama_pro",
    ):
        if options.is_other(key, False, "", "false"):
            options.remark(key, "priced without it")
    if liger := is_on(options, "enable_liger_kernel"):
        options.remark("enable_liger_kernel", "its loss is priced; norms and activations as those of transformers")
    if is_on(options, "freeze_language_model"):
        raise InputError("freeze_language_model is not priced: the text model is trained, or has adapters")
    frozen = [is_on(options, key) or not options.has(key) for key in FREEZES]
    if finetuning.has_adapters and not all(frozen):
        options.remark(FREEZES[0], "adapters in the text model alone are priced")
    elif len(set(frozen)) > 1:
        options.remark(FREEZES[1], "tower and projector are priced as the tower says")
    is_pure = is_on(options, PURE)
    if is_on(options, "fp8"):
        options.pass_over("fp8_backend", "fp8_enable_fsdp_float8_all_gather")
        options.remark("fp8", "priced as bf16")
    is_packed = is_on(options, "packing") if options.has("packing") else raw.get("stage") == "pt"
    batching: Batching = "joined" if is_packed else "padded"
    if is_on(options, "neat_packing"):  # turns packing on (hparams/data_args.py)
        batching = "packed"
    return Program(
        target="llama-factory",
        model_key="model_name_or_path",
        length_key=LENGTH,
        length=DEFAULT_LENGTH,
        batching=batching if preference is None else "padded",
        preference=preference,
        finetuning=finetuning if finetuning.has_adapters else None,
        precision=Precision.BF16 if is_pure else None,
        holds_bf16=is_pure,
        chunked_loss=ChunkedLoss.LIGER if liger and preference is None else ChunkedLoss.NONE,
        autocasts=not is_pure or is_on(options, "bf16"),
        optimizer="muon" if is_on(options, "use_muon") else None,
        freezes_encoder=frozen[0],
    )


READER = Reader(target="llama-factory", recognises=recognises, read=read)
