"""Are exports of Nsight Systems read as traces of torch's profiler are, or refused in one line?"""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autoplan.api.traces import read_traces
from autoplan.base.errors import InputError
from autoplan.profiler.imports import read_source
from autoplan.profiler.imports.kineto import read_trace
from autoplan.profiler.imports.traces import is_trace, read_ranks, trace_files
from commands import run

# (name, start, end) in microseconds; what names begin with says which table they are of.
STEP = [
    ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 1000, 1300),
    ("flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", 1300, 1400),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", 1300, 1600),
    ("void at::native::vectorized_elementwise_kernel<4, add>", 1600, 1700),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", 1700, 1750),
    ("Memcpy", 1700, 1800),
    ("void multi_tensor_apply_kernel<FusedAdamFunctor>", 1850, 1900),
    ("Memset", 1950, 2000),
]
PROCESS = 4321
Ranges = list[tuple[str, int, int | None]]


def exported(
    path: Path, *, devices: int = 1, ranges: Ranges | None = None, by_number: bool = True, kernels: bool = True
) -> Path:
    """Write an export as nsys makes it, of devices that each run `STEP`, every next one 100 us later."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
        numbers = {name: at for at, name in enumerate(dict.fromkeys(name for name, *_ in (*STEP, *(ranges or []))))}
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(at, name) for name, at in numbers.items()])
        timed = 'start INT NOT NULL, "end" INT NOT NULL, deviceId INT NOT NULL, globalPid INT'
        for table in ("MEMCPY", "MEMSET"):
            database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_{table} ({timed})")
        if kernels:
            database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({timed}, demangledName INT, shortName INT)")
        for device in range(devices):
            for name, start, end in STEP:
                row: tuple[Any, ...] = (1000 * (start + 100 * device), 1000 * (end + 100 * device), device)
                row = (*row, PROCESS << 24)
                if name.startswith("Mem"):
                    database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{name.upper()} VALUES (?, ?, ?, ?)", row)
                elif kernels:
                    database.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, 0)", (*row, numbers[name])
                    )
        if ranges is not None:
            name_column = "textId INT" if by_number else "text TEXT"
            database.execute(f'CREATE TABLE NVTX_EVENTS (start INT, "end" INT, {name_column}, globalTid INT)')
            for name, start, at_end in ranges:
                value = numbers[name] if by_number else name
                ended = None if at_end is None else 1000 * at_end
                row = (1000 * start, ended, value, (PROCESS << 24) + 7)
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", row)
        database.commit()
    return path


def kineto(path: Path) -> Path:
    events = [
        {
            **{"ph": "X", "name": name, "ts": start, "dur": end - start, "tid": 1},
            "cat": {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name, "kernel"),
        }
        for name, start, end in STEP
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_an_export_tells_what_a_trace_of_the_same_kernels_tells(tmp_path: Path) -> None:
    path = exported(tmp_path / "report.sqlite")
    assert is_trace(path)
    assert trace_files([tmp_path]) == [path]
    (own,), other = read_ranks(path), read_trace(kineto(tmp_path / "trace.json"))
    assert own.seconds == pytest.approx(other.seconds)
    assert own.step_s == pytest.approx(1e-3)
    assert own.idle_s == pytest.approx(other.idle_s)
    assert own.exposed_s == pytest.approx(250e-6)
    assert own.hidden_s == pytest.approx(100e-6)
    assert dict(own.longest) == pytest.approx(dict(other.longest))


@pytest.mark.parametrize("by_number", [True, False])
def test_ranges_that_are_called_so_mark_steps(tmp_path: Path, by_number: bool) -> None:
    ranges: Ranges = [
        ("iteration 7", 900, 1400),
        ("forward", 900, 1000),
        ("iteration 8", 1400, 1900),
        ("step 9", 1, None),
    ]
    (rank,) = read_ranks(exported(tmp_path / "report.sqlite", ranges=ranges, by_number=by_number))
    assert rank.is_marked
    assert rank.num_steps == 2
    assert rank.step_s == pytest.approx(0.5e-3)
    assert rank.marked_step_s == pytest.approx(0.5e-3)
    assert rank.seconds["gemm"] == pytest.approx(150e-6)


def test_every_device_of_an_export_is_a_rank(tmp_path: Path) -> None:
    path = exported(tmp_path / "report.sqlite", devices=3)
    result = read_traces([path])
    assert [rank.file for rank in result.ranks] == [f"{path}, device {at} of process {PROCESS}" for at in range(3)]
    assert [rank.step_s for rank in result.ranks] == pytest.approx([1e-3] * 3)
    assert "rank 2" in result.page()
    assert "3 ranks, 1 step each: 1.0 ms per step" in run(tmp_path, "read", "report.sqlite").stdout


def test_what_is_no_export_is_refused_in_one_line(tmp_path: Path) -> None:
    without = exported(tmp_path / "host.sqlite", kernels=False)
    with pytest.raises(InputError, match="no kernels of a device in it: trace with nsys profile"):
        read_ranks(without)
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"QDSS")
    with pytest.raises(InputError, match=r"export it first: nsys export --type sqlite report.nsys-rep"):
        read_ranks(report)
    broken = exported(tmp_path / "broken.sqlite")
    with closing(sqlite3.connect(broken)) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'never'")
        database.commit()
    with pytest.raises(InputError, match="an event has no time in nanoseconds"):
        read_ranks(broken)
    plain = tmp_path / "plain.sqlite"
    with closing(sqlite3.connect(plain)) as database:
        database.execute("CREATE TABLE records (id INTEGER)")
        database.commit()
    assert not is_trace(plain)


def test_timings_are_not_taken_from_an_export_without_shapes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="have no kernel shapes"):
        read_source(str(exported(tmp_path / "report.sqlite")))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trace.json", '{"schema": "1.0.2-chakra.0.0.4", "pid": 1, "nodes": []}'),
        ("torch.json.gz", '{"schema": "1.0.1", "pid": 1, "nodes": [{"name": "aten::add", "id": 2, "rf_id": 0}]}'),
        ("astra.json", '{"workload_graph": [{"Id": 216, "Name": "aten::add", "runtime": 318}]}'),
        ("rank0.et", ""),
    ],
)
def test_an_execution_trace_is_called_so(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    assert is_trace(path)
    with pytest.raises(InputError, match="tells the order of operations, and not when each of them ran"):
        read_ranks(path)
