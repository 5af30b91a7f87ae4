"""Reader of torchtitan configurations.

They are a function in a config registry (0.3, in Python), a command line that names one and changes some values (0.3),
or a TOML file (0.2).  Defaults are those of config/configs.py in 0.3.0 and config/job_config.py in 0.2.2.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, read_table, read_text, shipped
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.literals import Built, Module
from autoplan.frameworks.common.option_table import read_fields
from autoplan.frameworks.common.options import Options, Unknown, show
from autoplan.frameworks.common.shell import script_of
from autoplan.frameworks.fsdp2.options import read_offload
from autoplan.frameworks.torchtitan.command_line import (
    OLD_FILE,
    PROGRAMS,
    SCRIPTS,
    config_options,
    num_devices_of,
    parse_words,
    training_program,
)
from autoplan.frameworks.torchtitan.families import model_of, num_mtp_layers_of
from autoplan.frameworks.torchtitan.options import (
    ASIDE,
    CONVERTERS,
    OFFLOAD,
    OLD_CONVERTERS,
    POLICIES,
    POLICY_KEYS,
    REDUCTION,
    SCALING,
    STATES,
    read_assumed,
    read_batch,
    read_degrees,
    read_pipeline,
    read_sequence,
    read_sharding,
    remark_own_settings,
)
from autoplan.frameworks.torchtitan.tables import changed, moved
from autoplan.frameworks.torchtitan.tuning import CONVERTER, finetuning_of
from autoplan.readers.model import load_model
from autoplan.spec.enums import AttentionKernel, ChunkedLoss, Fp8Scaling
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec


@dataclass(slots=True)
class Content:
    """Content of a file in any form: nested options under their names in 0.3, and values that are not options."""

    options: dict[str, Any]
    model: ModelSpec | None  # None if the file does not set it
    precision: str = "bf16"
    fp8_scaling: Fp8Scaling = Fp8Scaling.ROWWISE
    finetuning: FineTuning | None = None
    recompute: str | None = "selective"
    chunked_loss: ChunkedLoss = ChunkedLoss.NONE
    attention: AttentionKernel = AttentionKernel.FLASH
    num_devices: int | None = None
    unread: list[Unread] = field(default_factory=list)
    read_apart: tuple[tuple[str, str], ...] = ()  # further options that were read, as written
    old: bool = False  # version 0.2


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a registry module, a script or a TOML file of torchtitan."""
    if name.endswith(".toml"):
        return re.search(r"^\s*\[(parallelism|training)\]", text, re.MULTILINE) is not None and (
            "data_parallel_" in text or "local_batch_size" in text
        )
    if name.endswith(".py"):
        return "model_registry(" in text or ("torchtitan" in text and "Trainer.Config" in text)
    return any(train in text for train in (*PROGRAMS, f"--{OLD_FILE}")) or (
        "torchtitan" in text and any(item in text for item in SCRIPTS)
    )


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of the file."""
    if (table := _toml(text)) is not None:
        content = _of_toml(table)
    elif re.search(r"^(from|import|def) ", text, re.MULTILINE) and "Trainer.Config" in text:
        content = _of_module(text, dict(context.variables))
    else:
        content = _of_script(text, context)
    return _launch(content, context)


def _toml(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return None


# -- torchtitan's names of models and configs -------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _facts() -> dict[str, Any]:
    return read_table(shipped()["torchtitan"])


def _of_flavor(family: str, flavor: str) -> ModelSpec | None:
    """Return the model of a flavor; by default torchtitan builds it without multi-token prediction."""
    name = _facts()["flavors"].get(family, {}).get(flavor)
    return None if name is None else replace(load_model(name), num_mtp_layers=0)


# -- version 0.2 ------------------------------------------------------------------------------------------------------


def _of_toml(table: dict[str, Any]) -> Content:
    table = moved(table)
    model_section = Options.of_table(table).inside("model")
    family, flavor = model_section.value("name") or "llama3", model_section.value("flavor") or "debugmodel"
    if family == "flux":
        raise InputError("model flux makes images: only training on the next token is priced")
    converters = model_section.value("converters") or []
    content = Content(table, _of_flavor(str(family), str(flavor)), old=True)
    if content.model is None:
        content.unread.append(Unread(option="model.flavor", value=f"{family} {flavor}", why="a model without a preset"))
    for converter in converters if isinstance(converters, list) else []:
        kind = str(converter).rsplit(".", 1)[-1]
        precision = next((name for name, word in OLD_CONVERTERS.items() if word == kind), None)
        if precision is not None:
            content.precision = precision
            if kind == "float8":
                _read_scaling(content, table)
        else:
            content.unread.append(Unread(option="model.converters", value=show(converter), why="not known"))
    policy = Options.of_table(table).inside("activation_checkpoint")
    mode, option = policy.value("mode") or "selective", str(policy.value("selective_ac_option") or "2")
    content.recompute = mode if isinstance(mode, str) else None
    content.read_apart = (*model_section.options(), *policy.options())
    if mode == "selective" and option != "op":
        why = "whole layers are recomputed, which is read as recomputation of single operations"
        content.unread.append(Unread(option="activation_checkpoint.selective_ac_option", value=option, why=why))
    parallelism = table.get("parallelism")
    compiling = table.setdefault("compile", {})
    if isinstance(parallelism, dict) and isinstance(compiling, dict):
        compiling["enable_async_tensor_parallel"] = parallelism.pop("enable_async_tensor_parallel", False)
    return content


def _read_scaling(content: Content, table: dict[str, Any]) -> None:
    """Read the scaling granularity of 8-bit products in linear layers."""
    options = Options.of_table(table).inside("quantize").inside("linear").inside("float8")
    content.fp8_scaling = SCALING.of(options)
    for key, other, why in (
        (SCALING.key, "rowwise_with_gw_hp", "weight gradients are priced in 8 bits, as those of rowwise"),
        ("enable_fsdp_float8_all_gather", True, "weights are priced as gathered in 16 bits"),
    ):
        if (value := options.value(key)) == other:
            content.unread.append(Unread(option=f"quantize.linear.float8.{key}", value=show(value), why=why))


# -- version 0.3 ------------------------------------------------------------------------------------------------------


def _of_module(text: str, variables: dict[str, str]) -> Content:
    """Parse the function named by the variable CONFIG, or the only function that returns a Trainer.Config."""
    module = Module(text, "the file")
    chosen = variables.get("CONFIG")
    config_functions = [name for name in module.functions if _gives_trainer(module, name)]
    if chosen is None and len(config_functions) != 1:
        listed = ", ".join(config_functions[:20]) or "none"
        raise InputError(f"the file has {len(config_functions)} configs ({listed}): name one with --set CONFIG=NAME")
    name = chosen or config_functions[0]
    if name not in config_functions:
        raise InputError(f"no function {name!r} gives a Trainer.Config: known are {', '.join(config_functions[:20])}")
    trainer = module.call(name)
    content = Content({}, None)
    for key, value in trainer.named.items():
        if key == "model_spec":
            _read_model(content, value, name)
        elif key == "activation_checkpoint":
            _read_policy(content, value)
        elif key == "loss" and isinstance(value, Built):
            content.chunked_loss = ChunkedLoss.CHUNKS if "Chunked" in value.name else ChunkedLoss.NONE
        elif isinstance(value, Built) and key != "**":
            content.options[key] = {name: _plain(item) for name, item in value.named.items()}
        elif key not in ASIDE:
            content.options[key] = _plain(value)
    return content


def _gives_trainer(module: Module, name: str) -> bool:
    if name.startswith("_"):
        return False
    module.depth = 0
    value = module.call(name)
    return isinstance(value, Built) and value.name.endswith("Trainer.Config")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else Unknown(_text(value))


def _text(value: Any) -> str:
    return value.text if isinstance(value, Unknown) else value.name if isinstance(value, Built) else str(value)


def _read_policy(content: Content, value: Any) -> None:
    name = ".".join(value.name.rsplit(".", 2)[-2:]) if isinstance(value, Built) else None
    content.read_apart = (("activation_checkpoint", name or "None"),)
    kinds = {f"{policy}.Config": kind for kind, policy in (*POLICIES.items(), ("memory-budget", "MemoryBudgetAC"))}
    content.recompute = "none" if value is None else kinds.get(name or "")
    if content.recompute is None:
        raise InputError(f"activation_checkpoint {_text(value)}: known are FullAC, SelectiveAC and None")


def _read_model(content: Content, spec: Any, function: str) -> None:
    """Read the model of `model_registry(flavor, ...)` or its replacement, and its converters."""
    if not isinstance(spec, Built):
        return
    changed = spec.named.get("model")
    converters = spec.named.get("converters") or []
    converters = [*(converters if isinstance(converters, list) else []), *spec.converters]
    if isinstance(changed, Built):
        converters += changed.converters
    if isinstance(changed, Built) and not changed.is_place:
        flavor = spec.named.get("flavor")
        content.model = model_of(changed, flavor if isinstance(flavor, str) else "model")
    else:
        flavor = str(spec.words[0]) if spec.words else str(spec.named.get("flavor"))
        families = _facts()["flavors"]
        family = next((item for item in families if f".{item}." in f".{spec.name}"), None)
        family = family or next((item for item in families if item.replace("_", "") in function.replace("_", "")), "")
        content.model = _of_flavor(family, flavor)
        if content.model is not None:
            content.model = replace(content.model, num_mtp_layers=num_mtp_layers_of(spec))
    layers = changed.named.get("layers") if isinstance(changed, Built) else None
    if (layers.named if isinstance(layers, Built) else spec.named).get("attn_backend") == "varlen":
        content.attention = AttentionKernel.FLASH2
    for converter in converters:
        name = converter.name.split(".")[-2] if isinstance(converter, Built) and "." in converter.name else ""
        precision = next((word for word, prefix in CONVERTERS.items() if name.startswith(prefix)), None)
        if precision is not None:
            content.precision = precision
        elif name == CONVERTER:
            content.finetuning = finetuning_of(converter.named)
        else:
            content.unread.append(Unread(option="converters", value=name or _text(converter), why="not known"))


# -- command lines of 0.3 ---------------------------------------------------------------------------------------------


def _of_script(text: str, context: LaunchContext) -> Content:
    script = script_of(text, context)
    command = next((item for item in script.commands if training_program(item) is not None), None)
    if command is None:
        raise InputError("no command starts torchtitan.train or run_train.sh")
    words = list(command.words)
    at = training_program(command)
    assert at is not None
    before, after = words[:at], words[at + 1 :]
    variables = {name: value for name, value in script.variables.items() if isinstance(value, str)}
    if words[at].endswith(SCRIPTS):  # NGPU=8 MODULE=llama3 CONFIG=llama3_8b ./run_train.sh
        after = [*config_options(variables), *after]
    options, policy, unread = parse_words(after)
    old = str(options.pop(OLD_FILE, None) or variables.get("CONFIG_FILE", ""))
    module, config = options.pop("module", None), options.pop("config", None)
    if old:
        content = _of_toml(changed(_toml_beside(old, context), options))
    else:
        content = _base(module, config, context)
        policy = policy or options.get("activation_checkpoint.mode")  # before a policy was a subcommand
        changed(content.options, options)
    if policy is not None:
        content.recompute = policy
    content.unread += [*unread, *script.unread()]
    content.num_devices = num_devices_of(before, variables)
    return content


def _toml_beside(name: str, context: LaunchContext) -> dict[str, Any]:
    """Return the 0.2 configuration named by a script, from the file next to it."""
    path = context.folder / Path(name).name if context.folder else None
    table = _toml(read_text(path)) if path and is_file(path) else None
    if table is None:
        raise InputError(f"the script starts {show(name)} of torchtitan 0.2: read that file")
    return table


def _module_beside(module: str, context: LaunchContext) -> str | None:
    """Return the text of a --module in the script's folder; torchtitan looks for its registry first."""
    if context.folder is None or not re.fullmatch(r"\w+(\.\w+)*", module):
        return None
    place = context.folder.joinpath(*module.split("."))
    path = next(filter(is_file, (place / "config_registry.py", place.with_suffix(".py"))), None)
    return None if path is None else read_text(path)


