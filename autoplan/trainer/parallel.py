"""Transformer distributed over ranks according to a plan, using only torch's own parallelism.

Tensor and sequence parallelism use DTensor styles, unsharded and sharded states `replicate` and `fully_shard`,
pipelines `torch.distributed.pipelining`, recomputation `checkpoint_wrapper`.  The order matters: a checkpoint around a
layer would hide its parts from the styles (`closed-loop` 1, trap 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from autoplan.base.errors import AutoplanError
from autoplan.spec.axes import V_SHAPED
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.trainer.transformer import Layer, MoE, Norm, Transformer, initialise

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
_ONE_STAGE = ("gpipe", "1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Process groups of a plan from the view of one rank; None for a dimension with one rank."""

    world: DeviceMesh | None
    tp: DeviceMesh | None
    dp: DeviceMesh | None  # two-dimensional if states are sharded over only a part of the replicas
    pp: DeviceMesh | None
    dp_rank: int
    pp_rank: int


ALONE = Grid(world=None, tp=None, dp=None, pp=None, dp_rank=0, pp_rank=0)


def make_grid(plan: ParallelPlan, device: torch.device, *, num_beside: int = 1) -> Grid:
    """Create the mesh: tp innermost, pipelines outermost or, with `tp-cp-ep-pp-dp`, inside data parallelism."""
    replicas = {"replicate": plan.dp_replicate, "shard": plan.dp_shard}
    sizes = {"pp": plan.pp, **replicas} if plan.rank_order == "tp-cp-ep-dp-pp" else {**replicas, "pp": plan.pp}
    sizes["tp"] = plan.tp
    if num_beside > 1:
        sizes = {"beside": num_beside, **sizes}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    places = {name: mesh.get_local_rank(name) for name in sizes}
    dp = None
    if plan.dp > 1:
        is_hybrid = plan.sharding != "none" and plan.dp_replicate > 1 and plan.dp_shard > 1
        dp = mesh["replicate", "shard"] if is_hybrid else mesh["replicate", "shard"]._flatten("dp")
    return Grid(
        world=mesh,
        tp=mesh["tp"] if plan.tp > 1 else None,
        dp=dp,
        pp=mesh["pp"] if plan.pp > 1 else None,
        dp_rank=places["replicate"] * plan.dp_shard + places["shard"],
        pp_rank=places["pp"],
    )


def chunks_of(plan: ParallelPlan, pp_rank: int) -> list[int]:
    """Return the chunks on one rank, in the order in which a micro-batch passes through them."""
    if plan.schedule in V_SHAPED:
        return [pp_rank, 2 * plan.pp - 1 - pp_rank]
    return [pp_rank + plan.pp * turn for turn in range(plan.vp)]


def build(
    model: ModelSpec, plan: ParallelPlan, grid: Grid, *, seq_len: int, dtype: str, device: torch.device, seed: int
) -> list[Transformer]:
    """Return the chunks of this rank, distributed according to the plan."""
    counts = chunk_layers(plan, model.num_layers)
    parts = []
    for at in chunks_of(plan, grid.pp_rank):
        with torch.device("meta"):
            part = Transformer(
                model, seq_len, sum(counts[:at]), counts[at], is_first=at == 0, is_last=at == len(counts) - 1
            )
        spread(part, plan, grid, dtype=dtype, device=device, seed=seed)
        parts.append(part)
    return parts


def spread(part: Transformer, plan: ParallelPlan, grid: Grid, *, dtype: str, device: torch.device, seed: int) -> None:
    """Initialise a chunk on the meta device with its rank's weights, layer by layer to save memory."""
    if grid.tp is not None:
        _cut(part, grid.tp, sp=plan.sp)
    _recompute(part, plan)
    frees = plan.sharding == "zero3" and plan.pp == 1  # a pipeline stage keeps gathered weights for the whole step
    for name, layer in part.layers.items():
        initialise(layer, device, seed, f"layers.{name}")
        share(layer, plan, grid, dtype, frees=frees)
    initialise(part, device, seed)
    part.tie()
    share(part, plan, grid, dtype)


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def _cut(part: Transformer, mesh: DeviceMesh, *, sp: bool) -> None:
    """Split attention by heads, MLPs and embedding tables by columns and rows; other weights are replicated."""
    between = Shard(1) if sp else Replicate()  # layout of activations between blocks
    start = PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None))
    styles: dict[str, ParallelStyle] = {}
    for at, layer in part.layers.items():
        assert isinstance(layer, Layer)
        styles[f"layers.{at}.attention"] = start
        columns, rows = ["attention.q", "attention.k", "attention.v"], ["attention.out"]
        if not isinstance(layer.mlp, MoE):
            styles[f"layers.{at}.mlp"] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            )
            columns += ["mlp.up", *(["mlp.gate"] if layer.mlp.gate is not None else [])]
            rows.append("mlp.down")
        styles |= {f"layers.{at}.{name}": ColwiseParallel() for name in columns}
        styles |= {f"layers.{at}.{name}": RowwiseParallel(output_layouts=between) for name in rows}
    if part.embedding is not None:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if part.head is not None:
        styles["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(part, mesh, styles)
    part.tie()
    part.sums, part.start = sp, part.seq_len // mesh.size() * mesh.get_local_rank() if sp else 0
    for name, module in part.named_modules():
        if isinstance(module, Norm | MoE):
            # Heads are split over the group, with or without sequence parallelism.
            module.sums = sp or name.endswith(("q_norm", "k_norm"))
        for key, weight in list(module.named_parameters(recurse=False)):
            if not isinstance(weight, DTensor):
                module.register_parameter(key, nn.Parameter(distribute_tensor(weight, mesh, [Replicate()])))
    cut = [name for name in styles if not isinstance(part.get_submodule(name), nn.Linear | nn.Embedding)]
    for name in styles.keys() - set(cut):
        weight = part.get_parameter(f"{name}.weight")
        if not isinstance(weight, DTensor) or not weight.placements[0].is_shard():
            raise AutoplanError(f"{name} was not split over tp {mesh.size()}")


# -- recomputation ----------------------------------------------------------------------------------------------------


def _recompute(part: Transformer, plan: ParallelPlan) -> None:
    def wrapped(module: nn.Module) -> nn.Module:
        return checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False)

    if plan.recompute == "full":
        for at in list(part.layers)[: plan.recompute_num_layers]:
            part.layers[at] = wrapped(part.layers[at])
    elif plan.recompute == "selective":
        for layer in part.layers.values():
            assert isinstance(layer, Layer)
            if "core_attn" in plan.recompute_modules:
                layer.attention.core = wrapped(layer.attention.core)  # type: ignore[assignment]
            if ("moe" if isinstance(layer.mlp, MoE) else "mlp") in plan.recompute_modules:
                layer.mlp = wrapped(layer.mlp)  # type: ignore[assignment]


