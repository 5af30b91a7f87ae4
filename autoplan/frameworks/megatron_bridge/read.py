"""Reader of recipes of Megatron-Bridge: Python files that assign attributes, and command lines of overrides.

A file is parsed, never imported or executed: assignments to attributes of the configuration are followed in order,
through functions in the same file; possible changes by other files are listed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.literals import RUNNING, Built, Module
from autoplan.frameworks.common.options import COSTS_NOTHING, Argument, Options, Unknown, parse_yaml, typed
from autoplan.frameworks.common.shell import Script, script_of
from autoplan.frameworks.common.shell_words import is_open
from autoplan.frameworks.megatron_lm.launch import launch_of
from autoplan.frameworks.megatron_lm.options import BRIDGE_FIELDS
from autoplan.frameworks.megatron_lm.read import named, num_devices, started
from autoplan.readers.model import find_preset
from autoplan.spec.model import ModelSpec

ENTRIES = ("run_recipe.py",)

# Settings of `_pretrain_common` in its recipes (067f987) that differ from Megatron-LM's defaults.
_COMMON = {
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "seq_length": 4096,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "grad_reduce_in_bf16": False,  # mixed_precision.py, which its recipes take
    "fp8_param_gather": True,  # mixed_precision.py
    "fp4_param_gather": True,
    "cpu_offloading": False,
    "cross_entropy_loss_fusion": True,  # models/gpt_provider.py
    "optimizer_offload_fraction": 0.0,  # megatron/core/optimizer/optimizer_config.py
}
# Settings of model providers and recipes.
_PROVIDERS = {"apply_rope_fusion": False}
_RECIPES = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "apply_rope_fusion": True}
# Settings of its benchmarks (perf_recipes/_common.py, `_benchmark_common`), and of models with latent attention.
_BENCHMARKS = {
    "cross_entropy_fusion_impl": "te",
    "grad_reduce_in_bf16": True,
    "moe_router_fusion": True,
    "apply_rope_fusion": True,
}
_LATENT = {"cross_entropy_fusion_impl": "te", "apply_rope_fusion": False}  # models/deepseek, models/kimi
_SHORT = {  # words of commands and of functions that make recipes, as those of recipes/nemotronh
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "vp": "model.virtual_pipeline_model_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
    "gb": "train.global_batch_size",
    "mb": "train.micro_batch_size",
    "sl": "dataset.seq_length",
    "ms": "train.train_iters",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "seq_length": "dataset.seq_length",
    "max_steps": "train.train_iters",
    "tensor_parallelism": "model.tensor_model_parallel_size",
    "pipeline_parallelism": "model.pipeline_model_parallel_size",
    "context_parallelism": "model.context_parallel_size",
    "expert_model_parallelism": "model.expert_model_parallel_size",
    "expert_tensor_parallelism": "model.expert_tensor_parallel_size",
    "sequence_parallelism": "model.sequence_parallel",
} | {
    name: f"model.{name}"
    for name in (
        "sequence_parallel",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
}
# Registered precisions by the parts of their names (training/mixed_precision.py).
_PRECISIONS = (
    ("mxfp8", {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    ("nvfp4", {"fp4": "e2m1"}),
    ("fp8_current", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    ("fp8_delayed", {"fp8": "hybrid", "fp8_recipe": "delayed"}),
    ("fp8_subchannel", {"fp8": "hybrid", "fp8_recipe": "blockwise"}),
)
# Those of its benchmarks, by the words that their function takes (perf_recipes/_common.py); gradients in 16 bits.
_BENCHMARKED = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
_PRECISION = re.compile(r"(bf16|fp16)(_|$)|_(bf16|fp16)_|MixedPrecisionConfig$")
_ARGUMENTS = {path: name for name, path in BRIDGE_FIELDS.items()} | {
    "model.virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "model.padded_vocab_size": "padded_vocab_size",
}
# Functions whose result is known from their names.
_MADE = ("model", "mixed_precision", "comm_overlap", "model.transformer_layer_spec")
_ACTIVATION = "model.activation_func"
_TRAINS = ("pretrain", "finetune", "distill")  # functions that take a configuration
MAX_DEPTH = 20
DELETED = "takes a default away, which is priced as kept"  # ~NAME of Hydra
_PYTHON = re.compile(r"^(\s*(import|from)\s+megatron|def \w+\(|from __future__)", re.MULTILINE)
_YAML = re.compile(r"^(recipe|model|train|dataset):[ \t]*(#.*)?$", re.MULTILINE)
# Samples in a sequence, to each of which attention is confined (data/builders, training/config.py).
_PACKING = re.compile(r"dataset\.(\w+\.)*(enable_\w*packing|packed_sequence_size|inter_document_masking)$")
# Sections whose fields affect neither time nor memory, except for the fields listed above.
_HARMLESS = (
    "checkpoint",
    "logger",
    "rng",
    "scheduler",
    "tokenizer",
    "validation",
    "dataset",
    "profiling",
    "env_vars",
    "run",
    "data",
)


def recognises(name: str, text: str) -> bool:
    """Return whether a file looks like a recipe of Megatron-Bridge, or starts one."""
    return "megatron.bridge" in text or any(entry in text for entry in ENTRIES)


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a recipe or its command line; a recipe does not contain the number of devices."""
    devices = None
    recipe = _Recipe()
    if any(entry in text for entry in ENTRIES) and not _PYTHON.search(text):
        script = script_of(text, context)
        before, words = started(script, named(ENTRIES), context)
        if words is None:
            raise InputError("no command of the script starts run_recipe.py")
        devices = num_devices(before, script, text)
        recipe.unread += script.unread()
        _overrides(words, recipe)
    elif _YAML.search(text) and not _PYTHON.search(text):
        _yaml(text, recipe)
    elif (start := _recipe_started(text, context)) is not None:
        recipe_text, before, words, script = start
        devices = num_devices(before, script, text)
        _python(recipe_text, context, recipe)
        recipe.unread += script.unread()
        _overrides(words, recipe)
    else:
        _python(text, context, recipe)
    return _launch(recipe, context, devices)


