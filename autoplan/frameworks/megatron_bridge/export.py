"""Export of a plan to a Python recipe of Megatron-Bridge.

The recipe starts from the settings shared by all pretraining recipes and assigns attributes, which works in all
releases since 0.3 and on main (067f987).  Fields are those of Megatron-Core, derived from the options of Megatron-LM.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.header import header
from autoplan.frameworks.common.job import File, Job, LaunchVariable, Target
from autoplan.frameworks.common.rules import Rule, check_limits
from autoplan.frameworks.common.shared_rules import only
from autoplan.frameworks.megatron_bridge.tuning import peft_lines, refused
from autoplan.frameworks.megatron_lm.export import checked_parts, environment
from autoplan.frameworks.megatron_lm.options import BRIDGE_FIELDS, PLAN
from autoplan.frameworks.megatron_lm.rules import KERNELS, RULES, TAKES_KERNEL
from autoplan.frameworks.megatron_lm.table import BRIDGE, arguments_of, rows
from autoplan.spec.blocks import Block
from autoplan.spec.enums import (
    NARROW_PRECISIONS,
    AttentionKernel,
    CrossEntropyFusion,
    CudaGraphs,
    GradType,
    MainWeights,
    MomentType,
    OffloadLayers,
    Precision,
)
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile

NAME = "recipe.py"

_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
_FP8_PRECISIONS = {
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
}
# Options implied by the registered precision, the tokenizer or the model class, or without a field.
_ELSEWHERE = frozenset(
    (
        *("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe", "vocab_size", "max_position_embeddings"),
        *("group_query_attention", "attention_backend", "optimizer", "squared_relu", "quick_geglu"),
        *("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
        *("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"),
    )
)
_TYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.uint8"}
_OLD = "0.3"
_LACKED_BY_OLD = (
    Rule(  # of training/mixed_precision.py, which takes any attribute and reads those it knows
        source="Megatron-Bridge ecbd4ea, in 0.4.2: fp4_param_gather",
        holds=lambda s, b: ~b.narrow_params | (b.precision != Precision.NVFP4.code),
        text=lambda s, p: (
            f"narrow_params of nvfp4 in version {_OLD}, which keeps 16-bit weights: leave it out or export for main"
        ),
    ),
)
# It has the field, but its training loop does not spread the samples over ranks (training/train.py).
LIMITS = (TAKES_KERNEL, only("dynamic_cp", False, why="export for megatron-lm, or plan without it"))
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather", "overlap_moe_expert_parallel_comm")
_IMPORTS = (
    "import sys",
    "from functools import partial",
    "",
    "import torch",
    "import torch.nn.functional as F",
    "from megatron.core.activations import squared_relu",
    "from megatron.core.fusions.fused_bias_geglu import quick_gelu",
    "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec",
    "from megatron.core.transformer.enums import AttnBackend",
)


_PRETRAINED = LaunchVariable(
    name="PRETRAINED_CHECKPOINT", default=None, note="of Megatron-Bridge: AutoBridge.import_ckpt makes one"
)


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job that starts the plan with an installed Megatron-Bridge."""
    if version == _OLD:
        model, training, plan = plan_file.model, plan_file.training, plan_file.best.plan
        check_limits(_LACKED_BY_OLD, model, training, plan, "Megatron-Bridge has no field for")
    return Job(
        framework="Megatron-Bridge",
        environment=environment(plan_file),
        variables=(
            LaunchVariable(name="TRAIN_ITERS", default="100", note="steps", counts_steps=True),
            *([_PRETRAINED] if _adapters(plan_file) else []),
        ),
        program=f'"$HERE/{NAME}"',
        trailing=('train.train_iters="$TRAIN_ITERS"',),
        files=(File(name=NAME, text=recipe(plan_file)),),
    )


def _adapters(plan_file: PlanFile) -> FineTuning | None:
    """Return the fine-tuning if it trains adapters, or None if all weights are trained."""
    finetuning = plan_file.training.finetuning
    return finetuning if finetuning is not None and finetuning.has_adapters else None


