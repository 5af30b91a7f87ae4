"""Time of one block and micro-batch by term, including waits for sharded-state traffic and for the host.

A wait is the time by which the awaited operation outlasts the work that hides it, so faster kernels, links or hosts
never lengthen a pass.  Arrays have one element per plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Rows, add_up
from autoplan.cost.collectives.expert_parallel import unpaired_share
from autoplan.cost.kernels.memory_bound import KERNELS_BACKWARD
from autoplan.cost.passes import SplitPass
from autoplan.spec.blocks import Block
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ALL_LAYERS, PlanBatch

# Share of the launches of a backward pass that a schedule may defer: two weight-gradient products of a block's
# matrices, out of these, two input-gradient products and all other kernels.
WEIGHT_LAUNCHES = 2 / (KERNELS_BACKWARD + 4)
_WAITS = ("fsdp_communication", "activation_offload", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost(Rows):
    """Seconds of one block and micro-batch by term.

    `repeat_s` is what recomputing the whole block adds to the terms of its backward pass.  Some terms are negative, as
    recomputation leaves less traffic and fewer launches exposed.
    """

    forward_s: dict[str, Floats]
    backward_s: dict[str, Floats]
    repeat_s: dict[str, Floats]
    # Where a schedule splits the backward pass: the half that it may defer, which computes the weight gradients; what
    # splitting adds to the whole pass; and what splitting adds to `repeat_s`.
    weight_s: dict[str, Floats]
    split_s: dict[str, Floats]
    split_repeat_s: dict[str, Floats]

    @property
    def total_forward_s(self) -> Floats:
        """Forward pass with exposed communication."""
        return add_up(self.forward_s.values())

    @property
    def total_backward_s(self) -> Floats:
        """Backward pass with exposed communication and selective recomputation."""
        return add_up(self.backward_s.values())

    @property
    def work_s(self) -> Floats:
        """Seconds of both passes during which one micro-batch keeps the compute units of the device busy."""
        passes = (self.forward_s, self.backward_s)
        return add_up(entry[name] for entry in passes for name in ("gemm", "attention", "memory_bound", "recompute"))

    @property
    def hiding_s(self) -> Floats:
        """Seconds of both passes under which expert traffic of another micro-batch may hide: work, and other waits.

        Other exposed traffic counts, too, because the work that hides the rest of that traffic cannot hide anything
        else.
        """
        passes = (self.forward_s, self.backward_s)
        waits = (entry[name] for entry in passes for name in ("tp_communication", "cp_communication"))
        return self.work_s + add_up(waits)

    @property
    def states_s(self) -> Floats:
        """Seconds that both passes wait for the traffic of sharded states."""
        return self.forward_s["fsdp_communication"] + self.backward_s["fsdp_communication"]

    @property
    def total_repeat_s(self) -> Floats:
        """Seconds that recomputing the whole block adds to its backward pass."""
        return add_up(self.repeat_s.values())

    def term_s(self, name: str, count: Floats, repeated: Floats) -> Floats:
        """Return a term of both passes of `count` such blocks, of which `repeated` are fully recomputed."""
        return count * (self.forward_s[name] + self.backward_s[name]) + repeated * self.repeat_s[name]

    def with_halves(self, plain: Halves, again: Halves, *, is_measured: Bools) -> BlockCost:
        """Return the cost with the waits of a split backward pass, `again` with recomputation; 0 if measured."""
        weight, split, split_repeat = self.weight_s.copy(), self.split_s.copy(), self.split_repeat_s.copy()
        for name in _WAITS:
            weight[name] = plain.weights_s[name]
            split[name] = plain.inputs_s[name] + plain.weights_s[name] - self.backward_s[name]
            longer = again.inputs_s[name] - plain.inputs_s[name] - self.repeat_s[name]
            split_repeat[name] = np.where(is_measured, 0.0, longer)
        return replace(self, weight_s=weight, split_s=split, split_repeat_s=split_repeat)

    def with_states(self, is_measured: Bools, every_s: Floats) -> BlockCost:
        """Return the cost with the sharded-state traffic that was measured together with the trainer's own layers."""

        def measured(terms: dict[str, Floats], seconds: Floats | float) -> dict[str, Floats]:
            return {
                name: np.where(is_measured, seconds, term_s) if name == "fsdp_communication" else term_s
                for name, term_s in terms.items()
            }

        return replace(
            self,
            forward_s=measured(self.forward_s, 0.0),
            backward_s=measured(self.backward_s, every_s),
            weight_s=measured(self.weight_s, 0.0),
            split_s=measured(self.split_s, 0.0),
            split_repeat_s=measured(self.split_repeat_s, 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """Work and waits, by term, of the two halves of a backward pass: input gradients and weight gradients.

    The delay of the host in each half is defined as in `Lags`.
    """

    inputs_s: dict[str, Floats]
    weights_s: dict[str, Floats]
    inputs_late_s: Floats
    weights_late_s: Floats

    @classmethod
    def of(
        cls,
        unhidden: float,
        input_s: Floats,
        weight_s: Floats,
        states: SplitPass,
        launch_s: Floats,
        wait_s: Floats,
    ) -> Halves:
        """Return the waits of two halves from their work and the launches of the pass; each hides its own traffic."""
        inputs, weights = {"gemm": input_s}, {"gemm": weight_s}
        deferred_s = WEIGHT_LAUNCHES * (launch_s - wait_s)
        return cls(
            inputs_late_s=finish(unhidden, inputs, states.input_gradient_s, launch_s - deferred_s, wait_s),
            weights_late_s=finish(unhidden, weights, states.weight_gradient_s, deferred_s, 0.0 * wait_s),
            inputs_s=inputs,
            weights_s=weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags:
    """Launch time of one block on the host minus its run time on the device, in seconds; may be negative."""

    forward_s: Floats
    backward_s: Floats
    repeated_s: Floats  # backward pass with full recomputation of the block
    halves: tuple[Halves, Halves] | None  # split backward pass, without and with recomputation


def finish(
    unhidden: float,
    terms: dict[str, Floats],
    traffic: Floats,
    launch: Floats,
    wait: Floats,
    copies: Floats | float = 0.0,
) -> Floats:
    """Return by how much a pass's launches outlast its run time on the device; add its exposed parameter traffic.

    `unhidden` is the share of the shorter of computation and traffic that shows.  `copies` of activations to the host,
    or back, are exposed as far as they outlast all else: engines of their own make them, and the link to the host
    carries both directions at once.  The term `launch` of the pass is set to the unavoidable wait for the host.
    """
    busy = add_up(terms.values())
    # The longer of computation and communication is exposed, and part of the shorter one (first unit, contention).
    terms["fsdp_communication"] = np.maximum(traffic - busy, 0.0) + unhidden * np.minimum(traffic, busy)
    busy = busy + terms["fsdp_communication"]
    terms["activation_offload"] = np.maximum(copies - busy, 0.0)
    terms["launch"] = wait
    return launch - wait - busy - terms["activation_offload"]


def with_launches(
    model: ModelSpec, batch: PlanBatch, costs: dict[Block, BlockCost], lags: dict[Block, Lags]
) -> dict[Block, BlockCost]:
    """Add the time that the device waits for kernel launches to the costs (`modelling` C6).

    The host runs ahead: a block that takes longer on the device compensates for one that is launched late, within a
    layer or, where layers differ and one rank has all of them, within the model. A host that waits for the device in a
    block of experts runs ahead from there until the next such block. Where experts overlap with another micro-batch,
    its backward pass compensates for the forward pass, and the other way; some passes have none to overlap with. Stages
    with different layers are simplified: no block compensates for another. The same holds for backward passes of a rank
    that recomputes only part of its layers, where the recomputed ones would compensate for more blocks than there are.
    """
    layers = [*model.layers, *([model.mtp_layer] * model.num_mtp_layers)]
    count = {block: sum(layer.count(block) for layer in layers) for block in lags}
    on_stages = (batch.pp > 1) & (len(set(layers)) > 1)
    repeats_part = (batch.recompute_num_layers > 0) & (batch.recompute_num_layers < ALL_LAYERS)
    in_part = on_stages | (repeats_part & (len(set(layers)) > 1))

    def shown(lag_of: Callable[[Lags], Floats], apart: Bools = in_part) -> dict[Block, Floats]:
        late = {block: np.maximum(lag_of(lag), 0.0) for block, lag in lags.items()}
        alone = add_up(count[block] * value for block, value in late.items())
        together = np.maximum(add_up(count[block] * lag_of(lag) for block, lag in lags.items()), 0.0)
        share = np.divide(together, alone, out=np.zeros_like(alone), where=alone > 0)
        return {block: np.where(apart, 1.0, share) * value for block, value in late.items()}

    forward = shown(lambda lag: lag.forward_s, on_stages)
    backward = shown(lambda lag: lag.backward_s)
    repeated = shown(lambda lag: lag.repeated_s)
    if batch.ep_overlap.any():
        at_once = shown(lambda lag: lag.forward_s + lag.backward_s)
        alone = unpaired_share(batch)
        for block in lags:
            apart = forward[block] + backward[block]
            share = np.divide(at_once[block], apart, out=np.ones_like(apart), where=apart > 0)
            share = np.where(batch.ep_overlap, alone + (1.0 - alone) * share, 1.0)
            forward[block], backward[block] = share * forward[block], share * backward[block]
    found = {
        block: replace(
            cost,
            forward_s=_waiting(cost.forward_s, forward[block]),
            backward_s=_waiting(cost.backward_s, backward[block]),
            repeat_s=_waiting(cost.repeat_s, repeated[block] - backward[block]),
        )
        for block, cost in costs.items()
    }
    if any(lag.halves is None for lag in lags.values()):
        return found
    inputs = shown(lambda lag: _halves(lag)[0].inputs_late_s)
    weights = shown(lambda lag: _halves(lag)[0].weights_late_s)
    repeated_inputs = shown(lambda lag: _halves(lag)[1].inputs_late_s)
    return {
        block: replace(
            cost,
            weight_s=_waiting(cost.weight_s, weights[block]),
            split_s=_waiting(cost.split_s, inputs[block] + weights[block] - backward[block]),
            split_repeat_s=_waiting(
                cost.split_repeat_s, repeated_inputs[block] - inputs[block] - (repeated[block] - backward[block])
            ),
        )
        for block, cost in found.items()
    }


def _waiting(terms: dict[str, Floats], longer_s: Floats) -> dict[str, Floats]:
    """Return the terms of a pass with its wait for launches increased by `longer_s`."""
    return terms | {"launch": terms["launch"] + longer_s}


def _halves(lag: Lags) -> tuple[Halves, Halves]:
    assert lag.halves is not None
    return lag.halves
