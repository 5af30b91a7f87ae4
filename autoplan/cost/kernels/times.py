"""Times of the kernels of each block on one device, forward and backward, for one micro-batch.

GEMMs (`modelling` C2), attention (C3), grouped GEMMs (C4) and memory-bound operations (C5).  Arrays have one element
per plan; times are seconds, sizes elements.  The constants below are reference values for the shape of the curves;
the level comes from the device (`gemm_efficiency`) and from the calibration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.kernels.arithmetic import (
    DELTA_CHUNK_TOKENS,
    BlockShape,
    Linear,
    attention_context,
    block_shapes,
    linear_attention_flops_per_token,
    mamba_scan_flops_per_token,
)
from autoplan.cost.kernels.measured import find_kernels, passes_s
from autoplan.cost.kernels.measured_units import head_factor
from autoplan.cost.passes import Pass
from autoplan.spec.enums import ContextParallelKind, Dispatcher, Precision
from autoplan.spec.model import Block, ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import PRODUCTS, Operation

# What decides the shapes of a plan's kernels: many plans share all of them.
KERNEL_AXES = ("micro_batch", "tp", "sp", "cp", "cp_kind", "ep", "etp", "dispatcher", "precision")

# How many times as long 16-bit GEMMs of large shapes take where the rows of a matrix are no multiple of 16 bytes, so
# that it is loaded in narrower pieces, and where rows have an odd number of elements, which no asynchronous copy takes
# (4 bytes at least).  Odd: between the three times of heads of some vocabularies (Netflix, "Scaling LLM Post-Training",
# 2026-02-13) and the two that make a step of nanoGPT, .27 of it in the head, 25 % slower with 50,257 columns than with
# 50,304 (x.com/karpathy/status/1621578354024677377).  Narrow: judged, half-way to it.
ROW_BYTES = 16.0
NARROW_ROWS_TIME, ODD_ROWS_TIME = 1.6, 2.5

# Grouped GEMMs against dense ones by tokens per expert (`modelling` C4): .48 M / (M + 180) forward and data gradient,
# .40 M / (M + 450) weight gradient, where dense GEMMs of the same runs reach about .50.
GROUPED_HALF_M, GROUPED_SHARE = 180.0, 0.96
GROUPED_WGRAD_HALF_M, GROUPED_WGRAD_SHARE = 450.0, 0.80

# Every kernel costs a start of its own on the device (3 us, aiconfigurator's figure in `modelling` C5); a dense block
# is about this many of them (C6: 25-40 a layer forward, 50-80 backward, of which the GEMMs are counted apart).
KERNEL_START_S = 3e-6
KERNELS_FORWARD, KERNELS_BACKWARD = 12, 24

# Router, top-k, auxiliary loss and token permutation are dozens of small kernels whatever the size: 50-150 us a pass
# (`modelling` C4).
ROUTING_S = 100e-6

# Blocks that hand a state from chunk to chunk.  Gated delta nets were not measured: theirs are the figures of Mamba-2
# [judged].
RECURRENT_BLOCKS = (Block.LINEAR_ATTENTION, Block.MAMBA)

# A chunked scan is a dozen dependent kernels, one of which passes states from chunk to chunk: on one H100 the forward
# scan alone takes .3 ms for 1,024 tokens and for 4,096 (vllm pull request 27299).  Convolution, gate and norm with it,
# a pass; beside the traffic [fitted: hybrids on H100 and B200-class devices].
SCAN_S = 700e-6

# 8-bit GEMMs reach this share of their peak over that which bf16 ones reach of theirs, where a device has no figure of
# its own.  Sustained: ND H100 v5 .65-.70 of the fp8 peak for 8,192 cubed, 6 % below the plateau, against .70 in bf16
# (devices/h100-sxm.toml); bursts say .88 there and .98 on B200 (MAMF, `modelling` C1).  4-bit ones, over 8-bit ones,
# have no such measurement [fitted: 8 dense B200-class runs].
NARROW_GEMM_SHARE = {"hopper": 0.96, "blackwell": 0.98}
FP4_GEMM_SHARE = 0.80
NARROW_PEAK = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}
# Per element that enters a GEMM, an input or an output's gradient: read in bf16, written in 8 bits, and the transposed
# copy, which those of one scale do without on Blackwell (Transformer Engine, nvte_is_non_tn_fp8_gemm_supported).  In 4
# bits a pass for the tensor's largest value comes before, and the transposed copy is rotated (Hadamard) and read on its
# own (Transformer Engine, NVFP4BlockScaling).
CAST_BYTES = {"fp8": 4.0, "mxfp8": 4.0, "nvfp4": 7.0}
LARGEST_BYTES = 2.0  # read once more where the scale of 8 bits is that of the tensor itself (torchao, dynamic scaling)

# Rates on Hopper over FlashAttention 3 there, which the device's curve describes.  FlashAttention 2 and its kin, of
# instructions that Ampere has too: 1 / 2 to 1 / 1.5 in short benchmarks (arXiv:2407.08608), of which the curve's level
# is .83 as its kernel is throttled, theirs less [within .60 to .80 fitted: MPT and torchtitan runs].  cuDNN from 9.4 on
# is 1.7 times or more as fast as FlashAttention 2 in shapes of training (huggingface/transformers pull request 48163);
# it was 5-30 % slower before (release notes of cuDNN 9.4).
FLASH2_ON_HOPPER = 0.70
CUDNN_ON_HOPPER = 1.3
TRITON_ON_HOPPER = 0.66  # Triton before MLIR [fitted: MPT runs on H100], times its share below
FLASH_SHARE = {"flash1": 0.46, "triton": 0.58}  # of flash2: findings 3; MPT runs of 2023 with Triton's kernel
# Rate of the backward kernel over that of the forward kernel.  cuDNN 9.19 and 9.22 on H200, GB200 and GB300: .73-.86
# with heads of 128 from 4,096 tokens on, .67-.79 with latent ones of 4,096 and 8,192 (NVIDIA/cudnn-frontend 3929da2,
# benchmark/sdpa_benchmark_training/results).
FLASH_BACKWARD_SHARE = 0.80
FLASH_TILE = 128  # queries per thread block
# Time of attention that draws random numbers for dropout, over that without: 1.2 to 1.4 (FlashAttention 4 and cuDNN on
# GB200, Dao-AILab/flash-attention pull request 2597; arXiv:2410.07531 on GH100).
DROPOUT_ATTENTION_TIME = 1.3
# Time of attention in 8 bits, with the casts around it, over that in 16 bits [fitted: mixtures of experts in MXFP8 on
# B300, GB200 and GB300].  cuDNN's fp8 kernels alone, as above: .57-.63 with latent heads, .76-.92 with heads of 128.
NARROW_ATTENTION_TIME = 0.65
# Bytes moved per score element forward and backward together (findings 3): a fused softmax reads and writes 2 + 2
# forward and 2 + 2 + 2 backward.  What it keeps beyond 2 bytes (an fp32 output) is written, cast, and read once more.
FUSED_SOFTMAX_BYTES = 11.0
FUSED_SOFTMAX_PASSES = 3.0
# Dropout behind it is a kernel of its own: 2 read, 2 and a mask of 1 written; backward 2 and the mask read, 2 written.
SCORE_DROPOUT_BYTES = 10.0
UNALIGNED_HEAD_SHARE = 0.1  # batched GEMMs whose head_dim is no multiple of 8 leave the tensor cores (findings 6)

# Traffic of permuting tokens by capacity, with sorts, selections by index and scaled scatters, over that without drops
# [fitted: 7 runs of Megatron-Bridge 25.09 on B200, GB200 and H100].
DROPPING_PERMUTE = 3.0
EAGER_NORM_FACTOR = 5.7  # traffic of an eager fp32 RMSNorm over a fused one (findings 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Seconds of one block and micro-batch, by kind of kernel; backward without recomputation."""

    gemm_forward_s: Floats
    gemm_backward_s: Floats
    gemm_weight_s: Floats  # what the weight gradients take of it
    attention_forward_s: Floats
    attention_backward_s: Floats
    memory_forward_s: Floats
    memory_backward_s: Floats
    matrix_forward_s: dict[str, Floats]  # of the forward products, by the names of `arithmetic`

    @property
    def forward_s(self) -> Floats:
        """Seconds of all kernels of the forward pass."""
        return self.gemm_forward_s + self.attention_forward_s + self.memory_forward_s

    @property
    def backward_s(self) -> Floats:
        """Seconds of all kernels of the backward pass."""
        return self.gemm_backward_s + self.attention_backward_s + self.memory_backward_s

    @property
    def total_s(self) -> Floats:
        """Seconds of all kernels, both passes."""
        return self.forward_s + self.backward_s

    def scaled(self, forward: Floats, backward: Floats) -> KernelTimes:
        """The kernels of passes that take `forward` and `backward` times as long."""
        return KernelTimes(
            gemm_forward_s=forward * self.gemm_forward_s,
            gemm_backward_s=backward * self.gemm_backward_s,
            gemm_weight_s=backward * self.gemm_weight_s,
            attention_forward_s=forward * self.attention_forward_s,
            attention_backward_s=backward * self.attention_backward_s,
            memory_forward_s=forward * self.memory_forward_s,
            memory_backward_s=backward * self.memory_backward_s,
            matrix_forward_s={name: forward * value for name, value in self.matrix_forward_s.items()},
        )

    def take(self, which: Ints) -> KernelTimes:
        """Return the times of the plans at the given indices."""
        arrays = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        matrices = {name: value[which] for name, value in arrays.pop("matrix_forward_s").items()}
        return KernelTimes(matrix_forward_s=matrices, **{name: value[which] for name, value in arrays.items()})


