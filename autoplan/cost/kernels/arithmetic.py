"""Parameters and floating-point operations of a model, matrix by matrix.

Formulas: `modelling` A1 and A2 (Narayanan et al., arXiv:2104.04473; DeepSeek-V2, arXiv:2405.04434).
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.block_shapes import block_shapes, layer_shapes, norm_parameters, norm_vectors, relative_table
from autoplan.cost.kernels.linears import Linear
from autoplan.spec.blocks import ATTENTION_BLOCKS, ENCODER_BLOCKS, Block
from autoplan.spec.finetuning import EMBEDDING, ENCODER, HEAD, FineTuning
from autoplan.spec.model import Encoder, ModelSpec

# Tokens per chunk in the kernels of a gated delta net: CHUNK_SIZE of flash-linear-attention
# (fla/ops/gated_delta_rule/chunk.py), and of the torch code in transformers' modeling_qwen3_next.py.
DELTA_CHUNK_TOKENS = 64


def embedding_parameters(model: ModelSpec) -> int:
    """Elements of the input embedding: one row per token of the unpadded vocabulary, and learned positions."""
    positions = model.max_positions if model.position_embedding == "learned" else 0
    rows = model.vocab_size + positions + model.token_types
    relative = 0 if model.relative_in_layers else relative_table(model)
    widened = (model.table_width + 1) * model.hidden_size * (model.table_width != model.hidden_size)
    norm = model.table_width * norm_vectors(model) * model.embedding_norm
    added = sum(addition.size for addition in model.additions if addition.block == "ends")
    return rows * model.table_width + relative + widened + norm + added


def encoder_end_parameters(encoder: Encoder | None) -> int:
    """Elements of an encoder outside of its layers: embedding, last norm and projector."""
    if encoder is None:
        return 0
    layers = encoder.layers
    ends = embedding_parameters(layers) + before_head_parameters(layers)
    ends -= layers.vocab_size * layers.hidden_size * (encoder.embedding == "shared")
    return ends + sum(inputs * outputs for inputs, outputs in encoder.projector) + encoder.num_other_parameters


def encoder_parameters(model: ModelSpec) -> int:
    """Elements of a model's encoder, including its projector."""
    encoder = model.any_encoder
    if encoder is None:
        return 0
    shapes = layer_shapes(encoder.layers)
    of_layers = sum(shapes[block].num_parameters for layer in encoder.layers.layers for block in layer)
    return of_layers + encoder_end_parameters(encoder)


def before_head_parameters(model: ModelSpec) -> int:
    """Elements between the last layer and the head's matrix, plus the head's bias."""
    norms = norm_vectors(model) * (model.hidden_size * model.final_norm + model.table_width * model.head_transform)
    transform = (model.hidden_size + 1) * model.table_width * model.head_transform
    return norms + transform + model.vocab_size * model.head_bias


def count_trained_parameters(model: ModelSpec, finetuning: FineTuning) -> int:
    """Number of parameters that fine-tuning trains."""
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
    encoder = model.encoder.layers.layers if model.encoder else ()
    blocks = [block for layer in model.layers for block in layer]
    blocks += [ENCODER_BLOCKS[block] for layer in encoder for block in layer]
    return total + sum(adapters[block] for block in blocks)


def count_parameters(model: ModelSpec, *, active: bool = False, with_mtp: bool = False) -> int:
    """Number of parameters of the model as published (vocabulary not padded).

    `active` counts only the experts that one token visits; both embeddings are counted.  `with_mtp` adds the
    multi-token prediction layers: one layer like the last, a projection of 2h x h and three norms each.
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


def encoder_positions(model: ModelSpec, block: Block, seq_len: Floats | float) -> Floats | float:
    """Number of encoder positions that a query of a block attends to."""
    return model.encoder.patches or seq_len if model.encoder and model.reads_encoder(block) else 0.0


def attention_context(model: ModelSpec, block: Block, seq_len: Floats | float) -> Floats | float:
    """Mean number of positions that a query attends to, with or without a causal mask (`modelling` A2)."""
    encoded = encoder_positions(model, block, seq_len)
    if block is Block.CROSS_ATTENTION:
        return encoded
    is_windowed = block is Block.WINDOW_ATTENTION and model.window
    if model.bidirectional:
        return np.minimum(model.window, seq_len) if is_windowed and model.window else seq_len
    if is_windowed and model.window:
        width = np.minimum(model.window, seq_len)
        return encoded + width - width**2 / (2 * seq_len)
    return encoded + seq_len / 2


def model_flops_per_token(
    model: ModelSpec,
    seq_len: float,
    finetuning: FineTuning | None = None,
    *,
    has_scores: bool = False,
    runs_reference: bool = False,
) -> float:
    """Floating-point operations per token of a forward and backward pass, in Megatron-LM's current convention.

    3 x 2 x active weights, the attention core (half of the square if causal), one logit GEMM plus one per MTP layer;
    recomputation is not counted.  Source: Megatron-LM training.py, `num_floating_point_operations`.  Frozen weights
    have no gradient and count 2 x 2.  With `has_scores` the head computes a score instead of logits; `runs_reference`
    adds a forward pass of the reference model.
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
    encoding, spared_encoding = _encoder_flops_per_token(model, seq_len, finetuning)
    forward, spared = forward + encoding, spared + spared_encoding
    return (4 if runs_reference else 3) * forward - spared


