"""Search over numbers of nodes: the proven best plans of each size for the objectives of a run.

A size is skipped if the bound on its plans is too slow for the run, or no better than a plan of another size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.units import counted, format_days, format_tokens
from autoplan.cost.input_rate import with_input
from autoplan.search.advice import check_result, why_empty
from autoplan.search.bounds import group_bounds
from autoplan.search.excluded_options import with_excluded_options
from autoplan.search.findings import RISKY
from autoplan.search.frontier import limit_bytes
from autoplan.search.objectives import Measure, Objective, Run, costs_of, figures, least_figures, measures_of
from autoplan.search.placement import place_best
from autoplan.search.ranking import TIE
from autoplan.search.simple import simplest_first
from autoplan.search.space import Space
from autoplan.search.study import Progress, Shared, search
from autoplan.spec.problem import Problem
from autoplan.spec.run_report import RunFigures, RunPlan, RunReport, SizeOutcome
from autoplan.spec.search_result import Certificate, RankedPlan, SearchResult

Costs = tuple[float, ...]
MakeProblem = Callable[[int], tuple[Problem, Space]]

TOO_SLOW = "too slow for the run"
NO_PROGRESS = "no progress between failures"


def size_grid(low: int, high: int) -> tuple[int, ...]:
    """Return numbers of nodes from `low` to `high` with many divisors: 4 to 7 times a power of two, and both ends."""
    sizes = {quarters * 2**octave // 4 for octave in range(high.bit_length()) for quarters in (4, 5, 6, 7)}
    return tuple(sorted({low, high, *(size for size in sizes if low <= size <= high)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSearchResult:
    """The problem of the best size and its plans, best first, and a report of all sizes."""

    problem: Problem
    plans: tuple[RankedPlan, ...]
    certificate: Certificate
    report: RunReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A size before its search."""

    num_nodes: int
    problem: Problem
    space: Space
    least: RunFigures | None  # None: no plan can fit, or no plan can make progress
    costs: Costs
    refusal: str = ""  # why no plan can make progress


def search_sizes(
    sizes: Iterable[int],
    make: MakeProblem,
    objectives: Sequence[Objective],
    run: Run,
    progress: Progress | None = None,
    *,
    barred: Collection[str] = (),
    shared: Shared | None = None,
    is_simple: bool = False,
) -> SizeSearchResult:
    """Find the plans over all sizes that are best in the objectives and within the limits of the run.

    For one objective this is one plan, for several the exact front.  With `is_simple` the plan of a size is the
    simplest that is about as fast as the fastest.  Raises NoPlanError if no size has such a plan.
    Options excluded from spaces are tried except those in `barred` (`with_excluded_options`).  Workers of a `shared`
    search process sizes in the same order and share the search of each, with one study per size.
    """
    measures = measures_of(objectives, run)
    waiting = sorted((_bounded(nodes, make, objectives, run) for nodes in sizes), key=lambda size: size.costs)
    results: dict[int, SearchResult] = {}
    outcomes, front = [], list[RunPlan]()
    for at, size in enumerate(waiting):
        if why := _ruled_out(size, front, objectives, run):
            outcomes.append(SizeOutcome(num_nodes=size.num_nodes, best=None, least=size.least, why=why))
        else:
            results[size.num_nodes] = result = _searched(size, measures, barred, shared, is_simple=is_simple)
            plans = result.ranked[:1] if measures == ("time",) else result.ranked
            run_plans = [_run_plan(size, run, plan) for plan in plans]
            outcomes.append(_outcome(size, run_plans, objectives, run))
            front = _front([*front, *(plan for plan in run_plans if run.admits(plan.figures))], objectives)
        if progress:
            progress(at + 1, len(waiting))
    outcomes.sort(key=lambda outcome: outcome.num_nodes)
    if not front:
        raise NoPlanError(_why_none(waiting, results, outcomes, run))
    best = front[0]
    chosen = next(size for size in waiting if size.num_nodes == best.num_nodes)
    report = RunReport(
        objectives=tuple(objective.name for objective in objectives),
        best=best,
        front=tuple(front),
        sizes=tuple(outcomes),
    )
    result = results[best.num_nodes]
    return SizeSearchResult(
        problem=chosen.problem,
        plans=result.rivals if measures == ("time",) else (best.plan,),
        certificate=result.certificate,
        report=report,
    )


def _searched(
    size: _Size, measures: tuple[Measure, ...], barred: Collection[str], shared: Shared | None, *, is_simple: bool
) -> SearchResult:
    """Search one size, and try the options that its space excludes."""
    space = size.space
    result = search(size.problem, size.space, measures=measures, shared=_of_size(shared, size))
    if measures == ("time",):
        result = place_best(size.problem, result)
    if result.ranked:
        space, result = with_excluded_options(size.problem, space, result, barred, measures=measures)
        if is_simple and measures == ("time",):
            result = simplest_first(size.problem, space, result)
    return result


def _run_plan(size: _Size, run: Run, plan: RankedPlan) -> RunPlan:
    return RunPlan(
        num_nodes=size.num_nodes, plan=with_input(size.problem, plan), figures=figures(size.problem, run, plan)
    )


def _of_size(shared: Shared | None, size: _Size) -> Shared | None:
    """Return the shared study of a size; default names already differ by size."""
    if shared is None or shared.name is None:
        return shared
    return replace(shared, name=f"{shared.name}-{size.num_nodes}-nodes")


