"""Reader of GPT-NeoX: a YAML file, or a script that hands several of them to deepy.py.

Keys and defaults are those of GPT-NeoX ea7aefd8 (2026-05), places below megatron/.  deepy.py joins the files that it is
given, of which none may repeat a key of another (neox_arguments/arguments.py, from_ymls).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.option_table import Fields, read_fields, remark_assumed
from autoplan.frameworks.common.options import Argument, Options, parse_yaml, show
from autoplan.frameworks.common.shell import SUFFIXES, script_of
from autoplan.frameworks.deepspeed.read import COSTLESS_PRECISION, read_states, remark_unpriced
from autoplan.frameworks.gpt_neox.options import (
    ACCUMULATION,
    ASSUMED,
    FORM,
    GATED,
    HARMLESS,
    LENGTH,
    MICRO_BATCH,
    MODEL_KEYS,
    NORMS,
    PP,
    RECOMPUTE,
    SIZES,
    SP,
    TOTAL,
    TP,
    VOCABULARIES,
    VOCABULARY_FILES,
    has_section,
)
from autoplan.frameworks.megatron_lm.launch import shipped_model
from autoplan.frameworks.megatron_lm.read import Entry, started
from autoplan.readers.model import find_preset
from autoplan.spec.enums import AttentionKernel, Precision, ReduceType, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

FRAMEWORK = "megatron-deepspeed"  # whose engine and layers it shares
_KEY = re.compile(r"""^[\s{,]*["']?pipe[-_]parallel[-_]size["']?\s*:""", re.MULTILINE)
_COMMAND = re.compile(r"\bdeepy\.py\s+\S")
_TRAIN = ("train.py", "pretrain_gpt2.py")
_FOLDER_OPTIONS = ("-d", "--conf_dir")
_OTHER_OPTIONS = ("-H", "--hostfile", "--wandb_group", "--wandb_run_name", "--wandb_team", "--autotuning")
_WAY_OUT = "read the script that hands deepy.py its other files, or pass --set KEY=VALUE"
_ADAM = ("adam", "adamw", "cpu_adam", "cpu_torch_adam")
MAX_FILES = 20


def recognises(name: str, text: str) -> bool:
    """Return whether a file has a key of GPT-NeoX's own, or is a script that starts deepy.py."""
    if name.endswith(SUFFIXES):
        return _COMMAND.search(text) is not None
    return name.endswith((".yml", ".yaml", ".json")) and _KEY.search(text) is not None


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a file, or of those that a script names; `--set KEY=VALUE` adds a key or replaces it."""
    options, devices = _options(text, context)
    _refuse_other_losses(options)
    tp, pipe = max(TP.of(options), 1), PP.of(options)
    model = _model(options, context)
    seq_len = context.seq_len or LENGTH.of(options)
    options.value(LENGTH.key)
    precision = _precision(options)
    batch = _batch(options, context.num_devices or devices, tp, max(pipe, 1))
    plan = ParallelPlan.derived(
        **batch | _states(options, batch["dp_shard"], precision, pipe),
        tp=tp,
        pp=max(pipe, 1),
        layers_per_chunk=_uneven_stages(options, model, max(pipe, 1)),
        precision=precision,
        recompute=RECOMPUTE.of(options),
        attention=_attention(options, context.model is not None),
        dropout=_has_dropout(options),
        reduce_dtype=_reduce_dtype(options),
    )
    _remark(options, tp)
    return Launch(
        target="gpt-neox",
        framework=FRAMEWORK,
        model=model,
        training=TrainingSpec(seq_len=seq_len, precision=precision),
        plan=plan,
        options=options.options(),
        unread=options.unread(HARMLESS),
    )


# -- the files --------------------------------------------------------------------------------------------------------


def _options(text: str, context: LaunchContext) -> tuple[Options, int | None]:
    """Return the options of all files together, and the devices if a script sets their number."""
    devices, missing = None, list[Unread]()
    if _COMMAND.search(text) and not _KEY.search(text):
        script = script_of(text, context)
        _, words = started(script, Entry(_deepy_at, lambda inner: "deepy.py" in inner), context)
        if words is None:
            raise InputError("no command of the script starts deepy.py")
        devices = _devices(text)
        missing += script.unread()
        files = list[tuple[str, str]]()
        for file in _files_of(words):
            if found := read_beside(file, context.folder):
                files.append(found)
            else:
                why = f"{file.rpartition('/')[2][:60]} is not beside this file: put it there"
                missing.append(Unread(option=file[:120], value="read by deepy.py", why=why))
        if not files:
            raise InputError(f"{'; '.join(item.why for item in missing) or 'deepy.py is given no file'}"[:300])
    else:
        files = [(text, "GPT-NeoX configuration")]
    arguments: dict[str, Argument] = {}
    for content, title in files:
        for key, value in parse_yaml(content, title).items():
            name = key.replace("-", "_")
            if name in arguments:
                raise InputError(f"{title}: {show(key)} is set twice, which GPT-NeoX refuses: leave one of them out")
            arguments[name] = Argument(key, value if isinstance(value, str) else show(value), name, value)
    for key, word in context.variables:
        name = key.replace("-", "_").lower()
        arguments[name] = Argument(key, word, name, parse_yaml(f"value: {word}", f"--set {key[:40]}")["value"])
    extra = arguments["deepspeed_extra_args"].value if "deepspeed_extra_args" in arguments else None
    for key, value in (extra if isinstance(extra, dict) else {}).items():  # keys of DeepSpeed's own file
        arguments.setdefault(str(key), Argument(f"deepspeed_extra_args.{key}", show(value), str(key), value))
    options = Options(arguments.values(), remarks=missing, way_out=_WAY_OUT)
    options.pass_over("deepspeed_extra_args")
    return options, devices


def _devices(text: str) -> int | None:
    """Return the devices in a script's Slurm directives: deepy.py starts a rank on each, whatever the tasks are."""
    directives = "\n".join(re.findall(r"(?m)^\s*#SBATCH\s+(.*)$", text))
    per_node = re.search(r"--(?:gres|gpus-per-node)[= ](?:gpu:)?(?:[a-z]\w*:)?(\d{1,3})\b", directives, re.IGNORECASE)
    nodes = re.search(r"(?:--nodes|-N)[= ]?(\d{1,5})\b", directives)
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1) or None if per_node else None


def _deepy_at(words: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(words) if word.rpartition("/")[2] == "deepy.py"), None)


