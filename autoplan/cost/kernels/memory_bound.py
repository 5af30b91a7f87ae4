"""Times of a block's memory-bound operations (`modelling` C5).

Arrays have one element per plan; times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, add_up
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.launches import BIAS_PER_EXPERT, has_fused_experts
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.measured import Sizes, find_kernels, measured_pass
from autoplan.cost.kernels.sequences import attended_len
from autoplan.cost.kernels.sizes import (
    expert_tokens,
    gathers_narrow,
    gathers_tokens,
    local_sizes,
    matrix_pieces,
    norm_tokens,
    pads_experts,
    rank_expert_tokens,
    rank_kv_heads,
    rank_tokens,
    routed_tokens,
    routing_ranks,
    scales_by_past,
    scales_tiles,
    sends_tokens_once,
)
from autoplan.cost.passes import Pass
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.enums import Precision
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import Operation
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Every kernel has a start-up time on the device (3 us, aiconfigurator's figure in `modelling` C5); a dense block has
# about this many kernels (C6: 25-40 per layer forward, 50-80 backward, of which the GEMMs are counted separately).
KERNEL_START_S = 3e-6
KERNELS_FORWARD, KERNELS_BACKWARD = 12, 24

# Router, top-k, auxiliary loss and token permutation are dozens of small kernels of any size: 50-150 us per pass
# (`modelling` C4).
ROUTING_S = 100e-6

# Blocks that pass a state from chunk to chunk.  Gated delta nets were not measured and use the figures of Mamba-2
# [judged].
RECURRENT_BLOCKS = (Block.LINEAR_ATTENTION, Block.MAMBA)

# A chunked scan is a dozen dependent kernels, one of which passes states from chunk to chunk: on one H100 the forward
# scan alone takes .3 ms for 1,024 tokens as for 4,096 (vllm pull request 27299).  Time per pass including convolution,
# gate and norm, in addition to the traffic [fitted: hybrids on H100 and B200-class devices].
SCAN_S = 700e-6

# Bytes per element of a GEMM operand (input or output gradient): read in bf16, written in 8 bits, and the transposed
# copy, which tensors with one scale do not need on Blackwell (Transformer Engine, nvte_is_non_tn_fp8_gemm_supported).
# In 4 bits a pass for the tensor's largest value comes first, and the transposed copy is rotated (Hadamard) and read
# separately (Transformer Engine, NVFP4BlockScaling).
CAST_BYTES = {"fp8": 4.0, "mxfp8": 4.0, "nvfp4": 7.0}
# The transposed copy's part of these bytes; only the weight gradient reads it.
TRANSPOSED_BYTES = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 2.5}
LARGEST_BYTES = 2.0  # one more read if the 8-bit scale comes from the tensor itself (torchao, dynamic scaling)

# Unfused operations of experts with biases and activation limits, as bytes of both passes per routed token and element:
# both halves of the first matrix's outputs are clamped separately and concatenated; the bias of the second matrix is
# weighted with the token's score in fp32 and added expert by expert.  Counted from Megatron-LM d98e8a6:
# core/fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl, and core/transformer/moe/experts.py,
# TEGroupedMLP._apply_bias, which a single graph of all launches cannot contain.
EXPERT_LIMIT_BYTES = (16.0, 20.0)
EXPERT_BIAS_BYTES = (28.0, 40.0)
# Casts of SwiGLU's input to 8 bits and back by kernels of torch, as bytes of each pass per token and element of the
# MLP's width: gate and up in 16 and in 8 bits (core/fusions/fused_bias_swiglu.py, SwiGLUFunction).
STORED_CAST_BYTES = 6.0
# Activations of several torch operations, as bytes of each pass per element and tensor that they keep beyond those of
# one kernel.  Counted from transformers' NewGELUActivation, which keeps 3 more: 8 kernels forward move 36 bytes, 13
# backward 56.
ACTIVATION_STEP_BYTES = (32 / 3, 50 / 3)
# Share of the memory bandwidth that torch kernels reach, eager or compiled: forward RMSNorms of 64 to 268 MB .65-.87
# on H200, .47-.76 on GB200 and GB300, where cuDNN's reach .69-.80 and .73-.81 (NVIDIA/cudnn-frontend 3929da2,
# benchmark/norms/results).
OP_BY_OP_SHARE = {"hopper": 0.75, "blackwell": 0.60}

# Traffic of permuting tokens with capacity limits (sorts, index selections and scaled scatters) relative to permuting
# without drops [fitted: 7 runs of Megatron-Bridge 25.09 on B200, GB200 and H100].
DROPPING_PERMUTE = 3.0
# Bytes of each pass per element that a rank receives, if it sorts tokens once more by torch's indexing: a gather and an
# assignment, each of 4 bytes; backward a gather and a sum of rows at 1 / 3.5 of a copy's rate (pytorch/ao pull request
# 4623; torchtitan b5bcd76 models/common/token_dispatcher.py, _permute and _unpermute).
SORT_RECEIVED_BYTES = (8.0, 18.0)
# Elements of 16 bits that a compute unit adds up in a second by atomic operations, with torch's scatter_add before its
# vectorised kernel of May 2026 (pytorch pull request 182675): 67 million in 2.07 ms on the 78 units of an H20
# (flagos-ai/FlagGems pull request 4502).  A B200 adds .32e9 where half of the rows are one (pytorch 183950).
ATOMIC_SUMS_PER_UNIT = 0.415e9
SUM_BYTES = 14.0  # that sums of rows without atomics move per element, and `permute_bytes_factor` counts: 3.5 x 4
EAGER_NORM_FACTOR = 5.7  # traffic of an eager fp32 RMSNorm relative to a fused one (findings 3)


class Traffic(NamedTuple):
    """Bytes moved through device memory in each pass."""

    forward_bytes: Floats
    backward_bytes: Floats

    def seconds(self, problem: Problem) -> Pass:
        """Time of the passes at the rate of a long stream."""
        return Pass(memory_bound_s(problem, self.forward_bytes), memory_bound_s(problem, self.backward_bytes))


def memory_bound_s(problem: Problem, num_bytes: Floats) -> Floats:
    """Time to move `num_bytes` through device memory at the rate of a long stream."""
    device = problem.device
    return (
        num_bytes * problem.calibration.memory_bound / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    )


def streams_s(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape, traffic: dict[str, Traffic]) -> Pass:
    """Time of a block's memory-bound kernels, including the start-up times of all its kernels."""
    cast = cast_traffic(problem, batch, shape)
    total = Traffic(
        add_up(moved.forward_bytes for moved in traffic.values()) + cast.forward_bytes,
        add_up(moved.backward_bytes for moved in traffic.values()) + cast.backward_bytes,
    )
    starts = ROUTING_S if block is Block.MOE else SCAN_S if block in RECURRENT_BLOCKS else 0.0
    looped = _looped_kernels(problem, batch, block)
    forward, backward = (
        (starts + kernels * KERNEL_START_S) * problem.calibration.memory_bound
        for kernels in (KERNELS_FORWARD + looped.forward_bytes, KERNELS_BACKWARD + looped.backward_bytes)
    )
    passes = total.seconds(problem).longer(forward, backward)
    if not problem.timings.is_empty:
        for beyond in measured_beyond_s(problem, batch, block, traffic).values():
            passes = passes.plus(beyond)
    return passes


