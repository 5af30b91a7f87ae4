"""Bytes that a block stores for its backward pass, and bytes saved by recomputation and offloading.

Bytes follow `modelling` B2.  Parts of a layer are named as in Megatron-Core's --recompute-modules; arrays have one
element per plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, add_up
from autoplan.cost.kernels.arithmetic import DELTA_CHUNK_TOKENS
from autoplan.cost.kernels.linears import ADDED, BlockShape
from autoplan.cost.kernels.sizes import (
    NARROW_BYTES,
    encoder_tokens,
    linear_tokens,
    local_sizes,
    norm_tokens,
    operand_bytes,
    rank_kv_heads,
    rank_tokens,
)
from autoplan.cost.memory.expert_buffers import held_expert_tokens
from autoplan.cost.state_types import WIDE_BYTES
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.enums import AttentionKernel, OffloadLayers, RecomputeModule
from autoplan.spec.plan import SELECTIVE, PlanBatch
from autoplan.spec.problem import Problem

# Dropout of attention scores stores a mask and an output (Korthikanti et al., arXiv:2205.05198, 5 a s).
SCORE_DROPOUT_BYTES = 3.0

# Recomputing the whole MoE layer saves what recomputing its parts would save.
GIVEN_BACK_BY: Mapping[RecomputeModule, tuple[RecomputeModule, ...]] = {
    RecomputeModule.CORE_ATTN: (RecomputeModule.CORE_ATTN,),
    RecomputeModule.LAYERNORM: (RecomputeModule.LAYERNORM,),
    RecomputeModule.MLA_UP_PROJ: (RecomputeModule.MLA_UP_PROJ,),
    RecomputeModule.MLP: (RecomputeModule.MLP,),
    RecomputeModule.MOE: (RecomputeModule.MOE,),
    RecomputeModule.MOE_ACT: (RecomputeModule.MOE_ACT, RecomputeModule.MOE),
    RecomputeModule.SHARED_EXPERTS: (RecomputeModule.SHARED_EXPERTS, RecomputeModule.MOE),
}
Parts = dict[RecomputeModule | None, Floats]


def stores_scores(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans store the scores of the attention core, so that recomputing it saves memory."""
    return np.array([problem.stores_scores(kernel) for kernel in AttentionKernel])[batch.attention]


