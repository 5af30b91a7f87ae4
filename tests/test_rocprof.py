"""Is the JSON of rocprofv3 read as traces of torch's profiler are?"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from autoplan.api.traces import read_traces
from autoplan.base.errors import InputError
from autoplan.profiler.imports.traces import read_ranks
from rocm_step import COPY, STEP, assert_read_as_step

CPU, FIRST, SECOND = 900, 901, 902  # handles of agents


def timed(start_us: int, end_us: int) -> dict[str, Any]:
    return {"start_timestamp": 1000 * start_us, "end_timestamp": 1000 * end_us}


def written(path: Path, *, devices: tuple[int, ...] = (FIRST,), marks: tuple[tuple[str, int, int], ...] = ()) -> Path:
    process = {
        "agents": [{"id": {"handle": CPU}, "type": 1}, *({"id": {"handle": at}, "type": 2} for at in (FIRST, SECOND))],
        "kernel_symbols": [{"kernel_id": at, "formatted_kernel_name": name} for at, (name, *_) in enumerate(STEP)],
        "strings": {"marker_api": [{"key": at, "value": name} for at, (name, *_) in enumerate(marks)]},
        "buffer_records": {
            "kernel_dispatch": [
                {**timed(start, end), "dispatch_info": {"agent_id": {"handle": device}, "kernel_id": at}}
                for device in devices
                for at, (_, start, end) in enumerate(STEP)
            ],
            "memory_copy": [
                {**timed(*COPY), "src_agent_id": {"handle": device}, "dst_agent_id": {"handle": CPU}}
                for device in devices
            ],
            "marker_api": [
                {**timed(start, end), "correlation_id": {"internal": at}} for at, (_, start, end) in enumerate(marks)
            ],
        },
    }
    text = json.dumps({"rocprofiler-sdk-tool": [process]}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["1_results.json", "1_results.json.gz"])
def test_every_instant_of_a_step_counts_once(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name)
    assert_read_as_step(path)


def test_ranges_mark_steps_and_every_device_is_a_rank(tmp_path: Path) -> None:
    marks = (("step 1", 900, 1400), ("forward", 900, 1000), ("step 2", 1400, 1900))
    result = read_traces([written(tmp_path / "1_results.json", devices=(SECOND, FIRST), marks=marks)])
    assert [(rank.num_steps, rank.step_s) for rank in result.ranks] == [(2, pytest.approx(450e-6))] * 2
    assert [rank.file.rpartition(", ")[2] for rank in result.ranks] == [
        "device 0 of process 0",
        "device 1 of process 0",
    ]
    assert "no steps are marked" in read_traces([written(tmp_path / "2_results.json")]).remarks[0]


def test_what_tells_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no kernels of a device in it: trace with rocprofv3 --kernel-trace"):
        read_ranks(written(tmp_path / "1_results.json", devices=()))
    path = tmp_path / "2_results.json"
    path.write_text('{"rocprofiler-sdk-tool": [3]}')
    with pytest.raises(InputError, match="no output of rocprofv3: "):
        read_ranks(path)