def add_up(terms: Iterable[Floats]) -> Floats:
    """Sum of arrays in their order, so that a plan's sum does not depend on the batch that it stands in."""
    total: Floats = np.zeros(())
    for term in terms:
        total = total + term
    return total


def rank_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens of one micro-batch that a tensor-parallel group works on, after context parallelism."""
    return batch.micro_batch * problem.training.seq_len / batch.cp


def norm_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens that one rank normalises and routes: sequence parallelism divides them by tp."""
    return rank_tokens(problem, batch) / np.where(batch.sp, batch.tp, 1)


def memory_bound_s(problem: Problem, num_bytes: Floats) -> Floats:
    """Time to move `num_bytes` through device memory with a long stream."""
    device = problem.device
    return (
        num_bytes * problem.calibration.memory_bound / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    )


def wide_peak(problem: Problem) -> float:
    """Peak rate of products that nothing quantises, operations per second."""
    peak = peaks(problem)
    wide = peak.get("bf16", peak.get("fp16", 0.0))
    return peak.get("fp32", wide) if problem.training.precision == "fp32" else wide


def peaks(problem: Problem) -> dict[str, float]:
    """Peak rates of products by their type, operations per second: those of fp32 on TF32 units where they run there."""
    peak = {str(name): rate for name, rate in problem.device.peak_flops_per_s.items()}
    if problem.framework.kernels.tf32_products and "tf32" in peak:
        peak["fp32"] = peak["tf32"]
    return peak


