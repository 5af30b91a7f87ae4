"""End of a step: gradient reduction, optimizer step and parameter gather, and their exposed parts.

Formulas: `modelling` C7, E5.  Arrays of stages have the shape (plans, stages).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows, add_up
from autoplan.cost.collectives.collective import Collective, LinkTimes
from autoplan.cost.collectives.sharded_states import HOST_BYTES_PER_S
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.measured import find, host_copy_s
from autoplan.cost.kernels.memory_bound import memory_bound_s
from autoplan.cost.kernels.orthogonalise import orthogonalise_s
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.links import contention_share
from autoplan.cost.network.process_groups import process_groups
from autoplan.cost.parameters import StageParameters
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.cost.state_types import (
    HALF_BYTES,
    accumulates_full_gradients,
    grad_bytes,
    parameters_on_host,
    reduced_grad_bytes,
    share_on_host,
    update_moved_bytes,
)
from autoplan.spec.enums import Precision, Schedule, Sharding
from autoplan.spec.framework import Framework
from autoplan.spec.operations import Operation
from autoplan.spec.optimizers import GATHERED_MOMENTA_SHARE, TRAITS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

_REDUCTIONS: tuple[Operation, ...] = ("reduce_scatter", "all_reduce")


def _weight_tensors(problem: Problem, blocks: StageBlocks) -> Floats:
    """Number of weight tensors on every stage: matrices and norms of its blocks, embedding, final norm, head."""
    shapes = block_shapes(problem.model, problem.training.finetuning)
    tensors = add_up(count * _num_tensors(problem, shapes[block]) for block, count in blocks.count.items())
    tensors = tensors + blocks.at_last(np.where(blocks.is_last[:, 0] & problem.model.tied_embeddings, 1.0, 2.0))
    tensors[:, 0] += 1
    return tensors


def _num_tensors(problem: Problem, shape: BlockShape) -> int:
    norms = 0 if shape.is_frozen else problem.model.norms_per_block
    return sum(not linear.is_frozen for linear in shape.linears) + norms


def _reduce_buckets(framework: Framework, parameters: Floats) -> Floats:
    """Number of consecutive all-reduces for the gradients of this many unsharded parameters."""
    if not framework.network.reduce_bucket_bytes:
        return np.ones_like(parameters)
    return np.maximum(np.ceil(HALF_BYTES * parameters / framework.network.reduce_bucket_bytes), 1.0)


def _hosts_wait_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Host synchronisation time before a data-parallel collective in pipelines across nodes: shape (plans, 1)."""
    crosses = (batch.pp > 1) & (batch.num_devices > problem.cluster.levels[-1].num_devices)
    members = np.where(batch.cp * batch.dp > 1, batch.cp * batch.dp, 0)
    waits = problem.calibration.host * problem.framework.network.cross_node_pipeline_s_per_dp * members * crosses
    return waits[:, None]


class EndOfStep(NamedTuple):
    """Collectives of gradients and parameters after the passes of a step.  Arrays: (plans, stages)."""

    reduce_copies: Collective  # over all replicas of the parameters, if nothing is sharded
    reduce_expert_copies: Collective
    reduce: Collective  # over the ranks that share one sharded copy
    reduce_experts: Collective
    reduce_across: Collective  # over the ranks with the same shard
    gather: Collective
    gather_experts: Collective


