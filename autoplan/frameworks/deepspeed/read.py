"""Reader of configurations of DeepSpeed, which it starts on its own or with the Trainer of Transformers.

Keys, defaults and how the three batch sizes follow from one another are those of DeepSpeed 0.19.8, below deepspeed/.
The model, the length of a sequence and the number of devices are no part of such a file.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Given, Launch, Reader, Unread
from autoplan.frameworks.common.options import Options, parse_json
from autoplan.spec.enums import ContextParallelKind, Offload, Precision, Recompute, Sharding
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

_SHARDINGS: tuple[Sharding, ...] = (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
_AUTO = "auto"  # of values that the Trainer fills in from its own arguments

# By the argument of the Trainer, as a variable, whose value stands where the file says "auto".
_TRAINER = {
    "train_micro_batch_size_per_gpu": "PER_DEVICE_TRAIN_BATCH_SIZE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
}
# What is priced is what DeepSpeed does by itself; another value is told.
_PRICED: dict[str, float | bool] = {
    "allgather_bucket_size": 5e8,
    "allgather_partitions": True,
    "contiguous_gradients": True,
    "mics_hierarchical_params_gather": False,
    "reduce_bucket_size": 5e8,
    "reduce_scatter": True,
    "stage3_allgather_sequential": False,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_module_granularity_threshold": 0,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_use_all_reduce_for_fetch_params": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_weights": False,
}
_COSTLESS = (  # neither time nor memory of a step
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
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "sub_group_size",
)
_ADAM = ("adam", "adamw")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a JSON table with the batch of a device or the section of ZeRO."""
    keys = "zero_optimization|train_micro_batch_size_per_gpu|train_batch_size"
    return text.lstrip()[:1] == "{" and re.search(rf'"({keys})"\s*:', text) is not None


def read(text: str, given: Given) -> Launch:
    """The plan of a configuration; what the script alone decides is told, and taken from `given` where it is needed."""
    options, unread = Options(parse_json(text, "DeepSpeed configuration")), list[Unread]()
    if given.model is None or given.seq_len is None:
        raise InputError(
            "a configuration of DeepSpeed holds neither model nor sequence length: pass --model, --seq-len"
        )
    trainer = dict(given.variables)
    options.known(*_COSTLESS)
    precision = _precision(options, trainer)
    zero = options.inside("zero_optimization")
    sharding = _SHARDINGS[stage] if (stage := zero.count("stage", 0, least=0)) < 4 else None
    if sharding is None:
        raise InputError(f"zero_optimization.stage must be 0 to 3, got {stage}")
    plan = _batch(options, trainer, given.num_devices, unread)
    gathers = sharding == "zero3" and _number(zero, "stage3_prefetch_bucket_size", 5e7, unread) != 0
    overlaps = sharding == "zero3" if _is_auto(zero, "overlap_comm", unread) else zero.flag("overlap_comm", stage == 3)
    copies = _copies(zero, plan.dp_shard)
    plan = replace(
        plan,
        dp_replicate=copies,
        dp_shard=plan.dp_shard // copies,
        sharding=sharding,
        precision=precision,
        offload=_offload(zero, unread),
        recompute=Recompute.FULL if _recomputes(options, trainer, unread) else Recompute.NONE,
        grad_reduce_overlap=overlaps,
        param_gather_overlap=gathers or sharding in ("zero1", "zero2"),
    )
    _unpriced(options, zero, unread)
    return Launch(
        target="deepspeed",
        framework="deepspeed-zero",
        model=given.model,
        training=TrainingSpec(seq_len=given.seq_len, precision=precision),
        plan=plan,
        options=tuple(options.read),
        unread=(*unread, *options.left("no option of DeepSpeed that is known here")),
    )


