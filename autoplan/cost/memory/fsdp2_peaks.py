"""Memory of an FSDP2 rank at the moments of a step that may be its peak.

Gradients live from their backward pass to the optimizer step, copies of the weights only during passes, so several
moments of a step may be its peak (torch/distributed/fsdp/_fully_shard).  A pipeline has different ones, as it reduces
gradients after all passes (torch/distributed/pipelining).  Arrays have the shape (plans, stages); sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoplan.base.arrays import Bools, Floats, add_up
from autoplan.cost.state_types import WIDE_BYTES

# Memory terms at the candidate peaks of each phase of a step.
Snapshots = dict[Literal["forward", "backward", "update"], tuple[dict[str, Floats], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """Inputs of the candidate peaks; parameters in elements per rank before data-parallel sharding."""

    element_bytes: float  # per gradient element as produced by the backward pass
    reduced_bytes: Floats  # per gradient element as kept after its reduction, in the type of the weights
    copy_bytes: Floats  # per weight as read by passes; 0 if they read the fp32 weights directly
    parameters: Floats
    ends: Floats  # embedding, head and last norm, which belong to the root unit
    head: Floats  # the head's matrix among them
    summed: Floats  # gradient of the whole embedding except the rank's own part, which tensor-parallel ranks reduce
    unit: Floats  # the largest layer
    kept: Floats  # parameters that the rank keeps on the device after sharding
    kept_ends: Floats  # of `ends`, those that the rank keeps
    accumulated: Floats  # bytes of gradients accumulated by earlier micro-batches, if any
    reduces_every: Bools  # micro-batch's gradients, with an earlier micro-batch in the step
    frees_weights: Bools  # zero3 without a pipeline: a layer's copies are freed after each of its passes
    live: Floats  # activations of all micro-batches in flight
    later_live: Floats  # those of other micro-batches when the backward pass of one ends
    logits: Floats  # at the peak of head and loss
    transients: Floats  # of one layer's backward pass, including recomputed activations


def _snapshot(
    gradients: Floats,
    activations: Floats | float = 0.0,
    *,
    logits: Floats | float = 0.0,
    transients: Floats | float = 0.0,
    gathered: Floats | float = 0.0,
) -> dict[str, Floats]:
    terms = {
        "gradients": gradients,
        "activations": activations,
        "logits": logits,
        "transients": transients,
        "gathered": gathered,
    }
    return {name: np.zeros_like(gradients) + value for name, value in terms.items()}


def pass_terms(sizes: PassSizes) -> Snapshots:
    """Moments without a pipeline: forward through the last layer; loss; backward of last layer, first, ends; update."""
    element, copy, accumulated = sizes.element_bytes, sizes.copy_bytes, sizes.accumulated
    copies = copy * np.where(sizes.frees_weights, sizes.ends, sizes.parameters)
    in_turn = copy * np.where(sizes.frees_weights, 2 * sizes.unit, 0.0)
    # Without weight copies gradients are written in place, or accumulated there matrix by matrix.
    in_place, adds = copy == 0, accumulated > 0
    # A layer's gradients, concatenated in fp32 for the reduction.
    reduced = np.where(in_place, 0.0, (element + WIDE_BYTES) * sizes.unit)
    head_gradient = element * sizes.head
    layers = sizes.reduced_bytes * (sizes.kept - sizes.kept_ends)
    earlier = np.maximum(accumulated, layers)
    # The input of the last reduction stays alive until the next one (FSDPParamGroup.post_backward).
    read = WIDE_BYTES * sizes.ends * sizes.reduces_every
    # The last layer's gathered buffer is copied into its weights.
    forward = _snapshot(accumulated, sizes.live, gathered=copies + in_turn + read)
    loss = _snapshot(accumulated, sizes.live, logits=sizes.logits, gathered=copies + read)
    last = _snapshot(
        np.where(in_place, np.maximum(accumulated, head_gradient + element * sizes.unit), accumulated + head_gradient),
        sizes.live,
        transients=sizes.transients,
        gathered=copies + in_turn + np.maximum(reduced, read),
    )
    first = _snapshot(
        np.where(in_place, np.maximum(accumulated, layers + head_gradient), earlier + head_gradient),
        sizes.later_live,
        transients=sizes.transients,
        gathered=copy * (sizes.ends + sizes.unit) + reduced,
    )
    tables = np.where(in_place, WIDE_BYTES * (sizes.ends - sizes.head) * adds, (copy + WIDE_BYTES) * sizes.ends)
    root = _snapshot(
        np.where(in_place, sizes.reduced_bytes * sizes.kept, earlier),
        sizes.later_live,
        gathered=tables + element * sizes.summed,
    )
    update = _snapshot(sizes.reduced_bytes * sizes.kept)
    return {"forward": (forward, loss), "backward": (last, first, root), "update": (update,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSizes:
    """Inputs of a pipeline's candidate peaks; `passes.live` includes what head and loss store in flight."""

    passes: PassSizes
    buffers: Floats  # receive buffers of hidden states and their gradients, allocated for the whole run
    logits: Floats  # beyond live ones, at the peak of head and loss
    behind: Floats  # of the live ones, those freed before the backward pass of the layers
    transients: Floats  # of one layer's backward pass, once the gradient of its last matrix exists
    matrix: Floats  # that matrix, in elements
    layer: Floats  # one layer of one micro-batch among the live activations
    refills: Bools  # forward passes follow the first backward pass, so as much is alive when gradients exist


