"""Tensor parallelism: the collectives of a block, of embedding, head and loss, and their exposed parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.collectives.collective import Collective, LinkTimes
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.measured_units import measures_end
from autoplan.cost.kernels.sizes import (
    encoder_tokens,
    gathers_narrow,
    operand_bytes,
    padded_vocab,
    rank_tokens,
    scales_blocks,
    scales_by_past,
)
from autoplan.cost.kernels.times import KernelTimes
from autoplan.cost.network.links import Links, contention_share
from autoplan.cost.network.process_groups import process_groups
from autoplan.cost.passes import Ends, Pass
from autoplan.spec.blocks import Block
from autoplan.spec.finetuning import HEAD
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# All-reduces of the vocabulary-parallel loss, each with one fp32 number per token.
LOSS_REDUCTIONS = 3
BYTES_PER_REDUCED_TOKEN = 4.0
# Compute units that reduce the pieces of an overlapped product: 8 to 24 in NVIDIA's recipes (num_sm of proj_fprop and
# fc2_fprop, NeMo-Framework-Launcher conf/training/tp_overlap).
REDUCING_UNITS = 20


class TensorParallel(NamedTuple):
    """Collectives of one block, embedding or head, between its matrices and the hidden state."""

    gather: Collective  # all-gather of hidden states or their gradients, with sequence parallelism
    scatter: Collective  # reduce-scatter of them, with sequence parallelism
    reduce: Collective  # all-reduce, without sequence parallelism


def has_tensor_parallel(block: Block, shape: BlockShape) -> bool:
    """Return whether a block has tensor-parallel collectives; routed experts get their tokens by dispatch instead."""
    return block is not Block.MOE or any(linear.split == "column" for linear in shape.linears)


def _hidden_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of a micro-batch's hidden state that tensor-parallel ranks gather or reduce."""
    return problem.training.element_bytes * rank_tokens(problem, batch) * problem.model.hidden_size


def _collectives(
    problem: Problem,
    batch: PlanBatch,
    gathered_bytes: Floats,
    gathers: tuple[float, float | Floats],
    sums: tuple[float, float],
) -> TensorParallel:
    """Return collectives with this many gathers and reductions per (forward, backward) pass."""
    group, hidden, sp = process_groups(batch).tp, _hidden_bytes(problem, batch), batch.sp.astype(np.float64)
    return TensorParallel(
        gather=Collective("tp", "all_gather", group, gathered_bytes, forward=gathers[0] * sp, backward=gathers[1] * sp),
        scatter=Collective("tp", "reduce_scatter", group, hidden, forward=sums[0] * sp, backward=sums[1] * sp),
        reduce=Collective(
            "tp", "all_reduce", group, hidden, forward=sums[0] * (1.0 - sp), backward=sums[1] * (1.0 - sp)
        ),
    )


def regathers_inputs(problem: Problem) -> bool:
    """Return whether the inputs of a block's matrices are gathered once more for the weight gradients.

    Frozen matrices have no weight gradients, and adapters use the local slice of the inputs.
    """
    finetuning = problem.training.finetuning
    has_gradients = finetuning is None or not finetuning.has_adapters
    return problem.framework.memory.regathers_norm_output and has_gradients


def adapter_collectives(problem: Problem, batch: PlanBatch, shape: BlockShape) -> tuple[Collective, ...]:
    """Describe the collectives of a block's adapters: each sends a micro-batch with the width of the adapter's rank.

    For a column-parallel matrix the output of the adapter's first matrix for a slice of the tokens is gathered, and its
    gradients are reduced; for a row-parallel matrix it is the other way round.
    """
    split = {linear.name: linear.split for linear in shape.linears}
    adapters = [linear for linear in shape.linears if linear.name.endswith("lora_a")]
    columns, rows = (float(sum(split[linear.adapts] == kind for linear in adapters)) for kind in ("column", "row"))
    if not columns + rows:
        return ()
    group, sp = process_groups(batch).tp, batch.sp.astype(np.float64)
    buffer = problem.training.element_bytes * rank_tokens(problem, batch) * adapters[0].out_size
    return (
        Collective("tp", "all_gather", group, buffer, forward=columns * sp, backward=rows * sp),
        Collective("tp", "reduce_scatter", group, buffer, forward=rows * sp, backward=columns * sp),
        Collective("tp", "all_reduce", group, buffer, forward=rows * (1.0 - sp), backward=columns * (1.0 - sp)),
    )