def gemm_rate(problem: Problem, batch: PlanBatch) -> Floats:
    """Sustained rate of a large GEMM in the plan's precision, operations per second."""
    device, peak = problem.device, peaks(problem)
    wide = peak.get("bf16", peak.get("fp16", 0.0))
    narrow = device.narrow_gemm_efficiency or device.gemm_efficiency * NARROW_GEMM_SHARE.get(device.generation, 0.88)
    by_precision = []
    for precision in Precision:
        name = NARROW_PEAK.get(precision, precision)
        # Volta has no bf16 and Hopper no fp4: such a plan runs at the nearest precision that the device has.
        rate = peak.get(name, peak.get("fp8", wide) if name == "nvfp4" else wide)
        efficiency = narrow if name in NARROW_PEAK and rate > wide else device.gemm_efficiency
        by_precision.append(rate * efficiency * (FP4_GEMM_SHARE if name == "nvfp4" else 1.0))
    return np.array(by_precision)[batch.precision] / problem.calibration.gemm


def gemm_pace(problem: Problem, batch: PlanBatch, rate: Floats) -> Floats:
    """Speedup of large GEMMs at `rate` over those where nothing is quantised, at least 1."""
    return np.maximum(rate / gemm_rate(problem, batch.unquantised()), 1.0)


def gemm_s(
    problem: Problem,
    rate: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    *,
    pace: Floats | float = 1.0,
    slower: Floats | float = 1.0,
    accumulates: bool = False,
) -> Floats:
    """Time of one m x n x k GEMM at `rate` for large shapes; `accumulates` into an fp32 gradient buffer.

    Its kernel computes `slower` than that of rows of whole 16 bytes.
    """
    curve = problem.device.gemm
    element = problem.training.element_bytes
    moved = element * (m * k + k * n) + (8.0 if accumulates else element) * m * n
    computing = slower * 2.0 * m * n * k * curve.slowdown(m, n, k, pace) / rate
    return np.maximum(computing, memory_bound_s(problem, moved)) + curve.start_s * problem.calibration.gemm


def products_s(
    problem: Problem, batch: PlanBatch, rate: Floats, m: Floats, n: Floats, k: Floats, pace: Floats | float = 1.0
) -> tuple[Floats, ...]:
    """(forward, data gradient, weight gradient) of a matrix of k inputs and n outputs that m tokens meet."""
    slower = _narrow_rows_time(problem, n, k)
    references = (
        gemm_s(problem, rate, m, n, k, pace=pace, slower=slower),
        gemm_s(problem, rate, m, k, n, pace=pace, slower=slower),
        gemm_s(problem, rate, n, k, m, pace=pace, slower=slower, accumulates=True),
    )
    if problem.timings.is_empty:
        return references
    return passes_s([find_kernels(problem, batch, entry, m, n, k) for entry in PRODUCTS], references)


def _narrow_rows_time(problem: Problem, n: Floats, k: Floats) -> Floats | float:
    """Time of a product of a matrix of k inputs and n outputs over an aligned one's: all three have such rows."""
    element = problem.training.element_bytes
    if problem.device.vendor != "nvidia" or element != 2.0:
        return 1.0
    whole = ROW_BYTES / element
    if not (np.mod(n, whole).any() or np.mod(k, whole).any()):
        return 1.0
    is_odd = (np.mod(n, 2.0) > 0) | (np.mod(k, 2.0) > 0)
    is_narrow = (np.mod(n, whole) > 0) | (np.mod(k, whole) > 0)
    return np.where(is_odd, ODD_ROWS_TIME, np.where(is_narrow, NARROW_ROWS_TIME, 1.0))


