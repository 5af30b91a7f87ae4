"""Are the kernels that training runs chosen from all that were measured?"""

from __future__ import annotations

from typing import Any

from autoplan.profiler.selection import EXPERTS_KERNEL, for_training
from autoplan.readers.cluster import load_cluster
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation

H100 = load_cluster("h100-sxm:1x8").device
B200 = load_cluster("b200:1x8").device


def measured(
    operation: Operation, shape: tuple[int, ...], kernel: str, seconds: float = 1.0, **more: Any
) -> Measurement:
    fields = {"dtype": "bf16", "device": "lab"} | more
    return Measurement(operation=operation, shape=shape, kernel=kernel, seconds=seconds, **fields)


def test_products_of_training_are_kept_of_every_library() -> None:
    small = [measured("gemm", shape, "a") for shape in ((64, 256, 256), (128, 128, 256), (128, 256, 64))]
    kept = [measured("gemm", (128, 256, 256), library) for library in ("a", "b")]
    assert for_training([*small, *kept], H100) == kept


def test_the_fastest_flash_kernel_of_the_generation_is_taken() -> None:
    shape, other = (1, 4096, 32, 8, 128, 0), (2, 4096, 32, 8, 128, 0)
    timings = [
        measured("attention", shape, "triton", 0.1),
        measured("attention", shape, "flashinfer", 3.0),
        measured("attention", shape, "trtllm_mha", 2.0),
        measured("attention", other, "trtllm_mha", 5.0),
        measured("attention", shape, "trtllm_mha", 1.0, dtype="fp8"),
        measured("attention", shape, "fa3", 0.5),
    ]
    assert [timing.seconds for timing in for_training(timings, B200)] == [2.0, 5.0, 1.0]
    assert [timing.kernel for timing in for_training(timings, H100)] == ["fa3"]
    assert for_training(timings, load_cluster("mi300x:1x8").device) == []


def test_experts_are_balanced_and_collectives_those_of_nccl() -> None:
    experts, group = (1024, 2048, 768, 8, 128, 1, 8), (8, 8, 1, 2**20)
    timings = [
        measured("experts", experts, "moe_torch_flow_cutlass power_law_1.2"),
        measured("experts", experts, EXPERTS_KERNEL),
        measured("all_reduce", group, "TRTLLM"),
        measured("all_reduce", group, "NCCL", dtype="fp16"),
    ]
    assert [timing.kernel for timing in for_training(timings, H100)] == [EXPERTS_KERNEL, "NCCL"]
