"""Calibrations from the training runs in the timing database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from autoplan.api.timings import opened_store
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.version import __version__
from autoplan.cost.calibration import Fitted, MeasuredRun, calibrated
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.run_record import RunRecord
from autoplan.readers.calibration import built_in_calibration, load_calibration
from autoplan.readers.cluster import of_size
from autoplan.spec.calibration import Calibration, FitConditions
from autoplan.spec.framework import Framework
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import NO_TIMINGS, TimingTable
from autoplan.topology.cluster import ClusterSpec

MIN_RUNS = 3  # for a calibration


def described_machine(cluster: ClusterSpec) -> Fingerprint:
    """Return what a cluster description says about its machines."""
    return Fingerprint(
        device=cluster.device.name,
        memory_bytes=int(cluster.device.memory_bytes),
        devices_per_node=cluster.devices_per_node,
        num_hosts=cluster.num_nodes,
        **(asdict(cluster.machine) if cluster.machine else {}),
    )


def calibration_of(
    cluster: ClusterSpec, framework: Framework, url: str | None, timings: TimingTable = NO_TIMINGS
) -> Fitted:
    """Fit a calibration of `framework` on nodes like those of `cluster`, from its finished runs in the database.

    Uses the runs on the most similar machines with at least `MIN_RUNS` of them (`Match`), otherwise those on any
    machine with the device.  Runs are priced with the measured timings that the calibration will be combined with, so
    it learns only what these leave unexplained.
    """
    runs = list(_measured(cluster, framework, url, timings))
    if len(runs) < MIN_RUNS:
        raise InputError(
            f"the database holds {len(runs)} finished runs of {framework.name} on {cluster.device.name} that can "
            f"be priced, a calibration needs {MIN_RUNS}: add some with autoplan calibrate --from-logs, or leave "
            "--calibration db out"
        )
    name = f"{framework.name} on {cluster.device.name}, from {len(runs)} runs in the database"
    return fitted_to(runs, name=name)


def fitted_to(runs: Sequence[MeasuredRun], *, name: str) -> Fitted:
    """Fit a calibration to runs on one device, and record the measured timings that priced them."""
    fitted, problem = calibrated(runs, name=name), runs[0].problem
    return replace(fitted, calibration=replace(fitted.calibration, fitted_with=_conditions(problem)))


def check_fitted(calibration: Calibration, problem: Problem) -> None:
    """Reject a calibration that was fitted on another device, by another version or with other measured timings."""
    device = problem.cluster.device.name
    calibration.check_goes_with(problem.timings.digest, __version__, device)


def plain_calibration(path: Path) -> Calibration:
    """Return the calibration in a file, for runs that are priced without measured times."""
    calibration = load_calibration(path)
    calibration.check_goes_with("", __version__)
    return calibration


def _conditions(problem: Problem) -> FitConditions:
    return FitConditions(device=problem.cluster.device.name, autoplan=__version__, timings=problem.timings.digest)


def _measured(
    cluster: ClusterSpec, framework: Framework, url: str | None, timings: TimingTable
) -> Iterator[MeasuredRun]:
    from autoplan.profiler.store import Choice  # brings SQLAlchemy
    from autoplan.profiler.store.machines import match

    machine = described_machine(cluster)
    by_match: dict[int, list[RunRecord]] = {}
    with opened_store(url, writable=False) as store:
        for run in store.runs(Choice(device=cluster.device.name)):
            if run.framework in (framework.name, framework.calibration_name) and run.status == "ok":
                by_match.setdefault(match(run.fingerprint, machine) or 0, []).append(run)
    chosen: list[RunRecord] = []
    for _, runs in sorted(by_match.items()):
        chosen += runs
        if len(chosen) >= MIN_RUNS:
            break
    yield from _priced(chosen, cluster, framework, timings)


def _priced(
    runs: Iterable[RunRecord], cluster: ClusterSpec, framework: Framework, timings: TimingTable
) -> Iterator[MeasuredRun]:
    """The runs that the model can price, on as many nodes like those of `cluster` as they had."""
    base = built_in_calibration(framework, cluster.device)
    for run in runs:
        plan = replace(run.plan, placement=None)
        try:
            problem = Problem(
                model=run.model,
                training=run.training,
                cluster=of_size(cluster, plan.num_devices),
                framework=framework,
                calibration=base,
                timings=timings,
            )
            PlanBatch.of([plan], run.model.num_layers)
        except AutoplanError:
            continue
        assert run.seconds is not None
        yield MeasuredRun(problem=problem, plan=plan, step_s=run.seconds)