def adapters_s(problem: Problem, batch: PlanBatch, shape: BlockShape, links: LinkTimes) -> Pass:
    """Time of the collectives of a block's adapters, which nothing hides."""
    passes, meeting = Pass.none(len(batch)), add_up(_meeting_s(problem, batch))
    for collective in adapter_collectives(problem, batch, shape):
        seconds = collective.seconds(links) + meeting
        passes = passes.plus(Pass(seconds * collective.forward, seconds * collective.backward))
    return passes


def block_collectives(problem: Problem, batch: PlanBatch) -> TensorParallel:
    """Describe the collectives of a block with matrices that tensor parallelism splits (`modelling` D5).

    With sequence parallelism both passes have an all-gather before and a reduce-scatter after the block's matrices, and
    the inputs are gathered once more for the weight gradient unless they are kept whole.  Without it each pass has one
    all-reduce.  Inputs of the matrices are gathered quantised, if the framework does so; gradients with block scales
    are gathered twice, row-wise and column-wise.
    Source: Megatron-LM core/tensor_parallel/layers.py; Korthikanti et al., arXiv:2205.05198; Transformer Engine
    pytorch/distributed.py, _all_gather_fp8, _all_gather_mxfp8 and _all_gather_nvfp4.
    """
    is_narrow = gathers_narrow(problem, batch)
    narrow = operand_bytes(problem, batch) / problem.training.element_bytes
    gathered = np.where(is_narrow, narrow, 1.0) * _hidden_bytes(problem, batch)
    of_gradients = np.where(is_narrow & scales_blocks(batch), 2.0, 1.0)
    return _collectives(problem, batch, gathered, (1.0, of_gradients + regathers_inputs(problem)), (1.0, 1.0))


def encoder_gradient(problem: Problem, batch: PlanBatch) -> Collective:
    """Describe the reduction of the gradient of an encoder's output, to which every rank's keys and values contribute.

    With sequence parallelism it is a reduce-scatter and a gather before the next block, which cost as much as an
    all-reduce.
    """
    assert problem.model.encoder is not None
    width = problem.training.element_bytes * problem.model.encoder.layers.hidden_size
    buffer = width * encoder_tokens(problem, batch)
    return Collective("tp", "all_reduce", process_groups(batch).tp, buffer, backward=1.0)


def embedding_collectives(problem: Problem, batch: PlanBatch) -> TensorParallel:
    """Describe the collectives of the embedding.

    Every rank looks up its own rows of the table.  With sequence parallelism the sum is a reduce-scatter, and its
    gradient is gathered; without it the sum is an all-reduce, and nothing is gathered.
    """
    return _collectives(problem, batch, _hidden_bytes(problem, batch), (0.0, 1.0), (1.0, 0.0))


def head_collectives(problem: Problem, batch: PlanBatch) -> tuple[TensorParallel, Collective]:
    """Describe the collectives of one head, and of its loss.

    As in blocks, the head gathers its inputs, and again for its weight gradient; the gradient of the inputs is
    reduce-scattered.  A vocabulary-parallel loss reduces three fp32 numbers per token: the largest logit, the label's
    logit, and the sum of the exponentials; any other loss gathers the logits.
    Source: Megatron-LM core/tensor_parallel/layers.py and cross_entropy.py; nanotron
    parallel/tensor_parallel/functional.py.
    """
    framework, tokens = problem.framework, rank_tokens(problem, batch)
    finetuning = problem.training.finetuning
    is_trained = finetuning is None or finetuning.trains(HEAD)
    again = 0.0 + (framework.memory.regathers_norm_output and is_trained)
    hidden = _collectives(problem, batch, _hidden_bytes(problem, batch), (1.0, again), (0.0, 1.0))
    if framework.memory.shards_logits:
        loss = Collective(
            "tp", "all_reduce", process_groups(batch).tp, BYTES_PER_REDUCED_TOKEN * tokens, forward=LOSS_REDUCTIONS
        )
    else:
        loss = Collective(
            "tp",
            "all_gather",
            process_groups(batch).tp,
            problem.training.element_bytes * tokens * padded_vocab(problem, batch),
            forward=1.0,
        )
    return hidden, loss


