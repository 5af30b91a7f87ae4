"""Does the doctor see what is there, name what mends the rest, and keep passwords to itself?"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from autoplan import __version__
from autoplan.api import doctor
from autoplan.api.doctor import Check, check_up
from autoplan.profiler.store import open_store
from commands import run
from stores import GEMM, some_records


def part(name: str, **arguments: object) -> Check:
    return next(check for check in check_up(**arguments).checks if check.part == name)  # type: ignore[arg-type]


def machine(**answer: object) -> mock._patch[mock.MagicMock]:
    """Torch, as it would answer on another machine."""
    usual = {"version": "2.9.0", "cuda": "12.8", "hip": None, "devices": [], "nccl": [2, 28, 3]}
    done = subprocess.CompletedProcess([], 0, json.dumps(usual | answer).encode(), b"")
    return mock.patch.object(subprocess, "run", return_value=done)


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("AUTOPLAN_DB", raising=False)


def test_it_says_what_runs_and_exits_well(tmp_path: Path) -> None:
    with machine():
        answer = run(tmp_path, "doctor")
    assert answer.returncode == 0
    words = " ".join(answer.stdout.split())  # a long path of Python's breaks the line
    assert f"autoplan {__version__}" in words
    assert "numpy" in words
    assert "none yet" in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_every_part_that_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    with machine(), mock.patch.object(doctor, "_version", return_value=""):
        found = json.loads(run(tmp_path, "doctor", "--json", "--db", "nothing.db").stdout)["checks"]
    problems = {finding["part"] for finding in found if finding["state"] == "problem"}
    assert problems == {"libraries", "database"}
    for answer in found:
        assert (
            answer["remedy"]
            or answer["state"] == "ok"
            or answer["part"] in ("devices", "network", "slurm", "frameworks", "kernels")
        )


def test_a_password_is_never_told(tmp_path: Path) -> None:
    with machine():
        answer = run(tmp_path, "doctor", "--json", AUTOPLAN_DB="postgresql://me:hush@127.0.0.1:1/none")
    assert answer.returncode == 0
    assert "postgresql://me@127.0.0.1:1/none" in answer.stdout
    assert "hush" not in answer.stdout + answer.stderr


def test_a_database_is_told_with_its_devices_and_a_stale_one_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "timings.db"
    with open_store(str(path)) as store:
        store.add([GEMM, *some_records(1, 2)])
    with machine():
        finding = part("database", url=str(path))
    assert finding.state == "ok"
    assert "records of h100-sxm: 3, newest 2026-11-21" in finding.says
    assert "schema" in finding.says
    with machine(), mock.patch.object(doctor, "STALE_DAYS", -1):
        assert "measure again with autoplan profile" in part("database", url=str(path)).remedy


def test_torch_that_sees_fewer_devices_than_the_driver_is_a_problem() -> None:
    gpu = mock.Mock()
    gpu.name = "NVIDIA H200"
    with machine(devices=["NVIDIA H200"]), mock.patch.object(doctor, "nvidia_gpus", return_value=([gpu, gpu], {})):
        assert part("devices").says == "2 x NVIDIA H200 by NVML"
        finding = part("torch")
    assert finding.state == "problem"
    assert "NCCL 2.28.3, sees 1 x NVIDIA H200 of 2" in finding.says
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy


def test_cores_that_are_slow_in_bf16_are_told_by_how_much() -> None:
    with machine(bf16_over_fp32=45.6):
        finding = part("torch")
    assert finding.state == "ok"
    assert "fp32 is 46 times as fast as bf16" in finding.remedy
    assert "--precision fp32" in finding.remedy
    with machine(bf16_over_fp32=1.1):
        assert part("torch").remedy == ""


def test_torch_that_hangs_or_breaks_is_told_and_waited_for_no_longer() -> None:
    with mock.patch.object(subprocess, "run", side_effect=subprocess.TimeoutExpired("python", 60)):
        assert "does not answer" in part("torch").says
    broken = subprocess.CalledProcessError(1, "python", stderr=b"Traceback\nImportError: libcudart.so.12\n")
    with mock.patch.object(subprocess, "run", side_effect=broken):
        assert part("torch").says.endswith("cannot be imported: ImportError: libcudart.so.12")


def test_a_job_of_slurm_is_told_with_its_nodes() -> None:
    with machine():
        finding = part("slurm", variables={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-03,07]"})
    assert finding.says == "job 7 on 4 nodes"


def test_files_that_are_not_installed_are_told_and_hide_nothing() -> None:
    missing = importlib.metadata.PackageNotFoundError("autoplan")
    with machine(), mock.patch.object(importlib.metadata, "requires", side_effect=missing):
        found = check_up().checks
    assert next(finding for finding in found if finding.part == "libraries").state == "problem"
    assert {"python", "devices", "torch", "database"} <= {finding.part for finding in found}


def test_a_device_that_fell_off_the_bus_is_a_problem() -> None:
    gpu = mock.Mock()
    gpu.name = "NVIDIA H200"
    with (
        machine(devices=["NVIDIA H200"]),
        mock.patch.object(doctor, "nvidia_gpus", return_value=([gpu], {})),
        mock.patch.object(doctor, "num_lost_gpus", return_value=1),
    ):
        finding = part("devices")
    assert finding.state == "problem"
    assert finding.says == "1 x NVIDIA H200 by NVML; 1 more does not answer"
    assert "nvidia-smi" in finding.remedy
