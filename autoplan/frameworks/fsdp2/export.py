"""Export of a plan to files for a training program in plain PyTorch.

The files are the settings as JSON and a short module that applies them to any model.  The program itself must define
which modules tensor parallelism splits and where a stage begins.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from autoplan.frameworks.common.header import header
from autoplan.frameworks.common.job import File, Job, LaunchVariable, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import check_legal, check_limits
from autoplan.frameworks.common.shared_rules import FSDP2_OVERLAPS, only, stages_last
from autoplan.frameworks.fsdp2.options import BATCH, DTYPE, HELD, SCHEDULES, SEQUENCE_PARALLEL
from autoplan.frameworks.fsdp2.rules import RULES
from autoplan.spec.enums import Offload, Precision, Recompute, ReduceType
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.spec.plan_file import PlanFile

SETTINGS, MODULE = "fsdp2.json", "fsdp2_plan.py"


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job that starts a training program that applies the settings."""
    _check(plan_file)
    heading = [line.removeprefix("# ") for line in header(plan_file, "PyTorch FSDP2")]
    settings = {"about": heading, **_settings(plan_file)}
    program = resources.files("autoplan.frameworks.fsdp2") / "templates" / f"{MODULE}.txt"
    return Job(
        framework="PyTorch FSDP2",
        variables=(LaunchVariable(name="TRAIN_SCRIPT", default=None, note=f"your program, which uses {MODULE}"),),
        program='"$TRAIN_SCRIPT"',
        files=(
            File(name=SETTINGS, text=json.dumps(settings, indent=2) + "\n"),
            File(name=MODULE, text="\n".join(header(plan_file, "PyTorch FSDP2")) + "\n" + program.read_text()),
        ),
    )


LIMITS = (
    only("precision", Precision.BF16, Precision.FP16, why="what torchao converts is your program's"),
    only("recompute", Recompute.NONE, Recompute.FULL, why="which operations is your program's, use full or none"),
    stages_last("its mesh numbers stages last, leave it out"),
    *FSDP2_OVERLAPS,
)


def _check(plan_file: PlanFile) -> None:
    plan, training = plan_file.best.plan, plan_file.training
    check_legal(RULES, plan_file.model, training, plan, "PyTorch does not run the plan")
    check_limits(LIMITS, plan_file.model, training, plan, "settings of PyTorch FSDP2 cannot express")


def _settings(plan_file: PlanFile) -> dict[str, Any]:
    plan = plan_file.best.plan
    is_sharded = plan.sharding != "none"
    dtype = DTYPE.value(plan_file)
    return {
        "world_size": plan.num_devices,
        "mesh": {
            "pp": plan.pp,
            "dp_replicate": plan.dp_replicate if is_sharded else plan.dp,
            "dp_shard": plan.dp_shard if is_sharded else 1,
            "cp": plan.cp,
            "tp": plan.tp,
        },
        "fully_shard": {
            "shard_over": ["dp_shard", "cp"] if is_sharded else [],
            "reshard_after_forward": plan.sharding == "zero3",
            "cpu_offload": plan.offload == Offload.PARAMETERS,
            **written((HELD,), plan_file),
            "param_dtype": dtype,
            "reduce_dtype": "float32" if plan.reduce_dtype == ReduceType.FP32 else dtype,
        },
        **written((SEQUENCE_PARALLEL,), plan_file),
        "recompute_layers": plan.recompute_num_layers if plan.recompute == "full" else 0,  # per stage; null: all
        "seq_len": plan_file.training.seq_len,
        **written(BATCH, plan_file),
        "gradient_accumulation": 1 if plan.pp > 1 else plan.num_microbatches,
        "pipeline": _pipeline(plan, plan_file.model.num_layers),
    }


def _pipeline(plan: ParallelPlan, num_layers: int) -> dict[str, Any] | None:
    if plan.pp == 1:
        return None
    return {
        "schedule": SCHEDULES[plan.schedule],
        "layers_per_stage": list(chunk_layers(plan, num_layers)),
        "num_microbatches": plan.num_microbatches,
    }


TARGET = Target(name="fsdp2", title="PyTorch FSDP2", rules=("fsdp2",), job=job, limits=LIMITS)
