"""Are the tables of aiconfigurator-core read in SI units, whole, and with one line where they cannot be?"""

from __future__ import annotations

import importlib.util
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.imports.aiconfigurator import default_root, device_of, read_measurements
from autoplan.spec.measurement import Measurement

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COMMON = {"framework": ["SGLang"], "version": ["1"], "kernel_source": ["kernel"], "latency": [0.25]}
GEMM = {**COMMON, "gemm_dtype": ["bfloat16"], "m": [64], "n": [128], "k": [256]}
ATTENTION = {
    **COMMON,
    "attn_dtype": ["bfloat16"],
    "batch_size": [2],
    "isl": [4096],
    "num_heads": [32],
    "num_key_value_heads": [8],
    "head_dim": [128],
}
MOE = {
    **COMMON,
    "moe_dtype": ["fp8"],
    "num_tokens": [4096],
    "hidden_size": [2048],
    "inter_size": [768],
    "topk": [8],
    "num_experts": [128],
    "moe_tp_size": [1],
    "moe_ep_size": [8],
    "distribution": ["balanced"],
}
NCCL = {
    "kernel_source": ["NCCL", "NCCL"],
    "latency": [1.0, 2.0],
    "nccl_dtype": ["half", "int8"],
    "num_gpus": [8, 4],
    "message_size": [1024, 1024],
    "op_name": ["all_reduce", "alltoall"],
}


def write(root: Path, place: str, columns: dict[str, list[Any]]) -> Path:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def test_a_gemm_is_read_in_seconds_under_the_shipped_device(tmp_path: Path) -> None:
    write(tmp_path, "b200_sxm/gemm/sglang/0.5/gemm_perf.parquet", GEMM)
    assert list(read_measurements(tmp_path)) == [
        Measurement(
            operation="gemm",
            shape=(64, 128, 256),
            dtype="bf16",
            device="b200",
            seconds=0.25e-3,
            kernel="kernel",
            source="aiconfigurator-core b200_sxm/gemm/sglang/0.5",
            is_burst=True,
        )
    ]


def test_messages_are_counted_in_elements_and_read_in_bytes(tmp_path: Path) -> None:
    write(tmp_path, "h100_sxm/comm/nccl/2.29/nccl_perf.parquet", NCCL)
    reduce, exchange = read_measurements(tmp_path)
    assert (reduce.operation, reduce.shape, reduce.dtype) == ("all_reduce", (8, 8, 1, 2048), "fp16")
    assert (exchange.operation, exchange.shape, exchange.seconds) == ("all_to_all", (4, 4, 1, 1024), 2e-3)


def test_attention_of_older_tables_has_no_window(tmp_path: Path) -> None:
    write(tmp_path, "a100_sxm/attention/trtllm/1/context_attention_perf.parquet", ATTENTION)
    (measurement,) = read_measurements(tmp_path)
    assert measurement.shape == (2, 4096, 32, 8, 128, 0)


def test_the_kernel_of_experts_says_how_tokens_were_spread(tmp_path: Path) -> None:
    write(tmp_path, "h100_sxm/moe/vllm/1/moe_perf.parquet", MOE)
    (measurement,) = read_measurements(tmp_path)
    assert measurement.shape == (4096, 2048, 768, 8, 128, 1, 8)
    assert measurement.kernel == "kernel balanced"


def test_only_what_was_asked_for_is_read(tmp_path: Path) -> None:
    write(tmp_path, "h100_sxm/gemm/vllm/1/gemm_perf.parquet", GEMM)
    write(tmp_path, "l40s/gemm/sglang/1/gemm_perf.parquet", GEMM)
    write(tmp_path, "l40s/comm/nccl/1/nccl_perf.parquet", NCCL)
    assert {measurement.device for measurement in read_measurements(tmp_path, devices=["l40s"])} == {"l40s"}
    assert {measurement.operation for measurement in read_measurements(tmp_path, operations=["gemm"])} == {"gemm"}
    assert [measurement.operation for measurement in read_measurements(tmp_path, operations=["all_to_all"])] == [
        "all_to_all"
    ]
    assert [measurement.operation for measurement in read_measurements(tmp_path, dtypes=["fp16"])] == ["all_reduce"]
    assert {measurement.operation for measurement in read_measurements(tmp_path, dtypes=["bf16", "int8"])} == {
        "gemm",
        "all_to_all",
    }


def test_unknown_tables_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "l40s/gemm/sglang/1/gemm_perf.parquet", GEMM)
    write(tmp_path, "l40s/gdn/sglang/1/gdn_perf.parquet", {"latency": [1.0]})
    assert len(list(read_measurements(tmp_path))) == 1


def broken(root: Path, columns: dict[str, list[Any]]) -> str:
    path = write(root, "l40s/gemm/sglang/1/gemm_perf.parquet", columns)
    with pytest.raises(InputError) as caught:
        list(read_measurements(root))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    assert "'k'" in broken(tmp_path, {name: cells for name, cells in GEMM.items() if name != "k"})


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), None])
def test_a_time_that_is_none_is_refused(tmp_path: Path, seconds: float | None) -> None:
    broken(tmp_path, {**GEMM, "latency": [seconds]})


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l40s/gemm/sglang/1/gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match="cannot be read"):
        list(read_measurements(tmp_path))


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tables"):
        list(read_measurements(tmp_path))


def test_a_missing_wheel_is_named_with_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'autoplan\[reference\]'"):
        default_root()


def test_folders_are_named_as_the_shipped_devices() -> None:
    assert [device_of(name) for name in ("a100_sxm", "b200_sxm", "gb200")] == ["a100-sxm", "b200", "gb200"]


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core not installed")
def test_the_installed_wheel_holds_plausible_h100_timings() -> None:
    gemms = list(islice(read_measurements(devices=["h100-sxm"], operations=["gemm"]), 200_000))
    large = [gemm for gemm in gemms if gemm.dtype == "bf16" and gemm.shape == (8192, 8192, 8192)]
    assert large
    for timing in large:
        assert 0.5 < 2 * 8192**3 / timing.seconds / 989.4e12 < 1
