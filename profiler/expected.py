"""Expected ranks of a cluster, so that measurements can be planned without access to its devices."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from autoplan.profiler.protocol import BESIDE, Hello
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.tasks import TaskKey
from autoplan.spec.operations import (
    COLLECTIVES,
    EXPERTS,
    JOINED_KERNELS,
    NARROW_MODULES,
    PRODUCTS,
    SHAPES,
    TRAINER_UNITS,
    Operation,
)
from autoplan.topology.cluster import ClusterSpec

# Assumed kernels of operations without measurements; a real rank tests them and may use others.
_ATTENTIONS = {"attention": "sdpa flash", "latent_attention": "sdpa cudnn"}
_LIBRARIES = {"nvidia": "nccl", "amd": "rccl", "intel": "hccl", "cpu": "gloo"}


def expected_hello(
    cluster: ClusterSpec,
    machine: Fingerprint | None,
    measured: Collection[TaskKey] = (),
    *,
    dtypes: tuple[str, ...] = (),
    num_nodes: int = 0,
    layer_kernels: str = "trainer",
) -> Hello:
    """Return the first message of ranks on every device of `num_nodes` nodes of a cluster; 0 means all nodes.

    `machine` is the machine whose records are used for the cluster (None without records), and `measured` the keys of
    these records: operations are assumed to run in the same way.  Of whole layers only kernels count whose names begin
    with `layer_kernels`.
    """
    device, nodes = cluster.device, num_nodes or cluster.num_nodes
    dtypes = dtypes or (("fp32",) if device.vendor == "cpu" else ("bf16",))
    kernels: dict[tuple[Operation, str], str] = {}
    windowed: dict[tuple[Operation, str], str] = {}
    for dtype in dtypes:
        for operation in SHAPES:
            kernel = _usual_kernel(operation, dtype, device.vendor)
            if kernel and (operation not in TRAINER_UNITS or kernel.startswith(layer_kernels)):
                kernels[operation, dtype] = kernel
            if operation in ("attention", "attention_backward") and dtype not in NARROW_MODULES:
                windowed[operation, dtype] = "varlen flash"
    for name, shape, dtype, kernel, _ in sorted(measured):
        is_windowed = name.startswith("attention") and shape[-1] > 0
        if dtype in dtypes and (name not in TRAINER_UNITS or kernel.startswith(layer_kernels)):
            (windowed if is_windowed else kernels)[cast(Operation, name), dtype] = kernel.removesuffix(BESIDE)
    return Hello(
        fingerprint=machine
        or Fingerprint(
            device=device.name, memory_bytes=int(device.memory_bytes), devices_per_node=cluster.devices_per_node
        ),
        device_type="cpu" if device.vendor == "cpu" else "cuda",
        hosts=tuple(f"node{at}" for at in range(nodes) for _ in range(cluster.devices_per_node)),
        dtypes=dtypes,
        kernels=kernels,
        windowed=windowed,
        devices_per_domain=cluster.levels[-1].num_devices,
    )


def _usual_kernel(operation: Operation, dtype: str, vendor: str) -> str:
    """Return the usual kernel of an operation in a data type; blank if it does not run."""
    if operation in PRODUCTS:
        narrow = {"gemm": "scaled_mm", "dgrad": "scaled_mm", "wgrad": "scaled_mm + add"}
        wide = {"gemm": "mm", "dgrad": "mm", "wgrad": "addmm" if dtype == "fp32" else "addmm fp32"}
        return "" if dtype == "fp8_delayed" else (narrow if dtype in NARROW_MODULES else wide)[operation]
    if dtype in NARROW_MODULES:
        return ""
    if operation in COLLECTIVES:
        return _LIBRARIES.get(vendor, "nccl")
    if operation in EXPERTS:
        return "grouped_mm"
    if operation in JOINED_KERNELS:
        return ""
    if operation in TRAINER_UNITS:
        return "trainer"
    return _ATTENTIONS.get(operation.removesuffix("_backward"), "torch")
