"""Time of a pipeline with arbitrary chunk times: its order simulated operation by operation for many plans.

An order from `pipeline.order` is compiled once: its operations are sorted into levels that depend only on earlier
levels, so that numpy processes one level of all plans at a time (`modelling` E4).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.base.errors import InputError
from autoplan.cost.passes import SplitPass
from autoplan.cost.pipeline.order import PipelineShape, check_schedule, chunks_of_ranks
from autoplan.cost.pipeline.waits import Step, blocking_steps, overlapped_steps
from autoplan.spec.plan import MAX_OPERATIONS

BLOCK_VALUES = 2**18  # operation ends in memory at once, 2 MiB: more do not fit the caches, fewer make short rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Times of the passes of a step, in seconds: shapes (plans, ranks) and (plans)."""

    end_s: Floats  # end of every rank's last operation
    busy_s: Floats  # every rank's work without waits
    send_free_s: Floats  # makespan if messages took no time

    @property
    def makespan_s(self) -> Floats:
        """Time until the last rank is done: work, bubble and exposed messages."""
        return self.end_s.max(axis=1)

    @property
    def critical(self) -> Ints:
        """The rank with the most work, which waits the least."""
        return self.busy_s.argmax(axis=1)

    @property
    def exposed_send_s(self) -> Floats:
        """Time that messages add to the makespan."""
        return self.makespan_s - self.send_free_s


# -- from steps to levels ---------------------------------------------------------------------------------------------

_START, _NEVER = 0, 1  # indices of the first two ends: start of the step, and minus infinity
_RESERVED = 2


