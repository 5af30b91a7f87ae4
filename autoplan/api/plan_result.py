"""The result of a search, of an estimate or of a plan file: it is explained, exported and drawn by its methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.api.plan_files import load_mixed_plan, read_plans
from autoplan.api.results import MixedPlanResult, PricedPlans
from autoplan.base.files import read_table, write_text

if TYPE_CHECKING:
    from autoplan.api.explain import ExplainResult
    from autoplan.api.export import ExportResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(PricedPlans):
    """Plans for one problem on a cluster of equal nodes, best first: of a search, of an estimate or of a plan file.

    `file` is the content of plan.json: the plan, what it costs by term and by pipeline stage, why it is the best.
    `warnings` say what a user should know before running the plan.
    """

    def explain(self, versus: str | Path | PricedPlans | None = None) -> ExplainResult:
        """Say where the time and memory of the best plan go and why others lost: `autoplan.explain`."""
        from autoplan.api.explain import explain  # brings what looks at other plans

        return explain(self, versus=versus)

    def export(self, to: str, *, launcher: str = "torchrun", nearest: bool = False, **options: str) -> ExportResult:
        """Return the files that start the best plan: `autoplan.export`."""
        from autoplan.api.export import export  # brings the writers of all frameworks

        return export(self, to=to, launcher=launcher, nearest=nearest, **options)

    def report(self, path: str | Path = "report.html", *, force: bool = False) -> None:
        """Write a self-contained HTML page about the answer; what the plan file does not hold is searched again.

        Raises InputError where the file exists and `force` is not set, or cannot be written.
        """
        from autoplan.api.page import page_of  # brings what draws

        write_text(Path(path), page_of(self), force=force)


def load_plan(path: str | Path, *, db: str | None = None) -> PlanResult:
    """Return the plans of a plan file, of a cluster of equal nodes.

    Measured times that it rests on are in it; where the timing database `db` holds others by now, a StoreWarning says
    so.  Those of a file that is older than that are read from the database.  Raises InputError where there is no such
    file, it is of another kind or version, or the measured times are not there.
    """
    plans = read_plans(path, db=db)
    return PlanResult(file=plans.file, problem=plans.problem)


def load_any_plan(path: str | Path, *, db: str | None = None) -> PlanResult | MixedPlanResult:
    """Return the plans of a plan file, of whatever cluster."""
    return load_mixed_plan(path) if "mixed_schema_version" in read_table(Path(path)) else load_plan(path, db=db)
