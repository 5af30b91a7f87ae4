"""How long do whole layers and heads take where they were measured as such?

Sums of kernels miss what lies between them: launches, allocations, caches that are still warm (`modelling` C8, C9).  A
measured layer is priced through its blocks, whose kernels take as much longer or shorter together as it says; so its
recomputation, its collectives and the order of its passes are priced as for any other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.measured import Sizes, find_kernels
from autoplan.model import Block, ModelSpec
from autoplan.plan import PlanBatch
from autoplan.problem import Problem
from autoplan.timing import Lookup, Operation

Floats = NDArray[np.float64]

LAYER = (Block.ATTENTION, Block.MLP)


def layer_factors(
    problem: Problem, batch: PlanBatch, kernels_s: tuple[Floats, Floats]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """(forward, backward) time of a measured layer over that of its kernels, and where it was measured; else 1.

    `kernels_s` are the sums of both passes over the blocks of `LAYER`.  A layer counts only with both its passes.
    """
    model, ones = problem.model, np.ones(len(batch))
    if not (problem.timings.is_own and problem.training.attention == "flash" and _has_measured_layer(model)):
        return ones, ones, np.zeros(len(batch), dtype=np.bool_)
    heads = (model.num_heads, model.kv_heads, model.qk_head_dim)
    sizes = map(float, (problem.training.seq_len, model.hidden_size, model.ffn_size, *heads))
    shape: tuple[Sizes, ...] = (batch.micro_batch, *sizes, batch.tp)
    passes: tuple[Operation, ...] = ("layer", "layer_backward")
    found = [find_kernels(problem, batch, one, *shape) for one in passes]
    # Its norms are sequence-parallel, and it sees whole sequences.
    fits = ((batch.tp == 1) | batch.sp) & (batch.cp == 1)
    known = fits & ~np.isnan(found[0].seconds) & ~np.isnan(found[1].seconds)
    forward, backward = (
        _only(one, known).otherwise(reference) / reference for one, reference in zip(found, kernels_s, strict=True)
    )
    return forward, backward, known


def head_factor(problem: Problem, batch: PlanBatch, logits: tuple[Floats, Floats, Floats], kernels_s: Floats) -> Floats:
    """Time of a measured head, both passes, over that of its kernels; 1 where it was not.

    `logits` are the tokens, the inputs and the columns of its matrix on one rank.
    """
    if not problem.timings.is_own:
        return np.ones(len(batch))
    fits = (batch.tp == 1) | problem.framework.shards_logits
    return _only(find_kernels(problem, batch, "head", *logits), fits).otherwise(kernels_s) / kernels_s


def _only(found: Lookup, which: NDArray[np.bool_]) -> Lookup:
    return replace(found, seconds=np.where(which, found.seconds, np.nan))


def _has_measured_layer(model: ModelSpec) -> bool:
    """Whether layers of attention and MLP are those that `timing.SHAPES` calls so: gated, normed by RMS, with rope."""
    has_extras = model.mlp_bias or model.qkv_bias or model.attention_output_bias or model.attention_sinks
    return (
        LAYER in model.layers
        and model.gated_mlp
        and model.mla is None
        and model.norm == "rmsnorm"
        and model.norms_per_block == 1
        and model.qk_norm == "none"
        and model.position_embedding == "rope"
        and not has_extras
    )