def recipe(plan_file: PlanFile) -> str:
    """Return a module whose `plan_config` returns the configuration, and which trains with it when executed."""
    provider = "MLAModelProvider" if plan_file.model.mla else "GPTModelProvider"
    module = "mla_provider" if plan_file.model.mla else "gpt_provider"
    tuned = _adapters(plan_file)
    starts = "finetune" if tuned else "pretrain"
    lines = [
        *header(plan_file, "Megatron-Bridge"),
        "",
        *(["import os"] if tuned else []),
        *(line for line in _IMPORTS if _is_needed(line, plan_file)),
        f"from megatron.bridge.models.{module} import {provider}",
        *([peft_lines(tuned)[0]] if tuned else []),
        "from megatron.bridge.recipes.common import _pretrain_common",
        "from megatron.bridge.training.comm_overlap import CommOverlapConfig",
        *(["from megatron.bridge.training.finetune import finetune"] if tuned else []),
        "from megatron.bridge.training.gpt_step import forward_step",
        "from megatron.bridge.training.mixed_precision import get_mixed_precision_config",
        *([] if tuned else ["from megatron.bridge.training.pretrain import pretrain"]),
        "from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides",
        "",
        "",
        "def plan_config():",
        "    cfg = _pretrain_common()",
        *(f"    {line}" if line else "" for line in _body(plan_file, provider)),
        "    return cfg",
        "",
        "",
        'if __name__ == "__main__":',
        f"    {starts}(process_config_with_overrides(plan_config(), cli_overrides=sys.argv[1:]), forward_step)",
    ]
    return "\n".join(lines) + "\n"


def _is_needed(line: str, plan_file: PlanFile) -> bool:
    plan = plan_file.best.plan
    if line == "import torch":
        is_narrow = plan.grad_dtype == GradType.BF16_MAIN or plan.main_weights == MainWeights.FP16
        return is_narrow or plan.moment_dtype != MomentType.FP32
    needed = {"squared_relu": plan_file.model.squared_relu, "quick_gelu": plan_file.model.clamped_activation}
    return next((is_used for name, is_used in needed.items() if line.endswith(f" {name}")), True)


def fields(plan_file: PlanFile) -> dict[str, Any]:
    """Return the configuration fields set by model and plan, by their paths."""
    model, plan = plan_file.model, plan_file.best.plan
    if model.position_embedding == "learned" and plan_file.training.seq_len < model.max_positions:
        raise InputError(
            f"Megatron-Bridge's position table is as long as the sequences: {model.name!r} has {model.max_positions} "
            f"positions, seq_len is {plan_file.training.seq_len}"
        )
    arguments = arguments_of(checked_parts(plan_file, "Megatron-Bridge", RULES, limits=LIMITS), plan_file)
    arguments |= {"num_virtual_stages_per_pipeline_rank": plan.vp} if plan.vp > 1 else {}
    table: dict[str, Any] = {"dataset.seq_length": arguments["seq_length"], "model.seq_length": arguments["seq_length"]}
    table |= {"model.should_pad_vocab": True, "tokenizer.tokenizer_type": "NullTokenizer"}
    table |= {"tokenizer.tokenizer_model": None, "tokenizer.vocab_size": arguments["vocab_size"]}
    table["model.add_bias_linear"] = True
    table["model.share_embeddings_and_output_weights"] = model.tied_embeddings
    for name, value in arguments.items():
        if name in _ELSEWHERE or name in _OVERLAPS or name in ("seq_length", "untie_embeddings_and_output_weights"):
            continue
        table[BRIDGE_FIELDS.get(name, f"model.{name}")] = value
    if model.window is not None:
        table["model.window_size"] = (model.window - 1, 0)
    if "model.moe_layer_freq" in table:
        table["model.moe_layer_freq"] = [int(Block.MOE in layer) for layer in model.layers]
    if model.clamped_activation:
        table["model.gated_linear_unit"] = True
    for row in rows(PLAN):  # its recipes and providers have defaults of their own
        is_of_model = row.is_switch and BRIDGE not in row.names and row.key not in _OVERLAPS
        if is_of_model and (value := row.value(plan_file)) is not None:
            table[f"model.{row.key}"] = value
    if model.mla or model.position_embedding == "rope":
        table["model.apply_rope_fusion"] = plan.rope_fusion or not model.mla
    is_sharded = plan.sharding != "none"
    table |= {"ddp.use_distributed_optimizer": is_sharded, "optimizer.use_distributed_optimizer": is_sharded}
    for name in _OVERLAPS[:2]:
        table[f"ddp.{name}"] = name in arguments
    table["optimizer.overlap_param_gather"] = "overlap_param_gather" in arguments
    if plan.sharding in ("zero2", "zero3"):
        table["ddp.average_in_collective"] = False
    table.pop("comm_overlap.tp_comm_overlap", None)
    if plan.cuda_graphs != CudaGraphs.NONE:
        table["model.use_te_rng_tracker"] = True
    if plan.cuda_graphs == CudaGraphs.FULL_ITERATION:
        table["rerun_state_machine.check_for_nan_in_loss"] = False
    table["model.cross_entropy_loss_fusion"] = plan.cross_entropy_fusion != CrossEntropyFusion.UNFUSED
    if plan.offload_layers != OffloadLayers.NONE:
        table |= {"model.cpu_offloading": True, "model.cpu_offloading_weights": False}
    table |= {"checkpoint.save": None, "checkpoint.load": None}
    return table


