"""The result of a search, an estimate or a plan file, with methods to explain, export and draw it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.api.plan_files import load_any_plan_file, mixed_problem_of, problem_of, read_plans
from autoplan.api.results import MixedPlanResult, PricedPlans
from autoplan.base.files import write_text
from autoplan.launch.names import DEFAULT_LAUNCHER
from autoplan.spec.plan_file import MixedPlanFile

if TYPE_CHECKING:
    from autoplan.api.explain import ExplainResult
    from autoplan.api.export import ExportResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(PricedPlans):
    """Plans for one problem on equal nodes, best first: the result of a search, an estimate or a plan file.

    `file` is the content of plan.json: the plan, its costs by term and by pipeline stage, and why it is the best.
    `warnings` lists what to know before running the plan.
    """

    def explain(self, versus: str | Path | PricedPlans | None = None) -> ExplainResult:
        """Explain where the time and memory of the best plan go and why others lost: `autoplan.explain`."""
        from autoplan.api.explain import explain  # brings what looks at other plans

        return explain(self, versus=versus)

    def export(
        self, to: str, *, launcher: str = DEFAULT_LAUNCHER, nearest: bool = False, **options: str
    ) -> ExportResult:
        """Return the launch files of the best plan: `autoplan.export`."""
        from autoplan.api.export import export  # brings the writers of all frameworks

        return export(self, to=to, launcher=launcher, nearest=nearest, **options)

    def report(self, path: str | Path = "report.html", *, force: bool = False) -> None:
        """Write a self-contained HTML page about the answer, and compute what the plan file does not contain.

        Raises InputError if the file exists without `force`, or cannot be written.
        """
        from autoplan.api.page import page_of  # brings what draws

        write_text(Path(path), page_of(self), force=force)


def load_plan(path: str | Path, *, db: str | None = None) -> PlanResult:
    """Return the plans of a plan file for a cluster of equal nodes.

    The file contains its measured timings; a StoreWarning says if the timing database `db` has different ones by now.
    Files from before they did are completed from the database.  Raises InputError if the file does not exist, has
    another kind or version, or its measured timings cannot be found.
    """
    plans = read_plans(path, db=db)
    return PlanResult(file=plans.file, problem=plans.problem)


def load_any_plan(path: str | Path, *, db: str | None = None) -> PlanResult | MixedPlanResult:
    """Return the plans of a plan file for any cluster."""
    file = load_any_plan_file(Path(path))
    if isinstance(file, MixedPlanFile):
        return MixedPlanResult(file=file, problem=mixed_problem_of(file))
    return PlanResult(file=file, problem=problem_of(file, db))
