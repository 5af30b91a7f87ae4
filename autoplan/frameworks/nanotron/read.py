"""Reader of nanotron configurations.

Keys and defaults are those of nanotron 2411b02 (2026-04), src/nanotron/config/.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.common.option_table import read_fields
from autoplan.frameworks.common.options import Options, parse_yaml
from autoplan.frameworks.nanotron.options import (
    ACCUMULATION,
    DTYPE,
    EXPERTS,
    GROUPS,
    HIDDEN_SIZE,
    MESH,
    MICRO_BATCH,
    NUM_HEADS,
    NUM_LAYERS,
    PASSES,
    RECOMPUTE,
    ROPE_BASE,
    SHARED_EXPERT,
    TIED,
    VOCAB_SIZE,
    ZERO_STAGES,
)
from autoplan.frameworks.nanotron.rules import layers_per_stage
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import Schedule
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

# Kernels of exact attention, with or without context parallelism.
_FLASH = ("flash_attention_2", "sdpa", "ring", "ring_flash_triton")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a configuration of nanotron, by its sections."""
    return all(re.search(rf"^ *{key}:", text, re.MULTILINE) for key in ("parallelism", "model_config", "tokens"))


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a configuration; the number of devices is the product of its degrees."""
    options = Options.of_table(parse_yaml(text, "nanotron configuration"))
    # These affect neither time nor memory.
    options.pass_over("checkpoints", "lighteval", "logging", "s3_upload", "tokenizer")
    if (metrics := options.inside("metrics_logging")).count("log_level", 0, least=0):
        metrics.remark("log_level", "norms for the log, every log_detail_interval steps, are not priced")
    metrics.pass_over(*metrics.arguments)
    general = options.inside("general")
    general.pass_over("project", "seed", "step", "consumed_train_samples", "benchmark_csv_path", "ignore_sanity_checks")
    run = general.value("run")
    model_options = options.inside("model")
    config = model_options.inside("model_config")
    if context.model is None:
        name = run if isinstance(run, str) and run.strip() and run.isprintable() else "nanotron model"
        model = _model(config, name)
    else:
        model = context.model
        config.pass_over(*config.arguments)
        for key in [key for key, argument in config.arguments.items() if _is_model(key, argument.value)]:
            config.remark(key, "a model within the model: only what --model says is priced")
    model_options.pass_over("init_method")
    for key in ("resid_pdrop", "attn_pdrop", "embd_pdrop"):
        if config.is_other(key, 0):
            config.remark(key, "priced without dropout")
    tokens, optimizer = options.inside("tokens"), options.inside("optimizer")
    tokens.pass_over("train_steps", "val_check_interval", "limit_val_batches", "limit_test_batches")
    _unpriced(options, model_options, optimizer)
    plan = _plan(options.inside("parallelism"), tokens, optimizer, model)
    seq_len = tokens.count("sequence_length", context.seq_len)
    stages = options.value("data_stages")
    tables = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    lengths = {str(stage.get("sequence_length")) for stage in tables}
    if others := sorted(lengths - {"None", str(seq_len)}):
        options.remark(
            "data_stages", f"a stage has samples of {', '.join(others)[:60]} tokens, those of {seq_len} are priced"
        )
    plan = replace(plan, **DTYPE.read(model_options))
    if context.num_devices not in (None, plan.num_devices):
        raise InputError(f"parallelism starts {plan.num_devices} devices, not {context.num_devices}: change its dp")
    return Launch(
        target="nanotron",
        framework="nanotron",
        model=model,
        training=TrainingSpec(seq_len=context.seq_len or seq_len, precision=plan.precision),
        plan=plan,
        options=options.options(),
        unread=options.unread(),
    )


def _model(config: Options, name: str) -> ModelSpec:
    is_qwen = config.flag("is_qwen2_config")
    if is_qwen == config.flag("is_llama_config"):
        raise InputError("model.model_config is neither of a Llama nor of a Qwen2 model: pass --model")
    config.pass_over("bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "initializer_range", "rms_norm_eps")
    config.pass_over("max_position_embeddings", "pretraining_tp", "rope_scaling", "rope_interleaved", "use_cache")
    config.pass_over("rope_seq_len_interpolation_factor", "z_loss_coefficient", "ring_attn_heads_k_stride")
    num_heads = NUM_HEADS.of(config)
    num_kv_heads = config.count("num_key_value_heads", num_heads)
    has_bias = config.flag("attention_bias") and is_qwen  # Llama's layers ignore the setting
    num_layers = NUM_LAYERS.of(config)
    if num_layers > 10**4:
        raise InputError(f"model.model_config.num_hidden_layers must be at most 10000, got {num_layers}")
    if config.is_other("_attn_implementation", *_FLASH):
        is_gathered = config.value("_attn_implementation") == "llama3_ring_attention"
        config.remark("_attn_implementation", f"{'ring' if is_gathered else 'flash'} attention is priced")
    for key, why in (
        ("_use_doc_masking", "attention over whole sequences is priced, not within documents"),
        ("z_loss_enabled", "the loss is priced without it"),
        ("log_attn_probs", "not priced"),
        ("no_rope_layer", "every layer is priced with rotary embeddings"),
        ("flex_attention_mask", "flash attention is priced"),
    ):
        if config.is_other(key, False):
            config.remark(key, why)
    for key in ("_fused_rotary_emb", "_fused_rms_norm", "_use_qkv_packed"):
        if is_qwen and config.value(key) is False:
            config.remark(key, "priced as fused")
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        **read_fields((HIDDEN_SIZE, VOCAB_SIZE), config),
        num_heads=num_heads,
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
        ffn_size=config.count("intermediate_size", 11008, least=0),
        qkv_bias=has_bias,
        **read_fields((ROPE_BASE, TIED), config),
        window=config.optional_count("sliding_window_size", least=1),
        moe=_experts(config.inside("moe_config"), num_layers) if config.has("moe_config") else None,
    )


def _experts(config: Options, num_layers: int) -> Experts | None:
    config.pass_over("router_aux_loss_coef", "token_dispatcher_type")
    layers = config.value("layers")
    if layers == []:
        return None
    if not (layers is None or (isinstance(layers, list) and all(type(item) is int for item in layers))):
        raise InputError("model.model_config.moe_config.layers must be a list of layer numbers")
    shared = SHARED_EXPERT.of(config) if config.flag("enable_shared_expert") else 0
    experts = Experts(
        **read_fields(EXPERTS, config),
        shared_expert_ffn_size=shared,
        shared_expert_gate=shared > 0,
    )
    if layers in (None, [-1]):
        return experts
    interval = layers[1] - layers[0] if len(layers) > 1 else 1
    if interval > 0:
        first = 0 if layers[0] == interval - 1 else layers[0]
        if layers == [at for at in range(first, num_layers) if (at + 1) % interval == 0]:
            return replace(experts, num_dense_layers=first, interval=interval)
    raise InputError("model.model_config.moe_config.layers must be all from one on, or every n-th, in order")


def _is_model(key: str, value: Any) -> bool:
    """Return whether the value of a key describes a model of its own, such as an encoder of images."""
    return isinstance(value, dict) and key.endswith("_config") and key not in ("text_config", "moe_config")


def _plan(parallelism: Options, tokens: Options, optimizer: Options, model: ModelSpec) -> ParallelPlan:
    dp, tp, pp = read_fields(MESH, parallelism).values()
    if pp > model.num_layers + 2:
        raise InputError(f"parallelism.pp {pp} exceeds the {model.num_layers} layers with embedding and head")
    micro_batch = MICRO_BATCH.of(tokens)
    zero_stage = optimizer.count("zero_stage", 0, least=0)
    sharding = next((kind for kind, stage in ZERO_STAGES.items() if stage == zero_stage), None)
    if sharding is None:
        raise InputError(f"optimizer.zero_stage must be 0 or 1, got {zero_stage}")
    schedule, has_sp, is_async = read_fields(PASSES, parallelism).values()
    layers = layers_per_stage(model, pp)
    return ParallelPlan.derived(
        global_batch=micro_batch * ACCUMULATION.of(tokens) * dp,
        micro_batch=micro_batch,
        tp=tp,
        sp=has_sp,
        pp=pp,
        schedule=schedule if pp > 1 else Schedule.ONE_F_ONE_B,
        layers_per_chunk=layers if len(set(layers)) > 1 else None,
        **read_fields((*GROUPS, RECOMPUTE), parallelism),
        dp_shard=dp,
        sharding=sharding,
        tp_overlap=is_async and tp > 1,
    )


def _unpriced(options: Options, model: Options, optimizer: Options) -> None:
    """Remark on options that change time or memory by an unknown amount."""
    optimizer.pass_over("weight_decay", "weight_decay_exclude_named_params", "clip_grad", "learning_rate_scheduler")
    factory = optimizer.inside("optimizer_factory")
    for section in (factory, optimizer):  # older versions have it next to zero_stage
        section.pass_over("adam_eps", "adam_beta1", "adam_beta2")
        if section.is_other("torch_adam_is_fused", True):
            section.remark("torch_adam_is_fused", "a fused update is priced")
    if factory.is_other("name", "adamW"):
        factory.remark("name", "AdamW is priced")
    if not optimizer.flag("accumulate_grad_in_fp32", True):
        optimizer.remark("accumulate_grad_in_fp32", "gradients of 4 bytes are priced")
    if not (parallelism := options.inside("parallelism")).flag("tp_recompute_allgather", True):
        parallelism.remark("tp_recompute_allgather", "inputs are priced as gathered again")
    if model.count("ddp_bucket_cap_mb", 25) != 25:
        model.remark("ddp_bucket_cap_mb", "buckets of 25 MiB are priced")
    if model.count("make_vocab_size_divisible_by", 1) != 128:
        why = "a vocabulary padded to a multiple of 128 x tp is priced"
        model.remark("make_vocab_size_divisible_by", why, matters=False)
    if options.is_other("profiler"):
        options.remark("profiler", "slows the steps that it looks at", matters=False)


READER = Reader(target="nanotron", recognises=recognises, read=read)
