from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import faulty_ranks
from autoplan.errors import InputError
from autoplan.framework import Framework
from autoplan.model import ModelSpec
from autoplan.read.cluster import load_cluster, load_device
from autoplan.read.framework import load_framework
from autoplan.read.model import load_model
from autoplan.timing import SHAPES, line_of
from profiler import sweep
from profiler.launch import Crew, CrewError
from profiler.protocol import BESIDE, COLLECTIVES, Hello, Job, Task
from profiler.record import Fingerprint
from profiler.store import open_store
from profiler.sweep import (
    Planned,
    Progress,
    Wish,
    extrapolations,
    outliers,
    plan,
    reference_s,
    run,
    unmeasured,
)
from stores import held

MEGATRON: Framework = load_framework("megatron-core")
SMALL = ModelSpec(
    name="small", num_layers=4, hidden_size=256, vocab_size=1000, num_heads=4, num_kv_heads=2, ffn_size=512
)
WISH = Wish(model=SMALL, framework=MEGATRON, seq_len=128, tps=(1, 2))
ALL = {(operation, "fp32"): "gloo" if operation in COLLECTIVES else "way" for operation in SHAPES}
LAB = Hello(
    fingerprint=Fingerprint(device="cpu", memory_bytes=2**34),
    device_type="cpu",
    hosts=("a", "a"),
    dtypes=("fp32",),
    kernels=ALL,
    windowed={("attention", "fp32"): "window", ("attention_backward", "fp32"): "window"},
)


def shapes(wish: Wish, operation: str, hello: Hello = LAB) -> set[tuple[int, ...]]:
    return {one.task.shape for one in plan(wish, hello, ()) if one.task.operation == operation}


def test_products_of_a_model_are_those_that_a_rank_of_each_degree_runs() -> None:
    # 4 heads and 2 x 2 key/value heads of 64; two gated matrices of 512.
    qkv, out, fc1, fc2 = (512, 256), (256, 256), (1024, 256), (256, 512)
    half = (256, 256), (256, 128), (512, 256), (256, 256)
    expected = {(128, n, k) for n, k in (qkv, out, fc1, fc2, *half)}
    for operation in ("gemm", "dgrad", "wgrad"):
        assert shapes(WISH, operation) == expected


def test_a_rank_of_two_has_half_the_heads_and_the_vocabulary() -> None:
    assert shapes(WISH, "attention") == {(1, 128, 4, 2, 64, 0), (1, 128, 2, 1, 64, 0)}
    assert shapes(WISH, "head") == {(128, 256, 1024), (128, 256, 512)}  # 1,000 padded to a multiple of 128 tp
    assert shapes(WISH, "norm") == {(128, 256), (64, 256)}  # sequence parallelism
    for one in ("layer", "layer_backward", "layer_backward_selective", "layer_backward_full"):
        assert shapes(WISH, one) == {(1, 128, 256, 512, 4, 2, 64, 1), (1, 128, 256, 512, 4, 2, 64, 2)}
    assert shapes(WISH, "sharded_layer") == {(1, 128, 256, 512, 4, 2, 64, 2, 2)}


def test_windowed_layers_are_measured_with_the_kernel_of_windows() -> None:
    wish = replace(WISH, model=replace(SMALL, window=32, full_attention_interval=2), tps=(1,))
    cores = {one.task.shape: one.task.kernel for one in plan(wish, LAB, ()) if one.task.operation == "attention"}
    assert cores == {(1, 128, 4, 2, 64, 0): "way", (1, 128, 4, 2, 64, 32): "window"}
    assert shapes(replace(wish, seq_len=32), "attention") == {(1, 32, 4, 2, 64, 0)}
    assert shapes(wish, "attention", replace(LAB, windowed={})) == {(1, 128, 4, 2, 64, 0)}


def test_latent_attention_is_measured_by_the_widths_of_its_keys_and_values() -> None:
    wish = Wish(model=load_model("deepseek-v3"), framework=MEGATRON, seq_len=4096, tps=(1, 8))
    for operation in ("latent_attention", "latent_attention_backward"):
        assert shapes(wish, operation) == {(1, 4096, 128, 192, 128), (1, 4096, 16, 192, 128)}
    assert shapes(wish, "attention") == set()