def routing_start_s(problem: Problem) -> float:
    """Return the time of the router's small kernels in a pass, whatever their sizes."""
    return ROUTING_S * problem.calibration.memory_bound


def _looped_kernels(problem: Problem, batch: PlanBatch, block: Block) -> Traffic:
    """Number of kernels per pass that run for each expert besides its products: those for biases."""
    moe = problem.model.moe
    if block is not Block.MOE or moe is None or not problem.model.mlp_bias:
        return Traffic(np.zeros(len(batch)), np.zeros(len(batch)))
    local = np.where(has_fused_experts(problem, batch), 0.0, moe.num_experts / batch.ep)
    return Traffic(BIAS_PER_EXPERT.forward * local, BIAS_PER_EXPERT.backward * local)


def traffic_of(problem: Problem, batch: PlanBatch, block: Block) -> dict[str, Traffic]:
    """Bytes of a block's memory-bound operations on a rank (`modelling` C5); fp32 moves twice those of 16 bits."""
    model = problem.model
    hidden, tokens, sliced = model.hidden_size, rank_tokens(problem, batch), norm_tokens(problem, batch)
    norm = sliced * hidden * model.norms_per_block * _norm_traffic(problem)
    residual = sliced * hidden * np.where(batch.dropout, 9.0, 6.0)
    moved = {"norm": Traffic(4.0 * norm, 8.0 * norm), "residual": Traffic(residual, residual)}
    if block in ATTENTION_BLOCKS:
        if model.position_embedding == "relative" and block is not Block.CROSS_ATTENTION:
            # The bias is added to every score; its gradient is written and summed.
            scores = tokens * model.num_heads / batch.tp * attended_len(problem.training, batch.micro_batch)
            moved["bias"] = Traffic(2.0 * scores, 4.0 * scores)
        if model.position_embedding == "rope" and block is not Block.CROSS_ATTENTION:
            roped = 4.0 * tokens * _roped_heads(problem, batch) * model.qk_head_dim
            moved["rope"] = Traffic(roped, roped)
        if model.qk_norm != "none" and model.mla is None:
            normed = tokens * _roped_heads(problem, batch) * model.qk_head_dim * _norm_traffic(problem)
            moved["qk_norm"] = Traffic(4.0 * normed, 8.0 * normed)
        if model.attention_output_gate:
            gated = tokens * model.num_heads * model.qk_head_dim / batch.tp
            # Forward reads gate and output and writes the product; backward reads these again and writes both
            # gradients.
            moved["output_gate"] = Traffic(6.0 * gated, 10.0 * gated)
    elif block in RECURRENT_BLOCKS:
        scan = tokens * _scanned_width(model, block) / batch.tp
        # Convolution, gate, time steps, chunk states and their normalisation, each read and written [fitted: hybrids].
        moved["scan"] = Traffic(36.0 * scan, 88.0 * scan)
    elif block is Block.CONVOLUTION:
        # Two elementwise products and the convolution; backward both gradients of each.
        width = tokens * hidden / batch.tp
        moved["convolution"] = Traffic(16.0 * width, 28.0 * width)
    else:
        read, backward_read = _activation_bytes(problem)
        width = all_widths = tokens * _ffn_size(problem, block) / batch.tp
        moved["activation"] = Traffic(read * width, backward_read * width)
        if (steps := model.activation_tensors - 1) > 0 and not problem.framework.kernels.fused_activation:
            moved["activation_steps"] = Traffic(*(pass_bytes * steps * width for pass_bytes in ACTIVATION_STEP_BYTES))
        if block is Block.MOE and model.moe:
            received = rank_expert_tokens(problem, batch) / batch.etp
            width = received * model.moe.expert_ffn_size
            all_widths = all_widths + width
            sorted_here = received * routing_ranks(problem, batch)
            permute = _permute_bytes(problem, batch, sorted_here) * (model.moe.latent_size or hidden)
            moved["expert_activation"] = Traffic(read * width, backward_read * width)
            moved["permute"] = Traffic(permute, permute)
            moved |= _op_by_op_traffic(problem, batch, received)
            moved |= _op_by_op_sorting(problem, batch, sorted_here)
        cast = STORED_CAST_BYTES * all_widths * batch.fp8_activation_input
        moved["stored_cast"] = Traffic(cast, cast)
    pieces = max((len(matrix_pieces(problem, linear)) for linear in block_shapes(model)[block].linears), default=1)
    if pieces > 1:  # each produces a gradient of the block's whole input, which are summed
        moved["input_gradients"] = Traffic(0.0 * tokens, 2.0 * (pieces + 1) * tokens * hidden)
    factors = _kernel_factors(problem, batch, moved)
    wider = problem.training.element_bytes / 2.0
    return {
        name: Traffic(once.forward_bytes * factors[name] * wider, once.backward_bytes * factors[name] * wider)
        for name, once in moved.items()
    }


