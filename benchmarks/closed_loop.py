"""Closed loop of profile, predict and run: errors of predictions, and how good the picked plan is.

usage: python benchmarks/closed_loop.py PART FOLDER [--budget TIME] [--model NAME ...] [--out FILE]

Three models on the accelerators of this machine, or small ones on two ranks where it has none: the plans of the search
space, run by the trainer of `autoplan run` and predicted from a profile of this machine.  `measure` goes around in
rounds: of each model it visits what `autoplan profile` measures for the framework torch, into a database in FOLDER,
then launches every plan once, until each has enough launches that no other load disturbed, or some more beside any.  A
virtual machine is up to twice as slow in some minutes as in others, and so both meet the same ones; predictions see the
profile alone, and once more with a calibration: that of half of the plans for the others, as runs in the database make
one.  `track` counts the bytes of each plan where no allocator does, which needs no quiet machine; `report` predicts,
compares and writes what it found as Markdown.  Each stops within its budget and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import math
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from autoplan.api.calibrations import MIN_RUNS, fitted_to
from autoplan.api.problem import make_space
from autoplan.api.timings import with_timings
from autoplan.base.arrays import Floats
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import write_text
from autoplan.base.processes import Children, CrewError, RankPlace
from autoplan.base.units import format_volume
from autoplan.base.values import parse_duration
from autoplan.cost.calibration import MeasuredRun
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.cost.provenance import shares
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import book_of
from autoplan.profiler.crew import Crew, default_num_ranks
from autoplan.profiler.machine.hardware import SYS, amd_gpus, device_id, emulates_bf16, nvidia_gpus
from autoplan.profiler.protocol import Hello, Job, Rules
from autoplan.profiler.store import open_store
from autoplan.profiler.store.store import Store
from autoplan.profiler.sweep import Progress, run
from autoplan.profiler.tasks import MeasurementScope, TaskKey, ranked_tasks
from autoplan.readers.cluster import load_cluster
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import Precision
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import (
    LAYER_HALVES,
    LAYERS,
    MOE_LAYER_HALVES,
    MOE_LAYERS,
    SHARED_LAYERS,
    SHARED_MOE_LAYERS,
    Operation,
)
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.timing import Provenance
from autoplan.spec.training import TrainingSpec
from autoplan.trainer.run import PRELOAD, run_task
from autoplan.trainer.task import Task, TrainingReport

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
MORE_LAUNCHES = 2  # of a plan, where others use the machine all the time
MAX_ROUNDS = 9
WARMUP, STEPS = 2, 6 if HAS_GPUS else 2  # replicas of whole states put their buckets together again in the second step
START_S, LAUNCH_S = (30.0, 20.0) if HAS_GPUS else (10.0, 5.0)  # for which there must be time left
VISIT_SHARE = 0.6  # of the time that is left, for the profile; the rest is for launches
ALLOWANCE_S = 1.0  # for one visit to settle
LIMIT_S = 120.0  # of a launch without a word
COPIED = 2**22  # fp32 numbers: no cache holds them
CAPS = (0.5, 0.25)  # memory of which so many plans fit
TRUE_S, TRUE_BYTES = 0.05, 0.03  # errors up to which a prediction counts as true
# What steps are made of; kernels of their own would only stand in for units that were not measured.
OPERATIONS: tuple[Operation, ...] = (
    *(LAYERS if HAS_GPUS else LAYERS[:2]),
    *(MOE_LAYERS if HAS_GPUS else MOE_LAYERS[:2]),
    *(*LAYER_HALVES, *MOE_LAYER_HALVES),
    *(*SHARED_LAYERS, *SHARED_MOE_LAYERS),
    "embedding",
    "head",
    "optimizer",
    "pipeline_actions",
    "send_recv",
)
FAR_APART = 0.10  # plans that are closer may come in either order


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


def measure_all(folder: Path, names: list[str], budget_s: float) -> None:
    """Visit what the profile is made of and launch plans, in turn, until there are enough of both."""
    until = time.monotonic() + budget_s
    job = Job(dtypes=(PRECISION,), allowance_s=ALLOWANCE_S)
    with open_store(str(folder / "timings.db")) as store, Crew(job, None, RANKS) as crew:
        hello = crew.start()
        assert hello is not None
        for at in range(1, MAX_ROUNDS + 1):
            for name in names:
                if time.monotonic() + START_S > until:
                    print("the budget is spent; the same command goes on")
                    return
                visit(crew, hello, store, name, num_visits=min(at, LAUNCHES), until=until)
                if wanted := wanting(folder, name, min(at, LAUNCHES)):
                    launch(folder, name, wanted, until)
                print(f"round {at}, {name}: {len(wanted)} of {len(compared_plans(name))} plans launched", flush=True)
            if at >= LAUNCHES and not any(wanting(folder, name, LAUNCHES) for name in names):
                break


def wanting(folder: Path, name: str, num_launches: int) -> list[ParallelPlan]:
    """The plans of a model to launch, those with the fewest launches first.

    Launched so often without other load, or out of memory, is enough, as are `MORE_LAUNCHES` more beside any load.
    """
    launches = [launch for launch in kept(folder) if launch.model == name]
    clean = Counter(launch.plan for launch in launches if launch.is_clean)
    tried = Counter(launch.plan for launch in launches if launch.step_s)
    full = {launch.plan for launch in launches if launch.is_full}
    return sorted(
        (
            plan
            for plan in compared_plans(name)
            if clean[label(plan)] < num_launches
            and tried[label(plan)] < num_launches + MORE_LAUNCHES
            and label(plan) not in full
        ),
        key=lambda plan: tried[label(plan)],
    )


def visit(crew: Crew, hello: Hello, store: Store, name: str, *, num_visits: int, until: float) -> None:
    """Measure what the plans of a model are made of, except for what has settled so often."""
    model, seq_len = MODELS[name]
    scope = MeasurementScope(
        model=model,
        framework=load_framework("torch"),
        seq_len=seq_len,
        tps=tuple(sorted({plan.tp for plan in compared_plans(name)})),
        micro_batches=MICRO_BATCHES,
        only=OPERATIONS,
    )
    visits: Counter[TaskKey] = Counter(
        (record.operation, record.shape, record.dtype, record.kernel, record.mode)
        for record in store.records(include_hidden=True)
    )
    planned = ranked_tasks(scope, hello, store.measured_keys(hello.fingerprint, num_visits))
    # On a machine that is never quiet, each is visited once more at most.
    planned = [ranked for ranked in planned if visits[ranked.task.key] <= num_visits]
    planned.sort(key=lambda ranked: visits[ranked.task.key])
    progress = Progress(total=len(planned))
    budget_s = VISIT_SHARE * (until - time.monotonic())
    run(crew, hello, store, planned, budget_s=budget_s, progress=progress, visits_spoilt=False)
    counts = sum(progress.counts().values(), Counter())
    print(f"{name}: {dict(counts)}, {progress.num_left} left, {progress.elapsed_s:.0f} s", flush=True)


def launch(folder: Path, name: str, plans: list[ParallelPlan], until: float) -> None:
    """Train once by one plan after the other until there is no time left for the next.

    Every plan has ranks of its own, as in `autoplan run`: in those that have trained by others before, with their
    groups and what they left of the heap, steps take up to a tenth longer.
    """
    model, seq_len = MODELS[name]
    for plan in plans:
        if time.monotonic() + LAUNCH_S > until:
            break
        task = Task(
            model=model,
            plan=plan,
            seq_len=seq_len,
            dtype=PRECISION,
            num_steps=STEPS,
            num_warmup=WARMUP,
            data="synthetic",
            tracks_memory=HAS_GPUS,  # on a host it would be counted in a training of its own
        )
        seen = Launch(model=name, plan=label(plan), precision=PRECISION)
        try:
            answer, check_s = launched(task)
        except CrewError as error:
            if not error.is_out_of_memory:
                raise
            print(f"{name}, {seen.plan}: {error}", flush=True)
            keep(folder, replace(seen, is_full=True))
            continue
        seen = replace(
            seen,
            step_s=answer.step_s,
            passes_s=answer.passes_s,
            optimizer_s=answer.optimizer_s,
            foreign=answer.other_load or 0.0,
            check_s=check_s,
            peak_bytes=max(answer.peak_bytes, default=0.0),
        )
        keep(folder, seen)


def launched(task: Task) -> tuple[TrainingReport, float]:
    """(what ranks of its own report of a task, what their checks took)."""
    with Children(functools.partial(train_one, task=task), None, RANKS, limit_s=LIMIT_S, preload=PRELOAD) as ranks:
        answer, check_s = ranks.start(), 0.0
        while not isinstance(answer, TrainingReport):
            check_s = answer if isinstance(answer, float) else check_s
            answer = ranks.answer()
        return answer, check_s


def train_one(place: RankPlace, line: Connection, *, task: Task) -> None:
    """Be a rank of a plan: rank 0 sends what a check took, and what `autoplan run` gets."""
    from autoplan.trainer.device import join, meet
    from autoplan.trainer.rank import error_cause, train

    try:
        device = join(place, LIMIT_S)
        before_s = checked_s(device)
        with Path(os.devnull).open("w") as nowhere:
            report = train(task, place.rank, device, line, nowhere)
            faulthandler.cancel_dump_traceback_later()
        check_s = (before_s + checked_s(device)) / 2
        if place.rank == 0:
            line.send(check_s)
            line.send(report)
        meet(device)
    except Exception as error:
        line.send(error_cause(error))
        os._exit(2)  # the ordinary way out waits for groups that no longer answer
    os._exit(0)


def checked_s(device: torch.device) -> float:
    """Seconds that the hosts of all ranks take at once for calls, products and copies, about as much of each; mean."""
    import torch.distributed as dist

    from autoplan.trainer.device import meet

    number, factor = torch.ones(()), torch.ones(256, 256)
    source, target = torch.ones(COPIED), torch.zeros(COPIED)
    meet(device)
    began = time.perf_counter()
    for _ in range(5):
        for _ in range(1000):
            number.add(1)
        for _ in range(10):
            torch.mm(factor, factor)
        for _ in range(3):
            target.copy_(source)
    found = torch.tensor(time.perf_counter() - began, device=device)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def track_all(folder: Path, names: list[str], budget_s: float) -> None:
    """Count the bytes of each plan in one untimed step, except for those that were counted."""
    began = time.monotonic()
    done = {(launch.model, launch.plan) for launch in kept(folder) if launch.peak_bytes}
    for name in names:
        model, seq_len = MODELS[name]
        for plan in compared_plans(name):
            if (name, label(plan)) in done:
                continue
            if time.monotonic() - began > budget_s:
                print("the budget is spent; the same command goes on")
                return
            task = Task(
                model=model, plan=plan, seq_len=seq_len, dtype=PRECISION, num_steps=1, num_warmup=0, data="synthetic"
            )
            report = run_task(task)
            assert report is not None
            keep(folder, Launch(model=name, plan=label(plan), precision=PRECISION, peak_bytes=max(report.peak_bytes)))
    print("the bytes of every plan are counted")


# -- what comes of it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The plans of a model, predicted and run."""

    plans: list[ParallelPlan]
    predicted_s: Floats
    measured_s: Floats  # median over the clean launches of a plan
    noise: Floats  # of one launch: half of what a plan's launches lie apart, over their median; NaN of a single one
    launches: list[Floats]  # each plan's undisturbed ones; where there is none, all
    loads: Floats  # share of the machine that others used beside them
    bytes_needed: Floats  # predicted
    bytes_held: Floats  # counted
    rests: dict[Provenance, Floats]  # share of the predicted step by provenance
    full: list[str]  # plans that ran out of memory, though they were predicted to fit
    calibrated_s: Floats  # predicted with a calibration of the other half of the plans; NaN where they are too few

    @property
    def held(self) -> Floats:
        """Counted bytes, or where some plan's were not, predicted ones of all."""
        return self.bytes_needed if np.isnan(self.bytes_held).any() else self.bytes_held

    @property
    def errors(self) -> Floats:
        """Relative, of every plan."""
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_errors(self) -> Floats:
        """Errors of its peak; NaN where that was not counted."""
        return self.bytes_needed / self.bytes_held - 1


