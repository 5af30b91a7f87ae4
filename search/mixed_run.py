"""Search for the set of parts of a mixed cluster that serves a run best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoplan.base.errors import InputError, NoPlanError
from autoplan.search.objectives import Objective, Run, costs_of, figures, least_figures
from autoplan.search.sizes import NO_PROGRESS, TOO_SLOW, why_slow
from autoplan.search.study import Progress
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.mixed_result import MixedResult, MixedRun, PartsOutcome

MORE_NODES = "a part more nodes in --cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsResult:
    """The problem on the best parts, its plans with the gap in the objective, and the figures on all sets of parts."""

    problem: MixedProblem
    result: MixedResult
    report: MixedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartsPlans:
    """The plans on a set of parts, and a lower bound on the first objective of any of them."""

    problem: MixedProblem
    result: MixedResult | None  # None: a run makes no progress
    outcome: PartsOutcome
    least: float = math.inf


def search_parts(
    problem: MixedProblem,
    find: Callable[[MixedProblem], MixedResult],
    objectives: Sequence[Objective],
    run: Run,
    progress: Progress | None = None,
) -> PartsResult | MixedResult:
    """Find the parts and the plan that are best in the first objective, within the limits of the run.

    Returns the result on all parts if no parts have a plan; NoPlanError if no plan is within the limits.
    """
    numbers, tried = range(len(problem.cluster.parts)), list[_PartsPlans]()
    sets = [used for size in numbers for used in itertools.combinations(numbers, size + 1)]
    for used in sets:
        tried.append(_plans_on(problem.only(used), find, objectives, run))
        if progress:
            progress(len(tried), len(sets))
    outcomes = [plans.outcome for plans in tried]
    usable = [plans for plans in tried if plans.result and plans.outcome.figures and not plans.outcome.why]
    if not usable:
        if slow := [(outcome.parts, outcome.figures) for outcome in outcomes if outcome.figures]:
            proven = (plans.result.certificate.gap == 0 for plans in tried if plans.result and plans.outcome.figures)
            raise NoPlanError(why_slow(slow, run, unit="set of parts", more=MORE_NODES, is_least=all(proven)))
        if tried[-1].result is None:  # this raises the reason, on all parts together
            run.reliability.goodput(problem.cluster.num_devices)
        assert tried[-1].result is not None
        return tried[-1].result

    def order(plans: _PartsPlans) -> tuple[bool, tuple[float, ...]]:
        assert plans.result
        assert plans.outcome.figures
        return plans.result.ranked[0].verdict != "fits", costs_of(objectives, plans.outcome.figures)

    best = min(usable, key=order)
    assert best.result
    gap = max(1 - min(plans.least for plans in tried) / order(best)[1][0], 0.0)
    report = MixedRun(
        objectives=tuple(objective.name for objective in objectives), best=best.outcome, outcomes=tuple(outcomes)
    )
    certificate = replace(best.result.certificate, gap=gap, best_in=report.objectives[0])
    return PartsResult(problem=best.problem, result=replace(best.result, certificate=certificate), report=report)


def _plans_on(
    problem: MixedProblem, find: Callable[[MixedProblem], MixedResult], objectives: Sequence[Objective], run: Run
) -> _PartsPlans:
    """Return the plans on all parts of the problem, the best in the objectives first.

    For given parts all objectives but energy grow with the step time, so that the fastest plan is the best one.
    """
    outcome = PartsOutcome(parts=problem.cluster.sizes, step_s=None, figures=None, why="no plan fits")
    try:
        run.reliability.goodput(problem.cluster.num_devices)
    except InputError:
        return _PartsPlans(problem=problem, result=None, outcome=replace(outcome, why=NO_PROGRESS))
    result = find(problem)
    if not result.ranked:
        return _PartsPlans(problem=problem, result=result, outcome=outcome, least=math.inf if result.is_empty else 0.0)
    pace = result.ranked[0].s_per_sequence * (1 - result.certificate.gap)
    floor = least_figures(problem, run, seconds_per_sequence=pace, memory_bytes=result.ranked[0].memory_bytes)
    ranked = sorted(result.ranked, key=lambda cost: costs_of(objectives, figures(problem, run, cost)))
    best = figures(problem, run, ranked[0])
    return _PartsPlans(
        problem=problem,
        result=replace(result, ranked=tuple(ranked)),
        outcome=replace(outcome, step_s=ranked[0].step_s, figures=best, why="" if run.admits(best) else TOO_SLOW),
        least=costs_of(objectives, floor)[0] if run.admits(floor) else math.inf,
    )
