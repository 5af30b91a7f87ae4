"""Lower bound on the memory of the plans of a kind, from the same terms as the estimate.

Layers are distinguished by their blocks; arrays of layers have a last axis with one element per sort of layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Floats, Ints, Rows, add_up, distinct_rows
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.memory.activations import block_bytes, boundary_bytes, layer_parts, stored_bytes
from autoplan.cost.memory.stage_memory import context_bytes, wgrad_buffer_bytes
from autoplan.cost.memory.training_states import states
from autoplan.cost.network.process_groups import process_groups
from autoplan.cost.parameters import DenseAndExpert, StageParameters, frozen_bytes, local_parameters
from autoplan.cost.pipeline.layout import StageBlocks
from autoplan.search.layer_spread import Spread
from autoplan.spec.axes import AXIS
from autoplan.spec.blocks import Block
from autoplan.spec.finetuning import EMBEDDING
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch, batch_arrays
from autoplan.spec.problem import Problem

# Kinds that agree in these axes have the same memory bounds.
MEMORY_AXES = tuple(name for name in batch_arrays() if name != "layout" and AXIS[name].of_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindMemory(Rows):
    """Memory common to all plans of a kind: one element per kind, some with a last axis for sorts of layers."""

    pp: Ints
    num_microbatches: Ints
    state_bytes: Floats  # of a layer: (kinds, sorts)
    kept_bytes: Floats  # of a layer and micro-batch: (kinds, sorts)
    stored_bytes: Floats  # of a fully recomputed layer
    boundary_bytes: Floats  # of a chunk in flight
    embedding_bytes: Floats  # states of the embedding
    fixed_bytes: Floats  # independent of the layout

    def least_bytes(self, spread: Spread) -> Floats:
        """Lower bound on the memory of each kind's first or second rank, for each spread: (kinds, spreads)."""
        stored = np.minimum(self.stored_bytes[:, None], self.kept_bytes)

        def rank_bytes(layers: Floats, not_repeated: Floats, repeated: Floats, live: Ints) -> Floats:
            passes = self.kept_bytes @ not_repeated.T + stored @ repeated.T + self.boundary_bytes[:, None]
            return self.state_bytes @ layers.T + live * passes

        # Micro-batches alive in all chunks of these ranks at once.
        pp, m = self.pp[:, None], self.num_microbatches[:, None]
        in_first = np.where(spread.is_flat, m, np.minimum(m, np.where(spread.is_folded, 1, pp)))
        in_second = np.where(spread.is_flat, m, np.minimum(m, np.maximum(np.where(spread.is_folded, pp, pp - 1), 1)))
        first = rank_bytes(spread.first, spread.kept_first, spread.repeated_first, in_first)
        second = rank_bytes(spread.second, spread.kept_second, spread.repeated_second, in_second)
        return self.fixed_bytes[:, None] + np.maximum(first + self.embedding_bytes[:, None], second)


def kind_memory(problem: Problem, batch: PlanBatch, states_of: PlanBatch | None = None) -> KindMemory:
    """Return the memory of the kinds of `batch`, with states sharded and offloaded as in `states_of`."""
    states_of = batch if states_of is None else states_of
    columns = (getattr(batch, name) for name in MEMORY_AXES)
    first, of_memory = distinct_rows(*columns, states_of.sharding, states_of.offload)
    batch, longest = batch.take(first), problem.at_longest
    reserved = problem.framework.memory.reserved_factor
    state_bytes, embedding_bytes = _layer_and_embedding_bytes(problem, states_of.take(first))
    memory = KindMemory(
        pp=batch.pp,
        num_microbatches=batch.num_microbatches,
        state_bytes=state_bytes,
        kept_bytes=_kept_bytes(longest, batch),
        stored_bytes=reserved * stored_bytes(longest, batch) * len(problem.model.layers[0]),
        boundary_bytes=reserved * boundary_bytes(longest, batch),
        embedding_bytes=embedding_bytes,
        fixed_bytes=_fixed_bytes(longest, batch),
    )
    return memory.take(of_memory)


def layer_parameters(problem: Problem, batch: PlanBatch, *, trained: bool = False) -> DenseAndExpert:
    """Parameters of a layer on a rank, with `trained` only those with gradients: shape (kinds, sorts)."""
    shapes = block_shapes(problem.model, problem.training.finetuning)
    of_block = {block: local_parameters(batch, shape, trained=trained) for block, shape in shapes.items()}
    return _layers_of(problem.model, of_block)


