"""Export of a plan to launch files for a program that uses Hugging Face Accelerate with FSDP2.

Places are below accelerate/ in 1.15.0.  The launch files set the same variables as
`accelerate launch --config_file accelerate.yaml`, so that any launcher can start the program.
"""

from __future__ import annotations

from typing import Any

from autoplan.base.arrays import Bools
from autoplan.base.errors import InputError
from autoplan.frameworks.accelerate.options import FSDP, PARALLELISM, PRECISION
from autoplan.frameworks.common.header import comment, header
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job, LaunchVariable, OptionGroup, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import Rule, check_legal, check_limits
from autoplan.frameworks.common.shared_rules import FSDP2_OVERLAPS, only
from autoplan.frameworks.common.tuning import ADAPTERS_IN_FP32, peft_duties, peft_files, refused_of_own_programs
from autoplan.frameworks.fsdp2.rules import rules_offering
from autoplan.frameworks.hf_trainer.options import WRITTEN_OPTIM
from autoplan.spec.enums import ChunkedLoss, MainWeights, Offload, Precision, Recompute, ReduceType, Sharding
from autoplan.spec.plan import ALL_LAYERS, ParallelPlan, PlanBatch
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload

YAML = "accelerate.yaml"


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job that starts a training program that uses Accelerate."""
    import yaml

    plan, optimizer = plan_file.best.plan, plan_file.training.optimizer
    _check(plan_file)
    table = _table(plan_file)
    notes = [
        *header(plan_file, "Accelerate"),
        f"# The program's part: sequences of {plan_file.training.seq_len}, {plan.micro_batch} a device at a time,",
        f"# gradients accumulated over {plan.num_microbatches} of them per step.",
        *(comment(f"It {duty}; without it the plan differs, without any warning.") for duty in _program(plan_file)),
    ]
    return Job(
        framework="Accelerate",
        environment=tuple(
            EnvironmentVariable(name=name, value=value, note=f"as accelerate launch sets it from {YAML}")
            for name, value in _environment(table, plan).items()
        ),
        variables=(LaunchVariable(name="TRAIN_SCRIPT", default=None, note=_duties(plan_file)),),
        program='"$TRAIN_SCRIPT"',
        replaceable=OptionGroup(
            name="BATCH",
            note="For a program with TrainingArguments of transformers; BATCH_ARGS in the environment replaces it.",
            lines=(
                ["--per_device_train_batch_size", str(plan.micro_batch)],
                ["--gradient_accumulation_steps", str(plan.num_microbatches)],
                *([["--gradient_checkpointing", "true"]] if _recomputes_alone(plan) else []),
                *([["--dtype", "bfloat16"]] if loads_bf16(plan) else []),
                *([["--bf16", "false"]] if is_unmixed(plan) else []),
                *([] if optimizer == "adam" else [["--optim", WRITTEN_OPTIM[optimizer]]]),
            ),
        ),
        files=(
            File(name=YAML, text="\n".join(notes) + "\n" + yaml.safe_dump(table, sort_keys=False)),
            *peft_files(plan_file),
        ),
    )


def _program(plan_file: PlanFile) -> list[str]:
    """Return the parts of the plan that the program itself must do, not a file (accelerator.py:1901, :4111)."""
    plan = plan_file.best.plan
    loads = "loads its model with from_pretrained(..., tp_plan='auto', device_mesh=accelerator.torch_device_mesh)"
    splits = "runs every step inside accelerator.maybe_context_parallel(buffers=..., buffer_seq_dims=...)"
    holds = "loads its model in bf16 (--dtype bfloat16), and is not told --bf16"
    keeps = "loads its model in bf16 (--dtype bfloat16)"
    recomputes = "recomputes every layer (--gradient_checkpointing true of the Trainer)"
    duties = (
        (plan.tp > 1, loads),
        (plan.cp > 1, splits),
        (_recomputes_alone(plan), recomputes),
        (loads_bf16(plan), holds if is_unmixed(plan) else keeps),
    )
    return [duty for is_needed, duty in duties if is_needed] + peft_duties(plan_file)


def _recomputes_alone(plan: ParallelPlan) -> bool:
    """Return whether the program itself must recompute, because FSDP is not used."""
    return plan.recompute == Recompute.FULL and not is_sharded(plan)


def _duties(plan_file: PlanFile) -> str:
    return ", ".join(["your program, which uses Accelerate", *_program(plan_file)])


def is_sharded(plan: ParallelPlan) -> bool:
    """Return whether FSDP has ranks to shard over; otherwise DistributedDataParallel is used."""
    return plan.sharding != "none" and plan.dp_shard * plan.cp > 1


def loads_bf16(plan: ParallelPlan) -> bool:
    """Return whether the program must load its model in bf16, which is never cast to fp32."""
    return plan.main_weights == MainWeights.BF16 or plan.wide_adapters


def is_unmixed(plan: ParallelPlan) -> bool:
    """Return whether mixed precision is off: FSDP would cast sharded weights to fp32 (utils/fsdp_utils.py:805)."""
    return plan.wide_adapters or (plan.main_weights == MainWeights.BF16 and is_sharded(plan))


def are_sharded(batch: PlanBatch) -> Bools:
    """Return which plans shard states; FSDP casts sharded weights to fp32 (accelerate/utils/fsdp_utils.py:805)."""
    return (batch.sharding != Sharding.NONE.code) & (batch.dp_shard * batch.cp > 1)


def _is_unmixed(batch: PlanBatch) -> Bools:
    return batch.wide_adapters | ((batch.main_weights == MainWeights.BF16.code) & are_sharded(batch))


LIMITS = (
    only("pp", 1, why="it has no pipelines with FSDP, set pp 1"),
    only("sp", False, why="the tensor parallelism of transformers has no sequence parallelism, leave sp out"),
    *FSDP2_OVERLAPS,
    Rule(
        holds=lambda s, b: b.reduce_dtype == ReduceType.USUAL.code,
        text=lambda s, p: f"reduce_dtype {p.reduce_dtype}: its mixed precision reduces in 16 bits, leave it out",
    ),
    Rule(
        holds=lambda s, b: (b.offload == Offload.NONE.code) | are_sharded(b),
        text=lambda s, p: f"offload {p.offload!r} without ranks to shard over: it needs FSDP, leave it out",
    ),
    only("recompute", Recompute.NONE, Recompute.FULL, why="use full or none"),
    Rule(
        holds=lambda s, b: (b.recompute_num_layers == 0) | (b.recompute_num_layers == ALL_LAYERS),
        text=lambda s, p: f"recompute of {p.recompute_num_layers} layers: use full or none",
    ),
    only("precision", Precision.BF16, Precision.FP16, Precision.FP8, Precision.FP32, why="use bf16 or fp8"),
    Rule(
        holds=lambda s, b: (b.tp * b.cp == 1) | are_sharded(b),
        text=lambda s, p: "tp or cp of states that are not sharded: use zero3 with dp_shard > 1",
    ),
    Rule(
        holds=lambda s, b: (b.sharding == Sharding.NONE.code) | are_sharded(b),
        text=lambda s, p: f"{p.sharding} over one rank: use none, or a larger dp_shard",
    ),
    Rule(
        source="parallelism_config.py:328",
        holds=lambda s, b: (b.tp * b.cp == 1) | (b.dp_replicate == 1) | (b.dp_shard > 1),
        text=lambda s, p: "tp or cp in copies of dp_shard 1: raise dp_shard",
    ),
    Rule(
        source="utils/fsdp_utils.py:805",
        holds=lambda s, b: ~_is_unmixed(b) | (b.precision == Precision.BF16.code),
        text=lambda s, p: f"weights held in bf16 with precision {p.precision}: use bf16",
    ),
    Rule(  # bitsandbytes packs a matrix into one column of bytes, which the plans of transformers do not cut
        source="github.com/huggingface/transformers/issues/38122",
        holds=lambda s, b: (b.tp == 1) | (not is_quantized(s)),
        text=lambda s, p: f"tp {p.tp} of quantised weights: set tp 1",
    ),
)


# Limits of the files of `accelerate launch`; programs with files of their own can express more about adapters.
_LIMITS_OF_FILES = (
    *LIMITS,
    ADAPTERS_IN_FP32,
    only("chunked_loss", ChunkedLoss.NONE, why="the program's model has its loss, leave it out or use hf-trainer"),
    only("wide_adapters", False, why="its files say nothing of them, leave it out or use axolotl or llama-factory"),
)


def is_quantized(workload: Workload) -> bool:
    """Return whether frozen weights are stored in fewer than 16 bits."""
    finetuning = workload.training.finetuning
    return finetuning is not None and finetuning.quantization != "none"


def _check(plan_file: PlanFile) -> None:
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    check_legal(
        rules_offering("main_weights", "reduce_dtype", "wide_adapters"),
        model,
        training,
        plan,
        "Accelerate does not support the plan",
    )
    check_limits(_LIMITS_OF_FILES, model, training, plan, "Accelerate cannot express")
    if training.fused_norm is True:
        raise InputError("Accelerate cannot express fused_norm = true: the program's model decides, leave it out")


def _table(plan_file: PlanFile) -> dict[str, Any]:
    plan = plan_file.best.plan
    nodes = -(-plan.num_devices // plan_file.cluster.devices_per_node)
    kind = "FSDP" if is_sharded(plan) else "MULTI_GPU" if plan.num_devices > 1 else "NO"
    table: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        PRECISION.key: "no" if is_unmixed(plan) else PRECISION.value(plan_file),
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
    """Return the variables that Accelerate reads the table from (utils/launch.py:198), and the micro-batch count."""
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


TARGET = Target(
    name="accelerate",
    title="Hugging Face Accelerate",
    rules=("fsdp2", "accelerate"),
    job=job,
    limits=_LIMITS_OF_FILES,
    refused_tuning=refused_of_own_programs,
    optimizers=tuple(WRITTEN_OPTIM),
)
