"""Reader of config files and command lines of `accelerate launch`.

Training uses FSDP2, DistributedDataParallel or DeepSpeed, whose section is read as a DeepSpeed configuration.  Model,
batch and length are arguments of the started program; they are read from there or given by the user.
Places are below accelerate/ in 1.15.0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.accelerate.export import YAML
from autoplan.frameworks.accelerate.options import (
    ASSUMED,
    COSTLESS,
    CP_KIND,
    FSDP1,
    FSDP_COSTLESS,
    MESH,
    OFFLOAD,
    PARALLELISM_COSTLESS,
    PRECISION,
    RECOMPUTE,
    RESHARD,
    WRAPPING,
)
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.header import is_exported
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.option_table import Fields, read_fields, remark_assumed
from autoplan.frameworks.common.options import Options, parse_json, parse_yaml, show, typed
from autoplan.frameworks.common.shell import script_of
from autoplan.frameworks.common.shell_words import is_open
from autoplan.frameworks.deepspeed import read as deepspeed
from autoplan.frameworks.fsdp2.options import read_offload
from autoplan.frameworks.hf_trainer.launch import Program, held_types, known_model, training_of, unsharded
from autoplan.frameworks.hf_trainer.options import ACCUMULATION, HARMLESS, HELD_KEYS, read_optimizer
from autoplan.frameworks.hf_trainer.read import name_in, program_called
from autoplan.frameworks.hf_trainer.script import has_batch, is_program, of_script, program_options, started_options
from autoplan.frameworks.llama_factory.read import program_of as llama_factory
from autoplan.frameworks.megatron_lm.read import Entry, started
from autoplan.spec.enums import Precision, Recompute, Sharding
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

_LAUNCH = re.compile(r"^[^#\n]*\baccelerate\s+launch\b", re.MULTILINE)
_KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "multi_gpu": "MULTI_GPU"}
_NO_TRAINING = re.compile(
    r"(?<![a-z])(eval\w*|infer\w*|predict\w*|generat\w*|serve|chatbot|demo)(?![a-z])"
)  # names of programs
_SCRIPT = "launch.sh"  # next to an exported config file
_BATCH = ("PER_DEVICE_TRAIN_BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS")
_CHECKPOINTING = "GRADIENT_CHECKPOINTING"
# Arguments of the Trainer, as variable names.
_PROGRAM = (*_BATCH, "BF16", "FP16", _CHECKPOINTING, *(key.upper() for key in HELD_KEYS))
_DEEPSPEED = (  # command-line options that belong to the section `deepspeed_config`
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag", "zero3_save_16bit_model"),
    *("gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file", "deepspeed_hostfile"),
)
_AUTO = "auto"


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a config file of `accelerate launch` or a script that calls it."""
    if name.endswith((".yaml", ".yml")):
        return re.search(r"^distributed_type\s*:", text, re.MULTILINE) is not None
    return not name.endswith((".py", ".json", ".toml")) and _LAUNCH.search(text) is not None


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of the file, completed with the model, batch and sequence length from the user."""
    started = None if _LAUNCH.search(text) is None else _of_script(text, context)
    options = Options.of_table(parse_yaml(text, "the file") if started is None else started.table)
    options.pass_over(*COSTLESS)
    remark_assumed(ASSUMED, options)
    kind = options.word("distributed_type", {word: word for word in ("FSDP", "MULTI_GPU", "NO", "DEEPSPEED")})
    beside_file = _options_beside(context) if started is None else None
    program = (started.settings() if started else _settings(beside_file) if beside_file else {}) | dict(
        context.variables
    )
    stated, context = context, started.completed(context) if started else context
    _ask_for_missing(options, program, context, kind)
    assert context.model is not None
    assert context.seq_len is not None
    precision = _precision(options, program)
    training = TrainingSpec(seq_len=context.seq_len, precision=precision)
    if beside_file is not None:
        training = replace(training, optimizer=read_optimizer(beside_file))
    if started is not None and started.is_of_trainer:
        stated = replace(stated, model=context.model)
        training = training_of(started.arguments, started.program, stated, context.seq_len, precision)
    context = replace(context, num_devices=_devices(options, context, kind))
    launch = (
        _with_deepspeed(options, program, training, context)
        if kind == "DEEPSPEED"
        else _with_torch(options, program, training, context, kind, is_table=started is None, is_own=is_exported(text))
    )
    if beside_file is not None:
        launch = replace(launch, options=(*launch.options, *beside_file.options()))
    return launch if started is None else started.with_own(launch)


def _with_torch(
    options: Options,
    program: dict[str, str],
    training: TrainingSpec,
    context: LaunchContext,
    kind: str,
    *,
    is_table: bool,
    is_own: bool,
) -> Launch:
    """Return the launch of FSDP or copies; a program may recompute though FSDP does not, unless an export says so."""
    assert context.model is not None
    assert context.num_devices is not None
    if kind != "FSDP":
        options.pass_over("fsdp_config")
    num_devices = context.num_devices
    mesh = _mesh(options.inside("parallelism_config"), num_devices, kind)
    states = _states(options.inside("fsdp_config"), mesh) if kind == "FSDP" else unsharded(mesh)
    if _CHECKPOINTING in program:
        if program[_CHECKPOINTING].casefold() in ("true", "", "1"):  # of the Trainer
            states = states | {"recompute": Recompute.FULL}
    elif is_table and not (options.inside("fsdp_config").has(RECOMPUTE.key) if is_own else _recomputes(states)):
        why = f"the program may turn it on: pass --set {_CHECKPOINTING}=true if it recomputes"
        options.remarks.append(Unread(option=_CHECKPOINTING.lower(), value="", why=why))
    micro, steps = (_batch_count(program, name) for name in _BATCH)
    plan = ParallelPlan.derived(
        # Every rank holds whole experts.
        **mesh | states | _types(options, program, training, states["sharding"]),
        precision=training.precision,
        micro_batch=micro,
        global_batch=micro * steps * mesh["dp_replicate"] * mesh["dp_shard"],
    )
    dynamo = options.inside("dynamo_config")
    if dynamo.is_other("dynamo_backend", "NO", "no"):
        dynamo.remark("dynamo_backend", "priced as not compiled")
    return Launch(
        target="accelerate",
        framework="pytorch-fsdp",
        model=context.model,
        training=training,
        plan=plan,
        options=options.options(),
        unread=options.unread(),
    )


def _recomputes(states: Fields) -> bool:
    return states.get("recompute") == Recompute.FULL


def _ask_for_missing(options: Options, program: dict[str, str], context: LaunchContext, kind: str) -> None:
    """Raise an error that lists all values missing from both the file and the user's input."""
    missing = [flag for flag, value in (("--model", context.model), ("--seq-len", context.seq_len)) if value is None]
    if context.num_devices is None and kind != "NO" and not options.has("num_processes"):
        missing.append("--devices")
    steps = options.inside("deepspeed_config").value("gradient_accumulation_steps", _AUTO)
    in_file = (_BATCH[1],) if isinstance(steps, int) else ()
    missing += [f"--set {name}=N" for name in _BATCH if name not in program and name not in in_file]
    if _is_open_precision(options) and not (program.keys() & {"BF16", "FP16"} or _holds_bf16(program)):
        missing.append("--set BF16=true (or FP16=true, as the program is told)")
    if missing:
        raise InputError(f"the file lacks arguments of the program: pass {', '.join(missing)}")


