"""Price of a step: one pure function from a problem and a batch of plans to an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows, add_up
from autoplan.cost.blocks import BlockCost, ahead_s, block_costs
from autoplan.cost.collectives.end_of_step import (
    FirstStage,
    end_of_step_s,
    optimizer_s,
    shown_gather_s,
    shown_reduce_s,
)
from autoplan.cost.collectives.pipeline_messages import message_s, tied_table
from autoplan.cost.collectives.sharded_states import copied_states_s, sharded_states_s
from autoplan.cost.collectives.tensor_parallel import shared_scales_s, tensor_parallel_ends_s
from autoplan.cost.kernels.measured_units import FORWARD_SHARE, SharedStates, action_s, embedding_s, shared_states
from autoplan.cost.kernels.sizes import KERNEL_AXES
from autoplan.cost.kernels.times import HeadTimes, head_s
from autoplan.cost.memory.parameters import (
    EndParameters,
    StageParameters,
    end_parameters,
    layer_parameters,
    own_parameters,
    stage_parameters,
)
from autoplan.cost.memory.stage_memory import (
    MEMORY_TERMS,
    StageMemory,
    host_bytes,
    stage_memory,
)
from autoplan.cost.network.links import Links
from autoplan.cost.passes import Ends, Pass, SplitPass
from autoplan.cost.pipeline.closed_forms import Makespan, gpipe_s, one_forward_one_backward_s, send_exposed_s
from autoplan.cost.pipeline.layout import StageBlocks, chunk_blocks, repeats_beside, stage_blocks
from autoplan.cost.pipeline.order import PipelineShape, chunks_of_ranks
from autoplan.cost.pipeline.recurrence import PipelineTimes, pipeline_times
from autoplan.cost.spreads import Familiarity
from autoplan.cost.uneven_lengths import varying_s, waiting_s
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import CostEstimate, StageCost, probability_above
from autoplan.spec.model import Block
from autoplan.spec.plan import SPLIT_SCHEDULES, ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import BLOCK_TERMS, STEP_TERMS

# Ranks wait for each other: a step takes as long as the slowest of N, mean + spread x Phi^-1((N - .375) / (N + .25))
# (`modelling` E6).  The relative spread of a rank's step is the median of 29 series of runs, on 8 to 2,048 devices,
# which differ in the number of their replicas alone; rates of devices were measured with the 8 of a node at work and
# hold their share already.
STRAGGLER_SPREAD = 0.02
DEVICES_IN_RATES = 8

NORMAL_90 = 1.6448536269514722  # half width of a two-sided 90 % interval in standard deviations


# Plans x stages that are priced at once: their arrays stay in the cache.
BLOCK_VALUES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCosts(Rows):
    """Costs of one micro-batch wherever in a pipeline they arise: worked out at once for any numbers of stages."""

    links: Links
    blocks: dict[Block, BlockCost]
    head: HeadTimes
    embedding_s: Floats  # both passes, where it was measured
    ends_tp: Ends  # tensor-parallel collectives
    # At the end of one pass through a chunk: the host's actions, where they were measured, and shared scales.
    action_s: Floats
    shared: SharedStates
    message_s: Floats

    @classmethod
    def of(cls, problem: Problem, batch: PlanBatch) -> MicroBatchCosts:
        """The costs of every plan."""
        links = Links.of(problem)
        first, of_kernels = batch.distinct(*KERNEL_AXES)
        head = head_s(problem, batch.take(first)).take(of_kernels)
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
    """Plans that share one number of stages, laid out per pipeline rank: arrays of shape (plans, stages)."""

    batch: PlanBatch
    costs: MicroBatchCosts
    blocks: StageBlocks
    head: Pass  # heads, losses and prediction layers: shape (plans)
    sharded_ends: Ends  # exposed traffic of sharded embedding and head: shape (plans)
    ends: Ends  # all of what stands before the first layer and behind the last one, less
    hidden_launches: Pass  # launches that hide under the head: shape (plans)
    forward_s: Floats
    backward_s: Floats
    parameters: StageParameters
    retries_s: Floats  # of the allocator, in both passes of one micro-batch
    memory: StageMemory


def _sharded_ends(problem: Problem, batch: PlanBatch, costs: MicroBatchCosts, parameters: EndParameters) -> Ends:
    """Exposed traffic of the shards of embedding and head.

    The embedding is needed first and reduced last, so that nothing is left to hide behind; the head's travel beside the
    layers.
    """
    none, shared, unhidden = np.zeros(len(batch)), costs.shared, problem.framework.overlap.fsdp_unhidden_share
    embedding, head = (sharded_states_s(problem, batch, costs.links, unit) for unit in parameters)
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
    """Time in which the allocator gives its cache back and asks for blocks anew, in both passes of a micro-batch.

    Where tensors and the blocks that passes keep beside them do not fit together, every layer meets the limit again;
    in a pipeline the host waits at every message, and by then the blocks are free.
    """
    framework = problem.framework
    if blocks.num_stages > 1:
        return np.zeros_like(memory.reserved_bytes)
    needed = memory.reserved_bytes + memory.pass_spare_bytes
    short = needed > framework.host.retries_above_share * problem.capacity_bytes
    layers = add_up(blocks.count.values()) / len(problem.model.layers[0])
    return framework.host.allocator_retry_s * layers * short


def _hidden_launches(batch: PlanBatch, costs: dict[Block, BlockCost], blocks: StageBlocks, ahead: Floats) -> Pass:
    """Launches of a micro-batch that do not show as the host is `ahead` of them: shape (plans).

    While the device computes head and loss the host launches the backward pass, and from there the next forward pass,
    which the first one of a step is not; the mean over micro-batches.
    """
    forward = backward = np.zeros(len(ahead))
    for block, cost in costs.items():
        count, repeated = blocks.count[block][:, 0], blocks.repeated[block][:, 0]
        forward = forward + count * cost.forward_s["launch"]
        backward = backward + count * cost.backward_s["launch"] + repeated * cost.repeat_s["launch"]
    after = np.minimum(np.maximum(backward, 0.0), ahead)
    return Pass(np.minimum(forward, ahead - after) * (1.0 - 1.0 / batch.num_microbatches), after)


def lay_out(problem: Problem, batch: PlanBatch, stages: int, costs: MicroBatchCosts | None = None) -> Stages:
    """Every pipeline rank of plans that share the number of `stages`; `costs` are theirs, if they are known."""
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
    # As of launches, a third of them forward.
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


def _pipeline(problem: Problem, laid: Stages) -> Makespan:
    """Makespan of every plan by the form of its schedule."""
    batch, m, chunks = laid.batch, laid.batch.num_microbatches, laid.batch.vp[:, None]
    message = laid.costs.message_s
    by_stage = send_exposed_s(
        message[:, None],
        batch.pp[:, None],
        m[:, None],
        chunks,
        Pass(laid.forward_s / chunks, laid.backward_s / chunks),
        overlaps=problem.framework.overlap.p2p_overlap,
    )
    makespan = one_forward_one_backward_s(laid.forward_s, laid.backward_s, m, batch.vp, by_stage)
    is_gpipe = batch.schedule == Schedule.GPIPE.code
    if is_gpipe.any():
        flow = gpipe_s(laid.forward_s, laid.backward_s, m, message)
        makespan = Makespan(*(np.where(is_gpipe, *pair) for pair in zip(flow, makespan, strict=True)))
    for rows, times in _run_in_order(problem, laid, message):
        for values, own in zip(makespan, (times.send_free_s, times.exposed_send_s, times.critical), strict=True):
            values[rows] = own
    return makespan


def _run_in_order(problem: Problem, laid: Stages, message: Floats) -> Iterator[tuple[Ints, PipelineTimes]]:
    """(plans, times) of those that no closed form prices, pass by pass in the order of their schedule."""
    batch, blocks, stages = laid.batch, laid.blocks, laid.forward_s.shape[1]
    plans = np.flatnonzero(needs_order(batch))
    keys = np.stack([batch.layout, batch.recompute_num_layers, batch.schedule, batch.num_microbatches])[:, plans]
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    for at, (layout, num_repeated, schedule, microbatches) in enumerate(distinct.T.tolist()):
        rows = plans[inverse.reshape(-1) == at]
        chunks = len(batch.layouts[layout]) // blocks.num_stages
        shape = PipelineShape(tuple(Schedule)[schedule], stages, chunks, microbatches)
        passes = _chunk_times(problem, laid, rows, batch.layouts[layout], num_repeated)
        yield rows, pipeline_times(shape, passes, message[rows])


def needs_order(batch: PlanBatch) -> Bools:
    """Return which plans have a schedule that splits the backward pass: a function of the plan alone."""
    return np.isin(batch.schedule, SPLIT_SCHEDULES)


def _chunk_times(problem: Problem, laid: Stages, rows: Ints, layout: tuple[int, ...], num_repeated: int) -> SplitPass:
    """Times of one micro-batch through every chunk: shape (plans, chunks)."""
    forward, backward, weight, split = (np.zeros((len(rows), len(layout))) for _ in range(4))
    for block, (count, again) in chunk_blocks(problem.model, np.array([layout]), np.array([num_repeated])).items():
        cost = laid.costs.blocks[block]
        forward += count * cost.total_forward_s[rows, None]
        backward += count * cost.total_backward_s[rows, None] + again * cost.total_repeat_s[rows, None]
        weight += count * cost.weight_s[rows, None]
        split += count * cost.split_s[rows, None]
    for chunk, end in ((0, laid.ends.embedding), (-1, laid.ends.head)):
        forward[:, chunk] += end.forward_s[rows]
        backward[:, chunk] += end.backward_s[rows]
    weight[:, -1] += laid.costs.head.weight_s[rows]
    action = laid.costs.action_s[rows, None]
    if not problem.framework.kernels.splits_first_chunk:
        weight[:, 0], split[:, 0] = backward[:, 0], 0.0
    weight = weight + action
    return SplitPass(forward + action, backward + split + 2 * action - weight, weight)


def _end_of_step(problem: Problem, laid: Stages) -> dict[str, Floats]:
    """Exposed gradient reduction, optimizer step and parameter gather (`modelling` C7, E5)."""
    batch, links = laid.batch, laid.costs.links
    end = end_of_step_s(problem, batch, laid.blocks, laid.parameters, links)
    first = FirstStage.of(laid.blocks, laid.parameters)
    exposed = shown_reduce_s(problem, batch, laid.backward_s, first, end.reduce_s)
    shown = shown_gather_s(problem, batch, laid.forward_s, first, end.gather_s)
    if (shared := laid.costs.shared).is_measured.any():
        # Gathers of the first passes and reductions of the last ones, of layers and ends alike.
        layers = laid.parameters.dense.max(axis=1) / layer_parameters(problem, batch)
        exposed = np.where(shared.is_measured, layers * shared.once_s, exposed)
        shown = np.where(shared.is_measured, 0.0, shown)
    exposed = exposed + tied_table(problem, batch, laid.blocks.num_stages).seconds(links)
    most_updated = own_parameters(batch, laid.parameters).max(axis=1)
    trained = laid.parameters.trained
    most_trained = (trained.dense + trained.expert).max(axis=1)
    update = optimizer_s(problem, batch, most_updated, most_trained)
    return {"data_parallel_reduce": exposed, "optimizer": update, "parameter_gather": shown}


def straggler_share(num_devices: Ints) -> Floats:
    """Excess of the slowest of so many ranks' steps over a rank's mean step, as a share, beyond that on one node."""

    def slowest(ranks: int) -> float:
        return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    sizes, at = np.unique(np.maximum(num_devices, DEVICES_IN_RATES), return_inverse=True)
    beyond = np.array([slowest(int(ranks)) for ranks in sizes]) - slowest(DEVICES_IN_RATES)
    return STRAGGLER_SPREAD * beyond[at]


def work_terms(laid: Stages, stage: Ints) -> dict[str, Floats]:
    """Seconds that one stage of every plan is busy in a step, by term."""
    return {name: laid.batch.num_microbatches * value for name, value in _microbatch_terms(laid, stage).items()}


def _microbatch_terms(laid: Stages, stage: Ints) -> dict[str, Floats]:
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
    for name, ends in (("tp_communication", laid.costs.ends_tp), ("fsdp_communication", laid.sharded_ends)):
        terms[name] += np.where(is_first, ends.embedding.total_s, 0.0) + np.where(is_last, ends.head.total_s, 0.0)
    terms["launch"] += 2 * laid.batch.vp * laid.costs.action_s - np.where(is_last, laid.hidden_launches.total_s, 0.0)
    terms["head"] = np.where(is_last, laid.head.total_s, 0.0) + np.where(is_first, laid.costs.embedding_s, 0.0)
    terms["allocator_retries"] = laid.retries_s[rows, stage]
    return terms


def _uneven_lengths_s(problem: Problem, laid: Stages) -> Floats:
    """Waiting for longer samples, of the mean of all stages."""
    if problem.training.lengths is None:
        return np.zeros(len(laid.batch))
    count, repeated = (
        {block: of_block.sum(axis=1) for block, of_block in blocks.items()}
        for blocks in (laid.blocks.count, laid.blocks.repeated)
    )
    varying = varying_s(problem, laid.costs.blocks, count, repeated, laid.head.total_s)
    return waiting_s(problem, laid.batch, varying)


def _price(problem: Problem, laid: Stages) -> tuple[dict[str, Floats], dict[str, Floats], Ints]:
    """(time terms, memory terms of the worst stage, worst stage)."""
    batch = laid.batch
    rows = np.arange(len(batch))
    makespan, sends, critical = _pipeline(problem, laid)
    terms = work_terms(laid, critical)
    work = add_up(value for name, value in terms.items() if name != "head")
    terms["pipeline_bubble"] = np.maximum(makespan - work - terms["head"], 0.0)  # rounding may leave -0
    terms["pipeline_send"] = sends
    terms |= _end_of_step(problem, laid)
    terms["uneven_lengths"] = _uneven_lengths_s(problem, laid)
    terms["overhead"] = np.full(len(batch), problem.framework.host.step_overhead_s)
    terms["stragglers"] = straggler_share(batch.num_devices) * add_up(terms.values())
    terms = {name: problem.calibration.overall * value for name, value in terms.items()}
    worst = np.argmax(laid.memory.reserved_bytes, axis=1)
    at_worst = {name: value[rows, worst] for name, value in laid.memory.terms.items()}
    return terms, at_worst, worst


def estimate(problem: Problem, batch: PlanBatch) -> CostEstimate:
    """Step time and memory of every plan of `batch`.

    The plans must obey the rules of their framework; here only arithmetic happens, and a plan that does not fit is a
    result like any other.
    """
    problem = problem.placed(batch.placement)
    time_terms = {name: np.zeros(len(batch)) for name in STEP_TERMS}
    memory = {name: np.zeros(len(batch)) for name in MEMORY_TERMS}
    worst = np.zeros(len(batch), dtype=np.int64)
    logged, host = np.zeros(len(batch)), np.zeros(len(batch))
    for where, laid in _laid_out(problem, batch):
        terms, stage_memory, worst_stage = _price(problem, laid)
        logged[where] = laid.memory.logged_bytes(problem)
        host[where] = host_bytes(problem, laid.batch, laid.parameters)
        for name, value in terms.items():
            time_terms[name][where] = value
        for name, value in stage_memory.items():
            memory[name][where] = value
        worst[where] = worst_stage
    step = add_up(time_terms.values())
    spread = Familiarity.of(problem, batch).sides(time_terms, step)
    reserved = add_up(memory.values())
    return CostEstimate(
        batch=batch,
        step_s=step,
        low_s=step * np.exp(-NORMAL_90 * spread.below),
        high_s=step * np.exp(NORMAL_90 * spread.above),
        terms_s=time_terms,
        memory_bytes=reserved,
        logged_memory_bytes=logged,
        memory_terms_bytes=memory,
        worst_stage=worst,
        capacity_bytes=problem.capacity_bytes,
        host_memory_bytes=host,
        oom_z=_oom_z(problem, reserved, host),
    )


def _oom_z(problem: Problem, reserved_bytes: Floats, host_bytes: Floats) -> Floats:
    """Standard deviations of log memory to the capacity of the device or the host, whichever runs out first."""
    fill = np.maximum(reserved_bytes / problem.capacity_bytes, host_bytes / problem.cluster.host.memory_bytes)
    return np.log(fill) / problem.calibration.memory_spread


def memory_oom_z(problem: Problem, batch: PlanBatch) -> Floats:
    """Return `oom_z` of an estimate of `batch` without the times of its pipelines."""
    problem = problem.placed(batch.placement)
    oom_z = np.zeros(len(batch))
    for stages in np.unique(batch.pp).tolist():
        where = np.flatnonzero(batch.pp == stages)
        plans = batch.take(where)
        blocks = stage_blocks(problem.model, plans, stages)
        parameters = stage_parameters(problem, plans, blocks)
        reserved = stage_memory(problem, plans, blocks, parameters).reserved_bytes.max(axis=1)
        oom_z[where] = _oom_z(problem, reserved, host_bytes(problem, plans, parameters))
    return oom_z


def _laid_out(problem: Problem, batch: PlanBatch) -> Iterator[tuple[Ints, Stages]]:
    """(plans, their stages) by the number of stages, in blocks of about `BLOCK_VALUES`."""
    order = np.argsort(batch.pp, kind="stable")
    upto = np.cumsum(batch.pp[order]) // BLOCK_VALUES
    for block in np.split(order, np.flatnonzero(np.diff(upto)) + 1) if len(batch) else ():
        plans = batch.take(block)
        costs = MicroBatchCosts.of(problem, plans)
        starts = np.flatnonzero(np.diff(plans.pp, prepend=0)).tolist()
        for start, stop in pairwise((*starts, len(block))):
            rows = slice(start, stop)
            yield block[rows], lay_out(problem, plans.take(rows), int(plans.pp[start]), costs.take(rows))


def stage_costs(problem: Problem, plan: ParallelPlan) -> tuple[StageCost, ...]:
    """Time per micro-batch and memory of every pipeline rank of one plan."""
    problem = problem.placed(plan.placement)
    laid = lay_out(problem, PlanBatch.of([plan], problem.model.num_layers), plan.pp)
    return tuple(stage_cost(problem, laid, 0, stage) for stage in range(plan.pp))


def stage_cost(problem: Problem, laid: Stages, at: int, stage: int) -> StageCost:
    """Cost of one pipeline rank of the plan `at` a place in the batch."""
    plan, reserved = laid.batch.plan(at), laid.memory.reserved_bytes[at, stage]
    layers = np.array(laid.batch.layouts[laid.batch.layout[at]])[chunks_of_ranks(plan.schedule, plan.pp, plan.vp)]
    overall = problem.calibration.overall
    terms = _microbatch_terms(laid, np.full(len(laid.batch), stage))
    return StageCost(
        stage=stage,
        layers=int(layers[stage].sum()),
        forward_s=overall * float(laid.forward_s[at, stage]),
        backward_s=overall * float(laid.backward_s[at, stage]),
        terms_s={name: overall * float(value[at]) for name, value in terms.items()},
        memory_bytes=float(reserved),
        memory_terms_bytes={name: float(value[at, stage]) for name, value in laid.memory.terms.items()},
        oom_probability=probability_above(
            float(np.log(reserved / problem.capacity_bytes)) / problem.calibration.memory_spread
        ),
    )