def per_layer(model: ModelSpec, per_block: dict[Block, Floats]) -> Floats:
    """Sum over the blocks of every sort of layer: shape (kinds, sorts)."""
    return np.stack([add_up(per_block[block] for block in layer) for layer in model.layer_kinds], axis=-1)


def _layer_and_embedding_bytes(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """Return (bytes of the states of a layer, of the embedding)."""
    dense, expert = layer_parameters(problem, batch)
    if problem.training.finetuning is not None:
        return _with_frozen_weights(problem, batch, dense, expert)
    per_dense, per_expert, per_end = (
        _state_bytes(problem, batch, *numbers) for numbers in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0))
    )
    embedding_bytes = per_end * problem.model.vocab_size * problem.model.hidden_size / batch.tp
    return per_dense[:, None] * dense + per_expert[:, None] * expert, embedding_bytes


def _with_frozen_weights(problem: Problem, batch: PlanBatch, dense: Floats, expert: Floats) -> tuple[Floats, Floats]:
    """Return (bytes of a layer's states, of the embedding's states) with frozen weights."""
    model, finetuning, element = problem.model, problem.training.finetuning, problem.training.element_bytes
    assert finetuning is not None
    none = np.zeros_like(dense)
    trained = layer_parameters(problem, batch, trained=True)
    frozen = _layers_of(
        model,
        {name: frozen_bytes(problem, batch, shape) for name, shape in block_shapes(model, finetuning).items()},
    )
    layers = StageParameters(
        dense=dense,
        expert=expert,
        ends=none,
        only_trained=StageParameters(dense=trained.dense, expert=trained.expert, ends=none),
        frozen_bytes=StageParameters(dense=frozen.dense, expert=frozen.expert, ends=none),
    )
    table = (model.vocab_size * model.hidden_size / batch.tp)[:, None]
    nothing, learns = np.zeros_like(table), finetuning.trains(EMBEDDING)
    fixed = element * table * (finetuning.has_adapters or not learns)
    embedding = StageParameters(
        dense=table,
        expert=nothing,
        ends=table,
        only_trained=StageParameters(dense=table * learns, expert=nothing, ends=table * learns),
        frozen_bytes=StageParameters(dense=fixed, expert=nothing, ends=fixed),
    )
    return _kept_state_bytes(problem, batch, layers), _kept_state_bytes(problem, batch, embedding)[:, 0]


def _layers_of(model: ModelSpec, of_block: dict[Block, DenseAndExpert]) -> DenseAndExpert:
    """Sum values of blocks per sort of layer: shape (kinds, sorts)."""
    return DenseAndExpert(
        dense=per_layer(model, {block: numbers.dense for block, numbers in of_block.items()}),
        expert=per_layer(model, {block: numbers.expert for block, numbers in of_block.items()}),
    )


def _state_bytes(problem: Problem, batch: PlanBatch, dense: float, expert: float, ends: float) -> Floats:
    """Bytes of weights, gradients and optimizer on a rank with this many dense and expert parameters.

    Gradients that live only in a part of the step are not counted, as they may not exist at the activation peak.
    """
    column = np.ones((len(batch), 1))
    parameters = StageParameters(dense=dense * column, expert=expert * column, ends=ends * column)
    return _kept_state_bytes(problem, batch, parameters)[:, 0]


def _kept_state_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters) -> Floats:
    """Bytes of weights, gradients and optimizer of parameters in columns: shape (plans, columns)."""
    weights, gradients, optimizer = states(problem, batch, parameters, process_groups(batch))
    memory = problem.framework.memory
    is_of_part = memory.fsdp2_states or memory.is_planned_ahead or memory.drops_grads
    state_bytes = weights + optimizer + (0.0 if is_of_part else gradients)
    return memory.reserved_factor * state_bytes


def _kept_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes that a layer stores per micro-batch under the plans' selective recomputation."""
    per_block = block_bytes(problem, batch, layer_parts(problem, batch))
    return problem.framework.memory.reserved_factor * per_layer(problem.model, per_block)


def _fixed_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes on every rank independent of its layers: context, communicator and weight-gradient buffers."""
    traits, shape = problem.framework.memory, (len(batch), 1)
    none = np.zeros(shape, dtype=np.int64)
    blocks = StageBlocks(count={}, repeated={}, repeats_chunk=none > 0, chunks_alike=none[:, 0] == 0, is_last=none > 0)
    buffers = wgrad_buffer_bytes(problem, batch, blocks)[:, 0]
    communicators = traits.communicator_bytes * process_groups(batch).num_communicators
    return context_bytes(problem) + traits.reserved_factor * buffers + communicators
