"""Parameters of a block and of a pipeline stage on one rank: all, trained ones, and bytes of frozen ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, add_up
from autoplan.cost.kernels.arithmetic import before_head_parameters, embedding_parameters, encoder_end_parameters
from autoplan.cost.kernels.block_shapes import block_shapes, norm_parameters
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.measured_units import DENSE_LAYER, measured_layer
from autoplan.cost.kernels.sizes import local_sizes, padded_vocab, scales_by_past
from autoplan.cost.network.process_groups import ProcessGroups, process_groups
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.cost.state_types import parameters_on_host
from autoplan.spec.blocks import ENCODER_BLOCKS, Block
from autoplan.spec.enums import Sharding
from autoplan.spec.finetuning import EMBEDDING, ENCODER, HEAD
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


class DenseAndExpert(NamedTuple):
    """Values for dense and for expert parameters: elements or bytes."""

    dense: Floats
    expert: Floats


class UnitParameters(NamedTuple):
    """Parameters of one unit on one rank, in elements, and bytes of the gather of its weights: shape (plans).

    Frozen weights are gathered in their storage type and have no gradients.
    """

    dense: Floats
    expert: Floats
    trained_dense: Floats
    trained_expert: Floats
    dense_bytes: Floats
    expert_bytes: Floats

    @classmethod
    def all_trained(cls, problem: Problem, dense: Floats, expert: Floats) -> UnitParameters:
        """Return a unit without frozen parameters."""
        element = problem.training.element_bytes
        return cls(dense, expert, dense, expert, element * dense, element * expert)

    @property
    def all_elements(self) -> Floats:
        """Elements of the whole unit."""
        return self.dense + self.expert

    @property
    def trained_elements(self) -> Floats:
        """Elements with gradients."""
        return self.trained_dense + self.trained_expert


def local_parameters(batch: PlanBatch, shape: BlockShape, *, trained: bool = False) -> DenseAndExpert:
    """Parameters of a block on one rank, in elements; with `trained`, only those with gradients."""
    dense = shape.num_norm_parameters + shape.num_other_parameters / batch.tp
    if shape.is_frozen:
        dense = shape.num_magnitudes / batch.tp + (0.0 if trained else dense)
    expert = np.zeros(len(batch))
    for linear in shape.linears:
        if linear.is_shared or (trained and linear.is_frozen):
            continue
        inputs, outputs = local_sizes(linear, batch)
        elements = (inputs + linear.has_bias) * outputs
        if linear.is_expert:
            expert = expert + elements * linear.copies / batch.ep
        else:
            dense = dense + elements
    return DenseAndExpert(dense, expert)


def frozen_bytes(problem: Problem, batch: PlanBatch, shape: BlockShape) -> DenseAndExpert:
    """Bytes of a block's frozen weights on one rank."""
    element = problem.training.element_bytes
    all_parameters, trained = local_parameters(batch, shape), local_parameters(batch, shape, trained=True)
    dense, expert = element * (all_parameters.dense - trained.dense), element * (all_parameters.expert - trained.expert)
    for linear in shape.linears:
        if linear.is_frozen and linear.weight_bytes is not None:
            inputs, outputs = local_sizes(linear, batch)
            saved = (element - linear.weight_bytes) * inputs * outputs
            if linear.is_expert:
                expert = expert - saved * linear.copies / batch.ep
            else:
                dense = dense - saved
    return DenseAndExpert(dense, expert)


