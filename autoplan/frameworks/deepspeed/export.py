"""Export of a plan to the JSON of DeepSpeed, and the command that starts a training script with it.

Keys are those of DeepSpeed 0.19.8; places in comments are below deepspeed/ there.  The JSON holds no model and no
devices: the script builds the one, the launcher gives the other.
"""

from __future__ import annotations

import json
from typing import Any

from autoplan.base.errors import InputError, refused
from autoplan.frameworks.common.job import File, Job, LaunchVariable, Target
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.deepspeed.rules import RULES
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile

_FILE = "deepspeed.json"
STAGES = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}
BUCKET_ELEMENTS = 500_000_000  # as bucket_gib of the presets says; also what DeepSpeed takes by itself
_WITH_MICS = "0.19.6"  # zero_optimization.mics_shard_size is refused after it (runtime/config.py:119)


def deepspeed_config(plan_file: PlanFile, version: str) -> dict[str, Any]:
    """The configuration; optimizer and learning rate are those of the script."""
    model, plan = plan_file.model, plan_file.best.plan
    check_legal(RULES, model, plan_file.training, plan, "DeepSpeed does not accept the plan")
    _check(plan, version)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        plan.precision: {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": _zero(plan),
    }
    if plan.tp == 1:  # AutoTP counts the ranks of a tensor group as replicas here (runtime/config.py:471)
        config = {"train_batch_size": plan.global_batch, **config}
    else:
        config["tensor_parallel"] = {"autotp_size": plan.tp, "tp_overlap_comm": plan.tp_overlap}
    if plan.cp > 1:
        config["sequence_parallel_size"] = plan.cp
    if plan.ep > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": plan.ep}
    if plan.recompute == "full":
        config["activation_checkpointing"] = {"number_checkpoints": model.num_layers}
    return config


def job(plan_file: PlanFile, version: str) -> Job:
    """Return the job of a script that calls deepspeed.initialize, or of one with the Trainer of Transformers."""
    plan = plan_file.best.plan
    return Job(
        framework=f"DeepSpeed {version}",
        variables=(
            LaunchVariable(name="TRAIN_SCRIPT", default=None, says=_duties(plan)),
            LaunchVariable(
                name="CONFIG_OPTION",
                default="--deepspeed_config",
                says="--deepspeed for the Trainer of Transformers, with --per_device_train_batch_size"
                f" {plan.micro_batch} --gradient_accumulation_steps {plan.num_microbatches} --{plan.precision}",
            ),
        ),
        program='"$TRAIN_SCRIPT"',
        trailing=(f'"$CONFIG_OPTION" "$HERE/{_FILE}"',),
        files=(File(name=_FILE, text=json.dumps(deepspeed_config(plan_file, version), indent=2) + "\n"),),
    )


def _duties(plan: ParallelPlan) -> str:
    """Return the parts of the plan that the script has to carry out, as the JSON cannot."""
    duties = ["builds the model, calls deepspeed.initialize"]
    if plan.recompute == "full":
        duties.append("checkpoints the activations of every layer (--gradient_checkpointing of the Trainer)")
    if plan.cp > 1:
        duties.append("registers Ulysses attention (UlyssesSPAttentionHF)")
    if plan.offload == "optimizer":
        duties.append("takes DeepSpeedCPUAdam")
    if plan.dp_replicate > 1 and plan.sharding == "zero3":
        duties.append("makes the model under deepspeed.zero.MiCS_Init")
    return "yours: " + ", ".join(duties)


def _check(plan: ParallelPlan, version: str) -> None:
    """Refuse what the JSON cannot say."""
    refusals = (
        (plan.pp > 1, f"pp {plan.pp}: the script gives the stages to PipelineModule(num_stages), plan with pp 1"),
        (plan.sp, "sp: AutoTP keeps whole sequences, leave it out"),
        (plan.ep_overlap, "ep_overlap: leave it out"),
        (plan.rank_order != "tp-cp-ep-dp-pp", f"rank_order {plan.rank_order!r}: leave it out"),
        (
            plan.waits_for_gathers and plan.sharding in ("zero1", "zero2"),
            f"param_gather_overlap off with {plan.sharding}: it has no switch for it",
        ),
        (
            plan.dp_replicate > 1 and plan.sharding == "zero3" and version != _WITH_MICS,
            f"zero3 over {plan.dp_shard} of {plan.dp} replicas: MiCS was removed after {_WITH_MICS}, shard over all "
            f"of them or export for --target-version {_WITH_MICS}",
        ),
        (
            plan.dp_replicate > 1 and plan.sharding == "zero3" and plan.tp * plan.cp > 1,
            "partial sharding with tp or cp: MiCS shards over neighbouring ranks, set dp_replicate to 1",
        ),
    )
    if what := refused(refusals):
        raise InputError(f"DeepSpeed's configuration cannot express {what}")


def _zero(plan: ParallelPlan) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": STAGES[plan.sharding],
        "overlap_comm": plan.grad_reduce_overlap,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if plan.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if plan.sharding == "zero3" and not plan.param_gather_overlap:
        zero["stage3_prefetch_bucket_size"] = 0
    if plan.sharding == "zero3" and plan.dp_replicate > 1:
        zero["mics_shard_size"] = plan.dp_shard
    return zero


TARGET = Target(name="deepspeed", says="DeepSpeed", rules=("deepspeed",), job=job, versions=("0.19.8", _WITH_MICS))
