"""Closed forms for the time of a pipeline with unequal stages, tested against simulation.

Arrays of stages have the shape (plans, stages): forward and backward time of one micro-batch on every pipeline rank,
summed over the rank's chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.cost.network.links import CONTENTION_SHARE
from autoplan.cost.passes import Pass


class Makespan(NamedTuple):
    """Time from the first pass of a step to the last, an element per plan."""

    work_s: Floats  # if messages took no time
    send_s: Floats  # what messages add
    critical: Ints  # the critical stage


def _sum_over_stages(times: Floats) -> Floats:
    """Sum over stages along contiguous memory, so that rounding does not depend on the other plans of a batch."""
    return np.ascontiguousarray(times).sum(axis=1)


def one_forward_one_backward_s(
    forward_s: Floats, backward_s: Floats, num_microbatches: Ints, chunks: Ints, sends_s: Floats | float = 0.0
) -> Makespan:
    """Makespan of 1F1B and, with `chunks` > 1, of interleaved 1F1B.

    `sends_s` is the time that messages add if a stage is the critical one, from `send_exposed_s`.

    T = max over stages of: the fill before it, its own work, and the part of the work after it that its warm-up does
    not cover; interleaving divides everything except its own work by the number of chunks.  Exact for equal stages.
    For unequal stages plain 1F1B gets a lower bound, within 0.1 % on average (`modelling` E2), and interleaved 1F1B an
    estimate, -4 to +9 % of simulation for stage times within 30 % of each other, where m must be a multiple of the
    stages.
    """
    stages = forward_s.shape[1]
    passes_s = forward_s + backward_s
    before = np.cumsum(passes_s, axis=1) - passes_s
    behind = _sum_over_stages(passes_s)[:, None] - before - passes_s
    warmup = np.arange(stages - 1, -1, -1)[:, None]
    # Forwards of the warm-up cover work of later stages before the stage's first backward, backwards of the cool-down
    # after its last forward.  With fewer micro-batches all forwards come first and there is one gap instead of two.
    covering = np.minimum(num_microbatches - 1, warmup).T
    filling = np.maximum(behind - covering * forward_s, 0.0)
    draining = np.maximum(behind - covering * backward_s, 0.0)
    uncovered = np.where(covering < warmup.T, np.maximum(filling, draining), filling + draining)
    path = num_microbatches[:, None] * passes_s + (before + uncovered) / chunks[:, None] + sends_s
    critical = np.argmax(path, axis=1)
    rows = np.arange(len(path))
    send_s = np.broadcast_to(sends_s, path.shape)[rows, critical]
    return Makespan(path[rows, critical] - send_s, send_s, critical)


def pipeline_s(
    forward_s: Floats,
    backward_s: Floats,
    send_s: Floats,
    num_microbatches: Ints,
    chunks: Ints,
    *,
    overlaps: bool,
    beside_gradients_s: Floats | float = np.inf,
) -> Makespan:
    """Makespan of 1F1B and interleaved 1F1B with messages: `send_s` is one message from every stage to the next.

    With several chunks per stage the last stage sends to the first; then all messages count as the slowest, which
    delays the others.  Messages of gradients hide behind at most `beside_gradients_s` of a chunk's passes.
    """
    interleaved, slowest_s = chunks > 1, send_s.max(axis=1, keepdims=True)
    sends_s = np.repeat(hop_sends_exposed_s(send_s[:, :-1], num_microbatches)[:, None], forward_s.shape[1], axis=1)
    if interleaved.any():
        hiding_s = np.minimum(backward_s / chunks[:, None], np.reshape(beside_gradients_s, (-1, 1)))
        of_chunk = Pass(forward_s / chunks[:, None], hiding_s)
        sends_s = np.where(
            interleaved[:, None],
            send_exposed_s(
                slowest_s,
                np.full_like(chunks, forward_s.shape[1])[:, None],
                num_microbatches[:, None],
                chunks[:, None],
                of_chunk,
                overlaps=overlaps,
            ),
            sends_s,
        )
    return one_forward_one_backward_s(forward_s, backward_s, num_microbatches, chunks, sends_s)


def gpipe_s(
    forward_s: Floats, backward_s: Floats, num_microbatches: Ints, hop_s: Floats, *, overlaps: bool
) -> Makespan:
    """Makespan of all forwards before all backwards: two flow shops with equal jobs, exact."""
    later_microbatches = num_microbatches - 1
    makespan = _sum_over_stages(forward_s) + later_microbatches * forward_s.max(axis=1)
    makespan = makespan + _sum_over_stages(backward_s) + later_microbatches * backward_s.max(axis=1)
    send_s = gpipe_sends_s(hop_s, num_microbatches, overlaps=overlaps)
    return Makespan(makespan, send_s, np.argmax(forward_s + backward_s, axis=1))


def gpipe_sends_s(hop_s: Floats, num_microbatches: Ints, *, overlaps: bool) -> Floats:
    """Time that messages add to GPipe; `hop_s`: one message over each hop, (plans, stages - 1).

    They are pipelined, so only the fill is exposed.  Without overlap a rank waits for each message that it receives or
    sends: exact for equal stages, otherwise an upper bound.
    """
    send_s = 2.0 * _sum_over_stages(hop_s)
    if overlaps:
        return send_s
    none = np.zeros((len(hop_s), 1))
    exchanges = (np.hstack([none, hop_s]) + np.hstack([hop_s, none])).max(axis=1)
    return send_s + 2.0 * (num_microbatches - 1) * exchanges


def send_exposed_s(
    send_s: Floats,
    stages: Ints,
    num_microbatches: Ints,
    chunks: Ints,
    chunk: Pass,
    *,
    overlaps: bool,
) -> Floats:
    """Time that messages of `send_s` between stages add to the makespan.

    Plain 1F1B blocks on combined send and receive: send_s (2 m + 2 p - 5), exact for equal stages (`modelling` E3,
    Megatron-LM schedules.py); two stages exchange m + 1 times, and a single micro-batch goes there and back.
    Interleaved schedules send v times as many.  Without overlap every message is exposed; with overlap the fill, the
    messages of the warm-up and cool-down passes, which block (overlap_p2p_comm_warmup_flush is off), and for the others
    what the passes of a chunk cannot hide, plus the contention.
    """
    exchanges = np.where(stages == 2, num_microbatches + 1, 2 * num_microbatches + 2 * stages - 5)
    plain = send_s * np.where(num_microbatches == 1, 2 * (stages - 1), exchanges)
    fill = 2.0 * send_s * (stages - 1)
    unhidden = 2.0 * send_s
    if overlaps:
        least = CONTENTION_SHARE * send_s
        unhidden = np.maximum(send_s - chunk.forward_s, least) + np.maximum(send_s - chunk.backward_s, least)
    blocking = (chunks - 1) * np.minimum(stages, num_microbatches)  # on the last stage, which has the fewest
    interleaved = fill + blocking * 2.0 * send_s + (num_microbatches * chunks - blocking) * unhidden
    return np.where(stages > 1, np.where(chunks > 1, interleaved, plain), 0.0)


def hop_sends_exposed_s(hop_s: Floats, num_microbatches: Ints) -> Floats:
    """Time that messages add to plain 1F1B with unequal hops; `hop_s`: one message each, (plans, stages - 1).

    Every hop adds its own time on the way there and back.  In between a rank exchanges with both neighbours once per
    micro-batch, and the rank with the slowest hops delays all: exact for equal stages with equal hops, where it equals
    `send_exposed_s`; otherwise above a simulation of blocking calls, by 1 to 3 % of the makespan on average.
    """
    none = np.zeros((len(hop_s), 1))
    before, behind = np.hstack([none, hop_s]), np.hstack([hop_s, none])
    m = num_microbatches[:, None]
    exchanges = (m - 1) * np.maximum(before, behind) + np.maximum(m - 2, 0) * np.minimum(before, behind)
    return 2.0 * _sum_over_stages(hop_s) + exchanges.max(axis=1)


def in_flight_chunks(stages: int, chunks: Ints, num_microbatches: Ints, *, gpipe: Bools) -> Ints:
    """Peak number of live forward activations on every rank, in chunks: shape (plans, stages).

    GPipe m, 1F1B min(m, p - r), interleaved min(m v, 2 (p - r - 1) + (v - 1) p + 1), with micro-batch
    groups of p (`modelling` B4, Megatron-LM schedules.py get_pp_rank_microbatches).
    """
    rank = np.arange(stages)[:, None]
    all_chunks = num_microbatches * chunks
    interleaved = np.minimum(all_chunks, 2 * (stages - rank - 1) + (chunks - 1) * stages + 1)
    plain = np.minimum(num_microbatches, stages - rank)
    return np.where(gpipe, all_chunks, np.where(chunks > 1, interleaved, plain)).T
