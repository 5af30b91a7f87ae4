"""Files that start a plan, for every target and launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.job import File, Job, Target
from autoplan.frameworks.registry import TARGETS, find_target
from autoplan.launch.launcher import launch_files
from autoplan.launch.names import LAUNCHERS
from autoplan.launch.start import NodeRange
from autoplan.spec.plan_file import PlanFile


def job_of(plan_file: PlanFile, to: str, version: str | None = None) -> Job:
    """The job of a plan for the target `to`; an `InputError` says why there is none."""
    target = find_target(to, plan_file.framework)
    version = target.versions[0] if version is None else version
    if version not in target.versions:
        known = f"known are {', '.join(target.versions)}" if any(target.versions) else "leave the version out"
        raise InputError(f"no version {version!r} of {target.says}: {known}")
    _check_tuning(plan_file, target)
    if (optimizer := plan_file.training.optimizer) not in target.optimizers:
        raise InputError(f"{target.says} is not told of {optimizer}: it takes {' or '.join(target.optimizers)}")
    if plan_file.training.attention == "flash-fp8" and target.name != "megatron-bridge":
        raise InputError(f"{target.says} is not told of attention in 8 bits: plan with flash, or use megatron-bridge")
    return target.job(plan_file, version)


def takes_tuning(target: Target, plan_file: PlanFile) -> bool:
    """Return whether the target can express what the plan trains."""
    return not _refused_tuning(target, plan_file)


def _check_tuning(plan_file: PlanFile, target: Target) -> None:
    """Refuse a fine-tuning that the target would not carry out."""
    if why := _refused_tuning(target, plan_file):
        raise InputError(why)


def _refused_tuning(target: Target, plan_file: PlanFile) -> str:
    """Say why the target cannot express what the plan trains; empty where it can."""
    finetuning = plan_file.training.finetuning
    if finetuning is None or not (finetuning.has_adapters or finetuning.frozen):
        return ""
    if target.refused_tuning is None:
        able = [name for name, known in TARGETS.items() if known.refused_tuning is not None]
        return f"{target.says} is told nothing of {finetuning}: export to {' or '.join(able)}"
    why = target.refused_tuning(finetuning)
    return f"{target.says} cannot express {why}" if why else ""


def exported(
    plan_file: PlanFile,
    to: str,
    launcher: str,
    version: str | None = None,
    image: str | None = None,
    *,
    name: str | None = None,
    num_steps: int | None = None,
    unlike_nodes: tuple[NodeRange, ...] = (),
) -> tuple[File, ...]:
    """The files that start a plan, the launch file first; `image` is that of the containers that it runs in.

    The job is named `name`, by default after its model, and takes `num_steps`, where the target can be told.  Where the
    plan is one for `unlike_nodes`, `plan_file` is that of the first of them.
    """
    known = next((name for name in LAUNCHERS if name == launcher), None)
    if known is None:
        raise InputError(f"no launcher {launcher!r}: known are {', '.join(LAUNCHERS)}")
    job = _job_of_all(unlike_nodes, to, version) if unlike_nodes else job_of(plan_file, to, version)
    if num_steps is not None:
        variables = (replace(one, default=str(num_steps)) if one.counts_steps else one for one in job.variables)
        job = replace(job, variables=tuple(variables))
    return launch_files(plan_file, job, known, image, name, unlike_nodes)


def _job_of_all(unlike_nodes: Sequence[NodeRange], to: str, version: str | None) -> Job:
    """Return the job that runs on all of these nodes, with what the environment of each needs.

    Raises InputError where they need other options or files.
    """
    jobs = [job_of(nodes.plan_file, to, version) for nodes in unlike_nodes]
    settings = {setting.name: setting for job in jobs for setting in job.environment}
    first, *others = (replace(job, environment=tuple(settings.values())) for job in jobs)
    if any(other != first for other in others):
        parts = " and ".join(nodes.part for nodes in unlike_nodes)
        raise InputError(f"{jobs[0].framework} needs other options on {parts}: no one launch file starts the plan")
    return first
