"""How much device memory does every pipeline rank need, term by term?

Formulas: `modelling` B1-B6.  Arrays of stages have the shape (plans, stages); sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.arithmetic import BlockShape, block_shapes, embedding_parameters, norm_parameters
from autoplan.cost.compute import (
    add_up,
    expert_tokens,
    local_sizes,
    norm_tokens,
    padded_vocab,
    rank_tokens,
)
from autoplan.cost.layer import GATHERED_BYTES, BlockCost, Groups, groups
from autoplan.cost.schedule import in_flight_chunks
from autoplan.model import Block
from autoplan.plan import OFFLOADS, PRECISIONS, RECOMPUTES, SCHEDULES, SHARDINGS, PlanBatch
from autoplan.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# What is kept of each attention score where no flash kernel avoids it: softmax output (2 bytes), and in eager code the
# scores and a masked copy as well; dropout adds a mask and an output (Korthikanti et al., arXiv:2205.05198, 5 a s).
SCORE_BYTES = {"unfused": 6.0, "megatron-fused": 2.0}
SCORE_DROPOUT_BYTES = 3.0
EAGER_NORM_BYTES = 8.0  # fp32 copies kept by a hand-written norm, per token and hidden element (`modelling` B2)

MEMORY_TERMS = ("weights", "gradients", "optimizer", "activations", "logits", "working", "update", "fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters that a rank of every stage holds, in elements: shape (plans, stages)."""

    dense: Floats
    expert: Floats
    ends: Floats  # of the dense ones: embedding and head, which belong to no block


def stage_parameters(
    problem: Problem, batch: PlanBatch, costs: dict[Block, BlockCost], counts: dict[Block, Ints]
) -> StageParameters:
    """Blocks, embedding (first stage), head and final norm (last stage) of one rank."""
    model = problem.model
    stages = next(iter(counts.values())).shape[1]
    dense = np.zeros((len(batch), stages))
    expert = np.zeros((len(batch), stages))
    for block, count in counts.items():
        dense += count * costs[block].dense_parameters[:, None]
        expert += count * costs[block].expert_parameters[:, None]
    table = padded_vocab(problem, batch) * model.hidden_size / batch.tp
    ends = np.zeros((len(batch), stages))
    ends[:, 0] += table + embedding_parameters(model) - model.vocab_size * model.hidden_size
    # A tied head is a second copy unless first and last stage are the same.
    ends[:, -1] += (0.0 if model.tied_embeddings and stages == 1 else table) + norm_parameters(model)
    if model.num_mtp_layers:
        # Predictions embed their tokens again, on the last stage (Megatron-LM gpt_model.py).
        ends[:, -1] += (table if stages > 1 else 0.0) + model.num_mtp_layers * 3 * norm_parameters(model)
        dense[:, -1] += model.num_mtp_layers * 2 * model.hidden_size**2 / batch.tp
        for block in model.mtp_layer:
            dense[:, -1] += model.num_mtp_layers * costs[block].dense_parameters
            expert[:, -1] += model.num_mtp_layers * costs[block].expert_parameters
    return StageParameters(dense=dense + ends, expert=expert, ends=ends)