def end_of_step(problem: Problem, batch: PlanBatch, parameters: StageParameters) -> EndOfStep:
    """Describe the collectives of gradients and parameters of every stage at the end of a step."""
    framework, groups, kind = problem.framework, process_groups(batch), batch.sharding[:, None]
    parameters = parameters.trained
    dense, expert, wire = parameters.dense, parameters.expert, reduced_grad_bytes(problem, batch)[:, None]
    buckets = _reduce_buckets(framework, dense)
    is_plain, is_zero1, is_zero2 = (kind == word.code for word in (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2))
    reduces_once = is_zero1 | (is_zero2 & (not framework.network.zero2_reduces_every_microbatch))
    all_reduces = framework.network.zero1_grad_all_reduce
    reduction: Operation = "all_reduce" if all_reduces else "reduce_scatter"
    # A ring sends twice as much where every rank gets the whole sum.
    sent = wire * np.where(accumulates_full_gradients(problem, batch) & (not all_reduces), 2.0, 1.0)[:, None]
    element, narrow = problem.training.element_bytes, _gathered_bytes(problem, batch)[:, None]
    orthogonalises = TRAITS[problem.training.optimizer].orthogonalises
    momenta = GATHERED_MOMENTA_SHARE * (wire + narrow) if orthogonalises else 0.0 * narrow
    gathered, gathers = element * parameters.ends + (narrow + momenta) * (dense - parameters.ends), is_zero1 | is_zero2
    shard = dense / groups.shard.size[:, None] + expert / groups.expert_shard.size[:, None]

    def at_end(
        communicator: str, operation: Operation, group: ProcessGroup, buffer_bytes: Floats, runs: Bools | Floats
    ) -> Collective:
        times = np.asarray(runs, dtype=np.float64)
        return Collective(communicator, operation, group.for_stages(), buffer_bytes, at_end=times)

    return EndOfStep(
        reduce_copies=at_end(
            "replicate", "all_reduce", groups.dense_copies, wire * dense / buckets, is_plain * buckets
        ),
        reduce_expert_copies=at_end("expert replicate", "all_reduce", groups.expert_copies, wire * expert, is_plain),
        reduce=at_end("shard", reduction, groups.shard, sent * dense, reduces_once),
        reduce_experts=at_end("expert shard", reduction, groups.expert_shard, sent * expert, reduces_once),
        # Replicas of a shard group reduce the shards that they have in common.
        reduce_across=at_end("replicate", "all_reduce", groups.replicate, wire * shard, ~is_plain),
        gather=at_end("shard", "all_gather", groups.shard, gathered, gathers),
        gather_experts=at_end("expert shard", "all_gather", groups.expert_shard, (narrow + momenta) * expert, gathers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfStepTimes:
    """Seconds of every stage at the end of a step, exposed or hidden: shape (plans, stages)."""

    reduce_s: Floats  # of gradients
    gather_s: Floats  # of parameters


def end_of_step_s(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: StageParameters, links: LinkTimes
) -> EndOfStepTimes:
    """Total time of gradient reduction and parameter gather, exposed or hidden."""
    framework, described = problem.framework, end_of_step(problem, batch, parameters)
    wait, dearer, kind = _hosts_wait_s(problem, batch), framework.network.sharded_wire_factor, batch.sharding[:, None]
    copies, expert_copies, first, first_experts, across, gathered, gathered_experts = (
        collective.seconds(links) for collective in described
    )
    buckets = _reduce_buckets(framework, parameters.trained.dense)
    plain = buckets * copies + buckets * wait + expert_copies
    zero1, zero2 = Sharding.ZERO1.code, Sharding.ZERO2.code
    once = (kind == zero1) | ((kind == zero2) & (not framework.network.zero2_reduces_every_microbatch))
    sharded = np.where(once, dearer * (first + first_experts) + wait + across, across)
    shards = process_groups(batch).shard.size
    pieces = _weight_tensors(problem, blocks) * np.where(shards > 1, shards, 0)[:, None]
    host_s = problem.calibration.host * framework.host.host_s_per_gathered_piece * pieces
    gather = dearer * (gathered + gathered_experts) + wait + host_s
    return EndOfStepTimes(
        reduce_s=np.where(kind == Sharding.NONE.code, plain, sharded),
        gather_s=np.where((kind == zero1) | (kind == zero2), gather, 0.0),
    )


def _gathered_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of a layer weight gathered from the optimizer's shard: shape (plans).

    Weights with one scale per tensor are sent quantised; those with block scales are gathered in 16 bits and then
    quantised, as both layouts are needed.
    Source: Megatron-LM core/distributed/param_and_grad_buffer.py, and reuse_grad_buf_for_mxfp8_param_ag.
    """
    is_narrow = (batch.precision == Precision.FP8.code) & batch.narrow_params
    return np.where(is_narrow, 1.0, problem.training.element_bytes)


def shown_reduce_s(
    problem: Problem, batch: PlanBatch, backward_s: Floats, first: FirstStage, reduce_s: Floats
) -> Floats:
    """Exposed time of the gradient reduction (`modelling` E5).

    An interleaved pipeline reduces a chunk after its last micro-batch, overlapped with the passes of the following
    chunks: the first chunk of a stage is exposed, and the time by which the others outlast those passes.  Otherwise the
    first stage overlaps its reduction with its own last backward pass.
    Source: Megatron-LM core/pipeline_parallel/schedules.py, grad_sync_func.
    """
    # If tensor parallelism leaves the scale-up domain, its collectives use the network throughout a pass.
    is_free = batch.tp <= problem.cluster.levels[-1].num_devices
    overlapped = (batch.grad_reduce_overlap & _can_hide_reduction(problem, batch) & is_free)[:, None]
    hidden_s = np.where(overlapped, _between_chunks_s(batch, backward_s), 0.0)
    last = np.broadcast_to(1.0 / _chunks(batch)[:, None], reduce_s.shape).copy()
    last[:, 0] = first.chunk_share(batch)
    late_s = np.maximum(reduce_s - hidden_s, np.where(overlapped, last, 1.0) * reduce_s)
    # Later stages end their backward passes earlier, by the time that the stages before them still need.  With split
    # passes they have gradients of weights left to compute until every stage is done.
    backward = backward_s / batch.vp[:, None]
    in_one = overlapped & (_chunks(batch) == 1)[:, None]
    is_plain = (batch.sharding == Sharding.NONE.code)[:, None]
    hiding = np.where(is_plain, problem.framework.overlap.all_reduce_overlap_share, 1.0)
    last_pass_s = np.where(in_one, hiding * backward_s, 0.0)
    slack = np.where(batch.splits_backward[:, None], last_pass_s, np.cumsum(backward, axis=1) - backward)
    slack[:, 0] = last_pass_s[:, 0]
    # The last bucket is ready only when the backward pass is over: it always shows, and is beside no other work.
    last_s = reduce_s[:, 0] / first.num_blocks
    exposed = np.maximum((late_s - slack).max(axis=1), last_s)
    contention = contention_share(problem, *_REDUCTIONS)
    return exposed + contention * np.minimum(reduce_s[:, 0] - last_s, slack[:, 0] + hidden_s[:, 0])


def shown_gather_s(
    problem: Problem, batch: PlanBatch, forward_s: Floats, first: FirstStage, gather_s: Floats
) -> Floats:
    """Exposed time of the parameter gather, which may overlap with the next forward passes, chunk by chunk."""
    hidden = batch.param_gather_overlap & problem.framework.overlap.param_gather_overlap
    first_gather_s, chunk_s = gather_s[:, 0], forward_s[:, 0] / _chunks(batch)
    between = _between_chunks_s(batch, forward_s)[:, 0]
    shown = np.maximum(first.chunk_share(batch) * first_gather_s, first_gather_s - between) - chunk_s
    return np.where(hidden, np.maximum(shown, first_gather_s / first.num_blocks), gather_s.max(axis=1))


def least_shown_s(problem: Problem, batch: PlanBatch, reduce_s: Floats, gather_s: Floats, most_blocks: Ints) -> Floats:
    """Lower bound on the exposed time of these collectives, on a first stage of at most `most_blocks`: (plans).

    Even if the last backward pass hides the reduction, its last bucket and the contention with the overlapped work are
    exposed.
    """
    last_bucket = 1.0 / np.maximum(most_blocks, 1)
    contention = contention_share(problem, *_REDUCTIONS)
    hidden = reduce_s * (last_bucket + contention * (1.0 - last_bucket))
    gathers_early = batch.param_gather_overlap & problem.framework.overlap.param_gather_overlap
    reduction = np.where(_can_hide_reduction(problem, batch), hidden, reduce_s)
    return reduction + gather_s * np.where(gathers_early, last_bucket, 1.0)


def _can_hide_reduction(problem: Problem, batch: PlanBatch) -> Bools:
    """Return whether the framework overlaps gradient reduction with the backward pass."""
    overlap = problem.framework.overlap
    sharded = overlap.sharded_reduce_overlap & ~accumulates_full_gradients(problem, batch)
    return np.where(batch.sharding == Sharding.NONE.code, overlap.all_reduce_overlap_share > 0, sharded)


def _chunks(batch: PlanBatch) -> Ints:
    """Chunks of every rank that a group of micro-batches passes through in turn."""
    return np.where(batch.schedule == Schedule.INTERLEAVED.code, batch.vp, 1)


def _between_chunks_s(batch: PlanBatch, pass_s: Floats) -> Floats:
    """Time from the end of a group's first chunk to that of its last; `pass_s`: all chunks, (plans, stages)."""
    chunks, group = _chunks(batch), np.minimum(batch.pp, batch.num_microbatches)
    return ((chunks - 1) / chunks * group)[:, None] * pass_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStage(Rows):
    """Blocks of the first stage of every plan, and the share of embedding and head in its parameters."""

    num_blocks: Floats
    ends_share: Floats  # share of embedding and head in its parameters

    @classmethod
    def of(cls, blocks: StageBlocks, parameters: StageParameters) -> FirstStage:
        """Return the first of laid-out stages."""
        parameters = parameters.trained
        num_parameters = np.maximum(
            parameters.dense[:, 0] + parameters.expert[:, 0], 1.0
        )  # a stage may have no adapters
        return cls(
            num_blocks=np.maximum(add_up(count[:, 0] for count in blocks.count.values()), 1),
            ends_share=parameters.ends[:, 0] / num_parameters,
        )

    def chunk_share(self, batch: PlanBatch) -> Floats:
        """Share of the stage's parameters in its first chunk."""
        return self.ends_share + (1.0 - self.ends_share) / _chunks(batch)


def _update_s(problem: Problem, batch: PlanBatch, updated: Floats, trained: Floats) -> Floats:
    """Optimizer time on a device that updates `updated` parameters and has gradients of `trained` ones."""
    moved = update_moved_bytes(problem, batch)
    update = memory_bound_s(problem, moved * updated)
    measured = find(problem.timings, "optimizer", ("bf16", "fp16", "fp32"), updated[:, None])
    # Measured updates use fp32 states.
    measured_share = moved / problem.framework.kernels.bytes_moved_per_update
    update = measured.scaled(measured_share / problem.device_share).otherwise(update)
    # Gradient buffers that persist between steps are zeroed.
    zeroed_bytes = 0.0 if problem.framework.memory.drops_grads else grad_bytes(problem, batch)
    return update + memory_bound_s(problem, zeroed_bytes * trained)


def optimizer_s(problem: Problem, batch: PlanBatch, updated: Floats, trained: Floats) -> Floats:
    """Optimizer time of each plan, on the device, on the host, or side by side on both: shape (plans).

    The device has its part queued when the host begins its own (Megatron-LM core/optimizer/cpu_offloading/
    hybrid_optimizer.py, step; DeepSpeed runtime/zero/stage3.py, backup_optimizer).
    """
    # On the host: copy gradients down, update, copy weights up.
    framework, link = problem.framework, problem.cluster.device.host_link_bytes_per_s
    # If weights are offloaded, too, gradients were copied with every micro-batch, and the next pass fetches the
    # weights.
    share = share_on_host(batch)
    is_sent = ~parameters_on_host(batch) * (share > 0) * updated
    down, up = is_sent * grad_bytes(problem, batch), is_sent * problem.training.element_bytes
    copied_s = host_copy_s(problem, "copy_to_host", down, down / link) + host_copy_s(
        problem, "copy_from_host", up, up / link
    )
    on_host = copied_s + updated * framework.kernels.bytes_moved_per_host_update / HOST_BYTES_PER_S
    on_device = _update_s(problem, batch, updated, trained) + orthogonalise_s(problem, batch, updated)
    return np.maximum(share * on_host, (1.0 - share) * on_device)
