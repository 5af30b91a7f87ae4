"""Costs of pipeline stages: time per micro-batch and memory of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows, add_up
from autoplan.cost.block_cost import BlockCost
from autoplan.cost.blocks import ahead_s, block_costs
from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.collectives.sharded_states import copied_states_s, sharded_states_s, unhidden_share
from autoplan.cost.collectives.tensor_parallel import shared_scales_s, tensor_parallel_ends_s
from autoplan.cost.dynamic_cp import over_degrees
from autoplan.cost.kernels.measured_units import FORWARD_SHARE, SharedStates, action_s, embedding_s, shared_states
from autoplan.cost.kernels.times import HeadTimes, distinct_head_s
from autoplan.cost.memory.stage_memory import StageMemory, stage_memory
from autoplan.cost.network.links import Links
from autoplan.cost.parameters import (
    EndParameters,
    StageParameters,
    end_parameters,
    layer_parameters,
    stage_parameters,
)
from autoplan.cost.passes import Ends, Pass, SplitPass
from autoplan.cost.pipeline.layout import StageBlocks, chunk_blocks, chunk_layers_of, repeats_beside, stage_blocks
from autoplan.spec.blocks import Block
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import BLOCK_TERMS

# Share of the capacity from which the allocator gives its cache back (c10 CUDACachingAllocator.cpp malloc), and what a
# layer then takes longer, in both passes together [fitted: 10 runs of nanotron at the limit, 2 to 5 times slower].
RETRY_SHARE = 0.925
RETRY_S = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCosts(Rows):
    """Costs of one micro-batch that do not depend on its stage, computed at once for any numbers of stages."""

    links: Links
    blocks: dict[Block, BlockCost]
    head: HeadTimes
    embedding_s: Floats  # both passes, if measured
    ends_tp: Ends  # tensor-parallel collectives
    # At the end of one pass through a chunk: the host's actions, if measured, and shared scales.
    action_s: Floats
    shared: SharedStates
    message_s: Floats

    @classmethod
    def of(cls, problem: Problem, batch: PlanBatch) -> MicroBatchCosts:
        """Compute the costs of every plan."""
        links = Links.of(problem)
        return over_degrees(problem, batch, lambda part, plans: cls._priced(part, plans, links))

    @classmethod
    def _priced(cls, problem: Problem, batch: PlanBatch, links: Links) -> MicroBatchCosts:
        head = distinct_head_s(problem, batch)
        return cls(
            links=links,
            blocks=block_costs(problem, batch, links),
            head=head,
            embedding_s=embedding_s(problem, batch),
            ends_tp=tensor_parallel_ends_s(problem, batch, links, head.weight_s),
            action_s=action_s(problem, batch) + shared_scales_s(problem, batch, links),
            shared=shared_states(problem, batch),
            message_s=message_s(problem, batch, links),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Plans with one number of stages, laid out per pipeline rank: arrays of shape (plans, stages)."""

    batch: PlanBatch
    costs: MicroBatchCosts
    blocks: StageBlocks
    split_backward: Bools  # whether the rank's backward passes are split, including the first chunk's
    head: Pass  # heads, losses and prediction layers: shape (plans)
    sharded_ends: Ends  # exposed traffic of sharded embedding and head: shape (plans)
    ends: Ends  # passes before the first layer and after the last one, minus hidden launches
    hidden_launches: Pass  # launches hidden under the head: shape (plans)
    forward_s: Floats
    backward_s: Floats
    parameters: StageParameters
    retries_s: Floats  # allocator retries in both passes of one micro-batch
    memory: StageMemory

    @property
    def before_head(self) -> Pass:
        """Passes without the head, whose forward pass comes last and whose backward pass comes first.

        The parameter gather ends before the head's forward pass, and the gradient reduction begins after its backward
        pass.  Of a backward pass that is split, this is the half that computes the weights' gradients.
        """
        head = self.ends.head.plus(self.hidden_launches)
        forward = self.forward_s - self.blocks.at_last(head.forward_s)
        backward = self.backward_s - self.blocks.at_last(head.backward_s)
        if self.split_backward.any():
            weight = add_up(
                count * add_up(self.costs.blocks[block].weight_s.values())[:, None]
                for block, count in self.blocks.count.items()
            )
            backward = np.where(self.split_backward, weight, backward)
        return Pass(forward, backward)