def test_a_pipeline_over_all_ranks_of_a_node_is_measured_with_few_and_many_micro_batches() -> None:
    assert shapes(WISH, "pipeline_actions") == {(2, 2, 2), (8, 2, 2)}
    assert shapes(WISH, "pipeline_actions", replace(LAB, hosts=("a",) * 4 + ("b",) * 4)) == {(4, 4, 4), (16, 4, 4)}
    assert shapes(WISH, "pipeline_actions", replace(LAB, hosts=("a",))) == set()


def test_micro_batches_multiply_tokens() -> None:
    wish = replace(WISH, tps=(1,), micro_batches=(1, 4))
    assert {shape[0] for shape in shapes(wish, "gemm")} == {128, 512}
    assert {shape[:2] for shape in shapes(wish, "attention")} == {(1, 128), (4, 128)}


def test_experts_are_those_of_one_rank_of_each_degree() -> None:
    mixtral = Wish(model=load_model("mixtral-8x7b"), framework=MEGATRON, seq_len=4096, eps=(1, 8))
    expected = {(4096 * ep, 4096, 14336, 2, 8, 1, ep) for ep in (1, 8)}
    assert shapes(mixtral, "experts") == shapes(mixtral, "experts_backward") == expected
    assert shapes(mixtral, "layer") == set()  # it has no dense one


def test_what_no_operation_names_is_told() -> None:
    def lacks(model: str) -> list[str]:
        return unmeasured(Wish(model=load_model(model), framework=MEGATRON, seq_len=8192))

    for model in ("llama3-8b", "deepseek-v3", "gemma3-12b"):
        assert lacks(model) == []
    assert lacks("nemotron-h-56b") == ["state-space scans"]
    both = replace(load_model("deepseek-v3"), window=4096)
    assert unmeasured(Wish(model=both, framework=MEGATRON, seq_len=8192)) == ["latent attention within a window"]
    assert unmeasured(Wish(model=both, framework=MEGATRON, seq_len=4096)) == []


@pytest.mark.parametrize(
    "model", ["llama3-70b", "gpt3-175b", "deepseek-v3", "qwen3-235b-a22b", "nemotron-h-56b", "gemma2-9b"]
)
def test_every_model_gets_shapes_that_are_legal(model: str) -> None:
    hello = replace(LAB, hosts=("a",) * 8 + ("b",) * 8)
    for one in plan(Wish(model=load_model(model), framework=MEGATRON, seq_len=4096, tps=(1, 4)), hello, ()):
        assert len(one.task.shape) == len(SHAPES[one.task.operation])
        assert min(one.task.shape[:2]) > 0
        assert one.effect_s > 0 < one.expected_s


def test_collectives_cover_groups_within_and_across_nodes() -> None:
    hello = replace(LAB, hosts=("a",) * 4 + ("b",) * 4)
    groups = {shape[:3] for shape in shapes(WISH, "all_gather", hello)}
    assert groups == {(2, 2, 1), (2, 2, 2), (4, 4, 1), (2, 1, 1), (2, 1, 4), (8, 4, 1)}
    assert {shape[:3] for shape in shapes(WISH, "send_recv", hello)} == {(2, 2, 1), (2, 2, 2), (2, 1, 1), (2, 1, 4)}
    beside = {one.task.shape[:3] for one in plan(WISH, hello, ()) if one.task.kernel.endswith(BESIDE)}
    assert beside == {(2, 2, 2), (4, 4, 1), (2, 1, 4), (8, 4, 1)}


def test_what_is_known_or_not_asked_for_or_cannot_run_is_left_out() -> None:
    everything = plan(WISH, LAB, ())
    known = {one.task.key for one in everything[::2]}
    assert {one.task for one in plan(WISH, LAB, known)} == {one.task for one in everything[1::2]}
    assert plan(WISH, LAB, {one.task.key for one in everything}) == []
    assert {one.task.operation for one in plan(replace(WISH, only=("norm", "rope")), LAB, ())} == {"norm", "rope"}
    without = {which: way for which, way in ALL.items() if which[0] != "gemm"}
    assert "gemm" not in {one.task.operation for one in plan(WISH, replace(LAB, kernels=without), ())}
    # Another mode or kernel is another measurement.
    assert len(plan(replace(WISH, modes=("burst",)), LAB, known)) == len(everything)


