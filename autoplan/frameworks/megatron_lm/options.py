"""Option table of Megatron-Core: each row is written by the exporters and read by the readers of all that start it.

Keys are Megatron-LM's parsed arguments (d98e8a6, core 0.20), which Primus takes as they are; an option is its argument
behind two dashes.  `BRIDGE` is the notation of Megatron-Bridge (067f987), whose fields are `model.<argument>` unless a
row says otherwise.  What is not one field of a plan or a model is a `Special`, its pair of functions above its row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import (
    Count,
    Fields,
    Number,
    Option,
    OptionalCount,
    Row,
    Switch,
    Value,
    Word,
)
from autoplan.frameworks.megatron_lm.arguments import Arguments, typed
from autoplan.frameworks.megatron_lm.known_models import preset_of
from autoplan.frameworks.megatron_lm.notation import MOST_LAYERS, expert_pattern, layout_counts, pipeline_layout
from autoplan.spec.enums import ContextParallelKind, Offload, Precision, RankOrder, RecomputeModule, Sharding
from autoplan.spec.model import Block, ModelSpec
from autoplan.spec.plan import ParallelPlan, chunk_layers, even_chunks
from autoplan.spec.plan_file import PlanFile

BRIDGE = "bridge"


@dataclass(slots=True, kw_only=True)
class Reading:
    """What is known while arguments are read: the model (or the one that they start from), and the fields so far."""

    arguments: Arguments
    model: ModelSpec | None
    seq_len: int
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Special(Option):
    """Options that together mean several fields: a function that writes them and one that reads them."""

    write: Callable[[PlanFile], dict[str, Value]]
    read: Callable[[Reading], Fields] | None = None
    others: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class Assumed(Option):
    """An option that no plan has: priced as if it had one of `values` (any, where there are none), else `why`."""

    values: tuple[Value, ...] = ()
    why: str = ""
    write: Callable[[PlanFile], Value] | None = None


@dataclass(frozen=True, slots=True)
class Constant(Option):
    """An option that is written and, when read, costs neither time nor memory."""

    write: Callable[[PlanFile], Value] | None = None


Line = tuple[Option, ...]  # options that stand on one line of a script


@dataclass(frozen=True, slots=True)
class Part:
    """Lines of options that stand together in a script: their name, what they hold."""

    name: str
    says: str
    lines: tuple[Line, ...]


def constant(text: str) -> Callable[[PlanFile], Value]:
    """Return a function that writes a word, or a switch where it is empty."""
    return lambda file: text or True


def switches(*keys: str) -> tuple[Option, ...]:
    """Return switches that a `Special` has beside its key."""
    return tuple(Option(key, is_switch=True) for key in keys)


def valued(*keys: str, bridge: str = "") -> tuple[Option, ...]:
    """Return options with values that a `Special` has beside its key, in a section of Megatron-Bridge."""
    return tuple(Option(key, names={BRIDGE: bridge} if bridge else {}) for key in keys)


TRAIN, DDP, DIST, OPTIMIZER = ({BRIDGE: section} for section in ("train.", "ddp.", "dist.", "optimizer."))
STRATEGIES = {
    "no_shard": Sharding.NONE,
    "optim": Sharding.ZERO1,
    "optim_grads": Sharding.ZERO2,
    "optim_grads_params": Sharding.ZERO3,
}
FP32 = ("fp32", "torch.float32")


def uses_megatron_fsdp(plan: ParallelPlan) -> bool:
    """Return whether Megatron-FSDP shards more than the optimizer's states."""
    return plan.sharding in (Sharding.ZERO2, Sharding.ZERO3)


# -- sizes of the model -----------------------------------------------------------------------------------------------


def _write_ffn(file: PlanFile) -> dict[str, Value]:
    model = file.model
    return {"ffn_hidden_size": model.ffn_size or (model.moe.expert_ffn_size if model.moe else 0)}


def is_gated(reading: Reading) -> bool:
    """Return whether MLPs have a gate."""
    gated = reading.arguments.flag("swiglu", reading.model.gated_mlp if reading.model else False)
    return gated or reading.arguments.flag("quick_geglu")


def _read_ffn(reading: Reading) -> Fields:
    model, hidden = reading.model, reading.fields["hidden_size"]
    size = reading.arguments.optional_count("ffn_hidden_size", model.ffn_size or None if model else None)
    if size is None and (model is None or model.moe is None):
        size = 4 * hidden if not is_gated(reading) else int(4 * hidden * 2 / 3 / 64) * 64
    return {"ffn_size": size or 0}


def _write_positions(file: PlanFile) -> dict[str, Value]:
    return {"max_position_embeddings": max(file.training.seq_len, file.model.max_positions)}


def _read_positions(reading: Reading) -> Fields:
    known = reading.model.max_positions or None if reading.model else None
    return {"max_positions": reading.arguments.optional_count("max_position_embeddings", known) or reading.seq_len}


