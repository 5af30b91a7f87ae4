"""Models and plans of the closed loop (`closed_loop.py`), and what is kept of each launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from autoplan.api.problem import make_space
from autoplan.api.timings import with_timings
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import book_of
from autoplan.profiler.crew import default_num_ranks
from autoplan.profiler.machine.hardware import SYS, amd_gpus, device_id, emulates_bf16, nvidia_gpus
from autoplan.profiler.protocol import Rules
from autoplan.readers.cluster import load_cluster
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import Precision
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

HAS_GPUS = torch.cuda.is_available()
# On cores without units for bf16 a step in it would take many times as long.
PRECISION: Literal["bf16", "fp32"] = "fp32" if not HAS_GPUS and emulates_bf16() else "bf16"
RANKS = default_num_ranks() if HAS_GPUS else 2
GLOBAL_BATCH = 8 * max(RANKS // 2, 1)
MICRO_BATCHES = (1, 2, 4, 8)


def _model(
    name: str, num_layers: int, hidden_size: int, ffn_size: int, num_heads: int, vocab_size: int, **fields: Any
) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        num_heads=num_heads,
        vocab_size=vocab_size,
        **fields,
    )


# Models with their sequence lengths.  The first three are those of the loop in fp32.
HOST_MODELS = {
    "tiny": (_model("tiny", 16, 192, 512, 6, 1024), 64),
    "small": (_model("small", 8, 256, 768, 4, 4096), 128),
    "medium": (_model("medium", 4, 512, 1408, 8, 8192), 128),
    "deep": (_model("deep", 16, 192, 512, 6, 1024), 64),
    "grouped": (_model("grouped", 4, 512, 1408, 8, 8192, num_kv_heads=2), 128),
    "experts": (
        _model(
            "experts",
            4,
            256,
            768,
            4,
            4096,
            num_kv_heads=2,
            moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=384),
        ),
        128,
    ),
}
# Of 1.1, 2.8 and 3.0 billion parameters, the second one mostly ends: those of Llama-3-8B.
GPU_MODELS = {
    "1b": (_model("1b", 16, 2048, 8192, 32, 32_768, num_kv_heads=8), 4096),
    "ends": (_model("ends", 8, 4096, 14_336, 32, 128_256, num_kv_heads=8), 4096),
    "3b": (_model("3b", 28, 3072, 8192, 24, 32_768, num_kv_heads=8), 4096),
}
MODELS = GPU_MODELS if HAS_GPUS else HOST_MODELS
FORBIDDEN = ("uneven_stages", "partial_recompute", "partial_sharding")
MAX_PLANS = 40 if HAS_GPUS else 12  # of a model: spread evenly over those that there are
# What recomputing takes is measured on accelerators alone, where memory is short.
FIXED = () if HAS_GPUS else ("recompute=none",)
# On a device that others leave alone nothing else counts, whatever the cores of its host do.
MAX_FOREIGN, MAX_SLOWDOWN = (np.inf, np.inf) if HAS_GPUS else (Rules().most_foreign, Rules().most_slowdown)
LAUNCHES = 1 if HAS_GPUS else 3  # undisturbed ones of each plan, and visits of what is measured for the profile
WARMUP, STEPS = 2, 6 if HAS_GPUS else 2  # replicas of whole states put their buckets together again in the second step


@functools.lru_cache(maxsize=1)
def device_here() -> str:
    """autoplan's id of what the ranks run on."""
    if not HAS_GPUS:
        return "cpu"
    gpus = nvidia_gpus()[0] or amd_gpus(SYS)[0]
    if not gpus:
        raise InputError("neither NVML nor amdkfd tells of the devices that torch sees: pip install nvidia-ml-py")
    gpu = gpus[0]
    return device_id(gpu.name, gpu.memory_bytes, architecture=gpu.architecture, compute_units=gpu.compute_units)


def problem_of(name: str, folder: Path | None = None) -> Problem:
    """A model on the ranks of this machine, with the times of the profile in `folder`."""
    model, seq_len = MODELS[name]
    problem = Problem(
        model=model,
        training=TrainingSpec(seq_len=seq_len, precision=Precision(PRECISION)),
        cluster=load_cluster(f"{device_here()}:1x{RANKS}"),
        framework=load_framework("torch"),
    )
    return problem if folder is None else with_timings(problem, "db", str(folder / "timings.db"))


def plans_of(name: str) -> list[ParallelPlan]:
    """Plans that fit, with layers spread evenly, up to two chunks a rank."""
    problem = problem_of(name)
    at_most = ["vp=2", f"micro_batch={MICRO_BATCHES[-1]}"]
    space = make_space(problem, str(GLOBAL_BATCH), fix=list(FIXED), at_most=at_most, forbid=FORBIDDEN)
    space = replace(space, limits=space.limits.where(schedule=book_of(problem.framework).words("schedule")))
    batch, _ = space.plans(space.cells())
    fits = estimate(problem, batch).memory_bytes <= problem.capacity_bytes
    plans = [batch.plan(int(at)) for at in np.flatnonzero(fits)]
    return [plan for plan in plans if plan.layers_per_chunk is None]


def compared_plans(name: str) -> list[ParallelPlan]:
    """Plans that are run, spread evenly over those that there are."""
    plans = plans_of(name)
    return plans[:: math.ceil(len(plans) / MAX_PLANS)]


def label(plan: ParallelPlan) -> str:
    """A plan in words, with how it is distinguished from all others."""
    words = plan.describe()
    return words if plan.pp == 1 or plan.vp > 1 or plan.schedule != "1f1b" else f"{words}, 1f1b"


def family(plan: ParallelPlan) -> str:
    """Use that a plan makes of its ranks, or of a single one."""
    if plan.num_devices == 1:
        return f"recompute {plan.recompute}"
    return plan.schedule if plan.pp > 1 else "tp" if plan.tp > 1 else f"dp {plan.sharding}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Run of a plan, or the bytes that its ranks held in one."""

    model: str
    plan: str
    precision: Literal["bf16", "fp32"] = "bf16"
    step_s: tuple[float, ...] = ()
    passes_s: tuple[float, ...] = ()
    optimizer_s: tuple[float, ...] = ()
    foreign: float = 0.0  # share of the machine that others used
    check_s: float = 0.0  # what the same work took on both ranks at once, before and after: the machine is shared
    peak_bytes: float = 0.0
    is_full: bool = False  # it ran out of memory

    is_slow: bool = False  # its check took longer than most others

    @property
    def is_clean(self) -> bool:
        """Return whether it ran, and other load left it alone, also that of neighbours who slow a virtual core down."""
        return bool(self.step_s) and self.foreign <= MAX_FOREIGN and not self.is_slow

    @property
    def seconds(self) -> float:
        """Median of its steps."""
        return float(np.median(self.step_s))


def kept(folder: Path) -> list[Launch]:
    """Results that earlier calls left, on a machine that trained in the same precision."""
    path = folder / "launches.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    launches = [msgspec.json.decode(line, type=Launch) for line in lines]
    own = [launch for launch in launches if launch.precision == PRECISION]
    checks_s = [launch.check_s for launch in own if launch.check_s] or [0.0]
    usual_s = float(np.quantile(checks_s, 0.25))
    return [replace(launch, is_slow=launch.check_s > (1 + MAX_SLOWDOWN) * usual_s) for launch in own]


def keep(folder: Path, launch: Launch) -> None:
    """Add a launch to them."""
    with (folder / "launches.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(launch) + b"\n")
