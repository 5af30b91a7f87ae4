"""Storing of measured runs in the timing database."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from autoplan.api.calibrations import described_machine
from autoplan.base.processes import CrewError
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.jobs.program import ProgramError
from autoplan.profiler.record import MOST_SAMPLES, Fingerprint
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store import open_store
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.trainer.task import PredictedRun, TrainingReport

if TYPE_CHECKING:  # Optuna, which a run does not need
    from autoplan.search.tune import Tuning


class RunKeeper:
    """Adds runs to the database at `url`, which is opened, and made, before anything runs."""

    def __init__(self, url: str | None) -> None:
        self._url = url
        open_store(url).close()

    def keep(
        self, problem: Problem, plan: ParallelPlan, predicted: PredictedRun, report: TrainingReport, *, log_of: str = ""
    ) -> None:
        """Add a run that ended well; `log_of` is the framework of its log, blank for the built-in trainer."""
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
        predicted: PredictedRun,
        error: CrewError | ProgramError,
        *,
        is_own: bool,
    ) -> None:
        """Add a run that failed: `is_own` says whether of the built-in trainer or of a user's program."""
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
    """Return the machine of the built-in trainer, whose ranks run beside this program."""
    from autoplan.profiler.machine.environment import own_fingerprint  # brings torch

    return replace(own_fingerprint(), num_hosts=problem.cluster.num_nodes)


def _on_cluster(problem: Problem) -> Fingerprint:
    """Return the machine of a program that may run elsewhere: this one if it has the plan's device, else as told."""
    if find_spec("torch") and find_spec("psutil"):
        own = _here(problem)
        if own.device == problem.cluster.device.name:
            return own
    return described_machine(problem.cluster)
