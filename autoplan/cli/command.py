"""`autoplan run --command`: does the user's own program, run by a plan, take as long as predicted?"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.base.errors import AutoplanError, InputError

if TYPE_CHECKING:
    from autoplan.frameworks.logs import LoggedRun
    from autoplan.jobs.program import Ending
    from autoplan.runs.failure import LogEnd
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.problem import Problem
    from autoplan.trainer.task import Command, TrainingReport


class ProgramError(AutoplanError):
    """The user's program ended otherwise than it should; `is_out_of_memory` says whether for want of memory."""

    def __init__(self, text: str, *, is_out_of_memory: bool = False) -> None:
        super().__init__(text)
        self.is_out_of_memory = is_out_of_memory


@contextmanager
def opened_log(path: Path | None, *, force: bool) -> Iterator[Callable[[bytes], None]]:
    """A function that adds to the file, if there is one; an existing one is replaced only with `force`."""
    from autoplan.base.files import check_target

    if path is None:
        yield lambda data: None
        return
    check_target(path, force=force)
    try:
        stream = path.open("wb", buffering=0)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    with stream:

        def keep(data: bytes) -> None:
            try:
                stream.write(data)
            except OSError as error:
                raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None

        yield keep


def run_command(
    problem: Problem,
    plan: ParallelPlan,
    program: list[str],
    *,
    steps: int,
    warmup: int,
    limit_s: float,
    log: Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> tuple[Command, TrainingReport]:
    """Run `program`, which trains by `plan`, until it has logged `steps` step times after `warmup` ones, and end it.

    What it writes goes to `log` too.  A `ProgramError` says how it failed, in words of its own.
    """
    from autoplan.base.processes import place_from
    from autoplan.cli.process import leave_on_sigterm
    from autoplan.cli.progress import progress_bar
    from autoplan.frameworks.logs import Batch, LogReader
    from autoplan.jobs.program import run_program
    from autoplan.runs.failure import LogEnd

    place = place_from(os.environ)
    if place and place.num_ranks > 1:
        raise InputError(f"--command starts the job itself: run it once, not as every rank of {place.launcher}")
    batch = Batch(num_sequences=plan.global_batch, seq_len=problem.training.seq_len, num_devices=plan.num_devices)
    reader, words = LogReader(batch, warmup=warmup), LogEnd()
    leave_on_sigterm()
    with ExitStack() as stack:
        show = stack.enter_context(progress_bar(quiet=quiet, doing="training", unit="timed steps"))
        keep = stack.enter_context(opened_log(log, force=force))

        told = ""

        def hear(data: bytes, now_s: float) -> bool:
            nonlocal told
            keep(data)
            for line in reader.feed(data, now_s):
                words.read(line)
            if not (told or quiet or reader.num_steps) and (told := reader.other_batch):
                print(f"autoplan: {told}: such steps do not count", file=sys.stderr)
            if show:
                show(min(reader.num_steps, steps), steps)
            return reader.num_steps >= steps

        began_s = time.monotonic()
        try:
            ending = run_program(program, hear, limit_s=limit_s)
        except KeyboardInterrupt:
            raise AutoplanError(
                f"interrupted after {time.monotonic() - began_s:.0f} s: {program[0]} was ended"
            ) from None
    _check(ending, words, program[0], reader.num_steps, limit_s)
    logged = reader.finish()
    if logged.num_steps < steps and not quiet:
        print(f"autoplan: {program[0]} ended after {logged.num_steps} of {steps} steps to time", file=sys.stderr)
    return _as_command(problem, plan, program, logged), _as_report(problem, logged)


def _check(ending: Ending, words: LogEnd, name: str, num_steps: int, limit_s: float) -> None:
    """Refuse a program that did not end well."""
    from autoplan.base.processes import signal_name

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


def _as_command(problem: Problem, plan: ParallelPlan, program: list[str], logged: LoggedRun) -> Command:
    from autoplan.trainer.task import Command

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
    """What the log says, as the trainer reports; memory only where the log tells the peak that was predicted."""
    from autoplan.trainer.task import TrainingReport

    peak = logged.allocated_bytes if problem.framework.memory.logs_memory == "allocated" else logged.reserved_bytes
    return TrainingReport(
        losses=logged.losses,
        step_s=logged.step_s,
        peak_bytes=() if peak is None else (peak,),
        device=problem.cluster.device.name,
    )
