"""Predictions of measured runs, and their table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.units import GIB
from autoplan.cost.estimate import estimate
from autoplan.runs.runs import Run, read_runs
from autoplan.runs.table import positive, read_rows
from autoplan.spec.axes import DEFAULT_RECOMPUTE_MODULES
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import Recompute
from autoplan.spec.estimate import VERDICTS, CostEstimate
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.run_outcome import Prediction, RunVerdict


def predict(run: Run) -> Prediction:
    """Predict one run."""
    return predict_all([run])[0]


class _Priced(NamedTuple):
    """A run that can be priced, and its row in the table."""

    place: int
    run: Run
    problem: Problem
    batch: PlanBatch  # of its single plan, which the framework may reject

    @property
    def sorting(self) -> tuple[str, str, int, int]:
        """Sort key that groups equal problems, as far as tables describe them."""
        problem = self.problem
        return problem.framework.name, problem.model.name, problem.training.seq_len, problem.cluster.num_devices


def predict_all(runs: Iterable[Run]) -> list[Prediction]:
    """Predict runs in order; runs of equal problems are priced together."""
    predictions: dict[int, Prediction] = {}
    priced: list[_Priced] = []
    for place, run in enumerate(runs):
        plan = run.plan or run.rejected_plan
        if run.problem is None or plan is None:
            verdict: RunVerdict = "invalid" if run.is_invalid else "unpriced"
            predictions[place] = Prediction(id=run.id, verdict=verdict, note=_note(run.refusal, run))
            continue
        try:
            batch = run.problem.batch([plan])
        except AutoplanError as error:
            predictions[place] = Prediction(id=run.id, verdict="unpriced", note=_note(str(error), run))
        else:
            priced.append(_Priced(place, run, run.problem, batch))
    priced.sort(key=attrgetter("sorting"))
    for problem, group in groupby(priced, key=attrgetter("problem")):
        same = list(group)
        costs = estimate(problem, PlanBatch.concatenate([alike.batch for alike in same]))
        for row, priced_run in enumerate(same):
            predictions[priced_run.place] = _prediction(priced_run, costs.take(slice(row, row + 1)))
    return [predictions[place] for place in range(len(predictions))]


def _note(first: str, run: Run) -> str:
    """Join a note on a run with the defaults filled into its row."""
    filled = f"filled: {', '.join(run.filled)}" if run.filled else ""
    return "; ".join(part for part in (first, filled) if part)


def _prediction(priced: _Priced, cost: CostEstimate) -> Prediction:
    """Return the prediction of a run; `cost` is the estimate of its plan."""
    run = priced.run
    note = _note(run.refusal, run)
    doubt = math.exp(log_doubt(run, cost))
    verdict: RunVerdict = "invalid" if run.is_invalid else VERDICTS[int(cost.verdict[0])]
    if verdict == "oom" and not recompute_is_stated(run) and _fits_recomputed(priced.problem, cost.batch.plan(0)):
        verdict = "risky"
        note = "; ".join(part for part in (note, "what is recomputed is not told: fits with all of it") if part)
    return Prediction(
        id=run.id,
        step_time_s=float(cost.step_s[0]),
        step_time_low_s=float(cost.low_s[0]) * min(doubt, 1.0),
        step_time_high_s=float(cost.high_s[0]) * max(doubt, 1.0),
        peak_memory_gib=float(cost.logged_memory_bytes[0]) / GIB,
        verdict=verdict,
        note=note,
    )


def log_doubt(run: Run, cost: CostEstimate) -> float:
    """Log ratio of a run's step under its possible alternative framework to its estimate."""
    if run.problem is None or run.doubted is None:
        return 0.0
    doubted = estimate(replace(run.problem, framework=run.doubted), cost.batch)
    return float(np.log(doubted.step_s[0] / cost.step_s[0]))


def predict_runs(path: Path, calibration: Calibration | None) -> list[Prediction]:
    """Predict every run of a table, with the given calibration instead of the shipped ones."""
    return predict_all(run.calibrated(calibration) if calibration else run for run in read_runs(path))


def recompute_is_stated(run: Run) -> bool:
    """Return whether a table states what a run recomputes.

    With an attention that stores no scores, selective recomputation is of other modules, which no column states
    (Megatron-LM, --recompute-modules).
    """
    if run.problem is None or run.plan is None or any(column.startswith("recompute=") for column in run.filled):
        return False
    names_no_module = run.plan.recompute == "selective" and run.plan.recompute_modules == DEFAULT_RECOMPUTE_MODULES
    return not names_no_module or run.problem.stores_scores(run.plan.attention)


def _fits_recomputed(problem: Problem, plan: ParallelPlan) -> bool:
    repeated = replace(plan, recompute=Recompute.FULL, recompute_modules=DEFAULT_RECOMPUTE_MODULES)
    batch = problem.batch([repeated])
    return VERDICTS[int(estimate(problem, batch).verdict[0])] != "oom"


COLUMNS = ("id", "step_time_s", "step_time_low_s", "step_time_high_s", "peak_memory_gib", "verdict", "note")


def prediction_table(predictions: Iterable[Prediction]) -> str:
    """Return the predictions as CSV text in `COLUMNS`, blank for missing figures."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for prediction in predictions:
        values = (getattr(prediction, column) for column in COLUMNS)
        writer.writerow(f"{value:.6g}" if isinstance(value, float) else value or "" for value in values)
    return text.getvalue()


def read_predictions(path: Path) -> Iterator[Prediction]:
    """Yield the predictions of a table written by `prediction_table`, or by another program in the same columns."""
    for row in read_rows(path, "predictions", ("id", "step_time_s", "verdict")):
        if row["verdict"] not in get_args(RunVerdict):
            verdicts = ", ".join(get_args(RunVerdict))
            raise InputError(f"{path}: verdict {row['verdict'][:40]!r} of {row['id'][:40]} must be one of {verdicts}")
        numbers = {name: positive(path, row, name) for name in COLUMNS[1:5]}
        yield Prediction(id=row["id"], verdict=row["verdict"], note=row.get("note", ""), **numbers)  # type: ignore[arg-type]
