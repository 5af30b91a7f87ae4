"""Memory of the training states: weights, gradients and optimizer states, under each plan's sharding."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats
from autoplan.cost.kernels.sizes import NARROW_BYTES, scales_tiles
from autoplan.cost.network.process_groups import ProcessGroups
from autoplan.cost.parameters import (
    StageParameters,
    spread_bytes,
)
from autoplan.cost.state_types import (
    HALF_BYTES,
    WIDE_BYTES,
    accumulator_bytes,
    grad_bytes,
    more_bytes_of_ends,
    optimizer_bytes,
    parameters_on_host,
    share_on_host,
    weight_bytes,
)
from autoplan.spec.enums import Precision, Sharding
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem


class StateBytes(NamedTuple):
    """Bytes of the training states on a rank of every stage: shape (plans, stages)."""

    weights: Floats
    gradients: Floats
    optimizer: Floats


def states(problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups) -> StateBytes:
    """Training states under each plan's sharding; experts are sharded over their own group (`modelling` B1)."""
    framework = problem.framework
    sharding = batch.sharding
    zero1 = sharding >= Sharding.ZERO1.code
    # A buffer that accumulates gradients of several micro-batches before their reduction is unsharded.
    reduces = framework.network.zero2_reduces_every_microbatch | (batch.num_microbatches == 1)
    zero2 = (sharding > Sharding.ZERO2.code) | ((sharding == Sharding.ZERO2.code) & reduces)
    zero3 = sharding >= Sharding.ZERO3.code
    spread = partial(spread_bytes, parameters.trained, groups)
    fp16 = batch.precision == Precision.FP16.code
    copied = _reads_copies(problem, batch)
    is_sharded = zero1 if framework.memory.fsdp2_states else zero3 | copied
    weights = kept_weight_bytes(problem, batch, parameters, groups, is_sharded)
    weights = weights + _copy_bytes(problem, batch, parameters, groups) * copied[:, None]
    weights = weights + _narrow_weight_bytes(problem, batch, parameters)
    if (has_copy := batch.secondary_shard > 1).any():  # of all weights in 16 bits, trained or not
        full_bytes = (parameters.dense + parameters.expert) * problem.training.element_bytes
        weights = weights + full_bytes * (has_copy * zero3 / batch.secondary_shard)[:, None]
    per_grad = grad_bytes(problem, batch)
    gradients = spread(per_grad, zero2)
    accumulator, on_host = accumulator_bytes(problem, batch), share_on_host(batch)
    # What is reduced, or copied to the host, is added to the accumulators and given back (DeepSpeed runtime/zero).
    is_replaced = framework.memory.frees_accumulated_grads | zero2 | (on_host > 0.0)
    gradients += spread(np.where(accumulator > 0.0, accumulator - per_grad * is_replaced, 0.0), zero2)
    buckets = (sharding == Sharding.NONE.code) & (batch.dp > 1)
    if framework.network.reduce_bucket_bytes:
        gradients += spread(HALF_BYTES, zero1) * buckets[:, None]
    if framework.memory.offloads_grads:
        gradients *= (1.0 - on_host * zero3)[:, None]
    stays = ~parameters_on_host(batch)[:, None]
    weights, gradients = weights * stays, gradients * stays
    state_bytes = optimizer_bytes(problem, batch)
    # Offloaded states leave at most their own size on the device, which matters for small optimizers.
    kept_bytes = np.minimum(framework.memory.bytes_per_state_kept_on_device, state_bytes)
    device_bytes = (1.0 - on_host) * state_bytes + on_host * kept_bytes
    optimizer = spread(device_bytes, zero1)
    if more := more_bytes_of_ends(problem):
        ends = parameters.trained.ends
        alone = StageParameters(dense=ends, expert=np.zeros_like(ends), ends=ends)
        optimizer = optimizer + spread_bytes(alone, groups, (1.0 - on_host) * more, zero1)
    if framework.memory.fp16_unscaled_grads == "kept":
        optimizer += spread(WIDE_BYTES, zero1) * (fp16 * (1.0 - on_host))[:, None]
    return StateBytes(weights, gradients, optimizer)


