"""Makespan of a pipeline whose micro-batches take unlike times, operation by operation."""

from __future__ import annotations

from typing import Any

import numpy as np


def one_forward_one_backward(stages: int, sizes: np.ndarray[Any, Any]) -> float:
    """Makespan of 1F1B; `sizes` are times of both passes by micro-batch, of all stages or (stages, micro-batches)."""
    count, orders = sizes.shape[-1], []
    times = np.broadcast_to(sizes, (stages, count))
    for rank in range(stages):
        ahead = min(stages - rank - 1, count)
        order = [("F", at) for at in range(ahead)]
        for at in range(count - ahead):
            order += [("F", ahead + at), ("B", at)]
        orders.append(order + [("B", at) for at in range(count - ahead, count)])
    end: dict[tuple[str, int, int], float] = {}
    done, clock = [0] * stages, [0.0] * stages
    while min(clock) == 0 or any(done[rank] < 2 * count for rank in range(stages)):
        for rank in range(stages):
            while done[rank] < 2 * count:
                kind, at = orders[rank][done[rank]]
                needs = [("F", at, rank - 1)] if kind == "F" and rank else []
                if kind == "B":
                    needs = [("F", at, rank), *([("B", at, rank + 1)] if rank < stages - 1 else [])]
                if any(need not in end for need in needs):
                    break
                start = max([clock[rank], *(end[need] for need in needs)])
                clock[rank] = end[kind, at, rank] = start + times[rank, at] / 3 * (1 if kind == "F" else 2)
                done[rank] += 1
    return max(clock)