def _weights_at_ends(model: ModelSpec) -> int:
    """Elements of further matrices before and after the layers, besides embedding and head."""
    matrices = [sizes for addition in model.additions if addition.block == "ends" for sizes in addition.matrices]
    return sum(inputs * outputs for inputs, outputs in matrices)


def _visited_share(model: ModelSpec, linear: Linear) -> float:
    """Share of the copies of a matrix that multiply one token."""
    return model.moe.experts_per_token / model.moe.num_experts if linear.is_expert and model.moe else 1.0


def _core_flops_per_token(model: ModelSpec, block: Block, seq_len: float) -> float:
    """Forward operations of a block per token outside its matrices: attention scores, a scan or a convolution."""
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


def _encoder_flops_per_token(
    model: ModelSpec, seq_len: float, finetuning: FineTuning | None = None
) -> tuple[float, float]:
    """Operations for the images or source of a sample, per token of the text model: (forward, spared when frozen).

    Spared are those of the backward pass, which takes twice the forward pass where all is trained.
    """
    encoder = model.any_encoder
    if encoder is None:
        return 0.0, 0.0
    layers, own = encoder.layers, finetuning and finetuning.in_encoder(model)
    positions, shapes = encoder.positions(seq_len), layer_shapes(layers, own)
    ends = 1.0 * layers.vocab_size * layers.hidden_size * (encoder.embedding == "matrix") + _weights_at_ends(layers)
    weights, frozen = ends, ends * (own is not None)
    for layer in layers.layers:
        for block in layer:
            for linear in shapes[block].linears:
                visited = _visited_share(layers, linear) * linear.num_weights
                weights, frozen = weights + visited, frozen + visited * linear.is_frozen
    scores = sum(_core_flops_per_token(layers, block, positions) for layer in layers.layers for block in layer) / 2
    projector = sum(inputs * outputs for inputs, outputs in encoder.projector)
    forward, spared = (
        2.0 * encoder.images / seq_len * (positions * part + (encoder.image_tokens or positions) * projected)
        for part, projected in ((weights + scores, projector), (frozen, projector * (own is not None)))
    )
    if finetuning is not None and not finetuning.reaches_encoder(model):
        spared = 2.0 * forward
    return forward, spared


def mamba_scan_flops_per_token(model: ModelSpec) -> float:
    """Forward operations of a state-space scan per token, as in Megatron-LM: 7 d_inner d_state + convolution."""
    mamba = model.mamba
    assert mamba is not None
    return 7.0 * mamba.inner_size * mamba.state_size + 2.0 * mamba.conv_width * mamba.conv_kernel


def linear_attention_flops_per_token(model: ModelSpec, chunk_tokens: int = 0) -> float:
    """Forward operations of a gated delta net's core per token, without projections.

    As a recurrence: three products of key and value width per head (reading the state by the key, correcting it, and
    reading it by the query), and the convolution.  Processing chunks of this many tokens adds products within a chunk:
    keys with keys and with queries, two that solve for the corrections, and scores with values (arXiv:2412.06464,
    section 3.3).
    """
    net = model.linear_attention
    assert net is not None
    states = 6.0 * net.key_head_dim * net.value_head_dim
    within = 2.0 * chunk_tokens * (3 * net.key_head_dim + 2 * net.value_head_dim)
    return net.num_value_heads * (states + within) + 2.0 * net.conv_width * net.conv_kernel
