"""Device memory that every pipeline rank needs, term by term.

Formulas: `modelling` B1-B6.  Arrays of stages have the shape (plans, stages); sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, add_up
from autoplan.cost.kernels.arithmetic import BlockShape, block_shapes
from autoplan.cost.kernels.sizes import expert_tokens, local_sizes, norm_tokens, padded_vocab, rank_tokens
from autoplan.cost.memory.allocator_cache import cached_bytes
from autoplan.cost.memory.fsdp2_peaks import WIDE_BYTES, Held, HeldByStage, Moments, at_peak, pass_terms, stage_terms
from autoplan.cost.memory.parameters import StageParameters, local_parameters, own_parameters, stage_parameters
from autoplan.cost.memory.recompute import (
    NARROW_BYTES,
    activation_parts,
    casts_norms,
    eager_norm_bytes,
    kept_bytes,
    whole_bytes,
)
from autoplan.cost.network.links import ProcessGroup
from autoplan.cost.network.process_groups import ProcessGroups, process_groups
from autoplan.cost.pipeline.closed_forms import in_flight_chunks
from autoplan.cost.pipeline.layout import (
    StageBlocks,
    by_chunks,
    chunk_blocks,
    chunk_layers_of,
    repeats_mtp,
    stage_blocks,
)
from autoplan.cost.pipeline.order import chunks_of_ranks, live_chunks
from autoplan.spec.enums import Offload, Precision, Schedule, Sharding
from autoplan.spec.model import Block
from autoplan.spec.plan import SPLIT_SCHEDULES, PlanBatch, distinct_rows
from autoplan.spec.problem import Problem

# The terms of a stage in the order in which they are shown.  What the framework's tensors take comes first; then what
# the allocator holds beyond it, and what lies outside of the allocator.
PASS_TERMS = ("activations", "logits", "transients", "wgrad_buffers", "gathered")
ALLOCATED_TERMS = ("weights", "gradients", "optimizer", *PASS_TERMS, "update")
MEMORY_TERMS = (*ALLOCATED_TERMS, "fragmentation", "cached", "communicators", "context")

_FILLED = 3  # `order.live_chunks` saturates after so many groups of micro-batches

# What a process of a rank takes of host memory: Python, torch, pinned buffers of the libraries, data loader [judged].
HOST_PROCESS_BYTES = 4.0 * 2**30

# Of what the allocator caches and could give back: runs that need all of it back fail about as often as they finish
# (nanotron on H100, 292 finished and 271 failed runs), for other libraries cannot ask for it.
CACHED_SHARE = 0.5


def _transient_bytes(problem: Problem, batch: PlanBatch, blocks: StageBlocks, repeat_bytes: Floats) -> Floats:
    """Transients of the backward pass of one layer: shape (plans, stages) (`modelling` B6).

    `repeat_bytes` is what a layer that is recomputed as a whole keeps again, beyond its input.  It counts where a chunk
    is recomputed down to its last layer: elsewhere the layers behind have given back as much by then.
    """
    model = problem.model
    tokens, sliced = rank_tokens(problem, batch), norm_tokens(problem, batch)
    width = model.ffn_size
    if model.moe:
        width = max(width, model.moe.shared_expert_ffn_size + model.moe.experts_per_token * model.moe.expert_ffn_size)
    # The gradient of fc1's output, or where that needs no memory of its own, of fc2's input.
    gate = 2 if model.gated_mlp and not problem.framework.memory.in_place_activation else 1
    element = problem.training.element_bytes
    transient = element * tokens * gate * width / batch.tp + element * tokens * model.hidden_size
    transient = transient + 3 * element * sliced * model.hidden_size
    transient = np.maximum(transient, problem.framework.memory.transient_layers * repeat_bytes)
    buffers = problem.framework.memory.bytes_per_gathered_hidden * tokens * model.hidden_size * batch.sp
    # The head's hidden states count with the logits.
    gathers = ~blocks.is_last
    return (transient[:, None] + np.where(blocks.repeats_chunk, repeat_bytes[:, None], 0.0)) + buffers[
        :, None
    ] * gathers


def _head_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Logits and hidden states at the peak of head and loss on the last stage (`modelling` B3, B7)."""
    framework, hidden = problem.framework, problem.model.hidden_size
    tokens = rank_tokens(problem, batch)
    split = batch.tp if framework.memory.shards_logits else np.ones(len(batch), dtype=np.int64)
    per_logit = framework.memory.bytes_per_logit + np.where(
        batch.tp > 1, framework.memory.bytes_per_gathered_logit, 0.0
    )
    logits = per_logit * tokens * padded_vocab(problem, batch) / split
    # The gathered hidden states and their gradient, and both again as every rank holds them between blocks.
    states = 2 * problem.training.element_bytes * (tokens + norm_tokens(problem, batch)) * hidden
    return (1 + problem.model.num_mtp_layers) * (logits + states)


