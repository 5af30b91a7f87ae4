"""Bytes per step of one plan over the links of every level, by communicator.

Every collective of a step is counted as described by its parallelism, whether it is exposed or hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.collectives.collective import Collective
from autoplan.cost.collectives.context_parallel import context_parallel
from autoplan.cost.collectives.end_of_step import end_of_step
from autoplan.cost.collectives.expert_parallel import expert_parallel
from autoplan.cost.collectives.pipeline_messages import message, tied_table
from autoplan.cost.collectives.sharded_states import compressed_states, sharded_states
from autoplan.cost.collectives.tensor_parallel import (
    adapter_collectives,
    block_collectives,
    embedding_collectives,
    encoder_gradient,
    has_tensor_parallel,
    head_collectives,
)
from autoplan.cost.dynamic_cp import parts_of
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.network.algorithms import link_bytes
from autoplan.cost.network.links import Links
from autoplan.cost.parameters import end_parameters, stage_parameters, unit_parameters
from autoplan.cost.pipeline.layout import StageBlocks, repeats_beside, stage_blocks
from autoplan.cost.pipeline.order import rank_of_chunks
from autoplan.cost.recompute_times import resent_share
from autoplan.spec.blocks import ATTENTION_BLOCKS, ENCODER_BLOCKS, Block
from autoplan.spec.operations import Operation
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.levels import Level, compile_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Number of passes of each kind that every stage runs per step."""

    forward: Floats | float
    backward: Floats | float
    repeated: Floats | float = 0.0  # recomputed forward passes

    def scaled(self, factor: float) -> Passes:
        """Return so many times the passes."""
        return Passes(forward=factor * self.forward, backward=factor * self.backward, repeated=factor * self.repeated)

    def count(self, collective: Collective) -> Floats:
        """Return the number of runs of the collective in these passes."""
        forward = self.forward + self.repeated if collective.is_repeated else self.forward
        return np.asarray(forward * collective.forward + self.backward * collective.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """A collective or message of one plan that the ranks of every stage run `times` per step."""

    collective: Collective
    times: Floats

    @property
    def members(self) -> int:
        """Number of participating ranks."""
        return int(self.collective.group.size.flat[0])

    @property
    def buffer_bytes(self) -> Floats:
        """Buffer size of one run on every stage, in bytes."""
        return np.broadcast_to(self.collective.buffer_bytes.ravel(), self.times.shape)

    def seconds(self, links: Links) -> Floats:
        """Return the time of all runs, one after another."""
        return self.times * self.collective.seconds(links).ravel()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """One kind of operation of a communicator, per step, for a rank of the busiest stage."""

    communicator: str
    operation: Operation
    num_ranks: int
    buffer_bytes: float  # of the largest run
    times: float
    level_bytes: tuple[float, ...]  # over the links of every level, per device and direction
    time_s: float  # exposed or not


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Traffic of a step on the stage whose links are busy longest."""

    stage: int
    levels: tuple[Level, ...]
    rows: tuple[TrafficRow, ...]

    @property
    def level_bytes(self) -> tuple[float, ...]:
        """Bytes per step over the links of every level, per device and direction."""
        return tuple(sum(row.level_bytes[at] for row in self.rows) for at in range(len(self.levels)))

    def share(self, row: TrafficRow) -> float:
        """Return the share of a row in the time of all rows."""
        total = sum(any_row.time_s for any_row in self.rows)
        return row.time_s / total if total else 0.0


def step_traffic(problem: Problem, plan: ParallelPlan) -> StepTraffic:
    """Traffic of one step of `plan`; every switch tier is a level, including those without oversubscription."""
    problem = problem.placed(plan.placement)
    topology = compile_topology(problem.cluster, plan.placement, every_tier=True)
    links, moves = Links.of(problem), list(transfers(problem, plan))
    seconds = [transfer.seconds(links) for transfer in moves]
    stage = int(np.argmax(sum(seconds, np.zeros(plan.pp))))
    rows: dict[tuple[str, Operation], TrafficRow] = {}
    for transfer, time_s in zip(moves, seconds, strict=True):
        sent, times = transfer.collective, float(transfer.times[stage])
        if transfer.members < 2 or times * transfer.buffer_bytes[stage] == 0:
            continue
        moved = link_bytes(topology, sent.operation, sent.group, sent.buffer_bytes, sent.copies)
        moved = moved.reshape(len(topology.levels), -1)[:, stage if sent.buffer_bytes.size > 1 else 0]
        row = TrafficRow(
            communicator=sent.communicator,
            operation=sent.operation,
            num_ranks=transfer.members,
            buffer_bytes=float(transfer.buffer_bytes[stage]),
            times=times,
            level_bytes=tuple((times * moved).tolist()),
            time_s=float(time_s[stage]),
        )
        key = sent.communicator, sent.operation
        rows[key] = _joined(rows[key], row) if key in rows else row
    return StepTraffic(stage=stage, levels=topology.levels, rows=tuple(rows.values()))


def _joined(row: TrafficRow, added: TrafficRow) -> TrafficRow:
    return replace(
        row,
        buffer_bytes=max(row.buffer_bytes, added.buffer_bytes),
        times=row.times + added.times,
        level_bytes=tuple(a + b for a, b in zip(row.level_bytes, added.level_bytes, strict=True)),
        time_s=row.time_s + added.time_s,
    )


def transfers(problem: Problem, plan: ParallelPlan) -> Iterator[Transfers]:
    """List all collectives and messages of every stage in a step."""
    batch = problem.batch([plan])
    stages, microbatches = np.arange(plan.pp), float(plan.num_microbatches)
    blocks = stage_blocks(problem.model, batch, plan.pp)
    parameters = stage_parameters(problem, batch, blocks)
    finetuning = problem.training.finetuning
    parts = list(parts_of(problem, batch))
    for block, shape in layer_shapes(problem.model, finetuning).items():
        passes = _block_passes(problem, batch, blocks, block)
        if np.any(passes.forward):
            for part in parts:
                yield from _counted(
                    _of_block(part.problem, part.plans, block, shape), passes.scaled(part.weight), stages
                )
    if (encoding := problem.of_encoder) is not None:
        backward = float(problem.trains_encoder)
        for block, shape in layer_shapes(encoding.model, encoding.training.finetuning).items():
            count = float(plan.num_microbatches) * blocks.count[ENCODER_BLOCKS[block]][0]
            again = count * backward * repeats_beside(batch)
            passes = Passes(forward=count, backward=backward * count, repeated=again)
            yield from _counted(_of_block(encoding, batch, block, shape), passes, stages)
    is_first, is_last = 1.0 * (stages == 0), 1.0 * blocks.is_last[0]
    tables = Passes(forward=microbatches * is_first, backward=microbatches * is_first)
    heads = microbatches * (1 + problem.model.num_mtp_layers) * is_last
    for part in parts:
        hidden, loss = head_collectives(part.problem, part.plans)
        yield from _counted(embedding_collectives(part.problem, part.plans), tables.scaled(part.weight), stages)
        yield from _counted((*hidden, loss), Passes(forward=heads, backward=heads).scaled(part.weight), stages)
    # Embedding and head are separate units, even on one stage.
    for end, where in zip(end_parameters(problem, blocks, parameters), (is_first, is_last), strict=True):
        unit = (*sharded_states(problem, batch, end), *compressed_states(problem, batch, end))
        yield from _counted(unit, Passes(forward=microbatches * where, backward=microbatches * where), stages)
    for collective in end_of_step(problem, batch, parameters):
        yield Transfers(collective=collective, times=np.broadcast_to(collective.at_end, parameters.dense.shape)[0])
    tied = tied_table(problem, batch, plan.pp)
    yield Transfers(collective=tied, times=np.ravel(tied.at_end) * np.isin(stages, (0, plan.pp - 1)))
    yield from _counted(message(problem, batch), _hops(plan), stages)


def _counted(collectives: Iterable[Collective], passes: Passes, stages: Ints) -> Iterator[Transfers]:
    for collective in collectives:
        yield Transfers(collective=collective, times=np.broadcast_to(passes.count(collective), stages.shape))


def _of_block(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Iterator[Collective]:
    if has_tensor_parallel(block, shape):
        yield from block_collectives(problem, batch)
    yield from adapter_collectives(problem, batch, shape)
    if block in ATTENTION_BLOCKS:
        yield from context_parallel(problem, batch)
    if problem.model.reads_encoder(block):
        yield encoder_gradient(problem, batch)
    if block is Block.MOE:
        yield from expert_parallel(problem, batch)
    unit = unit_parameters(problem, batch, shape)
    yield from (*sharded_states(problem, batch, unit), *compressed_states(problem, batch, unit))


def _block_passes(problem: Problem, batch: PlanBatch, blocks: StageBlocks, block: Block) -> Passes:
    """Return the passes through blocks of one kind in a step, including recomputed passes that communicate."""
    count, repeated = blocks.count[block][0], blocks.repeated[block][0]
    if problem.model.num_mtp_layers:
        predicting = problem.model.num_mtp_layers * problem.model.mtp_layer.count(block) * blocks.is_last[0]
        count, repeated = count + predicting, repeated + predicting * repeats_beside(batch)
    again = np.maximum(repeated, resent_share(problem, batch, block) * count)
    microbatches = float(batch.num_microbatches[0])
    return Passes(forward=microbatches * count, backward=microbatches * count, repeated=microbatches * again)


def _hops(plan: ParallelPlan) -> Passes:
    """Messages from every stage to that of the next chunk, and gradients to that of the previous chunk."""
    owner = rank_of_chunks(plan.schedule, plan.pp, plan.vp)
    crosses = owner[1:] != owner[:-1]
    forward, backward = (
        plan.num_microbatches * np.bincount(senders[crosses], minlength=plan.pp) for senders in (owner[:-1], owner[1:])
    )
    return Passes(forward=forward.astype(np.float64), backward=backward.astype(np.float64))
