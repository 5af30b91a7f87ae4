"""Measured runs: predictions of a table of them, their score, and calibrations from a table or from logs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoplan.api.calibrations import MIN_RUNS, calibration_of, described_machine, fitted_to, plain_calibration
from autoplan.api.launch_files import make_context, with_routing
from autoplan.api.problem import load_cluster
from autoplan.api.results import Result, Table
from autoplan.api.timings import stored_table
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import encode, encode_line, write_text
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.cost.calibration import Fitted, MeasuredRun
from autoplan.cost.estimate import estimate
from autoplan.frameworks.launch_files import read_launch_on_part
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.record import MAX_SAMPLES
from autoplan.profiler.run_record import RunRecord
from autoplan.readers.calibration import built_in_calibration, calibration_text
from autoplan.readers.cluster import of_size
from autoplan.report.score import COLUMNS, score_by_source, score_table
from autoplan.runs.log_folder import PassedOver, PastRun, past_runs
from autoplan.runs.outcomes import read_outcomes
from autoplan.runs.predictions import predict_runs, prediction_table, read_predictions
from autoplan.runs.runs import read_runs
from autoplan.spec.calibration import Calibration
from autoplan.spec.problem import Problem
from autoplan.spec.run_outcome import Prediction
from autoplan.spec.timing import NO_TIMINGS
from autoplan.topology.cluster import ClusterSpec

REPLICA_AXES = ("dp_replicate", "dp_shard", "global_batch", "placement")  # in which a series of runs may differ
STALLED = 0.9  # of the speedup that Amdahl's law allows; repeated runs differ less

# -- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictResult(Result):
    """Predictions of the runs of a table, in its order: times in seconds, memory in GiB, a verdict and a note."""

    predictions: tuple[Prediction, ...]

    @property
    def verdicts(self) -> dict[str, int]:
        """The number of runs with each verdict."""
        return dict(Counter(str(prediction.verdict) for prediction in self.predictions))

    @property
    def headline(self) -> str:
        """The number of runs, and how many of them have each verdict."""
        counted = ", ".join(f"{count} {verdict}" for verdict, count in Counter(self.verdicts).most_common())
        return f"{len(self.predictions)} runs: {counted or 'none priced'}"

    def table(self) -> Table:
        """Return one row for each run; None where it could not be priced."""
        names = ("id", "step_time_s", "step_time_low_s", "step_time_high_s", "peak_memory_gib", "verdict", "note")
        return Table.of({name: getattr(row, name) for name in names} for row in self.predictions)

    def to_json(self) -> str:
        """Return the predictions as JSON."""
        return encode(self.predictions)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the predictions as the CSV table that `score` reads; InputError where it exists without `force`."""
        write_text(Path(path), prediction_table(self.predictions), force=force)


