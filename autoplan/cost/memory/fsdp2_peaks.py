"""Memory of a rank of FSDP2 at the moments of its step that may be its peak.

Gradients live from their backward pass to the optimizer's step, and copies of the weights only while passes run, so
that a step has several moments that may be its peak (torch/distributed/fsdp/_fully_shard).  A pipeline has others: it
reduces gradients when all passes are over (torch/distributed/pipelining).  Arrays have the shape (plans, stages);
sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.cost.memory.state_types import WIDE_BYTES

# Terms of memory at the moments of each phase of a step that may be its peak.
Snapshots = dict[Literal["forward", "backward", "update"], tuple[dict[str, Floats], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """Sizes that make up the moments; parameters are elements of the rank before data-parallel sharding."""

    element_bytes: float  # of a weight's gradient as the backward pass makes it
    copy_bytes: Floats  # of a weight as passes read it; 0 where they read the fp32 weights themselves
    parameters: Floats
    ends: Floats  # embedding, head and last norm, one unit with the whole
    head: Floats  # of them, the head's matrix
    summed: Floats  # what tensor-parallel ranks add up: the gradient of the whole embedding except for the own part
    unit: Floats  # the largest layer
    own: Floats  # of the parameters, what the rank keeps of them on the device
    own_ends: Floats  # the same of the ends
    accumulated: Floats  # bytes of gradients that earlier micro-batches left; 0 where there are none
    reduces_every: Bools  # micro-batch's gradients, and has done so before
    frees_weights: Bools  # zero3 without a pipeline: a layer's copies go after each of its passes
    live: Floats  # activations of all micro-batches in flight
    later_live: Floats  # of them, those of other micro-batches when the backward pass of one comes to its end
    logits: Floats  # at the peak of head and loss
    transients: Floats  # of one layer's backward pass, with what it computes again


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
    """Forward through the last layer, and the loss; backward through that layer, the first, the ends; update."""
    element, copy, accumulated = sizes.element_bytes, sizes.copy_bytes, sizes.accumulated
    copies = copy * np.where(sizes.frees_weights, sizes.ends, sizes.parameters)
    in_turn = copy * np.where(sizes.frees_weights, 2 * sizes.unit, 0.0)
    # Gradients of weights without copies come to be where they stay, or are added there one matrix after the other.
    in_place, adds = copy == 0, accumulated > 0
    # A layer's gradients, put together in fp32 to be reduced.
    reduced = np.where(in_place, 0.0, (element + WIDE_BYTES) * sizes.unit)
    head_gradient = element * sizes.head
    layers = WIDE_BYTES * (sizes.own - sizes.own_ends)
    earlier = np.maximum(accumulated, layers)
    # What the last reduction read stays until the next one (FSDPParamGroup.post_backward).
    read = WIDE_BYTES * sizes.ends * sizes.reduces_every
    # What was gathered for the last layer is copied into its weights.
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
        np.where(in_place, WIDE_BYTES * sizes.own, earlier), sizes.later_live, gathered=tables + element * sizes.summed
    )
    update = _snapshot(WIDE_BYTES * sizes.own)
    return {"forward": (forward, loss), "backward": (last, first, root), "update": (update,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSizes:
    """Sizes at the moments of a pipeline; `passes.live` has what head and loss keep of micro-batches in flight."""

    passes: PassSizes
    buffers: Floats  # that hidden states and their gradients are received into, from the first step to the last
    logits: Floats  # beyond those alive, at the peak of head and loss
    behind: Floats  # of those alive, what is gone when the backward pass of the layers begins
    transients: Floats  # of one layer's backward pass, when the gradient of its last matrix is there
    matrix: Floats  # that matrix, in elements
    layer: Floats  # of what is alive, one layer of one micro-batch
    refills: Bools  # forward passes follow on the first backward pass: as much is alive when there are gradients


def stage_terms(sizes: PipelineSizes) -> Snapshots:
    """Moments of a pipeline: the loss; backward through a layer, its end, the reduction of gradients; update.

    The first three come with the first backward pass, and with later ones, when there are gradients.  Nothing is
    reduced before all passes are over (stage.py perform_reduce_grad).
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
    # Unit by unit, gradients are put together in fp32 where the copies of the weights were.
    largest = np.maximum(passes.unit, passes.ends)
    reduced = np.where(passes.copy_bytes > 0, WIDE_BYTES - passes.copy_bytes, 0.0) * largest
    backward.append(_snapshot(summed, gathered=copies + reduced))

    def buffered(*snapshots: dict[str, Floats]) -> tuple[dict[str, Floats], ...]:
        return tuple({**snapshot, "activations": snapshot["activations"] + sizes.buffers} for snapshot in snapshots)

    update = _snapshot(WIDE_BYTES * passes.own)
    return {"forward": buffered(*forward), "backward": buffered(*backward), "update": buffered(update)}


def with_gathered(snapshots: Snapshots, gathered: Floats) -> Snapshots:
    """The moments with this many bytes more of gathered weights while passes run."""
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


def at_peak(snapshots: Snapshots) -> dict[str, Floats]:
    """The terms of the moment that needs most."""
    all_snapshots = [terms for phase in snapshots.values() for terms in phase]
    totals = np.stack([sum(terms.values(), start=np.float64(0.0)).T for terms in all_snapshots])
    peak = totals.argmax(axis=0)[None]
    stacked = {name: np.stack([terms[name].T for terms in all_snapshots]) for name in all_snapshots[0]}
    return {name: np.take_along_axis(values, peak, axis=0)[0].T for name, values in stacked.items()}
