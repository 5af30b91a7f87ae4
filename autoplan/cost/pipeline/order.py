"""Orders in which pipeline ranks run their passes, and the activations alive meanwhile.

A model of p v chunks runs on p ranks, each in an order that is fixed before the step.  The number of live activations
follows from that order alone; `autoplan.cost.pipeline.recurrence` computes its time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from autoplan.base.arrays import Ints, distinct_rows
from autoplan.base.errors import InputError
from autoplan.spec.axes import V_SHAPED
from autoplan.spec.enums import Schedule

# Forward, backward, and the two halves of a split backward: gradient of the inputs, gradient of the weights.
Kind = Literal["F", "B", "I", "W"]


class Operation(NamedTuple):
    """Pass of a micro-batch through one chunk, chunks in model order.

    `joined`: it runs together with the next operation (DualPipe's overlapped forward and backward): both begin when the
    inputs of both have arrived, and send when both are complete.
    """

    kind: Kind
    chunk: int
    microbatch: int
    joined: bool = False


class PipelineShape(NamedTuple):
    """A schedule with its number of ranks, chunks per rank, and micro-batches per step."""

    schedule: Schedule
    stages: int
    chunks: int
    num_microbatches: int


def check_schedule(shape: PipelineShape) -> None:
    """Raise InputError for a combination that the schedule does not support."""
    schedule, stages, chunks, num_microbatches = shape
    if schedule in V_SHAPED and chunks != 2:
        raise InputError(f"schedule {schedule!r} needs vp 2, vp is {chunks}: its two chunks a rank form a V")
    if schedule in ("gpipe", "1f1b") and chunks != 1:
        raise InputError(f"schedule {schedule!r} needs vp 1, vp is {chunks}: use interleaved")
    if schedule == "dualpipe-v" and num_microbatches < 2 * stages:
        raise InputError(
            f"schedule 'dualpipe-v' needs at least 2 pp = {2 * stages} micro-batches, there are {num_microbatches}: "
            "use zb-v or a smaller pp"
        )


def chunks_of_ranks(schedule: Schedule, stages: int, chunks: int) -> Ints:
    """Chunks of every rank, numbered in model order: shape (ranks, chunks per rank), ascending.

    Chunk i is on rank i mod p.  In a V-shaped schedule the second half of the model runs in reverse rank order, so that
    rank r has chunks r and 2 p - 1 - r, and the last rank passes the output of chunk p - 1 to itself.
    """
    rounds = np.arange(stages * chunks, dtype=np.int64).reshape(chunks, stages)
    if schedule in V_SHAPED:
        rounds[1::2] = rounds[1::2, ::-1]
    return np.ascontiguousarray(rounds.T)


def rank_of_chunks(schedule: Schedule, stages: int, chunks: int) -> Ints:
    """Rank of each chunk, in model order."""
    return np.argsort(chunks_of_ranks(schedule, stages, chunks), axis=None) // chunks


def microbatch_group(stages: int, num_microbatches: int) -> int:
    """Number of micro-batches that an interleaved schedule runs through one chunk before the next chunk.

    The number of stages if it divides the micro-batches; otherwise the smallest larger group whose shorter last group
    still fills the pipeline, as Megatron-LM requires (schedules.py, microbatch_group_size_per_vp_stage).
    torch.distributed.pipelining uses the same group for every number of micro-batches that it accepts.  Fewer
    micro-batches than stages form one group, which torch runs and Megatron-LM rejects.
    """
    for size in range(stages, num_microbatches):
        remainder = num_microbatches % size
        if remainder == 0 or remainder >= stages:
            return size
    return num_microbatches


# -- the orders of one rank, as passes --------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """A kind of pass through one of the rank's chunks; each chunk processes micro-batches in order."""

    kind: Kind
    chunk: int
    joined: bool = False


_F0, _B0, _I0, _W0 = (_Pass(kind, 0) for kind in ("F", "B", "I", "W"))
_F1, _B1, _I1, _W1 = (_Pass(kind, 1) for kind in ("F", "B", "I", "W"))


def _gpipe(num_microbatches: int) -> list[_Pass]:
    """Order of GPipe (arXiv:1811.06965)."""
    return [_F0] * num_microbatches + [_B0] * num_microbatches


def _turns(chunks: int, num_microbatches: int, group: int) -> list[int]:
    """Chunk of every forward: each group of micro-batches passes through all chunks in turn."""
    sizes = [min(group, num_microbatches - start) for start in range(0, num_microbatches, group)]
    return [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]


def _alternating(forwards: Sequence[_Pass], backwards: Sequence[_Pass], warmup: int) -> list[_Pass]:
    """Return `warmup` forwards, then alternating forwards and backwards, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *itertools.chain.from_iterable(steady), *backwards[len(forwards) - warmup :]]


def warmup_forwards(shape: PipelineShape, rank: int, group: int) -> int:
    """Number of 1F1B forwards, interleaved or not, before forwards and backwards alternate; at most all."""
    hops, chunks = shape.stages - 1 - rank, shape.chunks
    return min(hops if chunks == 1 else 2 * hops + (chunks - 1) * group, chunks * shape.num_microbatches)


def _one_forward_one_backward(shape: PipelineShape, rank: int, group: int) -> list[_Pass]:
    """Megatron-LM's 1F1B, interleaved with several chunks (schedules.py get_pp_rank_microbatches)."""
    turns = _turns(shape.chunks, shape.num_microbatches, group)
    forwards = [_Pass("F", chunk) for chunk in turns]
    backwards = [_Pass("B", shape.chunks - 1 - chunk) for chunk in turns]
    return _alternating(forwards, backwards, warmup_forwards(shape, rank, group))


def _zb_h1(shape: PipelineShape, rank: int, group: int) -> list[_Pass]:
    """1F1B with a split backward in which rank r defers r weight gradients to fill its cool-down.

    arXiv:2401.10241, figure 2; torch's ScheduleInterleavedZeroBubble, with a single chunk.  The patch for Megatron-LM
    (branch zb-h1-quick-start) defers by the same r, but runs unsplit backwards in between.
    """
    turns = _turns(shape.chunks, shape.num_microbatches, group)
    inputs = [_Pass("I", shape.chunks - 1 - chunk) for chunk in turns]
    weights = [_Pass("W", step.chunk) for step in inputs]
    warmup = shape.stages - 1 - rank + (shape.chunks - 1) * group
    passes: list[_Pass] = []
    run = 0
    for step in _alternating([_Pass("F", chunk) for chunk in turns], inputs, warmup):
        passes.append(step)
        if step.kind == "I":
            run += 1
            if run > rank:
                passes.append(weights[run - 1 - rank])
    return passes + weights[max(run - rank, 0) :]


def _zb_v(rank: int, stages: int, num_microbatches: int) -> list[_Pass]:
    """The zero-bubble V of two chunks, as in torch's ScheduleZBVZeroBubble (arXiv:2401.10241, section 6).

    It has no bubble if forward, input gradient and weight gradient take the same time; the scheduler of the paper's
    authors searches a different order for other times.  Too few micro-batches to fill the pipeline run in the order of
    the number that fills it, so this may return more passes than micro-batches.
    """
    filling = max(num_microbatches, 2 * stages - 1)
    behind, ahead = stages - 1 - rank, stages - rank
    passes = [_F0] * (2 * ahead - 1) + [_F1, _F0] * rank + [_F1, _I1, _W1] * ahead
    passes += [_F0, _I0, _W0, _F1, _I1, _W1] * (filling - stages - behind) + [_I0, _W0, _F1, _I1, _W1] * behind
    return passes + [_I0, _I1] * rank + [_I0, _W0] * ahead + [_W1] * rank + [_W0] * rank


def _dualpipe_v(rank: int, stages: int, num_microbatches: int) -> list[_Pass]:
    """DeepSeek's DualPipeV: following its dualpipev.py and torch's ScheduleDualPipeV."""
    behind, half = stages - 1 - rank, rank + 1
    down, up = [_F0._replace(joined=True), _B1], [_F1._replace(joined=True), _B0]
    passes = [_F0] * (2 * behind) + [_F0, _F1] * half + [_I1, _W1, _F1] * behind
    main = (down + up) * (num_microbatches - 2 * stages + half)
    if behind == 0:
        main[0] = _F0  # not joined in DeepSeek's code, which shortens the bubble
    # The second half of the remaining backwards is split, and their weight gradients fill the end.
    split = ([_I1, _I0] * half)[half:]
    late = [_W1 if step.chunk else _W0 for step in split] + [_W0] * behind
    passes += main + [_B1, *up] * behind + ([_B1, _B0] * half)[:half] + split
    for weight in late[:behind]:
        passes += [weight, _I0]
    return passes + late[behind:]


def _rank_passes(shape: PipelineShape, rank: int, group: int) -> list[_Pass]:
    if shape.schedule == "gpipe":
        return _gpipe(shape.num_microbatches)
    if shape.schedule == "zb-v":
        return _zb_v(rank, shape.stages, shape.num_microbatches)
    if shape.schedule == "dualpipe-v":
        return _dualpipe_v(rank, shape.stages, shape.num_microbatches)
    make = _zb_h1 if shape.schedule == "zb-h1" else _one_forward_one_backward
    return make(shape, rank, group)


def _numbered(passes: Iterable[_Pass], chunks: Sequence[int], num_microbatches: int) -> tuple[Operation, ...]:
    """Number the passes as operations: each of the rank's `chunks` processes micro-batches in order."""
    forward, backward, weight = ([0] * len(chunks) for _ in range(3))
    operations = []
    for kind, chunk, joined in passes:
        counter = {"F": forward, "W": weight}.get(kind, backward)
        microbatch = counter[chunk]
        counter[chunk] += 1
        if kind == "B":
            weight[chunk] += 1
        if microbatch < num_microbatches:
            operations.append(Operation(kind, chunks[chunk], microbatch, joined))
    return tuple(operations)


def rank_orders(shape: PipelineShape, *, group: int | None = None) -> tuple[tuple[Operation, ...], ...]:
    """Operations that every rank runs, in order.

    Interleaved with one chunk is plain 1F1B.  `group` is the number of micro-batches that an interleaved schedule runs
    through a chunk at a time, by default `microbatch_group`.  The source of each order is given at its function here.
    """
    check_schedule(shape)
    group = group or microbatch_group(shape.stages, shape.num_microbatches)
    orders = (_rank_passes(shape, rank, group) for rank in range(shape.stages))
    of_ranks = chunks_of_ranks(shape.schedule, shape.stages, shape.chunks).tolist()
    return tuple(
        _numbered(passes, chunks, shape.num_microbatches) for passes, chunks in zip(orders, of_ranks, strict=True)
    )


# -- live activations -------------------------------------------------------------------------------------------------

# Number of micro-batch groups after which the steady state has reached its largest memory.
_SATURATING_GROUPS = 3


def _saturated(shape: PipelineShape) -> tuple[PipelineShape, int]:
    """Return (the shape with the fewest micro-batches that has the same peak, its micro-batch group).

    In the steady state every rank repeats itself with each micro-batch or, interleaved, with each group: the same
    activations are alive at every turn.  All turns except those that fill and drain the pipeline can be omitted; the
    shorter last group is kept.
    """
    stages, num_microbatches = shape.stages, shape.num_microbatches
    if shape.chunks == 1 or shape.schedule in V_SHAPED:
        return shape._replace(num_microbatches=min(num_microbatches, _SATURATING_GROUPS * stages)), stages
    group = microbatch_group(stages, num_microbatches)
    groups, remainder = divmod(num_microbatches, group)
    return shape._replace(num_microbatches=min(groups, _SATURATING_GROUPS) * group + remainder), group


def _undominated(vectors: Ints) -> Ints:
    """Return the distinct rows that are not dominated by another row."""
    distinct = vectors[distinct_rows(*vectors.T)[0]]
    reached = (distinct[None, :, :] >= distinct[:, None, :]).all(axis=2)
    return distinct[reached.sum(axis=1) == 1]


def _alive(operations: Sequence[Operation], chunks: Ints) -> tuple[Ints, Ints]:
    """Count live micro-batches in a rank's chunks at each release, and those waiting for weight gradients."""
    change, waiting = (np.zeros((len(operations), len(chunks)), dtype=np.int64) for _ in range(2))
    places = {chunk: place for place, chunk in enumerate(chunks.tolist())}
    for at, operation in enumerate(operations):
        if operation.kind == "F":
            change[at, places[operation.chunk]] = 1
        elif operation.kind in ("B", "W"):
            change[at, places[operation.chunk]] = -1
        if operation.kind in ("I", "W"):
            waiting[at, places[operation.chunk]] = 1 if operation.kind == "I" else -1
    times = change[1:].min(axis=1) < 0
    return np.cumsum(change, axis=0)[:-1][times], np.cumsum(waiting, axis=0)[:-1][times]


def _alive_in_turns(turns: Ints, chunks: int, warmup: int) -> Ints:
    """Count live micro-batches in a rank's chunks under 1F1B: `warmup` + k + 1 forwards precede backward k."""
    forwards = np.zeros((len(turns) + 1, chunks), dtype=np.int64)
    forwards[1:] = np.cumsum(turns[:, None] == np.arange(chunks), axis=0)
    backwards = forwards[:, ::-1]
    steady = max(len(turns) - warmup, 1)
    return forwards[-steady:] - backwards[:steady]


@lru_cache(maxsize=4096)
def _live_chunks(shape: PipelineShape, group: int, *, waiting: bool) -> Ints:
    if shape.schedule in ("1f1b", "interleaved"):
        turns = np.array(_turns(shape.chunks, shape.num_microbatches, group), dtype=np.int64)
        warmups = (warmup_forwards(shape, rank, group) for rank in range(shape.stages))
        peaks = [_undominated(_alive_in_turns(turns, shape.chunks, warmup)) for warmup in warmups]
    else:
        of_ranks = chunks_of_ranks(shape.schedule, shape.stages, shape.chunks)
        pairs = [_alive(order, chunks) for order, chunks in zip(rank_orders(shape, group=group), of_ranks, strict=True)]
        peaks = [_undominated(np.hstack(pair) if waiting else pair[0]) for pair in pairs]
    max_peaks = max(len(peak) for peak in peaks)
    padded = np.stack([np.concatenate([peak, np.repeat(peak[:1], max_peaks - len(peak), axis=0)]) for peak in peaks])
    padded.flags.writeable = False
    return padded


def live_chunks(shape: PipelineShape, *, waiting: bool = False) -> Ints:
    """Micro-batches with live activations in each chunk of a rank: shape (ranks, K, chunks per rank).

    The K rows of a rank are the distinct undominated states of its memory, repeated if a rank has fewer; the peak of
    rank r, in bytes, is exactly `(live[r] @ bytes_per_chunk[r]).max()`, also for chunks of different sizes.  Chunks as
    in `chunks_of_ranks`.

    A chunk is alive from its forward to the end of its backward, or of its weight gradient if split.  With `waiting`,
    for a schedule that splits them, the last axis is extended by the micro-batches between their two gradients.
    Read-only and cached.
    """
    check_schedule(shape)
    if shape.schedule == "gpipe":  # all of them, without counting
        return np.broadcast_to(np.int64(shape.num_microbatches), (shape.stages, 1, 1))
    fewer, group = _saturated(shape)
    return _live_chunks(fewer, group, waiting=waiting)