def _precision(plan: ParallelPlan) -> str:
    return _FP8_PRECISIONS[plan.fp8_scaling] if plan.precision == "fp8" else _PRECISIONS[plan.precision]


def _body(plan_file: PlanFile, provider: str) -> list[str]:
    plan, model = plan_file.best.plan, plan_file.model
    table, tuned = fields(plan_file), _adapters(plan_file)
    sizes = {name: table.pop(f"model.{name}") for name in ("num_layers", "hidden_size", "num_attention_heads")}
    arguments = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
    lines = [f"cfg.model = {provider}({arguments})"]
    lines.append(f"cfg.model.activation_func = {_activation(model)}")
    if model.moe or model.mla:  # otherwise all layers are equal, with plain attention
        spec = "partial(get_gpt_decoder_block_spec, use_transformer_engine=True)"
        lines.append(f"cfg.model.transformer_layer_spec = {spec}")
    if plan.attention != AttentionKernel.FLASH:
        backend = next(word for word, kernel in KERNELS.items() if kernel == plan.attention)
        lines.append(f"cfg.model.attention_backend = AttnBackend.{backend}")
    places = ("model", "train", "dataset", "tokenizer", "ddp", "dist", "optimizer", "rng")
    order = (*places, "rerun_state_machine", "checkpoint")
    ordered = sorted(table.items(), key=lambda item: order.index(item[0].partition(".")[0]))
    for section, items in groupby(ordered, key=lambda item: item[0].partition(".")[0]):
        lines += [] if section == "model" else [""]
        lines += [f"cfg.{path} = {_written(path, value)}" for path, value in items]
    return [
        *lines,
        "",
        f"cfg.mixed_precision = get_mixed_precision_config({_precision(plan)!r})",
        *(
            [f"cfg.mixed_precision.{'fp4' if plan.precision == 'nvfp4' else 'fp8'}_param_gather = {plan.narrow_params}"]
            if plan.precision in NARROW_PRECISIONS
            else []
        ),
        f"cfg.mixed_precision.grad_reduce_in_fp32 = {plan.grad_dtype == GradType.FP32}",
        *(["cfg.mixed_precision.fp8_dot_product_attention = True"] if plan.fp8_attention else []),
        "cfg.comm_overlap = CommOverlapConfig(",
        f"    tp_comm_overlap={plan.tp_overlap},",
        f"    overlap_grad_reduce={plan.grad_reduce_overlap},",
        f"    overlap_param_gather={plan.param_gather_overlap and plan.sharding != 'none'},",
        f"    overlap_moe_expert_parallel_comm={plan.ep_overlap},",
        f"    delay_wgrad_compute={plan.delay_wgrad},",
        ")",
        *(
            ["", peft_lines(tuned)[1], f'cfg.checkpoint.pretrained_checkpoint = os.environ["{_PRETRAINED.name}"]']
            if tuned
            else []
        ),
        "",
        "# Yours to choose.",
        "cfg.train.train_iters = 100",
        'getattr(cfg, "validation", cfg.train).eval_iters = 0  # 0.3 has it among the settings of training',
    ]


def _activation(model: ModelSpec) -> str:
    if model.clamped_activation:
        return "quick_gelu"
    return "F.silu" if model.gated_mlp else "squared_relu" if model.squared_relu else "F.gelu"


def _written(path: str, value: Any) -> str:
    """Return the value of a field as Python, with long runs of equal numbers as products."""
    if path.startswith("optimizer.") and path.endswith("_dtype"):
        return _TYPES[value]
    if isinstance(value, list) and len(value) > 8:
        runs = [(item, len(list(run))) for item, run in groupby(value)]
        return " + ".join(f"[{item!r}] * {times}" for item, times in runs)
    return repr(value)


TARGET = Target(
    name="megatron-bridge",
    title="Megatron-Bridge",
    rules=("megatron-lm", "unknown"),
    job=job,
    versions=("main", _OLD),
    limits=(*RULES, *LIMITS),
    other_limits={_OLD: (*RULES, *LIMITS, *_LACKED_BY_OLD)},
    refused_tuning=refused,
)
