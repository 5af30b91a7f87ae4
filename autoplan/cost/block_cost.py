"""Seconds of one block and micro-batch by term, and what its passes wait for: traffic of sharded states and the host.

A wait is the excess of what is waited for over the work that hides it, so that no pass is longer for faster kernels,
links or hosts.  Arrays have one element per plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Rows, add_up
from autoplan.cost.kernels.memory_bound import KERNELS_BACKWARD
from autoplan.cost.passes import SplitPass
from autoplan.spec.framework import Framework
from autoplan.spec.model import Block, ModelSpec
from autoplan.spec.plan import ALL_LAYERS, PlanBatch

# Of the kernels of a backward pass, those that a schedule may put off: the products of a block's two matrices that make
# the gradients of weights, of as many that make those of inputs, and all others.
WEIGHT_LAUNCHES = 2 / (KERNELS_BACKWARD + 4)
_WAITS = ("fsdp_communication", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost(Rows):
    """Seconds of one block and micro-batch by term.

    `repeat_s` is what running the whole block forward again adds to the terms of its backward pass; less of its
    traffic and launches shows then, so that some are negative.
    """

    forward_s: dict[str, Floats]
    backward_s: dict[str, Floats]
    repeat_s: dict[str, Floats]
    # Where a schedule takes the backward pass apart: the half that it may put off, which makes the gradients of
    # weights, what both halves add to the pass as a whole, and what they add to `repeat_s`.
    weight_s: dict[str, Floats]
    split_s: dict[str, Floats]
    split_repeat_s: dict[str, Floats]

    @property
    def total_forward_s(self) -> Floats:
        """Forward pass with exposed communication."""
        return add_up(self.forward_s.values())

    @property
    def total_backward_s(self) -> Floats:
        """Backward pass with exposed communication and what is recomputed by name."""
        return add_up(self.backward_s.values())

    @property
    def work_s(self) -> Floats:
        """Seconds that one micro-batch keeps the device's compute units busy, in both passes."""
        passes = (self.forward_s, self.backward_s)
        return add_up(entry[name] for entry in passes for name in ("gemm", "attention", "memory_bound", "recompute"))

    @property
    def beside_s(self) -> Floats:
        """Seconds of both passes that experts' traffic of another micro-batch may hide under: work, and other waits.

        What work leaves exposed of other traffic counts, as the work that hides the rest of it cannot hide twice.
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
        """A term of both passes of `count` such blocks, of which `repeated` are recomputed as a whole."""
        return count * (self.forward_s[name] + self.backward_s[name]) + repeated * self.repeat_s[name]

    def with_halves(self, own: Halves, again: Halves, *, is_measured: Bools) -> BlockCost:
        """Return the cost with the waits of the halves, `again` where the block is recomputed: none if measured so."""
        weight, split, split_repeat = self.weight_s.copy(), self.split_s.copy(), self.split_repeat_s.copy()
        for name in _WAITS:
            weight[name] = own.weights_s[name]
            split[name] = own.inputs_s[name] + own.weights_s[name] - self.backward_s[name]
            longer = again.inputs_s[name] - own.inputs_s[name] - self.repeat_s[name]
            split_repeat[name] = np.where(is_measured, 0.0, longer)
        return replace(self, weight_s=weight, split_s=split, split_repeat_s=split_repeat)

    def with_states(self, is_measured: Bools, every_s: Floats) -> BlockCost:
        """Return the cost with the traffic of sharded states that was measured beside a trainer's own layers."""

        def measured(terms: dict[str, Floats], seconds: Floats | float) -> dict[str, Floats]:
            return {
                name: np.where(is_measured, seconds, own) if name == "fsdp_communication" else own
                for name, own in terms.items()
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
    """Work and waits, by term, of the halves of a backward pass: gradients of inputs, and of weights.

    How late the host is with each, as of `Lags`.
    """

    inputs_s: dict[str, Floats]
    weights_s: dict[str, Floats]
    inputs_late_s: Floats
    weights_late_s: Floats

    @classmethod
    def of(
        cls,
        framework: Framework,
        input_s: Floats,
        weight_s: Floats,
        states: SplitPass,
        launch_s: Floats,
        wait_s: Floats,
    ) -> Halves:
        """The waits of halves whose work takes so long, of a pass whose launches do: each hides its own traffic."""
        inputs, weights = {"gemm": input_s}, {"gemm": weight_s}
        put_off_s = WEIGHT_LAUNCHES * (launch_s - wait_s)
        return cls(
            inputs_late_s=finish(framework, inputs, states.input_gradient_s, launch_s - put_off_s, wait_s),
            weights_late_s=finish(framework, weights, states.weight_gradient_s, put_off_s, 0.0 * wait_s),
            inputs_s=inputs,
            weights_s=weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags:
    """Seconds that the host takes longer to launch one block than the device to run it, below 0 where it is shorter."""

    forward_s: Floats
    backward_s: Floats
    repeated_s: Floats  # backward where the whole block is recomputed
    halves: tuple[Halves, Halves] | None  # where a schedule takes the backward pass apart, then recomputed


def finish(framework: Framework, terms: dict[str, Floats], traffic: Floats, launch: Floats, wait: Floats) -> Floats:
    """Return how much longer the launches of one pass take than the device; add its exposed parameter traffic.

    The term `launch` of the pass becomes what waits for the host anyway.
    """
    busy = add_up(terms.values())
    # The longer of computing and moving shows, and a part of the shorter one (first unit, contention).
    terms["fsdp_communication"] = np.maximum(traffic - busy, 0.0) + framework.overlap.fsdp_unhidden_share * np.minimum(
        traffic, busy
    )
    terms["launch"] = wait
    return launch - wait - busy - terms["fsdp_communication"]


def with_launches(
    model: ModelSpec, batch: PlanBatch, costs: dict[Block, BlockCost], lags: dict[Block, Lags]
) -> dict[Block, BlockCost]:
    """The costs with what the device waits for launches (`modelling` C6).

    The host runs ahead: a block that takes the device longer makes up for one that is launched late, within a layer or,
    where layers differ and a rank has all of them, among those of the model.  A host that waits for the device in a
    block of experts runs ahead from there to the next one.  Stages of unlike layers are simplified: no block makes up
    for another one.  Nor does it in the backward passes of a rank that recomputes a part of its layers, of which some
    would make up for more than there are.
    """
    layers = [*model.layers, *([model.mtp_layer] * model.num_mtp_layers)]
    count = {block: sum(layer.count(block) for layer in layers) for block in lags}
    on_stages = (batch.pp > 1) & (len(set(layers)) > 1)
    repeats_some = (batch.recompute_num_layers > 0) & (batch.recompute_num_layers < ALL_LAYERS)
    in_part = on_stages | (repeats_some & (len(set(layers)) > 1))

    def shown(lag_of: Callable[[Lags], Floats], apart: Bools = in_part) -> dict[Block, Floats]:
        late = {block: np.maximum(lag_of(lag), 0.0) for block, lag in lags.items()}
        alone = add_up(count[block] * value for block, value in late.items())
        together = np.maximum(add_up(count[block] * lag_of(lag) for block, lag in lags.items()), 0.0)
        share = np.divide(together, alone, out=np.zeros_like(alone), where=alone > 0)
        return {block: np.where(apart, 1.0, share) * value for block, value in late.items()}

    forward = shown(lambda lag: lag.forward_s, on_stages)
    backward = shown(lambda lag: lag.backward_s)
    repeated = shown(lambda lag: lag.repeated_s)
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
    """Return terms of a pass that waits so much longer for its launches."""
    return terms | {"launch": terms["launch"] + longer_s}


def _halves(lag: Lags) -> tuple[Halves, Halves]:
    assert lag.halves is not None
    return lag.halves