def _permute_bytes(problem: Problem, batch: PlanBatch, received: Floats) -> Floats:
    """Bytes per element of the width that sorting tokens by expert and back moves in a pass.

    They are sorted by the ranks that send and by those that receive; where tokens are sent once, by the latter alone.
    Of gathered tokens, those of an expert-tensor-parallel group too, these write the outputs of all, also of those that
    their experts did not get.
    """
    gathers = gathers_tokens(batch)
    is_one_sided = sends_tokens_once(problem, batch) | gathers
    sorted_tokens = np.where(is_one_sided, received, (routed_tokens(problem, batch) + received) / 2.0)
    others = np.where(gathers, norm_tokens(problem, batch) * batch.ep - received, 0.0)
    return np.asarray((8.0 * sorted_tokens + 2.0 * others) * np.where(gathers, batch.etp, 1))


def _kernel_factors(problem: Problem, batch: PlanBatch, names: Iterable[str]) -> dict[str, Floats | float]:
    """Return the bytes that the framework's kernels move, relative to fused ones, of every operation in `names`."""
    usual = problem.framework.kernels.kernel_bytes_factor
    factors: dict[str, Floats | float] = dict.fromkeys(names, usual)
    # Counted kernel by kernel.
    slower = problem.device.memory_efficiency / OP_BY_OP_SHARE.get(
        problem.device.generation, problem.device.memory_efficiency
    )
    factors |= dict.fromkeys(
        factors.keys() & {"activation_steps", "expert_limits", "expert_biases", "sort_received", "stored_cast"}, slower
    )
    factors |= dict.fromkeys(factors.keys() & {"expert_sums"}, 1.0)
    if "permute" in factors:
        # In one kernel of the dispatcher, or in several.
        apart = usual * problem.framework.kernels.permute_bytes_factor
        factors["permute"] = np.where(sends_tokens_once(problem, batch), 1.0, apart)
        factors["permute"] = factors["permute"] * np.where(pads_experts(problem, batch), DROPPING_PERMUTE, 1.0)
    return factors