class _Level(NamedTuple):
    """Concurrent steps of different ranks: a slice of the ends, their dependencies, and the rows of their times."""

    start: int
    stop: int
    previous: Ints  # step on the same rank
    needed: tuple[Ints, ...]  # dependencies on other ranks
    rows: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A compiled order: the end of each step is computed level by level."""

    levels: tuple[_Level, ...]
    size: int  # number of ends
    last: Ints  # index of the end of every rank's last step
    delays: bool  # data from another rank arrives one message time after it is produced


def _sorted(ranks: Sequence[Sequence[Step]], givers: list[int]) -> tuple[list[list[tuple[int, list[int], int]]], Ints]:
    """Return ((previous end, needed ends, row) of the steps of every level, last end of every rank).

    A step is one level after its dependencies.  `givers` maps each dependency to the end that provides it, `_NEVER` if
    there is none yet.
    """
    levels = []
    last, at = [_START] * len(ranks), [0] * len(ranks)
    end = _RESERVED
    running = list(range(len(ranks)))
    while running:
        level, gifts, waiting = [], [], []
        for rank in running:
            row, needs, gives = ranks[rank][at[rank]]
            needed = [givers[need] for need in needs]
            if _NEVER in needed:
                waiting.append(rank)
                continue
            level.append((last[rank], needed, row))
            gifts.append((end, gives))
            last[rank] = end
            end += 1
            at[rank] += 1
            if at[rank] < len(ranks[rank]):
                waiting.append(rank)
        assert level, "the orders of the ranks deadlock"
        for giver, gives in gifts:
            for gift in gives:
                givers[gift] = giver
        levels.append(level)
        running = waiting
    return levels, np.array(last)


def _program(ranks: Sequence[Sequence[Step]], givers: list[int], *, delays: bool) -> _Program:
    levels, last = _sorted(ranks, givers)
    steps = [step for level in levels for step in level]
    previous = np.array([before for before, _, _ in steps])
    rows = np.array([row for _, _, row in steps])
    max_needs = max(len(needed) for _, needed, _ in steps)
    needs = [np.array([(*needed, *[_NEVER] * max_needs)[at] for _, needed, _ in steps]) for at in range(max_needs)]
    bounds = np.cumsum([0, *map(len, levels)]).tolist()
    return _Program(
        levels=tuple(
            _Level(
                _RESERVED + start,
                _RESERVED + stop,
                previous[start:stop],
                tuple(need[start:stop] for need in needs),
                rows[start:stop],
            )
            for start, stop in itertools.pairwise(bounds)
        ),
        size=_RESERVED + len(steps),
        last=last,
        delays=delays,
    )


def _check(shape: PipelineShape, *, blocking: bool) -> None:
    check_schedule(shape)
    schedule, stages, chunks, num_microbatches = shape
    if not is_recurrent(shape):
        raise InputError(
            f"{schedule} with pp {stages}, vp {chunks} and {num_microbatches} micro-batches has more than "
            f"{MAX_OPERATIONS} operations: use the closed form"
        )
    if blocking and schedule not in ("1f1b", "interleaved"):
        raise InputError(f"schedule {schedule!r} has no blocking messages: only 1f1b and interleaved have them")
    if blocking and chunks > 1 and num_microbatches < stages:
        raise InputError(
            f"blocking interleaved messages need pp = {stages} micro-batches or more, there are {num_microbatches}"
        )


@lru_cache(maxsize=256)
def _compiled(shape: PipelineShape, *, blocking: bool) -> _Program:
    _check(shape, blocking=blocking)
    ranks, early, num_gifts = blocking_steps(shape) if blocking else overlapped_steps(shape)
    givers = [_NEVER] * num_gifts
    for gift in early:
        givers[gift] = _START
    return _program(ranks, givers, delays=not blocking)


# -- from levels to times ---------------------------------------------------------------------------------------------


def _ends(program: _Program, times: Floats, send_s: Floats) -> Floats:
    """Compute the end of every step, shape (size, plans), from `times` of shape (rows, plans)."""
    ends = np.empty((program.size, times.shape[1]))
    ends[_START], ends[_NEVER] = 0.0, -np.inf
    widest = max(level.stop - level.start for level in program.levels)
    arriving, during = np.empty((2, widest, times.shape[1]))
    for start, stop, previous, needed, rows in program.levels:
        end, arrival = ends[start:stop], arriving[: stop - start]
        # Writing into buffers with mode="clip" saves a copy; every index is in bounds.
        ends.take(previous, axis=0, out=end, mode="clip")
        for need in needed:
            ends.take(need, axis=0, out=arrival, mode="clip")
            if program.delays:
                arrival += send_s
            np.maximum(end, arrival, out=end)
        end += times.take(rows, axis=0, out=during[: stop - start], mode="clip")
    return ends


def _table(passes: SplitPass, hop_s: Floats) -> Floats:
    """Duration of the step of every row, in the order of `waits.ROWS`: shape (rows, plans)."""
    backward_s = passes.backward_s
    joined_s = passes.forward_s + backward_s[:, ::-1]  # the other chunk of the rank, in a V
    tables = (passes.forward_s, backward_s, passes.input_gradient_s, passes.weight_gradient_s, joined_s, hop_s)
    return np.ascontiguousarray(np.concatenate(tables, axis=1).T)


def is_recurrent(shape: PipelineShape) -> bool:
    """Return whether the recurrence prices a plan, by its number of operations; otherwise a closed form does.

    Depends on the plan alone.  Nothing is extrapolated, as the time from which an order repeats itself depends on the
    chunk times and may be arbitrarily late.
    """
    kinds = 2 if shape.schedule in ("gpipe", "1f1b", "interleaved") else 3
    return kinds * shape.stages * shape.chunks * shape.num_microbatches <= MAX_OPERATIONS


def pipeline_times(shape: PipelineShape, passes: SplitPass, send_s: Floats, *, blocking: bool = False) -> PipelineTimes:
    """Return the exact times at which every rank completes the passes of one step, for plans of one shape.

    `passes`: one micro-batch through each chunk, chunks in model order, shape (plans, stages x chunks).  An unsplit
    backward takes the sum of both gradients and sends at its end.  `send_s`: one message between two ranks, shape
    (plans); nothing is sent between chunks of one rank.

    Messages overlap: a rank sends when an operation is complete and continues, and the message arrives `send_s` later;
    messages slow down neither each other nor the work.  With `blocking` both ranks stay in the call once both have
    reached it, as Megatron-LM does in plain 1F1B, always, and in interleaved 1F1B without overlap; other schedules do
    not block in their implementations (torch, DualPipe), so `blocking` is an error there.

    Raises InputError if the schedule has no such order or the plan has more than `MAX_OPERATIONS` (`is_recurrent`).
    Source: `modelling` E4; sources of the orders are in `autoplan.cost.pipeline.order`.
    """
    program = _compiled(shape, blocking=blocking)
    schedule, stages, chunks, num_microbatches = shape
    chunks_of = chunks_of_ranks(schedule, stages, chunks)
    busy_s = num_microbatches * (passes.forward_s + passes.backward_s)[:, chunks_of].sum(axis=2)
    hops = stages * chunks - 1
    times = _table(passes, np.repeat(send_s[:, None], hops, axis=1))
    free = times.copy()
    free[len(times) - hops :] = 0.0
    end_s, send_free_s = np.empty((len(send_s), stages)), np.empty(len(send_s))
    block = max(BLOCK_VALUES // program.size, 16)
    for start in range(0, len(send_s), block):
        at = slice(start, start + block)
        end_s[at] = _ends(program, np.ascontiguousarray(times[:, at]), send_s[at])[program.last].T
        send_free_s[at] = end_s[at].max(axis=1)
        if send_s[at].any():
            without = np.zeros_like(send_s[at])
            ends = _ends(program, np.ascontiguousarray(free[:, at]), without)
            send_free_s[at] = ends[program.last].max(axis=0)
    return PipelineTimes(end_s=end_s, busy_s=busy_s, send_free_s=send_free_s)


class RankSteps(NamedTuple):
    """Consecutive steps of one rank: rows of `waits.ROWS`, durations and ends in seconds."""

    rows: Ints
    duration_s: Floats
    end_s: Floats


def rank_steps(
    shape: PipelineShape, passes: SplitPass, hop_s: Floats, *, blocking: bool = False
) -> tuple[RankSteps, ...]:
    """Return the steps of every rank of a plan; their last end is the makespan of `pipeline_times`.

    Arguments as there, with times of shape (stages x chunks).  `hop_s` is one message over each hop between chunks,
    shape (stages x chunks - 1); only the blocking calls of plain 1F1B may have different times per hop.
    """
    program = _compiled(shape, blocking=blocking)
    times = _table(SplitPass(*(seconds[None] for seconds in passes)), hop_s[None])
    ends = _ends(program, times, hop_s[:1])[:, 0]
    previous = np.concatenate([level.previous for level in program.levels])
    rows = np.concatenate([level.rows for level in program.levels])
    steps_of_ranks = []
    for last in program.last.tolist():
        steps = []
        step = last
        while step != _START:
            steps.append(step - _RESERVED)
            step = int(previous[step - _RESERVED])
        at = np.array(steps[::-1], dtype=np.int64)
        steps_of_ranks.append(RankSteps(rows[at], times[rows[at], 0], ends[at + _RESERVED]))
    return tuple(steps_of_ranks)
