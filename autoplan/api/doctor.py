"""Checks of what is installed, visible and reachable; each part on its own, so that no failure hides another."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from autoplan.base.errors import AutoplanError
from autoplan.base.files import is_file
from autoplan.base.units import cleaned, format_bytes
from autoplan.base.version import __version__
from autoplan.frameworks.registry import FRAMEWORKS
from autoplan.profiler.machine.hardware import SYS, amd_gpus, nics, num_lost_gpus, nvidia_gpus
from autoplan.profiler.shipped_kernels import SHIPPED

State = Literal["ok", "absent", "problem"]  # absent: not there, and not needed for everything

TORCH_S = 60.0  # what talks to a device in trouble may never end
STALE_DAYS = 180
EMULATED = 2.0  # times as long as products in fp32: bf16 without units of its own
# What is asked of torch, in a process of its own.
ASK_TORCH = """
import json, time, torch
cuda = torch.cuda.is_available()
def product_s(dtype):
    torch.set_num_threads(1)
    matrix, times = torch.ones(384, 384, dtype=dtype), []
    for _ in range(4):
        began = time.process_time()
        torch.mm(matrix, matrix)
        times.append(time.process_time() - began)
    return min(times)
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "devices": [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())] if cuda else [],
    "nccl": list(torch.cuda.nccl.version()) if cuda else [],
    "bf16_over_fp32": 0 if cuda else product_s(torch.bfloat16) / product_s(torch.float32),
}))
"""
# The distributions of frameworks, by what they are called.
DISTRIBUTIONS = {name: distribution for entry in FRAMEWORKS for name, distribution in entry.distributions.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check: the part, its state, and the remedy for a problem."""

    part: str
    state: State
    says: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """Checks of all parts."""

    checks: tuple[Check, ...]

    @property
    def num_problems(self) -> int:
        """Number of parts with a problem."""
        return sum(check.state == "problem" for check in self.checks)


def check_up(url: str | None = None, *, variables: Mapping[str, str] = os.environ, sys_path: Path = SYS) -> Checkup:
    """Run all checks; `url` names the timing database.  Nothing is written and no password is shown."""
    return Checkup(
        checks=(
            _python(),
            *_libraries(),
            *_devices(sys_path),
            _network(sys_path),
            _database(url),
            _slurm(variables),
            *_frameworks(),
        )
    )


def _python() -> Check:
    says = f"{platform.python_version()} at {sys.executable}, autoplan {__version__}"
    return Check(part="python", state="ok", says=says)


# -- libraries ---------------------------------------------------------------------------------------------------------


def _libraries() -> Iterator[Check]:
    """Check what autoplan needs, then every extra."""
    try:
        required = importlib.metadata.requires("autoplan") or ()
    except importlib.metadata.PackageNotFoundError:
        says = "autoplan runs from its files and is not installed: what it needs is not known"
        yield Check(part="libraries", state="problem", says=says, remedy="pip install autoplan, or -e of its files")
        return
    groups: dict[str, list[str]] = {}
    for text in required:
        distribution = re.match(r"[A-Za-z0-9._-]+", text)
        condition = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", text)
        if distribution:
            groups.setdefault(condition[1] if condition else "", []).append(distribution[0])
    for extra, names in groups.items():
        if extra == "dev":
            continue
        versions = {name: _version(name) for name in dict.fromkeys(names)}
        missing = [name for name, version in versions.items() if not version]
        says = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        if missing:
            says = f"{says}{'; ' * bool(says)}without {', '.join(missing)}"
        package = f"autoplan[{extra}]" if extra else "autoplan"
        yield Check(
            part=f"extra {extra}" if extra else "libraries",
            state="ok" if not missing else "absent" if extra else "problem",
            says=says,
            remedy=f"pip install '{package}'" if missing else "",
        )


