"""Times of whole layers, embedding, head and passes, measured in the framework itself.

Sums of kernel times miss what happens between kernels: launches, allocations, warm caches (`modelling` C8, C9),
dispatch, hooks and host waits (`closed-loop` 3).  A measured layer rescales the kernels and collectives of its blocks
by a common factor, so that the order of passes is priced as for any other layer.  Tables have the layers of the
framework itself (`Framework.layer_kernels`), and the other units of `operations.SHAPES` only if it runs exactly those
(`TimingTable.is_own`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autoplan.base.arrays import Bools, Floats, Rows
from autoplan.cost.kernels.measured import Sizes, find_kernels
from autoplan.cost.kernels.sequences import tokens_per_sample
from autoplan.spec.blocks import Block
from autoplan.spec.enums import AttentionKernel, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import (
    LAYER_HALVES,
    LAYERS,
    MOE_LAYER_HALVES,
    MOE_LAYERS,
    SHARED_LAYERS,
    SHARED_MOE_LAYERS,
    Operation,
)
from autoplan.spec.plan import DEFAULT_MODULE_BITS, SELECTIVE, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import Lookup

FORWARD_SHARE = 1 / 3  # of both passes of embedding or head; a pipeline is insensitive to the split


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """Kind of layer that can be measured as a whole: its blocks and the operations that measure it."""

    blocks: tuple[Block, Block]
    passes: tuple[Operation, ...]
    halves: tuple[Operation, ...]
    shared: tuple[Operation, ...]

    def sizes(self, model: ModelSpec) -> tuple[int, ...]:
        """Numbers of the shape between the sequence length and the tensor-parallel degree."""
        ffn_size = model.moe.expert_ffn_size if model.moe and self is MOE_LAYER else model.ffn_size
        return model.hidden_size, ffn_size, model.num_heads, model.kv_heads, model.qk_head_dim

    def expert_sizes(self, model: ModelSpec) -> tuple[int, ...]:
        """Numbers of the shape that follow the tensor-parallel degree."""
        return (model.moe.num_experts, model.moe.experts_per_token) if model.moe and self is MOE_LAYER else ()


DENSE_LAYER = MeasuredLayer(
    blocks=(Block.ATTENTION, Block.MLP), passes=LAYERS, halves=LAYER_HALVES, shared=SHARED_LAYERS
)
MOE_LAYER = MeasuredLayer(
    blocks=(Block.ATTENTION, Block.MOE), passes=MOE_LAYERS, halves=MOE_LAYER_HALVES, shared=SHARED_MOE_LAYERS
)


def measured_layer(model: ModelSpec) -> MeasuredLayer | None:
    """Return the kind of the model's layers that is measured as a whole, if any: one with gated MLP, RMSNorm and rope.

    Where dense layers alternate with layers of experts, which share their attention, the dense ones are.
    """
    moe = model.moe
    has_extras = model.mlp_bias or model.qkv_bias or model.attention_output_bias or model.attention_sinks
    is_usual = model.gated_mlp and model.norm == "rmsnorm" and model.position_embedding == "rope" and not has_extras
    if not is_usual or model.mla is not None or model.qk_norm != "none" or model.unusual_parts:
        return None
    if DENSE_LAYER.blocks in model.layers:
        return DENSE_LAYER
    has_routed_only = moe and not (moe.shared_expert_ffn_size or moe.router_bias or moe.latent_size)
    return MOE_LAYER if has_routed_only and MOE_LAYER.blocks in model.layers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Measured seconds of a layer and micro-batch, by plan; valid where `is_measured`, NaN for unmeasured parts."""

    blocks: tuple[Block, Block]
    is_measured: Bools
    forward_s: Floats
    backward_s: Floats
    again_s: Floats  # added by full recomputation of the layer
    core_again_s: Floats  # added by recomputing the attention core
    halves_s: tuple[Floats, Floats]  # input gradients and weight gradients, if a schedule splits them

    @property
    def split_s(self) -> Floats:
        """Seconds that splitting adds to the backward pass."""
        return np.maximum(np.nan_to_num(self.halves_s[0] + self.halves_s[1] - self.backward_s), 0.0)


def layer_times(problem: Problem, batch: PlanBatch) -> LayerTimes | None:
    """Return the measured times of a model's layers; a layer is used only if both passes were measured."""
    kind = measured_layer(problem.model)
    if kind is None or not _is_whole(problem):
        return None
    shape = _layer_shape(problem, batch, kind)
    forward, backward, selective, full, first, second = (
        _seconds(problem, batch, entry, *shape) for entry in (*kind.passes, *kind.halves)
    )
    return LayerTimes(
        blocks=kind.blocks,
        is_measured=_fits(batch) & (batch.ep == 1) & ~np.isnan(forward) & ~np.isnan(backward),
        forward_s=forward,
        backward_s=backward,
        again_s=np.maximum(full - backward, 0.0),
        core_again_s=np.maximum(selective - backward, 0.0),
        halves_s=(first, second),
    )


