"""Times of operations that mix the tokens of a sequence: the attention core (`modelling` C3) and recurrent scans.

Arrays have one element per plan; times are seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.kernels.arithmetic import (
    DELTA_CHUNK_TOKENS,
    attention_context,
    encoder_positions,
    linear_attention_flops_per_token,
    mamba_scan_flops_per_token,
)
from autoplan.cost.kernels.measured import find_kernels, measured_pass
from autoplan.cost.kernels.memory_bound import memory_bound_s
from autoplan.cost.kernels.products import gemm_rate, wide_peak
from autoplan.cost.kernels.sequences import attended_len, tokens_per_sample
from autoplan.cost.kernels.sizes import rank_tokens
from autoplan.cost.passes import Pass
from autoplan.spec.blocks import Block
from autoplan.spec.enums import AttentionKernel, members
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import Operation
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Rates on Hopper relative to FlashAttention 3, which the device's curve describes.  FlashAttention 2 and other kernels
# limited to Ampere's instructions reach 1 / 2 to 1 / 1.5 of it in short benchmarks (arXiv:2407.08608); the curve's
# level is .83 of the benchmarks', as its kernel is throttled, and theirs are throttled less [within .60 to .80 fitted:
# MPT and torchtitan runs]. cuDNN from 9.4 on is at least 1.7 times as fast as FlashAttention 2 for training shapes
# (huggingface/transformers pull request 48163); it was 5-30 % slower before (release notes of cuDNN 9.4).
FLASH2_ON_HOPPER = 0.70
CUDNN_ON_HOPPER = 1.3
TRITON_ON_HOPPER = 0.66  # Triton before MLIR [fitted: MPT runs on H100], times its share below
# FLOP/s of FlashAttention 2 on a compute unit of Blackwell at most, whose curves describe cuDNN: 352 to 362 TFLOP/s
# forward on the 148 units of a B200 with heads of 128 and 2,048 to 8,192 tokens (meta-pytorch/tritonbench pull request
# 171; Dao-AILab/flash-attention issue 1589 has 307 to 381 with heads of 64).
FLASH2_FLOPS_PER_UNIT = 2.4e12
# Rates relative to flash2: findings 3, and MPT runs of 2023 with Triton's kernel.  AOTriton's is relative to AITER's
# kernels, which AMD's curves describe: .38 to .63 on MI355X, causal with grouped heads of 128 and 2,048 to 16,384
# tokens (HazyResearch/HipKittens f09e968, analysis/attn/fwd), .62 to .85 on MI300X
# (midiareshadi.github.io/blog/attn-dsl-bench) [judged between].  Torch's memory-efficient kernel: 33.9 to 36.4 TFLOP/s
# where FlashAttention 2 has 76.4 to 84.4 (NVIDIA/TileGym pull request 49).  FlexAttention: .90 forward and .85 backward
# on A100 (PyTorch's post of 2024-08).
FLASH_SHARE = {"flash1": 0.46, "triton": 0.58, "aotriton": 0.65, "efficient": 0.43, "flex": 0.87}
# Rate of FlexAttention's Triton kernels on Blackwell relative to cuDNN: FlashAttention 4, at most 1.3 times as fast as
# cuDNN 9.13, is 1.6 to 3.2 times as fast forward and 1.85 to 2.3 times backward (PyTorch's post on GB200, 2026-03).
FLEX_ON_BLACKWELL = 0.5
# Rate of the backward kernel relative to the forward kernel.  cuDNN 9.19 and 9.22 on H200, GB200 and GB300: .73-.86
# with heads of 128 from 4,096 tokens on, .67-.79 with latent ones of 4,096 and 8,192 (NVIDIA/cudnn-frontend 3929da2,
# benchmark/sdpa_benchmark_training/results).
FLASH_BACKWARD_SHARE = 0.80
# The same of AOTriton: .29 to .36 from 4,096 tokens on, 143 to 259 TFLOP/s on MI355X where Composable Kernel has 456 to
# 541 (HipKittens, analysis/attn/bkwd/plot.py).
AOTRITON_BACKWARD_SHARE = 0.33
FLASH_TILE = 128  # queries per thread block
# Head widths with FlashAttention kernels; other heads use the next wider kernel, padded with zeros
# (Dao-AILab/flash-attention v1.0.9, csrc/flash_attn/fmha_api.cpp; v2.8.3, csrc/flash_attn/src/static_switch.h).
FLASH_HEAD_DIMS: dict[str, tuple[int, ...]] = {
    "flash1": (32, 64, 128),
    "flash2": (32, 64, 96, 128, 192, 256),
    "flash": (32, 64, 96, 128, 192, 256),
    "flash3": (64, 96, 128, 192, 256),
    "aotriton": (16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256),  # pytorch/pytorch pull request 148433
}
# Time of attention with dropout, which draws random numbers, relative to attention without: 1.2 to 1.4 (FlashAttention
# 4 and cuDNN on GB200, Dao-AILab/flash-attention pull request 2597; arXiv:2410.07531 on GH100).
DROPOUT_ATTENTION_TIME = 1.3
# Time of attention in 8 bits, including its casts, relative to 16 bits [fitted: mixtures of experts in MXFP8 on
# B300, GB200 and GB300].  cuDNN's fp8 kernels alone, as above: .57-.63 with latent heads, .76-.92 with heads of 128.
NARROW_ATTENTION_TIME = 0.65
# 8-bit kernels skip positions outside of a window only in the forward pass: with a window of 128 and heads of
# 64, backward 1.7, 6.2, 23 and 90 ms for 4,096 to 32,768 positions on GB200, .47 to 3.7 ms in 16 bits (as above,
# results/gpt_oss).  Within a window a query has as few key blocks as in a short sequence: 161 and 182 TFLOP/s forward
# and backward there, 570 and 620 with a window of 1,024.
# Bytes moved per score element forward and backward together (findings 3): a fused softmax reads and writes 2 + 2
# forward and 2 + 2 + 2 backward.  Anything kept beyond 2 bytes (an fp32 output) is written, cast, and read once more.
FUSED_SOFTMAX_BYTES = 11.0
FUSED_SOFTMAX_PASSES = 3.0
# Dropout after it is a separate kernel: 2 read, 2 and a 1-byte mask written; backward 2 and the mask read, 2 written.
SCORE_DROPOUT_BYTES = 10.0
UNALIGNED_HEAD_SHARE = 0.1  # batched GEMMs whose head_dim is no multiple of 8 leave the tensor cores (findings 6)


def attention_s(problem: Problem, batch: PlanBatch, block: Block) -> Pass:
    """Time of the attention core on one rank."""
    kernels, kernel_of = np.unique(batch.attention, return_inverse=True)
    if len(kernels) <= 1:
        code = int(kernels[0]) if len(kernels) else AttentionKernel.FLASH.code
        return _core_s(problem, batch, block, members(AttentionKernel)[code])
    result = Pass(np.empty(len(batch)), np.empty(len(batch)))
    for at, code in enumerate(kernels):
        rows = np.flatnonzero(kernel_of == at)
        times = _core_s(problem, batch.take(rows), block, members(AttentionKernel)[int(code)])
        result.forward_s[rows], result.backward_s[rows] = times.forward_s, times.backward_s
    return result


def _core_s(problem: Problem, batch: PlanBatch, block: Block, chosen: AttentionKernel) -> Pass:
    parts = batch.cp // batch.cp_inner
    elsewhere = (parts - 1) / parts
    factor = (
        problem.model.attention_streams
        * problem.calibration.attention
        * (1.0 + (problem.framework.kernels.ring_attention_factor - 1.0) * elsewhere)
    )
    if problem.stores_scores(chosen):
        return _unfused_s(problem, batch, block, factor, is_fused=chosen is AttentionKernel.MEGATRON_FUSED)
    model, training, device = problem.model, problem.training, problem.device
    tokens, heads = rank_tokens(problem, batch), model.num_heads / batch.tp
    factor = factor * np.where(batch.dropout, DROPOUT_ATTENTION_TIME, 1.0)
    eight_bits: Floats = np.where(_narrows_attention(problem, batch), NARROW_ATTENTION_TIME, 1.0)
    curve = device.attention
    kernel = _flash_kernel(problem) if chosen is AttentionKernel.FLASH else str(chosen)
    if kernel == "flex" and device.vendor == "amd":  # of Triton, too
        kernel = "aotriton"
    backward_share = AOTRITON_BACKWARD_SHARE if kernel == "aotriton" else FLASH_BACKWARD_SHARE
    efficiency = curve.efficiency * FLASH_SHARE.get(kernel, 1.0)
    if kernel != "flash" and device.generation == "hopper":
        on_hopper = {"flash3": 1.0, "cudnn": CUDNN_ON_HOPPER, "triton": TRITON_ON_HOPPER}
        efficiency *= on_hopper.get(kernel, FLASH2_ON_HOPPER)
    # One thread block per head and FLASH_TILE queries; too few thread blocks leave compute units idle.
    blocks_per_unit = heads * tokens / FLASH_TILE / device.compute_units
    head_dim, widths = _kernel_widths(model, kernel)
    if kernel == "flex" and device.generation == "blackwell":
        efficiency = curve.efficiency * FLEX_ON_BLACKWELL
    if kernel in ("flash2", "efficient") and device.generation == "blackwell":  # they lose nothing with narrower heads
        most = FLASH_SHARE.get(kernel, 1.0) * FLASH2_FLOPS_PER_UNIT * device.compute_units / wide_peak(problem)
        efficiency = min(efficiency, most * curve.slowdown(np.inf, np.full(1, np.inf), head_dim).item())
    seen_len = attended_len(training, batch.micro_batch)
    per_context_s = factor * eight_bits * 2.0 * tokens * heads * widths / (wide_peak(problem) * efficiency)

    def square_s(attending: Block) -> Floats:
        """Time of the products for scores and outputs."""
        context = attention_context(model, attending, seen_len)
        # Number of positions that the last query of a sequence attends to.
        row_len: Floats | float = 0.0 if attending is Block.CROSS_ATTENTION else seen_len
        if attending is Block.WINDOW_ATTENTION and model.window:
            row_len = np.minimum(np.float64(model.window), seen_len)
        row_len = row_len + encoder_positions(model, attending, seen_len)
        slowdown = curve.slowdown(row_len, blocks_per_unit, head_dim)
        return per_context_s * context * slowdown

    forward = square_s(block)
    visited = forward
    if block is Block.WINDOW_ATTENTION and batch.fp8_attention.any():
        visited = np.where(_narrows_attention(problem, batch), square_s(Block.ATTENTION), forward)
    start_s = factor * eight_bits * curve.start_s
    reference = Pass(forward + start_s, visited * 2.5 / backward_share + start_s)
    if problem.timings.is_empty or model.bidirectional or model.reads_encoder(block):  # tables are of causal ones
        return reference
    return _measured_s(problem, batch, block, efficiency / (curve.efficiency * eight_bits), reference)


def _flash_kernel(problem: Problem) -> str:
    """Return the kernel that a framework takes for fused attention.

    torch's own kernel is FlashAttention 2 where values are as wide as keys (torchtitan pull request 1610), and on
    Blackwell cuDNN's, which it prefers there and on Hopper from cuDNN 9.15 on (pytorch v2.14.1, sdp_utils.cpp); earlier
    builds, as those of the published runs on Hopper, do not.  On AMD its AOTriton dispatches to AITER's kernels, the
    best there, if queries have as many heads as keys (torch from 2.9 on), and to Triton's for grouped heads
    (ROCm/aotriton 30ae967, modules/flash/csrc/aiter_bwd.cc and aiter_fwd.cc).
    """
    kernel = problem.framework.kernels.flash_kernel
    if kernel != "sdpa":
        return kernel
    if problem.device.vendor == "nvidia" and problem.model.qk_head_dim != problem.model.v_head_dim:
        return "efficient"
    if problem.device.vendor != "amd":
        return "cudnn" if problem.device.generation == "blackwell" else "flash2"
    return "aotriton" if problem.model.kv_heads < problem.model.num_heads else "flash"


def _kernel_widths(model: ModelSpec, kernel: str) -> tuple[int, int]:
    """Return the head width of the kernel, and the model's width of query and value together, in elements."""
    width = model.qk_head_dim
    if width != model.v_head_dim:  # latent attention has kernels with its exact widths, Triton's of powers of 2
        widths = (2 ** math.ceil(math.log2(part)) if kernel == "flex" else part for part in (width, model.v_head_dim))
        return width, sum(widths)
    padded = next((supported for supported in FLASH_HEAD_DIMS.get(kernel, ()) if supported >= width), width)
    return padded, 2 * padded