def starts_recipe(text: str, context: LaunchContext) -> bool:
    """Return whether a command of a script starts a recipe beside it."""
    try:
        return _recipe_started(text, context) is not None
    except (InputError, RecursionError):
        return False


def _recipe_started(text: str, context: LaunchContext) -> tuple[str, tuple[str, ...], tuple[str, ...], Script] | None:
    """Return (the recipe that a script starts, the words before and after its name, the script)."""
    if _PYTHON.search(text) or ".py" not in text:
        return None
    script = script_of(text, context)
    before, words = started(script, named((".py",)), context)
    found = read_beside(before[-1], context.folder) if before else None
    if found is None or words is None or not recognises(before[-1], found[0]):
        return None
    return found[0], before, words, script


@dataclass(slots=True)
class _Recipe:
    """Values by their paths in the configuration, possible names of the model, and statements not followed."""

    values: dict[str, Any] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    is_benchmark: bool = False


# -- command lines ----------------------------------------------------------------------------------------------------


def _overrides(words: tuple[str, ...], recipe: _Recipe) -> None:
    at = 0
    late: dict[str, Any] = {}  # settings by path override the short ones
    while at < len(words):
        word = words[at]
        at += 1
        name, sign, value = word.partition("=")
        if word.startswith("-"):
            option = name.lstrip("-").replace("-", "_")
            if not sign and at < len(words) and not words[at].startswith("-") and "=" not in words[at]:
                value, at = words[at], at + 1
            if option in ("recipe", "model"):
                recipe.models.append(_stem(value))
                recipe.unread.append(
                    Unread(option=word, value=value, why="what the recipe itself sets is not in the file")
                )
            elif option in _SHORT:
                recipe.values[_SHORT[option]] = _literal_word(value)
            else:
                matters = option not in ("mode", "dataset", "dry_run", "step_func", "lr", "min_lr", "warmup_iters")
                recipe.unread.append(Unread(option=word, value=value, why="not known here", matters=matters))
        elif word.startswith("~"):
            recipe.unread.append(Unread(option=word, value="", why=DELETED))
        elif sign:
            late[name.lstrip("+")] = _literal_word(value)
        else:
            recipe.unread.append(Unread(option=word, value="", why="not known here"))
    recipe.values |= late


