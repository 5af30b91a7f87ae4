"""Launches from arguments of Megatron-LM, for all frameworks built on Megatron-Core."""

from __future__ import annotations

from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.base.units import format_bytes
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.option_table import Fields, read_fields, remark_assumed
from autoplan.frameworks.common.options import Options
from autoplan.frameworks.megatron_lm import context_options, model_options, options, training_options
from autoplan.frameworks.megatron_lm.harmless import HARMLESS
from autoplan.frameworks.megatron_lm.notation import moe_places
from autoplan.frameworks.megatron_lm.table import Reading, read_lines, rows
from autoplan.frameworks.megatron_lm.training_options import read_precision, read_scaling
from autoplan.readers.model import load_model, preset_models
from autoplan.spec.blocks import Experts, LatentAttention
from autoplan.spec.enums import Precision, RankOrder, Schedule
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

_LARGE_MASK_BYTES = 2**28  # smaller ones are not worth a remark


def launch_of(
    arguments: Options,
    context: LaunchContext,
    *,
    target: str,
    framework: str,
    num_devices: int | None,
    base: ModelSpec | None = None,
    schedule: Schedule | None = None,
    makes_masks: bool = False,
) -> Launch:
    """Return the launch of arguments: `base` is the model to start from, `schedule` a schedule of another framework.

    `makes_masks` tells whether the data loader makes masks of attention scores unless it is told otherwise.
    """
    for key in ("skip_train", "eval_only", "debug_rollout_only"):
        if arguments.flag(key):
            raise InputError(f"{arguments.name(key)}: nothing is trained: leave it out")
    seq_len = context.seq_len or arguments.optional_count("seq_length")
    arguments.value("seq_length")
    if seq_len is None:
        raise InputError(f"{arguments.name('seq_length')} is not in the file: pass --seq-len")
    if context.model is not None:
        for key in [key for key in arguments.arguments if key in options.MODEL_KEYS]:
            arguments.remark(key, "--model wins", matters=False)
        model = context.model
    else:
        model = _model(Reading(arguments=arguments, model=base, seq_len=seq_len))
    if arguments.flag("use_checkpoint_args"):  # they win over its own (megatron/training/checkpointing.py)
        why = "sizes of the model are those of the checkpoint that is loaded, which is not read"
        arguments.remark("use_checkpoint_args", why, matters=context.model is None)
    reading = Reading(arguments=arguments, model=model, seq_len=seq_len)
    read_lines((model_options.DROPOUT, *training_options.PRECISION), reading)
    precision = read_precision(arguments)
    plan = _plan(reading, model, precision, context.num_devices or num_devices, schedule)
    training = TrainingSpec(seq_len=seq_len, precision=precision, **reading.training)
    if (optimizer := arguments.text("optimizer", "adam")) not in ("adam", "adamw"):
        arguments.remark("optimizer", f"priced as Adam, not {str(optimizer)[:30]}")
    remark_assumed(options.OPTIONS, arguments)
    _remark_masks(arguments, plan, seq_len, makes_masks)
    return Launch(
        target=target,
        framework=framework,
        model=model,
        training=training,
        plan=plan,
        options=arguments.options(),
        unread=arguments.unread(HARMLESS),
    )


def _remark_masks(arguments: Options, plan: ParallelPlan, seq_len: int, default: bool) -> None:
    """List masks of attention scores that are large: first and last stages get them whole, a byte per score.

    Source: core/utils.py, get_batch_on_this_tp_rank; the data loader of documents in one sample makes none.
    """
    key = "create_attention_mask_in_dataloader"
    makes = arguments.flag(key, default) and not arguments.flag("dataloader_inter_document_masking")
    mask_bytes = plan.micro_batch * seq_len**2
    if makes and mask_bytes >= _LARGE_MASK_BYTES:
        why = f"masks of {format_bytes(mask_bytes)} a micro-batch, which flash attention does not use, are not priced"
        arguments.remark(key, why, default="on")