def _gathered_bytes(
    problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups, freed_bytes: Floats
) -> Floats:
    """Gathered weights and whole gradients that zero3 holds at its peak, or zero1 when a step ends: (plans, stages).

    Embedding and head for the whole of both passes and some layers at a time, or in a pipeline, where the framework
    does not gather again for every micro-batch, the whole stage.  What is sharded over one rank needs no copy.
    Copies that zero1 gathers into count as far as they exceed `freed_bytes`, which are free again by then.
    """
    framework, layers = problem.framework, problem.model.layers
    dense_spread, expert_spread = groups.shard.size > 1, groups.expert_shard.size > 1

    def spread(dense: Floats, expert: Floats) -> Floats:
        return dense * dense_spread + expert * expert_spread

    shapes = block_shapes(problem.model)
    unit = np.zeros(len(batch))
    for layer in set(layers):
        unit = np.maximum(unit, add_up(spread(*local_parameters(batch, shapes[block])) for block in layer))
    element = problem.training.element_bytes
    in_turn = unit * (framework.memory.fsdp_prefetch_units * element + framework.network.bytes_per_reduced_grad)
    root = (parameters.ends.T * dense_spread).T * (element + framework.network.bytes_per_reduced_grad)
    stage = spread(parameters.dense.T, parameters.expert.T).T * (element + framework.network.bytes_per_reduced_grad)
    whole = (batch.pp > 1) & (not framework.network.zero3_regathers_in_pipeline)
    zero3 = batch.sharding == Sharding.ZERO3.code
    most = framework.memory.whole_gather_copies
    copies = most + most / np.maximum(groups.shard.size, 1) / 2
    at_end = element * spread(parameters.dense.T * copies, parameters.expert.T * copies).T - freed_bytes
    zero1 = (batch.sharding == Sharding.ZERO1.code) & (framework.memory.whole_gather_copies > 0)
    gathered = np.where(zero1[:, None], np.maximum(at_end, 0.0), 0.0)
    return np.where(zero3[:, None], np.where(whole[:, None], stage, in_turn[:, None] + root), gathered)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEnds:
    """Bytes that a chunk in flight keeps of one micro-batch beside its layers: shape (plans)."""

    received: Floats  # every chunk but the first
    sent: Floats  # every chunk but the last
    head: Floats  # the last chunk
    # Between the two gradients of a split backward pass, more of each block, and less of the last chunk.
    waiting: dict[Block, Floats]
    spent: Floats

    def waiting_bytes(self, counts: dict[Block, tuple[Floats, Floats]], rows: Ints) -> Floats:
        """Bytes that whole chunks with so many blocks add between their two gradients: shape (rows, chunks).

        The first chunk has one backward pass and adds none.
        """
        size = add_up(count * self.waiting[block][rows, None] for block, (count, _) in counts.items())
        size[:, -1] -= self.spent[rows]
        size[:, 0] = 0.0
        return size


def _activations(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, kept: dict[Block, Floats], ends: ChunkEnds | None = None
) -> Floats:
    """Bytes kept for the backward passes of all micro-batches in flight: shape (plans, stages)."""
    stored, boundary = stored_bytes(problem, batch), boundary_bytes(problem, batch)
    one = blocks.zeros()
    for block, count in blocks.count.items():
        repeated = blocks.repeated[block]
        one += (count - repeated) * kept[block][:, None] + repeated * stored[:, None]
    depths = _prediction_bytes(problem, batch, kept)
    one += blocks.at_last(depths)
    microbatches, is_gpipe = batch.num_microbatches, batch.schedule == Schedule.GPIPE.code
    live = in_flight_chunks(blocks.num_stages, batch.vp, microbatches, gpipe=is_gpipe)
    result = (one / batch.vp[:, None] + boundary[:, None]) * live
    # More micro-batches than fill the pipeline three times keep no more alive, but where all of them are.
    fills = (microbatches % blocks.num_stages == 0) & ~is_gpipe
    microbatches = np.where(fills, np.minimum(microbatches, _FILLED * blocks.num_stages), microbatches)
    # Where the chunks of a rank differ it matters which of them are alive together.
    split = np.isin(batch.schedule, SPLIT_SCHEDULES)
    unlike = np.flatnonzero(split | ((batch.vp > 1) & (~blocks.chunks_alike | (depths > 0))) | (ends is not None))
    for _, rows in by_chunks(batch, unlike):
        counts = chunk_blocks(problem.model, chunk_layers_of(batch, rows), batch.recompute_num_layers[rows])
        size = _chunk_bytes(counts, rows, kept, stored, boundary, depths)
        waiting = None
        if ends is not None:
            size[:, 1:] += ends.received[rows, None]
            size[:, :-1] += ends.sent[rows, None]
            size[:, -1] += ends.head[rows]
            waiting = ends.waiting_bytes(counts, rows)
        result[rows] = _most_alive(batch.schedule[rows], microbatches[rows], blocks.num_stages, size, waiting)
    return result


