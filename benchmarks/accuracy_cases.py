"""Measured runs with their prices, and the calibrations that some of them make."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measured_runs import source_of, with_answers

from autoplan.cost.calibration import MeasuredRun, likeness
from autoplan.cost.estimate import estimate
from autoplan.readers.calibration import ANOTHER_FRAMEWORK
from autoplan.runs.predictions import log_doubt
from autoplan.runs.runs import Run
from autoplan.spec.calibration import Calibration
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.problem import Problem

MIN_RUNS = 15  # of a framework on a generation, for a calibration
# log(measured / predicted) of runs before anything was changed for them: blind ones at 52dd93eb, of round 5 at
# 64938afe, of round 6 at 8d046304, of later rounds at the commit that docs/blind-rounds.md names; others at 0d6b68c5.
FIRST_ERRORS = Path(__file__).with_name("first_errors.csv")
ROUNDS = Path(__file__).with_name("rounds.csv")  # in which a source was first predicted
BLIND = Path(__file__).with_name("blind_runs.csv")
FINETUNED = Path(__file__).with_name("finetuning_runs.csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that finished, with its estimate."""

    run: Run
    source: str
    measured: MeasuredRun
    cost: CostEstimate
    doubt: float  # logarithm of its step under the framework that it may as well have had; 0: none
    first_error: float | None = None  # log(measured / predicted) as first predicted, where that was kept
    round: int | None = None  # in which it was first predicted
    is_blind: bool = False  # predicted before its answer was looked at

    @property
    def problem(self) -> Problem:
        """The problem of the run."""
        return self.measured.problem

    @property
    def key(self) -> tuple[str, str]:
        """Framework and generation of devices, which share a calibration."""
        return self.problem.framework.calibration_name, self.problem.cluster.device.generation

    @property
    def is_similar(self) -> bool:
        """Return whether the run is of a framework that is priced as another one."""
        return self.problem.calibration.name == ANOTHER_FRAMEWORK

    @property
    def log_error(self) -> float:
        """Return log(measured / predicted)."""
        return float(np.log(self.measured.step_s / self.cost.step_s[0]))

    @property
    def nearer_error(self) -> float:
        """Return log(measured / predicted) of the framework in doubt that comes nearer."""
        return min(self.log_error, self.log_error - self.doubt, key=abs)


def read_cases(path: Path, runs: Sequence[Run]) -> list[Case]:
    """The finished runs with a price."""
    finished = []
    with FIRST_ERRORS.open(encoding="utf-8", newline="") as file:
        first_errors = {row["id"]: float(row["log_error"]) for row in csv.DictReader(file)}
    with ROUNDS.open(encoding="utf-8", newline="") as file:
        rounds = {row["source"]: int(row["round"]) for row in csv.DictReader(file)}
    for run, row in with_answers(path, runs):
        if run.problem and run.plan and row["status"] == "ok" and row["step_time_s"]:
            measured = MeasuredRun(problem=run.problem, plan=run.plan, step_s=float(row["step_time_s"]))
            cost = estimate(run.problem, run.problem.batch([run.plan]))
            doubt = log_doubt(run, cost)
            finished.append(
                Case(
                    run=run,
                    source=source_of(run),
                    measured=measured,
                    cost=cost,
                    doubt=doubt,
                    first_error=first_errors.get(run.id),
                    round=rounds.get(source_of(run)) if run.id in first_errors else None,
                )
            )
    return finished


def by_key(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    """The cases of every framework on every generation."""
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.key].append(case)
    return dict(sorted(groups.items()))


def calibrations(cases: Sequence[Case]) -> dict[str, Calibration]:
    """The calibration of every framework on a generation with enough runs, by name, with no spread of time.

    Spreads of memory are those that ship.
    """
    return {
        "-".join(key): _calibration(key, own)
        for key, own in by_key([case for case in cases if not case.is_similar and not case.is_blind]).items()
        if len(own) >= MIN_RUNS
    }


def _calibration(key: tuple[str, str], own: Sequence[Case]) -> Calibration:
    errors = np.array([case.log_error for case in own])
    median = 100 * float(np.median(np.abs(np.expm1(errors))))
    sources = sorted({case.source for case in own})
    known_runs = likeness([case.problem for case in own], [case.cost for case in own])
    del known_runs["exposed_share"]  # up to which spreads of its own would hold
    return Calibration(
        name=" on ".join(key),
        **known_runs,
        memory_spread=own[0].problem.calibration.memory_spread,
        sources=(f"{len(own)} runs ({', '.join(sources)}): median error {median:.1f} %",),
    )
