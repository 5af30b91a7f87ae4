"""How long does the end of a step take: gradient reduction, the optimizer's step, the gather of parameters?

Formulas: `modelling` C7, E5.  Arrays of stages have the shape (plans, stages).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.kernels.arithmetic import block_shapes
from autoplan.cost.kernels.measured import find
from autoplan.cost.kernels.times import add_up, memory_bound_s
from autoplan.cost.memory.allocator_cache import GRAD_BYTES
from autoplan.cost.memory.stage_memory import StageParameters
from autoplan.cost.network.links import CONTENTION_SHARE
from autoplan.cost.network.rank_groups import Groups, groups
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.spec.enums import Offload, Precision, Schedule, Sharding
from autoplan.spec.framework import Framework
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.levels import Gaps


def _weight_tensors(problem: Problem, blocks: StageBlocks) -> Floats:
    """How many tensors of weights every stage holds: matrices and norms of its blocks, embedding, final norm, head."""
    shapes = block_shapes(problem.model)
    norms = problem.model.norms_per_block
    tensors = add_up(count * (len(shapes[block].linears) + norms) for block, count in blocks.count.items())
    tensors = tensors + blocks.at_last(np.where(blocks.is_last[:, 0] & problem.model.tied_embeddings, 1.0, 2.0))
    tensors[:, 0] += 1
    return tensors


def reduce_buckets(framework: Framework, parameters: Floats) -> Floats:
    """In how many all-reduces, one after another, the gradients of so many unsharded parameters travel."""
    if not framework.network.reduce_bucket_bytes:
        return np.ones_like(parameters)
    return np.maximum(np.ceil(GRAD_BYTES * parameters / framework.network.reduce_bucket_bytes), 1.0)


def _hosts_wait_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Time of the hosts in front of a data-parallel collective in pipelines that cross nodes: shape (plans, 1)."""
    crosses = (batch.pp > 1) & (batch.num_devices > problem.cluster.levels[-1].num_devices)
    members = np.where(batch.cp * batch.dp > 1, batch.cp * batch.dp, 0)
    waits = problem.calibration.host * problem.framework.network.cross_node_pipeline_s_per_dp * members * crosses
    return waits[:, None]


class Collectives(Protocol):
    """Reduces gradients and gathers parameters over groups: (stride, size, buffer in bytes, gaps) to seconds.

    Groups have the shape (plans, 1), buffers and times (plans, stages).
    """

    def all_reduce_s(  # noqa: D102
        self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None, /
    ) -> Floats: ...

    def all_gather_s(  # noqa: D102
        self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None, /
    ) -> Floats: ...

    def reduce_scatter_s(  # noqa: D102
        self, stride: Ints, size: Ints, buffer_bytes: Floats, gaps: Gaps | None = None, /
    ) -> Floats: ...


def reduction_s(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: StageParameters, links: Collectives
) -> tuple[Floats, Floats]:
    """(gradient reduction, parameter gather) of every stage at the end of a step, all of it: shape (plans, stages)."""
    is_sharded = batch.sharding > 0
    reduce = gather = blocks.zeros()
    if is_sharded.any():
        reduce, gather = _sharded_s(problem, batch, blocks, parameters, links)
    if not is_sharded.all():
        reduce = np.where(is_sharded[:, None], reduce, _unsharded_s(problem, batch, parameters, links))
    return reduce, gather