def _yaml(text: str, recipe: _Recipe) -> None:
    """Add the settings of a file of overrides, and what it says to the function of its recipe (`_target_`)."""
    table = parse_yaml(text, "the file")
    base = table.pop("recipe", None)
    if not isinstance(base, dict):
        base = {} if base is None else {"_target_": base}
    if target := base.pop("_target_", None):
        recipe.models.append(_stem(str(target).rpartition(".")[2]))
        why = "what the recipe itself sets is not in the file"
        recipe.unread.append(Unread(option="recipe", value=str(target)[-60:], why=why))
    if isinstance(checkpoint := table.pop("hf_model_path", None), str):
        recipe.models.append(checkpoint)
    if "defaults" in table:
        why = "a file of settings under this one, which is not read"
        recipe.unread.append(Unread(option="defaults", value=str(table.pop("defaults"))[:60], why=why))
    for key, value in base.items():
        if key in _SHORT and not (isinstance(value, str) and "${" in value):
            recipe.values[_SHORT[key]] = value
        elif value is not None:
            recipe.unread.append(Unread(option=f"recipe.{key}", value=str(value)[:60], why="not known here"))
    for path, value in _leaves(table):
        is_open_word = isinstance(value, str) and "${" in value
        _add(path, Unknown(value) if is_open_word else value, recipe)


def _leaves(table: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    if place.count(".") > MAX_DEPTH:
        raise InputError(f"a table is nested more than {MAX_DEPTH} deep")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _literal_word(word: str) -> Any:
    plain = {"true": True, "false": False, "null": None, "none": None}
    if word.casefold() in plain:
        return plain[word.casefold()]
    if word[:1] in "[(\"'":
        try:
            return ast.literal_eval(word[:4000])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return word
    return Unknown(word) if is_open(word) else typed(word)


def _stem(recipe: str) -> str:
    """Return a recipe's name without task, devices and precision."""
    return re.split(r"_(?:pretrain|sft|peft|lora|dora|finetune|config)", recipe)[0]


# -- Python files -----------------------------------------------------------------------------------------------------


def _python(text: str, context: LaunchContext, recipe: _Recipe) -> None:
    """Follow the function named by `RECIPE`, or the only function that sets a configuration and is never called."""
    module = Module(text, "the recipe")
    recipe.is_benchmark = any("_benchmark_common" in _called(function) for function in module.functions.values())
    setting = [name for name, function in module.functions.items() if _sets(function)]
    calls = {name: _called(function) for name, function in module.functions.items()}
    for _ in range(MAX_DEPTH):  # of functions that only call others that set a configuration
        setting = [name for name in module.functions if name in setting or calls[name] & {*setting}]
    called = {name for caller in setting for name in calls[caller] - {caller}}
    recipe_name = dict(context.variables).get("RECIPE")
    chosen = [recipe_name] if recipe_name else [name for name in setting if name not in called]
    if recipe_name is not None and recipe_name not in module.functions:
        raise InputError(f"the file has no function {recipe_name[:60]!r}: it has {', '.join(setting)[:200]}")
    if len(chosen) > 1:
        raise InputError(f"which recipe?  pass --set RECIPE=NAME, one of {', '.join(chosen)[:300]}")
    results = [module.call(chosen[0])] if chosen else []
    roots = [*module.changed, *(item for item in results if isinstance(item, Built) and item not in module.changed)]
    inside = [built for root in roots for built in _inner(root)]
    for root in roots:
        if root not in inside:
            _add_base(root, recipe)
            _add_settings(root, "", recipe)
    recipe.models += [_stem(chosen[0])] if chosen else []
    recipe.unread += (
        Unread(option=statement.text, value="", why=statement.why)
        for statement in module.unfollowed
        if not re.match(rf"\w+\.({'|'.join(_HARMLESS)})\.|({'|'.join(_TRAINS)})\(", statement.text)
    )
    if not any(map(_is_of_the_plan, recipe.values)):
        raise InputError("no function of the file sets a configuration to values that can be read without running it")


def _is_of_the_plan(path: str) -> bool:
    """Return whether a setting may be of the model, the training or the plan, and is no argument of a function."""
    section, dot, _ = path.partition(".")
    if not dot:
        return path in _SHORT or path in _MADE
    return path == "dataset.seq_length" or section not in (*_HARMLESS, "dist")


def _sets(function: ast.FunctionDef) -> bool:
    """Return whether a function assigns attributes of attributes: `cfg.model.x`."""
    targets = (target for node in ast.walk(function) if isinstance(node, ast.Assign) for target in node.targets)
    return any(isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute) for target in targets)


