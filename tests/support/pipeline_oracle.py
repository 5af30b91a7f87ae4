"""Pipeline schedules and a simulation of them, event by event: slow, plain and apart from the code that they test."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest

from autoplan.spec.enums import Schedule

# An operation is (kind, micro-batch, chunk in model order); kind is "F", "B", or "I" and "W" for a split backward.
# A rank runs a list of actions, each of them one operation or, joined, several.
Operation = tuple[str, int, int]
Action = tuple[Operation, ...]
Times = Mapping[str, Sequence[float]]  # of every kind: one pass through each chunk, in model order


def alone(operations: Sequence[Operation]) -> list[Action]:
    return [(operation,) for operation in operations]


# -- orders -----------------------------------------------------------------------------------------------------------


def one_forward_one_backward(p: int, m: int) -> list[list[Action]]:
    """Megatron-LM without interleaving: p - r - 1 forwards to warm up, then one forward and one backward in turn."""
    ranks = []
    for rank in range(p):
        warmup = min(p - rank - 1, m)
        forwards: list[Operation] = [("F", i, rank) for i in range(m)]
        backwards: list[Operation] = [("B", i, rank) for i in range(m)]
        steady = itertools.chain.from_iterable(zip(forwards[warmup:], backwards[: m - warmup], strict=True))
        ranks.append(alone([*forwards[:warmup], *steady, *backwards[m - warmup :]]))
    return ranks


def interleaved(p: int, v: int, m: int, group: int | None = None) -> list[list[Action]]:
    """Megatron-LM with v chunks a rank: groups of p micro-batches, or another size, go through chunk after chunk."""
    g = group or p
    turns = [(i, chunk) for start in range(0, m, g) for chunk in range(v) for i in range(start, min(start + g, m))]
    ranks = []
    for rank in range(p):
        warmup = min(2 * (p - rank - 1) + (v - 1) * g, m * v)
        forwards: list[Operation] = [("F", i, chunk * p + rank) for i, chunk in turns]
        backwards: list[Operation] = [("B", i, (v - 1 - chunk) * p + rank) for i, chunk in turns]
        steady = itertools.chain.from_iterable(zip(forwards[warmup:], backwards[: m * v - warmup], strict=True))
        ranks.append(alone([*forwards[:warmup], *steady, *backwards[m * v - warmup :]]))
    return ranks


def gpipe(p: int, m: int) -> list[list[Action]]:
    """Order of forwards, then backwards."""
    return [alone([(kind, i, rank) for kind in "FB" for i in range(m)]) for rank in range(p)]


# (torch's class, our name, chunks of a rank)
TORCH: list[tuple[str, Schedule, int]] = [
    ("ScheduleInterleaved1F1B", "interleaved", 2),
    ("ScheduleInterleaved1F1B", "interleaved", 3),
    ("ScheduleInterleavedZeroBubble", "zb-h1", 1),
    ("ScheduleInterleavedZeroBubble", "zb-h1", 3),
    ("ScheduleZBVZeroBubble", "zb-v", 2),
    ("ScheduleDualPipeV", "dualpipe-v", 2),
]


def cases(stages: tuple[int, ...], microbatches: tuple[int, ...]) -> list[tuple[Schedule, int, int, int]]:
    """Combinations that have an order."""
    found: list[tuple[Schedule, int, int, int]] = []
    for p, m in itertools.product(stages, microbatches):
        found += [(schedule, p, 1, m) for schedule in ("gpipe", "1f1b", "zb-h1")]
        found += [(schedule, p, v, m) for schedule in ("interleaved", "zb-h1") for v in (2, 3)]
        found += [(schedule, p, 2, m) for schedule in ("zb-v", "dualpipe-v") if schedule == "zb-v" or m >= 2 * p]
    return found


def torch_actions(name: str, p: int, v: int, m: int) -> list[list[Action]] | None:
    """The order that torch.distributed.pipelining generates, None where it refuses the number of micro-batches."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stage = mock.MagicMock()
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, p, p * v, None
    try:
        order = getattr(schedules, name)([stage] * v, m).pipeline_order
    except ValueError:
        return None
    return [
        [
            tuple(
                (a.computation_type.value, a.microbatch_index, a.stage_index) for a in action.sub_actions or (action,)
            )
            for action in order[rank]
            if action is not None
        ]
        for rank in range(p)
    ]


