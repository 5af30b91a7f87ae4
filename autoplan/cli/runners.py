"""What runs the trials of `autoplan tune`?  This machine or a scheduler: the trainer, a target, the user's program."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan.base.errors import InputError
from autoplan.cli.candidates import Candidates, exportable, trainable

if TYPE_CHECKING:
    from autoplan.cli.runs import RunKeeper
    from autoplan.jobs.job import Jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFlags:
    """The flags that say how one trial runs, as typed."""

    program: tuple[str, ...]  # of the user; empty: the built-in trainer, or what `template` and `to` start
    template: str | None
    to: str
    target_version: str | None
    image: str | None
    steps: int
    warmup: int
    parallel: int
    limit_s: float
    db: str | None

    def __post_init__(self) -> None:
        for flag, number in (("--parallel", self.parallel), ("--steps", self.steps)):
            if number < 1:
                raise InputError(f"{flag} {number}: must be 1 or more")
        if self.template and self.program:
            raise InputError("--command runs on this machine: what submit of --template starts is written there")
        if not self.template and (self.to != "autoplan" or self.target_version or self.image):
            raise InputError("--to, --target-version and --image are of the jobs of a --template")
        if self.parallel > 1 and not self.template:
            raise InputError("--parallel: trials on this machine share its devices and would slow each other down")

    @property
    def about(self) -> dict[str, str]:
        """What trials of one study have in common, as a call that joins it has to say it too."""
        about = {"steps": str(self.steps), "warmup": str(self.warmup), "program": shlex.join(self.program)}
        if self.template:
            about |= {"template": self.template, "to": " ".join(filter(None, (self.to, self.target_version)))}
        return about

    @property
    def options(self) -> tuple[str, ...]:
        """What `autoplan run` is told in every trial."""
        db = ("--db", self.db) if self.db else ()
        return ("--steps", str(self.steps), "--warmup", str(self.warmup), *db)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Where trials run, and which plans it can start."""

    jobs: Jobs
    candidates: Candidates
    enough: int | None = None  # steps after which a trial is ended that does not end by itself
    keeper: RunKeeper | None = None  # of trials that do not keep themselves in the database


def runner_of(flags: TrialFlags, candidates: Candidates) -> Runner:
    """What the flags say that runs trials; NoPlanError where it can start none of the candidates."""
    if flags.template:
        return _scheduled(flags, flags.template, candidates)
    from autoplan.jobs.job import LocalJobs

    if flags.program:
        return Runner(jobs=LocalJobs([*flags.options, "--command", "--", *flags.program]), candidates=candidates)
    return Runner(jobs=LocalJobs([*flags.options]), candidates=trainable(candidates))


def _scheduled(flags: TrialFlags, template: str, candidates: Candidates) -> Runner:
    from autoplan.jobs.scheduler import SchedulerJobs
    from autoplan.jobs.template import load_job_template

    scheduler = load_job_template(template)
    jobs = SchedulerJobs(
        scheduler,
        time_limit_s=flags.limit_s,
        num_steps=flags.steps + flags.warmup,
        options=flags.options,
        to=flags.to,
        version=flags.target_version,
        image=flags.image,
    )
    if jobs.runs_own:
        return Runner(jobs=jobs, candidates=trainable(candidates))
    from autoplan.cli.runs import RunKeeper

    keeper = RunKeeper(flags.db) if flags.db else None
    if scheduler.launcher:
        candidates = exportable(candidates, flags.to, flags.target_version)
    return Runner(jobs=jobs, candidates=candidates, enough=flags.steps, keeper=keeper)
