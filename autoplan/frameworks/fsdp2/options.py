"""Option table of the PyTorch FSDP2 settings, for writing and reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autoplan.frameworks.common.option_table import count, switch, word
from autoplan.frameworks.common.options import Options
from autoplan.spec.enums import MainWeights, Offload, Precision, Sharding

# Names for torch.distributed.pipelining.schedules.get_schedule_class; ZBH1 with one stage per rank.
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
DTYPE = word("param_dtype", "precision", None, {"bfloat16": Precision.BF16, "float16": Precision.FP16})
HELD = word("held_dtype", "main_weights", MainWeights.FP32, {"float32": MainWeights.FP32, "bfloat16": MainWeights.BF16})
SEQUENCE_PARALLEL = switch("sequence_parallel", "sp")
BATCH = (count("micro_batch", "micro_batch"), count("global_batch", "global_batch"))

# FSDP also offloads weights that stay gathered between the passes.
STAY_GATHERED = "weights that stay gathered between the passes are priced on the device"


def read_offload(section: Options, keys: Iterable[str], plan: Mapping[str, Any]) -> Offload:
    """Return what FSDP stores on the host, from the switches `keys` of a section and the known fields of the plan."""
    on = [key for key in keys if section.flag(key)]
    if not on or is_fetched(plan):
        return Offload.PARAMETERS if on else Offload.NONE
    for key in on:
        section.remark(key, STAY_GATHERED)
    return Offload.NONE


def is_fetched(plan: Mapping[str, Any]) -> bool:
    """Return whether every pass fetches the weights, as the cost model assumes for offloaded weights."""
    return plan["sharding"] == Sharding.ZERO3 and plan.get("pp", 1) == 1
