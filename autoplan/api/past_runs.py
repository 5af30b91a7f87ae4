"""Past runs, from their logs and launch files, as the timing database holds them."""

from __future__ import annotations

from datetime import UTC, datetime

from autoplan.api.calibrations import described_machine
from autoplan.base.errors import InputError
from autoplan.base.user import user_name
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.record import MOST_SAMPLES
from autoplan.profiler.run_record import RunRecord
from autoplan.read.calibration import built_in_calibration
from autoplan.read.cluster import of_size
from autoplan.runs.log_folder import PastRun
from autoplan.spec.problem import Problem
from autoplan.topology.cluster import ClusterSpec


def problem_of(cluster: ClusterSpec, past: PastRun) -> Problem:
    """Return the problem that a past run trained, on its part of `cluster`, under the shipped calibration."""
    launch, framework = past.launch, load_framework(past.launch.framework)
    if launch.plan.num_devices > cluster.num_devices:
        raise InputError(
            f"{past.launch_file.name} starts {launch.plan.num_devices} devices, {cluster.name!r} has "
            f"{cluster.num_devices}: name the cluster on which it ran with its whole size"
        )
    return Problem(
        model=launch.model,
        training=launch.training,
        cluster=of_size(cluster, launch.plan.num_devices),
        framework=framework,
        calibration=built_in_calibration(framework, cluster.device),
    )


def past_record(problem: Problem, past: PastRun) -> RunRecord:
    """A past run as the database holds it.  Nothing in its content depends on when or where the log was read."""
    logged = None if past.is_out_of_memory else past.logged
    status, peak = "ok" if logged else "oom" if past.is_out_of_memory else "failed", None
    if logged:
        is_allocated = problem.framework.memory.logs_memory == "allocated"
        peak = logged.allocated_bytes if is_allocated else logged.reserved_bytes
    return RunRecord(
        fingerprint=described_machine(problem.cluster),
        framework=problem.framework.name,
        model=problem.model,
        training=problem.training,
        plan=past.launch.plan,
        step_s=logged.step_s[-MOST_SAMPLES:] if logged else (),
        peak_bytes=peak,
        status=status,  # type: ignore[arg-type]
        reason=past.reason,
        source=f"log of {past.logged.framework if past.logged else past.launch.target}",
        measured_by=user_name(),
        measured_at=datetime.fromtimestamp(past.ended_s, UTC).isoformat(timespec="seconds"),
    )
