"""Launches from arguments of the Trainer, for all programs that take them.

`fsdp`, `deepspeed` or neither determines which states are sharded; with DeepSpeed the named file is read, and its
"auto" values are filled in from the arguments (transformers/integrations/deepspeed.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.accelerate.options import STRATEGIES
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import Launch, LaunchContext, Unread, priced_as_even
from autoplan.frameworks.common.option_table import Fields, remark_assumed
from autoplan.frameworks.common.options import Options, parse_json, show
from autoplan.frameworks.deepspeed import read as deepspeed
from autoplan.frameworks.fsdp2.options import STAY_GATHERED, is_fetched, read_offload
from autoplan.frameworks.hf_trainer.options import (
    ACCUMULATION,
    ASSUMED,
    FSDP_ASSUMED,
    FSDP_COSTLESS,
    HARMLESS,
    MICRO_BATCH,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTE,
    SPMD,
    is_on,
    read_attention,
    read_optimizer,
)
from autoplan.readers.model import find_preset
from autoplan.spec.enums import AttentionKernel, ChunkedLoss, MainWeights, Offload, Precision, Recompute, Sharding
from autoplan.spec.finetuning import ENCODER, FineTuning
from autoplan.spec.lengths import UNEVEN, Batching
from autoplan.spec.model import ModelSpec
from autoplan.spec.optimizers import OptimizerName
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.preference import Preference
from autoplan.spec.training import TrainingSpec

AUTO = "auto"
_SHARDED = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD"}
_HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
# In names of models whose checkpoints are quantised.
_NARROW = re.compile(r"(?<![a-z])(awq|gptq|aqlm|bnb|hqq|int[48]|[48]bit|fp8|(nv|mx)fp4)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of the mesh; a `dp_shard` of None means all devices that the other axes leave."""

    dp_replicate: int = 1
    dp_shard: int | None = None
    tp: int = 1
    cp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program that takes the Trainer's arguments: its additional, renamed and default settings.

    `length_key` is its option for the tokens of a sequence, `length` the default; `finetuning` is None if all weights
    are trained, or if it is unknown.
    """

    target: str
    model_key: str
    length_key: str
    length: int | None = None
    batching: Batching = "padded"
    finetuning: FineTuning | None = None
    preference: Preference | None = None
    precision: Precision | None = None  # the default
    optimizer: OptimizerName | None = None  # instead of the Trainer's
    mesh: Mesh = Mesh()
    # A model loaded in 16 bits trains in 16 bits unless its trained weights are cast to fp32: PEFT casts adapters, and
    # FSDP under torch.autocast casts everything that it shards (accelerate/utils/fsdp_utils.py:805).
    holds_bf16: bool = False
    keeps_adapters: bool = False  # adapters have the data type of the model (autocast_adapter_dtype = False)
    autocasts: bool = True
    config_turns_fsdp_on: bool = False  # `fsdp_config` is enough; the Trainer ignores it without `fsdp`
    chunked_loss: ChunkedLoss = ChunkedLoss.NONE
    attention: AttentionKernel | None = None  # None: by the Trainer's arguments
    takes_last_precision: bool = False  # if both bf16 and fp16 are on, which the Trainer refuses
    freezes_encoder: bool = False  # what stands before a text model, where all else is trained


def model_of(options: Options, key: str, context: LaunchContext) -> ModelSpec:
    """Return the model given by the user, or the shipped model with the name in the file."""
    if model := known_model(options, key, context):
        return model
    name = options.text(key)
    if name is None:
        raise InputError(f"{key} is not in the file: pass --model")
    raise InputError(f"{key} {name[:80]!r} is not built in: pass --model, such as this name")


def known_model(options: Options, key: str, context: LaunchContext) -> ModelSpec | None:
    """Return the model given by the user, or the shipped model with the name in the file; None if there is neither."""
    is_narrow = options.has(key) and _NARROW.search(options.arguments[key].text) is not None
    why = "its weights are quantised, which is not priced" * is_narrow
    if context.model is not None:
        if options.has(key):
            options.remark(key, f"{why}; --model wins".removeprefix("; "), matters=is_narrow)
        return context.model
    name = options.text(key)
    if name is not None and why:
        options.remark(key, why)
    return find_preset(name) if name is not None else None


def length_of(options: Options, program: Program, context: LaunchContext) -> int:
    """Return the tokens of a sequence: the length given by the user, or the maximum in the file."""
    file_length = options.optional_count(program.length_key, program.length, least=1)
    length = context.seq_len or file_length
    if length is None:
        raise InputError(f"{program.length_key} is not in the file: pass --seq-len")
    return length


def training_of(
    options: Options, program: Program, context: LaunchContext, seq_len: int, precision: Precision
) -> TrainingSpec:
    """Return the training of the program on sequences of this length in this precision."""
    if why := priced_as_even(program.batching, context):
        options.remark(program.length_key, why, default=str(program.length), matters=program.batching in UNEVEN)
    remark_assumed(ASSUMED, options)
    if context.model and context.model.moe and program.finetuning and program.finetuning.targets_experts:
        # PEFT adapts modules; experts of gpt-oss, and of all models from transformers 5 on, are plain parameters.
        why = "adapters on the experts are priced too; experts that are no linear modules get none"
        options.remarks.append(Unread(option="adapters", value="+".join(program.finetuning.targets), why=why))
    finetuning = program.finetuning
    if finetuning is None and program.freezes_encoder and context.model and context.model.stands_before_text:
        finetuning = FineTuning(frozen=(ENCODER,))
    return TrainingSpec(
        seq_len=seq_len,
        batching=program.batching,
        preference=program.preference,
        precision=precision,
        optimizer=program.optimizer or read_optimizer(options),
        finetuning=finetuning,
    )


def precision_of(options: Options, program: Program, context: LaunchContext) -> Precision:
    """Return the precision set by the arguments or by `--set BF16=true`, or the program's default."""
    variables = dict(context.variables)
    precisions = [kind for name, kind in PRECISIONS.items() if is_on(options, name)]
    for name, kind in PRECISIONS.items():
        if variables.get(name.upper(), "false").casefold() in ("true", "", "1"):
            precisions = [kind]
    if len(precisions) > 1 and not program.takes_last_precision:
        raise InputError("bf16 and fp16 are both on: leave one of them out")
    if precisions:
        return precisions[-1]
    if program.precision is not None and ("bf16" not in options.arguments or not program.autocasts):
        return program.precision
    raise InputError("neither bf16 nor fp16 is on: 32-bit training is not priced here: pass --set BF16=true")


