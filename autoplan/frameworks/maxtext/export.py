"""Export of a plan to the YAML of MaxText e591f30 (2026-08), for GPUs; places are below src/maxtext/.

All axes are "ici" axes of a single slice, so that the mesh numbers ranks in the same order as torchrun.
"""

from __future__ import annotations

from typing import Any

from autoplan.base.errors import refuse
from autoplan.frameworks.common.header import comment, header
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job, LaunchVariable, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import check_legal, check_limits
from autoplan.frameworks.common.shared_rules import USUAL_RANK_ORDER, gathers_ahead, only
from autoplan.frameworks.maxtext.options import (
    ACCUMULATION,
    ATTENTION,
    BLOCKS,
    CP_KIND,
    EXPERTS,
    FFN_SIZE,
    HEAD_DIM,
    KV_HEADS,
    LENGTH,
    MODELS,
    OF_EXPERTS,
    PER_DEVICE,
    PIPELINED,
    QUANTIZATION,
    SAME_NAMES,
    SIZES,
    STATES,
    WRITTEN,
    mesh,
    per_device_batch,
    policy,
)
from autoplan.frameworks.maxtext.rules import RULES, is_plain
from autoplan.readers.model import find_preset
from autoplan.spec.enums import Precision, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile

NAME = "maxtext"
YAML, START = "maxtext.yml", "maxtext_start.py"
_START = '''"""Join the processes that torchrun starts, one a device, and train with MaxText."""

import os
import runpy

import jax

jax.distributed.initialize(
    coordinator_address=f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}",  # torchrun has the other
    num_processes=int(os.environ["WORLD_SIZE"]),
    process_id=int(os.environ["RANK"]),
    local_device_ids=[int(os.environ["LOCAL_RANK"])],
)
runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__", alter_sys=True)
'''
_DOCUMENTS = 32  # per sequence, as in its own files for GPUs (configs/gpu/models)

