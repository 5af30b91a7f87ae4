"""Export of a plan to a DeepSpeed JSON file, and the command that starts a training script with it.

Keys are those of DeepSpeed 0.19.8; places in comments are below deepspeed/ there.  The JSON contains neither the model,
which the script builds, nor the devices, which the launcher provides.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from autoplan.base.errors import InputError
from autoplan.frameworks.common.job import File, Job, LaunchVariable, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import Rule, check_legal, check_limits
from autoplan.frameworks.common.shared_rules import USUAL_RANK_ORDER, only
from autoplan.frameworks.common.tuning import peft_duties, peft_files, refused_of_own_programs
from autoplan.frameworks.deepspeed.options import (
    ACCUMULATION,
    ACCUMULATOR,
    CP,
    EP,
    MICRO_BATCH,
    REDUCTION,
    STATES,
    TOTAL,
    TP,
    TP_OVERLAP,
    ZERO,
)
from autoplan.frameworks.deepspeed.rules import RULES
from autoplan.spec.enums import Sharding
from autoplan.spec.optimizers import TRAITS
from autoplan.spec.plan_file import PlanFile

_FILE = "deepspeed.json"
_WITH_MICS = "0.19.6"  # the last version with zero_optimization.mics_shard_size (runtime/config.py:119)


def deepspeed_config(plan_file: PlanFile, version: str) -> dict[str, Any]:
    """Return the configuration, without optimizer and learning rate, which the script sets."""
    model, plan = plan_file.model, plan_file.best.plan
    check_legal(RULES, model, plan_file.training, plan, "DeepSpeed does not support the plan")
    cannot = "DeepSpeed's configuration cannot express"
    check_limits(TARGET.at(version).limits, model, plan_file.training, plan, cannot)
    data_types = written((ACCUMULATOR,), plan_file)
    if data_types and plan.sharding == "none":  # runtime/engine.py _do_optimizer_sanity_check
        raise InputError(f"{cannot} gradients in fp32 without ZeRO: use zero1, or grad_dtype bf16")
    config: dict[str, Any] = {
        **written((TOTAL, MICRO_BATCH, ACCUMULATION), plan_file),
        plan.precision: {"enabled": True} | {key: value for key, value in written(STATES, plan_file).items() if value},
        "gradient_clipping": 1.0,
        **written((REDUCTION,), plan_file),
        "data_types": data_types or None,
        "zero_optimization": written(ZERO, plan_file),
        "tensor_parallel": written((TP, TP_OVERLAP), plan_file) if plan.tp > 1 else None,
        **(written((CP,), plan_file) if plan.cp > 1 else {}),
        "expert_parallel": {"enabled": True} | written((EP,), plan_file) if plan.ep > 1 else None,
        "activation_checkpointing": {"number_checkpoints": model.num_layers} if plan.recompute == "full" else None,
    }
    return {key: value for key, value in config.items() if value is not None}


def job(plan_file: PlanFile, version: str) -> Job:
    """Return the job of a script that calls deepspeed.initialize or uses the Trainer of Transformers."""
    plan = plan_file.best.plan
    return Job(
        framework=f"DeepSpeed {version}",
        variables=(
            LaunchVariable(name="TRAIN_SCRIPT", default=None, note=_duties(plan_file)),
            LaunchVariable(
                name="CONFIG_OPTION",
                default="--deepspeed_config",
                note="--deepspeed for the Trainer of Transformers, with --per_device_train_batch_size"
                f" {plan.micro_batch} --gradient_accumulation_steps {plan.num_microbatches} --{plan.precision}",
            ),
        ),
        program='"$TRAIN_SCRIPT"',
        trailing=(f'"$CONFIG_OPTION" "$HERE/{_FILE}"',),
        files=(
            File(name=_FILE, text=json.dumps(deepspeed_config(plan_file, version), indent=2) + "\n"),
            *peft_files(plan_file),
        ),
    )


def _duties(plan_file: PlanFile) -> str:
    """Describe the parts of the plan that the script itself must do, because the JSON cannot express them."""
    plan = plan_file.best.plan
    duties = ["builds the model, calls deepspeed.initialize"]
    if plan.recompute == "full":
        duties.append("checkpoints the activations of every layer (--gradient_checkpointing of the Trainer)")
    if plan.cp > 1:
        duties.append("registers Ulysses attention (UlyssesSPAttentionHF)")
    if plan.offload != "none":
        duties.append("takes DeepSpeedCPUAdam")
    if (optimizer := plan_file.training.optimizer) != "adam":
        duties.append(f"takes {TRAITS[optimizer].title} as its optimizer")
    if plan.dp_replicate > 1 and plan.sharding == "zero3":
        duties.append("makes the model under deepspeed.zero.MiCS_Init")
    return "yours: " + ", ".join([*duties, *peft_duties(plan_file)])


_ZERO3, _GATHERS = Sharding.ZERO3.code, (Sharding.ZERO1.code, Sharding.ZERO2.code)

# Parts of a plan that the JSON cannot express.
_LIMITS_WITH_MICS = (
    only("pp", 1, why="the script gives the stages to PipelineModule(num_stages), plan with pp 1"),
    only("ep_overlap", False, why="leave it out"),
    only("dropout", False, why="the model has it, plan without"),
    USUAL_RANK_ORDER,
    Rule(
        holds=lambda s, b: b.param_gather_overlap | ~np.isin(b.sharding, _GATHERS),
        text=lambda s, p: f"param_gather_overlap off with {p.sharding}: it has no switch for it",
    ),
    Rule(
        holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding != _ZERO3) | (b.tp * b.cp == 1),
        text=lambda s, p: "partial sharding with tp or cp: MiCS shards over neighbouring ranks, set dp_replicate to 1",
    ),
)
_SHARDS_OVER_ALL = Rule(
    holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding != _ZERO3),
    text=lambda s, p: (
        f"zero3 over {p.dp_shard} of {p.dp} replicas: MiCS was removed after {_WITH_MICS}, shard over all "
        f"of them or use --to deepspeed@{_WITH_MICS}"
    ),
)
LIMITS = (*_LIMITS_WITH_MICS, _SHARDS_OVER_ALL)

TARGET = Target(
    name="deepspeed",
    title="DeepSpeed",
    rules=("deepspeed",),
    job=job,
    versions=("0.19.8", _WITH_MICS),
    limits=LIMITS,
    other_limits={_WITH_MICS: _LIMITS_WITH_MICS},
    refused_tuning=refused_of_own_programs,
    optimizers=("adam", "adam8bit", "adam8bit-bnb", "adafactor", "lion", "sgd"),
)
