"""Bytes of the cross entropy per logit: what it moves through memory in a pass, and what is held at its peak."""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.kernels.sizes import head_columns, rank_tokens
from autoplan.spec.enums import ChunkedLoss
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# (moved in each pass, held at the peak) by native and te.
# native (Megatron-LM d98e8a6, core/fusions/fused_cross_entropy.py, each part a compiled kernel): 2 read and 4 written
# by the fp32 copy and its maximum, 4 and 4 by the exponentials and their sum, 4 and 4 by the softmax, then 4 read and
# 2 written by the gradient; its peak is the fp32 softmax, a copy of it that the compiled gradient changes, and the
# 16-bit gradient: 10.0 bytes, counted in torch 2.13.
# te: 2 + 2 bytes a pass at .28 of the bandwidth, of which a stream reaches .85, in place (SimuMax 4dcaae5,
# configs/system/b200_bf16_ceperm.json, ce_fusion, and core/transformer/dense_module.py; Transformer Engine d0067d0,
# common/triton/cross_entropy.py).
_FUSED = ((14.0, 10.0), (12.0, 2.0))
# Of Liger's, which is the same kernel, and of a cut cross entropy: its kernels store no logits, and skip as many of the
# blocks of the gradients as it takes to compute the logits again: 135 ms for 8,192 tokens of Gemma 2 2B's head on A100,
# 143 with compiled kernels that store them (arXiv:2411.09009, table 1).
_PIECEWISE = {ChunkedLoss.LIGER: _FUSED[1], ChunkedLoss.CUT: (0.0, 0.0)}
PIECES = 8  # of a chunked loss (torchtitan b5bcd76, components/loss.py, ChunkedLossWrapper.Config.num_chunks)


def moved_bytes_per_logit(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes that the cross entropy moves in each pass; about as many as its peak copies if unfused (`modelling` C5)."""
    framework = problem.framework
    unfused = framework.kernels.bytes_moved_per_logit or 1.25 * framework.memory.bytes_per_logit
    return _of_pieces(0, np.array([unfused, *(moved for moved, _ in _FUSED)])[batch.cross_entropy_fusion], batch)


def held_bytes_per_logit(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of a logit at the peak of head and loss (`modelling` B3)."""
    memory = problem.framework.memory
    peak_bytes = np.array([memory.bytes_per_logit, *(peak for _, peak in _FUSED)])[batch.cross_entropy_fusion]
    peak_bytes += np.where(batch.tp > 1, memory.bytes_per_parallel_logit, 0.0)
    return _of_pieces(1, peak_bytes, batch) / num_pieces(problem, batch)


def _of_pieces(at: int, usual: Floats, batch: PlanBatch) -> Floats:
    """Return bytes per logit, or those of a loss in pieces that has kernels of its own, by their place in the table."""
    kinds = [batch.chunked_loss == kind.code for kind in _PIECEWISE]
    return np.select(kinds, [parts[at] for parts in _PIECEWISE.values()], usual)


def num_pieces(problem: Problem, batch: PlanBatch) -> Floats:
    """Return in how many pieces a micro-batch goes through head and loss.

    Liger's have a power of 2 of tokens, about as many logits as the hidden states of all have elements (Liger-Kernel,
    src/liger_kernel/ops/fused_linear_cross_entropy.py).
    """
    tokens = np.maximum(rank_tokens(problem, batch), 1.0)
    per_hidden = np.ceil(head_columns(problem, batch) / problem.model.table_width)
    of_liger = np.ceil(tokens / 2.0 ** np.ceil(np.log2(np.ceil(tokens / per_hidden))))
    kinds = [batch.chunked_loss == kind.code for kind in (ChunkedLoss.CHUNKS, ChunkedLoss.LIGER)]
    return np.select(kinds, [np.full(len(batch), float(PIECES)), of_liger], 1.0)


def added_per_head_weight(batch: PlanBatch) -> Floats:
    """Bytes moved per weight of the head to add the gradients of all pieces of a loss but one to fp32 sums."""
    return np.where(batch.chunked_loss == ChunkedLoss.CHUNKS.code, 10.0 * (PIECES - 1), 0.0)