def _precision(options: Options, trainer: dict[str, str]) -> Precision:
    words: tuple[Precision, Precision] = (Precision.BF16, Precision.FP16)
    sections = {"bf16": options.inside("bf16" if options.has("bf16") else "bfloat16"), "fp16": options.inside("fp16")}
    sections["bf16"].known("immediate_grad_update", "check_grad_overflow")
    sections["fp16"].known(
        "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale",
    )  # fmt: skip
    enabled = []
    for word in words:
        if sections[word].value("enabled") != _AUTO:
            is_on = sections[word].flag("enabled")
        elif word.upper() in trainer:
            is_on = _is_true(word.upper(), trainer[word.upper()])
        else:
            is_on = False
        enabled += [word] if is_on else []
    if len(enabled) == 1:
        return enabled[0]
    if any(section.value("enabled") == _AUTO for section in sections.values()):
        raise InputError("the precision is 'auto', which the Trainer fills in: pass --set BF16=true or --set FP16=true")
    if enabled:
        raise InputError("bf16 and fp16 are both enabled: enable one of them")
    raise InputError("neither bf16 nor fp16 is enabled: training in 32 bits is not priced")


def _batch(options: Options, trainer: dict[str, str], num_devices: int | None, unread: list[Unread]) -> ParallelPlan:
    """Batches and degrees: two of the three batch sizes give the third (runtime/config.py:599)."""
    parallel = options.inside("tensor_parallel")
    tp = max(parallel.count("autotp_size", 0, least=0), 1)
    cp = options.count("sequence_parallel_size", 1)
    experts = options.inside("expert_parallel")
    ep = experts.count("autoep_size", 1) if experts.flag("enabled") else 1
    etp = experts.count("expert_tensor_parallel_size", 1)
    whole = None if _is_auto(options, "train_batch_size", []) else _optional(options, "train_batch_size")
    micro, steps = (_filled(options, key, trainer) for key in _TRAINER)
    if num_devices is None and not (whole and micro and steps):
        raise InputError("a configuration of DeepSpeed holds no number of devices: pass --devices")
    # DeepSpeed takes all ranks for replicas that Ulysses does not use, those of AutoTP among them.
    ranks = whole // (micro * steps) if num_devices is None else num_devices // cp  # type: ignore[operator]
    if not ranks or (num_devices or 0) % (tp * cp) or ranks % tp:
        what = f"tp {tp} x cp {cp} do not divide" if num_devices else "batch sizes give less than one device for"
        raise InputError(f"{what} {num_devices or whole}: pass another --devices or correct the file")
    if whole is not None and micro is None:
        micro = whole // (ranks * (steps or 1))
    if micro is None:
        raise InputError("neither train_batch_size nor train_micro_batch_size_per_gpu is given")
    if steps is None:
        steps = whole // (micro * ranks) if whole is not None and micro else 1
    if whole not in (None, micro * steps * ranks) or not micro * steps:
        raise InputError(
            f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{steps} x {ranks} replicas: pass the right --devices or correct the file"
        )
    dp = ranks // tp
    if whole is not None and tp > 1:
        why = f"DeepSpeed counts the ranks of AutoTP as replicas: a step has {micro * steps * dp} sequences"
        unread.append(Unread(option="train_batch_size", value=str(whole), why=why, matters=False))
    return ParallelPlan(
        global_batch=micro * steps * dp,
        micro_batch=micro,
        tp=tp,
        cp=cp,
        cp_kind=ContextParallelKind.ALL_TO_ALL if cp > 1 else ContextParallelKind.RING,
        ep=ep,
        etp=etp,
        dp_shard=dp,
        tp_overlap=parallel.flag("tp_overlap_comm") and tp > 1,
    )


def _filled(options: Options, key: str, trainer: dict[str, str]) -> int | None:
    """A batch size, for "auto" that of the Trainer."""
    if options.value(key) != _AUTO:
        return _optional(options, key)
    argument = _TRAINER[key]
    if argument not in trainer:
        raise InputError(f"{key} is 'auto', which the Trainer fills in: pass --set {argument}=N")
    if not re.fullmatch("[1-9][0-9]{0,8}", trainer[argument], re.ASCII):
        raise InputError(f"--set {argument}={trainer[argument][:40]}: must be a whole number of at least 1")
    return int(trainer[argument])


def _optional(options: Options, key: str) -> int | None:
    return options.count(key) if options.has(key) else None


def _copies(zero: Options, replicas: int) -> int:
    """Return the number of copies of the states with MiCS; DeepSpeed refuses its key since 0.19.7."""
    size = zero.value("mics_shard_size")
    if size is None or (isinstance(size, int) and size <= 0):
        return 1
    size = zero.count("mics_shard_size")
    if replicas % size:
        raise InputError(f"zero_optimization.mics_shard_size {size} does not divide the {replicas} replicas")
    return replicas // size


