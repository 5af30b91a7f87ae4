"""How do runs of plans get into the timing database, and what do they teach?"""

from __future__ import annotations

import socket
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from autoplan.base.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from autoplan.base.processes import CrewError
    from autoplan.cli.command import ProgramError
    from autoplan.cost.calibration import Fitted, MeasuredRun
    from autoplan.profiler.record import Fingerprint
    from autoplan.profiler.run_record import RunRecord
    from autoplan.runs.log_folder import PastRun
    from autoplan.search.tune import Tuning
    from autoplan.spec.framework import Framework
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.problem import Problem
    from autoplan.topology.cluster import ClusterSpec
    from autoplan.trainer.task import Predicted, Report

LEAST_RUNS = 3  # for a calibration


class RunKeeper:
    """Adds runs to the database at `url`, which is opened, and made, before anything runs."""

    def __init__(self, url: str | None) -> None:
        from autoplan.profiler.store import open_store

        self._url = url
        open_store(url).close()

    def keep(
        self, problem: Problem, plan: ParallelPlan, predicted: Predicted, report: Report, *, log_of: str = ""
    ) -> None:
        """Add a run that ended well; `log_of` is the framework whose log told, blank for the built-in trainer."""
        from autoplan.profiler.record import MOST_SAMPLES

        self._add(
            problem,
            plan,
            _on_cluster(problem) if log_of else _here(problem),
            step_s=report.step_s[-MOST_SAMPLES:],
            peak_bytes=max(report.peak_bytes, default=None),
            predicted_s=predicted.step_s,
            source=f"log of {log_of}" if log_of else "built-in trainer",
        )

    def keep_failure(
        self,
        problem: Problem,
        plan: ParallelPlan,
        predicted: Predicted,
        error: CrewError | ProgramError,
        *,
        is_own: bool,
    ) -> None:
        """Add a run that failed: `is_own` says whether of the built-in trainer or of a user's program."""
        from autoplan.base.units import cleaned

        self._add(
            problem,
            plan,
            _here(problem) if is_own else _on_cluster(problem),
            status="oom" if error.is_out_of_memory else "failed",
            reason=cleaned(str(error)),
            predicted_s=predicted.step_s,
            source="built-in trainer" if is_own else "log",
        )

    def keep_trials(self, problem: Problem, tuning: Tuning) -> None:
        """Add the trials whose jobs left a log alone, where it told their steps or that memory ran out."""
        from autoplan.base.units import cleaned

        for trial in tuning.trials():
            if trial.result is None or trial.result.how not in ("measured", "oom"):
                continue
            ran_out = trial.result.how == "oom"
            self._add(
                problem,
                tuning.plans[trial.at].plan,
                _on_cluster(problem),
                step_s=() if ran_out else (trial.result.step_s,),
                peak_bytes=trial.result.peak_bytes,
                predicted_s=tuning.plans[trial.at].step_s,
                status="oom" if ran_out else "ok",
                reason=cleaned(trial.result.reason) if ran_out else "",
                source="log of a trial",
            )

    def _add(self, problem: Problem, plan: ParallelPlan, machine: Fingerprint, **what: Any) -> None:
        from autoplan.base.units import cleaned
        from autoplan.base.user import user_name
        from autoplan.profiler.run_record import RunRecord
        from autoplan.profiler.store import open_store

        run = RunRecord(
            fingerprint=machine,
            framework=problem.framework.name,
            model=problem.model,
            training=problem.training,
            plan=plan,
            measured_by=user_name(),
            host=cleaned(socket.gethostname()),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **what,
        )
        with open_store(self._url) as store:
            store.add([run])


def _here(problem: Problem) -> Fingerprint:
    """The machine of the built-in trainer, whose ranks run beside this program."""
    from autoplan.profiler.machine.environment import own_fingerprint

    return replace(own_fingerprint(), num_hosts=problem.cluster.num_nodes)


def _on_cluster(problem: Problem) -> Fingerprint:
    """The machine of a program that may run elsewhere: this one if it has the plan's device, else what is known."""
    from importlib.util import find_spec

    if find_spec("torch") and find_spec("psutil"):
        here = _here(problem)
        if here.device == problem.cluster.device.name:
            return here
    return _as_described(problem.cluster)


