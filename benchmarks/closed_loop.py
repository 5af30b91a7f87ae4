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
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from loop_plans import (
    HAS_GPUS,
    LAUNCHES,
    MICRO_BATCHES,
    MODELS,
    PRECISION,
    RANKS,
    STEPS,
    WARMUP,
    Launch,
    compared_plans,
    keep,
    kept,
    label,
)
from loop_report import report_all

from autoplan.base.errors import AutoplanError
from autoplan.base.processes import Children, CrewError, RankPlace
from autoplan.base.values import parse_duration
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.crew import Crew
from autoplan.profiler.protocol import Hello, Job
from autoplan.profiler.store import open_store
from autoplan.profiler.store.store import Store
from autoplan.profiler.sweep import Progress, run
from autoplan.profiler.tasks import MeasurementScope, TaskKey, ranked_tasks
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
from autoplan.trainer.run import PRELOAD, run_task
from autoplan.trainer.task import Task, TrainingReport

MORE_LAUNCHES = 2  # of a plan, where others use the machine all the time
MAX_ROUNDS = 9
START_S, LAUNCH_S = (30.0, 20.0) if HAS_GPUS else (10.0, 5.0)  # for which there must be time left
VISIT_SHARE = 0.6  # of the time that is left, for the profile; the rest is for launches
ALLOWANCE_S = 1.0  # for one visit to settle
LIMIT_S = 120.0  # of a launch without a word
COPIED = 2**22  # fp32 numbers: no cache holds them
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
            report_all(options.folder, names, (__doc__ or "").split("\n\n")[2].replace("\n", " "), options.out)
        else:
            part = {"measure": measure_all, "track": track_all}[options.part]
            part(options.folder, names, options.budget)
    except AutoplanError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
