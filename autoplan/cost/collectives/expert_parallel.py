"""Expert parallelism: the collectives of an MoE block, and their exposed parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.collectives.collective import Collective, LinkTimes
from autoplan.cost.kernels.sizes import (
    expert_imbalance,
    gathers_tokens,
    norm_tokens,
    rank_expert_tokens,
    routed_tokens,
    routing_ranks,
    sends_tokens_once,
)
from autoplan.cost.network.process_groups import process_groups
from autoplan.spec.enums import Dispatcher
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Compute units occupied by the kernels of a dispatcher: 20 by DeepEP (arXiv:2412.19437, section 3.2.2), 32 by HybridEP
# (Megatron-Core moe_hybridep_num_sms); on AMD 80 by DeepEP in a node, 32 beyond it (Primus fd1eeab,
# turbo_deepep_num_cu of examples/megatron/configs/MI355X; docs_deprecated/backends/megatron/patch-notes.md).
COMPUTE_UNITS = np.array([{Dispatcher.DEEPEP: 20.0, Dispatcher.HYBRIDEP: 32.0}.get(word, 0.0) for word in Dispatcher])
AMD_DEEPEP_UNITS, AMD_FAR_DEEPEP_UNITS = 80.0, 32.0

# Bytes per second that each of these units sends to other ranks.  DeepEP, combining 16-bit tokens of width 7,168,
# reaches 275 to 303 GB/s with 20 units on H100 and H200, 306 to 358 on B200 and B300, and 133 to 158 with 8 units,
# whatever the links (aiconfigurator-core 0.12.0, wideep_deepep_normal_perf of sglang 0.5.12).  HybridEP's rate is not
# known.  On AMD the units are no limit: between 8 MI355X kernels reach 345 and 420 GB/s (ROCm/mori README.md), as much
# as the links give.
MOVED_PER_UNIT_BYTES_PER_S = 15e9

# Bytes per token and expert beside the tokens, in the mean of both passes: forward a flag of the routing map and a
# 16-bit score are gathered, backward the scores' gradient is reduced (Megatron-LM d98e8a6,
# core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher).
GATHERED_ROUTING_BYTES, REDUCED_ROUTING_BYTES = 3.0 / 2, 2.0 / 2


class ExpertParallel(NamedTuple):
    """Collectives of one block of experts."""

    dispatch: Collective
    combine: Collective
    gather_all: Collective  # of all tokens of the expert-parallel group, instead of `dispatch`
    reduce_all: Collective  # instead of `combine`
    gather: Collective  # of tokens within an expert-tensor-parallel group, before the experts
    reduce: Collective  # after the experts


def expert_parallel(problem: Problem, batch: PlanBatch) -> ExpertParallel:
    """Describe the collectives of one block of experts: two all-to-all of the routed tokens in each pass.

    The buffers contain every token once per expert that it visits; `copies` lets a dispatcher send it less often.  They
    are those of the rank that receives most, for which the others wait.  With an all-gather dispatcher, each pass
    gathers all tokens and reduces all outputs instead.
    Expert tensor parallelism gathers the tokens of its group before the experts and reduces after them, or, where each
    rank routes those of the group, before the router and after the weighted sum.
    """
    framework, moe, groups = problem.framework, problem.model.moe, process_groups(batch)
    assert moe is not None
    width = moe.latent_size or problem.model.hidden_size
    routed = routed_tokens(problem, batch) * expert_imbalance(problem, batch) * width
    gathers = gathers_tokens(batch)
    gathered, reduced = (
        norm_tokens(problem, batch) * batch.ep * (2.0 * width + routing_bytes * moe.num_experts)
        for routing_bytes in (GATHERED_ROUTING_BYTES, REDUCED_ROUTING_BYTES)
    )
    alike = routing_ranks(problem, batch)
    of_group = np.where(alike > 1, norm_tokens(problem, batch) * alike, rank_expert_tokens(problem, batch))
    received = 2.0 * of_group * width
    etp_gathered, etp_reduced = (np.where(gathers, batch.etp * of_ep, received) for of_ep in (gathered, reduced))
    all_at_once = np.where(gathers, 1.0, 0.0)
    copies = np.where(sends_tokens_once(problem, batch), moe.experts_per_token, 1)

    def exchange(bytes_per_element: float) -> Collective:
        runs = 1.0 - all_at_once
        buffer_bytes = bytes_per_element * routed
        return Collective("ep", "all_to_all", groups.ep, buffer_bytes, forward=runs, backward=runs, copies=copies)

    return ExpertParallel(
        dispatch=exchange(framework.experts.bytes_per_dispatched),
        combine=exchange(2.0),
        gather_all=Collective("ep", "all_gather", groups.ep, gathered, forward=all_at_once, backward=all_at_once),
        reduce_all=Collective("ep", "reduce_scatter", groups.ep, reduced, forward=all_at_once, backward=all_at_once),
        gather=Collective("etp", "all_gather", groups.etp, etp_gathered, forward=1.0, backward=1.0),
        reduce=Collective("etp", "reduce_scatter", groups.etp, etp_reduced, forward=1.0, backward=1.0),
    )


def expert_parallel_s(problem: Problem, batch: PlanBatch, links: LinkTimes) -> Floats:
    """Time of the collectives of one block of experts in one pass, without overlap with another micro-batch."""
    described = expert_parallel(problem, batch)
    dispatch, combine, gather_all, reduce_all, gather, reduce = (sent.seconds(links) for sent in described)
    dispatch = np.maximum(dispatch, _units_s(problem, batch, described.dispatch))
    combine = np.maximum(combine, _units_s(problem, batch, described.combine))
    host = problem.calibration.host * problem.framework.host.host_s_per_collective
    calls = np.where(gathers_tokens(batch), 4, 2)  # map, scores and tokens are gathered one by one
    return (dispatch + combine) + (gather_all + reduce_all) + (gather + reduce) + calls * host * (batch.ep > 1)


def _occupied_units(problem: Problem, batch: PlanBatch) -> Floats:
    """Compute units that the kernels of each plan's dispatcher occupy."""
    units = COMPUTE_UNITS[batch.dispatcher]
    if problem.device.vendor != "amd":
        return units
    is_near = batch.ep <= problem.cluster.devices_per_node
    deepep = np.where(is_near, AMD_DEEPEP_UNITS, AMD_FAR_DEEPEP_UNITS)
    return np.where(batch.dispatcher == Dispatcher.DEEPEP.code, deepep, units)