def _offload(zero: Options, unread: list[Unread]) -> Offload:
    section = zero.inside("offload_optimizer")
    section.known("pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write", "nvme_path")
    device = section.word("device", {"none": "none", "cpu": "cpu", "nvme": "nvme"}, "none")
    is_old = zero.flag("cpu_offload")
    if device == "nvme":
        unread.append(_told(section, "device", "priced as the memory of the host"))
    if section.has("ratio") and section.value("ratio") != 1:
        unread.append(_told(section, "ratio", "the whole optimizer is priced on the host"))
    weights = zero.inside("offload_param")
    weights.known("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path")
    if weights.value("device") not in (None, "none"):
        unread.append(_told(weights, "device", "weights are priced on the device"))
    return Offload.OPTIMIZER if is_old or device != Offload.NONE else Offload.NONE


def _recomputes(options: Options, trainer: dict[str, str], unread: list[Unread]) -> bool:
    """Return whether every layer is recomputed: the script says so, the file at most how."""
    section = options.inside("activation_checkpointing")
    section.known("contiguous_memory_optimization", "profile", "synchronize_checkpoint_boundary")
    count = section.value("number_checkpoints")
    for key, why in (
        ("cpu_checkpointing", "activations are priced on the device"),
        ("partition_activations", "priced whole on every rank"),
    ):
        if section.flag(key):
            unread.append(_told(section, key, why))
    if (name := "GRADIENT_CHECKPOINTING") in trainer:
        return _is_true(name, trainer[name])
    if count is not None or section.flag("partition_activations") or section.flag("cpu_checkpointing"):
        return True
    why = "the script says whether activations are recomputed; taken for no: --set GRADIENT_CHECKPOINTING=true"
    unread.append(Unread(option="activation_checkpointing", value="", why=why))
    return False


def _unpriced(options: Options, zero: Options, unread: list[Unread]) -> None:
    """Add to `unread` the options that change time or memory by an amount that is not priced."""
    zero.known(*_COSTLESS_ZERO)
    for key, priced in _PRICED.items():
        if not _is_auto(zero, key, unread) and zero.has(key) and zero.value(key) != priced:
            unread.append(_told(zero, key, f"{priced:g} is priced" if priced else "priced without it"))
    optimizer = options.inside("optimizer")
    optimizer.known("params", "legacy_fusion")
    kind = optimizer.value("type")
    if kind is not None and str(kind).lower() not in _ADAM:
        unread.append(_told(optimizer, "type", "Adam is priced"))
    pipeline = options.inside("pipeline")
    for key in pipeline.names():
        unread.append(_told(pipeline, key, "stages are those of the script's PipelineModule; priced with one"))
    if options.has("communication_data_type"):
        unread.append(_told(options, "communication_data_type", "gradients of 2 bytes are priced on the wire"))
    if not (autocast := options.inside("torch_autocast")).flag("enabled"):
        autocast.known("dtype", "lower_precision_safe_modules")
    if options.value("wall_clock_breakdown") not in (None, False):
        unread.append(_told(options, "wall_clock_breakdown", "waits for the device in every phase; not priced"))


def _number(section: Options, key: str, priced: float, unread: list[Unread]) -> float:
    """A size, told where it is not the priced one."""
    if _is_auto(section, key, unread) or not section.has(key):
        return priced
    found = section.count(key, least=0)
    if found not in (0, priced):
        unread.append(_told(section, key, f"{priced:g} is priced"))
    return found


def _is_auto(section: Options, key: str, unread: list[Unread]) -> bool:
    """Return whether the Trainer fills the value in; if so it is told."""
    if section.value(key) != _AUTO:
        return False
    unread.append(_told(section, key, "the Trainer fills it in; priced as DeepSpeed's own value"))
    return True


def _is_true(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InputError(f"--set {name}={text[:40]}: must be true or false")
    return text.lower() == "true"


def _told(section: Options, key: str, why: str) -> Unread:
    section.known(key)
    return Unread(option=section.name(key), value=section.shown(key), why=why)


READER = Reader(target="deepspeed", recognises=recognises, read=read)
