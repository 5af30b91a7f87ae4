"""Dependencies of a rank's steps: messages that overlap with work, or blocking calls."""

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

# Rows of the table of times, each for all chunks: forward, backward, its halves, and a joined forward and backward
# (indexed by the chunk of the forward).  One further row is the time of a message.
ROWS = {"F": 0, "B": 1, "I": 2, "W": 3, "joined": 4}


class Step(NamedTuple):
    """Step that occupies a rank for the time in `row`, starting when everything that it `needs` has been given.

    With overlap a message is given; with blocking calls, the fact that one end of a message is ready.
    """

    row: int
    needs: tuple[int, ...]
    gives: tuple[int, ...]


class _Messages:
    """Numbers of the messages that operations of one (schedule, p, v, m) receive and send."""

    def __init__(self, shape: PipelineShape) -> None:
        self._num_chunks = shape.stages * shape.chunks
        self._num_microbatches = shape.num_microbatches
        self.count = 2 * self._num_chunks * shape.num_microbatches
        rank_of = rank_of_chunks(shape.schedule, shape.stages, shape.chunks)
        # Whether a message is sent between a chunk and the previous one: not if both are on one rank.
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
        """Return the message sent to another rank, if any: to the next chunk, or in a backward to the previous one."""
        kind, chunk, microbatch, _ = operation
        if kind == "F":
            return ((chunk + 1) * self._num_microbatches + microbatch,) if self._crosses[chunk + 1] else ()
        if kind == "W" or not self._crosses[chunk]:
            return ()
        return ((self._num_chunks + chunk - 1) * self._num_microbatches + microbatch,)

    def hop(self, message: int) -> int:
        """Return the hop of a message, numbered by the chunk before it."""
        towards, chunk = divmod(message // self._num_microbatches, self._num_chunks)
        return chunk if towards else chunk - 1


def _row(operation: Operation, num_chunks: int) -> int:
    return ROWS["joined" if operation.joined else operation.kind] * num_chunks + operation.chunk


def _overlapped(messages: _Messages, operations: Sequence[Operation], num_chunks: int) -> list[Step]:
    """Return steps that send at their end while their rank continues; the receiving step waits for the message."""
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
    """Messages sent and received in one call, which returns when all of them are complete."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]


def _plain_calls(messages: _Messages, operations: Sequence[Operation], warmup: int) -> list[Operation | _Call]:
    """Operations and calls of a rank of Megatron-LM's 1F1B (schedules.py, ..._without_interleaving).

    In warm-up and cool-down it receives, computes, sends; in between one call sends to a neighbour and receives from it
    (send_forward_recv_backward, send_backward_recv_forward).
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
    """Return the messages received in the call after a rank's pass `at`; `orders` are of one kind of pass.

    Its next pass needs them, except on the leading rank (the first in the forward pass, the last in the backward pass),
    which receives data around the ring when it is produced, p - 1 turns later.
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

    One call after each forward, each pair of forward and backward, and each backward sends both ways around the ring
    and receives the inputs of the next turn (send_forward_backward_recv_forward_backward).
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
    """Numbers given on reaching the call; the other ends of its messages wait for them."""
    if not isinstance(call, _Call):
        return ()
    return (*(2 * message for message in call.sends), *(2 * message + 1 for message in call.receives))


def _blocking(
    messages: _Messages, calls: Sequence[Operation | _Call], num_chunks: int
) -> tuple[tuple[int, ...], list[Step]]:
    """Return (numbers given before the first step, steps); a call needs the other end of each message to be ready.

    The calls of a chain use one hop each; all hops of a ring take the same time.
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
    early: list[int]  # numbers given before the first step of any rank
    num_gifts: int  # exclusive bound of the numbers in `needs` and `gives`


def overlapped_steps(shape: PipelineShape) -> Steps:
    """Return steps with messages that overlap with the work of both ranks."""
    messages = _Messages(shape)
    ranks = [_overlapped(messages, order, shape.stages * shape.chunks) for order in rank_orders(shape)]
    return Steps(ranks, [], messages.count)


def blocking_steps(shape: PipelineShape) -> Steps:
    """Return steps of 1F1B, interleaved or not, with blocking calls."""
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
