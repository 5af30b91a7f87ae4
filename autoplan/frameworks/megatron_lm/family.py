"""Which model, training and plan do Megatron's settings mean?  The same for all that start Megatron-Core.

Settings go by the names of Megatron-LM's parsed arguments (d98e8a6); readers of other formats translate into them.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.frameworks.common.launch import Given, Launch, Unread
from autoplan.frameworks.common.shell import is_open
from autoplan.frameworks.megatron_lm.arguments import is_number, typed
from autoplan.read.model import load_model, preset_models
from autoplan.spec.enums import Precision, RankOrder, RecomputeModule, Schedule, Sharding
from autoplan.spec.model import Experts, LatentAttention, ModelSpec
from autoplan.spec.plan import ParallelPlan, even_chunks
from autoplan.spec.training import Attention, TrainingSpec

MOST_LAYERS = 10**4

# Of arguments that change neither the time of a step nor its memory, or little that is a person's own to choose.
_HARMLESS = re.compile(
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

# Sizes of the vocabularies that a tokenizer by this name has in the published models it comes from.
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


@dataclass(frozen=True, slots=True)
class Said:
    """One setting of a file: its name and value as they are written there, and what they are in Megatron-LM."""

    option: str
    text: str
    argument: str
    value: Any


class Settings:
    """What a file says, by argument; it remembers what was asked for.  `defaults` hold where the file is silent."""

    def __init__(self, said: Iterable[Said], defaults: Mapping[str, Any] | None = None) -> None:
        self.said = {one.argument: one for one in said}
        self.defaults = dict(defaults or {})
        self.taken: set[str] = set()
        self.notes: list[Unread] = []

    def value(self, name: str, default: Any = None) -> Any:
        """What the file says of `name`, else what holds where it is silent."""
        self.taken.add(name)
        if name in self.said:
            said = self.said[name]
            if isinstance(said.value, str) and is_open(said.value):
                names = re.findall(r"\$\{?([A-Za-z0-9_]+)", said.value)
                way = f"pass --set {names[0]}=VALUE" if names else "write its value"
                value = cleaned(said.value)[:60]
                raise InputError(f"{said.option} is {value}, which only a running shell knows: {way}")
            return said.value
        return self.defaults.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number."""
        value = self.value(name, default)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, str) and re.fullmatch(r"\d{1,12}", value.strip(), re.ASCII):
            return int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 10**12:
            return int(value)
        raise InputError(f"{self.name_of(name)} must be a whole number, got {str(value)[:60]!r}")

    def number(self, name: str, default: float) -> float:
        """A number of any size."""
        value = self.value(name, default)
        if isinstance(value, str) and is_number(value):
            return float(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise InputError(f"{self.name_of(name)} must be a number, got {str(value)[:60]!r}")

    def count(self, name: str, default: int = 1) -> int:
        """A whole number that is there."""
        value = self.integer(name, default)
        return default if value is None else value

    def needed(self, name: str, way: str) -> int:
        """A whole number without which nothing can be read."""
        value = self.integer(name)
        if value is None:
            raise InputError(f"{self.name_of(name)} is not in the file: {way}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch; a word behind one is not its value."""
        value = self.value(name, default)
        if isinstance(value, str) and value.casefold() in ("true", "false", "1", "0", ""):
            return value.casefold() in ("true", "1", "")
        if value is None or isinstance(value, (bool, int)):
            return bool(value)
        raise InputError(f"{self.name_of(name)} is a switch, got {str(value)[:60]!r}")

    def word(self, name: str, default: str | None = None) -> str | None:
        """A word."""
        value = self.value(name, default)
        return None if value is None else str(value)

    def words(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Words."""
        value = self.value(name, default)
        if value is None:
            return default
        return tuple(str(one) for one in value) if isinstance(value, (list, tuple)) else tuple(str(value).split())

    def name_of(self, name: str) -> str:
        """The name that the file has for an argument."""
        return self.said[name].option if name in self.said else name

    def note(self, name: str, why: str, *, matters: bool = True, default: str = "") -> None:
        """Lists an option that the plan does not hold whole."""
        said = self.said.get(name)
        self.taken.add(name)
        text = said.text if said else f"{self.defaults.get(name, default)} (its default)"
        self.notes.append(Unread(option=said.option if said else name, value=text, why=why, matters=matters))

    def options(self) -> tuple[tuple[str, str], ...]:
        """What was read, as written."""
        return tuple((said.option, said.text) for name, said in self.said.items() if name in self.taken)

    def unread(self) -> tuple[Unread, ...]:
        """What was not understood, what costs something first."""
        rest = []
        for name, said in self.said.items():
            if name not in self.taken:
                harmless = _HARMLESS.match(name) is not None
                why = "costs neither time nor memory of a step" if harmless else "not known here"
                rest.append(Unread(option=said.option, value=said.text, why=why, matters=not harmless))
        return tuple(sorted([*self.notes, *rest], key=lambda one: not one.matters))


def launch_of(
    settings: Settings,
    given: Given,
    *,
    target: str,
    framework: str,
    num_devices: int | None,
    base: ModelSpec | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """What the settings start.  `base` is the model that they begin from, `schedule` one that is not Megatron-LM's."""
    seq_len = given.seq_len or settings.needed("seq_length", "pass --seq-len")
    settings.value("seq_length")
    if given.model is not None:
        for name in _ARCHITECTURE & settings.said.keys():
            settings.note(name, "--model wins", matters=False)
        model = given.model
    else:
        model = _model(settings, base, seq_len)
    _dropout(settings)
    precision = _precision(settings)
    plan = _plan(settings, model, precision, given.num_devices or num_devices, schedule)
    training = TrainingSpec(seq_len=seq_len, precision=precision, attention=_attention(settings))
    if (optimizer := settings.word("optimizer", "adam")) not in ("adam", "adamw"):
        settings.note("optimizer", f"priced as Adam, not {str(optimizer)[:30]}")
    _rest(settings)
    return Launch(
        target=target,
        framework=framework,
        model=model,
        training=training,
        plan=plan,
        options=settings.options(),
        unread=settings.unread(),
    )


# -- the model --------------------------------------------------------------------------------------------------------

_NAMES = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels"
    " qk_layernorm vocab_size padded_vocab_size tokenizer_type tokenizer_model max_position_embeddings"
    " position_embedding_type use_rotary_position_embeddings rotary_base normalization swiglu add_bias_linear"
    " add_qkv_bias untie_embeddings_and_output_weights window_size window_attn_skip_freq softmax_type mtp_num_layers"
    " multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim num_experts"
    " moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size"
    " moe_layer_freq squared_relu openai_gelu quick_geglu"
)
_ARCHITECTURE = frozenset(_NAMES.split())


def _model(settings: Settings, base: ModelSpec | None, seq_len: int) -> ModelSpec:
    way = "pass --model"
    num_layers = settings.integer("num_layers", base.num_layers if base else None) or settings.needed("num_layers", way)
    hidden = settings.integer("hidden_size", base.hidden_size if base else None) or settings.needed("hidden_size", way)
    heads = settings.integer("num_attention_heads", base.num_heads if base else None)
    heads = heads or settings.needed("num_attention_heads", way)
    if base is not None and base.layer_pattern is not None:
        raise InputError(f"model {base.name!r} is a hybrid, which is not read from this file: pass --model")
    bias = settings.flag("add_bias_linear", base.mlp_bias if base else True)
    kind = _positions(settings, base)
    ffn_size = settings.integer("ffn_hidden_size", base.ffn_size or None if base else None)
    gated = settings.flag("swiglu", base.gated_mlp if base else False) or settings.flag("quick_geglu")
    if ffn_size is None and (base is None or base.moe is None):
        ffn_size = 4 * hidden if not gated else int(4 * hidden * 2 / 3 / 64) * 64
    head_dim = settings.integer("kv_channels", base.head_dim if base else None)
    positions = settings.integer("max_position_embeddings", base.max_positions or None if base else None) or seq_len
    mla = _latent(settings, base)
    moe = _experts(settings, base, num_layers, ffn_size or 0, bias)
    model = ModelSpec(
        name="megatron",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=_vocabulary(settings, base),
        num_heads=heads,
        num_kv_heads=None if mla else _kv_heads(settings, base, heads),
        head_dim=None if mla or (head_dim or 0) * heads == hidden else head_dim,
        ffn_size=ffn_size or 0,
        gated_mlp=gated,
        mlp_bias=bias,
        qkv_bias=bias or settings.flag("add_qkv_bias", base.qkv_bias if base else False),
        attention_output_bias=bias,
        attention_sinks=settings.word("softmax_type", _sinks(base)) == "learnable",
        qk_norm="head" if settings.flag("qk_layernorm", bool(base and base.qk_norm != "none")) and not mla else "none",
        norm="rmsnorm" if settings.word("normalization", _norm(base)) == "RMSNorm" else "layernorm",
        position_embedding=kind,  # type: ignore[arg-type]
        rope_base=settings.number("rotary_base", base.rope_base if base else 10000.0),
        max_positions=positions if kind == "learned" else 0,
        tied_embeddings=not settings.flag(
            "untie_embeddings_and_output_weights", not base.tied_embeddings if base else False
        ),
        **_window(settings, base),
        num_mtp_layers=settings.count("mtp_num_layers", base.num_mtp_layers if base else 0),
        mla=mla,
        moe=moe,
    )
    if moe is not None and not any("mlp" in layer for layer in model.layers):
        model = replace(model, ffn_size=0)
    return _named(model, base)


def _named(model: ModelSpec, base: ModelSpec | None) -> ModelSpec:
    """The shipped model of just this architecture, the one that the file names first.

    Which function an MLP without a gate has is not read.
    """
    for known in ([base] if base else []) + list(_presets()):
        if replace(known, name=model.name, aliases=(), sources=(), squared_relu=model.squared_relu) == model:
            return known
    return replace(model, name=base.name if base else "megatron")


@lru_cache(maxsize=1)
def _presets() -> tuple[ModelSpec, ...]:
    return tuple(load_model(name) for name in preset_models())


@lru_cache(maxsize=1)
def _by_name() -> dict[str, ModelSpec]:
    names: dict[str, ModelSpec] = {}
    for model in _presets():
        for name in (model.name, *model.aliases):
            names.setdefault(_letters(name), model)
            names.setdefault(_letters(name.rpartition("/")[2]), model)
    return names


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def preset_of(*names: str) -> ModelSpec | None:
    """The shipped model that one of these names means, the first that does: dots and dashes count for nothing."""
    for name in names:
        for one in (name, name.rpartition("/")[2], re.sub(r"[_-]?v0\.1$", "", name)):
            if _letters(one) in _by_name():
                return _by_name()[_letters(one)]
    return None


def _norm(base: ModelSpec | None) -> str:
    return "RMSNorm" if base and base.norm == "rmsnorm" else "LayerNorm"


def _sinks(base: ModelSpec | None) -> str:
    return "learnable" if base and base.attention_sinks else "vanilla"


def _positions(settings: Settings, base: ModelSpec | None) -> str:
    known = {"learned": "learned_absolute", "rope": "rope", "none": "none", "alibi": "none"}
    text = settings.word("position_embedding_type", known[base.position_embedding] if base else "learned_absolute")
    if settings.flag("use_rotary_position_embeddings"):
        text = "rope"
    if text in ("rope", "yarn"):
        return "rope"
    if text in ("learned_absolute", "none"):
        return "learned" if text == "learned_absolute" else "none"
    raise InputError(
        f"{settings.name_of('position_embedding_type')} {str(text)[:30]!r} is not known here: pass --model"
    )


def _kv_heads(settings: Settings, base: ModelSpec | None, heads: int) -> int | None:
    groups = settings.integer("num_query_groups", base.num_kv_heads if base else None)
    # The number counts only where the switch is on, which has a setting of its own in the command line alone.
    grouped = settings.flag("group_query_attention", groups is not None and bool(base or settings.defaults))
    return groups if grouped and groups != heads else None


def _vocabulary(settings: Settings, base: ModelSpec | None) -> int:
    size = settings.integer("vocab_size")
    padded = settings.integer("padded_vocab_size")
    if size or padded or base:  # which tokenizer fills it changes nothing
        return size or padded or (base.vocab_size if base else 0)
    told = settings.said.get("tokenizer_model")
    known = preset_of(str(told.value)) if told else None
    if known:
        settings.note("tokenizer_model", f"its vocabulary is taken as that of {known.name}", matters=False)
        return known.vocab_size
    tokenizer = settings.word("tokenizer_type")
    if tokenizer is None and "vocab_file" in settings.said and "merge_file" in settings.said:
        tokenizer = "GPT2BPETokenizer"
    if tokenizer in _VOCABULARIES:
        size = _VOCABULARIES[tokenizer]
        name = "tokenizer_type" if "tokenizer_type" in settings.said else "vocab_file"
        settings.note(name, f"its vocabulary is taken as {size:,} tokens: pass --model if it differs")
        return size
    raise InputError("the size of the vocabulary is not in the file: pass --model")


def _window(settings: Settings, base: ModelSpec | None) -> dict[str, Any]:
    value = settings.value("window_size")
    numbers = [int(one) for one in re.findall(r"-?\d{1,9}", str(value))] if value is not None else []
    window = base.window if base and value is None else None
    if numbers:
        window = numbers[0] + 1 if numbers[0] >= 0 else None
    every = settings.value("window_attn_skip_freq", base.full_attention_interval if base and window else 0)
    if window is None or every is None:
        return {"window": window, "full_attention_interval": 0}
    if not isinstance(every, int) and not (isinstance(every, str) and every.isdigit()):
        raise InputError(f"{settings.name_of('window_attn_skip_freq')} is a pattern: pass --model")
    return {"window": window, "full_attention_interval": int(every)}


def _latent(settings: Settings, base: ModelSpec | None) -> LatentAttention | None:
    known = base.mla if base else None
    if not settings.flag("multi_latent_attention", known is not None):
        return None
    return LatentAttention(
        q_lora_rank=settings.integer("q_lora_rank", known.q_lora_rank if known else None),
        kv_lora_rank=settings.count("kv_lora_rank", known.kv_lora_rank if known else 32),
        qk_nope_head_dim=settings.count("qk_head_dim", known.qk_nope_head_dim if known else 128),
        qk_rope_head_dim=settings.count("qk_pos_emb_head_dim", known.qk_rope_head_dim if known else 64),
        v_head_dim=settings.count("v_head_dim", known.v_head_dim if known else 128),
    )


def _experts(settings: Settings, base: ModelSpec | None, num_layers: int, ffn_size: int, bias: bool) -> Experts | None:
    known = base.moe if base else None
    num_experts = settings.integer("num_experts", known.num_experts if known else None)
    if not num_experts:
        return None
    places = settings.value("moe_layer_freq")
    dense, interval = (known.num_dense_layers, known.interval) if known else (0, 1)
    if places is not None:
        dense, interval = moe_places(places, num_layers)
    return Experts(
        num_experts=num_experts,
        experts_per_token=settings.count("moe_router_topk", known.experts_per_token if known else 2),
        expert_ffn_size=settings.integer("moe_ffn_hidden_size", known.expert_ffn_size if known else None) or ffn_size,
        shared_expert_ffn_size=settings.integer(
            "moe_shared_expert_intermediate_size", known.shared_expert_ffn_size if known else 0
        )
        or 0,
        shared_expert_gate=settings.flag("moe_shared_expert_gate", known.shared_expert_gate if known else False),
        router_bias=bias,
        num_dense_layers=dense,
        interval=interval,
        latent_size=settings.integer("moe_latent_size", known.latent_size if known else None),
    )


def moe_places(pattern: Any, num_layers: int) -> tuple[int, int]:
    """(dense layers before the first of experts, interval) of Megatron's frequency or pattern of layers of experts."""
    if isinstance(pattern, str) and re.fullmatch(r"\d{1,5}", pattern.strip(), re.ASCII):
        pattern = int(pattern)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        if pattern == 1:
            return 0, 1
        places = [int(pattern > 0 and at % pattern == 0) for at in range(num_layers)]
    elif isinstance(pattern, str):
        places = _pattern(pattern)
    else:
        places = list(pattern) if isinstance(pattern, (list, tuple)) else []
    if len(places) != num_layers or set(places) - {0, 1} or 1 not in places:
        raise InputError(f"moe_layer_freq {str(pattern)[:60]!r} does not name the {num_layers} layers: pass --model")
    first = places.index(1)
    for interval in range(1, num_layers + 1):
        for dense in (0, first):
            if places == [int(at >= dense and (at + 1) % interval == 0) for at in range(num_layers)]:
                return dense, interval
    raise InputError(f"moe_layer_freq {str(pattern)[:60]!r}: such a mixture of layers is not known here")


def _pattern(text: str) -> list[int]:
    """What a sum and product of lists such as ([0]*3+[1]*58) is."""

    def value(node: ast.expr) -> list[int] | int:
        match node:
            case ast.Constant(value=int() as number) if 0 <= number <= MOST_LAYERS:
                return number
            case ast.List(elts=items):
                return [item for one in items for item in [value(one)] if isinstance(item, int)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                a, b = value(left), value(right)
                if isinstance(a, list) and isinstance(b, list):
                    return a + b
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                a, b = value(left), value(right)
                if isinstance(a, int) and isinstance(b, list):
                    a, b = b, a
                if isinstance(a, list) and isinstance(b, int) and len(a) * b <= MOST_LAYERS:
                    return a * b
        raise ValueError

    try:
        result = value(ast.parse(text.strip()[:4000], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        result = []
    return result if isinstance(result, list) else []


def _dropout(settings: Settings) -> None:
    for name in ("hidden_dropout", "attention_dropout"):
        if settings.number(name, 0.1) > 0:
            settings.note(name, "dropout keeps masks, which are not priced here", default="0.1")


# -- training ---------------------------------------------------------------------------------------------------------


def _precision(settings: Settings) -> Precision:
    bf16, fp16 = settings.flag("bf16"), settings.flag("fp16")
    fp8, fp4 = settings.word("fp8"), settings.word("fp4")
    recipe = settings.word("fp8_recipe", "delayed")
    settings.taken |= {"fp4_recipe"}
    if fp4 and fp4 != "None":
        return Precision.NVFP4
    if fp8 and fp8 != "None":
        if recipe == "mxfp8":
            return Precision.MXFP8
        if recipe not in ("tensorwise", "delayed"):
            settings.note("fp8_recipe", "priced with one scale a tensor")
        return Precision.FP8
    if not bf16 and not fp16:
        raise InputError("neither bf16 nor fp16 is on: training in 32 bits is not priced")
    return Precision.FP16 if fp16 else Precision.BF16


def _attention(settings: Settings) -> Attention:
    backend = settings.word("attention_backend", "auto")
    settings.flag("use_flash_attn")
    plain = str(backend).rpartition(".")[2]
    return "unfused" if plain in ("unfused", "local") else "flash"


# -- the plan ---------------------------------------------------------------------------------------------------------


def _plan(
    settings: Settings, model: ModelSpec, precision: Precision, num_devices: int | None, schedule: Schedule | None
) -> ParallelPlan:
    tp, cp = settings.count("tensor_model_parallel_size"), settings.count("context_parallel_size")
    pp = settings.count("pipeline_model_parallel_size")
    if num_devices is None:
        raise InputError("the number of devices is not in the file: pass --devices")
    for name, degree in (("tensor", tp), ("context", cp), ("pipeline", pp), ("the number of devices", num_devices)):
        if not 1 <= degree <= 10**6:
            raise InputError(f"{name} must lie between 1 and 1,000,000, got {degree}")
    dp, rest = divmod(num_devices, tp * cp * pp)
    if rest or not dp:
        raise InputError(
            f"tp {tp} x cp {cp} x pp {pp} does not divide the {num_devices} devices that are started: pass --devices"
        )
    micro_batch = settings.count("micro_batch_size")
    vp, layers = _stages(settings, model, pp)
    sharding = _sharding(settings)
    copies = dp if sharding == "none" else settings.count("num_distributed_optimizer_instances")
    if copies < 1 or dp % copies:
        raise InputError(f"{settings.name_of('num_distributed_optimizer_instances')} {copies} does not divide dp {dp}")
    ep = settings.count("expert_model_parallel_size")
    etp = settings.integer("expert_tensor_parallel_size") or tp
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if settings.said.get(name) and settings.value(name):
            settings.note(name, "the plan is that of the full batch", matters=False)
    return ParallelPlan(
        global_batch=settings.integer("global_batch_size") or micro_batch * dp,
        micro_batch=micro_batch,
        tp=tp,
        sp=settings.flag("sequence_parallel") and tp > 1,
        cp=cp,
        cp_kind=_cp_kind(settings, cp),  # type: ignore[arg-type]
        pp=pp,
        vp=vp,
        schedule=schedule or (Schedule.INTERLEAVED if vp > 1 else Schedule.ONE_F_ONE_B),
        layers_per_chunk=layers,
        ep=ep if model.moe else 1,
        etp=etp if model.moe else 1,
        dp_replicate=copies,
        dp_shard=dp // copies,
        sharding=sharding,
        precision=precision,
        offload=_offload(settings),  # type: ignore[arg-type]
        tp_overlap=settings.flag("tp_comm_overlap"),
        grad_reduce_overlap=settings.flag("overlap_grad_reduce"),
        param_gather_overlap=settings.flag("overlap_param_gather") and sharding != "none",
        ep_overlap=settings.flag("overlap_moe_expert_parallel_comm") and model.moe is not None,
        rank_order=RankOrder.PP_BEFORE_DP
        if settings.flag("use_tp_pp_dp_mapping") and pp > 1
        else RankOrder.DP_BEFORE_PP,
        **_recompute(settings),
    )


def _cp_kind(settings: Settings, cp: int) -> str:
    kinds = set(settings.words("cp_comm_type", ("p2p",)))
    if kinds == {"a2a"} and cp > 1:
        return "all_to_all"
    if cp > 1 and kinds - {"p2p"}:
        settings.note("cp_comm_type", "priced as ring attention")
    return "ring"


def _stages(settings: Settings, model: ModelSpec, pp: int) -> tuple[int, tuple[int, ...] | None]:
    """(chunks of a rank, layers of every chunk where they are not spread evenly)."""
    num_layers = model.num_layers
    layout = settings.value("pipeline_model_parallel_layout")
    per_chunk = settings.integer("num_layers_per_virtual_pipeline_stage")
    chunks = settings.integer("num_virtual_stages_per_pipeline_rank") or settings.integer(
        "virtual_pipeline_model_parallel_size"
    )
    first, last = (settings.integer(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    embeds = settings.flag("account_for_embedding_in_pipeline_split")
    loses = settings.flag("account_for_loss_in_pipeline_split")
    if layout is not None:
        counts = layout_counts(layout)
        if len(counts) % pp:
            raise InputError(
                f"{settings.name_of('pipeline_model_parallel_layout')} has {len(counts)} stages, pp is {pp}"
            )
        if sum(counts) != num_layers:
            raise InputError(
                f"{settings.name_of('pipeline_model_parallel_layout')} has {sum(counts)} layers, the model {num_layers}"
            )
        return len(counts) // pp, _uneven(counts)
    if pp == 1:
        return 1, None
    if per_chunk:
        chunks = max(num_layers // pp // per_chunk, 1)
    vp = chunks or 1
    if not 1 <= vp * pp <= 10 * MOST_LAYERS:
        raise InputError(f"pp {pp} x {vp} chunks are more than {10 * MOST_LAYERS:,}")
    if first is None and last is None:
        whole = num_layers + embeds + loses
        if not embeds and not loses and whole % (pp * vp) == 0:
            return vp, None
        if whole % (pp * vp):
            counted = ", embedding or loss counted," if embeds or loses else ""
            raise InputError(
                f"{whole} layers{counted} do not spread evenly over {pp * vp} chunks, which Megatron refuses"
            )
        counts = [whole // (pp * vp)] * (pp * vp)
        counts[0] -= embeds
        counts[-1] -= loses
        return vp, _uneven(counts)
    ends = (first or 0) + (last or 0)
    middle = pp - (first is not None) - (last is not None)
    each = (num_layers - ends) // middle if middle > 0 else 0
    stages = [*([first] if first is not None else []), *[each] * middle, *([last] if last is not None else [])]
    if sum(stages) != num_layers or len(stages) != pp or any(count % vp for count in stages):
        raise InputError(
            f"{num_layers} layers do not spread over {pp} stages of {vp} chunks with {first} and {last} at the ends"
        )
    return vp, _uneven([count // vp for _ in range(vp) for count in stages])


def _uneven(counts: list[int]) -> tuple[int, ...] | None:
    """Counts as a plan holds them: none where they are those of an even spread."""
    return None if tuple(counts) == even_chunks(sum(counts), len(counts)) else tuple(counts)


def layout_counts(layout: Any) -> list[int]:
    """The layers of every chunk in Megatron-LM's notation, 'Et*3|(t*4|)*2t*2L', or as lists of names."""
    if isinstance(layout, (list, tuple)):
        return [sum(str(one).rpartition(".")[2] == "decoder" for one in chunk) for chunk in layout]
    text = re.sub(r"[\s,]", "", str(layout))
    repeats = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([EtmL])\*(\d{1,4})")
    for _ in range(MOST_LAYERS):
        match = repeats.search(text)
        if match is None:
            break
        text = text[: match.start()] + (match[1] or match[3] or "") * int(match[2] or match[4]) + text[match.end() :]
        if len(text) > 4 * MOST_LAYERS:
            break
    if not re.fullmatch(r"[EtmL|]+", text) or len(text) > 4 * MOST_LAYERS:
        raise InputError(f"pipeline layout {str(layout)[:60]!r} is not in the notation Et*3|t*4|t*2L")
    return [chunk.count("t") for chunk in text.split("|")]


def _sharding(settings: Settings) -> Sharding:
    distributed = settings.flag("use_distributed_optimizer")
    fsdp, torch_fsdp = settings.flag("use_megatron_fsdp"), settings.flag("use_torch_fsdp2")
    strategy = settings.word("data_parallel_sharding_strategy", "no_shard")
    if torch_fsdp:
        settings.note("use_torch_fsdp2", "priced as Megatron-FSDP")
        return Sharding.ZERO3
    if fsdp:
        kinds: dict[str, Sharding] = {
            "no_shard": Sharding.NONE,
            "optim": Sharding.ZERO1,
            "optim_grads": Sharding.ZERO2,
            "optim_grads_params": Sharding.ZERO3,
        }
        if strategy not in kinds:
            name = settings.name_of("data_parallel_sharding_strategy")
            raise InputError(f"{name} {str(strategy)[:30]!r} is not one of {', '.join(kinds)}")
        return kinds[strategy]
    return Sharding.ZERO1 if distributed else Sharding.NONE


def _recompute(settings: Settings) -> dict[str, Any]:
    kind, method = settings.word("recompute_granularity"), settings.word("recompute_method")
    count = settings.integer("recompute_num_layers")
    modules = settings.words("recompute_modules", ("core_attn",))
    if settings.flag("recompute_activations"):
        kind = "selective"
    if kind == "full":
        if method == "block" and count:
            return {"recompute": "full", "recompute_num_layers": count}
        if (count or 1) > 1:
            settings.note("recompute_num_layers", "units of several layers keep less than is priced")
        return {"recompute": "full"}
    if kind == "selective":
        known = tuple(module for module in RecomputeModule if module in modules)
        if set(modules) - set(known):
            settings.note("recompute_modules", f"without {', '.join(sorted(set(modules) - set(known)))[:60]}")
        if known:
            return {"recompute": "selective", "recompute_modules": known}
    elif kind not in (None, "None", "none"):
        raise InputError(f"{settings.name_of('recompute_granularity')} {kind[:30]!r} is neither full nor selective")
    return {}


def _offload(settings: Settings) -> str:
    if not settings.flag("optimizer_cpu_offload"):
        return "none"
    if settings.number("optimizer_offload_fraction", 1.0) != 1.0:
        settings.note("optimizer_offload_fraction", "priced as the whole optimizer on the host")
    if not settings.flag("overlap_cpu_optimizer_d2h_h2d"):
        settings.note("overlap_cpu_optimizer_d2h_h2d", "copies to the host are priced as overlapped", default="off")
    return "optimizer"


def _rest(settings: Settings) -> None:
    """Settings that are as the cost model takes them, or whose effect it does not know."""
    for name, (values, why) in _USUAL.items():
        said = settings.said.get(name)
        if said is None or name in settings.taken:
            continue
        value = typed(said.value)
        if value is None or not values or value in values:
            settings.taken.add(name)
        else:
            settings.note(name, why)


# What the cost model takes for granted: the values under which it is right, none where any is, and else what it does.
_USUAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "make_vocab_size_divisible_by": ((128,), "priced with a vocabulary padded to multiples of 128"),
    "moe_grouped_gemm": ((True,), "priced with grouped products of the experts"),
    "moe_use_legacy_grouped_gemm": ((), ""),
    "moe_shared_expert_overlap": ((False,), "the overlap of shared experts is not priced"),
    "moe_permute_fusion": ((True,), "priced with a fused permutation"),
    "moe_router_padding_for_quantization": ((), ""),
    # Presets that drop tokens price it (`Framework.drops_tokens`); files do not choose a preset by it.
    "moe_expert_capacity_factor": ((-1,), "dropped tokens are priced by presets that drop them alone"),
    "moe_pad_expert_input_to_capacity": ((False,), "dropped tokens are priced by presets that drop them alone"),
    "moe_token_dispatcher_type": (("alltoall", "flex"), "priced as all-to-all"),
    "moe_flex_dispatcher_backend": (("deepep", "hybridep"), "priced as HybridEP"),
    "use_precision_aware_optimizer": ((), ""),
    "init_model_with_meta_device": ((), ""),
    "gradient_accumulation_fusion": ((), ""),
    "outer_dp_sharding_strategy": (("no_shard",), "priced without sharding over the outer replicas"),
    "align_param_gather": ((), ""),
    "overlap_p2p_comm": ((True,), "priced with messages that overlap"),
    "fp8_param_gather": ((False,), "weights are priced as gathered in 16 bits"),
    "cross_entropy_loss_fusion": ((False,), "priced as the framework's usual loss"),
    "cross_entropy_fusion_impl": ((), ""),
    "grad_reduce_in_bf16": ((False,), "priced as the framework's usual reduction"),
    "masked_softmax_fusion": ((), ""),
    "bias_swiglu_fusion": ((True,), "priced with a fused activation"),
    "bias_gelu_fusion": ((), ""),
    "bias_dropout_fusion": ((), ""),
    "apply_rope_fusion": ((True,), "priced with a fused rotation"),
    "calculate_per_token_loss": ((), ""),
    "apply_layernorm_1p": ((), ""),
    "empty_unused_memory_level": ((0,), "giving cached memory back is not priced"),
    "main_grads_dtype": (("fp32", "torch.float32"), "states are priced in 32 bits"),
    "main_params_dtype": (("fp32", "torch.float32"), "states are priced in 32 bits"),
    "exp_avg_dtype": (("fp32", "torch.float32"), "states are priced in 32 bits"),
    "exp_avg_sq_dtype": (("fp32", "torch.float32"), "states are priced in 32 bits"),
    "tp_comm_overlap_cfg": ((), ""),
    "cuda_graph_impl": (("none",), "CUDA graphs are not priced"),
    "cuda_graph_scope": ((), ""),
    "cuda_graph_warmup_steps": ((), ""),
    "squared_relu": ((), ""),
    "openai_gelu": ((), ""),
    "nccl_ub": ((False,), "registered communication buffers are not priced"),
    "fine_grained_activation_offloading": ((False,), "activations on the host are not priced"),
    "cpu_offloading_num_layers": ((0,), "activations on the host are not priced"),
    "delay_wgrad_compute": ((False,), "the delay of weight gradients is not priced"),
}
