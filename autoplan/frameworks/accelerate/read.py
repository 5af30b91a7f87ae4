"""Reader of what `accelerate launch` starts, by config file or options, with FSDP2 or DistributedDataParallel.

Neither holds the model, and a config file no batch: these are given.  Plans for DeepSpeed are in a file of its own.
Places are below accelerate/ in 1.15.0.
"""

from __future__ import annotations

import re
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Given, Launch, Reader, Unread
from autoplan.frameworks.common.options import Options, parse_yaml, show
from autoplan.frameworks.common.shell import is_open, read_script
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_ASIDE = (
    *("compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_process_ip"),
    *("main_process_port", "main_training_function", "num_machines", "rdzv_backend", "same_network", "use_cpu"),
    *(
        "tpu_env",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "gpu_ids",
        "main_process_port",
        "fp8_config",
        "tpu_name",
        "tpu_zone",
    ),
)
_FSDP_ASIDE = (
    *("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_state_dict_type", "fsdp_sync_module_states", "fsdp_use_orig_params", "fsdp_version"),
)
_LAUNCH = re.compile(r"^[^#\n]*\baccelerate\s+launch\b", re.MULTILINE)
_KINDS = {"use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
_FLAGS = {"true": True, "false": False}
_BATCH = ("PER_DEVICE_TRAIN_BATCH_SIZE", "GRADIENT_ACCUMULATION_STEPS")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a config of `accelerate launch`, or a script that has one."""
    if name.endswith((".yaml", ".yml")):
        return re.search(r"^distributed_type\s*:", text, re.MULTILINE) is not None
    return not name.endswith((".py", ".json", ".toml")) and _LAUNCH.search(text) is not None


def read(text: str, given: Given) -> Launch:
    """Return the launch that the file starts, with the model, the batch and the sequence that are given."""
    if _LAUNCH.search(text):
        table, batch = _of_script(text, given)
    else:
        table, batch = parse_yaml(text, "the file"), {}
    batch |= dict(given.variables)
    options = Options(table)
    options.known(*_ASIDE)
    model, seq_len = given.model, given.seq_len
    if model is None or seq_len is None:
        missing = "--model" if model is None else "--seq-len"
        raise InputError(f"nothing is said of model and sequence: pass {missing}")
    kind = options.value("distributed_type")
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise InputError(f"distributed_type {show(kind)} is not read: known are FSDP, MULTI_GPU and NO")
    precision = options.value("mixed_precision")
    if precision not in _PRECISIONS:
        raise InputError(f"mixed_precision {show(precision)} is not priced: known are bf16, fp16 and fp8")
    unread: list[Unread] = []
    num_devices = _devices(options, given, kind)
    sizes = _sizes(options.inside("parallelism_config"), num_devices, kind)
    axes = _sharding(options.inside("fsdp_config"), sizes, unread) if kind == "FSDP" else _unsharded(sizes)
    micro, steps = (_batch_count(batch, name) for name in _BATCH)
    plan: dict[str, Any] = {
        **axes,
        "tp": sizes["tp"],
        "cp": sizes["cp"],
        "etp": sizes["tp"] if model.moe else 1,
        "precision": _PRECISIONS[precision],
        "micro_batch": micro,
        "global_batch": micro * steps * sizes["dp_replicate"] * sizes["dp_shard"],
    }
    dynamo = options.inside("dynamo_config")
    backend = dynamo.value("dynamo_backend")
    if backend not in (None, "NO", "no"):
        unread.append(Unread(option="dynamo_config.dynamo_backend", value=show(backend), why="priced as not compiled"))
    return Launch(
        target="accelerate",
        framework="pytorch-fsdp",
        model=model,
        training=TrainingSpec(seq_len=seq_len, precision=plan["precision"]),
        plan=ParallelPlan(**plan),
        options=tuple(options.read),
        unread=(*unread, *options.left("not known")),
    )


def _of_script(text: str, given: Given) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (the table that a config file would hold, the batch that the program is given) of the command."""
    commands = read_script(text, given.variables).commands
    words = next((item.words for item in commands if _LAUNCH.search(" ".join(item.words))), None)
    if words is None or "launch" not in words:
        raise InputError("no command is accelerate launch")
    options = _options(words[words.index("launch") + 1 :])
    if "config_file" in options:
        raise InputError(f"the command reads {show(options['config_file'])}: read that file, with --set for the batch")
    batch = {name: options.pop(name.lower()) for name in _BATCH if name.lower() in options}
    kind = next((kind for name, kind in _KINDS.items() if options.pop(name, None) is not None), None)
    if kind is None:
        raise InputError(
            "the command names neither --use_fsdp nor --multi_gpu: what it starts is in its default config"
        )
    table: dict[str, Any] = {"distributed_type": kind, "fsdp_config": {}, "parallelism_config": {}}
    for name, value in options.items():
        if is_open(value):
            raise InputError(f"--{name} {show(value)} is known to a running shell only: give it with --set NAME=VALUE")
        section = next((item for item in ("fsdp", "parallelism") if name.startswith(f"{item}_")), None)
        place = table[f"{section}_config"] if section else table
        is_count = re.fullmatch(r"\d{1,12}", value, re.ASCII)
        place[name] = int(value) if is_count else _FLAGS.get(value.lower(), value)
    return table, batch


def _options(words: tuple[str, ...]) -> dict[str, str]:
    """Every option with its value, those of the program among them; a switch has an empty one."""
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
        raise InputError(f"nothing is said of the batch: pass --set {name}=N")
    if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
        raise InputError(f"{name} must be a whole number of at least 1, got {show(text)}")
    return int(text)


def _devices(options: Options, given: Given, kind: str) -> int:
    """Processes of all machines together."""
    count = options.value("num_processes")
    if given.num_devices is not None:
        return given.num_devices
    if kind == "NO":
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError("num_processes is left to the command line: pass --devices")
    return count


def _sizes(table: Options, num_devices: int, kind: str) -> dict[str, int]:
    """Ranks of every axis; without any, all ranks shard, or are copies."""
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = {name: table.count(f"parallelism_config_{name}_size", 1) for name in names}
    table.known("parallelism_config_cp_backend", "parallelism_config_cp_comm_strategy", "parallelism_config_sp_backend")
    if sizes.pop("sp") > 1:
        raise InputError("parallelism_config_sp_size > 1 runs with DeepSpeed: read its file")
    product = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"] * sizes["cp"]
    if product == 1:
        sizes["dp_shard"] = product = num_devices
    if product != num_devices:
        raise InputError(f"parallelism_config needs {product} devices, there are {num_devices}")
    if kind != "FSDP" and sizes["tp"] * sizes["cp"] > 1:
        raise InputError("parallelism_config with tp or cp needs distributed_type FSDP")
    return sizes


def _unsharded(sizes: dict[str, int]) -> dict[str, Any]:
    return {"dp_replicate": 1, "dp_shard": sizes["dp_replicate"] * sizes["dp_shard"], "sharding": "none"}


def _sharding(table: Options, sizes: dict[str, int], unread: list[Unread]) -> dict[str, Any]:
    version = table.count("fsdp_version", 1)
    table.known(*_FSDP_ASIDE)
    policy = table.value("fsdp_reshard_after_forward" if version == 2 else "fsdp_sharding_strategy")
    meanings: dict[Any, str] = {True: "zero3", None: "zero3", False: "zero2"} if version == 2 else {}
    meanings |= {
        "FULL_SHARD": "zero3",
        "SHARD_GRAD_OP": "zero2",
        "HYBRID_SHARD": "zero3",
        "NO_SHARD": "none",
        None: "zero3",
    }
    words = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD"}
    policy = words.get(policy, policy) if version == 1 and not isinstance(policy, bool) else policy
    if isinstance(policy, list | dict) or policy not in meanings:
        raise InputError(f"fsdp_config: sharding {show(policy)} is not known")
    if policy == "HYBRID_SHARD":
        raise InputError("fsdp_sharding_strategy HYBRID_SHARD: say the copies with parallelism_config of FSDP2")
    if version == 1:
        unread.append(Unread(option="fsdp_config.fsdp_version", value="1", why="read as FSDP2"))
        table.known(
            "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_reshard_after_forward", "fsdp_min_num_params"
        )
    if table.flag("fsdp_offload_params"):
        why = "parameters and states on the host are not priced"
        unread.append(Unread(option="fsdp_config.fsdp_offload_params", value="true", why=why))
    sharding = meanings[policy]
    full = table.flag("fsdp_activation_checkpointing")
    shards = sharding != "none" and sizes["dp_shard"] * sizes["cp"] > 1
    axes: dict[str, Any] = {"dp_replicate": sizes["dp_replicate"], "dp_shard": sizes["dp_shard"], "sharding": sharding}
    return (axes if shards else _unsharded(sizes)) | {"recompute": "full" if full else "none"}


READER = Reader(target="accelerate", recognises=recognises, read=read)