def _op_by_op_traffic(problem: Problem, batch: PlanBatch, routed: Floats) -> dict[str, Traffic]:
    """Traffic of unfused limits and biases of experts that `routed` tokens of a rank visit."""
    model, moe = problem.model, problem.model.moe
    assert moe is not None
    rows = np.where(has_fused_experts(problem, batch), 0.0, routed)
    moved: dict[str, Traffic] = {}
    if model.clamped_activation:
        width = rows * moe.expert_ffn_size
        moved["expert_limits"] = Traffic(*(pass_bytes * width for pass_bytes in EXPERT_LIMIT_BYTES))
    if model.mlp_bias:
        # Each rank of an expert-tensor-parallel group has a partial sum for all tokens of the expert.
        width = np.asarray(rows * batch.etp * (moe.latent_size or model.hidden_size), dtype=np.float64)
        moved["expert_biases"] = Traffic(*(pass_bytes * width for pass_bytes in EXPERT_BIAS_BYTES))
    return moved


def _op_by_op_sorting(problem: Problem, batch: PlanBatch, received: Floats) -> dict[str, Traffic]:
    """Traffic of torch's operations that sort `received` tokens once more, and what atomic sums take beyond others.

    Sums of outputs are counted with those of the backward pass, as recomputation does not repeat them.
    """
    kernels, moe, device = problem.framework.kernels, problem.model.moe, problem.device
    assert moe is not None
    width = moe.latent_size or problem.model.hidden_size
    apart = ~sends_tokens_once(problem, batch)
    moved: dict[str, Traffic] = {}
    if kernels.sorts_received:
        elements = received * width * apart * (batch.ep > 1)
        moved["sort_received"] = Traffic(*(pass_bytes * elements for pass_bytes in SORT_RECEIVED_BYTES))
    if kernels.atomic_expert_sums and device.compute_units:
        streamed = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
        atomic_bytes = streamed / (ATOMIC_SUMS_PER_UNIT * device.compute_units)
        elements = 2.0 * routed_tokens(problem, batch) * width * apart
        moved["expert_sums"] = Traffic(0.0 * elements, max(atomic_bytes - SUM_BYTES, 0.0) * elements)
    return moved


def _activation_bytes(problem: Problem) -> tuple[float, float]:
    """Return (forward, backward) bytes of an MLP's activation per token and element of its width."""
    if problem.model.gated_mlp:
        return 6.0, 10.0
    if problem.model.squared_relu and not problem.framework.kernels.fused_squared_relu:
        return 8.0, 20.0  # backward: a copy, doubling, multiplication by the gradient, and the threshold
    return 4.0, 6.0


def _norm_traffic(problem: Problem) -> float:
    """Memory traffic of a norm relative to a fused one; torch's layer norm is always fused, an RMSNorm may not be."""
    if not problem.model.writes_out_norms:
        return 1.0
    return 1.0 if problem.fuses_norms else EAGER_NORM_FACTOR


def _scanned_width(model: ModelSpec, block: Block) -> int:
    """Width of a recurrent block's output plus its state's address: inner and state size, or values and keys."""
    if block is Block.MAMBA and model.mamba:
        return model.mamba.inner_size + model.mamba.num_groups * model.mamba.state_size
    assert model.linear_attention is not None
    return model.linear_attention.value_width + model.linear_attention.key_width


def _roped_heads(problem: Problem, batch: PlanBatch) -> Floats:
    model = problem.model
    return model.num_heads / batch.tp + rank_kv_heads(model, batch)


