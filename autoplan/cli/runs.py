"""How does a run of a plan get into the timing database?"""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoplan.plan import ParallelPlan
    from autoplan.problem import Problem
    from autoplan.trainer.task import Predicted, Report
    from profiler.record import Fingerprint


class RunKeeper:
    """Adds runs to the database at `url`, which is opened, and made, before anything runs."""

    def __init__(self, url: str | None) -> None:
        from profiler.store import open_store

        self._url = url
        open_store(url).close()

    def keep(
        self, problem: Problem, plan: ParallelPlan, predicted: Predicted, report: Report, *, log_of: str = ""
    ) -> None:
        """Add a run that ended well; `log_of` is the framework whose log told, blank for the built-in trainer."""
        from profiler.record import MOST_SAMPLES

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
        self, problem: Problem, plan: ParallelPlan, predicted: Predicted, reason: str, *, is_oom: bool
    ) -> None:
        """Add a run of a user's program that failed."""
        from autoplan.units import cleaned

        self._add(
            problem,
            plan,
            _on_cluster(problem),
            status="oom" if is_oom else "failed",
            reason=cleaned(reason),
            predicted_s=predicted.step_s,
            source="log",
        )

    def _add(self, problem: Problem, plan: ParallelPlan, machine: Fingerprint, **what: Any) -> None:
        from autoplan.cli.profile import _user
        from autoplan.units import cleaned
        from profiler.runs import RunRecord
        from profiler.store import open_store

        run = RunRecord(
            fingerprint=machine,
            framework=problem.framework.name,
            model=problem.model,
            training=problem.training,
            plan=plan,
            measured_by=_user(),
            host=cleaned(socket.gethostname()),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **what,
        )
        with open_store(self._url) as store:
            store.add([run])


def _here(problem: Problem) -> Fingerprint:
    """The machine of the built-in trainer, whose ranks run beside this program."""
    from profiler.environment import own_fingerprint

    return replace(own_fingerprint(), num_hosts=problem.cluster.num_nodes)


def _on_cluster(problem: Problem) -> Fingerprint:
    """The machine of a program that may run elsewhere: this one if it has the plan's device, else what is known."""
    from importlib.util import find_spec

    from profiler.record import Fingerprint

    cluster = problem.cluster
    if find_spec("torch") and find_spec("psutil"):
        here = _here(problem)
        if here.device == cluster.device.name:
            return here
    return Fingerprint(
        device=cluster.device.name,
        memory_bytes=int(cluster.device.memory_bytes),
        devices_per_node=cluster.devices_per_node,
        num_hosts=cluster.num_nodes,
    )
