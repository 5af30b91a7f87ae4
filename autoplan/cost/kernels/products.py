"""Times of matrix products in dense blocks (`modelling` C2) and experts (C4), in the precision of a plan.

Arrays have one element per plan, or the shape (matrices, plans); times are in seconds, sizes in elements.  The
constants are reference values for the shape of the curves; the level comes from the device (`gemm_efficiency`) and the
calibration.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.linears import Linear
from autoplan.cost.kernels.measured import find_kernels, passes_s
from autoplan.cost.kernels.memory_bound import memory_bound_s
from autoplan.cost.kernels.sizes import (
    expert_tokens,
    linear_tokens,
    local_sizes,
    matrix_pieces,
    scales_rows,
    scales_tiles,
)
from autoplan.cost.passes import SplitPass
from autoplan.cost.state_types import accumulator_bytes, grad_bytes
from autoplan.spec.enums import Precision
from autoplan.spec.operations import PRODUCTS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Slowdown of large 16-bit GEMMs if the rows of a matrix are not a multiple of 16 bytes, so that it is loaded in
# narrower pieces, and if rows have an odd number of elements, which asynchronous copies (at least 4 bytes) do not
# support.  Odd: between the factor of three for heads of some vocabularies (Netflix, "Scaling LLM Post-Training",
# 2026-02-13) and the factor of two with which a step of nanoGPT, .27 of it in the head, is 25 % slower with 50,257
# columns than with 50,304 (x.com/karpathy/status/1621578354024677377).  Narrow: judged, half-way to it.
ROW_BYTES = 16.0
NARROW_ROWS_TIME, ODD_ROWS_TIME = 1.6, 2.5

# Products of experts are dense products, one per expert, with this many running concurrently (streams of Transformer
# Engine, pytorch/cpp_extensions/gemm.py, general_grouped_gemm).  Weight-gradient products also read and write the
# gradient buffer, which computation does not hide.  On B200, where large products of the same runs reach .50 of the
# peak, this predicts .23, .32, .39 and .43 of the peak with 128, 256, 512 and 1,024 tokens per expert, and for fp32
# weight gradients .07, .12, .19 and .28; measured were .18-.21, .27-.30, .37-.43 and .38-.46; .08, .14, .22 and .28
# (`modelling` C4).
GROUPED_STREAMS = 4
# Rate of torch's grouped products (CUTLASS) relative to that: forward and backward 712 to 863 TFLOP/s on B200 with
# 128,000 tokens of 1 to 8 experts (pytorch/ao 0b1bb11, torchao/prototype/moe_training/README.md), where sustained
# products of cuBLAS reach 1,024; on H200 as fast as products of cuBLAS one by one (pytorch/pytorch issue 163425).
TORCH_GROUPED_SHARE = {"blackwell": 0.77}
# Exposed share of that traffic's time, 1 as on B200 unless measured: on Hopper products that accumulate into fp32 take
# longer than those of the same shape that do not, by .42 of that time on H100 and .59 on H200, .53 in the median of 24
# shapes (dgrad and wgrad of benchmarks/results/2026-11-23_device_set_h100.md and 2026-11-23_device_set_h200.md).
SHOWN_GRAD_TRAFFIC = {"hopper": 0.53}

# Share of their peak that 8-bit GEMMs reach, relative to the share that bf16 GEMMs reach, for devices without their own
# figure.  Sustained: ND H100 v5 .65-.70 of the fp8 peak for 8,192 cubed, 6 % below the plateau, against .70 in bf16
# (devices/h100-sxm.toml); bursts say .88 there and .98 on B200 (MAMF, `modelling` C1).  For 4-bit GEMMs relative to
# 8-bit ones there is no such measurement [fitted: 8 dense B200-class runs].
NARROW_GEMM_SHARE = {"hopper": 0.96, "blackwell": 0.98}
FP4_GEMM_SHARE = 0.80
# Of the rate of 8-bit products with one scale (cuBLAS), what those with scales of rows (CUTLASS) sustain: .75 by the
# steps of torchtitan 7a04053, 7,186 and 6,424 tokens/s of Llama 3 8B on 8 H100, .81 by those of torchao's table
# [fitted].
ROWWISE_GEMM_SHARE = 0.80
# Rate of 8-bit GEMMs with scales of 128 elements relative to those with one scale: on Hopper, whose matrix units apply
# no scales, large ones take 1/1.75 of the time of bf16 ones (NVIDIA, "Boosting Matrix Multiplication Speed and
# Flexibility with NVIDIA cuBLAS 12.9"), where those with one scale take 1 / (2 x .96).  Blackwell runs them as MXFP8
# (Transformer Engine, docs/features/low_precision_training/fp8_blockwise_scaling).
BLOCKWISE_GEMM_SHARE = {"hopper": 1.75 / (2.0 * NARROW_GEMM_SHARE["hopper"])}
MOVED_PER_HALF_SUM = 6.0  # bytes per element of a sum of 16-bit gradients: reads both, writes one
NARROW_PEAK = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}


def wide_peak(problem: Problem) -> float:
    """Peak rate of unquantised products, in operations per second."""
    peak = peaks(problem)
    wide = peak.get("bf16", peak.get("fp16", 0.0))
    return peak.get("fp32", wide) if problem.training.precision == "fp32" else wide


def peaks(problem: Problem) -> dict[str, float]:
    """Peak rates of products by type, in operations per second; fp32 at the TF32 rate if it runs on TF32 units."""
    peak = problem.device.peaks
    if problem.framework.kernels.tf32_products and "tf32" in peak:
        peak["fp32"] = peak["tf32"]
    return peak


def gemm_rate(problem: Problem, batch: PlanBatch) -> Floats:
    """Sustained rate of a large GEMM in the plan's precision, in operations per second."""
    device, peak = problem.device, peaks(problem)
    wide = peak.get("bf16", peak.get("fp16", 0.0))
    narrow = device.narrow_gemm_efficiency or device.gemm_efficiency * NARROW_GEMM_SHARE.get(device.generation, 0.88)
    by_precision = []
    for precision in Precision:
        name = NARROW_PEAK.get(precision, precision)
        # Volta has no bf16 and Hopper no fp4: such a plan runs in the nearest precision of the device.
        rate = peak.get(name, peak.get("fp8", wide) if name == "nvfp4" else wide)
        efficiency = narrow if name in NARROW_PEAK and rate > wide else device.gemm_efficiency
        by_precision.append(rate * efficiency * (FP4_GEMM_SHARE if name == "nvfp4" else 1.0))
    share = np.where(scales_rows(batch), ROWWISE_GEMM_SHARE, 1.0)
    share = np.where(scales_tiles(batch), BLOCKWISE_GEMM_SHARE.get(device.generation, 1.0), share)
    return share * np.array(by_precision)[batch.precision] / problem.calibration.gemm