def compare(folder: Path, name: str) -> Compared:
    """Predict the plans of a model that ran clean, from the profile alone."""
    problem, plans = problem_of(name, folder), compared_plans(name)
    launches: dict[str, list[Launch]] = {label(plan): [] for plan in plans}
    held: dict[str, float] = {}
    full: set[str] = set()
    for launch in kept(folder):
        if launch.model == name and launch.plan in launches:
            if launch.is_full:
                full.add(launch.plan)
            if launch.step_s:
                launches[launch.plan].append(launch)
            if launch.peak_bytes:
                held[launch.plan] = launch.peak_bytes
    plans = [plan for plan in plans if launches[label(plan)]]
    if not plans:
        raise InputError(f"no plan of {name} has run: launch first")
    used = [usable(launches[label(plan)]) for plan in plans]
    times = [np.array([launch.seconds for launch in of_plan]) for of_plan in used]
    batch = problem.batch(plans)
    cost = estimate(problem, batch)
    return Compared(
        plans=plans,
        predicted_s=cost.step_s,
        measured_s=np.array([np.median(time) for time in times]),
        noise=np.array([np.ptp(time) / 2 / np.median(time) if len(time) > 1 else np.nan for time in times]),
        launches=times,
        loads=np.array([np.median([launch.foreign for launch in of_plan]) for of_plan in used]),
        bytes_needed=cost.logged_memory_bytes,
        bytes_held=np.array([held.get(label(plan), np.nan) for plan in plans]),
        rests=shares(problem, batch),
        full=sorted(full),
        calibrated_s=calibrated(problem, plans, np.array([np.median(time) for time in times])),
    )


