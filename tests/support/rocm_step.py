"""A step of kernels as AMD's profilers record it, and what a reader has to make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.imports import read_source
from autoplan.profiler.imports.traces import is_trace, read_ranks, trace_files

# (name, start, end) in microseconds.
STEP = [
    ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", 1000, 1300),
    ("attn_fwd", 1300, 1400),
    ("ncclDevKernel_Generic(ncclDevComm*)", 1300, 1600),
    ("void at::native::vectorized_elementwise_kernel<4, add>", 1600, 1700),
    ("void multi_tensor_apply_kernel<FusedAdamFunctor>", 1850, 1900),
]
COPY = (1700, 1800)


def assert_read_as_step(path: Path) -> None:
    """Assert that a trace of `STEP` and `COPY` on one device is found, and that every instant of it counts once."""
    assert is_trace(path)
    assert trace_files([path.parent]) == [path]
    (rank,) = read_ranks(path)
    assert {kind: round(1e6 * seconds) for kind, seconds in rank.seconds.items() if seconds} == {
        "gemm": 300, "attention": 100, "optimizer": 50, "kernels": 100, "collectives": 200, "copies": 100,
    }  # fmt: skip
    assert (rank.step_s, rank.idle_s) == pytest.approx((900e-6, 50e-6))
    assert (rank.exposed_s, rank.hidden_s) == pytest.approx((200e-6, 100e-6))
    with pytest.raises(InputError, match="rocprofv3 and rocmProfileData have no kernel shapes"):
        read_source(str(path))
