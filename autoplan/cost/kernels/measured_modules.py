"""Measured modules, which join kernels: matrices with their quantisation, norm and MLP, experts, router; or overlaps.

What a module joins is rescaled by its time relative to the sum of the times that it stands for, so that the order of
passes, recomputation and terms are priced as for any other plan.  Larger modules come last, and win.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, add_up
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.measured import Sizes, find_kernels, is_measured, measured_pass
from autoplan.cost.kernels.memory_bound import Traffic, cast_traffic, measured_beyond_s, routing_start_s
from autoplan.cost.kernels.sizes import (
    expert_imbalance,
    gathers_tokens,
    linear_tokens,
    local_sizes,
    matrix_pieces,
    norm_tokens,
    pads_experts,
    rank_kv_heads,
    rank_tokens,
    sends_tokens_once,
)
from autoplan.cost.passes import Pass, SplitPass
from autoplan.spec.blocks import Block
from autoplan.spec.enums import AttentionKernel, Dispatcher
from autoplan.spec.operations import GIVEN_KERNELS, Operation
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """Operation that stands for matrices and memory-bound operations of a block, by their names, where it `fits`."""

    operation: Operation
    sizes: tuple[Sizes, ...]
    matrices: tuple[str, ...]
    streams: tuple[str, ...]
    fits: Bools


def with_modules(
    problem: Problem,
    batch: PlanBatch,
    block: Block,
    shape: BlockShape,
    matrices: dict[str, SplitPass],
    traffic: dict[str, Traffic],
) -> tuple[dict[str, SplitPass], Pass]:
    """Return a block's matrices in measured modules, and how much longer its memory-bound operations take in these."""
    matrices, added, streams = dict(matrices), Pass.none(len(batch)), dict[str, Pass]()
    for module in _modules(problem, batch, block, shape):
        if not is_measured(problem, module.operation):
            continue
        streams = streams or _streams(problem, batch, block, shape, traffic)
        names = [name for name in module.streams if name in streams]
        joined = [*(matrices[name].joined for name in module.matrices), *(streams[name] for name in names)]
        reference = Pass(add_up(part.forward_s for part in joined), add_up(part.backward_s for part in joined))
        measured = _measured(problem, batch, module.operation, module.sizes, module.fits, reference)
        longer = measured.forward_s / reference.forward_s, measured.backward_s / reference.backward_s
        matrices |= {name: matrices[name].times(*longer) for name in module.matrices}
        for name in names:
            added = added.plus(streams[name].times(longer[0] - 1, longer[1] - 1))
            streams[name] = streams[name].times(*longer)
    return matrices, added


def _measured(
    problem: Problem, batch: PlanBatch, operation: Operation, sizes: tuple[Sizes, ...], fits: Bools, reference: Pass
) -> Pass:
    """Return both passes of an operation: measured where it fits, else their reference."""
    rows = np.flatnonzero(fits)
    if not len(rows):
        return reference
    own = [np.broadcast_to(size, len(batch))[rows] for size in sizes]
    lookups = [find_kernels(problem, batch.take(rows), served, *own) for served in GIVEN_KERNELS[operation]]
    both = Pass(reference.forward_s.copy(), reference.backward_s.copy())
    measured = measured_pass(lookups, reference.take(rows))
    both.forward_s[rows], both.backward_s[rows] = measured.forward_s, measured.backward_s
    return both


def _streams(
    problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape, traffic: dict[str, Traffic]
) -> dict[str, Pass]:
    """Return the times of a block's memory-bound operations by name, with the quantisation before each matrix."""
    streams = {name: moved.seconds(problem) for name, moved in traffic.items()}
    for name, beyond in measured_beyond_s(problem, batch, block, traffic).items():
        streams[name] = streams[name].plus(beyond)
    for linear in shape.linears:
        streams[_cast(linear.name)] = cast_traffic(problem, batch, replace(shape, linears=(linear,))).seconds(problem)
    return streams | {"routing": Pass.none(len(batch)).longer(*2 * [routing_start_s(problem)])}


def _cast(matrix: str) -> str:
    return f"cast of {matrix}"


