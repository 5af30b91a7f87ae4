"""Are training runs held, found and carried between databases as measurements of operations are?"""

from __future__ import annotations

import gzip
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from autoplan.base.errors import InputError
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store import Choice, open_store
from autoplan.profiler.store.exchange import read_exchange, write_exchange
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.training import TrainingSpec
from commands import run
from stores import GEMM, LAB, some_records

MODEL = ModelSpec(
    name="small", num_layers=4, hidden_size=256, vocab_size=1000, num_heads=4, num_kv_heads=2, ffn_size=512
)
RUN = RunRecord(
    fingerprint=LAB,
    framework="megatron-core",
    model=MODEL,
    training=TrainingSpec(seq_len=4096),
    plan=ParallelPlan(global_batch=16, micro_batch=1, tp=2, dp_shard=4, sharding="zero1", placement=("node7", "node8")),
    step_s=(2.0, 2.1, 2.2),
    peak_bytes=6e10,
    predicted_s=2.05,
    source="log of Megatron-LM",
    measured_by="ada",
    host="node7",
    measured_at="2026-11-21T12:00:00Z",
)
FAILED = replace(RUN, step_s=(), peak_bytes=None, status="oom", reason="CUDA out of memory on node7")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open_store(str(tmp_path / "a.db")) as store:
        store.add([GEMM, RUN, *some_records(0, 3), FAILED])
    return tmp_path


def good(folder: Path, *arguments: str) -> str:
    done = run(folder, "db", *arguments, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_runs_are_held_once_and_come_back_whole(folder: Path) -> None:
    with open_store(str(folder / "a.db")) as store:
        added = store.add([RUN, GEMM, replace(RUN, step_s=(3.0,))])
        assert (added.new, added.present) == (1, 2)
        assert list(store.runs())[:2] == [RUN, FAILED]
        assert store.find(RUN.key[:8]) == (RUN, None)
        assert (
            len(list(store.runs(Choice(trust=["eve"])))) == len(list(store.runs(Choice(device="a100-sxm-80gb")))) == 0
        )
        assert list(store.check()) == []
        assert len(list(store.records())) == 4


def test_the_key_is_of_the_content_alone() -> None:
    elsewhere = replace(RUN, host="x", measured_by="y", measured_at="", plan=replace(RUN.plan, placement=None))
    assert elsewhere.key == RUN.key
    others = [
        replace(RUN, step_s=(2.0,)),
        replace(RUN, framework="nanotron"),
        replace(RUN, plan=replace(RUN.plan, micro_batch=2)),
        replace(RUN, training=TrainingSpec(seq_len=2048)),
        replace(RUN, model=replace(MODEL, ffn_size=1024)),
        replace(RUN, fingerprint=replace(LAB, driver="580")),
        FAILED,
    ]
    assert len({RUN.key, *(other.key for other in others)}) == 8


def test_what_is_no_run_is_refused() -> None:
    for change, said in (
        ({"step_s": ()}, "ok needs step times"),
        ({"status": "oom"}, "oom has no step times"),
        ({"status": "good"}, "is unknown"),
        ({"step_s": (float("nan"),)}, "no time in seconds"),
        ({"step_s": (1.0,) * 10_001}, "at most 10000"),
        ({"peak_bytes": -1.0}, "peak_bytes must be a positive"),
        ({"source": "a\nb"}, "control characters"),
        ({"measured_at": "today"}, "not ISO 8601"),
    ):
        with pytest.raises(InputError, match=said):
            replace(RUN, **change)  # type: ignore[arg-type]


def test_a_run_changed_by_hand_is_found_or_refused(folder: Path) -> None:
    with open_store(str(folder / "a.db")) as store:
        with store._database.writing() as connection:
            connection.execute(text("UPDATE runs SET content = replace(content, '2.1', '1.1') WHERE id = 1"))
            connection.execute(text("UPDATE runs SET content = '{}' WHERE id = 2"))
        changed, broken = store.check()
        assert (changed.key, "another key" in changed.reason) == (RUN.key, True)
        assert "cannot be read" in broken.reason
        assert [run.step_s == RUN.step_s for run in store.runs()] == [False]
        assert store.num_unread == 1


def test_a_run_is_hidden_and_its_mark_travels(tmp_path: Path, url: str) -> None:
    with open_store(url) as team, open_store(str(tmp_path / "own.db")) as own:
        team.add([GEMM, RUN, FAILED])
        own.add([*team.records(), *team.runs()])
        assert team.change([RUN.key], hides=True, by="ada", reason="a noisy hour") == 1
        assert list(team.runs()) == [FAILED]
        assert list(team.runs(include_hidden=True)) == [RUN, FAILED]
        assert list(team.records()) == [GEMM]
        found, mark = team.find(RUN.key)
        assert mark is not None
        assert (found, mark.by, mark.reason) == (RUN, "ada", "a noisy hour")
        assert own.add(team.marks()).marks == 1
        assert list(own.runs()) == [FAILED]
        assert own.change([own.full_key(RUN.key[:8])], hides=False, by="bob", reason="was quiet") == 1
        assert team.add(own.marks()).marks == 1
        assert list(team.runs()) == [RUN, FAILED]


def test_a_database_of_before_gets_its_table_of_runs(tmp_path: Path) -> None:
    url = str(tmp_path / "old.db")
    with open_store(url) as store:
        store.add([GEMM])
        with store._database.writing() as connection:
            connection.execute(text("DROP TABLE run_marks"))
            connection.execute(text("DROP TABLE runs"))
            connection.execute(text("UPDATE autoplan_schema SET version_num = '2'"))
    with open_store(url) as store:
        assert list(store.runs()) == []
        store.add([RUN])
        assert (list(store.records()), list(store.runs())) == ([GEMM], [RUN])


def test_exchange_files_take_runs_along_and_say_so_only_then(tmp_path: Path) -> None:
    with_runs, without = tmp_path / "with.gz", tmp_path / "without.gz"
    assert write_exchange(with_runs, [GEMM], runs=[RUN, FAILED]) == 3
    assert list(read_exchange(with_runs)) == [GEMM, RUN, FAILED]
    write_exchange(without, [GEMM])
    versions = [
        json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])["version"] for path in (with_runs, without)
    ]
    assert versions == [2, 1]
    write_exchange(with_runs, [], runs=[RUN, FAILED], anonymous=True, force=True)
    assert b"node7" not in gzip.decompress(with_runs.read_bytes())
    assert b'"ada"' not in gzip.decompress(with_runs.read_bytes())
    assert next(iter(read_exchange(with_runs))).key == RUN.key
    lines = gzip.decompress(with_runs.read_bytes()).replace(b"2.1", b"-1")
    with_runs.write_bytes(gzip.compress(lines))
    with pytest.raises(InputError, match="line 2: a run has a step time that is no time"):
        list(read_exchange(with_runs))