def _each(pair: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The groups of plans, for the buffers of all their stages: shape (plans, 1)."""
    return pair[0][:, None], pair[1][:, None]


def _gaps(places: Groups) -> Gaps | None:
    return Gaps(places.gaps.run[:, None], places.gaps.step[:, None]) if places.gaps else None


def _unsharded_s(problem: Problem, batch: PlanBatch, parameters: StageParameters, links: Collectives) -> Floats:
    """Gradient reduction among all copies of the parameters."""
    framework, places = problem.framework, groups(batch)
    dense, wire = parameters.dense, problem.bytes_per_reduced_grad
    buckets = reduce_buckets(framework, dense)
    time = buckets * links.all_reduce_s(*_each(places.dense_copies), wire * dense / buckets, _gaps(places))
    time = time + buckets * _hosts_wait_s(problem, batch)
    return time + links.all_reduce_s(*_each(places.expert_copies), wire * parameters.expert)


def _sharded_s(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: StageParameters, links: Collectives
) -> tuple[Floats, Floats]:
    """(reduction, gather) of plans that shard some of their states."""
    framework, places = problem.framework, groups(batch)
    wire, dearer = problem.bytes_per_reduced_grad, framework.network.sharded_wire_factor
    dense, expert, gaps = parameters.dense, parameters.expert, _gaps(places)
    shard, expert_shard, replicate = _each(places.shard), _each(places.expert_shard), _each(places.replicate)
    reduce_first = links.all_reduce_s if framework.network.zero1_grad_all_reduce else links.reduce_scatter_s
    first = reduce_first(*shard, wire * dense, gaps) + reduce_first(*expert_shard, wire * expert)
    wait = _hosts_wait_s(problem, batch)
    # Copies of a shard group reduce the shard that each holds.
    across = links.all_reduce_s(*replicate, wire * (dense / shard[1] + expert / expert_shard[1]))
    element, narrow = problem.training.element_bytes, gathered_bytes(problem, batch)[:, None]
    gather = links.all_gather_s(*shard, element * parameters.ends + narrow * (dense - parameters.ends), gaps)
    gather = gather + links.all_gather_s(*expert_shard, narrow * expert)

    kind = batch.sharding[:, None]
    zero1, zero2 = Sharding.ZERO1.code, Sharding.ZERO2.code
    once = (kind == zero1) | ((kind == zero2) & (not framework.network.zero2_reduces_every_microbatch))
    reduce = np.where(once, dearer * first + wait + across, across)
    pieces = _weight_tensors(problem, blocks) * np.where(places.shard[1] > 1, places.shard[1], 0)[:, None]
    host_s = problem.calibration.host * framework.host.host_s_per_gathered_piece * pieces
    return reduce, np.where((kind == zero1) | (kind == zero2), dearer * gather + wait + host_s, 0.0)


def gathered_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Of a weight of the layers on its way from the optimizer's shard, shape (plans): one scale's 8 bits stay narrow.

    Those with scales of blocks are gathered in 16 bits and quantised then: either copy is needed.
    Source: Megatron-LM core/distributed/param_and_grad_buffer.py, and reuse_grad_buf_for_mxfp8_param_ag.
    """
    is_narrow = (batch.precision == Precision.FP8.code) & ("fp8" in problem.framework.memory.narrow_weights)
    return np.where(is_narrow, 1.0, problem.training.element_bytes)


def shown_reduce_s(
    problem: Problem, batch: PlanBatch, backward_s: Floats, first: FirstStage, reduce_s: Floats
) -> Floats:
    """What shows of the gradient reduction (`modelling` E5).

    An interleaved pipeline reduces a chunk once its last micro-batch is through, beside the passes of the chunks that
    follow: of a stage its first chunk shows, and what is longer than those passes.  Else the first stage reduces beside
    its own last backward pass.
    Source: Megatron-LM core/pipeline_parallel/schedules.py, grad_sync_func.
    """
    framework = problem.framework
    can_overlap = np.where(
        batch.sharding == 0, framework.overlap.grad_reduce_overlap, framework.overlap.sharded_reduce_overlap
    )
    # Where tensor parallelism leaves the scale-up domain its collectives need the network all through a pass.
    is_free = batch.tp <= problem.cluster.levels[-1].num_devices
    overlapped = (batch.grad_reduce_overlap & can_overlap & is_free)[:, None]
    hidden_s = np.where(overlapped, _between_chunks_s(batch, backward_s), 0.0)
    last = np.broadcast_to(1.0 / _chunks(batch)[:, None], reduce_s.shape).copy()
    last[:, 0] = first.chunk_share(batch)
    late_s = np.maximum(reduce_s - hidden_s, np.where(overlapped, last, 1.0) * reduce_s)
    # Later stages end their backward passes earlier, by what the stages before them still have to do.
    backward = backward_s / batch.vp[:, None]
    slack = np.cumsum(backward, axis=1) - backward
    in_one = overlapped[:, 0] & (_chunks(batch) == 1)
    slack[:, 0] = np.where(in_one, framework.overlap.grad_reduce_overlap_share * backward_s[:, 0], 0.0)
    # The last bucket is ready only when the backward pass is over.
    exposed = np.maximum((late_s - slack).max(axis=1), reduce_s[:, 0] / first.num_blocks)
    return exposed + CONTENTION_SHARE * np.minimum(reduce_s[:, 0], slack[:, 0] + hidden_s[:, 0])


def shown_gather_s(
    problem: Problem, batch: PlanBatch, forward_s: Floats, first: FirstStage, gather_s: Floats
) -> Floats:
    """What shows of the gather of parameters, which may hide under the next forward passes, chunk by chunk."""
    hidden = batch.param_gather_overlap & problem.framework.overlap.param_gather_overlap
    own, one = gather_s[:, 0], forward_s[:, 0] / _chunks(batch)
    between = _between_chunks_s(batch, forward_s)[:, 0]
    shown = np.maximum(first.chunk_share(batch) * own, own - between) - one
    return np.where(hidden, np.maximum(shown, own / first.num_blocks), gather_s.max(axis=1))


def _chunks(batch: PlanBatch) -> Ints:
    """Of every rank, that follow one another in groups of passes."""
    return np.where(batch.schedule == Schedule.INTERLEAVED.code, batch.vp, 1)


def _between_chunks_s(batch: PlanBatch, pass_s: Floats) -> Floats:
    """From the end of the first chunk to pass a whole group of micro-batches to that of the last one, on every stage.

    `pass_s` is the time of one micro-batch through all chunks of a stage: shape (plans, stages).
    """
    chunks, group = _chunks(batch), np.minimum(batch.pp, batch.num_microbatches)
    return ((chunks - 1) / chunks * group)[:, None] * pass_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStage:
    """What the first stage of every plan holds."""

    num_blocks: Floats
    ends_share: Floats  # of its parameters, embedding and head

    @classmethod
    def of(cls, blocks: StageBlocks, parameters: StageParameters) -> FirstStage:
        """That of laid out stages."""
        held = parameters.dense[:, 0] + parameters.expert[:, 0]
        return cls(
            num_blocks=np.maximum(add_up(count[:, 0] for count in blocks.count.values()), 1),
            ends_share=parameters.ends[:, 0] / held,
        )

    def take(self, which: Ints) -> FirstStage:
        """That of some plans."""
        return FirstStage(num_blocks=self.num_blocks[which], ends_share=self.ends_share[which])

    def chunk_share(self, batch: PlanBatch) -> Floats:
        """Of its parameters, those of its first chunk."""
        return self.ends_share + (1.0 - self.ends_share) / _chunks(batch)


def update_s(problem: Problem, own: Floats, held: Floats) -> Floats:
    """Time of the optimizer on a device that updates `own` parameters and holds the gradients of `held`."""
    framework = problem.framework
    update = memory_bound_s(problem, framework.kernels.bytes_moved_per_update * own)
    measured = find(problem.timings, "optimizer", ("bf16", "fp16", "fp32"), own[:, None])
    update = measured.scaled(1 / problem.device_share).otherwise(update)
    # Gradients that live from step to step are set to zero.
    kept = 0.0 if framework.memory.drops_grads else framework.memory.bytes_per_grad
    return update + memory_bound_s(problem, kept * held)


def optimizer_s(problem: Problem, batch: PlanBatch, own: Floats, held: Floats) -> Floats:
    """The same where each plan has its optimizer, on the device or on the host: shape (plans)."""
    # On the host: gradients down, weights up, and the update at the pace of the link [assumed: host memory keeps up].
    framework, link = problem.framework, problem.cluster.device.host_link_bytes_per_s
    moved = framework.kernels.bytes_moved_per_update + framework.memory.bytes_per_grad + problem.training.element_bytes
    on_host = own * moved / link
    return np.where(batch.offload == Offload.OPTIMIZER.code, on_host, update_s(problem, own, held))