def _model(reading: Reading) -> ModelSpec:
    """Return the model in the arguments, completed with the model of `reading`."""
    base, fields = reading.model, reading.fields
    fields["mla"] = _latent_attention(reading)
    if base is not None and base.layer_pattern is not None:
        raise InputError(f"model {base.name!r} is a hybrid, which is not read from this file: pass --model")
    read_lines(
        (*model_options.SIZES, *model_options.ATTENTION, *model_options.WINDOW, *model_options.FORM), reading, base
    )
    fields["moe"] = _experts(reading)
    if fields["position_embedding"] != "learned":
        fields["max_positions"] = 0
    model = ModelSpec(name="megatron", **fields)
    if model.moe is not None and not any("mlp" in layer for layer in model.layers):
        model = replace(model, ffn_size=0)
    return shipped_model(model, base)


def shipped_model(model: ModelSpec, base: ModelSpec | None) -> ModelSpec:
    """Return the shipped model with exactly this architecture, preferably the one that a file starts from."""
    for preset in ([base] if base else []) + [load_model(name) for name in preset_models()]:
        if replace(preset, name=model.name, aliases=(), sources=()) == model:
            return preset
    return replace(model, name=base.name) if base else model


def _latent_attention(reading: Reading) -> LatentAttention | None:
    base = reading.model.mla if reading.model else None
    if not reading.arguments.flag("multi_latent_attention", base is not None):
        return None
    return LatentAttention(**read_fields(rows(model_options.LATENT), reading.arguments, base))


def _experts(reading: Reading) -> Experts | None:
    arguments, fields = reading.arguments, reading.fields
    base = reading.model.moe if reading.model else None
    if not arguments.optional_count("num_experts", base.num_experts if base else None):
        return None
    places = arguments.value("moe_layer_freq")
    dense, interval = (base.num_dense_layers, base.interval) if base else (0, 1)
    if places is not None:
        dense, interval = moe_places(places, fields["num_layers"])
    sizes = read_fields(rows(model_options.EXPERTS), arguments, base)
    sizes["expert_ffn_size"] = sizes["expert_ffn_size"] or fields["ffn_size"]
    return Experts(**sizes, router_bias=fields["mlp_bias"], num_dense_layers=dense, interval=interval)


def _plan(
    reading: Reading, model: ModelSpec, precision: Precision, num_devices: int | None, schedule: Schedule | None
) -> ParallelPlan:
    fields = reading.fields
    fields |= {"precision": precision, "fp8_scaling": read_scaling(reading.arguments)}
    fields["dp"] = _replicas(reading.arguments, num_devices)
    read_lines(options.PLAN, reading)
    has_experts, has_latents = model.moe is not None, model.mla is not None
    return ParallelPlan.derived(
        has_experts=has_experts,
        has_latents=has_latents,
        schedule=schedule,
        **_consistent(fields, has_experts=has_experts),
    )


def _replicas(arguments: Options, num_devices: int | None) -> int:
    """Return the number of model replicas on this many devices."""
    rows = {"tensor": options.TP, "context": context_options.CP, "pipeline": options.PP}
    degrees = {name: row.of(arguments) for name, row in rows.items()}
    if num_devices is None:
        raise InputError("the number of devices is not in the file: pass --devices")
    for name, degree in (*degrees.items(), ("the number of devices", num_devices)):
        if not 1 <= degree <= 10**6:
            raise InputError(f"{name} must be between 1 and 1,000,000, got {degree}")
    tp, cp, pp = degrees.values()
    dp, remainder = divmod(num_devices, tp * cp * pp)
    if remainder or not dp:
        raise InputError(
            f"tp {tp} x cp {cp} x pp {pp} does not divide the {num_devices} devices that are started: pass --devices"
        )
    return dp


def _consistent(fields: Fields, *, has_experts: bool) -> Fields:
    """Return the fields of a plan without options that have no effect, as Megatron-LM treats them."""
    return fields | {
        "ep": fields["ep"] if has_experts else 1,
        "etp": fields["etp"] or None if has_experts else None,
        "ep_overlap": fields["ep_overlap"] and has_experts,
        "rank_order": fields["rank_order"] if fields["pp"] > 1 else RankOrder.DP_BEFORE_PP,
    }
