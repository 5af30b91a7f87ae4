"""Runners of the trials of `tune`: this machine or a scheduler; the trainer, a target or the user's program."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan.api.candidates import Candidates, exportable, trainable
from autoplan.base.errors import InputError
from autoplan.jobs.job import Jobs, LocalJobs
from autoplan.jobs.scheduler import SchedulerJobs
from autoplan.jobs.template import load_job_template

if TYPE_CHECKING:  # SQLAlchemy, which trials that are not stored do not need
    from autoplan.api.run_keeper import RunKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """Options of how one trial runs, checked to go together."""

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
        """Return what the trials of a study have in common, as a call that joins it has to say it too."""
        about = {"steps": str(self.steps), "warmup": str(self.warmup), "program": shlex.join(self.program)}
        if self.template:
            about |= {"template": self.template, "to": " ".join(filter(None, (self.to, self.target_version)))}
        return about

    @property
    def run_options(self) -> tuple[str, ...]:
        """Return the options of `autoplan run` in every trial."""
        db = ("--db", self.db) if self.db else ()
        return ("--steps", str(self.steps), "--warmup", str(self.warmup), *db)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Jobs that trials run as, and the plans that they can start."""

    jobs: Jobs
    candidates: Candidates
    enough: int | None = None  # steps after which a trial is ended that does not end by itself
    keeper: RunKeeper | None = None  # of trials that do not keep themselves in the database


def runner_of(options: TrialOptions, candidates: Candidates) -> Runner:
    """Return what runs trials by the options; NoPlanError where it can start none of the candidates."""
    if options.template:
        return _scheduled(options, options.template, candidates)
    if options.program:
        return Runner(
            jobs=LocalJobs([*options.run_options, "--command", "--", *options.program]), candidates=candidates
        )
    return Runner(jobs=LocalJobs(options.run_options), candidates=trainable(candidates))


def _scheduled(options: TrialOptions, template: str, candidates: Candidates) -> Runner:
    scheduler = load_job_template(template)
    jobs = SchedulerJobs(
        scheduler,
        time_limit_s=options.limit_s,
        num_steps=options.steps + options.warmup,
        options=options.run_options,
        to=options.to,
        version=options.target_version,
        image=options.image,
    )
    if jobs.runs_own:
        return Runner(jobs=jobs, candidates=trainable(candidates))
    from autoplan.api.run_keeper import RunKeeper  # brings SQLAlchemy

    keeper = RunKeeper(options.db) if options.db else None
    if scheduler.launcher:
        candidates = exportable(candidates, options.to, options.target_version)
    return Runner(jobs=jobs, candidates=candidates, enough=options.steps, keeper=keeper)
