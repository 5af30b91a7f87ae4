"""Cost of one block of each kind per micro-batch: kernels, recomputation, exposed communication, launches.

Exposed parts follow `modelling` D5 and E5.  Every array has one element per plan; times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from autoplan.base.arrays import Bools, Floats, Rows, add_up
from autoplan.cost.block_cost import BlockCost, Halves, Lags, finish, with_launches
from autoplan.cost.collectives.context_parallel import context_parallel_s
from autoplan.cost.collectives.expert_parallel import expert_parallel_s, shown_expert_parallel_s
from autoplan.cost.collectives.sharded_states import copied_states_s, sharded_states_s, unhidden_share
from autoplan.cost.collectives.tensor_parallel import (
    TensorParallelTimes,
    adapters_s,
    block_collectives,
    encoder_gradient,
    has_tensor_parallel,
    hosts_wait_s,
    regathers_inputs,
    tensor_parallel_s,
)
from autoplan.cost.kernels.block_shapes import layer_shapes
from autoplan.cost.kernels.launches import (
    COUNT_TOKENS,
    NARROW,
    counts_tokens,
    extra_launches_s,
    holds_graphs,
    is_graphed,
    is_one_graph,
    repeated_launches_s,
)
from autoplan.cost.kernels.linears import BlockShape
from autoplan.cost.kernels.measured import host_copy_s
from autoplan.cost.kernels.measured_modules import exchange_s, overlapped_mlp, ring_attention
from autoplan.cost.kernels.measured_units import (
    SharedStates,
    layer_times,
    repeats_core_only,
    shared_states,
)
from autoplan.cost.kernels.memory_bound import memory_bound_s
from autoplan.cost.kernels.products import moved_per_accumulated_grad
from autoplan.cost.kernels.sharded_operations import repeated_operations_s, sharded_operations_s
from autoplan.cost.kernels.sizes import sends_tokens_once
from autoplan.cost.kernels.times import KernelTimes, kernel_times
from autoplan.cost.memory.recompute import activation_parts, offloaded
from autoplan.cost.network.links import Links
from autoplan.cost.parameters import UnitParameters, layer_parameters, unit_parameters
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.layout import repeats_beside
from autoplan.cost.recompute_times import selective_s
from autoplan.spec.axes import KERNEL_AXES
from autoplan.spec.blocks import ATTENTION_BLOCKS, ENCODER_BLOCKS, Block
from autoplan.spec.enums import CudaGraphs, RecomputeModule, Sharding
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import FULL, SELECTIVE, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import BLOCK_TERMS

# Share of the device's wait for the host in a pass of a block of experts that remains where attention is launched as a
# CUDA graph, so that the host reaches the block early [fitted: 25 runs of nvbridge that state their graphs, 10 of them
# with attention].
GRAPHED_ATTENTION_WAIT = 0.5

# Share of the nominal rate of the link to the host that long copies from pinned memory sustain in each direction: 55.4
# of 64 GB/s by PCIe gen5 (nvbandwidth 0.10 on 8 GPUs), 193 to 201 of 450 by NVLink-C2C (presets/devices/gb200.toml).
HOST_LINK_SHARE = {"pcie": 0.87, "xgmi": 0.87, "nvlink-c2c": 0.43}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts(Rows):
    """Kernels and exposed traffic of one block and micro-batch, before other micro-batches hide some of the traffic.

    All of this depends only on `KERNEL_AXES` and tp_overlap, so it is computed once for many plans.
    """

    kernels: KernelTimes
    tp: Pass
    tp_inputs: Floats  # in the forward pass, the collectives that gather the inputs
    cp: Pass
    ep: Floats  # in each pass, when no other micro-batch runs concurrently
    # For a block of a layer that was measured as a whole, including launches and hooks; NaN if it was not measured.
    is_whole: Bools
    again_s: Floats  # full recomputation
    core_again_s: Floats
    weight_s: Floats  # weight gradients, where a schedule splits the backward pass
    split_s: Floats  # extra time of splitting it

    @property
    def passes(self) -> Pass:
        """Kernels and tensor-parallel collectives."""
        return self.kernels.passes.plus(self.tp)


def block_costs(problem: Problem, batch: PlanBatch, links: Links | None = None) -> dict[Block, BlockCost]:
    """Return the cost of every kind of block in the model; `links` are the problem's links, if already compiled."""
    links, shapes = links or Links.of(problem), layer_shapes(problem.model, problem.training.finetuning)
    first, of_kernels = batch.distinct(*KERNEL_AXES, "tp_overlap")
    distinct = batch.take(first)
    tp = TensorParallelTimes.of(block_collectives(problem, distinct), links)
    parts = {block: _parts(problem, distinct, block, shape, links, tp) for block, shape in shapes.items()}
    parts |= _as_measured(problem, distinct, parts)
    shared = shared_states(problem, batch)
    costs: dict[Block, BlockCost] = {}
    lags: dict[Block, Lags] = {}
    # Experts are priced last: their traffic may hide under the attention of another micro-batch.
    for block, shape in sorted(shapes.items(), key=lambda item: item[0] is Block.MOE):
        hiding_s = _hiding_experts_s(problem.model, costs) if block is Block.MOE else np.zeros(len(batch))
        block_parts = parts[block].take(of_kernels)
        costs[block], lags[block] = _block_cost(problem, batch, block, shape, block_parts, links, hiding_s, shared)
    costs = with_launches(problem.model, batch, costs, lags) | _encoder_costs(problem, batch, links)
    if problem.training.runs_reference:  # forward only, with exposed traffic and launches
        costs = {
            block: replace(cost, forward_s=cost.forward_s | {"reference": cost.total_forward_s})
            for block, cost in costs.items()
        }
    return costs