def activation_bytes(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Floats:
    """Bytes that one block keeps of one micro-batch until its backward pass, nothing recomputed (`modelling` B2)."""
    model, framework, training = problem.model, problem.framework, problem.training
    tokens, sliced = rank_tokens(problem, batch), norm_tokens(problem, batch)
    fused_norm = framework.fused_norm if training.fused_norm is None else training.fused_norm
    norm = model.norms_per_block * (4.0 + (0.0 if fused_norm else EAGER_NORM_BYTES)) + (
        1.0 if framework.dropout else 0.0
    )
    kept = norm * sliced * model.hidden_size
    if not framework.regathers_norm_output:
        kept = kept + 2.0 * model.norms_per_block * (tokens - sliced) * model.hidden_size
    if block in (Block.ATTENTION, Block.WINDOW_ATTENTION):
        heads = model.num_heads / batch.tp
        if mla := model.mla:
            latents = 4.0 * (mla.q_lora_rank or 0) + 2.0 * (mla.kv_lora_rank + mla.qk_rope_head_dim)
            latents += 2.0 * mla.kv_lora_rank
            per_head = 4.0 * model.qk_head_dim + 2.0 * (mla.qk_nope_head_dim + mla.v_head_dim) + 2.0 * mla.v_head_dim
            kept = kept + tokens * (latents + per_head * heads)
        else:
            kv_heads = model.kv_heads / np.minimum(batch.tp, model.kv_heads)
            kept = kept + tokens * 2.0 * model.qk_head_dim * (2 * heads + 2 * kv_heads)
        if training.attention in SCORE_BYTES:
            kernel = "megatron-fused" if framework.fuses_softmax else training.attention
            score = SCORE_BYTES[kernel] + (SCORE_DROPOUT_BYTES if framework.dropout else 0.0)
            recomputed = batch.recompute == RECOMPUTES.index("selective")
            kept = kept + np.where(recomputed, 0.0, score * tokens * heads * training.seq_len)
        else:
            kept = kept + 4.0 * tokens * heads
        return kept
    if block is Block.MAMBA and model.mamba:
        inner = model.mamba.num_heads * model.mamba.head_dim
        wide = shape.linears[0].out_size + inner + 2 * model.mamba.num_groups * model.mamba.state_size + 2 * inner
        return kept + 2.0 * tokens * wide / batch.tp
    # fc1's output (gate and up) and the activation that feeds fc2; an eager SwiGLU keeps the gated half as well.
    per_width = (6.0 if model.gated_mlp else 4.0) + (0.0 if framework.fused_activation else 2.0)
    if block is Block.MLP:
        return kept + per_width * tokens * model.ffn_size / batch.tp
    moe = model.moe
    assert moe is not None
    routed = expert_tokens(problem, batch) * moe.num_experts / batch.ep
    kept = kept + 12.0 * sliced * moe.num_experts
    kept = kept + routed * (2.0 * (moe.latent_size or model.hidden_size) + per_width * moe.expert_ffn_size / batch.etp)
    return kept + per_width * tokens * moe.shared_expert_ffn_size / batch.tp


def _backward_bytes(problem: Problem, batch: PlanBatch, layer_bytes: Floats, stored_bytes: Floats) -> Floats:
    """Transients of the backward pass of one layer (`modelling` B6).

    With full recomputation the layer's own activations live again, of which its stored input is already counted.
    """
    model = problem.model
    tokens, sliced = rank_tokens(problem, batch), norm_tokens(problem, batch)
    width = model.ffn_size
    if model.moe:
        width = max(width, model.moe.shared_expert_ffn_size + model.moe.experts_per_token * model.moe.expert_ffn_size)
    # The gradient of fc1's output, or where that needs no memory of its own, of fc2's input.
    gate = 2 if model.gated_mlp and not problem.framework.in_place_activation else 1
    transient = 2.0 * tokens * gate * width / batch.tp + 2.0 * tokens * model.hidden_size
    transient = transient + 3 * 2.0 * sliced * model.hidden_size
    full = batch.recompute == RECOMPUTES.index("full")
    return transient + np.where(full, np.maximum(layer_bytes - stored_bytes, 0.0), 0.0)


def _head_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Logits and hidden states at the peak of head and loss on the last stage (`modelling` B3, B7)."""
    framework, hidden = problem.framework, problem.model.hidden_size
    tokens = rank_tokens(problem, batch)
    split = batch.tp if framework.shards_logits else np.ones(len(batch), dtype=np.int64)
    per_logit = framework.bytes_per_logit + np.where(batch.tp > 1, framework.bytes_per_gathered_logit, 0.0)
    logits = per_logit * tokens * padded_vocab(problem, batch) / split
    # The gathered hidden states and their gradient, and both again as every rank holds them between blocks.
    states = 4.0 * tokens * hidden + 4.0 * norm_tokens(problem, batch) * hidden
    return (1 + problem.model.num_mtp_layers) * (logits + states + framework.bytes_per_head_hidden * tokens * hidden)


def _gathered_bytes(
    problem: Problem, batch: PlanBatch, costs: dict[Block, BlockCost], parameters: StageParameters, places: Groups
) -> Floats:
    """Gathered weights and whole gradients that zero3 holds at its peak: shape (plans, stages).

    Embedding and head for the whole of both passes and some layers at a time, or in a pipeline, where the framework
    does not gather again for every micro-batch, the whole stage.  What is sharded over one rank needs no copy.
    """
    framework, layers = problem.framework, problem.model.layers
    dense_spread, expert_spread = places.shard[1] > 1, places.expert_shard[1] > 1

    def spread(dense: Floats, expert: Floats) -> Floats:
        return dense * dense_spread + expert * expert_spread

    unit = np.zeros(len(batch))
    for layer in set(layers):
        held = (spread(costs[block].dense_parameters, costs[block].expert_parameters) for block in layer)
        unit = np.maximum(unit, add_up(held))
    in_turn = unit * (framework.fsdp_prefetch_units * GATHERED_BYTES + framework.bytes_per_reduced_grad)
    root = (parameters.ends.T * dense_spread).T * (GATHERED_BYTES + framework.bytes_per_reduced_grad)
    stage = spread(parameters.dense.T, parameters.expert.T).T * (GATHERED_BYTES + framework.bytes_per_reduced_grad)
    whole = (batch.pp > 1) & (not framework.zero3_regathers_in_pipeline)
    zero3 = batch.sharding == SHARDINGS.index("zero3")
    return np.where(zero3[:, None], np.where(whole[:, None], stage, in_turn[:, None] + root), 0.0)


def _activations(
    problem: Problem, batch: PlanBatch, counts: dict[Block, Ints], per_block: dict[Block, Floats], stored: Floats
) -> Floats:
    """Bytes kept for the backward passes of all micro-batches in flight: shape (plans, stages).

    `stored` is what full recomputation keeps of a block.
    """
    model, framework = problem.model, problem.framework
    stages = next(iter(counts.values())).shape[1]
    full = batch.recompute == RECOMPUTES.index("full")
    selective = batch.recompute == RECOMPUTES.index("selective")
    share = np.where(selective, 1.0 - framework.selective_recompute_share, 1.0)
    kept = {block: np.where(full, stored, share * size) for block, size in per_block.items()}
    one = np.zeros((len(batch), stages))
    for block, count in counts.items():
        one += count * kept[block][:, None]
    for block in model.mtp_layer if model.num_mtp_layers else ():
        one[:, -1] += model.num_mtp_layers * kept[block]
    gpipe = batch.schedule == SCHEDULES.index("gpipe")
    live = in_flight_chunks(stages, batch.vp, batch.num_microbatches, gpipe=gpipe)
    # Every chunk in flight keeps the tensors at its ends.
    boundary = framework.bytes_per_boundary_hidden * norm_tokens(problem, batch) * model.hidden_size * (batch.pp > 1)
    return (one / batch.vp[:, None] + boundary[:, None]) * live


def _dummy_wgrad_bytes(problem: Problem, batch: PlanBatch, stages: int) -> Floats:
    """One persistent bf16 buffer per distinct weight shape (Transformer Engine; `modelling` B6): (plans, stages).

    The head's is on the last stage (Megatron-LM core/tensor_parallel/layers.py get_dummy_wgrad).
    """
    buffers = np.zeros((len(batch), stages))
    if not problem.framework.dummy_wgrad_buffers:
        return buffers
    total = np.zeros(len(batch))
    seen: set[tuple[int, int, str]] = set()
    for shape in block_shapes(problem.model).values():
        for linear in shape.linears:
            key = (linear.in_size, linear.out_size, linear.split)
            if key not in seen and linear.name != "router":
                seen.add(key)
                inputs, outputs = local_sizes(linear, batch)
                total = total + 2.0 * inputs * outputs
    buffers += total[:, None]
    buffers[:, -1] += 2.0 * padded_vocab(problem, batch) * problem.model.hidden_size / batch.tp
    return buffers


def _spread_bytes(
    parameters: StageParameters, places: Groups, per_parameter: float, sharded: NDArray[np.bool_]
) -> Floats:
    """What a rank holds per parameter, divided over its shard group where `sharded`: shape (plans, stages)."""
    dense = per_parameter / np.where(sharded, places.shard[1].astype(np.float64), 1.0)
    expert = per_parameter / np.where(sharded, places.expert_shard[1].astype(np.float64), 1.0)
    return parameters.dense * dense[:, None] + parameters.expert * expert[:, None]


def _states(
    problem: Problem, batch: PlanBatch, parameters: StageParameters, places: Groups
) -> tuple[Floats, Floats, Floats]:
    """(weights, gradients, optimizer) bytes under every sharding, experts over their own group (`modelling` B1)."""
    framework = problem.framework
    sharding = batch.sharding
    zero1 = sharding >= SHARDINGS.index("zero1")
    # A buffer that gathers the gradients of several micro-batches before they are reduced holds all of them.
    reduces = framework.zero2_reduces_every_microbatch | (batch.num_microbatches == 1)
    zero2 = (sharding > SHARDINGS.index("zero2")) | ((sharding == SHARDINGS.index("zero2")) & reduces)
    zero3 = sharding >= SHARDINGS.index("zero3")
    spread = partial(_spread_bytes, parameters, places)
    fp16 = batch.precision == PRECISIONS.index("fp16")
    weights = spread(framework.bytes_per_weight, zero3)
    gradients = spread(framework.bytes_per_grad, zero2)
    gradients += spread(framework.bytes_per_bf16_grad_accumulator, zero2) * ~fp16[:, None]
    on_device = batch.offload != OFFLOADS.index("optimizer")
    if framework.offloads_grads:
        gradients *= (on_device | ~zero3)[:, None]
    optimizer = spread(framework.bytes_per_optimizer_state, zero1) * on_device[:, None]
    optimizer += spread(framework.bytes_per_fp16_unscaled_grad, zero1) * (fp16 & on_device)[:, None]
    return weights, gradients, optimizer


def _update_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters, places: Groups) -> Floats:
    """What lives only from the last backward pass to the end of the optimizer's step: shape (plans, stages)."""
    framework = problem.framework
    zero1 = batch.sharding >= SHARDINGS.index("zero1")
    on_device = batch.offload != OFFLOADS.index("optimizer")
    copies = _spread_bytes(parameters, places, framework.bytes_per_update_copy, zero1) * on_device[:, None]
    # Under zero1, where gradients are not reduced before the step, and weights gathered in it; some bf16 optimizers
    # do without buckets, all at once.
    whole = (batch.precision != PRECISIONS.index("fp16")) & (framework.bytes_per_bf16_gathered_weight > 0)
    gathered = framework.bytes_per_bf16_gathered_weight * (parameters.dense + parameters.expert)
    buckets = np.where(whole[:, None], gathered, framework.bucket_bytes)
    return copies + buckets * (batch.sharding == SHARDINGS.index("zero1"))[:, None]


def memory_terms(
    problem: Problem, batch: PlanBatch, costs: dict[Block, BlockCost], counts: dict[Block, Ints]
) -> dict[str, Floats]:
    """Peak bytes of every stage by term of `MEMORY_TERMS`: shape (plans, stages)."""
    model, framework = problem.model, problem.framework
    places = groups(batch)
    stages = next(iter(counts.values())).shape[1]
    parameters = stage_parameters(problem, batch, costs, counts)
    weights, gradients, optimizer = _states(problem, batch, parameters, places)

    shapes = block_shapes(model)
    per_block = {block: activation_bytes(problem, batch, block, shapes[block]) for block in shapes}
    stored_layer = 2.0 * norm_tokens(problem, batch) * model.hidden_size  # the input, all that full recomputation keeps
    largest_layer = np.zeros(len(batch))
    for layer in set(model.layers):
        largest_layer = np.maximum(largest_layer, add_up(per_block[block] for block in layer))

    logits = np.zeros((len(batch), stages))
    logits[:, -1] = _head_bytes(problem, batch)
    transient = np.repeat(_backward_bytes(problem, batch, largest_layer, stored_layer)[:, None], stages, axis=1)
    # The backward pass of the head is over before that of the last layer begins: the larger of the two counts.
    working = transient if framework.keeps_logits else np.maximum(transient - logits, 0.0)
    working += _dummy_wgrad_bytes(problem, batch, stages)
    working += _gathered_bytes(problem, batch, costs, parameters, places)
    # Gradients that are reduced during backward passes have their bucket beside the activations.
    working += (framework.bucket_bytes * (batch.sharding >= SHARDINGS.index("zero2")))[:, None]

    communicators = np.zeros(len(batch))
    for _, size in (places.tp, places.cp, places.shard, places.replicate, places.ep, places.pp):
        communicators += size > 1
    fixed = framework.fixed_bytes + framework.communicator_bytes * communicators
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": _activations(problem, batch, counts, per_block, stored_layer / len(model.layers[0])),
        "logits": logits,
        "working": working,
        "update": _update_bytes(problem, batch, parameters, places),
        "fixed": np.repeat(fixed[:, None], stages, axis=1),
    }


