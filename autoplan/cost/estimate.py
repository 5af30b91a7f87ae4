"""What does a step of each plan cost?  One pure function from a problem and a batch of plans to an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.blocks import (
    TERMS,
    BlockCost,
    ahead_s,
    block_costs,
    copied_s,
    ends_tp_s,
    fsdp_s,
    layer_parameters,
    shared_scales_s,
)
from autoplan.cost.collectives.end_of_step import FirstStage, optimizer_s, reduction_s, shown_gather_s, shown_reduce_s
from autoplan.cost.kernels.measured_units import FORWARD_SHARE, SharedStates, action_s, embedding_s, shared_states
from autoplan.cost.kernels.times import KERNEL_AXES, add_up, head_s
from autoplan.cost.memory.stage_memory import (
    MEMORY_TERMS,
    StageMemory,
    StageParameters,
    host_bytes,
    own_parameters,
    stage_memory,
    stage_parameters,
)
from autoplan.cost.network.links import Links
from autoplan.cost.network.rank_groups import groups, message_bytes, tied_table_bytes
from autoplan.cost.pipeline.closed_forms import gpipe_s, one_forward_one_backward_s, send_exposed_s
from autoplan.cost.pipeline.layout import StageBlocks, chunk_blocks, repeats_mtp, stage_blocks
from autoplan.cost.pipeline.order import chunks_of_ranks
from autoplan.cost.pipeline.recurrence import PipelineTimes, pipeline_times
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import CostEstimate, StageCost, probability_above
from autoplan.spec.model import Block
from autoplan.spec.plan import SPLIT_SCHEDULES, ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import TIME_SPREADS

# Terms of a step beside those of the layers: work of the critical stage first, then what the pipeline and the end of
# the step add.
STEP_TERMS = (
    *TERMS,
    "head",
    "allocator_retries",
    "pipeline_bubble",
    "pipeline_send",
    "data_parallel_reduce",
    "optimizer",
    "parameter_gather",
    "overhead",
    "stragglers",
)

# Ranks wait for each other: a step takes as long as the slowest of N, mean + spread x Phi^-1((N - .375) / (N + .25))
# (`modelling` E6).  The relative spread of a rank's step is fitted to 11 published sources of several sizes; rates of
# devices were measured with the 8 of a node at work and hold their share already.
STRAGGLER_SPREAD = 0.01
DEVICES_IN_RATES = 8

NORMAL_90 = 1.6448536269514722  # half width of a two-sided 90 % interval in standard deviations


# Plans x stages that are priced at once: their arrays stay in the cache.
BLOCK_VALUES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one micro-batch costs wherever in a pipeline it happens: worked out at once for any numbers of stages."""

    links: Links
    costs: dict[Block, BlockCost]
    head: tuple[Floats, Floats, Floats]  # forward, backward, weight gradients in it
    embedding_s: Floats  # both passes, where it was measured
    # Tensor-parallel collectives of the embedding and of the head, forward and backward.
    ends_tp: tuple[tuple[Floats, Floats], tuple[Floats, Floats]]
    # At the end of one pass through a chunk: the host's actions, where they were measured, and shared scales.
    action_s: Floats
    shared: SharedStates
    message_s: Floats

    @classmethod
    def of(cls, problem: Problem, batch: PlanBatch) -> Work:
        """That of every plan."""
        links = Links.of(problem)
        some, like = batch.distinct(*KERNEL_AXES)
        forward, backward, weight = (times[like] for times in head_s(problem, batch.take(some)))
        return cls(
            links=links,
            costs=block_costs(problem, batch, links),
            head=(forward, backward, weight),
            embedding_s=embedding_s(problem, batch),
            ends_tp=ends_tp_s(problem, batch, links, weight),
            action_s=action_s(problem, batch) + shared_scales_s(problem, batch, links),
            shared=shared_states(problem, batch),
            message_s=message_s(problem, batch, links),
        )

    def take(self, which: Ints | slice) -> Work:
        """That of some plans."""
        forward, backward, weight = (times[which] for times in self.head)
        table, head = self.ends_tp
        return Work(
            links=self.links,
            costs={block: cost.take(which) for block, cost in self.costs.items()},
            head=(forward, backward, weight),
            embedding_s=self.embedding_s[which],
            ends_tp=((table[0][which], table[1][which]), (head[0][which], head[1][which])),
            action_s=self.action_s[which],
            shared=self.shared.take(which),
            message_s=self.message_s[which],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Plans that share one number of stages, laid out per pipeline rank: arrays of shape (plans, stages)."""

    batch: PlanBatch
    work: Work
    blocks: StageBlocks
    head: tuple[Floats, Floats]  # forward, backward: shape (plans)
    head_weight_s: Floats  # weight gradients in it
    # Exposed traffic of sharded embedding and head, forward and backward: shape (plans).
    ends: tuple[tuple[Floats, Floats], tuple[Floats, Floats]]
    first: tuple[Floats, Floats]  # forward, backward of what stands before the first layer and
    last: tuple[Floats, Floats]  # behind the last one, all traffic included: shape (plans)
    made_up_s: tuple[Floats, Floats]  # less these launches, which hide under the head: shape (plans)
    forward_s: Floats
    backward_s: Floats
    parameters: StageParameters
    retries_s: Floats  # of the allocator, in both passes of one micro-batch
    memory: StageMemory


def _sharded_ends(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, work: Work, ends: Floats
) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """((forward, backward) of the embedding, (forward, backward) of the head): exposed traffic of their shards.

    `ends` are their parameters by stage.  The embedding is needed first and reduced last, so that nothing is left to
    hide behind; the head's travel beside the layers.
    """
    places, none, shared = groups(batch), np.zeros(len(batch)), work.shared
    share = np.where(blocks.is_last[:, 0], 0.5, 1.0)  # one stage may hold both
    table, head = share * ends[:, 0], share * (ends * blocks.is_last).sum(axis=1)
    embedding = fsdp_s(problem, batch, work.links, places, table, none)
    forward, backward = fsdp_s(problem, batch, work.links, places, head, none)
    unhidden = problem.framework.overlap.fsdp_unhidden_share
    forward, backward = unhidden * forward, unhidden * backward
    copies = [copied_s(problem, batch, held) for held in (table, head)]
    embedding = embedding[0] + copies[0][0], embedding[1] + copies[0][1]
    forward, backward = forward + copies[1][0], backward + copies[1][1]
    if shared.known.any():
        every_s = shared.every_s / layer_parameters(problem, batch)
        embedding = (
            np.where(shared.known, 0.0, embedding[0]),
            np.where(shared.known, table * every_s, embedding[1]),
        )
        forward = np.where(shared.known, 0.0, forward)
        backward = np.where(shared.known, head * every_s, backward)
    return embedding, (forward, backward)


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


def _made_up_s(
    batch: PlanBatch, costs: dict[Block, BlockCost], blocks: StageBlocks, ahead: Floats
) -> tuple[Floats, Floats]:
    """(forward, backward) launches of a micro-batch that do not show as the host is `ahead` of them: shape (plans).

    While the device computes head and loss the host launches the backward pass, and from there the next forward pass,
    which the first one of a step is not; the mean over micro-batches.
    """
    forward = backward = np.zeros(len(ahead))
    for block, cost in costs.items():
        count, repeated = blocks.count[block][:, 0], blocks.repeated[block][:, 0]
        forward = forward + count * cost.forward_s["launch"]
        backward = backward + count * cost.backward_s["launch"] + repeated * cost.repeat_s["launch"]
    after = np.minimum(np.maximum(backward, 0.0), ahead)
    return np.minimum(forward, ahead - after) * (1.0 - 1.0 / batch.num_microbatches), after


def lay_out(problem: Problem, batch: PlanBatch, stages: int, work: Work | None = None) -> Stages:
    """Every pipeline rank of plans that share the number of `stages`; `work` is theirs, if it is known."""
    model, work = problem.model, work or Work.of(problem, batch)
    costs = work.costs
    blocks = stage_blocks(model, batch, stages)
    forward, backward = blocks.zeros(), blocks.zeros()
    for block, count in blocks.count.items():
        forward += count * costs[block].total_forward_s[:, None]
        backward += count * costs[block].total_backward_s[:, None]
        backward += blocks.repeated[block] * costs[block].total_repeat_s[:, None]
    head_forward, head_backward, head_weight = work.head
    for block in model.mtp_layer if model.num_mtp_layers else ():
        head_forward = head_forward + model.num_mtp_layers * costs[block].total_forward_s
        repeated = costs[block].total_repeat_s * repeats_mtp(batch)
        head_backward = head_backward + model.num_mtp_layers * (costs[block].total_backward_s + repeated)
    parameters = stage_parameters(problem, batch, blocks)
    memory = stage_memory(problem, batch, blocks, parameters)
    retries = _retries_s(problem, blocks, memory)
    # As of launches, a third of them forward.
    forward += retries / 3
    backward += retries * 2 / 3
    embedding, head_traffic = _sharded_ends(problem, batch, blocks, work, parameters.ends)
    table_tp, head_tp = work.ends_tp
    first = (
        embedding[0] + table_tp[0] + FORWARD_SHARE * work.embedding_s,
        embedding[1] + table_tp[1] + (1 - FORWARD_SHARE) * work.embedding_s,
    )
    made_up = _made_up_s(batch, costs, blocks, ahead_s(problem, batch, add_up((*work.head[:2], *head_tp))))
    last = (
        head_forward + head_traffic[0] + head_tp[0] - made_up[0],
        head_backward + head_traffic[1] + head_tp[1] - made_up[1],
    )
    forward[:, 0] += first[0]
    backward[:, 0] += first[1]
    actions = (work.action_s * batch.vp)[:, None]
    forward += actions
    backward += actions
    forward += blocks.at_last(last[0])
    backward += blocks.at_last(last[1])
    return Stages(
        batch=batch,
        work=work,
        blocks=blocks,
        parameters=parameters,
        head=(head_forward, head_backward),
        head_weight_s=head_weight,
        ends=(embedding, head_traffic),
        first=first,
        last=last,
        made_up_s=made_up,
        forward_s=forward,
        backward_s=backward,
        retries_s=retries,
        memory=memory,
    )


def message_s(problem: Problem, batch: PlanBatch, across: Links | None = None) -> Floats:
    """Time of one message between neighbouring stages; `across` is what it crosses, if not the problem's own links.

    Without sequence parallelism every tensor-parallel rank has the whole hidden state: it sends all of it, or 1 / tp,
    and the receivers gather the slices (arXiv:2104.04473, 4.1; DeepSpeed runtime/pipe/engine.py, PartitionedTensor).
    """
    links, places = Links.of(problem), groups(batch)
    sent, gathered = message_bytes(problem, batch)
    message = (across or links).send_s(*places.pp, sent)
    framework = problem.framework
    is_polled = batch.num_devices >= framework.network.message_poll_from_nodes * problem.cluster.devices_per_node
    is_polled |= batch.tp >= framework.network.message_poll_from_tp
    polls = np.where((batch.pp > 1) & is_polled, framework.network.message_poll_s, 0.0)
    return message + polls + links.all_gather_s(*places.tp, gathered)


def _pipeline(problem: Problem, laid: Stages) -> tuple[Floats, Floats, Ints]:
    """(makespan without messages, exposed messages, critical stage)."""
    batch, stages = laid.batch, laid.forward_s.shape[1]
    m = batch.num_microbatches
    message, chunks = laid.work.message_s, batch.vp[:, None]
    by_stage = send_exposed_s(
        message[:, None],
        batch.pp[:, None],
        m[:, None],
        chunks,
        (laid.forward_s / chunks, laid.backward_s / chunks),
        overlaps=problem.framework.overlap.p2p_overlap,
    )
    whole, critical = one_forward_one_backward_s(laid.forward_s, laid.backward_s, m, batch.vp, by_stage)
    sends = np.broadcast_to(by_stage, laid.forward_s.shape)[np.arange(len(batch)), critical]
    makespan = whole - sends
    is_gpipe = batch.schedule == Schedule.GPIPE.code
    if is_gpipe.any():
        flow, flow_critical = gpipe_s(laid.forward_s, laid.backward_s, m)
        makespan = np.where(is_gpipe, flow, makespan)
        critical = np.where(is_gpipe, flow_critical, critical)
    # All forwards first: messages pipeline behind one another, so that only the fill shows.
    sends = np.where(is_gpipe, 2.0 * message * (stages - 1), sends)
    for rows, times in _run_in_order(problem, laid, message):
        makespan[rows], sends[rows], critical[rows] = times.send_free_s, times.exposed_send_s, times.critical
    return makespan, sends, critical


def _run_in_order(problem: Problem, laid: Stages, message: Floats) -> Iterator[tuple[Ints, PipelineTimes]]:
    """(plans, times) of those that no closed form prices, pass by pass in the order of their schedule."""
    batch, blocks, stages = laid.batch, laid.blocks, laid.forward_s.shape[1]
    some = np.flatnonzero(_needs_order(batch))
    keys = np.stack([batch.layout, batch.recompute_num_layers, batch.schedule, batch.num_microbatches])[:, some]
    found, inverse = np.unique(keys, axis=1, return_inverse=True)
    for at, (layout, num_repeated, schedule, microbatches) in enumerate(found.T.tolist()):
        rows = some[inverse.reshape(-1) == at]
        forward, backward, weight = _chunk_times(problem, laid, rows, batch.layouts[layout], num_repeated)
        yield (
            rows,
            pipeline_times(
                tuple(Schedule)[schedule],
                stages,
                len(batch.layouts[layout]) // blocks.num_stages,
                microbatches,
                forward_s=forward,
                input_gradient_s=backward - weight,
                weight_gradient_s=weight,
                send_s=message[rows],
            ),
        )


def _needs_order(batch: PlanBatch) -> Bools:
    """Which plans have a schedule that splits the backward pass: a function of the plan alone."""
    return np.isin(batch.schedule, SPLIT_SCHEDULES)


def _chunk_times(
    problem: Problem, laid: Stages, rows: Ints, layout: tuple[int, ...], num_repeated: int
) -> tuple[Floats, Floats, Floats]:
    """(forward, backward, weight gradients in it) of one micro-batch through every chunk: shape (plans, chunks)."""
    forward, backward, weight, split = (np.zeros((len(rows), len(layout))) for _ in range(4))
    one = np.array([layout]), np.array([num_repeated])
    for block, (count, again) in chunk_blocks(problem.model, *one).items():
        cost = laid.work.costs[block]
        forward += count * cost.total_forward_s[rows, None]
        backward += count * cost.total_backward_s[rows, None] + again * cost.total_repeat_s[rows, None]
        weight += count * cost.weight_s[rows, None]
        split += count * cost.split_s[rows, None]
    for chunk, ends in ((0, laid.first), (-1, laid.last)):
        forward[:, chunk] += ends[0][rows]
        backward[:, chunk] += ends[1][rows]
    weight[:, -1] += laid.head_weight_s[rows]
    action = laid.work.action_s[rows, None]
    if not problem.framework.kernels.splits_first_chunk:
        weight[:, 0], split[:, 0] = backward[:, 0], 0.0
    return forward + action, backward + split + 2 * action, weight + action


def _end_of_step(problem: Problem, laid: Stages) -> dict[str, Floats]:
    """Exposed gradient reduction, optimizer step and parameter gather (`modelling` C7, E5)."""
    batch, links = laid.batch, laid.work.links
    stages = laid.forward_s.shape[1]
    reduce, gather = reduction_s(problem, batch, laid.blocks, laid.parameters, links)
    first = FirstStage.of(laid.blocks, laid.parameters)
    exposed = shown_reduce_s(problem, batch, laid.backward_s, first, reduce)
    shown = shown_gather_s(problem, batch, laid.forward_s, first, gather)
    if (shared := laid.work.shared).known.any():
        # Gathers of the first passes and reductions of the last ones, of layers and ends alike.
        layers = laid.parameters.dense.max(axis=1) / layer_parameters(problem, batch)
        exposed = np.where(shared.known, layers * shared.once_s, exposed)
        shown = np.where(shared.known, 0.0, shown)
    if problem.model.tied_embeddings and stages > 1:
        ends = (groups(batch).pp[0] * (stages - 1), np.full(len(batch), 2, dtype=np.int64))
        tied = links.all_reduce_s(*ends, tied_table_bytes(problem, batch))
        # The rank that begins and ends a V has one table.
        exposed = exposed + np.where(laid.blocks.is_last[:, 0], 0.0, tied)
    own = own_parameters(batch, laid.parameters).max(axis=1)
    held = (laid.parameters.dense + laid.parameters.expert).max(axis=1)
    update = optimizer_s(problem, batch, own, held)
    return {"data_parallel_reduce": exposed, "optimizer": update, "parameter_gather": shown}


def straggler_share(num_devices: Ints) -> Floats:
    """How much longer than a rank's mean step the steps of so many take, beyond what is so on one node."""

    def slowest(ranks: int) -> float:
        return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))

    sizes, at = np.unique(np.maximum(num_devices, DEVICES_IN_RATES), return_inverse=True)
    beyond = np.array([slowest(int(ranks)) for ranks in sizes]) - slowest(DEVICES_IN_RATES)
    return STRAGGLER_SPREAD * beyond[at]


