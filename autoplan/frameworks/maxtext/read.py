"""Reader of MaxText e591f30 (2026-08): a YAML file, or a script that starts it with KEY=VALUE arguments.

Defaults are those of configs/base.yml; places are below src/maxtext/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread, priced_as_even
from autoplan.frameworks.common.option_table import Fields, read_fields
from autoplan.frameworks.common.options import Argument, Options, Unknown, parse_yaml, show
from autoplan.frameworks.common.shell import script_of
from autoplan.frameworks.common.shell_words import is_open
from autoplan.frameworks.maxtext.options import (
    ACCUMULATION,
    ATTENTION,
    AXES,
    BLOCKS,
    COSTLESS,
    DENSE,
    EXPERTS,
    FFN_SIZE,
    GROUPS,
    HEAD_DIM,
    KV_HEADS,
    LENGTH,
    MODELS,
    OF_EXPERTS,
    OTHER_AXES,
    OTHER_TENSORS,
    PER_DEVICE,
    PIPELINED,
    POLICIES,
    QUANTIZATION,
    SCALE,
    SIZES,
    STATES,
    repeated,
    scaled,
)
from autoplan.frameworks.megatron_lm.read import Entry, started
from autoplan.readers.model import find_preset
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import AttentionKernel, Precision, Recompute, Schedule, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec

_KEY = re.compile(
    r"^(per_device_batch_size|(ici|dcn)_\w+_parallelism|max_target_length|remat_policy)\s*:", re.MULTILINE
)
_COMMAND = re.compile(r"\bmaxtext\b.*\btrain\w*|\bMaxText[./]\w*train\w*", re.IGNORECASE)
_PROGRAM = re.compile(r"(\S*[./])?maxtext[./]\S*train\S*", re.IGNORECASE)
_OTHER_LOSS = re.compile(r"(?<![a-z])(rl|grpo|distill\w*)(?![a-z])")
_WORD = re.compile(r"([a-z]\w*)=(.*)", re.DOTALL)
_SCRIPTS = (".sh", ".slurm", ".sbatch")
_OPEN = "an axis takes the rest of the devices, whose number is not in the file: pass --devices"


def recognises(name: str, text: str) -> bool:
    """Return whether a file has top-level keys of MaxText, or is a script that starts it with some of them."""
    if name.endswith(_SCRIPTS):
        return (
            _COMMAND.search(text) is not None
            and re.search(r"\b(per_device_batch_size|\w+_parallelism)=", text) is not None
        )
    return _KEY.search(text) is not None


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a file; arguments in a script take precedence over the YAML file that it names."""
    options = _options(text, context)
    options.pass_over(*COSTLESS)
    base = options.text("base_config") or "base.yml"
    if not base.endswith("base.yml") and read_beside(base, context.folder) is None:
        options.remark("base_config", f"{base.rpartition('/')[2]} is not beside this file: put it there")
    model = _model(options, context)
    quantization = options.text("quantization", "") or ""
    if quantization and quantization not in QUANTIZATION:
        raise InputError(f"quantization {show(quantization)} is not priced: only {', '.join(QUANTIZATION)} are")
    precision, scales = QUANTIZATION.get(quantization, (Precision.BF16, None))
    degrees, num_devices = _degrees(options, context)
    plan = _plan(options, model, degrees, num_devices, precision, {"fp8_scaling": scales} if scales else {})
    _remark(options, context)
    seq_len = context.seq_len or LENGTH.of(options)
    options.pass_over(LENGTH.key)  # which --seq-len overrides
    if options.text(ATTENTION.key, "autoselected") == "dot_product":
        plan = replace(plan, attention=AttentionKernel.UNFUSED)
    return Launch(
        target="maxtext",
        framework="maxtext",
        model=model,
        training=TrainingSpec(seq_len=seq_len, precision=precision),
        plan=plan,
        options=options.options(),
        unread=options.unread(),
    )


