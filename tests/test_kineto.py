"""Do traces of steps tell what ran, what was hidden, and where a prediction is wrong?"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.api.traces import read_traces
from autoplan.base.errors import InputError
from autoplan.profiler.imports import kineto
from autoplan.profiler.imports.kineto import (
    ACTIVITIES,
    COMMUNICATION,
    WORK,
    _instants,
    activity_of,
    is_trace,
    read_trace,
)
from commands import run

Event = dict[str, Any]


def event(name: str, start_us: float, length_us: float, cat: str = "kernel", tid: int = 7) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": start_us, "dur": length_us, "tid": tid, "args": {"stream": tid}}


# A step of 1 ms: products, a reduction of which 100 us are hidden, a copy, the update, and 150 us of nothing.
STEP = [
    event("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 1000, 300),
    event("flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", 1300, 100),
    event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)", 1300, 300, tid=20),
    event("void at::native::vectorized_elementwise_kernel<4, add>", 1600, 100),
    event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)", 1700, 50, tid=21),
    event("Memcpy DtoH (Device -> Pinned)", 1700, 100, cat="gpu_memcpy"),
    event("void multi_tensor_apply_kernel<FusedAdamFunctor>", 1850, 50),
    event("ProfilerStep#4", 900, 1000, cat="user_annotation"),
    event("ProfilerStep#4", 1000, 1000, cat="gpu_user_annotation"),
    event("aten::mm", 900, 20, cat="cpu_op"),
]


def written(path: Path, events: list[Event], rank: int = 0, world: int = 2) -> Path:
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": world}, "traceEvents": events}
    text = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_every_instant_of_a_step_counts_once(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, STEP)
    assert is_trace(path)
    trace = read_trace(path)
    assert (trace.rank, trace.world_size, trace.num_steps, trace.has_devices, trace.is_marked) == (0, 2, 1, True, True)
    expected = {
        "gemm": 300, "attention": 100, "kernels": 100, "collectives": 200, "messages": 50, "copies": 50, "optimizer": 50
    }  # fmt: skip
    assert {name: 1e6 * seconds for name, seconds in trace.seconds.items()} == pytest.approx(expected)
    assert 1e6 * trace.idle_s == pytest.approx(150)
    assert 1e6 * trace.step_s == pytest.approx(1000)
    assert (1e6 * trace.communication_s, 1e6 * trace.exposed_s, 1e6 * trace.hidden_s) == pytest.approx((350, 250, 100))


def test_a_drawn_step_shows_what_takes_most_of_every_moment(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.json", STEP))
    moments = [
        ("gemm", 0, 300), ("attention", 300, 400), ("collectives", 400, 600), ("kernels", 600, 700),
        ("messages", 700, 750), ("copies", 750, 800), (None, 800, 850), ("optimizer", 850, 900), (None, 900, 1000),
    ]  # fmt: skip
    assert [piece.activity for piece in trace.drawn] == [activity for activity, _, _ in moments]
    assert [1e6 * piece.end_s for piece in trace.drawn] == pytest.approx([end for _, _, end in moments], abs=5)
    page = read_traces([tmp_path / "trace.json"]).page()
    assert "measured, rank 0" in page
    assert "exposed communication, waits: 400" in page


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, len(ACTIVITIES) - 1)), min_size=1, max_size=12
    )
)
def test_instants_are_those_of_counting_microseconds(spans: list[tuple[int, int, int]]) -> None:
    """The oracle looks at every microsecond by itself, as Holistic Trace Analysis defines exposed communication."""
    rows = np.array([(start, start + length, activity) for start, length, activity in spans], dtype=float)
    lengths, running = _instants(rows)
    work, communication = ([ACTIVITIES.index(name) for name in names] for names in (WORK, COMMUNICATION))
    exposed = lengths[running[:, communication].any(axis=1) & ~running[:, work].any(axis=1)].sum()
    at_work = {at for start, length, activity in spans if activity in work for at in range(start, start + length)}
    talking = {
        at for start, length, activity in spans if activity in communication for at in range(start, start + length)
    }
    assert exposed == len(talking - at_work)
    assert lengths[running[:, work].any(axis=1)].sum() == len(at_work)


@pytest.mark.parametrize(
    ("name", "activity"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT", "gemm"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1", "gemm"),
        ("aten::addmm", "gemm"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "messages"),
        ("gloo:recv", "messages"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "collectives"),
        ("gloo:all_reduce", "collectives"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>", "collectives"),
        ("attn_fwd", "attention"),  # of Triton, on AMD
        ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32", "gemm"),
        ("Memset (Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<lambda(float)>>", "kernels"),
        ("multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>", "optimizer"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, activity: str) -> None:
    assert activity_of(name) == activity


def test_operators_of_a_cpu_count_where_they_are_the_innermost(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#1", 0, 1000, cat="user_annotation", tid=1),
        event("aten::linear", 0, 400, cat="cpu_op", tid=1),
        event("aten::addmm", 50, 300, cat="cpu_op", tid=1),
        event("gloo:all_reduce", 300, 300, cat="user_annotation", tid=2),
        event("Optimizer.step#SGD.step", 700, 200, cat="user_annotation", tid=1),
        event("aten::add_", 750, 100, cat="cpu_op", tid=1),
    ]
    trace = read_trace(written(tmp_path / "cpu.json", events))
    assert {name: 1e6 * seconds for name, seconds in trace.seconds.items() if seconds} == pytest.approx(
        {"gemm": 300, "kernels": 100, "optimizer": 200, "collectives": 200}
    )
    assert (1e6 * trace.hidden_s, 1e6 * trace.idle_s) == pytest.approx((100, 200))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "no trace of torch's profiler"),
        (b'{"traceEvents": 3}', "no trace of torch's profiler"),
        (b'{"traceEvents": []}', "without kernels of a device"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "x", "dur": 1}]}', "no time in micro"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "dur": 1}]}', "no time in micro"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": "inf"}]}', "none that can be"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -1}]}', "without kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "k", "ts": 1, "dur": 1, "tid": []}]}', "`int . str"),
        (b'{"distributedInfo": {"rank": -1}, "traceEvents": []}', ">= 0"),
        (b"\x1f\x8b\x08", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_an_operator_that_waits_for_communication_hides_none(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#1", 0, 1000, cat="user_annotation", tid=1),
        event("aten::addmm", 0, 300, cat="cpu_op", tid=1),
        event("gloo:all_reduce", 200, 500, cat="user_annotation", tid=2),
        event("_c10d_functional::wait_tensor", 300, 450, cat="cpu_op", tid=1),
    ]
    trace = read_trace(written(tmp_path / "cpu.json", events))
    assert 1e6 * trace.exposed_s == pytest.approx(400)
    assert 1e6 * trace.hidden_s == pytest.approx(100)
    assert 1e6 * trace.idle_s == pytest.approx(300)


def test_steps_in_which_nothing_ran_are_refused(tmp_path: Path) -> None:
    marks = [event("ProfilerStep#1", 5000, 100, "gpu_user_annotation"), event("ProfilerStep#2", 5100, -100, "cpu_op")]
    with pytest.raises(InputError, match="runs in the marked steps"):
        read_trace(written(tmp_path / "trace.json", [STEP[0], *marks]))


def test_operators_may_be_nested_deeply(tmp_path: Path) -> None:
    """So that a look at all that an operator is part of, for each of them, would take minutes."""
    depth = 100_000
    events = [event("aten::mm", at, 2 * (depth - at), cat="cpu_op") for at in range(depth)]
    assert read_trace(written(tmp_path / "deep.json", events)).step_s == pytest.approx(2e-6 * depth)


def test_more_events_than_memory_has_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "MAX_OBJECTS", 5)
    path = written(tmp_path / "trace.json.gz", STEP)
    with pytest.raises(InputError, match="more than 4,294,967,296 bytes or 5 objects: trace fewer steps"):
        read_trace(path)
    monkeypatch.setattr(kineto, "MAX_BYTES", 5)
    with pytest.raises(InputError, match="more than 5 bytes"):
        read_trace(path)


def test_a_trace_is_known_by_its_events_wherever_in_the_file_they_begin(tmp_path: Path) -> None:
    """Other programs wrap it: public ones had 26 KB of their own before the events."""
    path = tmp_path / "trace.json.gz"
    packages = {str(number): "0123456789abcdef" for number in range(2000)}
    path.write_bytes(gzip.compress(json.dumps({"packages": packages, "traceEvents": STEP}).encode()))
    assert is_trace(path)
    assert read_trace(path).step_s == pytest.approx(1e-3)


def test_older_names_of_categories_are_known(tmp_path: Path) -> None:
    older = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cpu_op": "Operator"}
    path = written(tmp_path / "old.json", [{**item, "cat": older.get(item["cat"], item["cat"])} for item in STEP])
    today = read_trace(written(tmp_path / "new.json", STEP))
    assert read_trace(path).seconds == today.seconds


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    """What is read of it would be gone for the reader of launch files, and one that nobody writes to never ends."""
    os.mkfifo(tmp_path / "pipe.json")
    assert not is_trace(tmp_path / "pipe.json")


def test_traces_of_other_runs_or_without_marks_are_told(tmp_path: Path) -> None:
    first = written(tmp_path / "0.json", STEP)
    with pytest.raises(InputError, match="of the same rank, 0: "):
        read_traces([first, written(tmp_path / "again.json", STEP)])
    with pytest.raises(InputError, match=r"runs with 2 and 4 ranks"):
        read_traces([first, written(tmp_path / "1.json", STEP, rank=1, world=4)])
    unmarked = written(tmp_path / "2.json", [span for span in STEP if "Step" not in span["name"]])
    remarks = read_traces([unmarked]).remarks
    assert "no steps are marked" in remarks[0]
    assert "1 of 2 ranks have no trace" in remarks[1]


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["tp", "pp", "dp_shard"])
def test_a_run_of_the_trainer_is_traced_and_explained_term_by_term(tmp_path: Path, degree: str) -> None:
    pytest.importorskip("torch")
    (tmp_path / "small.toml").write_text(
        'name = "small"\nnum_layers = 2\nhidden_size = 64\nvocab_size = 256\nnum_heads = 4\nffn_size = 128\n'
    )
    fixed = [flag for name in ("tp", "pp") for flag in ("--fix", f"{name}={2 if name == degree else 1}")]
    made = run(
        tmp_path, "search", "small.toml", "--cluster", "cpu:1x2", "--global-batch", "4", "--seq-len", "64",
        "--framework", "torch", "--precision", "fp32", *fixed, "--quiet",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    ran = run(tmp_path, "run", "plan.json", "--steps", "1", "--warmup", "1", "--traces", "traces", "--quiet")
    assert ran.returncode == 0, ran.stderr
    shown = run(tmp_path, "read", "traces", "--plan", "plan.json")
    assert shown.returncode == 0, shown.stderr
    assert "2 ranks, 3 steps each" in shown.stdout
    assert "exposed communication, waits" in shown.stdout
    found = json.loads(run(tmp_path, "read", "traces", "--plan", "plan.json", "--json").stdout)
    for rank in found["ranks"]:
        assert sum(rank["seconds"].values()) + rank["idle_s"] == pytest.approx(rank["step_s"], rel=1e-6)
        assert rank["seconds"]["gemm"] > 0
        assert rank["communication_s"] > 0
    assert sum(term["predicted_s"] for term in found["terms"]) == pytest.approx(found["predicted_step_s"], rel=0.03)
    measured_s = sum(rank["step_s"] for rank in found["ranks"]) / 2
    assert sum(term["measured_s"] for term in found["terms"]) == pytest.approx(measured_s, rel=0.03)
    pages = run(tmp_path, "read", "traces", "--plan", "plan.json", "--out", "page.html")
    assert pages.returncode == 0, pages.stderr
    page = (tmp_path / "page.html").read_text()
    assert all(text in page for text in ("predicted, ", "measured, rank 0", "measured, rank 1", "Term by term"))
    for stage in found["predicted"]:
        assert stage["drawn"][-1][2] == pytest.approx(found["predicted_step_s"])
    # What ran is measured: the next price rests on it.
    imported = run(tmp_path, "db", "import", "traces", "--db", "traced.db", "--json")
    assert json.loads(imported.stdout)["new"] > 0, imported.stderr
    repriced = run(tmp_path, "estimate", "plan.json", "--timings", "db", "--db", "traced.db")
    assert "measurements" in repriced.stdout, repriced.stderr
    refused = run(tmp_path, "read", "traces", "--model", "llama3-8b")
    assert "the other options are for launch files" in refused.stderr