def _files_of(words: Sequence[str]) -> list[str]:
    """Return the configuration files in the arguments of deepy.py: the program comes first."""
    folder, names, skips = "", list[str](), False
    for option, word in zip(("", *words), words, strict=False):
        if skips:
            skips = False
            folder = word if option in _FOLDER_OPTIONS else folder
        elif word in (*_FOLDER_OPTIONS, *_OTHER_OPTIONS):
            skips = True
        elif not word.startswith("-"):
            names.append(word)
    if not names:
        return []
    program, *files = names
    if program.rpartition("/")[2] not in _TRAIN:
        raise InputError(f"deepy.py starts {program[-60:]}, which does not train")
    prefix = f"{folder.rstrip('/')}/" if folder else ""
    return [prefix + (file if file.endswith((".yml", ".json")) else f"{file}.yml") for file in files[:MAX_FILES]]


def _refuse_other_losses(options: Options) -> None:
    loss = options.text("train_impl", "normal")
    if loss != "normal":
        raise InputError(f"train_impl {show(loss)}: only training on the next token is priced")
    for key in ("soft_prompt_tuning", "adapters"):
        if options.has(key) and options.inside(key).flag("enabled", key == "adapters"):
            raise InputError(f"{options.name(key)} is not priced: only full training is")


# -- the model --------------------------------------------------------------------------------------------------------


def _model(options: Options, context: LaunchContext) -> ModelSpec:
    if context.model is not None:
        for key in filter(options.has, sorted(MODEL_KEYS)):
            options.remark(key, "--model wins", matters=False)
        return context.model
    if options.count("moe_num_experts", 1) > 1:
        raise InputError("the experts of GPT-NeoX are not read from their options: pass --model")
    sizes, form = read_fields(SIZES, options), read_fields(FORM, options)
    if sizes["num_kv_heads"] == sizes["num_heads"]:
        sizes["num_kv_heads"] = None
    if form["position_embedding"] == "none" and options.is_other("pos_emb", "none"):
        options.remark("pos_emb", "priced without a table of positions", matters=False)
    positions = options.optional_count("max_position_embeddings", least=1)
    is_learned = form["position_embedding"] == "learned"
    norm, has_weights = options.word("norm", NORMS, "layernorm")
    form["norm_bias"] |= norm != "layernorm" or not has_weights  # which have none
    is_parallel, is_tied = options.flag("gpt_j_residual"), options.flag("gpt_j_tied")
    ffn_size, is_gated = _mlp(options, sizes["hidden_size"])
    if options.text("mlp_type", "regular") == "llama":
        form["mlp_bias"] = False
    model = ModelSpec(
        name="gpt-neox",
        vocab_size=_vocabulary(options),
        **sizes | form,
        attention_output_bias=form["qkv_bias"],
        ffn_size=ffn_size,
        gated_mlp=is_gated,
        norm=norm,
        norm_weights=has_weights,
        shared_norm=is_parallel and is_tied,
        max_positions=(positions or LENGTH.of(options)) if is_learned else 0,
    )
    return shipped_model(model, None)


