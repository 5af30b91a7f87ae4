"""Profiles as jobs: submitted to a scheduler from a login node, followed, and settled by what they stored."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from autoplan.api.plan_files import load_plan_file
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import encode, read_text, refused_writes, write_text
from autoplan.base.units import cleaned
from autoplan.base.urls import redact_url
from autoplan.base.values import parse_duration
from autoplan.frameworks.common.job import File, Job
from autoplan.jobs.job import LOG, PLAN
from autoplan.jobs.scheduler import JOB, SchedulerJobs
from autoplan.jobs.template import load_job_template
from autoplan.launch.launcher import launch_files
from autoplan.launch.names import Launcher
from autoplan.launch.start import IN_CONTAINERS, Start
from autoplan.spec.plan_file import PlanFile

MARGIN_S = 600.0  # of a job beyond the budget of its measurements: ranks have to start and to meet
_POLL_S = 0.5
ASKED = "asked.json"  # what the job of a folder was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileJob:
    """A profile to be run by a scheduler's job on the nodes of a plan."""

    plan_file: Path
    template: str  # slurm, kubernetes, or a TOML file
    options: tuple[str, ...]  # of `autoplan profile`, after its plan: ("--budget", "10m")
    budget: str = "10m"
    db: str | None = None  # that the nodes reach by this name as well; None: that of the user there
    image: str | None = None  # of the containers, on Kubernetes
    folder: Path = Path("profile-job")  # of the job and its log, on a file system that the nodes see


def run_job(job: ProfileJob, show: Callable[[str], None] = lambda text: None) -> str:
    """Submit a profile, follow it to its end, and return its log; `show` hears how it stands.

    The same call again goes on with a job that is there; interrupted, it ends the job.

    Raises InputError where something that was given cannot be used, AutoplanError where the job failed.
    """
    template = load_job_template(job.template)
    if job.db is not None and redact_url(job.db) != job.db:
        raise InputError("--db: launch files would show the password: leave it to PGPASSWORD or ~/.pgpass of the job")
    if template.launcher in IN_CONTAINERS and (job.db is None or "://" not in job.db):
        raise InputError("--db: pods cannot reach a local file: give the URL of a server, postgresql://user@host/name")

    def files(plan_file: PlanFile, name: str) -> tuple[File, ...]:
        return launch_files(
            Start.of(plan_file, job_of(plan_file, job), cast("Launcher", template.launcher), job.image, name)
        )

    time_limit_s = parse_duration(job.budget) + MARGIN_S
    jobs = SchedulerJobs(template, time_limit_s=time_limit_s, num_steps=0, image=job.image, files=files)
    folder = job.folder.resolve()
    with refused_writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
    request = encode({"plan": load_plan_file(job.plan_file), "options": job.options, "budget": job.budget})
    name = jobs.find(folder)
    if name and (not (folder / ASKED).is_file() or read_text(folder / ASKED) != request):
        raise InputError(f"{folder} has a job with other options: end it, or name another folder with --work")
    if not name:
        (folder / LOG).unlink(missing_ok=True)  # of an earlier job
        write_text(folder / PLAN, encode(load_plan_file(job.plan_file)), force=True)
        write_text(folder / ASKED, request, force=True)
        name = jobs.start(folder)
    shown = ""
    try:
        while (status := jobs.poll([name])[name]).state not in ("ended", "lost"):
            if (text := f"{status.state}: {status.reason}" if status.reason else status.state) != shown:
                show(shown := text)
            time.sleep(_POLL_S)
    except (KeyboardInterrupt, SystemExit):  # SIGTERM too
        jobs.cancel([name])
        (folder / JOB).unlink(missing_ok=True)
        raise
    (folder / JOB).unlink(missing_ok=True)  # the next call submits again
    log = read_text(folder / LOG) if (folder / LOG).exists() else ""
    if status.status != 0:
        lines = [line for line in log.splitlines() if line.strip()]
        # What autoplan says of a fault is worth more than what its launcher makes of it.
        messages = [line.partition("autoplan: ")[2] for line in lines if "autoplan: " in line]
        last_line = (messages or lines or ["it wrote nothing"])[-1]
        raise AutoplanError(
            f"the job has failed: {status.reason or status.state}: {cleaned(last_line)}; all: {folder / LOG}"
        )
    return log


def job_of(plan_file: PlanFile, job: ProfileJob) -> Job:
    """Return the job that starts `autoplan profile` on every device."""
    db = ("--db", str(job.db if "://" in job.db else Path(job.db).resolve())) if job.db else ()
    options = shlex.join(["--budget", job.budget, *db, *job.options, "--quiet"])
    return Job(
        framework="autoplan profile",
        variables=(),
        program=f'--no-python -- autoplan profile --for "$HERE/{PLAN}" {options}',
        files=(File(name=PLAN, text=encode(plan_file)),),
    )
