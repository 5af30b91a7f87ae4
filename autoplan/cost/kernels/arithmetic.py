"""Parameters and floating-point operations of a model, matrix by matrix.

Formulas: `modelling` A1 and A2 (Narayanan et al., arXiv:2104.04473; DeepSeek-V2, arXiv:2405.04434).  One table of
matrices per kind of block serves parameter counts, FLOPs, GEMM shapes and memory alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.base.errors import InputError
from autoplan.spec.finetuning import ALL_LINEAR, EMBEDDING, ENCODER, HEAD, MODULES, FineTuning, Target
from autoplan.spec.model import ATTENTION_BLOCKS, ENCODER_BLOCKS, Block, LatentAttention, ModelSpec

# Tokens of a chunk in which kernels work off a gated delta net: CHUNK_SIZE of flash-linear-attention
# (fla/ops/gated_delta_rule/chunk.py), and of the torch code in transformers' modeling_qwen3_next.py.
DELTA_CHUNK_TOKENS = 64

ADDED = "added_"  # begins the names of matrices that a block has beside those of its kind

Split = Literal["column", "row", "replicated", "expert_column", "expert_row"]


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight matrix of `in_size` x `out_size`, and how tensor parallelism cuts it.

    A `column` matrix is cut along its outputs, a `row` matrix along its inputs, a `replicated` one not at all; an
    `expert` matrix exists once per expert and is cut by expert parallelism.  `grouped_out_size` of the outputs are
    keys and values, which are cut into `num_groups` pieces at most.
    """

    name: str
    in_size: int
    out_size: int
    split: Split
    _: KW_ONLY
    has_bias: bool = False
    copies: int = 1
    grouped_out_size: int = 0
    num_groups: int = 1
    is_frozen: bool = False  # it has no gradient
    weight_bytes: float | None = None  # of a frozen weight, where it is quantised
    saves_input: bool = False  # its product keeps its inputs although no gradient needs them
    reads_encoder: bool = False  # it meets the positions of the encoder, not the tokens of the decoder
    adapts: str = ""  # of a matrix of an adapter, the name of the frozen matrix beside which it runs

    @property
    def is_expert(self) -> bool:
        """Return whether the matrix belongs to a routed expert."""
        return self.split.startswith("expert")

    @property
    def num_weights(self) -> int:
        """Elements of all copies, without the bias."""
        return self.copies * self.in_size * self.out_size

    @property
    def num_parameters(self) -> int:
        """Elements of all copies, with the bias."""
        return self.copies * (self.in_size + self.has_bias) * self.out_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The matrices of one block, and its parameters that are not matrices (norms, sinks, convolution)."""

    linears: tuple[Linear, ...]
    num_norm_parameters: int  # replicated on every tensor-parallel rank
    num_other_parameters: int = 0  # cut by tensor parallelism
    is_frozen: bool = False  # except for its adapters
    drops_inputs: bool = False  # adapters take what dropout leaves of the inputs
    num_magnitudes: int = 0  # trained beside adapters, cut by tensor parallelism: one for each output (DoRA)

    @property
    def num_parameters(self) -> int:
        """Number of elements of the block."""
        return (
            sum(linear.num_parameters for linear in self.linears)
            + self.num_norm_parameters
            + self.num_other_parameters
            + self.num_magnitudes
        )

    def keeps_input(self, name: str) -> bool:
        """Return whether the gradient of any weight needs what enters the matrix of that name.

        A frozen matrix needs its weights alone for the gradient of its inputs; an adapter beside it needs the inputs,
        or what dropout leaves of them.
        """
        adapts = "" if self.drops_inputs else name
        return any(
            (linear.name == name and (not linear.is_frozen or linear.saves_input))
            or (linear.adapts and linear.adapts == adapts)
            for linear in self.linears
        )


def norm_parameters(model: ModelSpec) -> int:
    """Elements of one norm over the hidden size."""
    return model.hidden_size * _norm_vectors(model)


def _norm_vectors(model: ModelSpec) -> int:
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
    norms *= _norm_vectors(model)
    # Of two streams: keys of distances; biases of contents, distances and segments, and two segments.
    distances = (Linear("distances", hidden, width, "column"),) if model.attention_streams > 1 else ()
    return BlockShape(
        linears=(
            *distances,
            Linear(
                "qkv", hidden, qkv, "column", has_bias=model.qkv_bias, grouped_out_size=kv, num_groups=model.kv_heads
            ),
            Linear("out", heads * model.v_head_dim, hidden, "row", has_bias=model.attention_output_bias),
        ),
        num_norm_parameters=_block_norms(model) + norms,
        num_other_parameters=heads * model.attention_sinks
        + _relative_table(model) * model.relative_in_layers
        + 5 * width * len(distances),
    )


def _cross_attention(model: ModelSpec) -> BlockShape:
    """Queries of the decoder's tokens, keys and values of what the encoder makes, which no norm of the block reads."""
    hidden, width, kv = model.hidden_size, model.num_heads * model.qk_head_dim, 2 * model.kv_heads * model.qk_head_dim
    assert model.encoder is not None
    encoded = model.encoder.layers.hidden_size
    return BlockShape(
        linears=(
            Linear("q", hidden, width, "column", has_bias=model.qkv_bias),
            Linear(
                *("kv", encoded, kv, "column"),
                has_bias=model.qkv_bias,
                grouped_out_size=kv,
                num_groups=model.kv_heads,
                reads_encoder=True,
            ),
            Linear("out", width, hidden, "row", has_bias=model.attention_output_bias),
        ),
        num_norm_parameters=_block_norms(model),
    )