def _hiding_experts_s(model: ModelSpec, costs: dict[Block, BlockCost]) -> Floats:
    """Time of the other blocks in a layer with experts, taken from the shortest layer, as a stage may have no other.

    Includes their wait for sharded-state traffic, the smallest of all layers.
    """
    layers = [layer for layer in (*model.layer_kinds, model.mtp_layer) if Block.MOE in layer]
    costs_of_layers = [[costs[block] for block in layer if block in costs] for layer in layers]
    work = reduce(np.minimum, (add_up(cost.hiding_s for cost in layer_costs) for layer_costs in costs_of_layers))
    return work + reduce(np.minimum, (add_up(cost.states_s for cost in layer_costs) for layer_costs in costs_of_layers))


def _encoder_costs(problem: Problem, batch: PlanBatch, links: Links) -> dict[Block, BlockCost]:
    """Cost of an encoder's blocks, without backward pass if frozen; embedding and projector are < 1 % of a step."""
    encoding = problem.of_encoder
    if encoding is None:
        return {}
    is_trained = float(problem.trains_encoder)
    again, none = is_trained * repeats_beside(batch), np.zeros(len(batch))
    return {
        ENCODER_BLOCKS[block]: replace(
            cost,
            backward_s={
                name: is_trained * term_s + again * cost.repeat_s[name] for name, term_s in cost.backward_s.items()
            },
            repeat_s=dict.fromkeys(cost.repeat_s, none),
            weight_s={name: is_trained * term_s for name, term_s in cost.weight_s.items()},
            split_s={
                name: is_trained * term_s + again * cost.split_repeat_s[name] for name, term_s in cost.split_s.items()
            },
            split_repeat_s=dict.fromkeys(cost.split_repeat_s, none),
        )
        for block, cost in block_costs(encoding, batch, links).items()
    }


def _as_measured(problem: Problem, batch: PlanBatch, parts: dict[Block, _Parts]) -> dict[Block, _Parts]:
    """Scale the blocks of a layer that was measured as a whole: all their passes by the same factor as the layer."""
    times = layer_times(problem, batch)
    if times is None:
        return {}
    passes = {block: parts[block].passes for block in times.blocks}
    total = Pass(
        add_up(entry.forward_s for entry in passes.values()), add_up(entry.backward_s for entry in passes.values())
    )
    weights = add_up(parts[block].kernels.gemm_weight_s for block in times.blocks)
    longer = (
        np.where(times.is_measured, times.forward_s / total.forward_s, 1.0),
        np.where(times.is_measured, times.backward_s / total.backward_s, 1.0),
    )
    parts_by_block = {}
    for block in times.blocks:
        part = parts[block]
        share = np.where(times.is_measured, passes[block].backward_s / total.backward_s, np.nan)
        of_weights = part.kernels.gemm_weight_s / weights
        kernels = part.kernels.times(*longer)
        apart = times.is_measured & ~np.isnan(times.halves_s[1])
        parts_by_block[block] = replace(
            part,
            kernels=kernels,
            tp=part.tp.times(*longer),
            tp_inputs=longer[0] * part.tp_inputs,
            is_whole=times.is_measured,
            again_s=share * times.again_s,
            core_again_s=np.where(block in ATTENTION_BLOCKS, times.core_again_s, 0.0 * share),
            weight_s=np.where(apart, of_weights * times.halves_s[1], kernels.gemm_weight_s),
            split_s=np.where(apart, of_weights * times.split_s, 0.0),
        )
    return parts_by_block