def usable(launches: list[Launch]) -> list[Launch]:
    """Return the launches of a plan that no other load disturbed; all where there are none."""
    return [launch for launch in launches if launch.is_clean] or launches


def calibrated(problem: Problem, plans: list[ParallelPlan], measured_s: Floats) -> Floats:
    """Predict every plan with the profile and a calibration of every other plan, as `autoplan calibrate` makes it."""
    predicted_s = np.full(len(plans), np.nan)
    for half in (0, 1):
        runs = [
            MeasuredRun(problem=problem, plan=plan, step_s=float(step_s))
            for plan, step_s in zip(plans[1 - half :: 2], measured_s[1 - half :: 2], strict=True)
        ]
        if len(runs) >= MIN_RUNS:
            own = replace(problem, calibration=fitted_to(runs, name="half of the plans").calibration)
            batch = problem.batch(plans[half::2])
            predicted_s[half::2] = estimate(own, batch).step_s
    return predicted_s


def spearman(measured_s: Floats, predicted_s: Floats, apart: float = 0.0) -> tuple[float, int]:
    """(Spearman's rank correlation over the pairs of plans whose times are `apart`, number of these pairs).

    Over all pairs, the sum of products of differences of ranks over the root of the sums of their squares is Spearman's
    coefficient.
    """
    measured, predicted = (np.argsort(np.argsort(step_s)) for step_s in (measured_s, predicted_s))
    ratio = measured_s[:, None] / measured_s
    counts = np.maximum(ratio, 1 / ratio) > 1 + apart
    ours, theirs = ((step_s[:, None] - step_s)[counts].astype(np.float64) for step_s in (measured, predicted))
    return float((ours * theirs).sum() / np.sqrt((ours**2).sum() * (theirs**2).sum())), int(counts.sum() // 2)


def as_good_as_a_launch(found: Compared) -> tuple[float, float]:
    """(median error, Spearman's coefficient as `spearman` has it) of a launch as prediction of the plan's others.

    No prediction can be told to be better than that.  The mean over the turns, each of the plans with one to spare.
    """
    errors, ranks = [], []
    for turn in range(LAUNCHES):
        several = [launch for launch in found.launches if len(launch) > max(turn, 1)]
        if len(several) < 2:
            break
        others_s = np.array([np.median(np.delete(launch, turn)) for launch in several])
        launch_s = np.array([launch[turn] for launch in several])
        errors.append(np.median(np.abs(launch_s / others_s - 1)))
        ranks.append(spearman(others_s, launch_s, FAR_APART)[0])
    return (float(np.mean(errors)), float(np.mean(ranks))) if errors else (float("nan"), float("nan"))


def choice(found: Compared, cap_bytes: float) -> str:
    """Plan that is picked under a cap, and how much longer it takes than the best plan that fits."""
    fits, seems_to_fit = found.held <= cap_bytes, found.bytes_needed <= cap_bytes
    pick = int(np.argmin(np.where(seems_to_fit, found.predicted_s, np.inf)))
    best = int(np.argmin(np.where(fits, found.measured_s, np.inf)))
    regret = found.measured_s[pick] / found.measured_s[best] - 1
    noise = np.hypot(found.noise[pick], found.noise[best])
    cap = "no cap" if np.isinf(cap_bytes) else format_volume(cap_bytes)
    fit = "" if fits[pick] else ", and does not fit"
    return (
        f"| {cap} | {fits.sum()} | {label(found.plans[pick])}{fit} | {label(found.plans[best])} "
        f"| {100 * regret:.1f} % | {percent(float(noise))} |"
    )


def percent(share: float) -> str:
    """A share, or a dash where it is not known."""
    return "-" if np.isnan(share) else f"{100 * share:.1f} %"


def findings(name: str, found: Compared) -> list[str]:
    """Findings on a model, as Markdown."""
    model, seq_len = MODELS[name]
    errors = np.abs(found.errors)
    correlation, pairs = spearman(found.measured_s, found.predicted_s, FAR_APART)
    launch_error, launch_rank = as_good_as_a_launch(found)
    launches = [len(launch) for launch in found.launches]
    noises = found.noise[~np.isnan(found.noise)]
    noise = (float(np.median(noises)), float(noises.max())) if len(noises) else (float("nan"), float("nan"))
    rests = ", ".join(
        f"{100 * share.mean():.0f} % {kind}" for kind, share in found.rests.items() if share.mean() > 5e-3
    )
    lines = [
        f"## {name}",
        "",
        f"{count_parameters(model) / 1e6:.1f} M parameters: {model.num_layers} layers of {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {GLOBAL_BATCH} sequences of {seq_len} a step.  {len(found.plans)} of "
        f"{len(compared_plans(name))} plans ran, {min(launches)} to {max(launches)} times each "
        f"({LAUNCHES} are wanted); the step rests on {rests}.",
        "",
        f"* error: median {100 * np.median(errors):.1f} %, worst {100 * errors.max():.1f} %, "
        f"bias {100 * np.median(found.errors):+.1f} %",
        f"* with a calibration of every other plan: {calibration_sentence(found)}",
        f"* noise of a launch: median {percent(noise[0])}, worst {percent(noise[1])}",
        f"* Spearman over the {pairs} pairs more than {100 * FAR_APART:.0f} % apart: {correlation:.3f}; "
        f"over all plans {spearman(found.measured_s, found.predicted_s)[0]:.3f}",
        f"* a launch instead of the prediction of the plan's other ones: error {percent(launch_error)} in the median, "
        f"Spearman {launch_rank:.3f}",
        accuracy_sentence(found),
        f"* out of memory, though predicted to fit: {'; '.join(found.full) or 'none'}",
        "",
        f"| {'counted' if found.held is found.bytes_held else 'predicted'} memory | plans that fit | picked | best "
        "| regret | noise of the two |",
        "|---|--:|---|---|--:|--:|",
        *(choice(found, cap) for cap in (np.inf, *np.quantile(found.held, CAPS))),
        "",
    ]
    lines += ["| family | plans | median error | worst | bias |", "|---|--:|--:|--:|--:|"]
    families = [family(plan) for plan in found.plans]
    for kind in dict.fromkeys(families):
        own = found.errors[np.array([family_name == kind for family_name in families])]
        lines.append(
            f"| {kind} | {len(own)} | {100 * np.median(np.abs(own)):.1f} % | {100 * np.abs(own).max():.1f} % "
            f"| {100 * np.median(own):+.1f} % |"
        )
    lines += [
        "",
        "| plan | predicted | calibrated | measured | error | launches | noise | other load | memory predicted ",
    ]
    lines[-1] += "| counted | error |"
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for at in np.argsort(found.measured_s):
        lines.append(
            f"| {label(found.plans[at])} | {1e3 * found.predicted_s[at]:.0f} ms "
            f"| {1e3 * found.calibrated_s[at]:.0f} ms | {1e3 * found.measured_s[at]:.0f} ms "
            f"| {100 * found.errors[at]:+.1f} % | {len(found.launches[at])} "
            f"| {percent(float(found.noise[at]))} | {percent(float(found.loads[at]))} "
            f"| {memory_sentence(found, int(at))} |"
        )
    return [*lines, ""]


def calibration_sentence(found: Compared) -> str:
    """Errors of the predictions with a calibration, as words."""
    if np.isnan(found.calibrated_s).any():
        return "too few ran"
    errors = np.abs(found.calibrated_s / found.measured_s - 1)
    return (
        f"error median {100 * np.median(errors):.1f} %, worst {100 * errors.max():.1f} %, "
        f"Spearman {spearman(found.measured_s, found.calibrated_s, FAR_APART)[0]:.3f}"
    )


def accuracy_sentence(found: Compared) -> str:
    """Sentence on how many predictions of time and peak are true, and how far off those of the peak are."""
    counted = found.bytes_errors[~np.isnan(found.bytes_errors)]
    within = f"{(np.abs(found.errors) <= TRUE_S).sum()} of {len(found.errors)} steps within {percent(TRUE_S)}"
    if not len(counted):
        return f"* {within}; no bytes were counted"
    return (
        f"* {within}, {(np.abs(counted) <= TRUE_BYTES).sum()} of {len(counted)} peaks within {percent(TRUE_BYTES)}; "
        f"peaks: median {percent(float(np.median(np.abs(counted))))}, worst {percent(float(np.abs(counted).max()))}"
    )


def memory_sentence(found: Compared, at: int) -> str:
    """Predicted and counted peak of a plan and the error, as cells."""
    needed, peak_bytes = found.bytes_needed[at], found.bytes_held[at]
    if np.isnan(peak_bytes):
        return f"{format_volume(needed)} | - | -"
    return f"{format_volume(needed)} | {format_volume(peak_bytes)} | {100 * found.bytes_errors[at]:+.1f} %"


def report_all(folder: Path, names: list[str], path: Path | None) -> None:
    """Compare, print, and write it to `path`."""
    intro = (__doc__ or "").split("\n\n")[2].replace("\n", " ")
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    machine = f"{RANKS} x {torch.cuda.get_device_name()}, {cores}" if HAS_GPUS else cores
    quiet = (
        ""
        if HAS_GPUS
        else ", of each plan those (if any) in which other load took at most "
        f"{100 * MAX_FOREIGN:.0f} % of the machine and a check at most {100 * MAX_SLOWDOWN:.0f} % longer than usual"
    )
    where = (
        f"On {machine}, torch {version('torch')}, products in {PRECISION}.  Measured: the median over launches{quiet}, "
        f"each of {STEPS} steps after {WARMUP}, the plans in turn, and in turn with visits of the profile.  Noise: "
        "half of what a plan's launches lie apart."
    )
    lines = [f"# Plans predicted and run, {time.strftime('%Y-%m-%d')}", "", intro, "", where, ""]
    for name in names:
        lines += findings(name, compare(folder, name))
    print("\n".join(lines))
    if path:
        write_text(path, "\n".join(lines), force=True)


def main() -> int:
    """Do a part of the loop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("measure", "track", "report"))
    parser.add_argument("folder", type=Path, help="of the database and the launches")
    parser.add_argument("--budget", type=parse_duration, default=parse_duration("10m"), help="such as 90s or 10m")
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="write the report to this Markdown file as well")
    options = parser.parse_args()
    names = options.model or list(MODELS)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        if options.part == "report":
            report_all(options.folder, names, options.out)
        else:
            part = {"measure": measure_all, "track": track_all}[options.part]
            part(options.folder, names, options.budget)
    except AutoplanError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
