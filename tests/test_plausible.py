"""Are impossible timings found, and possible ones left alone?"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from autoplan.profiler.record import Record
from autoplan.profiler.store.plausible import implausible
from stores import GEMM, LAB

REDUCE = replace(GEMM, operation="all_reduce", shape=(8, 8, 1, 2**30))


def test_a_record_as_measured_is_plausible() -> None:
    assert implausible(GEMM) == ""


@pytest.mark.parametrize(
    ("seconds", "dtype", "expected"),
    [
        (2 * 4096**3 / 1.05e15, "bf16", ""),  # 989 TFLOP/s of the datasheet, and a little boost
        (2 * 4096**3 / 1.2e15, "bf16", "1,200 TFLOP/s, h100-sxm has 989"),
        (2 * 4096**3 / 1.2e15, "fp8", ""),
        (2 * 4096**3 / 2.3e15, "fp8", "2,300 TFLOP/s, h100-sxm has 1,979"),
        (2 * 4096**3 / 2.0e15, "int8_wo", ""),  # no rate of its own: four times that of 16 bits at most
        (2 * 4096**3 / 4.5e15, "int4", "4,500 TFLOP/s, h100-sxm has 3,958"),
        (2 * 4096**3 / 0.5e15, "fp32", ""),  # as tf32
        (2 * 4096**3 / 0.6e15, "fp32", "600 TFLOP/s"),
    ],
)
def test_products_are_no_faster_than_the_device(seconds: float, dtype: str, expected: str) -> None:
    for operation in ("gemm", "dgrad", "wgrad"):
        reason = implausible(replace(GEMM, operation=operation, dtype=dtype, samples_s=(seconds,)))  # type: ignore[arg-type]
        assert reason.startswith(expected)
        assert bool(reason) == bool(expected)


@pytest.mark.parametrize(
    ("operation", "bytes_per_s", "is_possible"),
    [
        # Through each device of 8: the whole buffer, or 7/8 of it; NVLink carries 450 GB/s each way.
        ("all_reduce", 480e9, True),  # in-network reduction: bus bandwidth 840 GB/s
        ("all_reduce", 500e9, False),
        ("all_gather", 480e9 * 8 / 7, True),
        ("all_gather", 500e9 * 8 / 7, False),
        ("reduce_scatter", 500e9 * 8 / 7, False),
        ("all_to_all", 500e9 * 8 / 7, False),
        ("broadcast", 500e9, False),
        ("send_recv", 500e9, False),
        ("send_recv", 400e9, True),
    ],
)
def test_collectives_are_no_faster_than_the_links(operation: str, bytes_per_s: float, is_possible: bool) -> None:
    collective = replace(REDUCE, operation=operation, samples_s=(2**30 / bytes_per_s,))  # type: ignore[arg-type]
    assert (implausible(collective) == "") == is_possible


def test_devices_that_are_not_shipped_and_cpus_have_no_known_limit() -> None:
    for name in ("NVIDIA H20", "cpu"):
        assert implausible(replace(GEMM, fingerprint=replace(LAB, device=name), samples_s=(1e-6,))) == ""


def test_a_group_of_one_moves_nothing() -> None:
    assert implausible(replace(REDUCE, shape=(1, 1, 1, 2**30), samples_s=(1e-6,))) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples_s": (1e-9,)}, "less than the launch of a kernel"),
        ({"samples_s": (1e-3, 1e-3, 2e-3, 9e-3, 9e-3)}, "spread by 400 %"),
        ({"measured_at": (datetime.now(UTC) + timedelta(days=2)).isoformat()}, "in the future"),
        ({"operation": "all_gather", "shape": (4, 8, 1, 2**20)}, "8 devices in a domain, in a group of 4"),
    ],
)
def test_what_cannot_have_been_measured_is_named(change: dict[str, object], reason: str) -> None:
    assert reason in implausible(replace(GEMM, **change))  # type: ignore[arg-type]


def test_samples_may_spread_where_the_record_says_so_and_windows_may_be_none() -> None:
    wide: Record = replace(GEMM, samples_s=(1e-3, 1e-3, 2e-3, 9e-3, 9e-3), status="unstable")
    assert implausible(wide) == ""
    attention = replace(GEMM, operation="attention", shape=(1, 4096, 32, 8, 128, 0))
    assert implausible(attention) == ""
    assert implausible(replace(GEMM, samples_s=(), status="failed")) == ""


@pytest.mark.parametrize(
    ("flops_per_s", "dtype", "device", "is_possible"),
    [
        (100e12, "fp8", "b200", False),  # a fallback to other units: the datasheet has 4,500
        (1500e12, "fp8", "b200", True),
        (250e12, "bf16", "h100-sxm", True),  # 350 W instead of 700
        (60e12, "bf16", "h100-sxm", False),
        (40e12, "fp32", "h100-sxm", True),  # not as tf32
        (100e12, "int4", "h100-sxm", True),  # no rate of its own
        (1e12, "bf16", "cpu", True),
    ],
)
def test_long_products_are_not_slower_than_a_device_can_be(
    flops_per_s: float, dtype: str, device: str, is_possible: bool
) -> None:
    shape = (16384, 16384, 16384)
    seconds = 2 * 16384**3 / flops_per_s
    product = replace(GEMM, fingerprint=replace(LAB, device=device), shape=shape, dtype=dtype, samples_s=(seconds,))
    assert (implausible(product) == "") == is_possible
    assert implausible(replace(product, status="unstable")) == ""
    tiny = replace(product, shape=(32, 16384, 16384), samples_s=(seconds / 512,))  # waits for memory
    assert implausible(tiny) == ""