LIMITS = (
    only("grad_reduce_overlap", True, why="XLA's scheduler overlaps what it can"),
    gathers_ahead("XLA's scheduler overlaps what it can"),
    only("tp_overlap", False, why="leave it out"),
    USUAL_RANK_ORDER,
)


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job, with one process per device; jax connects them (utils/max_utils.py:261 allows it)."""
    import yaml

    _check(plan_file)
    title = TARGET.title
    notes = [*header(plan_file, title), comment("Yours to set: dataset, learning rate, base_output_directory.")]
    if plan_file.best.plan.pp > 1:
        notes.append(comment("Embedding and head are spread over the stages, and priced on the first and the last."))
    text = yaml.safe_dump(_table(plan_file), sort_keys=False, width=10**6)
    return Job(
        framework=title,
        environment=(
            EnvironmentVariable(name="JAX_ENABLE_PGLE", value="true", note="profiles steps to schedule by, as priced"),
            EnvironmentVariable(
                name="XLA_FLAGS", value="--xla_gpu_enable_latency_hiding_scheduler=true", note="overlaps collectives"
            ),
            EnvironmentVariable(
                name="XLA_PYTHON_CLIENT_MEM_FRACTION", value="0.95", note="of a device, .75 if it is not said"
            ),
        ),
        variables=(LaunchVariable(name="STEPS", default="100", note="steps", counts_steps=True),),
        program=f'"$HERE/{START}"',
        trailing=(f'"$HERE/{YAML}" steps="$STEPS"',),
        files=(
            File(name=YAML, text="\n".join([*notes, text])),
            File(name=START, text=_START),
        ),
    )


def _table(plan_file: PlanFile) -> dict[str, Any]:
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    is_packed = training.document_len is not None
    return {
        "base_config": "base.yml",
        "run_name": model.name,
        "hardware": "gpu",
        **_model(plan_file),
        **written((LENGTH, ATTENTION), plan_file),
        **_batch(plan),
        **{f"ici_{axis}_parallelism": degree for axis, degree in mesh(plan).items()},
        "dcn_data_parallelism": 1,
        "num_slices": 1,
        **(written((STATES,), plan_file) if plan.sharding != Sharding.ZERO3 else {}),
        **(written((CP_KIND,), plan_file) if plan.cp > 1 else {}),
        **policy(plan, is_plain=is_plain(model)),
        **_precision(plan),
        "scan_layers": plan.pp == 1,
        "packing": is_packed,
        **({"max_segments_per_seq": _DOCUMENTS} if is_packed else {}),
        **written(WRITTEN, plan_file),
    } | ({"num_layers_per_pipeline_stage": model.num_layers // plan.pp} if plan.pp > 1 else {})


def _batch(plan: ParallelPlan) -> dict[str, Any]:
    """Return the batch: a pipeline processes a whole step in one pass, otherwise passes accumulate gradients."""
    if plan.pp > 1:
        share = per_device_batch(plan.global_batch, plan.num_devices)
        return {PER_DEVICE: share, PIPELINED: plan.num_microbatches}
    share = per_device_batch(plan.micro_batch * plan.dp, plan.num_devices)
    return {PER_DEVICE: share, ACCUMULATION: plan.num_microbatches}


def _precision(plan: ParallelPlan) -> dict[str, str]:
    """Return the quantisation, which is empty for bf16; scales only matter for fp8."""
    for name, (precision, scales) in QUANTIZATION.items():
        if precision == plan.precision and (scales == plan.fp8_scaling or precision != Precision.FP8):
            return {"quantization": name}
    return {}


def _model(plan_file: PlanFile) -> dict[str, Any]:
    """Return the name of the model if MaxText ships it, otherwise its sizes."""
    model = plan_file.model
    if (shipped := _shipped(model)) is not None:
        mtp = {"mtp_num_layers": model.num_mtp_layers} if model.num_mtp_layers else {}
        return {"model_name": shipped, **mtp}
    moe = model.moe
    kind = (model.qkv_bias, model.qk_norm)
    fitting = (block for block, parts in BLOCKS.items() if parts == kind and (block in OF_EXPERTS) == (moe is not None))
    block = next(fitting, None)
    refusals = (
        *((True, part) for part in model.unusual_parts),
        (block is None, "this kind of layer, which is none of Llama, Qwen2, Qwen3, Mixtral and Qwen3's experts"),
        (model.mla is not None, "latent attention of a model that it does not ship"),
        (model.position_embedding != "rope", f"{model.position_embedding} positions"),
        (model.norm != "rmsnorm", "a norm other than RMSNorm"),
        (not model.gated_mlp, "an MLP without gate"),
        (model.mlp_bias or model.attention_output_bias, "biases of the MLP or behind attention"),
        (model.attention_sinks, "attention sinks"),
        (model.window is not None, "a window"),
        (model.num_mtp_layers > 0, "layers for multi-token prediction"),
        (
            moe is not None
            and bool(moe.shared_expert_ffn_size or moe.router_bias or moe.latent_size or moe.num_dense_layers),
            "experts other than Mixtral's",
        ),
        (moe is not None and moe.interval != 1, "layers without experts"),
    )
    refuse(refusals, f"{TARGET.title} cannot express ", f" (model {model.name!r})")
    ffn = {FFN_SIZE.key: FFN_SIZE.value(plan_file)}
    sizes = written((*SIZES, KV_HEADS, HEAD_DIM), plan_file)
    experts = written(EXPERTS, plan_file) if moe else {}
    if moe:  # must be equal if all layers have experts (configs/types.py:3903)
        ffn = {FFN_SIZE.key: moe.expert_ffn_size}
    switches = {"attention_bias": True} if model.qkv_bias else {"use_qk_norm": True} if model.qk_norm == "head" else {}
    return {"decoder_block": block, **sizes, **ffn, **experts, **switches}


def _shipped(model: ModelSpec) -> str | None:
    """Return MaxText's name for a model that it ships, or None."""
    name = MODELS.get(model.name, model.name if model.name in SAME_NAMES else None)
    return name if name is not None and find_preset(model.name) == model else None


def _check(plan_file: PlanFile) -> None:
    """Raise an error for anything that would silently become a different run."""
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    title = TARGET.title
    check_legal(RULES, model, training, plan, f"{title} does not support the plan")
    check_limits(LIMITS, model, training, plan, f"{title} cannot express")
    refusals = (
        (plan.attention not in ("flash", "unfused"), f"attention {plan.attention!r}: plan with flash"),
        (training.fused_norm is False, "norms that are not fused"),
        (training.preference is not None, f"{training.preference}"),
        (
            training.lengths is not None and training.batching != "packed",
            f"batching {training.batching}: plan with --batching packed",
        ),
        (
            plan_file.cluster.device.vendor != "nvidia",
            f"{plan_file.cluster.device.name}: its launch files are for NVIDIA's GPUs; export to another target",
        ),
    )
    refuse(refusals, f"{title} cannot express ")


TARGET = Target(name=NAME, title="MaxText", rules=("maxtext",), job=job, limits=LIMITS)
