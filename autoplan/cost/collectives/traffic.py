"""What does a step of one plan move over the links of every level, communicator by communicator?

Buffers and groups are those that the pricing functions take; here they are counted over a step, whether they show or
hide behind computation.  What has no price is not counted.  Arrays have one element per stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.blocks import BYTES_PER_REDUCED_TOKEN, LOSS_REDUCTIONS, local_parameters
from autoplan.cost.collectives.end_of_step import gathered_bytes, reduce_buckets
from autoplan.cost.kernels.arithmetic import block_shapes
from autoplan.cost.kernels.times import padded_vocab, rank_tokens
from autoplan.cost.memory.recompute import ATTENTION_BLOCKS
from autoplan.cost.memory.stage_memory import StageParameters, stage_parameters
from autoplan.cost.network.links import Links, link_bytes
from autoplan.cost.network.rank_groups import (
    Groups,
    cp_buffer_bytes,
    dispatched_copies,
    ep_buffer_bytes,
    groups,
    has_tp_traffic,
    message_bytes,
    tied_table_bytes,
    tp_buffer_bytes,
    tp_gathered_bytes,
)
from autoplan.cost.pipeline.layout import StageBlocks, repeats_mtp, stage_blocks
from autoplan.cost.pipeline.order import chunks_of_ranks
from autoplan.spec.enums import RecomputeModule
from autoplan.spec.model import Block
from autoplan.spec.plan import SELECTIVE, ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import Operation
from autoplan.topology.levels import Gaps, Level, compile_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """One collective or message that the ranks of a stage repeat `times` a step."""

    communicator: str
    operation: Operation
    group: tuple[Ints, Ints]  # stride, size
    buffer_bytes: Floats
    times: Floats
    gaps: Gaps | None = None
    copies: int = 1

    def seconds(self, links: Links) -> Floats:
        """Time of all of them, one after another."""
        arguments = (*self.group, self.buffer_bytes)
        match self.operation:
            case "all_reduce":
                one = links.all_reduce_s(*arguments, self.gaps)
            case "all_gather":
                one = links.all_gather_s(*arguments, self.gaps)
            case "reduce_scatter":
                one = links.reduce_scatter_s(*arguments, self.gaps)
            case "all_to_all":
                one = links.all_to_all_s(*arguments, self.copies)
            case _:
                one = links.send_s(*arguments)
        return self.times * one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """One kind of operation of a communicator, in a step of a rank of the busiest stage."""

    communicator: str
    operation: Operation
    num_ranks: int
    buffer_bytes: float  # of the largest one
    times: float
    level_bytes: tuple[float, ...]  # over the links of every level, per device and direction
    time_s: float  # exposed or not


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """The traffic of a step on the stage whose links are busy longest."""

    stage: int
    levels: tuple[Level, ...]
    rows: tuple[TrafficRow, ...]

    @property
    def level_bytes(self) -> tuple[float, ...]:
        """All that a step moves over the links of every level, per device and direction."""
        return tuple(sum(row.level_bytes[at] for row in self.rows) for at in range(len(self.levels)))

    def share(self, row: TrafficRow) -> float:
        """The part of a row in the time of all."""
        total = sum(one.time_s for one in self.rows)
        return row.time_s / total if total else 0.0


def step_traffic(problem: Problem, plan: ParallelPlan) -> StepTraffic:
    """What one step of `plan` moves; every tier of switches is a level, also those that hold nothing back."""
    problem = problem.placed(plan.placement)
    topology = compile_topology(problem.cluster, plan.placement, every_tier=True)
    links, found = Links.of(problem), list(transfers(problem, plan))
    seconds = [one.seconds(links) for one in found]
    stage = int(np.argmax(sum(seconds, np.zeros(plan.pp))))
    rows: dict[tuple[str, Operation], TrafficRow] = {}
    for one, time in zip(found, seconds, strict=True):
        if one.group[1][stage] < 2 or one.times[stage] * one.buffer_bytes[stage] == 0:
            continue
        moved = link_bytes(topology, one.operation, *one.group, one.buffer_bytes, gaps=one.gaps, copies=one.copies)
        row = TrafficRow(
            communicator=one.communicator,
            operation=one.operation,
            num_ranks=int(one.group[1][stage]),
            buffer_bytes=float(one.buffer_bytes[stage]),
            times=float(one.times[stage]),
            level_bytes=tuple((one.times * moved)[:, stage].tolist()),
            time_s=float(time[stage]),
        )
        key = one.communicator, one.operation
        rows[key] = _joined(rows[key], row) if key in rows else row
    return StepTraffic(stage=stage, levels=topology.levels, rows=tuple(rows.values()))


def _joined(one: TrafficRow, other: TrafficRow) -> TrafficRow:
    return replace(
        one,
        buffer_bytes=max(one.buffer_bytes, other.buffer_bytes),
        times=one.times + other.times,
        level_bytes=tuple(a + b for a, b in zip(one.level_bytes, other.level_bytes, strict=True)),
        time_s=one.time_s + other.time_s,
    )


def transfers(problem: Problem, plan: ParallelPlan) -> Iterator[Transfers]:
    """Everything that the ranks of every stage send in a step."""
    batch = PlanBatch.of([plan], problem.model.num_layers)
    blocks = stage_blocks(problem.model, batch, plan.pp)
    places, parameters = groups(batch), stage_parameters(problem, batch, blocks)
    for block, shape in block_shapes(problem.model).items():
        count, forward = _passes(problem, batch, blocks, block)
        if not count.any():
            continue
        if has_tp_traffic(block, shape):
            yield from _tensor(problem, batch, places, forward, count)
        if block in ATTENTION_BLOCKS:
            yield from _context(problem, batch, places, forward, count)
        if block is Block.MOE:
            yield from _experts(problem, batch, places, forward + count)
        yield from _units(problem, batch, places, count, local_parameters(batch, shape))
    yield from _tensor_ends(problem, batch, places, blocks)
    # Embedding and head are units of their own, also on one stage.
    units = np.where(blocks.is_last[0] & (np.arange(plan.pp) == 0), 2, 1)
    passes = float(plan.num_microbatches) * units
    yield from _units(problem, batch, places, passes, (parameters.ends[0] / units, np.zeros(1)))
    yield from _end_of_step(problem, batch, places, parameters)
    yield from _pipeline(problem, plan, batch, places)


def _passes(problem: Problem, batch: PlanBatch, blocks: StageBlocks, block: Block) -> tuple[Floats, Floats]:
    """(backward, forward) passes through blocks of a kind in a step, those of recomputation that send among these."""
    count, repeated = (table[block][0] for table in (blocks.count, blocks.repeated))
    if problem.model.num_mtp_layers:
        predicting = problem.model.num_mtp_layers * problem.model.mtp_layer.count(block) * blocks.is_last[0]
        count, repeated = count + predicting, repeated + predicting * repeats_mtp(batch)
    share = problem.framework.kernels.selective_recompute_share
    if batch.recompute[0] == SELECTIVE and share:
        repeated = share * count
    elif (block is Block.MLP and batch.repeats(RecomputeModule.MLP)[0]) or (
        block is Block.MOE and batch.repeats(RecomputeModule.MOE)[0]
    ):
        repeated = count
    microbatches = float(batch.num_microbatches[0])
    return microbatches * count, microbatches * (count + repeated)


def _each(group: tuple[Ints, Ints], stages: int) -> tuple[Ints, Ints]:
    """The group of the one plan, for every stage."""
    return np.repeat(group[0], stages), np.repeat(group[1], stages)


def _tensor(
    problem: Problem, batch: PlanBatch, places: Groups, forward: Floats, backward: Floats
) -> Iterator[Transfers]:
    """Of blocks with matrices that tensor parallelism splits (`modelling` D5)."""
    group, buffer = _each(places.tp, len(forward)), np.repeat(tp_buffer_bytes(problem, batch), len(forward))
    passes = forward + backward
    if not batch.sp[0]:
        yield Transfers(communicator="tp", operation="all_reduce", group=group, buffer_bytes=buffer, times=passes)
        return
    # The inputs are gathered once more for the weight gradient, unless they are kept whole.
    again = backward * (1 + problem.framework.memory.regathers_norm_output)
    gathered = np.repeat(tp_gathered_bytes(problem, batch), len(forward))
    times = forward + again
    yield Transfers(communicator="tp", operation="all_gather", group=group, buffer_bytes=gathered, times=times)
    yield Transfers(communicator="tp", operation="reduce_scatter", group=group, buffer_bytes=buffer, times=passes)


def _tensor_ends(problem: Problem, batch: PlanBatch, places: Groups, blocks: StageBlocks) -> Iterator[Transfers]:
    """Of the embedding on the first stage, and of head and loss on the last, as `ends_tp_s` has them."""
    framework, stages, microbatches = problem.framework, blocks.num_stages, float(batch.num_microbatches[0])
    tables = microbatches * (np.arange(stages) == 0)
    heads = microbatches * (1 + problem.model.num_mtp_layers) * blocks.is_last[0]
    tokens, none = rank_tokens(problem, batch), np.zeros(stages)
    hidden = tp_buffer_bytes(problem, batch)
    sums: Operation = "reduce_scatter" if batch.sp[0] else "all_reduce"
    gathers = tables + heads * (1 + framework.memory.regathers_norm_output) if batch.sp[0] else none
    kinds: list[tuple[Operation, Floats, Floats]] = [(sums, hidden, tables + heads), ("all_gather", hidden, gathers)]
    if framework.memory.shards_logits:
        kinds.append(("all_reduce", BYTES_PER_REDUCED_TOKEN * tokens, LOSS_REDUCTIONS * heads))
    else:
        kinds.append(("all_gather", problem.training.element_bytes * tokens * padded_vocab(problem, batch), heads))
    for operation, buffer, times in kinds:
        yield Transfers(
            communicator="tp",
            operation=operation,
            group=_each(places.tp, stages),
            buffer_bytes=np.repeat(buffer, stages),
            times=times,
        )


def _context(
    problem: Problem, batch: PlanBatch, places: Groups, forward: Floats, backward: Floats
) -> Iterator[Transfers]:
    """Keys and values around a ring, in the backward pass their gradients too; or all of attention's tensors across."""
    group = _each(places.cp, len(forward))
    kv, heads = (np.repeat(one, len(forward)) for one in cp_buffer_bytes(problem, batch))
    if batch.plan(0).cp_kind == "ring":
        whole, times = kv * batch.cp, forward + 2 * backward
        if problem.framework.kernels.expands_kv:  # fp32 gradients
            whole, times = heads * batch.cp, forward + 3 * backward
        yield Transfers(communicator="cp", operation="all_gather", group=group, buffer_bytes=whole, times=times)
        return
    for buffer in (heads, kv):
        yield Transfers(
            communicator="cp", operation="all_to_all", group=group, buffer_bytes=buffer, times=forward + backward
        )