def _version(distribution: str) -> str:
    """Version of an installed distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- devices -----------------------------------------------------------------------------------------------------------


def _devices(sys_path: Path) -> Iterator[Check]:
    """Check which devices the driver and torch see."""
    gpus, _ = nvidia_gpus()
    source = "NVML"
    if not gpus:
        gpus, _ = amd_gpus(sys_path)
        source = "amdkfd"
    names, lost = [gpu.name for gpu in gpus], num_lost_gpus()
    has_driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").is_dir()
    if lost:
        says = f"{_counted(names) or 'none'} by NVML; {lost} more do{'es' * (lost == 1)} not answer"
        yield Check(
            part="devices", state="problem", says=says, remedy="see what nvidia-smi says, then restart the node"
        )
    elif names:
        yield Check(part="devices", state="ok", says=f"{_counted(names)} by {source}")
    elif has_driver:
        remedy = "pip install 'autoplan[profile]'" if not _version("nvidia-ml-py") else "see what nvidia-smi says"
        yield Check(part="devices", state="problem", says="a driver of NVIDIA, but no device by NVML", remedy=remedy)
    else:
        says = "no accelerator on this machine: needed to measure, not to plan"
        yield Check(part="devices", state="absent", says=says)
    yield _torch(len(names))


def _torch(num_devices: int) -> Check:
    if not _version("torch"):
        remedy = "pip install 'autoplan[profile]', to profile and to run plans with the built-in trainer"
        return Check(part="torch", state="absent", says="not installed", remedy=remedy)
    try:
        process = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TORCH_S,
            check=True,
        )
        answer: dict[str, Any] = msgspec.json.decode(process.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        says = f"{_version('torch')}, does not answer within {TORCH_S:.0f} s"
        return Check(part="torch", state="problem", says=says, remedy="see whether nvidia-smi or rocm-smi answers")
    except (subprocess.CalledProcessError, OSError, IndexError, msgspec.DecodeError) as error:
        lines = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip().splitlines()
        says = f"{_version('torch')}, cannot be imported: {cleaned(lines[-1] if lines else str(error))}"
        return Check(
            part="torch", state="problem", says=says, remedy="reinstall it: pip install --force-reinstall torch"
        )
    runtime = (
        f"ROCm {answer['hip']}" if answer["hip"] else f"CUDA {answer['cuda']}" if answer["cuda"] else "for CPU alone"
    )
    library = f", {'RCCL' if answer['hip'] else 'NCCL'} {'.'.join(map(str, answer['nccl']))}" if answer["nccl"] else ""
    says = f"{answer['version']}, {runtime}{library}, sees {_counted(answer['devices']) or 'no accelerator'}"
    if num_devices > len(answer["devices"]):
        remedy = (
            "unset CUDA_VISIBLE_DEVICES, or see whether the driver is as new as the CUDA of torch"
            if answer["cuda"] or answer["hip"]
            else "install the build of torch for this accelerator"
        )
        return Check(part="torch", state="problem", says=f"{says} of {num_devices}", remedy=remedy)
    if (times := answer.get("bf16_over_fp32", 0.0)) > EMULATED:
        remedy = f"on these cores fp32 is {times:.0f} times as fast as bf16: search and tune with --precision fp32"
        return Check(part="torch", state="ok", says=says, remedy=remedy)
    return Check(part="torch", state="ok", says=says)


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _network(sys_path: Path) -> Check:
    ports = [port for port in nics(sys_path) if port.is_up]
    if not ports:
        return Check(part="network", state="absent", says="no InfiniBand or RoCE port is up: one node alone needs none")
    return Check(part="network", state="ok", says=_counted([str(port) for port in ports]))


# -- what is around ----------------------------------------------------------------------------------------------------


def _database(url: str | None) -> Check:
    """Check the timing database: where it is, its devices, and how old its timings are."""
    from autoplan.profiler.store import default_path, open_store

    if url is None and "AUTOPLAN_DB" not in os.environ and not default_path().exists():
        return Check(
            part="database",
            state="absent",
            says=f"none yet ({default_path()}): step times are based on reference times",
            remedy="fill it with autoplan profile, autoplan db pull or autoplan db import",
        )
    try:
        with open_store(url, writable=False) as store:
            holdings, schema, name = store.holdings(), store.schema, store.name
    except AutoplanError as error:
        remedy = "see `autoplan db info --help` for --db and AUTOPLAN_DB"
        return Check(part="database", state="problem", says=cleaned(" ".join(str(error).split())), remedy=remedy)
    size = f", {format_bytes(Path(name).stat().st_size)}" if is_file(Path(name)) else ""
    newest: dict[str, str] = {}
    count: dict[str, int] = {}
    for holding in holdings:
        device = holding.fingerprint.device
        newest[device] = max(newest.get(device, ""), holding.newest)
        count[device] = count.get(device, 0) + holding.num_records
    summary = ", ".join(f"records of {device}: {count[device]:,}, newest {newest[device][:10]}" for device in newest)
    says = f"{name}, schema {schema}{size}; {summary or 'empty'}"
    stale = [device for device, measured_at in newest.items() if _age_days(measured_at) > STALE_DAYS]
    if stale:
        remedy = f"{', '.join(stale)}: older than {STALE_DAYS} days: measure again with autoplan profile"
        return Check(part="database", state="ok", says=says, remedy=remedy)
    return Check(part="database", state="ok", says=says)


def _age_days(measured_at: str) -> float:
    try:
        measured = datetime.datetime.fromisoformat(measured_at)
    except ValueError:
        return 0.0
    if measured.tzinfo is None:
        measured = measured.replace(tzinfo=datetime.UTC)
    return (datetime.datetime.now(datetime.UTC) - measured).total_seconds() / 86400


def _slurm(variables: Mapping[str, str]) -> Check:
    from autoplan.profiler.discover.allocation import job_hosts

    if "SLURM_JOB_ID" in variables:
        try:
            hosts = len(job_hosts(variables))
        except AutoplanError as error:
            says = f"job {variables['SLURM_JOB_ID']}, whose nodes cannot be read: {error}"
            return Check(part="slurm", state="problem", says=cleaned(says), remedy="see SLURM_JOB_NODELIST")
        return Check(part="slurm", state="ok", says=f"job {variables['SLURM_JOB_ID']} on {hosts} nodes")
    if shutil.which("sbatch"):
        return Check(part="slurm", state="ok", says="installed, outside of a job")
    return Check(part="slurm", state="absent", says="not installed here")


def _frameworks() -> Iterator[Check]:
    versions = {name: version for name, distribution in DISTRIBUTIONS.items() if (version := _version(distribution))}
    says = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Check(
        part="frameworks", state="ok" if versions else "absent", says=says or "none: exporting launch files needs none"
    )
    libraries = {name: _version(name) for name in SHIPPED}
    present = ", ".join(f"{name} {version}" for name, version in libraries.items() if version)
    missing = ", ".join(name for name, version in libraries.items() if not version)
    yield Check(
        part="kernels",
        state="ok" if present else "absent",
        says="; without ".join(filter(None, (present or "torch's alone", missing))),
        remedy="measure those of a library with autoplan profile --kernel" if present else "",
    )
    version = _version("optuna-dashboard")
    yield Check(
        part="live view",
        state="ok" if version else "absent",
        says=f"optuna-dashboard {version}" if version else "optuna-dashboard is not installed",
        remedy="" if version else "pip install optuna-dashboard, to watch a search that runs with --storage",
    )