def local_sizes(linear: Linear, batch: PlanBatch) -> tuple[Floats, Floats]:
    """(inputs, outputs) of the part of a matrix that one rank holds."""
    ones = np.ones(len(batch))
    if linear.split == "column":
        groups = np.minimum(batch.tp, linear.num_groups)
        own = linear.out_size - linear.grouped_out_size
        return linear.in_size * ones, own / batch.tp + linear.grouped_out_size / groups
    if linear.split == "row":
        return linear.in_size / batch.tp, linear.out_size * ones
    if linear.split == "expert_column":
        return linear.in_size * ones, linear.out_size / batch.etp
    if linear.split == "expert_row":
        return linear.in_size / batch.etp, linear.out_size * ones
    return linear.in_size * ones, linear.out_size * ones


def expert_tokens(problem: Problem, batch: PlanBatch) -> Floats:
    """Tokens that a local expert of the busiest rank receives from its expert-parallel group."""
    moe = problem.model.moe
    assert moe is not None
    routed = norm_tokens(problem, batch) * moe.experts_per_token * problem.training.expert_imbalance
    return routed * batch.ep * batch.etp / moe.num_experts


def _matrices_s(
    problem: Problem, batch: PlanBatch, linears: tuple[Linear, ...], rate: Floats
) -> dict[str, tuple[Floats, ...]]:
    """(forward, data gradient, weight gradient) of the matrices of a block by name: GEMMs of the same size.

    Those of experts are references.
    """
    pace = gemm_pace(problem, batch, rate)
    times: dict[str, tuple[Floats, ...]] = {}
    dense = [piece for linear in linears if not linear.is_expert for piece in _pieces(problem, linear)]
    if dense:
        sliced, whole = norm_tokens(problem, batch), rank_tokens(problem, batch)
        tokens = np.stack([sliced if linear.split == "replicated" else whole for linear in dense])
        inputs, outputs = (
            np.stack(sizes) for sizes in zip(*(local_sizes(entry, batch) for entry in dense), strict=True)
        )
        passes = products_s(problem, batch, rate, tokens, outputs, inputs, pace)
        for linear, *each in zip(dense, *passes, strict=True):
            known = times.get(linear.name)
            times[linear.name] = tuple(map(np.add, known, each)) if known else tuple(each)
    return times | {entry.name: _experts_s(problem, batch, entry, rate, pace) for entry in linears if entry.is_expert}