def _unfused_s(problem: Problem, batch: PlanBatch, block: Block, factor: Floats, *, is_fused: bool) -> Pass:
    """Time of attention that stores its scores; its products take `factor` times their reference times."""
    model, training, device = problem.model, problem.training, problem.device
    tokens, heads = rank_tokens(problem, batch), model.num_heads / batch.tp
    # The whole square, as an unfused softmax masks positions, and other images, instead of skipping them.
    seen_len: Floats | float = attended_len(replace(training, document_len=None), batch.micro_batch)
    own_len = 0.0 if block is Block.CROSS_ATTENTION else seen_len
    scores = tokens * heads * (own_len + encoder_positions(model, block, seen_len))
    rate = wide_peak(problem) * device.gemm_efficiency * (UNALIGNED_HEAD_SHARE if model.qk_head_dim % 8 else 1.0)
    # The head dimension is summed over for the scores, and is the width of the outputs.
    narrow = (1 + device.gemm.half_k / model.qk_head_dim) * (1 + device.gemm.half_n / model.v_head_dim)
    products = 2.0 * scores * (model.qk_head_dim + model.v_head_dim) * narrow
    moved: Floats | float = problem.framework.kernels.bytes_per_unfused_score
    if is_fused:
        wide = FUSED_SOFTMAX_PASSES * (problem.framework.memory.bytes_per_fused_score - 2.0)
        moved = FUSED_SOFTMAX_BYTES + wide + np.where(batch.dropout, SCORE_DROPOUT_BYTES, 0.0)
    softmax = memory_bound_s(problem, moved / 3 * scores)  # a third of it is forward
    forward = factor * products / rate + softmax
    return Pass(forward, 2.0 * forward)


