"""Device memory of every pipeline rank, term by term.

Formulas: `modelling` B1-B6.  Arrays of stages have the shape (plans, stages); sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Bools, Floats, add_up
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.cost.kernels.launches import GRAPHED_IN, holds_graphs
from autoplan.cost.kernels.sizes import (
    gathers_tokens,
    head_columns,
    local_sizes,
    norm_tokens,
    rank_tokens,
    widest_mlp,
)
from autoplan.cost.memory.activations import (
    activation_bytes,
    block_bytes,
    layer_parts,
    logit_bytes,
    offloaded_blocks,
    stored_bytes,
)
from autoplan.cost.memory.allocator_cache import cached_bytes
from autoplan.cost.memory.chosen_outputs import chooses_outputs
from autoplan.cost.memory.expert_buffers import exchange_bytes, expert_gradient_bytes
from autoplan.cost.memory.fsdp2_peaks import (
    PassSizes,
    Snapshots,
    at_peak,
    pass_terms,
    stage_terms,
    stream_pool_bytes,
    with_gathered,
)
from autoplan.cost.memory.fsdp2_sizes import dealt_experts, frozen_copies, pass_sizes, pipeline_sizes
from autoplan.cost.memory.gathered import gathered_bytes
from autoplan.cost.memory.recompute import Parts, whole_bytes
from autoplan.cost.memory.training_states import kept_weight_bytes, states
from autoplan.cost.network.process_groups import ProcessGroups, process_groups
from autoplan.cost.parameters import StageParameters, spread_bytes, stage_parameters, updated_parameters
from autoplan.cost.pipeline.layout import StageBlocks, stage_blocks
from autoplan.cost.state_types import (
    WIDE_BYTES,
    grad_bytes,
    optimizer_bytes,
    parameters_on_host,
    share_on_host,
    update_copy_bytes,
    weight_bytes,
)
from autoplan.spec.blocks import ENCODER_BLOCKS, Block
from autoplan.spec.enums import CudaGraphs, Precision, Sharding
from autoplan.spec.finetuning import HEAD
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem

# Memory terms of a stage in display order: first the framework's tensors, then what the allocator reserves beyond them,
# then memory outside of the allocator.
PASS_TERMS = ("activations", "logits", "transients", "wgrad_buffers", "graphs", "gathered")
ALLOCATED_TERMS = ("weights", "gradients", "optimizer", *PASS_TERMS, "update")
MEMORY_TERMS = (*ALLOCATED_TERMS, "fragmentation", "cached", "communicators", "context")

# Host memory of a rank's process: Python, torch, pinned buffers of libraries, data loader [judged].
HOST_PROCESS_BYTES = 4.0 * 2**30

# What a CUDA context with the kernels of torch takes less than on an A100 or later: 1008 MiB on a Titan V
# (pytorch/pytorch#28394) and some 1000 on an RTX 2080 Ti (#49877), 1573 on an A100 (chronicles-prequel of BLOOM).
SMALLER_CONTEXT_BYTES = {"volta": 565 * 2.0**20, "turing": 565 * 2.0**20}

# Share of the allocator's returnable cache that counts as needed: runs that need all of it returned fail about as often
# as they finish (nanotron on H100, 292 finished and 271 failed runs), as other libraries cannot request it.
CACHED_SHARE = 0.5


def transient_bytes(problem: Problem, batch: PlanBatch, blocks: StageBlocks, repeat_bytes: Floats) -> Floats:
    """Transients of the backward pass of one layer: shape (plans, stages) (`modelling` B6).

    `repeat_bytes` is what a fully recomputed layer stores again, beyond its input.  It counts if a chunk is recomputed
    down to its last layer; otherwise the layers after it have freed as much by then.
    """
    model = problem.model
    tokens, sliced = rank_tokens(problem, batch), norm_tokens(problem, batch)
    # The gradient of fc1's output, or of fc2's input if the former is computed in place.
    gate = 2 if model.gated_mlp and not problem.framework.memory.in_place_activation else 1
    element = problem.training.element_bytes
    transient = element * tokens * gate * widest_mlp(model) / batch.tp + element * tokens * model.hidden_size
    transient = transient + 3 * element * sliced * model.hidden_size
    # The input of SwiGLU is 16 bits wide again where it was stored in 8.
    transient = transient + 2 * element * tokens * widest_mlp(model) / batch.tp * batch.fp8_activation_input
    transient = np.maximum(transient, problem.framework.memory.transient_layers * repeat_bytes)
    transient = np.maximum(transient, expert_gradient_bytes(problem, batch) + 4 * element * sliced * model.hidden_size)
    if model.moe:
        # All tokens of the expert-parallel group: the buffer that gathers them, and the outputs of the local experts.
        width = model.moe.latent_size or model.hidden_size
        transient = transient + 2 * element * sliced * batch.ep * batch.etp * width * gathers_tokens(batch)
    buffers = problem.framework.memory.bytes_per_gathered_hidden * tokens * model.hidden_size * batch.sp
    # The head's hidden states count with the logits.
    gathers = ~blocks.is_last
    return (transient[:, None] + np.where(blocks.repeats_chunk, repeat_bytes[:, None], 0.0)) + buffers[
        :, None
    ] * gathers


def _kept_gradient_bytes(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> Floats:
    """Return the gradients of hidden states that FSDP1 keeps to the end of a backward pass beside frozen weights."""
    if not (problem.framework.memory.keeps_hidden_gradients and problem.training.has_adapters):
        return blocks.zeros()
    layers = add_up(blocks.count.values()) / len(problem.model.layers[0])
    hidden = problem.training.element_bytes * norm_tokens(problem, batch) * problem.model.hidden_size
    return layers * (hidden * (batch.sharding == Sharding.ZERO3.code))[:, None]


def _recomputed_bytes(
    problem: Problem, batch: PlanBatch, parts: Mapping[Block, Parts], per_block: Mapping[Block, Floats]
) -> Floats:
    """Return the largest activations that a layer stores again: a fully recomputed one, or one of chosen outputs."""
    repeat, chooses, inputs = np.zeros(len(batch)), chooses_outputs(problem, batch), stored_bytes(problem, batch)
    for layer in set(problem.model.layers):
        layer_bytes = add_up(whole_bytes(parts[block]) - np.where(chooses, per_block[block], inputs) for block in layer)
        repeat = np.maximum(repeat, layer_bytes)
    return repeat


def _head_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Logits and hidden states at the peak of head and loss on the last stage (`modelling` B3, B7)."""
    tokens, hidden = rank_tokens(problem, batch), problem.model.hidden_size
    # The gathered hidden states and their gradient, and both again as sharded between blocks.
    states = 2 * problem.training.element_bytes * (tokens + norm_tokens(problem, batch)) * hidden
    return (1 + problem.model.num_mtp_layers) * (logit_bytes(problem, batch) + states)


