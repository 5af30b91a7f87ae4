"""Export of a plan to a command line of Megatron-LM's pretrain_gpt.py.

Options are those of Megatron-LM d98e8a6 (core 0.20), which its releases have since core 0.18; places in comments are
below megatron/ there.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.base.errors import InputError, refuse
from autoplan.frameworks.common.job import EnvironmentVariable, Job, LaunchVariable, OptionGroup, Target
from autoplan.frameworks.common.option_table import Constant
from autoplan.frameworks.common.rules import Rule, check_legal, check_limits
from autoplan.frameworks.common.shared_rules import only
from autoplan.frameworks.megatron_lm import flagscale, model_options, options, training_options
from autoplan.frameworks.megatron_lm.model_options import has_bias
from autoplan.frameworks.megatron_lm.rules import LIMITS, RULES
from autoplan.frameworks.megatron_lm.state_options import uses_megatron_fsdp
from autoplan.frameworks.megatron_lm.table import Part, words
from autoplan.frameworks.megatron_lm.versions import RELEASES, check_release, lacked
from autoplan.spec.enums import CrossEntropyFusion
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile

# Frameworks with the schedules that Megatron-Core does not have.
_SCHEDULED_BY = {
    "gpipe": "torchtitan",
    "zb-h1": "primus",
    "zb-v": "primus or torchtitan",
    "dualpipe-v": "torchtitan",
}
# Since 2026-06, in no release yet.
NO_TE_LOSS = only(
    "cross_entropy_fusion",
    CrossEntropyFusion.UNFUSED,
    CrossEntropyFusion.NATIVE,
    why="use native",
    source="training/arguments.py:1697",
)
LAYERS = Part(
    "LAYERS",
    "Priced with these, whatever a release defaults to.",
    (
        (Constant("transformer_impl", "transformer_engine"),),
        # Flash attention masks by itself; the masks of a data loader are as large as all scores of a head.
        (Constant("no_create_attention_mask_in_dataloader", True, is_switch=True),),
    ),
)
TRAINING = Part("TRAINING", "Yours to choose; of these only evaluation costs time.", training_options.TRAINING)
DATA = Part(
    "DATA",
    "Mock data; DATA_ARGS='--data-path ... --tokenizer-type ...' in the environment replaces it.",
    training_options.DATA,
)
PACKED_DATA = replace(
    DATA,
    note="Mock data has no samples to spread over ranks: DATA_ARGS='--sft --data-path ... --tokenizer-type ...' names "
    "packed ones.",
)
# GPU generations without block-scaled matrix products.
_BLOCK_SCALED = ("volta", "turing", "ampere", "ada", "hopper", "cdna2", "cdna3")
_TOO_OLD = {"fp8": ("volta", "turing", "ampere", "cdna2"), "mxfp8": _BLOCK_SCALED, "nvfp4": _BLOCK_SCALED}

# Sets the field directly, as its checkpoint conversion does; the option is parsed as an integer (arguments.py:2418).
_TAKE_ANY_ROPE_BASE = ("Megatron-Bridge",)


def job(plan_file: PlanFile, version: str = "main") -> Job:
    """Return the job that starts the plan in a checkout of Megatron-LM or FlagScale; refuse what a release lacks."""
    parts = (*checked_parts(plan_file, limits=_limits(version)), LAYERS, TRAINING)
    groups = tuple(_group(part, plan_file) for part in parts)
    if version in RELEASES:
        check_release(groups, version)
    made = Job(
        framework="Megatron-LM",
        environment=environment(plan_file),
        variables=(
            LaunchVariable(name="MEGATRON_LM_DIR", default=".", note="checkout of github.com/NVIDIA/Megatron-LM"),
            LaunchVariable(name="TRAIN_ITERS", default="100", note="steps", counts_steps=True),
        ),
        program='"$MEGATRON_LM_DIR/pretrain_gpt.py"',
        groups=groups,
        replaceable=_group(PACKED_DATA if plan_file.best.plan.dynamic_cp else DATA, plan_file),
        trailing=('--train-iters "$TRAIN_ITERS"',),
    )
    return flagscale.on_flagscale(made, plan_file) if version == flagscale.VERSION else made


def _group(part: Part, plan_file: PlanFile) -> OptionGroup:
    lines = (words(line, plan_file) for line in part.lines)
    return OptionGroup(name=part.name, note=part.note, lines=tuple(line for line in lines if line))


def checked_parts(
    plan_file: PlanFile,
    name: str = "Megatron-LM",
    rules: tuple[Rule, ...] = RULES,
    limits: tuple[Rule, ...] = LIMITS,
) -> tuple[Part, ...]:
    """Return options of model and plan for framework `name`; raise an error if `rules` or `limits` are broken."""
    model, plan, training = plan_file.model, plan_file.best.plan, plan_file.training
    _check_model(model, name)
    _check_training(plan_file, name)
    if rules is RULES and (target := _SCHEDULED_BY.get(plan.schedule)):
        raise InputError(f"{name} has no schedule {plan.schedule!r}: plan and export for {target}, or plan with 1f1b")
    check_legal(rules, model, training, plan, f"{name} does not support the plan")
    check_limits(limits, model, training, plan, f"{name} has no option for")
    attention = (*model_options.LATENT, model_options.LATENT_ROPE) if model.mla else model_options.ATTENTION
    form = (*model_options.SIZES, *attention, *model_options.WINDOW, *model_options.FORM, model_options.DROPOUT)
    ungated = "squared ReLU" if model.squared_relu else "GELU"
    note = f"The model, as far as it costs time and memory: gated MLPs are taken for SwiGLU, others for {ungated}."
    experts = [Part("EXPERTS", "Its experts.", model_options.EXPERTS)] if model.moe else []
    return (
        Part("MODEL", note, form),
        *experts,
        Part("PLAN", "The plan.", (*options.PLAN, *training_options.PRECISION)),
    )


# -- what pretrain_gpt.py does not support ----------------------------------------------------------------------------


def _check_model(model: ModelSpec, name: str) -> None:
    """Raise an error for an architecture that would silently become a different one."""
    refusals = (
        *((True, part) for part in model.unusual_parts),
        (model.position_embedding == "alibi", "positions by ALiBi"),
        (
            model.num_mtp_layers > 0 and model.position_embedding == "learned",
            "multi-token prediction with learned positions",
        ),
        (model.shares_mtp_layer, "one shared layer for multi-token prediction"),
        (model.norm == "layernorm" and not model.norm_bias, "a layernorm without bias"),
        (model.qk_norm == "full", "a norm over all queries and keys (its --qk-layernorm is per head)"),
        (model.mla is not None and model.qkv_bias, "biases of queries, keys and values beside latent attention"),
        (
            name not in _TAKE_ANY_ROPE_BASE and not float(model.rope_base).is_integer(),
            f"rope_base {model.rope_base:.9g} (Bridge takes it)",
        ),
        (has_bias(model) is None, "biases of some matrices (it has all, or those of queries, keys and values alone)"),
        (
            model.moe is not None and model.moe.router_bias != bool(has_bias(model)),
            "a bias of the router unlike those of other matrices",
        ),
    )
    refuse(refusals, f"{name}'s GPT models cannot express ", f" of model {model.name!r}")


def _check_training(plan_file: PlanFile, name: str) -> None:
    training, device, precision = plan_file.training, plan_file.cluster.device, plan_file.best.plan.precision
    if training.fused_norm is False:
        raise InputError(f"{name} always fuses norms (Transformer Engine): leave fused_norm out")
    if device.generation in _TOO_OLD.get(precision, ()):
        raise InputError(f"precision {precision!r} does not exist on {device.name}: use another one")


def environment(plan_file: PlanFile) -> tuple[EnvironmentVariable, ...]:
    """Return CUDA_DEVICE_MAX_CONNECTIONS, as training/arguments.py:1166 and :1477 assert."""
    plan, device = plan_file.best.plan, plan_file.cluster.device
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    if uses_megatron_fsdp(plan):
        return (EnvironmentVariable(name=queues, value=None, note="Megatron-FSDP refuses 1"),)
    if (plan.tp > 1 or plan.cp > 1) and device.generation != "blackwell":
        return (EnvironmentVariable(name=queues, value="1", note="demanded under tensor or context parallelism"),)
    return ()


def _limits(version: str) -> tuple[Rule, ...]:
    if version in RELEASES:
        return LIMITS
    return (*LIMITS, NO_TE_LOSS, *(flagscale.LIMITS if version == flagscale.VERSION else ()))


TARGET = Target(
    name="megatron-lm",
    title="Megatron-LM",
    rules=("megatron-lm", "unknown"),
    job=job,
    versions=("main", *RELEASES, flagscale.VERSION),
    limits=(*RULES, *_limits("main")),
    other_limits={release: (*RULES, *LIMITS, *lacked(release)) for release in RELEASES}
    | {flagscale.VERSION: (*RULES, *_limits(flagscale.VERSION))},
    unequal_tp=(flagscale.VERSION,),
)