def _prediction_bytes(problem: Problem, batch: PlanBatch, kept: dict[Block, Floats]) -> Floats:
    """Kept by the depths of multi-token prediction, behind the last chunk: shape (plans)."""
    model, stored = problem.model, stored_bytes(problem, batch)
    depths = np.zeros(len(batch))
    for block in model.mtp_layer if model.num_mtp_layers else ():
        depths += model.num_mtp_layers * np.where(repeats_mtp(batch), stored, kept[block])
    return depths


def _chunk_bytes(
    counts: dict[Block, tuple[Floats, Floats]],
    rows: Ints,
    kept: dict[Block, Floats],
    stored: Floats,
    boundary: Floats,
    depths: Floats,
) -> Floats:
    """Bytes that one micro-batch keeps in every chunk, of some plans with as many chunks: shape (rows, chunks).

    `counts` are the blocks of their chunks, as `chunk_blocks` has them; the other arrays are those of all plans.
    """
    size = np.zeros_like(next(count for count, _ in counts.values())) + boundary[rows, None]
    for block, (count, again) in counts.items():
        size += (count - again) * kept[block][rows, None] + again * stored[rows, None]
    size[:, -1] += depths[rows]
    return size


def chunk_activation_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Activations that one micro-batch keeps in every chunk, of plans with as many chunks: shape (plans, chunks)."""
    shapes = block_shapes(problem.model)
    kept = {
        block: kept_bytes(problem, batch, activation_parts(problem, batch, block, shape))
        for block, shape in shapes.items()
    }
    rows = np.arange(len(batch))
    counts = chunk_blocks(problem.model, chunk_layers_of(batch, rows), batch.recompute_num_layers)
    stored, boundary = stored_bytes(problem, batch), boundary_bytes(problem, batch)
    return _chunk_bytes(counts, rows, kept, stored, boundary, _prediction_bytes(problem, batch, kept))


def _most_alive(
    schedules: Ints, microbatches: Ints, stages: int, chunk_bytes: Floats, waiting_bytes: Floats | None = None
) -> Floats:
    """The largest sum of `chunk_bytes` that is alive at once on every rank: shape (plans, stages).

    The plans have as many chunks; `chunk_bytes` is what each of them keeps, shape (plans, chunks), and `waiting_bytes`
    what it keeps beside that between the two gradients of a split backward pass.
    """
    result = np.empty((len(schedules), stages), order="F")
    vp = chunk_bytes.shape[1] // stages
    first, like = distinct_rows(schedules, microbatches)
    for at, one in enumerate(first):
        rows, schedule = np.flatnonzero(like == at), tuple(Schedule)[schedules[one]]
        waits = waiting_bytes is not None and schedules[one] in SPLIT_SCHEDULES
        # Whole numbers as floats, as those they are multiplied with are.
        alive = live_chunks(schedule, stages, vp, int(microbatches[one]), waiting=waits).astype(np.float64)
        chunks = chunks_of_ranks(schedule, stages, vp)
        held = np.take(chunk_bytes.T, rows, axis=1)[chunks]  # (ranks, chunks of a rank, rows)
        if waiting_bytes is not None and waits:
            held = np.concatenate([held, np.take(waiting_bytes.T, rows, axis=1)[chunks]], axis=1)
        result[rows] = np.einsum("pvr,pkv->pkr", held, alive).max(axis=1).T
    return result


def boundary_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """The tensors at its ends that every chunk in flight keeps."""
    per_hidden = problem.framework.memory.bytes_per_boundary_hidden
    return per_hidden * norm_tokens(problem, batch) * problem.model.hidden_size * (batch.pp > 1)


def stored_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """A block's share of the input of its layer, all that is kept of a layer that is recomputed as a whole."""
    element = problem.training.element_bytes
    return element * norm_tokens(problem, batch) * problem.model.hidden_size / len(problem.model.layers[0])


