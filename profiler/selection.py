"""Selection of the measurements for a timing table, from imported kernels and from disturbed records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autoplan.profiler.protocol import Rules
from autoplan.profiler.record import Status
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import TRAINER_UNITS, Operation
from autoplan.topology.cluster import DeviceSpec

# FlashAttention kernels used in training, by generation; on Blackwell training uses cuDNN kernels, which the tables
# lack, so the fastest kernels written for it are used.
FLASH_KERNELS: dict[str, tuple[str, ...]] = {
    "ampere": ("flash_attention", "vllm_flash_attn"),
    "hopper": ("fa3",),
    "ada": ("vllm_flash_attn_fa2",),
    "blackwell": ("trtllm_mha", "flashinfer", "vllm_flashinfer", "torch_flow", "vllm_flashinfer_trtllmprefill"),
}
EXPERTS_KERNEL = "moe_torch_flow_cutlass balanced"
COLLECTIVES_KERNEL = "NCCL"
MIN_GEMM = (128, 256, 256)  # minimum m, n and k of GEMMs in training

MAX_LOAD = 0.5  # maximum share of the machine used by other load
DISTURBED: tuple[Status, ...] = ("unstable", "contaminated")
_LOAD = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) %")  # format of the timer; imported records may contain any text


def may_stand_in(operation: Operation, status: Status, conditions: Mapping[str, str]) -> bool:
    """Return whether a disturbed record may be used if there is no clean one (of several, the median one).

    This holds for a median that has not settled; for a device in a slow phase, as these also occur in training; and for
    CPU time, which other load increases only partly, whereas a datasheet is off by factors.  Wall-clock times with
    other load only count for units of the trainer, up to `MAX_LOAD`: such times were up to 50 % too long, but the sums
    of kernels used instead were five times too short.
    """
    if status == "contaminated" and conditions.get("clock") != "cpu time":
        load = _LOAD.fullmatch(conditions.get("other_load", ""))
        max_load = MAX_LOAD if operation in TRAINER_UNITS else Rules().most_foreign
        return load is not None and float(load[1]) <= 100 * max_load
    return status in DISTURBED


def for_training(measurements: Iterable[Measurement], device: DeviceSpec) -> list[Measurement]:
    """Return the `measurements` of `device` that a training table uses, with one kernel per shape of attention.

    These are GEMMs of training sizes from all libraries; the fastest flash kernel; experts with balanced routing; and
    NCCL, whose times only depend on the bytes.
    """
    selected = []
    fastest: dict[tuple[str, tuple[int, ...]], Measurement] = {}
    for measurement in measurements:
        if measurement.operation == "gemm":
            if all(size >= least for size, least in zip(measurement.shape, MIN_GEMM, strict=True)):
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