def _called(function: ast.FunctionDef) -> set[str]:
    """Return the names of the functions that a function calls."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def _inner(built: Built) -> list[Built]:
    """Return the objects reachable through an object's attributes, each once."""
    inner: list[Built] = []
    waiting = [built]
    while waiting:
        new = [item for item in waiting.pop().named.values() if isinstance(item, Built) and item not in inner]
        inner += new
        waiting += new
    return inner


def _add_base(root: Built, recipe: _Recipe) -> None:
    """Record the recipe in another file that a configuration starts from."""
    name = root.name.rpartition(".")[2]
    if root.is_place and root.words:  # only running the file would show how it is built
        recipe.unread.append(Unread(option=root.words[0], value="", why=RUNNING))
    if not (root.is_place or name[:1].isupper() or name == "_pretrain_common"):  # a function of another file
        if name.endswith("_config"):
            recipe.models.append(_stem(name))
        why = "a recipe of another file, whose settings are not read"
        recipe.unread.append(Unread(option=name, value="", why=why))


def _add_settings(built: Built, path: str, recipe: _Recipe) -> None:
    """Add the attributes of an object to the recipe's settings, by their paths."""
    if path.count(".") > MAX_DEPTH:
        raise InputError("the recipe puts objects into one another without an end")
    for key, value in built.named.items():
        place = f"{path}{key}"
        if not isinstance(value, Built):
            _add(place, value, recipe)
            continue
        name = value.name.rpartition(".")[2]
        if value.is_place and (value.named or value.name.partition(".")[2] == place):
            pass  # a section, whose fields are added below
        elif value.is_place or not (name[:1].isupper() or place in _MADE):
            _add(place, Unknown(value.name if value.is_place else f"{name}(...)"), recipe)
            continue
        elif place == "model":
            recipe.models += [word for word in value.words if isinstance(word, str)]
            recipe.values[place] = name
        else:
            word = value.words[0] if value.words else name
            _add(place, word.text if isinstance(word, Unknown) and word.is_name else word, recipe)
        _add_settings(value, f"{place}.", recipe)


def _add(path: str, value: Any, recipe: _Recipe) -> None:
    if isinstance(value, Unknown) and value.is_name and ("." in value.text or path == _ACTIVATION):
        recipe.values[path] = value.text  # an enum member or a type
    elif (
        path == "mixed_precision"
        and isinstance(value, Unknown | str)
        and not _PRECISION.search(_precision(str(getattr(value, "text", value))))
    ):
        why = "only known when the file runs; priced as bf16"
        recipe.unread.append(Unread(option=path, value=str(getattr(value, "text", value))[:60], why=why))
    elif isinstance(value, Unknown | Built):
        matters = path.partition(".")[0] not in _HARMLESS or path == "dataset.seq_length"
        text = value.text[:60] if isinstance(value, Unknown) else f"{value.name}(...)"
        recipe.unread.append(Unread(option=path, value=text, why="only known when the file runs", matters=matters))
    else:
        recipe.values[path] = value


# -- settings ---------------------------------------------------------------------------------------------------------


