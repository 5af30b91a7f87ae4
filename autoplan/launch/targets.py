"""Files that start a plan, for every target and launcher."""

from __future__ import annotations

from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.job import File, Job
from autoplan.frameworks.registry import find_target
from autoplan.launch.launcher import launch_files
from autoplan.launch.names import LAUNCHERS
from autoplan.spec.plan_file import PlanFile


def job_of(plan_file: PlanFile, to: str, version: str | None = None) -> Job:
    """The job of a plan for the target `to`; an `InputError` says why there is none."""
    target = find_target(to, plan_file.framework)
    version = target.versions[0] if version is None else version
    if version not in target.versions:
        known = f"known are {', '.join(target.versions)}" if any(target.versions) else "leave the version out"
        raise InputError(f"no version {version!r} of {target.says}: {known}")
    return target.job(plan_file, version)


def exported(
    plan_file: PlanFile,
    to: str,
    launcher: str,
    version: str | None = None,
    image: str | None = None,
    *,
    name: str | None = None,
    num_steps: int | None = None,
) -> tuple[File, ...]:
    """The files that start a plan, the launch file first; `image` is that of the containers that it runs in.

    The job is named `name`, by default after its model, and takes `num_steps`, where the target can be told.
    """
    known = next((name for name in LAUNCHERS if name == launcher), None)
    if known is None:
        raise InputError(f"no launcher {launcher!r}: known are {', '.join(LAUNCHERS)}")
    job = job_of(plan_file, to, version)
    if num_steps is not None:
        variables = (replace(one, default=str(num_steps)) if one.counts_steps else one for one in job.variables)
        job = replace(job, variables=tuple(variables))
    return launch_files(plan_file, job, known, image, name)