def work_terms(laid: Stages, stage: Ints) -> dict[str, Floats]:
    """What keeps one stage of every plan busy for a step, by term."""
    return {name: laid.batch.num_microbatches * value for name, value in _microbatch_terms(laid, stage).items()}


def _microbatch_terms(laid: Stages, stage: Ints) -> dict[str, Floats]:
    """What keeps it busy for one micro-batch."""
    rows = np.arange(len(laid.batch))
    is_first, is_last = stage == 0, laid.blocks.is_last[rows, stage]
    held = [
        (laid.work.costs[block], count[rows, stage], laid.blocks.repeated[block][rows, stage])
        for block, count in laid.blocks.count.items()
    ]
    terms = {name: add_up(cost.term_s(name, count, repeated) for cost, count, repeated in held) for name in TERMS}
    table_tp, head_tp = (add_up(one) for one in laid.work.ends_tp)
    terms["tp_communication"] += np.where(is_first, table_tp, 0.0) + np.where(is_last, head_tp, 0.0)
    table_shards, head_shards = (add_up(one) for one in laid.ends)
    terms["fsdp_communication"] += np.where(is_first, table_shards, 0.0) + np.where(is_last, head_shards, 0.0)
    terms["launch"] += 2 * laid.batch.vp * laid.work.action_s - np.where(is_last, add_up(laid.made_up_s), 0.0)
    terms["head"] = np.where(is_last, laid.head[0] + laid.head[1], 0.0) + np.where(is_first, laid.work.embedding_s, 0.0)
    terms["allocator_retries"] = laid.retries_s[rows, stage]
    return terms


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
    terms["overhead"] = np.full(len(batch), problem.framework.host.step_overhead_s)
    terms["stragglers"] = straggler_share(batch.num_devices) * add_up(terms.values())
    terms = {name: problem.calibration.overall * value for name, value in terms.items()}
    worst = np.argmax(laid.memory.reserved_bytes, axis=1)
    at_worst = {name: value[rows, worst] for name, value in laid.memory.terms.items()}
    return terms, at_worst, worst


