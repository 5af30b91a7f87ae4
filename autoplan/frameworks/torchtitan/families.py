"""Models that torchtitan builds, and the table of sizes that its layer builders take."""

from __future__ import annotations

from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.literals import Built
from autoplan.frameworks.common.option_table import (
    Constant,
    Fields,
    Row,
    Value,
    count,
    optional_count,
    read_fields,
    written,
)
from autoplan.frameworks.common.options import Argument, Options
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Experts, LatentAttention
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile

_HEADS = (count("n_heads", "model.num_heads"), optional_count("n_kv_heads", "model.kv_heads"))
_HEAD_DIM = count("head_dim", "model.qk_head_dim")
_NUM_EXPERTS = count("num_experts", "model.moe.num_experts")
_TOP_K = count("top_k", "model.moe.experts_per_token")
_EXPERT_WIDTH = count("moe_hidden_dim", "model.moe.expert_ffn_size")


def _num_shared_experts(file: PlanFile) -> int:
    moe = file.model.moe
    return moe.shared_expert_ffn_size // moe.expert_ffn_size if moe else 0


# Sizes that a family's layer builder takes in addition to depth, width and positions.
BUILDERS: dict[str, tuple[Row | Constant, ...]] = {
    "_build_llama3_layers": (*_HEADS, count("hidden_dim", "model.ffn_size")),
    "_build_qwen3_layers": (*_HEADS, _HEAD_DIM, count("hidden_dim", "model.ffn_size")),
    "_build_qwen3_moe_layers": (*_HEADS, _HEAD_DIM, _NUM_EXPERTS, _TOP_K, _EXPERT_WIDTH),
    "_build_gptoss_layers": (
        _NUM_EXPERTS,
        _TOP_K,
        count("hidden_dim", "model.moe.expert_ffn_size"),
        Constant("load_balance_coeff", 1e-3),
    ),
    "_build_dsv3_layers": (
        count("n_heads", "model.num_heads"),
        optional_count("q_lora_rank", "model.mla.q_lora_rank", encode=lambda rank: rank or 0),
        count("kv_lora_rank", "model.mla.kv_lora_rank"),
        count("qk_nope_head_dim", "model.mla.qk_nope_head_dim"),
        count("qk_rope_head_dim", "model.mla.qk_rope_head_dim"),
        count("v_head_dim", "model.mla.v_head_dim"),
        Constant("mscale", 1.0),
        _NUM_EXPERTS,
        count("n_dense_layers", "model.moe.num_dense_layers", 0),
        count("dense_hidden_dim", "model.ffn_size", 0),
        _EXPERT_WIDTH,
        Constant("num_shared_experts", _num_shared_experts),
        count("router_top_k", "model.moe.experts_per_token"),
        Constant("router_score_func", "sigmoid"),
        Constant("router_route_norm", True),
    ),
}


def builder_of(family: str, model: ModelSpec) -> str:
    """Return the function of a family that builds the layers of a model."""
    names = {"llama3": "llama3", "qwen3": "qwen3_moe" if model.moe else "qwen3", "gpt_oss": "gptoss"}
    return f"_build_{names.get(family, 'dsv3')}_layers"


def write_sizes(builder: str, plan_file: PlanFile) -> dict[str, Value]:
    """Return the arguments of a builder; a required one states that no token is dropped."""
    dropping = {"non_blocking_capacity_factor": None} if builder == "_build_dsv3_layers" else {}
    return written(BUILDERS[builder], plan_file) | dropping


def _sizes(*calls: Built) -> Options:
    """Return the sizes in the calls of a builder and of a model's config; the first call takes precedence."""
    sizes = {key: value for call in reversed(calls) for key, value in call.named.items()}
    return Options((Argument(key, str(value), key, value) for key, value in sizes.items()), way_out="pass --model")


def num_mtp_layers_of(built: Built) -> int:
    """Return the number of multi-token prediction layers in a call; the default is 0."""
    return _sizes(built).count("num_mtp_layers", 0, least=0)