def _units_s(problem: Problem, batch: PlanBatch, exchange: Collective) -> Floats:
    """Time that the compute units of DeepEP take to send tokens to other ranks, each token once per rank."""
    size = exchange.group.size
    sent_once = size * (1 - (1 - 1 / size) ** exchange.copies) / exchange.copies
    moved = exchange.buffer_bytes * sent_once * (size - 1) / size
    is_deepep = batch.dispatcher == Dispatcher.DEEPEP.code
    rate = np.where(is_deepep, _occupied_units(problem, batch), 1.0) * MOVED_PER_UNIT_BYTES_PER_S
    return np.where(is_deepep, moved / rate, 0.0)


def unpaired_share(batch: PlanBatch) -> Floats:
    """Share of the first stage's passes in a step that do not overlap with a pass of another micro-batch.

    These are the warm-up passes and one more: without a pipeline, too, the first forward and the last backward pass run
    alone (`modelling` B4, E5; Megatron-LM core/pipeline_parallel/combined_1f1b.py).
    """
    warmup = 2 * (batch.pp - 1) + (batch.vp - 1) * batch.pp
    return np.minimum((warmup + 1) / (batch.vp * batch.num_microbatches), 1.0)


def shown_expert_parallel_s(
    problem: Problem, batch: PlanBatch, traffic_s: Floats, work_s: Floats, shared_s: Floats
) -> Floats:
    """Exposed time of one pass of expert traffic that may overlap with other work.

    Both passes of a layer of another micro-batch offer `work_s` to hide 2 `traffic_s`, or shared experts `shared_s` of
    each: their first matrix runs beside the dispatch, the second beside the way back (Megatron-LM d98e8a6,
    core/transformer/moe/shared_experts.py).  Hidden traffic slows the work by the compute units that its kernels
    occupy.
    """
    occupied = _occupied_units(problem, batch) / problem.cluster.device.compute_units
    gained = 1.0 - np.minimum(occupied, 1.0)
    paired = traffic_s - np.minimum(traffic_s, work_s / 2) * gained
    alone = unpaired_share(batch)
    beside_shared = traffic_s - np.minimum(traffic_s, shared_s) * gained * batch.shared_expert_overlap
    return np.where(batch.ep_overlap, alone * traffic_s + (1.0 - alone) * paired, beside_shared)