def _is_open_precision(options: Options) -> bool:
    """Return whether the config leaves the precision to the program; YAML parses a bare `no` as false."""
    return not options.has("mixed_precision") or options.arguments["mixed_precision"].value in ("no", False)


def _precision(options: Options, program: dict[str, str]) -> Precision:
    """Return the precision; the arguments of the Trainer take precedence over the file."""
    for name, precision in (("BF16", Precision.BF16), ("FP16", Precision.FP16)):
        if program.get(name, "false").casefold() in ("true", "", "1"):
            options.pass_over("mixed_precision")
            return precision
    if _is_open_precision(options):
        if _holds_bf16(program):
            options.pass_over("mixed_precision")
            return Precision.BF16
        raise InputError("neither the file nor the program sets bf16 or fp16: 32-bit training is not priced here")
    return PRECISION.of(options)


def _holds_bf16(program: dict[str, str]) -> bool:
    return any(program.get(key.upper()) in ("bfloat16", "torch.bfloat16") for key in HELD_KEYS)


def _types(options: Options, program: dict[str, str], training: TrainingSpec, sharding: Sharding) -> Fields:
    """Return the data type of the trained weights, and whether fp32 adapters are multiplied in fp32."""
    is_mixed = not _is_open_precision(options) or any(
        program.get(name, "false").casefold() in ("true", "", "1") for name in ("BF16", "FP16")
    )
    described = Program(
        target="accelerate",
        model_key="",
        length_key="",
        finetuning=training.finetuning if training.has_adapters else None,
        holds_bf16=_holds_bf16(program),
        autocasts=is_mixed,
    )
    return held_types(described, sharding)


