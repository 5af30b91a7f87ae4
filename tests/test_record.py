from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.units import MAX_TEXT, cleaned
from autoplan.profiler.record import Fingerprint, Record

LAB = Fingerprint(device="h100-sxm", memory_bytes=80 * 2**30, torch="2.13.0", runtime="cuda 13.0")
GEMM = Record(fingerprint=LAB, operation="gemm", shape=(4096, 4096, 4096), dtype="bf16", samples_s=(3.0, 1.0, 2.0))


def test_the_median_of_the_samples_counts() -> None:
    assert GEMM.seconds == 2.0


def test_who_measured_where_and_when_is_no_part_of_the_key() -> None:
    signed = replace(GEMM, measured_by="ada", host="node7", measured_at="2026-11-21T12:00:00Z")
    assert signed.key == GEMM.key


@pytest.mark.parametrize(
    "change",
    [
        {"samples_s": (3.0, 1.0, 2.5)},
        {"shape": (4096, 4096, 8192)},
        {"operation": "wgrad"},
        {"dtype": "fp8"},
        {"kernel": "cublas"},
        {"mode": "burst"},
        {"status": "unstable"},
        {"conditions": {"beside": "gemm"}},
        {"fingerprint": replace(LAB, torch="2.14.0")},
    ],
)
def test_everything_that_decides_a_time_is_part_of_the_key(change: dict[str, object]) -> None:
    assert replace(GEMM, **change).key != GEMM.key  # type: ignore[arg-type]


def test_a_record_read_back_has_the_same_key() -> None:
    altered = replace(GEMM, conditions={"power": "650 W", "clock": "1755 MHz"}, samples_s=(1, 0.1 + 0.2))
    assert msgspec.json.decode(msgspec.json.encode(altered), type=Record).key == altered.key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (1, 2)}, "gemm needs m, n, k"),
        ({"shape": (1, 2, -3)}, "all positive"),
        ({"operation": "sort"}, "operation 'sort' is unknown"),
        ({"samples_s": ()}, "has no samples"),
        ({"samples_s": (float("nan"),)}, "no time in seconds"),
        ({"samples_s": (0.0,)}, "no time in seconds"),
        ({"samples_s": (1.0,) * 10_001}, "at most 10000"),
        ({"status": "fine"}, "status 'fine' is unknown"),
        ({"mode": "quick"}, "mode 'quick' is unknown"),
        ({"kernel": "a\x1b[2Jb"}, "control characters"),
        ({"reason": "x" * (MAX_TEXT + 1)}, "longer than"),
    ],
)
def test_what_is_no_measurement_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(GEMM, **change)  # type: ignore[arg-type]


def test_a_failed_record_needs_no_samples() -> None:
    failed = replace(GEMM, samples_s=(), status="failed", reason="out of memory")
    assert failed.key != GEMM.key
    assert failed.seconds != failed.seconds


@given(st.text())
def test_cleaned_text_is_accepted(text: str) -> None:
    assert replace(GEMM, kernel=cleaned(text)).kernel == cleaned(text)
