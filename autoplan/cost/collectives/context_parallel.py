"""Context parallelism: the collectives of attention over a split sequence, and their exposed parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.collectives.collective import Collective, LinkTimes
from autoplan.cost.kernels.sizes import rank_tokens
from autoplan.cost.network.process_groups import process_groups
from autoplan.cost.passes import Pass
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


class ContextParallel(NamedTuple):
    """Collectives of one block of attention."""

    ring: Collective  # passes keys and values around, and their gradients in the backward pass
    exchange_heads: Collective  # queries and outputs, Ulysses
    exchange_kv: Collective


def context_parallel(problem: Problem, batch: PlanBatch) -> ContextParallel:
    """Describe the collectives of one block of attention.

    Ring: keys and values travel around the ring, in the backward pass together with their gradients.  All-to-all
    (Ulysses, arXiv:2309.14509): q, k, v and the output.  In a hierarchy a rank has its share of the heads, of the
    tokens of all ranks of its all-to-all, and passes on as many bytes as in a ring of all ranks, fewer times.  A
    framework that expands keys and values to all heads gathers the expanded ones, with gradients in fp32.
    """
    kv, heads = _buffer_bytes(problem, batch)
    expands, inner = problem.framework.kernels.expands_kv, _inner_ranks(problem, batch)
    rings, exchanges = (inner < batch.cp).astype(np.float64), (inner > 1).astype(np.float64)
    groups = process_groups(batch)
    around, among = groups.cp_ring(inner), groups.cp_exchange(inner)
    return ContextParallel(
        ring=Collective(
            "cp",
            "all_gather",
            around,
            (heads if expands else kv) * around.size,
            forward=rings,
            backward=(3.0 if expands else 2.0) * rings,
        ),
        exchange_heads=Collective("cp", "all_to_all", among, heads, forward=exchanges, backward=exchanges),
        exchange_kv=Collective("cp", "all_to_all", among, kv, forward=exchanges, backward=exchanges),
    )


def _inner_ranks(problem: Problem, batch: PlanBatch) -> Ints:
    """Ranks of an all-to-all; one where keys and values are gathered whatever the plan says."""
    return np.ones_like(batch.cp) if problem.framework.kernels.expands_kv else batch.cp_inner


def _buffer_bytes(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """Bytes of (keys and values, queries and outputs) of one attention block on a context-parallel rank."""
    model, tokens = problem.model, rank_tokens(problem, batch)
    # Tensor parallelism beyond the number of key/value heads copies the heads.
    kv = 2.0 * tokens * model.kv_heads * (model.qk_head_dim + model.v_head_dim) / np.minimum(batch.tp, model.kv_heads)
    return kv, 2.0 * tokens * model.num_heads * (model.qk_head_dim + model.v_head_dim) / batch.tp


def context_parallel_s(problem: Problem, batch: PlanBatch, links: LinkTimes, attention: Pass) -> Pass:
    """Exposed context-parallel traffic of one attention block.

    A ring exposes its first transfer, and the time by which the others outlast the attention blocks computed meanwhile.
    An all-to-all is fully exposed; in a hierarchy it precedes the ring.
    """
    if (batch.cp == 1).all():
        return Pass.none(len(batch))
    collectives = context_parallel(problem, batch)
    ring = collectives.ring.seconds(links)
    if problem.framework.kernels.expands_kv:
        return _gathered_s(batch, ring, attention)
    parts = collectives.ring.group.size
    steps = np.maximum(parts - 1, 1)
    hidden_forward = attention.forward_s * (parts - 1) / parts
    hidden_backward = attention.backward_s * (parts - 1) / parts
    ring_forward = np.maximum(ring - hidden_forward, ring / steps)
    ring_backward = np.maximum(2 * ring - hidden_backward, 2 * ring / steps)
    exchange = collectives.exchange_heads.seconds(links) + collectives.exchange_kv.seconds(links)
    return Pass(
        np.where(batch.cp > 1, ring_forward + exchange, 0.0), np.where(batch.cp > 1, ring_backward + exchange, 0.0)
    )


def _gathered_s(batch: PlanBatch, gather: Floats, attention: Pass) -> Pass:
    """Exposed traffic if ranks gather all keys and values while they compute attention over their own.

    The fp32 gradients travel around the ring while the next block of attention is computed; those of the last block are
    exposed.
    Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py.
    """
    hop = 2.0 * gather / np.maximum(batch.cp - 1, 1)
    forward = np.maximum(gather - attention.forward_s / batch.cp, 0.0)
    backward = np.maximum(gather - attention.backward_s / batch.cp, 0.0)
    late = (batch.cp - 1) * np.maximum(hop - attention.backward_s / batch.cp, 0.0)
    return Pass(np.where(batch.cp > 1, forward, 0.0), np.where(batch.cp > 1, backward + late + hop, 0.0))
