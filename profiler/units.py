"""What do parts of a training step take whose price no sum of kernels shows: hooks, copies and waits on the host?

`closed-loop` 3: sums of kernels and collectives leave out 10 to 40 % of FSDP2's time on small models, and a
millisecond or more of every action of torch's pipelines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from autoplan.timing import Operation
from profiler.collectives import Groups
from profiler.kernels import layer
from profiler.maker import Maker, Run

# How each runs: part of what is measured.
UNITS: dict[Operation, str] = {"sharded_layer": "fsdp2", "pipeline_actions": "torch 1f1b"}


def build(operation: Operation, shape: tuple[int, ...], maker: Maker, groups: Groups) -> Run | None:
    """A call that runs the unit once; None where this rank stands by.  All ranks of the job call it."""
    if operation == "sharded_layer":
        return _sharded_layer(shape, maker, groups)
    return _pipeline_actions(shape, maker, groups)


def _sharded_layer(shape: tuple[int, ...], maker: Maker, groups: Groups) -> Run | None:
    """Forward and backward of one layer under FSDP2, fp32 weights sharded over a group and computed with in `maker`'s
    type.
    """
    *sizes, num_devices, devices_per_node = shape
    member = groups.own((num_devices, devices_per_node, 1, 0))
    if member is None:
        return None
    group, _ = member
    mesh = DeviceMesh.from_group(group, maker.device.type)
    policy = MixedPrecisionPolicy(param_dtype=maker.number, reduce_dtype=torch.float32)
    module, x = layer(maker, *sizes, 1)
    fully_shard(module.float(), mesh=mesh, mp_policy=policy)  # in place
    gradient = torch.randn_like(x)

    def run() -> None:
        module(x).backward(gradient)
        module.zero_grad()
        x.grad = None

    return run


class _Scale(torch.nn.Module):
    """The least that a stage can compute."""

    def __init__(self, maker: Maker) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(maker.normal(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _pipeline_actions(shape: tuple[int, ...], maker: Maker, groups: Groups) -> Run | None:
    """A 1F1B step of stages that multiply one number: what is left is what the runtime does for every action."""
    num_micro_batches, num_devices, devices_per_node = shape
    member = groups.own((num_devices, devices_per_node, 1, 0))
    if member is None:
        return None
    group, ranks = member
    place = ranks.index(groups.rank)
    stage = PipelineStage(_Scale(maker).to(maker.device), place, num_devices, maker.device, group=group)
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=lambda output, target: (output - target).sum())
    numbers = maker.normal(num_micro_batches, 1)
    # The first stage is given inputs, the last one targets.
    inputs = (numbers,) if place == 0 else ()
    target = numbers if place == num_devices - 1 else None
    return lambda: schedule.step(*inputs, target=target)