# Sizes of the vocabularies that a tokenizer by this name has in the published models it comes from.
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def _read_vocabulary(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    size = arguments.optional_count("vocab_size")
    padded = arguments.optional_count("padded_vocab_size")
    if size or padded or base:  # which tokenizer fills it changes nothing
        return {"vocab_size": size or padded or (base.vocab_size if base else 0)}
    tokenizer_model = arguments.given.get("tokenizer_model")
    known = preset_of(str(tokenizer_model.value)) if tokenizer_model else None
    if known:
        arguments.remark("tokenizer_model", f"its vocabulary is taken as that of {known.name}", matters=False)
        return {"vocab_size": known.vocab_size}
    tokenizer = arguments.text("tokenizer_type")
    if tokenizer is None and "vocab_file" in arguments.given and "merge_file" in arguments.given:
        tokenizer = "GPT2BPETokenizer"
    if tokenizer in _VOCABULARIES:
        size = _VOCABULARIES[tokenizer]
        key = "tokenizer_type" if "tokenizer_type" in arguments.given else "vocab_file"
        arguments.remark(key, f"its vocabulary is taken as {size:,} tokens: pass --model if it differs")
        return {"vocab_size": size}
    raise InputError("the size of the vocabulary is not in the file: pass --model")


SIZES: tuple[Line, ...] = (
    (Count("num_layers", "model.num_layers"), Count("hidden_size", "model.hidden_size")),
    (Special("ffn_hidden_size", _write_ffn, _read_ffn), Count("num_attention_heads", "model.num_heads")),
    (
        Constant("seq_length", lambda file: file.training.seq_len, names={BRIDGE: "dataset."}),
        Special("max_position_embeddings", _write_positions, _read_positions),
    ),
    (
        Special(
            "vocab_size",
            lambda file: {"vocab_size": file.model.vocab_size},
            _read_vocabulary,
            names={BRIDGE: "tokenizer."},
            others=valued("padded_vocab_size", "tokenizer_type", "tokenizer_model"),
        ),
        Assumed(
            "make_vocab_size_divisible_by",
            (128,),
            "priced with a vocabulary padded to multiples of 128",
            lambda file: file.framework.memory.pads_vocab_to,
        ),
    ),
)

# -- attention --------------------------------------------------------------------------------------------------------


def _write_groups(file: PlanFile) -> dict[str, Value]:
    model = file.model
    grouped = model.kv_heads != model.num_heads
    return {"group_query_attention": True, "num_query_groups": model.kv_heads} if grouped else {}


def _read_groups(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    if reading.fields["mla"]:
        return {"num_kv_heads": None}
    groups = arguments.optional_count("num_query_groups", base.num_kv_heads if base else None)
    # The number counts only where the switch is on, which has a setting of its own in the command line alone.
    grouped = arguments.flag("group_query_attention", groups is not None and bool(base or arguments.defaults))
    return {"num_kv_heads": groups if grouped and groups != reading.fields["num_heads"] else None}


def _read_head_dim(reading: Reading) -> Fields:
    head_dim = reading.arguments.optional_count("kv_channels", reading.model.head_dim if reading.model else None)
    usual = (head_dim or 0) * reading.fields["num_heads"] == reading.fields["hidden_size"]
    return {"head_dim": None if reading.fields["mla"] or usual else head_dim}


def _read_qk_norm(reading: Reading) -> Fields:
    normed = reading.arguments.flag("qk_layernorm", bool(reading.model and reading.model.qk_norm != "none"))
    return {"qk_norm": "head" if normed and not reading.fields["mla"] else "none"}


ATTENTION: tuple[Line, ...] = (
    (Special("group_query_attention", _write_groups, _read_groups, others=valued("num_query_groups"), is_switch=True),),
    (Special("kv_channels", lambda file: {"kv_channels": file.model.head_dim}, _read_head_dim),),
    (
        Special(
            "qk_layernorm", lambda file: {"qk_layernorm": file.model.qk_norm == "head"}, _read_qk_norm, is_switch=True
        ),
    ),
)


def _write_latent(file: PlanFile) -> dict[str, Value]:
    """Latents are normalised; kv_channels is not used, but must not be derived from hidden_size."""
    return {"multi_latent_attention": True, "qk_layernorm": True, "kv_channels": file.model.v_head_dim}


def _write_plain_rope(file: PlanFile) -> dict[str, Value]:
    """Rotations of latent attention are fused as YaRN's alone."""
    return {"rope_type": "yarn", "rotary_scaling_factor": "1.0"} if file.model.position_embedding == "rope" else {}


LATENT: tuple[Line, ...] = (
    (Special("multi_latent_attention", _write_latent, is_switch=True),),
    (OptionalCount("q_lora_rank", "model.mla.q_lora_rank"),),
    (
        Count("kv_lora_rank", "model.mla.kv_lora_rank", 32),
        Count("qk_head_dim", "model.mla.qk_nope_head_dim", 128),
    ),
    (
        Count("qk_pos_emb_head_dim", "model.mla.qk_rope_head_dim", 64),
        Count("v_head_dim", "model.mla.v_head_dim", 128),
    ),
)
LATENT_ROPE: Line = (Special("rope_type", _write_plain_rope),)


def _read_window(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    value = arguments.value("window_size")
    numbers = [int(number) for number in re.findall(r"-?\d{1,9}", str(value))] if value is not None else []
    window = base.window if base and value is None else None
    if numbers:
        window = numbers[0] + 1 if numbers[0] >= 0 else None
    every = arguments.value("window_attn_skip_freq", base.full_attention_interval if base and window else 0)
    if window is None or every is None:
        return {"window": window, "full_attention_interval": 0}
    if not isinstance(every, int) and not (isinstance(every, str) and every.isdigit()):
        raise InputError(f"{arguments.option_of('window_attn_skip_freq')} is a pattern: pass --model")
    return {"window": window, "full_attention_interval": int(every)}


def _write_window(file: PlanFile) -> dict[str, Value]:
    """Count the tokens to the left of a token itself."""
    return {"window_size": f"{file.model.window - 1},0"} if file.model.window is not None else {}


def _write_full_attention(file: PlanFile) -> dict[str, Value]:
    every = file.model.full_attention_interval
    return {"window_attn_skip_freq": every} if file.model.window is not None and every else {}


WINDOW: tuple[Line, ...] = (
    (Special("window_size", _write_window, _read_window),),
    (Special("window_attn_skip_freq", _write_full_attention),),
    (
        Word(
            "softmax_type",
            "model.attention_sinks",
            False,
            meanings={"learnable": True, "vanilla": False},
            when=lambda file: file.model.attention_sinks,
        ),
    ),
)

# -- form of the blocks -----------------------------------------------------------------------------------------------

_POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none", "alibi": "none"}


def _read_position_kind(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    kind = arguments.text(
        "position_embedding_type", _POSITIONS[base.position_embedding] if base else "learned_absolute"
    )
    if arguments.flag("use_rotary_position_embeddings"):
        kind = "rope"
    kinds = {"rope": "rope", "yarn": "rope", "learned_absolute": "learned", "none": "none"}
    if kind not in kinds:
        option = arguments.option_of("position_embedding_type")
        raise InputError(f"{option} {str(kind)[:30]!r} is not known here: pass --model")
    return {"position_embedding": kinds[kind]}


def has_bias(model: ModelSpec) -> bool | None:
    """Return whether the linear layers have biases: one switch in Megatron-LM, from which only qkv can differ."""
    if model.mlp_bias and model.attention_output_bias and model.qkv_bias:
        return True
    return None if model.mlp_bias or model.attention_output_bias else False


def _write_bias(file: PlanFile) -> dict[str, Value]:
    return {} if has_bias(file.model) else {"disable_bias_linear": True, "add_qkv_bias": file.model.qkv_bias}


def _read_bias(reading: Reading) -> Fields:
    arguments, base = reading.arguments, reading.model
    bias = arguments.flag("add_bias_linear", base.mlp_bias if base else True)
    qkv_bias = bias or arguments.flag("add_qkv_bias", base.qkv_bias if base else False)
    return {"mlp_bias": bias, "attention_output_bias": bias, "qkv_bias": qkv_bias}


FORM: tuple[Line, ...] = (
    (
        Special(
            "position_embedding_type",
            lambda file: {"position_embedding_type": _POSITIONS[file.model.position_embedding]},
            _read_position_kind,
            others=switches("use_rotary_position_embeddings"),
        ),
        Number("rotary_base", "model.rope_base", 10000.0, when=lambda file: file.model.position_embedding == "rope"),
    ),
    (Word("normalization", "model.norm", "layernorm", meanings={"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}),),
    (
        # Without the switch an MLP has GELU: the activation itself changes no shape.
        Special(
            "swiglu",
            lambda file: {"swiglu": file.model.gated_mlp},
            lambda reading: {"gated_mlp": is_gated(reading)},
            names={BRIDGE: "model.gated_linear_unit"},
            others=switches("quick_geglu", "squared_relu", "openai_gelu"),
            is_switch=True,
        ),
    ),
    (Special("add_bias_linear", _write_bias, _read_bias, others=switches("add_qkv_bias")),),
    (Switch("untie_embeddings_and_output_weights", "model.tied_embeddings", True, on=False, off=True),),
    (Count("mtp_num_layers", "model.num_mtp_layers", 0, when=lambda file: file.model.num_mtp_layers > 0),),
)


def _write_dropout(file: PlanFile) -> dict[str, Value]:
    return {} if file.framework.kernels.dropout else {"attention_dropout": "0.0", "hidden_dropout": "0.0"}


def _read_dropout(reading: Reading) -> Fields:
    for key in ("hidden_dropout", "attention_dropout"):
        if reading.arguments.number(key, 0.1) > 0:
            reading.arguments.remark(key, "dropout keeps masks, which are not priced here", default="0.1")
    return {}


DROPOUT: Line = (Special("hidden_dropout", _write_dropout, _read_dropout, others=valued("attention_dropout")),)

# -- experts ----------------------------------------------------------------------------------------------------------


def _write_places(file: PlanFile) -> dict[str, Value]:
    every = all(Block.MOE in layer for layer in file.model.layers)
    return {} if every else {"moe_layer_freq": expert_pattern(file.model)}


def _has_shared_expert(file: PlanFile) -> bool:
    return file.model.moe is not None and file.model.moe.shared_expert_ffn_size > 0


def _sends_tokens_once(file: PlanFile) -> bool:
    return file.framework.experts.sends_tokens_once and file.best.plan.ep > 1


def _drops_tokens(file: PlanFile) -> bool:
    return file.framework.experts.drops_tokens


def _pads_tokens(file: PlanFile) -> bool:
    """Return whether products need counts of tokens that experts, which see any number, do not give."""
    return file.best.plan.precision in ("fp8", "mxfp8", "nvfp4")


def _chooses_one(file: PlanFile) -> bool:
    """Return what core/transformer/transformer_config.py:2669 asks for."""
    return file.model.moe is not None and file.model.moe.experts_per_token == 1


EXPERTS: tuple[Line, ...] = (
    (
        Count("num_experts", "model.moe.num_experts", names={BRIDGE: "model.num_moe_experts"}),
        Count("moe_router_topk", "model.moe.experts_per_token", 2),
    ),
    (OptionalCount("moe_ffn_hidden_size", "model.moe.expert_ffn_size"),),
    (Special("moe_layer_freq", _write_places),),
    (
        Count("moe_shared_expert_intermediate_size", "model.moe.shared_expert_ffn_size", 0, when=_has_shared_expert),
        Switch("moe_shared_expert_gate", "model.moe.shared_expert_gate", when=_has_shared_expert),
    ),
    (OptionalCount("moe_latent_size", "model.moe.latent_size"),),
    (
        Assumed(
            "moe_grouped_gemm", (True,), "priced with grouped products of the experts", constant(""), is_switch=True
        ),
        Assumed("moe_permute_fusion", (True,), "priced with a fused permutation", constant(""), is_switch=True),
        Assumed(
            "moe_token_dispatcher_type",
            ("alltoall", "flex"),
            "priced as all-to-all",
            lambda file: "flex" if _sends_tokens_once(file) else "alltoall",
        ),
        Assumed(
            "moe_flex_dispatcher_backend",
            ("deepep", "hybridep"),
            "priced as HybridEP",
            lambda file: "hybridep" if _sends_tokens_once(file) else None,
        ),
        # Presets that drop tokens price it (`Framework.drops_tokens`); files do not choose a preset by it.
        Assumed(
            "moe_expert_capacity_factor",
            (-1,),
            "dropped tokens are priced by presets that drop them alone",
            lambda file: "1.0" if _drops_tokens(file) else None,
        ),
        Assumed(
            "moe_pad_expert_input_to_capacity",
            (False,),
            "dropped tokens are priced by presets that drop them alone",
            _drops_tokens,
        ),
    ),
    (
        Constant("moe_router_load_balancing_type", constant("aux_loss")),
        Constant("moe_aux_loss_coeff", constant("1e-2")),
    ),
    (
        Constant("moe_router_dtype", constant("fp32")),
        Constant("moe_router_pre_softmax", _chooses_one),
        Assumed("moe_router_padding_for_quantization", write=_pads_tokens),
    ),
)

# -- the plan ---------------------------------------------------------------------------------------------------------

TP = Count("tensor_model_parallel_size", "tp", 1)
CP = Count("context_parallel_size", "cp", 1, when=lambda file: file.best.plan.cp > 1)
PP = Count("pipeline_model_parallel_size", "pp", 1)

_CP_KINDS = {ContextParallelKind.RING: "p2p", ContextParallelKind.ALL_TO_ALL: "a2a"}


def _write_cp_kind(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    return {"cp_comm_type": _CP_KINDS[plan.cp_kind]} if plan.cp > 1 else {}


def _read_cp_kind(reading: Reading) -> Fields:
    kinds, cp = set(reading.arguments.words("cp_comm_type", ("p2p",))), reading.fields["cp"]
    if kinds == {"a2a"} and cp > 1:
        return {"cp_kind": ContextParallelKind.ALL_TO_ALL}
    if cp > 1 and kinds - {"p2p"}:
        reading.arguments.remark("cp_comm_type", "priced as ring attention")
    return {}


def _write_stages(file: PlanFile) -> dict[str, Value]:
    plan, model = file.best.plan, file.model
    counts = chunk_layers(plan, model.num_layers)
    if len(set(counts)) > 1:
        return {"pipeline_model_parallel_layout": pipeline_layout(counts, model.num_mtp_layers)}
    return {"num_virtual_stages_per_pipeline_rank": plan.vp} if plan.vp > 1 else {}


def _read_stages(reading: Reading) -> Fields:
    """Read the chunks of a rank, and the layers of every chunk where they are not spread evenly."""
    arguments, pp = reading.arguments, reading.fields["pp"]
    assert reading.model is not None
    num_layers = reading.model.num_layers
    layout = arguments.value("pipeline_model_parallel_layout")
    per_chunk = arguments.optional_count("num_layers_per_virtual_pipeline_stage")
    chunks = arguments.optional_count("num_virtual_stages_per_pipeline_rank") or arguments.optional_count(
        "virtual_pipeline_model_parallel_size"
    )
    first, last = (arguments.optional_count(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    embeds = arguments.flag("account_for_embedding_in_pipeline_split")
    loses = arguments.flag("account_for_loss_in_pipeline_split")
    if layout is not None:
        counts, option = layout_counts(layout), arguments.option_of("pipeline_model_parallel_layout")
        if len(counts) % pp:
            raise InputError(f"{option} has {len(counts)} stages, pp is {pp}")
        if sum(counts) != num_layers:
            raise InputError(f"{option} has {sum(counts)} layers, the model {num_layers}")
        return _stages(len(counts) // pp, counts)
    if pp == 1:
        return {}
    if per_chunk:
        chunks = max(num_layers // pp // per_chunk, 1)
    vp = chunks or 1
    if not 1 <= vp * pp <= 10 * MOST_LAYERS:
        raise InputError(f"pp {pp} x {vp} chunks are more than {10 * MOST_LAYERS:,}")
    if first is None and last is None:
        return _stages(vp, _even_counts(num_layers, pp * vp, embeds=embeds, loses=loses))
    ends = (first or 0) + (last or 0)
    middle = pp - (first is not None) - (last is not None)
    each = (num_layers - ends) // middle if middle > 0 else 0
    stages = [*([first] if first is not None else []), *[each] * middle, *([last] if last is not None else [])]
    if sum(stages) != num_layers or len(stages) != pp or any(count % vp for count in stages):
        raise InputError(
            f"{num_layers} layers do not spread over {pp} stages of {vp} chunks with {first} and {last} at the ends"
        )
    return _stages(vp, [count // vp for _ in range(vp) for count in stages])


def _even_counts(num_layers: int, num_chunks: int, *, embeds: bool, loses: bool) -> list[int]:
    """Return the layers of every chunk where embedding and loss may count as a layer each."""
    num_counted = num_layers + embeds + loses
    if num_counted % num_chunks:
        counted = ", embedding or loss counted," if embeds or loses else ""
        raise InputError(
            f"{num_counted} layers{counted} do not spread evenly over {num_chunks} chunks, which Megatron refuses"
        )
    counts = [num_counted // num_chunks] * num_chunks
    counts[0] -= embeds
    counts[-1] -= loses
    return counts


def _stages(vp: int, counts: list[int]) -> Fields:
    """Return chunks of a rank and layers of every chunk as a plan holds them: none where they are spread evenly."""
    is_even = tuple(counts) == even_chunks(sum(counts), len(counts))
    return {"vp": vp, "layers_per_chunk": None if is_even else tuple(counts)}


def _write_sharding(file: PlanFile) -> dict[str, Value]:
    sharding = file.best.plan.sharding
    if sharding == "none":
        return {}
    words: dict[str, Value] = {"use_distributed_optimizer": True}
    if uses_megatron_fsdp(file.best.plan):
        strategy = next(word for word, kind in STRATEGIES.items() if kind == sharding)
        words |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    return words


def _read_sharding(reading: Reading) -> Fields:
    arguments = reading.arguments
    distributed = arguments.flag("use_distributed_optimizer")
    fsdp, torch_fsdp = arguments.flag("use_megatron_fsdp"), arguments.flag("use_torch_fsdp2")
    strategy = arguments.text("data_parallel_sharding_strategy", "no_shard") or ""
    if torch_fsdp:
        arguments.remark("use_torch_fsdp2", "priced as Megatron-FSDP")
        return {"sharding": Sharding.ZERO3}
    if not fsdp:
        return {"sharding": Sharding.ZERO1 if distributed else Sharding.NONE}
    if strategy not in STRATEGIES:
        option = arguments.option_of("data_parallel_sharding_strategy")
        raise InputError(f"{option} {strategy[:30]!r} is not one of {', '.join(STRATEGIES)}")
    return {"sharding": STRATEGIES[strategy]}


def _write_copies(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    is_split = plan.sharding != "none" and plan.dp_replicate > 1
    return {"num_distributed_optimizer_instances": plan.dp_replicate} if is_split else {}


def _read_copies(reading: Reading) -> Fields:
    """Read how many copies of the sharded states there are among the replicas of the model."""
    arguments, key = reading.arguments, "num_distributed_optimizer_instances"
    dp = reading.fields.pop("dp")
    copies = dp if reading.fields["sharding"] == Sharding.NONE else arguments.count(key, 1)
    if copies < 1 or dp % copies:
        raise InputError(f"{arguments.option_of(key)} {copies} does not divide dp {dp}")
    return {"dp_replicate": copies, "dp_shard": dp // copies}


def _write_recompute(file: PlanFile) -> dict[str, Value]:
    """Write the parts of a layer; or uniform units of one layer; or the first layers of every chunk."""
    plan = file.best.plan
    if plan.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(map(str, plan.recompute_modules))}
    if plan.recompute == "none":
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform" if plan.recompute_num_layers is None else "block",
        "recompute_num_layers": plan.recompute_num_layers or 1,
    }


def _read_recompute(reading: Reading) -> Fields:
    arguments = reading.arguments
    kind, method = arguments.text("recompute_granularity"), arguments.text("recompute_method")
    count = arguments.optional_count("recompute_num_layers")
    modules = arguments.words("recompute_modules", ("core_attn",))
    if arguments.flag("recompute_activations"):
        kind = "selective"
    if kind == "full":
        if method == "block" and count:
            return {"recompute": "full", "recompute_num_layers": count}
        if (count or 1) > 1:
            arguments.remark("recompute_num_layers", "units of several layers keep less than is priced")
        return {"recompute": "full"}
    if kind == "selective":
        known = tuple(module for module in RecomputeModule if module in modules)
        if set(modules) - set(known):
            arguments.remark("recompute_modules", f"without {', '.join(sorted(set(modules) - set(known)))[:60]}")
        if known:
            return {"recompute": "selective", "recompute_modules": known}
    elif kind not in (None, "None", "none"):
        raise InputError(f"{arguments.option_of('recompute_granularity')} {kind[:30]!r} is neither full nor selective")
    return {}


def _write_offload(file: PlanFile) -> dict[str, Value]:
    keys = ("optimizer_cpu_offload", "use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d")
    return dict.fromkeys(keys, True) if file.best.plan.offload == "optimizer" else {}


def _read_offload(reading: Reading) -> Fields:
    arguments = reading.arguments
    if not arguments.flag("optimizer_cpu_offload"):
        return {}
    if arguments.number("optimizer_offload_fraction", 1.0) != 1.0:
        arguments.remark("optimizer_offload_fraction", "priced as the whole optimizer on the host")
    if not arguments.flag("overlap_cpu_optimizer_d2h_h2d"):
        arguments.remark("overlap_cpu_optimizer_d2h_h2d", "copies to the host are priced as overlapped", default="off")
    return {"offload": Offload.OPTIMIZER}


def _read_batch(reading: Reading) -> Fields:
    arguments = reading.arguments
    for key in ("rampup_batch_size", "step_batch_size_schedule"):
        if arguments.given.get(key) and arguments.value(key):
            arguments.remark(key, "the plan is that of the full batch", matters=False)
    micro_batch, dp = reading.fields["micro_batch"], reading.fields["dp"]
    return {"global_batch": arguments.optional_count("global_batch_size") or micro_batch * dp}


PLAN: tuple[Line, ...] = (
    (
        Count("micro_batch_size", "micro_batch", 1, names=TRAIN),
        Special(
            "global_batch_size",
            lambda file: {"global_batch_size": file.best.plan.global_batch},
            _read_batch,
            names=TRAIN,
            others=valued("rampup_batch_size", "step_batch_size_schedule"),
        ),
    ),
    (TP, Switch("sequence_parallel", "sp")),
    (CP, Special("cp_comm_type", _write_cp_kind, _read_cp_kind)),
    (
        PP,
        Switch(
            "use_tp_pp_dp_mapping",
            "rank_order",
            RankOrder.DP_BEFORE_PP,
            on=RankOrder.PP_BEFORE_DP,
            off=RankOrder.DP_BEFORE_PP,
            when=lambda file: file.best.plan.pp > 1,
            names=DIST,
        ),
    ),
    (
        Special(
            "pipeline_model_parallel_layout",
            _write_stages,
            _read_stages,
            others=(
                Option(
                    "num_virtual_stages_per_pipeline_rank",
                    names={BRIDGE: "model.virtual_pipeline_model_parallel_size"},
                ),
                Option("decoder_first_pipeline_num_layers", names={BRIDGE: "model.num_layers_in_first_pipeline_stage"}),
                Option("decoder_last_pipeline_num_layers", names={BRIDGE: "model.num_layers_in_last_pipeline_stage"}),
                *valued("num_layers_per_virtual_pipeline_stage"),
                *switches("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            ),
        ),
    ),
    (
        Count("expert_model_parallel_size", "ep", 1, when=lambda file: file.model.moe is not None),
        OptionalCount("expert_tensor_parallel_size", "etp", when=lambda file: file.model.moe is not None),
    ),
    (
        Special(
            "use_distributed_optimizer",
            _write_sharding,
            _read_sharding,
            names=DDP,
            is_switch=True,
            others=(
                Option("use_megatron_fsdp", names=DDP, is_switch=True),
                Option("use_torch_fsdp2", names=DIST, is_switch=True),
                *valued("data_parallel_sharding_strategy", bridge="ddp."),
            ),
        ),
    ),
    (
        Constant(
            "ckpt_format",
            lambda file: "fsdp_dtensor" if uses_megatron_fsdp(file.best.plan) else None,
            names={BRIDGE: "checkpoint."},
        ),
        Assumed("no_gradient_accumulation_fusion", write=lambda file: uses_megatron_fsdp(file.best.plan)),
    ),
    (
        # The model need not fit on one device.
        Assumed(
            "init_model_with_meta_device", write=lambda file: file.best.plan.sharding == Sharding.ZERO3, is_switch=True
        ),
    ),
    (Special("num_distributed_optimizer_instances", _write_copies, _read_copies, names=DDP),),
    (
        Switch("overlap_grad_reduce", "grad_reduce_overlap", names=DDP),
        Switch(
            "overlap_param_gather",
            "param_gather_overlap",
            names=DDP,
            when=lambda file: file.best.plan.sharding != Sharding.NONE,
        ),
        Switch("tp_comm_overlap", "tp_overlap", names={BRIDGE: "comm_overlap."}),
        Switch("overlap_moe_expert_parallel_comm", "ep_overlap"),
    ),
    (
        Special(
            "recompute_granularity",
            _write_recompute,
            _read_recompute,
            others=(
                *valued("recompute_method", "recompute_num_layers", "recompute_modules"),
                *switches("recompute_activations"),
            ),
        ),
    ),
    (
        Special(
            "optimizer_cpu_offload",
            _write_offload,
            _read_offload,
            names=OPTIMIZER,
            is_switch=True,
            others=(
                Option("overlap_cpu_optimizer_d2h_h2d", names=OPTIMIZER, is_switch=True),
                Option("use_precision_aware_optimizer", names=OPTIMIZER, is_switch=True),
                *valued("optimizer_offload_fraction", bridge="optimizer."),
            ),
        ),
    ),
)

# -- training ---------------------------------------------------------------------------------------------------------

_PRECISIONS: dict[Precision, dict[str, Value]] = {
    Precision.FP16: {"fp16": True},
    Precision.BF16: {"bf16": True},
    Precision.FP8: {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    Precision.MXFP8: {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    Precision.NVFP4: {"bf16": True, "fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}


def read_precision(arguments: Arguments) -> Precision:
    """Return the format of the matrix products."""
    bf16, fp16 = arguments.flag("bf16"), arguments.flag("fp16")
    fp8, fp4 = arguments.text("fp8"), arguments.text("fp4")
    recipe = arguments.text("fp8_recipe", "delayed")
    arguments.understood.add("fp4_recipe")
    if fp4 and fp4 != "None":
        return Precision.NVFP4
    if fp8 and fp8 != "None":
        if recipe == "mxfp8":
            return Precision.MXFP8
        if recipe not in ("tensorwise", "delayed"):
            arguments.remark("fp8_recipe", "priced with one scale a tensor")
        return Precision.FP8
    if not bf16 and not fp16:
        raise InputError("neither bf16 nor fp16 is on: training in 32 bits is not priced")
    return Precision.FP16 if fp16 else Precision.BF16


def _write_attention_backend(file: PlanFile) -> dict[str, Value]:
    return {"attention_backend": "unfused"} if file.training.attention == "unfused" else {}


def read_attention(arguments: Arguments) -> Any:
    """Return the kernel of attention, by its name among those of a training."""
    backend = arguments.text("attention_backend", "auto")
    arguments.flag("use_flash_attn")
    return "unfused" if str(backend).rpartition(".")[2] in ("unfused", "local") else "flash"


PRECISION: tuple[Line, ...] = (
    (
        Special(
            "bf16",
            lambda file: _PRECISIONS[file.best.plan.precision],
            others=(*switches("fp16"), *valued("fp8", "fp8_recipe", "fp4", "fp4_recipe")),
            is_switch=True,
        ),
    ),
    (Special("attention_backend", _write_attention_backend, others=switches("use_flash_attn")),),
)

TRAINING: tuple[Line, ...] = (
    (
        Constant("lr", constant("3e-4")),
        Constant("min_lr", constant("3e-5")),
        Constant("lr_decay_style", constant("cosine")),
        Constant("clip_grad", constant("1.0")),
    ),
    (
        Constant("optimizer", lambda file: file.training.optimizer, names=OPTIMIZER),
        Constant("adam_beta1", constant("0.9")),
        Constant("adam_beta2", constant("0.95")),
    ),
    (Constant("weight_decay", constant("0.1")), Constant("init_method_std", constant("0.02"))),
    (
        Constant("eval_iters", constant("0")),
        Constant("log_interval", constant("1")),
        Constant("log_throughput", constant(""), is_switch=True),
    ),
)
DATA: tuple[Line, ...] = (
    (Constant("mock_data", constant(""), is_switch=True),),
    (Constant("tokenizer_type", constant("NullTokenizer")),),
)

# -- options that are not written -------------------------------------------------------------------------------------

_STATES_IN_32_BITS = "states are priced in 32 bits"
UNWRITTEN: Line = (
    Assumed("moe_use_legacy_grouped_gemm"),
    Assumed("moe_shared_expert_overlap", (False,), "the overlap of shared experts is not priced"),
    Assumed("use_precision_aware_optimizer", names=OPTIMIZER),
    Assumed("gradient_accumulation_fusion"),
    Assumed("outer_dp_sharding_strategy", ("no_shard",), "priced without sharding over the outer replicas", names=DDP),
    Assumed("align_param_gather", names=DDP),
    Assumed("overlap_p2p_comm", (True,), "priced with messages that overlap"),
    Assumed(
        "fp8_param_gather", (False,), "weights are priced as gathered in 16 bits", names={BRIDGE: "mixed_precision."}
    ),
    Assumed("cross_entropy_loss_fusion", (False,), "priced as the framework's usual loss"),
    Assumed("cross_entropy_fusion_impl"),
    Assumed("grad_reduce_in_bf16", (False,), "priced as the framework's usual reduction"),
    Assumed("masked_softmax_fusion"),
    Assumed("bias_swiglu_fusion", (True,), "priced with a fused activation"),
    Assumed("bias_gelu_fusion"),
    Assumed("bias_dropout_fusion"),
    Assumed("apply_rope_fusion", (True,), "priced with a fused rotation"),
    Assumed("calculate_per_token_loss"),
    Assumed("apply_layernorm_1p"),
    Assumed("empty_unused_memory_level", (0,), "giving cached memory back is not priced"),
    Assumed("main_grads_dtype", FP32, _STATES_IN_32_BITS, names=OPTIMIZER),
    Assumed("main_params_dtype", FP32, _STATES_IN_32_BITS, names=OPTIMIZER),
    Assumed("exp_avg_dtype", FP32, _STATES_IN_32_BITS, names=OPTIMIZER),
    Assumed("exp_avg_sq_dtype", FP32, _STATES_IN_32_BITS, names=OPTIMIZER),
    Assumed("tp_comm_overlap_cfg"),
    Assumed("cuda_graph_impl", ("none",), "CUDA graphs are not priced"),
    Assumed("cuda_graph_scope"),
    Assumed("cuda_graph_warmup_steps"),
    Assumed("squared_relu"),
    Assumed("openai_gelu"),
    Assumed("nccl_ub", (False,), "registered communication buffers are not priced", names=DDP),
    Assumed("fine_grained_activation_offloading", (False,), "activations on the host are not priced"),
    Assumed("cpu_offloading_num_layers", (0,), "activations on the host are not priced"),
    Assumed("delay_wgrad_compute", (False,), "the delay of weight gradients is not priced"),
    Constant("train_iters", names=TRAIN),
    Constant("norm_epsilon", names={BRIDGE: "model.layernorm_epsilon"}),
    Constant("use_mcore_models", is_switch=True),
)

# Arguments that change neither the time of a step nor its memory, or little that is a person's own to choose.
HARMLESS = re.compile(
    r"(min_|decoupled_|decoupled_min_|head_)?lr(_|$)|adam_|sgd_|weight_decay|start_weight|end_weight|clip_grad|override_opt|use_checkpoint"
    r"|save|load|no_save|no_load|ckpt|dist_ckpt|auto_detect_ckpt|async_save|use_persistent_ckpt|finetune|pretrained"
    r"|exit_on_missing|log_|logging|tensorboard|wandb|mlflow|one_logger|enable_one_logger|timing_log|seed$|data_|mock_data"
    r"|train_(iters|samples|data)|valid_data|test_data|per_split|num_dataset|dataloader|num_workers|split$|mmap_bin|eod_mask"
    r"|reset_(position|attention)|create_attention_mask|tokenizer|vocab_file|merge_file|tiktoken|trust_remote"
    r"|init_method|perform_initialization|eval_|exit_|distributed_(timeout|backend)|loss_scale|initial_loss|min_loss|hysteresis"
    r"|rerun|error_injection|check_for|norm_epsilon|layernorm_epsilon|use_mcore_models|deprecated_use_mcore|transformer_impl"
    r"|manual_gc|profile|use_pytorch_profiler|rotary_(percent|interleaved|scaling)|rope_type|rope_scaling|mscale|use_rope|yarn"
    r"|moe_(aux_loss|z_loss|router_(load|score|topk_scaling|dtype|num_groups|group_topk|pre_|enable|bias|force|fusion))"
    r"|moe_per_layer|mtp_loss|attention_softmax_in|enable_experimental|accumulate_allreduce|add_position_embedding|add_class"
    r"|fp8_(amax|margin|interval)|te_rng|use_te_rng|activation_func_clamp|glu_linear|quick_geglu|enable_gpt_oss"
    r"|auto_continue|skip_train|comment|no_persist|stderr_sink|disable_(tensorboard|wandb|mlflow|last_saving)|debug|env_vars|dump"
)

# -- names and notations ----------------------------------------------------------------------------------------------

# Options whose argument is not called like them.
_ARGUMENTS = {
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "layernorm_epsilon": "norm_epsilon",
    "rope_fusion": "apply_rope_fusion",
    "overlap_p2p_communication": "overlap_p2p_comm",
    "bias_linear": "add_bias_linear",
    "position_embedding": "add_position_embedding",
    "use_custom_fsdp": "use_megatron_fsdp",
    "use_nccl_ub": "nccl_ub",
}
# Options that begin with "no" and are arguments of that name.
_ARE_NO = ("no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng", "no_persist_layer_norm")


def argument_of(option: str, values: Sequence[str]) -> tuple[str, Value]:
    """Return the name and the value of the argument that an option sets: a switch is on, or off behind "no-"."""
    key = option.removeprefix("--").replace("-", "_")
    on = True
    if key.startswith(("no_", "disable_")) and key not in _ARE_NO and not values:
        key, on = key.partition("_")[2], False
    key = _ARGUMENTS.get(key, key)
    if not values:
        return key, on
    return key, values[0] if len(values) == 1 else list(values)


def _flat(options: Iterable[Option]) -> Iterator[Option]:
    for option in options:
        yield option
        yield from option.others if isinstance(option, Special) else ()


ARCHITECTURE: tuple[Line, ...] = (*SIZES, *ATTENTION, *LATENT, *WINDOW, *FORM, *EXPERTS)
OPTIONS: tuple[Option, ...] = tuple(
    _flat(
        option for line in (*ARCHITECTURE, DROPOUT, *PLAN, *PRECISION, *TRAINING, *DATA, UNWRITTEN) for option in line
    )
)
# Arguments that describe the model, and those that take no value.
MODEL_KEYS = frozenset(
    option.key for line in ARCHITECTURE for option in _flat(line) if not isinstance(option, Assumed | Constant)
)
SWITCHES = frozenset(option.key for option in OPTIONS if option.is_switch)
BRIDGE_FIELDS = {option.key: option.name(BRIDGE) for option in OPTIONS if BRIDGE in option.names}


def written(option: Option, plan_file: PlanFile) -> dict[str, Value]:
    """Return the options that a row writes; switches that are on are True."""
    match option:
        case Row():
            values = {option.key: option.value(plan_file)}
        case Special():
            values = option.write(plan_file)
        case Assumed() | Constant() if option.write is not None:
            values = {option.key: option.write(plan_file)}
        case _:
            values = {}
    return {key: value for key, value in values.items() if value is not None and value is not False}


def rows(lines: Iterable[Line]) -> Iterator[Row]:
    """Return the options of some lines that mean one field each."""
    return (option for line in lines for option in line if isinstance(option, Row))


def words(line: Line, plan_file: PlanFile) -> list[str]:
    """Return the words of a line of options in a command."""
    result: list[str] = []
    for option in line:
        for key, value in written(option, plan_file).items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            result += [f"--{key.replace('_', '-')}", *map(str, values)]
    return result


def arguments_of(parts: Iterable[Part], plan_file: PlanFile) -> dict[str, Value]:
    """Return the arguments that options set, numbers as numbers."""
    result: dict[str, Value] = {}
    for option in (option for part in parts for line in part.lines for option in line):
        for name, value in written(option, plan_file).items():
            key, is_on = argument_of(name, () if value is True else ("",))
            result[key] = is_on if value is True else typed(value)
    return result


def read_lines(lines: Iterable[Line], reading: Reading, known: object | None = None) -> None:
    """Read the rows of some lines; `known` has the fields of rows where the file is silent."""
    for line in lines:
        for option in line:
            if isinstance(option, Row):
                reading.fields |= option.read(reading.arguments, known)
            elif isinstance(option, Special) and option.read is not None:
                reading.fields |= option.read(reading)


def remark_assumed(arguments: Arguments) -> None:
    """Remark options that no plan has where the cost model does not know what their value does."""
    for option in OPTIONS:
        argument = arguments.given.get(option.key)
        if not isinstance(option, Assumed) or argument is None or option.key in arguments.understood:
            continue
        value = typed(argument.value)
        if value is None or not option.values or value in option.values:
            arguments.understood.add(option.key)
        else:
            arguments.remark(option.key, option.why)