def launch_of(options: Options, context: LaunchContext, program: Program, num_devices: int | None) -> Launch:
    """Return the launch of Trainer arguments; raises InputError if they are incomplete, or nothing is trained."""
    if options.has("do_train") and not options.flag("do_train"):
        raise InputError("do_train is off: the program trains nothing")
    model = model_of(options, program.model_key, context)
    length = length_of(options, program, context)
    precision = precision_of(options, program, context)
    num_devices = context.num_devices or num_devices
    if num_devices is None:
        raise InputError("the number of devices is not in the file: pass --devices")
    training = training_of(options, program, replace(context, model=model), length, precision)
    context = replace(context, model=model, seq_len=length, num_devices=num_devices)
    if options.value("deepspeed") not in (None, False, ""):
        return _with_deepspeed(options, context, program, training)
    mesh = _sizes(program.mesh, num_devices)
    states = _states(options, mesh, context, turns_on=program.config_turns_fsdp_on)
    micro, steps = MICRO_BATCH.of(options), ACCUMULATION.of(options)
    plan = ParallelPlan.derived(
        **mesh | states | held_types(program, states["sharding"]),  # every rank holds whole experts
        precision=precision,
        chunked_loss=program.chunked_loss,
        attention=program.attention or read_attention(options),
        micro_batch=micro,
        global_batch=micro * steps * mesh["dp_replicate"] * mesh["dp_shard"],
    )
    return Launch(
        target=program.target,
        framework="transformers",
        model=model,
        training=training,
        plan=plan,
        options=options.options(),
        unread=options.unread(HARMLESS),
    )


def held_types(program: Program, sharding: Sharding) -> Fields:
    """Return the data type of the trained weights, and whether fp32 adapters are multiplied in fp32."""
    if program.finetuning is not None:
        keeps = program.keeps_adapters and program.holds_bf16
        return {"main_weights": MainWeights.BF16} if keeps else {"wide_adapters": not program.autocasts}
    keeps = program.holds_bf16 and (sharding == Sharding.NONE or not program.autocasts)
    return {"main_weights": MainWeights.BF16 if keeps else MainWeights.FP32}