def model_of(config: Built, name: str) -> ModelSpec:
    """Return the architecture of a model config whose layers come from a builder of torchtitan."""
    layers = config.named.get("layers")
    if not isinstance(layers, Built):
        raise InputError("the layers of the model cannot be read: pass --model")
    builder, rope = layers.name.rsplit(".", 1)[-1], layers.named.get("rope")
    if builder not in BUILDERS:
        raise InputError(f"the layers that {builder} builds are not known: pass --model")
    sizes, rows = _sizes(layers, config), [row for row in BUILDERS[builder] if isinstance(row, Row)]

    def fields(holder: str) -> Fields:
        return read_fields([row for row in rows if row.field.rpartition(".")[0] == holder], sizes)

    base = rope.named.get("theta", 10000.0) if isinstance(rope, Built) else 10000.0
    shape: Fields = {
        "name": name,
        "num_layers": sizes.count("n_layers"),
        "hidden_size": sizes.count("dim"),
        "vocab_size": sizes.count("vocab_size"),
        "tied_embeddings": config.named.get("enable_weight_tying", False) is True,
        "rope_base": float(base) if isinstance(base, int | float) else 10000.0,
        **fields("model"),
    }
    moe, mla = fields("model.moe"), fields("model.mla")
    if builder == "_build_gptoss_layers":
        # models/gpt_oss/__init__.py:76 and :183
        fixed = load_model("gpt-oss-20b")
        return replace(fixed, **shape, aliases=(), sources=(), moe=Experts(**moe, router_bias=True))
    if builder == "_build_dsv3_layers":
        mtp = config.named.get("mtp_layers")
        shape["num_mtp_layers"] = num_mtp_layers_of(mtp) if isinstance(mtp, Built) else 0
        moe["shared_expert_ffn_size"] = sizes.count("num_shared_experts", least=0) * moe["expert_ffn_size"]
        shape["ffn_size"] *= moe["num_dense_layers"] > 0
        mla["q_lora_rank"] = mla["q_lora_rank"] or None
        return ModelSpec(**shape, mla=LatentAttention(**mla), moe=Experts(**moe))
    kv_heads, width = shape.pop("kv_heads"), shape.pop("qk_head_dim", None)
    shape["num_kv_heads"] = None if kv_heads == shape["num_heads"] else kv_heads
    if width is not None:
        shape |= {"qk_norm": "head", "head_dim": None if width * shape["num_heads"] == shape["hidden_size"] else width}
    return ModelSpec(**shape, moe=Experts(**moe) if moe else None)


def family_of(model: ModelSpec) -> str:
    """Return the torchtitan family with the blocks of `model`; raises InputError if there is none."""
    for family, fits in (("gpt_oss", _is_gpt_oss), ("deepseek_v3", _is_deepseek), ("qwen3", _is_qwen3)):
        if fits(model):
            return family
    if _is_llama3(model):
        return "llama3"
    raise InputError(
        f"torchtitan builds no model with the blocks of {model.name!r}: it knows those of Llama 3 (no biases), Qwen 3 "
        "(norms of heads, all layers MoE or none), DeepSeek-V3 (latent attention) and gpt-oss"
    )


def _is_plain(model: ModelSpec) -> bool:
    """Return whether a model has rotary positions and one RMSNorm before every gated block, like all of its models."""
    return (
        not model.unusual_parts
        and model.norm == "rmsnorm"
        and model.position_embedding == "rope"
        and model.gated_mlp
        and not model.shares_mtp_layer
    )


def _is_unbiased(model: ModelSpec) -> bool:
    biases = (model.mlp_bias, model.qkv_bias, model.attention_output_bias, model.attention_sinks)
    return not any(biases) and model.window is None and not (model.moe and model.moe.router_bias)


def _is_llama3(model: ModelSpec) -> bool:
    dense = model.moe is None and model.mla is None and model.qk_norm == "none" and not model.num_mtp_layers
    return (
        _is_plain(model) and _is_unbiased(model) and dense and model.qk_head_dim * model.num_heads == model.hidden_size
    )


def _is_qwen3(model: ModelSpec) -> bool:
    moe = model.moe
    plain = moe is None or (
        not moe.num_dense_layers and moe.interval == 1 and not moe.shared_expert_ffn_size and moe.latent_size is None
    )
    usual = model.mla is None and model.qk_norm == "head" and not model.num_mtp_layers
    return _is_plain(model) and _is_unbiased(model) and plain and usual


def _is_deepseek(model: ModelSpec) -> bool:
    moe = model.moe
    if moe is None or model.mla is None:
        return False
    shared, extra = divmod(moe.shared_expert_ffn_size, moe.expert_ffn_size)
    usual = moe.interval == 1 and moe.latent_size is None and not moe.shared_expert_gate and shared > 0 and not extra
    untied = not model.tied_embeddings and model.qk_norm == "none"
    return _is_plain(model) and _is_unbiased(model) and usual and untied


def _is_gpt_oss(model: ModelSpec) -> bool:
    moe = model.moe
    if moe is None or model.mla is not None:
        return False
    fixed = (model.num_heads, model.kv_heads, model.qk_head_dim, model.window, model.full_attention_interval)
    biases = (model.mlp_bias, model.qkv_bias, model.attention_output_bias, model.attention_sinks, moe.router_bias)
    plain = not moe.num_dense_layers and moe.interval == 1 and not moe.shared_expert_ffn_size and not moe.latent_size
    usual = model.qk_norm == "none" and not model.tied_embeddings and not model.num_mtp_layers
    # models/gpt_oss/__init__.py:76 and :183, moe.py (swiglu with a limit)
    fixed_form = fixed == (64, 8, 64, 128, 2) and all(biases) and model.clamped_activation
    return _is_plain(model) and fixed_form and plain and usual