def spread_kinds(problem: Problem, batch: PlanBatch) -> Ints:
    """Which of `TIME_SPREADS` holds for every plan: errors are alike where plans wait for the same things.

    Beyond one leaf switch everything varies most; then come pipelines, which wait at every message, and layers that
    wait for the network.
    """
    cluster = problem.cluster
    leaf_nodes = cluster.network.tiers[0].num_nodes if cluster.network.tiers else cluster.num_nodes
    beyond_leaf = batch.num_devices > leaf_nodes * cluster.devices_per_node
    leaves_domain = batch.tp * batch.cp > cluster.levels[-1].num_devices
    names = ("spine_time_spread", "pipeline_time_spread", "tensor_time_spread")
    return np.select([beyond_leaf, batch.pp > 1, leaves_domain], [TIME_SPREADS.index(name) for name in names], 0)


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
    spread = np.exp(NORMAL_90 * problem.time_spreads[spread_kinds(problem, batch)])
    host_capacity, spread_of_memory = problem.cluster.host.memory_bytes, problem.calibration.memory_spread
    reserved = add_up(memory.values())
    return CostEstimate(
        batch=batch,
        step_s=step,
        low_s=step / spread,
        high_s=step * spread,
        terms_s=time_terms,
        memory_bytes=reserved,
        logged_memory_bytes=logged,
        memory_terms_bytes=memory,
        worst_stage=worst,
        capacity_bytes=problem.capacity_bytes,
        host_memory_bytes=host,
        # Whichever runs out first, the device or the host.
        oom_z=np.log(np.maximum(reserved / problem.capacity_bytes, host / host_capacity)) / spread_of_memory,
    )