def _pieces(problem: Problem, linear: Linear) -> tuple[Linear, ...]:
    """The products that a framework makes of a matrix: one, or one for q, k, v, gate and up each."""
    if not problem.framework.kernels.separate_inputs:
        return (linear,)
    if linear.name == "qkv":
        shared = linear.grouped_out_size // 2
        own = replace(linear, out_size=linear.out_size - 2 * shared, grouped_out_size=0)
        part = replace(linear, out_size=shared, grouped_out_size=shared)
        return own, part, part
    if linear.name == "fc1" and problem.model.gated_mlp:
        half = replace(linear, out_size=linear.out_size // 2)
        return half, half
    return (linear,)


def _experts_s(problem: Problem, batch: PlanBatch, linear: Linear, rate: Floats, pace: Floats) -> tuple[Floats, ...]:
    """(forward, data gradient, weight gradient) of one matrix of all local experts, by the reference."""
    inputs, outputs = local_sizes(linear, batch)
    tokens = expert_tokens(problem, batch)
    num_local = linear.copies / batch.ep
    operations = 2.0 * tokens * inputs * outputs * num_local
    curve = problem.device.gemm
    shape = (1 + curve.half_n / outputs) * (1 + curve.half_k * pace / inputs)
    per_byte = memory_bound_s(problem, num_local * inputs * outputs)
    weights = problem.training.element_bytes * per_byte
    start_s = curve.start_s * problem.calibration.gemm
    forward = np.maximum(operations * shape * (1 + GROUPED_HALF_M / tokens) / (rate * GROUPED_SHARE), weights)
    wgrad = operations * shape * (1 + GROUPED_WGRAD_HALF_M / tokens) / (rate * GROUPED_WGRAD_SHARE)
    return forward + start_s, forward + start_s, np.maximum(wgrad, 8.0 * per_byte) + start_s


def _attention_s(problem: Problem, batch: PlanBatch, block: Block) -> tuple[Floats, ...]:
    """(forward, backward) of the attention core on one rank."""
    model, training, device = problem.model, problem.training, problem.device
    peak = wide_peak(problem)
    tokens, heads = rank_tokens(problem, batch), model.num_heads / batch.tp
    widths = model.qk_head_dim + model.v_head_dim
    elsewhere = np.where(batch.cp_kind == ContextParallelKind.RING.code, (batch.cp - 1) / batch.cp, 0.0)
    factor = problem.calibration.attention * (1.0 + (problem.framework.kernels.ring_attention_factor - 1.0) * elsewhere)
    if not problem.fuses_attention:
        scores = tokens * heads * training.seq_len  # the whole square: an unfused softmax masks, it does not skip
        rate = peak * device.gemm_efficiency * (UNALIGNED_HEAD_SHARE if model.qk_head_dim % 8 else 1.0)
        # Scores are products over the head dimension, outputs are as wide as it.
        narrow = (1 + device.gemm.half_k / model.qk_head_dim) * (1 + device.gemm.half_n / model.v_head_dim)
        products = 2.0 * scores * widths * narrow
        fused = training.attention == "megatron-fused"
        wide = FUSED_SOFTMAX_PASSES * (problem.framework.memory.bytes_per_fused_score - 2.0)
        dropped = SCORE_DROPOUT_BYTES if has_dropout(problem) else 0.0
        moved = FUSED_SOFTMAX_BYTES + wide + dropped if fused else problem.framework.kernels.bytes_per_unfused_score
        softmax = memory_bound_s(problem, moved / 3 * scores)  # a third of it is forward
        forward = factor * products / rate + softmax
        return forward, 2.0 * forward
    if has_dropout(problem):
        factor = factor * DROPOUT_ATTENTION_TIME
    eight_bits: Floats = np.where(_narrows_attention(problem, batch), NARROW_ATTENTION_TIME, 1.0)
    curve = device.attention
    kernel = problem.framework.kernels.flash_kernel if training.attention == "flash" else training.attention
    efficiency = curve.efficiency * FLASH_SHARE.get(kernel, 1.0)
    if kernel != "flash" and device.generation == "hopper":
        efficiency *= {"cudnn": CUDNN_ON_HOPPER, "triton": TRITON_ON_HOPPER}.get(kernel, FLASH2_ON_HOPPER)
    # One thread block per head and FLASH_TILE queries: too few of them leave compute units idle.
    blocks_per_unit = heads * tokens / FLASH_TILE / device.compute_units
    operations = 2.0 * tokens * heads * attention_context(model, block, training.seq_len) * widths
    slowdown = curve.slowdown(training.seq_len, blocks_per_unit, model.qk_head_dim)
    forward = factor * eight_bits * operations * slowdown / (peak * efficiency)
    start_s = factor * eight_bits * curve.start_s
    references = (forward + start_s, forward * 2.5 / FLASH_BACKWARD_SHARE + start_s)
    if problem.timings.is_empty:
        return references
    return _measured_attention_s(problem, batch, block, efficiency / (curve.efficiency * eight_bits), references)


def _narrows_attention(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans run the core of the attention in 8 bits."""
    precisions = problem.framework.experts.narrow_attention if problem.model.moe else ()
    return np.isin(batch.precision, [Precision(precision).code for precision in precisions])


def _measured_attention_s(
    problem: Problem, batch: PlanBatch, block: Block, share: Floats, references: tuple[Floats, Floats]
) -> tuple[Floats, ...]:
    """(forward, backward) by the table, whose kernel is this one or the device's best, of whose rate it has `share`.

    All-to-all context parallelism divides the heads, a ring the queries of a whole sequence.
    """
    model, seq_len = problem.model, problem.training.seq_len
    is_ring = batch.cp_kind == ContextParallelKind.RING.code
    split = batch.tp * np.where(is_ring, 1, batch.cp)
    is_windowed = block is Block.WINDOW_ATTENTION and model.window and model.window < seq_len
    window = model.window if is_windowed else 0
    heads, kv_heads = model.num_heads / split, np.maximum(model.kv_heads / split, 1.0)
    width = float(model.qk_head_dim)
    passes: tuple[Operation, ...] = ("attention", "attention_backward")
    shape: tuple[Floats | Ints | float, ...] = (heads, kv_heads, width, float(window or 0))
    if model.qk_head_dim != model.v_head_dim:
        if window:
            return references
        passes, shape = ("latent_attention", "latent_attention_backward"), (heads, width, float(model.v_head_dim))
    part = 1.0 / np.where(is_ring, batch.cp, 1) / (1.0 if problem.timings.is_own else share)
    wide = batch.unquantised()  # whatever the precision of the matrices: the tables know no narrower one
    sizes = (batch.micro_batch, float(seq_len), *shape)
    return passes_s([find_kernels(problem, wide, entry, *sizes).scaled(part) for entry in passes], references)


def _traffic_bytes(problem: Problem, batch: PlanBatch, block: Block) -> dict[str, tuple[Floats, Floats]]:
    """(forward, backward) bytes that the memory-bound operations of a block move on one rank (`modelling` C5).

    Counted in 16 bits, and twice as many in fp32.
    """
    model, framework = problem.model, problem.framework
    hidden, tokens, sliced = model.hidden_size, rank_tokens(problem, batch), norm_tokens(problem, batch)
    norm = sliced * hidden * model.norms_per_block * _norm_traffic(problem)
    residual = sliced * hidden * (6.0 + (3.0 if has_dropout(problem) else 0.0))
    moved = {"norm": (4.0 * norm, 8.0 * norm), "residual": (residual, residual)}
    if block in (Block.ATTENTION, Block.WINDOW_ATTENTION):
        if model.position_embedding == "rope":
            roped = 4.0 * tokens * _roped_heads(problem, batch) * model.qk_head_dim
            moved["rope"] = (roped, roped)
        if model.attention_output_gate:
            gated = tokens * model.num_heads * model.qk_head_dim / batch.tp
            moved["output_gate"] = (6.0 * gated, 10.0 * gated)  # gate and output in, product out; as much and both back
    elif block in RECURRENT_BLOCKS:
        scan = tokens * _scanned_width(model, block) / batch.tp
        # Convolution, gate, time steps, chunk states and their normalisation, each read and written [fitted: hybrids].
        moved["scan"] = (36.0 * scan, 88.0 * scan)
    else:
        read, backward_read = _activation_bytes(problem)
        width = tokens * _ffn_size(problem, block) / batch.tp
        moved["activation"] = (read * width, backward_read * width)
        if block is Block.MOE and model.moe:
            moe = model.moe
            width = sliced * moe.experts_per_token * moe.expert_ffn_size
            moved["expert_activation"] = (read * width, backward_read * width)
            permute = 4.0 * sliced * moe.experts_per_token * (moe.latent_size or hidden)  # in and out, both ways
            moved["permute"] = (2 * permute, 2 * permute)
    pieces = max((len(_pieces(problem, entry)) for entry in block_shapes(model)[block].linears), default=1)
    if pieces > 1:  # each has a gradient of the block's whole input, and they are added up
        moved["input_gradients"] = (0.0 * tokens, 2.0 * (pieces + 1) * tokens * hidden)
    factors: dict[str, Floats | float] = dict.fromkeys(moved, framework.kernels.kernel_bytes_factor)
    if "permute" in factors:
        # In a kernel of the dispatcher, or in several.
        factors["permute"] = np.where(sends_tokens_once(problem, batch), 1.0, framework.kernels.kernel_bytes_factor)
        if framework.experts.drops_tokens:
            factors["permute"] = factors["permute"] * DROPPING_PERMUTE
    wider = problem.training.element_bytes / 2.0
    return {
        name: (forward * factors[name] * wider, backward * factors[name] * wider)
        for name, (forward, backward) in moved.items()
    }


def sends_tokens_once(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans send a token to another rank or node once, however many experts it visits there.

    One kernel then brings it into the order of its experts, or back.  Tokens are dropped with the all-to-all alone.
    """
    sends_once = batch.dispatcher != Dispatcher.ALL_TO_ALL.code
    return sends_once & (not problem.framework.experts.drops_tokens)


def has_dropout(problem: Problem) -> bool:
    """Return whether hidden states and attention scores are dropped at random."""
    is_gpt = problem.model.position_embedding == "learned"
    return problem.framework.kernels.dropout or (problem.framework.kernels.gpt_dropout and is_gpt)


def _activation_bytes(problem: Problem) -> tuple[float, float]:
    """(forward, backward) bytes that an MLP's activation moves per token and element of its width."""
    if problem.model.gated_mlp:
        return 6.0, 10.0
    if problem.model.squared_relu and not problem.framework.kernels.fused_squared_relu:
        return 8.0, 20.0  # backward a copy, its double, that times the gradient, and the threshold
    return 4.0, 6.0


def _norm_traffic(problem: Problem) -> float:
    """Memory traffic of a norm over that of a fused one; a layer norm is one kernel everywhere, an RMSNorm of parts."""
    if problem.model.norm == "layernorm":
        return 1.0
    fused = problem.framework.kernels.fused_norm if problem.training.fused_norm is None else problem.training.fused_norm
    return 1.0 if fused else EAGER_NORM_FACTOR


def _scanned_width(model: ModelSpec, block: Block) -> int:
    """Width of what a recurrent block writes and of what addresses its state: inner and state, or values and keys."""
    if block is Block.MAMBA and model.mamba:
        return model.mamba.num_heads * model.mamba.head_dim + model.mamba.num_groups * model.mamba.state_size
    assert model.linear_attention is not None
    return model.linear_attention.value_width + model.linear_attention.key_width


def _roped_heads(problem: Problem, batch: PlanBatch) -> Floats:
    """Heads of queries and keys on one rank."""
    model = problem.model
    return model.num_heads / batch.tp + model.kv_heads / np.minimum(batch.tp, model.kv_heads)


def _ffn_size(problem: Problem, block: Block) -> int:
    """Width of a block's MLP, of experts the shared one's."""
    model = problem.model
    return model.moe.shared_expert_ffn_size if block is Block.MOE and model.moe else model.ffn_size


def _measured_beyond_s(
    problem: Problem, batch: PlanBatch, block: Block, moved: dict[str, tuple[Floats, Floats]]
) -> tuple[Floats, Floats]:
    """(forward, backward) time of the memory-bound kernels that were measured beyond that of their references.

    The table's kernels are the framework's own, or fused ones, than which its own take longer as they move more.  With
    its traffic a measured kernel brings its own start, of which there are twice as many backward.
    """
    model, is_own = problem.model, problem.timings.is_own
    factor = 1.0 if is_own else problem.framework.kernels.kernel_bytes_factor
    start_s = KERNEL_START_S * problem.calibration.memory_bound
    forward, backward = np.zeros(len(batch)), np.zeros(len(batch))

    def references(name: str, count: int = 1) -> tuple[Floats, Floats]:
        first, second = (memory_bound_s(problem, num_bytes / count) for num_bytes in moved[name])
        return first + start_s, second + 2 * start_s

    tokens, wide = rank_tokens(problem, batch), batch.unquantised()
    norm = (norm_tokens(problem, batch), float(model.hidden_size))
    activation = (tokens, _ffn_size(problem, block) / batch.tp)
    kinds: list[tuple[str, int, float, tuple[Operation, Operation], tuple[Floats, Floats | float]]] = [
        ("norm", model.norms_per_block, 1.0 if is_own else _norm_traffic(problem), ("norm", "norm_backward"), norm)
    ]
    if model.gated_mlp and "activation" in moved and _ffn_size(problem, block):
        kinds.append(("activation", 1, 1.0, ("swiglu", "swiglu_backward"), activation))
    for name, count, heavier, passes, shape in kinds:
        known = references(name, count)
        found = [find_kernels(problem, wide, entry, *shape).scaled(factor * heavier) for entry in passes]
        times = passes_s(found, known)
        forward, backward = forward + count * (times[0] - known[0]), backward + count * (times[1] - known[1])
    if "rope" in moved and model.mla is None:
        both = add_up(references("rope"))
        found_both = find_kernels(problem, wide, "rope", tokens, _roped_heads(problem, batch), float(model.qk_head_dim))
        half = (found_both.scaled(factor).otherwise(both) - both) / 2
        forward, backward = forward + half, backward + half
    return forward, backward


def _measured_experts(problem: Problem, batch: PlanBatch, references: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Ratios of the times of routed experts to their references, forward and backward."""
    model, moe = problem.model, problem.model.moe
    assert moe is not None
    if not model.gated_mlp:
        return np.ones(len(batch)), np.ones(len(batch))
    # All ranks of an expert group bring their tokens; the busiest of them decides.
    tokens = norm_tokens(problem, batch) * batch.ep * batch.etp * problem.training.expert_imbalance
    width = (float(moe.latent_size or model.hidden_size), float(moe.expert_ffn_size))
    shape = (tokens, *width, float(moe.experts_per_token), float(moe.num_experts), batch.etp, batch.ep)
    passes: tuple[Operation, ...] = ("experts", "experts_backward")
    forward, backward = passes_s([find_kernels(problem, batch, entry, *shape) for entry in passes], references)
    return forward / references[0], backward / references[1]


def _cast_bytes(shape: BlockShape, problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """(forward, backward) bytes moved to quantise the inputs of narrow GEMMs; zero for 16-bit plans."""
    framework, is_fp8 = problem.framework, batch.precision == Precision.FP8.code
    moved = np.array([CAST_BYTES.get(precision, 0.0) for precision in Precision])[batch.precision]
    moved = moved + LARGEST_BYTES * (is_fp8 & framework.kernels.scales_by_own_largest)
    # Blackwell's products take matrices of 8 bits as they lie.
    copies = is_fp8 & (problem.device.generation != "blackwell")
    moved = moved - (is_fp8 & ~copies)
    # What is gathered as quantised was so in slices; its transposed copy is made of the whole.
    in_slices = is_fp8 & batch.sp & framework.network.narrow_tp_gathers
    of_slices = np.where(in_slices, (moved - copies) / batch.tp + 2.0 * copies, moved)
    forward = backward = np.zeros(len(batch))
    for linear in shape.linears:
        inputs, outputs = local_sizes(linear, batch)
        tokens = rank_tokens(problem, batch)
        if linear.is_expert:
            tokens = expert_tokens(problem, batch) * linear.copies / batch.ep
        forward = forward + inputs * tokens * (of_slices if linear.split == "column" else moved)
        backward = backward + outputs * tokens * (of_slices if linear.split == "row" else moved)
    return forward, backward


def kernel_times(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> KernelTimes:
    """Time of the kernels of one block for one micro-batch on one rank; of a plan, `KERNEL_AXES` decide alone."""
    rate = gemm_rate(problem, batch)
    zeros = np.zeros(len(batch))
    matrices = _matrices_s(problem, batch, shape.linears, rate)
    attention: tuple[Floats, ...] = (zeros, zeros)
    if block in (Block.ATTENTION, Block.WINDOW_ATTENTION):
        attention = _attention_s(problem, batch, block)
    if block in RECURRENT_BLOCKS:
        per_token = (
            mamba_scan_flops_per_token(problem.model)
            if block is Block.MAMBA
            else linear_attention_flops_per_token(problem.model, DELTA_CHUNK_TOKENS)
        )
        scan = per_token * rank_tokens(problem, batch) / batch.tp
        # The chunked scan alternates short products, never quantised, with memory-bound steps: a quarter of a GEMM's
        # rate [judged].
        scan_s = scan / (0.25 * gemm_rate(problem, batch.unquantised()))
        attention = (scan_s, 2.5 * scan_s)
    starts = ROUTING_S if block is Block.MOE else SCAN_S if block in RECURRENT_BLOCKS else 0.0
    start_forward = (starts + KERNELS_FORWARD * KERNEL_START_S) * problem.calibration.memory_bound
    start_backward = (starts + KERNELS_BACKWARD * KERNEL_START_S) * problem.calibration.memory_bound
    moved = _traffic_bytes(problem, batch, block)
    cast = _cast_bytes(shape, problem, batch)
    memory_forward = memory_bound_s(problem, add_up(forward for forward, _ in moved.values()) + cast[0]) + start_forward
    memory_backward = memory_bound_s(problem, add_up(back for _, back in moved.values()) + cast[1]) + start_backward
    if not problem.timings.is_empty:
        beyond = _measured_beyond_s(problem, batch, block, moved)
        memory_forward, memory_backward = memory_forward + beyond[0], memory_backward + beyond[1]
        if block is Block.MOE:
            # Two matrices and the activation between them were measured as one.
            own = [linear.name for linear in shape.linears if linear.is_expert]
            activation = [memory_bound_s(problem, num_bytes) for num_bytes in moved["expert_activation"]]
            sums = [add_up(matrices[name][at] for name in own) for at in range(3)]
            whole = (sums[0] + activation[0], sums[1] + sums[2] + activation[1])
            longer = _measured_experts(problem, batch, whole)
            for name in own:
                once, data, weight = matrices[name]
                matrices[name] = (once * longer[0], data * longer[1], weight * longer[1])
            memory_forward = memory_forward + (longer[0] - 1) * activation[0]
            memory_backward = memory_backward + (longer[1] - 1) * activation[1]
    forward, data, weight = (add_up(times[at] for times in matrices.values()) for at in range(3))
    return KernelTimes(
        gemm_forward_s=forward,
        gemm_backward_s=data + weight,
        gemm_weight_s=weight,
        attention_forward_s=attention[0],
        attention_backward_s=attention[1],
        memory_forward_s=memory_forward,
        memory_backward_s=memory_backward,
        matrix_forward_s={name: times[0] for name, times in matrices.items()},
    )


def padded_vocab(problem: Problem, batch: PlanBatch) -> Floats:
    """Rows of the vocabulary after padding to a multiple of `pads_vocab_to` x tp."""
    multiple = problem.framework.memory.pads_vocab_to * batch.tp
    return np.ceil(problem.model.vocab_size / multiple) * multiple


def head_s(problem: Problem, batch: PlanBatch) -> tuple[Pass, Floats]:
    """(both passes, weight gradients in them) of final norm, logits and cross entropy, on the last stage.

    For one micro-batch; of a plan, `KERNEL_AXES` decide alone.
    """
    model, framework = problem.model, problem.framework
    wide = batch.unquantised()  # frameworks do not quantise the head
    rate, tokens, depths = gemm_rate(problem, wide), rank_tokens(problem, batch), model.num_mtp_layers
    hidden, columns = np.full(len(batch), 1.0 * model.hidden_size), padded_vocab(problem, batch) / batch.tp
    once, data, weight = products_s(problem, wide, rate, tokens, columns, hidden)
    # A loss that is not vocabulary-parallel works on gathered logits.
    logits = columns if framework.memory.shards_logits else padded_vocab(problem, batch)
    # Cross entropy reads and writes the logits about as often as their peak copies weigh (`modelling` C5).
    moved = (framework.kernels.bytes_moved_per_logit or 1.25 * framework.memory.bytes_per_logit) * (tokens * logits)
    loss = memory_bound_s(problem, moved)
    if not problem.timings.is_empty:
        loss = find_kernels(problem, wide, "cross_entropy", tokens, logits).otherwise(2 * loss) / 2
    longer = head_factor(problem, wide, (tokens, hidden, padded_vocab(problem, batch)), once + data + weight + 2 * loss)
    once, data, weight, loss = longer * once, longer * data, longer * weight, longer * loss
    # Every prediction depth runs the head once more, after a projection of the hidden state beside the next embedding.
    forward, backward = (1 + depths) * (once + loss), (1 + depths) * (data + weight + loss)
    if depths:
        joined = products_s(problem, wide, rate, tokens, hidden / batch.tp, 2.0 * hidden)
        forward, backward = forward + depths * joined[0], backward + depths * (joined[1] + joined[2])
    return Pass(forward_s=forward, backward_s=backward), (1 + depths) * weight
