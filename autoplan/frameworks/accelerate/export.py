"""Export of a plan to the files with which a program that uses Hugging Face Accelerate runs it under FSDP2.

Places are below accelerate/ in 1.15.0.  The launch files set what `accelerate launch --config_file accelerate.yaml`
would set, so that any launcher can start the program.
"""

from __future__ import annotations

from typing import Any

from autoplan.base.errors import InputError, refused
from autoplan.frameworks.accelerate.options import FSDP, PARALLELISM, PRECISION
from autoplan.frameworks.common.header import header
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job, LaunchVariable, OptionGroup, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.fsdp2.rules import RULES
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile

YAML = "accelerate.yaml"


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job that starts a training program that uses Accelerate."""
    import yaml

    plan = plan_file.best.plan
    _check(plan_file)
    table = _table(plan_file)
    notes = [
        *header(plan_file, "Accelerate"),
        f"# The program's part: sequences of {plan_file.training.seq_len}, {plan.micro_batch} a device at a time,",
        f"# gradients added up over {plan.num_microbatches} of them before a step.",
    ]
    return Job(
        framework="Accelerate",
        environment=tuple(
            EnvironmentVariable(name=name, value=value, says=f"as accelerate launch sets it from {YAML}")
            for name, value in _environment(table, plan).items()
        ),
        variables=(LaunchVariable(name="TRAIN_SCRIPT", default=None, says="your program, which uses Accelerate"),),
        program='"$TRAIN_SCRIPT"',
        replaceable=OptionGroup(
            name="BATCH",
            says="For a program with TrainingArguments of transformers; BATCH_ARGS in the environment replaces it.",
            lines=(
                ["--per_device_train_batch_size", str(plan.micro_batch)],
                ["--gradient_accumulation_steps", str(plan.num_microbatches)],
            ),
        ),
        files=(File(name=YAML, text="\n".join(notes) + "\n" + yaml.safe_dump(table, sort_keys=False)),),
    )


def is_sharded(plan: ParallelPlan) -> bool:
    """Return whether FSDP has ranks to shard over; otherwise DistributedDataParallel runs."""
    return plan.sharding != "none" and plan.dp_shard * plan.cp > 1


def _check(plan_file: PlanFile) -> None:
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    check_legal(RULES, model, training, plan, "Accelerate does not accept the plan")
    inside = plan.tp * plan.cp
    refusals = (
        (plan.pp > 1, f"pp {plan.pp}: it has no pipelines with FSDP, set pp 1"),
        (plan.sp, "sp: the tensor parallelism of transformers has no sequence parallelism, leave sp out"),
        (plan.tp_overlap or plan.ep_overlap, "overlapped tensor or expert traffic: leave it out"),
        (
            not plan.grad_reduce_overlap or plan.waits_for_gathers,
            "traffic that is not overlapped: FSDP2 overlaps",
        ),
        (plan.recompute == "selective", "selective recomputation: use full or none"),
        (plan.recompute_num_layers is not None, "recomputation of some layers: use full or none"),
        (plan.recompute == "full" and not is_sharded(plan), "recomputation without FSDP: shard, or use none"),
        (plan.precision in ("mxfp8", "nvfp4"), f"precision {plan.precision!r}: use bf16 or fp8"),
        (inside > 1 and not is_sharded(plan), "tp or cp of states that are not sharded: use zero3 with dp_shard > 1"),
        # parallelism_config.py:328
        (
            inside > 1 and plan.dp_replicate > 1 and plan.dp_shard == 1,
            "tp or cp in copies of dp_shard 1: raise dp_shard",
        ),
        (training.fused_norm is True, "fused_norm = true: the program's model decides, leave it out"),
    )
    if what := refused(refusals):
        raise InputError(f"Accelerate cannot express {what}")


def _table(plan_file: PlanFile) -> dict[str, Any]:
    plan = plan_file.best.plan
    nodes = -(-plan.num_devices // plan_file.cluster.devices_per_node)
    kind = "FSDP" if is_sharded(plan) else "MULTI_GPU" if plan.num_devices > 1 else "NO"
    table: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        **written((PRECISION,), plan_file),
        "num_machines": nodes,
        "num_processes": plan.num_devices,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if plan.precision == "fp8":
        table["fp8_config"] = {"backend": "AO"}
    if kind == "FSDP":
        table["fsdp_config"] = written(FSDP, plan_file)
        table["parallelism_config"] = written(PARALLELISM, plan_file)
    return table


def _environment(table: dict[str, Any], plan: ParallelPlan) -> dict[str, str]:
    """The variables in which Accelerate finds the table (utils/launch.py:198), and the micro-batches of a step."""
    variables = {
        "ACCELERATE_MIXED_PRECISION": str(table["mixed_precision"]),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(plan.num_microbatches),
    }
    if "fp8_config" in table:
        variables["ACCELERATE_FP8_BACKEND"] = str(table["fp8_config"]["backend"])
    if "fsdp_config" in table:
        variables |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
        sections = table["fsdp_config"] | table["parallelism_config"]
        variables |= {key.upper(): _word(value) for key, value in sections.items()}
    return variables


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


TARGET = Target(name="accelerate", says="Hugging Face Accelerate", rules=("fsdp2",), job=job)