def _experts(problem: Problem, batch: PlanBatch, places: Groups, passes: Floats) -> Iterator[Transfers]:
    """Dispatch and combine, and what expert tensor parallelism gathers and adds up between them."""
    stages = len(passes)
    dispatched, combined, gathered = (np.repeat(one, stages) for one in ep_buffer_bytes(problem, batch))
    for buffer in (dispatched, combined):
        yield Transfers(
            communicator="ep",
            operation="all_to_all",
            group=_each(places.ep, stages),
            buffer_bytes=buffer,
            times=passes,
            copies=dispatched_copies(problem),
        )
    group = (np.ones(stages, dtype=np.int64), np.repeat(batch.etp, stages))
    for operation in ("all_gather", "reduce_scatter"):
        yield Transfers(communicator="etp", operation=operation, group=group, buffer_bytes=gathered, times=passes)


def _sharded(
    places: Groups, held: tuple[Floats, Floats], operation: Operation, width: float, times: Floats
) -> Iterator[Transfers]:
    """A collective of the parameters that a rank holds, (dense, expert), over the groups that shard them."""
    stages = len(times)
    gaps = places.gaps.repeat(stages) if places.gaps else None
    for name, group, elements, between in (
        ("shard", places.shard, held[0], gaps),
        ("expert shard", places.expert_shard, held[1], None),
    ):
        yield Transfers(
            communicator=name,
            operation=operation,
            group=_each(group, stages),
            buffer_bytes=np.broadcast_to(width * elements, stages),
            times=times,
            gaps=between,
        )


