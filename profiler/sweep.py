"""Sweep: measures ranked tasks within a budget, and reports what these ranks cannot show of a cluster."""

from __future__ import annotations

import datetime
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from autoplan.base.processes import CrewError, undisturbed
from autoplan.profiler.crew import Crew
from autoplan.profiler.protocol import Hello, Outcome, Task
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.tasks import RankedTask, TaskKey
from autoplan.spec.operations import Operation
from autoplan.topology.cluster import ClusterSpec

MAX_RESTARTS = 3  # consecutive restarts
WORTH_ANOTHER = ("contaminated", "unstable")  # caused by the state of the machine, not by the operation
MAX_AGAIN, MIN_AGAIN_S = 0.3, 30.0  # time for repetitions: a share of the time so far, but at least so many seconds
SLOW_DEVICE, SLOW_LINK = 1.05, 1.15  # ratios to the median that are reported; 5 % is usual (`modelling` C1)


class Store(Protocol):
    """Interface that a sweep needs of a timing database."""

    def measured_keys(self, fingerprint: Fingerprint, num_visits: int = 1) -> Collection[TaskKey]:
        """Return the keys of tasks that settled this often on this machine."""

    def add(self, records: Iterable[Record]) -> object:
        """Store all records, or none and raise an error."""


@dataclass(slots=True)
class Progress:
    """State of a sweep."""

    total: int
    outcomes: dict[Task, Outcome] = field(default_factory=dict)  # a settled outcome of each task, or its last one
    num_visits: int = 0  # tasks visited so far
    left_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def num_left(self) -> int:
        """Number of tasks that were not tried."""
        return self.total - len(self.outcomes)

    def counts(self) -> dict[Operation, Counter[str]]:
        """Count the statuses in which measurements of each operation ended."""
        counts: dict[Operation, Counter[str]] = {}
        for task, outcome in self.outcomes.items():
            counts.setdefault(task.operation, Counter())[outcome.status] += 1
        return counts


def outliers(hello: Hello) -> list[str]:
    """Describe devices and links that are slower than their peers; with two, the faster one is the reference."""

    def usual(values: Sequence[float]) -> float:
        return float(np.median(values)) if len(values) > 2 else min(values)

    outlying = []
    for rank, seconds in enumerate(hello.gemm_s):
        if (over := seconds / usual(hello.gemm_s)) > SLOW_DEVICE:
            name = f"rank {rank} on {hello.hosts[rank]}"
            outlying.append(f"{name}: matrix products take {100 * (over - 1):.0f} % longer than on the others")
    kinds: dict[bool, list[float]] = {}
    for (first, second), seconds in hello.links_s.items():
        kinds.setdefault(hello.hosts[first] == hello.hosts[second], []).append(seconds)
    for (first, second), seconds in hello.links_s.items():
        over = seconds / usual(kinds[hello.hosts[first] == hello.hosts[second]])
        if over > SLOW_LINK:
            ends = f"rank {first} on {hello.hosts[first]} and rank {second} on {hello.hosts[second]}"
            outlying.append(f"between {ends}: messages take {100 * (over - 1):.0f} % longer than on the other links")
    return outlying


def extrapolations(hello: Hello, cluster: ClusterSpec) -> list[str]:
    """Describe what these ranks cannot show of the cluster, and how that is priced instead."""
    remarks = []
    in_domain = cluster.levels[-1].num_devices
    num_domains = cluster.num_devices // in_domain
    name = "nodes" if in_domain == cluster.devices_per_node else "link domains"
    if num_domains > hello.num_domains == 1:
        remarks.append(f"groups over several {name} are not measured on one: they keep the reference")
    elif num_domains > hello.num_domains:
        remarks.append(
            f"groups over {hello.num_domains + 1} to {num_domains} {name} are scaled from those over "
            f"{hello.num_domains} and fewer"
        )
    if in_domain > hello.ranks_per_domain:
        over = ", and groups that leave it keep the reference" if num_domains > 1 else ""
        remarks.append(
            f"groups of {hello.ranks_per_domain + 1} to {in_domain} devices of a {name[:-1]} are scaled from those of "
            f"{hello.ranks_per_domain} and fewer{over}"
        )
    if hello.fingerprint.device != cluster.device.name:
        remarks.append(
            f"the cluster has {cluster.device.name}, this is {hello.fingerprint.device}: nothing here applies to it"
        )
    return remarks