# -- time of blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelTimes:
    """Seconds of the collectives of one block without overlap."""

    gather_s: Floats  # all-gather of the inputs, and of the gradients of the outputs
    sum_s: Floats  # reduction of the outputs, and of the gradients of the inputs

    @classmethod
    def of(cls, collectives: TensorParallel, links: LinkTimes) -> TensorParallelTimes:
        """Return the times of described collectives."""
        return cls(
            gather_s=collectives.gather.seconds(links),
            sum_s=collectives.scatter.seconds(links) + collectives.reduce.seconds(links),
        )

    @property
    def forward_s(self) -> Floats:
        """Seconds of the collectives of the forward pass."""
        return self.gather_s + self.sum_s


def _meeting_s(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """Wait of a tensor-parallel collective (for every rank's host to launch it, for members on other nodes)."""
    framework, host = problem.framework, problem.calibration.host
    leaves = batch.tp > problem.cluster.levels[-1].num_devices
    far = np.where(leaves, host * framework.network.cross_node_s_per_member * (batch.tp - 1), 0.0)
    return np.where(batch.tp > 1, host * framework.host.host_s_per_collective, 0.0), far


def hosts_wait_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Host synchronisation time before a tensor-parallel collective in pipelines across nodes."""
    framework, domain = problem.framework, problem.cluster.levels[-1].num_devices
    waits = framework.network.cross_node_pipeline_s_per_tp * batch.tp
    waits = waits + framework.network.cross_node_pipeline_s_per_far_tp * np.maximum(batch.tp - domain, 0)
    crosses = (batch.pp > 1) & (batch.num_devices > domain) & (batch.tp > 1)
    return np.where(crosses, problem.calibration.host * waits, 0.0)


def _column_weights_s(shape: BlockShape, kernels: KernelTimes) -> Floats:
    """Time of the weight gradients of the column-parallel matrices, by their share of the forward products."""
    columns = {linear.name for linear in shape.linears if linear.split == "column"}
    forward = add_up(time for name, time in kernels.matrix_forward_s.items() if name in columns)
    return kernels.gemm_weight_s * forward / kernels.gemm.forward_s


def tensor_parallel_s(
    problem: Problem, batch: PlanBatch, shape: BlockShape, alone: TensorParallelTimes, kernels: KernelTimes
) -> Pass:
    """Exposed time of one block's tensor-parallel collectives, which take `alone` without overlap.

    The reduction of the input gradient overlaps with the weight gradients of the column-parallel matrices, and the
    additional gather of the inputs with the data gradient. Source: Megatron-LM core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication; Transformer Engine pytorch/module/layernorm_linear.py.
    """
    framework, columns_s = problem.framework, _column_weights_s(shape, kernels)
    forward, gather, reduce = alone.forward_s, alone.gather_s, alone.sum_s
    meeting = add_up(_meeting_s(problem, batch))
    meetings = np.where(batch.sp, 2, 1) * meeting
    overlapped_s = (
        np.minimum(reduce + meeting, columns_s) if framework.overlap.tp_reduce_overlap else np.zeros_like(reduce)
    )
    contention = contention_share(problem, "reduce_scatter", "all_reduce")
    plain = forward + meetings, gather + reduce + meetings - (1.0 - contention) * overlapped_s
    if framework.overlap.tp_overlap_pieces:
        pieces = _in_pieces_s(problem, batch, shape, alone, kernels)
        overlapped = (
            pieces.forward_s,
            pieces.backward_s + reduce - (1.0 - contention) * np.minimum(overlapped_s, reduce),
        )
    else:
        # A share of the collectives overlaps with the same share of the products, and at most their time is hidden.
        backward_s = gather + np.maximum(reduce - overlapped_s, 0.0)
        overlapped = (
            plain[0] - framework.overlap.tp_overlap_share * np.minimum(forward, kernels.gemm.forward_s),
            plain[1] - framework.overlap.tp_overlap_share * np.minimum(backward_s, kernels.gemm.backward_s),
        )
    return Pass(
        np.where(batch.tp_overlap, overlapped[0], plain[0]), np.where(batch.tp_overlap, overlapped[1], plain[1])
    )


def _in_pieces_s(
    problem: Problem, batch: PlanBatch, shape: BlockShape, alone: TensorParallelTimes, kernels: KernelTimes
) -> Pass:
    """Exposed collectives of products in pieces, without the backward reduction, and the slowdown of the products.

    Gathers go around a ring on copy engines while the pieces that have arrived are multiplied.  Reductions take compute
    units from the product of the next piece.  Products with few rows are slower; the tails of pieces overlap, as they
    run in several streams.
    Source: Transformer Engine common/comm_gemm_overlap; "ring_exchange" and "pipeline" of NeMo-Framework-Launcher
    26e42fa, launcher_scripts/conf/training/tp_overlap, where rings of 8 take two pieces at a time ("aggregate").
    """
    gather, share, curve = alone.gather_s, problem.framework.overlap.tp_overlap_share, problem.device.gemm
    reduce = alone.forward_s - gather
    splits = np.where(batch.tp > 1, problem.framework.overlap.tp_overlap_pieces, 1)
    rows = rank_tokens(problem, batch) + curve.half_m

    def times_s(split: str, pieces: Ints) -> tuple[Floats, Floats]:
        """Return the time of matrices with this split, forward, and their slowdown in this many pieces."""
        names = [linear.name for linear in shape.linears if linear.split == split]
        products = add_up(kernels.matrix_forward_s[name] for name in names)
        return products, (pieces - 1) * (products * curve.half_m / rows + len(names) * curve.start_s)

    ring = np.minimum(batch.tp, splits)
    column, lost = times_s("column", ring)
    row, lost_backward = times_s("row", ring)
    occupied = REDUCING_UNITS / problem.device.compute_units
    lost = lost + times_s("row", splits)[1] + occupied * np.minimum(reduce, row)
    return Pass(
        np.maximum(gather - column, 0.0) + reduce - share * np.minimum(reduce, row) + lost,
        np.maximum(gather - row, 0.0) + lost_backward,
    )


# -- time in front of the layers and behind them ----------------------------------------------------------------------


def tensor_parallel_ends_s(problem: Problem, batch: PlanBatch, links: LinkTimes, head_weight_s: Floats) -> Ends:
    """Exposed time of the tensor-parallel collectives of embedding, heads and losses.

    The reduction of a head's input gradient overlaps with its weight gradient; `head_weight_s` is the weight gradients
    of all heads.  The time of a measured embedding or head already includes its collectives.
    """
    none = np.zeros(len(batch))
    has_table, has_head = (not measures_end(problem, end) for end in ("embedding", "head"))
    if (batch.tp == 1).all() or not (has_table or has_head):
        return Ends(Pass.none(len(batch)), Pass.none(len(batch)))
    host, far = _meeting_s(problem, batch)
    wait = hosts_wait_s(problem, batch)
    meeting = host + far + wait
    hidden, logits = head_collectives(problem, batch)
    alone = TensorParallelTimes.of(hidden, links)  # the buffers of the embedding are as large
    gather = np.where(batch.sp, alone.gather_s + meeting, 0.0)
    reduce = alone.sum_s + meeting
    if problem.framework.memory.shards_logits:
        # They follow one another, so the hosts are already synchronised.
        loss = LOSS_REDUCTIONS * (logits.seconds(links) + far + wait) + host
    else:
        loss = logits.seconds(links) + meeting
    tables, heads = int(has_table), int(has_head) * (1 + problem.model.num_mtp_layers)
    overlapped_s = np.minimum(heads * reduce, head_weight_s) if problem.framework.overlap.tp_reduce_overlap else none
    contention = contention_share(problem, "reduce_scatter", "all_reduce")
    return Ends(
        Pass(tables * reduce, tables * gather),
        Pass(heads * (gather + loss), heads * reduce - (1.0 - contention) * overlapped_s),
    )


def shared_scales_s(problem: Problem, batch: PlanBatch, links: Links) -> Floats:
    """Time to synchronise the scales of 8-bit tensors between ranks at the end of every pass through a chunk.

    With delayed scaling all ranks of a stage reduce the largest absolute values that they have seen.
    Source: Transformer Engine pytorch/quantization.py, reduce_and_update_fp8_tensors; Megatron-LM
    core/parallel_state.py, get_amax_reduction_group.
    """
    agrees = scales_by_past(batch)
    if not agrees.any():
        return np.zeros(len(batch))
    return np.where(agrees, links.short_all_reduce_s(process_groups(batch).stage), 0.0)
