"""`autoplan profile` as it is typed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import faulty_ranks
from commands import run

torch = pytest.importorskip("torch")

from autoplan.profiler.crew import Crew  # noqa: E402
from autoplan.profiler.machine.environment import fingerprint  # noqa: E402
from autoplan.profiler.store import open_store  # noqa: E402
from model_specs import SMALL_TOML  # noqa: E402
from stores import stored_records  # noqa: E402

AUTOPLAN = [sys.executable, "-c", "from autoplan.cli import main; main()"]
QUICK = ("--seq-len", "32", "--tp", "1", "--micro-batches", "1", "--ranks", "2", "--allowance", "0.05s")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL_TOML)
    return tmp_path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def profile(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "profile", "small.toml", *arguments, **variables)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget", "10"), "time '10': write a number above 0 with a unit"),
        (("--budget", "0s"), "time '0s': write a number above 0 with a unit"),
        (("--tp", "3"), "tp 3 must divide the 4 heads"),
        (("--tp", "0"), "--tp '0': write whole numbers from 1"),
        (("--only", "sort"), "--only 'sort' is unknown; known are gemm"),
        (("--mode", "quick"), "--mode 'quick' is unknown; known are sustained, burst"),
        (("--dtypes", "int8"), "--dtypes 'int8' is unknown"),
        (("--ranks", "two"), "--ranks 'two': write a whole number"),
        (("--ranks", "-1"), "--ranks must be between 0 and"),
        (("--cluster", "nowhere:1x1"), "unknown cluster"),
    ],
)
def test_bad_input_is_one_line_before_any_rank_starts(folder: Path, arguments: tuple[str, ...], says: str) -> None:
    done = profile(folder, *arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_ranks_are_not_started_where_a_launcher_has(folder: Path) -> None:
    done = profile(folder, "--ranks", "2", RANK="0", WORLD_SIZE="4", LOCAL_RANK="0")
    assert done.returncode == 1
    assert "--ranks is for ranks started here: torchrun has started 4" in done.stderr


def test_a_dry_run_shows_the_plan_and_stores_nothing(folder: Path) -> None:
    done = profile(folder, *QUICK, "--db", f"sqlite:///{folder}/times.db", "--dry-run")
    assert done.returncode == 0
    assert "all_reduce" in done.stdout
    assert "measurements in about" in done.stdout
    assert "; 0 are already in the database" in " ".join(done.stdout.split())
    assert list(open_store(f"sqlite:///{folder}/times.db").records()) == []


def test_a_dry_run_for_a_cluster_starts_no_rank_and_says_what_fewer_nodes_cannot_show(folder: Path) -> None:
    asked = ("--seq-len", "32", "--cluster", "h100-sxm:4x8", "--db", "none.db", "--dry-run")
    done = profile(folder, *asked, "--nodes", "1")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "autoplan: h100-sxm: 8 ranks on 1 node",
        "autoplan: warning: groups over several nodes are not measured on one: they keep the reference",
    ]
    assert not (folder / "none.db").exists()
    assert profile(folder, *asked, "--nodes", "5").stderr == "autoplan: --nodes 5: the cluster has 4\n"


@pytest.mark.parametrize("columns", ["60", "80"])
def test_a_dry_run_fits_the_width(folder: Path, columns: str) -> None:
    done = profile(folder, *QUICK, "--db", f"sqlite:///{folder}/times.db", "--dry-run", COLUMNS=columns)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert lines == [line.rstrip() for line in lines]
    assert "\u2026" not in done.stdout
    assert {"operation", "shapes", "takes"} <= set(lines[0].split())


def test_what_was_measured_is_not_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.profiler.sweep.MIN_AGAIN_S", 0.0)  # what is spoilt here is not what is asked
    monkeypatch.setattr("autoplan.api.profiling.Crew", partial(Crew, prepare=faulty_ranks.few_samples))
    url = f"sqlite:///{folder}/times.db"
    arguments = (*QUICK, "--db", url, "--only", "norm,norm_backward,send_recv")
    first = profile(folder, *arguments)
    assert first.returncode == 0, first.stderr
    assert "8 of 8 measurements" in first.stdout
    # What other load spoilt is worth another try.
    num_settled = len(open_store(url).measured_keys(fingerprint(torch.device("cpu"))))
    again = profile(folder, *arguments)
    assert f"{8 - num_settled} of {8 - num_settled} measurements" in again.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143)])
def test_an_interrupt_says_what_is_stored(folder: Path, number: signal.Signals, status: int) -> None:
    db = folder / "times.db"
    command = [*AUTOPLAN, "profile", "small.toml", *QUICK, "--db", f"sqlite:///{db}"]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "2 ranks on 1 node\n" in process.stderr.readline()
    while not stored_records(db):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert "stored; run the same command again for the rest" in errors
    assert "Traceback" not in errors


# SIGTERM while ranks start, and again while they are ended, as `timeout` sends it.
STRUCK_TWICE = """
import os, signal
from autoplan.cli import main
from autoplan.profiler.crew import Crew

Crew.start = Crew.stop = lambda crew, *given: os.kill(os.getpid(), signal.SIGTERM)
main()
"""


def test_sigterm_before_the_first_measurement_ends_in_one_line(folder: Path) -> None:
    command = [sys.executable, "-c", STRUCK_TWICE, "profile", "small.toml", *QUICK, "--db", "struck.db"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60)
    expected = "autoplan: interrupted: files are whole or not there, what a database took is kept\n"
    assert (done.returncode, done.stdout, done.stderr) == (143, "", expected)
