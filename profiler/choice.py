"""Which of the kernels that others measured does training run?"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.cluster import DeviceSpec
from autoplan.timing import Measurement

# FlashAttention as training runs it, by generation; on Blackwell, where its kernels are cuDNN's and not in the tables,
# the fastest of those written for it.
FLASH_KERNELS = {
    "ampere": ("flash_attention", "vllm_flash_attn"),
    "hopper": ("fa3",),
    "ada": ("vllm_flash_attn_fa2",),
    "blackwell": ("trtllm_mha", "flashinfer", "vllm_flashinfer", "torch_flow", "vllm_flashinfer_trtllmprefill"),
}
EXPERTS_KERNEL = "moe_torch_flow_cutlass balanced"
COLLECTIVES_KERNEL = "NCCL"
LEAST_GEMM = (128, 256, 256)  # m, n and k of products that training has


def for_training(measurements: Iterable[Measurement], device: DeviceSpec) -> list[Measurement]:
    """The `measurements` of `device` as a table of training takes them, one kernel for each shape of attention.

    Products of training's sizes, of all libraries; the fastest flash kernel; experts with balanced routing; NCCL, in
    whose times only the bytes count.
    """
    kept = []
    fastest: dict[tuple[str, tuple[int, ...]], Measurement] = {}
    for one in measurements:
        if one.operation == "gemm":
            if all(size >= least for size, least in zip(one.shape, LEAST_GEMM, strict=True)):
                kept.append(one)
        elif one.operation == "attention":
            shape = one.dtype, one.shape
            if one.kernel in FLASH_KERNELS.get(device.generation, ()) and (
                shape not in fastest or one.seconds < fastest[shape].seconds
            ):
                fastest[shape] = one
        elif one.kernel == (EXPERTS_KERNEL if one.operation == "experts" else COLLECTIVES_KERNEL):
            kept.append(one)
    return [*kept, *fastest.values()]