@given(st.integers(0, 60))
def test_a_first_point_of_every_line_comes_before_a_second_of_any_then_the_larger_share(num_known: int) -> None:
    wish = replace(WISH, micro_batches=(1, 2, 4))
    known = {one.task.key for one in plan(wish, LAB, ())[:num_known]}
    begun = {(key[0], key[1][: line_of(key[0])], key[1][line_of(key[0]) + 1 :], *key[2:]) for key in known}
    effects: list[list[float]] = [[], []]
    for one in plan(wish, LAB, known):
        task, at = one.task, line_of(one.task.operation)
        line = (task.operation, task.shape[:at], task.shape[at + 1 :], *task.key[2:])
        is_second = line in begun
        assert is_second or not effects[1]  # all first points are through before
        begun.add(line)
        effects[is_second].append(one.effect_s)
    for part in effects:
        assert part == sorted(part, reverse=True)


def test_larger_calls_are_expected_to_take_longer() -> None:
    device = load_device("h100-sxm")
    assert device is not None

    def call_s(operation: str, *shape: int, dtype: str = "bf16") -> float:
        return reference_s(Task(operation=operation, shape=shape, dtype=dtype, kernel=""), device)  # type: ignore[arg-type]

    # 2 x 8192^3 at .7 of 989.4e12 (devices/h100-sxm.toml), and a start of 5 us
    peak = device.peak_flops_per_s["bf16"] * device.gemm_efficiency
    assert call_s("gemm", 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / peak + 5e-6)
    assert call_s("gemm", 8192, 8192, 8192, dtype="fp8") < call_s("gemm", 8192, 8192, 8192)
    layer = (1, 4096, 4096, 14336, 32, 8, 128)
    assert call_s("layer", *layer, 2) < call_s("layer", *layer, 1) < call_s("layer_backward", *layer, 1)
    assert call_s("sharded_layer", *layer, 8, 8) > call_s("layer_backward", *layer, 1)
    assert call_s("layer_backward_full", *layer, 1) > call_s("layer_backward", *layer, 1)
    whole, windowed = (call_s("attention", 1, 8192, 32, 8, 128, window) for window in (0, 1024))
    assert windowed == pytest.approx(whole / 4, rel=0.1)
    # Queries and keys of 192 and values of 128 are products as large as heads of 160.
    assert call_s("latent_attention", 1, 8192, 128, 192, 128) == pytest.approx(
        call_s("attention", 1, 8192, 160, 160, 128, 0), rel=0.01
    )
    assert call_s("pipeline_actions", 16, 4, 4) == 4 * call_s("pipeline_actions", 4, 4, 4)
    assert call_s("all_reduce", 8, 8, 1, 2**30) > call_s("all_reduce", 8, 8, 1, 2**20)


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(InputError, match="tp 3 must divide the 4 heads"):
        replace(WISH, tps=(1, 3))


def test_the_slow_device_and_the_slow_link_are_named() -> None:
    pairs = {(0, 1): 1.0, (2, 3): 1.0, (0, 2): 1.3, (1, 3): 1.0, (0, 4): 9.0, (1, 5): 9.0, (2, 6): 9.1, (3, 7): 12.0}
    hello = replace(LAB, hosts=("a",) * 4 + ("b",) * 4, gemm_s=(1, 1.01, 1, 1, 1.2, 1, 1, 0.99), links_s=pairs)
    assert outliers(hello) == [
        "rank 4 on b: matrix products take 20 % longer than on the others",
        "between rank 0 on a and rank 2 on a: messages take 30 % longer than on the other links",
        "between rank 3 on a and rank 7 on b: messages take 33 % longer than on the other links",
    ]
    assert outliers(replace(LAB, gemm_s=(1.0, 1.2))) == [
        "rank 1 on a: matrix products take 20 % longer than on the others"
    ]
    assert outliers(LAB) == []


def test_what_a_smaller_allocation_cannot_show_is_told() -> None:
    hello = replace(LAB, fingerprint=Fingerprint(device="h100-sxm"), hosts=("a",) * 4 + ("b",) * 4)
    assert extrapolations(hello, load_cluster("h100-sxm:2x4")) == []
    assert extrapolations(hello, load_cluster("h100-sxm:16x8")) == [
        "groups over 3 to 16 nodes are extrapolated: measured on 2",
        "groups of 5 to 8 devices of a node are extrapolated: measured with 4",
    ]
    assert "it learns nothing here" in extrapolations(hello, load_cluster("b200:2x4"))[0]


pytest.importorskip("torch")

JOB = Job(allowance_s=0.01, limit_s=15.0, compares_devices=False)