def _with_deepspeed(
    options: Options, program: dict[str, str], training: TrainingSpec, context: LaunchContext
) -> Launch:
    """Return the launch of Accelerate's DeepSpeed section (accelerate/utils/dataclasses.py, DeepSpeedPlugin)."""
    section = options.inside("deepspeed_config")
    options.pass_over("fsdp_config", "parallelism_config")
    table: dict[str, Any] = {}
    if section.has("deepspeed_config_file"):
        file = str(section.value("deepspeed_config_file"))
        if (content := read_beside(file, context.folder)) is None:
            raise InputError(f"the plan is in {show(file)}, which is not at hand: put it beside this file")
        table = parse_json(content[0], "DeepSpeed configuration")
    section.pass_over("zero3_init_flag", "zero3_save_16bit_model", "gradient_clipping", "deepspeed_multinode_launcher")
    section.pass_over("deepspeed_hostfile", "deepspeed_moe_layer_cls_names", "deepspeed_inclusion_filter")
    steps = section.value("gradient_accumulation_steps", _AUTO)
    if _BATCH[1] in program and steps not in (_AUTO, _batch_count(program, _BATCH[1])):
        section.remark("gradient_accumulation_steps", f"the program gets {program[_BATCH[1]]}", matters=False)
        steps = _AUTO
    zero: dict[str, Any] = {"stage": section.value("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": section.value(f"{name}_device", "none")}
    config = {
        "train_micro_batch_size_per_gpu": _AUTO,
        "gradient_accumulation_steps": steps,
        "zero_optimization": zero,
        str(training.precision): {"enabled": True},
    } | table
    launch = deepspeed.read(
        json.dumps(config), replace(context, variables=(*program.items(), (str(training.precision).upper(), "true")))
    )
    return replace(launch, training=training, unread=(*launch.unread, *options.unread()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """Parsed accelerate command: its options as a config table, and the program with its `arguments`."""

    table: dict[str, Any]
    arguments: Options
    program: Program

    @property
    def is_of_trainer(self) -> bool:
        """Whether the program takes the arguments of the Trainer, so that all its arguments are read as such."""
        return self.arguments.has(_BATCH[0].lower()) or self.program.preference is not None

    @property
    def framework(self) -> str:
        """Return the framework for a program of transformers; blank if the program may be another one."""
        if not (self.is_of_trainer and self.arguments.has(self.program.model_key)):
            return ""
        return "deepspeed-hf" if self.table["distributed_type"] == "DEEPSPEED" else "transformers"

    def settings(self) -> dict[str, str]:
        """Return the program's arguments for batch, precision and recomputation, as variables."""
        section = self.table.get("deepspeed_config")
        if self.is_of_trainer and not (isinstance(section, dict) and ACCUMULATION.key in section):
            self.arguments.defaults.setdefault(ACCUMULATION.key, ACCUMULATION.default)
        return _settings(self.arguments)

    def completed(self, context: LaunchContext) -> LaunchContext:
        """Return `context` with model and length from the program's arguments if the user gives none."""
        length = self.arguments.optional_count(self.program.length_key, self.program.length, least=1)
        model = known_model(self.arguments, self.program.model_key, context)
        return replace(context, model=model, seq_len=context.seq_len or length)

    def with_own(self, launch: Launch) -> Launch:
        """Return the launch with the program's arguments added to its options and unread options."""
        unread = (*launch.unread, *self.arguments.unread(HARMLESS))
        return replace(
            launch,
            framework=self.framework or launch.framework,
            options=(*launch.options, *self.arguments.options()),
            unread=tuple(sorted(unread, key=lambda item: not item.matters)),
        )


def _settings(arguments: Options) -> dict[str, str]:
    values = {name: arguments.value(name.lower()) for name in _PROGRAM}
    return {name: str(value) for name, value in values.items() if value is not None}


def _options_beside(context: LaunchContext) -> Options | None:
    """Return the program arguments in the launch script next to an exported file; None if there is no script."""
    script = read_beside(_SCRIPT, context.folder)
    if script is None or YAML not in script[0] or not has_batch(script[0]):
        return None
    program = ("TRAIN_SCRIPT", "train.py")  # set by the user
    return of_script(script[0], replace(context, variables=(program, *context.variables)))[0]


def _of_script(text: str, context: LaunchContext) -> _Started:
    """Parse the accelerate command of a script."""
    script = script_of(text, context)
    before, words = started(script, Entry(_launch_at, lambda inner: _LAUNCH.search(inner) is not None), context)
    if words is None:
        raise InputError("no command is accelerate launch")
    at = next((at for at in range(len(words)) if is_program(words, at)), len(words))
    arguments, name = _of_program(words[at:], context)
    if not name:
        why = "of no program that is known here: its arguments are not read"
        arguments.remarks.append(Unread(option="accelerate launch", value="", why=why))
    if name.startswith("axolotl."):
        tables = [show(word) for word in words[at + 1 :] if word.endswith((".yml", ".yaml"))]
        raise InputError(f"starts {name} with {', '.join(tables)}, which has the plan: read that file")
    arguments.remarks += script.unread()
    if _NO_TRAINING.search(name):
        raise InputError(f"{name} trains no model")
    options, around = _options(words[:at]), _options(before)
    if (nodes := around.get("num_nodes") or around.get("nodes") or "1") != "1" and "num_machines" not in options:
        why = "of a launcher around accelerate, which says no --num_machines: pass --devices if all nodes train"
        arguments.remarks.append(Unread(option="--num_nodes", value=nodes, why=why))
    table: dict[str, Any] = {"fsdp_config": {}, "parallelism_config": {}, "deepspeed_config": {}}
    kind = next((kind for name, kind in _KINDS.items() if options.pop(name, None) is not None), None)
    if file := options.pop("config_file", None):
        table |= _config_beside(file, context.folder)
    if kind is not None:
        table["distributed_type"] = kind
    if "distributed_type" not in table:
        raise InputError(
            "the command names none of --use_fsdp, --use_deepspeed, --multi_gpu: what it starts is in its default "
            "config, ~/.cache/huggingface/accelerate/default_config.yaml: name it with --config_file, or say "
            "--multi_gpu in the command where there is none"
        )
    for option, value in options.items():
        if is_open(value) and option not in COSTLESS:
            raise InputError(
                f"--{option} {show(value)} is only known in a running shell: give it with --set NAME=VALUE"
            )
        section = next((item for item in ("fsdp", "parallelism") if option.startswith(f"{item}_")), None)
        if option in _DEEPSPEED:
            section = "deepspeed"
        place = table.setdefault(f"{section}_config", {}) if section else table
        place[option] = {"true": True, "false": False}.get(value.lower(), typed(value))
    is_llama_factory = arguments.has("finetuning_type")
    program = llama_factory(arguments) if is_llama_factory else program_called(name or "$PROGRAM", arguments)
    return _Started(table=table, arguments=arguments, program=program)


def _of_program(words: Sequence[str], context: LaunchContext) -> tuple[Options, str]:
    """Return (arguments, name) of the program that a command starts."""
    return started_options(words[0], words[1:], context) if words else (program_options((), context), "")


def _launch_at(words: Sequence[str]) -> int | None:
    pairs = enumerate(pairwise(words), start=1)
    return next((at for at, pair in pairs if pair[0].rpartition("/")[2] == "accelerate" and pair[1] == "launch"), None)


def _config_beside(file: str, folder: Path | None) -> dict[str, Any]:
    """Return the table of the config file named by a command, from the script's folder or a parent folder."""
    if config := read_beside(file, folder):
        return parse_yaml(*config)
    raise InputError(f"the command reads {show(file)}: read that file, with --set for what the program is told")


def _options(words: tuple[str, ...]) -> dict[str, str]:
    """Return all options with their values, including those of the program; a switch has an empty value."""
    options, at = {}, 0
    while at < len(words):
        name, sign, value = words[at].partition("=")
        at += 1
        if name.startswith("--"):
            if not sign and at < len(words) and not words[at].startswith("--"):
                value, at = words[at], at + 1
            options[name[2:].replace("-", "_")] = value
    return options


def _batch_count(batch: dict[str, str], name: str) -> int:
    text = batch.get(name)
    if text is None:
        raise InputError(f"the batch is missing: pass --set {name}=N")
    if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
        raise InputError(f"{name} must be a whole number of at least 1, got {show(text)}")
    return int(text)


def _devices(options: Options, context: LaunchContext, kind: str) -> int:
    count = options.value("num_processes")
    if context.num_devices is not None:
        return context.num_devices
    if kind == "NO":
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError("num_processes is left to the command line: pass --devices")
    return count


def _mesh(table: Options, num_devices: int, kind: str) -> Fields:
    """Return the degree of every axis; if none is set, all ranks shard (FSDP) or replicate."""
    mesh = read_fields(MESH, table)
    table.pass_over(*PARALLELISM_COSTLESS)
    if table.text(CP_KIND, "allgather") != "alltoall" and mesh["cp"] > 1:  # the default of utils/dataclasses.py
        table.remark(CP_KIND, "keys and values are priced as passed around a ring", default="allgather")
    if table.count("parallelism_config_sp_size", 1) > 1:
        raise InputError("parallelism_config_sp_size > 1 runs with DeepSpeed: read its file")
    product = math.prod(mesh.values())
    if product == 1:
        mesh["dp_shard"] = product = num_devices
    if product != num_devices:
        raise InputError(f"parallelism_config needs {product} devices, there are {num_devices}")
    if kind != "FSDP" and mesh["tp"] * mesh["cp"] > 1:
        raise InputError("parallelism_config with tp or cp needs distributed_type FSDP")
    return mesh


def _states(table: Options, mesh: Fields) -> Fields:
    """Return what FSDP shards and recomputes; FSDP1 is read as FSDP2."""
    table.pass_over(*FSDP_COSTLESS)
    remark_assumed(WRAPPING, table)
    strategy = RESHARD if table.count("fsdp_version", 1) == 2 else FSDP1
    if table.value(strategy.key) in ("HYBRID_SHARD", 4):
        raise InputError(f"{strategy.key} HYBRID_SHARD: say the copies with parallelism_config of FSDP2")
    sharding = strategy.of(table)
    if strategy is FSDP1:
        table.remark("fsdp_version", "read as FSDP2", default="1")
        table.pass_over("fsdp_backward_prefetch", "fsdp_forward_prefetch", RESHARD.key, "fsdp_min_num_params")
    offload = read_offload(table, (OFFLOAD.key,), {"sharding": sharding})
    shards = sharding != Sharding.NONE and mesh["dp_shard"] * mesh["cp"] > 1
    return ({"sharding": sharding, "offload": offload} if shards else unsharded(mesh)) | RECOMPUTE.read(table)


READER = Reader(target="accelerate", recognises=recognises, read=read, name_in=name_in)
