"""Time that ranks wait for longer samples on other ranks: the expected maximum over ranks minus the mean.

Each rank draws its micro-batches at random.  The time of a micro-batch is a constant part, a part proportional to its
tokens, and a part proportional to the squares of the attended lengths.  The distributions of tokens and squares are
those of the samples on a grid; convolution gives the distribution of a sum, and the power of the cumulative
distribution that of a maximum.  Nothing is sampled, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, add_up, distinct_rows
from autoplan.cost.block_cost import BlockCost
from autoplan.cost.dynamic_cp import chooses_degrees, least_degree, num_samples
from autoplan.cost.dynamic_schedule import drawn_rounds, idle_share
from autoplan.cost.kernels.sequences import Kinds, cut_samples, longest_of, packs_of
from autoplan.spec.blocks import ENCODER_BLOCKS, Block
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.lengths import Batching, Lengths
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import BLOCK_TERMS, OF_TOKENS
from autoplan.spec.training import TrainingSpec

CELLS = 1024  # cells of the grid
GRID_SHARE = 0.999  # factor on a lower bound of a wait, to allow for the error of the grid
MIN_MASS = 1e-12  # of a cell at either end; cells with less are dropped

Part = Literal["tokens", "squares"]


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities of the values start, start + step, start + 2 step, ..."""

    start: float
    step: float
    mass: Floats

    @classmethod
    def of(cls, kinds: Kinds, step: float = 0.0) -> Distribution:
        """Distribution of some values, each split between its two neighbouring cells so that the mean is preserved."""
        start, end = float(kinds.values.min()), float(kinds.values.max())
        step = step or (end - start) / (CELLS - 1)
        if step <= 0.0:
            return cls(start, 0.0, np.ones(1))
        place = (kinds.values - start) / step
        cell = place.astype(np.int64)
        mass = np.zeros(int(cell.max()) + 2)
        np.add.at(mass, cell, kinds.weights * (1.0 - (place - cell)))
        np.add.at(mass, cell + 1, kinds.weights * (place - cell))
        return cls(start, step, mass / mass.sum())

    @property
    def values(self) -> Floats:
        """Values of the cells."""
        return np.asarray(self.start + self.step * np.arange(len(self.mass)))

    @property
    def mean(self) -> float:
        """Expected value."""
        return float(self.values @ self.mass)

    def largest(self, draws: int) -> Distribution:
        """Distribution of the maximum of this many independent draws."""
        below = np.minimum(np.cumsum(self.mass), 1.0) ** draws
        return Distribution(self.start, self.step, np.diff(below, prepend=0.0))

    def sum(self, draws: int) -> Distribution:
        """Distribution of the sum of this many independent draws, by doubling."""
        total, power = None, self
        while True:
            if draws & 1:
                total = power if total is None else total._plus(power)
            draws >>= 1
            if not draws:
                assert total is not None
                return total
            power = power._plus(power)

    def scaled(self, factor: float) -> Distribution:
        """Distribution of the value times `factor`."""
        return Distribution(factor * self.start, factor * self.step, self.mass)

    def _plus(self, added: Distribution) -> Distribution:
        """Distribution of the sum of one draw from each."""
        step = max(self.step, added.step)
        if step == 0.0:
            return Distribution(self.start + added.start, 0.0, np.ones(1))
        here, there = self._on(step), added._on(step)
        size = len(here.mass) + len(there.mass) - 1
        padded = 1 << (size - 1).bit_length()
        mass = np.fft.irfft(np.fft.rfft(here.mass, padded) * np.fft.rfft(there.mass, padded), padded)[:size]
        mass = np.maximum(mass, 0.0)
        likely = np.flatnonzero(mass > MIN_MASS * mass.max())
        first, last = int(likely[0]), int(likely[-1])
        mass = mass[first : last + 1] / mass[first : last + 1].sum()
        total = Distribution(here.start + there.start + first * step, step, mass)
        return total._on(step * (len(mass) - 1) / (CELLS - 1)) if len(mass) > CELLS else total

    def _on(self, step: float) -> Distribution:
        return self if step == self.step else Distribution.of(Kinds(self.values, self.mass), step)


class Meeting(NamedTuple):
    """Synchronisation of a plan's replicas."""

    microbatches: int
    stages: int
    is_gpipe: bool
    in_turn: int  # replicas that synchronise in every micro-batch
    at_end: int  # groups of them that synchronise at the end of a step