def _relative_table(model: ModelSpec) -> int:
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
        num_norm_parameters=_block_norms(model) + _norm_vectors(model) * ((queries_latent or 0) + latent),
    )


def _block_norms(model: ModelSpec) -> int:
    """Elements of the norms over the hidden size that a block has."""
    return norm_parameters(model) * model.norms_per_block


def _ffn_norms(model: ModelSpec) -> int:
    """Elements of the norms of a feed-forward block, which may read that of the attention beside it."""
    return 0 if model.shared_norm else _block_norms(model)


def _mlp_pair(model: ModelSpec, prefix: str, ffn_size: int, *, in_size: int, experts: int = 0) -> tuple[Linear, Linear]:
    gate, copies, bias = 2 if model.gated_mlp else 1, experts or 1, model.mlp_bias
    column: Split = "expert_column" if experts else "column"
    row: Split = "expert_row" if experts else "row"
    return (
        Linear(f"{prefix}fc1", in_size, gate * ffn_size, column, has_bias=bias, copies=copies),
        Linear(f"{prefix}fc2", ffn_size, in_size, row, has_bias=bias, copies=copies),
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
    """Gates and what is convolved between them (transformers modeling_lfm2.py, Lfm2ShortConv)."""
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
                Linear("in", hidden, net.conv_width + net.num_value_heads, "column"),  # and the step of every head
                Linear("gates_down", hidden, 2 * rank, "replicated"),
                Linear("decay_up", rank, net.key_width, "column"),
                Linear("gate_up", rank, net.value_width, "column"),
                Linear("out", net.value_width, hidden, "row"),
            ),
            num_norm_parameters=_block_norms(model) + net.value_head_dim,
            num_other_parameters=net.conv_width * net.conv_kernel + net.key_width + net.num_value_heads,
        )
    # Queries, keys, values and their gate; decay and step of every head.
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
    """Shapes of the model's blocks, with adapters of `finetuning`; InputError where a target is no matrix."""
    return layer_shapes(model, finetuning) | _encoder_shapes(model, finetuning)


