"""Reader of DeepSpeed configurations, for scripts that use DeepSpeed directly or the Trainer of Transformers.

Keys, defaults and the relation of the three batch sizes are those of DeepSpeed 0.19.8, below deepspeed/.  Model,
sequence length and number of devices are not part of the file.
"""

from __future__ import annotations

import re
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.option_table import Fields, read_fields, read_percent, remark_assumed
from autoplan.frameworks.common.options import Options, parse_json
from autoplan.frameworks.deepspeed.options import (
    ACCUMULATION,
    ACCUMULATOR,
    CP,
    EP,
    ETP,
    MICRO_BATCH,
    OVERLAP,
    REDUCTION,
    SHARDING,
    STATES,
    TOTAL,
    TP,
    TP_OVERLAP,
    ZERO,
    ZERO_PLUS_PLUS,
)
from autoplan.spec.enums import ContextParallelKind, GradType, Offload, Precision, Recompute, Sharding
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

_AUTO = "auto"  # the Trainer fills in the value from its own arguments
# Keys set to "auto", by the Trainer argument (as a variable name) that fills them in.
_COUNTS = {MICRO_BATCH.key: "PER_DEVICE_TRAIN_BATCH_SIZE", ACCUMULATION.key: "GRADIENT_ACCUMULATION_STEPS"}
_PRECISIONS = {"bf16": Precision.BF16, "bfloat16": Precision.BF16, "fp16": Precision.FP16}