@lru_cache(maxsize=1024)
def _microbatch(lengths: Lengths, batching: Batching, seq_len: int, micro_batch: int, part: Part) -> Distribution:
    """Distribution of one part of a micro-batch relative to its mean."""
    draws, power = 1, {"tokens": 1, "squares": 2}[part]
    if batching == "packed":
        packs = packs_of(lengths, seq_len)
        kinds, draws = Kinds(packs.squares, packs.share), micro_batch
    elif batching == "padded":
        longest = longest_of(lengths, seq_len, micro_batch)
        kinds = Kinds(longest.values**power, longest.weights)
    else:
        samples = cut_samples(lengths, seq_len)
        kinds, draws = Kinds(samples.values**power, samples.weights), micro_batch
    return Distribution.of(Kinds(kinds.values / (draws * kinds.mean), kinds.weights)).sum(draws)


def _varies(batching: Batching, part: Part) -> bool:
    """Return whether a part varies between micro-batches; full, packed and joined sequences have constant tokens."""
    return batching in ("padded", "unpadded") or (batching == "packed" and part == "squares")


@lru_cache(maxsize=65536)
def waited_microbatches(
    lengths: Lengths, batching: Batching, seq_len: int, micro_batch: int, part: Part, meeting: Meeting
) -> float:
    """Expected delay of a step by the variation of one part, in mean micro-batches.

    Without a pipeline a step takes the largest sum of micro-batches over the replicas.  In 1F1B and similar schedules
    all stages pass a micro-batch on before they start the next, so each pass takes as long as the longest micro-batch
    in flight, one per stage: within 9 % of simulation with sampled lengths, for 2 to 8 stages.  GPipe is a
    proportionate flow shop: the sum plus (stages - 1) times the longest (Pinedo, Scheduling, section 6.1), exact for
    either direction.
    """
    if not _varies(batching, part):
        return 0.0
    count, stages = meeting.microbatches, meeting.stages
    draw = _microbatch(lengths, batching, seq_len, micro_batch, part).largest(meeting.in_turn)
    if stages == 1 or meeting.is_gpipe:
        steps = draw.sum(count).largest(meeting.at_end).mean + (stages - 1) * draw.largest(count).mean
    elif count == 1:
        steps = stages * draw.largest(meeting.at_end).mean
    else:
        # A long micro-batch is in flight for as many passes as there are stages.
        passes = count - 1
        spans = -(-passes // stages)
        slowest = draw.largest(min(stages, count)).sum(spans).scaled(passes / spans).largest(meeting.at_end)
        steps = slowest.mean + stages * draw.mean
    return max(steps - (count + stages - 1), 0.0)


class Varying(NamedTuple):
    """Seconds of a mean micro-batch through the whole model that are proportional to tokens, and to squares."""

    tokens_s: Floats
    squares_s: Floats


def varying_s(
    problem: Problem,
    costs: Mapping[Block, BlockCost],
    count: Mapping[Block, Floats],
    repeated: Mapping[Block, Floats],
    head_s: Floats,
) -> Varying:
    """Varying time of a micro-batch: of `count` blocks, of which `repeated` are recomputed, and of the head.

    Windows are assumed to be shorter than most samples, so windowed attention is proportional to tokens.  All samples
    have as much for an encoder, whose blocks do not vary.
    """
    count = {block: number for block, number in count.items() if block not in ENCODER_BLOCKS.values()}
    squares_s = np.zeros_like(head_s)
    if (kind := Block.ATTENTION) in costs:
        again = repeated[kind] + count[kind] * problem.training.runs_reference
        forward_s, backward_s = costs[kind].forward_s["attention"], costs[kind].backward_s["attention"]
        squares_s = count[kind] * (forward_s + backward_s) + again * forward_s
    names = [name for name in BLOCK_TERMS if name in OF_TOKENS]
    of_blocks = (costs[block].term_s(name, count[block], repeated[block]) for block in count for name in names)
    return Varying(add_up((*of_blocks, head_s)) - squares_s, squares_s)


def waiting_s(problem: Problem, batch: PlanBatch, varying: Varying, passes_s: Floats) -> Floats:
    """Time per step that ranks wait for longer samples: shape (plans).  `passes_s`: mean micro-batches of all stages.

    Ranks of plans that choose degrees of context parallelism wait for the ends of rounds.
    """
    waits_s, chooses = _static_waiting_s(problem, batch, varying), chooses_degrees(problem.training, batch)
    if chooses.any():
        rows = np.flatnonzero(chooses)
        waits_s[rows] = _round_waits_s(
            problem.training,
            batch.take(rows),
            Varying(varying.tokens_s[rows], varying.squares_s[rows]),
            passes_s[rows],
        )
    return waits_s


def least_waiting_s(problem: Problem, batch: PlanBatch, varying: Varying) -> Floats:
    """Lower bound on `waiting_s` for any schedule and sharding."""
    chooses = chooses_degrees(problem.training, batch)
    return np.where(chooses, 0.0, _static_waiting_s(problem, batch, varying, at_least=True))


def _round_waits_s(training: TrainingSpec, batch: PlanBatch, varying: Varying, passes_s: Floats) -> Floats:
    """Time per step that ranks with samples of different degrees wait for one another."""
    assert training.lengths is not None
    samples, ranks = num_samples(training, batch), batch.cp * batch.dp
    first, size_of = distinct_rows(samples, ranks, batch.cp)
    constant_s = np.maximum(passes_s - varying.tokens_s - varying.squares_s, 0.0)
    parts_s = batch.num_microbatches * np.stack([constant_s, varying.tokens_s, varying.squares_s])
    waits_s = np.zeros(len(batch))
    for at, example in enumerate(first.tolist()):
        rows = np.flatnonzero(size_of == at)
        cp, of_step = int(batch.cp[example]), (int(samples[example]), int(ranks[example]))
        least = least_degree(training.lengths, training.seq_len, cp, *of_step)
        rounds = drawn_rounds(training.lengths, training.seq_len, *of_step, cp, least)
        waits_s[rows] = idle_share(rounds, parts_s[:, rows]) * parts_s[:, rows].sum(axis=0)
    return waits_s


def _static_waiting_s(problem: Problem, batch: PlanBatch, varying: Varying, *, at_least: bool = False) -> Floats:
    """Time per step that ranks wait if every micro-batch has the same degrees.

    The varying time is divided evenly over pipeline stages.  The slowest rank by tokens is assumed to be the slowest by
    squares, which nearly holds.  With `at_least` the result is a lower bound for any schedule and sharding.
    """
    training = problem.training
    lengths, none = training.lengths, np.zeros(len(batch))
    if lengths is None or not _varies(training.batching, "squares"):
        return none
    in_turn = np.ones_like(batch.dp) if at_least else met_in_turn(problem, batch)
    sizes = (training.sequences_per_sample * batch.micro_batch, batch.num_microbatches, batch.pp)
    is_gpipe = batch.schedule == Schedule.GPIPE.code
    first, row_of = distinct_rows(*sizes, in_turn, batch.dp // in_turn, is_gpipe)

    def waited(part: Part, flows: Bools) -> Floats:
        columns = (column[first].tolist() for column in (*sizes, flows, in_turn, batch.dp // in_turn))
        lengths_key = (lengths, training.batching, training.seq_len)
        return np.array(
            [waited_microbatches(*lengths_key, size, part, Meeting(*of)) for size, *of in zip(*columns, strict=True)]
        )

    parts: tuple[Part, Part] = ("tokens", "squares")
    if at_least:
        tokens, squares = (GRID_SHARE * np.minimum(waited(part, is_gpipe), waited(part, ~is_gpipe)) for part in parts)
    else:
        tokens, squares = (waited(part, is_gpipe) for part in parts)
    row_of = row_of.reshape(-1)
    return (tokens[row_of] * varying.tokens_s + squares[row_of] * varying.squares_s) / batch.pp


def met_in_turn(problem: Problem, batch: PlanBatch) -> Ints:
    """Number of replicas whose ranks synchronise in every micro-batch, layer by layer.

    These are the replicas over which zero3 gathers weights or zero2 reduces gradients, unless a pipeline does so once
    per step, and the replicas within an expert-parallel group.
    """
    network = problem.framework.network
    gathers = (batch.sharding == Sharding.ZERO3.code) & ((batch.pp == 1) | network.zero3_regathers_in_pipeline)
    reduces = (batch.sharding == Sharding.ZERO2.code) & network.zero2_reduces_every_microbatch
    sharded = np.where(gathers | reduces, batch.dp_shard, 1)
    experts = np.maximum(batch.ep * batch.etp // (batch.tp * batch.cp), 1)
    together = np.maximum(sharded, np.minimum(experts, batch.dp))
    return np.where(batch.dp % together == 0, together, batch.dp)
