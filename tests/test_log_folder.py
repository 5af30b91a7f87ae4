"""Do logs of past runs, with the launch files that started them, become runs of the database and a calibration?"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.launch_files import read_launch_on_part
from autoplan.profiler.store import open_store
from autoplan.readers.cluster import load_cluster, of_size
from autoplan.runs.log_folder import PassedOver, PastRun, past_runs
from commands import run

CLUSTER = load_cluster("h100-sxm:2x8")
SCRIPT = """#!/bin/bash
torchrun --nnodes {nodes} --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --num-attention-heads 32 --ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --swiglu \\
  --untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --disable-bias-linear \\
  --seq-length 4096 --max-position-embeddings 8192 --vocab-size 128256 --tensor-model-parallel-size {tp} \\
  --sequence-parallel --micro-batch-size 1 --global-batch-size {batch} --use-distributed-optimizer --bf16
"""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def script(tp: int = 2, nodes: int = 2, batch: int = 64) -> str:
    return SCRIPT.format(tp=tp, nodes=nodes, batch=batch)


def megatron(*seconds: float) -> str:
    """A log in Megatron-LM's words, two steps of warm-up before these."""
    lines = [
        f" [2026-08-22 15:22:22.123456] iteration {at:8d}/{1000:8d} | consumed samples: {at:12d} |"
        f" elapsed time per iteration (ms): {1e3 * step_s:.1f} | lm loss: {3.0:.6E} |\n"
        for at, step_s in enumerate((9.0, 9.0, *seconds), 1)
    ]
    return "".join(lines)


def growing(*seconds: float) -> str:
    """The same of steps that have not reached their batch."""
    return megatron(*seconds).replace("| lm loss", "| global batch size:    16 | lm loss")