def stage_terms(sizes: PipelineSizes) -> Snapshots:
    """Moments with a pipeline: loss; backward through a layer, end of backward, gradient reduction; update.

    The first three occur in the first backward pass and in later ones, when gradients exist.  Nothing is reduced before
    all passes are complete (stage.py perform_reduce_grad).
    """
    passes = sizes.passes
    summed = WIDE_BYTES * (passes.parameters + passes.summed)
    element, copies = passes.element_bytes, passes.copy_bytes * passes.parameters
    forward, backward = [], []
    for gradients, live in (
        (np.where(sizes.refills, summed, 0.0), passes.live),
        (passes.accumulated, passes.later_live),
    ):
        with_head, behind = gradients + element * passes.head, live - sizes.behind
        forward.append(_snapshot(gradients, live, logits=sizes.logits, gathered=copies))
        backward += [
            _snapshot(with_head + element * sizes.matrix, behind, transients=sizes.transients, gathered=copies),
            _snapshot(with_head + element * passes.unit, behind - sizes.layer, gathered=copies),
        ]
    # Unit by unit, gradients are concatenated in fp32 in the memory of the weight copies.
    largest = np.maximum(passes.unit, passes.ends)
    reduced = np.where(passes.copy_bytes > 0, WIDE_BYTES - passes.copy_bytes, 0.0) * largest
    backward.append(_snapshot(summed, gathered=copies + reduced))

    def buffered(*snapshots: dict[str, Floats]) -> tuple[dict[str, Floats], ...]:
        return tuple({**snapshot, "activations": snapshot["activations"] + sizes.buffers} for snapshot in snapshots)

    update = _snapshot(passes.reduced_bytes * passes.kept)
    return {"forward": buffered(*forward), "backward": buffered(*backward), "update": buffered(update)}


def with_gathered(snapshots: Snapshots, gathered: Floats) -> Snapshots:
    """Return the moments with this many additional bytes of gathered weights during passes."""
    return {
        phase: tuple(
            {
                name: size + gathered if name == "gathered" and phase != "update" else size
                for name, size in terms.items()
            }
            for terms in phase_snapshots
        )
        for phase, phase_snapshots in snapshots.items()
    }


def stream_pool_bytes(sizes: PassSizes, snapshots: Snapshots) -> Floats:
    """Return what is reserved beyond the largest total, as two of FSDP2's streams have blocks of their own.

    Reduced gradients, and what a gather writes before it is copied into the weights, are allocated on other streams
    than all else, and no stream takes another one's blocks (_fsdp_collectives.py, foreach_reduce, foreach_all_gather).
    """
    reduced = sizes.reduced_bytes * sizes.kept
    moments = [terms for phase in snapshots.values() for terms in phase]
    totals = np.stack([add_up(terms.values()) for terms in moments])
    beside = totals - np.minimum(np.stack([terms["gradients"] for terms in moments]), reduced)
    return beside.max(axis=0) + reduced - totals.max(axis=0) + sizes.copy_bytes * np.maximum(sizes.head, sizes.unit)


def at_peak(snapshots: Snapshots) -> dict[str, Floats]:
    """Return the terms of the moment with the largest total."""
    all_snapshots = [terms for phase in snapshots.values() for terms in phase]
    totals = np.stack([sum(terms.values(), start=np.float64(0.0)).T for terms in all_snapshots])
    peak = totals.argmax(axis=0)[None]
    stacked = {name: np.stack([terms[name].T for terms in all_snapshots]) for name in all_snapshots[0]}
    return {name: np.take_along_axis(values, peak, axis=0)[0].T for name, values in stacked.items()}