def _parts(
    problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape, links: Links, tp_alone: TensorParallelTimes
) -> _Parts:
    zeros, unknown = np.zeros(len(batch)), np.full(len(batch), np.nan)
    kernels = kernel_times(problem, batch, block, shape)
    tp, tp_inputs, cp = Pass.none(len(batch)), zeros, Pass.none(len(batch))
    if has_tensor_parallel(block, shape):
        tp = tensor_parallel_s(problem, batch, shape, tp_alone, kernels)
        if block is Block.MLP:
            work, tp = overlapped_mlp(problem, batch, kernels.passes, tp)
            kernels = kernels.lasting(work)
        inputs, alone = tp_alone.gather_s, tp_alone.forward_s
        tp_inputs = tp.forward_s * np.divide(inputs, alone, out=zeros.copy(), where=alone > 0)
    if shape.is_frozen:
        tp = tp.plus(adapters_s(problem, batch, shape, links))
    if problem.model.reads_encoder(block):
        tp = tp.plus(Pass(zeros, encoder_gradient(problem, batch).seconds(links)))
    if block in ATTENTION_BLOCKS:
        cp = context_parallel_s(problem, batch, links, kernels.attention)
        attention, cp = ring_attention(problem, batch, kernels.attention, cp)
        kernels = replace(kernels, attention=attention)
    ep = exchange_s(problem, batch, expert_parallel_s(problem, batch, links)) if block is Block.MOE else zeros
    return _Parts(
        kernels=kernels,
        tp=tp,
        tp_inputs=tp_inputs,
        cp=cp,
        ep=ep,
        is_whole=np.zeros(len(batch), dtype=np.bool_),
        again_s=unknown,
        core_again_s=unknown,
        weight_s=kernels.gemm_weight_s,
        split_s=zeros,
    )


def ahead_s(problem: Problem, batch: PlanBatch, head_s: Floats) -> Floats:
    """Lead of the host over the device after head and loss, in seconds; `head_s`: their passes and collectives.

    Head and loss are a few long kernels, with about as many launches as one block. The lead is zero in a pipeline,
    where the host waits for messages, and with experts, where it waits for the device in every layer.
    """
    framework = problem.framework
    launched = framework.host.host_s_per_block_forward + framework.host.host_s_per_block_backward
    runs_ahead = (batch.pp == 1) & (Block.MOE not in layer_shapes(problem.model, problem.training.finetuning))
    return np.where(runs_ahead, np.maximum(head_s - problem.calibration.host * launched, 0.0), 0.0)


def _experts_wait_s(problem: Problem, batch: PlanBatch) -> Pass:
    """Time that the device waits for the host to read the routing and launch the experts, in both passes.

    In the forward pass the host first launches the kernels that count the tokens of each expert.
    """
    framework, moe = problem.framework, problem.model.moe
    assert moe is not None
    experts, host = framework.experts, framework.host
    waits_less = holds_graphs(batch, CudaGraphs.ATTENTION)
    late = experts.narrow_sync_s + experts.s_per_local_expert * moe.num_experts / batch.ep
    wait = experts.moe_sync_s + np.isin(batch.precision, NARROW) * late
    wait = wait * np.where(waits_less, GRAPHED_ATTENTION_WAIT, 1.0)
    if framework.kernels.torch_grouped_products:  # which read the tokens of each expert on the device
        wait = np.where(batch.ep > 1, wait, 0.0)
    counting_s = host.host_s_per_launch * COUNT_TOKENS.forward * counts_tokens(batch)
    shows = np.where(is_one_graph(problem, batch), 0.0, problem.calibration.host)
    return Pass(wait + counting_s, wait).scaled(shows)


def _never_repeated_s(framework: Framework, block: Block, parts: _Parts) -> Floats:
    """Seconds of one block that full recomputation of a layer omits: the last matrix and the communication after it."""
    if not (framework.kernels.recompute_stops_early and block is Block.MLP):
        return np.zeros_like(parts.tp_inputs)
    return parts.kernels.matrix_forward_s["fc2"] + parts.tp.forward_s - parts.tp_inputs