# -- time -------------------------------------------------------------------------------------------------------------


def simulate(ranks: Sequence[Sequence[Action]], times: Times, hop_s: float = 0.0) -> float:
    """Makespan: every rank runs its list in order, every action waits for what it needs (`modelling` E4).

    A forward needs the forward of the chunk before, a backward its own forward and the backward of the chunk behind,
    a weight gradient its input gradient; what comes from another rank arrives `hop_s` later.
    """
    home = {chunk: rank for rank, actions in enumerate(ranks) for action in actions for _, _, chunk in action}
    end: dict[Operation, float] = {}

    def needs(kind: str, i: int, chunk: int) -> list[Operation]:
        if kind == "W":
            return [("I", i, chunk)]
        if kind == "F":
            return [("F", i, chunk - 1)] if chunk > 0 else []
        later = [(half, i, chunk + 1) for half in "BI" if (half, i, chunk + 1) in end]
        return [("F", i, chunk), *(later or [("B", i, chunk + 1)] * (chunk + 1 < len(home)))]

    clocks, done = [0.0] * len(ranks), [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            for action in actions[done[rank] :]:
                needed = [need for operation in action for need in needs(*operation) if need not in action]
                if not end.keys() >= set(needed):
                    break
                start = max([clocks[rank], *(end[need] + hop_s * (home[need[2]] != rank) for need in needed)])
                clocks[rank] = start + sum(times[kind][chunk] for kind, _, chunk in action)
                end |= dict.fromkeys(action, clocks[rank])
                done[rank] += 1
                progress = True
    assert all(count == len(actions) for count, actions in zip(done, ranks, strict=True)), "deadlock"
    return max(clocks)


# What a rank does: a float of work, or a call that takes a message's time once all its messages have both ends there.
# A message is (from rank, to rank, name); both ends name it alike.
Call = frozenset[tuple[int, int, Operation]]


def rendezvous(ranks: Sequence[Sequence[float | Call]], send_s: float | Sequence[float]) -> float:
    """Makespan where both ends of every message wait for each other; `send_s` may differ by the lower rank of a hop."""
    hop_s = [send_s] * len(ranks) if isinstance(send_s, float | int) else list(send_s)
    clocks, at = [0.0] * len(ranks), [0] * len(ranks)
    arrived: dict[tuple[int, tuple[int, int, Operation]], float] = {}
    progress = True
    while progress:
        progress = False
        for rank, todo in enumerate(ranks):
            if at[rank] == len(todo):
                continue
            here = todo[at[rank]]
            if isinstance(here, float):
                clocks[rank] += here
            else:
                mine = {(rank, message): clocks[rank] for message in here}
                progress |= not arrived.keys() >= mine.keys()
                arrived |= mine
                ends = [(end, message) for message in here for end in message[:2]]
                if not arrived.keys() >= set(ends):
                    continue
                slowest = max((hop_s[min(message[:2])] for message in here), default=0.0)
                clocks[rank] = max((arrived[end] for end in ends), default=clocks[rank]) + slowest
            at[rank] += 1
            progress = True
    assert all(count == len(todo) for count, todo in zip(at, ranks, strict=True)), "deadlock"
    return max(clocks)


def simulate_blocking(p: int, m: int, times: Times, send_s: float | Sequence[float]) -> float:
    """Makespan of 1F1B in Megatron-LM, forward_backward_pipelining_without_interleaving call by call."""
    ranks = []
    for rank in range(p):
        warmup = min(p - rank - 1, m)
        todo: list[float | Call] = []

        def call(*messages: tuple[int, int, Operation], todo: list[float | Call] = todo) -> None:
            todo.append(frozenset(message for message in messages if 0 <= message[0] < p and 0 <= message[1] < p))

        def arrives(i: int, rank: int = rank) -> tuple[int, int, Operation]:
            return rank - 1, rank, ("F", i, rank)

        def leaves(i: int, rank: int = rank) -> tuple[int, int, Operation]:
            return rank, rank + 1, ("F", i, rank + 1)

        def comes_back(i: int, rank: int = rank) -> tuple[int, int, Operation]:
            return rank + 1, rank, ("B", i, rank)

        def goes_back(i: int, rank: int = rank) -> tuple[int, int, Operation]:
            return rank, rank - 1, ("B", i, rank - 1)

        for i in range(warmup):
            call(arrives(i))
            todo.append(times["F"][rank])
            call(leaves(i))
        if m > warmup:
            call(arrives(warmup))
        for i in range(m - warmup):
            todo.append(times["F"][rank])
            call(leaves(warmup + i), comes_back(i))
            todo.append(times["B"][rank])
            call(goes_back(i), *([] if i == m - warmup - 1 else [arrives(warmup + i + 1)]))
        for i in range(m - warmup, m):
            call(comes_back(i))
            todo.append(times["B"][rank])
            call(goes_back(i))
        ranks.append(todo)
    return rendezvous(ranks, send_s)


def simulate_blocking_ring(p: int, v: int, m: int, times: Times, send_s: float) -> float:
    """Makespan of Megatron-LM's forward_backward_pipelining_with_interleaving, overlap_p2p_comm off, p dividing m."""
    table = [(i, chunk) for start in range(0, m, p) for chunk in range(v) for i in range(start, start + p)]
    count = m * v

    def to_next(rank: int, k: int) -> list[tuple[int, int, Operation]]:
        """Message that leaves the rank after its forward number k."""
        i, chunk = table[k]
        behind = chunk * p + rank + 1
        return [(rank, (rank + 1) % p, ("F", i, behind))] if behind < p * v else []

    def to_previous(rank: int, k: int) -> list[tuple[int, int, Operation]]:
        i, chunk = table[k]
        before = (v - 1 - chunk) * p + rank - 1
        return [(rank, (rank - 1) % p, ("B", i, before))] if before >= 0 else []

    def from_previous(rank: int, k: int) -> list[tuple[int, int, Operation]]:
        """recv_tensor_from_previous_stage after forward number k."""
        if rank == 0:
            return to_next(p - 1, k - (p - 1)) if k >= p - 1 else []
        return to_next(rank - 1, k + 1) if k + 1 < count else []

    def from_next(rank: int, k: int) -> list[tuple[int, int, Operation]]:
        if rank == p - 1:
            return to_previous(0, k - (p - 1)) if k >= p - 1 else []
        return to_previous(rank + 1, k + 1) if k + 1 < count else []

    ranks = []
    for rank in range(p):
        warmup = min(2 * (p - rank - 1) + (v - 1) * p, count)
        forward = [times["F"][chunk * p + rank] for _, chunk in table]
        backward = [times["B"][(v - 1 - chunk) * p + rank] for _, chunk in table]
        first_back = to_previous(rank + 1, 0) if rank < p - 1 else []
        todo: list[float | Call] = [frozenset(to_next(rank - 1, 0) if rank else [])]
        for k in range(warmup):
            todo.append(forward[k])
            early = first_back if k == warmup - 1 and warmup < count else []
            todo.append(frozenset([*to_next(rank, k), *from_previous(rank, k), *early]))
        for k in range(count - warmup):
            j = k + warmup
            todo += [forward[j], backward[k]]
            ahead = from_previous(rank, j) if k < count - warmup - 1 else []
            todo.append(frozenset([*to_next(rank, j), *to_previous(rank, k), *ahead, *from_next(rank, k)]))
        if warmup == count:
            todo.append(frozenset(first_back))
        for k in range(count - warmup, count):
            todo.append(backward[k])
            todo.append(frozenset([*to_previous(rank, k), *from_next(rank, k)]))
        ranks.append(todo)
    return rendezvous(ranks, send_s)


# -- memory -----------------------------------------------------------------------------------------------------------


def most_alive(actions: Sequence[Action], size: Mapping[int, float] | None = None, *, released: str = "BW") -> float:
    """Peak of the forwards whose backward has not run yet: their count, or what their chunks weigh by `size`."""
    operations = [operation for action in actions for operation in action]
    weights = [1.0 if size is None else size[chunk] for _, _, chunk in operations]
    changes = [
        weight if kind == "F" else -weight if kind in released else 0.0
        for (kind, _, _), weight in zip(operations, weights, strict=True)
    ]
    return max(itertools.accumulate(changes))
