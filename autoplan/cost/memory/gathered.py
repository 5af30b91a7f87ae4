"""Memory of weights and gradients while they are gathered from sharded states."""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Floats, add_up
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.sizes import head_columns
from autoplan.cost.network.process_groups import ProcessGroups
from autoplan.cost.parameters import StageParameters, local_parameters, unit_parameters
from autoplan.cost.state_types import full_grad_bytes, parameters_on_host
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

GATHERED_UNITS = 2  # alive at once under zero3: one is computed with and the next one gathered


def gathered_bytes(
    problem: Problem,
    batch: PlanBatch,
    parameters: StageParameters,
    groups: ProcessGroups,
    needed_bytes: Floats,
    logits: Floats,
    transients: Floats,
) -> Floats:
    """Gathered weights and unsharded gradients at zero3's peak, or at the end of a zero1 step: (plans, stages).

    zero3 holds embedding and head throughout both passes and some layers at a time, or the whole stage in a pipeline
    whose framework does not gather again for every micro-batch.  A shard group of one rank needs no copy.  Copies for
    zero1's gather count as far as they exceed `needed_bytes` of the passes, which are free by then; of these `logits`
    belong to the head and `transients` to a layer.
    """
    framework, layers = problem.framework, problem.model.layers
    fetched = parameters_on_host(batch)
    dense_spread, expert_spread = (groups.shard.size > 1) | fetched, (groups.expert_shard.size > 1) | fetched

    def spread(dense: Floats, expert: Floats) -> Floats:
        return dense * dense_spread + expert * expert_spread

    if parameters.frozen_bytes is not None:
        return _gathered_with_frozen(problem, batch, parameters, groups)
    shapes = block_shapes(problem.model, problem.training.finetuning)
    unit = np.zeros(len(batch))
    for layer in set(layers):
        unit = np.maximum(unit, add_up(spread(*local_parameters(batch, shapes[block])) for block in layer))
    element, reduced = problem.training.element_bytes, full_grad_bytes(problem, batch)
    in_turn = unit * (GATHERED_UNITS * element + reduced)
    root = (parameters.ends.T * dense_spread * (element + reduced)).T
    if framework.memory.is_jax:  # ends with the logits, or layers with their transients
        head = head_columns(problem, batch) * problem.model.table_width / batch.tp
        ends = np.minimum(parameters.ends, head[:, None]) * dense_spread[:, None] * (element + reduced)[:, None]
        in_turns = np.maximum(logits + ends, transients + in_turn[:, None])
        root = in_turns - np.maximum(logits, transients) - in_turn[:, None]
    stage = (spread(parameters.dense.T, parameters.expert.T) * (element + reduced)).T
    stays_gathered = (batch.pp > 1) & (not framework.network.zero3_regathers_in_pipeline)
    zero3 = batch.sharding == Sharding.ZERO3.code
    whole_copies = framework.memory.whole_gather_copies
    copies = whole_copies + whole_copies / np.maximum(groups.shard.size, 1) / 2
    at_end = element * spread(parameters.dense.T * copies, parameters.expert.T * copies).T - needed_bytes
    zero1 = (batch.sharding == Sharding.ZERO1.code) & (framework.memory.whole_gather_copies > 0)
    gathered = np.where(zero1[:, None], np.maximum(at_end, 0.0), 0.0)
    return np.where(zero3[:, None], np.where(stays_gathered[:, None], stage, in_turn[:, None] + root), gathered)


def _gathered_with_frozen(
    problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups
) -> Floats:
    """Bytes of weights and gradients gathered at once with frozen weights: shape (plans, stages).

    Frozen weights are gathered in their storage type and have no gradients.

    zero1 gathers only the adapters at the end of a step, which fit into the memory of freed activations.
    """
    framework, zero3 = problem.framework, batch.sharding == Sharding.ZERO3.code
    element, wire = problem.training.element_bytes, full_grad_bytes(problem, batch)
    fetched = parameters_on_host(batch)
    dense_spread, expert_spread = (groups.shard.size > 1) | fetched, (groups.expert_shard.size > 1) | fetched

    def spread(dense: Floats, expert: Floats) -> Floats:
        return (dense.T * dense_spread + expert.T * expert_spread).T

    shapes = block_shapes(problem.model, problem.training.finetuning)
    unit = np.zeros(len(batch))
    for layer in set(problem.model.layers):
        parts = [unit_parameters(problem, batch, shapes[block]) for block in layer]
        weights = add_up(spread(part.dense_bytes, part.expert_bytes) for part in parts)
        gradients = add_up(spread(part.trained_dense, part.trained_expert) for part in parts)
        unit = np.maximum(unit, GATHERED_UNITS * weights + wire * gradients)
    trained, frozen = parameters.trained, parameters.frozen_bytes
    assert frozen is not None
    none, wire = np.zeros_like(parameters.ends), wire[:, None]
    root = spread(element * parameters.ends + wire * trained.ends, none)
    stage = spread(frozen.dense + (element + wire) * trained.dense, frozen.expert + (element + wire) * trained.expert)
    stays_gathered = (batch.pp > 1) & (not framework.network.zero3_regathers_in_pipeline)
    return np.where(zero3[:, None], np.where(stays_gathered[:, None], stage, unit[:, None] + root), 0.0)