def layer_parameters(problem: Problem, batch: PlanBatch) -> Floats:
    """Parameters on one rank of a layer of the kind that is measured as a whole."""
    kind = measured_layer(problem.model) or DENSE_LAYER
    shapes = block_shapes(problem.model, problem.training.finetuning)
    return add_up(add_up(local_parameters(batch, shapes[block])) for block in kind.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters on a rank of every stage, in elements: shape (plans, stages)."""

    dense: Floats
    expert: Floats
    ends: Floats  # embedding and head, which belong to no block; included in `dense`
    # With frozen parameters: the trained ones, and the bytes of the frozen ones by `dense` and `expert`.
    only_trained: StageParameters | None = None
    frozen_bytes: StageParameters | None = None

    @property
    def trained(self) -> StageParameters:
        """Parameters with gradients."""
        return self.only_trained or self

    def of(self, stages: Bools) -> StageParameters:
        """Return the parameters of the masked `stages`, shape (plans, stages), and zeros elsewhere."""
        return StageParameters(
            dense=np.where(stages, self.dense, 0.0),
            expert=np.where(stages, self.expert, 0.0),
            ends=np.where(stages, self.ends, 0.0),
            only_trained=self.only_trained and self.only_trained.of(stages),
            frozen_bytes=self.frozen_bytes and self.frozen_bytes.of(stages),
        )


def stage_parameters(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> StageParameters:
    """Parameters of one rank: blocks, embedding (first stage), head and final norm (last stage)."""
    model = problem.model
    of_block = {
        block: local_parameters(batch, shape)
        for block, shape in block_shapes(model, problem.training.finetuning).items()
    }
    dense, expert, ends = (blocks.zeros() for _ in range(3))
    for block, count in blocks.count.items():
        copies = np.minimum(count, 1.0) if model.shared_layers else count
        dense += copies * of_block[block].dense[:, None]
        expert += count * of_block[block].expert[:, None]
    table = padded_vocab(problem, batch) * model.table_width / batch.tp
    ends[:, 0] += table + embedding_parameters(model) - model.vocab_size * model.table_width
    ends[:, 0] += encoder_end_parameters(model.encoder)
    # A tied head is a second copy unless its rank also has the embedding.
    has_table = blocks.is_last[:, 0]
    head = np.where(has_table & model.tied_embeddings, 0.0, table) + before_head_parameters(model)
    if problem.training.has_scores:
        head = np.full(len(batch), 1.0 * model.hidden_size + norm_parameters(model))
    if model.num_mtp_layers:
        # Multi-token prediction has a copy of the embedding on the stage of the head (Megatron-LM gpt_model.py).
        layers = model.num_held_mtp_layers
        head = head + np.where(has_table, 0.0, table) + layers * 3 * norm_parameters(model)
        dense += blocks.at_last(layers * 2 * model.hidden_size**2 / batch.tp)
        for block in model.mtp_layer:
            dense += blocks.at_last(layers * of_block[block].dense)
            expert += blocks.at_last(layers * of_block[block].expert)
    ends += blocks.at_last(head)
    parameters = StageParameters(dense=dense + ends, expert=expert, ends=ends)
    return parameters if problem.training.finetuning is None else _with_frozen(problem, batch, blocks, parameters)


def _with_frozen(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: StageParameters
) -> StageParameters:
    """Add the parameters that fine-tuning trains and the bytes of the frozen ones."""
    model, finetuning = problem.model, problem.training.finetuning
    assert finetuning is not None
    tables = _tables(problem, batch, blocks)
    if not finetuning.has_adapters:
        ends = sum((tables[end] for end in finetuning.frozen), start=blocks.zeros())
        dense, element = ends + _frozen_encoder(problem, batch, blocks), problem.training.element_bytes
        trained = replace(parameters, dense=parameters.dense - dense, ends=parameters.ends - ends)
        return replace(
            parameters,
            only_trained=trained,
            frozen_bytes=StageParameters(dense=element * dense, expert=blocks.zeros(), ends=element * ends),
        )
    saved = sum((tables[end] for end in finetuning.saved_modules), start=blocks.zeros())
    shapes, element = block_shapes(model, finetuning), problem.training.element_bytes
    adapters, all_parameters, sizes = (
        _of_blocks(model, blocks, {block: of_block(shape) for block, shape in shapes.items()})
        for of_block in (
            partial(local_parameters, batch, trained=True),
            partial(local_parameters, batch),
            partial(frozen_bytes, problem, batch),
        )
    )
    return StageParameters(
        dense=parameters.dense + saved,
        expert=parameters.expert,
        ends=parameters.ends + saved,
        only_trained=StageParameters(dense=adapters.dense + saved, expert=adapters.expert, ends=saved),
        frozen_bytes=StageParameters(
            dense=sizes.dense + element * (parameters.dense - all_parameters.dense),
            expert=sizes.expert,
            ends=element * parameters.ends,
        ),
    )


def _frozen_encoder(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> Floats:
    """Elements of a frozen encoder's layers on every stage."""
    shapes = block_shapes(problem.model, problem.training.finetuning)
    frozen = (block for block in ENCODER_BLOCKS.values() if block in shapes and shapes[block].is_frozen)
    return sum(
        (blocks.count[block] * local_parameters(batch, shapes[block]).dense[:, None] for block in frozen),
        start=blocks.zeros(),
    )


def _tables(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> dict[str, Floats]:
    """Elements of embedding, untied head and an encoder's ends on every stage."""
    model = problem.model
    table = padded_vocab(problem, batch) * model.table_width / batch.tp
    embedding = blocks.zeros()
    embedding[:, 0] += table + embedding_parameters(model) - model.vocab_size * model.table_width
    is_tied = blocks.is_last[:, 0] & model.tied_embeddings
    encoder = blocks.zeros()
    encoder[:, 0] = encoder_end_parameters(model.encoder)
    return {EMBEDDING: embedding, HEAD: blocks.at_last(np.where(is_tied, 0.0, table)), ENCODER: encoder}


def _of_blocks(model: ModelSpec, blocks: StageBlocks, per_block: dict[Block, DenseAndExpert]) -> DenseAndExpert:
    """Sums of `per_block` over all blocks of every stage: shape (plans, stages)."""
    sums = DenseAndExpert(blocks.zeros(), blocks.zeros())
    for block, count in blocks.count.items():
        for total, value in zip(sums, per_block[block], strict=True):
            total += count * value[:, None]
    for block in model.mtp_layer if model.num_mtp_layers else ():
        for total, value in zip(sums, per_block[block], strict=True):
            total += blocks.at_last(model.num_held_mtp_layers * value)
    return sums


def updated_parameters(batch: PlanBatch, parameters: StageParameters) -> Floats:
    """Parameters that a rank of every stage updates: shape (plans, stages)."""
    parameters = parameters.trained
    groups, is_sharded = process_groups(batch), batch.sharding >= Sharding.ZERO1.code
    dense = parameters.dense / np.where(is_sharded, groups.shard.size, 1)[:, None]
    return dense + parameters.expert / np.where(is_sharded, groups.expert_shard.size, 1)[:, None]


def unit_parameters(problem: Problem, batch: PlanBatch, shape: BlockShape) -> UnitParameters:
    """Return a block as a sharded unit."""
    dense, expert = local_parameters(batch, shape)
    if not shape.is_frozen:
        unit = UnitParameters.all_trained(problem, dense, expert)
        return unit._replace(dense_bytes=np.where(_gathers_quantised(problem, batch), dense, unit.dense_bytes))
    element = problem.training.element_bytes
    trained, frozen = local_parameters(batch, shape, trained=True), frozen_bytes(problem, batch, shape)
    weight_bytes = element * trained.dense + frozen.dense, element * trained.expert + frozen.expert
    return UnitParameters(dense, expert, *trained, *weight_bytes)


def _gathers_quantised(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans gather a byte for each weight of the layers' matrices, whose scale is known before."""
    gathers = problem.framework.network.gathers_quantised & scales_by_past(batch)
    return np.asarray(gathers & ~parameters_on_host(batch))


class EndParameters(NamedTuple):
    """Sharded units before and after the layers."""

    embedding: UnitParameters
    head: UnitParameters


def end_parameters(problem: Problem, blocks: StageBlocks, parameters: StageParameters) -> EndParameters:
    """Return embedding and head as sharded units; a stage with both counts half of their parameters for each."""
    share = np.where(blocks.is_last[:, 0], 0.5, 1.0)
    ends = []
    for elements, trained in (
        (share * parameters.ends[:, 0], share * parameters.trained.ends[:, 0]),
        (
            share * (parameters.ends * blocks.is_last).sum(axis=1),
            share * (parameters.trained.ends * blocks.is_last).sum(axis=1),
        ),
    ):
        none = np.zeros_like(elements)
        unit = UnitParameters.all_trained(problem, elements, none)
        ends.append(unit._replace(trained_dense=trained))
    return EndParameters(*ends)


def spread_bytes(
    parameters: StageParameters, groups: ProcessGroups, per_parameter: float | Floats, sharded: Bools
) -> Floats:
    """Bytes on a rank at `per_parameter` each, divided over its shard group if `sharded`: shape (plans, stages)."""
    dense = per_parameter / np.where(sharded, groups.shard.size.astype(np.float64), 1.0)
    expert = per_parameter / np.where(sharded, groups.expert_shard.size.astype(np.float64), 1.0)
    return parameters.dense * dense[:, None] + parameters.expert * expert[:, None]