def _input_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes per element of a GEMM input stored for the weight gradient, quantised if GEMMs are.

    Queries, keys, values and residuals stay in 16 bits (Transformer Engine; `modelling` B2).
    """
    if not problem.framework.memory.keeps_narrow_copies:
        return np.full(len(batch), problem.training.element_bytes)
    return operand_bytes(problem, batch)


def activation_parts(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Parts:
    """Bytes that a block stores per micro-batch, by the part whose recomputation frees them; None: no part."""
    problem = problem.attending(block)
    model, framework, element = problem.model, problem.framework, problem.training.element_bytes
    if framework.memory.is_jax and (block is Block.MLP or (block in ATTENTION_BLOCKS and not model.mla)):
        return _product_parts(problem, batch, block, shape)
    sliced = norm_tokens(problem, batch) * model.hidden_size
    normed = model.norms_per_block * (2 * element + eager_norm_bytes(problem, is_frozen=shape.is_frozen))
    normed -= (model.norms_per_block - 1) * element  # a sum, which reads that of the norm behind a block, keeps nothing
    reads_others_norm = model.shared_norm and block not in ATTENTION_BLOCKS
    if reads_others_norm:
        normed = element
    norm = normed + np.where(batch.dropout, 1.0, 0.0)  # one byte for a mask
    parts = _parts_behind_norm(problem, batch, block, shape)
    # The norm's output is the input of the first GEMM.
    output, always_kept = _input_bytes(problem, batch) * sliced, (norm - element) * sliced
    if reads_others_norm or not any(shape.keeps_input(name) for name in NORMED):
        output = 0.0 * output
    added = sum(linear.out_size for linear in shape.linears if linear.name.startswith(ADDED))
    always_kept = always_kept + element * added * norm_tokens(problem, batch)
    if shape.is_frozen:
        always_kept = always_kept + _adapter_bytes(problem, batch, shape)
    if has_norm_module(problem, block):
        parts[RecomputeModule.LAYERNORM] = output
    else:
        always_kept = always_kept + output
    if not (framework.memory.regathers_norm_output or reads_others_norm):
        gathered = element * model.norms_per_block * (rank_tokens(problem, batch) * model.hidden_size - sliced)
        if not framework.memory.fsdp2_states:
            always_kept = always_kept + gathered
        elif block is Block.MLP:  # gathered inside the recomputed part, which begins with the norm's output
            parts[RecomputeModule.MLP] = parts[RecomputeModule.MLP] + gathered
        elif block is not Block.MOE:  # MoE ranks use their own tokens
            always_kept = always_kept + gathered
    parts[None] = parts.get(None, 0.0) + always_kept
    return parts


def _parts_behind_norm(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Parts:
    """Bytes that a block stores per micro-batch apart from its norm, by part."""
    model, element, tokens = problem.model, problem.training.element_bytes, rank_tokens(problem, batch)
    if block in ATTENTION_BLOCKS:
        return _attention_parts(problem, batch, block, shape)
    if block is Block.MOE:
        return _moe_parts(problem, batch, shape)
    if block is Block.MAMBA and model.mamba:
        inner = model.mamba.inner_size
        wide = shape.linears[0].out_size + inner + 2 * model.mamba.num_groups * model.mamba.state_size + 2 * inner
        return {None: element * tokens * wide / batch.tp}
    if block is Block.LINEAR_ATTENTION and model.linear_attention:
        # Projections, convolution inputs, scores of one chunk per head, and values before and after their norm and
        # gate.
        net = model.linear_attention
        projected = sum(linear.out_size for linear in shape.linears[:-1])
        wide = projected + net.conv_width + DELTA_CHUNK_TOKENS * net.num_value_heads
        return {None: element * tokens * (wide + 2 * net.value_width) / batch.tp}
    if block is Block.CONVOLUTION:
        # The projection, input and output of the convolution, and the input of the last matrix.
        return {None: element * tokens * 6 * model.hidden_size / batch.tp}
    width = bytes_per_width(problem, batch, keeps_input=shape.keeps_input("fc2"), is_frozen=shape.is_frozen)
    return {RecomputeModule.MLP: width * tokens * model.ffn_size / batch.tp}


def _product_parts(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Parts:
    """Bytes that a JAX block stores, by part: its input and the 16-bit outputs of its matrix products.

    Tensors named by a policy are stored if a gradient needs them, which excludes the last product.  Norms and
    activations are always recomputed, the attention output with the core, and with `layernorm` the residual sum read by
    the second norm and therefore the projection before it (save_qkv_proj).
    Source: jax.checkpoint_policies.save_only_these_names, print_saved_residuals of a layer under the policies of
    AI-Hypercomputer/maxtext layers/decoders.py; jax/_src/ad_checkpoint.py remat_partial_eval drops what is not needed.
    """
    model, element = problem.model, problem.training.element_bytes
    residual = element * norm_tokens(problem, batch) * model.hidden_size
    if block is Block.MLP:
        gated = 2 if model.gated_mlp else 1
        width = element * gated * rank_tokens(problem, batch) * model.ffn_size / batch.tp
        return {RecomputeModule.LAYERNORM: residual, RecomputeModule.MLP: width, None: 0.0 * residual}
    parts = _attention_parts(problem, batch, block, shape)
    heads = rank_tokens(problem, batch) * model.num_heads / batch.tp * model.attention_streams
    output = _output_bytes(problem, batch, shape) * model.qk_head_dim * heads
    sums = np.where(stores_scores(problem, batch), 0.0, 4.0 * heads)  # logarithms of the softmax sums
    core = parts.get(RecomputeModule.CORE_ATTN, 0.0) + element * model.qk_head_dim * heads + sums
    return {RecomputeModule.CORE_ATTN: core, None: parts[None] - output - sums + residual}


# Matrices that read the norm before a block, in any block.
NORMED = ("qkv", "q", "q_down", "kv_down", "in", "fc1", "router", "expert_fc1", "shared_fc1", "latent_down")


def _adapter_bytes(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Floats:
    """Bytes that the adapters of a block store per micro-batch.

    The narrow output of the first matrix, for the gradient of the second; with dropout the remaining inputs and a mask
    per adapter; and with trained magnitudes the outputs of matrix and adapter, which the magnitudes scale.
    Source: PEFT tuners/lora/layer.py and dora.py.
    """
    finetuning, element = problem.training.finetuning, problem.training.element_bytes
    assert finetuning is not None
    adapter_bytes = np.zeros(len(batch))
    for linear in shape.linears:
        if not linear.adapts:
            continue
        tokens = linear_tokens(problem, batch, linear)
        inputs, outputs = local_sizes(linear, batch)
        if linear.name.endswith("lora_b"):
            adapter_bytes = adapter_bytes + tokens * (element * inputs + 2.0 * element * outputs * finetuning.dora)
        elif finetuning.dropout:
            # On the host the mask is a tensor of factors (ATen/native/Dropout.cpp), on a GPU one of booleans.
            mask = element if problem.cluster.device.vendor == "cpu" else 1.0
            adapter_bytes = adapter_bytes + tokens * inputs * (element + mask)
    return adapter_bytes


def eager_norm_bytes(problem: Problem, *, is_frozen: bool = False) -> float:
    """Bytes that an unfused norm stores per token and hidden element beyond its input and output.

    The normalised values are stored only for the gradient of the norm's weight; if that is frozen, only the fp32 copy
    of the input is stored, or what else a make of norm computes from.  When training in fp32 only the normalised values
    are stored, as the input is no copy.  Torch's layer norm is one kernel, which stores two numbers per token; only an
    RMSNorm, and a layer norm that a model writes out, consists of several operations.
    """
    if not problem.model.writes_out_norms:
        return 0.0
    framework, chosen = problem.framework, problem.training.fused_norm
    # Torch has no fused kernel for its norms on the host.
    fused = framework.kernels.fused_norm and not (
        framework.memory.fsdp2_states and problem.cluster.device.vendor == "cpu"
    )
    norm_bytes = framework.memory.bytes_per_eager_norm if problem.training.element_bytes < WIDE_BYTES else WIDE_BYTES
    if problem.model.norm == "layernorm":
        norm_bytes = 0.0
    if is_frozen:
        norm_bytes = WIDE_BYTES - problem.training.element_bytes
    if problem.training.element_bytes < WIDE_BYTES:
        norm_bytes += problem.model.norm_extra_frozen_bytes if is_frozen else problem.model.norm_extra_bytes
    return 0.0 if (fused if chosen is None else chosen) else norm_bytes


def casts_norms(problem: Problem) -> bool:
    """Return whether norms compute on fp32 copies of their inputs."""
    return eager_norm_bytes(problem) > 0 and problem.training.element_bytes < WIDE_BYTES


def has_norm_module(problem: Problem, block: Block) -> bool:
    """Return whether the norm before a block is a separate module (Megatron-LM gpt_layer_specs.py): MLA, experts."""
    return block is Block.MOE or (block in ATTENTION_BLOCKS and problem.model.mla is not None)


def _attention_parts(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Parts:
    model, framework, training, element = (
        problem.model,
        problem.framework,
        problem.training,
        problem.training.element_bytes,
    )
    tokens, heads = rank_tokens(problem, batch), model.num_heads / batch.tp
    is_own = block is not Block.CROSS_ATTENTION
    keys_per_query, seen_len = is_own * np.ones(len(batch)), is_own * training.seq_len
    if model.reads_encoder(block):
        keys_per_query = keys_per_query + encoder_tokens(problem, batch) / tokens
        seen_len += problem.encoder_len
    parts: Parts = {}
    if mla := model.mla:
        latents = element * (2.0 * (mla.q_lora_rank or 0) + 2.0 * mla.kv_lora_rank + mla.qk_rope_head_dim)
        expanded = _attention_bytes(problem, batch) * (2.0 * model.qk_head_dim + mla.v_head_dim)
        expanded = expanded + element * mla.qk_nope_head_dim * ~batch.fp8_attention  # values are a view beside them
        parts[RecomputeModule.MLA_UP_PROJ] = tokens * expanded * heads
        always_kept = tokens * (latents + _output_bytes(problem, batch, shape) * mla.v_head_dim * heads)
    else:
        kv_heads = rank_kv_heads(model, batch)
        always_kept = (
            _attention_bytes(problem, batch)
            * (heads * model.qk_head_dim + keys_per_query * kv_heads * (model.qk_head_dim + model.v_head_dim))
            + _output_bytes(problem, batch, shape) * heads * model.v_head_dim
        ) * tokens
        if framework.memory.keeps_packed_qkv and model.kv_heads == model.num_heads:
            always_kept = always_kept + tokens * element * model.qk_head_dim * 2 * kv_heads
        is_eager = not framework.kernels.fused_activation or eager_norm_bytes(problem) > 0
        if model.partial_rope and is_eager:
            always_kept = always_kept + element * tokens * heads * model.v_head_dim
        if model.qk_norm != "none" and not framework.memory.is_jax:
            # A norm stores its input; rotary embedding makes new tensors of its output, which attention stores
            # (Megatron-LM d98e8a6 core/transformer/attention.py, q_layernorm; Transformer Engine's RMSNorm).
            norm_bytes = element + eager_norm_bytes(problem, is_frozen=shape.is_frozen)
            always_kept = always_kept + norm_bytes * tokens * model.qk_head_dim * (heads + keys_per_query * kv_heads)
    if model.attention_output_gate:
        always_kept = always_kept + 2.0 * element * tokens * model.qk_head_dim * heads  # the gate and the gated output
    stores = stores_scores(problem, batch)
    if stores.any():
        is_fused = framework.kernels.fuses_softmax | (batch.attention == AttentionKernel.MEGATRON_FUSED.code)
        memory = framework.memory
        score = np.where(is_fused, memory.bytes_per_fused_score, memory.bytes_kept_per_unfused_score)
        score = np.minimum(score, element) if model.narrow_softmax else score
        dropped = np.where(batch.dropout, SCORE_DROPOUT_BYTES, 0.0)
        parts[RecomputeModule.CORE_ATTN] = stores * (score + dropped) * tokens * heads * seen_len
    # The logarithms of the softmax sums.
    always_kept = always_kept + np.where(stores, 0.0, 4.0 * tokens * heads)
    parts[None] = always_kept
    return {module: size * model.attention_streams for module, size in parts.items()}


def _attention_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes per element of queries, keys, values and output as attention stores them.

    Attention in 8 bits stores what it has quantised (Transformer Engine pytorch/attention/dot_product_attention/
    backends.py, FusedAttnFunc).
    """
    return np.where(batch.fp8_attention, NARROW_BYTES["fp8"], problem.training.element_bytes)


