"""What do parts of a training step take whose price no sum of kernels shows: hooks, copies and waits on the host?

`closed-loop` 3: sums of kernels and collectives leave out 10 to 40 % of FSDP2's time on small models.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from profiler.collectives import Groups
from profiler.kernels import Maker, Run, layer

UNITS = frozenset({"sharded_layer"})


def build_sharded_layer(shape: tuple[int, ...], maker: Maker, groups: Groups) -> Run | None:
    """Forward and backward of one layer under FSDP2, fp32 weights sharded over a group and computed with in `maker`'s
    type; None where this rank stands by.
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
