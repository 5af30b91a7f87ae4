"""Waits of a rank that runs its order: for messages that overlap its work, or in calls that block it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from autoplan.cost.pipeline.order import (
    Operation,
    PipelineShape,
    microbatch_group,
    rank_of_chunks,
    rank_orders,
    warmup_forwards,
)

# Rows of the table of times, each of them for all chunks: forward, backward, its halves, and a joined forward and
# backward (named by the chunk of the forward).  After them comes one row, the time of a message.
ROWS = {"F": 0, "B": 1, "I": 2, "W": 3, "joined": 4}


class Step(NamedTuple):
    """Step that occupies a rank for the time in `row`, from when all that it `needs` has been given.

    Where messages overlap, what is given is the message; where they block, that one end of it is ready.
    """

    row: int
    needs: tuple[int, ...]
    gives: tuple[int, ...]


class _Messages:
    """Numbers of the messages that the operations of one (schedule, p, v, m) receive and send."""

    def __init__(self, shape: PipelineShape) -> None:
        self._num_chunks = shape.stages * shape.chunks
        self._num_microbatches = shape.num_microbatches
        self.count = 2 * self._num_chunks * shape.num_microbatches
        rank_of = rank_of_chunks(shape.schedule, shape.stages, shape.chunks)
        # Whether something is sent between a chunk and the one before: not where both are on one rank.
        self._crosses = [False, *(rank_of[1:] != rank_of[:-1]).tolist(), False]

    def received(self, operation: Operation) -> tuple[int, ...]:
        """Return the message that the operation needs from another rank, if any."""
        kind, chunk, microbatch, _ = operation
        if kind == "F":
            return (chunk * self._num_microbatches + microbatch,) if self._crosses[chunk] else ()
        if kind == "W" or not self._crosses[chunk + 1]:
            return ()
        return ((self._num_chunks + chunk) * self._num_microbatches + microbatch,)

    def sent(self, operation: Operation) -> tuple[int, ...]:
        """Return the message sent to another rank, if any: to the chunk after it, or in a backward before it."""
        kind, chunk, microbatch, _ = operation
        if kind == "F":
            return ((chunk + 1) * self._num_microbatches + microbatch,) if self._crosses[chunk + 1] else ()
        if kind == "W" or not self._crosses[chunk]:
            return ()
        return ((self._num_chunks + chunk - 1) * self._num_microbatches + microbatch,)

    def hop(self, message: int) -> int:
        """Over which hop a message goes: that behind the chunk of this number."""
        towards, chunk = divmod(message // self._num_microbatches, self._num_chunks)
        return chunk if towards else chunk - 1


def _row(operation: Operation, num_chunks: int) -> int:
    return ROWS["joined" if operation.joined else operation.kind] * num_chunks + operation.chunk


def _overlapped(messages: _Messages, operations: Sequence[Operation], num_chunks: int) -> list[Step]:
    """Operations send when it is over and its rank goes on; the one that needs the message waits for it."""
    steps = []
    run = iter(operations)
    for operation in run:
        needs, gives = messages.received(operation), messages.sent(operation)
        if operation.joined:
            joined = next(run)
            needs, gives = needs + messages.received(joined), gives + messages.sent(joined)
        steps.append(Step(_row(operation, num_chunks), needs, gives))
    return steps


# -- calls that block -------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Messages sent and received in one call, in which the rank stays until all of them are through."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]


def _plain_calls(messages: _Messages, operations: Sequence[Operation], warmup: int) -> list[Operation | _Call]:
    """Operations and calls of a rank of Megatron-LM's 1F1B (schedules.py, ..._without_interleaving).

    Warming up and cooling down it receives, computes, sends; in between it sends one way and receives what comes from
    there in the same call (send_forward_recv_backward, send_backward_recv_forward).
    """
    calls: list[Operation | _Call] = []
    for at, operation in enumerate(operations):
        sends = messages.sent(operations[at - 1]) if at else ()
        receives = messages.received(operation)
        together = warmup < at < len(operations) - warmup
        calls += [_Call(sends, receives)] if together else [_Call(sends, ()), _Call((), receives)]
        calls.append(operation)
    return [*calls, _Call(messages.sent(operations[-1]), ())]


def _comes_next(messages: _Messages, orders: Sequence[Sequence[Operation]], rank: int, at: int) -> tuple[int, ...]:
    """Messages that a rank of the ring receives in the call after its pass `at`; `orders` of one kind of pass alone.

    Its next pass needs them; but the rank that leads (the first in the forward pass, the last in the backward pass)
    receives what comes round the ring when that is made, p - 1 turns behind.
    """
    leads = 0 if orders[0][0].kind == "F" else len(orders) - 1
    if rank != leads:
        return messages.received(orders[rank][at + 1]) if at + 1 < len(orders[rank]) else ()
    made_at = at - (len(orders) - 1)
    return messages.sent(orders[len(orders) - 1 - leads][made_at]) if made_at >= 0 else ()


def _ring_calls(
    messages: _Messages, orders: Sequence[Sequence[Operation]], rank: int, warmup: int
) -> list[Operation | _Call]:
    """Operations and calls of a rank of Megatron-LM's interleaved schedule without overlap (schedules.py).

    One call after each forward, each pair of forward and backward, and each backward sends both ways round the ring
    and receives what the next turn needs (send_forward_backward_recv_forward_backward).
    """
    forwards, backwards = ([[o for o in order if o.kind == kind] for order in orders] for kind in "FB")
    count = len(forwards[rank])
    first = messages.received(backwards[rank][0])
    calls: list[Operation | _Call] = [_Call((), messages.received(forwards[rank][0]))]
    for turn in range(count + warmup):
        sends: tuple[int, ...] = ()
        receives: tuple[int, ...] = ()
        for passes, number in ((forwards, turn), (backwards, turn - warmup)):
            if 0 <= number < count:
                calls.append(passes[rank][number])
                sends += messages.sent(passes[rank][number])
                receives += _comes_next(messages, passes, rank, number)
        if turn == warmup - 1 and warmup < count:
            receives += first
        calls.append(_Call(sends, receives))
        if turn == warmup - 1 and warmup == count:
            calls.append(_Call((), first))
    return calls


def _posts(call: Operation | _Call | None) -> tuple[int, ...]:
    """Numbers given on reaching the call, which the other ends of its messages wait for."""
    if not isinstance(call, _Call):
        return ()
    return (*(2 * message for message in call.sends), *(2 * message + 1 for message in call.receives))


def _blocking(
    messages: _Messages, calls: Sequence[Operation | _Call], num_chunks: int
) -> tuple[tuple[int, ...], list[Step]]:
    """(what is given before the first step, steps): a call needs that the other end of each message is there too.

    The calls of a chain go over one hop each; hops of a ring are alike.
    """
    posting = [call for call in calls if not isinstance(call, _Call) or call.sends or call.receives]
    steps = []
    for call, after in itertools.zip_longest(posting, posting[1:]):
        if isinstance(call, _Call):
            needs = tuple(post ^ 1 for post in _posts(call))
            hop = messages.hop((*call.sends, *call.receives)[0])
            steps.append(Step(len(ROWS) * num_chunks + hop, needs, _posts(after)))
        else:
            steps.append(Step(_row(call, num_chunks), (), _posts(after)))
    return _posts(posting[0]), steps


# -- steps of all ranks ------------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """Steps of every rank."""

    ranks: list[list[Step]]
    early: list[int]  # what is given before the first step of any rank
    num_gifts: int  # numbers that `needs` and `gives` are below


def overlapped_steps(shape: PipelineShape) -> Steps:
    """Steps where every message travels while both ranks go on."""
    messages = _Messages(shape)
    ranks = [_overlapped(messages, order, shape.stages * shape.chunks) for order in rank_orders(shape)]
    return Steps(ranks, [], messages.count)


def blocking_steps(shape: PipelineShape) -> Steps:
    """Steps of 1F1B, interleaved or not, where both ranks stay in the call that passes a message on."""
    messages, orders = _Messages(shape), rank_orders(shape)
    group = microbatch_group(shape.stages, shape.num_microbatches)
    ranks: list[list[Step]] = []
    early: list[int] = []
    for rank, order in enumerate(orders):
        warmup = warmup_forwards(shape, rank, group)
        is_chain = shape.chunks == 1
        calls = _plain_calls(messages, order, warmup) if is_chain else _ring_calls(messages, orders, rank, warmup)
        early_gifts, steps = _blocking(messages, calls, shape.stages * shape.chunks)
        ranks.append(steps)
        early += early_gifts
    return Steps(ranks, early, 2 * messages.count)