def _never_repeated_experts_s(problem: Problem, batch: PlanBatch, block: Block, parts: _Parts, ep: Floats) -> Floats:
    """Seconds of a block of experts that full recomputation omits: the last product and the combine of the tokens.

    `ep` is the exposed time of dispatch and combine.  Both are necessary again for a matrix after the combine (latent
    experts), and for the gradient of the scores where tokens are weighted after the combine; a dispatcher that sums
    them on the way has to have them weighted before (torchtitan models/common/token_dispatcher.py, combine;
    Automodel 507bfb7 components/moe/layers.py, permuted_probs).
    """
    moe = problem.model.moe if block is Block.MOE else None
    if moe is None or moe.latent_size or not problem.framework.kernels.recompute_stops_early:
        return np.zeros_like(ep)
    spared = parts.kernels.matrix_forward_s["expert_fc2"] + 0.5 * ep
    return np.where(sends_tokens_once(problem, batch), spared, 0.0)


def _pass_terms(parts: _Parts, ep: Floats) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Terms of the (forward, backward) pass: kernels and exposed traffic between them, without recomputation."""
    kernels = parts.kernels
    passes = {
        "gemm": kernels.gemm,
        "attention": kernels.attention,
        "memory_bound": kernels.memory,
        "recompute": Pass.none(len(ep)),
        "tp_communication": parts.tp,
        "cp_communication": parts.cp,
        "ep_communication": Pass(ep, ep),
        "reference": Pass.none(len(ep)),
    }
    forward = {name: term.forward_s for name, term in passes.items()}
    return forward, {name: term.backward_s for name, term in passes.items()}


def _block_cost(
    problem: Problem,
    batch: PlanBatch,
    block: Block,
    shape: BlockShape,
    parts: _Parts,
    links: Links,
    hiding_s: Floats,
    shared: SharedStates,
) -> tuple[BlockCost, Lags]:
    unhidden, zeros = unhidden_share(problem), np.zeros(len(batch))
    unit = unit_parameters(problem, batch, shape)
    ep, wait = zeros, Pass.none(len(batch))
    if block is Block.MOE:
        work_s = parts.kernels.passes.total_s + parts.tp.total_s + hiding_s
        of_shared = [seconds for name, seconds in parts.kernels.matrix_forward_s.items() if name.startswith("shared_")]
        ep = shown_expert_parallel_s(problem, batch, parts.ep, work_s, zeros + add_up(of_shared))
        wait = _experts_wait_s(problem, batch)
    forward, backward, repeated = _work_terms(problem, batch, block, parts, unit, ep)
    states = sharded_states_s(problem, batch, links, unit)
    host = _launch_s(problem, batch, block, parts.is_whole)

    def halves(terms: dict[str, Floats], launch_s: Floats, wait_s: Floats) -> Halves | None:
        if not batch.splits_backward.any():
            return None
        input_s = add_up(terms.values()) + parts.split_s - parts.weight_s
        return Halves.of(unhidden, input_s, parts.weight_s, states, launch_s, wait_s)

    to_host_s = _offload_s(problem, batch, block, shape)
    lag = finish(unhidden, forward, states.forward_s, host.forward_s, wait.forward_s, to_host_s)
    wait_s = wait.backward_s + wait.forward_s * batch.repeats(RecomputeModule.MOE)
    apart = apart_again = halves(backward, host.backward_s, wait_s)
    late = again_late = finish(unhidden, backward, states.backward_s, host.backward_s, wait_s, to_host_s)
    repeat = dict.fromkeys(BLOCK_TERMS, zeros)
    if (batch.recompute == FULL).any():
        again_s = host.backward_s + _repeated_host_s(problem, batch, block, parts.is_whole)
        apart_again = halves(repeated, again_s, wait.total_s)
        again_late = finish(unhidden, repeated, states.backward_s, again_s, wait.total_s, to_host_s)
        repeat = _repeat_terms(parts, repeated, backward)
    cost = BlockCost(
        forward_s=forward,
        backward_s=backward,
        repeat_s=repeat,
        weight_s={"gemm": parts.weight_s},
        split_s={"gemm": parts.split_s},
        split_repeat_s={"gemm": zeros},
    )
    split_waits = (apart, apart_again) if apart and apart_again else None
    if split_waits:
        cost = cost.with_halves(*split_waits, is_measured=~np.isnan(parts.again_s))
    if shared.is_measured.any():
        share = unit.all_elements / layer_parameters(problem, batch)
        cost = cost.with_states(shared.is_measured, share * shared.every_s)
    return cost, Lags(forward_s=lag, backward_s=late, repeated_s=again_late, halves=split_waits)


def _work_terms(
    problem: Problem, batch: PlanBatch, block: Block, parts: _Parts, unit: UnitParameters, ep: Floats
) -> tuple[dict[str, Floats], dict[str, Floats], dict[str, Floats]]:
    """Return the terms of a block's (forward pass, backward pass, backward pass with full recomputation).

    `ep` is the exposed time of dispatch and combine.
    """
    framework, copies = problem.framework, copied_states_s(problem, batch, unit)
    forward, backward = _pass_terms(parts, ep)
    # The time of a layer that was measured as a whole includes gradient accumulation.
    accumulated = moved_per_accumulated_grad(problem, batch) * unit.trained_elements * ~parts.is_whole
    backward["memory_bound"] = backward["memory_bound"] + memory_bound_s(problem, accumulated) + copies.backward_s
    forward_s = add_up(forward.values())
    forward["memory_bound"] = forward["memory_bound"] + copies.forward_s  # not repeated by recomputation
    spared = _never_repeated_s(framework, block, parts)
    backward["recompute"] = selective_s(problem, batch, block, parts.kernels, forward_s, parts.tp_inputs, spared)
    if parts.is_whole.any():
        is_known = repeats_core_only(batch) & ~np.isnan(parts.core_again_s)
        backward["recompute"] = np.where(is_known, parts.core_again_s, backward["recompute"])
    spared = spared + _never_repeated_experts_s(problem, batch, block, parts, ep)
    return forward, backward, backward | {"recompute": forward_s - spared}


def _offload_s(problem: Problem, batch: PlanBatch, block: Block, shape: BlockShape) -> Floats:
    """Time to copy a block's offloaded activations to the host, or back."""
    if not (batch.offload_modules.any() or batch.offload_layers.any()):
        return np.zeros(len(batch))
    copied = offloaded(problem, batch, block, shape, activation_parts(problem, batch, block, shape)).copied_bytes
    cluster = problem.cluster
    link = HOST_LINK_SHARE[cluster.host.device_link] * cluster.device.host_link_bytes_per_s
    return host_copy_s(problem, "copy_to_host", copied, copied / link)