def predict(runs: str | Path, *, calibration: str | Path | None = None) -> PredictResult:
    """Predict every run of a table from its configuration alone.

    `runs` is a CSV table with the columns of measured_runs.csv; `calibration` is a TOML file that replaces the shipped
    ones.  Raises InputError if one of them cannot be read; the verdict of a run says if it cannot be priced.
    """
    base = plain_calibration(Path(calibration)) if calibration else None
    return PredictResult(predictions=tuple(predict_runs(Path(runs), base)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult(Result):
    """Accuracy of predictions for each source, for all runs, and as the mean over sources."""

    by_source: dict[str, dict[str, float | None]]  # the columns of `autoplan.report.score`; shares are in percent

    @property
    def headline(self) -> str:
        """The mean error of the step time over the sources."""
        error = self.by_source["mean of sources"]["medAPE"]
        return "no run was priced" if error is None else f"step times are {error:.1f} % off, the mean of the sources"

    def table(self) -> Table:
        """Return one row for each source."""
        return Table.of(
            {"source": source, **{name: row[name] for name in COLUMNS}} for source, row in self.by_source.items()
        )

    def to_json(self) -> str:
        """Return the rows as JSON."""
        return encode_line(self.by_source)

    def to_text(self) -> str:
        """Return the rows as a readable table."""
        return score_table(self.by_source)


def score(
    runs: str | Path, *, predictions: str | Path | None = None, calibration: str | Path | None = None
) -> ScoreResult:
    """Compare predictions with measurements: errors, intervals, ranking, choices and memory.

    `runs` is a CSV table with the columns of measured_runs.csv.  `predictions` is the table that `predict` saved for
    it; without it, the runs are priced now, optionally with a `calibration` instead of the shipped ones.

    Raises InputError if a table cannot be read, or if the predictions are for other runs.
    """
    if predictions is not None and calibration is not None:
        raise InputError("--predictions were priced already: leave --calibration out")
    outcomes = list(read_outcomes(Path(runs)))
    if predictions is not None:
        predicted = tuple(read_predictions(Path(predictions)))
    else:
        predicted = predict(runs, calibration=calibration).predictions
    by_id = {prediction.id: prediction for prediction in predicted}
    if not any(outcome.id in by_id for outcome in outcomes):
        raise InputError(f"{predictions or runs} has none of the runs of {runs}: predict that table first")
    return ScoreResult(by_source=score_by_source(outcomes, by_id))


# -- a calibration from a table ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateResult(Result):
    """A calibration from measured runs; median errors of the step time are shares."""

    calibration: Calibration
    runs: int
    median_error_before: float
    median_error: float  # each run left out of the fit in turn
    warnings: tuple[str, ...] = ()  # runs that were left out, and why

    @property
    def headline(self) -> str:
        """The number of runs, and how far off they are before and after."""
        before, after = 100 * self.median_error_before, 100 * self.median_error
        return (
            f"{self.runs} runs: median error {before:.1f} % with the shipped calibration, {after:.1f} % with each left "
            "out of this one"
        )

    def table(self) -> Table:
        """Return the errors as one row."""
        names = ("runs", "median_error_before", "median_error")
        return Table.of([{name: getattr(self, name) for name in names}])

    def to_json(self) -> str:
        """Return the calibration and its errors as JSON."""
        return encode(self)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the calibration as TOML; InputError where the file exists and `force` is not set."""
        write_text(Path(path), calibration_text(self.calibration), force=force)


def calibrate(runs: str | Path) -> CalibrateResult:
    """Fit a calibration to the finished runs in a table, for one framework on one kind of device.

    `runs` is a CSV table with the columns of measured_runs.csv.  The calibration starts from the shipped one and moves
    away only as far as the runs justify; three runs are enough.

    Raises InputError if the table cannot be read, has too few runs, or mixes frameworks or devices.
    """
    path = Path(runs)
    steps = {outcome.id: outcome.step_s for outcome in read_outcomes(path) if outcome.is_finished}
    measured, names, kinds, left_out = list[MeasuredRun](), list[str](), set(), []
    for run in read_runs(path):
        if (step_s := steps.get(run.id)) is None:
            continue
        if run.problem is None or run.plan is None:
            left_out.append(f"{run.id} is left out: {run.refusal}")
            continue
        if run.is_input_bound:
            left_out.append(f"{run.id} is left out: it is marked as input_bound")
            continue
        measured.append(MeasuredRun(problem=run.problem, plan=run.plan, step_s=step_s))
        names.append(run.id)
        kinds.add(f"{run.problem.framework.name} on {run.problem.cluster.device.name}")
    if len(measured) < MIN_RUNS:
        why = f"; {'; '.join(left_out[:3])}" if left_out else ""
        counted_runs = f"{len(measured)} finished runs that can be priced, a calibration needs {MIN_RUNS}"
        raise InputError(f"{path}: {counted_runs}{why}")
    if len(kinds) > 1:
        raise InputError(f"{path}: runs of {' and of '.join(sorted(kinds))}: give each its own table")
    fitted = fitted_to(measured, name=f"{path.stem}: {min(kinds)}")
    return CalibrateResult(
        calibration=fitted.calibration,
        runs=len(measured),
        median_error_before=fitted.median_error_before,
        median_error=fitted.median_error,
        warnings=(*left_out, *_stalled(names, measured)),
    )


def _stalled(names: Sequence[str], runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """Yield a warning for each run that scales worse than Amdahl's law allows from two runs on fewer devices.

    Runs are compared if they differ in the number of replicas alone.  A serial share of the work, such as exposed
    communication, cannot explain such a run; a loader can, which the devices share.
    """
    series = defaultdict[Hashable, list[tuple[int, float, str]]](list)
    for name, run in zip(names, runs, strict=True):
        plan, training = run.plan, run.problem.training
        layout = [getattr(plan, item.name) for item in fields(plan) if item.name not in REPLICA_AXES]
        key = (run.problem.model.name, training.seq_len, training.precision, *layout)
        series[key].append((plan.num_devices, plan.global_batch / run.step_s, name))
    for members in series.values():
        (first, rate, _), *larger = sorted(members)
        speedups = [(devices / first, faster / rate, name) for devices, faster, name in larger if devices > first]
        for times, speedup, name in speedups[1:]:
            serial = max(0.0, (1 / speedups[0][1] - 1 / speedups[0][0]) / (1 - 1 / speedups[0][0]))
            allowed = 1 / (serial + (1 - serial) / times)
            if speedup < STALLED * allowed:
                yield (
                    f"{name} is {speedup:.2f} times as fast on {times:g} times the devices, while Amdahl's law from "
                    f"two smaller runs allows {allowed:.2f}: if it waited for samples, set input_bound to 1 in its "
                    f"row, and plan with what it read, --input-rate {speedup * rate:.4g}samples/s"
                )


# -- past runs, from their logs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """A past run that is now in the database."""

    log: str  # inside the folder, like the launch file
    launch_file: str
    num_unread: int  # options of that which were not understood and may matter
    predicted_s: float  # a step, by the shipped calibration
    run: RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Outcome of importing a folder of logs."""

    taken: tuple[ImportedRun, ...]
    passed_over: dict[str, str]  # why, by path inside the folder
    num_new: int  # in the database; the others were held already
    calibrations: dict[str, Fitted]  # by framework: from all its runs on such nodes that are held
    without: dict[str, str]  # frameworks that have none, and why


def import_logs(
    folder: str | Path,
    *,
    cluster: str | Path | ClusterSpec,
    db: str | None = None,
    with_times: bool = False,
    **context: Any,
) -> Imported:
    """Store past runs in the timing database `db`, and calibrate the frameworks that ran.

    `folder` contains the logs and the launch files that started them; `cluster` is the cluster on which they ran, with
    its full size.  `with_times` fits the calibrations on top of the measured timings in the database.  `context` adds
    to the launch files, as for `make_context`.  Launch files are never executed.

    Raises InputError if the folder or the cluster cannot be read, StoreError if the database cannot.
    """
    from autoplan.profiler.store import open_store  # brings SQLAlchemy

    cluster_spec, where, launch_context = load_cluster(cluster), Path(folder), make_context(**context)
    taken: list[ImportedRun] = []
    passed_over: dict[str, str] = {}
    with open_store(db) as store:  # what is wrong with it shall be known before any log is read
        for past in past_runs(where, lambda path: read_launch_on_part(path, launch_context, cluster_spec)):
            if isinstance(past, PassedOver):
                passed_over[_inside(past.path, where)] = past.reason
                continue
            try:
                taken.append(_imported(past, cluster_spec, where))
            except AutoplanError as error:
                passed_over[_inside(past.log, where)] = str(error)
        num_new = store.add([run.run for run in taken]).new
    calibrations, without = {}, {}
    for name in sorted({run.run.framework for run in taken}):
        try:
            framework = load_framework(name)
            timings = stored_table(cluster_spec, framework, db) if with_times else NO_TIMINGS
            calibrations[name] = calibration_of(cluster_spec, framework, db, timings)
        except InputError as error:
            without[name] = str(error).partition(":")[0]
    return Imported(
        taken=tuple(taken), passed_over=passed_over, num_new=num_new, calibrations=calibrations, without=without
    )


def _imported(past: PastRun, cluster: ClusterSpec, folder: Path) -> ImportedRun:
    """Return a past run as the database is to hold it; AutoplanError where it cannot be priced."""
    problem = _problem_of(cluster, past)
    cost = estimate(problem, problem.batch([past.launch.plan]))
    return ImportedRun(
        log=_inside(past.log, folder),
        launch_file=_inside(past.launch_file, folder),
        num_unread=sum(option.matters for option in past.launch.unread),
        predicted_s=float(cost.step_s[0]),
        run=_record_of(problem, past),
    )


def _inside(path: Path, folder: Path) -> str:
    return cleaned(str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path))


def _problem_of(cluster: ClusterSpec, past: PastRun) -> Problem:
    """Return the problem that a past run trained, on its part of `cluster`, under the shipped calibration."""
    launch, framework = past.launch, load_framework(past.launch.framework)
    if launch.plan.num_devices > cluster.num_devices:
        raise InputError(
            f"{past.launch_file.name} starts {launch.plan.num_devices} devices, {cluster.name!r} has "
            f"{cluster.num_devices}: give the cluster on which it ran with its full size"
        )
    return Problem(
        model=launch.model,
        training=with_routing(launch, framework, launch.training),
        cluster=of_size(cluster, launch.plan.num_devices),
        framework=framework,
        calibration=built_in_calibration(framework, cluster.device),
    )


def _record_of(problem: Problem, past: PastRun) -> RunRecord:
    """Return a past run as the database holds it.  Nothing in its content depends on when or where the log was read."""
    logged = None if past.is_out_of_memory else past.logged
    status = "ok" if logged else "oom" if past.is_out_of_memory else "failed"
    return RunRecord(
        fingerprint=described_machine(problem.cluster),
        framework=problem.framework.name,
        model=problem.model,
        training=problem.training,
        plan=past.launch.plan,
        step_s=logged.step_s[-MAX_SAMPLES:] if logged else (),
        peak_bytes=logged.peak_bytes(problem.framework) if logged else None,
        status=status,  # type: ignore[arg-type]
        reason=past.reason,
        source=f"log of {past.logged.framework if past.logged else past.launch.target}",
        measured_by=user_name(),
        measured_at=datetime.fromtimestamp(past.ended_s, UTC).isoformat(timespec="seconds"),
    )