@dataclass(slots=True)
class _Pace:
    """Ratio of actual to expected measurement time, by operation: a slow link shows only in its collectives."""

    expected_so_far_s: float = 0.0
    by_operation: dict[Operation, float] = field(default_factory=dict)

    def expected_s(self, ranked: RankedTask, elapsed_s: float) -> float:
        """Return how long a task will take, when others have taken `elapsed_s` together."""
        overall = elapsed_s / self.expected_so_far_s if self.expected_so_far_s else 1.0
        return ranked.expected_s * self.by_operation.get(ranked.task.operation, min(overall, 1.0))

    def learn(self, ranked: RankedTask, seconds: float | None) -> None:
        """Record how long a task took; None if it was lost."""
        self.expected_so_far_s += ranked.expected_s
        if seconds is not None:
            operation, pace = ranked.task.operation, seconds / ranked.expected_s
            self.by_operation[operation] = min(pace, self.by_operation.get(operation, pace))


def run(
    crew: Crew,
    hello: Hello,
    store: Store,
    planned: Sequence[RankedTask],
    *,
    budget_s: float,
    progress: Progress,
    advance: Callable[[Progress], None] = lambda progress: None,
    measured_by: str = "",
    num_visits: int = 1,
    visits_spoilt: bool = True,
) -> None:
    """Measure the planned tasks that fit into `budget_s`, and store each measurement immediately.

    Only the first call of an operation, which shows how long it takes here, may exceed the budget.

    Everything is measured `num_visits` times, once per round, so that minutes pass between two visits.  With
    `visits_spoilt`, measurements that were disturbed in the last round or did not settle are repeated at the end, for
    at most `MAX_AGAIN` of the time so far, because some machines are never quiet.  If ranks are lost, the task is
    stored as failed and the ranks are started again if possible.
    """
    began = time.monotonic()
    pace, restarts, has_seen_all = _Pace(), 0, False
    visits: Counter[Task] = Counter()
    queue = deque(planned)
    while queue:
        ranked = queue.popleft()
        elapsed = time.monotonic() - began
        if visits[ranked.task] == num_visits and not has_seen_all:
            budget_s, has_seen_all = min(budget_s, elapsed + max(MAX_AGAIN * elapsed, MIN_AGAIN_S)), True
        if elapsed + pace.expected_s(ranked, elapsed) > budget_s:
            continue
        lost: CrewError | None = None
        try:
            outcome = crew.ask(replace(ranked.task, left_s=budget_s - elapsed))
            restarts = 0
        except CrewError as error:
            outcome, lost = Outcome(status="failed", reason=str(error)), error
        with undisturbed():
            store.add([record_of(ranked.task, outcome, hello, measured_by)])
            before = progress.outcomes.pop(ranked.task, outcome)
            progress.outcomes[ranked.task] = before if before.status == "ok" else outcome
        visits[ranked.task] += 1
        progress.num_visits += 1
        is_spoilt = visits_spoilt and outcome.status in WORTH_ANOTHER
        if visits[ranked.task] < num_visits + is_spoilt and outcome.status != "failed":
            queue.append(ranked)
        progress.elapsed_s = time.monotonic() - began
        pace.learn(ranked, None if lost else progress.elapsed_s - elapsed)
        remaining_s = sum(later.expected_s for later in queue) * progress.elapsed_s / pace.expected_so_far_s
        progress.left_s = min(remaining_s, max(budget_s - progress.elapsed_s, 0.0))
        advance(progress)
        if lost is not None:
            restarts += 1
            if not crew.can_restart or restarts > MAX_RESTARTS:
                raise CrewError(f"{ranked.task}: {lost}; stored as failed; run the same command again for the rest")
            crew.stop()
            crew.start()


def record_of(task: Task, outcome: Outcome, hello: Hello, measured_by: str) -> Record:
    """Return the record of a new measurement."""
    measured_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # A second failure must get another key, although no measurement distinguishes it from the first.
    failed = {"failed_at": measured_at} if outcome.status == "failed" else {}
    return Record(
        fingerprint=hello.fingerprint,
        operation=task.operation,
        shape=task.shape,
        dtype=task.dtype,
        kernel=task.kernel,
        mode=task.mode,
        samples_s=outcome.samples_s,
        status=outcome.status,
        reason=outcome.reason,
        conditions={**outcome.conditions, **failed},
        measured_by=measured_by,
        host=hello.hosts[0],
        measured_at=measured_at,
    )
