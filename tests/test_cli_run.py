"""`autoplan run` with the built-in trainer: what is shown and kept of a run, whether it ends well or not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from autoplan.api import plan_run
from autoplan.api.plan_run import of_trainer
from autoplan.api.timings import with_timings
from autoplan.base.processes import Children
from autoplan.cost.estimate import estimate
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store import open_store
from autoplan.spec.operations import Operation
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.trainer import run as trainer_run
from autoplan.trainer.task import Advance, TrainingReport
from commands import run
from problems import problem_for

MODEL = """
name = "small"
num_layers = 2
hidden_size = 32
vocab_size = 256
num_heads = 4
ffn_size = 64
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plan.json, of two ranks, and huge.json, of the same for a model that no machine holds."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "small.toml").write_text(MODEL)
    made = run(
        folder, "search", "small.toml", "--cluster", "cpu:1x2", "--global-batch", "4", "--seq-len", "16",
        "--framework", "torch", "--fix", "tp=1", "--fix", "pp=1", "--quiet",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    plan = json.loads((folder / "plan.json").read_text())
    plan["model"] |= {"hidden_size": 2**20, "vocab_size": 2**20}
    (folder / "huge.json").write_text(json.dumps(plan))
    return folder


def test_a_plan_of_another_framework_is_priced_by_what_was_measured_of_the_trainer(tmp_path: Path) -> None:
    path = str(tmp_path / "times.db")
    layer = (1, 4096, 4096, 14_336, 32, 8, 128, 1)
    measured: list[tuple[Operation, tuple[int, ...]]] = [
        ("gemm", (4096, 4096, 4096)), ("layer", layer), ("layer_backward", layer)
    ]  # fmt: skip
    with open_store(path) as store:
        store.add(
            Record(
                fingerprint=Fingerprint(device="h200-sxm"), operation=name, shape=shape, dtype="bf16", samples_s=(0.1,)
            )
            for name, shape in measured
        )
    plain = problem_for("llama3-8b", "h200-sxm:1x1")
    wanted = with_timings(replace(plain, framework=load_framework("torch")), "db", path)
    batch = PlanBatch.of([ParallelPlan(global_batch=2, sharding="none")], plain.model.num_layers)
    steps_s = [
        float(estimate(variant, batch).step_s[0])
        for variant in (wanted, of_trainer(with_timings(plain, "db", path), "db", path), of_trainer(plain, "", path))
    ]
    assert steps_s[0] == steps_s[1] > 2 * 32 * 0.2 > steps_s[2]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The process ids of the ranks, which must be gone in the end."""
    pids: list[int] = []

    class Watched(Children):
        def start(self) -> object:
            answer = super().start()
            pids.extend(self.pids)
            return answer

    monkeypatch.setattr(trainer_run, "Children", Watched)
    yield pids
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def striking(strike: Callable[[], None]) -> Callable[..., TrainingReport | None]:
    """Training in which something happens after the second step."""

    def train(task: object, place: object, *, advance: Callable[[Advance], None]) -> TrainingReport | None:
        def seen(now: Advance) -> None:
            advance(now)
            if now.step == 1:
                strike()

        return run_task(task, place, advance=seen)  # type: ignore[arg-type]

    run_task = trainer_run.run_task
    return train


def kept(folder: Path, name: str) -> list[RunRecord]:
    with open_store(str(folder / name), writable=False) as store:
        return list(store.runs())


def test_a_run_is_compared_with_its_prediction_and_kept(folder: Path) -> None:
    flags = ("--steps", "3", "--warmup", "1", "--check", "--db", "ok.db", "--out", "ok.json")
    done = run(folder, "run", "plan.json", *flags, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "losses, gradients and weights of the first steps match those of a single process" in done.stdout
    measured = json.loads((folder / "ok.json").read_text())["measured"]
    (record,) = kept(folder, "ok.db")
    assert list(record.step_s) == measured["step_s"]
    assert len(record.step_s) == 3
    assert record.peak_bytes == max(measured["peak_bytes"])
    assert (record.status, record.source, record.framework) == ("ok", "built-in trainer", "torch")


def test_a_run_beside_other_load_is_kept_as_contaminated(folder: Path) -> None:
    num_cores = os.cpu_count() or 1
    spinners = [psutil.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_cores)]
    began = time.monotonic()
    try:
        done = run(folder, "run", "plan.json", "--steps", "100", "--warmup", "1", "--db", "load.db")
        load = sum(spinner.cpu_times().user for spinner in spinners) / (time.monotonic() - began) / num_cores
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    assert done.returncode == 0, done.stderr
    (record,) = kept(folder, "load.db")
    if record.status == "ok" and load < 0.15:
        pytest.skip(f"other programs may take no more than {100 * load:.0f} % of this machine's cores")
    assert (record.status, len(record.step_s)) == ("contaminated", 100)
    assert float(record.conditions["other_load"].removesuffix(" %")) > 6
    assert f"{record.reason}: stored as contaminated, so that no calibration uses this run" in done.stderr


def test_other_load_is_that_of_the_worst_host() -> None:
    pytest.importorskip("torch")
    from autoplan.trainer.rank import other_load

    calm, loaded = [(0.9, 2.0), (0.9, 2.0)], [(0.5, 2.0), (0.5, 2.1)]  # of a rank and of its host, by step
    assert other_load([("a", calm), ("a", calm), ("b", loaded), ("b", loaded)], 2.0, 2) == pytest.approx(2.1 / 4)
    assert other_load([("a", calm)], 2.0, 2) == pytest.approx(2.2 / 4)
    assert other_load([("a", [(0.5, 0.0)])], 2.0, 2) is None  # the system does not tell
    assert other_load([("a", calm)], 0.2, 2) is None  # too short for its clock


def test_a_vocabulary_without_a_token_for_each_byte_trains_on_random_ones(folder: Path) -> None:
    """So that `autoplan tune`, which has no option for data, tries its plans too."""
    plan = json.loads((folder / "plan.json").read_text())
    plan["model"] |= {"vocab_size": 64}
    (folder / "letters.json").write_text(json.dumps(plan))
    done = run(folder, "run", "letters.json", "--steps", "1", "--warmup", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"]["data"] == "synthetic"
    done = run(folder, "run", "letters.json", "--data", "text")
    assert done.returncode == 1
    assert "'small' has 64: use --data synthetic" in done.stderr


def test_a_model_that_does_not_fit_is_kept_as_out_of_memory(folder: Path, started: list[int]) -> None:
    done = run(folder, "run", "huge.json", "--db", "oom.db", "--quiet")
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    assert done.stderr.count("\n") == 1
    (record,) = kept(folder, "oom.db")
    assert (record.status, record.source) == ("oom", "built-in trainer")
    assert "out of memory" in record.reason


def test_a_run_that_loses_a_rank_is_kept_as_failed(
    folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "run_task", striking(lambda: os.kill(started[1], signal.SIGKILL)))
    done = run(folder, "run", "plan.json", "--steps", "10000", "--db", "lost.db", "--out", "lost.json", "--quiet")
    assert done.returncode == 1
    assert done.stderr == "autoplan: rank 1 was ended by SIGKILL\n"
    (record,) = kept(folder, "lost.db")
    assert (record.status, record.reason) == ("failed", "rank 1 was ended by SIGKILL")
    assert not (folder / "lost.json").exists()


def test_ctrl_c_ends_the_ranks(folder: Path, started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_run, "run_task", striking(lambda: os.kill(os.getpid(), signal.SIGINT)))
    done = run(folder, "run", "plan.json", "--steps", "10000", "--db", "left.db", "--quiet")
    assert done.returncode == 1
    assert done.stderr == "autoplan: interrupted after 2 steps: the ranks were ended\n"
    assert kept(folder, "left.db") == []


def test_ranks_end_when_the_program_is_killed(folder: Path) -> None:
    """By nobody: they see that the line to it is cut."""
    command = [sys.executable, "-c", "from autoplan.cli import main; main()", "run", "plan.json", "--steps", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL) as program:
        end = time.monotonic() + 120
        ranks: list[int] = []
        while len(ranks) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
            ranks = [rank for server in children(program.pid) for rank in children(server)]
        program.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_a_port_in_use_is_refused_before_ranks_wait_at_it(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURM_LOCALID": "0"}
        done = run(folder, "run", "plan.json", "--quiet", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2", **place)
    assert done.returncode == 1
    assert done.stderr == (
        f"autoplan: ranks cannot meet at port {port} of this host: Address already in use; set MASTER_PORT to another\n"
    )