def _modules(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Iterator[_Module]:
    """Yield the modules that a block may run."""
    model, moe, everywhere = problem.model, problem.model.moe, np.full(len(batch), fill_value=True)
    sizes: tuple[Sizes, ...]
    names: tuple[str, ...]
    hidden, tokens = float(model.hidden_size), rank_tokens(problem, batch)
    whole = [
        linear
        for linear in shape.linears
        if not linear.is_expert and not linear.adapts and len(matrix_pieces(problem, linear)) == 1
    ]
    is_normed = model.norm == "rmsnorm" and model.norms_per_block == 1
    for linear in whole:
        inputs, outputs = local_sizes(linear, batch)
        sizes, cast = (linear_tokens(problem, batch, linear), outputs, inputs), _cast(linear.name)
        yield _Module(operation="linear", sizes=sizes, matrices=(linear.name,), streams=(cast,), fits=everywhere)
        if linear.name in ("qkv", "fc1") and is_normed:
            fits = np.isclose(norm_tokens(problem, batch), tokens)  # else tokens are gathered in between
            names = ("norm", cast)
            yield _Module(operation="norm_linear", sizes=sizes, matrices=(linear.name,), streams=names, fits=fits)
    if block is Block.MLP and is_normed and model.gated_mlp and {"fc1", "fc2"} == {linear.name for linear in whole}:
        names = ("norm", "activation", "stored_cast", _cast("fc1"), _cast("fc2"))
        sizes = (tokens, hidden, float(model.ffn_size))
        yield _Module(operation="mlp", sizes=sizes, matrices=("fc1", "fc2"), streams=names, fits=batch.tp == 1)
    if block is Block.MOE and moe is not None:
        width, routed = float(moe.latent_size or model.hidden_size), norm_tokens(problem, batch)
        experts = tuple(linear.name for linear in shape.linears if linear.is_expert)
        if model.gated_mlp:
            # All ranks of an expert group contribute tokens; the busiest rank determines the time.
            sent = routed * batch.ep * batch.etp * expert_imbalance(problem, batch)
            counts = float(moe.experts_per_token), float(moe.num_experts)
            sizes = (sent, width, float(moe.expert_ffn_size), *counts, batch.etp, batch.ep)
            names = ("expert_activation", *map(_cast, experts))
            yield _Module(operation="experts", sizes=sizes, matrices=experts, streams=names, fits=everywhere)
        fits = ~(gathers_tokens(batch) | sends_tokens_once(problem, batch) | pads_experts(problem, batch))
        sizes = (routed, hidden, float(moe.num_experts), float(moe.experts_per_token))
        names = ("routing", "permute", _cast("router"))
        yield _Module(operation="routing", sizes=sizes, matrices=("router",), streams=names, fits=fits)


def overlapped_mlp(problem: Problem, batch: PlanBatch, work: Pass, shown: Pass) -> tuple[Pass, Pass]:
    """Return the kernels of an MLP, and the time of its tensor-parallel collectives that these do not hide."""
    model = problem.model
    is_usual = model.gated_mlp and model.norm == "rmsnorm" and model.norms_per_block == 1 and not model.mlp_bias
    fits = is_usual & (batch.tp > 1) & batch.sp & batch.tp_overlap
    sizes = (rank_tokens(problem, batch), float(model.hidden_size), float(model.ffn_size))
    return _together(problem, batch, "overlapped_mlp", (*sizes, *_group(problem, 1, batch.tp)), fits, work, shown)


def ring_attention(problem: Problem, batch: PlanBatch, work: Pass, shown: Pass) -> tuple[Pass, Pass]:
    """Return attention over a split sequence, and the time of its ring that it does not hide."""
    model, training = problem.model, problem.training
    is_even = training.document_len is None and training.lengths is None and training.preference is None
    is_usual = is_even and model.qk_head_dim == model.v_head_dim and not model.window
    is_flash = (batch.attention == AttentionKernel.FLASH.code) & ~batch.fp8_attention
    fits = is_usual & is_flash & (batch.cp > 1) & (batch.cp_inner == 1)
    heads = (model.num_heads / batch.tp, rank_kv_heads(model, batch), float(model.qk_head_dim))
    sizes = (batch.micro_batch, float(training.seq_len), *heads, *_group(problem, batch.tp, batch.cp))
    return _together(problem, batch.unquantised(), "ring_attention", sizes, fits, work, shown)


def exchange_s(problem: Problem, batch: PlanBatch, reference_s: Floats) -> Floats:
    """Return the time of dispatch and combine by DeepEP's kernels in one pass: measured, or else its reference."""
    moe = problem.model.moe
    if moe is None or not is_measured(problem, "exchange"):
        return reference_s
    fits = (batch.dispatcher == Dispatcher.DEEPEP.code) & (batch.ep > 1) & (batch.etp == 1)
    routing = (
        float(moe.latent_size or problem.model.hidden_size),
        float(moe.num_experts),
        float(moe.experts_per_token),
    )
    sizes = (norm_tokens(problem, batch), *routing, *_group(problem, 1, batch.ep))
    rows, found = np.flatnonzero(fits), reference_s.copy()
    if len(rows):
        own = [np.broadcast_to(size, len(batch))[rows] for size in sizes]
        lookup = find_kernels(problem, batch.take(rows).unquantised(), "exchange", *own)
        found[rows] = lookup.otherwise(reference_s[rows])
    return found


def _together(
    problem: Problem,
    batch: PlanBatch,
    operation: Operation,
    sizes: tuple[Sizes, ...],
    fits: Bools,
    work: Pass,
    shown: Pass,
) -> tuple[Pass, Pass]:
    """Split the time in which work and what overlaps with it were measured together into (work, the rest)."""
    if not is_measured(problem, operation):
        return work, shown
    both = _measured(problem, batch, operation, sizes, fits, work.plus(shown))
    part = Pass(np.minimum(work.forward_s, both.forward_s), np.minimum(work.backward_s, both.backward_s))
    return part.otherwise(~fits, work), both.less(part).otherwise(~fits, shown)


def _group(problem: Problem, stride: Ints | int, size: Ints) -> tuple[Ints, Ints]:
    """Return (members of a group, those in each scale-up domain), as in shapes of operations."""
    return size, np.clip(problem.cluster.levels[-1].num_devices // stride, 1, size)