def _laid_out(problem: Problem, batch: PlanBatch) -> Iterator[tuple[Ints, Stages]]:
    """(plans, their stages) by the number of stages, in blocks of about `BLOCK_VALUES`."""
    order = np.argsort(batch.pp, kind="stable")
    upto = np.cumsum(batch.pp[order]) // BLOCK_VALUES
    for block in np.split(order, np.flatnonzero(np.diff(upto)) + 1) if len(batch) else ():
        some = batch.take(block)
        work = Work.of(problem, some)
        starts = np.flatnonzero(np.diff(some.pp, prepend=0)).tolist()
        for start, stop in pairwise((*starts, len(block))):
            rows = slice(start, stop)
            yield block[rows], lay_out(problem, some.take(rows), int(some.pp[start]), work.take(rows))


def stage_costs(problem: Problem, plan: ParallelPlan) -> tuple[StageCost, ...]:
    """Time per micro-batch and memory of every pipeline rank of one plan."""
    problem = problem.placed(plan.placement)
    laid = lay_out(problem, PlanBatch.of([plan], problem.model.num_layers), plan.pp)
    return tuple(stage_cost(problem, laid, 0, stage) for stage in range(plan.pp))


def stage_cost(problem: Problem, laid: Stages, at: int, stage: int) -> StageCost:
    """That of one pipeline rank of the plan `at` a place in the batch."""
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
