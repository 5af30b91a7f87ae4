"""Parameters that a rank holds: of a block, and of a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, add_up
from autoplan.cost.kernels.arithmetic import BlockShape, block_shapes, embedding_parameters, norm_parameters
from autoplan.cost.kernels.measured_units import LAYER
from autoplan.cost.kernels.sizes import local_sizes, padded_vocab
from autoplan.cost.network.process_groups import ProcessGroups, process_groups
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


def local_parameters(batch: PlanBatch, shape: BlockShape) -> tuple[Floats, Floats]:
    """(dense, expert) parameters of a block that one rank holds, in elements."""
    dense = shape.num_norm_parameters + shape.num_other_parameters / batch.tp
    expert = np.zeros(len(batch))
    for linear in shape.linears:
        inputs, outputs = local_sizes(linear, batch)
        elements = (inputs + linear.has_bias) * outputs
        if linear.is_expert:
            expert = expert + elements * linear.copies / batch.ep
        else:
            dense = dense + elements
    return dense, expert


def layer_parameters(problem: Problem, batch: PlanBatch) -> Floats:
    """Parameters of a layer of attention and MLP that one rank holds."""
    shapes = block_shapes(problem.model)
    return add_up(add_up(local_parameters(batch, shapes[block])) for block in LAYER)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters that a rank of every stage holds, in elements: shape (plans, stages)."""

    dense: Floats
    expert: Floats
    ends: Floats  # of the dense ones: embedding and head, which belong to no block


def stage_parameters(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> StageParameters:
    """Blocks, embedding (first stage), head and final norm (last stage) of one rank."""
    model = problem.model
    of_block = {block: local_parameters(batch, shape) for block, shape in block_shapes(model).items()}
    dense, expert, ends = (blocks.zeros() for _ in range(3))
    for block, count in blocks.count.items():
        dense += count * of_block[block][0][:, None]
        expert += count * of_block[block][1][:, None]
    table = padded_vocab(problem, batch) * model.hidden_size / batch.tp
    ends[:, 0] += table + embedding_parameters(model) - model.vocab_size * model.hidden_size
    # A tied head is a second copy unless the rank that holds it has the embedding as well.
    has_table = blocks.is_last[:, 0]
    head = np.where(has_table & model.tied_embeddings, 0.0, table) + norm_parameters(model)
    if model.num_mtp_layers:
        # Predictions embed their tokens again, beside the head (Megatron-LM gpt_model.py).
        layers = model.num_held_mtp_layers
        head = head + np.where(has_table, 0.0, table) + layers * 3 * norm_parameters(model)
        dense += blocks.at_last(layers * 2 * model.hidden_size**2 / batch.tp)
        for block in model.mtp_layer:
            dense += blocks.at_last(layers * of_block[block][0])
            expert += blocks.at_last(layers * of_block[block][1])
    ends += blocks.at_last(head)
    return StageParameters(dense=dense + ends, expert=expert, ends=ends)


def own_parameters(batch: PlanBatch, parameters: StageParameters) -> Floats:
    """Parameters that a rank of every stage updates: shape (plans, stages)."""
    groups, is_sharded = process_groups(batch), batch.sharding >= Sharding.ZERO1.code
    own = parameters.dense / np.where(is_sharded, groups.shard.size, 1)[:, None]
    return own + parameters.expert / np.where(is_sharded, groups.expert_shard.size, 1)[:, None]


class EndParameters(NamedTuple):
    """Parameters of the units in front of the layers and behind them, in elements: shape (plans)."""

    embedding: Floats
    head: Floats


def end_parameters(blocks: StageBlocks, parameters: StageParameters) -> EndParameters:
    """Embedding and head as units that are sharded; a stage that holds both has halves of what it holds."""
    share = np.where(blocks.is_last[:, 0], 0.5, 1.0)
    return EndParameters(
        embedding=share * parameters.ends[:, 0], head=share * (parameters.ends * blocks.is_last).sum(axis=1)
    )


def spread_bytes(parameters: StageParameters, groups: ProcessGroups, per_parameter: float, sharded: Bools) -> Floats:
    """Bytes of a rank at `per_parameter` each, divided over its shard group where `sharded`: shape (plans, stages)."""
    dense = per_parameter / np.where(sharded, groups.shard.size.astype(np.float64), 1.0)
    expert = per_parameter / np.where(sharded, groups.expert_shard.size.astype(np.float64), 1.0)
    return parameters.dense * dense[:, None] + parameters.expert * expert[:, None]