def _sharded_ends(problem: Problem, batch: PlanBatch, costs: MicroBatchCosts, parameters: EndParameters) -> Ends:
    """Exposed sharded-state traffic of embedding and head.

    The embedding is gathered first and reduced last, so nothing hides its traffic; the head's overlaps with the layers.
    """
    none, shared, unhidden = np.zeros(len(batch)), costs.shared, unhidden_share(problem)
    embedding, head = (sharded_states_s(problem, batch, costs.links, unit).joined for unit in parameters)
    copies = [copied_states_s(problem, batch, unit) for unit in parameters]
    ends = Ends(embedding.plus(copies[0]), head.scaled(unhidden).plus(copies[1]))
    if not shared.is_measured.any():
        return ends
    every_s = shared.every_s / layer_parameters(problem, batch)
    measured = [Pass(none, unit.dense * every_s) for unit in parameters]
    return Ends(
        ends.embedding.otherwise(shared.is_measured, measured[0]), ends.head.otherwise(shared.is_measured, measured[1])
    )


def _retries_s(problem: Problem, blocks: StageBlocks, memory: StageMemory) -> Floats:
    """Time of the allocator to return its cache and allocate blocks again, in both passes of a micro-batch.

    If tensors and the cached blocks of passes do not fit together, every layer hits the limit again; in a pipeline the
    host waits at every message, and the blocks are free by then.
    """
    if blocks.num_stages > 1 or not problem.framework.memory.counts_cached_blocks:
        return np.zeros_like(memory.reserved_bytes)
    needed = memory.reserved_bytes + memory.pass_spare_bytes
    short = needed > RETRY_SHARE * problem.capacity_bytes
    layers = add_up(blocks.count.values()) / len(problem.model.layers[0])
    return RETRY_S * layers * short


def _hidden_launches(batch: PlanBatch, costs: dict[Block, BlockCost], blocks: StageBlocks, ahead: Floats) -> Pass:
    """Launch time of a micro-batch hidden because the host is `ahead`: shape (plans).

    While the device computes head and loss, the host launches the backward pass and then the next micro-batch's forward
    pass, except for the first one of a step; this is the mean over micro-batches.
    """
    forward = backward = np.zeros(len(ahead))
    for block, cost in costs.items():
        count, repeated = blocks.count[block][:, 0], blocks.repeated[block][:, 0]
        forward = forward + count * cost.forward_s["launch"]
        backward = backward + count * cost.backward_s["launch"] + repeated * cost.repeat_s["launch"]
    after = np.minimum(np.maximum(backward, 0.0), ahead)
    return Pass(np.minimum(forward, ahead - after) * (1.0 - 1.0 / batch.num_microbatches), after)


def lay_out(problem: Problem, batch: PlanBatch, stages: int, costs: MicroBatchCosts | None = None) -> Stages:
    """Lay out plans with this number of `stages` over pipeline ranks; `costs` are theirs, if already computed."""
    model, costs = problem.model, costs or MicroBatchCosts.of(problem, batch)
    blocks = stage_blocks(model, batch, stages)
    forward, backward = blocks.zeros(), blocks.zeros()
    for block, count in blocks.count.items():
        forward += count * costs.blocks[block].total_forward_s[:, None]
        backward += count * costs.blocks[block].total_backward_s[:, None]
        backward += blocks.repeated[block] * costs.blocks[block].total_repeat_s[:, None]
    head = costs.head.passes
    for block in model.mtp_layer if model.num_mtp_layers else ():
        cost = costs.blocks[block]
        repeated = cost.total_repeat_s * repeats_beside(batch)
        predicting = Pass(cost.total_forward_s, cost.total_backward_s + repeated)
        head = head.plus(predicting.scaled(model.num_mtp_layers))
    parameters = stage_parameters(problem, batch, blocks)
    memory = stage_memory(problem, batch, blocks, parameters)
    retries = _retries_s(problem, blocks, memory)
    # As for launches, a third of them is in the forward pass.
    forward += retries / 3
    backward += retries * 2 / 3
    sharded_ends = _sharded_ends(problem, batch, costs, end_parameters(problem, blocks, parameters))
    measured = Pass(costs.embedding_s, costs.embedding_s)
    head_tp = costs.ends_tp.head
    head_s = add_up((costs.head.passes.forward_s, costs.head.passes.backward_s, head_tp.forward_s, head_tp.backward_s))
    hidden_launches = _hidden_launches(batch, costs.blocks, blocks, ahead_s(problem, batch, head_s))
    ends = Ends(
        sharded_ends.embedding.plus(costs.ends_tp.embedding).plus(measured.times(FORWARD_SHARE, 1 - FORWARD_SHARE)),
        head.plus(sharded_ends.head).plus(head_tp).less(hidden_launches),
    )
    forward[:, 0] += ends.embedding.forward_s
    backward[:, 0] += ends.embedding.backward_s
    actions = (costs.action_s * batch.vp)[:, None]
    forward += actions
    backward += actions
    forward += blocks.at_last(ends.head.forward_s)
    backward += blocks.at_last(ends.head.backward_s)
    return Stages(
        batch=batch,
        costs=costs,
        blocks=blocks,
        split_backward=_split_backward(problem, batch, blocks),
        parameters=parameters,
        head=head,
        sharded_ends=sharded_ends,
        ends=ends,
        hidden_launches=hidden_launches,
        forward_s=forward,
        backward_s=backward,
        retries_s=retries,
        memory=memory,
    )


