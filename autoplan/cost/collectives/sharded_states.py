"""Sharded states: gathers of weights and reductions of gradients in every micro-batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.cost.collectives.collective import Collective, LinkTimes
from autoplan.cost.kernels.measured import host_copy_s
from autoplan.cost.kernels.memory_bound import KERNEL_START_S, memory_bound_s
from autoplan.cost.network.links import usual_contention_share
from autoplan.cost.network.process_groups import process_groups
from autoplan.cost.parameters import UnitParameters
from autoplan.cost.passes import Pass, SplitPass
from autoplan.cost.state_types import (
    WIDE_BYTES,
    grad_bytes,
    parameters_on_host,
    reduced_grad_bytes,
    weight_bytes,
)
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Host memory bandwidth of one device's processes during an optimizer update: 0.93 s more per step for the 0.6 billion
# parameters of Qwen3-0.6B on one H100 (NVIDIA-NeMo/RL pull request 3628, Megatron-Core, all on the host), where torch
# moves 80 bytes per parameter.  At this rate a single loop of 30 bytes takes 0.56 ns per parameter; 0.58 ns were
# measured with Qwen3-30B on 8 H200 (PrimeIntellect-ai/prime-rl pull request 3234).
HOST_BYTES_PER_S = 54e9

# ZeRO++ (DeepSpeed 0.19.6): a gathered weight in 8 bits, with a scale for each 8,000 (CUDAQuantizer of
# runtime/zero/partition_parameters.py), and a reduced gradient in 4; what the device reads and writes to make 16 bits
# of such a weight, or to send such a gradient (runtime/comm/coalesced_collectives.py all_to_all_quant_reduce).
QUANTIZED_WEIGHT_BYTES, QUANTIZED_GRAD_BYTES = 1.0 + 4.0 / 8000.0, 0.5
MOVED_PER_QUANTIZED = 3.0


class ShardedStates(NamedTuple):
    """Collectives of the parameters of one unit (a block, the embedding or the head) in a micro-batch."""

    gather: Collective
    gather_experts: Collective
    reduce: Collective
    reduce_experts: Collective


class _When(NamedTuple):
    """Masks of the plans that gather and that reduce during their passes."""

    gathers: Bools  # zero3
    reduces: Bools
    once: Bools  # plans that gather once per step


def _when(problem: Problem, batch: PlanBatch) -> _When:
    framework = problem.framework
    is_zero3 = batch.sharding == Sharding.ZERO3.code
    is_zero2 = (batch.sharding == Sharding.ZERO2.code) & framework.network.zero2_reduces_every_microbatch
    once = is_zero3 & (batch.pp > 1) & (not framework.network.zero3_regathers_in_pipeline)
    return _When(gathers=is_zero3, reduces=is_zero3 | is_zero2, once=once)


def sharded_states(problem: Problem, batch: PlanBatch, unit: UnitParameters) -> ShardedStates:
    """Describe the collectives of a unit.

    zero3 gathers the weights in both passes and reduces the gradients in every micro-batch, or once per step in a
    pipeline whose framework keeps the weights between micro-batches.  zero2 only reduces, if the framework does so in
    every micro-batch.  Recomputation needs no further gather.  With a second copy, the first pass of a step alone
    gathers from all ranks (`compressed_states` has the others).
    """
    groups, when = process_groups(batch), _when(problem, batch)
    wire = reduced_grad_bytes(problem, batch)
    pieces, has_copy = problem.framework.network.messages_per_block, batch.secondary_shard > 1
    times: Floats = np.where(when.once | has_copy, 1.0 / batch.num_microbatches, 1.0)
    gathers = (pieces * when.gathers * times, np.where(when.gathers & ~when.once & ~has_copy, pieces, 0.0))
    reduced: Floats = np.where(when.once, 1.0 / batch.num_microbatches, 1.0)
    reduces = pieces * (when.reduces & ~batch.quantized_reductions) * reduced
    narrowed = _narrowed(problem, batch)
    gather, gather_experts = (
        Collective(
            name,
            "all_gather",
            group,
            narrowed * num_bytes / pieces,
            forward=gathers[0],
            backward=gathers[1],
            is_repeated=False,
        )
        for name, group, num_bytes in (
            ("shard", groups.shard, unit.dense_bytes),
            ("expert shard", groups.expert_shard, unit.expert_bytes),
        )
    )
    reduce, reduce_experts = (
        Collective(name, "reduce_scatter", group, wire * elements / pieces, backward=reduces)
        for name, group, elements in (
            ("shard", groups.shard, unit.trained_dense),
            ("expert shard", groups.expert_shard, unit.trained_expert),
        )
    )
    return ShardedStates(gather, gather_experts, reduce, reduce_experts)


def _narrowed(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes of a gathered weight over those of its own type."""
    return np.where(batch.quantized_gathers, QUANTIZED_WEIGHT_BYTES / problem.training.element_bytes, 1.0)


