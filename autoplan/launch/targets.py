"""Launch files of a plan, for every target and launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.base.errors import InputError, NoPlanError
from autoplan.frameworks.common.job import File, Job, Target
from autoplan.frameworks.registry import TARGETS, find_target, target_of
from autoplan.launch.names import LAUNCHERS
from autoplan.launch.start import NodeRange, Start
from autoplan.spec.framework import Framework
from autoplan.spec.optimizers import TRAITS
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.training import TrainingSpec


def job_of(plan_file: PlanFile, to: str) -> Job:
    """Return the job of a plan for the target `to`, NAME or NAME@VERSION; raises InputError if there is none."""
    target = find_target(to, plan_file.framework)
    if (apart := plan_file.model.encoder_apart) is not None:
        plan = plan_file.best.plan
        degrees = f"tp={plan.tp},pp={plan.pp},cp={plan.cp},dp={plan.dp},rank_offset=0"
        raise InputError(
            "no target starts an encoder on ranks of its own; in a program of MegatronMIMO (Megatron-Bridge) they are "
            f"language={degrees} and images=tp={apart.tp},dp={apart.dp},rank_offset={plan.num_devices}"
        )
    if why := refused_training(target, plan_file.training):
        raise InputError(why)
    return target.job(plan_file, target.versions[0])


def refused_training(target: Target, training: TrainingSpec) -> str:
    """Describe what a target cannot express of the training, and the way out; empty if it can express all of it."""
    if not (refused := _refused(target, training)):
        return ""
    able = [name for name, candidate in TARGETS.items() if not _refused(candidate, training)]
    remedy = f"use --to {' or '.join(able)}" if able else "no target can; use your own program"
    return f"{target.title} cannot express {refused}: {remedy}"


def usual_start(framework: Framework, training: TrainingSpec, *first: str) -> str:
    """Return the target that starts plans of a framework: one of those named `first`, else the first of all.

    NoPlanError where none does, with the reason.
    """
    first = (*first, target_of(framework.name), framework.rules)
    refusal = ""
    # The module of a target is loaded when its turn comes: that of the first is the last in nearly all searches.
    for target in sorted(TARGETS, key=lambda name: first.index(name) if name in first else len(first)):
        if framework.rules in TARGETS[target].rules:
            if not (why := refused_training(TARGETS[target], training)):
                return target
            refusal = refusal or why
    raise NoPlanError(refusal or f"no launch files are written for {framework.name}")


def _refused(target: Target, training: TrainingSpec) -> str:
    """Describe what a target cannot express of the training."""
    finetuning = training.finetuning
    if finetuning is not None and (finetuning.has_adapters or finetuning.frozen):
        refused = target.refused_tuning(finetuning) if target.refused_tuning else str(finetuning)
        if refused:
            return refused
    if training.optimizer not in target.optimizers:
        return f"{TRAITS[training.optimizer].title} (it takes {', '.join(target.optimizers)})"
    return ""


def exported(
    plan_file: PlanFile,
    to: str,
    launcher: str,
    image: str | None = None,
    *,
    name: str | None = None,
    num_steps: int | None = None,
    unlike_nodes: tuple[NodeRange, ...] = (),
) -> tuple[File, ...]:
    """Return the files that start a plan, the launch file first; `image` is the container image.

    The job is named `name`, by default after its model, and runs `num_steps` if the target supports it.  For a plan on
    `unlike_nodes`, `plan_file` is that of the first of them.
    """
    from autoplan.launch.launcher import launch_files  # imports all launchers, which a search does not need

    launcher_name = next((name for name in LAUNCHERS if name == launcher), None)
    if launcher_name is None:
        raise InputError(f"no launcher {launcher!r}: known are {', '.join(LAUNCHERS)}")
    job = _job_of_all(unlike_nodes, to) if unlike_nodes else job_of(plan_file, to)
    if num_steps is not None:
        steps = str(num_steps)
        job = replace(
            job,
            variables=tuple(
                replace(variable, default=steps) if variable.counts_steps else variable for variable in job.variables
            ),
        )
    return launch_files(Start.of(plan_file, job, launcher_name, image, name, unlike_nodes))


def _job_of_all(unlike_nodes: Sequence[NodeRange], to: str) -> Job:
    """Return the job for all of these nodes, with the environment that each needs.

    Raises InputError if they need different options or files.
    """
    jobs = [job_of(nodes.plan_file, to) for nodes in unlike_nodes]
    settings = {setting.name: setting for job in jobs for setting in job.environment}
    first, *later_jobs = (replace(job, environment=tuple(settings.values())) for job in jobs)
    if any(later_job != first for later_job in later_jobs):
        parts = " and ".join(nodes.part for nodes in unlike_nodes)
        raise InputError(f"{jobs[0].framework} needs other options on {parts}: no one launch file starts the plan")
    return first