def _split_backward(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> Bools:
    split_backward = batch.splits_backward[:, None] & np.ones(blocks.num_stages, dtype=np.bool_)
    split_backward[:, 0] &= not problem.framework.network.torch_pipelines
    return split_backward


def chunk_times(problem: Problem, laid: Stages, rows: Ints) -> SplitPass:
    """Times of one micro-batch through every chunk of plans with one number of chunks: shape (plans, chunks)."""
    layers, num_repeated = chunk_layers_of(laid.batch, rows), laid.batch.recompute_num_layers[rows]
    forward, backward, weight, split = (np.zeros(layers.shape) for _ in range(4))
    for block, (count, again) in chunk_blocks(problem.model, layers, num_repeated).items():
        cost = laid.costs.blocks[block]
        forward += count * cost.total_forward_s[rows, None]
        backward += count * cost.total_backward_s[rows, None] + again * cost.total_repeat_s[rows, None]
        weight += count * add_up(cost.weight_s.values())[rows, None]
        split += count * add_up(cost.split_s.values())[rows, None]
        split += again * add_up(cost.split_repeat_s.values())[rows, None]
    for chunk, end in ((0, laid.ends.embedding), (-1, laid.ends.head)):
        forward[:, chunk] += end.forward_s[rows]
        backward[:, chunk] += end.backward_s[rows]
    weight[:, -1] += laid.costs.head.weight_s[rows]
    action = laid.costs.action_s[rows, None]
    if problem.framework.network.torch_pipelines:
        weight[:, 0], split[:, 0] = backward[:, 0], 0.0
    weight = weight + action
    return SplitPass(forward + action, backward + split + 2 * action - weight, weight)


def work_terms(laid: Stages, stage: Ints) -> dict[str, Floats]:
    """Seconds that one stage of every plan is busy in a step, by term."""
    return {name: laid.batch.num_microbatches * value for name, value in microbatch_terms(laid, stage).items()}


def microbatch_terms(laid: Stages, stage: Ints) -> dict[str, Floats]:
    """Seconds that one stage of every plan is busy with one micro-batch, by term."""
    rows = np.arange(len(laid.batch))
    is_first, is_last = stage == 0, laid.blocks.is_last[rows, stage]
    blocks = [
        (laid.costs.blocks[block], count[rows, stage], laid.blocks.repeated[block][rows, stage])
        for block, count in laid.blocks.count.items()
    ]
    terms = {
        name: add_up(cost.term_s(name, count, repeated) for cost, count, repeated in blocks) for name in BLOCK_TERMS
    }
    if (split_backward := laid.split_backward[rows, stage]).any():
        for cost, count, repeated in blocks:
            for name, split in cost.split_s.items():
                terms[name] += split_backward * (count * split + repeated * cost.split_repeat_s[name])
    for name, ends in (("tp_communication", laid.costs.ends_tp), ("fsdp_communication", laid.sharded_ends)):
        terms[name] += np.where(is_first, ends.embedding.total_s, 0.0) + np.where(is_last, ends.head.total_s, 0.0)
    terms["launch"] += 2 * laid.batch.vp * laid.costs.action_s - np.where(is_last, laid.hidden_launches.total_s, 0.0)
    terms["head"] = np.where(is_last, laid.head.total_s, 0.0) + np.where(is_first, laid.costs.embedding_s, 0.0)
    terms["allocator_retries"] = laid.retries_s[rows, stage]
    return terms
