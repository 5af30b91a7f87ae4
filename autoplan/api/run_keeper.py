"""Runs for the timing database, with what disturbed them, and the machine that they ran on."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from autoplan.api.calibrations import described_machine
from autoplan.base.errors import AutoplanError, RunFailedError, StoreError
from autoplan.base.units import cleaned
from autoplan.base.user import user_name
from autoplan.profiler.record import MAX_SAMPLES, Fingerprint
from autoplan.profiler.run_record import RunRecord
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.trainer.task import Command, PredictedRun, RunFile

if TYPE_CHECKING:  # Optuna, which a run does not need
    from autoplan.profiler.machine.watch import DeviceSample
    from autoplan.search.tune import Tuning


class RunKeeper:
    """Adds runs to the database at `url`, which is opened, and made, before anything runs."""

    def __init__(self, url: str | None) -> None:
        from autoplan.profiler.store import open_store  # brings SQLAlchemy, which only stored runs need

        self._open = partial(open_store, url)
        self._open().close()
        self._samples: Sequence[DeviceSample] = ()

    @contextmanager
    def followed(
        self, problem: Problem, plan: ParallelPlan, predicted: PredictedRun, *, is_own: bool
    ) -> Iterator[None]:
        """Watch the devices of this host during a run, the trainer's (`is_own`) or not, and add it if it fails."""
        from autoplan.profiler.machine.watch import Watch

        try:
            with Watch() as watch:
                yield
        except RunFailedError as error:
            try:
                self._keep_failure(problem, plan, predicted, error, is_own=is_own)
            except StoreError as unkept:
                raise AutoplanError(f"{error}; and this was not stored: {unkept}") from None
            raise
        self._samples = watch.samples

    def keep(self, problem: Problem, run: RunFile) -> str:
        """Add a finished run; return what disturbed it, as no calibration uses a disturbed run."""
        from autoplan.profiler.machine.watch import conditions

        seen_conditions, disturbance = conditions(self._samples, run.measured.other_load)
        log_of = run.task.log_of if isinstance(run.task, Command) else ""
        self._add(
            problem,
            run.task.plan,
            _on_cluster(problem) if log_of else _own_machine(problem),
            step_s=run.measured.step_s[-MAX_SAMPLES:],
            peak_bytes=max(run.measured.peak_bytes, default=None),
            predicted_s=run.predicted.step_s,
            status="contaminated" if disturbance else "ok",
            reason=disturbance,
            conditions=seen_conditions,
            source=f"log of {log_of}" if log_of else "built-in trainer",
        )
        return disturbance

    def keep_trials(self, problem: Problem, tuning: Tuning) -> None:
        """Add the trials whose jobs left only a log, if it has step times or an out-of-memory error."""
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

    def _keep_failure(
        self,
        problem: Problem,
        plan: ParallelPlan,
        predicted: PredictedRun,
        error: RunFailedError,
        *,
        is_own: bool,
    ) -> None:
        self._add(
            problem,
            plan,
            _own_machine(problem) if is_own else _on_cluster(problem),
            status="oom" if error.is_out_of_memory else "failed",
            reason=cleaned(str(error)),
            predicted_s=predicted.step_s,
            source="built-in trainer" if is_own else "log",
        )

    def _add(self, problem: Problem, plan: ParallelPlan, machine: Fingerprint, **measured_fields: Any) -> None:
        run = RunRecord(
            fingerprint=machine,
            framework=problem.framework.name,
            model=problem.model,
            training=problem.training,
            plan=plan,
            measured_by=user_name(),
            host=cleaned(socket.gethostname()),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **measured_fields,
        )
        with self._open() as store:
            store.add([run])


def _own_machine(problem: Problem) -> Fingerprint:
    """Return the machine of the built-in trainer, whose ranks run beside this program."""
    from autoplan.profiler.machine.environment import own_fingerprint  # brings torch

    return replace(own_fingerprint(), num_hosts=problem.cluster.num_nodes)


def _on_cluster(problem: Problem) -> Fingerprint:
    """Return the machine of a program: this one if it has the plan's device, else that of the cluster file."""
    if find_spec("torch") and find_spec("psutil"):
        machine = _own_machine(problem)
        if machine.device == problem.cluster.device.name:
            return machine
    return described_machine(problem.cluster)
