"""Experiment trackers: a run or a tuning is logged as a run of W&B, MLflow or TensorBoard.

The destination is set by their own variables: `WANDB_PROJECT` and `WANDB_MODE`, `MLFLOW_TRACKING_URI` and
`MLFLOW_EXPERIMENT_NAME`; TensorBoard files go into the folder runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from autoplan.base.errors import AutoplanError, InputError

TENSORBOARD_FOLDER = Path("runs")  # where `tensorboard --logdir runs` looks
LONGEST_PARAMETER = 500  # limit of MLflow for the characters of a parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run for trackers: parameters, and series of numbers by step, None for steps without a number."""

    name: str
    parameters: Mapping[str, str | int | float]
    series: Mapping[str, Sequence[float | None]]

    def points(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield every step with the numbers that it has."""
        for step in range(max(map(len, self.series.values()), default=0)):
            values = {name: numbers[step] for name, numbers in self.series.items() if step < len(numbers)}
            yield step, {name: float(value) for name, value in values.items() if value is not None}


def check_tracker(tracker: str) -> None:
    """Raise InputError for a tracker that is unknown or not installed."""
    if tracker not in TRACKERS:
        raise InputError(f"--log-to {tracker!r}: must be one of {', '.join(TRACKERS)}")
    if find_spec(tracker) is None:
        raise InputError(f"--log-to {tracker}: it is not installed here: pip install 'autoplan[{tracker}]'")


def track(run: TrackedRun, tracker: str) -> None:
    """Write a finished run to a tracker; its errors become one-line AutoplanErrors."""
    check_tracker(tracker)
    try:
        TRACKERS[tracker](run)
    except Exception as error:  # any error of the library, e.g. without an answer from its server
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise AutoplanError(f"--log-to {tracker}: the run is not logged: {reason}") from error


def _to_wandb(run: TrackedRun) -> None:
    import wandb

    with wandb.init(name=run.name, config=dict(run.parameters), settings=wandb.Settings(silent=True)) as opened:
        for step, values in run.points():
            opened.log(values, step=step)


def _to_mlflow(run: TrackedRun) -> None:
    import mlflow

    with mlflow.start_run(run_name=run.name):
        mlflow.log_params({name: str(value)[:LONGEST_PARAMETER] for name, value in run.parameters.items()})
        for step, values in run.points():
            mlflow.log_metrics(values, step=step)


def _to_tensorboard(run: TrackedRun) -> None:
    from tensorboard.summary import Writer

    folder = TENSORBOARD_FOLDER / f"autoplan-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}"
    writer = Writer(str(folder))
    description = "  \n".join(f"{name}: {value}" for name, value in {"run": run.name, **run.parameters}.items())
    for step, values in run.points():
        for name, value in values.items():
            writer.add_scalar(name, value, step, description=description)
    writer.close()


TRACKERS: Mapping[str, Callable[[TrackedRun], None]] = {
    "wandb": _to_wandb,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}