def _bounded(nodes: int, make: MakeProblem, objectives: Sequence[Objective], run: Run) -> _Size:
    """Return a size with lower bounds on the figures of its plans."""
    problem, space = make(nodes)
    least, costs = None, (math.inf,) * len(objectives)
    try:
        run.reliability.goodput(problem.cluster.num_devices)
    except InputError as error:  # for this many devices; fewer may make progress
        return _Size(num_nodes=nodes, problem=problem, space=space, least=least, costs=costs, refusal=str(error))
    groups, _ = space.groups(space.cells())
    if len(groups):
        time, least_bytes = group_bounds(problem, space, groups)
        usable = np.flatnonzero(least_bytes <= limit_bytes(problem, RISKY))
        if len(usable):
            least = least_figures(
                problem,
                run,
                seconds_per_sequence=float((time / groups.global_batch)[usable].min()),
                memory_bytes=float(least_bytes[usable].min()),
            )
            costs = costs_of(objectives, least)
    return _Size(num_nodes=nodes, problem=problem, space=space, least=least, costs=costs)


def _ruled_out(size: _Size, front: Sequence[RunPlan], objectives: Sequence[Objective], run: Run) -> str:
    """Return why a size need not be searched; blank if it must be."""
    if size.refusal:
        return NO_PROGRESS
    if size.least is None:
        return "no plan fits" if size.space.cells() else why_empty(size.space)
    if not run.admits(size.least):
        return TOO_SLOW
    costs = [costs_of(objectives, plan.figures) for plan in front if plan.plan.verdict == "fits"]
    if any(_is_no_worse(rival, size.costs) for rival in costs):
        return "no better than a plan already found"
    return ""


def _outcome(size: _Size, front: Sequence[RunPlan], objectives: Sequence[Objective], run: Run) -> SizeOutcome:
    if not front:
        return SizeOutcome(num_nodes=size.num_nodes, best=None, least=size.least, why="no plan fits")
    usable = [plan for plan in front if run.admits(plan.figures)] or front
    best = min(usable, key=lambda plan: costs_of(objectives, plan.figures))
    return SizeOutcome(
        num_nodes=size.num_nodes,
        best=best,
        least=size.least,
        why="" if run.admits(best.figures) else TOO_SLOW,
    )


def _is_no_worse(costs: Costs, reference: Costs) -> bool:
    """Return whether no cost is above its counterpart, apart from ties."""
    return all(cost <= reference_cost * (1 + TIE) for cost, reference_cost in zip(costs, reference, strict=True))


def _front(plans: Iterable[RunPlan], objectives: Sequence[Objective]) -> list[RunPlan]:
    """Return the undominated plans, sorted by the first objective, of the best verdict and on the fewest nodes."""
    front: list[tuple[Costs, RunPlan]] = []
    plans = list(plans)
    safe = [plan for plan in plans if plan.plan.verdict == "fits"] or plans
    valued = [(costs_of(objectives, plan.figures), plan) for plan in safe]
    valued.sort(key=lambda pair: (_rounded(pair[0]), pair[1].num_nodes))
    for costs, plan in valued:
        if not any(_is_no_worse(front_costs, costs) for front_costs, _ in front):
            front.append((costs, plan))
    return [plan for _, plan in front]


def _rounded(costs: Costs) -> tuple[float, ...]:
    return tuple(round(math.log(cost) / TIE) if 0 < cost < math.inf else cost for cost in costs)


def _why_none(
    sizes: Sequence[_Size], results: dict[int, SearchResult], outcomes: Sequence[SizeOutcome], run: Run
) -> str:
    """Explain why no size has a plan for the run, with the way out."""
    if slow := [outcome for outcome in outcomes if outcome.why == TOO_SLOW]:
        of_sizes = [(counted(size.num_nodes, "node"), size.best.figures if size.best else size.least) for size in slow]
        return why_slow([(size, figures) for size, figures in of_sizes if figures], run)
    if all(size.refusal for size in sizes):
        return (
            f"{min(sizes, key=lambda size: size.num_nodes).refusal}: give fewer nodes, or shorter times that you know"
        )
    largest = max((size for size in sizes if not size.refusal), key=lambda size: size.num_nodes)
    result = results.get(largest.num_nodes) or search(largest.problem, largest.space)
    check_result(largest.problem, largest.space, result)
    raise AssertionError("a plan that is not too slow for the run is an answer")


def why_slow(
    of_sizes: Sequence[tuple[str, RunFigures]],
    run: Run,
    *,
    unit: str = "size",
    more: str = "more nodes",
    is_least: bool = True,
) -> str:
    """Explain why no size is fast enough for a run, from the figures of the best plan on each, or bounds on them.

    A `unit` is what was compared, `more` the way to a larger one; with `is_least` no plan has better figures.
    """
    takes = [(figures.run_s, figures.device_hours, size) for size, figures in of_sizes if figures.run_s]
    if not takes:
        size, figures = of_sizes[-1]
        lasts_s = figures.budget_s or 0.0
        return (
            f"{run.device_hours:,.0f} device hours last {format_days(lasts_s)} on {size}, "
            f"the deadline is {format_days(run.deadline_s or 0.0)}: give {more}, or fewer hours"
        )
    fastest, leanest = min(takes), min(takes, key=lambda took: took[1] or math.inf)
    demands, ways, or_more = [], [], " or more" * is_least
    if run.deadline_s is not None:
        demands.append(
            f"the deadline is {format_days(run.deadline_s)}, the fastest {unit} ({fastest[2]}) takes "
            f"{format_days(fastest[0])}{or_more}"
        )
        ways += [more, "a later deadline"]
    if run.device_hours is not None:
        demands.append(
            f"there are {run.device_hours:,.0f} device hours, the {unit} that needs least "
            f"({leanest[2]}) takes {leanest[1]:,.0f}{or_more}"
        )
        ways.append("more device hours")
    return (
        f"no {unit} trains {format_tokens(run.tokens or 0.0)} tokens as asked: {'; '.join(demands)}: "
        f"give {', '.join(ways)} or fewer tokens"
    )