def _narrows_attention(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans run the attention core in 8 bits and become faster: those on Blackwell.

    On Hopper MLPerf's Llama-2-70B LoRA with fp8_dot_product_attention (training_results_v4.0) takes as long as in 16
    bits; no run shows it for other devices.
    """
    return batch.fp8_attention & (problem.device.generation == "blackwell")


def _measured_s(problem: Problem, batch: PlanBatch, block: Block, share: Floats, reference: Pass) -> Pass:
    """Time from the measured table; `share` is the rate of the plan's kernel relative to the device's best one.

    All-to-alls of context parallelism split the heads, a ring splits the queries of a whole sequence.
    """
    model, training = problem.model, problem.training
    seq_len = attended_len(training, batch.micro_batch)
    sequences: Floats | Ints = batch.micro_batch
    if training.document_len is not None or training.lengths is not None or training.preference is not None:
        sequences = batch.micro_batch * tokens_per_sample(training, batch.micro_batch) / seq_len
    split = batch.tp * batch.cp_inner
    windows = np.where(np.less(model.window or 0, seq_len), model.window or 0, 0)
    window = windows if block is Block.WINDOW_ATTENTION else np.zeros(())
    heads, kv_heads = model.num_heads / split, np.maximum(model.kv_heads / split, 1.0)
    width = float(model.qk_head_dim)
    passes: tuple[Operation, ...] = ("attention", "attention_backward")
    shape: tuple[Floats | Ints | float, ...] = (heads, kv_heads, width, window.astype(np.float64))
    if model.qk_head_dim != model.v_head_dim:
        if window.any():
            return reference
        passes, shape = ("latent_attention", "latent_attention_backward"), (heads, width, float(model.v_head_dim))
    part = 1.0 / (batch.cp // batch.cp_inner) / (1.0 if problem.timings.is_own else share)
    wide = batch.unquantised()  # the tables contain no narrower types, whatever the precision of the matrices
    sizes = (sequences, np.float64(seq_len), *shape)
    return measured_pass([find_kernels(problem, wide, entry, *sizes).scaled(part) for entry in passes], reference)


def scan_s(problem: Problem, batch: PlanBatch, block: Block) -> Pass:
    """Time of a chunked scan: short products beside memory-bound steps, at a quarter of a GEMM's rate [judged]."""
    if block is Block.MAMBA:
        per_token = mamba_scan_flops_per_token(problem.model)
    else:
        per_token = linear_attention_flops_per_token(problem.model, DELTA_CHUNK_TOKENS)
    operations = per_token * rank_tokens(problem, batch) / batch.tp
    forward = operations / (0.25 * gemm_rate(problem, batch.unquantised()))
    return Pass(forward, 2.5 * forward)