def gemm_pace(problem: Problem, batch: PlanBatch, rate: Floats) -> Floats:
    """Speedup of large GEMMs at `rate` over unquantised ones, at least 1."""
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
    """Time of an m x n x k GEMM with the large-shape `rate`; `accumulates`: into an fp32 gradient buffer.

    `slower` is its slowdown relative to rows of a multiple of 16 bytes.
    """
    element = problem.training.element_bytes
    moved = element * (m * k + k * n) + (8.0 if accumulates else element) * m * n
    computing = slower * _computing_s(problem, rate, m, n, k, pace)
    start_s = problem.device.gemm.start_s * problem.calibration.gemm
    return np.maximum(computing, memory_bound_s(problem, moved)) + start_s


def _computing_s(
    problem: Problem,
    rate: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    pace: Floats | float = 1.0,
    side_by_side: Floats | float = 1.0,
) -> Floats:
    """Compute time of one m x n x k GEMM with the large-shape `rate`; for concurrent GEMMs, its share of their time."""
    return 2.0 * m * n * k * problem.device.gemm.slowdown(m, n, k, pace, side_by_side) / rate


def products_s(
    problem: Problem, batch: PlanBatch, rate: Floats, m: Floats, n: Floats, k: Floats, pace: Floats | float = 1.0
) -> SplitPass:
    """Times of the three products of m tokens with a matrix of k inputs and n outputs."""
    slower = _narrow_rows_time(problem, n, k)
    references = SplitPass(
        gemm_s(problem, rate, m, n, k, pace=pace, slower=slower),
        gemm_s(problem, rate, m, k, n, pace=pace, slower=slower),
        gemm_s(problem, rate, n, k, m, pace=pace, slower=slower, accumulates=True),
    )
    if problem.timings.is_empty:
        return references
    return SplitPass(*passes_s([find_kernels(problem, batch, entry, m, n, k) for entry in PRODUCTS], references))


