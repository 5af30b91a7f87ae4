"""Logging of runs and tunings to experiment trackers."""

from __future__ import annotations

from itertools import repeat

from autoplan.runs.trackers import TrackedRun, track
from autoplan.runs.trackers import check_tracker as check_tracker
from autoplan.spec.axes import COLUMNS, shown
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.tune_report import TuneReport
from autoplan.trainer.task import RunFile


def track_run(run: RunFile, tracker: str) -> None:
    """Log the steps of a run with their losses, the predicted time and its interval."""
    predicted, measured = run.predicted, run.measured
    times, tokens = measured.step_s, run.task.global_batch * run.task.seq_len
    memory = {"peak_bytes": max(measured.peak_bytes)} if measured.peak_bytes else {}
    track(
        TrackedRun(
            name=f"{run.task.model.name}: {run.task.plan.describe()}",
            parameters={
                "model": run.task.model.name,
                "seq_len": run.task.seq_len,
                "device": measured.device,
                "predicted_peak_bytes": predicted.peak_bytes,
                **memory,
                **_axes(run.task.plan),
            },
            series={
                "step_s": times,
                "tokens_per_s": [tokens / seconds for seconds in times],
                "loss": measured.losses[-len(times) :],  # those before are of the steps that are not timed
                "predicted/step_s": [*repeat(predicted.step_s, len(times))],
                "predicted/low_s": [*repeat(predicted.low_s, len(times))],
                "predicted/high_s": [*repeat(predicted.high_s, len(times))],
            },
        ),
        tracker,
    )


def track_tuning(report: TuneReport, model: str, tracker: str) -> None:
    """Log the trials of a tuning, each as a step with its predicted and measured time."""
    best = {"best": report.best.plan.describe(), **_axes(report.best.plan)} if report.best else {}
    best_s = [min((s for s in _measured(report)[: at + 1] if s), default=None) for at in range(len(report.trials))]
    track(
        TrackedRun(
            name=f"tuning of {model}",
            parameters={"model": model, "ended": report.ended, "gpu_hours": report.gpu_hours, **best},
            series={
                "predicted/step_s": [trial.predicted_s for trial in report.trials],
                "step_s": _measured(report),
                "best_step_s": best_s,
                "trial_s": [trial.seconds for trial in report.trials],
            },
        ),
        tracker,
    )


def _measured(report: TuneReport) -> list[float | None]:
    return [trial.measured_s for trial in report.trials]


def _axes(plan: ParallelPlan) -> dict[str, str | int]:
    values = {axis.name: getattr(plan, axis.name) for axis in COLUMNS} | {"dp": plan.dp}
    return {name: value if type(value) is int else shown(value) for name, value in values.items()}
