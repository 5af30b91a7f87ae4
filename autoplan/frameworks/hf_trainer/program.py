"""Arguments of the Trainer in a Python program, or a notebook, that makes them itself.

Their names are those of a command line: fields of the training arguments, and for what the program loads, quantises and
adapts the fields of TRL's ModelConfig (trl/trainer/model_config.py).
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import LaunchContext, Unread
from autoplan.frameworks.common.literals import RUNNING, Built, dotted, parsed
from autoplan.frameworks.common.options import Argument, Options, Unknown, show
from autoplan.frameworks.common.program import calls_of, source_of, stated
from autoplan.frameworks.common.program_arguments import arguments_of
from autoplan.frameworks.hf_trainer.options import HELD_KEYS
from autoplan.frameworks.hf_trainer.own_steps import own_steps
from autoplan.readers.finetuning import PEFT_ALPHA, PEFT_RANK

_OBJECTIVES = "SFT|DPO|Reward|GRPO|KTO|ORPO|CPO|PPO|RLOO|GKD|BCO|XPO|OnlineDPO"  # of TRL, in names of classes
_ARGUMENTS = re.compile(rf"(Seq2Seq)?TrainingArguments|(?P<objective>{_OBJECTIVES})Config")
_MAKES = re.compile(rf"^[^#\n]*(?<!class )\b({_ARGUMENTS.pattern})\(", re.MULTILINE)
_DEFINED = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)
_TRAINERS = re.compile(rf"(?P<objective>{_OBJECTIVES})Trainer")
_MODELS = re.compile(r"(\w*(ModelFor|For(Causal|Conditional|Masked|Seq)|LMHead)\w*|Fast(Language|Vision)?Model)")
_EVALUATES, _TRAINS = re.compile(r"\.(evaluate|predict)\("), re.compile(r"(?<![a-z])(train\w*|fit)\(")
_CONFIGURES = re.compile(r"Config(\.from_pretrained)?$|For\w+\.from_pretrained$")
# Other methods of PEFT; the exceptions are parts of a LoraConfig, or load one.
_OTHER_ADAPTERS = re.compile(r"peft\..*(?<!\.Lora)(?<!LoftQ)(?<!Eva)(?<!Corda)(?<!LoraGA)(?<!\.Peft)Config")
# Fields of PEFT's LoraConfig by their names in TRL, and those that make adapters of different layers unlike.
_LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_dora": "use_dora",
}
_UNLIKE_ADAPTERS = ("layers_to_transform", "rank_pattern", "target_parameters", "trainable_token_indices")
_ENDS = ("lm_head", "embed_tokens")  # on which adapters are not priced
_SMALL_HEADS = ("score", "scores", "classifier", "v_head")  # of a few outputs
_LOADED = (*HELD_KEYS, "attn_implementation", "load_in_4bit", "load_in_8bit")
_PACKAGES = ("transformers", "trl", "unsloth")
_PARSER = re.compile(r"HfArgumentParser|H4ArgumentParser|TrlParser")
# Arguments of transformers that decide what a program does, by their defaults (transformers/training_args.py).
_DEFAULTS = {"bf16": False, "fp16": False, "gradient_checkpointing": False, "deepspeed": None, "fsdp": ""}
# Arguments whose defaults in a program's own dataclasses, or whose values set there, are those of its training.
_SETTINGS = (
    *(*_DEFAULTS, "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "model_name_or_path"),
    *("max_length", "max_seq_length", "model_max_length", "packing", "block_size", "cutoff_len", "padding_free"),
)
# Calls of which the plan depends on whether they are made.
_CONDITIONAL = ("LoraConfig", "get_peft_model", "BitsAndBytesConfig", "gradient_checkpointing_enable")
_OF_TRAINER = ("max_seq_length", "max_length", "packing", "beta", "loss_type", "precompute_ref_log_probs")


def makes_arguments(text: str) -> bool:
    """Return whether a Python program or a notebook makes training arguments itself."""
    source = source_of(text)
    own = _own_classes(source)
    return any(match[1] not in own for match in _MAKES.finditer(source))


def _own_classes(source: str) -> set[str]:
    """Return the classes that a program defines upon no class of arguments, whatever their names."""
    return {name for name, bases in _DEFINED.findall(source) if not _ARGUMENTS.search(bases)}


@lru_cache(maxsize=32)
def trains(text: str) -> bool:
    """Return whether a Python program makes training arguments, or takes them from its command line."""
    try:
        return makes_arguments(text) or _parsed_class(source_of(text)) is not None
    except InputError:
        return False


def options_of_program(text: str, context: LaunchContext, given: Options | None = None) -> tuple[Options, str]:
    """Return (arguments, name of TRL's program with the same objective) of a Python program or a notebook.

    `given` are the arguments of its command line.  What the program alone knows is given by name in
    `context.variables`.  Raises InputError if the program makes no training arguments, or several.
    """
    source = source_of(text)
    variables, unknown = _of_command(given) if given else ({}, [])
    variables |= dict(context.variables)
    if context.num_devices is not None:
        variables.setdefault("WORLD_SIZE", str(context.num_devices))
    own_classes = _own_classes(source)
    made_class = None if makes_arguments(text) else _parsed_class(source)
    calls = list(calls_of(source, variables, unknown, _DEFAULTS if made_class else None))
    made = (
        [Built(made_class)]
        if made_class
        else [call for call in calls if _ARGUMENTS.fullmatch(_class(call)) and _class(call) not in own_classes]
    )
    made = [call for call in made if "per_device_train_batch_size" in call.named] or made
    if len(made) != 1:
        names = ", ".join(map(_class, made[:5])) or "none"
        raise InputError(f"a program makes its training arguments once, the file {len(made)} times ({names})")
    if _EVALUATES.search(source) and not _TRAINS.search(source):
        raise InputError("the program evaluates and never calls train")
    remarks: list[Unread] = []
    package, _, name = made[0].name.partition(".")
    if name and package not in _PACKAGES:
        why = "arguments of another package: priced as those of transformers"
        remarks.append(Unread(option=_class(made[0]), value=made[0].name, why=why))
    table = _loaded(calls, context, remarks)
    objective = _objective(made[0], _ARGUMENTS)
    if not objective:  # transformers' arguments, whose defaults are not those of TRL
        table["gradient_checkpointing"] = any(map(_recomputes, calls))
    if made_class:
        defaults = arguments_of(parsed(source, "the file")).defaults
        table |= {key: defaults[key] for key in _SETTINGS if key in defaults}
    own = _adapters(calls, remarks)  # what the program sets whatever its command line says
    for call in calls:
        if of_trainer := _objective(call, _TRAINERS):
            objective = objective or of_trainer
            own |= {key: call.named[key] for key in _OF_TRAINER if key in call.named}
        elif made_class and not call.name:
            own |= {key: value for key, value in call.named.items() if key in _SETTINGS}
        if call.condition and _class(call) in _CONDITIONAL:
            why = "priced as made, which depends on this condition"
            remarks.append(Unread(option=_class(call), value=call.condition, why=why))
    own |= {key: value for key, value in made[0].named.items() if value is not None}
    remarks += own_steps(parsed(source, "the file"), source, lambda module: module_beside(module, context.folder))
    if "unsloth" in source:
        remarks.append(Unread(option="unsloth", value="", why="priced with the kernels of transformers"))
    arguments = _arguments(table, variables)
    if made_class and given:
        arguments |= given.arguments
    options = Options((arguments | _arguments(own, variables)).values())
    if "use_peft" in own:
        for key in _LORA.values():
            options.value(key)  # raises an error for what is not known
    options.remarks += dict.fromkeys(remarks)
    return options, f"{objective.lower() or 'train'}.py"


def module_beside(module: str, folder: Path | None) -> str | None:
    """Return the text of a module that a program imports, if it lies in the folder of the launch file or above it."""
    content = read_beside(f"{module.replace('.', '/')}.py", folder)
    return content[0] if content else None


def _of_command(given: Options) -> tuple[dict[str, str], list[str]]:
    """Return (values as text, names without a known value) of the arguments of a command line."""
    texts: dict[str, str] = {}
    unknown: list[str] = []
    for name, argument in given.arguments.items():
        if isinstance(argument.value, Unknown):
            unknown.append(name)
        else:
            texts[name] = (
                ",".join(map(str, argument.value)) if isinstance(argument.value, list) else str(argument.value)
            )
    return texts, unknown


def _parsed_class(source: str) -> str | None:
    """Return the name of the training arguments that a program parses from its command line; None if it does not."""
    if _PARSER.search(source) is None:
        return None
    tree = parsed(source, "the file")
    bases = {node.name: node.bases for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _PARSER.fullmatch(dotted(node.func).rpartition(".")[2]):
            named = [
                item for word in node.args for item in ast.walk(word) if isinstance(item, ast.Name | ast.Attribute)
            ]
            classes = [dotted(item) for item in named]
            classes += [dotted(base) for name in classes for base in bases.get(name, ())]
            for name in classes:
                if _ARGUMENTS.fullmatch(name.rpartition(".")[2]):
                    return name
    return None


def _arguments(table: dict[str, Any], variables: dict[str, str]) -> dict[str, Argument]:
    known = {key: _known(key, item, variables) for key, item in table.items()}
    return {key: Argument(key, _text(value), key, value) for key, value in known.items()}


def _class(call: Built) -> str:
    return call.name.rpartition(".")[2]


def _objective(call: Built, classes: re.Pattern[str]) -> str:
    """Return the objective in the name of a call's class; blank if there is none."""
    match = classes.fullmatch(_class(call))
    return (match["objective"] or "") if match else ""


def _recomputes(call: Built) -> bool:
    """Return whether a call turns recomputation on beside the arguments.

    peft/utils/other.py does by default, and a model whose configuration says so (transformers/modeling_utils.py,
    `_backward_compatibility_gradient_checkpointing`).
    """
    if _class(call) == "prepare_model_for_kbit_training":
        return call.named.get("use_gradient_checkpointing", True) is not False
    if _CONFIGURES.search(call.name):
        return call.named.get("gradient_checkpointing") is True
    return _class(call) == "gradient_checkpointing_enable"


def _loaded(calls: list[Built], context: LaunchContext, remarks: list[Unread]) -> dict[str, Any]:
    """Return name, data type, attention and quantisation of the model that the program loads."""
    table: dict[str, Any] = {}
    names: list[Any] = []
    for call in calls:
        owner, _, method = call.name.rpartition(".")
        if method == "from_pretrained" and _MODELS.fullmatch(owner.rpartition(".")[2]):
            keys = ("pretrained_model_name_or_path", "model_name")
            names += [*call.words[:1], *(call.named[key] for key in keys if key in call.named)]
            table |= {key: call.named[key] for key in _LOADED if key in call.named}
            if (quantised := call.named.get("quantization_config")) is not None:
                table |= _quantised(quantised)
            if "**" in call.named:
                remarks.append(Unread(option=method, value=_text(call.named["**"]), why=RUNNING))
            if call.named.get("device_map") == "auto" and context.num_devices != 1:
                why = "a process that spreads layers over several devices is not priced"
                remarks.append(Unread(option="device_map", value="auto", why=why))
        elif _TRAINERS.fullmatch(_class(call)) and isinstance(call.named.get("model"), str):
            names.append(call.named["model"])
    if len(set(map(str, names))) == 1:
        table["model_name_or_path"] = names[0]
    elif names:
        table["model_name_or_path"] = Unknown(" or ".join(sorted({_text(name)[:40] for name in names})))
    return table


def _quantised(config: Any) -> dict[str, Any]:
    """Return TRL's arguments for transformers' BitsAndBytesConfig."""
    if not isinstance(config, Built):
        return {"load_in_4bit": config}
    if _class(config) != "BitsAndBytesConfig":
        raise InputError(f"weights quantised with {_class(config)[:40]} are not priced: only with BitsAndBytesConfig")
    quantised = {key: config.named.get(key, False) for key in ("load_in_4bit", "load_in_8bit")}
    kind = config.named.get("bnb_4bit_quant_type", "fp4")
    is_double = config.named.get("bnb_4bit_use_double_quant", False)
    return {**quantised, "bnb_4bit_quant_type": kind, "use_bnb_nested_quant": is_double}


def _adapters(calls: list[Built], remarks: list[Unread]) -> dict[str, Any]:
    """Return TRL's arguments for the adapters of PEFT's LoraConfig, or of a `get_peft_model` with its fields."""
    if other := next((call for call in calls if _OTHER_ADAPTERS.fullmatch(call.name)), None):
        raise InputError(f"adapters of {_class(other)} are not priced: only of LoraConfig")
    found = [call for call in calls if _class(call) == "LoraConfig"]
    found += [call for call in calls if _class(call) == "get_peft_model" and "r" in call.named]
    if len(found) > 1:
        raise InputError(f"the file has {len(found)} LoraConfig: leave the one that trains")
    if not found:
        return {}
    named = {key: value for key, value in found[0].named.items() if value is not None}
    for key in _UNLIKE_ADAPTERS:
        if key in named:
            remarks.append(Unread(option=key, value=show(named[key]), why="adapters are priced alike in all layers"))
    if isinstance(targets := named.get("target_modules"), list) and (ends := [end for end in _ENDS if end in targets]):
        named["target_modules"] = [target for target in targets if target not in _ENDS]
        remarks.append(Unread(option="target_modules", value=", ".join(ends), why="adapters on it are not priced"))
    if isinstance(saved := named.get("modules_to_save"), list):
        named["modules_to_save"] = [name for name in saved if name not in _SMALL_HEADS]
    usual = {"lora_r": PEFT_RANK, "lora_alpha": PEFT_ALPHA, "lora_dropout": 0.0}
    return {"use_peft": True} | usual | {trl: named[key] for key, trl in _LORA.items() if key in named}


def _known(key: str, value: Any, variables: dict[str, str]) -> Any:
    """Return the value of an argument: plain, or as the user states it by its name."""
    if isinstance(value, list):
        return [_known(key, item, variables) for item in value]
    if isinstance(value, dict):
        return {name: _known(key, item, variables) for name, item in value.items()}
    if isinstance(value, Unknown) and value.is_name:
        return value.text.removeprefix("torch.")  # a data type
    if not isinstance(value, Unknown | Built):
        return value
    return stated(variables[key]) if key in variables else Unknown(_text(value), remedy=f"pass --set {key}=VALUE")


def _text(value: Any) -> str:
    if isinstance(value, Built):
        return value.name if value.is_place else f"{value.name}()"
    return value.text if isinstance(value, Unknown) else value if isinstance(value, str) else show(value)