def _units(
    problem: Problem, batch: PlanBatch, places: Groups, passes: Floats, held: tuple[Floats, Floats]
) -> Iterator[Transfers]:
    """Gathers and reductions of sharded blocks as `fsdp_s` has them."""
    framework, sharding = problem.framework, batch.plan(0).sharding
    wire = problem.bytes_per_reduced_grad
    if sharding == "zero2" and framework.network.zero2_reduces_every_microbatch:
        yield from _sharded(places, held, "reduce_scatter", wire, passes)
    if sharding != "zero3":
        return
    once = batch.pp[0] > 1 and not framework.network.zero3_regathers_in_pipeline
    reduces = passes / batch.num_microbatches if once else passes
    yield from _sharded(places, held, "all_gather", problem.training.element_bytes, reduces if once else 2 * passes)
    yield from _sharded(places, held, "reduce_scatter", wire, reduces)


def _end_of_step(
    problem: Problem, batch: PlanBatch, places: Groups, parameters: StageParameters
) -> Iterator[Transfers]:
    """Gradients and parameters as `reduction_s` has them, and the table that first and last stage share."""
    framework, sharding = problem.framework, batch.plan(0).sharding
    held, wire = (parameters.dense[0], parameters.expert[0]), problem.bytes_per_reduced_grad
    stages = len(held[0])
    ones = np.ones(stages)
    gaps = places.gaps.repeat(stages) if places.gaps else None
    if sharding == "none":
        buckets = reduce_buckets(framework, held[0])
        for name, group, buffer, times, between in (
            ("replicate", places.dense_copies, wire * held[0] / buckets, buckets, gaps),
            ("expert replicate", places.expert_copies, wire * held[1], ones, None),
        ):
            yield Transfers(
                communicator=name,
                operation="all_reduce",
                group=_each(group, stages),
                buffer_bytes=buffer,
                times=times,
                gaps=between,
            )
    else:
        if sharding == "zero1" or (sharding == "zero2" and not framework.network.zero2_reduces_every_microbatch):
            operation: Operation = "all_reduce" if framework.network.zero1_grad_all_reduce else "reduce_scatter"
            yield from _sharded(places, held, operation, wire, ones)
        if sharding != "zero3":
            width, ends = gathered_bytes(problem, batch), parameters.ends[0]
            wide = held[0] + ends * (problem.training.element_bytes / width - 1.0)
            yield from _sharded(places, (wide, held[1]), "all_gather", width[0], ones)
        yield Transfers(
            communicator="replicate",
            operation="all_reduce",
            group=_each(places.replicate, stages),
            buffer_bytes=wire * (held[0] / places.shard[1] + held[1] / places.expert_shard[1]),
            times=ones,
        )
    if problem.model.tied_embeddings and stages > 1:
        is_end = np.isin(np.arange(stages), (0, stages - 1))
        yield Transfers(
            communicator="tied embedding",
            operation="all_reduce",
            group=(np.repeat(places.pp[0] * (stages - 1), stages), np.full(stages, 2)),
            buffer_bytes=np.repeat(tied_table_bytes(problem, batch), stages),
            times=is_end.astype(np.float64),
        )


def _pipeline(problem: Problem, plan: ParallelPlan, batch: PlanBatch, places: Groups) -> Iterator[Transfers]:
    """Activations to the stage of the next chunk and gradients to that of the one before, over the longest hop."""
    owner = np.empty(plan.pp * plan.vp, dtype=np.int64)
    for rank, held in enumerate(chunks_of_ranks(plan.schedule, plan.pp, plan.vp)):
        owner[held] = rank
    crosses = owner[1:] != owner[:-1]
    sends = np.bincount(np.concatenate([owner[:-1][crosses], owner[1:][crosses]]), minlength=plan.pp)
    times = (plan.num_microbatches * sends).astype(np.float64)
    sent, gathered = (np.repeat(one, plan.pp) for one in message_bytes(problem, batch))
    group = _each(places.pp, plan.pp)
    yield Transfers(communicator="pp", operation="send_recv", group=group, buffer_bytes=sent, times=times)
    group = _each(places.tp, plan.pp)
    yield Transfers(communicator="pp", operation="all_gather", group=group, buffer_bytes=gathered, times=times)