def _repeat_terms(parts: _Parts, repeated: dict[str, Floats], backward: dict[str, Floats]) -> dict[str, Floats]:
    """Return what full recomputation of the block adds to the terms of its backward pass, measured where available."""
    repeat = {name: repeated[name] - backward[name] for name in BLOCK_TERMS}
    if parts.is_whole.any():
        is_known = ~np.isnan(parts.again_s)
        repeat = {name: np.where(is_known, 0.0, value) for name, value in repeat.items()}
        repeat["recompute"] = np.where(is_known, parts.again_s, repeat["recompute"])
    return repeat


def _host_s(problem: Problem, batch: PlanBatch, block: Block, is_whole: Bools) -> Pass:
    """Host time to launch the kernels of one block; 0 if the block was measured with its layer."""
    host = problem.framework.host
    hooks = host.host_s_per_hooked_block * (batch.sharding == Sharding.ZERO3.code)
    dense = Pass(host.host_s_per_block_forward + hooks, host.host_s_per_block_backward + hooks)
    launches = dense.plus(extra_launches_s(problem, batch, block)).plus(sharded_operations_s(problem, batch, block))
    return launches.scaled(_host_factor(problem, batch, block, is_whole))


def _repeated_host_s(problem: Problem, batch: PlanBatch, block: Block, is_whole: Bools) -> Floats:
    """Host time to launch a forward pass of one block again, in full recomputation."""
    more_s = repeated_operations_s(problem, batch, block) - sharded_operations_s(problem, batch, block).forward_s
    factor = _host_factor(problem, batch, block, is_whole)
    return _host_s(problem, batch, block, is_whole).forward_s + factor * more_s


def _host_factor(problem: Problem, batch: PlanBatch, block: Block, is_whole: Bools) -> Floats:
    return np.where(is_whole | is_graphed(batch, block), 0.0, problem.calibration.host)


def _launch_s(problem: Problem, batch: PlanBatch, block: Block, is_whole: Bools) -> Pass:
    """Host time to launch one block and to synchronise its ranks."""
    wait = hosts_wait_s(problem, batch) * ~is_whole
    meets = Pass(
        np.where(batch.sp, 2, 1) * wait,
        np.where(batch.sp, 2 + regathers_inputs(problem), 1) * wait,
    )
    again = problem.calibration.host * repeated_launches_s(problem, batch, block) * ~is_whole
    if problem.framework.kernels.selective_recompute_share:  # which dispatches every operation again, to keep or repeat
        selective = _host_factor(problem, batch, block, is_whole) * (batch.recompute == SELECTIVE)
        again = again + selective * repeated_operations_s(problem, batch, block)
    return _host_s(problem, batch, block, is_whole).plus(meets).plus(Pass(0.0 * again, again))