def repeats_core_only(batch: PlanBatch) -> Bools:
    """Return which plans recompute only the attention core."""
    return (batch.recompute == SELECTIVE) & (batch.recompute_modules == DEFAULT_MODULE_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStates(Rows):
    """Seconds that gathering or casting weights and reducing gradients add to the passes of a layer.

    Valid only where `is_measured`.  Parameters outside of layers take the same time per parameter.
    """

    is_measured: Bools
    every_s: Floats  # in each micro-batch
    once_s: Floats  # once in a step

    @classmethod
    def unknown(cls, size: int) -> SharedStates:
        """Return the times of plans without measurements: zeros with `is_measured` false."""
        zeros = np.zeros(size)
        return cls(is_measured=np.zeros(size, dtype=np.bool_), every_s=zeros, once_s=zeros)


def shared_states(problem: Problem, batch: PlanBatch) -> SharedStates:
    """Return the measured times of sharding layer states over data-parallel ranks.

    The weights are kept for the step or gathered for each pass; gradients are reduced in the last micro-batch or in
    each.  The time of one gather is the difference between two gathers and one.
    """
    times, layer = layer_times(problem, batch), measured_layer(problem.model)
    if times is None or layer is None or set(problem.model.layers) != {layer.blocks}:
        return SharedStates.unknown(len(batch))
    near = problem.cluster.levels[-1].num_devices
    ranks_in_domain = np.minimum(np.maximum(near // batch.tp, 1), batch.dp)
    shape = (*_layer_shape(problem, batch, layer), batch.dp, ranks_in_domain)
    passes = times.forward_s + times.backward_s
    beyond = (_seconds(problem, batch, entry, *shape) - passes for entry in layer.shared)
    none, weights_kept, weights_regathered = (np.maximum(entry, 0.0) for entry in beyond)
    gather = np.maximum(weights_regathered - weights_kept, 0.0)
    is_one = batch.dp == 1
    kind = np.where(is_one, 0, batch.sharding)
    # A pipeline keeps its weights for the step and reduces gradients once.
    kind = np.where((batch.pp > 1) & (kind > 0), Sharding.ZERO1.code, kind)
    zeros = np.zeros(len(batch))
    each_s = np.choose(kind, [zeros, zeros, np.maximum(weights_kept - gather, 0.0), weights_regathered])
    once_s = np.choose(kind, [none, weights_kept, np.minimum(gather, weights_kept), zeros])
    is_whole = is_one | (batch.dp_replicate == 1) | (batch.sharding == 0)
    is_measured = times.is_measured & is_whole & ~np.isnan(each_s + once_s)
    return SharedStates(
        is_measured=is_measured, every_s=np.where(is_measured, each_s, 0.0), once_s=np.where(is_measured, once_s, 0.0)
    )


def head_factor(problem: Problem, batch: PlanBatch, logits: tuple[Floats, Floats, Floats], kernels_s: Floats) -> Floats:
    """Return the measured time of both passes of a head relative to its kernels, 1 if it was not measured.

    `logits` are (tokens, inputs, columns) of the whole matrix.
    """
    if not problem.timings.is_own:
        return np.ones(len(batch))
    fits = _fits(batch) & ((batch.tp == 1) | problem.framework.memory.shards_logits)
    return _only(find_kernels(problem, batch, "head", *logits, batch.tp), fits).otherwise(kernels_s) / kernels_s


def embedding_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Both passes of the embedding if measured; else 0, as they are short with fused kernels."""
    if not problem.timings.is_own:
        return np.zeros(len(batch))
    tokens = np.float64(batch.micro_batch * tokens_per_sample(problem.training, batch.micro_batch))
    shape = (tokens, float(problem.model.hidden_size), float(problem.model.vocab_size), batch.tp)
    wide = batch.unquantised()
    return _only(find_kernels(problem, wide, "embedding", *shape), _fits(batch)).otherwise(np.zeros(len(batch)))


def measures_end(problem: Problem, end: Literal["embedding", "head"]) -> bool:
    """Return whether that unit of the trainer was measured, at any size."""
    return problem.timings.is_own and problem.timings.holds(end, "bf16", "fp16", "fp32")


def action_s(problem: Problem, batch: PlanBatch) -> Floats:
    """Host seconds per pipeline pass beyond computation and messages, 0 if not measured."""
    if not problem.timings.is_own or (batch.pp == 1).all():
        return np.zeros(len(batch))
    passes = np.maximum(batch.num_microbatches * batch.vp, batch.pp)  # the measured schedule, 1F1B, runs no fewer
    in_domain = np.minimum(np.maximum(problem.cluster.levels[-1].num_devices // (batch.tp * batch.dp), 1), batch.pp)
    lookup = _only(find_kernels(problem, batch, "pipeline_actions", passes, batch.pp, in_domain), batch.pp > 1)
    return lookup.otherwise(np.zeros(len(batch))) / (2 * passes)


def _seconds(problem: Problem, batch: PlanBatch, operation: Operation, *shape: Sizes) -> Floats:
    """Measured times, NaN where there are none."""
    return find_kernels(problem, batch, operation, *shape).otherwise(np.full(len(batch), np.nan))


def _layer_shape(problem: Problem, batch: PlanBatch, kind: MeasuredLayer) -> Sequence[Sizes]:
    sizes = map(float, (problem.training.seq_len, *kind.sizes(problem.model)))
    return (batch.micro_batch, *sizes, batch.tp, *map(float, kind.expert_sizes(problem.model)))


def _fits(batch: PlanBatch) -> Bools:
    """Return which plans run the units as measured: sequence-parallel between split matrices, on whole sequences."""
    is_usual = ~batch.fp8_attention & (batch.attention == AttentionKernel.FLASH.code)
    return ((batch.tp == 1) | batch.sp) & (batch.cp == 1) & is_usual


def _only(lookup: Lookup, is_wanted: Bools) -> Lookup:
    return replace(lookup, seconds=np.where(is_wanted, lookup.seconds, np.nan))


def _is_whole(problem: Problem) -> bool:
    training = problem.training
    is_usual = training.finetuning is None
    is_even = training.document_len is None and training.lengths is None
    is_even = is_even and training.preference is None
    return not problem.timings.is_empty and is_usual and is_even