def write(folder: Path, **files: str | bytes) -> Path:
    """Files by their names, in which `__` is a slash and `_` a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def look(folder: Path) -> tuple[dict[str, PastRun], dict[str, str]]:
    """(runs, why there is none) by the path of their log."""

    def read(path: Path) -> Launch:
        return read_launch_on_part(path, LaunchContext(), CLUSTER)

    runs, reasons = {}, {}
    for past_run in past_runs(folder, read):
        if isinstance(past_run, PassedOver):
            reasons[str(past_run.path.relative_to(folder))] = past_run.reason
        else:
            runs[str(past_run.log.relative_to(folder))] = past_run
    return runs, reasons


def test_a_log_belongs_to_the_nearest_launch_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        train_sh=script(tp=2),
        a_log=megatron(2.0),
        deep__er__b_out=megatron(3.0),
        other__train_sh=script(tp=4),
        other__logs__c_log_gz=gzip.compress(megatron(4.0, 4.2).encode()),
        other__notes_txt="nothing of interest\n",
        other__weights_bin=b"\0" * 100 + megatron(1.0).encode(),
    )
    runs, reasons = look(tmp_path)
    assert {log: run.launch.plan.tp for log, run in runs.items()} == {
        "a.log": 2,
        "deep/er/b.out": 2,
        "other/logs/c.log.gz": 4,
    }
    packed = runs["other/logs/c.log.gz"].logged
    assert packed is not None
    assert packed.step_s == pytest.approx((4.0, 4.2))
    assert reasons == {}


def test_of_several_launch_files_the_name_decides_or_nothing_does(tmp_path: Path) -> None:
    write(
        tmp_path,
        small_sh=script(tp=2),
        smaller_sh=script(tp=4),
        small_log=megatron(2.0),
        **{"smaller-4711_out": megatron(3.0), "job_log": megatron(4.0)},
    )
    runs, reasons = look(tmp_path)
    assert {log: run.launch.plan.tp for log, run in runs.items()} == {"small.log": 2, "smaller-4711.out": 4}
    assert reasons["job.log"].startswith("whether small.sh or smaller.sh started it is not clear")
    write(tmp_path, smaller_sh=script(tp=2))  # now both start the same
    runs, reasons = look(tmp_path)
    assert runs["job.log"].launch.plan.tp == 2
    assert reasons == {}


def test_streams_and_ranks_of_one_run_are_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        train_sh=script(),
        x__job_out=megatron(2.0),
        x__job_err=OOM,
        y__attempt_0__0__stdout_log="",
        y__attempt_0__15__stdout_log=megatron(3.0),
        y__attempt_0__15__stderr_log="a warning\n",
    )
    (tmp_path / "latest.log").symlink_to(tmp_path / "x" / "job.out")
    runs, reasons = look(tmp_path)
    assert reasons == {}
    assert len(runs) == 2
    oom, ranks = sorted(runs.values(), key=lambda logged_run: not logged_run.is_out_of_memory)
    assert oom.is_out_of_memory
    assert "CUDA out of memory" in oom.reason
    assert ranks.logged is not None
    assert ranks.logged.step_s == (3.0,)


def test_runs_end_well_out_of_memory_or_with_their_error(tmp_path: Path) -> None:
    write(
        tmp_path,
        train_sh=script(),
        good_log=megatron(2.0) + "Traceback (most recent call last):\nKeyboardInterrupt\n",
        oom_log=megatron(2.0) + OOM,
        again_log=OOM + "x" * 200_000 + "\n" + megatron(2.0),
        crash_log="starting\nValueError: the \x1b[31mdata\x1b[0m ran dry\nsrun: error\n",
        short_log=megatron(),
        empty_log="",
        cut_log_gz=gzip.compress(megatron(2.0, 2.1, 2.2).encode())[:-20],
        broken_log_gz=b"\x1f\x8b\x08\x00 this is no gzip file",
        growing_log=growing(1.0, 1.0) + OOM,
    )
    runs, reasons = look(tmp_path)
    found = {log: (run.logged is not None, run.is_out_of_memory) for log, run in runs.items()}
    assert found["good.log"] == found["again.log"] == (True, False)
    assert found["oom.log"] == (True, True)
    assert found["crash.log"] == (False, False)
    assert runs["crash.log"].reason == "ValueError: the data ran dry"
    assert reasons["short.log"].startswith("the log of Megatron-LM has no step time after the first 2 steps")
    assert reasons["empty.log"] == "the log contains no step time, and names no error"
    assert "broken.log.gz" in reasons
    assert reasons["growing.log"].endswith(
        "have 16 sequences of 4,096 tokens, those of the plan 64 sequences of 4,096 tokens"
    )


def test_what_does_not_go_together_is_passed_over_and_stops_nothing(tmp_path: Path) -> None:
    nanotron = "".join(f"iteration: {at} / 10 | elapsed_time_per_iteration_ms: 2K |\n" for at in range(1, 6))
    write(
        tmp_path,
        a__train_sh=script(),
        a__x_log=megatron(2.0),
        b__train_sh=script(tp=3),
        b__x_log=megatron(2.0),
        c__x_log=megatron(2.0),
        d__train_sh=script(),
        d__x_log=nanotron,
    )
    runs, reasons = look(tmp_path)
    assert list(runs) == ["a/x.log"]
    assert "3" in reasons["b/x.log"]
    assert reasons["c/x.log"].startswith("no launch file lies beside it or above it")
    assert reasons["d/x.log"] == "a log of nanotron, and train.sh is a file of megatron-lm"
    with pytest.raises(InputError, match="is no folder"):
        look(tmp_path / "a" / "x.log")


def test_a_part_of_a_cluster_is_whole_nodes_or_part_of_one() -> None:
    assert of_size(CLUSTER, 16) is CLUSTER
    assert (of_size(CLUSTER, 8).num_nodes, of_size(CLUSTER, 64).num_nodes) == (1, 8)
    assert (of_size(CLUSTER, 4).num_nodes, of_size(CLUSTER, 4).devices_per_node) == (1, 4)
    with pytest.raises(InputError, match="12 devices do not fill whole nodes"):
        of_size(CLUSTER, 12)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Runs of 1.4 times the predicted steps, one out of memory, and a log that lies alone."""
    folder = tmp_path / "runs"
    for at, (tp, nodes, batch) in enumerate(((2, 2, 64), (4, 2, 64), (2, 1, 32), (8, 2, 64), (4, 1, 64))):
        plan = write(folder, **{f"run{at}__train_sh": script(tp, nodes, batch)}) / f"run{at}" / "train.sh"
        seen = run(tmp_path, "estimate", "--from", str(plan), "--cluster", f"h100-sxm:{nodes}x8", "--json")
        assert seen.returncode == 0, seen.stderr
        step_s = 1.4 * float(json.loads(seen.stdout)["best"]["step_s"])
        write(folder, **{f"run{at}__job_log": megatron(*(step_s * (1 + 0.001 * way) for way in (-1, 0, 1)))})
    write(tmp_path, alone__x_log="")
    return write(folder, run0__wider__train_sh=script(tp=1), run0__wider__oom_log=OOM)