_COSTLESS = (  # affect neither time nor memory of a step
    "checkpoint",
    "comet",
    "csv_monitor",
    "dataloader_drop_last",
    "dump_state",
    "gradient_clipping",
    "gradient_predivide_factor",
    "log_level",
    "prescale_gradients",
    "scheduler",
    "seed",
    "steps_per_print",
    "tensorboard",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
_COSTLESS_ZERO = (
    "elastic_checkpoint",
    "gather_16bit_weights_on_model_save",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
COSTLESS_PRECISION = (
    *("immediate_grad_update", "check_grad_overflow", "auto_cast", "loss_scale", "initial_scale_power"),
    *("loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"),
)
_MICS, _PREFETCH = "mics_shard_size", "stage3_prefetch_bucket_size"
_ADAM = ("adam", "adamw")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a JSON table with the batch size per device or a ZeRO section."""
    keys = "zero_optimization|train_micro_batch_size_per_gpu|train_batch_size"
    if name.endswith((".yml", ".yaml", ".py", ".sh")):  # GPT-NeoX has the same keys in YAML with braces
        return False
    return text.lstrip()[:1] == "{" and re.search(rf'"({keys})"\s*:', text) is not None


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a configuration; values set only by the script are remarked on or required."""
    table = parse_json(text, "DeepSpeed configuration")
    trainer = dict(context.variables)
    _ask_for_missing(table, trainer, context)
    assert context.model is not None
    assert context.seq_len is not None
    table, remarks = _filled_in(table, trainer)
    options = Options.of_table(table, remarks=remarks)
    options.pass_over(*_COSTLESS)
    precision, zero = _precision(options), options.inside("zero_optimization")
    batch = _batch(options, context.num_devices)
    plan = ParallelPlan.derived(
        **batch | read_states(zero, batch["dp_shard"]) | _types(options),
        precision=precision,
        recompute=Recompute.FULL if _recomputes(options, trainer) else Recompute.NONE,
    )
    remark_unpriced(options, zero)
    return Launch(
        target="deepspeed",
        framework="deepspeed-zero",
        model=context.model,
        training=TrainingSpec(seq_len=context.seq_len, precision=precision),
        plan=plan,
        options=options.options(),
        unread=options.unread(),
    )


def _ask_for_missing(table: dict[str, Any], trainer: dict[str, str], context: LaunchContext) -> None:
    """Raise an error that lists all values missing from both the file and the user's input."""
    flags = {"--model": context.model, "--seq-len": context.seq_len}
    sizes = [table.get(row.key) for row in (TOTAL, MICRO_BATCH, ACCUMULATION)]
    if not all(isinstance(size, int) for size in sizes):
        flags["--devices"] = context.num_devices
    missing = [flag for flag, value in flags.items() if value is None]
    missing += [
        f"--set {argument}=N"
        for key, argument in _COUNTS.items()
        if table.get(key) == _AUTO and argument not in trainer
    ]
    sections = [(name, table[name].get("enabled")) for name in _PRECISIONS if isinstance(table.get(name), dict)]
    autos = [name.upper() for name, enabled in sections if enabled == _AUTO]
    if autos and not any(enabled is True for _, enabled in sections) and not any(name in trainer for name in autos):
        missing.append(f"--set {autos[0]}=true" + "".join(f" or --set {name}=true" for name in autos[1:]))
    if missing:
        auto = any(flag.startswith("--set") for flag in missing)
        why = "what is 'auto' there the Trainer fills in" if auto else "it is not in such a file"
        raise InputError(f"a configuration of DeepSpeed does not say all ({why}): pass {', '.join(missing)}")


def _filled_in(table: dict[str, Any], trainer: dict[str, str]) -> tuple[dict[str, Any], list[Unread]]:
    """Return the table with the given values in place of "auto", and the values left to the Trainer."""
    table = dict(table)
    sections = {name: table[name] for name in _PRECISIONS if isinstance(table.get(name), dict)}
    autos = [name for name, section in sections.items() if section.get("enabled") == _AUTO]
    for name in autos:
        argument = _PRECISIONS[name].upper()
        is_on = argument in trainer and _is_true(argument, trainer[argument])
        table[name] = sections[name] = sections[name] | {"enabled": is_on}
    if autos and not any(section.get("enabled") for section in sections.values()):
        raise InputError("the precision is 'auto', which the Trainer fills in: pass --set BF16=true or --set FP16=true")
    for key, argument in _COUNTS.items():
        if table.get(key) == _AUTO:
            table[key] = _count_of(trainer, argument, key)
    if table.get(TOTAL.key) == _AUTO:
        del table[TOTAL.key]
    zero, why = table.get("zero_optimization"), "the Trainer fills it in; priced as DeepSpeed's own value"
    if not isinstance(zero, dict):
        return table, []
    table["zero_optimization"] = {key: value for key, value in zero.items() if value != _AUTO}
    autos = [f"zero_optimization.{key}" for key, value in zero.items() if value == _AUTO]
    return table, [Unread(option=option, value=_AUTO, why=why) for option in autos]


def _precision(options: Options) -> Precision:
    enabled = []
    for name, precision in _PRECISIONS.items():
        section = options.inside(name)
        section.pass_over(*COSTLESS_PRECISION)
        if section.flag("enabled") and precision not in enabled:
            enabled.append(precision)
    if len(enabled) == 1:
        return enabled[0]
    if enabled:
        raise InputError("bf16 and fp16 are both enabled: enable one of them")
    raise InputError("neither bf16 nor fp16 is enabled: 32-bit training is not priced")


def _types(options: Options) -> Fields:
    """Return the data types of main weights and moments, and of gradients, added up and communicated."""
    section, data_types = options.inside("bf16"), options.inside("data_types")
    reduced = read_fields((REDUCTION,), options) | read_fields((ACCUMULATOR,), data_types)
    if reduced[ACCUMULATOR.field] == GradType.FP32 and not section.flag("enabled"):
        data_types.remark(ACCUMULATOR.key, "gradients of fp16 runs are priced in 16 bits")
        reduced[ACCUMULATOR.field] = GradType.BF16
    if (halves := options.inside("fp16")).flag("fp16_master_weights_and_grads"):
        halves.remark("fp16_master_weights_and_grads", "main weights and gradients on the host are priced in fp32")
    types = read_fields(STATES, section)
    masters, moments = (row.key for row in STATES)
    if section.flag(masters) != section.flag(moments):
        section.remark(masters, f"priced beside {moments} alone: taken for fp32")
        return {row.field: row.default for row in STATES} | reduced
    return types | reduced


def _batch(options: Options, num_devices: int | None) -> Fields:
    """Return batch sizes and degrees: two of the three batch sizes imply the third (runtime/config.py:599)."""
    parallel, experts = options.inside("tensor_parallel"), options.inside("expert_parallel")
    tp, cp = max(TP.of(parallel), 1), CP.of(options)
    ep, etp = EP.of(experts) if experts.flag("enabled") else 1, ETP.of(experts)
    total, micro, steps = (options.optional_count(row.key, least=1) for row in (TOTAL, MICRO_BATCH, ACCUMULATION))
    if num_devices is None and not (total and micro and steps):
        raise InputError("a configuration of DeepSpeed holds no number of devices: pass --devices")
    # DeepSpeed counts all ranks outside Ulysses groups as replicas, including those of AutoTP.
    ranks = total // (micro * steps) if num_devices is None else num_devices // cp  # type: ignore[operator]
    if not ranks or (num_devices or 0) % (tp * cp) or ranks % tp:
        mismatch = f"tp {tp} x cp {cp} do not divide" if num_devices else "batch sizes give less than one device for"
        raise InputError(f"{mismatch} {num_devices or total}: pass another --devices or --cluster, or correct the file")
    if total is not None and micro is None:
        micro = total // (ranks * (steps or 1))
    if micro is None:
        raise InputError("neither train_batch_size nor train_micro_batch_size_per_gpu is given")
    if steps is None:
        steps = total // (micro * ranks) if total is not None and micro else 1
    if total not in (None, micro * steps * ranks) or not micro * steps:
        raise InputError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps} x {ranks} replicas: pass the right --devices or correct the file"
        )
    dp = ranks // tp
    if total is not None and tp > 1:
        why = f"DeepSpeed counts the ranks of AutoTP as replicas: a step has {micro * steps * dp} sequences"
        options.remark(TOTAL.key, why, matters=False)
    return {
        "global_batch": micro * steps * dp,
        "micro_batch": micro,
        "tp": tp,
        "cp": cp,
        "cp_kind": ContextParallelKind.ALL_TO_ALL if cp > 1 else ContextParallelKind.RING,
        "ep": ep,
        "etp": etp,
        "dp_shard": dp,
        "tp_overlap": TP_OVERLAP.of(parallel) and tp > 1,
    }