def compressed_states(problem: Problem, batch: PlanBatch, unit: UnitParameters) -> tuple[Collective, ...]:
    """Describe what ZeRO++ adds to the collectives of a unit; empty where no plan has it.

    Gathers from the ranks that share a second copy of the weights, which is made in the first pass of a step and used
    in all others; gradients of 4 bits, exchanged inside nodes and, added up, between them.
    """
    has_copy, exchanged = batch.secondary_shard > 1, np.where(batch.quantized_reductions, 1.0, 0.0)
    if not (has_copy.any() or exchanged.any()):
        return ()
    shard, num_bytes = process_groups(batch).shard, _narrowed(problem, batch) * unit.dense_bytes
    inside = np.minimum(shard.size, problem.cluster.devices_per_node)
    sent = QUANTIZED_GRAD_BYTES * unit.trained_dense
    return (
        Collective(
            "secondary shard",
            "all_gather",
            shard._replace(size=np.maximum(batch.secondary_shard, 1)),
            num_bytes,
            forward=np.where(has_copy, 1.0 - 1.0 / batch.num_microbatches, 0.0),
            backward=np.where(has_copy, 1.0, 0.0),
            is_repeated=False,
        ),
        Collective("shard", "all_to_all", shard._replace(size=inside), sent, backward=exchanged),
        Collective(
            "shard",
            "all_to_all",
            shard._replace(stride=shard.stride * inside, size=shard.size // inside),
            sent / inside,
            backward=exchanged,
        ),
    )


def sharded_states_s(problem: Problem, batch: PlanBatch, links: LinkTimes, parameters: UnitParameters) -> SplitPass:
    """Time of the collectives of a unit's parameters in a micro-batch, exposed or hidden.

    Input gradients wait for the gathered weights; the reduction follows the weight gradients.
    """
    if not _when(problem, batch).reduces.any():
        return SplitPass(*np.zeros((3, len(batch))))
    unit = sharded_states(problem, batch, parameters)
    gather = unit.gather.seconds(links) + unit.gather_experts.seconds(links)
    reduce = unit.reduce.seconds(links) + unit.reduce_experts.seconds(links)
    network, pieces = problem.framework.network, np.where(unit.gather.group.size > 1, unit.gather.group.size, 0)
    copies = (network.sharded_copies == "pieces") * KERNEL_START_S * problem.calibration.memory_bound * pieces
    gather, reduce = network.sharded_wire_factor * gather + copies, network.sharded_wire_factor * reduce + copies
    passes = SplitPass(gather * unit.gather.forward, gather * unit.gather.backward, reduce * unit.reduce.backward)
    for added in compressed_states(problem, batch, parameters):
        seconds = network.sharded_wire_factor * added.seconds(links)
        forward, backward = seconds * added.forward, seconds * added.backward
        none = np.zeros_like(seconds)
        gathers = added.operation == "all_gather"
        passes = passes.plus(SplitPass(forward, backward, none) if gathers else SplitPass(none, none, backward))
    if not parameters_on_host(batch).any():
        return passes
    fetch, store = _host_copies_s(problem, batch, parameters, unit)
    return passes.plus(SplitPass(fetch, fetch, store))


def _host_copies_s(
    problem: Problem, batch: PlanBatch, parameters: UnitParameters, unit: ShardedStates
) -> tuple[Floats, Floats]:
    """Return (time to fetch a unit's weights from the host, time to copy its gradients to it) for the rank's own shard.

    Weights are fetched in both passes in their storage type, before they are cast and gathered; gradients are copied
    after each micro-batch, and the host accumulates them (torch/distributed/fsdp/_fully_shard,
    FSDPParam.all_gather_inputs and foreach_reduce).
    """
    shard, expert_shard = unit.gather.group.size, unit.gather_experts.group.size
    beyond_cast = weight_bytes(problem, batch) - problem.training.element_bytes
    held_bytes = (parameters.dense_bytes + beyond_cast * parameters.trained_dense) / shard
    held_bytes = held_bytes + (parameters.expert_bytes + beyond_cast * parameters.trained_expert) / expert_shard
    trained = parameters.trained_dense / shard + parameters.trained_expert / expert_shard
    added_share = 1.0 - 1.0 / batch.num_microbatches
    link, on_host = problem.cluster.device.host_link_bytes_per_s, parameters_on_host(batch)
    fetched, sent = on_host * held_bytes, on_host * trained * grad_bytes(problem, batch)
    added_s = on_host * trained * added_share * 3 * WIDE_BYTES / HOST_BYTES_PER_S
    return (
        host_copy_s(problem, "copy_from_host", fetched, fetched / link),
        host_copy_s(problem, "copy_to_host", sent, sent / link) + added_s,
    )


def unhidden_share(problem: Problem) -> float:
    """Share of the shorter of computing and gathering sharded states that does not hide behind the longer."""
    return max(problem.framework.overlap.fsdp_unhidden_share, usual_contention_share(problem))


def copied_states_s(problem: Problem, batch: PlanBatch, parameters: UnitParameters) -> Pass:
    """Time of passes to copy gathered weights and gradients on the device.

    Weights are read and written; gradients are read, and written in the type that is reduced (fully_shard,
    _fsdp_collectives.py).
    """
    copies, when = problem.framework.network.sharded_copies != "none", _when(problem, batch)
    element = problem.training.element_bytes
    copied, reduced = (
        np.where(when.once, elements / batch.num_microbatches, elements)
        for elements in (parameters.all_elements, parameters.trained_elements)
    )
    per_weight, per_grad = (
        copies * copied_bytes + np.where(is_quantized, MOVED_PER_QUANTIZED, 0.0)
        for copied_bytes, is_quantized in (
            (np.full(len(batch), 2.0 * element), batch.quantized_gathers),
            (element + reduced_grad_bytes(problem, batch), batch.quantized_reductions),
        )
    )
    weights = per_weight * copied * when.gathers
    grads = per_grad * reduced * when.reduces
    return Pass(memory_bound_s(problem, weights), memory_bound_s(problem, np.where(when.once, 0.0, weights) + grads))
