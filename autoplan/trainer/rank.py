"""Rank of a run: joins the other ranks, builds its part of the plan, trains, and reports."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.base.errors import AutoplanError
from autoplan.base.processes import GRACE_S, START_S, Fault, RankPlace
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import ParallelPlan
from autoplan.trainer.device import describe, is_out_of_memory, join, meet
from autoplan.trainer.step import Times, Training
from autoplan.trainer.task import Advance, Deviation, Task, TrainingReport
from autoplan.trainer.tensor_memory import StorageTracker
from autoplan.trainer.tokens import sequences

CHECKED_STEPS = 3
TRACED_STEPS = 3
MIN_LOADED_S = 1.0  # core time, which the system counts in hundredths of a second
_LEAST = 1e-4
_SGD_LR = 0.5  # large, so that a wrong gradient becomes visible (`closed-loop` 1)


def serve(place: RankPlace, line: Connection, *, task: Task) -> None:
    """Run as a rank of `task`: rank 0 sends an `Advance` after every step and a `Report` at the end."""
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process lives
    # On failure it would log its whole table of actions, on every rank.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        # A watchdog in a separate thread ends this process even if a driver call never returns.
        faulthandler.dump_traceback_later(START_S, exit=True, file=nowhere)
        device = join(place, task.limit_s)
        report = train(task, place.rank, device, line, nowhere)
        if place.rank == 0:
            line.send(report)
        faulthandler.dump_traceback_later(START_S, exit=True, file=nowhere)
        # All results are sent: gloo may report a connection closed right after the last message as an error.
        with contextlib.suppress(RuntimeError):
            meet(device)
    except Exception as error:
        with contextlib.suppress(OSError):
            line.send(error_cause(error))
        os._exit(2)  # a normal exit would wait for groups that no longer answer
    os._exit(0)


def error_cause(error: BaseException) -> Fault:
    """Return the cause of an error, in one line."""
    while error.__cause__ is not None:  # a pipeline reports where its stage failed, not why
        error = error.__cause__
    return Fault(text=describe(error), is_out_of_memory=is_out_of_memory(error))


def train(task: Task, rank: int, device: torch.device, line: Connection, nowhere: Any) -> TrainingReport:
    """Run the steps of this rank after joining; progress goes to `line`, watchdog tracebacks to `nowhere`."""

    def watch() -> None:
        if line.poll():  # nothing is ever sent, so the program has ended
            os._exit(0)
        faulthandler.dump_traceback_later(task.limit_s + GRACE_S, exit=True, file=nowhere)

    watch()
    check = compared(task, rank, device) if task.checks else None
    watch()
    peaks = _tracked_bytes(task, device) if task.tracks_memory and device.type == "cpu" else []
    training = _training(task, device)
    if device.type == "cuda":  # memory for comparing and building does not count
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    rows: list[tuple[Times, float, float, float]] = []  # with processor times of the rank and of the node
    for step in range(task.num_warmup + task.num_steps):
        watch()
        tokens = sequences(task, step)
        process_s, busy_s = time.process_time(), _busy_s()
        times, loss = training.step(tokens)
        rows.append((times, loss, time.process_time() - process_s, _busy_s() - busy_s))
        if rank == 0:
            line.send(Advance(step=step, step_s=times.step_s, loss=loss))
    clocks_mhz = _gathered(_clock_mhz(device))
    if device.type == "cuda" and task.tracks_memory:
        peaks = _gathered(float(torch.cuda.max_memory_allocated(device)))
    if task.trace_folder is not None:
        watch()
        _trace(training, task, rank)
    by_rank = _gathered(rows[task.num_warmup :])
    loads = _gathered((socket.gethostname(), [row[2:] for row in rows[task.num_warmup :]]))
    steps = [[ranks[at] for ranks in by_rank] for at in range(task.num_steps)]
    step_s = tuple(max(row[0].step_s for row in rank_rows) for rank_rows in steps)
    return TrainingReport(
        losses=tuple(rank_rows[0][1] for rank_rows in steps),
        step_s=step_s,
        passes_s=tuple(max(row[0].passes_s for row in rank_rows) for rank_rows in steps),
        optimizer_s=tuple(max(row[0].optimizer_s for row in rank_rows) for rank_rows in steps),
        microbatch_s=_microbatch_s([ranks[at] for at in range(task.num_steps)] for ranks in by_rank),
        other_load=other_load(loads, sum(step_s), os.cpu_count() or 1) if device.type == "cpu" else None,
        clock_mhz=min(filter(None, clocks_mhz), default=None),
        peak_bytes=tuple(peaks),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        check=check,
    )


def _microbatch_s(rows: Iterable[list[tuple[Times, float, float, float]]]) -> tuple[float, ...]:
    """Return the median time of a micro-batch by rank; empty if a rank has none."""
    by_rank = [[row[0].microbatch_s for row in steps] for steps in rows]
    medians = [float(np.median([s for s in seconds if s is not None])) for seconds in by_rank if None not in seconds]
    return tuple(medians) if len(medians) == len(by_rank) else ()


def _trace(training: Training, task: Task, rank: int) -> None:
    """Train some more steps, and write their torch profile to a file of this rank."""
    assert task.trace_folder is not None
    folder, first = Path(task.trace_folder), task.num_warmup + task.num_steps
    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    training.step(sequences(task, first))
    with torch.profiler.profile(
        activities=activities, record_shapes=True
    ) as profiler:  # its first step is slower than others
        for step in range(first + 1, first + 1 + TRACED_STEPS):
            with torch.profiler.record_function(f"ProfilerStep#{step}"):
                training.step(sequences(task, step))
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"rank-{rank}.json.gz"))


def _training(task: Task, device: torch.device) -> Training:
    return Training(
        task.model,
        task.plan,
        seq_len=task.seq_len,
        device=device,
        dtype=task.dtype,
        seed=task.seed,
        micro_batches=task.micro_batches,
    )


def _gathered(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _clock_mhz(device: torch.device) -> int:
    """Return the clock of a device; 0 if neither its library nor its driver tells."""
    with contextlib.suppress(Exception):  # each library has its own errors
        return torch.cuda.clock_rate(device) if device.type == "cuda" else 0
    return 0


def other_load(loads: Sequence[tuple[str, list[tuple[float, float]]]], wall_s: float, num_cores: int) -> float | None:
    """Return the share of the worst host's cores used by processes other than ranks; None if it is unknown.

    `loads` has one entry per rank: its host, and (processor time of the rank, of the whole host) by step.
    The share is (busy - used by the host's ranks) / (wall x cores), `closed-loop` 2.2.
    """
    ranks_s: dict[str, float] = defaultdict(float)
    busy_s: dict[str, float] = {}
    for host, by_step in loads:
        ranks_s[host] += sum(rank_s for rank_s, _ in by_step)
        busy_s[host] = max(busy_s.get(host, 0.0), sum(busy for _, busy in by_step))
    if not all(busy_s.values()) or wall_s * num_cores < MIN_LOADED_S:
        return None
    return max(0.0, *(busy - ranks_s[host] for host, busy in busy_s.items())) / (wall_s * num_cores)


def _busy_s() -> float:
    """Return the processor time spent by this node on all processes, in seconds; 0 if unknown."""
    try:
        user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft) / float(os.sysconf("SC_CLK_TCK"))


def _tracked_bytes(task: Task, device: torch.device) -> list[float]:
    """Return the peak of every rank in the second step of a separate training; the first step creates the states."""
    with StorageTracker() as tracker:
        training = _training(task, device)
        training.step(sequences(task, 0))
        gc.collect()
        tracker.forget_peak()
        training.step(sequences(task, 1))
        peak = float(tracker.peak_bytes)
        del training
    gc.collect()
    return _gathered(peak)


# -- comparison with one process --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedState:
    """Losses of some steps, and the gradients and weights after them by the names of the whole model, in fp32."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def compared(task: Task, rank: int, device: torch.device) -> Deviation:
    """Train some steps with the plan and, on rank 0, in one process, and return the difference."""
    spread = collected(trained_state(task, device), rank)
    box = [differences(spread, trained_state(task_on_one_rank(task), device)) if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert isinstance(box[0], Deviation)
    return box[0]


def task_on_one_rank(task: Task) -> Task:
    """Return the task for one process."""
    micro_batch = math.gcd(task.plan.micro_batch, *(size for size, _ in task.micro_batches))
    plan = ParallelPlan(global_batch=task.global_batch, micro_batch=micro_batch, sharding=Sharding.NONE)
    return replace(task, plan=plan, micro_batches=())


def trained_state(task: Task, device: torch.device) -> TrainedState:
    """Return losses, gradients and weights of this rank after some steps, in fp32."""
    training = Training(
        task.model,
        task.plan,
        seq_len=task.seq_len,
        device=device,
        dtype="fp32",
        optimizer="sgd",
        lr=_SGD_LR,
        seed=task.seed,
        is_alone=task.plan.num_devices == 1,
        micro_batches=task.micro_batches,
    )
    losses = [training.step(sequences(task, step))[1] for step in range(CHECKED_STEPS)]
    return TrainedState(losses=losses, gradients=training.full_gradients(), weights=training.full_weights())


def collected(state: TrainedState, rank: int) -> TrainedState:
    """Gather the states of all ranks on rank 0; other ranks get their own state without tensors."""
    states: list[TrainedState | None] = [None] * dist.get_world_size()
    dist.gather_object(state, states if rank == 0 else None)
    gradients: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for state_of_rank in states:
        if state_of_rank is not None:
            gradients |= state_of_rank.gradients
            weights |= state_of_rank.weights
    return replace(state, gradients=gradients, weights=weights)


def differences(spread: TrainedState, reference: TrainedState) -> Deviation:
    """Compare the training of all ranks together with that of one process."""
    missing = reference.gradients.keys() ^ spread.gradients.keys()
    if missing:
        raise AutoplanError(f"the plan trains other weights than the model has: {', '.join(sorted(missing)[:3])}")
    return Deviation(
        loss=float(np.abs(np.subtract(spread.losses, reference.losses)).max()),
        gradients=_largest_difference(spread.gradients, reference.gradients),
        weights=_largest_difference(spread.weights, reference.weights),
    )


def _largest_difference(tensors: dict[str, Tensor], references: dict[str, Tensor]) -> float:
    """Return the largest difference of two tensors with the same name, relative to the norm of the reference.

    Values that should be zero are only rounding, such as the gradient of a key bias with learned positions, so no norm
    counts as smaller than `_LEAST` of the largest.
    """
    least = _LEAST * max(float(reference.norm()) for reference in references.values())
    apart = [
        float((tensors[name] - reference).norm()) / max(float(reference.norm()), least)
        for name, reference in references.items()
    ]
    return float(np.max(apart))  # unlike Python's max, it propagates NaN
