"""Selection of the measurements that a table takes: of the kernels that others measured, and of disturbed ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autoplan.profiler.protocol import Rules
from autoplan.profiler.record import Status
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import TRAINER_UNITS, Operation
from autoplan.topology.cluster import DeviceSpec

# FlashAttention as training runs it, by generation; on Blackwell, where its kernels are cuDNN's and not in the tables,
# the fastest of those written for it.
FLASH_KERNELS: dict[str, tuple[str, ...]] = {
    "ampere": ("flash_attention", "vllm_flash_attn"),
    "hopper": ("fa3",),
    "ada": ("vllm_flash_attn_fa2",),
    "blackwell": ("trtllm_mha", "flashinfer", "vllm_flashinfer", "torch_flow", "vllm_flashinfer_trtllmprefill"),
}
EXPERTS_KERNEL = "moe_torch_flow_cutlass balanced"
COLLECTIVES_KERNEL = "NCCL"
LEAST_GEMM = (128, 256, 256)  # m, n and k of products that training has

MOST_LOAD = 0.5  # share of the machine
DISTURBED: tuple[Status, ...] = ("unstable", "contaminated")
_LOAD = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) %")  # as the timer tells it; a record from elsewhere may hold any words


def may_stand_in(operation: Operation, status: Status, conditions: Mapping[str, str]) -> bool:
    """Tell whether a record that is not clean serves where there is no clean one: of several the middle one.

    A median that has not settled does; what a device took in a slow phase, since training meets such phases too; and
    CPU time, which other load stretches by a part of itself, where a datasheet is off by factors.  A clock on the wall
    that ran beside other load counts for units of the trainer alone, up to `MOST_LOAD`: times were up to a half
    too long there, and five times too short from sums of kernels in their place.
    """
    if status == "contaminated" and conditions.get("clock") != "cpu time":
        load = _LOAD.fullmatch(conditions.get("other_load", ""))
        max_load = MOST_LOAD if operation in TRAINER_UNITS else Rules().most_foreign
        return load is not None and float(load[1]) <= 100 * max_load
    return status in DISTURBED


def for_training(measurements: Iterable[Measurement], device: DeviceSpec) -> list[Measurement]:
    """The `measurements` of `device` as a table of training takes them, one kernel for each shape of attention.

    Products of training's sizes, of all libraries; the fastest flash kernel; experts with balanced routing; NCCL, in
    whose times only the bytes count.
    """
    selected = []
    fastest: dict[tuple[str, tuple[int, ...]], Measurement] = {}
    for measurement in measurements:
        if measurement.operation == "gemm":
            if all(size >= least for size, least in zip(measurement.shape, LEAST_GEMM, strict=True)):
                selected.append(measurement)
        elif measurement.operation == "attention":
            shape = measurement.dtype, measurement.shape
            if measurement.kernel in FLASH_KERNELS.get(device.generation, ()) and (
                shape not in fastest or measurement.seconds < fastest[shape].seconds
            ):
                fastest[shape] = measurement
        elif measurement.kernel == (EXPERTS_KERNEL if measurement.operation == "experts" else COLLECTIVES_KERNEL):
            selected.append(measurement)
    return [*selected, *fastest.values()]
