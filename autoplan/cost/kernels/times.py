"""Kernel times of each block, and of the head, on one device for one micro-batch, forward and backward.

Arrays have one element per plan; times are seconds, sizes elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Rows, add_up
from autoplan.cost.kernels.adapters import tuned_matrices_s, tuning_traffic
from autoplan.cost.kernels.attention import attention_s, scan_s
from autoplan.cost.kernels.cross_entropy import added_per_head_weight, moved_bytes_per_logit, num_pieces
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.measured import find_kernels
from autoplan.cost.kernels.measured_modules import with_modules
from autoplan.cost.kernels.measured_units import head_factor
from autoplan.cost.kernels.memory_bound import RECURRENT_BLOCKS, memory_bound_s, streams_s, traffic_of
from autoplan.cost.kernels.products import gemm_rate, products_s
from autoplan.cost.kernels.sizes import head_columns, rank_tokens
from autoplan.cost.passes import Pass, SplitPass
from autoplan.spec.axes import KERNEL_AXES
from autoplan.spec.blocks import ATTENTION_BLOCKS, Block
from autoplan.spec.enums import ChunkedLoss, CrossEntropyFusion
from autoplan.spec.finetuning import HEAD
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes(Rows):
    """Passes of one block and micro-batch by kind of kernel; backward without recomputation."""

    gemm: Pass
    gemm_weight_s: Floats  # the weight gradients' part of the backward pass
    attention: Pass
    memory: Pass
    matrix_forward_s: dict[str, Floats]  # forward products by matrix name

    @property
    def passes(self) -> Pass:
        """Kernels of both passes."""
        return self.gemm.plus(self.attention).plus(self.memory)

    def times(self, forward: Floats, backward: Floats) -> KernelTimes:
        """Return the kernels with both passes scaled."""
        return KernelTimes(
            gemm=self.gemm.times(forward, backward),
            gemm_weight_s=backward * self.gemm_weight_s,
            attention=self.attention.times(forward, backward),
            memory=self.memory.times(forward, backward),
            matrix_forward_s={name: forward * value for name, value in self.matrix_forward_s.items()},
        )

    def lasting(self, passes: Pass) -> KernelTimes:
        """Return the kernels with both passes rescaled to these times."""
        return self.times(passes.forward_s / self.passes.forward_s, passes.backward_s / self.passes.backward_s)


def kernel_times(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> KernelTimes:
    """Kernel time of one block for one micro-batch on one rank; depends only on the `KERNEL_AXES` of a plan."""
    problem = problem.attending(block)
    matrices = tuned_matrices_s(problem, batch, shape)
    attention = Pass.none(len(batch))
    if block in ATTENTION_BLOCKS:
        attention = attention_s(problem, batch, block)
    if block in RECURRENT_BLOCKS:
        attention = scan_s(problem, batch, block)
    traffic = traffic_of(problem, batch, block) | tuning_traffic(problem, batch, shape)
    memory = streams_s(problem, batch, block, shape, traffic)
    if not problem.timings.is_empty:
        matrices, added = with_modules(problem, batch, block, shape, matrices, traffic)
        memory = memory.plus(added)
    total = SplitPass(*(add_up(seconds) for seconds in zip(*matrices.values(), strict=True)))
    return KernelTimes(
        gemm=Pass(total.forward_s, total.backward_s),
        gemm_weight_s=total.weight_gradient_s,
        attention=attention,
        memory=memory,
        matrix_forward_s={name: products.forward_s for name, products in matrices.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTimes(Rows):
    """Passes of final norm, head and loss in one micro-batch."""

    passes: Pass
    weight_s: Floats  # the weight gradients' part


def distinct_head_s(problem: Problem, batch: PlanBatch) -> HeadTimes:
    """Return `head_s`, priced once for plans with the same kernels."""
    first, of_kernels = batch.distinct(*KERNEL_AXES)
    return head_s(problem, batch.take(first)).take(of_kernels)


def head_s(problem: Problem, batch: PlanBatch) -> HeadTimes:
    """Time of final norm, logits and cross entropy of a micro-batch; depends only on the `KERNEL_AXES` of a plan."""
    model, framework = problem.model, problem.framework
    wide = batch.unquantised()  # frameworks do not quantise the head
    rate, tokens, depths = gemm_rate(problem, wide), rank_tokens(problem, batch), model.num_mtp_layers
    hidden, columns = np.full(len(batch), 1.0 * model.hidden_size), head_columns(problem, batch) / batch.tp
    width = np.full(len(batch), 1.0 * model.table_width)
    # Pieces as small as Liger's are bound by reading the head and adding up its gradients.
    pieces = np.where(batch.chunked_loss == ChunkedLoss.LIGER.code, num_pieces(problem, batch), 1.0)
    products = products_s(problem, wide, rate, tokens / pieces, columns, width).times(pieces, pieces)
    if model.head_transform:
        products = products.plus(products_s(problem, wide, rate, tokens, width, hidden))
    # A loss that is not vocabulary-parallel uses gathered logits.
    logits = columns if framework.memory.shards_logits else head_columns(problem, batch)
    loss = memory_bound_s(problem, moved_bytes_per_logit(problem, batch) * tokens * logits)
    if not problem.timings.is_empty:
        measured = find_kernels(problem, wide, "cross_entropy", tokens, logits).otherwise(2 * loss) / 2
        is_usual = (batch.cross_entropy_fusion == CrossEntropyFusion.UNFUSED.code) & (pieces == 1.0)
        loss = np.where(is_usual & (batch.chunked_loss != ChunkedLoss.CUT.code), measured, loss)
    kernels_s = add_up(products) + 2 * loss
    longer = head_factor(problem, wide, (tokens, hidden, head_columns(problem, batch)), kernels_s)
    products, loss = products.times(longer, longer), longer * loss
    finetuning = problem.training.finetuning
    if finetuning is not None and not finetuning.trains(HEAD):
        products = products._replace(weight_gradient_s=0.0 * products.weight_gradient_s)
    elif batch.chunked_loss.any():
        added_s = memory_bound_s(problem, added_per_head_weight(batch) * columns * width)
        products = products._replace(weight_gradient_s=products.weight_gradient_s + added_s)
    if problem.training.runs_reference:
        products = products._replace(forward_s=2.0 * products.forward_s + loss)
    # Every prediction depth runs the head once more, after a projection of the hidden state joined with the next
    # embedding.
    passes = Pass(products.forward_s + loss, products.backward_s + loss).scaled(1 + depths)
    if depths:
        joined = products_s(problem, wide, rate, tokens, hidden / batch.tp, 2.0 * hidden)
        passes = passes.plus(Pass(joined.forward_s, joined.backward_s).scaled(depths))
    return HeadTimes(passes=passes, weight_s=(1 + depths) * products.weight_gradient_s)