def _options(text: str, context: LaunchContext) -> Options:
    if not _COMMAND.search(text) or _KEY.search(text):
        return Options.of_table(_with_base(parse_yaml(text, "MaxText configuration"), context))
    script = script_of(text, context)
    before, words = started(script, Entry(_program_at, lambda inner: _COMMAND.search(inner) is not None), context)
    if words is None:
        raise InputError("no command of the script starts a train program of MaxText")
    if loss := _OTHER_LOSS.search(before[-1]):
        raise InputError(f"{before[-1]} ({loss[0]}): only training on the next token is priced")
    arguments: list[Argument] = []
    defaults: dict[str, Argument] = {}  # of base.yml
    missing = script.unread()
    for word in words:
        if word.endswith((".yml", ".yaml")):
            if (content := read_beside(word, context.folder)) and word.endswith("base.yml"):
                defaults |= Options.of_table(parse_yaml(*content)).arguments
            elif content:
                arguments += Options.of_table(_with_base(parse_yaml(*content), context)).arguments.values()
            elif not word.endswith("base.yml"):  # base.yml only contains the defaults
                why = f"{word.rpartition('/')[2]} is not beside this file: put it there"
                missing.append(Unread(option=word, value="read by MaxText", why=why))
        elif (pair := _WORD.fullmatch(word)) is not None:
            text = pair[2]
            value = Unknown(text) if is_open(text) else parse_yaml(f"{pair[1]}: {text}", word)[pair[1]]
            arguments.append(Argument(pair[1], pair[2], pair[1], value))
    options = Options([*defaults.values(), *arguments], remarks=missing)
    # What only base.yml says are the defaults of MaxText, of keys that the reader does not know, too.
    options.pass_over(*(defaults.keys() - {argument.name for argument in arguments}))
    return options


def _program_at(words: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)


def _with_base(table: Fields, context: LaunchContext) -> Fields:
    """Return the table merged over its `base_config`, if that file is present and is not base.yml."""
    base = table.get("base_config")
    if isinstance(base, str) and not base.endswith("base.yml") and (content := read_beside(base, context.folder)):
        return parse_yaml(*content) | table
    return table


def _model(options: Options, context: LaunchContext) -> ModelSpec:
    name = options.text("model_name", "default") or "default"
    further = options.optional_count("mtp_num_layers", 0) or 0
    if context.model is not None:
        sizes_of_file = (row.key for row in (*SIZES, *EXPERTS, KV_HEADS, HEAD_DIM, FFN_SIZE))
        for key in filter(options.has, ("model_name", *sizes_of_file, SCALE, "decoder_block", "mtp_num_layers")):
            options.remark(key, "--model wins", matters=False)
        options.pass_over("mlp_activations")
        return context.model
    if name != "default":
        options.pass_over("mlp_activations")
        ours = {theirs: preset for preset, theirs in MODELS.items()}.get(name, name)
        if (model := find_preset(ours)) is None:
            raise InputError(f"model_name {show(name)} is not a known model: pass --model")
        if options.is_other(SCALE, 1):
            raise InputError(f"{SCALE} {show(options.value(SCALE))} changes the model {show(name)}: pass --model")
        return replace(model, num_mtp_layers=further)
    if not any(options.has(key) for key in (SCALE, *(row.key for row in SIZES[:3]))):
        raise InputError("neither model_name nor sizes of a model are in the file: pass --model")
    block = options.text("decoder_block", "llama2")
    if block not in BLOCKS:
        raise InputError(f"decoder_block {show(block)} is not read from its sizes: pass --model")
    bias, norm = BLOCKS[block]
    heads = KV_HEADS.of(options)
    sizes = read_fields(SIZES, options)
    widths, hidden, layers = scaled(options.count(SCALE, 1))
    sizes["num_heads"] *= widths
    sizes["hidden_size"] *= hidden
    sizes["num_layers"] *= layers
    experts = read_fields(EXPERTS, options) if block in OF_EXPERTS else None
    return ModelSpec(
        name=_name(options),
        **sizes,
        num_kv_heads=None if heads * widths == sizes["num_heads"] else heads * widths,
        head_dim=_unusual(HEAD_DIM.of(options), sizes),
        ffn_size=0 if block in OF_EXPERTS else FFN_SIZE.of(options) * widths,
        gated_mlp=_has_gate(options),
        qkv_bias=options.flag("attention_bias", bias) and bias,
        qk_norm="head" if options.flag("use_qk_norm", norm == "head") else "none",
        moe=Experts(**experts | {"expert_ffn_size": experts["expert_ffn_size"] * widths}) if experts else None,
    )


def _has_gate(options: Options) -> bool:
    """Return whether an MLP multiplies two activations, each behind a matrix of its own (layers/linears.py)."""
    activations = options.value("mlp_activations", ["silu", "linear"])
    names = activations if isinstance(activations, list) else re.findall(r"\w+", str(activations))
    if len(names) not in (1, 2):
        raise InputError(f"mlp_activations {show(activations)} must be one or two activations")
    return len(names) == 2


