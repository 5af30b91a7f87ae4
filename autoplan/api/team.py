"""Overview of a team's timing database: its coverage, comparisons of hosts and days, and what plans lack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from autoplan.api.plan_files import read_plans
from autoplan.api.timings import opened_store, with_timings
from autoplan.base.errors import InputError
from autoplan.cost.served import needed_times
from autoplan.report.page.team import team_page
from autoplan.spec.team_overview import PlanNeeds, TeamOverview
from autoplan.spec.timing import NO_TIMINGS


def overview(db: str | None = None, plans: Sequence[str | Path] = ()) -> TeamOverview:
    """Return the coverage of the database per machine, comparisons of hosts and days, and what plan files lack."""
    with opened_store(db, writable=False) as store:
        report = store.overview(f"{datetime.now(UTC):%Y-%m-%d}")
    return replace(report, plans=tuple(_needs(path, db) for path in plans))


def page_of(report: TeamOverview) -> str:
    """Return a self-contained HTML page of an overview: it loads nothing."""
    return team_page(report)


def _needs(path: str | Path, db: str | None) -> PlanNeeds:
    """Return how the database serves the times that the price of a plan looks up."""
    result = read_plans(path)
    problem = replace(result.problem, timings=NO_TIMINGS)
    with suppress(InputError):  # the database has no times of its device: all are missing
        problem = with_timings(problem, "db", db)
    usable = problem.framework.profiled_operations
    served: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for need in needed_times(problem, result.plan):
        if need.served != "not measured" or need.operation in usable:
            served[need.served] += 1
            if need.served == "not measured":
                missing[f"{need.operation} {need.dtype}"] += 1
    return PlanNeeds(
        path=str(path),
        plan=f"{problem.model.name} on {problem.cluster.num_devices:,} {problem.cluster.device.name}: "
        f"{result.plan.describe()}",
        machine=problem.timings.origin.machine,
        served=dict(served),
        missing=dict(missing.most_common()),
    )