def _reads_copies(problem: Problem, batch: PlanBatch) -> Bools:
    """Return which plans shard the weights that the optimizer updates, and gather all of them for both passes.

    zero2 of FSDP (SHARD_GRAD_OP; reshard_after_forward = never), whose weights have no other copy.
    """
    memory = problem.framework.memory
    gathers = memory.keeps_main_weights and not (memory.fsdp2_states or memory.is_jax)
    return gathers & (batch.sharding == Sharding.ZERO2.code)


def _copy_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups) -> Floats:
    """Bytes of gathered weights of a rank in the type of the passes, frozen ones as they are stored: (plans, stages).

    A shard group of one rank needs no copy but to cast.
    """
    element, trained, frozen = problem.training.element_bytes, parameters.trained, parameters.frozen_bytes
    casts = weight_bytes(problem, batch) > element
    dense, expert = element * trained.dense, element * trained.expert
    if frozen is not None:
        dense, expert = dense + frozen.dense, expert + frozen.expert
    dense_copied, expert_copied = (casts | (size > 1) for size in (groups.shard.size, groups.expert_shard.size))
    return dense * dense_copied[:, None] + expert * expert_copied[:, None]


def kept_weight_bytes(
    problem: Problem, batch: PlanBatch, parameters: StageParameters, groups: ProcessGroups, is_sharded: Bools
) -> Floats:
    """Bytes of all weights of a rank as stored, including frozen ones and a reference model: (plans, stages)."""
    per_weight = weight_bytes(problem, batch)
    weights = spread_bytes(parameters.trained, groups, per_weight, is_sharded)
    if parameters.frozen_bytes is not None:
        weights = weights + spread_bytes(parameters.frozen_bytes, groups, 1.0, is_sharded)
    if problem.training.holds_reference:  # created and sharded like the model (trl, create_reference_model)
        weights = weights + spread_bytes(parameters, groups, per_weight, is_sharded)
    return weights


def _narrow_weight_bytes(problem: Problem, batch: PlanBatch, parameters: StageParameters) -> Floats:
    """Bytes of quantised weight copies, kept from the first micro-batch to the last: (plans, stages).

    Hopper multiplies 8-bit matrices in one layout only, and block scales run along one dimension, so the data gradient
    needs its own copy; on Blackwell one 8-bit copy with one scale serves both (Transformer Engine module/base.py
    get_weight_workspace), but blockwise scales are those of MXFP8 there.  Copies of weights that are gathered for every
    pass are not kept.  If the quantised copies are the only weights, the bytes of 16-bit weights are subtracted, and
    frozen ones may have no second copy.
    """
    if not problem.framework.memory.keeps_narrow_copies:
        return np.zeros_like(parameters.dense)
    has_one_layout = problem.cluster.device.generation == "blackwell"
    copies = {name: size * (1.0 if name == "fp8" and has_one_layout else 2.0) for name, size in NARROW_BYTES.items()}
    per_weight = np.array([copies.get(precision, 0.0) for precision in Precision])[batch.precision]
    per_weight = np.where(scales_tiles(batch), 2.0 * NARROW_BYTES["mxfp8" if has_one_layout else "fp8"], per_weight)
    per_weight = per_weight - np.where(batch.narrow_params & (per_weight > 0.0), weight_bytes(problem, batch), 0.0)
    per_weight = np.where(batch.sharding >= Sharding.ZERO3.code, 0.0, per_weight)
    narrow = (parameters.dense - parameters.ends + parameters.expert) * per_weight[:, None]
    if parameters.only_trained is None or has_one_layout or problem.framework.memory.keeps_frozen_transposes:
        return narrow
    trained, is_alone = parameters.only_trained, batch.narrow_params & (batch.precision == Precision.FP8.code)
    frozen = parameters.dense - parameters.ends + parameters.expert - (trained.dense - trained.ends + trained.expert)
    return narrow - frozen * NARROW_BYTES["fp8"] * is_alone[:, None]