def wgrad_buffer_bytes(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> Floats:
    """A persistent bf16 buffer per distinct weight shape (Transformer Engine; `modelling` B6): (plans, stages).

    The head's is on the last stage (Megatron-LM core/tensor_parallel/layers.py get_dummy_wgrad).
    """
    if not problem.framework.memory.dummy_wgrad_buffers:
        return blocks.zeros()
    total, finetuning = np.zeros(len(batch)), problem.training.finetuning
    counted: set[tuple[int, int, str]] = set()
    for shape in block_shapes(problem.model, problem.training.finetuning).values():
        for linear in shape.linears:
            key = (linear.in_size, linear.out_size, linear.split)
            if key not in counted and linear.name != "router" and not linear.is_frozen:
                counted.add(key)
                inputs, outputs = local_sizes(linear, batch)
                total = total + 2.0 * inputs * outputs
    head = 2.0 * head_columns(problem, batch) * problem.model.table_width / batch.tp
    head = head * (finetuning is None or finetuning.trains(HEAD))
    return total[:, None] + blocks.at_last(head)


def _graph_buffer_bytes(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> Floats:
    """Bytes of the static input and output-gradient buffers of block-level CUDA graphs: (plans, stages).

    The graphs keep both buffers of every block permanently: 4.3 GiB for the 52 blocks of Nemotron 3 Nano at 8,192
    tokens, whose runs with graphs take 4.0 GiB more than is counted without them (Megatron-Bridge 067f987,
    skills/nemo-mbridge-perf-activation-recompute, two runs).  A graph of a whole pass has none.
    """
    num_graphed = blocks.zeros()
    for block, count in blocks.count.items():
        if block in ENCODER_BLOCKS.values():  # encoder layers are not graphed
            continue
        least = CudaGraphs.ROUTER if block is Block.MOE else GRAPHED_IN[block]
        num_graphed += count * holds_graphs(batch, least)[:, None]
    num_graphed *= ~holds_graphs(batch, CudaGraphs.FULL_ITERATION)[:, None]
    hidden = norm_tokens(problem, batch) * problem.model.hidden_size
    return 2.0 * problem.training.element_bytes * hidden[:, None] * num_graphed


def context_bytes(problem: Problem) -> float:
    """Bytes of a process outside of the allocator: context, kernels and workspaces of libraries."""
    smaller = SMALLER_CONTEXT_BYTES.get(problem.cluster.device.generation, 0.0)
    return max(problem.framework.memory.fixed_bytes - smaller, 0.0)


def _update_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups) -> Floats:
    """Bytes that are alive only from the last backward pass to the end of the optimizer step: shape (plans, stages)."""
    framework, parameters = problem.framework, parameters.trained
    zero1 = batch.sharding >= Sharding.ZERO1.code
    on_device = 1.0 - share_on_host(batch)
    copies = spread_bytes(parameters, groups, update_copy_bytes(problem, batch), zero1) * on_device[:, None]
    if framework.memory.fp16_unscaled_grads == "freed":
        unscaled = spread_bytes(parameters, groups, WIDE_BYTES, zero1)
        copies += unscaled * (on_device * (batch.precision == Precision.FP16.code))[:, None]
    # Buckets of zero1, which reduces gradients and gathers weights in the step; some bf16 optimizers gather all weights
    # at once instead of in buckets.
    gathers_all = (batch.precision != Precision.FP16.code) & (framework.memory.bytes_per_bf16_gathered_weight > 0)
    gathered = framework.memory.bytes_per_bf16_gathered_weight * (parameters.dense + parameters.expert)
    buckets = np.where(gathers_all[:, None], gathered, framework.memory.bucket_bytes)
    return copies + buckets * (batch.sharding == Sharding.ZERO1.code)[:, None]


def _snapshots(
    problem: Problem,
    batch: PlanBatch,
    blocks: StageBlocks,
    parameters: StageParameters,
    groups: ProcessGroups,
    per_block: dict[Block, Floats],
    sizes: PassSizes,
) -> Snapshots:
    """Candidate peaks of an FSDP2 step."""
    if blocks.num_stages > 1:
        snapshots = stage_terms(pipeline_sizes(problem, batch, blocks, sizes, per_block))
    else:
        snapshots = pass_terms(sizes)
    if parameters.frozen_bytes is None:
        return snapshots
    return with_gathered(snapshots, frozen_copies(problem, batch, blocks, parameters, groups))


def _is_reduced_to_shards(batch: PlanBatch, groups: ProcessGroups) -> Bools:
    return (batch.sharding >= Sharding.ZERO1.code) & (groups.shard.size > 1)


def _offloaded_bytes(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, parts: dict[Block, Parts], per_block: dict[Block, Floats]
) -> tuple[Floats, Floats]:
    """Return (activations in host memory: (plans, stages), those of one layer, which are on their way: (plans))."""
    if not (batch.offload_modules.any() or batch.offload_layers.any()):
        return blocks.zeros(), np.zeros(len(batch))
    freed = {block: own.freed_bytes for block, own in offloaded_blocks(problem, batch, parts).items()}
    whole = {block: size + freed.get(block, 0.0) for block, size in per_block.items()}
    stay, all_of_them = (activation_bytes(problem, batch, blocks, sizes) for sizes in (per_block, whole))
    layers = (add_up(freed[block] for block in layer) for layer in problem.model.layer_kinds)
    return all_of_them - stay, np.max([*layers], axis=0)


def stage_memory(problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: StageParameters) -> StageMemory:
    """Peak memory of every pipeline rank: states plus the needs of the passes or of the optimizer step."""
    problem = problem.at_longest
    model, framework = problem.model, problem.framework
    groups = process_groups(batch)
    if framework.memory.fsdp2_states and model.moe:
        groups = dealt_experts(groups, model.moe.num_experts, batch.ep)
    weights, gradients, optimizer = states(problem, batch, parameters, groups)

    parts = layer_parts(problem, batch)
    per_block = block_bytes(problem, batch, parts)
    repeat = _recomputed_bytes(problem, batch, parts, per_block)
    logits = blocks.at_last(_head_bytes(problem, batch))
    on_host, in_transit = _offloaded_bytes(problem, batch, blocks, parts, per_block)
    transients = transient_bytes(problem, batch, blocks, repeat) + in_transit[:, None]
    transients = transients + _kept_gradient_bytes(problem, batch, blocks)
    # The backward pass of the head ends before that of the last layer begins, so the larger of the two counts.
    terms = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activation_bytes(problem, batch, blocks, per_block),
        "logits": logits,
        "transients": transients if framework.memory.keeps_logits else np.maximum(transients - logits, 0.0),
        "wgrad_buffers": wgrad_buffer_bytes(problem, batch, blocks),
        "graphs": _graph_buffer_bytes(problem, batch, blocks),
    }
    needed = terms["activations"] + logits + terms["transients"]
    terms["gathered"] = gathered_bytes(problem, batch, parameters, groups, needed, logits, transients)
    # Gradients that are reduced during backward passes need their bucket in addition to the activations.
    terms["gathered"] += (framework.memory.bucket_bytes * (batch.sharding >= Sharding.ZERO2.code))[:, None]
    snapshots: Snapshots = {}
    pools = blocks.zeros()
    if framework.memory.fsdp2_states:
        sizes = pass_sizes(problem, batch, blocks, parameters, groups, per_block, repeat)
        snapshots = _snapshots(problem, batch, blocks, parameters, groups, per_block, sizes)
        terms |= at_peak(snapshots)
        pools = stream_pool_bytes(sizes, snapshots) * _is_reduced_to_shards(batch, groups)[:, None]
    passes = add_up(terms[name] for name in PASS_TERMS)
    update = _update_bytes(problem, batch, parameters, groups)
    # Memory of a single graph of the passes is not available to the optimizer step.
    is_pinned = holds_graphs(batch, CudaGraphs.FULL_ITERATION)[:, None]
    freed = passes
    if framework.memory.is_planned_ahead or (framework.memory.drops_grads and not framework.memory.fsdp2_states):
        # The fewer activations are alive, the more gradients are: most is needed where either is whole.  The optimizer
        # step needs all gradients, in the memory of the passes.
        is_single = (batch.num_microbatches == 1)[:, None]
        terms["gradients"] = np.where(is_single, np.maximum(gradients - passes, 0.0), gradients)
        freed = np.where(is_single, np.maximum(passes - gradients, 0.0), passes)
    terms["update"] = np.where(is_pinned, update, np.maximum(update - freed, 0.0))
    terms["fragmentation"] = (framework.memory.reserved_factor - 1.0) * add_up(terms.values())
    terms["fragmentation"] += framework.memory.broken_pass_share * passes
    cached, at_end = cached_bytes(
        problem, batch, blocks, parameters.trained.dense + parameters.trained.expert, groups.shard.size
    )
    cached = cached + pools
    terms["cached"] = CACHED_SHARE * cached
    communicators = framework.memory.communicator_bytes * groups.num_communicators
    terms["communicators"] = blocks.at_all(communicators + exchange_bytes(problem, batch))
    terms["context"] = np.full_like(cached, context_bytes(problem))
    spare = at_end + framework.memory.reserved_factor * np.minimum(update, passes)
    return StageMemory(
        terms=terms,
        reserved_bytes=add_up(terms.values()),
        pass_spare_bytes=(1.0 - CACHED_SHARE) * cached,
        step_spare_bytes=spare,
        update_bytes=update,
        offloaded_bytes=on_host,
        snapshots=snapshots,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of every pipeline rank: arrays of shape (plans, stages), in bytes.

    `terms` has the `MEMORY_TERMS` at the moment of the largest need: allocations with their fragmentation, context and
    communication buffers.  On a device with room the allocator also keeps blocks of freed tensors that later tensors do
    not fit into: `pass_spare_bytes` from the passes, and `step_spare_bytes` of activations while the optimizer step
    allocates flat tensors.
    """

    terms: dict[str, Floats]
    reserved_bytes: Floats  # sum of the terms, which must fit on the device
    pass_spare_bytes: Floats
    step_spare_bytes: Floats
    update_bytes: Floats  # alive only during the optimizer step
    offloaded_bytes: Floats  # activations in host memory
    snapshots: Snapshots  # empty if snapshots are not modelled for the framework

    def logged_bytes(self, problem: Problem) -> Floats:
        """Peak shown in the framework's log, of the worst rank or of rank 0: shape (plans)."""
        framework = problem.framework
        if framework.memory.logs_memory == "allocated":
            per_stage = add_up(self.terms[name] for name in ALLOCATED_TERMS)
        else:
            # The allocator returns blocks only when the device is full.
            reserved_bytes = self.reserved_bytes + self.pass_spare_bytes + self.step_spare_bytes
            per_stage = np.minimum(reserved_bytes, problem.capacity_bytes)
            if framework.memory.logs_memory == "reserved":
                per_stage = per_stage - self.terms["communicators"] - self.terms["context"]
        return per_stage[:, 0] if framework.memory.logs_first_rank else per_stage.max(axis=1)


def peaks(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """Return (peak in the framework's log, largest need of any rank) in bytes, without pricing time: (plans)."""
    logged, reserved = np.zeros(len(batch)), np.zeros(len(batch))
    for stages in np.unique(batch.pp):
        where = np.flatnonzero(batch.pp == stages)
        part = batch.take(where)
        blocks = stage_blocks(problem.model, part, int(stages))
        memory = stage_memory(problem, part, blocks, stage_parameters(problem, part, blocks))
        logged[where] = memory.logged_bytes(problem)
        reserved[where] = memory.reserved_bytes.max(axis=1)
    return logged, reserved


def host_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters, activations: Floats) -> Floats:
    """Largest host memory of any node: shape (plans).

    Processes, offloaded `activations` of shape (plans, stages), an offloaded optimizer with the gradients that it
    reads, offloaded weights, and the copy of weights and optimizer that a checkpoint stages in host memory, where every
    replica of a parameter saves a part (Megatron-LM core/optimizer/cpu_offloading/hybrid_optimizer.py,
    core/dist_checkpointing/strategies/ filesystem_async.py).
    """
    groups = process_groups(batch)
    per_state = optimizer_bytes(problem, batch)[:, None] + grad_bytes(problem, batch)[:, None]
    offloaded = updated_parameters(batch, parameters) * per_state * share_on_host(batch)[:, None]
    weights = kept_weight_bytes(problem, batch, parameters, groups, batch.sharding == Sharding.ZERO3.code)
    offloaded = offloaded + weights * parameters_on_host(batch)[:, None]
    staged = _saved_bytes(problem, batch, parameters, groups)
    devices = np.minimum(problem.cluster.devices_per_node, batch.num_devices)
    return devices * (HOST_PROCESS_BYTES + (activations + offloaded + staged).max(axis=1))


def checkpoint_bytes(problem: Problem, plan: ParallelPlan) -> float:
    """Size of a checkpoint: weights and optimizer states of the trained parameters, each stored once."""
    batch = problem.batch([plan])
    parameters = stage_parameters(problem, batch, stage_blocks(problem.model, batch, plan.pp))
    of_ranks = _saved_bytes(problem, batch, parameters, process_groups(batch))
    return float(of_ranks.sum()) * plan.num_devices / plan.pp


def _saved_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups) -> Floats:
    """Bytes that each rank of a stage writes into a checkpoint: shape (plans, stages)."""
    dense_copies, expert_copies = groups.dense_copies.size[:, None], groups.expert_copies.size[:, None]
    trained = parameters.trained
    saved = trained.dense / dense_copies + trained.expert / expert_copies
    return saved * (weight_bytes(problem, batch) + optimizer_bytes(problem, batch))[:, None]
