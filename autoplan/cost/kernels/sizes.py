"""Work of one rank in one micro-batch: its tokens, its part of a matrix, its rows of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.base.extremes import largest_of
from autoplan.cost.kernels.linears import Linear
from autoplan.cost.kernels.sequences import tokens_per_sample
from autoplan.spec.enums import Dispatcher, Fp8Scaling, Precision
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Bytes per quantised element: 8 bits, plus scales per block of 32 (MXFP8) or 16 (NVFP4) elements.
NARROW_BYTES = {"fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
ONE_COPY_DISPATCHERS = [Dispatcher.DEEPEP.code, Dispatcher.HYBRIDEP.code]
BLOCKWISE_BYTES = 1.0 + 4 / 128  # 8 bits, plus an fp32 scale per 128 elements; a weight's scale serves 128 such rows


def scales_rows(batch: PlanBatch) -> Bools:
    """Return which plans have 8-bit products with one scale per matrix row."""
    return np.asarray((batch.precision == Precision.FP8.code) & (batch.fp8_scaling == Fp8Scaling.ROWWISE.code))


def scales_by_past(batch: PlanBatch) -> Bools:
    """Return which plans have 8-bit products with delayed scaling."""
    return np.asarray((batch.precision == Precision.FP8.code) & (batch.fp8_scaling == Fp8Scaling.DELAYED.code))


def scales_tiles(batch: PlanBatch) -> Bools:
    """Return which plans have 8-bit products with one scale per 128 elements, or per 128 x 128 of a weight."""
    return np.asarray((batch.precision == Precision.FP8.code) & (batch.fp8_scaling == Fp8Scaling.BLOCKWISE.code))


def scales_blocks(batch: PlanBatch) -> Bools:
    """Return which plans have products with one scale per block of a matrix row or column."""
    is_block_type = (batch.precision == Precision.MXFP8.code) | (batch.precision == Precision.NVFP4.code)
    return np.asarray(is_block_type | scales_tiles(batch))


def operand_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes per element of an activation or gradient that enters a product."""
    element = problem.training.element_bytes
    by_precision = np.array([NARROW_BYTES.get(precision, element) for precision in Precision])[batch.precision]
    return np.where(scales_tiles(batch), BLOCKWISE_BYTES, by_precision)