def _base(module: Any, config: Any, context: LaunchContext) -> Content:
    facts = _facts()
    if module is None or config is None:
        raise InputError("the command names no --module and --config of torchtitan 0.3")
    if text := _module_beside(str(module), context):
        return _of_module(text, {"CONFIG": str(config)})
    module = str(module).removeprefix("torchtitan.models.")
    row = facts["configs"].get(module, {}).get(config)
    if row is None:
        if context.model is None:
            raise InputError(
                f"config {show(config)} of module {show(module)} is not known: read the Python file that has it, "
                "or pass --model and name batch and sequence on the command line"
            )
        why = "read as torchtitan's defaults and what the command line changes"
        unread = [Unread(option="--config", value=show(config), why=why)]
        return Content({"training": {"local_batch_size": None, "seq_len": None}}, None, unread=unread)
    row = facts["defaults"] | row
    content = Content({}, replace(load_model(row["model"]), num_mtp_layers=0), recompute=row["activation_checkpoint"])
    content.precision = row["precision"]
    content.options["training"] = {key: row[key] for key in ("local_batch_size", "seq_len")}
    names = ("data_parallel_shard_degree", "tensor_parallel_degree", "pipeline_parallel_schedule")
    content.options["parallelism"] = {key: row[key] for key in (*names, "expert_parallel_degree")}
    content.options["compile"] = {
        "enable": row["compile"],
        "enable_async_tensor_parallel": row["async_tensor_parallel"],
    }
    content.chunked_loss = ChunkedLoss.CHUNKS
    return content


