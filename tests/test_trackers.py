"""Runs and tunings in trackers: what these give back of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autoplan.api.tracking import track_run, track_tuning
from autoplan.base.errors import AutoplanError, InputError
from autoplan.readers.model import load_model
from autoplan.runs.trackers import TRACKERS, TrackedRun, check_tracker, track
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.tune_report import TriedPlan, TuneReport
from autoplan.trainer.task import PredictedRun, RunFile, Task, TrainingReport
from commands import run

PLAN = ParallelPlan(global_batch=8, micro_batch=2, tp=2)
RUN = RunFile(
    task=Task(model=load_model("llama3-8b"), plan=PLAN, seq_len=64, dtype="bf16"),
    predicted=PredictedRun(device="cpu", step_s=0.5, low_s=0.25, high_s=1.0, terms_s={}, peak_bytes=1e9),
    measured=TrainingReport(losses=(9.0, 8.0, 4.0, 2.0), step_s=(0.5, 0.25), device="cpu", peak_bytes=(1e9, 2e9)),
)


def trial(number: int, measured_s: float | None) -> TriedPlan:
    return TriedPlan(
        number=number,
        plan=PLAN,
        predicted_s=1.0,
        measured_s=measured_s,
        spread=None,
        end="measured" if measured_s else "oom",
        reason="",
        seconds=30.0,
    )


TRIALS = (trial(0, None), trial(1, 2.0), trial(2, 4.0), trial(3, 1.0))
TUNING = TuneReport(
    ended="no plan is left",
    is_separated=True,
    best=TRIALS[-1],
    best_s=1.0,
    trials=TRIALS,
    candidates=4,
    left=0,
    ratio=1.0,
    gpu_hours=0.5,
)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Series of the only run of TensorBoard in a folder, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    (path,) = (folder / "runs").iterdir()
    events = EventAccumulator(str(path))
    events.Reload()
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own imports
def test_tensorboard_shows_the_steps_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    track_run(RUN, "tensorboard")
    assert scalars(tmp_path) == {
        "step_s": [(0, 0.5), (1, 0.25)],
        "tokens_per_s": [(0, 1024.0), (1, 2048.0)],  # of 8 sequences of 64
        "loss": [(0, 4.0), (1, 2.0)],
        "predicted/step_s": [(0, 0.5), (1, 0.5)],
        "predicted/low_s": [(0, 0.25), (1, 0.25)],
        "predicted/high_s": [(0, 1.0), (1, 1.0)],
    }


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_the_trials_of_a_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    track_tuning(TUNING, "llama3-8b", "tensorboard")
    series = scalars(tmp_path)
    assert series["step_s"] == [(1, 2.0), (2, 4.0), (3, 1.0)]
    assert series["best_step_s"] == [(1, 2.0), (2, 2.0), (3, 1.0)]
    assert [step for step, _ in series["trial_s"]] == [0, 1, 2, 3]


MLFLOW = """
import sys, mlflow
sys.path[:0] = {paths}
from test_trackers import RUN
from autoplan.api.tracking import track_run
mlflow.set_tracking_uri({uri!r})
track_run(RUN, "mlflow")
(run,) = mlflow.search_runs(output_format="list")
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "step_s")
print(run.data.params["tp"], [(point.step, point.value) for point in history], run.info.status)
"""


def test_mlflow_has_the_steps_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    paths = [str(Path(__file__).parent), str(Path(__file__).parent / "support")]
    program = MLFLOW.format(paths=paths, uri=f"sqlite:///{tmp_path}/mlflow.db")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "2 [(0, 0.5), (1, 0.25)] FINISHED", done.stderr


def test_unknown_and_missing_trackers_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--log-to 'comet': must be one of wandb, mlflow, tensorboard"):
        check_tracker("comet")
    for command in ("run", "tune"):
        done = run(tmp_path, command, "plan.json", "--log-to", "comet")
        assert done.returncode == 1
        assert "must be one of wandb" in done.stderr or "plan.json" in done.stderr
    monkeypatch.setattr("autoplan.runs.trackers.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed here: pip install 'autoplan\[mlflow\]'"):
        check_tracker("mlflow")


def test_a_tracker_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "runs").write_text("a file where the folder should be")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AutoplanError, match="--log-to tensorboard: the run is not logged: "):
        track(TrackedRun(name="run", parameters={}, series={"step_s": [1.0]}), "tensorboard")
    assert TRACKERS.keys() == {"wandb", "mlflow", "tensorboard"}
