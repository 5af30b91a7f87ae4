"""Times of matrix products: those of dense blocks (`modelling` C2) and of experts (C4), in the precision of a plan.

Arrays have one element per plan, or the shape (matrices, plans); times are seconds, sizes elements.  The constants are
reference values for the shape of the curves; the level comes from the device (`gemm_efficiency`) and the calibration.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.linears import Linear
from autoplan.cost.kernels.measured import find_kernels, passes_s
from autoplan.cost.kernels.memory_bound import memory_bound_s
from autoplan.cost.kernels.sizes import expert_tokens, linear_tokens, local_sizes, matrix_pieces, scales_rows
from autoplan.cost.memory.state_types import grad_bytes
from autoplan.cost.passes import SplitPass
from autoplan.spec.enums import Precision
from autoplan.spec.operations import PRODUCTS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# How many times as long 16-bit GEMMs of large shapes take where the rows of a matrix are no multiple of 16 bytes, so
# that it is loaded in narrower pieces, and where rows have an odd number of elements, which no asynchronous copy takes
# (4 bytes at least).  Odd: between the three times of heads of some vocabularies (Netflix, "Scaling LLM Post-Training",
# 2026-02-13) and the two that make a step of nanoGPT, .27 of it in the head, 25 % slower with 50,257 columns than with
# 50,304 (x.com/karpathy/status/1621578354024677377).  Narrow: judged, half-way to it.
ROW_BYTES = 16.0
NARROW_ROWS_TIME, ODD_ROWS_TIME = 1.6, 2.5

# Products of experts are dense ones of the tokens of each, so many at a time (streams of Transformer Engine,
# pytorch/cpp_extensions/gemm.py, general_grouped_gemm).  One for gradients of weights also reads and writes the buffer
# that keeps them, which computing does not hide.  On B200, where large products of the same runs reach
# .50 of the peak, this makes .23, .32, .39 and .43 of it with 128, 256, 512 and 1,024 tokens for each expert, for fp32
# gradients of weights .07, .12, .19 and .28; measured were .18-.21, .27-.30, .37-.43 and .38-.46; .08, .14, .22 and
# .28 (`modelling` C4).
GROUPED_STREAMS = 4
# Share of the time of that traffic that adds, 1 as on B200 unless measured: on Hopper products that add to fp32 take
# longer than those of their shape that do not by .42 of it on H100 and .59 on H200, .53 in the median of 24 shapes
# (dgrad and wgrad of benchmarks/results/2026-11-23_device_set_h100.md and 2026-11-23_device_set_h200.md).
SHOWN_GRAD_TRAFFIC = {"hopper": 0.53}

# 8-bit GEMMs reach this share of their peak over that which bf16 ones reach of theirs, where a device has no figure of
# its own.  Sustained: ND H100 v5 .65-.70 of the fp8 peak for 8,192 cubed, 6 % below the plateau, against .70 in bf16
# (devices/h100-sxm.toml); bursts say .88 there and .98 on B200 (MAMF, `modelling` C1).  4-bit ones, over 8-bit ones,
# have no such measurement [fitted: 8 dense B200-class runs].
NARROW_GEMM_SHARE = {"hopper": 0.96, "blackwell": 0.98}
FP4_GEMM_SHARE = 0.80
NARROW_PEAK = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "nvfp4"}


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
    share = np.where(scales_rows(batch), problem.framework.kernels.rowwise_gemm_share, 1.0)
    return share * np.array(by_precision)[batch.precision] / problem.calibration.gemm


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
    """Time of an m x n x k GEMM at `rate` for large shapes; `accumulates` into an fp32 gradient buffer.

    Its kernel is `slower` than that of rows of whole 16 bytes.
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
    """Time that one m x n x k GEMM computes at `rate` for large shapes, of those that run side by side its part."""
    return 2.0 * m * n * k * problem.device.gemm.slowdown(m, n, k, pace, side_by_side) / rate


def products_s(
    problem: Problem, batch: PlanBatch, rate: Floats, m: Floats, n: Floats, k: Floats, pace: Floats | float = 1.0
) -> SplitPass:
    """Times of the three products of a matrix of k inputs and n outputs that m tokens meet."""
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
    """Time of a product of a matrix of k inputs and n outputs over an aligned one's: all three have such rows."""
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
    """Times of the products of a block's matrices, by their names; those of experts by the reference."""
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
    """Times of the products of one matrix of all local experts, by the reference."""
    inputs, outputs = local_sizes(linear, batch)
    tokens, num_local = expert_tokens(problem, batch), linear.copies / batch.ep
    side_by_side = np.clip(num_local, 1.0, GROUPED_STREAMS)
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


def _moved_per_grad(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes that a product for a gradient of a weight moves of it: it adds to a buffer, or writes what others add."""
    if problem.framework.kernels.bytes_moved_per_accumulated_grad:
        return np.full(len(batch), problem.training.element_bytes)
    return 2.0 * grad_bytes(problem, batch)