# -- model, training and plan -----------------------------------------------------------------------------------------


def _launch(content: Content, context: LaunchContext) -> Launch:
    model = context.model or content.model
    if model is None:
        raise InputError("the model cannot be read from the file: pass --model")
    options = Options.of_table(content.options)
    options.pass_over(*ASIDE, "quantize")
    remark_own_settings(options)
    options.inside("activation_checkpoint").pass_over(*POLICY_KEYS)
    training, parallelism, compiling = (options.inside(name) for name in ("training", "parallelism", "compile"))
    options.remarks += (item for item in content.unread if not (context.model and item.option == "model.flavor"))
    compiled = _compiled(compiling)
    if not compiled:
        why = "blocks run eagerly; only their norms and, with tp, their launches are priced so"
        compiling.remark("enable", why, default="false")
    degrees = read_degrees(parallelism, context.num_devices or content.num_devices)
    batch = read_batch(training, parallelism, degrees)
    if content.recompute not in ("none", "selective", "full"):
        raise InputError(
            f"activation checkpointing {show(content.recompute)} is not priced: known are none, selective, full"
        )
    axes: dict[str, Any] = {
        **batch,
        **read_pipeline(parallelism, degrees["pp"], model.num_layers),
        **read_sharding(parallelism, degrees, model),
        "recompute": content.recompute,
        "chunked_loss": content.chunked_loss,
        "attention": content.attention,
        "precision": content.precision,
        "fp8_scaling": content.fp8_scaling,
        "tp_overlap": compiling.flag("enable_async_tensor_parallel") and degrees["tp"] > 1,
        **read_fields((STATES, REDUCTION), training),
    }
    axes["offload"] = read_offload(training, (OFFLOAD.key,), axes)
    read_assumed(options)
    seq_len = context.seq_len or read_sequence(training)
    return Launch(
        target="torchtitan",
        framework="torchtitan-0.2" if content.old else "torchtitan",
        model=model,
        training=TrainingSpec(
            seq_len=seq_len,
            precision=content.precision,  # type: ignore[arg-type]
            fused_norm=None if compiled else False,
            finetuning=content.finetuning,
        ),
        plan=ParallelPlan.derived(**axes),
        options=(*options.options(), *content.read_apart),
        unread=options.unread(),
    )


def _compiled(compiling: Options) -> bool:
    components = compiling.value("components")
    return compiling.flag("enable") and (not isinstance(components, list) or "model" in components)


READER = Reader(target="torchtitan", recognises=recognises, read=read)
