"""Does a program of the user run under watch, and does nothing of it stay?"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from autoplan.jobs import program
from autoplan.jobs.program import Ending, run_program
from autoplan.profiler.store import open_store
from autoplan.runs.failure import LogEnd
from commands import run

PROGRAM = str(Path(__file__).parent / "support" / "logging_program.py")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "GRACE_S", 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    made = run(
        folder, "search", "llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096",
        "--fix", "tp=2", "--fix", "pp=1", "--out", "plan.json", "--quiet",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder


def command(folder: Path, *arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run(folder, "run", "plan.json", *flags, "--quiet", "--command", "--", sys.executable, PROGRAM, *arguments)


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids: Path) -> None:
    numbers = [int(pid) for pid in pids.read_text().split()]
    assert len(numbers) == 3
    assert not [number for number in numbers if is_running(number)]


def test_what_a_program_writes_as_it_ends_is_heard_however_late_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look for output times out just before the program writes its last words and ends."""
    pid, go = tmp_path / "pid", tmp_path / "go"
    source = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "print('last words')\n"
        "raise SystemExit(3)\n"
    )

    class LateSelector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if go.exists():
                return super().select(timeout)
            while not (pid.exists() and pid.read_text()):
                time.sleep(0.01)
            go.touch()
            while is_running(int(pid.read_text())):
                time.sleep(0.01)
            return []

    monkeypatch.setattr(program.selectors, "DefaultSelector", LateSelector)
    heard: list[bytes] = []
    ending = run_program([sys.executable, "-c", source], lambda data, _: bool(heard.append(data)), limit_s=60)
    assert b"".join(heard) == b"last words\n"
    assert (ending.kind, ending.status) == ("by itself", 3)


def test_a_programs_steps_are_compared_with_the_plan_and_it_is_ended(folder: Path, tmp_path: Path) -> None:
    log, out, pids = tmp_path / "run.log", tmp_path / "run.json", tmp_path / "pids"
    flags = ("--steps", "3", "--log", str(log), "--out", str(out))
    done = command(folder, "endless", "5", str(pids), flags=flags)
    assert done.returncode == 0, done.stderr
    assert "2.04 s per step on h100-sxm" in " ".join(done.stdout.split())
    assert "memory, fullest rank" in done.stdout
    assert "2.15 GB" in done.stdout
    assert "in the log of Megatron-LM" in " ".join(done.stdout.split())
    assert_gone(pids)
    run_file = json.loads(out.read_text())
    assert run_file["task"]["arguments"][2:4] == ["endless", "5"]
    assert run_file["measured"]["step_s"][:3] == pytest.approx([2.03, 2.04, 2.05])
    assert run_file["measured"]["peak_bytes"] == [2 * 2**30]
    assert run_file["predicted"]["step_s"] > 0
    assert log.read_bytes().startswith(b"[Rank 0] (after 2")
    assert log.read_bytes().count(b"elapsed time per iteration") >= 5
    again = command(folder, "endless", "5", flags=flags)
    assert again.returncode == 1
    assert "exists" in again.stderr


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("crash", "failed (1) after 2 timed steps: ValueError: the data ran dry"),
        ("oom", "ran out of memory after 2 timed steps: torch.OutOfMemoryError: CUDA out of memory."),
        ("killed", "was killed after 2 timed steps, as systems do where the host's memory runs out"),
        ("nameless", "was ended by signal 40 after 2 timed steps"),
        ("hang", "wrote nothing for 3 s after 2 timed steps and was ended (--limit)"),
    ],
)
def test_what_goes_wrong_is_one_line_with_the_programs_last_words(
    folder: Path, tmp_path: Path, what: str, said: str
) -> None:
    pids, out = tmp_path / "pids", tmp_path / "run.json"
    limit = "3s" if what == "hang" else "60s"
    done = command(folder, what, "4", str(pids), flags=("--limit", limit, "--out", str(out)))
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
    assert_gone(pids)


def test_a_program_that_trains_another_batch_is_told_so(folder: Path) -> None:
    done = run(folder, "run", "plan.json", "--command", "--", sys.executable, PROGRAM, "other-batch", "9")
    assert done.returncode == 1
    assert "steps in the log have 3 sequences of " in done.stderr
    assert "such steps do not count" in done.stderr
    assert "no step time of the plan's batch" in done.stderr.splitlines()[-1]


