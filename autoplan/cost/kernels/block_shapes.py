"""Matrices of every kind of block in a model, including those that fine-tuning adds or freezes.

Parameter counts, FLOPs, GEMM shapes and memory all use this one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from autoplan.base.errors import InputError
from autoplan.cost.kernels.adapted_shapes import is_in, with_adapters
from autoplan.cost.kernels.linears import ADDED, BlockShape, Linear, Split
from autoplan.spec.blocks import ENCODER_BLOCKS, Block, LatentAttention
from autoplan.spec.finetuning import ALL_LINEAR, MODULES, FineTuning
from autoplan.spec.model import ModelSpec


def norm_parameters(model: ModelSpec) -> int:
    """Elements of one norm over the hidden size."""
    return model.hidden_size * norm_vectors(model)


def norm_vectors(model: ModelSpec) -> int:
    """Number of vectors of a norm: its weights, and its bias if it has one."""
    if not model.norm_weights:
        return 0
    return 2 if model.norm == "layernorm" and model.norm_bias else 1


def _attention(model: ModelSpec) -> BlockShape:
    if model.mla:
        return _latent_attention(model, model.mla)
    hidden, heads = model.hidden_size, model.num_heads
    width, kv_width = heads * model.qk_head_dim, model.kv_heads * model.qk_head_dim
    kv = kv_width + model.kv_heads * model.v_head_dim
    qkv = width * (2 if model.attention_output_gate else 1) + kv
    norms = {"none": 0, "head": 2 * model.qk_head_dim, "full": width + kv_width}[model.qk_norm]
    norms *= norm_vectors(model)
    # Two-stream attention adds keys of distances; biases of contents, distances and segments; and two segments.
    distances = (Linear("distances", hidden, width, "column"),) if model.attention_streams > 1 else ()
    return BlockShape(
        linears=(
            *distances,
            Linear(
                *("qkv", hidden // model.matrix_groups, qkv, "column"),
                has_bias=model.qkv_bias,
                grouped_out_size=kv,
                num_groups=model.kv_heads,
            ),
            *((replace(_encoder_kv(model), is_shared=True),) if model.merged_attention else ()),
            Linear("out", heads * model.v_head_dim, hidden, "row", has_bias=model.attention_output_bias),
        ),
        num_norm_parameters=_block_norms(model) + norms,
        num_other_parameters=heads * model.attention_sinks
        + relative_table(model) * model.relative_in_layers
        + 5 * width * len(distances),
    )


def _cross_attention(model: ModelSpec) -> BlockShape:
    """Queries from the decoder's tokens, keys and values from the encoder's output, which the block does not norm."""
    hidden, width = model.hidden_size, model.num_heads * model.qk_head_dim
    return BlockShape(
        linears=(
            Linear("q", hidden, width, "column", has_bias=model.qkv_bias),
            _encoder_kv(model),
            Linear("out", width, hidden, "row", has_bias=model.attention_output_bias),
        ),
        num_norm_parameters=_block_norms(model),
    )


def _encoder_kv(model: ModelSpec) -> Linear:
    """Keys and values of the encoder's output."""
    kv = 2 * model.kv_heads * model.qk_head_dim
    assert model.encoder is not None
    return Linear(
        *("kv", model.encoder.output_size, kv, "column"),
        has_bias=model.qkv_bias,
        grouped_out_size=kv,
        num_groups=model.kv_heads,
        reads_encoder=True,
    )


def relative_table(model: ModelSpec) -> int:
    """Elements of one table of relative positions."""
    return model.max_positions * model.num_heads if model.position_embedding == "relative" else 0


def _latent_attention(model: ModelSpec, mla: LatentAttention) -> BlockShape:
    hidden, heads, latent = model.hidden_size, model.num_heads, mla.kv_lora_rank
    query, queries_latent = heads * model.qk_head_dim, mla.q_lora_rank
    queries = [Linear("q", hidden, query, "column")]
    if queries_latent is not None:
        queries = [
            Linear("q_down", hidden, queries_latent, "replicated"),
            Linear("q_up", queries_latent, query, "column"),
        ]
    return BlockShape(
        linears=(
            *queries,
            Linear("kv_down", hidden, latent + mla.qk_rope_head_dim, "replicated"),
            Linear("kv_up", latent, heads * (mla.qk_nope_head_dim + mla.v_head_dim), "column"),
            Linear("out", heads * mla.v_head_dim, hidden, "row"),
        ),
        num_norm_parameters=_block_norms(model) + norm_vectors(model) * ((queries_latent or 0) + latent),
    )


