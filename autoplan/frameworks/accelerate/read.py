"""Reader of what `accelerate launch` starts, by config file or options, with FSDP2 or DistributedDataParallel.

Neither holds the model, and a config file no batch: these are given.  Plans for DeepSpeed are in a file of its own.
Places are below accelerate/ in 1.15.0.
"""

from __future__ import annotations

import math
import re
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.accelerate.options import (
    COSTLESS,
    FSDP,
    FSDP1,
    FSDP_COSTLESS,
    MESH,
    PARALLELISM_COSTLESS,
    PRECISION,
    RECOMPUTE,
    RESHARD,
)
from autoplan.frameworks.common.launch import Given, Launch, Reader
from autoplan.frameworks.common.option_table import Fields, read_fields, remark_assumed
from autoplan.frameworks.common.options import Options, parse_yaml, show, typed
from autoplan.frameworks.common.shell import is_open, read_script
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

_LAUNCH = re.compile(r"^[^#\n]*\baccelerate\s+launch\b", re.MULTILINE)
_KINDS = {"use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
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
    options = Options.of_table(table)
    options.known(*COSTLESS)
    model, seq_len = given.model, given.seq_len
    if model is None or seq_len is None:
        missing = "--model" if model is None else "--seq-len"
        raise InputError(f"nothing is said of model and sequence: pass {missing}")
    kind = options.word("distributed_type", {word: word for word in ("FSDP", "MULTI_GPU", "NO")})
    precision = PRECISION.of(options)
    num_devices = _devices(options, given, kind)
    mesh = _mesh(options.inside("parallelism_config"), num_devices, kind)
    states = _states(options.inside("fsdp_config"), mesh) if kind == "FSDP" else _unsharded(mesh)
    micro, steps = (_batch_count(batch, name) for name in _BATCH)
    plan = ParallelPlan.derived(
        has_experts=model.moe is not None,
        **mesh | states,
        precision=precision,
        micro_batch=micro,
        global_batch=micro * steps * mesh["dp_replicate"] * mesh["dp_shard"],
    )
    dynamo = options.inside("dynamo_config")
    if dynamo.is_other("dynamo_backend", "NO", "no"):
        dynamo.remark("dynamo_backend", "priced as not compiled")
    return Launch(
        target="accelerate",
        framework="pytorch-fsdp",
        model=model,
        training=TrainingSpec(seq_len=seq_len, precision=precision),
        plan=plan,
        options=options.options(),
        unread=options.unread(),
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
        place[name] = {"true": True, "false": False}.get(value.lower(), typed(value))
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


def _mesh(table: Options, num_devices: int, kind: str) -> Fields:
    """Return the ranks of every axis; without any, all ranks shard, or are copies."""
    mesh = read_fields(MESH, table)
    table.known(*PARALLELISM_COSTLESS)
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


def _unsharded(mesh: Fields) -> Fields:
    return {"dp_replicate": 1, "dp_shard": mesh["dp_replicate"] * mesh["dp_shard"], "sharding": Sharding.NONE}


def _states(table: Options, mesh: Fields) -> Fields:
    """Return what FSDP shards and recomputes; its first version is read as the second."""
    table.known(*FSDP_COSTLESS)
    strategy = RESHARD if table.count("fsdp_version", 1) == 2 else FSDP1
    if table.value(strategy.key) in ("HYBRID_SHARD", 4):
        raise InputError(f"{strategy.key} HYBRID_SHARD: say the copies with parallelism_config of FSDP2")
    sharding = strategy.of(table)
    if strategy is FSDP1:
        table.remark("fsdp_version", "read as FSDP2", default="1")
        table.known("fsdp_backward_prefetch", "fsdp_forward_prefetch", RESHARD.key, "fsdp_min_num_params")
    remark_assumed(FSDP, table)
    shards = sharding != Sharding.NONE and mesh["dp_shard"] * mesh["cp"] > 1
    return ({"sharding": sharding} if shards else _unsharded(mesh)) | RECOMPUTE.read(table)


READER = Reader(target="accelerate", recognises=recognises, read=read)