def wgrad_buffer_bytes(problem: Problem, batch: PlanBatch, blocks: StageBlocks) -> Floats:
    """One persistent bf16 buffer per distinct weight shape (Transformer Engine; `modelling` B6): (plans, stages).

    The head's is on the last stage (Megatron-LM core/tensor_parallel/layers.py get_dummy_wgrad).
    """
    if not problem.framework.memory.dummy_wgrad_buffers:
        return blocks.zeros()
    total = np.zeros(len(batch))
    seen: set[tuple[int, int, str]] = set()
    for shape in block_shapes(problem.model).values():
        for linear in shape.linears:
            key = (linear.in_size, linear.out_size, linear.split)
            if key not in seen and linear.name != "router":
                seen.add(key)
                inputs, outputs = local_sizes(linear, batch)
                total = total + 2.0 * inputs * outputs
    head = 2.0 * padded_vocab(problem, batch) * problem.model.hidden_size / batch.tp
    return total[:, None] + blocks.at_last(head)


def _spread_bytes(parameters: StageParameters, groups: ProcessGroups, per_parameter: float, sharded: Bools) -> Floats:
    """Bytes of a rank at `per_parameter` each, divided over its shard group where `sharded`: shape (plans, stages)."""
    dense = per_parameter / np.where(sharded, groups.shard.size.astype(np.float64), 1.0)
    expert = per_parameter / np.where(sharded, groups.expert_shard.size.astype(np.float64), 1.0)
    return parameters.dense * dense[:, None] + parameters.expert * expert[:, None]


def states(
    problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups
) -> tuple[Floats, Floats, Floats]:
    """(weights, gradients, optimizer) bytes under every sharding, experts over their own group (`modelling` B1)."""
    framework = problem.framework
    sharding = batch.sharding
    zero1 = sharding >= Sharding.ZERO1.code
    # A buffer that gathers the gradients of several micro-batches before they are reduced holds all of them.
    reduces = framework.network.zero2_reduces_every_microbatch | (batch.num_microbatches == 1)
    zero2 = (sharding > Sharding.ZERO2.code) | ((sharding == Sharding.ZERO2.code) & reduces)
    zero3 = sharding >= Sharding.ZERO3.code
    spread = partial(_spread_bytes, parameters, groups)
    fp16 = batch.precision == Precision.FP16.code
    weights = spread(
        framework.memory.bytes_per_weight, zero1 if framework.memory.fsdp2_states else zero3
    ) + _narrow_weight_bytes(problem, batch, parameters)
    gradients = spread(framework.memory.bytes_per_grad, zero2)
    accumulator = framework.memory.bytes_per_bf16_grad_accumulator
    replaced = framework.memory.bytes_per_grad if framework.memory.frees_accumulated_grads else 0.0
    gradients += spread(accumulator - replaced, zero2) * ~fp16[:, None]
    buckets = (sharding == Sharding.NONE.code) & (batch.dp > 1)
    gradients += spread(framework.memory.bytes_per_bucket_grad, zero1) * buckets[:, None]
    on_device = batch.offload != Offload.OPTIMIZER.code
    if framework.memory.offloads_grads:
        gradients *= (on_device | ~zero3)[:, None]
    kept = framework.memory.bytes_per_optimizer_state, framework.memory.bytes_per_state_kept_on_device
    optimizer = spread(kept[0], zero1) * on_device[:, None] + spread(kept[1], zero1) * ~on_device[:, None]
    if not framework.memory.frees_unscaled_grads:
        optimizer += spread(framework.memory.bytes_per_fp16_unscaled_grad, zero1) * (fp16 & on_device)[:, None]
    return weights, gradients, optimizer


def _narrow_weight_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters) -> Floats:
    """Quantised copies of the weights of narrow GEMMs, kept from the first micro-batch to the last: (plans, stages).

    Hopper multiplies 8-bit matrices in one layout only, and blocks of scales run along one side, so that the data
    gradient has a copy of its own; Blackwell's 8-bit copies with one scale serve both (Transformer Engine
    module/base.py get_weight_workspace).  Weights that are gathered for every pass are not kept.  Where a framework
    holds no weights of these products beside the copies, less those in 16 bits.
    """
    if not problem.framework.memory.keeps_narrow_copies:
        return np.zeros_like(parameters.dense)
    one_layout = problem.cluster.device.generation == "blackwell"
    copies = {name: size * (1.0 if name == "fp8" and one_layout else 2.0) for name, size in NARROW_BYTES.items()}
    for name in problem.framework.memory.narrow_weights:
        copies[name] -= problem.framework.memory.bytes_per_weight
    per_weight = np.array([copies.get(precision, 0.0) for precision in Precision])[batch.precision]
    per_weight = np.where(batch.sharding >= Sharding.ZERO3.code, 0.0, per_weight)
    return (parameters.dense - parameters.ends + parameters.expert) * per_weight[:, None]


