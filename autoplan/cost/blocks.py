"""What does one block of each kind cost per micro-batch: kernels, recomputation, exposed communication, launches?

The exposed parts follow `modelling` D5 and E5.  Every array has one element per plan; times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.kernels.arithmetic import BlockShape, block_shapes
from autoplan.cost.kernels.measured_units import (
    LAYER,
    SharedStates,
    layer_times,
    measures_end,
    repeats_core_only,
    shared_states,
)
from autoplan.cost.kernels.times import (
    KERNEL_AXES,
    KernelTimes,
    add_up,
    kernel_times,
    local_sizes,
    memory_bound_s,
    padded_vocab,
    rank_tokens,
)
from autoplan.cost.memory.recompute import ATTENTION_BLOCKS, selective_s
from autoplan.cost.network.links import CONTENTION_SHARE, Links
from autoplan.cost.network.rank_groups import (
    Groups,
    cp_buffer_bytes,
    dispatched_copies,
    ep_buffer_bytes,
    groups,
    has_tp_traffic,
    tp_buffer_bytes,
    tp_gathered_bytes,
)
from autoplan.spec.enums import ContextParallelKind, Precision, Sharding
from autoplan.spec.framework import Framework
from autoplan.spec.model import Block, ModelSpec
from autoplan.spec.plan import FULL, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.levels import Gaps

# Of the vocabulary-parallel loss, each of an fp32 number per token.
LOSS_REDUCTIONS = 3
# Compute units that reduce the pieces of an overlapped product: 8 to 24 in NVIDIA's recipes (num_sm of proj_fprop and
# fc2_fprop, NeMo-Framework-Launcher conf/training/tp_overlap).
REDUCING_UNITS = 20
BYTES_PER_REDUCED_TOKEN = 4.0

# The terms of a block's time, in the order in which they are shown.
TERMS = (
    "gemm",
    "attention",
    "memory_bound",
    "recompute",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "fsdp_communication",
    "launch",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """Seconds of one block and micro-batch by term.

    `repeat_s` is what running the whole block forward again adds to the terms of its backward pass; less of its
    traffic and launches shows then, so that some are negative.
    """

    forward_s: dict[str, Floats]
    backward_s: dict[str, Floats]
    repeat_s: dict[str, Floats]
    weight_s: Floats  # of the backward pass, what a schedule that splits it may put off: the weight gradients
    split_s: Floats  # what taking it apart adds

    @property
    def total_forward_s(self) -> Floats:
        """Forward pass with exposed communication."""
        return add_up(self.forward_s.values())

    @property
    def total_backward_s(self) -> Floats:
        """Backward pass with exposed communication and what is recomputed by name."""
        return add_up(self.backward_s.values())

    @property
    def work_s(self) -> Floats:
        """What one micro-batch keeps the device's compute units busy with, in both passes."""
        passes = (self.forward_s, self.backward_s)
        return add_up(one[name] for one in passes for name in ("gemm", "attention", "memory_bound", "recompute"))

    @property
    def total_repeat_s(self) -> Floats:
        """What recomputing the whole block adds to its backward pass."""
        return add_up(self.repeat_s.values())

    def take(self, which: Ints | slice) -> BlockCost:
        """That of the plans at the given indices."""
        passes = (self.forward_s, self.backward_s, self.repeat_s)
        forward, backward, repeat = ({name: value[which] for name, value in one.items()} for one in passes)
        return BlockCost(
            forward_s=forward,
            backward_s=backward,
            repeat_s=repeat,
            weight_s=self.weight_s[which],
            split_s=self.split_s[which],
        )

    def term_s(self, name: str, count: Floats, repeated: Floats) -> Floats:
        """One term of both passes of `count` such blocks, of which `repeated` are recomputed as a whole."""
        return count * (self.forward_s[name] + self.backward_s[name]) + repeated * self.repeat_s[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lags:
    """By how much launching one block takes the host longer than the block the device, below 0 where it is shorter."""

    forward_s: Floats
    backward_s: Floats
    repeated_s: Floats  # backward where the whole block is recomputed
    waits: Bools  # whether the host waits for the device inside of the block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Kernels of one block and micro-batch, and exposed traffic in front of what other micro-batches hide.

    All of it depends on `KERNEL_AXES` and tp_overlap alone, so that it is worked out once for many plans.
    """

    kernels: KernelTimes
    tp: tuple[Floats, Floats]
    tp_inputs: Floats  # of the forward pass, what brings the inputs
    cp: tuple[Floats, Floats]
    ep: Floats  # of each pass, where no other micro-batch runs beside
    # Of a block of a layer that was measured as a whole, with launches and hooks; NaN where it was not.
    is_whole: Bools
    again_s: Floats  # recomputing it
    core_again_s: Floats
    weight_s: Floats  # gradients of its weights, where a schedule takes them apart
    split_s: Floats  # what that adds

    @property
    def passes_s(self) -> tuple[Floats, Floats]:
        """Kernels and tensor-parallel collectives, forward and backward."""
        return self.kernels.forward_s + self.tp[0], self.kernels.backward_s + self.tp[1]

    def take(self, which: Ints) -> _Parts:
        """Those of the plans at the given indices."""
        arrays = {one.name: getattr(self, one.name) for one in fields(self)}
        kernels, tp, cp = arrays.pop("kernels"), arrays.pop("tp"), arrays.pop("cp")
        return _Parts(
            kernels=kernels.take(which),
            tp=(tp[0][which], tp[1][which]),
            cp=(cp[0][which], cp[1][which]),
            **{name: value[which] for name, value in arrays.items()},
        )


def block_costs(problem: Problem, batch: PlanBatch, links: Links | None = None) -> dict[Block, BlockCost]:
    """The cost of every kind of block that the model has; `links` are the problem's, if they are known."""
    links, places = links or Links.of(problem), groups(batch)
    some, like = batch.distinct(*KERNEL_AXES, "tp_overlap")
    few = batch.take(some)
    tp_s, shapes = _tp_link_s(problem, few, links), block_shapes(problem.model)
    parts = {block: _parts(problem, few, block, shape, links, tp_s) for block, shape in shapes.items()}
    if all(block in parts for block in LAYER):
        parts |= _as_measured(problem, few, parts)
    shared = shared_states(problem, batch)
    costs: dict[Block, BlockCost] = {}
    lags: dict[Block, _Lags] = {}
    # Experts come last: their traffic may hide under the attention of another micro-batch.
    for block, shape in sorted(shapes.items(), key=lambda item: item[0] is Block.MOE):
        beside_s = next((cost.work_s for kind, cost in costs.items() if kind in ATTENTION_BLOCKS), np.zeros(len(batch)))
        own = parts[block].take(like)
        costs[block], lags[block] = _block_cost(problem, batch, block, shape, own, links, places, beside_s, shared)
    return _with_launches(problem.model, costs, lags)


def _as_measured(problem: Problem, batch: PlanBatch, parts: dict[Block, _Parts]) -> dict[Block, _Parts]:
    """The blocks of a layer that was measured as a whole: all their passes take as much longer as it does."""
    times = layer_times(problem, batch)
    if times is None:
        return {}
    sums = [add_up(parts[block].passes_s[at] for block in LAYER) for at in (0, 1)]
    weights = add_up(parts[block].kernels.gemm_weight_s for block in LAYER)
    longer = (
        np.where(times.known, times.forward_s / sums[0], 1.0),
        np.where(times.known, times.backward_s / sums[1], 1.0),
    )
    found = {}
    for block in LAYER:
        part = parts[block]
        share = np.where(times.known, part.passes_s[1] / sums[1], np.nan)
        of_weights = part.kernels.gemm_weight_s / weights
        kernels = part.kernels.scaled(*longer)
        apart = times.known & ~np.isnan(times.halves_s[1])
        found[block] = replace(
            part,
            kernels=kernels,
            tp=(longer[0] * part.tp[0], longer[1] * part.tp[1]),
            tp_inputs=longer[0] * part.tp_inputs,
            is_whole=times.known,
            again_s=share * times.again_s,
            core_again_s=np.where(block in ATTENTION_BLOCKS, times.core_again_s, 0.0 * share),
            weight_s=np.where(apart, of_weights * times.halves_s[1], kernels.gemm_weight_s),
            split_s=np.where(apart, of_weights * times.split_s, 0.0),
        )
    return found


def _parts(
    problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape, links: Links, tp_s: tuple[Floats, ...]
) -> _Parts:
    places, zeros, none = groups(batch), np.zeros(len(batch)), np.full(len(batch), np.nan)
    kernels = kernel_times(problem, batch, block, shape)
    tp, tp_inputs = (zeros, zeros), zeros
    if has_tp_traffic(block, shape):
        tp = _tp_s(problem, batch, shape, tp_s, kernels, _column_weights_s(shape, kernels))
        tp_inputs = tp[0] * np.divide(tp_s[0], tp_s[1], out=zeros.copy(), where=tp_s[1] > 0)
    cp = zeros, zeros
    if block in ATTENTION_BLOCKS:
        attention_s = (kernels.attention_forward_s, kernels.attention_backward_s)
        cp = _cp_s(problem, batch, links, places, attention_s)
    ep = _ep_s(problem, batch, links, places) if block is Block.MOE else zeros
    return _Parts(
        kernels=kernels,
        tp=tp,
        tp_inputs=tp_inputs,
        cp=cp,
        ep=ep,
        is_whole=np.zeros(len(batch), dtype=np.bool_),
        again_s=none,
        core_again_s=none,
        weight_s=kernels.gemm_weight_s,
        split_s=zeros,
    )


def local_parameters(batch: PlanBatch, shape: BlockShape) -> tuple[Floats, Floats]:
    """(dense, expert) parameters of a block that one rank holds, in elements."""
    dense = shape.num_norm_parameters + shape.num_other_parameters / batch.tp
    expert = np.zeros(len(batch))
    for linear in shape.linears:
        inputs, outputs = local_sizes(linear, batch)
        held = (inputs + linear.has_bias) * outputs
        if linear.is_expert:
            expert = expert + held * linear.copies / batch.ep
        else:
            dense = dense + held
    return dense, expert


def layer_parameters(problem: Problem, batch: PlanBatch) -> Floats:
    """Parameters of a layer of attention and MLP that one rank holds."""
    shapes = block_shapes(problem.model)
    return add_up(add_up(local_parameters(batch, shapes[block])) for block in LAYER)


def _tp_link_s(problem: Problem, batch: PlanBatch, links: Links) -> tuple[Floats, ...]:
    """Tensor-parallel collectives of one block: (what brings the inputs of the forward pass, all of that pass, the
    gather of the backward pass, its reduction).

    With sequence parallelism an all-gather before and a reduce-scatter after the block's matrices, in both passes;
    the further all-gather of the inputs for the weight gradient hides under the data gradient.  Without it one
    all-reduce a pass.  Source: Megatron-LM core/tensor_parallel/layers.py; Korthikanti et al., arXiv:2205.05198.
    """
    buffer, group = tp_buffer_bytes(problem, batch), groups(batch).tp
    inputs = outputs = reduce = np.zeros(len(batch))
    if batch.sp.any():
        inputs = np.where(batch.sp, links.all_gather_s(*group, tp_gathered_bytes(problem, batch)), 0.0)
        outputs = inputs  # the gradients of a block's outputs are gathered as its inputs are
        reduce = links.reduce_scatter_s(*group, buffer)
    if not batch.sp.all():
        reduce = np.where(batch.sp, reduce, links.all_reduce_s(*group, buffer))
    return inputs, inputs + reduce, outputs, reduce


def ends_tp_s(
    problem: Problem, batch: PlanBatch, links: Links, head_weight_s: Floats
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """Tensor-parallel collectives in front of the layers and behind them that show: (forward, backward) of each.

    Every rank looks up its rows of the table, whose sum is scattered under sequence parallelism; its gradient is
    gathered.  The head gathers its inputs, whose gradient is scattered, and the vocabulary-parallel loss reduces three
    fp32 numbers a token: the largest logit, that of the label, and the sum of the exponentials.  Without sequence
    parallelism the sums are all-reduces, and nothing is gathered.  The reduction of the head's inputs' gradient runs
    beside its weight gradient, which takes `head_weight_s`.  Ends that were measured have all of it in them.
    Source: Megatron-LM core/tensor_parallel/layers.py and cross_entropy.py; nanotron
    parallel/tensor_parallel/functional.py.
    """
    none = np.zeros(len(batch))
    has_table, has_head = (not measures_end(problem, end) for end in ("embedding", "head"))
    if (batch.tp == 1).all() or not (has_table or has_head):
        return (none, none), (none, none)
    group, hidden = groups(batch).tp, tp_buffer_bytes(problem, batch)
    host, far = _meeting_s(problem, batch)
    wait = _hosts_wait_s(problem, batch)
    meeting = host + far + wait
    gather = reduce = none
    if batch.sp.any():
        gather = np.where(batch.sp, links.all_gather_s(*group, hidden) + meeting, 0.0)
        reduce = links.reduce_scatter_s(*group, hidden)
    if not batch.sp.all():
        reduce = np.where(batch.sp, reduce, links.all_reduce_s(*group, hidden))
    reduce = reduce + meeting
    if problem.framework.memory.shards_logits:
        numbers = links.all_reduce_s(*group, BYTES_PER_REDUCED_TOKEN * rank_tokens(problem, batch))
        loss = LOSS_REDUCTIONS * (numbers + far + wait) + host  # they follow one another, and the hosts have met
    else:
        logits = problem.training.element_bytes * rank_tokens(problem, batch) * padded_vocab(problem, batch)
        loss = links.all_gather_s(*group, logits) + meeting
    tables, heads = int(has_table), int(has_head) * (1 + problem.model.num_mtp_layers)
    beside = np.minimum(heads * reduce, head_weight_s) if problem.framework.overlap.tp_reduce_overlap else none
    head = heads * (gather + loss), heads * reduce - (1.0 - CONTENTION_SHARE) * beside
    return (tables * reduce, tables * gather), head


def shared_scales_s(problem: Problem, batch: PlanBatch, links: Links) -> Floats:
    """Time at the end of every pass through a chunk in which ranks agree on the scales of their 8-bit tensors.

    With scales of past steps all ranks of a stage reduce the largest values that they have seen.
    Source: Transformer Engine pytorch/quantization.py, reduce_and_update_fp8_tensors; Megatron-LM
    core/parallel_state.py, get_amax_reduction_group.
    """
    agrees = (batch.precision == Precision.FP8.code) & (not problem.framework.kernels.scales_by_own_largest)
    if not agrees.any():
        return np.zeros(len(batch))
    return np.where(agrees, links.short_all_reduce_s(np.ones_like(batch.tp), batch.tp * batch.cp * batch.dp), 0.0)


def ahead_s(problem: Problem, batch: PlanBatch, head_s: Floats) -> Floats:
    """By how much the host is ahead of the device when head and loss are over, both passes of which, with their
    collectives, take `head_s`.

    They are few long kernels, of which the host launches as many as of a block.  In a pipeline it waits for messages,
    and with experts for the device in every layer, so that what it is ahead counts as nothing.
    """
    framework = problem.framework
    launched = framework.host.host_s_per_block_forward + framework.host.host_s_per_block_backward
    runs_ahead = (batch.pp == 1) & (Block.MOE not in block_shapes(problem.model))
    return np.where(runs_ahead, np.maximum(head_s - problem.calibration.host * launched, 0.0), 0.0)


def _meeting_s(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """What a tensor-parallel collective waits for: (the host of every rank to launch it, members on other nodes)."""
    framework, host = problem.framework, problem.calibration.host
    leaves = batch.tp > problem.cluster.levels[-1].num_devices
    far = np.where(leaves, host * framework.network.cross_node_s_per_member * (batch.tp - 1), 0.0)
    return np.where(batch.tp > 1, host * framework.host.host_s_per_collective, 0.0), far


def _column_weights_s(shape: BlockShape, kernels: KernelTimes) -> Floats:
    """Time of the weight gradients of the matrices that are cut along their outputs; as of the forward products."""
    columns = {linear.name for linear in shape.linears if linear.split == "column"}
    forward = add_up(time for name, time in kernels.matrix_forward_s.items() if name in columns)
    return kernels.gemm_weight_s * forward / kernels.gemm_forward_s


def _hosts_wait_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Time of the hosts in front of a tensor-parallel collective in pipelines that cross nodes."""
    framework, domain = problem.framework, problem.cluster.levels[-1].num_devices
    waits = framework.network.cross_node_pipeline_s_per_tp * batch.tp
    waits = waits + framework.network.cross_node_pipeline_s_per_far_tp * np.maximum(batch.tp - domain, 0)
    crosses = (batch.pp > 1) & (batch.num_devices > domain) & (batch.tp > 1)
    return np.where(crosses, problem.calibration.host * waits, 0.0)


def _tp_s(
    problem: Problem,
    batch: PlanBatch,
    shape: BlockShape,
    link_s: tuple[Floats, ...],
    kernels: KernelTimes,
    columns_s: Floats,
) -> tuple[Floats, Floats]:
    """(forward, backward) exposed tensor-parallel collectives of one block, which take `link_s` alone.

    The reduction of the inputs' gradient runs beside the weight gradients of the matrices that are cut along their
    outputs, which take `columns_s`.  Source: Megatron-LM core/tensor_parallel/layers.py,
    LinearWithGradAccumulationAndAsyncCommunication; Transformer Engine pytorch/module/layernorm_linear.py.
    """
    framework = problem.framework
    forward, gather, reduce = link_s[1:]
    meeting = add_up(_meeting_s(problem, batch))
    meetings = np.where(batch.sp, 2, 1) * meeting
    beside = np.minimum(reduce + meeting, columns_s) if framework.overlap.tp_reduce_overlap else np.zeros_like(reduce)
    plain = forward + meetings, gather + reduce + meetings - (1.0 - CONTENTION_SHARE) * beside
    if framework.overlap.tp_overlap_pieces:
        pieces = _in_pieces_s(problem, batch, shape, link_s, kernels)
        overlapped = pieces[0], pieces[1] + reduce - (1.0 - CONTENTION_SHARE) * np.minimum(beside, reduce)
    else:
        # A share of the collectives runs beside the same share of the products, and what hides is no longer than these.
        alone = gather + np.maximum(reduce - beside, 0.0)
        overlapped = (
            plain[0] - framework.overlap.tp_overlap_share * np.minimum(forward, kernels.gemm_forward_s),
            plain[1] - framework.overlap.tp_overlap_share * np.minimum(alone, kernels.gemm_backward_s),
        )
    return np.where(batch.tp_overlap, overlapped[0], plain[0]), np.where(batch.tp_overlap, overlapped[1], plain[1])


def _in_pieces_s(
    problem: Problem, batch: PlanBatch, shape: BlockShape, link_s: tuple[Floats, ...], kernels: KernelTimes
) -> tuple[Floats, Floats]:
    """(forward, backward without its reduction) of collectives whose products run in pieces, and what these lose by it.

    Gathers go around a ring beside the products of what has come, on copy engines.  Reductions take compute units from
    the product of the next piece.  Few rows are slower; the tails of pieces overlap, as they run in several streams.
    Source: Transformer Engine common/comm_gemm_overlap; "ring_exchange" and "pipeline" of NeMo-Framework-Launcher
    26e42fa, launcher_scripts/conf/training/tp_overlap, where rings of 8 take two pieces at a time ("aggregate").
    """
    inputs, forward, gather, _ = link_s
    reduce, share, curve = forward - inputs, problem.framework.overlap.tp_overlap_share, problem.device.gemm
    splits = np.where(batch.tp > 1, problem.framework.overlap.tp_overlap_pieces, 1)
    rows = rank_tokens(problem, batch) + curve.half_m

    def times_s(split: str, pieces: Ints) -> tuple[Floats, Floats]:
        """Of the forward products of the matrices that are cut so, and what they lose in so many pieces."""
        names = [linear.name for linear in shape.linears if linear.split == split]
        whole = add_up(kernels.matrix_forward_s[name] for name in names)
        return whole, (pieces - 1) * (whole * curve.half_m / rows + len(names) * curve.start_s)

    ring = np.minimum(batch.tp, splits)
    column, lost = times_s("column", ring)
    row, lost_backward = times_s("row", ring)
    occupied = REDUCING_UNITS / problem.device.compute_units
    lost = lost + times_s("row", splits)[1] + occupied * np.minimum(reduce, row)
    return (
        np.maximum(inputs - column, 0.0) + reduce - share * np.minimum(reduce, row) + lost,
        np.maximum(gather - row, 0.0) + lost_backward,
    )


def _cp_s(
    problem: Problem, batch: PlanBatch, links: Links, places: Groups, attention_s: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """(forward, backward) exposed context-parallel traffic of one attention block.

    Ring: keys and values travel around while blocks of attention are computed, only what is longer shows, and the
    first block's transfer.  All-to-all (Ulysses, arXiv:2309.14509): q, k, v and the output, all exposed.
    """
    if (batch.cp == 1).all():
        return np.zeros(len(batch)), np.zeros(len(batch))
    kv, heads = cp_buffer_bytes(problem, batch)
    if problem.framework.kernels.expands_kv:
        return _gathered_cp_s(batch, links, places, heads, attention_s)
    ring = links.all_gather_s(*places.cp, kv * batch.cp)
    steps = np.maximum(batch.cp - 1, 1)
    hidden_forward = attention_s[0] * (batch.cp - 1) / batch.cp
    hidden_backward = attention_s[1] * (batch.cp - 1) / batch.cp
    ring_forward = np.maximum(ring - hidden_forward, ring / steps)
    ring_backward = np.maximum(2 * ring - hidden_backward, 2 * ring / steps)
    exchange = links.all_to_all_s(*places.cp, heads) + links.all_to_all_s(*places.cp, kv)
    is_ring = batch.cp_kind == ContextParallelKind.RING.code
    forward = np.where(is_ring, ring_forward, exchange)
    backward = np.where(is_ring, ring_backward, exchange)
    return np.where(batch.cp > 1, forward, 0.0), np.where(batch.cp > 1, backward, 0.0)


def _gathered_cp_s(
    batch: PlanBatch, links: Links, places: Groups, kv: Floats, attention_s: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """(forward, backward) exposed traffic where ranks gather all keys and values while they attend to their own.

    Their fp32 gradients go around the ring beside the next block of attention, those of the last one alone.
    Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py.
    """
    gather = links.all_gather_s(*places.cp, kv * batch.cp)
    hop = 2.0 * gather / np.maximum(batch.cp - 1, 1)
    forward, backward = (np.maximum(gather - whole / batch.cp, 0.0) for whole in attention_s)
    late = (batch.cp - 1) * np.maximum(hop - attention_s[1] / batch.cp, 0.0)
    return np.where(batch.cp > 1, forward, 0.0), np.where(batch.cp > 1, backward + late + hop, 0.0)


def _ep_s(problem: Problem, batch: PlanBatch, links: Links, places: Groups) -> Floats:
    """Dispatch and combine of one MoE block in one pass: two all-to-all of the routed tokens."""
    dispatched, combined, gathered = ep_buffer_bytes(problem, batch)
    copies = dispatched_copies(problem)
    dispatch = links.all_to_all_s(*places.ep, dispatched, copies)
    exchange = dispatch + links.all_to_all_s(*places.ep, combined, copies)
    # Expert tensor parallelism gathers the tokens of its group before the experts and reduces after them.
    ones = np.ones(len(batch), dtype=np.int64)
    spread = links.all_gather_s(ones, batch.etp, gathered) + links.reduce_scatter_s(ones, batch.etp, gathered)
    host = problem.calibration.host * problem.framework.host.host_s_per_collective
    return exchange + spread + 2 * host * (batch.ep > 1)


def _unpaired_share(batch: PlanBatch) -> Floats:
    """Share of a step's passes that no pass of another micro-batch runs beside, on the first stage.

    Those of the warm-up, and one more: the first forward and the last backward are alone without a pipeline too
    (`modelling` B4, E5; Megatron-LM core/pipeline_parallel/combined_1f1b.py).
    """
    warmup = 2 * (batch.pp - 1) + (batch.vp - 1) * batch.pp
    return np.minimum((warmup + 1) / (batch.vp * batch.num_microbatches), 1.0)


def _overlapped_ep_s(problem: Problem, batch: PlanBatch, ep_s: Floats, work_s: Floats) -> Floats:
    """What shows in one pass of expert traffic that runs beside another micro-batch's layer.

    Both passes of a layer have `work_s` to hide 2 `ep_s` under.  What hides costs the compute units that its kernels
    occupy.
    """
    device, occupied = problem.cluster.device, problem.framework.experts.expert_compute_units
    hidden = np.minimum(ep_s, work_s / 2)
    paired = ep_s - hidden * (1.0 - min(occupied / device.compute_units, 1.0))
    alone = _unpaired_share(batch)
    return np.where(batch.ep_overlap, alone * ep_s + (1.0 - alone) * paired, ep_s)


def _experts_wait_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Time in one pass of a MoE block that the device waits for the host to see the routing and launch the experts."""
    framework, moe = problem.framework, problem.model.moe
    assert moe is not None
    waits = framework.experts.moe_sync_s + framework.experts.s_per_local_expert * moe.num_experts / batch.ep
    is_static = framework.experts.drops_tokens | (batch.ep_overlap & (not framework.experts.syncs_overlapped_experts))
    return np.where(is_static, 0.0, problem.calibration.host * waits)


def fsdp_s(
    problem: Problem, batch: PlanBatch, links: Links, places: Groups, dense: Floats, expert: Floats
) -> tuple[Floats, Floats]:
    """(gathers of the forward pass, gathers and reductions of the backward pass) of a unit's parameters, a micro-batch.

    zero3 gathers the weights in both passes and reduces the gradients in every micro-batch, except in a pipeline whose
    framework keeps the weights between micro-batches: there once a step.  zero2 only reduces, if the framework does so
    in every micro-batch.
    """
    framework = problem.framework
    is_zero3 = batch.sharding == Sharding.ZERO3.code
    is_zero2 = (batch.sharding == Sharding.ZERO2.code) & framework.network.zero2_reduces_every_microbatch
    forward, backward = np.zeros(len(batch)), np.zeros(len(batch))
    rows = np.flatnonzero(is_zero3 | is_zero2)
    if not len(rows):
        return forward, backward
    is_zero3, dense, expert = is_zero3[rows], dense[rows], expert[rows]
    shard, expert_shard = ((pair[0][rows], pair[1][rows]) for pair in (places.shard, places.expert_shard))
    gaps = Gaps(places.gaps.run[rows], places.gaps.step[rows]) if places.gaps else None
    element = problem.training.element_bytes
    gather = links.all_gather_s(*shard, element * dense, gaps)
    gather = gather + links.all_gather_s(*expert_shard, element * expert)
    reduce = links.reduce_scatter_s(*shard, problem.bytes_per_reduced_grad * dense, gaps)
    reduce = reduce + links.reduce_scatter_s(*expert_shard, problem.bytes_per_reduced_grad * expert)
    once = ((batch.pp > 1) & (not framework.network.zero3_regathers_in_pipeline))[rows]
    times = np.where(once, 1.0 / batch.num_microbatches[rows], 1.0)
    forward[rows] = np.where(is_zero3, gather * times, 0.0)
    backward[rows] = np.where(is_zero3, np.where(once, 0.0, gather) + reduce * times, reduce)
    return forward, backward


def copied_s(problem: Problem, batch: PlanBatch, parameters: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) time to copy gathered weights into tensors and gradients into the buffer that is reduced.

    The passes wait for both.  Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    framework = problem.framework
    is_zero3 = batch.sharding == Sharding.ZERO3.code
    is_zero2 = (batch.sharding == Sharding.ZERO2.code) & framework.network.zero2_reduces_every_microbatch
    stays = is_zero3 & (batch.pp > 1) & (not framework.network.zero3_regathers_in_pipeline)
    copied = np.where(stays, parameters / batch.num_microbatches, parameters)
    weights = framework.kernels.bytes_copied_per_gathered * copied * is_zero3
    grads = framework.kernels.bytes_copied_per_reduced * copied * (is_zero3 | is_zero2)
    return memory_bound_s(problem, weights), memory_bound_s(problem, np.where(stays, 0.0, weights) + grads)


def _never_repeated_s(framework: Framework, block: Block, parts: _Parts) -> Floats:
    """What recomputing a whole layer leaves out of one block: the last matrix and what travels behind it."""
    if not (framework.kernels.recompute_stops_early and block is Block.MLP):
        return np.zeros_like(parts.tp_inputs)
    return parts.kernels.matrix_forward_s["fc2"] + parts.tp[0] - parts.tp_inputs


def _block_cost(
    problem: Problem,
    batch: PlanBatch,
    block: Block,
    shape: BlockShape,
    parts: _Parts,
    links: Links,
    places: Groups,
    beside_s: Floats,
    shared: SharedStates,
) -> tuple[BlockCost, _Lags]:
    framework, kernels = problem.framework, parts.kernels
    dense, expert = local_parameters(batch, shape)
    zeros = np.zeros(len(batch))
    # A layer that was measured as a whole adds up its gradients.
    accumulated = problem.bytes_moved_per_accumulated_grad * (dense + expert) * ~parts.is_whole
    copies = copied_s(problem, batch, dense + expert)
    ep, wait = zeros, zeros
    if block is Block.MOE:
        ep = _overlapped_ep_s(problem, batch, parts.ep, kernels.total_s + beside_s)
        wait = _experts_wait_s(problem, batch)
    forward = {
        "gemm": kernels.gemm_forward_s,
        "attention": kernels.attention_forward_s,
        "memory_bound": kernels.memory_forward_s,
        "recompute": zeros,
        "tp_communication": parts.tp[0],
        "cp_communication": parts.cp[0],
        "ep_communication": ep,
    }
    backward = {
        "gemm": kernels.gemm_backward_s,
        "attention": kernels.attention_backward_s,
        "memory_bound": kernels.memory_backward_s + memory_bound_s(problem, accumulated) + copies[1],
        "recompute": zeros,
        "tp_communication": parts.tp[1],
        "cp_communication": parts.cp[1],
        "ep_communication": ep,
    }
    forward_s = add_up(forward.values())
    forward["memory_bound"] = forward["memory_bound"] + copies[0]  # which recomputation does not repeat
    spared = _never_repeated_s(framework, block, parts)
    backward["recompute"] = selective_s(problem, batch, block, kernels, forward_s, parts.tp_inputs, spared)
    if parts.is_whole.any():
        is_known = repeats_core_only(batch) & ~np.isnan(parts.core_again_s)
        backward["recompute"] = np.where(is_known, parts.core_again_s, backward["recompute"])
    gathers, reductions = fsdp_s(problem, batch, links, places, dense, expert)
    host_forward, host_backward = _launch_s(problem, batch, block, parts.is_whole)
    repeated = backward | {"recompute": forward_s - spared}
    lag = _finish(framework, forward, gathers, host_forward, wait)
    late = again_late = _finish(framework, backward, reductions, host_backward, wait)
    repeat = dict.fromkeys(TERMS, zeros)
    if (batch.recompute == FULL).any():
        again = problem.calibration.host * framework.host.host_s_per_block_forward * ~parts.is_whole
        again = again * (framework.experts.host_factor_moe if block is Block.MOE else 1.0)
        again_late = _finish(framework, repeated, reductions, host_backward + again, 2 * wait)
        repeat = {name: repeated[name] - backward[name] for name in TERMS}
        if parts.is_whole.any():
            is_known = ~np.isnan(parts.again_s)
            repeat = {name: np.where(is_known, 0.0, value) for name, value in repeat.items()}
            repeat["recompute"] = np.where(is_known, parts.again_s, repeat["recompute"])
    if shared.known.any():
        share = (dense + expert) / layer_parameters(problem, batch)
        forward["fsdp_communication"] = np.where(shared.known, 0.0, forward["fsdp_communication"])
        backward["fsdp_communication"] = np.where(shared.known, share * shared.every_s, backward["fsdp_communication"])
    cost = BlockCost(
        forward_s=forward, backward_s=backward, repeat_s=repeat, weight_s=parts.weight_s, split_s=parts.split_s
    )
    return cost, _Lags(forward_s=lag, backward_s=late, repeated_s=again_late, waits=wait > 0)


def _launch_s(problem: Problem, batch: PlanBatch, block: Block, is_whole: Bools) -> tuple[Floats, Floats]:
    """(forward, backward) time of the host to launch one block, where it was not measured with its layer."""
    framework = problem.framework
    host = problem.calibration.host * (framework.experts.host_factor_moe if block is Block.MOE else 1.0) * ~is_whole
    wait = _hosts_wait_s(problem, batch) * ~is_whole
    forward = np.where(batch.sp, 2, 1) * wait
    backward = np.where(batch.sp, 2 + framework.memory.regathers_norm_output, 1) * wait
    return (
        host * framework.host.host_s_per_block_forward + forward,
        host * framework.host.host_s_per_block_backward + backward,
    )


def _finish(framework: Framework, terms: dict[str, Floats], traffic: Floats, launch: Floats, wait: Floats) -> Floats:
    """By how much the launches of one pass take longer than the device; adds what shows of its parameter traffic.

    As `launch` the pass gets what waits for the host anyway.
    """
    busy = add_up(terms.values())
    # The longer of computing and moving shows, and a part of the shorter one (first unit, contention).
    terms["fsdp_communication"] = np.maximum(traffic - busy, 0.0) + framework.overlap.fsdp_unhidden_share * np.minimum(
        traffic, busy
    )
    terms["launch"] = wait
    return launch - wait - busy - terms["fsdp_communication"]


def _with_launches(model: ModelSpec, costs: dict[Block, BlockCost], lags: dict[Block, _Lags]) -> dict[Block, BlockCost]:
    """The costs with what the device waits for launches (`modelling` C6).

    The host runs ahead: within a layer, a block that takes the device longer makes up for one that is launched late.
    Not where the host waits for the device in the layer, nor, simplified, where layers differ.
    """
    sorts = {*model.layers, *([model.mtp_layer] if model.num_mtp_layers else [])}
    waits = np.any([lag.waits for lag in lags.values()], axis=0) | (len(sorts) > 1)

    def shown(name: str) -> dict[Block, Floats]:
        late = {block: np.maximum(getattr(lag, name), 0.0) for block, lag in lags.items()}
        alone = add_up(late.values())
        together = np.maximum(add_up(getattr(lag, name) for lag in lags.values()), 0.0)
        share = np.where(waits, 1.0, np.divide(together, alone, out=np.zeros_like(alone), where=alone > 0))
        return {block: share * value for block, value in late.items()}

    forward, backward, repeated = (shown(name) for name in ("forward_s", "backward_s", "repeated_s"))
    return {
        block: replace(
            cost,
            forward_s=cost.forward_s | {"launch": cost.forward_s["launch"] + forward[block]},
            backward_s=cost.backward_s | {"launch": cost.backward_s["launch"] + backward[block]},
            repeat_s=cost.repeat_s | {"launch": cost.repeat_s["launch"] + repeated[block] - backward[block]},
        )
        for block, cost in costs.items()
    }
