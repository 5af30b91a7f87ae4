"""Export of a plan to the YAML of nanotron's run_train.py.

Keys are those of nanotron 2411b02 (2026-04); places in comments are below src/nanotron/ there.
"""

from __future__ import annotations

from typing import Any

import yaml

from autoplan.base.errors import refuse
from autoplan.frameworks.common.header import header
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job, LaunchVariable, Target
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import check_legal, check_limits
from autoplan.frameworks.common.shared_rules import USUAL_RANK_ORDER, gathers_ahead, only
from autoplan.frameworks.nanotron.options import (
    ACCUMULATION,
    DTYPE,
    EXPERTS,
    HIDDEN_SIZE,
    MICRO_BATCH,
    NUM_HEADS,
    NUM_LAYERS,
    PARALLELISM,
    ROPE_BASE,
    SHARED_EXPERT,
    TIED,
    VOCAB_SIZE,
    ZERO_STAGES,
)
from autoplan.frameworks.nanotron.rules import RULES
from autoplan.spec.blocks import Block, Experts
from autoplan.spec.plan_file import PlanFile

_FILE = "nanotron.yaml"


def nanotron_config(plan_file: PlanFile) -> dict[str, Any]:
    """Return the configuration in the structure of nanotron's classes; data, length and optimiser are user settings."""
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    _check(plan_file)
    check_legal(RULES, model, training, plan, "nanotron does not support the plan")
    return {
        "general": {"project": "autoplan", "run": model.name, "seed": 42},
        "model": {
            "model_config": _model_config(plan_file),
            "init_method": {"std": 0.02},
            "dtype": DTYPE.value(plan_file),
            "make_vocab_size_divisible_by": plan_file.framework.memory.pads_vocab_to,
            "ddp_bucket_cap_mb": round(plan_file.framework.network.reduce_bucket_bytes / 2**20) or 25,
        },
        "parallelism": _parallelism(plan_file),
        "tokens": {
            "sequence_length": training.seq_len,
            **written((MICRO_BATCH, ACCUMULATION), plan_file),
            "train_steps": 100,
        },
        "optimizer": {
            "zero_stage": ZERO_STAGES[plan.sharding],
            "accumulate_grad_in_fp32": plan_file.framework.memory.bytes_per_grad == 4,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "optimizer_factory": {
                "name": "adamW",
                "adam_eps": 1e-8,
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": {
                "learning_rate": 3e-4,
                "lr_warmup_steps": 10,
                "lr_warmup_style": "linear",
                "lr_decay_style": "cosine",
                "min_decay_lr": 3e-5,
            },
        },
        # Without a dataset nanotron generates random tokens.
        "data_stages": [{"name": "mock", "start_training_step": 1, "data": {"dataset": None, "seed": 42}}],
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"iteration_step_info_interval": 1},
    }


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job in a checkout of nanotron; parallel/tensor_parallel/nn.py:82 asserts one hardware queue."""
    config = yaml.safe_dump(nanotron_config(plan_file), sort_keys=False, allow_unicode=True, width=10**6)
    return Job(
        framework="nanotron",
        environment=(
            EnvironmentVariable(
                name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", note="demanded under tensor parallelism"
            ),
        ),
        variables=(
            LaunchVariable(name="NANOTRON_DIR", default=".", note="checkout of github.com/huggingface/nanotron"),
        ),
        program='"$NANOTRON_DIR/run_train.py"',
        trailing=(f'--config-file "$HERE/{_FILE}"',),
        files=(File(name=_FILE, text="\n".join([*header(plan_file, "nanotron"), config])),),
    )


LIMITS = (
    only("grad_reduce_overlap", True, why="it has no switch for it"),
    gathers_ahead("it has no switch for it"),
    only("ep_overlap", False, why="leave it out"),
    USUAL_RANK_ORDER,
)


def _check(plan_file: PlanFile) -> None:
    """Raise an error for anything that would silently become a different model or run."""
    model, training = plan_file.model, plan_file.training
    check_limits(LIMITS, model, training, plan_file.best.plan, "nanotron cannot express")
    heads = model.num_heads * model.qk_head_dim
    moe = model.moe
    refusals = (
        *((True, part) for part in model.unusual_parts),
        (model.mla is not None, "latent attention"),
        (model.position_embedding != "rope", f"{model.position_embedding} positions"),
        (model.norm != "rmsnorm", "a norm other than RMSNorm"),
        (not model.gated_mlp, "an MLP without gate"),
        (model.mlp_bias or model.attention_output_bias, "biases of the MLP or behind attention"),
        (model.attention_sinks, "attention sinks"),
        (model.qk_norm != "none", "a norm of queries and keys"),
        (model.window is not None, "a window (models/qwen.py:97 asserts that there is none)"),
        (model.num_mtp_layers > 0, "layers for multi-token prediction"),
        (heads != model.hidden_size, f"heads of {heads} in all beside hidden_size {model.hidden_size}"),
        (moe is not None and moe.router_bias, "a bias of the router"),
        (moe is not None and moe.latent_size is not None, "experts in a latent space"),
        (
            moe is not None and bool(moe.shared_expert_ffn_size) != moe.shared_expert_gate,
            "shared experts without gate (nn/moe.py:140 gates them)",
        ),
        (plan_file.best.plan.attention != "flash", f"attention {plan_file.best.plan.attention!r}"),
        (training.fused_norm is False, "norms that are not fused"),
    )
    refuse(refusals, "nanotron cannot express ", f" (model {model.name!r})")


def _model_config(plan_file: PlanFile) -> dict[str, Any]:
    """Return a Llama configuration, or Qwen2 if queries, keys and values have biases or layers have experts."""
    model = plan_file.model
    is_qwen = model.qkv_bias or model.moe is not None
    config: dict[str, Any] = {
        "is_qwen2_config" if is_qwen else "is_llama_config": True,
        **written((HIDDEN_SIZE,), plan_file),
        "intermediate_size": model.ffn_size,
        **written((NUM_LAYERS, NUM_HEADS), plan_file),
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max(plan_file.training.seq_len, model.max_positions),
        **written((ROPE_BASE, TIED, VOCAB_SIZE), plan_file),
        "_attn_implementation": "flash_attention_2",
    }
    if is_qwen:
        config["attention_bias"] = model.qkv_bias
    if model.moe:
        config["moe_config"] = _experts(plan_file, model.moe)
    return config


def _experts(plan_file: PlanFile, moe: Experts) -> dict[str, Any]:
    config: dict[str, Any] = {
        **written(EXPERTS, plan_file),
        "layers": [at for at, layer in enumerate(plan_file.model.layers) if Block.MOE in layer],
        "enable_shared_expert": bool(moe.shared_expert_ffn_size),
    }
    if moe.shared_expert_ffn_size:
        config |= written((SHARED_EXPERT,), plan_file)
    return config


def _parallelism(plan_file: PlanFile) -> dict[str, Any]:
    overlaps = plan_file.best.plan.tp_overlap and plan_file.best.plan.tp > 1
    return written(PARALLELISM, plan_file) | {"tp_linear_async_communication": overlaps}


TARGET = Target(name="nanotron", title="nanotron", rules=("nanotron",), job=job, limits=LIMITS)