def gathers_narrow(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans gather the inputs of matrices quantised, each rank its part of the tokens."""
    narrow, is_fp8 = problem.framework.network.narrow_tp_gathers, batch.precision == Precision.FP8.code
    tensors = is_fp8 & ~scales_rows(batch) & ~scales_tiles(batch)
    return np.asarray((tensors & (narrow != "none")) | (scales_blocks(batch) & (narrow == "blocks")))


def rank_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens of a mean micro-batch per tensor-parallel group, after context parallelism."""
    return batch.micro_batch * tokens_per_sample(problem.training, batch.micro_batch) / batch.cp


def norm_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens that one rank normalises and routes; sequence parallelism divides them by tp."""
    return rank_tokens(problem, batch) / np.where(batch.sp, batch.tp, 1)


def encoder_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Encoder positions in one micro-batch, which cross attention reads."""
    return batch.micro_batch * np.float64(problem.encoder_len)


def linear_tokens(problem: Problem, batch: PlanBatch, linear: Linear) -> Floats:
    """Tokens of a micro-batch multiplied by a rank's part of a matrix; for experts, by all local copies together."""
    if linear.is_expert:
        return expert_tokens(problem, batch) * linear.copies / batch.ep
    if linear.reads_encoder:
        return encoder_tokens(problem, batch)
    return norm_tokens(problem, batch) if linear.split == "replicated" else rank_tokens(problem, batch)


def routed_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens that one rank routes, once per expert that they visit."""
    moe = problem.model.moe
    assert moe is not None
    return norm_tokens(problem, batch) * moe.experts_per_token * routing_ranks(problem, batch)


def routing_ranks(problem: Problem, batch: PlanBatch) -> Ints:
    """Return how many ranks that share experts route the same tokens, each for its part of them."""
    return np.where(batch.sp & problem.framework.experts.routes_group_tokens, batch.etp, 1)


def expert_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens that a local expert on the busiest rank receives from its expert-parallel group."""
    moe = problem.model.moe
    assert moe is not None
    return rank_expert_tokens(problem, batch) * batch.ep / moe.num_experts


def mean_expert_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens that all local experts on a rank receive in the mean."""
    return routed_tokens(problem, batch) * (batch.etp // routing_ranks(problem, batch))


def rank_expert_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens that all local experts on the busiest rank receive."""
    return mean_expert_tokens(problem, batch) * expert_imbalance(problem, batch)


def rank_kv_heads(model: ModelSpec, batch: PlanBatch) -> Floats:
    """Key/value heads of a rank: at least one, which several ranks then have alike."""
    return model.kv_heads / np.minimum(batch.tp, model.kv_heads)


def expert_imbalance(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens of the busiest expert rank over the mean of all routed ones; if some are dropped, at most the capacity.

    Padded experts compute on, and exchange, as many as their capacity (Megatron-LM d98e8a6 token_dispatcher.py:517).
    A rank with all experts computes on its own tokens, however they are routed.
    """
    training = problem.training
    capacity = training.capacity_factor
    of_ranks = np.where(batch.ep > 1, np.maximum(training.expert_imbalance, _routed_imbalance(problem, batch)), 1.0)
    busiest = capacity if training.pads_experts else np.minimum(capacity, of_ranks)
    return np.where(batch.token_dropping, busiest, of_ranks)


def _routed_imbalance(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens of the busiest expert rank over the mean, from the loss that balances experts.

    The loss is E sum(f p) of E experts' shares f of the tokens and mean probabilities p.  As p comes close to f in
    trained routers, it is 1 plus the squared coefficient of variation of their tokens.  The mean of the experts of a
    rank varies less; no rank gets more than all tokens, once for each of its experts.
    """
    moe, loss = problem.model.moe, problem.training.balancing_loss
    if moe is None or loss == 1.0:
        return np.ones(len(batch))
    local = moe.num_experts / batch.ep
    spread = np.sqrt((loss - 1.0) / local * (1.0 - 1.0 / batch.ep))
    return np.minimum(1.0 + largest_of(batch.ep) * spread, batch.ep * np.minimum(local / moe.experts_per_token, 1.0))


def pads_experts(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans give every expert as many tokens as its capacity, so that shapes are static."""
    return np.asarray(batch.token_dropping & problem.training.pads_experts)


def sends_tokens_once(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans send a token only once to a rank or node, where a kernel sorts it by expert."""
    return (batch.ep > 1) & np.isin(batch.dispatcher, ONE_COPY_DISPATCHERS)


def gathers_tokens(batch: PlanBatch) -> Bools:
    """Return which plans send every token to all expert-parallel ranks, which choose those of their experts."""
    return np.asarray((batch.ep > 1) & (batch.dispatcher == Dispatcher.ALL_GATHER.code))


def local_sizes(linear: Linear, batch: PlanBatch) -> tuple[Floats, Floats]:
    """Return (inputs, outputs) of one rank's part of a matrix."""
    ones = np.ones(len(batch))
    if linear.split == "column":
        groups = np.minimum(batch.tp, linear.num_groups)
        ungrouped = linear.out_size - linear.grouped_out_size
        return linear.in_size * ones, ungrouped / batch.tp + linear.grouped_out_size / groups
    if linear.split == "row":
        return linear.in_size / batch.tp, linear.out_size * ones
    if linear.split == "expert_column":
        return linear.in_size * ones, linear.out_size / batch.etp
    if linear.split == "expert_row":
        return linear.in_size / batch.etp, linear.out_size * ones
    return linear.in_size * ones, linear.out_size * ones


def matrix_pieces(problem: Problem, linear: Linear) -> tuple[Linear, ...]:
    """Number of products that a framework uses for a matrix: one, or one each for q, k, v, gate and up."""
    if not problem.framework.kernels.separate_inputs:
        return (linear,)
    if linear.name == "qkv":
        shared = linear.grouped_out_size // 2
        queries = replace(linear, out_size=linear.out_size - 2 * shared, grouped_out_size=0)
        part = replace(linear, out_size=shared, grouped_out_size=shared)
        return queries, part, part
    if linear.name == "fc1" and problem.model.gated_mlp:
        half = replace(linear, out_size=linear.out_size // 2)
        return half, half
    return (linear,)


def widest_mlp(model: ModelSpec) -> int:
    """Largest width of a token inside an MLP, or in all its experts together."""
    moe = model.moe
    return max(model.ffn_size, moe.shared_expert_ffn_size + moe.experts_per_token * moe.expert_ffn_size if moe else 0)


def local_logits(problem: Problem, batch: PlanBatch) -> Floats:
    """Logits of a micro-batch on a rank with the head."""
    split = np.where(problem.framework.memory.shards_logits, batch.tp, 1)
    return rank_tokens(problem, batch) * head_columns(problem, batch) / split


def head_columns(problem: Problem, batch: PlanBatch) -> Floats:
    """Outputs of the head over all its ranks: logits, or a score that every rank computes."""
    return batch.tp * np.ones(len(batch)) if problem.training.has_scores else padded_vocab(problem, batch)


def padded_vocab(problem: Problem, batch: PlanBatch) -> Floats:
    """Rows of the vocabulary after padding to a multiple of `pads_vocab_to` x tp."""
    multiple = problem.framework.memory.pads_vocab_to * batch.tp
    return np.ceil(problem.model.vocab_size / multiple) * multiple
