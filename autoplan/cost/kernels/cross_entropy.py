"""Bytes of the cross entropy per logit: what it moves through memory in a pass, and what is held at its peak."""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# (moved in each pass, held at the peak) by native and te.
# native (Megatron-LM d98e8a6, core/fusions/fused_cross_entropy.py, each part a compiled kernel): 2 read and 4 written
# by the fp32 copy and its maximum, 4 and 4 by the exponentials and their sum, 4 and 4 by the softmax, then 4 read and
# 2 written by the gradient; 16-bit logits, their fp32 softmax and the 16-bit gradient stand at its peak.
# te: 2 + 2 bytes a pass at .28 of the bandwidth, of which a stream reaches .85, in place (SimuMax 4dcaae5,
# configs/system/b200_bf16_ceperm.json, ce_fusion, and core/transformer/dense_module.py; Transformer Engine d0067d0,
# common/triton/cross_entropy.py).
_FUSED = ((14.0, 8.0), (12.0, 2.0))
PIECES = 8  # of a chunked loss (torchtitan b5bcd76, components/loss.py, ChunkedLossWrapper.Config.num_chunks)


def moved_bytes_per_logit(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes that the cross entropy moves in each pass; about as many as its peak copies if unfused (`modelling` C5)."""
    framework = problem.framework
    unfused = framework.kernels.bytes_moved_per_logit or 1.25 * framework.memory.bytes_per_logit
    return np.array([unfused, *(moved for moved, _ in _FUSED)])[batch.cross_entropy_fusion]


def held_bytes_per_logit(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of a logit at the peak of head and loss (`modelling` B3)."""
    memory = problem.framework.memory
    peak_bytes = np.array([memory.bytes_per_logit, *(peak for _, peak in _FUSED)])[batch.cross_entropy_fusion]
    peak_bytes += np.where(batch.tp > 1, memory.bytes_per_gathered_logit, 0.0)
    return peak_bytes / np.where(batch.chunked_loss, PIECES, 1.0)


def added_per_head_weight(batch: PlanBatch) -> Floats:
    """Bytes moved per weight of the head to add the gradients of all pieces of a loss but one to fp32 sums."""
    return np.where(batch.chunked_loss, 10.0 * (PIECES - 1), 0.0)