def _count_of(trainer: dict[str, str], argument: str, key: str) -> int:
    """Return a batch size set by the Trainer."""
    if argument not in trainer:
        raise InputError(f"{key} is 'auto', which the Trainer fills in: pass --set {argument}=N")
    if not re.fullmatch("[1-9][0-9]{0,8}", trainer[argument], re.ASCII):
        raise InputError(f"--set {argument}={trainer[argument][:40]}: must be a whole number of at least 1")
    return int(trainer[argument])


def read_states(zero: Options, replicas: int) -> Fields:
    """Return what is sharded, over which replicas, with which overlap; 0.19.7 and later refuse the key of MiCS."""
    sharding = SHARDING.of(zero)
    is_full = sharding == Sharding.ZERO3
    size = zero.count(_MICS, replicas, least=-1)
    shard = size if size > 0 else replicas
    if replicas % shard:
        raise InputError(f"zero_optimization.{_MICS} {shard} does not divide the {replicas} replicas")
    return {
        "sharding": sharding,
        "dp_replicate": replicas // shard,
        "dp_shard": shard,
        **_offload(zero, sharding),
        **_compressed(zero, sharding),
        "grad_reduce_overlap": zero.flag(OVERLAP.key, is_full),
        "param_gather_overlap": not is_full or zero.value(_PREFETCH) != 0,
    }


def _compressed(zero: Options, sharding: Sharding) -> Fields:
    """Return the options of ZeRO++, which only stage 3 has (runtime/zero/stage3.py)."""
    fields = read_fields(ZERO_PLUS_PLUS, zero)
    if sharding == Sharding.ZERO3:
        return fields
    for row in ZERO_PLUS_PLUS:
        if fields[row.field] != row.default:
            zero.remark(row.key, "of stage 3 alone: priced without it")
    return {}


