"""Reader of the FSDP2 settings written by `autoplan export --to fsdp2`; the user gives the model."""

from __future__ import annotations

from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.common.option_table import read_fields
from autoplan.frameworks.common.options import Options, parse_json, show
from autoplan.frameworks.fsdp2.options import BATCH, DTYPE, HELD, SCHEDULES, SEQUENCE_PARALLEL
from autoplan.spec.enums import Offload, ReduceType
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec


def recognises(name: str, text: str) -> bool:
    """Return whether a file contains such settings."""
    return name.endswith(".json") and '"fully_shard"' in text and '"mesh"' in text


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of the settings with the model given by the user."""
    options = Options.of_table(parse_json(text, "the file"))
    model = context.model
    if model is None:
        raise InputError("FSDP2 settings do not contain the model: pass --model")
    options.pass_over("about", "gradient_accumulation")
    mesh, sharding = options.inside("mesh"), options.inside("fully_shard")
    degrees = {name: mesh.count(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    needed = degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    num_devices = context.num_devices or options.count("world_size", needed)
    options.pass_over("world_size")
    if needed != num_devices:
        raise InputError(f"the mesh needs {needed} devices, there are {num_devices}")
    shard_over = sharding.value("shard_over")
    if shard_over not in ([], ["dp_shard", "cp"]):
        raise InputError(f"fully_shard.shard_over must be [] or ['dp_shard', 'cp'], got {show(shard_over)}")
    precision, is_wide = DTYPE.of(sharding), sharding.value("reduce_dtype") == "float32"
    reshards = sharding.flag("reshard_after_forward")
    everywhere = {"dp_replicate": 1, "dp_shard": degrees["dp_replicate"] * degrees["dp_shard"], "sharding": "none"}
    states = {"sharding": "zero3" if reshards else "zero2"} if shard_over else everywhere
    offload = Offload.PARAMETERS if sharding.flag("cpu_offload") else Offload.NONE
    plan: dict[str, Any] = {
        **degrees,
        **states,
        "offload": offload,
        **_recompute(options),
        **_pipeline(options, degrees["pp"], model.num_layers),
        "precision": precision,
        "reduce_dtype": ReduceType.FP32 if is_wide else ReduceType.USUAL,  # usual: 16 bits
        **read_fields((HELD,), sharding),
        **read_fields((SEQUENCE_PARALLEL, *BATCH), options),
    }
    return Launch(
        target="fsdp2",
        framework="pytorch-fsdp",
        model=model,
        training=TrainingSpec(seq_len=context.seq_len or options.count("seq_len"), precision=plan["precision"]),
        plan=ParallelPlan.derived(**plan),
        options=options.options(),
        unread=options.unread(),
    )


def _recompute(options: Options) -> dict[str, Any]:
    """Read how many of the first layers of every stage are recomputed; null means all."""
    if not options.has("recompute_layers"):
        options.pass_over("recompute_layers")
        return {"recompute": "full"}
    count = options.count("recompute_layers", least=0)
    return {"recompute": "full", "recompute_num_layers": count} if count else {"recompute": "none"}


def _pipeline(options: Options, pp: int, num_layers: int) -> dict[str, Any]:
    if pp == 1:
        options.pass_over("pipeline")
        return {}
    table = options.inside("pipeline")
    table.pass_over("num_microbatches")
    counts = table.value("layers_per_stage")
    if not isinstance(counts, list) or not all(isinstance(item, int) and item >= 0 for item in counts):
        raise InputError(f"pipeline.layers_per_stage must be a list of counts, got {show(counts)}")
    if len(counts) % pp or not counts or sum(counts) != num_layers:
        raise InputError(f"pipeline.layers_per_stage must hold {num_layers} layers in a multiple of pp {pp} stages")
    schedule = table.word("schedule", {word: name for name, word in SCHEDULES.items()})
    uneven = tuple(counts) if len(set(counts)) > 1 else None
    return {"vp": len(counts) // pp, "schedule": schedule, "layers_per_chunk": uneven}


READER = Reader(target="fsdp2", recognises=recognises, read=read)
