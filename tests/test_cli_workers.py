"""`autoplan search` where others may join, and with Optuna's samplers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import run
from model_specs import LLAMA_CONFIG
from stores import postgres_schema

SEARCH = ("search", "llama.json", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA_CONFIG))
    return tmp_path


def answer(folder: Path, *arguments: str) -> dict[str, object]:
    done = run(folder, *SEARCH, *arguments, "--force")
    assert done.returncode == 0, done.stderr
    plan = json.loads((folder / "plan.json").read_text())
    return {name: plan[name] for name in ("best", "alternatives", "certificate", "run")}


def test_workers_and_storages_change_nothing_but_the_time(folder: Path) -> None:
    alone = answer(folder)
    assert answer(folder, "--workers", "2") == alone
    assert answer(folder, "--storage", "journal", "--study", "mine") == alone
    other = run(folder, *SEARCH[:-1], "2048", "--storage", "journal", "--study", "mine", "--force", "--quiet")
    assert other.returncode == 1
    assert other.stderr.startswith("autoplan: study mine belongs to another problem (problem ")
    assert other.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "asked",
    [
        ("--objective", "cost-per-token", "--price", "2", "--nodes", "1,2"),
        ("--objective", "step-time", "--objective", "memory-headroom"),
    ],
)
def test_objectives_are_shared_too(folder: Path, asked: tuple[str, ...]) -> None:
    alone = answer(folder, *asked)
    assert alone["run"]
    assert answer(folder, *asked, "--workers", "2", "--storage", "journal", "--study", "mine") == alone


def test_a_password_is_neither_printed_nor_written(folder: Path) -> None:
    with postgres_schema() as url:
        whole = url.replace("postgres@", "postgres:s3cret@")
        done = run(folder, *SEARCH, "--storage", whole)
    assert done.returncode == 0, done.stderr
    plan = (folder / "plan.json").read_text()
    assert "--storage postgresql://postgres@127.0.0.1:5432/postgres" in json.loads(plan)["command"]
    assert "s3cret" not in done.stdout + done.stderr + plan


def test_a_sampler_says_what_it_leaves_open(folder: Path) -> None:
    done = run(folder, *SEARCH, "--sampler", "tpe", "--trials", "2")
    assert done.returncode == 0, done.stderr
    certificate = json.loads((folder / "plan.json").read_text())["certificate"]
    assert certificate["expanded"] <= 2 < certificate["cells"]
    assert ("not proven" in " ".join(done.stdout.split())) == (not certificate["proven"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--study", "mine"), "--study mine needs --storage"),
        (("--workers", "0"), "--workers must be from 1 to 256, got 0"),
        (("--sampler", "tpe", "--objective", "step-time"), "--sampler tpe is for step times on one cluster"),
        (
            ("--workers", "2", "--cluster", "h100-sxm:1x8+a100-sxm:1x8"),
            "--workers: a mixed cluster is searched by one process",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(folder: Path, flags: tuple[str, ...], says: str) -> None:
    done = run(folder, *SEARCH, *flags)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "plan.json").exists()