def layer_shapes(model: ModelSpec, finetuning: FineTuning | None = None) -> dict[Block, BlockShape]:
    """The shapes of `block_shapes` without those of an encoder."""
    layers = [*model.layers, *([model.mtp_layer] if model.num_mtp_layers else [])]
    kinds = sorted({block for layer in layers for block in layer})
    shapes = {kind: _with_additions(model, kind, _SHAPES[kind](model)) for kind in kinds}
    if finetuning is None or not finetuning.has_adapters:
        return shapes
    if model.cross_attention or model.shared_layers:
        part = "the cross attention" if model.cross_attention else "the shared layers"
        raise InputError(f"adapters beside {part} of {model.name} are not priced: train all weights")
    adapted = {kind: _adapted(model, shape, finetuning) for kind, shape in shapes.items()}
    adapted_names = {name for _, names in adapted.values() for name in names}
    if missing := [name for name in finetuning.targets if name not in adapted_names]:
        modules = sorted(
            {name for name, targets in MODULES.items() if any(_is_in(shapes, model, target) for target in targets)}
        )
        raise InputError(f"model {model.name} has no module {missing[0]}: its linear layers are {', '.join(modules)}")
    return {kind: shape for kind, (shape, _) in adapted.items()}


def _with_additions(model: ModelSpec, block: Block, shape: BlockShape) -> BlockShape:
    """Return the shape of a kind of block with what this model's have beside it, whole on every rank."""
    own = [addition for addition in model.additions if addition.block == block]
    matrices = [sizes for addition in own for sizes in addition.matrices]
    return replace(
        shape,
        linears=(*shape.linears, *(Linear(f"{ADDED}{at}", *sizes, "replicated") for at, sizes in enumerate(matrices))),
        num_norm_parameters=shape.num_norm_parameters + sum(addition.num_parameters for addition in own),
    )


def _encoder_shapes(model: ModelSpec, finetuning: FineTuning | None) -> dict[Block, BlockShape]:
    if model.encoder is None:
        return {}
    shapes = layer_shapes(model.encoder.layers)
    if finetuning is not None and not finetuning.trains(ENCODER):
        shapes = {block: _frozen(shape) for block, shape in shapes.items()}
    return {ENCODER_BLOCKS[block]: shape for block, shape in shapes.items()}


def _frozen(shape: BlockShape) -> BlockShape:
    linears = tuple(replace(linear, is_frozen=True) for linear in shape.linears)
    return replace(shape, linears=linears, is_frozen=True)


# -- adapters ---------------------------------------------------------------------------------------------------------


def _is_in(shapes: Mapping[Block, BlockShape], model: ModelSpec, target: Target) -> bool:
    """Return whether a matrix of the model is the target."""
    has_part = target.part not in ("gate", "up") or model.gated_mlp
    return has_part and any(linear.name == target.linear for shape in shapes.values() for linear in shape.linears)


def _adapted(model: ModelSpec, shape: BlockShape, finetuning: FineTuning) -> tuple[BlockShape, set[str]]:
    """(a block with its weights frozen and two matrices for every target, the targets that it has)."""
    linears = []
    for linear in shape.linears:
        frozen = replace(linear, is_frozen=True)
        if linear.name not in NEVER_ADAPTED:
            frozen = replace(frozen, weight_bytes=finetuning.weight_bytes, saves_input=finetuning.saves_inputs)
        linears.append(frozen)
    adapters: list[Linear] = []
    names: set[str] = set()
    magnitudes = 0
    for linear in shape.linears:
        parts = _targeted_parts(model, linear, finetuning.targets)
        names |= {name for name, _ in parts}
        for part in dict.fromkeys(part for _, part in parts):
            pair = _adapter(linear, _part(linear, part), part, finetuning.rank or 0)
            adapters += pair
            magnitudes += pair[1].copies * pair[1].out_size if finetuning.dora else 0
    changed = replace(
        shape,
        linears=(*linears, *adapters),
        is_frozen=True,
        drops_inputs=finetuning.dropout > 0,
        num_magnitudes=magnitudes,
    )
    return changed, names


# PEFT's "all-linear" leaves out the head; routers are parameters of their own in today's transformers.
NEVER_ADAPTED = ("router", "shared_gate")


