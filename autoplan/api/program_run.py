"""Run of a plan by a program of the user, whose log is read while it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import check_target, refused_writes
from autoplan.base.processes import place_from, signal_name
from autoplan.frameworks.logs import Batch, LoggedRun, LogReader
from autoplan.jobs.program import Ending, ProgramError, run_program
from autoplan.runs.failure import LogEnd
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.trainer.task import Command, TrainingReport

Progress = Callable[[int, int], None]  # (steps done, all of them)


class Listeners(NamedTuple):
    """Listeners of a run while it goes on: a log, its progress by steps, and words."""

    log: Path | None
    force: bool
    progress: Progress
    say: Callable[[str], None]

    @contextmanager
    def opened_log(self) -> Iterator[Callable[[bytes], None]]:
        """Yield a function that adds to the log, if there is one; an existing one is replaced only with `force`."""
        if self.log is None:
            yield lambda data: None
            return
        check_target(self.log, force=self.force)
        with refused_writes(self.log):
            stream = self.log.open("wb", buffering=0)

        def keep(data: bytes) -> None:
            with refused_writes(self.log):
                stream.write(data)

        with stream:
            yield keep


def run_command(
    problem: Problem,
    plan: ParallelPlan,
    program: Sequence[str],
    follow: Listeners,
    *,
    steps: int,
    warmup: int,
    limit_s: float,
) -> tuple[Command, TrainingReport]:
    """Run `program`, which trains by `plan`, until it has logged `steps` step times after `warmup` ones, and end it.

    `follow` hears what it writes, the timed steps and all of them, and what is odd about its log.  A `ProgramError`
    says how it failed, in words of its own.
    """
    place = place_from(os.environ)
    if place and place.num_ranks > 1:
        raise InputError(f"--command starts the job itself: run it once, not on every rank of {place.launcher}")
    batch = Batch(num_sequences=plan.global_batch, seq_len=problem.training.seq_len, num_devices=plan.num_devices)
    reader, words = LogReader(batch, warmup=warmup), LogEnd()
    has_warned = False
    with follow.opened_log() as keep:

        def on_output(data: bytes, now_s: float) -> bool:
            nonlocal has_warned
            keep(data)
            for line in reader.feed(data, now_s):
                words.read(line)
            if not (has_warned or reader.num_steps) and (other_batch := reader.other_batch):
                has_warned = True
                follow.say(f"{other_batch}: such steps do not count")
            follow.progress(min(reader.num_steps, steps), steps)
            return reader.num_steps >= steps

        began_s = time.monotonic()
        try:
            ending = run_program(program, on_output, limit_s=limit_s)
        except KeyboardInterrupt:
            raise AutoplanError(
                f"interrupted after {time.monotonic() - began_s:.0f} s: {program[0]} was ended"
            ) from None
    _check(ending, words, program[0], reader.num_steps, limit_s)
    logged = reader.finish()
    if logged.num_steps < steps:
        follow.say(f"{program[0]} ended after {logged.num_steps} of {steps} steps to time")
    return _as_command(problem, plan, program, logged), _as_report(problem, logged)


def _check(ending: Ending, words: LogEnd, name: str, num_steps: int, limit_s: float) -> None:
    """Refuse a program that did not end well."""
    after = f"after {num_steps} timed steps"
    if ending.kind == "silent":
        raise ProgramError(
            f"{name} wrote nothing for {limit_s:.0f} s {after} and was ended (--limit); its last words: {words.reason}"
        )
    if ending.kind == "enough" or ending.status == 0:
        return
    if words.out_of_memory:
        raise ProgramError(f"{name} ran out of memory {after}: {words.out_of_memory}", is_out_of_memory=True)
    number = -ending.status if ending.status < 0 else ending.status - 128  # as shells report the signal of a child
    if number == signal.SIGKILL:
        raise ProgramError(f"{name} was killed {after}, as systems do where the host's memory runs out: {words.reason}")
    how = f"was ended by {signal_name(-ending.status)}" if ending.status < 0 else f"failed ({ending.status})"
    raise ProgramError(f"{name} {how} {after}: {words.reason}")


def _as_command(problem: Problem, plan: ParallelPlan, program: Sequence[str], logged: LoggedRun) -> Command:
    return Command(
        model=problem.model,
        plan=plan,
        seq_len=problem.training.seq_len,
        arguments=tuple(program),
        log_of=logged.framework,
        times_from=logged.source,
        num_steps=logged.num_steps,
    )


def _as_report(problem: Problem, logged: LoggedRun) -> TrainingReport:
    """Return what the log says as the trainer reports it; memory only where it tells the peak that was predicted."""
    peak = logged.peak_bytes(problem.framework)
    return TrainingReport(
        losses=logged.losses,
        step_s=logged.step_s,
        peak_bytes=() if peak is None else (peak,),
        device=problem.cluster.device.name,
    )
