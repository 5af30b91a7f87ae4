"""Export of a plan to an experiment file for Primus with its Megatron backend.

Keys are the arguments of Megatron-LM, which Primus sets by name over its presets; places are in Primus fd1eeab, below
primus/.  Every preset value that differs from the plan is overridden.
"""

from __future__ import annotations

from typing import Any

import yaml

from autoplan.frameworks.common.header import comment, header
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job, LaunchVariable, Target, safe_name
from autoplan.frameworks.megatron_lm.export import TRAINING, checked_parts, environment
from autoplan.frameworks.megatron_lm.rules import LIMITS
from autoplan.frameworks.megatron_lm.table import arguments_of
from autoplan.frameworks.primus.options import SWITCHED_ON
from autoplan.frameworks.primus.rules import ALGORITHMS, RULES
from autoplan.spec.blocks import Block
from autoplan.spec.plan_file import PlanFile

NAME = "primus.yaml"


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job that starts the plan in a checkout of Primus."""
    return Job(
        framework="Primus",
        environment=(*environment(plan_file), *_amd(plan_file)),
        variables=(
            LaunchVariable(
                name="PRIMUS_DIR", default=".", note="checkout of github.com/AMD-AGI/Primus with its submodules"
            ),
            LaunchVariable(name="TRAIN_ITERS", default="100", note="steps", counts_steps=True),
        ),
        program='"$PRIMUS_DIR/primus/cli/main.py"',
        trailing=("train pretrain", f'--config "$HERE/{NAME}"', "--train_iters", '"$TRAIN_ITERS"'),
        files=(File(name=NAME, text=experiment(plan_file)),),
    )


def experiment(plan_file: PlanFile) -> str:
    """Return the experiment file, with the names of values that the environment may replace."""
    table = {
        "work_group": "autoplan",
        "user_name": "autoplan",
        "exp_name": safe_name(plan_file.model.name),
        "workspace": "./output",
        "modules": {
            "pre_trainer": {
                "framework": "megatron",
                "config": "pre_trainer.yaml",
                "model": "language_model.yaml",
                "overrides": overrides(plan_file),
            }
        },
    }
    lines = [
        *header(plan_file, "Primus"),
        comment(f"Or start it with: primus-cli direct -- train pretrain --config {NAME}"),
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=120)


def overrides(plan_file: PlanFile) -> dict[str, Any]:
    """Return the arguments of Megatron-LM for model, plan and placeholder optimiser settings."""
    model, plan = plan_file.model, plan_file.best.plan
    table: dict[str, Any] = dict.fromkeys(SWITCHED_ON, False) | {"add_bias_linear": True}
    table |= arguments_of((*checked_parts(plan_file, "Primus", RULES), TRAINING), plan_file)
    table["add_position_embedding"] = model.position_embedding != "rope"
    if "cp_comm_type" in table:  # a list with one value for all layers
        table["cp_comm_type"] = [table["cp_comm_type"]]
    if "window_size" in table:  # the command line would parse numbers
        table["window_size"] = [int(item) for item in table["window_size"].split(",")]
    if "moe_layer_freq" in table:
        table["moe_layer_freq"] = [int(Block.MOE in layer) for layer in model.layers]
    if plan.schedule in ALGORITHMS:
        table |= {"patch_primus_pipeline": True, "pp_algorithm": ALGORITHMS[plan.schedule]}
        # Weight gradients are only deferred if the product accumulates them, and forward passes never run alone
        # (backends/megatron/core/pipeline_parallel/primuspipe/pipeline_launcher.py:209).
        table |= {"gradient_accumulation_fusion": True, "no_persist_layer_norm": True}
    table["create_attention_mask_in_dataloader"] = False  # as in the scripts of Megatron-LM
    return table | {"mock_data": True, "tokenizer_type": "NullTokenizer", "finetune": False, "save": None, "load": None}


def _amd(plan_file: PlanFile) -> tuple[EnvironmentVariable, ...]:
    """Return the variables that Primus' launcher sets on AMD devices (runner/helpers/envs/base_env.sh)."""
    if plan_file.cluster.device.vendor != "amd":
        return ()
    return (
        EnvironmentVariable(name="HSA_NO_SCRATCH_RECLAIM", value="1", note="keeps scratch memory of kernels"),
        EnvironmentVariable(name="GPU_MAX_HW_QUEUES", value="2", note="one queue for computing, one for messages"),
    )


TARGET = Target(
    name="primus", title="Primus", rules=("primus", "megatron-lm", "unknown"), job=job, limits=(*RULES, *LIMITS)
)