def _sizes(mesh: Mesh, num_devices: int) -> Fields:
    """Return the degree of every axis on this many devices."""
    # axolotl fills in replicas if shards are given, and shards otherwise (utils/distributed.py:319).
    replicas = max(num_devices // (mesh.tp * mesh.cp), 1)
    shard = mesh.dp_shard if (mesh.dp_shard or 1) > 1 else None
    copies = max(replicas // shard, 1) if shard and mesh.dp_replicate == 1 else mesh.dp_replicate
    shard = shard or max(replicas // copies, 1)
    needed = mesh.tp * mesh.cp * copies * shard
    if needed != num_devices:
        raise InputError(
            f"tp {mesh.tp} x cp {mesh.cp} x {copies} copies of {shard} need {needed} devices, there are "
            f"{num_devices}: pass another --devices or --cluster"
        )
    return {"dp_replicate": copies, "dp_shard": shard, "tp": mesh.tp, "cp": mesh.cp}


# -- FSDP or DDP -------------------------------------------------------------------------------------------------------


def _words(options: Options, key: str) -> tuple[str, ...]:
    """Return the words of `fsdp`: text, a list, or a switch that is on without words."""
    value = options.value(key)
    if value in (None, False, "", "false", "False"):
        return ()
    if value is True or str(value).casefold() == "true":
        return ("auto_wrap",)
    return tuple(str(word) for item in (value if isinstance(value, list) else [value]) for word in str(item).split())


def fsdp_section(options: Options, context: LaunchContext) -> Options:
    """Return `fsdp_config`, from the file or a file next to it, with keys without the prefix "fsdp_"."""
    value = options.value("fsdp_config")
    if isinstance(value, str):
        text = value if value.lstrip().startswith("{") else None
        if text is None:
            if (content := read_beside(value, context.folder)) is None:
                raise InputError(f"fsdp_config is in {show(value)}, which is not at hand: put it beside this file")
            text = content[0]
        value = parse_json(text, "fsdp_config")
    if not isinstance(value, dict | None):
        raise InputError(f"fsdp_config must be a table or a file of JSON, got {show(value)}")
    section = Options.of_table({}, "fsdp_config.", options.remarks)
    for key, item in (value or {}).items():
        name = str(key).removeprefix("fsdp_")
        section.arguments[name] = Options.of_table({str(key): item}, "fsdp_config.").arguments[str(key)]
    options.nest("fsdp_config", section)
    return section


def _states(options: Options, mesh: Fields, context: LaunchContext, *, turns_on: bool) -> Fields:
    """Return what is sharded and recomputed; with `turns_on`, `fsdp_config` is enough to turn FSDP on."""
    words, section = _words(options, "fsdp"), fsdp_section(options, context)
    uses_fsdp = bool(words) or (turns_on and bool(section.arguments) and not options.has("fsdp"))
    if unknown := [word for word in words if word.casefold() not in (*_SHARDED, *_HYBRID, "auto_wrap", "offload")]:
        raise InputError(f"fsdp {show(unknown[0])} is not one of {', '.join(_SHARDED)}, auto_wrap, offload")
    if options.value("fsdp") in (False, "") or not uses_fsdp:
        return _copies(options, mesh, context)
    section.pass_over(*FSDP_COSTLESS)
    remark_assumed(FSDP_ASSUMED, section)
    if section.flag("xla_fsdp_v2"):
        section.remark("xla_fsdp_v2", SPMD)
    version = section.optional_count("version", options.optional_count("fsdp_version", None)) or 2
    word = next((str(item).casefold() for item in words if item.casefold() in (*_SHARDED, *_HYBRID)), None)
    reshards = section.value("reshard_after_forward")
    strategy = section.value("sharding_strategy")
    if version == 1 and isinstance(reshards, str) and reshards.casefold() in (*_SHARDED, *_HYBRID):
        strategy, reshards = reshards, None
    if version == 1:
        section.remark("version", "FSDP's first version is read as the second", default="1")
    if strategy is not None and (version == 1 or reshards is None):
        numbers = dict(enumerate((*STRATEGIES, "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), start=1))
        word = str(numbers.get(strategy, strategy)).casefold()
    if word in _HYBRID:
        raise InputError(f"fsdp {word}: say the copies with a mesh of FSDP2 (dp_replicate), which is read")
    if word is not None and word not in _SHARDED:
        raise InputError(f"fsdp strategy {show(word)} is not one of {', '.join(_SHARDED)}")
    sharding = STRATEGIES[_SHARDED[word or "full_shard"]]
    if version == 2 and reshards is not None:
        sharding = Sharding.ZERO3 if section.flag("reshard_after_forward") else Sharding.ZERO2
    states: Fields = {"sharding": sharding}
    offload = read_offload(section, OFFLOADS, states)
    if "offload" in words and is_fetched(states):
        offload = Offload.PARAMETERS
    elif "offload" in words:
        options.remark("fsdp", STAY_GATHERED)
    recompute = RECOMPUTE.of(options)  # or by FSDP itself
    by_fsdp = [section.flag(key) for key in ("activation_checkpointing", "xla_fsdp_grad_ckpt")]
    if any(by_fsdp):
        recompute = Recompute.FULL
    if mesh["dp_shard"] * mesh["cp"] == 1 or sharding == Sharding.NONE:
        return {**unsharded(mesh), "recompute": recompute}
    return {**states, "offload": offload, "recompute": recompute}


def unsharded(mesh: Fields) -> Fields:
    """Return the states of replicas that are all copies."""
    return {"dp_replicate": 1, "dp_shard": mesh["dp_replicate"] * mesh["dp_shard"], "sharding": Sharding.NONE}


def _copies(options: Options, mesh: Fields, context: LaunchContext) -> Fields:
    if mesh["dp_shard"] * mesh["dp_replicate"] > 1:
        why = (
            "neither fsdp nor deepspeed is on: read as whole copies (DDP); a config of accelerate launch may shard them"
        )
        options.remarks.append(Unread(option="fsdp", value="", why=why))
    return {**unsharded(mesh), "recompute": RECOMPUTE.of(options)}


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def stage_table(stage: int, *, offload: bool) -> dict[str, Any]:
    """Return a DeepSpeed configuration of this stage whose batch sizes and precision the Trainer fills in."""
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}, "zero_optimization": zero}


def _table(options: Options, context: LaunchContext) -> dict[str, Any]:
    value = options.value("deepspeed")
    if isinstance(value, dict):
        return dict(value)
    text = str(value)
    if not text.lstrip().startswith("{"):
        if (content := read_beside(text, context.folder)) is None:
            raise InputError(
                f"the plan is in {show(text)}, which is not at hand: put it beside this file, or read it with --as "
                "deepspeed"
            )
        text = content[0]
    return parse_json(text, "DeepSpeed configuration")


def _with_deepspeed(options: Options, context: LaunchContext, program: Program, training: TrainingSpec) -> Launch:
    if program.chunked_loss != ChunkedLoss.NONE:
        why = "priced with whole logits beside DeepSpeed"
        options.remarks.append(Unread(option="loss", value=str(program.chunked_loss), why=why))
    if program.mesh != Mesh():
        raise InputError("deepspeed beside a mesh of tp, cp or dp_replicate: leave one of them out")
    table = _table(options, context)
    micro, steps = MICRO_BATCH.of(options), ACCUMULATION.of(options)
    for row, ours in ((MICRO_BATCH, micro), (ACCUMULATION, steps)):
        key = "train_micro_batch_size_per_gpu" if row is MICRO_BATCH else row.key
        if table.setdefault(key, AUTO) not in (AUTO, ours):
            raise InputError(f"{row.key} is {ours}, {key} of the DeepSpeed file {show(table[key])}: make them equal")
    kind = str(training.precision)
    sections = [section for name in ("bf16", "bfloat16", "fp16") if isinstance(section := table.get(name), dict)]
    if not any(section.get("enabled") is True for section in sections):  # accelerate adds the section (dataclasses.py)
        table.setdefault(kind if "bfloat16" not in table else "bfloat16", {"enabled": True})
    recompute = RECOMPUTE.of(options) == Recompute.FULL
    variables = {
        "PER_DEVICE_TRAIN_BATCH_SIZE": str(micro),
        "GRADIENT_ACCUMULATION_STEPS": str(steps),
        kind.upper(): "true",
        "GRADIENT_CHECKPOINTING": str(recompute).lower(),
    }
    launch = deepspeed.read(json.dumps(table), replace(context, variables=tuple(variables.items())))
    return replace(
        launch,
        target=program.target,
        framework="deepspeed-hf",
        plan=replace(launch.plan, attention=program.attention or read_attention(options)),
        training=replace(training, precision=launch.training.precision),
        options=(*options.options(), *launch.options),
        unread=tuple(sorted((*launch.unread, *options.unread(HARMLESS)), key=lambda item: not item.matters)),
    )