def _ffn_size(problem: Problem, block: Block) -> int:
    """Width of a block's MLP; in a block of experts, of the shared expert."""
    model = problem.model
    return model.moe.shared_expert_ffn_size if block is Block.MOE and model.moe else model.ffn_size


def measured_beyond_s(problem: Problem, batch: PlanBatch, block: Block, traffic: dict[str, Traffic]) -> dict[str, Pass]:
    """Times of measured memory-bound kernels minus those of their references, by name.

    The table has the framework's own kernels, or fused ones, relative to which the framework's take longer by their
    additional traffic.  A measured time includes the kernel's start-up time, of which the backward pass has twice as
    many.
    """
    model, is_own = problem.model, problem.timings.is_own
    factor = 1.0 if is_own else problem.framework.kernels.kernel_bytes_factor
    start_s = KERNEL_START_S * problem.calibration.memory_bound
    tokens, wide = rank_tokens(problem, batch), batch.unquantised()

    def reference(name: str, count: int = 1) -> Pass:
        moved = traffic[name]
        once = Traffic(moved.forward_bytes / count, moved.backward_bytes / count)
        return once.seconds(problem).longer(start_s, 2 * start_s)

    def beyond(
        name: str, passes: tuple[Operation, Operation], shape: tuple[Sizes, ...], count: int = 1, heavier: float = 1.0
    ) -> Pass:
        reference_pass = reference(name, count)
        lookups = [find_kernels(problem, wide, operation, *shape).scaled(factor * heavier) for operation in passes]
        return measured_pass(lookups, reference_pass).less(reference_pass).scaled(count)

    hidden = float(model.hidden_size)
    heavier = 1.0 if is_own else _norm_traffic(problem)
    norm_sizes = norm_tokens(problem, batch), hidden
    found = {"norm": beyond("norm", ("norm", "norm_backward"), norm_sizes, model.norms_per_block, heavier)}
    if model.gated_mlp and "activation" in traffic and _ffn_size(problem, block):
        width = _ffn_size(problem, block) / batch.tp
        found["activation"] = beyond("activation", ("swiglu", "swiglu_backward"), (tokens, width))
    if "rope" in traffic and model.mla is None:
        rope_s = reference("rope").total_s
        rope = find_kernels(problem, wide, "rope", tokens, _roped_heads(problem, batch), float(model.qk_head_dim))
        half = (rope.scaled(factor).otherwise(rope_s) - rope_s) / 2
        found["rope"] = Pass(half, half)
    return found


def cast_traffic(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Traffic:
    """Traffic of quantising the inputs of narrow GEMMs; zero for 16-bit plans."""
    is_fp8 = batch.precision == Precision.FP8.code
    moved = np.array([CAST_BYTES.get(precision, 0.0) for precision in Precision])[batch.precision]
    has_tiles = scales_tiles(batch)
    # Finding the largest value of an operand takes a separate pass; that of a tile is found where it is quantised.
    moved = moved + LARGEST_BYTES * (is_fp8 & ~scales_by_past(batch) & ~has_tiles)
    # Blackwell's 8-bit products need no transposed copy, but with tiles, which run along one dimension there.
    copies = is_fp8 & (has_tiles | (problem.device.generation != "blackwell"))
    moved = moved - (is_fp8 & ~copies)
    # Tensors that are gathered quantised were quantised in slices; the transposed copy is made from the whole.  Tiles
    # of both dimensions are quantised in slices and gathered, and those of columns transposed then.
    in_slices = batch.sp & gathers_narrow(problem, batch)
    of_slices = np.where(in_slices, (moved - (copies & ~has_tiles)) / batch.tp + 2.0 * copies, moved)
    transposed = np.array([TRANSPOSED_BYTES.get(precision, 0.0) for precision in Precision])[batch.precision]
    transposed = np.where(is_fp8 & ~copies, 0.0, transposed)
    forward = backward = np.zeros(len(batch))
    for linear in shape.linears:
        if linear.adapts:
            continue
        inputs, outputs = local_sizes(linear, batch)
        tokens = rank_tokens(problem, batch)
        if linear.is_expert:
            tokens = expert_tokens(problem, batch) * linear.copies / batch.ep
        # Without a weight gradient there is no transposed copy.
        spared = transposed if linear.is_frozen else 0.0
        forward = forward + inputs * tokens * ((of_slices if linear.split == "column" else moved) - spared)
        backward = backward + outputs * tokens * ((of_slices if linear.split == "row" else moved) - spared)
    return Traffic(forward, backward)
