"""Steps that wait for samples: rows S06, S52 and S53 of the published systems."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import autoplan
from autoplan.base.errors import InputError
from autoplan.cli import make_app
from autoplan.cost.input_rate import slowest_input, with_input
from autoplan.spec.input_rate import parse_input_rate
from autoplan.spec.lengths import Lengths
from autoplan.spec.training import TrainingSpec

SMALL = {"global_batch": 20480, "seq_len": 128, "framework": "nemo", "plan": {"micro_batch": 32}}


def small(nodes: int, *rates: str) -> autoplan.PlanResult:
    return autoplan.estimate("qwen2.5-0.5b", cluster=f"h100-sxm:{nodes}x8", input_rate=rates, **SMALL)


def test_a_loader_of_5k_samples_caps_devices_that_compute_30k() -> None:
    """S53: 5k samples/s with any number of devices, so that another one is worth nothing."""
    assert 20480 / small(5).best.step_s == pytest.approx(30_000, rel=0.03)
    for nodes in (1, 5, 20):
        capped = small(nodes, "5000samples/s").best
        assert 20480 / capped.step_s == pytest.approx(5000, rel=1e-12)
        assert sum(capped.terms_s.values()) == pytest.approx(capped.step_s, rel=1e-12)
        assert capped.tokens_per_s_per_device == pytest.approx(5000 * 128 / nodes / 8, rel=1e-12)
        assert capped.low_s == capped.step_s <= capped.high_s


def test_another_node_is_worth_nothing_where_the_loader_is_the_limit() -> None:
    sizes = autoplan.search(
        "qwen2.5-0.5b",
        cluster="h100-sxm:2x8",
        global_batch=20480,
        seq_len=128,
        framework="nemo",
        fix={"tp": 1, "pp": 1, "cp": 1},
        nodes="1,2",
        tokens="1B",
        input_rate="5000samples/s",
    )
    assert sizes.file.run is not None
    assert sizes.file.run.best.num_nodes == 1
    assert sizes.file.run.best.figures.tokens_per_s == pytest.approx(5000 * 128)
    # Two nodes fail more often and are no faster.
    (two,) = [size for size in sizes.file.run.sizes if size.num_nodes == 2]
    assert (two.best, two.why) == (None, "no better than a plan already found")


def scaling(*rates: str, size: str | None = None) -> dict[int, float]:
    """Sequences per second by number of nodes, of data-parallel training of 1.2B parameters with a fixed batch."""
    found = autoplan.compare(
        "llama3.2-1b",
        clusters=["h100-sxm"],
        global_batch=4096,
        seq_len=4096,
        nodes="1,16,64,256",
        fix={"tp": 1, "pp": 1, "cp": 1},
        input_rate=rates,
        sample_size=size,
    )
    bests = [row.outcome.best for row in found.outcomes]
    return {best.num_nodes: best.figures.tokens_per_s / 4096 for best in bests if best}


def knee(rates: dict[int, float]) -> int:
    """The first number of nodes that are less than 90 % as fast each as the first one."""
    return next(nodes for nodes, rate in rates.items() if rate < 0.9 * nodes * rates[1])


def test_a_storage_cap_moves_the_knee_of_scaling_to_the_left() -> None:
    """S06: 2 GB/s per node are 100 samples of 20 MB; a store of 40 GB/s delivers 2,000 to all nodes together."""
    free = scaling()
    shared = scaling("2GB/s/node", "40GB/s", size="20MB")
    for nodes, rate in free.items():
        assert shared[nodes] == pytest.approx(min(rate, 100 * nodes, 2000), rel=1e-9)
    # Each node adds less than the one before.
    for curve in (free, shared):
        gains = [(curve[more] - curve[few]) / (more - few) for few, more in ((1, 16), (16, 64), (64, 256))]
        assert gains == sorted(gains, reverse=True)
    assert (knee(free), knee(shared)) == (256, 64)


def test_the_slowest_rate_counts_for_packs_of_samples_too() -> None:
    lengths = Lengths(histogram=((1024, 1), (3072, 1)))
    rates = (parse_input_rate("3samples/s/node", None), parse_input_rate("40ktokens/s", None))
    even = TrainingSpec(seq_len=4096, input_rates=rates)
    # 4,096 tokens at 40,000 a second take longer than a sequence at 3 or 12 a second.
    assert slowest_input(even, 1) == (pytest.approx(1 / 3), rates[0])
    assert slowest_input(even, 4) == (pytest.approx(0.1024), rates[1])
    # A sequence joined of samples of 2,048 tokens on average has two of them.
    joined = replace(even, lengths=lengths, batching="joined")
    assert slowest_input(joined, 1)[0] == pytest.approx(2 / 3)
    assert slowest_input(replace(even, input_rates=()), 1) == (0.0, None)


def test_an_answer_is_capped_once() -> None:
    capped = small(1, "5ksamples/s")
    assert with_input(capped.problem, capped.best) == capped.best
    assert capped.best.step_s == pytest.approx(20480 / 5000)
    free = small(1, "50ksamples/s")
    assert free.best == small(1).best


def ecg_table(path: Path, speedups: dict[int, float], *, input_bound: int = 0) -> Path:
    """A table of data-parallel runs with these speedups; `input_bound` is the number of devices of a marked run."""
    columns = "id,framework,gpu,num_gpus,model,seq_len,global_batch,tp,pp,dp,step_time_s,status,input_bound"
    rows = [
        f"on-{n},Megatron-Core,a100-sxm,{n},llama3.2-1b,4096,{4 * n},1,1,{n},{2 * n / times},ok,{int(n == input_bound)}"
        for n, times in speedups.items()
    ]
    path.write_text("\n".join([columns, *rows]) + "\n")
    return path


def test_a_run_that_waits_for_samples_is_noticed_and_left_out(tmp_path: Path) -> None:
    """S52: 1.6 and 1.9 times as fast on 2 and 4 GPUs, where a serial share of a quarter would allow 2.29."""
    table = ecg_table(tmp_path / "ecg.csv", {1: 1.0, 2: 1.6, 4: 1.9})
    found = autoplan.calibrate(table)
    assert found.runs == 3
    assert [text.partition(":")[0] for text in found.warnings] == [
        "on-4 is 1.90 times as fast on 4 times the devices, while Amdahl's law from two smaller runs allows 2.29"
    ]
    rate = found.warnings[0].rpartition(" ")[2]
    assert rate == "3.8samples/s"
    place = {"seq_len": 4096, "framework": "megatron-core", "calibration": found.calibration, "input_rate": rate}
    for devices in (4, 8):  # Amdahl's law from the first two would allow 2.91 on 8
        cluster = f"a100-sxm:1x{devices}"
        best = autoplan.estimate("llama3.2-1b", cluster=cluster, global_batch=4 * devices, plan={}, **place).best
        assert 4 * devices / best.step_s / 2.0 == pytest.approx(1.9, rel=0.03)
    marked = autoplan.calibrate(ecg_table(table, {1: 1.0, 2: 1.6, 4: 1.9, 8: 3.0}, input_bound=4))
    assert (marked.runs, marked.warnings) == (3, ("on-4 is left out: it is marked as input_bound",))
    # A quarter of serial work allows 2.91 on 8, and nothing more than 4.
    assert autoplan.calibrate(ecg_table(table, {1: 1.0, 2: 1.6, 4: 2.29, 8: 2.7})).warnings == ()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"input_rate": "5000"}, "write a number with a unit"),
        ({"input_rate": "0samples/s"}, "write a number with a unit"),
        ({"input_rate": "2GB/s/node"}, "give --sample-size too"),
        ({"sample_size": "150kB"}, "give --input-rate too"),
        ({"input_rate": "2GB/s", "sample_size": "0"}, "--sample-size"),
        ({"input_rate": "5samples/s", "objectives": ["energy-per-token"]}, "leave --input-rate out"),
    ],
)
def test_what_cannot_be_priced_is_said(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        autoplan.search("llama3-8b", cluster="h100-sxm:1x8", global_batch=64, seq_len=8192, **options)  # type: ignore[arg-type]


def test_all_nodes_of_a_mixed_cluster_wait_for_samples() -> None:
    words = {"cluster": "h100-sxm:1x8+a100-sxm:1x8", "global_batch": 64, "seq_len": 8192}
    free = autoplan.search_mixed("llama3-8b", **words)
    capped = autoplan.search_mixed("llama3-8b", **words, input_rate="2samples/s/node")
    assert free.best.step_s < 64 / 4 == pytest.approx(capped.best.step_s)
    assert capped.best.terms_s["input"] == pytest.approx(16 - (capped.best.step_s - capped.best.terms_s["input"]))
    assert capped.file.certificate is not None
    assert capped.file.certificate.gap == 0  # no plan gets its samples sooner
    assert capped.file.best.plan.parts == {0, 1}


def test_the_command_says_that_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    question = ["llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "64", "--seq-len", "8192"]
    rate = ["--input-rate", "2GB/s/node", "--input-rate", "5samples/s", "--sample-size", "1MB"]
    make_app()(["search", *question, *rate], standalone_mode=False, obj={})
    said = " ".join(capsys.readouterr().out.split())
    assert "12.80 s per step" in said  # 64 sequences at 5 a second
    assert re.search(r"input-bound: 5 samples/s are [\d.]+ times too slow for devices that compute a step in \d", said)
    assert "more devices do not help" in said
    assert "next best" not in said
    make_app()(["estimate", "plan.json"], standalone_mode=False, obj={})
    assert "waiting for samples" in capsys.readouterr().out