def _block_norms(model: ModelSpec) -> int:
    """Elements of a block's norms over the hidden size."""
    return norm_parameters(model) * model.norms_per_block


def _ffn_norms(model: ModelSpec) -> int:
    """Elements of the norms of a feed-forward block, which may share the norm of a parallel attention block."""
    return 0 if model.shared_norm else _block_norms(model)


def _mlp_pair(model: ModelSpec, prefix: str, ffn_size: int, *, in_size: int, experts: int = 0) -> tuple[Linear, Linear]:
    gate, copies, bias = 2 if model.gated_mlp else 1, experts or 1, model.mlp_bias
    column: Split = "expert_column" if experts else "column"
    row: Split = "expert_row" if experts else "row"
    inner, outer = in_size // model.matrix_groups, ffn_size // model.matrix_groups
    return (
        Linear(f"{prefix}fc1", inner, gate * ffn_size, column, has_bias=bias, copies=copies),
        Linear(f"{prefix}fc2", outer, in_size, row, has_bias=bias, copies=copies),
    )


def _mlp(model: ModelSpec) -> BlockShape:
    pair = _mlp_pair(model, "", model.ffn_size, in_size=model.hidden_size)
    return BlockShape(linears=pair, num_norm_parameters=_ffn_norms(model) + model.activation_parameters)


def _moe(model: ModelSpec) -> BlockShape:
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    inner = moe.latent_size or hidden
    linears = [Linear("router", hidden, moe.num_experts, "replicated", has_bias=moe.router_bias)]
    if moe.latent_size:
        linears.append(Linear("latent_down", hidden, inner, "replicated"))
        linears.append(Linear("latent_up", inner, hidden, "replicated"))
    linears += _mlp_pair(model, "expert_", moe.expert_ffn_size, in_size=inner, experts=moe.num_experts)
    if moe.shared_expert_ffn_size:
        linears += _mlp_pair(model, "shared_", moe.shared_expert_ffn_size, in_size=hidden)
    if moe.shared_expert_gate:
        linears.append(Linear("shared_gate", hidden, 1, "replicated"))
    return BlockShape(linears=tuple(linears), num_norm_parameters=_ffn_norms(model))


def _mamba(model: ModelSpec) -> BlockShape:
    mamba, hidden = model.mamba, model.hidden_size
    assert mamba is not None
    inner, conv, rank = mamba.inner_size, mamba.conv_width, mamba.dt_rank
    if rank:
        return BlockShape(
            linears=(
                Linear("in", hidden, 2 * inner, "column", has_bias=mamba.bias),
                Linear("x", inner, rank + 2 * mamba.state_size, "row"),
                Linear("dt", rank, inner, "column", has_bias=True),
                Linear("out", inner, hidden, "row", has_bias=mamba.bias),
            ),
            num_norm_parameters=_block_norms(model),
            # convolution; A of every state, and D
            num_other_parameters=conv * (mamba.conv_kernel + mamba.conv_bias) + inner * (mamba.state_size + 1),
        )
    return BlockShape(
        linears=(
            Linear("in", hidden, inner + conv + mamba.num_heads, "column", has_bias=mamba.bias),
            Linear("out", inner, hidden, "row", has_bias=mamba.bias),
        ),
        num_norm_parameters=_block_norms(model),
        # convolution, A, D and the time-step bias per head, and the gated norm over the inner width
        num_other_parameters=conv * (mamba.conv_kernel + mamba.conv_bias) + 3 * mamba.num_heads + inner,
    )


def _convolution(model: ModelSpec) -> BlockShape:
    """Gated convolution (transformers modeling_lfm2.py, Lfm2ShortConv)."""
    hidden = model.hidden_size
    return BlockShape(
        linears=(
            Linear("in", hidden, (1 + model.short_conv_gates) * hidden, "column"),
            Linear("out", hidden, hidden, "row"),
        ),
        num_norm_parameters=_block_norms(model),
        num_other_parameters=hidden * model.short_conv_kernel,
    )


def _linear_attention(model: ModelSpec) -> BlockShape:
    net, hidden = model.linear_attention, model.hidden_size
    assert net is not None
    if rank := net.gate_rank:
        return BlockShape(
            linears=(
                Linear("in", hidden, net.conv_width + net.num_value_heads, "column"),  # and the step size of every head
                Linear("gates_down", hidden, 2 * rank, "replicated"),
                Linear("decay_up", rank, net.key_width, "column"),
                Linear("gate_up", rank, net.value_width, "column"),
                Linear("out", net.value_width, hidden, "row"),
            ),
            num_norm_parameters=_block_norms(model) + net.value_head_dim,
            num_other_parameters=net.conv_width * net.conv_kernel + net.key_width + net.num_value_heads,
        )
    # Queries, keys, values and their gate; decay and step size of every head.
    width = net.conv_width + net.value_width + net.head_gates * net.num_value_heads
    return BlockShape(
        linears=(Linear("in", hidden, width, "column"), Linear("out", net.value_width, hidden, "row")),
        num_norm_parameters=_block_norms(model) + net.value_head_dim,
        num_other_parameters=net.conv_width * net.conv_kernel + net.head_gates * net.num_value_heads,
    )