def _narrow_rows_time(problem: Problem, n: Floats, k: Floats) -> Floats | float:
    """Slowdown of products with a k x n matrix relative to an aligned one; it applies to all three products."""
    element = problem.training.element_bytes
    if problem.device.vendor != "nvidia" or element != 2.0:
        return 1.0
    aligned_elements = ROW_BYTES / element
    if not (np.mod(n, aligned_elements).any() or np.mod(k, aligned_elements).any()):
        return 1.0
    is_odd = (np.mod(n, 2.0) > 0) | (np.mod(k, 2.0) > 0)
    is_narrow = (np.mod(n, aligned_elements) > 0) | (np.mod(k, aligned_elements) > 0)
    return np.where(is_odd, ODD_ROWS_TIME, np.where(is_narrow, NARROW_ROWS_TIME, 1.0))


def matrices_s(problem: Problem, batch: PlanBatch, linears: tuple[Linear, ...], rate: Floats) -> dict[str, SplitPass]:
    """Times of the products of a block's matrices by name; reference times for experts."""
    pace = gemm_pace(problem, batch, rate)
    times: dict[str, SplitPass] = {}
    dense = [piece for linear in linears if not linear.is_expert for piece in matrix_pieces(problem, linear)]
    if dense:
        tokens = np.stack([linear_tokens(problem, batch, linear) for linear in dense])
        inputs, outputs = (
            np.stack(sizes) for sizes in zip(*(local_sizes(linear, batch) for linear in dense), strict=True)
        )
        passes = products_s(problem, batch, rate, tokens, outputs, inputs, pace)
        for linear, *seconds in zip(dense, *passes, strict=True):
            piece_times, earlier_pieces = SplitPass(*seconds), times.get(linear.name)
            times[linear.name] = earlier_pieces.plus(piece_times) if earlier_pieces else piece_times
    experts = [linear for linear in linears if linear.is_expert]
    return times | {linear.name: _experts_s(problem, batch, linear, rate, pace) for linear in experts}


def _experts_s(problem: Problem, batch: PlanBatch, linear: Linear, rate: Floats, pace: Floats) -> SplitPass:
    """Reference times of the products of one matrix of all local experts."""
    inputs, outputs = local_sizes(linear, batch)
    tokens, num_local = expert_tokens(problem, batch), linear.copies / batch.ep
    side_by_side = np.clip(num_local, 1.0, GROUPED_STREAMS)
    if problem.framework.kernels.torch_grouped_products:
        rate = rate * TORCH_GROUPED_SHARE.get(problem.device.generation, 1.0)
    starts_s = problem.device.gemm.start_s * problem.calibration.gemm * num_local / side_by_side

    def products_of(m: Floats, n: Floats, k: Floats) -> Floats:
        return num_local * _computing_s(problem, rate, m, n, k, pace, side_by_side) + starts_s

    shown = SHOWN_GRAD_TRAFFIC.get(problem.device.generation, 1.0)
    grads_s = shown * memory_bound_s(problem, _moved_per_grad(problem, batch) * num_local * inputs * outputs)
    return SplitPass(
        products_of(tokens, outputs, inputs),
        products_of(tokens, inputs, outputs),
        products_of(outputs, inputs, tokens) + grads_s,
    )


def moved_per_accumulated_grad(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes moved per parameter to add a micro-batch's gradients to others, apart from the products: shape (plans).

    Accumulators of fp32 are read and written instead of 16-bit ones, by the products themselves or, beside gradients
    that stay, after them (DeepSpeed runtime/bf16_optimizer.py, _update_hp_grad).
    """
    framework, accumulator = problem.framework, accumulator_bytes(problem, batch)
    moved = _moved_by_sums(problem, batch)
    apart = moved if framework.memory.frees_accumulated_grads else np.maximum(moved, MOVED_PER_HALF_SUM)
    return np.where(accumulator > 0.0, np.where(apart > 0.0, apart + accumulator, 0.0), moved)


def _moved_by_sums(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes moved per parameter by sums apart from the products, of which Megatron-Core has none unless told so.

    They read the gradient, and read and write its buffer (Megatron-LM d98e8a6, distributed_data_parallel.py:578).
    Fusing them gained about 1 % (Primus fd1eeab, examples/megatron/configs/MI325X/deepseek_v2_lite-BF16-pretrain.yaml).
    """
    usual = problem.framework.kernels.bytes_moved_per_accumulated_grad
    apart = problem.training.element_bytes + 2.0 * grad_bytes(problem, batch)
    return np.where(batch.gradient_accumulation_fusion, usual, np.maximum(usual, apart))


def _moved_per_grad(problem: Problem, batch: PlanBatch) -> Floats:
    """Gradient bytes per weight moved by a weight-gradient product: it accumulates, or writes for a later sum."""
    is_apart = _moved_by_sums(problem, batch) > 0.0
    return np.where(is_apart, problem.training.element_bytes, 2.0 * grad_bytes(problem, batch))