def _output_bytes(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Floats:
    """Bytes per element of the attention output: a fused kernel stores it, and a quantised GEMM after it a copy.

    Where scores are stored, only the GEMM needs it, for its weights or adapter.
    """
    copy, stored = _input_bytes(problem, batch), _attention_bytes(problem, batch)
    if not shape.keeps_input("out"):
        return np.where(stores_scores(problem, batch), 0.0, stored)
    return stored + np.where(copy < problem.training.element_bytes, copy, 0.0)


def bytes_per_width(
    problem: Problem,
    batch: PlanBatch,
    *,
    keeps_input: bool = True,
    is_frozen: bool = False,
    is_checkpointed: Bools | bool = False,
) -> Floats:
    """Bytes of fc1's output (gate and up) and of fc2's input; an eager activation also stores its steps.

    fc2's input is stored for the gradient of its weights or adapter, `keeps_input`, and what a trained activation
    multiplies by its weights for their gradients (xIELU), unless it `is_frozen`.  A checkpoint of the activation
    stores its input as it is, whatever the activation would store.
    """
    model, is_fused, element = problem.model, problem.framework.kernels.fused_activation, problem.training.element_bytes
    tensors = model.activation_tensors - (is_frozen and model.activation_parameters > 0)
    tensors = min(tensors, 1) if is_fused else tensors
    stored = np.where(batch.fp8_activation_input & ~np.asarray(is_checkpointed), NARROW_BYTES["fp8"], element)
    copy = _input_bytes(problem, batch)
    if model.gated_mlp:
        tensors = 2 if is_fused else 2 + tensors + problem.framework.memory.glu_offset
    elif not tensors:  # what it keeps is the input of fc2
        tensors, copy = 1, np.where(copy < element, copy, 0.0)
    return tensors * stored + keeps_input * copy


def _unfused_expert_bytes(problem: Problem) -> float:
    """Bytes per width that experts of Megatron store between the output of fc1 and the input of fc2 without fusion.

    The steps of a gated activation, and its output, which is multiplied by the probabilities of the tokens
    (Megatron-LM d98e8a6 core/transformer/moe/experts.py, bias_act_func).
    """
    framework, model = problem.framework, problem.model
    if framework.kernels.fused_activation or not (framework.megatron_layers and model.gated_mlp):
        return 0.0
    return problem.training.element_bytes * (model.activation_tensors + framework.memory.glu_offset + 1)


def _moe_parts(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Parts:
    """Bytes by part of router, permuted inputs, experts and shared expert."""
    model, moe = problem.model, problem.model.moe
    assert moe is not None
    narrow = _input_bytes(problem, batch)
    routed = held_expert_tokens(problem, batch)
    per_width = routed * moe.expert_ffn_size / batch.etp
    inputs, gates = _routed_bytes(problem, batch, shape)
    inputs = inputs + problem.framework.memory.weighted_copies * narrow * routed * (
        moe.latent_size or model.hidden_size
    )
    shared_width = bytes_per_width(problem, batch, keeps_input=shape.keeps_input("shared_fc2"))
    return {
        RecomputeModule.MOE: 12.0 * norm_tokens(problem, batch) * moe.num_experts + inputs + gates,
        RecomputeModule.MOE_ACT: (narrow * shape.keeps_input("expert_fc2") + _unfused_expert_bytes(problem))
        * per_width,
        RecomputeModule.SHARED_EXPERTS: shared_width
        * rank_tokens(problem, batch)
        * moe.shared_expert_ffn_size
        / batch.tp,
    }


class Offloaded(NamedTuple):
    """Bytes of a block and micro-batch that wait in host memory: shape (plans)."""

    copied_bytes: Floats  # to the host in the forward pass, and back in the backward pass
    freed_bytes: Floats  # on the device between them


def offloaded(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape, parts: Parts) -> Offloaded:
    """Return what a block offloads of what its `parts` store.

    The input of the attention's projection is its output, which the core stores, too, and which stays on the device
    unless both are offloaded.
    Source: Megatron-LM core/pipeline_parallel/fine_grained_activation_offload.py, core/transformer/attention.py; of
    shares of the layers, Transformer Engine pytorch/cpu_offload.py, whose copies are spread over all layers.
    """
    none, problem = np.zeros(len(batch)), problem.attending(block)
    if not (batch.offload_modules.any() or batch.offload_layers.any()):
        return Offloaded(none, none)
    share = np.array([word.share for word in OffloadLayers])[batch.offload_layers]
    copied = freed = share * kept_bytes(problem, batch, parts)

    if block in ATTENTION_BLOCKS:
        model = problem.model
        width = rank_tokens(problem, batch) * model.num_heads / batch.tp * model.attention_streams
        output = problem.training.element_bytes * width * model.v_head_dim
        inputs = parts.get(RecomputeModule.MLA_UP_PROJ, none) if model.mla else _qkv_bytes(problem, batch)
        copied = copied + batch.offloads("core_attn") * (inputs + output)
        freed = freed + batch.offloads("core_attn") * inputs + batch.offloads("attn_proj") * output
    elif block is Block.MOE:
        inputs, gates = _routed_bytes(problem, batch, shape)
        experts = batch.offloads("expert_fc1") * inputs + batch.offloads("moe_act") * gates
        copied, freed = copied + experts, freed + experts
    return Offloaded(copied, freed)


def whole_bytes(parts: Parts) -> Floats:
    """Bytes that a block stores per micro-batch without recomputation."""
    return add_up(parts.values())


def kept_bytes(problem: Problem, batch: PlanBatch, parts: Parts) -> Floats:
    """Bytes that a block stores per micro-batch under each plan's selective recomputation."""
    total = parts[None]
    for module, size in parts.items():
        if module is not None:
            given_back = np.logical_or.reduce([batch.repeats(name) for name in GIVEN_BACK_BY[module]])
            total = total + np.where(given_back, 0.0, size)
    share = problem.framework.kernels.selective_recompute_share
    return np.where(batch.recompute == SELECTIVE, 1.0 - share, 1.0) * total


def _routed_bytes(problem: Problem, batch: PlanBatch, shape: BlockShape) -> tuple[Floats, Floats]:
    """Return (bytes of the inputs of experts, of their gates and ups) that a rank stores per micro-batch."""
    moe = problem.model.moe
    assert moe is not None
    routed = held_expert_tokens(problem, batch)
    is_checkpointed = batch.repeats(RecomputeModule.MOE_ACT)
    gates = bytes_per_width(problem, batch, keeps_input=False, is_checkpointed=is_checkpointed)
    gates = np.where(_unfused_expert_bytes(problem) > 0, 2.0 * problem.training.element_bytes, gates)
    inputs = (
        _input_bytes(problem, batch) * shape.keeps_input("expert_fc1") * (moe.latent_size or problem.model.hidden_size)
    )
    return routed * inputs, routed * gates * moe.expert_ffn_size / batch.etp


def _qkv_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of queries, keys and values of a rank per micro-batch, without latent attention."""
    model = problem.model
    heads, kv_heads = model.num_heads / batch.tp, rank_kv_heads(model, batch)
    width = heads * model.qk_head_dim + kv_heads * (model.qk_head_dim + model.v_head_dim)
    return problem.training.element_bytes * rank_tokens(problem, batch) * width * model.attention_streams