def test_a_program_that_ends_early_is_compared_by_what_it_logged_and_one_without_steps_is_refused(folder: Path) -> None:
    short = run(folder, "run", "plan.json", "--command", "--", sys.executable, PROGRAM, "end", "5")
    assert "3 times of 3 steps" in " ".join(short.stdout.split())
    assert short.stderr.endswith("ended after 3 of 10 steps to time\n")
    none = command(folder, "end", "0")
    assert none.returncode == 1
    assert "no step time.  Looked for" in none.stderr or "no step time. Looked for" in none.stderr


def test_ctrl_c_ends_all_that_was_started(folder: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        while not (pids.exists() and len(pids.read_text().split()) == 3):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    done = command(folder, "hang", "4", str(pids))
    thread.join()
    assert done.returncode == 1
    assert "interrupted after" in done.stderr
    assert_gone(pids)


def test_flags_that_do_not_go_together_are_refused(folder: Path) -> None:
    for arguments, said in (
        (("--command",), "--command and PROGRAM go together"),
        (("--", "true"), "--command and PROGRAM go together"),
        (("--command", "--check", "--", "true"), "--check, --data and --traces need the built-in trainer"),
        (("--command", "--", "no-such-program"), "'no-such-program' cannot be started: No such file"),
    ):
        done = run(folder, "run", "plan.json", *arguments)
        assert done.returncode == 1
        assert said in done.stderr
    done = run(folder, "run", "plan.json", "--command", "--", "true", RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")
    assert "run it once, not on every rank of torchrun" in done.stderr


@contextlib.contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """Files of this process and its children end there, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_under_the_log_ends_the_program(folder: Path, tmp_path: Path) -> None:
    pids, log = tmp_path / "pids", tmp_path / "run.log"
    with small_files(200):
        done = command(folder, "endless", "1", str(pids), flags=("--log", str(log)))
    assert done.returncode == 1
    assert done.stderr == f"autoplan: {log}: cannot be written: File too large\n"
    assert_gone(pids)


def test_a_full_disk_under_the_database_is_known_before_the_program_starts(folder: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with small_files(1000):
        done = command(folder, "endless", "1", str(pids), flags=("--db", str(tmp_path / "runs.db")))
    assert done.returncode == 1
    assert "runs.db" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not pids.exists()


def test_a_full_disk_under_the_result_leaves_it_on_the_screen_and_in_the_database(folder: Path, tmp_path: Path) -> None:
    out, database = tmp_path / "run.json", str(tmp_path / "runs.db")
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        done = command(folder, "end", "5", flags=("--steps", "3", "--out", str(out), "--db", database))
    assert done.returncode == 1
    assert done.stderr == f"autoplan: {out}: cannot be written: No space left on device\n"
    assert "2.04 s per step" in done.stdout
    with open_store(database, writable=False) as store:
        assert len(list(store.runs())) == 1
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("runs.db")]


def test_a_child_that_keeps_the_output_open_is_not_waited_for() -> None:
    began = time.monotonic()
    ending = run_program(["sh", "-c", "sleep 300 & exit 3"], lambda data, now_s: False, limit_s=60.0)
    assert ending == Ending(kind="by itself", status=3)
    assert time.monotonic() - began < 10


def test_the_first_error_of_the_end_is_the_reason() -> None:
    words = LogEnd()
    assert words.reason == "it wrote nothing"
    for line in ("[rank1]:Traceback (most recent call last):", "[rank1]:KeyError: 'a'", "RuntimeError: NCCL", "bye"):
        words.read(line)
    assert words.reason == "KeyError: 'a'"
    for label in (
        "[rank3]:[rank3]: ",
        "0: [rank3]: ",
        "worker-1: ",
        "10.0.0.7: ",
        "2026-08-22T15:22:22.123Z [rank3]: ",
    ):
        words = LogEnd()
        for line in ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "KeyError: 'a'"):
            words.read(f"{label}{line}")
        words.read("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
        words.read("pdsh@node0: worker-1: ssh exited with exit code 1")
        assert words.reason == "KeyError: 'a'"
    words = LogEnd()
    words.read("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0")
    words.read("srun: error: task 0: Out Of Memory")
    assert words.out_of_memory.startswith("slurmstepd")
    assert words.reason == "srun: error: task 0: Out Of Memory"