def _window_attention(model: ModelSpec) -> BlockShape:
    return _attention(model.attending(Block.WINDOW_ATTENTION))


_SHAPES = {
    Block.ATTENTION: _attention,
    Block.WINDOW_ATTENTION: _window_attention,
    Block.CROSS_ATTENTION: _cross_attention,
    Block.LINEAR_ATTENTION: _linear_attention,
    Block.MAMBA: _mamba,
    Block.CONVOLUTION: _convolution,
    Block.MLP: _mlp,
    Block.MOE: _moe,
}


@lru_cache(maxsize=256)
def block_shapes(model: ModelSpec, finetuning: FineTuning | None = None) -> Mapping[Block, BlockShape]:
    """Shapes of the model's blocks with the adapters of `finetuning`; InputError if a target is not a matrix."""
    shapes = layer_shapes(model, finetuning) | _encoder_shapes(model, finetuning)
    if finetuning is not None and finetuning.has_adapters:
        _check_targets(model, shapes, finetuning)
    return shapes


def layer_shapes(model: ModelSpec, finetuning: FineTuning | None = None) -> dict[Block, BlockShape]:
    """Shapes from `block_shapes` without those of an encoder."""
    layers = [*model.layers, *([model.mtp_layer] if model.num_mtp_layers else [])]
    kinds = sorted({block for layer in layers for block in layer})
    shapes = {kind: _with_additions(model, kind, _of_low_rank(model, _SHAPES[kind](model))) for kind in kinds}
    if finetuning is None or not finetuning.has_adapters:
        return shapes
    if model.shared_layers or model.low_rank:
        part = "the matrices of low rank" if model.low_rank else "the shared layers"
        raise InputError(f"adapters beside {part} of {model.name} are not priced: train all weights")
    return {kind: with_adapters(model, shape, finetuning) for kind, shape in shapes.items()}


def _check_targets(model: ModelSpec, shapes: Mapping[Block, BlockShape], finetuning: FineTuning) -> None:
    """Raise an error for a target that is no matrix of the blocks with these shapes."""
    for name in finetuning.targets:
        if name != ALL_LINEAR and not any(is_in(shapes, model, target) for target in MODULES[name]):
            known = (name for name, targets in MODULES.items() if any(is_in(shapes, model, part) for part in targets))
            raise InputError(
                f"model {model.name} has no module {name}: its linear layers are {', '.join(sorted(known))}"
            )


def _of_low_rank(model: ModelSpec, shape: BlockShape) -> BlockShape:
    """Return the shape with two narrow matrices for each: of queries, keys and values, and of gate and up, for each."""
    if not model.low_rank:
        return shape
    pieces = {"qkv": 3, "fc1": 2 if model.gated_mlp else 1}
    pairs = (
        (
            Linear(f"{ADDED}{linear.name}", linear.in_size, pieces.get(linear.name, 1) * model.low_rank, "replicated"),
            replace(linear, in_size=model.low_rank),
        )
        for linear in shape.linears
    )
    return replace(shape, linears=tuple(linear for pair in pairs for linear in pair))


def _with_additions(model: ModelSpec, block: Block, shape: BlockShape) -> BlockShape:
    """Return the shape of a block with the model's additional matrices, which are replicated on every rank."""
    additions = [addition for addition in model.additions if addition.block == block]
    matrices = [sizes for addition in additions for sizes in addition.matrices]
    return replace(
        shape,
        linears=(*shape.linears, *(Linear(f"{ADDED}{at}", *sizes, "replicated") for at, sizes in enumerate(matrices))),
        num_norm_parameters=shape.num_norm_parameters + sum(addition.num_parameters for addition in additions),
    )


def _encoder_shapes(model: ModelSpec, finetuning: FineTuning | None) -> dict[Block, BlockShape]:
    if model.encoder is None:
        return {}
    shapes = layer_shapes(model.encoder.layers, finetuning and finetuning.in_encoder(model))
    return {ENCODER_BLOCKS[block]: shape for block, shape in shapes.items()}