def _as_described(cluster: ClusterSpec) -> Fingerprint:
    """What a description of a cluster says of its machines."""
    from autoplan.profiler.record import Fingerprint

    return Fingerprint(
        device=cluster.device.name,
        memory_bytes=int(cluster.device.memory_bytes),
        devices_per_node=cluster.devices_per_node,
        num_hosts=cluster.num_nodes,
        **(asdict(cluster.machine) if cluster.machine else {}),
    )


# -- past runs --------------------------------------------------------------------------------------------------------


def problem_of(cluster: ClusterSpec, past: PastRun) -> Problem:
    """What a past run trained, on its part of `cluster`, under the shipped calibration."""
    from autoplan.frameworks.presets import load_framework
    from autoplan.read.calibration import built_in_calibration
    from autoplan.read.cluster import of_size
    from autoplan.spec.problem import Problem

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
        calibration=built_in_calibration(framework, cluster.device.generation),
    )


def past_record(problem: Problem, past: PastRun) -> RunRecord:
    """A past run as the database holds it.  Nothing in its content depends on when or where the log was read."""
    from autoplan.base.user import user_name
    from autoplan.profiler.record import MOST_SAMPLES
    from autoplan.profiler.run_record import RunRecord

    logged = None if past.is_out_of_memory else past.logged
    status, peak = "ok" if logged else "oom" if past.is_out_of_memory else "failed", None
    if logged:
        is_allocated = problem.framework.memory.logs_memory == "allocated"
        peak = logged.allocated_bytes if is_allocated else logged.reserved_bytes
    return RunRecord(
        fingerprint=_as_described(problem.cluster),
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


# -- what runs teach --------------------------------------------------------------------------------------------------


def calibration_of(cluster: ClusterSpec, framework: Framework, url: str | None) -> Fitted:
    """The calibration of `framework` on nodes like those of `cluster`, from its finished runs in the database.

    Runs on the nearest machines that have `LEAST_RUNS` of them count (`Match`), else those on any with the device.
    """
    from autoplan.cost.calibration import calibrated

    found = list(_measured(cluster, framework, url))
    if len(found) < LEAST_RUNS:
        raise InputError(
            f"the database holds {len(found)} finished runs of {framework.name} on {cluster.device.name} that can be "
            f"priced, a calibration needs {LEAST_RUNS}: add some with autoplan calibrate --from-logs, or leave "
            "--calibration db out"
        )
    return calibrated(found, name=f"{framework.name} on {cluster.device.name}, from {len(found)} runs in the database")


def _measured(cluster: ClusterSpec, framework: Framework, url: str | None) -> Iterator[MeasuredRun]:
    from autoplan.cli.inputs import opened_store
    from autoplan.profiler.store.match import match

    wanted = _as_described(cluster)
    by_match: dict[int, list[RunRecord]] = {}
    with opened_store(url, writable=False) as store:
        for run in store.runs(device=cluster.device.name):
            if run.framework in (framework.name, framework.calibration_name) and run.status == "ok":
                by_match.setdefault(match(run.fingerprint, wanted) or 0, []).append(run)
    chosen: list[RunRecord] = []
    for _, some in sorted(by_match.items()):
        chosen += some
        if len(chosen) >= LEAST_RUNS:
            break
    yield from _priced(chosen, cluster, framework)


def _priced(runs: Iterable[RunRecord], cluster: ClusterSpec, framework: Framework) -> Iterator[MeasuredRun]:
    """The runs that the model can price, on as many nodes like those of `cluster` as they had."""
    from autoplan.base.errors import AutoplanError
    from autoplan.cost.calibration import MeasuredRun
    from autoplan.read.calibration import built_in_calibration
    from autoplan.read.cluster import of_size
    from autoplan.spec.plan import PlanBatch
    from autoplan.spec.problem import Problem

    base = built_in_calibration(framework, cluster.device.generation)
    for run in runs:
        plan = replace(run.plan, placement=None)
        try:
            problem = Problem(
                model=run.model,
                training=run.training,
                cluster=of_size(cluster, plan.num_devices),
                framework=framework,
                calibration=base,
            )
            PlanBatch.of([plan], run.model.num_layers)
        except AutoplanError:
            continue
        assert run.seconds is not None
        yield MeasuredRun(problem=problem, plan=plan, step_s=run.seconds)
