"""Reader of NeMo AutoModel's YAML (36044ad); places are below nemo_automodel/."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.automodel.options import (
    COMPILATION,
    COSTLESS,
    DEGREES,
    DISPATCHERS,
    DISTRIBUTED,
    DISTRIBUTED_COSTLESS,
    MAIN_WEIGHTS,
    OFFLOAD,
    PIPELINE_COSTLESS,
    RECOMPUTE,
    REDUCTION,
    SCALES,
    SCHEDULES,
    STAGES,
)
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread, priced_as_even
from autoplan.frameworks.common.option_table import Fields, read_fields, remark_assumed
from autoplan.frameworks.common.options import Options, parse_yaml, show
from autoplan.frameworks.fsdp2.options import STAY_GATHERED, is_fetched
from autoplan.frameworks.torchtitan.options import counted_layers
from autoplan.readers.model import find_preset
from autoplan.spec.enums import Dispatcher, MainWeights, Offload, Precision, Sharding
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning
from autoplan.spec.lengths import UNEVEN, Batching
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, even_chunks
from autoplan.spec.training import TrainingSpec

_EXPERTS = "model.layers.0.mlp.experts"  # as its models call the module of all experts
_ALL = ("*_proj", "*proj", "*.proj", "all-linear")
_GROUPED = ("torch_mm", "gmm", "te")
_ADAM = re.compile(r"(^|\.)(Fused)?AdamW?$")
_SIZES = re.compile(r"^(num_.*(layers|heads|experts)|hidden_size|\w*intermediate_size|vocab_size|n_routed_experts)$")
_PRICED = re.compile(r"(Train|Finetune|Pretrain|Benchmarking)\w*NextTokenPrediction$")  # recipes (recipes/llm/)
_OTHER_TASK = re.compile(r"\w*For(ImageTextToText|Multimodal\w*|SequenceClassification|\w*Encoder|SpeechSeq2Seq)\b")
_LOSS = ".MaskedCrossEntropy"
_FILLING = ("MegatronPretraining", "NanogptDataset")  # whose sequences run on over the ends of documents
_LENGTHS = ("seq_len", "seq_length", "max_length")


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a recipe of AutoModel."""
    if not name.endswith((".yaml", ".yml")):
        return False
    return all(re.search(rf"^{key}:", text, re.MULTILINE) for key in ("step_scheduler", "distributed", "model"))


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a recipe; a recipe never contains the number of devices, which the user gives."""
    options = Options.of_table(parse_yaml(text, "the file"))
    is_table = isinstance(options.value("recipe"), dict)
    recipe = options.inside("recipe").text("_target_") if is_table else options.text("recipe")
    if recipe is not None and not _PRICED.match(name := recipe.rpartition(".")[2]):
        raise InputError(f"recipe {name[:60]}: only training on the next token is priced")
    model = _model(options, context)
    seq_len, batching = _length(options, context)
    tuning = _finetuning(options, model)
    training = TrainingSpec(seq_len=seq_len, precision=_precision(options), finetuning=tuning, batching=batching)
    if context.num_devices is None:
        raise InputError("the number of devices is not in the file: pass --devices")
    plan = _plan(options, model, context.num_devices, training.precision)
    options.pass_over(*COSTLESS)
    optimizer = options.inside("optimizer")
    if not _ADAM.search(str(optimizer.value("_target_", "Adam"))):
        optimizer.remark("_target_", "priced as Adam")
    if optimizer.has("foreach") and not optimizer.flag("foreach"):
        optimizer.remark("foreach", "priced as on")
    optimizer.pass_over("lr", "betas", "eps", "weight_decay", "fused", "foreach", "adam_w_mode", "bias_correction")
    optimizer.pass_over("_target_", "capturable", "amsgrad", "maximize", "differentiable")
    loss, dataset, compiling = (options.inside(name) for name in ("loss_fn", "dataset", "compile"))
    if not str(loss.value("_target_", _LOSS)).endswith(_LOSS):
        loss.remark("_target_", "priced with whole logits")
    remark_assumed(COMPILATION, compiling)
    for section in (loss, dataset, compiling):
        section.pass_over(*section.arguments)
    return Launch(
        target="automodel",
        framework="nemo-automodel",
        model=model,
        training=training,
        plan=plan,
        options=options.options(),
        unread=options.unread(),
    )


def _model(options: Options, context: LaunchContext) -> ModelSpec:
    section = options.inside("model")
    if (made := _OTHER_TASK.search(str(section.value("_target_")))) is not None:
        raise InputError(f"model._target_ {made[0]}: only training of text models on the next token is priced")
    config = section.inside("config") if isinstance(section.value("config"), dict) else section
    name = config.text("pretrained_model_name_or_path") or section.text("pretrained_model_name_or_path")
    section.pass_over("_target_", "trust_remote_code", "use_liger_kernel", "is_meta_device", "name_or_path")
    config.pass_over("_target_", "trust_remote_code")
    for key in config.arguments if context.model is None else ():
        if _SIZES.search(key):
            raise InputError(f"{config.name(key)} changes the model {show(name)}: pass --model")
    if (attention := section.text("attn_implementation")) == "eager":
        section.remark("attn_implementation", "priced as flash attention")
    elif attention:
        section.pass_over("attn_implementation")
    backend = section.inside("backend")
    backend.pass_over("_target_", "enable_hf_state_dict_adapter", "enable_fsdp_optimizations")
    backend.pass_over("fake_balanced_gate")
    backend.defaults["rms_norm"] = "torch_fp32"  # components/models/common/utils.py:340
    for key, priced in (("attn", "te"), ("linear", "te"), ("rms_norm", "te"), ("rope_fusion", True)):
        if backend.is_other(key, priced):
            backend.remark(key, "priced as fused" if priced is True else f"priced as {priced}")
    if backend.is_other("experts", *_GROUPED):
        backend.remark("experts", "priced with grouped products in 16 bits")
    model = context.model or (find_preset(name) if name is not None else None)
    if model is None:
        raise InputError(f"model {show(name)} is not a known model: pass --model")
    if model.mla is not None:  # no multi-token prediction for DeepSeek-V3 (components/models/deepseek_v3/model.py)
        return replace(model, num_mtp_layers=0)
    return model


def _length(options: Options, context: LaunchContext) -> tuple[int, Batching]:
    """Return (tokens of a sequence, how samples form a sequence: components/datasets/llm/packed_sequence.py)."""
    packed, dataset = options.inside("packed_sequence"), options.inside("dataset")
    packed.pass_over("post_tokenize_hook_fn", "collate_max_length")
    packed.pass_over("split_across_pack", "max_packs", "attn_implementation", "packing_strategy", "packing_ratio")
    packed.pass_over("drop_long_samples", "pretokenize", "split_samples", "max_sample_packing")
    size = packed.optional_count("packed_sequence_size", 0) or packed.optional_count("pack_size", 0)
    key = next((key for key in _LENGTHS if dataset.has(key)), None)
    length = context.seq_len or size or (dataset.optional_count(key) if key else None)
    fills = str(dataset.value("_target_")).endswith(_FILLING)
    batching: Batching = "packed" if size else "joined" if fills else "padded"
    why = priced_as_even(batching, context)
    if key and why and "mock" not in str(dataset.value("_target_")).casefold():
        dataset.remark(key, why, matters=batching in UNEVEN)
    if not length:
        raise InputError("the sequence length comes from the dataset, which is not in the file: pass --seq-len")
    return length, batching


def _precision(options: Options) -> Precision:
    fp8 = options.inside("fp8")
    if fp8.arguments and fp8.flag("enabled", True):
        remark_assumed(SCALES, fp8)
        fp8.pass_over(*fp8.arguments)
        return Precision.FP8
    fp8.pass_over(*fp8.arguments)
    return Precision.BF16


def _finetuning(options: Options, model: ModelSpec) -> FineTuning | None:
    """Return the adapters of `peft` (components/_peft/lora.py, PeftConfig).

    Experts are no linear modules, so only a pattern of their names gives them adapters (module_matcher.py, `match`).
    """
    peft = options.inside("peft")
    if not peft.arguments:
        return None
    matches_all = peft.flag("match_all_linear")
    peft.pass_over("_target_", "use_triton", "lora_dtype", "lora_A_init", "dropout_position", "lora_A_init_method")
    targets = peft.value("target_modules")
    names = [str(name) for name in (targets if isinstance(targets, list) else [targets])]
    takes_all = matches_all or targets is None
    if takes_all and not any("lm_head" in str(name) for name in peft.words("exclude_modules")):
        key = "match_all_linear" if matches_all else "target_modules"
        peft.remark(key, "adapters of the head, and their copy of the logits, are not priced", default="all")
    if takes_all or any(name in _ALL for name in names):
        chosen: tuple[str, ...] = (ALL_LINEAR,)
    else:
        others = [name for name in names if not fnmatchcase(_EXPERTS, name)]
        chosen = tuple(name.rstrip("*.").rpartition("*")[2].rpartition(".")[2] for name in others)
    if peft.value("exclude_modules"):
        peft.remark("exclude_modules", "adapters are priced on all that target_modules names")
    quantized = options.inside("quantization") if options.value("quantization") else Options.of_table({})
    four, eight = quantized.flag("load_in_4bit"), quantized.flag("load_in_8bit")
    quantized.pass_over("_target_", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type")
    doubled = quantized.flag("bnb_4bit_use_double_quant", True)  # components/quantization/qlora.py
    return FineTuning(
        rank=peft.count("dim", 8),
        alpha=peft.count("alpha", 32),
        targets=chosen,
        dropout=peft.number("dropout", 0.0),
        dora=peft.flag("use_dora"),
        adapts_experts=model.moe is None or (not takes_all and any(fnmatchcase(_EXPERTS, name) for name in names)),
        quantization=("nf4-dq" if doubled else "nf4") if four else "int8" if eight else "none",
    )


def _degrees(table: Options, num_devices: int) -> tuple[Fields, int, int]:
    """Return (degrees, data-parallel size, copies of the shards) of section `distributed`."""
    for key, argument in list(table.arguments.items()):  # "none" means not set
        if argument.value in ("none", "None"):
            table.arguments.pop(key)
    degrees = read_fields(DEGREES, table)
    table.pass_over(*DISTRIBUTED_COSTLESS)
    remark_assumed(DISTRIBUTED, table)
    needed = degrees["tp"] * degrees["cp"] * degrees["pp"]
    if num_devices % needed:
        raise InputError(f"tp, cp and pp need a multiple of {needed} devices, there are {num_devices}: pass --devices")
    dp = num_devices // needed
    if (size := table.optional_count("dp_size")) not in (None, 0, dp):
        raise InputError(f"dp_size is {size}, {num_devices} devices leave {dp}: pass --devices {needed * (size or 1)}")
    copies = degrees.pop("dp_replicate") or 1
    if dp % copies:
        raise InputError(f"dp_replicate_size {copies} does not divide the {dp} replicas")
    return degrees, dp, copies


def _plan(options: Options, model: ModelSpec, num_devices: int, precision: Precision) -> ParallelPlan:
    table, steps = options.inside("distributed"), options.inside("step_scheduler")
    degrees, dp, copies = _degrees(table, num_devices)
    strategy = table.text("strategy", "fsdp2")
    if strategy not in ("fsdp2", "ddp", "megatron_fsdp"):
        raise InputError(f"strategy {show(strategy)} is not one of fsdp2, ddp, megatron_fsdp")
    if strategy == "megatron_fsdp":
        table.remark("strategy", "priced as FSDP2")
    sharding = _sharding(table, degrees)
    if strategy == "ddp" or dp * degrees["cp"] == 1:
        sharding = Sharding.NONE
    micro = steps.count("local_batch_size", 1)
    steps.pass_over(*(key for key in steps.arguments if key not in ("local_batch_size", "global_batch_size")))
    total = steps.count("global_batch_size", micro * dp)
    rounds = total // max(micro * dp, 1)
    pipeline = _pipeline(options, table, model, degrees["pp"], local=micro, rounds=rounds)
    backend = options.inside("model").inside("backend")
    dispatcher = backend.word("dispatcher", DISPATCHERS, "deepep")
    if degrees["ep"] > 1 and dispatcher == Dispatcher.ALL_GATHER:  # components/moe/experts.py:500
        backend.remark("dispatcher", "sums outputs of the experts in fp32; priced in 16 bits")
    if model.moe is not None and strategy == "fsdp2" and rounds > 1:
        if backend.flag("enable_fsdp_optimizations"):  # components/moe/fsdp_mixin.py:151
            why = "weights stay gathered from the first micro-batch of a step to the last; priced as sharded"
            backend.remark("enable_fsdp_optimizations", why)
        elif not table.inside("moe").flag("wrap_outer_model", True):  # components/distributed/utils.py:253
            why = "gradients are reduced in every micro-batch of a step; priced as once"
            table.inside("moe").remark("wrap_outer_model", why)
    policy = table.inside("mp_policy")
    policy.pass_over("_target_", "param_dtype", "output_dtype", "cast_forward_inputs")
    weights = MAIN_WEIGHTS.read(options.inside("model"))
    fields: Fields = {**degrees, **RECOMPUTE.read(table), **weights, **REDUCTION.read(policy), **pipeline}
    if strategy == "ddp":  # which has no policy of mixed precision
        fields |= REDUCTION.read(Options.of_table({}))
        if weights["main_weights"] != MainWeights.BF16:
            table.remark("strategy", "its products take the type of the weights, fp32, and are priced in 16 bits")
    fields["offload"] = _offload(table, {"sharding": sharding, "pp": degrees["pp"]})
    fields |= {"dispatcher": dispatcher} if degrees["ep"] > 1 else {}
    fields.setdefault("micro_batch", micro)
    return ParallelPlan.derived(
        has_experts=model.moe is not None,
        **fields,
        etp=1,
        dp_replicate=copies if sharding != Sharding.NONE else 1,
        dp_shard=dp // copies if sharding != Sharding.NONE else dp,
        sharding=sharding,
        precision=precision,
        global_batch=total,
    )


def _sharding(table: Options, degrees: Fields) -> Sharding:
    """Return what FSDP2 shards; in a pipeline, whose stages keep their weights gathered, it is ZeRO-3."""
    moe, is_piped = table.inside("moe"), degrees["pp"] > 1
    moe.pass_over("ignore_router_for_ac", "mp_policy", "_target_", "wrap_outer_model")
    if moe.is_other("lm_head_precision", "bf16", "bfloat16", "torch.bfloat16"):
        moe.remark("lm_head_precision", "priced as bf16")
    default = not is_piped
    if degrees["ep"] > 1:  # _transformers/infrastructure.py:407
        default = moe.flag("reshard_after_forward")
    moe.pass_over("reshard_after_forward")
    reshards = table.flag("reshard_after_forward", default)
    if is_piped and reshards:
        section = table if table.has("reshard_after_forward") else moe
        section.remark(
            "reshard_after_forward", "weights are gathered for every micro-batch, but priced as once per step"
        )
    return Sharding.ZERO3 if is_piped or reshards else Sharding.ZERO2


def _offload(table: Options, states: Fields) -> Offload:
    """Return what CPUOffloadPolicy stores on the host."""
    policy = table.value(OFFLOAD)
    if policy is None or is_fetched(states):
        return Offload.NONE if policy is None else Offload.PARAMETERS
    table.remark(OFFLOAD, STAY_GATHERED)
    return Offload.NONE


def _pipeline(
    options: Options, table: Options, model: ModelSpec, pp: int, *, local: int, rounds: int
) -> dict[str, Any]:
    """Return schedule, chunks and micro-batch (components/distributed/pipelining/config.py)."""
    section = table.inside("pipeline")
    section.pass_over(*PIPELINE_COSTLESS)
    if pp == 1:
        section.pass_over(*section.arguments)
        return {}
    word = str(section.value("pp_schedule", "1f1b")).casefold()
    if word not in SCHEDULES:
        raise InputError(f"pp_schedule {show(word)} is not one of {', '.join(SCHEDULES)}")
    is_single = word in ("1f1b", "gpipe")
    layers = section.optional_count("layers_per_stage")
    stages = -(-model.num_layers // layers) if layers else pp if is_single else 2 * pp
    rounding = section.text("round_virtual_stages_to_pp_multiple")
    if stages % pp and rounding not in ("up", "down"):
        raise InputError(
            f"layers_per_stage makes {stages} stages, which pp_size {pp} does not divide: change one of them"
        )
    stages = -(-stages // pp) * pp if rounding == "up" else max(stages // pp, 1) * pp
    if rounds > 1:
        why = f"the pipeline is filled and drained {rounds} times per step, but priced as once"
        options.remarks.append(Unread(option="step_scheduler.global_batch_size", value="", why=why))
    micro = section.count("pp_microbatch_size", 1)
    if local % micro:
        raise InputError(f"pp_microbatch_size {micro} does not divide local_batch_size {local}")
    base, more = divmod(model.num_layers, stages)  # the first stages get one more (pipelining/functional.py:136)
    counts = tuple(base + (stage < more) for stage in range(stages))
    if (parts := section.value(STAGES)) is not None:
        names = [[str(name).removeprefix("model.") for name in part] for part in parts if isinstance(part, list)]
        counts = counted_layers(names, model.num_layers)
        if len(counts) != stages:
            raise InputError(f"{STAGES} has {len(counts)} stages, layers_per_stage makes {stages}: make them equal")
    return {
        "schedule": SCHEDULES[word],
        "vp": stages // pp,
        "micro_batch": micro,
        "layers_per_chunk": counts if counts != even_chunks(model.num_layers, stages) else None,
    }


READER = Reader(target="automodel", recognises=recognises, read=read)