def test_commands_of_the_database_take_runs_along(folder: Path) -> None:
    assert "2 training runs" in good(folder, "info", "--db", "a.db")
    listed = good(folder, "list", "--runs", "--db", "a.db")
    assert re.search(rf"{RUN.key[:12]}\s+small\s+.*megatron-core\s+2.10 s\s+2.05 s\s+55.9 GiB\s+ok\s+h100-sxm", listed)
    assert FAILED.key[:12] in listed
    assert json.loads(good(folder, "list", "--runs", "--db", "a.db", "--json"))[0]["run"]["step_s"] == [2.0, 2.1, 2.2]
    assert json.loads(good(folder, "show", RUN.key[:9], "--db", "a.db"))["run"]["model"]["name"] == "small"
    assert good(folder, "push", "b.db", "--db", "a.db") == "6 new, 0 already there\n"
    assert good(folder, "pull", "b.db", "--db", "a.db") == "0 new, 6 already there\n"
    good(folder, "export", "t.gz", "--db", "b.db")
    assert good(folder, "import", "t.gz", "--db", "c.db") == "6 new, 0 already there\n"
    assert good(folder, "import", "t.gz", "--db", "c.db") == "0 new, 6 already there\n"
    hidden = run(folder, "db", "hide", RUN.key[:9], GEMM.key[:9], "--reason", "a noisy hour", "--db", "a.db")
    assert hidden.stderr == "2 hidden, 0 already were\n"
    assert RUN.key[:12] not in good(folder, "list", "--runs", "--db", "a.db")
    assert RUN.key[:12] in good(folder, "list", "--runs", "--hidden", "--db", "a.db")
    assert json.loads(good(folder, "show", RUN.key, "--db", "a.db"))["hidden"]["reason"] == "a noisy hour"
    assert (
        good(folder, "push", "b.db", "--db", "a.db") == "0 new, 4 already there, 2 hidden not copied; 2 new reviews\n"
    )
    good(folder, "export", "marks.gz", "--db", "b.db", "--anonymous")
    assert "; 2 new reviews" in good(folder, "import", "marks.gz", "--db", "c.db")
    assert RUN.key[:12] not in good(folder, "list", "--runs", "--db", "c.db")
    assert b"noisy" not in gzip.decompress((folder / "marks.gz").read_bytes())
    refused = run(folder, "db", "list", "--runs", "--operation", "gemm", "--db", "a.db")
    assert "--runs lists training runs" in refused.stderr
    cut = run(folder, "db", "list", "--runs", "--hidden", "--limit", "1", "--db", "a.db")
    assert "showing the first 1" in cut.stderr


def test_a_command_that_ran_is_kept_and_one_that_failed_too(tmp_path: Path) -> None:
    program = str(Path(__file__).parent / "support" / "logging_program.py")
    made = run(
        tmp_path, "search", "llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096",
        "--fix", "tp=2", "--fix", "pp=1", "--out", "plan.json", "--quiet",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for what in ("end", "oom", "crash"):
        run(tmp_path, "run", "plan.json", "--db", "r.db", "--command", "--", sys.executable, program, what, "5")
    with open_store(str(tmp_path / "r.db"), writable=False) as store:
        ok, oom, crash = store.runs()
    assert ok.step_s == pytest.approx((2.03, 2.04, 2.05))
    assert (ok.peak_bytes, ok.source, ok.fingerprint.device) == (2**31, "log of Megatron-LM", "h100-sxm")
    assert (oom.status, crash.status) == ("oom", "failed")
    assert "CUDA out of memory" in oom.reason
    assert crash.reason.endswith("ValueError: the data ran dry")
    assert ok.predicted_s == crash.predicted_s


def test_measured_times_of_a_plan_are_read_from_the_database_that_keeps_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("AUTOPLAN_DB", raising=False)
    with open_store(str(tmp_path / "lab.db")) as store:
        store.add([GEMM])
    made = run(
        tmp_path, "search", "llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096",
        "--fix", "tp=2", "--fix", "pp=1", "--timings", "db", "--db", "lab.db", "--quiet",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    program = str(Path(__file__).parent / "support" / "logging_program.py")
    done = run(tmp_path, "run", "plan.json", "--db", "lab.db", "--command", "--", sys.executable, program, "end", "5")
    assert done.returncode == 0, done.stderr