# -- data parallelism -------------------------------------------------------------------------------------------------


def share(unit: nn.Module, plan: ParallelPlan, grid: Grid, dtype: str, *, frees: bool = False) -> None:
    """Make an FSDP unit of a layer or of the rest; weights are fp32, computation and communication as planned."""
    if grid.dp is None and dtype == "fp32":
        return
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    assert grid.world is not None
    mesh = grid.dp if grid.dp is not None else grid.world["replicate"]
    if plan.sharding == "none" or plan.dp_shard == 1:
        replicate(unit, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)


# -- passes -----------------------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]


def passes(
    parts: Sequence[nn.Module],
    plan: ParallelPlan,
    grid: Grid,
    device: torch.device,
    loss_of: Loss,
    micro_batches: Sequence[tuple[int, int]] = (),
    before_last: Callable[[], object] = lambda: None,
) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Return a function that runs both passes of a step for this replica's (inputs, targets) and returns the losses.

    Gradients are means over the sequences of all replicas; `micro_batches` are (sequences, number) of each replica's if
    they differ.  Losses are those of the micro-batches; ranks without the head return none.  Without stages,
    `before_last` is called before the last micro-batch.
    """
    pairs = micro_batches or ((plan.micro_batch, plan.num_microbatches),) * plan.dp
    size, number = pairs[grid.dp_rank]
    weight = plan.dp * size / sum(size * number for size, number in pairs)  # of a micro-batch in the mean over replicas
    if grid.pp is None:
        return _accumulating(parts[0], plan, loss_of, weight, size, before_last)
    stages = [
        PipelineStage(part, at, plan.pp * plan.vp, device, group=grid.pp.get_group())
        for at, part in zip(chunks_of(plan, grid.pp_rank), parts, strict=True)
    ]
    make_schedule = _SCHEDULES[plan.schedule]

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return weight * loss_of(output, target)

    schedule = make_schedule(
        stages[0] if plan.schedule in _ONE_STAGE else stages,
        number,
        loss_fn=weighted,
        scale_grads=False,  # it would scale after the reduction, by this replica's number of micro-batches
    )
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)

    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        schedule.step(
            *((inputs,) if has_first else ()),
            target=targets if has_last else None,
            losses=losses if has_last else None,
            return_outputs=False,
        )
        return [loss / weight for loss in losses]

    return run


def announce(unit: nn.Module, plan: ParallelPlan, *, is_last: bool) -> None:
    """Set whether the next backward pass of a unit is the last one of the step, in which gradients are reduced."""
    if isinstance(unit, FSDPModule):
        unit.set_is_last_backward(is_last)
        unit.set_requires_gradient_sync(is_last or plan.sharding in ("zero2", "zero3"))
        unit.set_reshard_after_backward(is_last or plan.sharding == "zero3")


def _accumulating(
    part: nn.Module,
    plan: ParallelPlan,
    loss_of: Loss,
    weight: float,
    micro_batch: int,
    before_last: Callable[[], object],
) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def run(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        pairs = list(zip(torch.split(inputs, micro_batch), torch.split(targets, micro_batch), strict=True))
        for at, (x, y) in enumerate(pairs):
            if at == len(pairs) - 1:
                before_last()
            announce(part, plan, is_last=at == len(pairs) - 1)
            loss = loss_of(part(x), y)
            torch.autograd.backward(weight * loss)
            losses.append(loss.detach())
        return losses

    return run