def _targeted_parts(model: ModelSpec, linear: Linear, targets: tuple[str, ...]) -> list[tuple[str, str]]:
    """(target, part of the matrix) for all of a block's matrix that gets an adapter."""
    if linear.name in NEVER_ADAPTED:
        return []
    pieces: tuple[str, ...] = {"qkv": ("q", "k", "v")}.get(linear.name, ("",))
    if linear.name.endswith("fc1") and model.gated_mlp:
        pieces = ("gate", "up")
    targeted = []
    for name in targets:
        if name == ALL_LINEAR:
            targeted += [(name, piece) for piece in pieces]
        for target in MODULES.get(name, ()):
            if target.linear == linear.name and (not target.part or target.part in pieces):
                targeted.append((name, target.part))
    return targeted


def _part(linear: Linear, part: str) -> Linear:
    """The product of a matrix that a part of its outputs is."""
    shared = linear.grouped_out_size // 2
    if part == "q":
        return replace(linear, out_size=linear.out_size - 2 * shared, grouped_out_size=0)
    if part in ("k", "v"):
        return replace(linear, out_size=shared, grouped_out_size=shared)
    return replace(linear, out_size=linear.out_size // 2) if part else linear


def _adapter(linear: Linear, part: Linear, name: str, rank: int) -> tuple[Linear, Linear]:
    """The two matrices of an adapter: into the rank, and out of it (arXiv:2106.09685).

    Beside a matrix that is cut along its outputs the first is whole on every rank and the second is cut as it is;
    beside one that is cut along its inputs the first is, and the second is whole.
    """
    first: Split = "replicated" if linear.split == "column" else linear.split
    second: Split = "replicated" if linear.split == "row" else linear.split
    label = ".".join(piece for piece in (linear.name, name) if piece)
    plain = replace(part, has_bias=False, adapts=linear.name)
    return (
        replace(plain, name=f"{label}.lora_a", out_size=rank, split=first, grouped_out_size=0),
        replace(plain, name=f"{label}.lora_b", in_size=rank, split=second),
    )


def embedding_parameters(model: ModelSpec) -> int:
    """Elements of the input embedding: token rows, of the vocabulary without padding, and learned positions."""
    positions = model.max_positions if model.position_embedding == "learned" else 0
    rows = model.vocab_size + positions + model.token_types
    relative = 0 if model.relative_in_layers else _relative_table(model)
    widened = (model.table_width + 1) * model.hidden_size * (model.table_width != model.hidden_size)
    norm = model.table_width * _norm_vectors(model) * model.embedding_norm
    added = sum(addition.size for addition in model.additions if addition.block == "ends")
    return rows * model.table_width + relative + widened + norm + added


def encoder_end_parameters(model: ModelSpec) -> int:
    """Elements of an encoder that are in none of its layers: its embedding, its last norm and the projector."""
    encoder = model.encoder
    if encoder is None:
        return 0
    layers = encoder.layers
    ends = embedding_parameters(layers) + before_head_parameters(layers)
    ends -= layers.vocab_size * layers.hidden_size * (encoder.embedding == "shared")
    return ends + sum(inputs * outputs for inputs, outputs in encoder.projector) + encoder.num_other_parameters


def encoder_parameters(model: ModelSpec) -> int:
    """Elements of the encoder of a model, with its projector."""
    if model.encoder is None:
        return 0
    shapes = layer_shapes(model.encoder.layers)
    of_layers = sum(shapes[block].num_parameters for layer in model.encoder.layers.layers for block in layer)
    return of_layers + encoder_end_parameters(model)


def before_head_parameters(model: ModelSpec) -> int:
    """Elements between the last layer and the head's matrix, and of the head's bias."""
    norms = _norm_vectors(model) * (model.hidden_size * model.final_norm + model.table_width * model.head_transform)
    transform = (model.hidden_size + 1) * model.table_width * model.head_transform
    return norms + transform + model.vocab_size * model.head_bias


def count_trained_parameters(model: ModelSpec, finetuning: FineTuning) -> int:
    """Parameters that fine-tuning trains, in elements."""
    shapes = block_shapes(model, finetuning)
    ends = {
        EMBEDDING: embedding_parameters(model),
        HEAD: 0 if model.tied_embeddings else model.vocab_size * model.hidden_size,
    }
    total = sum(size for end, size in ends.items() if finetuning.trains(end))
    if not finetuning.has_adapters:
        return (
            total
            + before_head_parameters(model)
            + encoder_parameters(model) * finetuning.trains(ENCODER)
            + sum(shapes[block].num_parameters for layer in model.layers for block in layer)
        )
    adapters = {
        block: shape.num_magnitudes + sum(linear.num_parameters for linear in shape.linears if linear.adapts)
        for block, shape in shapes.items()
    }
    return total + sum(adapters[block] for layer in model.layers for block in layer)


def count_parameters(model: ModelSpec, *, active: bool = False, with_mtp: bool = False) -> int:
    """Parameters of the model as published (vocabulary not padded), in elements.

    `active` counts the experts that one token visits; both embeddings are counted.  `with_mtp` adds the multi-token
    prediction layers: one layer like the last, a projection of 2h x h and three norms each.
    """
    shapes = block_shapes(model)

    def block_parameters(block: Block) -> int:
        total = shapes[block].num_parameters
        if active and block is Block.MOE and model.moe:
            expert = sum(linear.num_parameters for linear in shapes[block].linears if linear.is_expert)
            total -= expert - expert * model.moe.experts_per_token // model.moe.num_experts
        return total

    layers = model.layers[:1] if model.shared_layers else model.layers
    total = sum(block_parameters(block) for layer in layers for block in layer)
    total += embedding_parameters(model) + before_head_parameters(model) + encoder_parameters(model)
    total += 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    if with_mtp:
        mtp_layer = sum(block_parameters(block) for block in model.mtp_layer)
        extra = 2 * model.hidden_size**2 + 3 * norm_parameters(model)
        total += model.num_held_mtp_layers * (mtp_layer + extra)
    return total


def attention_context(model: ModelSpec, block: Block, seq_len: Floats | float) -> Floats | float:
    """Mean number of positions that a query attends to, all or under a causal mask (`modelling` A2)."""
    if block is Block.CROSS_ATTENTION and model.encoder:
        return model.encoder.patches or seq_len
    is_windowed = block is Block.WINDOW_ATTENTION and model.window
    if model.bidirectional:
        return np.minimum(model.window, seq_len) if is_windowed and model.window else seq_len
    if is_windowed and model.window:
        width = np.minimum(model.window, seq_len)
        return width - width**2 / (2 * seq_len)
    return seq_len / 2


def model_flops_per_token(
    model: ModelSpec,
    seq_len: float,
    finetuning: FineTuning | None = None,
    *,
    has_scores: bool = False,
    runs_reference: bool = False,
) -> float:
    """Floating-point operations of one token's forward and backward pass, Megatron-LM's present convention.

    3 x 2 x active weights, the attention core, at half of the square where it is causal, one logit GEMM and one more
    per MTP layer; recomputation is not counted.  Source: Megatron-LM training.py, `num_floating_point_operations`.
    Frozen weights have no gradient: 2 x 2 of them.  A head that `has_scores` has no logits; a reference goes forward
    once more.
    """
    shapes, spared = block_shapes(model, finetuning), 0.0
    layers = [*model.layers, *([model.mtp_layer] * model.num_mtp_layers)]
    forward = 0.0
    for layer in layers:
        for block in layer:
            for linear in shapes[block].linears:
                share = _visited_share(model, linear)
                if linear.reads_encoder and model.encoder:
                    share = model.encoder.positions(seq_len) / seq_len
                forward += 2 * share * linear.num_weights
                spared += 2 * share * linear.num_weights * linear.is_frozen
            forward += _core_flops_per_token(model, block, seq_len)
    logits = 0 if has_scores else model.vocab_size
    forward += 2 * model.table_width * logits * (1 + model.num_mtp_layers)
    forward += 2 * model.hidden_size * (2 * model.num_mtp_layers * model.hidden_size)
    forward += 2 * model.hidden_size * (model.table_width * model.head_transform + (model.embedding_size or 0))
    forward += 2 * _weights_at_ends(model)
    if finetuning is not None and not finetuning.trains(HEAD):
        spared += 2 * model.hidden_size * logits * (1 + model.num_mtp_layers)
    encoding = encoder_flops_per_token(model, seq_len)
    forward += encoding
    if finetuning is not None and not finetuning.trains(ENCODER):
        spared += 2 * encoding  # nothing before it is trained: it has no backward pass
    return (4 if runs_reference else 3) * forward - spared


def _weights_at_ends(model: ModelSpec) -> int:
    """Elements of the matrices that a model has at its ends beside those of its embedding and its head."""
    own = [sizes for addition in model.additions if addition.block == "ends" for sizes in addition.matrices]
    return sum(inputs * outputs for inputs, outputs in own)


def _visited_share(model: ModelSpec, linear: Linear) -> float:
    """Share of the copies of a matrix that a token meets."""
    return model.moe.experts_per_token / model.moe.num_experts if linear.is_expert and model.moe else 1.0


def _core_flops_per_token(model: ModelSpec, block: Block, seq_len: float) -> float:
    """Forward operations of a block per token beside its matrices: of scores, a scan or a convolution."""
    context = float(attention_context(model, block, seq_len))
    flops = 2.0 * context * sum(addition.score_width for addition in model.additions if addition.block == block)
    if block in ATTENTION_BLOCKS:
        model = model.attending(block)
        flops += 2 * context * model.attention_streams * model.num_heads * (model.qk_head_dim + model.v_head_dim)
    if block is Block.MAMBA:
        flops += mamba_scan_flops_per_token(model)
    if block is Block.CONVOLUTION:
        flops += 2.0 * model.hidden_size * model.short_conv_kernel
    if block is Block.LINEAR_ATTENTION:
        flops += linear_attention_flops_per_token(model)
    return flops


def encoder_flops_per_token(model: ModelSpec, seq_len: float) -> float:
    """Forward operations of the images of a sample, over its tokens of text and images together."""
    encoder = model.encoder
    if encoder is None:
        return 0.0
    layers, shapes = encoder.layers, layer_shapes(encoder.layers)
    positions = encoder.positions(seq_len)
    weights = 1.0 * layers.vocab_size * layers.hidden_size * (encoder.embedding == "matrix") + _weights_at_ends(layers)
    weights += sum(
        _visited_share(layers, linear) * linear.num_weights
        for layer in layers.layers
        for block in layer
        for linear in shapes[block].linears
    )
    scores = sum(_core_flops_per_token(layers, block, positions) for layer in layers.layers for block in layer) / 2
    projector = sum(inputs * outputs for inputs, outputs in encoder.projector)
    per_image = 2.0 * (positions * (weights + scores) + encoder.image_tokens * projector)
    return encoder.images * per_image / seq_len


def mamba_scan_flops_per_token(model: ModelSpec) -> float:
    """Forward operations of the state-space scan per token: Megatron-LM's count, 7 d_inner d_state + convolution."""
    mamba = model.mamba
    assert mamba is not None
    return 7.0 * mamba.inner_size * mamba.state_size + 2.0 * mamba.conv_width * mamba.conv_kernel


def linear_attention_flops_per_token(model: ModelSpec, chunk_tokens: int = 0) -> float:
    """Forward operations of a gated delta net's core per token, projections left out.

    As a recurrence: what the state holds of the key, its correction and the reading of the query, three products of key
    and value width a head, and the convolution.  In chunks of this many tokens products within a chunk come on top: of
    keys with keys and queries, the two that solve for the corrections, and that of scores with values
    (arXiv:2412.06464, section 3.3).
    """
    net = model.linear_attention
    assert net is not None
    states = 6.0 * net.key_head_dim * net.value_head_dim
    within = 2.0 * chunk_tokens * (3 * net.key_head_dim + 2 * net.value_head_dim)
    return net.num_value_heads * (states + within) + 2.0 * net.conv_width * net.conv_kernel
