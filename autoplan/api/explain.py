"""Explanations: where a plan's time and memory go, what limits it, and why others lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from autoplan.api.plan_files import load_mixed_plan, read_plans
from autoplan.api.results import MixedPlanResult, PricedPlans, Result, Table
from autoplan.base.files import encode, is_file
from autoplan.search import explain as search_explain
from autoplan.search import mixed_explanation
from autoplan.spec.explanation import Explanation, MixedExplanation, Versus

Explained = TypeVar("Explained", Explanation, MixedExplanation)


class _Reasons(Result, Generic[Explained]):
    """Reasons why a plan takes as long as it does."""

    __slots__ = ()
    explanation: Explained

    def table(self) -> Table:
        """Return the terms of the step time in seconds, longest first."""
        terms = sorted(self.explanation.plan.terms_s.items(), key=lambda term: -term[1])
        step_s = self.explanation.plan.step_s
        return Table(columns=("term", "seconds", "share"), rows=tuple((name, s, s / step_s) for name, s in terms))

    def to_json(self) -> str:
        """Return the explanation as JSON."""
        return encode(self.explanation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainResult(_Reasons[Explanation]):
    """Explanation of a plan's step time: what limits it, what faster plans need, and why others lost."""

    explained: PricedPlans
    explanation: Explanation

    @property
    def headline(self) -> str:
        """The plan, its step time, and what rules out faster plans."""
        return f"{self.explained.headline}; {'; '.join(self.explanation.binds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedExplainResult(_Reasons[MixedExplanation]):
    """Explanation of the step time of a plan on a mixed cluster, and why others lost."""

    explained: MixedPlanResult
    explanation: MixedExplanation

    @property
    def headline(self) -> str:
        """The plan and what it takes."""
        return self.explained.headline


def explain(
    plan: PricedPlans | str | Path, *, versus: PricedPlans | str | Path | None = None, db: str | None = None
) -> ExplainResult:
    """Explain where a plan's time and memory go, what limits it, what faster plans would need, and why others lost.

    `plan` is a result or the path of a plan file.  `versus` is another plan to compare with, or changes to this one
    ("tp=4,pp=8").  The explanation considers all plans that differ in one or two choices, legal or not.

    Raises InputError for a file or change that cannot be used, NoPlanError if the other plan cannot be priced.
    """
    explained = plan if isinstance(plan, PricedPlans) else read_plans(plan, db=db)
    comparison = None if versus is None else _versus(explained, versus, db)
    explanation = search_explain.explain(explained.problem, explained.file, comparison)
    return ExplainResult(explained=explained, explanation=explanation)


def _versus(explained: PricedPlans, versus: PricedPlans | str | Path, db: str | None) -> Versus:
    """Compare with the plan of another result or file, with its own problem, or with this one after changes."""
    problem, best = explained.problem, explained.plan
    if not isinstance(versus, PricedPlans) and not is_file(Path(versus)):
        changes = str(versus)
        return search_explain.versus(problem, best, changes, search_explain.changed(problem, best, changes), problem)
    versus_plans = versus if isinstance(versus, PricedPlans) else read_plans(versus, db=db)
    name = "the other plan" if isinstance(versus, PricedPlans) else str(versus)
    return search_explain.versus(problem, best, name, versus_plans.plan, versus_plans.problem)


def explain_mixed(plan: MixedPlanResult | str | Path) -> MixedExplainResult:
    """Explain a plan on a mixed cluster, like `explain`."""
    explained = plan if isinstance(plan, MixedPlanResult) else load_mixed_plan(plan)
    explanation = mixed_explanation.explain_mixed(explained.problem, explained.file)
    return MixedExplainResult(explained=explained, explanation=explanation)