def _launch(recipe: _Recipe, context: LaunchContext, devices: int | None) -> Launch:
    provider = recipe.values.pop("model", None)
    is_custom = provider in ("GPTModelProvider", "MLAModelProvider")
    base: ModelSpec | None = None if is_custom else find_preset(*reversed(recipe.models))
    if not is_custom and base is None and context.model is None and "model.num_layers" not in recipe.values:
        names = ", ".join(dict.fromkeys(recipe.models))[:80]
        raise InputError(f"the model of the recipe ({names or 'no name'}) is not known: pass --model")
    for path in ("model.seq_length", "model.transformer.seq_length"):  # must be equal (training/config.py:1644)
        if path in recipe.values:
            recipe.values.setdefault("dataset.seq_length", recipe.values[path])
    written = [argument for path, value in recipe.values.items() for argument in _arguments(path, value)]
    defaults = _COMMON | (_PROVIDERS if is_custom else _RECIPES)
    if base is not None and base.mla is not None:
        defaults |= _LATENT
    if recipe.is_benchmark:
        defaults |= _BENCHMARKS
    arguments = Options(written, defaults, way_out="pass --model")
    if arguments.count("expert_model_parallel_size", 1) > 1:
        arguments.defaults["expert_tensor_parallel_size"] = 1
    arguments.remarks += recipe.unread
    arguments.is_partial = any(setting.matters for setting in recipe.unread)
    arguments.understood.add("should_pad_vocab")
    arguments.understood |= {"transformer_layer_spec", "transformer_layer_spec.use_transformer_engine"}
    arguments.understood |= {"comm_overlap", "mixed_precision", "pipeline_dtype", "average_in_collective"}
    for name, item in arguments.arguments.items():
        if name not in arguments.understood and item.option.partition(".")[0] in _HARMLESS and name == item.option:
            packs = _PACKING.match(item.option) is not None and item.value not in (None, False, 0, -1)
            why = "attention over whole samples is priced: pass --document-len or --lengths" if packs else COSTS_NOTHING
            arguments.remark(name, why, matters=packs)
    return launch_of(arguments, context, target="megatron-bridge", framework="nemo", num_devices=devices, base=base)


def _arguments(path: str, value: Any) -> Iterator[Argument]:
    """Yield the settings of a configuration field, by Megatron-LM's names."""
    text = str(value)
    path = path.replace("model.transformer.", "model.")
    if path == "mixed_precision":
        name = _precision(text)
        yield Argument(path, text, "mixed_precision", text)
        is_half = name.startswith("fp16")
        yield Argument(path, text, "bf16", not is_half)
        yield Argument(path, text, "fp16", is_half)
        if is_half or text in _BENCHMARKED:
            yield Argument(path, text, "grad_reduce_in_bf16", True)
        for part, means in _PRECISIONS:
            if part in name:
                for argument, word in means.items():
                    yield Argument(path, text, argument, word)
        return
    if path == "model.seq_length":  # overridden by the dataset's
        return
    section, _, name = path.partition(".")
    if path == _ACTIVATION:
        yield Argument(path, text, "squared_relu", text.endswith("squared_relu"))
    elif path == "model.share_embeddings_and_output_weights" and value is not None:
        yield Argument(path, text, "untie_embeddings_and_output_weights", not value)
    elif name == "grad_reduce_in_fp32" and section in ("ddp", "mixed_precision"):
        yield Argument(path, text, "grad_reduce_in_bf16", not value)
    elif path in _ARGUMENTS:
        yield Argument(path, text, _ARGUMENTS[path], value)
    elif name and section in ("comm_overlap", "mixed_precision", "model", "optimizer", "train", "ddp", "dist"):
        yield Argument(path, text, name, value)
    else:
        yield Argument(path, text, path, value)


def _precision(text: str) -> str:
    """Return the registered name of a precision."""
    return _BENCHMARKED.get(text, text.replace("-", "_"))


READER = Reader(target="megatron-bridge", recognises=recognises, read=read, starts=starts_recipe)