def _offload(zero: Options, sharding: Sharding) -> Fields:
    """Return what is on the host; stages below 3 have no part of the optimizer there (runtime/zero/stage3.py)."""
    section, weights = zero.inside("offload_optimizer"), zero.inside("offload_param")
    section.pass_over("buffer_count", "fast_init", "pipeline_read", "pipeline_write", "nvme_path")
    weights.pass_over("buffer_count", "buffer_size", "max_in_cpu", "nvme_path")
    for part in (section, weights):
        if not part.flag("pin_memory") and part.is_other("device", "none"):  # off by default until August 2026
            part.remark("pin_memory", "copies are priced to and from pinned memory", default="False")
    device = section.word("device", {"none": None, "cpu": "cpu", "nvme": "nvme"}, "none")
    if device == "nvme":
        section.remark("device", "priced as the memory of the host")
    percent = read_percent(section, "ratio")
    holds_weights = weights.is_other("device", "none")
    if holds_weights and sharding != Sharding.ZERO3:
        weights.remark("device", "stage 3 alone takes it", matters=False)
    if not holds_weights or sharding != Sharding.ZERO3:
        is_partial = sharding == Sharding.ZERO3 and device
        if not (zero.flag("cpu_offload") or device) or (is_partial and not percent):
            return {"offload": Offload.NONE}
        return {"offload": Offload.OPTIMIZER, "offload_percent": percent if is_partial else 100}
    if percent < 100:
        section.remark("ratio", "the whole optimizer is priced as offloaded")
    if not device:
        weights.remark("device", "priced with the optimizer on the host too")
    elif weights.value("device") == "nvme":
        weights.remark("device", "priced as the memory of the host")
    return {"offload": Offload.PARAMETERS}


def _recomputes(options: Options, trainer: dict[str, str]) -> bool:
    """Return whether every layer is recomputed, which only the script decides; the file can only say how."""
    section, argument = options.inside("activation_checkpointing"), "GRADIENT_CHECKPOINTING"
    section.pass_over("contiguous_memory_optimization", "profile", "synchronize_checkpoint_boundary")
    is_used = section.value("number_checkpoints") not in (None, 0)
    for key, why in (
        ("cpu_checkpointing", "activations are priced on the device"),
        ("partition_activations", "priced whole on every rank"),
    ):
        if section.flag(key):
            section.remark(key, why)
            is_used = True
    if argument in trainer:
        return _is_true(argument, trainer[argument])
    if not is_used:
        why = f"the script says whether activations are recomputed; assumed off: --set {argument}=true"
        options.remarks.append(Unread(option="activation_checkpointing", value="", why=why))
    return is_used


def remark_unpriced(options: Options, zero: Options) -> None:
    """Remark on options that change time or memory by an unknown amount."""
    zero.pass_over(*_COSTLESS_ZERO)
    remark_assumed(ZERO, zero)
    optimizer, pipeline = options.inside("optimizer"), options.inside("pipeline")
    optimizer.pass_over("params", "legacy_fusion")
    settings = optimizer.value("params")
    if isinstance(settings, dict) and settings.get("torch_adam") is True:
        optimizer.remark("params", "with torch_adam, where a fused update is priced")
    if str(optimizer.value("type") or _ADAM[0]).lower() not in _ADAM:
        optimizer.remark("type", "Adam is priced")
    for key in pipeline.arguments:
        pipeline.remark(key, "stages are those of the script's PipelineModule; priced with one")
    if not (autocast := options.inside("torch_autocast")).flag("enabled"):
        autocast.pass_over("dtype", "lower_precision_safe_modules")
    if options.is_other("wall_clock_breakdown", False):
        options.remark("wall_clock_breakdown", "waits for the device in every phase; not priced")


def _is_true(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InputError(f"--set {name}={text[:40]}: must be true or false")
    return text.lower() == "true"


READER = Reader(target="deepspeed", recognises=recognises, read=read)