IMPORT = ("calibrate", "--from-logs", "runs", "--cluster", "h100-sxm:2x8", "--db", "r.db")


def test_logs_become_runs_once_and_calibrate_what_is_asked(archive: Path) -> None:
    folder = archive.parent
    first = run(folder, *IMPORT, COLUMNS="160")
    assert first.returncode == 0, first.stderr
    assert "6 runs: 6 new in the database, 0 already there; 0 files skipped" in first.stdout
    assert "out of memory" in first.stdout
    again = run(folder, *IMPORT, "--out", "mine.toml", "--quiet")
    assert "6 runs: 0 new in the database, 6 already there" in again.stdout
    with open_store(str(folder / "r.db"), writable=False) as store:
        runs = list(store.runs())
        assert list(store.check()) == []
    assert sorted(run.status for run in runs) == ["ok"] * 5 + ["oom"]
    assert {run.fingerprint.num_hosts for run in runs} == {1, 2}

    def step(*more: str) -> dict[str, float]:
        seen = run(
            folder, "estimate", "--from", "runs/run1/train.sh", "--cluster", "h100-sxm:2x8", *more, "--json", "--quiet"
        )
        assert seen.returncode == 0, seen.stderr
        best: dict[str, float] = json.loads(seen.stdout)["best"]
        return best

    shipped, own = step(), step("--calibration", "db", "--db", "r.db")
    assert own["step_s"] == pytest.approx(1.4 * shipped["step_s"], rel=0.02)
    assert own["low_s"] < 1.4 * shipped["step_s"] < own["high_s"]
    assert math.log(own["high_s"] / own["step_s"]) < 1.645 * 0.25
    assert step("--calibration", "mine.toml")["step_s"] == pytest.approx(own["step_s"], rel=1e-3)


def test_what_is_asked_wrongly_is_one_line(archive: Path) -> None:
    folder = archive.parent
    for arguments, says in (
        (("calibrate", "--from-logs", "runs"), "--from-logs needs --cluster"),
        (("calibrate", "--from-logs", "runs", "--runs", "x.csv", "--out", "o"), "give either a table of runs"),
        (("calibrate", "--runs", "x.csv"), "give --out FILE"),
        (("calibrate", "--runs", "x.csv", "--out", "o.toml", "--cluster", "h100-sxm"), "go with --from-logs"),
        (("calibrate", "--from-logs", "nowhere", "--cluster", "h100-sxm:2x8", "--db", "r.db"), "is no folder"),
        (("calibrate", "--from-logs", "alone", "--cluster", "h100-sxm:2x8", "--db", "r.db"), "no run could be used"),
    ):
        done = run(folder, *arguments)
        assert done.returncode == 1
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
    short = ("estimate", "llama3-8b", "--cluster", "h100-sxm:2x8", "--global-batch", "64", "--seq-len", "4096")
    done = run(folder, *short, "--calibration", "db", "--db", "r.db")
    assert "holds 0 finished runs of megatron-core on h100-sxm" in done.stderr
    small = run(folder, "calibrate", "--from-logs", "runs", "--cluster", "h100-sxm:1x8", "--db", "s.db", "--json")
    said = json.loads(small.stdout)
    assert "starts 16 devices, 'h100-sxm' has 8" in said["passed_over"]["run0/job.log"]
    assert [taken["log"] for taken in said["taken"]] == ["run2/job.log", "run4/job.log"]
    assert said["without"]["megatron-core"].startswith("the database holds 2 finished runs")