def _mlp(options: Options, hidden: int) -> tuple[int, bool]:
    """Return (width of the MLP behind its activation, whether it has a gate): model/transformer.py, ParallelMLP.

    A gate leaves a third of the width that a file names to each of the two halves, rounded up to a multiple.
    """
    activation = options.text("activation", "gelu") or "gelu"
    kind = options.text("mlp_type", "regular")
    if kind == "llama":  # before 2024: LLaMAParallelMLP
        return 256 * -(-int(8 * hidden / 3) // 256), True
    width = options.optional_count("intermediate_size", least=1)
    if width is None:
        width = int(options.number("expansion_factor", 4.0) * hidden)
    multiple = options.count("mlp_multiple_of", 1)
    if activation not in GATED:
        return 2 * multiple * -(-width // (2 * multiple)), False
    if not options.has("intermediate_size"):
        options.remark("activation", "the width of a gated MLP is that of today; versions before 2024 take another")
    return multiple * -(-(int(width * 2 / 3) // 2) // multiple), True


def _vocabulary(options: Options) -> int:
    """Return the tokens of the vocabulary, which the tokenizer decides; GPT-NeoX pads them."""
    if size := options.optional_count("padded_vocab_size") or options.optional_count("vocab_size"):
        return size
    kind, file = options.text("tokenizer_type", "GPT2BPETokenizer"), str(options.value("vocab_file") or "")
    known = next((size for name, size in VOCABULARY_FILES.items() if name in file), None)
    preset = find_preset(file.rpartition("/")[0].rpartition("/")[2]) if "/" in file else None
    size = known or VOCABULARIES.get(str(kind)) or (preset.vocab_size if preset else None)
    if size is None:
        raise InputError(f"the vocabulary of {show(kind)} is not in the file: pass --set vocab_size=N, or --model")
    if known is None:
        key = "vocab_file" if preset else "tokenizer_type"
        options.remark(
            key, f"its vocabulary is taken as {size:,} tokens: --set vocab_size=N", default="GPT2BPETokenizer"
        )
    return size


def _attention(options: Options, has_model: bool) -> AttentionKernel:
    """Return the kernel of attention: GPT-NeoX's own, which keeps the scores, unless flash is named."""
    config = options.value("attention_config")
    words = re.findall(r"[a-z_]+", str(config)[:20_000].casefold()) if config is not None else ["global"]
    kinds, is_fused = set(words) - {"none"}, options.flag("scaled_upper_triang_masked_softmax_fusion")
    if (others := kinds - {"global", "flash"}) and not (has_model and others <= {"local"}):
        raise InputError(f"attention_config: {', '.join(sorted(others))[:60]} is not priced: only global and flash are")
    if kinds == {"flash"}:
        return AttentionKernel.FLASH2
    if kinds != {"global"}:
        options.remark("attention_config", "every layer is priced as global")
    if not is_fused:
        options.remark("scaled_upper_triang_masked_softmax_fusion", "a fused softmax is priced", default="false")
    return AttentionKernel.UNFUSED


# -- the plan ---------------------------------------------------------------------------------------------------------


def _precision(options: Options) -> Precision:
    words = {"fp16": Precision.FP16, "bfloat16": Precision.BF16, "fp32": None, None: None}
    named = options.word("precision", words)
    found = set[Precision]()
    if has_section(options, "fp16"):  # which older files give the type of 16 bits
        types = {"fp16": Precision.FP16, "bfloat16": Precision.BF16, None: Precision.FP16}
        found.add(options.inside("fp16").word("type", types))
    found |= {Precision.BF16} if has_section(options, "bf16") else set()
    found |= {named} if named else set()
    for key in filter(options.has, ("fp16", "bf16")):
        options.inside(key).pass_over("fp16", "bf16", "type", *COSTLESS_PRECISION)
    if len(found) > 1:
        raise InputError("precision, fp16 and bf16 contradict each other: leave one of them")
    if not found:
        raise InputError(f"neither fp16 nor bf16 is on, and 32-bit training is not priced: {_WAY_OUT}")
    return found.pop()


def _batch(options: Options, devices: int | None, tp: int, pp: int) -> Fields:
    """Return batch sizes and replicas: neox_arguments/arguments.py, calculate_batch_parameters."""
    total, micro = TOTAL.of(options), MICRO_BATCH.of(options)
    accumulation = ACCUMULATION.of(options)
    nodes, per_node = options.value("num_nodes"), options.value("num_gpus")
    devices = devices or options.optional_count("global_num_gpus")
    if devices is None and all(isinstance(number, int) and 0 < number < 10**6 for number in (nodes, per_node)):
        devices = nodes * per_node
    if devices is None and total and micro and options.has(ACCUMULATION.key):
        devices = total // (micro * accumulation) * tp * pp
    if not total and not micro:
        raise InputError(f"neither {TOTAL.key} nor {MICRO_BATCH.key} is in the file: {_WAY_OUT}")
    if devices is None:
        raise InputError("the number of devices is not in the file: pass --devices")
    dp, rest = divmod(devices, tp * pp)
    if rest or not dp:
        raise InputError(f"model_parallel_size {tp} x pipe_parallel_size {pp} does not divide {devices} devices")
    if total and not micro:
        micro = total // (dp * accumulation)
    if total and micro and not options.has(ACCUMULATION.key):
        accumulation = total // (micro * dp)
    if not micro or not accumulation or total not in (None, 0, micro * accumulation * dp):
        raise InputError(
            f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{accumulation} x {dp} replicas: pass the right --devices or correct the file"
        )
    return {"global_batch": micro * accumulation * dp, "micro_batch": micro, "dp_shard": dp}


def _states(options: Options, replicas: int, precision: Precision, pipe: int) -> Fields:
    """Return what is sharded and offloaded; the pipeline engine overlaps nothing, and takes no stage above 1."""
    zero = options.inside("zero_optimization")
    remark_unpriced(options, zero)
    optimizer = options.inside("optimizer")
    if str(optimizer.value("type") or "adam").casefold() not in _ADAM:
        optimizer.remark("type", "Adam is priced")
    fields = read_states(zero, replicas)
    is_wide = str(options.inside("data_types").value("grad_accum_dtype")) in ("fp32", "float32", "float")
    if not pipe:
        if precision == Precision.BF16 and not is_wide:
            options.remark("data_types", "gradients are priced as added up in fp32", default="none")
        return fields
    if fields["sharding"] in (Sharding.ZERO2, Sharding.ZERO3):
        raise InputError(
            f"the pipeline engine takes no stage above 1 of ZeRO, not {fields['sharding']}: set pipe_parallel_size to 0"
        )
    is_older = has_section(options, "fp16")  # with type: bfloat16, before there was a BF16_Optimizer
    if precision == Precision.BF16 and fields["sharding"] == Sharding.NONE and not is_older:  # it shards its states
        fields["sharding"] = Sharding.ZERO1
    return fields | {"grad_reduce_overlap": False, "param_gather_overlap": False}


def _uneven_stages(options: Options, model: ModelSpec, pp: int) -> tuple[int, ...] | None:
    """Return the layers of all stages if these differ: DeepSpeed keeps the largest as small as it can."""
    method = options.text("pipe_partition_method", "type:transformer|mlp") or ""
    if not method.startswith("type:") and pp > 1:
        options.remark("pipe_partition_method", "stages are priced with equal numbers of layers")
    if pp > model.num_layers:
        raise InputError(f"pipe_parallel_size {pp} exceeds the {model.num_layers} layers")
    layers, rest = divmod(model.num_layers, pp)
    return tuple(layers + (stage < rest) for stage in range(pp)) if rest else None


def _has_dropout(options: Options) -> bool:
    keys = ("hidden_dropout", "attention_dropout")
    for key in keys:
        if not options.has(key):
            options.remark(key, "priced as 0, its default since 2023; 0.1 before", default="0")
    return max([options.number(key, 0.0) for key in keys]) > 0


def _reduce_dtype(options: Options) -> ReduceType:
    is_wide = options.flag("fp32_allreduce") or options.text("communication_data_type") in ("fp32", "float32")
    return ReduceType.FP32 if is_wide else ReduceType.USUAL


def _remark(options: Options, tp: int) -> None:
    """List what is read and not priced, or changes time or memory by an unknown amount."""
    if SP.of(options) and tp > 1:
        options.remark(SP.key, "priced without sequence parallelism")
    if options.flag("partition_activations") and tp > 1:
        options.remark("partition_activations", "priced whole on every rank")
    if (options.text("pack_impl", "packed") or "packed") != "packed":
        options.remark("pack_impl", "samples are not packed: priced as sequences of one length; pass --lengths")
    checkpointing = options.inside("activation_checkpointing")
    for key in checkpointing.arguments:
        checkpointing.remark(key, "recomputation is that of checkpoint_activations")
    remark_assumed(ASSUMED, options)


READER = Reader(target="gpt-neox", recognises=recognises, read=read)
