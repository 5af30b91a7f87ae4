"""Tests of what is installed: a wheel that holds every package, which nothing on a user's path can shadow."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHADOWS = ("search.py", "profiler.py", "frameworks.py", "cost.py", "base.py")  # names that a user's programs may have


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_module_and_data_file_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    tracked = subprocess.run(
        ["git", "ls-files", "autoplan", "profiler", "search"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    files = {name for name in tracked if not (ROOT / name).is_symlink()}
    expected = {name if name.startswith("autoplan/") else f"autoplan/{name}" for name in files}
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize("installed", ["editable", "wheel"])
def test_programs_of_the_user_do_not_shadow_the_packages(wheel: Path, tmp_path: Path, installed: str) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in SHADOWS:
        (folder / name).write_text("raise SystemExit('the program of the user')\n")
    (folder / "models").mkdir()
    path = [str(folder)]
    if installed == "wheel":
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path / "site")
        path.append(str(tmp_path / "site"))
    program = (
        "import autoplan.cli, autoplan.profiler.store, autoplan.search.study, sys; print(autoplan.__file__);"
        "sys.argv[1:] = 'search llama3-8b --cluster h100-sxm:1x8 --global-batch 64 --seq-len 4096 --quiet'.split();"
        "autoplan.cli.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(tmp_path / "site") if installed == "wheel" else str(ROOT))
    assert (folder / "plan.json").exists()


@pytest.mark.parametrize("name", ["search", "profiler"])
def test_the_folders_are_imported_under_one_name_alone(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert f"ImportError: import autoplan.{name}, not {name}" in ended.stderr