def _name(options: Options) -> str:
    """Return the name of the run, which may contain the date."""
    named = options.arguments.get("run_name")
    if named is None or isinstance(named.value, Unknown):
        options.pass_over("run_name")
        return "maxtext-model"
    return options.text("run_name") or "maxtext-model"


def _unusual(head_dim: int, sizes: Fields) -> int | None:
    return None if head_dim * sizes["num_heads"] == sizes["hidden_size"] else head_dim


def _degrees(options: Options, context: LaunchContext) -> tuple[dict[str, int], int]:
    """Return (degree of every axis, over and within slices; devices); one degree of each kind may be -1 (the rest)."""
    filled: dict[str, dict[str, int]] = {}
    for part, filling in (("ici", "fsdp"), ("dcn", "data")):
        keys = {axis: f"{part}_{axis}_parallelism" for axis in (*AXES, *OTHER_AXES)}
        filled[part] = {axis: _degree(options, key, -1 if axis == filling else 1) for axis, key in keys.items()}
        for axis in OTHER_AXES:
            if filled[part][axis] not in (1, -1):
                raise InputError(f"{keys[axis]} {filled[part][axis]}: this axis is not priced, set it to 1")
    within = math.prod(degree for degree in filled["ici"].values() if degree != -1)
    num_slices = _degree(options, "num_slices", -1)
    across = math.prod(degree for degree in filled["dcn"].values() if degree != -1)
    if num_slices == -1:  # by default a node is a slice (jax's slice_index)
        nodes = (context.num_devices or 0) // (context.devices_per_node or context.num_devices or 1)
        is_open = -1 in filled["dcn"].values()
        num_slices = max(across, nodes) if is_open and across > 1 else across
        if is_open and -1 not in filled["ici"].values():
            is_stated = any(options.value(f"dcn_{axis}_parallelism") == -1 for axis in AXES)
            if is_stated and context.num_devices is None:
                raise InputError(_OPEN)
            num_slices = max((context.num_devices or within) // within, across)
    _fill(filled["dcn"], num_slices, "dcn")
    if -1 in filled["ici"].values():
        if context.num_devices is None:
            raise InputError(_OPEN)
        within = context.num_devices // num_slices
    _fill(filled["ici"], within, "ici")
    num_devices = within * num_slices
    if context.num_devices not in (None, num_devices):
        raise InputError(f"its axes are of {num_devices} devices, there are {context.num_devices}: pass --devices")
    return {axis: filled["ici"][axis] * filled["dcn"][axis] for axis in AXES}, num_devices


def _degree(options: Options, key: str, default: int) -> int:
    value = options.value(key, default)
    if value == -1:
        return -1
    return options.count(key, default) if options.has(key) else default


def _fill(degrees: dict[str, int], product: int, part: str) -> None:
    """Replace -1 by what the other degrees leave of `product` (utils/max_utils.py:461)."""
    given = math.prod(degree for degree in degrees.values() if degree != -1)
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1 or product % given or (not open_axes and given != product):
        raise InputError(f"the {part} axes do not multiply to {product}, or several are -1: give them, or --devices")
    for axis in open_axes:
        degrees[axis] = product // given


def _plan(
    options: Options, model: ModelSpec, degrees: dict[str, int], num_devices: int, precision: Precision, more: Fields
) -> ParallelPlan:
    tensor, sequence, pp, ep = (degrees[axis] for axis in ("tensor", "tensor_sequence", "pipeline", "expert"))
    if tensor > 1 and sequence > 1:
        raise InputError("ici_tensor_parallelism and ici_tensor_sequence_parallelism: two kinds are not priced at once")
    tp, shards = tensor * sequence, degrees["fsdp"] * ep
    dp = degrees["data"] * shards
    is_sharded = shards * degrees["context"] > 1
    sharding = Sharding.ZERO3 if is_sharded else STATES.of(options)
    per_pass = int(options.number(PER_DEVICE, 12.0) * num_devices)
    rounds = options.count(ACCUMULATION, 1)
    micro_batches = 1
    if pp > 1:
        stated = _degree(options, PIPELINED, -1)
        micro_batches = pp if stated == -1 else stated
        if rounds > 1:
            options.remark(
                ACCUMULATION, f"the pipeline is filled and drained {rounds} times per step, but priced as once"
            )
        if (options.value("num_pipeline_repeats", -1)) not in (-1, 1) or _layers(
            options, model
        ) != model.num_layers // pp:
            options.remark("num_layers_per_pipeline_stage", "chunks that go round are priced as one a stage")
    options.pass_over(PIPELINED, "num_pipeline_repeats")
    if per_pass < dp * micro_batches or per_pass % (dp * micro_batches):
        raise InputError(
            f"{PER_DEVICE} makes passes of {per_pass} sequences, which {micro_batches} micro-batches of {dp} replicas "
            "do not divide: change it"
        )
    if (word := options.text("context_parallel_strategy", "all_gather")) != "ring" and degrees["context"] > 1:
        options.remark("context_parallel_strategy", f"{word} is priced as ring", default="all_gather")
    return ParallelPlan.derived(
        has_experts=model.moe is not None,
        global_batch=per_pass * rounds,
        micro_batch=per_pass // (dp * micro_batches),
        tp=tp,
        sp=sequence > 1,
        cp=degrees["context"],
        pp=pp,
        schedule=Schedule.GPIPE if pp > 1 else Schedule.ONE_F_ONE_B,
        ep=ep,
        etp=tp if model.moe else 1,
        dp_replicate=degrees["data"] if is_sharded else 1,
        dp_shard=shards if is_sharded else dp,
        sharding=sharding,
        precision=precision,
        **_recompute(options, model),
        **more,
    )


def _layers(options: Options, model: ModelSpec) -> int:
    return options.count("num_layers_per_pipeline_stage", 1)


def _recompute(options: Options, model: ModelSpec) -> Fields:
    """Return what a policy recomputes: the parts whose tensors it does not keep."""
    options.pass_over(*OTHER_TENSORS, *(name for names in GROUPS.values() for name in names))
    groups = (*(group for group in DENSE if model.mla is None), *(("moe",) if model.moe else ()))
    name = options.text("remat_policy", "full") or "full"
    if name == "custom":
        places = {group: {options.text(key, "remat") for key in names} for group, names in GROUPS.items()}
        if any("offload" in words for words in (*places.values(), {options.text(key) for key in OTHER_TENSORS})):
            options.remark("remat_policy", "tensors that go to the host are priced as kept on the device")
        saved = tuple(group for group, words in places.items() if "remat" not in words)
    elif name in POLICIES:
        saved = POLICIES[name]
    else:
        options.remark("remat_policy", "not priced: priced as full")
        return {"recompute": Recompute.FULL}
    modules = repeated(saved, groups)
    if not modules:
        return {"recompute": Recompute.NONE}
    if name != "full" and "qkv" in saved and model.mla is None:
        return {"recompute": Recompute.SELECTIVE, "recompute_modules": modules}
    if name not in ("full", "custom") or set(saved) & set(groups):
        options.remark("remat_policy", "what it keeps is priced as full recomputation")
    return {"recompute": Recompute.FULL}


def _remark(options: Options, context: LaunchContext) -> None:
    """Remark on options that change time or memory by an unknown amount."""
    for key, priced, why in (
        ("dtype", "bfloat16", "products in bf16 are priced"),
        ("weight_dtype", "float32", "weights in fp32 are priced"),
        ("grad_dtype", "float32", "gradients in fp32 are priced"),
        ("mu_dtype", "float32", "moments in fp32 are priced"),
        ("opt_type", "adamw", "AdamW is priced"),
        ("num_vocab_tiling", 1, "the loss is priced in one piece"),
        ("capacity_factor", -1.0, "no tokens are dropped"),
        ("optimizer_memory_host_offload", False, "states come to the device for the update; priced as kept there"),
        ("parameter_memory_host_offload", False, "priced as kept on the device"),
        ("pipeline_parallel_layers", -1, "all layers are priced in the pipeline"),
        ("pipeline_delay_activation_forwarding", False, "priced without it"),
        ("pipeline_fsdp_ag_once", False, "weights are priced as gathered for every micro-batch"),
        ("te_comm_gemm_overlap", "disabled", "priced without it"),
        ("sliding_window_size", 0, "attention over whole sequences is priced"),
        ("fused_qkv", False, "three products are priced"),
        ("fused_mlp", False, "two products are priced"),
        ("use_iota_embed", False, "a lookup is priced"),
        ("use_dpo", False, "training on the next token is priced"),
    ):
        if options.is_other(key, priced, ""):
            options.remark(key, why)
    is_packed = options.flag("packing", True) and options.text("dataset_type", "tfds") != "synthetic"
    if is_packed and (why := priced_as_even("packed", context)):
        options.remark("packing", why, default="true", matters=False)


READER = Reader(target="maxtext", recognises=recognises, read=read)