def products(*sizes: int) -> list[Planned]:
    tasks = [Task(operation="gemm", shape=(m, 32, 32), dtype="fp32", kernel="mm") for m in sizes]
    return [Planned(task=task, effect_s=1.0, expected_s=0.1) for task in tasks]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Crew, Hello]]:
    with Crew(JOB, None, 2) as crew:
        hello = crew.start()
        assert hello is not None
        yield crew, hello


def test_a_sweep_goes_on_after_ranks_are_lost_and_stores_why(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "times.db"))
    planned = products(16, faulty_ranks.DIES, 32, faulty_ranks.REFUSES, 48)
    progress = Progress(total=len(planned))
    with Crew(JOB, None, 2, faulty_ranks.prepare) as crew:
        hello = crew.start()
        assert hello is not None
        run(crew, hello, store, planned, budget_s=1e9, progress=progress, measured_by="ada")
    records = list(store.records())
    assert [one.shape[0] for one in records] == [16, faulty_ranks.DIES, 32, faulty_ranks.REFUSES, 48]
    assert [one.status == "failed" for one in records] == [False, True, False, True, False]
    assert [one.reason for one in records if one.status == "failed"] == [
        "rank 1 was ended by SIGKILL",
        "rank 1: RuntimeError: no kernel image is available",
    ]
    assert {one.measured_by for one in records} == {"ada"}
    assert progress.num_left == 0
    assert progress.counts()["gemm"]["failed"] == 2
    assert plan(replace(WISH, only=("gemm",)), hello, store.known(hello.fingerprint)) != []


def test_ranks_that_are_lost_again_and_again_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_RESTARTS", 1)
    store = open_store(str(tmp_path / "times.db"))
    planned = products(*[faulty_ranks.EXITS] * 9)
    with Crew(JOB, None, 2, faulty_ranks.prepare) as crew:
        hello = crew.start()
        assert hello is not None
        with pytest.raises(CrewError, match="stored as failed: run the same command again for the rest"):
            run(crew, hello, store, planned, budget_s=1e9, progress=Progress(total=len(planned)))
    # The first and a restart, both alike: one record by its content.
    (lost,) = store.records()
    assert "rank 1 exited with status 7" in lost.reason


def test_a_budget_ends_a_sweep_before_it_is_exceeded(tmp_path: Path, pair: tuple[Crew, Hello]) -> None:
    crew, hello = pair
    store = open_store(str(tmp_path / "times.db"))
    progress = Progress(total=2)
    planned = [products(16)[0], replace(products(32)[0], expected_s=1e6)]
    run(crew, hello, store, planned, budget_s=1e3, progress=progress)
    assert [one.shape for one in store.records()] == [(16, 32, 32)]
    assert progress.num_left == 1


PROGRAM = """
import signal, sys
from autoplan.cli.profile import _on_terminate
from autoplan.model import ModelSpec
from autoplan.read.framework import load_framework
from profiler.launch import Crew
from profiler.protocol import Job
from profiler.store import open_store
from profiler.sweep import Progress, Wish, plan, run
from test_sweep import JOB, WISH

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _on_terminate)
    with Crew(JOB, None, 2) as crew:
        store, hello = open_store(sys.argv[1]), crew.start()
        planned = plan(WISH, hello, store.known(hello.fingerprint))
        print(len(planned), *crew.pids, flush=True)
        run(crew, hello, store, planned, budget_s=1e9, progress=Progress(total=len(planned)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_keeps_what_it_measured_and_measures_only_the_rest(
    tmp_path: Path, number: signal.Signals, pair: tuple[Crew, Hello]
) -> None:
    program, path = tmp_path / "program.py", tmp_path / "times.db"
    program.write_text(PROGRAM)
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(program), str(path)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    total, *pids = map(int, first.stdout.readline().split())
    while len(held(path)) < 3:
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(number)
    first.communicate(timeout=60)
    stored = held(path)
    assert len({one.key for one in stored}) == len(stored) >= 3
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # no rank is left behind, even by SIGKILL
        assert time.monotonic() < end
        time.sleep(0.1)
    store, (crew, hello) = open_store(str(path)), pair
    planned = plan(WISH, hello, store.known(hello.fingerprint))
    # What other load spoilt, or what did not settle, is worth another try.
    num_known = sum(one.status in ("ok", "failed") for one in stored)
    assert len(planned) == total - num_known
    run(crew, hello, store, planned[:2], budget_s=1e9, progress=Progress(total=len(planned)))
    again = held(path)
    assert again[: len(stored)] == stored
    assert len(again) == len(stored) + 2