def _update_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups) -> Floats:
    """Bytes that live only from the last backward pass to the end of the optimizer's step: shape (plans, stages)."""
    framework = problem.framework
    zero1 = batch.sharding >= Sharding.ZERO1.code
    on_device = batch.offload != Offload.OPTIMIZER.code
    copies = _spread_bytes(parameters, groups, framework.memory.bytes_per_update_copy, zero1) * on_device[:, None]
    if framework.memory.frees_unscaled_grads:
        unscaled = _spread_bytes(parameters, groups, framework.memory.bytes_per_fp16_unscaled_grad, zero1)
        copies += unscaled * (on_device & (batch.precision == Precision.FP16.code))[:, None]
    # Under zero1, where gradients are not reduced before the step, and weights gathered in it; some bf16 optimizers
    # do without buckets, all at once.
    whole = (batch.precision != Precision.FP16.code) & (framework.memory.bytes_per_bf16_gathered_weight > 0)
    gathered = framework.memory.bytes_per_bf16_gathered_weight * (parameters.dense + parameters.expert)
    buckets = np.where(whole[:, None], gathered, framework.memory.bucket_bytes)
    return copies + buckets * (batch.sharding == Sharding.ZERO1.code)[:, None]


def _dealt(groups: ProcessGroups, num_experts: int) -> ProcessGroups:
    """Shard experts as FSDP2 does: over the ranks of the dense states, to the first of which it deals whole ones.

    Where they do not come out even that is what fewer ranks would have, rounded down.
    """
    stride, size, _ = groups.shard
    return replace(groups, expert_shard=ProcessGroup(stride, num_experts // -(-num_experts // size)))


def _held(
    problem: Problem,
    batch: PlanBatch,
    blocks: StageBlocks,
    parameters: StageParameters,
    groups: ProcessGroups,
    kept: dict[Block, Floats],
    repeat: Floats,
) -> Held:
    """Return the sizes that make up the moments of an FSDP2 step."""
    model, framework = problem.model, problem.framework
    shapes = block_shapes(model)
    every = (batch.sharding >= Sharding.ZERO2.code) & (batch.pp == 1)
    sharded = batch.sharding >= Sharding.ZERO1.code
    has_before = batch.num_microbatches > 1
    unit, stored = np.zeros(len(batch)), stored_bytes(problem, batch)
    for blocks_of in set(model.layers):
        unit = np.maximum(unit, add_up(add_up(local_parameters(batch, shapes[block])) for block in blocks_of))
    tokens = rank_tokens(problem, batch)
    ends = _chunk_ends(problem, batch) if blocks.num_stages > 1 else None
    live = _activations(problem, batch, blocks, kept, ends)
    one = add_up(
        (count - blocks.repeated[block]) * kept[block][:, None] + blocks.repeated[block] * stored[:, None]
        for block, count in blocks.count.items()
    )
    if ends is not None:
        one = one + blocks.at_last(ends.head)
    whole = parameters.dense + parameters.expert
    table = padded_vocab(problem, batch) * model.hidden_size
    summed = np.zeros_like(whole)
    summed[:, 0] = table * (1.0 - 1.0 / batch.tp)
    gate = 2 if model.gated_mlp else 1
    element = problem.training.element_bytes
    transients = element * tokens * ((gate + 1) * _width(problem) / batch.tp + model.hidden_size)
    per_logit = framework.memory.bytes_per_logit + np.where(
        batch.tp > 1, framework.memory.bytes_per_gathered_logit, 0.0
    )
    # Where weights are neither cast nor gathered the passes read them where they are.
    has_copies = (batch.dp > 1) | (problem.training.precision != "fp32")
    return Held(
        element_bytes=element,
        copy_bytes=np.where(has_copies, element, 0.0)[:, None],
        parameters=whole,
        ends=parameters.ends,
        head=blocks.at_last(table / batch.tp),
        unit=blocks.at_all(unit),
        own=_spread_bytes(parameters, groups, 1.0, sharded),
        own_ends=parameters.ends / np.where(sharded, groups.shard.size, 1)[:, None],
        summed=summed,
        accumulated=(_spread_bytes(parameters, groups, WIDE_BYTES, every) + WIDE_BYTES * summed * ~every[:, None])
        * has_before[:, None],
        reduces_every=(every & has_before & (groups.shard.size > 1))[:, None] & (whole > 0),
        frees_weights=((batch.sharding == Sharding.ZERO3.code) & (batch.pp == 1))[:, None] & (whole > 0),
        live=live,
        left=np.maximum(live - one / batch.vp[:, None], 0.0),
        logits=blocks.at_last(per_logit * _num_logits(problem, batch) + _last_norm_bytes(problem, batch)),
        transients=transients[:, None] + np.where(blocks.repeats_chunk, repeat[:, None], 0.0),
    )


def _held_by_stage(
    problem: Problem, batch: PlanBatch, blocks: StageBlocks, held: Held, kept: dict[Block, Floats]
) -> HeldByStage:
    """Return the sizes that make up the moments of a pipeline beside `held` (torch/distributed/pipelining/stage.py)."""
    model = problem.model
    element = problem.training.element_bytes
    sliced = element * norm_tokens(problem, batch) * model.hidden_size
    logits, norm = _num_logits(problem, batch), _last_norm_bytes(problem, batch)
    inputs = blocks.at_all(batch.vp)
    inputs[:, 0] -= 1
    outputs = batch.vp[:, None] - blocks.is_last
    in_flight = in_flight_chunks(
        blocks.num_stages, batch.vp, batch.num_microbatches, gpipe=batch.schedule == Schedule.GPIPE.code
    )
    least = np.min([add_up(kept[block] for block in layer) for layer in set(model.layers)], axis=0)
    stored = stored_bytes(problem, batch) * len(model.layers[0])
    # In the backward pass of an MLP its last input is gone, and the gradient of its output is that of the layer's.
    gone = element * rank_tokens(problem, batch) * (_width(problem) / batch.tp + model.hidden_size)
    return HeldByStage(
        passes=held,
        # One for every micro-batch, alive or not, and the gradient that is being sent.
        buffers=sliced[:, None] * (batch.num_microbatches[:, None] * (inputs + outputs) + (inputs > 0)),
        logits=held.logits - blocks.at_last(WIDE_BYTES * logits + norm),
        # The output stays; the gradient of what the last layer made is a tensor of its own.
        behind=blocks.at_last((WIDE_BYTES * logits + norm - sliced) * (batch.vp == 1)),
        transients=held.transients - gone[:, None],
        matrix=blocks.at_all(_last_matrix(problem, batch)),
        layer=np.where(blocks.repeats_chunk, stored[:, None], least[:, None]),
        refills=_refills(batch, in_flight),
    )


def _refills(batch: PlanBatch, in_flight: Ints) -> Bools:
    """Return whether forward passes follow on the first gradients of weights: shape (plans, stages).

    Rank r of ZB-H1 keeps r of these back: all ranks begin with as many forward passes as there are ranks, a chunk.
    """
    waits = batch.schedule == Schedule.ZB_H1.code
    begins: Floats = np.where(waits, batch.pp, in_flight.T / batch.vp)
    return np.asarray(batch.num_microbatches[:, None] > begins.T)


def _chunk_ends(problem: Problem, batch: PlanBatch) -> ChunkEnds:
    """Bytes that torch's PipelineStage keeps per micro-batch in flight: what it sent, on the last what a loss needs.

    What a chunk receives lies in a buffer, which is the input that its first norm keeps, unless as an fp32 copy.
    """
    element = problem.training.element_bytes
    sliced = element * norm_tokens(problem, batch) * problem.model.hidden_size
    is_copied = (batch.recompute_num_layers == 0) & casts_norms(problem)
    logits, shapes = _num_logits(problem, batch), block_shapes(problem.model)
    return ChunkEnds(
        received=np.where(is_copied, 0.0, -sliced),
        sent=sliced,
        head=(element + WIDE_BYTES) * logits + _last_norm_bytes(problem, batch),
        waiting={block: _output_gradient_bytes(problem, batch, shape) for block, shape in shapes.items()},
        spent=WIDE_BYTES * logits,  # logits and logarithms went, the gradient of the former came
    )


def _output_gradient_bytes(problem: Problem, batch: PlanBatch, shape: BlockShape) -> Floats:
    """Gradients of what every weight of a block makes, that of its norm in fp32 where it computes so."""
    model = problem.model
    wide = add_up(local_sizes(linear, batch)[1] for linear in shape.linears if not linear.split.startswith("expert"))
    element = problem.training.element_bytes
    size = element * rank_tokens(problem, batch) * wide
    if model.moe:
        routed = expert_tokens(problem, batch) * model.moe.num_experts / batch.ep
        experts = [local_sizes(linear, batch)[1] for linear in shape.linears if linear.split.startswith("expert")]
        size = size + element * routed * add_up(experts) if experts else size
    per_norm = 2 * WIDE_BYTES if casts_norms(problem) else element
    return size + per_norm * model.norms_per_block * norm_tokens(problem, batch) * model.hidden_size


def _num_logits(problem: Problem, batch: PlanBatch) -> Floats:
    """Logits of a micro-batch that a rank with the head holds."""
    split = np.where(problem.framework.memory.shards_logits, batch.tp, 1)
    return rank_tokens(problem, batch) * padded_vocab(problem, batch) / split


def _last_norm_bytes(problem: Problem, batch: PlanBatch) -> Floats:
    """Bytes that the norm before the head keeps of a micro-batch."""
    sliced, tokens, element = norm_tokens(problem, batch), rank_tokens(problem, batch), problem.training.element_bytes
    return ((element + eager_norm_bytes(problem)) * sliced + element * tokens) * problem.model.hidden_size


def _width(problem: Problem) -> float:
    """The widest that a token becomes in an MLP or in all its experts."""
    model = problem.model
    moe = model.moe
    return max(model.ffn_size, moe.shared_expert_ffn_size + moe.experts_per_token * moe.expert_ffn_size if moe else 0)


def _last_matrix(problem: Problem, batch: PlanBatch) -> Floats:
    """Elements of the matrix that an MLP, or all experts together, end with."""
    model, moe = problem.model, problem.model.moe
    wide = moe.num_experts * moe.expert_ffn_size / (batch.ep * batch.etp) if moe else model.ffn_size / batch.tp
    return np.asarray(wide * model.hidden_size, dtype=np.float64)


def communicator_bytes(problem: Problem, groups: ProcessGroups) -> Floats:
    """Buffers of the communicators that a rank takes part in: shape (plans)."""
    members = (groups.tp, groups.cp, groups.shard, groups.replicate, groups.ep, groups.pp)
    active = add_up((group.size > 1).astype(np.float64) for group in members)
    return problem.framework.memory.communicator_bytes * active


def stage_memory(problem: Problem, batch: PlanBatch, blocks: StageBlocks, parameters: StageParameters) -> StageMemory:
    """Peak memory of every pipeline rank: states, and what the passes or the optimizer's step need beside."""
    model, framework = problem.model, problem.framework
    groups = process_groups(batch)
    if framework.memory.fsdp2_states and model.moe:
        groups = _dealt(groups, model.moe.num_experts)
    stages = blocks.num_stages
    weights, gradients, optimizer = states(problem, batch, parameters, groups)

    shapes = block_shapes(model)
    parts = {block: activation_parts(problem, batch, block, shape) for block, shape in shapes.items()}
    kept = {block: kept_bytes(problem, batch, held) for block, held in parts.items()}
    repeat = np.zeros(len(batch))
    for layer in set(model.layers):
        whole = add_up(whole_bytes(parts[block]) - stored_bytes(problem, batch) for block in layer)
        repeat = np.maximum(repeat, whole)

    logits = blocks.at_last(_head_bytes(problem, batch))
    transients = _transient_bytes(problem, batch, blocks, repeat)
    # The backward pass of the head is over before that of the last layer begins: the larger of the two counts.
    terms = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": _activations(problem, batch, blocks, kept),
        "logits": logits,
        "transients": transients if framework.memory.keeps_logits else np.maximum(transients - logits, 0.0),
        "wgrad_buffers": wgrad_buffer_bytes(problem, batch, blocks),
    }
    freed = terms["activations"] + logits + terms["transients"]
    terms["gathered"] = _gathered_bytes(problem, batch, parameters, groups, freed)
    # Gradients that are reduced during backward passes have their bucket beside the activations.
    terms["gathered"] += (framework.memory.bucket_bytes * (batch.sharding >= Sharding.ZERO2.code))[:, None]
    moments: Moments = {}
    if framework.memory.fsdp2_states:
        held = _held(problem, batch, blocks, parameters, groups, kept, repeat)
        pipelined = stages > 1
        moments = stage_terms(_held_by_stage(problem, batch, blocks, held, kept)) if pipelined else pass_terms(held)
        terms |= at_peak(moments)
    passes = add_up(terms[name] for name in PASS_TERMS)
    update = _update_bytes(problem, batch, parameters, groups)
    terms["update"] = np.maximum(update - passes, 0.0)
    terms["fragmentation"] = (framework.memory.reserved_factor - 1.0) * add_up(terms.values())
    cached, at_end = cached_bytes(problem, batch, blocks, parameters.dense + parameters.expert, groups.shard.size)
    terms["cached"] = CACHED_SHARE * cached
    terms["communicators"] = blocks.at_all(communicator_bytes(problem, groups))
    terms["context"] = np.full_like(cached, framework.memory.fixed_bytes)
    spare = at_end + framework.memory.reserved_factor * np.minimum(update, passes)
    return StageMemory(
        terms=terms,
        reserved_bytes=add_up(terms.values()),
        pass_spare_bytes=(1.0 - CACHED_SHARE) * cached,
        step_spare_bytes=spare,
        update_bytes=update,
        moments=moments,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of every pipeline rank: arrays of shape (plans, stages), in bytes.

    `terms` are those of `MEMORY_TERMS` at the moment when most is needed: allocations with their fragmentation, context
    and communication buffers.  Beyond that the allocator keeps, on a device with room, blocks of freed tensors that
    later ones do not fit into: `pass_spare_bytes` of tensors of the passes, and `step_spare_bytes`, of activations
    beside the flat tensors of the optimizer's step.
    """

    terms: dict[str, Floats]
    reserved_bytes: Floats  # their sum, what the device has to hold
    pass_spare_bytes: Floats
    step_spare_bytes: Floats
    update_bytes: Floats  # what lives only while the optimizer's step runs
    moments: Moments  # empty where the framework has no model of them

    def logged_bytes(self, problem: Problem) -> Floats:
        """The peak that the framework's log shows, of the worst rank or of rank 0: shape (plans)."""
        framework = problem.framework
        if framework.memory.logs_memory == "allocated":
            per_stage = add_up(self.terms[name] for name in ALLOCATED_TERMS)
        else:
            # Only a full device makes the allocator give blocks back.
            kept = self.reserved_bytes + self.pass_spare_bytes + self.step_spare_bytes
            per_stage = np.minimum(kept, problem.capacity_bytes)
            if framework.memory.logs_memory == "reserved":
                per_stage = per_stage - self.terms["communicators"] - self.terms["context"]
        return per_stage[:, 0] if framework.memory.logs_first_rank else per_stage.max(axis=1)


def peaks(problem: Problem, batch: PlanBatch) -> tuple[Floats, Floats]:
    """(peak that the framework's log shows, most that a rank has to hold) in bytes, without pricing time: (plans)."""
    logged, reserved = np.zeros(len(batch)), np.zeros(len(batch))
    for stages in np.unique(batch.pp):
        where = np.flatnonzero(batch.pp == stages)
        part = batch.take(where)
        blocks = stage_blocks(problem.model, part, int(stages))
        memory = stage_memory(problem, part, blocks, stage_parameters(problem, part, blocks))
        logged[where] = memory.logged_bytes(problem)
        reserved[where] = memory.reserved_bytes.max(axis=1)
    return logged, reserved


def host_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters) -> Floats:
    """Host memory that a node needs at most: shape (plans).

    Processes, an offloaded optimizer with the gradients that it reads, and the copy of weights and optimizer that a
    checkpoint stages in host memory, of which every replica of a parameter saves its part (Megatron-LM
    core/optimizer/cpu_offloading/hybrid_optimizer.py, core/dist_checkpointing/strategies/filesystem_async.py).
    """
    framework, groups = problem.framework, process_groups(batch)
    on_host = (batch.offload == Offload.OPTIMIZER.code)[:, None]
    offloaded = own_parameters(batch, parameters) * on_host
    offloaded = offloaded * (framework.memory.bytes_per_optimizer_state + framework.memory.bytes_per_grad)
    dense_copies, expert_copies = groups.dense_copies.size[:, None], groups.expert_copies.size[:, None]
    saved = parameters.dense / dense_copies + parameters.expert / expert_copies
    staged = saved * (framework.memory.bytes_per_weight + framework.memory.bytes_per_optimizer_state)
    devices = np.minimum(problem.cluster.devices_per_node, batch.num_devices)
    return devices * (HOST_PROCESS_BYTES + (offloaded + staged).max(axis=1))