def allocated_bytes(terms: dict[str, Floats]) -> Floats:
    """What the framework's tensors take at their peak, per stage: all but context and communication buffers.

    States, and beside them what the passes keep or what the optimizer's step copies, whichever is more.
    """
    states = terms["weights"] + terms["gradients"] + terms["optimizer"]
    return states + np.maximum(terms["activations"] + terms["logits"] + terms["working"], terms["update"])


def reserved_bytes(problem: Problem, terms: dict[str, Floats]) -> Floats:
    """What the device has to hold, per stage: allocations with their fragmentation, context, communication buffers."""
    return allocated_bytes(terms) * problem.framework.reserved_factor + terms["fixed"]


def _cached_bytes(problem: Problem, terms: dict[str, Floats]) -> Floats:
    """What a device shows as taken, per stage, after some steps.

    The allocator keeps the blocks of activations, too small for the flat tensors of the optimizer's step, so both
    count; only a full device makes it give blocks back.
    """
    held = add_up(value for name, value in terms.items() if name != "fixed")
    return np.minimum(held * problem.framework.reserved_factor + terms["fixed"], problem.capacity_bytes)


def logged_bytes(problem: Problem, terms: dict[str, Floats]) -> Floats:
    """The peak that the framework's log shows, of the worst rank or of rank 0."""
    kind = problem.framework.logs_memory
    if kind == "device":
        per_stage = _cached_bytes(problem, terms)
    else:
        factor = problem.framework.reserved_factor if kind == "reserved" else 1.0
        per_stage = allocated_bytes(terms) * factor
    return per_stage[:, 0] if problem.framework.logs_first_rank else per_stage.max(axis=1)
